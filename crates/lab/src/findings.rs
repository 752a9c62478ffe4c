//! What a stratum, or a kernel from elsewhere, suffers from: rules over counters, each with its threshold, its cost and the remedy that holds here.

use arch::{Feature, Limiter, Target, TensorOperand, WARP_THREADS};
use emulator::{Access, Level, Pipe};
use kernels::Dtype;
use ptx::{Opcode, Type};
use serde::{Deserialize, Serialize};

use crate::evidence::{Evidence, LaunchEvidence, Place, is_shared};
use crate::figures::{binary_bytes, bytes, count, list, percent, ratio, time, times};
use crate::registers::RegisterSource;
use crate::thresholds::Thresholds;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; something else absorbs it here.
    Note,
    /// Costs time.
    Warning,
}

/// One thing a stratum suffers from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Names the rule: stable, for scripts.
    pub id: String,
    /// How much it matters.
    pub severity: Severity,
    /// The file of the line that causes most of it, as the kernel names it; `None` when no line does.
    pub file: Option<String>,
    /// That line.
    pub line: Option<u32>,
    /// What was measured, against which threshold, what it costs, why, and what removes it.
    pub text: String,
}

impl Finding {
    /// The line that causes most of it.
    pub fn place(&self) -> Option<Place> {
        Some(Place { file: self.file.clone()?, line: self.line? })
    }

    pub(crate) fn new(id: &str, severity: Severity, place: Option<&Place>, text: String) -> Self {
        let place = place.filter(|place| place.line > 0);
        Self {
            id: id.into(),
            severity,
            file: place.map(|place| place.file.clone()),
            line: place.map(|place| place.line),
            text,
        }
    }
}

/// Everything the rules find, in the order of the rules.
pub fn findings(evidence: &Evidence, thresholds: &Thresholds) -> Vec<Finding> {
    let mut found = Vec::new();
    let total = evidence.seconds();
    for launch in evidence.launches.iter().filter(|launch| launch.model.seconds >= thresholds.launch * total) {
        found.extend(occupancy(evidence, thresholds, launch));
        found.extend(grid(evidence, launch));
        found.extend(spills(evidence, launch));
    }
    found.extend(dram_bytes(evidence, thresholds));
    found.extend(requested(evidence, thresholds));
    found.extend(sectors(evidence, thresholds));
    found.extend(bank_conflicts(evidence, thresholds, "load"));
    found.extend(bank_conflicts(evidence, thresholds, "store"));
    found.extend(bank_conflicts(evidence, thresholds, "atomic"));
    found.extend(divisions(evidence, thresholds));
    found.extend(idle_tensor_cores(evidence, thresholds));
    found.extend(copies_by_threads(evidence, thresholds));
    found.extend(limiter(evidence, thresholds));
    found
}

/// The operand type of tensor products that keep the precision of a storage type.
pub fn operand_of(dtype: Dtype) -> Option<TensorOperand> {
    match dtype {
        Dtype::F16 => Some(TensorOperand::F16),
        Dtype::Bf16 => Some(TensorOperand::Bf16),
        Dtype::E4m3 => Some(TensorOperand::Fp8),
        // tf32 drops 13 bits of the mantissa: not the same result.
        Dtype::F32 => None,
    }
}

/// [`operand_of`] what was run, and the products' rate, where the GPU has them.
fn tensor_operand(evidence: &Evidence) -> Option<(TensorOperand, u32)> {
    let dtype = evidence.problem.as_ref().map_or_else(|| widened(evidence), |problem| problem.dtype);
    let operand = operand_of(dtype)?;
    evidence.gpu.pipe_rates().tensor.of(operand).map(|rate| (operand, rate))
}

/// The type that a kernel of an unknown problem widens most often to compute in f32; f32 when it widens none.
fn widened(evidence: &Evidence) -> Dtype {
    let from = |narrow: Type| -> u64 {
        let widening = |instruction: &ptx::Instruction| {
            instruction.opcode() == Opcode::Cvt && instruction.types().eq([Type::F32, narrow])
        };
        let all = evidence.launches.iter().flat_map(LaunchEvidence::instructions);
        all.filter(|(instruction, _)| widening(instruction)).map(|(_, counted)| counted.executions).sum()
    };
    match (from(Type::F16), from(Type::Bf16)) {
        (0, 0) => Dtype::F32,
        (half, brain) if half >= brain => Dtype::F16,
        _ => Dtype::Bf16,
    }
}

/// `launch of v2's `flash_v2`` is only worth naming where there are several.
fn subject(evidence: &Evidence, launch: &LaunchEvidence) -> String {
    if evidence.launches.len() > 1 { format!("`{}`: ", launch.kernel.name) } else { String::new() }
}

/// The lines that cause at least [`Thresholds::line`] of it, no more than [`NAMED_LINES`], as `98.2 % at v2.rs:88`.
fn share_of_lines(lines: &[(Place, u64)], thresholds: &Thresholds) -> String {
    let named = lines.iter().map(|(place, weight)| ((place.line > 0).then(|| place.to_string()), *weight));
    shares(named, thresholds).unwrap_or_else(|| "no line causes much of it".into())
}

/// [`share_of_lines`] of lines by their names, heaviest first; `None` where no line is worth naming.
pub(crate) fn shares(
    lines: impl Iterator<Item = (Option<String>, u64)> + Clone,
    thresholds: &Thresholds,
) -> Option<String> {
    let total = lines.clone().map(|(_, weight)| weight).fold(0, u64::saturating_add);
    let share = |weight| ratio(weight, total);
    let named = lines.filter(|(_, weight)| share(*weight) >= thresholds.line);
    let named = named.filter_map(|(name, weight)| Some(format!("{} at {}", percent(share(weight)), name?)));
    Some(list(named.take(NAMED_LINES))).filter(|named| !named.is_empty())
}

/// A finding names no more lines than this.
const NAMED_LINES: usize = 3;

fn occupancy(evidence: &Evidence, thresholds: &Thresholds, launch: &LaunchEvidence) -> Option<Finding> {
    let occupancy = &launch.occupancy;
    if occupancy.theoretical_pct >= 100.0 * thresholds.occupancy {
        return None;
    }
    let limits = evidence.gpu.sm.limits();
    let warps = launch.threads.div_ceil(WARP_THREADS);
    // CTAs that would fill half of the warp slots.
    let wanted = (f64::from(limits.max_warps) * thresholds.occupancy / f64::from(warps)).ceil() as u32;
    let of_limiter = |limiter: &Limiter| match limiter {
        Limiter::Warps => format!("warp slots ({warps} of {} a CTA)", limits.max_warps),
        Limiter::Blocks => format!("block slots ({})", limits.max_blocks),
        Limiter::Registers => format!(
            "registers ({} a thread{})",
            launch.registers.count,
            match launch.registers.source {
                RegisterSource::Ptxas | RegisterSource::Given => "",
                RegisterSource::Liveness => ", estimated",
            }
        ),
        Limiter::Shared => {
            format!(
                "shared memory ({} of {} bytes a CTA)",
                count(occupancy.shared_per_block.into()),
                count(limits.shared_bytes.into())
            )
        }
    };
    let cure = |limiter: &Limiter| match limiter {
        Limiter::Shared => {
            let room = limits.shared_bytes / wanted.max(1) / limits.shared_granularity * limits.shared_granularity;
            Some(format!(
                "tiles of at most {} shared bytes a CTA",
                count(room.saturating_sub(limits.shared_reserved_per_block).into())
            ))
        }
        Limiter::Registers => {
            let per_warp =
                limits.registers / limits.sub_partitions / (wanted * warps).div_ceil(limits.sub_partitions).max(1);
            let registers = per_warp / limits.register_granularity * limits.register_granularity / WARP_THREADS;
            Some(format!("at most {registers} registers a thread"))
        }
        Limiter::Warps | Limiter::Blocks => None,
    };
    let cures: Vec<String> = occupancy.limiters.iter().filter_map(cure).collect();
    let cure = if cures.is_empty() {
        String::new()
    } else {
        format!(
            " {wanted} CTAs, which is {} %, need {}.",
            100.0 * f64::from(wanted * warps) / f64::from(limits.max_warps),
            list(cures)
        )
    };
    let text = format!(
        "{}{:.1} % (threshold {:.0} %): {} CTA{} of {warps} warps on an SM, limited by {}. With so few warps the latency \
         of loads is hard to hide, which the modelled time takes for granted.{cure}",
        subject(evidence, launch),
        occupancy.theoretical_pct,
        100.0 * thresholds.occupancy,
        occupancy.blocks_per_sm,
        if occupancy.blocks_per_sm == 1 { "" } else { "s" },
        list(occupancy.limiters.iter().map(of_limiter)),
    );
    Some(Finding::new("occupancy", Severity::Warning, None, text))
}

fn grid(evidence: &Evidence, launch: &LaunchEvidence) -> Option<Finding> {
    let (ctas, sms) = (launch.report.ctas_total, u64::from(evidence.gpu.sm_count));
    if ctas >= sms || ctas == 0 {
        return None;
    }
    let remedy = match evidence.stratum.as_str() {
        "v1" => " v2 gives every block of queries its own CTA.",
        _ => " Smaller tiles make more CTAs.",
    };
    let text = format!(
        "{}the grid has {ctas} CTA{} for {sms} SMs, so {} SMs idle: work spread over all of them would take {} less.{remedy}",
        subject(evidence, launch),
        if ctas == 1 { "" } else { "s" },
        sms - ctas,
        percent(1.0 - 1.0 / launch.model.tail),
    );
    Some(Finding::new("grid-too-small", Severity::Warning, None, text))
}

fn spills(evidence: &Evidence, launch: &LaunchEvidence) -> Option<Finding> {
    let spilled = launch.registers.spilled_bytes;
    if spilled == 0 {
        return None;
    }
    let text = format!(
        "{}ptxas spills {spilled} bytes of stores a thread to local memory (threshold 0), as {} registers do not suffice. These \
         accesses are in no counter here. Smaller tiles or more threads leave each thread fewer accumulators.",
        subject(evidence, launch),
        launch.registers.count,
    );
    Some(Finding::new("spills", Severity::Warning, None, text))
}

/// DRAM bytes over the compulsory ones, by cause: results that go through memory, and bytes that go by again.
fn dram_bytes(evidence: &Evidence, thresholds: &Thresholds) -> Vec<Finding> {
    let (traffic, dram) = (evidence.traffic(), evidence.dram());
    let needed = evidence.compulsory();
    let compulsory = needed.read + needed.written;
    let (moved, unique) = (dram.read + dram.written, traffic.unique_read + traffic.unique_written);
    if ratio(moved, compulsory) <= thresholds.bytes {
        return Vec::new();
    }
    let lines = evidence.lines_by(global_sectors);
    let seconds = moved as f64 / evidence.gpu.memory_bandwidth as f64;
    let measured = format!(
        "DRAM traffic is modelled at {}, {} the {} {} (threshold {}): {} read where {} must be, {} written where {} must be. \
         {}. It takes {}, {} of the modelled time.",
        bytes(moved),
        times(ratio(moved, compulsory)),
        needed_name(evidence),
        bytes(compulsory),
        times(thresholds.bytes),
        bytes(dram.read),
        bytes(needed.read),
        bytes(dram.written),
        bytes(needed.written),
        share_of_lines(&lines, thresholds),
        time(seconds),
        percent(seconds / evidence.seconds()),
    );
    let intermediate = format!(
        "{} of it are distinct bytes, {} the compulsory ones: intermediate results go through memory.{}",
        bytes(unique),
        times(ratio(unique, compulsory)),
        match evidence.stratum.as_str() {
            "naive" => " v1 keeps scores and probabilities of a tile on the chip.",
            _ => "",
        }
    );
    let repeated = format!(
        "Only {} of it are distinct bytes: they go by {} times, as what the resident CTAs touch does not stay in {} of L2.{}",
        bytes(unique),
        times(ratio(moved, unique)).trim_end_matches('x'),
        binary_bytes(evidence.gpu.l2_bytes),
        match evidence.stratum.as_str() {
            "v1" => " v2 keeps output, maximum and sum of a block of queries in registers.",
            _ => "",
        }
    );
    // The product of the two ratios is over the threshold; each that is over it alone is a cause, else the larger.
    let causes = [
        ("intermediate-bytes", ratio(unique, compulsory), intermediate),
        ("repeated-bytes", ratio(moved, unique), repeated),
    ];
    let largest = causes.iter().map(|cause| cause.1).fold(0.0, f64::max);
    let begins = thresholds.bytes.min(largest);
    let place = lines.first().map(|(place, _)| place);
    let finding =
        |(id, _, why): &(&str, f64, String)| Finding::new(id, Severity::Warning, place, format!("{measured} {why}"));
    causes.iter().filter(|cause| cause.1 >= begins).map(finding).collect()
}

/// What the bytes that a ratio is taken to are called.
fn needed_name(evidence: &Evidence) -> &'static str {
    if evidence.problem.is_some() { "compulsory" } else { "distinct" }
}

fn global_sectors(instruction: &ptx::Instruction, counted: &emulator::InstructionCounters) -> u64 {
    if Access::of(instruction).is_some_and(Access::is_global) { counted.sectors } else { 0 }
}

fn requested(evidence: &Evidence, thresholds: &Thresholds) -> Option<Finding> {
    let (traffic, dram) = (evidence.traffic(), evidence.dram());
    let needed = evidence.compulsory();
    let compulsory = needed.read + needed.written;
    let requested = traffic.requested_read + traffic.requested_written;
    let moved = dram.read + dram.written;
    if ratio(requested, compulsory) <= thresholds.bytes || ratio(moved, compulsory) > thresholds.bytes {
        return None;
    }
    let lines = evidence.lines_by(global_sectors);
    let remedy = match evidence.problem {
        Some(_) => "Every block of queries reads all keys and values that it sees: taller blocks read them less often.",
        None => "CTAs and loops read the same bytes again: larger tiles read them less often.",
    };
    let text = format!(
        "{} are requested, {} the {} {} (threshold {}), {}. L2 serves all but {}. {remedy}",
        bytes(requested),
        times(ratio(requested, compulsory)),
        needed_name(evidence),
        bytes(compulsory),
        times(thresholds.bytes),
        share_of_lines(&lines, thresholds),
        bytes(moved),
    );
    Some(Finding::new("requested-bytes", Severity::Note, lines.first().map(|(place, _)| place), text))
}

fn sectors(evidence: &Evidence, thresholds: &Thresholds) -> Option<Finding> {
    let (mut sectors, mut ideal, mut requests) = (0, 0, 0);
    for (instruction, counted) in evidence.launches.iter().flat_map(LaunchEvidence::instructions) {
        if Access::of(instruction).is_some_and(Access::is_global) {
            sectors += counted.sectors;
            ideal += counted.sectors_ideal;
            requests += counted.requests;
        }
    }
    if ratio(sectors, ideal) <= thresholds.sectors {
        return None;
    }
    let lines = evidence.lines_by(|_, counted| counted.sectors.saturating_sub(counted.sectors_ideal));
    let text = format!(
        "a global request moves {:.1} sectors where its bytes would fill {:.1} ({}, threshold {}); of the excess {}. The lanes of a request \
         touch parts of many sectors: neighbouring lanes on neighbouring addresses fill them.",
        ratio(sectors, requests),
        ratio(ideal, requests),
        times(ratio(sectors, ideal)),
        times(thresholds.sectors),
        share_of_lines(&lines, thresholds),
    );
    Some(Finding::new("uncoalesced", Severity::Warning, lines.first().map(|(place, _)| place), text))
}

fn bank_conflicts(evidence: &Evidence, thresholds: &Thresholds, direction: &str) -> Option<Finding> {
    let counters = evidence.counters(Level::Merged);
    let (requests, wavefronts, ideal, conflicts) = match direction {
        "load" => (
            counters.shared_load_instructions,
            counters.shared_load_wavefronts,
            counters.shared_load_wavefronts_ideal,
            counters.shared_load_bank_conflicts,
        ),
        "store" => (
            counters.shared_store_instructions,
            counters.shared_store_wavefronts,
            counters.shared_store_wavefronts_ideal,
            counters.shared_store_bank_conflicts,
        ),
        _ => (
            counters.shared_atomic_instructions,
            counters.shared_atomic_wavefronts,
            counters.shared_atomic_wavefronts_ideal,
            counters.shared_atomic_wavefronts - counters.shared_atomic_wavefronts_ideal,
        ),
    };
    // A few stores may conflict as they like: what counts is the pipe that all share.
    let all = counters.shared_load_wavefronts + counters.shared_store_wavefronts + counters.shared_atomic_wavefronts;
    if ratio(conflicts, wavefronts) < thresholds.bank_conflicts || ratio(conflicts, all) < thresholds.bank_conflicts {
        return None;
    }
    let is_direction = |instruction: &ptx::Instruction| match Access::of(instruction) {
        Some(Access::SharedLoad | Access::MatrixLoad) => direction == "load",
        Some(Access::SharedStore | Access::MatrixStore) => direction == "store",
        Some(Access::SharedAtomic) => direction == "atomic",
        _ => false,
    };
    let excess = |instruction: &ptx::Instruction, counted: &emulator::InstructionCounters| {
        if is_direction(instruction) { counted.wavefronts.saturating_sub(counted.wavefronts_ideal) } else { 0 }
    };
    let lines = evidence.lines_by(excess);
    let worst = lines.first().map(|(place, _)| place);
    let at_worst = |value: &dyn Fn(&emulator::InstructionCounters) -> u64| -> u64 {
        let launches = evidence.launches.iter();
        let all =
            launches.flat_map(|launch| launch.instructions().map(move |(i, counted)| (launch.place(i), i, counted)));
        all.filter(|(place, i, counted)| Some(place) == worst && excess(i, counted) > 0)
            .map(|(_, _, counted)| value(&counted))
            .sum()
    };
    let worst_requests = at_worst(&|counted| counted.requests);
    let cost = conflicts as f64
        / evidence.gpu.pipe_rates().shared_wavefronts
        / (f64::from(evidence.gpu.sm_count) * evidence.gpu.clock_hz());
    let remedy = match (evidence.stratum.as_str(), tensor_operand(evidence)) {
        _ if evidence.problem.is_none() => {
            "A padded or swizzled tile spreads the lanes over the banks: `strata probe --line` shows the lanes and tries such \
             layouts."
                .into()
        }
        (_, Some((operand, _))) => format!(
            "On {} the products of {operand} belong on the tensor cores (v2_tc), whose ldmatrix reads a swizzled tile without \
             conflicts; storing K transposed is not the remedy here.",
            evidence.gpu.sm
        ),
        ("v1" | "v2", None) => {
            "v2_kt stores K transposed before the kernel, so that the lanes of a load walk along a row.".into()
        }
        _ => "A padded or swizzled tile spreads the lanes over the banks.".into(),
    };
    let text = format!(
        "{} of the wavefronts of shared {direction}s are bank conflicts (threshold {:.0} %): {:.1}-way, where the access width alone asks \
         for {:.2}, an excess of {}. Of the conflicts {}: {:.1} wavefronts a {direction} there where {:.1} would do, because the lanes \
         hit different words of the same banks. They take {} of the shared-memory pipe, {} of the modelled time. {remedy}",
        percent(ratio(conflicts, wavefronts)),
        100.0 * thresholds.bank_conflicts,
        ratio(wavefronts, requests),
        ratio(ideal, requests),
        times(ratio(wavefronts, ideal)),
        share_of_lines(&lines, thresholds),
        ratio(at_worst(&|counted| counted.wavefronts), worst_requests),
        ratio(at_worst(&|counted| counted.wavefronts_ideal), worst_requests),
        time(cost),
        percent(cost / evidence.seconds()),
    );
    let id = match direction {
        "load" => "bank-conflicts",
        "store" => "bank-conflicts-store",
        _ => "bank-conflicts-atomic",
    };
    Some(Finding::new(id, Severity::Warning, worst, text))
}

fn divisions(evidence: &Evidence, thresholds: &Thresholds) -> Option<Finding> {
    let problem = evidence.problem.as_ref()?;
    let outputs = (problem.total_q() * problem.heads_q * problem.head_dim_v) as u64;
    let lines = evidence.lines_by(|instruction, counted| match instruction.opcode() {
        Opcode::Div | Opcode::Rcp if instruction.ty().is_some_and(Type::is_float) => counted.active_lanes,
        _ => 0,
    });
    let divisions: u64 = lines.iter().map(|(_, lanes)| lanes).sum();
    if ratio(divisions, outputs) <= thresholds.divisions {
        return None;
    }
    let remedy = match evidence.stratum.as_str() {
        "v1" => " v2 divides once, after the last block of keys.",
        _ => "",
    };
    let text = format!(
        "{} divisions for {} elements of output, {} each (threshold {}), {}: the accumulator is normalised in the loop.{remedy}",
        count(divisions),
        count(outputs),
        times(ratio(divisions, outputs)).trim_end_matches('x'),
        times(thresholds.divisions).trim_end_matches('x'),
        share_of_lines(&lines, thresholds),
    );
    Some(Finding::new("repeated-division", Severity::Warning, lines.first().map(|(place, _)| place), text))
}

fn idle_tensor_cores(evidence: &Evidence, thresholds: &Thresholds) -> Option<Finding> {
    let (operand, rate) = tensor_operand(evidence)?;
    let lines = evidence.lines_by(|instruction, counted| match (instruction.opcode(), instruction.ty()) {
        (Opcode::Fma, Some(Type::F32)) => counted.active_lanes,
        _ => 0,
    });
    let multiply_adds: u64 = lines.iter().map(|(_, lanes)| lanes).sum();
    // Half of the products, or half of the time, on the FMA pipe: not merely the softmax's.
    let much = match &evidence.problem {
        Some(problem) => problem.flops() > 0 && 4 * u128::from(multiply_adds) >= problem.flops(),
        None => multiply_adds > 0 && 2.0 * evidence.seconds_of(Pipe::Fma)? >= evidence.seconds(),
    };
    if !much {
        return None;
    }
    let gpu = evidence.gpu;
    let fma = f64::from(2 * gpu.pipe_rates().fma);
    let text = format!(
        "{} multiply-adds run on the FMA pipe, {}. The tensor cores of the {} do {operand} products {} as fast and idle{}.",
        count(multiply_adds),
        share_of_lines(&lines, thresholds),
        gpu.name,
        times(f64::from(rate) / fma),
        if evidence.problem.is_some() { ": v2_tc uses them" } else { "" },
    );
    Some(Finding::new("idle-tensor-cores", Severity::Warning, lines.first().map(|(place, _)| place), text))
}

/// Tiles that the warps which multiply also copy: each waits for the other.
fn copies_by_threads(evidence: &Evidence, thresholds: &Thresholds) -> Option<Finding> {
    if evidence.seconds_of(Pipe::Tensor).is_none_or(|seconds| seconds == 0.0) {
        return None;
    }
    let (mut through_registers, mut asynchronous, mut by_engine, mut copies) = (0, 0, 0, 0);
    for (instruction, counted) in evidence.launches.iter().flat_map(LaunchEvidence::instructions) {
        match Access::of(instruction) {
            Some(Access::GlobalLoad) => through_registers += SECTOR * counted.sectors,
            Some(Access::Copy) => asynchronous += SECTOR * counted.sectors,
            Some(Access::BulkLoad) => by_engine += counted.bytes,
            _ => continue,
        }
        copies += counted.executions;
    }
    let sm = evidence.gpu.sm;
    let has = |feature| Target::best(sm).supports(feature);
    let (threads, all) = (through_registers + asynchronous, through_registers + asynchronous + by_engine);
    let strata = evidence.problem.is_some();
    let (by_threads, what, remedy) = match () {
        () if has(Feature::Tma) => (
            threads,
            "the warps that multiply",
            format!(
                "{sm} has a copy engine, which one thread starts and which computes the addresses itself{}.",
                if strata { ": v3 lets a warp of its own feed it, while others multiply" } else { "" }
            ),
        ),
        () if has(Feature::CpAsync) => (
            through_registers,
            "registers, which the warps that multiply wait for,",
            format!("On {sm} cp.async copies to shared memory while the warps go on."),
        ),
        () => (
            through_registers,
            "registers, which the warps that multiply wait for,",
            format!("{sm} has no asynchronous copy: no remedy is known here but loads that are issued a tile ahead."),
        ),
    };
    if ratio(by_threads, all) <= thresholds.copies {
        return None;
    }
    let lines = evidence.lines_by(|instruction, counted| match Access::of(instruction) {
        Some(Access::GlobalLoad | Access::Copy) => counted.sectors,
        _ => 0,
    });
    let text = format!(
        "{} of the {} that are loaded go through {what} (threshold {:.0} %), {}: address work, copies, softmax and products share the \
         same warps, and what one does the others wait for. {} warp instructions are such copies. {remedy}",
        percent(ratio(by_threads, all)),
        bytes(all),
        100.0 * thresholds.copies,
        share_of_lines(&lines, thresholds),
        count(copies),
    );
    Some(Finding::new("synchronous-copies", Severity::Warning, lines.first().map(|(place, _)| place), text))
}

/// Bytes of a sector of global memory.
const SECTOR: u64 = 32;

fn limiter(evidence: &Evidence, thresholds: &Thresholds) -> Option<Finding> {
    let launch = evidence.main_launch()?;
    let pipe = launch.model.limiter;
    let mut others: Vec<(Pipe, f64)> = Pipe::ALL
        .iter()
        .filter(|&&other| other != pipe)
        .filter_map(|&other| Some((other, launch.model.seconds_of(other)?)))
        .collect();
    others.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (next, next_seconds) = *others.first()?;
    let compared = format!(
        "{}the modelled limiter is {pipe}: {}, {} what the next, {next}, needs ({})",
        subject(evidence, launch),
        time(launch.model.seconds),
        times(launch.model.seconds / next_seconds),
        time(next_seconds),
    );
    match pipe {
        Pipe::Shared => {
            let lines =
                evidence.lines_by(|instruction, counted| if is_shared(instruction) { counted.wavefronts } else { 0 });
            let counters = launch.counters(Level::Merged);
            let conflicts = counters.shared_load_bank_conflicts + counters.shared_store_bank_conflicts;
            let wavefronts = counters.shared_load_wavefronts + counters.shared_store_wavefronts;
            let unconflicted = launch.model.seconds * (1.0 - ratio(conflicts, wavefronts));
            let remedy = match tensor_operand(evidence) {
                Some(_) if evidence.problem.is_some() => {
                    "Tensor products read each word for more multiply-adds (v2_tc)."
                }
                Some(_) => "Tensor products read each word for more multiply-adds.",

                None => "Larger register tiles use each word loaded for more multiply-adds.",
            };
            let without = match conflicts {
                0 => String::new(),
                _ => format!("; without bank conflicts {}", time(unconflicted)),
            };
            let text = format!("{compared}{without}. Its wavefronts: {}. {remedy}", share_of_lines(&lines, thresholds));
            Some(Finding::new("shared-limited", Severity::Warning, lines.first().map(|(place, _)| place), text))
        }
        Pipe::Special => {
            let lines = evidence.lines_by(|instruction, counted| match instruction.opcode() {
                Opcode::Ex2 | Opcode::Lg2 | Opcode::Rcp | Opcode::Sin | Opcode::Cos | Opcode::Tanh | Opcode::Div => {
                    counted.executions
                }
                _ => 0,
            });
            let text = format!(
                "{compared}, {}. Exponentials evaluated as polynomials on the FMA pipe relieve it{}.",
                share_of_lines(&lines, thresholds),
                if evidence.problem.is_some() { " (v4)" } else { "" }
            );
            Some(Finding::new("special-limited", Severity::Warning, lines.first().map(|(place, _)| place), text))
        }
        _ => None,
    }
}
