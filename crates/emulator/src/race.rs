//! Races.
//!
//! Each agent (a warp, or a copy engine) notes which bytes of shared memory it reads and writes between two synchronisations
//! (an *interval*). Barriers, mbarriers and fences order intervals; a clock per agent says which (vector clocks, as in
//! FastTrack, Flanagan and Freund 2009, but per interval instead of per access). Two intervals that nothing orders must not
//! touch a byte that either writes, unless both do so by atomics. Nor is it a race when the later of two writes stores what the
//! earlier one stored: warps that hold copies of a value all write it, as compilers have them do, and any order leaves the same.
//!
//! Most intervals of real kernels only read, and then there is nothing to find. So reads are first noted as what was read
//! (an instruction's address shape and where it began) and become bytes only when a concurrent interval writes.

use std::collections::HashMap;

use crate::pattern::bits_of;

/// For every agent, the first epoch that is not yet ordered before whoever holds this.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u32>);

impl Clock {
    fn of(&self, agent: usize) -> u32 {
        self.0.get(agent).copied().unwrap_or(0)
    }

    fn set(&mut self, agent: usize, epoch: u32) {
        if self.0.len() <= agent {
            self.0.resize(agent + 1, 0);
        }
        self.0[agent] = epoch;
    }

    /// Learns what `other` knows.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (known, new) in self.0.iter_mut().zip(&other.0) {
            *known = (*known).max(*new);
        }
    }

    /// Whether it knows all that `other` knows.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        other.0.iter().enumerate().all(|(agent, &epoch)| self.of(agent) >= epoch)
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether what was done then is ordered before whoever holds this.
    pub(crate) fn knows(&self, then: Stamp) -> bool {
        self.of(then.agent as usize) > then.epoch
    }

    /// Whether it knows nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// How bytes are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// A write of what is there already.
    Repeat,
    /// An atomic, or an operation on an mbarrier.
    Atomic,
}

impl Access {
    /// Whether one of two of the same byte may not be either first, whatever they store.
    fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            (Self::Write, Self::Repeat) | (Self::Repeat, Self::Write) => false,
            (Self::Write, Self::Write) => true,
            (one, another) => one != another,
        }
    }
}

/// The bytes of one CTA's shared memory that an agent touched between two synchronisations.
#[derive(Debug, Default)]
pub(crate) struct Touches {
    /// Reads that are not in `reads` yet.
    pending: Vec<Read>,
    /// One bit per word that a pending read may touch, from its first to its last; empty until it is asked for.
    reach: Vec<u64>,
    /// One bit per byte, 64 to a word.
    reads: Vec<u64>,
    writes: Vec<u64>,
    /// Atomics and repeated writes, by word: few.
    atomics: HashMap<usize, u64>,
    repeats: HashMap<usize, u64>,
    /// The words that may hold set bits, and those of them that may hold writes.
    low: usize,
    high: usize,
    write_low: usize,
    write_high: usize,
    /// The accesses in the bits, for the message about a race.
    log: Vec<Logged>,
}

/// When something was done: the agent, and which of its intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub agent: u32,
    pub epoch: u32,
}

/// What an agent did between two synchronisations.
#[derive(Debug, Default)]
pub(crate) struct Interval {
    agent: usize,
    /// Which of the agent's intervals this is.
    epoch: u32,
    /// What was ordered before this interval when it began.
    clock: Clock,
    /// The CTA whose memory `own` is of.
    home: usize,
    own: Touches,
    /// What it touched of other CTAs' memory.
    guests: Vec<(usize, Touches)>,
    /// Whether it did what is noted elsewhere by its epoch.
    elsewhere: bool,
    /// What its warp waits for, if it does, so that it need not be compared with what ends in the meantime: it will know what whoever
    /// lets it go knows. What was forgotten for that reason it must then follow.
    waiting: Option<Waits>,
    owed: Clock,
}

/// What a warp waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// A barrier: others come there too and tell all that they did before.
    Barrier,
    /// An mbarrier's phase: who ends it may have done other things since.
    Phase,
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
pub(crate) struct Logged {
    pub position: u32,
    pub word: u32,
    pub bits: u64,
    access: Access,
    /// [`Races::time`] of a write.
    time: u32,
}

/// Accesses remembered per interval; a race found among later ones is reported without its second instruction.
const LOGGED: usize = 1 << 14;

/// Ended intervals that are kept while some warp never synchronises; older ones are forgotten, and races with them are missed.
const REMEMBERED: usize = 256;

/// Copies in flight that are told apart at most.
const ENGINES: usize = 128;

/// Two accesses that nothing orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Race {
    /// In the memory of CTA `home` of the cluster.
    pub home: usize,
    pub address: u64,
    pub agents: (usize, usize),
    /// The instruction of each, when it was remembered.
    pub positions: (Option<usize>, Option<usize>),
}

/// The intervals of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Races {
    /// The running interval of each warp of the CTA that runs.
    pub open: Vec<Interval>,
    /// Those of the other CTAs, by rank; nothing for the one that runs.
    away: Vec<Vec<Interval>>,
    /// The CTA that runs.
    rank: usize,
    /// Warps that have ended, by agent.
    ended: Vec<bool>,
    /// Ended intervals that some warp is not yet ordered after.
    closed: Vec<Interval>,
    pool: Vec<Touches>,
    words: usize,
    /// Counts instructions that write, and copies.
    pub time: u32,
    /// The last epoch of each copy engine.
    engines: Vec<u32>,
    turn: usize,
    /// Whether something had to be forgotten, so that a race may have been missed.
    pub forgot: bool,
}

impl Touches {
    fn reset(&mut self, words: usize) {
        self.reads.resize(words, 0);
        self.writes.resize(words, 0);
        if self.low < self.high {
            self.reads[self.low..self.high].fill(0);
            self.writes[self.low..self.high].fill(0);
        }
        self.atomics.clear();
        self.repeats.clear();
        (self.low, self.high) = (words, 0);
        (self.write_low, self.write_high) = (words, 0);
        self.log.clear();
        self.pending.clear();
        self.reach.clear();
    }

    #[inline(always)]
    fn note(&mut self, word: usize, bits: u64, access: Access, position: usize, time: u32) {
        let set = match access {
            Access::Read => &mut self.reads[word],
            Access::Write => &mut self.writes[word],
            Access::Repeat => self.repeats.entry(word).or_default(),
            Access::Atomic => self.atomics.entry(word).or_default(),
        };
        let new = bits & !*set;
        if new != 0 {
            *set |= bits;
            self.remember(Logged { position: position as u32, word: word as u32, bits: new, access, time });
        }
    }

    /// Turns the pending reads into bytes.
    #[cold]
    fn settle(&mut self, expand: &impl Expand) {
        let mut pending = std::mem::take(&mut self.pending);
        for read in pending.drain(..) {
            let (position, words) = expand.expand(read);
            for &(word, bits) in words {
                self.note((i64::from(read.first / 64) + word) as usize, bits, Access::Read, position, 0);
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

    fn atomics(&self, word: usize) -> u64 {
        if self.atomics.is_empty() { 0 } else { self.atomics.get(&word).copied().unwrap_or(0) }
    }

    fn repeats(&self, word: usize) -> u64 {
        if self.repeats.is_empty() { 0 } else { self.repeats.get(&word).copied().unwrap_or(0) }
    }

    /// What was written, by atomics too.
    fn changes(&self, word: usize) -> u64 {
        self.writes[word] | self.repeats(word) | self.atomics(word)
    }

    /// Whether a word that this interval writes may be touched by another.
    fn may_meet(&self, other: &Self) -> bool {
        let reached = |word: usize| other.reach.get(word / 64).is_some_and(|bits| bits >> (word % 64) & 1 == 1);
        let touched = |word: usize| reached(word) || other.reads[word] != 0 || other.changes(word) != 0;
        (self.write_low..self.write_high).any(|word| self.changes(word) != 0 && touched(word))
    }

    fn writes_any(&self) -> bool {
        self.write_low < self.write_high
    }

    fn is_empty(&self) -> bool {
        self.low >= self.high && self.pending.is_empty()
    }

    fn remember(&mut self, entry: Logged) {
        let word = entry.word as usize;
        self.low = self.low.min(word);
        self.high = self.high.max(word + 1);
        if entry.access != Access::Read {
            self.write_low = self.write_low.min(word);
            self.write_high = self.write_high.max(word + 1);
        }
        if self.log.len() < LOGGED {
            self.log.push(entry);
        }
    }

    /// The first word and bits where two intervals conflict.
    fn conflict(&self, other: &Self) -> Option<(usize, u64)> {
        let range = self.low.max(other.low)..self.high.min(other.high);
        range.clone().find_map(|word| {
            let (mine, theirs) = (self.atomics(word), other.atomics(word));
            let (repeated, repeats) = (self.repeats(word), other.repeats(word));
            let mut bits = self.writes[word] & (other.reads[word] | other.writes[word] | theirs)
                | self.reads[word] & (other.writes[word] | repeats | theirs)
                | mine & (other.reads[word] | other.writes[word] | repeats)
                | repeated & (other.reads[word] | theirs);
            if self.writes[word] & repeats != 0 {
                bits |= self.undoes(other, word);
            }
            if repeated & other.writes[word] != 0 {
                bits |= other.undoes(self, word);
            }
            (bits != 0).then_some((word, bits))
        })
    }

    /// The bytes of a word that this interval changed after `other` had written what they held before.
    fn undoes(&self, other: &Self, word: usize) -> u64 {
        let of = |touches: &Self, access| {
            let hits = move |entry: &&Logged| entry.word as usize == word && entry.access == access;
            touches.log.iter().filter(hits).copied().collect::<Vec<_>>()
        };
        let repeats = of(other, Access::Repeat);
        let undone = |write: Logged| {
            let before = repeats.iter().filter(move |repeat| repeat.time < write.time);
            before.fold(0, |bits, repeat| bits | repeat.bits & write.bits)
        };
        of(self, Access::Write).into_iter().fold(0, |bits, write| bits | undone(write))
    }

    /// An instruction of each that touched one of these bytes, and that conflict with each other.
    fn positions(&self, other: &Self, word: usize, bits: u64) -> [Option<usize>; 2] {
        let touched = |entry: &&Logged| entry.word as usize == word && entry.bits & bits != 0;
        let position = |entry: &Logged| entry.position as usize;
        let pair = self.log.iter().filter(touched).find_map(|mine| {
            let meets = |theirs: &&Logged| mine.bits & theirs.bits & bits != 0 && mine.access.conflicts(theirs.access);
            Some([mine, other.log.iter().filter(touched).find(meets)?])
        });
        let apart = || [self.position_of(word, bits, other), other.position_of(word, bits, self)];
        pair.map_or_else(apart, |pair| pair.map(|entry| Some(position(entry))))
    }

    /// The instruction that touched one of these bytes, in a way that conflicts with `other`.
    fn position_of(&self, word: usize, bits: u64, other: &Self) -> Option<usize> {
        let hit = |entry: &&Logged| {
            let against = match entry.access {
                Access::Read => other.changes(word),
                Access::Write => u64::MAX,
                Access::Repeat => other.changes(word) | other.reads[word],
                Access::Atomic => other.writes[word] | other.repeats(word) | other.reads[word],
            };
            entry.word as usize == word && entry.bits & bits & against != 0
        };
        self.log.iter().find(hit).map(|entry| entry.position as usize)
    }

    fn compare(&mut self, other: &mut Self, expand: &impl Expand) -> Option<(u64, [Option<usize>; 2])> {
        if !self.writes_any() && !other.writes_any() {
            return None;
        }
        self.survey(expand);
        other.survey(expand);
        if !self.may_meet(other) && !other.may_meet(self) {
            return None;
        }
        self.settle(expand);
        other.settle(expand);
        let (word, bits) = self.conflict(other)?;
        let address = word as u64 * 64 + u64::from(bits.trailing_zeros());
        Some((address, other.positions(self, word, bits)))
    }
}

impl Interval {
    /// Notes a read to be turned into bytes when that is needed.
    #[inline(always)]
    pub(crate) fn note_read(&mut self, read: Read, expand: &impl Expand) {
        if self.own.pending.len() == PENDING {
            self.own.settle(expand);
        }
        self.own.pending.push(read);
    }

    /// Notes bytes of one access, as bits of the 64-byte word they lie in; of a write at this [`Races::time`].
    #[inline(always)]
    pub(crate) fn note(&mut self, word: usize, bits: u64, access: Access, position: usize, time: u32) {
        self.own.note(word, bits, access, position, time);
    }

    fn is_empty(&self) -> bool {
        self.own.is_empty() && self.guests.iter().all(|(_, touches)| touches.is_empty())
    }

    /// When whatever the warp does now is done.
    pub(crate) fn now(&self) -> Stamp {
        Stamp { agent: self.agent as u32, epoch: self.epoch }
    }

    /// As [`Interval::now`], of what is noted elsewhere: the interval ends when the warp next releases what it did.
    pub(crate) fn stamp(&mut self) -> Stamp {
        self.elsewhere = true;
        self.now()
    }

    /// Whether what was done then is ordered before what the warp does now.
    pub(crate) fn is_after(&self, then: Stamp) -> bool {
        self.agent == then.agent as usize || self.clock.knows(then)
    }

    /// Whether all that `clock` says was ordered before this interval when it began.
    pub(crate) fn knows(&self, clock: &Clock) -> bool {
        self.clock.covers(clock)
    }

    /// Whether `other` ended before this interval began.
    fn follows(&self, other: &Self) -> bool {
        self.agent == other.agent || self.clock.of(other.agent) > other.epoch
    }

    /// What it touched of a CTA's memory.
    fn of(&mut self, home: usize) -> Option<&mut Touches> {
        if self.home == home {
            return Some(&mut self.own);
        }
        self.guests.iter_mut().find(|(rank, _)| *rank == home).map(|(_, touches)| touches)
    }

    fn homes(&self) -> impl Iterator<Item = usize> + use<> {
        let guests: Vec<usize> = self.guests.iter().map(|(rank, _)| *rank).collect();
        std::iter::once(self.home).chain(guests)
    }

    /// The writes to its own CTA's memory that are remembered.
    pub(crate) fn writes(&self) -> impl Iterator<Item = &Logged> {
        self.own.log.iter().filter(|entry| entry.access != Access::Read)
    }
}

impl Races {
    /// Starts over for a cluster of `ctas` CTAs of `warps` warps and `bytes` bytes of shared memory each; the first runs.
    pub(crate) fn reset(&mut self, ctas: usize, warps: usize, bytes: usize) {
        let words = bytes.div_ceil(64);
        let old = std::mem::take(&mut self.closed)
            .into_iter()
            .chain(std::mem::take(&mut self.open))
            .chain(std::mem::take(&mut self.away).into_iter().flatten());
        for interval in old {
            recycle(&mut self.pool, interval);
        }
        if words != self.words {
            self.pool.clear();
            self.words = words;
        }
        self.engines.clear();
        self.time = 0;
        self.ended.clear();
        self.ended.resize(ctas * warps, false);
        self.away.extend((0..ctas).map(|_| Vec::new()));
        for rank in (0..ctas).rev() {
            self.open = (0..warps).map(|warp| self.begin(rank * warps + warp, 0, Clock::default(), rank)).collect();
            if rank > 0 {
                self.away[rank] = std::mem::take(&mut self.open);
            }
        }
        self.rank = 0;
    }

    /// Another CTA of the cluster runs.
    pub(crate) fn enter(&mut self, rank: usize) {
        if rank != self.rank {
            std::mem::swap(&mut self.away[self.rank], &mut self.open);
            std::mem::swap(&mut self.away[rank], &mut self.open);
            self.rank = rank;
        }
    }

    fn take(&mut self) -> Touches {
        let mut touches = self.pool.pop().unwrap_or_default();
        touches.reset(self.words);
        touches
    }

    fn begin(&mut self, agent: usize, epoch: u32, clock: Clock, home: usize) -> Interval {
        Interval {
            agent,
            epoch,
            clock,
            home,
            own: self.take(),
            guests: Vec::new(),
            elsewhere: false,
            waiting: None,
            owed: Clock::default(),
        }
    }

    fn all_open(&self) -> impl Iterator<Item = &Interval> {
        self.open.iter().chain(self.away.iter().flatten())
    }

    /// Notes an access of a warp of the running CTA to memory of any CTA of the cluster.
    pub(crate) fn note_at(
        &mut self,
        warp: usize,
        home: usize,
        (word, bits): (usize, u64),
        access: Access,
        position: usize,
    ) {
        if self.open[warp].of(home).is_none() {
            let touches = self.take();
            self.open[warp].guests.push((home, touches));
        }
        self.time = self.time.wrapping_add(1);
        if let Some(touches) = self.open[warp].of(home) {
            touches.note(word, bits, access, position, self.time);
        }
    }

    /// A warp of the running CTA begins to wait at a barrier or for an mbarrier.
    pub(crate) fn wait(&mut self, warp: usize, waits: Waits, expand: &impl Expand) -> Result<(), Race> {
        self.close(warp, expand)?;
        self.open[warp].waiting = Some(waits);
        Ok(())
    }

    /// A warp of the running CTA goes on, if it has waited; now it knows what whoever let it go knew.
    pub(crate) fn go_on(&mut self, warp: usize) {
        let open = &mut self.open[warp];
        if open.waiting.take().is_some() {
            let owed = std::mem::take(&mut open.owed);
            self.forgot |= !open.clock.covers(&owed);
        }
    }

    /// A barrier that these warps of the running CTA wait at: what they did before it is ordered before what they do after it, and
    /// what others `released` who arrived and did not wait. Returns what they then know.
    pub(crate) fn barrier(&mut self, warps: u64, released: &Clock, expand: &impl Expand) -> Result<Clock, Race> {
        let participants = || bits_of(warps);
        let mut joined = released.clone();
        for warp in participants() {
            joined.join(&self.open[warp].clock);
        }
        for warp in participants() {
            let open = &self.open[warp];
            joined.set(open.agent, open.epoch + 1);
        }
        for warp in participants() {
            self.close(warp, expand)?;
            self.open[warp].clock.clone_from(&joined);
            self.go_on(warp);
        }
        self.retire();
        Ok(joined)
    }

    /// What whoever synchronises with a warp of the running CTA at this point learns.
    pub(crate) fn release(&mut self, warp: usize, expand: &impl Expand) -> Result<Clock, Race> {
        if !self.open[warp].is_empty() || self.open[warp].elsewhere {
            self.close(warp, expand)?;
        }
        let open = &self.open[warp];
        let mut clock = open.clock.clone();
        clock.set(open.agent, open.epoch);
        Ok(clock)
    }

    /// A warp of the running CTA learns what was released.
    pub(crate) fn acquire(&mut self, warp: usize, clock: &Clock, expand: &impl Expand) -> Result<(), Race> {
        if !self.open[warp].is_empty() {
            self.close(warp, expand)?;
        }
        self.open[warp].clock.join(clock);
        self.go_on(warp);
        self.retire();
        Ok(())
    }

    /// A copy that follows `issue` begins: its interval, to be filled with what it touches and given to [`Races::end_copy`].
    pub(crate) fn begin_copy(&mut self, issue: &Clock) -> Interval {
        let first = self.ended.len();
        let free = (0..self.engines.len()).find(|&engine| issue.of(first + engine) > self.engines[engine]);
        let engine = free.unwrap_or_else(|| {
            if self.engines.len() < ENGINES {
                self.engines.push(0);
                return self.engines.len() - 1;
            }
            self.forgot = true;
            self.turn = (self.turn + 1) % ENGINES;
            self.turn
        });
        self.engines[engine] += 1;
        self.time = self.time.wrapping_add(1);
        self.begin(first + engine, self.engines[engine], issue.clone(), self.rank)
    }

    /// Notes what a copy touches.
    pub(crate) fn note_copy(
        &mut self,
        interval: &mut Interval,
        home: usize,
        (word, bits): (usize, u64),
        access: Access,
        position: usize,
    ) {
        if interval.of(home).is_none() {
            interval.guests.push((home, self.take()));
        }
        if let Some(touches) = interval.of(home) {
            touches.note(word, bits, access, position, self.time);
        }
    }

    /// All that a copy touches is noted. Returns what whoever waits for it learns.
    pub(crate) fn end_copy(&mut self, mut interval: Interval, expand: &impl Expand) -> Result<Clock, Race> {
        let mut done = interval.clock.clone();
        done.set(interval.agent, interval.epoch + 1);
        self.check(&mut interval, expand)?;
        self.keep(interval);
        Ok(done)
    }

    /// Ends a warp's interval and starts the next with the same knowledge of the others.
    fn close(&mut self, warp: usize, expand: &impl Expand) -> Result<(), Race> {
        let open = &self.open[warp];
        let (agent, epoch, clock, home) = (open.agent, open.epoch + 1, open.clock.clone(), open.home);
        let next = self.begin(agent, epoch, clock, home);
        let mut ended = std::mem::replace(&mut self.open[warp], next);
        self.open[warp].waiting = ended.waiting;
        self.open[warp].owed = std::mem::take(&mut ended.owed);
        if ended.is_empty() {
            recycle(&mut self.pool, ended);
            return Ok(());
        }
        self.check(&mut ended, expand)?;
        self.keep(ended);
        Ok(())
    }

    fn keep(&mut self, ended: Interval) {
        self.forgot |= ended.own.log.len() >= LOGGED;
        if self.closed.len() >= REMEMBERED {
            self.retire();
        }
        if self.closed.len() >= REMEMBERED {
            self.retire_first(REMEMBERED / 2, |_| true);
        }
        if self.closed.len() >= REMEMBERED {
            self.forgot = true;
            let oldest = self.closed.remove(0);
            recycle(&mut self.pool, oldest);
        }
        self.closed.push(ended);
    }

    /// Compares an interval that has ended with all that are not ordered before it.
    fn check(&mut self, ended: &mut Interval, expand: &impl Expand) -> Result<(), Race> {
        for other in &mut self.closed {
            if ended.follows(other) || other.follows(ended) {
                continue;
            }
            for home in ended.homes() {
                let (Some(mine), Some(theirs)) = (ended.of(home), other.of(home)) else { continue };
                if let Some((address, [first, second])) = mine.compare(theirs, expand) {
                    let agents = (other.agent, ended.agent);
                    return Err(Race { home, address, agents, positions: (first, second) });
                }
            }
        }
        Ok(())
    }

    /// Forgets intervals that every running one follows. Those that wait at a barrier will.
    fn retire(&mut self) {
        self.retire_first(self.closed.len(), |waits| waits == Waits::Barrier);
    }

    /// Forgets, of the first `count` intervals, those that every running one follows but such as wait for what `will` says: they will
    /// follow, for whoever lets them go does; but other CTAs of the cluster, which may end before that.
    fn retire_first(&mut self, count: usize, will: impl Fn(Waits) -> bool) {
        let mut kept = 0;
        for index in 0..self.closed.len() {
            let closed = &self.closed[index];
            let (agent, epoch) = (closed.agent, closed.epoch + 1);
            let alone = |open: &Interval| {
                open.waiting.is_some_and(&will) && open.home == closed.home && closed.guests.is_empty()
            };
            let followed = |open: &Interval| alone(open) || self.ended[open.agent] || open.follows(closed);
            if index >= count || !self.all_open().all(followed) {
                self.closed.swap(kept, index);
                kept += 1;
                continue;
            }
            let waiting = |open: &&mut Interval| open.waiting.is_some() && open.agent != agent;
            for open in self.open.iter_mut().chain(self.away.iter_mut().flatten()).filter(waiting) {
                if open.clock.of(agent) < epoch && open.owed.of(agent) < epoch {
                    open.owed.set(agent, epoch);
                }
            }
        }
        self.closed.drain(kept..).for_each(|done| recycle(&mut self.pool, done));
    }

    /// A warp of the running CTA has ended.
    pub(crate) fn end(&mut self, warp: usize, expand: &impl Expand) -> Result<(), Race> {
        self.close(warp, expand)?;
        self.ended[self.open[warp].agent] = true;
        Ok(())
    }

    /// All warps of the running CTA have ended. An access of another CTA to its memory that is not ordered before that: who, and
    /// the instruction.
    pub(crate) fn accessed_after_end(&mut self) -> Option<(usize, Option<usize>)> {
        let home = self.rank;
        let known = |interval: &Interval| self.open.iter().any(|open| open.follows(interval));
        let intervals = self.closed.iter().chain(self.away.iter().flatten());
        intervals.filter(|interval| interval.home != home && !known(interval)).find_map(|interval| {
            let (_, touches) = interval.guests.iter().find(|(rank, touches)| *rank == home && !touches.is_empty())?;
            Some((interval.agent, touches.log.first().map(|entry| entry.position as usize)))
        })
    }
}

fn recycle(pool: &mut Vec<Touches>, interval: Interval) {
    pool.push(interval.own);
    pool.extend(interval.guests.into_iter().map(|(_, touches)| touches));
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

    fn races(warps: usize) -> Races {
        let mut races = Races::default();
        races.reset(1, warps, 256);
        races
    }

    fn finish(mut races: Races) -> Result<(), Race> {
        (0..races.open.len()).try_for_each(|warp| races.end(warp, &Bytes))
    }

    #[test]
    fn a_write_and_a_read_need_a_barrier() {
        let mut found = races(2);
        found.open[0].note(1, 0xf0, Access::Write, 3, 0);
        found.open[1].note_read(read(5, 64), &Bytes);
        let race = Race { home: 0, address: 68, agents: (0, 1), positions: (Some(3), Some(5)) };
        assert_eq!(finish(found), Err(race));

        let mut ordered = races(2);
        ordered.open[0].note(1, 0xf0, Access::Write, 3, 0);
        ordered.barrier(0b11, &Clock::default(), &Bytes).unwrap();
        ordered.open[1].note_read(read(5, 64), &Bytes);
        assert_eq!(finish(ordered), Ok(()));
    }

    #[test]
    fn reads_atomics_and_other_bytes_do_not_race() {
        let mut races = races(2);
        races.open[0].note(0, 1, Access::Read, 0, 0);
        races.open[1].note(0, 1, Access::Read, 0, 0);
        races.open[0].note(0, 2, Access::Write, 1, 0);
        races.open[1].note(0, 4, Access::Write, 1, 0);
        races.open[0].note(0, 8, Access::Atomic, 1, 0);
        races.open[1].note(0, 8, Access::Atomic, 1, 0);
        assert_eq!(finish(races), Ok(()));
    }

    #[test]
    fn a_repeated_write_races_with_reads_and_with_later_changes() {
        for (other, time, races_found) in
            [(Access::Write, 1, false), (Access::Repeat, 1, false), (Access::Write, 3, true), (Access::Read, 1, true)]
        {
            let mut races = races(2);
            races.open[0].note(0, 8, other, 1, time);
            races.open[1].note(0, 8, Access::Repeat, 2, 2);
            assert_eq!(finish(races).is_err(), races_found, "{other:?} at {time}");
        }
    }

    #[test]
    fn an_atomic_races_with_a_plain_access() {
        for write in [false, true] {
            let mut races = races(2);
            races.open[0].note(0, 8, Access::Atomic, 1, 0);
            races.open[1].note(0, 8, if write { Access::Write } else { Access::Read }, 2, 0);
            assert_eq!(finish(races).unwrap_err().positions, (Some(1), Some(2)));
        }
    }

    #[test]
    fn the_instructions_named_conflict_with_each_other() {
        let mut races = races(2);
        for warp in 0..2 {
            races.open[warp].note(0, 8, Access::Atomic, 1, 0);
            races.open[warp].note(0, 8, Access::Read, 2, 0);
        }
        assert_eq!(finish(races).unwrap_err().positions, (Some(1), Some(2)));
    }

    #[test]
    fn a_barrier_of_others_orders_nothing() {
        let mut races = races(3);
        races.open[0].note(0, 1, Access::Write, 7, 0);
        races.barrier(0b110, &Clock::default(), &Bytes).unwrap();
        races.open[1].note(0, 1, Access::Read, 8, 0);
        assert_eq!(finish(races).unwrap_err().agents, (0, 1));
    }

    #[test]
    fn who_waits_must_learn_what_was_forgotten_for_it() {
        let mut races = races(3);
        races.wait(1, Waits::Barrier, &Bytes).unwrap();
        let early = races.release(2, &Bytes).unwrap();
        races.open[0].note(0, 1, Access::Write, 1, 0);
        races.barrier(0b101, &Clock::default(), &Bytes).unwrap();
        assert!(races.closed.is_empty());
        // The mbarrier is looked at before what arrivals released is known.
        races.open[1].note(1, 1, Access::Atomic, 2, 0);
        races.acquire(1, &early, &Bytes).unwrap();
        assert!(races.forgot);
    }

    #[test]
    fn who_waits_for_a_phase_is_compared_with_what_ends_in_the_meantime() {
        let mut races = races(2);
        races.wait(1, Waits::Phase, &Bytes).unwrap();
        races.open[0].note(0, 1, Access::Write, 1, 0);
        let arrived = races.release(0, &Bytes).unwrap();
        races.open[0].note(1, 1, Access::Write, 2, 0);
        let late = races.release(0, &Bytes).unwrap();
        races.acquire(0, &late, &Bytes).unwrap();
        races.acquire(1, &arrived, &Bytes).unwrap();
        assert!(!races.forgot);
        races.open[1].note(0, 1, Access::Read, 3, 0);
        races.open[1].note(1, 1, Access::Read, 4, 0);
        assert_eq!(finish(races).unwrap_err().positions, (Some(2), Some(4)));
    }

    #[test]
    fn who_waits_at_a_barrier_learns_what_came_before_the_last_arrival() {
        // Warp 1 waits from the start; the intervals of warp 0 need not be kept for it.
        let mut races = races(2);
        races.wait(1, Waits::Barrier, &Bytes).unwrap();
        for _ in 0..2 * REMEMBERED {
            races.open[0].note(0, 1, Access::Write, 1, 0);
            let clock = races.release(0, &Bytes).unwrap();
            races.acquire(0, &clock, &Bytes).unwrap();
        }
        assert!(!races.forgot);
        races.barrier(0b11, &Clock::default(), &Bytes).unwrap();
        races.open[1].note(0, 1, Access::Read, 2, 0);
        assert_eq!(finish(races), Ok(()));
    }

    #[test]
    fn what_follows_an_arrival_without_a_wait_is_not_ordered() {
        for (late, races_found) in [(false, false), (true, true)] {
            let mut races = races(2);
            races.wait(1, Waits::Barrier, &Bytes).unwrap();
            if !late {
                races.open[0].note(0, 1, Access::Write, 1, 0);
            }
            let arrived = races.release(0, &Bytes).unwrap();
            if late {
                races.open[0].note(0, 1, Access::Write, 1, 0);
            }
            races.barrier(0b10, &arrived, &Bytes).unwrap();
            races.open[1].note(0, 1, Access::Read, 2, 0);
            assert_eq!(finish(races).is_err(), races_found);
        }
    }

    #[test]
    fn what_was_released_is_ordered_and_what_came_after_is_not() {
        for (late, races_found) in [(false, false), (true, true)] {
            let mut races = races(2);
            if !late {
                races.open[0].note(0, 1, Access::Write, 1, 0);
            }
            let clock = races.release(0, &Bytes).unwrap();
            if late {
                races.open[0].note(0, 1, Access::Write, 1, 0);
            }
            races.acquire(1, &clock, &Bytes).unwrap();
            races.open[1].note(0, 1, Access::Read, 2, 0);
            assert_eq!(finish(races).is_err(), races_found);
        }
    }

    #[test]
    fn a_copy_is_concurrent_with_its_issuer_until_it_is_waited_for() {
        for waits in [false, true] {
            let mut races = races(1);
            races.open[0].note(0, 1, Access::Write, 1, 0);
            let issue = races.release(0, &Bytes).unwrap();
            let mut copy = races.begin_copy(&issue);
            races.note_copy(&mut copy, 0, (0, 1), Access::Write, 2);
            let done = races.end_copy(copy, &Bytes).unwrap();
            if waits {
                races.acquire(0, &done, &Bytes).unwrap();
            }
            races.open[0].note(0, 1, Access::Read, 3, 0);
            assert_eq!(finish(races).is_ok(), waits);
        }
    }

    #[test]
    fn memory_of_other_ctas_is_checked_too() {
        let mut races = Races::default();
        races.reset(2, 1, 256);
        races.note_at(0, 1, (0, 1), Access::Write, 1);
        races.end(0, &Bytes).unwrap();
        races.enter(1);
        races.open[0].note(0, 1, Access::Read, 2, 0);
        let race = races.end(0, &Bytes).unwrap_err();
        assert_eq!((race.home, race.agents), (1, (0, 1)));
        assert_eq!(races.accessed_after_end(), Some((0, Some(1))));
    }
}
