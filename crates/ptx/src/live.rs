//! Where registers hold values.

use std::collections::HashMap;

use crate::{Cfg, Formal, Instruction, Kernel, KernelError, Register, Type};

/// 32-bit registers of a thread that hold something at once, at most.
///
/// # Errors
/// When the kernel is not valid.
pub fn live_registers(kernel: &Kernel) -> Result<u32, KernelError> {
    kernel.validate()?;
    Ok(LiveRanges::of(kernel, &Cfg::of(kernel)).most)
}

/// Live sets above this many bits are not computed: every register is then taken to live from the beginning to the end.
const LIVENESS_LIMIT: usize = 1 << 27;
/// Rounds over the graph after which liveness is given up: as many as nested loops need, and more.
const ROUNDS: usize = 64;

/// Where each register of a kernel that [`Kernel::validate`] accepts holds a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveRanges {
    /// The registers that instructions name, in the order in which they are first named.
    pub registers: Vec<Register>,
    /// For each of [`LiveRanges::registers`] the first and the last position where it holds a value somebody reads, loops
    /// included, in the order of [`Kernel::instructions`]. From 0 to `usize::MAX` for all of a graph too tangled to find out,
    /// and for what functions take and give back, which their calls write and read.
    pub ranges: Vec<(usize, usize)>,
    /// The most 32-bit registers that hold values at once, at any instruction.
    pub most: u32,
}

impl LiveRanges {
    /// The ranges in a kernel with this graph.
    pub fn of(kernel: &Kernel, cfg: &Cfg) -> Self {
        let mut ids = HashMap::new();
        let mut registers = Vec::new();
        for instruction in kernel.instructions() {
            let mut note = |register: Register| {
                ids.entry(register).or_insert_with(|| {
                    registers.push(register);
                    registers.len() - 1
                });
            };
            instruction.for_each_use(&mut note);
            instruction.for_each_def(&mut note);
        }
        let costs: Vec<_> = registers.iter().map(|&r| cost(kernel.register_type(r).unwrap_or(Type::B32))).collect();

        let small = cfg.blocks.len().saturating_mul(registers.len()) <= LIVENESS_LIMIT;
        let found = small.then(|| liveness(kernel, cfg, &ids, &costs)).flatten();
        let (mut ranges, most) = found.unwrap_or_else(|| (vec![(0, usize::MAX); registers.len()], costs.iter().sum()));

        for formal in kernel.functions.iter().flat_map(|function| function.params.iter().chain(&function.results)) {
            if let Formal::Register(register) = formal
                && let Some(&id) = ids.get(register)
            {
                ranges[id] = (0, usize::MAX);
            }
        }
        Self { registers, ranges, most }
    }
}

/// The 32-bit registers of a thread that a value takes; predicates are kept apart.
fn cost(ty: Type) -> u32 {
    if ty.bits() == 1 { 0 } else { ty.bits().div_ceil(32) }
}

/// [`LiveRanges::ranges`] and [`LiveRanges::most`]; `None` when the graph is too tangled to find out.
fn liveness(
    kernel: &Kernel,
    cfg: &Cfg,
    ids: &HashMap<Register, usize>,
    costs: &[u32],
) -> Option<(Vec<(usize, usize)>, u32)> {
    let instructions: Vec<_> = kernel.instructions().collect();
    let words = ids.len().div_ceil(64);
    let blocks = cfg.blocks.len();
    let (mut gen_, mut kill) = (vec![0u64; blocks * words], vec![0u64; blocks * words]);
    for (index, block) in cfg.blocks.iter().enumerate() {
        let at = index * words;
        for position in block.instructions.clone() {
            let instruction = instructions[position];
            instruction.for_each_use(|r| {
                let id = ids[&r];
                if kill[at + id / 64] >> (id % 64) & 1 == 0 {
                    gen_[at + id / 64] |= 1 << (id % 64);
                }
            });
            instruction.for_each_def(|r| {
                let id = ids[&r];
                // A guarded write leaves the other lanes' value in place: it reads as much as it writes.
                if instruction.guard.is_none() {
                    kill[at + id / 64] |= 1 << (id % 64);
                } else if kill[at + id / 64] >> (id % 64) & 1 == 0 {
                    gen_[at + id / 64] |= 1 << (id % 64);
                }
            });
        }
    }
    let (mut live_in, mut live_out) = (gen_.clone(), vec![0u64; blocks * words]);
    let mut changed = true;
    for _ in 0..ROUNDS {
        if !changed {
            break;
        }
        changed = false;
        for (index, block) in cfg.blocks.iter().enumerate().rev() {
            for word in 0..words {
                let at = index * words + word;
                let out = block.successors.iter().fold(live_out[at], |out, &next| out | live_in[next * words + word]);
                let into = gen_[at] | out & !kill[at];
                changed |= out != live_out[at] || into != live_in[at];
                live_out[at] = out;
                live_in[at] = into;
            }
        }
    }
    if changed {
        return None;
    }
    Some((
        ranges_of(cfg, &instructions, ids, &live_in, &live_out),
        most_live(cfg, &instructions, ids, costs, &live_out),
    ))
}

/// The first and last position where each register is live.
fn ranges_of(
    cfg: &Cfg,
    instructions: &[&Instruction],
    ids: &HashMap<Register, usize>,
    live_in: &[u64],
    live_out: &[u64],
) -> Vec<(usize, usize)> {
    let words = ids.len().div_ceil(64);
    let mut ranges = vec![(usize::MAX, 0); ids.len()];
    let mut extend = |id: usize, position: usize| {
        let range: &mut (usize, usize) = &mut ranges[id];
        range.0 = range.0.min(position);
        range.1 = range.1.max(position);
    };
    for (index, block) in cfg.blocks.iter().enumerate() {
        let (first, last) = (block.instructions.start, block.instructions.end - 1);
        for word in 0..words {
            let at = index * words + word;
            for (set, position) in [(live_in[at], first), (live_out[at], last)] {
                let mut rest = set;
                while rest != 0 {
                    extend(word * 64 + rest.trailing_zeros() as usize, position);
                    rest &= rest - 1;
                }
            }
        }
        for position in block.instructions.clone() {
            instructions[position].for_each_use(|r| extend(ids[&r], position));
            instructions[position].for_each_def(|r| extend(ids[&r], position));
        }
    }
    ranges
}

/// The most 32-bit registers that hold values at once, at any instruction.
fn most_live(
    cfg: &Cfg,
    instructions: &[&Instruction],
    ids: &HashMap<Register, usize>,
    costs: &[u32],
    live_out: &[u64],
) -> u32 {
    let words = ids.len().div_ceil(64);
    let mut most = 0;
    for (index, block) in cfg.blocks.iter().enumerate() {
        let mut live = live_out[index * words..(index + 1) * words].to_vec();
        let held = |live: &[u64], id: usize| live[id / 64] >> (id % 64) & 1 == 1;
        let mut count: u32 = (0..ids.len()).filter(|&id| held(&live, id)).map(|id| costs[id]).sum();
        for position in block.instructions.clone().rev() {
            let instruction = instructions[position];
            // What is written takes a register even if nobody reads it.
            let mut written = 0;
            instruction.for_each_def(|r| written += if held(&live, ids[&r]) { 0 } else { costs[ids[&r]] });
            most = most.max(count + written);
            if instruction.guard.is_none() {
                instruction.for_each_def(|r| {
                    let id = ids[&r];
                    if held(&live, id) {
                        live[id / 64] &= !(1 << (id % 64));
                        count -= costs[id];
                    }
                });
            }
            instruction.for_each_use(|r| {
                let id = ids[&r];
                if !held(&live, id) {
                    live[id / 64] |= 1 << (id % 64);
                    count += costs[id];
                }
            });
            most = most.max(count);
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_with_the_last_use() {
        let text = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u64 to)\n{\n.reg .b64 %rd<2>;\n\
                    .reg .b32 %r<3>;\nld.param.u64 %rd0, [to];\nmov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n\
                    add.u32 %r2, %r0, %r1;\nst.global.u32 [%rd0], %r2;\nret;\n}\n";
        let kernel = &crate::parse(text).unwrap()[0];
        let live = LiveRanges::of(kernel, &Cfg::of(kernel));
        assert_eq!(live.ranges, [(0, 4), (1, 3), (2, 3), (3, 4)]);
        assert_eq!(live_registers(kernel), Ok(4));
    }
}
