//! Tiles of bf16 on the processor's matrix unit (AMX), whose registers are tiles of 16 rows.
//!
//! Scores are `[query][key]` in f32, [`STRIP`] rows at a time; probabilities are rounded to bf16 as they are computed. Queries
//! and probabilities are read as they lie; keys and values are put in pairs, as the unit wants its second operand, once for all
//! strips of a tile. (Intel 64 manual, volume 1, chapter 18; volume 2, `TDPBF16PS`.)

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::call::{Call, Rows};
use crate::partial::Partials;
use crate::scores::Adjust;
use crate::tiles::{self, Sight, Tile};

/// Keys of a block.
pub(crate) const KEYS: usize = 256;

/// Rows of two tile registers.
const STRIP: usize = 32;

/// Strips of a tile at most.
const STRIPS: usize = 16;

/// Rows and columns of a tile register in f32, and its bytes in a row.
const TILE: usize = 16;
const TILE_ROW: usize = 64;
const TILE_BYTES: usize = TILE * TILE_ROW;

/// Elements of a tile register's row in bf16: how deep one product is.
const DEEP: usize = 32;

/// From a row of scores or probabilities to the next, in elements: a cache line more than it holds, so that rows are not in the
/// same sets.
const SCORES: usize = KEYS + 16;
const PROBABILITIES: usize = KEYS + 32;

/// Rows of a tile where `rows` are divided among `threads`.
pub(crate) fn height(rows: usize, threads: usize) -> usize {
    tiles::height(STRIP, STRIPS, rows, threads)
}

/// The matrix unit of bf16, and the vector instructions that go with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

impl Amx {
    /// If the processor and the kernel have it.
    pub fn new() -> Option<Amx> {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        /// `arch_prctl` asks for the register state of tiles (Linux, Documentation/arch/x86/xstate.rst).
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        if !is_x86_feature_detected!("avx512bf16")
            || !is_x86_feature_detected!("avx512bw")
            || !is_x86_feature_detected!("avx512dq")
            || !is_x86_feature_detected!("avx512vl")
        {
            return None;
        }
        let features = __cpuid_count(7, 0).edx;
        if features & (BF16 | TILES) != BF16 | TILES {
            return None;
        }
        // SAFETY: the call takes two numbers, and changes nothing but what this process may use.
        let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        (refused == 0).then_some(Amx(()))
    }
}

/// Memory of a thread. What is bf16 is in floats' place, two in each.
#[derive(Default)]
pub(crate) struct Scratch {
    /// `[row][head_dim]`, bf16; rows and columns rounded up with zeros.
    queries: Buffer,
    /// Tiles `[key / 16][head_dim / 32]` of `[pair of columns][key][2]`.
    keys: Buffer,
    /// Tiles `[head_dim_v / 16][key / 32]` of `[pair of keys][column][2]`.
    values: Buffer,
    scores: Buffer,
    probabilities: Buffer,
    /// `[row][head_dim_v]`, columns rounded up.
    out: Buffer,
    rows: Vec<Row>,
}

/// What is known of a query.
struct Row {
    max: f32,
    sum: f32,
    sight: Sight,
}

/// A tile to compute.
pub(crate) struct Job<'a> {
    pub amx: Amx,
    pub call: &'a Call<'a>,
    pub tile: &'a Tile,
    pub partials: &'a Partials,
    pub scratch: &'a mut Scratch,
}

impl Job<'_> {
    pub fn run(self) {
        let _: Amx = self.amx;
        // SAFETY: there is an `Amx`, so the processor has the instructions.
        unsafe { self.tile() }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn tile(self) {
        let Job { call, tile, partials, scratch, .. } = self;
        let problem = call.problem;
        let depth = problem.head_dim.next_multiple_of(DEEP);
        let width = problem.head_dim_v.next_multiple_of(2 * TILE);
        let height = tile.rows.len().next_multiple_of(STRIP);
        scratch.begin(call, tile, depth, width, height);
        scratch.keys.resize(KEYS * depth / 2);
        scratch.values.resize(KEYS * width / 2);
        scratch.scores.resize(STRIP * SCORES);
        scratch.probabilities.resize(STRIP * PROBABILITIES / 2);
        let (keys, values) = (call.keys(tile.entry, tile.kv_head), call.values(tile.entry, tile.kv_head));
        let _tiles = Tiles::configure();
        for range in tile.blocks(KEYS) {
            // SAFETY: a tile's keys are the entry's.
            unsafe {
                pack_keys(keys, range.clone(), depth, &mut scratch.keys);
                pack_values(values, range.clone(), width, &mut scratch.values);
            }
            let next = range.end..tile.keys.end.min(range.end + KEYS);
            for strip in 0..height / STRIP {
                let of_next = |strip| next.start + next.len() * strip / (height / STRIP);
                keys.prefetch(call.element, of_next(strip)..of_next(strip + 1));
                values.prefetch(call.element, of_next(strip)..of_next(strip + 1));
                scratch.absorb(call, strip, &range, depth, width);
            }
        }
        for (row, out) in tile.rows.clone().zip(scratch.out.chunks_exact_mut(width)) {
            let Row { max, sum, .. } = scratch.rows[row - tile.rows.start];
            // SAFETY: the row is this tile's alone.
            unsafe { partials.write(call, tile, row, &mut out[..problem.head_dim_v], max, sum) };
        }
    }
}

impl Scratch {
    fn begin(&mut self, call: &Call<'_>, tile: &Tile, depth: usize, width: usize, height: usize) {
        let problem = call.problem;
        self.queries.refill(height * depth / 2, 0.0);
        self.out.refill(height * width, 0.0);
        self.rows.clear();
        let queries: &mut [u16] = bytemuck::cast_slice_mut(&mut self.queries);
        for (row, query) in tile.rows.clone().zip(queries.chunks_exact_mut(depth)) {
            let (head, i) = tile.row(problem, row);
            // SAFETY: it is a row of the queries, and bf16.
            let from =
                unsafe { std::slice::from_raw_parts(call.query(tile.entry, head, i).cast::<u16>(), problem.head_dim) };
            query[..from.len()].copy_from_slice(from);
            self.rows.push(Row { max: f32::NEG_INFINITY, sum: 0.0, sight: tile.sight(problem, row) });
        }
    }

    /// A strip of rows absorbs a block of keys and values: Dao 2023, algorithm 1, lines 8 to 10.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn absorb(&mut self, call: &Call<'_>, strip: usize, range: &Range<usize>, depth: usize, width: usize) {
        let first = strip * STRIP;
        let last = self.rows.len().min(first + STRIP);
        let rows = &mut self.rows[first..last];
        let any = Sight::any(rows.iter().map(|row| &row.sight));
        let seen = range.start.max(any.start)..range.end.min(any.end);
        if seen.is_empty() {
            return;
        }
        // In pairs of tiles, from the block's first key on.
        let steps = (seen.start - range.start) / DEEP..(seen.end - range.start).div_ceil(DEEP);
        let columns = steps.start * DEEP..steps.end * DEEP;
        let deep = depth / DEEP;
        for step in steps.clone() {
            // SAFETY: the strip has two tiles of queries, the step two of keys, and the scores are as large.
            unsafe {
                let queries = self.queries.as_ptr().cast::<u8>().add(first * depth * 2);
                let keys = self.keys.as_ptr().cast::<u8>().add(2 * step * deep * TILE_BYTES);
                multiply::<false>(
                    [queries, queries.add(TILE * depth * 2)],
                    depth * 2,
                    [keys, keys.add(deep * TILE_BYTES)],
                    deep,
                    self.scores.as_mut_ptr().add(step * DEEP),
                    SCORES,
                );
            }
        }
        let probabilities: &mut [u16] = bytemuck::cast_slice_mut(&mut self.probabilities);
        let strips = self.scores.chunks_exact_mut(SCORES).zip(probabilities.chunks_exact_mut(PROBABILITIES));
        for ((row, out), (scores, probabilities)) in
            rows.iter_mut().zip(self.out[first * width..].chunks_exact_mut(width)).zip(strips)
        {
            let (scores, probabilities) = (&mut scores[columns.clone()], &mut probabilities[columns.clone()]);
            let key = range.start + columns.start;
            if !call.plain {
                pulp::Arch::new().dispatch(Adjust { problem: call.problem, scores, first: key, sight: &row.sight });
            }
            // Beyond the block's last key there is nothing, whatever a row sees.
            let within = |bound: usize| bound.clamp(key, range.end.max(key)) - key;
            let (start, end) = (within(row.sight.seen.start), within(row.sight.seen.end));
            scores[..start].fill(f32::NEG_INFINITY);
            scores[end.max(start)..].fill(f32::NEG_INFINITY);
            row.softmax(call.scale_log2, scores, probabilities, out);
        }
        for column in (0..width).step_by(2 * TILE) {
            // SAFETY: the strip has two tiles of probabilities, the columns two of values, and the output is as large.
            unsafe {
                let probabilities = self.probabilities.as_ptr().cast::<u8>().add(columns.start * 2);
                let values = self.values.as_ptr().cast::<u8>();
                let values = values.add((column / TILE * (KEYS / DEEP) + steps.start) * TILE_BYTES);
                multiply::<true>(
                    [probabilities, probabilities.add(TILE * PROBABILITIES * 2)],
                    PROBABILITIES * 2,
                    [values, values.add(KEYS / DEEP * TILE_BYTES)],
                    steps.len(),
                    self.out.as_mut_ptr().add(first * width + column),
                    width,
                );
            }
        }
    }
}

impl Row {
    /// From scores to probabilities; rescales what was summed before.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn softmax(&mut self, scale: f32, scores: &[f32], probabilities: &mut [u16], out: &mut [f32]) {
        let (scores, _) = scores.as_chunks::<32>();
        let mut highest = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for pair in scores {
            for half in 0..2 {
                highest[half] = _mm512_max_ps(highest[half], load(&pair[16 * half..]));
            }
        }
        let max = self.max.max(_mm512_reduce_max_ps(_mm512_max_ps(highest[0], highest[1])));
        // Where nothing was seen yet the maximum is minus infinity, which must not be subtracted from itself.
        let subtract = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let (subtracted, scaled) = (_mm512_set1_ps(subtract), _mm512_set1_ps(scale));
        let mut sums = [_mm512_setzero_ps(); 2];
        let (probabilities, _) = probabilities.as_chunks_mut::<32>();
        for (pair, probabilities) in scores.iter().zip(probabilities) {
            let mut powers = [_mm512_setzero_ps(); 2];
            for half in 0..2 {
                let above = _mm512_sub_ps(load(&pair[16 * half..]), subtracted);
                powers[half] = exp2(_mm512_mul_ps(above, scaled));
                sums[half] = _mm512_add_ps(sums[half], powers[half]);
            }
            let rounded = _mm512_cvtne2ps_pbh(powers[1], powers[0]);
            // SAFETY: there are 32 of 2 bytes.
            unsafe { probabilities.as_mut_ptr().cast::<__m512bh>().write_unaligned(rounded) };
        }
        if max != self.max {
            let rescale = ((self.max - subtract) * scale).exp2();
            self.sum *= rescale;
            out.iter_mut().for_each(|element| *element *= rescale);
            self.max = max;
        }
        self.sum += _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load(from: &[f32]) -> __m512 {
    let from: &[f32; 16] = from.first_chunk().expect("a vector");
    // SAFETY: there are 16 floats.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

/// `2^x` for `x <= 127`, to 2.9e-6: what is rounded to bf16 needs no more. 0 for minus infinity.
///
/// `2^f` on `[0, 1)` is a polynomial by Lawson's iteration on a least-squares fit whose constant is 1.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn exp2(x: __m512) -> __m512 {
    const POLYNOMIAL: [f32; 4] = [1.342_668_4e-2, 5.224_247_4e-2, 2.412_802e-1, LINEAR];
    const LINEAR: f32 = 0.693_044_85;
    /// What is left of a number when it is rounded down.
    const FRACTION: i32 = 1;
    let f = _mm512_reduce_ps::<FRACTION>(x);
    let mut power = _mm512_set1_ps(POLYNOMIAL[0]);
    for coefficient in &POLYNOMIAL[1..] {
        power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(*coefficient));
    }
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(1.0));
    _mm512_scalef_ps(power, x)
}

/// That this thread's tile registers have 16 rows of 64 bytes.
struct Tiles;

impl Tiles {
    fn configure() -> Tiles {
        /// `LDTILECFG`'s operand.
        #[repr(C, align(64))]
        struct Configuration {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            bytes_per_row: [u16; 16],
            rows: [u8; 16],
        }
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
        configuration.bytes_per_row[..8].fill(TILE_ROW as u16);
        configuration.rows[..8].fill(TILE as u8);
        // SAFETY: an `Amx` vouches for the instruction; the operand is a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack)) };
        Tiles
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: as above. Threads that hold no tiles are switched faster.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Two by two tiles of `a b`, or of `c + a b`, to `c`: `a` in rows `stride` bytes apart, `b` in tiles one after the other, `c` in
/// rows of `width` floats.
///
/// # Safety
/// The tiles are configured, and the operands reach as far.
#[inline]
unsafe fn multiply<const ADD: bool>(
    a: [*const u8; 2],
    stride: usize,
    b: [*const u8; 2],
    deep: usize,
    c: *mut f32,
    width: usize,
) {
    // SAFETY: as the caller says.
    unsafe {
        let lower = c.add(TILE * width);
        if ADD {
            asm!(
                "tileloadd tmm0, [{c} + {s}]",
                "tileloadd tmm1, [{c} + {s} + 64]",
                "tileloadd tmm2, [{lower} + {s}]",
                "tileloadd tmm3, [{lower} + {s} + 64]",
                c = in(reg) c, lower = in(reg) lower, s = in(reg) width * 4, options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{a0} + {stride}]",
            "tileloadd tmm6, [{b0} + {row}]",
            "tileloadd tmm7, [{b1} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a1} + {stride}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 64",
            "add {a1}, 64",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {deep}",
            "jnz 2b",
            a0 = inout(reg) a[0] => _, a1 = inout(reg) a[1] => _, b0 = inout(reg) b[0] => _, b1 = inout(reg) b[1] => _,
            stride = in(reg) stride, row = in(reg) TILE_ROW, deep = inout(reg) deep => _, options(nostack, readonly),
        );
        asm!(
            "tilestored [{c} + {s}], tmm0",
            "tilestored [{c} + {s} + 64], tmm1",
            "tilestored [{lower} + {s}], tmm2",
            "tilestored [{lower} + {s} + 64], tmm3",
            c = in(reg) c, lower = in(reg) lower, s = in(reg) width * 4, options(nostack),
        );
    }
}

/// 32 bf16 of a row from `column` on; 0 beyond its end.
///
/// # Safety
/// There is such a row.
#[target_feature(enable = "avx512bw")]
#[inline]
unsafe fn piece(rows: Rows, row: usize, column: usize) -> __m512i {
    let left = rows.dim.saturating_sub(column).min(32);
    let mask = ((1u64 << left) - 1) as u32;
    // SAFETY: as the caller says; what the mask leaves out is not read.
    unsafe { _mm512_maskz_loadu_epi16(mask, rows.first.cast::<i16>().add(row * rows.stride + column)) }
}

/// # Safety
/// There are such rows.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_keys(keys: Rows, range: Range<usize>, depth: usize, packed: &mut Buffer) {
    let tiles = packed.as_chunks_mut::<{ TILE_BYTES / 4 }>().0;
    let deep = depth / DEEP;
    // Of a pair of tiles, what is beyond the last key is 0.
    for tile in 0..range.len().div_ceil(DEEP) * 2 {
        for step in 0..deep {
            let mut rows = [_mm512_setzero_si512(); TILE];
            for (row, key) in (range.start + tile * TILE..range.end).take(TILE).enumerate() {
                // SAFETY: as the caller says.
                rows[row] = unsafe { piece(keys, key, step * DEEP) };
            }
            let to = tiles[tile * deep + step].as_mut_ptr();
            for (row, pairs) in transposed(rows).into_iter().enumerate() {
                // SAFETY: a tile has so many rows.
                unsafe { _mm512_storeu_si512(to.add(row * TILE).cast(), pairs) };
            }
        }
    }
}

/// Of 16 rows of 32-bit elements, the 16 columns.
#[target_feature(enable = "avx512f")]
#[inline]
fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    let (mut a, mut b, mut columns) = (rows, rows, rows);
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        for half in 0..2 {
            b[4 * i + 2 * half] = _mm512_unpacklo_epi64(a[4 * i + half], a[4 * i + 2 + half]);
            b[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(a[4 * i + half], a[4 * i + 2 + half]);
        }
    }
    // Now quarter `q` of `b[4 i + j]` holds column `4 q + j` of rows `4 i` to `4 i + 3`.
    for j in 0..4 {
        let even = [_mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]), _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j])];
        let odd = [_mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]), _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j])];
        columns[j] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        columns[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        columns[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        columns[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    columns
}

/// # Safety
/// There are such rows.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_values(values: Rows, range: Range<usize>, width: usize, packed: &mut Buffer) {
    let tiles = packed.as_chunks_mut::<{ TILE_BYTES / 4 }>().0;
    let steps = KEYS / DEEP;
    let halves = [_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)];
    for pair in 0..range.len().div_ceil(DEEP) * TILE {
        for column in (0..width).step_by(2 * TILE) {
            let mut rows = [_mm512_setzero_si512(); 2];
            for (row, key) in (range.start + 2 * pair..range.end).take(2).enumerate() {
                // SAFETY: as the caller says.
                rows[row] = unsafe { piece(values, key, column) };
            }
            let low = _mm512_unpacklo_epi16(rows[0], rows[1]);
            let high = _mm512_unpackhi_epi16(rows[0], rows[1]);
            for (half, order) in halves.into_iter().enumerate() {
                let tile = (column / TILE + half) * steps + pair / TILE;
                let to = &mut tiles[tile][pair % TILE * TILE..][..TILE];
                // SAFETY: there are 16 elements.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutex2var_epi64(low, order, high)) };
            }
        }
    }
}
