//! `--record`: measurements are kept in the history.

use std::path::PathBuf;

use clap::Args;
use lab::{AnyRecord, History, Provenance, history};
use serde::Serialize;

/// Where records go. Nothing is recorded unless it is asked for.
#[derive(Clone, Debug, Default, Args)]
pub struct RecordArguments {
    /// Keep the records in the history: $STRATA_HISTORY, else flashstrata/history.db in the user's data folder, or FILE.
    #[arg(long, value_name = "FILE", require_equals = true)]
    record: Option<Option<PathBuf>>,
}

/// Which history is read.
#[derive(Clone, Debug, Args)]
pub struct HistoryFile {
    /// The history; $STRATA_HISTORY, else flashstrata/history.db in the user's data folder, by default.
    #[arg(long = "history", value_name = "FILE")]
    file: Option<PathBuf>,
}

impl HistoryFile {
    pub fn path(&self) -> anyhow::Result<PathBuf> {
        match &self.file {
            Some(path) => Ok(path.clone()),
            None => Ok(history::default_path()?),
        }
    }
}

/// Adds to the history, where that was asked for.
pub struct Recorder(Option<History>);

impl RecordArguments {
    /// Opens the history before any work is done for it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn open(&self) -> anyhow::Result<Recorder> {
        let Some(path) = &self.record else { return Ok(Recorder(None)) };
        let path = path.clone().map_or_else(history::default_path, Ok)?;
        Ok(Recorder(Some(History::open(&path)?)))
    }
}

impl Recorder {
    /// Keeps records, and says under which numbers once they are kept.
    ///
    /// # Errors
    /// When the history cannot be written.
    pub fn keep<R: Serialize>(&mut self, records: &[R]) -> anyhow::Result<()> {
        let Some(history) = &mut self.0 else { return Ok(()) };
        let records = records.iter().map(AnyRecord::of).collect::<Result<Vec<_>, _>>()?;
        match history.add(&records, &Provenance::now())?.as_slice() {
            [] => {}
            [one] => eprintln!("recorded as {one} in {}", history.path().display()),
            [first, .., last] => eprintln!("recorded as {first} to {last} in {}", history.path().display()),
        }
        Ok(())
    }
}
