//! Why a changed kernel means the same.

use std::fmt;

use ptx::{Instruction, Kernel, Modifier};

use super::blame::Blamer;
use super::mutation::{Change, Mutation, Role};

/// Why a mutation changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// By the code: a wait or commit that no copy or product of its kind comes before.
    NothingPending,
    /// By the code: it moved past an access that it does not order.
    Unrelated,
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
            Self::NeverMet => "what it orders never meets",
        })
    }
}

/// The reason for which a mutation whose runs were all right and without a hazard changes nothing, if there is one. `passed` is the
/// access that a moved instruction moved past.
pub(super) fn reason(
    kernel: &Kernel,
    blamer: &Blamer<'_>,
    mutation: &Mutation,
    passed: Option<&Instruction>,
) -> Option<Reason> {
    let role = mutation.role;
    let pending: Option<fn(&Instruction) -> bool> = match role {
        Role::CopyCommit | Role::CopyWait => Some(|copy| Role::of(copy) == Some(Role::CopyAsync)),
        Role::BulkCommit | Role::BulkWait => Some(|copy| copy.has(Modifier::BulkGroup)),
        Role::WgmmaCommit | Role::WgmmaWait => Some(|product| product.has(Modifier::MmaAsync)),
        _ => None,
    };
    if let Some(starts) = pending {
        let mut before = kernel.instructions().enumerate().filter(|(_, instruction)| starts(instruction));
        if !before.any(|(at, _)| blamer.follows(at, mutation.position)) {
            return Some(Reason::NothingPending);
        }
    }
    let moved = matches!(mutation.change, Change::Later | Change::Earlier);
    if let Some(passed) = passed.filter(|_| moved)
        && !orders(role, passed)
    {
        return Some(Reason::Unrelated);
    }
    let watched = matches!(
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
