//! Online softmax: the state of a row is its running maximum and running sum (Milakov and Gimelshein 2018).

use std::f32::consts::{LN_2, LOG2_E};
use std::panic::Location;

use ptx::{Compare, F32, KernelBuilder, Reg};

use crate::tile::{Fragment, RowVector};

/// `max`, or 0 where that is minus infinity: what exponents are counted from, so that `-inf - -inf` never happens.
#[track_caller]
pub fn finite_max(k: &mut KernelBuilder, max: Reg<F32>) -> Reg<F32> {
    let none = k.setp(Compare::Eq, max, f32::NEG_INFINITY);
    k.selp(0.0, max, none)
}

/// `e^(a - b)`.
#[track_caller]
pub fn exp_difference(k: &mut KernelBuilder, a: Reg<F32>, b: Reg<F32>) -> Reg<F32> {
    let difference = k.sub(a, b);
    let exponent = k.mul(difference, LOG2_E);
    k.ex2(exponent)
}

/// `max + ln(sum)` of each row: minus infinity where the sum is empty.
#[track_caller]
pub fn log_sum_exp(k: &mut KernelBuilder, max: &RowVector, sum: &RowVector) -> RowVector {
    let row = |(&max, &sum): (&Reg<F32>, &Reg<F32>)| {
        let log = k.lg2(sum);
        k.fma(log, LN_2, max)
    };
    RowVector(max.0.iter().zip(&sum.0).map(row).collect())
}

/// The running state of a thread's rows, with exponents to base 2: FlashAttention-2's.
#[derive(Clone, Debug)]
pub struct OnlineSoftmax {
    /// The largest score so far, times `log2(e)`.
    max: RowVector,
    /// The sum of exponentials so far, of this lane's columns.
    sum: RowVector,
    /// The sum of exponentials times values so far: the output, not divided yet.
    pub out: Fragment,
}

impl OnlineSoftmax {
    /// The state before any key, for outputs of `columns` columns.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, rows: u32, columns: u32) -> Self {
        k.at(Location::caller(), |k| Self {
            max: RowVector::splat(k, rows, f32::NEG_INFINITY),
            sum: RowVector::splat(k, rows, 0.0),
            out: Fragment::zero(k, rows, columns),
        })
    }

    /// Takes a tile of scores (times `log2(e)`) in: they become their exponentials, and what was summed before is
    /// rescaled to the new maximum. The caller adds the exponentials times the values to `out`.
    #[track_caller]
    pub fn absorb(&self, k: &mut KernelBuilder, scores: &Fragment) {
        k.at(Location::caller(), |k| {
            let tile_max = scores.row_max(k);
            let mut rescale = Vec::new();
            for (index, (&max, &tile_max)) in self.max.0.iter().zip(&tile_max.0).enumerate() {
                let before = k.mov(max);
                k.max_to(max, max, tile_max);
                let base = finite_max(k, max);
                for &score in scores.row(index) {
                    k.sub_to(score, score, base);
                    k.ex2_to(score, score);
                }
                let change = k.sub(before, base);
                rescale.push(k.ex2(change));
            }
            let rescale = RowVector(rescale);
            let tile_sum = scores.lane_sums(k);
            for ((&sum, &tile_sum), &rescale) in self.sum.0.iter().zip(&tile_sum.0).zip(&rescale.0) {
                k.fma_to(sum, sum, rescale, tile_sum);
            }
            self.out.scale_rows(k, &rescale);
        });
    }

    /// Divides the output by the sum, once, and returns the logarithm of each row's sum of exponentials.
    #[track_caller]
    pub fn finish(self, k: &mut KernelBuilder) -> (Fragment, RowVector) {
        k.at(Location::caller(), |k| {
            let sum = self.sum.across_lanes(k);
            let max = RowVector(self.max.0.iter().map(|&max| k.mul(max, LN_2)).collect());
            self.out.divide_rows(k, &sum);
            let lse = log_sum_exp(k, &max, &sum);
            (self.out, lse)
        })
    }
}
