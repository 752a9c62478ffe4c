//! What is counted on the way.

use arch::Sm;
use emulator::{Counters, Level};
use kernels::{Dtype, Inputs, Mask, Problem, ProblemSpec, Stratum};
use lab::Execution;

use crate::run;

fn ran(stratum: Stratum, sm: Sm, spec: ProblemSpec) -> (Problem, Execution) {
    let problem = spec.build().unwrap();
    let inputs = Inputs::randn(&problem, 1).unwrap();
    let ran = run(stratum, sm, &problem, &inputs, None).unwrap();
    (problem, ran)
}

/// Counters of all launches.
fn total(ran: &Execution) -> Vec<Counters> {
    ran.launches.iter().map(|launch| launch.report.counters(&launch.kernel, Level::Merged)).collect()
}

fn conflict_rate(counters: &[Counters]) -> f64 {
    let conflicts: u64 = counters.iter().map(|c| c.shared_load_bank_conflicts + c.shared_store_bank_conflicts).sum();
    let wavefronts: u64 = counters.iter().map(|c| c.shared_load_wavefronts + c.shared_store_wavefronts).sum();
    conflicts as f64 / wavefronts as f64
}

/// The article's finding: in `v2` most passes of loads through the banks are conflicts, and one line causes them all.
#[test]
fn v2_reads_the_transposed_keys_from_one_bank() {
    for sm in [Sm::Sm75, Sm::Sm90] {
        for head_dim in [32, 64] {
            let (_, ran) = ran(Stratum::V2, sm, ProblemSpec::new(1, 2, 128, head_dim));
            let counters = total(&ran)[0];
            let rate = counters.shared_load_bank_conflicts as f64 / counters.shared_load_wavefronts as f64;
            assert!(rate > 0.6, "{sm}, head_dim {head_dim}: {rate}");
            assert_eq!(counters.shared_store_bank_conflicts, 0);
            let lines = ran.launches[0].report.by_line(&ran.launches[0].kernel, Level::Merged);
            let conflicting: Vec<_> = lines.iter().filter(|l| l.counters.shared_load_bank_conflicts > 0).collect();
            assert_eq!(conflicting.len(), 1, "{conflicting:?}");
            assert_eq!(source_line(&conflicting[0].file, conflicting[0].line), "dot(k, &scores, &q, &k_transposed);");
        }
    }
}

/// A line of this project's source.
fn source_line(file: &str, line: u32) -> String {
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(workspace.join(file)).unwrap();
    text.lines().nth(line as usize - 1).unwrap().trim().to_string()
}

/// `v2_kt` has hardly any, its transposing kernel included, and moves the same data besides.
#[test]
fn v2_kt_has_no_conflicts() {
    for sm in [Sm::Sm75, Sm::Sm90] {
        for (head_dim, dtype) in
            [(32, Dtype::F32), (64, Dtype::F32), (128, Dtype::F32), (64, Dtype::F16), (40, Dtype::Bf16)]
        {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                let spec = ProblemSpec::new(1, 2, 128, head_dim).dtype(dtype).mask(mask);
                let (problem, kt) = ran(Stratum::V2Kt, sm, spec.clone());
                let rate = conflict_rate(&total(&kt));
                assert!(rate < 0.03, "{sm}, {problem}: {rate}");
                let (_, v2) = ran(Stratum::V2, sm, spec);
                let (kt, v2) = (total(&kt)[1], total(&v2)[0]);
                assert_eq!(kt.global_store_sectors, v2.global_store_sectors);
            }
        }
    }
}

/// Algorithm 1 of the first paper: each of the `T` tiles of keys writes O, l and m, and all but the first read them.
#[test]
fn v1_moves_its_state_through_memory() {
    for head_dim in [32, 64] {
        let (problem, ran) = ran(Stratum::V1, Sm::Sm75, ProblemSpec::new(2, 3, 128, head_dim));
        let counters = total(&ran)[0];
        let tiles = problem.seqlen_k as u64 / 32;
        let rows = (problem.batch * problem.heads_q * problem.seqlen_q) as u64;
        let (row, state) = (4 * head_dim as u64, 4 * (head_dim as u64 + 2));
        assert_eq!(32 * counters.global_store_sectors, tiles * rows * state);
        assert_eq!(32 * counters.global_load_sectors, 2 * rows * row + tiles * rows * row + (tiles - 1) * rows * state);
    }
}

/// The same at the article's size: 5.536 GB written, of 640 heads of which one is run.
#[test]
fn v1_writes_what_the_article_measured() {
    let (problem, ran) = ran(Stratum::V1, Sm::Sm75, ProblemSpec::new(1, 1, 1024, 64));
    let written = 640 * 32 * total(&ran)[0].global_store_sectors;
    assert_eq!(written, 640 * 32 * 1024 * (64 + 2) * 4);
    assert_eq!(written, 5_536_481_280, "{problem}");
}

/// `naive` writes the scores twice and reads them three times.
#[test]
fn naive_moves_the_square() {
    let (problem, ran) = ran(Stratum::Naive, Sm::Sm75, ProblemSpec::new(1, 2, 128, 32));
    let counters = total(&ran);
    let square = (problem.heads_q * problem.seqlen_q * problem.seqlen_k * 4 / 32) as u64;
    assert_eq!(counters[0].global_store_sectors, square);
    assert_eq!(counters[1].global_load_sectors, 2 * square);
    assert!(counters[1].global_store_sectors >= square);
    assert!(counters[2].global_load_sectors >= square);
}

/// CTAs of different heads do equal work, and those of one head alone leave its output complete.
#[test]
fn one_head_is_a_sample() {
    use arch::Target;
    use emulator::{Memory, Options, Sample};
    use kernels::{Buffers, Layout, Outputs, check, plain, plan, reference};

    let problem = ProblemSpec::new(2, 6, 72, 32).heads_kv(2).causal().build().unwrap();
    let inputs = Inputs::randn(&problem, 3).unwrap();
    let layout = Layout::of(&problem, &inputs).unwrap();
    for stratum in Stratum::ON_CUDA_CORES {
        let plan = plan(stratum, &problem, Target::from(Sm::Sm75), &layout, None).unwrap();
        let whole = run(stratum, Sm::Sm75, &problem, &inputs, None).unwrap();
        let mut memory = Memory::new();
        let nan = Outputs::nan(&problem).unwrap();
        let mut place = |tensor: &kernels::Tensor| memory.alloc_bytes(tensor.storage()).unwrap();
        let [q, k, v, out, lse] = [&inputs.q, &inputs.k, &inputs.v, &nan.out, &nan.lse].map(&mut place);
        let workspaces = plan.workspaces.iter().map(|w| memory.alloc(w.bytes).unwrap()).collect();
        let launches = plan.launches(&Buffers { q, k, v, out, lse, workspaces, ..Default::default() }, None).unwrap();
        for ((launch, ctas), whole) in launches.iter().zip(plan.ctas_of(1, 4)).zip(&whole.launches) {
            let options = Options { sample: Sample::Ctas(ctas), ..Options::new(Sm::Sm75) };
            let report = emulator::run(&memory, launch, &options).unwrap();
            let scaled = report.scaled(launch.kernel, Level::Ptx);
            assert_eq!(scaled, whole.report.counters(&whole.kernel, Level::Ptx), "{stratum}");
        }
        let read = |before: &kernels::Tensor, address| {
            let bytes = memory.read(address, before.storage().len() as u64).unwrap();
            kernels::Tensor::from_bytes(before.dtype(), before.shape(), bytes).unwrap()
        };
        let outputs = Outputs { out: read(&nan.out, out), lse: read(&nan.lse, lse) };
        let one = |heads: Vec<kernels::HeadOutput>| -> Vec<_> {
            heads.into_iter().filter(|head| (head.entry, head.head) == (1, 4)).collect()
        };
        let (expected, plain) = (one(reference(&problem, &inputs).unwrap()), one(plain(&problem, &inputs).unwrap()));
        assert!(check(&problem, &outputs, &expected, &plain).unwrap().passed(), "{stratum}");
        assert!(outputs.head(&problem, 0, 0).unwrap().out.iter().all(|x| x.is_nan()));
    }
}
