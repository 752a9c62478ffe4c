//! `strata dig`.

use anyhow::anyhow;
use kernels::Stratum;
use lab::{DigError, Digger, Document, Dug, ExecuteError, Watch};

use crate::arguments::DigArguments;
use crate::progress::Progress;
use crate::{CANCEL, Failure, output, question, report};

pub fn dig(arguments: &DigArguments) -> Result<(), Failure> {
    let gpu = arch::Gpu::find(&arguments.gpu)?;
    let (problem, source) = question::of_dig(arguments)?;
    let strata = if arguments.strata.is_empty() { Stratum::ALL } else { &arguments.strata };
    let digger = Digger::new(problem, gpu, &source, arguments.full)?;

    let progress = Progress::new();
    let mut dug: Vec<Dug> = Vec::new();
    let mut stopped = None;
    for &stratum in strata {
        progress.begin(&stratum.to_string());
        let show = |done, of| progress.show(done, of);
        let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show) };
        match digger.dig(stratum, arguments.tiles.tiles(), watch) {
            Ok(one) => dug.push(one),
            Err(error) => {
                stopped = Some(error);
                break;
            }
        }
    }
    progress.end();

    // What was finished is told whatever came after it.
    let json = arguments.json.as_deref();
    if !json.is_some_and(output::is_stdout) {
        output::print(&report::text(&dug, output::color()))?;
    }
    if let Some(path) = json {
        let document = Document::new(dug.iter().map(|one| one.record.clone()).collect());
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    match stopped {
        Some(DigError::Execute(ExecuteError::Cancelled)) => return Err(Failure::Interrupted),
        Some(DigError::Execute(error @ ExecuteError::Fault { .. })) => return Err(Failure::No(error.into())),
        Some(error) => return Err(error.into()),
        None => {}
    }
    let wrong = dug.iter().filter_map(|one| Some(format!("{}: {}", one.record.stratum, one.wrong.as_ref()?)));
    let wrong: Vec<String> = wrong.collect();
    if wrong.is_empty() { Ok(()) } else { Err(Failure::No(anyhow!("wrong result: {}", wrong.join("; ")))) }
}
