//! How long a configuration would take if nothing but throughput mattered: what candidates are ranked by before any is timed.
//!
//! It is the emulator's pipe model (`emulator::model`) without a run: the work of each pipe follows from the tiles.
//!
//! - Products: `2 (head_dim + head_dim_v)` operations for each pair of a query and a key in a block that some query of
//!   the tile sees, padding included, at the rate of the tensor cores or of the FMA pipe.
//! - Exponentials: one for each such pair.
//! - Shared memory, on CUDA cores: a thread with `r` rows and `c` columns of a tile loads `r + c` words for `r c`
//!   multiply-adds; 32 words are a wavefront. Tensor cores read their tiles without passing registers.
//! - L2: each tile of queries reads its keys and values.
//!
//! - Blocks: each begins and ends with a wait, which takes some clocks whatever its size.
//!
//! The largest counts in full and the others by a tenth, since no kernel overlaps them wholly; then the tail, as CTAs are dealt
//! out whole. Latency and bank conflicts are not in it. It ranks configurations; what is fastest is measured.

use arch::TensorOperand;
use kernels::config::Config;
use kernels::{Dtype, Problem, Stratum};

use crate::hardware::Hardware;

/// Bytes that L2 serves a multiprocessor per clock where the board's rate is not known: the least of those that are
/// (Volta's 2048 bytes for 80 multiprocessors), rounded up.
const L2_BYTES: f64 = 32.0;

/// Clocks of a block of keys that nothing is computed in: a guess, so that of the same work fewer, larger blocks rank first.
const BLOCK_CLOCKS: f64 = 64.0;

/// Columns of a tile are split among this many lanes (`kernels::tile`).
const LANES: f64 = kernels::tile::GROUP as f64;

/// Clocks of the busiest multiprocessor.
pub fn clocks(hardware: &Hardware, problem: &Problem, stratum: Stratum, config: &Config) -> f64 {
    let (block_q, block_kv) = (config.tiles.block_q as usize, config.tiles.block_kv as usize);
    let Blocks { tiles, pairs_of_blocks } = blocks(problem, block_q, block_kv);
    let heads = problem.heads_q as f64;
    let (tiles, pairs_of_blocks) = (tiles as f64 * heads, pairs_of_blocks as f64 * heads);
    let pairs = pairs_of_blocks * (block_q * block_kv) as f64;
    let (depth, width) = (f64::from(config.padded_head_dim()), f64::from(config.padded_head_dim_v()));
    let rates = hardware.pipe_rates();

    let on_cuda_cores = Stratum::ON_CUDA_CORES.contains(&stratum);
    let operand = match problem.dtype {
        Dtype::F32 => TensorOperand::Tf32,
        Dtype::F16 => TensorOperand::F16,
        Dtype::Bf16 => TensorOperand::Bf16,
        Dtype::E4m3 => TensorOperand::Fp8,
    };
    let tensor = rates.tensor.of(operand).filter(|_| !on_cuda_cores);
    // f32 to nearly its own precision takes three products.
    let times = if tensor.is_some() && problem.dtype == Dtype::F32 && !config.tf32 { 3.0 } else { 1.0 };
    let products = times * 2.0 * pairs * (depth + width) / f64::from(tensor.unwrap_or(2 * rates.fma));
    let exponentials = pairs / f64::from(rates.exp2);
    let shared = if on_cuda_cores {
        let rows = block_q as f64 / (f64::from(config.tiles.threads) / LANES);
        let words = |columns: f64| 1.0 / rows + 1.0 / columns;
        let loaded = pairs * (depth * words(block_kv as f64 / LANES) + width * words(width / LANES));
        loaded / 32.0 / rates.shared_wavefronts
    } else {
        0.0
    };
    let bytes = pairs_of_blocks * block_kv as f64 * (depth + width) * problem.dtype.bytes() as f64;
    let board =
        hardware.board().and_then(|board| Some(f64::from(board.l2_bytes_per_clock?) / f64::from(board.sm_count)));
    let l2 = bytes / board.unwrap_or(L2_BYTES);

    let pipes = [products, exponentials, shared, l2];
    let (sum, most) = (pipes.iter().sum::<f64>(), pipes.into_iter().fold(0.0, f64::max));
    let multiprocessors = f64::from(hardware.multiprocessors.max(1));
    let dealt = (tiles / multiprocessors).ceil().max(1.0) / tiles.max(1.0);
    (most + 0.1 * (sum - most) + BLOCK_CLOCKS * pairs_of_blocks) * dealt
}

/// What the tiles of a call come to, for one head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Blocks {
    /// Tiles of queries.
    tiles: u64,
    /// Pairs of a tile of queries and a block of keys that some of its queries sees.
    pairs_of_blocks: u64,
}

fn blocks(problem: &Problem, block_q: usize, block_kv: usize) -> Blocks {
    let of = |(seqlen_q, seqlen_k): (usize, usize)| {
        let tiles = seqlen_q.div_ceil(block_q);
        let seen = |tile: usize| {
            let first = problem.mask.seen_keys(tile * block_q, seqlen_q, seqlen_k);
            let last = problem.mask.seen_keys(((tile + 1) * block_q - 1).min(seqlen_q - 1), seqlen_q, seqlen_k);
            (last.end.div_ceil(block_kv).saturating_sub(first.start / block_kv)) as u64
        };
        Blocks { tiles: tiles as u64, pairs_of_blocks: (0..tiles).map(seen).sum() }
    };
    if problem.varlen.is_none() {
        let Blocks { tiles, pairs_of_blocks } = of(problem.lengths(0));
        let batch = problem.batch as u64;
        return Blocks { tiles: batch * tiles, pairs_of_blocks: batch * pairs_of_blocks };
    }
    (0..problem.batch).map(|entry| of(problem.lengths(entry))).fold(Blocks::default(), |sum, one| Blocks {
        tiles: sum.tiles + one.tiles,
        pairs_of_blocks: sum.pairs_of_blocks + one.pairs_of_blocks,
    })
}

#[cfg(test)]
mod tests {
    use kernels::{Layout, Mask, ProblemSpec, Tiles};

    use super::*;

    #[test]
    fn blocks_are_those_that_some_query_sees() {
        let blocks = |spec: ProblemSpec, block_q, block_kv| {
            let Blocks { tiles, pairs_of_blocks } = blocks(&spec.build().unwrap(), block_q, block_kv);
            (tiles, pairs_of_blocks)
        };
        let spec = || ProblemSpec::new(2, 3, 128, 64);
        assert_eq!(blocks(spec(), 64, 32), (4, 16));
        assert_eq!(blocks(spec().causal(), 64, 32), (4, 12));
        assert_eq!(blocks(spec().mask(Mask::window(0, 0)), 32, 32), (8, 8));
        assert_eq!(blocks(ProblemSpec::packed(1, 64, vec![0, 64, 64, 164], vec![0, 0, 40, 100]), 64, 32), (3, 4));
        assert_eq!(blocks(ProblemSpec { seqlen_q: 0, ..spec() }, 64, 32), (0, 0));
    }

    #[test]
    fn the_model_ranks_as_it_should() {
        let clocks = |gpu: &str, stratum: Stratum, spec: ProblemSpec, tiles: (u32, u32, u32)| {
            let hardware = Hardware::from(arch::Gpu::find(gpu).unwrap());
            let problem = spec.build().unwrap();
            let (block_q, block_kv, threads) = tiles;
            let options = kernels::Options { tiles: Some(Tiles { block_q, block_kv, threads }), ..Default::default() };
            let target = arch::Target::best(hardware.sm);
            let config =
                kernels::configure(stratum, &problem, target, &Layout::contiguous(&problem), &options).unwrap();
            super::clocks(&hardware, &problem, stratum, &config)
        };
        let spec = || ProblemSpec::new(4, 16, 4096, 64);
        // More of a tile in a thread's registers: fewer words loaded from shared memory.
        assert!(clocks("T4", Stratum::V2, spec(), (32, 32, 128)) < clocks("T4", Stratum::V2, spec(), (16, 16, 128)));
        // A causal mask halves the work of long sequences, about.
        let ratio = clocks("T4", Stratum::V2, spec().causal(), (32, 32, 128))
            / clocks("T4", Stratum::V2, spec(), (32, 32, 128));
        assert!((0.5..0.52).contains(&ratio), "{ratio}");
        // Tensor cores are far ahead; there twice the head dimension is less than twice the work, as exponentials stay the same.
        let half = |dim| ProblemSpec::new(4, 16, 4096, dim).dtype(Dtype::F16);
        let v3 = |dim| clocks("H200", Stratum::V3, half(dim), (128, 128, 384));
        assert!(clocks("H200", Stratum::V2, half(64), (32, 32, 128)) > 4.0 * v3(64));
        assert!((1.5..2.0).contains(&(v3(128) / v3(64))), "{} {}", v3(64), v3(128));
        // Tiles that leave most multiprocessors without work lose.
        let short = || ProblemSpec::new(1, 8, 512, 64).dtype(Dtype::F16);
        assert!(
            clocks("H200", Stratum::V3, short(), (64, 128, 256))
                < clocks("H200", Stratum::V3, short(), (192, 128, 512))
        );
    }
}
