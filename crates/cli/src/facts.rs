//! `strata facts`.

use std::fs;
use std::io::Write as _;

use anyhow::Context;

use crate::Failure;
use crate::arguments::FactsArguments;

/// Writes every sheet, each file at once or not at all.
pub fn facts(arguments: &FactsArguments) -> Result<(), Failure> {
    for sheet in lab::facts::sheets()? {
        let path = arguments.output.join(&sheet.path);
        let folder = path.parent().unwrap_or(&arguments.output);
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
        let mut file =
            tempfile::NamedTempFile::new_in(folder).with_context(|| format!("cannot write to {}", folder.display()))?;
        file.write_all(sheet.text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
        file.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
