//! What follows from the shape of a warp's addresses alone, computed once per shape.
//!
//! Bank conflicts, sectors, alignment and which bytes are touched depend only on the distances between the lanes' addresses
//! and on the first address modulo [`PERIOD`]. A kernel's instruction meets few shapes, so each is analysed once and then
//! recognised: this is what makes counting cheap.

use crate::banks::{self, BankRule};
use crate::lanes::{WARP, expand};
use crate::program::Merged;
use crate::report::{InstructionCounters, Shape};

/// Addresses that differ by a multiple of this fall on the same banks, sectors and bit positions.
pub(crate) const PERIOD: u64 = 128;
/// Bytes of a sector of global memory.
pub(crate) const SECTOR: u64 = 32;

/// Which memory a pattern is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Shared(BankRule),
    Global,
}

/// One shape of addresses of one instruction.
pub(crate) struct Pattern {
    active: u32,
    /// The first active lane's address when the shape was first met.
    first: u64,
    phase: u64,
    /// Distance of each lane from the first active one; 0 for inactive lanes.
    deltas: [i32; WARP],
    /// The lowest and, exclusively, the highest byte touched, from the first active lane's address.
    pub low: i64,
    pub high: i64,
    /// A lane whose address is not a multiple of the access size.
    pub misaligned: Option<u32>,
    /// The distinct lane addresses, as distances, and for each lane which of them it is.
    pub distinct: Vec<i32>,
    pub chunk_of: [u32; WARP],
    /// Whether the distinct addresses follow each other without gaps.
    pub is_dense: bool,
    /// The bytes touched as bits of 64-byte words, by distance from the word of the first address.
    pub words: Vec<(i64, u64)>,
    /// The sectors touched, by distance from the sector of the first address.
    pub sectors: Vec<i64>,
    /// What one execution counts, as PTX states it and after the merge.
    pub ptx: InstructionCounters,
    pub merged: InstructionCounters,
    /// Executions so far.
    pub hits: u64,
    /// First addresses from which all bytes were found written, and since when that holds.
    checked: [(u64, u32); CHECKED],
}

/// First addresses remembered per shape: one per warp of a usual CTA, and two stages.
const CHECKED: usize = 16;

impl Pattern {
    /// Whether these addresses, of the lanes in `active`, have this shape. `lanes` is `active` expanded.
    #[inline(always)]
    pub(crate) fn matches(&self, addresses: &[u64; WARP], first: u64, active: u32, lanes: &[u32; WARP]) -> bool {
        let mut differing = 0;
        for lane in 0..WARP {
            let delta = addresses[lane].wrapping_sub(first);
            // The high halves are compared too: a distance beyond 32 bits matches nothing.
            let expected = self.deltas[lane] as i64 as u64;
            let difference = delta ^ expected;
            differing |= (difference as u32 | (difference >> 32) as u32) & lanes[lane];
        }
        differing == 0 && self.active == active && self.phase == first % PERIOD
    }

    /// As [`Pattern::matches`], for 32-bit addresses.
    #[inline(always)]
    pub(crate) fn matches_narrow(&self, addresses: &[u32; WARP], first: u32, active: u32, lanes: &[u32; WARP]) -> bool {
        let mut differing = 0;
        for lane in 0..WARP {
            differing |= (addresses[lane].wrapping_sub(first) ^ self.deltas[lane] as u32) & lanes[lane];
        }
        differing == 0 && self.active == active && self.phase == u64::from(first) % PERIOD
    }

    /// The distances of all lanes from the first active one, as the bits of signed numbers; 0 for inactive lanes.
    pub(crate) fn deltas_by_lane(&self) -> &[u32; WARP] {
        bytemuck::cast_ref(&self.deltas)
    }

    /// Whether bytes from this first address on were found written since `since`; if not, they will be.
    #[inline(always)]
    pub(crate) fn is_checked(&mut self, since: u64, first: u32) -> bool {
        let entry = &mut self.checked[(first >> 4 ^ first >> 8 ^ first >> 12) as usize % CHECKED];
        let known = *entry == (since, first);
        *entry = (since, first);
        known
    }

    /// A lane at this distance from the first active one.
    pub(crate) fn lane_of(&self, delta: i32) -> u32 {
        lanes_of(self.active).find(|&lane| self.deltas[lane] == delta).unwrap_or(0) as u32
    }

    /// The lane that reaches furthest up to an address, when the first active lane is at `first`.
    pub(crate) fn lane_at(&self, first: u32, address: u64) -> u32 {
        let distance = address as i64 - i64::from(first);
        let reaching = self.distinct.iter().rev().find(|&&delta| i64::from(delta) <= distance);
        self.lane_of(reaching.copied().unwrap_or(0))
    }

    /// Analyses a shape; `None` when the lanes are further apart than 32 bits can say. At least one lane is active.
    pub(crate) fn new(kind: Kind, addresses: &[u64; WARP], active: u32, bytes: u32, merged: &[Merged]) -> Option<Self> {
        let first = addresses[active.trailing_zeros() as usize];
        let mut deltas = [0i32; WARP];
        for lane in lanes_of(active) {
            deltas[lane] = i32::try_from(addresses[lane].wrapping_sub(first) as i64).ok()?;
        }
        let mut distinct: Vec<i32> = lanes_of(active).map(|lane| deltas[lane]).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let mut chunk_of = [0; WARP];
        for lane in lanes_of(active) {
            chunk_of[lane] = distinct.partition_point(|&delta| delta < deltas[lane]) as u32;
        }
        let size = i64::from(bytes);
        let misaligned =
            lanes_of(active).find(|&lane| !addresses[lane].is_multiple_of(u64::from(bytes))).map(|lane| lane as u32);
        let mut words: Vec<(i64, u64)> = Vec::new();
        let mut sectors = Vec::new();
        if misaligned.is_none() {
            let inside = (first % 64) as i64;
            for &delta in &distinct {
                let start = inside + i64::from(delta);
                let bits = ((1u64 << bytes) - 1) << start.rem_euclid(64);
                match words.last_mut() {
                    Some((word, mask)) if *word == start.div_euclid(64) => *mask |= bits,
                    _ => words.push((start.div_euclid(64), bits)),
                }
            }
            sectors = distinct_sectors(first, &distinct, size);
        }
        let is_dense = distinct.windows(2).all(|pair| i64::from(pair[1]) - i64::from(pair[0]) == size);
        let mut pattern = Self {
            active,
            first,
            phase: first % PERIOD,
            deltas,
            low: i64::from(distinct[0]),
            high: i64::from(distinct[distinct.len() - 1]) + size,
            misaligned,
            distinct,
            chunk_of,
            is_dense,
            words,
            sectors,
            ptx: InstructionCounters::default(),
            merged: InstructionCounters::default(),
            hits: 0,
            checked: [(0, 0); CHECKED],
        };
        if misaligned.is_none() {
            pattern.ptx = count(kind, addresses, active, bytes);
            for access in merged {
                let moved = addresses.map(|address| address.wrapping_add_signed(i64::from(access.delta)));
                pattern.merged += count(kind, &moved, active, access.bytes);
            }
        }
        Some(pattern)
    }
}

/// The lanes of a mask.
pub(crate) fn lanes_of(active: u32) -> impl Iterator<Item = usize> {
    (0..WARP).filter(move |lane| active >> lane & 1 == 1)
}

/// The bits of a mask.
pub(crate) fn bits_of(mask: u64) -> impl Iterator<Item = usize> {
    (0..64).filter(move |bit| mask >> bit & 1 == 1)
}

fn distinct_sectors(first: u64, distinct: &[i32], size: i64) -> Vec<i64> {
    let inside = (first % SECTOR) as i64;
    let mut sectors: Vec<i64> = distinct
        .iter()
        .flat_map(|&delta| {
            let start = inside + i64::from(delta);
            start.div_euclid(SECTOR as i64)..=(start + size - 1).div_euclid(SECTOR as i64)
        })
        .collect();
    sectors.sort_unstable();
    sectors.dedup();
    sectors
}

/// What one request counts: its passes through the banks or its sectors.
fn count(kind: Kind, addresses: &[u64; WARP], active: u32, bytes: u32) -> InstructionCounters {
    let mut counters = InstructionCounters { requests: 1, ..Default::default() };
    match kind {
        Kind::Shared(rule) => {
            let narrow = addresses.map(|address| address as u32);
            let passes = banks::wavefronts(&narrow, active, bytes, rule);
            counters.wavefronts = u64::from(passes.count);
            counters.wavefronts_ideal = u64::from(passes.ideal);
        }
        Kind::Global => {
            let first = addresses[active.trailing_zeros() as usize];
            let mut distinct: Vec<i32> =
                lanes_of(active).map(|lane| addresses[lane].wrapping_sub(first) as i32).collect();
            distinct.sort_unstable();
            distinct.dedup();
            counters.sectors = distinct_sectors(first, &distinct, i64::from(bytes)).len() as u64;
            counters.sectors_ideal = (distinct.len() as u64 * u64::from(bytes)).div_ceil(SECTOR);
        }
    }
    counters
}

/// The shapes one instruction has met.
#[derive(Default)]
pub(crate) struct Shapes {
    pub patterns: Vec<Pattern>,
    /// The shape each warp met last.
    recent: [usize; WARP],
    /// What shapes counted that have been forgotten.
    ptx: InstructionCounters,
    merged: InstructionCounters,
}

/// Shapes kept per instruction. One that meets more has no regular addresses and would only be slowed down by a longer search:
/// all further ones take turns in one more place.
pub(crate) const KEPT: usize = 64;

impl Shapes {
    /// The index of the shape of these addresses, which is analysed if it is new.
    #[inline(always)]
    pub(crate) fn find(
        &mut self,
        warp: usize,
        addresses: &[u64; WARP],
        active: u32,
        analyse: impl FnOnce() -> Option<Pattern>,
    ) -> Option<usize> {
        let first = addresses[active.trailing_zeros() as usize];
        let lanes = expand(active);
        self.find_by(warp, |pattern| pattern.matches(addresses, first, active, &lanes), analyse)
    }

    /// As [`Shapes::find`], for 32-bit addresses.
    #[inline(always)]
    pub(crate) fn find_narrow(
        &mut self,
        warp: usize,
        addresses: &[u32; WARP],
        active: u32,
        analyse: impl FnOnce() -> Option<Pattern>,
    ) -> Option<usize> {
        let first = addresses[active.trailing_zeros() as usize];
        let lanes = expand(active);
        self.find_by(warp, |pattern| pattern.matches_narrow(addresses, first, active, &lanes), analyse)
    }

    #[inline(always)]
    fn find_by(
        &mut self,
        warp: usize,
        matches: impl Fn(&Pattern) -> bool,
        analyse: impl FnOnce() -> Option<Pattern>,
    ) -> Option<usize> {
        if self.patterns.get(self.recent[warp]).is_some_and(&matches) {
            return Some(self.recent[warp]);
        }
        self.recent[warp] = match self.patterns.iter().position(matches) {
            Some(index) => index,
            None => {
                let pattern = analyse()?;
                if self.patterns.len() > KEPT
                    && let Some(last) = self.patterns.pop()
                {
                    self.forget(&last);
                }
                self.patterns.push(pattern);
                self.patterns.len() - 1
            }
        };
        Some(self.recent[warp])
    }

    fn forget(&mut self, pattern: &Pattern) {
        self.ptx += pattern.ptx.times(pattern.hits);
        self.merged += pattern.merged.times(pattern.hits);
    }

    /// What was met, in the order it was met, for those who watch.
    pub(crate) fn seen(&self) -> impl Iterator<Item = Shape> {
        self.patterns.iter().map(|pattern| Shape {
            addresses: std::array::from_fn(|lane| pattern.first.wrapping_add_signed(pattern.deltas[lane].into())),
            active: pattern.active,
            executions: pattern.hits,
        })
    }

    /// All that was counted: as PTX states it, and after the merge.
    pub(crate) fn totals(mut self) -> (InstructionCounters, InstructionCounters) {
        for pattern in std::mem::take(&mut self.patterns) {
            self.forget(&pattern);
        }
        (self.ptx, self.merged)
    }
}
