//! The interchange format of `--json`: `{"schema": 1, "records": [...]}`.

use std::collections::BTreeMap;
use std::fmt;

use arch::Limiter;
use emulator::{Counters, Level, Pipe};
use kernels::Problem;
use serde::{Deserialize, Serialize};

use crate::evidence::{Evidence, LaunchEvidence, Place};
use crate::findings::Finding;
use crate::probe::Explanation;
use crate::registers::RegisterSource;

/// The version of the format that this program writes.
pub const SCHEMA: u32 = 1;

/// What a `--json` file holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document<R = Record> {
    /// [`SCHEMA`].
    pub schema: u32,
    /// One per stratum or kernel.
    pub records: Vec<R>,
}

impl<R> Document<R> {
    /// A document of the current schema.
    pub fn new(records: Vec<R>) -> Self {
        Self { schema: SCHEMA, records }
    }
}

/// What is known of one stratum on one problem and GPU. Counters, bytes and times are those of the whole problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its name.
    pub stratum: String,
    /// The board, as the table names it.
    pub gpu: String,
    /// Its architecture: `sm_75`.
    pub sm: String,
    /// Of q, k, v and out.
    pub dtype: String,
    /// As `--problem` takes it.
    pub problem: String,
    /// Who counted: `emulator`.
    pub source: String,
    /// Of `counters`: `merged`, after the merge of accesses that the assembler performs (modelled).
    pub level: String,
    /// Versions of foreign tools that had a part in it, by name: `ptxas`, `driver`.
    #[serde(default)]
    pub tools: BTreeMap<String, String>,
    /// Its tiles.
    pub tiles: TileRecord,
    /// Of the inputs; `null` when they are the user's.
    pub seed: Option<u64>,
    /// What was executed.
    pub sample: Sampling,
    /// `||out - ref|| / ||ref||` over the executed heads; `null` where the reference is zero or nothing was executed.
    pub error: Option<f64>,
    /// The largest `|lse - lse_ref|`.
    pub lse_error: Option<f64>,
    /// Whether the result is within the contract's tolerance.
    pub correct: bool,
    /// After the merge.
    pub counters: Counters,
    /// As the PTX states the accesses.
    pub counters_ptx: Counters,
    /// Of the launch that takes longest; `null` when nothing is launched.
    pub occupancy: Option<OccupancyRecord>,
    /// Bytes between the SMs and memory.
    pub traffic: TrafficRecord,
    /// What each pipe needs, over all launches.
    pub pipes: Vec<PipeRecord>,
    /// The limiter of the launch that takes longest; `null` when nothing is launched.
    pub limiter: Option<String>,
    /// The sum over launches of what the limiter of each needs.
    pub modelled_time_ms: f64,
    /// By events on a GPU, the median of all launches together; `null` where none was asked.
    pub measured_time_ms: Option<f64>,
    /// Floating-point operations, as the field counts them, in that time: in units of 10^12 a second.
    #[serde(default)]
    pub measured_tflops: Option<f64>,
    /// The GPU that was asked, as its driver names it.
    #[serde(default)]
    pub measured_on: Option<String>,
    /// Each launch by itself, in order.
    pub launches: Vec<LaunchRecord>,
    /// Per source line.
    pub lines: Vec<LineRecord>,
    /// What it suffers from.
    pub findings: Vec<Finding>,
    /// The accesses of the line that causes most bank conflicts, lane by lane.
    #[serde(default)]
    pub explanations: Vec<Explanation>,
}

/// Tile sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileRecord {
    /// Queries.
    pub block_q: u32,
    /// Keys.
    pub block_kv: u32,
    /// Threads of a CTA.
    pub threads: u32,
}

impl fmt::Display for TileRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{} of {} threads", self.block_q, self.block_kv, self.threads)
    }
}

/// How much of a problem was executed; counters are scaled from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// `(batch entry, query head)` pairs executed.
    pub heads: u64,
    /// Those of the problem.
    pub of: u64,
    /// Whether scaling from the sample is exact: heads do equal work, and rows of tensors begin on sector borders.
    pub exact: bool,
}

impl fmt::Display for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} heads", self.heads, self.of)
    }
}

/// Theoretical occupancy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OccupancyRecord {
    /// Resident warps as a percentage of the warp slots.
    pub theoretical_pct: f64,
    /// Resident CTAs of one multiprocessor.
    pub blocks_per_sm: u32,
    /// CTAs by each resource alone.
    pub limit_blocks: LimitBlocks,
    /// Every resource tied for the smallest limit.
    pub limiters: Vec<String>,
    /// Threads of a CTA.
    pub threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Where that number comes from.
    pub register_source: RegisterSource,
    /// Bytes of stores to local memory because registers do not suffice; 0 when they are estimated.
    pub spilled_bytes: u32,
    /// Shared bytes of a CTA, static and dynamic.
    pub shared_bytes: u32,
    /// The carve-out that the shared limit holds for, KiB.
    pub carveout_kib: u32,
}

/// CTAs by each resource alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitBlocks {
    /// By the register file.
    pub registers: u32,
    /// By shared memory; `null` when a CTA takes none.
    pub shared: Option<u32>,
    /// By warp slots.
    pub warps: u32,
    /// By block slots.
    pub blocks: u32,
}

/// Bytes, each way: `unique <= dram <= requested`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrafficRecord {
    /// What a call must read at least.
    pub compulsory_read: u64,
    /// What it must write at least.
    pub compulsory_written: u64,
    /// Distinct bytes read, each launch anew.
    pub unique_read: u64,
    /// Distinct bytes written, each launch anew.
    pub unique_written: u64,
    /// Read from DRAM (level `model`).
    pub dram_read_modelled: u64,
    /// Written to DRAM (level `model`).
    pub dram_written_modelled: u64,
    /// Asked for by loads.
    pub requested_read: u64,
    /// Asked for by stores.
    pub requested_written: u64,
}

/// What a pipe needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipeRecord {
    /// Its name.
    pub pipe: String,
    /// The tail included.
    pub time_ms: f64,
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// The kernel's name.
    pub kernel: String,
    /// CTAs of the launch.
    pub ctas: u64,
    /// CTAs divided by those resident at once.
    pub waves: f64,
    /// `ceil(ctas / SMs) * SMs / ctas`.
    pub tail: f64,
    /// After the merge.
    pub counters: Counters,
    /// Theoretical occupancy.
    pub occupancy: OccupancyRecord,
    /// The pipe that takes longest.
    pub limiter: String,
    /// What it takes.
    pub modelled_time_ms: f64,
    /// Read from DRAM.
    pub dram_read_modelled: u64,
    /// Written to DRAM.
    pub dram_written_modelled: u64,
}

/// What one source line caused, after the merge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LineRecord {
    /// As the kernel names it; empty when unknown.
    pub file: String,
    /// Counted from 1; 0 when unknown.
    pub line: u32,
    /// Where a profile's line is unknown, the machine instruction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruction: Option<String>,
    /// Its counters.
    #[serde(flatten)]
    pub counters: Counters,
}

impl LineRecord {
    /// The lines of what the emulator counted.
    pub(crate) fn all(evidence: &Evidence) -> Vec<Self> {
        let lines = evidence.by_line(Level::Merged).into_iter();
        let line = |(place, counters): (Place, Counters)| Self {
            file: place.file,
            line: place.line,
            instruction: None,
            counters,
        };
        lines.map(line).collect()
    }
}

/// How a result compares with the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Accuracy {
    /// `||out - ref|| / ||ref||`; `None` where the reference is zero.
    pub error: Option<f64>,
    /// The largest `|lse - lse_ref|`.
    pub lse_error: Option<f64>,
    /// Whether it is within the contract's tolerance.
    pub correct: bool,
}

impl Record {
    /// The record of what the emulator counted.
    pub fn of_emulator(
        evidence: &Evidence,
        problem: &Problem,
        tiles: TileRecord,
        seed: Option<u64>,
        sample: Sampling,
        accuracy: Accuracy,
        findings: Vec<Finding>,
    ) -> Self {
        let main = evidence.main_launch();
        Self {
            stratum: evidence.stratum.clone(),
            gpu: evidence.gpu.name.into(),
            sm: evidence.gpu.sm.to_string(),
            dtype: problem.dtype.to_string(),
            problem: problem.to_string(),
            source: "emulator".into(),
            level: Level::Merged.name().into(),
            tools: evidence.tools(),
            tiles,
            seed,
            sample,
            error: accuracy.error,
            lse_error: accuracy.lse_error,
            correct: accuracy.correct,
            counters: evidence.counters(Level::Merged),
            counters_ptx: evidence.counters(Level::Ptx),
            occupancy: main.map(OccupancyRecord::of),
            traffic: TrafficRecord::of(evidence),
            pipes: PipeRecord::all(evidence),
            limiter: main.map(|launch| launch.model.limiter.name().into()),
            modelled_time_ms: 1e3 * evidence.seconds(),
            measured_time_ms: None,
            measured_tflops: None,
            measured_on: None,
            launches: evidence.launches.iter().map(LaunchRecord::of).collect(),
            lines: LineRecord::all(evidence),
            findings,
            explanations: Vec::new(),
        }
    }
}

impl TrafficRecord {
    /// The bytes of all launches.
    pub fn of(evidence: &Evidence) -> Self {
        let (traffic, dram, compulsory) = (evidence.traffic(), evidence.dram(), evidence.compulsory());
        Self {
            compulsory_read: compulsory.read,
            compulsory_written: compulsory.written,
            unique_read: traffic.unique_read,
            unique_written: traffic.unique_written,
            dram_read_modelled: dram.read,
            dram_written_modelled: dram.written,
            requested_read: traffic.requested_read,
            requested_written: traffic.requested_written,
        }
    }
}

impl PipeRecord {
    /// Each pipe whose rate is known, over all launches.
    pub fn all(evidence: &Evidence) -> Vec<Self> {
        let record = |&pipe: &Pipe| Some(Self { pipe: pipe.name().into(), time_ms: 1e3 * evidence.seconds_of(pipe)? });
        Pipe::ALL.iter().filter_map(record).collect()
    }
}

impl LaunchRecord {
    fn of(launch: &LaunchEvidence) -> Self {
        Self {
            kernel: launch.kernel.name.clone(),
            ctas: launch.report.ctas_total,
            waves: launch.model.waves,
            tail: launch.model.tail,
            counters: launch.counters(Level::Merged),
            occupancy: OccupancyRecord::of(launch),
            limiter: launch.model.limiter.name().into(),
            modelled_time_ms: 1e3 * launch.model.seconds,
            dram_read_modelled: launch.model.dram.read,
            dram_written_modelled: launch.model.dram.written,
        }
    }
}

impl OccupancyRecord {
    /// The occupancy of a launch.
    pub fn of(launch: &LaunchEvidence) -> Self {
        let occupancy = &launch.occupancy;
        let name = |limiter: &Limiter| match limiter {
            Limiter::Warps => "warps",
            Limiter::Registers => "registers",
            Limiter::Shared => "shared",
            Limiter::Blocks => "blocks",
        };
        Self {
            theoretical_pct: occupancy.theoretical_pct,
            blocks_per_sm: occupancy.blocks_per_sm,
            limit_blocks: LimitBlocks {
                registers: occupancy.limits.registers,
                shared: occupancy.limits.shared,
                warps: occupancy.limits.warps,
                blocks: occupancy.limits.blocks,
            },
            limiters: occupancy.limiters.iter().map(|limiter| name(limiter).into()).collect(),
            threads: launch.threads,
            registers: launch.registers.count,
            register_source: launch.registers.source,
            spilled_bytes: launch.registers.spilled_bytes,
            shared_bytes: launch.shared_bytes,
            carveout_kib: occupancy.carveout_kib,
        }
    }
}
