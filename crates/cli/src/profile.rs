//! `strata profile` and `strata import`.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use arch::{Gpu, Sm};
use clap::Args;
use cuda::Driver;
use kernels::{Dtype, Layout, ProblemSpec, Stratum};
use lab::import::{self, ImportOptions};
use lab::profiler::{self, Launches, ProfileError};
use lab::{AnyRecord, Document, Thresholds};

use crate::arguments::ThresholdArguments;
use crate::doctor::Counters;
use crate::progress::Progress;
use crate::record::{RecordArguments, Recorder};
use crate::{Failure, explain, output};

/// What is known of the kernels beside the profile.
#[derive(Debug, Args)]
pub struct AboutArguments {
    /// The problem that the kernels compute, as BATCHxHEADSxSEQLENxHEAD_DIM and options: compulsory bytes and type follow.
    #[arg(long, value_name = "PROBLEM")]
    pub problem: Option<ProblemSpec>,
    /// Their storage type: f32, f16 or bf16; the problem's by default.
    #[arg(long)]
    pub dtype: Option<Dtype>,
    #[command(flatten)]
    pub thresholds: ThresholdArguments,
    #[command(flatten)]
    pub record: RecordArguments,
    /// Write the records to FILE as JSON; `-` writes them to standard output in place of the report.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl AboutArguments {
    fn options(&self, kernel: Option<&String>) -> anyhow::Result<ImportOptions> {
        let build = |spec: ProblemSpec| match self.dtype {
            Some(dtype) => spec.dtype(dtype).build(),
            None => spec.build(),
        };
        let problem = self.problem.clone().map(build).transpose()?;
        let thresholds = self.thresholds.read()?;
        Ok(ImportOptions {
            problem,
            dtype: self.dtype,
            kernel: kernel.cloned(),
            thresholds,
            ..ImportOptions::default()
        })
    }

    fn tell(&self, records: &[AnyRecord], thresholds: &Thresholds, recorder: &mut Recorder) -> anyhow::Result<()> {
        if !self.json.as_deref().is_some_and(output::is_stdout) {
            output::print(&explain::text(records, thresholds))?;
        }
        if let Some(path) = &self.json {
            output::write(path, &(serde_json::to_string_pretty(&Document::new(records.to_vec()))? + "\n"))?;
        }
        recorder.keep(records)
    }
}

/// What is imported.
#[derive(Debug, Args)]
pub struct ImportArguments {
    /// An Nsight Compute report (.ncu-rep) or its raw page as CSV (`ncu --import X --csv --page raw`), an Nsight Systems export
    /// (`nsys export -t sqlite`), a Chrome trace of torch.profiler, or a document of --json.
    pub file: PathBuf,
    /// Only kernels whose name has this text.
    #[arg(long, value_name = "TEXT")]
    pub kernel: Option<String>,
    #[command(flatten)]
    pub about: AboutArguments,
}

pub fn import(arguments: &ImportArguments) -> Result<(), Failure> {
    let about = &arguments.about;
    output::check(about.json.as_deref())?;
    let mut recorder = about.record.open()?;
    let options = about.options(arguments.kernel.as_ref())?;
    let records = import::import(&arguments.file, &options)?;
    Ok(about.tell(&records, &options.thresholds, &mut recorder)?)
}

/// What is profiled, and how.
#[derive(Debug, Args)]
pub struct ProfileArguments {
    /// Profile a stratum of this program on the GPU (with --problem) in place of a command.
    #[arg(long, value_name = "STRATUM", conflicts_with_all = ["command", "kernel", "skip", "count", "nvtx"])]
    pub stratum: Option<Stratum>,
    /// Only kernels whose name matches this regular expression; a Triton kernel's is its Python function's.
    #[arg(long, value_name = "REGEX")]
    pub kernel: Option<String>,
    /// Matching launches that are left out first: warm-up and compilation.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub skip: u32,
    /// Launches that are profiled.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub count: u32,
    /// Only launches in this NVTX push-pop range.
    #[arg(long, value_name = "RANGE")]
    pub nvtx: Option<String>,
    /// Take times on the timeline by nsys, in place of counters by ncu.
    #[arg(long, conflicts_with_all = ["skip", "count", "nvtx"])]
    pub timeline: bool,
    /// The GPU, by its name, whose metrics are asked for; the first one's by default.
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Leave the profiler's report at this place.
    #[arg(long, value_name = "FILE")]
    pub keep: Option<PathBuf>,
    #[command(flatten)]
    pub about: AboutArguments,
    /// The command that launches the kernels, such as `python3 script.py`.
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "stratum")]
    pub command: Vec<String>,
}

pub fn profile(arguments: &ProfileArguments) -> Result<(), Failure> {
    let about = &arguments.about;
    output::check(about.json.as_deref())?;
    output::check(arguments.keep.as_deref())?;
    let mut recorder = about.record.open()?;
    let mut options = about.options(None)?;
    if !arguments.timeline && Counters::look() == Counters::AdministratorsOnly {
        return Err(ProfileError::Permission.into());
    }
    // The metrics' names depend on the chip; without a driver the profiler says what is missing.
    let driver = Driver::load().ok();
    options.tools.extend(driver.as_ref().map(|driver| ("driver".to_owned(), driver.version().to_string())));
    let sm = match &arguments.gpu {
        Some(name) => Some(Gpu::find(name)?.sm),
        None => driver.and_then(|driver| Some(driver.device(0).ok()?.sm)),
    };
    let (command, launches) = match arguments.stratum {
        Some(stratum) => of_stratum(stratum, sm, &mut options)?,
        None => {
            let launches = Launches {
                kernel: arguments.kernel.clone(),
                skip: arguments.skip,
                count: arguments.count,
                nvtx: arguments.nvtx.clone(),
            };
            (arguments.command.clone(), launches)
        }
    };
    let progress = Progress::new("kernels");
    progress.begin(Path::new(&command[0]).file_name().map_or("profile".into(), |name| name.to_string_lossy()).as_ref());
    let keep = arguments.keep.as_deref();
    let records = match arguments.timeline {
        true => {
            profiler::timeline(&command, keep, &ImportOptions { kernel: arguments.kernel.clone(), ..options.clone() })
        }
        false => profiler::counters(&command, &launches, sm, keep, &options),
    };
    progress.end();
    Ok(about.tell(&records?, &options.thresholds, &mut recorder)?)
}

/// This program's own `bench` of a stratum; the launches of a call after the first.
fn of_stratum(
    stratum: Stratum,
    sm: Option<Sm>,
    options: &mut ImportOptions,
) -> anyhow::Result<(Vec<String>, Launches)> {
    let sm = sm.ok_or_else(|| anyhow!("{} (--gpu says whose kernels to look for)", cuda::Error::NoDriver))?;
    let problem = match &options.problem {
        Some(problem) => problem.clone(),
        None => "10x64x1024x64".parse().context("the default problem")?,
    };
    let plan = kernels::plan(stratum, &problem, arch::Target::best(sm), &Layout::contiguous(&problem), None)?;
    let names: Vec<&str> = plan.launches.iter().map(|launch| launch.kernel.name.as_str()).collect();
    let own = std::env::current_exe().context("this program's own file")?;
    let words = ["bench", "--budget-ms", "0", "--json", "-", "--strata", stratum.name(), "--problem"].map(String::from);
    let count = names.len() as u32;
    let kernel = Some(format!("^({})$", names.join("|")));
    let command = [own.display().to_string()].into_iter().chain(words).chain([problem.to_string()]);
    let command = command.collect();
    options.problem = Some(problem);
    Ok((command, Launches { kernel, skip: count, count, nvtx: None }))
}
