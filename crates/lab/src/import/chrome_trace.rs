//! torch.profiler's Chrome trace: events of the category `kernel`, alike ones together.

use serde::Deserialize;

use super::Raw;
use super::nsys::together;

#[derive(Deserialize)]
#[serde(untagged)]
enum Trace {
    Object(Whole),
    Events(Vec<Event>),
}

#[derive(Deserialize)]
struct Whole {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
    #[serde(rename = "deviceProperties", default)]
    devices: Vec<Device>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    id: i64,
    name: String,
    compute_major: Option<u32>,
    compute_minor: Option<u32>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    /// Microseconds.
    dur: Option<f64>,
    /// Of other categories, anything.
    #[serde(default)]
    args: serde_json::Value,
}

#[derive(Deserialize)]
struct KernelArguments {
    device: Option<i64>,
    grid: [u64; 3],
    block: [u64; 3],
    #[serde(rename = "registers per thread")]
    registers: Option<u64>,
    #[serde(rename = "shared memory")]
    shared: Option<u64>,
}

/// Reads the kernels of a trace.
pub(super) fn read(text: &str) -> Result<Vec<Raw>, String> {
    let trace: Trace = serde_json::from_str(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => "it has no list of traceEvents".to_string(),
        _ => error.to_string(),
    })?;
    let (events, devices) = match trace {
        Trace::Object(Whole { events, devices }) => (events, devices),
        Trace::Events(events) => (events, Vec::new()),
    };
    let mut launches = Vec::new();
    for Event { name, dur, args, .. } in events.into_iter().filter(|event| event.cat == "kernel") {
        let told = |error: &dyn std::fmt::Display| format!("the kernel `{name}`: {error}");
        let time = dur.ok_or_else(|| told(&"it has no duration"))?;
        let arguments = KernelArguments::deserialize(args).map_err(|error| told(&error))?;
        let device = devices.iter().find(|device| Some(device.id) == arguments.device);
        let mut raw = Raw {
            gpu: device.map(|device| device.name.clone()),
            capability: device.and_then(|device| device.compute_major.zip(device.compute_minor)),
            grid: arguments.grid,
            block: arguments.block,
            kernel: name,
            ..Raw::default()
        };
        let metrics =
            [("launch__registers_per_thread", arguments.registers), ("launch__shared_mem_per_block", arguments.shared)];
        raw.metrics.extend(metrics.into_iter().filter_map(|(name, value)| Some((name.into(), value?.into()))));
        launches.push((raw, time / 1e3));
    }
    together(launches)
}
