//! The strata: one FlashAttention kernel per generation, and the f64 reference.

pub mod cases;
pub mod problem;
pub mod reference;
pub mod tensor;
pub mod tolerance;

pub use problem::{CompulsoryBytes, Feature, Mask, ParseProblemError, Problem, ProblemError, ProblemSpec, Varlen};
pub use reference::{HeadOutput, plain, reference};
pub use tensor::{Dtype, InputError, Inputs, Outputs, Strides, Tensor, TensorError};
pub use tolerance::{Verdict, Wrong, check, check_exact, check_within};
