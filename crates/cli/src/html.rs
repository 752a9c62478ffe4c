//! `strata report`: one HTML file that needs nothing else.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::anyhow;
use arch::Gpu;
use clap::Args;
use kernels::Problem;
use lab::figures::{count, list, percent, time};
use lab::findings::operand_of;
use lab::history::{Entry, Filter};
use lab::probe::Explanation;
use lab::record::LineRecord;
use lab::{AnyRecord, Finding, History, Place, Provenance, Reference, Severity, Sources, Thresholds, reference};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::Deserialize;
use serde_json::Value;

use crate::arguments::ThresholdArguments;
use crate::chart::{Point, Row, Scale, bars, lanes_to_banks, roofline};
use crate::record::HistoryFile;
use crate::{Failure, explain, output};

/// Records that are shown in full; of a history, the latest of as many keys.
const SHOWN: usize = 24;
/// Records that are listed.
const LISTED: usize = 200;
/// Lines of source that are shown of a record.
const LINES: usize = 8;

/// What is reported.
#[derive(Debug, Args)]
pub struct ReportArguments {
    /// --json files, or records as FILE#NAME, numbers of the history, `last`; by default the latest of each key in the history.
    pub records: Vec<Reference>,
    /// Where the report goes; `-` is standard output.
    #[arg(long, short, value_name = "FILE.html", default_value = "report.html")]
    pub output: PathBuf,
    /// Its title.
    #[arg(long, value_name = "TEXT", default_value = "strata report")]
    pub title: String,
    #[command(flatten)]
    pub thresholds: ThresholdArguments,
    #[command(flatten)]
    pub history: HistoryFile,
}

/// A record, and where it comes from, if that is known.
struct Shown {
    record: AnyRecord,
    entry: Option<Entry>,
    findings: Vec<Finding>,
}

pub fn report(arguments: &ReportArguments) -> Result<(), Failure> {
    output::check(Some(&arguments.output))?;
    let thresholds = arguments.thresholds.read()?;
    let (shown, all) = records(arguments, &thresholds)?;
    if shown.is_empty() {
        return Err(anyhow!("there is no record to report").into());
    }
    output::write(&arguments.output, &(page(&arguments.title, &shown, &all).into_string() + "\n"))?;
    if !output::is_stdout(&arguments.output) {
        eprintln!("wrote {}", arguments.output.display());
    }
    Ok(())
}

fn records(arguments: &ReportArguments, thresholds: &Thresholds) -> anyhow::Result<(Vec<Shown>, Vec<Entry>)> {
    let shown = |record: AnyRecord, entry: Option<Entry>| Shown {
        findings: explain::findings(&record, thresholds),
        record,
        entry,
    };
    let path = arguments.history.path().unwrap_or_default();
    if arguments.records.is_empty() {
        let history = History::read(&path)?;
        let entries = history.entries(&Filter::default())?;
        let mut keys = BTreeSet::new();
        let latest = entries.iter().rev().filter(|entry| keys.insert(&entry.key)).take(SHOWN);
        let mut found = Vec::new();
        for entry in latest.collect::<Vec<_>>().into_iter().rev() {
            found.extend(history.record(entry.id)?.map(|record| shown(record, Some(entry.clone()))));
        }
        return Ok((found, entries));
    }
    let mut found = Vec::new();
    for named in &arguments.records {
        match named {
            Reference::File { path, which: None } => {
                found.extend(reference::read(path)?.records.into_iter().map(|record| shown(record, None)));
            }
            _ => found.push(shown(named.find(&path)?, None)),
        }
    }
    Ok((found, Vec::new()))
}

fn page(title: &str, shown: &[Shown], entries: &[Entry]) -> Markup {
    let provenance = Provenance::now();
    let (full, rest) = shown.split_at(shown.len().min(SHOWN));
    let names = labels(full);
    let mut sources = Sources::new();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (title) }
                    p { (subject(shown)) }
                }
                main {
                    section {
                        h2 { "Side by side" }
                        (table(full, &names))
                        div.charts { (times(full, &names)) (traffic(full, &names)) (roof(full, &names)) }
                        p.how {
                            "Modelled: what the busiest pipe of the GPU needs, a lower bound that knows no latency. Requested: what loads and \
                             stores ask for; unique: the distinct bytes among them; compulsory: what any implementation must move. \
                             Records of different problems, types or GPUs stand side by side to be seen, not to be divided."
                        }
                    }
                    @for (index, (one, name)) in full.iter().zip(&names).enumerate() { (details(one, index, name, &mut sources)) }
                    @if !rest.is_empty() { p { (rest.len()) " more records are not shown." } }
                    @if !entries.is_empty() { (listed(entries, full.len())) }
                }
                footer {
                    p {
                        "Made by " (provenance.program)
                        @if let Some(revision) = &provenance.revision { " at revision " code { (revision) } }
                        " with " code { (provenance.command) } "."
                    }
                }
            }
        }
    }
}

/// What all records share.
fn subject(shown: &[Shown]) -> String {
    let distinct = |of: fn(&AnyRecord) -> String| -> Vec<String> {
        let values: BTreeSet<String> = shown.iter().map(|one| of(&one.record)).collect();
        values.into_iter().collect()
    };
    let told = |what: &str, values: Vec<String>| match values.as_slice() {
        [one] => format!("{what} {one}"),
        many if many.len() <= 4 => format!("{what}s {}", list(many)),
        many => format!("{} {what}s", many.len()),
    };
    let parts = [
        told("problem", distinct(|record| record.key.problem.clone())),
        told("type", distinct(|record| record.key.dtype.clone())),
        told("GPU", distinct(|record| format!("{} ({})", record.key.gpu, record.key.sm))),
        told("source", distinct(|record| record.key.source.clone())),
    ];
    format!("{}.", parts.join("; "))
}

/// Names of records that tell them apart: what they are of, with what differs where two are alike.
fn labels(shown: &[Shown]) -> Vec<String> {
    let name = |one: &Shown| one.record.key.subject.clone();
    let numbered = shown.iter().enumerate().map(|(index, one)| {
        let alike = shown.iter().filter(|other| name(other) == name(one)).count();
        if alike == 1 { name(one) } else { format!("{}: {}", index + 1, name(one)) }
    });
    numbered.collect()
}

fn number(record: &AnyRecord, path: [&str; 2]) -> Option<f64> {
    record.json.get(path[0])?.get(path[1])?.as_f64()
}

fn milliseconds(record: &AnyRecord, name: &str) -> String {
    record.number(name).map_or_else(|| "–".into(), |value| time(value / 1e3))
}

/// The share of the wavefronts of shared loads that are conflicts.
fn conflicts(record: &AnyRecord) -> Option<f64> {
    let all = number(record, ["counters", "shared_load_wavefronts"]).filter(|all| *all > 0.0)?;
    Some(number(record, ["counters", "shared_load_bank_conflicts"])? / all)
}

fn table(shown: &[Shown], names: &[String]) -> Markup {
    let dash = || "–".to_string();
    html! {
        div.wide {
            table.side {
                thead { tr {
                    th { "record" } th { "problem" } th { "GPU" } th { "source" } th.n { "modelled" } th.n { "measured" } th.n { "conflicts" }
                    th.n { "occupancy" } th { "limiter" } th { "findings" }
                } }
                tbody {
                    @for (index, (one, name)) in shown.iter().zip(names).enumerate() {
                        @let record = &one.record;
                        tr {
                            td { a href={ "#r" (index) } { (name) } }
                            td { (record.key.problem) }
                            td { (record.key.gpu) }
                            td { (record.key.source) }
                            td.n { (milliseconds(record, "modelled_time_ms")) }
                            td.n { (milliseconds(record, "measured_time_ms")) }
                            td.n { (conflicts(record).map_or_else(dash, percent)) }
                            td.n { (number(record, ["occupancy", "theoretical_pct"]).map_or_else(dash, |pct| format!("{pct:.1} %"))) }
                            td { (record.json.get("limiter").and_then(Value::as_str).unwrap_or("–")) }
                            td { (one.findings.iter().map(|finding| finding.id.as_str()).collect::<Vec<_>>().join(", ")) }
                        }
                    }
                }
            }
        }
    }
}

fn times(shown: &[Shown], names: &[String]) -> Markup {
    let all = [
        ("modelled", "modelled_time_ms"),
        ("measured", "measured_time_ms"),
        ("under the profiler", "profiled_time_ms"),
    ];
    let had: Vec<_> =
        all.into_iter().filter(|(_, field)| shown.iter().any(|one| one.record.number(field).is_some())).collect();
    if had.is_empty() {
        return html! {};
    }
    let row = |(one, name): (&Shown, &String)| Row {
        label: name.clone(),
        values: had.iter().map(|(_, field)| one.record.number(field)).collect(),
        marked: None,
    };
    let rows: Vec<Row> = shown.iter().zip(names).map(row).collect();
    let series: Vec<&str> = had.iter().map(|(name, _)| *name).collect();
    let title = if series.len() == 1 { format!("Time, {}", series[0]) } else { "Time".into() };
    bars(&title, "milliseconds", &series, &rows, Scale::Linear)
}

/// Bytes of a record, both ways: compulsory, unique, to and from DRAM, requested.
fn moved(record: &AnyRecord) -> [Option<f64>; 4] {
    let both =
        |read: &str, written: &str| Some(number(record, ["traffic", read])? + number(record, ["traffic", written])?);
    [
        both("compulsory_read", "compulsory_written").or_else(|| record.number("compulsory_bytes")),
        both("unique_read", "unique_written"),
        both("dram_read_modelled", "dram_written_modelled").or_else(|| both("dram_read", "dram_written")),
        both("requested_read", "requested_written"),
    ]
}

fn traffic(shown: &[Shown], names: &[String]) -> Markup {
    let rows: Vec<Row> = shown
        .iter()
        .zip(names)
        .map(|(one, name)| Row {
            label: name.clone(),
            values: moved(&one.record).map(|value| value.map(|bytes| bytes / 1e6)).to_vec(),
            marked: None,
        })
        .filter(|row| row.values.iter().flatten().count() > 0)
        .collect();
    if rows.is_empty() {
        return html! {};
    }
    bars("Bytes moved, read and written", "MB", &["compulsory", "unique", "DRAM", "requested"], &rows, Scale::Log)
}

/// The roofs of the one GPU that all records are of, and where each stands below them.
fn roof(shown: &[Shown], names: &[String]) -> Markup {
    let boards: BTreeSet<&str> = shown.iter().map(|one| one.record.key.gpu.as_str()).collect();
    let (Some(board), 1) = (boards.first(), boards.len()) else { return html! {} };
    let Ok(gpu) = Gpu::find(board) else { return html! {} };
    let point = |(one, name): (&Shown, &String)| {
        let record = &one.record;
        let problem: Problem = record.key.problem.parse().ok()?;
        let milliseconds = record.number("measured_time_ms").or_else(|| record.number("modelled_time_ms"))?;
        let [_, _, dram, _] = moved(record);
        let (operations, dram) = (problem.flops() as f64, dram.filter(|bytes| *bytes > 0.0)?);
        let rate = operations / (milliseconds / 1e3);
        (rate.is_finite() && rate > 0.0).then(|| Point { label: name.clone(), intensity: operations / dram, rate })
    };
    let points: Vec<Point> = shown.iter().zip(names).filter_map(point).collect();
    if points.is_empty() {
        return html! {};
    }
    let rates = gpu.pipe_rates();
    let second = |per_clock: f64| per_clock * f64::from(gpu.sm_count) * gpu.clock_hz();
    let operand = shown.iter().find_map(|one| operand_of(one.record.key.dtype.parse().ok()?));
    let tensor = operand
        .and_then(|operand| Some((format!("tensor cores, {operand}"), second(f64::from(rates.tensor.of(operand)?)))));
    let mut ceilings = vec![("FMA pipe, f32", second(2.0 * f64::from(rates.fma)))];
    ceilings.extend(tensor.as_ref().map(|(name, rate)| (name.as_str(), *rate)));
    roofline(
        &format!("Roofline of the {} ({:.0} GB/s)", gpu.name, gpu.memory_bandwidth as f64 / 1e9),
        gpu.memory_bandwidth as f64,
        &ceilings,
        &points,
    )
}

/// One record: pipes, occupancy, findings, lines, the picture of an access, where it is from.
fn details(one: &Shown, index: usize, name: &str, sources: &mut Sources) -> Markup {
    let record = &one.record;
    sources.of_record(record);
    let key = &record.key;
    let list = |field: &str| record.json.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
    let lines: Vec<LineRecord> =
        list("lines").into_iter().filter_map(|line| LineRecord::deserialize(line).ok()).collect();
    let explanations: Vec<Explanation> =
        list("explanations").into_iter().filter_map(|one| Explanation::deserialize(one).ok()).collect();
    html! {
        section id={ "r" (index) } {
            h2 { (name) }
            p { (key.to_string()) @if !key.tiles.is_empty() { ", tiles " (key.tiles) } }
            div.charts { (pipes(record)) (occupancy(record)) }
            (findings(&one.findings, sources))
            (lines_table(&lines, sources))
            @if let Some(one) = explanations.iter().find(|one| one.cost > one.ideal) { (picture(one)) }
            (provenance(one))
        }
    }
}

fn pipes(record: &AnyRecord) -> Markup {
    let all = record.json.get("pipes").and_then(Value::as_array);
    let mut pipes: Vec<(String, f64)> = all
        .into_iter()
        .flatten()
        .filter_map(|pipe| Some((pipe.get("pipe")?.as_str()?.to_owned(), pipe.get("time_ms")?.as_f64()?)))
        .filter(|(_, time)| *time > 0.0)
        .collect();
    pipes.sort_by(|a, b| b.1.total_cmp(&a.1));
    if pipes.is_empty() {
        return stalls(record);
    }
    let rows = |(index, (name, time)): (usize, &(String, f64))| Row {
        label: name.clone(),
        values: vec![Some(*time)],
        marked: (index == 0).then_some(0),
    };
    let rows: Vec<Row> = pipes.iter().take(6).enumerate().map(rows).collect();
    let title = format!("What each pipe needs: limited by {}", pipes[0].0);
    bars(&title, "milliseconds, modelled", &[""], &rows, Scale::Linear)
}

/// What the warps of a profiled kernel wait for.
fn stalls(record: &AnyRecord) -> Markup {
    let all = record.json.get("stalls").and_then(Value::as_object);
    let mut stalls: Vec<(String, f64)> =
        all.into_iter().flatten().filter_map(|(name, share)| Some((name.replace('_', " "), share.as_f64()?))).collect();
    stalls.sort_by(|a, b| b.1.total_cmp(&a.1));
    let row = |(index, (name, share)): (usize, &(String, f64))| Row {
        label: name.clone(),
        values: vec![Some(100.0 * share)],
        marked: (index == 0).then_some(0),
    };
    let rows: Vec<Row> = stalls.iter().take(6).enumerate().map(row).collect();
    if rows.is_empty() {
        return html! {};
    }
    bars("What warps wait for", "% of the time between two instructions", &[""], &rows, Scale::Linear)
}

fn occupancy(record: &AnyRecord) -> Markup {
    let Some(occupancy) = record.json.get("occupancy").filter(|occupancy| occupancy.is_object()) else {
        return html! {};
    };
    let Some(limits) = occupancy.get("limit_blocks").and_then(Value::as_object) else { return html! {} };
    let limiters = occupancy.get("limiters").and_then(Value::as_array);
    let limiters: Vec<&str> = limiters.into_iter().flatten().filter_map(Value::as_str).collect();
    let rows: Vec<Row> = limits
        .iter()
        .filter_map(|(name, blocks)| {
            let marked = limiters.contains(&name.as_str()).then_some(0);
            Some(Row { label: name.clone(), values: vec![Some(blocks.as_f64()?)], marked })
        })
        .collect();
    if rows.is_empty() {
        return html! {};
    }
    let theoretical = occupancy.get("theoretical_pct").and_then(Value::as_f64);
    let pct = theoretical.map_or_else(|| "Occupancy".into(), |pct| format!("Occupancy {pct:.1} %"));
    bars(
        &format!("{pct}, limited by {}", list(limiters)),
        "CTAs on an SM, by each resource alone",
        &[""],
        &rows,
        Scale::Linear,
    )
}

fn findings(findings: &[Finding], sources: &mut Sources) -> Markup {
    html! {
        h3 { "Findings" }
        @if findings.is_empty() { p { "Nothing passes a threshold." } }
        @for finding in findings {
            div.finding.note[finding.severity == Severity::Note] {
                p { b { (finding.id) } " " (finding.text) }
                @if let Some(place) = finding.place() {
                    pre { code { span.place { (place.to_string()) } " " (sources.line(&place).unwrap_or("")) } }
                }
            }
        }
    }
}

/// The lines with most conflicts, or without any with most wavefronts.
fn lines_table(lines: &[LineRecord], sources: &mut Sources) -> Markup {
    let excess = |line: &LineRecord| {
        let counters = &line.counters;
        counters.shared_load_bank_conflicts + counters.shared_store_bank_conflicts
    };
    let wavefronts = |line: &LineRecord| line.counters.shared_load_wavefronts + line.counters.shared_store_wavefronts;
    let mut sorted: Vec<&LineRecord> = lines.iter().filter(|line| wavefronts(line) > 0).collect();
    sorted.sort_by_key(|line| std::cmp::Reverse((excess(line), wavefronts(line))));
    if sorted.is_empty() {
        return html! {};
    }
    let total: u64 = sorted.iter().map(|line| excess(line)).sum();
    let share = |line: &LineRecord| if total == 0 { 0.0 } else { excess(line) as f64 / total as f64 };
    html! {
        h3 { "Shared memory by source line" }
        div.wide {
            table {
                thead { tr { th { "line" } th.n { "wavefronts" } th.n { "conflicts" } th { "share of the conflicts" } th { "code" } } }
                tbody {
                    @for line in sorted.iter().take(LINES) {
                        @let place = Place { file: line.file.clone(), line: line.line };
                        tr {
                            td { (line.instruction.clone().unwrap_or_else(|| place.to_string())) }
                            td.n { (count(wavefronts(line))) }
                            td.n { (count(excess(line))) }
                            td { span.bar style={ "width:" (format!("{:.1}", 60.0 * share(line))) "%" } {} " " (percent(share(line))) }
                            td { code { (sources.line(&place).unwrap_or("")) } }
                        }
                    }
                }
            }
        }
    }
}

/// The lanes of a conflicting access, phase by phase.
fn picture(one: &Explanation) -> Markup {
    let phases = one.phases.len();
    html! {
        h3 { "Lanes to banks at " (Place { file: one.file.clone(), line: one.line }.to_string()) }
        p { "A " (one.access) " of " (one.bytes) " bytes a lane: " (one.cost) " wavefronts, where " (one.ideal) " would do." }
        @if let Some(text) = &one.text { pre { code { (text) } } }
        div.charts {
            @for (index, phase) in one.phases.iter().take(4).enumerate() {
                (lanes_to_banks(
                    &format!("Phase {} of {phases}: {} wavefront{}", index + 1, phase.wavefronts, if phase.wavefronts == 1 { "" } else { "s" }),
                    phase
                ))
            }
        }
        @for reason in &one.reasons { p { (reason) } }
        @if !one.remedies.is_empty() {
            p { "On these addresses, with" }
            ul {
                @for remedy in &one.remedies {
                    li { (remedy.layout) ": " @match remedy.wavefronts {
                        Some(wavefronts) => { (wavefronts) " wavefronts" }
                        None => "not possible: the access would no longer be aligned"
                    } }
                }
            }
        }
    }
}

fn provenance(one: &Shown) -> Markup {
    let key = one.record.key.fields();
    let sampled = one.record.json.get("sample").and_then(|sample| {
        let (heads, of) = (sample.get("heads")?.as_u64()?, sample.get("of")?.as_u64()?);
        (heads < of).then(|| format!("{heads} of {of} heads were run, counters are scaled to all"))
    });
    html! {
        details {
            summary { "Provenance" }
            dl {
                @for (name, value) in key.iter().filter(|(_, value)| !value.is_empty()) { dt { (name.trim_start_matches("the ")) } dd { (value) } }
                @if let Some(sampled) = sampled { dt { "sample" } dd { (sampled) } }
                @if let Some(entry) = &one.entry {
                    dt { "recorded" } dd { "as " (entry.id) ", " (entry.made) }
                    dt { "command" } dd { code { (entry.provenance.command) } }
                    dt { "revision" } dd { (entry.provenance.revision.as_deref().unwrap_or("none")) }
                    dt { "program" } dd { (entry.provenance.program) }
                }
            }
        }
    }
}

fn listed(entries: &[Entry], shown: usize) -> Markup {
    let milliseconds = |value: Option<f64>| value.map_or_else(|| "–".into(), |value| time(value / 1e3));
    html! {
        section {
            h2 { "History" }
            p {
                (count(entries.len() as u64)) " records; above the latest of " (shown) " keys, below the latest " (entries.len().min(LISTED)) "."
            }
            div.wide {
                table {
                    thead { tr { th.n { "#" } th { "made" } th { "revision" } th { "record" } th.n { "modelled" } th.n { "measured" } th.n { "findings" } } }
                    tbody {
                        @for entry in entries.iter().rev().take(LISTED) {
                            tr {
                                td.n { (entry.id) } td { (entry.made) } td { (entry.provenance.revision.as_deref().unwrap_or("–")) }
                                td { (entry.key.to_string()) } td.n { (milliseconds(entry.modelled_ms)) }
                                td.n { (milliseconds(entry.measured_ms)) } td.n { (entry.findings.len()) }
                            }
                        }
                    }
                }
            }
        }
    }
}

const STYLE: &str = include_str!("report.css");
