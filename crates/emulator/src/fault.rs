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
            Self::Fault(fault) => fault.kind.name(),
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
#[error(
    "{kind}\n  at `{instruction}`{}, CTA ({}, {}, {}), thread {thread}\n  {}",
    Place(.place), cta[0], cta[1], cta[2], kind.remedy()
)]
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

macro_rules! kinds {
    ($($variant:ident $({ $($field:ident: $ty:ty),* $(,)? })?, $name:literal, $message:literal, $remedy:literal;)+) => {
        /// The kinds of [`Fault`].
        #[derive(Clone, Debug, PartialEq, Eq, Error)]
        #[allow(missing_docs, reason = "the messages say what each field is")]
        pub enum FaultKind {
            $(#[error($message)] $variant $({ $($field: $ty),* })?,)+
        }

        impl FaultKind {
            /// A word for the kind, as test files and records name it.
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$variant { .. } => $name,)+ }
            }

            /// What to change, in a sentence.
            pub const fn remedy(&self) -> &'static str {
                match self { $(Self::$variant { .. } => $remedy,)+ }
            }
        }
    };
}

// A row: the kind, its word, its message, its remedy.
kinds! {
    OutOfBounds { space: &'static str, address: u64, bytes: u32, allocations: String }, "out_of_bounds",
        "{bytes} bytes at {space} address {address:#x} are outside {allocations}",
        "Guard the access with the bounds of what is accessed, or make that larger.";
    Misaligned { space: &'static str, address: u64, bytes: u32 }, "misaligned",
        "{space} address {address:#x} is not a multiple of the {bytes} bytes accessed",
        "Align the address, or access fewer bytes at once.";
    Uninitialised { space: &'static str, address: u64, bytes: u32 }, "uninitialised",
        "{bytes} bytes at {space} address {address:#x} are read before anything wrote them",
        "Write them first; if another thread does, or a copy, wait for it before the read.";
    Unwaited { address: u64, bytes: u32, copy: String }, "unwaited",
        "{bytes} bytes at shared address {address:#x} are read before their copy was waited for; the copy is {copy}",
        "Wait for the copy (its mbarrier's phase, or its group and then a barrier) before the read.";
    StaleCopy { address: u64, bytes: u32, copy: String }, "stale_copy",
        "{bytes} bytes at shared address {address:#x} are read that an earlier copy left there, because the last one to this place is shorter; it is {copy}",
        "Copy all that is read, where the rest is not meant to stay.";
    Race { address: u64, first: String, second: String, other: String }, "race",
        "race on shared address {address:#x}: {first} and {second} access it without a barrier in between, and at least one writes; the other access is {other}",
        "Put a barrier, or an mbarrier's arrival and wait, between the two.";
    GlobalRace { address: u64, who: String, other: String }, "global_race",
        "race on global address {address:#x}: {who} accesses it too, nothing orders the two, and at least one writes; the other access is {other}",
        "Put a barrier between warps of one CTA; between CTAs use atomics, hand over by a release and an acquire of a flag, or give each bytes of its own.";
    Deadlock { positions: String }, "deadlock",
        "deadlock: nothing can run any more; {positions}",
        "See that every barrier and every mbarrier phase gets all the arrivals and bytes it expects, before somebody waits for it.";
    Budget { budget: u64 }, "budget",
        "the CTA executed {budget} warp instructions without ending: taken for hung",
        "Look for a loop that does not end, or allow more instructions.";
    Divergent { active: u32, expected: u32 }, "divergent",
        "lanes {active:#010x} reached an instruction that all of {expected:#010x} must execute together",
        "Move the instruction out of the branch that only some lanes take.";
    BarrierCount { id: u32, found: u32, expected: u32 }, "barrier_count",
        "barrier {id} is used with {found} threads while {expected} are expected",
        "Give all uses of the barrier in a round the same number of threads, a multiple of 32.";
    BarrierId { id: u32 }, "barrier_id",
        "barrier {id} does not exist: ids are 0 to 15",
        "Use one of the 16 barriers, or an mbarrier.";
    NotMember { mask: u32 }, "not_member",
        "the executing lane is not in the member mask {mask:#010x}",
        "Name every executing lane in the member mask.";
    Trap, "trap",
        "the kernel ran into `trap`",
        "The kernel itself found something wrong: see what leads there.";
    ExternalFunction { function: String }, "external_function",
        "`{function}` is called, and its code is not in the module: functions of the driver and of other modules are not executable",
        "Print and assert nothing in the kernel, or look for what makes it assert; link the code of other functions into the module.";
    WgmmaInFlight { register: String, access: &'static str, wgmma: String, remedy: &'static str }, "wgmma_in_flight",
        "register `{register}` is {access} while {wgmma}, to which it belongs, may be in flight; {remedy}",
        "Wait for the product's group (`wgmma.wait_group`) before the register is touched.";
    WgmmaFence { register: String }, "wgmma_fence",
        "register `{register}` was written, or no `wgmma.fence` executed at all, since the last `wgmma.fence`",
        "Execute `wgmma.fence` between the write and the wgmma.";
    WgmmaDiffers { what: &'static str }, "wgmma_differs",
        "the {what} is not the same in all threads of the warpgroup",
        "Compute it from values that all threads of the warpgroup share.";
    WgmmaOverwritten { address: u64, wgmma: String }, "wgmma_overwritten",
        "shared address {address:#x} is overwritten while {wgmma}, which reads it, may be in flight",
        "Let every warp of the warpgroup wait for the product's group (`wgmma.wait_group`), and a barrier follow, before the write.";
    Warpgroup { first: u32, last: u32, others: String }, "warpgroup",
        "all four warps {first} to {last} of a warpgroup must execute this instruction together; {others}",
        "Let whole warpgroups, four warps from a multiple of four on, execute it.";
    Descriptor { operand: &'static str, descriptor: u64, problem: String }, "descriptor",
        "matrix {operand} has the descriptor {descriptor:#018x}: {problem}",
        "Encode the address and the distances of the tile, and its swizzle, as it lies in shared memory.";
    NoMbarrier { address: u32 }, "no_mbarrier",
        "there is no mbarrier at shared address {address:#x}: none was initialised there, or it was invalidated",
        "Initialise it (`mbarrier.init`), then synchronise, before any thread or copy uses it.";
    MbarrierOverwritten { address: u32 }, "mbarrier_overwritten",
        "the mbarrier at shared address {address:#x} was overwritten by an ordinary store",
        "Keep other data out of the mbarrier's 8 bytes, or invalidate it first (`mbarrier.inval`).";
    MbarrierBytes { address: u32 }, "mbarrier_bytes",
        "the mbarrier at shared address {address:#x} is read by an instruction that is not of mbarriers",
        "Use `mbarrier` instructions on mbarriers only, and no others.";
    MbarrierCount { count: u32, allowed: u32 }, "mbarrier_count",
        "an mbarrier is to expect {count} arrivals; allowed are 1 to {allowed}",
        "Give the number of threads that arrive in a phase.";
    MbarrierBusy { address: u32, state: String }, "mbarrier_busy",
        "the mbarrier at shared address {address:#x} is initialised again or invalidated while it is in use ({state})",
        "Let every phase complete and every waiting thread go on before reusing the mbarrier.";
    MbarrierPhase { address: u32, asked: u64, phase: u64 }, "mbarrier_phase",
        "phase {asked} of the mbarrier at shared address {address:#x} is waited for while phase {phase} runs: only the running one and the one before can be",
        "Wait for each phase before the next but one can begin.";
    MbarrierOvertaken { address: u32, who: String, wait: String }, "mbarrier_overtaken",
        "a phase of the mbarrier at shared address {address:#x} ends, and nothing orders that after the wait of {who} for the phase before, which is {wait}: it may find the mbarrier a phase further and wait for ever",
        "Let whoever waits arrive afterwards, or synchronise with whoever does, before the phase can end.";
    ArrivalCount { arriving: u32, pending: u32, expected: u32 }, "arrival_count",
        "{arriving} arrivals on an mbarrier whose phase still expects {pending} of {expected}",
        "Initialise the mbarrier with as many arrivals as there are in a phase, and let no thread arrive twice.";
    TransactionCount { bytes: i64, allowed: u32 }, "transaction_count",
        "{bytes} bytes are outstanding on an mbarrier; allowed are {allowed} either way",
        "Announce (`expect_tx`) what the phase's copies bring, and split larger phases.";
    TransactionUnderflow { bytes: i64 }, "transaction_underflow",
        "{bytes} bytes more arrived in an mbarrier's phase than were announced",
        "Announce (`expect_tx`) all the bytes that the phase's copies bring.";
    CopySize { bytes: u32, multiple: u32 }, "copy_size",
        "a bulk copy is of {bytes} bytes, which is not a multiple of {multiple}",
        "Copy multiples of 16 bytes, and the rest by ordinary instructions.";
    CopyAlignment { space: &'static str, address: u64, multiple: u32 }, "copy_alignment",
        "a bulk copy's {space} address {address:#x} is not a multiple of {multiple}",
        "Align the address: 16 bytes for bulk copies, 128 for boxes of tensors in shared memory.";
    CopyAtExit { how: &'static str }, "copy_at_exit",
        "a thread or CTA ends while a copy is in flight that {how}",
        "Wait before the end: for the mbarrier of a load, for the group of a store (`cp.async.bulk.wait_group.read`).";
    TensorMap { reason: String }, "tensor_map",
        "{reason}",
        "Describe the tensor within the rules of the driver's `cuTensorMapEncodeTiled`.";
    TensorRank { rank: u32, coordinates: u32 }, "tensor_rank",
        "a tensor map of rank {rank} is used with {coordinates} coordinates",
        "Give one coordinate for each dimension of the tensor.";
    TensorMapFence { address: u64, write: String }, "tensor_map_fence",
        "the tensor map at global address {address:#x} is used without a fence since the kernel wrote it; the write is {write}",
        "Execute `fence.proxy.tensormap::generic.acquire` on it after the release, before its first use.";
    MissingProxyFence { address: u64, write: String }, "proxy_fence",
        "shared address {address:#x} was written by an ordinary instruction, and an asynchronous one reads it without a proxy fence in between; the write is {write}",
        "Execute `fence.proxy.async` in the writing threads after the write, then synchronise.";
    ClusterRank { rank: u32, ctas: u32 }, "cluster_rank",
        "CTA {rank} of the cluster is addressed; the cluster has {ctas}",
        "Use ranks below `%cluster_nctarank`, and launch with the cluster the kernel expects.";
    ClusterBarrier { what: &'static str }, "cluster_barrier",
        "a warp {what} at the cluster's barrier",
        "Pair each `barrier.cluster.arrive` with one `barrier.cluster.wait`, in that order.";
    PeerEnded { rank: u32 }, "peer_ended",
        "shared memory of CTA {rank} of the cluster is accessed after that CTA has ended",
        "Keep CTAs alive while others access their memory: end with a cluster barrier.";
    AccessAfterEnd { who: String, rank: u32 }, "access_after_end",
        "{who} accesses shared memory of CTA {rank} of the cluster, and nothing keeps that CTA from ending before",
        "Keep CTAs alive while others access their memory: end with a cluster barrier.";
}
