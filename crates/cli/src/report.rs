//! What `strata dig` prints: a table, then each stratum in prose, then what each changed.

use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use emulator::Level;
use lab::figures::{bytes, list, percent, time};
use lab::{Dug, Place, RegisterSource, Severity, Sources};

/// Columns that prose is wrapped to and the table kept within.
const WIDTH: usize = 100;

/// The report on what was dug, in the order it was dug. `color` marks headings and severities.
pub fn text(dug: &[Dug], color: bool) -> String {
    let Some(first) = dug.first() else { return String::new() };
    let style = Style { color };
    let mut out = String::new();
    paragraph(&mut out, "", &header(first, dug));
    out.push('\n');
    let _ = writeln!(out, "{}", table(dug));
    paragraph(&mut out, "", LEGEND);
    let mut sources = Sources::new();
    for one in dug {
        let _ = writeln!(out, "\n{}", style.heading(&one.evidence.stratum));
        stratum(&mut out, one, style, &mut sources);
    }
    for pair in dug.windows(2) {
        let [before, after] = pair else { continue };
        let title = format!("{} -> {}", before.evidence.stratum, after.evidence.stratum);
        let _ = writeln!(out, "\n{}", style.heading(&title));
        let said =
            lab::transition((&before.evidence, &before.record.findings), (&after.evidence, &after.record.findings));
        match said {
            Ok(sentences) => paragraph(&mut out, "  ", &sentences.join(" ")),
            Err(incomparable) => paragraph(&mut out, "  ", &incomparable.to_string()),
        }
    }
    out
}

const LEGEND: &str = "Modelled: what the busiest pipe needs, a lower bound. Requested and unique: bytes that instructions ask \
                      for, and distinct ones. Conflicts: share of shared-load wavefronts beyond the ideal; n-way: wavefronts a \
                      load, in parentheses what its width alone asks for. Error: of the output against the f64 reference.";

fn header(first: &Dug, dug: &[Dug]) -> String {
    let (evidence, record) = (&first.evidence, &first.record);
    let gpu = evidence.gpu;
    let mut text = format!(
        "{} {} on an emulated {} ({}, {} SMs at {:.2} GHz, {:.0} GB/s).",
        evidence.problem,
        if record.dtype == "f32" { "f32" } else { "" },
        gpu.name,
        gpu.sm,
        gpu.sm_count,
        gpu.clock_hz() / 1e9,
        gpu.memory_bandwidth as f64 / 1e9,
    )
    .replace("  ", " ");
    let sample = &record.sample;
    if sample.heads < sample.of {
        let _ = write!(text, " {} of {} heads were run, counters are scaled to all", sample.heads, sample.of);
        text.push_str(if sample.exact { "." } else { "; sector counts depend a little on that: --full runs all." });
    }
    let compulsory = evidence.problem.compulsory_bytes();
    let narrow = |n: u128| u64::try_from(n).unwrap_or(u64::MAX);
    let _ = write!(
        text,
        " Compulsory: {} read, {} written.",
        bytes(narrow(compulsory.read)),
        bytes(narrow(compulsory.write))
    );
    let timed = dug.iter().find_map(|one| Some((one.record.measured_on.as_ref()?, one.measured.as_ref()?)));
    if let Some((name, measured)) = timed {
        let clock = measured.timing.clocks.as_ref().and_then(|clocks| clocks.sm_mhz);
        let clock = clock.map_or_else(String::new, |mhz| format!(" at {mhz} MHz"));
        let _ = write!(text, " Measured: medians by events on {name}{clock}, after its results were verified.");
    }
    text
}

fn table(dug: &[Dug]) -> String {
    let mut table = Table::new();
    let line = LineStyle::none().fill('─');
    let style = TableStyle::new().header_separator(line);
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH as u16);
    let timed = dug.iter().any(|one| one.measured.is_some());
    let mut header = vec!["stratum", "modelled"];
    if timed {
        header.extend(["measured", "TFLOP/s"]);
    }
    header.extend(["requested", "unique", "conflicts", "n-way (ideal)", "occupancy", "error", "limiter"]);
    table.set_header(header);
    for Dug { evidence, record, measured, .. } in dug {
        let (counters, traffic) = (&record.counters, &record.traffic);
        let per_load = |n: u64| match counters.shared_load_instructions {
            0 => "-".to_string(),
            loads => format!("{:.1}", n as f64 / loads as f64),
        };
        let conflicts = match counters.shared_load_wavefronts {
            0 => "-".to_string(),
            all => percent(counters.shared_load_bank_conflicts as f64 / all as f64),
        };
        let main = evidence.main_launch();
        let mut row = vec![record.stratum.clone(), time(record.modelled_time_ms / 1e3)];
        if timed {
            let timed = measured.as_ref();
            row.push(timed.map_or_else(|| "-".into(), |measured| time(measured.timing.median_ms / 1e3)));
            row.push(timed.map_or_else(|| "-".into(), |measured| format!("{:.2}", measured.tflops)));
        }
        row.extend([
            bytes(traffic.requested_read + traffic.requested_written),
            bytes(traffic.unique_read + traffic.unique_written),
            conflicts,
            format!(
                "{} ({})",
                per_load(counters.shared_load_wavefronts),
                per_load(counters.shared_load_wavefronts_ideal)
            ),
            main.map_or_else(String::new, |launch| {
                let limiters =
                    record.occupancy.as_ref().map_or_else(String::new, |occupancy| occupancy.limiters.join("+"));
                format!("{:.1} % {limiters}", launch.occupancy.theoretical_pct)
            }),
            match (record.error, record.correct) {
                (Some(0.0), true) => "0".into(),
                (Some(error), true) => format!("{error:.1e}"),
                (Some(error), false) => format!("{error:.1e} WRONG"),
                (None, true) => "-".into(),
                (None, false) => "WRONG".into(),
            },
            record.limiter.clone().unwrap_or_default(),
        ]);
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    for column in 1..if timed { 8 } else { 6 } {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn stratum(out: &mut String, dug: &Dug, style: Style, sources: &mut Sources) {
    let Dug { evidence, record, .. } = dug;
    let mut about = vec![format!("block_q {}, block_kv {}", record.tiles.block_q, record.tiles.block_kv)];
    if let Some(main) = evidence.main_launch() {
        about.push(format!("{} CTAs of {} threads", lab::figures::count(main.report.ctas_total), main.threads));
        if main.model.tail > 1.05 {
            about.push(format!("the busiest SM runs {:.2} times the average", main.model.tail));
        }
        about.push(format!("{} shared bytes", lab::figures::count(main.shared_bytes.into())));
        about.push(match main.registers.source {
            RegisterSource::Ptxas => format!("{} registers", main.registers.count),
            RegisterSource::Liveness => format!("about {} registers (estimated)", main.registers.count),
        });
    }
    paragraph(out, "  ", &format!("{}.", about.join("; ")));
    if evidence.launches.len() > 1 {
        let launches = evidence.launches.iter().map(|launch| {
            let dram = launch.model.dram;
            format!(
                "`{}` {} ({}, DRAM {})",
                launch.kernel.name,
                time(launch.model.seconds),
                launch.model.limiter,
                bytes(dram.read + dram.written)
            )
        });
        paragraph(out, "  ", &format!("Launches: {}.", list(launches)));
    }
    if evidence.launches.is_empty() {
        return paragraph(out, "  ", "There is no query: nothing is launched.");
    }
    paragraph(out, "  ", &format!("Pipes: {}.", pipes(dug)));
    if let Some(wrong) = &dug.wrong {
        paragraph(out, "  ", &format!("{}: {wrong}", style.warning("WRONG RESULT")));
    }
    if record.findings.is_empty() {
        paragraph(out, "  ", "Nothing passes a threshold.");
    }
    for finding in &record.findings {
        let mark = match finding.severity {
            Severity::Warning => style.warning(&finding.id),
            Severity::Note => style.note(&finding.id),
        };
        wrapped(out, "  * ", "    ", &format!("{mark}: {}", finding.text));
        if let (Some(file), Some(line)) = (&finding.file, finding.line) {
            let place = Place { file: file.clone(), line };
            let _ = match sources.line(&place) {
                Some(text) => writeln!(out, "      {}", clip(&format!("{file}:{line}: {text}"), WIDTH - 6)),
                None => writeln!(out, "      {file}:{line}"),
            };
        }
    }
}

/// The pipes of all launches that need at least a tenth of what the busiest needs.
fn pipes(dug: &Dug) -> String {
    let seconds = |pipe: &emulator::Pipe| Some((*pipe, dug.evidence.seconds_of(*pipe)?));
    let mut pipes: Vec<_> = emulator::Pipe::ALL.iter().filter_map(seconds).collect();
    pipes.sort_by(|a, b| b.1.total_cmp(&a.1));
    let most = pipes.first().map_or(0.0, |pipe| pipe.1);
    let spoken = pipes.into_iter().filter(|&(_, seconds)| seconds >= most / 10.0 && seconds > 0.0);
    let instructions = dug.evidence.counters(Level::Merged).warp_instructions;
    let times: Vec<String> = spoken.map(|(pipe, seconds)| format!("{pipe} {}", time(seconds))).collect();
    format!("{}; {} warp instructions", times.join(", "), lab::figures::count(instructions))
}

fn clip(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_string();
    }
    text.chars().take(width - 1).chain(['…']).collect()
}

fn paragraph(out: &mut String, indent: &str, text: &str) {
    wrapped(out, indent, indent, text);
}

/// Wraps text; a number keeps its unit.
fn wrapped(out: &mut String, first: &str, others: &str, text: &str) {
    const NO_BREAK: &str = "\u{a0}";
    let mut text = text.to_string();
    for unit in ["%", "ms", "us", "B", "KB", "MB", "GB", "TB", "MiB"] {
        for end in [" ", ",", ".", ":", ";", ")"] {
            text = text.replace(&format!(" {unit}{end}"), &format!("{NO_BREAK}{unit}{end}"));
        }
    }
    let options = textwrap::Options::new(WIDTH)
        .initial_indent(first)
        .subsequent_indent(others)
        .word_splitter(textwrap::WordSplitter::NoHyphenation);
    out.push_str(&textwrap::fill(&text, options).replace(NO_BREAK, " "));
    out.push('\n');
}

#[derive(Clone, Copy)]
struct Style {
    color: bool,
}

impl Style {
    fn heading(self, text: &str) -> String {
        console::style(text).bold().force_styling(self.color).to_string()
    }

    fn warning(self, text: &str) -> String {
        console::style(text).yellow().force_styling(self.color).to_string()
    }

    fn note(self, text: &str) -> String {
        console::style(text).cyan().force_styling(self.color).to_string()
    }
}
