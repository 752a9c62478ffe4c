//! Whether what a kernel does may depend on which of its threads are faster.
//!
//! Where threads synchronise in ways alone whose outcome does not depend on the schedule, one execution in which no two conflicting
//! accesses are unordered stands for all: each thread then reads what it read, whatever the schedule, goes the same way, and so
//! synchronises the same (Netzer and Miller, "What are race conditions?", 1992). The
//! emulator orders accesses by vector clocks, asynchronous copies and products among them, and says whether it compared all
//! ([`emulator::Report::races_complete`]). What a `cp.async` writes counts at its start in an eager run, at its wait in a lazy one, and
//! is watched in between, so that both are asked.
//!
//! Barriers of threads, warps and clusters, groups of copies and products, and mbarriers synchronise in that way: of an mbarrier's
//! phases the emulator reports one that may end before another warp has seen the one before. Of atomics on global memory it says
//! whether any met another that nothing else orders. Other atomics, strong loads and stores, clocks, other grids, and tests of an
//! mbarrier that the kernel does not repeat until they hold do not.

use ptx::{Cfg, Instruction, Kernel, Modifier, Opcode, Operand, Special};

use super::mutation::Role;

/// Whether nothing in a kernel depends on which thread is faster, as long as its accesses are ordered.
pub(super) fn is_determinate(kernel: &Kernel) -> bool {
    let instructions: Vec<_> = kernel.instructions().collect();
    let cfg = Cfg::of(kernel);
    let is_wait = |at: usize| Role::of(instructions[at]) == Some(Role::MbarrierWait);
    // Of atomics on global memory the run says whether they were ordered.
    let watched = |instruction: &Instruction| {
        matches!(instruction.opcode(), Opcode::Atom | Opcode::Red) && instruction.has(Modifier::Global)
    };
    !emulator::hands_on(kernel).into_iter().zip(&instructions).any(|(hands_on, at)| hands_on && !watched(at))
        && instructions.iter().all(|instruction| !depends_on_speed(instruction))
        && (0..instructions.len()).filter(|&at| is_wait(at)).all(|at| is_repeated(&instructions, &cfg, at))
}

fn depends_on_speed(instruction: &Instruction) -> bool {
    use Special::{Clock, Clock64, ClockHi, Globaltimer, GlobaltimerHi, GlobaltimerLo};
    let is_clock = |operand: &Operand| {
        matches!(operand, Operand::Special(Clock | ClockHi | Clock64 | Globaltimer | GlobaltimerHi | GlobaltimerLo))
    };
    matches!(instruction.opcode(), Opcode::Griddepcontrol | Opcode::Tcgen05)
        || instruction.operands().iter().any(is_clock)
}

/// Instructions between two tests of an mbarrier at most.
const ROUND: usize = 16;

/// Whether the test of an mbarrier is repeated until it holds, with nothing between that touches memory.
fn is_repeated(instructions: &[&Instruction], cfg: &Cfg, wait: usize) -> bool {
    let Some(branch) = instructions.get(wait + 1).filter(|next| next.opcode() == Opcode::Bra) else { return false };
    let complete = match instructions[wait].operands().first() {
        Some(Operand::Register(register)) => *register,
        _ => return false,
    };
    let target = |branch: &Instruction| match branch.operands() {
        [Operand::Label(label)] => cfg.label_positions.get(label.0 as usize).copied(),
        _ => None,
    };
    let mut at = match branch.guard {
        Some(guard) if guard.predicate == complete && guard.negated => target(branch),
        Some(guard) if guard.predicate == complete => Some(wait + 2),
        _ => None,
    };
    for _ in 0..ROUND {
        let Some(instruction) = at.and_then(|at| instructions.get(at)) else { return false };
        let touches = |operand: &Operand| matches!(operand, Operand::Memory(_) | Operand::Tensor(..));
        at = match instruction.opcode() {
            _ if at == Some(wait) => return true,
            Opcode::Bra if instruction.guard.is_none() => target(instruction),
            Opcode::Nanosleep => at.map(|at| at + 1),
            _ if instruction.ends_block() || Role::of(instruction).is_some() => None,
            _ if instruction.operands().iter().any(touches) => None,
            _ => at.map(|at| at + 1),
        };
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn determinate(body: &str) -> bool {
        let text = format!(
            ".version 8.0
            .target sm_90
            .address_size 64
            .visible .entry k(.param .u64 x)
            {{
                .reg .pred %p;
                .reg .b32 %r<4>, %bar;
                .reg .b64 %d<4>;
                ld.param.u64 %d0, [x];
                {body}
                ret;
            }}"
        );
        is_determinate(&ptx::parse(&text).unwrap().remove(0))
    }

    #[test]
    fn a_test_that_is_repeated_until_it_holds_is_a_wait() {
        let wait = "mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;";
        assert!(determinate(&format!("again: {wait} @!%p bra again;")));
        assert!(determinate(&format!("again: {wait} @%p bra done; nanosleep.u32 20; bra again; done:")));
        assert!(!determinate(&format!("{wait} @!%p bra other; mov.u32 %r0, 1; other:")));
        assert!(!determinate(&format!(
            "again: {wait} @%p bra done; add.u32 %r0, %r0, 1; st.global.u32 [%d0], %r0; bra again; done:"
        )));
        assert!(!determinate(&format!("{wait} selp.u32 %r0, 1, 0, %p;")));
    }

    #[test]
    fn atomics_on_shared_memory_clocks_and_flags_depend_on_speed() {
        assert!(determinate("red.relaxed.gpu.global.add.u32 [%d0], 1;"));
        assert!(!determinate("ld.acquire.gpu.global.u32 %r0, [%d0];"));
        assert!(!determinate("atom.shared.add.u32 %r0, [%bar], 1; st.global.u32 [%d0+4], %r0;"));
        assert!(determinate("ld.global.u32 %r0, [%d0]; bar.sync 0; st.global.u32 [%d0], %r0;"));
        assert!(determinate("atom.global.add.u32 %r0, [%d0], 1;"));
        assert!(determinate("atom.global.add.u32 %r0, [%d0], 1; st.global.u32 [%d0+4], %r0;"));
        assert!(!determinate("ld.volatile.global.u32 %r0, [%d0];"));
        assert!(!determinate("mov.u32 %r0, %clock;"));
    }
}
