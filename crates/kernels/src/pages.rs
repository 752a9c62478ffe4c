//! Keys and values in pages: which page a tile's rows are in, and tiles that are brought from there.

use std::panic::Location;

use ptx::{Compare, Condition, Global, KernelBuilder, Pointer, Reg, S32, U32, U64};

use crate::copies::{Copies, Fetched};
use crate::schedule::Work;
use crate::strided::Strided;

/// Lanes of a warp.
const LANES: u32 = 32;

/// The pages of the block of keys that comes next, looked up while the one before is multiplied.
///
/// The lanes of a warp have one each, of neighbouring parts of the block, and ask one another.
#[derive(Clone, Debug)]
pub struct PageTable {
    /// The entry's row of the table.
    row: Reg<U64>,
    /// Keys of a page.
    size: u32,
    /// Keys of a block.
    block_kv: u32,
    /// Keys of a part, which are in one page.
    part: u32,
    lane: Reg<U32>,
    /// The pages of this lane's parts, that so many parts further on, and so forth.
    found: Vec<Reg<U32>>,
}

impl PageTable {
    /// Of the entry that `work` is of. Nothing is looked up yet.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, row: Reg<U64>, size: u32, block_kv: u32, work: &Work) -> Self {
        k.at(Location::caller(), |k| {
            // Blocks begin at multiples of their size, unless a window's first key says otherwise.
            let part = match (work.origin, size.is_multiple_of(block_kv), block_kv.is_multiple_of(size)) {
                (None, true, _) => block_kv,
                (None, _, true) => size,
                _ => 1,
            };
            let thread = k.tid_x();
            let lane = k.and(thread, LANES - 1);
            let found = (0..(block_kv / part).div_ceil(LANES)).map(|_| k.mov(0)).collect();
            Self { row, size, block_kv, part, lane, found }
        })
    }

    /// Begins to look up the pages of a block; of keys that are not there, nothing.
    #[track_caller]
    pub fn look_up(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) {
        k.at(Location::caller(), |k| {
            let first = work.key(k, block, self.block_kv).cast::<U32>();
            let first = if self.is_whole() { first } else { k.mad(self.lane, self.part, first) };
            for (index, &found) in self.found.iter().enumerate() {
                // A block below the first one has negative keys, which are no less than all others without sign.
                let key = k.add(first, index as u32 * LANES * self.part);
                let there = k.setp(Compare::Lt, key, work.seqlen_k.cast());
                let page = self.page_of(k, key);
                let place = k.mad_wide(page, 4, self.row);
                k.when(there, |k| k.ld_to(found, Pointer::<Global>::at(place)));
            }
        });
    }

    /// Whether a block is in one page.
    fn is_whole(&self) -> bool {
        self.part == self.block_kv
    }

    fn page_of(&self, k: &mut KernelBuilder, key: Reg<U32>) -> Reg<U32> {
        if self.size.is_power_of_two() { k.shr(key, self.size.ilog2()) } else { k.div(key, self.size) }
    }

    fn within_page(&self, k: &mut KernelBuilder, key: Reg<U32>) -> Reg<U32> {
        if self.size.is_power_of_two() {
            return k.and(key, self.size - 1);
        }
        let page = k.div(key, self.size);
        let before = k.mul(page, self.size);
        k.sub(key, before)
    }

    /// The page of a row of the block that was looked up. `row` is so much as `offset` and less than `step` more.
    fn page(&self, k: &mut KernelBuilder, row: Reg<U32>, offset: u32, step: u32) -> Reg<U32> {
        if self.is_whole() {
            return self.found[0];
        }
        let part = if self.part.is_power_of_two() { k.shr(row, self.part.ilog2()) } else { k.div(row, self.part) };
        // Which of the lane's parts it may be.
        let last = (offset + step - 1).min(self.block_kv - 1);
        let (first, last) = (offset / self.part / LANES, last / self.part / LANES);
        let mut page = k.shfl_idx(self.found[first as usize], part);
        for index in first + 1..=last {
            let other = k.shfl_idx(self.found[index as usize], part);
            let is_further = k.setp(Compare::Ge, part, index * LANES);
            page = k.selp(other, page, is_further);
        }
        page
    }
}

/// Tiles of a paged tensor's rows, whichever a table names.
#[derive(Clone, Debug)]
pub struct PagedStream {
    /// How they are shared out.
    pub copies: Copies,
    tensor: Strided,
    /// The address of the KV head in page 0.
    base: Reg<U64>,
    /// Of each width of a slab, the thread's first row and its column in bytes.
    places: Vec<(Reg<U32>, Reg<U64>)>,
}

impl PagedStream {
    /// Of a KV head.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, copies: Copies, tensor: &Strided, kv_head: Reg<U32>) -> Self {
        k.at(Location::caller(), |k| {
            let first_page = k.mov(0);
            let base = tensor.of_head(k, first_page, kv_head);
            let places = copies.places(k);
            Self { copies, tensor: *tensor, base, places }
        })
    }

    /// Begins to bring a block, whose pages were looked up, to `to`, if `condition` holds. Of its rows `rows` are there; all, where
    /// nothing is said.
    #[track_caller]
    pub fn fetch(
        &self,
        k: &mut KernelBuilder,
        (pages, work, block): (&PageTable, &Work, Reg<S32>),
        to: Reg<U32>,
        condition: Option<Condition>,
        rows: Option<Reg<U32>>,
    ) -> Fetched {
        k.at(Location::caller(), |k| {
            let key = work.key(k, block, pages.block_kv).cast::<U32>();
            let begin = pages.is_whole().then(|| {
                let page = self.tensor.of_batch(k, self.base, pages.found[0]);
                let within = pages.within_page(k, key);
                self.tensor.of_row(k, page, within.cast())
            });
            self.copies.fetch(k, to, condition, |k, index, offset| {
                let (row, column) = self.places[index];
                let row = k.add(row, offset);
                let here = match begin {
                    Some(begin) => self.tensor.of_row(k, begin, row.cast()),
                    None => {
                        let page = pages.page(k, row, offset, self.copies.row_step(index));
                        let page = self.tensor.of_batch(k, self.base, page);
                        // Where blocks are made of whole pages, a row's place in its page is the same in all blocks.
                        let key = if pages.part == pages.size { row } else { k.add(key, row) };
                        let within = pages.within_page(k, key);
                        self.tensor.of_row(k, page, within.cast())
                    }
                };
                let there = rows.map(|rows| k.setp(Compare::Lt, row, rows));
                (k.add(here, column), there)
            })
        })
    }
}
