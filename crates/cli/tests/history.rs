//! The history as scripts and people see it, and what it survives.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lab::{AnyRecord, History, Provenance};
use serde_json::json;

fn strata(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
    command.env("STRATA_PTXAS", "none").env_remove("STRATA_HISTORY").args(arguments).assert()
}

fn said(assert: &assert_cmd::assert::Assert) -> String {
    let output = assert.get_output();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A document with one record of that subject and many lines, so that it takes several pages.
fn document(folder: &Path, subject: &str, instructions: u64) -> PathBuf {
    let path = folder.join(format!("{subject}.json"));
    let lines: Vec<_> =
        (1..100).map(|line| json!({"file": "kernel.rs", "line": line, "warp_instructions": line})).collect();
    let record = json!({"stratum": subject, "gpu": "T4", "sm": "sm_75", "dtype": "f32", "problem": "1x1x8x8", "source": "emulator",
        "level": "merged", "counters": {"warp_instructions": instructions}, "modelled_time_ms": 1.5, "lines": lines, "findings": []});
    std::fs::write(&path, json!({"schema": 1, "records": [record]}).to_string()).unwrap();
    path
}

/// The numbers under which records are said to be kept.
fn acknowledged(text: &str) -> Vec<i64> {
    let numbers = text.split("recorded as ").skip(1);
    numbers.filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).collect()
}

/// `--record` alone takes the history that the environment names.
#[test]
fn the_default_history_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history.db");
    for words in [&["dig", "--problem", "1x1x64x16", "--strata", "v2", "--record"][..], &["history"]] {
        let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
        let assert = command.env("STRATA_PTXAS", "none").env("STRATA_HISTORY", &file).args(words).assert().success();
        assert!(said(&assert).contains(if words.len() > 1 { "recorded as 1" } else { "1x1x64x16" }));
    }
}

#[test]
fn what_is_recorded_is_listed_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history.db");
    let history = file.to_str().unwrap();
    // Nothing is recorded unless that is asked for.
    strata(&["dig", "--problem", "1x1x64x16", "--strata", "v2"]).success();
    strata(&["history", "--history", history]).code(2);
    assert!(!file.exists());
    let record = format!("--record={history}");
    for (problem, more) in [("1x1x64x16", "--full"), ("1x1x64x16", "--full"), ("1x1x96x16", "--full")] {
        let assert = strata(&["dig", "--problem", problem, "--strata", "v2", &record, more]).success();
        assert_eq!(acknowledged(&said(&assert)).len(), 1);
    }
    let listed = said(&strata(&["history", "--history", history]).success());
    assert!(listed.lines().count() == 5 && listed.contains("1x1x96x16"), "{listed}");
    let equal = said(&strata(&["compare", "1", "last~1", "--history", history]).success());
    assert!(equal.contains("Every figure is equal"), "{equal}");
    let other = said(&strata(&["compare", "1", "last", "--history", history]).code(3));
    assert!(other.contains("v2 and v2 are incomparable: the problem differs (1x1x64x16; 1x1x96x16)"), "{other}");
    let missing = said(&strata(&["compare", "1", "9", "--history", history]).code(2));
    assert!(missing.contains("has no record 9"), "{missing}");
    // From files, without a history; the change is told.
    let (before, after) = (document(folder.path(), "a", 1000), document(folder.path(), "b", 1100));
    let text = std::fs::read_to_string(&after).unwrap().replace("\"b\"", "\"a\"");
    std::fs::write(&after, text).unwrap();
    let changed = said(&strata(&["compare", before.to_str().unwrap(), &format!("{}#a", after.display())]).success());
    assert!(changed.contains("+10.0 %") && changed.contains("1 other figures are equal"), "{changed}");
    let json = said(&strata(&["history", "--history", history, "--problem", "96", "--json", "-"]).success());
    assert_eq!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["records"].as_array().unwrap().len(), 1);
}

/// Processes that record and are killed at any moment.
#[test]
fn kill_loses_nothing_that_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let (file, document) = (folder.path().join("history.db"), document(folder.path(), "a", 1));
    // One that is not killed makes the file, and says how long a run takes.
    let start = Instant::now();
    strata(&["import", document.to_str().unwrap(), &format!("--record={}", file.display())]).success();
    let whole = start.elapsed();
    let mut kept = HashSet::from([1]);
    let mut killed = 0;
    let mut moment = 1_u64;
    for _ in 0..200 {
        let mut child = Command::new(assert_cmd::cargo::cargo_bin!("strata"))
            .args(["import", document.to_str().unwrap(), &format!("--record={}", file.display())])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Moments that follow no pattern, up to somewhat more than a run takes.
        moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(whole.mul_f64(1.5 * (moment >> 40) as f64 / f64::from(1 << 24)));
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let numbers = acknowledged(&String::from_utf8_lossy(&output.stderr));
        killed += usize::from(numbers.is_empty());
        kept.extend(numbers);
    }
    let history = History::read(&file).unwrap();
    let ids: HashSet<i64> =
        history.entries(&lab::history::Filter::default()).unwrap().iter().map(|entry| entry.id).collect();
    assert!(kept.is_subset(&ids), "{kept:?} {ids:?}");
    for id in ids {
        assert_eq!(history.record(id).unwrap().unwrap().key.subject, "a");
    }
    assert!(killed > 0 && kept.len() > 1, "{killed} were killed before they had recorded, {} had", kept.len());
}

#[test]
fn processes_take_turns() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history.db");
    let spawn = |index: usize| {
        let document = document(folder.path(), &format!("s{index}"), 1);
        Command::new(assert_cmd::cargo::cargo_bin!("strata"))
            .args(["import", document.to_str().unwrap(), &format!("--record={}", file.display())])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..12).map(spawn).collect();
    let outputs = children.into_iter().map(|child| child.wait_with_output().unwrap());
    let numbers: HashSet<i64> =
        outputs.flat_map(|output| acknowledged(&String::from_utf8_lossy(&output.stderr))).collect();
    assert_eq!(numbers, (1..=12).collect());
}

/// A limit on the size of files stands for the end of the disk.
#[cfg(unix)]
#[test]
fn a_full_disk_is_told_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (file, document) = (folder.path().join("history.db"), document(folder.path(), "a", 1));
    let binary = assert_cmd::cargo::cargo_bin!("strata");
    let words = format!("import {} --record={}", document.display(), file.display());
    let run = |blocks: &str| {
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec {} {words}", binary.display());
        Command::new("bash").args(["-c", &script]).output().unwrap()
    };
    let mut kept = 0;
    let refused = loop {
        let output = run("64");
        if !output.status.success() {
            break output;
        }
        kept += 1;
        assert!(kept < 100, "the limit was never reached");
    };
    assert!(kept > 0);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("history.db") && text.starts_with("error: cannot write the history"), "{text}");
    // What was to be recorded is told all the same.
    assert!(String::from_utf8_lossy(&refused.stdout).contains("a on T4"));
    let entries = || History::read(&file).unwrap().entries(&lab::history::Filter::default()).unwrap().len();
    assert_eq!(entries(), kept);
    assert!(run("unlimited").status.success());
    assert_eq!(entries(), kept + 1);
}

/// The superuser may write anywhere: as root, this runs as nobody.
#[cfg(unix)]
#[test]
fn a_folder_that_is_read_only_can_be_read() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("deep");
    let (file, document) = (deep.join("history.db"), document(folder.path(), "a", 1));
    strata(&["import", document.to_str().unwrap(), &format!("--record={}", file.display())]).success();
    // A copy that anybody may run.
    let binary = folder.path().join("strata");
    std::fs::copy(assert_cmd::cargo::cargo_bin!("strata"), &binary).unwrap();
    for (path, mode) in [(folder.path(), 0o755), (&binary, 0o755), (&document, 0o644), (&file, 0o444), (&deep, 0o555)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let is_root = std::fs::File::create(deep.join("probe")).is_ok();
    let run = |words: &[&str]| {
        let mut command = if is_root {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&binary);
            command
        } else {
            Command::new(&binary)
        };
        command.args(words).current_dir("/").output().unwrap()
    };
    let listed = run(&["history", "--history", file.to_str().unwrap()]);
    assert!(listed.status.success() && String::from_utf8_lossy(&listed.stdout).contains("1x1x8x8"), "{listed:?}");
    let refused = run(&["import", document.to_str().unwrap(), &format!("--record={}", file.display())]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && text.contains("must be there and writable"), "{text}");
    // Refused before any work is done.
    assert!(refused.stdout.is_empty());
    std::fs::set_permissions(&deep, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// 10,000 records of the size that a dig's have.
#[test]
fn ten_thousand_records_are_quick_to_list_and_compare() {
    let folder = tempfile::tempdir().unwrap();
    let dug = folder.path().join("dig.json");
    strata(&["dig", "--problem", "1x1x64x16", "--strata", "v2", "--json", dug.to_str().unwrap()]).success();
    let record = lab::reference::read(&dug).unwrap().records.remove(0);
    let file = folder.path().join("history.db");
    let records: Vec<AnyRecord> = vec![record; 10_000];
    History::open(&file).unwrap().add(&records, &Provenance::now()).unwrap();
    let history = file.to_str().unwrap();
    let time = |arguments: &[&str]| {
        let run = || {
            let start = Instant::now();
            strata(arguments).success();
            start.elapsed()
        };
        (0..10).map(|_| run()).min().unwrap()
    };
    let (list, compare) =
        (time(&["history", "--history", history]), time(&["compare", "3", "9999", "--history", history]));
    println!("history {list:?}, compare {compare:?}");
    // Without optimisation, and in the noise of other tests, no figure says anything.
    if cfg!(not(debug_assertions)) {
        assert!(list < Duration::from_millis(100) && compare < Duration::from_millis(100), "{list:?}, {compare:?}");
    }
}
