//! Running a stratum on the emulator, from host tensors to host tensors.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arch::{Sm, Target};
use emulator::{Device, DeviceError, MemoryError, Options, Report, RunError};
use kernels::plan::LaunchPlan;
use kernels::{InputError, Inputs, Layout, Outputs, Plan, PlanError, Problem, Stratum, TensorError, Tiles};
use ptx::Kernel;
use thiserror::Error;

use flashstrata::compute::{ComputeError, Computed, compute};

/// What a caller may see and stop of a long run.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    /// Set to true by someone else to stop the run early.
    pub cancel: Option<&'a AtomicBool>,
    /// Called with the CTAs finished and those to run, of all launches together, from any worker.
    pub progress: Option<&'a (dyn Fn(u64, u64) + Sync)>,
    /// Positions of instructions, in whatever kernel runs, whose addresses are kept.
    pub instructions: &'a [usize],
}

impl Watch<'_> {
    /// Whether to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }
}

/// What a stratum computed, and what each of its launches counted.
#[derive(Debug)]
pub struct Execution {
    /// `out` and `lse`.
    pub outputs: Outputs,
    /// In the order they ran.
    pub launches: Vec<Executed>,
}

/// One launch that ran.
#[derive(Debug)]
pub struct Executed {
    /// Its kernel.
    pub kernel: Kernel,
    /// What it counted.
    pub report: Report,
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub dynamic_shared: u32,
}

/// A stratum that did not compute.
#[derive(Debug, Error)]
pub enum ExecuteError {
    /// It does not cover the problem, or has no such tiles.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The inputs are not the problem's.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Host memory does not suffice.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The emulated memory does not suffice.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel did something wrong.
    #[error("{stratum}: {source}")]
    Fault {
        /// Whose kernel.
        stratum: Stratum,
        /// What it did.
        source: RunError,
    },
    /// [`Watch::cancel`] was set.
    #[error("cancelled")]
    Cancelled,
}

/// Computes attention with a stratum on an emulated GPU of architecture `sm`.
///
/// # Errors
/// When the stratum does not cover the problem, the inputs do not fit it, the kernel faults, or the run is cancelled.
pub fn execute(
    stratum: Stratum,
    tiles: Tiles,
    problem: &Problem,
    inputs: &Inputs,
    sm: Sm,
    watch: Watch<'_>,
) -> Result<Execution, ExecuteError> {
    let plan = kernels::plan(stratum, problem, Target::best(sm), &Layout::of(problem, inputs)?, Some(tiles))?;
    execute_plan(plan, problem, inputs, watch)
}

/// Computes attention as a plan says, on an emulated GPU of the architecture it was made for.
///
/// # Errors
/// When the inputs do not fit the problem, a kernel faults, or the run is cancelled.
pub fn execute_plan(
    plan: Plan,
    problem: &Problem,
    inputs: &Inputs,
    watch: Watch<'_>,
) -> Result<Execution, ExecuteError> {
    let (stratum, sm) = (plan.stratum, plan.config.target.sm());
    let total: u64 = plan.launches.iter().map(LaunchPlan::ctas).sum();
    // Workers finish in any order: the bar only goes forward.
    let finished = AtomicU64::new(0);
    let progress = |_: u64| {
        let finished = finished.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(progress) = watch.progress {
            progress(finished, total);
        }
    };
    let options =
        Options { cancel: watch.cancel, progress: Some(&progress), watch: watch.instructions, ..Options::new(sm) };
    let mut device = Device::new(options);
    let Computed { outputs, reports } = compute(&mut device, &plan, problem, inputs).map_err(|error| match error {
        ComputeError::Plan(error) => error.into(),
        ComputeError::Input(error) => error.into(),
        ComputeError::Tensor(error) => error.into(),
        ComputeError::Backend(DeviceError::Memory(error)) => error.into(),
        ComputeError::Backend(DeviceError::Run(RunError::Cancelled)) => ExecuteError::Cancelled,
        ComputeError::Backend(DeviceError::Run(source)) => ExecuteError::Fault { stratum, source },
    })?;
    let launches = plan.launches.into_iter().zip(reports).map(|(launch, report)| Executed {
        threads: launch.block.iter().product(),
        dynamic_shared: launch.dynamic_shared,
        kernel: launch.kernel,
        report,
    });
    Ok(Execution { outputs, launches: launches.collect() })
}
