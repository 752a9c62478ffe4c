//! PTX that others' compilers wrote: every `.ptx` under the folder that the environment variable `STRATA_CORPUS` names (what
//! `triton/compile.py` writes) parses, is valid, and survives printing. Without the variable the test says that it was skipped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs};

use ptx::parse;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "ptx") {
            found.push(path);
        }
    }
}

/// What is wrong with one text.
fn check(text: &str) -> Result<(), String> {
    let kernels = parse(text).map_err(|e| format!("parse: {e}"))?;
    for kernel in &kernels {
        kernel.validate().map_err(|e| format!("validate: {e}"))?;
        let again = parse(&kernel.to_string()).map_err(|e| format!("parse what was printed: {e}"))?;
        if again.len() != 1 || again[0] != *kernel {
            return Err("the printed kernel is not the parsed one".to_owned());
        }
    }
    Ok(())
}

#[test]
fn foreign_modules_parse_and_print() {
    let Some(folder) = env::var_os("STRATA_CORPUS") else {
        eprintln!("skipped: STRATA_CORPUS names no folder");
        return;
    };
    let mut paths = Vec::new();
    files(Path::new(&folder), &mut paths);
    paths.sort();
    assert!(!paths.is_empty(), "no .ptx under {}", Path::new(&folder).display());
    // Failures by message without the numbers in it: one cause shows as one line.
    let mut causes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in &paths {
        if let Err(message) = check(&fs::read_to_string(path).unwrap()) {
            let cause = message.replace(|c: char| c.is_ascii_digit(), "#");
            causes.entry(cause).or_default().push(format!("{}: {message}", path.display()));
        }
    }
    let failed: usize = causes.values().map(Vec::len).sum();
    println!("{} of {} modules parse and print", paths.len() - failed, paths.len());
    let mut lines: Vec<String> = causes.into_values().map(|c| format!("{} modules: {}", c.len(), c[0])).collect();
    lines.sort_by_key(|l| std::cmp::Reverse(l.split(' ').next().and_then(|n| n.parse::<u64>().ok())));
    assert!(failed == 0, "{failed} modules fail:\n{}", lines.join("\n"));
}
