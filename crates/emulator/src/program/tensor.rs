//! Decoding of tensor-core instructions, and of everything that touches registers `wgmma` works on.

use std::collections::HashMap;

use ptx::{Instruction, Kernel, Modifier, Opcode, Operand, Register, Type};

use super::{Code, Decoded, Decoder, Extend, MemoryOp, Op, UNGUARDED};
use crate::allocate::Width;
use crate::tensor::{Accumulator, DoubleProduct, Element, Major, MatrixA, Shape, Sums, TensorOp, Watch, WgmmaOp};

/// Marks a guard that stands for an entry of [`Program::watched`](super::Program::watched): the instruction touches registers
/// that some `wgmma` works on. No predicate's number has this bit.
pub(crate) const WATCHED: u32 = 1 << 31;

/// The numbers of the registers that some `wgmma` works on, accumulators and fragments of A, and of the parts of accumulators that
/// are taken apart.
#[derive(Default)]
pub(super) struct Watched {
    numbers: HashMap<Register, u32>,
}

/// The register that a `mov` takes apart, and its parts.
fn taken_apart(instruction: &Instruction) -> Option<(Register, &[Operand])> {
    match (instruction.opcode(), instruction.operands()) {
        (Opcode::Mov, [Operand::Vector(parts), Operand::Register(whole)]) => Some((*whole, parts)),
        _ => None,
    }
}

impl Watched {
    pub(super) fn of(kernel: &Kernel) -> (Self, Vec<String>) {
        let mut numbers = HashMap::new();
        let mut names = Vec::new();
        let wgmma = kernel.instructions().filter(|instruction| is_product(instruction));
        let vectors = |operand: &&Operand| matches!(operand, Operand::Vector(_));
        for operand in wgmma.flat_map(|instruction| instruction.operands().iter().take(2).filter(vectors)) {
            for register in elements(operand).iter().filter_map(register) {
                numbers.entry(register).or_insert_with(|| {
                    names.push(kernel.register_name(register).unwrap_or_default());
                    names.len() as u32 - 1
                });
            }
        }
        let apart = kernel.instructions().filter_map(taken_apart);
        let parts: Vec<_> =
            apart.filter(|(whole, _)| numbers.contains_key(whole)).flat_map(|(_, parts)| parts).collect();
        for part in parts.into_iter().filter_map(register) {
            numbers.entry(part).or_insert_with(|| {
                names.push(kernel.register_name(part).unwrap_or_default());
                names.len() as u32 - 1
            });
        }
        (Self { numbers }, names)
    }
}

/// Whether this is a `wgmma.mma_async`.
fn is_product(instruction: &Instruction) -> bool {
    instruction.opcode() == Opcode::Wgmma && instruction.has(Modifier::MmaAsync)
}

/// The elements of a vector; a single register is one element.
fn elements(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(elements) => elements,
        one => std::slice::from_ref(one),
    }
}

fn register(operand: &Operand) -> Option<Register> {
    match operand {
        Operand::Register(register) => Some(*register),
        _ => None,
    }
}

fn shape_of(instruction: &Instruction) -> Decoded<(usize, usize, usize)> {
    let shape = instruction.modifiers().iter().find_map(|modifier| match *modifier {
        Modifier::Shape { m, n, k } => Some((usize::from(m), usize::from(n), usize::from(k))),
        _ => None,
    });
    shape.ok_or_else(|| "it has no shape".into())
}

impl Decoder<'_> {
    fn push_tensor(&mut self, op: &mut Op, tensor: TensorOp) {
        op.code = Code::Tensor;
        op.aux = self.program.tensor.len() as u32;
        self.program.tensor.push(tensor);
    }

    /// Decodes `mma`, `ldmatrix`, `stmatrix`, `movmatrix` and `wgmma`.
    pub(super) fn tensor(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let tensor = match instruction.opcode() {
            Opcode::Mma => self.mma(instruction)?,
            Opcode::Ldmatrix | Opcode::Stmatrix => self.matrix(instruction)?,
            Opcode::Movmatrix => {
                let [to, from] = instruction.operands() else { return Err("movmatrix has two operands".into()) };
                TensorOp::MoveMatrix { d: self.destination(to, Type::B32)?.0, a: self.source(from, Type::B32)?.0 }
            }
            _ if instruction.has(Modifier::MmaAsync) => TensorOp::Wgmma(Box::new(self.wgmma(instruction)?)),
            _ if instruction.has(Modifier::Fence) => TensorOp::WgmmaFence,
            _ if instruction.has(Modifier::CommitGroup) => TensorOp::WgmmaCommit,
            _ => match instruction.operands() {
                [Operand::Integer(groups)] => {
                    TensorOp::WgmmaWait(usize::try_from(*groups).map_err(|_| "a negative number of groups")?)
                }
                _ => return Err("wgmma.wait_group needs a number of groups".into()),
            },
        };
        self.push_tensor(op, tensor);
        Ok(())
    }

    /// The narrow places of the registers of an operand.
    fn narrow_places(&mut self, operand: &Operand, written: bool) -> Decoded<Vec<u32>> {
        self.places(operand, written, (Type::B32, Width::Narrow))
    }

    /// The places of the registers of an operand, which all have this type and width.
    fn places(&mut self, operand: &Operand, written: bool, (ty, wanted): (Type, Width)) -> Decoded<Vec<u32>> {
        let places = elements(operand).iter().map(|element| {
            let (place, width) = if written { self.destination(element, ty)? } else { self.source(element, ty)? };
            if width == wanted { Ok(place) } else { Err(format!("a register is not {} bits wide", 8 * ty.bytes())) }
        });
        places.collect()
    }

    fn double_mma(&mut self, instruction: &Instruction) -> Decoded<TensorOp> {
        let (m, n, k) = shape_of(instruction)?;
        if !matches!((m, n, k), (8, 8, 4) | (16, 8, 4 | 8 | 16)) {
            return Err(format!("the shape .m{m}n{n}k{k} is not one of .f64"));
        }
        if [Modifier::Rz, Modifier::Rm, Modifier::Rp].into_iter().any(|rounding| instruction.has(rounding)) {
            return Err("products of .f64 are rounded to nearest here".into());
        }
        let [d, a, b, c] = instruction.operands() else { return Err("mma has four operands".into()) };
        let wide = (Type::B64, Width::Wide);
        let (a, b, c) = (self.places(a, false, wide)?, self.places(b, false, wide)?, self.places(c, false, wide)?);
        let product = DoubleProduct { m, k, a, b, c, d: self.places(d, true, wide)? };
        let found = [product.a.len(), product.b.len(), product.c.len(), product.d.len()];
        if found != product.registers() {
            return Err(format!("the matrices take {:?} registers", product.registers()));
        }
        Ok(TensorOp::Double(product))
    }

    fn mma(&mut self, instruction: &Instruction) -> Decoded<TensorOp> {
        let (m, n, k) = shape_of(instruction)?;
        let types: Vec<Type> = instruction.types().collect();
        if types.iter().all(|ty| *ty == Type::F64) {
            return self.double_mma(instruction);
        }
        if (m, n, k) == (8, 8, 4) {
            return Err("the .m8n8k4 shape of sm_70 is not there yet".into());
        }
        let [d, a, b, c] = types[..] else { return Err("mma names four types".into()) };
        let element = |ty| Element::of(ty).ok_or_else(|| format!("{ty} matrices are not there yet"));
        let accumulator = |ty| Accumulator::of(ty).ok_or_else(|| format!("{ty} accumulators are not there yet"));
        let shape = Shape {
            m,
            n,
            k,
            a: element(a)?,
            b: element(b)?,
            c: accumulator(c)?,
            d: accumulator(d)?,
            clamp: instruction.has(Modifier::Satfinite),
            sums: Sums::of(element(a)?, self.kernel.target.sm()),
        };
        if !matches!((m, n), (8 | 16, 8)) || k > 32 {
            return Err(format!("the shape .m{m}n{n}k{k} is not there yet"));
        }
        let [d, a, b, c] = instruction.operands() else { return Err("mma has four operands".into()) };
        let (a, b, c) = (self.narrow_places(a, false)?, self.narrow_places(b, false)?, self.narrow_places(c, false)?);
        let d = self.narrow_places(d, true)?;
        if [a.len(), b.len(), c.len(), d.len()] != shape.registers() {
            return Err(format!("the matrices take {:?} registers", shape.registers()));
        }
        Ok(TensorOp::Mma { shape, a, b, c, d })
    }

    fn matrix(&mut self, instruction: &Instruction) -> Decoded<TensorOp> {
        if shape_of(instruction)? != (8, 8, 0) {
            return Err("only .m8n8 matrices are there yet".into());
        }
        let load = instruction.opcode() == Opcode::Ldmatrix;
        let [first, second] = instruction.operands() else { return Err("it has two operands".into()) };
        let (address, values) = if load { (second, first) } else { (first, second) };
        let (base, offset) = self.address(address)?;
        let generic = !instruction.has(Modifier::Shared) && !instruction.has(Modifier::SharedCta);
        let registers = self.narrow_places(values, load)?;
        if !matches!(registers.len(), 1 | 2 | 4) {
            return Err("1, 2 or 4 matrices are moved".into());
        }
        let memory = self.program.memory.len() as u32;
        self.program.memory.push(MemoryOp {
            base,
            offset,
            bytes: 16,
            elements: 1,
            registers: Vec::new(),
            extend: Extend::Zero,
            generic,
            merged: self.merged(16),
            atomic: None,
            source: None,
            take: None,
            position: self.position,
        });
        let transpose = instruction.has(Modifier::Trans);
        Ok(if load {
            TensorOp::LoadMatrix { memory, transpose, registers }
        } else {
            TensorOp::StoreMatrix { memory, transpose, registers }
        })
    }

    fn wgmma(&mut self, instruction: &Instruction) -> Decoded<WgmmaOp> {
        let (_, n, k) = shape_of(instruction)?;
        let types: Vec<Type> = instruction.types().collect();
        let [d, a, b] = types[..] else { return Err("wgmma names three types".into()) };
        let element = |ty| Element::of(ty).ok_or_else(|| format!("{ty} matrices are not there yet"));
        let d = Accumulator::of(d).ok_or_else(|| format!("{d} accumulators are not there yet"))?;
        let clamp = instruction.has(Modifier::Satfinite);
        let sums = match (element(a)?, d) {
            (Element::E4m3 | Element::E5m2, Accumulator::F32) => Sums::CutBytes,
            (a, _) => Sums::of(a, self.kernel.target.sm()),
        };
        // A warp computes 16 of the 64 rows.
        let shape = Shape { m: 16, n, k, a: element(a)?, b: element(b)?, c: d, d, clamp, sums };
        if n == 0 || n > 256 || n % 8 != 0 || k * 4 != 32 * shape.a.per_word() {
            return Err(format!("the shape .m64n{n}k{k} is not there"));
        }
        let [accumulator, a, b, scale_d, immediates @ ..] = instruction.operands() else {
            return Err("wgmma has at least four operands".into());
        };
        let immediates = immediates
            .iter()
            .map(|operand| match operand {
                Operand::Integer(value) => Ok(*value),
                _ => Err("scales and transpositions are constants"),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let (scales, transpositions) = immediates.split_at(immediates.len().min(2));
        if scales.iter().any(|scale| !matches!(scale, 1 | -1)) {
            return Err(format!("a scale is 1 or -1, not one of {scales:?}"));
        }
        let major = |transposed: Option<&i64>| match transposed {
            None | Some(0) => Ok(Major::K),
            Some(1) => Ok(Major::Mn),
            Some(other) => Err(format!("a transposition is 0 or 1, not {other}")),
        };
        let fragments = matches!(a, Operand::Vector(_));
        let b_major = major(transpositions.last())?;
        let accumulators = self.numbers(accumulator);
        let (matrix_a, fragment_numbers) = if fragments {
            (MatrixA::Registers(self.narrow_places(a, false)?), self.numbers(a))
        } else {
            (MatrixA::Shared { descriptor: self.descriptor(a)?, major: major(transpositions.first())? }, Vec::new())
        };
        let d = self.narrow_places(accumulator, true)?;
        let [a_count, _, _, d_count] = shape.registers();
        let fits = |a: &MatrixA| !matches!(a, MatrixA::Registers(places) if places.len() != a_count);
        if d.len() != d_count || !fits(&matrix_a) {
            return Err(format!("the accumulator takes {d_count} registers, A {a_count}"));
        }
        Ok(WgmmaOp {
            shape,
            a: matrix_a,
            b: self.descriptor(b)?,
            b_major,
            scale_d: self.predicate(scale_d)?,
            negate: scales.iter().product::<i64>() < 0,
            d,
            accumulators,
            fragments: fragment_numbers,
            position: self.position,
        })
    }

    fn descriptor(&mut self, operand: &Operand) -> Decoded<u32> {
        match self.source(operand, Type::B64)? {
            (place, Width::Wide) => Ok(place),
            _ => Err("a descriptor is 64 bits wide".into()),
        }
    }

    fn numbers(&self, operand: &Operand) -> Vec<u32> {
        elements(operand)
            .iter()
            .filter_map(register)
            .filter_map(|register| self.watched.numbers.get(&register).copied())
            .collect()
    }

    /// Marks an instruction that touches registers which `wgmma` works on.
    pub(super) fn watch(&mut self, instruction: &Instruction, op: &mut Op) {
        if self.watched.numbers.is_empty() || is_product(instruction) {
            return;
        }
        let mut touches = Vec::new();
        let mut note = |register: Register, written: bool| {
            if let Some(&number) = self.watched.numbers.get(&register) {
                touches.push((number, written));
            }
        };
        instruction.for_each_use(|register| note(register, false));
        instruction.for_each_def(|register| note(register, true));
        if touches.is_empty() {
            return;
        }
        let guard = (op.guard != UNGUARDED).then_some(op.guard);
        op.guard = WATCHED | self.program.watched.len() as u32;
        let parts_of = taken_apart(instruction).and_then(|(whole, _)| self.watched.numbers.get(&whole).copied());
        self.program.watched.push(Watch { guard, touches, parts_of });
    }
}
