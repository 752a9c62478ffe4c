//! FlashAttention, forward (Dao et al. 2022, algorithm 1): keys and values in the outer loop, queries in the inner one.
//!
//! A tile of keys and values stays in shared memory while all blocks of queries pass by; each block's output `O`, row sums
//! `l` and row maxima `m` come from memory, take the tile in, and go back to memory. `O` is kept divided by `l`, so each
//! step multiplies by the old sum and divides by the new one. One CTA per head: `batch * heads` of them.
//!
//! What it shows: global memory used as registers. With `T = ceil(seqlen_k / block_kv)` tiles of keys, `O`, `l` and `m` are
//! written `T` times and read `T - 1` times, `Q` is read `T` times.
//!
//! `m` lives in `lse` until the last tile a block sees, which writes the logarithm of the sum there instead. `O` lives in
//! `out` when that is f32, otherwise in an f32 workspace, so that it is rounded once.

use ptx::{Compare, KernelError, S32, U32};

use crate::Dtype;
use crate::config::{Config, Program};
use crate::head::Head;
use crate::softmax::{exp_difference, finite_max, log_sum_exp};
use crate::tile::{Fragment, Lanes, Mask, RowVector, SharedMemory, Stream, dot};

/// The kernel.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn v1(config: &Config) -> Result<Program, KernelError> {
    let Config { tiles, causal, vector, .. } = *config;
    let (depth, width) = (config.padded_head_dim(), config.padded_head_dim_v());
    let mut kernel = config.builder("flash_v1");
    let k = &mut kernel;

    // This CTA's head.
    let head = Head::of_cta(k);
    let queries = head.of_query(k, "q", config.head_dim, config.dtype, vector);
    let keys = head.of_key(k, "k", config.head_dim, config.dtype, vector);
    let values = head.of_key(k, "v", config.head_dim_v, config.dtype, vector);
    let out = head.of_query(k, "out", config.head_dim_v, config.dtype, vector);
    let lse = head.per_query(k, "lse");
    let sums = head.per_query(k, "l");
    let state = match config.dtype {
        Dtype::F32 => out,
        _ => head.of_workspace(k, "o", config.head_dim_v, vector),
    };

    // Tiles in shared memory, and how this thread reads them.
    let lanes = Lanes::new(k, tiles.block_q, tiles.threads);
    let mut memory = SharedMemory::default();
    let q_tile = memory.tile(k, "q", tiles.block_q, depth);
    let k_tile = memory.tile(k, "k", tiles.block_kv, depth);
    let v_tile = memory.tile(k, "v", tiles.block_kv, width);
    let p_tile = memory.tile(k, "p", tiles.block_q, tiles.block_kv);
    let (q, p) = (q_tile.own_rows(k, &lanes), p_tile.own_rows(k, &lanes));
    let k_transposed = k_tile.transposed(k, &lanes);
    let v = v_tile.right(k, &lanes);
    let p_own = p_tile.own_elements(k, &lanes);

    let start = k.mov::<U32>(0);
    let key_tiles = Stream::down(k, &lanes, &keys, start, &k_tile);
    let value_tiles = Stream::down(k, &lanes, &values, start, &v_tile);

    // Without keys there is still one step, which writes what a query that sees nothing gets.
    let end = k.max(head.seqlen_k, 1);
    k.for_range(0, end, tiles.block_kv as i32, |k, start| {
        let next_keys = key_tiles.fetch(k);
        let next_values = value_tiles.fetch(k);
        k.bar_sync(0);
        key_tiles.put(k, &next_keys);
        value_tiles.put(k, &next_values);

        // The first tile of keys passes by every query; a later one by those from the diagonal on.
        let is_first = k.setp(Compare::Eq, start, 0);
        let from = k.mov::<S32>(0);
        if causal {
            let offset = k.sub(head.seqlen_k, head.seqlen_q);
            let diagonal = k.sub(start, offset);
            let diagonal = k.max(diagonal, 0);
            let block = k.div(diagonal, tiles.block_q as i32);
            let row = k.mul(block, tiles.block_q as i32);
            k.selp_to(from, 0, row, is_first);
        }
        let query_tiles = Stream::down(k, &lanes, &queries, from.cast(), &q_tile);
        k.for_range(from, head.seqlen_q, tiles.block_q as i32, |k, row| {
            let first = row.cast::<U32>();
            let next_queries = query_tiles.fetch(k);
            k.bar_sync(0);
            query_tiles.put(k, &next_queries);
            k.bar_sync(0);

            // O, l and m of these queries: from memory, but before the first key 0, 0 and minus infinity.
            let o = Fragment::zero(k, lanes.rows, width);
            let l = RowVector::splat(k, lanes.rows, 0.0);
            let m = RowVector::splat(k, lanes.rows, f32::NEG_INFINITY);
            k.if_(!is_first, |k| {
                o.load(k, &head, &lanes, first, &state);
                l.load(k, &head, &lanes, first, sums);
                m.load(k, &head, &lanes, first, lse);
            });

            let s = Fragment::zero(k, lanes.rows, tiles.block_kv);
            dot(k, &s, &q, &k_transposed);
            s.scale(k, head.scale);
            let mask = Mask::new(k, &head, &lanes, first, causal);
            s.mask(k, &mask, start);

            // The tile's own softmax: its maxima, exponentials and sums.
            let m_tile = s.row_max(k);
            for (row, &max) in s.rows().zip(&m_tile.0) {
                let base = finite_max(k, max);
                for &score in row {
                    let exponential = exp_difference(k, score, base);
                    k.mov_to(score, exponential);
                }
            }
            let l_tile = s.row_sum(k);

            // Joined with the state: maxima and sums, and the factors of both sides.
            let (mut before, mut now) = (Vec::new(), Vec::new());
            for row in 0..lanes.rows as usize {
                let m_new = k.max(m.0[row], m_tile.0[row]);
                let base = finite_max(k, m_new);
                let a = exp_difference(k, m.0[row], base);
                let b = exp_difference(k, m_tile.0[row], base);
                let l_before = k.mul(a, l.0[row]);
                k.fma_to(l.0[row], b, l_tile.0[row], l_before);
                k.mov_to(m.0[row], m_new);
                before.push(l_before);
                now.push(b);
            }

            // O = (l e^(m - m_new) O + e^(m_tile - m_new) P V) / l_new
            o.scale_rows(k, &RowVector(before));
            s.scale_rows(k, &RowVector(now));
            s.put(k, &p_own);
            k.bar_warp_sync();
            dot(k, &o, &p, &v);
            o.divide_rows(k, &l);

            // Back to memory; with the last keys that these queries see, the results.
            let row_end = k.add(row, tiles.block_q as i32);
            let visible = head.visible_keys(k, row_end, causal);
            let next = k.add(start, tiles.block_kv as i32);
            let is_last = k.setp(Compare::Ge, next, visible);
            let result = log_sum_exp(k, &m, &l);
            for (&max, &result) in m.0.iter().zip(&result.0) {
                k.selp_to(max, result, max, is_last);
            }
            match config.dtype {
                Dtype::F32 => o.store(k, &head, &lanes, first, &state),
                _ => k.if_else(
                    is_last,
                    |k| o.store(k, &head, &lanes, first, &out),
                    |k| o.store(k, &head, &lanes, first, &state),
                ),
            }
            l.store(k, &head, &lanes, first, sums);
            m.store(k, &head, &lanes, first, lse);
        });
    });
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}
