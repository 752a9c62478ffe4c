//! `strata probe` as scripts and people see it.

use std::fs;
use std::path::{Path, PathBuf};

fn strata(arguments: &[&str]) -> assert_cmd::assert::Assert {
    // As on a machine without the assembler, wherever the test runs.
    let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
    let truth = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/tests/truth");
    command.current_dir(truth).env("STRATA_PTXAS", "none").arg("probe").args(arguments);
    command.timeout(std::time::Duration::from_secs(120)).assert()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The article's kernel on two heads of 64 keys.
const ARTICLE: [&str; 25] = [
    "rtx2070/v2_f32_d32.ptx",
    "--gpu",
    "RTX 2070",
    "--grid",
    "2,2",
    "--shared",
    "12288",
    "--registers",
    "72",
    "--arg",
    "buf:f32:2x64x32:randn",
    "--arg",
    "buf:f32:2x64x32:randn",
    "--arg",
    "buf:f32:2x64x32:randn",
    "--arg",
    "buf:f32:2x64x32:uninit",
    "--arg",
    "i32:64",
    "--arg",
    "i32:2048",
    "--arg",
    "f32:0.17677669",
    "--arg",
    "null",
];

fn article(more: &[&str]) -> assert_cmd::assert::Assert {
    strata(&[&ARTICLE[..], &["--arg", "null"], more].concat())
}

/// A file with this text, in a folder that goes when it is dropped.
fn file(name: &str, contents: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, contents).unwrap();
    (folder, path)
}

fn ptx(body: &str) -> String {
    let head = ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 tile[];\n";
    let parameters = ".param .u64 x, .param .u32 n";
    let registers = ".reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n";
    format!("{head}.visible .entry k({parameters}) .reqntid 64 {{\n{registers}{body}\nret;\n}}\n")
}

#[test]
fn the_articles_kernel() {
    insta::assert_snapshot!(text(&article(&[]).success().get_output().stdout));
}

#[test]
fn the_articles_line_by_hand() {
    insta::assert_snapshot!(text(&article(&["--line", "56"]).success().get_output().stdout));
}

#[test]
fn json_follows_the_schema() {
    let assert = article(&["--json", "-", "--line", "56"]).success();
    let value: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(value["schema"], 1);
    let record = &value["records"][0];
    for (key, expected) in [("kernel", "fa_v2"), ("gpu", "RTX 2070"), ("dtype", "f32"), ("source", "emulator")] {
        assert_eq!(record[key], expected);
    }
    assert_eq!(record["level"], "merged");
    assert!(record["error"].is_null() && record["measured_time_ms"].is_null() && record["hazard"].is_null());
    for counters in ["counters", "counters_ptx"] {
        assert!(record[counters]["shared_load_bank_conflicts"].is_u64());
    }
    assert_eq!(record["occupancy"]["theoretical_pct"], 62.5);
    assert_eq!(record["occupancy"]["limit_blocks"]["shared"], 5);
    assert!(record["modelled_time_ms"].is_number() && record["lines"][0]["shared_load_wavefronts"].is_u64());
    assert!(record["findings"].as_array().unwrap().iter().any(|finding| finding["id"] == "bank-conflicts"));
    let explained = &record["explanations"][0];
    assert_eq!((&explained["cost"], &explained["ideal"]), (&32.into(), &4.into()));
    let all: u64 = record["lines"].as_array().unwrap().iter().map(|l| l["warp_instructions"].as_u64().unwrap()).sum();
    assert_eq!(Some(all), record["counters"]["warp_instructions"].as_u64());
}

#[test]
fn a_sample_scales_to_the_whole() {
    let counters = |more: &[&str]| {
        let assert = article(&[&["--json", "-"], more].concat()).success();
        let value: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
        value["records"][0]["counters"].clone()
    };
    assert_eq!(counters(&["--sample", "2"]), counters(&[]));
}

#[test]
fn a_buffer_goes_to_a_file_and_is_compared_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("o.npy");
    let path = path.to_str().unwrap();
    article(&["--out", &format!("{path}=3")]).success();
    let same = article(&["--expect", &format!("3={path}"), "--tolerance", "0,0", "--shake", "4"]).success();
    let said = text(&same.get_output().stdout);
    assert!(said.contains("No hazard under 4 schedules: eager, lazy, random:0 and random:1."), "{said}");
    assert!(said.contains("Argument 3 agrees with"), "{said}");
    let other = article(&["--expect", &format!("3={path}"), "--seed", "1"]).code(1);
    assert!(text(&other.get_output().stdout).contains("WRONG RESULT: argument 3 differs from"));
    assert!(text(&other.get_output().stderr).contains("error: argument 3 differs from"));
}

#[test]
fn a_launch_file_says_the_same() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/tests/truth/rtx2070/v2_f32_d32.ptx");
    let (folder, launch) = file(
        "launch.toml",
        r#"ptx = "v2_f32_d32.ptx"
        grid = [2, 2]
        shared = 12288
        registers = 72
        args = ["buf:f32:2x64x32:randn", "buf:f32:2x64x32:randn", "buf:f32:2x64x32:randn", "buf:f32:2x64x32:uninit",
                "i32:64", "i32:2048", "f32:0.17677669", "null", "null"]"#,
    );
    fs::copy(source, folder.path().join("v2_f32_d32.ptx")).unwrap();
    let counters = |assert: assert_cmd::assert::Assert| {
        let value: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
        value["records"][0]["counters"].clone()
    };
    let launch = launch.to_str().unwrap();
    assert_eq!(counters(strata(&[launch, "--json", "-"]).success()), counters(article(&["--json", "-"]).success()));
    // The command line goes first.
    let assert = strata(&[launch, "--grid", "1", "--json", "-"]).success();
    let value: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(value["records"][0]["launch"]["ctas"], 1);
}

#[test]
fn hazards_have_line_thread_and_address() {
    let race =
        ptx("mov.u32 %r1, %tid.x;\nmov.u32 %r2, tile;\nmad.lo.u32 %r3, %r1, 4, %r2;\nst.shared.u32 [%r3], %r1;\n\
         xor.b32 %r4, %r1, 32;\nmad.lo.u32 %r5, %r4, 4, %r2;\nld.shared.u32 %r6, [%r5];\n");
    let (_folder, path) = file("race.ptx", race);
    let path = path.to_str().unwrap();
    let launch = [path, "--grid", "1", "--registers", "16", "--arg", "null", "--arg", "u32:0"];
    let assert = strata(&[&launch[..], &["--shared", "256"]].concat()).code(1);
    let said = text(&assert.get_output().stdout);
    assert!(said.contains("HAZARD") && said.contains("race.ptx:15") && said.contains("thread"), "{said}");
    assert!(said.contains("It happens under --policy eager."), "{said}");
    let assert = strata(&launch).code(1);
    let said = text(&assert.get_output().stdout).replace("\n ", "");
    assert!(said.contains("HAZARD out of bounds") && said.contains("--shared says how many bytes"), "{said}");
}

#[test]
fn nothing_runs_for_ever() {
    let (_folder, path) = file("loop.ptx", ptx("again:\nbra again;"));
    let path = path.to_str().unwrap();
    let launch = [path, "--grid", "1", "--arg", "null", "--arg", "u32:0", "--budget", "100000"];
    let assert = strata(&launch).code(1);
    assert!(text(&assert.get_output().stdout).contains("100000 warp instructions without ending"));
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    let (folder, good) = file("k.ptx", ptx(""));
    let good = good.to_str().unwrap();
    let other = |name: &str, contents: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, contents).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let empty = other("empty.ptx", b"");
    let binary = other("binary.ptx", b".version 8.0\n\xff\xfe");
    let cut = other("cut.ptx", &ptx("mov.u32 %r1, %tid.x;").as_bytes()[..200]);
    let two = other("two.ptx", format!("{}.visible .entry l() {{ ret; }}", ptx("")).as_bytes());
    let toml = other("bad.toml", b"grids = 3");
    let pipe = folder.path().join("pipe");
    #[cfg(unix)]
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let arguments = ["--grid", "1", "--arg", "null", "--arg", "u32:0"];
    let with = |file: &str, more: &[&str]| -> Vec<String> {
        [&[file], &arguments[..], more].concat().into_iter().map(str::to_owned).collect()
    };
    for (arguments, said) in [
        (with(&empty, &[]), "error: `.version` is missing"),
        (with(&binary, &[]), "byte 13 is not UTF-8"),
        (with(&cut, &[]), "cut.ptx:"),
        (with(&two, &[]), "has k, l: name one with --entry"),
        (with(&two, &["--entry", "m"]), "has k, l: name one with --entry"),
        (with(&toml, &[]), "unknown field `grids`"),
        (with(pipe.to_str().unwrap(), &[]), "a pipe or a device: it must be a regular file"),
        (with(folder.path().to_str().unwrap(), &[]), "is a folder"),
        (with("nowhere.ptx", &[]), "No such file"),
        (with(good, &["--arg", "null"]), "3 arguments are given; `k` takes 2: x (.u64), n (.u32)"),
        (with(good, &["--gpu", "RTX 2070"]), "`k` is for sm_80, which it does not run"),
        (with(good, &["--gpu", "GTX 1"]), "unknown GPU 'GTX 1'"),
        (with(good, &["--line", "3"]), "`k` accesses no memory at line 3"),
        (with(good, &["--expect", "0=o.npy"]), "expect names argument 0, which is null: it must be a buffer"),
        (with(good, &["--out", "o.npy=7"]), "out names argument 7: there are 2"),
        (with(good, &["--sample", "1", "--out", "o.npy=0"]), "--expect and --out need all CTAs to run"),
        (with(good, &["--policy", "sometimes"]), "it must be eager, lazy, random or random:SEED"),
        (with(good, &["--block", "32"]), "the kernel requires [64, 1, 1]"),
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let assert = strata(&arguments).code(2);
        let stderr = text(&assert.get_output().stderr);
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
        assert!(assert.get_output().stdout.is_empty(), "{arguments:?}");
    }
    for (arguments, said) in [
        (&["--grid", "0", "--arg", "null", "--arg", "u32:0"][..], "grid is [0, 1, 1]"),
        (&["--arg", "null", "--arg", "u32:0"], "the grid is not given"),
        (&["--grid", "1", "--arg", "u32:0", "--arg", "u32:0"], "argument 0 is u32:0: the parameter is x (.u64)"),
        (&["--grid", "1", "--arg", "null", "--arg", "f32:0"], "argument 1 is f32:0: the parameter is n (.u32)"),
        (&["--grid", "1", "--arg", "null", "--arg", "map:q"], "map:q: the parameter is n (.u32)"),
        (
            &["--grid", "1", "--arg", "buf:f64:1000000000:zeros", "--arg", "u32:0"],
            "take 8000000000 bytes; 4294967296 are allowed",
        ),
        (
            &["--grid", "1", "--arg", "buf:f64:99999999999x99999999999:zeros", "--arg", "u32:0"],
            "bytes; 4294967296 are allowed",
        ),
    ] {
        let assert = strata(&[&[good], arguments].concat()).code(2);
        let stderr = text(&assert.get_output().stderr);
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
    }
    // A thousand million elements that fit are no error: pages that nothing touches cost nothing.
    strata(&[good, "--grid", "1", "--arg", "buf:f32:1000000000:zeros", "--arg", "u32:0", "--json", "-"]).success();
}

/// Two CTAs write their numbers to the same place, which only who asks for is told.
#[test]
fn races_between_ctas_are_an_option() {
    let body = "ld.param.u64 %rd1, [x];\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmul.wide.u32 %rd2, %r1, 4;\n\
                add.u64 %rd1, %rd1, %rd2;\nst.global.u32 [%rd1], %r2;";
    let (_folder, path) = file("race.ptx", ptx(body));
    let arguments = [path.to_str().unwrap(), "--grid", "2", "--arg", "buf:u32:64:uninit", "--arg", "u32:0"];
    strata(&arguments).success();
    let assert = strata(&[&arguments[..], &["--global-races"]].concat()).code(1);
    assert!(text(&assert.get_output().stderr).contains("global race"));
}

#[test]
fn a_million_instructions_end_in_time() {
    let mut body = String::new();
    for i in 0..250_000 {
        body += &format!(
            "add.u32 %r{}, %r{}, {i};\nxor.b32 %r3, %r1, %r2;\nmul.lo.u32 %r4, %r3, 5;\nshl.b32 %r5, %r4, 1;\n",
            1 + i % 2,
            1 + (i + 1) % 2
        );
    }
    let (_folder, path) = file("long.ptx", ptx(&format!("mov.u32 %r1, %tid.x;\nmov.u32 %r2, 1;\n{body}")));
    let path = path.to_str().unwrap();
    let assert = strata(&[path, "--grid", "1", "--arg", "null", "--arg", "u32:0"]).success();
    let text = text(&assert.get_output().stdout);
    assert!(text.contains("Warp instructions: 2,000,006 (ptx)"), "{}", &text[..text.len().min(2000)]);
}
