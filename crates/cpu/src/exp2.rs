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
    let scaled = compose(simd, &POLYNOMIAL, f, shifted);
    simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(LEAST)), simd.splat_f32s(0.0), scaled)
}

/// `2^(x (a + b))` for `0 <= x (a + b) <= 126`, to one unit in the last place; `b` is what is left out of `a`.
#[inline(always)]
pub(crate) fn exp2_of_product<S: Simd>(simd: S, x: S::f32s, a: f32, b: f32) -> S::f32s {
    /// As [`POLYNOMIAL`], with one power more: relative error at most 2e-9.
    const FINE: [f32; 7] =
        [1.535_336_2e-4, 1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, std::f32::consts::LN_2, 1.0];
    let (a, b) = (simd.splat_f32s(a), simd.splat_f32s(b));
    let shifted = simd.mul_add_e_f32s(x, a, simd.splat_f32s(ROUND));
    let whole = simd.sub_f32s(shifted, simd.splat_f32s(ROUND));
    let f = simd.mul_add_e_f32s(x, b, simd.mul_add_e_f32s(x, a, simd.neg_f32s(whole)));
    compose(simd, &FINE, f, shifted)
}

/// `2^(n + f)` from a polynomial of `f`, and from `n` in the lower bits of `shifted`.
#[inline(always)]
fn compose<S: Simd>(simd: S, polynomial: &[f32], f: S::f32s, shifted: S::f32s) -> S::f32s {
    let mut power = simd.splat_f32s(polynomial[0]);
    for coefficient in &polynomial[1..] {
        power = simd.mul_add_e_f32s(power, f, simd.splat_f32s(*coefficient));
    }
    let exponent = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(power), exponent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::WithSimd;

    struct Exp2<'a>(&'a mut [f32]);

    impl WithSimd for Exp2<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for vector in S::as_mut_simd_f32s(self.0).0 {
                *vector = exp2(simd, *vector);
            }
        }
    }

    #[test]
    fn powers_are_as_exact_as_promised() {
        let given: Vec<f32> = (-125_999..=0).map(|i| i as f32 * 1e-3).collect();
        let mut found = given.clone();
        found.extend([f32::NEG_INFINITY, -126.5, -1e30]);
        found.resize(found.len().next_multiple_of(64), 0.0);
        pulp::Arch::new().dispatch(Exp2(&mut found));
        assert_eq!((found[given.len() - 1], &found[given.len()..][..3]), (1.0, &[0.0; 3][..]));
        for (x, found) in given.into_iter().zip(found) {
            let expected = f64::from(x).exp2();
            assert!((f64::from(found) - expected).abs() <= 2.2e-7 * expected, "2^{x} is {expected}: not {found}");
        }
    }
}
