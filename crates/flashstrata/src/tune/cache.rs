//! The file that measurements are kept in.
//!
//! `{"schema": 1, "entries": [...]}`, an [`Entry`] each. It is replaced as a whole by renaming a file beside it, so a reader finds
//! the one or the other, and a process that is killed leaves it as it was. Writers take turns by a lock on `NAME.lock` and
//! read before they write, so that none loses what another measured. What cannot be read is set aside under another name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use crate::tune::{Entry, Table};

/// The version of the format.
pub const SCHEMA: u64 = 1;

/// How long a writer waits for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// What temporary files beside the cache begin with, after its name.
const TEMPORARY: &str = ".new-";

#[derive(Serialize, Deserialize)]
struct Document {
    schema: u64,
    /// Values: what a version with other generations wrote is kept as it is.
    entries: Vec<Value>,
}

/// What a file held.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// The entries that this version can read.
    pub table: Table,
    /// What a user should be told.
    pub notice: Option<Notice>,
}

/// What happened to a file beside being read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// It could not be read and has another name now.
    SetAside {
        /// The cache.
        path: PathBuf,
        /// Its name now.
        to: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Notice::SetAside { path, to, why } = self;
        write!(f, "{} is no tuning cache ({why}): it was set aside as {}", path.display(), to.display())
    }
}

/// Why a cache was not read or written.
#[derive(Debug, Error)]
pub enum CacheError {
    /// The file system refuses.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file of another format.
    #[error("{} has schema {found}: this version reads and writes {SCHEMA}; give another file, or remove it", path.display())]
    Schema {
        /// Which file.
        path: PathBuf,
        /// Its schema.
        found: u64,
    },
    /// Someone else is writing, and does not end.
    #[error("{} is locked by another process for more than {} s", path.display(), PATIENCE.as_secs())]
    Locked {
        /// The lock.
        path: PathBuf,
    },
    /// There is no home directory to keep a cache in.
    #[error("neither XDG_CACHE_HOME nor HOME is set: give the tuning cache's path")]
    NoHome,
}

/// Where the user's measurements are kept: `flashstrata/tuning.json` below `$XDG_CACHE_HOME`, or below `~/.cache`.
///
/// # Errors
/// When neither is known.
pub fn default_path() -> Result<PathBuf, CacheError> {
    path_below(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
}

fn path_below(cache: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Result<PathBuf, CacheError> {
    // A relative path is to be ignored (XDG Base Directory Specification, "Basics").
    let cache = cache.map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = cache.or_else(|| home.filter(|home| !home.is_empty()).map(|home| PathBuf::from(home).join(".cache")));
    folder.map(|folder| folder.join("flashstrata/tuning.json")).ok_or(CacheError::NoHome)
}

/// Reads a cache; an empty one where there is no file. A file that is none is set aside, and the notice says so.
///
/// # Errors
/// When the file cannot be read or set aside, or has another schema.
pub fn load(path: &Path) -> Result<Loaded, CacheError> {
    match read(path)? {
        Ok(entries) => Ok(Loaded { table: known(&entries), notice: None }),
        Err(_) => {
            // Under the lock, so that what another process has written in the meantime is not taken for it.
            let _lock = lock(path)?;
            let (entries, notice) = read_or_set_aside(path)?;
            Ok(Loaded { table: known(&entries), notice })
        }
    }
}

/// Adds a measurement to a cache, in the place of an older one of the same key; makes the file and its folder where needed.
///
/// # Errors
/// When the file cannot be read or written, has another schema, or another process does not let go of it. It is then as it was.
pub fn store(path: &Path, entry: &Entry) -> Result<Option<Notice>, CacheError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(io_error(folder))?;
    }
    let _lock = lock(path)?;
    remove_leftovers(path);
    let (mut entries, notice) = read_or_set_aside(path)?;
    let other = |value: &Value| parse(value).is_none_or(|known| known.key != entry.key);
    entries.retain(other);
    let value = serde_json::to_value(entry).map_err(|error| io_error(path)(error.into()))?;
    entries.push(value);
    write(path, &Document { schema: SCHEMA, entries })?;
    Ok(notice)
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_owned();
    |source| CacheError::Io { path, source }
}

fn parse(value: &Value) -> Option<Entry> {
    Entry::deserialize(value).ok()
}

fn known(entries: &[Value]) -> Table {
    Table::new(entries.iter().filter_map(parse))
}

/// The entries of a file, or what is wrong with it.
fn read(path: &Path) -> Result<Result<Vec<Value>, String>, CacheError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ok(Vec::new())),
        Err(error) => return Err(io_error(path)(error)),
    };
    let value: Value = match serde_json::from_slice(&bytes) {
        Ok(value) => value,
        Err(error) => return Ok(Err(error.to_string())),
    };
    match value.get("schema").and_then(Value::as_u64) {
        Some(SCHEMA) => {}
        Some(found) => return Err(CacheError::Schema { path: path.to_owned(), found }),
        None => return Ok(Err("it has no schema".into())),
    }
    Ok(Document::deserialize(value).map(|document| document.entries).map_err(|error| error.to_string()))
}

/// The entries of a file that no one else writes now.
fn read_or_set_aside(path: &Path) -> Result<(Vec<Value>, Option<Notice>), CacheError> {
    let why = match read(path)? {
        Ok(entries) => return Ok((entries, None)),
        Err(why) => why,
    };
    let name = |n: u32| beside(path, &format!(".corrupt-{n}"));
    // Of many, the first thousand are kept.
    let to = (1..1000).map(name).find(|to| !to.exists()).unwrap_or_else(|| name(1000));
    fs::rename(path, &to).map_err(io_error(path))?;
    Ok((Vec::new(), Some(Notice::SetAside { path: path.to_owned(), to, why })))
}

/// A file's name with something after it.
fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// The writer's turn, until it is dropped; the system ends it with the process, too.
fn lock(path: &Path) -> Result<File, CacheError> {
    let path = beside(path, ".lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(io_error(&path))?;
    let begin = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if begin.elapsed() > PATIENCE => return Err(CacheError::Locked { path }),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
            // A file system without locks: writers then may lose each other's entries, never the file.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(io_error(&path)(error)),
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary_prefix(path: &Path) -> std::ffi::OsString {
    let mut prefix = path.file_name().unwrap_or_default().to_owned();
    prefix.push(TEMPORARY);
    prefix
}

/// What a writer that was killed left: no one else writes now, so none of it is in use.
fn remove_leftovers(path: &Path) {
    let prefix = temporary_prefix(path);
    let Ok(files) = fs::read_dir(folder_of(path)) else { return };
    for file in files.flatten() {
        if file.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) {
            // Only clutter: the cache is none the worse for it.
            let _ = fs::remove_file(file.path());
        }
    }
}

fn write(path: &Path, document: &Document) -> Result<(), CacheError> {
    let mut text = serde_json::to_vec_pretty(document).map_err(|error| io_error(path)(error.into()))?;
    text.push(b'\n');
    let prefix = temporary_prefix(path);
    let temporary = tempfile::Builder::new().prefix(&prefix).tempfile_in(folder_of(path));
    let mut temporary = temporary.map_err(io_error(path))?;
    let written = temporary.write_all(&text).and_then(|()| temporary.as_file().sync_all());
    written.map_err(io_error(path))?;
    temporary.persist(path).map(|_| ()).map_err(|error| io_error(path)(error.error))
}

#[cfg(test)]
mod tests {
    use kernels::{Dtype, Problem, ProblemSpec, Stratum, Tiles};

    use super::*;
    use crate::tune::tests::{entry, h200};

    const TILES: Tiles = Tiles { block_q: 128, block_kv: 128, threads: 384 };

    fn problem(seqlen: usize) -> Problem {
        ProblemSpec::new(1, 4, seqlen, 64).dtype(Dtype::F16).build().unwrap()
    }

    fn file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/tuning.json");
        (folder, path)
    }

    #[test]
    fn what_is_stored_is_found_and_replaced() {
        let (_folder, path) = file();
        assert_eq!(load(&path).unwrap(), Loaded::default());
        let first = entry(&problem(512), Stratum::V3, TILES);
        assert_eq!(store(&path, &first).unwrap(), None);
        store(&path, &entry(&problem(4096), Stratum::V2, TILES)).unwrap();
        let better = Entry { median_ms: 0.5, ..first };
        store(&path, &better).unwrap();
        let table = load(&path).unwrap().table;
        assert_eq!(table.len(), 2);
        assert_eq!(table.get(&h200("580.1"), &problem(500)), Some(&better));
        // No temporary file is left, and the cache is text.
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().map(|f| f.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        assert!(fs::read_to_string(&path).unwrap().starts_with("{\n  \"schema\": 1,"));
    }

    #[test]
    fn writers_do_not_lose_each_others_entries() {
        let (_folder, path) = file();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    for number in 0..5 {
                        // Powers of two: a key each.
                        let problem =
                            ProblemSpec::new(1 << number, 1, 1 << thread, 64).dtype(Dtype::F16).build().unwrap();
                        store(path, &entry(&problem, Stratum::V3, TILES)).unwrap();
                        assert!(load(path).unwrap().notice.is_none());
                    }
                });
            }
        });
        assert_eq!(load(&path).unwrap().table.len(), 40);
    }

    #[test]
    fn a_corrupt_file_is_set_aside_and_said_so() {
        for (contents, said) in [
            ("{\"schema\": 1, \"entr", "EOF"),
            ("", "EOF"),
            ("[1, 2]", "it has no schema"),
            ("{\"schema\": 1, \"entries\": 3}", "invalid type"),
            ("\u{0}\u{1}", "expected value"),
        ] {
            let (_folder, path) = file();
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, contents).unwrap();
            let Loaded { table, notice } = load(&path).unwrap();
            let notice = notice.unwrap();
            assert!(table.is_empty() && notice.to_string().contains(said), "{notice}");
            let Notice::SetAside { to, .. } = &notice;
            assert_eq!(fs::read_to_string(to).unwrap(), contents);
            assert!(!path.exists());
            // The next one is set aside beside it, by a writer too, and what it stores is there.
            fs::write(&path, contents).unwrap();
            let notice = store(&path, &entry(&problem(8), Stratum::V2, TILES)).unwrap().unwrap();
            assert!(notice.to_string().ends_with(".corrupt-2"), "{notice}");
            assert_eq!(load(&path).unwrap().table.len(), 1);
        }
    }

    #[test]
    fn another_schema_is_neither_read_nor_touched() {
        let (_folder, path) = file();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let text = "{\"schema\": 2, \"entries\": {}}";
        fs::write(&path, text).unwrap();
        let message = load(&path).unwrap_err().to_string();
        assert!(
            message.ends_with("has schema 2: this version reads and writes 1; give another file, or remove it"),
            "{message}"
        );
        assert!(store(&path, &entry(&problem(8), Stratum::V2, TILES)).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn entries_of_other_versions_stay() {
        let (_folder, path) = file();
        let mut other = entry(&problem(8), Stratum::V3, TILES);
        other.key.version = "0.0.9".into();
        store(&path, &other).unwrap();
        // One whose generation this version does not know.
        let mut document: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let mut unknown = document["entries"][0].clone();
        unknown["stratum"] = "v9".into();
        document["entries"].as_array_mut().unwrap().push(unknown);
        fs::write(&path, document.to_string()).unwrap();
        let Loaded { table, notice } = load(&path).unwrap();
        assert_eq!((table.len(), notice), (1, None));
        assert_eq!(table.get(&h200("580.1"), &problem(8)), None);
        store(&path, &entry(&problem(8), Stratum::V3, TILES)).unwrap();
        let document: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(document["entries"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn a_killed_writer_leaves_nothing_that_matters() {
        let (_folder, path) = file();
        store(&path, &entry(&problem(8), Stratum::V3, TILES)).unwrap();
        // As if it was killed between writing the temporary file and renaming it: half of the file, and a lock that nobody holds.
        let left = beside(&path, ".new-abc123");
        fs::write(&left, "{\"schema\": 1, \"ent").unwrap();
        assert_eq!(load(&path).unwrap().table.len(), 1);
        store(&path, &entry(&problem(64), Stratum::V3, TILES)).unwrap();
        assert_eq!(load(&path).unwrap().table.len(), 2);
        assert!(!left.exists());
    }

    #[test]
    fn what_the_file_system_refuses_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let message = load(folder.path()).unwrap_err().to_string();
        assert!(message.starts_with(&folder.path().display().to_string()), "{message}");
        let below_a_file = folder.path().join("file/tuning.json");
        fs::write(folder.path().join("file"), "").unwrap();
        assert!(store(&below_a_file, &entry(&problem(8), Stratum::V3, TILES)).is_err());
    }

    #[test]
    fn the_users_cache_is_where_the_system_keeps_caches() {
        let path = |cache: &str, home: Option<&str>| path_below(Some(cache.into()), home.map(Into::into));
        assert_eq!(path("/c", Some("/h")).unwrap(), Path::new("/c/flashstrata/tuning.json"));
        assert_eq!(path("relative", Some("/h")).unwrap(), Path::new("/h/.cache/flashstrata/tuning.json"));
        assert!(matches!(path("", None), Err(CacheError::NoHome)));
    }
}
