//! How many mistakes the emulator finds: every synchronisation, copy and phase of a working kernel is changed, one at a time, and
//! each changed kernel is run under several schedules. `docs/mutation.md` defines what counts as found.

mod blame;
mod equivalent;
mod mutation;
mod order;
mod separate;
pub(crate) mod subjects;
mod values;

use std::collections::BTreeMap;

use emulator::{Fault, Options, Policy, RunError};
use ptx::Kernel;
use rayon::prelude::*;

pub use blame::Blame;
pub use equivalent::Reason;
pub use mutation::{Change, Mutant, Mutation, Role, mutations};
pub use subjects::{FileTestRun, StratumLaunch, SubjectError};

use crate::execute::Watch;
use blame::Blamer;
use separate::Separation;

/// The schedules that every kernel is run under, in this order.
pub const POLICIES: [Policy; 4] = [Policy::Lazy, Policy::Random(1), Policy::Eager, Policy::Random(2)];

/// The least share of mutants that must be found, with the right line.
pub const LEAST: f64 = 0.95;

/// A working kernel and what it takes to run it, and variants of it.
pub trait Subject: Sync {
    /// The kernel.
    fn kernel(&self) -> &Kernel;

    /// Options for a run, without a policy.
    fn options(&self) -> Options<'static>;

    /// Runs a kernel in its place on fresh copies of its arguments.
    ///
    /// # Errors
    /// When the run does not end, or not well.
    fn run(&self, kernel: &Kernel, options: &Options<'_>) -> Result<Ran, RunError>;
}

/// A run that ended well.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Whether the result is what it should be.
    pub right: bool,
    /// Whether it is, bit for bit, what the kernel that nothing was changed in leaves.
    pub same: bool,
    /// How often warps executed each instruction.
    pub executions: Vec<u64>,
    /// Whether the search for races left nothing out ([`emulator::Report::races_complete`]).
    pub races_complete: bool,
}

/// What came of a mutant.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// A hazard was reported.
    Found {
        /// It.
        fault: Box<Fault>,
        /// Under which schedule.
        policy: Policy,
        /// Whether it names the right place.
        blame: Blame,
    },
    /// The result was wrong and no hazard was reported.
    WrongResult(Policy),
    /// The result was right under every schedule, and it can be shown that it always is.
    Equivalent(Reason),
    /// The result was right under every schedule, and nothing shows that it always is.
    Unexplained,
    /// The instruction, or the changed kernel, did not run on this input.
    NotRun(String),
}

/// A mutation and what came of it.
#[derive(Clone, Debug)]
pub struct Tried {
    /// What was changed.
    pub mutation: Mutation,
    /// The instruction.
    pub instruction: String,
    /// The source line, when known.
    pub place: Option<(String, u32)>,
    /// What came of it.
    pub verdict: Verdict,
}

/// What came of all the mutants of a kernel.
#[derive(Clone, Debug)]
pub struct Mutated {
    /// The kernel's name.
    pub kernel: String,
    /// In the order of the instructions.
    pub tried: Vec<Tried>,
}

/// How many mutants came to what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Mutants.
    pub all: u64,
    /// A hazard was reported.
    pub found: u64,
    /// Of those, on the changed instruction's line.
    pub on_line: u64,
    /// Of the found, on an access or a wait that relied on it.
    pub relying: u64,
    /// A wrong result without a hazard.
    pub wrong: u64,
    /// A right result without a proof.
    pub unexplained: u64,
    /// No change of meaning.
    pub equivalent: u64,
    /// Of those, the ones that the order of the accesses shows, for every schedule of the launch.
    pub by_order: u64,
    /// Of those, the ones that the runs alone show.
    pub by_runs: u64,
    /// Not run on this input.
    pub not_run: u64,
}

impl Tally {
    fn count(&mut self, verdict: &Verdict) {
        self.all += 1;
        match verdict {
            Verdict::Found { blame, .. } => {
                self.found += 1;
                match blame {
                    Blame::Line => self.on_line += 1,
                    Blame::Relying => self.relying += 1,
                    Blame::Elsewhere => {}
                }
            }
            Verdict::WrongResult(_) => self.wrong += 1,
            Verdict::Unexplained => self.unexplained += 1,
            Verdict::Equivalent(reason) => {
                self.equivalent += 1;
                self.by_order += u64::from(*reason == Reason::Ordered);
                self.by_runs += u64::from(reason.is_by_runs());
            }
            Verdict::NotRun(_) => self.not_run += 1,
        }
    }

    /// Together with another.
    pub fn and(self, other: Self) -> Self {
        Self {
            all: self.all + other.all,
            found: self.found + other.found,
            on_line: self.on_line + other.on_line,
            relying: self.relying + other.relying,
            wrong: self.wrong + other.wrong,
            unexplained: self.unexplained + other.unexplained,
            equivalent: self.equivalent + other.equivalent,
            by_order: self.by_order + other.by_order,
            by_runs: self.by_runs + other.by_runs,
            not_run: self.not_run + other.not_run,
        }
    }

    /// Mutants that changed the meaning, or may have.
    pub fn meaningful(&self) -> u64 {
        self.found + self.wrong + self.unexplained
    }

    /// Of those, the share that was found with the right line; 1 where there is none.
    pub fn rate(&self) -> f64 {
        let meaningful = self.meaningful();
        share(self.on_line + self.relying, meaningful)
    }

    /// The same where those count as missed that the runs alone show to mean the same.
    pub fn strict_rate(&self) -> f64 {
        share(self.on_line + self.relying, self.meaningful() + self.by_runs)
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

impl Mutated {
    /// All its mutants together.
    pub fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        self.tried.iter().for_each(|tried| tally.count(&tried.verdict));
        tally
    }

    /// By role and change.
    pub fn by_change(&self) -> BTreeMap<(Role, Change), Tally> {
        let mut tallies = BTreeMap::<_, Tally>::new();
        for tried in &self.tried {
            tallies.entry((tried.mutation.role, tried.mutation.change)).or_default().count(&tried.verdict);
        }
        tallies
    }
}

/// Changes a kernel in every way and runs each.
///
/// # Errors
/// The first fault of the kernel as it is, under one of [`POLICIES`]; a wrong result of it; or that the run was cancelled.
pub fn mutate(subject: &impl Subject, watch: Watch<'_>) -> Result<Mutated, MutateError> {
    let kernel = subject.kernel();
    let mut executions = vec![0; kernel.instructions().count()];
    for policy in POLICIES {
        let ran = subject.run(kernel, &options(subject, policy, watch, None))?;
        if !ran.right {
            return Err(MutateError::Wrong(policy));
        }
        for (sum, executed) in executions.iter_mut().zip(&ran.executions) {
            *sum = (*sum).max(*executed);
        }
    }
    let budget = 4 * executions.iter().sum::<u64>() + SLACK;
    let (blamer, separation) = (Blamer::of(kernel), Separation::of(kernel));
    let mutations = mutations(kernel);
    let done = std::sync::atomic::AtomicU64::new(0);
    let tried = |mutation: &Mutation| {
        let instruction = kernel.instructions().nth(mutation.position);
        let tried = Tried {
            mutation: *mutation,
            instruction: instruction.map(|instruction| kernel.instruction_text(instruction)).unwrap_or_default(),
            place: instruction
                .and_then(|instruction| kernel.user_location(instruction))
                .map(|location| (kernel.files.get(location.file as usize).cloned().unwrap_or_default(), location.line)),
            verdict: match executions.get(mutation.position) {
                Some(0) | None => Verdict::NotRun("no warp executes it".into()),
                Some(_) => {
                    let runs = |policy| options(subject, policy, watch, Some(budget));
                    verdict(subject, mutation, (&blamer, &separation), runs)?
                }
            },
        };
        let done = 1 + done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if let Some(progress) = watch.progress {
            progress(done, mutations.len() as u64);
        }
        Ok(tried)
    };
    let tried = mutations.par_iter().map(tried).collect::<Result<_, MutateError>>()?;
    Ok(Mutated { kernel: kernel.name.clone(), tried })
}

/// Warp instructions that a mutant may execute beyond four times those of the kernel.
const SLACK: u64 = 1 << 20;

/// A kernel that is not to be mutated: it does not work.
#[derive(Debug, thiserror::Error)]
pub enum MutateError {
    /// It faults, or cannot be run.
    #[error("the kernel does not work as it is: {0}")]
    Run(#[from] RunError),
    /// Its result is wrong.
    #[error("the kernel's result is wrong as it is, under the policy {}", crate::probe::policy_name(*.0))]
    Wrong(Policy),
}

fn options<'a>(subject: &impl Subject, policy: Policy, watch: Watch<'a>, budget: Option<u64>) -> Options<'a> {
    let options: Options<'a> = subject.options();
    Options {
        policy,
        global_races: true,
        lane_races: true,
        budget_per_cta: budget.unwrap_or(options.budget_per_cta),
        threads: if budget.is_some() { 1 } else { 0 },
        cancel: watch.cancel,
        ..options
    }
}

fn verdict<'a>(
    subject: &impl Subject,
    mutation: &Mutation,
    (blamer, separation): (&Blamer<'_>, &Separation<'_>),
    options: impl Fn(Policy) -> Options<'a>,
) -> Result<Verdict, MutateError> {
    let Some(mutant) = mutation.apply(subject.kernel()) else {
        return Ok(Verdict::NotRun("nothing to change".into()));
    };
    let (mut wrong, mut ordered) = (None, order::is_determinate(&mutant.kernel));
    for policy in POLICIES {
        match subject.run(&mutant.kernel, &options(policy)) {
            Ok(ran) => {
                wrong = wrong.or((!ran.right).then_some(policy));
                ordered &= ran.races_complete && ran.same;
            }
            Err(RunError::Fault(fault)) => {
                let at = mutant.origin(fault.position);
                let blame = blamer.judge(mutation.position, mutation.role, &fault, at);
                return Ok(Verdict::Found { fault, policy, blame });
            }
            Err(RunError::Cancelled) => return Err(RunError::Cancelled.into()),
            Err(error) => return Ok(Verdict::NotRun(error.to_string())),
        }
    }
    // A wrong result asks for what a working kernel may do too.
    if let Some(policy) = wrong
        && let Err(RunError::Fault(fault)) =
            subject.run(&mutant.kernel, &Options { stale_copies: true, ..options(policy) })
    {
        let at = mutant.origin(fault.position);
        let blame = blamer.judge(mutation.position, mutation.role, &fault, at);
        return Ok(Verdict::Found { fault, policy, blame });
    }
    if wrong.is_none() && (mutation.role, mutation.change) == (Role::CopyAsync, Change::Shrink) {
        let reads_rest =
            |policy| subject.run(&mutant.kernel, &Options { stale_copies: true, ..options(policy) }).is_err();
        if !POLICIES.into_iter().any(reads_rest) {
            return Ok(Verdict::Equivalent(if ordered { Reason::Ordered } else { Reason::NotRead }));
        }
    }
    // Of what a shorter copy leaves the result may happen to be the same.
    let ordered = ordered && mutation.change != Change::Shrink;
    let reason = equivalent::by_code(subject.kernel(), separation, mutation, mutant.passed)
        .or(ordered.then_some(Reason::Ordered))
        .or_else(|| equivalent::by_runs(subject.kernel(), mutation));
    Ok(match (wrong, reason) {
        (Some(policy), _) => Verdict::WrongResult(policy),
        (None, Some(reason)) => Verdict::Equivalent(reason),
        (None, None) => Verdict::Unexplained,
    })
}
