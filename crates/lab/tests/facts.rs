//! The checked-in fact sheets are what the kernels are.

use std::fs;
use std::path::Path;

use lab::{facts, ptxas};

#[test]
fn sheets_say_what_the_kernels_are() {
    if let Err(missing) = ptxas::Tool::Ptxas.find().and_then(|_| ptxas::Tool::Nvdisasm.find()) {
        assert!(std::env::var_os("CI").is_none(), "{missing}");
        eprintln!("skipped: {missing}");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("facts");
    let mut differing = Vec::new();
    for sheet in facts::sheets().unwrap() {
        let kept = fs::read_to_string(folder.join(&sheet.path)).unwrap_or_default();
        let lines = kept.lines().zip(sheet.text.lines());
        if let Some((kept, made)) = lines.clone().find(|(kept, made)| kept != made) {
            differing.push(format!("{}:\n  kept {kept}\n  now  {made}", sheet.path.display()));
        } else if kept != sheet.text {
            differing.push(format!("{}: the lengths differ", sheet.path.display()));
        }
    }
    let command = "`cargo run --release -- facts` writes them anew";
    assert!(
        differing.is_empty(),
        "{} sheets differ; {command}, then review the diff:\n{}",
        differing.len(),
        differing.join("\n")
    );
}
