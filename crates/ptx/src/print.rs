//! Kernels as PTX text.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::ops::Range;

use crate::{
    Address, Bank, Base, Formal, Function, Instruction, Kernel, Kind, Label, Location, LocationId, Modifier, Operand,
    Register, Space, Statement, Type, Variable, VariableDecl,
};

impl fmt::Display for Kernel {
    /// A complete PTX module with this kernel in it. Nothing is checked: [`Kernel::validate`] does that.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, ".version {}\n.target {}\n.address_size 64\n", self.version, self.target)?;
        for (index, file) in self.files.iter().enumerate() {
            writeln!(f, ".file {} \"{}\"", index + 1, quotable(file))?;
        }
        for variable in self.variables.iter().filter(|v| v.module_level) {
            writeln!(f, "{}", declaration(variable))?;
        }
        self.print_functions(f)?;
        write!(f, "\n.visible .entry {}(", self.name)?;
        for (index, param) in self.params.iter().enumerate() {
            write!(f, "{}\n\t.param {}", if index == 0 { "" } else { "," }, align_before(param))?;
            write!(f, "{}", param.ty)?;
            if let Some(pointee) = param.pointee {
                write!(
                    f,
                    " .ptr{} .align {}",
                    pointee.space.map_or(String::new(), |s| format!(" {}", s.directive())),
                    pointee.align
                )?;
            }
            write!(f, " {}", param.name)?;
            if let Some(elements) = param.elements {
                write!(f, "[{elements}]")?;
            }
        }
        writeln!(f, "\n)")?;
        let triple = |[x, y, z]: [u32; 3]| format!("{x}, {y}, {z}");
        if let Some(block) = self.required_block {
            writeln!(f, ".reqntid {}", triple(block))?;
        }
        if let Some(block) = self.max_block {
            writeln!(f, ".maxntid {}", triple(block))?;
        }
        if let Some(ctas) = self.min_ctas_per_sm {
            writeln!(f, ".minnctapersm {ctas}")?;
        }
        if let Some(registers) = self.max_registers {
            writeln!(f, ".maxnreg {registers}")?;
        }
        if let Some(cluster) = self.required_cluster {
            writeln!(f, ".reqnctapercluster {}", triple(cluster))?;
        }
        if self.explicit_cluster {
            writeln!(f, ".explicitcluster")?;
        }
        if let Some(rank) = self.max_cluster_rank {
            writeln!(f, ".maxclusterrank {rank}")?;
        }
        if self.blocks_are_clusters {
            writeln!(f, ".blocksareclusters")?;
        }
        for pragma in &self.pragmas {
            writeln!(f, ".pragma \"{}\";", quotable(pragma))?;
        }
        let in_function = |ranges: fn(&Function) -> &Range<u32>, index: usize| {
            self.functions.iter().any(|function| ranges(function).contains(&(index as u32)))
        };
        let banks = self.banks.iter().enumerate().filter(|(index, _)| !in_function(|f| &f.banks, *index));
        let variables = self.variables.iter().enumerate();
        let variables = variables.filter(|(index, v)| !v.module_level && !in_function(|f| &f.variables, *index));
        self.print_body(f, banks.map(|(_, bank)| bank), variables.map(|(_, variable)| variable), &self.body)?;
        self.print_function_names(f)
    }
}

impl Kernel {
    fn print_body<'k>(
        &'k self,
        f: &mut fmt::Formatter<'_>,
        banks: impl Iterator<Item = &'k Bank>,
        variables: impl Iterator<Item = &'k VariableDecl>,
        body: &[Statement],
    ) -> fmt::Result {
        writeln!(f, "{{")?;
        for bank in banks {
            match bank.count {
                Some(count) => writeln!(f, "\t.reg {} {}<{count}>;", bank.ty, bank.prefix)?,
                None => writeln!(f, "\t.reg {} {};", bank.ty, bank.prefix)?,
            }
        }
        for variable in variables {
            writeln!(f, "\t{}", declaration(variable))?;
        }
        let mut current = None;
        let mut stated = HashMap::new();
        for statement in body {
            match statement {
                Statement::Pragma(text) => writeln!(f, "\t.pragma \"{}\";", quotable(text))?,
                Statement::Label(label) => writeln!(f, "{}:", self.label_name(label.0))?,
                Statement::Instruction(instruction) => {
                    if let Some(location) = instruction.location.filter(|_| instruction.location != current) {
                        current = instruction.location;
                        self.print_location(f, location, &mut stated)?;
                    }
                    let text = self.instruction_text(instruction);
                    match instruction.operands() {
                        // The targets stand in a table with a name.
                        [_, Operand::Labels(labels)] => {
                            let table = self.unused_label(&labels_name(labels));
                            let list = self.labels_text(labels);
                            writeln!(f, "{table}: .branchtargets {list};\n\t{};", text.replace(&list, &table))?;
                        }
                        _ => writeln!(f, "\t{text};")?,
                    }
                }
            }
        }
        writeln!(f, "}}")
    }

    /// The functions, each declared before any is defined.
    fn print_functions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for function in &self.functions {
            let linkage = if function.body.is_some() { "" } else { ".extern " };
            writeln!(f, "{linkage}{};", self.signature(function))?;
        }
        for function in &self.functions {
            let Some(body) = &function.body else { continue };
            writeln!(f, "{}", self.signature(function))?;
            let formal = |formal: &Formal| function.results.iter().chain(&function.params).any(|f| f == formal);
            let banks = self.banks.iter().enumerate().filter(|(index, _)| {
                let register = Formal::Register(Register { bank: *index as u32, index: 0 });
                function.banks.contains(&(*index as u32)) && !formal(&register)
            });
            let variables = self.variables.iter().enumerate().filter(|(index, variable)| {
                let index = *index as u32;
                !variable.module_level
                    && function.variables.contains(&index)
                    && !formal(&Formal::Variable(Variable(index)))
            });
            self.print_body(f, banks.map(|(_, bank)| bank), variables.map(|(_, variable)| variable), body)?;
        }
        Ok(())
    }

    fn signature(&self, function: &Function) -> String {
        let formal = |formal: &Formal| match *formal {
            Formal::Register(register) => {
                let ty = self.register_type(register).unwrap_or(Type::B32);
                format!(".reg {ty} {}", self.register_text(register))
            }
            Formal::Variable(variable) => self.variables.get(variable.0 as usize).map(declared).unwrap_or_default(),
        };
        let list = |formals: &[Formal]| formals.iter().map(formal).collect::<Vec<_>>().join(", ");
        let results =
            if function.results.is_empty() { String::new() } else { format!("({}) ", list(&function.results)) };
        let no_return = if function.no_return { " .noreturn" } else { "" };
        format!(".func {results}{}({}){no_return}", function.name, list(&function.params))
    }

    /// A name that no label of the kernel has.
    fn unused_label(&self, name: &str) -> String {
        let mut unused = name.to_owned();
        while self.labels.contains(&unused) {
            unused.push('_');
        }
        unused
    }

    fn labels_text(&self, labels: &[Label]) -> String {
        labels.iter().map(|label| self.label_name(label.0)).collect::<Vec<_>>().join(", ")
    }
}

/// The name of the table of a `brx.idx`: another table, another name.
fn labels_name(labels: &[Label]) -> String {
    labels.iter().fold("$L__targets".into(), |name, label| format!("{name}_{}", label.0))
}

/// A text as it may stand between quotes: ASCII, with everything else in octal as LLVM writes it.
fn quotable(text: &str) -> String {
    let quotable = |byte: u8| match byte {
        b' '..=b'~' if !matches!(byte, b'"' | b'\\') => char::from(byte).to_string(),
        _ => format!("\\{byte:03o}"),
    };
    text.bytes().map(quotable).collect()
}

fn align_before(param: &crate::ParameterDecl) -> String {
    match param.align {
        Some(align) => format!(".align {align} "),
        None => String::new(),
    }
}

/// A variable without linkage and value.
fn declared(variable: &VariableDecl) -> String {
    let VariableDecl { space, align, ty, name, .. } = variable;
    let elements = match variable.elements {
        // What a function takes must look as its caller's does.
        Some(1) if variable.space == Space::Param => String::new(),
        elements => format!("[{}]", elements.map_or(String::new(), |elements| elements.to_string())),
    };
    format!("{} .align {align} {ty} {name}{elements}", space.directive())
}

fn declaration(variable: &VariableDecl) -> String {
    let mut text = format!("{}{}", if variable.external { ".extern " } else { "" }, declared(variable));
    if !variable.init.is_empty() {
        let value = |bytes: &[u8]| {
            let bits = bytes.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
            match variable.ty {
                Type::F32 => format!("0f{bits:08X}"),
                Type::F64 => format!("0d{bits:016X}"),
                _ => bits.to_string(),
            }
        };
        let values: Vec<_> = variable.init.chunks(variable.ty.bytes() as usize).map(value).collect();
        let _ = write!(text, " = {{{}}}", values.join(", "));
    }
    text.push(';');
    text
}

impl Kernel {
    fn label_name(&self, label: u32) -> &str {
        self.labels.get(label as usize).map_or("$undeclared", String::as_str)
    }

    /// The label under which the printed module holds the function name that an inlined location must have.
    fn function_label(location: LocationId) -> String {
        format!("$L__inlined{}", location.0)
    }

    /// A location, and before it the places it was inlined at that were not the last stated with their file, line and column:
    /// `inlined_at` refers to what was stated last (PTX ISA, section 11.5.2).
    fn print_location(
        &self,
        f: &mut fmt::Formatter<'_>,
        location: LocationId,
        stated: &mut HashMap<(u32, u32, u32), LocationId>,
    ) -> fmt::Result {
        let get = |id: LocationId| self.locations.get(id.0 as usize);
        let place = |location: &Location| (location.file, location.line, location.column);
        let mut chain = vec![location];
        while let Some(caller) = chain.last().and_then(|&id| get(id)?.inlined_at) {
            let known = get(caller).is_none_or(|found| stated.get(&place(found)) == Some(&caller));
            // A chain longer than the list it runs through loops.
            if known || chain.len() > self.locations.len() {
                break;
            }
            chain.push(caller);
        }
        for &id in chain.iter().rev() {
            let Some(found) = get(id) else { continue };
            write!(f, "\t.loc {} {} {}", u64::from(found.file) + 1, found.line, found.column)?;
            if let Some((caller, outer)) = found.inlined_at.and_then(|caller| Some((caller, get(caller)?))) {
                let label = Self::function_label(caller);
                let (file, line, column) = (u64::from(outer.file) + 1, outer.line, outer.column);
                write!(f, ", function_name {label}, inlined_at {file} {line} {column}")?;
            }
            writeln!(f)?;
            stated.insert(place(found), id);
        }
        Ok(())
    }

    /// `.loc` with `inlined_at` must name a function by a label in `.debug_str` (PTX ISA, section 11.5.2).
    fn print_function_names(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut callers: Vec<_> = self.locations.iter().filter_map(|location| location.inlined_at).collect();
        callers.sort_unstable();
        callers.dedup();
        if callers.is_empty() {
            return Ok(());
        }
        writeln!(f, ".section .debug_str\n{{")?;
        for caller in callers {
            writeln!(f, "{}:\n\t.b8 105, 110, 108, 105, 110, 101, 100, 0", Self::function_label(caller))?;
        }
        writeln!(f, "}}")
    }

    /// One instruction as text, guard included, without the semicolon.
    pub fn instruction_text(&self, instruction: &Instruction) -> String {
        let mut text = String::new();
        if let Some(guard) = instruction.guard {
            let _ = write!(text, "@{}{} ", if guard.negated { "!" } else { "" }, self.register_text(guard.predicate));
        }
        text.push_str(instruction.opcode().name());
        for modifier in instruction.modifiers() {
            let _ = write!(text, "{modifier}");
        }
        let shown = |operand: &Operand| !matches!(operand, Operand::Arguments(values) if values.is_empty());
        for (index, (slot, operand)) in instruction.slots().filter(|(_, operand)| shown(operand)).enumerate() {
            text.push_str(if index == 0 { " " } else { ", " });
            // A single matrix, or a fragment of one register, is a vector of one.
            let braced = match slot.kind {
                Kind::Vector(_) => instruction.has(Modifier::X1),
                Kind::Registers(..) => !matches!(operand, Operand::Vector(_)),
                _ => false,
            };
            text.push_str(if braced { "{" } else { "" });
            self.print_operand(&mut text, operand);
            text.push_str(if braced { "}" } else { "" });
        }
        text
    }

    fn register_text(&self, register: crate::Register) -> String {
        self.register_name(register).unwrap_or_else(|| format!("%undeclared{}_{}", register.bank, register.index))
    }

    fn print_operand(&self, text: &mut String, operand: &Operand) {
        let _ = match operand {
            Operand::Register(r) => write!(text, "{}", self.register_text(*r)),
            Operand::NotPredicate(r) => write!(text, "!{}", self.register_text(*r)),
            Operand::RegisterPair(a, b) => {
                let name = |r: &Option<_>| r.map_or("_".into(), |r| self.register_text(r));
                write!(text, "{}|{}", name(a), name(b))
            }
            Operand::Special(special) => write!(text, "{}", special.name()),
            Operand::Integer(value) => write!(text, "{value}"),
            Operand::F32(bits) => write!(text, "0f{bits:08X}"),
            Operand::F64(bits) => write!(text, "0d{bits:016X}"),
            Operand::VariableAddress(v, o) => write!(text, "{}{}", self.variable_name(*v), offset(*o)),
            Operand::ParameterAddress(p, o) => write!(text, "{}{}", self.parameter_name(*p), offset(*o)),
            Operand::Memory(address) => write!(text, "[{}]", self.address_text(*address)),
            Operand::Tensor(map, coordinates) => {
                let _ = write!(text, "[{}, ", self.address_text(*map));
                self.print_vector(text, coordinates);
                text.push(']');
                Ok(())
            }
            Operand::Vector(elements) => {
                self.print_vector(text, elements);
                Ok(())
            }
            Operand::Label(label) => write!(text, "{}", self.label_name(label.0)),
            Operand::Labels(labels) => write!(text, "{}", self.labels_text(labels)),
            Operand::Function(function) => {
                let function = self.functions.get(function.0 as usize);
                write!(text, "{}", function.map_or("undeclared", |function| function.name.as_str()))
            }
            Operand::Arguments(values) => {
                text.push('(');
                self.print_list(text, values);
                text.push(')');
                Ok(())
            }
            Operand::Sink => write!(text, "_"),
        };
    }

    fn address_text(&self, Address { base, offset: o }: Address) -> String {
        match base {
            Base::Register(r) => format!("{}{}", self.register_text(r), offset(o)),
            Base::Variable(v) => format!("{}{}", self.variable_name(v), offset(o)),
            Base::Parameter(p) => format!("{}{}", self.parameter_name(p), offset(o)),
            Base::Absolute => o.to_string(),
        }
    }

    fn variable_name(&self, variable: crate::Variable) -> &str {
        self.variables.get(variable.0 as usize).map_or("undeclared", |v| v.name.as_str())
    }

    fn parameter_name(&self, parameter: crate::Parameter) -> &str {
        self.params.get(parameter.0 as usize).map_or("undeclared", |p| p.name.as_str())
    }

    fn print_vector(&self, text: &mut String, elements: &[Operand]) {
        text.push('{');
        self.print_list(text, elements);
        text.push('}');
    }

    fn print_list(&self, text: &mut String, elements: &[Operand]) {
        for (index, element) in elements.iter().enumerate() {
            if index > 0 {
                text.push_str(", ");
            }
            self.print_operand(text, element);
        }
    }
}

/// A negative offset is `+-8`: ptxas knows no difference.
fn offset(offset: i64) -> String {
    if offset == 0 { String::new() } else { format!("+{offset}") }
}

impl Space {
    /// The space a directive names (`.shared` and so on).
    pub fn from_directive(directive: &str) -> Option<Self> {
        [Self::Shared, Self::Global, Self::Const, Self::Local, Self::Param]
            .into_iter()
            .find(|space| space.directive() == directive)
    }
}
