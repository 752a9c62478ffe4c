//! Files that are there whole or not at all.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Writes the parts one after the other to a file beside `path`, then renames it to `path`. A link is followed, an existing file
/// keeps its permissions, and what is no regular file (a device, a pipe) is written to as it is.
///
/// # Errors
/// When the folder cannot be written to or is full; a regular file at `path` is then as it was.
pub fn write(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let existing = fs::metadata(&target).ok();
    if existing.as_ref().is_some_and(|found| !found.is_file()) {
        let mut file = OpenOptions::new().write(true).open(&target)?;
        return parts.iter().try_for_each(|part| file.write_all(part));
    }
    let mut builder = tempfile::Builder::new();
    // The permissions any new file gets; by default a temporary file is its owner's only.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder_of(&target))?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    if let Some(existing) = existing {
        file.as_file().set_permissions(existing.permissions())?;
    }
    file.persist(&target).map_err(|error| error.error)?;
    Ok(())
}

/// Whether [`write()`] to `path` can be expected to work; nothing is left there.
///
/// # Errors
/// When its folder is not there or cannot be written to, or `path` is a folder.
pub fn check(path: &Path) -> io::Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    match fs::metadata(&target) {
        Ok(found) if !found.is_file() => OpenOptions::new().write(true).open(&target).map(|_| ()),
        _ => tempfile::Builder::new().tempfile_in(folder_of(&target)).map(|_| ()),
    }
}

/// The folder of a file.
fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn links_permissions_and_devices_stay_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&file, &link).unwrap();
        write(&link, &[b"ne", b"w"]).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        // A folder is no regular file either: it is refused and stays.
        assert!(write(folder.path(), &[b"x"]).is_err() && check(folder.path()).is_err());
        assert!(check(&folder.path().join("no/file")).is_err());
        check(&folder.path().join("new")).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        write(Path::new("/dev/null"), &[b"x"]).unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
