//! The file that says what a gate measures and how much may change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::key::Kind;
use crate::text_file::{self, TextFileError};

/// A larger file is no configuration.
const MOST_BYTES: u64 = 1 << 20;

/// What is measured, and how much may change.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GateConfig {
    /// How much may change.
    pub tolerance: Tolerances,
    /// Strata that are dug on an emulated GPU.
    pub dig: Vec<DigCase>,
    /// Launch files of kernels that are probed, relative to this file.
    pub probe: Vec<PathBuf>,
    /// Strata that are timed with `--against`.
    pub time: Vec<TimeCase>,
}

/// Changes that are no verdict, as shares.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tolerances {
    /// Of what is counted exactly.
    pub exact: f64,
    /// Of a chip's counters.
    pub hardware: f64,
    /// Of times.
    pub time: f64,
    /// The fewest samples of a time.
    pub samples: usize,
    /// Of single figures, by name.
    pub figure: BTreeMap<String, f64>,
    /// Figures that are not judged.
    pub ignore: Vec<String>,
}

impl Default for Tolerances {
    fn default() -> Self {
        Self { exact: 0.0, hardware: 0.01, time: 0.03, samples: 10, figure: BTreeMap::new(), ignore: Vec::new() }
    }
}

impl Tolerances {
    /// That of a figure.
    pub fn of(&self, name: &str, kind: Kind) -> f64 {
        let of_kind = match kind {
            Kind::Exact => self.exact,
            Kind::Hardware => self.hardware,
            Kind::Time => self.time,
        };
        self.figure.get(name).copied().unwrap_or(of_kind)
    }
}

/// Strata on one problem and GPU, with the tiles that are theirs today.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DigCase {
    /// As `--problem` takes it.
    pub problem: String,
    /// The board.
    pub gpu: String,
    /// Which strata.
    pub strata: Vec<String>,
}

/// Strata that are timed on a problem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeCase {
    /// As `--problem` takes it.
    pub problem: String,
    /// Which strata.
    pub strata: Vec<String>,
}

/// A file that is no configuration.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum GateConfigError {
    #[error(transparent)]
    Text(#[from] TextFileError),
    #[error("{}: {reason}", path.display())]
    Toml { path: PathBuf, reason: String },
    #[error("{}: tolerance {name} is {value}: it must be a share, 0 or more", path.display())]
    Tolerance { path: PathBuf, name: String, value: f64 },
}

impl GateConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// When it is no configuration.
    pub fn read(path: &Path) -> Result<Self, GateConfigError> {
        let text = text_file::read(path, MOST_BYTES)?;
        let refused = |error: toml::de::Error| GateConfigError::Toml {
            path: path.into(),
            reason: error.to_string().trim_end().to_owned(),
        };
        let mut config: Self = toml::from_str(&text).map_err(refused)?;
        let Tolerances { exact, hardware, time, figure, .. } = &config.tolerance;
        let named = [("exact", *exact), ("hardware", *hardware), ("time", *time)];
        let all = named.into_iter().chain(figure.iter().map(|(name, value)| (name.as_str(), *value)));
        if let Some((name, value)) = all.into_iter().find(|(_, value)| !(0.0..f64::INFINITY).contains(value)) {
            return Err(GateConfigError::Tolerance { path: path.into(), name: name.into(), value });
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        config.probe = config.probe.iter().map(|launch| folder.join(launch)).collect();
        Ok(config)
    }
}
