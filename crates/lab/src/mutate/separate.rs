//! What a barrier of all threads separates, told from the code alone.
//!
//! Without the barrier, what threads do between the barriers around it is no longer ordered; all else is ordered as before. So
//! where nothing before it (since the last such barriers) conflicts with anything after it (until the next), it orders nothing.
//! What an asynchronous operation does has not happened when a barrier after its start is passed, but when its wait has been: it
//! counts where it is waited for, and where it starts as what comes after a barrier.

use ptx::{Address, Cfg, Instruction, Kernel, Modifier, Opcode, Operand, TensorMap};

use super::mutation::Role;
use super::values::{Buffers, Region, Values};

/// What an instruction does that other threads may notice.
#[derive(Clone, Debug)]
enum Touch {
    Shared {
        writes: bool,
        engine: bool,
        at: Option<Region>,
    },
    Global {
        writes: bool,
        from: Buffers,
    },
    /// An arrival on an mbarrier, with or without bytes announced.
    Arrival(Option<Region>),
    /// The bytes of a copy arrive on an mbarrier.
    Complete(Option<Region>),
    /// Any other operation on an mbarrier.
    Mbarrier(Option<Region>),
    /// An mbarrier begins or ends to be one.
    Born(Option<Region>),
    Dies(Option<Region>),
    ProxyFence,
}

/// What an instruction has done when it is passed, and what may come of it afterwards.
#[derive(Default)]
struct Effects {
    done: Vec<Touch>,
    begun: Vec<Touch>,
}

pub(super) struct Separation<'a> {
    instructions: Vec<&'a Instruction>,
    next: Vec<Vec<usize>>,
    last: Vec<Vec<usize>>,
    pub(super) values: Values<'a>,
    /// By instruction; `None` where it is not known.
    effects: Vec<Option<Effects>>,
}

/// Whether an instruction is the barrier that all threads of the CTA wait at.
fn is_barrier(instruction: &Instruction) -> bool {
    Role::of(instruction) == Some(Role::Barrier)
        && instruction.has(Modifier::Sync)
        && instruction.guard.is_none()
        && instruction.operands() == [Operand::Integer(0)]
}

/// Whether an instruction is a barrier of all lanes of a warp.
fn is_warp_barrier(instruction: &Instruction) -> bool {
    Role::of(instruction) == Some(Role::WarpBarrier)
        && instruction.guard.is_none()
        && matches!(instruction.operands(), [Operand::Integer(-1 | 0xffff_ffff)])
}

impl Touch {
    /// Whether others may learn by it what was before.
    fn hands_on(&self) -> bool {
        !matches!(self, Self::Shared { engine: false, .. } | Self::Global { .. })
    }

    /// Whether it makes no difference which of the two is first. The phase does not end before the arrival, in whatever order it and
    /// the bytes come.
    fn commutes(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Arrival(_), Self::Complete(_)))
    }
}

impl<'a> Separation<'a> {
    pub(super) fn of(kernel: &'a Kernel) -> Self {
        let instructions: Vec<_> = kernel.instructions().collect();
        let cfg = Cfg::of(kernel);
        let (mut next, mut last) = (vec![Vec::new(); instructions.len()], vec![Vec::new(); instructions.len()]);
        for block in &cfg.blocks {
            for at in block.instructions.clone() {
                if at + 1 < block.instructions.end {
                    next[at].push(at + 1);
                } else {
                    next[at].extend(block.successors.iter().map(|&to| cfg.blocks[to].instructions.start));
                }
            }
        }
        for (from, to) in next.iter().enumerate().flat_map(|(from, to)| to.iter().map(move |&to| (from, to))) {
            last[to].push(from);
        }
        let mut separation = Self { instructions, next, last, values: Values::of(kernel), effects: Vec::new() };
        separation.effects =
            separation.instructions.iter().map(|instruction| separation.effects_of(instruction)).collect();
        separation
    }

    /// Whether the barrier at a position, of all threads of the CTA or of a warp, orders nothing; or, where it has moved past one
    /// instruction, not that against the others.
    pub(super) fn orders_nothing(&self, barrier: usize, passed: Option<(usize, bool)>) -> bool {
        let of_cluster = |instruction: &&Instruction| {
            Role::of(instruction) == Some(Role::ClusterBarrier) || instruction.opcode() == Opcode::Mapa
        };
        let Some(&instruction) = self.instructions.get(barrier) else { return false };
        let of_warp = is_warp_barrier(instruction);
        if !of_warp && !is_barrier(instruction) || self.instructions.iter().any(of_cluster) {
            return false;
        }
        let ends = |at: usize| {
            let other = self.instructions[at];
            at != barrier && (is_barrier(other) || of_warp && is_warp_barrier(other))
        };
        let (before, after) = match passed {
            None => (reach(barrier, &self.last, ends), reach(barrier, &self.next, ends)),
            Some((past, true)) => (reach(barrier, &self.last, ends), vec![past]),
            Some((past, false)) => (vec![past], reach(barrier, &self.next, ends)),
        };
        // Whoever did what came before it passes a fence right behind it too.
        let fences = |at: usize| {
            let mut between = barrier..at;
            self.instructions[at].guard.is_none()
                && Role::of(self.instructions[at]) == Some(Role::ProxyFence)
                && at > barrier
                && between.all(|from| self.next[from] == [from + 1])
        };
        let known = |&at: &usize| Some((at, self.effects[at].as_ref()?));
        let before: Option<Vec<_>> = before.iter().map(known).collect();
        let after: Option<Vec<_>> = after.iter().filter(|&&at| !fences(at)).map(known).collect();
        let (Some(before), Some(after)) = (before, after) else { return false };
        before.iter().all(|&(x, done)| {
            after.iter().all(|&(y, begun)| {
                let alone = self.values.thread(self.instructions[x]);
                let one = alone.is_some() && alone == self.values.thread(self.instructions[y]);
                let meet = |done: &Touch, begun: &Touch| {
                    // What a lane hands to other warps is what its warp did before.
                    self.conflict(done, begun) || of_warp && begun.hands_on() && !done.commutes(begun)
                };
                one || !done.done.iter().any(|done| begun.begun.iter().any(|begun| meet(done, begun)))
            })
        })
    }

    /// Whether an `mbarrier.init` is one of two of the same mbarrier with no use of it in between: the one has done what the other
    /// does.
    pub(super) fn is_repeated(&self, position: usize) -> bool {
        let Some(&init) = self.instructions.get(position) else { return false };
        let harmless = |&at: &usize| {
            let other = self.instructions[at];
            let mut changes = false;
            other.for_each_def(|register| {
                init.for_each_use(|used| changes |= used == register);
            });
            let silent = match Role::of(other) {
                None => {
                    self.effects[at].as_ref().is_some_and(|effects| effects.done.is_empty() && effects.begun.is_empty())
                }
                role => matches!(role, Some(Role::MbarrierInit | Role::Barrier)),
            };
            let straight = self.next[at] == [at + 1] && self.last[at + 1] == [at];
            !changes && straight && silent
        };
        let same = |at: usize| {
            let other = self.instructions[at];
            Role::of(other) == Role::of(init) && other.guard == init.guard && other.operands() == init.operands()
        };
        let behind = (position..self.instructions.len()).take_while(harmless).any(|at| at != position && same(at));
        behind || (0..position).rev().take_while(harmless).any(same)
    }

    /// Whether one of the operations that a wait or commit at a position is for may come before it, and none that waits for all.
    pub(super) fn is_pending(&self, position: usize, starts: fn(&Instruction) -> bool) -> bool {
        let Some(role) = self.instructions.get(position).and_then(|instruction| Role::of(instruction)) else {
            return true;
        };
        let wait = match role {
            Role::CopyCommit => Role::CopyWait,
            Role::BulkCommit => Role::BulkWait,
            Role::WgmmaCommit => Role::WgmmaWait,
            wait => wait,
        };
        // A wait for bulk copies may be for less than their end.
        let mut waits = self.instructions.iter().filter(|instruction| Role::of(instruction) == Some(wait));
        let first = waits.next().map(|wait| wait.has(Modifier::Read));
        let alike = waits.all(|wait| Some(wait.has(Modifier::Read)) == first);
        let ends = |at: usize| {
            let instruction = self.instructions[at];
            let for_all = matches!(instruction.operands(), [] | [Operand::Integer(0)]);
            alike && Role::of(instruction) == Some(wait) && instruction.guard.is_none() && for_all
        };
        reach(position, &self.last, ends).into_iter().any(|at| starts(self.instructions[at]))
    }

    fn conflict(&self, done: &Touch, begun: &Touch) -> bool {
        use Touch::{Arrival, Born, Complete, Dies, Global, Mbarrier, ProxyFence, Shared};
        let meet = |a: &Option<Region>, b: &Option<Region>| self.values.meet(*a, *b);
        match (done, begun) {
            (Shared { writes: a, at, .. }, Shared { writes: b, at: other, .. }) => (*a || *b) && meet(at, other),
            (Global { writes: a, from }, Global { writes: b, from: other }) => {
                let common = from.as_ref().zip(other.as_ref()).is_none_or(|(from, other)| !from.is_disjoint(other));
                (*a || *b) && common
            }
            // Nothing else may touch an mbarrier while it is one (PTX ISA 9.7.13.15.1).
            (Shared { .. }, Arrival(_) | Complete(_) | Mbarrier(_) | Dies(_)) => false,
            (Arrival(_) | Complete(_) | Mbarrier(_) | Born(_), Shared { .. }) => false,
            (Shared { at, .. }, Born(other)) | (Dies(at), Shared { at: other, .. }) => meet(at, other),
            (Arrival(_), Complete(_)) if done.commutes(begun) => false,
            (
                Arrival(at) | Complete(at) | Mbarrier(at) | Born(at) | Dies(at),
                Arrival(other) | Complete(other) | Mbarrier(other) | Born(other) | Dies(other),
            ) => meet(at, other),
            (ProxyFence, Shared { engine, .. }) => *engine,
            (Shared { writes, .. }, ProxyFence) => *writes,
            (Born(_) | Dies(_), ProxyFence) | (ProxyFence, Born(_) | Dies(_)) => true,
            (Global { .. }, _) | (_, Global { .. }) | (ProxyFence, _) | (_, ProxyFence) => false,
        }
    }

    fn effects_of(&self, instruction: &Instruction) -> Option<Effects> {
        let has = |modifier| instruction.has(modifier);
        let mut addresses = instruction.operands().iter().filter_map(|operand| match operand {
            Operand::Memory(address) => Some(address),
            _ => None,
        });
        let address = addresses.next();
        let region = |bytes: u32| address.and_then(|address: &Address| self.values.region(address, bytes));
        let both = |touch: Touch| Some(Effects { done: vec![touch.clone()], begun: vec![touch] });
        let done = |done: Vec<Touch>| Some(Effects { done, ..Effects::default() });
        let begun = |begun: Vec<Touch>| Some(Effects { begun, ..Effects::default() });
        let nothing = || Some(Effects::default());
        let shared = |writes, engine| Touch::Shared { writes, engine, at: None };
        let global = |writes| Touch::Global { writes, from: None };
        let is_shared = has(Modifier::Shared) || has(Modifier::SharedCta);
        let ordered = [Modifier::Volatile, Modifier::Relaxed, Modifier::Acquire, Modifier::Release, Modifier::Mmio];
        match Role::of(instruction) {
            Some(Role::CopyAsync) => {
                let bytes = match instruction.operands().get(2) {
                    Some(Operand::Integer(bytes)) => *bytes as u32,
                    _ => 16,
                };
                let write = Touch::Shared { writes: true, engine: false, at: region(bytes) };
                begun(vec![write, global(false)])
            }
            Some(Role::CopyWait) => done(vec![shared(true, false)]),
            Some(Role::CopyCommit | Role::BulkCommit | Role::WgmmaCommit | Role::WgmmaFence | Role::WarpBarrier) => {
                nothing()
            }
            Some(Role::BulkCopy) if has(Modifier::CompleteTxBytes) => {
                begun(vec![shared(true, true), Touch::Complete(None), global(false)])
            }
            Some(Role::BulkCopy) => begun(vec![shared(false, true), global(true)]),
            Some(Role::BulkWait) => done(vec![shared(false, false), global(true)]),
            Some(Role::WgmmaWait) => done(vec![shared(false, false)]),
            Some(Role::MbarrierInit) => both(Touch::Born(region(8))),
            Some(Role::MbarrierArrive) if instruction.opcode() == Opcode::Mbarrier => both(Touch::Arrival(region(8))),
            // The bytes of the copies that it waits for arrive too.
            Some(Role::MbarrierWait) => {
                let wait = Touch::Mbarrier(region(8));
                Some(Effects { done: vec![wait.clone(), shared(true, false)], begun: vec![wait] })
            }
            Some(Role::MbarrierArrive | Role::MbarrierExpect) if has(Modifier::Arrive) && has(Modifier::ExpectTx) => {
                both(Touch::Arrival(region(8)))
            }
            Some(Role::MbarrierExpect) => both(Touch::Mbarrier(region(8))),
            Some(Role::ProxyFence) if has(Modifier::Async) => both(Touch::ProxyFence),
            Some(Role::MapFence) => both(Touch::Global { writes: true, from: self.values.buffers(address?) }),
            Some(Role::Barrier) if is_barrier(instruction) => nothing(),
            Some(_) => None,
            None => match instruction.opcode() {
                Opcode::Mbarrier if has(Modifier::Inval) => both(Touch::Dies(region(8))),
                Opcode::Wgmma => begun(vec![shared(false, true)]),
                Opcode::Ld | Opcode::St if ordered.into_iter().any(has) => None,
                Opcode::Ld | Opcode::St if is_shared => {
                    let bytes = instruction.ty()?.bytes() * instruction.vector_length() as u32;
                    let writes = instruction.opcode() == Opcode::St;
                    both(Touch::Shared { writes, engine: false, at: region(bytes) })
                }
                Opcode::Ldmatrix | Opcode::Stmatrix => {
                    let writes = instruction.opcode() == Opcode::Stmatrix;
                    both(Touch::Shared { writes, engine: false, at: region(16) })
                }
                Opcode::Ld if has(Modifier::Nc) => nothing(),
                Opcode::Ld | Opcode::St if has(Modifier::Global) => {
                    let writes = instruction.opcode() == Opcode::St;
                    both(Touch::Global { writes, from: self.values.buffers(address?) })
                }
                // Where no thread fences, others learn by a relaxed atomic of what it does itself alone.
                Opcode::Atom | Opcode::Red if has(Modifier::Global) && !ordered[2..].iter().any(|&m| has(m)) => {
                    let fences = |other: &&Instruction| Role::of(other) == Some(Role::Fence);
                    let alone =
                        !has(Modifier::AcqRel) && !has(Modifier::Async) && !self.instructions.iter().any(fences);
                    if alone { both(Touch::Global { writes: true, from: self.values.buffers(address?) }) } else { None }
                }
                Opcode::Ld | Opcode::St if [Modifier::Param, Modifier::Const, Modifier::Local].into_iter().any(has) => {
                    nothing()
                }
                Opcode::Prefetch => nothing(),
                Opcode::Tensormap if has(Modifier::CpFenceproxy) => {
                    let at = self.values.region(addresses.next()?, TensorMap::BYTES as u32);
                    let touches = vec![
                        Touch::Shared { writes: false, engine: false, at },
                        Touch::Global { writes: true, from: self.values.buffers(address?) },
                    ];
                    Some(Effects { done: touches.clone(), begun: touches })
                }
                Opcode::Tensormap if is_shared => {
                    let at = region(TensorMap::BYTES as u32);
                    both(Touch::Shared { writes: true, engine: false, at })
                }
                Opcode::Call | Opcode::Griddepcontrol | Opcode::Tcgen05 => None,
                _ if address.is_some() => None,
                _ if instruction.operands().iter().any(|operand| matches!(operand, Operand::Tensor(..))) => None,
                _ => nothing(),
            },
        }
    }
}

/// The instructions that are reached from one without passing an end.
fn reach(from: usize, ways: &[Vec<usize>], ends: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut reached = vec![false; ways.len()];
    let mut open = ways[from].clone();
    let mut found = Vec::new();
    while let Some(at) = open.pop() {
        if std::mem::replace(&mut reached[at], true) || ends(at) {
            continue;
        }
        open.extend(&ways[at]);
        found.push(at);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each barrier of a body, whether it orders nothing. `%a` is a thread's word of `s`, `%p` holds for thread 0 alone.
    fn idle(body: &str) -> Vec<bool> {
        let text = format!(
            ".version 8.0
            .target sm_90a
            .address_size 64
            .visible .entry k(.param .u64 x, .param .u64 y)
            .reqntid 128
            {{
                .reg .pred %p, %q;
                .reg .b32 %t, %a, %r<8>, %s;
                .reg .b64 %x, %y, %d<8>;
                .shared .align 16 .b8 s[4096];
                ld.param.u64 %x, [x];
                ld.param.u64 %y, [y];
                mov.u32 %t, %tid.x;
                mov.u32 %s, s;
                shl.b32 %r0, %t, 2;
                add.u32 %a, %s, %r0;
                mul.wide.u32 %d0, %t, 4;
                add.u64 %d1, %x, %d0;
                add.u64 %d2, %y, %d0;
                setp.eq.u32 %p, %t, 0;
                {body}
                ret;
            }}"
        );
        let kernel = ptx::parse(&text).unwrap().remove(0);
        let separation = Separation::of(&kernel);
        let barriers = kernel.instructions().enumerate().filter(|(_, instruction)| is_barrier(instruction));
        barriers.map(|(at, _)| separation.orders_nothing(at, None)).collect()
    }

    #[test]
    fn of_two_barriers_one_is_idle() {
        assert_eq!(idle("st.shared.u32 [%a], %t; bar.sync 0; bar.sync 0; ld.shared.u32 %r1, [%s];"), [true, true]);
        assert_eq!(idle("st.shared.u32 [%a], %t; bar.sync 0; ld.shared.u32 %r1, [%s];"), [false]);
        assert_eq!(idle("ld.shared.u32 %r1, [%s]; bar.sync 0; ld.shared.u32 %r1, [%s];"), [true]);
    }

    #[test]
    fn places_that_are_told_apart_do_not_meet() {
        assert_eq!(idle("st.shared.u32 [%a], %t; bar.sync 0; ld.shared.u32 %r1, [%s+512];"), [true]);
        assert_eq!(idle("st.shared.u32 [%a], %t; bar.sync 0; ld.shared.u32 %r1, [%s+508];"), [false]);
        assert_eq!(idle("st.global.u32 [%d1], %t; bar.sync 0; ld.global.u32 %r1, [%d2];"), [true]);
        assert_eq!(idle("st.global.u32 [%d1], %t; bar.sync 0; ld.global.u32 %r1, [%x];"), [false]);
    }

    #[test]
    fn a_loop_leads_back() {
        let round = "again: ld.shared.u32 %r1, [%s]; st.shared.u32 [%a+512], %t; bar.sync 0; st.shared.u32 [%a], %t;";
        assert_eq!(idle(&format!("{round} setp.lt.u32 %q, %r1, 9; @%q bra again;")), [false]);
    }

    #[test]
    fn one_thread_needs_no_barrier_for_itself() {
        let init = "@%p mbarrier.init.shared.b64 [%s], 1; bar.sync 0;";
        assert_eq!(idle(&format!("{init} @%p mbarrier.inval.shared.b64 [%s];")), [true]);
        assert_eq!(idle(&format!("{init} mbarrier.inval.shared.b64 [%s];")), [false]);
        assert_eq!(idle(&format!("{init} mbarrier.arrive.shared.b64 %d3, [%s];")), [false]);
        assert_eq!(idle(&format!("{init} mbarrier.arrive.shared.b64 %d3, [%s+8];")), [true]);
    }

    #[test]
    fn a_relaxed_atomic_hands_on_nothing_where_nobody_fences() {
        let body = "st.shared.u32 [%a], %t; bar.sync 0; atom.global.add.u32 %r1, [%d1], 1;";
        assert_eq!(idle(body), [true]);
        assert_eq!(idle(&format!("{body} membar.gl;")), [false]);
        assert_eq!(idle("st.global.u32 [%d1], %t; bar.sync 0; atom.global.add.u32 %r1, [%x], 1;"), [false]);
        assert_eq!(idle("st.shared.u32 [%a], %t; bar.sync 0; red.release.gpu.global.add.u32 [%d1], 1;"), [false]);
    }

    #[test]
    fn a_copy_has_happened_where_it_is_waited_for() {
        let copy = "cp.async.ca.shared.global [%a], [%d1], 4; bar.sync 0; cp.async.wait_all; bar.sync 0;";
        assert_eq!(idle(&format!("{copy} ld.shared.u32 %r1, [%s];")), [true, false]);
    }
}
