//! Fact sheets: what every kernel takes and does, as text that is checked in.
//!
//! A sheet per architecture and stratum says, for a few fixed small problems, what the real assembler makes of each kernel
//! (registers, spills, the opcodes of the main loop), what occupancy follows, and what the emulator counts. A change of any of it
//! is a diff to review: that is how a change of speed shows without a GPU. `strata facts` writes the sheets; a test compares them.

use std::fmt::{Display, Write as _};
use std::path::PathBuf;

use arch::{BlockResources, Target};
use emulator::Level;
use kernels::{Inputs, Layout, Options, PlanError, Problem, Stratum};
use rayon::prelude::*;
use thiserror::Error;

use crate::execute::{self, Executed, Watch};
use crate::ptxas::{self, Assembled, ToolError};
use crate::sass::Sass;

/// Architectures with every problem, and those with the first alone: their kernels differ in what the assembler makes of them.
const TARGETS: [(&str, usize); 7] =
    [("sm_75", 6), ("sm_80", 6), ("sm_86", 1), ("sm_89", 1), ("sm_90a", 6), ("sm_100a", 1), ("sm_120a", 1)];

/// Head dimensions and types that take different paths through the kernels; lengths that end inside a tile.
const ON_CUDA_CORES: [&str; 5] =
    ["1x2x100x64 f32", "1x2x100x32 f32", "1x2x100x128 f32", "1x2x100x128 f16 causal", "1x4/2x70/100x33/40 bf16 causal"];

/// The same for the strata on tensor cores.
const ON_TENSOR_CORES: [&str; 6] = [
    "1x2x300x128 f16",
    "1x2x300x128 bf16 causal",
    "1x2x300x64 bf16",
    "1x2x300x256 bf16 causal",
    "1x4/2x270/300x96/72 f16 window=100,20",
    "1x2x300x128 e4m3",
];

/// Which problems a stratum is described by.
fn problems(stratum: Stratum) -> &'static [&'static str] {
    if Stratum::ON_CUDA_CORES.contains(&stratum) { &ON_CUDA_CORES } else { &ON_TENSOR_CORES }
}

/// The text about a stratum on an architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sheet {
    /// Where it lies below the folder of the sheets, as `sm_75/v2.txt`.
    pub path: PathBuf,
    /// What it says.
    pub text: String,
}

/// Why a sheet could not be made.
#[derive(Debug, Error)]
pub enum FactsError {
    /// The assembler or the disassembler is missing or refuses a kernel.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// A stratum does not compute the problem.
    #[error("{stratum} on {target}, {problem}: {reason}")]
    Stratum {
        /// Which.
        stratum: Stratum,
        /// The architecture.
        target: String,
        /// The problem.
        problem: String,
        /// Why.
        reason: String,
    },
}

/// Makes all sheets.
///
/// # Errors
/// When `ptxas` or `nvdisasm` is missing or refuses a kernel, or a stratum does not compute a problem.
pub fn sheets() -> Result<Vec<Sheet>, FactsError> {
    let all: Vec<_> = TARGETS
        .into_iter()
        .flat_map(|(target, problems)| Stratum::ALL.map(|stratum| (target, problems, stratum)))
        .filter(|(target, _, stratum)| target.parse().is_ok_and(|target| stratum.runs_on(target)))
        .collect();
    let runs: Vec<Vec<_>> = all
        .par_iter()
        .map(|&(target, count, stratum)| {
            let cases = problems(stratum).par_iter().take(count).map(|problem| Case { stratum, target, problem });
            cases.filter_map(|case| case.run().transpose()).collect()
        })
        .collect::<Result<_, FactsError>>()?;
    let kernels: Vec<_> = runs.iter().flatten().flat_map(|run| &run.launches).map(|launch| &launch.kernel).collect();
    let mut machine_code = ptxas::machine_code(&kernels)?.into_iter();
    let sheet = |((target, _, stratum), runs): ((&str, usize, Stratum), &Vec<Run>)| {
        let mut text = format!("{stratum} on {target}. Written by `cargo run --release -- facts`.\n");
        for run in runs {
            text += &run.head;
            for (launch, (assembled, sass)) in run.launches.iter().zip(&mut machine_code) {
                text += &run.case.describe(launch, &assembled, &sass)?;
            }
        }
        Ok(Sheet { path: PathBuf::from(target).join(format!("{stratum}.txt")), text })
    };
    all.into_iter().zip(&runs).map(sheet).collect()
}

/// What a part of a sheet is about.
struct Case {
    stratum: Stratum,
    target: &'static str,
    problem: &'static str,
}

/// A case that was run.
struct Run {
    case: Case,
    head: String,
    launches: Vec<Executed>,
}

impl Case {
    fn refuse(&self, reason: impl Display) -> FactsError {
        FactsError::Stratum {
            stratum: self.stratum,
            target: self.target.into(),
            problem: self.problem.into(),
            reason: reason.to_string(),
        }
    }

    fn target(&self) -> Result<Target, FactsError> {
        self.target.parse().map_err(|error| self.refuse(error))
    }

    /// Runs it; `None` where the stratum, or the architecture's tensor cores, lack the type.
    fn run(self) -> Result<Option<Run>, FactsError> {
        let problem: Problem = self.problem.parse().map_err(|error| self.refuse(error))?;
        let inputs = Inputs::randn(&problem, 1).map_err(|error| self.refuse(error))?;
        // Small problems stand for what fills a GPU.
        let options = Options { multiprocessors: Some(1), ..Options::default() };
        let layout = Layout::contiguous(&problem);
        let plan = match kernels::plan_with(self.stratum, &problem, self.target()?, &layout, &options) {
            Err(PlanError::Lacks { .. } | PlanError::Dtype { .. }) => return Ok(None),
            plan => plan.map_err(|error| self.refuse(error))?,
        };
        let tiles = plan.config.tiles;
        let head = format!(
            "\n{}, block_q {}, block_kv {}, {} threads\n",
            self.problem, tiles.block_q, tiles.block_kv, tiles.threads
        );
        let execution =
            execute::execute_plan(plan, &problem, &inputs, Watch::default()).map_err(|error| self.refuse(error))?;
        Ok(Some(Run { case: self, head, launches: execution.launches }))
    }

    fn describe(&self, launch: &Executed, assembled: &Assembled, sass: &Sass) -> Result<String, FactsError> {
        let takes = assembled.resources;
        let block = BlockResources {
            threads: launch.threads,
            registers: takes.registers,
            static_shared: takes.static_shared_bytes,
            dynamic_shared: launch.dynamic_shared,
            carveout_kib: None,
        };
        let occupancy = arch::occupancy(self.target()?.sm(), &block).map_err(|error| self.refuse(error))?;
        let limiters: Vec<_> = occupancy.limiters.iter().map(ToString::to_string).collect();
        let (part, histogram) = match sass.main_loop(&launch.report.ptx) {
            Some(histogram) => ("main loop", histogram),
            None => ("whole kernel", sass.whole()),
        };
        let opcodes: Vec<_> = histogram.into_iter().map(|(opcode, count)| format!("{opcode} {count}")).collect();
        let counted = launch.report.counters(&launch.kernel, Level::Merged);
        let mut text = format!(
            "  {}\n    registers {}, stack {}, spill stores {}, spill loads {}, shared {}\n    occupancy {} %, {} CTAs by {}\n    {part}: {}\n",
            launch.kernel.name,
            takes.registers,
            takes.stack_bytes,
            takes.spill_store_bytes,
            takes.spill_load_bytes,
            takes.static_shared_bytes + launch.dynamic_shared,
            occupancy.theoretical_pct,
            occupancy.blocks_per_sm,
            limiters.join(", "),
            opcodes.join(", "),
        );
        let lines = [
            format!(
                "warp instructions {} PTX, {} SASS",
                counted.warp_instructions,
                sass.warp_instructions(&launch.report.ptx).likely
            ),
            format!("global loads {}, sectors {}", counted.global_load_requests, counted.global_load_sectors),
            format!("global stores {}, sectors {}", counted.global_store_requests, counted.global_store_sectors),
            format!(
                "shared loads {}, wavefronts {}, ideal {}",
                counted.shared_load_instructions, counted.shared_load_wavefronts, counted.shared_load_wavefronts_ideal
            ),
            format!(
                "shared stores {}, wavefronts {}, ideal {}",
                counted.shared_store_instructions,
                counted.shared_store_wavefronts,
                counted.shared_store_wavefronts_ideal
            ),
        ];
        lines.iter().for_each(|line| {
            let _ = writeln!(text, "    {line}");
        });
        Ok(text)
    }
}
