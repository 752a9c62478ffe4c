//! FlashAttention-2 with the keys transposed before the kernel.
//!
//! A kernel of its own first writes `K^T [batch, heads_kv, head_dim, seqlen_k]`. The attention kernel is [`crate::v2`] but
//! for the lines that load and use the keys: its key tile is `[head_dim][block_kv]`, the sixteen lanes that share a query
//! read neighbouring keys, and no two of them meet in a bank.
//!
//! What it shows: the conflicts of `v2` are gone for the price of reading and writing the keys once more. What is left is
//! the shared-memory pipe feeding plain multiply-adds; only tensor cores remove that.

use std::f32::consts::LOG2_E;

use ptx::{Compare, F32, Global, KernelBuilder, KernelError, Pointer, Reg, S32, Shared, U32};

use crate::config::{Config, Program};
use crate::convert::Words;
use crate::head::{Head, Matrix};
use crate::softmax::OnlineSoftmax;
use crate::tile::{Fragment, Lanes, Mask, SharedMemory, Stream, dot};

/// The attention kernel.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn v2_kt(config: &Config) -> Result<Program, KernelError> {
    let Config { tiles, causal, vector, .. } = *config;
    let (depth, width) = (config.padded_head_dim(), config.padded_head_dim_v());
    let mut kernel = config.builder("flash_v2_kt");
    let k = &mut kernel;

    // This CTA's head, and its block of queries.
    let head = Head::of_cta(k);
    let queries = head.of_query(k, "q", config.head_dim, config.dtype, vector);
    let head_dim = k.mov::<S32>(config.head_dim as i32);
    let keys = Matrix { rows: head_dim, ..head.of_key(k, "k_transposed", tiles.block_kv, config.dtype, 4) };
    let values = head.of_key(k, "v", config.head_dim_v, config.dtype, vector);
    let out = head.of_query(k, "out", config.head_dim_v, config.dtype, vector);
    let lse = head.per_query(k, "lse");
    let first = k.mul(head.block, tiles.block_q);

    // Tiles in shared memory, and how this thread reads them.
    let lanes = Lanes::new(k, tiles.block_q, tiles.threads);
    let mut memory = SharedMemory::default();
    let q_tile = memory.tile(k, "q", tiles.block_q, depth);
    let k_tile = memory.tile(k, "k", depth, tiles.block_kv);
    let v_tile = memory.tile(k, "v", tiles.block_kv, width);
    let p_tile = memory.tile(k, "p", tiles.block_q, tiles.block_kv);
    let (q, p) = (q_tile.own_rows(k, &lanes), p_tile.own_rows(k, &lanes));
    let k_straight = k_tile.right(k, &lanes);
    let v = v_tile.right(k, &lanes);
    let p_own = p_tile.own_elements(k, &lanes);

    let start = k.mov::<U32>(0);
    let key_tiles = Stream::along(k, &lanes, &keys, start, &k_tile);
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
        dot(k, &scores, &q, &k_straight);
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

/// Keys and dimensions that one CTA of [`transpose_keys`] handles.
pub const TRANSPOSED: u32 = 32;

/// The transposing kernel: `[batch, seqlen_k, heads_kv, head_dim]` to `[batch, heads_kv, head_dim, seqlen]`, where `seqlen` is
/// `seqlen_k` rounded up to whole tiles and what is past `seqlen_k` is 0.
///
/// A square of 32 x 32 goes through shared memory, in rows of 33 words so that neither its rows nor its columns meet in
/// a bank. Blocks of a head: dimensions fastest, then keys.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn transpose_keys(config: &Config) -> Result<Program, KernelError> {
    const THREADS: u32 = 128;
    const PITCH: u32 = TRANSPOSED + 1;
    let mut kernel = config.builder("transpose_keys");
    let k = &mut kernel;
    k.require_block([THREADS, 1, 1]);

    let head = Head::of_cta(k);
    let from = head.of_key(k, "k", config.head_dim, config.dtype, 1);
    let to = head.of_key(k, "k_transposed", 0, config.dtype, 1);
    let bytes = config.dtype.bytes() as u32;

    let across = config.head_dim.div_ceil(TRANSPOSED);
    let key_block = k.div(head.block, across);
    let dim_block = k.rem(head.block, across);
    let (first_key, first_dim) = (k.mul(key_block, TRANSPOSED), k.mul(dim_block, TRANSPOSED));
    let thread = k.tid_x();
    let (lane, warp) = (k.and(thread, 31), k.shr(thread, 5));

    let mut memory = SharedMemory::default();
    let square = memory.tile(k, "k", TRANSPOSED, PITCH).address(k);
    let place = |k: &mut KernelBuilder, row: Reg<U32>, column: Reg<U32>| {
        let element = k.mad(row, PITCH, column);
        Pointer::<Shared>::at(k.mad(element, 4, square))
    };

    let dim = k.add(first_dim, lane);
    let dim_there = k.setp(Compare::Lt, dim, config.head_dim);
    for step in (0..TRANSPOSED).step_by(THREADS as usize / 32) {
        let row = k.add(warp, step);
        let key = k.add(first_key, row);
        let there = k.setp_and(Compare::Lt, key.cast::<S32>(), head.seqlen_k, dim_there);
        let source = from.row(k, key);
        let source = k.mad_wide(dim, bytes, source);
        let word = Words::zero(k, config.dtype, 1);
        k.when(there, |k| word.load(k, Pointer::<Global>::at(source)));
        let value = word.widen(k, config.dtype)[0];
        let to = place(k, row, lane);
        k.st(to, value);
    }
    k.bar_sync(0);
    let key = k.add(first_key, lane);
    for step in (0..TRANSPOSED).step_by(THREADS as usize / 32) {
        let row = k.add(warp, step);
        let dim = k.add(first_dim, row);
        let there = k.setp(Compare::Lt, dim, config.head_dim);
        let source = place(k, lane, row);
        let value = k.ld::<F32, _>(source);
        let word = Words::narrow(k, config.dtype, &[value]);
        let target = to.row(k, dim);
        let target = k.mad_wide(key, bytes, target);
        k.when(there, |k| word.store(k, Pointer::<Global>::at(target)));
    }
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}
