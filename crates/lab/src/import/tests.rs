use proptest::prelude::*;
use prost::Message;
use serde_json::json;

use super::ncu_report::{BlockHeader, FileHeader, MetricResult, MetricValue, ProfileResult, StringTable, Uint64x3};
use super::*;

/// A value as a report has it.
enum Given {
    Whole(u64),
    Small(u32),
    Double(f64),
    Float(f32),
    Text(&'static str),
}

fn metric(given: &Given) -> MetricValue {
    let mut value = MetricValue::default();
    match given {
        Given::Whole(whole) => value.uint64 = Some(*whole),
        Given::Small(whole) => value.uint32 = Some(*whole),
        Given::Double(number) => value.double = Some(*number),
        Given::Float(number) => value.float = Some(*number),
        Given::Text(text) => value.string = Some((*text).into()),
    }
    value
}

/// What an H200 counted of `f32_small_v2`, in part.
fn given() -> Vec<(&'static str, Given)> {
    vec![
        ("device__attribute_display_name", Given::Text("NVIDIA H200")),
        ("device__attribute_compute_capability_major", Given::Small(9)),
        ("device__attribute_compute_capability_minor", Given::Small(0)),
        ("device__attribute_multiprocessor_count", Given::Small(132)),
        ("smsp__inst_executed.sum", Given::Whole(2_978_816)),
        ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", Given::Whole(2_761_216)),
        ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum", Given::Whole(1_835_008)),
        ("smsp__sass_inst_executed_op_shared_ld.sum", Given::Whole(331_008)),
        ("dram__bytes_read.sum", Given::Double(1_602_304.0)),
        ("sm__maximum_warps_per_active_cycle_pct", Given::Double(12.5)),
        ("launch__occupancy_limit_shared_mem", Given::Small(4)),
        ("launch__occupancy_limit_registers", Given::Small(2)),
        ("launch__registers_per_thread", Given::Small(204)),
        ("smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio", Given::Double(6.5)),
        ("smsp__average_warp_latency_per_inst_issued.ratio", Given::Double(13.0)),
        ("gpu__time_duration.sum", Given::Float(32000.0)),
    ]
}

fn counted(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

fn result(names: std::ops::Range<usize>, given: &[(&str, Given)]) -> ProfileResult {
    let dims = |x, y, z| Some(Uint64x3 { x: Some(x), y: Some(y), z: Some(z) });
    let metrics = names.map(|index| MetricResult {
        name_id: Some(index as u32),
        value: Some(metric(&given[index].1)),
        instances: Vec::new(),
    });
    ProfileResult {
        mangled_name: Some("_Z7attn_v2".into()),
        function_name: Some("attn_v2".into()),
        demangled_name: Some("attn_v2(float*)".into()),
        grid: dims(8, 8, 1),
        block: dims(128, 1, 1),
        metrics: metrics.collect(),
        source: None,
    }
}

/// A block's table of names, sources and results.
pub(super) type Block<'a> = (Vec<String>, &'a [&'a [u8]], Vec<ProfileResult>);

/// A report of blocks.
pub(super) fn report(blocks: &[Block<'_>]) -> Vec<u8> {
    let mut file = b"NVR\0".to_vec();
    file.extend(counted(&FileHeader { version: Some(10) }.encode_to_vec()));
    for (strings, sources, results) in blocks {
        let mut payload: Vec<u8> = sources.iter().flat_map(|source| counted(source)).collect();
        payload.extend(results.iter().flat_map(|result| counted(&result.encode_to_vec())));
        let header = BlockHeader {
            num_sources: Some(sources.len() as u32),
            num_results: Some(results.len() as u32),
            string_table: Some(StringTable { strings: strings.clone() }),
            payload_size: Some(payload.len() as u32),
            num_range_results: None,
        };
        file.extend(counted(&header.encode_to_vec()));
        file.extend(payload);
    }
    file
}

fn names(given: &[(&str, Given)]) -> Vec<String> {
    given.iter().map(|(name, _)| (*name).to_owned()).collect()
}

fn whole_report() -> Vec<u8> {
    let given = given();
    let all = 0..given.len();
    // The second block has no table of its own.
    report(&[
        (names(&given), &[b"a cubin", b""], vec![result(all.clone(), &given)]),
        (Vec::new(), &[], vec![result(all, &given), result(0..6, &given)]),
    ])
}

pub(super) fn imported(name: &str, bytes: &[u8], options: &ImportOptions) -> Result<Vec<ProfileRecord>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    let records = import(&path, options).map_err(|error| error.to_string())?;
    Ok(records.into_iter().map(|record| serde_json::from_value(record.json).unwrap()).collect())
}

fn ids(record: &ProfileRecord) -> Vec<&str> {
    record.findings.iter().map(|finding| finding.id.as_str()).collect()
}

#[test]
fn a_report_is_read_with_what_it_counts() {
    let records = imported("a.ncu-rep", &whole_report(), &ImportOptions::default()).unwrap();
    assert_eq!(records.len(), 3);
    let record = &records[0];
    assert_eq!((record.kernel.as_str(), record.gpu.as_str(), record.sm.as_str()), ("attn_v2", "H200", "sm_90"));
    assert_eq!(
        (record.grid, record.block, record.problem.as_str()),
        ([8, 8, 1], [128, 1, 1], "grid 8x8x1 block 128x1x1")
    );
    assert_eq!(record.counters["shared_load_bank_conflicts"], 1_835_008.0);
    assert_eq!(record.traffic.get("dram_read"), Some(&1_602_304.0));
    // What is not in the file is not zero.
    assert!(!record.traffic.contains_key("dram_written") && !record.counters.contains_key("global_load_requests"));
    assert_eq!((record.profiled_time_ms, record.measured_time_ms), (Some(0.032), None));
    assert_eq!(record.occupancy.limiters, ["registers"]);
    assert_eq!(record.stalls["mio_throttle"], 0.5);
    assert_eq!(ids(record), ["occupancy", "grid-too-small", "bank-conflicts", "mio-limited"]);
    assert_eq!(records[1].counters, record.counters);
    assert_eq!(records[2].counters.len(), 2);
}

/// The same launch as a raw page gives the same record.
#[test]
fn a_raw_page_says_the_same_as_the_report() {
    let given = given();
    let mut columns = "\"ID\",\"Process ID\",\"Process Name\",\"Host Name\",\"Kernel Name\",\"Context\",\"Stream\",\"Block Size\",\"Grid Size\",\
                       \"Device\",\"CC\""
        .to_string();
    let mut units = ",,,,,,,,,,".to_string();
    let mut row = r#""0","77","python3","host","attn_v2","1","7","(128, 1, 1)","(8, 8, 1)","0","9.0""#.to_string();
    for (name, value) in &given {
        columns += &format!(",\"{name}\"");
        // As `ncu` prints without `--print-units base`.
        let (unit, text) = match (*name, value) {
            ("dram__bytes_read.sum", _) => ("Mbyte", "1.602304".to_string()),
            ("gpu__time_duration.sum", _) => ("us", "32".to_string()),
            (_, Given::Whole(whole)) => ("inst", crate::figures::count(*whole)),
            (_, Given::Small(whole)) => ("", whole.to_string()),
            (_, Given::Double(number)) => ("%", number.to_string()),
            (_, Given::Float(number)) => ("", number.to_string()),
            (_, Given::Text(text)) => ("", (*text).to_string()),
        };
        units += &format!(",\"{unit}\"");
        row += &format!(",\"{text}\"");
    }
    let page = format!("==PROF== Connected to process 77\n{columns}\n{units}\n{row}\n");
    let of_page = imported("a.csv", page.as_bytes(), &ImportOptions::default()).unwrap();
    let of_report = imported("a.csv", &whole_report(), &ImportOptions::default()).unwrap();
    let comparable =
        |record: &ProfileRecord| ProfileRecord { file: String::new(), metrics: BTreeMap::new(), ..record.clone() };
    assert_eq!(comparable(&of_page[0]), comparable(&of_report[0]));
    for (name, value) in &of_report[0].metrics {
        assert_eq!(of_page[0].metrics[name].as_f64(), value.as_f64(), "{name}");
    }
    let cut = page.trim_end().rsplit_once(',').unwrap().0;
    let error = imported("a.csv", cut.as_bytes(), &ImportOptions::default()).unwrap_err();
    assert!(error.contains("it is cut off"), "{error}");
    let no_units = format!("{columns}\n{row}\n");
    assert!(imported("a.csv", no_units.as_bytes(), &ImportOptions::default()).unwrap_err().contains("--page raw"));
    let empty = format!("{columns}\n{units}\n");
    assert!(imported("a.csv", empty.as_bytes(), &ImportOptions::default()).unwrap_err().contains("without a kernel"));
}

#[test]
fn damaged_reports_are_refused_by_name() {
    let given = given();
    let refused = |bytes: &[u8], said: &str| {
        let error = imported("a.ncu-rep", bytes, &ImportOptions::default()).unwrap_err();
        assert!(error.contains(said), "{said}: {error}");
    };
    refused(b"NVR\0", "a length at byte 4 has 4 bytes, 0 are left");
    refused(&[b"NVR\0".as_slice(), &counted(&[])].concat(), "its header has no version");
    refused(
        &[b"NVR\0".as_slice(), &counted(&FileHeader { version: Some(10) }.encode_to_vec())].concat(),
        "without a kernel",
    );
    refused(&report(&[(Vec::new(), &[], vec![])]), "without a kernel");
    // A name beyond the table; the message has the version.
    refused(
        &report(&[(vec!["x".into()], &[], vec![result(0..2, &given)])]),
        "(version 10 of the format): a metric has the name 1 of 1 names",
    );
    refused(
        &report(&[(names(&given), &[], vec![ProfileResult { grid: None, ..result(0..1, &given) }])]),
        "it has no grid",
    );
    refused(b"", "is no Nsight Compute report");
    refused(&[0xff; 64], "is no Nsight Compute report");
}

proptest! {
    /// Cut anywhere but between two blocks, a report is an error.
    #[test]
    fn a_truncated_report_is_an_error(share in 0.0..1.0_f64) {
        let bytes = whole_report();
        let at = (share * bytes.len() as f64) as usize;
        let first = report(&[(names(&given()), &[b"a cubin", b""], vec![result(0..given().len(), &given())])]).len();
        let read = imported("a.ncu-rep", &bytes[..at], &ImportOptions::default());
        prop_assert_eq!(read.is_ok(), at == first);
    }

    /// A report has no checksum: a changed byte may change a value, but never ends the program.
    #[test]
    fn a_corrupted_report_is_no_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = whole_report();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = imported("a.ncu-rep", &bytes, &ImportOptions::default());
    }

    #[test]
    fn any_bytes_are_no_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), mark in 0..4_usize) {
        let marks: [&[u8]; 4] = [b"", b"NVR\0", b"SQLite format 3\0", b"{\"traceEvents\": [{"];
        bytes.splice(0..0, marks[mark].iter().copied());
        let _ = imported("a", &bytes, &ImportOptions::default());
    }
}

#[test]
fn advice_follows_type_and_architecture() {
    let problem: Problem = "2x4x256x64 f16".parse().unwrap();
    let options = ImportOptions { problem: Some(problem), ..ImportOptions::default() };
    let records = imported("a.ncu-rep", &whole_report(), &options).unwrap();
    let conflicts = records[0].findings.iter().find(|finding| finding.id == "bank-conflicts").unwrap();
    assert!(conflicts.text.contains("66.5 %") && conflicts.text.contains("8.3-way"), "{}", conflicts.text);
    assert!(conflicts.text.contains("storing K transposed is not the remedy"), "{}", conflicts.text);
    let options = ImportOptions { problem: Some("2x4x256x64 f32".parse().unwrap()), ..ImportOptions::default() };
    let records = imported("a.ncu-rep", &whole_report(), &options).unwrap();
    assert!(records[0].findings.iter().any(|finding| finding.text.contains("may be stored transposed")));
    assert_eq!((records[0].problem.as_str(), records[0].dtype.as_deref()), ("2x4x256x64", Some("f32")));
    let lax = Thresholds { occupancy: 0.1, bank_conflicts: 0.7, stall: 0.6, ..Thresholds::default() };
    let options = ImportOptions { thresholds: lax, kernel: Some("attn".into()), ..ImportOptions::default() };
    let records = imported("a.ncu-rep", &whole_report(), &options).unwrap();
    assert_eq!(ids(&records[0]), ["grid-too-small"]);
    let options = ImportOptions { kernel: Some("gemm".into()), ..ImportOptions::default() };
    assert!(imported("a.ncu-rep", &whole_report(), &options).unwrap_err().contains("without a kernel"));
}

/// The generations as metrics of a chip: each has its article's finding.
#[test]
fn the_articles_conclusions_follow_from_a_chips_counters() {
    let of = |dtype: &str, problem: &str, metrics: serde_json::Value| {
        let serde_json::Value::Object(metrics) = metrics else { unreachable!() };
        let raw = Raw {
            kernel: "attn".into(),
            gpu: Some("NVIDIA GeForce RTX 2070".into()),
            capability: Some((7, 5)),
            grid: [640, 1, 1],
            block: [128, 1, 1],
            metrics: metrics.into_iter().collect(),
            ..Raw::default()
        };
        let problem: Problem = format!("{problem} {dtype}").parse().unwrap();
        record(raw, "ncu", Path::new("x"), &ImportOptions { problem: Some(problem), ..ImportOptions::default() })
    };
    // 11.58 GB read, 5.54 GB written (d 64).
    let v1 = of("f32", "10x64x1024x64", json!({"dram__bytes_read.sum": 11.58e9, "dram__bytes_write.sum": 5.54e9}));
    assert_eq!(ids(&v1), ["dram-bytes"]);
    // An H200's L2 holds them, and the stores show (2x16x1024x64).
    let v1 = json!({"dram__bytes_read.sum": 33.9e6, "dram__bytes_write.sum": 984.3e3, "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 8_650_752});
    let v1 = of("f32", "2x16x1024x64", v1);
    assert_eq!(ids(&v1), ["stored-bytes"]);
    assert!(v1.findings[0].text.contains("276.8 MB stored to global memory are 8.22x"), "{}", v1.findings[0].text);
    // 412.18 MB read, and the table of conflicts (d 32).
    let v2 = of(
        "f32",
        "10x64x1024x32",
        json!({"dram__bytes_read.sum": 412.18e6, "dram__bytes_write.sum": 85e6,
        "smsp__sass_inst_executed_op_shared_ld.sum": 293_601_280, "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 1_845_667_948,
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 1_174_579_308}),
    );
    assert_eq!(ids(&v2), ["bank-conflicts"]);
    assert!(
        v2.findings[0].text.contains("63.6 %") && v2.findings[0].text.contains("6.3-way"),
        "{}",
        v2.findings[0].text
    );
    // 6.7 cycles of each warp's 15.2 for the MIO queue; products on the FMA pipe.
    let metrics = || {
        json!({"smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio": 6.7,
            "smsp__average_warp_latency_per_inst_issued.ratio": 15.24, "sm__inst_executed_pipe_tensor_op_hmma.sum": 0,
            "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 43e9})
    };
    assert_eq!(ids(&of("f16", "10x64x1024x32", metrics())), ["idle-tensor-cores", "mio-limited"]);
    // Conversions of bf16 that go through the tensor cores' pipe are no products.
    let mut few = metrics();
    few["sm__inst_executed_pipe_tensor_op_hmma.sum"] = json!(16_384);
    assert_eq!(ids(&of("f16", "10x64x1024x32", few)), ["idle-tensor-cores", "mio-limited"]);
    // Tensor cores that wait for copies.
    let v2_tc = json!({"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": 5.0,
        "smsp__average_warp_latency_per_inst_issued.ratio": 12.0});
    let v2_tc = of("f16", "10x64x1024x64", v2_tc);
    assert_eq!(ids(&v2_tc), ["synchronous-copies"]);
    assert!(v2_tc.findings[0].text.contains("Without an asynchronous copy on this architecture"));
    // No tensor instruction of sm_75 takes f32.
    assert_eq!(ids(&of("f32", "10x64x1024x32", metrics())), ["mio-limited"]);
}

#[test]
fn an_nsys_export_gives_times_of_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sqlite");
    let database = rusqlite::Connection::open(&path).unwrap();
    let read = || {
        let records = import(&path, &ImportOptions::default()).map_err(|error| error.to_string())?;
        Ok::<_, String>(
            records
                .into_iter()
                .map(|record| serde_json::from_value(record.json).unwrap())
                .collect::<Vec<ProfileRecord>>(),
        )
    };
    database.execute_batch("CREATE TABLE t (x)").unwrap();
    assert!(read().unwrap_err().contains("another program's"));
    database.execute_batch("CREATE TABLE EXPORT_META_DATA (name TEXT, value TEXT)").unwrap();
    assert!(read().unwrap_err().contains("without a kernel"));
    database
        .execute_batch(
            "CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (5, 'attn'), (6, 'softmax');
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \"end\" INTEGER, deviceId INTEGER, shortName INTEGER,
                 gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER,
                 registersPerThread INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER);
             INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 3000000, 0, 5, 8, 1, 1, 128, 1, 1, 96, 0, 1024),
                 (0, 1000000, 0, 5, 8, 1, 1, 128, 1, 1, 96, 0, 1024), (0, 2000000, 0, 5, 8, 1, 1, 128, 1, 1, 96, 0, 1024),
                 (0, 500000, 0, 6, 8, 1, 1, 128, 1, 1, 16, 0, 0);",
        )
        .unwrap();
    let records = read().unwrap();
    assert_eq!(records.len(), 2);
    assert_eq!(
        (records[0].kernel.as_str(), records[0].measured_time_ms, records[0].samples),
        ("attn", Some(2.0), Some(3))
    );
    assert_eq!((records[0].sm.as_str(), records[0].occupancy.registers), ("unknown", Some(96.0)));
    database
        .execute_batch(
            "CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, computeMajor INTEGER, computeMinor INTEGER);
             INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200', 9, 0)",
        )
        .unwrap();
    assert_eq!((read().unwrap()[1].gpu.as_str(), read().unwrap()[1].sm.as_str()), ("H200", "sm_90"));
}

#[test]
fn a_chrome_trace_gives_times_of_kernels() {
    let kernel = |dur: f64| {
        json!({"ph": "X", "cat": "kernel", "name": "attn", "ts": 1.0, "dur": dur, "args": {"device": 0, "grid": [8, 1, 1],
            "block": [128, 1, 1], "registers per thread": 96, "shared memory": 28672, "stream": 7}})
    };
    let trace = json!({"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}],
        "traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, kernel(30.0), kernel(10.0),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.5, "dur": 3.0, "args": {"grid": "none"}}]});
    let read = |trace: &serde_json::Value| imported("a.json", trace.to_string().as_bytes(), &ImportOptions::default());
    let records = read(&trace).unwrap();
    assert_eq!((records.len(), records[0].source.as_str(), records[0].sm.as_str()), (1, "torch", "sm_90"));
    assert_eq!((records[0].measured_time_ms, records[0].samples), (Some(0.02), Some(2)));
    assert_eq!(records[0].occupancy.shared_bytes, Some(28672.0));
    assert!(read(&json!([kernel(1.0)])).is_ok());
    assert!(read(&json!({"traceEvents": []})).unwrap_err().contains("without a kernel"));
    assert!(read(&json!({"events": []})).unwrap_err().contains("no list of traceEvents"));
    let mut broken = kernel(1.0);
    broken["args"]["grid"] = json!([1, 2]);
    assert!(read(&json!([broken])).unwrap_err().contains("the kernel `attn`"));
    let cut = trace.to_string();
    assert!(imported("a.json", &cut.as_bytes()[..cut.len() / 2], &ImportOptions::default()).is_err());
}

#[test]
fn every_architecture_is_asked_in_its_own_names() {
    let asked = |sm: Option<Sm>| metrics(sm).join(" ");
    assert!(asked(Some(Sm::Sm90)).contains("pipe_tensor_op_gmma") && asked(Some(Sm::Sm90)).contains("stalled_gmma"));
    assert!(asked(Some(Sm::Sm75)).contains("pipe_tensor_op_hmma") && !asked(Some(Sm::Sm75)).contains("gmma"));
    assert!(asked(Some(Sm::Sm100)).contains("pipe_tensor_subpipe_hmma"));
    assert!(!asked(None).contains("gmma"));
}
