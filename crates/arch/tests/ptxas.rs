//! The tables of targets, features and `mma` shapes against what the real `ptxas` accepts and rejects.
//!
//! `ptxas` is the one the environment variable `STRATA_PTXAS` names, or the one on `PATH`. Without one the test says that it was
//! skipped, and fails in CI.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use arch::{Feature, MMA_FORMS, MmaForm, Target, TensorOperand};

/// Knows every target below, and instructions as old as the table.
const PTX_VERSION: (u8, u8) = (8, 8);

struct Ptxas {
    program: OsString,
    folder: tempfile::TempDir,
}

impl Ptxas {
    fn find() -> Option<Ptxas> {
        let program = env::var_os("STRATA_PTXAS").unwrap_or_else(|| "ptxas".into());
        if Command::new(&program).arg("--version").output().is_err() {
            assert!(env::var_os("CI").is_none(), "CI needs ptxas: put it on PATH or name it in STRATA_PTXAS");
            eprintln!("skipped: no ptxas on PATH, none named by STRATA_PTXAS");
            return None;
        }
        Some(Ptxas { program, folder: tempfile::tempdir().unwrap() })
    }

    /// What it says against a kernel of this body, or nothing.
    fn refuses(&self, target: Target, (major, minor): (u8, u8), body: &str) -> Option<String> {
        let source = format!(
            ".version {major}.{minor}\n.target {target}\n.address_size 64\n.visible .entry k() {{\n\
             .reg .b16 h<8>; .reg .b32 r<20>; .reg .f32 f<20>; .reg .b64 d<8>; .reg .pred p<4>;\n\
             .shared .align 128 .b8 s[1024];\n{body}\nret;\n}}\n"
        );
        let path = |name| Path::new(self.folder.path()).join(name);
        fs::write(path("k.ptx"), source).unwrap();
        let output = Command::new(&self.program)
            .args(["-arch", &target.to_string(), "-o"])
            .args([path("k.cubin"), path("k.ptx")])
            .output()
            .unwrap();
        (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// The targets it still compiles for.
    fn targets(&self) -> Vec<Target> {
        let known: Vec<_> = Target::all().filter(|&target| self.refuses(target, PTX_VERSION, "").is_none()).collect();
        assert!(known.len() > 10, "ptxas compiles for {known:?} alone");
        known
    }
}

fn example(feature: Feature) -> String {
    let text = match feature {
        Feature::F16Mma | Feature::Int8Mma | Feature::Bf16Mma | Feature::Tf32Mma | Feature::Fp8Mma => {
            let operand = match feature {
                Feature::F16Mma => TensorOperand::F16,
                Feature::Int8Mma => TensorOperand::Int8,
                Feature::Bf16Mma => TensorOperand::Bf16,
                Feature::Tf32Mma => TensorOperand::Tf32,
                _ => TensorOperand::Fp8,
            };
            // m8n8k4 is Volta's, and is emulated since.
            let first =
                MMA_FORMS.iter().filter(|form| form.operand == operand && form.k > 4).min_by_key(|form| form.since);
            return mma(first.unwrap());
        }
        Feature::Ldmatrix => "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0,r1,r2,r3}, [s];",
        Feature::TanhApprox => "tanh.approx.f32 f0, f1;",
        Feature::Ex2F16 => "ex2.approx.f16x2 r0, r1;",
        Feature::CpAsync => "cp.async.cg.shared.global [s], [d0], 16; cp.async.commit_group; cp.async.wait_group 0;",
        Feature::Mbarrier => "mbarrier.init.shared.b64 [s], 1;",
        Feature::PackedConvert => "cvt.rn.f16x2.f32 r0, f0, f1;",
        Feature::Bf16Fma => "fma.rn.bf16x2 r0, r1, r2, r3;",
        Feature::MaxNan => "max.NaN.f32 f0, f1, f2;",
        Feature::Redux => "redux.sync.add.u32 r0, r1, 0xffffffff;",
        Feature::CachePolicy => "createpolicy.fractional.L2::evict_first.b64 d0, 1.0;",
        Feature::Fp8Convert => "cvt.rn.satfinite.e4m3x2.f32 h0, f0, f1;",
        Feature::Stmatrix => "stmatrix.sync.aligned.m8n8.x1.shared.b16 [s], {r0};",
        Feature::Bf16Arithmetic => "add.rn.bf16x2 r0, r1, r2;",
        Feature::Elect => "elect.sync r0|p0, 0xffffffff;",
        Feature::MbarrierTx => "mbarrier.arrive.expect_tx.shared.b64 d0, [s], 16;",
        Feature::Tma => {
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [s], [d0, {r0, r1}], [s];"
        }
        Feature::FenceProxyAsync => "fence.proxy.async;",
        Feature::Clusters => "barrier.cluster.arrive; barrier.cluster.wait; mapa.u64 d0, d1, r0;",
        Feature::DependentLaunch => "griddepcontrol.wait;",
        Feature::TensormapReplace => "tensormap.replace.tile.global_address.global.b1024.b64 [d0], d1;",
        Feature::Setmaxnreg => "setmaxnreg.inc.sync.aligned.u32 232;",
        Feature::Wgmma => "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {f0,f1,f2,f3}, d0, d1, p0, 1, 1, 0, 0;",
        Feature::Tcgen05 => "tcgen05.mma.cta_group::1.kind::f16 [r0], d0, d1, r1, p0;",
        Feature::PackedF32 => "fma.rn.f32x2 d0, d1, d2, d3;",
        Feature::Max3 => "max.f32 f0, f1, f2, f3;",
    };
    text.to_owned()
}

/// The instruction of a form, with f32 (int8: s32) accumulators.
fn mma(form: &MmaForm) -> String {
    let MmaForm { m, n, k, operand, .. } = *form;
    let (name, per_register) = match operand {
        TensorOperand::F16 => ("f16", 2),
        TensorOperand::Bf16 => ("bf16", 2),
        TensorOperand::Tf32 => ("tf32", 1),
        TensorOperand::Fp8 => ("e4m3", 4),
        TensorOperand::Int8 => ("s8", 4),
    };
    let list = |prefix: &str, first: u32, count: u32| {
        (first..first + count).map(|i| format!("{prefix}{i}")).collect::<Vec<_>>().join(",")
    };
    // Volta's m8n8k4 is a product per quad pair: eight threads share one.
    let lanes = if (m, n, k) == (8, 8, 4) { 8 } else { 32 };
    let (accumulator, prefix) = if operand == TensorOperand::Int8 { ("s32", "r") } else { ("f32", "f") };
    let a = m * k / lanes / per_register;
    let (a, b) = (list("r", 8, a), list("r", 8 + a, n * k / lanes / per_register));
    let c = list(prefix, 0, m * n / lanes);
    format!(
        "mma.sync.aligned.m{m}n{n}k{k}.row.col.{accumulator}.{name}.{name}.{accumulator} {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};"
    )
}

#[test]
fn features_and_shapes_are_what_ptxas_accepts() {
    let Some(ptxas) = Ptxas::find() else { return };
    for target in ptxas.targets() {
        for &feature in Feature::ALL {
            let refusal = ptxas.refuses(target, PTX_VERSION, &example(feature));
            assert_eq!(refusal.is_none(), target.supports(feature), "{feature} on {target}: {refusal:?}");
        }
        for form in MMA_FORMS {
            let refusal = ptxas.refuses(target, PTX_VERSION, &mma(form));
            let ours = target.mma_forms().any(|known| known == form);
            assert_eq!(refusal.is_none(), ours, "{form} on {target}: {refusal:?}");
        }
    }
}

#[test]
fn ptx_versions_are_the_lowest() {
    let Some(ptxas) = Ptxas::find() else { return };
    for target in ptxas.targets() {
        let (major, minor) = target.min_ptx_version();
        let older = if minor == 0 { (major - 1, 8) } else { (major, minor - 1) };
        assert_eq!(ptxas.refuses(target, (major, minor), ""), None, "{target}");
        assert!(ptxas.refuses(target, older, "").is_some(), "{target} is known to PTX {older:?}");
    }
}
