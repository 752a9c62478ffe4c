//! What `strata plan` and `strata tune` print without a GPU, and what `verify` says of the library's choice.

fn strata(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
    command.env("STRATA_PTXAS", "none").args(arguments).assert()
}

fn said(arguments: &[&str]) -> String {
    String::from_utf8(strata(arguments).success().get_output().stdout.clone()).unwrap()
}

fn complaint(arguments: &[&str], status: i32) -> String {
    String::from_utf8(strata(arguments).code(status).get_output().stderr.clone()).unwrap()
}

#[test]
fn a_plan_says_what_runs_and_why_nothing_newer() {
    let text = said(&["plan", "--gpu", "RTX 2070", "--problem", "2x8/2x512x64 causal"]);
    insta::assert_snapshot!(text);
}

#[test]
fn wishes_are_followed_or_refused() {
    let wide = ["--stratum", "v2", "--block-q", "64", "--threads", "256"];
    let text = said(&[&["plan", "--gpu", "T4", "--problem", "1x8x512x64"][..], &wide].concat());
    assert!(text.contains("  v2 (block_q 64, block_kv 32, 256 threads; as given)\n"), "{text}");
    let hopper = said(&["plan", "--gpu", "H100", "--problem", "1x8x512x128", "--dtype", "bf16", "--causal"]);
    assert!(hopper.contains("1x8x512x128 bf16 causal on H100 SXM") && hopper.contains("\n  v3 ("), "{hopper}");
    assert!(hopper.contains("workspace 8 bytes: counter 8"), "{hopper}");
    let clusters =
        said(&["plan", "--gpu", "H100", "--problem", "1x8x512x128 bf16", "--stratum", "v3", "--cluster", "2"]);
    assert!(clusters.contains("launch flash_v3: 32 CTAs of 384 threads, 2 to a cluster\n"), "{clusters}");
    for (arguments, status, why) in [
        (&["--stratum", "v3", "--gpu", "T4"][..], 1, "target is sm_75: v3 needs sm_90 or later"),
        (
            &["--stratum", "v3", "--gpu", "H100", "--problem", "1x8x512x128 bf16 causal", "--cluster", "2"],
            1,
            "cluster is 2: CTAs of v3 load blocks together in calls without a mask alone",
        ),
        (&["--block-q", "64"], 2, "stratum is auto, which chooses its tiles"),
        (&["--stratum", "v9"], 2, "or auto"),
        (&["--gpu", "T5"], 2, "unknown GPU 'T5'"),
        (&["--stratum", "v2", "--threads", "100"], 1, "threads is 100: it must be a power of two"),
        (&["--tuned", "/"], 2, "/: "),
    ] {
        let told = complaint(&[&["plan"], arguments].concat(), status);
        assert!(told.contains(why), "{arguments:?}: {told}");
    }
}

#[test]
fn a_plan_is_data_too() {
    let text = said(&["plan", "--gpu", "H200", "--problem", "1x4x300x64 f16 causal", "--json", "-"]);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let record = &value["records"][0];
    assert_eq!((&value["schema"], &record["chosen"]["stratum"]), (&1.into(), &"v3".into()));
    assert_eq!(record["chosen"]["zeroed_bytes"], 8);
    assert!(record["chosen"]["launches"][0]["occupancy"]["blocks_per_sm"].is_u64());
    let strata = record["strata"].as_array().unwrap();
    assert_eq!(
        (strata[0]["stratum"].as_str(), strata.last().unwrap()["stratum"].as_str()),
        (Some("v3"), Some("naive"))
    );
    assert!(strata.iter().all(|one| one["plan"].is_object() != one["why_not"].is_string()));
    assert!(strata[0]["covers"]["features"].as_array().unwrap().contains(&"varlen".into()));
}

#[test]
fn tune_lists_what_it_would_time() {
    let text = said(&["tune", "--gpu", "H200", "--problem", "2x16x4096x128 bf16"]);
    assert!(text.starts_with("2x16x4096x128 bf16 on H200\n") && text.contains("default"), "{text}");
    let rows = text.lines().filter(|line| line.starts_with("v3 ")).count();
    assert!((4..=11).contains(&rows), "{text}");
    let json = said(&["tune", "--gpu", "T4", "--problem", "1x8x512x64", "--per-stratum", "3", "--json", "-"]);
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    let configurations = value["records"][0]["configurations"].as_array().unwrap();
    assert!(configurations.len() <= 7 && configurations[0]["default"] == true);
    assert!(configurations.iter().all(|one| one["median_ms"].is_null()));
    assert!(
        complaint(&["tune", "--device", "emulator", "--problem", "1x1x8x8"], 2).contains("tune takes time on a GPU")
    );
    assert!(complaint(&["tune"], 2).contains("--problem"));
}

#[test]
fn what_was_measured_is_consulted_where_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    std::fs::write(&path, "no cache").unwrap();
    let arguments = ["plan", "--problem", "1x1x64x64", "--tuned", path.to_str().unwrap()];
    let told = String::from_utf8(strata(&arguments).success().get_output().stderr.clone()).unwrap();
    assert!(told.starts_with("note: ") && told.contains("it was set aside as "), "{told}");
    assert!(folder.path().join("tuning.json.corrupt-1").exists());
}

#[test]
fn verify_tells_what_a_sweep_covered() {
    let text = said(&["verify", "--stratum", "auto", "--case", "r0,r1,r2,r3,r4,r5", "--dtype", "f16", "--gpu", "H100"]);
    assert!(text.starts_with("random calls that were covered, of those drawn:\n  dtype     f16 "), "{text}");
    assert!(text.contains("\n  strides   ") && text.contains(" 0 failed, "), "{text}");
}
