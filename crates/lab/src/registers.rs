//! How many registers a thread takes.

use emulator::Report;
use ptx::Kernel;
use serde::{Deserialize, Serialize};

use crate::ptxas::{self, Assembled, Resources};

/// Where a number of registers comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegisterSource {
    /// `ptxas` was asked.
    Ptxas,
    /// Estimated from the registers live at once.
    Liveness,
    /// The user said so.
    Given,
}

/// The registers of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// How many.
    pub count: u32,
    /// Where that comes from.
    pub source: RegisterSource,
    /// Bytes of stores to local memory because they do not suffice; 0 when estimated.
    pub spilled_bytes: u32,
}

impl Registers {
    /// What `ptxas` said.
    pub fn of(assembled: &Assembled) -> Self {
        let Resources { registers, spill_store_bytes, .. } = assembled.resources;
        Self { count: registers, source: RegisterSource::Ptxas, spilled_bytes: spill_store_bytes }
    }
}

/// The registers of a thread of `kernel` in a CTA of `threads`: what `ptxas` says where it is installed, else an estimate.
///
/// The estimate is what is live at once; the assembler may need some more, or fewer where it computes a value again
/// rather than keep it.
pub fn registers(kernel: &Kernel, report: &Report, threads: u32) -> Registers {
    match ptxas::assemble(kernel) {
        Ok(assembled) => Registers::of(&assembled),
        Err(_) => estimate(kernel, report, threads),
    }
}

/// What would be taken for the registers that a run found live at once: see [`arch::estimate_registers`].
pub fn estimate(kernel: &Kernel, report: &Report, threads: u32) -> Registers {
    let count = arch::estimate_registers(report.live_registers, kernel.target.sm(), threads);
    Registers { count, source: RegisterSource::Liveness, spilled_bytes: 0 }
}
