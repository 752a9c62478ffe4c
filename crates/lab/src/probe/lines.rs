//! What each source line costs.

use std::collections::BTreeMap;

use arch::Gpu;
use emulator::{Access, Pipe, work_by_instruction};
use serde::{Deserialize, Serialize};

use crate::evidence::{LaunchEvidence, Place};
use crate::source::Sources;

/// What one source line costs, after the merge, of the whole launch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// As the kernel names it; empty when unknown.
    pub file: String,
    /// Counted from 1; 0 when unknown.
    pub line: u32,
    /// Its text, where the file is there.
    pub text: Option<String>,
    /// Warp instructions, as the PTX has them.
    pub warp_instructions: u64,
    /// Loads of and stores to shared memory by warps.
    pub shared_requests: u64,
    /// Passes they take through the banks.
    pub wavefronts: u64,
    /// Passes that their width alone demands.
    pub wavefronts_ideal: u64,
    /// Loads of and stores to global memory by warps.
    pub global_requests: u64,
    /// Sectors they move.
    pub sectors: u64,
    /// Sectors that their bytes would fill.
    pub sectors_ideal: u64,
    /// Work by pipe, in the units of [`emulator::PipeTime::work`]; pipes without any are left out.
    pub work: BTreeMap<String, f64>,
    /// Its part of the limiting pipe's work, between 0 and 1.
    pub share: f64,
}

impl Line {
    /// Its work on a pipe.
    pub fn on(&self, pipe: Pipe) -> f64 {
        self.work.get(pipe.name()).copied().unwrap_or(0.0)
    }
}

/// Pipes whose work a line's record shows.
const SHOWN: [Pipe; 6] = [Pipe::Fma, Pipe::Half, Pipe::Alu, Pipe::Special, Pipe::Tensor, Pipe::Shared];

/// All lines, costliest first: by their part of the limiting pipe, then by instructions.
pub(super) fn lines(launch: &LaunchEvidence, gpu: &Gpu, sources: &mut Sources) -> Vec<Line> {
    let work_on = |pipe| work_by_instruction(&launch.kernel, &launch.report, gpu, pipe);
    let limiting = work_on(launch.model.limiter);
    let total: f64 = limiting.iter().sum();
    let shown = SHOWN.map(|pipe| (pipe, work_on(pipe)));
    let mut lines = BTreeMap::<Place, Line>::new();
    for (position, (instruction, counted)) in launch.instructions().enumerate() {
        let line = lines.entry(launch.place(instruction)).or_default();
        line.warp_instructions += counted.executions;
        line.wavefronts += counted.wavefronts;
        line.wavefronts_ideal += counted.wavefronts_ideal;
        line.sectors += counted.sectors;
        line.sectors_ideal += counted.sectors_ideal;
        if let Some(access) = Access::of(instruction) {
            let global = access.is_global() || matches!(access, Access::BulkLoad | Access::BulkStore);
            line.global_requests += if global { counted.requests } else { 0 };
            line.shared_requests += if access.is_shared() { counted.requests } else { 0 };
        }
        if total > 0.0 {
            line.share += limiting[position] / total;
        }
        for (pipe, work) in shown.iter().filter(|(_, work)| work[position] > 0.0) {
            *line.work.entry(pipe.name().into()).or_default() += work[position];
        }
    }
    let mut lines: Vec<Line> = lines
        .into_iter()
        .filter(|(_, line)| line.warp_instructions > 0)
        .map(|(place, line)| {
            let text = sources.line(&place).map(str::to_owned);
            Line { file: place.file, line: place.line, text, ..line }
        })
        .collect();
    lines.sort_by(|a, b| b.share.total_cmp(&a.share).then(b.warp_instructions.cmp(&a.warp_instructions)));
    lines
}
