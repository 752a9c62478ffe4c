//! Where findings begin: numbers that a user may change in a TOML file.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::text_file::{self, TextFileError};

/// A larger file holds no thresholds.
const MOST_BYTES: u64 = 1 << 16;

/// Where findings begin. What a file leaves out stays as it is here.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Thresholds {
    /// Theoretical occupancy below this share is a finding.
    pub occupancy: f64,
    /// Conflicts from this share of the wavefronts on are a finding.
    pub bank_conflicts: f64,
    /// DRAM or requested bytes over this multiple of the compulsory ones are a finding.
    pub bytes: f64,
    /// Sectors over this multiple of those that the bytes asked for would fill are a finding.
    pub sectors: f64,
    /// Divisions over this multiple of the elements of the output are a finding.
    pub divisions: f64,
    /// Bytes that threads copy where something else could, over this share of all, are a finding.
    pub copies: f64,
    /// A stall over this share of the time between two instructions of a warp is a finding.
    pub stall: f64,
    /// A launch with less than this share of the modelled time is not looked at alone.
    pub launch: f64,
    /// A source line with less than this share of what a finding is about is not named.
    pub line: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            occupancy: 0.50,
            bank_conflicts: 0.10,
            bytes: 1.5,
            sectors: 1.5,
            divisions: 1.5,
            copies: 0.5,
            stall: 0.30,
            launch: 0.10,
            line: 0.10,
        }
    }
}

/// A file that holds no thresholds.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum ThresholdsError {
    #[error(transparent)]
    Text(#[from] TextFileError),
    #[error("{}: {reason}", path.display())]
    Toml { path: PathBuf, reason: String },
    #[error("{}: {name} is {value}: it must be {allowed}", path.display())]
    Value { path: PathBuf, name: &'static str, value: f64, allowed: &'static str },
}

impl Thresholds {
    /// Reads a file.
    ///
    /// # Errors
    /// When it holds something else, or a value that is none.
    pub fn read(path: &Path) -> Result<Self, ThresholdsError> {
        let text = text_file::read(path, MOST_BYTES)?;
        let refused = |error: toml::de::Error| ThresholdsError::Toml {
            path: path.into(),
            reason: error.to_string().trim_end().to_owned(),
        };
        let read: Self = toml::from_str(&text).map_err(refused)?;
        let Self { occupancy, bank_conflicts, bytes, sectors, divisions, copies, stall, launch, line } = read;
        let shares = [
            ("occupancy", occupancy),
            ("bank_conflicts", bank_conflicts),
            ("copies", copies),
            ("stall", stall),
            ("launch", launch),
            ("line", line),
        ];
        let multiples = [("bytes", bytes), ("sectors", sectors), ("divisions", divisions)];
        let wrong = |names: &[(&'static str, f64)], most: f64, allowed| {
            let out = names.iter().find(|(_, value)| !(0.0..=most).contains(value));
            out.map(|&(name, value)| ThresholdsError::Value { path: path.into(), name, value, allowed })
        };
        let error = wrong(&shares, 1.0, "a share between 0 and 1");
        match error.or_else(|| wrong(&multiples, f64::MAX, "a multiple, 0 or more")) {
            Some(error) => Err(error),
            None => Ok(read),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_changes_what_it_names() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            let path = folder.path().join("thresholds.toml");
            std::fs::write(&path, text).unwrap();
            Thresholds::read(&path).map_err(|error| error.to_string())
        };
        assert_eq!(read(""), Ok(Thresholds::default()));
        assert_eq!(
            read("occupancy = 0.25\nbytes = 3"),
            Ok(Thresholds { occupancy: 0.25, bytes: 3.0, ..Thresholds::default() })
        );
        for (text, said) in [
            ("ocupancy = 0.25", "unknown field `ocupancy`"),
            ("occupancy = 25", "occupancy is 25: it must be a share between 0 and 1"),
            ("sectors = nan", "sectors is NaN: it must be a multiple"),
            ("occupancy = \"low\"", "invalid type"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
