//! What a kernel did wrong, where.

use std::fmt;

use thiserror::Error;

/// Why a run did not finish.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RunError {
    /// The kernel is not valid.
    #[error(transparent)]
    Kernel(#[from] ptx::KernelError),
    /// The launch does not fit the kernel or the architecture.
    #[error("{0}")]
    Launch(String),
    /// The emulator does not execute this instruction.
    #[error("`{instruction}`{} is not executable yet: {reason}", Place(.place))]
    Unsupported {
        /// As PTX.
        instruction: String,
        /// File and line it came from, when known.
        place: Option<(String, u32)>,
        /// What about it is not supported.
        reason: String,
    },
    /// The kernel did something wrong.
    #[error(transparent)]
    Fault(Box<Fault>),
    /// [`Options::cancel`](crate::Options::cancel) was set.
    #[error("cancelled")]
    Cancelled,
}

impl RunError {
    /// A word for the kind of error or fault, as test files and records name it.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Kernel(_) => "kernel",
            Self::Launch(_) => "launch",
            Self::Unsupported { .. } => "unsupported",
            Self::Cancelled => "cancelled",
            Self::Fault(fault) => match fault.kind {
                FaultKind::OutOfBounds { .. } => "out_of_bounds",
                FaultKind::Misaligned { .. } => "misaligned",
                FaultKind::Uninitialised { .. } => "uninitialised",
                FaultKind::Race { .. } => "race",
                FaultKind::Deadlock { .. } => "deadlock",
                FaultKind::Budget { .. } => "budget",
                FaultKind::Divergent { .. } => "divergent",
                FaultKind::BarrierCount { .. } => "barrier_count",
                FaultKind::BarrierId { .. } => "barrier_id",
                FaultKind::NotMember { .. } => "not_member",
                FaultKind::WgmmaInFlight { .. } => "wgmma_in_flight",
                FaultKind::WgmmaFence { .. } => "wgmma_fence",
                FaultKind::WgmmaDiffers { .. } => "wgmma_differs",
                FaultKind::WgmmaOverwritten { .. } => "wgmma_overwritten",
                FaultKind::Warpgroup { .. } => "warpgroup",
                FaultKind::Descriptor { .. } => "descriptor",
                FaultKind::Trap => "trap",
            },
        }
    }
}

struct Place<'a>(&'a Option<(String, u32)>);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some((file, line)) => write!(f, " ({file}:{line})"),
            None => Ok(()),
        }
    }
}

/// Something a kernel did that a real one must not.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{kind}\n  at `{instruction}`{}, CTA ({}, {}, {}), thread {thread}", Place(.place), cta[0], cta[1], cta[2])]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The instruction's position in [`Kernel::instructions`](ptx::Kernel::instructions).
    pub position: usize,
    /// The instruction as PTX.
    pub instruction: String,
    /// File and line it came from, when known.
    pub place: Option<(String, u32)>,
    /// The CTA's index in x, y and z.
    pub cta: [u32; 3],
    /// The thread's linear index in the CTA.
    pub thread: u32,
}

/// The kinds of [`Fault`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum FaultKind {
    #[error("{bytes} bytes at {space} address {address:#x} are outside {allocations}")]
    OutOfBounds { space: &'static str, address: u64, bytes: u32, allocations: String },
    #[error("{space} address {address:#x} is not a multiple of the {bytes} bytes accessed")]
    Misaligned { space: &'static str, address: u64, bytes: u32 },
    #[error("{bytes} bytes at {space} address {address:#x} are read before anything wrote them{remedy}")]
    Uninitialised { space: &'static str, address: u64, bytes: u32, remedy: &'static str },
    #[error(
        "race on shared address {address:#x}: warps {first} and {second} access it without a barrier in between, and at least one writes; the other access is {other}"
    )]
    Race { address: u64, first: u32, second: u32, other: String },
    #[error("deadlock: nothing can run any more; {positions}")]
    Deadlock { positions: String },
    #[error("the CTA executed {budget} warp instructions without ending: taken for hung")]
    Budget { budget: u64 },
    #[error("lanes {active:#010x} reached an instruction that all of {expected:#010x} must execute together")]
    Divergent { active: u32, expected: u32 },
    #[error("barrier {id} is used with {found} threads while {expected} are expected")]
    BarrierCount { id: u32, found: u32, expected: u32 },
    #[error("barrier {id} does not exist: ids are 0 to 15")]
    BarrierId { id: u32 },
    #[error("the executing lane is not in the member mask {mask:#010x}")]
    NotMember { mask: u32 },
    #[error("register `{register}` is {access} while {wgmma}, to which it belongs, may be in flight; {remedy}")]
    WgmmaInFlight { register: String, access: &'static str, wgmma: String, remedy: &'static str },
    #[error(
        "register `{register}` was written, or no `wgmma.fence` executed at all, since the last `wgmma.fence`; execute one before the wgmma"
    )]
    WgmmaFence { register: String },
    #[error("the {what} is not the same in all threads of the warpgroup")]
    WgmmaDiffers { what: &'static str },
    #[error(
        "shared address {address:#x} is overwritten while {wgmma}, which reads it, may be in flight; every warp of its warpgroup has to wait for its group with `wgmma.wait_group`, and a barrier must follow, before"
    )]
    WgmmaOverwritten { address: u64, wgmma: String },
    #[error("all four warps {first} to {last} of a warpgroup must execute this instruction together; {others}")]
    Warpgroup { first: u32, last: u32, others: String },
    #[error("matrix {operand} has the descriptor {descriptor:#018x}: {problem}")]
    Descriptor { operand: &'static str, descriptor: u64, problem: String },
    #[error("the kernel ran into `trap`")]
    Trap,
}
