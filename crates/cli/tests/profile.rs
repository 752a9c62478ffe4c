//! `strata import`, `explain` and `profile`, with stand-ins for the profilers.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

fn command(arguments: &[&str]) -> assert_cmd::Command {
    let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
    command.env("STRATA_PTXAS", "none").args(arguments);
    command
}

/// Both streams, whose lines may be wrapped anywhere, as one.
fn said(assert: &assert_cmd::assert::Assert) -> String {
    let output = assert.get_output();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A raw page of one launch on an RTX 2070 whose shared loads conflict.
const PAGE: &str = r#""ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum","l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum","smsp__sass_inst_executed_op_shared_ld.sum","device__attribute_display_name","gpu__time_duration.sum"
"","","","","","","","","","","","","","inst","","ms"
"0","1","python3","host","attn_v2","1","7","(128, 1, 1)","(64, 8, 1)","0","7.5","1,845,667","1,174,579","293,601","NVIDIA GeForce RTX 2070","34.2"
"#;

#[test]
fn a_page_is_imported_explained_and_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (page, history) = (path("page.csv"), path("history.db"));
    std::fs::write(&page, PAGE).unwrap();
    let words = ["import", &page, "--dtype", "f32", &format!("--record={history}")];
    let text = said(&command(&words).assert().success());
    assert!(text.contains("attn_v2 on RTX 2070, grid 64x8x1 block 128x1x1"), "{text}");
    assert!(text.contains("bank-conflicts: 63.6 %") && text.contains("under the profiler 34.2 ms"), "{text}");
    assert!(text.contains("may be stored") && text.contains("recorded as 1"), "{text}");
    // In f16 the tensor cores are the remedy, and a threshold may let it pass.
    let text = said(&command(&["import", &page, "--dtype", "f16"]).assert().success());
    assert!(text.contains("storing K transposed is not the remedy here"), "{text}");
    let thresholds = path("thresholds.toml");
    std::fs::write(&thresholds, "bank_conflicts = 0.7\n").unwrap();
    let explain = |more: &[&str]| {
        said(&command(&[&["explain", "last", "--history", &history], more].concat()).assert().success())
    };
    assert!(explain(&[]).contains("bank-conflicts: 63.6 %"));
    assert!(explain(&["--thresholds", &thresholds]).contains("Nothing passes a threshold."));
    // A profile's duration is no time: nothing to judge by.
    let json = said(&command(&["import", &page, "--json", "-"]).assert().success());
    let record: Value = serde_json::from_str::<Value>(&json).unwrap()["records"][0].clone();
    assert_eq!((&record["measured_time_ms"], &record["profiled_time_ms"]), (&Value::Null, &json!(34.2)));
    assert_eq!(record["counters"].get("warp_instructions"), None);
    let error = said(&command(&["import", &thresholds]).assert().code(2));
    assert!(error.contains("is no Nsight Compute report"), "{error}");
}

/// A folder with a program of this name, to stand first on PATH.
#[cfg(unix)]
fn tool(name: &str, script: &str) -> (tempfile::TempDir, PathBuf) {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, format!("#!/bin/bash\n{script}")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (folder, path)
}

#[cfg(unix)]
fn with_path(folder: &Path, arguments: &[&str]) -> assert_cmd::assert::Assert {
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    command(arguments).env("PATH", path).assert()
}

/// What `ncu` is asked for, and what is made of its report: here a page, as a report of a format that is not known would be printed.
#[cfg(unix)]
#[test]
fn ncu_is_asked_for_the_chips_counters() {
    let script = format!(
        "here=$(dirname \"$0\")
         [ \"$1\" = --version ] && {{ echo 'Version 2025.3.1.0 (build 1)'; exit; }}
         echo \"$@\" >> \"$here/asked\"
         if [ \"$1\" = --import ]; then cat <<'END'\n{PAGE}END\nexit; fi
         while [ $# -gt 0 ]; do [ \"$1\" = -o ] && out=$2; shift; done
         printf 'NVR\\0\\0\\0\\0\\0' > \"$out\"\n"
    );
    let (folder, _) = tool("ncu", &script);
    let words = [
        "profile", "--gpu", "H200", "--kernel", "^attn", "--skip", "3", "--count", "2", "--json", "-", "--", "python3",
        "x.py",
    ];
    let json = String::from_utf8(with_path(folder.path(), &words).success().get_output().stdout.clone()).unwrap();
    let record: Value = serde_json::from_str::<Value>(&json).unwrap()["records"][0].clone();
    assert_eq!((&record["kernel"], &record["tools"]["ncu"]), (&json!("attn_v2"), &json!("2025.3.1.0")));
    let asked = std::fs::read_to_string(folder.path().join("asked")).unwrap();
    let first = asked.lines().next().unwrap();
    assert!(
        first.starts_with(
            "--target-processes all --clock-control none --kernel-name-base function -k regex:^attn -s 3 -c 2"
        ),
        "{asked}"
    );
    assert!(first.contains("--section SourceCounters --import-source yes --metrics"), "{asked}");
    assert!(first.contains("sm__inst_executed_pipe_tensor_op_gmma.sum") && first.ends_with(" python3 x.py"), "{asked}");
    assert!(asked.lines().nth(1).unwrap().contains("--csv --page raw --print-units base --print-fp"), "{asked}");
    // The program's own kernels, by name; the first call is left out.
    let words = ["profile", "--gpu", "RTX 2070", "--stratum", "v2_kt", "--problem", "1x2x64x64", "--json", "-"];
    with_path(folder.path(), &words).success();
    let asked = std::fs::read_to_string(folder.path().join("asked")).unwrap();
    assert!(asked.contains("-k regex:^(transpose_keys|flash_v2_kt)$ -s 2 -c 2"), "{asked}");
    assert!(asked.contains("bench --budget-ms 0 --json - --strata v2_kt --problem 1x2x64x64"), "{asked}");
    let words = ["profile", "--nvtx", "step", "--", "true"];
    with_path(folder.path(), &words).success();
    assert!(std::fs::read_to_string(folder.path().join("asked")).unwrap().contains("--nvtx --nvtx-include step/"));
}

#[cfg(unix)]
#[test]
fn what_ncu_cannot_do_is_said_with_what_to_do() {
    let run = |script: &str, words: &[&str]| {
        let (folder, _) = tool("ncu", script);
        said(&with_path(folder.path(), words).code(2))
    };
    let words = ["profile", "--kernel", "attn", "--", "true"];
    let refused = run("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1\n", &words);
    assert!(refused.contains("NVreg_RestrictProfilingToAdminUsers=0") && refused.contains("SYS_ADMIN"), "{refused}");
    let nothing = run("echo '==WARNING== No kernels were profiled.'\n", &words);
    assert!(nothing.contains("does a kernel's name match `attn`, after 1 launches?"), "{nothing}");
    let failed = run("echo 'No module named torch'; exit 9\n", &words);
    assert!(failed.contains("ncu failed (status 9)") && failed.contains("No module named torch"), "{failed}");
    let empty = tempfile::tempdir().unwrap();
    let missing = command(&words).env("PATH", empty.path()).assert().code(2);
    assert!(said(&missing).contains("ncu is not on this machine"), "{}", said(&missing));
    said(&command(&["profile"]).assert().code(2));
}

#[cfg(unix)]
#[test]
fn nsys_gives_a_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let export = folder.path().join("export.sqlite");
    let database = rusqlite::Connection::open(&export).unwrap();
    database
        .execute_batch(
            "CREATE TABLE EXPORT_META_DATA (name TEXT, value TEXT);
             CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (5, 'attn');
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \"end\" INTEGER, deviceId INTEGER, shortName INTEGER,
                 gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER,
                 registersPerThread INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER);
             INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 3000000, 0, 5, 8, 1, 1, 128, 1, 1, 96, 0, 1024);",
        )
        .unwrap();
    let script = format!(
        "[ \"$1\" = --version ] && {{ echo 'NVIDIA Nsight Systems version 2025.5.1.121'; exit; }}
         while [ $# -gt 0 ]; do [ \"$1\" = -o ] && out=$2; shift; done
         cp {} \"$out.sqlite\"\n",
        export.display()
    );
    let (tools, _) = tool("nsys", &script);
    let text = said(&with_path(tools.path(), &["profile", "--timeline", "--", "true"]).success());
    assert!(
        text.contains("measured 3.00 ms") && text.contains("1 launches") && text.contains("nsys 2025.5.1.121"),
        "{text}"
    );
    assert!(text.contains("A timeline has times, no counters"), "{text}");
}

/// A report is a file that needs no other, and that a browser draws without a complaint.
#[test]
fn a_report_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (dug, page) = (path("dig.json"), path("report.html"));
    command(&["dig", "--problem", "1x2x128x64", "--strata", "v1,v2,v2_kt", "--json", &dug]).assert().success();
    command(&["report", &dug, "--output", &page]).assert().success();
    let html = std::fs::read_to_string(&page).unwrap();
    for (what, count) in
        [("<h2>v2</h2>", 1), ("Lanes to banks at v2.rs:", 1), ("Roofline of the RTX 2070", 2), ("<svg", 10)]
    {
        assert!(html.matches(what).count() >= count, "{what}");
    }
    assert!(html.contains("v2.rs:") && html.contains("dot(k, &amp;scores"), "the code of the line is not there");
    // Nothing is loaded: no address but the namespace of SVG, no script.
    assert_eq!(html.replace("http://www.w3.org/2000/svg", "").matches("http").count(), 0);
    for tag in ["<script", "<link", "<img", "<iframe", "@import", "url("] {
        assert!(!html.contains(tag), "{tag}");
    }
    // The body, once the elements that HTML leaves open are gone, is well-formed XML.
    let body = &html[html.find("<body>").unwrap()..html.find("</html>").unwrap()];
    let parsed = roxmltree::Document::parse(body.trim()).unwrap();
    let numbers = parsed.descendants().flat_map(|node| {
        node.attributes()
            .filter(|one| matches!(one.name(), "x" | "y" | "width" | "height"))
            .map(|one| one.value())
            .collect::<Vec<_>>()
    });
    for number in numbers {
        let value: f64 = number.parse().unwrap();
        assert!(value.is_finite() && value >= 0.0, "{number}");
    }
    let Ok(browser) = Command::new("chromium").arg("--version").output() else {
        eprintln!("no chromium: the page was not drawn");
        return;
    };
    assert!(browser.status.success());
    let shot = path("shot.png");
    let profile = path("profile");
    let output = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
        ])
        .args(["--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--window-size=390,2000"])
        .args([format!("--user-data-dir={profile}"), format!("--screenshot={shot}"), format!("file://{page}")])
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(!log.contains("CONSOLE"), "{log}");
    assert!(std::fs::metadata(&shot).is_ok_and(|shot| shot.len() > 10_000), "{log}");
}

/// 10,000 records in the history.
#[test]
fn a_report_of_a_long_history_is_quick_and_small() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (dug, history, page) = (path("dig.json"), path("history.db"), path("report.html"));
    command(&["dig", "--problem", "1x1x64x16", "--strata", "v2", "--json", &dug]).assert().success();
    let record = lab::reference::read(Path::new(&dug)).unwrap().records.remove(0);
    // As many keys as there may be.
    let different = (0..10_000).map(|index| {
        let mut json = record.json.clone();
        json["problem"] = format!("1x{}x64x16", index + 1).into();
        lab::AnyRecord::try_from(json).unwrap()
    });
    let records: Vec<lab::AnyRecord> = different.collect();
    lab::History::open(Path::new(&history)).unwrap().add(&records, &lab::Provenance::now()).unwrap();
    let start = std::time::Instant::now();
    command(&["report", "--history", &history, "--output", &page]).assert().success();
    let (took, bytes) = (start.elapsed(), std::fs::metadata(&page).unwrap().len());
    println!("{took:?}, {bytes} bytes");
    assert!(bytes < 5_000_000);
    if cfg!(not(debug_assertions)) {
        assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    }
    assert!(std::fs::read_to_string(&page).unwrap().contains("10,000 records"));
}
