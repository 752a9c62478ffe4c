//! How fast tensor-core instructions are emulated on one core, all counters and checks on.
//!
//! `cargo bench -p emulator --bench tensor`; criterion's `elem/s` are operations per second, a multiply-add counted as two. The
//! floor is 5 billion for f16 products of either kind.

use std::hint::black_box;

use arch::Sm;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use emulator::{Level, Memory, Options};
use ptx::{Kernel, Launch};

/// Times a loop runs its instructions.
const TIMES: u32 = 1000;

fn registers(prefix: &str, first: usize, count: usize) -> String {
    let names: Vec<_> = (first..first + count).map(|index| format!("%{prefix}{index}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// A kernel that runs `body` in a loop, on shared memory full of ones.
fn kernel(body: &str) -> Kernel {
    let text = format!(
        ".version 8.4
.target sm_90a
.address_size 64
.visible .entry k() {{
    .reg .pred %p<4>;
    .reg .b32 %r<32>;
    .reg .f32 %f<160>;
    .reg .b64 %d<8>;
    .shared .align 1024 .b8 tile[16384];
    mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 4;
    mov.u32 %r2, tile;
    add.u32 %r1, %r1, %r2;
    mov.b32 %r3, 0x3c003c00;
    mov.u32 %r4, %ntid.x;
    shl.b32 %r4, %r4, 4;
fill:
    st.shared.v4.b32 [%r1], {{%r3, %r3, %r3, %r3}};
    add.u32 %r1, %r1, %r4;
    setp.lt.u32 %p0, %r1, 16384;
    @%p0 bra fill;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    // 128-byte rows; the second matrix, 8 KiB after the first, without a swizzle.
    mov.b64 %d0, 0x4000004000010000;
    mov.b64 %d1, 0x0000001000080200;
    mov.b32 %r8, %r3;
    mov.b32 %r9, %r3;
    mov.b32 %r10, %r3;
    mov.b32 %r11, %r3;
    mov.u32 %r5, 0;
again:
{body}
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p0, %r5, {TIMES};
    @%p0 bra again;
    ret;
}}"
    );
    ptx::parse(&text).expect("PTX").remove(0)
}

fn wgmma(n: usize, a: &str, rest: &str) -> String {
    format!(
        "    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {}, {a}, %d1, 1, 1, 1{rest};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;",
        registers("f", 0, n / 2)
    )
}

fn bench(criterion: &mut Criterion) {
    let mma = "    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r8, %r9, %r10, %r11}, {%r8, %r9}, {%f0, %f1, %f2, %f3};\n";
    let bytes = mma.replace("m16n8k16", "m16n8k32").replace("f32.f16.f16.f32", "s32.s8.s8.s32").replace("%f", "%r2");
    let mut group = criterion.benchmark_group("tensor");
    group.sample_size(10);
    for (name, threads, body) in [
        ("four mma.m16n8k16", 32, mma.repeat(4)),
        ("four mma.m16n8k32 of s8", 32, bytes.repeat(4)),
        ("wgmma.m64n64k16", 128, wgmma(64, "%d0", ", 0, 0")),
        ("wgmma.m64n64k16, B transposed", 128, wgmma(64, "%d0", ", 0, 1")),
        ("wgmma.m64n64k16, A in registers", 128, wgmma(64, "{%r8, %r9, %r10, %r11}", ", 0")),
        ("wgmma.m64n256k16", 128, wgmma(256, "%d0", ", 0, 0")),
    ] {
        let kernel = kernel(&body);
        let memory = Memory::new();
        let launch = Launch {
            kernel: &kernel,
            grid: [1; 3],
            block: [threads, 1, 1],
            cluster: [1; 3],
            dynamic_shared: 0,
            arguments: Vec::new(),
        };
        let options = Options { threads: 1, ..Options::new(Sm::Sm90) };
        let run = || {
            let report = emulator::run(&memory, &launch, &options).expect("a run");
            report.counters(&kernel, Level::Ptx).tensor_flops
        };
        group.throughput(Throughput::Elements(run()));
        group.bench_function(name, |bencher| bencher.iter(|| black_box(run())));
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
