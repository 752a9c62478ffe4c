//! The typed builder: how kernels are written in Rust.
//!
//! A register has a type ([`Reg<F32>`](Reg)), a wrong operand type does not compile, and what is emitted is always a row of
//! the instruction table. Each operation has two forms: `k.fma(a, b, c)` allocates its result, `k.fma_to(d, a, b, c)`
//! writes a register that exists. Registers are mutable on purpose: an accumulator is updated in place.
//!
//! ```
//! use ptx::{Compare, F32, Global, KernelBuilder, Pointer, U32, U64};
//!
//! let mut k = KernelBuilder::new("scale", "sm_75".parse()?);
//! let x = k.pointer_param("x", 4);
//! let factor = k.param::<F32>("factor");
//! let n = k.param::<U32>("n");
//! let thread = k.tid_x();
//! let inside = k.setp(Compare::Lt, thread, n);
//! k.if_(inside, |k| {
//!     let place = k.mad_wide(thread, 4, x);
//!     let place = Pointer::<Global>::at(place);
//!     let value = k.ld::<F32, _>(place);
//!     let value = k.mul(value, factor);
//!     k.st(place, value);
//! });
//! println!("{}", k.finish()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Registers are declared in four untyped banks (`%p`, `%h`, `%r`, `%rd`), so [`Reg::cast`] between types of one width
//! costs no instruction. Every emitting call records its caller as the instruction's location. In a function that emits
//! on behalf of its caller, put `#[track_caller]` and wrap the body in [`KernelBuilder::at`]: what is recorded is then
//! the line that called it.
//!
//! The first thing that goes wrong is kept and returned by [`KernelBuilder::finish`]; no call panics.

pub(crate) mod tensor;

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic;

use crate::{
    Address, Bank, Base, Guard, Instruction, Kernel, KernelError, Label, Location, LocationId, Modifier, Opcode,
    Operand, Parameter, ParameterDecl, Pointee, Register, Space, Special, Statement, Target, Type, Variable,
    VariableDecl, Version,
};

/// The lanes of a full warp, as the mask that `shfl`, `vote` and `bar.warp` take.
const FULL_WARP: i64 = 0xffff_ffff;

/// What a register may hold.
pub trait Scalar: Copy + 'static {
    /// What the type is to the instruction table.
    const TYPE: Type;
    /// The untyped type of the same width: what moves, loads and stores work on.
    type Bits: Scalar;
}

/// A type with `add`, `sub` and `mul`.
pub trait Number: Scalar {
    /// What stands before the type in `add` and `sub`.
    const ADD: &'static [Modifier];
    /// What stands before the type in `mul` and `mad`.
    const MUL: &'static [Modifier];
}

/// A signed or unsigned integer.
pub trait Integer: Number {}

/// A floating-point type, packed ones included.
pub trait Float: Number {}

/// An integer whose product has a type of twice the width.
pub trait Widens: Integer {
    /// That type.
    type Wide: Integer;
}

/// A type that `setp` and `selp` work on.
pub trait Comparable: Scalar {}

/// A type of 32 bits: what lanes exchange.
pub trait Word: Scalar<Bits = B32> {}

/// Types that `cvt` converts to `To`.
pub trait Convert<To: Scalar>: Scalar {
    /// The rounding, where there is one.
    const ROUNDING: &'static [Modifier];
}

macro_rules! scalars {
    ($($name:ident $bits:ident $doc:literal),+ $(,)?) => {$(
        #[doc = $doc]
        #[derive(Clone, Copy, Debug)]
        pub enum $name {}

        impl Scalar for $name {
            const TYPE: Type = Type::$name;
            type Bits = $bits;
        }
    )+};
}

scalars! {
    Pred Pred "A predicate.",
    B16 B16 "16 bits.", B32 B32 "32 bits.", B64 B64 "64 bits.",
    U16 B16 "An unsigned 16-bit integer.", U32 B32 "An unsigned 32-bit integer.", U64 B64 "An unsigned 64-bit integer.",
    S16 B16 "A signed 16-bit integer.", S32 B32 "A signed 32-bit integer.", S64 B64 "A signed 64-bit integer.",
    F16 B16 "IEEE 754 binary16.", F16x2 B32 "Two binary16, the first in the lower half.",
    Bf16 B16 "bfloat16.", Bf16x2 B32 "Two bfloat16, the first in the lower half.",
    E4m3x2 B16 "Two 8-bit numbers of 4 exponent bits, the first in the lower byte.",
    F32 B32 "IEEE 754 binary32.", F64 B64 "IEEE 754 binary64.",
}

macro_rules! mark {
    ($($type:ident)+ : Number $add:expr, $mul:expr) => {
        $(impl Number for $type { const ADD: &'static [Modifier] = &$add; const MUL: &'static [Modifier] = &$mul; })+
    };
    ($($type:ident)+ : $($mark:ident)+) => { mark!(@each [$($type)+] $($mark)+); };
    (@each $types:tt $($mark:ident)+) => { $(mark!(@one $mark $types);)+ };
    (@one $mark:ident [$($type:ident)+]) => { $(impl $mark for $type {})+ };
}

mark!(U16 S16 U32 S32 U64 S64: Number [], [Modifier::Lo]);
mark!(F16 F16x2 Bf16 Bf16x2 F32 F64: Number [Modifier::Rn], [Modifier::Rn]);
mark!(U16 S16 U32 S32 U64 S64: Integer Comparable);
mark!(F16 F16x2 Bf16 Bf16x2 F32 F64: Float);
mark!(B16 B32 B64 F32 F64: Comparable);
mark!(B32 U32 S32 F32 F16x2 Bf16x2: Word);

macro_rules! widens {
    ($($narrow:ident $wide:ident),+) => { $(impl Widens for $narrow { type Wide = $wide; })+ };
}
widens!(U16 U32, S16 S32, U32 U64, S32 S64);

macro_rules! converts {
    ($([$($from:ident)+] to [$($to:ident)+]: $rounding:expr;)+) => { $(converts!(@from [$($from)+] [$($to)+] $rounding);)+ };
    (@from [$($from:ident)+] $to:tt $rounding:expr) => { $(converts!(@to $from $to $rounding);)+ };
    (@to $from:ident [$($to:ident)+] $rounding:expr) => {
        $(impl Convert<$to> for $from { const ROUNDING: &'static [Modifier] = &$rounding; })+
    };
}
converts! {
    [U16 S16] to [U32 S32 U64 S64]: [];
    [U32 S32] to [U16 S16 U64 S64]: [];
    [U64 S64] to [U16 S16 U32 S32]: [];
    [U16 S16 U32 S32 U64 S64] to [F16 F32 F64]: [Modifier::Rn];
    [F16 F32 F64] to [U16 S16 U32 S32 U64 S64]: [Modifier::Rzi];
    [F16] to [F32 F64]: [];
    [F32] to [F64]: [];
    [F32] to [F16 Bf16]: [Modifier::Rn];
    [F64] to [F16 F32]: [Modifier::Rn];
}

/// A register that holds a `T`.
pub struct Reg<T> {
    register: Register,
    holds: PhantomData<T>,
}

impl<T> Clone for Reg<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Reg<T> {}

impl<T> fmt::Debug for Reg<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reg({}:{})", self.register.bank, self.register.index)
    }
}

impl<T: Scalar> Reg<T> {
    fn new(register: Register) -> Self {
        Self { register, holds: PhantomData }
    }

    /// The same register, its bits read as another type of the same width.
    pub fn cast<U: Scalar<Bits = T::Bits>>(self) -> Reg<U> {
        Reg::new(self.register)
    }

    /// The same register without a type.
    pub fn bits(self) -> Reg<T::Bits> {
        Reg::new(self.register)
    }
}

/// What an instruction reads: a register or a constant.
pub struct Src<T> {
    operand: Operand,
    holds: PhantomData<T>,
}

impl<T> Src<T> {
    fn new(operand: Operand) -> Self {
        Self { operand, holds: PhantomData }
    }
}

impl<T> From<Reg<T>> for Src<T> {
    fn from(reg: Reg<T>) -> Self {
        Self::new(Operand::Register(reg.register))
    }
}

macro_rules! constants {
    ($($type:ident $value:ty),+ $(,)?) => {
        $(impl From<$value> for Src<$type> {
            fn from(value: $value) -> Self {
                Self::new(Operand::Integer(i64::from(value)))
            }
        })+
    };
}
constants!(U16 u16, U32 u32, S16 i16, S32 i32, S64 i64, B16 u16, B32 u32);

impl From<u64> for Src<U64> {
    fn from(value: u64) -> Self {
        Self::new(Operand::Integer(value as i64))
    }
}

impl From<u64> for Src<B64> {
    fn from(value: u64) -> Self {
        Self::new(Operand::Integer(value as i64))
    }
}

impl From<f32> for Src<F32> {
    fn from(value: f32) -> Self {
        Self::new(Operand::F32(value.to_bits()))
    }
}

impl From<f64> for Src<F64> {
    fn from(value: f64) -> Self {
        Self::new(Operand::F64(value.to_bits()))
    }
}

/// A predicate or its negation (`!p`).
#[derive(Clone, Copy, Debug)]
pub struct Condition {
    predicate: Reg<Pred>,
    negated: bool,
}

impl Condition {
    fn operand(self) -> Operand {
        let register = self.predicate.register;
        if self.negated { Operand::NotPredicate(register) } else { Operand::Register(register) }
    }

    fn guard(self) -> Guard {
        Guard { predicate: self.predicate.register, negated: self.negated }
    }
}

impl From<Reg<Pred>> for Condition {
    fn from(predicate: Reg<Pred>) -> Self {
        Self { predicate, negated: false }
    }
}

impl std::ops::Not for Reg<Pred> {
    type Output = Condition;

    fn not(self) -> Condition {
        Condition { predicate: self, negated: true }
    }
}

impl std::ops::Not for Condition {
    type Output = Condition;

    fn not(self) -> Condition {
        Condition { negated: !self.negated, ..self }
    }
}

/// How `setp` compares. On floating-point numbers, a comparison with a NaN is false unless it says unordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Equal.
    Eq,
    /// Not equal; false on a NaN.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
    /// Not equal, or one of them is a NaN.
    Neu,
    /// Greater or equal, or one of them is a NaN.
    Geu,
}

impl Compare {
    fn modifier(self) -> Modifier {
        match self {
            Self::Eq => Modifier::Eq,
            Self::Ne => Modifier::Ne,
            Self::Lt => Modifier::Lt,
            Self::Le => Modifier::Le,
            Self::Gt => Modifier::Gt,
            Self::Ge => Modifier::Ge,
            Self::Neu => Modifier::Neu,
            Self::Geu => Modifier::Geu,
        }
    }
}

/// A state space that loads and stores name.
pub trait StateSpace: Copy + 'static {
    /// Its modifier.
    const MODIFIER: Modifier;
    /// The integer its addresses are.
    type Address: Integer;
}

macro_rules! spaces {
    ($($name:ident $address:ident $doc:literal),+) => {$(
        #[doc = $doc]
        #[derive(Clone, Copy, Debug)]
        pub enum $name {}

        impl StateSpace for $name {
            const MODIFIER: Modifier = Modifier::$name;
            type Address = $address;
        }
    )+};
}
spaces!(
    Global U64 "Memory of the device.", Shared U32 "Memory of the CTA.",
    SharedCluster U32 "Shared memory of the CTAs of a cluster.", Local U32 "Memory of the thread."
);

/// A place in a state space: a register, a variable or nothing, plus a constant offset in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pointer<S> {
    address: Address,
    space: PhantomData<S>,
}

impl<S: StateSpace> Pointer<S> {
    /// Where the register points.
    pub fn at(register: Reg<S::Address>) -> Self {
        Self::new(Base::Register(register.register))
    }

    fn new(base: Base) -> Self {
        Self { address: Address { base, offset: 0 }, space: PhantomData }
    }

    /// So many bytes further; no instruction.
    pub fn offset(self, bytes: i64) -> Self {
        let Address { base, offset } = self.address;
        Self { address: Address { base, offset: offset.wrapping_add(bytes) }, ..self }
    }
}

const BANKS: [(&str, Type); 4] = [("%p", Type::Pred), ("%h", Type::B16), ("%r", Type::B32), ("%rd", Type::B64)];

fn bank_of(ty: Type) -> u32 {
    match ty.bits() {
        1 => 0,
        16 => 1,
        32 => 2,
        _ => 3,
    }
}

/// Writes a kernel. See the [module](self).
#[derive(Debug)]
pub struct KernelBuilder {
    kernel: Kernel,
    counts: [u32; BANKS.len()],
    guard: Option<Guard>,
    caller: Option<&'static panic::Location<'static>>,
    locations: HashMap<(&'static str, u32, u32), LocationId>,
    error: Option<KernelError>,
}

impl KernelBuilder {
    /// An empty kernel.
    pub fn new(name: impl Into<String>, target: Target) -> Self {
        let (major, minor) = target.min_ptx_version();
        let kernel = Kernel::new(name, target, Version { major, minor });
        Self { kernel, counts: [0; BANKS.len()], guard: None, caller: None, locations: HashMap::new(), error: None }
    }

    /// What the kernel is compiled for.
    pub fn target(&self) -> Target {
        self.kernel.target
    }

    /// The block the kernel must be launched with (`.reqntid`).
    pub fn require_block(&mut self, threads: [u32; 3]) {
        self.kernel.required_block = Some(threads);
    }

    /// The cluster the kernel must be launched with (`.reqnctapercluster`).
    pub fn require_cluster(&mut self, ctas: [u32; 3]) {
        self.kernel.required_cluster = Some(ctas);
    }

    /// The CTAs per SM that the assembler should leave registers for (`.minnctapersm`).
    pub fn min_ctas_per_sm(&mut self, ctas: u32) {
        self.kernel.min_ctas_per_sm = Some(ctas);
    }

    /// The kernel, ended by a `ret`, in the lowest PTX version that has all it uses.
    ///
    /// # Errors
    /// The first instruction that could not be emitted, or what [`Kernel::validate`] finds.
    #[track_caller]
    pub fn finish(mut self) -> Result<Kernel, KernelError> {
        if !self.kernel.body.last().is_some_and(
            |last| matches!(last, Statement::Instruction(i) if i.opcode() == Opcode::Ret && i.guard.is_none()),
        ) {
            self.ret();
        }
        if let Some(error) = self.error {
            return Err(error);
        }
        let needed = self.kernel.instructions().map(|instruction| instruction.form().min_ptx).max();
        self.kernel.version = self.kernel.version.max(needed.unwrap_or(self.kernel.version));
        self.kernel.banks = BANKS
            .iter()
            .zip(self.counts)
            .map(|((prefix, ty), count)| Bank { prefix: (*prefix).into(), ty: *ty, count: Some(count.max(1)) })
            .collect();
        self.number_labels();
        self.kernel.validate()?;
        Ok(self.kernel)
    }

    /// Renames labels to their order in the body, which is the order a parser meets them in. Those not placed come last.
    fn number_labels(&mut self) {
        let mut names = vec![None; self.kernel.labels.len()];
        let placed = self.kernel.body.iter().filter_map(|statement| match statement {
            Statement::Label(label) => Some(*label),
            _ => None,
        });
        let mut count = 0;
        for label in placed.chain((0..names.len() as u32).map(Label)) {
            if let Some(name @ None) = names.get_mut(label.0 as usize) {
                *name = Some(Label(count));
                count += 1;
            }
        }
        let rename = |label: Label| names.get(label.0 as usize).copied().flatten().unwrap_or(label);
        for statement in &mut self.kernel.body {
            match statement {
                Statement::Label(label) => *label = rename(*label),
                Statement::Instruction(instruction) => instruction.retarget(rename),
                Statement::Pragma(_) => {}
            }
        }
    }

    // ---- locations and guards

    /// Emits `body` on behalf of the line at `caller`: that line is recorded for all of it. Within another `at`, the outer line stays.
    pub fn at<R>(&mut self, caller: &'static panic::Location<'static>, body: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.caller;
        self.caller = outer.or(Some(caller));
        let result = body(self);
        self.caller = outer;
        result
    }

    /// Emits `body` under a guard: lanes where the condition does not hold do nothing. No branch; guards do not nest.
    ///
    /// A label within, so a branch or loop, is an error.
    pub fn when<R>(&mut self, condition: impl Into<Condition>, body: impl FnOnce(&mut Self) -> R) -> R {
        if self.guard.is_some() {
            self.fail(KernelError::Guarded { what: "guard" });
        }
        self.guard = Some(condition.into().guard());
        let result = body(self);
        self.guard = None;
        result
    }

    fn fail(&mut self, error: KernelError) {
        self.error.get_or_insert(error);
    }

    fn location(&mut self, caller: &'static panic::Location<'static>) -> LocationId {
        let Self { kernel, locations, .. } = self;
        *locations.entry((caller.file(), caller.line(), caller.column())).or_insert_with(|| {
            let file = kernel.files.iter().position(|file| file == caller.file()).unwrap_or_else(|| {
                kernel.files.push(caller.file().into());
                kernel.files.len() - 1
            });
            let (line, column) = (caller.line(), caller.column());
            kernel.locations.push(Location { file: file as u32, line, column, inlined_at: None });
            LocationId(kernel.locations.len() as u32 - 1)
        })
    }

    #[track_caller]
    fn emit(&mut self, opcode: Opcode, modifiers: &[&[Modifier]], operands: Vec<Operand>) {
        let caller = self.caller.unwrap_or(panic::Location::caller());
        match Instruction::new(opcode, modifiers.concat(), operands) {
            Ok(mut instruction) => {
                instruction.guard = self.guard;
                instruction.location = Some(self.location(caller));
                self.kernel.body.push(Statement::Instruction(instruction));
            }
            Err(error) => self.fail(error.into()),
        }
    }

    // ---- declarations

    /// A register with no value yet.
    pub fn reg<T: Scalar>(&mut self) -> Reg<T> {
        let bank = bank_of(T::TYPE);
        let count = &mut self.counts[bank as usize];
        *count += 1;
        Reg::new(Register { bank, index: *count - 1 })
    }

    /// Registers with no value yet.
    pub fn regs<T: Scalar>(&mut self, count: usize) -> Vec<Reg<T>> {
        (0..count).map(|_| self.reg()).collect()
    }

    fn declare_param(&mut self, name: &str, ty: Type, pointee: Option<Pointee>) -> Address {
        self.kernel.params.push(ParameterDecl { name: name.into(), ty, elements: None, align: None, pointee });
        Address { base: Base::Parameter(Parameter(self.kernel.params.len() as u32 - 1)), offset: 0 }
    }

    /// Declares the next parameter and loads it.
    #[track_caller]
    pub fn param<T: Number>(&mut self, name: &str) -> Reg<T> {
        let address = self.declare_param(name, T::TYPE, None);
        let d = self.reg::<T>();
        self.emit(
            Opcode::Ld,
            &[&[Modifier::Param, Modifier::Type(<T::Bits as Scalar>::TYPE)]],
            vec![d.register.into(), Operand::Memory(address)],
        );
        d
    }

    /// Declares the next parameter as a pointer to global memory, aligned to so many bytes, and loads it.
    #[track_caller]
    pub fn pointer_param(&mut self, name: &str, align: u32) -> Reg<U64> {
        let pointee = Pointee { space: Some(Space::Global), align };
        let address = self.declare_param(name, Type::U64, Some(pointee));
        let (generic, d) = (self.reg::<U64>(), self.reg::<U64>());
        let operands = vec![generic.register.into(), Operand::Memory(address)];
        self.emit(Opcode::Ld, &[&[Modifier::Param, Modifier::Type(Type::B64)]], operands);
        let operands = vec![d.register.into(), generic.register.into()];
        self.emit(Opcode::Cvta, &[&[Modifier::To, Modifier::Global, Modifier::Type(Type::U64)]], operands);
        d
    }

    fn variable(&mut self, name: &str, space: Space, align: u32, bytes: Option<u64>) -> Base {
        let external = bytes.is_none();
        self.kernel.variables.push(VariableDecl {
            name: name.into(),
            space,
            ty: Type::B8,
            align,
            elements: bytes,
            init: Vec::new(),
            external,
            module_level: external,
        });
        Base::Variable(Variable(self.kernel.variables.len() as u32 - 1))
    }

    /// A shared variable of so many bytes.
    pub fn shared(&mut self, name: &str, align: u32, bytes: u64) -> Pointer<Shared> {
        Pointer::new(self.variable(name, Space::Shared, align, Some(bytes)))
    }

    /// The dynamic shared memory, whose size the launch decides.
    pub fn dynamic_shared(&mut self, name: &str, align: u32) -> Pointer<Shared> {
        Pointer::new(self.variable(name, Space::Shared, align, None))
    }

    /// The address of a place as a number, to compute with.
    #[track_caller]
    pub fn address_of<S: StateSpace>(&mut self, place: Pointer<S>) -> Reg<S::Address> {
        let Address { base, offset } = place.address;
        let d = self.reg::<S::Address>();
        let ty = Modifier::Type(S::Address::TYPE);
        match base {
            Base::Variable(variable) => {
                self.emit(Opcode::Mov, &[&[ty]], vec![d.register.into(), Operand::VariableAddress(variable, offset)]);
            }
            Base::Parameter(parameter) => {
                self.emit(Opcode::Mov, &[&[ty]], vec![d.register.into(), Operand::ParameterAddress(parameter, offset)]);
            }
            Base::Register(register) => {
                let operands = vec![d.register.into(), register.into(), Operand::Integer(offset)];
                self.emit(Opcode::Add, &[&[ty]], operands);
            }
            Base::Absolute => {
                self.emit(Opcode::Mov, &[&[ty]], vec![d.register.into(), Operand::Integer(offset)]);
            }
        }
        d
    }

    // ---- memory

    /// Loads one value.
    #[track_caller]
    pub fn ld<T: Scalar, S: StateSpace>(&mut self, from: Pointer<S>) -> Reg<T> {
        let d = self.reg();
        self.ld_to(d, from);
        d
    }

    /// Loads one value into `d`.
    #[track_caller]
    pub fn ld_to<T: Scalar, S: StateSpace>(&mut self, d: Reg<T>, from: Pointer<S>) {
        self.ld_vec_to(&[d], from);
    }

    /// Loads 1, 2 or 4 neighbouring values at once; the place must be aligned to all of them.
    #[track_caller]
    pub fn ld_vec<T: Scalar, S: StateSpace>(&mut self, count: usize, from: Pointer<S>) -> Vec<Reg<T>> {
        let d = self.regs(count);
        self.ld_vec_to(&d, from);
        d
    }

    /// Loads 1, 2 or 4 neighbouring values into `d` at once; the place must be aligned to all of them.
    #[track_caller]
    pub fn ld_vec_to<T: Scalar, S: StateSpace>(&mut self, d: &[Reg<T>], from: Pointer<S>) {
        let (vector, value) = vector(d);
        let ty = Modifier::Type(<T::Bits as Scalar>::TYPE);
        self.emit(Opcode::Ld, &[&[S::MODIFIER], vector, &[ty]], vec![value, Operand::Memory(from.address)]);
    }

    /// Stores one value.
    #[track_caller]
    pub fn st<T: Scalar, S: StateSpace>(&mut self, to: Pointer<S>, value: Reg<T>) {
        self.st_vec(to, &[value]);
    }

    /// Stores 1, 2 or 4 values next to each other at once; the place must be aligned to all of them.
    #[track_caller]
    pub fn st_vec<T: Scalar, S: StateSpace>(&mut self, to: Pointer<S>, values: &[Reg<T>]) {
        let (vector, value) = vector(values);
        let ty = Modifier::Type(<T::Bits as Scalar>::TYPE);
        self.emit(Opcode::St, &[&[S::MODIFIER], vector, &[ty]], vec![Operand::Memory(to.address), value]);
    }

    // ---- comparison and selection

    /// `p = p1 and p2`.
    #[track_caller]
    pub fn and_p(&mut self, a: impl Into<Condition>, b: impl Into<Condition>) -> Reg<Pred> {
        let d = self.reg::<Pred>();
        let operands = vec![d.register.into(), a.into().operand(), b.into().operand()];
        self.emit(Opcode::And, &[&[Modifier::Type(Type::Pred)]], operands);
        d
    }

    /// `p = p1 or p2`.
    #[track_caller]
    pub fn or_p(&mut self, a: impl Into<Condition>, b: impl Into<Condition>) -> Reg<Pred> {
        let d = self.reg::<Pred>();
        let operands = vec![d.register.into(), a.into().operand(), b.into().operand()];
        self.emit(Opcode::Or, &[&[Modifier::Type(Type::Pred)]], operands);
        d
    }

    /// Whether `a` compares so to `b`.
    #[track_caller]
    pub fn setp<T: Comparable>(&mut self, compare: Compare, a: impl Into<Src<T>>, b: impl Into<Src<T>>) -> Reg<Pred> {
        let d = self.reg::<Pred>();
        let operands = vec![d.register.into(), a.into().operand, b.into().operand];
        self.emit(Opcode::Setp, &[&[compare.modifier(), Modifier::Type(T::TYPE)]], operands);
        d
    }

    /// Whether `a` compares so to `b` and the condition holds.
    #[track_caller]
    pub fn setp_and<T: Comparable>(
        &mut self,
        compare: Compare,
        a: impl Into<Src<T>>,
        b: impl Into<Src<T>>,
        condition: impl Into<Condition>,
    ) -> Reg<Pred> {
        let d = self.reg::<Pred>();
        let operands = vec![d.register.into(), a.into().operand, b.into().operand, condition.into().operand()];
        self.emit(Opcode::Setp, &[&[compare.modifier(), Modifier::And, Modifier::Type(T::TYPE)]], operands);
        d
    }

    /// Whether `a` compares so to `b` or the condition holds.
    #[track_caller]
    pub fn setp_or<T: Comparable>(
        &mut self,
        compare: Compare,
        a: impl Into<Src<T>>,
        b: impl Into<Src<T>>,
        condition: impl Into<Condition>,
    ) -> Reg<Pred> {
        let d = self.reg::<Pred>();
        let operands = vec![d.register.into(), a.into().operand, b.into().operand, condition.into().operand()];
        self.emit(Opcode::Setp, &[&[compare.modifier(), Modifier::Or, Modifier::Type(T::TYPE)]], operands);
        d
    }

    /// `a` where the condition holds, `b` elsewhere.
    #[track_caller]
    pub fn selp<T: Comparable>(
        &mut self,
        a: impl Into<Src<T>>,
        b: impl Into<Src<T>>,
        condition: impl Into<Condition>,
    ) -> Reg<T> {
        let d = self.reg();
        self.selp_to(d, a, b, condition);
        d
    }

    /// `a` where the condition holds, `b` elsewhere, into `d`.
    #[track_caller]
    pub fn selp_to<T: Comparable>(
        &mut self,
        d: Reg<T>,
        a: impl Into<Src<T>>,
        b: impl Into<Src<T>>,
        condition: impl Into<Condition>,
    ) {
        let Condition { predicate, negated } = condition.into();
        let (a, b) = (a.into().operand, b.into().operand);
        let (a, b) = if negated { (b, a) } else { (a, b) };
        let operands = vec![d.register.into(), a, b, predicate.register.into()];
        self.emit(Opcode::Selp, &[&[Modifier::Type(T::TYPE)]], operands);
    }

    /// A predicate that holds or does not.
    #[track_caller]
    pub fn mov_p(&mut self, value: bool) -> Reg<Pred> {
        let d = self.reg();
        self.mov_p_to(d, value);
        d
    }

    /// A predicate that holds or does not, into `d`.
    #[track_caller]
    pub fn mov_p_to(&mut self, d: Reg<Pred>, value: bool) {
        let compare = if value { Compare::Eq } else { Compare::Ne };
        let operands = vec![d.register.into(), Operand::Integer(0), Operand::Integer(0)];
        self.emit(Opcode::Setp, &[&[compare.modifier(), Modifier::Type(Type::S32)]], operands);
    }

    // ---- halves

    /// Two 16-bit values in one register, `low` in its lower half.
    #[track_caller]
    pub fn pack<T: Scalar<Bits = B16>>(&mut self, low: Reg<T>, high: Reg<T>) -> Reg<B32> {
        let d = self.reg::<B32>();
        self.pack_to(d, low, high);
        d
    }

    /// Two 16-bit values into `d`, `low` in its lower half.
    #[track_caller]
    pub fn pack_to<T: Scalar<Bits = B16>>(&mut self, d: Reg<B32>, low: Reg<T>, high: Reg<T>) {
        let halves = Operand::Vector(vec![low.register.into(), high.register.into()]);
        self.emit(Opcode::Mov, &[&[Modifier::Type(Type::B32)]], vec![d.register.into(), halves]);
    }

    /// The lower and the upper half of a register.
    #[track_caller]
    pub fn unpack<T: Scalar<Bits = B16>, W: Word>(&mut self, a: Reg<W>) -> [Reg<T>; 2] {
        let d = [self.reg::<T>(), self.reg::<T>()];
        let halves = Operand::Vector(vec![d[0].register.into(), d[1].register.into()]);
        self.emit(Opcode::Mov, &[&[Modifier::Type(Type::B32)]], vec![halves, a.register.into()]);
        d
    }

    // ---- special registers

    /// Reads a special register of 32 bits.
    #[track_caller]
    pub fn special(&mut self, special: Special) -> Reg<U32> {
        let d = self.reg::<U32>();
        self.emit(Opcode::Mov, &[&[Modifier::Type(Type::U32)]], vec![d.register.into(), Operand::Special(special)]);
        d
    }

    /// The thread's x position in its CTA.
    #[track_caller]
    pub fn tid_x(&mut self) -> Reg<U32> {
        self.special(Special::TidX)
    }

    /// The CTA's x position in the grid.
    #[track_caller]
    pub fn ctaid_x(&mut self) -> Reg<U32> {
        self.special(Special::CtaidX)
    }

    // ---- exchange and synchronisation

    /// The value of `a` in the lane whose number differs in the bits of `lane_mask`.
    #[track_caller]
    pub fn shfl_bfly<T: Word>(&mut self, a: Reg<T>, lane_mask: u32) -> Reg<T> {
        self.shfl(Modifier::Bfly, a, lane_mask.into())
    }

    /// The value of `a` in the given lane.
    #[track_caller]
    pub fn shfl_idx<T: Word>(&mut self, a: Reg<T>, lane: impl Into<Src<U32>>) -> Reg<T> {
        self.shfl(Modifier::Idx, a, lane.into())
    }

    #[track_caller]
    fn shfl<T: Word>(&mut self, mode: Modifier, a: Reg<T>, b: Src<U32>) -> Reg<T> {
        let d = self.reg::<T>();
        let (clamp, lanes) = (Operand::Integer(31), Operand::Integer(FULL_WARP));
        let operands = vec![d.register.into(), a.register.into(), b.operand, clamp, lanes];
        self.emit(Opcode::Shfl, &[&[Modifier::Sync, mode, Modifier::Type(Type::B32)]], operands);
        d
    }

    /// Whether the condition holds in some lane of the warp.
    #[track_caller]
    pub fn vote_any(&mut self, condition: impl Into<Condition>) -> Reg<Pred> {
        self.vote(Modifier::Any, condition.into())
    }

    /// Whether the condition holds in every lane of the warp.
    #[track_caller]
    pub fn vote_all(&mut self, condition: impl Into<Condition>) -> Reg<Pred> {
        self.vote(Modifier::All, condition.into())
    }

    #[track_caller]
    fn vote(&mut self, mode: Modifier, condition: Condition) -> Reg<Pred> {
        let d = self.reg::<Pred>();
        let operands = vec![d.register.into(), condition.operand(), Operand::Integer(FULL_WARP)];
        self.emit(Opcode::Vote, &[&[Modifier::Sync, mode, Modifier::Type(Type::Pred)]], operands);
        d
    }

    /// The lanes in which the condition holds, lane 0 in the lowest bit.
    #[track_caller]
    pub fn ballot(&mut self, condition: impl Into<Condition>) -> Reg<B32> {
        let d = self.reg::<B32>();
        let operands = vec![d.register.into(), condition.into().operand(), Operand::Integer(FULL_WARP)];
        self.emit(Opcode::Vote, &[&[Modifier::Sync, Modifier::Ballot, Modifier::Type(Type::B32)]], operands);
        d
    }

    /// Waits for every thread of the CTA at barrier `id`.
    #[track_caller]
    pub fn bar_sync(&mut self, id: u32) {
        self.emit(Opcode::Bar, &[&[Modifier::Sync]], vec![Operand::Integer(id.into())]);
    }

    /// Waits at barrier `id` until `threads` threads are there.
    #[track_caller]
    pub fn bar_sync_count(&mut self, id: impl Into<Src<U32>>, threads: u32) {
        let operands = vec![id.into().operand, Operand::Integer(threads.into())];
        self.emit(Opcode::Bar, &[&[Modifier::Sync]], operands);
    }

    /// Waits for every lane of the warp, and makes what they wrote visible to each other.
    #[track_caller]
    pub fn bar_warp_sync(&mut self) {
        self.emit(Opcode::Bar, &[&[Modifier::Warp, Modifier::Sync]], vec![Operand::Integer(FULL_WARP)]);
    }

    // ---- control flow

    /// A new label, not placed yet.
    pub fn label(&mut self) -> Label {
        self.kernel.labels.push(format!("$L{}", self.kernel.labels.len()));
        Label(self.kernel.labels.len() as u32 - 1)
    }

    /// Places a label here.
    pub fn place(&mut self, label: Label) {
        if self.guard.is_some() {
            self.fail(KernelError::Guarded { what: "label" });
        }
        self.kernel.body.push(Statement::Label(label));
    }

    /// Goes to a label.
    #[track_caller]
    pub fn bra(&mut self, label: Label) {
        self.emit(Opcode::Bra, &[], vec![Operand::Label(label)]);
    }

    /// Goes to a label where the condition holds.
    #[track_caller]
    pub fn bra_if(&mut self, condition: impl Into<Condition>, label: Label) {
        let caller = panic::Location::caller();
        self.when(condition, |k| k.at(caller, |k| k.bra(label)));
    }

    /// Ends the thread.
    #[track_caller]
    pub fn ret(&mut self) {
        self.emit(Opcode::Ret, &[], Vec::new());
    }

    /// Emits `body` as a branch that lanes take where the condition holds.
    #[track_caller]
    pub fn if_(&mut self, condition: impl Into<Condition>, body: impl FnOnce(&mut Self)) {
        let end = self.label();
        self.bra_if(!condition.into(), end);
        body(self);
        self.place(end);
    }

    /// Emits two branches, for lanes where the condition holds and where it does not.
    #[track_caller]
    pub fn if_else(
        &mut self,
        condition: impl Into<Condition>,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        let (other, end) = (self.label(), self.label());
        self.bra_if(!condition.into(), other);
        then(self);
        self.bra(end);
        self.place(other);
        otherwise(self);
        self.place(end);
    }

    /// Repeats `body` as long as the condition that `test` computes holds.
    #[track_caller]
    pub fn while_<C: Into<Condition>>(&mut self, test: impl FnOnce(&mut Self) -> C, body: impl FnOnce(&mut Self)) {
        let (head, end) = (self.label(), self.label());
        self.place(head);
        let condition = test(self).into();
        self.bra_if(!condition, end);
        body(self);
        self.bra(head);
        self.place(end);
    }

    /// Repeats `body` with a register that runs from `start` (included) to `end` (excluded) in steps of `step`.
    ///
    /// To unroll, write a Rust `for`.
    #[track_caller]
    pub fn for_range<T: Integer + Comparable>(
        &mut self,
        start: impl Into<Src<T>>,
        end: impl Into<Src<T>>,
        step: impl Into<Src<T>>,
        body: impl FnOnce(&mut Self, Reg<T>),
    ) {
        let (end, step) = (end.into(), step.into());
        let (head, exit) = (self.label(), self.label());
        let i = self.mov(start);
        let done = self.setp::<T>(Compare::Ge, i, Src::new(end.operand.clone()));
        self.bra_if(done, exit);
        self.place(head);
        body(self, i);
        self.add_to(i, i, step);
        let more = self.setp::<T>(Compare::Lt, i, end);
        self.bra_if(more, head);
        self.place(exit);
    }
}

fn vector<T: Scalar>(registers: &[Reg<T>]) -> (&'static [Modifier], Operand) {
    let elements = || Operand::Vector(registers.iter().map(|reg| reg.register.into()).collect());
    match registers {
        [one] => (&[], one.register.into()),
        [_, _] => (&[Modifier::V2], elements()),
        _ => (&[Modifier::V4], elements()),
    }
}

/// Operations that read values and write one: each in the form that allocates its result and the form that is given it.
macro_rules! operations {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $name_to:ident <$($generic:ident: $bound:path),*> ($($arg:ident: $ty:ty),*) -> $result:ty
            = $opcode:ident [$($modifiers:expr),*];
    )+) => {
        impl KernelBuilder {$(
            $(#[doc = $doc])+
            #[track_caller]
            pub fn $name<$($generic: $bound),*>(&mut self, $($arg: impl Into<Src<$ty>>),*) -> Reg<$result> {
                let d = self.reg();
                self.$name_to(d, $($arg),*);
                d
            }

            $(#[doc = $doc])+
            #[doc = "The result goes to `d`."]
            #[track_caller]
            pub fn $name_to<$($generic: $bound),*>(&mut self, d: Reg<$result>, $($arg: impl Into<Src<$ty>>),*) {
                let operands = vec![d.register.into(), $($arg.into().operand),*];
                self.emit(Opcode::$opcode, &[$($modifiers),*], operands);
            }
        )+}
    };
}

const fn ty<T: Scalar>() -> Modifier {
    Modifier::Type(T::TYPE)
}

const fn bits<T: Scalar>() -> Modifier {
    Modifier::Type(<T::Bits as Scalar>::TYPE)
}

operations! {
    /// Moves.
    mov mov_to<T: Scalar>(a: T) -> T = Mov [&[bits::<T>()]];
    /// `a + b`; floating-point sums are rounded to nearest and not fused.
    add add_to<T: Number>(a: T, b: T) -> T = Add [T::ADD, &[ty::<T>()]];
    /// `a - b`; floating-point differences are rounded to nearest and not fused.
    sub sub_to<T: Number>(a: T, b: T) -> T = Sub [T::ADD, &[ty::<T>()]];
    /// `a * b`; of integers the lower half, of floating-point numbers rounded to nearest and not fused.
    mul mul_to<T: Number>(a: T, b: T) -> T = Mul [T::MUL, &[ty::<T>()]];
    /// The upper half of `a * b`.
    mul_hi mul_hi_to<T: Integer>(a: T, b: T) -> T = Mul [&[Modifier::Hi, ty::<T>()]];
    /// `a * b` in twice the width.
    mul_wide mul_wide_to<T: Widens>(a: T, b: T) -> T::Wide = Mul [&[Modifier::Wide, ty::<T>()]];
    /// The lower half of `a * b`, plus `c`.
    mad mad_to<T: Integer>(a: T, b: T, c: T) -> T = Mad [&[Modifier::Lo, ty::<T>()]];
    /// `a * b + c` in twice the width.
    mad_wide mad_wide_to<T: Widens>(a: T, b: T, c: T::Wide) -> T::Wide = Mad [&[Modifier::Wide, ty::<T>()]];
    /// `a * b + c`, rounded once.
    fma fma_to<T: Float>(a: T, b: T, c: T) -> T = Fma [&[Modifier::Rn, ty::<T>()]];
    /// `a / b` of integers.
    div div_to<T: Integer>(a: T, b: T) -> T = Div [&[ty::<T>()]];
    /// The remainder of `a / b`.
    rem rem_to<T: Integer>(a: T, b: T) -> T = Rem [&[ty::<T>()]];
    /// `a / b` within 2 units in the last place, for any `b`.
    div_full div_full_to<>(a: F32, b: F32) -> F32 = Div [&[Modifier::Full, ty::<F32>()]];
    /// `a / b`, rounded to nearest.
    div_rn div_rn_to<>(a: F32, b: F32) -> F32 = Div [&[Modifier::Rn, ty::<F32>()]];
    /// The smaller; of a number and a NaN, the number.
    min min_to<T: Number>(a: T, b: T) -> T = Min [&[ty::<T>()]];
    /// The larger; of a number and a NaN, the number.
    max max_to<T: Number>(a: T, b: T) -> T = Max [&[ty::<T>()]];
    /// `-a`.
    neg neg_to<T: Number>(a: T) -> T = Neg [&[ty::<T>()]];
    /// `1 / a`, rounded to nearest.
    rcp rcp_to<>(a: F32) -> F32 = Rcp [&[Modifier::Rn, ty::<F32>()]];
    /// `1 / a` within 1 unit in the last place.
    rcp_approx rcp_approx_to<>(a: F32) -> F32 = Rcp [&[Modifier::Approx, ty::<F32>()]];
    /// `2^a` within 2 units in the last place; subnormal inputs and results are 0.
    ex2 ex2_to<>(a: F32) -> F32 = Ex2 [&[Modifier::Approx, Modifier::Ftz, ty::<F32>()]];
    /// The logarithm to base 2, approximately.
    lg2 lg2_to<>(a: F32) -> F32 = Lg2 [&[Modifier::Approx, ty::<F32>()]];
    /// Bits of both.
    and and_to<T: Scalar>(a: T, b: T) -> T = And [&[bits::<T>()]];
    /// Bits of either.
    or or_to<T: Scalar>(a: T, b: T) -> T = Or [&[bits::<T>()]];
    /// Bits of one but not the other.
    xor xor_to<T: Scalar>(a: T, b: T) -> T = Xor [&[bits::<T>()]];
    /// The other bits.
    not not_to<T: Scalar>(a: T) -> T = Not [&[bits::<T>()]];
    /// `a` shifted left by `b` bits.
    shl shl_to<T: Scalar>(a: T, b: U32) -> T = Shl [&[bits::<T>()]];
    /// `a` shifted right by `b` bits; a signed integer keeps its sign.
    shr shr_to<T: Integer>(a: T, b: U32) -> T = Shr [&[ty::<T>()]];
    /// Bytes of `a` (0 to 3) and `b` (4 to 7) as the four nibbles of `selector` choose them, the lowest first.
    prmt prmt_to<W: Word>(a: W, b: W, selector: B32) -> W = Prmt [&[ty::<B32>()]];
    /// Converts `From` to `To`: to nearest, or to an integer toward zero.
    cvt cvt_to<To: Scalar, From: Convert<To>>(a: From) -> To = Cvt [From::ROUNDING, &[ty::<To>(), ty::<From>()]];
    /// Two f32 rounded to f16, `low` in the lower half (sm_80).
    cvt_f16x2 cvt_f16x2_to<>(high: F32, low: F32) -> F16x2 = Cvt [&[Modifier::Rn, ty::<F16x2>(), ty::<F32>()]];
    /// An f32 rounded to tf32, ties away from zero (sm_80).
    cvt_tf32 cvt_tf32_to<>(a: F32) -> B32 = Cvt [&[Modifier::Rna, Modifier::Type(Type::Tf32), ty::<F32>()]];
    /// Two f32 rounded to bf16, `low` in the lower half (sm_80).
    cvt_bf16x2 cvt_bf16x2_to<>(high: F32, low: F32) -> Bf16x2 = Cvt [&[Modifier::Rn, ty::<Bf16x2>(), ty::<F32>()]];
    /// Two f32 rounded to e4m3, `low` in the lower byte; beyond 448 they are 448 (sm_89).
    cvt_e4m3x2 cvt_e4m3x2_to<>(high: F32, low: F32) -> E4m3x2 =
        Cvt [&[Modifier::Rn, Modifier::Satfinite, ty::<E4m3x2>(), ty::<F32>()]];
    /// Two e4m3 as f16, which has them all (sm_89).
    cvt_f16x2_e4m3x2 cvt_f16x2_e4m3x2_to<>(a: E4m3x2) -> F16x2 = Cvt [&[Modifier::Rn, ty::<F16x2>(), ty::<E4m3x2>()]];
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> KernelBuilder {
        KernelBuilder::new("k", arch::Sm::Sm75.into())
    }

    #[test]
    fn instructions_name_the_line_that_emitted_them() {
        let mut k = builder();
        let x = k.mov::<F32>(1.0);
        let line = line!() + 1;
        twice(&mut k, x);
        let kernel = k.finish().unwrap();
        let lines: Vec<_> = kernel.instructions().map(|i| kernel.user_location(i).unwrap().line).collect();
        assert_eq!(&lines[..3], [line - 2, line, line]);
        assert_eq!(kernel.files, [file!()]);
    }

    #[track_caller]
    fn twice(k: &mut KernelBuilder, x: Reg<F32>) {
        k.at(panic::Location::caller(), |k| {
            for _ in 0..2 {
                k.add_to(x, x, x);
            }
        });
    }

    #[test]
    fn a_register_read_as_another_type_costs_nothing() {
        let mut k = builder();
        let x = k.mov::<F32>(1.0);
        let sign = k.and(x.cast::<U32>(), 0x8000_0000);
        let _ = k.setp(Compare::Ne, sign, 0);
        assert_eq!(k.finish().unwrap().instructions().count(), 4, "mov, and, setp, ret");
    }

    #[test]
    fn the_first_error_is_returned() {
        let mut k = builder();
        let x = k.regs::<F32>(3);
        let place = k.shared("s", 16, 64);
        k.st_vec(place, &x);
        let p = k.reg::<Pred>();
        k.when(p, |k| k.place(Label(0)));
        assert!(matches!(k.finish(), Err(KernelError::Instruction(_))));
    }

    #[test]
    fn a_target_without_the_form_is_refused() {
        let mut k = builder();
        let x = k.mov::<F32>(1.0);
        k.cvt_f16x2(x, x);
        let error = k.finish().unwrap_err().to_string();
        assert_eq!(error, "`cvt.rn.f16x2.f32 %r1, %r0, %r0` needs sm_80 or later, the kernel is for sm_75");
    }

    #[test]
    fn printed_kernels_parse_back() {
        let mut k = builder();
        let (x, n) = (k.pointer_param("x", 16), k.param::<U32>("n"));
        let memory = k.dynamic_shared("memory", 16);
        let base = k.address_of(memory.offset(16));
        let total = k.mov::<F32>(0.0);
        k.for_range::<U32>(0, n, 4, |k, i| {
            let place = k.mad_wide(i, 4, x);
            let values = k.ld_vec::<F32, _>(4, Pointer::<Global>::at(place).offset(-16));
            k.st_vec(Pointer::<Shared>::at(base), &values);
            let negative = k.setp(Compare::Lt, values[0], 0.0);
            k.when(!negative, |k| k.add_to(total, total, values[1]));
            k.if_else(negative, |k| k.bar_sync_count(1, 32), |k| k.bar_warp_sync());
        });
        k.while_(|k| k.setp(Compare::Gt, total, 1.0), |k| k.mul_to(total, total, 0.5));
        let kernel = k.finish().unwrap();
        assert_eq!(crate::parse(&kernel.to_string()).unwrap(), vec![kernel]);
    }
}
