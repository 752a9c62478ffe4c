//! Execution of what is asynchronous or between CTAs: mbarriers, bulk and tensor copies, fences, clusters.

use ptx::{Modifier, TensorMap};

use crate::copy::{Piece, Request, Signal, Target};
use crate::cta::{Fail, Stop, Worker, WrittenMap};
use crate::fault::FaultKind;
use crate::interpret::File;
use crate::lane_race::LaneAccess;
use crate::map::{self, Blob};
use crate::mbarrier::{self, Arrive, Asked, Mbarrier};
use crate::memory::Buffer;
use crate::pattern::{SECTOR, lanes_of};
use crate::program::engine::{Copied, EngineOp, Place, Region, Register};
use crate::program::{Op, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES};
use crate::race::{Access, Waits};
use crate::report::InstructionCounters;
use crate::tensor_box;
use crate::traffic::Direction;
use crate::warp::{State, Warp};

/// How the interpreter goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    Next,
    /// With what the warp says now.
    Stay,
    Stop(Stop),
}

/// Where a copy's bytes go, and the mbarrier that is told.
type Receiver = (mbarrier::Place, mbarrier::Place);
/// What a store takes: the pieces for global memory, and the addresses and bytes that are read.
type Taken = (Vec<Piece>, Vec<(u32, u32)>);

/// One lane's values of an instruction's operands.
fn value(warp: &mut Warp, register: Register, lane: usize) -> u64 {
    File::of(warp).full(register)[lane]
}

impl Worker<'_> {
    /// Executes an instruction of [`EngineOp`] for the lanes of `mask`.
    #[inline(never)]
    pub(crate) fn engine(&mut self, warp: &mut Warp, op: &Op, mask: u32) -> Result<Flow, Fail> {
        if mask == 0 {
            return Ok(Flow::Next);
        }
        let program = self.program;
        let position = warp.pc;
        let index = warp.index;
        let first = mask.trailing_zeros();
        let fail = |kind, lane: usize| Box::new((kind, position, index, lane as u32));
        match &program.engine[op.aux as usize] {
            EngineOp::Init { barrier, count } => {
                for lane in lanes_of(mask) {
                    let address = self.own_shared(warp, *barrier, lane).map_err(|kind| fail(kind, lane))?;
                    let count = value(warp, *count, lane) as u32;
                    self.mbarrier_between_lanes(index, (address, lane), true, position)?;
                    self.mbarrier_init(index, address, count, position)?;
                }
            }
            EngineOp::Invalidate { barrier } => {
                for lane in lanes_of(mask) {
                    let address = self.own_shared(warp, *barrier, lane).map_err(|kind| fail(kind, lane))?;
                    self.mbarrier_invalidate(warp, address, position)?;
                }
            }
            EngineOp::Arrive { barrier, count, expect, drop, state, releases } => {
                let released = if *releases { self.release(index)? } else { warp.fenced.clone() };
                let mut states = [0; 32];
                for lane in lanes_of(mask) {
                    let place = self.shared(warp, *barrier, lane).map_err(|kind| fail(kind, lane))?;
                    let count = count.map_or(1, |count| value(warp, count, lane) as u32);
                    let expect = expect.map_or(0, |expect| value(warp, expect, lane) as u32);
                    let arrive = Arrive { count, expect, drop: *drop };
                    states[lane] = self.mbarrier_arrive(index, place, arrive, &released, position)?;
                }
                if let Some(state) = state {
                    File::of(warp).set(*state, states, mask);
                }
            }
            EngineOp::Announce { barrier, bytes, completes } => {
                for lane in lanes_of(mask) {
                    let place = self.shared(warp, *barrier, lane).map_err(|kind| fail(kind, lane))?;
                    let bytes = i64::from(value(warp, *bytes, lane) as u32);
                    self.mbarrier_announce(index, place, if *completes { -bytes } else { bytes }, position)?;
                }
            }
            EngineOp::Test { barrier, asked, parity, complete, acquires } => {
                let mut found = 0;
                let mut wait = None;
                for lane in lanes_of(mask) {
                    let address = self.own_shared(warp, *barrier, lane).map_err(|kind| fail(kind, lane))?;
                    self.mbarrier_between_lanes(index, (address, lane), false, position)?;
                    let asked = value(warp, *asked, lane);
                    let asked = if *parity { Asked::Parity(asked as u32) } else { Asked::State(asked) };
                    let (is_complete, what) = self.mbarrier_test(warp, address, asked, *acquires, position)?;
                    found |= u32::from(is_complete) << lane;
                    wait = wait.or(Some(what));
                }
                self.races.go_on(index);
                if found == 0 && !std::mem::take(&mut warp.timed_out) {
                    if warp.rotate() {
                        return Ok(Flow::Stay);
                    }
                    if let Some(wait) = wait {
                        self.wait(index, Waits::Phase)?;
                        warp.state = State::Parked(wait);
                        return Ok(Flow::Stop(Stop::Pause));
                    }
                }
                warp.failed_waits = 0;
                File::of(warp).set_predicate(*complete, found, mask);
            }
            EngineOp::Pending { state, count } => {
                let counts = File::of(warp).full(*state).map(|state| u64::from(Mbarrier::pending_of(state)));
                File::of(warp).set(*count, counts, mask);
            }
            EngineOp::CopiesArrive { barrier, counted } => {
                self.copies_arrive(warp, *barrier, *counted, mask, position)?;
            }
            EngineOp::Copy(copy) => {
                for lane in lanes_of(mask) {
                    let request = self.request(warp, copy, lane, position).map_err(|kind| fail(kind, lane))?;
                    if let Some(request) = request {
                        request.into_iter().try_for_each(|request| self.issue(warp, request))?;
                    }
                }
            }
            EngineOp::BulkCommit => self.bulk_commit(warp, mask),
            EngineOp::BulkWait { remaining, read } => self.bulk_wait(warp, mask, *remaining, *read)?,
            EngineOp::Fence => {
                let observed = std::mem::take(&mut warp.observed);
                self.acquire(warp, &observed)?;
                warp.fenced = self.release(index)?;
                self.fence_between_ctas();
            }
            EngineOp::ProxyFence => self.fence(index)?,
            EngineOp::MapFence { map } => {
                if let Some(map) = map {
                    for lane in lanes_of(mask) {
                        let (address, _) = self.generic(warp, *map, lane);
                        let open = &mut self.races.open[index];
                        if let Some(map) = self.maps.get_mut(&address).filter(|map| open.is_after(map.then)) {
                            let now = open.stamp();
                            if map.fences.iter().all(|fence| fence.agent != now.agent) {
                                map.fences.push(now);
                            }
                        }
                    }
                }
            }
            EngineOp::MapReplace { map, field, dimension, new } => {
                for lane in lanes_of(mask) {
                    let new = value(warp, *new, lane);
                    self.replace_map(warp, *map, (*field, *dimension, new), lane, position)
                        .map_err(|kind| fail(kind, lane))?;
                }
            }
            EngineOp::MapPublish { to, from } => {
                self.publish_map(warp, *to, *from, first as usize, position)
                    .map_err(|kind| fail(kind, first as usize))?;
            }
            EngineOp::MapAddress { to, address, rank, generic } => {
                let window = if *generic { SHARED_WINDOW } else { 0 };
                let addresses = File::of(warp).full(*address);
                let ranks = File::of(warp).full(*rank);
                let mut mapped = [0; 32];
                for lane in lanes_of(mask) {
                    let ctas = self.peers.len() as u32;
                    let rank = ranks[lane] as u32;
                    if rank >= ctas {
                        return Err(fail(FaultKind::ClusterRank { rank, ctas }, lane));
                    }
                    let offset = addresses[lane].wrapping_sub(window) & ((1 << crate::cluster::RANK_SHIFT) - 1);
                    mapped[lane] = window + (u64::from(rank + 1) << crate::cluster::RANK_SHIFT | offset);
                }
                File::of(warp).set(*to, mapped, mask);
            }
            EngineOp::RankOf { to, address, generic } => {
                let window = if *generic { SHARED_WINDOW } else { 0 };
                let own = self.rank as u64;
                let ranks = File::of(warp).full(*address).map(|address| {
                    match (address.wrapping_sub(window) as u32) >> crate::cluster::RANK_SHIFT {
                        0 => own,
                        rank => u64::from(rank) - 1,
                    }
                });
                File::of(warp).set(*to, ranks, mask);
            }
            EngineOp::ClusterArrive { releases, aligned } | EngineOp::ClusterWait { acquires: releases, aligned }
                if mask != warp.live =>
            {
                let _ = releases;
                if !aligned && mask == warp.active && warp.park() {
                    return Ok(Flow::Stay);
                }
                return Err(fail(FaultKind::Divergent { active: mask, expected: warp.live }, first as usize));
            }
            EngineOp::ClusterArrive { releases, .. } => {
                let released = if *releases { self.release(index)? } else { warp.fenced.clone() };
                self.cluster_arrive(warp, &released).map_err(|kind| fail(kind, first as usize))?;
            }
            EngineOp::ClusterWait { acquires, .. } => {
                match self.cluster_wait(warp).map_err(|kind| fail(kind, first as usize))? {
                    Ok(done) if *acquires => self.acquire(warp, &done)?,
                    Ok(_) => {}
                    Err(wait) => {
                        warp.state = State::Parked(wait);
                        return Ok(Flow::Stop(Stop::Pause));
                    }
                }
            }
        }
        Ok(Flow::Next)
    }

    /// The CTA and the address in its shared memory that a lane's operand means.
    fn shared(&self, warp: &mut Warp, place: Place, lane: usize) -> Result<(usize, u32), FaultKind> {
        let (address, region) = self.generic(warp, place, lane);
        let address = match region {
            Region::Shared => address,
            _ => address.wrapping_sub(SHARED_WINDOW),
        };
        if address >= WINDOW_BYTES {
            let allocations = "the window of shared memory".into();
            return Err(FaultKind::OutOfBounds { space: "generic", address, bytes: 8, allocations });
        }
        self.resolve(address as u32)
    }

    /// As [`Worker::shared`], where only the CTA's own memory is allowed.
    fn own_shared(&self, warp: &mut Warp, place: Place, lane: usize) -> Result<u32, FaultKind> {
        match self.shared(warp, place, lane)? {
            (rank, address) if rank == self.rank => Ok(address),
            (_, address) => {
                let allocations = "the CTA's own shared memory".into();
                Err(FaultKind::OutOfBounds { space: "shared", address: address.into(), bytes: 8, allocations })
            }
        }
    }

    fn generic(&self, warp: &mut Warp, place: Place, lane: usize) -> (u64, Region) {
        let base = place.base.map_or(0, |register| value(warp, register, lane));
        let address = base.wrapping_add_signed(place.offset);
        (if place.region == Region::Shared { address & u64::from(u32::MAX) } else { address }, place.region)
    }

    /// Bytes of shared memory that a copy reads or writes.
    fn span(&self, (rank, address): (usize, u32), bytes: u32, multiple: u32) -> Result<(usize, u32), FaultKind> {
        if !address.is_multiple_of(multiple) {
            return Err(FaultKind::CopyAlignment { space: "shared", address: address.into(), multiple });
        }
        let size = self.job.shared_bytes;
        if address as usize + bytes as usize > size {
            let allocations = format!("the CTA's {size} bytes of shared memory");
            return Err(FaultKind::OutOfBounds { space: "shared", address: address.into(), bytes, allocations });
        }
        Ok((rank, address))
    }

    /// An allocation that holds all of a copy's bytes, and where in it.
    fn allocation(&self, address: u64, bytes: u64) -> Result<(usize, &Buffer, u64), FaultKind> {
        let found = self.job.memory.find(address, bytes);
        found.map(|(index, buffer)| (index, buffer, address - buffer.base())).ok_or_else(|| FaultKind::OutOfBounds {
            space: "global",
            address,
            bytes: bytes as u32,
            allocations: crate::access::allocations(self),
        })
    }

    /// Reads global memory for a copy.
    fn fetch(&mut self, address: u64, into: &mut [u8], position: usize) -> Result<(), FaultKind> {
        let (index, buffer, offset) = self.allocation(address, into.len() as u64)?;
        if let Some(at) = buffer.first_unwritten(offset, into.len() as u64) {
            return Err(FaultKind::Uninitialised { space: "global", address: buffer.base() + at, bytes: 1 });
        }
        buffer.read(offset, into);
        self.note_global(index, offset, into.len() as u64, Direction::Read);
        let place = (index, offset, into.len() as u64);
        self.note_between_ctas(place, Access::Read, position, None).map_err(|fail| fail.0)
    }

    fn note_global(&mut self, buffer: usize, offset: u64, bytes: u64, direction: Direction) {
        let sectors = (offset + bytes - 1) / SECTOR - offset / SECTOR;
        for sector in 0..=sectors {
            self.touched.note(buffer, offset, &[sector as i64], direction);
        }
    }

    /// Notes what a copy stores, where races between CTAs are looked for.
    fn note_stored(
        &mut self,
        place: (usize, u64),
        bytes: &[u8],
        reduces: bool,
        position: usize,
    ) -> Result<(), FaultKind> {
        let access = if reduces { Access::Atomic } else { Access::Write };
        self.note_copied_between_ctas(place, access, position, bytes).map_err(|fail| fail.0)
    }

    /// Reads the running CTA's shared memory for a copy.
    fn take_shared(&self, address: u32, bytes: u32) -> Result<Vec<u8>, FaultKind> {
        let missing = crate::copy::words(address as usize, bytes as usize).find_map(|(word, bits)| {
            let missing = bits & !self.written[word];
            (missing != 0).then(|| 64 * word as u32 + missing.trailing_zeros())
        });
        match missing {
            Some(at) => Err(self.unwritten(at, 1)),
            None => Ok(self.shared[address as usize..(address + bytes) as usize].to_vec()),
        }
    }

    fn count(&mut self, position: usize, bytes: u64, sectors: u64) {
        let counted = InstructionCounters {
            requests: 1,
            sectors,
            sectors_ideal: bytes.div_ceil(SECTOR),
            bytes,
            ..Default::default()
        };
        self.ptx[position] += counted;
        self.merged[position] += counted;
    }

    /// What a lane's copy instruction asks for: a request for each CTA that gets the bytes.
    fn request(
        &mut self,
        warp: &mut Warp,
        copy: &Copied,
        lane: usize,
        position: usize,
    ) -> Result<Option<Vec<Request>>, FaultKind> {
        let request = |pieces, reads, signal| Request { pieces, reads, signal, position, lane: lane as u32 };
        let multicast = copy.multicast.map(|mask| value(warp, mask, lane) as u16);
        // The place of an mbarrier, and how many bytes it is told of.
        match copy {
            Copied { to: Some(to), from: Some(from), tensor: None, size: Some(size), .. } => {
                let bytes = value(warp, *size, lane) as u32;
                if !bytes.is_multiple_of(16) {
                    return Err(FaultKind::CopySize { bytes, multiple: 16 });
                }
                if bytes == 0 {
                    return Ok(Some(Vec::new()));
                }
                let global = |address: u64| match address.is_multiple_of(16) {
                    true => Ok(address),
                    false => Err(FaultKind::CopyAlignment { space: "global", address, multiple: 16 }),
                };
                if to.region == Region::Global {
                    let (rank, source) = self.shared(warp, *from, lane)?;
                    let (_, source) = self.span((rank, source), bytes, 16)?;
                    let contents = self.take_shared(source, bytes)?;
                    let address = global(self.generic(warp, *to, lane).0)?;
                    let (buffer, _, offset) = self.allocation(address, bytes.into())?;
                    self.note_global(buffer, offset, bytes.into(), Direction::Write);
                    self.note_stored((buffer, offset), &contents, copy.operation.is_some(), position)?;
                    self.count(position, bytes.into(), u64::from(bytes) / SECTOR + u64::from(offset % SECTOR != 0));
                    let piece = Piece { to: Target::Global { buffer, offset }, bytes: contents, reduce: copy.reduce };
                    return Ok(Some(vec![request(vec![piece], vec![(source, bytes)], Signal::Group)]));
                }
                let target = self.shared(warp, *to, lane)?;
                self.span(target, bytes, 16)?;
                let barrier = self.signal(warp, copy, lane)?;
                let mut reads = Vec::new();
                let contents = if from.region == Region::Global {
                    let address = global(self.generic(warp, *from, lane).0)?;
                    let mut contents = vec![0; bytes as usize];
                    self.fetch(address, &mut contents, position)?;
                    self.count(position, bytes.into(), u64::from(bytes) / SECTOR + u64::from(address % SECTOR != 0));
                    contents
                } else {
                    let source = self.shared(warp, *from, lane)?;
                    let (_, source) = self.span(source, bytes, 16)?;
                    reads.push((source, bytes));
                    self.count(position, bytes.into(), 0);
                    self.take_shared(source, bytes)?
                };
                let mut requests = Vec::new();
                for (target, barrier) in self.receivers(target, barrier, multicast)? {
                    let (rank, address) = self.span(target, bytes, 16)?;
                    let to = Target::Shared { rank, address };
                    let piece = Piece { to, bytes: contents.clone(), reduce: copy.reduce };
                    requests.push(request(vec![piece], reads.clone(), Signal::Bytes(barrier, bytes)));
                }
                Ok(Some(requests))
            }
            Copied { tensor: Some((map, coordinates)), to, from, .. } => {
                let at: Vec<i32> = coordinates.iter().map(|&c| value(warp, c, lane) as i32).collect();
                let map = self.tensor_map(warp, *map, at.len(), lane)?;
                match (to, from) {
                    (Some(to), _) => {
                        let target = self.shared(warp, *to, lane)?;
                        let barrier = self.signal(warp, copy, lane)?;
                        let bytes = self.box_bytes(&map, target.1)?;
                        let mut requests = Vec::new();
                        for (target, barrier) in self.receivers(target, barrier, multicast)? {
                            let (rank, address) = self.span(target, bytes, 128)?;
                            let counts = requests.is_empty();
                            let pieces = self.load_box(&map, &at, (rank, address), counts, position)?;
                            requests.push(request(pieces, Vec::new(), Signal::Bytes(barrier, bytes)));
                        }
                        Ok(Some(requests))
                    }
                    (None, Some(from)) => {
                        let source = self.shared(warp, *from, lane)?;
                        let bytes = self.box_bytes(&map, source.1)?;
                        let (_, source) = self.span(source, bytes, 128)?;
                        let (pieces, reads) = self.store_box(&map, &at, source, copy.operation, position)?;
                        Ok(Some(vec![request(pieces, reads, Signal::Group)]))
                    }
                    // A prefetch: nothing moves, but the map must be one.
                    (None, None) => Ok(None),
                }
            }
            Copied { to: Some(to), values, .. } if !values.is_empty() => {
                let target = self.shared(warp, *to, lane)?;
                let barrier = self.signal(warp, copy, lane)?;
                let mut contents = Vec::new();
                for register in values {
                    contents
                        .extend_from_slice(&value(warp, *register, lane).to_le_bytes()[..copy.value_bytes as usize]);
                }
                let bytes = contents.len() as u32;
                let (rank, address) = self.span(target, bytes, bytes)?;
                let piece = Piece { to: Target::Shared { rank, address }, bytes: contents, reduce: copy.reduce };
                Ok(Some(vec![request(vec![piece], Vec::new(), Signal::Bytes(barrier, bytes))]))
            }
            // A prefetch of global bytes.
            Copied { from: Some(from), size: Some(size), .. } => {
                let (address, bytes) = (self.generic(warp, *from, lane).0, value(warp, *size, lane) as u32);
                if !bytes.is_multiple_of(16) {
                    return Err(FaultKind::CopySize { bytes, multiple: 16 });
                }
                if !address.is_multiple_of(16) {
                    return Err(FaultKind::CopyAlignment { space: "global", address, multiple: 16 });
                }
                self.allocation(address, bytes.into()).map(|_| None)
            }
            _ => Ok(None),
        }
    }

    /// The mbarrier a copy signals.
    fn signal(&self, warp: &mut Warp, copy: &Copied, lane: usize) -> Result<(usize, u32), FaultKind> {
        match copy.barrier {
            Some(barrier) => self.shared(warp, barrier, lane),
            None => Err(FaultKind::NoMbarrier { address: 0 }),
        }
    }

    /// Where the bytes go and which mbarriers are told: the same places in each CTA of a multicast's mask.
    fn receivers(
        &self,
        target: (usize, u32),
        barrier: (usize, u32),
        multicast: Option<u16>,
    ) -> Result<Vec<Receiver>, FaultKind> {
        let Some(mask) = multicast else { return Ok(vec![(target, barrier)]) };
        let ctas = self.peers.len();
        if let Some(rank) = (ctas..16).find(|rank| mask >> rank & 1 == 1) {
            return Err(FaultKind::ClusterRank { rank: rank as u32, ctas: ctas as u32 });
        }
        let receivers = (0..ctas).filter(|rank| mask >> rank & 1 == 1);
        receivers
            .map(|rank| match rank != self.rank && self.peers[rank].ended {
                true => Err(FaultKind::PeerEnded { rank: rank as u32 }),
                false => Ok(((rank, target.1), (rank, barrier.1))),
            })
            .collect()
    }

    /// The bytes of a box, which shared memory must be able to hold.
    fn box_bytes(&self, map: &TensorMap, address: u32) -> Result<u32, FaultKind> {
        let size = self.job.shared_bytes;
        let bytes = map.box_bytes();
        if bytes > size as u64 {
            let allocations = format!("the CTA's {size} bytes of shared memory");
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            return Err(FaultKind::OutOfBounds { space: "shared", address: address.into(), bytes, allocations });
        }
        Ok(bytes as u32)
    }

    /// Reads a box from global memory: its bytes as they go to shared memory.
    fn load_box(
        &mut self,
        map: &TensorMap,
        at: &[i32],
        (rank, address): (usize, u32),
        counts: bool,
        position: usize,
    ) -> Result<Vec<Piece>, FaultKind> {
        let found = tensor_box::of(map, at, address);
        self.span((rank, address), found.bytes, 128)?;
        let fill = tensor_box::fill(map);
        let size = map.element.bytes() as usize;
        let mut pieces: Vec<Piece> = Vec::new();
        let mut moved = 0;
        let mut image = vec![0; found.bytes as usize];
        for run in &found.runs {
            let start = (run.shared - address) as usize;
            let place = &mut image[start..start + run.bytes as usize];
            match run.global {
                Some(from) => {
                    self.fetch(from, place, position)?;
                    moved += u64::from(run.bytes);
                }
                None => place.chunks_mut(size).for_each(|element| element.copy_from_slice(&fill[..size])),
            }
        }
        let bytes: u32 = found.runs.iter().map(|run| run.bytes).sum();
        if bytes == found.bytes {
            pieces.push(Piece { to: Target::Shared { rank, address }, bytes: image, reduce: None });
        } else {
            // Rows narrower than the swizzle leave gaps.
            for run in found.runs {
                let start = (run.shared - address) as usize;
                let bytes = image[start..start + run.bytes as usize].to_vec();
                pieces.push(Piece { to: Target::Shared { rank, address: run.shared }, bytes, reduce: None });
            }
        }
        if counts {
            self.count(position, moved, found.sectors);
        }
        Ok(pieces)
    }

    /// Takes a box from shared memory: its pieces for global memory, and what is read.
    fn store_box(
        &mut self,
        map: &TensorMap,
        at: &[i32],
        address: u32,
        operation: Option<Modifier>,
        position: usize,
    ) -> Result<Taken, FaultKind> {
        let found = tensor_box::of(map, at, address);
        self.span((self.rank, address), found.bytes, 128)?;
        let reduce = match operation {
            None => None,
            Some(operation) => {
                let ty = map.element.ty();
                Some(crate::reduce::Reduce::new(operation, ty).ok_or_else(|| FaultKind::TensorMap {
                    reason: format!("`{operation}` is not a reduction of {ty} elements"),
                })?)
            }
        };
        let mut pieces = Vec::new();
        let mut reads = Vec::new();
        let mut moved = 0;
        for run in found.runs {
            let Some(to) = run.global else { continue };
            let bytes = self.take_shared(run.shared, run.bytes)?;
            let (buffer, _, offset) = self.allocation(to, run.bytes.into())?;
            self.note_global(buffer, offset, run.bytes.into(), Direction::Write);
            self.note_stored((buffer, offset), &bytes, reduce.is_some(), position)?;
            moved += u64::from(run.bytes);
            reads.push((run.shared, run.bytes));
            pieces.push(Piece { to: Target::Global { buffer, offset }, bytes, reduce });
        }
        self.count(position, moved, found.sectors);
        Ok((pieces, reads))
    }

    /// The tensor map that a lane's operand points to, for so many coordinates.
    fn tensor_map(
        &self,
        warp: &mut Warp,
        place: Place,
        coordinates: usize,
        lane: usize,
    ) -> Result<TensorMap, FaultKind> {
        let (address, _) = self.generic(warp, place, lane);
        let blob = self.map_bytes(address)?;
        let open = &self.races.open[warp.index];
        let fenced = |map: &WrittenMap| map.fences.iter().any(|fence| open.is_after(*fence));
        if let Some(map) = self.maps.get(&address).filter(|map| !fenced(map)) {
            return Err(FaultKind::TensorMapFence { address, write: self.job.instruction(map.position) });
        }
        let map = map::decode(&blob).map_err(|reason| FaultKind::TensorMap { reason })?;
        if map.rank() != coordinates {
            return Err(FaultKind::TensorRank { rank: map.rank() as u32, coordinates: coordinates as u32 });
        }
        Ok(map)
    }

    fn map_bytes(&self, address: u64) -> Result<Blob, FaultKind> {
        let bytes = TensorMap::BYTES;
        let mut blob = [0; TensorMap::BYTES as usize];
        if !address.is_multiple_of(64) {
            return Err(FaultKind::CopyAlignment { space: "tensor map", address, multiple: 64 });
        }
        if let Some(offset) = address.checked_sub(PARAM_WINDOW).filter(|offset| *offset < WINDOW_BYTES) {
            let params = &self.program.params;
            let found = params.get(offset as usize..offset as usize + bytes as usize);
            let allocations = format!("the kernel's {} bytes of parameters", params.len());
            let outside = FaultKind::OutOfBounds { space: "param", address: offset, bytes: bytes as u32, allocations };
            blob.copy_from_slice(found.ok_or(outside)?);
            return Ok(blob);
        }
        let (_, buffer, offset) = self.allocation(address, bytes)?;
        if buffer.first_unwritten(offset, bytes).is_some() {
            return Err(FaultKind::Uninitialised { space: "global", address, bytes: bytes as u32 });
        }
        buffer.read(offset, &mut blob);
        Ok(blob)
    }

    /// `tensormap.replace` on a map in the CTA's shared memory or in global memory.
    fn replace_map(
        &mut self,
        warp: &mut Warp,
        place: Place,
        (field, dimension, new): (Modifier, usize, u64),
        lane: usize,
        position: usize,
    ) -> Result<(), FaultKind> {
        let refuse = |reason| FaultKind::TensorMap { reason };
        let bytes = TensorMap::BYTES as u32;
        let (address, region) = self.generic(warp, place, lane);
        let is_shared = region == Region::Shared || (SHARED_WINDOW..SHARED_WINDOW + WINDOW_BYTES).contains(&address);
        if !is_shared {
            let mut blob = self.map_bytes(address)?;
            map::replace(&mut blob, field, dimension, new).map_err(refuse)?;
            let (_, buffer, offset) = self.allocation(address, bytes.into())?;
            buffer.write(offset, &blob);
            let then = self.races.open[warp.index].stamp();
            self.maps.insert(address, WrittenMap { position, then, fences: Vec::new() });
            return Ok(());
        }
        let own = self.own_shared(warp, place, lane)?;
        let (_, own) = self.span((self.rank, own), bytes, 64)?;
        let mut blob = [0; TensorMap::BYTES as usize];
        blob.copy_from_slice(&self.take_shared(own, bytes)?);
        map::replace(&mut blob, field, dimension, new).map_err(refuse)?;
        let mask = 1 << lane;
        for write in [false, true] {
            self.map_between_lanes(warp.index, own, (mask, write), position)?;
        }
        self.shared[own as usize..(own + bytes) as usize].copy_from_slice(&blob);
        for (word, bits) in crate::copy::words(own as usize, bytes as usize) {
            self.races.note_at(warp.index, self.rank, (word, bits), Access::Write, position);
        }
        Ok(())
    }

    /// Notes that lanes touch a tensor map in shared memory, for the race check between lanes.
    fn map_between_lanes(
        &mut self,
        warp: usize,
        address: u32,
        (mask, write): (u32, bool),
        position: usize,
    ) -> Result<(), FaultKind> {
        if self.lane_races.is_none() {
            return Ok(());
        }
        let bytes = TensorMap::BYTES as u32;
        let access = LaneAccess { addresses: &[address; 32], mask, bytes, write, shared_out: false, position };
        self.note_between_lanes(warp, &access).map_err(|fail| fail.0)
    }

    /// `tensormap.cp_fenceproxy` (PTX ISA 9.7.13.15.19): copies a map from shared to global memory and releases it. It is `.sync`: the
    /// lanes wait for each other, so that it copies what any of them wrote.
    fn publish_map(
        &mut self,
        warp: &mut Warp,
        to: Place,
        from: Place,
        lane: usize,
        position: usize,
    ) -> Result<(), FaultKind> {
        let bytes = TensorMap::BYTES as u32;
        let from = self.own_shared(warp, from, lane)?;
        let (_, from) = self.span((self.rank, from), bytes, 64)?;
        let blob = self.take_shared(from, bytes)?;
        for (word, bits) in crate::copy::words(from as usize, bytes as usize) {
            self.races.note_at(warp.index, self.rank, (word, bits), Access::Read, position);
        }
        let (address, _) = self.generic(warp, to, lane);
        if !address.is_multiple_of(64) {
            return Err(FaultKind::CopyAlignment { space: "global", address, multiple: 64 });
        }
        let (buffer, place, offset) = self.allocation(address, bytes.into())?;
        place.write(offset, &blob);
        place.mark_written(offset, bytes.into());
        self.note_global(buffer, offset, bytes.into(), Direction::Write);
        let then = self.races.open[warp.index].stamp();
        self.maps.insert(address, WrittenMap { position, then, fences: Vec::new() });
        Ok(())
    }

    /// `cp.async.mbarrier.arrive`: arrivals that the warp's `cp.async` so far make when they are complete.
    fn copies_arrive(
        &mut self,
        warp: &mut Warp,
        barrier: Place,
        counted: bool,
        mask: u32,
        position: usize,
    ) -> Result<(), Fail> {
        let index = warp.index;
        let mut barriers: Vec<((usize, u32), u32)> = Vec::new();
        for lane in lanes_of(mask) {
            let fail = |kind| Box::new((kind, position, index, lane as u32));
            let place = (self.rank, self.own_shared(warp, barrier, lane).map_err(fail)?);
            if !counted {
                self.mbarrier_expect_arrival(place).map_err(fail)?;
            }
            match barriers.iter_mut().find(|(of, _)| *of == place) {
                Some((_, count)) => *count += 1,
                None => barriers.push((place, 1)),
            }
        }
        // The copies that are left with the first of them; the others follow at once.
        let mut copies: Vec<_> = warp.copies.iter_mut().flat_map(std::mem::take).collect();
        for (place, count) in barriers {
            let pieces = copies.drain(..).map(|copy| Piece {
                to: Target::Shared { rank: self.rank, address: copy.to as u32 },
                bytes: copy.bytes,
                reduce: None,
            });
            let request = Request {
                pieces: pieces.collect(),
                reads: Vec::new(),
                signal: Signal::Arrivals(place, count),
                position,
                lane: mask.trailing_zeros(),
            };
            self.issue(warp, request)?;
        }
        Ok(())
    }
}
