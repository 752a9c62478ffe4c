//! The file that a gate compares with: the figures of each record, and who accepted them why.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::atomic_file;
use crate::key::AnyRecord;
use crate::provenance::Provenance;
use crate::record::SCHEMA;
use crate::reference::{self, ReferenceError};
use crate::text_file;

/// What `strata accept` writes: a document of records, which `--json` writes too, with what was accepted when.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Latest last.
    #[serde(default)]
    pub accepted: Vec<Acceptance>,
    /// What is compared with.
    pub records: Vec<AnyRecord>,
}

/// That somebody said: this is how it is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acceptance {
    /// Why.
    pub reason: String,
    /// Seconds since 1970, UTC.
    pub made: i64,
    /// The commit.
    pub revision: Option<String>,
}

/// What of a record a baseline keeps: its key and its figures.
const KEPT: [&str; 15] = [
    "stratum",
    "kernel",
    "gpu",
    "sm",
    "dtype",
    "problem",
    "source",
    "level",
    "tools",
    "tiles",
    "sample",
    "counters",
    "traffic",
    "occupancy",
    "modelled_time_ms",
];

impl Baseline {
    /// Reads a baseline; an empty one where there is no file.
    ///
    /// # Errors
    /// When the file is something else.
    pub fn read(path: &Path) -> Result<Self, ReferenceError> {
        if !path.exists() {
            return Ok(Self { schema: SCHEMA, ..Self::default() });
        }
        let text = text_file::read(path, 1 << 30)?;
        let records = reference::document(path, &text)?.records;
        let refused =
            |error: serde_json::Error| ReferenceError::Document { path: path.into(), reason: error.to_string() };
        let accepted: Value = serde_json::from_str(&text).map_err(refused)?;
        let accepted = Vec::deserialize(&accepted["accepted"]).unwrap_or_default();
        Ok(Self { schema: SCHEMA, accepted, records })
    }

    /// Puts these records in the place of all that were accepted before.
    pub fn accept(&mut self, records: &[AnyRecord], reason: &str) {
        let Provenance { made, revision, .. } = Provenance::now();
        self.accepted.push(Acceptance { reason: reason.into(), made, revision });
        self.records = records.iter().map(slim).collect();
    }

    /// Writes it, at once or not at all.
    ///
    /// # Errors
    /// When the folder cannot be written to or is full; the file is then as it was.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        atomic_file::write(path, &[text.as_bytes()])
    }
}

/// Without what no gate looks at, and without counters that are zero.
fn slim(record: &AnyRecord) -> AnyRecord {
    let mut json = record.json.clone();
    if let Some(members) = json.as_object_mut() {
        members.retain(|name, value| KEPT.contains(&name.as_str()) && !value.is_null());
    }
    for object in ["counters", "traffic"] {
        if let Some(members) = json.get_mut(object).and_then(Value::as_object_mut) {
            members.retain(|_, value| value.as_f64() != Some(0.0));
        }
    }
    AnyRecord { key: record.key.clone(), json }
}
