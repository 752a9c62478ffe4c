//! What the code alone says about registers: bounds of integers and of addresses in shared memory, the one thread for which a
//! predicate holds, and the parameters that a pointer may come from.

use std::collections::{BTreeSet, HashMap};

use ptx::{Address, Base, Instruction, Kernel, Modifier, Opcode, Operand, Register, Special, Variable};

/// Bounds of a number that does not leave 32 bits; of an address, counted from the start of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    variable: Option<Variable>,
    least: i64,
    most: i64,
}

/// Bytes of a shared variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    variable: Variable,
    from: i64,
    to: i64,
}

/// The parameters that a pointer may come from; `None` where it may come from anywhere.
pub(super) type Buffers = Option<BTreeSet<u32>>;

pub(super) struct Values<'a> {
    kernel: &'a Kernel,
    /// The instruction that defines a register, of those that one does alone and whatever holds.
    single: HashMap<Register, &'a Instruction>,
    buffers: HashMap<Register, Buffers>,
}

impl Bounds {
    fn new(variable: Option<Variable>, least: i64, most: i64) -> Option<Self> {
        let room = i64::from(u32::MAX);
        (-room <= least && least <= most && most <= room).then_some(Self { variable, least, most })
    }

    /// A plain number that is not negative.
    fn number(self) -> Option<(i64, i64)> {
        (self.variable.is_none() && self.least >= 0).then_some((self.least, self.most))
    }

    fn plus(self, other: Self) -> Option<Self> {
        let variable = match (self.variable, other.variable) {
            (Some(_), Some(_)) => return None,
            (one, other) => one.or(other),
        };
        Self::new(variable, self.least + other.least, self.most + other.most)
    }
}

/// The longest chain of definitions that is followed.
const DEPTH: u32 = 64;

impl<'a> Values<'a> {
    pub(super) fn of(kernel: &'a Kernel) -> Self {
        let mut single = HashMap::new();
        let mut seen = BTreeSet::new();
        for instruction in kernel.instructions() {
            instruction.for_each_def(|register| {
                if !seen.insert(register) || instruction.guard.is_some() {
                    single.remove(&register);
                } else {
                    single.insert(register, instruction);
                }
            });
        }
        let mut values = Self { kernel, single, buffers: HashMap::new() };
        while values.spread() {}
        values
    }

    /// Hands on once where pointers come from; whether that changed anything.
    fn spread(&mut self) -> bool {
        let mut changed = false;
        for instruction in self.kernel.instructions() {
            let mut from: Buffers = Some(BTreeSet::new());
            let mut join = |other: &Buffers| match (&mut from, other) {
                (Some(from), Some(other)) => from.extend(other),
                (from, _) => *from = None,
            };
            match instruction.opcode() {
                Opcode::Ld if instruction.has(Modifier::Param) => match instruction.operands().get(1) {
                    Some(Operand::Memory(Address { base: Base::Parameter(parameter), .. })) => {
                        join(&Some(BTreeSet::from([parameter.0])));
                    }
                    _ => join(&None),
                },
                Opcode::Ld | Opcode::Atom | Opcode::Call | Opcode::Ldmatrix => join(&None),
                _ => {
                    instruction.for_each_use(|register| {
                        if let Some(other) = self.buffers.get(&register) {
                            join(other);
                        }
                    });
                    let variable = |operand: &Operand| matches!(operand, Operand::VariableAddress(..));
                    if instruction.operands().iter().any(variable) {
                        join(&None);
                    }
                }
            }
            instruction.for_each_def(|register| {
                let held = self.buffers.entry(register).or_insert_with(|| Some(BTreeSet::new()));
                let grown = match (&*held, &from) {
                    (None, _) => false,
                    (Some(_), None) => true,
                    (Some(held), Some(from)) => !from.is_subset(held),
                };
                if grown {
                    match (held, &from) {
                        (Some(held), Some(from)) => held.extend(from),
                        (held, _) => *held = None,
                    }
                    changed = true;
                }
            });
        }
        changed
    }

    /// The parameters that an address in global memory may come from.
    pub(super) fn buffers(&self, address: &Address) -> Buffers {
        match address.base {
            Base::Register(register) => self.buffers.get(&register).cloned().flatten(),
            _ => None,
        }
    }

    fn operand(&self, operand: &Operand, depth: u32) -> Option<Bounds> {
        let block = self.kernel.required_block.unwrap_or([1024, 1024, 64]);
        let below = |extent: u32| Bounds::new(None, 0, i64::from(extent) - 1);
        match operand {
            Operand::Integer(value) => Bounds::new(None, *value, *value),
            Operand::VariableAddress(variable, offset) => Bounds::new(Some(*variable), *offset, *offset),
            Operand::Special(Special::TidX) => below(block[0]),
            Operand::Special(Special::TidY) => below(block[1]),
            Operand::Special(Special::TidZ) => below(block[2]),
            Operand::Special(Special::Laneid) => below(32),
            Operand::Register(register) => self.register(*register, depth),
            _ => None,
        }
    }

    fn register(&self, register: Register, depth: u32) -> Option<Bounds> {
        let instruction = *self.single.get(&register)?;
        let depth = depth.checked_sub(1)?;
        let operands = instruction.operands();
        let at = |place: usize| operands.get(place).and_then(|operand| self.operand(operand, depth));
        let numbers = || Some((at(1)?.number()?, at(2)?.number()?));
        let product = || {
            let ((a, b), (c, d)) = numbers()?;
            Bounds::new(None, a.checked_mul(c)?, b.checked_mul(d)?)
        };
        let shift = || match operands.get(2) {
            Some(Operand::Integer(by @ 0..32)) => Some((at(1)?.number()?, *by)),
            _ => None,
        };
        match instruction.opcode() {
            _ if instruction.types().any(ptx::Type::is_float) || instruction.has(Modifier::Hi) => None,
            Opcode::Mov | Opcode::Cvta => at(1),
            Opcode::Cvt => at(1).filter(|bounds| bounds.least >= 0 && instruction.types().all(|ty| ty.bytes() >= 4)),
            Opcode::Add => at(1)?.plus(at(2)?),
            Opcode::Shl => shift().and_then(|((least, most), by)| Bounds::new(None, least << by, most << by)),
            Opcode::Shr => shift().and_then(|((least, most), by)| Bounds::new(None, least >> by, most >> by)),
            Opcode::And => {
                let most = [at(1), at(2)].into_iter().filter_map(|bounds| Some(bounds?.number()?.1)).min()?;
                Bounds::new(None, 0, most)
            }
            Opcode::Or | Opcode::Xor => {
                let ((_, a), (_, b)) = numbers()?;
                Bounds::new(None, 0, (a.max(b) as u64 + 1).next_power_of_two() as i64 - 1)
            }
            Opcode::Mul => product(),
            Opcode::Mad => product()?.plus(at(3)?),
            Opcode::Selp => {
                let (a, b) = (at(1)?, at(2)?);
                let together = Bounds::new(a.variable, a.least.min(b.least), a.most.max(b.most));
                together.filter(|_| a.variable == b.variable)
            }
            _ => None,
        }
    }

    /// The bytes that an access of so many may touch.
    pub(super) fn region(&self, address: &Address, bytes: u32) -> Option<Region> {
        let base = match address.base {
            Base::Register(register) => self.register(register, DEPTH)?,
            Base::Variable(variable) => Bounds::new(Some(variable), 0, 0)?,
            _ => return None,
        };
        let (from, to) = (base.least + address.offset, base.most + address.offset + i64::from(bytes));
        Some(Region { variable: base.variable?, from, to })
    }

    /// Whether two addresses are so many bytes apart at least.
    pub(super) fn apart(&self, a: &Address, b: &Address, bytes: i64) -> bool {
        let (Some((root, a)), Some((other, b))) = (self.root(a), self.root(b)) else { return false };
        root == other && (a - b).abs() >= bytes
    }

    /// The register that an address is so many bytes behind, of those that one instruction defines.
    fn root(&self, address: &Address) -> Option<(Register, i64)> {
        let Base::Register(mut register) = address.base else { return None };
        let mut offset = address.offset;
        for _ in 0..DEPTH {
            let instruction = *self.single.get(&register)?;
            match (instruction.opcode(), instruction.operands()) {
                (Opcode::Mov | Opcode::Cvta, [_, Operand::Register(from)]) => register = *from,
                (Opcode::Add, [_, Operand::Register(from), Operand::Integer(by)]) => {
                    (register, offset) = (*from, offset.checked_add(*by)?);
                }
                _ => return Some((register, offset)),
            }
        }
        None
    }

    /// Whether two regions may overlap. Variables whose size the launch gives all begin at one place.
    pub(super) fn meet(&self, a: Option<Region>, b: Option<Region>) -> bool {
        let (Some(a), Some(b)) = (a, b) else { return true };
        let external = |region: Region| {
            self.kernel.variables.get(region.variable.0 as usize).is_none_or(|variable| variable.external)
        };
        let one = a.variable == b.variable || external(a) && external(b);
        one && a.from < b.to && b.from < a.to
    }

    /// The one thread of a CTA that may execute a guarded instruction.
    pub(super) fn thread(&self, instruction: &Instruction) -> Option<i64> {
        let guard = instruction.guard.filter(|guard| !guard.negated)?;
        let is_line = self.kernel.required_block.is_some_and(|[_, y, z]| y == 1 && z == 1);
        if is_line { self.holds_for(guard.predicate, DEPTH) } else { None }
    }

    fn holds_for(&self, predicate: Register, depth: u32) -> Option<i64> {
        let instruction = *self.single.get(&predicate)?;
        let depth = depth.checked_sub(1)?;
        let operands = instruction.operands();
        let registers = operands.iter().skip(1).filter_map(|operand| match operand {
            Operand::Register(register) => Some(*register),
            _ => None,
        });
        match instruction.opcode() {
            Opcode::And => registers.into_iter().find_map(|register| self.holds_for(register, depth)),
            Opcode::Setp if instruction.has(Modifier::Eq) && operands.len() == 3 => {
                match (&operands[1], &operands[2]) {
                    (Operand::Register(register), Operand::Integer(thread)) => {
                        let mov = self.single.get(register).filter(|mov| mov.opcode() == Opcode::Mov)?;
                        matches!(mov.operands().get(1), Some(Operand::Special(Special::TidX))).then_some(*thread)
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }
}
