//! What must be equal of two records before their figures stand in one ratio, and the figures.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use crate::findings::Finding;
use crate::record::{Sampling, TileRecord};

/// What a record is of. The project's revision is no part of it: that is what is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    /// The stratum, or the kernel.
    pub subject: String,
    /// The problem, or the launch.
    pub problem: String,
    /// The storage type; empty when there is none.
    pub dtype: String,
    /// The tile configuration; empty when unknown.
    pub tiles: String,
    /// The board.
    pub gpu: String,
    /// Its architecture.
    pub sm: String,
    /// Versions of foreign tools that had a part in it: `ptxas`, `driver`, `triton`, `ncu`.
    pub tools: BTreeMap<String, String>,
    /// Who counted or timed.
    pub source: String,
    /// At which level.
    pub level: String,
    /// What part of the problem was run, where scaling from it is not exact; else empty.
    pub sample: String,
}

/// A field that two keys differ in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Differing {
    /// Which.
    pub field: String,
    /// Its value in the first.
    pub before: String,
    /// And in the second.
    pub after: String,
}

impl fmt::Display for Differing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &str| if value.is_empty() { "none".to_string() } else { value.to_string() };
        write!(f, "{} differs ({}; {})", self.field, shown(&self.before), shown(&self.after))
    }
}

impl Key {
    /// The fields with the names that people are told.
    pub fn fields(&self) -> [(&'static str, String); 10] {
        let tools: Vec<String> = self.tools.iter().map(|(name, version)| format!("{name} {version}")).collect();
        [
            ("the stratum or kernel", self.subject.clone()),
            ("the problem", self.problem.clone()),
            ("the dtype", self.dtype.clone()),
            ("the tile configuration", self.tiles.clone()),
            ("the GPU", self.gpu.clone()),
            ("the architecture", self.sm.clone()),
            ("the toolchain", tools.join(", ")),
            ("the source", self.source.clone()),
            ("the level", self.level.clone()),
            ("the sample", self.sample.clone()),
        ]
    }

    /// Every field that differs.
    pub fn differing(&self, other: &Self) -> Vec<Differing> {
        let pairs = self.fields().into_iter().zip(other.fields());
        let differing = pairs.filter(|((_, before), (_, after))| before != after);
        differing.map(|((field, before), (_, after))| Differing { field: field.into(), before, after }).collect()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}, {}", self.subject, self.gpu, self.problem)?;
        if !self.problem.contains(&self.dtype) {
            write!(f, " {}", self.dtype)?;
        }
        Ok(())
    }
}

/// A record of any command: what it is of, and all that it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct AnyRecord {
    /// What it is of.
    pub key: Key,
    /// The whole record.
    pub json: Value,
}

/// A value that is no record.
#[derive(Debug, Error)]
#[error("no record: {0}")]
pub struct NoRecord(#[from] serde_json::Error);

/// How a figure may be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Counted or modelled: the same code gives the same value.
    Exact,
    /// A counter of a chip.
    Hardware,
    /// Taken by a clock.
    Time,
}

/// One figure of a record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// How much.
    pub value: f64,
    /// How it may be judged.
    pub kind: Kind,
    /// Whether more of it is better; of most less is.
    pub more_is_better: bool,
}

#[derive(Deserialize)]
struct Header {
    #[serde(alias = "kernel")]
    stratum: String,
    problem: String,
    dtype: Option<String>,
    tiles: Option<TileRecord>,
    gpu: String,
    sm: String,
    #[serde(default)]
    tools: BTreeMap<String, String>,
    source: String,
    level: String,
    sample: Option<Sampling>,
}

impl TryFrom<Value> for AnyRecord {
    type Error = NoRecord;

    fn try_from(json: Value) -> Result<Self, NoRecord> {
        let header = Header::deserialize(&json)?;
        let key = Key {
            subject: header.stratum,
            problem: header.problem,
            dtype: header.dtype.unwrap_or_default(),
            tiles: header.tiles.map_or_else(String::new, |tiles| tiles.to_string()),
            gpu: header.gpu,
            sm: header.sm,
            tools: header.tools,
            source: header.source,
            level: header.level,
            sample: header.sample.filter(|sample| !sample.exact).map_or_else(String::new, |sample| sample.to_string()),
        };
        Ok(Self { key, json })
    }
}

impl From<AnyRecord> for Value {
    fn from(record: AnyRecord) -> Self {
        record.json
    }
}

/// Objects of a record whose members are figures.
const OBJECTS: [&str; 3] = ["counters", "traffic", "occupancy"];

impl AnyRecord {
    /// The record of what serialises as one.
    ///
    /// # Errors
    /// When it does not.
    pub fn of<R: Serialize>(record: &R) -> Result<Self, NoRecord> {
        Self::try_from(serde_json::to_value(record)?)
    }

    /// What was counted, modelled and timed, by name. What the problem alone decides is left out.
    pub fn figures(&self) -> BTreeMap<String, Figure> {
        let counted = if self.key.level == "hardware" { Kind::Hardware } else { Kind::Exact };
        let mut figures = BTreeMap::new();
        for object in OBJECTS {
            let Some(members) = self.json.get(object).and_then(Value::as_object) else { continue };
            for (name, value) in members.iter().filter(|(name, _)| !name.starts_with("compulsory")) {
                let Some(value) = value.as_f64() else { continue };
                let more_is_better = matches!(name.as_str(), "theoretical_pct" | "achieved_pct" | "blocks_per_sm");
                let kind = if object == "occupancy" && name != "achieved_pct" { Kind::Exact } else { counted };
                figures.insert(name.clone(), Figure { value, kind, more_is_better });
            }
        }
        for (name, kind) in [("modelled_time_ms", Kind::Exact), ("measured_time_ms", Kind::Time)] {
            if let Some(value) = self.json.get(name).and_then(Value::as_f64) {
                figures.insert(name.into(), Figure { value, kind, more_is_better: false });
            }
        }
        // Settings and the sizes of tiles, not costs.
        figures.retain(|name, _| !matches!(name.as_str(), "threads" | "carveout_kib"));
        figures
    }

    /// A number at the top of the record.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.json.get(name)?.as_f64()
    }

    /// What it suffers from; those that this version cannot read are left out.
    pub fn findings(&self) -> Vec<Finding> {
        let findings = self.json.get("findings").and_then(Value::as_array);
        findings.into_iter().flatten().filter_map(|finding| Finding::deserialize(finding).ok()).collect()
    }
}
