//! A kernel decoded once into what the interpreter runs.

mod call;
pub(crate) mod engine;
mod small;
mod tensor;

use std::collections::HashMap;
use std::sync::Arc;

use ptx::{Base, Cfg, Instruction, Kernel, Kind, Modifier, Opcode, Operand, Register, Role, Space, Special, Type};

use crate::allocate::{Width, allocate};
use crate::call::CallOp;
use crate::fault::RunError;
use crate::lanes::number;
use crate::memory::Memory;
use crate::merge;
use crate::scalar;
use crate::small::{CarryOp, SmallOp, WarpFunction};
use crate::tensor::{TensorOp, Watch};

pub(crate) use engine::Order;
pub use engine::hands_on;
pub(crate) use tensor::WATCHED;

/// Where shared memory appears in the generic address space.
pub(crate) const SHARED_WINDOW: u64 = 0x1_0000_0000;
/// Where local memory appears in the generic address space.
pub(crate) const LOCAL_WINDOW: u64 = 0x2_0000_0000;
/// Where the kernel's parameters appear in the generic address space.
pub(crate) const PARAM_WINDOW: u64 = 0x3_0000_0000;
/// The size of any window.
pub(crate) const WINDOW_BYTES: u64 = 0x1_0000_0000;

/// What the interpreter does for an instruction. Names end in the width of what is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    Nop,
    Mov32,
    Mov64,
    FmaF32,
    AddF32,
    SubF32,
    MulF32,
    MaxF32,
    MinF32,
    NegF32,
    AbsF32,
    Ex2F32,
    Ex2FtzF32,
    RcpF32,
    DivF32,
    Add32,
    Sub32,
    Mul32,
    Mad32,
    And32,
    Or32,
    Xor32,
    Shl32,
    ShrU32,
    ShrS32,
    MinU32,
    MaxU32,
    MinS32,
    MaxS32,
    Add64,
    Sub64,
    Mul64,
    Mad64,
    And64,
    Or64,
    Xor64,
    Shl64,
    ShrU64,
    MulWideU,
    MulWideS,
    MadWideU,
    MadWideS,
    ZeroExtend,
    SignExtend,
    Truncate,
    Pack64,
    Unpack64,
    Pack32,
    Unpack32,
    F16ToF32,
    F32ToF16,
    F32ToBf16,
    F32ToF16x2,
    F32ToBf16x2,
    SetpF32,
    SetpU32,
    SetpS32,
    SetpU64,
    SetpS64,
    SetpOther,
    Selp32,
    Selp64,
    PredicateMov,
    PredicateAnd,
    PredicateOr,
    PredicateXor,
    PredicateNot,
    /// Any function of up to four scalars, lane by lane.
    Scalar,
    /// Integer arithmetic that reads or writes the carry flag.
    Carry,
    /// What [`SmallOp`] says.
    Small,
    LoadShared,
    StoreShared,
    LoadGlobal,
    StoreGlobal,
    LoadLocal,
    StoreLocal,
    LoadConstant,
    /// Of the kernel, by an address or several at once.
    LoadParameter,
    AtomicShared,
    AtomicGlobal,
    /// A load (`d` is 0), store or atomic by `shared::cluster` addresses.
    Cluster,
    CopyAsync,
    CopyCommit,
    CopyWait,
    /// What is asynchronous or between CTAs: [`engine::EngineOp`].
    Engine,
    Shuffle,
    Vote,
    /// What lanes find out about each other's values.
    WarpFunction,
    /// A jump to one of several targets, lane by lane.
    BranchByIndex,
    ActiveMask,
    BarrierSync,
    BarrierArrive,
    BarrierReduce,
    WarpSync,
    /// `mma`, `ldmatrix`, `stmatrix`, `movmatrix`, `wgmma`.
    Tensor,
    Branch,
    Call,
    /// From a function to behind its call.
    Return,
    Exit,
    Trap,
}

/// A predicate read, possibly complemented: the place times two, plus one if complemented.
pub(crate) type PredicateRef = u32;
/// No guard.
pub(crate) const UNGUARDED: u32 = u32::MAX;

/// One decoded instruction. Operands are places in the register file (or predicates, for predicate code).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub code: Code,
    pub d: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
    /// An index into one of [`Program`]'s tables, or a jump target; of a multiply-add, how many stand here in a row.
    pub aux: u32,
    pub guard: u32,
}

/// How a loaded value fills its register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extend {
    Zero,
    Sign,
}

/// An access that is counted, after the merge, for the one that leads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merged {
    /// In bytes, from the leader's address.
    pub delta: i32,
    /// Per lane.
    pub bytes: u32,
}

/// What a memory instruction does.
#[derive(Clone, Debug)]
pub(crate) struct MemoryOp {
    /// The register the address counts from, and whether it is wide; `None` for an absolute address.
    pub base: Option<(u32, bool)>,
    pub offset: i64,
    /// Bytes of an element.
    pub bytes: u32,
    /// Elements of a lane's access.
    pub elements: u32,
    /// The registers of the elements: place, and whether it is wide; `None` is `_`.
    pub registers: Vec<Option<(u32, bool)>>,
    pub extend: Extend,
    pub generic: bool,
    /// What the instruction is counted as after the merge; nothing where others' accesses serve it.
    pub merged: Vec<Merged>,
    pub atomic: Option<Atomic>,
    /// `cp.async`: the source address, and the register with the bytes to take (the rest is zero).
    pub source: Option<(Option<(u32, bool)>, i64)>,
    pub take: Option<u32>,
    /// For messages: the position of the instruction.
    pub position: usize,
}

impl MemoryOp {
    /// Bytes a lane accesses.
    pub(crate) fn lane_bytes(&self) -> u32 {
        self.bytes * self.elements
    }
}

/// What an atomic does to memory.
#[derive(Clone, Debug)]
pub(crate) struct Atomic {
    /// From the old value and one or two operands to the new value.
    pub update: fn(u64, u64, u64) -> u64,
    /// The operands of each element: places, and whether they are wide.
    pub operands: Vec<[(u32, bool); 2]>,
}

impl Atomic {
    /// Does it to the bytes of one number; what they held before.
    pub(crate) fn apply(&self, place: &mut [u8], a: u64, b: u64) -> u64 {
        let old = number(place);
        let new = (self.update)(old, a, b).to_le_bytes();
        place.copy_from_slice(&new[..place.len()]);
        old
    }
}

/// A function of scalars.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScalarOp {
    pub function: fn(u64, u64, u64, u64) -> u64,
    pub sources: [(u32, Width); 4],
    pub destination: Width,
}

/// A comparison that is combined with another predicate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    pub compare: scalar::Compare,
    /// For types without fast code.
    pub function: Option<scalar::Order>,
    pub wide: bool,
    pub combine: Option<(Modifier, PredicateRef)>,
    /// The second predicate, with the complement.
    pub other: Option<u32>,
}

/// The other operands of an exchange or vote.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarpOp {
    pub mode: Modifier,
    pub members: u32,
    /// `shfl`: the clamp and segment mask's register.
    pub clamp: u32,
    /// `shfl`: the predicate that says whether the source lane was in range.
    pub in_range: Option<u32>,
}

/// The operands of a barrier instruction, all registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BarrierOp {
    pub id: u32,
    pub threads: Option<u32>,
    /// `.aligned`: all of a warp's threads arrive together.
    pub aligned: bool,
    pub reduce: Option<(Modifier, PredicateRef)>,
}

/// A decoded kernel.
pub(crate) struct Program {
    pub ops: Vec<Op>,
    pub memory: Vec<MemoryOp>,
    pub scalars: Vec<ScalarOp>,
    pub comparisons: Vec<Comparison>,
    pub warp_ops: Vec<WarpOp>,
    pub barriers: Vec<BarrierOp>,
    pub engine: Vec<engine::EngineOp>,
    /// Whether some instruction makes an asynchronous engine read shared memory.
    pub uses_async_proxy: bool,
    /// By instruction: what it means for the order of memory accesses.
    pub orders: Vec<engine::Order>,
    /// Parameter memory.
    pub params: Vec<u8>,
    pub tensor: Vec<TensorOp>,
    /// Arithmetic with carries.
    pub carries: Vec<CarryOp>,
    pub small: Vec<SmallOp>,
    /// The functions of the warp, by [`Op::c`].
    pub warp_functions: Vec<WarpFunction>,
    /// The targets of jumps by index.
    pub tables: Vec<Vec<u32>>,
    pub calls: Vec<CallOp>,
    /// Where functions start and how many calls deep they are, by ascending position.
    pub depths: Arc<[(usize, u32)]>,
    /// What stands for the guard of instructions that touch registers which `wgmma` works on, and those registers' names.
    pub watched: Vec<Watch>,
    pub watched_names: Vec<String>,
    /// Registers of each width that a warp needs.
    pub narrow: u32,
    pub wide: u32,
    pub predicates: u32,
    /// Constants and the places that hold them.
    pub constants: Vec<(u32, Width, u64)>,
    pub specials: Vec<(u32, Width, Special)>,
    /// Bytes of static shared memory, and where dynamic memory starts.
    pub static_shared: u64,
    /// Bytes of local memory per thread.
    pub local_bytes: u64,
    /// Constant memory.
    pub constant_memory: Vec<u8>,
    pub live_registers: u32,
}

/// Predicate places with fixed values.
pub(crate) const FALSE: u32 = 0;
pub(crate) const TRUE: u32 = 1;
const FIXED_PREDICATES: u32 = 2;

struct Decoder<'k> {
    kernel: &'k Kernel,
    program: Program,
    places: HashMap<Register, (Width, u32)>,
    label_positions: Vec<usize>,
    constants: HashMap<(u64, Width), u32>,
    specials: HashMap<Special, u32>,
    /// The address of each variable in its space.
    variables: Vec<u64>,
    /// Where each parameter starts.
    param_offsets: Vec<u64>,
    merged: HashMap<usize, Vec<Merged>>,
    /// The predicate that is the carry flag, once something carries.
    carry_flag: Option<u32>,
    watched: tensor::Watched,
    functions: call::Functions,
    position: usize,
}

const MAX_DECLARED: u64 = 1 << 26;

impl Program {
    /// Decodes a validated kernel. `params` is parameter memory, laid out as [`parameter_layout`] says; `memory` has its variables in global memory.
    pub(crate) fn new(kernel: &Kernel, params: Vec<u8>, memory: &Memory) -> Result<Self, RunError> {
        let cfg = Cfg::of(kernel);
        let allocation = allocate(kernel, &cfg).map_err(|reason| RunError::Unsupported {
            instruction: kernel.name.clone(),
            place: None,
            reason,
        })?;
        let (variables, static_shared, local_bytes, constant_memory) = lay_out(kernel, memory)?;
        let functions = call::Functions::of(kernel, &cfg, allocation.narrow);
        let (watched, watched_names) = tensor::Watched::of(kernel);
        let mut decoder = Decoder {
            kernel,
            program: Program {
                ops: Vec::new(),
                memory: Vec::new(),
                scalars: Vec::new(),
                comparisons: Vec::new(),
                warp_ops: Vec::new(),
                barriers: Vec::new(),
                engine: Vec::new(),
                uses_async_proxy: kernel.instructions().any(engine::reads_by_proxy),
                orders: engine::Order::all(kernel),
                params,
                tensor: Vec::new(),
                carries: Vec::new(),
                small: Vec::new(),
                warp_functions: Vec::new(),
                tables: Vec::new(),
                calls: Vec::new(),
                depths: functions.starts().collect(),
                watched: Vec::new(),
                watched_names,
                narrow: allocation.narrow + kernel.functions.len() as u32,
                wide: allocation.wide,
                predicates: allocation.predicates + FIXED_PREDICATES,
                constants: Vec::new(),
                specials: Vec::new(),
                static_shared,
                local_bytes,
                constant_memory,
                live_registers: allocation.live,
            },
            places: allocation.places,
            label_positions: cfg.label_positions,
            constants: HashMap::new(),
            specials: HashMap::new(),
            variables,
            param_offsets: parameter_layout(kernel).0,
            merged: merged_accesses(kernel),
            carry_flag: None,
            watched,
            functions,
            position: 0,
        };
        for (position, instruction) in kernel.instructions().enumerate() {
            decoder.position = position;
            let op = decoder.decode(instruction).map_err(|reason| RunError::Unsupported {
                instruction: kernel.instruction_text(instruction),
                place: place(kernel, instruction),
                reason,
            })?;
            decoder.program.ops.push(op);
        }
        decoder.count_runs();
        // Running off the end is `ret`.
        decoder.program.ops.push(Op { code: Code::Exit, d: 0, a: 0, b: 0, c: 0, aux: 0, guard: UNGUARDED });
        Ok(decoder.program)
    }
}

/// The source place of an instruction as messages give it.
pub(crate) fn place(kernel: &Kernel, instruction: &Instruction) -> Option<(String, u32)> {
    kernel
        .user_location(instruction)
        .map(|location| (kernel.files.get(location.file as usize).cloned().unwrap_or_default(), location.line))
}

/// The offset of each parameter in parameter memory, and its size.
pub(crate) fn parameter_layout(kernel: &Kernel) -> (Vec<u64>, u64) {
    let mut end = 0u64;
    let offsets = kernel
        .params
        .iter()
        .map(|param| {
            let start = end.checked_next_multiple_of(u64::from(param.alignment())).unwrap_or(end);
            end = start.saturating_add(param.bytes());
            start
        })
        .collect();
    (offsets, end)
}

/// The address of each variable in its space, and the bytes each space takes: shared, local, and constant memory's contents.
fn lay_out(kernel: &Kernel, memory: &Memory) -> Result<(Vec<u64>, u64, u64, Vec<u8>), RunError> {
    let (mut shared, mut local, mut constant) = (0u64, 0u64, Vec::new());
    let mut addresses = vec![0; kernel.variables.len()];
    let refuse =
        |name: &str, why: &str| RunError::Launch(format!("variable `{name}` of kernel `{}` {why}", kernel.name));
    // Dynamic shared memory lies behind all static variables.
    let dynamic_last = kernel
        .variables
        .iter()
        .enumerate()
        .filter(|(_, v)| v.elements.is_some())
        .chain(kernel.variables.iter().enumerate().filter(|(_, v)| v.elements.is_none()));
    for (index, variable) in dynamic_last {
        let align = u64::from(variable.align.max(1));
        if variable.bytes() > MAX_DECLARED {
            return Err(refuse(
                &variable.name,
                &format!("takes {} bytes; the emulator allows {MAX_DECLARED}", variable.bytes()),
            ));
        }
        let place = |end: &mut u64| {
            let start = end.next_multiple_of(align);
            *end = start + variable.bytes();
            start
        };
        addresses[index] = match variable.space {
            Space::Shared => place(&mut shared),
            Space::Local | Space::Param => place(&mut local),
            Space::Const => {
                let mut end = constant.len() as u64;
                let start = place(&mut end);
                constant.resize(end as usize, 0);
                let held = variable.init.len().min(variable.bytes() as usize);
                constant[start as usize..start as usize + held].copy_from_slice(&variable.init[..held]);
                start
            }
            Space::Global => memory
                .variable(variable)
                .ok_or_else(|| refuse(&variable.name, "is in global memory and was not loaded (`Memory::load`)"))?,
        };
        if shared > MAX_DECLARED || local > MAX_DECLARED {
            return Err(refuse(&variable.name, "does not fit"));
        }
    }
    Ok((addresses, shared, local, constant))
}

fn merged_accesses(kernel: &Kernel) -> HashMap<usize, Vec<Merged>> {
    let covered = kernel.instructions().enumerate().filter(|(_, instruction)| merge::covers(instruction));
    let mut merged: HashMap<_, Vec<_>> = covered.map(|(position, _)| (position, Vec::new())).collect();
    for group in merge::groups(kernel) {
        let access = Merged { delta: group.delta, bytes: group.bytes_per_lane };
        merged.entry(group.leader).or_default().push(access);
    }
    merged
}

type Decoded<T> = Result<T, String>;

/// An operand's place and width.
type Placed = (u32, Width);

impl Decoder<'_> {
    /// What the instruction at this position is counted as after the merge: itself where the merge says nothing.
    fn merged(&self, bytes: u32) -> Vec<Merged> {
        self.merged.get(&self.position).cloned().unwrap_or_else(|| vec![Merged { delta: 0, bytes }])
    }

    /// Tells each multiply-add without a guard how many of its kind follow, itself included.
    fn count_runs(&mut self) {
        let mut run = 0;
        for op in self.program.ops.iter_mut().rev() {
            run = if op.code == Code::FmaF32 && op.guard == UNGUARDED { run + 1 } else { 0 };
            if op.code == Code::FmaF32 {
                op.aux = run;
            }
        }
    }

    fn constant(&mut self, value: u64, width: Width) -> u32 {
        let next = match width {
            Width::Wide => &mut self.program.wide,
            _ => &mut self.program.narrow,
        };
        *self.constants.entry((value, width)).or_insert_with(|| {
            *next += 1;
            self.program.constants.push((*next - 1, width, value));
            *next - 1
        })
    }

    fn special(&mut self, special: Special) -> Placed {
        let width = if special.ty().bits() == 64 { Width::Wide } else { Width::Narrow };
        let next = match width {
            Width::Wide => &mut self.program.wide,
            _ => &mut self.program.narrow,
        };
        let place = *self.specials.entry(special).or_insert_with(|| {
            *next += 1;
            self.program.specials.push((*next - 1, width, special));
            *next - 1
        });
        (place, width)
    }

    fn register(&self, register: Register) -> Decoded<Placed> {
        match self.places.get(&register) {
            Some((Width::Double, _)) => Err("128-bit values are only moved, loaded and stored here".into()),
            Some(&(width, place)) => Ok((place, width)),
            None => Err("a register has no place".into()),
        }
    }

    /// A source operand of a type: its place, as wide as the register or the type is.
    fn source(&mut self, operand: &Operand, ty: Type) -> Decoded<Placed> {
        let width = Width::of(ty).filter(|width| *width != Width::Double);
        let width = width.ok_or_else(|| format!("{ty} values are not held"))?;
        let mask = if ty.bits() == 64 { u64::MAX } else { (1 << ty.bits()) - 1 };
        let value = match operand {
            Operand::Register(register) => return self.register(*register),
            Operand::Special(special) => return Ok(self.special(*special)),
            Operand::Integer(value) if ty == Type::F32 => u64::from((*value as f32).to_bits()),
            Operand::Integer(value) if ty == Type::F64 => (*value as f64).to_bits(),
            Operand::Integer(value) => *value as u64,
            Operand::F32(bits) if ty == Type::F64 => f64::from(f32::from_bits(*bits)).to_bits(),
            Operand::F32(bits) => u64::from(*bits),
            Operand::F64(bits) if ty == Type::F32 => u64::from((f64::from_bits(*bits) as f32).to_bits()),
            Operand::F64(bits) => *bits,
            Operand::VariableAddress(variable, offset) => {
                self.variables[variable.0 as usize].wrapping_add(*offset as u64)
            }
            Operand::ParameterAddress(parameter, offset) => {
                (PARAM_WINDOW + self.param_offsets[parameter.0 as usize]).wrapping_add(*offset as u64)
            }
            other => return Err(format!("operand {other:?} is not a value")),
        };
        Ok((self.constant(value & mask, width), width))
    }

    fn predicate(&self, operand: &Operand) -> Decoded<PredicateRef> {
        match operand {
            Operand::Register(register) => Ok(self.predicate_place(*register)? * 2),
            Operand::NotPredicate(register) => Ok(self.predicate_place(*register)? * 2 + 1),
            Operand::Integer(value) => Ok(2 * if *value == 0 { FALSE } else { TRUE }),
            // No launch here has an explicit cluster.
            Operand::Special(Special::IsExplicitCluster) => Ok(2 * FALSE),
            other => Err(format!("operand {other:?} is not a predicate")),
        }
    }

    fn predicate_place(&self, register: Register) -> Decoded<u32> {
        match self.register(register)? {
            (place, Width::Predicate) => Ok(place + FIXED_PREDICATES),
            _ => Err("a predicate was expected".into()),
        }
    }

    /// A place for a predicate that nobody reads.
    fn unread_predicate(&mut self) -> u32 {
        self.program.predicates += 1;
        self.program.predicates - 1
    }

    /// A place for a result, or one that nobody reads for `_`.
    fn destination(&mut self, operand: &Operand, ty: Type) -> Decoded<Placed> {
        match operand {
            Operand::Register(register) | Operand::RegisterPair(Some(register), _) => self.register(*register),
            Operand::Sink | Operand::RegisterPair(None, _) => {
                let width = Width::of(ty).filter(|width| *width != Width::Double).unwrap_or(Width::Narrow);
                let next = if width == Width::Wide { &mut self.program.wide } else { &mut self.program.narrow };
                *next += 1;
                Ok((*next - 1, width))
            }
            other => Err(format!("operand {other:?} cannot be written")),
        }
    }

    fn decode(&mut self, instruction: &Instruction) -> Decoded<Op> {
        let guard = match instruction.guard {
            Some(guard) => self.predicate_place(guard.predicate)? * 2 + u32::from(guard.negated),
            None => UNGUARDED,
        };
        let mut op = Op { code: Code::Nop, d: 0, a: 0, b: 0, c: 0, aux: 0, guard };
        match instruction.opcode() {
            _ if engine::covers(instruction) => self.engine(instruction, &mut op)?,
            _ if small::covers(instruction) => self.small(instruction, &mut op)?,
            Opcode::Bra => {
                let label = instruction.target().ok_or("a branch without a target")?;
                op.code = Code::Branch;
                op.aux = self.jump(label)?;
            }
            Opcode::Call => self.call(instruction, &mut op)?,
            Opcode::Ret => self.ret(&mut op),
            Opcode::Exit => op.code = Code::Exit,
            Opcode::Trap => op.code = Code::Trap,
            Opcode::Nanosleep
            | Opcode::Prefetch
            | Opcode::Prefetchu
            // What is discarded may be read as anything (PTX ISA, `discard`): here as what it was.
            | Opcode::Discard
            | Opcode::Applypriority
            | Opcode::Pmevent
            | Opcode::Griddepcontrol => op.code = Code::Nop,
            Opcode::Createpolicy => self.cache_policy(instruction, &mut op)?,
            Opcode::Brx => self.branch_by_index(instruction, &mut op)?,
            Opcode::Match | Opcode::Redux | Opcode::Elect => self.warp_function(instruction, &mut op)?,
            Opcode::Ld | Opcode::St | Opcode::Atom | Opcode::Red => self.memory(instruction, &mut op)?,
            Opcode::CpAsync => self.copy(instruction, &mut op)?,
            Opcode::Bar | Opcode::Barrier => self.barrier(instruction, &mut op)?,
            Opcode::Shfl | Opcode::Vote | Opcode::Activemask => self.warp_op(instruction, &mut op)?,
            Opcode::Setp => self.comparison(instruction, &mut op)?,
            Opcode::Mov => self.mov(instruction, &mut op)?,
            Opcode::Mma | Opcode::Ldmatrix | Opcode::Stmatrix | Opcode::Movmatrix | Opcode::Wgmma => {
                self.tensor(instruction, &mut op)?
            }
            _ if small::carries(instruction) => self.carry(instruction, &mut op)?,
            _ => self.arithmetic(instruction, &mut op)?,
        }
        self.watch(instruction, &mut op);
        Ok(op)
    }

    /// The position of a label of the body that jumps to it.
    fn jump(&self, label: ptx::Label) -> Decoded<u32> {
        let position = self.label_positions[label.0 as usize];
        if self.functions.at(position) != self.functions.at(self.position) {
            return Err("it jumps from one function into another".into());
        }
        Ok(position as u32)
    }

    fn mov(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let ty = instruction.ty().ok_or("mov without a type")?;
        let [to, from] = instruction.operands() else { return Err("mov has two operands".into()) };
        if ty == Type::Pred {
            (op.code, op.a) = (Code::PredicateMov, self.predicate(from)?);
            op.d = self.destination_predicate(to)?;
            return Ok(());
        }
        match (to, from) {
            (Operand::Vector(parts), whole) => {
                let [low, high] = parts.as_slice() else { return Err("only two parts are unpacked".into()) };
                let part = if ty.bits() == 64 { Type::B32 } else { Type::B16 };
                op.code = if ty.bits() == 64 { Code::Unpack64 } else { Code::Unpack32 };
                op.a = self.source(whole, ty)?.0;
                (op.d, op.b) = (self.destination(low, part)?.0, self.destination(high, part)?.0);
            }
            (whole, Operand::Vector(parts)) => {
                let [low, high] = parts.as_slice() else { return Err("only two parts are packed".into()) };
                let part = if ty.bits() == 64 { Type::B32 } else { Type::B16 };
                op.code = if ty.bits() == 64 { Code::Pack64 } else { Code::Pack32 };
                op.d = self.destination(whole, ty)?.0;
                (op.a, op.b) = (self.source(low, part)?.0, self.source(high, part)?.0);
            }
            (to, from) => {
                let (d, width) = self.destination(to, ty)?;
                let (a, from_width) = self.source(from, ty)?;
                (op.d, op.a) = (d, a);
                op.code = match (width, from_width) {
                    (Width::Wide, Width::Wide) => Code::Mov64,
                    (Width::Narrow, Width::Narrow) => Code::Mov32,
                    (Width::Narrow, Width::Wide) => Code::Truncate,
                    (Width::Wide, Width::Narrow) => Code::ZeroExtend,
                    _ => return Err("a predicate is not a number".into()),
                };
            }
        }
        Ok(())
    }

    fn destination_predicate(&mut self, operand: &Operand) -> Decoded<u32> {
        match operand {
            Operand::Register(register) => self.predicate_place(*register),
            other => Err(format!("operand {other:?} is not a predicate that can be written")),
        }
    }

    fn comparison(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let ty = instruction.ty().ok_or("setp without a type")?;
        let operands = instruction.operands();
        let mut other = None;
        op.d = match &operands[0] {
            Operand::RegisterPair(p, q) => {
                other = q.map(|q| self.predicate_place(q)).transpose()?;
                match p {
                    Some(p) => self.predicate_place(*p)?,
                    None => self.unread_predicate(),
                }
            }
            operand => self.destination_predicate(operand)?,
        };
        let ((a, width), (b, _)) = (self.source(&operands[1], ty)?, self.source(&operands[2], ty)?);
        (op.a, op.b) = (a, b);
        let compare = scalar::Compare::of(instruction.modifiers()[0]).ok_or("an unknown comparison")?;
        let combine = match instruction.modifiers().get(1) {
            Some(&bool_op @ (Modifier::And | Modifier::Or | Modifier::Xor)) => {
                Some((bool_op, self.predicate(&operands[3])?))
            }
            _ => None,
        };
        let mut function = None;
        op.code = match ty {
            Type::F32 if !instruction.has(Modifier::Ftz) => Code::SetpF32,
            Type::U32 | Type::B32 => Code::SetpU32,
            Type::S32 => Code::SetpS32,
            Type::U64 | Type::B64 => Code::SetpU64,
            Type::S64 => Code::SetpS64,
            // Narrow unsigned numbers are held with zeros above them.
            Type::U16 | Type::B16 => Code::SetpU32,
            _ => {
                function = Some(
                    scalar::order(ty, instruction.has(Modifier::Ftz)).ok_or_else(|| format!("{ty} is not compared"))?,
                );
                Code::SetpOther
            }
        };
        op.aux = self.program.comparisons.len() as u32;
        self.program.comparisons.push(Comparison { compare, function, wide: width == Width::Wide, combine, other });
        Ok(())
    }

    fn arithmetic(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        use Code::*;
        // `isspacep` has no type: it looks at an address.
        let address = (instruction.opcode() == Opcode::Isspacep).then_some(Type::U64);
        let ty = instruction.ty().or(address).ok_or("an instruction without a type")?;
        if ty == Type::Pred {
            let operands = instruction.operands();
            op.d = self.destination_predicate(&operands[0])?;
            op.a = self.predicate(&operands[1])?;
            if let Some(operand) = operands.get(2) {
                op.b = self.predicate(operand)?;
            }
            op.code = match instruction.opcode() {
                Opcode::And => PredicateAnd,
                Opcode::Or => PredicateOr,
                Opcode::Xor => PredicateXor,
                Opcode::Not => PredicateNot,
                _ => return Err("not an operation on predicates".into()),
            };
            return Ok(());
        }

        let mut sources: Vec<Placed> = Vec::new();
        let mut destination = None;
        for (slot, operand) in instruction.slots() {
            let rule = match slot.kind {
                Kind::Value(rule) | Kind::Movable(rule) => rule,
                Kind::Predicate if slot.role == Role::Use => {
                    sources.push((self.predicate(operand)?, Width::Predicate));
                    continue;
                }
                Kind::Predicate => {
                    destination = Some((self.destination_predicate(operand)?, Width::Predicate));
                    continue;
                }
                Kind::Integer => {
                    sources.push(self.source(operand, Type::B64)?);
                    continue;
                }
                _ => return Err("an operand the interpreter has no code for".into()),
            };
            let operand_ty = instruction.resolve(rule).ok_or("an operand without a type")?;
            match slot.role {
                Role::Def => destination = Some(self.destination(operand, operand_ty)?),
                Role::Use => sources.push(self.source(operand, operand_ty)?),
                Role::Both => return Err("accumulators have no code here".into()),
            }
        }
        let destination = destination.ok_or("an instruction without a result")?;
        op.d = destination.0;
        let place = |index: usize| sources.get(index).map_or(0, |source| source.0);
        (op.a, op.b, op.c) = (place(0), place(1), place(2));

        let plain = |allowed: &[Modifier]| {
            instruction.modifiers().iter().all(|modifier| modifier.as_type().is_some() || allowed.contains(modifier))
        };
        let nearest = plain(&[Modifier::Rn]);
        let widths_fit = |width: Width| {
            destination.1 == width && sources.iter().all(|source| source.1 == width || source.1 == Width::Predicate)
        };
        let narrow = widths_fit(Width::Narrow);
        let wide = widths_fit(Width::Wide);
        let lo = plain(&[Modifier::Lo]);
        let two = instruction.types().nth(1);
        use Type as T;
        let fast = match (instruction.opcode(), ty) {
            _ if instruction.types().count() > 1 && instruction.opcode() != Opcode::Cvt => None,
            (Opcode::Fma | Opcode::Mad, T::F32) if nearest => Some(FmaF32),
            (Opcode::Add, T::F32) if nearest => Some(AddF32),
            (Opcode::Sub, T::F32) if nearest => Some(SubF32),
            (Opcode::Mul, T::F32) if nearest => Some(MulF32),
            (Opcode::Max | Opcode::Min, _) if sources.len() > 2 => None,
            (Opcode::Max, T::F32) if plain(&[]) => Some(MaxF32),
            (Opcode::Min, T::F32) if plain(&[]) => Some(MinF32),
            (Opcode::Neg, T::F32) if plain(&[]) => Some(NegF32),
            (Opcode::Abs, T::F32) if plain(&[]) => Some(AbsF32),
            (Opcode::Ex2, T::F32) if plain(&[Modifier::Approx]) => Some(Ex2F32),
            (Opcode::Ex2, T::F32) => Some(Ex2FtzF32),
            (Opcode::Rcp, T::F32) if plain(&[Modifier::Approx, Modifier::Rn]) => Some(RcpF32),
            (Opcode::Div, T::F32) if plain(&[Modifier::Approx, Modifier::Full, Modifier::Rn]) => Some(DivF32),
            (Opcode::Add, T::U32 | T::S32) if narrow && plain(&[]) => Some(Add32),
            (Opcode::Sub, T::U32 | T::S32) if narrow && plain(&[]) => Some(Sub32),
            (Opcode::Mul, T::U32 | T::S32) if narrow && lo => Some(Mul32),
            (Opcode::Mad, T::U32 | T::S32) if narrow && lo => Some(Mad32),
            (Opcode::And, T::B32 | T::B16) if narrow => Some(And32),
            (Opcode::Or, T::B32 | T::B16) if narrow => Some(Or32),
            (Opcode::Xor, T::B32 | T::B16) if narrow => Some(Xor32),
            (Opcode::Shl, T::B32) if narrow => Some(Shl32),
            (Opcode::Shr, T::B32 | T::U32) if narrow => Some(ShrU32),
            (Opcode::Shr, T::S32) if narrow => Some(ShrS32),
            (Opcode::Min, T::U32) if narrow => Some(MinU32),
            (Opcode::Max, T::U32) if narrow => Some(MaxU32),
            (Opcode::Min, T::S32) if narrow && plain(&[]) => Some(MinS32),
            (Opcode::Max, T::S32) if narrow && plain(&[]) => Some(MaxS32),
            (Opcode::Add, T::U64 | T::S64) if wide => Some(Add64),
            (Opcode::Sub, T::U64 | T::S64) if wide => Some(Sub64),
            (Opcode::Mul, T::U64 | T::S64) if wide && lo => Some(Mul64),
            (Opcode::Mad, T::U64 | T::S64) if wide && lo => Some(Mad64),
            (Opcode::And, T::B64) if wide => Some(And64),
            (Opcode::Or, T::B64) if wide => Some(Or64),
            (Opcode::Xor, T::B64) if wide => Some(Xor64),
            (Opcode::Shl, T::B64) if sources[0].1 == Width::Wide => Some(Shl64),
            (Opcode::Shr, T::B64 | T::U64) if sources[0].1 == Width::Wide => Some(ShrU64),
            (Opcode::Mul, T::U32) if instruction.has(Modifier::Wide) => Some(MulWideU),
            (Opcode::Mul, T::S32) if instruction.has(Modifier::Wide) => Some(MulWideS),
            (Opcode::Mad, T::U32) if instruction.has(Modifier::Wide) => Some(MadWideU),
            (Opcode::Mad, T::S32) if instruction.has(Modifier::Wide) => Some(MadWideS),
            (Opcode::Selp, _) if narrow => Some(Selp32),
            (Opcode::Selp, _) if wide => Some(Selp64),
            (Opcode::Cvt, T::U64 | T::S64) if two == Some(T::U32) && plain(&[]) => Some(ZeroExtend),
            (Opcode::Cvt, T::U64 | T::S64) if two == Some(T::S32) && plain(&[]) => Some(SignExtend),
            (Opcode::Cvt, T::U32 | T::S32)
                if matches!(two, Some(T::U64 | T::S64)) && destination.1 == Width::Narrow && plain(&[]) =>
            {
                Some(Truncate)
            }
            (Opcode::Cvt, T::F32) if two == Some(T::F16) && plain(&[]) => Some(F16ToF32),
            (Opcode::Cvt, T::F16) if two == Some(T::F32) && nearest => Some(F32ToF16),
            (Opcode::Cvt, T::Bf16) if two == Some(T::F32) && nearest => Some(F32ToBf16),
            (Opcode::Cvt, T::F16x2) if two == Some(T::F32) && nearest => Some(F32ToF16x2),
            (Opcode::Cvt, T::Bf16x2) if two == Some(T::F32) && nearest => Some(F32ToBf16x2),
            _ => None,
        };
        if let Some(code) = fast {
            op.code = code;
            return Ok(());
        }
        let function = scalar::function(instruction)?;
        let mut padded = [(0, Width::Narrow); 4];
        if sources.len() > padded.len() {
            return Err("too many operands".into());
        }
        padded[..sources.len()].copy_from_slice(&sources);
        op.code = Scalar;
        op.aux = self.program.scalars.len() as u32;
        self.program.scalars.push(ScalarOp { function, sources: padded, destination: destination.1 });
        Ok(())
    }

    /// Where an address counts from: a register, or nothing, and the constant part.
    fn address(&mut self, operand: &Operand) -> Decoded<(Option<(u32, bool)>, i64)> {
        let Operand::Memory(address) = operand else { return Err("an address was expected".into()) };
        Ok(match address.base {
            Base::Register(register) => match self.register(register)? {
                (place, Width::Wide) => (Some((place, true)), address.offset),
                (place, Width::Narrow) => (Some((place, false)), address.offset),
                _ => return Err("a predicate is not an address".into()),
            },
            Base::Variable(variable) => {
                (None, (self.variables[variable.0 as usize] as i64).wrapping_add(address.offset))
            }
            Base::Absolute => (None, address.offset),
            Base::Parameter(parameter) => {
                (None, ((PARAM_WINDOW + self.param_offsets[parameter.0 as usize]) as i64).wrapping_add(address.offset))
            }
        })
    }

    fn memory(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let ty = instruction.ty().ok_or("a memory access without a type")?;
        let opcode = instruction.opcode();
        let operands = instruction.operands();
        if [Modifier::Async, Modifier::Bulk].iter().any(|&m| instruction.has(m)) {
            return Err("asynchronous stores have no code here".into());
        }
        let space = |names: &[Modifier]| names.iter().any(|&name| instruction.has(name));
        let in_params = space(&[Modifier::Param, Modifier::ParamEntry, Modifier::ParamFunc]);
        // What is handed to functions and back lies in local memory.
        let of_function = in_params
            && operands.iter().any(
                |operand| matches!(operand, Operand::Memory(address) if matches!(address.base, Base::Variable(_))),
            );
        let by_name = |operand: &Operand| matches!(operand, Operand::Memory(address) if matches!(address.base, Base::Parameter(_)));
        let of_kernel = in_params && !of_function;
        if of_kernel
            && opcode == Opcode::Ld
            && by_name(&operands[1])
            && matches!(operands[0], Operand::Register(_))
            && ty != Type::B128
        {
            return self.load_parameter(instruction, op);
        }
        let (address, values) = match opcode {
            Opcode::Ld => (&operands[1], &operands[..1]),
            Opcode::Atom => (&operands[1], &operands[..1]),
            _ => (&operands[0], &operands[1..2]),
        };
        let shared = space(&[Modifier::Shared, Modifier::SharedCta]);
        let local = instruction.has(Modifier::Local) || of_function;
        let constant = instruction.has(Modifier::Const);
        let cluster = instruction.has(Modifier::SharedCluster);
        let (base, offset) = self.address(address)?;
        // Addresses of parameters are generic ones, but for those in 32 bits.
        let generic = of_kernel && !matches!(base, Some((_, false)));
        let offset = if generic { offset.wrapping_sub(PARAM_WINDOW as i64) } else { offset };
        let elements = match &values[0] {
            Operand::Vector(elements) => elements.as_slice(),
            single => std::slice::from_ref(single),
        };
        let whole = ty == Type::B128 && matches!(opcode, Opcode::Ld | Opcode::St);
        if ty.bits() > 64 && !whole {
            return Err(format!("{ty} values are not held"));
        }
        // A value of 128 bits is two of 64.
        let (bytes, count) = if whole { (8, 2) } else { (ty.bytes(), elements.len() as u32) };
        if bytes * count > 32 {
            return Err("a lane accesses at most 32 bytes at once".into());
        }
        let mut registers = Vec::with_capacity(elements.len());
        if whole {
            registers.extend(self.halves(&values[0], opcode == Opcode::Ld)?.map(|place| Some((place, true))));
        }
        for element in elements.iter().filter(|_| !whole) {
            registers.push(match element {
                Operand::Sink => None,
                element if opcode == Opcode::St || opcode == Opcode::Red => {
                    let (place, width) = self.source(element, ty)?;
                    Some((place, width == Width::Wide))
                }
                element => {
                    let (place, width) = self.destination(element, ty)?;
                    Some((place, width == Width::Wide))
                }
            });
        }
        let mut atomic = None;
        if matches!(opcode, Opcode::Atom | Opcode::Red) {
            let first = if opcode == Opcode::Atom { 2 } else { 1 };
            let second = if instruction.has(Modifier::Cas) { first + 1 } else { first };
            let mut pairs = Vec::with_capacity(elements.len());
            for index in 0..elements.len() {
                let mut pair = [(0, false); 2];
                for (place, operand) in pair.iter_mut().zip([first, second]) {
                    let operand = match operands.get(operand) {
                        Some(Operand::Vector(values)) => values.get(index),
                        single => single,
                    };
                    let (at, width) = self.source(operand.ok_or("an operand is missing")?, ty)?;
                    *place = (at, width == Width::Wide);
                }
                pairs.push(pair);
            }
            atomic = Some(Atomic { update: scalar::atomic(instruction)?, operands: pairs });
            if opcode == Opcode::Red {
                registers = vec![None; elements.len()];
            }
        }
        if cluster {
            op.d = u32::from(opcode == Opcode::St);
        }
        op.code = match (opcode, shared, local, constant) {
            _ if cluster => Code::Cluster,
            (Opcode::Ld, true, ..) => Code::LoadShared,
            (Opcode::St, true, ..) => Code::StoreShared,
            (Opcode::Atom | Opcode::Red, true, ..) => Code::AtomicShared,
            (Opcode::Ld, _, true, _) => Code::LoadLocal,
            (Opcode::St, _, true, _) => Code::StoreLocal,
            (Opcode::Ld, ..) if of_kernel => Code::LoadParameter,
            (..) if of_kernel => return Err("parameters of the kernel cannot be written".into()),
            (Opcode::Ld, _, _, true) => Code::LoadConstant,
            (Opcode::Ld, ..) => Code::LoadGlobal,
            (Opcode::St, ..) => Code::StoreGlobal,
            _ => Code::AtomicGlobal,
        };
        let generic = !shared && !cluster && !local && !constant && !instruction.has(Modifier::Global);
        op.aux = self.program.memory.len() as u32;
        self.program.memory.push(MemoryOp {
            base,
            offset,
            bytes,
            elements: count,
            registers,
            extend: if ty.is_signed() { Extend::Sign } else { Extend::Zero },
            generic,
            merged: self.merged(bytes * count),
            atomic,
            source: None,
            take: None,
            position: self.position,
        });
        Ok(())
    }

    /// Parameters are constants of the launch: loading one is a move.
    fn load_parameter(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let ty = instruction.ty().ok_or("ld.param without a type")?;
        let [Operand::Register(to), Operand::Memory(address)] = instruction.operands() else {
            return Err("ld.param loads one value by the parameter's name".into());
        };
        let Base::Parameter(parameter) = address.base else {
            return Err("ld.param loads by the parameter's name".into());
        };
        let start = (self.param_offsets[parameter.0 as usize] as i64).saturating_add(address.offset);
        let bytes = usize::try_from(start)
            .ok()
            .and_then(|start| self.program.params.get(start..start.checked_add(ty.bytes() as usize)?));
        let bytes = bytes.ok_or("it reads outside parameter memory")?;
        let mut value = number(bytes);
        let (place, width) = self.register(*to)?;
        if ty.is_signed() && ty.bits() < 64 {
            value = ((value << (64 - ty.bits())) as i64 >> (64 - ty.bits())) as u64;
        }
        if width == Width::Narrow {
            value &= u64::from(u32::MAX);
        }
        op.d = place;
        op.a = self.constant(value, width);
        op.code = if width == Width::Wide { Code::Mov64 } else { Code::Mov32 };
        Ok(())
    }

    fn copy(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let operands = instruction.operands();
        if instruction.has(Modifier::Bulk) || instruction.has(Modifier::Mbarrier) {
            return Err("bulk copies have no code here".into());
        }
        if instruction.has(Modifier::CommitGroup) {
            op.code = Code::CopyCommit;
            return Ok(());
        }
        if instruction.has(Modifier::WaitGroup) || instruction.has(Modifier::WaitAll) {
            op.code = Code::CopyWait;
            // How many groups may stay in flight; `wait_all` also waits for copies that no group holds yet.
            op.aux = match operands.first() {
                Some(Operand::Integer(groups)) => u32::try_from(*groups).map_err(|_| "a negative number of groups")?,
                _ => 0,
            };
            op.a = u32::from(instruction.has(Modifier::WaitAll));
            return Ok(());
        }
        let [to, from, Operand::Integer(bytes), rest @ ..] = operands else {
            return Err("cp.async needs a size".into());
        };
        let allowed: &[i64] = if instruction.has(Modifier::Cg) { &[16] } else { &[4, 8, 16] };
        if !allowed.contains(bytes) {
            return Err(format!("cp.async copies {allowed:?} bytes, not {bytes}"));
        }
        let (base, offset) = self.address(to)?;
        let source = self.address(from)?;
        let take = match rest.first() {
            Some(_) if instruction.has(Modifier::L2CacheHint) => return Err("cache hints have no code here".into()),
            Some(operand) => Some(self.source(operand, Type::U32)?.0),
            None => None,
        };
        op.code = Code::CopyAsync;
        op.aux = self.program.memory.len() as u32;
        self.program.memory.push(MemoryOp {
            base,
            offset,
            bytes: *bytes as u32,
            elements: 1,
            registers: Vec::new(),
            extend: Extend::Zero,
            generic: false,
            merged: self.merged(*bytes as u32),
            atomic: None,
            source: Some(source),
            take,
            position: self.position,
        });
        Ok(())
    }

    fn barrier(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let operands = instruction.operands();
        if instruction.has(Modifier::Cluster) {
            return Err("clusters have no code here".into());
        }
        if instruction.has(Modifier::Warp) {
            op.code = Code::WarpSync;
            op.a = self.source(&operands[0], Type::U32)?.0;
            return Ok(());
        }
        let mut reduce = None;
        let mut counts = operands;
        if instruction.has(Modifier::Red) {
            op.code = Code::BarrierReduce;
            let (last, rest) = operands.split_last().ok_or("bar.red needs a predicate")?;
            let mode = *instruction
                .modifiers()
                .iter()
                .find(|m| matches!(m, Modifier::Popc | Modifier::And | Modifier::Or))
                .ok_or("bar.red needs a mode")?;
            reduce = Some((mode, self.predicate(last)?));
            op.d = if mode == Modifier::Popc {
                self.destination(&rest[0], Type::U32)?.0
            } else {
                self.destination_predicate(&rest[0])?
            };
            counts = &rest[1..];
        } else {
            op.code = if instruction.has(Modifier::Arrive) { Code::BarrierArrive } else { Code::BarrierSync };
        }
        let id = self.source(&counts[0], Type::U32)?.0;
        let threads = match counts.get(1) {
            Some(operand) => Some(self.source(operand, Type::U32)?.0),
            None => None,
        };
        // `bar` is `barrier.aligned`.
        let aligned = instruction.opcode() == Opcode::Bar || instruction.has(Modifier::Aligned);
        op.aux = self.program.barriers.len() as u32;
        self.program.barriers.push(BarrierOp { id, threads, aligned, reduce });
        Ok(())
    }

    fn warp_op(&mut self, instruction: &Instruction, op: &mut Op) -> Decoded<()> {
        let operands = instruction.operands();
        if instruction.opcode() == Opcode::Activemask {
            op.code = Code::ActiveMask;
            op.d = self.destination(&operands[0], Type::B32)?.0;
            return Ok(());
        }
        let mode = instruction.modifiers()[1];
        let mut info = WarpOp { mode, members: 0, clamp: 0, in_range: None };
        if instruction.opcode() == Opcode::Shfl {
            op.code = Code::Shuffle;
            op.d = self.destination(&operands[0], Type::B32)?.0;
            if let Operand::RegisterPair(_, Some(predicate)) = &operands[0] {
                info.in_range = Some(self.predicate_place(*predicate)?);
            }
            op.a = self.source(&operands[1], Type::B32)?.0;
            op.b = self.source(&operands[2], Type::U32)?.0;
            info.clamp = self.source(&operands[3], Type::U32)?.0;
            info.members = self.source(&operands[4], Type::U32)?.0;
        } else {
            op.code = Code::Vote;
            op.d = if mode == Modifier::Ballot {
                self.destination(&operands[0], Type::B32)?.0
            } else {
                self.destination_predicate(&operands[0])?
            };
            op.a = self.predicate(&operands[1])?;
            info.members = self.source(&operands[2], Type::U32)?.0;
        }
        op.aux = self.program.warp_ops.len() as u32;
        self.program.warp_ops.push(info);
        Ok(())
    }
}
