//! Results of tiles that saw a part of their keys, and how they are put together.

use std::cell::UnsafeCell;

use kernels::Problem;

use crate::call::Call;
use crate::tiles::{Part, Tile};

/// For each row of each part: the output before the division, the maximum and the sum.
pub(crate) struct Partials {
    rows: Box<[UnsafeCell<f32>]>,
    width: usize,
}

// SAFETY: each row is written by the one thread that has its tile, and read when all have ended.
unsafe impl Sync for Partials {}

impl Partials {
    /// Room for so many rows; `None` when memory does not suffice.
    pub fn new(problem: &Problem, rows: usize) -> Option<Self> {
        let width = problem.head_dim_v + 2;
        let mut memory = Vec::new();
        memory.try_reserve_exact(rows.checked_mul(width)?).ok()?;
        memory.resize_with(rows * width, || UnsafeCell::new(0.0));
        Some(Self { rows: memory.into_boxed_slice(), width })
    }

    fn at(&self, tile: &Tile, part: Part, index: usize, row: usize) -> &[UnsafeCell<f32>] {
        let row = part.first + index * tile.rows.len() + row - tile.rows.start;
        &self.rows[row * self.width..(row + 1) * self.width]
    }

    /// Takes a row's sums: as the result when its tile saw all keys, else as a part of it.
    ///
    /// # Safety
    /// No other thread writes the row of this tile.
    pub unsafe fn write(&self, call: &Call<'_>, tile: &Tile, row: usize, out: &mut [f32], max: f32, sum: f32) {
        match tile.part {
            Some(part) => {
                let cells = self.at(tile, part, part.index, row);
                for (cell, &value) in cells.iter().zip(out.iter().chain(&[max, sum])) {
                    // SAFETY: the row is this thread's alone.
                    unsafe { *cell.get() = value };
                }
            }
            None => {
                divide(out, sum);
                let (head, i) = tile.row(call.problem, row);
                // SAFETY: as the caller says.
                unsafe { call.write(tile.entry, head, i, out, max, sum) };
            }
        }
    }

    /// Puts the parts of a tile's rows together.
    ///
    /// # Safety
    /// All parts were written, and nobody else is at these rows.
    pub unsafe fn combine(&self, call: &Call<'_>, tile: &Tile, part: Part, out: &mut Vec<f32>) {
        let width = call.problem.head_dim_v;
        for row in tile.rows.clone() {
            // SAFETY: nothing writes any more.
            let value = |index, column: usize| unsafe { *self.at(tile, part, index, row)[column].get() };
            let max = (0..part.of).map(|index| value(index, width)).fold(f32::NEG_INFINITY, f32::max);
            out.clear();
            out.resize(width, 0.0);
            let mut sum = 0.0;
            for index in 0..part.of {
                let of = value(index, width);
                // Of a part that saw no key, which is also where no part saw one.
                let share = if of == f32::NEG_INFINITY { 0.0 } else { ((of - max) * call.scale_log2).exp2() };
                sum += share * value(index, width + 1);
                for (column, out) in out.iter_mut().enumerate() {
                    *out += share * value(index, column);
                }
            }
            divide(out, sum);
            let (head, i) = tile.row(call.problem, row);
            // SAFETY: the row is this thread's alone.
            unsafe { call.write(tile.entry, head, i, out, max, sum) };
        }
    }
}

/// The division at a row's end; a row that saw no key is 0.
fn divide(out: &mut [f32], sum: f32) {
    for out in out {
        *out = if sum == 0.0 { 0.0 } else { *out / sum };
    }
}
