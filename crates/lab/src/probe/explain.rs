//! One access by hand: the lanes' addresses, their banks or sectors, who collides and why, and what layout would not.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use arch::Gpu;
use emulator::banks::{self, BankRule};
use emulator::{Access, Part, Shape};
use ptx::Kernel;
use serde::{Deserialize, Serialize};

use super::ProbeError;
use super::settings::LineSpec;
use crate::evidence::{LaunchEvidence, Place};
use crate::figures::list;
use crate::source::Sources;

/// Bytes of a bank's word.
const WORD: u64 = 4;
/// Banks of shared memory.
const BANKS: u64 = 32;
/// Bytes of a sector of global memory.
const SECTOR: u64 = 32;
/// Shapes of addresses that the emulator keeps per instruction.
const KEPT: usize = 64;

/// What the warps of one instruction access, and of all that access alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The source file.
    pub file: String,
    /// The source line.
    pub line: u32,
    /// Its text, where the file is there.
    pub text: Option<String>,
    /// `shared load`, `shared store`, `shared matrix load` (`ldmatrix`), `shared matrix store`, `global load`, `global store` or `copy`.
    pub access: Cow<'static, str>,
    /// The first of the instructions, as PTX.
    pub instruction: String,
    /// How many instructions of the line access alike: the same distances between lanes and the same cost.
    pub instructions: usize,
    /// Bytes per lane, after the merge.
    pub bytes: u32,
    /// Executions that were run, of all these instructions.
    pub executions: u64,
    /// Distinct shapes of addresses of the first instruction; more than are counted when `more_patterns`.
    pub patterns: usize,
    /// Whether there were more.
    pub more_patterns: bool,
    /// By lane, of the first execution; `None` where the lane does not take part.
    pub addresses: Vec<Option<u64>>,
    /// Wavefronts of one execution (shared memory), or sectors (global memory).
    pub cost: u32,
    /// What the width, or the bytes, alone demand.
    pub ideal: u32,
    /// Of shared memory: what is served together.
    pub phases: Vec<Phase>,
    /// Why it costs what it costs, in sentences.
    pub reasons: Vec<String>,
    /// What other layouts would cost, computed on these addresses.
    pub remedies: Vec<Remedy>,
}

/// Lanes that are served together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Which, in order; of packed neighbours one.
    pub lanes: Vec<usize>,
    /// The first bank of each.
    pub banks: Vec<u64>,
    /// Passes it takes: as many as the fullest bank has distinct words.
    pub wavefronts: u32,
    /// The fullest bank.
    pub fullest: u64,
    /// The lanes with a word on it.
    pub colliding: Vec<usize>,
}

/// Another layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remedy {
    /// What is changed.
    pub layout: String,
    /// What an execution would take; `None` where the access would no longer be aligned.
    pub wavefronts: Option<u32>,
}

/// Whether an instruction accesses memory at an address of each lane: a bulk copy has one alone.
fn is_by_lane(instruction: &ptx::Instruction) -> bool {
    !matches!(Access::of(instruction), None | Some(Access::BulkLoad | Access::BulkStore))
}

/// The positions of the memory accesses of a source line.
pub(super) fn positions(kernel: &Kernel, wanted: &LineSpec) -> Result<Vec<usize>, ProbeError> {
    let (mut positions, mut others) = (Vec::new(), BTreeSet::new());
    for (position, instruction) in kernel.instructions().enumerate() {
        let Some(location) = kernel.user_location(instruction).filter(|_| is_by_lane(instruction)) else {
            continue;
        };
        let file = kernel.files.get(location.file as usize).map_or("", String::as_str);
        if wanted.is(file, location.line) {
            positions.push(position);
        } else {
            others.insert((file.rsplit('/').next().unwrap_or_default(), location.line));
        }
    }
    if positions.is_empty() {
        const MOST: usize = 40;
        let mut lines: Vec<String> = others.iter().take(MOST).map(|(file, line)| format!("{file}:{line}")).collect();
        if others.len() > MOST {
            lines.push(format!("... ({} in all)", others.len()));
        }
        return Err(ProbeError::Line { kernel: kernel.name.clone(), line: wanted.to_string(), lines });
    }
    Ok(positions)
}

/// The positions of the accesses to shared memory at a place.
pub(crate) fn shared_at(kernel: &Kernel, place: &Place) -> Vec<usize> {
    let is_there = |instruction: &ptx::Instruction| {
        let location = kernel.user_location(instruction);
        location.is_some_and(|location| {
            location.line == place.line && kernel.files.get(location.file as usize) == Some(&place.file)
        })
    };
    let all = kernel.instructions().enumerate();
    let wanted =
        all.filter(|(_, one)| is_by_lane(one) && Access::of(one).is_some_and(Access::is_shared) && is_there(one));
    wanted.map(|(position, _)| position).collect()
}

/// What the watched instructions of a launch accessed, costliest first.
pub(crate) fn explain(launch: &LaunchEvidence, gpu: &Gpu, sources: &mut Sources) -> Vec<Explanation> {
    let mut explanations: Vec<Explanation> = Vec::new();
    for watched in &launch.report.watched {
        let Some(instruction) = launch.kernel.instructions().nth(watched.position) else { continue };
        let Some(kind) = Access::of(instruction) else { continue };
        let element = instruction.ty().map_or(WORD as u32, ptx::Type::bytes);
        for part in &watched.merged {
            let Some(first) = watched.shapes.first().map(|shape| moved(shape, part)) else { continue };
            let executions = watched.shapes.iter().map(|shape| shape.executions).sum();
            let place = launch.place(instruction);
            let mut explanation = Explanation {
                text: sources.line(&place).map(str::to_owned),
                file: place.file,
                line: place.line,
                access: name(kind).into(),
                instruction: launch.kernel.instruction_text(instruction),
                instructions: 1,
                bytes: part.bytes,
                executions,
                patterns: watched.shapes.len(),
                more_patterns: watched.shapes.len() > KEPT,
                addresses: (0..32).map(|lane| (first.active >> lane & 1 == 1).then(|| first.addresses[lane])).collect(),
                cost: 0,
                ideal: 0,
                phases: Vec::new(),
                reasons: Vec::new(),
                remedies: Vec::new(),
            };
            match kind {
                Access::SharedLoad => shared(&mut explanation, &first, BankRule::loads(gpu.sm), element),
                // A row of a matrix is what a lane names, eight rows make a phase; none are packed.
                Access::MatrixLoad | Access::MatrixStore => shared(&mut explanation, &first, BankRule::Phases, element),
                Access::SharedStore | Access::SharedAtomic => {
                    shared(&mut explanation, &first, BankRule::stores(gpu.sm), element)
                }
                _ => global(&mut explanation, &first),
            }
            match explanations.iter_mut().find(|other| is_alike(other, &explanation)) {
                Some(other) => {
                    other.instructions += 1;
                    other.executions += executions;
                }
                None => explanations.push(explanation),
            }
        }
    }
    explanations.sort_by_key(|one| std::cmp::Reverse(one.executions * u64::from(one.cost)));
    explanations
}

fn name(access: Access) -> &'static str {
    match access {
        Access::GlobalLoad => "global load",
        Access::GlobalStore => "global store",
        Access::GlobalAtomic => "global atomic",
        Access::SharedLoad => "shared load",
        Access::SharedStore => "shared store",
        Access::SharedAtomic => "shared atomic",
        Access::Copy => "copy",
        Access::BulkLoad => "bulk load",
        Access::BulkStore => "bulk store",
        Access::MatrixLoad => "shared matrix load",
        Access::MatrixStore => "shared matrix store",
    }
}

fn moved(shape: &Shape, part: &Part) -> Shape {
    let addresses = shape.addresses.map(|address| address.wrapping_add_signed(part.offset.into()));
    Shape { addresses, ..shape.clone() }
}

/// Whether two accesses have the same distances between lanes, and cost the same.
fn is_alike(a: &Explanation, b: &Explanation) -> bool {
    let distances = |one: &Explanation| -> Vec<Option<u64>> {
        let first = one.addresses.iter().flatten().next().copied().unwrap_or(0);
        one.addresses.iter().map(|address| address.map(|address| address.wrapping_sub(first))).collect()
    };
    (&a.access, a.bytes, a.cost, a.ideal) == (&b.access, b.bytes, b.cost, b.ideal) && distances(a) == distances(b)
}

/// The words on each bank, of lanes that are served together, each with the lanes that want it.
fn words_by_bank(shape: &Shape, lanes: &[usize], bytes: u32) -> BTreeMap<u64, BTreeMap<u64, Vec<usize>>> {
    let mut banks = BTreeMap::<u64, BTreeMap<u64, Vec<usize>>>::new();
    for &lane in lanes {
        let first = shape.addresses[lane] / WORD;
        for word in first..first + u64::from(bytes).div_ceil(WORD) {
            banks.entry(word % BANKS).or_default().entry(word).or_default().push(lane);
        }
    }
    banks
}

fn wavefronts(addresses: &[u64; 32], active: u32, bytes: u32, rule: BankRule) -> banks::Wavefronts {
    banks::wavefronts(&addresses.map(|address| address as u32), active, bytes, rule)
}

fn shared(explanation: &mut Explanation, shape: &Shape, rule: BankRule, element: u32) {
    let bytes = explanation.bytes;
    let passes = wavefronts(&shape.addresses, shape.active, bytes, rule);
    (explanation.cost, explanation.ideal) = (passes.count, passes.ideal);
    for lanes in banks::phases(&shape.addresses.map(|address| address as u32), shape.active, bytes, rule) {
        let words = words_by_bank(shape, &lanes, bytes);
        // Of several equally full banks the lowest.
        let fullest = words.iter().min_by_key(|(bank, words)| (std::cmp::Reverse(words.len()), **bank));
        let Some((&fullest, on_it)) = fullest else { continue };
        let colliding: BTreeSet<usize> = on_it.values().flatten().copied().collect();
        explanation.phases.push(Phase {
            banks: lanes.iter().map(|&lane| shape.addresses[lane] / WORD % BANKS).collect(),
            wavefronts: on_it.len() as u32,
            fullest,
            colliding: colliding.into_iter().collect(),
            lanes,
        });
    }
    explanation.reasons = shared_reasons(explanation, shape);
    if explanation.cost > explanation.ideal {
        explanation.remedies = remedies(explanation, shape, rule, element);
    }
}

fn shared_reasons(explanation: &Explanation, shape: &Shape) -> Vec<String> {
    let Explanation { bytes, cost, ideal, phases, .. } = explanation;
    let lanes: Vec<usize> = shape.lanes().collect();
    let distinct: BTreeSet<u64> = lanes.iter().map(|&lane| shape.addresses[lane]).collect();
    let banks: BTreeSet<u64> = distinct.iter().map(|address| address / WORD % BANKS).collect();
    let on_banks = match banks.len() {
        1 => format!("{} on bank {}", if distinct.len() == 1 { "" } else { "all" }, list(&banks)).trim().to_owned(),
        count if count <= 8 => format!("on banks {}", list(&banks)),
        count => format!("on {count} banks"),
    };
    let mut reasons = vec![format!(
        "{} lane{} of {bytes} bytes have {} distinct base address{}, {on_banks}.",
        lanes.len(),
        if lanes.len() == 1 { "" } else { "s" },
        distinct.len(),
        if distinct.len() == 1 { "" } else { "es" },
    )];
    if phases.len() as u32 != 1 {
        reasons.push(format!("They are served in {} phases.", phases.len()));
    }
    let Some(worst) = phases.iter().rev().max_by_key(|phase| phase.wavefronts) else { return reasons };
    if cost == ideal {
        reasons.push("In no phase do two lanes want different words of a bank: nothing is lost.".into());
        return reasons;
    }
    let same = phases.iter().filter(|phase| phase.wavefronts == worst.wavefronts).count();
    reasons.push(format!(
        "Lanes {} want {} different words of bank {}, one after the other: {} wavefronts where 1 would do{}.",
        ranges(&worst.colliding),
        worst.wavefronts,
        worst.fullest,
        worst.wavefronts,
        if same > 1 { format!(", and so in {same} phases") } else { String::new() },
    ));
    reasons.push(match step(shape, &worst.lanes) {
        Some(step) => step_reason(step),
        None => {
            let pitch = pitch(shape, worst);
            format!(
                "Their addresses are multiples of {pitch} bytes apart, which is {} turns through all 32 banks.",
                pitch / (WORD * BANKS)
            )
        }
    });
    reasons
}

/// The distance from one distinct address to the next, in the order of the lanes, where it is always the same.
fn step(shape: &Shape, lanes: &[usize]) -> Option<i64> {
    let mut addresses: Vec<u64> = lanes.iter().map(|&lane| shape.addresses[lane]).collect();
    addresses.dedup();
    let mut steps = addresses.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]) as i64);
    let first = steps.next()?;
    steps.all(|step| step == first).then_some(first)
}

fn step_reason(step: i64) -> String {
    let banks = step.unsigned_abs() / WORD;
    let turn = BANKS / gcd(banks, BANKS);
    let step = step.unsigned_abs();
    if !step.is_multiple_of(WORD) {
        return format!("Lanes step by {step} bytes.");
    }
    match turn {
        1 => format!("Lanes step by {step} bytes = {banks} banks, so all fall on the same bank."),
        turn => format!(
            "Lanes step by {step} bytes = {banks} bank{}, so each {} lanes come back to the same bank.",
            if banks == 1 { "" } else { "s" },
            turn
        ),
    }
}

/// What divides the distances between the words that collide: the length of a row, in bytes.
fn pitch(shape: &Shape, phase: &Phase) -> u64 {
    let words = words_by_bank(shape, &phase.lanes, WORD as u32);
    // By the first word of each lane where several lanes meet on one; by any word of theirs else.
    let most = words.values().max_by_key(|words| words.len()).filter(|words| words.len() > 1);
    let of_lanes: Vec<u64> = match most {
        Some(words) => words.keys().map(|word| word * WORD).collect(),
        None => phase.colliding.iter().map(|&lane| shape.addresses[lane]).collect(),
    };
    let first = of_lanes.first().copied().unwrap_or(0);
    let divisor = of_lanes.iter().fold(0, |divisor, &address| gcd(divisor, address.abs_diff(first)));
    divisor.max(WORD * BANKS)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What other layouts of the same tile would take.
fn remedies(explanation: &Explanation, shape: &Shape, rule: BankRule, element: u32) -> Vec<Remedy> {
    let Some(worst) = explanation.phases.iter().rev().max_by_key(|phase| phase.wavefronts) else { return Vec::new() };
    let (pitch, bytes) = (pitch(shape, worst), explanation.bytes);
    let count =
        |layout: &dyn Fn(u64) -> u64, bytes| wavefronts(&shape.addresses.map(layout), shape.active, bytes, rule).count;
    let mut remedies = Vec::new();
    for pad in [4, 8, 16] {
        let padded = |address: u64| address + address / pitch * pad;
        remedies.push(Remedy {
            layout: format!("{pad} bytes of padding after each {pitch}"),
            wavefronts: pad.is_multiple_of(bytes.into()).then(|| count(&padded, bytes)),
        });
    }
    let swizzled = |address: u64| address ^ (address / pitch % 8) << 4;
    remedies.push(Remedy {
        layout: format!("16-byte chunks exclusive-ored with the row (of {pitch} bytes) modulo 8"),
        wavefronts: Some(count(&swizzled, bytes)),
    });
    // Element (row, column) lies where (column, row) was: what one lane reads along a row is then in as many rows.
    let element = element.clamp(1, bytes);
    let first_row = shape.lanes().map(|lane| shape.addresses[lane] / pitch).min().unwrap_or(0);
    let last_row = shape.lanes().map(|lane| shape.addresses[lane] / pitch).max().unwrap_or(0);
    let rows = (last_row - first_row + 1).next_multiple_of(BANKS);
    let width = u64::from(element);
    let parts = u64::from(bytes / element);
    let transposed = |part: u64| {
        let address = move |address: u64| {
            let (row, column) = ((address / pitch).saturating_sub(first_row), address % pitch / width + part);
            (column * rows + row) * width
        };
        count(&address, element)
    };
    remedies.push(Remedy {
        layout: match parts {
            1 => "the tile transposed, so that lanes walk along a row".into(),
            _ => format!("the tile transposed, so that lanes walk along a row ({parts} accesses of {element} bytes)"),
        },
        wavefronts: Some((0..parts).map(transposed).sum()),
    });
    remedies
}

fn global(explanation: &mut Explanation, shape: &Shape) {
    let bytes = u64::from(explanation.bytes);
    let distinct: BTreeSet<u64> = shape.lanes().map(|lane| shape.addresses[lane]).collect();
    let sectors: BTreeSet<u64> =
        distinct.iter().flat_map(|address| address / SECTOR..=(address + bytes - 1) / SECTOR).collect();
    let wanted = distinct.len() as u64 * bytes;
    let ideal = wanted.div_ceil(SECTOR);
    (explanation.cost, explanation.ideal) = (sectors.len() as u32, ideal as u32);
    let lanes: Vec<usize> = shape.lanes().collect();
    explanation.reasons.push(format!(
        "{} lanes of {bytes} bytes want {wanted} distinct bytes: {} sectors of 32 bytes where {ideal} would hold them.",
        lanes.len(),
        sectors.len(),
    ));
    if explanation.cost == explanation.ideal {
        return;
    }
    let first = distinct.first().copied().unwrap_or(0);
    explanation.reasons.push(match step(shape, &lanes) {
        Some(step) if step.unsigned_abs() == bytes => {
            format!("The lanes' addresses follow each other but begin {} bytes into a sector.", first % SECTOR)
        }
        Some(step) => format!(
            "Lanes step by {} bytes: of each sector {} bytes are used.",
            step.unsigned_abs(),
            (wanted / sectors.len().max(1) as u64).min(SECTOR)
        ),
        None => "The lanes' addresses have no common step.".into(),
    });
}

/// `0-7, 9 and 11`.
fn ranges(lanes: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &lane in lanes {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == lane => *last = lane,
            _ => runs.push((lane, lane)),
        }
    }
    list(
        runs.into_iter().map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(bytes: u32, address: impl Fn(u64) -> u64) -> Explanation {
        let mut explanation = Explanation {
            file: String::new(),
            line: 1,
            text: None,
            access: "shared load".into(),
            instruction: String::new(),
            instructions: 1,
            bytes,
            executions: 1,
            patterns: 1,
            more_patterns: false,
            addresses: Vec::new(),
            cost: 0,
            ideal: 0,
            phases: Vec::new(),
            reasons: Vec::new(),
            remedies: Vec::new(),
        };
        let shape =
            Shape { addresses: std::array::from_fn(|lane| address(lane as u64)), active: u32::MAX, executions: 1 };
        shared(&mut explanation, &shape, BankRule::Packed, 4);
        explanation
    }

    fn would_take(explanation: &Explanation) -> Vec<Option<u32>> {
        explanation.remedies.iter().map(|remedy| remedy.wavefronts).collect()
    }

    #[test]
    fn a_column_of_a_tile_is_one_bank() {
        let column = explained(4, |lane| 128 * lane + 12);
        assert_eq!((column.cost, column.ideal), (32, 1));
        assert_eq!(
            column.reasons,
            [
                "32 lanes of 4 bytes have 32 distinct base addresses, all on bank 3.",
                "Lanes 0-31 want 32 different words of bank 3, one after the other: 32 wavefronts where 1 would do.",
                "Lanes step by 128 bytes = 32 banks, so all fall on the same bank."
            ]
        );
        // 4 bytes of padding cure it, more do so in part; the swizzle moves 16-byte chunks, of which a row has 8.
        assert_eq!(would_take(&column), [Some(1), Some(2), Some(4), Some(4), Some(1)]);
    }

    #[test]
    fn wide_loads_down_a_column_collide_in_each_phase() {
        let column = explained(16, |lane| 128 * lane);
        assert_eq!((column.cost, column.ideal, column.phases.len()), (32, 4, 4));
        assert_eq!(column.phases[1].lanes, (8..16).collect::<Vec<_>>());
        assert_eq!((column.phases[1].wavefronts, column.phases[1].fullest), (8, 0));
        // Padding that would break the alignment is none; the swizzle cures it.
        assert_eq!(would_take(&column), [None, None, Some(4), Some(4), Some(4)]);
    }

    #[test]
    fn half_rows_come_back_every_second_lane() {
        let column = explained(4, |lane| 64 * lane);
        assert_eq!((column.cost, column.ideal), (16, 1));
        assert_eq!(
            column.reasons[1],
            "Lanes 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28 and 30 want 16 different words of bank 0, one after the other: 16 wavefronts where 1 would do."
        );
        assert_eq!(column.reasons[2], "Lanes step by 64 bytes = 16 banks, so each 2 lanes come back to the same bank.");
        assert_eq!(would_take(&column)[0], Some(1));
    }

    #[test]
    fn a_row_loses_nothing() {
        let row = explained(4, |lane| 4 * lane);
        assert_eq!((row.cost, row.ideal), (1, 1));
        assert!(row.remedies.is_empty() && row.reasons[1].contains("nothing is lost"));
        let broadcast = explained(16, |_| 64);
        assert_eq!(broadcast.reasons[0], "32 lanes of 16 bytes have 1 distinct base address, on bank 16.");
    }
}
