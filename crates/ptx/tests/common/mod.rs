//! Instructions made from the table's rows alone.

use ptx::{
    Address, Bank, Base, Count, Form, Instruction, Kernel, Kind, Label, Modifier, Opcode, Operand, Parameter,
    ParameterDecl, Register, Role, Slot, Space, Special, Target, Type, TypeRule, Variable, VariableDecl, Version,
};

/// Registers of each bank of [`kernel`].
pub const REGISTERS: u32 = 128;

const BANKS: [Type; 5] = [Type::Pred, Type::B16, Type::B32, Type::B64, Type::B128];

/// A kernel without instructions that has registers of every width, a parameter, and a label for every variable.
pub fn kernel(target: Target, version: Version) -> Kernel {
    let bank = |ty: &Type| Bank { prefix: format!("%{}_", ty.name()), ty: *ty, count: Some(REGISTERS) };
    // 128-bit registers came with PTX 8.3.
    let wide = version >= Version { major: 8, minor: 3 };
    Kernel {
        params: vec![ParameterDecl {
            name: "p".into(),
            ty: Type::B64,
            elements: Some(64),
            align: Some(16),
            pointee: None,
        }],
        banks: BANKS.iter().filter(|ty| wide || **ty != Type::B128).map(bank).collect(),
        variables: vec![VariableDecl {
            name: "handed".into(),
            space: Space::Param,
            ty: Type::B8,
            align: 16,
            elements: Some(256),
            init: Vec::new(),
            external: false,
            module_level: false,
        }],
        labels: vec!["$end".into()],
        ..Kernel::new("k", target, version)
    }
}

/// A register of [`kernel`] that holds the type, the `index`th.
pub fn register(ty: Type, index: u32) -> Register {
    let bits = if ty == Type::Pred { 1 } else { ty.bits().max(16) };
    let bank = BANKS.iter().position(|bank| bank.bits() == bits).unwrap();
    Register { bank: bank as u32, index: index % REGISTERS }
}

/// What may be chosen for an operand; each call draws a number below its argument.
pub trait Draw {
    /// A number below `n`.
    fn below(&mut self, n: u32) -> u32;
}

/// The instruction with these modifiers, its operands drawn; with or without those that may be left out.
pub fn instruction(form: &Form, modifiers: &[Modifier], optional: bool, draw: &mut impl Draw) -> Instruction {
    let types: Vec<Type> = modifiers.iter().filter_map(|m| m.as_type()).collect();
    let ty = |rule: TypeRule| match rule {
        TypeRule::First => types[0],
        TypeRule::Second => types[1],
        TypeRule::Wide => types[0].widened().unwrap(),
        TypeRule::Fixed(ty) => ty,
    };
    let operands = form.slots.iter().filter(|slot| optional || !slot.optional);
    let operands = operands.map(|slot| operand(form, slot, modifiers, &ty, draw)).collect();
    Instruction::new(form.opcode, modifiers.to_vec(), operands).unwrap()
}

fn operand(
    form: &Form,
    slot: &Slot,
    modifiers: &[Modifier],
    ty: &impl Fn(TypeRule) -> Type,
    draw: &mut impl Draw,
) -> Operand {
    let elements = modifiers.iter().find_map(|m| match m {
        Modifier::V2 | Modifier::X2 => Some(2),
        Modifier::V4 | Modifier::X4 => Some(4),
        Modifier::V8 => Some(8),
        _ => None,
    });
    let has = |modifier| modifiers.contains(&modifier);
    let one = |ty: Type, draw: &mut dyn FnMut(u32) -> u32| match slot.role {
        Role::Use if ty != Type::Pred && draw(4) == 3 => constant(ty, draw),
        _ => Operand::Register(register(ty, draw(REGISTERS))),
    };
    let mut draw = |n| draw.below(n);
    match slot.kind {
        Kind::Value(rule) => one(ty(rule), &mut draw),
        Kind::Vector(rule) => match elements {
            Some(count) => {
                Operand::Vector((0..count).map(|_| Operand::Register(register(ty(rule), draw(REGISTERS)))).collect())
            }
            None => one(ty(rule), &mut draw),
        },
        Kind::Movable(rule) => {
            let ty = ty(rule);
            let half = match ty.bits() {
                32 => Some(Type::B16),
                64 => Some(Type::B32),
                _ => None,
            };
            match (draw(4), half) {
                (1, Some(half)) if slot.role == Role::Use => {
                    Operand::Vector((0..2).map(|_| Operand::Register(register(half, draw(REGISTERS)))).collect())
                }
                (2, _) if slot.role == Role::Use && ty.bits() == 32 => Operand::Special(Special::TidX),
                _ => Operand::Register(register(ty, draw(REGISTERS))),
            }
        }
        Kind::Registers(rule, count) => {
            let count = match count {
                Count::Any => im2col_offsets(modifiers),
                count => registers(count, modifiers),
            };
            // Fragments are registers, not constants.
            let mut elements: Vec<_> =
                (0..count).map(|_| Operand::Register(register(ty(rule), draw(REGISTERS)))).collect();
            if count == 1 { elements.remove(0) } else { Operand::Vector(elements) }
        }
        Kind::ValueOrPredicate(rule) => match draw(3) {
            1 => Operand::NotPredicate(register(Type::Pred, draw(REGISTERS))),
            2 => Operand::Register(register(Type::Pred, draw(REGISTERS))),
            _ => one(ty(rule), &mut draw),
        },
        Kind::ValueAndPredicate(rule, both) => match draw(3) {
            0 if !both => Operand::Register(register(ty(rule), draw(REGISTERS))),
            1 => Operand::RegisterPair(None, Some(register(Type::Pred, draw(REGISTERS)))),
            _ => Operand::RegisterPair(
                Some(register(ty(rule), draw(REGISTERS))),
                Some(register(Type::Pred, draw(REGISTERS))),
            ),
        },
        Kind::Predicate => match (slot.role, draw(2)) {
            (Role::Use, 1) => Operand::NotPredicate(register(Type::Pred, draw(REGISTERS))),
            _ => Operand::Register(register(Type::Pred, draw(REGISTERS))),
        },
        Kind::PredicatePair => match draw(2) {
            0 => Operand::Register(register(Type::Pred, draw(REGISTERS))),
            _ => Operand::RegisterPair(
                Some(register(Type::Pred, draw(REGISTERS))),
                Some(register(Type::Pred, draw(REGISTERS))),
            ),
        },
        Kind::Memory if has(Modifier::ParamFunc) || form.opcode == Opcode::St && has(Modifier::Param) => {
            Operand::Memory(Address { base: Base::Variable(Variable(0)), offset: 16 * i64::from(draw(4)) })
        }
        Kind::Memory if has(Modifier::Param) || has(Modifier::ParamEntry) => {
            Operand::Memory(Address { base: Base::Parameter(Parameter(0)), offset: 16 * i64::from(draw(4)) })
        }
        Kind::Memory => Operand::Memory(Address {
            // Tensor memory has addresses of 32 bits.
            base: Base::Register(register(
                if form.opcode == Opcode::Tcgen05 { Type::B32 } else { Type::B64 },
                draw(REGISTERS),
            )),
            offset: 64 * i64::from(draw(5)) - 128,
        }),
        Kind::Tensor => Operand::Tensor(
            Address { base: Base::Register(register(Type::B64, draw(REGISTERS))), offset: 0 },
            (0..coordinates(modifiers)).map(|_| one(Type::S32, &mut draw)).collect(),
        ),
        Kind::Sink => Operand::Sink,
        Kind::Labels | Kind::Function | Kind::Arguments => unreachable!("these need a kernel around them"),
        Kind::Label => Operand::Label(Label(0)),
        Kind::Integer => Operand::Integer(integer(modifiers, draw(4))),
    }
}

fn registers(count: Count, modifiers: &[Modifier]) -> usize {
    let columns = modifiers.iter().find_map(|m| if let Modifier::Shape { n, .. } = m { Some(*n) } else { None });
    let repeats = modifiers.iter().find_map(|m| match m {
        Modifier::X2 => Some(2),
        Modifier::X4 => Some(4),
        Modifier::X8 => Some(8),
        Modifier::X16 => Some(16),
        Modifier::X32 => Some(32),
        Modifier::X64 => Some(64),
        Modifier::X128 => Some(128),
        _ => None,
    });
    usize::from(match count {
        Count::Exactly(count) => count,
        Count::Columns(divisor) => columns.unwrap() / divisor,
        Count::Repeats(factor) => factor * repeats.unwrap_or(1),
        Count::Any => 1,
    })
}

fn dimensions(modifiers: &[Modifier]) -> usize {
    let place = |m: &Modifier| {
        [Modifier::Dim1, Modifier::Dim2, Modifier::Dim3, Modifier::Dim4, Modifier::Dim5].iter().position(|d| d == m)
    };
    modifiers.iter().find_map(place).unwrap() + 1
}

fn coordinates(modifiers: &[Modifier]) -> usize {
    let rows = modifiers.iter().any(|m| matches!(m, Modifier::TileGather4 | Modifier::TileScatter4));
    if rows { 5 } else { dimensions(modifiers) }
}

fn im2col_offsets(modifiers: &[Modifier]) -> usize {
    dimensions(modifiers) - 2
}

/// The integer a form asks for: bytes of a copy, groups to wait for, a truth table.
fn integer(modifiers: &[Modifier], drawn: u32) -> i64 {
    match modifiers {
        [Modifier::Async, Modifier::Cg, ..] => 16,
        [Modifier::Async, Modifier::Ca, ..] => [4, 8, 16, 4][drawn as usize],
        // Factors of both matrices, and whether they are transposed.
        [Modifier::MmaAsync, ..] => 1,
        [Modifier::Inc | Modifier::Dec, Modifier::Sync, ..] => 24 + 8 * i64::from(drawn),
        [Modifier::Global, Modifier::L2 | Modifier::L2EvictNormal] | [Modifier::L2 | Modifier::L2EvictNormal] => 128,
        [Modifier::Proxy, ..] | [Modifier::CpFenceproxy, ..] => 128,
        [Modifier::Bulk, ..] => 0,
        _ => i64::from(drawn),
    }
}

fn constant(ty: Type, draw: &mut dyn FnMut(u32) -> u32) -> Operand {
    match ty {
        Type::F32 => Operand::F32(draw(u32::MAX)),
        Type::F64 => Operand::F64(u64::from(draw(u32::MAX)) << 32 | u64::from(draw(u32::MAX))),
        _ => Operand::Integer(i64::from(draw(1 << ty.bits().min(15) as u16)) - 7),
    }
}
