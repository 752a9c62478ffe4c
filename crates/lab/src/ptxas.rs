//! The assembler and the disassembler, when this machine has them.
//!
//! `ptxas` says what a kernel takes (registers, stack, spills); `nvdisasm` shows what it became. Both come with CUDA and, without
//! it, with the PyPI packages `nvidia-cuda-nvcc` and `nvidia-cuda-nvdisasm`.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use ptx::{Kernel, Location, LocationId, Statement};
use thiserror::Error;
use wait_timeout::ChildExt;

use crate::sass::Sass;

/// A program of the CUDA toolkit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Assembles PTX.
    Ptxas,
    /// Disassembles a cubin.
    Nvdisasm,
}

impl Tool {
    const fn name(self) -> &'static str {
        match self {
            Self::Ptxas => "ptxas",
            Self::Nvdisasm => "nvdisasm",
        }
    }

    const fn variable(self) -> &'static str {
        match self {
            Self::Ptxas => "STRATA_PTXAS",
            Self::Nvdisasm => "STRATA_NVDISASM",
        }
    }

    const fn package(self) -> &'static str {
        match self {
            Self::Ptxas => "nvidia-cuda-nvcc",
            Self::Nvdisasm => "nvidia-cuda-nvdisasm",
        }
    }

    /// Where the program is: what the environment variable `STRATA_PTXAS` or `STRATA_NVDISASM` names, else the one on `PATH`, else
    /// that of `CUDA_HOME`, else that of the PyPI package in the Python on `PATH`. The answer is looked for once.
    ///
    /// # Errors
    /// When it is in none of these places.
    pub fn find(self) -> Result<&'static Path, ToolError> {
        static FOUND: [OnceLock<Option<PathBuf>>; 2] = [OnceLock::new(), OnceLock::new()];
        let found = FOUND[self as usize].get_or_init(|| self.search());
        found.as_deref().ok_or(ToolError::Missing {
            tool: self.name(),
            variable: self.variable(),
            package: self.package(),
        })
    }

    /// The version it prints, as `13.5.37`; asked for once.
    pub fn version(self) -> Option<&'static str> {
        static VERSIONS: [OnceLock<Option<String>>; 2] = [OnceLock::new(), OnceLock::new()];
        let ask = || {
            let output = Command::new(self.find().ok()?).arg("--version").stderr(Stdio::null()).output().ok()?;
            let text = String::from_utf8(output.stdout).ok()?;
            // `Cuda compilation tools, release 13.5, V13.5.37`
            text.split_whitespace().find_map(|word| Some(word.strip_prefix('V')?.to_owned()))
        };
        VERSIONS[self as usize].get_or_init(ask).as_deref()
    }

    fn search(self) -> Option<PathBuf> {
        let named = env::var_os(self.variable()).map(PathBuf::from);
        let on_path = || {
            env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(self.name())).find(|path| path.is_file())
        };
        let of_toolkit = || {
            Some(PathBuf::from(env::var_os("CUDA_HOME")?).join("bin").join(self.name())).filter(|path| path.is_file())
        };
        named.or_else(on_path).or_else(of_toolkit).or_else(|| self.of_python())
    }

    fn of_python(self) -> Option<PathBuf> {
        let script =
            "import importlib.util as u; print(*(u.find_spec('nvidia') or [0]).submodule_search_locations, sep='\\n')";
        let output = Command::new("python3").args(["-c", script]).stderr(Stdio::null()).output().ok()?;
        let roots = String::from_utf8(output.stdout).ok()?;
        let folders = roots.lines().filter_map(|root| fs::read_dir(root).ok()).flatten().flatten();
        folders.map(|folder| folder.path().join("bin").join(self.name())).find(|path| path.is_file())
    }
}

/// Why a tool gave no answer.
#[derive(Debug, Error)]
pub enum ToolError {
    /// It is not there.
    #[error("{tool} is not on this machine: install it (`pip install {package}`) or name it in {variable}")]
    Missing {
        /// Its name.
        tool: &'static str,
        /// The variable that may name it.
        variable: &'static str,
        /// The PyPI package that has it.
        package: &'static str,
    },
    /// It said no.
    #[error("{tool} refused `{kernel}` for {target}:\n{log}")]
    Refused {
        /// Its name.
        tool: &'static str,
        /// The kernel.
        kernel: String,
        /// What it was assembled for.
        target: String,
        /// What it said.
        log: String,
    },
    /// It did not end in time.
    #[error("{tool} did not end within {seconds} s on `{kernel}`")]
    TimedOut {
        /// Its name.
        tool: &'static str,
        /// The kernel.
        kernel: String,
        /// How long it had.
        seconds: u64,
    },
    /// It could not be run.
    #[error("{tool} could not be run: {source}")]
    Io {
        /// Its name.
        tool: &'static str,
        /// Why.
        source: io::Error,
    },
    /// What it printed was not understood.
    #[error("{tool} printed something else than expected for `{kernel}`: {what}")]
    Output {
        /// Its name.
        tool: &'static str,
        /// The kernel.
        kernel: String,
        /// What was missing.
        what: String,
    },
}

/// What a kernel takes, per thread unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers.
    pub registers: u32,
    /// Bytes of stack.
    pub stack_bytes: u32,
    /// Bytes of stores to it because registers did not suffice.
    pub spill_store_bytes: u32,
    /// Bytes of loads from it for the same reason.
    pub spill_load_bytes: u32,
    /// Bytes of shared memory per block that the kernel declares itself.
    pub static_shared_bytes: u32,
}

/// A kernel in machine code.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// What it takes.
    pub resources: Resources,
    /// Whether `wgmma` instructions that could run on have to wait for each other, which `ptxas` says of itself.
    pub serialized: bool,
    kernel: String,
    cubin: Vec<u8>,
}

/// Time a tool has for one kernel.
const LIMIT: Duration = Duration::from_secs(120);

/// Assembles a kernel for its target. Machine code then carries, instead of source lines, the positions of the PTX instructions
/// it came from; this changes no instruction.
///
/// # Errors
/// When `ptxas` is missing, refuses the kernel, or does not end.
pub fn assemble(kernel: &Kernel) -> Result<Assembled, ToolError> {
    let io = |source| ToolError::Io { tool: Tool::Ptxas.name(), source };
    let folder = tempfile::tempdir().map_err(io)?;
    let (source, cubin) = (folder.path().join("kernel.ptx"), folder.path().join("kernel.cubin"));
    fs::write(&source, by_position(kernel).to_string()).map_err(io)?;
    let mut command = Command::new(Tool::Ptxas.find()?);
    command.args(["-v", "-lineinfo", "-arch", &kernel.target.to_string(), "-o"]).args([&cubin, &source]);
    let log = run(Tool::Ptxas, kernel, &mut command, folder.path())?;
    let resources = resources(&log).ok_or_else(|| ToolError::Output {
        tool: "ptxas",
        kernel: kernel.name.clone(),
        what: format!("no register count in\n{log}"),
    })?;
    let serialized = log.contains("serialized");
    Ok(Assembled { resources, serialized, kernel: kernel.name.clone(), cubin: fs::read(&cubin).map_err(io)? })
}

/// Disassembles what [`assemble`] made of a kernel.
///
/// # Errors
/// When `nvdisasm` is missing, refuses the cubin, does not end, or prints something unexpected.
pub fn disassemble(kernel: &Kernel, assembled: &Assembled) -> Result<Sass, ToolError> {
    let io = |source| ToolError::Io { tool: Tool::Nvdisasm.name(), source };
    let folder = tempfile::tempdir().map_err(io)?;
    let cubin = folder.path().join("kernel.cubin");
    fs::write(&cubin, &assembled.cubin).map_err(io)?;
    let mut command = Command::new(Tool::Nvdisasm.find()?);
    command.args(["-g", "-c"]).arg(&cubin);
    let text = run(Tool::Nvdisasm, kernel, &mut command, folder.path())?;
    Sass::parse(&text, kernel).map_err(|what| ToolError::Output {
        tool: "nvdisasm",
        kernel: assembled.kernel.clone(),
        what,
    })
}

/// The kernel with the position of each instruction, counted from 1, as its source line.
fn by_position(kernel: &Kernel) -> Kernel {
    let mut kernel = Kernel { files: vec!["kernel.ptx".into()], locations: Vec::new(), ..kernel.clone() };
    let mut locations = Vec::new();
    for statement in kernel.statements_mut() {
        if let Statement::Instruction(instruction) = statement {
            let position = locations.len() as u32;
            locations.push(Location { file: 0, line: position + 1, column: 0, inlined_at: None });
            instruction.location = Some(LocationId(position));
        }
    }
    Kernel { locations, ..kernel }
}

/// Runs a tool to its end, and returns what it printed on both streams.
fn run(tool: Tool, kernel: &Kernel, command: &mut Command, folder: &Path) -> Result<String, ToolError> {
    let io = |source| ToolError::Io { tool: tool.name(), source };
    // To a file: a pipe that nobody empties would block a tool that prints much.
    let log = folder.join("log");
    let output = File::create(&log).map_err(io)?;
    let errors = output.try_clone().map_err(io)?;
    let mut child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().map_err(io)?;
    let Some(status) = child.wait_timeout(LIMIT).map_err(io)? else {
        child.kill().and_then(|()| child.wait()).map_err(io)?;
        return Err(ToolError::TimedOut { tool: tool.name(), kernel: kernel.name.clone(), seconds: LIMIT.as_secs() });
    };
    let log = String::from_utf8_lossy(&fs::read(&log).map_err(io)?).into_owned();
    if status.success() {
        return Ok(log);
    }
    Err(ToolError::Refused { tool: tool.name(), kernel: kernel.name.clone(), target: kernel.target.to_string(), log })
}

/// What `ptxas -v` says: `Used 72 registers, used 1 barriers, 4096 bytes smem, ...` and `0 bytes stack frame, 0 bytes spill stores, ...`.
fn resources(log: &str) -> Option<Resources> {
    let before = |what: &str| -> Option<u32> {
        let at = log.find(what)?;
        log[..at].split_whitespace().next_back()?.parse().ok()
    };
    // A warning may speak of registers too.
    let (_, used) = log.split_once("Used ")?;
    Some(Resources {
        registers: used.split_whitespace().next()?.parse().ok()?,
        stack_bytes: before(" bytes stack frame").unwrap_or(0),
        spill_store_bytes: before(" bytes spill stores").unwrap_or(0),
        spill_load_bytes: before(" bytes spill loads").unwrap_or(0),
        static_shared_bytes: before(" bytes smem").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_from_the_log() {
        let log = "ptxas info    : (C7517) warpgroup.wait is injected to allow use of registers defined by GMMA in function 'k'\n\
                   ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n    208 bytes stack frame, 248 bytes spill stores, 228 bytes spill loads\n\
                   ptxas info    : Used 255 registers, used 1 barriers, 208 bytes cumulative stack size, 1024 bytes smem\n";
        let expected = Resources {
            registers: 255,
            stack_bytes: 208,
            spill_store_bytes: 248,
            spill_load_bytes: 228,
            static_shared_bytes: 1024,
        };
        assert_eq!(resources(log), Some(expected));
        assert_eq!(resources("nothing"), None);
    }
}
