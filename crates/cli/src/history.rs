//! `strata history` and `strata compare`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use lab::figures::{list, percent, time};
use lab::history::{Entry, Filter};
use lab::{AnyRecord, Compared, Document, History, Reference, compare};

use crate::record::HistoryFile;
use crate::{Failure, output, prose};

/// What is listed.
#[derive(Debug, Args)]
pub struct HistoryArguments {
    /// Only this stratum or kernel.
    #[arg(long, alias = "kernel", value_name = "NAME")]
    pub stratum: Option<String>,
    /// Only problems with this text, such as 10x64x1024x64.
    #[arg(long, value_name = "TEXT")]
    pub problem: Option<String>,
    /// Only this GPU.
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Only this source: emulator, events, ncu, nsys or torch.
    #[arg(long, value_name = "NAME")]
    pub source: Option<String>,
    /// Only this revision, or what begins like it.
    #[arg(long, value_name = "COMMIT")]
    pub revision: Option<String>,
    /// The latest N.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    pub latest: u32,
    /// Write the records to FILE as JSON; `-` writes them to standard output in place of the list.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub history: HistoryFile,
}

/// Lists what was recorded, the latest last.
pub fn history(arguments: &HistoryArguments) -> Result<(), Failure> {
    let history = History::read(&arguments.history.path()?)?;
    let filter = Filter {
        subject: arguments.stratum.clone(),
        problem: arguments.problem.clone(),
        gpu: arguments.gpu.clone(),
        source: arguments.source.clone(),
        revision: arguments.revision.clone(),
        latest: Some(arguments.latest),
    };
    let entries = history.entries(&filter)?;
    if let Some(path) = &arguments.json {
        let records = entries.iter().map(|entry| history.record(entry.id));
        let records: Vec<AnyRecord> = records.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        output::write(path, &(serde_json::to_string_pretty(&Document::new(records))? + "\n"))?;
        if output::is_stdout(path) {
            return Ok(());
        }
    }
    if entries.is_empty() {
        return Ok(output::print("No record.\n")?);
    }
    Ok(output::print(&(table(&entries) + "\n"))?)
}

fn table(entries: &[Entry]) -> String {
    let header = ["#", "made", "revision", "what", "problem", "GPU", "source", "modelled", "measured", "findings"];
    let mut table = prose::table(header);
    let milliseconds = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| time(value / 1e3));
    for entry in entries {
        table.add_row([
            entry.id.to_string(),
            entry.made.clone(),
            entry.provenance.revision.clone().unwrap_or_else(|| "-".into()),
            prose::clip(&entry.key.subject, 16),
            prose::clip(&entry.key.problem, 24),
            entry.key.gpu.clone(),
            entry.key.source.clone(),
            milliseconds(entry.modelled_ms),
            milliseconds(entry.measured_ms),
            entry.findings.len().to_string(),
        ]);
    }
    table.set_width(140);
    prose::set(table, 7..10)
}

/// Which records are compared.
#[derive(Debug, Args)]
pub struct CompareArguments {
    /// A number of the history, `last`, `last~1`, or a record of a --json file: FILE, FILE#NAME or FILE#PLACE.
    pub before: Reference,
    /// The other.
    pub after: Reference,
    /// Also show figures that are equal.
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub history: HistoryFile,
}

/// Puts two records of one key side by side.
pub fn compare_records(arguments: &CompareArguments) -> Result<(), Failure> {
    // Only numbers need a history.
    let history = arguments.history.path().unwrap_or_default();
    let find = |reference: &Reference| reference.find(&history).with_context(|| format!("record {reference}"));
    let (before, after) = (find(&arguments.before)?, find(&arguments.after)?);
    let compared = compare(&before, &after).map_err(|error| Failure::CannotSay(error.into()))?;
    let mut text = format!("{}: {} -> {}\n", before.key, arguments.before, arguments.after);
    let changed: Vec<&Compared> = compared.iter().filter(|one| arguments.all || one.change() != Some(0.0)).collect();
    if changed.is_empty() {
        text += "Every figure is equal.\n";
    } else {
        text += &format!("{}\n", figures(&changed));
        let equal = compared.len() - changed.len();
        if equal > 0 {
            text += &format!("{equal} other figures are equal (--all shows them).\n");
        }
    }
    let (gone, new) = lab::compare::moved_findings(&before.findings(), &after.findings());
    for (how, ids) in [("Gone", gone), ("New", new)] {
        if !ids.is_empty() {
            text += &format!("{how}: {}.\n", list(ids));
        }
    }
    Ok(output::print(&text)?)
}

fn figures(compared: &[&Compared]) -> String {
    let mut table = prose::table(["figure", "before", "after", "change"]);
    for one in compared {
        let value = |figure: Option<lab::key::Figure>| figure.map_or_else(|| "-".into(), |figure| number(figure.value));
        let change = match one.change() {
            Some(change) => format!("{}{}", if change > 0.0 { "+" } else { "" }, percent(change)),
            None => "-".into(),
        };
        table.add_row([one.name.clone(), value(one.before), value(one.after), change]);
    }
    prose::set(table, 1..4)
}

/// A whole number in full, another with as many figures as say something.
pub fn number(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        let digits = lab::figures::count(value.abs() as u64);
        if value < 0.0 { format!("-{digits}") } else { digits }
    } else {
        format!("{value:.4}")
    }
}
