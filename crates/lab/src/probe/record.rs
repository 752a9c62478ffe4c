//! What a probe found, as `--json` writes it.

use std::collections::BTreeMap;

use emulator::{Access, Counters, Level};
use serde::Serialize;

use super::buffers::Comparison;
use super::explain::Explanation;
use super::lines::Line;
use super::{Counted, Hazard, Probed, policy_name};
use crate::findings::Finding;
use crate::record::{LineRecord, OccupancyRecord, PipeRecord, TrafficRecord};

/// Lines of [`ProbeRecord::costs`].
const COSTS: usize = 1000;

/// One kernel that was probed. Counters, bytes and times are those of the whole launch; those of a kernel that met a hazard in its
/// first schedule are `null`.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeRecord {
    /// Its name.
    pub kernel: String,
    /// The PTX file.
    pub file: String,
    /// What the PTX is for: `sm_90a`.
    pub target: String,
    /// The board, as the table names it.
    pub gpu: String,
    /// Its architecture.
    pub sm: String,
    /// The type of the first buffer; `null` when there is none.
    pub dtype: Option<String>,
    /// Grid, block, shared bytes and arguments: what tells one launch from another.
    pub problem: String,
    /// Who counted: `emulator`.
    pub source: String,
    /// Of `counters`: `merged`.
    pub level: String,
    /// Versions of foreign tools that had a part in it, by name: `ptxas`.
    pub tools: BTreeMap<String, String>,
    /// How it was launched.
    pub launch: RunRecord,
    /// The largest `||found - expected|| / ||expected||` of the buffers that were compared.
    pub error: Option<f64>,
    /// Buffers that were compared.
    pub comparisons: Vec<Comparison>,
    /// The first hazard.
    pub hazard: Option<HazardRecord>,
    /// Schedules that were run, as `--policy` takes them.
    pub schedules: Vec<String>,
    /// After the merge.
    pub counters: Option<Counters>,
    /// As the PTX states the accesses.
    pub counters_ptx: Option<Counters>,
    /// As the machine code makes them; `null` without `ptxas` and `nvdisasm`.
    pub counters_sass: Option<Counters>,
    /// What follows from both.
    pub totals: Option<TotalsRecord>,
    /// Theoretical occupancy.
    pub occupancy: Option<OccupancyRecord>,
    /// Bytes between the SMs and memory; what is compulsory is not known, the distinct bytes stand for it.
    pub traffic: Option<TrafficRecord>,
    /// What each pipe needs.
    pub pipes: Vec<PipeRecord>,
    /// The pipe that takes longest.
    pub limiter: Option<String>,
    /// What it takes.
    pub modelled_time_ms: Option<f64>,
    /// By events on a GPU; `null` here.
    pub measured_time_ms: Option<f64>,
    /// Counters per source line.
    pub lines: Vec<LineRecord>,
    /// The costliest source lines, at most 1000, with their cost and text.
    pub costs: Vec<Line>,
    /// What it suffers from.
    pub findings: Vec<Finding>,
    /// The accesses of the line that was asked for.
    pub explanations: Vec<Explanation>,
}

/// How a kernel was launched.
#[derive(Clone, Debug, Serialize)]
pub struct RunRecord {
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y and z.
    pub cluster: [u32; 3],
    /// Shared bytes that the kernel declares.
    pub static_shared_bytes: u64,
    /// Dynamic shared bytes.
    pub dynamic_shared_bytes: u32,
    /// As they were asked for.
    pub arguments: Vec<String>,
    /// Seed of the random numbers.
    pub seed: u64,
    /// CTAs that were run.
    pub ctas_run: Option<u64>,
    /// CTAs of the launch; counters are scaled to them.
    pub ctas: u64,
}

/// Totals that the counters do not have.
#[derive(Clone, Debug, Serialize)]
pub struct TotalsRecord {
    /// Warp instructions of the machine code; `null` without `ptxas` and `nvdisasm`.
    pub warp_instructions_sass: Option<u64>,
    /// Sectors of global memory, loads and stores.
    pub global_sectors: u64,
    /// Sectors that the bytes would fill.
    pub global_sectors_ideal: u64,
}

/// Something the kernel did that it must not.
#[derive(Clone, Debug, Serialize)]
pub struct HazardRecord {
    /// A word for it: `race`.
    pub kind: String,
    /// What happened.
    pub text: String,
    /// The instruction as PTX.
    pub instruction: String,
    /// The source file, when known.
    pub file: Option<String>,
    /// The source line, when known.
    pub line: Option<u32>,
    /// Its text, where the file is there.
    pub source: Option<String>,
    /// The CTA's index in x, y and z.
    pub cta: [u32; 3],
    /// The thread's linear index in the CTA.
    pub thread: u32,
    /// The address, of an access.
    pub address: Option<u64>,
    /// What to do about it.
    pub remedy: String,
    /// The schedule that repeats it, as `--policy` takes it.
    pub policy: String,
}

impl HazardRecord {
    fn of(hazard: &Hazard) -> Self {
        let fault = &hazard.fault;
        Self {
            kind: hazard.kind.into(),
            text: fault.kind.to_string(),
            instruction: fault.instruction.clone(),
            file: fault.place.as_ref().map(|(file, _)| file.clone()),
            line: fault.place.as_ref().map(|&(_, line)| line),
            source: hazard.text.clone(),
            cta: fault.cta,
            thread: fault.thread,
            address: hazard.address,
            remedy: hazard.remedy.clone(),
            policy: hazard.policy.clone(),
        }
    }
}

impl TotalsRecord {
    fn of(counted: &Counted) -> Self {
        let (mut global_sectors, mut global_sectors_ideal) = (0, 0);
        for (instruction, counted) in counted.launch().instructions() {
            if Access::of(instruction).is_some_and(Access::is_global) {
                global_sectors += counted.sectors;
                global_sectors_ideal += counted.sectors_ideal;
            }
        }
        let warp_instructions_sass = counted.sass.as_ref().ok().map(|sass| sass.warp_instructions);
        Self { warp_instructions_sass, global_sectors, global_sectors_ideal }
    }
}

impl Probed {
    /// The record of it.
    pub fn record(&self) -> ProbeRecord {
        let about = &self.about;
        let counted = self.counted.as_ref();
        let launch = counted.map(|counted| counted.launch());
        let dims = |[x, y, z]: [u32; 3]| format!("{x}x{y}x{z}");
        let buffer = about.arguments.iter().find_map(|argument| argument.strip_prefix("buf:")?.split(':').next());
        let lines = counted.map(|counted| LineRecord::all(&counted.evidence));
        ProbeRecord {
            kernel: about.kernel.clone(),
            file: about.file.display().to_string(),
            target: about.target.clone(),
            gpu: about.gpu.name.into(),
            sm: about.gpu.sm.to_string(),
            dtype: buffer.map(str::to_owned),
            problem: format!(
                "grid {} block {} shared {} args {}",
                dims(about.grid),
                dims(about.block),
                about.dynamic_shared,
                about.arguments.join(" ")
            ),
            source: "emulator".into(),
            level: Level::Merged.name().into(),
            tools: counted.map_or_else(BTreeMap::new, |counted| counted.evidence.tools()),
            launch: RunRecord {
                grid: about.grid,
                block: about.block,
                cluster: about.cluster,
                static_shared_bytes: about.static_shared,
                dynamic_shared_bytes: about.dynamic_shared,
                arguments: about.arguments.clone(),
                seed: about.seed,
                ctas_run: launch.map(|launch| launch.report.ctas_run),
                ctas: about.grid.iter().map(|&n| u64::from(n)).product(),
            },
            error: self.comparisons.iter().filter_map(|one| one.relative_error).reduce(f64::max),
            comparisons: self.comparisons.clone(),
            hazard: self.hazard.as_ref().map(HazardRecord::of),
            schedules: self.schedules.iter().map(|&policy| policy_name(policy)).collect(),
            counters: launch.map(|launch| launch.counters(Level::Merged)),
            counters_ptx: launch.map(|launch| launch.counters(Level::Ptx)),
            counters_sass: counted.and_then(|counted| counted.sass.as_ref().ok().copied()),
            totals: counted.map(TotalsRecord::of),
            occupancy: launch.map(OccupancyRecord::of),
            traffic: counted.map(|counted| TrafficRecord::of(&counted.evidence)),
            pipes: counted.map_or_else(Vec::new, |counted| PipeRecord::all(&counted.evidence)),
            limiter: launch.map(|launch| launch.model.limiter.name().into()),
            modelled_time_ms: launch.map(|launch| 1e3 * launch.model.seconds),
            measured_time_ms: None,
            lines: lines.unwrap_or_default(),
            costs: counted.map_or_else(Vec::new, |counted| counted.lines.iter().take(COSTS).cloned().collect()),
            findings: counted.map_or_else(Vec::new, |counted| counted.findings.clone()),
            explanations: counted.map_or_else(Vec::new, |counted| counted.explanations.clone()),
        }
    }
}
