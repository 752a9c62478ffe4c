//! Instructions as functions of scalars, for those without vector code of their own.
//!
//! Values travel as `u64` with zeros above their width. Section numbers are the PTX ISA's (version 9.0).

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
        Type::S16 => by!(|x: u64| x as i16),
        Type::F16 => by!(|x: u64| f16::from_bits(x as u16)),
        Type::Bf16 => by!(|x: u64| bf16::from_bits(x as u16)),
        _ => None,
    }
}

/// What an atomic makes of the old value and its operands (9.7.13.5).
pub(crate) fn atomic(instruction: &Instruction) -> Result<fn(u64, u64, u64) -> u64, String> {
    let signed = instruction.ty() == Some(Type::S32);
    let float = instruction.ty() == Some(Type::F32);
    let operation = instruction.modifiers().iter().find(|m| {
        use Modifier::*;
        matches!(m, Add | Min | Max | Inc | Dec | Exch | And | Or | Xor | Cas)
    });
    Ok(match operation {
        Some(Modifier::Add) if float => {
            |old, x, _| u64::from((f32::from_bits(old as u32) + f32::from_bits(x as u32)).to_bits())
        }
        Some(Modifier::Add) => |old, x, _| u64::from((old as u32).wrapping_add(x as u32)),
        Some(Modifier::Min) if signed => |old, x, _| u64::from((old as i32).min(x as i32) as u32),
        Some(Modifier::Max) if signed => |old, x, _| u64::from((old as i32).max(x as i32) as u32),
        Some(Modifier::Min) if !float => |old, x, _| old.min(x),
        Some(Modifier::Max) if !float => |old, x, _| old.max(x),
        Some(Modifier::Inc) => |old, x, _| if old >= x { 0 } else { old + 1 },
        Some(Modifier::Dec) => |old, x, _| if old == 0 || old > x { x } else { old - 1 },
        Some(Modifier::Exch) => |_, x, _| x,
        Some(Modifier::And) => |old, x, _| old & x,
        Some(Modifier::Or) => |old, x, _| old | x,
        Some(Modifier::Xor) => |old, x, _| old ^ x,
        Some(Modifier::Cas) => |old, compare, x| if old == compare { x } else { old },
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
    let ty = instruction.ty().ok_or("an instruction without a type")?;
    let directed = [Modifier::Rz, Modifier::Rm, Modifier::Rp].iter().any(|&m| instruction.has(m));
    if instruction.opcode() == Opcode::Cvt {
        return conversion(instruction);
    }
    if directed {
        return Err("directed rounding has no semantics here".into());
    }
    if instruction.has(Modifier::Sat) && ty.is_float() {
        return Err("saturation to [0, 1] has no semantics here".into());
    }
    if instruction.has(Modifier::Relu) {
        return Err("`.relu` has no semantics here".into());
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
    let modes = [Modifier::F4e, Modifier::B4e, Modifier::Rc8, Modifier::Ecl, Modifier::Ecr, Modifier::Rc16];
    if modes.iter().any(|&mode| instruction.has(mode)) {
        return None;
    }
    Some(|a, b, selector, _| {
        let bytes = b << 32 | a;
        (0..4).fold(0, |out, place| {
            let pick = selector >> (4 * place) & 15;
            let byte = bytes >> (8 * (pick & 7)) & 255;
            let byte = if pick & 8 == 0 { byte } else { 255 * (byte >> 7) };
            out | byte << (8 * place)
        })
    })
}

fn cvta(instruction: &Instruction) -> Option<Function> {
    use crate::program::{LOCAL_WINDOW, SHARED_WINDOW};
    let to = instruction.has(Modifier::To);
    Some(match () {
        // A parameter's address as a value is generic already.
        () if instruction.has(Modifier::Global) || instruction.has(Modifier::Param) => |a, _, _, _| a,
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

/// 9.7.9.22. Integers to integers extend or cut; floats to integers saturate; the rounding is the modifier's.
fn conversion(instruction: &Instruction) -> Result<Function, String> {
    let mut types = instruction.types();
    let (Some(to), Some(from)) = (types.next(), types.next()) else { return Err("cvt needs two types".into()) };
    if instruction.has(Modifier::Sat) || instruction.has(Modifier::Relu) {
        return Err("this conversion's saturation has no semantics here".into());
    }
    let rounding = instruction.modifiers().iter().copied().find(|m| {
        use Modifier::*;
        matches!(m, Rn | Rz | Rm | Rp | Rni | Rzi | Rmi | Rpi)
    });
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
    macro_rules! to_integer {
        ($value:expr, $round:ident) => {
            match to {
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
                (Type::F32, Some(Modifier::Rni)) => |a, _, _, _| bits($value(a).round_ties_even() as f32),
                (Type::F32, Some(Modifier::Rzi)) => |a, _, _, _| bits($value(a).trunc() as f32),
                (Type::F32, Some(Modifier::Rmi)) => |a, _, _, _| bits($value(a).floor() as f32),
                (Type::F32, Some(Modifier::Rpi)) => |a, _, _, _| bits($value(a).ceil() as f32),
                (_, Some(Modifier::Rni)) => to_integer!($value, round_ties_even),
                (_, Some(Modifier::Rzi)) => to_integer!($value, trunc),
                (_, Some(Modifier::Rmi)) => to_integer!($value, floor),
                (_, Some(Modifier::Rpi)) => to_integer!($value, ceil),
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
        Type::F32 if to == Type::Tf32 => |a, _, _, _| {
            // Round to 10 bits of mantissa, ties away from zero.
            let magnitude = a & 0x7fff_ffff;
            let rounded = if magnitude > 0x7f80_0000 { a } else { a + 0x1000 };
            rounded & 0xffff_e000
        },
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
        assert_eq!(run(Opcode::Cvt, "s64.s32", &[0xffff_fffe]), 0xffff_ffff_ffff_fffe);
        assert_eq!(run(Opcode::Cvt, "rn.f32.s32", &[0xffff_ffff]), bits(-1.0));
        assert_eq!(run(Opcode::Cvt, "rna.tf32.f32", &[bits(1.0 + 1.0 / 2048.0)]), bits(1.0 + 1.0 / 1024.0));
    }
}
