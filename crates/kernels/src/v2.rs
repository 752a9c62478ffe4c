//! FlashAttention-2, forward (Dao 2023, algorithm 1): a block of queries stays in fast memory, keys and values stream past it.
//!
//! The output, the running maximum and the running sum of a block of queries live in registers from the first key to the
//! last; the output is divided by the sum once, at the end. One CTA per block of queries: `ceil(seqlen_q / block_q)` times
//! `batch * heads` of them.
//!
//! What it shows: keys lie in shared memory as they come, `[block_kv][head_dim]`, and `q k^T` reads them as the transposed
//! factor. Sixteen lanes then read sixteen keys at the same column, which lie `head_dim` words apart: one bank. The line
//! of that product causes nearly all bank conflicts; [`crate::v2_kt`] removes them.

use std::f32::consts::LOG2_E;

use ptx::{KernelError, S32, U32};

use crate::config::{Config, Program};
use crate::head::Head;
use crate::softmax::OnlineSoftmax;
use crate::tile::{Fragment, Lanes, Mask, SharedMemory, Stream, dot};

/// The kernel.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn v2(config: &Config) -> Result<Program, KernelError> {
    let Config { tiles, causal, vector, .. } = *config;
    let (depth, width) = (config.padded_head_dim(), config.padded_head_dim_v());
    let mut kernel = config.builder("flash_v2");
    let k = &mut kernel;

    // This CTA's head, and its block of queries.
    let head = Head::of_cta(k);
    let queries = head.of_query(k, "q", config.head_dim, config.dtype, vector);
    let keys = head.of_key(k, "k", config.head_dim, config.dtype, vector);
    let values = head.of_key(k, "v", config.head_dim_v, config.dtype, vector);
    let out = head.of_query(k, "out", config.head_dim_v, config.dtype, vector);
    let lse = head.per_query(k, "lse");
    let first = k.mul(head.block, tiles.block_q);

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
    Stream::down(k, &lanes, &queries, first, &q_tile).load(k);

    let mask = Mask::new(k, &head, &lanes, first, causal);
    let last = k.add(first.cast::<S32>(), tiles.block_q as i32);
    let visible = head.visible_keys(k, last, causal);
    let scale = k.mul(head.scale, LOG2_E);
    let softmax = OnlineSoftmax::new(k, lanes.rows, width);

    k.for_range(0, visible, tiles.block_kv as i32, |k, start| {
        let next_keys = key_tiles.fetch(k);
        let next_values = value_tiles.fetch(k);
        k.bar_sync(0);
        key_tiles.put(k, &next_keys);
        value_tiles.put(k, &next_values);
        k.bar_sync(0);

        let scores = Fragment::zero(k, lanes.rows, tiles.block_kv);
        dot(k, &scores, &q, &k_transposed);
        scores.scale(k, scale);
        scores.mask(k, &mask, start);

        softmax.absorb(k, &scores);
        scores.put(k, &p_own);
        k.bar_warp_sync();
        dot(k, &softmax.out, &p, &v);
    });

    let (result, sums) = softmax.finish(k);
    result.store(k, &head, &lanes, first, &out);
    sums.store(k, &head, &lanes, first, lse);
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}
