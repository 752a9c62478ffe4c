//! `strata dig`.

use std::cell::RefCell;

use anyhow::anyhow;
use indicatif::{ProgressBar, ProgressStyle};
use kernels::{Problem, Stratum};
use lab::{DigError, Digger, Document, Dug, Source, Watch};

use crate::arguments::{DigArguments, TensorArguments};
use crate::{CANCEL, Failure, output, report};

pub fn dig(arguments: &DigArguments) -> Result<(), Failure> {
    let gpu = arch::Gpu::find(&arguments.gpu)?;
    let (problem, source, seed) = question(arguments)?;
    let strata = if arguments.strata.is_empty() { Stratum::ALL.to_vec() } else { arguments.strata.clone() };
    let digger = Digger::new(problem, gpu, &source, arguments.full)?;

    let bar = progress_bar();
    let mut dug: Vec<Dug> = Vec::new();
    let mut refused = None;
    for stratum in strata {
        bar.set_message(stratum.to_string());
        let progress = |done, of| {
            bar.set_length(of);
            bar.set_position(done);
        };
        let tiles = (arguments.tiles.block_q, arguments.tiles.block_kv);
        match digger.dig(stratum, tiles, &Watch { cancel: Some(&CANCEL), progress: Some(&progress) }) {
            Ok(one) => dug.push(one),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    bar.finish_and_clear();

    let json_on_stdout = arguments.json.as_deref().is_some_and(output::is_stdout);
    if !json_on_stdout {
        output::print(&report::text(&dug, output::color()))?;
    }
    let wrong: Vec<String> = dug.iter().filter(|one| !one.record.correct).map(|one| one.record.stratum.clone()).collect();
    match refused {
        None => {}
        Some(DigError::Cancelled) => {}
        Some(error) => {}
    }
    if let Some(path) = &arguments.json {
        let document = Document::new(dug.into_iter().map(|one| one.record).collect());
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    Ok(())
}
