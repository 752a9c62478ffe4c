//! `strata probe`.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::anyhow;
use clap::Args;
use lab::figures::percent;
use lab::mutate::{LEAST, Tally};
use lab::probe::{
    ArgumentSpec, Dims, Expectation, LineSpec, Output, PolicySpec, ProbeError, Probed, Settings, Size, Tolerance,
    mutate_probed, probe,
};
use lab::{Document, Thresholds, Watch};

use crate::arguments::ThresholdArguments;
use crate::progress::Progress;
use crate::record::RecordArguments;
use crate::{CANCEL, Failure, NOTHING_FINISHED, mutation_report, output, probe_report};

/// What is probed. What the command line says goes before what the launch file says.
#[derive(Debug, Args)]
pub struct ProbeArguments {
    /// The PTX file, or a launch file (.toml) that names one.
    #[arg(value_name = "FILE", required_unless_present = "launch")]
    pub file: Option<PathBuf>,
    /// A launch file: the options below as TOML, and tensor maps.
    #[arg(long, value_name = "FILE.toml")]
    pub launch: Option<PathBuf>,
    /// The kernel, when the file has several.
    #[arg(long, value_name = "NAME")]
    pub entry: Option<String>,
    /// CTAs.
    #[arg(long, value_name = "X[,Y[,Z]]")]
    pub grid: Option<Dims>,
    /// Threads of a CTA; by default those that the kernel requires (.reqntid).
    #[arg(long, value_name = "X[,Y[,Z]]")]
    pub block: Option<Dims>,
    /// CTAs of a cluster; by default those that the kernel requires.
    #[arg(long, value_name = "X[,Y[,Z]]")]
    pub cluster: Option<Dims>,
    /// Bytes of dynamic shared memory of a CTA.
    #[arg(long, value_name = "BYTES")]
    pub shared: Option<u32>,
    /// The GPU to emulate, by its name; by default one of the architecture that the PTX is for.
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Registers of a thread; by default what ptxas says where it is installed, else an estimate.
    #[arg(long, value_name = "N")]
    pub registers: Option<u32>,
    /// An argument of the kernel, in its order: buf:DTYPE:SHAPE:INIT (buf:f16:2x4x256x64:randn; also zeros, ones, ramp, uninit,
    /// a number, @FILE.npy, @FILE.safetensors#NAME), DTYPE:NUMBER (f32:0.125), null, or map:NAME of the launch file.
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    pub args: Vec<ArgumentSpec>,
    /// Write the buffer of an argument, counted from 0, to a file after the run.
    #[arg(long, value_name = "FILE.npy=INDEX")]
    pub out: Vec<Output>,
    /// Compare the buffer of an argument, counted from 0, with a file after the run.
    #[arg(long, value_name = "INDEX=FILE")]
    pub expect: Vec<Expectation>,
    /// Errors that --expect allows: |found - expected| <= ABS + REL * |expected|. By default 0 of integers; of floats four units
    /// in the last place of 1, but at least 1e-5 (f64: 1e-10), for both.
    #[arg(long, value_name = "ABS,REL")]
    pub tolerance: Option<Tolerance>,
    /// Seed of randn and of the policy random.
    #[arg(long)]
    pub seed: Option<u64>,
    /// When asynchronous work completes: eager, lazy (finds missing waits), random or random:SEED (finds races).
    #[arg(long)]
    pub policy: Option<PolicySpec>,
    /// Try N schedules: eager, lazy, then random ones.
    #[arg(long, value_name = "N")]
    pub shake: Option<u32>,
    /// Look for races between CTAs on global memory too; every byte's accesses are remembered, which takes time and memory.
    #[arg(long)]
    pub global_races: bool,
    /// Warp instructions that a CTA may execute before it is taken for hung.
    #[arg(long, value_name = "N")]
    pub budget: Option<u64>,
    /// Bytes that the buffers may take together, such as 8G; 4G by default.
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<Size>,
    /// Run N CTAs, evenly spread, and scale: exact where all CTAs do equal work.
    #[arg(long, value_name = "N")]
    pub sample: Option<u64>,
    /// Explain the memory accesses of this source line.
    #[arg(long, value_name = "[FILE:]N")]
    pub line: Option<LineSpec>,
    /// Put mistakes into the kernel, one at a time (each wait, fence, barrier, commit, copy and phase), and count those that are
    /// found; of more launch files too. Exit status 1 when fewer than 95 % are.
    #[arg(long, value_name = "MORE.toml", num_args = 0.., conflicts_with_all = ["json", "record", "out", "line", "sample", "policy", "shake"])]
    pub mutate: Option<Vec<PathBuf>>,
    /// Write the record to FILE as JSON; `-` writes it to standard output in place of the report.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub thresholds: ThresholdArguments,
    #[command(flatten)]
    pub record: RecordArguments,
}

impl ProbeArguments {
    fn settings(&self) -> anyhow::Result<Settings> {
        let (mut file, mut launch) = (self.file.clone(), self.launch.clone());
        if launch.is_none() && file.as_ref().is_some_and(|file| file.extension().is_some_and(|end| end == "toml")) {
            (file, launch) = (None, file);
        }
        let own = Settings {
            ptx: file,
            entry: self.entry.clone(),
            grid: self.grid,
            block: self.block,
            cluster: self.cluster,
            shared: self.shared,
            gpu: self.gpu.clone(),
            registers: self.registers,
            args: self.args.clone(),
            expect: self.expect.clone(),
            out: self.out.clone(),
            seed: self.seed,
            policy: self.policy,
            shake: self.shake,
            global_races: self.global_races.then_some(true),
            budget: self.budget,
            memory: self.memory,
            sample: self.sample,
            line: self.line.clone(),
            thresholds: self.thresholds.thresholds.as_ref().map(|path| Thresholds::read(path)).transpose()?,
            ..Settings::default()
        };
        let mut settings = match launch {
            Some(launch) => own.or(Settings::read(&launch)?),
            None => own,
        };
        if let Some(Tolerance { abs, rel }) = self.tolerance {
            for expected in &mut settings.expect {
                (expected.abs, expected.rel) = (Some(abs), Some(rel));
            }
        }
        Ok(settings)
    }
}

pub fn run(arguments: &ProbeArguments) -> Result<(), Failure> {
    let settings = arguments.settings()?;
    if let Some(more) = &arguments.mutate {
        return mutate(settings, more);
    }
    let mut recorder = arguments.record.open()?;
    let progress = Progress::new("CTAs");
    progress.begin("probe");
    let show = |done, of| progress.show(done, of);
    // What a probe has to tell it tells at its end.
    NOTHING_FINISHED.store(true, Ordering::Relaxed);
    let probed = probe(&settings, Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() });
    NOTHING_FINISHED.store(false, Ordering::Relaxed);
    progress.end();
    let probed = match probed {
        Ok(probed) => probed,
        Err(ProbeError::Cancelled) => return Err(Failure::Interrupted),
        Err(error) => return Err(error.into()),
    };
    let json = arguments.json.as_deref();
    if !json.is_some_and(output::is_stdout) {
        output::print(&probe_report::text(&probed, output::color()))?;
    }
    if let Some(path) = json {
        let document = Document::new(vec![probed.record()]);
        output::write(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    recorder.keep(&[probed.record()])?;
    verdict(&probed)
}

/// Mutates the kernel of the settings, and those of more launch files.
fn mutate(settings: Settings, more: &[PathBuf]) -> Result<(), Failure> {
    let more = more.iter().map(|path| Settings::read(path)).collect::<Result<Vec<_>, _>>()?;
    let progress = Progress::new("CTAs");
    let mut all = Vec::new();
    NOTHING_FINISHED.store(true, Ordering::Relaxed);
    for settings in std::iter::once(settings).chain(more) {
        let name = settings.ptx.as_ref().and_then(|path| path.file_stem()).unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        progress.begin(&name);
        let show = |done, of| progress.show(done, of);
        match mutate_probed(&settings, Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() }) {
            Ok(mutated) => all.push((name, mutated)),
            Err(ProbeError::Cancelled) => return Err(Failure::Interrupted),
            Err(error) => return Err(anyhow::Error::from(error).context(name).into()),
        }
        progress.end();
    }
    NOTHING_FINISHED.store(false, Ordering::Relaxed);
    output::print(&mutation_report::text(&all, output::color()))?;
    let tally = all.iter().fold(Tally::default(), |sum, (_, mutated)| sum.and(mutated.tally()));
    match tally.strict_rate() >= LEAST {
        true => Ok(()),
        false => Err(Failure::No(anyhow!("{} of the mistakes are found", percent(tally.strict_rate())))),
    }
}

/// A hazard or a wrong result is a no.
fn verdict(probed: &Probed) -> Result<(), Failure> {
    let wrong: Vec<String> = probed
        .comparisons
        .iter()
        .filter(|one| one.wrong > 0)
        .map(|one| {
            format!("argument {} differs from {} in {} of {} elements", one.arg, one.file, one.wrong, one.elements)
        })
        .collect();
    match &probed.hazard {
        Some(hazard) => Err(Failure::No(anyhow!("hazard: {}", hazard.kind.replace('_', " ")))),
        None if wrong.is_empty() => Ok(()),
        None => Err(Failure::No(anyhow!("{}", wrong.join("; ")))),
    }
}
