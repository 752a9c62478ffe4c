//! Why a changed kernel means the same.

use std::fmt;

use ptx::Kernel;

use super::mutation::{Mutation, Role};

/// Why a mutation changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A barrier that orders no two accesses of which one writes: no schedule shows a race without it.
    NoConflict,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoConflict => "it orders no conflicting accesses",
        })
    }
}

pub(super) struct Equivalence<'a> {
    _kernel: &'a Kernel,
}

impl<'a> Equivalence<'a> {
    pub(super) fn of(kernel: &'a Kernel) -> Self {
        Self { _kernel: kernel }
    }

    pub(super) fn reason(&self, mutation: &Mutation) -> Option<Reason> {
        matches!(mutation.role, Role::Barrier | Role::ClusterBarrier).then_some(Reason::NoConflict)
    }
}
