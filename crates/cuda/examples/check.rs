//! Shows on a GPU what cannot be shown without one: faults and how they are told, the caller's context and stream left as
//! they were, graphs, clusters, programmatic dependent launch, and what a launch costs beside a bare one. Ends with status 1 when something is not as it should be.
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

/// Each CTA tells the next of its cluster its rank, through that one's shared memory; then it writes what it was told, ten times
/// the cluster's number added.
const CLUSTER: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry ring(.param .u64 to)
{
    .reg .pred %p<1>;
    .reg .b64 %rd<4>;
    .reg .b32 %r<8>;
    .shared .align 4 .b8 told[4];
    ld.param.u64 %rd0, [to];
    cvta.to.global.u64 %rd1, %rd0;
    mov.u32 %r0, %cluster_ctarank;
    mov.u32 %r1, %cluster_nctarank;
    add.u32 %r2, %r0, 1;
    rem.u32 %r2, %r2, %r1;
    mov.u32 %r3, told;
    mapa.shared::cluster.u32 %r4, %r3, %r2;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    st.shared::cluster.u32 [%r4], %r0;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.u32 %r5, [told];
    mov.u32 %r6, %clusterid.x;
    mad.lo.u32 %r5, %r6, 10, %r5;
    mov.u32 %r7, %ctaid.x;
    mul.wide.u32 %rd2, %r7, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r5;
    ret;
}
";

/// Lets the launch after it start, works for a fifth of a millisecond, and writes the time.
const FIRST: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry first(.param .u64 to)
{
    .reg .pred %p<1>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd0, [to];
    cvta.to.global.u64 %rd1, %rd0;
    griddepcontrol.launch_dependents;
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd3, %rd2, 200000;
$again:
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p0, %rd4, %rd3;
    @%p0 bra $again;
    st.global.u64 [%rd1], %rd4;
    ret;
}
";

/// Notes when it started, waits for the launch before it, and copies what that one wrote.
const SECOND: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry second(.param .u64 to)
{
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [to];
    cvta.to.global.u64 %rd1, %rd0;
    mov.u64 %rd2, %globaltimer;
    griddepcontrol.wait;
    ld.global.u64 %rd3, [%rd1];
    st.global.u64 [%rd1+8], %rd2;
    st.global.u64 [%rd1+16], %rd3;
    ret;
}
";

fn alone(kernel: &Kernel, to: u64, ctas: u32, cluster: u32) -> Launch<'_> {
    let (grid, cluster) = ([ctas, 1, 1], [cluster, 1, 1]);
    Launch { kernel, grid, block: [1; 3], cluster, dynamic_shared: 0, arguments: vec![Argument::Pointer(to)] }
}

/// Little-endian numbers of so many bytes.
fn numbers(bytes: &[u8], size: usize) -> Vec<u64> {
    let number = |word: &[u8]| word.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
    bytes.chunks_exact(size).map(number).collect()
}

/// Clusters and programmatic dependent launch, which GPUs have from sm_90 on.
fn from_sm90(
    stream: &mut cuda::Stream,
    [ring, first, second]: &[Kernel; 3],
    say: &mut impl FnMut(&str, bool, String),
) -> Result<(), Box<dyn std::error::Error>> {
    let to = stream.alloc(64)?;
    stream.launch(&alone(ring, to, 8, 4))?;
    let told = numbers(&stream.read(to, 32)?, 4);
    say("clusters of 4", told == [3, 0, 1, 2, 13, 10, 11, 12], format!("{told:?}"));

    let before = stream.prepare(&alone(first, to, 1, 1))?;
    let mut after = stream.prepare(&alone(second, to, 1, 1))?;
    for programmatic in [false, true] {
        after.programmatic = programmatic;
        stream.fill(to, 64, 0)?;
        stream.enqueue(&before)?;
        stream.enqueue(&after)?;
        let times = numbers(&stream.read(to, 24)?, 8);
        let (ended, started, seen) = (times[0], times[1], times[2]);
        let what = if programmatic { "a programmatic dependent launch" } else { "an ordinary launch after another" };
        let ok = ended != 0 && seen == ended && (started < ended) == programmatic;
        let early = ended as i64 - started as i64;
        say(
            what,
            ok,
            format!(
                "starts {early} ns before the one ahead ends, and reads {}",
                if seen == ended { "what it wrote" } else { "something else" }
            ),
        );
    }
    stream.free(to)?;
    Ok(())
}

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
    let parse = |text| ptx::parse(text).map(|mut kernels| kernels.remove(0));
    let (kernel, ring, first, second) = (parse(STORE)?, parse(CLUSTER)?, parse(FIRST)?, parse(SECOND)?);
    let driver = Driver::load()?;
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

    let mut newer = kernel.clone();
    newer.version = ptx::Version { major: 99, minor: 0 };
    let error = stream.launch(&launch(&newer, to, 1)).expect_err("no driver knows it");
    say("PTX newer than the driver", matches!(error, Error::PtxTooNew { .. }), error.to_string());
    let sm = context.device().sm;
    if let Some(later) = arch::Sm::ALL.into_iter().find(|later| *later > sm) {
        let other = Kernel { target: later.into(), ..kernel.clone() };
        let error = stream.launch(&launch(&other, to, 1)).expect_err("the GPU is older");
        say("PTX for a later GPU", matches!(error, Error::Target { .. }), error.to_string());
    }
    let stored = stream.read(to, 4).is_ok();
    say("after refusals", stored, format!("the context is {}", if stored { "as it was" } else { "unusable" }));

    if sm >= arch::Sm::Sm90 {
        from_sm90(&mut stream, &[ring, first, second], &mut say)?;
    }
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
