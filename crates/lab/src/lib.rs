//! Measures, compares and explains kernels.
