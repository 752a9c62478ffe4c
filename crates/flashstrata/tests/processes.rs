//! Several processes on one tuning cache: this test starts itself.

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use flashstrata::tune::cache::{load, store};
use flashstrata::tune::{Entry, Key};
use flashstrata::{Gpu, Hardware, ProblemSpec, Stratum, Tiles};

const CACHE: &str = "STRATA_TEST_CACHE";
const FIRST: &str = "STRATA_TEST_FIRST";

/// A measurement of its own key for each number.
fn entry(number: u32) -> Entry {
    let hardware = Hardware { driver: Some("1".into()), ..Hardware::from(Gpu::find("T4").unwrap()) };
    let problem = ProblemSpec::new(1, 1, 64, 1 + number as usize % 256).build().unwrap();
    let key = Key { driver: number.to_string(), ..Key::new(&hardware, &problem).unwrap() };
    let tiles = Tiles { block_q: 32, block_kv: 32, threads: 128 };
    Entry { key, problem: problem.to_string(), stratum: Stratum::V2, tiles, median_ms: 1.0, default_ms: 1.0, timed: 1 }
}

/// What a started process does; nothing in the run of the tests themselves.
#[test]
fn child() {
    let (Some(cache), Ok(first)) = (std::env::var_os(CACHE), std::env::var(FIRST)) else { return };
    let first: u32 = first.parse().unwrap();
    for number in first..first + 25 {
        store(Path::new(&cache), &entry(number)).unwrap();
    }
}

fn start(cache: &Path, first: u32) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact"]).env(CACHE, cache).env(FIRST, first.to_string());
    command.stdout(std::process::Stdio::null()).spawn().unwrap()
}

#[test]
fn processes_do_not_lose_each_others_entries() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("tuning.json");
    let children: Vec<_> = (0..4).map(|child| start(&cache, 100 * child)).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(load(&cache).unwrap().table.len(), 100);
}

#[test]
fn a_process_that_is_killed_leaves_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("tuning.json");
    store(&cache, &entry(0)).unwrap();
    for round in 1..=10 {
        let mut child = start(&cache, 100 * round);
        std::thread::sleep(Duration::from_millis(3 * u64::from(round)));
        child.kill().unwrap();
        child.wait().unwrap();
        // Whatever it was doing: the cache is whole, its lock is free, and nothing else lies around after the next writer.
        let loaded = load(&cache).unwrap();
        assert!(loaded.notice.is_none() && !loaded.table.is_empty());
        store(&cache, &entry(round)).unwrap();
    }
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}
