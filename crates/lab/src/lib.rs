//! Measures, compares and explains kernels.

pub mod tensor_file;
