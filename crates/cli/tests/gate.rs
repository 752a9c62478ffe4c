//! `strata gate` and `strata accept` as CI sees them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

fn strata(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
    command.env("STRATA_PTXAS", "none").args(arguments).assert()
}

fn said(assert: &assert_cmd::assert::Assert) -> String {
    let output = assert.get_output();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn change(path: &Path, change: impl Fn(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    value["records"].as_array_mut().unwrap().iter_mut().for_each(change);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn a_gate_measures_what_its_baseline_has_and_says_what_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (config, baseline) = (path("gate.toml"), path("baseline.json"));
    std::fs::write(&config, "[[dig]]\nproblem = \"1x1x64x16\"\ngpu = \"T4\"\nstrata = [\"v2\", \"v2_kt\"]\n").unwrap();
    let accept = |reason: &str| strata(&["accept", "--baseline", &baseline, "--config", &config, "--reason", reason]);
    assert!(said(&accept(" ").code(2)).contains("reason is empty"));
    let first = said(&accept("the first").success());
    assert!(first.contains("accepted 2 records"), "{first}");

    let gate = |more: &[&str]| strata(&[&["gate", "--baseline", &baseline], more].concat());
    for _ in 0..3 {
        assert_eq!(said(&gate(&[]).success()), "pass: 2 pass\n");
    }
    assert_eq!(said(&gate(&["--config", &config]).success()), "pass: 2 pass\n");

    // As if the code had needed fewer instructions before.
    change(Path::new(&baseline), |record| record["counters"]["warp_instructions"] = 1.into());
    let (junit, markdown, json) = (path("gate.xml"), path("gate.md"), path("gate.json"));
    let worse = gate(&["--junit", &junit, "--markdown", &markdown, "--json", &json]).code(1);
    let text = said(&worse);
    assert!(text.contains("regressed") && text.contains("warp_instructions 1 -> "), "{text}");
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let suite = read(&junit);
    let suite = roxmltree::Document::parse(&suite).unwrap();
    assert_eq!(suite.root_element().attribute("failures"), Some("2"));
    assert_eq!(suite.descendants().filter(|node| node.has_tag_name("testcase")).count(), 2);
    assert!(read(&markdown).starts_with("## strata gate: regressed\n\n2 regressed\n\n| verdict |"));
    let gated: Value = serde_json::from_str(&read(&json)).unwrap();
    assert_eq!((&gated["schema"], &gated["verdict"]), (&json!(1), &json!("regressed")));

    // It may be meant.
    accept("they do more now").success();
    gate(&[]).success();
    let accepted: Value = serde_json::from_str(&read(&baseline)).unwrap();
    assert_eq!(accepted["accepted"][1]["reason"], "they do more now");

    change(Path::new(&baseline), |record| record["tiles"]["block_kv"] = 64.into());
    let tile = said(&gate(&[]).code(3));
    assert!(tile.contains("the tile configuration differs (32x64 of"), "{tile}");
    assert!(said(&strata(&["gate", "--baseline", "nowhere.json"]).code(2)).contains("nowhere.json"));
    std::fs::write(&config, "[tolerance]\nexact = -1\n").unwrap();
    assert!(said(&gate(&["--config", &config]).code(2)).contains("tolerance exact is -1"));
    std::fs::write(&config, "[[digs]]\n").unwrap();
    assert!(said(&gate(&["--config", &config]).code(2)).contains("unknown field `digs`"));
}

/// A build whose `bench` takes this time, more or less.
#[cfg(unix)]
fn build(folder: &Path, name: &str, milliseconds: f64, noise: f64) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;

    let path = folder.join(name);
    let record = json!({"stratum": "v3", "gpu": "H200", "sm": "sm_90", "dtype": "f16", "problem": "1x1x8x8 f16", "source": "events",
        "level": "hardware", "tools": {"driver": "13.0"}, "measured_time_ms": "TIME"});
    let document = json!({"schema": 1, "records": [record]}).to_string().replace("\"TIME\"", "'$time'");
    // Each run is slower or faster by a part of the noise that its number decides.
    let count = folder.join(format!("{name}.count"));
    let script = format!(
        "#!/bin/bash\nn=$(cat {count} 2>/dev/null || echo 0); echo $((n + 1)) > {count}\n\
         time=$(awk -v n=$n 'BEGIN {{ print {milliseconds} * (1 + {noise} * (((n * 7) % 5) - 2)) }}')\necho '{document}'\n",
        count = count.display()
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[cfg(unix)]
#[test]
fn two_builds_are_timed_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    let gate = |before: &Path, after: &Path, more: &[&str]| {
        let words = [
            "gate",
            "--against",
            before.to_str().unwrap(),
            "--candidate",
            after.to_str().unwrap(),
            "--problem",
            "1x1x8x8 f16",
        ];
        strata(&[&words[..], more].concat())
    };
    let build = |name: &str, milliseconds, noise| build(folder.path(), name, milliseconds, noise);
    let old = build("old", 2.0, 0.005);
    let slower = said(&gate(&old, &build("slower", 2.2, 0.005), &[]).code(1));
    assert!(slower.contains("regressed    v3 on H200, 1x1x8x8 f16") && slower.contains("+10.0 %"), "{slower}");
    assert!(said(&gate(&old, &build("faster", 1.8, 0.005), &[]).success()).contains("improved: 1 improved"));
    assert!(said(&gate(&old, &build("same", 2.01, 0.005), &[]).success()).contains("pass: 1 pass"));
    let few = said(&gate(&old, &build("again", 2.2, 0.005), &["--rounds", "4"]).code(3));
    assert!(few.contains("insufficient") && few.contains("4 samples of each: 10 are needed"), "{few}");
    // Noise as large as an effect is no regression.
    assert!(gate(&build("wild", 2.0, 0.3), &build("wilder", 2.02, 0.3), &[]).get_output().status.code() != Some(1));
    let none = folder.path().join("none");
    std::fs::write(&none, "#!/bin/bash\necho 'error: no GPU here' >&2; exit 2\n").unwrap();
    std::fs::set_permissions(&none, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let missing = said(&gate(&old, &none, &[]).code(3));
    assert!(missing.contains("gave no time: no GPU here"), "{missing}");
    assert!(said(&gate(Path::new("/nowhere"), &old, &[]).code(2)).contains("/nowhere cannot be run"));
}

/// A time that a file has says nothing about today.
#[test]
fn a_time_in_a_file_is_insufficient() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bench.json");
    let record = json!({"stratum": "v3", "gpu": "H200", "sm": "sm_90", "dtype": "f16", "problem": "1x1x8x8 f16", "source": "events",
        "level": "hardware", "measured_time_ms": 1.0});
    std::fs::write(&path, json!({"schema": 1, "records": [record]}).to_string()).unwrap();
    let path = path.to_str().unwrap();
    let text = said(&strata(&["gate", "--baseline", path, "--current", path]).code(3));
    assert!(text.contains("insufficient") && text.contains("--against"), "{text}");
}
