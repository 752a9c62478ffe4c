//! What becomes of a query's products: the scale, the cap and the bias.

use kernels::Problem;
use pulp::{Simd, WithSimd};

use crate::exp2::exp2_of_product;
use crate::tiles::Sight;

/// A row of products to be scaled, capped and biased.
pub(crate) struct Adjust<'a> {
    pub problem: &'a Problem,
    pub scores: &'a mut [f32],
    /// The key of the first.
    pub first: usize,
    pub sight: &'a Sight,
}

impl WithSimd for Adjust<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Adjust { problem, scores, first, sight } = self;
        let scale = problem.scale() as f32;
        scores.iter_mut().for_each(|score| *score *= scale);
        if let Some(cap) = problem.softcap {
            let (vectors, rest) = S::as_mut_simd_f32s(scores);
            let capped = |vector| {
                let share = simd.mul_f32s(vector, simd.splat_f32s(cap.recip()));
                simd.mul_f32s(tanh(simd, share), simd.splat_f32s(cap))
            };
            vectors.iter_mut().for_each(|vector| *vector = capped(*vector));
            let last = capped(simd.partial_load_f32s(rest));
            simd.partial_store_f32s(rest, last);
        }
        if problem.alibi_slopes.is_some() {
            for (score, key) in scores.iter_mut().zip(first..) {
                *score -= sight.slope * (sight.diagonal - key as f32).abs();
            }
        }
    }
}

/// The hyperbolic tangent, to two units in the last place: capped scores are as exact as those that are not.
///
/// Near 0 `x + x^3 p(x^2)`, else `1 - 2 / (e^2|x| + 1)`; the polynomials by Lawson's iteration on least-squares fits.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    /// Up to here the first form is taken, and from here on the result is 1.
    const NEAR: f32 = 0.625;
    const FAR: f32 = 20.0;
    /// Of `p`, the highest power first: relative error at most 4.4e-9.
    const ODD: [f32; 5] = [-5.704_987e-3, 2.063_908_7e-2, -5.373_971_5e-2, 1.333_144_2e-1, -3.333_328e-1];
    /// `2 log2 e`, and what f32 leaves out of it.
    const TURN: f32 = 2.0 * std::f32::consts::LOG2_E;
    const TURN_REST: f32 = 3.851_926e-8;
    let splat = |value| simd.splat_f32s(value);
    let square = simd.mul_f32s(x, x);
    let mut odd = splat(ODD[0]);
    for coefficient in &ODD[1..] {
        odd = simd.mul_add_e_f32s(odd, square, splat(*coefficient));
    }
    let near = simd.mul_add_e_f32s(simd.mul_f32s(x, square), odd, x);

    let size = simd.min_f32s(simd.abs_f32s(x), splat(FAR));
    let power = exp2_of_product(simd, size, TURN, TURN_REST);
    let far = simd.sub_f32s(splat(1.0), simd.div_f32s(splat(2.0), simd.add_f32s(power, splat(1.0))));
    let far = simd.select_f32s(simd.less_than_f32s(x, splat(0.0)), simd.neg_f32s(far), far);
    // (A score that is no number stays none: no comparison holds of it.)
    simd.select_f32s(simd.less_than_f32s(splat(NEAR), simd.abs_f32s(x)), far, near)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tanh<'a>(&'a mut [f32]);

    impl WithSimd for Tanh<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for vector in S::as_mut_simd_f32s(self.0).0 {
                *vector = tanh(simd, *vector);
            }
        }
    }

    #[test]
    fn tanh_is_as_exact_as_f32() {
        let given: Vec<f32> = (-40_000..40_000).map(|i| i as f32 * 3.1e-4).chain([1e9, -1e9, 0.0, 1e-30]).collect();
        let mut found = given.clone();
        found.resize(given.len().next_multiple_of(64), 0.0);
        pulp::Arch::new().dispatch(Tanh(&mut found));
        for (x, found) in given.into_iter().zip(found) {
            let expected = f64::from(x).tanh();
            let error = (f64::from(found) - expected).abs();
            assert!(error <= 2.0 * kernels::Dtype::F32.ulp(expected), "tanh {x} is {expected}: not {found}");
        }
    }
}
