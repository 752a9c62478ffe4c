//! The contract's cases, in every type.

use kernels::cases::CASES;
use kernels::{Dtype, Verdict};

#[test]
fn every_case_passes() {
    let mut failed = Vec::new();
    for case in &CASES {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for run in case.runs(dtype, 7).unwrap() {
                let mut compute = |problem: &_, inputs: &_| cpu::compute(problem, inputs, cpu::Options::default());
                let verdict = run.verify(&mut compute);
                let named = format!("case {} {dtype} {} {}", case.number, run.label, run.problem);
                match verdict {
                    Ok(Verdict { wrong: None, .. }) => {}
                    Ok(Verdict { wrong: Some(wrong), .. }) => failed.push(format!("{named}: {wrong}")),
                    Err(error) => failed.push(format!("{named}: {error}")),
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
