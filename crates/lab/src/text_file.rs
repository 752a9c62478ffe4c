//! Text files that a user, or a file of a user's, names.

use std::path::{Path, PathBuf};
use std::{fs, io};

use thiserror::Error;

/// A file that is no text one may read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum TextFileError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{} is {what}: it must be a regular file", path.display())]
    NotAFile { path: PathBuf, what: &'static str },
    #[error("{} has {bytes} bytes; {allowed} are allowed", path.display())]
    TooLong { path: PathBuf, bytes: u64, allowed: u64 },
    #[error("{} is no text: byte {at} is not UTF-8", path.display())]
    Encoding { path: PathBuf, at: usize },
}

/// The text of a regular file of at most `allowed` bytes.
///
/// # Errors
/// When it is something else, or cannot be read.
pub fn read(path: &Path, allowed: u64) -> Result<String, TextFileError> {
    let io = |error| TextFileError::Io { path: path.into(), error };
    let metadata = fs::metadata(path).map_err(io)?;
    // To open a pipe would wait for its writer.
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a folder" } else { "a pipe or a device" };
        return Err(TextFileError::NotAFile { path: path.into(), what });
    }
    if metadata.len() > allowed {
        return Err(TextFileError::TooLong { path: path.into(), bytes: metadata.len(), allowed });
    }
    let bytes = fs::read(path).map_err(io)?;
    String::from_utf8(bytes)
        .map_err(|error| TextFileError::Encoding { path: path.into(), at: error.utf8_error().valid_up_to() })
}
