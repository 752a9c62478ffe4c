//! What scripts rely on: exit statuses, pure JSON, files that are whole or not there.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernels::{Dtype, Inputs, Outputs, Problem, Tensor, check, plain, reference};
use lab::Document;
use lab::tensor_file::{Layout, read_npy, read_safetensors, write_npy, write_safetensors};

fn strata(arguments: &[&str]) -> assert_cmd::assert::Assert {
    // As on a machine without the assembler, wherever the test runs: registers are then estimated.
    let mut command = assert_cmd::Command::cargo_bin("strata").unwrap();
    command.env("STRATA_PTXAS", "none").args(arguments).assert()
}

fn stderr(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

/// The inputs of a problem in a safetensors file of this layout.
fn store(directory: &Path, problem: &Problem, layout: Layout) -> (PathBuf, Inputs) {
    let inputs = Inputs::randn(problem, 3).unwrap();
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| layout.view(tensor).unwrap());
    let path = directory.join("in.safetensors");
    write_safetensors(&path, &[("x.q", &q), ("x.k", &k), ("x.v", &v)]).unwrap();
    (path, inputs)
}

fn assert_correct(problem: &Problem, inputs: &Inputs, o: Tensor, lse: Tensor) {
    let outputs = Outputs { out: o, lse };
    let verdict =
        check(problem, &outputs, &reference(problem, inputs).unwrap(), &plain(problem, inputs).unwrap()).unwrap();
    assert!(verdict.passed(), "{verdict:?}");
}

#[test]
fn bad_usage_says_what_is_allowed() {
    for (arguments, said) in [
        (&["dig", "--gpu", "RTX 2071"][..], "nearest is 'RTX 2070'"),
        (&["dig", "--problem", "10x64x1024"], "it must be BATCHxHEADSxSEQLENxHEAD_DIM"),
        (&["dig", "--problem", "1x4/3x8x8"], "heads_q must be a multiple of heads_kv"),
        (&["dig", "--dtype", "f64"], "it must be f32, f16, bf16 or e4m3"),
        (&["dig", "--strata", "v9"], "v9"),
        (&["dig", "--strata", "naive,naive"], "strata names naive twice"),
        (&["bench", "--device", "emulator"], "bench takes time on a GPU"),
        (&["dig", "--json", "nowhere/dig.json"], "cannot write nowhere/dig.json"),
        (&["dig", "--softmax-scale", "0"], "softmax_scale is 0"),
        (&["dig", "--softmax-scale", "nan"], "softmax_scale is NaN"),
        (&["dig", "--block-q", "33"], "block_q is 33: it must be a multiple of 8"),
        (&["dig", "--threads", "100"], "threads is 100: it must be a power of two"),
        (&["dig", "--problem", "1x1x8x200"], "head_dim is 200: naive covers at most 128"),
        (&["dig", "--input", "nowhere.safetensors"], "nowhere.safetensors"),
        (&["dig", "--q", "q.npy"], "--k"),
        (&["run", "--output", "o.safetensors", "--stratum", "v2"], "no input"),
        (&["run", "--input", "x", "--output", "o.txt", "--stratum", "v2"], "must end in .safetensors or .npy"),
        (&["nothing"], "nothing"),
        (&[], "Usage"),
    ] {
        let assert = strata(arguments).code(2);
        let stderr = stderr(&assert);
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
        assert!(assert.get_output().stdout.is_empty(), "{arguments:?}");
    }
}

/// Only where there is no driver: with one, `dig` times.
#[test]
fn without_a_gpu_dig_says_what_doctor_says() {
    let missing = cuda::Error::NoDriver.to_string();
    let doctor = strata(&["doctor"]).code(0);
    if String::from_utf8_lossy(&doctor.get_output().stdout).contains(&missing) {
        let assert = strata(&["dig", "--device", "cuda"]).code(2);
        assert_eq!(stderr(&assert), format!("error: {missing}\n"));
    }
}

#[test]
fn json_on_standard_output_is_pure_and_follows_the_schema() {
    let assert = strata(&["dig", "--problem", "1x2x64x16", "--strata", "v2", "--json", "-"]).success();
    let output = &assert.get_output().stdout;
    let value: serde_json::Value = serde_json::from_slice(output).unwrap();
    assert_eq!(value["schema"], 1);
    let record = &value["records"][0];
    for (key, expected) in [
        ("stratum", "v2"),
        ("gpu", "RTX 2070"),
        ("dtype", "f32"),
        ("problem", "1x2x64x16"),
        ("source", "emulator"),
        ("level", "merged"),
    ] {
        assert_eq!(record[key], expected);
    }
    assert!(
        record["measured_time_ms"].is_null() && record["modelled_time_ms"].is_number() && record["error"].is_number()
    );
    for counters in ["counters", "counters_ptx"] {
        for name in [
            "warp_instructions",
            "global_load_requests",
            "global_load_sectors",
            "global_store_requests",
            "global_store_sectors",
            "shared_load_instructions",
            "shared_load_wavefronts",
            "shared_load_wavefronts_ideal",
            "shared_load_bank_conflicts",
            "shared_store_instructions",
            "shared_store_wavefronts",
            "shared_store_wavefronts_ideal",
            "shared_store_bank_conflicts",
        ] {
            assert!(record[counters][name].is_u64(), "{counters}.{name}");
        }
    }
    assert!(record["occupancy"]["theoretical_pct"].is_number());
    assert!(record["occupancy"]["limit_blocks"]["registers"].is_u64());
    assert!(record["lines"][0]["file"].is_string() && record["lines"][0]["line"].is_u64());
    for finding in record["findings"].as_array().unwrap() {
        assert!(finding["id"].is_string() && finding["severity"].is_string() && finding["text"].is_string());
    }
    let document: Document = serde_json::from_slice(output).unwrap();
    assert_eq!(serde_json::to_value(&document).unwrap(), value);
    // Lines add up to the whole.
    let record = &document.records[0];
    let sum: u64 = record.lines.iter().map(|line| line.counters.warp_instructions).sum();
    assert_eq!(sum, record.counters.warp_instructions);
    // Always unique <= DRAM <= requested.
    let traffic = &record.traffic;
    assert!(traffic.unique_read <= traffic.dram_read_modelled && traffic.dram_read_modelled <= traffic.requested_read);
    assert!(traffic.unique_written <= traffic.dram_written_modelled);
    assert!(traffic.dram_written_modelled <= traffic.requested_written);
}

#[test]
fn a_json_file_is_written_beside_the_report() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dig.json");
    let assert =
        strata(&["dig", "--problem", "1x2x64x16", "--strata", "v2", "--json", path.to_str().unwrap()]).success();
    assert!(String::from_utf8_lossy(&assert.get_output().stdout).contains("emulated RTX 2070"));
    let document: Document = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(document.records.len(), 1);
}

#[test]
fn a_sample_scales_to_the_whole() {
    let records = |arguments: &[&str]| -> Document {
        let all = [&["dig", "--problem", "2x3x64x16", "--strata", "v2", "--json", "-"], arguments].concat();
        serde_json::from_slice(&strata(&all).success().get_output().stdout).unwrap()
    };
    let (sample, full) = (records(&[]), records(&["--full"]));
    assert_eq!((sample.records[0].sample.heads, full.records[0].sample.heads), (2, 6));
    assert_eq!(sample.records[0].counters, full.records[0].counters);
    assert_eq!(sample.records[0].traffic, full.records[0].traffic);
    assert_eq!(sample.records[0].modelled_time_ms, full.records[0].modelled_time_ms);
}

#[test]
fn run_does_not_write_over_its_input() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qkv.safetensors");
    let inputs = kernels::Inputs::randn(&"1x1x8x16".parse().unwrap(), 1).unwrap();
    let tensors = [("q", &inputs.q), ("k", &inputs.k), ("v", &inputs.v)];
    lab::tensor_file::write_safetensors(&path, &tensors).unwrap();
    let before = std::fs::read(&path).unwrap();
    let name = path.to_str().unwrap();
    let assert = strata(&["run", "--input", name, "--output", name, "--stratum", "v2"]).code(2);
    assert!(stderr(&assert).contains("over --input"), "{}", stderr(&assert));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn run_computes_attention_on_safetensors() {
    let directory = tempfile::tempdir().unwrap();
    for (text, layout, name) in [
        ("2x3x40x24", Layout::Bshd, "bshd"),
        ("1x4/2x33/47x32 f16 causal", Layout::Bhsd, "bhsd"),
        ("1x2x40x16 bf16", Layout::Bhsd, "bhsd"),
    ] {
        let problem: Problem = text.parse().unwrap();
        let (input, inputs) = store(directory.path(), &problem, layout);
        let output = directory.path().join("out.safetensors");
        let mut arguments = vec!["run", "--prefix", "x.", "--stratum", "v2", "--layout", name, "--gpu", "A100"];
        arguments.extend(["--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()]);
        if text.contains("causal") {
            arguments.push("--causal");
        }
        strata(&arguments).success().stdout("");
        let o = layout.view(&read_safetensors(&output, "o").unwrap().tensor).unwrap();
        assert_correct(&problem, &inputs, o, read_safetensors(&output, "lse").unwrap().tensor);
    }
}

#[test]
fn run_computes_attention_on_npy() {
    let directory = tempfile::tempdir().unwrap();
    let problem: Problem = "1x2x20x16 scale=0.5".parse().unwrap();
    let inputs = Inputs::randn(&problem, 1).unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for (name, tensor) in [("q.npy", &inputs.q), ("k.npy", &inputs.k), ("v.npy", &inputs.v)] {
        write_npy(Path::new(&file(name)), tensor).unwrap();
    }
    let (q, k, v, o) = (file("q.npy"), file("k.npy"), file("v.npy"), file("o.npy"));
    let arguments =
        ["run", "--q", &q, "--k", &k, "--v", &v, "--output", &o, "--stratum", "v2", "--softmax-scale", "0.5"];
    strata(&arguments).success();
    let lse = read_npy(Path::new(&file("o.lse.npy"))).unwrap().tensor;
    assert_correct(&problem, &inputs, read_npy(Path::new(&o)).unwrap().tensor, lse);
}

/// Real activations, both layers, as the user of a model has them.
#[test]
fn run_matches_the_stored_activations() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data/minilm");
    let directory = tempfile::tempdir().unwrap();
    for layer in ["layer0", "layer5"] {
        let stored = |part: &str, name: &str| {
            let file = data.join(format!("{layer}.{part}.safetensors"));
            read_safetensors(&file, &format!("{layer}.{name}")).unwrap().tensor
        };
        let input = directory.path().join("in.safetensors");
        let [q, k, v] = ["q", "k", "v"].map(|name| (format!("{layer}.{name}"), stored(name, name)));
        write_safetensors(&input, &[(&q.0, &q.1), (&k.0, &k.1), (&v.0, &v.1)]).unwrap();
        let output = directory.path().join("out.safetensors");
        let prefix = format!("{layer}.");
        let arguments = ["run", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
        strata(&[&arguments[..], &["--prefix", &prefix, "--layout", "bhsd", "--stratum", "v2"]].concat()).success();
        for (name, bound) in [("o", 1e-5), ("lse", 1e-3)] {
            let (ours, theirs) = (read_safetensors(&output, name).unwrap().tensor, stored("o", name));
            assert_eq!(ours.shape(), theirs.shape());
            let furthest = ours.to_f64().iter().zip(theirs.to_f64()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(furthest < bound, "{layer} {name}: {furthest}");
        }
    }
}

#[test]
fn nothing_is_written_when_a_call_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.safetensors");
    let wrong = directory.path().join("wrong.safetensors");
    let tensor = |shape: &[usize], dtype| Tensor::full(dtype, shape, 0.5).unwrap();
    let f32_tensor = tensor(&[1, 8, 2, 16], Dtype::F32);
    for (k, said) in [
        (tensor(&[1, 8, 2, 8], Dtype::F32), "k has the shape [1, 8, 2, 8]"),
        (tensor(&[2, 8, 2, 16], Dtype::F32), "k has the shape [2, 8, 2, 16]"),
        (tensor(&[1, 8, 2, 16], Dtype::F16), "k"),
        (tensor(&[8, 2, 16], Dtype::F32), "k"),
    ] {
        write_safetensors(&wrong, &[("q", &f32_tensor), ("k", &k), ("v", &f32_tensor)]).unwrap();
        let input = wrong.to_str().unwrap();
        let assert =
            strata(&["run", "--input", input, "--output", output.to_str().unwrap(), "--stratum", "v2"]).code(2);
        assert!(stderr(&assert).contains(said), "{}", stderr(&assert));
        assert!(!output.exists());
    }
    std::fs::write(&wrong, b"not a tensor file").unwrap();
    strata(&["run", "--input", wrong.to_str().unwrap(), "--output", output.to_str().unwrap(), "--stratum", "v2"])
        .code(2);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("strata"))
        .args(["dig", "--problem", "1x2x64x16", "--json", "-"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_with_its_status() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("dig.json");
    // Far more than can be run here.
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("strata"))
        .args(["dig", "--problem", "1x300x512x64", "--full", "--json"])
        .arg(&json)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // What was finished is whole: some strata, or nothing but the reference, and then no document.
    if let Ok(bytes) = std::fs::read(json) {
        assert!(serde_json::from_slice::<Document>(&bytes).unwrap().records.len() < 4);
    }
}

#[test]
fn output_that_is_not_a_terminal_has_no_colour() {
    let assert = strata(&["dig", "--problem", "1x2x64x16", "--strata", "v2"]).success();
    let output = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    assert!(!output.contains('\u{1b}'));
    assert!(output.lines().all(|line| line.chars().count() <= 100), "{output}");
}

/// The ids of what is found.
fn found(arguments: &[&str]) -> Vec<String> {
    let all = [&["dig", "--json", "-"], arguments].concat();
    let document: Document = serde_json::from_slice(&strata(&all).success().get_output().stdout).unwrap();
    document.records.iter().flat_map(|record| record.findings.iter().map(|finding| finding.id.clone())).collect()
}

/// Each finding of the article comes out of its generation and of no later one.
#[test]
fn each_generation_removes_what_the_one_before_suffers_from() {
    let of = |stratum: &str| found(&["--problem", "10x64x1024x64", "--strata", stratum]);
    let (naive, v1, v2, v2_kt) = (of("naive"), of("v1"), of("v2"), of("v2_kt"));
    let has = |found: &[String], id: &str| found.iter().any(|one| one == id);
    assert!(has(&naive, "intermediate-bytes"));
    assert!(has(&v1, "repeated-bytes") && has(&v1, "repeated-division") && !has(&v1, "intermediate-bytes"));
    assert!(has(&v1, "occupancy") && has(&v2, "bank-conflicts") && has(&v2_kt, "shared-limited"));
    for later in [&v2, &v2_kt] {
        for id in ["intermediate-bytes", "repeated-bytes", "repeated-division"] {
            assert!(!has(later, id), "{id}");
        }
    }
    assert!(!has(&v2_kt, "bank-conflicts"));
}

#[test]
fn another_tile_or_gpu_cures_and_the_finding_goes() {
    let with = |arguments: &[&str], id: &str| {
        let all = [&["--problem", "4x20x256x64", "--strata"], arguments].concat();
        found(&all).iter().any(|one| one == id)
    };
    // 28,672 shared bytes a CTA leave two on an SM of 64 KiB; a tile of 16 by 16 takes less than half.
    assert!(with(&["v2"], "occupancy"));
    assert!(!with(&["v2", "--block-q", "16", "--block-kv", "16"], "occupancy"));
    // 80 heads are CTAs enough for 36 SMs, not for 132.
    assert!(!with(&["v1"], "grid-too-small"));
    assert!(with(&["v1", "--gpu", "H200"], "grid-too-small"));
    // What v1 writes again and again stays in an L2 of 60 MB.
    assert!(with(&["v1"], "repeated-bytes"));
    assert!(!with(&["v1", "--gpu", "H200"], "repeated-bytes"));
    // Tensor cores take f16 and not f32.
    assert!(!with(&["v2", "--gpu", "H200"], "idle-tensor-cores"));
    assert!(with(&["v2", "--gpu", "H200", "--dtype", "f16"], "idle-tensor-cores"));
}

/// What a person sees. Line numbers and register estimates move with the kernels and are left out.
#[test]
fn the_report_reads_as_it_did() {
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\.rs:\d+", ".rs:N");
    settings.add_filter(r"about \d+ registers", "about N registers");
    settings.bind(|| {
        for (name, arguments) in [
            ("turing_f32", &["dig", "--problem", "4x20x256x64"][..]),
            (
                "hopper_f16_causal",
                &["dig", "--problem", "4x20/4x256x64 f16 causal", "--gpu", "H200", "--strata", "v2,v2_kt"],
            ),
        ] {
            let assert = strata(arguments).success();
            insta::assert_snapshot!(name, String::from_utf8(assert.get_output().stdout.clone()).unwrap());
        }
    });
}

/// README shows the table, v2 and its successor of the default dig, between the fences after this line.
const README_DIG: &str = "prints (here without the other generations):\n\n```text\n";

/// README's dig is what `strata dig` prints. `UPDATE_README=1 cargo test --release -p cli readme` writes it.
#[test]
fn readme_shows_a_real_dig() {
    let assert = strata(&["dig"]).success();
    let output = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let section = |title: &str| {
        let (_, rest) = output.split_once(&format!("\n\n{title}\n")).unwrap();
        format!("{title}\n{}", rest.split("\n\n").next().unwrap().trim_end())
    };
    let (table, _) = output.split_once("\n\nnaive\n").unwrap();
    let shown = [table, "[...]", &section("v2"), "[...]", &section("v2 -> v2_kt")].join("\n\n");

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = readme.split_once(README_DIG).unwrap();
    let (there, after) = rest.split_once("\n```").unwrap();
    if std::env::var_os("UPDATE_README").is_some() {
        std::fs::write(path, format!("{before}{README_DIG}{shown}\n```{after}")).unwrap();
    } else {
        assert_eq!(there, shown, "UPDATE_README=1 cargo test --release -p cli readme writes it anew");
    }
}

#[test]
fn a_problem_without_queries_is_empty_and_fine() {
    for problem in ["0x4x8x8", "1x1/1x0/8x8"] {
        let assert = strata(&["dig", "--problem", problem]).success();
        let output = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
        assert!(output.contains("nothing is launched") && !output.contains("NaN"), "{output}");
        strata(&["dig", "--problem", problem, "--json", "-"]).success();
    }
}
