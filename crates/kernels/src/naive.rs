//! Attention as its definition reads: three kernels, with the scores of every query and key in memory between them.
//!
//! `S = scale Q K^T`, then `P = exp(S - max)` with the row sums `l`, then `O = P V / l`. Scores and exponentials are f32 and
//! share one workspace `[batch, heads, seqlen_q, seqlen]`, `seqlen` being `seqlen_k` rounded up to whole tiles.
//!
//! What it shows: memory that grows with the square of the length, written twice and read three times.

use ptx::{Compare, F32, Global, KernelBuilder, KernelError, Pointer, Reg, S32, U32};

use crate::config::{Config, Program};
use crate::head::{Head, Matrix};
use crate::softmax::{exp_difference, finite_max, log_sum_exp};
use crate::tile::{Fragment, GROUP, Lanes, Mask, RowVector, SharedMemory, Stream, dot};

/// `S = scale Q K^T`, minus infinity where a query does not see a key. Blocks of a head: keys fastest, then queries.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn scores(config: &Config) -> Result<Program, KernelError> {
    let Config { tiles, causal, vector, .. } = *config;
    let depth = config.padded_head_dim();
    let mut kernel = config.builder("naive_scores");
    let k = &mut kernel;

    let head = Head::of_cta(k);
    let key_blocks = k.param::<U32>("key_blocks");
    let queries = head.of_query(k, "q", config.head_dim, config.dtype, vector);
    let keys = head.of_key(k, "k", config.head_dim, config.dtype, vector);
    let scores = head.of_workspace(k, "scores", tiles.block_kv, 4);
    let (query_block, key_block) = (k.div(head.block, key_blocks), k.rem(head.block, key_blocks));
    let first = k.mul(query_block, tiles.block_q);
    let start = k.mul(key_block, tiles.block_kv);

    let lanes = Lanes::new(k, tiles.block_q, tiles.threads);
    let mut memory = SharedMemory::default();
    let q_tile = memory.tile(k, "q", tiles.block_q, depth);
    let k_tile = memory.tile(k, "k", tiles.block_kv, depth);
    Stream::down(k, &lanes, &queries, first, &q_tile).load(k);
    Stream::down(k, &lanes, &keys, start, &k_tile).load(k);
    k.bar_sync(0);

    let (q, k_transposed) = (q_tile.own_rows(k, &lanes), k_tile.transposed(k, &lanes));
    let s = Fragment::zero(k, lanes.rows, tiles.block_kv);
    dot(k, &s, &q, &k_transposed);
    s.scale(k, head.scale);
    let mask = Mask::new(k, &head, &lanes, first, causal);
    s.mask(k, &mask, start.cast());
    let block = Matrix { base: k.mad_wide(start, 4, scores.base), ..scores };
    s.store(k, &head, &lanes, first, &block);
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}

/// `P = exp(S - max)` in place, `l` its row sums and `lse = max + ln l`. One warp per query.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn softmax(config: &Config) -> Result<Program, KernelError> {
    const WARP: u32 = 2 * GROUP;
    const VECTOR: u32 = 4;
    let mut kernel = config.builder("naive_softmax");
    let k = &mut kernel;

    let head = Head::of_cta(k);
    let columns = k.param::<U32>("score_columns");
    let scores = head.of_workspace(k, "scores", 0, VECTOR);
    let sums = head.per_query(k, "l");
    let lse = head.per_query(k, "lse");

    let thread = k.tid_x();
    let (lane, warp) = (k.and(thread, WARP - 1), k.shr(thread, WARP.ilog2()));
    let row = k.mad(head.block, config.tiles.threads / WARP, warp);
    let there = head.has_query(k, row);
    k.if_(there, |k| {
        let start = scores.row(k, row);
        let first = k.mul(lane, VECTOR);
        let for_each_vector = |k: &mut KernelBuilder, body: &dyn Fn(&mut KernelBuilder, Pointer<Global>)| {
            k.for_range(first, columns, WARP * VECTOR, |k, column| {
                let place = k.mad_wide(column, 4, start);
                body(k, Pointer::at(place));
            });
        };

        let max = k.mov::<F32>(f32::NEG_INFINITY);
        for_each_vector(k, &|k, place| {
            for score in k.ld_vec::<F32, _>(VECTOR as usize, place) {
                k.max_to(max, max, score);
            }
        });
        across_warp(k, max, KernelBuilder::max);

        let base = finite_max(k, max);
        let sum = k.mov::<F32>(0.0);
        for_each_vector(k, &|k, place| {
            let scores = k.ld_vec::<F32, _>(VECTOR as usize, place);
            let exponentials: Vec<_> = scores.into_iter().map(|score| exp_difference(k, score, base)).collect();
            exponentials.iter().for_each(|&exponential| k.add_to(sum, sum, exponential));
            k.st_vec(place, &exponentials);
        });
        across_warp(k, sum, KernelBuilder::add);

        let result = log_sum_exp(k, &RowVector(vec![max]), &RowVector(vec![sum]));
        let (to_sum, to_lse) = (k.mad_wide(row, 4, sums), k.mad_wide(row, 4, lse));
        let one_lane = k.setp(Compare::Eq, lane, 0);
        k.when(one_lane, |k| {
            k.st(Pointer::<Global>::at(to_sum), sum);
            k.st(Pointer::<Global>::at(to_lse), result.0[0]);
        });
    });
    Ok(Program { kernel: kernel.finish()?, shared: SharedMemory::default() })
}

/// Joins the values of a warp's lanes, in all of them.
#[track_caller]
fn across_warp(k: &mut KernelBuilder, value: Reg<F32>, join: fn(&mut KernelBuilder, Reg<F32>, Reg<F32>) -> Reg<F32>) {
    k.at(std::panic::Location::caller(), |k| {
        for lane_mask in [16, 8, 4, 2, 1] {
            let other = k.shfl_bfly(value, lane_mask);
            let joined = join(k, value, other);
            k.mov_to(value, joined);
        }
    });
}

/// `O = P V / l`.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn output(config: &Config) -> Result<Program, KernelError> {
    let Config { tiles, vector, .. } = *config;
    let width = config.padded_head_dim_v();
    let mut kernel = config.builder("naive_output");
    let k = &mut kernel;

    let head = Head::of_cta(k);
    let scores = head.of_workspace(k, "scores", tiles.block_kv, 4);
    let sums = head.per_query(k, "l");
    let values = head.of_key(k, "v", config.head_dim_v, config.dtype, vector);
    let out = head.of_query(k, "out", config.head_dim_v, config.dtype, vector);
    let first = k.mul(head.block, tiles.block_q);

    let lanes = Lanes::new(k, tiles.block_q, tiles.threads);
    let mut memory = SharedMemory::default();
    let p_tile = memory.tile(k, "p", tiles.block_q, tiles.block_kv);
    let v_tile = memory.tile(k, "v", tiles.block_kv, width);
    let (p, v) = (p_tile.own_rows(k, &lanes), v_tile.right(k, &lanes));
    let start = k.mov::<U32>(0);
    let score_tiles = Stream::along(k, &lanes, &scores, first, &p_tile);
    let value_tiles = Stream::down(k, &lanes, &values, start, &v_tile);

    let o = Fragment::zero(k, lanes.rows, width);
    k.for_range::<S32>(0, head.seqlen_k, tiles.block_kv as i32, |k, _| {
        let next_scores = score_tiles.fetch(k);
        let next_values = value_tiles.fetch(k);
        k.bar_sync(0);
        score_tiles.put(k, &next_scores);
        value_tiles.put(k, &next_values);
        k.bar_sync(0);
        dot(k, &o, &p, &v);
    });
    let l = RowVector::splat(k, lanes.rows, 0.0);
    l.load(k, &head, &lanes, first, sums);
    o.divide_rows(k, &l);
    o.store(k, &head, &lanes, first, &out);
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}
