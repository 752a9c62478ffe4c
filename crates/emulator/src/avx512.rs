//! What plain loops over lanes do not become by themselves: table look-ups and gathers of AVX-512.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_loadu_si128, _mm512_add_epi32, _mm512_cmpgt_epi32_mask, _mm512_i32gather_epi32,
    _mm512_loadu_si512, _mm512_mask_blend_epi32, _mm512_mask_broadcast_i32x4, _mm512_permutex2var_epi32,
    _mm512_permutexvar_epi32, _mm512_set1_epi32, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_si512,
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
    let base = shared.as_ptr();
    if elements == 4 && pattern.distinct.len() <= 16 {
        // Rows of four words stand side by side in vectors; a lane's word is one permutation away.
        let mut rows = [_mm512_setzero_si512(); 4];
        for (quarter, deltas) in rows.iter_mut().zip(pattern.distinct.chunks(4)) {
            for (index, &delta) in deltas.iter().enumerate() {
                // SAFETY: the caller promises 16 bytes at this distance.
                let row: __m128i = unsafe { _mm_loadu_si128(base.offset(first as isize + delta as isize).cast()) };
                *quarter = match index {
                    0 => _mm512_mask_broadcast_i32x4(*quarter, 0x000f, row),
                    1 => _mm512_mask_broadcast_i32x4(*quarter, 0x00f0, row),
                    2 => _mm512_mask_broadcast_i32x4(*quarter, 0x0f00, row),
                    _ => _mm512_mask_broadcast_i32x4(*quarter, 0xf000, row),
                };
            }
        }
        let numbers = load(&pattern.chunk_of);
        let few = pattern.distinct.len() <= 8;
        for (element, words) in out.iter_mut().enumerate() {
            let mut halves = [_mm512_setzero_si512(); 2];
            for (half, number) in halves.iter_mut().zip(numbers) {
                let index = _mm512_add_epi32(_mm512_slli_epi32::<2>(number), _mm512_set1_epi32(element as i32));
                let low = _mm512_permutex2var_epi32(rows[0], index, rows[1]);
                *half = if few {
                    low
                } else {
                    let high = _mm512_permutex2var_epi32(rows[2], index, rows[3]);
                    _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(number, _mm512_set1_epi32(7)), low, high)
                };
            }
            store(halves, words);
        }
        return out;
    }
    let deltas = pattern.deltas_by_lane();
    let halves = load(deltas);
    for (element, words) in out.iter_mut().enumerate().take(elements) {
        // SAFETY: the caller promises 4 bytes at each lane's distance; lanes that are not active have distance 0, which an active
        // lane has too.
        let gathered = unsafe {
            let base = base.add(first as usize + 4 * element).cast();
            [_mm512_i32gather_epi32::<1>(halves[0], base), _mm512_i32gather_epi32::<1>(halves[1], base)]
        };
        store(gathered, words);
    }
    out
}
