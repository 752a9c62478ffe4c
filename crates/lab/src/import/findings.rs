//! What a profiled kernel suffers from, as far as its counters say. What was not read gives no finding.

use arch::{Feature, Gpu, Target, TensorOperand};

use super::metrics::{FFMA, GMMA, SMS, tensor};
use super::{ProfileRecord, ProfiledLine};
use crate::evidence::Place;
use crate::figures::{bytes, count, list, percent, ratio, times};
use crate::findings::{Finding, Severity, operand_of, shares};
use crate::thresholds::Thresholds;

/// Everything the rules find, in the order of the rules.
pub fn findings(record: &ProfileRecord, thresholds: &Thresholds) -> Vec<Finding> {
    let rules = [
        occupancy,
        grid,
        spills,
        dram_bytes,
        stored_bytes,
        requested_bytes,
        sectors,
        load_conflicts,
        store_conflicts,
        idle_tensor_cores,
        mio,
        copies,
        gmma,
    ];
    rules.into_iter().filter_map(|rule| rule(record, thresholds)).collect()
}

/// What a timeline's record is told in place of findings.
pub const NO_COUNTERS: &str =
    "A timeline has times, no counters: `strata profile` or `ncu` tells why they are what they are.";

fn found(id: &str, text: String) -> Option<Finding> {
    found_at(id, None, text)
}

fn found_at(id: &str, place: Option<Place>, text: String) -> Option<Finding> {
    Some(Finding::new(id, Severity::Warning, place.as_ref(), text))
}

/// The lines that have most of something, as a sentence that begins with `of_what`, empty where none is worth naming; and the first.
fn lines(
    record: &ProfileRecord,
    thresholds: &Thresholds,
    of_what: &str,
    weight: impl Fn(&ProfiledLine) -> u64,
) -> (String, Option<Place>) {
    let mut lines: Vec<_> = record.lines.iter().map(|line| (line, weight(line))).collect();
    lines.retain(|(_, weight)| *weight > 0);
    lines.sort_by_key(|(_, weight)| std::cmp::Reverse(*weight));
    let named = shares(lines.iter().map(|(line, weight)| (Some(line.name()), *weight)), thresholds);
    let sentence = named.map_or_else(String::new, |named| format!(" {of_what} {named}."));
    (sentence, lines.first().map(|(line, _)| line.place()))
}

/// The lines where a sampler found most warps that waited for a reason.
fn waits(record: &ProfileRecord, thresholds: &Thresholds, reason: &str) -> (String, Option<Place>) {
    let counter = format!("stall_{reason}");
    lines(record, thresholds, "Of the warps found so", |line| line.counter(&counter))
}

/// The tensor instruction that takes the type on the architecture; of an unknown type, none.
fn operand(record: &ProfileRecord) -> Option<TensorOperand> {
    let sm = record.architecture()?;
    let operand = operand_of(record.dtype.as_ref()?.parse().ok()?)?;
    Target::best(sm).mma_forms().any(|form| form.operand == operand).then_some(operand)
}

fn whole(value: f64) -> u64 {
    value as u64
}

fn occupancy(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let occupancy = &record.occupancy;
    let theoretical = occupancy.theoretical_pct?;
    if theoretical >= 100.0 * thresholds.occupancy {
        return None;
    }
    let limiter = |name: &String| match (name.as_str(), occupancy.registers, occupancy.shared_bytes) {
        ("registers", Some(registers), _) => format!("registers ({} a thread)", whole(registers)),
        ("shared", _, Some(bytes)) => format!("shared memory ({} bytes a CTA)", count(whole(bytes))),
        ("shared", ..) => "shared memory".into(),
        ("warps" | "blocks", ..) => format!("{} slots", name.trim_end_matches('s')),
        _ => name.clone(),
    };
    let limited = match occupancy.limiters.as_slice() {
        [] => String::new(),
        limiters => format!(", limited by {}", list(limiters.iter().map(limiter))),
    };
    let achieved = occupancy.achieved_pct.map_or_else(String::new, |pct| format!("; {pct:.1} % were reached"));
    let text = format!("{theoretical:.1} % (threshold {:.0} %){limited}{achieved}. ", 100.0 * thresholds.occupancy);
    if record.metric(GMMA).is_some_and(|executed| executed > 0.0) {
        let why =
            "Products by wgmma go on without warps, and copies where the copy engine makes them: few warps suffice.";
        return Some(Finding { severity: Severity::Note, ..found("occupancy", text + why)? });
    }
    let remedy = "With so few warps the latency of loads is hard to hide. Smaller tiles, or fewer registers a thread, let more CTAs run \
                  at once.";
    found("occupancy", text + remedy)
}

fn grid(record: &ProfileRecord, _: &Thresholds) -> Option<Finding> {
    let ctas = record.grid.iter().try_fold(1_u64, |product, extent| product.checked_mul(*extent))?;
    let sms = record.metric(SMS).map(whole).or_else(|| Some(u64::from(Gpu::find(&record.gpu).ok()?.sm_count)))?;
    if ctas == 0 || ctas >= sms {
        return None;
    }
    let text = format!(
        "the grid has {ctas} CTA{} for {sms} SMs, so {} SMs idle. Smaller tiles make more CTAs.",
        if ctas == 1 { "" } else { "s" },
        sms - ctas
    );
    found("grid-too-small", text)
}

fn spills(record: &ProfileRecord, _: &Thresholds) -> Option<Finding> {
    let accesses: f64 = ["local_load_instructions", "local_store_instructions"]
        .iter()
        .filter_map(|name| record.counters.get(*name))
        .sum();
    if accesses == 0.0 {
        return None;
    }
    let text = format!(
        "{} warp instructions access local memory (threshold 0): registers do not suffice, or an array is indexed by what is no \
         constant. Smaller tiles or more threads leave each thread fewer accumulators.",
        count(whole(accesses))
    );
    found("spills", text)
}

fn dram_bytes(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let (read, written) = (record.traffic.get("dram_read")?, record.traffic.get("dram_written")?);
    let compulsory = record.compulsory_bytes?;
    let ratio = (read + written) / compulsory.max(1) as f64;
    if ratio <= thresholds.bytes {
        return None;
    }
    let (lines, place) = lines(record, thresholds, "Of the sectors asked for", |line| line.of_all("global", "sectors"));
    let text = format!(
        "{} read from DRAM and {} written are {} the compulsory {} (threshold {}): results go through memory, or bytes go by again.{lines} \
         What stays in registers and shared memory until it is finished does not.",
        bytes(whole(*read)),
        bytes(whole(*written)),
        times(ratio),
        bytes(compulsory),
        times(thresholds.bytes),
    );
    found_at("dram-bytes", place, text)
}

/// Bytes of a sector.
const SECTOR: f64 = 32.0;

/// What is stored more often than there are results, be it to L2.
fn stored_bytes(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let stored = SECTOR * record.counters.get("global_store_sectors")?;
    let compulsory = record.compulsory_bytes?;
    let ratio = stored / compulsory.max(1) as f64;
    if ratio <= thresholds.bytes {
        return None;
    }
    let (lines, place) = lines(record, thresholds, "Of the stores", |line| line.counter("global_store_sectors"));
    let text = format!(
        "{} stored to global memory are {} the compulsory {}, inputs included (threshold {}): intermediate results go through memory.{lines} \
         Sums that stay in registers until they are finished are stored once.",
        bytes(whole(stored)),
        times(ratio),
        bytes(compulsory),
        times(thresholds.bytes),
    );
    found_at("stored-bytes", place, text)
}

/// What is loaded again and again, where L2 has it.
fn requested_bytes(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let sectors = |direction: &str| record.counters.get(&format!("global_{direction}_sectors")).copied();
    let (loaded, stored) = (SECTOR * sectors("load")?, SECTOR * sectors("store")?);
    let moved = record.traffic.get("dram_read")? + record.traffic.get("dram_written")?;
    let compulsory = record.compulsory_bytes?;
    let ratio = |bytes: f64| bytes / compulsory.max(1) as f64;
    // Else `dram-bytes` or `stored-bytes` says it.
    let others = ratio(moved).max(ratio(stored));
    if ratio(loaded + stored) <= thresholds.bytes || others > thresholds.bytes {
        return None;
    }
    let (lines, place) = lines(record, thresholds, "Of the sectors asked for", |line| line.of_all("global", "sectors"));
    let text = format!(
        "{} are requested, {} the compulsory {} (threshold {}); {} go to DRAM or come from it.{lines} Every block of queries reads all \
         keys and values that it sees: taller blocks read them less often.",
        bytes(whole(loaded + stored)),
        times(ratio(loaded + stored)),
        bytes(compulsory),
        times(thresholds.bytes),
        bytes(whole(moved)),
    );
    Some(Finding { severity: Severity::Note, ..found_at("requested-bytes", place, text)? })
}

/// Sectors beyond those that the bytes would fill, which only a count by instruction tells.
fn sectors(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let sum = |what: &str| record.lines.iter().map(|line| line.of_all("global", what)).fold(0, u64::saturating_add);
    let (moved, ideal, requests) = (sum("sectors"), sum("sectors_ideal"), sum("requests"));
    if ideal == 0 || ratio(moved, ideal) <= thresholds.sectors {
        return None;
    }
    let excess =
        |line: &ProfiledLine| line.of_all("global", "sectors").saturating_sub(line.of_all("global", "sectors_ideal"));
    let (lines, place) = lines(record, thresholds, "Of the excess", excess);
    let text = format!(
        "a global request moves {:.1} sectors where its bytes would fill {:.1} ({}, threshold {}).{lines} The lanes of a request touch \
         parts of many sectors: neighbouring lanes on neighbouring addresses fill them.",
        ratio(moved, requests),
        ratio(ideal, requests),
        times(ratio(moved, ideal)),
        times(thresholds.sectors),
    );
    found_at("uncoalesced", place, text)
}

fn load_conflicts(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    conflicts(record, thresholds, "load", "bank-conflicts")
}

fn store_conflicts(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    conflicts(record, thresholds, "store", "bank-conflicts-store")
}

fn conflicts(record: &ProfileRecord, thresholds: &Thresholds, direction: &str, id: &str) -> Option<Finding> {
    let counter = |what: &str| record.counters.get(&format!("shared_{direction}_{what}")).copied();
    let (conflicts, wavefronts) = (counter("bank_conflicts")?, counter("wavefronts")?);
    let all: f64 = ["shared_load_wavefronts", "shared_store_wavefronts"]
        .iter()
        .filter_map(|name| record.counters.get(*name))
        .sum();
    if wavefronts <= 0.0
        || conflicts / wavefronts < thresholds.bank_conflicts
        || conflicts / all < thresholds.bank_conflicts
    {
        return None;
    }
    let ways = match counter("instructions").filter(|instructions| *instructions > 0.0) {
        Some(instructions) => format!(
            ": {:.1}-way, where without conflicts {:.2} would do, an excess of {}",
            wavefronts / instructions,
            (wavefronts - conflicts) / instructions,
            times(wavefronts / (wavefronts - conflicts).max(1.0))
        ),
        None => String::new(),
    };
    let remedy = match (operand(record), record.architecture()) {
        (Some(operand), Some(sm)) => format!(
            "On {sm} the products of {operand} belong on the tensor cores, whose ldmatrix reads a swizzled tile without conflicts; \
             storing K transposed is not the remedy here."
        ),
        _ => "A padded or swizzled tile spreads the lanes over the banks; an operand that is read down a column may be stored \
              transposed. `strata probe --line` shows the lanes of a line."
            .into(),
    };
    let excess = format!("shared_{direction}_bank_conflicts");
    let (lines, place) = lines(record, thresholds, "Of the conflicts", |line| line.counter(&excess));
    let text = format!(
        "{} of the wavefronts of shared {direction}s are bank conflicts (threshold {:.0} %){ways}.{lines} {remedy}",
        percent(conflicts / wavefronts),
        100.0 * thresholds.bank_conflicts
    );
    found_at(id, place, text)
}

fn idle_tensor_cores(record: &ProfileRecord, _: &Thresholds) -> Option<Finding> {
    let multiply_adds = record.metric(FFMA)?;
    let tensor: f64 = tensor(record.architecture()).iter().map(|name| record.metric(name)).sum::<Option<f64>>()?;
    let threads: u64 = record.grid.iter().chain(&record.block).product();
    // The softmax alone has some: many a thread are products. Some conversions go through the tensor cores' pipe: of the
    // smallest product each instruction is worth this many multiply-adds, and a few of them are none.
    const PRODUCT: f64 = 512.0;
    if PRODUCT * tensor > 0.01 * multiply_adds || multiply_adds <= 256.0 * threads as f64 {
        return None;
    }
    let sm = record.architecture()?;
    let text = match (operand(record), record.dtype.as_deref()) {
        (Some(operand), _) => format!(
            "{} multiply-adds run on the FMA pipe and next to none on the tensor cores, which do {operand} products on {sm}.",
            count(whole(multiply_adds))
        ),
        // The type decides, and nobody said it.
        (None, None) => format!(
            "{} multiply-adds run on the FMA pipe and next to none on the tensor cores. Were the operands f16{}, the tensor cores of {sm} \
             would take them (--dtype says what they are).",
            count(whole(multiply_adds)),
            if Target::best(sm).supports(Feature::Bf16Mma) { " or bf16" } else { "" }
        ),
        (None, Some(_)) => return None,
    };
    found("idle-tensor-cores", text)
}

/// The queue of memory instructions, which shared accesses and special functions go through.
fn mio(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let stall = |name: &str| record.stalls.get(name).copied();
    let (throttle, scoreboard) = (stall("mio_throttle"), stall("short_scoreboard"));
    let (reason, name, share) = match (throttle, scoreboard) {
        (Some(throttle), Some(scoreboard)) if scoreboard > throttle => {
            ("short_scoreboard", "the short scoreboard", scoreboard)
        }
        (Some(throttle), _) => ("mio_throttle", "the MIO queue", throttle),
        (None, Some(scoreboard)) => ("short_scoreboard", "the short scoreboard", scoreboard),
        (None, None) => return None,
    };
    if share <= thresholds.stall {
        return None;
    }
    let remedy = match operand(record) {
        Some(operand) => format!("Tensor products of {operand} use each word that is loaded for more multiply-adds."),
        None => "Larger register tiles use each word loaded from shared memory for more multiply-adds.".into(),
    };
    let (lines, place) = waits(record, thresholds, reason);
    let text = format!(
        "a warp waits {} of its time for {name} (threshold {:.0} %): shared-memory accesses and special functions go through it faster \
         than they are served.{lines} {remedy}",
        percent(share),
        100.0 * thresholds.stall
    );
    found_at("mio-limited", place, text)
}

/// Warps that wait for what they load themselves.
fn copies(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let share = record.stalls.get("long_scoreboard").copied().filter(|share| *share > thresholds.stall)?;
    let has = |feature| record.architecture().map(|sm| Target::best(sm).supports(feature));
    let remedy = match (has(Feature::Tma), has(Feature::CpAsync)) {
        (Some(true), _) => {
            "A warp of its own that feeds the copy engine, some tiles ahead, leaves the others to compute."
        }
        (_, Some(true)) => "cp.async, some tiles ahead, copies to shared memory while the warps go on.",
        (_, Some(false)) => {
            "Without an asynchronous copy on this architecture, loads that are issued a tile ahead hide a part of it."
        }
        (_, None) => "",
    };
    let (lines, place) = waits(record, thresholds, "long_scoreboard");
    let text = format!(
        "a warp waits {} of its time for global or local memory (threshold {:.0} %): the warps that compute load for \
         themselves.{lines} {remedy}",
        percent(share),
        100.0 * thresholds.stall
    );
    found_at("synchronous-copies", place, text.trim_end().to_owned())
}

fn gmma(record: &ProfileRecord, thresholds: &Thresholds) -> Option<Finding> {
    let share = record.stalls.get("gmma").copied().filter(|share| *share > thresholds.stall)?;
    let text = format!(
        "a warp waits {} of its time for wgmma (threshold {:.0} %). Where ptxas warns that it serialises wgmma, registers of a product \
         in flight are touched; where it does not, softmax of one tile under the product of the next fills the wait.",
        percent(share),
        100.0 * thresholds.stall
    );
    found("wgmma-wait", text)
}
