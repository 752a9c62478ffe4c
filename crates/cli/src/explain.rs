//! `strata explain`, and what `import` and `profile` print: what a record says, and what its kernel suffers from.

use clap::Args;
use lab::figures::{bytes, count, list, percent, time};
use lab::import::{self, ProfileRecord};
use lab::{AnyRecord, Finding, Reference, Sources, Thresholds};
use serde::Deserialize;

use crate::arguments::ThresholdArguments;
use crate::prose::{self, Style, paragraph};
use crate::record::HistoryFile;
use crate::{Failure, output};

/// Which record is explained.
#[derive(Debug, Args)]
pub struct ExplainArguments {
    /// A number of the history, `last`, `last~1`, or a record of a --json file: FILE, FILE#NAME or FILE#PLACE.
    pub record: Reference,
    #[command(flatten)]
    pub thresholds: ThresholdArguments,
    #[command(flatten)]
    pub history: HistoryFile,
}

pub fn explain(arguments: &ExplainArguments) -> Result<(), Failure> {
    let thresholds = arguments.thresholds.read()?;
    let record = arguments.record.find(&arguments.history.path().unwrap_or_default())?;
    if arguments.thresholds.thresholds.is_some() && profiled(&record).is_none() {
        eprintln!("note: what the emulator found is kept as it was found: give --thresholds to `dig` or `probe`");
    }
    Ok(output::print(&text(&[record], &thresholds))?)
}

/// A record of a profiler.
fn profiled(record: &AnyRecord) -> Option<ProfileRecord> {
    let source = matches!(record.key.source.as_str(), "ncu" | "nsys" | "torch");
    source.then(|| ProfileRecord::deserialize(&record.json).ok()).flatten()
}

/// What a record's kernel suffers from: by these thresholds where it was profiled, else as it was found.
pub fn findings(record: &AnyRecord, thresholds: &Thresholds) -> Vec<Finding> {
    match profiled(record) {
        Some(profile) => import::findings(&profile, thresholds),
        None => record.findings(),
    }
}

/// Each record in prose.
pub fn text(records: &[AnyRecord], thresholds: &Thresholds) -> String {
    let style = Style { color: output::color() };
    let mut sources = Sources::new();
    let mut out = String::new();
    for record in records {
        sources.of_record(record);
        if !out.is_empty() {
            out.push('\n');
        }
        out += &format!("{}\n", style.heading(&record.key.to_string()));
        paragraph(&mut out, "  ", &about(record));
        let findings = findings(record, thresholds);
        match (findings.is_empty(), record.key.source.as_str()) {
            (true, "nsys" | "torch") => paragraph(&mut out, "  ", import::NO_COUNTERS),
            (true, "events") => paragraph(&mut out, "  ", "A time alone: `strata dig` and `strata profile` say why."),
            _ => prose::findings(&mut out, &findings, style, &mut sources),
        }
    }
    out
}

/// Where the figures are from, and the first of them.
fn about(record: &AnyRecord) -> String {
    let key = &record.key;
    let mut said = vec![format!("Source {}, level {}", key.source, key.level)];
    if !key.tiles.is_empty() {
        said.push(format!("tiles {}", key.tiles));
    }
    if !key.tools.is_empty() {
        said.push(list(key.tools.iter().map(|(name, version)| format!("{name} {version}"))));
    }
    let times = [
        ("modelled", "modelled_time_ms"),
        ("measured", "measured_time_ms"),
        ("under the profiler", "profiled_time_ms"),
    ];
    for (what, name) in times {
        if let Some(value) = record.number(name) {
            said.push(format!("{what} {}", time(value / 1e3)));
        }
    }
    if let Some(samples) = record.number("samples") {
        said.push(format!("{} launches", count(samples as u64)));
    }
    let figures = record.figures();
    let value = |name: &str| figures.get(name).map(|figure| figure.value);
    let moved = value("dram_read").zip(value("dram_written"));
    if let Some((read, written)) = moved {
        said.push(format!("{} read from DRAM, {} written", bytes(read as u64), bytes(written as u64)));
    }
    if let Some((conflicts, all)) = value("shared_load_bank_conflicts").zip(value("shared_load_wavefronts"))
        && all > 0.0
    {
        said.push(format!("bank conflicts {} of the wavefronts of shared loads", percent(conflicts / all)));
    }
    if let Some(pct) = value("theoretical_pct") {
        said.push(format!("occupancy {pct:.1} %"));
    }
    format!("{}.", said.join("; "))
}
