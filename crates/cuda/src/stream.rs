//! Streams: memory, copies and launches in order.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use arch::Sm;
use cudarc::driver::sys::{
    self, CUdeviceptr, CUevent, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
    CUresult, CUstream,
};
use ptx::{Backend, Launch, TensorMap};

use crate::context::{Context, Handle};
use crate::error::Error;
use crate::module::{Attributes, Function, Loaded};
use crate::nvtx::Range;
use crate::packing::Packed;
use crate::tensor_map;

/// A stream of a context and the memory allocated through it, which goes back when the stream is dropped.
///
/// As a [`Backend`], its launches end before the call returns, so that a fault is put down to the launch that made it;
/// [`Stream::enqueue`] does not wait.
#[derive(Debug)]
pub struct Stream {
    pub(crate) context: Context,
    pub(crate) raw: Handle<sys::CUstream_st>,
    owned: bool,
    allocations: BTreeMap<u64, Allocation>,
    /// The last launch that may still run, and how many there are.
    pending: Option<(Arc<Loaded>, [u32; 3], [u32; 3])>,
    pending_count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    bytes: u64,
    kind: AllocationKind,
}

/// How an allocation goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllocationKind {
    /// Behind what is in the stream.
    Ordered,
    /// At the end.
    Apart,
    /// It is somebody else's.
    Adopted,
}

/// While it lives, this thread may do what a stream that is being recorded to a graph otherwise forbids everyone (CUDA driver API,
/// cuThreadExchangeStreamCaptureMode).
struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    fn new() -> Self {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver was started; it reads one mode and writes the one before.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self(mode)
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `new`.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

/// A launch whose kernel is compiled and whose arguments are packed: what is left is one call of the driver.
#[derive(Clone, Debug)]
pub struct Prepared {
    function: Function,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    dynamic_shared: u32,
    arguments: Packed,
    /// Whether it may start before the launch ahead of it in the stream has ended (programmatic dependent launch); the
    /// kernel then waits itself, with `griddepcontrol.wait`. Takes sm_90.
    pub programmatic: bool,
}

impl Prepared {
    /// The compiled kernel.
    pub fn function(&self) -> &Function {
        &self.function
    }

    /// Replaces the address in an argument that is a pointer or a tensor map, which the driver need not encode anew.
    ///
    /// # Errors
    /// When there is no such argument, or the driver refuses the address.
    pub fn set_address(&mut self, argument: usize, address: u64) -> Result<(), Error> {
        match self.arguments.get_mut(argument) {
            Some([pointer]) => *pointer = address,
            Some(object) if object.len() as u64 * 8 == TensorMap::BYTES => tensor_map::set_address(object, address)?,
            _ => {
                let what = format!("argument {argument} is no pointer and no tensor map");
                return Err(Error::Launch { kernel: self.function.loaded.name.clone(), what });
            }
        }
        Ok(())
    }
}

impl Function {
    /// Packs the arguments of a launch of this kernel: nothing is compiled, nor looked for.
    ///
    /// # Errors
    /// When the arguments are not the kernel's own, or the GPU has not the shared memory.
    pub fn prepare(&self, launch: &Launch<'_>) -> Result<Prepared, Error> {
        let Launch { kernel, grid, block, cluster, dynamic_shared, .. } = launch;
        let refuse = |what| Err(Error::Launch { kernel: kernel.name.clone(), what });
        // The driver encodes tensor maps for the current context.
        let _current = self.context.current()?;
        let arguments = Packed::new(launch)?;
        if let Some((what, extent)) =
            [("grid", grid), ("block", block), ("cluster", cluster)].into_iter().find(|(_, n)| n.contains(&0))
        {
            return refuse(format!("{what} is {extent:?}; every dimension must be at least 1"));
        }
        let (threads, most) = (launch.threads(), self.attributes().max_threads);
        if threads > most.into() {
            return refuse(format!("block {block:?} has {threads} threads; with its registers it can have {most}"));
        }
        self.loaded.grant(&self.context, *dynamic_shared, cluster.iter().product())?;
        Ok(Prepared {
            grid: *grid,
            block: *block,
            cluster: *cluster,
            dynamic_shared: *dynamic_shared,
            arguments,
            programmatic: false,
            function: self.clone(),
        })
    }
}

impl Stream {
    pub(crate) fn new(context: Context) -> Result<Self, Error> {
        let mut raw: CUstream = std::ptr::null_mut();
        {
            let _current = context.current()?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: a context is current; the driver writes one handle, which is destroyed once.
            context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        }
        Ok(Self::of(context, raw, true))
    }

    fn of(context: Context, raw: CUstream, owned: bool) -> Self {
        Self { context, raw: Handle(raw), owned, allocations: BTreeMap::new(), pending: None, pending_count: 0 }
    }

    /// The caller's stream; null is the default one. It is neither destroyed nor changed.
    ///
    /// # Safety
    /// `raw` is a `CUstream` of the device's primary context and outlives the result.
    pub unsafe fn borrow(context: &Context, raw: *mut c_void) -> Self {
        Self::of(context.clone(), raw.cast(), false)
    }

    /// Lets transfers reach device memory that someone else allocated. It is never freed here.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` are device memory of this context and stay allocated while the stream lives.
    pub unsafe fn adopt(&mut self, address: u64, bytes: u64) {
        self.allocations.insert(address, Allocation { bytes, kind: AllocationKind::Adopted });
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Compiles the kernel, or finds it compiled, and packs the arguments.
    ///
    /// # Errors
    /// When the kernel does not compile, the arguments are not its own, or the GPU has not the shared memory.
    pub fn prepare(&self, launch: &Launch<'_>) -> Result<Prepared, Error> {
        self.context.function(launch.kernel)?.prepare(launch)
    }

    /// Starts a launch after what is in the stream, and does not wait for it. It is in the NVTX range `flashstrata`.
    ///
    /// # Errors
    /// When the driver refuses it, or something before it faulted.
    pub fn enqueue(&mut self, launch: &Prepared) -> Result<(), Error> {
        if !Arc::ptr_eq(&launch.function.context.0, &self.context.0) {
            let what = "it was prepared in another context than the stream's".into();
            return Err(Error::Launch { kernel: launch.function.loaded.name.clone(), what });
        }
        let _current = self.context.current()?;
        let _range = Range::new(c"flashstrata");
        let mut attributes = [CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: CUlaunchAttributeValue { pad: [0; 64] },
        }; 2];
        let mut count = 0;
        if launch.cluster != [1, 1, 1] {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            let [x, y, z] = launch.cluster;
            attributes[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if launch.programmatic {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        let config = CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.dynamic_shared,
            hStream: self.raw.0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut pointers = launch.arguments.pointers();
        self.pending = Some((launch.function.loaded.clone(), launch.grid, launch.block));
        self.pending_count += 1;
        // SAFETY: the function is loaded in the current context (checked above; `Function` keeps it); the
        // pointers are one per parameter, each to as many bytes as the parameter has (`Packed::new`), and the driver copies
        // those before it returns; the attributes are as many as stated (CUDA driver API, cuLaunchKernelEx).
        let code = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                launch.function.loaded.function.0,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernelEx", code)
    }

    /// Waits for everything in the stream.
    ///
    /// # Errors
    /// When something in it faulted.
    pub fn synchronize(&mut self) -> Result<(), Error> {
        let _current = self.context.current()?;
        // SAFETY: the stream is alive and its context current.
        let code = unsafe { sys::cuStreamSynchronize(self.raw.0) };
        self.check("cuStreamSynchronize", code)?;
        (self.pending, self.pending_count) = (None, 0);
        Ok(())
    }

    /// A new event.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn event(&self) -> Result<Event, Error> {
        let _current = self.context.current()?;
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: a context is current; the driver writes one handle, which is destroyed once.
        self.context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, 0) })?;
        Ok(Event { context: self.context.clone(), raw: Handle(raw) })
    }

    /// Notes the time at which everything before has ended.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn record(&mut self, event: &Event) -> Result<(), Error> {
        let _current = self.context.current()?;
        // SAFETY: the event and the stream are alive; the driver refuses those of different contexts.
        let code = unsafe { sys::cuEventRecord(event.raw.0, self.raw.0) };
        self.check("cuEventRecord", code)
    }

    /// Sets every byte of an allocation; does not wait.
    ///
    /// # Errors
    /// When the bytes are not inside one allocation.
    pub fn fill(&mut self, address: u64, bytes: u64, value: u8) -> Result<(), Error> {
        self.inside(address, bytes)?;
        // SAFETY: the bytes are inside an allocation.
        unsafe { self.fill_unchecked(address, bytes, value) }
    }

    /// The same for memory that someone else allocated.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// The bytes are device memory that this context can write, until what is in the stream has ended.
    pub unsafe fn fill_unchecked(&mut self, address: u64, bytes: u64, value: u8) -> Result<(), Error> {
        let _current = self.context.current()?;
        // SAFETY: the caller vouches for the bytes.
        let code = unsafe { sys::cuMemsetD8Async(address as CUdeviceptr, value, bytes as usize, self.raw.0) };
        self.check("cuMemsetD8Async", code)
    }

    pub(crate) fn check(&self, call: &'static str, code: CUresult) -> Result<(), Error> {
        self.context.check_launched(call, code, || match &self.pending {
            None => "a launch outside this stream".into(),
            Some((loaded, grid, block)) => {
                let others = match self.pending_count - 1 {
                    0 => String::new(),
                    others => format!(" or one of the {others} launches before it"),
                };
                format!("`{}` (grid {grid:?}, block {block:?}){others}", loaded.name)
            }
        })
    }

    /// Copies as many bytes out as `contents` has, when what is in the stream has ended.
    ///
    /// # Errors
    /// When the bytes are not inside one allocation, or something in the stream faulted.
    pub fn read_into(&mut self, address: u64, contents: &mut [u8]) -> Result<(), Error> {
        self.inside(address, contents.len() as u64)?;
        if contents.is_empty() {
            return Ok(());
        }
        let current = self.context.current()?;
        // SAFETY: the bytes are inside an allocation, and `contents` is as long and lives until the copy ended.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(contents.as_mut_ptr().cast(), address as CUdeviceptr, contents.len(), self.raw.0)
        };
        drop(current);
        self.check("cuMemcpyDtoHAsync", code)?;
        self.synchronize()
    }

    fn inside(&self, address: u64, bytes: u64) -> Result<(), Error> {
        let found = self.allocations.range(..=address).next_back();
        let fits = found.is_some_and(|(start, allocation)| {
            (address - start).checked_add(bytes).is_some_and(|end| end <= allocation.bytes)
        });
        if fits { Ok(()) } else { Err(Error::OutOfBounds { address, bytes }) }
    }

    /// How [`Backend::alloc`] allocates.
    fn ordered(&self) -> AllocationKind {
        if self.context.device().memory_pools { AllocationKind::Ordered } else { AllocationKind::Apart }
    }

    /// Whether the stream is somebody else's, see [`Stream::borrow`].
    pub fn is_borrowed(&self) -> bool {
        !self.owned
    }

    /// Zeroed memory that is there at once and not in the order of the stream: where the stream is being recorded to a graph,
    /// this is no part of it, and later work may use the memory as well.
    ///
    /// # Errors
    /// When there is no room, or the driver fails.
    pub fn alloc_apart(&mut self, bytes: u64) -> Result<u64, Error> {
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        let _relaxed = Relaxed::new();
        let code = {
            let _current = self.context.current()?;
            // SAFETY: a context is current; the driver writes one address.
            unsafe { sys::cuMemAlloc_v2(&mut address, size) }
        };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.context.memory()?;
            return Err(Error::OutOfMemory { asked: bytes, free, total });
        }
        self.check("cuMemAlloc", code)?;
        self.allocations.insert(address, Allocation { bytes, kind: AllocationKind::Apart });
        let mut own = self.context.stream()?;
        // SAFETY: the bytes were just allocated, and nobody else knows of them.
        unsafe { own.fill_unchecked(address, bytes, 0)? };
        own.synchronize()?;
        Ok(address)
    }

    fn release(&mut self, address: u64, kind: AllocationKind) -> Result<(), Error> {
        let _current = self.context.current()?;
        // SAFETY: the address came from the call of the same kind and is taken off the list of allocations, so it is freed once;
        // what is in the stream uses it before.
        let (call, code) = unsafe {
            if kind == AllocationKind::Ordered {
                ("cuMemFreeAsync", sys::cuMemFreeAsync(address as CUdeviceptr, self.raw.0))
            } else {
                ("cuMemFree", sys::cuMemFree_v2(address as CUdeviceptr))
            }
        };
        self.check(call, code)
    }
}

impl Backend for Stream {
    type Report = Attributes;
    type Error = Error;

    fn sm(&self) -> Sm {
        self.context.device().sm
    }

    fn multiprocessors(&self) -> Option<u32> {
        Some(self.context.device().sm_count)
    }

    fn alloc(&mut self, bytes: u64) -> Result<u64, Error> {
        let current = self.context.current()?;
        // The driver refuses an allocation of nothing.
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        // SAFETY: a context is current and the stream alive; the driver writes one address.
        let (call, code) = unsafe {
            if self.context.device().memory_pools {
                ("cuMemAllocAsync", sys::cuMemAllocAsync(&mut address, size, self.raw.0))
            } else {
                ("cuMemAlloc", sys::cuMemAlloc_v2(&mut address, size))
            }
        };
        drop(current);
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.context.memory()?;
            return Err(Error::OutOfMemory { asked: bytes, free, total });
        }
        self.check(call, code)?;
        self.allocations.insert(address, Allocation { bytes, kind: self.ordered() });
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), Error> {
        match self.allocations.get(&address) {
            Some(&Allocation { kind, .. }) if kind != AllocationKind::Adopted => {
                self.allocations.remove(&address);
                self.release(address, kind)
            }
            _ => Err(Error::OutOfBounds { address, bytes: 0 }),
        }
    }

    fn write(&mut self, address: u64, contents: &[u8]) -> Result<(), Error> {
        self.inside(address, contents.len() as u64)?;
        if contents.is_empty() {
            return Ok(());
        }
        let current = self.context.current()?;
        // SAFETY: the bytes are inside an allocation, and `contents` outlives the copy: it ends before this returns.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address as CUdeviceptr, contents.as_ptr().cast(), contents.len(), self.raw.0)
        };
        drop(current);
        self.check("cuMemcpyHtoDAsync", code)?;
        self.synchronize()
    }

    fn read(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, Error> {
        self.inside(address, bytes)?;
        let mut contents = vec![0u8; bytes as usize];
        self.read_into(address, &mut contents)?;
        Ok(contents)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<Attributes, Error> {
        let prepared = self.prepare(launch)?;
        self.enqueue(&prepared)?;
        self.synchronize()?;
        Ok(prepared.function.attributes())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // In a poisoned context nothing can be given back: its end takes everything along.
        for (address, Allocation { kind, .. }) in std::mem::take(&mut self.allocations) {
            if kind != AllocationKind::Adopted {
                let _ = self.release(address, kind);
            }
        }
        if self.owned
            && let Ok(_current) = self.context.current()
        {
            // SAFETY: the stream was created by `new` and is destroyed once; the driver lets what is in it end first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
    }
}

/// A point in a stream whose time is noted.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: Handle<sys::CUevent_st>,
}

impl Event {
    /// Milliseconds from `earlier` to this one; both have been reached.
    ///
    /// # Errors
    /// When one of them was not recorded or not reached yet.
    pub fn since(&self, earlier: &Event) -> Result<f64, Error> {
        let _current = self.context.current()?;
        let mut milliseconds: f32 = 0.0;
        // SAFETY: both events are alive; the driver writes one float.
        let code = unsafe { sys::cuEventElapsedTime(&mut milliseconds, earlier.raw.0, self.raw.0) };
        self.context.check("cuEventElapsedTime", code)?;
        Ok(milliseconds.into())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.current() {
            // SAFETY: the event was created by `Stream::event` and is destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}
