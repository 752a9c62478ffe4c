//! The strata: one FlashAttention kernel per generation, and the f64 reference.

pub mod problem;
pub mod reference;
pub mod tensor;

pub use problem::{CompulsoryBytes, Feature, Mask, ParseProblemError, Problem, ProblemError, ProblemSpec, Varlen};
pub use tensor::{Dtype, InputError, Inputs, Outputs, Strides, Tensor, TensorError};
