//! What becomes of a query's products: the scale, the cap and the bias.

use kernels::Problem;
use pulp::{Simd, WithSimd};

use crate::exp2::exp2;

/// A row of products to be scaled, capped and biased.
pub(crate) struct Adjust<'a> {
    pub problem: &'a Problem,
    pub scores: &'a mut [f32],
    /// The key of the first.
    pub first: usize,
    /// The key where the bias is 0.
    pub diagonal: f32,
    pub slope: f32,
}

impl WithSimd for Adjust<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Adjust { problem, scores, first, diagonal, slope } = self;
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
                *score -= slope * (diagonal - key as f32).abs();
            }
        }
    }
}

/// `1 - 2 / (e^2x + 1)`.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    /// From here on the result is 1.
    const FAR: f32 = 20.0;
    let near = simd.min_f32s(simd.max_f32s(x, simd.splat_f32s(-FAR)), simd.splat_f32s(FAR));
    let power = exp2(simd, simd.mul_f32s(near, simd.splat_f32s(2.0 * std::f32::consts::LOG2_E)));
    let one = simd.splat_f32s(1.0);
    simd.sub_f32s(one, simd.div_f32s(simd.splat_f32s(2.0), simd.add_f32s(power, one)))
}
