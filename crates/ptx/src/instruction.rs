//! One instruction: a row of the table with its operands filled in.

use thiserror::Error;

use crate::form::FormId;
use crate::{Count, Form, Kind, Modifier, Opcode, Operand, Register, Role, Slot, Type, TypeRule};

/// `@p` or `@!p` before an instruction: lanes where it does not hold do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    /// The predicate.
    pub predicate: Register,
    /// Whether the lanes where it is false are meant.
    pub negated: bool,
}

/// A place in the source a kernel was written in, an index into [`Kernel::locations`](crate::Kernel::locations).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocationId(pub u32);

/// One PTX instruction. It always has a form in the table: [`Instruction::new`] refuses what has none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Instruction {
    form: FormId,
    modifiers: Vec<Modifier>,
    operands: Vec<Operand>,
    /// Which lanes execute it; all of them without a guard.
    pub guard: Option<Guard>,
    /// Where it was written, when that is known.
    pub location: Option<LocationId>,
}

/// Why an instruction is not one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InstructionError {
    /// No row of the table carries these modifiers with this many operands.
    #[error("`{opcode}{modifiers}` with {operands} operand(s) is not a known form; known are {known}")]
    UnknownForm {
        /// The opcode's name.
        opcode: &'static str,
        /// The modifiers, dots included.
        modifiers: String,
        /// How many operands were given.
        operands: usize,
        /// The forms the table has.
        known: String,
    },
    /// An operand of the wrong kind.
    #[error("operand {position} of `{opcode}{modifiers}` must be {expected}, not {found}")]
    Operand {
        /// The opcode's name.
        opcode: &'static str,
        /// The modifiers, dots included.
        modifiers: String,
        /// Counted from 1.
        position: usize,
        /// What may stand there.
        expected: &'static str,
        /// What stands there.
        found: &'static str,
    },
}

fn dotted(modifiers: &[Modifier]) -> String {
    modifiers.iter().map(ToString::to_string).collect()
}

impl Instruction {
    /// An instruction without guard and location.
    ///
    /// # Errors
    /// When no form in the table fits the modifiers and the number of operands, or an operand is of a kind its place cannot hold.
    pub fn new(opcode: Opcode, modifiers: Vec<Modifier>, operands: Vec<Operand>) -> Result<Self, InstructionError> {
        let form = Form::find(opcode, &modifiers, &operands).ok_or_else(|| InstructionError::UnknownForm {
            opcode: opcode.name(),
            modifiers: dotted(&modifiers),
            operands: operands.len(),
            known: Form::of(opcode)
                .iter()
                .map(|form| {
                    format!(
                        "`{}` ({} to {} operands)",
                        form.syntax,
                        form.slots.iter().filter(|s| !s.optional).count(),
                        form.slots.len()
                    )
                })
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        let instruction = Self { form, modifiers, operands, guard: None, location: None };
        if let Some((position, expected)) = misplaced(instruction.form(), &instruction.modifiers, &instruction.operands)
        {
            return Err(InstructionError::Operand {
                opcode: opcode.name(),
                modifiers: dotted(&instruction.modifiers),
                position: position + 1,
                expected,
                found: describe(&instruction.operands[position]),
            });
        }
        Ok(instruction)
    }

    /// The row of the table this is.
    pub fn form(&self) -> &'static Form {
        self.form.get()
    }

    /// The opcode's name.
    pub fn opcode(&self) -> Opcode {
        self.form().opcode
    }

    /// The dotted parts, in order.
    pub fn modifiers(&self) -> &[Modifier] {
        &self.modifiers
    }

    /// Whether the opcode has this dotted part.
    pub fn has(&self, modifier: Modifier) -> bool {
        self.modifiers.contains(&modifier)
    }

    /// The operands, in order.
    pub fn operands(&self) -> &[Operand] {
        &self.operands
    }

    /// The first type among the modifiers: what the instruction computes in.
    pub fn ty(&self) -> Option<Type> {
        self.types().next()
    }

    /// The types among the modifiers, in order.
    pub fn types(&self) -> impl Iterator<Item = Type> + '_ {
        self.modifiers.iter().filter_map(|modifier| modifier.as_type())
    }

    /// The elements of `.v2`, `.v4`, `.v8`, or the matrices of `.x2` and `.x4`; 1 without.
    pub fn vector_length(&self) -> usize {
        vector_length(&self.modifiers)
    }

    /// How many registers stand in a place of this instruction that counts them so; `None` where any number may.
    pub fn count(&self, count: Count) -> Option<usize> {
        registers(count, &self.modifiers)
    }

    /// The shape of the matrices the instruction works on, as rows, columns and depth.
    pub fn shape(&self) -> Option<(u16, u16, u16)> {
        shape(&self.modifiers)
    }

    /// The operands with the places of the form that they fill.
    pub fn slots(&self) -> impl Iterator<Item = (Slot, &Operand)> {
        self.form().places(self.operands.len()).zip(&self.operands)
    }

    /// The type a rule of this instruction's form means, when its modifiers say one.
    pub fn resolve(&self, rule: TypeRule) -> Option<Type> {
        match rule {
            TypeRule::First => self.ty(),
            TypeRule::Second => self.types().nth(1),
            TypeRule::Wide => self.ty().and_then(Type::widened),
            TypeRule::Fixed(ty) => Some(ty),
        }
    }

    /// Makes double-precision constants single where that is the operand's type, as `add.f32 %f1, %f1, 1.5` means it.
    pub(crate) fn round_constants(&mut self) {
        let single = |(slot, _): (Slot, &Operand)| match slot.kind {
            Kind::Value(rule) | Kind::Vector(rule) | Kind::Movable(rule) | Kind::Registers(rule, _) => {
                self.resolve(rule) == Some(Type::F32)
            }
            _ => false,
        };
        let single: Vec<bool> = self.slots().map(single).collect();
        for (operand, _) in self.operands.iter_mut().zip(single).filter(|(_, single)| *single) {
            let elements = match operand {
                Operand::Vector(elements) => elements.as_mut_slice(),
                one => std::slice::from_mut(one),
            };
            for element in elements {
                if let Operand::F64(bits) = *element {
                    *element = Operand::F32((f64::from_bits(bits) as f32).to_bits());
                }
            }
        }
    }

    /// Calls `visit` with each register the instruction may write.
    pub fn for_each_def(&self, mut visit: impl FnMut(Register)) {
        for (slot, operand) in self.slots() {
            if slot.role.writes() {
                operand.for_each_register(&mut visit);
            }
        }
    }

    /// Calls `visit` with each register the instruction may read, its guard's and its addresses' included.
    pub fn for_each_use(&self, mut visit: impl FnMut(Register)) {
        if let Some(guard) = self.guard {
            visit(guard.predicate);
        }
        for (slot, operand) in self.slots() {
            if slot.role.reads() {
                operand.for_each_register(&mut visit);
            }
        }
    }

    /// The labels a branch may go to.
    pub fn targets(&self) -> &[crate::Label] {
        self.operands
            .iter()
            .find_map(|operand| match operand {
                Operand::Label(label) => Some(std::slice::from_ref(label)),
                Operand::Labels(labels) => Some(labels.as_slice()),
                _ => None,
            })
            .unwrap_or_default()
    }

    /// The label a branch goes to.
    pub fn target(&self) -> Option<crate::Label> {
        self.targets().first().copied()
    }

    /// The function a call goes to.
    pub fn callee(&self) -> Option<crate::FunctionId> {
        self.operands.iter().find_map(|operand| match operand {
            Operand::Function(function) => Some(*function),
            _ => None,
        })
    }

    /// Renames the label a branch goes to.
    pub(crate) fn retarget(&mut self, rename: impl Fn(crate::Label) -> crate::Label) {
        for operand in &mut self.operands {
            match operand {
                Operand::Label(label) => *label = rename(*label),
                Operand::Labels(labels) => labels.iter_mut().for_each(|label| *label = rename(*label)),
                _ => {}
            }
        }
    }

    /// Whether lanes that execute this instruction do not go on to the next one, or not at once.
    pub fn ends_block(&self) -> bool {
        matches!(self.opcode(), Opcode::Bra | Opcode::Brx | Opcode::Call | Opcode::Ret | Opcode::Exit | Opcode::Trap)
    }
}

fn describe(operand: &Operand) -> &'static str {
    match operand {
        Operand::Register(_) => "a register",
        Operand::NotPredicate(_) => "a negated predicate",
        Operand::RegisterPair(..) => "a pair of registers",
        Operand::Special(_) => "a special register",
        Operand::Integer(_) => "an integer constant",
        Operand::F32(_) | Operand::F64(_) => "a floating-point constant",
        Operand::VariableAddress(..) | Operand::ParameterAddress(..) => "an address",
        Operand::Memory(_) => "a memory operand",
        Operand::Tensor(..) => "an element of a tensor",
        Operand::Vector(_) => "a vector",
        Operand::Label(_) => "a label",
        Operand::Labels(_) => "labels",
        Operand::Function(_) => "a function",
        Operand::Arguments(_) => "a list of arguments",
        Operand::Sink => "`_`",
    }
}

fn vector_length(modifiers: &[Modifier]) -> usize {
    let length = |modifier: &Modifier| match modifier {
        Modifier::V2 | Modifier::X2 => Some(2),
        Modifier::V4 | Modifier::X4 => Some(4),
        Modifier::V8 | Modifier::X8 => Some(8),
        Modifier::X16 => Some(16),
        Modifier::X32 => Some(32),
        Modifier::X64 => Some(64),
        Modifier::X128 => Some(128),
        _ => None,
    };
    modifiers.iter().find_map(length).unwrap_or(1)
}

fn shape(modifiers: &[Modifier]) -> Option<(u16, u16, u16)> {
    modifiers.iter().find_map(|modifier| match *modifier {
        Modifier::Shape { m, n, k } => Some((m, n, k)),
        _ => None,
    })
}

fn registers(count: Count, modifiers: &[Modifier]) -> Option<usize> {
    match count {
        Count::Exactly(count) => Some(usize::from(count)),
        Count::Columns(divisor) => shape(modifiers).map(|(_, columns, _)| usize::from(columns / divisor)),
        Count::Repeats(factor) => Some(vector_length(modifiers) * usize::from(factor)),
        Count::Any => None,
    }
}

/// The coordinates that name an element of a tensor (PTX ISA 9.7.9.27.1).
fn coordinates(modifiers: &[Modifier]) -> usize {
    modifiers
        .iter()
        .find_map(|modifier| match modifier {
            Modifier::TileGather4 | Modifier::TileScatter4 => Some(5),
            _ => None,
        })
        .or_else(|| {
            modifiers.iter().find_map(|modifier| match modifier {
                Modifier::Dim1 => Some(1),
                Modifier::Dim2 => Some(2),
                Modifier::Dim3 => Some(3),
                Modifier::Dim4 => Some(4),
                Modifier::Dim5 => Some(5),
                _ => None,
            })
        })
        .unwrap_or(1)
}

/// The first operand that its place in the form cannot hold, and what may stand there.
pub(crate) fn misplaced(form: &Form, modifiers: &[Modifier], operands: &[Operand]) -> Option<(usize, &'static str)> {
    let places = form.places(operands.len()).zip(operands).enumerate();
    places.filter_map(|(place, (slot, operand))| Some((place, fits(slot, operand, modifiers).err()?))).next()
}

/// Whether `operand` may stand in `slot`; if not, what may.
fn fits(slot: Slot, operand: &Operand, modifiers: &[Modifier]) -> Result<(), &'static str> {
    let vector_length = vector_length(modifiers);
    let scalar = |operand: &Operand| match slot.role {
        Role::Def => matches!(operand, Operand::Register(_) | Operand::Sink),
        Role::Use => matches!(operand, Operand::Register(_) | Operand::Integer(_) | Operand::F32(_) | Operand::F64(_)),
        Role::Both => matches!(operand, Operand::Register(_)),
    };
    let (fine, expected) = match slot.kind {
        Kind::Value(_) => {
            (scalar(operand), if slot.role == Role::Use { "a register or a constant" } else { "a register" })
        }
        Kind::Vector(_) if vector_length > 1 => (
            matches!(operand, Operand::Vector(elements) if elements.len() == vector_length && elements.iter().all(scalar)),
            "a vector with as many elements as the opcode says",
        ),
        Kind::Vector(_) => {
            // A one-element vector is how some compilers write a scalar: the parser unwraps it.
            (scalar(operand), "a register")
        }
        Kind::Movable(_) => {
            let whole = match slot.role {
                Role::Def | Role::Both => scalar(operand),
                Role::Use => {
                    scalar(operand)
                        || matches!(
                            operand,
                            Operand::Special(_) | Operand::VariableAddress(..) | Operand::ParameterAddress(..)
                        )
                }
            };
            let packed = matches!(operand, Operand::Vector(elements) if matches!(elements.len(), 2 | 4) && elements.iter().all(scalar));
            (whole || packed, "a register, a constant, an address, a special register or a vector of 2 or 4 registers")
        }
        Kind::Registers(_, count) => (
            match (operand, registers(count, modifiers)) {
                (Operand::Vector(elements), Some(count)) => elements.len() == count && elements.iter().all(scalar),
                (Operand::Vector(elements), None) => elements.iter().all(scalar),
                // The parser unwraps a vector of one.
                (one, count) => count.is_none_or(|count| count == 1) && scalar(one),
            },
            "a vector of as many registers as the form says",
        ),
        Kind::ValueAndPredicate(_, false) => (
            matches!(operand, Operand::Register(_) | Operand::RegisterPair(..)),
            "a register, or a register and a predicate",
        ),
        Kind::ValueAndPredicate(_, true) => {
            (matches!(operand, Operand::RegisterPair(..)), "a register and a predicate")
        }
        Kind::ValueOrPredicate(_) => (
            scalar(operand) || matches!(operand, Operand::NotPredicate(_)),
            "a register, a constant, or a predicate or its negation",
        ),
        Kind::Predicate => match slot.role {
            Role::Def | Role::Both => (matches!(operand, Operand::Register(_)), "a predicate"),
            Role::Use => (
                matches!(
                    operand,
                    Operand::Register(_)
                        | Operand::NotPredicate(_)
                        | Operand::Integer(_)
                        | Operand::Special(crate::Special::IsExplicitCluster)
                ),
                "a predicate, its negation or a constant",
            ),
        },
        Kind::PredicatePair => {
            (matches!(operand, Operand::Register(_) | Operand::RegisterPair(..)), "one or two predicates")
        }
        Kind::Memory => (matches!(operand, Operand::Memory(_)), "a memory operand"),
        Kind::Tensor => (
            matches!(operand, Operand::Tensor(_, at) if at.len() == coordinates(modifiers) && at.iter().all(scalar)),
            "a tensor map with as many coordinates as the form says",
        ),
        Kind::Sink => (matches!(operand, Operand::Sink), "`_`"),
        Kind::Label => (matches!(operand, Operand::Label(_)), "a label"),
        Kind::Labels => (matches!(operand, Operand::Labels(_)), "labels"),
        Kind::Function => (matches!(operand, Operand::Function(_)), "a function"),
        Kind::Arguments => (
            matches!(operand, Operand::Arguments(values) if values.iter().all(|value| scalar(value)
                || matches!(value, Operand::VariableAddress(_, 0)))),
            "registers, constants or variables in parameter space, in parentheses",
        ),
        Kind::Integer => (matches!(operand, Operand::Integer(_)), "an integer constant"),
    };
    if fine { Ok(()) } else { Err(expected) }
}
