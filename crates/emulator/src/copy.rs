//! Bulk and tensor copies: the asynchronous engine that moves bytes between memories (PTX ISA 9.7.9.25).
//!
//! A copy reads its source where it is issued and puts the bytes in place when it completes: at once, as late as the program
//! allows, or in between, as the policy says. Until then its destination counts as unwritten. For the race check it is an
//! agent of its own that follows its issuer and is followed by whoever waits for it.

use std::collections::{BTreeMap, VecDeque};

use crate::cta::{Fail, Shared, Stalled, Worker};
use crate::fault::FaultKind;
use crate::mbarrier::Place;
use crate::options::Policy;
use crate::race::{Access, Clock};
use crate::reduce::Reduce;
use crate::stale::StaleCopies;
use crate::warp::{State, Wait, Warp};

/// Where bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Shared { rank: usize, address: u32 },
    Global { buffer: usize, offset: u64 },
}

/// Bytes that follow each other, and where they go.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub to: Target,
    pub bytes: Vec<u8>,
    /// How they are combined with what is there.
    pub reduce: Option<Reduce>,
}

/// What tells that a copy is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// So many bytes more have arrived, for an mbarrier.
    Bytes(Place, u32),
    /// So many arrivals, on an mbarrier (`cp.async.mbarrier.arrive`).
    Arrivals(Place, u32),
    /// The issuing thread's bulk groups.
    Group,
}

impl Signal {
    fn place(self) -> Option<Place> {
        match self {
            Self::Bytes(place, _) | Self::Arrivals(place, _) => Some(place),
            Self::Group => None,
        }
    }
}

/// A copy as an instruction asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub pieces: Vec<Piece>,
    /// What it reads of the issuing CTA's shared memory: addresses and bytes.
    pub reads: Vec<(u32, u32)>,
    pub signal: Signal,
    pub position: usize,
    pub lane: u32,
}

/// A copy that has not completed.
#[derive(Debug)]
struct InFlight {
    id: u64,
    pieces: Vec<Piece>,
    signal: Signal,
    position: usize,
    /// Rank, warp and lane.
    issuer: (usize, usize, u32),
    done: Clock,
}

/// The copies of a cluster in flight, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    flying: Vec<InFlight>,
    issued: u64,
}

impl Copies {
    pub(crate) fn clear(&mut self) {
        self.flying.clear();
    }

    /// Whether a copy in flight will signal an mbarrier.
    pub(crate) fn signals(&self, place: Place) -> bool {
        self.flying.iter().any(|copy| copy.signal.place() == Some(place))
    }

    /// The instruction of a copy in flight that will write these bytes of shared memory.
    fn writing(&self, rank: usize, address: u32, bytes: u32) -> Option<usize> {
        let hits = |piece: &Piece| {
            matches!(piece.to, Target::Shared { rank: of, address: at }
                if of == rank && at < address + bytes && address < at + piece.bytes.len() as u32)
        };
        self.flying.iter().find(|copy| copy.pieces.iter().any(hits)).map(|copy| copy.position)
    }
}

/// A copy that a thread's group holds.
#[derive(Clone, Debug)]
struct Issued {
    id: u64,
    position: usize,
    done: Clock,
    /// Whether the thread has waited until its source was read.
    waited: bool,
}

/// The bulk groups of a thread (9.7.9.25.5).
#[derive(Clone, Debug, Default)]
pub(crate) struct BulkGroups {
    filling: Vec<Issued>,
    committed: VecDeque<Vec<Issued>>,
}

/// Copies of a cluster in flight at most: a kernel that never waits must not fill the memory.
const MAX_FLYING: usize = 1 << 12;
/// How often waits are told that their time is up, while nothing else happens, before that is a deadlock.
const TIMEOUTS: u32 = 3;

impl Worker<'_> {
    /// Issues a copy.
    pub(crate) fn issue(&mut self, warp: &mut Warp, request: Request) -> Result<(), Fail> {
        let Request { pieces, reads, signal, position, lane } = request;
        let release = self.release(warp.index)?;
        for &(address, bytes) in &reads {
            self.async_read(warp.index, address, bytes, position)?;
        }
        let mut interval = self.races.begin_copy(&release);
        for (address, bytes) in reads {
            for touched in words(address as usize, bytes as usize) {
                self.races.note_copy(&mut interval, self.rank, touched, Access::Read, position);
            }
        }
        for piece in &pieces {
            if let Target::Shared { rank, address } = piece.to {
                let access = if piece.reduce.is_some() { Access::Atomic } else { Access::Write };
                for touched in words(address as usize, piece.bytes.len()) {
                    if let Some((reader, address)) = self.flights_of(rank).reader_of(touched.0, touched.1) {
                        let wgmma = self.job.instruction(reader);
                        let kind = FaultKind::WgmmaOverwritten { address, wgmma };
                        return Err(Box::new((kind, position, warp.index, lane)));
                    }
                    self.races.note_copy(&mut interval, rank, touched, access, position);
                }
                self.proxy_of(rank).async_write(address as usize, piece.bytes.len());
            }
        }
        let shared = Shared { program: self.program, shapes: &self.shapes };
        let done = self.races.end_copy(interval, &shared).map_err(|race| self.race_failure(race))?;
        let id = self.copies.issued;
        self.copies.issued += 1;
        if signal == Signal::Group {
            let issued = Issued { id, position, done: done.clone(), waited: false };
            warp.bulk.entry(lane).or_default().filling.push(issued);
        }
        let copy = InFlight { id, pieces, signal, position, issuer: (self.rank, warp.index, lane), done };
        if self.job.completes_now() || (self.job.is_random() && self.draw().is_multiple_of(4)) {
            return self.complete_copy(copy);
        }
        for piece in copy.pieces.iter().filter(|piece| piece.reduce.is_none()) {
            if let Target::Shared { rank, address } = piece.to {
                let (_, written) = self.memory_of(rank);
                words(address as usize, piece.bytes.len()).for_each(|(word, bits)| written[word] &= !bits);
            }
        }
        self.written_since += 1;
        self.copies.flying.push(copy);
        if self.copies.flying.len() > MAX_FLYING {
            self.races.forgot = true;
            let oldest = self.copies.flying.remove(0);
            return self.complete_copy(oldest);
        }
        Ok(())
    }

    /// Puts a copy's bytes in place and says so.
    fn complete_copy(&mut self, copy: InFlight) -> Result<(), Fail> {
        let InFlight { pieces, signal, position, issuer, done, .. } = copy;
        let fail = |kind| Box::new((kind, position, issuer.1, issuer.2));
        for piece in pieces {
            match piece.to {
                Target::Shared { rank, address } => {
                    if rank != self.rank && self.peers[rank].ended {
                        return Err(fail(FaultKind::PeerEnded { rank: rank as u32 }));
                    }
                    let (shared, written) = self.memory_of(rank);
                    let place = &mut shared[address as usize..address as usize + piece.bytes.len()];
                    match piece.reduce {
                        Some(reduce) => reduce.apply(place, &piece.bytes),
                        None => place.copy_from_slice(&piece.bytes),
                    }
                    words(address as usize, piece.bytes.len()).for_each(|(word, bits)| written[word] |= bits);
                    if rank == self.rank && !self.unwaited.is_empty() {
                        let end = address + piece.bytes.len() as u32;
                        self.unwaited.retain(|&at, _| !(address..end).contains(&at));
                    }
                }
                Target::Global { buffer, offset } => {
                    let buffer = &self.job.memory.buffers()[buffer];
                    match piece.reduce {
                        Some(reduce) => reduce.apply_global(self.job.memory, buffer, offset, &piece.bytes),
                        None => buffer.write(offset, &piece.bytes),
                    }
                    buffer.mark_written(offset, piece.bytes.len() as u64);
                }
            }
        }
        self.progress += 1;
        match signal {
            Signal::Bytes(place, bytes) => self.mbarrier_complete(place, bytes, &done).map_err(fail),
            Signal::Arrivals(place, count) => self.mbarrier_copied(place, count, &done).map_err(fail),
            Signal::Group => Ok(()),
        }
    }

    fn complete_at(&mut self, index: usize) -> Result<(), Fail> {
        let copy = self.copies.flying.remove(index);
        self.complete_copy(copy)
    }

    fn complete_id(&mut self, id: u64) -> Result<(), Fail> {
        match self.copies.flying.iter().position(|copy| copy.id == id) {
            Some(index) => self.complete_at(index),
            None => Ok(()),
        }
    }

    /// `cp.async` copies that an mbarrier waits for, and not a group alone: a wait for any group of the warp completes them.
    pub(crate) fn complete_arrivals(&mut self, warp: usize) -> Result<(), Fail> {
        let rank = self.rank;
        let of = |copy: &InFlight| {
            matches!(copy.signal, Signal::Arrivals(..)) && (copy.issuer.0, copy.issuer.1) == (rank, warp)
        };
        while let Some(index) = self.copies.flying.iter().position(of) {
            self.complete_at(index)?;
        }
        Ok(())
    }

    /// Under the random policy: some of the copies in flight complete.
    pub(crate) fn complete_some_copies(&mut self) -> Result<(), Fail> {
        for index in (0..self.copies.flying.len()).rev() {
            if index < self.copies.flying.len() && self.draw().is_multiple_of(4) {
                self.complete_at(index)?;
            }
        }
        Ok(())
    }

    /// Nothing can run: completes a copy that somebody waits for, or tells waits that their time is up. False when that is no help.
    pub(crate) fn unblock(&mut self, stalled: &mut Stalled) -> Result<bool, Fail> {
        let mut waited = Vec::new();
        for rank in 0..self.peers.len() {
            let warps = if rank == self.rank { &self.warps } else { &self.peers[rank].warps };
            waited.extend(warps.iter().filter_map(|warp| match warp.state {
                State::Parked(Wait::Phase { address, .. }) => Some((rank, address)),
                _ => None,
            }));
        }
        let awaited = |copy: &InFlight| copy.signal.place().is_some_and(|place| waited.contains(&place));
        let candidates: Vec<usize> =
            (0..self.copies.flying.len()).filter(|&index| awaited(&self.copies.flying[index])).collect();
        let chosen = match self.job.options.policy {
            Policy::Random(_) if !candidates.is_empty() => {
                Some(candidates[(self.draw() % candidates.len() as u64) as usize])
            }
            _ => candidates.first().copied(),
        };
        if let Some(index) = chosen {
            self.complete_at(index)?;
            return Ok(true);
        }
        if waited.is_empty() {
            return Ok(false);
        }
        if stalled.progress != self.progress {
            *stalled = Stalled { progress: self.progress, times: 0 };
        }
        stalled.times += 1;
        if stalled.times > TIMEOUTS {
            if self.copies.flying.is_empty() {
                return Ok(false);
            }
            self.complete_at(0)?;
            return Ok(true);
        }
        // A `try_wait` may end without its phase having completed (9.7.13.15.16): the program may have something else to do.
        let peers = self.peers.iter_mut().flat_map(|peer| &mut peer.warps);
        for warp in self.warps.iter_mut().chain(peers) {
            if matches!(warp.state, State::Parked(Wait::Phase { .. })) {
                warp.state = State::Ready;
                warp.timed_out = true;
            }
        }
        Ok(true)
    }

    /// `cp.async.bulk.commit_group`.
    pub(crate) fn bulk_commit(&mut self, warp: &mut Warp, mask: u32) {
        for (_, groups) in warp.bulk.iter_mut().filter(|(lane, _)| mask >> **lane & 1 == 1) {
            groups.committed.push_back(std::mem::take(&mut groups.filling));
        }
    }

    /// `cp.async.bulk.wait_group`: at most `remaining` groups of each thread stay in flight, or only their sources unread.
    pub(crate) fn bulk_wait(&mut self, warp: &mut Warp, mask: u32, remaining: usize, read: bool) -> Result<(), Fail> {
        let mut bulk = std::mem::take(&mut warp.bulk);
        let outcome = self.wait_for(warp, &mut bulk, mask, remaining, read);
        warp.bulk = bulk;
        outcome
    }

    fn wait_for(
        &mut self,
        warp: &Warp,
        bulk: &mut BTreeMap<u32, BulkGroups>,
        mask: u32,
        remaining: usize,
        read: bool,
    ) -> Result<(), Fail> {
        for (_, groups) in bulk.iter_mut().filter(|(lane, _)| mask >> **lane & 1 == 1) {
            let over = groups.committed.len().saturating_sub(remaining);
            for issued in groups.committed.iter_mut().take(over).flatten() {
                if !read {
                    self.complete_id(issued.id)?;
                }
                issued.waited = true;
                self.acquire(warp, &issued.done)?;
            }
            let flying = |issued: &Issued| self.copies.flying.iter().any(|copy| copy.id == issued.id);
            while groups.committed.len() > remaining
                && groups.committed.front().is_some_and(|group| !group.iter().any(flying))
            {
                groups.committed.pop_front();
            }
        }
        Ok(())
    }

    /// A warp ends: nobody else can wait until its copies have read their source.
    pub(crate) fn end_warp_copies(&self, warp: &Warp) -> Result<(), Fail> {
        for (&lane, groups) in &warp.bulk {
            let mut all = groups.committed.iter().flatten().chain(&groups.filling);
            if let Some(issued) = all.find(|issued| !issued.waited) {
                let how = "reads this CTA's shared memory";
                return Err(Box::new((FaultKind::CopyAtExit { how }, issued.position, warp.index, lane)));
            }
        }
        Ok(())
    }

    /// The running CTA's last warp has ended: what it still copies to global memory gets there; nothing may be on its way to it.
    pub(crate) fn end_copies(&mut self, _last: &Warp) -> Result<(), Fail> {
        let rank = self.rank;
        let into = |piece: &Piece| matches!(piece.to, Target::Shared { rank: to, .. } if to == rank);
        if let Some(copy) = self.copies.flying.iter().find(|copy| copy.pieces.iter().any(into)) {
            let how = "writes this CTA's shared memory";
            return Err(Box::new((FaultKind::CopyAtExit { how }, copy.position, copy.issuer.1, copy.issuer.2)));
        }
        while let Some(index) = self.copies.flying.iter().position(|copy| copy.issuer.0 == rank) {
            self.complete_at(index)?;
        }
        Ok(())
    }

    /// Why bytes of the running CTA's shared memory that are to be read do not count as written.
    pub(crate) fn unwritten(&self, address: u32, bytes: u32) -> FaultKind {
        let hits = |at: u32, length: u32| at < address + bytes && address < at + length;
        let copy = (address & !3..address + bytes).step_by(4).find_map(|word| self.unwaited.get(&word).copied());
        let copy = copy.map(|position| position as usize).or_else(|| self.copies.writing(self.rank, address, bytes));
        if let Some(position) = copy {
            return FaultKind::Unwaited { address: address.into(), bytes, copy: self.job.instruction(position) };
        }
        let left = |stale: &StaleCopies| {
            (address & !3..address + bytes).step_by(4).find_map(|word| stale.of((self.rank, word)))
        };
        if let Some(position) = self.stale.as_ref().and_then(left) {
            return FaultKind::StaleCopy { address: address.into(), bytes, copy: self.job.instruction(position) };
        }
        if let Some((&at, _)) = self.mbarriers.range(..address + bytes).next_back().filter(|(at, _)| hits(**at, 8)) {
            return FaultKind::MbarrierBytes { address: at };
        }
        FaultKind::Uninitialised { space: "shared", address: address.into(), bytes }
    }
}

/// Bytes as words of 64 of them and bits.
pub(crate) fn words(start: usize, bytes: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = start + bytes;
    (start / 64..end.div_ceil(64)).map(move |word| {
        let (from, to) = (start.max(word * 64) - word * 64, end.min(word * 64 + 64) - word * 64);
        (word, (u64::MAX >> (64 - (to - from))) << from)
    })
}
