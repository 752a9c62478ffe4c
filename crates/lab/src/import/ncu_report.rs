//! Nsight Compute's report file, as far as launches and their metrics go.
//!
//! `NVR\0`, a header, then blocks to the end; a header is a length of four bytes, little-endian, and a message. A block's header
//! counts its sources, results and range results and has the size of the payload that follows: these, each with its length. A metric's name is
//! an index into the string table of the block, or of the one before where the block has none. A source is a module: its cubin, where
//! its functions are loaded, and source files, where they were imported. Metrics by instruction have a list of values, each with the
//! instruction's address. The messages are described in `extras/FileFormat` of an Nsight Compute installation; fields that are not named
//! here are passed over.

use std::collections::HashMap;

use prost::Message;
use serde_json::{Number, Value};

use super::Raw;
use super::line_table::LineTable;
use super::lines::{self, ByInstruction, Module};

#[derive(Clone, PartialEq, Message)]
pub(super) struct FileHeader {
    #[prost(uint32, optional, tag = "1")]
    pub version: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct BlockHeader {
    #[prost(uint32, optional, tag = "1")]
    pub num_sources: Option<u32>,
    #[prost(uint32, optional, tag = "2")]
    pub num_results: Option<u32>,
    #[prost(message, optional, tag = "4")]
    pub string_table: Option<StringTable>,
    #[prost(uint32, optional, tag = "5")]
    pub payload_size: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub num_range_results: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StringTable {
    #[prost(string, repeated, tag = "1")]
    pub strings: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Source {
    #[prost(uint64, optional, tag = "1")]
    pub reference: Option<u64>,
    #[prost(bytes = "vec", optional, tag = "4")]
    pub cubin: Option<Vec<u8>>,
    #[prost(message, optional, tag = "8")]
    pub files: Option<SourceFiles>,
    #[prost(message, optional, tag = "9")]
    pub loaded: Option<Loaded>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SourceFiles {
    #[prost(message, repeated, tag = "1")]
    pub files: Vec<SourceFile>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SourceFile {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// In any encoding.
    #[prost(bytes = "vec", optional, tag = "2")]
    pub content: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Loaded {
    #[prost(message, repeated, tag = "1")]
    pub functions: Vec<LoadedFunction>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LoadedFunction {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    #[prost(uint64, optional, tag = "2")]
    pub address: Option<u64>,
    #[prost(uint32, optional, tag = "3")]
    pub symbol: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProfileResult {
    #[prost(string, optional, tag = "5")]
    pub mangled_name: Option<String>,
    #[prost(string, optional, tag = "6")]
    pub function_name: Option<String>,
    #[prost(string, optional, tag = "7")]
    pub demangled_name: Option<String>,
    #[prost(message, optional, tag = "10")]
    pub grid: Option<Uint64x3>,
    #[prost(message, optional, tag = "11")]
    pub block: Option<Uint64x3>,
    #[prost(message, repeated, tag = "13")]
    pub metrics: Vec<MetricResult>,
    /// With its reference alone.
    #[prost(message, optional, tag = "15")]
    pub source: Option<Source>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Uint64x3 {
    #[prost(uint64, optional, tag = "1")]
    pub x: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    pub y: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    pub z: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricResult {
    #[prost(uint32, optional, tag = "1")]
    pub name_id: Option<u32>,
    #[prost(message, optional, tag = "2")]
    pub value: Option<MetricValue>,
    #[prost(message, repeated, tag = "3")]
    pub instances: Vec<Instance>,
}

/// One value of several, and what it is of: of a metric by instruction, the address.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Instance {
    #[prost(message, optional, tag = "1")]
    pub of: Option<MetricValue>,
    #[prost(message, optional, tag = "2")]
    pub value: Option<MetricValue>,
}

/// One of these.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricValue {
    #[prost(string, optional, tag = "1")]
    pub string: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub float: Option<f32>,
    #[prost(double, optional, tag = "3")]
    pub double: Option<f64>,
    #[prost(uint32, optional, tag = "4")]
    pub uint32: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pub uint64: Option<u64>,
}

impl MetricValue {
    fn whole(&self) -> Option<u64> {
        self.uint64.or(self.uint32.map(u64::from))
    }

    /// `None` of a value that is none: the chip gave no number.
    fn json(self) -> Option<Value> {
        if let Some(text) = self.string {
            return Some(text.into());
        }
        if let Some(whole) = self.whole() {
            return Some(whole.into());
        }
        Number::from_f64(self.double.or(self.float.map(f64::from))?).map(Value::Number)
    }
}

/// The rest of a file, or of a payload.
pub(super) struct Bytes<'a> {
    pub left: &'a [u8],
    whole: usize,
}

impl<'a> Bytes<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes, whole: bytes.len() }
    }

    pub fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], String> {
        let at = self.whole - self.left.len();
        let (taken, left) = self.left.split_at_checked(count).ok_or_else(|| {
            format!("{what} at byte {at} has {count} bytes, {} are left: it is cut off or damaged", self.left.len())
        })?;
        self.left = left;
        Ok(taken)
    }

    /// What a length precedes.
    pub fn counted(&mut self, what: &str) -> Result<&'a [u8], String> {
        let length = self.take(4, "a length")?;
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
        self.take(length as usize, what)
    }
}

/// Reads the launches of a report.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<Raw>, String> {
    let mut file = Bytes::new(bytes);
    file.take(4, "the file's mark")?;
    let header =
        FileHeader::decode(file.counted("the file's header")?).map_err(|error| format!("its header: {error}"))?;
    let version = header.version.ok_or("its header has no version")?;
    let told =
        |what: &str, reason: &dyn std::fmt::Display| format!("{what} (version {version} of the format): {reason}");
    let mut strings: Vec<String> = Vec::new();
    let mut modules = HashMap::new();
    let mut launches = Vec::new();
    while !file.left.is_empty() {
        let header = BlockHeader::decode(file.counted("a block's header")?).map_err(|error| told("a block", &error))?;
        if let Some(table) = header.string_table.filter(|table| !table.strings.is_empty()) {
            strings = table.strings;
        }
        let mut payload = Bytes::new(file.take(header.payload_size.unwrap_or(0) as usize, "a block's payload")?);
        for _ in 0..header.num_sources.unwrap_or(0) {
            // One that cannot be read has no lines.
            let source = Source::decode(payload.counted("a source")?).unwrap_or_default();
            modules.extend(source.reference.map(|reference| (reference, module(source))));
        }
        for _ in 0..header.num_results.unwrap_or(0) {
            let result =
                ProfileResult::decode(payload.counted("a result")?).map_err(|error| told("a result", &error))?;
            launches.push(launch(result, &strings, &modules).map_err(|error| told("a result", &error))?);
        }
        for _ in 0..header.num_range_results.unwrap_or(0) {
            payload.counted("a range result")?;
        }
        if !payload.left.is_empty() {
            return Err(told("a block", &format!("{} bytes of its payload are of no result", payload.left.len())));
        }
    }
    Ok(launches)
}

fn module(source: Source) -> Module {
    let files = source.files.into_iter().flat_map(|files| files.files);
    let functions = source.loaded.into_iter().flat_map(|loaded| loaded.functions);
    Module {
        functions: functions
            .filter_map(|function| Some((function.address?, (function.name?, function.symbol? as usize))))
            .collect(),
        table: source.cubin.map_or_else(LineTable::default, |cubin| LineTable::of(&cubin)),
        files: files
            .filter_map(|file| Some((file.name?, String::from_utf8_lossy(&file.content?).into_owned())))
            .collect(),
    }
}

fn launch(result: ProfileResult, strings: &[String], modules: &HashMap<u64, Module>) -> Result<Raw, String> {
    let dims = |dims: Option<Uint64x3>, what: &str| {
        let dims = dims.and_then(|dims| Some([dims.x?, dims.y?, dims.z?]));
        dims.ok_or_else(|| format!("it has no {what}"))
    };
    let names = [result.function_name, result.demangled_name, result.mangled_name];
    let kernel = names.into_iter().flatten().find(|name| !name.is_empty()).ok_or("its kernel has no name")?;
    let mut raw =
        Raw { grid: dims(result.grid, "grid")?, block: dims(result.block, "block")?, kernel, ..Raw::default() };
    let mut by_instruction = ByInstruction::new();
    for metric in result.metrics {
        let index = metric.name_id.ok_or("a metric has no name")?;
        let name = strings
            .get(index as usize)
            .ok_or_else(|| format!("a metric has the name {index} of {} names", strings.len()))?;
        if let Some(value) = metric.value.and_then(MetricValue::json) {
            raw.metrics.insert(name.clone(), value);
        }
        if lines::is_wanted(name) {
            let instances = metric.instances.iter();
            let values = instances.filter_map(|one| Some((one.of.as_ref()?.whole()?, one.value.as_ref()?.whole()?)));
            by_instruction.insert(name.clone(), values.collect());
        }
    }
    let module = result.source.and_then(|source| modules.get(&source.reference?));
    raw.lines = lines::lines(&by_instruction, module.unwrap_or(&Module::default()));
    let whole = |name: &str| u32::try_from(raw.metrics.get(name)?.as_u64()?).ok();
    let (major, minor) = ("device__attribute_compute_capability_major", "device__attribute_compute_capability_minor");
    raw.capability = whole(major).zip(whole(minor));
    raw.gpu = raw.metrics.get("device__attribute_display_name").and_then(Value::as_str).map(str::to_owned);
    Ok(raw)
}
