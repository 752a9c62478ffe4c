//! What one stratum's counters say against another's, on the same problem and GPU, and one record's against another's of its key.

use std::collections::BTreeSet;

use emulator::Level;
use thiserror::Error;

use crate::evidence::Evidence;
use crate::figures::{bytes, count, list, percent, time, times};
use crate::findings::Finding;
use crate::key::{AnyRecord, Differing, Figure};

/// A name, its value before and after, and how it is written.
type Measure = (&'static str, u64, u64, fn(u64) -> String);

/// Ratios nearer to 1 than this are not spoken of.
const SPOKEN: f64 = 1.1;

/// Two pieces of evidence, or records, that must not be put in one ratio.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{before} and {after} are incomparable: {}", list(differing))]
pub struct Incomparable {
    before: String,
    after: String,
    /// Why.
    pub differing: Vec<Differing>,
}

/// One figure of two records.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// In the first; `None` where it has none.
    pub before: Option<Figure>,
    /// In the second.
    pub after: Option<Figure>,
}

impl Compared {
    /// `after / before - 1`; `None` where one is missing, or the first is zero and the second is not.
    pub fn change(&self) -> Option<f64> {
        match (self.before?.value, self.after?.value) {
            (before, after) if before == after => Some(0.0),
            (0.0, _) => None,
            (before, after) => Some(after / before - 1.0),
        }
    }
}

/// Every figure of two records of one key, by name; those that are zero in both are left out.
///
/// # Errors
/// When the keys differ.
pub fn compare(before: &AnyRecord, after: &AnyRecord) -> Result<Vec<Compared>, Incomparable> {
    let differing = before.key.differing(&after.key);
    if !differing.is_empty() {
        let (before, after) = (before.key.subject.clone(), after.key.subject.clone());
        return Err(Incomparable { before, after, differing });
    }
    let (old, new) = (before.figures(), after.figures());
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let compared = names.into_iter().map(|name| Compared {
        name: name.clone(),
        before: old.get(name).copied(),
        after: new.get(name).copied(),
    });
    let zero = |figure: Option<Figure>| figure.is_none_or(|figure| figure.value == 0.0);
    Ok(compared.filter(|one| !(zero(one.before) && zero(one.after))).collect())
}

/// The ids of findings that only the first has, and that only the second has.
pub fn moved_findings(before: &[Finding], after: &[Finding]) -> (Vec<String>, Vec<String>) {
    let ids = |findings: &[Finding]| findings.iter().map(|finding| finding.id.clone()).collect::<BTreeSet<_>>();
    let (before, after) = (ids(before), ids(after));
    (before.difference(&after).cloned().collect(), after.difference(&before).cloned().collect())
}

/// What `after` changed with respect to `before`, in sentences; findings are those of each.
///
/// # Errors
/// When problem, type or GPU differ.
pub fn transition(
    (before, of_before): (&Evidence, &[Finding]),
    (after, of_after): (&Evidence, &[Finding]),
) -> Result<Vec<String>, Incomparable> {
    let keys = [
        ("the problem", problem(before), problem(after)),
        ("the GPU", before.gpu.name.to_string(), after.gpu.name.to_string()),
    ];
    let differing = keys.into_iter().filter(|(_, before, after)| before != after);
    let differing: Vec<Differing> =
        differing.map(|(field, before, after)| Differing { field: field.into(), before, after }).collect();
    if !differing.is_empty() {
        let (before, after) = (before.stratum.clone(), after.stratum.clone());
        return Err(Incomparable { before, after, differing });
    }

    let mut said = vec![time_change(before, after)];
    said.extend(preparation(before, after));
    let (old, new) = (before.counters(Level::Merged), after.counters(Level::Merged));
    let (old_bytes, new_bytes) = (before.traffic(), after.traffic());
    let (old_dram, new_dram) = (before.dram(), after.dram());
    let measures: [Measure; 8] = [
        (
            "distinct bytes",
            old_bytes.unique_read + old_bytes.unique_written,
            new_bytes.unique_read + new_bytes.unique_written,
            bytes,
        ),
        ("DRAM reads (modelled)", old_dram.read, new_dram.read, bytes),
        ("DRAM writes (modelled)", old_dram.written, new_dram.written, bytes),
        ("requested reads", old_bytes.requested_read, new_bytes.requested_read, bytes),
        ("requested writes", old_bytes.requested_written, new_bytes.requested_written, bytes),
        (
            "shared-memory wavefronts",
            old.shared_load_wavefronts + old.shared_store_wavefronts,
            new.shared_load_wavefronts + new.shared_store_wavefronts,
            count,
        ),
        (
            "bank conflicts",
            old.shared_load_bank_conflicts + old.shared_store_bank_conflicts,
            new.shared_load_bank_conflicts + new.shared_store_bank_conflicts,
            count,
        ),
        ("warp instructions", old.warp_instructions, new.warp_instructions, count),
    ];
    let changes: Vec<String> =
        measures.into_iter().filter_map(|(name, old, new, unit)| change(name, old, new, unit)).collect();
    if !changes.is_empty() {
        said.push(format!("{}.", capital(&changes.join("; "))));
    }
    if let (Some(old), Some(new)) = (before.main_launch(), after.main_launch()) {
        let (old_pct, new_pct) = (old.occupancy.theoretical_pct, new.occupancy.theoretical_pct);
        if (old_pct - new_pct).abs() > 0.05 {
            said.push(format!("Occupancy goes from {old_pct:.1} % to {new_pct:.1} %."));
        }
        if old.model.limiter != new.model.limiter {
            said.push(format!("The limiter moves from {} to {}.", old.model.limiter, new.model.limiter));
        }
    }
    let (gone, new) = moved_findings(of_before, of_after);
    said.extend(moved("Gone", &gone));
    said.extend(moved("New", &new));
    Ok(said)
}

fn problem(evidence: &Evidence) -> String {
    evidence.problem.as_ref().map_or_else(|| "unknown".into(), ToString::to_string)
}

fn time_change(before: &Evidence, after: &Evidence) -> String {
    let (old, new) = (before.seconds(), after.seconds());
    let verdict = if old.max(new) <= 0.0 || (old / new - 1.0).abs() < 0.005 {
        "no change".to_string()
    } else if old > new {
        format!("{} faster", times(old / new))
    } else {
        format!("{} slower", times(new / old))
    };
    format!("Modelled time {} -> {}: {verdict}.", time(old), time(new))
}

/// Launches beside the main one that the stratum before does not have.
fn preparation(before: &Evidence, after: &Evidence) -> Option<String> {
    let main = after.main_launch()?;
    let known = |name: &str| before.launches.iter().any(|launch| launch.kernel.name == name);
    let added: Vec<_> =
        after.launches.iter().filter(|launch| !std::ptr::eq(*launch, main) && !known(&launch.kernel.name)).collect();
    if added.is_empty() || before.launches.len() >= after.launches.len() {
        return None;
    }
    let seconds: f64 = added.iter().map(|launch| launch.model.seconds).sum();
    let moved: u64 = added.iter().map(|launch| launch.model.dram.read + launch.model.dram.written).sum();
    let without = after.seconds() - seconds;
    Some(format!(
        "Of that, {} takes {} and moves {}; without it {} would take {}, {} of {}.",
        list(added.iter().map(|launch| format!("`{}`", launch.kernel.name))),
        time(seconds),
        bytes(moved),
        after.stratum,
        time(without),
        percent(without / before.seconds()),
        before.stratum,
    ))
}

fn change(name: &str, old: u64, new: u64, unit: fn(u64) -> String) -> Option<String> {
    let (from, to) = (unit(old), unit(new));
    match (old, new) {
        (0, 0) => None,
        (0, _) => Some(format!("{name} appear: {to}")),
        (_, 0) => Some(format!("{name} vanish: {from} before")),
        _ => {
            let ratio = old as f64 / new as f64;
            if ratio >= SPOKEN {
                Some(format!("{name} fall {} ({from} -> {to})", times(ratio)))
            } else if ratio <= 1.0 / SPOKEN {
                Some(format!("{name} grow {} ({from} -> {to})", times(1.0 / ratio)))
            } else {
                None
            }
        }
    }
}

fn moved(how: &str, ids: &[String]) -> Option<String> {
    (!ids.is_empty()).then(|| format!("{how}: {}.", list(ids)))
}

fn capital(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().collect::<String>() + characters.as_str()).unwrap_or_default()
}
