//! Instructions as functions of scalars, for those without vector code of their own.
//!
//! Values travel as `u64` with zeros above their width. Section numbers are the PTX ISA's (version 9.0).

mod round;

use half::{bf16, f16};
use ptx::{Instruction, Modifier, Opcode, Type};

use crate::lanes;

/// Which outcomes of comparing `a` with `b` make a comparison true (9.7.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compare {
    pub less: bool,
    pub equal: bool,
    pub greater: bool,
    pub unordered: bool,
}

impl Compare {
    pub(crate) fn of(modifier: Modifier) -> Option<Self> {
        use Modifier::*;
        let (less, equal, greater, unordered) = match modifier {
            Eq => (false, true, false, false),
            Ne => (true, false, true, false),
            Lt | Lo => (true, false, false, false),
            Le | Ls => (true, true, false, false),
            Gt | Hi => (false, false, true, false),
            Ge | Hs => (false, true, true, false),
            Equ => (false, true, false, true),
            Neu => (true, false, true, true),
            Ltu => (true, false, false, true),
            Leu => (true, true, false, true),
            Gtu => (false, false, true, true),
            Geu => (false, true, true, true),
            Num => (true, true, true, false),
            Nan => (false, false, false, true),
            _ => return None,
        };
        Some(Self { less, equal, greater, unordered })
    }

    /// The lanes where it holds, from those where `a` is less, equal and greater.
    #[inline(always)]
    pub(crate) fn mask(self, less: u32, equal: u32, greater: u32) -> u32 {
        let pick = |wanted: bool, mask: u32| if wanted { mask } else { 0 };
        pick(self.less, less)
            | pick(self.equal, equal)
            | pick(self.greater, greater)
            | pick(self.unordered, !(less | equal | greater))
    }
}

/// Whether a value is less than, equal to, greater than another.
pub(crate) type Order = fn(u64, u64) -> (bool, bool, bool);

/// Whether `a` is less than, equal to, greater than `b`, for types without vector code.
pub(crate) fn order(ty: Type, ftz: bool) -> Option<Order> {
    macro_rules! by {
        ($value:expr) => {{
            let order: Order = |a, b| {
                let value = $value;
                let (a, b) = (value(a), value(b));
                (a < b, a == b, a > b)
            };
            Some(order)
        }};
    }
    match ty {
        Type::F32 if ftz => by!(|x: u64| lanes::flush(f32::from_bits(x as u32))),
        Type::F32 => by!(|x: u64| f32::from_bits(x as u32)),
        Type::F64 => by!(f64::from_bits),
        Type::U16 | Type::B16 => by!(|x: u64| x as u16),
        Type::S16 => by!(|x: u64| x as i16),
        Type::U32 | Type::B32 => by!(|x: u64| x as u32),
        Type::S32 => by!(|x: u64| x as i32),
        Type::U64 | Type::B64 => by!(|x: u64| x),
        Type::S64 => by!(|x: u64| x as i64),
        Type::F16 if ftz => by!(|x: u64| f16::from_bits(if x & 0x7c00 == 0 { x as u16 & 0x8000 } else { x as u16 })),
        Type::F16 => by!(|x: u64| f16::from_bits(x as u16)),
        Type::Bf16 => by!(|x: u64| bf16::from_bits(x as u16)),
        _ => None,
    }
}

/// What an atomic makes of the old value and its operands (9.7.13.5); of packed halves, of both.
pub(crate) fn atomic(instruction: &Instruction) -> Result<fn(u64, u64, u64) -> u64, String> {
    let ty = instruction.ty().ok_or("an atomic without a type")?;
    let operation = instruction.modifiers().iter().find(|m| {
        use Modifier::*;
        matches!(m, Add | Min | Max | Inc | Dec | Exch | And | Or | Xor | Cas)
    });
    macro_rules! halves {
        ($of:expr) => {
            |old, x, _| $of(old & 0xffff, x & 0xffff) | $of(old >> 16 & 0xffff, x >> 16 & 0xffff) << 16
        };
    }
    Ok(match (operation, ty) {
        (Some(Modifier::Add), Type::F32) => |old, x, _| bits(f32s(old) + f32s(x)),
        (Some(Modifier::Add), Type::F64) => |old, x, _| (f64::from_bits(old) + f64::from_bits(x)).to_bits(),
        (Some(Modifier::Add), Type::F16) => |old, x, _| hb(h(old) + h(x)),
        (Some(Modifier::Add), Type::Bf16) => |old, x, _| bb(b(old) + b(x)),
        (Some(Modifier::Add), Type::F16x2) => halves!(|old, x| hb(h(old) + h(x))),
        (Some(Modifier::Add), Type::Bf16x2) => halves!(|old, x| bb(b(old) + b(x))),
        (Some(Modifier::Min), Type::F16) => |old, x, _| hb(lanes::min(h(old), h(x))),
        (Some(Modifier::Max), Type::F16) => |old, x, _| hb(lanes::max(h(old), h(x))),
        (Some(Modifier::Min), Type::Bf16) => |old, x, _| bb(lanes::min(b(old), b(x))),
        (Some(Modifier::Max), Type::Bf16) => |old, x, _| bb(lanes::max(b(old), b(x))),
        (Some(Modifier::Min), Type::F16x2) => halves!(|old, x| hb(lanes::min(h(old), h(x)))),
        (Some(Modifier::Max), Type::F16x2) => halves!(|old, x| hb(lanes::max(h(old), h(x)))),
        (Some(Modifier::Min), Type::Bf16x2) => halves!(|old, x| bb(lanes::min(b(old), b(x)))),
        (Some(Modifier::Max), Type::Bf16x2) => halves!(|old, x| bb(lanes::max(b(old), b(x)))),
        (Some(Modifier::Add), Type::U32 | Type::S32) => |old, x, _| u64::from((old as u32).wrapping_add(x as u32)),
        (Some(Modifier::Add), Type::U64) => |old, x, _| old.wrapping_add(x),
        (Some(Modifier::Min), Type::S32) => |old, x, _| u64::from((old as i32).min(x as i32) as u32),
        (Some(Modifier::Max), Type::S32) => |old, x, _| u64::from((old as i32).max(x as i32) as u32),
        (Some(Modifier::Min), Type::S64) => |old, x, _| (old as i64).min(x as i64) as u64,
        (Some(Modifier::Max), Type::S64) => |old, x, _| (old as i64).max(x as i64) as u64,
        (Some(Modifier::Min), Type::U32 | Type::U64) => |old, x, _| old.min(x),
        (Some(Modifier::Max), Type::U32 | Type::U64) => |old, x, _| old.max(x),
        (Some(Modifier::Inc), _) => |old, x, _| if old >= x { 0 } else { old + 1 },
        (Some(Modifier::Dec), _) => |old, x, _| if old == 0 || old > x { x } else { old - 1 },
        (Some(Modifier::Exch), _) => |_, x, _| x,
        (Some(Modifier::And), _) => |old, x, _| old & x,
        (Some(Modifier::Or), _) => |old, x, _| old | x,
        (Some(Modifier::Xor), _) => |old, x, _| old ^ x,
        (Some(Modifier::Cas), _) => |old, compare, x| if old == compare { x } else { old },
        _ => return Err("this atomic operation has no semantics here".into()),
    })
}

type Function = fn(u64, u64, u64, u64) -> u64;

fn f32s(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

fn bits(x: f32) -> u64 {
    u64::from(x.to_bits())
}

fn h(x: u64) -> f32 {
    f16::from_bits(x as u16).to_f32()
}

fn hb(x: f32) -> u64 {
    u64::from(f16::from_f32(x).to_bits())
}

fn b(x: u64) -> f32 {
    bf16::from_bits(x as u16).to_f32()
}

fn bb(x: f32) -> u64 {
    u64::from(bf16::from_f32(x).to_bits())
}

/// Applies a function of halves to both halves of packed operands.
macro_rules! packed {
    ($f:expr) => {
        |a, b, c, d| {
            let f: Function = $f;
            let low = |x: u64| x & 0xffff;
            let high = |x: u64| x >> 16 & 0xffff;
            f(low(a), low(b), low(c), low(d)) | f(high(a), high(b), high(c), high(d)) << 16
        }
    };
}

/// Integer functions of one type: the signed and unsigned native types of a width.
macro_rules! integer {
    ($instruction:expr, $native:ty, $signed:ty, $unsigned:ty, $bits:literal) => {{
        type N = $native;
        type S = $signed;
        type U = $unsigned;
        let out: Option<Function> = match $instruction.opcode() {
            Opcode::Add if $instruction.has(Modifier::Sat) => {
                Some(|a, b, _, _| (a as N).saturating_add(b as N) as U as u64)
            }
            Opcode::Sub if $instruction.has(Modifier::Sat) => {
                Some(|a, b, _, _| (a as N).saturating_sub(b as N) as U as u64)
            }
            Opcode::Add => Some(|a, b, _, _| (a as U).wrapping_add(b as U) as u64),
            Opcode::Sub => Some(|a, b, _, _| (a as U).wrapping_sub(b as U) as u64),
            Opcode::Mul if $instruction.has(Modifier::Hi) => {
                Some(|a, b, _, _| ((a as N as i128 * b as N as i128) >> $bits) as U as u64)
            }
            Opcode::Mul => Some(|a, b, _, _| (a as U).wrapping_mul(b as U) as u64),
            Opcode::Mad if $instruction.has(Modifier::Hi) => {
                Some(|a, b, c, _| (((a as N as i128 * b as N as i128) >> $bits) as U).wrapping_add(c as U) as u64)
            }
            Opcode::Mad => Some(|a, b, c, _| (a as U).wrapping_mul(b as U).wrapping_add(c as U) as u64),
            // Division by zero gives a value nobody may rely on: here all ones, as the chips do.
            Opcode::Div => Some(|a, b, _, _| {
                (a as N).checked_div(b as N).map_or(if b as U == 0 { U::MAX } else { a as U }, |q| q as U) as u64
            }),
            Opcode::Rem => Some(|a, b, _, _| {
                (a as N).checked_rem(b as N).map_or(if b as U == 0 { a as U } else { 0 }, |r| r as U) as u64
            }),
            Opcode::Min => Some(|a, b, _, _| (a as N).min(b as N) as U as u64),
            Opcode::Max => Some(|a, b, _, _| (a as N).max(b as N) as U as u64),
            Opcode::Abs => Some(|a, _, _, _| (a as S).wrapping_abs() as U as u64),
            Opcode::Neg => Some(|a, _, _, _| (a as U).wrapping_neg() as u64),
            Opcode::Not => Some(|a, _, _, _| !(a as U) as u64),
            Opcode::And => Some(|a, b, _, _| a & b),
            Opcode::Or => Some(|a, b, _, _| a | b),
            Opcode::Xor => Some(|a, b, _, _| a ^ b),
            Opcode::Shl => Some(|a, b, _, _| (a as U).checked_shl(b as u32).unwrap_or(0) as u64),
            Opcode::Shr => {
                Some(|a, b, _, _| ((a as N) >> (b as u32).min($bits - 1) >> u32::from(b as u32 >= $bits)) as U as u64)
            }
            Opcode::Bfe => Some(|a, start, length, _| {
                // 9.7.1.20: the field's upper end is padded with its sign.
                let (start, length) = (start as u32 & 255, length as u32 & 255);
                let top = (start + length).saturating_sub(1).min($bits - 1);
                let signed = <N>::MIN != 0;
                let sign = if signed && length > 0 && (a as U) >> top & 1 == 1 { U::MAX } else { 0 };
                let shifted = (a as U).checked_shr(start).unwrap_or(0);
                let held = length.min((<U>::BITS).saturating_sub(start));
                let mask = if held == 0 { 0 } else { U::MAX >> (<U>::BITS - held) };
                let padded = if length == 0 { 0 } else { shifted & mask | sign & !mask };
                padded as u64
            }),
            Opcode::Bfi => Some(|a, b, start, length| {
                let (start, length) = (start as u32 & 255, length as u32 & 255);
                let length = length.min((<U>::BITS).saturating_sub(start));
                let mask = if length == 0 { 0 } else { (U::MAX >> (<U>::BITS - length)) << start };
                ((a as U).checked_shl(start).unwrap_or(0) & mask | b as U & !mask) as u64
            }),
            Opcode::Bfind => {
                // 9.7.1.16: the highest bit that differs from the sign; -1 when there is none.
                if $instruction.has(Modifier::Shiftamt) {
                    Some(|a, _, _, _| {
                        let a = if <N>::MIN != 0 && (a as S) < 0 { !(a as U) } else { a as U };
                        u64::from(if a == 0 { u32::MAX } else { a.leading_zeros() })
                    })
                } else {
                    Some(|a, _, _, _| {
                        let a = if <N>::MIN != 0 && (a as S) < 0 { !(a as U) } else { a as U };
                        u64::from((<U>::BITS - 1).wrapping_sub(a.leading_zeros()))
                    })
                }
            }
            Opcode::Brev => Some(|a, _, _, _| (a as U).reverse_bits() as u64),
            Opcode::Clz => Some(|a, _, _, _| u64::from((a as U).leading_zeros())),
            Opcode::Popc => Some(|a, _, _, _| u64::from((a as U).count_ones())),
            Opcode::Selp => Some(|a, b, c, _| if c & 1 == 1 { a } else { b }),
            _ => None,
        };
        out
    }};
}

/// The function an instruction computes lane by lane; operands in order, missing ones are zero, predicates are 0 or 1.
pub(crate) fn function(instruction: &Instruction) -> Result<Function, String> {
    // `isspacep` has no type: it looks at an address.
    let address = (instruction.opcode() == Opcode::Isspacep).then_some(Type::U64);
    let ty = instruction.ty().or(address).ok_or("an instruction without a type")?;
    let directed = [Modifier::Rz, Modifier::Rm, Modifier::Rp].iter().any(|&m| instruction.has(m));
    if instruction.opcode() == Opcode::Cvt {
        return conversion(instruction);
    }
    if matches!(instruction.opcode(), Opcode::Max | Opcode::Min) && instruction.operands().len() > 3 {
        return Ok(of_three(instruction));
    }
    if let Some(function) = rounded(instruction, ty).or_else(|| rarer(instruction, ty)) {
        return Ok(function);
    }
    if directed {
        return Err("directed rounding has no semantics here".into());
    }
    if instruction.has(Modifier::Sat) && ty.is_float() {
        return Err("saturation to [0, 1] has no semantics here".into());
    }
    let without = [Modifier::Relu, Modifier::XorSign, Modifier::Oob, Modifier::Cc];
    if let Some(modifier) = without.into_iter().find(|&modifier| instruction.has(modifier)) {
        return Err(format!("`{modifier}` has no semantics here"));
    }
    if instruction.types().nth(1).is_some_and(|second| second != ty && ty == Type::F32) {
        return Err("operands of two types have no semantics here".into());
    }
    let found = match instruction.opcode() {
        Opcode::Mul | Opcode::Mad if instruction.has(Modifier::Wide) => wide(instruction.opcode(), ty),
        Opcode::Shf => shf(instruction),
        Opcode::Lop3 => Some(
            (|a, b, c, table| {
                let mut out = 0;
                for row in 0..8u64 {
                    if table >> row & 1 == 1 {
                        let pick = |x: u64, bit: u64| if row >> bit & 1 == 1 { x } else { !x };
                        out |= pick(a, 2) & pick(b, 1) & pick(c, 0);
                    }
                }
                out & 0xffff_ffff
            }) as Function,
        ),
        Opcode::Prmt => prmt(instruction),
        Opcode::Cvta => cvta(instruction),
        Opcode::Testp => testp(instruction, ty),
        _ => match ty {
            Type::U16 | Type::B16 => integer!(instruction, u16, i16, u16, 16),
            Type::S16 => integer!(instruction, i16, i16, u16, 16),
            Type::U32 | Type::B32 => integer!(instruction, u32, i32, u32, 32),
            Type::S32 => integer!(instruction, i32, i32, u32, 32),
            Type::U64 | Type::B64 => integer!(instruction, u64, i64, u64, 64),
            Type::S64 => integer!(instruction, i64, i64, u64, 64),
            Type::F32 => single(instruction),
            Type::F64 => double(instruction.opcode()),
            Type::F16 => f16_function(instruction.opcode(), instruction.has(Modifier::NanMode)),
            Type::Bf16 => bf16_function(instruction.opcode(), instruction.has(Modifier::NanMode)),
            Type::F16x2 => f16x2_function(instruction.opcode(), instruction.has(Modifier::NanMode)),
            Type::Bf16x2 => bf16x2_function(instruction.opcode(), instruction.has(Modifier::NanMode)),
            _ => None,
        },
    };
    found.ok_or_else(|| "it has no semantics here".into())
}

/// Arithmetic on singles in other roundings than the nearest, with `.sat`, and on pairs of them (9.7.3, 9.7.5).
fn rounded(instruction: &Instruction, ty: Type) -> Option<Function> {
    let operation = match instruction.opcode() {
        Opcode::Add => round::ADD,
        Opcode::Sub => round::SUB,
        Opcode::Mul => round::MUL,
        Opcode::Fma | Opcode::Mad => round::FMA,
        Opcode::Div => round::DIV,
        Opcode::Sqrt => round::SQRT,
        Opcode::Rcp if ty == Type::F64 => round::RCP,
        _ => return None,
    };
    let mode = round::mode(instruction.modifiers());
    let (ftz, sat) = (instruction.has(Modifier::Ftz), instruction.has(Modifier::Sat));
    let one_type = instruction.types().count() == 1;
    let operands = match ty {
        Type::F32x2 => round::Operands::Pair,
        Type::F32 if one_type && (mode != round::NEAREST || sat) => round::Operands::Single,
        // 9.7.5: the terms of the product, or the first of a sum, are halves.
        Type::F32 if instruction.types().nth(1) == Some(Type::F16) => round::Operands::Half,
        Type::F32 if instruction.types().nth(1) == Some(Type::Bf16) => round::Operands::Brain,
        Type::F64 if mode != round::NEAREST => return round::double_operation(operation, mode),
        _ => return None,
    };
    round::operation(operation, mode, ftz, sat, operands)
}

/// Integer dot products, masks, sums of differences, and functions of halves.
fn rarer(instruction: &Instruction, ty: Type) -> Option<Function> {
    let has = |modifier| instruction.has(modifier);
    let signed = |index: usize| instruction.types().nth(index).is_some_and(Type::is_signed);
    /// `dp4a` and `dp2a`: bytes of `b` times bytes or halves of `a`.
    macro_rules! dot {
        ($a:ty, $b:ty, $width:literal, $from:literal, $count:literal) => {
            |a, b, c, _| {
                let sum = (0..$count).fold(c as u32 as i32, |sum, place| {
                    let (x, y) = ((a >> ($width * place)) as $a as i32, (b >> (8 * place + $from)) as $b as i32);
                    sum.wrapping_add(x.wrapping_mul(y))
                });
                u64::from(sum as u32)
            }
        };
        ($width:literal, $narrow:ty, $unsigned:ty, $from:literal, $count:literal) => {
            match (signed(0), signed(1)) {
                (true, true) => dot!($narrow, i8, $width, $from, $count),
                (true, false) => dot!($narrow, u8, $width, $from, $count),
                (false, true) => dot!($unsigned, i8, $width, $from, $count),
                (false, false) => dot!($unsigned, u8, $width, $from, $count),
            }
        };
    }
    let function: Function = match instruction.opcode() {
        Opcode::Dp4a => dot!(8, i8, u8, 0, 4),
        Opcode::Dp2a if has(Modifier::Hi) => dot!(16, i16, u16, 16, 2),
        Opcode::Dp2a => dot!(16, i16, u16, 0, 2),
        // `sad`: c + |a - b|.
        Opcode::Sad => match ty {
            Type::U16 => |a, b, c, _| u64::from((c as u16).wrapping_add((a as u16).abs_diff(b as u16))),
            Type::S16 => |a, b, c, _| u64::from((c as u16).wrapping_add((a as i16).abs_diff(b as i16))),
            Type::U32 => |a, b, c, _| u64::from((c as u32).wrapping_add((a as u32).abs_diff(b as u32))),
            Type::S32 => |a, b, c, _| u64::from((c as u32).wrapping_add((a as i32).abs_diff(b as i32))),
            Type::U64 => |a, b, c, _| c.wrapping_add(a.abs_diff(b)),
            Type::S64 => |a, b, c, _| c.wrapping_add((a as i64).abs_diff(b as i64)),
            _ => return None,
        },
        // `mul24`: the upper or lower 32 of the 48 bits of a product of 24-bit numbers.
        Opcode::Mul24 => match (ty, has(Modifier::Hi)) {
            (Type::U32, false) => |a, b, _, _| ((a & 0xff_ffff) * (b & 0xff_ffff)) & 0xffff_ffff,
            (Type::U32, true) => |a, b, _, _| ((a & 0xff_ffff) * (b & 0xff_ffff)) >> 16 & 0xffff_ffff,
            (Type::S32, hi) => {
                if hi {
                    |a, b, _, _| (signed24(a) * signed24(b)) as u64 >> 16 & 0xffff_ffff
                } else {
                    |a, b, _, _| (signed24(a) * signed24(b)) as u64 & 0xffff_ffff
                }
            }
            _ => return None,
        },
        // `fns`: the n-th set bit from `base` on, up or down; all ones when there is none.
        Opcode::Fns => |mask, base, offset, _| {
            let (mask, base, offset) = (mask as u32, base as u32 & 31, offset as u32 as i32);
            let found = if offset == 0 {
                (mask >> base & 1 == 1).then_some(base)
            } else {
                let wanted = offset.unsigned_abs() as usize - 1;
                let set = |place: &u32| mask >> *place & 1 == 1;
                if offset > 0 { (base..32).filter(set).nth(wanted) } else { (0..=base).rev().filter(set).nth(wanted) }
            };
            u64::from(found.unwrap_or(u32::MAX))
        },
        // `bmsk`: `b` ones from bit `a` on.
        Opcode::Bmsk if has(Modifier::Wrap) => |a, b, _, _| u64::from(ones(b as u32 & 31) << (a as u32 & 31)),
        Opcode::Bmsk => |a, b, _, _| u64::from(ones((b as u32).min(32)).checked_shl(a as u32).unwrap_or(0)),
        // `szext`: the lower `b` bits, extended.
        Opcode::Szext => match (ty.is_signed(), has(Modifier::Wrap)) {
            (false, true) => |a, b, _, _| a & u64::from(ones(b as u32 & 31)),
            (false, false) => |a, b, _, _| a & u64::from(ones((b as u32).min(32))),
            (true, true) => |a, b, _, _| u64::from(extended(a as u32, b as u32 & 31)),
            (true, false) => |a, b, _, _| u64::from(extended(a as u32, (b as u32).min(32))),
        },
        // `slct`: `c` decides by its sign.
        Opcode::Slct => match instruction.types().nth(1) {
            Some(Type::S32) => |a, b, c, _| if c as u32 as i32 >= 0 { a } else { b },
            Some(Type::F32) => |a, b, c, _| if f32s(c) >= 0.0 { a } else { b },
            _ => return None,
        },
        // Halves, to nearest of the exact value.
        Opcode::Ex2 => match ty {
            Type::F16 => |a, _, _, _| hb(lanes::exp2(h(a))),
            Type::F16x2 => packed!(|a, _, _, _| hb(lanes::exp2(h(a)))),
            Type::Bf16 => |a, _, _, _| bb(lanes::flush(lanes::exp2(lanes::flush(b(a))))),
            Type::Bf16x2 => packed!(|a, _, _, _| bb(lanes::flush(lanes::exp2(lanes::flush(b(a)))))),
            _ => return None,
        },
        Opcode::Tanh => match ty {
            Type::F16 => |a, _, _, _| hb(h(a).tanh()),
            Type::F16x2 => packed!(|a, _, _, _| hb(h(a).tanh())),
            Type::Bf16 => |a, _, _, _| bb(b(a).tanh()),
            Type::Bf16x2 => packed!(|a, _, _, _| bb(b(a).tanh())),
            _ => return None,
        },
        Opcode::Fma if has(Modifier::Relu) && !has(Modifier::Oob) => match ty {
            Type::F16 => |a, b, c, _| hb(relu(h(a).mul_add(h(b), h(c)))),
            Type::F16x2 => packed!(|a, b, c, _| hb(relu(h(a).mul_add(h(b), h(c))))),
            Type::Bf16 => |x, y, z, _| bb(relu(b(x).mul_add(b(y), b(z)))),
            Type::Bf16x2 => packed!(|x, y, z, _| bb(relu(b(x).mul_add(b(y), b(z))))),
            _ => return None,
        },
        // `.xorsign`: the larger magnitude, with the sign of the product.
        Opcode::Max | Opcode::Min if has(Modifier::XorSign) && ty == Type::F32 && !has(Modifier::Ftz) => {
            match (instruction.opcode(), has(Modifier::NanMode)) {
                (Opcode::Max, false) => |a, b, _, _| signed_by(lanes::max(f32s(a).abs(), f32s(b).abs()), a, b),
                (Opcode::Min, false) => |a, b, _, _| signed_by(lanes::min(f32s(a).abs(), f32s(b).abs()), a, b),
                _ => return None,
            }
        }
        Opcode::Max | Opcode::Min if has(Modifier::XorSign) && !has(Modifier::Ftz) && !has(Modifier::NanMode) => {
            match (instruction.opcode(), ty) {
                (Opcode::Max, Type::F16) => |a, b, _, _| half_by(hb(lanes::max(h(a).abs(), h(b).abs())), a, b),
                (Opcode::Min, Type::F16) => |a, b, _, _| half_by(hb(lanes::min(h(a).abs(), h(b).abs())), a, b),
                (Opcode::Max, Type::F16x2) => {
                    packed!(|a, b, _, _| half_by(hb(lanes::max(h(a).abs(), h(b).abs())), a, b))
                }
                (Opcode::Min, Type::F16x2) => {
                    packed!(|a, b, _, _| half_by(hb(lanes::min(h(a).abs(), h(b).abs())), a, b))
                }
                (Opcode::Max, Type::Bf16) => |x, y, _, _| half_by(bb(lanes::max(b(x).abs(), b(y).abs())), x, y),
                (Opcode::Min, Type::Bf16) => |x, y, _, _| half_by(bb(lanes::min(b(x).abs(), b(y).abs())), x, y),
                (Opcode::Max, Type::Bf16x2) => {
                    packed!(|x, y, _, _| half_by(bb(lanes::max(b(x).abs(), b(y).abs())), x, y))
                }
                (Opcode::Min, Type::Bf16x2) => {
                    packed!(|x, y, _, _| half_by(bb(lanes::min(b(x).abs(), b(y).abs())), x, y))
                }
                _ => return None,
            }
        }
        Opcode::Rcp if ty == Type::F64 && has(Modifier::Approx) => {
            |a, _, _, _| upper(1.0 / f64::from_bits(a & !0xffff_ffff))
        }
        Opcode::Rsqrt if ty == Type::F64 => |a, _, _, _| upper(1.0 / f64::from_bits(a & !0xffff_ffff).sqrt()),
        // `isspacep`: which window a generic address lies in.
        Opcode::Isspacep => {
            use crate::program::{LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES};
            if has(Modifier::Shared) || has(Modifier::SharedCta) {
                |a, _, _, _| u64::from((SHARED_WINDOW..SHARED_WINDOW + WINDOW_BYTES).contains(&a))
            } else if has(Modifier::Local) {
                |a, _, _, _| u64::from((LOCAL_WINDOW..LOCAL_WINDOW + WINDOW_BYTES).contains(&a))
            } else if has(Modifier::Global) {
                |a, _, _, _| u64::from(!(SHARED_WINDOW..LOCAL_WINDOW + WINDOW_BYTES).contains(&a))
            } else {
                return None;
            }
        }
        _ => return None,
    };
    Some(function)
}

/// So many ones from bit 0 on.
fn ones(count: u32) -> u32 {
    u32::MAX.checked_shr(32 - count.min(32)).unwrap_or(0)
}

fn extended(value: u32, bits: u32) -> u32 {
    match bits {
        0 => 0,
        bits => ((value << (32 - bits)) as i32 >> (32 - bits)) as u32,
    }
}

fn signed24(x: u64) -> i64 {
    (x << 40) as i64 >> 40
}

fn signed_by(magnitude: f32, a: u64, b: u64) -> u64 {
    if magnitude.is_nan() { 0x7fff_ffff } else { bits(magnitude) & 0x7fff_ffff | (a ^ b) & 0x8000_0000 }
}

/// A magnitude of 16 bits with the sign of the product of `a` and `b`.
fn half_by(magnitude: u64, a: u64, b: u64) -> u64 {
    magnitude & 0x7fff | (a ^ b) & 0x8000
}

/// `.approx.ftz.f64` works on the upper halves, subnormal numbers as zeros.
fn upper(x: f64) -> u64 {
    let x = if x.abs() < f64::MIN_POSITIVE { 0.0f64.copysign(x) } else { x };
    if x.is_nan() { 0x7fff_ffff_0000_0000 } else { x.to_bits() & !0xffff_ffff }
}

/// Negative numbers to +0, a NaN to the canonical one.
fn relu(x: f32) -> f32 {
    if x.is_nan() || x > 0.0 { x } else { 0.0 }
}

fn wide(opcode: Opcode, ty: Type) -> Option<Function> {
    Some(match (opcode, ty) {
        (Opcode::Mul, Type::U16) => |a, b, _, _| (a & 0xffff) * (b & 0xffff),
        (Opcode::Mul, Type::S16) => |a, b, _, _| u64::from((i32::from(a as i16) * i32::from(b as i16)) as u32),
        (Opcode::Mad, Type::U16) => {
            |a, b, c, _| u64::from(((a & 0xffff) * (b & 0xffff)) as u32).wrapping_add(c) & 0xffff_ffff
        }
        (Opcode::Mad, Type::S16) => {
            |a, b, c, _| u64::from((i32::from(a as i16) * i32::from(b as i16)).wrapping_add(c as i32) as u32)
        }
        _ => return None,
    })
}

/// 9.7.8.6: the funnel shift; `a` is the low word, `b` the high one.
fn shf(instruction: &Instruction) -> Option<Function> {
    Some(match (instruction.has(Modifier::L), instruction.has(Modifier::Clamp)) {
        (true, true) => |a, b, n, _| ((b << 32 | a) << n.min(32)) >> 32 & 0xffff_ffff,
        (true, false) => |a, b, n, _| ((b << 32 | a) << (n & 31)) >> 32 & 0xffff_ffff,
        (false, true) => |a, b, n, _| (b << 32 | a) >> n.min(32) & 0xffff_ffff,
        (false, false) => |a, b, n, _| (b << 32 | a) >> (n & 31) & 0xffff_ffff,
    })
}

/// 9.7.9.7: bytes picked from the eight of `b` and `a`.
fn prmt(instruction: &Instruction) -> Option<Function> {
    /// Which byte stands at a place, by the two lower bits of the selector.
    macro_rules! mode {
        ($byte:expr) => {
            |a, b, selector, _| {
                let byte: fn(u64, u64) -> u64 = $byte;
                let bytes = b << 32 | a;
                (0..4).fold(0, |out, place| out | (bytes >> (8 * (byte(place, selector & 3) & 7)) & 255) << (8 * place))
            }
        };
    }
    Some(match instruction.modifiers().last()? {
        Modifier::F4e => mode!(|place, from| from + place),
        Modifier::B4e => mode!(|place, from| from.wrapping_sub(place)),
        Modifier::Rc8 => mode!(|_, from| from),
        Modifier::Ecl => mode!(u64::max),
        Modifier::Ecr => mode!(u64::min),
        Modifier::Rc16 => mode!(|place, from| 2 * (from & 1) + (place & 1)),
        _ => |a, b, selector, _| {
            let bytes = b << 32 | a;
            (0..4).fold(0, |out, place| {
                let pick = selector >> (4 * place) & 15;
                let byte = bytes >> (8 * (pick & 7)) & 255;
                let byte = if pick & 8 == 0 { byte } else { 255 * (byte >> 7) };
                out | byte << (8 * place)
            })
        },
    })
}

/// The largest or smallest of three singles (9.7.3, `min`, `max`).
fn of_three(instruction: &Instruction) -> Function {
    fn extreme<const MAX: bool, const NAN: bool, const ABS: bool, const FTZ: bool>(a: u64, b: u64, c: u64) -> u64 {
        let values = [a, b, c].map(|x| {
            let x = if FTZ { lanes::flush(f32s(x)) } else { f32s(x) };
            if ABS { x.abs() } else { x }
        });
        if NAN && values.iter().any(|x| x.is_nan()) {
            return 0x7fff_ffff;
        }
        let of_two = if MAX { lanes::max } else { lanes::min };
        bits(of_two(of_two(values[0], values[1]), values[2]))
    }
    macro_rules! make {
        ($max:literal $nan:literal $abs:literal) => {
            if instruction.has(Modifier::Ftz) {
                |a, b, c, _| extreme::<$max, $nan, $abs, true>(a, b, c)
            } else {
                |a, b, c, _| extreme::<$max, $nan, $abs, false>(a, b, c)
            }
        };
    }
    let is = |modifier| instruction.has(modifier);
    match (instruction.opcode() == Opcode::Max, is(Modifier::NanMode), is(Modifier::Abs)) {
        (false, false, false) => make!(false false false),
        (false, false, true) => make!(false false true),
        (false, true, false) => make!(false true false),
        (false, true, true) => make!(false true true),
        (true, false, false) => make!(true false false),
        (true, false, true) => make!(true false true),
        (true, true, false) => make!(true true false),
        (true, true, true) => make!(true true true),
    }
}

/// `cvt.pack` (9.7.9.23): two integers, saturated, below what `c` has: the first above the second.
fn pack(to: Type) -> Option<Function> {
    macro_rules! make {
        ($bits:literal, $low:literal, $high:literal) => {
            |a, b, c, _| {
                let part = |x: u64| (i64::from(x as u32 as i32).clamp($low, $high) as u64) & ((1 << $bits) - 1);
                (c << (2 * $bits) | part(a) << $bits | part(b)) & 0xffff_ffff
            }
        };
    }
    Some(match to {
        Type::U16 => make!(16, 0, 0xffff),
        Type::S16 => make!(16, -0x8000, 0x7fff),
        Type::U8 => make!(8, 0, 0xff),
        Type::S8 => make!(8, -0x80, 0x7f),
        Type::U4 => make!(4, 0, 15),
        Type::S4 => make!(4, -8, 7),
        Type::U2 => make!(2, 0, 3),
        Type::S2 => make!(2, -2, 1),
        _ => return None,
    })
}

fn cvta(instruction: &Instruction) -> Option<Function> {
    use crate::program::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES};
    let to = instruction.has(Modifier::To);
    Some(match () {
        () if instruction.has(Modifier::Global) => |a, _, _, _| a,
        // A parameter's address as a value of 64 bits is generic already; of one of 32 bits the window is lost.
        () if instruction.has(Modifier::Param) => |a, _, _, _| if a < WINDOW_BYTES { a + PARAM_WINDOW } else { a },
        () if [Modifier::Shared, Modifier::SharedCta, Modifier::SharedCluster]
            .into_iter()
            .any(|m| instruction.has(m)) =>
        {
            if to {
                |a, _, _, _| a.wrapping_sub(SHARED_WINDOW)
            } else {
                |a, _, _, _| a.wrapping_add(SHARED_WINDOW)
            }
        }
        () if instruction.has(Modifier::Local) => {
            if to {
                |a, _, _, _| a.wrapping_sub(LOCAL_WINDOW)
            } else {
                |a, _, _, _| a.wrapping_add(LOCAL_WINDOW)
            }
        }
        () => return None,
    })
}

fn testp(instruction: &Instruction, ty: Type) -> Option<Function> {
    macro_rules! test {
        ($value:expr) => {
            match instruction.modifiers().first()? {
                Modifier::Finite => |a, _, _, _| u64::from($value(a).is_finite()),
                Modifier::Infinite => |a, _, _, _| u64::from($value(a).is_infinite()),
                Modifier::Number => |a, _, _, _| u64::from(!$value(a).is_nan()),
                Modifier::Notanumber => |a, _, _, _| u64::from($value(a).is_nan()),
                Modifier::Normal => |a, _, _, _| u64::from($value(a).is_normal()),
                Modifier::Subnormal => |a, _, _, _| u64::from($value(a).is_subnormal()),
                _ => return None,
            }
        };
    }
    Some(if ty == Type::F64 { test!(f64::from_bits) } else { test!(f32s) })
}

fn single(instruction: &Instruction) -> Option<Function> {
    let nan = instruction.has(Modifier::NanMode);
    macro_rules! flushed {
        ($f:expr) => {
            if instruction.has(Modifier::Ftz) {
                |a, b, c, _| {
                    let f: fn(f32, f32, f32) -> f32 = $f;
                    bits(lanes::flush(f(lanes::flush(f32s(a)), lanes::flush(f32s(b)), lanes::flush(f32s(c)))))
                }
            } else {
                |a, b, c, _| {
                    let f: fn(f32, f32, f32) -> f32 = $f;
                    bits(f(f32s(a), f32s(b), f32s(c)))
                }
            }
        };
    }
    Some(match instruction.opcode() {
        Opcode::Add => flushed!(|a, b, _| a + b),
        Opcode::Sub => flushed!(|a, b, _| a - b),
        Opcode::Mul => flushed!(|a, b, _| a * b),
        Opcode::Fma | Opcode::Mad => flushed!(f32::mul_add),
        Opcode::Div => flushed!(|a, b, _| a / b),
        Opcode::Max if nan => flushed!(|a, b, _| if a.is_nan() || b.is_nan() { f32::NAN } else { lanes::max(a, b) }),
        Opcode::Min if nan => flushed!(|a, b, _| if a.is_nan() || b.is_nan() { f32::NAN } else { lanes::min(a, b) }),
        Opcode::Max => flushed!(|a, b, _| lanes::max(a, b)),
        Opcode::Min => flushed!(|a, b, _| lanes::min(a, b)),
        Opcode::Abs => flushed!(|a, _, _| a.abs()),
        Opcode::Neg => flushed!(|a, _, _| -a),
        Opcode::Rcp => flushed!(|a, _, _| 1.0 / a),
        Opcode::Sqrt => flushed!(|a, _, _| a.sqrt()),
        Opcode::Rsqrt => flushed!(|a, _, _| (1.0 / f64::from(a).sqrt()) as f32),
        Opcode::Sin => flushed!(|a, _, _| f64::from(a).sin() as f32),
        Opcode::Cos => flushed!(|a, _, _| f64::from(a).cos() as f32),
        Opcode::Lg2 => flushed!(|a, _, _| f64::from(a).log2() as f32),
        Opcode::Tanh => flushed!(|a, _, _| f64::from(a).tanh() as f32),
        // 9.7.3.3: the sign is the first operand's.
        Opcode::Copysign => flushed!(|a, b, _| b.copysign(a)),
        Opcode::Selp => |a, b, c, _| if c & 1 == 1 { a } else { b },
        _ => return None,
    })
}

fn double(opcode: Opcode) -> Option<Function> {
    macro_rules! f {
        ($f:expr) => {
            |a, b, c, _| {
                let f: fn(f64, f64, f64) -> f64 = $f;
                f(f64::from_bits(a), f64::from_bits(b), f64::from_bits(c)).to_bits()
            }
        };
    }
    Some(match opcode {
        Opcode::Add => f!(|a, b, _| a + b),
        Opcode::Sub => f!(|a, b, _| a - b),
        Opcode::Mul => f!(|a, b, _| a * b),
        Opcode::Fma | Opcode::Mad => f!(f64::mul_add),
        Opcode::Div => f!(|a, b, _| a / b),
        Opcode::Max => f!(|a, b, _| a.max(b)),
        Opcode::Min => f!(|a, b, _| a.min(b)),
        Opcode::Abs => f!(|a, _, _| a.abs()),
        Opcode::Neg => f!(|a, _, _| -a),
        Opcode::Rcp => f!(|a, _, _| 1.0 / a),
        Opcode::Sqrt => f!(|a, _, _| a.sqrt()),
        Opcode::Copysign => f!(|a, b, _| b.copysign(a)),
        Opcode::Selp => |a, b, c, _| if c & 1 == 1 { a } else { b },
        _ => return None,
    })
}

/// Functions of one half format, by its conversions to and from f32. A fused multiply-add through f64 rounds once: the product of
/// two halves and its sum with a third are exact there, or beyond the last place by more than rounding could see.
macro_rules! half_functions {
    ($name:ident, $to:ident, $from:ident, $half:ty) => {
        fn $name(opcode: Opcode, nan: bool) -> Option<Function> {
            Some(match opcode {
                Opcode::Add => |x, y, _, _| $from($to(x) + $to(y)),
                Opcode::Sub => |x, y, _, _| $from($to(x) - $to(y)),
                Opcode::Mul => |x, y, _, _| $from($to(x) * $to(y)),
                Opcode::Fma => |x, y, z, _| {
                    u64::from(
                        <$half>::from_f64(f64::from($to(x)).mul_add(f64::from($to(y)), f64::from($to(z)))).to_bits(),
                    )
                },
                Opcode::Max if nan => |x, y, _, _| {
                    $from(if $to(x).is_nan() || $to(y).is_nan() { f32::NAN } else { lanes::max($to(x), $to(y)) })
                },
                Opcode::Min if nan => |x, y, _, _| {
                    $from(if $to(x).is_nan() || $to(y).is_nan() { f32::NAN } else { lanes::min($to(x), $to(y)) })
                },
                Opcode::Max => |x, y, _, _| $from(lanes::max($to(x), $to(y))),
                Opcode::Min => |x, y, _, _| $from(lanes::min($to(x), $to(y))),
                Opcode::Abs => |x, _, _, _| x & 0x7fff,
                Opcode::Neg => |x, _, _, _| x & 0xffff ^ 0x8000,
                _ => return None,
            })
        }
    };
}

half_functions!(f16_function, h, hb, f16);
half_functions!(bf16_function, b, bb, bf16);

macro_rules! packed_functions {
    ($name:ident, $to:ident, $from:ident, $half:ty) => {
        fn $name(opcode: Opcode, nan: bool) -> Option<Function> {
            Some(match opcode {
                Opcode::Add => packed!(|x, y, _, _| $from($to(x) + $to(y))),
                Opcode::Sub => packed!(|x, y, _, _| $from($to(x) - $to(y))),
                Opcode::Mul => packed!(|x, y, _, _| $from($to(x) * $to(y))),
                Opcode::Fma => packed!(|x, y, z, _| {
                    u64::from(
                        <$half>::from_f64(f64::from($to(x)).mul_add(f64::from($to(y)), f64::from($to(z)))).to_bits(),
                    )
                }),
                Opcode::Max if nan => {
                    packed!(|x, y, _, _| $from(if $to(x).is_nan() || $to(y).is_nan() {
                        f32::NAN
                    } else {
                        lanes::max($to(x), $to(y))
                    }))
                }
                Opcode::Min if nan => {
                    packed!(|x, y, _, _| $from(if $to(x).is_nan() || $to(y).is_nan() {
                        f32::NAN
                    } else {
                        lanes::min($to(x), $to(y))
                    }))
                }
                Opcode::Max => packed!(|x, y, _, _| $from(lanes::max($to(x), $to(y)))),
                Opcode::Min => packed!(|x, y, _, _| $from(lanes::min($to(x), $to(y)))),
                Opcode::Abs => |x, _, _, _| x & 0x7fff_7fff,
                Opcode::Neg => |x, _, _, _| x & 0xffff_ffff ^ 0x8000_8000,
                _ => return None,
            })
        }
    };
}

packed_functions!(f16x2_function, h, hb, f16);
packed_functions!(bf16x2_function, b, bb, bf16);

/// Clamped to [0, 1], a NaN to +0 (`.sat`).
fn unit(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 }
}

/// 9.7.9.22. Integers to integers extend or cut; floats to integers saturate; the rounding is the modifier's.
fn conversion(instruction: &Instruction) -> Result<Function, String> {
    let mut types = instruction.types();
    let (Some(to), Some(from)) = (types.next(), types.next()) else { return Err("cvt needs two types".into()) };
    let rounding = instruction.modifiers().iter().copied().find(|m| {
        use Modifier::*;
        matches!(m, Rn | Rz | Rm | Rp | Rni | Rzi | Rmi | Rpi)
    });
    let has = |modifier| instruction.has(modifier);
    let (relu, finite, to_zero) = (has(Modifier::Relu), has(Modifier::Satfinite), has(Modifier::Rz));
    let wide_half = matches!(to, Type::F16x2 | Type::Bf16x2);
    match (to, from) {
        _ if has(Modifier::Pack) => return pack(to).ok_or_else(|| "not to this type".into()),
        _ if has(Modifier::Rs) => {}
        (Type::E4m3x2 | Type::E5m2x2, _) => {
            return round::to_bytes(to == Type::E5m2x2, relu, from).ok_or_else(|| "not from this type".into());
        }
        (Type::F16x2 | Type::Bf16x2, Type::E4m3x2 | Type::E5m2x2) => {
            return Ok(round::from_bytes(from == Type::E5m2x2, relu, to == Type::Bf16x2));
        }
        (Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2, Type::F32)
            if (relu || finite || to_zero || wide_half) && !has(Modifier::Sat) && !has(Modifier::Ftz) =>
        {
            let brain = matches!(to, Type::Bf16 | Type::Bf16x2);
            return Ok(round::half_conversion(brain, to_zero, relu, finite, wide_half));
        }
        (Type::Tf32, Type::F32) => {
            return Ok(round::tf32_conversion(has(Modifier::Rna), to_zero, relu, finite));
        }
        // Exact, then to nearest: one rounding.
        (Type::Bf16, Type::F16) => return Ok(|a, _, _, _| bb(h(a))),
        (Type::F16, Type::Bf16) => return Ok(|a, _, _, _| hb(b(a))),
        (Type::F32, Type::F32 | Type::F16) if has(Modifier::Sat) && rounding.is_none() => {
            return Ok(match from {
                Type::F32 => |a, _, _, _| bits(unit(f32s(a))),
                _ => |a, _, _, _| bits(unit(h(a))),
            });
        }
        _ => {}
    }
    if has(Modifier::Sat) || relu || finite || has(Modifier::Rs) {
        return Err("this conversion's saturation has no semantics here".into());
    }
    macro_rules! from_integer {
        ($native:ty) => {
            match to {
                Type::U8 | Type::S8 => |a, _, _, _| a as $native as i128 as u8 as u64,
                Type::U16 => |a, _, _, _| a as $native as i128 as u16 as u64,
                Type::S16 => |a, _, _, _| a as $native as i128 as u16 as u64,
                Type::U32 | Type::S32 => |a, _, _, _| a as $native as i128 as u32 as u64,
                Type::U64 | Type::S64 => |a, _, _, _| a as $native as i128 as u64,
                Type::F32 if rounding == Some(Modifier::Rn) => |a, _, _, _| bits(a as $native as f32),
                Type::F64 if rounding == Some(Modifier::Rn) => |a, _, _, _| (a as $native as f64).to_bits(),
                Type::F16 if rounding == Some(Modifier::Rn) => {
                    |a, _, _, _| u64::from(f16::from_f64(a as $native as f64).to_bits())
                }
                _ => return Err("this rounding of an integer has no semantics here".into()),
            }
        };
    }
    // To an integer, or to one within a floating-point type of the same size.
    macro_rules! to_whole {
        ($value:expr, $round:ident) => {
            match to {
                Type::F64 => |a, _, _, _| f64::from($value(a).$round()).to_bits(),
                Type::F32 => |a, _, _, _| bits($value(a).$round() as f32),
                Type::F16 => |a, _, _, _| u64::from(f16::from_f64(f64::from($value(a).$round())).to_bits()),
                Type::S8 => |a, _, _, _| u64::from($value(a).$round() as i8 as u8),
                Type::U8 => |a, _, _, _| u64::from($value(a).$round() as u8),
                Type::S16 => |a, _, _, _| u64::from($value(a).$round() as i16 as u16),
                Type::U16 => |a, _, _, _| u64::from($value(a).$round() as u16),
                Type::S32 => |a, _, _, _| u64::from($value(a).$round() as i32 as u32),
                Type::U32 => |a, _, _, _| u64::from($value(a).$round() as u32),
                Type::S64 => |a, _, _, _| $value(a).$round() as i64 as u64,
                Type::U64 => |a, _, _, _| $value(a).$round() as u64,
                _ => return Err("this conversion has no semantics here".into()),
            }
        };
    }
    macro_rules! from_float {
        ($value:expr) => {
            match (to, rounding) {
                (Type::F64, None) => |a, _, _, _| f64::from($value(a)).to_bits(),
                (Type::F32, None) => |a, _, _, _| bits($value(a) as f32),
                (Type::F32, Some(Modifier::Rn)) => |a, _, _, _| bits($value(a) as f32),
                (Type::F16, Some(Modifier::Rn)) => {
                    |a, _, _, _| u64::from(f16::from_f64(f64::from($value(a))).to_bits())
                }
                (Type::Bf16, Some(Modifier::Rn)) => {
                    |a, _, _, _| u64::from(bf16::from_f64(f64::from($value(a))).to_bits())
                }
                (_, Some(Modifier::Rni)) => to_whole!($value, round_ties_even),
                (_, Some(Modifier::Rzi)) => to_whole!($value, trunc),
                (_, Some(Modifier::Rmi)) => to_whole!($value, floor),
                (_, Some(Modifier::Rpi)) => to_whole!($value, ceil),
                _ => return Err("this rounding has no semantics here".into()),
            }
        };
    }
    Ok(match from {
        Type::U8 => from_integer!(u8),
        Type::S8 => from_integer!(i8),
        Type::U16 => from_integer!(u16),
        Type::S16 => from_integer!(i16),
        Type::U32 => from_integer!(u32),
        Type::S32 => from_integer!(i32),
        Type::U64 => from_integer!(u64),
        Type::S64 => from_integer!(i64),
        Type::F32 => from_float!(f32s),
        Type::F64 => from_float!(f64::from_bits),
        Type::F16 => from_float!(h),
        Type::Bf16 => from_float!(b),
        _ => return Err("this conversion has no semantics here".into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(opcode: Opcode, modifiers: &str, operands: &[u64]) -> u64 {
        let names = modifiers.split('.').map(|m| Modifier::from_name(m).unwrap()).collect();
        let register = |index| ptx::Operand::Register(ptx::Register { bank: 0, index });
        let operands_: Vec<_> = (0..=operands.len() as u32)
            .map(|i| if opcode == Opcode::Lop3 && i == 4 { ptx::Operand::Integer(0) } else { register(i) })
            .collect();
        let instruction = Instruction::new(opcode, names, operands_).unwrap();
        let value = |i: usize| operands.get(i).copied().unwrap_or(0);
        function(&instruction).unwrap()(value(0), value(1), value(2), value(3))
    }

    #[test]
    fn bit_fields() {
        assert_eq!(run(Opcode::Bfe, "u32", &[0xabcd_1234, 8, 8]), 0x12);
        assert_eq!(run(Opcode::Bfe, "s32", &[0x0000_8000, 8, 8]), 0xffff_ff80);
        assert_eq!(run(Opcode::Bfe, "s32", &[0x8000_0000, 28, 8]), 0xffff_fff8);
        assert_eq!(run(Opcode::Bfe, "u32", &[0xffff_ffff, 0, 0]), 0);
        assert_eq!(run(Opcode::Bfe, "u32", &[0xffff_ffff, 40, 8]), 0);
        assert_eq!(run(Opcode::Bfi, "b32", &[0xff, 0x1111_1111, 8, 8]), 0x1111_ff11);
        assert_eq!(run(Opcode::Bfind, "u32", &[0x10]), 4);
        assert_eq!(run(Opcode::Bfind, "s32", &[0xffff_ffff]), 0xffff_ffff);
        assert_eq!(run(Opcode::Brev, "b32", &[1]), 0x8000_0000);
        assert_eq!(run(Opcode::Clz, "b64", &[1]), 63);
    }

    #[test]
    fn permutations_and_tables() {
        assert_eq!(run(Opcode::Prmt, "b32", &[0x3322_1100, 0x7766_5544, 0x7410]), 0x7744_1100);
        assert_eq!(run(Opcode::Prmt, "b32", &[0x80, 0, 0x8888]), 0xffff_ffff);
        assert_eq!(run(Opcode::Lop3, "b32", &[0b1100, 0b1010, 0b0110, 0x96]), 0b1100 ^ 0b1010 ^ 0b0110);
        assert_eq!(run(Opcode::Shf, "l.wrap.b32", &[0x8000_0000, 1, 1]), 3);
    }

    #[test]
    fn shifts_clamp_and_division_is_total() {
        assert_eq!(run(Opcode::Shl, "b32", &[1, 32]), 0);
        assert_eq!(run(Opcode::Shr, "s32", &[0x8000_0000, 99]), 0xffff_ffff);
        assert_eq!(run(Opcode::Shr, "u32", &[0x8000_0000, 32]), 0);
        assert_eq!(run(Opcode::Div, "s32", &[7, 0]), 0xffff_ffff);
        assert_eq!(run(Opcode::Div, "s32", &[0x8000_0000, 0xffff_ffff]), 0x8000_0000);
        assert_eq!(run(Opcode::Rem, "s32", &[0xffff_fff9, 3]), 0xffff_ffff);
        assert_eq!(run(Opcode::Mul, "hi.s32", &[0xffff_ffff, 2]), 0xffff_ffff);
    }

    #[test]
    fn conversions_round_and_saturate() {
        assert_eq!(run(Opcode::Cvt, "rzi.s32.f32", &[bits(-1.9)]) as u32 as i32, -1);
        assert_eq!(run(Opcode::Cvt, "rni.s32.f32", &[bits(2.5)]), 2);
        assert_eq!(run(Opcode::Cvt, "rzi.u32.f32", &[bits(-3.0)]), 0);
        assert_eq!(run(Opcode::Cvt, "rzi.f64.f64", &[(-2.75f64).to_bits()]), (-2.0f64).to_bits());
        assert_eq!(run(Opcode::Cvt, "rni.f32.f32", &[bits(3.5)]), bits(4.0));
        assert_eq!(
            run(Opcode::Cvt, "rpi.f16.f16", &[u64::from(f16::from_f32(0.25).to_bits())]),
            u64::from(f16::ONE.to_bits())
        );
        assert_eq!(run(Opcode::Cvt, "s64.s32", &[0xffff_fffe]), 0xffff_ffff_ffff_fffe);
        assert_eq!(run(Opcode::Cvt, "rn.f32.s32", &[0xffff_ffff]), bits(-1.0));
        assert_eq!(run(Opcode::Cvt, "rna.tf32.f32", &[bits(1.0 + 1.0 / 2048.0)]), bits(1.0 + 1.0 / 1024.0));
    }
}
