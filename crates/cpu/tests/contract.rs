//! The contract's cases, in every type and with all instructions that the processor has.

use cpu::{Error, Instructions, Options};
use kernels::cases::CASES;
use kernels::{Dtype, Inputs, Problem, Verdict};

fn failures(instructions: Instructions) -> Vec<String> {
    let options = Options { instructions: Some(instructions), ..Options::default() };
    let mut failed = Vec::new();
    for case in &CASES {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for run in case.runs(dtype, 7).unwrap() {
                let why = match run.verify(&mut |problem, inputs| cpu::compute(problem, inputs, options)) {
                    Ok(Verdict { wrong: None, .. }) => continue,
                    Ok(Verdict { wrong: Some(wrong), .. }) => wrong.to_string(),
                    Err(error) => error.to_string(),
                };
                failed
                    .push(format!("{instructions}: case {} {dtype} {} {}: {why}", case.number, run.label, run.problem));
            }
        }
    }
    failed
}

#[test]
fn every_case_passes_with_all_instructions() {
    let failed: Vec<_> = Instructions::all().into_iter().flat_map(failures).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The keys of few queries are divided among threads.
#[test]
fn the_number_of_threads_decides_the_bits_and_nothing_else_does() {
    let problem: Problem = "1x2x3/2000x40 bf16".parse().unwrap();
    let inputs = Inputs::randn(&problem, 3).unwrap();
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let compute = || pool.install(|| cpu::compute(&problem, &inputs, Options::default()).unwrap());
        let first = compute();
        for _ in 0..5 {
            let again = compute();
            assert_eq!(again.out.storage(), first.out.storage());
            assert_eq!(again.lse.storage(), first.lse.storage());
        }
    }
}

#[test]
fn a_call_can_be_stopped_and_tells_how_far_it_is() {
    let problem: Problem = "1x8x300x32".parse().unwrap();
    let inputs = Inputs::randn(&problem, 3).unwrap();
    let cancel = std::sync::atomic::AtomicBool::new(true);
    let stopped = cpu::compute(&problem, &inputs, Options { cancel: Some(&cancel), ..Options::default() });
    assert_eq!(stopped.unwrap_err(), Error::Cancelled.into());
    let most = std::sync::Mutex::new((0, 0));
    let progress = |done, of| {
        let mut most = most.lock().unwrap();
        *most = (most.0.max(done), of);
    };
    cpu::compute(&problem, &inputs, Options { progress: Some(&progress), ..Options::default() }).unwrap();
    let (done, of) = *most.lock().unwrap();
    assert!(done == of && of > 0);
}
