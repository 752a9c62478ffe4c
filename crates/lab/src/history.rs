//! What was measured before: records with their keys and where they come from, in one SQLite file.
//!
//! A record that [`History::add`] returned the number of is on the disk: SQLite's rollback journal with `synchronous = EXTRA`
//! survives the death of a process, and of a machine whose disk keeps its promises (sqlite.org/lockingv3.html, "Rollback"). There
//! is one file at rest, so that a folder that cannot be written to can still be read. Processes take turns.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, TransactionBehavior, params};
use thiserror::Error;

use crate::key::{AnyRecord, Key};
use crate::provenance::Provenance;

/// The version of the tables.
const SCHEMA: i64 = 1;

/// How long a process waits for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// What marks a file as a history: `strt`.
const APPLICATION: i64 = 0x7374_7274;

const TABLES: &str = "
CREATE TABLE entry (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    made INTEGER NOT NULL,
    command TEXT NOT NULL,
    program TEXT NOT NULL,
    revision TEXT,
    folder TEXT NOT NULL,
    subject TEXT NOT NULL,
    problem TEXT NOT NULL,
    dtype TEXT NOT NULL,
    tiles TEXT NOT NULL,
    gpu TEXT NOT NULL,
    sm TEXT NOT NULL,
    tools TEXT NOT NULL,
    source TEXT NOT NULL,
    level TEXT NOT NULL,
    sample TEXT NOT NULL,
    modelled_ms REAL,
    measured_ms REAL,
    findings TEXT NOT NULL
) STRICT;
CREATE TABLE record (id INTEGER PRIMARY KEY REFERENCES entry (id), json TEXT NOT NULL) STRICT;
";

/// Why a history was not read or written.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum HistoryError {
    #[error("cannot {doing} the history {}: {reason}", path.display())]
    Refused { doing: &'static str, path: PathBuf, reason: String },
    #[error("{} is no history of flashstrata", path.display())]
    NoHistory { path: PathBuf },
    #[error("{} has schema {found}: this version reads and writes {SCHEMA}; give another file", path.display())]
    Schema { path: PathBuf, found: i64 },
    #[error("there is no history {}: --record makes one", path.display())]
    Missing { path: PathBuf },
    #[error("the history {} has no record {id}: `strata history` lists them", path.display())]
    NoEntry { path: PathBuf, id: i64 },
    #[error("the history {} has no record of {revision}: `strata history` lists revisions", path.display())]
    NoRevision { path: PathBuf, revision: String },
    #[error("neither STRATA_HISTORY, XDG_DATA_HOME nor HOME is set: give the history's path")]
    NoHome,
}

/// Where records are kept unless said otherwise: what `STRATA_HISTORY` names, else `flashstrata/history.db` below
/// `$XDG_DATA_HOME`, or below `~/.local/share`.
///
/// # Errors
/// When none is known.
pub fn default_path() -> Result<PathBuf, HistoryError> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // A relative path is to be ignored (XDG Base Directory Specification, "Basics").
    let data = variable("XDG_DATA_HOME").filter(|path| path.is_absolute());
    let folder = data.or_else(|| Some(variable("HOME")?.join(".local/share")));
    let file = variable("STRATA_HISTORY").or_else(|| Some(folder?.join("flashstrata/history.db")));
    file.ok_or(HistoryError::NoHome)
}

/// A record of the past, without its body.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its number.
    pub id: i64,
    /// What it is of.
    pub key: Key,
    /// Where it comes from.
    pub provenance: Provenance,
    /// When it was made, in local time: `2026-11-30 14:05`.
    pub made: String,
    /// What its limiter needs.
    pub modelled_ms: Option<f64>,
    /// What a clock said.
    pub measured_ms: Option<f64>,
    /// The ids of its findings.
    pub findings: Vec<String>,
}

/// Which entries are asked for; the empty text asks for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// The stratum or kernel.
    pub subject: Option<String>,
    /// Part of the problem's text.
    pub problem: Option<String>,
    /// The board.
    pub gpu: Option<String>,
    /// Who counted or timed.
    pub source: Option<String>,
    /// The beginning of the revision.
    pub revision: Option<String>,
    /// The latest so many.
    pub latest: Option<u32>,
}

/// An open history.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    connection: Connection,
}

impl History {
    /// Opens a history to add to it; makes it and its folder where there is none.
    ///
    /// # Errors
    /// When it cannot be written, or is something else.
    pub fn open(path: &Path) -> Result<Self, HistoryError> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            let refused = |error: std::io::Error| refused("make the folder of", path, error.to_string());
            std::fs::create_dir_all(folder).map_err(refused)?;
        }
        let mut history = Self::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
        history.make().map_err(|error| failed("write", path, &error))?;
        history.check()?;
        // Whether a record could be added now, before any work is done for it.
        let turn = history.connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let ended = turn.and_then(|transaction| {
            transaction.pragma_update(None, "user_version", SCHEMA)?;
            transaction.rollback()
        });
        ended.map_err(|error| failed("write", path, &error))?;
        Ok(history)
    }

    /// Opens a history to read it.
    ///
    /// # Errors
    /// When it is not there, or is something else.
    pub fn read(path: &Path) -> Result<Self, HistoryError> {
        if !path.exists() {
            return Err(HistoryError::Missing { path: path.into() });
        }
        // A writer that died left what only a writer may undo.
        let history = Self::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)
            .or_else(|_| Self::connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY))?;
        history.check()?;
        Ok(history)
    }

    fn connect(path: &Path, flags: OpenFlags) -> Result<Self, HistoryError> {
        let open = || -> rusqlite::Result<Connection> {
            let connection = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
            connection.busy_timeout(PATIENCE)?;
            connection.pragma_update(None, "synchronous", "EXTRA")?;
            Ok(connection)
        };
        let connection = open().map_err(|error| failed("open", path, &error))?;
        Ok(Self { path: path.into(), connection })
    }

    /// Makes the tables in an empty file.
    fn make(&mut self) -> rusqlite::Result<()> {
        let is_empty = |connection: &Connection| -> rusqlite::Result<bool> {
            connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
        };
        if !is_empty(&self.connection)? {
            return Ok(());
        }
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have been faster.
        if is_empty(&transaction)? {
            transaction.execute_batch(TABLES)?;
            transaction.pragma_update(None, "application_id", APPLICATION)?;
            transaction.pragma_update(None, "user_version", SCHEMA)?;
        }
        transaction.commit()
    }

    fn check(&self) -> Result<(), HistoryError> {
        let number = |name: &str| self.connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let application = number("application_id").map_err(|error| failed("read", &self.path, &error))?;
        let found = number("user_version").map_err(|error| failed("read", &self.path, &error))?;
        match (application, found) {
            (APPLICATION, SCHEMA) => Ok(()),
            (APPLICATION, found) => Err(HistoryError::Schema { path: self.path.clone(), found }),
            _ => Err(HistoryError::NoHistory { path: self.path.clone() }),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds records, all of them or none; their numbers, in order. Once they are returned, the records are kept.
    ///
    /// # Errors
    /// When the disk is full, or another process does not end to write.
    pub fn add(&mut self, records: &[AnyRecord], provenance: &Provenance) -> Result<Vec<i64>, HistoryError> {
        let path = self.path.clone();
        self.insert(records, provenance).map_err(|error| failed("write", &path, &error))
    }

    fn insert(&mut self, records: &[AnyRecord], provenance: &Provenance) -> rusqlite::Result<Vec<i64>> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut ids = Vec::new();
        {
            let columns = "made, command, program, revision, folder, subject, problem, dtype, tiles, gpu, sm, tools, source, \
                           level, sample, modelled_ms, measured_ms, findings";
            let values = (1..=18).map(|n| format!("?{n}")).collect::<Vec<_>>().join(", ");
            let mut entry = transaction.prepare(&format!("INSERT INTO entry ({columns}) VALUES ({values})"))?;
            let mut body = transaction.prepare("INSERT INTO record (id, json) VALUES (?1, ?2)")?;
            for record in records {
                let (key, from) = (&record.key, provenance);
                let findings: Vec<String> = record.findings().into_iter().map(|finding| finding.id).collect();
                entry.execute(params![
                    from.made,
                    from.command,
                    from.program,
                    from.revision,
                    from.folder,
                    key.subject,
                    key.problem,
                    key.dtype,
                    key.tiles,
                    key.gpu,
                    key.sm,
                    serde_json::json!(key.tools).to_string(),
                    key.source,
                    key.level,
                    key.sample,
                    record.number("modelled_time_ms"),
                    record.number("measured_time_ms"),
                    findings.join(" "),
                ])?;
                let id = transaction.last_insert_rowid();
                body.execute(params![id, record.json.to_string()])?;
                ids.push(id);
            }
        }
        transaction.commit()?;
        Ok(ids)
    }

    /// Entries, oldest first.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn entries(&self, filter: &Filter) -> Result<Vec<Entry>, HistoryError> {
        let sql = "SELECT *, strftime('%Y-%m-%d %H:%M', made, 'unixepoch', 'localtime') AS shown FROM entry
            WHERE (?1 IS NULL OR subject = ?1) AND (?2 IS NULL OR instr(problem, ?2)) AND (?3 IS NULL OR gpu = ?3)
              AND (?4 IS NULL OR source = ?4) AND (?5 IS NULL OR instr(revision, ?5) = 1)
            ORDER BY id DESC LIMIT ?6";
        let read = || -> rusqlite::Result<Vec<Entry>> {
            let mut statement = self.connection.prepare(sql)?;
            let latest = filter.latest.map_or(-1, i64::from);
            let Filter { subject, problem, gpu, source, revision, .. } = filter;
            statement.query_map(params![subject, problem, gpu, source, revision, latest], entry)?.collect()
        };
        let mut entries = read().map_err(|error| failed("read", &self.path, &error))?;
        entries.reverse();
        Ok(entries)
    }

    /// A record; `None` where there is none of that number.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn record(&self, id: i64) -> Result<Option<AnyRecord>, HistoryError> {
        let read = |row: &Row<'_>| row.get::<_, String>(0);
        let found = self.connection.query_row("SELECT json FROM record WHERE id = ?1", [id], read).optional();
        let text = found.map_err(|error| failed("read", &self.path, &error))?;
        let parsed = text.map(|text| serde_json::from_str(&text)).transpose();
        parsed.map_err(|error: serde_json::Error| refused("read", &self.path, format!("record {id}: {error}")))
    }
}

fn entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let tools: String = row.get("tools")?;
    let findings: String = row.get("findings")?;
    Ok(Entry {
        id: row.get("id")?,
        key: Key {
            subject: row.get("subject")?,
            problem: row.get("problem")?,
            dtype: row.get("dtype")?,
            tiles: row.get("tiles")?,
            gpu: row.get("gpu")?,
            sm: row.get("sm")?,
            tools: serde_json::from_str(&tools).unwrap_or_default(),
            source: row.get("source")?,
            level: row.get("level")?,
            sample: row.get("sample")?,
        },
        provenance: Provenance {
            made: row.get("made")?,
            command: row.get("command")?,
            program: row.get("program")?,
            revision: row.get("revision")?,
            folder: row.get("folder")?,
        },
        made: row.get("shown")?,
        modelled_ms: row.get("modelled_ms")?,
        measured_ms: row.get("measured_ms")?,
        findings: findings.split_whitespace().map(str::to_owned).collect(),
    })
}

fn refused(doing: &'static str, path: &Path, reason: String) -> HistoryError {
    HistoryError::Refused { doing, path: path.into(), reason }
}

fn failed(doing: &'static str, path: &Path, error: &rusqlite::Error) -> HistoryError {
    let reason = match error.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => return HistoryError::NoHistory { path: path.into() },
        Some(ErrorCode::DiskFull) => "the disk is full".into(),
        Some(ErrorCode::DatabaseBusy) => format!("another process writes to it for more than {} s", PATIENCE.as_secs()),
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen) => {
            format!("it and its folder must be there and writable ({error})")
        }
        _ => error.to_string(),
    };
    refused(doing, path, reason)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(subject: &str, time: f64) -> AnyRecord {
        let json = json!({"stratum": subject, "gpu": "T4", "sm": "sm_75", "dtype": "f32", "problem": "1x1x8x8", "source": "emulator",
            "level": "merged", "tools": {"ptxas": "13.5.37"}, "tiles": {"block_q": 32, "block_kv": 16, "threads": 64},
            "counters": {"warp_instructions": 7}, "modelled_time_ms": time,
            "findings": [{"id": "spills", "severity": "warning", "file": null, "line": null, "text": "52"}]});
        json.try_into().unwrap()
    }

    fn provenance(revision: &str) -> Provenance {
        let (command, program, folder) = ("strata dig".into(), "flashstrata 0".into(), "/".into());
        Provenance { made: 1_700_000_000, command, program, revision: Some(revision.into()), folder }
    }

    #[test]
    fn records_come_back_with_their_keys_and_where_they_are_from() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/history.db");
        assert!(matches!(History::read(&path), Err(HistoryError::Missing { .. })));
        let mut history = History::open(&path).unwrap();
        let (first, second) = (record("v1", 0.1 + 0.2), record("v2", 1.0 / 3.0));
        assert_eq!(history.add(&[first.clone(), second.clone()], &provenance("abc")).unwrap(), [1, 2]);
        assert_eq!(history.add(std::slice::from_ref(&second), &provenance("def+")).unwrap(), [3]);
        let history = History::read(&path).unwrap();
        assert_eq!(history.record(1).unwrap(), Some(first.clone()));
        assert_eq!(history.record(3).unwrap(), Some(second));
        assert_eq!(history.record(4).unwrap(), None);
        let all = history.entries(&Filter::default()).unwrap();
        assert_eq!(all.iter().map(|entry| entry.id).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((&all[0].key, &all[0].provenance), (&first.key, &provenance("abc")));
        assert_eq!((all[0].modelled_ms, all[0].measured_ms), (Some(0.1 + 0.2), None));
        assert_eq!(all[0].findings, ["spills"]);
        assert!(all[0].made.starts_with("2023-11-1"), "{}", all[0].made);
        let ids = |filter: Filter| -> Vec<i64> {
            history.entries(&filter).unwrap().into_iter().map(|entry| entry.id).collect()
        };
        assert_eq!(ids(Filter { subject: Some("v2".into()), ..Filter::default() }), [2, 3]);
        assert_eq!(ids(Filter { revision: Some("de".into()), ..Filter::default() }), [3]);
        assert_eq!(ids(Filter { problem: Some("x8x".into()), latest: Some(2), ..Filter::default() }), [2, 3]);
        assert_eq!(ids(Filter { gpu: Some("H200".into()), ..Filter::default() }), [0_i64; 0]);
        // One file at rest.
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, "this is no database, however long it may be ".repeat(100)).unwrap();
        assert!(matches!(History::open(&text), Err(HistoryError::NoHistory { .. })));
        assert!(matches!(History::read(&text), Err(HistoryError::NoHistory { .. })));
        let foreign = folder.path().join("foreign.db");
        Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
        assert!(matches!(History::open(&foreign), Err(HistoryError::NoHistory { .. })));
        let newer = folder.path().join("newer.db");
        History::open(&newer).unwrap().connection.pragma_update(None, "user_version", 2).unwrap();
        let error = History::open(&newer).unwrap_err().to_string();
        assert!(error.contains("has schema 2: this version reads and writes 1"), "{error}");
        assert!(History::open(folder.path()).is_err());
    }
}
