//! What reducing copies do to the numbers in their destination (PTX ISA 9.7.9.25.4.2).

use half::{bf16, f16};
use ptx::{Modifier, Type};

use crate::lanes::number;
use crate::memory::{Buffer, Memory};

/// A reduction: the operation and the type of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reduce {
    operation: Modifier,
    ty: Type,
}

impl Reduce {
    /// `None` where the manual has no such reduction.
    pub(crate) fn new(operation: Modifier, ty: Type) -> Option<Self> {
        use Modifier::{Add, And, Dec, Inc, Max, Min, Or, Xor};
        let known = match operation {
            Add => !matches!(ty, Type::U8 | Type::S8 | Type::U16 | Type::S16),
            Min | Max => !matches!(ty, Type::U8 | Type::S8 | Type::U16 | Type::S16 | Type::F32 | Type::F64),
            Inc | Dec => ty == Type::U32,
            And | Or | Xor => matches!(ty.bits(), 32 | 64) && !ty.is_float(),
            _ => false,
        };
        known.then_some(Self { operation, ty })
    }

    /// Bytes of a number.
    fn bytes(self) -> usize {
        self.ty.bytes() as usize
    }

    fn combine(self, old: u64, new: u64) -> u64 {
        use Modifier::{Add, And, Dec, Inc, Max, Min, Or};
        match (self.operation, self.ty) {
            (And, _) => old & new,
            (Or, _) => old | new,
            (Inc, _) => {
                if old >= new {
                    0
                } else {
                    old + 1
                }
            }
            (Dec, _) => {
                if old == 0 || old > new {
                    new
                } else {
                    old - 1
                }
            }
            (Add, Type::F32 | Type::Tf32) => (f32::from_bits(old as u32) + f32::from_bits(new as u32)).to_bits().into(),
            (Add, Type::F64) => (f64::from_bits(old) + f64::from_bits(new)).to_bits(),
            (operation, Type::F16) => {
                half(operation, old, new, |bits| f16::from_bits(bits).to_f32(), |x| f16::from_f32(x).to_bits())
            }
            (operation, Type::Bf16) => {
                half(operation, old, new, |bits| bf16::from_bits(bits).to_f32(), |x| bf16::from_f32(x).to_bits())
            }
            (Add, _) => old.wrapping_add(new),
            (Min, Type::S32) => (old as i32).min(new as i32) as u32 as u64,
            (Max, Type::S32) => (old as i32).max(new as i32) as u32 as u64,
            (Min, Type::S64) => (old as i64).min(new as i64) as u64,
            (Max, Type::S64) => (old as i64).max(new as i64) as u64,
            (Min, _) => old.min(new),
            (Max, _) => old.max(new),
            _ => old ^ new,
        }
    }

    /// Combines numbers in shared memory with those of a copy.
    pub(crate) fn apply(self, old: &mut [u8], new: &[u8]) {
        for (old, new) in old.chunks_mut(self.bytes()).zip(new.chunks(self.bytes())) {
            let result = self.combine(number(old), number(new)).to_le_bytes();
            old.copy_from_slice(&result[..old.len()]);
        }
    }

    /// Combines numbers in global memory with those of a copy, each atomically.
    pub(crate) fn apply_global(self, memory: &Memory, buffer: &Buffer, offset: u64, new: &[u8]) {
        for (at, new) in (offset..).step_by(self.bytes()).zip(new.chunks(self.bytes())) {
            let new = number(new);
            match self.bytes() {
                8 => memory.update_pair(buffer, at, |old| self.combine(old, new)),
                4 => {
                    buffer.update_word(at, |old| self.combine(old.into(), new) as u32);
                }
                bytes => {
                    let (shift, mask) = (at % 4 * 8, (1u32 << (8 * bytes)) - 1);
                    buffer.update_word(at & !3, |word| {
                        let value = self.combine(u64::from(word >> shift & mask), new) as u32 & mask;
                        word & !(mask << shift) | value << shift
                    });
                }
            }
        }
    }
}

fn half(operation: Modifier, old: u64, new: u64, widen: fn(u16) -> f32, narrow: fn(f32) -> u16) -> u64 {
    let (a, b) = (widen(old as u16), widen(new as u16));
    u64::from(narrow(match operation {
        Modifier::Min => a.min(b),
        Modifier::Max => a.max(b),
        _ => a + b,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_combined() {
        let apply = |operation, ty, old: &[u8], new: &[u8]| {
            let mut out = old.to_vec();
            Reduce::new(operation, ty).unwrap().apply(&mut out, new);
            out
        };
        assert_eq!(
            apply(Modifier::Add, Type::U32, &[255, 0, 0, 0, 1, 0, 0, 0], &[1, 0, 0, 0, 1, 0, 0, 0]),
            [0, 1, 0, 0, 2, 0, 0, 0]
        );
        assert_eq!(apply(Modifier::Min, Type::S32, &[0xff; 4], &[1, 0, 0, 0]), [0xff; 4]);
        assert_eq!(apply(Modifier::Inc, Type::U32, &[5, 0, 0, 0], &[5, 0, 0, 0]), [0; 4]);
        let half = |x: f32| f16::from_f32(x).to_bits().to_le_bytes();
        assert_eq!(apply(Modifier::Add, Type::F16, &half(1.5), &half(2.0)), half(3.5));
        assert_eq!(Reduce::new(Modifier::Max, Type::F32), None);
        assert_eq!(Reduce::new(Modifier::And, Type::F16), None);
    }

    #[test]
    fn narrow_numbers_in_global_memory_keep_their_neighbours() {
        let mut memory = Memory::new();
        let address = memory.alloc_bytes(&[1, 0, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        let (_, buffer) = memory.find(address, 16).unwrap();
        let one = half::f16::from_f32(1.0).to_bits().to_le_bytes();
        Reduce::new(Modifier::Add, Type::F16).unwrap().apply_global(&memory, buffer, 2, &one);
        Reduce::new(Modifier::Add, Type::U64).unwrap().apply_global(&memory, buffer, 8, &[9, 0, 0, 0, 1, 0, 0, 0]);
        let out = memory.read(address, 16).unwrap();
        assert_eq!(&out[..2], [1, 0]);
        assert_eq!(&out[4..], [3, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0]);
    }
}
