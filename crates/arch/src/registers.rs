//! How many registers a thread will take, as far as that can be told without the assembler.

use crate::sm::{Sm, WARP_THREADS};

/// The assembler gives no kernel of interest fewer.
pub const LEAST_REGISTERS: u32 = 32;

/// The registers of a thread of which `live` are live at once, in a CTA of `threads` threads: rounded up to the unit of
/// allocation and at least [`LEAST_REGISTERS`]; as the assembler, which would rather spill, no more than let a CTA fit.
///
/// An estimate: the assembler may need some more, or fewer where it computes a value again rather than keep it.
pub fn estimate_registers(live: u32, sm: Sm, threads: u32) -> u32 {
    let limits = sm.limits();
    let fitting = limits.registers / threads.next_multiple_of(WARP_THREADS).max(1) / 8 * 8;
    let most = limits.max_registers_per_thread.min(fitting.max(LEAST_REGISTERS));
    live.next_multiple_of(8).clamp(LEAST_REGISTERS, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_multiples_of_eight_that_fit() {
        assert_eq!(estimate_registers(1, Sm::Sm90, 128), LEAST_REGISTERS);
        assert_eq!(estimate_registers(65, Sm::Sm90, 128), 72);
        assert_eq!(estimate_registers(400, Sm::Sm90, 384), 168);
        assert_eq!(estimate_registers(u32::MAX - 8, Sm::Sm75, 128), 255);
    }
}
