//! `strata verify`.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::anyhow;
use clap::Args;
use flashstrata::Planner;
use kernels::{Dtype, Stratum, Technique};
use lab::{CaseId, Checked, Coverage, Outcome};

use crate::arguments::Choice;
use crate::device::Device;
use crate::{CANCEL, Failure, output};

/// What is verified.
#[derive(Debug, Args)]
pub struct VerifyArguments {
    /// What computes: emulator, cpu, cuda, or cuda:N for GPU N.
    #[arg(long, default_value = "emulator")]
    pub device: Device,
    /// The GPU to emulate, by its name.
    #[arg(long, default_value = "RTX 2070")]
    pub gpu: String,
    /// Which strata, separated by commas; all by default. auto is what the library picks for each call. (The CPU has none.)
    #[arg(long, alias = "strata", value_delimiter = ',', value_name = "LIST")]
    pub stratum: Vec<Choice>,
    /// Which cases, separated by commas: 1 to 16, and r0, r1, ... for random problems; all by default.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub case: Vec<CaseId>,
    /// Which types, separated by commas; all by default.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub dtype: Vec<Dtype>,
    /// How many random problems of each type; what they covered is told at the end.
    #[arg(long, default_value_t = 6, conflicts_with = "case")]
    pub random: u32,
    /// Parts of v3 that are left out: producer, turns, overlap, epilogue, slack, grouping, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub without: Vec<Technique>,
    /// CTAs of v3 that load blocks of keys and values together, 1 or 2; calls that have no clusters count as not covered.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cluster: u32,
    /// Seed of the inputs and of the random problems.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Runs the cases; one line per failure, and a summary.
pub fn verify(arguments: &VerifyArguments) -> Result<(), Failure> {
    let device = arguments.device.open(&arguments.gpu)?;
    if device.is_cpu() {
        if let Some(stratum) = arguments.stratum.iter().find(|&&choice| choice != Choice::Auto) {
            return Err(anyhow!("stratum is {stratum}: the CPU has code of its own, and no strata").into());
        }
        let options = cpu::Options { cancel: Some(&CANCEL), ..cpu::Options::default() };
        let verify = |_: Choice, case, dtype| lab::verify::verify_cpu(case, dtype, arguments.seed, options);
        return run(arguments, &[Choice::Auto], verify, || false);
    }
    let planner = device.planner()?.without(arguments.without.iter().copied().collect()).cluster(arguments.cluster);
    let all = Stratum::ALL.map(Choice::Stratum);
    let choices = if arguments.stratum.is_empty() { &all[..] } else { &arguments.stratum };
    match device.context() {
        None => {
            let sm = planner.hardware().sm;
            let options = emulator::Options { cancel: Some(&CANCEL), ..emulator::Options::new(sm) };
            let verify = |choice: Choice, case, dtype| {
                // So few that CTAs which stay take several tiles.
                let few = || emulator::Device { multiprocessors: Some(2), ..emulator::Device::new(options.clone()) };
                let mut emulator = || Ok(few());
                lab::verify(&choice.of(as_filled(&planner, case)), case, dtype, arguments.seed, &mut emulator)
            };
            run(arguments, choices, verify, || false)
        }
        Some(context) => {
            let verify = |choice: Choice, case, dtype| {
                lab::verify(&choice.of(as_filled(&planner, case)), case, dtype, arguments.seed, &mut || {
                    context.stream()
                })
            };
            // After a fault nothing more can be run in this process.
            run(arguments, choices, verify, || context.poisoned().is_some())
        }
    }
}

/// The planner of a case: random problems are small and fill no GPU, so every other one is planned as for a GPU that it fills.
fn as_filled(planner: &Planner, case: CaseId) -> Planner {
    match case {
        CaseId::Random(number) if number % 2 == 1 => planner.clone().multiprocessors(1),
        _ => planner.clone(),
    }
}

fn run(
    arguments: &VerifyArguments,
    choices: &[Choice],
    mut verify: impl FnMut(Choice, CaseId, Dtype) -> Result<Vec<Checked>, kernels::cases::CaseError>,
    is_spoiled: impl Fn() -> bool,
) -> Result<(), Failure> {
    let begin = Instant::now();
    let dtypes = if arguments.dtype.is_empty() { &Dtype::ALL[..] } else { &arguments.dtype };
    let cases = if arguments.case.is_empty() { CaseId::all(arguments.random) } else { arguments.case.clone() };
    let (mut passed, mut failed, mut not_covered) = (0, 0, 0);
    let (mut interrupted, mut spoiled) = (false, false);
    let mut coverage = Coverage::default();
    'all: for &choice in choices {
        for &dtype in dtypes {
            for &case in &cases {
                let checked = verify(choice, case, dtype)?;
                if CANCEL.load(Ordering::Relaxed) {
                    interrupted = true;
                    break 'all;
                }
                for one in checked {
                    coverage.count(&one);
                    match &one.outcome {
                        Outcome::Passed => passed += 1,
                        Outcome::NotCovered => not_covered += 1,
                        Outcome::Failed(why) => {
                            failed += 1;
                            output::print(&failure(arguments, choice, dtype, &one, why))?;
                        }
                    }
                }
                if is_spoiled() {
                    spoiled = true;
                    break 'all;
                }
            }
        }
    }
    if !coverage.is_empty() {
        output::print(&format!("random calls that were covered, of those drawn:\n{coverage}"))?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    output::print(&format!(
        "{}: {passed} calls passed, {failed} failed, {not_covered} not covered, in {seconds:.1} s{}\n",
        arguments.device,
        if spoiled { "; the rest was not run: a kernel faulted" } else { "" }
    ))?;
    match (interrupted, failed) {
        (true, _) => Err(Failure::Interrupted),
        (_, 0) => Ok(()),
        (_, failed) => Err(Failure::No(anyhow!("{failed} calls failed"))),
    }
}

/// One line: what failed, why, and a command that repeats it.
fn failure(arguments: &VerifyArguments, stratum: Choice, dtype: Dtype, one: &Checked, why: &str) -> String {
    let Checked { case, label, problem, .. } = one;
    let device = match arguments.device {
        Device::Emulator => format!("emulator --gpu '{}'", arguments.gpu),
        device => device.to_string(),
    };
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    format!(
        "FAILED {stratum} case {case} ({label}; {problem}): {why}; repeat with: strata verify --device {device} \
         --stratum {stratum} --dtype {dtype} --case {case} --seed {}\n",
        arguments.seed
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        verify: VerifyArguments,
    }

    #[test]
    fn the_printed_command_repeats_the_failure() {
        let arguments = Program::parse_from(["verify", "--device", "cuda:1", "--seed", "9"]).verify;
        let problem = kernels::ProblemSpec::new(1, 2, 3, 4).build().unwrap();
        let one = Checked {
            case: CaseId::Random(4),
            label: "random".into(),
            problem,
            traits: None,
            outcome: Outcome::Failed("wrong\nthere".into()),
        };
        let v2 = Choice::Stratum(Stratum::V2);
        let line = failure(&arguments, v2, Dtype::F16, &one, "wrong\n  there");
        assert_eq!(line.lines().count(), 1);
        assert!(line.contains("): wrong there; "), "{line}");
        let command = line.trim().split("repeat with: strata ").nth(1).unwrap();
        let again = Program::parse_from(command.split(' ')).verify;
        assert_eq!((again.device, again.seed), (Device::Cuda(1), 9));
        assert_eq!((again.stratum, again.dtype, again.case), (vec![v2], vec![Dtype::F16], vec![one.case]));
    }
}
