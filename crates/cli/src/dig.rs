//! `strata dig`.

use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::anyhow;
use kernels::Stratum;
use lab::{DigError, Digger, Document, Dug, ExecuteError, Watch};

use crate::arguments::DigArguments;
use crate::progress::Progress;
use crate::{CANCEL, Failure, NOTHING_FINISHED, output, question, report};

pub fn dig(arguments: &DigArguments) -> Result<(), Failure> {
    let gpu = arch::Gpu::find(&arguments.gpu)?;
    let (problem, source) = question::of_dig(arguments)?;
    let strata = if arguments.strata.is_empty() { &Stratum::ALL[..] } else { &arguments.strata };
    let quiet = Watch { cancel: Some(&CANCEL), progress: None };
    // The reference of one long head takes minutes, and nothing would be lost with it.
    NOTHING_FINISHED.store(true, Ordering::Relaxed);
    let digger = match Digger::new(problem, gpu, &source, arguments.full, quiet) {
        Err(DigError::Execute(error)) => return Err(Failure::of_execution(error)),
        other => other?,
    };
    NOTHING_FINISHED.store(false, Ordering::Relaxed);

    let progress = Progress::new();
    let (mut dug, mut refused, mut stopped) = (Vec::new(), Vec::new(), None);
    for &stratum in strata {
        progress.begin(&stratum.to_string());
        let show = |done, of| progress.show(done, of);
        let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show) };
        match digger.dig(stratum, arguments.tiles.of(stratum, gpu.sm, digger.problem()), watch) {
            Ok(one) => dug.push(one),
            // The others may cover what this one does not.
            Err(DigError::Execute(ExecuteError::Plan(error))) => refused.push(error.to_string()),
            Err(DigError::Execute(error)) => {
                stopped = Some(Failure::of_execution(error));
                break;
            }
            Err(error) => return Err(error.into()),
        }
    }
    progress.end();

    // What was finished is told whatever came after it.
    if !dug.is_empty() || stopped.is_none() {
        tell(arguments.json.as_deref(), &dug)?;
    }
    refused.dedup();
    refused.iter().for_each(|error| eprintln!("note: {error}"));
    if let Some(failure) = stopped {
        return Err(failure);
    }
    let wrong = dug.iter().filter_map(|one| Some(format!("{}: {}", one.record.stratum, one.wrong.as_ref()?)));
    let wrong: Vec<String> = wrong.collect();
    if !wrong.is_empty() {
        return Err(Failure::No(anyhow!("wrong result: {}", wrong.join("; "))));
    }
    if dug.is_empty() { Err(anyhow!("no stratum covers the problem").into()) } else { Ok(()) }
}

/// Prints the report and writes the records; standard output gets one of the two.
fn tell(json: Option<&Path>, dug: &[Dug]) -> anyhow::Result<()> {
    if !json.is_some_and(output::is_stdout) {
        output::print(&report::text(dug, output::color()))?;
    }
    if let Some(path) = json {
        let document = Document::new(dug.iter().map(|one| one.record.clone()).collect());
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    Ok(())
}
