//! The strata on the emulator: the contract's cases, shapes off the tiles' borders, and the counters they must show.

mod contract;
mod counters;

use arch::{Sm, Target};
use emulator::{Memory, Options, Report};
use kernels::{Buffers, Inputs, Layout, Outputs, Plan, Problem, Stratum, Tensor, Tiles, plan};

/// What a stratum computed and counted.
struct Ran {
    plan: Plan,
    outputs: Outputs,
    reports: Vec<Report>,
}

type Failure = Box<dyn std::error::Error>;

/// Runs a stratum on the emulator with all checks on, the output filled with NaN before.
fn run(stratum: Stratum, sm: Sm, problem: &Problem, inputs: &Inputs, tiles: Option<Tiles>) -> Result<Ran, Failure> {
    let layout = Layout::of(problem, inputs)?;
    let plan = plan(stratum, problem, Target::best(sm), &layout, tiles)?;
    let before = Outputs::nan(problem)?;
    let mut memory = Memory::new();
    let mut place = |tensor: &Tensor| -> Result<u64, Failure> {
        Ok(memory.alloc_bytes(tensor.storage())? + (tensor.offset() * tensor.dtype().bytes()) as u64)
    };
    let (q, k, v) = (place(&inputs.q)?, place(&inputs.k)?, place(&inputs.v)?);
    let (out, lse) = (place(&before.out)?, place(&before.lse)?);
    let workspaces = plan.workspaces.iter().map(|w| memory.alloc(w.bytes)).collect::<Result<_, _>>()?;
    let buffers = Buffers { q, k, v, out, lse, workspaces };
    let mut reports = Vec::new();
    for launch in plan.launches(&buffers)? {
        reports.push(emulator::run(&memory, &launch, &Options::new(sm))?);
    }
    let read = |before: &Tensor, address| -> Result<Tensor, Failure> {
        let bytes = memory.read(address, before.storage().len() as u64)?;
        Ok(Tensor::from_bytes(before.dtype(), before.shape(), bytes)?)
    };
    let outputs = Outputs { out: read(&before.out, out)?, lse: read(&before.lse, lse)? };
    Ok(Ran { plan, outputs, reports })
}
