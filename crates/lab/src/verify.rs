//! The contract's cases and random small problems, run by a stratum on any backend.

use std::fmt;
use std::str::FromStr;

use arch::Target;
use kernels::cases::{CASES, CaseError, Expect, Run, VerifyError};
use kernels::{Dtype, Inputs, Layout, PlanError, Problem, ProblemSpec, Stratum, Tiles, Verdict};
use ptx::Backend;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use thiserror::Error;

use crate::compute::{ComputeError, compute};

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
    /// What came of it.
    pub outcome: Outcome,
}

/// The calls of a case in a type, with inputs drawn from `seed`.
///
/// # Errors
/// When the inputs do not fit in memory.
pub fn runs(case: CaseId, dtype: Dtype, seed: u64) -> Result<Vec<Run>, CaseError> {
    match case {
        CaseId::Contract(number) => match CASES.iter().find(|case| case.number == number) {
            Some(case) => case.runs(dtype, seed),
            None => Ok(Vec::new()),
        },
        CaseId::Random(number) => Ok(vec![random(dtype, seed, number)?]),
    }
}

/// A small problem within what every stratum covers: lengths beyond a tile or two, odd dimensions, a GQA ratio, causal or
/// not, and tensors that lie as `[batch, heads, seqlen, dim]` or as `[batch, seqlen, heads, dim]`.
fn random(dtype: Dtype, seed: u64, number: u32) -> Result<Run, CaseError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(u64::from(number) + 1);
    let dims = [1, 8, 24, 33, 40, 64, 72, 96, 128];
    let heads_kv = rng.random_range(1..=2);
    let heads_q = heads_kv * rng.random_range(1..=3);
    let seqlen_q = rng.random_range(1..=130);
    let head_dim = dims[rng.random_range(0..dims.len())];
    let mut spec =
        ProblemSpec::new(rng.random_range(1..=2), heads_q, seqlen_q, head_dim).heads_kv(heads_kv).dtype(dtype);
    if rng.random() {
        spec = spec.seqlen_k(rng.random_range(0..=200));
    }
    if rng.random() {
        spec = spec.head_dim_v(dims[rng.random_range(0..dims.len())]);
    }
    if rng.random() {
        spec = spec.causal();
    }
    let problem = spec.build()?;
    let mut inputs = Inputs::randn(&problem, rng.random())?;
    for tensor in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
        if rng.random() {
            // The same elements, stored head by head.
            *tensor = tensor.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
        }
    }
    Ok(Run { label: "random", problem, inputs, expect: Expect::Reference })
}

/// Runs a case with a stratum; `backend` makes a backend for each computation, so that a fault spoils no other.
///
/// # Errors
/// When the inputs cannot be made, or a backend cannot be.
pub fn verify<B: Backend>(
    stratum: Stratum,
    tiles: Option<Tiles>,
    case: CaseId,
    dtype: Dtype,
    seed: u64,
    backend: &mut impl FnMut() -> Result<B, B::Error>,
) -> Result<Vec<Checked>, CaseError> {
    let mut compute_one = |problem: &Problem, inputs: &Inputs| {
        let mut backend = backend().map_err(ComputeError::Backend)?;
        let layout = Layout::of(problem, inputs)?;
        let plan = kernels::plan(stratum, problem, Target::best(backend.sm()), &layout, tiles)?;
        compute(&mut backend, &plan, problem, inputs).map(|computed| computed.outputs)
    };
    let runs = runs(case, dtype, seed)?;
    let checked = runs.into_iter().map(|run| {
        let coverage = stratum.coverage();
        let covered = coverage.dtypes.contains(&dtype)
            && run.features().iter().all(|feature| coverage.features.contains(feature))
            && run.problem.head_dim.max(run.problem.head_dim_v) <= coverage.max_head_dim;
        let outcome = if covered { outcome(run.verify(&mut compute_one)) } else { Outcome::NotCovered };
        Checked { case, label: run.label.to_owned(), problem: run.problem, outcome }
    });
    Ok(checked.collect())
}

fn outcome<E: std::error::Error>(verified: Result<Verdict, VerifyError<ComputeError<E>>>) -> Outcome {
    match verified {
        Ok(Verdict { wrong: Some(wrong), .. }) => Outcome::Failed(wrong.to_string()),
        Ok(_) => Outcome::Passed,
        // Strides that the copy engine cannot address, and another GPU: no feature of the problem says so.
        Err(VerifyError::Backend(ComputeError::Plan(
            PlanError::TensorMap { .. } | PlanError::Target { .. } | PlanError::Lacks { .. },
        ))) => Outcome::NotCovered,
        Err(VerifyError::Backend(error)) => Outcome::Failed(error.to_string()),
        Err(VerifyError::Outputs(error)) => Outcome::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use arch::Sm;
    use emulator::{Device, Options};

    use super::*;

    #[test]
    fn cases_are_named_as_they_print() {
        for id in CaseId::all(2) {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert_eq!(CaseId::all(2).len(), 17);
        for wrong in ["0", "16", "r", "rx", "", "-1"] {
            assert!(wrong.parse::<CaseId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn random_problems_come_again_and_differ() {
        let one = random(Dtype::F16, 7, 3).unwrap();
        assert_eq!(one.problem, random(Dtype::F16, 7, 3).unwrap().problem);
        let others: Vec<_> = (0..8).map(|n| random(Dtype::F16, 7, n).unwrap().problem.to_string()).collect();
        assert!(others.iter().collect::<std::collections::HashSet<_>>().len() >= 7, "{others:?}");
        assert!((0..8).any(|n| !random(Dtype::F16, 7, n).unwrap().inputs.features().is_empty()));
    }

    #[test]
    fn a_stratum_passes_a_case_and_skips_what_it_does_not_cover() {
        let mut emulator = || Ok(Device::new(Options::new(Sm::Sm75)));
        let causal = verify(Stratum::V2, None, CaseId::Contract(3), Dtype::F32, 1, &mut emulator).unwrap();
        assert!(causal.iter().all(|one| one.outcome == Outcome::Passed), "{causal:?}");
        let packed = verify(Stratum::V2, None, CaseId::Contract(2), Dtype::F32, 1, &mut emulator).unwrap();
        assert!(packed.iter().all(|one| one.outcome == Outcome::NotCovered));
    }

    #[test]
    fn a_failing_backend_is_a_failed_call() {
        let mut emulator = || Ok(Device::new(Options { budget_per_cta: 100, ..Options::new(Sm::Sm75) }));
        let checked = verify(Stratum::V2, None, CaseId::Contract(6), Dtype::F32, 1, &mut emulator).unwrap();
        let Outcome::Failed(why) = &checked[0].outcome else { panic!("{checked:?}") };
        assert!(why.contains("taken for hung"), "{why}");
    }
}
