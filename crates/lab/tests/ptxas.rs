//! What `ptxas` makes of kernels. Every one of the project's own, for every architecture that it claims, is accepted without spills.
//! Accesses to shared memory become what is recorded in the emulator's `tests/merge`, on two architectures, and what the emulator
//! predicts of the project's own kernels.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use emulator::merge;
use lab::ptxas::{self, Assembled, Resources, Tool};
use ptx::Kernel;
use rayon::prelude::*;

/// Whether the tools are there; says so where they are not.
fn tools() -> bool {
    let found = Tool::Ptxas.find().and_then(|_| Tool::Nvdisasm.find());
    if let Err(missing) = &found {
        assert!(std::env::var_os("CI").is_none(), "{missing}");
        eprintln!("skipped: {missing}");
    }
    found.is_ok()
}

type Accesses = BTreeMap<String, u32>;

/// The accesses to shared memory of the machine code.
fn shared_accesses(kernel: &Kernel, assembled: &Assembled) -> Accesses {
    let sass = ptxas::disassemble(kernel, assembled).unwrap();
    let mut accesses = Accesses::new();
    for instruction in &sass.instructions {
        let mut parts = instruction.opcode.split('.');
        let name = parts.next().unwrap_or_default();
        if matches!(name, "LDS" | "STS") && !instruction.idle {
            let width = parts.find_map(|part| match part {
                "128" => Some(".128"),
                "64" => Some(".64"),
                "U16" | "S16" | "16" => Some("16"),
                "U8" | "S8" | "8" => Some("8"),
                _ => None,
            });
            *accesses.entry(format!("{name}{}", width.unwrap_or_default())).or_default() += 1;
        }
    }
    accesses
}

#[test]
fn recorded_accesses_are_what_ptxas_leaves() {
    if !tools() {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../emulator/tests/merge");
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.par_iter().for_each(|path| {
        let text = fs::read_to_string(path).unwrap();
        ptx::parse(&text).unwrap().into_par_iter().enumerate().for_each(|(index, mut kernel)| {
            let prefix = format!("// {}: ", kernel.name);
            let recorded = text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap();
            // The rule is not the target's: every other kernel is assembled for another one.
            if index % 2 == 1 {
                kernel.target = "sm_90".parse().unwrap();
            }
            let found = shared_accesses(&kernel, &ptxas::assemble(&kernel).unwrap());
            let found: Vec<_> = found.iter().map(|(name, count)| format!("{name}x{count}")).collect();
            let found = if found.is_empty() { "nothing".into() } else { found.join(" ") };
            assert_eq!(found, recorded, "{} of {} on {}", kernel.name, path.display(), kernel.target);
        });
    });
}

#[test]
fn own_kernels_are_assembled_as_predicted() {
    if !tools() {
        return;
    }
    // One architecture for each kind of kernel and each size of shared memory: the others' kernels are these, for another target.
    const TARGETS: [&str; 4] = ["sm_75/", "sm_80/", "sm_90a/", "sm_120a/"];
    // The disassembler takes twice as long as the assembler, and how accesses are merged is not the target's.
    const DISASSEMBLED: [&str; 2] = ["sm_75/", "sm_90a/"];
    let mut kernels = kernels::configurations::configurations().unwrap();
    kernels.retain(|(name, _)| TARGETS.iter().any(|target| name.starts_with(target)));
    assert!((180..250).contains(&kernels.len()), "{} kernels", kernels.len());
    let wrong: Vec<_> = kernels
        .par_iter()
        .flat_map(|(name, program)| {
            let assembled = ptxas::assemble(&program.kernel).unwrap_or_else(|error| panic!("{name}: {error}"));
            let Resources { spill_store_bytes, spill_load_bytes, .. } = assembled.resources;
            let mut wrong = Vec::new();
            if spill_store_bytes + spill_load_bytes > 0 || assembled.serialized {
                let serialized = if assembled.serialized { ", wgmma serialized" } else { "" };
                wrong.push(format!(
                    "{name}: {spill_store_bytes} bytes of spill stores, {spill_load_bytes} of loads{serialized}"
                ));
            }
            if DISASSEMBLED.iter().any(|target| name.starts_with(target)) {
                let predicted = merge::shared_accesses(&program.kernel);
                let found = shared_accesses(&program.kernel, &assembled);
                if predicted != found {
                    wrong.push(format!("{name}: {predicted:?} predicted, {found:?} found"));
                }
            }
            wrong
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
