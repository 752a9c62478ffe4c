//! The metrics of Nsight Compute that are asked for, and what they are called in a record.

use std::collections::BTreeMap;

use arch::Sm;

use super::{ProfileRecord, lines};

/// Counters of a record, and the metrics that they are the sum of. The names are of sm_75 to sm_120.
const COUNTERS: [(&str, &str); 14] = [
    ("warp_instructions", "smsp__inst_executed.sum"),
    ("global_load_requests", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"),
    ("global_load_sectors", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"),
    ("global_store_requests", "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"),
    ("global_store_sectors", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"),
    ("shared_load_instructions", "smsp__sass_inst_executed_op_shared_ld.sum"),
    ("shared_load_wavefronts", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"),
    ("shared_load_bank_conflicts", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"),
    ("shared_store_instructions", "smsp__sass_inst_executed_op_shared_st.sum"),
    ("shared_store_wavefronts", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"),
    ("shared_store_bank_conflicts", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"),
    ("local_load_instructions", "smsp__sass_inst_executed_op_local_ld.sum"),
    ("local_store_instructions", "smsp__sass_inst_executed_op_local_st.sum"),
    ("special_function_instructions", "sm__inst_executed_pipe_xu.sum"),
];

/// Bytes of a record, and their metrics.
const TRAFFIC: [(&str, &str); 2] = [("dram_read", "dram__bytes_read.sum"), ("dram_written", "dram__bytes_write.sum")];

/// Resources that limit the CTAs of a multiprocessor.
const LIMITS: [(&str, &str); 4] = [
    ("registers", "launch__occupancy_limit_registers"),
    ("shared", "launch__occupancy_limit_shared_mem"),
    ("warps", "launch__occupancy_limit_warps"),
    ("blocks", "launch__occupancy_limit_blocks"),
];

/// Reasons that warps wait for.
pub(super) const STALLS: [&str; 9] = [
    "mio_throttle",
    "short_scoreboard",
    "long_scoreboard",
    "math_pipe_throttle",
    "barrier",
    "wait",
    "lg_throttle",
    "not_selected",
    "gmma",
];

/// The time between two instructions of a warp, of which stalls are shares.
const LATENCY: &str = "smsp__average_warp_latency_per_inst_issued.ratio";

/// Metrics that findings look at as they are.
pub(super) const FFMA: &str = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum";
pub(super) const GMMA: &str = "sm__inst_executed_pipe_tensor_op_gmma.sum";
pub(super) const SMS: &str = "device__attribute_multiprocessor_count";
const OTHERS: [&str; 12] = [
    FFMA,
    SMS,
    LATENCY,
    "gpu__time_duration.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sector_hit_rate.pct",
    "smsp__inst_executed_op_ldsm.sum",
    "sm__maximum_warps_per_active_cycle_pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
];

/// Instructions on the tensor cores of an architecture: sm_100 has the pipe under other names, sm_90 has two.
pub(super) fn tensor(sm: Option<Sm>) -> &'static [&'static str] {
    match sm {
        Some(sm) if sm >= Sm::Sm100 => &["sm__inst_executed_pipe_tensor_subpipe_hmma.sum"],
        Some(Sm::Sm90) => &["sm__inst_executed_pipe_tensor_op_hmma.sum", GMMA],
        _ => &["sm__inst_executed_pipe_tensor_op_hmma.sum"],
    }
}

/// The metrics to ask `ncu` for on an architecture.
pub fn metrics(sm: Option<Sm>) -> Vec<String> {
    let named = COUNTERS.iter().chain(&TRAFFIC).chain(&LIMITS).map(|(_, metric)| (*metric).to_owned());
    let stalls = STALLS.into_iter().filter(|reason| *reason != "gmma" || sm == Some(Sm::Sm90)).map(stall);
    named.chain(stalls).chain(OTHERS.iter().chain(tensor(sm)).map(|metric| (*metric).to_owned())).collect()
}

fn stall(reason: &str) -> String {
    format!("smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio")
}

/// Fills in what follows from the metrics, and from the lines where a sum was not read; what was not read at all stays away.
pub(super) fn fill(record: &mut ProfileRecord) {
    let of = |names: &[(&str, &str)], record: &ProfileRecord| -> BTreeMap<String, f64> {
        names.iter().filter_map(|(name, metric)| Some(((*name).to_owned(), record.metric(metric)?))).collect()
    };
    record.counters = of(&COUNTERS, record);
    // Of accesses the lines have all; instructions whose line is unknown are not among them.
    let summed = lines::totals(&record.lines);
    let accesses = COUNTERS.iter().filter(|(name, _)| name.starts_with("shared_") || name.starts_with("global_"));
    for (name, sum) in accesses.filter_map(|(name, _)| Some((*name, *summed.get(name)?))) {
        record.counters.entry(name.into()).or_insert(sum as f64);
    }
    let tensor: Vec<f64> = tensor(record.architecture()).iter().filter_map(|metric| record.metric(metric)).collect();
    if !tensor.is_empty() {
        record.counters.insert("tensor_instructions".into(), tensor.iter().sum());
    }
    record.traffic = of(&TRAFFIC, record);
    let limit_blocks = of(&LIMITS, record);
    let least = limit_blocks.values().copied().fold(f64::INFINITY, f64::min);
    let limiters = limit_blocks.iter().filter(|(_, blocks)| **blocks == least).map(|(name, _)| name.clone());
    record.occupancy.limiters = limiters.collect();
    record.occupancy.limit_blocks = limit_blocks;
    record.occupancy.theoretical_pct = record.metric("sm__maximum_warps_per_active_cycle_pct");
    record.occupancy.achieved_pct = record.metric("sm__warps_active.avg.pct_of_peak_sustained_active");
    record.occupancy.registers = record.metric("launch__registers_per_thread");
    record.occupancy.shared_bytes = record.metric("launch__shared_mem_per_block");
    if let Some(latency) = record.metric(LATENCY).filter(|latency| *latency > 0.0) {
        let share = |reason: &&str| Some(((**reason).to_owned(), record.metric(&stall(reason))? / latency));
        record.stalls = STALLS.iter().filter_map(share).collect();
    }
    if record.source == "ncu" {
        record.profiled_time_ms = record.metric("gpu__time_duration.sum").map(|nanoseconds| nanoseconds / 1e6);
    }
}
