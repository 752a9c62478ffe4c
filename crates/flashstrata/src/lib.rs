//! Attention on any NVIDIA GPU from Turing on, without a CUDA toolkit: one call picks the kernel generation and its tiles for the
//! GPU at hand. Without a GPU the processor computes the same, on its vectors and matrix units.
//!
//! # From host memory to host memory
//! ```
//! use flashstrata::{Device, Problem};
//!
//! let device = Device::any();
//! let stream = device.stream()?;
//! let problem = Problem::builder(1, 2, 16, 8).causal().build()?;       // batch, heads, seqlen, head_dim; f32
//! let (q, k, v) = (vec![0.5f32; 2 * 16 * 8], vec![0.25; 2 * 16 * 8], vec![1.0; 2 * 16 * 8]);
//! let result = stream.attention(&problem, &q, &k, &v)?;
//! assert!(result.out.iter().all(|&x| (x - 1.0f32).abs() < 1e-6));
//! assert_eq!(result.lse.len(), 2 * 16);
//! # Ok::<(), flashstrata::Error>(())
//! ```
//! Tensors are `[batch, seqlen, heads, head_dim]` and contiguous here; [`Stream::run`] takes host tensors of any strides.
//!
//! # On device memory, without waiting
//! [`Device::prepare`] plans and compiles once; [`Stream::enqueue`] starts it.
//! ```
//! use flashstrata::{Device, Dtype, Layout, Operands, Problem};
//! # use flashstrata::half::f16;
//!
//! let device = Device::any();
//! let problem = Problem::builder(1, 4, 32, 16).heads_kv(2).dtype(Dtype::F16).build()?;
//! let attention = device.prepare(&problem, &Layout::contiguous(&problem))?;
//! if let Some(plan) = attention.plan() {
//!     println!("{plan}");                                              // generation, tiles, launches, and why not a newer one
//! }
//!
//! let stream = device.stream()?;                                       // or `unsafe { device.borrow_stream(cu_stream) }`
//! let tokens = 32;
//! let q = stream.upload(&vec![f16::ONE; tokens * 4 * 16])?;
//! let k = stream.upload(&vec![f16::ONE; tokens * 2 * 16])?;
//! let v = stream.upload(&vec![f16::ONE; tokens * 2 * 16])?;
//! let mut out = stream.alloc(attention.out_bytes())?;
//! let mut lse = stream.alloc(attention.lse_bytes())?;
//! stream.enqueue(&attention, Operands::new(&q, &k, &v, &mut out, &mut lse))?;   // does not wait
//! assert!(out.read::<f16>()?.iter().all(|&x| x == f16::ONE));                   // waits
//! # Ok::<(), flashstrata::Error>(())
//! ```
//! Memory that others allocated goes in by [`DeviceSlice::borrow`], tensors that lie otherwise by [`layout()`].
//! The workspace is the stream's own unless a call brings one of [`Plan::workspace_bytes`].
//!
//! # A cache of keys and values
//! [`ProblemSpec::cache`] says that k and v are a cache, of which each entry has its own number of keys, in rows or in pages.
//! Those numbers and the table of pages are read by the kernels; what is appended is written before.
//! ```
//! use flashstrata::{Append, Cache, Device, Dtype, Layout, Operands, Pages, Problem};
//! # use flashstrata::half::f16;
//!
//! let pages = Pages { size: 16, table: vec![3, 1, 0, 2] };              // two pages for each of two entries
//! let cache = Cache {
//!     rows: 4,                                                         // pages in all
//!     seqlens: Some(vec![16, 5]),                                      // keys before the call
//!     pages: Some(pages),
//!     append: Some(Append { seqlen: 1, rotary: None }),
//!     ..Cache::default()
//! };
//! let mut decode = Problem::builder(2, 4, 32, 16).heads_kv(2).dtype(Dtype::F16).cache(cache);
//! decode.seqlen_q = 1;                                                 // and seqlen_k is what an entry has room for
//! let problem = decode.build()?;
//!
//! let device = Device::any();
//! let attention = device.prepare(&problem, &Layout::contiguous(&problem))?;
//! let stream = device.stream()?;
//! let q = stream.upload(&vec![f16::ONE; 2 * 4 * 16])?;
//! let (k, v) = (stream.upload(&vec![f16::ONE; 4 * 16 * 2 * 16])?, stream.upload(&vec![f16::ONE; 4 * 16 * 2 * 16])?);
//! let (k_new, v_new) = (stream.upload(&vec![f16::ONE; 2 * 2 * 16])?, stream.upload(&vec![f16::ONE; 2 * 2 * 16])?);
//! let (seqlens, table) = (stream.upload(&[16, 5])?, stream.upload(&[3, 1, 0, 2])?);
//! let (mut out, mut lse) = (stream.alloc(attention.out_bytes())?, stream.alloc(attention.lse_bytes())?);
//! let operands = Operands::new(&q, &k, &v, &mut out, &mut lse);
//! let operands = operands.cache_seqlens(&seqlens).block_table(&table).append(&k_new, &v_new);
//! stream.enqueue(&attention, operands)?;
//! assert!(out.read::<f16>()?.iter().all(|&x| x == f16::ONE));
//! # Ok::<(), flashstrata::Error>(())
//! ```
//!
//! # What is promised
//! The contract of an attention call is the same for each generation and device: masks are aligned bottom right, a row that
//! sees no key is 0 with `lse` minus infinity, `lse` is the natural logarithm. A generation that cannot honour a part of a call
//! is passed over, and [`Plan::passed_over`] says why; when none can, [`PlanFailure`] lists all reasons. A call that is refused
//! has written nothing. There is no global state: a [`Device`] is a value, and several GPUs are several values.
//!
//! # Features
//! `emulator`: streams of a GPU that is emulated ([`Device::emulated`]) run, exactly and very slowly. Planning for one needs it not.
//!
//! # Tuning
//! Defaults are meant to be enough. [`tune`](mod@tune) measures other tiles when it is called, keeps what it finds in a file,
//! and a [`Planner`] consults that only when it is given it:
//! ```
//! use flashstrata::{Device, Tuning};
//!
//! let device = Device::emulated("H100")?;
//! let tuned = Tuning::Cached.load()?;                                  // or `Tuning::File(path)`
//! let planner = device.planner()?.tuned(tuned.table);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attention;
pub mod compute;
mod device;
mod emulated;
mod error;
mod hardware;
mod layout;
mod planner;
mod stream;
pub mod tune;

pub use arch::{Gpu, Sm};
pub use half;
pub use kernels::{
    Append, Cache, CacheError, Coverage, Descales, Dtype, Feature, InputError, Inputs, Layout, Mask, New, Outputs,
    Pages, ParseProblemError, PlanError, Problem, ProblemError, ProblemSpec, Rotary, Stratum, Strides, Technique,
    Tensor, TensorError, Tiles, Varlen, Without,
};

pub use attention::{Attention, Operands};
pub use device::Device;
pub use error::Error;
pub use hardware::Hardware;
pub use layout::{LayoutError, View, appended, layout};
pub use planner::{ChosenBy, Footprint, Part, PassedOver, Plan, PlanFailure, Planner, WORKSPACE_ALIGNMENT, Why};
pub use stream::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Element, HostOutputs, Stream};
pub use tune::{Entry, Progress, Table, Tuning, Watch};
