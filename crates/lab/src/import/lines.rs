//! What each source line of a profiled kernel did, by what a report has of each machine instruction.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::line_table::LineTable;
use super::metrics::STALLS;
use crate::evidence::Place;

/// What one source line did on a chip.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfiledLine {
    /// As the line table names it; empty when unknown.
    pub file: String,
    /// Counted from 1; 0 when unknown.
    pub line: u32,
    /// Where the line is unknown, the machine instruction: its function, and the offset in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruction: Option<String>,
    /// Its text, where the report has the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Counters under the names that the emulator's have, `other` in place of `load` and `store` where it is neither; besides sectors as
    /// the bytes would fill them (`global_load_sectors_ideal`), how often a sampler found a warp there (`samples`), and of these how
    /// often it waited (`stall_mio_throttle`).
    #[serde(flatten)]
    pub counters: BTreeMap<String, u64>,
}

impl ProfiledLine {
    /// A counter, 0 where the line has none of it.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// A counter of loads, stores and others.
    pub fn of_all(&self, space: &str, what: &str) -> u64 {
        let counts = DIRECTIONS.iter().map(|direction| self.counter(&format!("{space}_{direction}_{what}")));
        counts.fold(0, u64::saturating_add)
    }

    /// The line.
    pub fn place(&self) -> Place {
        Place { file: self.file.clone(), line: self.line }
    }

    /// What a finding calls it.
    pub fn name(&self) -> String {
        self.instruction.clone().unwrap_or_else(|| self.place().to_string())
    }
}

const DIRECTIONS: [&str; 3] = ["load", "store", "other"];

/// Per instruction: how often a warp executed it, for how many lanes, and how it accesses memory.
const EXECUTED: &str = "inst_executed";
const THREADS: &str = "thread_inst_executed_true";
const ACCESS: &str = "memory_access_type";
const SAMPLES: &str = "smsp__pcsamp_sample_count";

/// Accesses of a kind: the space, how requests are called, what each costs, and the metrics of the cost and of the smallest possible.
const COSTS: [(&str, &str, &str, &str, &str); 2] = [
    ("shared", "instructions", "wavefronts", "memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal"),
    (
        "global",
        "requests",
        "sectors",
        "memory_l2_theoretical_sectors_global",
        "memory_l2_theoretical_sectors_global_ideal",
    ),
];

fn stall(reason: &str) -> String {
    format!("smsp__pcsamp_warps_issue_stalled_{reason}")
}

/// Whether the values of a metric by instruction are looked at.
pub(super) fn is_wanted(metric: &str) -> bool {
    [EXECUTED, THREADS, ACCESS, SAMPLES].contains(&metric)
        || COSTS.iter().any(|cost| metric == cost.3 || metric == cost.4)
        || STALLS.iter().any(|reason| metric == stall(reason))
}

/// Values of metrics by the address of the instruction.
pub(super) type ByInstruction = BTreeMap<String, BTreeMap<u64, u64>>;

/// A module as a report has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Module {
    /// Where its functions are loaded: their names and the indices of their symbols.
    pub functions: BTreeMap<u64, (String, usize)>,
    pub table: LineTable,
    /// Source files with their text.
    pub files: BTreeMap<String, String>,
}

impl Module {
    /// The line of the instruction at an address, and what the instruction is called.
    fn locate(&self, address: u64) -> (Option<Place>, String) {
        match self.functions.range(..=address).next_back() {
            Some((start, (name, symbol))) => {
                let bytes = address - start;
                (self.table.place(*symbol, bytes), format!("{name}+{bytes:#x}"))
            }
            None => (None, format!("{address:#x}")),
        }
    }
}

/// The lines of a launch, by file and line. Of instructions whose line is unknown there are those that access memory or were sampled.
pub(super) fn lines(values: &ByInstruction, module: &Module) -> Vec<ProfiledLine> {
    let value = |metric: &str, address: u64| values.get(metric)?.get(&address).copied();
    let addresses: BTreeSet<u64> = values.values().flat_map(BTreeMap::keys).copied().collect();
    let mut lines = BTreeMap::<(Place, Option<String>), BTreeMap<String, u64>>::new();
    for address in addresses {
        let mut counted = Vec::new();
        let direction = match value(ACCESS, address) {
            Some(2) => "load",
            Some(4) => "store",
            _ => "other",
        };
        for (space, requests, cost, metric, ideal) in COSTS {
            let Some(moved) = value(metric, address) else { continue };
            let name = |what: &str| format!("{space}_{direction}_{what}");
            counted.push((name(cost), moved));
            counted.extend(value(EXECUTED, address).map(|executed| (name(requests), executed)));
            if let Some(ideal) = value(ideal, address) {
                counted.push((name(&format!("{cost}_ideal")), ideal));
                if space == "shared" {
                    counted.push((name("bank_conflicts"), moved.saturating_sub(ideal)));
                }
            }
        }
        let stalls = STALLS.iter().map(|reason| (format!("stall_{reason}"), value(&stall(reason), address)));
        let sampled = [("samples".to_owned(), value(SAMPLES, address))].into_iter().chain(stalls);
        counted.extend(sampled.filter_map(|(name, value)| Some((name, value.filter(|value| *value > 0)?))));
        let (place, instruction) = module.locate(address);
        let key = match place {
            Some(place) => (place, None),
            None if counted.is_empty() => continue,
            None => (Place::default(), Some(instruction)),
        };
        counted.extend(value(EXECUTED, address).map(|executed| ("warp_instructions".into(), executed)));
        counted.extend(value(THREADS, address).map(|threads| ("thread_instructions".into(), threads)));
        let line = lines.entry(key).or_default();
        for (name, value) in counted {
            let sum = line.entry(name).or_default();
            *sum = sum.saturating_add(value);
        }
    }
    let mut texts = BTreeMap::<&str, Vec<&str>>::new();
    let mut text = |place: &Place| {
        let (name, text) = module.files.get_key_value(&place.file)?;
        let lines = texts.entry(name).or_insert_with(|| text.lines().collect());
        Some(lines.get((place.line as usize).checked_sub(1)?)?.trim().to_owned())
    };
    let line = |((place, instruction), counters): ((Place, Option<String>), BTreeMap<String, u64>)| ProfiledLine {
        text: text(&place),
        file: place.file,
        line: place.line,
        instruction,
        counters,
    };
    lines.into_iter().filter(|(_, counters)| counters.values().any(|value| *value > 0)).map(line).collect()
}

/// The sums over lines; of counters that no line has there are none.
pub(super) fn totals(lines: &[ProfiledLine]) -> BTreeMap<&str, u64> {
    let mut totals = BTreeMap::<&str, u64>::new();
    for (name, value) in lines.iter().flat_map(|line| &line.counters) {
        let sum = totals.entry(name).or_default();
        *sum = sum.saturating_add(*value);
    }
    totals
}
