//! Tensor cores: `mma`, `ldmatrix`, `stmatrix`, `movmatrix` and `wgmma`.

mod descriptor;
mod double;
mod fragment;
mod matrix;
mod numerics;
mod product;
mod wgmma;
mod work;

use crate::cta::{Fail, Stop, Worker};
use crate::fault::FaultKind;
use crate::lanes::ALL;
use crate::program::{Op, PredicateRef};
use crate::warp::Warp;

pub(crate) use descriptor::Major;
pub(crate) use double::DoubleProduct;
pub(crate) use numerics::{Element, Sums};
pub(crate) use product::{Accumulator, Shape};
pub(crate) use wgmma::{Flights, MatrixA, Watch, WgmmaOp, WgmmaState, watch};
pub use work::TensorWork;

/// What a tensor-core instruction does. Registers are places of the narrow file.
#[derive(Clone, Debug)]
pub(crate) enum TensorOp {
    Mma {
        shape: Shape,
        a: Vec<u32>,
        b: Vec<u32>,
        c: Vec<u32>,
        d: Vec<u32>,
    },
    Double(DoubleProduct),
    /// `memory` is the access that counts its rows.
    LoadMatrix {
        memory: u32,
        transpose: bool,
        registers: Vec<u32>,
    },
    StoreMatrix {
        memory: u32,
        transpose: bool,
        registers: Vec<u32>,
    },
    MoveMatrix {
        d: u32,
        a: u32,
    },
    Wgmma(Box<WgmmaOp>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(usize),
}

/// Executes an instruction of which at least one lane is active; where that ends the warp's turn, says why.
#[inline(never)]
pub(crate) fn execute(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<Option<Stop>, Fail> {
    if mask != ALL {
        let kind = FaultKind::Divergent { active: mask, expected: ALL };
        return Err(Box::new((kind, warp.pc, warp.index, mask.trailing_zeros())));
    }
    let program = worker.program;
    match &program.tensor[op.aux as usize] {
        TensorOp::Mma { shape, a, b, c, d } => {
            let product = product::WarpProduct { shape: *shape, file: &mut warp.narrow, a, b, c, d };
            numerics::at(worker.job.level, product);
        }
        TensorOp::Double(product) => product.execute(&mut warp.wide),
        TensorOp::LoadMatrix { memory, transpose, registers } => {
            matrix::load(worker, warp, *memory, *transpose, registers)?;
        }
        TensorOp::StoreMatrix { memory, transpose, registers } => {
            matrix::store(worker, warp, *memory, *transpose, registers)?;
        }
        &TensorOp::MoveMatrix { d, a } => warp.narrow[d as usize].0 = matrix::transposed(&warp.narrow[a as usize].0),
        TensorOp::Wgmma(_) => return Ok(Some(Stop::Warpgroup)),
        TensorOp::WgmmaFence => warp.wgmma.fence(),
        TensorOp::WgmmaCommit => warp.wgmma.commit(),
        &TensorOp::WgmmaWait(groups) => {
            warp.wgmma.wait(warp.index, groups, &mut worker.flights, &mut worker.races.open[warp.index]);
        }
    }
    Ok(None)
}

/// A predicate that must be the same in all lanes; `None` where it is not.
pub(crate) fn uniform(predicates: &[u32], reference: PredicateRef) -> Option<bool> {
    let value = predicates[(reference / 2) as usize];
    match if reference & 1 == 1 { !value } else { value } {
        0 => Some(false),
        ALL => Some(true),
        _ => None,
    }
}
