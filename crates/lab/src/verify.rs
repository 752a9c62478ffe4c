//! The contract's cases and random small problems, run by a stratum, or by what the library picks, on any backend.

mod random;

use std::fmt;
use std::str::FromStr;

use flashstrata::compute::{ComputeError, compute};
use flashstrata::{PlanFailure, Planner};
use kernels::cases::{CASES, CaseError, Run, VerifyError};
use kernels::{Dtype, Feature, Inputs, Layout, Problem, Verdict};
use ptx::Backend;
use thiserror::Error;

pub use random::{Coverage, Traits};

/// A case that can be named on a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaseId {
    /// One of the contract, by its number.
    Contract(u8),
    /// A random problem, by its number under a seed.
    Random(u32),
}

impl CaseId {
    /// The contract's cases and so many random problems.
    pub fn all(random: u32) -> Vec<CaseId> {
        let contract = CASES.iter().map(|case| CaseId::Contract(case.number));
        contract.chain((0..random).map(CaseId::Random)).collect()
    }
}

impl fmt::Display for CaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CaseId::Contract(number) => write!(f, "{number}"),
            CaseId::Random(number) => write!(f, "r{number}"),
        }
    }
}

/// A text that names no case.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("case is `{given}`: it must be 1 to {}, or r0, r1, ... for a random problem", CASES.len())]
pub struct ParseCaseError {
    /// The text.
    given: String,
}

impl FromStr for CaseId {
    type Err = ParseCaseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let random = text.strip_prefix('r').and_then(|number| number.parse().ok()).map(CaseId::Random);
        let known = |number: &u8| CASES.iter().any(|case| case.number == *number);
        let contract = || text.parse().ok().filter(known).map(CaseId::Contract);
        random.or_else(contract).ok_or_else(|| ParseCaseError { given: text.to_owned() })
    }
}

/// What came of one call of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The result is right.
    Passed,
    /// The stratum does not cover it.
    NotCovered,
    /// It is wrong, or the backend failed; says how.
    Failed(String),
}

/// One call of a case.
#[derive(Clone, Debug)]
pub struct Checked {
    /// Which case.
    pub case: CaseId,
    /// What sets the call apart from the case's others.
    pub label: String,
    /// What was asked.
    pub problem: Problem,
    /// What a random problem was drawn as.
    pub traits: Option<Traits>,
    /// What came of it.
    pub outcome: Outcome,
}

/// The calls of a case in a type, with inputs drawn from `seed`.
///
/// # Errors
/// When the inputs do not fit in memory.
pub fn runs(case: CaseId, dtype: Dtype, seed: u64) -> Result<Vec<(Run, Option<Traits>)>, CaseError> {
    match case {
        CaseId::Contract(number) => match CASES.iter().find(|case| case.number == number) {
            Some(case) => Ok(case.runs(dtype, seed)?.into_iter().map(|run| (run, None)).collect()),
            None => Ok(Vec::new()),
        },
        CaseId::Random(number) => {
            let (run, traits) = random::random(dtype, seed, number)?;
            Ok(vec![(run, Some(traits))])
        }
    }
}

/// A call that was not computed.
#[derive(Debug, Error)]
enum Attempt<E> {
    #[error(transparent)]
    Plan(PlanFailure),
    #[error(transparent)]
    Compute(ComputeError<E>),
}

/// Runs a case as the planner plans it; `backend` makes a backend for each computation, so that a fault spoils no other.
///
/// # Errors
/// When the inputs cannot be made.
pub fn verify<B: Backend>(
    planner: &Planner,
    case: CaseId,
    dtype: Dtype,
    seed: u64,
    backend: &mut impl FnMut() -> Result<B, B::Error>,
) -> Result<Vec<Checked>, CaseError> {
    let mut compute_one = |problem: &Problem, inputs: &Inputs| {
        let layout = Layout::of(problem, inputs).map_err(|error| Attempt::Compute(error.into()))?;
        let plan = planner.plan(problem, &layout).map_err(Attempt::Plan)?;
        let mut backend = backend().map_err(|error| Attempt::Compute(ComputeError::Backend(error)))?;
        let computed = compute(&mut backend, &plan.kernels, problem, inputs).map_err(Attempt::Compute)?;
        Ok(computed.outputs)
    };
    let checked = runs(case, dtype, seed)?.into_iter().map(|(run, traits)| {
        // That tensors are strided is no matter of the problem, so no plan is refused for it.
        let takes_strides = |stratum: kernels::Stratum| stratum.coverage().features.contains(&Feature::Strided);
        let covered = run.inputs.features().is_empty() || planner.candidates().into_iter().any(takes_strides);
        // Which generation computes decides what may be wrong.
        let layout = Layout::of(&run.problem, &run.inputs).ok();
        let plan = layout.and_then(|layout| planner.plan(&run.problem, &layout).ok());
        let outcome = match plan.and_then(|plan| plan.stratum().relative_error(dtype)) {
            _ if !covered => Outcome::NotCovered,
            None => outcome(run.verify(&mut compute_one)),
            Some(share) => outcome(run.verify_relative(&mut compute_one, share)),
        };
        Checked { case, label: run.label.to_owned(), problem: run.problem, traits, outcome }
    });
    Ok(checked.collect())
}

/// Runs a case on the processor.
///
/// # Errors
/// When the inputs cannot be made.
pub fn verify_cpu(case: CaseId, dtype: Dtype, seed: u64, options: cpu::Options<'_>) -> Result<Vec<Checked>, CaseError> {
    let mut compute = |problem: &Problem, inputs: &Inputs| cpu::compute(problem, inputs, options);
    let checked = runs(case, dtype, seed)?.into_iter().map(|(run, traits)| {
        let outcome = match run.verify(&mut compute) {
            Ok(Verdict { wrong: Some(wrong), .. }) => Outcome::Failed(wrong.to_string()),
            Ok(_) => Outcome::Passed,
            Err(VerifyError::Backend(cpu::ComputeError::Attention(cpu::Error::Dtype { .. }))) => Outcome::NotCovered,
            Err(error) => Outcome::Failed(error.to_string()),
        };
        Checked { case, label: run.label.to_owned(), problem: run.problem, traits, outcome }
    });
    Ok(checked.collect())
}

fn outcome<E: std::error::Error>(verified: Result<Verdict, VerifyError<Attempt<E>>>) -> Outcome {
    match verified {
        Ok(Verdict { wrong: Some(wrong), .. }) => Outcome::Failed(wrong.to_string()),
        Ok(_) => Outcome::Passed,
        Err(VerifyError::Backend(Attempt::Plan(failure))) if failure.is_coverage() => Outcome::NotCovered,
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use arch::Sm;
    use emulator::{Device, Options};
    use kernels::Stratum;

    use super::*;

    #[test]
    fn cases_are_named_as_they_print() {
        for id in CaseId::all(2) {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert_eq!(CaseId::all(2).len(), 18);
        for wrong in ["0", "17", "r", "rx", "", "-1"] {
            assert!(wrong.parse::<CaseId>().is_err(), "{wrong}");
        }
    }

    fn planner(stratum: Option<Stratum>) -> Planner {
        let planner = Planner::new(arch::Gpu::find("RTX 2070").unwrap().into());
        stratum.into_iter().fold(planner, Planner::stratum)
    }

    #[test]
    fn a_stratum_passes_a_case_and_skips_what_it_does_not_cover() {
        let mut emulator = || Ok(Device::new(Options::new(Sm::Sm75)));
        for stratum in [Some(Stratum::V2), None] {
            let causal = verify(&planner(stratum), CaseId::Contract(3), Dtype::F32, 1, &mut emulator).unwrap();
            assert!(causal.iter().all(|one| one.outcome == Outcome::Passed), "{causal:?}");
        }
        let v3 = verify(&planner(Some(Stratum::V3)), CaseId::Contract(3), Dtype::F16, 1, &mut emulator).unwrap();
        assert!(v3.iter().all(|one| one.outcome == Outcome::NotCovered), "{v3:?}");
        let packed = verify(&planner(Some(Stratum::V2)), CaseId::Contract(2), Dtype::F32, 1, &mut emulator).unwrap();
        assert!(packed.iter().all(|one| one.outcome == Outcome::NotCovered));
    }

    #[test]
    fn a_failing_backend_is_a_failed_call() {
        let mut emulator = || Ok(Device::new(Options { budget_per_cta: 100, ..Options::new(Sm::Sm75) }));
        let checked = verify(&planner(Some(Stratum::V2)), CaseId::Contract(6), Dtype::F32, 1, &mut emulator).unwrap();
        let Outcome::Failed(why) = &checked[0].outcome else { panic!("{checked:?}") };
        assert!(why.contains("taken for hung"), "{why}");
    }
}
