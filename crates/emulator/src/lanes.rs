//! A warp's registers: one value per lane, and the scalar functions that work on them.
//!
//! Everything here is written lane by lane over fixed arrays, so that the compiler makes vector code of it wherever the
//! interpreter is compiled for a machine that has wide vectors.

/// Lanes of a warp.
pub(crate) const WARP: usize = 32;
/// The mask of all lanes.
pub(crate) const ALL: u32 = u32::MAX;

/// A register of up to 32 bits in every lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Lanes(pub [u32; WARP]);

/// A 64-bit register in every lane; as large as two [`Lanes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Wide(pub [u64; WARP]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0; WARP]);
}

/// The number that up to eight bytes hold, the lowest first.
#[inline(always)]
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// A function of every lane. (`array::map` is not inlined into code for other vector widths.)
#[inline(always)]
pub(crate) fn each<T: Copy, U: Copy + Default>(values: [T; WARP], function: impl Fn(T) -> U) -> [U; WARP] {
    let mut out = [U::default(); WARP];
    for lane in 0..WARP {
        out[lane] = function(values[lane]);
    }
    out
}

/// All ones in the lanes of a mask.
#[inline(always)]
pub(crate) fn expand(mask: u32) -> [u32; WARP] {
    let mut lanes = [0; WARP];
    for lane in 0..WARP {
        lanes[lane] = if mask >> lane & 1 == 1 { u32::MAX } else { 0 };
    }
    lanes
}

/// The lanes where a condition holds, as a mask.
#[inline(always)]
pub(crate) fn collect(condition: impl Fn(usize) -> bool) -> u32 {
    (0..WARP).fold(0, |mask, lane| mask | u32::from(condition(lane)) << lane)
}

/// `2^x`, rounded to nearest: within the 2 ulp that `ex2.approx` promises (PTX ISA 9.7.3.21).
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Taylor coefficients of 2^r: ln(2)^k / k!. On |r| <= 1/2 the remainder is under 2e-10.
    const C: [f64; 9] = [
        1.0,
        std::f64::consts::LN_2,
        0.240_226_506_959_100_7,
        0.055_504_108_664_821_58,
        0.009_618_129_107_628_477,
        0.001_333_355_814_642_844_3,
        0.000_154_035_303_933_816_1,
        0.000_015_252_733_804_059_84,
        0.000_001_321_548_679_014_430_8,
    ];
    // Adding and subtracting this rounds to an integer, which then stands in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // `clamp` keeps a NaN.
    let clamped = f64::from(x.clamp(-160.0, 160.0));
    let shifted = clamped + ROUND;
    let r = clamped - (shifted - ROUND);
    let mut p = C[8];
    p = p.mul_add(r, C[7]);
    p = p.mul_add(r, C[6]);
    p = p.mul_add(r, C[5]);
    p = p.mul_add(r, C[4]);
    p = p.mul_add(r, C[3]);
    p = p.mul_add(r, C[2]);
    p = p.mul_add(r, C[1]);
    p = p.mul_add(r, C[0]);
    let scale = f64::from_bits((shifted.to_bits().wrapping_add(1023)) << 52);
    (p * scale) as f32
}

/// Subnormal numbers to zero of their sign, as `.ftz` does.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// `max` and `min` of PTX: of a number and a NaN the number, and +0 above -0 (9.7.3.11).
#[inline(always)]
pub(crate) fn max(a: f32, b: f32) -> f32 {
    let larger = if a > b || (a == b && a.is_sign_positive()) { a } else { b };
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else {
        larger
    }
}

/// See [`max`].
#[inline(always)]
pub(crate) fn min(a: f32, b: f32) -> f32 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else {
        smaller
    }
}

/// The bits of the `f32` that equals an `f16` given by its bits.
#[inline(always)]
pub(crate) fn f16_to_f32(half: u32) -> u32 {
    let magnitude = (half & 0x7fff) << 13;
    // Exponents differ by 112: a multiplication moves it, subnormal numbers included.
    let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let special = magnitude | 0x7f80_0000;
    (if half & 0x7c00 == 0x7c00 { special } else { finite }) | (half & 0x8000) << 16
}

/// An `f32` by its bits to the nearest `f16`, ties to even; NaN becomes the canonical one.
#[inline(always)]
pub(crate) fn f32_to_f16(bits: u32) -> u32 {
    let magnitude = bits & 0x7fff_ffff;
    let normal = (magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1))).wrapping_sub(0x3800_0000) >> 13;
    // Adding 1/2 puts the last place of a subnormal f16 at the last place of the sum.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let limited = if magnitude >= 0x477f_f000 { 0x7c00 } else { finite };
    if magnitude > 0x7f80_0000 { 0x7fff } else { limited | (bits >> 16 & 0x8000) }
}

/// An `f32` by its bits to the nearest `bf16`, ties to even; NaN becomes the canonical one.
#[inline(always)]
pub(crate) fn f32_to_bf16(bits: u32) -> u32 {
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_both_ways() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            let found = f32::from_bits(f16_to_f32(u32::from(bits)));
            assert!(found == expected || (found.is_nan() && expected.is_nan()), "{bits:04x}");
            if !found.is_nan() {
                assert_eq!(f32_to_f16(found.to_bits()), u32::from(bits));
            }
        }
    }

    #[test]
    fn rounding_to_halves_is_to_nearest_even() {
        for step in 0..=u32::MAX / 65_521 {
            let x = f32::from_bits(step * 65_521);
            if x.is_nan() {
                assert_eq!((f32_to_f16(x.to_bits()), f32_to_bf16(x.to_bits())), (0x7fff, 0x7fff));
            } else {
                assert_eq!(f32_to_f16(x.to_bits()), u32::from(half::f16::from_f32(x).to_bits()), "{x:e}");
                assert_eq!(f32_to_bf16(x.to_bits()), u32::from(half::bf16::from_f32(x).to_bits()), "{x:e}");
            }
        }
    }

    #[test]
    fn exp2_is_within_an_ulp() {
        for step in 0..200_000 {
            let x = -160.0 + step as f32 * 0.0016;
            let exact = f64::from(x).exp2();
            let found = exp2(x);
            if exact < f64::from(f32::MAX) {
                let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
                assert!((f64::from(found) - exact).abs() <= 0.51 * ulp, "{x}: {found:e} against {exact:e}");
            }
        }
        assert_eq!((exp2(f32::NEG_INFINITY), exp2(f32::INFINITY), exp2(0.0)), (0.0, f32::INFINITY, 1.0));
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn max_and_min_prefer_numbers_and_order_zeros() {
        assert_eq!((max(f32::NAN, 1.0), max(1.0, f32::NAN), min(f32::NAN, 1.0)), (1.0, 1.0, 1.0));
        assert!(max(-0.0, 0.0).is_sign_positive() && max(0.0, -0.0).is_sign_positive());
        assert!(min(-0.0, 0.0).is_sign_negative() && min(0.0, -0.0).is_sign_negative());
    }
}
