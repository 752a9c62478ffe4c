//! Nsight Compute's raw page as CSV: a row of names, a row of units, and a row per launch, whose first columns say which launch it is.

use serde_json::{Number, Value};

use super::Raw;

/// Columns that are no metrics.
const IDENTIFYING: [&str; 11] = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
];

/// The header's line: `ncu` prints lines of its own before it.
fn header_at(text: &str) -> Option<usize> {
    let is_header = |line: &str| line.contains("\"ID\"") && line.contains("\"Kernel Name\"");
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if is_header(line) {
            return Some(at);
        }
        at += line.len();
    }
    None
}

/// Whether this is such a page.
pub(super) fn is_raw_page(text: &str) -> bool {
    header_at(text).is_some()
}

/// Reads the page.
pub(super) fn read(text: &str) -> Result<Vec<Raw>, String> {
    let text = &text[header_at(text).ok_or("it has no row of names")?..];
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(text.as_bytes());
    let names = reader.headers().map_err(|error| error.to_string())?.clone();
    let mut rows = reader.records();
    let column =
        |name: &str| names.iter().position(|column| column == name).ok_or_else(|| format!("it has no column `{name}`"));
    let (kernel, block, grid) = (column("Kernel Name")?, column("Block Size")?, column("Grid Size")?);
    let (id, capability) = (column("ID")?, column("CC").ok());
    let units = rows.next().ok_or("it has no row of units")?.map_err(|error| error.to_string())?;
    if units.get(id).is_none_or(|id| !id.is_empty()) {
        return Err("its second row has no units: it must be a raw page (`--page raw`)".into());
    }
    let mut launches = Vec::new();
    for row in rows {
        let row = row.map_err(|error| error.to_string())?;
        let line = row.position().map_or(0, csv::Position::line);
        if row.len() != names.len() {
            return Err(format!("row {line} has {} fields, its header {}: it is cut off", row.len(), names.len()));
        }
        let mut raw = Raw {
            kernel: row[kernel].into(),
            block: dims(&row[block]).ok_or_else(|| format!("row {line}: the block is `{}`", &row[block]))?,
            grid: dims(&row[grid]).ok_or_else(|| format!("row {line}: the grid is `{}`", &row[grid]))?,
            capability: capability.and_then(|column| {
                let (major, minor) = row[column].split_once('.')?;
                Some((major.parse().ok()?, minor.parse().ok()?))
            }),
            ..Raw::default()
        };
        for ((name, unit), text) in names.iter().zip(&units).zip(&row) {
            if !IDENTIFYING.contains(&name) && !text.is_empty() {
                raw.metrics.insert(name.into(), value(text, unit));
            }
        }
        raw.gpu = raw.metrics.get("device__attribute_display_name").and_then(Value::as_str).map(str::to_owned);
        launches.push(raw);
    }
    Ok(launches)
}

/// `(128, 1, 1)`.
fn dims(text: &str) -> Option<[u64; 3]> {
    let inner = text.trim().strip_prefix('(')?.strip_suffix(')')?;
    let parts: Vec<u64> = inner.split(',').map(|part| part.trim().parse().ok()).collect::<Option<_>>()?;
    parts.try_into().ok()
}

/// A number in base units, or a text.
fn value(text: &str, unit: &str) -> Value {
    let plain = text.replace(',', "");
    if let Ok(whole) = plain.parse::<u64>()
        && scale(unit) == 1.0
    {
        return whole.into();
    }
    match plain.parse::<f64>() {
        Ok(number) => Number::from_f64(number * scale(unit)).map_or(Value::Null, Value::Number),
        Err(_) => text.into(),
    }
}

/// What a unit is in base units: bytes, nanoseconds, hertz. `ncu` prints others unless `--print-units base` is given.
fn scale(unit: &str) -> f64 {
    let of_part = |part: &str| match part.to_ascii_lowercase().as_str() {
        "kbyte" | "khz" | "usecond" | "us" => 1e3,
        "mbyte" | "mhz" | "msecond" | "ms" => 1e6,
        "gbyte" | "ghz" => 1e9,
        "tbyte" => 1e12,
        "second" | "s" => 1e9,
        _ => 1.0,
    };
    match unit.split_once('/') {
        // A rate's base is a second.
        Some((amount, "second" | "s")) => of_part(amount),
        Some((amount, per)) => of_part(amount) / of_part(per),
        None => of_part(unit),
    }
}
