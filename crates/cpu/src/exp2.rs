//! `2^x` by range reduction and a polynomial.

use pulp::Simd;

/// Of `2^f` for `|f| <= 1/2`, the highest power first: relative error at most 9.2e-8, by Lawson's iteration on a least-squares
/// fit whose constant is 1. (The linear term is close to ln 2, and not it.)
const POLYNOMIAL: [f32; 6] = [1.326_472_7e-3, 9.671_513e-3, 5.550_734e-2, 2.402_224_2e-1, LINEAR, 1.0];
const LINEAR: f32 = f32::from_bits(0x3f31_7215);

/// `1.5 * 2^23`: added to a float of less than 2^22, it leaves the nearest integer in the lower bits.
const ROUND: f32 = 12_582_912.0;

/// The least exponent of a normal float: less gives 0.
const LEAST: f32 = -126.0;

/// `2^x` for `x <= 127`, to about two units in the last place; 0 where that would be subnormal, and for minus infinity.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let shifted = simd.add_f32s(x, simd.splat_f32s(ROUND));
    let f = simd.sub_f32s(x, simd.sub_f32s(shifted, simd.splat_f32s(ROUND)));
    let mut power = simd.splat_f32s(POLYNOMIAL[0]);
    for coefficient in &POLYNOMIAL[1..] {
        power = simd.mul_add_e_f32s(power, f, simd.splat_f32s(*coefficient));
    }
    let exponent = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let scaled = simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(power), exponent));
    simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(LEAST)), simd.splat_f32s(0.0), scaled)
}
