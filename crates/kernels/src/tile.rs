//! The tile vocabulary: what the kernels' pseudo-code is written in.
//!
//! A CTA works on a tile of queries. Sixteen lanes, half a warp, share the same few rows of it and split the columns
//! ([`Lanes`], [`Columns`]); what a thread holds of a tile in registers is a [`Fragment`]. Tiles in shared memory
//! ([`SharedTile`]) are f32 whatever the stored type, and are filled by all threads together ([`Stream`]).

use std::panic::Location;

use ptx::{Compare, F32, Global, KernelBuilder, Pointer, Pred, Reg, S32, Shared, U32, U64};

use crate::convert::Words;
use crate::head::{Head, Matrix};

/// Lanes that share rows.
pub const GROUP: u32 = 16;

/// Where a thread stands in its CTA.
#[derive(Clone, Copy, Debug)]
pub struct Lanes {
    /// The thread's index.
    pub thread: Reg<U32>,
    /// Its place among the lanes that share its rows, `0..16`.
    pub lane: Reg<U32>,
    /// Its first row in the CTA's tile.
    pub row: Reg<U32>,
    /// How many rows it has, one after the other.
    pub rows: u32,
    /// Threads of the CTA.
    pub threads: u32,
}

impl Lanes {
    /// Splits a tile of `block_q` rows among the CTA's threads.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, block_q: u32, threads: u32) -> Self {
        k.at(Location::caller(), |k| {
            let rows = block_q / (threads / GROUP);
            let thread = k.tid_x();
            let lane = k.and(thread, GROUP - 1);
            let group = k.shr(thread, GROUP.ilog2());
            let row = k.mul(group, rows);
            Self { thread, lane, row, rows, threads }
        })
    }
}

/// How 16 lanes split the columns of a row: in each chunk, a lane has `width` neighbouring ones, lane after lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    chunks: Vec<Chunk>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    first: u32,
    width: u32,
}

impl Columns {
    /// A split of `count` columns, a multiple of 16: as many wide chunks (4, then 2, then 1) as fit.
    pub fn of(count: u32) -> Self {
        let (mut chunks, mut first) = (Vec::new(), 0);
        while first + GROUP <= count {
            let width = [4, 2, 1].into_iter().find(|width| first + width * GROUP <= count).unwrap_or(1);
            chunks.push(Chunk { first, width });
            first += width * GROUP;
        }
        Self { chunks }
    }

    /// The columns of one lane.
    pub fn per_lane(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.width as usize).sum()
    }

    /// For each chunk: the columns' places among a lane's, and the chunk.
    fn places(&self) -> impl Iterator<Item = (std::ops::Range<usize>, Chunk)> {
        self.chunks.iter().scan(0, |place, &chunk| {
            let start = *place;
            *place += chunk.width as usize;
            Some((start..*place, chunk))
        })
    }
}

/// One number per row of a thread; the 16 lanes that share the rows hold the same.
#[derive(Clone, Debug)]
pub struct RowVector(pub Vec<Reg<F32>>);

impl RowVector {
    /// The same value for every row.
    #[track_caller]
    pub fn splat(k: &mut KernelBuilder, rows: u32, value: f32) -> Self {
        Self((0..rows).map(|_| k.mov::<F32>(value)).collect())
    }

    /// Copies another one's values into these registers.
    #[track_caller]
    pub fn set(&self, k: &mut KernelBuilder, values: &Self) {
        self.0.iter().zip(&values.0).for_each(|(d, value)| k.mov_to(*d, *value));
    }

    /// Loads this thread's rows of a dense array, `rows_from` being the address of the CTA's first row: a lane loads one
    /// row, and the 16 exchange them, so that each sector is asked for once. Rows past the sequence's end are 0.
    #[track_caller]
    pub fn load(&self, k: &mut KernelBuilder, head: &Head, lanes: &Lanes, first: Reg<U32>, array: Reg<U64>) {
        k.at(Location::caller(), |k| {
            let (place, mine) = Self::place(k, head, lanes, first, array);
            let value = k.mov::<F32>(0.0);
            k.when(mine, |k| k.ld_to(value, place));
            let lane = k.and(lanes.thread, GROUP);
            for (row, d) in self.0.iter().enumerate() {
                let from = k.add(lane, row as u32);
                let other = k.shfl_idx(value, from);
                k.mov_to(*d, other);
            }
        });
    }

    /// Stores this thread's rows of a dense array, one lane each; rows past the sequence's end are left out.
    #[track_caller]
    pub fn store(&self, k: &mut KernelBuilder, head: &Head, lanes: &Lanes, first: Reg<U32>, array: Reg<U64>) {
        k.at(Location::caller(), |k| {
            let (place, mine) = Self::place(k, head, lanes, first, array);
            let value = k.mov(self.0[0]);
            for (row, other) in self.0.iter().enumerate().skip(1) {
                let chosen = k.setp(Compare::Eq, lanes.lane, row as u32);
                k.selp_to(value, *other, value, chosen);
            }
            k.when(mine, |k| k.st(place, value));
        });
    }

    /// Where this lane's row is in a dense array, and whether the lane has one.
    fn place(
        k: &mut KernelBuilder,
        head: &Head,
        lanes: &Lanes,
        first: Reg<U32>,
        array: Reg<U64>,
    ) -> (Pointer<Global>, Reg<Pred>) {
        let row = k.add(first, lanes.row);
        let row = k.add(row, lanes.lane);
        let there = head.has_query(k, row);
        let mine = k.setp_and(Compare::Lt, lanes.lane, lanes.rows, there);
        (Pointer::at(k.mad_wide(row, 4, array)), mine)
    }
}

/// What a thread holds of a tile: its rows, and of each its lane's columns.
#[derive(Clone, Debug)]
pub struct Fragment {
    /// `[rows][columns.per_lane()]`.
    values: Vec<Reg<F32>>,
    /// How the lanes split a row.
    columns: Columns,
}

impl Fragment {
    /// A fragment of zeros of a tile with `columns` columns.
    #[track_caller]
    pub fn zero(k: &mut KernelBuilder, rows: u32, columns: u32) -> Self {
        let columns = Columns::of(columns);
        let count = rows as usize * columns.per_lane();
        Self { values: (0..count).map(|_| k.mov::<F32>(0.0)).collect(), columns }
    }

    /// The lane's columns of a row.
    pub fn row(&self, row: usize) -> &[Reg<F32>] {
        let width = self.columns.per_lane();
        &self.values[row * width..(row + 1) * width]
    }

    /// Every row.
    pub fn rows(&self) -> impl Iterator<Item = &[Reg<F32>]> {
        self.values.chunks(self.columns.per_lane())
    }

    /// Multiplies everything by a number.
    #[track_caller]
    pub fn scale(&self, k: &mut KernelBuilder, factor: Reg<F32>) {
        self.values.iter().for_each(|&value| k.mul_to(value, value, factor));
    }

    /// Multiplies each row by its number.
    #[track_caller]
    pub fn scale_rows(&self, k: &mut KernelBuilder, factors: &RowVector) {
        k.at(Location::caller(), |k| {
            for (row, &factor) in self.rows().zip(&factors.0) {
                row.iter().for_each(|&value| k.mul_to(value, value, factor));
            }
        });
    }

    /// Divides each row by its number, rounded to nearest; a row whose number is 0 stays as it is.
    #[track_caller]
    pub fn divide_rows(&self, k: &mut KernelBuilder, divisors: &RowVector) {
        k.at(Location::caller(), |k| {
            for (row, &divisor) in self.rows().zip(&divisors.0) {
                let empty = k.setp(Compare::Eq, divisor, 0.0);
                let divisor = k.selp(1.0, divisor, empty);
                row.iter().for_each(|&value| k.div_rn_to(value, value, divisor));
            }
        });
    }

    /// The largest of each row, over all its columns.
    #[track_caller]
    pub fn row_max(&self, k: &mut KernelBuilder) -> RowVector {
        k.at(Location::caller(), |k| {
            let largest = self.reduce(k, KernelBuilder::max);
            across_lanes(k, largest, KernelBuilder::max)
        })
    }

    /// The sum of each row, over all its columns.
    #[track_caller]
    pub fn row_sum(&self, k: &mut KernelBuilder) -> RowVector {
        let sums = self.lane_sums(k);
        sums.across_lanes(k)
    }

    /// The sum of each row over this lane's columns alone; [`RowVector::across_lanes`] makes it the row's.
    #[track_caller]
    pub fn lane_sums(&self, k: &mut KernelBuilder) -> RowVector {
        k.at(Location::caller(), |k| self.reduce(k, KernelBuilder::add))
    }

    fn reduce(&self, k: &mut KernelBuilder, join: Join) -> RowVector {
        let join_row = |row: &[Reg<F32>]| row[1..].iter().fold(row[0], |total, &value| join(k, total, value));
        RowVector(self.rows().map(join_row).collect())
    }

    /// Stores the fragment to shared memory, for other lanes to read.
    #[track_caller]
    pub fn put(&self, k: &mut KernelBuilder, to: &Spread) {
        k.at(Location::caller(), |k| {
            for (index, row) in self.rows().enumerate() {
                for (places, chunk) in self.columns.places() {
                    k.st_vec(to.chunk(index as u32, chunk), &row[places]);
                }
            }
        });
    }

    /// Hides from each query the keys it does not see: their scores become minus infinity. The tile's first key is `start`.
    #[track_caller]
    pub fn mask(&self, k: &mut KernelBuilder, mask: &Mask, start: Reg<S32>) {
        k.at(Location::caller(), |k| {
            let end = k.add(start, self.columns.per_lane() as i32 * GROUP as i32);
            let crossing = k.setp(Compare::Gt, end, mask.all_see);
            k.if_(crossing, |k| {
                let firsts: Vec<_> = self
                    .columns
                    .places()
                    .map(|(_, chunk)| k.mad(mask.lane.cast::<S32>(), chunk.width as i32, start))
                    .collect();
                for (index, row) in self.rows().enumerate() {
                    let visible = mask.visible(k, index as i32);
                    for ((places, chunk), &first) in self.columns.places().zip(&firsts) {
                        let left = k.sub(visible, first);
                        for (&score, column) in row[places].iter().zip(chunk.first..) {
                            let hidden = k.setp(Compare::Le, left, column as i32);
                            k.selp_to(score, f32::NEG_INFINITY, score, hidden);
                        }
                    }
                }
            });
        });
    }

    /// Stores the fragment's rows to a matrix, the CTA's tile starting at row `first`. Rows and columns past the matrix's end are left out.
    #[track_caller]
    pub fn store(&self, k: &mut KernelBuilder, head: &Head, lanes: &Lanes, first: Reg<U32>, to: &Matrix) {
        k.at(Location::caller(), |k| {
            self.for_each_piece(k, head, lanes, first, to, |k, inside, place, values| {
                let words = Words::narrow(k, to.dtype, values);
                k.when(inside, |k| words.store(k, place));
            });
        });
    }

    /// Loads the fragment's rows from an f32 matrix, the CTA's tile starting at row `first`. Rows and columns past the matrix's end keep their value.
    #[track_caller]
    pub fn load(&self, k: &mut KernelBuilder, head: &Head, lanes: &Lanes, first: Reg<U32>, from: &Matrix) {
        k.at(Location::caller(), |k| {
            self.for_each_piece(k, head, lanes, first, from, |k, inside, place, values| {
                k.when(inside, |k| k.ld_vec_to(values, place));
            });
        });
    }

    /// Calls `access` for every run of columns that is accessed at once.
    fn for_each_piece(
        &self,
        k: &mut KernelBuilder,
        head: &Head,
        lanes: &Lanes,
        first: Reg<U32>,
        matrix: &Matrix,
        mut access: impl FnMut(&mut KernelBuilder, Reg<Pred>, Pointer<Global>, &[Reg<F32>]),
    ) {
        let row = k.add(first, lanes.row);
        let bytes = matrix.dtype.bytes() as u32;
        let mut start = matrix.row(k, row);
        let inside: Vec<_> = (0..self.rows().count() as u32)
            .map(|index| {
                let row = k.add(row, index);
                head.has_query(k, row)
            })
            .collect();
        for (index, values) in self.rows().enumerate() {
            for (places, chunk) in self.columns.places() {
                let column = k.mul(lanes.lane, chunk.width);
                let place = k.mad_wide(column, bytes, start);
                for (step, piece) in values[places].chunks(matrix.vector.min(chunk.width) as usize).enumerate() {
                    let offset = chunk.first + step as u32 * matrix.vector.min(chunk.width);
                    if offset >= matrix.columns {
                        continue;
                    }
                    let whole = chunk.first + chunk.width * GROUP <= matrix.columns;
                    let there = match inside[index] {
                        row if whole => row,
                        row => k.setp_and(Compare::Lt, column, matrix.columns - offset, row),
                    };
                    access(k, there, Pointer::at(place).offset(i64::from(offset * bytes)), piece);
                }
            }
            start = k.add(start, matrix.stride);
        }
    }
}

type Join = fn(&mut KernelBuilder, Reg<F32>, Reg<F32>) -> Reg<F32>;

fn across_lanes(k: &mut KernelBuilder, partial: RowVector, join: Join) -> RowVector {
    let mut totals = partial.0;
    for lane_mask in [8, 4, 2, 1] {
        for total in &mut totals {
            let other = k.shfl_bfly(*total, lane_mask);
            *total = join(k, *total, other);
        }
    }
    RowVector(totals)
}

impl RowVector {
    /// The sums over the 16 lanes that share the rows.
    #[track_caller]
    pub fn across_lanes(self, k: &mut KernelBuilder) -> Self {
        k.at(Location::caller(), |k| across_lanes(k, self, KernelBuilder::add))
    }
}

/// Which keys a thread's queries see.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    lane: Reg<U32>,
    /// Keys before this one are seen by every query of the CTA's tile.
    all_see: Reg<S32>,
    seqlen_k: Reg<S32>,
    /// Under a causal mask, the end of the keys that the thread's first query sees, were there enough of them.
    diagonal: Option<Reg<S32>>,
}

impl Mask {
    /// The mask of a tile of queries that starts at query `first`: keys past the end, and under a causal mask those right
    /// of the diagonal, aligned bottom right.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, head: &Head, lanes: &Lanes, first: Reg<U32>, causal: bool) -> Self {
        k.at(Location::caller(), |k| {
            let after_first = k.add(first.cast::<S32>(), 1);
            let all_see = head.visible_keys(k, after_first, causal);
            let diagonal = causal.then(|| {
                let offset = k.sub(head.seqlen_k, head.seqlen_q);
                let end = k.add(after_first, lanes.row.cast());
                k.add(end, offset)
            });
            Self { lane: lanes.lane, all_see, seqlen_k: head.seqlen_k, diagonal }
        })
    }

    /// The end of the keys that the thread's query `row` sees.
    fn visible(&self, k: &mut KernelBuilder, row: i32) -> Reg<S32> {
        let Some(diagonal) = self.diagonal else { return self.seqlen_k };
        let end = k.add(diagonal, row);
        k.min(end, self.seqlen_k)
    }
}

/// The shared memory of a kernel, tile by tile.
#[derive(Clone, Debug, Default)]
pub struct SharedMemory {
    base: Option<Pointer<Shared>>,
    /// Name, rows, columns and bytes of an element of each tile, in the order they lie.
    pub tiles: Vec<(&'static str, u32, u32, u32)>,
}

impl SharedMemory {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.tiles
            .iter()
            .map(|&(_, rows, columns, bytes)| [rows, columns, bytes].map(u64::from).iter().product::<u64>())
            .sum()
    }

    /// A further tile.
    #[track_caller]
    pub fn tile(&mut self, k: &mut KernelBuilder, name: &'static str, rows: u32, columns: u32) -> SharedTile {
        SharedTile { place: self.place(k, name, [rows, columns, 4], 16), rows, columns }
    }

    /// A further tile of elements of so many bytes, for the copy engine: at a multiple of 1024 if those before are so long.
    #[track_caller]
    pub fn reserve(
        &mut self,
        k: &mut KernelBuilder,
        name: &'static str,
        rows: u32,
        columns: u32,
        bytes: u32,
    ) -> Pointer<Shared> {
        self.place(k, name, [rows, columns, bytes], 1024)
    }

    fn place(&mut self, k: &mut KernelBuilder, name: &'static str, extent: [u32; 3], align: u32) -> Pointer<Shared> {
        let base = *self.base.get_or_insert_with(|| k.dynamic_shared("memory", align));
        let place = base.offset(self.bytes() as i64);
        self.tiles.push((name, extent[0], extent[1], extent[2]));
        place
    }
}

/// A tile of f32 in shared memory, row after row.
#[derive(Clone, Copy, Debug)]
pub struct SharedTile {
    place: Pointer<Shared>,
    rows: u32,
    columns: u32,
}

/// A tile as a thread reads its own rows: the left factor of a product.
#[derive(Clone, Copy, Debug)]
pub struct OwnRows {
    base: Reg<U32>,
    tile: SharedTile,
}

/// A tile whose columns are spread over 16 lanes.
#[derive(Clone, Debug)]
pub struct Spread {
    /// For each width of a chunk, where the lane's first element is.
    bases: Vec<(u32, Reg<U32>)>,
    tile: SharedTile,
}

/// The right factor of a product, `[depth][columns]`.
#[derive(Clone, Debug)]
pub enum Right {
    /// The tile is stored so: a lane reads neighbouring columns at once.
    Rows(Spread),
    /// The tile is stored transposed, `[columns][depth]`: each lane reads a row of its own, so the lanes walk down a column
    /// of shared memory.
    Transposed(Spread),
}

impl SharedTile {
    /// The address of the first element.
    #[track_caller]
    pub fn address(&self, k: &mut KernelBuilder) -> Reg<U32> {
        k.address_of(self.place)
    }

    /// This thread's rows.
    #[track_caller]
    pub fn own_rows(&self, k: &mut KernelBuilder, lanes: &Lanes) -> OwnRows {
        let start = self.address(k);
        OwnRows { base: k.mad(lanes.row, 4 * self.columns, start), tile: *self }
    }

    /// This lane's columns of this thread's rows.
    #[track_caller]
    pub fn own_elements(&self, k: &mut KernelBuilder, lanes: &Lanes) -> Spread {
        let OwnRows { base, .. } = self.own_rows(k, lanes);
        self.spread(k, lanes, base, self.columns, 1)
    }

    /// The tile as the right factor of a product.
    #[track_caller]
    pub fn right(&self, k: &mut KernelBuilder, lanes: &Lanes) -> Right {
        let start = self.address(k);
        Right::Rows(self.spread(k, lanes, start, self.columns, 1))
    }

    /// The tile's transpose as the right factor of a product.
    #[track_caller]
    pub fn transposed(&self, k: &mut KernelBuilder, lanes: &Lanes) -> Right {
        let start = self.address(k);
        Right::Transposed(self.spread(k, lanes, start, self.rows, self.columns))
    }

    /// Splits `count` things among the lanes that lie so many elements apart.
    #[track_caller]
    fn spread(&self, k: &mut KernelBuilder, lanes: &Lanes, start: Reg<U32>, count: u32, apart: u32) -> Spread {
        let mut bases: Vec<(u32, Reg<U32>)> = Vec::new();
        for chunk in Columns::of(count).chunks {
            if bases.iter().all(|(width, _)| *width != chunk.width) {
                bases.push((chunk.width, k.mad(lanes.lane, 4 * chunk.width * apart, start)));
            }
        }
        Spread { bases, tile: *self }
    }
}

impl Spread {
    /// Where the lane's part of a chunk begins, in a row.
    fn chunk(&self, row: u32, chunk: Chunk) -> Pointer<Shared> {
        self.element(chunk.width, row, chunk.first)
    }

    fn element(&self, width: u32, row: u32, column: u32) -> Pointer<Shared> {
        let known = self.bases.iter().find(|(of, _)| *of == width).or(self.bases.first());
        let base = known.map_or_else(|| self.tile.place, |(_, base)| Pointer::at(*base));
        base.offset(4 * (i64::from(row) * i64::from(self.tile.columns) + i64::from(column)))
    }
}

/// Columns of the left factor that are read at once: 128 bits.
const DEPTH_STEP: u32 = 4;

/// Products that are added up by themselves before they are added to what there is: each rounding is then of a sum that is still
/// small. In one chain, calls fail the contract's tolerance in f32 now and then (3 of 320 of its cases 11 and 13).
const CHAIN: u32 = 16;

/// `into += left x right`. The columns of `left` are a multiple of 4.
#[track_caller]
pub fn dot(k: &mut KernelBuilder, into: &Fragment, left: &OwnRows, right: &Right) {
    k.at(Location::caller(), |k| {
        let mut sums: Vec<Reg<F32>> = Vec::new();
        for depth in (0..left.tile.columns).step_by(DEPTH_STEP as usize) {
            let rows: Vec<_> = (0..into.rows().count() as u32)
                .map(|row| {
                    let place =
                        Pointer::<Shared>::at(left.base).offset(i64::from(4 * (row * left.tile.columns + depth)));
                    k.ld_vec::<F32, _>(DEPTH_STEP as usize, place)
                })
                .collect();
            // By column of the lane, then by depth.
            let columns = right.read(k, &into.columns, depth);
            for step in 0..DEPTH_STEP as usize {
                let factors = rows.iter().flat_map(|row| columns.iter().map(|column| (row[step], column[step])));
                if depth.is_multiple_of(CHAIN) && step == 0 {
                    sums = factors.map(|(a, b)| k.mul(a, b)).collect();
                } else {
                    sums.iter().zip(factors).for_each(|(&sum, (a, b))| k.fma_to(sum, a, b, sum));
                }
            }
            if (depth + DEPTH_STEP).is_multiple_of(CHAIN) || depth + DEPTH_STEP == left.tile.columns {
                into.rows().flatten().zip(&sums).for_each(|(&to, &sum)| k.add_to(to, to, sum));
            }
        }
    });
}

impl Right {
    /// The lane's columns at `depth` and the next ones: for each column, its values by depth.
    fn read(&self, k: &mut KernelBuilder, columns: &Columns, depth: u32) -> Vec<Vec<Reg<F32>>> {
        let mut read = vec![Vec::new(); columns.per_lane()];
        match self {
            Self::Rows(tile) => {
                for row in depth..depth + DEPTH_STEP {
                    for (places, chunk) in columns.places() {
                        let values = k.ld_vec(chunk.width as usize, tile.chunk(row, chunk));
                        read[places].iter_mut().zip(values).for_each(|(column, value)| column.push(value));
                    }
                }
            }
            Self::Transposed(tile) => {
                for (places, chunk) in columns.places() {
                    for (column, row) in read[places].iter_mut().zip(chunk.first..) {
                        *column = k.ld_vec(DEPTH_STEP as usize, tile.element(chunk.width, row, depth));
                    }
                }
            }
        }
        read
    }
}

/// Tiles of a matrix in global memory, one after the other, brought to a tile in shared memory by all threads of the CTA.
///
/// A tile is fetched into registers first and put into shared memory later, so that the loads of several tiles are under
/// way together and while other warps still read the tile before. What is past the matrix's end is 0.
#[derive(Clone, Debug)]
pub struct Stream {
    matrix: Matrix,
    tile: SharedTile,
    /// This thread's first element of the next tile.
    next: Reg<U64>,
    /// Bytes from one of this thread's rows to its next.
    row_step: Reg<U64>,
    /// Bytes from one tile to the next.
    tile_step: Reg<U64>,
    /// Rows of the matrix from this thread's first row of the next tile on.
    rows_left: Reg<S32>,
    /// Rows of the matrix from one tile to the next.
    rows_per_tile: i32,
    /// Where this thread's first element goes.
    to: Reg<U32>,
    rows_per_step: u32,
    in_matrix: Inside,
    in_tile: Inside,
}

/// Where a thread's elements are inside: always where there is no predicate.
#[derive(Clone, Copy, Debug)]
struct Inside {
    /// In every step but the last.
    body: Option<Reg<Pred>>,
    /// In the last step.
    last: Option<Reg<Pred>>,
}

/// A tile on its way, in registers.
#[derive(Debug)]
pub struct Fetched(Vec<Words>);

impl Stream {
    /// The tiles that follow each other down the rows of a matrix, from row `first` on.
    #[track_caller]
    pub fn down(k: &mut KernelBuilder, lanes: &Lanes, matrix: &Matrix, first: Reg<U32>, tile: &SharedTile) -> Self {
        k.at(Location::caller(), |k| {
            let tile_step = k.mul(matrix.stride, u64::from(tile.rows));
            Self::new(k, lanes, matrix, first, tile, tile_step, tile.rows as i32)
        })
    }

    /// The tiles that follow each other along the columns of a matrix, in the rows from `first` on.
    #[track_caller]
    pub fn along(k: &mut KernelBuilder, lanes: &Lanes, matrix: &Matrix, first: Reg<U32>, tile: &SharedTile) -> Self {
        k.at(Location::caller(), |k| {
            let tile_step = k.mov::<U64>(u64::from(tile.columns) * matrix.dtype.bytes() as u64);
            Self::new(k, lanes, matrix, first, tile, tile_step, 0)
        })
    }

    fn new(
        k: &mut KernelBuilder,
        lanes: &Lanes,
        matrix: &Matrix,
        first: Reg<U32>,
        tile: &SharedTile,
        tile_step: Reg<U64>,
        rows_per_tile: i32,
    ) -> Self {
        // As many threads side by side as a row has accesses, rounded up to a power of two.
        let across = (tile.columns / matrix.vector).next_power_of_two().min(lanes.threads);
        let rows_per_step = lanes.threads / across;
        let accesses = k.and(lanes.thread, across - 1);
        let column = k.mul(accesses, matrix.vector);
        let row = k.shr(lanes.thread, across.ilog2());

        let source_row = k.add(first, row);
        let start = matrix.row(k, source_row);
        let next = k.mad_wide(column, matrix.dtype.bytes() as u32, start);
        let row_step = k.mul(matrix.stride, u64::from(rows_per_step));
        let rows_left = k.sub(matrix.rows, source_row.cast());

        let element = k.mad(row, tile.columns, column);
        let start = tile.address(k);
        let to = k.mad(element, 4, start);

        let last_row = (tile.rows.div_ceil(rows_per_step) - 1) * rows_per_step;
        let mut inside = |columns: u32| {
            let body = (across * matrix.vector > columns).then(|| k.setp(Compare::Lt, column, columns));
            let last = match (last_row + rows_per_step > tile.rows, body) {
                (false, body) => body,
                (true, None) => Some(k.setp(Compare::Lt, row, tile.rows - last_row)),
                (true, Some(body)) => Some(k.setp_and(Compare::Lt, row, tile.rows - last_row, body)),
            };
            Inside { body, last }
        };
        let (in_matrix, in_tile) = (inside(matrix.columns.min(tile.columns)), inside(tile.columns));
        Self {
            matrix: *matrix,
            tile: *tile,
            next,
            row_step,
            tile_step,
            rows_left,
            rows_per_tile,
            to,
            rows_per_step,
            in_matrix,
            in_tile,
        }
    }

    /// The rows that a thread handles, counted from its first, and where it is inside in each.
    fn steps(&self, inside: Inside) -> impl Iterator<Item = (u32, Option<Reg<Pred>>)> {
        let (rows, step) = (self.tile.rows, self.rows_per_step);
        let where_ = move |row| (row, if row + step >= rows { inside.last } else { inside.body });
        (0..rows).step_by(step as usize).map(where_)
    }

    /// Loads the next tile into registers.
    #[track_caller]
    pub fn fetch(&self, k: &mut KernelBuilder) -> Fetched {
        k.at(Location::caller(), |k| {
            let from = k.mov(self.next);
            let mut words = Vec::new();
            for (row, inside) in self.steps(self.in_matrix) {
                if row > 0 {
                    k.add_to(from, from, self.row_step);
                }
                let there = match inside {
                    Some(inside) => k.setp_and(Compare::Gt, self.rows_left, row as i32, inside),
                    None => k.setp(Compare::Gt, self.rows_left, row as i32),
                };
                let word = Words::zero(k, self.matrix.dtype, self.matrix.vector as usize);
                k.when(there, |k| word.load(k, Pointer::at(from)));
                words.push(word);
            }
            k.add_to(self.next, self.next, self.tile_step);
            if self.rows_per_tile > 0 {
                k.sub_to(self.rows_left, self.rows_left, self.rows_per_tile);
            }
            Fetched(words)
        })
    }

    /// Puts a tile into shared memory.
    #[track_caller]
    pub fn put(&self, k: &mut KernelBuilder, fetched: &Fetched) {
        k.at(Location::caller(), |k| {
            for ((row, inside), words) in self.steps(self.in_tile).zip(&fetched.0) {
                let values = words.widen(k, self.matrix.dtype);
                let to = Pointer::<Shared>::at(self.to).offset(i64::from(4 * row * self.tile.columns));
                match inside {
                    Some(inside) => k.when(inside, |k| k.st_vec(to, &values)),
                    None => k.st_vec(to, &values),
                }
            }
        });
    }

    /// Brings the next tile to shared memory.
    #[track_caller]
    pub fn load(&self, k: &mut KernelBuilder) {
        let fetched = self.fetch(k);
        self.put(k, &fetched);
    }
}
