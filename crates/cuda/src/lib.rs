//! Runs a [`ptx::Kernel`] on an NVIDIA GPU through the driver alone: no toolkit, neither to build nor to run.
//!
//! ```no_run
//! # fn main() -> Result<(), cuda::Error> {
//! use ptx::Backend;
//!
//! let driver = cuda::Driver::load()?;                  // a sentence, where there is none
//! let context = driver.context(0)?;
//! let mut stream = context.stream()?;
//! let x = stream.upload(&[1, 2, 3, 4])?;
//! // stream.launch(&launch)?;                          // compiled once, cached by its text
//! assert_eq!(stream.read(x, 4)?, [1, 2, 3, 4]);
//! # Ok(())
//! # }
//! ```
//!
//! Every call leaves the thread's current context as it found it. Pointers that kernels get are those of device memory;
//! nothing here maps host memory, so a wrong kernel can spoil device memory and its context, not the host's memory.

mod clocks;
mod context;
mod driver;
mod error;
mod graph;
mod module;
mod nvtx;
mod packing;
mod stream;
mod tensor_map;
mod timing;

pub use clocks::Clocks;
pub use context::{Context, PointerInfo};
pub use driver::{CudaVersion, DeviceInfo, Driver};
pub use error::Error;
pub use graph::Graph;
pub use module::{Attributes, CompilerLog, Function};
pub use nvtx::Range;
pub use stream::{Event, Prepared, Stream};
pub use timing::{Timing, TimingOptions, time};
