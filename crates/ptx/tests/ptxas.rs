//! The table of forms against the real `ptxas`.
//!
//! `ptxas` is the one the environment variable `STRATA_PTXAS` names, or the one on `PATH`. Without one the test says that it was
//! skipped, and fails in CI.

mod common;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::process::Command;

use arch::{Sm, Target};
use common::{Draw, REGISTERS, instruction, kernel};
use ptx::{Form, Instruction, Kernel, Label, Modifier, Opcode, Statement, Version};

/// Always the plainest choice; registers are counted up.
#[derive(Default)]
struct Plain(u32);

impl Draw for Plain {
    fn below(&mut self, n: u32) -> u32 {
        if n == REGISTERS {
            self.0 += 1;
            return self.0 % REGISTERS;
        }
        0
    }
}

fn ptxas() -> Option<OsString> {
    let program = env::var_os("STRATA_PTXAS").unwrap_or_else(|| "ptxas".into());
    if Command::new(&program).arg("--version").output().is_ok() {
        return Some(program);
    }
    assert!(env::var_os("CI").is_none(), "CI needs ptxas: put it on PATH or name it in STRATA_PTXAS");
    eprintln!("skipped: ptxas not found on PATH, none named by STRATA_PTXAS");
    None
}

/// What it says against a module, or nothing.
fn refuses(ptxas: &OsString, module: &str, target: Target) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("k.ptx");
    fs::write(&path, module).unwrap();
    let output = Command::new(ptxas)
        .args(["-arch", &target.to_string(), "-o"])
        .arg(folder.path().join("k.cubin"))
        .arg(path)
        .output()
        .unwrap();
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The form with each of its modifiers in turn where it has a choice, the plainest elsewhere, and once with every optional operand.
fn variants(form: &Form) -> Vec<Instruction> {
    let plain: Vec<Option<Modifier>> =
        form.modifiers().map(|(choices, optional)| (!optional).then_some(choices[0])).collect();
    let mut modifiers = vec![plain.clone()];
    for (place, (choices, _)) in form.modifiers().enumerate() {
        modifiers.extend(choices.iter().map(|&choice| {
            let mut chosen = plain.clone();
            chosen[place] = Some(choice);
            chosen
        }));
    }
    let mut draw = Plain::default();
    let mut all = Vec::new();
    for chosen in modifiers {
        let chosen: Vec<_> = chosen.into_iter().flatten().collect();
        if form.accepts(&chosen) {
            all.push(instruction(form, &chosen, false, &mut draw));
            all.push(instruction(form, &chosen, true, &mut draw));
        }
    }
    all.dedup();
    all
}

fn module(target: Target, version: Version, body: impl Iterator<Item = Instruction>) -> Kernel {
    let mut kernel = kernel(target, version);
    kernel.body = body.map(Statement::Instruction).chain([Statement::Label(Label(0))]).collect();
    kernel
}

/// The lowest target of a form, but none older than the assembler compiles for.
fn lowest_target(form: &Form) -> Target {
    let portable = || Sm::ALL.into_iter().find(|sm| u32::from(sm.number()) >= form.min_sm.max(75)).map(Target::from);
    form.targets.iter().min().copied().or_else(portable).unwrap()
}

/// Whether a form may stand without others: what a function gave back can only be loaded behind its call.
fn stands_alone(form: &Form) -> bool {
    match form.opcode {
        Opcode::Brx | Opcode::Call => false,
        Opcode::Ld => !form.modifiers().any(|(choices, _)| choices.contains(&Modifier::ParamFunc)),
        _ => true,
    }
}

#[test]
fn every_form_is_accepted() {
    let Some(ptxas) = ptxas() else { return };
    // Each form for the lowest target and version the table says it needs, but none older than the assembler compiles for.
    let mut groups = BTreeMap::<_, Vec<Instruction>>::new();
    for form in Form::all().iter().filter(|form| stands_alone(form)) {
        let target = lowest_target(form);
        let (major, minor) = target.min_ptx_version();
        let version = form.min_ptx.max(Version { major, minor });
        for variant in variants(form) {
            // A kernel uses tensor memory of one CTA or of pairs of them, never both.
            let pair = variant.has(Modifier::CtaGroup2);
            groups.entry((target, version, pair)).or_default().push(variant);
        }
    }
    let mut refused = String::new();
    for ((target, version, _), instructions) in groups {
        let kernel = module(target, version, instructions.into_iter());
        kernel.validate().unwrap();
        let text = kernel.to_string();
        let Some(messages) = refuses(&ptxas, &text, target) else { continue };
        for message in messages.lines().filter(|message| !message.contains("; warning")) {
            let line = message.split_once(" line ").and_then(|(_, rest)| rest.split(';').next()?.parse::<usize>().ok());
            let source = line.and_then(|line| text.lines().nth(line - 1)).unwrap_or_default();
            refused += &format!("{target} {version} {source} {message}\n");
        }
    }
    assert!(refused.is_empty(), "{refused}");
}

/// A form that a version or an architecture before the table's has is one that the table keeps from kernels.
#[test]
fn no_form_asks_for_more_than_it_needs() {
    let Some(ptxas) = ptxas() else { return };
    let lowest = Target::from(Sm::Sm75).min_ptx_version();
    let newest = Version { major: 9, minor: 0 };
    let mut accepted = String::new();
    for form in Form::all().iter().filter(|form| stands_alone(form)) {
        let instructions = variants(form);
        let text = |target, version| module(target, version, instructions.iter().cloned()).to_string();
        let older = match form.targets.first() {
            Some(target) => Some(Target::from(target.sm())),
            None => {
                Sm::ALL.into_iter().rfind(|sm| (75..form.min_sm).contains(&u32::from(sm.number()))).map(Target::from)
            }
        };
        if let Some(older) = older.filter(|older| refuses(&ptxas, &text(*older, newest), *older).is_none()) {
            accepted += &format!("{} `{}`: {older} has it\n", form.opcode.name(), form.syntax);
        }
        let Version { major, minor } = form.min_ptx;
        let last = [5, 8, 8][usize::from(major.clamp(7, 9)) - 7];
        let before = if minor == 0 { (major - 1, last) } else { (major, minor - 1) };
        let target = lowest_target(form);
        if before >= lowest.max(target.min_ptx_version()) {
            let version = Version { major: before.0, minor: before.1 };
            if refuses(&ptxas, &text(target, version), target).is_none() {
                accepted += &format!("{} `{}`: PTX {version} has it on {target}\n", form.opcode.name(), form.syntax);
            }
        }
    }
    assert!(accepted.is_empty(), "{accepted}");
}

#[test]
fn the_file_tests_are_accepted() {
    let Some(ptxas) = ptxas() else { return };
    let mut count = 0;
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../emulator/tests/filetests")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        for kernel in ptx::parse(&text).unwrap() {
            for module in [&text, &kernel.to_string()] {
                assert_eq!(refuses(&ptxas, module, kernel.target), None, "{}", path.display());
            }
            count += 1;
        }
    }
    assert!(count > 0);
}
