//! Memory instructions.

use crate::banks::BankRule;
use crate::cta::{Fail, Shared, Worker, word_bits};
use crate::fault::FaultKind;
use crate::interpret::File;
use crate::lane_race::LaneAccess;
use crate::lanes::{ALL, WARP, each, number};
use crate::pattern::{KEPT, Kind, Pattern, lanes_of};
use crate::program::{Code, Extend, LOCAL_WINDOW, MemoryOp, Op, SHARED_WINDOW, UNGUARDED, WINDOW_BYTES};
use crate::race::{Access, Read};
use crate::traffic::Direction;
use crate::warp::{PendingCopy, Warp};

/// Where something went wrong.
struct Site {
    position: usize,
    warp: usize,
}

impl Site {
    #[cold]
    fn fail(&self, kind: FaultKind, lane: u32) -> Fail {
        Box::new((kind, self.position, self.warp, lane))
    }

    #[cold]
    fn shared_bounds(&self, address: u64, bytes: u32, size: usize, lane: u32) -> Fail {
        let allocations = format!("the CTA's {size} bytes of shared memory");
        self.fail(FaultKind::OutOfBounds { space: "shared", address, bytes, allocations }, lane)
    }
}

#[inline(always)]
fn addresses32(file: &File<'_>, base: Option<(u32, bool)>, offset: i64) -> [u32; WARP] {
    let base = base.map_or([0; WARP], |register| file.low(register));
    each(base, |base| base.wrapping_add(offset as u32))
}

#[inline(always)]
fn addresses64(file: &File<'_>, base: Option<(u32, bool)>, offset: i64) -> [u64; WARP] {
    let base = base.map_or([0; WARP], |register| file.full(register));
    each(base, |base| base.wrapping_add_signed(offset))
}

/// For each lane, the entry of a table its number names.
#[inline(always)]
pub(crate) fn pick<const LEVEL: u8>(table: &[u32; WARP], entries: usize, numbers: &[u32; WARP]) -> [u32; WARP] {
    #[cfg(target_arch = "x86_64")]
    if LEVEL == crate::interpret::AVX512 {
        // SAFETY: code for this level runs only where AVX-512F was detected.
        return unsafe { crate::avx512::pick(table, entries, numbers) };
    }
    let _ = entries;
    each(*numbers, |number| table[(number & 31) as usize])
}

/// Reads `elements` words of every lane's address from shared memory.
///
/// Each distinct address is read once; lanes pick theirs.
#[inline(always)]
fn gather_words<const LEVEL: u8>(shared: &[u8], first: u32, pattern: &Pattern, elements: usize) -> [[u32; WARP]; 4] {
    let at = |delta: i32| (i64::from(first) + i64::from(delta)) as usize;
    #[cfg(target_arch = "x86_64")]
    if LEVEL == crate::interpret::AVX512 {
        // SAFETY: code for this level runs only where AVX-512F was detected; the caller has checked that all the pattern's
        // addresses, counted from `first`, lie in `shared`.
        return unsafe { crate::avx512::gather_words(shared, first, pattern, elements) };
    }
    let mut words = [[0; WARP]; 4];
    for (element, words) in words.iter_mut().enumerate().take(elements) {
        let mut table = [0; WARP];
        for (entry, &delta) in table.iter_mut().zip(&pattern.distinct) {
            *entry = little_endian::<4>(shared, at(delta) + 4 * element) as u32;
        }
        *words = pick::<LEVEL>(&table, pattern.distinct.len(), &pattern.chunk_of);
    }
    words
}

/// What a value of `bytes` bytes makes of a register.
fn extended(value: u64, bytes: u32, extend: Extend, wide: bool) -> u64 {
    let unused = 64 - 8 * bytes;
    match extend {
        Extend::Sign if wide => ((value << unused) as i64 >> unused) as u64,
        Extend::Sign => u64::from(((value << unused) as i64 >> unused) as u32),
        Extend::Zero => value,
    }
}

fn bank_rule(worker: &Worker<'_>, store: bool) -> BankRule {
    let sm = worker.job.options.sm;
    if store { BankRule::stores(sm) } else { BankRule::loads(sm) }
}

/// Finds the shape of a shared access and makes the checks that need no data. Returns the shape's index.
#[inline(always)]
fn shared_shape(
    worker: &mut Worker<'_>,
    memory: &MemoryOp,
    op: &Op,
    addresses: &[u32; WARP],
    mask: u32,
    site: &Site,
) -> Result<usize, Fail> {
    let kind = Kind::Shared(bank_rule(worker, op.code != Code::LoadShared));
    let bytes = memory.lane_bytes();
    let size = worker.shared.len();
    let shapes = &mut worker.shapes[op.aux as usize];
    let found = shapes.find_narrow(site.warp, addresses, mask, || {
        Pattern::new(kind, &addresses.map(u64::from), mask, bytes, &memory.merged)
    });
    let first = i64::from(addresses[mask.trailing_zeros() as usize]);
    let Some(index) = found else { return Err(outside(addresses, mask, bytes, size, site)) };
    let pattern = &mut shapes.patterns[index];
    if first + pattern.low < 0 || first + pattern.high > size as i64 {
        return Err(outside(addresses, mask, bytes, size, site));
    }
    if let Some(lane) = pattern.misaligned {
        return Err(
            site.fail(FaultKind::Misaligned { space: "shared", address: addresses[lane as usize].into(), bytes }, lane)
        );
    }
    pattern.hits += 1;
    Ok(index)
}

#[cold]
fn outside(addresses: &[u32; WARP], mask: u32, bytes: u32, size: usize, site: &Site) -> Fail {
    let lane = lanes_of(mask).find(|&lane| addresses[lane] as usize + bytes as usize > size).unwrap_or(0);
    site.shared_bounds(addresses[lane].into(), bytes, size, lane as u32)
}

/// Checks that what is read was written, and notes the read.
#[inline(always)]
fn note_read(worker: &mut Worker<'_>, op: &Op, shape: usize, first: u32, warp: usize, site: &Site) -> Result<(), Fail> {
    let pattern = &mut worker.shapes[op.aux as usize].patterns[shape];
    let start = i64::from(first / 64);
    if !pattern.is_checked(worker.written_since, first) {
        let written = |&(word, bits): &(i64, u64)| bits & !worker.written[(start + word) as usize] == 0;
        if !pattern.words.iter().all(written) {
            return Err(unwritten(worker, op, shape, first, site));
        }
    }
    let interval = &mut worker.races.open[warp];
    if shape < KEPT {
        let shared = Shared { program: worker.program, shapes: &worker.shapes };
        interval.note_read(Read { memory: op.aux, shape: shape as u32, first }, &shared);
    } else {
        // This place is another shape's next.
        for &(word, bits) in &worker.shapes[op.aux as usize].patterns[shape].words {
            interval.note((start + word) as usize, bits, Access::Read, site.position, 0);
        }
    }
    Ok(())
}

/// What is about to be written: where, and what was there.
pub(crate) struct Overwrites {
    memory: u32,
    shape: usize,
    first: u32,
}

/// Before a write: checks it, and keeps what is there for [`note_write`].
#[inline(always)]
fn before_write(
    worker: &mut Worker<'_>,
    memory: u32,
    shape: usize,
    first: u32,
    site: &Site,
) -> Result<Overwrites, Fail> {
    let pattern = &worker.shapes[memory as usize].patterns[shape];
    let (watched, copied) = (!worker.flights.is_empty(), !worker.unwaited.is_empty());
    worker.before.clear();
    for &(word, bits) in &pattern.words {
        let word = (i64::from(first / 64) + word) as usize;
        if watched && let Some(reader) = worker.flights.reader_of(word, bits) {
            return Err(overwritten(worker.job, reader, site));
        }
        // What a copy in flight will write counts as unwritten.
        let missing = bits & !worker.written[word];
        if copied && missing != 0 {
            worker.not_in_flight(word, missing, site)?;
        }
        worker.before.push(word_at(&worker.shared, word));
    }
    Ok(Overwrites { memory, shape, first })
}

/// After a write: marks what is written, and notes the write.
#[inline(always)]
pub(crate) fn note_write(worker: &mut Worker<'_>, overwrites: &Overwrites, warp: usize) {
    let Overwrites { memory, shape, first } = *overwrites;
    let position = worker.program.memory[memory as usize].position;
    let pattern = &worker.shapes[memory as usize].patterns[shape];
    let interval = &mut worker.races.open[warp];
    worker.races.time = worker.races.time.wrapping_add(1);
    let time = worker.races.time;
    for (&(word, bits), before) in pattern.words.iter().zip(&worker.before) {
        let word = (i64::from(first / 64) + word) as usize;
        let changed = bits & (changed(before, &word_at(&worker.shared, word)) | !worker.written[word]);
        worker.written[word] |= bits;
        if changed != 0 {
            interval.note(word, changed, Access::Write, position, time);
        }
        if changed != bits {
            interval.note(word, bits & !changed, Access::Repeat, position, time);
        }
    }
}

/// 64 bytes of shared memory; zeros beyond its end.
#[inline(always)]
fn word_at(shared: &[u8], word: usize) -> [u8; 64] {
    let rest = &shared[64 * word..];
    match rest.first_chunk() {
        Some(bytes) => *bytes,
        None => {
            let mut bytes = [0; 64];
            bytes[..rest.len()].copy_from_slice(rest);
            bytes
        }
    }
}

/// The bytes of those groups of four that differ, as bits.
#[inline(always)]
fn changed(before: &[u8; 64], after: &[u8; 64]) -> u64 {
    let groups = before.as_chunks::<4>().0.iter().zip(after.as_chunks::<4>().0);
    groups.enumerate().fold(0, |bits, (at, (before, after))| bits | if before == after { 0 } else { 0xf << (4 * at) })
}

/// The fault of a write to what a `wgmma` in flight reads.
#[cold]
fn overwritten(job: &crate::run::Job<'_>, (position, address): (usize, u64), site: &Site) -> Fail {
    site.fail(FaultKind::WgmmaOverwritten { address, wgmma: job.instruction(position) }, 0)
}

impl Worker<'_> {
    /// Checks that no `cp.async` in flight will write these bytes of a word: until it is waited for nothing orders its write and
    /// others, those of its own thread included (PTX ISA 9.7.9.25.2).
    #[cold]
    fn not_in_flight(&self, word: usize, bits: u64, site: &Site) -> Result<(), Fail> {
        let addresses =
            (0..16).filter(|group| bits >> (4 * group) & 0xf != 0).map(|group| 64 * word as u32 + 4 * group);
        for address in addresses {
            if let Some(&copy) = self.unwaited.get(&address) {
                let (first, second) = ("an asynchronous copy".into(), format!("warp {}", site.warp));
                let other = self.job.instruction(copy as usize);
                return Err(site.fail(FaultKind::Race { address: address.into(), first, second, other }, 0));
            }
        }
        Ok(())
    }
}

/// Notes who touches what, for the race check between lanes.
#[cold]
fn note_lanes_shared(
    worker: &mut Worker<'_>,
    memory: &MemoryOp,
    addresses: &[u32; WARP],
    (mask, write, shared_out): (u32, bool, bool),
    site: &Site,
) -> Result<(), Fail> {
    let (bytes, position) = (memory.lane_bytes(), site.position);
    worker.note_between_lanes(site.warp, &LaneAccess { addresses, mask, bytes, write, shared_out, position })
}

#[cold]
fn unwritten(worker: &Worker<'_>, op: &Op, shape: usize, first: u32, site: &Site) -> Fail {
    let pattern = &worker.shapes[op.aux as usize].patterns[shape];
    for &(word, bits) in &pattern.words {
        let word = (i64::from(first / 64) + word) as usize;
        let missing = bits & !worker.written[word];
        if missing != 0 {
            let address = word as u64 * 64 + u64::from(missing.trailing_zeros());
            let lane = pattern.lane_at(first, address);
            return site.fail(worker.unwritten(address as u32, 1), lane);
        }
    }
    site.fail(FaultKind::Trap, 0)
}

#[inline(always)]
fn little_endian<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(value)
}

#[inline(always)]
pub(crate) fn load_shared<const LEVEL: u8>(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    op: &Op,
    mask: u32,
) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let site = Site { position: memory.position, warp: warp.index };
    let mut file = File::of(warp);
    let addresses = addresses32(&file, memory.base, memory.offset);
    let index = shared_shape(worker, memory, op, &addresses, mask, &site)?;
    let first = addresses[mask.trailing_zeros() as usize];
    note_read(worker, op, index, first, site.warp, &site)?;
    if worker.lane_races.is_some() {
        note_lanes_shared(worker, memory, &addresses, (mask, false, false), &site)?;
    }
    let pattern = &worker.shapes[op.aux as usize].patterns[index];
    let shared = worker.shared.as_slice();
    if memory.bytes == 4 && memory.elements <= 4 {
        let words = gather_words::<LEVEL>(shared, first, pattern, memory.elements as usize);
        for (words, register) in words.iter().zip(&memory.registers) {
            match *register {
                Some((place, false)) => file.set_narrow(place, *words, mask),
                Some((place, true)) => {
                    file.set_wide(place, each(*words, |word| extended(word.into(), 4, memory.extend, true)), mask)
                }
                None => {}
            }
        }
        return Ok(());
    }
    let at = |delta: i32| (i64::from(first) + i64::from(delta)) as usize;
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        let mut table = [0u64; WARP];
        for (entry, &delta) in pattern.distinct.iter().enumerate() {
            let start = at(delta) + element * memory.bytes as usize;
            let value = match memory.bytes {
                1 => little_endian::<1>(shared, start),
                2 => little_endian::<2>(shared, start),
                4 => little_endian::<4>(shared, start),
                _ => little_endian::<8>(shared, start),
            };
            table[entry] = extended(value, memory.bytes, memory.extend, register.1);
        }
        file.set(register, each(pattern.chunk_of, |entry| table[(entry & 31) as usize]), mask);
    }
    Ok(())
}

#[inline(always)]
pub(crate) fn store_shared(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let site = Site { position: memory.position, warp: warp.index };
    let file = File::of(warp);
    let addresses = addresses32(&file, memory.base, memory.offset);
    let index = shared_shape(worker, memory, op, &addresses, mask, &site)?;
    let first = addresses[mask.trailing_zeros() as usize];
    let overwrites = before_write(worker, op.aux, index, first, &site)?;
    if worker.lane_races.is_some() {
        note_lanes_shared(worker, memory, &addresses, (mask, true, false), &site)?;
    }
    let bytes = memory.bytes as usize;
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        if bytes == 4 && mask == ALL {
            let values = file.low(register);
            for lane in 0..WARP {
                let start = addresses[lane] as usize + 4 * element;
                worker.shared[start..start + 4].copy_from_slice(&values[lane].to_le_bytes());
            }
        } else {
            let values = file.full(register);
            for lane in lanes_of(mask) {
                let start = addresses[lane] as usize + bytes * element;
                worker.shared[start..start + bytes].copy_from_slice(&values[lane].to_le_bytes()[..bytes]);
            }
        }
    }
    note_write(worker, &overwrites, site.warp);
    Ok(())
}

/// The addresses of the rows of 8x8 matrices that `lanes` give, for a load or a store of them: checked, counted and, of a load,
/// noted. A store is noted by [`note_write`] when it has happened.
pub(crate) fn matrix_rows(
    worker: &mut Worker<'_>,
    warp: &Warp,
    index: u32,
    lanes: u32,
    store: bool,
) -> Result<([u32; WARP], Option<Overwrites>), Fail> {
    let program = worker.program;
    let memory = &program.memory[index as usize];
    let site = Site { position: memory.position, warp: warp.index };
    let base = memory.base.map_or([0; WARP], |(place, wide)| match wide {
        true => warp.wide[place as usize].0,
        false => each(warp.narrow[place as usize].0, u64::from),
    });
    let wide = each(base, |base| base.wrapping_add_signed(memory.offset));
    if memory.generic
        && let Some(lane) =
            lanes_of(lanes).find(|&lane| !(SHARED_WINDOW..SHARED_WINDOW + WINDOW_BYTES).contains(&wide[lane]))
    {
        return Err(site.shared_bounds(wide[lane], 16, worker.shared.len(), lane as u32));
    }
    let addresses = each(wide, |address| address as u32);
    let op = Op { code: Code::Tensor, d: 0, a: 0, b: 0, c: 0, aux: index, guard: UNGUARDED };
    let shape = shared_shape(worker, memory, &op, &addresses, lanes, &site)?;
    let first = addresses[lanes.trailing_zeros() as usize];
    if worker.lane_races.is_some() {
        note_lanes_shared(worker, memory, &addresses, (lanes, store, true), &site)?;
    }
    if store {
        return Ok((addresses, Some(before_write(worker, index, shape, first, &site)?)));
    }
    note_read(worker, &op, shape, first, site.warp, &site)?;
    Ok((addresses, None))
}

/// The allocation that a warp's global access falls into, with the shape of its addresses.
struct Placed {
    buffer: usize,
    /// Of the first active lane, in the allocation.
    offset: u64,
    shape: usize,
}

/// Finds shape and allocation of a global access and makes the checks that need no data. `None` when the lanes must be looked at
/// one by one: they are too far apart, or in several allocations.
#[inline(always)]
fn global_shape(
    worker: &mut Worker<'_>,
    memory: &MemoryOp,
    index: usize,
    addresses: &[u64; WARP],
    mask: u32,
    site: &Site,
) -> Result<Option<Placed>, Fail> {
    let bytes = memory.lane_bytes();
    let shapes = &mut worker.shapes[index];
    let Some(shape) =
        shapes.find(site.warp, addresses, mask, || Pattern::new(Kind::Global, addresses, mask, bytes, &memory.merged))
    else {
        return Ok(None);
    };
    let pattern = &mut shapes.patterns[shape];
    if let Some(lane) = pattern.misaligned {
        return Err(
            site.fail(FaultKind::Misaligned { space: "global", address: addresses[lane as usize], bytes }, lane)
        );
    }
    let first = addresses[mask.trailing_zeros() as usize];
    let (low, span) = (first.wrapping_add_signed(pattern.low), (pattern.high - pattern.low) as u64);
    let Some((buffer, found)) = worker.job.memory.find(low, span) else { return Ok(None) };
    pattern.hits += 1;
    Ok(Some(Placed { buffer, offset: first - found.base(), shape }))
}

/// Does what `each` does for one lane at a time, when a request's lanes have no common shape, and counts the request.
#[cold]
fn scattered(
    worker: &mut Worker<'_>,
    memory: &MemoryOp,
    index: usize,
    addresses: &[u64; WARP],
    mask: u32,
    site: &Site,
    direction: Direction,
    mut each: impl FnMut(&mut Worker<'_>, usize, usize, u64) -> Result<(), Fail>,
) -> Result<(), Fail> {
    let bytes = memory.lane_bytes();
    let mut sectors = Vec::new();
    for lane in lanes_of(mask) {
        let address = addresses[lane];
        let Some((buffer, found)) = worker.job.memory.find(address, bytes.into()) else {
            return Err(site.fail(
                FaultKind::OutOfBounds { space: "global", address, bytes, allocations: allocations(worker) },
                lane as u32,
            ));
        };
        if !address.is_multiple_of(bytes.into()) {
            return Err(site.fail(FaultKind::Misaligned { space: "global", address, bytes }, lane as u32));
        }
        let offset = address - found.base();
        worker.touched.note(buffer, offset, &[0], direction);
        let access = if direction == Direction::Read { Access::Read } else { Access::Write };
        worker.note_between_ctas(
            (buffer, offset, bytes.into()),
            access,
            site.position,
            Some((site.warp, lane as u32)),
        )?;
        sectors.push(address / crate::pattern::SECTOR);
        each(worker, lane, buffer, offset)?;
    }
    sectors.sort_unstable();
    sectors.dedup();
    let position = worker.program.memory[index].position;
    let counted = crate::report::InstructionCounters {
        requests: 1,
        sectors: sectors.len() as u64,
        sectors_ideal: u64::from(mask.count_ones() * bytes).div_ceil(crate::pattern::SECTOR),
        ..Default::default()
    };
    worker.ptx[position] += counted;
    worker.merged[position] += counted;
    Ok(())
}

pub(crate) fn allocations(worker: &Worker<'_>) -> String {
    let buffers = worker.job.memory.buffers();
    let shown: Vec<_> =
        buffers.iter().take(8).map(|b| format!("[{:#x}, {:#x})", b.base(), b.base() + b.bytes())).collect();
    match buffers.len() {
        0 => "global memory: nothing is allocated".into(),
        1..=8 => format!("the allocations {}", shown.join(", ")),
        n => format!("the allocations {} and {} more", shown.join(", "), n - 8),
    }
}

/// Makes a generic access for the lanes whose addresses are in the shared or local window; the lanes left are at global ones.
fn windows(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    memory: &MemoryOp,
    addresses: &[u64; WARP],
    mask: u32,
    store: bool,
) -> Result<u32, Fail> {
    let mut rest = mask;
    for (start, space) in [(SHARED_WINDOW, "shared"), (LOCAL_WINDOW, "local")] {
        let inside = |lane: &usize| (start..start + WINDOW_BYTES).contains(&addresses[*lane]);
        let lanes = lanes_of(mask).filter(inside).fold(0, |lanes, lane| lanes | 1 << lane);
        if lanes != 0 {
            generic(worker, warp, memory, addresses, lanes, space, store)?;
            rest &= !lanes;
        }
    }
    Ok(rest)
}

#[inline(always)]
pub(crate) fn load_global<const LEVEL: u8>(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    op: &Op,
    mask: u32,
) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let site = Site { position: memory.position, warp: warp.index };
    let addresses = addresses64(&File::of(warp), memory.base, memory.offset);
    let mut mask = mask;
    if memory.generic {
        mask = windows(worker, warp, memory, &addresses, mask, false)?;
        if mask == 0 {
            return Ok(());
        }
    }
    let mut file = File::of(warp);
    let Some(placed) = global_shape(worker, memory, op.aux as usize, &addresses, mask, &site)? else {
        let mut values = vec![[0u64; WARP]; memory.elements as usize];
        scattered(
            worker,
            memory,
            op.aux as usize,
            &addresses,
            mask,
            &site,
            Direction::Read,
            |worker, lane, buffer, offset| {
                let buffer = &worker.job.memory.buffers()[buffer];
                check_written(buffer, offset, memory, lane as u32, &site)?;
                for (element, values) in values.iter_mut().enumerate() {
                    values[lane] =
                        load_element(buffer, offset + element as u64 * u64::from(memory.bytes), memory.bytes);
                }
                Ok(())
            },
        )?;
        for (register, values) in memory.registers.iter().zip(values) {
            if let Some(register) = *register {
                file.set(
                    register,
                    each(values, |value| extended(value, memory.bytes, memory.extend, register.1)),
                    mask,
                );
            }
        }
        return Ok(());
    };
    let pattern = &worker.shapes[op.aux as usize].patterns[placed.shape];
    let job = worker.job;
    let buffer = &job.memory.buffers()[placed.buffer];
    worker.touched.note(placed.buffer, placed.offset, &pattern.sectors, Direction::Read);
    if job.global_races.is_some() {
        note_lanes(worker, memory, &placed, op.aux, Access::Read, &site)?;
    }
    let pattern = &worker.shapes[op.aux as usize].patterns[placed.shape];
    if buffer.tracks_writes() {
        for &delta in &pattern.distinct {
            let offset = placed.offset.wrapping_add_signed(delta.into());
            check_written(buffer, offset, memory, pattern.lane_of(delta), &site)?;
        }
    }
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        let at = placed.offset + element as u64 * u64::from(memory.bytes);
        if memory.bytes == 4 {
            let mut table = [0u32; WARP];
            for (entry, &delta) in pattern.distinct.iter().enumerate() {
                table[entry] = buffer.load_word(at.wrapping_add_signed(delta.into()));
            }
            let values = pick::<LEVEL>(&table, pattern.distinct.len(), &pattern.chunk_of);
            if register.1 {
                file.set_wide(register.0, each(values, |value| extended(value.into(), 4, memory.extend, true)), mask);
            } else {
                file.set_narrow(register.0, values, mask);
            }
        } else {
            let mut table = [0u64; WARP];
            for (entry, &delta) in pattern.distinct.iter().enumerate() {
                let value = load_element(buffer, at.wrapping_add_signed(delta.into()), memory.bytes);
                table[entry] = extended(value, memory.bytes, memory.extend, register.1);
            }
            file.set(register, each(pattern.chunk_of, |entry| table[(entry & 31) as usize]), mask);
        }
    }
    Ok(())
}

/// Notes the distinct addresses of a request where races between CTAs are looked for.
#[cold]
fn note_lanes(
    worker: &mut Worker<'_>,
    memory: &MemoryOp,
    placed: &Placed,
    index: u32,
    access: Access,
    site: &Site,
) -> Result<(), Fail> {
    let pattern = &worker.shapes[index as usize].patterns[placed.shape];
    let lanes: Vec<_> = pattern.distinct.iter().map(|&delta| (delta, pattern.lane_of(delta))).collect();
    for (delta, lane) in lanes {
        let offset = placed.offset.wrapping_add_signed(delta.into());
        let place = (placed.buffer, offset, u64::from(memory.lane_bytes()));
        worker.note_between_ctas(place, access, site.position, Some((site.warp, lane)))?;
    }
    Ok(())
}

#[inline(always)]
fn check_written(
    buffer: &crate::memory::Buffer,
    offset: u64,
    memory: &MemoryOp,
    lane: u32,
    site: &Site,
) -> Result<(), Fail> {
    if buffer.is_written(offset, memory.lane_bytes()) {
        return Ok(());
    }
    let address = buffer.base() + offset;
    Err(site.fail(FaultKind::Uninitialised { space: "global", address, bytes: memory.lane_bytes() }, lane))
}

#[inline(always)]
fn load_element(buffer: &crate::memory::Buffer, offset: u64, bytes: u32) -> u64 {
    match bytes {
        1 | 2 => buffer.load_bytes(offset, bytes).into(),
        4 => buffer.load_word(offset).into(),
        _ => u64::from(buffer.load_word(offset)) | u64::from(buffer.load_word(offset + 4)) << 32,
    }
}

#[inline(always)]
fn store_element(buffer: &crate::memory::Buffer, offset: u64, bytes: u32, value: u64) {
    match bytes {
        1 | 2 => buffer.store_bytes(offset, bytes, value),
        4 => buffer.store_word(offset, value as u32),
        _ => {
            buffer.store_word(offset, value as u32);
            buffer.store_word(offset + 4, (value >> 32) as u32);
        }
    }
}

#[inline(always)]
pub(crate) fn store_global(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let site = Site { position: memory.position, warp: warp.index };
    let addresses = addresses64(&File::of(warp), memory.base, memory.offset);
    let mut mask = mask;
    if memory.generic {
        mask = windows(worker, warp, memory, &addresses, mask, true)?;
        if mask == 0 {
            return Ok(());
        }
    }
    let file = File::of(warp);
    let job = worker.job;
    let Some(placed) = global_shape(worker, memory, op.aux as usize, &addresses, mask, &site)? else {
        return scattered(
            worker,
            memory,
            op.aux as usize,
            &addresses,
            mask,
            &site,
            Direction::Write,
            |worker, lane, buffer, offset| {
                let buffer = &worker.job.memory.buffers()[buffer];
                for (element, register) in memory.registers.iter().enumerate() {
                    if let Some(register) = *register {
                        store_element(
                            buffer,
                            offset + element as u64 * u64::from(memory.bytes),
                            memory.bytes,
                            file.full(register)[lane],
                        );
                    }
                }
                buffer.mark_written(offset, memory.lane_bytes().into());
                Ok(())
            },
        );
    };
    let pattern = &worker.shapes[op.aux as usize].patterns[placed.shape];
    let buffer = &job.memory.buffers()[placed.buffer];
    worker.touched.note(placed.buffer, placed.offset, &pattern.sectors, Direction::Write);
    if job.global_races.is_some() {
        note_lanes(worker, memory, &placed, op.aux, Access::Write, &site)?;
    }
    let pattern = &worker.shapes[op.aux as usize].patterns[placed.shape];
    let base = buffer.base();
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        let values = file.full(register);
        for lane in lanes_of(mask) {
            store_element(
                buffer,
                addresses[lane] - base + element as u64 * u64::from(memory.bytes),
                memory.bytes,
                values[lane],
            );
        }
    }
    if buffer.tracks_writes() {
        for &delta in &pattern.distinct {
            buffer.mark_written(placed.offset.wrapping_add_signed(delta.into()), memory.lane_bytes().into());
        }
    }
    Ok(())
}

/// A generic access to shared or local memory, lane by lane.
#[cold]
fn generic(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    memory: &MemoryOp,
    addresses: &[u64; WARP],
    mask: u32,
    space: &'static str,
    store: bool,
) -> Result<(), Fail> {
    if space == "local" {
        let narrow = addresses.map(|address| address.wrapping_sub(LOCAL_WINDOW));
        return local_lanes(worker, warp, memory, &narrow, mask, store);
    }
    let narrow = addresses.map(|address| address.wrapping_sub(SHARED_WINDOW));
    cluster_lanes(worker, warp, memory, &narrow, mask, if store { Way::Store } else { Way::Load })
}

/// How lanes access the shared memory of their cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Load,
    Store,
    Atomic,
}

/// A load, store or atomic by `shared::cluster` addresses.
#[inline(never)]
pub(crate) fn cluster(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let addresses = addresses32(&File::of(warp), memory.base, memory.offset).map(u64::from);
    let way = match (&memory.atomic, op.d) {
        (Some(_), _) => Way::Atomic,
        (None, 0) => Way::Load,
        (None, _) => Way::Store,
    };
    cluster_lanes(worker, warp, memory, &addresses, mask, way)
}

/// An access to shared memory of the CTA's cluster, lane by lane.
fn cluster_lanes(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    memory: &MemoryOp,
    addresses: &[u64; WARP],
    mask: u32,
    way: Way,
) -> Result<(), Fail> {
    let site = Site { position: memory.position, warp: warp.index };
    let size = worker.shared.len();
    let (bytes, lane_bytes) = (memory.bytes as usize, memory.lane_bytes());
    let rule = bank_rule(worker, way != Way::Load);
    let Some(pattern) = Pattern::new(Kind::Shared(rule), addresses, mask, lane_bytes, &memory.merged) else {
        return Err(site.shared_bounds(addresses[0], lane_bytes, size, 0));
    };
    if let Some(lane) = pattern.misaligned {
        let address = addresses[lane as usize];
        return Err(site.fail(FaultKind::Misaligned { space: "shared", address, bytes: lane_bytes }, lane));
    }
    let mut places = [(0, 0); WARP];
    for lane in lanes_of(mask) {
        let fail = |kind| site.fail(kind, lane as u32);
        let (rank, start) = worker.resolve(addresses[lane] as u32).map_err(fail)?;
        if start as usize + lane_bytes as usize > size {
            return Err(site.shared_bounds(start.into(), lane_bytes, size, lane as u32));
        }
        let (word, bits) = word_bits(start as usize, lane_bytes as usize);
        if way != Way::Load
            && let Some(reader) = worker.flights_of(rank).reader_of(word, bits)
        {
            return Err(overwritten(worker.job, reader, &site));
        }
        let (_, written) = worker.memory_of(rank);
        if way == Way::Store {
            written[word] |= bits;
        } else if written[word] & bits != bits {
            let kind = match rank == worker.rank {
                true => worker.unwritten(start, lane_bytes),
                false => FaultKind::Uninitialised { space: "shared", address: start.into(), bytes: lane_bytes },
            };
            return Err(fail(kind));
        }
        let access = match way {
            Way::Load => Access::Read,
            Way::Store => Access::Write,
            Way::Atomic => Access::Atomic,
        };
        worker.races.note_at(site.warp, rank, (word, bits), access, site.position);
        places[lane] = (rank, start as usize);
    }
    worker.ptx[memory.position] += pattern.ptx;
    worker.merged[memory.position] += pattern.merged;
    let mut file = File::of(warp);
    if let (Way::Atomic, Some(atomic)) = (way, &memory.atomic) {
        for (element, [a, b]) in atomic.operands.iter().enumerate() {
            let (a, b) = (file.full(*a), file.full(*b));
            let mut old = [0; WARP];
            for lane in lanes_of(mask) {
                let (rank, start) = places[lane];
                let (shared, _) = worker.memory_of(rank);
                let place = &mut shared[start + element * bytes..start + (element + 1) * bytes];
                old[lane] = atomic.apply(place, a[lane], b[lane]);
            }
            if let Some(Some(register)) = memory.registers.get(element) {
                file.set(*register, old, mask);
            }
        }
        return Ok(());
    }
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        let mut values = file.full(register);
        for lane in lanes_of(mask) {
            let (rank, start) = places[lane];
            let (shared, _) = worker.memory_of(rank);
            let place = &mut shared[start + element * bytes..start + (element + 1) * bytes];
            if way == Way::Store {
                place.copy_from_slice(&values[lane].to_le_bytes()[..bytes]);
            } else {
                let value = number(place);
                values[lane] = extended(value, memory.bytes, memory.extend, register.1);
            }
        }
        if way == Way::Load {
            file.set(register, values, mask);
        }
    }
    Ok(())
}

#[inline(never)]
pub(crate) fn local(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32, store: bool) -> Result<(), Fail> {
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let addresses = addresses64(&File::of(warp), memory.base, memory.offset);
    local_lanes(worker, warp, memory, &addresses, mask, store)
}

fn local_lanes(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    memory: &MemoryOp,
    addresses: &[u64; WARP],
    mask: u32,
    store: bool,
) -> Result<(), Fail> {
    let site = Site { position: memory.position, warp: warp.index };
    let size = worker.program.local_bytes;
    let first_thread = warp.index * WARP;
    let mut file = File::of(warp);
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        let mut values = file.full(register);
        for lane in lanes_of(mask) {
            let address = addresses[lane].wrapping_add(element as u64 * u64::from(memory.bytes));
            if address.checked_add(memory.bytes.into()).is_none_or(|end| end > size) {
                let allocations = format!("the thread's {size} bytes of local memory");
                return Err(site.fail(
                    FaultKind::OutOfBounds { space: "local", address, bytes: memory.bytes, allocations },
                    lane as u32,
                ));
            }
            if !address.is_multiple_of(memory.bytes.into()) {
                return Err(
                    site.fail(FaultKind::Misaligned { space: "local", address, bytes: memory.bytes }, lane as u32)
                );
            }
            let start = (first_thread + lane) * size as usize + address as usize;
            let place = &mut worker.local[start..start + memory.bytes as usize];
            if store {
                place.copy_from_slice(&values[lane].to_le_bytes()[..memory.bytes as usize]);
            } else {
                let value = number(place);
                values[lane] = extended(value, memory.bytes, memory.extend, register.1);
            }
        }
        if !store {
            file.set(register, values, mask);
        }
    }
    Ok(())
}

#[inline(never)]
pub(crate) fn load_constant(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    let memory = &worker.program.memory[op.aux as usize];
    let site = Site { position: memory.position, warp: warp.index };
    let (constants, space) = match op.code {
        Code::LoadParameter => (worker.program.params.as_slice(), "parameter"),
        _ => (worker.program.constant_memory.as_slice(), "constant"),
    };
    let mut file = File::of(warp);
    let addresses = addresses64(&file, memory.base, memory.offset);
    for (element, register) in memory.registers.iter().enumerate() {
        let Some(register) = *register else { continue };
        let mut values = file.full(register);
        for lane in lanes_of(mask) {
            let address = addresses[lane].wrapping_add(element as u64 * u64::from(memory.bytes));
            let range = usize::try_from(address)
                .ok()
                .and_then(|start| constants.get(start..start.checked_add(memory.bytes as usize)?));
            let Some(bytes) = range else {
                let allocations = format!("the {} bytes of {space} memory", constants.len());
                return Err(
                    site.fail(FaultKind::OutOfBounds { space, address, bytes: memory.bytes, allocations }, lane as u32)
                );
            };
            let value = number(bytes);
            values[lane] = extended(value, memory.bytes, memory.extend, register.1);
        }
        file.set(register, values, mask);
    }
    Ok(())
}

/// Lanes of one instruction take effect in order. Atomics do not race with each other.
#[inline(never)]
pub(crate) fn atomic_shared(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let Some(atomic) = &memory.atomic else { return Ok(()) };
    let site = Site { position: memory.position, warp: warp.index };
    let mut file = File::of(warp);
    let addresses = addresses32(&file, memory.base, memory.offset);
    shared_shape(worker, memory, op, &addresses, mask, &site)?;
    let bytes = memory.bytes as usize;
    let whole = memory.lane_bytes();
    for lane in lanes_of(mask) {
        let start = addresses[lane] as usize;
        let (word, bits) = word_bits(start, whole as usize);
        if worker.written[word] & bits != bits {
            return Err(site.fail(worker.unwritten(start as u32, whole), lane as u32));
        }
        worker.races.open[site.warp].note(word, bits, Access::Atomic, site.position, 0);
    }
    for (element, [a, b]) in atomic.operands.iter().enumerate() {
        let (a, b) = (file.full(*a), file.full(*b));
        let mut old = [0u64; WARP];
        for lane in lanes_of(mask) {
            let start = addresses[lane] as usize + element * bytes;
            let place = &mut worker.shared[start..start + bytes];
            old[lane] = atomic.apply(place, a[lane], b[lane]);
        }
        if let Some(Some(register)) = memory.registers.get(element) {
            file.set(*register, old, mask);
        }
    }
    for lane in lanes_of(mask) {
        worker.flag(warp, (worker.rank, addresses[lane]), site.position)?;
    }
    Ok(())
}

/// See [`atomic_shared`].
#[inline(never)]
pub(crate) fn atomic_global(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let Some(atomic) = &memory.atomic else { return Ok(()) };
    let site = Site { position: memory.position, warp: warp.index };
    let mut file = File::of(warp);
    let addresses = addresses64(&file, memory.base, memory.offset);
    let operands: Vec<_> = atomic.operands.iter().map(|[a, b]| (file.full(*a), file.full(*b))).collect();
    let mut old = vec![[0u64; WARP]; operands.len()];
    scattered(
        worker,
        memory,
        op.aux as usize,
        &addresses,
        mask,
        &site,
        Direction::Write,
        |worker, lane, buffer, offset| {
            let buffer = &worker.job.memory.buffers()[buffer];
            check_written(buffer, offset, memory, lane as u32, &site)?;
            // The elements of a vector are updated one by one (PTX ISA, `atom`).
            for (element, ((a, b), old)) in operands.iter().zip(&mut old).enumerate() {
                let at = offset + element as u64 * u64::from(memory.bytes);
                old[lane] = buffer.update(at, memory.bytes, |old| (atomic.update)(old, a[lane], b[lane]));
            }
            Ok(())
        },
    )?;
    if memory.lane_bytes() == 2 {
        // A loop of compare and swap on the word around it, in which each round one lane of each word succeeds.
        let word = |lane: usize| addresses[lane] / 4;
        let sharing = |lane: usize| lanes_of(mask).filter(|&other| word(other) == word(lane)).count();
        let rounds = lanes_of(mask).map(sharing).max().unwrap_or(0) as u64;
        let counted =
            crate::report::InstructionCounters { wavefronts: rounds, wavefronts_ideal: 1, ..Default::default() };
        worker.ptx[memory.position] += counted;
        worker.merged[memory.position] += counted;
    }
    for (register, old) in memory.registers.iter().zip(old) {
        if let Some(register) = register {
            file.set(*register, old, mask);
        }
    }
    Ok(())
}

/// Copies of a warp in flight at most: a kernel that never waits must not fill the memory.
const MAX_COPIES: usize = 1 << 16;

/// `cp.async`: the bytes are read now and arrive by policy; until then the destination counts as unwritten.
#[inline(never)]
pub(crate) fn copy_async(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    let program = worker.program;
    let memory = &program.memory[op.aux as usize];
    let Some((source_base, source_offset)) = memory.source else { return Ok(()) };
    let site = Site { position: memory.position, warp: warp.index };
    let (to, from, take) = {
        let file = File::of(warp);
        let take = memory.take.map(|place| file.narrow(place));
        (addresses32(&file, memory.base, memory.offset), addresses64(&file, source_base, source_offset), take)
    };
    let size = worker.shared.len();
    let bytes = memory.bytes;
    for lane in lanes_of(mask) {
        if to[lane] as usize + bytes as usize > size {
            return Err(site.shared_bounds(to[lane].into(), bytes, size, lane as u32));
        }
        if to[lane] % bytes != 0 {
            return Err(
                site.fail(FaultKind::Misaligned { space: "shared", address: to[lane].into(), bytes }, lane as u32)
            );
        }
    }
    if !worker.flights.is_empty() {
        for lane in lanes_of(mask) {
            let (word, bits) = word_bits(to[lane] as usize, bytes as usize);
            if let Some(reader) = worker.flights.reader_of(word, bits) {
                return Err(overwritten(worker.job, reader, &site));
            }
        }
    }
    // Lanes that take no bytes read nothing (9.7.9.25.3.1).
    let taken = |lane: usize| take.map_or(bytes, |take| take[lane].min(bytes));
    let reading = lanes_of(mask).filter(|&lane| taken(lane) > 0).fold(0u32, |reading, lane| reading | 1 << lane);
    let mut copies = Vec::with_capacity(WARP);
    let mut contents = [[0u8; 16]; WARP];
    let mut read = |worker: &Worker<'_>, lane: usize, buffer: usize, offset: u64| {
        let buffer = &worker.job.memory.buffers()[buffer];
        for word in 0..bytes.div_ceil(4) {
            if 4 * word < taken(lane) {
                if !buffer.is_written(offset + 4 * u64::from(word), 4) {
                    let address = buffer.base() + offset + 4 * u64::from(word);
                    return Err(site.fail(FaultKind::Uninitialised { space: "global", address, bytes: 4 }, lane as u32));
                }
                let value = buffer.load_word(offset + 4 * u64::from(word));
                contents[lane][4 * word as usize..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        contents[lane][taken(lane) as usize..].fill(0);
        Ok(())
    };
    if reading != 0 {
        match global_shape(worker, memory, op.aux as usize, &from, reading, &site)? {
            Some(placed) => {
                let pattern = &worker.shapes[op.aux as usize].patterns[placed.shape];
                worker.touched.note(placed.buffer, placed.offset, &pattern.sectors, Direction::Read);
                let base = worker.job.memory.buffers()[placed.buffer].base();
                for lane in lanes_of(reading) {
                    let offset = from[lane] - base;
                    let place = (placed.buffer, offset, u64::from(taken(lane)));
                    worker.note_between_ctas(place, Access::Read, site.position, None)?;
                    read(worker, lane, placed.buffer, offset)?;
                }
            }
            None => {
                scattered(
                    worker,
                    memory,
                    op.aux as usize,
                    &from,
                    reading,
                    &site,
                    Direction::Read,
                    |worker, lane, buffer, offset| read(worker, lane, buffer, offset),
                )?;
            }
        }
    }
    for lane in lanes_of(mask) {
        copies.push(PendingCopy {
            to: to[lane] as usize,
            bytes: contents[lane][..bytes as usize].to_vec(),
            lane: lane as u8,
            position: memory.position,
        });
    }
    copies.iter().for_each(|copy| worker.leave_stale(copy));
    if worker.job.completes_now() || (worker.job.is_random() && worker.draw().is_multiple_of(2)) {
        copies.iter().for_each(|copy| worker.deliver(site.warp, copy));
        return Ok(());
    }
    for copy in &copies {
        let (word, bits) = word_bits(copy.to, copy.bytes.len());
        worker.written[word] &= !bits;
        for at in (copy.to..copy.to + copy.bytes.len()).step_by(4) {
            worker.unwaited.insert(at as u32, copy.position as u32);
        }
    }
    worker.written_since += 1;
    if let Some(filling) = warp.copies.last_mut() {
        filling.append(&mut copies);
    }
    if warp.copies.iter().map(Vec::len).sum::<usize>() > MAX_COPIES {
        worker.races.forgot = true;
        worker.finish_copies(warp, 0, true);
    }
    Ok(())
}
