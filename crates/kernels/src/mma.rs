//! What tensor cores add to the vocabulary: tiles in shared memory that `ldmatrix` reads without bank conflicts, fragments,
//! and products of a warp's rows.
//!
//! Everything is counted in bytes along a row, so that it is the same for 16-bit types and for f32: a [`STEP`] of 32 bytes is
//! what one `mma` multiplies along its inner dimension, and four registers hold 16 rows of it.

use std::panic::Location;

use arch::Feature;
use ptx::{B32, KernelBuilder, Pointer, Reg, Shared, Type, U32};

use crate::Dtype;
use crate::accumulator::Accumulator;

/// Rows of a fragment.
pub const ROWS: u32 = 16;

/// Bytes along a row that a fragment has.
pub const STEP: u32 = 32;

/// Bytes that lie together in shared memory whatever the swizzle: what one lane's address reads, and one copy brings.
pub const CHUNK: u32 = 16;

/// The widths of slabs in bytes, the widest first: one, a half and a quarter of what the banks hold.
pub const WIDTHS: [u32; 3] = [128, 64, 32];

/// A tile of rows in shared memory.
///
/// Its columns are split into slabs of 128 bytes, then 64, then 32. Where a slab is narrower than the banks, several of its
/// rows share a line of 128 bytes. The chunks of a row are permuted by the line's number, so that eight rows of one column of
/// chunks lie in eight different groups of banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows, a multiple of 16.
    pub rows: u32,
    /// Bytes of a row, a multiple of 32.
    pub row_bytes: u32,
}

/// Some columns of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slab {
    /// The first column, in bytes.
    pub first: u32,
    /// Its columns, in bytes: one of [`WIDTHS`].
    pub width: u32,
    /// Where it begins in the tile.
    pub offset: u32,
}

impl Tile {
    /// Of so many rows of `columns` elements.
    pub fn new(rows: u32, columns: u32, dtype: Dtype) -> Self {
        Self { rows, row_bytes: (columns * dtype.bytes() as u32).next_multiple_of(STEP) }
    }

    /// Its size.
    pub fn bytes(self) -> u32 {
        self.rows * self.row_bytes
    }

    /// Its slabs, from the first column on.
    pub fn slabs(self) -> Vec<Slab> {
        let (mut slabs, mut first) = (Vec::new(), 0);
        for width in WIDTHS {
            while first + width <= self.row_bytes {
                slabs.push(Slab { first, width, offset: self.rows * first });
                first += width;
            }
        }
        slabs
    }

    /// The widths of slabs it has.
    pub fn widths(self) -> impl Iterator<Item = u32> {
        let slabs = self.slabs();
        WIDTHS.into_iter().filter(move |width| slabs.iter().any(|slab| slab.width == *width))
    }

    /// Steps along a row.
    pub fn steps(self) -> u32 {
        self.row_bytes / STEP
    }
}

/// Where a chunk of a slab lies: `chunk` of `row`, in bytes from the slab's beginning. `row` counts from any multiple of 8.
#[track_caller]
pub fn swizzled(k: &mut KernelBuilder, width: u32, row: Reg<U32>, chunk: Reg<U32>) -> Reg<U32> {
    k.at(Location::caller(), |k| {
        let line = k.shr(row, (WIDTHS[0] / width).ilog2());
        let turn = k.and(line, width / CHUNK - 1);
        let chunk = k.xor(chunk, turn);
        let row = k.mul(row, width);
        k.mad(chunk, CHUNK, row)
    })
}

/// Where a lane's part of the first fragment of a slab is, for each width of a slab.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    of_width: [Option<Reg<U32>>; WIDTHS.len()],
}

impl Reader {
    /// Of the slabs that the tiles have. A lane gives `ldmatrix` the address of one of 16 rows, in one of two chunks.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, lane: Reg<U32>, tiles: &[Tile]) -> Self {
        k.at(Location::caller(), |k| {
            let row = k.and(lane, ROWS - 1);
            let chunk = k.shr(lane, ROWS.ilog2());
            let of_width = WIDTHS.map(|width| {
                let used = tiles.iter().any(|tile| tile.widths().any(|has| has == width));
                used.then(|| swizzled(k, width, row, chunk))
            });
            Self { of_width }
        })
    }

    /// The same, each tile so many bytes further on: a multiple of 128.
    #[track_caller]
    pub fn further(&self, k: &mut KernelBuilder, bytes: Reg<U32>) -> Self {
        k.at(Location::caller(), |k| Self {
            of_width: self.of_width.map(|address| address.map(|address| k.add(address, bytes))),
        })
    }

    /// The same, so many rows further on, a multiple of 16 that is the same in all lanes.
    #[track_caller]
    pub fn rows_further(&self, k: &mut KernelBuilder, rows: Reg<U32>) -> Self {
        k.at(Location::caller(), |k| {
            let mut of_width = self.of_width;
            for (address, width) in of_width.iter_mut().zip(WIDTHS) {
                *address = address.map(|address| k.mad(rows, width, address));
            }
            Self { of_width }
        })
    }

    /// The addresses of a tile's steps for fragments in its first rows: within a slab of 128 bytes, a step changes bits that
    /// the swizzle has changed before.
    #[track_caller]
    pub fn steps(&self, k: &mut KernelBuilder, tile: Tile) -> Vec<Pointer<Shared>> {
        k.at(Location::caller(), |k| {
            let mut steps = Vec::new();
            let mut known: Vec<((u32, u32), Reg<U32>)> = Vec::new();
            for Slab { width, offset, .. } in tile.slabs() {
                let position = WIDTHS.iter().position(|one| *one == width);
                let Some(address) = position.and_then(|position| self.of_width[position]) else { continue };
                for within in (0..width).step_by(STEP as usize) {
                    let found = known.iter().find(|(key, _)| *key == (width, within));
                    let at = found.map(|(_, at)| *at).unwrap_or_else(|| {
                        let at = if within == 0 { address } else { k.xor(address, within) };
                        known.push(((width, within), at));
                        at
                    });
                    steps.push(Pointer::at(at).offset(offset.into()));
                }
            }
            steps
        })
    }
}

impl Tile {
    /// How far the fragment of rows from `row` on, a multiple of 16, is from that of the first rows at the same step.
    pub fn rows_from(self, row: u32, step: u32) -> i64 {
        let slabs = self.slabs();
        let slab = slabs.iter().find(|slab| (slab.first..slab.first + slab.width).contains(&(step * STEP)));
        slab.map_or(0, |slab| i64::from(row * slab.width))
    }
}

/// A fragment: 16 rows by 32 bytes, in four registers. With 8 rows by 16 bytes each, they are the upper left, lower left, upper
/// right and lower right part (PTX ISA, "Matrix fragments for mma.m16n8k16", fragment A).
pub type Part = [Reg<B32>; 4];

/// Loads a fragment; `transposed`, of 16-bit types, each part is.
#[track_caller]
pub fn load(k: &mut KernelBuilder, from: Pointer<Shared>, transposed: bool) -> Part {
    let parts = k.ldmatrix(4, from, transposed);
    [parts[0], parts[1], parts[2], parts[3]]
}

/// Sixteen columns of a right factor from a fragment, as two times eight.
///
/// Loaded straight, the fragment's rows are the columns of the factor; loaded transposed, they are its inner dimension.
pub fn columns(part: Part, transposed: bool) -> [[Reg<B32>; 2]; 2] {
    let [upper_left, lower_left, upper_right, lower_right] = part;
    match transposed {
        false => [[upper_left, upper_right], [lower_left, lower_right]],
        true => [[upper_left, lower_left], [upper_right, lower_right]],
    }
}

/// `into += left x right` of 16 rows by 8 columns.
#[track_caller]
pub fn multiply(k: &mut KernelBuilder, into: &[Reg<ptx::F32>], left: &Part, right: [Reg<B32>; 2], ty: Type) {
    k.at(Location::caller(), |k| {
        // Before sm_80 an instruction is half as deep.
        if ty == Type::F16 && !k.target().supports(Feature::Bf16Mma) {
            k.mma(into, &left[..2], &right[..1], ty);
            k.mma(into, &left[2..], &right[1..], ty);
        } else {
            k.mma(into, left, &right, ty);
        }
    });
}

/// `into += left x right` of several times 16 rows by 16 columns, from column `column` on.
#[track_caller]
pub fn multiply_sixteen(
    k: &mut KernelBuilder,
    into: &[Accumulator],
    column: u32,
    left: &[Part],
    right: [[Reg<B32>; 2]; 2],
    ty: Type,
) {
    k.at(Location::caller(), |k| {
        for (eight, right) in (0..).zip(right) {
            for (into, left) in into.iter().zip(left) {
                let into = into.columns_from(column + 8 * eight, 8);
                multiply(k, &into.values, left, right, ty);
            }
        }
    });
}
