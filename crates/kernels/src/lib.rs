//! The strata: one FlashAttention kernel per generation, and the f64 reference.

pub mod accumulator;
pub mod append;
pub mod cache;
#[cfg(feature = "cases")]
pub mod cases;
pub mod combine;
pub mod config;
pub mod configurations;
pub mod convert;
pub mod copies;
pub mod head;
pub mod hopper;
pub mod mma;
pub mod naive;
pub mod pages;
pub mod plan;
pub mod problem;
pub mod reference;
pub mod results;
pub mod schedule;
pub mod scores;
pub mod softmax;
pub mod strided;
pub mod tensor;
pub mod tile;
pub mod tolerance;
pub mod v1;
pub mod v2;
pub mod v2_kt;
pub mod v2_tc;
pub mod v3;

pub use cache::{Append, Cache, CacheError, New, Pages, Rotary};
pub use config::{Config, Program, Technique, Tiles, Without};
pub use plan::{Buffers, Coverage, Layout, Options, Plan, PlanError, Stratum, configure, plan, plan_with};
pub use problem::{CompulsoryBytes, Feature, Mask, ParseProblemError, Problem, ProblemError, ProblemSpec, Varlen};
pub use reference::{HeadOutput, plain, reference};
pub use tensor::{Descales, Dtype, InputError, Inputs, Outputs, Strides, Tensor, TensorError, normals};
pub use tolerance::{Verdict, Wrong, check, check_exact, check_within};
