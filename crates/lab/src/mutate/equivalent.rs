//! Why a changed kernel means the same.

use std::fmt;

use ptx::{Instruction, Kernel, Modifier, Opcode, Operand, TensorMap};

use super::mutation::{Change, Mutation, Role};
use super::separate::Separation;

/// Why a mutation changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// By the code: a wait or commit that no copy or product of its kind comes before.
    NothingPending,
    /// By the code: it moved past an access that it does not order.
    Unrelated,
    /// By the code: a barrier with nothing that conflicts on its two sides, up to the barriers around it.
    NothingSeparated,
    /// By the code: an `mbarrier.init` that another repeats.
    Repeated,
    /// By the code: a `fence.mbarrier_init` (PTX ISA, `membar`: it releases `mbarrier.init` alone) where whatever others could learn
    /// of the mbarrier by releases all.
    Released,
    /// By the order: whatever the schedule, the launch does the same. Nothing in it depends on which thread is faster (see
    /// `order.rs`), and no two accesses that conflict are unordered.
    Ordered,
    /// By the runs: no run reads the bytes that it does not copy any more.
    NotRead,
    /// By the runs: what it orders never met. No schedule has a race without the barrier; no copy's bytes are touched before it
    /// is waited for even when all complete as late as they may; no register or byte that a product or an engine uses is touched
    /// where it must not be.
    NeverMet,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NothingPending => "nothing it waits for can come before it",
            Self::Unrelated => "it moved past an access that it does not order",
            Self::NothingSeparated => "nothing conflicts between the barriers around it",
            Self::Repeated => "another does the same",
            Self::Released => "all that follows releases what it does",
            Self::Ordered => "all that conflicts is ordered without it",
            Self::NotRead => "the bytes that it does not copy are never read",
            Self::NeverMet => "what it orders never meets",
        })
    }
}

impl Reason {
    /// Whether the runs show it, and not the code.
    pub const fn is_by_runs(self) -> bool {
        matches!(self, Self::NotRead | Self::NeverMet)
    }
}

/// The reason in the code for which a mutation whose runs were all right and without a hazard changes nothing, if there is one.
/// `passed` is the access that a moved instruction moved past.
pub(super) fn by_code(
    kernel: &Kernel,
    separation: &Separation<'_>,
    mutation: &Mutation,
    passed: Option<usize>,
) -> Option<Reason> {
    let role = mutation.role;
    let way = passed.map(|at| (at, mutation.change == Change::Later));
    if matches!(role, Role::Barrier | Role::WarpBarrier) && separation.orders_nothing(mutation.position, way) {
        return Some(Reason::NothingSeparated);
    }
    if role == Role::MbarrierInit && separation.is_repeated(mutation.position) {
        return Some(Reason::Repeated);
    }
    // What is relaxed hands on what a fence before it releases.
    let relaxed = |instruction: &Instruction| {
        let modifiers = [Modifier::Relaxed, Modifier::Volatile, Modifier::Mmio];
        matches!(instruction.opcode(), Opcode::Atom | Opcode::Red) || modifiers.into_iter().any(|m| instruction.has(m))
    };
    let changed = kernel.instructions().nth(mutation.position);
    if changed.is_some_and(|fence| fence.has(Modifier::MbarrierInit)) && !kernel.instructions().any(relaxed) {
        return Some(Reason::Released);
    }
    let pending: Option<fn(&Instruction) -> bool> = match role {
        Role::CopyCommit | Role::CopyWait => Some(|copy| Role::of(copy) == Some(Role::CopyAsync)),
        Role::BulkCommit | Role::BulkWait => Some(|copy| copy.has(Modifier::BulkGroup)),
        Role::WgmmaCommit | Role::WgmmaWait => Some(|product| product.has(Modifier::MmaAsync)),
        _ => None,
    };
    if pending.is_some_and(|starts| !separation.is_pending(mutation.position, starts)) {
        return Some(Reason::NothingPending);
    }
    let moved = matches!(mutation.change, Change::Later | Change::Earlier);
    if let Some(passed) = passed.filter(|_| moved).and_then(|at| kernel.instructions().nth(at))
        && (!orders(role, passed) || changed.is_some_and(|fence| is_of_other_map(separation, fence, passed)))
    {
        return Some(Reason::Unrelated);
    }
    None
}

/// The reason in the runs.
pub(super) fn by_runs(kernel: &Kernel, mutation: &Mutation) -> Option<Reason> {
    let role = mutation.role;
    let changed = kernel.instructions().nth(mutation.position);
    let of_copies = |arrive: &Instruction| role == Role::MbarrierArrive && arrive.opcode() == Opcode::CpAsync;
    let watched = changed.is_some_and(of_copies)
        || matches!(
            role,
            Role::Barrier
                | Role::ClusterBarrier
                | Role::CopyCommit
                | Role::CopyWait
                | Role::BulkCommit
                | Role::BulkWait
                | Role::MbarrierWait
                | Role::ProxyFence
                | Role::WgmmaFence
                | Role::WgmmaCommit
                | Role::WgmmaWait
        );
    watched.then_some(Reason::NeverMet)
}

/// Whether a fence is of another tensor map than the one that an access uses.
fn is_of_other_map(separation: &Separation<'_>, fence: &Instruction, access: &Instruction) -> bool {
    let fenced = fence.operands().iter().find_map(|operand| match operand {
        Operand::Memory(address) if Role::of(fence) == Some(Role::MapFence) => Some(address),
        _ => None,
    });
    let used = access.operands().iter().find_map(|operand| match operand {
        Operand::Tensor(address, _) => Some(address),
        _ => None,
    });
    fenced.zip(used).is_some_and(|(fenced, used)| separation.values.apart(fenced, used, TensorMap::BYTES as i64))
}

/// Whether instructions of this role order an access.
fn orders(role: Role, access: &Instruction) -> bool {
    match role {
        Role::MapFence => access.has(Modifier::Tensor),
        Role::WgmmaFence | Role::WgmmaCommit => access.has(Modifier::MmaAsync),
        Role::CopyCommit => Role::of(access) == Some(Role::CopyAsync),
        Role::BulkCommit => access.has(Modifier::BulkGroup),
        _ => true,
    }
}
