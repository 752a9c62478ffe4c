//! Where a record comes from: when it was made, by which command, of which revision.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Who made a record, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// Seconds since 1970, UTC.
    pub made: i64,
    /// The command line.
    pub command: String,
    /// The program and its version.
    pub program: String,
    /// The commit that is checked out in the current folder, with `+` where tracked files differ from it; `None` outside of a
    /// git repository.
    pub revision: Option<String>,
    /// The current folder.
    pub folder: String,
}

impl Provenance {
    /// That of a record that this process makes now.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let folder = std::env::current_dir().unwrap_or_default();
        Self {
            made: since.as_secs().cast_signed(),
            command: std::env::args().map(|word| quoted(&word)).collect::<Vec<_>>().join(" "),
            program: concat!("flashstrata ", env!("CARGO_PKG_VERSION")).into(),
            revision: revision(&folder),
            folder: folder.display().to_string(),
        }
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+#".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

fn revision(folder: &Path) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(folder).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { commit + "+" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_as_a_shell_needs() {
        assert_eq!(["dig", "1x2 f16", "it's", ""].map(quoted).join(" "), r"dig '1x2 f16' 'it'\''s' ''");
    }
}
