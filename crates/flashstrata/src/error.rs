//! Why a call was refused or failed.

use kernels::{InputError, PlanError, ProblemError, TensorError};
use thiserror::Error;

use crate::compute::ComputeError;
use crate::layout::LayoutError;
use crate::planner::PlanFailure;

/// Why a call was refused or failed. Of a call that is refused, nothing was written.
#[derive(Debug, Error)]
pub enum Error {
    /// A value that no call can have.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Tensors that are not the problem's.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Tensors that cannot lie like that.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No generation computes it.
    #[error(transparent)]
    Plan(#[from] PlanFailure),
    /// Addresses that the plan's kernels cannot take.
    #[error(transparent)]
    Addresses(#[from] PlanError),
    /// Host memory does not suffice.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Host memory does not suffice.
    #[error("out of memory: {bytes} bytes were asked for")]
    HostMemory {
        /// Bytes.
        bytes: u64,
    },
    /// Too few elements in a host slice, or too many.
    #[error("{argument} has {given} elements: the problem's {argument} has {expected}")]
    Length {
        /// Which slice.
        argument: &'static str,
        /// Its elements.
        given: usize,
        /// What they must be.
        expected: usize,
    },
    /// Fewer bytes of device memory than a call reaches.
    #[error("{argument} has {given} bytes: the call needs {needed}")]
    Bytes {
        /// Which memory.
        argument: &'static str,
        /// Its bytes.
        given: u64,
        /// What they must be at least.
        needed: u64,
    },
    /// Memory that a packed batch, or ALiBi, needs.
    #[error("{argument} is not given: the plan's problem has it")]
    Missing {
        /// Which.
        argument: &'static str,
    },
    /// An address that kernels cannot read.
    #[error("{argument} is at address {address:#x}: it must be a multiple of {alignment}")]
    Misaligned {
        /// Which memory.
        argument: &'static str,
        /// Its address.
        address: u64,
        /// What must divide that.
        alignment: u64,
    },
    /// Host memory where device memory must be.
    #[error("{argument} at {address:#x} is host memory: every pointer of a call must be memory of GPU {ordinal}")]
    HostPointer {
        /// Which.
        argument: &'static str,
        /// Its address.
        address: u64,
        /// The stream's GPU.
        ordinal: u32,
    },
    /// Memory of another GPU.
    #[error(
        "{argument} at {address:#x} is memory of GPU {found}: every pointer of a call must be memory of GPU {ordinal}"
    )]
    OtherGpu {
        /// Which.
        argument: &'static str,
        /// Its address.
        address: u64,
        /// Where it is.
        found: u32,
        /// The stream's GPU.
        ordinal: u32,
    },
    /// A buffer of another stream, which may be freed or written there at any time.
    #[error(
        "{argument} is a buffer of another stream: it must be one of the stream that the call goes to, or borrowed"
    )]
    OtherStream {
        /// Which.
        argument: &'static str,
    },
    /// Kernels that were loaded for another device.
    #[error("the plan was loaded for {loaded}: the stream is of {stream}; load it with the stream's own device")]
    OtherDevice {
        /// What it was loaded for.
        loaded: String,
        /// What the stream is of.
        stream: String,
    },
    /// A plan for another architecture.
    #[error("the plan is for {planned}: the device is {device}")]
    Architecture {
        /// What it was made for.
        planned: String,
        /// The device.
        device: String,
    },
    /// Something that only a GPU has.
    #[error("the device is no GPU: only a GPU has {what}")]
    NoGpu {
        /// What was asked for.
        what: &'static str,
    },
    /// Something that the processor does not have.
    #[error("the device is the CPU: only a GPU, or the emulator, has {what}")]
    Cpu {
        /// What was asked for.
        what: &'static str,
    },
    /// Memory that nothing allocated.
    #[error("{bytes} bytes at {address:#x} are no memory of this stream")]
    NoMemory {
        /// Where.
        address: u64,
        /// How many.
        bytes: u64,
    },
    /// The processor was stopped, or has no room.
    #[error(transparent)]
    OnCpu(#[from] cpu::Error),
    /// The GPU refused or failed.
    #[error(transparent)]
    Cuda(#[from] cuda::Error),
    /// A stream of an emulated GPU, in a program that has no emulator.
    #[error("{gpu} cannot be emulated: this program was built without the feature `emulator` of flashstrata")]
    NoEmulator {
        /// The board.
        gpu: &'static str,
    },
    /// The emulator refused, or a kernel did something wrong.
    #[cfg(feature = "emulator")]
    #[error(transparent)]
    Emulator(#[from] emulator::DeviceError),
}

impl<E: Into<Error>> From<ComputeError<E>> for Error {
    fn from(error: ComputeError<E>) -> Self {
        match error {
            ComputeError::Plan(error) => error.into(),
            ComputeError::Input(error) => error.into(),
            ComputeError::Tensor(error) => error.into(),
            ComputeError::Backend(error) => error.into(),
        }
    }
}

impl From<cpu::ComputeError> for Error {
    fn from(error: cpu::ComputeError) -> Self {
        match error {
            cpu::ComputeError::Input(error) => error.into(),
            cpu::ComputeError::Tensor(error) => error.into(),
            cpu::ComputeError::Attention(error) => error.into(),
        }
    }
}
