//! Findings follow from counters: kernels that differ in one thing, run by the emulator, differ in what is found.

use arch::Gpu;
use emulator::{Memory, Options};
use kernels::Problem;
use lab::{Evidence, Finding, LaunchEvidence, RegisterSource, Registers, Thresholds};
use ptx::{Argument, Kernel, Launch};

/// `loads` times: each lane loads the float at `tid * stride` of shared memory and multiplies; line 7 loads. Volatile, as the
/// assembler would load once.
fn strided(stride: u32, loads: usize) -> Kernel {
    let body = "
        .loc 1 7 0
        ld.volatile.shared.f32 %f2, [%r3];
        .loc 1 8 0
        fma.rn.f32 %f1, %f2, %f2, %f1;"
        .repeat(loads);
    let text = format!(
        ".version 7.8
        .target sm_75
        .address_size 64
        .file 1 \"kernel.rs\"
        .visible .entry strided(.param .u64 out) {{
        .reg .b32 %r<8>; .reg .f32 %f<8>; .reg .b64 %rd<8>;
        .shared .align 4 .b8 tile[{bytes}];
        .loc 1 3 0
        mov.u32 %r1, %tid.x;
        mul.lo.u32 %r2, %r1, {step};
        mov.u32 %r4, tile;
        add.u32 %r3, %r4, %r2;
        mov.f32 %f1, 0f00000000;
        st.shared.f32 [%r3], %f1;
        {body}
        .loc 1 9 0
        mov.u32 %r5, %ctaid.x;
        mad.lo.u32 %r6, %r5, 32, %r1;
        ld.param.u64 %rd1, [out];
        mad.wide.u32 %rd2, %r6, 4, %rd1;
        st.global.f32 [%rd2], %f1;
        ret;
        }}",
        bytes = 32 * 4 * stride,
        step = 4 * stride,
    );
    ptx::parse(&text).unwrap().remove(0)
}

fn evidence(kernel: Kernel, ctas: u32, shared: u32, registers: u32, gpu: &str) -> Evidence {
    let gpu = Gpu::find(gpu).unwrap();
    let mut memory = Memory::new();
    let out = memory.alloc(u64::from(ctas) * 128).unwrap();
    let launch = Launch {
        kernel: &kernel,
        grid: [ctas, 1, 1],
        block: [32, 1, 1],
        cluster: [1, 1, 1],
        dynamic_shared: shared,
        arguments: vec![Argument::Pointer(out)],
    };
    let report = emulator::run(&memory, &launch, &Options::new(gpu.sm)).unwrap();
    let registers = Registers { count: registers, source: RegisterSource::Ptxas, spilled_bytes: 0 };
    let launch = LaunchEvidence::of(kernel.clone(), report, 32, shared, registers, gpu).unwrap();
    let problem: Problem = "1x1x64x32".parse().unwrap();
    Evidence { stratum: "v2".into(), problem: Some(problem), gpu, launches: vec![launch] }
}

fn findings(evidence: &Evidence) -> Vec<Finding> {
    lab::findings(evidence, &Thresholds::default())
}

fn found<'a>(findings: &'a [Finding], id: &str) -> Option<&'a Finding> {
    findings.iter().find(|finding| finding.id == id)
}

#[test]
fn bank_conflicts_name_the_line_and_go_when_the_stride_is_odd() {
    let with = findings(&evidence(strided(32, 64), 720, 0, 32, "RTX 2070"));
    let finding = found(&with, "bank-conflicts").unwrap();
    assert_eq!((finding.file.as_deref(), finding.line), (Some("kernel.rs"), Some(7)));
    // 32 lanes on one bank: all but one of 32 wavefronts are conflicts.
    assert!(
        finding
            .text
            .starts_with("96.9 % of the wavefronts of shared loads are bank conflicts (threshold 10 %): 32.0-way")
    );
    assert!(
        finding.text.contains("100.0 % at kernel.rs:7: 32.0 wavefronts a load there where 1.0 would do"),
        "{}",
        finding.text
    );
    assert!(found(&with, "shared-limited").is_some());

    let without = findings(&evidence(strided(33, 64), 720, 0, 32, "RTX 2070"));
    assert_eq!(found(&without, "bank-conflicts"), None);
}

/// Transposing K is the wrong advice where tensor cores take the type.
#[test]
fn the_remedy_holds_for_the_type_and_the_architecture() {
    let text = |dtype: &str, gpu: &str| {
        let mut evidence = evidence(strided(32, 64), 720, 0, 32, gpu);
        evidence.problem = Some(format!("1x1x64x32 {dtype}").parse().unwrap());
        found(&findings(&evidence), "bank-conflicts").unwrap().text.clone()
    };
    assert!(text("f32", "RTX 2070").contains("v2_kt stores K transposed"));
    assert!(text("f16", "H200").contains("storing K transposed is not the remedy"));
    assert!(text("f16", "H200").contains("sm_90"));
    // sm_75 multiplies f16 on tensor cores, not bf16.
    assert!(text("f16", "T4").contains("not the remedy"));
    assert!(text("bf16", "T4").contains("v2_kt stores K transposed"));
}

#[test]
fn occupancy_names_every_limiter_and_what_would_do() {
    let low = findings(&evidence(strided(1, 1), 720, 16_256, 250, "RTX 2070"));
    let finding = found(&low, "occupancy").unwrap();
    assert!(finding.text.starts_with("12.5 % (threshold 50 %): 4 CTAs of 1 warps"), "{}", finding.text);
    assert!(finding.text.contains("shared memory (16,384 of 65,536 bytes a CTA)"), "{}", finding.text);
    assert!(
        finding.text.contains("16 CTAs, which is 50 %, need tiles of at most 4,096 shared bytes a CTA"),
        "{}",
        finding.text
    );
    let high = findings(&evidence(strided(1, 1), 720, 3_968, 32, "RTX 2070"));
    assert_eq!(found(&high, "occupancy"), None);

    let tied = findings(&evidence(strided(1, 1), 720, 8_064, 255, "RTX 2070"));
    let text = &found(&tied, "occupancy").unwrap().text;
    assert!(text.contains("registers (255 a thread) and shared memory"), "{text}");
    assert!(text.contains("at most 128 registers a thread"), "{text}");
}

#[test]
fn a_grid_smaller_than_the_gpu_is_found_on_the_larger_gpu_alone() {
    let on = |gpu: &str| findings(&evidence(strided(1, 1), 100, 0, 32, gpu));
    assert_eq!(found(&on("RTX 2070"), "grid-too-small"), None);
    let large = on("H200");
    let text = &found(&large, "grid-too-small").unwrap().text;
    assert!(text.starts_with("the grid has 100 CTAs for 132 SMs, so 32 SMs idle"), "{text}");
}

#[test]
fn an_empty_problem_has_no_findings_and_no_nan() {
    let mut evidence = evidence(strided(1, 1), 720, 0, 32, "RTX 2070");
    evidence.launches.clear();
    assert_eq!(findings(&evidence), []);
}

#[test]
fn a_transition_says_what_changed_and_what_is_gone() {
    let (mut before, mut after) =
        (evidence(strided(32, 64), 720, 0, 32, "RTX 2070"), evidence(strided(33, 64), 720, 0, 32, "RTX 2070"));
    (before.stratum, after.stratum) = ("v2".into(), "v2_kt".into());
    let (old, new) = (findings(&before), findings(&after));
    let said = lab::transition((&before, &old), (&after, &new)).unwrap().join(" ");
    assert!(said.contains("bank conflicts vanish: 1,450,800 before"), "{said}");
    assert!(said.contains("Gone: bank-conflicts"), "{said}");
    assert!(said.starts_with("Modelled time") && said.contains("faster."), "{said}");
    let back = lab::transition((&after, &new), (&before, &old)).unwrap().join(" ");
    assert!(back.contains("slower") && back.contains("New: bank-conflicts"), "{back}");
    // Against itself, nothing.
    let same = lab::transition((&before, &old), (&before, &old)).unwrap();
    assert_eq!(same.len(), 1);
    assert!(same[0].ends_with("no change."), "{same:?}");
}

#[test]
fn different_configurations_are_not_put_in_a_ratio() {
    let before = evidence(strided(32, 1), 720, 0, 32, "RTX 2070");
    let refused = |after: Evidence| lab::transition((&before, &[]), (&after, &[])).unwrap_err().to_string();
    let gpu = refused(evidence(strided(32, 1), 720, 0, 32, "T4"));
    assert_eq!(gpu, "v2 and v2 are incomparable: the GPU differs (RTX 2070; T4)");
    let mut other = evidence(strided(32, 1), 720, 0, 32, "RTX 2070");
    other.problem = Some("1x1x64x64".parse().unwrap());
    assert!(refused(other).contains("the problem differs (1x1x64x32; 1x1x64x64)"));
}

#[test]
fn spills_are_found() {
    let mut evidence = evidence(strided(1, 1), 720, 0, 255, "RTX 2070");
    assert_eq!(found(&findings(&evidence), "spills"), None);
    evidence.launches[0].registers.spilled_bytes = 52;
    let all = findings(&evidence);
    assert!(found(&all, "spills").unwrap().text.starts_with("ptxas spills 52 bytes of stores a thread"));
}
