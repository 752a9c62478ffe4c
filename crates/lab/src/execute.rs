//! Running a stratum on the emulator, from host tensors to host tensors.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arch::Sm;
use emulator::{Memory, MemoryError, Options, Report, RunError};
use kernels::{
    Buffers, InputError, Inputs, Layout, Outputs, Plan, PlanError, Problem, Stratum, Tensor, TensorError, Tiles,
};
use ptx::Kernel;
use thiserror::Error;

/// What a caller may see and stop of a long run.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    /// Set to true by someone else to stop the run early.
    pub cancel: Option<&'a AtomicBool>,
    /// Called with the CTAs finished and those to run, of all launches together, from any worker.
    pub progress: Option<&'a (dyn Fn(u64, u64) + Sync)>,
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
    let plan = kernels::plan(stratum, problem, sm.into(), &Layout::of(problem, inputs)?, Some(tiles))?;
    execute_plan(&plan, problem, inputs, watch)
}

/// Computes attention as a plan says, on an emulated GPU of the architecture it was made for.
///
/// # Errors
/// When the inputs do not fit the problem, a kernel faults, or the run is cancelled.
pub fn execute_plan(
    plan: &Plan,
    problem: &Problem,
    inputs: &Inputs,
    watch: Watch<'_>,
) -> Result<Execution, ExecuteError> {
    let (stratum, sm) = (plan.stratum, plan.config.target.sm());
    let mut memory = Memory::new();
    let mut upload = |tensor: &Tensor| -> Result<u64, MemoryError> {
        let first = tensor.offset() * tensor.dtype().bytes();
        Ok(memory.alloc_bytes(tensor.storage())? + first as u64)
    };
    // Outputs begin as NaN: what a kernel does not write shows.
    let before = Outputs::nan(problem)?;
    let mut buffers = Buffers {
        q: upload(&inputs.q)?,
        k: upload(&inputs.k)?,
        v: upload(&inputs.v)?,
        out: upload(&before.out)?,
        lse: upload(&before.lse)?,
        workspaces: Vec::new(),
    };
    for workspace in &plan.workspaces {
        buffers.workspaces.push(memory.alloc(workspace.bytes)?);
    }

    let launches = plan.launches(&buffers)?;
    let total: u64 = launches.iter().map(ptx::Launch::ctas).sum();
    let mut finished = 0;
    let mut executed = Vec::new();
    for launch in &launches {
        // Workers finish in any order: the bar only goes forward.
        let most = AtomicU64::new(0);
        let progress = |done: u64| {
            if let Some(progress) = watch.progress {
                progress(finished + most.fetch_max(done, Ordering::Relaxed).max(done), total);
            }
        };
        let options = Options { cancel: watch.cancel, progress: Some(&progress), ..Options::new(sm) };
        let report = emulator::run(&memory, launch, &options).map_err(|source| match source {
            RunError::Cancelled => ExecuteError::Cancelled,
            source => ExecuteError::Fault { stratum, source },
        })?;
        finished += launch.ctas();
        executed.push(Executed {
            kernel: launch.kernel.clone(),
            report,
            threads: launch.threads() as u32,
            dynamic_shared: launch.dynamic_shared,
        });
    }
    let read = |address: u64, tensor: &Tensor| -> Result<Tensor, ExecuteError> {
        let bytes = memory.read(address, (tensor.len() * tensor.dtype().bytes()) as u64)?;
        Ok(Tensor::from_bytes(tensor.dtype(), tensor.shape(), bytes)?)
    };
    let outputs = Outputs { out: read(buffers.out, &before.out)?, lse: read(buffers.lse, &before.lse)? };
    Ok(Execution { outputs, launches: executed })
}
