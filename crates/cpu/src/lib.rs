//! Attention on the processor at hand.

mod call;
mod exp2;
mod few;
mod lanes;
mod partial;
mod tiles;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kernels::{InputError, Inputs, Layout, Outputs, Problem, Tensor, TensorError};
use thiserror::Error;

pub use call::Memory;

use call::Call;
use partial::Partials;

/// How a call is computed.
#[derive(Clone, Copy, Default)]
#[allow(missing_debug_implementations)]
pub struct Options<'a> {
    /// Stops when it becomes true.
    pub cancel: Option<&'a AtomicBool>,
    /// Is told of tiles that are done, and of how many.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
}

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// It was stopped: some of its rows are written.
    #[error("stopped before the end")]
    Cancelled,
    /// Memory for partial results.
    #[error("out of memory: {bytes} bytes were asked for")]
    Memory {
        /// Bytes.
        bytes: u64,
    },
}

/// Computes a call on the threads of the current rayon pool.
///
/// # Safety
/// Each of `memory`'s tensors is at its type's alignment and reaches as far as `layout` says for `problem`; nobody writes the
/// inputs meanwhile, nor touches the outputs, whose rows do not overlap.
pub unsafe fn attention(problem: &Problem, layout: &Layout, memory: Memory, options: Options<'_>) -> Result<(), Error> {
    let call = Call::new(problem, layout, memory);
    let arch = pulp::Arch::new();
    let lanes = arch.dispatch(Lanes);
    let threads = rayon::current_num_threads();
    let (tiles, rows) = tiles::tiles(problem, lanes::height(lanes), lanes::KEYS, threads);
    let bytes = (rows * (problem.head_dim_v + 2) * 4) as u64;
    let partials = Partials::new(problem, rows).ok_or(Error::Memory { bytes })?;
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let cancelled = || options.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed));
    // Each thread takes the next tile when it is done with one: the costliest are first.
    rayon::broadcast(|_| {
        let (mut scratch, mut few_scratch) = (lanes::Scratch::default(), few::Scratch::default());
        while let Some(tile) = tiles.get(next.fetch_add(1, Ordering::Relaxed)).filter(|_| !cancelled()) {
            if problem.lengths(tile.entry).0 <= few::QUERIES {
                arch.dispatch(few::Job { call: &call, tile, partials: &partials, scratch: &mut few_scratch });
            } else {
                arch.dispatch(lanes::Job { call: &call, tile, partials: &partials, scratch: &mut scratch });
            }
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if let Some(progress) = options.progress {
                progress(done, tiles.len());
            }
        }
    });
    if cancelled() {
        return Err(Error::Cancelled);
    }
    let mut out = Vec::new();
    for tile in &tiles {
        if let Some(part) = tile.part.filter(|part| part.index == 0) {
            // SAFETY: all threads have ended.
            unsafe { partials.combine(&call, tile, part, &mut out) };
        }
    }
    Ok(())
}

/// Computes a call of host tensors.
///
/// # Errors
/// When the inputs are not the problem's, memory does not suffice, or it is stopped.
pub fn compute(problem: &Problem, inputs: &Inputs, options: Options<'_>) -> Result<Outputs, ComputeError> {
    let layout = Layout::of(problem, inputs)?;
    let Outputs { out, lse } = Outputs::nan(problem)?;
    let (mut out_bytes, mut lse_bytes) = (out.to_bytes()?, lse.to_bytes()?);
    let first = |tensor: &Tensor| tensor.storage()[tensor.offset() * tensor.dtype().bytes()..].as_ptr();
    let memory = Memory {
        q: first(&inputs.q),
        k: first(&inputs.k),
        v: first(&inputs.v),
        out: out_bytes.as_mut_ptr(),
        lse: lse_bytes.as_mut_ptr().cast(),
    };
    // SAFETY: `Layout::of` checked the inputs, whose elements are within their storages; the outputs are contiguous, and ours.
    unsafe { attention(problem, &layout, memory, options)? };
    Ok(Outputs {
        out: Tensor::from_bytes(out.dtype(), out.shape(), out_bytes)?,
        lse: Tensor::from_bytes(lse.dtype(), lse.shape(), lse_bytes)?,
    })
}

/// Why a call of host tensors has no result.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ComputeError {
    /// The inputs are not the problem's.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Host memory does not suffice.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// It was not computed.
    #[error(transparent)]
    Attention(#[from] Error),
}

/// Lanes of a vector.
struct Lanes;

impl pulp::WithSimd for Lanes {
    type Output = usize;

    fn with_simd<S: pulp::Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}
