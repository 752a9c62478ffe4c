//! What one execution of an instruction asks of the tensor cores.

use arch::{TensorOperand, TensorRates};
use ptx::{Instruction, Modifier, Opcode, Type};

/// What one warp's execution of `mma` or `wgmma.mma_async` asks of the tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorWork {
    /// The type of A; B's rate is the same.
    pub operand: TensorOperand,
    /// Whether sums are kept in f16.
    pub accumulates_f16: bool,
    /// Operations; a multiply-add is two.
    pub flops: u64,
}

impl TensorWork {
    /// The work of an instruction, if it is one of the tensor cores whose type has a stated rate.
    pub fn of(instruction: &Instruction) -> Option<Self> {
        let warps = match instruction.opcode() {
            Opcode::Mma => 1,
            Opcode::Wgmma if instruction.has(Modifier::MmaAsync) => 4,
            _ => return None,
        };
        let (m, n, k) = instruction.shape()?;
        let types: Vec<Type> = instruction.types().collect();
        let operand = match types.get(1)? {
            Type::F16 => TensorOperand::F16,
            Type::Bf16 => TensorOperand::Bf16,
            Type::Tf32 => TensorOperand::Tf32,
            Type::E4m3 | Type::E5m2 => TensorOperand::Fp8,
            Type::S8 | Type::U8 => TensorOperand::Int8,
            _ => return None,
        };
        let flops = 2 * u64::from(m) * u64::from(n) * u64::from(k) / warps;
        Some(Self { operand, accumulates_f16: types[0] == Type::F16, flops })
    }

    /// Operations that a multiprocessor does of this kind in a clock, where that is known.
    pub fn rate(&self, rates: &TensorRates) -> Option<u32> {
        match (self.operand, self.accumulates_f16) {
            (TensorOperand::F16, true) => rates.f16_accumulate_f16,
            (operand, _) => rates.of(operand),
        }
    }
}
