//! Runs `filetests/*.ptx` on the emulator; `docs/filetests.md` says what they are.

use std::fs;
use std::path::Path;

use emulator::filetest::{FileTest, emulate};

#[test]
fn every_file_does_what_it_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    let mut wrong = String::new();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy();
        let text = fs::read_to_string(&path).unwrap();
        match FileTest::parse(&text, &name) {
            Err(error) => wrong += &format!("{name}: {error}\n"),
            Ok(test) => {
                for run in test.runs() {
                    if let Err(disagreement) = test.check(run, emulate) {
                        wrong += &format!("{name}, run of line {}:\n{disagreement}\n", run.line);
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
