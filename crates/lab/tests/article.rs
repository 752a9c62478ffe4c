//! The article's conclusions come out of its generations, each where its cause is and in no later one; another GPU or type that has the
//! cure changes the advice.

use arch::Gpu;
use kernels::{Problem, Stratum};
use lab::{Digger, Finding, Source, Thresholds, Watch};

/// What each stratum suffers from.
fn dug(problem: &str, gpu: &str, strata: &[Stratum]) -> Vec<Vec<Finding>> {
    let (problem, gpu): (Problem, _) = (problem.parse().unwrap(), Gpu::find(gpu).unwrap());
    let digger = Digger::new(problem, gpu, &Source::Seed(0), false, Watch::default()).unwrap();
    let digger = digger.thresholds(Thresholds::default());
    let of = |&stratum: &Stratum| {
        let tiles = stratum.default_tiles(gpu.sm, gpu.sm_count, digger.problem());
        let dug = digger.dig(stratum, tiles, Watch::default()).unwrap();
        assert_eq!(dug.wrong, None);
        dug.record.findings
    };
    strata.iter().map(of).collect()
}

fn has(findings: &[Finding], id: &str) -> bool {
    findings.iter().any(|finding| finding.id == id)
}

fn text<'a>(findings: &'a [Finding], id: &str) -> &'a str {
    &findings.iter().find(|finding| finding.id == id).unwrap_or_else(|| panic!("no {id}: {findings:?}")).text
}

#[test]
fn each_conclusion_is_of_its_generation_and_of_no_later_one() {
    let found = dug("10x64x1024x64", "RTX 2070", &[Stratum::V1, Stratum::V2, Stratum::V2Kt]);
    let [v1, v2, v2_kt] = found.as_slice() else { unreachable!() };
    // v1: global memory in the place of registers, and division in the loop.
    assert!(has(v1, "repeated-bytes") && has(v1, "repeated-division"), "{v1:?}");
    assert!(!has(v2, "repeated-bytes") && !has(v2, "repeated-division"), "{v2:?}");
    // v2: the transposed K.
    assert!(text(v2, "bank-conflicts").contains("v2_kt stores K transposed"));
    assert!(!has(v2_kt, "bank-conflicts"), "{v2_kt:?}");
    // v2_kt: the shared-memory pipe (MIO); no tensor instruction takes f32 there.
    assert!(has(v2_kt, "shared-limited") && !has(v2_kt, "idle-tensor-cores"), "{v2_kt:?}");
}

#[test]
fn advice_holds_for_the_architecture_and_the_type() {
    let strata = [Stratum::V2, Stratum::V2Kt, Stratum::V2Tc];
    let turing = dug("1x4x512x64 f16", "T4", &strata);
    assert!(text(&turing[0], "bank-conflicts").contains("storing K transposed is not the remedy"));
    assert!(has(&turing[1], "idle-tensor-cores") && !has(&turing[2], "idle-tensor-cores"));
    assert!(text(&turing[2], "synchronous-copies").contains("no asynchronous copy"));
    // cp.async is what sm_80 has, and v2_tc uses it.
    assert!(!has(&dug("1x4x512x64 f16", "A100", &[Stratum::V2Tc])[0], "synchronous-copies"));
    let hopper = dug("1x4x512x64 f16", "H200", &[Stratum::V2Tc, Stratum::V3]);
    assert!(text(&hopper[0], "synchronous-copies").contains("v3 lets a warp of its own feed it"));
    assert!(!has(&hopper[1], "synchronous-copies"), "{:?}", hopper[1]);
}
