//! A stratum's time on a GPU.

use std::time::Instant;

use arch::Target;
use cuda::{Attributes, Clocks, Prepared, Stream, Timing, TimingOptions};
use kernels::{Inputs, Layout, PlanError, Problem, Stratum, TensorError};
use ptx::Backend;
use serde::Serialize;
use thiserror::Error;

use flashstrata::compute::{ComputeError, Resident};

/// What a stratum took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// All its launches together, one after the other.
    pub timing: Timing,
    /// Milliseconds from the problem to the result of the first call, whose inputs are on the GPU already: planning, writing the
    /// kernels, the driver's compilation, unless it or this process kept one, and the launches.
    pub first_call_ms: f64,
    /// Floating-point operations, as the field counts them, in a second: in units of 10^12.
    pub tflops: f64,
    /// Each launch by itself, in order.
    pub launches: Vec<MeasuredLaunch>,
    /// Sets of inputs that were used in turn.
    pub rotated: usize,
    /// Bytes of inputs, outputs and workspaces of a set.
    pub bytes: u64,
    /// The GPU before.
    pub clocks_before: Option<Clocks>,
}

/// What one launch took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredLaunch {
    /// Its kernel.
    pub kernel: String,
    /// The middle sample, in milliseconds.
    pub median_ms: f64,
    /// What the compiler made of it.
    pub attributes: Attributes,
    /// The compiler's warnings.
    pub warnings: Vec<String>,
}

/// A stratum that was not measured.
#[derive(Debug, Error)]
pub enum BenchError {
    /// It does not cover the problem.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Nothing to run on.
    #[error("inputs are no sets: at least one is needed")]
    NoInputs,
    /// Host memory does not suffice.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// It did not run.
    #[error(transparent)]
    Compute(#[from] ComputeError<cuda::Error>),
    /// The GPU failed.
    #[error(transparent)]
    Cuda(#[from] cuda::Error),
}

/// The most sets of inputs that are used in turn.
const MOST_SETS: u64 = 16;

/// Contiguous normal inputs: one set, or, when they fit in an L2 cache of `l2_bytes`, as many as do not, so that used in turn
/// each call finds its own in memory, as it would in a model.
///
/// # Errors
/// When host memory does not suffice.
pub fn input_sets(problem: &Problem, seed: u64, l2_bytes: u64) -> Result<Vec<Inputs>, TensorError> {
    let bytes = u64::try_from(problem.compulsory_bytes().read).unwrap_or(u64::MAX).max(1);
    let sets = if bytes > l2_bytes { 1 } else { (2 * l2_bytes).div_ceil(bytes).clamp(2, MOST_SETS) };
    (0..sets).map(|set| Inputs::randn(problem, seed.wrapping_add(set))).collect()
}

/// Times a stratum on contiguous inputs, which are used in turn; a graph replays the first.
///
/// # Errors
/// When the stratum does not cover the problem, memory does not suffice, or the GPU fails.
pub fn bench(
    stream: &mut Stream,
    stratum: Stratum,
    chosen: &kernels::Options,
    problem: &Problem,
    inputs: &[Inputs],
    options: &TimingOptions,
) -> Result<Measured, BenchError> {
    if inputs.is_empty() {
        return Err(BenchError::NoInputs);
    }
    let (target, layout) = (Target::best(stream.sm()), Layout::contiguous(problem));
    let began = Instant::now();
    let plan = kernels::plan_with(stratum, problem, target, &layout, chosen)?;
    let planned = began.elapsed();
    let compulsory = problem.compulsory_bytes();
    let workspaces: u64 = plan.workspaces.iter().map(|workspace| workspace.bytes).sum();
    let bytes = u64::try_from(compulsory.read + compulsory.write).unwrap_or(u64::MAX).saturating_add(workspaces);
    let inputs = if options.graph { &inputs[..inputs.len().min(1)] } else { inputs };
    let mut residents = Vec::new();
    let result = inputs
        .iter()
        .try_for_each(|inputs| {
            residents.push(Resident::new(stream, &plan, problem, inputs)?);
            Ok(())
        })
        .and_then(|()| {
            let mut prepared: Vec<Vec<Prepared>> = Vec::new();
            let mut first_call_ms = 0.0;
            for resident in &residents {
                let began = Instant::now();
                let launches = plan.launches(&resident.buffers, stream.multiprocessors())?;
                let launches = launches.iter().map(|launch| stream.prepare(launch));
                let launches = launches.collect::<Result<Vec<_>, _>>()?;
                if prepared.is_empty() {
                    launches.iter().try_for_each(|launch| stream.enqueue(launch))?;
                    stream.synchronize()?;
                    first_call_ms = 1e3 * (planned + began.elapsed()).as_secs_f64();
                }
                prepared.push(launches);
            }
            let clocks_before = Clocks::read(stream.context().device());
            let timing = cuda::time(stream, options, |stream, sample| {
                prepared[sample % prepared.len()].iter().try_for_each(|launch| stream.enqueue(launch))
            })?;
            let mut launches = Vec::new();
            for (index, launch) in plan.launches.iter().enumerate() {
                let alone = if plan.launches.len() == 1 {
                    timing.clone()
                } else {
                    cuda::time(stream, options, |stream, sample| {
                        stream.enqueue(&prepared[sample % prepared.len()][index])
                    })?
                };
                let function = prepared[0][index].function();
                launches.push(MeasuredLaunch {
                    kernel: launch.kernel.name.clone(),
                    median_ms: alone.median_ms,
                    attributes: function.attributes(),
                    warnings: function.log().warnings().map(str::to_owned).collect(),
                });
            }
            let tflops = problem.flops() as f64 / timing.median_ms / 1e9;
            Ok(Measured { timing, first_call_ms, tflops, launches, rotated: residents.len(), bytes, clocks_before })
        });
    let freed = residents.into_iter().map(|resident| resident.free(stream)).fold(Ok(()), Result::and);
    result.and_then(|measured| freed.map(|()| measured).map_err(BenchError::Cuda))
}
