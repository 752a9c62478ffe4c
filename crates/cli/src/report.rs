//! What `strata dig` prints: a table, then each stratum in prose, then what each changed.

use std::fmt::Write;

use emulator::Level;
use lab::figures::{bytes, list, percent, time};
use lab::{Dug, Evidence, RegisterSource, Sources};

use crate::prose::{self, Style, paragraph};

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
        record.problem,
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
    let compulsory = evidence.compulsory();
    let _ = write!(text, " Compulsory: {} read, {} written.", bytes(compulsory.read), bytes(compulsory.written));
    let timed = dug.iter().find_map(|one| Some((one.record.measured_on.as_ref()?, one.measured.as_ref()?)));
    if let Some((name, measured)) = timed {
        let clock = measured.timing.clocks.as_ref().and_then(|clocks| clocks.sm_mhz);
        let clock = clock.map_or_else(String::new, |mhz| format!(" at {mhz} MHz"));
        let _ = write!(text, " Measured: medians by events on {name}{clock}, after its results were verified.");
    }
    text
}

fn table(dug: &[Dug]) -> String {
    let timed = dug.iter().any(|one| one.measured.is_some());
    let mut header = vec!["stratum", "modelled"];
    if timed {
        header.extend(["measured", "TFLOP/s"]);
    }
    header.extend(["requested", "unique", "conflicts", "n-way (ideal)", "occupancy", "error", "limiter"]);
    let mut table = prose::table(header);
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
    prose::set(table, 1..if timed { 8 } else { 6 })
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
            RegisterSource::Ptxas | RegisterSource::Given => format!("{} registers", main.registers.count),
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
    paragraph(out, "  ", &format!("Pipes: {}.", pipes(evidence)));
    if let Some(wrong) = &dug.wrong {
        paragraph(out, "  ", &format!("{}: {wrong}", style.warning("WRONG RESULT")));
    }
    prose::findings(out, &record.findings, style, sources);
}

/// The pipes of all launches that need at least a tenth of what the busiest needs.
pub fn pipes(evidence: &Evidence) -> String {
    let seconds = |pipe: &emulator::Pipe| Some((*pipe, evidence.seconds_of(*pipe)?));
    let mut pipes: Vec<_> = emulator::Pipe::ALL.iter().filter_map(seconds).collect();
    pipes.sort_by(|a, b| b.1.total_cmp(&a.1));
    let most = pipes.first().map_or(0.0, |pipe| pipe.1);
    let spoken = pipes.into_iter().filter(|&(_, seconds)| seconds >= most / 10.0 && seconds > 0.0);
    let instructions = evidence.counters(Level::Merged).warp_instructions;
    let times: Vec<String> = spoken.map(|(pipe, seconds)| format!("{pipe} {}", time(seconds))).collect();
    format!("{}; {} warp instructions", times.join(", "), lab::figures::count(instructions))
}
