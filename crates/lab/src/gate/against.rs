//! Two builds against each other: timed in turn on one machine in one run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use thiserror::Error;

use super::{Judged, JudgedFigure, Tolerances, Verdict};
use crate::execute::Watch;
use crate::key::AnyRecord;
use crate::reference;

/// Draws of the bootstrap.
const RESAMPLES: usize = 2000;

/// Two builds that could not be timed.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum AgainstError {
    #[error("{} cannot be run: {source}", binary.display())]
    Run { binary: PathBuf, source: std::io::Error },
    #[error("{} gave no time: {reason}", binary.display())]
    NoTime { binary: PathBuf, reason: String },
    #[error("cancelled")]
    Cancelled,
}

/// Times both builds, `rounds` times each, one after the other in an order that alternates, and judges every time. `arguments`
/// make a build print a document of records with `measured_time_ms`.
///
/// # Errors
/// When a build does not run, or gives no time (on a machine without a GPU, say).
pub fn against(
    (before, after): (&Path, &Path),
    arguments: &[String],
    rounds: usize,
    tolerances: &Tolerances,
    watch: Watch<'_>,
) -> Result<Vec<Judged>, AgainstError> {
    let mut timed: Vec<(AnyRecord, [Vec<f64>; 2])> = Vec::new();
    'rounds: for round in 0..rounds {
        let builds = [(0, before), (1, after)];
        let order = if round % 2 == 0 { builds } else { [builds[1], builds[0]] };
        for (which, binary) in order {
            let ran = run(binary, arguments);
            // What was timed until then is judged; Ctrl-C reached the build too.
            if watch.is_cancelled() {
                break 'rounds;
            }
            for record in ran? {
                let Some(time) = record.number("measured_time_ms") else { continue };
                match timed.iter_mut().find(|(known, _)| known.key == record.key) {
                    Some((_, times)) => times[which].push(time),
                    None => {
                        let mut times = [Vec::new(), Vec::new()];
                        times[which].push(time);
                        timed.push((record, times));
                    }
                }
            }
        }
        if let Some(progress) = watch.progress {
            progress(round as u64 + 1, rounds as u64);
        }
    }
    if timed.is_empty() && watch.is_cancelled() {
        return Err(AgainstError::Cancelled);
    }
    if timed.is_empty() {
        return Err(AgainstError::NoTime {
            binary: after.into(),
            reason: "its records have no measured_time_ms".into(),
        });
    }
    Ok(timed.into_iter().map(|(record, [before, after])| judged(&record, &before, &after, tolerances)).collect())
}

fn run(binary: &Path, arguments: &[String]) -> Result<Vec<AnyRecord>, AgainstError> {
    let failed = |source| AgainstError::Run { binary: binary.into(), source };
    let output = Command::new(binary).args(arguments).stdin(Stdio::null()).output().map_err(failed)?;
    let no_time = |reason: String| AgainstError::NoTime { binary: binary.into(), reason };
    if !output.status.success() {
        return Err(no_time(String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("error: ").to_owned()));
    }
    let text = String::from_utf8(output.stdout).map_err(|error| no_time(error.to_string()))?;
    let document = reference::document(Path::new("its output"), &text).map_err(|error| no_time(error.to_string()))?;
    Ok(document.records)
}

fn judged(record: &AnyRecord, before: &[f64], after: &[f64], tolerances: &Tolerances) -> Judged {
    let tolerance = tolerances.time;
    let key = record.key.clone();
    let (least, most) = (before.len().min(after.len()), before.len().max(after.len()));
    if least == 0 {
        let note =
            Some(format!("timed by one of the builds alone ({most} times): the other has another configuration"));
        return Judged { key, verdict: Verdict::Incomparable, differing: Vec::new(), note, figures: Vec::new() };
    }
    let (old, new) = (median(before), median(after));
    let change = new / old - 1.0;
    let interval = interval(before, after);
    let enough = least >= tolerances.samples;
    let verdict = match () {
        () if !enough => Verdict::Insufficient,
        () if change.abs() < tolerance => Verdict::Pass,
        () if interval[0] > 0.0 => Verdict::Regressed,
        () if interval[1] < 0.0 => Verdict::Improved,
        // As large as that, and yet it may be none.
        () => Verdict::Insufficient,
    };
    let note = match verdict {
        Verdict::Insufficient if !enough => {
            Some(format!("{least} samples of each: {} are needed (--rounds)", tolerances.samples))
        }
        Verdict::Insufficient => Some("too noisy: more rounds may tell (--rounds)".into()),
        _ => None,
    };
    let figure = JudgedFigure {
        name: "measured_time_ms".into(),
        before: Some(old),
        after: Some(new),
        change: Some(change),
        interval: Some(interval),
        tolerance,
        verdict,
    };
    Judged { key, verdict, differing: Vec::new(), note, figures: vec![figure] }
}

/// The middle 95 % of `median(after) / median(before) - 1` over resamples of both (Efron 1979); the draws are the same each time.
fn interval(before: &[f64], after: &[f64]) -> [f64; 2] {
    let mut random = ChaCha8Rng::seed_from_u64(0);
    let mut draw = |samples: &[f64]| {
        let drawn: Vec<f64> = samples.iter().map(|_| samples[random.random_range(0..samples.len())]).collect();
        median(&drawn)
    };
    let mut changes: Vec<f64> = (0..RESAMPLES).map(|_| draw(after) / draw(before) - 1.0).collect();
    changes.sort_by(f64::total_cmp);
    [changes[RESAMPLES / 40], changes[RESAMPLES - 1 - RESAMPLES / 40]]
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn verdict(before: &[f64], after: &[f64]) -> Verdict {
        let record = json!({"stratum": "v3", "gpu": "H200", "sm": "sm_90", "dtype": "f16", "problem": "1x1x8x8", "source": "events",
            "level": "hardware", "measured_time_ms": 1.0});
        judged(&record.try_into().unwrap(), before, after, &Tolerances::default()).verdict
    }

    /// `count` times about 1 ms, wide by `noise`.
    fn times(seed: u64, count: usize, noise: f64) -> Vec<f64> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        (0..count).map(|_| 1.0 + noise * (random.random::<f64>() - 0.5)).collect()
    }

    fn slower(times: &[f64], factor: f64) -> Vec<f64> {
        times.iter().map(|time| time * factor).collect()
    }

    #[test]
    fn a_time_is_judged_by_effect_and_certainty() {
        let (one, other) = (times(1, 12, 0.02), times(2, 12, 0.02));
        assert_eq!(verdict(&one, &other), Verdict::Pass);
        assert_eq!(verdict(&one, &slower(&other, 1.06)), Verdict::Regressed);
        assert_eq!(verdict(&slower(&one, 1.06), &other), Verdict::Improved);
        assert_eq!(verdict(&one[..9], &slower(&other, 1.06)[..9]), Verdict::Insufficient);
        assert_eq!(verdict(&one, &[]), Verdict::Incomparable);
        // A difference that certain and this small is none.
        assert_eq!(verdict(&times(1, 300, 0.001), &slower(&times(2, 300, 0.001), 1.02)), Verdict::Pass);
    }

    #[test]
    fn noise_alone_is_never_a_regression() {
        for seed in 0..200 {
            let judged = verdict(&times(2 * seed, 12, 0.04), &times(2 * seed + 1, 12, 0.04));
            assert!(matches!(judged, Verdict::Pass | Verdict::Insufficient), "{seed}: {judged:?}");
        }
        let (wild, calm) = (times(5, 12, 1.2), times(6, 12, 0.02));
        assert!(verdict(&calm, &wild) <= Verdict::Insufficient);
    }
}
