//! Carries, comparisons that are not of vector code, and what the lanes of a warp find out about each other's values.

use ptx::{Instruction, Modifier, Opcode, Type};

use crate::cta::{Fail, Worker};
use crate::fault::FaultKind;
use crate::interpret::File;
use crate::lanes::{ALL, WARP};
use crate::pattern::lanes_of;
use crate::program::{Op, PredicateRef};
use crate::scalar::{Compare, Order};
use crate::warp::Warp;

/// Integer arithmetic that reads or writes the carry flag (PTX ISA 9.7.2). The flag is a predicate of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CarryOp {
    pub opcode: Opcode,
    /// `mad.hi`: the product's upper half.
    pub high: bool,
    pub signed: bool,
    /// Of the type.
    pub bits: u32,
    pub reads: bool,
    pub writes: bool,
    pub sources: [(u32, bool); 3],
    pub destination: (u32, bool),
    pub flag: u32,
}

impl CarryOp {
    /// The result, and whether it carried; of a subtraction, whether it borrowed.
    fn compute(&self, a: u64, b: u64, c: u64, carry: u64) -> (u64, bool) {
        let mask = u64::MAX >> (64 - self.bits);
        let sum = |a: u64, b: u64| {
            let sum = u128::from(a) + u128::from(b) + u128::from(carry);
            (sum as u64 & mask, sum >> self.bits & 1 == 1)
        };
        match self.opcode {
            Opcode::Sub | Opcode::Subc => {
                let difference = u128::from(a).wrapping_sub(u128::from(b)).wrapping_sub(u128::from(carry));
                (difference as u64 & mask, difference >> self.bits & 1 == 1)
            }
            Opcode::Mad | Opcode::Madc => {
                let product = if self.signed {
                    let extend = |x: u64| i128::from((x << (64 - self.bits)) as i64 >> (64 - self.bits));
                    (extend(a) * extend(b)) as u128
                } else {
                    u128::from(a) * u128::from(b)
                };
                let part = if self.high { product >> self.bits } else { product };
                sum(part as u64 & mask, c)
            }
            _ => sum(a, b),
        }
    }
}

/// Executes a [`CarryOp`].
pub(crate) fn carry(worker: &Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) {
    let info = &worker.program.carries[op.aux as usize];
    let mut file = File::of(warp);
    let [a, b, c] = info.sources.map(|source| file.full(source));
    let carried = file.predicate(2 * info.flag);
    let mut flags = 0;
    let mut out = [0; WARP];
    for lane in lanes_of(mask) {
        let carry = if info.reads { u64::from(carried >> lane & 1) } else { 0 };
        let (value, flag) = info.compute(a[lane], b[lane], c[lane], carry);
        out[lane] = value;
        flags |= u32::from(flag) << lane;
    }
    file.set(info.destination, out, mask);
    if info.writes {
        file.set_predicate(info.flag, flags, mask);
    }
}

/// What one instruction does that needs more than its [`Op`] holds, and no speed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SmallOp {
    /// `set` (PTX ISA, `set`): `yes` where the comparison holds, else 0; of a pair, in each half.
    Set { compare: Compare, order: Order, pair: bool, yes: u64, sources: [(u32, bool); 2], destination: (u32, bool) },
    /// `setp` of pairs of halves (PTX ISA, half-precision `setp`): a predicate for the lower halves, and one for the upper.
    ComparePair { compare: Compare, order: Order, combine: Option<(Modifier, PredicateRef)>, predicates: [u32; 2] },
    /// `lop3` that also says whether the result is not zero.
    Logic { table: u8, combine: (Modifier, PredicateRef), predicate: u32 },
    /// A clock register: warp instructions that the cluster has executed, shifted down by so many bits.
    Clock { shift: u32, destination: (u32, bool) },
    /// Both halves of a 128-bit value, each a wide register: from, to.
    Move128 { from: [u32; 2], to: [u32; 2] },
    /// `mov` of a value into four parts (PTX ISA, `mov` that unpacks), the lowest first, each of so many bits.
    Unpack { from: (u32, bool), bits: u32, parts: [(u32, bool); 4] },
    /// `mov` of four parts into a value.
    Pack { parts: [(u32, bool); 4], bits: u32, to: (u32, bool) },
    /// `setmaxnreg`: the registers a thread may have from now on.
    MaxRegisters { count: u32 },
}

/// Executes a [`SmallOp`]. `now` is what clocks show.
#[inline(never)]
pub(crate) fn execute(worker: &mut Worker<'_>, warp: &mut Warp, op: &Op, mask: u32, now: u64) -> Result<(), Fail> {
    let holds = |compare: Compare, order: Order, a: u64, b: u64| {
        let (less, equal, greater) = order(a, b);
        compare.mask(less.into(), equal.into(), greater.into()) & 1 == 1
    };
    let combined = |file: &File<'_>, value: u32, combine: Option<(Modifier, PredicateRef)>| match combine {
        Some((Modifier::And, with)) => value & file.predicate(with),
        Some((Modifier::Or, with)) => value | file.predicate(with),
        Some((_, with)) => value ^ file.predicate(with),
        None => value,
    };
    let mut file = File::of(warp);
    match worker.program.small[op.aux as usize] {
        SmallOp::Set { compare, order, pair, yes, sources, destination } => {
            let [a, b] = sources.map(|source| file.full(source));
            let out = std::array::from_fn(|lane| {
                let half = |shift: u32| {
                    let part = |x: u64| if pair { x >> shift & 0xffff } else { x };
                    if holds(compare, order, part(a[lane]), part(b[lane])) { yes << shift } else { 0 }
                };
                if pair { half(0) | half(16) } else { half(0) }
            });
            file.set(destination, out, mask);
        }
        SmallOp::ComparePair { compare, order, combine, predicates } => {
            let (a, b) = (file.narrow(op.a), file.narrow(op.b));
            for (place, shift) in predicates.into_iter().zip([0, 16]) {
                let half = |x: u32| u64::from(x >> shift & 0xffff);
                let value = (0..WARP)
                    .filter(|&lane| holds(compare, order, half(a[lane]), half(b[lane])))
                    .fold(0, |value, lane| value | 1 << lane);
                let value = combined(&file, value, combine);
                file.set_predicate(place, value, mask);
            }
        }
        SmallOp::Logic { table, combine, predicate } => {
            let sources = [file.narrow(op.a), file.narrow(op.b), file.narrow(op.c)];
            let out: [u32; WARP] = std::array::from_fn(|lane| {
                let row = |row: u32| {
                    let pick = |place: usize| {
                        let value = sources[place][lane];
                        if row >> (2 - place) & 1 == 1 { value } else { !value }
                    };
                    pick(0) & pick(1) & pick(2)
                };
                (0..8).filter(|bit| table >> bit & 1 == 1).fold(0, |out, bit| out | row(bit))
            });
            let value = (0..WARP).filter(|&lane| out[lane] != 0).fold(0, |value, lane| value | 1 << lane);
            let value = combined(&file, value, Some(combine));
            file.set_narrow(op.d, out, mask);
            file.set_predicate(predicate, value, mask);
        }
        SmallOp::Clock { shift, destination } => file.set(destination, [now >> shift; WARP], mask),
        SmallOp::Move128 { from, to } => {
            let values = from.map(|place| file.wide(place));
            for (place, values) in to.into_iter().zip(values) {
                file.set_wide(place, values, mask);
            }
        }
        SmallOp::Unpack { from, bits, parts } => {
            let whole = file.full(from);
            for (place, shift) in parts.into_iter().zip((0..).step_by(bits as usize)) {
                file.set(place, whole.map(|whole| whole >> shift & ((1 << bits) - 1)), mask);
            }
        }
        SmallOp::Pack { parts, bits, to } => {
            let parts = parts.map(|part| file.full(part));
            let whole = |lane: usize| {
                parts.iter().rev().fold(0u64, |whole, part| whole << bits | part[lane] & ((1 << bits) - 1))
            };
            file.set(to, std::array::from_fn(whole), mask);
        }
        SmallOp::MaxRegisters { count } => return max_registers(worker, warp, count, mask),
    }
    Ok(())
}

/// Warps of a warpgroup.
const GROUP: usize = 4;

/// What the warps of a warpgroup have asked for by `setmaxnreg`.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegisterRequest {
    count: u32,
    /// The warps that have, by their place in the group, until all of them have.
    warps: u32,
    position: usize,
}

/// PTX ISA, `setmaxnreg`: all threads of a warpgroup execute the same one, and synchronise before the next. A next one of the same
/// count changes nothing, whichever warps execute it first: compilers put one at the head of a loop that is entered with it.
fn max_registers(worker: &mut Worker<'_>, warp: &Warp, count: u32, mask: u32) -> Result<(), Fail> {
    if mask == 0 {
        return Ok(());
    }
    if mask != warp.live {
        let kind = FaultKind::Divergent { active: mask, expected: warp.live };
        return Err(Box::new((kind, warp.pc, warp.index, mask.trailing_zeros())));
    }
    let (group, place) = (warp.index / GROUP, 1 << (warp.index % GROUP));
    let warps = worker.job.warps().saturating_sub(group * GROUP).min(GROUP);
    if worker.register_requests.len() <= group {
        worker.register_requests.resize(group + 1, RegisterRequest::default());
    }
    let request = &mut worker.register_requests[group];
    if request.count == count && (request.warps == 0 || request.warps & place != 0) {
        return Ok(());
    }
    if request.warps != 0 && request.count != count {
        let position = request.position;
        return Err(worker.register_failure(group, position, (warp.pc, warp.index)));
    }
    *request = RegisterRequest { count, warps: request.warps | place, position: warp.pc };
    if request.warps.count_ones() as usize == warps {
        request.warps = 0;
    }
    Ok(())
}

impl Worker<'_> {
    /// The fault of a warpgroup whose warps do not all execute the same `setmaxnreg`, one of which is at `position`.
    #[cold]
    fn register_failure(&self, group: usize, position: usize, (pc, warp): (usize, usize)) -> Fail {
        let others =
            format!("not all executed {}: one executed another, or its next, or ended", self.job.instruction(position));
        let (first, last) = ((group * GROUP) as u32, (group * GROUP + GROUP - 1) as u32);
        Box::new((FaultKind::Warpgroup { first, last, others }, pc, warp, 0))
    }

    /// Whether each `setmaxnreg` of a CTA that ends was executed by all warps of the warpgroup.
    pub(crate) fn end_register_requests(&mut self) -> Result<(), Fail> {
        let open = self.register_requests.iter().enumerate().find(|(_, request)| request.warps != 0);
        let failure = open.map(|(group, request)| {
            let warp = group * GROUP + request.warps.trailing_zeros() as usize;
            self.register_failure(group, request.position, (request.position, warp))
        });
        self.register_requests.clear();
        failure.map_or(Ok(()), Err)
    }
}

/// A function of one value per lane, which all members of the mask execute together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WarpFunction {
    /// `match.any.sync` (PTX ISA, `match.sync`): the lanes that have the same value.
    MatchAny { value: (u32, bool) },
    /// `match.all.sync`: all of them where they agree, else 0; and the predicate that says so.
    MatchAll { value: (u32, bool), same: Option<u32> },
    /// `redux.sync`.
    Reduce { value: u32, function: fn(u32, u32) -> u32 },
    /// `elect.sync`: the lowest lane.
    Elect { elected: Option<u32> },
}

impl WarpFunction {
    pub(crate) fn reduction(instruction: &Instruction, value: u32) -> Option<Self> {
        let has = |modifier| instruction.has(modifier);
        let signed = instruction.ty().is_some_and(Type::is_signed);
        let function: fn(u32, u32) -> u32 = match () {
            () if instruction.ty() == Some(Type::F32) => {
                use crate::lanes::{max, min};
                match (has(Modifier::Max), has(Modifier::Abs), has(Modifier::NanMode)) {
                    (true, false, false) => |a, b| canonical(max(f32::from_bits(a), f32::from_bits(b))),
                    (false, false, false) => |a, b| canonical(min(f32::from_bits(a), f32::from_bits(b))),
                    _ => return None,
                }
            }
            () if has(Modifier::Add) => |a, b| a.wrapping_add(b),
            () if has(Modifier::Min) && signed => |a, b| (a as i32).min(b as i32) as u32,
            () if has(Modifier::Max) && signed => |a, b| (a as i32).max(b as i32) as u32,
            () if has(Modifier::Min) => u32::min,
            () if has(Modifier::Max) => u32::max,
            () if has(Modifier::And) => |a, b| a & b,
            () if has(Modifier::Or) => |a, b| a | b,
            () if has(Modifier::Xor) => |a, b| a ^ b,
            () => return None,
        };
        Some(Self::Reduce { value, function })
    }

    /// For the lanes of `mask`, the members.
    pub(crate) fn execute(self, file: &mut File<'_>, op: &Op, mask: u32) {
        match self {
            Self::MatchAny { value } => {
                let values = file.full(value);
                let alike = |lane: usize| {
                    lanes_of(mask)
                        .filter(|&other| values[other] == values[lane])
                        .fold(0, |found, other| found | 1 << other)
                };
                file.set_narrow(
                    op.d,
                    std::array::from_fn(|lane| if mask >> lane & 1 == 1 { alike(lane) } else { 0 }),
                    mask,
                );
            }
            Self::MatchAll { value, same } => {
                let values = file.full(value);
                let first = values[mask.trailing_zeros() as usize & 31];
                let all = lanes_of(mask).all(|lane| values[lane] == first);
                file.set_narrow(op.d, [if all { mask } else { 0 }; WARP], mask);
                if let Some(same) = same {
                    file.set_predicate(same, if all { ALL } else { 0 }, mask);
                }
            }
            Self::Reduce { value, function } => {
                let values = file.narrow(value);
                let reduced = lanes_of(mask).map(|lane| values[lane]).reduce(function).unwrap_or_default();
                file.set_narrow(op.d, [reduced; WARP], mask);
            }
            Self::Elect { elected } => {
                let leader = mask.trailing_zeros();
                file.set_narrow(op.d, [leader; WARP], mask);
                if let Some(elected) = elected {
                    file.set_predicate(elected, 1 << (leader & 31), mask);
                }
            }
        }
    }
}

fn canonical(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}
