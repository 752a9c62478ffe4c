//! Digging: a stratum is run on a problem, checked against the reference, and explained.

use std::sync::atomic::AtomicBool;

use arch::{Gpu, OccupancyError};
use kernels::{HeadOutput, InputError, Problem, Stratum, Tiles, check};
use thiserror::Error;

use crate::evidence::{Evidence, LaunchEvidence};
use crate::execute::{Execution, ExecuteError, execute};
use crate::findings::findings;
use crate::record::{Accuracy, Record};
use crate::registers::registers;
use crate::sample::{Sample, SampleError, Source};

/// KV heads that are run in place of all.
pub const SAMPLED_GROUPS: usize = 2;

/// What a caller may see and stop of a long run.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    /// Set to true by someone else to stop the run early.
    pub cancel: Option<&'a AtomicBool>,
    /// Called with the CTAs finished and those to run, of all launches of a stratum, from any worker.
    pub progress: Option<&'a (dyn Fn(u64, u64) + Sync)>,
}

/// A stratum that was dug.
#[derive(Clone, Debug)]
pub struct Dug {
    /// All that was counted.
    pub evidence: Evidence,
    /// The same for others to read, with the findings.
    pub record: Record,
    /// The first thing that is wrong with the result, if any.
    pub wrong: Option<String>,
}

/// A dig that did not end.
#[derive(Debug, Error)]
pub enum DigError {
    /// No inputs.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Inputs that do not fit the problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A stratum that refuses, faults or was cancelled.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// A CTA that fits on no multiprocessor.
    #[error("{stratum}: {source}")]
    Occupancy {
        /// Whose.
        stratum: Stratum,
        /// Why.
        source: OccupancyError,
    },
}

/// One question put to several strata: the same inputs, the same reference, the same GPU.
#[derive(Debug)]
pub struct Digger {
    problem: Problem,
    gpu: &'static Gpu,
    seed: Option<u64>,
    sample: Sample,
    reference: Vec<HeadOutput>,
    plain: Vec<HeadOutput>,
}

impl Digger {
    /// Draws or samples the inputs and computes the reference; `full` runs every head.
    ///
    /// # Errors
    /// When the inputs do not fit the problem or do not fit in memory.
    pub fn new(problem: Problem, gpu: &'static Gpu, source: &Source, full: bool) -> Result<Self, DigError> {
        let seed = match source {
            Source::Seed(seed) => Some(*seed),
            Source::Tensors(inputs) => {
                inputs.check(&problem)?;
                None
            }
        };
        let sample = if full {
            Sample::whole(&problem, source)?
        } else {
            Sample::heads(&problem, source, SAMPLED_GROUPS)?
        };
        let reference = kernels::reference::reference(&sample.problem, &sample.inputs)?;
        let plain = kernels::reference::plain(&sample.problem, &sample.inputs)?;
        Ok(Self { problem, gpu, seed, sample, reference, plain })
    }

    /// Runs a stratum and explains it; without `tiles`, it takes its own choice.
    ///
    /// # Errors
    /// When the stratum does not cover the problem, faults, or is cancelled.
    pub fn dig(&self, stratum: Stratum, tiles: Option<Tiles>, watch: Watch<'_>) -> Result<Dug, DigError> {
        let sample = &self.sample;
        let Execution { outputs, launches, tiles } =
            execute(stratum, tiles, &sample.problem, &sample.inputs, self.gpu.sm, watch)?;
        let verdict = check(&sample.problem, &outputs, &self.reference, &self.plain)?;

        let whole = |ctas: u64| (u128::from(ctas) * u128::from(sample.groups_of_all) / u128::from(sample.groups.max(1))) as u64;
        let launches = launches
            .into_iter()
            .map(|mut launch| {
                launch.report.ctas_total = whole(launch.report.ctas_total);
                let registers = registers(&launch.kernel, &launch.report, self.gpu.sm);
                LaunchEvidence::of(launch.kernel, launch.report, launch.threads, launch.dynamic_shared, registers, self.gpu)
            })
            .collect::<Result<_, _>>()
            .map_err(|source| DigError::Occupancy { stratum, source })?;
        let evidence =
            Evidence { stratum: stratum.to_string(), problem: self.problem.clone(), gpu: self.gpu, launches };
        let accuracy = Accuracy {
            error: Some(verdict.relative_error).filter(|error| error.is_finite()),
            lse_error: Some(verdict.max_lse_error).filter(|error| error.is_finite()),
            correct: verdict.passed(),
        };
        let found = findings(&evidence);
        let record = Record::of_emulator(&evidence, tiles, self.seed, sample.sampling.clone(), accuracy, found);
        Ok(Dug { evidence, record, wrong: verdict.wrong.map(|wrong| wrong.to_string()) })
    }
}
