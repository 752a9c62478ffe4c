//! Mbarriers (PTX ISA 9.7.13.15): barriers in shared memory that count arrivals and the bytes of asynchronous copies.

use std::collections::BTreeMap;
use std::fmt;

use crate::cta::{Fail, Shared, Worker, word_bits};
use crate::fault::FaultKind;
use crate::lane_race::LaneAccess;
use crate::lanes::WARP;
use crate::race::{Access, Clock, Stamp, Waits};
use crate::warp::{Wait, Warp};

/// Arrivals that a phase may expect at most (9.7.13.15.2); bytes too, either way.
pub(crate) const MAX_COUNT: u32 = (1 << 20) - 1;
/// Bytes of an mbarrier.
pub(crate) const BYTES: usize = 8;

/// An mbarrier. Its bytes in shared memory are not used.
#[derive(Clone, Debug)]
pub(crate) struct Mbarrier {
    /// Arrivals that each phase expects.
    expected: u32,
    /// Arrivals that the running phase still expects.
    pending: u32,
    /// Bytes announced and not arrived yet; negative when they arrive before they are announced.
    bytes: i64,
    /// Phases completed.
    phase: u64,
    /// Warps of its CTA that wait, as bits.
    waiting: u64,
    /// What arrivals of the running phase have released, and those of completed phases.
    arriving: Clock,
    done: Clock,
    /// The last wait of each warp that found the phase before the running one complete, and its instruction; and one that the end
    /// of the running one did not follow.
    seen: Vec<(Stamp, usize)>,
    overtaken: Option<(Stamp, usize)>,
}

impl fmt::Display for Mbarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { expected, pending, bytes, phase, .. } = self;
        write!(
            f,
            "phase {phase}: {} of {expected} arrivals, {bytes} bytes outstanding",
            expected.saturating_sub(*pending)
        )
    }
}

/// An arrival on an mbarrier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrive {
    pub count: u32,
    /// Bytes announced along with it.
    pub expect: u32,
    /// Whether later phases expect so many arrivals less.
    pub drop: bool,
}

/// What a wait asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    /// The phase that an arrival returned as its state.
    State(u64),
    /// The phase of this parity.
    Parity(u32),
}

/// An mbarrier's place: the CTA's rank in its cluster and the address in its shared memory.
pub(crate) type Place = (usize, u32);

impl Mbarrier {
    fn new(expected: u32) -> Self {
        let (arriving, done, seen, overtaken) = Default::default();
        Self { expected, pending: expected, bytes: 0, phase: 0, waiting: 0, arriving, done, seen, overtaken }
    }

    /// The opaque state that an arrival returns: the phase, and the arrivals pending in it.
    fn state(&self) -> u64 {
        self.phase << 20 | u64::from(self.pending)
    }

    /// The arrivals that were pending when a state was made.
    pub(crate) fn pending_of(state: u64) -> u32 {
        state as u32 & MAX_COUNT
    }

    fn announce(&mut self, bytes: i64) -> Result<(), FaultKind> {
        self.bytes += bytes;
        if self.bytes.unsigned_abs() > u64::from(MAX_COUNT) {
            return Err(FaultKind::TransactionCount { bytes: self.bytes, allowed: MAX_COUNT });
        }
        Ok(())
    }

    fn arrive(&mut self, arrive: Arrive) -> Result<u64, FaultKind> {
        let Arrive { count, expect, drop } = arrive;
        self.announce(expect.into())?;
        let state = self.state();
        if count == 0 || count > self.pending {
            return Err(FaultKind::ArrivalCount { arriving: count, pending: self.pending, expected: self.expected });
        }
        self.pending -= count;
        if drop {
            self.expected = self.expected.saturating_sub(count);
        }
        self.advance()?;
        Ok(state)
    }

    /// Ends the phase if nothing is missing.
    fn advance(&mut self) -> Result<(), FaultKind> {
        if self.pending > 0 {
            return Ok(());
        }
        if self.bytes < 0 {
            return Err(FaultKind::TransactionUnderflow { bytes: -self.bytes });
        }
        if self.bytes == 0 {
            self.phase += 1;
            self.pending = self.expected;
            self.done.join(&self.arriving);
            self.overtaken = self.seen.drain(..).find(|(then, _)| !self.arriving.knows(*then));
        }
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.pending == self.expected && self.bytes == 0 && self.waiting == 0
    }
}

impl Worker<'_> {
    fn mbarriers_of(&mut self, rank: usize) -> &mut BTreeMap<u32, Mbarrier> {
        if rank == self.rank { &mut self.mbarriers } else { &mut self.peers[rank].mbarriers }
    }

    /// Checks where an mbarrier is or is to be.
    fn mbarrier_place(&self, (rank, address): Place) -> Result<(), FaultKind> {
        let size = self.job.shared_bytes;
        if address as usize + BYTES > size {
            let allocations = format!("the CTA's {size} bytes of shared memory");
            let bytes = BYTES as u32;
            return Err(FaultKind::OutOfBounds { space: "shared", address: address.into(), bytes, allocations });
        }
        if !address.is_multiple_of(BYTES as u32) {
            let bytes = BYTES as u32;
            return Err(FaultKind::Misaligned { space: "shared", address: address.into(), bytes });
        }
        if rank != self.rank && self.peers[rank].ended {
            return Err(FaultKind::PeerEnded { rank: rank as u32 });
        }
        Ok(())
    }

    /// The mbarrier at a place, which must be one.
    fn mbarrier(&mut self, place: Place) -> Result<&mut Mbarrier, FaultKind> {
        self.mbarrier_place(place)?;
        let (word, bits) = word_bits(place.1 as usize, BYTES);
        let (_, written) = self.memory_of(place.0);
        let overwritten = written[word] & bits != 0;
        match self.mbarriers_of(place.0).get_mut(&place.1) {
            Some(_) if overwritten => Err(FaultKind::MbarrierOverwritten { address: place.1 }),
            Some(mbarrier) => Ok(mbarrier),
            None => Err(FaultKind::NoMbarrier { address: place.1 }),
        }
    }

    /// `mbarrier.init`.
    pub(crate) fn mbarrier_init(&mut self, warp: usize, address: u32, count: u32, position: usize) -> Result<(), Fail> {
        let fail = |kind| Box::new((kind, position, warp, 0));
        let place = (self.rank, address);
        self.mbarrier_place(place).map_err(fail)?;
        if count == 0 || count > MAX_COUNT {
            return Err(fail(FaultKind::MbarrierCount { count, allowed: MAX_COUNT }));
        }
        if let Some(mbarrier) = self.mbarriers.get(&address).filter(|mbarrier| !mbarrier.is_idle()) {
            return Err(fail(FaultKind::MbarrierBusy { address, state: mbarrier.to_string() }));
        }
        let (word, bits) = word_bits(address as usize, BYTES);
        self.written[word] &= !bits;
        self.written_since += 1;
        self.races.note_at(warp, self.rank, (word, bits), Access::Write, position);
        self.mbarriers.insert(address, Mbarrier::new(count));
        Ok(())
    }

    /// Notes that a lane begins an mbarrier or waits for it, for the race check between lanes.
    pub(crate) fn mbarrier_between_lanes(
        &mut self,
        warp: usize,
        (address, lane): (u32, usize),
        write: bool,
        position: usize,
    ) -> Result<(), Fail> {
        if self.lane_races.is_none() {
            return Ok(());
        }
        let (addresses, mask) = (&[address; WARP], 1 << lane);
        let access = LaneAccess { addresses, mask, bytes: 1, write, shared_out: false, position };
        self.note_between_lanes(warp, &access)
    }

    /// `mbarrier.inval`.
    pub(crate) fn mbarrier_invalidate(&mut self, warp: &Warp, address: u32, position: usize) -> Result<(), Fail> {
        let fail = |kind| Box::new((kind, position, warp.index, 0));
        let mbarrier = self.mbarrier((self.rank, address)).map_err(fail)?;
        let (state, waiting) = (mbarrier.to_string(), mbarrier.waiting & !(1 << warp.index));
        if waiting != 0 || self.copies.signals((self.rank, address)) {
            return Err(fail(FaultKind::MbarrierBusy { address, state }));
        }
        let (word, bits) = word_bits(address as usize, BYTES);
        self.races.note_at(warp.index, self.rank, (word, bits), Access::Write, position);
        self.mbarriers.remove(&address);
        Ok(())
    }

    /// `mbarrier.arrive` and `mbarrier.arrive_drop`; returns the state. `released` is what the arrival orders before the phase's end.
    pub(crate) fn mbarrier_arrive(
        &mut self,
        warp: usize,
        place: Place,
        arrive: Arrive,
        released: &Clock,
        position: usize,
    ) -> Result<u64, Fail> {
        let fail = |kind| Box::new((kind, position, warp, 0));
        let mbarrier = self.mbarrier(place).map_err(fail)?;
        mbarrier.arriving.join(released);
        if released.is_empty() {
            // A relaxed arrival does not tell what it follows.
            mbarrier.seen.clear();
        }
        let state = mbarrier.arrive(arrive).map_err(fail)?;
        self.check_overtaken(place).map_err(fail)?;
        self.note_mbarrier(warp, place, position);
        self.progress += 1;
        Ok(state)
    }

    /// `mbarrier.expect_tx`, or with a negative number `mbarrier.complete_tx`.
    pub(crate) fn mbarrier_announce(
        &mut self,
        warp: usize,
        place: Place,
        bytes: i64,
        position: usize,
    ) -> Result<(), Fail> {
        let fail = |kind| Box::new((kind, position, warp, 0));
        let mbarrier = self.mbarrier(place).map_err(fail)?;
        mbarrier.announce(bytes).and_then(|()| if bytes < 0 { mbarrier.advance() } else { Ok(()) }).map_err(fail)?;
        self.check_overtaken(place).map_err(fail)?;
        self.note_mbarrier(warp, place, position);
        self.progress += 1;
        Ok(())
    }

    /// A copy's bytes have arrived.
    pub(crate) fn mbarrier_complete(&mut self, place: Place, bytes: u32, done: &Clock) -> Result<(), FaultKind> {
        let mbarrier = self.mbarrier(place)?;
        mbarrier.arriving.join(done);
        mbarrier.announce(-i64::from(bytes))?;
        mbarrier.advance()?;
        self.check_overtaken(place)?;
        self.progress += 1;
        Ok(())
    }

    /// `cp.async.mbarrier.arrive` without `.noinc`: the phase expects one arrival more, which the copies will make.
    pub(crate) fn mbarrier_expect_arrival(&mut self, place: Place) -> Result<(), FaultKind> {
        let mbarrier = self.mbarrier(place)?;
        if mbarrier.pending == MAX_COUNT {
            return Err(FaultKind::MbarrierCount { count: MAX_COUNT + 1, allowed: MAX_COUNT });
        }
        mbarrier.pending += 1;
        Ok(())
    }

    /// `cp.async.mbarrier.arrive`: the copies are there.
    pub(crate) fn mbarrier_copied(&mut self, place: Place, count: u32, done: &Clock) -> Result<(), FaultKind> {
        let mbarrier = self.mbarrier(place)?;
        mbarrier.arriving.join(done);
        // Such arrivals may exceed what `mbarrier.init` said: each was added to the phase before.
        mbarrier.arrive(Arrive { count, expect: 0, drop: false })?;
        self.check_overtaken(place)?;
        self.progress += 1;
        Ok(())
    }

    /// Checks that a phase which has just ended did so after all that found the one before complete: else they might not have seen it,
    /// since only the running phase and the one before can be told apart (9.7.13.15.16).
    fn check_overtaken(&mut self, place: Place) -> Result<(), FaultKind> {
        let Some(mbarrier) = self.mbarriers_of(place.0).get_mut(&place.1) else { return Ok(()) };
        let Some((then, position)) = mbarrier.overtaken.take() else { return Ok(()) };
        let (who, wait) = (self.agent(then.agent as usize), self.job.instruction(position));
        Err(FaultKind::MbarrierOvertaken { address: place.1, who, wait })
    }

    /// `mbarrier.test_wait` and `mbarrier.try_wait`: whether the phase is complete. The warp learns what its arrivals released.
    pub(crate) fn mbarrier_test(
        &mut self,
        warp: &mut Warp,
        address: u32,
        asked: Asked,
        acquires: bool,
        position: usize,
    ) -> Result<(bool, Wait), Fail> {
        let (index, lane) = (warp.index, warp.active.trailing_zeros() & 31);
        let fail = |kind| Box::new((kind, position, index, lane));
        let mbarrier = self.mbarrier((self.rank, address)).map_err(fail)?;
        let phase = mbarrier.phase;
        let complete = match asked {
            Asked::Parity(parity) => phase & 1 != u64::from(parity & 1),
            Asked::State(state) => {
                let of = state >> 20;
                if of > phase || of + 1 < phase {
                    return Err(fail(FaultKind::MbarrierPhase { address, asked: of, phase }));
                }
                of + 1 == phase
            }
        };
        let bit = 1 << index;
        mbarrier.waiting = if complete { mbarrier.waiting & !bit } else { mbarrier.waiting | bit };
        let done = (complete && acquires).then(|| mbarrier.done.clone());
        self.note_mbarrier(index, (self.rank, address), position);
        let now = self.races.open[index].now();
        if complete && let Some(mbarrier) = self.mbarriers.get_mut(&address) {
            mbarrier.seen.retain(|(then, _)| then.agent != now.agent);
            mbarrier.seen.push((now, position));
        }
        if let Some(done) = done {
            self.acquire(warp, &done)?;
        }
        Ok((complete, Wait::Phase { address, phase }))
    }

    fn note_mbarrier(&mut self, warp: usize, place: Place, position: usize) {
        self.races.note_at(warp, place.0, word_bits(place.1 as usize, BYTES), Access::Atomic, position);
    }

    /// Whether what a parked warp of the running CTA waits for has happened.
    pub(crate) fn is_over(&self, wait: Wait) -> bool {
        match wait {
            Wait::Phase { address, phase } => self.mbarriers.get(&address).is_none_or(|found| found.phase != phase),
            Wait::Cluster { generation } => self.cluster_barrier.generation > generation,
        }
    }

    /// An atomic of a warp on shared memory: it hands on what it or a fence before it releases, and learns what others have.
    pub(crate) fn flag(&mut self, warp: &mut Warp, place: Place, position: usize) -> Result<(), Fail> {
        let order = self.program.orders[position];
        if order.releases {
            let released = self.release(warp.index)?;
            self.flags.entry(place).or_default().join(&released);
        } else if !warp.fenced.is_empty() {
            self.flags.entry(place).or_default().join(&warp.fenced);
        }
        let Some(flag) = self.flags.get(&place) else { return Ok(()) };
        if order.acquires {
            let flag = flag.clone();
            return self.acquire(warp, &flag);
        }
        warp.observed.join(flag);
        Ok(())
    }

    /// A warp learns what others have released.
    pub(crate) fn acquire(&mut self, warp: &Warp, clock: &Clock) -> Result<(), Fail> {
        self.lanes_meet(warp.index);
        if self.races.open[warp.index].knows(clock) {
            return Ok(());
        }
        self.fold_writes(warp.index);
        let shared = Shared { program: self.program, shapes: &self.shapes };
        self.races.acquire(warp.index, clock, &shared).map_err(|race| self.race_failure(race))
    }

    /// A warp begins to wait.
    pub(crate) fn wait(&mut self, warp: usize, waits: Waits) -> Result<(), Fail> {
        self.fold_writes(warp);
        let shared = Shared { program: self.program, shapes: &self.shapes };
        self.races.wait(warp, waits, &shared).map_err(|race| self.race_failure(race))
    }

    /// What a warp releases at this point.
    pub(crate) fn release(&mut self, warp: usize) -> Result<Clock, Fail> {
        self.fold_writes(warp);
        let shared = Shared { program: self.program, shapes: &self.shapes };
        self.races.release(warp, &shared).map_err(|race| self.race_failure(race))
    }
}
