//! The emulator against real chips: PTX that Triton emitted, and what Nsight Compute counted when a GPU ran it.
//!
//! `truth/rtx2070` is exact. On the H200 the chip's own counters are a little off where it spills (`f32_small_v1`) and where
//! clients arbitrate for the banks; the tolerances say how much.

use std::fs;
use std::path::PathBuf;

use arch::{BlockResources, Limiter, Sm, occupancy};
use emulator::{Counters, Level, Memory, Options, Report};
use kernels::{Dtype, Inputs, Layout, Problem, Stratum};
use lab::{Watch, execute, ptxas};
use ptx::{Argument, Kernel, Launch};
use serde_json::Value;

struct Truth {
    kernel: Kernel,
    facts: Value,
    report: Report,
    /// Relative Frobenius error of the output.
    error: f64,
}

impl Truth {
    fn counters(&self) -> Counters {
        self.report.counters(&self.kernel, Level::Merged)
    }

    fn fact(&self, name: &str) -> u64 {
        self.facts.get("ncu").unwrap_or(&self.facts)[name].as_u64().unwrap_or_else(|| panic!("no fact `{name}`"))
    }
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/truth")
}

/// Runs a kernel of `truth/` as its record says it was launched, on fresh random numbers.
fn run(chip: &str, name: &str, sm: Sm) -> Truth {
    let text = fs::read_to_string(folder().join(chip).join(format!("{name}.ptx"))).unwrap();
    let kernel = ptx::parse(&text).unwrap().remove(0);
    let all: Value =
        serde_json::from_str(&fs::read_to_string(folder().join(chip).join("truth.json")).unwrap()).unwrap();
    let facts = all[name].clone();
    let number = |name: &str| facts[name].as_u64().unwrap() as usize;
    let dims = |name: &str| -> [u32; 3] { std::array::from_fn(|i| facts[name][i].as_u64().unwrap() as u32) };
    let (batch, heads) = match facts.get("batch") {
        Some(_) => (number("batch"), number("heads")),
        None => (1, number("batch_times_heads")),
    };
    let (seqlen, head_dim) = (number("seqlen"), number("head_dim"));
    // The kernels' tensors are [batch, heads, seqlen, head_dim]: as many batch entries of one head each.
    let problem = Problem::builder(batch * heads, 1, seqlen, head_dim).dtype(Dtype::F32).build().unwrap();
    let inputs = Inputs::randn(&problem, 20_261_129).unwrap();
    let keys = match name.ends_with("v2t") {
        true => inputs.k.transpose(1, 3).unwrap().contiguous().unwrap(),
        false => inputs.k.clone(),
    };

    let mut memory = Memory::new();
    let rows = (batch * heads * seqlen) as u64;
    let q = memory.alloc_bytes(&inputs.q.to_bytes().unwrap()).unwrap();
    let k = memory.alloc_bytes(&keys.to_bytes().unwrap()).unwrap();
    let v = memory.alloc_bytes(&inputs.v.to_bytes().unwrap()).unwrap();
    let scale = Argument::F32(1.0 / (head_dim as f32).sqrt());
    let out_bytes = 4 * rows * head_dim as u64;
    let (out, middle) = if chip == "rtx2070" {
        let out = memory.alloc(out_bytes).unwrap();
        (out, vec![Argument::Pointer(out), Argument::S32(seqlen as i32), Argument::S32((seqlen * head_dim) as i32)])
    } else {
        // The first generation reads what it has not written: O and l as 0, m as minus infinity.
        let (out, l) = (memory.alloc_zeroed(out_bytes).unwrap(), memory.alloc_zeroed(4 * rows).unwrap());
        let m = memory.alloc_bytes(&f32::NEG_INFINITY.to_le_bytes().repeat(rows as usize)).unwrap();
        (out, vec![Argument::Pointer(out), Argument::Pointer(l), Argument::Pointer(m)])
    };
    let mut arguments = vec![Argument::Pointer(q), Argument::Pointer(k), Argument::Pointer(v)];
    arguments.extend(middle);
    arguments.extend([scale, Argument::U64(0), Argument::U64(0)]);
    let launch = Launch {
        kernel: &kernel,
        grid: dims("grid"),
        block: dims("block"),
        cluster: [1, 1, 1],
        dynamic_shared: number("shared_bytes") as u32,
        arguments,
    };
    let report =
        emulator::run(&memory, &launch, &Options::new(sm)).unwrap_or_else(|error| panic!("{chip}/{name}: {error}"));

    let found = memory.read(out, out_bytes).unwrap();
    let expected = kernels::reference::reference(&problem, &inputs).unwrap();
    let (mut difference, mut norm) = (0.0, 0.0);
    for head in &expected {
        let start = head.entry * seqlen * head_dim;
        for (index, expected) in head.out.iter().enumerate() {
            let at = 4 * (start + index);
            let found = f64::from(f32::from_le_bytes(found[at..at + 4].try_into().unwrap()));
            difference += (found - expected).powi(2);
            norm += expected.powi(2);
        }
    }
    Truth { kernel, facts, report, error: (difference / norm).sqrt() }
}

/// As [`close`], where the chip may have counted none.
#[track_caller]
fn near(what: &str, found: u64, expected: u64, share: f64) {
    if expected == 0 {
        assert_eq!(found, 0, "{what}");
    } else {
        close(what, found, expected, share);
    }
}

/// Fails unless `found` is within `share` of `expected`.
#[track_caller]
fn close(what: &str, found: u64, expected: u64, share: f64) {
    let off = (found as f64 - expected as f64).abs() / expected as f64;
    assert!(
        off <= share,
        "{what}: {found}, the chip counted {expected}: {:.2} % off, {:.2} % allowed",
        100.0 * off,
        100.0 * share
    );
}

#[test]
fn rtx_2070() {
    let truth = run("rtx2070", "v2_f32_d32", Sm::Sm75);
    let counters = truth.counters();
    assert!(truth.error < 1e-5, "error {}", truth.error);
    assert_eq!(counters.shared_load_instructions, truth.fact("shared_load_instructions"));
    assert_eq!(counters.shared_load_wavefronts, truth.fact("shared_load_wavefronts"));
    assert_eq!(counters.shared_load_wavefronts_ideal, truth.fact("shared_load_wavefronts_ideal"));
    assert_eq!(counters.shared_load_bank_conflicts, truth.fact("shared_load_bank_conflicts"));
    let all = counters.shared_load_wavefronts + counters.shared_store_wavefronts;
    assert_eq!(all, truth.fact("shared_wavefronts_loads_and_stores"));

    let block =
        BlockResources { threads: 128, registers: 72, static_shared: 0, dynamic_shared: 12_288, carveout_kib: None };
    let occupancy = occupancy(Sm::Sm75, &block).unwrap();
    assert_eq!(occupancy.theoretical_pct, 62.5);
    assert_eq!(occupancy.limiters, [Limiter::Shared]);
    let limits = occupancy.limits;
    assert_eq!((limits.registers, limits.shared, limits.warps, limits.blocks), (7, Some(5), 8, 16));
}

#[test]
fn h200() {
    for name in ["f32_small_v1", "f32_small_v2", "f32_small_v2t"] {
        let truth = run("h200", name, Sm::Sm90);
        let counters = truth.counters();
        assert!(truth.error < 1e-5, "{name}: error {}", truth.error);
        let spills = name == "f32_small_v1";
        assert_eq!(counters.global_load_requests, truth.fact("global_load_requests"), "{name}");
        assert_eq!(counters.global_load_sectors, truth.fact("global_load_sectors"), "{name}");
        assert_eq!(counters.global_store_requests, truth.fact("global_store_requests"), "{name}");
        close(
            name,
            counters.global_store_sectors,
            truth.fact("global_store_sectors"),
            if spills { 0.001 } else { 0.0 },
        );
        close(name, counters.shared_load_instructions, truth.fact("shared_load_instructions"), 0.03);
        close(name, counters.shared_load_wavefronts, truth.fact("shared_load_wavefronts"), 0.03);
        close(name, counters.shared_store_wavefronts, truth.fact("shared_store_wavefronts"), 0.03);
        let conflicts = truth.fact("shared_load_bank_conflicts");
        if conflicts == 0 {
            assert_eq!(counters.shared_load_bank_conflicts, 0, "{name}");
            continue;
        }
        close(name, counters.shared_load_bank_conflicts, conflicts, if spills { 0.01 } else { 0.0 });
        // All of them on the line of the product with the transposed keys.
        let lines = truth.report.by_line(&truth.kernel, Level::Merged);
        let guilty: Vec<_> = lines.iter().filter(|line| line.counters.shared_load_bank_conflicts > 0).collect();
        assert_eq!(guilty.len(), 1, "{name}: {guilty:?}");
        assert_eq!(guilty[0].line, if spills { 15 } else { 31 }, "{name}: {guilty:?}");
    }
}

/// Whether the assembler and the disassembler are there; says so where they are not.
fn tools() -> bool {
    let found = ptxas::Tool::Ptxas.find().and_then(|_| ptxas::Tool::Nvdisasm.find());
    if let Err(missing) = &found {
        assert!(std::env::var_os("CI").is_none(), "{missing}");
        eprintln!("skipped: {missing}");
    }
    found.is_ok()
}

#[test]
fn warp_instructions_as_the_machine_executes_them() {
    if !tools() {
        return;
    }
    let cases = [
        ("rtx2070", "v2_f32_d32", Sm::Sm75, "warp_instructions_sass", 72),
        ("h200", "f32_small_v1", Sm::Sm90, "warp_instructions", 255),
        ("h200", "f32_small_v2", Sm::Sm90, "warp_instructions", 204),
        ("h200", "f32_small_v2t", Sm::Sm90, "warp_instructions", 171),
    ];
    for (chip, name, sm, fact, registers) in cases {
        let truth = run(chip, name, sm);
        let assembled = ptxas::assemble(&truth.kernel).unwrap();
        let sass = ptxas::disassemble(&truth.kernel, &assembled).unwrap();
        close(name, sass.warp_instructions(&truth.report.ptx).likely, truth.fact(fact), 0.03);
        close(name, assembled.resources.registers.into(), registers, 0.05);
    }
}

/// The project's own kernels, every one in every type, as `truth/h200/strata.json` has them.
#[test]
fn own_kernels() {
    let text = fs::read_to_string(folder().join("h200/strata.json")).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    let tools = tools();
    let mut seen = 0;
    for dtype in Dtype::ALL {
        let problem: Problem = format!("{} {dtype}", record["problem"].as_str().unwrap()).parse().unwrap();
        let inputs = Inputs::randn(&problem, 1).unwrap();
        for stratum in Stratum::ALL {
            let layout = Layout::contiguous(&problem);
            let plan = kernels::plan(stratum, &problem, "sm_90a".parse().unwrap(), &layout, None).unwrap();
            for launch in execute::execute_plan(plan, &problem, &inputs, Watch::default()).unwrap().launches {
                let (kernel, name) = (&launch.kernel, format!("{dtype} {}", launch.kernel.name));
                let counted = record["kernels"].as_array().unwrap().iter().find(|counted| {
                    counted["dtype"] == dtype.to_string().as_str() && counted["kernel"] == kernel.name.as_str()
                });
                let Some(counted) = counted else { panic!("no record of {name}") };
                let fact = |name: &str| counted[name].as_u64().unwrap();
                let counters = launch.report.counters(kernel, Level::Merged);
                assert_eq!(counters.global_load_sectors, fact("global_load_sectors"), "{name}");
                assert_eq!(counters.global_store_sectors, fact("global_store_sectors"), "{name}");
                assert_eq!(counters.shared_store_wavefronts, fact("shared_store_wavefronts"), "{name}");
                // The chip counts a tenth of a percent more: arbitration with other clients.
                near(&name, counters.shared_load_wavefronts, fact("shared_load_wavefronts"), 0.001);
                near(&name, counters.shared_load_bank_conflicts, fact("shared_load_bank_conflicts"), 0.002);
                seen += 1;
                if !tools {
                    continue;
                }
                let assembled = ptxas::assemble(kernel).unwrap();
                let executed = ptxas::disassemble(kernel, &assembled).unwrap().warp_instructions(&launch.report.ptx);
                near(&name, executed.likely, fact("warp_instructions"), 0.001);
                near(&name, executed.least, executed.most, 0.001);
                let block = BlockResources {
                    threads: launch.threads,
                    registers: assembled.resources.registers,
                    static_shared: assembled.resources.static_shared_bytes,
                    dynamic_shared: launch.dynamic_shared,
                    carveout_kib: None,
                };
                let occupancy = occupancy(Sm::Sm90, &block).unwrap().theoretical_pct;
                assert_eq!(Some(occupancy), counted["theoretical_occupancy_pct"].as_f64(), "{name}");
            }
        }
    }
    assert_eq!(seen, record["kernels"].as_array().unwrap().len());
}
