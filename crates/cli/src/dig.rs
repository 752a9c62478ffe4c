//! `strata dig`.

use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::{anyhow, bail};
use arch::Gpu;
use cuda::{Context, Driver, TimingOptions};
use lab::{DigError, Digger, Document, Dug, ExecuteError, Watch};

use crate::arguments::{DigArguments, strata};
use crate::device::Device;
use crate::progress::Progress;
use crate::{CANCEL, Failure, NOTHING_FINISHED, output, question, report};

pub fn dig(arguments: &DigArguments) -> Result<(), Failure> {
    let strata = strata(&arguments.strata)?;
    output::check(arguments.json.as_deref())?;
    let mut recorder = arguments.record.open()?;
    let thresholds = arguments.thresholds.read()?;
    let (driver, context) = match arguments.device {
        Device::Cpu => {
            return Err(anyhow::anyhow!("device is cpu, which runs no strata: dig on emulator, cuda or cuda:N").into());
        }
        Device::Emulator => (None, None),
        Device::Cuda(ordinal) => {
            let driver = Driver::load()?;
            (Some(driver.version().to_string()), Some(driver.context(ordinal)?))
        }
    };
    let gpu = gpu(arguments.gpu.as_deref(), context.as_ref())?;
    let (problem, source) = question::of_dig(arguments)?;
    let quiet = Watch { cancel: Some(&CANCEL), progress: None, ..Watch::default() };
    // The reference of one long head takes minutes, and nothing would be lost with it.
    NOTHING_FINISHED.store(true, Ordering::Relaxed);
    let digger = match Digger::new(problem, gpu, &source, arguments.full, quiet) {
        Err(DigError::Execute(error)) => return Err(Failure::of_execution(error)),
        other => other?.thresholds(thresholds),
    };
    NOTHING_FINISHED.store(false, Ordering::Relaxed);

    let progress = Progress::new("CTAs");
    let (mut dug, mut refused, mut stopped) = (Vec::new(), Vec::new(), None);
    for &stratum in strata {
        progress.begin(&stratum.to_string());
        let show = |done, of| progress.show(done, of);
        let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() };
        let tiles = arguments.tiles.of(stratum, gpu.sm, gpu.sm_count, digger.problem());
        match digger.dig(stratum, tiles, watch) {
            Ok(mut one) => {
                let measure = |context: &Context| {
                    digger.measure(&mut one, &mut context.stream()?, stratum, tiles, &TimingOptions::default())
                };
                let measured = context.as_ref().map_or(Ok(()), measure);
                one.record.tools.extend(driver.clone().map(|version| ("driver".into(), version)));
                dug.push(one);
                if let Err(error) = measured {
                    stopped = Some(Failure::No(error.into()));
                    break;
                }
            }
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
        recorder.keep(&dug.iter().map(|one| &one.record).collect::<Vec<_>>())?;
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

/// The GPU to model: the named one, or the one that is timed.
fn gpu(named: Option<&str>, timed: Option<&Context>) -> anyhow::Result<&'static Gpu> {
    let Some(device) = timed.map(Context::device) else { return Ok(Gpu::find(named.unwrap_or("RTX 2070"))?) };
    let gpu = Gpu::find(named.unwrap_or(&device.name))?;
    if gpu.sm != device.sm {
        bail!(
            "gpu is {} ({}): the timed one is {} ({}), whose kernels are others",
            gpu.name,
            gpu.sm,
            device.name,
            device.sm
        );
    }
    Ok(gpu)
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
