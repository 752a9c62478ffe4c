//! What comes out.

use arch::Sm;
use kernels::cases::CASES;
use kernels::{Dtype, Inputs, Problem, ProblemSpec, Stratum, check, plain, reference};

use crate::run;

/// The contract's cases that a stratum covers, in every type.
fn cases(stratum: Stratum, sm: Sm) {
    let features = stratum.coverage().features;
    let mut failures = Vec::new();
    let mut ran = 0;
    for case in CASES {
        for dtype in Dtype::ALL {
            for call in case.runs(dtype, 11).unwrap() {
                if call.features().iter().any(|feature| !features.contains(feature)) {
                    continue;
                }
                ran += 1;
                let mut backend =
                    |problem: &Problem, inputs: &Inputs| run(stratum, sm, problem, inputs, None).map(|ran| ran.outputs);
                match call.verify(&mut backend) {
                    Ok(verdict) if verdict.passed() => {}
                    outcome => {
                        let name = format!("case {} {} {}", case.number, call.label, call.problem);
                        failures.push(format!("{name}: {outcome:?}"));
                    }
                }
            }
        }
    }
    assert!(ran > 100, "{stratum} covers {ran} calls");
    assert!(failures.is_empty(), "{stratum}: {} of {ran} failed\n{}", failures.len(), failures.join("\n"));
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
