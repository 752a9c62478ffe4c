//! How many registers a thread will take, as far as that can be told without the assembler.

use arch::Sm;
use ptx::{Cfg, Kernel};

use crate::allocate::allocate;
use crate::fault::RunError;

/// The assembler gives no kernel of interest fewer.
pub const LEAST_REGISTERS: u32 = 32;

/// 32-bit registers of a thread that hold something at once, at most.
///
/// # Errors
/// When the kernel is not valid or has registers that cannot be held.
pub fn live_registers(kernel: &Kernel) -> Result<u32, RunError> {
    kernel.validate()?;
    let allocated = allocate(kernel, &Cfg::of(kernel));
    let refuse = |reason| RunError::Unsupported { instruction: kernel.name.clone(), place: None, reason };
    allocated.map(|allocation| allocation.live).map_err(refuse)
}

/// The registers of a thread of which `live` are live at once, in a CTA of `threads` threads: rounded up to the unit of
/// allocation and at least [`LEAST_REGISTERS`]; as the assembler, which would rather spill, no more than let a CTA fit.
///
/// An estimate: the assembler may need some more, or fewer where it computes a value again rather than keep it.
pub fn estimate_registers(live: u32, sm: Sm, threads: u32) -> u32 {
    let limits = sm.limits();
    let fitting = limits.registers / threads.next_multiple_of(arch::WARP_THREADS).max(1) / 8 * 8;
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

    #[test]
    fn live_registers_need_no_run() {
        let text = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u64 to)\n{\n.reg .b64 %rd<2>;\n\
                    .reg .b32 %r<3>;\nld.param.u64 %rd0, [to];\nmov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n\
                    add.u32 %r2, %r0, %r1;\nst.global.u32 [%rd0], %r2;\nret;\n}\n";
        let kernels = ptx::parse(text).unwrap();
        assert_eq!(live_registers(&kernels[0]).unwrap(), 4);
    }
}
