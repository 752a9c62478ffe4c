//! What becomes of the product of a query and a key before softmax: scale, softcap, ALiBi.

use std::f32::consts::LOG2_E;
use std::panic::Location;

use ptx::{Compare, F32, Global, KernelBuilder, Pointer, Reg, S32, U32, U64};

use crate::accumulator::{Accumulator, PerRow};
use crate::config::Config;
use crate::schedule::{Schedule, Work};

/// How products become scores: kernel parameters.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// What takes a score, as [`Scores::modify`] leaves it, to an exponent to base 2.
    pub to_exponent: Reg<F32>,
    scale: Reg<F32>,
    softcap: Option<Softcap>,
    slopes: Option<Slopes>,
}

#[derive(Clone, Copy, Debug)]
struct Softcap {
    cap: Reg<F32>,
    /// `scale / cap`.
    factor: Reg<F32>,
}

#[derive(Clone, Copy, Debug)]
struct Slopes {
    base: Reg<U64>,
    /// Slopes of a batch entry; 0 where all have the same.
    batch: Reg<U32>,
}

/// ALiBi for a thread's two rows.
#[derive(Clone, Copy, Debug)]
pub struct Alibi {
    /// The slopes of the rows' heads, negated.
    minus_slope: PerRow<Reg<F32>>,
    /// The keys that the rows' queries stand at.
    position: PerRow<Reg<S32>>,
}

impl Scores {
    /// Declares `scale`, with a cap `softcap`, with slopes `alibi_slopes` and the number of those of a batch entry.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, config: &Config) -> Self {
        k.at(Location::caller(), |k| {
            let scale = k.param::<F32>("scale");
            let softcap = config.softcap.then(|| {
                let cap = k.param::<F32>("softcap");
                Softcap { cap, factor: k.div_rn(scale, cap) }
            });
            let slopes = config
                .alibi
                .then(|| Slopes { base: k.pointer_param("alibi_slopes", 4), batch: k.param("alibi_slopes_batch") });
            let to_exponent = match (softcap, slopes) {
                (None, None) => k.mul(scale, LOG2_E),
                _ => k.mov(LOG2_E),
            };
            Self { to_exponent, scale, softcap, slopes }
        })
    }

    /// Where products are to be multiplied by `descale` first.
    #[track_caller]
    pub fn scaled(&self, k: &mut KernelBuilder, descale: Reg<F32>) -> Self {
        k.at(Location::caller(), |k| {
            let softcap = self.softcap.map(|Softcap { cap, factor }| Softcap { cap, factor: k.mul(factor, descale) });
            let to_exponent = match (self.softcap, self.slopes) {
                (None, None) => k.mul(self.to_exponent, descale),
                _ => self.to_exponent,
            };
            Self { to_exponent, scale: k.mul(self.scale, descale), softcap, slopes: self.slopes }
        })
    }

    /// ALiBi for a thread's rows `row` and `row + 8` of a tile, if there is any.
    #[track_caller]
    pub fn alibi(&self, k: &mut KernelBuilder, schedule: &Schedule, work: &Work, row: Reg<S32>) -> Option<Alibi> {
        let slopes = self.slopes?;
        Some(k.at(Location::caller(), |k| {
            let first = k.add(work.row, row);
            let rows = [0, 8].map(|offset| {
                let row = k.add(first, offset);
                let (query, head) = schedule.query(k, row);
                // Rows past the end have no slope of their own: whatever is read, they are not stored.
                let head = match head {
                    None => work.head,
                    Some(head) => {
                        let head = schedule.some_of_group(k, head);
                        k.add(head, work.head)
                    }
                };
                let index = k.mad(work.batch, slopes.batch, head);
                let place = k.mad_wide(index, 4, slopes.base);
                let slope = k.ld::<F32, _>(Pointer::<Global>::at(place));
                (k.neg(slope), k.add(query, work.diagonal))
            });
            Alibi { minus_slope: rows.map(|(slope, _)| slope), position: rows.map(|(_, position)| position) }
        }))
    }

    /// Products become scores, where that takes more than a factor. `key` is the key of the thread's first column.
    #[track_caller]
    pub fn modify(&self, k: &mut KernelBuilder, scores: &Accumulator, alibi: Option<&Alibi>, key: Reg<S32>) {
        k.at(Location::caller(), |k| {
            if let Some(softcap) = self.softcap {
                softcap.cap(k, &scores.values);
            } else if alibi.is_some() {
                scores.values.iter().for_each(|&score| k.mul_to(score, score, self.scale));
            }
            let Some(alibi) = alibi else { return };
            for row in 0..2 {
                let distance = k.sub(alibi.position[row], key);
                let distance = k.cvt::<F32, _>(distance);
                for (column, score) in scores.row(row) {
                    let distance = k.sub(distance, column as f32);
                    let distance = k.and(distance.cast::<U32>(), 0x7fff_ffff);
                    k.fma_to(score, alibi.minus_slope[row], distance.cast::<F32>(), score);
                }
            }
        });
    }
}

impl Softcap {
    /// Each product `s` becomes `cap tanh(s factor)`. `tanh.approx` is good to 11 bits alone, which the cap multiplies; this is off
    /// by about 2^-21 of the cap at most, and near 0 by as little of the score.
    ///
    /// `1 - 2 / (e^2x + 1)`, or near 0, where that cancels, the beginning of the series, `x - x^3 / 3`.
    fn cap(self, k: &mut KernelBuilder, products: &[Reg<F32>]) {
        /// Where the next term of the series, `2 x^5 / 15`, is as large as what cancelling costs.
        const NEAR: f32 = 1.0 / 16.0;
        let Self { cap, factor } = self;
        let minus_twice = k.mul(cap, -2.0);
        let minus_third = k.mul(cap, -1.0 / 3.0);
        for &product in products {
            let x = k.mul(product, factor);
            let exponent = k.mul(x, 2.0 * LOG2_E);
            let power = k.ex2(exponent);
            let sum = k.add(power, 1.0);
            let inverse = k.rcp_approx(sum);
            let far = k.fma(inverse, minus_twice, cap);
            let square = k.mul(x, x);
            let slope = k.fma(square, minus_third, cap);
            let near = k.mul(x, slope);
            let is_near = k.setp(Compare::Lt, square, NEAR * NEAR);
            k.selp_to(product, near, far, is_near);
        }
    }
}
