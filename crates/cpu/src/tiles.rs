//! How a call is divided: into tiles of query rows that read the same keys, and keys into parts where tiles are few.

use std::ops::Range;

use kernels::Problem;

/// Rows that are computed together: queries of heads that share a KV head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    pub entry: usize,
    pub kv_head: usize,
    /// Row `r` is query `r % seqlen_q` of the group's head `r / seqlen_q`.
    pub rows: Range<usize>,
    /// What they see, together, or the part of it that is this tile's.
    pub keys: Range<usize>,
    /// Which part of how many, and where partial results of such tiles begin, in rows.
    pub part: Option<Part>,
}

/// A part of the keys of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Partial results before the tile's own, in rows.
    pub first: usize,
    /// Parts.
    pub of: usize,
    /// Which.
    pub index: usize,
}

/// What a row's scores depend on beside the products.
#[derive(Clone, Default)]
pub(crate) struct Sight {
    /// The keys it sees.
    pub seen: Range<usize>,
    /// The key where its bias is 0.
    pub diagonal: f32,
    /// ALiBi's slope.
    pub slope: f32,
}

impl Sight {
    /// What any of some rows sees.
    pub fn any<'a>(rows: impl Iterator<Item = &'a Sight>) -> Range<usize> {
        let seen = rows.map(|sight| &sight.seen).filter(|seen| !seen.is_empty());
        let both = seen.cloned().reduce(|any, seen| any.start.min(seen.start)..any.end.max(seen.end));
        both.unwrap_or_default()
    }
}

/// Rows of a tile: a multiple of `unit`, at most `most` of these, so that `threads` have some tiles each of `rows`.
pub(crate) fn height(unit: usize, most: usize, rows: usize, threads: usize) -> usize {
    (rows / (unit * threads * TILES_PER_THREAD)).clamp(1, most) * unit
}

/// For each thread, so that all end at about the same time.
const TILES_PER_THREAD: usize = 4;

impl Tile {
    /// The tile's keys in blocks of so many, which begin at multiples of that.
    pub fn blocks(&self, size: usize) -> impl Iterator<Item = Range<usize>> {
        let Range { start, end } = self.keys;
        (start / size..end.div_ceil(size)).map(move |block| start.max(block * size)..end.min((block + 1) * size))
    }

    /// What a row sees.
    pub fn sight(&self, problem: &Problem, row: usize) -> Sight {
        let (seqlen_q, seqlen_k) = problem.lengths(self.entry);
        let (head, i) = self.row(problem, row);
        Sight {
            seen: problem.mask.seen_keys(i, seqlen_q, seqlen_k),
            diagonal: (i + seqlen_k) as f32 - seqlen_q as f32,
            slope: problem.slope(self.entry, head),
        }
    }

    /// The query head and the query of a row.
    pub fn row(&self, problem: &Problem, row: usize) -> (usize, usize) {
        let seqlen_q = problem.lengths(self.entry).0;
        (self.kv_head * problem.group() + row / seqlen_q, row % seqlen_q)
    }

    /// Roughly the pairs of a row and a key: what it costs.
    fn cost(&self) -> usize {
        self.rows.len() * self.keys.len()
    }
}

/// The tiles of a call, the costliest first, and how many rows of partial results they have.
///
/// `height` is the rows of a tile, and `block` what parts of keys are multiples of. The division depends on the problem and the
/// number of threads alone, so that results do.
pub(crate) fn tiles(problem: &Problem, height: usize, block: usize, threads: usize) -> (Vec<Tile>, usize) {
    let mut tiles = Vec::new();
    for entry in 0..problem.batch {
        let (seqlen_q, seqlen_k) = problem.lengths(entry);
        // Heads share a tile only where their queries do not fill one: the rows of a tile should see the same keys.
        let (runs, length) = match seqlen_q < height {
            true => (1, seqlen_q * problem.group()),
            false => (problem.group(), seqlen_q),
        };
        for kv_head in 0..problem.heads_kv {
            for run in 0..runs {
                for start in (0..length).step_by(height) {
                    let rows = run * length + start..run * length + (start + height).min(length);
                    let keys = union(problem, rows.clone(), seqlen_q, seqlen_k);
                    tiles.push(Tile { entry, kv_head, rows, keys, part: None });
                }
            }
        }
    }
    // Counted in query heads, so that heads that share keys are divided like heads of their own.
    let heads: usize = tiles.iter().map(|tile| tile.rows.len().div_ceil(problem.lengths(tile.entry).0)).sum();
    let wanted = (threads * TILES_PER_THREAD).div_ceil(heads.max(1));
    let mut partial = 0;
    if threads > 1 && wanted > 1 {
        let whole = std::mem::take(&mut tiles);
        for tile in whole {
            let blocks = tile.keys.start / block..tile.keys.end.div_ceil(block);
            let of = wanted.min(blocks.len() / 2).max(1);
            if of == 1 {
                tiles.push(tile);
                continue;
            }
            for index in 0..of {
                let at = |index: usize| (blocks.start + blocks.len() * index / of) * block;
                let keys = tile.keys.start.max(at(index))..tile.keys.end.min(at(index + 1));
                tiles.push(Tile { keys, part: Some(Part { first: partial, of, index }), ..tile.clone() });
            }
            partial += of * tile.rows.len();
        }
    }
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.cost()));
    (tiles, partial)
}

/// What some rows see together.
fn union(problem: &Problem, rows: Range<usize>, seqlen_q: usize, seqlen_k: usize) -> Range<usize> {
    if seqlen_q == 0 {
        return 0..0;
    }
    // What a query sees begins and ends no earlier than what the one before it sees.
    let (first, last) = (rows.start % seqlen_q, (rows.end - 1) % seqlen_q);
    let (first, last) = if rows.len() > last + 1 - first.min(last) { (0, seqlen_q - 1) } else { (first, last) };
    let seen = |i| problem.mask.seen_keys(i, seqlen_q, seqlen_k);
    let keys = seen(first).start..seen(last).end;
    if keys.is_empty() { 0..0 } else { keys }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::{Mask, ProblemSpec};

    fn check(problem: &Problem, height: usize, threads: usize) -> Vec<Tile> {
        let (tiles, partial) = tiles(problem, height, 8, threads);
        // Each row that sees a key sees each of its keys in one tile.
        let mut seen = std::collections::BTreeMap::new();
        let mut rows = std::collections::BTreeSet::new();
        for tile in &tiles {
            assert!(tile.rows.len() <= height && !tile.rows.is_empty());
            for row in tile.rows.clone() {
                let (head, i) = tile.row(problem, row);
                rows.insert((tile.entry, head, i));
                for key in problem.seen_keys(tile.entry, i).filter(|key| tile.keys.contains(key)) {
                    *seen.entry((tile.entry, head, i, key)).or_insert(0) += 1;
                }
            }
            if let Some(part) = tile.part {
                assert!(part.index < part.of && part.first + part.of * tile.rows.len() <= partial);
            }
        }
        let mut expected = 0;
        for entry in 0..problem.batch {
            for i in 0..problem.lengths(entry).0 {
                expected += problem.heads_q * problem.seen_keys(entry, i).len();
            }
        }
        assert_eq!(rows.len(), problem.total_q() * problem.heads_q);
        assert_eq!(seen.len(), expected);
        assert!(seen.values().all(|&times| times == 1));
        tiles
    }

    #[test]
    fn every_pair_is_in_one_tile() {
        for spec in [
            ProblemSpec::new(2, 4, 50, 8),
            ProblemSpec::new(1, 6, 5, 8).heads_kv(2).seqlen_k(100).causal(),
            ProblemSpec::new(1, 6, 9, 8).heads_kv(2).seqlen_k(70).mask(Mask { left: Some(7), right: Some(3) }),
            ProblemSpec::new(1, 1, 1, 8).seqlen_k(1000),
            ProblemSpec::new(1, 2, 7, 8).seqlen_k(3).causal(),
            ProblemSpec::packed(3, 4, vec![0, 2, 2, 70], vec![0, 1, 3, 90]).causal(),
            ProblemSpec::new(1, 2, 0, 8),
        ] {
            let problem = spec.build().unwrap();
            for threads in [1, 2, 64] {
                for height in [1, 7, 16, 64] {
                    check(&problem, height, threads);
                }
            }
        }
    }

    #[test]
    fn few_tiles_divide_their_keys_and_heads_that_share_them_alike() {
        let alone = ProblemSpec::new(1, 4, 1, 8).seqlen_k(800).build().unwrap();
        let shared = ProblemSpec::new(1, 4, 1, 8).heads_kv(1).seqlen_k(800).build().unwrap();
        let parts = |problem| check(problem, 16, 8).iter().map(|tile| tile.part.unwrap().of).max();
        assert_eq!((parts(&alone), parts(&shared)), (Some(8), Some(8)));
    }
}
