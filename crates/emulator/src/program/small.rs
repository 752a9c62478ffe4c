//! Decoding of carries, functions of a warp, jumps by index, and what has no effect here.

use ptx::{Instruction, Modifier, Opcode, Operand, Type};

use super::{Code, Decoded, Decoder, Op, WarpOp};
use crate::allocate::Width;
use crate::small::{CarryOp, WarpFunction};

/// Whether an instruction reads or writes the carry flag (PTX ISA 9.7.2).
pub(super) fn carries(instruction: &Instruction) -> bool {
    instruction.has(Modifier::Cc) || matches!(instruction.opcode(), Opcode::Addc | Opcode::Subc | Opcode::Madc)
}

/// PTX ISA, `setmaxnreg`: the count is a multiple of 8 from 24 to 256. How many registers a thread may use changes nothing here.
pub(super) fn set_max_registers(instruction: &Instruction) -> Decoded<()> {
    match instruction.operands() {
        [Operand::Integer(count @ 24..=256)] if count % 8 == 0 => Ok(()),
        [Operand::Integer(count)] => Err(format!("{count} registers: allowed are multiples of 8 from 24 to 256")),
        _ => Err("setmaxnreg takes a constant".into()),
    }
}

impl Decoder {
    pub(super) fn carry(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let ty = instruction.ty().ok_or("an instruction without a type")?;
        let [to, sources @ ..] = instruction.operands() else { return Err("a result is missing".into()) };
        let mut places = [(0, false); 3];
        for (place, operand) in places.iter_mut().zip(sources) {
            let (at, width) = self.source(operand, ty)?;
            *place = (at, width == Width::Wide);
        }
        let (at, width) = self.destination(to, ty)?;
        op.code = Code::Carry;
        op.aux = self.program.carries.len() as u32;
        let flag = match self.carry_flag {
            Some(flag) => flag,
            None => self.unread_predicate(),
        };
        self.carry_flag = Some(flag);
        self.program.carries.push(CarryOp {
            opcode: instruction.opcode(),
            high: instruction.has(Modifier::Hi),
            signed: ty.is_signed(),
            bits: ty.bits(),
            reads: matches!(instruction.opcode(), Opcode::Addc | Opcode::Subc | Opcode::Madc),
            writes: instruction.has(Modifier::Cc),
            sources: places,
            destination: (at, width == Width::Wide),
            flag,
        });
        Ok(())
    }

    /// PTX ISA, `createpolicy`: a policy is a number that nothing here looks into.
    pub(super) fn cache_policy(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        op.code = Code::Mov64;
        op.d = self.destination(&instruction.operands()[0], Type::B64)?.0;
        op.a = self.constant(0, Width::Wide);
        Ok(())
    }

    pub(super) fn branch_by_index(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let table: Vec<_> =
            instruction.targets().iter().map(|label| self.label_positions[label.0 as usize] as u32).collect();
        if table.is_empty() {
            return Err("a table without targets".into());
        }
        op.code = Code::BranchByIndex;
        op.a = self.source(&instruction.operands()[0], Type::U32)?.0;
        op.aux = self.program.tables.len() as u32;
        self.program.tables.push(table);
        Ok(())
    }

    pub(super) fn warp_function(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let operands = instruction.operands();
        let mode = *instruction.modifiers().first().ok_or("a mode is missing")?;
        let mut info = WarpOp { mode, members: 0, clamp: 0, in_range: None };
        op.d = self.destination(&operands[0], Type::B32)?.0;
        if let Operand::RegisterPair(_, Some(predicate)) = &operands[0] {
            info.in_range = Some(self.predicate_place(*predicate)?);
        }
        let function = match instruction.opcode() {
            Opcode::Elect => {
                info.members = self.source(&operands[1], Type::U32)?.0;
                WarpFunction::Elect { elected: info.in_range }
            }
            opcode => {
                let ty = instruction.ty().ok_or("an instruction without a type")?;
                let (place, width) = self.source(&operands[1], ty)?;
                info.members = self.source(&operands[2], Type::U32)?.0;
                let value = (place, width == Width::Wide);
                match opcode {
                    Opcode::Match if mode == Modifier::Any => WarpFunction::MatchAny { value },
                    Opcode::Match => WarpFunction::MatchAll { value, same: info.in_range },
                    _ => WarpFunction::reduction(instruction, place).ok_or("this reduction has no semantics here")?,
                }
            }
        };
        op.code = Code::WarpFunction;
        op.aux = self.program.warp_ops.len() as u32;
        self.program.warp_ops.push(info);
        op.c = self.program.warp_functions.len() as u32;
        self.program.warp_functions.push(function);
        Ok(())
    }
}
