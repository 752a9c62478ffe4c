//! Every kernel of the set, for every architecture it claims, is accepted by the real `ptxas`, without spills.
//!
//! `ptxas` is the one the environment variable `STRATA_PTXAS` names, or the one on `PATH`. Without one the test says that
//! it was skipped, and fails in CI. With `STRATA_PTXAS_REPORT=1` it prints what each kernel takes.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::process::Command;
use std::sync::Mutex;

use kernels::configurations::configurations;
use rayon::prelude::*;

fn ptxas() -> Option<OsString> {
    let program = env::var_os("STRATA_PTXAS").unwrap_or_else(|| "ptxas".into());
    if Command::new(&program).arg("--version").output().is_err() {
        assert!(env::var_os("CI").is_none(), "CI needs ptxas: put it on PATH or name it in STRATA_PTXAS");
        eprintln!("skipped: ptxas not found");
        return None;
    }
    Some(program)
}

#[test]
fn ptxas_accepts_every_kernel() {
    let Some(ptxas) = ptxas() else { return };
    let kernels = configurations().unwrap();
    assert!(kernels.len() < 350);
    let folder = tempfile::tempdir().unwrap();
    let failures = Mutex::new(Vec::new());
    kernels.par_iter().enumerate().for_each(|(index, (name, program))| {
        let path = |ending: &str| folder.path().join(format!("{index}.{ending}"));
        fs::write(path("ptx"), program.kernel.to_string()).unwrap();
        let target = program.kernel.target.to_string();
        let output = Command::new(&ptxas)
            .args(["-v", "-arch", &target, "-o"])
            .args([path("cubin"), path("ptx")])
            .output()
            .unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        let spills = !log.contains("0 bytes spill stores, 0 bytes spill loads");
        // It says so where matrix instructions that could run on have to wait for each other.
        if !output.status.success() || spills || log.contains("serialized") {
            failures.lock().unwrap().push(format!("{name}: {log}"));
        }
        if env::var_os("STRATA_PTXAS_REPORT").is_some() {
            let used = log.lines().find(|line| line.contains("Used")).unwrap_or_default();
            println!(
                "{name}: {}, {} bytes dynamic shared",
                used.trim_start_matches("ptxas info    : "),
                program.shared.bytes()
            );
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
