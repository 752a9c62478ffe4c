//! Tensor cores: `mma`, `ldmatrix`, `stmatrix`, `movmatrix` and `wgmma`.

mod descriptor;
mod fragment;
mod numerics;
mod product;
