//! `strata run`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use kernels::{Inputs, Outputs, Problem};
use lab::Watch;
use lab::tensor_file::{self, Layout};

use crate::arguments::{Choice, RunArguments};
use crate::device::Device;
use crate::progress::Progress;
use crate::{CANCEL, Failure, question};

pub fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let files = Files::of(&arguments.output)?;
    files.check_inputs(arguments)?;
    let device = device(arguments)?;
    let inputs = question::tensors(&arguments.tensors)?.context("no input: give --input, or --q, --k and --v")?;
    let problem = question::of_tensors(&inputs, &arguments.mask)?;
    let outputs = if device.is_cpu() {
        on_cpu(&problem, &inputs)?
    } else {
        let planner = arguments.tiles.planner(device.planner()?, arguments.stratum, &problem)?;
        let plan = planner.plan(&problem, &kernels::Layout::of(&problem, &inputs)?)?;
        match device.context() {
            None => emulated(plan, &problem, &inputs)?,
            Some(_) => device.stream()?.run(&plan, &inputs).map_err(|error| Failure::No(error.into()))?,
        }
    };
    files.write(&outputs, arguments.tensors.layout)?;
    Ok(())
}

/// What is asked for, or what computes fastest here.
fn device(arguments: &RunArguments) -> anyhow::Result<flashstrata::Device> {
    let named = arguments.stratum != Choice::Auto || arguments.tiles.any();
    match arguments.device {
        Some(Device::Cpu) if named || arguments.gpu.is_some() => {
            bail!("device is cpu, which has code of its own: --stratum, tiles and --gpu are for cuda and emulator")
        }
        None if !named && arguments.gpu.is_none() => Ok(flashstrata::Device::any()),
        device => device.unwrap_or(Device::Emulator).open(arguments.gpu.as_deref().unwrap_or("RTX 2070")),
    }
}

fn on_cpu(problem: &Problem, inputs: &Inputs) -> Result<Outputs, Failure> {
    let progress = Progress::new("tiles");
    progress.begin("cpu");
    let show = |done, of| progress.show(done as u64, of as u64);
    let options = cpu::Options { cancel: Some(&CANCEL), progress: Some(&show), ..cpu::Options::default() };
    let result = cpu::compute(problem, inputs, options);
    progress.end();
    result.map_err(|error| match error {
        cpu::ComputeError::Attention(cpu::Error::Cancelled) => Failure::Interrupted,
        error => Failure::Input(error.into()),
    })
}

fn emulated(plan: flashstrata::Plan, problem: &Problem, inputs: &Inputs) -> Result<Outputs, Failure> {
    let progress = Progress::new("CTAs");
    progress.begin(&plan.stratum().to_string());
    let show = |done, of| progress.show(done, of);
    let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() };
    let result = lab::execute::execute_plan(plan.kernels, problem, inputs, watch);
    progress.end();
    Ok(result.map_err(Failure::of_execution)?.outputs)
}

/// Where the results go.
enum Files {
    Safetensors(PathBuf),
    Npy { o: PathBuf, lse: PathBuf },
}

impl Files {
    fn of(output: &Path) -> anyhow::Result<Self> {
        match output.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => Ok(Self::Safetensors(output.to_owned())),
            Some("npy") => Ok(Self::Npy { o: output.to_owned(), lse: output.with_extension("lse.npy") }),
            _ => bail!("output is {}: its name must end in .safetensors or .npy", output.display()),
        }
    }

    /// Refuses to write over what is read.
    fn check_inputs(&self, arguments: &RunArguments) -> anyhow::Result<()> {
        let outputs = match self {
            Self::Safetensors(path) => vec![path],
            Self::Npy { o, lse } => vec![o, lse],
        };
        let tensors = &arguments.tensors;
        let inputs = [("--input", &tensors.input), ("--q", &tensors.q), ("--k", &tensors.k), ("--v", &tensors.v)];
        for (name, input) in inputs.into_iter().filter_map(|(name, input)| Some((name, input.as_ref()?))) {
            let same = |output: &&&PathBuf| {
                output.canonicalize().is_ok_and(|output| input.canonicalize().is_ok_and(|input| input == output))
            };
            if let Some(output) = outputs.iter().find(same) {
                bail!("--output would write {} over {name}: give another name", output.display());
            }
        }
        Ok(())
    }

    /// `o` in the layout of the inputs, `lse` as `[batch, heads, seqlen_q]`.
    fn write(&self, outputs: &Outputs, layout: Layout) -> anyhow::Result<()> {
        let o = layout.view(&outputs.out)?;
        match self {
            Self::Safetensors(path) => tensor_file::write_safetensors(path, &[("o", &o), ("lse", &outputs.lse)])?,
            Self::Npy { o: path, lse } => {
                tensor_file::write_npy(lse, &outputs.lse)?;
                tensor_file::write_npy(path, &o)?;
            }
        }
        Ok(())
    }
}
