//! Standard output and files, without panics.

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::Context;

/// Prints to standard output.
pub fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Whether text for standard output is to be coloured: on a terminal, unless `NO_COLOR` is set (no-color.org).
pub fn color() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Whether `path` stands for standard output.
pub fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes `text` to `path`, all of it or nothing; `-` is standard output.
pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if is_stdout(path) {
        return Ok(print(text)?);
    }
    lab::atomic_file::write(path, &[text.as_bytes()]).with_context(|| format!("cannot write {}", path.display()))
}

/// Refuses a place that cannot be written to, before any work is done for it; nothing is written.
pub fn check(path: Option<&Path>) -> anyhow::Result<()> {
    match path.filter(|path| !is_stdout(path)) {
        Some(path) => lab::atomic_file::check(path).with_context(|| format!("cannot write {}", path.display())),
        None => Ok(()),
    }
}
