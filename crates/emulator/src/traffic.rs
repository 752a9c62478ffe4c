//! Which sectors of global memory a run touches.

use crate::memory::Memory;
use crate::pattern::SECTOR;
use crate::report::Traffic;

/// Sectors touched, as bits, per allocation.
pub(crate) struct Touched {
    buffers: Vec<Sectors>,
    /// Distinct sectors of each CTA, summed over CTAs.
    per_cta: [u64; 2],
}

struct Sectors {
    count: u64,
    /// Reads and writes; empty until the first.
    run: [Vec<u64>; 2],
    cta: [Vec<u64>; 2],
    /// Words of `cta` that are not zero.
    dirty: [Vec<u32>; 2],
}

/// Whether a sector is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Touched {
    pub(crate) fn new(memory: &Memory) -> Self {
        let sectors = |bytes: u64| Sectors {
            count: bytes.div_ceil(SECTOR),
            run: Default::default(),
            cta: Default::default(),
            dirty: Default::default(),
        };
        Self { buffers: memory.buffers().iter().map(|buffer| sectors(buffer.bytes())).collect(), per_cta: [0; 2] }
    }

    /// Notes sectors of an allocation, by distance from the one that holds byte `offset`.
    #[inline(always)]
    pub(crate) fn note(&mut self, buffer: usize, offset: u64, sectors: &[i64], direction: Direction) {
        let which = direction as usize;
        let touched = &mut self.buffers[buffer];
        if touched.cta[which].is_empty() {
            touched.cta[which] = vec![0; touched.count.div_ceil(64) as usize];
        }
        let first = (offset / SECTOR) as i64;
        for sector in sectors {
            let index = (first + sector) as usize;
            let word = &mut touched.cta[which][index / 64];
            let bit = 1 << (index % 64);
            if *word & bit == 0 {
                if *word == 0 {
                    touched.dirty[which].push((index / 64) as u32);
                }
                *word |= bit;
            }
        }
    }

    pub(crate) fn end_cta(&mut self) {
        for touched in &mut self.buffers {
            for which in 0..2 {
                if touched.run[which].is_empty() && !touched.dirty[which].is_empty() {
                    touched.run[which] = vec![0; touched.count.div_ceil(64) as usize];
                }
                for word in touched.dirty[which].drain(..) {
                    let bits = std::mem::take(&mut touched.cta[which][word as usize]);
                    self.per_cta[which] += u64::from(bits.count_ones());
                    touched.run[which][word as usize] |= bits;
                }
            }
        }
    }

    /// Adds what another worker touched.
    pub(crate) fn merge(&mut self, other: Self) {
        for (mine, theirs) in self.buffers.iter_mut().zip(other.buffers) {
            for (mine, theirs) in mine.run.iter_mut().zip(theirs.run) {
                if mine.is_empty() {
                    *mine = theirs;
                } else {
                    mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine |= theirs);
                }
            }
        }
        self.per_cta[0] += other.per_cta[0];
        self.per_cta[1] += other.per_cta[1];
    }

    /// The distinct bytes; requested ones are not known here.
    pub(crate) fn traffic(&self) -> Traffic {
        let distinct = |which: usize| -> u64 {
            let ones =
                |sectors: &Sectors| sectors.run[which].iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            SECTOR * self.buffers.iter().map(ones).sum::<u64>()
        };
        Traffic {
            unique_read: distinct(0),
            unique_written: distinct(1),
            per_cta_read: SECTOR * self.per_cta[0],
            per_cta_written: SECTOR * self.per_cta[1],
            ..Traffic::default()
        }
    }
}
