//! Decoding of carries, comparisons without vector code, functions of a warp, jumps by index, clocks, values in four parts and 128-bit
//! values.

use ptx::{Instruction, Modifier, Opcode, Operand, Special, Type};

use super::{Code, Decoded, Decoder, Op, WarpOp};
use crate::allocate::Width;
use crate::scalar;
use crate::small::{CarryOp, SmallOp, WarpFunction};

/// Whether an instruction reads or writes the carry flag (PTX ISA 9.7.2).
pub(super) fn carries(instruction: &Instruction) -> bool {
    instruction.has(Modifier::Cc) || matches!(instruction.opcode(), Opcode::Addc | Opcode::Subc | Opcode::Madc)
}

/// PTX ISA, `setmaxnreg`: the count is a multiple of 8 from 24 to 256. How many registers a thread may use changes nothing here.
fn max_registers(instruction: &Instruction) -> Decoded<SmallOp> {
    match instruction.operands() {
        [Operand::Integer(count @ 24..=256)] if count % 8 == 0 => Ok(SmallOp::MaxRegisters { count: *count as u32 }),
        [Operand::Integer(count)] => Err(format!("{count} registers: allowed are multiples of 8 from 24 to 256")),
        _ => Err("setmaxnreg takes a constant".into()),
    }
}

/// Whether [`Decoder::small`] decodes it.
pub(super) fn covers(instruction: &Instruction) -> bool {
    match instruction.opcode() {
        Opcode::Set | Opcode::Setmaxnreg => true,
        Opcode::Setp => matches!(instruction.ty(), Some(Type::F16x2 | Type::Bf16x2)),
        Opcode::Lop3 => instruction.operands().len() > 5,
        Opcode::Mov => {
            instruction.ty() == Some(Type::B128)
                || matches!(instruction.operands(), [_, Operand::Special(special)] if clock(*special).is_some())
                || instruction.operands().iter().any(|operand| quarters(operand).is_some())
        }
        _ => false,
    }
}

/// The comparison of an instruction by its first modifier, the order of what it compares, and whether that is a pair of halves.
fn comparison(instruction: &Instruction, ty: Option<Type>) -> Decoded<(scalar::Compare, scalar::Order, bool)> {
    let ty = ty.ok_or("a comparison without a type")?;
    let (element, pair) = match ty {
        Type::F16x2 => (Type::F16, true),
        Type::Bf16x2 => (Type::Bf16, true),
        _ => (ty, false),
    };
    let compare = instruction.modifiers().first().copied().and_then(scalar::Compare::of);
    let order =
        scalar::order(element, instruction.has(Modifier::Ftz)).ok_or_else(|| format!("{ty} is not compared"))?;
    Ok((compare.ok_or("an unknown comparison")?, order, pair))
}

/// The parts of a value in four.
fn quarters(operand: &Operand) -> Option<&[Operand; 4]> {
    match operand {
        Operand::Vector(parts) => parts.as_slice().try_into().ok(),
        _ => None,
    }
}

/// Of a clock register, how far down the clock is shifted. A nanosecond is a clock here.
fn clock(special: Special) -> Option<u32> {
    use Special::*;
    match special {
        Clock | Clock64 | Globaltimer | GlobaltimerLo => Some(0),
        ClockHi | GlobaltimerHi => Some(32),
        _ => None,
    }
}

impl Decoder<'_> {
    pub(super) fn small(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let small = match (instruction.opcode(), instruction.operands()) {
            (Opcode::Setmaxnreg, _) => max_registers(instruction)?,
            (Opcode::Set, [to, a, b]) => {
                let (compare, order, pair) = comparison(instruction, instruction.types().nth(1))?;
                let ty = instruction.ty().ok_or("set without a type")?;
                let from = instruction.types().nth(1).ok_or("set without a second type")?;
                let yes = match ty {
                    Type::F32 => u64::from(1f32.to_bits()),
                    Type::F16 | Type::F16x2 => 0x3c00,
                    _ if ty.bits() == 16 => 0xffff,
                    _ => 0xffff_ffff,
                };
                let mut sources = [(0, false); 2];
                for (place, operand) in sources.iter_mut().zip([a, b]) {
                    let (at, width) = self.source(operand, from)?;
                    *place = (at, width == Width::Wide);
                }
                let (at, width) = self.destination(to, ty)?;
                SmallOp::Set { compare, order, pair, yes, sources, destination: (at, width == Width::Wide) }
            }
            (Opcode::Setp, [to, a, b, rest @ ..]) => {
                let (compare, order, _) = comparison(instruction, instruction.ty())?;
                let ty = instruction.ty().ok_or("setp without a type")?;
                (op.a, op.b) = (self.source(a, ty)?.0, self.source(b, ty)?.0);
                let (p, q) = match to {
                    Operand::RegisterPair(p, q) => (*p, *q),
                    Operand::Register(p) => (Some(*p), None),
                    _ => (None, None),
                };
                let mut place = |predicate: Option<ptx::Register>| match predicate {
                    Some(predicate) => self.predicate_place(predicate),
                    None => Ok(self.unread_predicate()),
                };
                let predicates = [place(p)?, place(q)?];
                let combine = match (instruction.modifiers().get(1), rest.first()) {
                    (Some(&operation), Some(with)) => Some((operation, self.predicate(with)?)),
                    _ => None,
                };
                SmallOp::ComparePair { compare, order, combine, predicates }
            }
            (Opcode::Lop3, [to, a, b, c, Operand::Integer(table), with]) => {
                op.d = self.destination(to, Type::B32)?.0;
                (op.a, op.b) = (self.source(a, Type::B32)?.0, self.source(b, Type::B32)?.0);
                op.c = self.source(c, Type::B32)?.0;
                let operation = *instruction.modifiers().first().ok_or("lop3 without an operation")?;
                let predicate = match to {
                    Operand::RegisterPair(_, Some(predicate)) => self.predicate_place(*predicate)?,
                    _ => self.unread_predicate(),
                };
                SmallOp::Logic { table: *table as u8, combine: (operation, self.predicate(with)?), predicate }
            }
            (Opcode::Mov, [to, Operand::Special(special)]) => {
                let shift = clock(*special).ok_or("not a clock")?;
                let (at, width) = self.destination(to, special.ty())?;
                SmallOp::Clock { shift, destination: (at, width == Width::Wide) }
            }
            (Opcode::Mov, [to, from]) if instruction.ty() != Some(Type::B128) => {
                let ty = instruction.ty().ok_or("mov without a type")?;
                let (part, bits) = if ty.bits() == 64 { (Type::B16, 16) } else { (Type::B8, 8) };
                let wide = |(at, width): (u32, Width)| (at, width == Width::Wide);
                let mut places = [(0, false); 4];
                match (quarters(to), quarters(from)) {
                    (Some(parts), None) => {
                        for (place, operand) in places.iter_mut().zip(parts) {
                            *place = wide(self.destination(operand, part)?);
                        }
                        SmallOp::Unpack { from: wide(self.source(from, ty)?), bits, parts: places }
                    }
                    (None, Some(parts)) => {
                        for (place, operand) in places.iter_mut().zip(parts) {
                            *place = wide(self.source(operand, part)?);
                        }
                        SmallOp::Pack { parts: places, bits, to: wide(self.destination(to, ty)?) }
                    }
                    _ => return Err("four parts are packed or unpacked, not both".into()),
                }
            }
            (Opcode::Mov, [to, from]) => {
                SmallOp::Move128 { from: self.halves(from, false)?, to: self.halves(to, true)? }
            }
            _ => return Err("its operands are not there yet".into()),
        };
        op.code = Code::Small;
        op.aux = self.program.small.len() as u32;
        self.program.small.push(small);
        Ok(())
    }

    /// The wide registers of a 128-bit value: of a register, or of two in braces, the lower first.
    pub(super) fn halves(&mut self, operand: &Operand, written: bool) -> Decoded<[u32; 2]> {
        match operand {
            Operand::Register(register) => match self.places.get(register) {
                Some(&(Width::Double, place)) => Ok([place, place + 1]),
                _ => Err("it is not a register of 128 bits".into()),
            },
            Operand::Vector(parts) => {
                let [low, high] = parts.as_slice() else { return Err("128 bits are two halves of 64".into()) };
                let mut place = |part| -> Decoded<u32> {
                    let (place, width) =
                        if written { self.destination(part, Type::B64)? } else { self.source(part, Type::B64)? };
                    if width == Width::Wide { Ok(place) } else { Err("a half has 64 bits".into()) }
                };
                Ok([place(low)?, place(high)?])
            }
            Operand::Sink if written => {
                Ok([self.destination(operand, Type::B64)?.0, self.destination(operand, Type::B64)?.0])
            }
            other => Err(format!("operand {other:?} is not a value of 128 bits")),
        }
    }

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
        let table = instruction.targets().iter().map(|label| self.jump(*label)).collect::<Decoded<Vec<_>>>()?;
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
