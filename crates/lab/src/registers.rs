//! How many registers a thread takes.

use emulator::Report;
use ptx::Kernel;

use crate::RegisterSource;

/// The assembler gives no kernel of interest fewer.
const LEAST: u32 = 32;

/// The registers of a thread of `kernel`.
///
/// The estimate is what is live at once; the assembler may need some more, or fewer where it computes a value again
/// rather than keep it.
pub fn registers(kernel: &Kernel, report: &Report) -> (u32, RegisterSource) {
    let most = kernel.target.sm().limits().max_registers_per_thread;
    (report.live_registers.next_multiple_of(8).clamp(LEAST, most), RegisterSource::Liveness)
}
