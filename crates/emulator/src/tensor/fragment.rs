//! How matrices lie in the registers of a warp (PTX ISA 9.7.14.5.1 to 9.7.14.5.13 for `mma`, 9.7.15.5.1.1 for `wgmma`).
//!
//! Lane `4 g + t` belongs to row (of A and the accumulator) or column (of B) `g` of each group of eight. A 32-bit register
//! holds `e` elements that follow each other along `k` (A, B), or one or two of a row (accumulator). All shapes are made of
//! the same pieces:
//!
//! - A, `m` rows: register `r` holds row `g + 8 (r mod m/8)`, from `k = 4 e (r / (m/8)) + e t` on;
//! - B: register `r` holds column `g`, from `k = 4 e r + e t` on;
//! - accumulator, `m` rows: element `i` is row `g + 8 (i / 2 mod m/8)`, column `8 (i / (m/4)) + 2 t + i mod 2`.
//!
//! Registers are given as a warp's file and the places in it.

use crate::lanes::{Lanes, WARP, f16_to_f32, f32_to_f16};
use crate::tensor::numerics::Element;

/// Fills `out`, `[m][k]`, from A's registers. `m` is 8 or 16.
#[inline(always)]
pub(crate) fn read_a(element: Element, file: &[Lanes], places: &[u32], m: usize, k: usize, out: &mut [f32]) {
    let per_word = element.per_word();
    for (index, &place) in places.iter().enumerate() {
        let (row, depth) = (8 * (index % (m / 8)), 4 * per_word * (index / (m / 8)));
        let register = &file[place as usize].0;
        for lane in 0..WARP {
            let words = element.widen(register[lane]);
            let start = (row + lane / 4) * k + depth + per_word * (lane % 4);
            out[start..start + per_word].copy_from_slice(&words[..per_word]);
        }
    }
}

/// Fills `out`, `[k][8]`, from B's registers.
#[inline(always)]
pub(crate) fn read_b(element: Element, file: &[Lanes], places: &[u32], out: &mut [f32]) {
    let per_word = element.per_word();
    for (index, &place) in places.iter().enumerate() {
        let register = &file[place as usize].0;
        for lane in 0..WARP {
            let words = element.widen(register[lane]);
            let depth = 4 * per_word * index + per_word * (lane % 4);
            for (offset, &word) in words[..per_word].iter().enumerate() {
                out[(depth + offset) * 8 + lane / 4] = word;
            }
        }
    }
}

/// For each lane, where elements `2 pair` and `2 pair + 1` of the accumulator lie in `[m][n]`: the index of the first.
#[inline(always)]
fn for_pair(pair: usize, m: usize, n: usize, mut visit: impl FnMut(usize, usize)) {
    let start = 8 * (pair % (m / 8)) * n + 8 * (pair / (m / 8));
    for lane in 0..WARP {
        visit(lane, start + lane / 4 * n + 2 * (lane % 4));
    }
}

/// Fills `out`, `[m][n]`, from f32 accumulators.
#[inline(always)]
pub(crate) fn read_words(file: &[Lanes], places: &[u32], m: usize, n: usize, out: &mut [f32]) {
    for (pair, places) in places.as_chunks().0.iter().enumerate() {
        let [even, odd] = places.map(|place| &file[place as usize].0);
        for_pair(pair, m, n, |lane, at| {
            out[at] = f32::from_bits(even[lane]);
            out[at + 1] = f32::from_bits(odd[lane]);
        });
    }
}

/// The reverse of [`read_words`].
#[inline(always)]
pub(crate) fn write_words(from: &[f32], m: usize, n: usize, file: &mut [Lanes], places: &[u32]) {
    for (pair, &[even, odd]) in places.as_chunks().0.iter().enumerate() {
        for_pair(pair, m, n, |lane, at| file[even as usize].0[lane] = from[at].to_bits());
        for_pair(pair, m, n, |lane, at| file[odd as usize].0[lane] = from[at + 1].to_bits());
    }
}

/// Fills `out`, `[m][n]`, from f16 accumulators.
#[inline(always)]
pub(crate) fn read_halves(file: &[Lanes], places: &[u32], m: usize, n: usize, out: &mut [f32]) {
    for (pair, &place) in places.iter().enumerate() {
        let register = &file[place as usize].0;
        for_pair(pair, m, n, |lane, at| {
            out[at] = f32::from_bits(f16_to_f32(register[lane] & 0xffff));
            out[at + 1] = f32::from_bits(f16_to_f32(register[lane] >> 16));
        });
    }
}

/// The reverse of [`read_halves`], rounding to nearest even.
#[inline(always)]
pub(crate) fn write_halves(from: &[f32], m: usize, n: usize, file: &mut [Lanes], places: &[u32]) {
    for (pair, &place) in places.iter().enumerate() {
        let register = &mut file[place as usize].0;
        for_pair(pair, m, n, |lane, at| {
            register[lane] = f32_to_f16(from[at + 1].to_bits()) << 16 | f32_to_f16(from[at].to_bits());
        });
    }
}

/// Writes the sums of integer products, added to what the registers of `from_places` hold: all integers below 2^24.
#[inline(always)]
pub(crate) fn add_integers(
    sums: &[f32],
    m: usize,
    n: usize,
    clamp: bool,
    file: &mut [Lanes],
    from: Option<&[u32]>,
    to: &[u32],
) {
    for (index, &place) in to.iter().enumerate() {
        let old = from.map_or([0; WARP], |from| file[from[index] as usize].0);
        let mut new = [0; WARP];
        for_pair(index / 2, m, n, |lane, at| {
            let (old, sum) = (old[lane] as i32, sums[at + index % 2] as i32);
            new[lane] = if clamp { old.saturating_add(sum) } else { old.wrapping_add(sum) } as u32;
        });
        file[place as usize].0 = new;
    }
}
