//! `strata tune`.

use std::fmt::Write;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use flashstrata::tune::{Candidates, CudaTimer, TuneError, TuneOptions, Tuned, cache, candidates, tune as measure};
use flashstrata::{Hardware, Layout, Planner, Table, Tuning, Watch};
use kernels::{Dtype, Problem, ProblemSpec};
use serde::Serialize;

use crate::arguments::Choice;
use crate::device::Device;
use crate::progress::Progress;
use crate::{CANCEL, Failure, output, prose};

/// What is tuned.
#[derive(Debug, Args)]
pub struct TuneArguments {
    /// The GPU: cuda, or cuda:N for GPU N.
    #[arg(long, default_value = "cuda")]
    pub device: Device,
    /// List what would be timed on a GPU of this name, as the model ranks it; nothing is timed and no GPU is needed.
    #[arg(long, conflicts_with = "device")]
    pub gpu: Option<String>,
    /// BATCHxHEADSxSEQLENxHEAD_DIM and options, such as "2x8/2x512x64 f16 causal"; may be repeated.
    #[arg(long, value_name = "PROBLEM", required = true)]
    pub problem: Vec<ProblemSpec>,
    /// Which types, separated by commas; those of the problems by default.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub dtype: Vec<Dtype>,
    /// Which stratum; auto times those that can be the fastest.
    #[arg(long, default_value = "auto")]
    pub stratum: Choice,
    /// Samples of each configuration; those that fall behind get fewer.
    #[arg(long, default_value_t = TuneOptions::default().rounds)]
    pub rounds: usize,
    /// The most configurations of a stratum that are timed.
    #[arg(long, default_value_t = TuneOptions::default().per_stratum)]
    pub per_stratum: usize,
    /// Where what is measured is kept; `flashstrata/tuning.json` in the user's cache by default.
    #[arg(long, value_name = "FILE")]
    pub cache: Option<PathBuf>,
    /// Write every configuration with its time to FILE as JSON; `-` writes it to standard output in place of the text.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Where measurements come from: `cached`, or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source(Tuning);

impl FromStr for Source {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(if text == "cached" { Tuning::Cached } else { Tuning::File(text.into()) }))
    }
}

impl Source {
    /// Reads it; a file that was set aside is told.
    pub fn load(&self) -> anyhow::Result<Table> {
        let loaded = self.0.load()?;
        if let Some(notice) = &loaded.notice {
            eprintln!("note: {notice}");
        }
        Ok(loaded.table)
    }
}

/// Times the candidates for each problem and keeps the fastest; what was kept before Ctrl-C stays.
pub fn tune(arguments: &TuneArguments) -> Result<(), Failure> {
    output::check(arguments.json.as_deref())?;
    let options = TuneOptions { per_stratum: arguments.per_stratum, rounds: arguments.rounds };
    let problems = problems(arguments)?;
    let mut records = Vec::new();
    let ended = match &arguments.gpu {
        Some(name) => {
            let planner = arguments.stratum.of(Planner::new(Hardware::from(arch::Gpu::find(name)?)));
            problems.iter().try_for_each(|problem| {
                let found = candidates(&planner, problem, &Layout::contiguous(problem), &options)?;
                told(arguments, &planner, problem, &found, None, &mut records)
            })
        }
        None => on_the_gpu(arguments, &problems, &options, &mut records),
    };
    if let Some(path) = &arguments.json {
        let document = Document { schema: lab::record::SCHEMA, records: &records };
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    ended
}

fn problems(arguments: &TuneArguments) -> anyhow::Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for spec in &arguments.problem {
        let dtypes = if arguments.dtype.is_empty() { vec![spec.dtype] } else { arguments.dtype.clone() };
        for dtype in dtypes {
            problems.push(spec.clone().dtype(dtype).build()?);
        }
    }
    Ok(problems)
}

fn on_the_gpu(
    arguments: &TuneArguments,
    problems: &[Problem],
    options: &TuneOptions,
    records: &mut Vec<Record>,
) -> Result<(), Failure> {
    let Device::Cuda(_) = arguments.device else {
        return Err(anyhow::anyhow!(
            "device is {}: tune takes time on a GPU, cuda or cuda:N; --gpu NAME lists what it would time",
            arguments.device
        )
        .into());
    };
    let cache = match &arguments.cache {
        Some(path) => path.clone(),
        None => cache::default_path()?,
    };
    let device = arguments.device.open("")?;
    let planner = arguments.stratum.of(device.planner()?);
    for problem in problems {
        let found = candidates(&planner, problem, &Layout::contiguous(problem), options)?;
        let stream = device.stream()?;
        let mut timer = CudaTimer::new(&stream, problem)?;
        let bar = Progress::new("steps");
        bar.begin("tune");
        let show = |progress: flashstrata::Progress| bar.show(progress.done as u64, progress.of as u64);
        let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show) };
        let result = measure(&found, &mut timer, options, watch);
        bar.end();
        let tuned = match result {
            Err(TuneError::Cancelled) => return Err(Failure::Interrupted),
            Err(error) => return Err(Failure::No(error.into())),
            Ok(tuned) => tuned,
        };
        if let Some(notice) = cache::store(&cache, &tuned.entry)? {
            eprintln!("note: {notice}");
        }
        told(arguments, &planner, problem, &found, Some(&tuned), records)?;
    }
    if !arguments.json.as_deref().is_some_and(output::is_stdout) {
        output::print(&format!("kept in {}\n", cache.display()))?;
    }
    Ok(())
}

/// What was found for a problem: as text, and as a record.
fn told(
    arguments: &TuneArguments,
    planner: &Planner,
    problem: &Problem,
    found: &Candidates,
    tuned: Option<&Tuned>,
    records: &mut Vec<Record>,
) -> Result<(), Failure> {
    let measured = |index: usize| tuned?.measured.iter().find(|one| one.candidate == index).map(|one| &one.outcome);
    let configurations = found.kept.iter().enumerate().map(|(index, candidate)| {
        let tiles = candidate.plan.tiles();
        let outcome = measured(index);
        Configuration {
            stratum: candidate.plan.stratum().to_string(),
            tiles: lab::record::TileRecord { block_q: tiles.block_q, block_kv: tiles.block_kv, threads: tiles.threads },
            default: index == 0,
            modelled_clocks: candidate.modelled_clocks,
            warps_per_sm: candidate.warps,
            median_ms: outcome.and_then(|outcome| outcome.as_ref().ok().copied()),
            failure: outcome.and_then(|outcome| outcome.as_ref().err().cloned()),
        }
    });
    let record = Record {
        gpu: planner.hardware().name.clone(),
        driver: planner.hardware().driver.clone(),
        problem: problem.to_string(),
        refused: found.pruned.refused,
        modelled_slower: found.pruned.modelled_slower,
        occupancy: found.pruned.occupancy,
        configurations: configurations.collect(),
    };
    if !arguments.json.as_deref().is_some_and(output::is_stdout) {
        output::print(&text(&record, tuned))?;
    }
    records.push(record);
    Ok(())
}

fn text(record: &Record, tuned: Option<&Tuned>) -> String {
    let mut out = format!("{} on {}\n", record.problem, record.gpu);
    let mut table = prose::table(["stratum", "block_q", "block_kv", "threads", "modelled", "warps/SM", "median", ""]);
    let least = record.configurations.iter().map(|one| one.modelled_clocks).fold(f64::INFINITY, f64::min);
    for one in &record.configurations {
        let is_chosen = tuned.is_some_and(|tuned| {
            let tiles = tuned.entry.tiles;
            let chosen = (tiles.block_q, tiles.block_kv, tiles.threads);
            one.stratum == tuned.entry.stratum.name()
                && chosen == (one.tiles.block_q, one.tiles.block_kv, one.tiles.threads)
        });
        let median = match (&one.median_ms, &one.failure) {
            (Some(ms), _) => format!("{ms:.3} ms"),
            (None, Some(why)) => prose::clip(why, 40),
            (None, None) => "-".into(),
        };
        let marks = [(one.default, "default"), (is_chosen, "fastest")];
        let marks: Vec<_> = marks.into_iter().filter(|(is, _)| *is).map(|(_, mark)| mark).collect();
        table.add_row(vec![
            one.stratum.clone(),
            one.tiles.block_q.to_string(),
            one.tiles.block_kv.to_string(),
            one.tiles.threads.to_string(),
            format!("{:.2}", one.modelled_clocks / least),
            one.warps_per_sm.to_string(),
            median,
            marks.join(", "),
        ]);
    }
    let _ = writeln!(out, "{}", prose::set(table, 1..7));
    let _ = writeln!(
        out,
        "not timed: {} that the model puts behind, {} for their occupancy; modelled: against the least\n",
        record.modelled_slower, record.occupancy
    );
    out
}

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    records: &'a [Record],
}

#[derive(Serialize)]
struct Record {
    gpu: String,
    driver: Option<String>,
    problem: String,
    /// Tile sizes of the grid that no stratum has.
    refused: usize,
    modelled_slower: usize,
    occupancy: usize,
    configurations: Vec<Configuration>,
}

#[derive(Serialize)]
struct Configuration {
    stratum: String,
    tiles: lab::record::TileRecord,
    default: bool,
    modelled_clocks: f64,
    warps_per_sm: u32,
    median_ms: Option<f64>,
    failure: Option<String>,
}
