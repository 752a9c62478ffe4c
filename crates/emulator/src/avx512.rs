//! What plain loops over lanes do not become by themselves: table look-ups and gathers of AVX-512.

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_add_epi32, _mm512_cmpgt_epi32_mask, _mm512_i32gather_epi32, _mm512_loadu_si512,
    _mm512_mask_blend_epi32, _mm512_mask_broadcast_i32x4, _mm512_mask_set1_epi32, _mm512_mask_set1_epi64,
    _mm512_maskz_loadu_epi32, _mm512_permutex2var_epi32, _mm512_permutexvar_epi32, _mm512_set1_epi32,
    _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_si512,
};

use crate::lanes::WARP;
use crate::pattern::Pattern;

type Words = [u32; WARP];

#[inline]
#[target_feature(enable = "avx512f")]
fn load(words: &Words) -> [__m512i; 2] {
    // SAFETY: both halves of 32 words are 64 readable bytes.
    unsafe { [_mm512_loadu_si512(words.as_ptr().cast()), _mm512_loadu_si512(words.as_ptr().add(16).cast())] }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(halves: [__m512i; 2], words: &mut Words) {
    // SAFETY: both halves of 32 words are 64 writable bytes.
    unsafe {
        _mm512_storeu_si512(words.as_mut_ptr().cast(), halves[0]);
        _mm512_storeu_si512(words.as_mut_ptr().add(16).cast(), halves[1]);
    }
}

/// For each lane the entry of a table that its number names; numbers are below `entries`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn pick(table: &Words, entries: usize, numbers: &Words) -> Words {
    let (table, numbers) = (load(table), load(numbers));
    let mut out = [0; WARP];
    if entries <= 16 {
        store(
            [_mm512_permutexvar_epi32(numbers[0], table[0]), _mm512_permutexvar_epi32(numbers[1], table[0])],
            &mut out,
        );
    } else {
        let pick = |numbers| _mm512_permutex2var_epi32(table[0], numbers, table[1]);
        store([pick(numbers[0]), pick(numbers[1])], &mut out);
    }
    out
}

/// Up to four words of every lane's address.
///
/// # Safety
/// Each distance of the pattern, counted from `first`, must leave `4 * elements` bytes in `shared`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn gather_words(shared: &[u8], first: u32, pattern: &Pattern, elements: usize) -> [Words; 4] {
    let mut out = [[0; WARP]; 4];
    let entries = pattern.distinct.len();
    let words = entries * elements;
    if words > 64 || !(pattern.is_dense || entries <= 16) || !matches!(elements, 1 | 2 | 4) {
        let halves = load(pattern.deltas_by_lane());
        for (element, words) in out.iter_mut().enumerate().take(elements) {
            // SAFETY: the caller promises 4 bytes at each lane's distance; lanes that are not active have distance 0, which an
            // active lane has too.
            let gathered = unsafe {
                let base = shared.as_ptr().add(first as usize + 4 * element).cast();
                [_mm512_i32gather_epi32::<1>(halves[0], base), _mm512_i32gather_epi32::<1>(halves[1], base)]
            };
            store(gathered, words);
        }
        return out;
    }

    // The distinct words stand side by side in vectors; a lane's word is one permutation away.
    // SAFETY: the caller promises `4 * elements` bytes at each distance; `words` of them in a row where they are dense.
    let table = unsafe {
        if pattern.is_dense {
            load_row(shared, first, pattern, words)
        } else {
            load_rows(shared, first, pattern, elements)
        }
    };
    let numbers = load(&pattern.chunk_of);
    for (element, lanes) in out.iter_mut().enumerate().take(elements) {
        let mut halves = [_mm512_setzero_si512(); 2];
        for (half, number) in halves.iter_mut().zip(numbers) {
            let scaled = match elements {
                1 => number,
                2 => _mm512_slli_epi32::<1>(number),
                _ => _mm512_slli_epi32::<2>(number),
            };
            let index = _mm512_add_epi32(scaled, _mm512_set1_epi32(element as i32));
            let low = _mm512_permutex2var_epi32(table[0], index, table[1]);
            *half = if words <= 32 {
                low
            } else {
                let high = _mm512_permutex2var_epi32(table[2], index, table[3]);
                _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(index, _mm512_set1_epi32(31)), low, high)
            };
        }
        store(halves, lanes);
    }
    out
}

/// `words` words in a row.
///
/// # Safety
/// They must lie in `shared`; at most 64.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_row(shared: &[u8], first: u32, pattern: &Pattern, words: usize) -> [__m512i; 4] {
    let mut table = [_mm512_setzero_si512(); 4];
    // SAFETY: the caller promises the row, which starts here.
    let start: *const i32 = unsafe { shared.as_ptr().offset(first as isize + pattern.distinct[0] as isize).cast() };
    for (quarter, vector) in table.iter_mut().enumerate().take(words.div_ceil(16)) {
        let held = (words - 16 * quarter).min(16);
        // SAFETY: only the words that the mask names are read, and they lie in the row.
        *vector = unsafe { _mm512_maskz_loadu_epi32(u16::MAX >> (16 - held), start.add(16 * quarter)) };
    }
    table
}

/// Up to 16 entries of `elements` words each, side by side.
///
/// # Safety
/// Each must lie in `shared`; `elements` is 1, 2 or 4.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_rows(shared: &[u8], first: u32, pattern: &Pattern, elements: usize) -> [__m512i; 4] {
    let mut table = [_mm512_setzero_si512(); 4];
    for (vector, deltas) in table.iter_mut().zip(pattern.distinct.chunks(16 / elements)) {
        for (index, &delta) in deltas.iter().enumerate() {
            // SAFETY: the caller promises `4 * elements` bytes at this distance.
            *vector = unsafe {
                let row = shared.as_ptr().offset(first as isize + delta as isize);
                match elements {
                    1 => _mm512_mask_set1_epi32(*vector, 1 << index, row.cast::<i32>().read_unaligned()),
                    2 => _mm512_mask_set1_epi64(*vector, 1 << index, row.cast::<i64>().read_unaligned()),
                    _ => _mm512_mask_broadcast_i32x4(*vector, 0xf << (4 * index), _mm_loadu_si128(row.cast())),
                }
            };
        }
    }
    table
}
