//! Any kernel under the microscope: a PTX file is run on the emulator with arguments of the user's, counted by source line, checked
//! for hazards under several schedules, and explained.
//!
//! [`probe`] answers [`Settings`] with a [`Probed`]; nothing here prints.

mod argument;
mod buffers;
mod explain;
mod lines;
mod mutate;
mod record;
mod settings;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arch::{Gpu, OccupancyError, UnknownGpu};
use emulator::{Counters, Fault, FaultKind, MemoryError, Options, Policy, Report, RunError, Sample};
use ptx::{Kernel, Launch};
use thiserror::Error;

pub use argument::{ArgumentSpec, BufferSpec, FileTensor, Init, ParseArgumentError};
pub use buffers::{Comparison, Worst};
pub use explain::{Explanation, Phase, Remedy};
pub(crate) use explain::{explain, shared_at};
pub use lines::Line;
pub use mutate::mutate_probed;
pub use record::{HazardRecord, ProbeRecord, RunRecord, TotalsRecord};
pub use settings::{
    Dims, Expectation, LineSpec, MapSpec, Output, ParseSettingError, PolicySpec, Settings, Size, Tolerance,
};

use crate::evidence::{Evidence, LaunchEvidence, Place};
use crate::execute::Watch;
use crate::findings::{Finding, findings};
use crate::ptxas::{self, ToolError};
use crate::registers::{RegisterSource, Registers, estimate};
#[cfg(doc)]
use crate::sass::Sass;
use crate::source::Sources;
use crate::tensor_file::TensorFileError;
use crate::text_file::{self, TextFileError};

/// A PTX file larger than this is refused.
const MAX_PTX_BYTES: u64 = 128 << 20;
/// Warp instructions that a CTA may execute unless the user says otherwise: some seconds.
const BUDGET: u64 = 1 << 28;
/// A kernel of more instructions is not given to `ptxas`, which would take minutes.
const MAX_ASSEMBLED: usize = 100_000;

/// A probe that has no answer.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum ProbeError {
    #[error(transparent)]
    Text(#[from] TextFileError),
    #[error("{}: {reason}", path.display())]
    LaunchFile { path: PathBuf, reason: String },
    #[error("{0}")]
    Parse(String),
    #[error("{} has no kernel (no `.entry`)", path.display())]
    NoKernel { path: PathBuf },
    #[error("{} has {}: name one with --entry", path.display(), names(found))]
    Entry { path: PathBuf, found: Vec<String> },
    #[error("{what} is not given: {hint}")]
    Missing { what: &'static str, hint: &'static str },
    #[error("{given} arguments are given; `{kernel}` takes {}: {}", params.len(), params.join(", "))]
    Count { given: usize, kernel: String, params: Vec<String> },
    #[error("argument {index} is {argument}: the parameter is {param}")]
    Type { index: usize, argument: String, param: String },
    #[error("with argument {index}, {argument}, the buffers take {asked} bytes; {allowed} are allowed (--memory)")]
    Memory { index: usize, argument: String, asked: u64, allowed: u64 },
    #[error("there is no tensor map `{name}`: there are {}", names(known))]
    Map { name: String, known: Vec<String> },
    #[error("tensor map `{name}`: {reason}")]
    MapField { name: String, reason: String },
    #[error("tensor map `{name}`: {source}")]
    MapShape { name: String, source: ptx::TensorMapError },
    #[error("{what} names argument {index}: there are {count}, counted from 0")]
    Index { what: &'static str, index: usize, count: usize },
    #[error("{what} names argument {index}, which is {argument}: it must be a buffer")]
    NoBuffer { what: &'static str, index: usize, argument: String },
    #[error("{file} has the shape {shape:?}: it must have {wanted} elements, as {asked_by}")]
    FileShape { file: String, shape: Vec<usize>, wanted: u64, asked_by: String },
    #[error("--expect and --out need all CTAs to run; --sample runs some")]
    Sampled,
    #[error("`{kernel}` accesses no memory at {line}: its lines that do are {}", lines.join(", "))]
    Line { kernel: String, line: String, lines: Vec<String> },
    #[error("the GPU is {gpu} ({sm}); `{kernel}` is for {target}, which it does not run")]
    Architecture { gpu: &'static str, sm: String, kernel: String, target: String },
    #[error("no GPU of {0} is known: name one that runs it with --gpu")]
    NoGpu(String),
    #[error(transparent)]
    Gpu(#[from] UnknownGpu),
    #[error(transparent)]
    Allocation(#[from] MemoryError),
    #[error(transparent)]
    TensorFile(#[from] TensorFileError),
    #[error(transparent)]
    Occupancy(#[from] OccupancyError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Mutate(#[from] crate::mutate::MutateError),
    #[error("cancelled")]
    Cancelled,
}

fn names(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        _ => names.join(", "),
    }
}

/// What a probe found.
#[derive(Clone, Debug)]
pub struct Probed {
    /// What ran.
    pub about: About,
    /// The schedules that were run, in order; the last one met the hazard, if there is one.
    pub schedules: Vec<Policy>,
    /// The first hazard.
    pub hazard: Option<Hazard>,
    /// What the first schedule counted; `None` when it met a hazard.
    pub counted: Option<Counted>,
    /// The buffers that were to be compared, after the first schedule.
    pub comparisons: Vec<Comparison>,
}

/// What ran, on what.
#[derive(Clone, Debug)]
pub struct About {
    /// The PTX file.
    pub file: PathBuf,
    /// The kernel's name.
    pub kernel: String,
    /// What the PTX is for.
    pub target: String,
    /// The board that was emulated.
    pub gpu: &'static Gpu,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y and z.
    pub cluster: [u32; 3],
    /// Bytes of shared memory that the kernel declares.
    pub static_shared: u64,
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// As they were asked for.
    pub arguments: Vec<String>,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// What a run without a hazard counted.
#[derive(Clone, Debug)]
pub struct Counted {
    /// Counters, occupancy and pipe times.
    pub evidence: Evidence,
    /// Totals of the whole launch as the machine code makes them, where `ptxas` and `nvdisasm` made it (see [`Sass::counters`]); else
    /// why not.
    pub sass: Result<Counters, NoSass>,
    /// Source lines, costliest first.
    pub lines: Vec<Line>,
    /// What the kernel suffers from.
    pub findings: Vec<Finding>,
    /// The accesses of the line that was asked for.
    pub explanations: Vec<Explanation>,
}

impl Counted {
    /// The one launch.
    pub fn launch(&self) -> &LaunchEvidence {
        &self.evidence.launches[0]
    }
}

/// Something the kernel did that it must not.
#[derive(Clone, Debug)]
pub struct Hazard {
    /// What, where.
    pub fault: Fault,
    /// A word for it.
    pub kind: &'static str,
    /// The schedule under which it happened, as `--policy` takes it.
    pub policy: String,
    /// The text of the source line, where it is there.
    pub text: Option<String>,
    /// The address, of an access.
    pub address: Option<u64>,
    /// What to do about it.
    pub remedy: String,
}

/// A policy as `--policy` takes it.
pub fn policy_name(policy: Policy) -> String {
    match policy {
        Policy::Eager => "eager".into(),
        Policy::Lazy => "lazy".into(),
        Policy::Random(seed) => format!("random:{seed}"),
    }
}

/// Runs a kernel as asked and says what there is to say. Files asked for by [`Settings::out`] are written.
///
/// # Errors
/// When the settings, the PTX or the arguments are not what they must be, the emulator cannot execute the kernel, or the run is
/// cancelled. A hazard is no error but an answer.
pub fn probe(settings: &Settings, watch: Watch<'_>) -> Result<Probed, ProbeError> {
    let Launched { file, kernel, gpu, grid, block, cluster } = launched(settings)?;
    let watched = match &settings.line {
        Some(line) => explain::positions(&kernel, line)?,
        None => Vec::new(),
    };
    let mut sources = Sources::new();
    sources.look_in(file.parent().unwrap_or(Path::new("")));
    let seed = settings.seed.unwrap_or(0);
    let about = About {
        kernel: kernel.name.clone(),
        target: kernel.target.to_string(),
        gpu,
        grid,
        block,
        cluster,
        static_shared: kernel.static_shared_bytes(),
        dynamic_shared: settings.shared.unwrap_or(0),
        arguments: settings.args.iter().map(ToString::to_string).collect(),
        seed,
        file,
    };

    let mut schedules = Vec::new();
    let (mut first, mut hazard) = (None, None);
    let attempt = |policy: Policy, stale_copies: bool| {
        let placed = buffers::place(settings, &kernel, watch)?;
        let (dynamic_shared, arguments) = (about.dynamic_shared, placed.arguments.clone());
        let launch = Launch { kernel: &kernel, grid, block, cluster, dynamic_shared, arguments };
        let ran = run(&placed.memory, &launch, gpu, (policy, stale_copies), settings, &watched, watch);
        Ok::<_, ProbeError>((placed, ran))
    };
    for policy in policies(settings) {
        schedules.push(policy);
        let (placed, ran) = attempt(policy, false)?;
        match ran {
            Ok(report) if first.is_none() => {
                let compared = settings.expect.iter().map(|expected| placed.compare(expected));
                let comparisons = compared.collect::<Result<Vec<_>, _>>()?;
                settings.out.iter().try_for_each(|output| placed.write(&output.path, output.arg))?;
                first = Some((report, comparisons));
            }
            Ok(_) => {}
            Err(RunError::Fault(fault)) => {
                hazard = Some(explained_hazard(*fault, policy, &about, &mut sources));
                break;
            }
            Err(RunError::Cancelled) => return Err(ProbeError::Cancelled),
            Err(error) => return Err(error.into()),
        }
    }
    // A wrong result asks for what a working kernel may do too.
    let is_wrong = |(_, compared): &(Report, Vec<Comparison>)| compared.iter().any(|one| one.wrong > 0);
    if hazard.is_none()
        && first.as_ref().is_some_and(is_wrong)
        && let Some(&policy) = schedules.first()
        && let (_, Err(RunError::Fault(fault))) = attempt(policy, true)?
    {
        schedules.push(policy);
        hazard = Some(explained_hazard(*fault, policy, &about, &mut sources));
    }
    let Some((report, comparisons)) = first else {
        return Ok(Probed { about, schedules, hazard, counted: None, comparisons: Vec::new() });
    };
    let counted = counted(kernel, report, &about, settings, &mut sources)?;
    Ok(Probed { about, schedules, hazard, counted: Some(counted), comparisons })
}

/// What is to be launched, and how.
struct Launched {
    file: PathBuf,
    kernel: Kernel,
    gpu: &'static Gpu,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
}

fn launched(settings: &Settings) -> Result<Launched, ProbeError> {
    let file = settings.ptx.clone();
    let file =
        file.ok_or(ProbeError::Missing { what: "the PTX file", hint: "name it, or name it in the launch file" })?;
    let kernel = kernel(&file, settings.entry.as_deref())?;
    let gpu = gpu(&kernel, settings.gpu.as_deref())?;
    let grid =
        settings.grid.ok_or(ProbeError::Missing { what: "the grid", hint: "--grid X,Y,Z says how many CTAs" })?.0;
    let block = settings.block.map(|dims| dims.0).or(kernel.required_block);
    let hint = "--block X,Y,Z says how many threads a CTA has; the kernel does not (.reqntid)";
    let block = block.ok_or(ProbeError::Missing { what: "the block", hint })?;
    let cluster = settings.cluster.map(|dims| dims.0).or(kernel.required_cluster).unwrap_or([1; 3]);
    if settings.sample.is_some() && !(settings.expect.is_empty() && settings.out.is_empty()) {
        return Err(ProbeError::Sampled);
    }
    buffers::check(&kernel, settings)?;
    Ok(Launched { file, kernel, gpu, grid, block, cluster })
}

/// What a run counted, and what follows from it.
fn counted(
    kernel: Kernel,
    report: Report,
    about: &About,
    settings: &Settings,
    sources: &mut Sources,
) -> Result<Counted, ProbeError> {
    let threads = about.block.iter().product();
    let (registers, sass) = registers(&kernel, &report, threads, settings.registers);
    let gpu = about.gpu;
    let launch = LaunchEvidence::of(kernel, report, threads, about.dynamic_shared, registers, gpu)?;
    let evidence = Evidence { stratum: about.kernel.clone(), problem: None, gpu, launches: vec![launch] };
    let launch = &evidence.launches[0];
    let lines = lines::lines(launch, gpu, sources);
    let explanations = explain::explain(launch, gpu, sources);
    let findings = findings(&evidence, &settings.thresholds.unwrap_or_default());
    Ok(Counted { sass, lines, findings, explanations, evidence })
}

/// Why there is no machine code to count.
#[derive(Clone, Debug, Error)]
pub enum NoSass {
    /// It would take the assembler minutes.
    #[error("a kernel of more than {MAX_ASSEMBLED} instructions is not assembled")]
    Long,
    /// A tool gave no answer.
    #[error(transparent)]
    Tool(Arc<ToolError>),
}

impl From<ToolError> for NoSass {
    fn from(error: ToolError) -> Self {
        Self::Tool(Arc::new(error))
    }
}

/// Registers of a thread, and the totals of the machine code where there is one.
fn registers(
    kernel: &Kernel,
    report: &Report,
    threads: u32,
    given: Option<u32>,
) -> (Registers, Result<Counters, NoSass>) {
    let assembled = match kernel.instructions().nth(MAX_ASSEMBLED) {
        None => ptxas::assemble(kernel).map_err(NoSass::from),
        Some(_) => Err(NoSass::Long),
    };
    let counters = assembled.as_ref().map_err(Clone::clone).and_then(|assembled| {
        let sass = ptxas::disassemble(kernel, assembled)?;
        Ok(sass.counters(kernel, report).scaled(report.ctas_total, report.ctas_run))
    });
    let registers = match (given, &assembled) {
        (Some(count), _) => Registers { count, source: RegisterSource::Given, spilled_bytes: 0 },
        (None, Ok(assembled)) => Registers::of(assembled),
        (None, Err(_)) => estimate(kernel, report, threads),
    };
    (registers, counters)
}

fn run(
    memory: &emulator::Memory,
    launch: &Launch<'_>,
    gpu: &Gpu,
    (policy, stale_copies): (Policy, bool),
    settings: &Settings,
    watched: &[usize],
    watch: Watch<'_>,
) -> Result<Report, RunError> {
    let total = launch.ctas();
    let sample = match settings.sample {
        Some(count) if count < total => {
            let spread = |i: u64| (u128::from(i) * u128::from(total) / u128::from(count)) as u64;
            Sample::Ctas((0..count).map(spread).collect())
        }
        _ => Sample::Full,
    };
    let to_run = settings.sample.map_or(total, |count| count.min(total));
    let progress = |done: u64| {
        if let Some(progress) = watch.progress {
            progress(done, to_run);
        }
    };
    let options = Options {
        policy,
        sample,
        stale_copies,
        budget_per_cta: settings.budget.unwrap_or(BUDGET),
        watch: watched,
        global_races: settings.global_races.unwrap_or(false),
        cancel: watch.cancel,
        progress: Some(&progress),
        ..Options::new(gpu.sm)
    };
    emulator::run(memory, launch, &options)
}

/// The schedules to run: the one asked for, or eager, lazy and then random ones.
fn policies(settings: &Settings) -> Vec<Policy> {
    let seed = settings.seed.unwrap_or(0);
    let first = settings.policy.map(|policy| policy.policy(seed));
    let all = [Policy::Eager, Policy::Lazy].into_iter().chain((seed..=u64::MAX).map(Policy::Random));
    let others = all.filter(|policy| Some(*policy) != first);
    first.into_iter().chain(others).take(settings.shake.unwrap_or(1).max(1) as usize).collect()
}

fn explained_hazard(fault: Fault, policy: Policy, about: &About, sources: &mut Sources) -> Hazard {
    let address = match &fault.kind {
        FaultKind::OutOfBounds { address, .. }
        | FaultKind::Misaligned { address, .. }
        | FaultKind::Uninitialised { address, .. }
        | FaultKind::Unwaited { address, .. }
        | FaultKind::StaleCopy { address, .. }
        | FaultKind::Race { address, .. }
        | FaultKind::GlobalRace { address, .. } => Some(*address),
        _ => None,
    };
    let remedy = match &fault.kind {
        FaultKind::OutOfBounds { space: "shared", .. } if about.dynamic_shared == 0 => {
            "No dynamic shared memory was asked for: --shared says how many bytes a CTA has (of Triton's kernels `metadata.shared`)."
        }
        FaultKind::Budget { .. } => "If the kernel does end, --budget allows it more.",
        kind => kind.remedy(),
    };
    let place = fault.place.clone().map(|(file, line)| Place { file, line });
    let text = place.and_then(|place| sources.line(&place).map(str::to_owned));
    let kind = RunError::Fault(Box::new(fault.clone())).kind();
    Hazard { kind, policy: policy_name(policy), text, address, remedy: remedy.into(), fault }
}

/// The kernel of a PTX file.
fn kernel(path: &Path, entry: Option<&str>) -> Result<Kernel, ProbeError> {
    let text = text_file::read(path, MAX_PTX_BYTES)?;
    let name = path.display().to_string();
    let mut kernels = ptx::parse_file(&text, &name).map_err(|error| {
        ProbeError::Parse(error.render(&text, &name).trim_start_matches("error: ").trim_end().to_owned())
    })?;
    let found: Vec<String> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
    let at = match (entry, kernels.len()) {
        (_, 0) => return Err(ProbeError::NoKernel { path: path.into() }),
        (None, 1) => Some(0),
        (None, _) => None,
        (Some(entry), _) => found.iter().position(|name| name == entry),
    };
    at.map(|at| kernels.swap_remove(at)).ok_or(ProbeError::Entry { path: path.into(), found })
}

/// The board asked for, or the first known of the kernel's architecture.
fn gpu(kernel: &Kernel, name: Option<&str>) -> Result<&'static Gpu, ProbeError> {
    let target = &kernel.target;
    let gpu = match name {
        Some(name) => Gpu::find(name)?,
        None => {
            arch::GPUS.iter().find(|gpu| gpu.sm == target.sm()).ok_or_else(|| ProbeError::NoGpu(target.to_string()))?
        }
    };
    if !target.runs_on(gpu.sm) {
        return Err(ProbeError::Architecture {
            gpu: gpu.name,
            sm: gpu.sm.to_string(),
            kernel: kernel.name.clone(),
            target: target.to_string(),
        });
    }
    Ok(gpu)
}
