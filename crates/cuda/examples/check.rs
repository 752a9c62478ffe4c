//! Shows on a GPU what cannot be shown without one: faults and how they are told, the caller's context and stream left as
//! they were, graphs, and what a launch costs beside a bare one. Ends with status 1 when something is not as it should be.
//!
//! `cargo run --release -p cuda --example check`

use std::process::ExitCode;
use std::time::Instant;

use cuda::{Driver, Error, Graph};
use cudarc::driver::sys;
use ptx::{Argument, Backend, Kernel, Launch};

/// Writes a number where its pointer points.
const STORE: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 to, .param .u32 value)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd0, [to];
    ld.param.u32 %r0, [value];
    cvta.to.global.u64 %rd1, %rd0;
    st.global.u32 [%rd1], %r0;
    ret;
}
";

fn launch(kernel: &Kernel, to: u64, value: u32) -> Launch<'_> {
    let arguments = vec![Argument::Pointer(to), Argument::U32(value)];
    Launch { kernel, grid: [1; 3], block: [1; 3], cluster: [1; 3], dynamic_shared: 0, arguments }
}

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver was started; it writes one handle.
    unsafe { sys::cuCtxGetCurrent(&mut context) };
    context
}

fn main() -> ExitCode {
    match check() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<bool, Box<dyn std::error::Error>> {
    let mut fine = true;
    let mut say = |what: &str, ok: bool, found: String| {
        fine &= ok;
        println!("{} {what}: {found}", if ok { "ok    " } else { "FAILED" });
    };
    let driver = Driver::load()?;
    let kernel = ptx::parse(STORE)?.remove(0);
    let before = current();
    let context = driver.context(0)?;
    let mut stream = context.stream()?;
    let to = stream.alloc(4)?;
    stream.launch(&launch(&kernel, to, 7))?;
    let stored = stream.read(to, 4)?;
    say("a kernel stores", stored == 7u32.to_le_bytes(), format!("{stored:?}"));
    say("the caller's context", current() == before, format!("{:?} before, {:?} after", before, current()));

    let prepared = stream.prepare(&launch(&kernel, to, 9))?;
    let graph = Graph::record(&mut stream, |stream| stream.enqueue(&prepared))?;
    let unchanged = stream.read(to, 4)?;
    graph.replay(&mut stream)?;
    let replayed = stream.read(to, 4)?;
    let ok = unchanged == 7u32.to_le_bytes() && replayed == 9u32.to_le_bytes();
    say("a graph", ok, format!("{unchanged:?} recorded, {replayed:?} replayed"));
    drop(graph);

    {
        // SAFETY: null is the default stream, which every context has.
        let mut default = unsafe { cuda::Stream::borrow(&context, std::ptr::null_mut()) };
        // SAFETY: the allocation is the other stream's and outlives this one.
        unsafe { default.adopt(to, 4) };
        default.launch(&launch(&kernel, to, 11))?;
        let stored = default.read(to, 4)?;
        say("a borrowed stream and pointer", stored == 11u32.to_le_bytes(), format!("{stored:?}"));
    }

    let (free, total) = context.memory()?;
    let error = stream.alloc(total + (1 << 30)).expect_err("more than there is");
    say("out of memory", matches!(error, Error::OutOfMemory { .. }), format!("{error} ({free} before)"));

    overhead(&mut stream, &kernel, to, &mut say)?;

    let error = stream.launch(&launch(&kernel, 0x10, 1)).expect_err("nothing is there");
    say("an illegal access", matches!(error, Error::Fault { .. }), error.to_string());
    let error = stream.read(to, 4).expect_err("the context is poisoned");
    say("after it", matches!(error, Error::Poisoned { .. }), error.to_string());
    drop(prepared);
    drop(stream);
    drop(context);
    let error = driver.context(0).expect_err("the driver refuses this process");
    say("another context", matches!(error, Error::Poisoned { .. }), error.to_string());
    Ok(fine)
}

/// Host time of a launch through the library and of a bare one, in turn.
fn overhead(
    stream: &mut cuda::Stream,
    kernel: &Kernel,
    to: u64,
    say: &mut impl FnMut(&str, bool, String),
) -> Result<(), Box<dyn std::error::Error>> {
    const LAUNCHES: u32 = 500;
    const ROUNDS: usize = 21;
    let prepared = stream.prepare(&launch(kernel, to, 1))?;
    let mut module = std::ptr::null_mut();
    let mut function = std::ptr::null_mut();
    let mut raw = std::ptr::null_mut();
    let mut primary = std::ptr::null_mut();
    let image = std::ffi::CString::new(kernel.to_string())?;
    // SAFETY: the driver was started and the device exists; every pointer is to a handle that the driver writes; the image
    // and the name are terminated. The context stays current for the bare launches and is popped at the end.
    let code = unsafe {
        let mut codes = vec![sys::cuDevicePrimaryCtxRetain(&mut primary, 0), sys::cuCtxPushCurrent_v2(primary)];
        codes.push(sys::cuModuleLoadData(&mut module, image.as_ptr().cast()));
        codes.push(sys::cuModuleGetFunction(&mut function, module, c"store".as_ptr()));
        codes.push(sys::cuStreamCreate(&mut raw, 1));
        codes.into_iter().find(|code| *code != sys::CUresult::CUDA_SUCCESS)
    };
    if let Some(code) = code {
        return Err(format!("the bare launch cannot be made: {code:?}").into());
    }
    let (mut library, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for _ in 0..LAUNCHES {
            stream.enqueue(&prepared)?;
        }
        library.push(begin.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES));
        stream.synchronize()?;
        let (mut pointer, mut value) = (to, 1u32);
        let mut arguments: [*mut std::ffi::c_void; 2] = [(&raw mut pointer).cast(), (&raw mut value).cast()];
        let begin = Instant::now();
        for _ in 0..LAUNCHES {
            // SAFETY: the function is loaded; its two arguments are as wide as its parameters.
            unsafe {
                let nothing = std::ptr::null_mut();
                sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, raw, arguments.as_mut_ptr(), nothing);
            }
        }
        bare.push(begin.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES));
        // SAFETY: the stream is alive.
        unsafe { sys::cuStreamSynchronize(raw) };
    }
    // SAFETY: what was made above is given back once, in the order that the driver wants.
    unsafe {
        sys::cuStreamDestroy_v2(raw);
        sys::cuModuleUnload(module);
        sys::cuCtxPopCurrent_v2(&mut primary);
        sys::cuDevicePrimaryCtxRelease_v2(0);
    }
    let median = |samples: &mut Vec<f64>| {
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    };
    let (library, bare) = (median(&mut library), median(&mut bare));
    let found = format!("{library:.2} us through the library, {bare:.2} us bare");
    say("a launch costs at most 2 us more than a bare one", library - bare <= 2.0, found);
    Ok(())
}
