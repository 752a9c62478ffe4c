//! `strata bench`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use clap::Args;
use cuda::{Driver, TimingOptions};
use kernels::{Dtype, Inputs, Problem, ProblemSpec, Stratum, Technique};
use lab::record::{SCHEMA, TileRecord};
use lab::{BenchError, Measured};
use serde::Serialize;

use crate::arguments::{TileArguments, strata};
use crate::device::Device;
use crate::record::RecordArguments;
use crate::{CANCEL, Failure, output};

/// What is timed.
#[derive(Debug, Args)]
pub struct BenchArguments {
    /// The GPU: cuda, or cuda:N for GPU N.
    #[arg(long, default_value = "cuda")]
    pub device: Device,
    /// BATCHxHEADSxSEQLENxHEAD_DIM and options, such as "2x8/2x512x64 f16 causal"; may be repeated.
    #[arg(long, value_name = "PROBLEM", default_value = "10x64x1024x64")]
    pub problem: Vec<ProblemSpec>,
    /// Which types, separated by commas; those of the problems by default.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub dtype: Vec<Dtype>,
    /// Which strata, separated by commas; all by default.
    #[arg(long, alias = "stratum", value_delimiter = ',', value_name = "LIST")]
    pub strata: Vec<Stratum>,
    #[command(flatten)]
    pub tiles: TileArguments,
    /// Parts of v3 that are left out, to measure what they bring: producer, turns, overlap, epilogue, slack, grouping, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "LIST", conflicts_with = "record")]
    pub without: Vec<Technique>,
    /// CTAs of v3 that load blocks of keys and values together, 1 or 2.
    #[arg(long, value_name = "N", conflicts_with = "record")]
    pub cluster: Option<u32>,
    /// Overwrite the L2 cache before each sample.
    #[arg(long)]
    pub flush_l2: bool,
    /// Record the launches and replay them as a graph: for kernels shorter than a launch.
    #[arg(long)]
    pub graph: bool,
    /// Milliseconds of work that are sampled for each figure, about.
    #[arg(long, value_name = "MS", default_value_t = 300.0)]
    pub budget_ms: f64,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write the records to FILE as JSON, after each; `-` writes them to standard output in place of the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub record: RecordArguments,
}

#[derive(Serialize)]
struct Document<'a, R> {
    schema: u32,
    records: &'a [R],
}

/// One stratum on one problem.
#[derive(Serialize)]
struct Record {
    stratum: String,
    gpu: String,
    sm: String,
    dtype: String,
    problem: String,
    source: &'static str,
    level: &'static str,
    tools: BTreeMap<&'static str, String>,
    tiles: TileRecord,
    seed: u64,
    measured_time_ms: f64,
    #[serde(flatten)]
    measured: Measured,
}

/// Times every stratum on every problem; what was measured is told whatever comes after it.
pub fn bench(arguments: &BenchArguments) -> Result<(), Failure> {
    let Device::Cuda(ordinal) = arguments.device else {
        return Err(anyhow!(
            "device is {}: bench takes time on a GPU, cuda or cuda:N; `strata dig` models it",
            arguments.device
        )
        .into());
    };
    let driver = Driver::load()?;
    let context = driver.context(ordinal)?;
    let (device, driver) = (context.device().clone(), driver.version().to_string());
    let options = TimingOptions {
        flush_l2: arguments.flush_l2,
        graph: arguments.graph,
        budget_ms: arguments.budget_ms.max(0.0),
        ..TimingOptions::default()
    };
    let table = !arguments.json.as_deref().is_some_and(output::is_stdout);
    sweep(arguments, device.l2_bytes, &CANCEL, |problem, inputs, stratum| {
        let tiles = arguments.tiles.of(stratum, device.sm, device.sm_count, problem);
        let mut stream = context.stream()?;
        let without = arguments.without.iter().copied().collect();
        let cluster = arguments.cluster;
        let chosen = kernels::Options { tiles: Some(tiles), without, cluster, ..kernels::Options::default() };
        let measured = match lab::bench(&mut stream, stratum, &chosen, problem, inputs, &options) {
            Ok(measured) => measured,
            // The others may cover what this one does not.
            Err(BenchError::Plan(error)) => {
                eprintln!("note: {error}");
                return Ok(None);
            }
            Err(error) => return Err(Failure::No(error.into())),
        };
        let record = Record {
            stratum: stratum.to_string(),
            gpu: device.name.clone(),
            sm: device.sm.to_string(),
            dtype: problem.dtype.to_string(),
            problem: problem.to_string(),
            source: "events",
            level: "hardware",
            tools: BTreeMap::from([("driver", driver.clone())]),
            tiles: TileRecord { block_q: tiles.block_q, block_kv: tiles.block_kv, threads: tiles.threads },
            seed: arguments.seed,
            measured_time_ms: measured.timing.median_ms,
            measured,
        };
        if table {
            output::print(&line(&record))?;
        }
        Ok(Some(record))
    })
}

/// Measures every stratum on every problem, until `cancel` says to stop. A file has what was measured after each; standard output
/// gets it at the end, also when that came early.
fn sweep<R: Serialize>(
    arguments: &BenchArguments,
    l2_bytes: u64,
    cancel: &AtomicBool,
    mut measure: impl FnMut(&Problem, &[Inputs], Stratum) -> Result<Option<R>, Failure>,
) -> Result<(), Failure> {
    let strata = strata(&arguments.strata)?;
    output::check(arguments.json.as_deref())?;
    let mut recorder = arguments.record.open()?;
    let (to_stdout, file) = match arguments.json.as_deref() {
        Some(path) if output::is_stdout(path) => (Some(path), None),
        file => (None, file),
    };
    let mut records = Vec::new();
    let mut all = || -> Result<(), Failure> {
        for spec in &arguments.problem {
            let dtypes = if arguments.dtype.is_empty() { vec![spec.dtype] } else { arguments.dtype.clone() };
            for dtype in dtypes {
                let problem = spec.clone().dtype(dtype).build()?;
                let inputs = lab::bench::input_sets(&problem, arguments.seed, l2_bytes)?;
                for &stratum in strata {
                    if cancel.load(Ordering::Relaxed) {
                        return Err(Failure::Interrupted);
                    }
                    let measured = measure(&problem, &inputs, stratum)?;
                    recorder.keep(measured.as_slice())?;
                    records.extend(measured);
                    save(file, &records)?;
                }
            }
        }
        Ok(())
    };
    let ended = all();
    save(to_stdout, &records)?;
    ended?;
    if records.is_empty() { Err(anyhow!("no stratum covers the problem").into()) } else { Ok(()) }
}

fn save<R: Serialize>(path: Option<&Path>, records: &[R]) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    output::write(path, &(serde_json::to_string_pretty(&Document { schema: SCHEMA, records })? + "\n"))
}

/// Median, the interval of the middle eight tenths, rate, what the compiler made of each kernel, and the first call.
fn line(record: &Record) -> String {
    let Measured { timing, first_call_ms, tflops, launches, .. } = &record.measured;
    let launches = launches.iter().map(|launch| {
        let attributes = launch.attributes;
        let spills = match attributes.local_bytes {
            0 => String::new(),
            bytes => format!(", {bytes} local bytes"),
        };
        format!("{} {:.3} ms ({} registers{spills})", launch.kernel, launch.median_ms, attributes.registers)
    });
    format!(
        "{:<8} {:<24} {:>9.3} ms [{:.3}, {:.3}] of {:>3}  {:>6.2} TFLOP/s  {}; first call {:.0} ms\n",
        record.stratum,
        record.problem,
        timing.median_ms,
        timing.p10_ms,
        timing.p90_ms,
        timing.samples,
        tflops,
        launches.collect::<Vec<_>>().join(", "),
        first_call_ms
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArguments,
    }

    #[test]
    fn what_was_measured_before_ctrl_c_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("bench.json");
        let words = ["bench", "--problem", "1x1x8x8", "--json", json.to_str().unwrap()];
        let arguments = Line::try_parse_from(words).unwrap().bench;
        let cancel = AtomicBool::new(false);
        let mut measured = Vec::new();
        let ended = sweep(&arguments, 0, &cancel, |_, _, stratum| {
            measured.push(stratum);
            // As the handler of the signal does, while the second is being measured.
            cancel.store(measured.len() == 2, Ordering::Relaxed);
            Ok(Some(stratum.to_string()))
        });
        assert!(matches!(ended, Err(Failure::Interrupted)));
        let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert_eq!(kept["records"], serde_json::json!(["naive", "v1"]));
    }
}
