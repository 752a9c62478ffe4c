//! What `ptxas` makes of kernels. Every one of the project's own, for every architecture that it claims, is accepted without spills.
//! Accesses to shared memory become what is recorded in the emulator's `tests/merge`, on two architectures, and what the emulator
//! predicts of the project's own kernels.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use emulator::merge;
use lab::ptxas::{self, Resources, Tool};
use lab::sass::Sass;

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
fn shared_accesses(sass: &Sass) -> Accesses {
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
    let (mut kernels, mut recorded) = (Vec::new(), Vec::new());
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        for (index, mut kernel) in ptx::parse(&text).unwrap().into_iter().enumerate() {
            let prefix = format!("// {}: ", kernel.name);
            let accesses = text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap();
            recorded.push((path.clone(), accesses.to_owned()));
            // The rule is not the target's: every other kernel is assembled for another one.
            if index % 2 == 1 {
                kernel.target = "sm_90".parse().unwrap();
            }
            kernels.push(kernel);
        }
    }
    let machine_code = ptxas::machine_code(&kernels.iter().collect::<Vec<_>>()).unwrap();
    for ((kernel, (path, recorded)), (_, sass)) in kernels.iter().zip(recorded).zip(machine_code) {
        let found = shared_accesses(&sass);
        let found: Vec<_> = found.iter().map(|(name, count)| format!("{name}x{count}")).collect();
        let found = if found.is_empty() { "nothing".into() } else { found.join(" ") };
        assert_eq!(found, recorded, "{} of {} on {}", kernel.name, path.display(), kernel.target);
    }
}

#[test]
fn own_kernels_are_assembled_as_predicted() {
    if !tools() {
        return;
    }
    // One architecture for each kind of kernel and each size of shared memory: the others' kernels are these, for another target.
    const TARGETS: [&str; 4] = ["sm_75/", "sm_80/", "sm_90a/", "sm_120a/"];
    let mut kernels = kernels::configurations::configurations().unwrap();
    kernels.retain(|(name, _)| TARGETS.iter().any(|target| name.starts_with(target)));
    assert!((180..250).contains(&kernels.len()), "{} kernels", kernels.len());
    let machine_code = ptxas::machine_code(&kernels.iter().map(|(_, program)| &program.kernel).collect::<Vec<_>>());
    let mut wrong = Vec::new();
    for ((name, program), (assembled, sass)) in kernels.iter().zip(machine_code.unwrap()) {
        let Resources { spill_store_bytes, spill_load_bytes, .. } = assembled.resources;
        if spill_store_bytes + spill_load_bytes > 0 || assembled.serialized {
            let serialized = if assembled.serialized { ", wgmma serialized" } else { "" };
            wrong.push(format!(
                "{name}: {spill_store_bytes} bytes of spill stores, {spill_load_bytes} of loads{serialized}"
            ));
        }
        let (predicted, found) = (merge::shared_accesses(&program.kernel), shared_accesses(&sass));
        if predicted != found {
            wrong.push(format!("{name}: {predicted:?} predicted, {found:?} found"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
