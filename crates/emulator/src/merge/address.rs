//! What an address is made of: a root that several addresses share, plus a constant; and how the root is aligned.

use std::collections::{BTreeMap, HashMap};

use ptx::{
    Address, Base, Cfg, Instruction, Kernel, Modifier, Opcode, Operand, Register, Space, Special, Type, Variable,
};

use super::{WIDEST, Words, in_shared};

mod bits;

use bits::Bits;

/// Where dynamic shared memory starts, whatever it declares: `ptxas` puts it at a multiple of this.
const DYNAMIC_ALIGN: u32 = 16;

/// Terms that a sum may have; one that has more stands for itself.
const MOST_TERMS: usize = 16;

/// Values kept for later blocks in all; when there are more, registers written in several places start each block unknown.
const MOST_KEPT: usize = 1 << 18;

/// A sum without its constant: addresses with one root are a known distance apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Root(usize);

/// An address: a root and an offset in bytes, modulo 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub root: Root,
    pub offset: u32,
}

/// Something a sum is made of that is not itself a sum.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Atom {
    Special(Special),
    Variable(Variable),
    /// What a register holds when a block is entered, different values having met.
    Meet(Register, usize),
    /// A result nothing is known about.
    Result(usize, Register),
    /// The same operation on the same operands.
    Same(Opcode, Vec<Modifier>, Vec<Value>),
}

/// `sum(factor * atom) + constant` modulo 2^32. Atoms by number, ascending; no factor is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Value {
    terms: Vec<(usize, u32)>,
    constant: u32,
}

impl Value {
    fn constant(constant: u32) -> Self {
        Self { terms: Vec::new(), constant }
    }

    fn as_constant(&self) -> Option<u32> {
        self.terms.is_empty().then_some(self.constant)
    }

    fn plus(&self, other: &Self) -> Self {
        let mut terms: BTreeMap<usize, u32> = self.terms.iter().copied().collect();
        for &(atom, factor) in &other.terms {
            let sum = terms.entry(atom).or_default();
            *sum = sum.wrapping_add(factor);
        }
        let terms = terms.into_iter().filter(|&(_, factor)| factor != 0).collect();
        Self { terms, constant: self.constant.wrapping_add(other.constant) }
    }

    fn times(&self, factor: u32) -> Self {
        let terms =
            self.terms.iter().map(|&(atom, f)| (atom, f.wrapping_mul(factor))).filter(|&(_, f)| f != 0).collect();
        Self { terms, constant: self.constant.wrapping_mul(factor) }
    }
}

/// The addresses of a kernel's accesses to shared memory.
pub(super) struct Addresses {
    places: Vec<Option<Place>>,
    /// For each root, the known low bits of its value.
    roots: Vec<Bits>,
    /// Alignments that follow from a wide access through a register computed in the same block: in bytes, and the root's remainder.
    implied: HashMap<Root, (u32, u32)>,
}

impl Addresses {
    pub(super) fn of(kernel: &Kernel, instructions: &[&Instruction], cfg: &Cfg) -> Self {
        let mut values = Values::new(kernel, instructions, cfg);
        let mut roots = HashMap::new();
        let mut bits = Vec::new();
        let mut places = vec![None; instructions.len()];
        let mut implied = HashMap::new();
        for (index, block) in cfg.blocks.iter().enumerate() {
            values.enter(index);
            for position in block.instructions.clone() {
                let instruction = instructions[position];
                if let Some(address) = shared_address(instruction) {
                    let value = values.address(address);
                    let terms = value.terms;
                    let root = *roots.entry(terms).or_insert_with_key(|terms| {
                        bits.push(values.bits_of(&Value { terms: terms.clone(), constant: 0 }));
                        Root(bits.len() - 1)
                    });
                    places[position] = Some(Place { root, offset: value.constant });
                    let bytes = Words::of(instruction).map_or(1, |words| words.bytes());
                    let here = values.is_defined_in(address, index);
                    let known = implied.entry(root).or_insert((1, 0));
                    if here && bytes > known.0 {
                        *known = (bytes, value.constant.wrapping_neg() % bytes);
                    }
                }
                values.execute(position, instruction);
            }
        }
        Self { places, roots: bits, implied }
    }

    /// The address of an access to shared memory.
    pub(super) fn place(&self, position: usize) -> Option<Place> {
        self.places[position]
    }

    /// A power of two that an access's root is known modulo, at most 16, and the remainder. That an access of `bytes` at
    /// this place is aligned is taken for granted.
    pub(super) fn alignment(&self, place: Place, bytes: u32) -> (u32, u32) {
        let known = self.roots[place.root.0].low(WIDEST);
        let own = (bytes, place.offset.wrapping_neg() % bytes.max(1));
        let implied = self.implied.get(&place.root).copied().unwrap_or((1, 0));
        [known, implied, own]
            .into_iter()
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
            .unwrap_or((1, 0))
    }
}

fn shared_address(instruction: &Instruction) -> Option<&Address> {
    let loads = matches!(instruction.opcode(), Opcode::Ld | Opcode::St) && in_shared(instruction);
    instruction.operands().iter().find_map(|operand| match operand {
        Operand::Memory(address) if loads => Some(address),
        _ => None,
    })
}

/// What registers hold, as far as addresses need it, while the blocks are walked in program order.
struct Values<'a> {
    kernel: &'a Kernel,
    /// Registers that addresses are computed from, with the positions that write them.
    writers: HashMap<Register, Vec<usize>>,
    block_of: Vec<usize>,
    /// Known bits of registers, at any time.
    bits: HashMap<Register, Bits>,
    /// Values of registers written once, from then on.
    once: HashMap<Register, Value>,
    /// Values of the others, in this block.
    here: HashMap<Register, Value>,
    /// The values of the others at the end of each block.
    leaving: Vec<HashMap<Register, Value>>,
    kept: usize,
    predecessors: Vec<Vec<usize>>,
    block: usize,
    atoms: HashMap<Atom, usize>,
    atom_bits: Vec<Bits>,
}

impl<'a> Values<'a> {
    fn new(kernel: &'a Kernel, instructions: &[&Instruction], cfg: &Cfg) -> Self {
        let mut block_of = vec![0; instructions.len()];
        let mut predecessors = vec![Vec::new(); cfg.blocks.len()];
        for (index, block) in cfg.blocks.iter().enumerate() {
            block_of[block.instructions.clone()].fill(index);
            for &next in &block.successors {
                predecessors[next].push(index);
            }
        }
        let writers = writers(instructions);
        let bits = bits::of_registers(kernel, instructions, &writers);
        Self {
            kernel,
            writers,
            block_of,
            bits,
            once: HashMap::new(),
            here: HashMap::new(),
            leaving: vec![HashMap::new(); cfg.blocks.len()],
            kept: 0,
            predecessors,
            block: 0,
            atoms: HashMap::new(),
            atom_bits: Vec::new(),
        }
    }

    /// Starts a block: a register keeps its value where all blocks before agree on it. Where a block that comes later in the
    /// program leads back to this one, that holds for the registers nothing from here on writes.
    fn enter(&mut self, block: usize) {
        let left = std::mem::take(&mut self.here);
        self.kept += left.len();
        if block > 0 && self.kept <= MOST_KEPT {
            self.leaving[self.block] = left;
        }
        self.block = block;
        let loops = self.predecessors[block].iter().any(|&other| other >= block);
        let mut before = self.predecessors[block].iter().copied().filter(|&other| other < block);
        let Some(first) = before.next() else { return };
        let rest: Vec<usize> = before.collect();
        let agreed = |register: &Register, value: &Value| {
            rest.iter().all(|&other| self.leaving[other].get(register) == Some(value))
                && !(loops && self.writers[register].iter().any(|&writer| self.block_of[writer] >= block))
        };
        let here = self.leaving[first].iter().filter(|(register, value)| agreed(register, value));
        self.here = here.map(|(register, value)| (*register, value.clone())).collect();
    }

    fn atom(&mut self, atom: Atom, bits: Bits) -> Value {
        let next = self.atoms.len();
        let number = *self.atoms.entry(atom).or_insert(next);
        if number == next {
            self.atom_bits.push(bits);
        }
        Value { terms: vec![(number, 1)], constant: 0 }
    }

    fn bits_of(&self, value: &Value) -> Bits {
        value.terms.iter().fold(Bits::constant(value.constant), |sum, &(atom, factor)| {
            sum.plus(self.atom_bits[atom].times(Bits::constant(factor)))
        })
    }

    fn register(&mut self, register: Register) -> Value {
        if let Some(value) = self.here.get(&register).or_else(|| self.once.get(&register)) {
            return value.clone();
        }
        let bits = self.bits.get(&register).copied().unwrap_or(Bits::UNKNOWN);
        let value = self.atom(Atom::Meet(register, self.block), bits);
        self.here.insert(register, value.clone());
        value
    }

    fn variable(&mut self, variable: Variable, offset: i64) -> Value {
        let start = self.atom(Atom::Variable(variable), variable_bits(self.kernel, variable));
        start.plus(&Value::constant(offset as u32))
    }

    fn address(&mut self, address: &Address) -> Value {
        let base = match address.base {
            Base::Register(register) => self.register(register),
            Base::Variable(variable) => self.variable(variable, 0),
            Base::Parameter(_) | Base::Absolute => Value::default(),
        };
        base.plus(&Value::constant(address.offset as u32))
    }

    /// Whether an address counts from a register that is computed in this block and nowhere else.
    fn is_defined_in(&self, address: &Address, block: usize) -> bool {
        let Base::Register(register) = address.base else { return false };
        matches!(self.writers.get(&register).map(Vec::as_slice), Some(&[writer]) if self.block_of[writer] == block)
    }

    fn operand(&mut self, operand: &Operand) -> Option<Value> {
        match operand {
            Operand::Register(register) => Some(self.register(*register)),
            Operand::Integer(integer) => Some(Value::constant(*integer as u32)),
            Operand::Special(special) => {
                Some(self.atom(Atom::Special(*special), bits::of_special(self.kernel, *special)))
            }
            Operand::VariableAddress(variable, offset) => Some(self.variable(*variable, *offset)),
            _ => None,
        }
    }

    /// Takes note of what an instruction writes.
    fn execute(&mut self, position: usize, instruction: &Instruction) {
        let mut written = Vec::new();
        instruction.for_each_def(|register| written.push(register));
        written.retain(|register| self.writers.contains_key(register));
        for &register in &written {
            let bits = self.bits.get(&register).copied().unwrap_or(Bits::UNKNOWN);
            let value = match written.len() {
                1 if instruction.guard.is_none() => self.result(instruction, bits),
                _ => None,
            };
            let value = value.unwrap_or_else(|| self.atom(Atom::Result(position, register), bits));
            if self.writers[&register].len() == 1 {
                self.once.insert(register, value);
            } else {
                self.here.insert(register, value);
            }
        }
    }

    /// What an instruction on integers computes; `None` when that is not a function of its operands alone.
    fn result(&mut self, instruction: &Instruction, bits: Bits) -> Option<Value> {
        let opcode = instruction.opcode();
        if !bits::is_integer(instruction) {
            return None;
        }
        let operands: Vec<Value> =
            instruction.operands().get(1..)?.iter().map(|operand| self.operand(operand)).collect::<Option<_>>()?;
        let low = !instruction.has(Modifier::Hi);
        let sum = match (opcode, operands.as_slice()) {
            (Opcode::Mov | Opcode::Cvt, [a]) => Some(a.clone()),
            (Opcode::Add, [a, b]) => Some(a.plus(b)),
            (Opcode::Sub, [a, b]) => Some(a.plus(&b.times(u32::MAX))),
            (Opcode::Mul, [a, b]) if low => product(a, b),
            (Opcode::Mad, [a, b, c]) if low => product(a, b).map(|product| product.plus(c)),
            (Opcode::Shl, [a, b]) => b.as_constant().map(|by| a.times(1u32.checked_shl(by).unwrap_or(0))),
            (Opcode::Or, [a, b]) if self.bits_of(a).is_disjoint(self.bits_of(b)) => Some(a.plus(b)),
            _ => None,
        };
        if let Some(sum) = sum {
            return (sum.terms.len() <= MOST_TERMS).then_some(sum);
        }
        // Only the low 32 bits of wide values are known to be equal.
        let narrow = instruction.ty().is_some_and(|ty| ty.bits() <= 32) && low;
        narrow.then(|| self.atom(Atom::Same(opcode, instruction.modifiers().to_vec(), operands), bits))
    }
}

fn product(a: &Value, b: &Value) -> Option<Value> {
    a.as_constant().map(|factor| b.times(factor)).or_else(|| b.as_constant().map(|factor| a.times(factor)))
}

/// What is known of where a variable starts.
fn variable_bits(kernel: &Kernel, variable: Variable) -> Bits {
    let declared = kernel.variables.get(variable.0 as usize);
    let align = declared.map_or(1, |declared| match (declared.space, declared.elements) {
        (Space::Shared, None) => declared.align.max(DYNAMIC_ALIGN),
        _ => declared.align,
    });
    Bits::multiple_of(align)
}

/// The registers that addresses of shared memory are computed from, with the positions that write them.
fn writers(instructions: &[&Instruction]) -> HashMap<Register, Vec<usize>> {
    let mut all = HashMap::<Register, Vec<usize>>::new();
    for (position, instruction) in instructions.iter().enumerate() {
        instruction.for_each_def(|register| all.entry(register).or_default().push(position));
    }
    let mut needed = HashMap::new();
    let mut open: Vec<Register> = instructions
        .iter()
        .filter_map(|instruction| shared_address(instruction))
        .filter_map(|address| match address.base {
            Base::Register(register) => Some(register),
            _ => None,
        })
        .collect();
    while let Some(register) = open.pop() {
        if needed.contains_key(&register) {
            continue;
        }
        let positions = all.get(&register).cloned().unwrap_or_default();
        for &position in &positions {
            let computed = instructions[position];
            if bits::is_integer(computed) {
                computed.for_each_use(|used| open.push(used));
            }
        }
        needed.insert(register, positions);
    }
    needed
}

/// Whether a type is that of an integer or of bits.
fn is_integer_type(ty: Type) -> bool {
    !ty.is_float() && ty != Type::Pred && ty.bits() >= 32 && ty.bits() <= 64
}
