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

use crate::lanes::{Lanes, WARP, f32_to_f16};
use crate::tensor::numerics;

/// Fills `out`, `[m][k]`, from A's registers. `m` is 8 or 16.
#[inline(always)]
pub(crate) fn read_a<const E: usize>(
    widen: impl Fn(u32) -> [f32; E],
    file: &[Lanes],
    places: &[u32],
    m: usize,
    k: usize,
    out: &mut [f32],
) {
    for (index, &place) in places.iter().enumerate() {
        let (row, depth) = (8 * (index % (m / 8)), 4 * E * (index / (m / 8)));
        let register = &file[place as usize].0;
        for (group, lanes) in register.as_chunks::<4>().0.iter().enumerate() {
            let row = &mut out[(row + group) * k + depth..][..4 * E];
            for (out, &lane) in row.as_chunks_mut::<E>().0.iter_mut().zip(lanes) {
                *out = widen(lane);
            }
        }
    }
}

/// Fills `out`, `[k][8]`, from B's registers.
#[inline(always)]
pub(crate) fn read_b<const E: usize>(widen: impl Fn(u32) -> [f32; E], file: &[Lanes], places: &[u32], out: &mut [f32]) {
    for (index, &place) in places.iter().enumerate() {
        let register = &file[place as usize].0;
        let out = &mut out[4 * E * index * 8..][..4 * E * 8];
        for lane in 0..WARP {
            let words = widen(register[lane]);
            for (offset, &word) in words.iter().enumerate() {
                out[(E * (lane % 4) + offset) * 8 + lane / 4] = word;
            }
        }
    }
}

/// Where elements `2 pair` and `2 pair + 1` of lane 0 lie in `[m][n]`; those of lanes 0 to 3 take eight places from there, those
/// of the next four lanes the same places one row further.
#[inline(always)]
fn corner(pair: usize, m: usize, n: usize) -> usize {
    8 * (pair % (m / 8)) * n + 8 * (pair / (m / 8))
}

/// Fills `out`, `[m][n]`, from f32 accumulators.
#[inline(always)]
pub(crate) fn read_words(file: &[Lanes], places: &[u32], m: usize, n: usize, out: &mut [f32]) {
    for (pair, places) in places.as_chunks().0.iter().enumerate() {
        let [even, odd] = places.map(|place| &file[place as usize].0);
        let start = corner(pair, m, n);
        for group in 0..8 {
            let row = &mut out[start + group * n..][..8];
            for t in 0..4 {
                row[2 * t] = f32::from_bits(even[4 * group + t]);
                row[2 * t + 1] = f32::from_bits(odd[4 * group + t]);
            }
        }
    }
}

/// The reverse of [`read_words`].
#[inline(always)]
pub(crate) fn write_words(from: &[f32], m: usize, n: usize, file: &mut [Lanes], places: &[u32]) {
    for (pair, &[even, odd]) in places.as_chunks().0.iter().enumerate() {
        let start = corner(pair, m, n);
        for (place, parity) in [(even, 0), (odd, 1)] {
            let register = &mut file[place as usize].0;
            for group in 0..8 {
                let row = &from[start + group * n..][..8];
                for t in 0..4 {
                    register[4 * group + t] = row[2 * t + parity].to_bits();
                }
            }
        }
    }
}

/// Fills `out`, `[m][n]`, from f16 accumulators.
#[inline(always)]
pub(crate) fn read_halves(file: &[Lanes], places: &[u32], m: usize, n: usize, out: &mut [f32]) {
    for (pair, &place) in places.iter().enumerate() {
        let (register, start) = (&file[place as usize].0, corner(pair, m, n));
        for group in 0..8 {
            let row = &mut out[start + group * n..][..8];
            for t in 0..4 {
                [row[2 * t], row[2 * t + 1]] = numerics::f16(register[4 * group + t]);
            }
        }
    }
}

/// The reverse of [`read_halves`], rounding to nearest even.
#[inline(always)]
pub(crate) fn write_halves(from: &[f32], m: usize, n: usize, file: &mut [Lanes], places: &[u32]) {
    for (pair, &place) in places.iter().enumerate() {
        let (register, start) = (&mut file[place as usize].0, corner(pair, m, n));
        for group in 0..8 {
            let row = &from[start + group * n..][..8];
            for t in 0..4 {
                let [low, high] = [row[2 * t], row[2 * t + 1]].map(|x| f32_to_f16(x.to_bits()));
                register[4 * group + t] = high << 16 | low;
            }
        }
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
        let start = corner(index / 2, m, n) + index % 2;
        for lane in 0..WARP {
            let (old, sum) = (old[lane] as i32, sums[start + lane / 4 * n + 2 * (lane % 4)] as i32);
            new[lane] = if clamp { old.saturating_add(sum) } else { old.wrapping_add(sum) } as u32;
        }
        file[place as usize].0 = new;
    }
}
