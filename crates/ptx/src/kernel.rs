//! A kernel as a value: declarations and a body.

use std::fmt;
use std::ops::Range;

use thiserror::Error;

use crate::{
    Base, FunctionId, Instruction, InstructionError, Kind, Label, LocationId, Operand, Parameter, Register, Type,
    Variable,
};

/// A version of the PTX language, as in `.version 8.7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Before the point.
    pub major: u8,
    /// After the point.
    pub minor: u8,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Registers declared together: `.reg .b32 %r<32>;`, or one of them, `.reg .pred done;`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bank {
    /// The name before the number, percent sign included; the whole name of a single register.
    pub prefix: String,
    /// What each of them holds.
    pub ty: Type,
    /// How many there are; `None` for a single register without a number.
    pub count: Option<u32>,
}

/// Where a variable lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Memory of the CTA.
    Shared,
    /// Memory of the device.
    Global,
    /// Read-only memory of the module.
    Const,
    /// Memory of one thread.
    Local,
    /// What is handed to a function and back.
    Param,
}

impl Space {
    /// The directive, as `.shared`.
    pub const fn directive(self) -> &'static str {
        match self {
            Self::Shared => ".shared",
            Self::Global => ".global",
            Self::Const => ".const",
            Self::Local => ".local",
            Self::Param => ".param",
        }
    }
}

/// A variable outside registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableDecl {
    /// Its name.
    pub name: String,
    /// Where it lives.
    pub space: Space,
    /// The type of an element.
    pub ty: Type,
    /// In bytes, a power of two.
    pub align: u32,
    /// How many elements; `None` is `name[]`, whose size the launch decides (dynamic shared memory).
    pub elements: Option<u64>,
    /// The bytes it starts with, from its beginning; what is not given is zero (`.global`, `.const`) or undefined.
    pub init: Vec<u8>,
    /// Declared with `.extern`.
    pub external: bool,
    /// Declared outside the kernel's braces.
    pub module_level: bool,
}

impl VariableDecl {
    /// The size in bytes; 0 where the launch decides.
    pub fn bytes(&self) -> u64 {
        self.elements.unwrap_or(0).saturating_mul(u64::from(self.ty.bytes()))
    }
}

/// What a pointer parameter promises, `.ptr .global .align 16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointee {
    /// Where it points, when that is said.
    pub space: Option<Space>,
    /// The alignment of what it points to, in bytes.
    pub align: u32,
}

/// A kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterDecl {
    /// Its name.
    pub name: String,
    /// The type of an element.
    pub ty: Type,
    /// `Some(n)` for `.b8 name[n]`.
    pub elements: Option<u64>,
    /// In bytes, when given; otherwise the type's size.
    pub align: Option<u32>,
    /// For pointers that say what they point to.
    pub pointee: Option<Pointee>,
}

impl ParameterDecl {
    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.elements.unwrap_or(1).saturating_mul(u64::from(self.ty.bytes()))
    }

    /// The alignment in bytes.
    pub fn alignment(&self) -> u32 {
        self.align.unwrap_or(self.ty.bytes()).max(1)
    }
}

/// A place in a source file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// An index into [`Kernel::files`].
    pub file: u32,
    /// Counted from 1; 0 when unknown.
    pub line: u32,
    /// Counted from 1; 0 when unknown.
    pub column: u32,
    /// Where the function this line belongs to was inlined, when it was.
    pub inlined_at: Option<LocationId>,
}

/// One element of a kernel's body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// A position that branches may go to.
    Label(Label),
    /// Something to execute.
    Instruction(Instruction),
    /// `.pragma "nounroll";`: advice to the assembler at this position.
    Pragma(String),
}

/// What a function takes or gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Formal {
    /// In a register: the only one of its bank.
    Register(Register),
    /// In parameter space.
    Variable(Variable),
}

/// A function that a kernel calls (PTX ISA, section 7). Its registers, variables and labels are in the kernel's lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// What it gives back.
    pub results: Vec<Formal>,
    /// What it takes.
    pub params: Vec<Formal>,
    /// Declared with `.noreturn`.
    pub no_return: bool,
    /// The banks of [`Kernel::banks`] that are declared in it.
    pub banks: Range<u32>,
    /// The variables of [`Kernel::variables`] that are declared in it; those of the module among them are not.
    pub variables: Range<u32>,
    /// The code; `None` for a function of another module, or of the driver.
    pub body: Option<Vec<Statement>>,
}

/// A kernel: what the driver compiles, the emulator executes and the lab reads.
///
/// Registers, labels, variables, parameters, files and locations are named by their index in the lists here.
/// [`Kernel::validate`] checks that every name in the body refers to something; both back ends ask it first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The entry's name.
    pub name: String,
    /// What it is compiled for.
    pub target: arch::Target,
    /// The language version it is written in.
    pub version: Version,
    /// In the order of the launch's arguments.
    pub params: Vec<ParameterDecl>,
    /// `.reqntid`: the block it must be launched with.
    pub required_block: Option<[u32; 3]>,
    /// `.maxntid`: the largest block it may be launched with.
    pub max_block: Option<[u32; 3]>,
    /// `.minnctapersm`: the CTAs per SM the assembler should leave room for.
    pub min_ctas_per_sm: Option<u32>,
    /// `.maxnreg`: the registers per thread the assembler may use.
    pub max_registers: Option<u32>,
    /// `.reqnctapercluster`: the cluster it must be launched with.
    pub required_cluster: Option<[u32; 3]>,
    /// `.explicitcluster`: it must be launched with clusters.
    pub explicit_cluster: bool,
    /// `.maxclusterrank`: the most CTAs its clusters may have.
    pub max_cluster_rank: Option<u32>,
    /// `.blocksareclusters`: the grid of a launch counts clusters.
    pub blocks_are_clusters: bool,
    /// Advice to the assembler about all of it.
    pub pragmas: Vec<String>,
    /// Declared registers.
    pub banks: Vec<Bank>,
    /// Variables in shared, global, constant and local memory.
    pub variables: Vec<VariableDecl>,
    /// Label names.
    pub labels: Vec<String>,
    /// Source files that locations name; the number of `.file` is the index plus one.
    pub files: Vec<String>,
    /// Source places that instructions name.
    pub locations: Vec<Location>,
    /// The code.
    pub body: Vec<Statement>,
    /// The functions it calls, and those that these call.
    pub functions: Vec<Function>,
}

/// What is wrong with a kernel as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum KernelError {
    #[error(transparent)]
    Instruction(#[from] InstructionError),
    #[error("a {what} stands in a guarded part of the kernel, where only single instructions can")]
    Guarded { what: &'static str },
    #[error("`{instruction}`: register {bank}:{index} was never declared")]
    UndeclaredRegister { instruction: String, bank: u32, index: u32 },
    #[error("`{instruction}`: `{register}` holds {found} but the instruction works on {expected}")]
    RegisterType { instruction: String, register: String, found: Type, expected: Type },
    #[error("`{instruction}` names a {what} the kernel does not have")]
    DanglingName { instruction: String, what: &'static str },
    #[error("label `{label}` stands {times} times in the body; a label stands exactly once")]
    LabelPlaced { label: String, times: usize },
    #[error(
        "`{instruction}` hands over {arguments} value(s) and takes {results}; `{function}` has {parameters} parameter(s) and {returned} result(s)"
    )]
    Call { instruction: String, function: String, arguments: usize, results: usize, parameters: usize, returned: usize },
    #[error("`{name}` does not end in an instruction that leaves it, as code before or behind functions must")]
    Unended { name: String },
    #[error("`{instruction}` needs sm_{min_sm} or later, the kernel is for {target}")]
    Architecture { instruction: String, min_sm: u32, target: String },
    #[error("`{instruction}` is a form of {} alone, the kernel is for {target}", list(.allowed))]
    Target { instruction: String, allowed: Vec<arch::Target>, target: arch::Target },
    #[error("`{instruction}` needs PTX {needed} or later, the kernel is written in {found}")]
    LanguageVersion { instruction: String, needed: Version, found: Version },
}

/// Whether code may run off its end.
pub(crate) fn goes_on(body: &[Statement]) -> bool {
    match body.iter().rfind(|statement| !matches!(statement, Statement::Pragma(_))) {
        Some(Statement::Instruction(last)) => {
            !last.ends_block() || last.guard.is_some() || last.opcode() == crate::Opcode::Call
        }
        _ => true,
    }
}

fn list(targets: &[arch::Target]) -> String {
    targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl Kernel {
    /// A kernel without anything in it.
    pub fn new(name: impl Into<String>, target: arch::Target, version: Version) -> Self {
        Self {
            name: name.into(),
            target,
            version,
            params: Vec::new(),
            required_block: None,
            max_block: None,
            min_ctas_per_sm: None,
            max_registers: None,
            required_cluster: None,
            explicit_cluster: false,
            max_cluster_rank: None,
            blocks_are_clusters: false,
            pragmas: Vec::new(),
            banks: Vec::new(),
            variables: Vec::new(),
            labels: Vec::new(),
            files: Vec::new(),
            locations: Vec::new(),
            body: Vec::new(),
            functions: Vec::new(),
        }
    }

    /// The instructions in order, labels left out: the kernel's own, then those of each function. Their positions here are what
    /// counters and analyses index by.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.statements().filter_map(|statement| match statement {
            Statement::Instruction(instruction) => Some(instruction),
            _ => None,
        })
    }

    /// The statements of the kernel, then of each function.
    pub fn statements(&self) -> impl Iterator<Item = &Statement> {
        self.bodies().flatten()
    }

    /// As [`Kernel::statements`], to be changed.
    pub fn statements_mut(&mut self) -> impl Iterator<Item = &mut Statement> {
        self.body.iter_mut().chain(self.functions.iter_mut().filter_map(|function| function.body.as_mut()).flatten())
    }

    /// The code of the kernel, then of each function that has any.
    pub(crate) fn bodies(&self) -> impl Iterator<Item = &Vec<Statement>> {
        std::iter::once(&self.body).chain(self.functions.iter().filter_map(|function| function.body.as_ref()))
    }

    /// The bytes a load is said to need, one bit each, for each position that says so: `.pragma "used_bytes_mask 0xF"` before a
    /// load keeps the assembler from making it another (PTX ISA, section 11.3).
    pub fn used_bytes(&self) -> Vec<(usize, u32)> {
        let mut position = 0;
        let mut found = Vec::new();
        for statement in self.statements() {
            match statement {
                Statement::Instruction(_) => position += 1,
                Statement::Pragma(text) => {
                    let mask = text.strip_prefix("used_bytes_mask").and_then(|mask| {
                        let mask = mask.trim();
                        match mask.strip_prefix("0x") {
                            Some(digits) => u32::from_str_radix(digits, 16).ok(),
                            None => mask.parse().ok(),
                        }
                    });
                    found.extend(mask.map(|mask| (position, mask)));
                }
                Statement::Label(_) => {}
            }
        }
        found
    }

    /// The name of a register, as `%r17`; `None` if it was not declared.
    pub fn register_name(&self, register: Register) -> Option<String> {
        let bank = self.banks.get(register.bank as usize)?;
        match bank.count {
            Some(count) if register.index < count => Some(format!("{}{}", bank.prefix, register.index)),
            None if register.index == 0 => Some(bank.prefix.clone()),
            _ => None,
        }
    }

    /// What a register holds.
    pub fn register_type(&self, register: Register) -> Option<Type> {
        self.register_name(register)?;
        Some(self.banks[register.bank as usize].ty)
    }

    /// The source place of an instruction that a user would want to see: the outermost call site that has a line.
    pub fn user_location(&self, instruction: &Instruction) -> Option<&Location> {
        let mut seen = None;
        let mut next = instruction.location;
        // A chain cannot be longer than the list it runs through: a hostile one that loops ends here.
        for _ in 0..=self.locations.len() {
            let Some(location) = next.and_then(|id| self.locations.get(id.0 as usize)) else { break };
            if location.line != 0 {
                seen = Some(location);
            }
            next = location.inlined_at;
        }
        seen
    }

    /// Bytes of shared memory the kernel declares itself, dynamic memory not included, each variable at its alignment.
    pub fn static_shared_bytes(&self) -> u64 {
        self.variables.iter().filter(|v| v.space == Space::Shared).fold(0u64, |end, variable| {
            let align = u64::from(variable.align.max(1));
            end.div_ceil(align).saturating_mul(align).saturating_add(variable.bytes())
        })
    }

    /// Checks that every name refers to something, that registers are of the width their instruction works in, that labels
    /// stand exactly once and that the target and language version have every form used.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), KernelError> {
        let mut placed = vec![0usize; self.labels.len()];
        for statement in self.statements() {
            match statement {
                Statement::Label(label) => match placed.get_mut(label.0 as usize) {
                    Some(times) => *times += 1,
                    None => return Err(KernelError::DanglingName { instruction: "a label".into(), what: "label" }),
                },
                Statement::Instruction(instruction) => self.validate_instruction(instruction)?,
                Statement::Pragma(_) => {}
            }
        }
        self.validate_functions()?;
        let mut wanted = vec![false; self.labels.len()];
        for label in self.instructions().flat_map(Instruction::targets) {
            wanted[label.0 as usize] = true;
        }
        match placed.iter().enumerate().find(|&(label, &times)| times > 1 || (times == 0 && wanted[label])) {
            Some((label, &times)) => Err(KernelError::LabelPlaced { label: self.labels[label].clone(), times }),
            None => Ok(()),
        }
    }

    fn validate_functions(&self) -> Result<(), KernelError> {
        if self.functions.is_empty() {
            return Ok(());
        }
        let names =
            std::iter::once(&self.name).chain(self.functions.iter().filter(|f| f.body.is_some()).map(|f| &f.name));
        if let Some((_, name)) = self.bodies().zip(names).find(|(body, _)| goes_on(body)) {
            return Err(KernelError::Unended { name: name.clone() });
        }
        let known = |formal: &Formal| match formal {
            Formal::Register(register) => self.register_type(*register).is_some(),
            Formal::Variable(variable) => (variable.0 as usize) < self.variables.len(),
        };
        match self.functions.iter().find(|f| !f.results.iter().chain(&f.params).all(known)) {
            Some(function) => {
                Err(KernelError::DanglingName { instruction: function.name.clone(), what: "register or variable" })
            }
            None => Ok(()),
        }
    }

    fn validate_call(&self, instruction: &Instruction, function: FunctionId) -> Result<(), KernelError> {
        let dangling =
            || KernelError::DanglingName { instruction: instruction.opcode().name().to_owned(), what: "function" };
        let function = self.functions.get(function.0 as usize).ok_or_else(dangling)?;
        let count = |operand: usize| match instruction.operands().get(operand) {
            Some(Operand::Arguments(values)) => values.len(),
            _ => 0,
        };
        let (results, arguments) = (count(0), count(2));
        if (results, arguments) == (function.results.len(), function.params.len()) {
            return Ok(());
        }
        Err(KernelError::Call {
            instruction: self.instruction_text(instruction),
            function: function.name.clone(),
            arguments,
            results,
            parameters: function.params.len(),
            returned: function.results.len(),
        })
    }

    fn validate_instruction(&self, instruction: &Instruction) -> Result<(), KernelError> {
        let text = || self.instruction_text(instruction);
        let form = instruction.form();
        if u32::from(self.target.sm().number()) < form.min_sm {
            return Err(KernelError::Architecture {
                instruction: text(),
                min_sm: form.min_sm,
                target: self.target.to_string(),
            });
        }
        if !form.is_on(self.target) {
            return Err(KernelError::Target {
                instruction: text(),
                allowed: form.targets.clone(),
                target: self.target,
            });
        }
        if self.version < form.min_ptx {
            return Err(KernelError::LanguageVersion {
                instruction: text(),
                needed: form.min_ptx,
                found: self.version,
            });
        }
        if let Some(guard) = instruction.guard {
            self.validate_register(instruction, guard.predicate, Type::Pred, false)?;
        }
        // Loads, stores and conversions may use a register wider than the type (PTX ISA, section 9.4.1).
        let wider = matches!(instruction.opcode(), crate::Opcode::Ld | crate::Opcode::St | crate::Opcode::Cvt);
        for (slot, operand) in instruction.slots() {
            self.validate_names(instruction, operand)?;
            match (slot.kind, operand) {
                (Kind::Memory | Kind::Tensor, Operand::Memory(address) | Operand::Tensor(address, _)) => {
                    if let Base::Register(register) = address.base {
                        self.validate_address(instruction, register)?;
                    }
                    if let Operand::Tensor(_, coordinates) = operand {
                        self.validate_values(instruction, coordinates, Type::B32, false)?;
                    }
                }
                (Kind::ValueOrPredicate(_), Operand::Register(register))
                    if self.declared(instruction, *register)? == Type::Pred => {}
                (Kind::ValueOrPredicate(_), Operand::NotPredicate(register)) => {
                    self.validate_register(instruction, *register, Type::Pred, false)?;
                }
                (Kind::Predicate | Kind::PredicatePair, operand) => {
                    let mut result = Ok(());
                    operand.for_each_register(&mut |register| {
                        if result.is_ok() {
                            result = self.validate_register(instruction, register, Type::Pred, false);
                        }
                    });
                    result?;
                }
                (Kind::ValueAndPredicate(rule, _), Operand::RegisterPair(value, predicate)) => {
                    if let (Some(value), Some(ty)) = (value, instruction.resolve(rule)) {
                        self.validate_register(instruction, *value, ty, false)?;
                    }
                    if let Some(predicate) = predicate {
                        self.validate_register(instruction, *predicate, Type::Pred, false)?;
                    }
                }
                (
                    Kind::Value(rule)
                    | Kind::Vector(rule)
                    | Kind::Movable(rule)
                    | Kind::Registers(rule, _)
                    | Kind::ValueOrPredicate(rule)
                    | Kind::ValueAndPredicate(rule, _),
                    operand,
                ) => {
                    let Some(mut ty) = instruction.resolve(rule) else { continue };
                    let elements = match operand {
                        Operand::Vector(elements) => {
                            if matches!(slot.kind, Kind::Movable(_)) {
                                // Packing: the elements share the width of the whole.
                                ty = match ty.bits() / elements.len().max(1) as u32 {
                                    8 => Type::B8,
                                    16 => Type::B16,
                                    32 => Type::B32,
                                    64 => Type::B64,
                                    _ => {
                                        return Err(KernelError::DanglingName {
                                            instruction: text(),
                                            what: "type for the elements",
                                        });
                                    }
                                };
                            }
                            elements.as_slice()
                        }
                        single => std::slice::from_ref(single),
                    };
                    self.validate_values(instruction, elements, ty, wider)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn validate_values(
        &self,
        instruction: &Instruction,
        values: &[Operand],
        ty: Type,
        wider: bool,
    ) -> Result<(), KernelError> {
        values.iter().try_for_each(|value| match value {
            Operand::Register(register) => self.validate_register(instruction, *register, ty, wider),
            _ => Ok(()),
        })
    }

    fn validate_names(&self, instruction: &Instruction, operand: &Operand) -> Result<(), KernelError> {
        let variable = |variable: Variable| (variable.0 as usize) < self.variables.len();
        let parameter = |parameter: Parameter| (parameter.0 as usize) < self.params.len();
        let (known, what) = match operand {
            Operand::Function(function) => return self.validate_call(instruction, *function),
            Operand::Arguments(values) => {
                for value in values {
                    self.validate_names(instruction, value)?;
                    if let Operand::Register(register) = value {
                        self.declared(instruction, *register)?;
                    }
                }
                (true, "")
            }
            Operand::Labels(labels) => (labels.iter().all(|label| (label.0 as usize) < self.labels.len()), "label"),
            Operand::Label(label) => ((label.0 as usize) < self.labels.len(), "label"),
            Operand::VariableAddress(v, _) => (variable(*v), "variable"),
            Operand::ParameterAddress(p, _) => (parameter(*p), "parameter"),
            Operand::Memory(address) | Operand::Tensor(address, _) => match address.base {
                Base::Variable(v) => (variable(v), "variable"),
                Base::Parameter(p) => (parameter(p), "parameter"),
                _ => (true, ""),
            },
            _ => (true, ""),
        };
        if known {
            Ok(())
        } else {
            Err(KernelError::DanglingName { instruction: instruction.opcode().name().to_owned(), what })
        }
    }

    fn declared(&self, instruction: &Instruction, register: Register) -> Result<Type, KernelError> {
        self.register_type(register).ok_or_else(|| KernelError::UndeclaredRegister {
            instruction: instruction.opcode().name().into(),
            bank: register.bank,
            index: register.index,
        })
    }

    fn validate_address(&self, instruction: &Instruction, register: Register) -> Result<(), KernelError> {
        let found = self.declared(instruction, register)?;
        if matches!(found.bits(), 32 | 64) {
            return Ok(());
        }
        Err(KernelError::RegisterType {
            instruction: self.instruction_text(instruction),
            register: self.register_name(register).unwrap_or_default(),
            found,
            expected: Type::B64,
        })
    }

    fn validate_register(
        &self,
        instruction: &Instruction,
        register: Register,
        expected: Type,
        wider: bool,
    ) -> Result<(), KernelError> {
        let found = self.declared(instruction, register)?;
        let same_kind = (found == Type::Pred) == (expected == Type::Pred);
        let width = found.bits() == expected.bits()
            || (wider && found.bits() > expected.bits())
            || (expected.bits() == 8 && found.bits() == 16);
        if same_kind && width {
            return Ok(());
        }
        Err(KernelError::RegisterType {
            instruction: self.instruction_text(instruction),
            register: self.register_name(register).unwrap_or_default(),
            found,
            expected,
        })
    }
}
