//! A part of a problem that stands for the whole: some heads, each with its keys and values.

use kernels::{Inputs, Problem, ProblemError, Tensor, TensorError};
use thiserror::Error;

use crate::record::Sampling;

/// Inputs of a call.
#[derive(Clone, Debug)]
pub enum Source {
    /// Standard normal, drawn from this seed.
    Seed(u64),
    /// The user's.
    Tensors(Box<Inputs>),
}

/// What is run in place of a problem.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The problem of the heads that are run: each KV head and its query heads make a batch entry.
    pub problem: Problem,
    /// Their inputs.
    pub inputs: Inputs,
    /// KV heads of all batch entries that are run.
    pub groups: u64,
    /// KV heads of all batch entries of the whole problem.
    pub groups_of_all: u64,
    /// The same in query heads, and whether scaling is exact.
    pub sampling: Sampling,
}

/// A sample that cannot be made.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SampleError {
    /// Tensors that do not fit in memory, or do not fit the problem.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A problem that is not allowed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

impl Sample {
    /// The whole problem.
    ///
    /// # Errors
    /// When memory does not suffice for the inputs.
    pub fn whole(problem: &Problem, source: &Source) -> Result<Self, SampleError> {
        let groups = (problem.batch * problem.heads_kv) as u64;
        let heads = (problem.batch * problem.heads_q) as u64;
        let inputs = match source {
            Source::Seed(seed) => Inputs::randn(problem, *seed)?,
            Source::Tensors(inputs) => Inputs::clone(inputs),
        };
        let sampling = Sampling { heads, of: heads, exact: true };
        Ok(Self { problem: problem.clone(), inputs, groups, groups_of_all: groups, sampling })
    }

    /// At most `groups` KV heads, evenly spread over batch entries and heads, each with all its query heads; the whole
    /// problem when it has no more, or when its sequences differ in length or are in a cache.
    ///
    /// Heads do equal work whatever the inputs are. Scaled sector counts are exact when rows of all tensors begin on
    /// sector borders; otherwise they depend a little on the number of heads, and `exact` says so.
    ///
    /// # Errors
    /// When memory does not suffice for the inputs.
    pub fn heads(problem: &Problem, source: &Source, groups: usize) -> Result<Self, SampleError> {
        let all = problem.batch * problem.heads_kv;
        if groups >= all || problem.varlen.is_some() || problem.cache.is_some() {
            return Self::whole(problem, source);
        }
        let picked: Vec<(usize, usize)> = (0..groups)
            .map(|i| i * all / groups)
            .map(|flat| (flat / problem.heads_kv, flat % problem.heads_kv))
            .collect();

        let group = problem.group();
        let mut spec = problem.clone().into_spec();
        (spec.batch, spec.heads_q, spec.heads_kv) = (groups, group, 1);
        if spec.alibi_slopes.is_some() {
            let heads = picked.iter().flat_map(|&(entry, kv)| (kv * group..(kv + 1) * group).map(move |q| (entry, q)));
            spec.alibi_slopes = Some(heads.map(|(entry, head)| problem.slope(entry, head)).collect());
        }
        let part = spec.build()?;
        let inputs = match source {
            Source::Seed(seed) => Inputs::randn(&part, *seed)?,
            Source::Tensors(inputs) => Inputs {
                q: stack(&inputs.q, &picked, group)?,
                k: stack(&inputs.k, &picked, 1)?,
                v: stack(&inputs.v, &picked, 1)?,
                new: None,
            },
        };
        let on_borders = |dim: usize| (dim * problem.dtype.bytes()).is_multiple_of(32);
        let sampling = Sampling {
            heads: (groups * group) as u64,
            of: (problem.batch * problem.heads_q) as u64,
            exact: on_borders(problem.head_dim) && on_borders(problem.head_dim_v),
        };
        Ok(Self { problem: part, inputs, groups: groups as u64, groups_of_all: all as u64, sampling })
    }
}

/// `[groups, seqlen, width, dim]` of the heads `kv * width..(kv + 1) * width` of each picked pair.
fn stack(tensor: &Tensor, picked: &[(usize, usize)], width: usize) -> Result<Tensor, TensorError> {
    let shape = [picked.len(), tensor.shape()[1], width, tensor.shape()[3]];
    Tensor::generate(tensor.dtype(), &shape, |index| {
        let (entry, kv) = picked[index[0]];
        tensor.get(&[entry, index[1], kv * width + index[2], index[3]]).unwrap_or(f64::NAN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_keeps_each_query_head_with_its_keys() {
        let problem: Problem = "3x6/2x5/7x8 causal".parse().unwrap();
        let inputs = Inputs::randn(&problem, 4).unwrap();
        let sample = Sample::heads(&problem, &Source::Tensors(Box::new(inputs.clone())), 2).unwrap();
        assert_eq!(sample.problem.to_string(), "2x3/1x5/7x8 causal");
        assert_eq!(sample.sampling, Sampling { heads: 6, of: 18, exact: true });
        let whole = kernels::reference::reference_heads(&problem, &inputs, &[(0, 0), (1, 4)]).unwrap();
        let part = kernels::reference::reference_heads(&sample.problem, &sample.inputs, &[(0, 0), (1, 1)]).unwrap();
        assert_eq!(whole[0].out, part[0].out);
        assert_eq!(whole[1].out, part[1].out);
    }

    #[test]
    fn few_heads_are_all_run() {
        let problem: Problem = "1x2x5x8".parse().unwrap();
        let sample = Sample::heads(&problem, &Source::Seed(0), 2).unwrap();
        assert_eq!(sample.problem, problem);
        assert_eq!((sample.groups, sample.groups_of_all), (2, 2));
    }

    #[test]
    fn rows_off_sector_borders_are_not_exact() {
        let problem: Problem = "4x4x5x3".parse().unwrap();
        assert!(!Sample::heads(&problem, &Source::Seed(0), 2).unwrap().sampling.exact);
    }
}
