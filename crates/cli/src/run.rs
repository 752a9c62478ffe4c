//! `strata run`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use kernels::Outputs;
use lab::Watch;
use lab::tensor_file::{self, Layout};

use crate::arguments::RunArguments;
use crate::progress::Progress;
use crate::{CANCEL, Failure, question};

pub fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let files = Files::of(&arguments.output)?;
    files.check_inputs(arguments)?;
    let device = arguments.device.open(&arguments.gpu)?;
    let inputs = question::tensors(&arguments.tensors)?.context("no input: give --input, or --q, --k and --v")?;
    let problem = question::of_tensors(&inputs, &arguments.mask)?;
    let planner = arguments.tiles.planner(device.planner(), arguments.stratum, &problem)?;
    let plan = planner.plan(&problem, &kernels::Layout::of(&problem, &inputs)?)?;

    let outputs = if device.emulation().is_some() {
        let progress = Progress::new("CTAs");
        progress.begin(&plan.stratum().to_string());
        let show = |done, of| progress.show(done, of);
        let watch = Watch { cancel: Some(&CANCEL), progress: Some(&show), ..Watch::default() };
        let result = lab::execute::execute_plan(plan.kernels, &problem, &inputs, watch);
        progress.end();
        result.map_err(Failure::of_execution)?.outputs
    } else {
        device.stream()?.run(&plan, &inputs).map_err(|error| Failure::No(error.into()))?
    };
    files.write(&outputs, arguments.tensors.layout)?;
    Ok(())
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
