//! Shared-memory races.
//!
//! Each warp notes which bytes it reads and writes between two synchronisations (an *interval*). Barriers order intervals; a
//! clock per warp says which (vector clocks, as in FastTrack, Flanagan and Freund 2009, but per interval instead of per
//! access). Two intervals that no barrier orders must not touch a byte that either writes.
//!
//! Most intervals of real kernels only read, and then there is nothing to find. So reads are first noted as what was read
//! (an instruction's address shape and where it began) and become bytes only when a concurrent interval writes.

/// The bytes a warp touched between two synchronisations.
#[derive(Debug, Default)]
pub(crate) struct Interval {
    warp: usize,
    /// Which of the warp's intervals this is.
    epoch: u32,
    /// For every warp, the first epoch that was not yet ordered before this interval when it began.
    clock: Vec<u32>,
    /// Reads that are not in `reads` yet.
    pending: Vec<Read>,
    /// One bit per word that a pending read may touch, from its first to its last; empty until it is asked for.
    reach: Vec<u64>,
    /// One bit per byte, 64 to a word.
    reads: Vec<u64>,
    writes: Vec<u64>,
    /// The words that may hold set bits, and those of them that may hold writes.
    low: usize,
    high: usize,
    write_low: usize,
    write_high: usize,
    /// The accesses in the bits, for the message about a race.
    log: Vec<Logged>,
}

/// A read by a warp: the shape of its addresses and the address of the first active lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    pub memory: u32,
    pub shape: u32,
    pub first: u32,
}

/// Turns reads into bytes.
pub(crate) trait Expand {
    /// The instruction's position, and the bytes as bits of 64-byte words by distance from the one that holds `read.first`.
    fn expand(&self, read: Read) -> (usize, &[(i64, u64)]);
}

/// Reads kept as they are at most.
const PENDING: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Logged {
    position: u32,
    word: u32,
    bits: u64,
    write: bool,
}

/// Accesses remembered per interval; a race found among later ones is reported without its second instruction.
const LOGGED: usize = 1 << 14;

/// Ended intervals that are kept while some warp never synchronises; older ones are forgotten, and races with them are missed.
const REMEMBERED: usize = 256;

/// Two accesses that nothing orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Race {
    pub address: u64,
    pub warps: (usize, usize),
    /// The instruction of each, when it was remembered.
    pub positions: (Option<usize>, Option<usize>),
}

/// The intervals of a CTA.
#[derive(Debug, Default)]
pub(crate) struct Races {
    /// The running interval of each warp.
    pub open: Vec<Interval>,
    /// Ended intervals that some warp is not yet ordered after.
    closed: Vec<Interval>,
    pool: Vec<Interval>,
    words: usize,
}

impl Interval {
    /// Notes a read to be turned into bytes when that is needed.
    #[inline(always)]
    pub(crate) fn note_read(&mut self, read: Read, expand: &impl Expand) {
        if self.pending.len() == PENDING {
            self.settle(expand);
        }
        self.pending.push(read);
    }

    /// Notes bytes of one access, as bits of the 64-byte word they lie in.
    #[inline(always)]
    pub(crate) fn note(&mut self, word: usize, bits: u64, write: bool, position: usize) {
        let set = if write { &mut self.writes } else { &mut self.reads };
        let new = bits & !set[word];
        if new != 0 {
            set[word] |= bits;
            self.remember(word, new, write, position);
        }
    }

    /// Turns the pending reads into bytes.
    #[cold]
    fn settle(&mut self, expand: &impl Expand) {
        let mut pending = std::mem::take(&mut self.pending);
        for read in pending.drain(..) {
            let (position, words) = expand.expand(read);
            for &(word, bits) in words {
                self.note((i64::from(read.first / 64) + word) as usize, bits, false, position);
            }
        }
        self.pending = pending;
    }

    /// Fills `reach`.
    fn survey(&mut self, expand: &impl Expand) {
        if !self.reach.is_empty() || self.pending.is_empty() {
            return;
        }
        self.reach.resize(self.writes.len().div_ceil(64), 0);
        for &read in &self.pending {
            let (_, words) = expand.expand(read);
            let (Some(first), Some(last)) = (words.first(), words.last()) else { continue };
            let place = |distance: i64| (i64::from(read.first / 64) + distance) as usize;
            let (low, high) = (place(first.0), place(last.0));
            for chunk in low / 64..=high / 64 {
                let from = if chunk == low / 64 { low % 64 } else { 0 };
                let to = if chunk == high / 64 { high % 64 } else { 63 };
                self.reach[chunk] |= (u64::MAX >> (63 - (to - from))) << from;
            }
        }
    }

    /// Whether a word that this interval writes may be touched by another.
    fn may_meet(&self, other: &Self) -> bool {
        let reached = |word: usize| other.reach.get(word / 64).is_some_and(|bits| bits >> (word % 64) & 1 == 1);
        let touched = |word: usize| reached(word) || other.reads[word] != 0 || other.writes[word] != 0;
        (self.write_low..self.write_high).any(|word| self.writes[word] != 0 && touched(word))
    }

    fn writes_any(&self) -> bool {
        self.write_low < self.write_high
    }

    fn is_empty(&self) -> bool {
        self.low >= self.high && self.pending.is_empty()
    }

    fn remember(&mut self, word: usize, bits: u64, write: bool, position: usize) {
        self.low = self.low.min(word);
        self.high = self.high.max(word + 1);
        if write {
            self.write_low = self.write_low.min(word);
            self.write_high = self.write_high.max(word + 1);
        }
        if self.log.len() < LOGGED {
            self.log.push(Logged { position: position as u32, word: word as u32, bits, write });
        }
    }

    /// The first word and bits where two intervals conflict.
    fn conflict(&self, other: &Self) -> Option<(usize, u64)> {
        let range = self.low.max(other.low)..self.high.min(other.high);
        range.clone().find_map(|word| {
            let bits =
                self.writes[word] & (other.reads[word] | other.writes[word]) | self.reads[word] & other.writes[word];
            (bits != 0).then_some((word, bits))
        })
    }

    fn position_of(&self, word: usize, bits: u64, other_writes: bool) -> Option<usize> {
        let hit =
            |entry: &&Logged| entry.word as usize == word && entry.bits & bits != 0 && (entry.write || other_writes);
        self.log.iter().find(hit).map(|entry| entry.position as usize)
    }

    /// Whether `other` ended before this interval began.
    fn follows(&self, other: &Self) -> bool {
        self.warp == other.warp || self.clock[other.warp] > other.epoch
    }
}

impl Races {
    /// Starts over for a CTA of `warps` warps and `bytes` bytes of shared memory.
    pub(crate) fn reset(&mut self, warps: usize, bytes: usize) {
        let words = bytes.div_ceil(64);
        self.pool.append(&mut self.closed);
        self.pool.append(&mut self.open);
        if words != self.words {
            self.pool.clear();
            self.words = words;
        }
        for warp in 0..warps {
            let mut interval = self.take();
            interval.warp = warp;
            interval.epoch = 0;
            interval.clock.clear();
            interval.clock.resize(warps, 0);
            self.open.push(interval);
        }
    }

    fn take(&mut self) -> Interval {
        let mut interval = self.pool.pop().unwrap_or_default();
        interval.reads.resize(self.words, 0);
        interval.writes.resize(self.words, 0);
        if interval.low < interval.high {
            interval.reads[interval.low..interval.high].fill(0);
            interval.writes[interval.low..interval.high].fill(0);
        }
        (interval.low, interval.high) = (self.words, 0);
        (interval.write_low, interval.write_high) = (self.words, 0);
        interval.log.clear();
        interval.pending.clear();
        interval.reach.clear();
        interval
    }

    /// A barrier of these warps: what they did before it is ordered before what they do after it.
    pub(crate) fn barrier(&mut self, warps: u64, expand: &impl Expand) -> Result<(), Race> {
        let participants = || (0..64).filter(move |warp| warps >> warp & 1 == 1);
        let mut joined = vec![0; self.open.len()];
        for warp in participants() {
            for (joined, known) in joined.iter_mut().zip(&self.open[warp].clock) {
                *joined = (*joined).max(*known);
            }
        }
        for warp in participants() {
            joined[warp] = self.open[warp].epoch + 1;
        }
        for warp in participants() {
            self.close(warp, expand)?;
            let open = &mut self.open[warp];
            open.clock.clone_from(&joined);
        }
        self.retire();
        Ok(())
    }

    /// Ends a warp's interval and starts the next with the same knowledge of the others.
    fn close(&mut self, warp: usize, expand: &impl Expand) -> Result<(), Race> {
        let mut next = self.take();
        next.warp = warp;
        next.epoch = self.open[warp].epoch + 1;
        next.clock.clone_from(&self.open[warp].clock);
        let mut ended = std::mem::replace(&mut self.open[warp], next);
        if ended.is_empty() {
            self.pool.push(ended);
            return Ok(());
        }
        self.check(&mut ended, expand)?;
        if self.closed.len() == REMEMBERED {
            let oldest = self.closed.remove(0);
            self.pool.push(oldest);
        }
        self.closed.push(ended);
        Ok(())
    }

    /// Compares an interval that has ended with all that are not ordered before it.
    fn check(&mut self, ended: &mut Interval, expand: &impl Expand) -> Result<(), Race> {
        for other in &mut self.closed {
            let ordered = ended.follows(other) || other.follows(ended);
            if ordered || (!ended.writes_any() && !other.writes_any()) {
                continue;
            }
            ended.survey(expand);
            other.survey(expand);
            if !ended.may_meet(other) && !other.may_meet(ended) {
                continue;
            }
            ended.settle(expand);
            other.settle(expand);
            if let Some((word, bits)) = ended.conflict(other) {
                let position =
                    |of: &Interval, with: &Interval| of.position_of(word, bits, with.writes[word] & bits != 0);
                return Err(Race {
                    address: word as u64 * 64 + u64::from(bits.trailing_zeros()),
                    warps: (other.warp, ended.warp),
                    positions: (position(other, ended), position(ended, other)),
                });
            }
        }
        Ok(())
    }

    /// Forgets intervals that every running one follows.
    fn retire(&mut self) {
        let mut index = 0;
        while index < self.closed.len() {
            if self.open.iter().all(|open| open.follows(&self.closed[index])) {
                let done = self.closed.swap_remove(index);
                self.pool.push(done);
            } else {
                index += 1;
            }
        }
    }

    /// The CTA has ended: everything still open is compared.
    pub(crate) fn finish(&mut self, expand: &impl Expand) -> Result<(), Race> {
        for warp in 0..self.open.len() {
            self.close(warp, expand)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One byte where the read began.
    struct Bytes;

    impl Expand for Bytes {
        fn expand(&self, read: Read) -> (usize, &[(i64, u64)]) {
            (read.memory as usize, &[(0, 0x10)])
        }
    }

    fn read(position: u32, first: u32) -> Read {
        Read { memory: position, shape: 0, first }
    }

    fn races() -> Races {
        let mut races = Races::default();
        races.reset(2, 256);
        races
    }

    #[test]
    fn a_write_and_a_read_need_a_barrier() {
        let mut found = races();
        found.open[0].note(1, 0xf0, true, 3);
        found.open[1].note_read(read(5, 64), &Bytes);
        assert_eq!(found.finish(&Bytes), Err(Race { address: 68, warps: (0, 1), positions: (Some(3), Some(5)) }));

        let mut ordered = races();
        ordered.open[0].note(1, 0xf0, true, 3);
        ordered.barrier(0b11, &Bytes).unwrap();
        ordered.open[1].note_read(read(5, 64), &Bytes);
        assert_eq!(ordered.finish(&Bytes), Ok(()));
    }

    #[test]
    fn reads_and_other_bytes_do_not_race() {
        let mut races = races();
        races.open[0].note(0, 1, false, 0);
        races.open[1].note(0, 1, false, 0);
        races.open[0].note(0, 2, true, 1);
        races.open[1].note(0, 4, true, 1);
        assert_eq!(races.finish(&Bytes), Ok(()));
    }

    #[test]
    fn a_barrier_of_others_orders_nothing() {
        let mut races = Races::default();
        races.reset(3, 64);
        races.open[0].note(0, 1, true, 7);
        races.barrier(0b110, &Bytes).unwrap();
        races.open[1].note(0, 1, false, 8);
        assert_eq!(races.finish(&Bytes).unwrap_err().warps, (0, 1));
    }
}
