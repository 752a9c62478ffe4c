//! The text of source lines that kernels name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::{Place, text_file};

/// A file larger than this is no source.
const MOST_BYTES: u64 = 16 << 20;

/// Reads lines of source files, where they are there: a kernel's file names are relative to the workspace it was built in.
#[derive(Debug, Default)]
pub struct Sources {
    roots: Vec<PathBuf>,
    files: HashMap<String, Option<Vec<String>>>,
}

impl Sources {
    /// Looks in the current directory and in the program's, and in all that hold them.
    pub fn new() -> Self {
        let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
        let roots = starts.iter().flatten().flat_map(|start| start.ancestors()).map(Path::to_owned).collect();
        Self { roots, files: HashMap::new() }
    }

    /// Looks in this folder too, before the others.
    pub fn look_in(&mut self, folder: &Path) {
        self.roots.insert(0, folder.to_owned());
    }

    /// The line, without the spaces around it; `None` where the file is not there or has no such line.
    pub fn line(&mut self, place: &Place) -> Option<&str> {
        if place.file.is_empty() {
            return None;
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
