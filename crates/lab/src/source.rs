//! The text of source lines that kernels name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::{AnyRecord, Place, text_file};

/// A file larger than this is no source.
const MOST_BYTES: u64 = 16 << 20;

/// Reads lines of source files, where they are there: a kernel's file names are relative to the workspace it was built in.
#[derive(Debug, Default)]
pub struct Sources {
    roots: Vec<PathBuf>,
    files: HashMap<String, Option<Vec<String>>>,
    kept: HashMap<Place, String>,
}

impl Sources {
    /// Looks in the current directory and in the program's, and in all that hold them.
    pub fn new() -> Self {
        let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
        let roots = starts.iter().flatten().flat_map(|start| start.ancestors()).map(Path::to_owned).collect();
        Self { roots, ..Self::default() }
    }

    /// Looks in this folder too, before the others.
    pub fn look_in(&mut self, folder: &Path) {
        self.roots.insert(0, folder.to_owned());
    }

    /// From now on takes the lines whose text this record has kept from there: the file may have changed since.
    pub fn of_record(&mut self, record: &AnyRecord) {
        let lines = record.json.get("lines").and_then(Value::as_array);
        self.kept = lines.into_iter().flatten().filter_map(kept).collect();
    }

    /// The line, without the spaces around it; `None` where the file is not there or has no such line.
    pub fn line(&mut self, place: &Place) -> Option<&str> {
        if place.file.is_empty() {
            return None;
        }
        if let Some(text) = self.kept.get(place) {
            return Some(text);
        }
        let roots = &self.roots;
        let lines = self.files.entry(place.file.clone()).or_insert_with(|| {
            // As it is named, and beside what names it: a file that came from elsewhere was copied with its kernel.
            let name = Path::new(&place.file);
            let base = name.file_name().map(Path::new).filter(|base| *base != name);
            let paths =
                [Some(name), base].into_iter().flatten().flat_map(|name| roots.iter().map(move |root| root.join(name)));
            let text = paths.filter_map(|path| text_file::read(&path, MOST_BYTES).ok()).next()?;
            Some(text.lines().map(|line| line.trim().to_owned()).collect())
        });
        lines.as_ref()?.get((place.line as usize).checked_sub(1)?).map(String::as_str)
    }
}

/// A line of a record with its text.
fn kept(line: &Value) -> Option<(Place, String)> {
    let text = line.get("text")?.as_str()?.to_owned();
    Some((Place::deserialize(line).ok()?, text))
}
