//! Rounding that the machine does not do: directed, to narrow formats, and with `.sat`, `.satfinite` and `.relu`.
//!
//! Where PTX leaves a choice: a NaN is the canonical one of its format (0x7fffffff, 0x7fff, 0x7f), as the chips give it.

use half::{bf16, f16};
use ptx::Modifier;

use super::{Function, bits, f32s};
use crate::lanes;

/// Modes as constants of the functions below.
pub(super) const NEAREST: u8 = 0;
pub(super) const ZERO: u8 = 1;
pub(super) const DOWN: u8 = 2;
pub(super) const UP: u8 = 3;

/// The mode a list of modifiers asks for; to nearest even where it asks for none.
pub(super) fn mode(modifiers: &[Modifier]) -> u8 {
    let mode = modifiers.iter().find_map(|modifier| match modifier {
        Modifier::Rz => Some(ZERO),
        Modifier::Rm => Some(DOWN),
        Modifier::Rp => Some(UP),
        _ => None,
    });
    mode.unwrap_or(NEAREST)
}

/// The sum of two doubles and what rounding it lost (Knuth 1969, "two-sum").
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let back = sum - a;
    (sum, (a - (sum - back)) + (b - back))
}

/// `value + rest`, of which `rest` is too small to be seen in `value`, as a single.
fn single<const MODE: u8>(value: f64, rest: f64) -> f32 {
    let nearest = value as f32;
    let off = value - f64::from(nearest);
    // The sign of what the nearest single lacks.
    let lacking = if off != 0.0 { off } else { rest };
    let toward_zero = MODE == ZERO;
    if nearest.is_nan() || value.is_infinite() {
        nearest
    } else if lacking < 0.0 && (MODE == DOWN || toward_zero && value > 0.0) {
        nearest.next_down()
    } else if lacking > 0.0 && (MODE == UP || toward_zero && value < 0.0) {
        nearest.next_up()
    } else {
        nearest
    }
}

pub(super) const ADD: u8 = 0;
pub(super) const SUB: u8 = 1;
pub(super) const MUL: u8 = 2;
pub(super) const FMA: u8 = 3;
pub(super) const DIV: u8 = 4;
pub(super) const SQRT: u8 = 5;
/// Of doubles only.
pub(super) const RCP: u8 = 6;

/// An operation on singles in any rounding, with `.ftz` and `.sat` (9.7.3): a product of singles is exact as a double, and what a
/// sum or quotient lacks is known exactly.
fn operate<const OP: u8, const MODE: u8, const FTZ: bool, const SAT: bool>(a: f32, b: f32, c: f32) -> f32 {
    let flush = |x: f32| if FTZ { lanes::flush(x) } else { x };
    let (a, b, c) = (flush(a), flush(b), flush(c));
    let rounded = if MODE == NEAREST {
        match OP {
            ADD => a + b,
            SUB => a - b,
            MUL => a * b,
            FMA => a.mul_add(b, c),
            DIV => a / b,
            _ => a.sqrt(),
        }
    } else {
        let (a, b, c) = (f64::from(a), f64::from(b), f64::from(c));
        let (value, rest) = match OP {
            ADD => two_sum(a, b),
            SUB => two_sum(a, -b),
            MUL => (a * b, 0.0),
            FMA => two_sum(a * b, c),
            DIV => {
                let quotient = a / b;
                let rest = (-quotient).mul_add(b, a);
                (quotient, if b < 0.0 { -rest } else { rest })
            }
            _ => {
                let root = a.sqrt();
                (root, (-root).mul_add(root, a))
            }
        };
        // A sum of opposite numbers is -0 when rounding down.
        if MODE == DOWN && value == 0.0 && matches!(OP, ADD | SUB | FMA) && cancelled::<OP>(a, b, c) {
            -0.0
        } else {
            single::<MODE>(value, rest)
        }
    };
    let flushed = flush(rounded);
    match SAT {
        // 9.7.3: NaN becomes +0.
        true if flushed.is_nan() => 0.0,
        true => flushed.clamp(0.0, 1.0) + 0.0,
        false => flushed,
    }
}

/// Whether a zero sum comes of terms that are not both zeros of one sign.
fn cancelled<const OP: u8>(a: f64, b: f64, c: f64) -> bool {
    let (x, y) = match OP {
        ADD => (a, b),
        SUB => (a, -b),
        _ => (a * b, c),
    };
    x.is_sign_negative() != y.is_sign_negative()
}

macro_rules! choose {
    ($op:expr, $mode:expr, $ftz:expr, $sat:expr, $make:ident) => {
        choose!(@op $op, $mode, $ftz, $sat, $make, [ADD SUB MUL FMA DIV SQRT])
    };
    (@op $op:expr, $mode:expr, $ftz:expr, $sat:expr, $make:ident, [$($o:ident)+]) => {
        match $op { $($o => choose!(@mode $o, $mode, $ftz, $sat, $make),)+ _ => return None }
    };
    (@mode $o:ident, $mode:expr, $ftz:expr, $sat:expr, $make:ident) => {
        match $mode {
            ZERO => choose!(@flags $o, ZERO, $ftz, $sat, $make),
            DOWN => choose!(@flags $o, DOWN, $ftz, $sat, $make),
            UP => choose!(@flags $o, UP, $ftz, $sat, $make),
            _ => choose!(@flags $o, NEAREST, $ftz, $sat, $make),
        }
    };
    (@flags $o:ident, $m:ident, $ftz:expr, $sat:expr, $make:ident) => {
        match ($ftz, $sat) {
            (false, false) => $make!($o, $m, false, false),
            (false, true) => $make!($o, $m, false, true),
            (true, false) => $make!($o, $m, true, false),
            (true, true) => $make!($o, $m, true, true),
        }
    };
}

macro_rules! one {
    ($o:ident, $m:ident, $f:literal, $s:literal) => {
        |a, b, c, _| bits(operate::<$o, $m, $f, $s>(f32s(a), f32s(b), f32s(c)))
    };
}

macro_rules! two {
    ($o:ident, $m:ident, $f:literal, $s:literal) => {
        |a, b, c, _| {
            let high = |x: u64| f32s(x >> 32);
            bits(operate::<$o, $m, $f, $s>(f32s(a), f32s(b), f32s(c)))
                | bits(operate::<$o, $m, $f, $s>(high(a), high(b), high(c))) << 32
        }
    };
}

macro_rules! half {
    ($o:ident, $m:ident, $f:literal, $s:literal) => {
        |a, b, c, _| {
            bits(operate::<$o, $m, $f, $s>(super::h(a), if $o == FMA { super::h(b) } else { f32s(b) }, f32s(c)))
        }
    };
}

macro_rules! brain {
    ($o:ident, $m:ident, $f:literal, $s:literal) => {
        |a, b, c, _| {
            bits(operate::<$o, $m, $f, $s>(super::b(a), if $o == FMA { super::b(b) } else { f32s(b) }, f32s(c)))
        }
    };
}

/// What an operation on singles takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operands {
    Single,
    /// Two at once (`.f32x2`).
    Pair,
    /// Halves, but for the term that is added (`.f32.f16`).
    Half,
    /// The same (`.f32.bf16`).
    Brain,
}

/// An operation on singles.
pub(super) fn operation(op: u8, mode: u8, ftz: bool, sat: bool, operands: Operands) -> Option<Function> {
    Some(match operands {
        Operands::Single => choose!(op, mode, ftz, sat, one),
        Operands::Pair => choose!(op, mode, ftz, sat, two),
        Operands::Half => choose!(op, mode, ftz, sat, half),
        Operands::Brain => choose!(op, mode, ftz, sat, brain),
    })
}

/// `x` times 2 to the power `by`.
fn scaled(mut x: f64, mut by: i32) -> f64 {
    while by != 0 && x != 0.0 && x.is_finite() {
        let step = by.clamp(-1000, 1000);
        x *= 2f64.powi(step);
        by -= step;
    }
    x
}

/// The power of two at or below a number other than zero.
fn exponent(x: f64) -> i32 {
    let stored = (x.to_bits() >> 52 & 0x7ff) as i32;
    if stored == 0 { exponent(x * 2f64.powi(64)) - 64 } else { stored - 1023 }
}

/// A number of the same sign as the sum of these; exact (Shewchuk 1997, "grow-expansion").
fn sign_of_sum(terms: &[f64]) -> f64 {
    let mut expansion: Vec<f64> = Vec::with_capacity(terms.len());
    for &term in terms {
        let mut carried = term;
        for slot in &mut expansion {
            let (sum, rest) = two_sum(carried, *slot);
            (carried, *slot) = (sum, rest);
        }
        expansion.push(carried);
    }
    expansion.into_iter().rev().find(|&part| part != 0.0).unwrap_or(0.0)
}

/// A product as two doubles whose sum it is, of factors whose exponents are near zero.
fn two_product(a: f64, b: f64) -> (f64, f64) {
    let product = a * b;
    (product, a.mul_add(b, -product))
}

/// A number of the same sign as what `nearest` lacks of the exact result. Everything is scaled to exponents near zero first.
fn lacking<const OP: u8>(a: f64, b: f64, c: f64, nearest: f64) -> f64 {
    match OP {
        ADD => sign_of_sum(&[a, b, -nearest]),
        SUB => sign_of_sum(&[a, -b, -nearest]),
        MUL | FMA if a == 0.0 || b == 0.0 => 0.0,
        MUL | FMA => {
            let (x, y) = (exponent(a), exponent(b));
            let (product, rest) = two_product(scaled(a, -x), scaled(b, -y));
            if OP == FMA && c != 0.0 && exponent(c) - x - y > 900 {
                // The product is too small to be seen in the sum.
                return product;
            }
            let term = if OP == MUL || c == 0.0 {
                0.0
            } else if exponent(c) - x - y < -900 {
                2f64.powi(-900).copysign(c)
            } else {
                scaled(c, -x - y)
            };
            sign_of_sum(&[product, rest, term, -scaled(nearest, -x - y)])
        }
        SQRT => {
            let by = if a == 0.0 { 0 } else { exponent(a) / 2 };
            let root = scaled(nearest, -by);
            let (square, rest) = two_product(root, root);
            sign_of_sum(&[scaled(a, -2 * by), -square, -rest])
        }
        _ if a == 0.0 || b == 0.0 => 0.0,
        _ => {
            let (x, y) = (exponent(a), exponent(b));
            let divisor = scaled(b, -y);
            let (product, rest) = two_product(scaled(nearest, y - x), divisor);
            sign_of_sum(&[scaled(a, -x), -product, -rest]) * divisor.signum()
        }
    }
}

/// An operation on doubles in a rounding other than to nearest (9.7.3).
fn operate_double<const OP: u8, const MODE: u8>(a: f64, b: f64, c: f64) -> f64 {
    let (a, b) = if OP == RCP { (1.0, a) } else { (a, b) };
    let nearest = match OP {
        ADD => a + b,
        SUB => a - b,
        MUL => a * b,
        FMA => a.mul_add(b, c),
        SQRT => a.sqrt(),
        _ => a / b,
    };
    let finite = a.is_finite() && (b.is_finite() || OP == SQRT) && (c.is_finite() || OP != FMA);
    let by_zero = matches!(OP, DIV | RCP) && b == 0.0;
    if nearest.is_nan() || !finite || by_zero {
        return nearest;
    }
    if nearest.is_infinite() {
        // The largest numbers lie between it and zero.
        let inward = MODE == ZERO || (MODE == DOWN) == (nearest > 0.0);
        return if inward { f64::MAX.copysign(nearest) } else { nearest };
    }
    let lacks = lacking::<OP>(a, b, c, nearest);
    if nearest == 0.0 && lacks == 0.0 && MODE == DOWN && matches!(OP, ADD | SUB | FMA) && cancelled::<OP>(a, b, c) {
        return -0.0;
    }
    let negative = nearest < 0.0 || nearest == 0.0 && nearest.is_sign_negative();
    if lacks < 0.0 && (MODE == DOWN || MODE == ZERO && !negative) {
        nearest.next_down()
    } else if lacks > 0.0 && (MODE == UP || MODE == ZERO && negative) {
        nearest.next_up()
    } else {
        nearest
    }
}

/// An operation on doubles in a directed rounding.
pub(super) fn double_operation(op: u8, mode: u8) -> Option<Function> {
    macro_rules! make {
        ($o:ident $m:ident) => {
            |a, b, c, _| {
                let [a, b, c] = [a, b, c].map(f64::from_bits);
                operate_double::<$o, $m>(a, b, c).to_bits()
            }
        };
    }
    macro_rules! modes {
        ($o:ident) => {
            match mode {
                ZERO => make!($o ZERO),
                DOWN => make!($o DOWN),
                _ => make!($o UP),
            }
        };
    }
    Some(match op {
        ADD => modes!(ADD),
        SUB => modes!(SUB),
        MUL => modes!(MUL),
        FMA => modes!(FMA),
        DIV => modes!(DIV),
        SQRT => modes!(SQRT),
        RCP => modes!(RCP),
        _ => return None,
    })
}

/// A single as a half by its bits (9.7.9.22).
fn to_half<const BF: bool, const TO_ZERO: bool, const RELU: bool, const FINITE: bool>(x: f32) -> u64 {
    let (nearest, back, infinity) = if BF {
        let half = bf16::from_f32(x);
        (half.to_bits(), half.to_f32(), 0x7f80)
    } else {
        let half = f16::from_f32(x);
        (half.to_bits(), half.to_f32(), 0x7c00)
    };
    if x.is_nan() {
        return 0x7fff;
    }
    if RELU && x.is_sign_negative() {
        return 0;
    }
    let toward_zero = TO_ZERO && back.abs() > x.abs();
    let half = if toward_zero { nearest - 1 } else { nearest };
    u64::from(if FINITE && half & 0x7fff == infinity { half - 1 } else { half })
}

/// `cvt` of a single to a half; of two, to a pair, the first into the upper half.
pub(super) fn half_conversion(brain: bool, to_zero: bool, relu: bool, finite: bool, pair: bool) -> Function {
    macro_rules! make {
        ($b:literal $z:literal $r:literal $f:literal) => {
            if pair {
                |a, b, _, _| to_half::<$b, $z, $r, $f>(f32s(a)) << 16 | to_half::<$b, $z, $r, $f>(f32s(b))
            } else {
                |a, _, _, _| to_half::<$b, $z, $r, $f>(f32s(a))
            }
        };
    }
    match (brain, to_zero, relu, finite) {
        (false, false, false, false) => make!(false false false false),
        (false, false, false, true) => make!(false false false true),
        (false, false, true, false) => make!(false false true false),
        (false, false, true, true) => make!(false false true true),
        (false, true, false, false) => make!(false true false false),
        (false, true, false, true) => make!(false true false true),
        (false, true, true, false) => make!(false true true false),
        (false, true, true, true) => make!(false true true true),
        (true, false, false, false) => make!(true false false false),
        (true, false, false, true) => make!(true false false true),
        (true, false, true, false) => make!(true false true false),
        (true, false, true, true) => make!(true false true true),
        (true, true, false, false) => make!(true true false false),
        (true, true, false, true) => make!(true true false true),
        (true, true, true, false) => make!(true true true false),
        (true, true, true, true) => make!(true true true true),
    }
}

/// A number as an 8-bit one, to nearest even, what is too large to the largest (`.satfinite`, which is always asked for).
fn to_byte<const E5M2: bool, const RELU: bool>(x: f32) -> u64 {
    // Bits of the mantissa, the exponent of 1.0 as stored, the largest finite number, the NaN.
    let (mantissa, bias, largest, nan) = if E5M2 { (2, 15, 0x7b, 0x7f) } else { (3, 7, 0x7e, 0x7f) };
    if x.is_nan() {
        return nan;
    }
    if RELU && x.is_sign_negative() {
        return 0;
    }
    let sign = u64::from(x.is_sign_negative()) << 7;
    let magnitude = f64::from(x.abs());
    if magnitude == 0.0 {
        return sign;
    }
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    if exponent > bias + 1 {
        return sign | largest;
    }
    let steps = (magnitude / 2f64.powi(exponent - mantissa)).round_ties_even() as u64;
    let stored = ((exponent + bias - 1) as u64) << mantissa;
    sign | (stored + steps).min(largest)
}

/// The number an 8-bit one stands for; exact in both halves.
fn from_byte<const E5M2: bool>(byte: u64) -> f32 {
    let magnitude = byte & 0x7f;
    let value = if E5M2 {
        // It is the upper byte of an `f16`.
        f16::from_bits((magnitude << 8) as u16).to_f32()
    } else if magnitude == 0x7f {
        f32::NAN
    } else {
        let (exponent, mantissa) = (magnitude as i32 >> 3, (magnitude & 7) as f32);
        if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) }
    };
    if byte & 0x80 == 0 { value } else { -value }
}

/// `cvt` to a pair of 8-bit numbers, from two singles (the first into the upper byte) or from a pair of halves.
pub(super) fn to_bytes(e5m2: bool, relu: bool, from: ptx::Type) -> Option<Function> {
    macro_rules! make {
        ($e:literal $r:literal) => {
            match from {
                ptx::Type::F32 => |a, b, _, _| to_byte::<$e, $r>(f32s(a)) << 8 | to_byte::<$e, $r>(f32s(b)),
                ptx::Type::F16x2 => {
                    |a, _, _, _| to_byte::<$e, $r>(super::h(a >> 16)) << 8 | to_byte::<$e, $r>(super::h(a))
                }
                ptx::Type::Bf16x2 => {
                    |a, _, _, _| to_byte::<$e, $r>(super::b(a >> 16)) << 8 | to_byte::<$e, $r>(super::b(a))
                }
                _ => return None,
            }
        };
    }
    Some(match (e5m2, relu) {
        (false, false) => make!(false false),
        (false, true) => make!(false true),
        (true, false) => make!(true false),
        (true, true) => make!(true true),
    })
}

/// `cvt` of a pair of 8-bit numbers to a pair of halves.
pub(super) fn from_bytes(e5m2: bool, relu: bool, brain: bool) -> Function {
    macro_rules! make {
        ($e:literal $b:literal $r:literal) => {
            |a, _, _, _| {
                to_half::<$b, false, $r, false>(from_byte::<$e>(a >> 8 & 255)) << 16
                    | to_half::<$b, false, $r, false>(from_byte::<$e>(a & 255))
            }
        };
    }
    match (e5m2, brain, relu) {
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

/// A single with ten bits of mantissa; ties away from zero (`.rna`), else to nearest even or to zero.
fn to_tf32<const TIES_AWAY: bool, const TO_ZERO: bool, const RELU: bool, const FINITE: bool>(x: u64) -> u64 {
    let magnitude = x & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return 0x7fff_ffff;
    }
    if RELU && x >> 31 & 1 == 1 {
        return 0;
    }
    let half = if TO_ZERO {
        0
    } else if TIES_AWAY {
        0x1000
    } else {
        0xfff + (magnitude >> 13 & 1)
    };
    let rounded = if magnitude == 0x7f80_0000 { magnitude } else { (magnitude + half) & !0x1fff };
    let limited = if FINITE { rounded.min(0x7f7f_e000) } else { rounded };
    x & 0x8000_0000 | limited
}

/// `cvt` of a single to `.tf32`.
pub(super) fn tf32_conversion(ties_away: bool, to_zero: bool, relu: bool, finite: bool) -> Function {
    macro_rules! make {
        ($t:literal $z:literal) => {
            match (relu, finite) {
                (false, false) => |a, _, _, _| to_tf32::<$t, $z, false, false>(a),
                (false, true) => |a, _, _, _| to_tf32::<$t, $z, false, true>(a),
                (true, false) => |a, _, _, _| to_tf32::<$t, $z, true, false>(a),
                (true, true) => |a, _, _, _| to_tf32::<$t, $z, true, true>(a),
            }
        };
    }
    match (ties_away, to_zero) {
        (true, _) => make!(true false),
        (false, true) => make!(false true),
        (false, false) => make!(false false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_round_to_even() {
        for byte in 0..=255u64 {
            for e5m2 in [false, true] {
                let value = if e5m2 { from_byte::<true>(byte) } else { from_byte::<false>(byte) };
                let back = if e5m2 { to_byte::<true, false>(value) } else { to_byte::<false, false>(value) };
                if value.is_finite() {
                    assert_eq!(back, byte, "{value}");
                }
            }
        }
        assert_eq!((from_byte::<false>(0x7e), from_byte::<true>(0x7b)), (448.0, 57344.0));
        assert_eq!(to_byte::<false, false>(1.0625), 0x38);
        assert_eq!(to_byte::<false, false>(1.1875), 0x3a);
        assert_eq!((to_byte::<false, false>(1e9), to_byte::<false, false>(f32::NEG_INFINITY)), (0x7e, 0xfe));
        assert_eq!((to_byte::<false, true>(-1.0), to_byte::<true, false>(f32::NAN)), (0, 0x7f));
    }

    #[test]
    fn directed_rounding_brackets_the_nearest() {
        let pairs = [(1.0f32, f32::EPSILON / 3.0), (0.1, 0.7), (-0.3, 1e-9), (f32::MAX, f32::MAX), (3.0, 7.0)];
        for (a, b) in pairs {
            let exact = f64::from(a) + f64::from(b);
            let down = operate::<ADD, DOWN, false, false>(a, b, 0.0);
            let up = operate::<ADD, UP, false, false>(a, b, 0.0);
            let zero = operate::<ADD, ZERO, false, false>(a, b, 0.0);
            assert!(f64::from(down) <= exact && f64::from(up) >= exact, "{a} {b}: {down} {up}");
            assert!(f64::from(zero).abs() <= exact.abs() && (zero == down || zero == up));
            let product = operate::<MUL, ZERO, false, false>(a, b, 0.0);
            assert!(f64::from(product).abs() <= (f64::from(a) * f64::from(b)).abs());
        }
        assert_eq!(operate::<ADD, DOWN, false, false>(1.0, -1.0, 0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(operate::<DIV, ZERO, false, false>(1.0, 3.0, 0.0), 0.333_333_3);
        assert_eq!(operate::<ADD, NEAREST, false, true>(f32::NAN, 1.0, 0.0), 0.0);
        assert_eq!(operate::<FMA, NEAREST, false, true>(2.0, 3.0, 1.0), 1.0);
    }

    #[test]
    fn doubles_round_in_any_direction() {
        let tiny = f64::from_bits(1);
        let numbers = [1.0, 3.0, -0.1, 1e300, -1e-300, 2.5e-308, tiny, f64::MAX, 1.0 + f64::EPSILON];
        for a in numbers {
            for b in numbers {
                let check = |down: f64, up: f64, zero: f64, nearest: f64| {
                    assert!(down <= nearest && nearest <= up, "{a} {b}: {down} {nearest} {up}");
                    assert!(down == up || down.next_up() == up, "{a} {b}: {down} {up}");
                    assert!(zero == if nearest.is_sign_negative() { up } else { down }, "{a} {b}: {zero}");
                };
                macro_rules! check {
                    ($op:ident, $nearest:expr) => {
                        check(
                            operate_double::<$op, DOWN>(a, b, 0.3),
                            operate_double::<$op, UP>(a, b, 0.3),
                            operate_double::<$op, ZERO>(a, b, 0.3),
                            $nearest,
                        )
                    };
                }
                check!(ADD, a + b);
                check!(MUL, a * b);
                check!(FMA, a.mul_add(b, 0.3));
                check!(DIV, a / b);
            }
        }
        assert_eq!(operate_double::<MUL, DOWN>(0.5, 4.0, 0.0), 2.0);
        assert_eq!(operate_double::<MUL, UP>(tiny, tiny, 0.0), tiny);
        assert_eq!(operate_double::<FMA, DOWN>(-tiny, tiny, 1.0), 1.0f64.next_down());
        assert_eq!(operate_double::<FMA, UP>(1e300, 1e300, tiny), f64::INFINITY);
        assert_eq!(operate_double::<SQRT, UP>(2.0, 0.0, 0.0), 2f64.sqrt());
        assert_eq!(operate_double::<SQRT, DOWN>(2.0, 0.0, 0.0), 2f64.sqrt().next_down());
        assert_eq!(operate_double::<RCP, ZERO>(3.0, 0.0, 0.0), 1.0 / 3.0);
        assert_eq!(operate_double::<ADD, DOWN>(1.0, -1.0, 0.0).to_bits(), (-0.0f64).to_bits());
    }

    #[test]
    fn halves_and_tf32_saturate() {
        assert_eq!(to_half::<false, true, false, false>(65519.9), 0x7bff);
        assert_eq!(to_half::<false, false, false, true>(1e9), 0x7bff);
        assert_eq!(to_half::<true, false, true, false>(-2.0), 0);
        assert_eq!(to_tf32::<false, false, false, false>(0x3f80_1000), 0x3f80_0000);
        assert_eq!(to_tf32::<true, false, false, false>(0x3f80_1000), 0x3f80_2000);
        assert_eq!(to_tf32::<false, true, false, true>(0x7f80_0000), 0x7f7f_e000);
    }
}
