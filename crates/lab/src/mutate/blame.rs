//! Whether a fault blames what was changed.

use emulator::{Fault, FaultKind};
use ptx::{Block, Cfg, Instruction, Kernel, Modifier, Operand};

use super::mutation::Role;

/// How near to the changed instruction a fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blame {
    /// It names another place.
    Elsewhere,
    /// It names an access that the instruction orders, or a wait that lacks what the instruction does.
    Relying,
    /// It names the instruction's source line.
    Line,
}

/// What the blame of faults takes, of one kernel.
pub(super) struct Blamer<'a> {
    kernel: &'a Kernel,
    /// By block: the blocks that can be reached from its end.
    reach: Vec<Vec<bool>>,
    block_of: Vec<usize>,
    texts: Vec<String>,
    roles: Vec<Option<Role>>,
}

impl<'a> Blamer<'a> {
    pub(super) fn of(kernel: &'a Kernel) -> Self {
        let mut cfg = Cfg::of(kernel);
        // Whoever waits on an mbarrier comes behind whoever arrives; so it is at a barrier of some of the threads.
        let instructions: Vec<_> = kernel.instructions().collect();
        let having = |cfg: &Cfg, wanted: &dyn Fn(&Instruction) -> bool| {
            let has =
                |block: &Block| instructions[block.instructions.clone()].iter().any(|&instruction| wanted(instruction));
            (0..cfg.blocks.len()).filter(|&block| has(&cfg.blocks[block])).collect::<Vec<_>>()
        };
        let arrives = |instruction: &Instruction| {
            matches!(Role::of(instruction), Some(Role::MbarrierArrive | Role::MbarrierExpect | Role::BulkCopy))
        };
        let waits = |instruction: &Instruction| Role::of(instruction) == Some(Role::MbarrierWait);
        let of_some = |instruction: &Instruction| {
            Role::of(instruction) == Some(Role::Barrier) && instruction.operands().first() != Some(&Operand::Integer(0))
        };
        let goes_on = |instruction: &Instruction| of_some(instruction) && !instruction.has(Modifier::Arrive);
        let meetings =
            [(having(&cfg, &arrives), having(&cfg, &waits)), (having(&cfg, &of_some), having(&cfg, &goes_on))];
        for (arriving, waiting) in &meetings {
            for &from in arriving {
                cfg.blocks[from].successors.extend(waiting);
            }
        }
        let mut block_of = vec![0; kernel.instructions().count()];
        for (index, block) in cfg.blocks.iter().enumerate() {
            block_of[block.instructions.clone()].fill(index);
        }
        let reach = (0..cfg.blocks.len())
            .map(|from| {
                let mut reached = vec![false; cfg.blocks.len()];
                let mut open = cfg.blocks[from].successors.clone();
                while let Some(block) = open.pop() {
                    if !std::mem::replace(&mut reached[block], true) {
                        open.extend(&cfg.blocks[block].successors);
                    }
                }
                reached
            })
            .collect();
        let texts = kernel.instructions().map(|instruction| format!("`{}`", kernel.instruction_text(instruction)));
        let (texts, roles) = (texts.collect(), kernel.instructions().map(Role::of).collect());
        Self { kernel, reach, block_of, texts, roles }
    }

    fn line(&self, position: usize) -> Option<(String, u32)> {
        let instruction = self.kernel.instructions().nth(position)?;
        let location = self.kernel.user_location(instruction)?;
        Some((self.kernel.files.get(location.file as usize).cloned().unwrap_or_default(), location.line))
    }

    /// Whether one instruction may execute after another, in its thread or in one that waits for an mbarrier.
    pub(super) fn follows(&self, from: usize, to: usize) -> bool {
        let (Some(&a), Some(&b)) = (self.block_of.get(from), self.block_of.get(to)) else { return false };
        (a == b && from < to) || self.reach[a][b]
    }

    /// The instructions that a message quotes.
    fn quoted(&self, message: &str) -> impl Iterator<Item = usize> {
        self.texts.iter().enumerate().filter(move |(_, text)| message.contains(text.as_str())).map(|(at, _)| at)
    }

    /// How near a fault is to the instruction at `position` of this role; its own position is `at` in this kernel.
    pub(super) fn judge(&self, position: usize, role: Role, fault: &Fault, at: usize) -> Blame {
        let message = fault.kind.to_string();
        let line = self.line(position);
        let named = line.is_some() && (self.line(at) == line)
            || at == position
            || line.is_some_and(|(file, line)| message.contains(&format!("({file}:{line})")))
            || self.quoted(&message).any(|quoted| quoted == position);
        if named {
            return Blame::Line;
        }
        let follows = |at: usize| self.follows(position, at);
        let relying = match &fault.kind {
            // The instruction stands between the two.
            FaultKind::Race { .. } | FaultKind::GlobalRace { .. } => {
                let others: Vec<usize> = self.quoted(&message).collect();
                let between = |other: usize| {
                    (follows(at) && self.follows(other, position)) || (follows(other) && self.follows(at, position))
                };
                orders_memory(role) && (others.is_empty() && follows(at) || others.into_iter().any(between))
            }
            FaultKind::Uninitialised { .. } | FaultKind::Unwaited { .. } | FaultKind::OutOfBounds { .. } => {
                role != Role::WgmmaFence && follows(at)
            }
            FaultKind::MissingProxyFence { .. } => {
                matches!(role, Role::ProxyFence | Role::Barrier | Role::WarpBarrier | Role::MbarrierWait) && follows(at)
            }
            FaultKind::TensorMapFence { .. } => role == Role::MapFence && follows(at),
            FaultKind::WgmmaInFlight { .. } | FaultKind::WgmmaOverwritten { .. } => {
                matches!(role, Role::WgmmaCommit | Role::WgmmaWait | Role::Barrier | Role::MbarrierWait) && follows(at)
            }
            FaultKind::WgmmaFence { .. } => role == Role::WgmmaFence && follows(at),
            FaultKind::CopyAtExit { .. } | FaultKind::AccessAfterEnd { .. } | FaultKind::PeerEnded { .. } => {
                orders_memory(role) && (follows(at) || self.follows(at, position))
            }
            // Somebody waits for what the instruction does.
            FaultKind::Deadlock { .. } | FaultKind::Budget { .. } => {
                self.waits_with(role, at) || self.quoted(&message).any(|at| self.waits_with(role, at))
            }
            // An mbarrier or a barrier is used in another state than it should be in.
            FaultKind::NoMbarrier { .. }
            | FaultKind::MbarrierBusy { .. }
            | FaultKind::MbarrierPhase { .. }
            | FaultKind::MbarrierOvertaken { .. }
            | FaultKind::MbarrierOverwritten { .. }
            | FaultKind::MbarrierBytes { .. }
            | FaultKind::ArrivalCount { .. }
            | FaultKind::TransactionCount { .. }
            | FaultKind::TransactionUnderflow { .. } => is_mbarrier(role) || orders_memory(role) && follows(at),
            FaultKind::BarrierCount { .. } => role == Role::Barrier,
            FaultKind::ClusterBarrier { .. } => role == Role::ClusterBarrier,
            FaultKind::Divergent { .. } | FaultKind::Warpgroup { .. } => orders_memory(role) && follows(at),
            FaultKind::CopySize { .. } | FaultKind::CopyAlignment { .. } => role == Role::BulkCopy,
            _ => false,
        };
        if relying { Blame::Relying } else { Blame::Elsewhere }
    }

    /// Whether the instruction at a position waits for what one of this role does.
    fn waits_with(&self, role: Role, at: usize) -> bool {
        let waiting = self.roles.get(at).copied().flatten();
        match waiting {
            Some(Role::MbarrierWait) => is_mbarrier(role),
            Some(waiting) => waiting == role,
            None => false,
        }
    }
}

/// Whether an instruction of this role, or what it completes, ends waits on mbarriers.
fn is_mbarrier(role: Role) -> bool {
    matches!(
        role,
        Role::MbarrierInit | Role::MbarrierArrive | Role::MbarrierExpect | Role::MbarrierWait | Role::BulkCopy
    )
}

/// Whether an instruction of this role orders accesses to memory.
fn orders_memory(role: Role) -> bool {
    !matches!(role, Role::WgmmaFence | Role::CopyAsync | Role::MapFence)
}
