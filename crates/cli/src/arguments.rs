//! The command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use arch::Sm;
use clap::{Args, Parser, Subcommand};
use flashstrata::{Hardware, Planner};
use kernels::{Dtype, ProblemSpec, Stratum, Tiles};
use lab::Thresholds;
use lab::tensor_file::Layout;

use crate::bench::BenchArguments;
use crate::device::Device;
use crate::explain::ExplainArguments;
use crate::gate::{AcceptArguments, GateArguments};
use crate::history::{CompareArguments, HistoryArguments};
use crate::html::ReportArguments;
use crate::plan::PlanArguments;
use crate::probe::ProbeArguments;
use crate::profile::{ImportArguments, ProfileArguments};
use crate::record::RecordArguments;
use crate::tune::TuneArguments;
use crate::verify::VerifyArguments;

/// FlashAttention, generation by generation: run each kernel on an emulated GPU and see why it is as fast as it is.
///
/// Exit status: 0 fine, 1 the answer is no (a wrong result, a hazard, a regression), 2 bad usage or input, 3 no answer (what is
/// to be compared is incomparable), 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "strata", version, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the strata on one problem and explain each: what it suffers from, and what the next one removed.
    Dig(Box<DigArguments>),
    /// Say what would compute a problem on a GPU, which tiles, and why nothing newer; needs no GPU.
    Plan(Box<PlanArguments>),
    /// Measure on a GPU which tiles are fastest for problems, and keep that for the library.
    Tune(Box<TuneArguments>),
    /// Compute attention on your tensors; writes `o` and `lse`.
    Run(Box<RunArguments>),
    /// Run any kernel, of Triton or nvcc or your own, on an emulated GPU: what each source line costs, and what is wrong with it.
    Probe(Box<ProbeArguments>),
    /// Write what every kernel takes and does, architecture by architecture, as text files (needs ptxas and nvdisasm).
    Facts(FactsArguments),
    /// Run the contract's cases and random small problems: the emulator or a GPU against the f64 reference.
    Verify(VerifyArguments),
    /// Time the strata on a GPU.
    Bench(BenchArguments),
    /// Count on a GPU with ncu, or take times with nsys: of a command's kernels, or of a stratum.
    Profile(Box<ProfileArguments>),
    /// Read a profile made elsewhere, and explain it.
    Import(ImportArguments),
    /// Say what a record's kernel suffers from: what was measured, against which threshold, why, and what removes it.
    Explain(ExplainArguments),
    /// List what was recorded (--record of dig, bench, probe, profile and import).
    History(HistoryArguments),
    /// Put two records side by side; refuses those of different configurations (exit status 3) and says what differs.
    Compare(CompareArguments),
    /// Make one HTML file of records: charts, findings, lines of code, where everything is from. It needs no network.
    Report(ReportArguments),
    /// Judge what is measured now by a baseline, or this build's times by another's. Exit status: 0 pass or improved, 1 regressed,
    /// 3 incomparable or insufficient data.
    Gate(GateArguments),
    /// Make what is measured now the baseline, and say why.
    Accept(AcceptArguments),
    /// Say what this machine has, and what each absence costs.
    Doctor,
}

#[derive(Debug, Args)]
pub struct FactsArguments {
    /// The folder to write them to.
    #[arg(long, default_value = "crates/lab/facts")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct DigArguments {
    /// What runs the kernels: emulator, or cuda or cuda:N to also time them on GPU N.
    #[arg(long, default_value = "emulator")]
    pub device: Device,
    /// The GPU to emulate, by its name; RTX 2070, or the one that is timed, by default.
    #[arg(long)]
    pub gpu: Option<String>,
    /// BATCHxHEADSxSEQLENxHEAD_DIM and options, such as "2x8/2x512x64 f16 causal".
    #[arg(long, value_name = "PROBLEM", default_value = "10x64x1024x64", conflicts_with_all = ["input", "q"])]
    pub problem: ProblemSpec,
    /// Storage type: f32, f16, bf16 or e4m3.
    #[arg(long, conflicts_with_all = ["input", "q"])]
    pub dtype: Option<Dtype>,
    #[command(flatten)]
    pub mask: MaskArguments,
    /// Which strata, separated by commas; all by default.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub strata: Vec<Stratum>,
    #[command(flatten)]
    pub tiles: TileArguments,
    /// Run every head rather than a sample that is scaled.
    #[arg(long)]
    pub full: bool,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0, conflicts_with_all = ["input", "q"])]
    pub seed: u64,
    /// Write the records to FILE as JSON; `-` writes them to standard output in place of the report.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub thresholds: ThresholdArguments,
    #[command(flatten)]
    pub record: RecordArguments,
    #[command(flatten)]
    pub tensors: TensorArguments,
}

#[derive(Debug, Args)]
pub struct ThresholdArguments {
    /// Where findings begin, as TOML (docs/lab.md has the names); what the file leaves out stays as it is.
    #[arg(long, value_name = "FILE.toml")]
    pub thresholds: Option<PathBuf>,
}

impl ThresholdArguments {
    /// Those of the file, or the program's own.
    pub fn read(&self) -> anyhow::Result<Thresholds> {
        Ok(self.thresholds.as_ref().map_or_else(|| Ok(Thresholds::default()), |path| Thresholds::read(path))?)
    }
}

#[derive(Debug, Args)]
pub struct RunArguments {
    #[command(flatten)]
    pub tensors: TensorArguments,
    /// Where `o` and `lse` go: a .safetensors file, or a .npy file for `o`, beside which `lse` goes to NAME.lse.npy.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// What computes: cpu, emulator, cuda, or cuda:N for GPU N. By default the first GPU, or the CPU where there is none; the
    /// emulator where a stratum, tiles or a GPU to emulate are named.
    #[arg(long)]
    pub device: Option<Device>,
    /// Which stratum computes; auto takes the newest that can. (The CPU has code of its own.)
    #[arg(long, default_value = "auto")]
    pub stratum: Choice,
    /// The GPU to emulate, by its name; RTX 2070 by default.
    #[arg(long)]
    pub gpu: Option<String>,
    #[command(flatten)]
    pub mask: MaskArguments,
    #[command(flatten)]
    pub tiles: TileArguments,
}

#[derive(Debug, Args)]
pub struct MaskArguments {
    /// Query i sees the keys j <= i + seqlen_k - seqlen_q.
    #[arg(long)]
    pub causal: bool,
    /// Factor of the scores; 1/sqrt(head_dim) by default.
    #[arg(long, value_name = "X")]
    pub softmax_scale: Option<f32>,
}

#[derive(Debug, Args)]
pub struct TileArguments {
    /// Queries of a tile; 32 by default, more where head dimensions are large.
    #[arg(long, value_name = "N")]
    pub block_q: Option<u32>,
    /// Keys of a tile; 32 by default.
    #[arg(long, value_name = "N")]
    pub block_kv: Option<u32>,
    /// Threads of a CTA; 128 by default, 256 where head dimensions are large.
    #[arg(long, value_name = "N")]
    pub threads: Option<u32>,
}

/// A stratum, or the library's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Auto,
    Stratum(Stratum),
}

impl Choice {
    /// The planner that makes it.
    pub fn of(self, planner: Planner) -> Planner {
        match self {
            Choice::Auto => planner,
            Choice::Stratum(stratum) => planner.stratum(stratum),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Auto => f.write_str("auto"),
            Choice::Stratum(stratum) => stratum.fmt(f),
        }
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Choice::Auto),
            _ => text.parse().map(Choice::Stratum).map_err(|error| format!("{error}, or auto")),
        }
    }
}

/// The strata that are asked for: all when none is named.
///
/// # Errors
/// When one is named twice.
pub fn strata(named: &[Stratum]) -> anyhow::Result<&[Stratum]> {
    match named.iter().enumerate().find(|(index, stratum)| named[..*index].contains(stratum)) {
        Some((_, twice)) => anyhow::bail!("strata names {twice} twice: each can be given once"),
        None if named.is_empty() => Ok(&Stratum::ALL),
        None => Ok(named),
    }
}

impl TileArguments {
    /// Whether one is given.
    pub fn any(&self) -> bool {
        [self.block_q, self.block_kv, self.threads] != [None; 3]
    }

    /// The planner of a choice, on the tiles that are asked for.
    ///
    /// # Errors
    /// When tiles are given and no stratum: each has its own.
    pub fn planner(&self, planner: Planner, choice: Choice, problem: &kernels::Problem) -> anyhow::Result<Planner> {
        match choice {
            _ if !self.any() => Ok(choice.of(planner)),
            Choice::Stratum(stratum) => {
                let Hardware { sm, multiprocessors, .. } = *planner.hardware();
                Ok(choice.of(planner).tiles(self.of(stratum, sm, multiprocessors, problem)))
            }
            Choice::Auto => anyhow::bail!("stratum is auto, which chooses its tiles: name a stratum, or give no tiles"),
        }
    }

    /// The stratum's own tiles on an architecture's GPU of so many multiprocessors, changed as asked.
    pub fn of(&self, stratum: Stratum, sm: Sm, multiprocessors: u32, problem: &kernels::Problem) -> Tiles {
        let own = stratum.default_tiles(sm, multiprocessors, problem);
        Tiles {
            block_q: self.block_q.unwrap_or(own.block_q),
            block_kv: self.block_kv.unwrap_or(own.block_kv),
            threads: self.threads.unwrap_or(own.threads),
        }
    }
}

#[derive(Debug, Args)]
pub struct TensorArguments {
    /// A safetensors file with the tensors q, k and v.
    #[arg(long, value_name = "FILE.safetensors", conflicts_with_all = ["q", "k", "v"])]
    pub input: Option<PathBuf>,
    /// What precedes the names q, k and v in the file, such as "layer0.".
    #[arg(long, default_value = "", requires = "input")]
    pub prefix: String,
    /// Order of the tensors' dimensions: bshd ([batch, seqlen, heads, dim]) or bhsd.
    #[arg(long, default_value = "bshd")]
    pub layout: Layout,
    /// q as a NumPy file.
    #[arg(long, value_name = "FILE.npy", requires_all = ["k", "v"])]
    pub q: Option<PathBuf>,
    /// k as a NumPy file.
    #[arg(long, value_name = "FILE.npy", requires_all = ["q", "v"])]
    pub k: Option<PathBuf>,
    /// v as a NumPy file.
    #[arg(long, value_name = "FILE.npy", requires_all = ["q", "k"])]
    pub v: Option<PathBuf>,
}
