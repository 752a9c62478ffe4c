//! What tensor cores add to the vocabulary: tiles in shared memory that `ldmatrix` reads without bank conflicts, fragments,
//! and products of a warp's rows.
//!
//! Everything is counted in bytes along a row, so that it is the same for 16-bit types and for f32: a [`STEP`] of 32 bytes is
//! what one `mma` multiplies along its inner dimension, and four registers hold 16 rows of it.

use std::panic::Location;

use arch::Feature;
use ptx::{B32, F32, KernelBuilder, Pointer, Reg, Shared, Type, U32};

use crate::Dtype;
use crate::accumulator::Accumulator;
use crate::convert::narrow_pair_to;

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
    /// Of the slabs that the tiles have, for left factors, and for right ones whose rows are the inner dimension. A lane gives
    /// `ldmatrix` the address of one of 16 rows, in one of two chunks.
    #[track_caller]
    pub fn left(k: &mut KernelBuilder, lane: Reg<U32>, tiles: &[Tile]) -> Self {
        k.at(Location::caller(), |k| {
            let row = k.and(lane, ROWS - 1);
            let chunk = k.shr(lane, ROWS.ilog2());
            Self::at(k, row, chunk, tiles)
        })
    }

    /// The same for right factors whose rows are the columns: the registers of a column lie side by side, as the instruction
    /// takes them.
    #[track_caller]
    pub fn right(k: &mut KernelBuilder, lane: Reg<U32>, tile: Tile) -> Self {
        k.at(Location::caller(), |k| {
            let row = k.and(lane, ROWS / 2 - 1);
            let lower = k.shr(lane, ROWS.ilog2());
            let row = k.mad(lower, ROWS / 2, row);
            let chunk = k.shr(lane, (ROWS / 2).ilog2());
            let chunk = k.and(chunk, 1);
            Self::at(k, row, chunk, &[tile])
        })
    }

    fn at(k: &mut KernelBuilder, row: Reg<U32>, chunk: Reg<U32>, tiles: &[Tile]) -> Self {
        {
            let of_width = WIDTHS.map(|width| {
                let used = tiles.iter().any(|tile| tile.widths().any(|has| has == width));
                used.then(|| swizzled(k, width, row, chunk))
            });
            Self { of_width }
        }
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

/// How elements are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// As they are, of a 16-bit type.
    Half(Type),
    /// f32 rounded to tf32, 11 bits.
    Tf32,
    /// f32 as the sum of two tf32: three products, without that of the two remainders.
    ThreeTf32,
}

impl Product {
    /// Of a type; `rounded` takes f32 as tf32.
    pub fn of(dtype: Dtype, rounded: bool) -> Self {
        match dtype {
            Dtype::F32 if rounded => Self::Tf32,
            Dtype::F32 => Self::ThreeTf32,
            _ => Self::Half(dtype.ty()),
        }
    }

    /// The type of the instruction.
    fn ty(self) -> Type {
        match self {
            Self::Half(ty) => ty,
            Self::Tf32 | Self::ThreeTf32 => Type::Tf32,
        }
    }
}

/// A factor of a product, in registers.
#[derive(Clone, Copy, Debug)]
pub struct Factor<const N: usize> {
    /// The elements, rounded to what is multiplied.
    whole: [Reg<B32>; N],
    /// What rounding left.
    rest: Option<[Reg<B32>; N]>,
}

/// A fragment: 16 rows by 32 bytes. Its registers have 8 rows by 16 bytes each; of a left factor they are the upper left, lower
/// left, upper right and lower right part (PTX ISA, "Matrix fragments for mma.m16n8k16" and "mma.m16n8k8", fragment A).
pub type Part = Factor<4>;

impl<const N: usize> Factor<N> {
    /// From elements as they are stored.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, elements: [Reg<B32>; N], product: Product) -> Self {
        k.at(Location::caller(), |k| {
            if let Product::Half(_) = product {
                return Self { whole: elements, rest: None };
            }
            let whole = elements.map(|element| k.cvt_tf32(element.cast::<F32>()));
            let rest = (product == Product::ThreeTf32).then(|| {
                let mut place = 0;
                elements.map(|element| {
                    let rest = k.sub(element.cast::<F32>(), whole[place].cast::<F32>());
                    place += 1;
                    k.cvt_tf32(rest)
                })
            });
            Self { whole, rest }
        })
    }

    /// Some of its registers.
    fn pick<const M: usize>(self, places: [usize; M]) -> Factor<M> {
        Factor {
            whole: places.map(|place| self.whole[place]),
            rest: self.rest.map(|rest| places.map(|place| rest[place])),
        }
    }
}

/// Loads a fragment.
#[track_caller]
pub fn load(k: &mut KernelBuilder, from: Pointer<Shared>, product: Product) -> Part {
    k.at(Location::caller(), |k| {
        let parts = k.ldmatrix(4, from, false);
        Factor::new(k, [parts[0], parts[1], parts[2], parts[3]], product)
    })
}

/// Two right factors of 8 columns each from a fragment of [`Reader::right`].
pub fn by_columns(part: Part) -> [Factor<2>; 2] {
    [part.pick([0, 1]), part.pick([2, 3])]
}

/// `into += left x right` of 16 rows by 8 columns.
#[track_caller]
pub fn multiply(k: &mut KernelBuilder, into: &[Reg<F32>], left: &Part, right: Factor<2>, product: Product) {
    k.at(Location::caller(), |k| {
        let ty = product.ty();
        // The small ones first.
        if let Some(rest) = left.rest {
            k.mma(into, &rest, &right.whole, ty);
        }
        if let Some(rest) = right.rest {
            k.mma(into, &left.whole, &rest, ty);
        }
        // Before sm_80 an instruction is half as deep.
        if ty == Type::F16 && !k.target().supports(Feature::Bf16Mma) {
            k.mma(into, &left.whole[..2], &right.whole[..1], ty);
            k.mma(into, &left.whole[2..], &right.whole[1..], ty);
        } else {
            k.mma(into, &left.whole, &right.whole, ty);
        }
    });
}

/// How a lane reads a tile whose rows are the inner dimension of a product: 16 rows by 32 bytes at a time.
#[derive(Clone, Copy, Debug)]
pub enum Rows {
    /// Of 16-bit types: `ldmatrix` transposes.
    Transposed(Reader),
    /// Of f32: a lane loads an element of the even and of the odd rows. Its place in a fragment's inner dimension stands for
    /// two neighbouring rows, which is how the left factor has its columns.
    Elements {
        /// From row `2 (lane mod 4)`.
        even: Reader,
        /// From the row after.
        odd: Reader,
    },
}

/// Addresses of a tile's steps: see [`Reader::steps`].
#[derive(Clone, Debug)]
pub struct RowSteps {
    tile: Tile,
    first: Vec<Pointer<Shared>>,
    odd: Option<Vec<Pointer<Shared>>>,
}

impl Rows {
    /// Of the slabs that a tile has. `reader` reads fragments of it.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, lane: Reg<U32>, reader: Reader, tile: Tile, dtype: Dtype) -> Self {
        if dtype != Dtype::F32 {
            return Self::Transposed(reader);
        }
        k.at(Location::caller(), |k| {
            let column = k.shr(lane, 2);
            let chunk = k.shr(column, 2);
            let column = k.and(column, 3);
            let pair = k.and(lane, 3);
            let [even, odd] = [0, 1].map(|odd| {
                let row = k.mad(pair, 2, odd);
                let of_width = WIDTHS.map(|width| {
                    tile.widths().any(|has| has == width).then(|| {
                        let chunk = swizzled(k, width, row, chunk);
                        k.mad(column, 4, chunk)
                    })
                });
                Reader { of_width }
            });
            Self::Elements { even, odd }
        })
    }

    /// The same, so many bytes further on: a multiple of 128.
    #[track_caller]
    pub fn further(&self, k: &mut KernelBuilder, bytes: Reg<U32>) -> Self {
        match self {
            Self::Transposed(reader) => Self::Transposed(reader.further(k, bytes)),
            Self::Elements { even, odd } => Self::Elements { even: even.further(k, bytes), odd: odd.further(k, bytes) },
        }
    }

    /// The addresses of a tile's steps.
    #[track_caller]
    pub fn steps(&self, k: &mut KernelBuilder, tile: Tile) -> RowSteps {
        match self {
            Self::Transposed(reader) => RowSteps { tile, first: reader.steps(k, tile), odd: None },
            Self::Elements { even, odd } => {
                RowSteps { tile, first: even.steps(k, tile), odd: Some(odd.steps(k, tile)) }
            }
        }
    }
}

/// Sixteen rows by 32 bytes of a tile whose rows are the inner dimension: right factors, as deep as a step and 8 columns wide.
#[derive(Clone, Copy, Debug)]
pub enum RightRows {
    /// Of 16-bit types: one after the other along the columns.
    Columns([Factor<2>; 2]),
    /// Of f32: one after the other along the rows.
    Deep([Factor<2>; 2]),
}

impl RowSteps {
    /// Loads the rows from `row` on, a multiple of 16, at a step.
    #[track_caller]
    pub fn load(&self, k: &mut KernelBuilder, row: u32, step: u32, product: Product) -> RightRows {
        k.at(Location::caller(), |k| {
            let offset = self.tile.rows_from(row, step);
            let first = self.first[step as usize].offset(offset);
            match &self.odd {
                None => {
                    let parts = k.ldmatrix(4, first, true);
                    let part = Factor::new(k, [parts[0], parts[1], parts[2], parts[3]], product);
                    RightRows::Columns([part.pick([0, 1]), part.pick([2, 3])])
                }
                Some(odd) => {
                    let odd = odd[step as usize].offset(offset);
                    let half = self.tile.rows_from(ROWS / 2, step);
                    let eight = |k: &mut KernelBuilder, down: i64| {
                        let elements = [first, odd].map(|from| k.ld::<B32, _>(from.offset(down)));
                        Factor::new(k, elements, product)
                    };
                    RightRows::Deep([eight(k, 0), eight(k, half)])
                }
            }
        })
    }
}

impl RightRows {
    /// `into += left x self`, `left` being 16 columns in one or two parts.
    #[track_caller]
    pub fn multiply_into(&self, k: &mut KernelBuilder, into: &Accumulator, left: &[Part], product: Product) {
        k.at(Location::caller(), |k| match self {
            Self::Columns(columns) => {
                for (into, right) in into.values.chunks_exact(4).zip(columns) {
                    left.iter().for_each(|left| multiply(k, into, left, *right, product));
                }
            }
            Self::Deep(deep) => {
                for (left, right) in left.iter().zip(deep) {
                    multiply(k, &into.values, left, *right, product);
                }
            }
        });
    }
}

/// Two neighbouring columns of a row, to be part of a left factor.
#[derive(Clone, Copy, Debug)]
pub enum Pair {
    /// Rounded to a 16-bit type.
    Word(Reg<B32>),
    /// f32.
    Elements([Reg<F32>; 2]),
}

impl Pair {
    /// From f32; rounds if `dtype` has 16 bits.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, elements: [Reg<F32>; 2], dtype: Dtype) -> Self {
        if dtype == Dtype::F32 {
            return Self::Elements(elements);
        }
        let word = k.reg();
        narrow_pair_to(k, dtype, word, elements[0], elements[1]);
        Self::Word(word)
    }
}

/// The left factor of 16 columns from its pairs: those of rows 0 and 8 of the first 8 columns, then of the next.
#[track_caller]
pub fn left_of_pairs(k: &mut KernelBuilder, pairs: &[Pair], product: Product) -> Vec<Part> {
    k.at(Location::caller(), |k| match *pairs {
        [Pair::Word(a), Pair::Word(b), Pair::Word(c), Pair::Word(d)] => {
            vec![Factor { whole: [a, b, c, d], rest: None }]
        }
        _ => {
            let eight = |rows: &[Pair]| match *rows {
                // The first of two neighbours on the left of the fragment, the second on the right.
                [Pair::Elements(row), Pair::Elements(other)] => {
                    let elements = [row[0], other[0], row[1], other[1]].map(|element| element.cast());
                    Some(Factor::new(k, elements, product))
                }
                _ => None,
            };
            pairs.chunks_exact(2).filter_map(eight).collect()
        }
    })
}
