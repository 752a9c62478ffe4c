//! Runs a `ptx::Kernel` on the CPU, exactly and counted.
//!
//! ```ignore
//! let memory = Memory::new();
//! let x = memory.alloc_bytes(&bytes)?;       // initialised
//! let y = memory.alloc(4 * 1024)?;           // reading it before writing it is an error
//! let launch = Launch { kernel: &kernel, grid, block, cluster: [1, 1, 1], dynamic_shared, arguments: vec![Argument::Pointer(x), Argument::Pointer(y)] };
//! let report: Report = emulator::run(&memory, &launch, &Options::new(Sm::Sm75))?;
//! let out: Vec<u8> = memory.read(y, 4 * 1024)?;
//! ```

mod access;
mod allocate;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod banks;
mod call;
mod cluster;
mod copy;
mod cta;
mod device;
mod engine;
mod fault;
pub mod filetest;
mod global_race;
mod interpret;
mod lane_race;
mod lanes;
mod map;
mod mbarrier;
mod memory;
pub mod merge;
mod model;
mod options;
mod pattern;
mod program;
mod proxy;
mod race;
mod reduce;
mod report;
mod run;
mod scalar;
mod small;
mod stale;
mod tensor;
mod tensor_box;
mod traffic;
mod warp;

pub use device::{Device, DeviceError};
pub use fault::{Fault, FaultKind, RunError};
pub use memory::{Memory, MemoryError};
pub use model::{DramBytes, Model, Pipe, PipeTime, model, work_by_instruction};
pub use options::{Options, Policy, Sample};
pub use program::hands_on;
pub use report::{Access, Counters, InstructionCounters, Level, LineCounters, Part, Report, Shape, Traffic, Watched};
pub use run::run;
pub use tensor::TensorWork;
