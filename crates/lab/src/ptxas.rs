//! The assembler and the disassembler, when this machine has them.
//!
//! `ptxas` says what a kernel takes (registers, stack, spills); `nvdisasm` shows what it became. Both come with CUDA and, without
//! it, with the PyPI packages `nvidia-cuda-nvcc` and `nvidia-cuda-nvdisasm`.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ptx::{Kernel, Location, LocationId, Statement};
use rayon::prelude::*;
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
    /// Its name in the cubin.
    entry: String,
    /// May hold other kernels too.
    cubin: Arc<[u8]>,
}

/// Time a tool has for one kernel.
const LIMIT: Duration = Duration::from_secs(120);

/// Kernels of one module at most: more would save little, and keep one processor busy while the others have nothing left.
const MOST: usize = 24;

/// Assembles a kernel for its target. Machine code then carries, instead of source lines, the positions of the PTX instructions
/// it came from; this changes no instruction.
///
/// # Errors
/// When `ptxas` is missing, refuses the kernel, or does not end.
pub fn assemble(kernel: &Kernel) -> Result<Assembled, ToolError> {
    Ok(assemble_module(&[kernel])?.remove(0))
}

/// Disassembles what [`assemble`] made of a kernel.
///
/// # Errors
/// When `nvdisasm` is missing, refuses the cubin, does not end, or prints something unexpected.
pub fn disassemble(kernel: &Kernel, assembled: &Assembled) -> Result<Sass, ToolError> {
    Ok(disassemble_module(&[kernel], std::slice::from_ref(assembled))?.remove(0))
}

/// Assembles and disassembles many kernels. As `nvdisasm` takes half a second to start and next to nothing for a kernel, kernels
/// that fit into one module share it.
///
/// # Errors
/// Those of [`assemble`] and [`disassemble`].
pub fn machine_code(kernels: &[&Kernel]) -> Result<Vec<(Assembled, Sass)>, ToolError> {
    let mut alike: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (index, kernel) in kernels.iter().enumerate() {
        // What functions are named may be said only once.
        let alone = (!kernel.functions.is_empty()).then_some(index);
        alike.entry((alone, head_and_entry(kernel, &kernel.name).0)).or_default().push(index);
    }
    let modules: Vec<_> = alike.values().flat_map(|alike| alike.chunks(MOST)).collect();
    let of_modules: Vec<_> = modules
        .into_par_iter()
        .map(|module| {
            let kernels: Vec<_> = module.iter().map(|&index| kernels[index]).collect();
            let assembled = assemble_module(&kernels)?;
            let sass = disassemble_module(&kernels, &assembled)?;
            Ok(module.iter().copied().zip(assembled.into_iter().zip(sass)))
        })
        .collect::<Result<_, ToolError>>()?;
    let by_index: BTreeMap<_, _> = of_modules.into_iter().flatten().collect();
    Ok(by_index.into_values().collect())
}

/// Assembles kernels as one module; they have the same head.
fn assemble_module(kernels: &[&Kernel]) -> Result<Vec<Assembled>, ToolError> {
    let io = |source| ToolError::Io { tool: Tool::Ptxas.name(), source };
    let folder = tempfile::tempdir().map_err(io)?;
    let (source, cubin) = (folder.path().join("kernel.ptx"), folder.path().join("kernel.cubin"));
    let mut entries = Vec::new();
    let mut text = String::new();
    for (index, kernel) in kernels.iter().enumerate() {
        let name = if kernels.len() == 1 { kernel.name.clone() } else { format!("{}_{index}", kernel.name) };
        let (head, entry) = head_and_entry(kernel, &name);
        text += if index == 0 { &head } else { "" };
        text += &entry;
        entries.push(name);
    }
    fs::write(&source, text).map_err(io)?;
    let mut command = Command::new(Tool::Ptxas.find()?);
    command.args(["-v", "-lineinfo", "-arch", &kernels[0].target.to_string(), "-o"]).args([&cubin, &source]);
    let log = run(Tool::Ptxas, kernels, &mut command, folder.path())?;
    let cubin: Arc<[u8]> = fs::read(&cubin).map_err(io)?.into();
    let assembled = entries.into_iter().map(|entry| {
        let resources = resources(&log, &entry).ok_or_else(|| ToolError::Output {
            tool: Tool::Ptxas.name(),
            kernel: entry.clone(),
            what: format!("no register count in\n{log}"),
        })?;
        // Of the only kernel, or by name.
        let serialized =
            |line: &str| line.contains("serialized") && (kernels.len() == 1 || line.contains(&format!("'{entry}'")));
        Ok(Assembled { resources, serialized: log.lines().any(serialized), entry, cubin: Arc::clone(&cubin) })
    });
    assembled.collect()
}

/// Disassembles what [`assemble_module`] made of the kernels.
fn disassemble_module(kernels: &[&Kernel], assembled: &[Assembled]) -> Result<Vec<Sass>, ToolError> {
    let io = |source| ToolError::Io { tool: Tool::Nvdisasm.name(), source };
    let folder = tempfile::tempdir().map_err(io)?;
    let cubin = folder.path().join("kernel.cubin");
    fs::write(&cubin, &assembled[0].cubin).map_err(io)?;
    let mut command = Command::new(Tool::Nvdisasm.find()?);
    command.args(["-g", "-c"]).arg(&cubin);
    let text = run(Tool::Nvdisasm, kernels, &mut command, folder.path())?;
    let sass = kernels.iter().zip(assembled).map(|(kernel, assembled)| {
        let output = |what| ToolError::Output { tool: Tool::Nvdisasm.name(), kernel: assembled.entry.clone(), what };
        let own = match kernels {
            [_] => Some(&*text),
            _ => of_entry(&text, &assembled.entry),
        };
        Sass::parse(own.ok_or_else(|| output("its section".into()))?, kernel).map_err(output)
    });
    sass.collect()
}

/// The module of a kernel by another name, with positions instead of source lines: what stands before its entry, and the rest.
fn head_and_entry(kernel: &Kernel, name: &str) -> (String, String) {
    const ENTRY: &str = "\n.visible .entry ";
    let text = Kernel { name: name.into(), ..by_position(kernel) }.to_string();
    let (head, entry) = text.split_once(ENTRY).unwrap_or((&text, ""));
    (head.to_owned(), format!("{ENTRY}{entry}"))
}

/// The code of an entry in the disassembly of a module: each has a section of its own.
fn of_entry<'a>(text: &'a str, entry: &str) -> Option<&'a str> {
    let (_, from) = text.split_once(&format!("\n.text.{entry}:\n"))?;
    from.split("\n.text.").next()
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
fn run(tool: Tool, kernels: &[&Kernel], command: &mut Command, folder: &Path) -> Result<String, ToolError> {
    let io = |source| ToolError::Io { tool: tool.name(), source };
    let limit = LIMIT * kernels.len() as u32;
    let kernel = || kernels.iter().map(|kernel| &*kernel.name).collect::<Vec<_>>().join("`, `");
    // To a file: a pipe that nobody empties would block a tool that prints much.
    let log = folder.join("log");
    let output = File::create(&log).map_err(io)?;
    let errors = output.try_clone().map_err(io)?;
    let mut child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().map_err(io)?;
    let Some(status) = child.wait_timeout(limit).map_err(io)? else {
        child.kill().and_then(|()| child.wait()).map_err(io)?;
        return Err(ToolError::TimedOut { tool: tool.name(), kernel: kernel(), seconds: limit.as_secs() });
    };
    let log = String::from_utf8_lossy(&fs::read(&log).map_err(io)?).into_owned();
    if status.success() {
        return Ok(log);
    }
    Err(ToolError::Refused { tool: tool.name(), kernel: kernel(), target: kernels[0].target.to_string(), log })
}

/// What `ptxas -v` says of an entry: `Used 72 registers, used 1 barriers, 4096 bytes smem, ...` and `0 bytes stack frame, 0 bytes spill stores, ...`.
fn resources(log: &str, entry: &str) -> Option<Resources> {
    let compiling = "Compiling entry function '";
    let log = log.split(compiling).find(|part| part.strip_prefix(entry).is_some_and(|rest| rest.starts_with('\'')))?;
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
        assert_eq!(resources(log, "k"), Some(expected));
        assert_eq!(resources("nothing", "k"), None);
    }
}
