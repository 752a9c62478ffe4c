//! Whether code is as good as it was: records against a baseline's, or two builds against each other.
//!
//! A pair of records is judged figure by figure: what is counted exactly may not change at all, a chip's counters by
//! [`Tolerances::hardware`]; a time needs two builds that are timed in turn on one machine ([`against`]), as the time in a file
//! says nothing about today. Records whose keys differ are incomparable.

pub mod against;
mod baseline;
mod config;
mod measure;

use serde::Serialize;

pub use baseline::{Acceptance, Baseline};
pub use config::{DigCase, GateConfig, GateConfigError, TimeCase, Tolerances};
pub use measure::{MeasureError, measure};

use crate::compare::{Compared, compare};
use crate::key::{AnyRecord, Differing, Figure, Key, Kind};

/// What a gate says, from the least to the most that stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it was.
    Pass,
    /// Better, and nothing worse.
    Improved,
    /// Too few samples, or nothing to compare a time with.
    Insufficient,
    /// Another configuration.
    Incomparable,
    /// Worse.
    Regressed,
}

impl Verdict {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Improved => "improved",
            Self::Insufficient => "insufficient",
            Self::Incomparable => "incomparable",
            Self::Regressed => "regressed",
        }
    }

    /// The exit status: 0 when nothing stands in the way, 1 when something is worse, 3 when that cannot be said.
    pub const fn status(self) -> u8 {
        match self {
            Self::Pass | Self::Improved => 0,
            Self::Regressed => 1,
            Self::Incomparable | Self::Insufficient => 3,
        }
    }
}

/// One figure, judged.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JudgedFigure {
    /// Its name.
    pub name: String,
    /// In the baseline.
    pub before: Option<f64>,
    /// Now.
    pub after: Option<f64>,
    /// `after / before - 1`; `null` where the one is zero and the other is not, or one is missing.
    pub change: Option<f64>,
    /// Of a time: where the change lies with a probability of 95 %.
    pub interval: Option<[f64; 2]>,
    /// The change that is allowed, either way.
    pub tolerance: f64,
    /// What follows.
    pub verdict: Verdict,
}

/// One record, judged.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// What it is of.
    pub key: Key,
    /// The worst of its figures'.
    pub verdict: Verdict,
    /// The fields in which the nearest record of the baseline has another configuration.
    pub differing: Vec<Differing>,
    /// What else there is to say.
    pub note: Option<String>,
    /// The figures that are not as they were, or all that could not be judged.
    pub figures: Vec<JudgedFigure>,
}

/// All that was judged.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gated {
    /// The worst.
    pub verdict: Verdict,
    /// Each record.
    pub records: Vec<Judged>,
}

impl Gated {
    /// The verdict on all; on nothing there is none but that it does not suffice.
    pub fn of(records: Vec<Judged>) -> Self {
        let verdict = records.iter().map(|judged| judged.verdict).max().unwrap_or(Verdict::Insufficient);
        Self { verdict, records }
    }

    /// How many records have a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.records.iter().filter(|judged| judged.verdict == verdict).count()
    }
}

/// Judges records by those of a baseline.
pub fn gate(baseline: &[AnyRecord], current: &[AnyRecord], tolerances: &Tolerances) -> Gated {
    let mut left: Vec<&AnyRecord> = baseline.iter().collect();
    let mut pairs: Vec<(&AnyRecord, Option<&AnyRecord>)> = Vec::new();
    for record in current {
        let same = left.iter().position(|before| before.key == record.key);
        pairs.push((record, same.map(|index| left.remove(index))));
    }
    // What has no partner of its key gets the nearest of its name, so that the difference can be named.
    for (record, before) in pairs.iter_mut().filter(|(_, before)| before.is_none()) {
        let of_name = left.iter().enumerate().filter(|(_, before)| before.key.subject == record.key.subject);
        let nearest = of_name.min_by_key(|(_, before)| before.key.differing(&record.key).len());
        *before = nearest.map(|(index, _)| index).map(|index| left.remove(index));
    }
    let alone = |record: &AnyRecord, note: &str| Judged {
        key: record.key.clone(),
        verdict: Verdict::Incomparable,
        differing: Vec::new(),
        note: Some(note.into()),
        figures: Vec::new(),
    };
    let judged = pairs.into_iter().map(|(record, before)| match before {
        Some(before) => judge(before, record, tolerances),
        None => alone(record, "not in the baseline"),
    });
    let missing = left.iter().map(|before| alone(before, "in the baseline, and not measured now"));
    Gated::of(judged.chain(missing.collect::<Vec<_>>()).collect())
}

/// Judges a record by another.
fn judge(before: &AnyRecord, after: &AnyRecord, tolerances: &Tolerances) -> Judged {
    let key = after.key.clone();
    let compared = match compare(before, after) {
        Ok(compared) => compared,
        Err(incomparable) => {
            let (verdict, differing) = (Verdict::Incomparable, incomparable.differing);
            return Judged { key, verdict, differing, note: None, figures: Vec::new() };
        }
    };
    let ignored = |name: &str| tolerances.ignore.iter().any(|ignored| ignored == name);
    let wavefronts = before.figures();
    let figures = compared.iter().filter(|one| !ignored(&one.name)).map(|one| {
        // A chip counts some conflicts that are none: they are seen against the wavefronts that they are among.
        let among = one.name.strip_suffix("_bank_conflicts").map(|access| format!("{access}_wavefronts"));
        let among = among.and_then(|name| wavefronts.get(&name)).filter(|figure| figure.kind == Kind::Hardware);
        figure(one, among.map(|figure| figure.value), tolerances)
    });
    let figures: Vec<JudgedFigure> = figures.filter(|figure| figure.verdict != Verdict::Pass).collect();
    let verdict = figures.iter().map(|figure| figure.verdict).max().unwrap_or(Verdict::Pass);
    let note = figures.iter().any(|figure| figure.verdict == Verdict::Insufficient).then(|| TIME_NOTE.into());
    Judged { key, verdict, differing: Vec::new(), note, figures }
}

const TIME_NOTE: &str = "a time in a file cannot be judged: `strata gate --against BINARY` times two builds in turn";

fn figure(compared: &Compared, among: Option<f64>, tolerances: &Tolerances) -> JudgedFigure {
    let either = compared.before.or(compared.after);
    let (kind, more_is_better) = either.map_or((Kind::Exact, false), |figure| (figure.kind, figure.more_is_better));
    let tolerance = tolerances.of(&compared.name, kind);
    // What an exact counter does not list did not happen; a chip's counter that is not there was not read.
    let value = |figure: Option<Figure>| match kind {
        Kind::Exact => Some(figure.map_or(0.0, |figure| figure.value)),
        Kind::Hardware | Kind::Time => figure.map(|figure| figure.value),
    };
    let (before, after) = (value(compared.before), value(compared.after));
    let change = match (before, after) {
        (Some(before), Some(after)) if before == after => Some(0.0),
        (Some(before), Some(after)) => {
            Some((after - before) / among.unwrap_or(before)).filter(|change| change.is_finite())
        }
        _ => None,
    };
    let verdict = match (kind, before, after) {
        (Kind::Time, ..) => Verdict::Insufficient,
        (_, Some(before), Some(after)) => {
            let within = change.is_some_and(|change| change.abs() <= tolerance);
            match () {
                () if within => Verdict::Pass,
                () if (after > before) == more_is_better => Verdict::Improved,
                () => Verdict::Regressed,
            }
        }
        _ => Verdict::Incomparable,
    };
    JudgedFigure { name: compared.name.clone(), before, after, change, interval: None, tolerance, verdict }
}

#[cfg(test)]
mod tests;
