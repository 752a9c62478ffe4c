//! Files that are there whole or not at all.

use std::io::{self, Write};
use std::path::Path;

/// Writes the parts one after the other to a file beside `path`, then renames it to `path`.
///
/// # Errors
/// When the folder cannot be written to or is full; `path` is then as it was.
pub fn write(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    // The permissions any new file gets; by default a temporary file is its owner's only.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}
