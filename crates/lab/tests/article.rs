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
        let tiles = stratum.default_tiles(gpu.sm, digger.problem());
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
fn print_all() {
    for (problem, gpu, strata) in [
        ("10x64x1024x64", "RTX 2070", vec![Stratum::V1, Stratum::V2, Stratum::V2Kt]),
        ("10x64x1024x64 f16", "RTX 2070", vec![Stratum::V2, Stratum::V2Kt, Stratum::V2Tc]),
        ("10x64x1024x64 f16", "A100", vec![Stratum::V2, Stratum::V2Kt, Stratum::V2Tc]),
        ("10x64x1024x64 f16", "H200", vec![Stratum::V2, Stratum::V2Kt, Stratum::V2Tc, Stratum::V3]),
    ] {
        for (stratum, findings) in strata.iter().zip(dug(problem, gpu, &strata)) {
            println!("{problem} {gpu} {stratum}");
            for finding in findings {
                println!("   {}: {}", finding.id, finding.text);
            }
        }
    }
    assert!(has(&[], "") || text(&dug("1x1x64x64", "T4", &[Stratum::V2])[0], "bank-conflicts").contains('%'));
}
