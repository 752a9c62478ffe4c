use serde_json::{Value, json};

use super::*;

fn record(change: impl FnOnce(&mut Value)) -> AnyRecord {
    let mut json = json!({"stratum": "v2", "gpu": "T4", "sm": "sm_75", "dtype": "f32", "problem": "1x1x64x64", "source": "emulator",
        "level": "merged", "tiles": {"block_q": 32, "block_kv": 32, "threads": 128}, "sample": {"heads": 1, "of": 1, "exact": true},
        "counters": {"warp_instructions": 1000, "shared_load_wavefronts": 500, "shared_load_bank_conflicts": 0},
        "occupancy": {"theoretical_pct": 50.0, "threads": 128}, "modelled_time_ms": 1.0, "measured_time_ms": null});
    change(&mut json);
    json.try_into().unwrap()
}

fn judged(before: impl FnOnce(&mut Value), after: impl FnOnce(&mut Value)) -> Judged {
    gate(&[record(before)], &[record(after)], &Tolerances::default()).records.remove(0)
}

fn none(_: &mut Value) {}

fn hardware(json: &mut Value) {
    (json["source"], json["level"]) = ("ncu".into(), "hardware".into());
}

#[test]
fn any_change_of_an_exact_counter_is_a_verdict() {
    assert_eq!(judged(none, none).verdict, Verdict::Pass);
    let more = judged(none, |json| json["counters"]["warp_instructions"] = 1001.into());
    assert_eq!((more.verdict, more.figures.len()), (Verdict::Regressed, 1));
    assert!((more.figures[0].change.unwrap() - 0.001).abs() < 1e-12);
    assert_eq!(judged(none, |json| json["counters"]["warp_instructions"] = 999.into()).verdict, Verdict::Improved);
    // More occupancy is better, and a conflict where there was none has no ratio.
    assert_eq!(judged(none, |json| json["occupancy"]["theoretical_pct"] = 75.0.into()).verdict, Verdict::Improved);
    let conflicts = judged(none, |json| json["counters"]["shared_load_bank_conflicts"] = 1.into());
    assert_eq!((conflicts.verdict, conflicts.figures[0].change), (Verdict::Regressed, None));
    // A counter that is not listed did not count.
    let new = judged(|json| drop(json["counters"].as_object_mut().unwrap().remove("warp_instructions")), none);
    assert_eq!(new.verdict, Verdict::Regressed);
    // Worse in one thing is worse.
    let both = judged(none, |json| {
        json["counters"]["warp_instructions"] = 10.into();
        json["modelled_time_ms"] = 1.000_000_001.into();
    });
    assert_eq!((both.verdict, both.figures.len()), (Verdict::Regressed, 2));
}

#[test]
fn the_gate_file_may_allow_more() {
    let worse = [record(|json| json["counters"]["warp_instructions"] = 1001.into())];
    let with = |tolerances: Tolerances| gate(&[record(none)], &worse, &tolerances).verdict;
    assert_eq!(with(Tolerances { exact: 0.01, ..Tolerances::default() }), Verdict::Pass);
    let figure = [("warp_instructions".to_string(), 0.002)].into();
    assert_eq!(with(Tolerances { figure, ..Tolerances::default() }), Verdict::Pass);
    let ignore = vec!["warp_instructions".into()];
    assert_eq!(with(Tolerances { ignore, ..Tolerances::default() }), Verdict::Pass);
}

#[test]
fn another_configuration_is_incomparable_and_named() {
    let tile = judged(none, |json| json["tiles"]["block_kv"] = 64.into());
    assert_eq!(tile.verdict, Verdict::Incomparable);
    assert_eq!(
        tile.differing.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["the tile configuration differs (32x32 of 128 threads; 32x64 of 128 threads)"]
    );
    let dtype = judged(none, |json| json["dtype"] = "f16".into());
    assert_eq!((dtype.verdict, dtype.differing[0].field.as_str()), (Verdict::Incomparable, "the dtype"));
    let tool =
        judged(|json| json["tools"] = json!({"triton": "3.6.0"}), |json| json["tools"] = json!({"triton": "3.7.1"}));
    assert_eq!(tool.differing[0].to_string(), "the toolchain differs (triton 3.6.0; triton 3.7.1)");
    // A record that one side alone has.
    let other = || record(|json| json["stratum"] = "v3".into());
    let gated = gate(&[record(none)], &[record(none), other()], &Tolerances::default());
    assert_eq!((gated.verdict, gated.count(Verdict::Pass)), (Verdict::Incomparable, 1));
    let gated = gate(&[record(none), other()], &[record(none)], &Tolerances::default());
    assert_eq!(gated.verdict.status(), 3);
    assert!(gated.records[1].note.as_ref().unwrap().contains("not measured now"));
}

#[test]
fn a_chips_counters_may_differ_a_little() {
    let counted = |warps: u64| {
        judged(hardware, move |json| {
            hardware(json);
            json["counters"]["warp_instructions"] = warps.into();
        })
        .verdict
    };
    assert_eq!(
        [1009, 1011, 989, 991].map(counted),
        [Verdict::Pass, Verdict::Regressed, Verdict::Improved, Verdict::Pass]
    );
    // Arbitration counts as conflicts: few among many wavefronts are none.
    let conflicts = |conflicts: u64| {
        judged(hardware, move |json| {
            hardware(json);
            json["counters"]["shared_load_bank_conflicts"] = conflicts.into();
        })
        .verdict
    };
    assert_eq!([4, 6].map(conflicts), [Verdict::Pass, Verdict::Regressed]);
    // What was not read is not zero.
    let unread = judged(hardware, |json| {
        hardware(json);
        json["counters"].as_object_mut().unwrap().remove("warp_instructions");
    });
    assert_eq!((unread.verdict, unread.figures[0].after), (Verdict::Incomparable, None));
}

#[test]
fn a_time_in_a_file_does_not_suffice() {
    let timed = |json: &mut Value| json["measured_time_ms"] = 2.0.into();
    let judged = judged(timed, timed);
    assert_eq!((judged.verdict, judged.verdict.status()), (Verdict::Insufficient, 3));
    assert!(judged.note.unwrap().contains("--against"));
}

#[test]
fn nothing_is_no_pass() {
    assert_eq!(gate(&[], &[], &Tolerances::default()).verdict, Verdict::Insufficient);
}
