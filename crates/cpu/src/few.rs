//! Tiles of few queries: decoding. An element of a row in each lane, so that keys and values stream past once, as they lie.

use std::ops::Range;

use kernels::Dtype;
use pulp::{Simd, WithSimd};

use crate::buffer::Buffer;
use crate::call::{Call, Rows, widen};
use crate::exp2::exp2;
use crate::lanes::{KEYS, load, store};
use crate::partial::Partials;
use crate::scores::Adjust;
use crate::tiles::Tile;

/// Sequences of at most so many queries are computed here.
pub(crate) const QUERIES: usize = 4;

/// Rows of a tile at most.
pub(crate) const ROWS: usize = 64;

/// Memory of a thread.
#[derive(Default)]
pub(crate) struct Scratch {
    keys: Buffer,
    values: Buffer,
    rows: Vec<Row>,
}

/// Calls a function on four rows at once, and on two and one where fewer are left.
macro_rules! in_groups {
    ($rows:ident, $function:ident, $simd:ident, $($argument:expr),*) => {{
        let (fours, rest) = $rows.as_chunks_mut();
        fours.iter_mut().for_each(|rows| $function::<S, 4>($simd, rows, $($argument),*));
        let (twos, rest) = rest.as_chunks_mut();
        twos.iter_mut().for_each(|rows| $function::<S, 2>($simd, rows, $($argument),*));
        let (ones, _) = rest.as_chunks_mut();
        ones.iter_mut().for_each(|rows| $function::<S, 1>($simd, rows, $($argument),*));
    }};
}

/// A query, and what is known of it.
#[derive(Default)]
struct Row {
    query: Buffer,
    /// Of a block.
    scores: Buffer,
    out: Buffer,
    max: f32,
    sum: f32,
    seen: Range<usize>,
    /// Where its bias is 0.
    diagonal: f32,
    slope: f32,
}

/// A tile to compute.
pub(crate) struct Job<'a> {
    pub call: &'a Call<'a>,
    pub tile: &'a Tile,
    pub partials: &'a Partials,
    pub scratch: &'a mut Scratch,
}

impl WithSimd for Job<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Job { call, tile, partials, scratch } = self;
        let Scratch { keys: key_copies, values: value_copies, rows } = scratch;
        let (keys_of, values_of) = (call.keys(tile.entry, tile.kv_head), call.values(tile.entry, tile.kv_head));
        rows.resize_with(tile.rows.len(), Row::default);
        for (row, r) in rows.iter_mut().zip(tile.rows.clone()) {
            row.begin(call, tile, r);
        }
        for block in tile.keys.start / KEYS..tile.keys.end.div_ceil(KEYS) {
            let range = tile.keys.start.max(block * KEYS)..tile.keys.end.min((block + 1) * KEYS);
            // SAFETY: a tile's keys are the entry's, and the copies outlive the block.
            unsafe {
                let (keys, stride) = streamed(call.dtype(), keys_of, range.clone(), key_copies);
                in_groups!(rows, dot, simd, keys, stride, range.len());
                for row in rows.iter_mut() {
                    row.absorb(simd, call, &range);
                }
                let (values, stride) = streamed(call.dtype(), values_of, range.clone(), value_copies);
                in_groups!(rows, accumulate, simd, values, stride, range.len());
            }
        }
        for (row, r) in rows.iter_mut().zip(tile.rows.clone()) {
            // SAFETY: the row is this tile's alone.
            unsafe { partials.write(call, tile, r, &mut row.out, row.max, row.sum) };
        }
    }
}

/// Some rows as f32: where they lie when they are that, else in `copies`.
///
/// # Safety
/// There are such rows, and they outlive the result.
#[inline(always)]
unsafe fn streamed(dtype: Dtype, rows: Rows, range: Range<usize>, copies: &mut Buffer) -> (*const f32, usize) {
    // SAFETY: as the caller says.
    unsafe {
        match dtype {
            Dtype::F32 => (rows.row(dtype, range.start).cast(), rows.stride),
            _ => {
                rows.copy(dtype, range, rows.dim, copies);
                (copies.as_ptr(), rows.dim)
            }
        }
    }
}

impl Row {
    fn begin(&mut self, call: &Call<'_>, tile: &Tile, row: usize) {
        let problem = call.problem;
        let (seqlen_q, seqlen_k) = problem.lengths(tile.entry);
        let (head, i) = tile.row(problem, row);
        self.query.resize(problem.head_dim);
        // SAFETY: it is a row of the queries.
        unsafe { widen(call.dtype(), call.query(tile.entry, head, i), &mut self.query) };
        self.scores.resize(KEYS);
        self.out.refill(problem.head_dim_v, 0.0);
        (self.max, self.sum) = (f32::NEG_INFINITY, 0.0);
        self.seen = problem.mask.seen_keys(i, seqlen_q, seqlen_k);
        self.diagonal = (i + seqlen_k) as f32 - seqlen_q as f32;
        self.slope = problem.slope(tile.entry, head);
    }

    /// From a block's scores to probabilities; rescales what was summed before.
    #[inline(always)]
    fn absorb<S: Simd>(&mut self, simd: S, call: &Call<'_>, range: &Range<usize>) {
        if !call.plain {
            let Row { diagonal, slope, .. } = *self;
            let scores = &mut self.scores[..range.len()];
            Adjust { problem: call.problem, scores, first: range.start, diagonal, slope }.with_simd(simd);
        }
        let scores = &mut self.scores[..range.len().next_multiple_of(S::F32_LANES)];
        let unseen = |key: usize| key.clamp(range.start, range.end) - range.start;
        let (start, end) = (unseen(self.seen.start), unseen(self.seen.end));
        scores[..start].fill(f32::NEG_INFINITY);
        scores[end.max(start)..].fill(f32::NEG_INFINITY);
        let (scores, _) = S::as_mut_simd_f32s(scores);
        let mut highest = simd.splat_f32s(f32::NEG_INFINITY);
        for vector in scores.iter() {
            highest = simd.max_f32s(highest, *vector);
        }
        let max = self.max.max(simd.reduce_max_f32s(highest));
        // Where nothing was seen yet the maximum is minus infinity, which must not be subtracted from itself.
        let subtract = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let rescale = ((self.max - subtract) * call.scale_log2).exp2();
        let mut sum = simd.splat_f32s(0.0);
        for vector in scores {
            let above = simd.sub_f32s(*vector, simd.splat_f32s(subtract));
            *vector = exp2(simd, simd.mul_f32s(above, simd.splat_f32s(call.scale_log2)));
            sum = simd.add_f32s(sum, *vector);
        }
        self.max = max;
        self.sum = self.sum * rescale + simd.reduce_sum_f32s(sum);
        self.out.iter_mut().for_each(|element| *element *= rescale);
    }
}

/// The products of `count` keys with the queries.
///
/// # Safety
/// There are so many rows of keys.
#[inline(always)]
unsafe fn dot<S: Simd, const R: usize>(
    simd: S,
    rows: &mut [Row; R],
    keys: *const f32,
    stride: usize,
    count: usize,
) {
    /// Keys at once: their sums do not wait for each other.
    const AT_ONCE: usize = 4;
    let depth = rows[0].query.len();
    let vectors = depth / S::F32_LANES;
    // SAFETY: as the caller says; where fewer keys are left, the last one is read again.
    unsafe {
        for first in (0..count).step_by(AT_ONCE) {
            let mut sums = [[simd.splat_f32s(0.0); R]; AT_ONCE];
            let mut key = [keys; AT_ONCE];
            for a in 0..AT_ONCE {
                key[a] = keys.add((first + a).min(count - 1) * stride);
            }
            for v in 0..vectors {
                for r in 0..R {
                    let query = load::<S>(rows[r].query.as_ptr().add(v * S::F32_LANES));
                    for a in 0..AT_ONCE {
                        let key = load::<S>(key[a].add(v * S::F32_LANES));
                        sums[a][r] = simd.mul_add_e_f32s(query, key, sums[a][r]);
                    }
                }
            }
            for a in 0..AT_ONCE.min(count - first) {
                for r in 0..R {
                    let mut sum = simd.reduce_sum_f32s(sums[a][r]);
                    for k in vectors * S::F32_LANES..depth {
                        sum += rows[r].query[k] * *key[a].add(k);
                    }
                    rows[r].scores[first + a] = sum;
                }
            }
        }
    }
}

/// Adds to the output the values by the probabilities of `count` keys.
///
/// # Safety
/// There are so many rows of values.
#[inline(always)]
unsafe fn accumulate<S: Simd, const R: usize>(
    simd: S,
    rows: &mut [Row; R],
    values: *const f32,
    stride: usize,
    count: usize,
) {
    /// Vectors of columns at once.
    const AT_ONCE: usize = 4;
    let width = rows[0].out.len();
    let wide = AT_ONCE * S::F32_LANES;
    // SAFETY: as the caller says.
    unsafe {
        let mut column = 0;
        while column + wide <= width {
            let mut sums = [[simd.splat_f32s(0.0); AT_ONCE]; R];
            for r in 0..R {
                for a in 0..AT_ONCE {
                    sums[r][a] = load::<S>(rows[r].out.as_ptr().add(column + a * S::F32_LANES));
                }
            }
            for k in 0..count {
                for a in 0..AT_ONCE {
                    let value = load::<S>(values.add(k * stride + column + a * S::F32_LANES));
                    for r in 0..R {
                        let probability = simd.splat_f32s(rows[r].scores[k]);
                        sums[r][a] = simd.mul_add_e_f32s(value, probability, sums[r][a]);
                    }
                }
            }
            for r in 0..R {
                for a in 0..AT_ONCE {
                    store::<S>(rows[r].out.as_mut_ptr().add(column + a * S::F32_LANES), sums[r][a]);
                }
            }
            column += wide;
        }
        for k in 0..count {
            for row in rows.iter_mut() {
                let probability = row.scores[k];
                for c in column..width {
                    row.out[c] += probability * *values.add(k * stride + c);
                }
            }
        }
    }
}
