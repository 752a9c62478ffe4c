//! Attention on the processor at hand.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod buffer;
mod cache;
mod call;
mod exp2;
mod few;
mod instructions;
mod lanes;
mod partial;
mod scores;
mod tiles;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kernels::{InputError, Inputs, Layout, Outputs, Problem, ProblemError, Tensor, TensorError};
use thiserror::Error;

pub use cache::NewMemory;
pub use call::Memory;
pub use instructions::Instructions;

use call::Call;
use partial::Partials;

/// How a call is computed.
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    /// Stops when it becomes true.
    pub cancel: Option<&'a AtomicBool>,
    /// What it is computed with; the best by default.
    pub instructions: Option<Instructions>,
    /// Is told of tiles that are done, and of how many.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
}

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Error)]
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
    /// Keys of a cache that are more together than can be.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

/// Computes a call on the threads of the current rayon pool.
///
/// # Safety
/// Each of `memory`'s tensors is at its type's alignment and reaches as far as `layout` says for `problem`; nobody writes the
/// inputs meanwhile, nor touches the outputs, whose rows do not overlap. What the problem appends to a cache is in `memory`, and
/// nobody touches the cache.
pub unsafe fn attention(problem: &Problem, layout: &Layout, memory: Memory, options: Options<'_>) -> Result<(), Error> {
    if let Some(cache) = &problem.cache {
        // SAFETY: as the caller says.
        return unsafe { cache::of_cache(problem, cache, layout, memory, options) };
    }
    let call = Call::new(problem, layout, memory);
    let engine = Engine::of(problem, options.instructions.unwrap_or_else(Instructions::best));
    let threads = rayon::current_num_threads();
    let (height, block) = engine.tile(problem.total_q() * problem.heads_q, threads);
    let (tiles, rows) = tiles::tiles(problem, height, block, threads);
    let bytes = (rows * (problem.head_dim_v + 2) * 4) as u64;
    let partials = Partials::new(problem, rows).ok_or(Error::Memory { bytes })?;
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let cancelled = || options.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed));
    // Each thread takes the next tile when it is done with one: the costliest are first.
    rayon::broadcast(|_| {
        SCRATCH.with_borrow_mut(|scratch| {
            while let Some(tile) = tiles.get(next.fetch_add(1, Ordering::Relaxed)).filter(|_| !cancelled()) {
                engine.run(&call, tile, &partials, scratch);
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                if let Some(progress) = options.progress {
                    progress(done, tiles.len());
                }
            }
        });
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

/// What computes tiles.
#[derive(Clone, Copy, Debug)]
enum Engine {
    /// Vectors, a query in each lane.
    Lanes(Instructions),
    /// The matrix unit.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(amx::Amx),
    /// Vectors along rows.
    Few(Instructions),
}

/// Memory of a thread, whatever computes.
#[derive(Default)]
struct Scratch {
    lanes: lanes::Scratch,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    amx: amx::Scratch,
    few: few::Scratch,
}

thread_local! {
    /// Kept from call to call: its pages need not be made anew.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Engine {
    /// What is fastest for a problem; the same for all of a call, so that heads that share keys are computed like others.
    fn of(problem: &Problem, instructions: Instructions) -> Engine {
        let longest = (0..problem.batch).map(|entry| problem.lengths(entry).0).max().unwrap_or(0);
        if longest <= few::QUERIES {
            return Engine::Few(instructions);
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Some(amx) = instructions.amx.filter(|_| problem.dtype == kernels::Dtype::Bf16) {
            return Engine::Amx(amx);
        }
        Engine::Lanes(instructions)
    }

    /// Rows of a tile, where so many are divided among so many threads, and keys of a block.
    fn tile(self, rows: usize, threads: usize) -> (usize, usize) {
        match self {
            Engine::Lanes(with) => (lanes::height(with.lanes(), rows, threads), lanes::KEYS),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Engine::Amx(_) => (amx::height(rows, threads), amx::KEYS),
            Engine::Few(_) => (few::ROWS, lanes::KEYS),
        }
    }

    fn run(self, call: &Call<'_>, tile: &tiles::Tile, partials: &Partials, scratch: &mut Scratch) {
        match self {
            Engine::Lanes(with) => {
                with.run(lanes::Job { call, tile, partials, scratch: &mut scratch.lanes });
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Engine::Amx(amx) => amx::Job { amx, call, tile, partials, scratch: &mut scratch.amx }.run(),
            Engine::Few(with) => with.run(few::Job { call, tile, partials, scratch: &mut scratch.few }),
        }
    }
}

/// Computes a call of host tensors.
///
/// # Errors
/// When the inputs are not the problem's, memory does not suffice, or it is stopped.
pub fn compute(problem: &Problem, inputs: &Inputs, options: Options<'_>) -> Result<Outputs, ComputeError> {
    if inputs.new.is_some() {
        inputs.check(problem)?;
    }
    // A cache that is written is a copy.
    let written =
        inputs.new.is_some().then(|| -> Result<_, TensorError> { Ok((inputs.k.to_bytes()?, inputs.v.to_bytes()?)) });
    let mut written = written.transpose()?;
    let mut layout = Layout::of(problem, inputs)?;
    if written.is_some() {
        let contiguous = Layout::contiguous(problem);
        (layout.k, layout.v) = (contiguous.k, contiguous.v);
    }
    let Outputs { out, lse } = Outputs::nan(problem)?;
    let (mut out_bytes, mut lse_bytes) = (out.to_bytes()?, lse.to_bytes()?);
    // (A tensor without elements may begin anywhere.)
    let first = |tensor: &Tensor| tensor.storage().as_ptr().wrapping_add(tensor.offset() * tensor.dtype().bytes());
    let memory = Memory {
        q: first(&inputs.q),
        k: written.as_mut().map_or(first(&inputs.k), |(k, _)| k.as_mut_ptr()),
        v: written.as_mut().map_or(first(&inputs.v), |(_, v)| v.as_mut_ptr()),
        out: out_bytes.as_mut_ptr(),
        lse: lse_bytes.as_mut_ptr().cast(),
        new: inputs.new.as_ref().map(|new| NewMemory {
            k: first(&new.k),
            v: first(&new.v),
            rotary: new.rotary.as_ref().map(|[cos, sin]| [first(cos), first(sin)]),
        }),
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
