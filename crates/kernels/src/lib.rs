//! The strata: one FlashAttention kernel per generation, and the f64 reference.
