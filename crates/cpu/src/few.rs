//! Tiles of few queries: decoding. An element of a row in each lane, so that keys and values stream past once, as they lie.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::buffer::Buffer;
use crate::call::{Call, Element, Rows, prefetch, widen};
use crate::exp2::exp2;
use crate::lanes::{KEYS, load, store};
use crate::partial::Partials;
use crate::scores::Adjust;
use crate::tiles::{Sight, Tile};

/// Sequences of at most so many queries are computed here.
pub(crate) const QUERIES: usize = 4;

/// Rows of a tile at most.
pub(crate) const ROWS: usize = 64;

/// Memory of a thread.
#[derive(Default)]
pub(crate) struct Scratch {
    copies: Buffer,
    row: Vec<f32>,
    rows: Vec<Row>,
}

/// Calls a function on four rows at once, and on two and one where fewer are left.
macro_rules! in_groups {
    ($rows:ident, $function:ident, $pairs:ident, $simd:ident, $($argument:expr),*) => {{
        let (fours, rest) = $rows.as_chunks_mut();
        fours.iter_mut().for_each(|rows| $function::<S, $pairs, 4>($simd, rows, $($argument),*));
        let (twos, rest) = rest.as_chunks_mut();
        twos.iter_mut().for_each(|rows| $function::<S, $pairs, 2>($simd, rows, $($argument),*));
        let (ones, _) = rest.as_chunks_mut();
        ones.iter_mut().for_each(|rows| $function::<S, $pairs, 1>($simd, rows, $($argument),*));
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
    sight: Sight,
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
        match self.call.element {
            Element::Bf16 => self.run::<S, true>(simd),
            Element::F32 | Element::F16 => self.run::<S, false>(simd),
        }
    }
}

impl Job<'_> {
    #[inline(always)]
    fn run<S: Simd, const PAIRS: bool>(self, simd: S) {
        let Job { call, tile, partials, scratch } = self;
        let Scratch { copies, row: reordered, rows } = scratch;
        let (keys_of, values_of) = (call.keys(tile.entry, tile.kv_head), call.values(tile.entry, tile.kv_head));
        rows.resize_with(tile.rows.len(), Row::default);
        for (row, r) in rows.iter_mut().zip(tile.rows.clone()) {
            row.begin(call, tile, r);
            if PAIRS {
                reorder(&mut row.query, S::F32_LANES, false, reordered);
            }
        }
        for range in tile.blocks(KEYS) {
            // SAFETY: a tile's keys are the entry's, and copies are made anew when those before are done with.
            unsafe {
                let keys = streamed::<PAIRS>(call.element, keys_of, range.clone(), copies);
                in_groups!(rows, dot, PAIRS, simd, keys, range.len());
                for row in rows.iter_mut() {
                    row.absorb(simd, call, &range);
                }
                let values = streamed::<PAIRS>(call.element, values_of, range.clone(), copies);
                in_groups!(rows, accumulate, PAIRS, simd, values, range.len());
            }
        }
        for (row, r) in rows.iter_mut().zip(tile.rows.clone()) {
            if PAIRS {
                reorder(&mut row.out, S::F32_LANES, true, reordered);
            }
            // SAFETY: the row is this tile's alone.
            unsafe { partials.write(call, tile, r, &mut row.out, row.max, row.sum) };
        }
    }
}

/// Some rows where they lie; f16 as f32 in `copies`.
///
/// # Safety
/// There are such rows, and they outlive the result.
#[inline(always)]
unsafe fn streamed<const PAIRS: bool>(
    element: Element,
    rows: Rows,
    range: Range<usize>,
    copies: &mut Buffer,
) -> Streamed<PAIRS> {
    // SAFETY: as the caller says.
    unsafe {
        if element == Element::F16 {
            rows.copy(element, range, rows.dim, copies);
            return Streamed { first: copies.as_ptr().cast(), stride: rows.dim * 4 };
        }
        Streamed { first: rows.row(element, range.start), stride: rows.stride * element.bytes() }
    }
}

impl Row {
    fn begin(&mut self, call: &Call<'_>, tile: &Tile, row: usize) {
        let problem = call.problem;
        let (head, i) = tile.row(problem, row);
        self.query.resize(problem.head_dim);
        // SAFETY: it is a row of the queries.
        unsafe { widen(call.element, call.query(tile.entry, head, i), &mut self.query) };
        self.scores.resize(KEYS);
        self.out.refill(problem.head_dim_v, 0.0);
        (self.max, self.sum) = (f32::NEG_INFINITY, 0.0);
        self.sight = tile.sight(problem, row);
    }

    /// From a block's scores to probabilities; rescales what was summed before.
    #[inline(always)]
    fn absorb<S: Simd>(&mut self, simd: S, call: &Call<'_>, range: &Range<usize>) {
        if !call.plain {
            let scores = &mut self.scores[..range.len()];
            Adjust { problem: call.problem, scores, first: range.start, sight: &self.sight }.with_simd(simd);
        }
        let scores = &mut self.scores[..range.len().next_multiple_of(S::F32_LANES)];
        let unseen = |key: usize| key.clamp(range.start, range.end) - range.start;
        let (start, end) = (unseen(self.sight.seen.start), unseen(self.sight.seen.end));
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

/// Rows of keys or of values, as they lie: f32, or bf16 where `PAIRS`.
#[derive(Clone, Copy)]
struct Streamed<const PAIRS: bool> {
    first: *const u8,
    /// Bytes.
    stride: usize,
}

/// Rows that are asked for before they are read: a processor by itself does not read on past a page.
const AHEAD: usize = 16;

impl<const PAIRS: bool> Streamed<PAIRS> {
    /// Asks for some of what [`Streamed::pair`] reads of a row.
    #[inline(always)]
    fn prefetch<S: Simd>(self, row: usize, pairs: Range<usize>) {
        let bytes = S::F32_LANES * if PAIRS { 4 } else { 8 };
        let first = self.first.wrapping_add(row * self.stride + pairs.start * bytes);
        prefetch::<true>(first, pairs.len() * bytes);
    }

    /// Two vectors' worth of a row's elements: one after the other, or the even ones and the odd ones.
    ///
    /// # Safety
    /// There are so many.
    #[inline(always)]
    unsafe fn pair<S: Simd>(self, simd: S, row: usize, at: usize) -> [S::f32s; 2] {
        // SAFETY: as the caller says.
        unsafe {
            let row = self.first.add(row * self.stride);
            if !PAIRS {
                let from = row.cast::<f32>().add(2 * at * S::F32_LANES);
                return [load::<S>(from), load::<S>(from.add(S::F32_LANES))];
            }
            // The upper half of an f32 is a bf16.
            let words = row.cast::<u32>().add(at * S::F32_LANES).cast::<S::u32s>().read_unaligned();
            let even = simd.wrapping_dyn_shl_u32s(words, simd.splat_u32s(16));
            let odd = simd.and_u32s(words, simd.splat_u32s(0xffff_0000));
            [simd.transmute_f32s_u32s(even), simd.transmute_f32s_u32s(odd)]
        }
    }

    /// One element of a row.
    ///
    /// # Safety
    /// There is such an element.
    #[inline(always)]
    unsafe fn element(self, row: usize, column: usize) -> f32 {
        // SAFETY: as the caller says.
        unsafe {
            let row = self.first.add(row * self.stride);
            match PAIRS {
                true => f32::from_bits(u32::from(*row.cast::<u16>().add(column)) << 16),
                false => *row.cast::<f32>().add(column),
            }
        }
    }
}

/// Puts a row in the order that [`Streamed::pair`] reads it in, or back.
fn reorder(row: &mut [f32], lanes: usize, back: bool, copy: &mut Vec<f32>) {
    for pair in row.chunks_exact_mut(2 * lanes) {
        copy.clear();
        copy.extend_from_slice(pair);
        for lane in 0..lanes {
            for odd in 0..2 {
                let (natural, split) = (2 * lane + odd, odd * lanes + lane);
                let (from, to) = if back { (split, natural) } else { (natural, split) };
                pair[to] = copy[from];
            }
        }
    }
}

/// The products of `count` keys with the queries.
///
/// # Safety
/// There are so many rows of keys.
#[inline(always)]
unsafe fn dot<S: Simd, const PAIRS: bool, const R: usize>(
    simd: S,
    rows: &mut [Row; R],
    keys: Streamed<PAIRS>,
    count: usize,
) {
    /// Keys at once: their sums do not wait for each other.
    const AT_ONCE: usize = 4;
    let depth = rows[0].query.len();
    let pairs = depth / (2 * S::F32_LANES);
    // SAFETY: as the caller says; where fewer keys are left, the last one is read again.
    unsafe {
        for first in (0..count).step_by(AT_ONCE) {
            let mut sums = [[simd.splat_f32s(0.0); R]; AT_ONCE];
            for a in 0..AT_ONCE {
                keys.prefetch::<S>(first + a + AHEAD, 0..pairs);
            }
            for pair in 0..pairs {
                for a in 0..AT_ONCE {
                    let [even, odd] = keys.pair(simd, (first + a).min(count - 1), pair);
                    for r in 0..R {
                        let query = rows[r].query.as_ptr().add(2 * pair * S::F32_LANES);
                        sums[a][r] = simd.mul_add_e_f32s(load::<S>(query), even, sums[a][r]);
                        sums[a][r] = simd.mul_add_e_f32s(load::<S>(query.add(S::F32_LANES)), odd, sums[a][r]);
                    }
                }
            }
            for a in 0..AT_ONCE.min(count - first) {
                for r in 0..R {
                    let mut sum = simd.reduce_sum_f32s(sums[a][r]);
                    for k in 2 * pairs * S::F32_LANES..depth {
                        sum += rows[r].query[k] * keys.element(first + a, k);
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
unsafe fn accumulate<S: Simd, const PAIRS: bool, const R: usize>(
    simd: S,
    rows: &mut [Row; R],
    values: Streamed<PAIRS>,
    count: usize,
) {
    let width = rows[0].out.len();
    let pairs = width / (2 * S::F32_LANES);
    // SAFETY: as the caller says.
    unsafe {
        let mut pair = 0;
        while pair + 4 <= pairs && R == 1 {
            columns::<S, PAIRS, R, 4>(simd, rows, values, count, pair);
            pair += 4;
        }
        while pair + 2 <= pairs {
            columns::<S, PAIRS, R, 2>(simd, rows, values, count, pair);
            pair += 2;
        }
        while pair < pairs {
            columns::<S, PAIRS, R, 1>(simd, rows, values, count, pair);
            pair += 1;
        }
        for k in 0..count {
            for row in rows.iter_mut() {
                let probability = row.scores[k];
                for c in 2 * pairs * S::F32_LANES..width {
                    row.out[c] += probability * values.element(k, c);
                }
            }
        }
    }
}

/// `C` pairs of vectors of [`accumulate`]'s columns, from `first` on.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn columns<S: Simd, const PAIRS: bool, const R: usize, const C: usize>(
    simd: S,
    rows: &mut [Row; R],
    values: Streamed<PAIRS>,
    count: usize,
    first: usize,
) {
    let mut sums = [[[simd.splat_f32s(0.0); 2]; C]; R];
    // SAFETY: as the caller says.
    unsafe {
        for r in 0..R {
            for c in 0..C {
                for half in 0..2 {
                    sums[r][c][half] = load::<S>(rows[r].out.as_ptr().add((2 * (first + c) + half) * S::F32_LANES));
                }
            }
        }
        for k in 0..count {
            values.prefetch::<S>(k + AHEAD, first..first + C);
            for c in 0..C {
                let value = values.pair(simd, k, first + c);
                for r in 0..R {
                    let probability = simd.splat_f32s(*rows[r].scores.as_ptr().add(k));
                    for half in 0..2 {
                        sums[r][c][half] = simd.mul_add_e_f32s(value[half], probability, sums[r][c][half]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                for half in 0..2 {
                    let to = rows[r].out.as_mut_ptr().add((2 * (first + c) + half) * S::F32_LANES);
                    store::<S>(to, sums[r][c][half]);
                }
            }
        }
    }
}
