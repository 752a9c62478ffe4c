//! `strata facts`.

use std::fs;

use anyhow::Context;

use crate::Failure;
use crate::arguments::FactsArguments;

/// Writes every sheet, each file at once or not at all.
pub fn facts(arguments: &FactsArguments) -> Result<(), Failure> {
    for sheet in lab::facts::sheets()? {
        let path = arguments.output.join(&sheet.path);
        let folder = path.parent().unwrap_or(&arguments.output);
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
        lab::atomic_file::write(&path, &[sheet.text.as_bytes()])
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
