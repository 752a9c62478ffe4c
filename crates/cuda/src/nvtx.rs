//! Ranges that Nsight's tools show and filter by: NVTX, version 3, of which this is the part that is used.
//!
//! A tool that watches a process names a library in `NVTX_INJECTION64_PATH`; its `InitializeInjectionNvtx2` is given a function
//! that returns tables by number, and writes its own functions to the places that these name (`nvtxDetail/nvtxTypes.h` and
//! `nvtxInit.h` of NVIDIA/NVTX). NVIDIA's crate of it needs libclang to build, which this must not.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

/// Functions of the modules `CORE`, `CUDA`, `OPENCL`, `CUDART`, `CORE2` and `SYNC`, which are numbered from 1, as are theirs; one more
/// than there are. Tools want to know of them all.
const COUNTS: [c_uint; 6] = [16, 9, 15, 7, 16, 7];

/// The most of them.
const FUNCTIONS: usize = 16;

/// Of the module `CORE`.
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

/// Where the tool writes its functions, by module.
static FUNCTIONS_OF_TOOL: [[AtomicPtr<c_void>; FUNCTIONS]; COUNTS.len()] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; FUNCTIONS] }; COUNTS.len()];

/// Pointers to those places, by function, and null after the last.
struct Places([[*const AtomicPtr<c_void>; FUNCTIONS + 1]; COUNTS.len()]);

// SAFETY: what they point to is static, and only the tool's start writes there.
unsafe impl Sync for Places {}

static PLACES: Places = {
    let mut places = [[ptr::null(); FUNCTIONS + 1]; COUNTS.len()];
    let mut index = 0;
    while index < COUNTS.len() * FUNCTIONS {
        let (module, function) = (index / FUNCTIONS, index % FUNCTIONS);
        if function > 0 && function < COUNTS[module] as usize {
            places[module][function] = &raw const FUNCTIONS_OF_TOOL[module][function];
        }
        index += 1;
    }
    Places(places)
};

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    functions: unsafe extern "C" fn(c_int, *mut *const *const AtomicPtr<c_void>, *mut c_uint) -> c_int,
}

static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), functions };

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct Version {
    size: usize,
    version: u32,
    reserved: u32,
    set_version_of_tool: extern "C" fn(u32),
}

static VERSION: Version = Version { size: size_of::<Version>(), version: 3, reserved: 0, set_version_of_tool };

extern "C" fn set_version_of_tool(_: u32) {}

/// The places of a module's functions.
///
/// # Safety
/// Both addresses are null or can be written to.
unsafe extern "C" fn functions(
    module: c_int,
    table: *mut *const *const AtomicPtr<c_void>,
    count: *mut c_uint,
) -> c_int {
    let index = (module as usize).wrapping_sub(1);
    let Some(&functions) = COUNTS.get(index) else { return 0 };
    // SAFETY: as the caller says.
    unsafe {
        if !table.is_null() {
            *table = PLACES.0[index].as_ptr();
        }
        if !count.is_null() {
            *count = functions;
        }
    }
    1
}

extern "C" fn export_table(number: u32) -> *const c_void {
    match number {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION).cast(),
        _ => ptr::null(),
    }
}

/// `InitializeInjectionNvtx2`: whether the tool is ready.
type Start = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;

/// Loads the library of the tool that watches this process, if one does; once.
fn start() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        let Some(path) = env::var_os("NVTX_INJECTION64_PATH") else { return };
        // SAFETY: the library is the tool's, which asks to be loaded so; its initialisers are its own.
        let Ok(library) = (unsafe { Library::new(path) }) else { return };
        // SAFETY: the symbol has that type (`nvtxInit.h`), and is called as there.
        let ready =
            unsafe { library.get::<Start>(b"InitializeInjectionNvtx2\0").is_ok_and(|start| start(export_table) != 0) };
        if ready {
            // Its functions are called until the process ends.
            mem::forget(library);
        } else {
            FUNCTIONS_OF_TOOL.iter().flatten().for_each(|function| function.store(ptr::null_mut(), Ordering::Release));
        }
    });
}

/// A range of this thread's time, until it is dropped; nothing where no tool watches.
#[derive(Debug)]
pub struct Range {
    /// Ranges end on the thread that they begin on, the last first.
    on_thread: PhantomData<*mut ()>,
}

impl Range {
    /// Begins a range.
    pub fn new(name: &CStr) -> Self {
        start();
        let push = FUNCTIONS_OF_TOOL[0][RANGE_PUSH].load(Ordering::Acquire);
        if !push.is_null() {
            // SAFETY: the tool wrote it to the place of `nvtxRangePushA`, which has this type.
            unsafe {
                mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(push)(name.as_ptr());
            }
        }
        Self { on_thread: PhantomData }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let pop = FUNCTIONS_OF_TOOL[0][RANGE_POP].load(Ordering::Acquire);
        if !pop.is_null() {
            // SAFETY: the tool wrote it to the place of `nvtxRangePop`, which has this type.
            unsafe {
                mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(pop)();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

    unsafe extern "C" fn push(name: *const c_char) -> c_int {
        // SAFETY: `Range` gives a C string.
        SEEN.lock().unwrap().push(unsafe { CStr::from_ptr(name) }.to_str().unwrap().into());
        0
    }

    extern "C" fn pop() -> c_int {
        SEEN.lock().unwrap().push("end".into());
        0
    }

    /// As a tool's `InitializeInjectionNvtx2` does.
    unsafe extern "C" fn tool(table: extern "C" fn(u32) -> *const c_void) -> c_int {
        assert!(table(2).is_null());
        // SAFETY: table 1 is of this type.
        let callbacks = unsafe { &*table(1).cast::<Callbacks>() };
        assert_eq!(callbacks.size, 16);
        let (mut places, mut count) = (ptr::null(), 0);
        // SAFETY: both can be written to; the places are `count`, the first of them null.
        unsafe {
            for (module, there, functions) in [(0, 0, 0), (7, 0, 0), (2, 1, 9), (5, 1, 16)] {
                assert_eq!((callbacks.functions)(module, &raw mut places, &raw mut count), there);
                assert_eq!(count, functions);
            }
            assert_eq!((callbacks.functions)(1, &raw mut places, &raw mut count), 1);
            let places = std::slice::from_raw_parts(places, count as usize);
            assert!(places[0].is_null() && places[1..].iter().all(|place| !place.is_null()));
            (*places[RANGE_PUSH]).store(push as *mut c_void, Ordering::Release);
            (*places[RANGE_POP]).store(pop as *mut c_void, Ordering::Release);
        }
        1
    }

    #[test]
    fn a_tool_sees_ranges_begin_and_end() {
        drop(Range::new(c"before there is a tool"));
        // SAFETY: it is given what a tool is given.
        assert_eq!(unsafe { tool(export_table) }, 1);
        let outer = Range::new(c"outer");
        drop(Range::new(c"inner"));
        drop(outer);
        assert_eq!(*SEEN.lock().unwrap(), ["outer", "inner", "end", "end"]);
    }
}
