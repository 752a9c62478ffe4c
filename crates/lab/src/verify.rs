//! The contract's cases and random small problems, run by a stratum on any backend.

use std::fmt;
use std::str::FromStr;

use arch::Target;
use kernels::cases::{CASES, CaseError, Expect, Run, VerifyError};
use kernels::problem::MAX_HEAD_DIM;
use kernels::{
    Coverage, Dtype, Feature, Inputs, Layout, Mask, PlanError, Problem, ProblemSpec, Stratum, Tiles, Varlen, Verdict,
};
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

/// The calls of a case in a type, with inputs drawn from `seed`; random problems within what is covered.
///
/// # Errors
/// When the inputs do not fit in memory.
pub fn runs(case: CaseId, dtype: Dtype, seed: u64, coverage: &Coverage) -> Result<Vec<Run>, CaseError> {
    match case {
        CaseId::Contract(number) => match CASES.iter().find(|case| case.number == number) {
            Some(case) => case.runs(dtype, seed),
            None => Ok(Vec::new()),
        },
        CaseId::Random(number) => Ok(vec![random(dtype, seed, number, coverage)?]),
    }
}

/// Head dimensions of kernels for which 128 is not the end.
const LARGE_DIMS: [usize; 6] = [17, 80, 112, 160, 200, 256];

/// A small problem: lengths beyond a tile or two, odd dimensions, a GQA ratio, causal or not, and tensors that lie as
/// `[batch, heads, seqlen, dim]` or as `[batch, seqlen, heads, dim]`; where they are covered also larger dimensions, windows,
/// packed batches, capped scores and ALiBi.
fn random(dtype: Dtype, seed: u64, number: u32, coverage: &Coverage) -> Result<Run, CaseError> {
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
    let inputs_seed = rng.random();
    let layouts: [bool; 3] = rng.random();
    let covers = |feature| coverage.features.contains(&feature);
    if coverage.max_head_dim >= MAX_HEAD_DIM && rng.random_ratio(1, 3) {
        spec.head_dim = LARGE_DIMS[rng.random_range(0..LARGE_DIMS.len())];
        if rng.random() {
            spec.head_dim_v = spec.head_dim;
        }
    }
    if covers(Feature::Window) && rng.random_ratio(1, 3) {
        let mut side = || [None, Some(rng.random_range(0..100))][rng.random_range(0..2)];
        spec = spec.mask(Mask { left: side(), right: side() });
    }
    if covers(Feature::Softcap) && rng.random_ratio(1, 4) {
        spec = spec.softcap(rng.random_range(0.5..50.0));
    }
    if covers(Feature::Alibi) && rng.random_ratio(1, 4) {
        let slopes = heads_q * [1, spec.batch][rng.random_range(0..2)];
        spec = spec.alibi_slopes((0..slopes).map(|_| rng.random_range(-0.5..0.5)).collect());
    }
    let packed = covers(Feature::Varlen) && rng.random_ratio(1, 4);
    if packed {
        let mut offsets = |longest: usize| {
            let mut end = 0;
            let ends = (0..spec.batch).map(|_| {
                end += rng.random_range(0..=longest as i32);
                end
            });
            std::iter::once(0).chain(ends).collect::<Vec<i32>>()
        };
        let (cu_seqlens_q, cu_seqlens_k) = (offsets(spec.seqlen_q), offsets(spec.seqlen_k));
        spec.varlen = Some(Varlen { cu_seqlens_q, cu_seqlens_k });
    }
    let problem = spec.build()?;
    let mut inputs = Inputs::randn(&problem, inputs_seed)?;
    for (tensor, by_head) in [&mut inputs.q, &mut inputs.k, &mut inputs.v].into_iter().zip(layouts) {
        if by_head && !packed {
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
    let coverage = stratum.coverage();
    let checked = runs(case, dtype, seed, &coverage)?.into_iter().map(|run| {
        let covered = coverage.dtypes.contains(&dtype)
            && run.features().iter().all(|feature| coverage.features.contains(feature))
            && run.problem.head_dim.max(run.problem.head_dim_v) <= coverage.max_head_dim;
        let outcome = match (covered, stratum.relative_error(dtype)) {
            (false, _) => Outcome::NotCovered,
            (true, None) => outcome(run.verify(&mut compute_one)),
            (true, Some(share)) => outcome(run.verify_relative(&mut compute_one, share)),
        };
        Checked { case, label: run.label.to_owned(), problem: run.problem, outcome }
    });
    Ok(checked.collect())
}

fn outcome<E: std::error::Error>(verified: Result<Verdict, VerifyError<ComputeError<E>>>) -> Outcome {
    match verified {
        Ok(Verdict { wrong: Some(wrong), .. }) => Outcome::Failed(wrong.to_string()),
        Ok(_) => Outcome::Passed,
        // Strides that the copy engine cannot address, types that older tensor cores lack, and another GPU: no feature of the
        // problem says so.
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
        let random = |number| random(Dtype::F16, 7, number, &Stratum::V2.coverage()).unwrap();
        let one = random(3);
        assert_eq!(one.problem, random(3).problem);
        let others: Vec<_> = (0..8).map(|n| random(n).problem.to_string()).collect();
        assert!(others.iter().collect::<std::collections::HashSet<_>>().len() >= 7, "{others:?}");
        assert!((0..8).any(|n| !random(n).inputs.features().is_empty()));
        assert!((0..8).all(|n| random(n).features().iter().all(|f| Stratum::V2.coverage().features.contains(f))));
    }

    #[test]
    fn random_problems_go_as_far_as_the_stratum() {
        let covered = Stratum::V2Tc.coverage().features;
        let drawn: Vec<_> =
            (0..60).flat_map(|n| random(Dtype::F16, 7, n, &Stratum::V2Tc.coverage()).unwrap().features()).collect();
        assert!(covered.iter().all(|feature| drawn.contains(feature)), "{drawn:?}");
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
