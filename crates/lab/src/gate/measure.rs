//! Measuring what a gate judges.

use std::path::PathBuf;

use arch::{Gpu, UnknownGpu};
use kernels::{Problem, Stratum};
use thiserror::Error;

use super::config::{DigCase, GateConfig};
use crate::dig::{DigError, Digger};
use crate::execute::Watch;
use crate::key::{AnyRecord, NoRecord};
use crate::probe::{ProbeError, Settings, probe};
use crate::sample::Source;

/// A case that was not measured.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum MeasureError {
    #[error(
        "the gate has nothing to measure: its configuration names no `dig` and no `probe`, and its baseline has no stratum"
    )]
    Nothing,
    #[error("{problem}: {reason}")]
    Problem { problem: String, reason: String },
    #[error(transparent)]
    Gpu(#[from] UnknownGpu),
    #[error("{problem} on {gpu}: {source}")]
    Dig { problem: String, gpu: String, source: Box<DigError> },
    #[error("{stratum} on {problem} is wrong: {wrong}")]
    Wrong { stratum: String, problem: String, wrong: String },
    #[error("{}: {source}", launch.display())]
    Probe { launch: PathBuf, source: Box<ProbeError> },
    #[error("{}: hazard: {hazard}", launch.display())]
    Hazard { launch: PathBuf, hazard: String },
    #[error(transparent)]
    Record(#[from] NoRecord),
}

/// Digs and probes what a configuration names; without such, digs what a baseline has of strata.
///
/// # Errors
/// When a case cannot be run, or its result is wrong.
pub fn measure(
    config: &GateConfig,
    baseline: &[AnyRecord],
    mut begin: impl FnMut(&str),
    watch: Watch<'_>,
) -> Result<Vec<AnyRecord>, MeasureError> {
    let cases =
        if config.dig.is_empty() && config.probe.is_empty() { of_baseline(baseline) } else { config.dig.clone() };
    if cases.is_empty() && config.probe.is_empty() {
        return Err(MeasureError::Nothing);
    }
    let mut records = Vec::new();
    for case in &cases {
        dig(case, &mut begin, watch, &mut records)?;
    }
    for launch in &config.probe {
        begin(&launch.file_stem().unwrap_or_default().to_string_lossy());
        let failed = |source| MeasureError::Probe { launch: launch.clone(), source: Box::new(source) };
        let settings = Settings::read(launch).map_err(failed)?;
        let probed = probe(&settings, watch).map_err(failed)?;
        if let Some(hazard) = &probed.hazard {
            return Err(MeasureError::Hazard { launch: launch.clone(), hazard: hazard.kind.into() });
        }
        records.push(AnyRecord::of(&probed.record())?);
    }
    Ok(records)
}

/// The strata of a baseline that the emulator ran, by problem and GPU.
fn of_baseline(baseline: &[AnyRecord]) -> Vec<DigCase> {
    let mut cases: Vec<DigCase> = Vec::new();
    for key in baseline.iter().map(|record| &record.key).filter(|key| key.source == "emulator") {
        if key.subject.parse::<Stratum>().is_err() {
            continue;
        }
        match cases.iter_mut().find(|case| (&case.problem, &case.gpu) == (&key.problem, &key.gpu)) {
            Some(case) => case.strata.push(key.subject.clone()),
            None => cases.push(DigCase {
                problem: key.problem.clone(),
                gpu: key.gpu.clone(),
                strata: vec![key.subject.clone()],
            }),
        }
    }
    cases
}

fn dig(
    case: &DigCase,
    begin: &mut impl FnMut(&str),
    watch: Watch<'_>,
    records: &mut Vec<AnyRecord>,
) -> Result<(), MeasureError> {
    let refused = |reason: String| MeasureError::Problem { problem: case.problem.clone(), reason };
    let problem: Problem = case.problem.parse().map_err(|error| refused(format!("{error}")))?;
    let gpu = Gpu::find(&case.gpu)?;
    let failed =
        |source| MeasureError::Dig { problem: case.problem.clone(), gpu: case.gpu.clone(), source: Box::new(source) };
    let quiet = Watch { progress: None, ..watch };
    let digger = Digger::new(problem, gpu, &Source::Seed(0), false, quiet).map_err(failed)?;
    for name in &case.strata {
        let stratum: Stratum = name.parse().map_err(|error| refused(format!("{error}")))?;
        begin(name);
        // Small problems stand for what fills a GPU.
        let tiles = stratum.default_tiles(gpu.sm, 1, digger.problem());
        let dug = digger.dig(stratum, tiles, watch).map_err(failed)?;
        if let Some(wrong) = dug.wrong {
            return Err(MeasureError::Wrong { stratum: name.clone(), problem: case.problem.clone(), wrong });
        }
        records.push(AnyRecord::of(&dug.record)?);
    }
    Ok(())
}
