//! Printing and parsing undo each other, and no text makes the parser panic.

mod common;

use std::fmt::Write;

use arch::{Sm, Target};
use common::{Draw, REGISTERS, instruction, register};
use proptest::prelude::*;
use ptx::{
    Bank, Form, Guard, Kernel, Label, Location, LocationId, Modifier, Opcode, ParameterDecl, Pointee, Space, Statement,
    Type, VariableDecl, Version, parse,
};

const VERSION: Version = Version { major: 9, minor: 2 };

/// Draws from a list of numbers, and from its beginning again where that ends.
struct Drawn<'a>(&'a [u32], usize);

impl Draw for Drawn<'_> {
    fn below(&mut self, n: u32) -> u32 {
        self.1 += 1;
        self.0[self.1 % self.0.len()] % n
    }
}

/// A valid kernel in the order in which the parser would number things.
fn kernel(draw: &mut impl Draw, length: u32) -> Kernel {
    let target = Target::best([Sm::Sm90, Sm::Sm100, Sm::Sm120][draw.below(3) as usize]);
    let mut kernel = common::kernel(target, VERSION);
    kernel.labels.clear();
    let triple = |draw: &mut dyn FnMut(u32) -> u32| (draw(2) == 1).then(|| [1 + draw(1024), 1 + draw(8), 1 + draw(8)]);
    let mut next = |n| draw.below(n);
    (kernel.required_block, kernel.max_block) = (triple(&mut next), triple(&mut next));
    (kernel.min_ctas_per_sm, kernel.max_registers) = ((next(2) == 1).then_some(3), (next(2) == 1).then_some(64));
    kernel.required_cluster = triple(&mut next);
    kernel.files = ["a.rs", "dir\\b \"é\"\t.py"][..next(3) as usize].iter().map(ToString::to_string).collect();
    let spaces = [Space::Shared, Space::Global, Space::Const, Space::Local];
    let types = [Type::B8, Type::U16, Type::S32, Type::F32, Type::F64, Type::B64];
    for index in 0..next(6) {
        let (ty, space) = (types[next(6) as usize], spaces[next(4) as usize]);
        let elements = (space != Space::Shared || next(2) == 0).then(|| u64::from(1 + next(100)));
        let initial = matches!(space, Space::Global | Space::Const) && next(2) == 1;
        let init = if initial {
            vec![next(256) as u8; (ty.bytes() * (1 + next(1 + elements.unwrap() as u32 - 1))) as usize]
        } else {
            Vec::new()
        };
        let name = format!("v{index}");
        kernel.variables.push(VariableDecl {
            name,
            space,
            ty,
            align: 1 << next(7),
            elements,
            init,
            external: elements.is_none(),
            module_level: false,
        });
    }
    for index in 0..next(4) {
        let pointee =
            (next(2) == 1).then(|| Pointee { space: (next(2) == 1).then_some(Space::Global), align: 1 << next(5) });
        let (elements, align) = ((next(2) == 1).then(|| u64::from(next(9))), (next(2) == 1).then(|| 1 << next(5)));
        kernel.params.push(ParameterDecl { name: format!("q{index}"), ty: Type::U64, elements, align, pointee });
    }
    for index in 0..next(3) {
        kernel.banks.push(Bank { prefix: format!("single{index}"), ty: Type::B32, count: None });
    }
    let forms: Vec<_> = Form::all()
        .iter()
        .filter(|form| !matches!(form.opcode, Opcode::Bra | Opcode::Brx | Opcode::Call) && form.is_on(target))
        .collect();
    for _ in 0..length {
        let form = forms[draw.below(forms.len() as u32) as usize];
        let chosen: Vec<Modifier> = form
            .modifiers()
            .filter_map(|(choices, optional)| {
                let choice = draw.below(choices.len() as u32 + u32::from(optional));
                choices.get(choice as usize).copied()
            })
            .collect();
        if !form.accepts(&chosen) {
            continue;
        }
        let optional = draw.below(2) == 1;
        let mut instruction = instruction(form, &chosen, optional, draw);
        if draw.below(4) == 1 {
            let predicate = register(Type::Pred, draw.below(REGISTERS));
            instruction.guard = Some(Guard { predicate, negated: draw.below(2) == 1 });
        }
        if !kernel.files.is_empty() {
            instruction.location = Some(location(&mut kernel, draw));
        }
        if draw.below(8) == 1 {
            let label = Label(kernel.labels.len() as u32);
            kernel.labels.push(format!("$L{}", label.0));
            kernel.body.push(Statement::Label(label));
        }
        kernel.body.push(Statement::Instruction(instruction));
    }
    for _ in 0..kernel.labels.len() {
        let branch = ptx::Instruction::new(
            Opcode::Bra,
            vec![Modifier::Uni],
            vec![ptx::Operand::Label(Label(draw.below(kernel.labels.len() as u32)))],
        );
        let mut branch = branch.unwrap();
        branch.location = kernel.instructions().last().and_then(|last| last.location);
        kernel.body.push(Statement::Instruction(branch));
    }
    kernel
}

/// A location, new or known, perhaps inlined at the last known one.
fn location(kernel: &mut Kernel, draw: &mut impl Draw) -> LocationId {
    let last = kernel.locations.len().checked_sub(1).map(|last| LocationId(last as u32));
    let mut location = Location {
        file: draw.below(kernel.files.len() as u32),
        line: draw.below(5),
        column: draw.below(3),
        inlined_at: None,
    };
    if draw.below(3) == 1 {
        location.inlined_at = last;
    }
    match kernel.locations.iter().position(|known| *known == location) {
        Some(known) => LocationId(known as u32),
        None => {
            kernel.locations.push(location);
            LocationId(kernel.locations.len() as u32 - 1)
        }
    }
}

/// A kernel as compilers write it, to be damaged.
const FOREIGN: &str = include_str!("foreign.ptx");

proptest! {
    #[test]
    fn a_printed_kernel_parses_to_itself(numbers in prop::collection::vec(any::<u32>(), 8..400), length in 0u32..60) {
        let kernel = kernel(&mut Drawn(&numbers, 0), length);
        prop_assert_eq!(kernel.validate(), Ok(()));
        let text = kernel.to_string();
        match parse(&text) {
            Ok(parsed) => prop_assert_eq!(parsed, [kernel], "{}", text),
            Err(error) => prop_assert!(false, "{}", error.render(&text, "printed")),
        }
    }

    #[test]
    fn arbitrary_text_does_no_harm(text in "\\PC*") {
        let _ = parse(&text);
        let _ = parse(&format!(".version 8.0\n.target sm_80\n.entry k() {{ .reg .b32 %r<4>; {text} }}"));
    }

    #[test]
    fn damaged_kernels_do_no_harm(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, "[ -~]{0,3}|[0-9]{10,25}|%r[0-9]+|\\{|\\}|;"), 1..6)
    ) {
        let mut text = FOREIGN.to_owned();
        for (at, length, inserted) in cuts {
            let at = at.index(text.len());
            let end = (at + length).min(text.len());
            text.replace_range(at..end, &inserted);
        }
        match parse(&text) {
            Ok(kernels) => for kernel in kernels {
                let _ = kernel.validate();
                let printed = kernel.to_string();
                prop_assert_eq!(parse(&printed), Ok(vec![kernel]), "{}", printed);
            },
            Err(error) => {
                let mut rendered = String::new();
                write!(rendered, "{}", error.render(&text, "damaged.ptx")).unwrap();
                prop_assert!(error.line <= text.lines().count() + 1);
            }
        }
    }
}

#[test]
fn a_foreign_kernel_survives() {
    let kernels = parse(FOREIGN).unwrap();
    assert_eq!(kernels.len(), 1);
    kernels[0].validate().unwrap();
    assert_eq!(parse(&kernels[0].to_string()).unwrap(), kernels);
    assert_eq!(kernels[0].user_location(kernels[0].instructions().last().unwrap()).map(|l| l.file), Some(0));
}
