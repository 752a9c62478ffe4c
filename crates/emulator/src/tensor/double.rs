//! `mma` of doubles (PTX ISA 9.7.14.5, the shapes of `.f64`): each register holds one element.
//!
//! Lane `4 g + t` holds of A rows `g` and, of 16 rows, `g + 8`, in columns `t`, `t + 4` and so on; of B those rows in column `g`; of
//! the accumulator columns `2 t` and `2 t + 1` in rows `g` and `g + 8`.

use crate::lanes::{WARP, Wide};

/// A product; `n` is 8. Places are of the wide file.
#[derive(Clone, Debug)]
pub(crate) struct DoubleProduct {
    pub m: usize,
    pub k: usize,
    pub a: Vec<u32>,
    pub b: Vec<u32>,
    pub c: Vec<u32>,
    pub d: Vec<u32>,
}

/// Rows of A and of the accumulator that a lane's registers alternate between.
const HALF: usize = 8;

impl DoubleProduct {
    /// Registers of a lane that hold A, B and the accumulator in and out.
    pub(crate) fn registers(&self) -> [usize; 4] {
        let accumulator = self.m / 4;
        [self.m * self.k / WARP, self.k / 4, accumulator, accumulator]
    }

    /// `d = a * b + c`, each step rounded to nearest.
    pub(crate) fn execute(&self, file: &mut [Wide]) {
        let halves = self.m / HALF;
        let value = |place: u32, lane: usize| f64::from_bits(file[place as usize].0[lane]);
        let a =
            |row: usize, depth: usize| value(self.a[row / HALF + halves * (depth / 4)], 4 * (row % HALF) + depth % 4);
        let b = |depth: usize, column: usize| value(self.b[depth / 4], 4 * column + depth % 4);
        let results: Vec<[u64; WARP]> = (0..self.d.len())
            .map(|register| {
                std::array::from_fn(|lane| {
                    let (row, column) = (lane / 4 + HALF * (register / 2), 2 * (lane % 4) + register % 2);
                    let start = value(self.c[register], lane);
                    let sum = (0..self.k).fold(start, |sum, depth| a(row, depth).mul_add(b(depth, column), sum));
                    sum.to_bits()
                })
            })
            .collect();
        for (&place, result) in self.d.iter().zip(results) {
            file[place as usize].0 = result;
        }
    }
}
