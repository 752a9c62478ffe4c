//! When two accesses see the same shared memory: dominators and versions of the memory.

use std::cmp::Ordering;

use ptx::{Cfg, Instruction, Modifier, Opcode};

use super::in_shared;

/// A state of shared memory that the assembler cannot tell apart from itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Version {
    /// As the kernel found it.
    Entry,
    /// After this instruction.
    After(usize),
    /// At the start of this block, where different versions meet.
    Meet(usize),
}

/// What the control flow says about accesses.
pub(super) struct Flow {
    block_of: Vec<usize>,
    versions: Vec<Version>,
    /// The closest block that every way to a block passes, and the block's place in reverse postorder; `None` where
    /// no way leads.
    dominators: Vec<Option<(usize, usize)>>,
}

impl Flow {
    pub(super) fn of(instructions: &[&Instruction], cfg: &Cfg) -> Self {
        let mut block_of = vec![0; instructions.len()];
        let mut predecessors = vec![Vec::new(); cfg.blocks.len()];
        for (index, block) in cfg.blocks.iter().enumerate() {
            block_of[block.instructions.clone()].fill(index);
            for &next in &block.successors {
                predecessors[next].push(index);
            }
        }
        let order = reverse_postorder(cfg);
        let dominators = dominators(&order, &predecessors);

        let last_change: Vec<Option<usize>> = cfg
            .blocks
            .iter()
            .map(|block| block.instructions.clone().rev().find(|&position| changes_shared(instructions[position])))
            .collect();
        let entering = entering(&order, &predecessors, &last_change);

        let mut versions = vec![Version::Entry; instructions.len()];
        for (block, entering) in cfg.blocks.iter().zip(entering) {
            let mut version = entering;
            for position in block.instructions.clone() {
                versions[position] = version;
                if changes_shared(instructions[position]) {
                    version = Version::After(position);
                }
            }
        }
        Self { block_of, versions, dominators }
    }

    pub(super) fn block_of(&self, position: usize) -> usize {
        self.block_of[position]
    }

    /// The state of shared memory that an instruction finds.
    pub(super) fn version(&self, position: usize) -> Version {
        self.versions[position]
    }

    /// Whether every way to block `b` passes block `a`.
    pub(super) fn dominates(&self, a: usize, b: usize) -> bool {
        let (Some((_, floor)), mut block) = (self.dominators[a], b) else { return a == b };
        loop {
            match self.dominators[block] {
                _ if block == a => return true,
                Some((up, place)) if place > floor => block = up,
                _ => return false,
            }
        }
    }
}

/// Whether an access or barrier may change shared memory, or keeps loads of it in their place.
fn changes_shared(instruction: &Instruction) -> bool {
    let outside = [Modifier::Global, Modifier::Local, Modifier::Param, Modifier::ParamFunc, Modifier::Const];
    match instruction.opcode() {
        Opcode::St | Opcode::Atom | Opcode::Red => {
            in_shared(instruction) || !outside.iter().any(|&space| instruction.has(space))
        }
        Opcode::CpAsync => !instruction.has(Modifier::CommitGroup),
        Opcode::Bar | Opcode::Barrier | Opcode::Membar | Opcode::Fence | Opcode::Nanosleep => true,
        _ => has_slow_path(instruction),
    }
}

/// Whether stores to shared memory must not move past this.
pub(super) fn may_touch_shared(instruction: &Instruction) -> bool {
    let outside = [
        Modifier::Global,
        Modifier::Local,
        Modifier::Param,
        Modifier::ParamEntry,
        Modifier::ParamFunc,
        Modifier::Const,
    ];
    changes_shared(instruction)
        || (instruction.opcode() == Opcode::Ld && !outside.iter().any(|&space| instruction.has(space)))
}

/// Instructions the assembler expands into a call or branch for the rare case, which nothing is merged across.
fn has_slow_path(instruction: &Instruction) -> bool {
    let approximate = instruction.has(Modifier::Approx) || instruction.has(Modifier::Full);
    match (instruction.opcode(), instruction.ty()) {
        (Opcode::Div, Some(ty)) if ty.is_float() => !approximate,
        (Opcode::Rcp | Opcode::Sqrt, _) => !approximate,
        (Opcode::Div | Opcode::Rem, Some(ty)) => ty.bits() == 64,
        _ => false,
    }
}

fn reverse_postorder(cfg: &Cfg) -> Vec<usize> {
    let mut order = Vec::with_capacity(cfg.blocks.len());
    let mut seen = vec![false; cfg.blocks.len()];
    let mut open = Vec::new();
    if let Some(first) = seen.first_mut() {
        *first = true;
        open.push((0, 0));
    }
    while let Some((block, next)) = open.pop() {
        match cfg.blocks[block].successors.get(next) {
            Some(&successor) => {
                open.push((block, next + 1));
                if !std::mem::replace(&mut seen[successor], true) {
                    open.push((successor, 0));
                }
            }
            None => order.push(block),
        }
    }
    order.reverse();
    order
}

/// Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm": the immediate dominator of each block and its place in
/// the order.
fn dominators(order: &[usize], predecessors: &[Vec<usize>]) -> Vec<Option<(usize, usize)>> {
    let mut found: Vec<Option<(usize, usize)>> = vec![None; predecessors.len()];
    let Some((&entry, rest)) = order.split_first() else { return found };
    found[entry] = Some((entry, 0));
    let common = |found: &[Option<(usize, usize)>], mut a: usize, mut b: usize| {
        while let (Some((up_a, place_a)), Some((up_b, place_b))) = (found[a], found[b]) {
            match place_a.cmp(&place_b) {
                Ordering::Equal => break,
                Ordering::Greater => a = up_a,
                Ordering::Less => b = up_b,
            }
        }
        a
    };
    loop {
        let mut changed = false;
        for (place, &block) in rest.iter().enumerate() {
            let reached = predecessors[block].iter().copied().filter(|&p| found[p].is_some());
            let Some(above) = reached.reduce(|a, b| common(&found, a, b)) else { continue };
            let now = Some((above, place + 1));
            changed |= found[block] != now;
            found[block] = now;
        }
        if !changed {
            return found;
        }
    }
}

/// The version that enters each block: that of its predecessors where they agree. A block where versions have met once stays
/// one; every other has the version of the predecessor before it in the order, so the search ends.
fn entering(order: &[usize], predecessors: &[Vec<usize>], last_change: &[Option<usize>]) -> Vec<Version> {
    let mut entering: Vec<Option<Version>> = vec![None; predecessors.len()];
    loop {
        let mut changed = false;
        for &block in order {
            let met = Version::Meet(block);
            if entering[block] == Some(met) {
                continue;
            }
            let leaving = |&from: &usize| last_change[from].map(Version::After).or(entering[from]);
            let start = (order.first() == Some(&block)).then_some(Version::Entry);
            let now =
                predecessors[block].iter().filter_map(leaving).chain(start).reduce(|a, b| if a == b { a } else { met });
            if now != entering[block] {
                entering[block] = now;
                changed = true;
            }
        }
        if !changed {
            return entering.into_iter().enumerate().map(|(block, v)| v.unwrap_or(Version::Meet(block))).collect();
        }
    }
}
