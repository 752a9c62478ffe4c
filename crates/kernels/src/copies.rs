//! Tiles on their way from global to shared memory, brought by all threads of a CTA.
//!
//! From sm_80 on a thread asks for pieces of 16, 8 or 4 bytes and goes on (`cp.async`). Before, and where only pairs of bytes
//! are aligned, it loads into registers, and puts those into shared memory when it is told to.

use std::panic::Location;

use arch::Feature;
use ptx::{B16, B32, Compare, Condition, Global, KernelBuilder, Pointer, Pred, Reg, Shared, Target, U32, U64};

use crate::mma::{CHUNK, Slab, Tile, WIDTHS, swizzled};

/// Whether copies of so many bytes go on by themselves once asked for.
pub fn are_asynchronous(target: Target, piece: u32) -> bool {
    /// The fewest bytes that `cp.async` copies.
    const LEAST: u32 = 4;
    target.supports(Feature::CpAsync) && piece >= LEAST
}

/// How the threads of a CTA share the copying of tiles of one kind.
#[derive(Clone, Debug)]
pub struct Copies {
    tile: Tile,
    /// Bytes of a row that the tensor has: a multiple of `piece`.
    row_bytes: u32,
    /// Bytes that are copied at once: 16, 8, 4 or 2.
    piece: u32,
    lanes: Vec<Lanes>,
}

/// A thread's place in slabs of one width: neighbouring threads have neighbouring chunks of a row, then of the next.
#[derive(Clone, Copy, Debug)]
struct Lanes {
    width: u32,
    /// The thread's first row.
    row: Reg<U32>,
    /// From there to its next.
    row_step: u32,
    /// Its first byte in a row of the slab.
    column: Reg<U32>,
    /// Where its chunk of the first row goes, from the slab's beginning.
    to: Reg<U32>,
}

/// Chunks that were loaded into registers, and where they go. None when they go there by themselves.
#[derive(Debug, Default)]
#[must_use]
pub struct Fetched(Vec<Chunk>);

#[derive(Debug)]
struct Chunk {
    to: Pointer<Shared>,
    words: [Reg<B32>; 4],
    /// Whether the thread has a chunk; always where nothing is said.
    there: Option<Reg<Pred>>,
}

impl Fetched {
    /// Puts what was loaded into shared memory.
    #[track_caller]
    pub fn put(self, k: &mut KernelBuilder) {
        k.at(Location::caller(), |k| {
            for Chunk { to, words, there } in self.0 {
                match there {
                    None => k.st_vec(to, &words),
                    Some(there) => k.when(there, |k| k.st_vec(to, &words)),
                }
            }
        });
    }
}

/// A row of a tensor: the address of the thread's column in it, and whether it is there; always where nothing is said.
pub type Row = (Reg<U64>, Option<Reg<Pred>>);

impl Copies {
    /// Of tiles whose rows have `row_bytes` bytes, `piece` (a power of two up to 16) of which are aligned, by `threads` threads.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, thread: Reg<U32>, threads: u32, tile: Tile, row_bytes: u32, piece: u32) -> Self {
        k.at(Location::caller(), |k| {
            let lanes = tile.widths().map(|width| {
                let chunks = width / CHUNK;
                let chunk = k.and(thread, chunks - 1);
                let row = k.shr(thread, chunks.ilog2());
                let to = swizzled(k, width, row, chunk);
                Lanes { width, row, row_step: threads / chunks, column: k.mul(chunk, CHUNK), to }
            });
            Self { tile, row_bytes, piece, lanes: lanes.collect() }
        })
    }

    /// Whether the copies go on by themselves once asked for.
    pub fn is_asynchronous(&self, k: &KernelBuilder) -> bool {
        are_asynchronous(k.target(), self.piece)
    }

    /// From one of the thread's rows to the next, in slabs of the `index`-th width.
    pub fn row_step(&self, index: usize) -> u32 {
        self.lanes[index].row_step
    }

    /// This thread's first row, and its column in bytes, in slabs of each width.
    #[track_caller]
    pub fn places(&self, k: &mut KernelBuilder) -> Vec<(Reg<U32>, Reg<U64>)> {
        k.at(Location::caller(), |k| self.lanes.iter().map(|lanes| (lanes.row, k.cvt(lanes.column))).collect())
    }

    /// Begins to bring a tile to `to`, if `condition` holds in the CTA. `row` says where a row is: that which is so many rows below
    /// the thread's first one, in the slabs of the `index`-th width. The lowest is asked for first. Columns that the tensor
    /// lacks and rows that are not there become 0.
    #[track_caller]
    pub fn fetch(
        &self,
        k: &mut KernelBuilder,
        to: Reg<U32>,
        condition: Option<Condition>,
        mut row: impl FnMut(&mut KernelBuilder, usize, u32) -> Row,
    ) -> Fetched {
        k.at(Location::caller(), |k| {
            let mut fetched = Vec::new();
            for (index, lanes) in self.lanes.iter().enumerate() {
                let slabs: Vec<_> = self.tile.slabs().into_iter().filter(|slab| slab.width == lanes.width).collect();
                let to = k.add(lanes.to, to);
                let offsets = (0..self.tile.rows).step_by(lanes.row_step as usize);
                for offset in offsets.collect::<Vec<_>>().into_iter().rev() {
                    // There may be more threads than rows.
                    let within = (offset + lanes.row_step > self.tile.rows)
                        .then(|| k.setp(Compare::Lt, lanes.row, self.tile.rows - offset));
                    let condition = match (condition, within) {
                        (Some(condition), Some(within)) => Some(k.and_p(condition, within).into()),
                        (condition, within) => condition.or(within.map(Condition::from)),
                    };
                    let (from, there) = row(k, index, offset);
                    for slab in &slabs {
                        let to = Pointer::at(to).offset((slab.offset + offset * slab.width).into());
                        let from = Pointer::at(from).offset(slab.first.into());
                        let words = self.chunk(k, lanes, slab, (to, from), condition, there);
                        fetched.extend(words.map(|words| Chunk { to, words, there: within }));
                    }
                }
            }
            Fetched(fetched)
        })
    }

    /// Begins to bring one chunk; its words, where they do not go by themselves.
    fn chunk(
        &self,
        k: &mut KernelBuilder,
        lanes: &Lanes,
        slab: &Slab,
        (to, from): (Pointer<Shared>, Pointer<Global>),
        condition: Option<Condition>,
        there: Option<Reg<Pred>>,
    ) -> Option<[Reg<B32>; 4]> {
        let asynchronous = self.is_asynchronous(k);
        let mut words = Vec::new();
        let mut halves: Vec<Reg<B16>> = Vec::new();
        for offset in (0..CHUNK).step_by(self.piece as usize) {
            // Whether the tensor has the piece.
            let there = if slab.first + slab.width <= self.row_bytes {
                there
            } else {
                let left = self.row_bytes.saturating_sub(slab.first + offset);
                Some(match there {
                    None => k.setp(Compare::Lt, lanes.column, left),
                    Some(there) => k.setp_and(Compare::Lt, lanes.column, left, there),
                })
            };
            let from = from.offset(offset.into());
            if asynchronous {
                let to = to.offset(offset.into());
                let read = there.map(|there| k.selp::<U32>(self.piece, 0, there));
                let copy = |k: &mut KernelBuilder| match read {
                    None => k.cp_async(to, from, self.piece, self.piece),
                    Some(read) => k.cp_async(to, from, self.piece, read),
                };
                match condition {
                    None => copy(k),
                    Some(condition) => k.when(condition, copy),
                }
                continue;
            }
            let there = match (there, condition) {
                (Some(there), Some(condition)) => Some(k.and_p(there, condition).into()),
                (Some(there), None) => Some(there.into()),
                (None, condition) => condition,
            };
            let load = |k: &mut KernelBuilder, load: &mut dyn FnMut(&mut KernelBuilder)| match there {
                None => load(k),
                Some(there) => k.when(there, load),
            };
            if self.piece == 2 {
                let half = k.mov::<B16>(0);
                load(k, &mut |k| k.ld_to(half, from));
                halves.push(half);
            } else {
                let piece: Vec<Reg<B32>> = (0..self.piece / 4).map(|_| k.mov::<B32>(0)).collect();
                load(k, &mut |k| k.ld_vec_to(&piece, from));
                words.extend(piece);
            }
        }
        words.extend(halves.chunks_exact(2).map(|pair| k.pack(pair[0], pair[1])).collect::<Vec<_>>());
        words.try_into().ok()
    }
}

/// Tiles that follow each other in a tensor's rows, from the last one up.
#[derive(Clone, Debug)]
pub struct Stream {
    /// How they are shared out.
    pub copies: Copies,
    /// Of each width of a slab, where the thread's lowest row of the next tile is.
    next: Vec<Reg<U64>>,
    /// Bytes from one of the thread's rows to the one above, and from the uppermost to the lowest of the next tile.
    steps: Vec<Reg<U64>>,
}

impl Stream {
    /// From the tile that begins at address `first`, whose rows lie `stride` bytes apart.
    #[track_caller]
    pub fn up(k: &mut KernelBuilder, copies: Copies, first: Reg<U64>, stride: Reg<U64>) -> Self {
        k.at(Location::caller(), |k| {
            let (mut next, mut steps) = (Vec::new(), Vec::new());
            for (lanes, (row, column)) in copies.lanes.iter().zip(copies.places(k)) {
                let step = lanes.row_step.min(copies.tile.rows);
                let row = k.add(row, copies.tile.rows - step);
                let row = k.cvt::<U64, _>(row);
                let place = k.mad(row, stride, first);
                next.push(k.add(place, column));
                steps.push(k.mul(stride, u64::from(step)));
            }
            Self { copies, next, steps }
        })
    }

    /// Begins to bring the next tile to `to`, if `condition` holds. Of its rows `rows` are there; all, where nothing is said.
    #[track_caller]
    pub fn fetch(
        &self,
        k: &mut KernelBuilder,
        to: Reg<U32>,
        condition: Option<Condition>,
        rows: Option<Reg<U32>>,
    ) -> Fetched {
        k.at(Location::caller(), |k| {
            self.copies.fetch(k, to, condition, |k, index, offset| {
                let here = k.mov(self.next[index]);
                k.sub_to(self.next[index], self.next[index], self.steps[index]);
                let there = rows.map(|rows| {
                    let row = k.add(self.copies.lanes[index].row, offset);
                    k.setp(Compare::Lt, row, rows)
                });
                (here, there)
            })
        })
    }
}

const _: () = assert!(WIDTHS[0] == 8 * CHUNK);
