//! How one names a record: a number of the history, `last`, or a `--json` file.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use crate::history::{Filter, History, HistoryError};
use crate::key::AnyRecord;
use crate::record::{Document, SCHEMA};
use crate::text_file::{self, TextFileError};

/// A document larger than this is refused.
const MOST_BYTES: u64 = 1 << 30;

/// The name of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// Its number in the history.
    Number(i64),
    /// The latest of the history, or so many before it: `last`, `last~1`.
    Last(u32),
    /// Of a file that `--json` wrote.
    File {
        /// The file.
        path: PathBuf,
        /// Which of its records, by its place counted from 1, or by its stratum or kernel: `FILE#2`, `FILE#v2`.
        which: Option<String>,
    },
}

impl FromStr for Reference {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let back = text.strip_prefix("last").and_then(|rest| match rest.strip_prefix('~') {
            Some(back) => back.parse().ok(),
            None => rest.is_empty().then_some(0),
        });
        Ok(match (text.parse(), back) {
            (Ok(number), _) => Self::Number(number),
            (_, Some(back)) => Self::Last(back),
            _ => match text.rsplit_once('#') {
                Some((path, which)) => Self::File { path: path.into(), which: Some(which.into()) },
                None => Self::File { path: text.into(), which: None },
            },
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Last(0) => f.write_str("last"),
            Self::Last(back) => write!(f, "last~{back}"),
            Self::File { path, which: None } => write!(f, "{}", path.display()),
            Self::File { path, which: Some(which) } => write!(f, "{}#{which}", path.display()),
        }
    }
}

/// A name that names no record, or more than one.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum ReferenceError {
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    Text(#[from] TextFileError),
    #[error("{}: {reason}", path.display())]
    Document { path: PathBuf, reason: String },
    #[error("{} has the records {}: name one as FILE#NAME or FILE#PLACE", path.display(), found.join(", "))]
    Which { path: PathBuf, found: Vec<String> },
    #[error("the history {} has {count} records: there is no {reference}", path.display())]
    TooFar { path: PathBuf, count: usize, reference: String },
}

impl Reference {
    /// The record; `history` is the file to look for numbers in.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, history: &Path) -> Result<AnyRecord, ReferenceError> {
        let by_number = |history: &History, id: i64| {
            let missing = || HistoryError::NoEntry { path: history.path().into(), id };
            Ok(history.record(id)?.ok_or_else(missing)?)
        };
        match self {
            Self::Number(id) => by_number(&History::read(history)?, *id),
            Self::Last(back) => {
                let history = History::read(history)?;
                let latest = back.saturating_add(1);
                let entries = history.entries(&Filter { latest: Some(latest), ..Filter::default() })?;
                if entries.len() < latest as usize {
                    let (path, count) = (history.path().into(), entries.len());
                    return Err(ReferenceError::TooFar { path, count, reference: self.to_string() });
                }
                by_number(&history, entries[0].id)
            }
            Self::File { path, which } => {
                let mut records = read(path)?.records;
                let found = match which {
                    None if records.len() == 1 => Some(0),
                    None => None,
                    Some(which) => {
                        let named: Vec<usize> =
                            (0..records.len()).filter(|&index| records[index].key.subject == *which).collect();
                        match (named.as_slice(), which.parse::<usize>()) {
                            ([one], _) => Some(*one),
                            ([], Ok(place)) if (1..=records.len()).contains(&place) => Some(place - 1),
                            _ => None,
                        }
                    }
                };
                let names = || records.iter().map(|record| record.key.subject.clone()).collect();
                let index = found.ok_or_else(|| ReferenceError::Which { path: path.clone(), found: names() })?;
                Ok(records.swap_remove(index))
            }
        }
    }
}

/// Reads a file that `--json` wrote.
///
/// # Errors
/// When it is no such file.
pub fn read(path: &Path) -> Result<Document<AnyRecord>, ReferenceError> {
    document(path, &text_file::read(path, MOST_BYTES)?)
}

/// Reads the text of such a file.
pub(crate) fn document(path: &Path, text: &str) -> Result<Document<AnyRecord>, ReferenceError> {
    let refused = |reason: String| ReferenceError::Document { path: path.into(), reason };
    let document: Document<AnyRecord> = serde_json::from_str(text).map_err(|error| refused(error.to_string()))?;
    if document.schema != SCHEMA {
        return Err(refused(format!("schema is {}: this version reads {SCHEMA}", document.schema)));
    }
    Ok(document)
}

/// The records of a set: a file that `--json` wrote, or a revision of the history, of which the latest of each key count.
///
/// # Errors
/// When it is neither.
pub fn set(name: &str, history: &Path) -> Result<Vec<AnyRecord>, ReferenceError> {
    let path = Path::new(name);
    if path.exists() || path.extension().is_some() {
        return Ok(read(path)?.records);
    }
    let history = History::read(history)?;
    let entries = history.entries(&Filter { revision: Some(name.into()), ..Filter::default() })?;
    let mut keys = BTreeSet::new();
    let latest = entries.iter().rev().filter(|entry| keys.insert(entry.key.clone()));
    let ids: Vec<i64> = latest.map(|entry| entry.id).collect();
    if ids.is_empty() {
        return Err(HistoryError::NoRevision { path: history.path().into(), revision: name.into() }.into());
    }
    let mut records = Vec::new();
    for id in ids.into_iter().rev() {
        records.extend(history.record(id)?);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_named_as_they_print() {
        for text in ["12", "last", "last~3", "dig.json", "a/b.json#v2", "dig.json#2"] {
            let Ok(reference) = text.parse::<Reference>();
            assert_eq!(reference.to_string(), text);
        }
        assert_eq!("lastly.json".parse(), Ok(Reference::File { path: "lastly.json".into(), which: None }));
    }
}
