//! Which part of a call a CTA computes next, when CTAs stay and take one tile of queries after the other.

use std::panic::Location;

use ptx::{Compare, Global, KernelBuilder, Pointer, Pred, Reg, S32, U32, U64};

use crate::Problem;
use crate::config::Config;

/// Whether the query heads of a KV head should share tiles of so many rows, `of_query` of them for each query: where their
/// queries are so few that they leave tiles of their own empty.
pub fn shares_heads(problem: &Problem, tile: usize, of_query: usize) -> bool {
    let (queries, group) = (problem.seqlen_q, problem.group());
    let apart = group * queries.div_ceil(tile);
    let together = (queries * of_query).div_ceil(tile);
    group > 1 && 10 * together < 9 * apart
}

/// The order of the tiles of queries, and what is the same for all of them: kernel parameters.
///
/// Heads are taken in sections whose keys and values fit in L2 together. Within a section the last tile of every head comes
/// first: under a causal mask it is the longest, and the shortest are left to fill the end.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Tiles in all.
    pub tiles: Reg<U32>,
    /// Tiles of a head.
    blocks: Reg<U32>,
    /// Heads of all batch entries.
    heads_in_all: Reg<U32>,
    /// Heads of a section.
    section: Reg<U32>,
    heads: Reg<U32>,
    group: Reg<U32>,
    /// Queries of a sequence, or of a packed batch's longest.
    pub seqlen_q: Reg<S32>,
    seqlen_k: Reg<S32>,
    /// How many CTAs split a tile's keys among them.
    splits: Option<Reg<U32>>,
    /// Where each sequence begins, of queries and of keys.
    cu_seqlens: Option<[Reg<U64>; 2]>,
    /// Of a cache, how many keys each sequence has, and how many more were appended.
    cache_seqlens: Option<(Reg<U64>, Reg<S32>)>,
    /// Of a cache, how many places there are before each sequence's first key.
    cache_leftpad: Option<Reg<U64>>,
    /// Of a cache, which row each sequence's keys are in.
    cache_batch_idx: Option<Reg<U64>>,
    /// Of pages, which each sequence's keys are in, and how many entries of the table a sequence has.
    block_table: Option<(Reg<U64>, Reg<U32>)>,
    left: Option<Reg<S32>>,
    right: Option<Reg<S32>>,
    block_q: u32,
    block_kv: u32,
    /// Whether the rows of a tile are the query heads of a KV head, query after query.
    grouped: bool,
    /// Whether CTAs share the blocks of their tiles, and must go through the same ones.
    shared: bool,
    /// Where each query has a power of two of those rows, however many heads there are, the logarithm to base 2.
    log2_rows_of_query: Option<Reg<U32>>,
}

/// A tile of queries, and the blocks of keys it needs.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Batch entry.
    pub batch: Reg<U32>,
    /// Query head; of those a tile has, the first.
    pub head: Reg<U32>,
    /// KV head.
    pub kv_head: Reg<U32>,
    /// Both as one index, `batch * heads + head`.
    pub index: Reg<U32>,
    /// Queries of the sequence.
    pub seqlen_q: Reg<S32>,
    /// Keys of the sequence.
    pub seqlen_k: Reg<S32>,
    /// The first query of the sequence among all of a packed batch.
    pub first_q: Option<Reg<S32>>,
    /// The first key of the sequence among all of a packed batch, or among the places of a cache's row.
    pub first_k: Option<Reg<S32>>,
    /// The row of k and v along their first dimension that the sequence's keys are in.
    pub batch_k: Reg<U32>,
    /// Of pages, where those of the sequence are named.
    pub pages: Option<Reg<U64>>,
    /// The tile's first row among those of its sequence: its first query, unless rows are those of several heads.
    pub row: Reg<S32>,
    /// `seqlen_k - seqlen_q`: how far the diagonal is to the right.
    pub diagonal: Reg<S32>,
    /// The first key of block 0: no query of the sequence sees one before it.
    pub origin: Option<Reg<S32>>,
    /// The blocks that some query of the tile sees: from this one,
    pub lowest: Option<Reg<S32>>,
    /// up to this one, the last. Less than `lowest` where there is none.
    pub last: Reg<S32>,
    /// The first block of those that not every query sees to the end.
    pub right_border: Reg<S32>,
    /// The first block that every query sees from its beginning.
    pub left_border: Option<Reg<S32>>,
    /// Where keys are split, which part of them these blocks are.
    pub part: Option<Reg<U32>>,
}

impl Schedule {
    /// Declares `seqlen_q`, `seqlen_k`, `heads`, `group`, `blocks`, `tiles`, `heads_in_all`, `section`; of split keys
    /// `splits`; of a packed batch `cu_seqlens_q` and `cu_seqlens_k`; of a cache `cache_seqlens` and `appended`,
    /// `cache_leftpad`, `cache_batch_idx`, `block_table` and `pages_of_entry`; of a window `left` and `right`.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, config: &Config) -> Self {
        k.at(Location::caller(), |k| {
            let (seqlen_q, seqlen_k) = (k.param("seqlen_q"), k.param("seqlen_k"));
            let (heads, group) = (k.param("heads"), k.param("group"));
            let (blocks, tiles) = (k.param("blocks"), k.param("tiles"));
            let (heads_in_all, section) = (k.param("heads_in_all"), k.param("section"));
            let splits = config.split.then(|| k.param("splits"));
            let cu_seqlens =
                config.varlen.then(|| [k.pointer_param("cu_seqlens_q", 4), k.pointer_param("cu_seqlens_k", 4)]);
            let cache_seqlens =
                config.cache.lengths.then(|| (k.pointer_param("cache_seqlens", 4), k.param("appended")));
            let cache_leftpad = config.cache.padded.then(|| k.pointer_param("cache_leftpad", 4));
            let cache_batch_idx = config.cache.indexed.then(|| k.pointer_param("cache_batch_idx", 4));
            let pages = config.cache.page_size;
            let block_table = pages.map(|_| (k.pointer_param("block_table", 4), k.param("pages_of_entry")));
            let (left, right) = match (config.window, config.causal) {
                (true, _) => (Some(k.param("left")), Some(k.param("right"))),
                (false, true) => (None, Some(k.mov(0))),
                (false, false) => (None, None),
            };
            let crate::Tiles { block_q, block_kv, .. } = config.tiles;
            Self {
                tiles,
                blocks,
                heads_in_all,
                section,
                heads,
                group,
                seqlen_q,
                seqlen_k,
                splits,
                cu_seqlens,
                cache_seqlens,
                cache_leftpad,
                cache_batch_idx,
                block_table,
                left,
                right,
                block_q,
                block_kv,
                grouped: config.grouped,
                shared: config.cluster > 1,
                log2_rows_of_query: None,
            }
        })
    }

    /// The same, each query of grouped heads with a power of two of rows: declares `log2_rows_of_query`.
    #[track_caller]
    pub fn padded(self, k: &mut KernelBuilder) -> Self {
        Self { log2_rows_of_query: self.grouped.then(|| k.param("log2_rows_of_query")), ..self }
    }

    /// What tile `index` is; where keys are split, all tiles with their first part of the keys come first, then all with the next.
    #[track_caller]
    pub fn work(&self, k: &mut KernelBuilder, index: Reg<U32>) -> Work {
        k.at(Location::caller(), |k| {
            let Some(splits) = self.splits else { return self.whole(k, index) };
            let part = k.div(index, self.tiles);
            let before = k.mul(part, self.tiles);
            let index = k.sub(index, before);
            let whole = self.whole(k, index);
            // Equal parts of the blocks, from the last down.
            let lowest = whole.lowest.unwrap_or_else(|| k.mov(0));
            let blocks = k.sub(whole.last, lowest);
            let splits = splits.cast::<S32>();
            let blocks = k.add(blocks, splits);
            let blocks = k.max(blocks, 0);
            let blocks = k.div(blocks, splits);
            let taken = k.mul(blocks, part.cast());
            let last = k.sub(whole.last, taken);
            let end = k.sub(last, blocks);
            let first = k.add(end, 1);
            let lowest = k.max(first, lowest);
            Work { last, lowest: Some(lowest), part: Some(part), ..whole }
        })
    }

    /// What tile `index` is, with all its keys.
    fn whole(&self, k: &mut KernelBuilder, index: Reg<U32>) -> Work {
        {
            let split = |k: &mut KernelBuilder, index: Reg<U32>, by: Reg<U32>| {
                let quotient = k.div(index, by);
                let product = k.mul(quotient, by);
                (quotient, k.sub(index, product))
            };
            // Section, then block from the last, then head.
            let tiles = k.mul(self.section, self.blocks);
            let (section, rest) = split(k, index, tiles);
            let before = k.mul(section, self.section);
            let heads = k.sub(self.heads_in_all, before);
            let heads = k.min(heads, self.section);
            let (from_last, head) = split(k, rest, heads);
            let index = k.add(head, before);
            let last = k.sub(self.blocks, 1);
            let block = k.sub(last, from_last);
            let (batch, head) = split(k, index, self.heads);
            let (kv_head, head, index) = if self.grouped {
                (head, k.mul(head, self.group), k.mul(index, self.group))
            } else {
                (k.div(head, self.group), head, index)
            };
            let row = k.mul(block, self.block_q).cast::<S32>();

            let (mut seqlen_q, mut seqlen_k) = (self.seqlen_q, self.seqlen_k);
            let (mut first_q, mut first_k) = (None, None);
            if let Some(cu_seqlens) = self.cu_seqlens {
                let [q, kv] = cu_seqlens.map(|array| {
                    let place = k.mad_wide(batch, 4, array);
                    let (first, end) = (Pointer::<Global>::at(place), Pointer::<Global>::at(place).offset(4));
                    let first = k.ld::<S32, _>(first);
                    let end = k.ld::<S32, _>(end);
                    (first, k.sub(end, first))
                });
                (seqlen_q, seqlen_k) = (q.1, kv.1);
                (first_q, first_k) = (Some(q.0), Some(kv.0));
            }
            if let Some((cache_seqlens, appended)) = self.cache_seqlens {
                let place = k.mad_wide(batch, 4, cache_seqlens);
                let before = k.ld::<S32, _>(Pointer::<Global>::at(place));
                // No more than there is room for, whatever memory says.
                let length = k.add(before, appended);
                let length = k.min(length, self.seqlen_k);
                seqlen_k = k.max(length, 0);
            }
            if let Some(cache_leftpad) = self.cache_leftpad {
                let place = k.mad_wide(batch, 4, cache_leftpad);
                let before = k.ld::<S32, _>(Pointer::<Global>::at(place));
                let before = k.min(before, seqlen_k);
                let before = k.max(before, 0);
                seqlen_k = k.sub(seqlen_k, before);
                first_k = Some(before);
            }
            let batch_k = match self.cache_batch_idx {
                None => batch,
                Some(cache_batch_idx) => {
                    let place = k.mad_wide(batch, 4, cache_batch_idx);
                    k.ld::<U32, _>(Pointer::<Global>::at(place))
                }
            };
            let pages = self.block_table.map(|(table, pages_of_entry)| {
                let row = k.mul_wide(batch, pages_of_entry);
                k.mad(row, 4, table)
            });
            let diagonal = k.sub(seqlen_k, seqlen_q);

            // The tile's queries; none where the sequence has ended.
            let (first_row, _) = self.query(k, row);
            let last_row = k.add(row, self.block_q as i32 - 1);
            let (last_row, _) = self.query(k, last_row);
            let last_query = k.sub(seqlen_q, 1);
            let last_row = k.min(last_row, last_query);
            let ends = |k: &mut KernelBuilder, row: Reg<S32>| match self.right {
                None => seqlen_k,
                Some(right) => {
                    let end = k.add(row, diagonal);
                    let end = k.add(end, right);
                    let end = k.add(end, 1);
                    let end = k.min(end, seqlen_k);
                    k.max(end, 0)
                }
            };
            let begins = |k: &mut KernelBuilder, row: Reg<S32>, left: Reg<S32>| {
                let begin = k.add(row, diagonal);
                let begin = k.sub(begin, left);
                k.max(begin, 0)
            };
            let (mut seen_by_first, mut seen_by_last) = (ends(k, first_row), ends(k, last_row));
            let mut origin = None;
            if let Some(left) = self.left {
                let first_query = k.mov::<S32>(0);
                let first_key = begins(k, first_query, left);
                seen_by_first = k.sub(seen_by_first, first_key);
                seen_by_first = k.max(seen_by_first, 0);
                seen_by_last = k.sub(seen_by_last, first_key);
                origin = Some(first_key);
            }
            let block_kv = self.block_kv as i32;
            let (lowest, left_border) = match (self.left, origin) {
                (Some(left), Some(origin)) => {
                    let from = begins(k, first_row, left);
                    let from = k.sub(from, origin);
                    let lowest = k.div(from, block_kv);
                    let from = begins(k, last_row, left);
                    let from = k.sub(from, origin);
                    let from = k.add(from, block_kv - 1);
                    (Some(lowest), Some(k.div(from, block_kv)))
                }
                _ => (None, None),
            };
            let blocks = k.add(seen_by_last, block_kv - 1);
            let blocks = k.div(blocks, block_kv);
            let last = k.sub(blocks, 1);
            let right_border = k.div(seen_by_first, block_kv);
            // A tile past the sequence's end has no row, and needs no key; its neighbour may need it to load its share.
            let last = if self.shared {
                last
            } else {
                let none = k.setp(Compare::Ge, first_row, seqlen_q);
                k.selp(-1, last, none)
            };
            Work {
                batch,
                head,
                kv_head,
                index,
                seqlen_q,
                seqlen_k,
                first_q,
                first_k,
                batch_k,
                pages,
                row,
                diagonal,
                origin,
                lowest,
                last,
                right_border,
                left_border,
                part: None,
            }
        }
    }

    /// The query of a row of its sequence, and where rows are those of several heads, which of them.
    #[track_caller]
    pub fn query(&self, k: &mut KernelBuilder, row: Reg<S32>) -> (Reg<S32>, Option<Reg<U32>>) {
        if !self.grouped {
            return (row, None);
        }
        k.at(Location::caller(), |k| {
            let row = row.cast::<U32>();
            let (query, heads) = match self.log2_rows_of_query {
                None => {
                    let query = k.div(row, self.group);
                    (query, k.mul(query, self.group))
                }
                Some(log2) => {
                    let query = k.shr(row, log2);
                    (query, k.shl(query, log2))
                }
            };
            (query.cast(), Some(k.sub(row, heads)))
        })
    }

    /// Whether `there` holds and a row of `head`, as [`Schedule::query`] gives it, is one of the group's.
    #[track_caller]
    pub fn is_of_group(&self, k: &mut KernelBuilder, head: Reg<U32>, there: Reg<Pred>) -> Reg<Pred> {
        match self.log2_rows_of_query {
            None => there,
            Some(_) => k.setp_and(Compare::Lt, head, self.group, there),
        }
    }

    /// `head`, as [`Schedule::query`] gives it, or where that is none of the group's, one of those.
    #[track_caller]
    pub fn some_of_group(&self, k: &mut KernelBuilder, head: Reg<U32>) -> Reg<U32> {
        match self.log2_rows_of_query {
            None => head,
            Some(_) => k.at(Location::caller(), |k| {
                let last = k.sub(self.group, 1);
                k.min(head, last)
            }),
        }
    }

    /// The keys that a query sees, `first..end`, in its sequence.
    #[track_caller]
    pub fn seen(&self, k: &mut KernelBuilder, work: &Work, query: Reg<S32>) -> (Option<Reg<S32>>, Reg<S32>) {
        k.at(Location::caller(), |k| {
            let position = k.add(query, work.diagonal);
            let first = self.left.map(|left| k.sub(position, left));
            let end = match self.right {
                None => work.seqlen_k,
                Some(right) => {
                    let end = k.add(position, right);
                    let end = k.add(end, 1);
                    k.min(end, work.seqlen_k)
                }
            };
            (first, end)
        })
    }
}

impl Work {
    /// The first key of a block, in the sequence.
    #[track_caller]
    pub fn key(&self, k: &mut KernelBuilder, block: Reg<S32>, block_kv: u32) -> Reg<S32> {
        k.at(Location::caller(), |k| match self.origin {
            None => k.mul(block, block_kv as i32),
            Some(origin) => k.mad(block, block_kv as i32, origin),
        })
    }

    /// Whether no query of the tile sees a key.
    #[track_caller]
    pub fn sees_nothing(&self, k: &mut KernelBuilder) -> Reg<Pred> {
        match self.lowest {
            None => k.setp(Compare::Lt, self.last, 0),
            Some(lowest) => k.setp(Compare::Lt, self.last, lowest),
        }
    }

    /// Whether some query of the tile does not see all keys of a block.
    #[track_caller]
    pub fn is_at_border(&self, k: &mut KernelBuilder, block: Reg<S32>) -> Reg<Pred> {
        k.at(Location::caller(), |k| {
            let at_right = k.setp(Compare::Ge, block, self.right_border);
            match self.left_border {
                None => at_right,
                Some(border) => k.setp_or(Compare::Lt, block, border, at_right),
            }
        })
    }

    /// The first block that the tile needs, where it needs any.
    pub fn first_block(&self) -> ptx::Src<S32> {
        self.lowest.map_or(0.into(), Into::into)
    }

    /// Whether a block is past the first one that the tile needs, counted down from the last.
    #[track_caller]
    pub fn is_over(&self, k: &mut KernelBuilder, block: Reg<S32>) -> Reg<Pred> {
        match self.lowest {
            None => k.setp(Compare::Lt, block, 0),
            Some(lowest) => k.setp(Compare::Lt, block, lowest),
        }
    }
}
