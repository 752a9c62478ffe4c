//! What `strata probe` prints: what ran, what it took, which lines cost most and why, what is wrong.

use std::fmt::Write;

use emulator::{Access, Counters, Level, Pipe};
use lab::figures::{bytes, count, list, percent, time};
use lab::probe::{Comparison, Counted, Explanation, Hazard, Line, NoSass, Probed, policy_name};
use lab::ptxas::ToolError;
use lab::{Place, RegisterSource, Sources};

use crate::prose::{self, Style, WIDTH, clip, paragraph, wrapped};
use crate::report;

/// Lines of the table.
const LINES: usize = 12;
/// Accesses of a line that are explained; those that cost less are counted.
const EXPLAINED: usize = 4;

/// The report. `color` marks headings and severities.
pub fn text(probed: &Probed, color: bool) -> String {
    let style = Style { color };
    let mut out = String::new();
    let mut sources = Sources::new();
    sources.look_in(probed.about.file.parent().unwrap_or(std::path::Path::new("")));
    paragraph(&mut out, "", &header(probed));
    if let Some(hazard) = &probed.hazard {
        self::hazard(&mut out, hazard, style);
    } else if probed.schedules.len() > 1 {
        let names = list(probed.schedules.iter().map(|&policy| policy_name(policy)));
        paragraph(&mut out, "", &format!("No hazard under {} schedules: {names}.", probed.schedules.len()));
    }
    for comparison in &probed.comparisons {
        paragraph(&mut out, "", &compared(comparison, style));
    }
    let Some(counted) = &probed.counted else { return out };
    totals(&mut out, counted, style);
    if counted.explanations.is_empty() {
        let _ = write!(out, "\n{}\n{}\n", style.heading("Lines"), lines(&counted.lines));
        paragraph(&mut out, "", LEGEND);
    }
    let _ = writeln!(out, "\n{}", style.heading("Findings"));
    prose::findings(&mut out, &counted.findings, style, &mut sources);
    explanations(&mut out, &counted.explanations, style);
    out
}

const LEGEND: &str = "Shared: requests by warps, wavefronts they take, and those beyond the ideal. Sectors a global request moves, in \
                      parentheses those its bytes would fill. FMA, special: warp instructions on these pipes; tensor: operations. Share: of the \
                      limiting pipe's work.";

fn dims([x, y, z]: [u32; 3]) -> String {
    match (y, z) {
        (1, 1) => x.to_string(),
        (_, 1) => format!("{x}x{y}"),
        _ => format!("{x}x{y}x{z}"),
    }
}

fn header(probed: &Probed) -> String {
    let about = &probed.about;
    let gpu = about.gpu;
    let mut text = format!(
        "`{}` of {} ({}) on an emulated {} ({}, {} SMs at {:.2} GHz, {:.0} GB/s): grid {}, block {}",
        about.kernel,
        about.file.display(),
        about.target,
        gpu.name,
        gpu.sm,
        gpu.sm_count,
        gpu.clock_hz() / 1e9,
        gpu.memory_bandwidth as f64 / 1e9,
        dims(about.grid),
        dims(about.block),
    );
    if about.cluster != [1; 3] {
        let _ = write!(text, ", cluster {}", dims(about.cluster));
    }
    let _ = write!(text, ", {} shared bytes", count(about.static_shared + u64::from(about.dynamic_shared)));
    if about.static_shared > 0 && about.dynamic_shared > 0 {
        let _ = write!(text, " ({} static)", count(about.static_shared));
    }
    if let Some(counted) = &probed.counted {
        let registers = &counted.launch().registers;
        let _ = match registers.source {
            RegisterSource::Ptxas => write!(text, ", {} registers (ptxas)", registers.count),
            RegisterSource::Given => write!(text, ", {} registers (given)", registers.count),
            RegisterSource::Liveness => write!(
                text,
                ", about {} registers (estimated: {} are live at once, rounded up to eights, at least {})",
                registers.count,
                counted.launch().report.live_registers,
                arch::LEAST_REGISTERS
            ),
        };
        let report = &counted.launch().report;
        if report.ctas_run < report.ctas_total {
            let _ = write!(
                text,
                ". {} of {} CTAs were run, counters are scaled to all: exact where CTAs do equal work",
                count(report.ctas_run),
                count(report.ctas_total)
            );
        }
    }
    text + "."
}

fn hazard(out: &mut String, hazard: &Hazard, style: Style) {
    let fault = &hazard.fault;
    out.push('\n');
    let mark = style.warning(&format!("HAZARD {}", hazard.kind.replace('_', " ")));
    wrapped(out, "", "  ", &format!("{mark}: {}", fault.kind));
    let [x, y, z] = fault.cta;
    let at = match &fault.place {
        Some((file, line)) => format!(" ({file}:{line})"),
        None => String::new(),
    };
    wrapped(out, "  ", "  ", &format!("at `{}`{at}, CTA ({x}, {y}, {z}), thread {}", fault.instruction, fault.thread));
    if let (Some(text), Some((_, line))) = (&hazard.text, &fault.place) {
        let _ = writeln!(out, "  {}", clip(&format!("{line} | {text}"), WIDTH - 2));
    }
    wrapped(out, "  ", "  ", &format!("Remedy: {}", hazard.remedy));
    paragraph(out, "  ", &format!("It happens under --policy {}.", hazard.policy));
}

fn compared(one: &Comparison, style: Style) -> String {
    let tolerance = match (one.abs, one.rel) {
        (0.0, 0.0) => "exactly".to_string(),
        (abs, rel) => format!("within {abs:.1e} + {rel:.1e} of the value"),
    };
    let worst = one.worst.as_ref().map_or_else(String::new, |worst| {
        let index: Vec<String> = worst.index.iter().map(u64::to_string).collect();
        format!(
            "; the largest error is {:.2e}, at [{}]: {} where {} is expected",
            one.max_error,
            index.join(", "),
            worst.found,
            worst.expected
        )
    });
    match one.wrong {
        0 => format!("Argument {} agrees with {} {tolerance}{worst}.", one.arg, one.file),
        wrong => format!(
            "{}: argument {} differs from {} in {} of {} elements ({tolerance}){worst}.",
            style.warning("WRONG RESULT"),
            one.arg,
            one.file,
            count(wrong),
            count(one.elements)
        ),
    }
}

fn totals(out: &mut String, counted: &Counted, style: Style) {
    let launch = counted.launch();
    let (ptx, merged) = (launch.counters(Level::Ptx), launch.counters(Level::Merged));
    let _ = writeln!(out, "\n{}", style.heading("Totals"));
    let occupancy = &launch.occupancy;
    let limits = &occupancy.limits;
    let shared = limits.shared.map_or_else(|| "no limit".into(), |blocks| blocks.to_string());
    paragraph(
        out,
        "  ",
        &format!(
            "Occupancy {:.1} %: {} CTAs of {} warps on an SM, limited by {} (CTAs by registers {}, shared memory {shared}, warps {}, \
             blocks {}).",
            occupancy.theoretical_pct,
            occupancy.blocks_per_sm,
            launch.threads.div_ceil(32),
            list(&occupancy.limiters),
            limits.registers,
            limits.warps,
            limits.blocks,
        ),
    );
    let sass = match &counted.sass {
        Ok(sass) => format!("{} (sass)", count(sass.warp_instructions)),
        Err(NoSass::Tool(error)) if matches!(**error, ToolError::Missing { .. }) => {
            "sass unknown without ptxas and nvdisasm".into()
        }
        Err(why) => format!("sass unknown: {}", why.to_string().lines().take(2).collect::<Vec<_>>().join(" ")),
    };
    paragraph(out, "  ", &format!("Warp instructions: {} (ptx), {sass}.", count(ptx.warp_instructions)));
    let traffic = counted.evidence.traffic();
    let (mut sectors, mut ideal) = (0, 0);
    for (instruction, counted) in launch.instructions() {
        if Access::of(instruction).is_some_and(Access::is_global) {
            sectors += counted.sectors;
            ideal += counted.sectors_ideal;
        }
    }
    let dram = launch.model.dram;
    let atomics = match merged.global_atomic_requests {
        0 => String::new(),
        requests => format!(", and {} atomic ones,", count(requests)),
    };
    paragraph(
        out,
        "  ",
        &format!(
            "Global memory: {} load and {} store requests{atomics} move {} sectors, {}; their bytes would fill {}. Distinct bytes {}, DRAM \
             bytes (modelled) {}.",
            count(merged.global_load_requests),
            count(merged.global_store_requests),
            count(sectors),
            bytes(32 * sectors),
            count(ideal),
            bytes(traffic.unique_read + traffic.unique_written),
            bytes(dram.read + dram.written),
        ),
    );
    shared_memory(out, "loads", &ptx, &merged);
    shared_memory(out, "stores", &ptx, &merged);
    shared_memory(out, "atomics", &ptx, &merged);
    if let Some(differ) =
        counted.sass.as_ref().ok().map(|sass| made_otherwise(sass, &merged)).filter(|all| !all.is_empty())
    {
        let text = format!("The machine code (sass) makes other numbers of {}.", differ.join(", "));
        paragraph(out, "  ", &text);
    }
    paragraph(
        out,
        "  ",
        &format!(
            "Pipes (model): {}. Modelled time {}, by {}: what the busiest pipe needs, a lower bound.",
            report::pipes(&counted.evidence),
            time(launch.model.seconds),
            launch.model.limiter
        ),
    );
}

/// The accesses that the assembler made less or more often than the PTX says, with how often.
fn made_otherwise(sass: &Counters, merged: &Counters) -> Vec<String> {
    let requests = |of: &Counters| {
        [
            ("global loads", of.global_load_requests),
            ("global stores", of.global_store_requests),
            ("global atomics", of.global_atomic_requests),
            ("shared loads", of.shared_load_instructions),
            ("shared stores", of.shared_store_instructions),
            ("shared atomics", of.shared_atomic_instructions),
        ]
    };
    let pairs = requests(sass).into_iter().zip(requests(merged));
    let differ = pairs.filter(|(made, stated)| made.1 != stated.1);
    differ.map(|((name, made), (_, stated))| format!("{name} ({} for {})", count(made), count(stated))).collect()
}

fn shared_memory(out: &mut String, what: &str, ptx: &Counters, merged: &Counters) {
    let of = |counters: &Counters| match what {
        "loads" => (
            counters.shared_load_instructions + counters.ldmatrix_instructions,
            counters.ldmatrix_instructions,
            counters.shared_load_wavefronts,
            counters.shared_load_wavefronts_ideal,
        ),
        "stores" => (
            counters.shared_store_instructions + counters.stmatrix_instructions,
            counters.stmatrix_instructions,
            counters.shared_store_wavefronts,
            counters.shared_store_wavefronts_ideal,
        ),
        _ => (
            counters.shared_atomic_instructions,
            0,
            counters.shared_atomic_wavefronts,
            counters.shared_atomic_wavefronts_ideal,
        ),
    };
    let (requests, matrices, wavefronts, ideal) = of(merged);
    if requests == 0 {
        return;
    }
    let matrices = match matrices {
        0 => String::new(),
        matrices => format!(" ({} of matrices)", count(matrices)),
    };
    let rate = (wavefronts - ideal) as f64 / wavefronts.max(1) as f64;
    paragraph(
        out,
        "  ",
        &format!(
            "Shared {what}: {} requests{matrices} take {} wavefronts (merged; as the PTX has them {} and {}), ideal {}: {} conflicts, {}.",
            count(requests),
            count(wavefronts),
            count(of(ptx).0),
            count(of(ptx).2),
            count(ideal),
            count(wavefronts - ideal),
            percent(rate),
        ),
    );
}

/// Three figures and a letter: `29.4M`.
fn short(value: f64) -> String {
    let (mut value, mut unit) = (value, "");
    for larger in ["k", "M", "G", "T"] {
        if value < 9999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    match (unit, value) {
        (_, 0.0) => "-".into(),
        ("", _) => format!("{value:.0}"),
        (_, value) if value < 99.95 => format!("{value:.1}{unit}"),
        _ => format!("{value:.0}{unit}"),
    }
}

fn lines(lines: &[Line]) -> String {
    let header =
        ["line", "share", "shared", "wavefr.", "excess", "global", "sectors", "FMA", "special", "tensor", "text"];
    let mut table = prose::table(header);
    for line in lines.iter().take(LINES) {
        let place = Place { file: line.file.clone(), line: line.line };
        let place = if line.line == 0 { "unknown".into() } else { place.to_string() };
        let sectors = match line.global_requests {
            0 => "-".into(),
            requests => {
                let per = |sectors: u64| sectors as f64 / requests as f64;
                format!("{:.1} ({:.1})", per(line.sectors), per(line.sectors_ideal))
            }
        };
        table.add_row([
            clip(&place, 18),
            percent(line.share),
            short(line.shared_requests as f64),
            short(line.wavefronts as f64),
            short(line.wavefronts.saturating_sub(line.wavefronts_ideal) as f64),
            short(line.global_requests as f64),
            sectors,
            short(line.on(Pipe::Fma) / 32.0),
            short(line.on(Pipe::Special) / 32.0),
            short(line.on(Pipe::Tensor)),
            clip(line.text.as_deref().unwrap_or(""), 22),
        ]);
    }
    let mut text = prose::set(table, 1..10);
    if lines.len() > LINES {
        let _ = write!(text, "\n{} more lines.", lines.len() - LINES);
    }
    text
}

fn explanations(out: &mut String, explanations: &[Explanation], style: Style) {
    let Some(first) = explanations.first() else { return };
    let place = Place { file: first.file.clone(), line: first.line };
    let _ = writeln!(out, "\n{}", style.heading(&format!("Accesses of {place}")));
    if let Some(text) = &first.text {
        let _ = writeln!(out, "  {}", clip(&format!("{} | {text}", first.line), WIDTH - 2));
    }
    for explanation in explanations.iter().take(EXPLAINED) {
        self::explanation(out, explanation);
    }
    if explanations.len() > EXPLAINED {
        let _ = writeln!(out, "\n  {} more that cost less (--json has them).", explanations.len() - EXPLAINED);
    }
}

fn explanation(out: &mut String, one: &Explanation) {
    let shared = one.access.starts_with("shared");
    let unit = if shared { "wavefronts" } else { "sectors" };
    out.push('\n');
    let instructions = match one.instructions {
        1 => format!("`{}`", one.instruction),
        more => format!("{more} instructions alike, the first `{}`", one.instruction),
    };
    wrapped(
        out,
        "  ",
        "  ",
        &format!(
            "{} of {} bytes a lane: {} {unit}, ideal {}; {} executions run. {instructions}; {}{} distinct pattern{} of addresses, this \
             one of the first execution:",
            capital(&one.access),
            one.bytes,
            one.cost,
            one.ideal,
            count(one.executions),
            if one.more_patterns { "more than " } else { "" },
            one.patterns,
            if one.patterns == 1 { "" } else { "s" },
        ),
    );
    for (row, addresses) in one.addresses.chunks(8).enumerate() {
        let addresses = addresses.iter().map(|address| match address {
            Some(address) => format!("{address:#x}"),
            None => "-".into(),
        });
        let addresses: Vec<String> = addresses.map(|address| format!("{address:>11} ")).collect();
        let lanes = format!("lanes {}-{}", 8 * row, 8 * row + 7);
        let _ = writeln!(out, "    {lanes:<12}{}", addresses.join(""));
    }
    if shared {
        let _ = writeln!(out, "  Phases, by the lanes' first banks:");
        for phase in &one.phases {
            let pairs = phase.lanes.iter().zip(&phase.banks).map(|(lane, bank)| format!("{lane}:{bank}"));
            let pairs: Vec<String> = pairs.collect();
            let indent = " ".repeat(10);
            wrapped(
                out,
                "    ",
                &indent,
                &format!(
                    "{} wavefront{}: lane:bank {}",
                    phase.wavefronts,
                    if phase.wavefronts == 1 { "" } else { "s" },
                    pairs.join(" ")
                ),
            );
        }
    }
    paragraph(out, "  ", &one.reasons.join(" "));
    if !one.remedies.is_empty() {
        let _ = writeln!(out, "  On these addresses, with");
        for remedy in &one.remedies {
            let takes = match remedy.wavefronts {
                Some(wavefronts) => format!("{wavefronts} wavefronts"),
                None => format!("not possible: {} bytes would no longer be aligned", one.bytes),
            };
            let _ = writeln!(out, "    {}: {takes}", remedy.layout);
        }
    }
}

fn capital(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().collect::<String>() + characters.as_str()).unwrap_or_default()
}
