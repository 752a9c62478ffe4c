//! GPUs as facts: SM tables, occupancy, pipe rates, and what an architecture can do.
//!
//! - [`Sm`] is a compute capability, [`Sm::limits`] what one multiprocessor holds, [`Sm::pipe_rates`] what it does per clock.
//! - [`Target`] is what code is compiled for (`sm_90a`); [`Target::supports`] and [`Target::require`] say what it may use.
//! - [`occupancy()`] says how many blocks fit on a multiprocessor and what limits them.
//! - [`Gpu`] is a board one can buy: multiprocessors, clocks, bandwidth, each row with its source.
//!
//! ```
//! use arch::{BlockResources, Feature, Gpu, Limiter, Sm, Target};
//!
//! let gpu = Gpu::find("rtx2070")?;
//! assert_eq!((gpu.sm, gpu.sm_count), (Sm::Sm75, 36));
//!
//! // 128 threads of 72 registers and 12 KiB of shared memory each: five blocks fit, shared memory is what stops the sixth.
//! let block = BlockResources { threads: 128, registers: 72, dynamic_shared: 12288, ..Default::default() };
//! let occupancy = arch::occupancy(gpu.sm, &block)?;
//! assert_eq!(occupancy.blocks_per_sm, 5);
//! assert_eq!(occupancy.limiters, [Limiter::Shared]);
//! assert_eq!(occupancy.theoretical_pct, 62.5);
//!
//! // What an architecture can do is a question, not a comparison of numbers.
//! let target: Target = "sm_90".parse()?;
//! assert!(target.supports(Feature::Tma));
//! assert_eq!(target.require(Feature::Wgmma).unwrap_err().to_string(), "target sm_90 has no wgmma: it needs sm_90a");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod feature;
mod gpu;
mod occupancy;
mod pipes;
mod registers;
mod sm;
mod target;

pub use feature::{Feature, MMA_FORMS, MmaForm, Unsupported};
pub use gpu::{GPUS, Gpu, UnknownGpu};
pub use occupancy::{BlockLimits, BlockResources, Limiter, Occupancy, OccupancyError, occupancy};
pub use pipes::{PipeRates, TensorOperand, TensorRates};
pub use registers::{LEAST_REGISTERS, estimate_registers};
pub use sm::{Sm, SmLimits, UnknownSm, WARP_THREADS};
pub use target::{Suffix, Target, TargetError};
