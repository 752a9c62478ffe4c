//! How fast the emulator is: warp instructions per second on one core, all counters and checks on.
//!
//! `cargo bench -p lab`; criterion's `elem/s` are warp instructions per second. The aim is 100 million, the floor 50 million.

use std::hint::black_box;

use arch::Sm;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use emulator::{Level, Memory, Options};
use kernels::{Buffers, Dtype, Inputs, Layout, Outputs, Problem, Stratum};

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("emulator");
    group.sample_size(10);
    for (name, stratum, dtype) in [
        ("v2 f32", Stratum::V2, Dtype::F32),
        ("v2_kt f32", Stratum::V2Kt, Dtype::F32),
        ("v2 f16", Stratum::V2, Dtype::F16),
    ] {
        let problem = Problem::builder(1, 1, 1024, 64).dtype(dtype).build().expect("a problem");
        let inputs = Inputs::randn(&problem, 1).expect("inputs");
        let layout = Layout::contiguous(&problem);
        let plan = kernels::plan(stratum, &problem, Sm::Sm75.into(), &layout, None).expect("a plan");
        let mut memory = Memory::new();
        let outputs = Outputs::nan(&problem).expect("outputs");
        let mut upload = |bytes: &[u8]| memory.alloc_bytes(bytes).expect("memory");
        let mut buffers = Buffers {
            q: upload(inputs.q.storage()),
            k: upload(inputs.k.storage()),
            v: upload(inputs.v.storage()),
            out: upload(outputs.out.storage()),
            lse: upload(outputs.lse.storage()),
            ..Buffers::default()
        };
        for workspace in &plan.workspaces {
            buffers.workspaces.push(memory.alloc_zeroed(workspace.bytes).expect("memory"));
        }
        let launches = plan.launches(&buffers, None).expect("launches");
        let options = Options { threads: 1, ..Options::new(Sm::Sm75) };
        let run = || -> u64 {
            let executed = launches.iter().map(|launch| {
                let report = emulator::run(&memory, launch, &options).expect("a run");
                report.counters(launch.kernel, Level::Ptx).warp_instructions
            });
            executed.sum()
        };
        group.throughput(Throughput::Elements(run()));
        group.bench_function(name, |bencher| bencher.iter(|| black_box(run())));
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
