//! The lab for Python: what `flashstrata/lab.py` calls. Answers are the documents that `strata dig` and `strata probe` write with
//! `--json`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::lab::probe::{ProbeError, Settings};
use ::lab::{DigError, Digger, Document, ExecuteError, Source, Watch};
use flashstrata::{Gpu, Problem, Stratum};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Serialize;

/// How often Python may stop what runs.
const TICK: Duration = Duration::from_millis(20);

/// Runs strata on a problem and an emulated GPU: the document, and why others were not run.
#[pyfunction]
pub(crate) fn dig(
    py: Python<'_>,
    problem: &str,
    gpu: &str,
    strata: Vec<String>,
    full: bool,
    seed: u64,
) -> PyResult<(String, Vec<String>)> {
    let problem: Problem = problem.parse().map_err(refused)?;
    let gpu = Gpu::find(gpu).map_err(refused)?;
    let named: Vec<Stratum> = strata.iter().map(|name| name.parse().map_err(refused)).collect::<PyResult<_>>()?;
    let strata = if named.is_empty() { &Stratum::ALL[..] } else { &named };
    stoppable(py, |cancel| {
        let watch = Watch { cancel: Some(cancel), ..Watch::default() };
        let digger = Digger::new(problem, gpu, &Source::Seed(seed), full, watch).map_err(dig_error)?;
        let (mut records, mut passed_over) = (Vec::new(), Vec::new());
        for &stratum in strata {
            let tiles = stratum.default_tiles(gpu.sm, gpu.sm_count, digger.problem());
            match digger.dig(stratum, tiles, watch) {
                Ok(dug) => match dug.wrong {
                    Some(wrong) => return Err(PyRuntimeError::new_err(format!("{stratum}: wrong result: {wrong}"))),
                    None => records.push(dug.record),
                },
                // The others may cover what this one does not.
                Err(DigError::Execute(ExecuteError::Plan(error))) => passed_over.push(error.to_string()),
                Err(error) => return Err(dig_error(error)),
            }
        }
        Ok((json(records)?, passed_over))
    })
}

/// Runs the kernel of a launch file on an emulated GPU: the document.
#[pyfunction]
pub(crate) fn probe(py: Python<'_>, launch: PathBuf) -> PyResult<String> {
    let settings = Settings::read(&launch).map_err(refused)?;
    stoppable(py, |cancel| {
        let watch = Watch { cancel: Some(cancel), ..Watch::default() };
        match ::lab::probe::probe(&settings, watch) {
            Ok(probed) => json(vec![probed.record()]),
            Err(ProbeError::Cancelled) => Err(PyKeyboardInterrupt::new_err(())),
            Err(error) => Err(refused(error)),
        }
    })
}

fn json<R: Serialize>(records: Vec<R>) -> PyResult<String> {
    serde_json::to_string(&Document::new(records)).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

fn refused(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn dig_error(error: DigError) -> PyErr {
    match error {
        DigError::Execute(ExecuteError::Cancelled) => PyKeyboardInterrupt::new_err(()),
        error => refused(error),
    }
}

/// Runs on a thread of its own, without Python's lock, and stops when Python is told to.
fn stoppable<T: Send>(py: Python<'_>, work: impl FnOnce(&AtomicBool) -> PyResult<T> + Send) -> PyResult<T> {
    let cancel = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| work(&cancel));
        let mut stopped = Ok(());
        while !running.is_finished() {
            py.detach(|| std::thread::sleep(TICK));
            if stopped.is_ok() {
                stopped = py.check_signals();
                cancel.store(stopped.is_err(), Ordering::Relaxed);
            }
        }
        let answer = running.join().map_err(|_| PyRuntimeError::new_err("the lab panicked"))?;
        stopped.and(answer)
    })
}
