//! From a problem and a GPU to kernels, tiles and memory: a value that needs no GPU.

use std::fmt;

use arch::{BlockResources, Occupancy, OccupancyError, Target};
use kernels::plan::LaunchPlan;
use kernels::{Dtype, Layout, PlanError, Problem, Stratum, Tiles, Without};
use thiserror::Error;

use crate::hardware::Hardware;
use crate::layout::{self, LayoutError};
use crate::tune::{Entry, Table};

/// What each workspace begins at a multiple of, and hence a workspace as a whole.
pub const WORKSPACE_ALIGNMENT: u64 = 256;

/// Picks the generation and the tiles for a GPU.
///
/// Unless told otherwise it takes the newest generation that covers the problem, on its own tiles.
///
/// ```
/// use flashstrata::{Hardware, Layout, Planner, Problem, Stratum};
///
/// let problem = Problem::builder(1, 8, 2048, 64).causal().build()?;
/// let planner = Planner::new(Hardware::from(flashstrata::Gpu::find("T4")?));
/// let plan = planner.plan(&problem, &Layout::contiguous(&problem))?;
/// assert_eq!(plan.stratum(), Stratum::V2Kt);
/// assert_eq!(plan.workspace_bytes(), 8 * 2048 * 64 * 4);          // the transposed keys
/// assert_eq!(plan.passed_over[0].stratum, Stratum::V3);            // and why
/// assert_eq!(plan.passed_over[0].why.to_string(), "target is sm_75: v3 needs sm_90 or later");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Planner {
    hardware: Hardware,
    stratum: Option<Stratum>,
    tiles: Option<Tiles>,
    splits: Option<u32>,
    without: Without,
    cluster: Option<u32>,
    tuned: Option<Table>,
}

impl Planner {
    /// For a GPU, without a wish.
    pub fn new(hardware: Hardware) -> Planner {
        let without = Without::default();
        Planner { hardware, stratum: None, tiles: None, splits: None, without, cluster: None, tuned: None }
    }

    /// Of this generation alone.
    pub fn stratum(self, stratum: Stratum) -> Planner {
        Planner { stratum: Some(stratum), ..self }
    }

    /// On these tiles; of generations that have none such, none is taken.
    pub fn tiles(self, tiles: Tiles) -> Planner {
        Planner { tiles: Some(tiles), ..self }
    }

    /// With the keys of each tile of queries split among so many CTAs, of the generations that can; by default as many as fill
    /// the GPU.
    pub fn splits(self, splits: u32) -> Planner {
        Planner { splits: Some(splits), ..self }
    }

    /// As if the GPU had so many multiprocessors: plans are what they would be for a problem so much larger.
    pub fn multiprocessors(self, multiprocessors: u32) -> Planner {
        Planner { hardware: Hardware { multiprocessors, ..self.hardware }, ..self }
    }

    /// With parts of `v3` left out, to measure what they bring.
    pub fn without(self, without: Without) -> Planner {
        Planner { without, ..self }
    }

    /// With so many CTAs of `v3` that load blocks of keys and values together: see [`kernels::Options::cluster`].
    pub fn cluster(self, cluster: u32) -> Planner {
        Planner { cluster: Some(cluster), ..self }
    }

    /// With what was measured: see [`Table::load`]. Where the table says nothing of a problem, as without it.
    pub fn tuned(self, table: Table) -> Planner {
        Planner { tuned: Some(table), ..self }
    }

    /// Without it.
    pub fn untuned(self) -> Planner {
        Planner { tuned: None, ..self }
    }

    /// What plans are made for.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// The generations that may be taken, the newest first.
    pub fn candidates(&self) -> Vec<Stratum> {
        match self.stratum {
            Some(stratum) => vec![stratum],
            None => Stratum::ALL.into_iter().rev().collect(),
        }
    }

    /// How to compute `problem` on tensors that lie as `layout` says.
    ///
    /// # Errors
    /// When the layout cannot be, or no generation computes the problem on this GPU: says why of each.
    pub fn plan(&self, problem: &Problem, layout: &Layout) -> Result<Plan, PlanFailure> {
        layout::check(problem, layout)?;
        let mut passed_over = Vec::new();
        let of = |stratum, tiles| {
            let multiprocessors = Some(self.hardware.multiprocessors);
            let Planner { splits, without, cluster, .. } = *self;
            let options = kernels::Options { tiles, multiprocessors, splits, without, cluster, tf32: false };
            kernels::plan_with(stratum, problem, Target::best(self.hardware.sm), layout, &options)
        };
        let done = |kernels, chosen_by, passed_over| {
            let (problem, layout, hardware) = (problem.clone(), *layout, self.hardware.clone());
            Ok(Plan { kernels, problem, layout, hardware, chosen_by, passed_over })
        };
        let tuned = self.tuned.as_ref().filter(|_| self.tiles.is_none()).and_then(|table| {
            let entry = table.get(&self.hardware, problem)?;
            // What was measured on other strides may be refused on these.
            let allowed = self.stratum.is_none_or(|stratum| stratum == entry.stratum);
            Some((entry.clone(), of(entry.stratum, Some(entry.tiles)).ok().filter(|_| allowed)?))
        });
        if let Some((entry, kernels)) = tuned {
            for stratum in self.candidates().into_iter().take_while(|&stratum| stratum != entry.stratum) {
                let why =
                    of(stratum, None).map_or_else(Why::Refused, |_| Why::MeasuredSlower { chosen: entry.stratum });
                passed_over.push(PassedOver { stratum, why });
            }
            return done(kernels, ChosenBy::Measurement(Box::new(entry)), passed_over);
        }
        let chosen_by = if self.tiles.is_some() { ChosenBy::Caller } else { ChosenBy::Default };
        for stratum in self.candidates() {
            let why = match of(stratum, self.tiles) {
                Ok(v3)
                    if stratum == Stratum::V3
                        && self.stratum.is_none()
                        && of(Stratum::V2Tc, None).is_ok_and(|v2_tc| self.fills_better(problem, &v2_tc, &v3)) =>
                {
                    Why::FewQueries { queries: problem.seqlen_q }
                }
                Ok(_)
                    if stratum == Stratum::V2Tc
                        && problem.dtype == Dtype::F32
                        && self.stratum.is_none()
                        && Stratum::ON_CUDA_CORES.into_iter().any(|exact| of(exact, self.tiles).is_ok()) =>
                {
                    Why::Rounds
                }
                Ok(kernels) => match self.not_worth_it(stratum, problem, kernels.config.tiles) {
                    None => return done(kernels, chosen_by, passed_over),
                    Some(why) => why,
                },
                Err(error) => Why::Refused(error),
            };
            passed_over.push(PassedOver { stratum, why });
        }
        match (self.stratum, passed_over.pop()) {
            (Some(_), Some(PassedOver { why: Why::Refused(error), .. })) => Err(PlanFailure::Refused(error)),
            (_, last) => {
                passed_over.extend(last);
                Err(PlanFailure::NoStratum { hardware: self.hardware.clone(), passed_over })
            }
        }
    }

    /// A generation that would be slower than the one before it, when nobody asked for it.
    fn not_worth_it(&self, stratum: Stratum, problem: &Problem, tiles: Tiles) -> Option<Why> {
        // Every key is read once by each tile of queries: of one tile, transposing them first reads and writes them in vain.
        let (queries, block_q) = (problem.seqlen_q, tiles.block_q);
        let in_vain = stratum == Stratum::V2Kt && self.stratum.is_none() && queries <= block_q as usize;
        in_vain.then_some(Why::TooFewQueries { queries, block_q })
    }

    /// Whether `v2_tc` makes more of few queries than `v3`, by splitting keys or by letting heads share tiles.
    ///
    /// Where heads share `v3`'s tiles as well, splitting is all that it lacks. It loses by that where its tiles leave most of the
    /// multiprocessors idle, and by what it takes to begin and end a tile where reading the keys takes longer than multiplying
    /// them by so few rows, whoever does (docs/side-by-side.md has what both take).
    fn fills_better(&self, problem: &Problem, v2_tc: &kernels::Plan, v3: &kernels::Plan) -> bool {
        /// Rows that are worth a tile of `v3`: at 16 it took 5 % longer than `v2_tc`, at 32 from 2 % more to 10 % less.
        const ROWS: usize = 32;
        /// The share of the multiprocessors' time that the tiles of `v3` must fill, of 100: at 48 it took 7 to 25 % less, at 24
        /// 40 % more.
        const ENOUGH: u64 = 40;
        let kernels::Config { split, grouped, .. } = v2_tc.config;
        if !v3.config.grouped {
            return split || grouped && problem.seqlen_q <= ROWS;
        }
        let multiprocessors = u64::from(self.hardware.multiprocessors).max(1);
        let tiles: u64 = v3.launches.iter().map(LaunchPlan::ctas).sum();
        let rounds = tiles.div_ceil(multiprocessors);
        let idle = 100 * tiles < ENOUGH * rounds * multiprocessors;
        split && idle || problem.seqlen_q * problem.group() < ROWS
    }
}

/// A generation that was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct PassedOver {
    /// Which.
    pub stratum: Stratum,
    /// Why not.
    pub why: Why,
}

/// Why a generation was not chosen.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Why {
    /// It does not compute the problem on this GPU.
    #[error(transparent)]
    Refused(#[from] PlanError),
    /// There are too few queries for its tiles.
    #[error(
        "seqlen_q is {queries}: v2_tc splits the keys among CTAs or lets query heads share tiles, which fills the GPU better"
    )]
    FewQueries {
        /// Queries.
        queries: usize,
    },
    /// It is less exact than f32 is.
    #[error(
        "v2_tc multiplies f32 as three products of tf32, 2 units in the last place off: it is taken where it is asked for"
    )]
    Rounds,
    /// Transposing the keys does not pay.
    #[error("seqlen_q is {queries}: transposing the keys pays for more than one tile of {block_q} queries")]
    TooFewQueries {
        /// Queries.
        queries: usize,
        /// Queries of a tile.
        block_q: u32,
    },
    /// It was measured, and another was faster.
    #[error("{chosen} was measured to be faster")]
    MeasuredSlower {
        /// The faster one.
        chosen: Stratum,
    },
}

/// Why a problem has no plan.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PlanFailure {
    /// The tensors cannot lie like that.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The generation that was asked for does not compute it.
    #[error(transparent)]
    Refused(#[from] PlanError),
    /// None computes it.
    #[error("no stratum computes this on {hardware}: {}", reasons(passed_over))]
    NoStratum {
        /// The GPU.
        hardware: Hardware,
        /// Each, and why.
        passed_over: Vec<PassedOver>,
    },
}

impl PlanFailure {
    /// Whether it says that no generation covers the call, rather than that something is wrong with what was asked.
    pub fn is_coverage(&self) -> bool {
        match self {
            PlanFailure::Layout(_) => false,
            PlanFailure::Refused(error) => error.is_coverage(),
            PlanFailure::NoStratum { passed_over, .. } => {
                passed_over.iter().all(|one| matches!(&one.why, Why::Refused(error) if error.is_coverage()))
            }
        }
    }
}

fn reasons(passed_over: &[PassedOver]) -> String {
    let reasons: Vec<_> = passed_over.iter().map(|one| one.why.to_string()).collect();
    reasons.join("; ")
}

/// What decided a plan's generation and tiles.
#[derive(Clone, Debug, PartialEq)]
pub enum ChosenBy {
    /// The newest generation, on its own tiles.
    Default,
    /// The caller gave the tiles.
    Caller,
    /// The tuning table.
    Measurement(Box<Entry>),
}

impl fmt::Display for ChosenBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChosenBy::Default => f.write_str("by default"),
            ChosenBy::Caller => f.write_str("as given"),
            ChosenBy::Measurement(entry) => write!(f, "measured, {}", entry.gain()),
        }
    }
}

/// How a call is computed, and why so.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The kernels, their tiles and launches.
    pub kernels: kernels::Plan,
    /// What is computed.
    pub problem: Problem,
    /// Where the tensors' elements are.
    pub layout: Layout,
    /// On what.
    pub hardware: Hardware,
    /// What decided it.
    pub chosen_by: ChosenBy,
    /// The newer generations that were not chosen, the newest first.
    pub passed_over: Vec<PassedOver>,
}

/// A part of a plan's workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it holds.
    pub name: &'static str,
    /// Where it begins.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
    /// Whether it must be zero when a call begins; the call leaves it so.
    pub zeroed: bool,
}

impl Part {
    /// Where it ends. (Parts of a size that no memory has end together.)
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// What a launch takes of a multiprocessor.
#[derive(Clone, Debug, PartialEq)]
pub struct Footprint {
    /// Registers of a thread, estimated from what is live at once; `None` where that cannot be told.
    pub registers: Option<u32>,
    /// How full a multiprocessor gets with so many.
    pub occupancy: Result<Occupancy, OccupancyError>,
}

impl Plan {
    /// The generation.
    pub fn stratum(&self) -> Stratum {
        self.kernels.stratum
    }

    /// The tile sizes.
    pub fn tiles(&self) -> Tiles {
        self.kernels.config.tiles
    }

    /// One after the other; none when there is no query.
    pub fn launches(&self) -> &[LaunchPlan] {
        &self.kernels.launches
    }

    /// Bytes of device memory that a call needs beside its tensors.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_parts().iter().map(Part::end).max().unwrap_or(0)
    }

    /// The bytes at the workspace's beginning that must be zero when a call begins, and are so again when it has ended.
    pub fn zeroed_bytes(&self) -> u64 {
        self.workspace_parts().iter().filter(|part| part.zeroed).map(Part::end).max().unwrap_or(0)
    }

    /// How the workspace is divided, in the order of the kernels' own; each part begins at a multiple of
    /// [`WORKSPACE_ALIGNMENT`], those that must be zero before all others.
    pub fn workspace_parts(&self) -> Vec<Part> {
        let part = |w: &kernels::plan::Workspace| Part { name: w.name, offset: 0, bytes: w.bytes, zeroed: w.zeroed };
        let mut parts: Vec<_> = self.kernels.workspaces.iter().map(part).collect();
        let mut next = 0u64;
        for zeroed in [true, false] {
            for part in parts.iter_mut().filter(|part| part.zeroed == zeroed) {
                part.offset = next;
                next = part.end().checked_next_multiple_of(WORKSPACE_ALIGNMENT).unwrap_or(u64::MAX);
            }
        }
        parts
    }

    /// Bytes from the first element of `out` to the end of its last.
    pub fn out_bytes(&self) -> u64 {
        layout::reach(&self.problem, &self.layout, "out") as u64
    }

    /// Bytes of `lse`: one f32 for each query and head, `[batch, heads_q, seqlen_q]` or packed `[heads_q, total_q]`.
    pub fn lse_bytes(&self) -> u64 {
        layout::lse_bytes(&self.problem)
    }

    /// What each launch takes of a multiprocessor.
    pub fn footprints(&self) -> Vec<Footprint> {
        self.launches().iter().map(|launch| footprint(&self.hardware, launch)).collect()
    }
}

pub(crate) fn footprint(hardware: &Hardware, launch: &LaunchPlan) -> Footprint {
    let threads = launch.block.iter().product();
    let live = ptx::live_registers(&launch.kernel).ok();
    let registers = live.map(|live| arch::estimate_registers(live, hardware.sm, threads));
    let block = BlockResources {
        threads,
        registers: registers.unwrap_or(arch::LEAST_REGISTERS),
        static_shared: 0,
        dynamic_shared: launch.dynamic_shared,
        carveout_kib: None,
    };
    Footprint { registers, occupancy: arch::occupancy(hardware.sm, &block) }
}

/// `block_q 128, block_kv 80, 384 threads`.
pub(crate) fn tiles_text(tiles: Tiles) -> String {
    let Tiles { block_q, block_kv, threads } = tiles;
    format!("block_q {block_q}, block_kv {block_kv}, {threads} threads")
}

impl fmt::Display for Plan {
    /// Some lines: what was chosen, its launches with their shared memory and occupancy, the workspace, and what was not chosen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}", self.problem, self.hardware)?;
        writeln!(f, "  {} ({}; {})", self.stratum(), tiles_text(self.tiles()), self.chosen_by)?;
        if self.launches().is_empty() {
            writeln!(f, "  no launch: there is nothing to compute")?;
        }
        for (launch, footprint) in self.launches().iter().zip(self.footprints()) {
            let clusters = match launch.kernel.required_cluster {
                Some(ctas) => format!(", {} to a cluster", ctas.iter().product::<u32>()),
                None => String::new(),
            };
            let (name, ctas, threads) = (&launch.kernel.name, launch.ctas(), launch.block[0]);
            writeln!(f, "  launch {name}: {ctas} CTAs of {threads} threads{clusters}")?;
            if launch.dynamic_shared > 0 {
                writeln!(f, "    shared memory {}", launch.shared)?;
            }
            match (&footprint.occupancy, footprint.registers) {
                (Ok(occupancy), Some(registers)) => {
                    let limiters: Vec<_> = occupancy.limiters.iter().map(ToString::to_string).collect();
                    let (pct, blocks) = (occupancy.theoretical_pct, occupancy.blocks_per_sm);
                    let by = limiters.join(" and ");
                    writeln!(f, "    occupancy {pct:.0} %, {blocks} CTAs by {by}, at about {registers} registers")?;
                }
                (Ok(_), None) => writeln!(f, "    occupancy unknown: its registers cannot be estimated")?,
                (Err(error), _) => writeln!(f, "    occupancy: {error}")?,
            }
        }
        let parts: Vec<_> = self.workspace_parts().iter().map(|part| format!("{} {}", part.name, part.bytes)).collect();
        match parts.len() {
            0 => writeln!(f, "  workspace none")?,
            _ => writeln!(f, "  workspace {} bytes: {}", self.workspace_bytes(), parts.join(", "))?,
        }
        for PassedOver { stratum, why } in &self.passed_over {
            writeln!(f, "  not {stratum}: {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use arch::Gpu;
    use kernels::{Mask, ProblemSpec};

    use super::*;

    fn planner(gpu: &str) -> Planner {
        Planner::new(Gpu::find(gpu).unwrap().into())
    }

    fn plan(planner: &Planner, spec: ProblemSpec) -> Result<Plan, PlanFailure> {
        let problem = spec.build().unwrap();
        planner.plan(&problem, &Layout::contiguous(&problem))
    }

    #[test]
    fn plans_read_as_sentences() {
        let spec = ProblemSpec::new(2, 8, 2048, 64).dtype(Dtype::F16).causal();
        let mut texts = Vec::new();
        for gpu in ["RTX 2070", "H100 SXM"] {
            texts.push(plan(&planner(gpu), spec.clone()).unwrap().to_string());
        }
        texts.push(
            plan(&planner("T4"), ProblemSpec { seqlen_q: 1, ..ProblemSpec::new(1, 2, 512, 40) }).unwrap().to_string(),
        );
        texts.push(
            plan(&planner("T4"), ProblemSpec { seqlen_q: 0, ..ProblemSpec::new(1, 2, 512, 40) }).unwrap().to_string(),
        );
        insta::assert_snapshot!(texts.join("\n"));
    }

    #[test]
    fn refusals_give_every_reason() {
        let window = ProblemSpec::new(1, 2, 64, 64).mask(Mask::window(8, 0));
        let all = plan(&planner("T4"), window.clone()).unwrap_err();
        let one = plan(&planner("T4").stratum(Stratum::V2), window).unwrap_err();
        insta::assert_snapshot!(format!("{all}\n{one}"));
    }

    #[test]
    fn the_newest_that_covers_is_taken() {
        let half = |spec: ProblemSpec| spec.dtype(Dtype::Bf16);
        let spec = || ProblemSpec::new(1, 2, 256, 128);
        assert_eq!(plan(&planner("H200"), half(spec())).unwrap().stratum(), Stratum::V3);
        assert_eq!(plan(&planner("H200"), spec()).unwrap().stratum(), Stratum::V2Kt);
        let forced = plan(&planner("H200").stratum(Stratum::V1), spec()).unwrap();
        assert_eq!((forced.stratum(), forced.passed_over.len()), (Stratum::V1, 0));
        let given = Tiles { block_q: 64, block_kv: 64, threads: 256 };
        let tiled = plan(&planner("H200").tiles(given), half(spec())).unwrap();
        assert_eq!((tiled.stratum(), tiled.tiles(), &tiled.chosen_by), (Stratum::V3, given, &ChosenBy::Caller));
        // Forced on one tile of queries, it is taken all the same.
        let decode = ProblemSpec { seqlen_q: 1, ..spec() };
        assert_eq!(plan(&planner("T4"), decode.clone()).unwrap().stratum(), Stratum::V2);
        assert_eq!(plan(&planner("T4").stratum(Stratum::V2Kt), decode).unwrap().stratum(), Stratum::V2Kt);
    }

    #[test]
    fn heads_that_share_tiles_are_v3s_where_they_fill_the_gpu() {
        let chosen = |text: &str| {
            let problem: Problem = text.parse().unwrap();
            let plan = planner("H200").plan(&problem, &Layout::contiguous(&problem)).unwrap();
            format!("{text}: {}, splits {}", plan.stratum(), plan.kernels.config.split)
        };
        let problems = [
            "64x32/8x1/8192x128 bf16",
            "64x32/8x8/8192x128 bf16",
            "64x32/8x16/8192x128 bf16",
            "16x64/8x8/8192x128 bf16",
            "8x64/8x8/8192x128 bf16",
            "1x64/8x64/8192x128 bf16 causal",
            "16x64/8x64/512x128 bf16 causal",
            "1x32/8x16/8192x128 bf16",
        ];
        insta::assert_snapshot!(problems.map(chosen).join("\n"), @r"
        64x32/8x1/8192x128 bf16: v2_tc, splits false
        64x32/8x8/8192x128 bf16: v3, splits false
        64x32/8x16/8192x128 bf16: v3, splits false
        16x64/8x8/8192x128 bf16: v3, splits false
        8x64/8x8/8192x128 bf16: v3, splits false
        1x64/8x64/8192x128 bf16 causal: v2_tc, splits true
        16x64/8x64/512x128 bf16 causal: v3, splits false
        1x32/8x16/8192x128 bf16: v2_tc, splits true
        ");
    }

    #[test]
    fn zeroed_parts_come_first() {
        let causal = plan(&planner("H200"), ProblemSpec::new(1, 2, 256, 128).dtype(Dtype::F16).causal()).unwrap();
        assert_eq!((causal.workspace_bytes(), causal.zeroed_bytes()), (8, 8));
        let naive = plan(&planner("T4").stratum(Stratum::Naive), ProblemSpec::new(1, 2, 33, 8)).unwrap();
        let parts = naive.workspace_parts();
        assert_eq!((parts[0].name, parts[0].offset, parts[0].bytes), ("scores", 0, 2 * 33 * 64 * 4));
        assert_eq!((parts[1].offset % WORKSPACE_ALIGNMENT, naive.zeroed_bytes()), (0, 0));
        assert_eq!(naive.workspace_bytes(), parts[1].offset + 2 * 33 * 4);
    }
}
