//! How many registers a thread takes.

use emulator::Report;
use ptx::Kernel;

use crate::RegisterSource;

/// Registers that the assembler needs beside the values of the program: the stack pointer, and room to schedule in.
const ROOM: u32 = 8;

/// The registers of a thread of `kernel`.
pub fn registers(kernel: &Kernel, report: &Report) -> (u32, RegisterSource) {
    let most = kernel.target.sm().limits().max_registers_per_thread;
    let estimate = (report.live_registers + ROOM).next_multiple_of(8).min(most);
    (estimate, RegisterSource::Liveness)
}
