//! Lines of reports that `ncu` 2025.3.1 made on an H200, reduced to what is read: `fixtures/v2.ncu-rep` of this project's v2 in f32,
//! which the driver assembled (its instructions that access memory or were sampled), and `fixtures/transpose.ncu-rep` of a Triton
//! kernel, with its source file. The tables beside them are of `ncu --page source --csv`, each row with the line that `nvdisasm -g`
//! gives it. `fixtures/inlined.cubin` is what `ptxas -lineinfo` makes of the PTX beside it.

use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message;

use super::line_table::LineTable;
use super::ncu_report::{BlockHeader, Bytes, ProfileResult, Source};
use super::tests::{imported, report};
use super::*;
use crate::{Place, Sources};

const V2: &[u8] = include_bytes!("fixtures/v2.ncu-rep");
const TRANSPOSE: &[u8] = include_bytes!("fixtures/transpose.ncu-rep");
const INLINED: &[u8] = include_bytes!("fixtures/inlined.cubin");

type Counters = BTreeMap<String, u64>;

/// The rows of a table: what the instruction is called, its place, and its counters.
fn rows(kernel: &str, table: &str) -> Vec<(String, Place, Counters)> {
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let header = reader.headers().unwrap().clone();
    let read = |row: csv::StringRecord| {
        let text = |column: &str| &row[header.iter().position(|name| name == column).unwrap()];
        let number = |column: &str| text(column).parse::<u64>().unwrap();
        let access = text("Access Operation").to_lowercase();
        let (executed, wavefronts, sectors) =
            (number("Instructions Executed"), number("L1 Wavefronts Shared"), number("L2 Theoretical Sectors Global"));
        let (ideal, filled) = (number("L1 Wavefronts Shared Ideal"), number("L2 Theoretical Sectors Global Ideal"));
        let shared = |what: &str, value| (wavefronts > 0).then(|| (format!("shared_{access}_{what}"), value));
        let global = |what: &str, value| (sectors > 0).then(|| (format!("global_{access}_{what}"), value));
        let counters = [
            Some(("warp_instructions".to_owned(), executed)),
            Some(("thread_instructions".to_owned(), number("Predicated-On Thread Instructions Executed"))),
            Some(("samples".to_owned(), number("# Samples"))),
            Some(("stall_short_scoreboard".to_owned(), number("stall_short_sb"))),
            Some(("stall_long_scoreboard".to_owned(), number("stall_long_sb"))),
            shared("instructions", executed),
            shared("wavefronts", wavefronts),
            shared("wavefronts_ideal", ideal),
            shared("bank_conflicts", wavefronts - ideal),
            global("requests", executed),
            global("sectors", sectors),
            global("sectors_ideal", filled),
        ];
        let place = Place { file: text("File").into(), line: number("Line") as u32 };
        (format!("{kernel}+{}", text("Offset")), place, without_zeros(counters.into_iter().flatten().collect()))
    };
    reader.records().map(|row| read(row.unwrap())).collect()
}

fn without_zeros(mut counters: Counters) -> Counters {
    counters.retain(|_, value| *value > 0);
    counters
}

/// The names, the module and the launch of a report that has one of each.
fn parts(file: &[u8]) -> (Vec<String>, Source, ProfileResult) {
    let mut file = Bytes::new(&file[4..]);
    file.counted("the file's header").unwrap();
    let (mut names, mut payloads) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let header = BlockHeader::decode(file.counted("a block's header").unwrap()).unwrap();
        names.extend(header.string_table.into_iter().flat_map(|table| table.strings));
        payloads.push(file.counted("what a payload of one part has").unwrap());
    }
    (names, Source::decode(payloads[0]).unwrap(), ProfileResult::decode(payloads[1]).unwrap())
}

fn read(file: &[u8]) -> ProfileRecord {
    imported("a.ncu-rep", file, &ImportOptions::default()).unwrap().remove(0)
}

/// The report with its module changed.
fn with_module(file: &[u8], change: impl Fn(&mut Source)) -> Vec<u8> {
    let (names, mut source, result) = parts(file);
    change(&mut source);
    report(&[(names, &[&source.encode_to_vec()], vec![result])])
}

fn tables() -> [(&'static str, &'static [u8], &'static str); 2] {
    [
        ("flash_v2", V2, include_str!("fixtures/v2.csv")),
        ("transpose", TRANSPOSE, include_str!("fixtures/transpose.csv")),
    ]
}

#[test]
fn lines_are_what_ncu_and_nvdisasm_say() {
    for (kernel, file, table) in tables() {
        let mut expected = BTreeMap::<Place, Counters>::new();
        for (_, place, counters) in rows(kernel, table) {
            let line = expected.entry(place).or_default();
            counters.into_iter().for_each(|(name, value)| *line.entry(name).or_default() += value);
        }
        expected.retain(|_, counters| !counters.is_empty());
        let lines = read(file).lines;
        assert!(lines.iter().all(|line| line.instruction.is_none()));
        let found: BTreeMap<Place, Counters> =
            lines.into_iter().map(|line| (line.place(), without_zeros(line.counters))).collect();
        assert_eq!(found, expected, "{kernel}");
    }
}

#[test]
fn without_a_line_table_instructions_are_named() {
    for (kernel, file, table) in tables() {
        // Those that neither access memory nor were sampled are not told.
        let told = |counters: &Counters| {
            counters.keys().any(|name| !name.ends_with("_instructions") || name.contains("shared"))
        };
        let expected: BTreeMap<String, Counters> = rows(kernel, table)
            .into_iter()
            .filter(|(_, _, counters)| told(counters))
            .map(|(name, _, counters)| (name, counters))
            .collect();
        let record = read(&with_module(file, |module| module.cubin = None));
        let found: BTreeMap<String, Counters> =
            record.lines.iter().map(|line| (line.name(), without_zeros(line.counters.clone()))).collect();
        assert_eq!(found, expected, "{kernel}");
    }
    // Of 48 loads no one has a tenth of the conflicts: with a lower threshold some are named.
    let record = read(&with_module(V2, |module| module.cubin = None));
    let conflicts = |thresholds: &Thresholds| {
        findings(&record, thresholds).into_iter().find(|finding| finding.id == "bank-conflicts").unwrap()
    };
    let finding = conflicts(&Thresholds::default());
    assert!(!finding.text.contains("Of the conflicts") && finding.place().is_none(), "{}", finding.text);
    let finding = conflicts(&Thresholds { line: 0.005, ..Thresholds::default() });
    assert!(finding.text.contains(" % at flash_v2+0x") && finding.place().is_none(), "{}", finding.text);
    // Nor does it help to know the lines where the launch's module is not in the report, or the address in no function of it.
    let elsewhere = with_module(V2, |module| module.reference = Some(1));
    assert!(read(&elsewhere).lines.iter().all(|line| line.instruction.as_ref().unwrap().starts_with("0x")));
}

#[test]
fn findings_name_lines_of_a_profile() {
    let mut record = read(V2);
    assert_eq!(record.counters["shared_load_wavefronts"], 90_112.0);
    let find = |record: &ProfileRecord, id: &str| {
        let found = findings(record, &Thresholds::default()).into_iter().find(|finding| finding.id == id);
        found.unwrap_or_else(|| panic!("no {id}"))
    };
    let place = |line| Some(Place { file: "crates/kernels/src/v2.rs".into(), line });
    let conflicts = find(&record, "bank-conflicts");
    assert_eq!(conflicts.place(), place(71));
    assert!(conflicts.text.contains("63.6 %") && conflicts.text.contains("6.3-way"), "{}", conflicts.text);
    assert!(conflicts.text.contains("Of the conflicts 100.0 % at v2.rs:71."), "{}", conflicts.text);
    // Of 49 samples that waited for the short scoreboard 32 are at line 71.
    record.stalls.insert("short_scoreboard".into(), 0.6);
    let mio = find(&record, "mio-limited");
    assert_eq!(mio.place(), place(71));
    assert!(mio.text.contains("Of the warps found so 65.3 % at v2.rs:71"), "{}", mio.text);
    // 10,272 sectors; q, k, v and out of 1x2x128x32 in f32 and lse have 132,096 bytes.
    record.compulsory_bytes = Some(132_096);
    record.traffic = BTreeMap::from([("dram_read".into(), 122_400.0), ("dram_written".into(), 0.0)]);
    let requested = find(&record, "requested-bytes");
    assert_eq!(requested.severity, crate::Severity::Note);
    assert!(
        requested.text.contains("328.7 KB are requested, 2.49x the compulsory 132.1 KB")
            && requested.text.contains("asked for 39.9 % at v2.rs:63 and 39.9 % at v2.rs:64."),
        "{}",
        requested.text
    );
    record.compulsory_bytes = Some(1000);
    assert!(find(&record, "dram-bytes").text.contains("asked for 39.9 % at v2.rs:63 and 39.9 % at v2.rs:64."));
    assert!(find(&record, "stored-bytes").text.contains("Of the stores 97.0 % at v2.rs:82."));

    // A read down the columns: each lane's word in a sector of its own.
    let mut record = read(TRANSPOSE);
    assert!(findings(&record, &Thresholds::default()).iter().all(|finding| finding.id != "uncoalesced"));
    for line in &mut record.lines {
        line.counters.entry("global_load_sectors".into()).and_modify(|sectors| *sectors *= 8);
    }
    let uncoalesced = find(&record, "uncoalesced");
    assert_eq!(uncoalesced.place(), Some(Place { file: "/tmp/tr.py".into(), line: 5 }));
    assert!(
        uncoalesced.text.contains("72.0 sectors where its bytes would fill 16.0")
            && uncoalesced.text.contains("100.0 % at tr.py:5"),
        "{}",
        uncoalesced.text
    );
}

/// The text of a line is that of the report's own copy of the file; it stays with the record.
#[test]
fn the_text_of_a_line_comes_with_the_report() {
    let record = crate::AnyRecord::of(&read(TRANSPOSE)).unwrap();
    let mut sources = Sources::default();
    let place = Place { file: "/tmp/tr.py".into(), line: 5 };
    sources.of_record(&record);
    assert_eq!(sources.line(&place), Some("a = tl.load(x + i[:, None] * N + i[None, :])"));
    sources.of_record(&crate::AnyRecord::of(&read(V2)).unwrap());
    assert_eq!(sources.line(&place), None);
}

#[test]
fn an_inlined_line_is_that_of_its_caller() {
    let table = LineTable::of(INLINED);
    let line = |symbol, bytes| table.place(symbol, bytes).map(|place| (place.file, place.line));
    let at = |line| Some(("/tmp/a.py".to_owned(), line));
    // The symbols of `k` and `k2`. At 0x50 a row of line 32 is followed by one of what is inlined there; at 0x90 by one two calls deep.
    for (symbol, caller) in [(14, 32), (11, 132)] {
        let lines = [(0x00, caller - 22), (0x3f, caller), (0x40, 11), (0x50, caller), (0x60, 11), (0x80, caller)];
        for (bytes, expected) in lines.into_iter().chain([(0xc0, caller), (0xd0, 40), (0x17f, 40)]) {
            assert_eq!(line(symbol, bytes), at(expected), "{symbol} {bytes:#x}");
        }
        assert_eq!(line(symbol, 0x180), None);
    }
    assert_eq!(line(3, 0), None);
}

proptest! {
    /// Of a damaged module there are fewer lines or other ones, and a launch all the same.
    #[test]
    fn a_damaged_cubin_is_no_panic(
        which in 0..3_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in 0.0..1.0_f64,
    ) {
        let mut cubin = [parts(V2).1.cubin.unwrap(), parts(TRANSPOSE).1.cubin.unwrap(), INLINED.to_vec()][which].clone();
        for (index, byte) in &changes {
            let at = index.index(cubin.len());
            cubin[at] = *byte;
        }
        let _ = LineTable::of(&cubin);
        cubin.truncate((cut * cubin.len() as f64) as usize);
        let table = LineTable::of(&cubin);
        let _ = table.place(14, 0x70);
        let record = read(&with_module(V2, |module| module.cubin = Some(cubin.clone())));
        prop_assert_eq!(record.counters["shared_load_bank_conflicts"], 57_344.0);
    }

    #[test]
    fn a_report_with_lines_is_no_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = TRANSPOSE.to_vec();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = imported("a.ncu-rep", &bytes, &ImportOptions::default());
    }

    #[test]
    fn a_cut_report_with_lines_is_an_error(share in 0.0..1.0_f64) {
        let at = (share * TRANSPOSE.len() as f64) as usize;
        prop_assert!(imported("a.ncu-rep", &TRANSPOSE[..at], &ImportOptions::default()).is_err());
    }
}
