//! The text of source lines that kernels name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::Place;

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

    /// The line, without the spaces around it; `None` where the file is not there or has no such line.
    pub fn line(&mut self, place: &Place) -> Option<&str> {
        if place.file.is_empty() {
            return None;
        }
        let roots = &self.roots;
        let lines = self.files.entry(place.file.clone()).or_insert_with(|| {
            let text = roots.iter().find_map(|root| std::fs::read_to_string(root.join(&place.file)).ok())?;
            Some(text.lines().map(|line| line.trim().to_owned()).collect())
        });
        lines.as_ref()?.get((place.line as usize).checked_sub(1)?).map(String::as_str)
    }
}
