//! Tiles in f32, a query in each lane.
//!
//! Scores are kept transposed, `[key][query]`: single elements of keys and values meet vectors of queries and of probabilities, so
//! neither is transposed, only copied in the order that the cache likes; and maxima, sums and rescaling never cross lanes.
//!
//! Blocks of keys begin at multiples of [`KEYS`] whatever a tile sees, and sums run in the order of keys: a row's result does
//! not depend on which others are in its tile.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::buffer::Buffer;
use crate::call::{Call, Element, Rows, widen};
use crate::exp2::exp2;
use crate::partial::Partials;
use crate::scores::tanh;
use crate::tiles::{self, Sight, Tile};

/// Keys of a block: its scores stay in the first-level cache beside the queries.
pub(crate) const KEYS: usize = 128;

/// Vectors of queries in a sub-tile: with [`NARROW`] or [`WIDE`] rows of accumulators they fill the registers.
const VECTORS: usize = 3;

/// Elements from a copied key to the next: a constant, with which the rows of a product are at constant distances, and 17 cache
/// lines, so that they are not in the same sets.
const KEY_STRIDE: usize = 272;

/// Rows of accumulators where there are 32 registers, and where there are 16.
const WIDE: usize = 8;
const NARROW: usize = 4;

/// Sub-tiles of a tile at most: they share what is read and copied of keys and values, and fit the second-level cache.
const SUB_TILES: usize = 12;

/// Rows of a tile with vectors of so many lanes, where `rows` are divided among `threads`.
pub(crate) fn height(lanes: usize, rows: usize, threads: usize) -> usize {
    tiles::height(VECTORS * lanes, SUB_TILES, rows, threads)
}

/// Memory of a thread.
#[derive(Default)]
pub(crate) struct Scratch {
    keys: Buffer,
    values: Buffer,
    /// A row on its way from or to memory.
    row: Vec<f32>,
    /// `[key][query]`.
    scores: Buffer,
    sub_tiles: Vec<SubTile>,
}

/// Some vectors of queries, and what is known of them.
#[derive(Default)]
struct SubTile {
    /// Rows of the tile.
    rows: Range<usize>,
    vectors: usize,
    /// `[head_dim][query]`.
    queries: Buffer,
    /// `[head_dim_v][query]`.
    out: Buffer,
    max: Buffer,
    sum: Buffer,
    /// Of each lane.
    sights: Vec<Sight>,
    /// What any lane sees, and what every one does.
    any: Range<usize>,
    all: Range<usize>,
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
        let Scratch { keys, values, row, scores, sub_tiles } = scratch;
        let (keys_of, values_of) = (call.keys(tile.entry, tile.kv_head), call.values(tile.entry, tile.kv_head));
        let panel = if S::REGISTER_COUNT >= 32 { WIDE } else { NARROW };
        let count = tile.rows.len().div_ceil(VECTORS * S::F32_LANES);
        sub_tiles.resize_with(count.max(sub_tiles.len()), SubTile::default);
        for (index, sub_tile) in sub_tiles[..count].iter_mut().enumerate() {
            let start = tile.rows.start + index * VECTORS * S::F32_LANES;
            let rows = start..(start + VECTORS * S::F32_LANES).min(tile.rows.end);
            sub_tile.begin(call, tile, rows, S::F32_LANES, panel, row);
        }
        for range in tile.blocks(KEYS) {
            // SAFETY: a tile's keys are the entry's.
            unsafe {
                keys_of.copy(call.element, range.clone(), KEY_STRIDE, keys);
                match panel {
                    WIDE => to_panels::<WIDE>(call.element, values_of, range.clone(), row, values),
                    _ => to_panels::<NARROW>(call.element, values_of, range.clone(), row, values),
                }
            }
            let next = range.end..tile.keys.end.min(range.end + KEYS);
            for (index, sub_tile) in sub_tiles[..count].iter_mut().enumerate() {
                let of_next = |index| next.start + next.len() * index / count;
                keys_of.prefetch(call.element, of_next(index)..of_next(index + 1));
                values_of.prefetch(call.element, of_next(index)..of_next(index + 1));
                let seen = range.start.max(sub_tile.any.start)..range.end.min(sub_tile.any.end);
                if seen.is_empty() {
                    continue;
                }
                let block = Block { call, seen: seen.clone(), keys, values, first: seen.start - range.start };
                match (sub_tile.vectors, S::REGISTER_COUNT >= 32) {
                    (1, true) => absorb::<S, WIDE, 1>(simd, &block, sub_tile, scores),
                    (2, true) => absorb::<S, WIDE, 2>(simd, &block, sub_tile, scores),
                    (_, true) => absorb::<S, WIDE, VECTORS>(simd, &block, sub_tile, scores),
                    (1, false) => absorb::<S, NARROW, 1>(simd, &block, sub_tile, scores),
                    (2, false) => absorb::<S, NARROW, 2>(simd, &block, sub_tile, scores),
                    (_, false) => absorb::<S, NARROW, VECTORS>(simd, &block, sub_tile, scores),
                }
            }
        }
        for sub_tile in &sub_tiles[..count] {
            sub_tile.end(call, tile, partials, S::F32_LANES, row);
        }
    }
}

/// Elements from a panel to the next: a cache line more than it holds, so that panels are not all in one set of the cache.
const fn panel<const W: usize>() -> usize {
    KEYS * W + 16
}

/// Copies values as panels, `[column / W][key][column % W]` of [`KEYS`] keys each: what one row of accumulators reads is
/// then together, and no more of it in a set of the cache than fits there.
///
/// # Safety
/// There are such rows.
#[inline(always)]
unsafe fn to_panels<const W: usize>(
    element: Element,
    values: Rows,
    range: Range<usize>,
    row: &mut Vec<f32>,
    panels: &mut Buffer,
) {
    panels.resize(values.dim.div_ceil(W) * panel::<W>());
    row.clear();
    row.resize(values.dim.next_multiple_of(W), 0.0);
    for (key, value) in range.enumerate() {
        // SAFETY: as the caller says.
        unsafe { widen(element, values.row(element, value), &mut row[..values.dim]) };
        let (columns, _) = row.as_chunks::<W>();
        for (panel, columns) in panels.chunks_exact_mut(panel::<W>()).zip(columns) {
            panel.as_chunks_mut().0[key] = *columns;
        }
    }
}

impl SubTile {
    fn begin(
        &mut self,
        call: &Call<'_>,
        tile: &Tile,
        rows: Range<usize>,
        lanes: usize,
        panel: usize,
        row: &mut Vec<f32>,
    ) {
        let problem = call.problem;
        self.vectors = rows.len().div_ceil(lanes);
        let width = self.vectors * lanes;
        self.queries.refill(problem.head_dim * width, 0.0);
        self.sights.clear();
        row.clear();
        row.resize(problem.head_dim * AT_ONCE, 0.0);
        for (lane, r) in rows.clone().enumerate() {
            let (head, i) = tile.row(problem, r);
            let query = &mut row[lane % AT_ONCE * problem.head_dim..][..problem.head_dim];
            // SAFETY: it is a row of the queries.
            unsafe { widen(call.element, call.query(tile.entry, head, i), query) };
            if lane % AT_ONCE == AT_ONCE - 1 || r == rows.end - 1 {
                transpose_in(row, &mut self.queries, width, lane / AT_ONCE * AT_ONCE);
            }
            self.sights.push(tile.sight(problem, r));
        }
        self.any = Sight::any(self.sights.iter());
        let seen = self.sights.iter().map(|sight| &sight.seen);
        self.all = seen.fold(0..usize::MAX, |all, seen| all.start.max(seen.start)..all.end.min(seen.end));
        // Lanes without a row do as the last one does.
        self.sights.resize(width, self.sights.last().cloned().unwrap_or_default());
        self.max.refill(width, f32::NEG_INFINITY);
        self.sum.refill(width, 0.0);
        self.out.refill(problem.head_dim_v.next_multiple_of(panel) * width, 0.0);
        self.rows = rows;
    }

    fn end(&self, call: &Call<'_>, tile: &Tile, partials: &Partials, lanes: usize, row: &mut Vec<f32>) {
        let dim = call.problem.head_dim_v;
        row.resize(dim * AT_ONCE, 0.0);
        let width = self.vectors * lanes;
        for (lane, r) in self.rows.clone().enumerate() {
            if lane % AT_ONCE == 0 {
                transpose_out(&self.out, row, width, lane);
            }
            let out = &mut row[lane % AT_ONCE * dim..][..dim];
            // SAFETY: the row is this tile's alone.
            unsafe { partials.write(call, tile, r, out, self.max[lane], self.sum[lane]) };
        }
    }
}

/// Rows that are transposed together: of lanes, whose number is a multiple.
const AT_ONCE: usize = 4;

/// Writes [`AT_ONCE`] rows as columns of rows of `width`, from column `lane` on.
fn transpose_in(rows: &[f32], columns: &mut [f32], width: usize, lane: usize) {
    let dim = rows.len() / AT_ONCE;
    let row = |r: usize| &rows[r * dim..][..dim];
    let (rows, mut at) = ([row(0), row(1), row(2), row(3)], 0);
    for to in columns.chunks_exact_mut(AT_ONCE * width) {
        let block = rows.map(|row| *row[at..].first_chunk().expect("a block"));
        for (to, column) in to.chunks_exact_mut(width).zip(transposed(block)) {
            to[lane..lane + AT_ONCE].copy_from_slice(&column);
        }
        at += AT_ONCE;
    }
    for (to, at) in columns[at * width..].chunks_exact_mut(width).zip(at..dim) {
        to[lane..lane + AT_ONCE].copy_from_slice(&rows.map(|row| row[at]));
    }
}

/// The other way round.
fn transpose_out(columns: &[f32], rows: &mut [f32], width: usize, lane: usize) {
    let dim = rows.len() / AT_ONCE;
    for (at, from) in columns.chunks_exact(AT_ONCE * width).enumerate().take(dim / AT_ONCE) {
        let column = |c: usize| *from[c * width + lane..].first_chunk().expect("a block");
        let block = transposed([column(0), column(1), column(2), column(3)]);
        for (row, elements) in rows.chunks_exact_mut(dim).zip(block) {
            row[at * AT_ONCE..][..AT_ONCE].copy_from_slice(&elements);
        }
    }
    for at in dim / AT_ONCE * AT_ONCE..dim {
        for (row, element) in rows.chunks_exact_mut(dim).zip(&columns[at * width + lane..]) {
            row[at] = *element;
        }
    }
}

#[inline(always)]
fn transposed(rows: [[f32; AT_ONCE]; AT_ONCE]) -> [[f32; AT_ONCE]; AT_ONCE] {
    let column = |c: usize| rows.map(|row| row[c]);
    [column(0), column(1), column(2), column(3)]
}

/// Keys that a sub-tile meets, and their values.
struct Block<'a> {
    call: &'a Call<'a>,
    seen: Range<usize>,
    /// Row `first` of these is the first key that is seen.
    keys: &'a [f32],
    /// As [`to_panels`] makes them.
    values: &'a [f32],
    first: usize,
}

/// A sub-tile absorbs a block of keys and values: Dao 2023, algorithm 1, lines 8 to 10.
#[inline(always)]
fn absorb<S: Simd, const M: usize, const V: usize>(
    simd: S,
    block: &Block<'_>,
    sub_tile: &mut SubTile,
    scores: &mut Buffer,
) {
    let width = V * S::F32_LANES;
    let (count, problem) = (block.seen.len(), block.call.problem);
    let masked = block.seen.start < sub_tile.all.start || block.seen.end > sub_tile.all.end;
    scores.resize(KEYS * width);
    let (max, sum) = (columns::<S, V>(&mut sub_tile.max), columns::<S, V>(&mut sub_tile.sum));
    let mut highest = [simd.splat_f32s(f32::NEG_INFINITY); V];
    // SAFETY: there are `count` rows of keys from the first seen on, and of scores; the queries are `head_dim` rows.
    unsafe {
        let keys = block.keys.as_ptr().add(block.first * KEY_STRIDE);
        let (queries, scores) = (sub_tile.queries.as_ptr(), scores.as_mut_ptr());
        let mut at = 0;
        macro_rules! rows {
            ($($m:expr),*) => {$(
                while count - at >= $m {
                    let (keys, scores) = (keys.add(at * KEY_STRIDE), scores.add(at * width));
                    dot::<S, { $m }, V>(simd, keys, queries, problem.head_dim, scores, &mut highest);
                    at += $m;
                }
            )*};
        }
        if M == WIDE {
            rows!(WIDE);
        }
        rows!(NARROW, 1);
    }
    if masked || !block.call.plain {
        highest = adjust::<S, V>(simd, block, &sub_tile.sights, masked, scores);
    }

    // Where nothing was seen yet the maximum is minus infinity, which must not be subtracted from itself.
    let nothing = simd.splat_f32s(f32::NEG_INFINITY);
    // Subtracted before they are scaled: then scores of any size are exact.
    let scale = simd.splat_f32s(block.call.scale_log2);
    let mut subtract = [simd.splat_f32s(0.0); V];
    let mut rescale = subtract;
    for v in 0..V {
        let new = simd.max_f32s(max[v], highest[v]);
        subtract[v] = simd.select_f32s(simd.equal_f32s(new, nothing), subtract[v], new);
        rescale[v] = exp2(simd, simd.mul_f32s(simd.sub_f32s(max[v], subtract[v]), scale));
        max[v] = new;
        sum[v] = simd.mul_f32s(sum[v], rescale[v]);
    }
    for row in scores[..count * width].chunks_exact_mut(width) {
        let row = columns::<S, V>(row);
        for v in 0..V {
            row[v] = exp2(simd, simd.mul_f32s(simd.sub_f32s(row[v], subtract[v]), scale));
            sum[v] = simd.add_f32s(sum[v], row[v]);
        }
    }

    for (panel, out) in block.values.chunks_exact(panel::<M>()).zip(sub_tile.out.chunks_exact_mut(M * width)) {
        // SAFETY: there are `count` rows of the panel from the first seen on, and of scores; the output is `M` rows.
        unsafe {
            let values = panel.as_ptr().add(block.first * M);
            accumulate::<S, M, V>(simd, values, scores.as_ptr(), count, out.as_mut_ptr(), &rescale);
        }
    }
}

/// A row of as many vectors as a sub-tile has.
#[inline(always)]
fn columns<S: Simd, const V: usize>(row: &mut [f32]) -> &mut [S::f32s; V] {
    let (vectors, _) = S::as_mut_simd_f32s(row);
    vectors.first_chunk_mut().expect("a row of a sub-tile")
}

/// Adds to `M` by `V` sums: of element `[m][k]` of `a`, its steps given, by row `k` of `b`, for `depth` of `k`.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn multiply<S: Simd, const M: usize, const V: usize>(
    simd: S,
    a: *const f32,
    step_m: usize,
    step_k: usize,
    b: *const f32,
    depth: usize,
    sums: &mut [[S::f32s; V]; M],
) {
    // SAFETY: as the caller says.
    unsafe {
        for k in 0..depth {
            let mut row = [simd.splat_f32s(0.0); V];
            for v in 0..V {
                row[v] = load::<S>(b.add((k * V + v) * S::F32_LANES));
            }
            for m in 0..M {
                let element = simd.splat_f32s(*a.add(m * step_m + k * step_k));
                for v in 0..V {
                    sums[m][v] = simd.mul_add_e_f32s(element, row[v], sums[m][v]);
                }
            }
        }
    }
}

/// The products of `M` rows of keys with the queries, to `M` rows of scores; and their maxima.
///
/// # Safety
/// There are so many rows.
#[inline(always)]
unsafe fn dot<S: Simd, const M: usize, const V: usize>(
    simd: S,
    keys: *const f32,
    queries: *const f32,
    depth: usize,
    scores: *mut f32,
    highest: &mut [S::f32s; V],
) {
    let mut sums = [[simd.splat_f32s(0.0); V]; M];
    // SAFETY: as the caller says.
    unsafe {
        multiply(simd, keys, KEY_STRIDE, 1, queries, depth, &mut sums);
        for m in 0..M {
            for v in 0..V {
                highest[v] = simd.max_f32s(highest[v], sums[m][v]);
                store::<S>(scores.add((m * V + v) * S::F32_LANES), sums[m][v]);
            }
        }
    }
}

/// Adds to `M` rows of the output, which it rescales first, the values in as many columns by the probabilities of `depth` keys.
///
/// # Safety
/// There are so many rows.
#[inline(always)]
unsafe fn accumulate<S: Simd, const M: usize, const V: usize>(
    simd: S,
    values: *const f32,
    probabilities: *const f32,
    depth: usize,
    out: *mut f32,
    rescale: &[S::f32s; V],
) {
    // SAFETY: as the caller says.
    unsafe {
        let mut sums = [[simd.splat_f32s(0.0); V]; M];
        for m in 0..M {
            for v in 0..V {
                sums[m][v] = simd.mul_f32s(load::<S>(out.add((m * V + v) * S::F32_LANES)), rescale[v]);
            }
        }
        multiply(simd, values, 1, M, probabilities, depth, &mut sums);
        for m in 0..M {
            for v in 0..V {
                store::<S>(out.add((m * V + v) * S::F32_LANES), sums[m][v]);
            }
        }
    }
}

#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(from: *const f32) -> S::f32s {
    // SAFETY: as the caller says; a vector may lie anywhere.
    unsafe { from.cast::<S::f32s>().read_unaligned() }
}

#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(to: *mut f32, vector: S::f32s) {
    // SAFETY: as the caller says; a vector may lie anywhere.
    unsafe { to.cast::<S::f32s>().write_unaligned(vector) }
}

/// A number of each lane, as vectors.
#[inline(always)]
fn gather<S: Simd, const V: usize>(simd: S, sights: &[Sight], of: impl Fn(&Sight) -> f32) -> [S::f32s; V] {
    let mut vectors = [simd.splat_f32s(0.0); V];
    let elements = bytemuck::cast_slice_mut(&mut vectors).iter_mut();
    elements.zip(sights).for_each(|(element, sight)| *element = of(sight));
    vectors
}

/// Caps, biases and masks scores, and returns their maxima.
#[inline(always)]
fn adjust<S: Simd, const V: usize>(
    simd: S,
    block: &Block<'_>,
    sights: &[Sight],
    masked: bool,
    scores: &mut [f32],
) -> [S::f32s; V] {
    let problem = block.call.problem;
    let width = V * S::F32_LANES;
    let start = block.seen.start;
    // Counted from the block's first key, so that f32 holds the numbers exactly.
    let within = |key: usize| key.clamp(start, block.seen.end) as f32 - start as f32;
    let column = |of: fn(&Sight) -> usize| gather::<S, V>(simd, sights, |sight| within(of(sight)));
    let (first, end) = (column(|sight| sight.seen.start), column(|sight| sight.seen.end));
    let diagonal = gather::<S, V>(simd, sights, |sight| sight.diagonal - start as f32);
    let slope = gather::<S, V>(simd, sights, |sight| sight.slope);
    let mut highest = [simd.splat_f32s(f32::NEG_INFINITY); V];
    for (key, row) in scores[..block.seen.len() * width].chunks_exact_mut(width).enumerate() {
        let row = columns::<S, V>(row);
        let key = simd.splat_f32s(key as f32);
        for v in 0..V {
            let mut score = row[v];
            if !block.call.plain {
                score = simd.mul_f32s(score, simd.splat_f32s(problem.scale() as f32));
            }
            if let Some(cap) = problem.softcap {
                let share = simd.mul_f32s(score, simd.splat_f32s(cap.recip()));
                score = simd.mul_f32s(tanh(simd, share), simd.splat_f32s(cap));
            }
            if problem.alibi_slopes.is_some() {
                let distance = simd.abs_f32s(simd.sub_f32s(diagonal[v], key));
                score = simd.sub_f32s(score, simd.mul_f32s(slope[v], distance));
            }
            if masked {
                let seen = simd.and_m32s(simd.less_than_or_equal_f32s(first[v], key), simd.less_than_f32s(key, end[v]));
                score = simd.select_f32s(seen, score, simd.splat_f32s(f32::NEG_INFINITY));
            }
            row[v] = score;
            highest[v] = simd.max_f32s(highest[v], score);
        }
    }
    highest
}
