//! How a launch is to be run.

use std::sync::atomic::AtomicBool;

use arch::Sm;

/// When asynchronous work (`cp.async`) completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// At once.
    #[default]
    Eager,
    /// As late as the program allows; until then its destination counts as unwritten. Finds missing waits.
    Lazy,
    /// In between, and warps in an order, drawn from this seed. Finds races.
    Random(u64),
}

/// Which CTAs of the grid to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sample {
    /// All of them.
    #[default]
    Full,
    /// These, by linear index (x fastest, then y, then z). The report's counters are theirs alone; it says how many there are in all.
    Ctas(Vec<u64>),
}

/// How a launch is to be run.
#[derive(Clone)]
pub struct Options<'a> {
    /// The architecture whose bank rules are applied.
    pub sm: Sm,
    /// When asynchronous work completes.
    pub policy: Policy,
    /// Which CTAs to run.
    pub sample: Sample,
    /// Warp instructions that one CTA may execute before it is taken for hung.
    pub budget_per_cta: u64,
    /// Positions in [`Kernel::instructions`](ptx::Kernel::instructions) of memory accesses whose addresses the report is to show.
    pub watch: &'a [usize],
    /// Whether to look for races on global memory, between CTAs and between warps of one. It takes memory and time: every byte's
    /// accesses are remembered.
    pub global_races: bool,
    /// Whether to look for races between lanes of one warp on shared memory. It takes memory and time, as above.
    pub lane_races: bool,
    /// Whether bytes that a `cp.async` leaves of an earlier, longer one to the same place count as unwritten. A working kernel may
    /// read them: this is to be asked when a result is wrong.
    pub stale_copies: bool,
    /// Worker threads; 0 for one per core.
    pub threads: usize,
    /// Set to true by someone else to stop the run early.
    pub cancel: Option<&'a AtomicBool>,
    /// Called with the number of CTAs finished so far, from any worker.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl Options<'_> {
    /// A full, eager run with the bank rules of `sm`.
    pub fn new(sm: Sm) -> Self {
        Self {
            sm,
            policy: Policy::default(),
            sample: Sample::default(),
            budget_per_cta: 1 << 33,
            watch: &[],
            global_races: false,
            lane_races: false,
            stale_copies: false,
            threads: 0,
            cancel: None,
            progress: None,
        }
    }
}
