//! Which bits of a register are known, whatever the thread: enough to see alignment, and that an `or` adds.

use std::collections::HashMap;

use ptx::{Instruction, Kernel, Modifier, Opcode, Operand, Register, Special};

use super::{is_integer_type, variable_bits};

/// Bits of the low 32 that are known to be 0 or 1. Both set: no value at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bits {
    zeros: u32,
    ones: u32,
}

impl Bits {
    pub(super) const UNKNOWN: Self = Self { zeros: 0, ones: 0 };
    /// What nothing has been written to yet holds.
    const NEVER: Self = Self { zeros: u32::MAX, ones: u32::MAX };

    pub(super) const fn constant(value: u32) -> Self {
        Self { zeros: !value, ones: value }
    }

    /// A multiple of a power of two.
    pub(super) const fn multiple_of(power: u32) -> Self {
        Self { zeros: power.wrapping_sub(1) & !power, ones: 0 }
    }

    fn below(bound: u32) -> Self {
        let used = u32::MAX.checked_shr(bound.saturating_sub(1).leading_zeros()).unwrap_or(0);
        Self { zeros: !used, ones: 0 }
    }

    fn is_never(self) -> bool {
        self.zeros & self.ones != 0
    }

    fn either(self, other: Self) -> Self {
        Self { zeros: self.zeros & other.zeros, ones: self.ones & other.ones }
    }

    fn as_constant(self) -> Option<u32> {
        (self.zeros == !self.ones).then_some(self.ones)
    }

    /// How many bits are known from the lowest on.
    fn known_low(self) -> u32 {
        (self.zeros | self.ones).trailing_ones()
    }

    /// The largest power of two, at most `most`, that the value is known modulo, and the remainder.
    pub(super) fn low(self, most: u32) -> (u32, u32) {
        let modulus = 1u32.checked_shl(self.known_low()).unwrap_or(most).min(most);
        (modulus, self.ones & (modulus - 1))
    }

    /// Whether no bit can be set in both.
    pub(super) fn is_disjoint(self, other: Self) -> bool {
        self.zeros | other.zeros == u32::MAX
    }

    fn low_bits(value: u32, known: u32) -> Self {
        let mask = 1u32.checked_shl(known).map_or(u32::MAX, |bit| bit - 1);
        Self { zeros: !value & mask, ones: value & mask }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        if self.is_disjoint(other) {
            return Self { zeros: self.zeros & other.zeros, ones: self.ones | other.ones };
        }
        let mut sum = Self::low_bits(self.ones.wrapping_add(other.ones), self.known_low().min(other.known_low()));
        if let Some(most) = (!self.zeros).checked_add(!other.zeros) {
            sum.zeros |= Self::below(most.saturating_add(1)).zeros;
        }
        sum
    }

    pub(super) fn times(self, other: Self) -> Self {
        let (factor, value) = match (self.as_constant(), other.as_constant()) {
            (Some(factor), _) => (factor, other),
            (None, Some(factor)) => (factor, self),
            (None, None) => {
                let trailing = self.zeros.trailing_ones() + other.zeros.trailing_ones();
                return Self::low_bits(0, trailing.min(32));
            }
        };
        match factor {
            0 => Self::constant(0),
            _ if factor.is_power_of_two() => value.shl(factor.trailing_zeros()),
            _ => {
                let known = (value.known_low() + factor.trailing_zeros()).min(32);
                Self::low_bits(value.ones.wrapping_mul(factor), known)
            }
        }
    }

    fn negated(self) -> Self {
        Self::low_bits(self.ones.wrapping_neg(), self.known_low())
    }

    fn shl(self, by: u32) -> Self {
        match (self.zeros.checked_shl(by), self.ones.checked_shl(by)) {
            (Some(zeros), Some(ones)) => Self { zeros: zeros | ((1 << by) - 1), ones },
            _ => Self::constant(0),
        }
    }

    fn shr(self, by: u32) -> Self {
        match (self.zeros.checked_shr(by), self.ones.checked_shr(by)) {
            (Some(zeros), Some(ones)) => Self { zeros: zeros | !(u32::MAX >> by), ones },
            _ => Self::constant(0),
        }
    }

    fn and(self, other: Self) -> Self {
        Self { zeros: self.zeros | other.zeros, ones: self.ones & other.ones }
    }

    fn or(self, other: Self) -> Self {
        Self { zeros: self.zeros & other.zeros, ones: self.ones | other.ones }
    }

    fn xor(self, other: Self) -> Self {
        let known = (self.zeros | self.ones) & (other.zeros | other.ones);
        let value = self.ones ^ other.ones;
        Self { zeros: known & !value, ones: known & value }
    }
}

/// Whether an instruction computes one integer from integers.
pub(super) fn is_integer(instruction: &Instruction) -> bool {
    let computes = matches!(
        instruction.opcode(),
        Opcode::Mov
            | Opcode::Cvt
            | Opcode::Add
            | Opcode::Sub
            | Opcode::Mul
            | Opcode::Mad
            | Opcode::Div
            | Opcode::Rem
            | Opcode::Neg
            | Opcode::Min
            | Opcode::Max
            | Opcode::And
            | Opcode::Or
            | Opcode::Xor
            | Opcode::Not
            | Opcode::Shl
            | Opcode::Shr
            | Opcode::Bfe
            | Opcode::Selp
    );
    let one = matches!(instruction.operands().first(), Some(Operand::Register(_)));
    computes && one && instruction.types().all(is_integer_type) && !instruction.has(Modifier::Sat)
}

/// What is known of a special register in a kernel's every launch.
pub(super) fn of_special(kernel: &Kernel, special: Special) -> Bits {
    let block = kernel.required_block;
    let below = |axis: usize, most: u32| Bits::below(block.map_or(most, |block| block[axis]));
    let exactly = |axis: usize| block.map_or(Bits::below(1025), |block| Bits::constant(block[axis]));
    match special {
        Special::TidX => below(0, 1024),
        Special::TidY => below(1, 1024),
        Special::TidZ => below(2, 64),
        Special::NtidX => exactly(0),
        Special::NtidY => exactly(1),
        Special::NtidZ => exactly(2),
        Special::Laneid | Special::Warpid => Bits::below(32),
        _ => Bits::UNKNOWN,
    }
}

/// Passes over a kernel after which its fixed point is given up.
const MOST_PASSES: usize = 256;

/// The bits of registers that are known wherever they are read: the fixed point from nothing written on.
pub(super) fn of_registers(
    kernel: &Kernel,
    instructions: &[&Instruction],
    writers: &HashMap<Register, Vec<usize>>,
) -> HashMap<Register, Bits> {
    let mut bits: HashMap<Register, Bits> = writers
        .iter()
        .map(|(&register, writers)| (register, if writers.is_empty() { Bits::UNKNOWN } else { Bits::NEVER }))
        .collect();
    let mut positions: Vec<usize> = writers.values().flatten().copied().collect();
    positions.sort_unstable();
    positions.dedup();
    for _ in 0..MOST_PASSES {
        let mut changed = false;
        for &position in &positions {
            let computed = result(kernel, instructions[position], &bits);
            instructions[position].for_each_def(|register| {
                if let Some(known) = bits.get_mut(&register) {
                    let now = known.either(computed);
                    changed |= now != *known;
                    *known = now;
                }
            });
        }
        if !changed {
            return bits;
        }
    }
    bits.into_keys().map(|register| (register, Bits::UNKNOWN)).collect()
}

/// What is known of an instruction's result.
fn result(kernel: &Kernel, instruction: &Instruction, registers: &HashMap<Register, Bits>) -> Bits {
    if !is_integer(instruction) {
        return Bits::UNKNOWN;
    }
    let of = |operand: &Operand| match operand {
        Operand::Register(register) => registers.get(register).copied().unwrap_or(Bits::UNKNOWN),
        Operand::Integer(integer) => Bits::constant(*integer as u32),
        Operand::Special(special) => of_special(kernel, *special),
        Operand::VariableAddress(variable, offset) => {
            variable_bits(kernel, *variable).plus(Bits::constant(*offset as u32))
        }
        _ => Bits::UNKNOWN,
    };
    let operands: Vec<Bits> = instruction.operands().iter().skip(1).map(of).collect();
    if operands.iter().any(|bits| bits.is_never()) {
        return Bits::NEVER;
    }
    let signed = instruction.ty().is_some_and(|ty| ty.is_signed());
    let wide = instruction.ty().is_some_and(|ty| ty.bits() == 64);
    let low = !instruction.has(Modifier::Hi);
    match (instruction.opcode(), operands.as_slice()) {
        (Opcode::Mov | Opcode::Cvt, &[a]) => a,
        (Opcode::Add, &[a, b]) => a.plus(b),
        (Opcode::Sub, &[a, b]) => a.plus(b.negated()),
        (Opcode::Neg, &[a]) => a.negated(),
        (Opcode::Mul, &[a, b]) if low => a.times(b),
        (Opcode::Mad, &[a, b, c]) if low => a.times(b).plus(c),
        (Opcode::And, &[a, b]) => a.and(b),
        (Opcode::Or, &[a, b]) => a.or(b),
        (Opcode::Xor, &[a, b]) => a.xor(b),
        (Opcode::Not, &[a]) => Bits { zeros: a.ones, ones: a.zeros },
        (Opcode::Min | Opcode::Max, &[a, b]) => a.either(b),
        (Opcode::Selp, &[a, b, _]) => a.either(b),
        (Opcode::Shl, &[a, b]) => b.as_constant().map_or(Bits::low_bits(0, a.zeros.trailing_ones()), |by| a.shl(by)),
        (Opcode::Shr, &[a, b]) if !signed && !wide => b.as_constant().map_or(Bits::UNKNOWN, |by| a.shr(by)),
        (Opcode::Bfe, &[a, from, count]) if !signed && !wide => match (from.as_constant(), count.as_constant()) {
            (Some(from), Some(count)) => {
                a.shr(from).and(Bits::constant(1u32.checked_shl(count).map_or(u32::MAX, |bit| bit - 1)))
            }
            _ => Bits::UNKNOWN,
        },
        (Opcode::Rem, &[a, b]) if !signed && !wide => match b.as_constant() {
            Some(divisor) if divisor.is_power_of_two() => a.and(Bits::constant(divisor - 1)),
            _ => Bits::UNKNOWN,
        },
        _ => Bits::UNKNOWN,
    }
}
