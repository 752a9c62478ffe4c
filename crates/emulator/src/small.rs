//! Carries, and what the lanes of a warp find out about each other's values.

use ptx::{Instruction, Modifier, Opcode, Type};

use crate::cta::Worker;
use crate::interpret::File;
use crate::lanes::{ALL, WARP};
use crate::pattern::lanes_of;
use crate::program::Op;
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
