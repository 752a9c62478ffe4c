//! Digging: a stratum is run on a problem, checked against the reference, and explained.

use arch::{Gpu, OccupancyError, Target};
use cuda::{Stream, TimingOptions};
use kernels::reference::{all_heads, plain_heads, reference_heads};
use kernels::{HeadOutput, InputError, Inputs, Layout, Problem, ProblemSpec, Stratum, Tiles, Verdict, check};
use ptx::Backend;
use rayon::prelude::*;
use thiserror::Error;

use crate::bench::{BenchError, Measured, bench, input_sets};
use crate::evidence::{Evidence, LaunchEvidence};
use crate::execute::{ExecuteError, Execution, Watch, execute};
use crate::findings::{Finding, findings};
use crate::probe::{Explanation, explain, shared_at};
use crate::record::{Accuracy, Record, TileRecord};
use crate::registers::registers;
use crate::sample::{Sample, SampleError, Source};
use crate::source::Sources;
use crate::thresholds::Thresholds;
use flashstrata::compute::{ComputeError, compute};

/// KV heads that are run in place of all.
pub const SAMPLED_GROUPS: usize = 2;

/// Heads of the reference that are computed before looking whether to stop.
const HEADS_BETWEEN_CHECKS: usize = 8;

/// A stratum that was dug.
#[derive(Clone, Debug)]
pub struct Dug {
    /// All that was counted.
    pub evidence: Evidence,
    /// The same for others to read, with the findings.
    pub record: Record,
    /// The first thing that is wrong with the result, if any.
    pub wrong: Option<String>,
    /// What a GPU took, where it was asked and its result was right.
    pub measured: Option<Measured>,
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
    thresholds: Thresholds,
}

impl Digger {
    /// What is dug.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Draws or samples the inputs and computes the reference; `full` runs every head.
    ///
    /// # Errors
    /// When the inputs do not fit the problem or do not fit in memory, or when cancelled.
    pub fn new(
        problem: Problem,
        gpu: &'static Gpu,
        source: &Source,
        full: bool,
        watch: Watch<'_>,
    ) -> Result<Self, DigError> {
        let seed = match source {
            Source::Seed(seed) => Some(*seed),
            Source::Tensors(inputs) => {
                inputs.check(&problem)?;
                None
            }
        };
        let sample =
            if full { Sample::whole(&problem, source)? } else { Sample::heads(&problem, source, SAMPLED_GROUPS)? };
        let (mut reference, mut plain) = (Vec::new(), Vec::new());
        for heads in all_heads(&sample.problem).chunks(HEADS_BETWEEN_CHECKS) {
            if watch.is_cancelled() {
                return Err(ExecuteError::Cancelled.into());
            }
            reference.extend(reference_heads(&sample.problem, &sample.inputs, heads)?);
            plain.extend(plain_heads(&sample.problem, &sample.inputs, heads)?);
        }
        Ok(Self { problem, gpu, seed, sample, reference, plain, thresholds: Thresholds::default() })
    }

    /// Where findings begin.
    #[must_use]
    pub fn thresholds(self, thresholds: Thresholds) -> Self {
        Self { thresholds, ..self }
    }

    /// Runs a stratum and explains it.
    ///
    /// # Errors
    /// When the stratum does not cover the problem, faults, or is cancelled.
    pub fn dig(&self, stratum: Stratum, tiles: Tiles, watch: Watch<'_>) -> Result<Dug, DigError> {
        let sample = &self.sample;
        let Execution { outputs, launches } =
            execute(stratum, tiles, &sample.problem, &sample.inputs, self.gpu.sm, watch)?;
        let verdict = check(&sample.problem, &outputs, &self.reference, &self.plain)?;

        let whole =
            |ctas: u64| (u128::from(ctas) * u128::from(sample.groups_of_all) / u128::from(sample.groups.max(1))) as u64;
        let launches = launches
            .into_par_iter()
            .map(|mut launch| {
                launch.report.ctas_total = whole(launch.report.ctas_total);
                let registers = registers(&launch.kernel, &launch.report, launch.threads);
                LaunchEvidence::of(
                    launch.kernel,
                    launch.report,
                    launch.threads,
                    launch.dynamic_shared,
                    registers,
                    self.gpu,
                )
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| DigError::Occupancy { stratum, source })?;
        let evidence =
            Evidence { stratum: stratum.to_string(), problem: Some(self.problem.clone()), gpu: self.gpu, launches };
        let accuracy = Accuracy {
            error: Some(verdict.relative_error).filter(|error| error.is_finite()),
            lse_error: Some(verdict.max_lse_error).filter(|error| error.is_finite()),
            correct: verdict.passed(),
        };
        let found = findings(&evidence, &self.thresholds);
        let explanations = self.picture(stratum, tiles, &evidence, &found, watch);
        let tiles = TileRecord { block_q: tiles.block_q, block_kv: tiles.block_kv, threads: tiles.threads };
        let mut record =
            Record::of_emulator(&evidence, &self.problem, tiles, self.seed, sample.sampling.clone(), accuracy, found);
        record.explanations = explanations;
        Ok(Dug { evidence, record, wrong: verdict.wrong.map(|wrong| wrong.to_string()), measured: None })
    }

    /// The accesses of the line that causes most bank conflicts, of one head of two tiles: lane by lane, they are those of all. None
    /// where nothing conflicts, or the kernel does not run on so small a problem.
    fn picture(
        &self,
        stratum: Stratum,
        tiles: Tiles,
        evidence: &Evidence,
        found: &[Finding],
        watch: Watch<'_>,
    ) -> Vec<Explanation> {
        let place = found.iter().find(|finding| finding.id.starts_with("bank-conflicts")).and_then(Finding::place);
        let launches = || evidence.launches.iter().enumerate();
        let at = place.and_then(|place| {
            let positions = launches().map(|(index, launch)| (index, shared_at(&launch.kernel, &place)));
            positions.into_iter().find(|(_, positions)| !positions.is_empty())
        });
        let Some((index, positions)) = at else { return Vec::new() };
        let mut spec: ProblemSpec = (*self.problem).clone();
        let rows = 2 * tiles.block_q.max(tiles.block_kv) as usize;
        (spec.batch, spec.heads_q, spec.heads_kv) = (1, 1, 1);
        (spec.seqlen_q, spec.seqlen_k) = (spec.seqlen_q.min(rows), spec.seqlen_k.min(rows));
        let watch = Watch { cancel: watch.cancel, progress: None, instructions: &positions };
        let run = || {
            let problem = spec.build().ok()?;
            let inputs = Inputs::randn(&problem, 0).ok()?;
            let mut launches = execute(stratum, tiles, &problem, &inputs, self.gpu.sm, watch).ok()?.launches;
            let of_all = &evidence.launches[index];
            let small = (index < launches.len()).then(|| launches.swap_remove(index))?;
            let same = small.kernel.instructions().count() == of_all.kernel.instructions().count();
            let launch = LaunchEvidence { kernel: small.kernel, report: small.report, ..of_all.clone() };
            same.then(|| explain(&launch, self.gpu, &mut Sources::new()))
        };
        run().unwrap_or_default()
    }

    /// Runs a stratum on any backend and compares what it computes with the reference.
    ///
    /// # Errors
    /// When the stratum does not cover the problem, or the backend fails.
    pub fn verify<B: Backend>(
        &self,
        backend: &mut B,
        stratum: Stratum,
        tiles: Tiles,
    ) -> Result<Verdict, ComputeError<B::Error>> {
        let Sample { problem, inputs, .. } = &self.sample;
        let plan =
            kernels::plan(stratum, problem, Target::best(backend.sm()), &Layout::of(problem, inputs)?, Some(tiles))?;
        let outputs = compute(backend, &plan, problem, inputs)?.outputs;
        Ok(check(problem, &outputs, &self.reference, &self.plain)?)
    }

    /// Adds what the stratum that was dug takes on a GPU: on the sample its result is verified, then the whole problem is timed, on
    /// contiguous normal inputs. A wrong result is not timed.
    ///
    /// # Errors
    /// When the GPU fails or has not the memory.
    pub fn measure(
        &self,
        dug: &mut Dug,
        stream: &mut Stream,
        stratum: Stratum,
        tiles: Tiles,
        options: &TimingOptions,
    ) -> Result<(), BenchError> {
        let device = stream.context().device().clone();
        if let Some(wrong) = self.verify(stream, stratum, tiles)?.wrong {
            dug.record.correct = false;
            dug.wrong.get_or_insert(format!("on {}: {wrong}", device.name));
            return Ok(());
        }
        let inputs = input_sets(&self.problem, self.seed.unwrap_or(0), device.l2_bytes)?;
        let measured = bench(
            stream,
            stratum,
            &kernels::Options { tiles: Some(tiles), ..kernels::Options::default() },
            &self.problem,
            &inputs,
            options,
        )?;
        dug.record.measured_time_ms = Some(measured.timing.median_ms);
        dug.record.measured_tflops = Some(measured.tflops);
        dug.record.measured_on = Some(device.name);
        dug.measured = Some(measured);
        Ok(())
    }
}
