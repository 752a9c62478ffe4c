//! Profiles made elsewhere, as records: Nsight Compute's report files and raw CSV, Nsight Systems' SQLite export, torch.profiler's
//! Chrome trace, and documents of `--json`.
//!
//! What a profile does not hold stays unknown: no zero is made up. A duration under Nsight Compute is not a time
//! ([`ProfileRecord::profiled_time_ms`]): clocks and caches are not as they are without it.

mod chrome_trace;
mod findings;
mod line_table;
mod lines;
mod metrics;
mod ncu_csv;
mod ncu_report;
mod nsys;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use arch::{Gpu, Sm};
use kernels::Problem;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

pub use findings::{NO_COUNTERS, findings};
pub use lines::ProfiledLine;
pub use metrics::metrics;

use crate::findings::Finding;
use crate::key::{AnyRecord, NoRecord};
use crate::reference::{self, ReferenceError};
use crate::thresholds::Thresholds;

/// A larger file is refused.
const MOST_BYTES: u64 = 4 << 30;

/// A file that holds no profile that can be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum ImportError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} has {bytes} bytes; {MOST_BYTES} are allowed", path.display())]
    TooLong { path: PathBuf, bytes: u64 },
    #[error("{} is no Nsight Compute report or raw CSV, no Nsight Systems SQLite export, no Chrome trace and no document of --json", path.display())]
    Unknown { path: PathBuf },
    #[error("{} is {format} that cannot be read: {reason}", path.display())]
    Broken { path: PathBuf, format: &'static str, reason: String },
    #[error("{} is {format} without a kernel", path.display())]
    Empty { path: PathBuf, format: &'static str },
    #[error(transparent)]
    Document(#[from] ReferenceError),
    #[error(transparent)]
    Record(#[from] NoRecord),
}

/// What is known beside the file.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The problem that the kernels compute: compulsory bytes and the type follow from it.
    pub problem: Option<Problem>,
    /// The storage type, where no problem is known.
    pub dtype: Option<kernels::Dtype>,
    /// Versions of foreign tools that the file does not have.
    pub tools: BTreeMap<String, String>,
    /// Only kernels whose name has this text.
    pub kernel: Option<String>,
    /// Where findings begin.
    pub thresholds: Thresholds,
}

/// One kernel of a profile: a launch under Nsight Compute, or all launches alike on a timeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileRecord {
    /// Its name.
    pub kernel: String,
    /// The file.
    pub file: String,
    /// The board.
    pub gpu: String,
    /// Its architecture; `unknown` where the file does not say.
    pub sm: String,
    /// The storage type, where it was given.
    pub dtype: Option<String>,
    /// As it was given, else grid and block.
    pub problem: String,
    /// Who counted or timed: `ncu`, `nsys` or `torch`.
    pub source: String,
    /// `hardware`.
    pub level: String,
    /// Versions of foreign tools, where they are known.
    pub tools: BTreeMap<String, String>,
    /// CTAs in x, y and z.
    pub grid: [u64; 3],
    /// Threads of a CTA in x, y and z.
    pub block: [u64; 3],
    /// Counters under the names that the emulator's have; those that were not read are missing.
    pub counters: BTreeMap<String, f64>,
    /// Bytes to and from DRAM, where they were read.
    pub traffic: BTreeMap<String, f64>,
    /// What must be moved at least, of a problem that was given.
    pub compulsory_bytes: Option<u64>,
    /// Occupancy, as far as it was read.
    pub occupancy: ProfiledOccupancy,
    /// Share of the time between two instructions of a warp that it waited, by reason.
    pub stalls: BTreeMap<String, f64>,
    /// What the kernel took under the profiler; not a time to compare.
    pub profiled_time_ms: Option<f64>,
    /// The median of the launches on a timeline.
    pub measured_time_ms: Option<f64>,
    /// Launches that is of.
    pub samples: Option<u64>,
    /// What each source line did, where the file has counters by instruction.
    #[serde(default)]
    pub lines: Vec<ProfiledLine>,
    /// Every metric that the file has of the launch.
    pub metrics: BTreeMap<String, Value>,
    /// What it suffers from.
    pub findings: Vec<Finding>,
}

/// Occupancy of a profiled kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfiledOccupancy {
    /// Resident warps as a percentage of the warp slots, by resources.
    pub theoretical_pct: Option<f64>,
    /// The same as it was on average.
    pub achieved_pct: Option<f64>,
    /// CTAs by each resource alone: `registers`, `shared`, `warps`, `blocks`.
    pub limit_blocks: BTreeMap<String, f64>,
    /// Every resource tied for the smallest limit.
    pub limiters: Vec<String>,
    /// Registers of a thread.
    pub registers: Option<f64>,
    /// Shared bytes of a CTA.
    pub shared_bytes: Option<f64>,
}

impl ProfileRecord {
    /// The architecture, where the table has it.
    pub fn architecture(&self) -> Option<Sm> {
        self.sm.parse().ok()
    }

    /// A metric that is a number.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.get(name)?.as_f64()
    }
}

/// What a reader found of a kernel, before anything follows from it.
#[derive(Clone, Debug, Default)]
struct Raw {
    kernel: String,
    gpu: Option<String>,
    capability: Option<(u32, u32)>,
    grid: [u64; 3],
    block: [u64; 3],
    metrics: BTreeMap<String, Value>,
    lines: Vec<ProfiledLine>,
    measured_time_ms: Option<f64>,
    samples: Option<u64>,
}

/// Reads a profile of any known format.
///
/// # Errors
/// When the file is none, is damaged, or has no kernel.
pub fn import(path: &Path, options: &ImportOptions) -> Result<Vec<AnyRecord>, ImportError> {
    let io = |source| ImportError::Io { path: path.into(), source };
    let metadata = fs::metadata(path).map_err(io)?;
    if metadata.len() > MOST_BYTES {
        return Err(ImportError::TooLong { path: path.into(), bytes: metadata.len() });
    }
    let bytes = fs::read(path).map_err(io)?;
    let (format, source, raw) = match bytes.as_slice() {
        [b'N', b'V', b'R', 0, ..] => ("an Nsight Compute report", "ncu", ncu_report::read(&bytes)),
        bytes if bytes.starts_with(b"SQLite format 3\0") => ("an Nsight Systems export", "nsys", nsys::read(path)),
        bytes => {
            let text = std::str::from_utf8(bytes).map_err(|_| ImportError::Unknown { path: path.into() })?;
            match text.trim_start().chars().next() {
                Some('{' | '[') if is_document(text) => return Ok(reference::document(path, text)?.records),
                Some('{' | '[') => ("a Chrome trace", "torch", chrome_trace::read(text)),
                Some(_) if ncu_csv::is_raw_page(text) => ("Nsight Compute's raw CSV", "ncu", ncu_csv::read(text)),
                _ => return Err(ImportError::Unknown { path: path.into() }),
            }
        }
    };
    let raw = raw.map_err(|reason| ImportError::Broken { path: path.into(), format, reason })?;
    let wanted = |raw: &Raw| options.kernel.as_ref().is_none_or(|name| raw.kernel.contains(name.as_str()));
    let records: Vec<ProfileRecord> =
        raw.into_iter().filter(wanted).map(|raw| record(raw, source, path, options)).collect();
    if records.is_empty() {
        return Err(ImportError::Empty { path: path.into(), format });
    }
    Ok(records.iter().map(AnyRecord::of).collect::<Result<_, _>>()?)
}

/// Whether a text is a document of `--json`.
fn is_document(text: &str) -> bool {
    #[derive(Deserialize)]
    struct Marked {
        #[serde(rename = "schema")]
        _schema: u32,
        #[serde(rename = "records")]
        _records: serde::de::IgnoredAny,
    }
    serde_json::from_str::<Marked>(text).is_ok()
}

/// What follows from what was read.
fn record(raw: Raw, source: &str, path: &Path, options: &ImportOptions) -> ProfileRecord {
    let dims = |[x, y, z]: [u64; 3]| format!("{x}x{y}x{z}");
    let problem = options.problem.as_ref();
    let sm = raw.capability.map_or_else(|| "unknown".into(), |(major, minor)| format!("sm_{major}{minor}"));
    let board = raw.gpu.unwrap_or_else(|| "unknown".into());
    let mut record = ProfileRecord {
        kernel: raw.kernel,
        file: path.display().to_string(),
        gpu: Gpu::find(&board).map_or(board, |gpu| gpu.name.into()),
        sm,
        dtype: options.dtype.or(problem.map(|problem| problem.dtype)).map(|dtype| dtype.to_string()),
        problem: problem
            .map_or_else(|| format!("grid {} block {}", dims(raw.grid), dims(raw.block)), ToString::to_string),
        source: source.into(),
        level: "hardware".into(),
        tools: options.tools.clone(),
        grid: raw.grid,
        block: raw.block,
        compulsory_bytes: problem.map(|problem| {
            let bytes = problem.compulsory_bytes();
            u64::try_from(bytes.read + bytes.write).unwrap_or(u64::MAX)
        }),
        measured_time_ms: raw.measured_time_ms,
        samples: raw.samples,
        lines: raw.lines,
        metrics: raw.metrics,
        ..ProfileRecord::default()
    };
    metrics::fill(&mut record);
    record.findings = findings(&record, &options.thresholds);
    record
}

#[cfg(test)]
mod line_tests;
#[cfg(test)]
pub(crate) mod tests;
