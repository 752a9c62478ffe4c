//! Rows of a matrix as tensor cores leave them in registers, and online softmax on them.
//!
//! `mma` and `wgmma` share one arrangement (PTX ISA, "Matrix fragments for mma.m16n8k16" and "Register fragments for
//! wgmma.mma_async.m64nNk16"): of every 16 rows by 8 columns, a lane holds two neighbouring columns, `2 (lane mod 4)` and
//! the next, in the rows `lane / 4` and `lane / 4 + 8`. So four lanes, a *quad*, share a row, a thread has two rows, and
//! what is computed per row comes in pairs, [`PerRow`].

use std::f32::consts::LN_2;
use std::panic::Location;

use ptx::{B32, Compare, E4m3x2, F16, F32, Global, KernelBuilder, Pointer, Pred, Reg, S32, U32, U64};

use crate::Dtype;
use crate::convert::{Words, narrow_pair_to};
use crate::softmax::finite_max;

/// Something for each of a thread's two rows.
pub type PerRow<T> = [T; 2];

/// Columns of one fragment.
const FRAGMENT: u32 = 8;

/// Where a thread stands in its warp's fragments.
#[derive(Clone, Copy, Debug)]
pub struct Quad {
    /// Its place in the quad, `0..4`.
    pub place: Reg<U32>,
    /// The first of its two rows among the warp's 16; the other is 8 further.
    pub row: Reg<U32>,
}

impl Quad {
    /// Of the thread whose lane this is.
    #[track_caller]
    pub fn of_lane(k: &mut KernelBuilder, lane: Reg<U32>) -> Self {
        k.at(Location::caller(), |k| Self { place: k.and(lane, 3), row: k.shr(lane, 2) })
    }
}

/// Sixteen rows of f32 for each warp.
#[derive(Clone, Debug)]
pub struct Accumulator {
    /// `[columns / 8][row][column of two]`.
    pub values: Vec<Reg<F32>>,
}

/// The keys that a thread's rows see of a block, counted from the thread's first column: those from `first` (where there
/// is such a bound) up to `end`, exclusive.
#[derive(Clone, Copy, Debug)]
pub struct Visible {
    /// The first key seen.
    pub first: Option<PerRow<Reg<S32>>>,
    /// The first key after those.
    pub end: PerRow<Reg<S32>>,
}

impl Accumulator {
    /// Registers for so many columns, a multiple of 8, that hold nothing yet.
    pub fn new(k: &mut KernelBuilder, columns: u32) -> Self {
        Self { values: k.regs(columns as usize / 2) }
    }

    /// Columns.
    pub fn columns(&self) -> u32 {
        2 * self.values.len() as u32
    }

    /// Sets every element to 0.
    #[track_caller]
    pub fn clear(&self, k: &mut KernelBuilder) {
        self.values.iter().for_each(|&value| k.mov_to(value, 0.0));
    }

    /// Registers for so many columns, a multiple of 8, that hold 0.
    #[track_caller]
    pub fn zeros(k: &mut KernelBuilder, columns: u32) -> Self {
        let zeros = Self::new(k, columns);
        zeros.clear(k);
        zeros
    }

    /// So many columns of it, from `first` on, both multiples of 8: the same registers.
    pub fn columns_from(&self, first: u32, columns: u32) -> Self {
        Self { values: self.values[first as usize / 2..][..columns as usize / 2].to_vec() }
    }

    /// The thread's elements of a row, with their columns counted from the thread's first.
    pub fn row(&self, row: usize) -> impl Iterator<Item = (i32, Reg<F32>)> + '_ {
        let fragments = self.values.chunks_exact(4).enumerate();
        fragments.flat_map(move |(index, fragment)| {
            let first = (index as u32 * FRAGMENT) as i32;
            [(first, fragment[2 * row]), (first + 1, fragment[2 * row + 1])]
        })
    }

    /// Joins a thread's elements of each row, in `chains` independent chains so that one does not wait for the other.
    fn reduce(&self, k: &mut KernelBuilder, chains: usize, join: Join) -> PerRow<Reg<F32>> {
        [0, 1].map(|row| {
            let values: Vec<_> = self.row(row).map(|(_, value)| value).collect();
            let chains = chains.min(values.len() / 2).max(1);
            let partial = (0..chains).map(|chain| {
                let mut values = values.iter().skip(chain).step_by(chains);
                let first = *values.next().unwrap_or(&self.values[0]);
                values.fold(first, |total, &value| join(k, total, value))
            });
            let partial: Vec<_> = partial.collect();
            partial[1..].iter().fold(partial[0], |total, &value| join(k, total, value))
        })
    }

    /// The largest of each row.
    #[track_caller]
    pub fn row_max(&self, k: &mut KernelBuilder) -> PerRow<Reg<F32>> {
        k.at(Location::caller(), |k| {
            let largest = self.reduce(k, 4, KernelBuilder::max);
            across_quad(k, largest, KernelBuilder::max)
        })
    }

    /// The sum of each row over this thread's columns alone.
    #[track_caller]
    pub fn thread_sums(&self, k: &mut KernelBuilder) -> PerRow<Reg<F32>> {
        k.at(Location::caller(), |k| self.reduce(k, 2, KernelBuilder::add))
    }

    /// Multiplies each row by its number.
    #[track_caller]
    pub fn scale_rows(&self, k: &mut KernelBuilder, factors: PerRow<Reg<F32>>) {
        k.at(Location::caller(), |k| {
            for (row, factor) in factors.into_iter().enumerate() {
                self.row(row).for_each(|(_, value)| k.mul_to(value, value, factor));
            }
        });
    }

    /// Multiplies each row by its number and adds another's element to each.
    #[track_caller]
    pub fn scale_rows_and_add(&self, k: &mut KernelBuilder, factors: PerRow<Reg<F32>>, other: &Self) {
        k.at(Location::caller(), |k| {
            for (row, factor) in factors.into_iter().enumerate() {
                for ((_, value), (_, other)) in self.row(row).zip(other.row(row)) {
                    k.fma_to(value, value, factor, other);
                }
            }
        });
    }

    /// Adds another's element to each.
    #[track_caller]
    pub fn add(&self, k: &mut KernelBuilder, other: &Self) {
        k.at(Location::caller(), |k| {
            for (&value, &other) in self.values.iter().zip(&other.values) {
                k.add_to(value, value, other);
            }
        });
    }

    /// The scores of keys that are not seen become minus infinity.
    #[track_caller]
    pub fn hide(&self, k: &mut KernelBuilder, visible: &Visible) {
        k.at(Location::caller(), |k| {
            for row in 0..2 {
                for (column, score) in self.row(row) {
                    let mut hidden = k.setp(Compare::Le, visible.end[row], column);
                    if let Some(first) = visible.first {
                        hidden = k.setp_or(Compare::Gt, first[row], column, hidden);
                    }
                    k.selp_to(score, f32::NEG_INFINITY, score, hidden);
                }
            }
        });
    }

    /// The elements rounded to the type, as the left factor of the next product: for each 16 columns four registers of a 16-bit
    /// type, two of an 8-bit one (PTX ISA, same sections: fragment A), the latter's columns in the order that
    /// [`Transposer`](crate::hopper::Transposer) says. Goes to `to`.
    #[track_caller]
    pub fn narrow_to(&self, k: &mut KernelBuilder, dtype: Dtype, to: &[Reg<B32>]) {
        k.at(Location::caller(), |k| {
            if dtype == Dtype::E4m3 {
                for (pair, to) in self.values.chunks_exact(8).zip(to.chunks_exact(2)) {
                    for (row, &to) in to.iter().enumerate() {
                        let [low, high] = [0, 4].map(|fragment| {
                            let first = fragment + 2 * row;
                            k.cvt_e4m3x2(pair[first + 1], pair[first])
                        });
                        k.pack_to(to, low, high);
                    }
                }
                return;
            }
            for (pair, &to) in self.values.chunks_exact(2).zip(to) {
                narrow_pair_to(k, dtype, to, pair[0], pair[1]);
            }
        });
    }

    /// What [`Accumulator::narrow_to`] lost in `rounded`, of 8-bit elements, rounded itself and laid out alike. Goes to `to`.
    #[track_caller]
    pub fn narrow_rest_to(&self, k: &mut KernelBuilder, rounded: &[Reg<B32>], to: &[Reg<B32>]) {
        k.at(Location::caller(), |k| {
            let words = rounded.chunks_exact(2).zip(to.chunks_exact(2));
            for (pair, (rounded, to)) in self.values.chunks_exact(8).zip(words) {
                for (row, (&rounded, &to)) in rounded.iter().zip(to).enumerate() {
                    let halves: [Reg<E4m3x2>; 2] = k.unpack(rounded);
                    let [low, high] = [0, 1].map(|half| {
                        let first = 4 * half + 2 * row;
                        let both = k.cvt_f16x2_e4m3x2(halves[half]);
                        let both: [Reg<F16>; 2] = k.unpack(both);
                        let [low, high] = [0, 1].map(|column| {
                            let rounded = k.cvt::<F32, _>(both[column]);
                            k.sub(pair[first + column], rounded)
                        });
                        k.cvt_e4m3x2(high, low)
                    });
                    k.pack_to(to, low, high);
                }
            }
        });
    }

    /// Stores the rows, each multiplied by its factor and rounded to the 16-bit type `rows.dtype`, where of every 16 columns the
    /// first 8 are the even ones of the output and the others the odd ones: a lane has four neighbours.
    #[track_caller]
    pub fn store_interleaved(&self, k: &mut KernelBuilder, quad: Quad, rows: &OutRows, factors: PerRow<Reg<F32>>) {
        k.at(Location::caller(), |k| {
            let column = k.mul(quad.place, FRAGMENT / 2);
            for row in 0..2 {
                for (group, fragments) in self.values.chunks_exact(8).enumerate() {
                    let words = [0, 1].map(|column| {
                        let [low, high] =
                            [0, 4].map(|fragment| k.mul(fragments[fragment + 2 * row + column], factors[row]));
                        let word = k.reg();
                        narrow_pair_to(k, rows.dtype, word, low, high);
                        word
                    });
                    rows.store_words(k, row, group as u32 * 2 * FRAGMENT, column, &words);
                }
            }
        });
    }

    /// Stores the rows, each multiplied by its factor and rounded to `rows.dtype`.
    ///
    /// Of 16-bit types, four lanes exchange what they hold so that each stores 8 neighbouring columns at once.
    #[track_caller]
    pub fn store(&self, k: &mut KernelBuilder, quad: Quad, rows: &OutRows, factors: PerRow<Reg<F32>>) {
        k.at(Location::caller(), |k| {
            if rows.dtype == Dtype::F32 {
                return self.store_pairs(k, quad, rows, factors);
            }
            let odd = [1, 2].map(|bit| {
                let bit = k.and(quad.place, bit);
                k.setp(Compare::Ne, bit, 0)
            });
            let column = k.mul(quad.place, FRAGMENT);
            for row in 0..2 {
                // For each fragment, this thread's two columns in one word.
                let words: Vec<Reg<B32>> = self
                    .values
                    .chunks_exact(4)
                    .map(|fragment| {
                        let [low, high] = [0, 1].map(|column| k.mul(fragment[2 * row + column], factors[row]));
                        let word = k.reg();
                        narrow_pair_to(k, rows.dtype, word, low, high);
                        word
                    })
                    .collect();
                for (group, words) in words.chunks(4).enumerate() {
                    let words = transpose_in_quad(k, words, odd);
                    let first = group as u32 * 4 * FRAGMENT;
                    rows.store_words(k, row, first, column, &words);
                }
            }
        });
    }
}

impl Accumulator {
    /// Stores the rows in f32, two neighbouring columns at once.
    fn store_pairs(&self, k: &mut KernelBuilder, quad: Quad, rows: &OutRows, factors: PerRow<Reg<F32>>) {
        let column = k.mul(quad.place, 2);
        for row in 0..2 {
            let place = k.mad_wide(column, 4, rows.rows[row]);
            for (index, fragment) in (0..).zip(self.values.chunks_exact(4)) {
                let values = [0, 1].map(|column| k.mul(fragment[2 * row + column], factors[row]));
                rows.store_two(k, row, index * FRAGMENT, column, place, values);
            }
        }
    }
}

type Join = fn(&mut KernelBuilder, Reg<F32>, Reg<F32>) -> Reg<F32>;

/// Joins the partial results of the four lanes that share a row; all of them get the whole.
fn across_quad(k: &mut KernelBuilder, partial: PerRow<Reg<F32>>, join: Join) -> PerRow<Reg<F32>> {
    partial.map(|mut total| {
        for lane_mask in [1, 2] {
            let other = k.shfl_bfly(total, lane_mask);
            total = join(k, total, other);
        }
        total
    })
}

/// Lane `q` of a quad gives word `i` to lane `i` and gets that lane's word `q`: the transpose of a 4x4 matrix, by
/// exchanging with the lane one apart, then with the lane two apart. Fewer than four words are padded with the last.
fn transpose_in_quad(k: &mut KernelBuilder, words: &[Reg<B32>], odd: [Reg<Pred>; 2]) -> [Reg<B32>; 4] {
    let last = words[words.len() - 1];
    let mut words = [0, 1, 2, 3].map(|index| words.get(index).copied().unwrap_or(last));
    for (bit, odd) in [(1, odd[0]), (2, odd[1])] {
        for low in (0..4).filter(|index| index & bit == 0) {
            let high = low | bit;
            let sent = k.selp(words[low], words[high], odd);
            let got = k.shfl_bfly(sent, bit as u32);
            words[low] = k.selp(got, words[low], odd);
            words[high] = k.selp(words[high], got, odd);
        }
    }
    words
}

/// A thread's two rows of the output in global memory.
#[derive(Clone, Copy, Debug)]
pub struct OutRows {
    /// The addresses of the rows' first elements.
    pub rows: PerRow<Reg<U64>>,
    /// Whether the row is one of the output.
    pub inside: PerRow<Reg<Pred>>,
    /// Elements of a row.
    pub columns: u32,
    /// Their type.
    pub dtype: Dtype,
    /// Neighbouring elements, 1, 2, 4 or 8, that may be stored at once.
    pub vector: u32,
}

impl OutRows {
    /// Stores zeros.
    #[track_caller]
    pub fn clear(&self, k: &mut KernelBuilder, quad: Quad) {
        k.at(Location::caller(), |k| {
            let bytes = self.dtype.bytes() as u32;
            let at_once = self.vector.min(16 / bytes);
            let zeros = Words::zero(k, self.dtype, at_once as usize);
            let column = k.mul(quad.place, at_once);
            k.while_(
                |k| k.setp(Compare::Lt, column, self.columns),
                |k| {
                    for row in 0..2 {
                        let place = k.mad_wide(column, bytes, self.rows[row]);
                        k.when(self.inside[row], |k| zeros.store(k, Pointer::at(place)));
                    }
                    k.add_to(column, column, 4 * at_once);
                },
            );
        });
    }

    /// Stores two columns, from `first + column` on, at `place` and `first` further; those past the end are left out.
    fn store_two(
        &self,
        k: &mut KernelBuilder,
        row: usize,
        first: u32,
        column: Reg<U32>,
        place: Reg<U64>,
        values: [Reg<F32>; 2],
    ) {
        let at_once = self.vector.min(2);
        for (offset, values) in (first..).step_by(at_once as usize).zip(values.chunks(at_once as usize)) {
            if offset >= self.columns {
                return;
            }
            let inside = if first + FRAGMENT <= self.columns {
                self.inside[row]
            } else {
                k.setp_and(Compare::Lt, column, self.columns - offset, self.inside[row])
            };
            let place = Pointer::<Global>::at(place).offset(i64::from(4 * offset));
            k.when(inside, |k| k.st_vec(place, values));
        }
    }

    /// Stores this lane's share of the quad's columns, two in each word, from `first + column` on; those past the end are left
    /// out.
    fn store_words(&self, k: &mut KernelBuilder, row: usize, first: u32, column: Reg<U32>, words: &[Reg<B32>]) {
        if first >= self.columns {
            return;
        }
        let place = k.mad_wide(column, self.dtype.bytes() as u32, self.rows[row]);
        let store = |k: &mut KernelBuilder, offset: u32, whole: bool, words: Words| {
            let inside = if whole {
                self.inside[row]
            } else {
                let left = self.columns.saturating_sub(first + offset);
                k.setp_and(Compare::Lt, column, left, self.inside[row])
            };
            let place = Pointer::<Global>::at(place).offset(i64::from((first + offset) * self.dtype.bytes() as u32));
            k.when(inside, |k| words.store(k, place));
        };
        let share = 2 * words.len() as u32;
        let whole = first + 4 * share <= self.columns;
        if self.vector > 1 {
            let vector = self.vector.min(share);
            for (index, words) in words.chunks(vector as usize / 2).enumerate() {
                store(k, index as u32 * vector, whole, Words::Full(words.to_vec()));
            }
        } else {
            for (index, &word) in words.iter().enumerate() {
                for (half, value) in k.unpack(word).into_iter().enumerate() {
                    store(k, (2 * index + half) as u32, whole, Words::Half(value));
                }
            }
        }
    }
}

/// Whether some row of the warp is to be multiplied by anything but 1. Where a factor is NaN the row's sums are NaN already.
#[track_caller]
pub fn changes(k: &mut KernelBuilder, factors: PerRow<Reg<F32>>) -> Reg<Pred> {
    k.at(Location::caller(), |k| {
        let changes = k.setp(Compare::Ne, factors[0], 1.0);
        let changes = k.setp_or(Compare::Ne, factors[1], 1.0, changes);
        k.vote_any(changes)
    })
}

/// The running maximum and the running sum of a thread's rows (Milakov and Gimelshein 2018).
#[derive(Clone, Copy, Debug)]
pub struct RowState {
    /// The largest score so far.
    max: PerRow<Reg<F32>>,
    /// The sum of exponentials so far, of this thread's columns.
    sum: PerRow<Reg<F32>>,
    /// What takes a score to an exponent to base 2.
    scale: Reg<F32>,
    /// The exponent of the largest score.
    top: f32,
    /// By how much exponents may be larger: maxima stay as they are for so long.
    slack: f32,
}

impl RowState {
    /// A state that holds nothing yet, of scores that are to be multiplied by `scale`, which has a factor `log2(e)`, and whose
    /// exponentials are `2^top` times as large as they would be.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, scale: Reg<F32>, top: f32) -> Self {
        Self { max: [k.reg(), k.reg()], sum: [k.reg(), k.reg()], scale, top, slack: 0.0 }
    }

    /// One whose exponentials may become `2^slack` times as large before they are counted from another maximum.
    pub fn with_slack(self, slack: f32) -> Self {
        Self { slack, ..self }
    }

    /// Changes what scores are multiplied by, which must be a register of this state's own.
    #[track_caller]
    pub fn set_scale(&self, k: &mut KernelBuilder, scale: Reg<F32>) {
        k.mov_to(self.scale, scale);
    }

    /// One that holds nothing yet, of scores that are to be multiplied by another scale.
    #[track_caller]
    pub fn another(&self, k: &mut KernelBuilder, scale: Reg<F32>) -> Self {
        Self::new(k, scale, self.top).with_slack(self.slack)
    }

    /// The state before any key.
    #[track_caller]
    pub fn clear(&self, k: &mut KernelBuilder) {
        self.max.iter().for_each(|&max| k.mov_to(max, f32::NEG_INFINITY));
        self.sum.iter().for_each(|&sum| k.mov_to(sum, 0.0));
    }

    /// Takes another state over, but for its scale.
    #[track_caller]
    pub fn set(&self, k: &mut KernelBuilder, other: &Self) {
        for (&to, &from) in self.max.iter().zip(&other.max).chain(self.sum.iter().zip(&other.sum)) {
            k.mov_to(to, from);
        }
    }

    /// Takes a block of scores in: they become their exponentials. Returns what the sums before, and with them the
    /// output, are to be multiplied by. `finite` promises that every row has seen a key.
    #[track_caller]
    pub fn absorb(&self, k: &mut KernelBuilder, scores: &Accumulator, finite: bool) -> PerRow<Reg<F32>> {
        k.at(Location::caller(), |k| {
            let largest = scores.row_max(k);
            let rescale = [0, 1].map(|row| {
                let (before, max) = self.raise_row(k, row, largest[row], finite);
                let base = self.base(k, max);
                for (_, score) in scores.row(row) {
                    self.exponentiate(k, score, base);
                }
                self.rescale(k, before, max)
            });
            let sums = scores.thread_sums(k);
            for row in 0..2 {
                k.fma_to(self.sum[row], self.sum[row], rescale[row], sums[row]);
            }
            rescale
        })
    }

    /// Raises a row's maximum: what it was, and what exponents are counted from now.
    fn raise_row(&self, k: &mut KernelBuilder, row: usize, largest: Reg<F32>, finite: bool) -> (Reg<F32>, Reg<F32>) {
        let max = self.max[row];
        let before = k.mov(max);
        if self.slack > 0.0 {
            let raised = k.max(max, largest);
            let growth = k.sub(raised, max);
            let growth = k.mul(growth, self.scale);
            // Of a row that has seen no key the maximum is minus infinity: any growth from there is more, and none is NaN.
            let grows = k.setp(Compare::Gt, growth, self.slack);
            let raised = k.selp(raised, max, grows);
            k.mov_to(max, raised);
        } else {
            k.max_to(max, max, largest);
        }
        (before, if finite { max } else { finite_max(k, max) })
    }

    /// What is added to a scaled score so that the exponent of `max` is `top`.
    fn base(&self, k: &mut KernelBuilder, max: Reg<F32>) -> Reg<F32> {
        if self.top == 0.0 {
            let base = k.mul(max, self.scale);
            return k.neg(base);
        }
        let negative = k.neg(max);
        k.fma(negative, self.scale, self.top)
    }

    /// What is to be multiplied to sums that were counted from `before`.
    fn rescale(&self, k: &mut KernelBuilder, before: Reg<F32>, max: Reg<F32>) -> Reg<F32> {
        let change = k.sub(before, max);
        let change = k.mul(change, self.scale);
        k.ex2(change)
    }

    fn exponentiate(&self, k: &mut KernelBuilder, score: Reg<F32>, base: Reg<F32>) {
        k.fma_to(score, score, self.scale, base);
        k.ex2_to(score, score);
    }

    /// What the output is to be multiplied by in the end, one over the sum, and the logarithm of the sum of exponentials.
    /// Of a row that saw no key they are 1 and minus infinity.
    #[track_caller]
    pub fn finish(&self, k: &mut KernelBuilder) -> (PerRow<Reg<F32>>, PerRow<Reg<F32>>) {
        k.at(Location::caller(), |k| {
            let sums = across_quad(k, self.sum, KernelBuilder::add);
            let inverse = sums.map(|sum| {
                let empty = k.setp(Compare::Eq, sum, 0.0);
                let sum = k.selp(1.0, sum, empty);
                k.rcp_approx(sum)
            });
            let lse = [0, 1].map(|row| {
                let mut log = k.lg2(sums[row]);
                if self.top != 0.0 {
                    log = k.sub(log, self.top);
                }
                let log = k.fma(self.max[row], self.scale, log);
                k.mul(log, LN_2)
            });
            (inverse, lse)
        })
    }
}
