//! The stratum on tensor cores: on every generation of them, under every policy of asynchronous copies.

use arch::{Sm, Target};
use emulator::{Device, Level, Options, Policy};
use flashstrata::Planner;
use flashstrata::compute::{Computed, compute};
use kernels::plan::{self, plan_with};
use kernels::{Dtype, Inputs, Layout, Mask, Problem, ProblemSpec, Stratum, Tensor, Tiles, check, plain, reference};
use lab::{CaseId, Outcome, verify};

const POLICIES: [Policy; 4] = [Policy::Eager, Policy::Lazy, Policy::Random(1), Policy::Random(2)];

fn device(sm: Sm, policy: Policy) -> Device<'static> {
    Device::new(Options { policy, ..Options::new(sm) })
}

/// The cases on an architecture, in a type of its tensor cores.
fn cases(sm: Sm, dtype: Dtype, policy: Policy) {
    let board = arch::GPUS.iter().find(|gpu| gpu.sm == sm).unwrap();
    let planner = Planner::new(board.into()).stratum(Stratum::V2Tc);
    let mut passed = Vec::new();
    for case in CaseId::all(8) {
        for checked in verify(&planner, case, dtype, 3, &mut || Ok(device(sm, policy))).unwrap() {
            match checked.outcome {
                Outcome::Passed => passed.push(checked.case.to_string()),
                Outcome::NotCovered => panic!("{} {} is not covered", checked.case, checked.problem),
                Outcome::Failed(what) => panic!("{} {} under {policy:?}: {what}", checked.case, checked.problem),
            }
        }
    }
    passed.dedup();
    let all: Vec<_> = CaseId::all(8).iter().map(ToString::to_string).collect();
    assert_eq!(passed, all);
}

#[test]
fn v2_tc_passes_the_cases_on_turing() {
    cases(Sm::Sm75, Dtype::F16, Policy::Eager);
}

#[test]
fn v2_tc_passes_the_cases_on_ampere() {
    cases(Sm::Sm80, Dtype::Bf16, Policy::Lazy);
    cases(Sm::Sm86, Dtype::F16, Policy::Random(1));
}

#[test]
fn v2_tc_passes_the_cases_on_hopper() {
    cases(Sm::Sm90, Dtype::F16, Policy::Lazy);
    cases(Sm::Sm90, Dtype::Bf16, Policy::Random(2));
}

fn computed(
    sm: Sm,
    problem: &Problem,
    inputs: &Inputs,
    options: &plan::Options,
    policy: Policy,
) -> Computed<emulator::Report> {
    let layout = Layout::of(problem, inputs).unwrap();
    let name = format!("{problem} on {sm}, {options:?}, {policy:?}");
    let plan = plan_with(Stratum::V2Tc, problem, Target::best(sm), &layout, options);
    let plan = plan.unwrap_or_else(|error| panic!("{name}: {error}"));
    compute(&mut device(sm, policy), &plan, problem, inputs).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn within_tolerance(sm: Sm, problem: &Problem, inputs: &Inputs, options: &plan::Options, policy: Policy) {
    let computed = computed(sm, problem, inputs, options, policy);
    let reference = reference(problem, inputs).unwrap();
    let verdict = check(problem, &computed.outputs, &reference, &plain(problem, inputs).unwrap()).unwrap();
    assert!(verdict.passed(), "{problem} on {sm}, {options:?}, {policy:?}: {verdict:?}");
}

/// Every way through the slabs of a tile, lengths off the tiles' borders, every kind of mask, on each generation.
#[test]
fn head_dims_lengths_and_masks() {
    let lengths = [(1, 1), (33, 31), (5, 270), (270, 5), (128, 128), (147, 329), (65, 64), (300, 200)];
    let dims = [(1, 1), (8, 16), (40, 24), (48, 112), (64, 64), (72, 24), (96, 96), (128, 128), (200, 256), (256, 8)];
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(40, 3), Mask::window(0, -1), Mask::window(130, -20)];
    for (index, (d, d_v)) in dims.into_iter().enumerate() {
        for (kind, mask) in masks.into_iter().enumerate() {
            let (seqlen_q, seqlen_k) = lengths[(index + 3 * kind) % lengths.len()];
            let sm = [Sm::Sm75, Sm::Sm80, Sm::Sm89, Sm::Sm90][(index + kind) % 4];
            let dtype = if sm == Sm::Sm75 { Dtype::F16 } else { [Dtype::F16, Dtype::Bf16][kind % 2] };
            let spec = ProblemSpec::new(2, 2, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v).mask(mask);
            let problem = spec.heads_kv(1 + index % 2).dtype(dtype).build().unwrap();
            let inputs = Inputs::randn(&problem, index as u64).unwrap();
            within_tolerance(sm, &problem, &inputs, &plan::Options::default(), POLICIES[(index + kind) % 4]);
        }
    }
}

/// Rows that are aligned to 16, 8, 4 and 2 bytes.
#[test]
fn rows_are_copied_in_pieces() {
    for sm in [Sm::Sm75, Sm::Sm80] {
        for extra in [8, 4, 2, 1] {
            let problem = ProblemSpec::new(1, 2, 70, 40).dtype(Dtype::F16).causal().build().unwrap();
            let wide = ProblemSpec::new(1, 2, 70, 40 + extra).dtype(Dtype::F16).build().unwrap();
            let Inputs { q, k, v, descales, .. } = Inputs::randn(&wide, 1).unwrap();
            let narrow = |tensor: Tensor| tensor.narrow(3, 0, 40).unwrap();
            let inputs = Inputs { q: narrow(q), k: narrow(k), v: narrow(v), descales, new: None };
            within_tolerance(sm, &problem, &inputs, &plan::Options::default(), Policy::Lazy);
        }
    }
}

#[test]
fn tile_sizes() {
    let tiles =
        [(64, 16, 128), (64, 128, 128), (128, 80, 128), (32, 64, 64), (64, 48, 64), (128, 32, 256), (256, 64, 256)];
    for (index, (block_q, block_kv, threads)) in tiles.into_iter().enumerate() {
        let options = plan::Options { tiles: Some(Tiles { block_q, block_kv, threads }), ..plan::Options::default() };
        let mask = [Mask::FULL, Mask::CAUSAL][index % 2];
        let spec = ProblemSpec::new(1, 2, 333, 64).seqlen_k(277).dtype(Dtype::F16).mask(mask);
        let problem = spec.build().unwrap();
        let inputs = Inputs::randn(&problem, 2).unwrap();
        within_tolerance([Sm::Sm80, Sm::Sm90][index / 2 % 2], &problem, &inputs, &options, POLICIES[index % 4]);
    }
}

/// Keys split among CTAs, some of which have none; query heads side by side in a tile.
#[test]
fn splits() {
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(40, 3)];
    for (index, splits) in [2, 3, 7, 16].into_iter().enumerate() {
        let options = plan::Options { splits: Some(splits), ..plan::Options::default() };
        for (kind, mask) in masks.into_iter().enumerate() {
            let (seqlen_q, d, d_v) = [(1, 64, 64), (5, 33, 40), (130, 128, 72)][(index + kind) % 3];
            let plain = ProblemSpec::new(2, 6, seqlen_q, d).seqlen_k(300);
            let packed = ProblemSpec::packed(6, d, vec![0, 1, 1, 14], vec![0, 200, 260, 513]);
            let spec = if kind == 1 { packed } else { plain };
            let problem = spec.heads_kv(2).head_dim_v(d_v).mask(mask).dtype(Dtype::Bf16).build().unwrap();
            let inputs = Inputs::randn(&problem, 3).unwrap();
            within_tolerance(Sm::Sm90, &problem, &inputs, &options, POLICIES[index]);
        }
    }
}

#[test]
fn few_queries_split_keys_by_themselves() {
    let layout = |problem: &Problem| Layout::contiguous(problem);
    let target = Target::best(Sm::Sm90);
    let launches = |spec: ProblemSpec, splits| {
        let problem = spec.dtype(Dtype::F16).build().unwrap();
        let options = plan::Options { splits, ..plan::Options::default() };
        let plan = plan_with(Stratum::V2Tc, &problem, target, &layout(&problem), &options).unwrap();
        plan.launches.iter().map(|launch| launch.ctas()).collect::<Vec<_>>()
    };
    let decode = || ProblemSpec { seqlen_q: 1, ..ProblemSpec::new(1, 32, 8192, 128).heads_kv(8) };
    assert_eq!(launches(decode(), None), [8 * 16, 32]);
    assert_eq!(launches(decode(), Some(1)), [8]);
    assert_eq!(launches(decode(), Some(4)), [32, 32]);
    assert_eq!(launches(ProblemSpec::new(16, 16, 4096, 128), None), [16 * 16 * 32]);
}

/// `|out - reference| / |reference|` of all elements.
fn relative_error(sm: Sm, problem: &Problem, inputs: &Inputs, options: &plan::Options) -> f64 {
    let heads = computed(sm, problem, inputs, options, Policy::Lazy).outputs.heads(problem).unwrap();
    let reference = reference(problem, inputs).unwrap();
    let pairs = heads.iter().zip(&reference).flat_map(|(got, want)| got.out.iter().zip(&want.out));
    let (difference, norm) = pairs.fold((0.0, 0.0), |(d, n), (got, want)| (d + (got - want).powi(2), n + want.powi(2)));
    f64::sqrt(difference / norm)
}

/// The sums of tensor cores are cut: where they took all keys, errors grew with the number of keys.
#[test]
fn f32_is_as_precise_over_many_keys() {
    let options = plan::Options { splits: Some(1), ..plan::Options::default() };
    for (sm, head_dim) in [(Sm::Sm80, 40), (Sm::Sm90, 128)] {
        let problem = ProblemSpec::new(1, 1, 16, head_dim).seqlen_k(4096).build().unwrap();
        let mut inputs = Inputs::randn(&problem, 4).unwrap();
        inputs.v = inputs.v.map(|_, x| x + 1.0).unwrap();
        let error = relative_error(sm, &problem, &inputs, &options);
        assert!(error < 1e-6, "{problem} on {sm}: {error}");
    }
}

/// The relative error of the rounded product, which was asked for.
#[test]
fn tf32_is_a_choice() {
    let problem = ProblemSpec::new(1, 2, 100, 64).build().unwrap();
    let inputs = Inputs::randn(&problem, 4).unwrap();
    let error = |tf32| {
        let options = plan::Options { tf32, ..plan::Options::default() };
        relative_error(Sm::Sm80, &problem, &inputs, &options)
    };
    let (three, one) = (error(false), error(true));
    assert!(three < 1e-5, "{three}");
    assert!((1e-5..2e-3).contains(&one), "{one}");
}

/// Tiles are swizzled so that neither copies nor fragments meet in a bank.
#[test]
fn no_bank_conflicts() {
    for (sm, dtype) in [(Sm::Sm75, Dtype::F16), (Sm::Sm80, Dtype::Bf16), (Sm::Sm90, Dtype::F16), (Sm::Sm80, Dtype::F32)]
    {
        for head_dim in [32, 64, 96, 128, 256] {
            let problem = ProblemSpec::new(1, 1, 256, head_dim).dtype(dtype).build().unwrap();
            let inputs = Inputs::randn(&problem, 1).unwrap();
            let options = plan::Options { splits: Some(1), ..plan::Options::default() };
            let layout = Layout::contiguous(&problem);
            let plan = plan_with(Stratum::V2Tc, &problem, Target::best(sm), &layout, &options).unwrap();
            let computed = compute(&mut device(sm, Policy::Eager), &plan, &problem, &inputs).unwrap();
            let counters = computed.reports[0].counters(&plan.launches[0].kernel, Level::Merged);
            let conflicts = counters.shared_load_bank_conflicts + counters.shared_store_bank_conflicts;
            let wavefronts = counters.shared_load_wavefronts + counters.shared_store_wavefronts;
            assert!(100 * conflicts <= wavefronts, "{problem} on {sm}: {conflicts} of {wavefronts}");
        }
    }
}
