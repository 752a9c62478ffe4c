//! What somebody may do to a kernel, and what the gate says: kernels in PTX that the emulator runs.

use std::path::Path;

use lab::gate::{Baseline, Judged, Tolerances, Verdict, gate};
use lab::probe::{Settings, probe};
use lab::{AnyRecord, Watch};

/// Each of 64 threads loads a float, passes it to its neighbour through a tile of shared memory, and stores it.
fn kernel(tile_step: u32, loads: usize) -> String {
    let load = "ld.volatile.global.f32 %f1, [%rd3];\n".repeat(loads);
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64
        .visible .entry copy(.param .u64 in, .param .u64 out) {{
        .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<8>;
        .shared .align 4 .b8 tile[8192];
        mov.u32 %r1, %tid.x;
        ld.param.u64 %rd1, [in];
        ld.param.u64 %rd2, [out];
        mad.wide.u32 %rd3, %r1, 4, %rd1;
        mad.wide.u32 %rd4, %r1, 4, %rd2;
        {load}
        mul.lo.u32 %r2, %r1, {tile_step};
        mov.u32 %r3, tile;
        add.u32 %r2, %r2, %r3;
        st.shared.f32 [%r2], %f1;
        bar.sync 0;
        ld.shared.f32 %f2, [%r2];
        st.global.f32 [%rd4], %f2;
        ret;
        }}"
    )
}

fn record(ptx: &str, dtype: &str) -> AnyRecord {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("copy.ptx"), ptx).unwrap();
    let launch = format!(
        "ptx = \"copy.ptx\"\ngrid = \"4\"\nblock = \"64\"\nregisters = 32\nargs = [\"buf:{dtype}:64:ramp\", \"buf:{dtype}:64:uninit\"]\n"
    );
    let path = folder.path().join("copy.toml");
    std::fs::write(&path, launch).unwrap();
    let probed = probe(&Settings::read(&path).unwrap(), Watch::default()).unwrap();
    assert!(probed.hazard.is_none());
    AnyRecord::of(&probed.record()).unwrap()
}

fn judged(now: AnyRecord) -> Judged {
    gate(&[record(&kernel(4, 1), "f32")], &[now], &Tolerances::default()).records.remove(0)
}

fn worse(judged: &Judged) -> Vec<&str> {
    let worse = judged.figures.iter().filter(|figure| figure.verdict == Verdict::Regressed);
    worse.map(|figure| figure.name.as_str()).collect()
}

#[test]
fn ten_runs_of_the_same_code_pass() {
    let baseline = [record(&kernel(4, 1), "f32")];
    for _ in 0..10 {
        let gated = gate(&baseline, &[record(&kernel(4, 1), "f32")], &Tolerances::default());
        assert_eq!((gated.verdict, gated.records[0].figures.len()), (Verdict::Pass, 0));
    }
}

#[test]
fn a_planted_bank_conflict_is_a_regression() {
    let conflict = judged(record(&kernel(8, 1), "f32"));
    assert_eq!(conflict.verdict, Verdict::Regressed);
    assert!(worse(&conflict).contains(&"shared_load_bank_conflicts"), "{:?}", worse(&conflict));
    assert!(!worse(&conflict).contains(&"global_load_sectors"));
}

#[test]
fn a_planted_global_read_is_a_regression() {
    let read = judged(record(&kernel(4, 2), "f32"));
    assert_eq!(read.verdict, Verdict::Regressed);
    assert!(
        worse(&read).contains(&"global_load_sectors") && worse(&read).contains(&"requested_read"),
        "{:?}",
        worse(&read)
    );
    assert!(!worse(&read).contains(&"shared_load_bank_conflicts"));
    // One less is none.
    let before = [record(&kernel(4, 2), "f32")];
    let gated = gate(&before, &[record(&kernel(4, 1), "f32")], &Tolerances::default());
    assert_eq!(gated.verdict, Verdict::Improved);
}

#[test]
fn another_dtype_is_incomparable() {
    let other = judged(record(&kernel(4, 1), "u32"));
    assert_eq!(other.verdict, Verdict::Incomparable);
    let fields: Vec<&str> = other.differing.iter().map(|one| one.field.as_str()).collect();
    assert_eq!(fields, ["the problem", "the dtype"]);
}

#[test]
fn what_is_accepted_passes_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("baseline.json");
    let mut baseline = Baseline::read(&path).unwrap();
    for (loads, reason) in [(1, "the first"), (2, "reads twice, as \"x\" needs")] {
        let now = record(&kernel(4, loads), "f32");
        baseline.accept(std::slice::from_ref(&now), reason);
        baseline.write(&path).unwrap();
        baseline = Baseline::read(&path).unwrap();
        assert_eq!(gate(&baseline.records, &[now], &Tolerances::default()).verdict, Verdict::Pass);
    }
    assert_eq!(
        baseline.accepted.iter().map(|one| one.reason.as_str()).collect::<Vec<_>>(),
        ["the first", "reads twice, as \"x\" needs"]
    );
    // It is a document like any other, and holds no lines.
    assert_eq!(lab::reference::read(&path).unwrap().records, baseline.records);
    assert!(std::fs::metadata(&path).unwrap().len() < 5000);
    std::fs::write(&path, "{\"schema\": 2, \"records\": []}").unwrap();
    assert!(Baseline::read(&path).unwrap_err().to_string().contains("schema is 2"));
    assert!(Baseline::read(Path::new("/")).is_err());
}
