//! Running a stratum on the emulator, from host tensors to host tensors.

use std::sync::atomic::{AtomicU64, Ordering};

use arch::{Gpu, Target};
use emulator::{Memory, MemoryError, Options, Report, RunError};
use kernels::{Inputs, InputError, Outputs, Problem, Stratum, StratumError, Tensor, TensorError, Tiles};
use ptx::Kernel;
use thiserror::Error;

use crate::dig::Watch;

/// What a stratum computed, and what each of its launches counted.
#[derive(Debug)]
pub struct Execution {
    /// `out` and `lse`.
    pub outputs: Outputs,
    /// In the order they ran.
    pub launches: Vec<Executed>,
    /// The tiles that were used.
    pub tiles: Tiles,
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
