//! Driving Nsight Compute and Nsight Systems.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use arch::Sm;
use thiserror::Error;

use crate::import::{ImportError, ImportOptions, import, metrics};
use crate::key::AnyRecord;

/// Which launches are profiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// A regular expression that kernel names match; all by default.
    pub kernel: Option<String>,
    /// Matching launches that are left out first: warm-up.
    pub skip: u32,
    /// Launches that are profiled after that.
    pub count: u32,
    /// Only launches in this NVTX range.
    pub nvtx: Option<String>,
}

/// A profile that was not made.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum ProfileError {
    #[error("{tool} is not on this machine: install {what} and put it on PATH")]
    Missing { tool: &'static str, what: &'static str },
    #[error("{tool} could not be run: {source}")]
    Io { tool: &'static str, source: io::Error },
    #[error(
        "the driver lets administrators alone read a GPU's counters (ERR_NVGPUCTRPERM): run as root, or as root set \
         `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d/ and reboot; in a container add the capability \
         SYS_ADMIN. `strata probe` and `strata dig` count on the CPU without any permission"
    )]
    Permission,
    #[error("no kernel was profiled: {hint}. {tool} said:\n{log}")]
    Nothing { tool: &'static str, hint: String, log: String },
    #[error("{tool} failed (status {status}); it said:\n{log}")]
    Failed { tool: &'static str, status: String, log: String },
    #[error(transparent)]
    Import(#[from] ImportError),
}

const NCU: (&str, &str) = ("ncu", "Nsight Compute, of the CUDA toolkit");
const NSYS: (&str, &str) = ("nsys", "Nsight Systems");

/// Lines of a tool's output that an error repeats.
const TOLD: usize = 20;

/// Runs a command under Nsight Compute and reads what it counted. Clocks stay as they are; `keep` is where the report is left.
///
/// # Errors
/// When `ncu` is missing, may not read counters, profiled nothing, or its report cannot be read.
pub fn counters(
    command: &[String],
    launches: &Launches,
    sm: Option<Sm>,
    keep: Option<&Path>,
    options: &ImportOptions,
) -> Result<Vec<AnyRecord>, ProfileError> {
    let folder = tempfile::tempdir().map_err(|source| ProfileError::Io { tool: NCU.0, source })?;
    let report = keep.map_or_else(|| folder.path().join("profile.ncu-rep"), Path::to_path_buf);
    let mut words: Vec<String> =
        ["--target-processes", "all", "--clock-control", "none", "--kernel-name-base", "function"]
            .map(Into::into)
            .to_vec();
    if let Some(kernel) = &launches.kernel {
        words.extend(["-k".into(), format!("regex:{kernel}")]);
    }
    words.extend(["-s".into(), launches.skip.to_string(), "-c".into(), launches.count.max(1).to_string()]);
    if let Some(range) = &launches.nvtx {
        words.extend(["--nvtx".into(), "--nvtx-include".into(), format!("{range}/")]);
    }
    // The section has counters and samples by instruction; the source files, where they are found, are kept with the report.
    words.extend(["--section", "SourceCounters", "--import-source", "yes"].map(Into::into));
    words.extend(["--metrics".into(), metrics(sm).join(",")]);
    words.extend(["-f".into(), "-o".into(), report.display().to_string()]);
    let ended = run(NCU, words.iter().chain(command), folder.path())?;
    if ended.log.contains("ERR_NVGPUCTRPERM") {
        return Err(ProfileError::Permission);
    }
    if !report.is_file() {
        let hint = match (&launches.kernel, &launches.nvtx) {
            (Some(kernel), _) => format!("does a kernel's name match `{kernel}`, after {} launches?", launches.skip),
            (None, Some(range)) => format!("is there a push-pop range `{range}`?"),
            (None, None) => format!("does the command launch more than {} kernels?", launches.skip),
        };
        return Err(ended.error(NCU.0, Some(hint)));
    }
    let tools = [version(NCU.0).map(|version| (NCU.0.to_owned(), version))];
    let options = ImportOptions {
        tools: options.tools.clone().into_iter().chain(tools.into_iter().flatten()).collect(),
        ..options.clone()
    };
    match import(&report, &options) {
        // A report of a format that is not known here: who wrote it can print it.
        Err(ImportError::Broken { .. }) => {
            let page = folder.path().join("raw.csv");
            let words = ["--import".into(), report.display().to_string()]
                .into_iter()
                .chain(["--csv", "--page", "raw", "--print-units", "base", "--print-fp"].map(String::from));
            let ended = run(NCU, words.collect::<Vec<_>>().iter(), folder.path())?;
            if !ended.success {
                return Err(ended.error(NCU.0, None));
            }
            fs::write(&page, &ended.log).map_err(|source| ProfileError::Io { tool: NCU.0, source })?;
            Ok(import(&page, &options)?)
        }
        read => Ok(read?),
    }
}

/// Runs a command under Nsight Systems and reads the times of its kernels.
///
/// # Errors
/// When `nsys` is missing or fails, or the command launches no kernel.
pub fn timeline(
    command: &[String],
    keep: Option<&Path>,
    options: &ImportOptions,
) -> Result<Vec<AnyRecord>, ProfileError> {
    let folder = tempfile::tempdir().map_err(|source| ProfileError::Io { tool: NSYS.0, source })?;
    let base = keep.map_or_else(|| folder.path().join("timeline"), |path| path.with_extension(""));
    let words = ["profile", "-t", "cuda,nvtx", "--export", "sqlite", "-f", "true", "-o"].map(String::from);
    let output = [base.display().to_string()];
    let ended = run(NSYS, words.iter().chain(&output).chain(command), folder.path())?;
    let export = base.with_extension("sqlite");
    if !export.is_file() {
        return Err(ended.error(NSYS.0, None));
    }
    let tools = [version(NSYS.0).map(|version| (NSYS.0.to_owned(), version))];
    let options = ImportOptions {
        tools: options.tools.clone().into_iter().chain(tools.into_iter().flatten()).collect(),
        ..options.clone()
    };
    Ok(import(&export, &options)?)
}

/// How a tool ended.
struct Ended {
    success: bool,
    status: String,
    log: String,
}

impl Ended {
    /// The error of a run without a result; with a hint, of one that went well.
    fn error(self, tool: &'static str, hint: Option<String>) -> ProfileError {
        let lines: Vec<&str> = self.log.lines().collect();
        let log = lines[lines.len().saturating_sub(TOLD)..].join("\n");
        match hint {
            Some(hint) if self.success => ProfileError::Nothing { tool, hint, log },
            _ => ProfileError::Failed { tool, status: self.status, log },
        }
    }
}

/// Runs a tool to its end; Ctrl-C reaches it too, and what it wrote until then is read.
fn run<'a>(
    (tool, what): (&'static str, &'static str),
    words: impl Iterator<Item = &'a String>,
    folder: &Path,
) -> Result<Ended, ProfileError> {
    let io = |source| ProfileError::Io { tool, source };
    // To a file: a pipe that nobody empties would block a command that prints much.
    let path: PathBuf = folder.join("log");
    let log = File::create(&path).map_err(io)?;
    let errors = log.try_clone().map_err(io)?;
    let status = Command::new(tool).args(words).stdin(Stdio::null()).stdout(log).stderr(errors).status();
    let status = status.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ProfileError::Missing { tool, what },
        _ => ProfileError::Io { tool, source },
    })?;
    let log = String::from_utf8_lossy(&fs::read(&path).map_err(io)?).into_owned();
    let code = status.code().map_or_else(|| "by a signal".into(), |code| code.to_string());
    Ok(Ended { success: status.success(), status: code, log })
}

/// `Version 2025.3.1.0 (build ...)` is `2025.3.1.0`.
fn version(tool: &str) -> Option<String> {
    let output = Command::new(tool).arg("--version").stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut words = text.split_whitespace();
    words.find(|word| word.eq_ignore_ascii_case("version"))?;
    words.next().map(|word| word.trim_end_matches(',').to_owned())
}
