//! `wgmma`: products that the four warps of a warpgroup start together and wait for later (PTX ISA 9.7.15).
//!
//! The emulator computes a product when the last of the four warps arrives at it. What a chip may do later shows in what the
//! kernel must not touch in the meantime, and that is watched under every [`Policy`](crate::Policy): a product is in flight
//! until its warp waits for its group (`wgmma.commit_group`, `wgmma.wait_group`). Until then
//!
//! - its registers (accumulator and fragments of A) must be neither read nor written, save by a product of the same shape that
//!   accumulates into the same registers (9.7.15.7.3), and by a `mov` that takes a packed accumulator apart: compilers put it
//!   before the wait, `ptxas` puts the wait before it (its note C7517), and what counts is when the halves are used;
//! - the shared memory that it reads must not be overwritten.
//!
//! Registers that were written since the last `wgmma.fence` must not be given to a product (9.7.15.7.1). The same holds before the
//! first fence of a kernel.

use std::collections::VecDeque;

use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::lanes::{ALL, Lanes};
use crate::program::{Op, PredicateRef, WATCHED};
use crate::race::{Access, Interval};
use crate::tensor::descriptor::{CHUNK, Descriptor, Major};
use crate::tensor::fragment::read_a;
use crate::tensor::numerics::{self, Element, Vectorised, widened};
use crate::tensor::{Shape, TensorOp, uniform};
use crate::warp::{State, Warp};

/// Warps of a warpgroup.
const GROUP: usize = 4;

/// A decoded `wgmma.mma_async`. Places are of the narrow file, descriptors of the wide one.
#[derive(Clone, Debug)]
pub(crate) struct WgmmaOp {
    /// A warp's part.
    pub shape: Shape,
    pub a: MatrixA,
    pub b: u32,
    pub b_major: Major,
    /// Whether what the accumulator holds is added to.
    pub scale_d: PredicateRef,
    /// Whether the product is subtracted.
    pub negate: bool,
    pub d: Vec<u32>,
    /// Numbers of the watched registers.
    pub accumulators: Vec<u32>,
    pub fragments: Vec<u32>,
    pub position: usize,
}

/// Where A comes from.
#[derive(Clone, Debug)]
pub(crate) enum MatrixA {
    Registers(Vec<u32>),
    Shared { descriptor: u32, major: Major },
}

/// The watched registers that an instruction which is no `wgmma` touches, and whether it writes them.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    pub guard: Option<PredicateRef>,
    pub touches: Vec<(u32, bool)>,
    /// The accumulator of which a `mov` writes the parts: they are in flight as long as it is.
    pub parts_of: Option<u32>,
}

/// A product in flight.
#[derive(Clone, Debug)]
struct Flight {
    /// Its place in the program's table, and in the kernel.
    op: u32,
    position: usize,
    /// The warps that have not waited for it.
    warps: u64,
    /// What it reads, as bits of 64-byte words; and what it reads for each warp alone, and for all.
    reads: Vec<(u32, u64)>,
    parts: [Vec<(u32, u64)>; GROUP],
    all: Vec<(u32, u64)>,
}

/// The products of a CTA that are in flight, numbered from its start.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    first: u32,
    flights: VecDeque<Flight>,
    /// One bit per byte of shared memory, all clear between uses, and the words that are not.
    marks: Vec<u64>,
    marked: Vec<u32>,
    scratch: Vec<f32>,
}

/// Products of a CTA that are watched at once; of more, the oldest are taken for finished.
const MOST: usize = 1 << 12;

impl Flights {
    pub(crate) fn reset(&mut self, shared_bytes: usize) {
        self.first = 0;
        self.flights.clear();
        self.marks.resize(shared_bytes.div_ceil(64), 0);
    }

    /// Whether nothing is in flight.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    fn get(&self, number: u32) -> Option<&Flight> {
        self.flights.get(number.checked_sub(self.first)? as usize)
    }

    fn start(&mut self, flight: Flight) -> u32 {
        if self.flights.len() == MOST {
            self.flights.pop_front();
            self.first += 1;
        }
        self.flights.push_back(flight);
        self.first + self.flights.len() as u32 - 1
    }

    /// A warp has waited for a product.
    fn land(&mut self, number: u32, warp: usize, interval: &mut Interval) {
        if let Some(index) = number.checked_sub(self.first)
            && let Some(flight) = self.flights.get_mut(index as usize)
        {
            flight.warps &= !(1 << warp);
            // It may have read them up to now.
            for &(word, bits) in flight.parts[warp % GROUP].iter().chain(&flight.all) {
                interval.note(word as usize, bits, Access::Read, flight.position, 0);
            }
        }
        while self.flights.front().is_some_and(|flight| flight.warps == 0) {
            self.flights.pop_front();
            self.first += 1;
        }
    }

    /// The product in flight that reads some of these bytes: its position, and the first of those bytes.
    #[cold]
    pub(crate) fn reader_of(&self, word: usize, bits: u64) -> Option<(usize, u64)> {
        // Those that all warps have waited for stay behind older ones of other warpgroups.
        self.flights.iter().filter(|flight| flight.warps != 0).find_map(|flight| {
            let index = flight.reads.binary_search_by_key(&(word as u32), |&(word, _)| word).ok()?;
            let both = flight.reads[index].1 & bits;
            (both != 0).then(|| (flight.position, word as u64 * 64 + u64::from(both.trailing_zeros())))
        })
    }

    /// Marks a chunk's bytes.
    #[inline(always)]
    fn mark(&mut self, address: u32) {
        let word = address / 64;
        let marks = &mut self.marks[word as usize];
        if *marks == 0 {
            self.marked.push(word);
        }
        *marks |= 0xffff << (address % 64);
    }

    /// The marked bytes, which are no longer marked.
    fn take_marked(&mut self) -> Vec<(u32, u64)> {
        let mut words = Vec::with_capacity(self.marked.len());
        for word in self.marked.drain(..) {
            words.push((word, std::mem::take(&mut self.marks[word as usize])));
        }
        words
    }
}

/// A watched register: nothing is to be said of it, or it was written since the last fence; from [`FLYING`] on, twice the number
/// of the product that it belongs to, plus one where it is a fragment of A.
const CLEAN: u32 = 0;
const WRITTEN: u32 = 1;
const FLYING: u32 = 2;

fn flying(number: u32, fragment: bool) -> u32 {
    FLYING + 2 * number + u32::from(fragment)
}

/// What a warp knows of its products.
#[derive(Clone, Debug, Default)]
pub(crate) struct WgmmaState {
    registers: Vec<u32>,
    /// The products of each group that was not waited for, the oldest first; the last is the one being filled.
    groups: Vec<Vec<u32>>,
}

impl WgmmaState {
    /// Starts over with so many watched registers. No fence has been executed: all count as written.
    pub(crate) fn reset(&mut self, registers: usize) {
        self.registers.clear();
        self.registers.resize(registers, WRITTEN);
        self.groups.clear();
        self.groups.push(Vec::new());
    }

    pub(crate) fn fence(&mut self) {
        for register in &mut self.registers {
            if *register == WRITTEN {
                *register = CLEAN;
            }
        }
    }

    pub(crate) fn commit(&mut self) {
        self.groups.push(Vec::new());
    }

    /// Waits until at most `remaining` groups are in flight.
    pub(crate) fn wait(&mut self, warp: usize, remaining: usize, flights: &mut Flights, interval: &mut Interval) {
        let mut last = None;
        while self.groups.len() > remaining.saturating_add(1) {
            for number in self.groups.remove(0) {
                flights.land(number, warp, interval);
                last = Some(number);
            }
        }
        // Products land in order: those of this warp up to the last one have.
        if let Some(last) = last {
            for register in &mut self.registers {
                if *register >= FLYING && (*register - FLYING) / 2 <= last {
                    *register = CLEAN;
                }
            }
        }
    }

    fn is_committed(&self, number: u32) -> bool {
        !self.groups.last().is_some_and(|open| open.contains(&number))
    }
}

/// The guard of an instruction that touches watched registers, if it may.
#[inline(never)]
pub(crate) fn watch(worker: &Worker<'_>, warp: &mut Warp, op: &Op) -> Result<u32, Fail> {
    let watch = &worker.program.watched[(op.guard & !WATCHED) as usize];
    let mask = match watch.guard {
        Some(guard) if guard & 1 == 1 => !warp.predicates[(guard / 2) as usize],
        Some(guard) => warp.predicates[(guard / 2) as usize],
        None => ALL,
    };
    let active = mask & warp.active;
    if active != 0 {
        let whole = watch.parts_of.map(|whole| warp.wgmma.registers[whole as usize]);
        if let Some(whole) = whole.filter(|whole| *whole >= FLYING) {
            for &(number, _) in watch.touches.iter().filter(|(_, written)| *written) {
                warp.wgmma.registers[number as usize] = whole;
            }
            return Ok(mask);
        }
        for &(number, written) in &watch.touches {
            let register = &mut warp.wgmma.registers[number as usize];
            if *register >= FLYING {
                let access = if written { "written" } else { "read" };
                let kind = touched(worker, warp, number, access);
                return Err(Box::new((kind, warp.pc, warp.index, active.trailing_zeros())));
            }
            if written {
                *register = WRITTEN;
            }
        }
    }
    Ok(mask)
}

/// A register that is touched while a product that it belongs to is in flight.
#[cold]
fn touched(worker: &Worker<'_>, warp: &Warp, number: u32, access: &'static str) -> FaultKind {
    let flight = (warp.wgmma.registers[number as usize] - FLYING) / 2;
    let wgmma = worker.flights.get(flight).map_or("unknown".into(), |flight| worker.job.instruction(flight.position));
    let remedy = if warp.wgmma.is_committed(flight) {
        "wait for its group with `wgmma.wait_group` first"
    } else {
        "no `wgmma.commit_group` has put it into a group: commit it, then wait with `wgmma.wait_group`"
    };
    FaultKind::WgmmaInFlight { register: worker.program.watched_names[number as usize].clone(), access, wgmma, remedy }
}

impl Worker<'_> {
    /// A warp has arrived at a `wgmma.mma_async`. The last of its warpgroup executes it for all.
    pub(crate) fn gather(&mut self, warps: &mut [Warp], index: usize) -> Result<(), Fail> {
        warps[index].state = State::Gathering;
        let first = index / GROUP * GROUP;
        let pc = warps[index].pc;
        let Some(group) = warps.get_mut(first..first + GROUP) else {
            return Err(self.incomplete(warps, index));
        };
        let gathering = |warp: &Warp| warp.state == State::Gathering;
        if group.iter().any(|warp| warp.state == State::Done || (gathering(warp) && warp.pc != pc)) {
            return Err(self.incomplete(warps, index));
        }
        if group.iter().all(gathering) {
            let group = group.as_mut_array::<GROUP>().ok_or_else(|| Box::new((FaultKind::Trap, pc, index, 0)))?;
            self.multiply(group, first, index)?;
            for warp in group {
                warp.state = State::Ready;
                warp.pc += 1;
            }
        }
        Ok(())
    }

    /// The fault of a warp that waits for others of its warpgroup which will not come.
    #[cold]
    pub(crate) fn incomplete(&self, warps: &[Warp], index: usize) -> Fail {
        let first = index / GROUP * GROUP;
        let (last, pc) = (first + GROUP - 1, warps[index].pc);
        let others = (first..=last).filter(|&other| other != index);
        let others: Vec<_> = others
            .map(|other| match warps.get(other) {
                None => format!("warp {other} does not exist"),
                Some(warp) if warp.state == State::Done => format!("warp {other} has ended"),
                Some(warp) => format!("warp {other} is at {}", self.job.instruction(warp.pc)),
            })
            .collect();
        let kind = FaultKind::Warpgroup { first: first as u32, last: last as u32, others: others.join("; ") };
        Box::new((kind, pc, index, 0))
    }

    /// Checks and computes a product for the four warps from `first` on; `index` is the one that arrived last.
    fn multiply(&mut self, warps: &mut [Warp; GROUP], first: usize, index: usize) -> Result<(), Fail> {
        let program = self.program;
        let pc = warps[0].pc;
        let aux = program.ops[pc].aux;
        let TensorOp::Wgmma(op) = &program.tensor[aux as usize] else { return Ok(()) };
        let fail = |warp: usize, kind: FaultKind| Box::new((kind, pc, warp, 0));
        for warp in warps.iter() {
            if let Some(kind) = self.refused(warp, op) {
                return Err(fail(warp.index, kind));
            }
        }

        let differ = |what: &'static str| fail(index, FaultKind::WgmmaDiffers { what });
        let same = |place: u32, what: &'static str| {
            let value = warps[0].wide[place as usize].0[0];
            let all = warps.iter().all(|warp| warp.wide[place as usize].0.iter().all(|&lane| lane == value));
            if all { Ok(value) } else { Err(differ(what)) }
        };
        let read = |place: u32, operand: &'static str| {
            let bits = same(place, if operand == "A" { "descriptor of A" } else { "descriptor of B" })?;
            Descriptor::decode(bits).map_err(|error| {
                fail(index, FaultKind::Descriptor { operand, descriptor: bits, problem: error.to_string() })
            })
        };
        let a = match op.a {
            MatrixA::Registers(_) => None,
            MatrixA::Shared { descriptor, major } => Some((read(descriptor, "A")?, major)),
        };
        let b = read(op.b, "B")?;
        let scale_d = uniform(&warps[0].predicates, op.scale_d).ok_or_else(|| differ("scale-d"))?;
        if warps.iter().any(|warp| uniform(&warp.predicates, op.scale_d) != Some(scale_d)) {
            return Err(differ("scale-d"));
        }

        let mut parts: [Vec<(u32, u64)>; GROUP] = Default::default();
        if let Some((descriptor, major)) = a {
            let bits = warps[0].wide[a_place(op) as usize].0[0];
            for (part, reads) in parts.iter_mut().enumerate() {
                let rows = 16 * part..16 * (part + 1);
                self.mark_matrix(&descriptor, major, op.shape.a, rows, op.shape.k)
                    .map_err(|address| fail(index, self.beyond("A", bits, address)))?;
                *reads = self.flights.take_marked();
                self.note_reads(reads, first + part..first + part + 1, op.position, pc, index)?;
            }
        }
        let bits = warps[0].wide[op.b as usize].0[0];
        self.mark_matrix(&b, op.b_major, op.shape.b, 0..op.shape.n, op.shape.k)
            .map_err(|address| fail(index, self.beyond("B", bits, address)))?;
        let all = self.flights.take_marked();
        self.note_reads(&all, first..first + GROUP, op.position, pc, index)?;
        let mut reads: Vec<_> = parts.iter().flatten().chain(&all).copied().collect();
        reads.sort_unstable();
        reads.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                kept.1 |= next.1;
            }
            same
        });

        let mut scratch = std::mem::take(&mut self.flights.scratch);
        let [w0, w1, w2, w3] = warps;
        let files = [&mut w0.narrow, &mut w1.narrow, &mut w2.narrow, &mut w3.narrow].map(Vec::as_mut_slice);
        let product = GroupProduct { op, files, shared: &self.shared, a, b, scale_d, scratch: &mut scratch };
        numerics::at(self.job.level, product);
        self.flights.scratch = scratch;

        let flight = Flight { op: aux, position: op.position, warps: 0xf << first, reads, parts, all };
        self.races.forgot |= self.flights.flights.len() == MOST;
        let number = self.flights.start(flight);
        for warp in warps {
            for &register in &op.accumulators {
                warp.wgmma.registers[register as usize] = flying(number, false);
            }
            for &register in &op.fragments {
                warp.wgmma.registers[register as usize] = flying(number, true);
            }
            if let Some(open) = warp.wgmma.groups.last_mut() {
                open.push(number);
            }
        }
        Ok(())
    }

    /// Why a warp's registers may not be given to a product, if so.
    fn refused(&self, warp: &Warp, op: &WgmmaOp) -> Option<FaultKind> {
        let registers = &warp.wgmma.registers;
        let written =
            op.accumulators.iter().chain(&op.fragments).find(|&&number| registers[number as usize] == WRITTEN);
        if let Some(&number) = written {
            return Some(FaultKind::WgmmaFence { register: self.program.watched_names[number as usize].clone() });
        }
        let same_shape = |register: u32| {
            let flight = self.flights.get((register - FLYING) / 2);
            let other = flight.and_then(|flight| match &self.program.tensor[flight.op as usize] {
                TensorOp::Wgmma(other) => Some(other),
                _ => None,
            });
            other.is_none_or(|other| {
                (other.shape.n, other.shape.k, other.shape.d) == (op.shape.n, op.shape.k, op.shape.d)
            })
        };
        let in_the_way = op.accumulators.iter().find(|&&number| {
            let register = registers[number as usize];
            register >= FLYING && (register % 2 == 1 || !same_shape(register))
        });
        // Fragments may be read by several products.
        let also = op.fragments.iter().find(|&&number| {
            let register = registers[number as usize];
            register >= FLYING && register.is_multiple_of(2)
        });
        in_the_way
            .map(|&number| (number, "taken as an accumulator of another shape"))
            .or(also.map(|&number| (number, "read as a fragment of A")))
            .map(|(number, access)| touched(self, warp, number, access))
    }

    /// Marks what a matrix occupies; an error is the address of a chunk outside shared memory.
    fn mark_matrix(
        &mut self,
        descriptor: &Descriptor,
        major: Major,
        element: Element,
        rows: std::ops::Range<usize>,
        k: usize,
    ) -> Result<(), u32> {
        let size = self.shared.len();
        let flights = &mut self.flights;
        let mut outside = None;
        let mut mark = |address: u32| {
            if address as usize + CHUNK > size {
                outside = outside.or(Some(address));
            } else {
                flights.mark(address);
            }
        };
        match major {
            Major::K => descriptor.for_each_k_major(rows.end, |row, _, address| {
                if row >= rows.start {
                    mark(address);
                }
            }),
            Major::Mn => {
                let per_chunk = 4 * element.per_word();
                descriptor.for_each_mn_major(rows.end / per_chunk, k, |_, unit, address| {
                    if unit * per_chunk >= rows.start {
                        mark(address);
                    }
                });
            }
        }
        match outside {
            None => Ok(()),
            Some(address) => {
                flights.take_marked();
                Err(address)
            }
        }
    }

    #[cold]
    fn beyond(&self, operand: &'static str, descriptor: u64, address: u32) -> FaultKind {
        let problem = format!(
            "it reaches 16 bytes at shared address {address:#x}; the CTA has {} bytes of shared memory",
            self.shared.len()
        );
        FaultKind::Descriptor { operand, descriptor, problem }
    }

    /// Checks what is read and notes it as read by warps.
    fn note_reads(
        &mut self,
        words: &[(u32, u64)],
        warps: std::ops::Range<usize>,
        position: usize,
        pc: usize,
        index: usize,
    ) -> Result<(), Fail> {
        warps.clone().for_each(|warp| self.fold_writes(warp));
        for &(word, bits) in words {
            let missing = bits & !self.written[word as usize];
            if missing != 0 {
                let address = u64::from(word) * 64 + u64::from(missing.trailing_zeros());
                let kind = self.unwritten(address as u32, 1);
                return Err(Box::new((kind, pc, index, 0)));
            }
            for warp in warps.clone() {
                self.async_read_word(warp, (word, bits), pc, index)?;
                self.races.open[warp].note(word as usize, bits, Access::Read, position, 0);
            }
        }
        Ok(())
    }
}

fn a_place(op: &WgmmaOp) -> u32 {
    match op.a {
        MatrixA::Shared { descriptor, .. } => descriptor,
        MatrixA::Registers(_) => op.b,
    }
}

/// The arithmetic of a product.
struct GroupProduct<'a> {
    op: &'a WgmmaOp,
    files: [&'a mut [Lanes]; GROUP],
    shared: &'a [u8],
    a: Option<(Descriptor, Major)>,
    b: Descriptor,
    scale_d: bool,
    scratch: &'a mut Vec<f32>,
}

impl Vectorised for GroupProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let op = self.op;
        let shape = &op.shape;
        let (n, k) = (shape.n, shape.k);
        self.scratch.resize(64 * k + k * n + 64 * n, 0.0);
        let (a, rest) = self.scratch.split_at_mut(64 * k);
        let (b, c) = rest.split_at_mut(k * n);
        match &op.a {
            MatrixA::Registers(places) => {
                for (file, a) in self.files.iter().zip(a.chunks_exact_mut(16 * k)) {
                    widened!(shape.a, read_a(file, places, 16, k, a));
                }
            }
            MatrixA::Shared { .. } => {
                if let Some((descriptor, major)) = &self.a {
                    widened!(shape.a, read_matrix(self.shared, descriptor, *major, (64, k), (k, 1), a));
                }
            }
        }
        if op.negate {
            a.iter_mut().for_each(|x| *x = -*x);
        }
        widened!(shape.b, read_matrix(self.shared, &self.b, op.b_major, (n, k), (1, n), b));
        let from = self.scale_d.then_some(op.d.as_slice());
        for (file, c) in self.files.iter().zip(c.chunks_exact_mut(16 * n)) {
            shape.read_accumulator(file, from, c);
        }
        shape.sums.multiply_add(a, b, c, k, n);
        for (file, c) in self.files.into_iter().zip(c.chunks_exact(16 * n)) {
            shape.write_accumulator(c, file, from, &op.d);
        }
    }
}

/// Reads a matrix of `extent` (rows or columns, depth) elements into `out`, where they lie `strides` apart.
#[inline(always)]
fn read_matrix<const E: usize>(
    widen: impl Fn(u32) -> [f32; E],
    shared: &[u8],
    descriptor: &Descriptor,
    major: Major,
    (rows, k): (usize, usize),
    strides: (usize, usize),
    out: &mut [f32],
) {
    let put = |out: &mut [f32], start: usize, step: usize, address: u32| {
        let bytes = &shared[address as usize..][..CHUNK];
        let words = bytes.as_chunks::<4>().0.iter().map(|bytes| widen(u32::from_le_bytes(*bytes)));
        if step == 1 {
            let out = &mut out[start..][..4 * E];
            for (out, words) in out.as_chunks_mut::<E>().0.iter_mut().zip(words) {
                *out = words;
            }
        } else {
            let out = &mut out[start..][..(4 * E - 1) * step + 1];
            for (index, words) in words.enumerate() {
                for (offset, word) in words.into_iter().enumerate() {
                    out[(index * E + offset) * step] = word;
                }
            }
        }
    };
    match major {
        Major::K => descriptor.for_each_k_major(rows, |row, chunk, address| {
            put(out, row * strides.0 + chunk * 4 * E * strides.1, strides.1, address);
        }),
        Major::Mn => descriptor.for_each_mn_major(rows / (4 * E), k, |depth, unit, address| {
            put(out, unit * 4 * E * strides.0 + depth * strides.1, strides.0, address);
        }),
    }
}
