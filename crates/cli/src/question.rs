//! What is asked: a problem and its inputs, from the command line and files.

use anyhow::Context;
use kernels::{Dtype, Inputs, Problem, ProblemSpec};
use lab::Source;
use lab::tensor_file;

use crate::arguments::{DigArguments, MaskArguments, TensorArguments};

/// The problem to dig on and where its inputs come from.
pub fn of_dig(arguments: &DigArguments) -> anyhow::Result<(Problem, Source)> {
    if let Some(inputs) = tensors(&arguments.tensors)? {
        return Ok((of_tensors(&inputs, &arguments.mask)?, Source::Tensors(Box::new(inputs))));
    }
    Ok((problem(&arguments.problem, arguments.dtype, &arguments.mask)?, Source::Seed(arguments.seed)))
}

/// A problem, changed as other arguments say.
pub fn problem(spec: &ProblemSpec, dtype: Option<Dtype>, mask: &MaskArguments) -> anyhow::Result<Problem> {
    let spec = ProblemSpec { dtype: dtype.unwrap_or(spec.dtype), ..spec.clone() };
    Ok(masked(spec, mask).build()?)
}

/// The user's tensors as `[batch, seqlen, heads, dim]`; `None` when no file is given.
pub fn tensors(arguments: &TensorArguments) -> anyhow::Result<Option<Inputs>> {
    let loaded = match (&arguments.input, &arguments.q, &arguments.k, &arguments.v) {
        (Some(file), ..) => tensor_file::read_inputs(file, &arguments.prefix, arguments.layout)?,
        (None, Some(q), Some(k), Some(v)) => tensor_file::read_npy_inputs(q, k, v, arguments.layout)?,
        _ => return Ok(None),
    };
    for name in &loaded.rounded_from_f64 {
        eprintln!("note: {name} is stored in f64 and was rounded to f32");
    }
    Ok(Some(loaded.inputs))
}

/// The problem that tensors pose.
pub fn of_tensors(inputs: &Inputs, mask: &MaskArguments) -> anyhow::Result<Problem> {
    let ([batch, seqlen_q, heads_q, head_dim], [_, seqlen_k, heads_kv, _], [.., head_dim_v]) =
        (extents("q", inputs.q.shape())?, extents("k", inputs.k.shape())?, extents("v", inputs.v.shape())?);
    let mut spec = ProblemSpec::new(batch, heads_q, seqlen_k, head_dim);
    (spec.seqlen_q, spec.heads_kv, spec.head_dim_v, spec.dtype) = (seqlen_q, heads_kv, head_dim_v, inputs.q.dtype());
    let problem = masked(spec, mask).build()?;
    inputs.check(&problem)?;
    Ok(problem)
}

fn extents(argument: &str, shape: &[usize]) -> anyhow::Result<[usize; 4]> {
    shape.try_into().with_context(|| format!("{argument} has the shape {shape:?}: it must have four dimensions"))
}

fn masked(mut spec: ProblemSpec, mask: &MaskArguments) -> ProblemSpec {
    if mask.causal {
        spec = spec.causal();
    }
    if let Some(scale) = mask.softmax_scale {
        spec = spec.softmax_scale(scale);
    }
    spec
}
