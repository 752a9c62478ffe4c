//! The Hopper stratum, whose warps run apart: under every policy of the copy engine, with CTAs that stay.

use arch::Sm;
use emulator::{Device, Options, Policy};
use flashstrata::Planner;
use flashstrata::compute::compute;
use kernels::{
    Dtype, Inputs, Layout, Mask, Plan, Problem, ProblemSpec, Stratum, Technique, Tiles, check, plain, reference,
};
use lab::{CaseId, Outcome, verify};

/// So few multiprocessors that a CTA takes several tiles.
const FEW: u32 = 2;

const POLICIES: [Policy; 4] = [Policy::Eager, Policy::Lazy, Policy::Random(1), Policy::Random(2)];

fn device(policy: Policy, multiprocessors: u32) -> Device<'static> {
    let options = Options { policy, ..Options::new(Sm::Sm90) };
    Device { multiprocessors: Some(multiprocessors), ..Device::new(options) }
}

#[test]
fn v3_passes_the_cases() {
    let planner = Planner::new(arch::Gpu::find("H100").unwrap().into()).stratum(Stratum::V3);
    // Eager, each type is in CI's `strata verify`.
    let calls = [
        (Policy::Lazy, Dtype::F16),
        (Policy::Random(1), Dtype::Bf16),
        (Policy::Random(2), Dtype::E4m3),
        (Policy::Lazy, Dtype::E4m3),
    ];
    for (index, (policy, dtype)) in calls.into_iter().enumerate() {
        let mut passed = Vec::new();
        for case in CaseId::all(6) {
            let seed = index as u64;
            for checked in verify(&planner, case, dtype, seed, &mut || Ok(device(policy, FEW))).unwrap() {
                match checked.outcome {
                    Outcome::Passed => passed.push(checked.case.to_string()),
                    Outcome::NotCovered => {}
                    Outcome::Failed(what) => panic!("{} {} under {policy:?}: {what}", checked.case, checked.problem),
                }
            }
        }
        passed.dedup();
        let all = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15";
        assert!(passed.join(" ").starts_with(all), "the cases that v3 covers: {}", passed.join(" "));
    }
}

fn within_tolerance(spec: &ProblemSpec, tiles: Option<Tiles>, policy: Policy, multiprocessors: u32) {
    let options = kernels::Options { tiles, ..kernels::Options::default() };
    within_tolerance_of(spec, &options, policy, multiprocessors);
}

fn within_tolerance_of(spec: &ProblemSpec, options: &kernels::Options, policy: Policy, multiprocessors: u32) {
    let problem: Problem = spec.clone().build().unwrap();
    let inputs = Inputs::randn(&problem, 5).unwrap();
    holds(&problem, &inputs, options, policy, multiprocessors);
}

/// The plan for contiguous tensors.
fn planned(spec: &ProblemSpec, options: &kernels::Options) -> Plan {
    let problem: Problem = spec.clone().build().unwrap();
    plan_on(&problem, &Layout::contiguous(&problem), options)
}

fn plan_on(problem: &Problem, layout: &Layout, options: &kernels::Options) -> Plan {
    kernels::plan_with(Stratum::V3, problem, arch::Target::best(Sm::Sm90), layout, options).unwrap()
}

fn holds(problem: &Problem, inputs: &Inputs, options: &kernels::Options, policy: Policy, multiprocessors: u32) {
    let name = format!("{problem}, {options:?}, {policy:?}, {multiprocessors} multiprocessors");
    let plan = plan_on(problem, &Layout::of(problem, inputs).unwrap(), options);
    let computed = compute(&mut device(policy, multiprocessors), &plan, problem, inputs);
    let computed = computed.unwrap_or_else(|error| panic!("{name}: {error}"));
    let reference = reference(problem, inputs).unwrap();
    let verdict = check(problem, &computed.outputs, &reference, &plain(problem, inputs).unwrap()).unwrap();
    assert!(verdict.passed(), "{name}: {verdict:?}");
}

/// Head dimensions that the copy engine can address, lengths off the tiles' borders, every kind of mask.
#[test]
fn head_dims_lengths_and_masks() {
    let lengths = [(1, 1), (33, 31), (5, 270), (270, 5), (128, 128), (147, 329), (65, 64), (300, 200)];
    let dims = [(8, 8), (40, 40), (64, 64), (72, 24), (96, 96), (128, 128), (64, 256), (256, 256)];
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(40, 3), Mask::window(0, -1), Mask::window(130, -20)];
    for (index, (d, d_v)) in dims.into_iter().enumerate() {
        for (kind, mask) in masks.into_iter().enumerate() {
            let (seqlen_q, seqlen_k) = lengths[(index + 3 * kind) % lengths.len()];
            let spec = ProblemSpec::new(2, 2, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v).mask(mask);
            let spec = spec.heads_kv(1 + index % 2).dtype([Dtype::F16, Dtype::Bf16][kind % 2]);
            within_tolerance(&spec, None, POLICIES[(index + kind) % POLICIES.len()], 1 + index as u32 % 3);
        }
    }
}

const GROUPS: [usize; 9] = [2, 3, 4, 5, 6, 7, 8, 16, 64];

/// Query heads that share tiles, with every kind of score: by group, few queries and masks.
#[test]
fn heads_that_share_tiles() {
    let queries = [1, 3, 16, 64, 100];
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(40, 3), Mask::window(0, -1), Mask::window(130, -20)];
    let dims = [(64, 64), (128, 128), (40, 72), (256, 256), (96, 96), (32, 64), (192, 128)];
    for (index, group) in GROUPS.into_iter().enumerate() {
        for (turn, seqlen_q) in queries.into_iter().enumerate() {
            let number = index * queries.len() + turn;
            let (heads_kv, (d, d_v)) = (1 + number % 2, dims[number % dims.len()]);
            let seqlen_k = [270, 5, 329, 128, 64, 200, 1][(number + turn) % 7];
            let mut spec = ProblemSpec::new(2, group * heads_kv, seqlen_q, d).heads_kv(heads_kv).head_dim_v(d_v);
            spec = spec.seqlen_k(seqlen_k).mask(masks[(index + turn) % masks.len()]);
            spec = spec.dtype([Dtype::F16, Dtype::Bf16, Dtype::Bf16, Dtype::F16][number % 4]);
            if number % 3 == 1 {
                let slopes = 2 * group * heads_kv;
                spec = spec.alibi_slopes((0..slopes).map(|head| 0.5 / (1 + head) as f32).collect());
            }
            if number % 5 == 2 {
                spec = spec.softcap(5.0);
            }
            if d % 16 == 0 && d_v % 16 == 0 && number % 4 == 3 {
                spec = spec.dtype(Dtype::E4m3);
            }
            let grouped = planned(&spec, &kernels::Options::default()).config.grouped;
            assert!(grouped || group * seqlen_q > 64, "{group} heads of {seqlen_q} queries");
            within_tolerance(&spec, None, POLICIES[number % POLICIES.len()], 1 + number as u32 % 3);
        }
    }
}

/// The same of packed sequences, empty ones among them, of tensors that lie otherwise, on given tiles, and by threads that load
/// and compute.
#[test]
fn heads_that_share_tiles_elsewhere() {
    let (cu_q, cu_k) = (vec![0, 0, 20, 21, 50], vec![0, 70, 70, 400, 530]);
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(30, 30)];
    for (index, group) in GROUPS.into_iter().enumerate() {
        let (policy, mask) = (POLICIES[index % POLICIES.len()], masks[index % masks.len()]);
        let dtype = [Dtype::Bf16, Dtype::E4m3][index % 2];
        let mut packed = ProblemSpec::packed(2 * group, 64, cu_q.clone(), cu_k.clone()).heads_kv(2);
        packed = packed.dtype(dtype).mask(mask);
        if index % 3 == 0 {
            packed = packed.alibi_slopes((0..8 * group).map(|head| 0.5 / (1 + head) as f32).collect());
        }
        within_tolerance(&packed, None, policy, FEW);

        let tiles = [(64, 64), (128, 64), (192, 48)][index % 3];
        let tiles = Tiles { block_q: tiles.0, block_kv: tiles.1, threads: 2 * tiles.0 + 128 };
        let spec = ProblemSpec::new(1, 2 * group, 20, 64).seqlen_k(233).heads_kv(2).dtype(Dtype::Bf16).mask(mask);
        let without = [Technique::Producer].into_iter().filter(|_| index % 2 == 0).collect();
        let options = kernels::Options { tiles: Some(tiles), without, ..kernels::Options::default() };
        assert!(planned(&spec, &options).config.grouped);
        within_tolerance_of(&spec, &options, policy, FEW);

        // Head by head, and keys and values that are the same for all of them.
        let problem = spec.build().unwrap();
        let mut inputs = Inputs::randn(&problem, 6).unwrap();
        inputs.q = inputs.q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
        inputs.k = inputs.k.narrow(2, 1, 1).unwrap().contiguous().unwrap().expand(2, 2).unwrap();
        holds(&problem, &inputs, &kernels::Options::default(), policy, 1);
    }
}

/// With techniques left out, as they are measured (docs/v3-by-parts.md).
#[test]
fn techniques_left_out() {
    let lengths = [(33, 31), (5, 470), (470, 5), (247, 629), (300, 200)];
    let tiles = [(64, 64), (128, 64), (192, 48)];
    for (index, (seqlen_q, seqlen_k)) in lengths.into_iter().enumerate() {
        for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(130, -20)] {
            // Every set of the first three, and the threshold by itself, where outputs are wide.
            for left_out in 1..=8usize {
                let without = Technique::ALL.into_iter().filter(|&part| left_out >> part as usize & 1 == 1).collect();
                let (block_q, block_kv) = tiles[(index + left_out) % tiles.len()];
                let tiles = Tiles { block_q, block_kv, threads: 2 * block_q + 128 };
                let (head_dim, tiles) = if left_out == 8 { (256, None) } else { (64, Some(tiles)) };
                let options = kernels::Options { tiles, without, ..kernels::Options::default() };
                let spec = ProblemSpec::new(1, 3, seqlen_q, head_dim).seqlen_k(seqlen_k).mask(mask).dtype(Dtype::Bf16);
                within_tolerance_of(
                    &spec,
                    &options,
                    POLICIES[(index + left_out) % POLICIES.len()],
                    1 + index as u32 % 3,
                );
            }
        }
    }
}

/// Two CTAs that load each block together (docs/v3-by-parts.md): one pair of tiles and several, with a tile past the end, keys off the
/// blocks' borders, more pairs than clusters.
#[test]
fn clusters() {
    let lengths = [(256, 256), (33, 31), (700, 329), (130, 470), (1, 1), (640, 64), (300, 5), (270, 0)];
    let dims = [(64, 64), (128, 128), (256, 256), (40, 40), (72, 24), (96, 96), (64, 256), (8, 8)];
    for (index, (d, d_v)) in dims.into_iter().enumerate() {
        for (kind, policy) in POLICIES.into_iter().enumerate() {
            let (seqlen_q, seqlen_k) = lengths[(index + 3 * kind) % lengths.len()];
            let spec = ProblemSpec::new(1 + kind % 2, 2, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v);
            let spec = spec.heads_kv(1 + index % 2).dtype([Dtype::F16, Dtype::Bf16][kind % 2]);
            within_tolerance_of(&spec, &in_clusters(None), policy, 1 + 2 * (index as u32 % 3));
        }
    }
    for (index, (d, d_v)) in [(64, 64), (128, 128), (48, 256), (256, 80)].into_iter().enumerate() {
        for (kind, policy) in POLICIES.into_iter().enumerate() {
            let (seqlen_q, seqlen_k) = lengths[(3 * index + kind) % lengths.len()];
            let spec = ProblemSpec::new(1, 4, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v).dtype(Dtype::E4m3);
            within_tolerance_of(&spec.heads_kv(2), &in_clusters(None), policy, FEW);
        }
    }
    let bent = |spec: ProblemSpec| spec.softcap(5.0).alibi_slopes(vec![0.5, 0.25]);
    for (block_q, block_kv, policy) in
        [(64, 16, Policy::Lazy), (128, 48, Policy::Random(1)), (192, 64, Policy::Random(2))]
    {
        let tiles = Tiles { block_q, block_kv, threads: 2 * block_q + 128 };
        let spec = bent(ProblemSpec::new(1, 2, 333, 64).seqlen_k(277).dtype(Dtype::Bf16));
        within_tolerance_of(&spec, &in_clusters(Some(tiles)), policy, FEW);
    }
}

fn in_clusters(tiles: Option<Tiles>) -> kernels::Options {
    kernels::Options { tiles, cluster: Some(2), ..kernels::Options::default() }
}

/// What clusters are for: keys and values are read half as often.
#[test]
fn clusters_read_keys_once_for_two_tiles() {
    let problem = ProblemSpec::new(1, 2, 512, 64).seqlen_k(640).dtype(Dtype::F16).build().unwrap();
    let inputs = Inputs::randn(&problem, 5).unwrap();
    let layout = Layout::contiguous(&problem);
    let bytes = |cluster| {
        let tiles = Some(Tiles { block_q: 128, block_kv: 128, threads: 384 });
        let options = kernels::Options { tiles, cluster, ..kernels::Options::default() };
        let target = arch::Target::best(Sm::Sm90);
        let plan = kernels::plan_with(Stratum::V3, &problem, target, &layout, &options).unwrap();
        let computed = compute(&mut device(Policy::Eager, FEW), &plan, &problem, &inputs).unwrap();
        computed.reports[0].counters(&plan.launches[0].kernel, emulator::Level::Ptx).bulk_load_bytes
    };
    let (queries, keys_and_values) = (2 * 512 * 64 * 2, 2 * 2 * 640 * 64 * 2);
    assert_eq!(bytes(None), queries + 4 * keys_and_values);
    assert_eq!(bytes(Some(2)), queries + 2 * keys_and_values);
}

/// CTAs of a cluster go through the same blocks in the same order.
#[test]
fn calls_without_clusters() {
    let spec = || ProblemSpec::new(1, 2, 256, 64).dtype(Dtype::Bf16);
    let packed = ProblemSpec::packed(2, 64, vec![0, 256, 300], vec![0, 256, 300]).dtype(Dtype::Bf16);
    let alone = |options: kernels::Options| kernels::Options {
        without: [Technique::Producer].into_iter().collect(),
        ..options
    };
    let of_three = kernels::Options { cluster: Some(3), ..kernels::Options::default() };
    let calls = [
        (spec().mask(Mask::CAUSAL), in_clusters(None), "in calls without a mask alone"),
        (spec().mask(Mask::window(40, 3)), in_clusters(None), "in calls without a mask alone"),
        (packed, in_clusters(None), "in calls whose sequences have one length alone"),
        (spec(), alone(in_clusters(None)), "in calls with a warpgroup that loads alone"),
        (ProblemSpec::new(1, 2, 256, 36).dtype(Dtype::Bf16), in_clusters(None), "tensor map"),
        (spec(), of_three, "cluster is 3: it must be 1 to 2"),
    ];
    for (spec, options, why) in calls {
        let problem = spec.build().unwrap();
        let (target, layout) = (arch::Target::best(Sm::Sm90), Layout::contiguous(&problem));
        let error = kernels::plan_with(Stratum::V3, &problem, target, &layout, &options).unwrap_err();
        assert!(error.to_string().contains(why), "{problem}: {error}");
        assert_eq!(error.is_coverage(), options.cluster == Some(2), "{problem}: {error}");
    }
}

/// Head dimensions, lengths and masks of 8-bit types, which the copy engine addresses by 16 columns.
#[test]
fn eight_bits() {
    let lengths = [(1, 1), (33, 31), (5, 270), (270, 5), (128, 128), (147, 329), (65, 64), (300, 500)];
    let dims = [(16, 16), (48, 48), (64, 64), (80, 32), (96, 96), (128, 128), (64, 256), (256, 256)];
    let masks = [Mask::FULL, Mask::CAUSAL, Mask::window(40, 3), Mask::window(0, -1)];
    for (index, (d, d_v)) in dims.into_iter().enumerate() {
        for (kind, mask) in masks.into_iter().enumerate() {
            let (seqlen_q, seqlen_k) = lengths[(index + 3 * kind) % lengths.len()];
            let spec = ProblemSpec::new(2, 4, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v).mask(mask);
            let spec = spec.heads_kv([1, 2, 4][index % 3]).dtype(Dtype::E4m3);
            within_tolerance(&spec, None, POLICIES[(index + kind) % POLICIES.len()], 1 + index as u32 % 3);
        }
    }
}

/// So few numbers that what rounding a weight to 8 bits does to an output is not outweighed by others.
#[test]
fn eight_bits_of_few_keys() {
    for (head_dim, seqlen_k) in [(16, 2), (16, 3), (16, 8), (64, 2)] {
        for seed in 0..24 {
            let problem = ProblemSpec::new(1, 1, 1, head_dim).seqlen_k(seqlen_k).dtype(Dtype::E4m3).build().unwrap();
            let inputs = Inputs::randn(&problem, seed).unwrap();
            holds(&problem, &inputs, &kernels::Options::default(), Policy::Lazy, FEW);
        }
    }
    // Wide heads, and more than a warpgroup's rows.
    for head_dim in [128, 256] {
        let spec = ProblemSpec::new(1, 2, 150, head_dim).seqlen_k(40).dtype(Dtype::E4m3);
        for spec in [spec.clone(), spec.clone().causal(), spec.mask(Mask::window(20, 5)).softcap(5.0)] {
            within_tolerance(&spec, None, Policy::Random(3), FEW);
        }
    }
}

/// Rows that the copy engine cannot address: threads copy them, 8 or 4 bytes at once.
#[test]
fn rows_that_threads_copy() {
    let dims = [(36, 36), (34, 66), (100, 20), (132, 256), (250, 50)];
    let lengths = [(33, 31), (147, 329), (300, 200), (1, 270), (129, 1)];
    for (index, (d, d_v)) in dims.into_iter().enumerate() {
        for (kind, mask) in [Mask::FULL, Mask::CAUSAL, Mask::window(40, 3)].into_iter().enumerate() {
            let (seqlen_q, seqlen_k) = lengths[(index + 2 * kind) % lengths.len()];
            let spec = ProblemSpec::new(2, 2, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v).mask(mask);
            let spec = spec.heads_kv(1 + index % 2).dtype([Dtype::F16, Dtype::Bf16][kind % 2]);
            within_tolerance(&spec, None, POLICIES[(index + kind) % POLICIES.len()], 1 + index as u32 % 3);
        }
    }
    let packed = ProblemSpec::packed(2, 36, vec![0, 0, 300, 301, 460], vec![0, 70, 70, 400, 530]);
    for (policy, mask) in POLICIES.into_iter().zip([Mask::FULL, Mask::CAUSAL, Mask::window(30, 30)]) {
        within_tolerance(&packed.clone().dtype(Dtype::Bf16).mask(mask), None, policy, FEW);
    }
}

/// Packed sequences, empty ones and some shorter than the longest by whole tiles.
#[test]
fn packed_batches() {
    let (cu_q, cu_k) = (vec![0, 0, 300, 301, 460], vec![0, 70, 70, 400, 530]);
    for (index, mask) in [Mask::FULL, Mask::CAUSAL, Mask::window(30, 30)].into_iter().enumerate() {
        for dtype in [Dtype::Bf16, Dtype::E4m3] {
            let spec = ProblemSpec::packed(2, 64, cu_q.clone(), cu_k.clone()).dtype(dtype).mask(mask);
            within_tolerance(&spec, None, POLICIES[index], FEW);
        }
    }
}

#[test]
fn tile_sizes() {
    for (index, (block_q, block_kv)) in [(64, 16), (64, 128), (128, 80), (192, 64), (192, 96)].into_iter().enumerate() {
        let tiles = Tiles { block_q, block_kv, threads: 128 + 2 * block_q };
        let spec =
            ProblemSpec::new(1, 2, 333, 64).seqlen_k(277).dtype(Dtype::F16).mask([Mask::FULL, Mask::CAUSAL][index % 2]);
        within_tolerance(&spec, Some(tiles), POLICIES[index % POLICIES.len()], FEW);
    }
    for (index, (block_q, block_kv)) in [(64, 32), (64, 224), (128, 160), (192, 96), (128, 224)].into_iter().enumerate()
    {
        let tiles = Tiles { block_q, block_kv, threads: 128 + 2 * block_q };
        let spec = ProblemSpec::new(1, 2, 333, 128).seqlen_k(577).dtype(Dtype::E4m3);
        let spec = spec.mask([Mask::FULL, Mask::CAUSAL][index % 2]);
        within_tolerance(&spec, Some(tiles), POLICIES[index % POLICIES.len()], FEW);
    }
}
