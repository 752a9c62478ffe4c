//! What comes out.

use arch::Sm;
use kernels::cases::CASES;
use kernels::{Dtype, Inputs, Mask, Problem, ProblemSpec, Stratum, Tiles, check, plain, reference};

use crate::run;

/// The contract's cases that a stratum covers, in every type.
fn cases(stratum: Stratum, sm: Sm) {
    let features = stratum.coverage().features;
    let mut failures = Vec::new();
    let mut passed = Vec::new();
    for case in CASES {
        for dtype in Dtype::UNSCALED {
            for call in case.runs(dtype, 11).unwrap() {
                if call.features().iter().any(|feature| !features.contains(feature)) {
                    continue;
                }
                let mut backend =
                    |problem: &Problem, inputs: &Inputs| run(stratum, sm, problem, inputs, None).map(|ran| ran.outputs);
                match call.verify(&mut backend) {
                    Ok(verdict) if verdict.passed() => passed.push(case.number),
                    outcome => {
                        let name = format!("case {} {} {}", case.number, call.label, call.problem);
                        failures.push(format!("{name}: {outcome:?}"));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{stratum}: {} failed\n{}", failures.len(), failures.join("\n"));
    passed.sort_unstable();
    passed.dedup();
    assert_eq!(passed, [1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 15], "the cases that {stratum} covers");
}

#[test]
fn naive_passes_the_cases() {
    cases(Stratum::Naive, Sm::Sm75);
}

#[test]
fn v1_passes_the_cases() {
    cases(Stratum::V1, Sm::Sm75);
}

#[test]
fn v2_passes_the_cases() {
    cases(Stratum::V2, Sm::Sm75);
}

#[test]
fn v2_kt_passes_the_cases() {
    cases(Stratum::V2Kt, Sm::Sm90);
}

/// Normal inputs within the tolerance.
fn within_tolerance(stratum: Stratum, sm: Sm, spec: &ProblemSpec, tiles: Option<Tiles>, seed: u64) {
    let problem = spec.clone().build().unwrap();
    let inputs = Inputs::randn(&problem, seed).unwrap();
    let name = format!("{stratum} on {sm}, {problem}, {tiles:?}");
    let ran = run(stratum, sm, &problem, &inputs, tiles).unwrap_or_else(|error| panic!("{name}: {error}"));
    let reference = reference(&problem, &inputs).unwrap();
    let verdict = check(&problem, &ran.outputs, &reference, &plain(&problem, &inputs).unwrap()).unwrap();
    assert!(verdict.passed(), "{name}: {verdict:?}");
}

/// Every kind of head dimension, with lengths off the tiles' borders, on old and new architectures.
#[test]
fn head_dims_and_lengths() {
    let lengths = [(1, 1), (33, 31), (5, 70), (70, 5), (64, 96), (47, 129), (65, 64), (31, 200)];
    let dims = [(1, 1), (7, 7), (33, 33), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (64, 20), (18, 70)];
    let mut count = 0;
    for (d, d_v) in dims {
        for dtype in Dtype::UNSCALED {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                for stratum in Stratum::ON_CUDA_CORES {
                    let (seqlen_q, seqlen_k) = lengths[count % lengths.len()];
                    let sm = [Sm::Sm75, Sm::Sm90, Sm::Sm80][count / 5 % 3];
                    let spec = ProblemSpec::new(1, 2, seqlen_q, d).seqlen_k(seqlen_k).head_dim_v(d_v);
                    let spec = spec.heads_kv(1 + count % 2).dtype(dtype).mask(mask);
                    within_tolerance(stratum, sm, &spec, None, count as u64);
                    count += 1;
                }
                count += 1;
            }
        }
    }
}

/// Tile sizes other than the defaults.
#[test]
fn tile_sizes() {
    let tiles =
        [(16, 16, 64), (64, 32, 128), (32, 64, 128), (64, 16, 256), (48, 48, 256), (8, 32, 128), (128, 16, 512)];
    for (index, (block_q, block_kv, threads)) in tiles.into_iter().enumerate() {
        for stratum in Stratum::ON_CUDA_CORES {
            let tiles = Tiles { block_q, block_kv, threads };
            let spec = ProblemSpec::new(2, 1, 130, 48).seqlen_k(77).mask([Mask::FULL, Mask::CAUSAL][index % 2]);
            within_tolerance(stratum, Sm::Sm75, &spec, Some(tiles), index as u64);
        }
    }
}
