//! Shows the library on a GPU: each problem is planned, computed through device memory on an asynchronous stream, held against
//! the f64 reference, timed, tuned, and computed again on the tuned tiles. Ends with status 1 when something is wrong.
//!
//! `cargo run --release -p flashstrata --example chip [-- --no-tune] [PROBLEM ...]`
//!
//! It says of the host: the first call with everything (planning, the driver's compiler, copies), and what a further call of
//! a plan that is loaded costs before it returns. Without a GPU it runs tiny problems on the emulator and measures nothing.

use std::process::ExitCode;
use std::time::Instant;

use flashstrata::tune::{CudaTimer, TuneOptions, candidates, tune};
use flashstrata::{
    Device, DeviceBuffer, Error, Inputs, Layout, Operands, Outputs, Plan, Planner, Problem, Stream, Table, Tensor,
    Watch,
};
use kernels::reference::{all_heads, plain_heads, reference_heads};

/// On a GPU: both masks, the head dimensions of models, types, sharing of heads, windows, a packed batch, few queries.
const PROBLEMS: [&str; 12] = [
    "2x16x2048x128 bf16",
    "2x16x2048x128 bf16 causal",
    "4x32x1024x64 f16 causal",
    "1x8x4096x256 bf16",
    "1x32/8x4096x128 bf16 causal",
    "1x8x1000/1500x96/64 f16 causal",
    "2x8x2048x128 bf16 window=256,0",
    "1x4x512x33 f16",
    "1x8x1024x64",
    "1x8x1024x128 causal",
    "1x32/8x1/8192x128 f16",
    "3x8x700x64 f16 causal cu_seqlens_q=0,700,700,1000 cu_seqlens_k=0,512,600,1300",
];

const TINY: [&str; 3] = ["1x2x70x32 causal", "1x4/2x33/50x16 f16", "1x2x1/64x24"];

/// The most heads that are compared: the reference takes seconds each.
const COMPARED: usize = 3;

fn main() -> ExitCode {
    let (flags, given): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|word| word.starts_with("--"));
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(why) => {
            println!("emulated, slowly: {why}");
            Device::emulated("RTX 2070").expect("a board of the table")
        }
    };
    println!("{device}");
    let own = if device.context().is_some() { PROBLEMS.as_slice() } else { TINY.as_slice() };
    let problems = if given.is_empty() { own.iter().map(ToString::to_string).collect() } else { given };
    let mut wrong = 0;
    for text in problems {
        if let Err(why) = show(&device, &text, !flags.contains(&"--no-tune".into())) {
            println!("  WRONG {text}: {why}");
            wrong += 1;
        }
    }
    println!("{wrong} wrong");
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn show(device: &Device, text: &str, tuned: bool) -> Result<(), Box<dyn std::error::Error>> {
    let problem: Problem = text.parse()?;
    let inputs = Inputs::randn(&problem, 1)?;
    let layout = Layout::contiguous(&problem);
    let stream = device.stream()?;
    let begin = Instant::now();
    let planner = device.planner()?;
    let plan = planner.plan(&problem, &layout)?;
    let planned = begin.elapsed();
    print!("\n{plan}");
    compute(&stream, &plan, &inputs)?;
    println!("  planned in {planned:.1?}, first result after {:.1?}, both right", begin.elapsed());
    if device.context().is_none() || !tuned {
        return Ok(());
    }
    let options = TuneOptions::default();
    let found = candidates(&planner, &problem, &layout, &options)?;
    let begin = Instant::now();
    let result = tune(&found, &mut CudaTimer::new(&stream, &problem)?, &options, Watch::default())?;
    let rate = problem.flops() as f64 / result.entry.median_ms / 1e9;
    println!("  tuned in {:.1?}: {}; {rate:.1} TFLOP/s", begin.elapsed(), result.entry);
    for measured in &result.measured {
        let candidate = &found.kept[measured.candidate];
        let modelled = candidate.modelled_clocks / found.kept[0].modelled_clocks;
        match &measured.outcome {
            Ok(ms) => println!("    {ms:9.4} ms, modelled {modelled:.2} of the default: {candidate}"),
            Err(why) => println!("    not timed: {candidate}: {why}"),
        }
    }
    let planner: Planner = planner.tuned(Table::new([result.entry]));
    compute(&stream, &planner.plan(&problem, &layout)?, &inputs)?;
    println!("  right on the tuned tiles");
    Ok(())
}

/// Computes through device memory, four times: on the stream's own workspace, on the caller's, twice behind each other.
fn compute(stream: &Stream, plan: &Plan, inputs: &Inputs) -> Result<(), Box<dyn std::error::Error>> {
    let attention = stream.device().load(plan.clone())?;
    let upload = |tensor: &Tensor| -> Result<DeviceBuffer, Box<dyn std::error::Error>> {
        Ok(stream.upload(&tensor.to_bytes()?)?)
    };
    let (q, k, v) = (upload(&inputs.q)?, upload(&inputs.k)?, upload(&inputs.v)?);
    let (out_bytes, lse_bytes) = (plan.out_bytes() as usize, plan.lse_bytes() as usize);
    let mut out = stream.upload(&vec![0xffu8; out_bytes])?;
    let mut lse = stream.upload(&vec![0xffu8; lse_bytes])?;
    let offsets = match &plan.problem.varlen {
        Some(varlen) => Some((stream.upload(&varlen.cu_seqlens_q)?, stream.upload(&varlen.cu_seqlens_k)?)),
        None => None,
    };
    let mut workspace = stream.upload(&vec![0xa5u8; plan.workspace_bytes() as usize])?;
    let mut enqueue = |own: bool| -> Result<(), Error> {
        let mut operands = Operands::new(&q, &k, &v, &mut out, &mut lse);
        if let Some((q, k)) = &offsets {
            operands = operands.cu_seqlens(q, k);
        }
        if !own {
            operands = operands.workspace(&mut workspace);
        }
        stream.enqueue(&attention, operands)
    };
    enqueue(true)?;
    stream.synchronize()?;
    enqueue(false)?;
    stream.synchronize()?;
    let begin = Instant::now();
    const CALLS: u32 = 20;
    let calls = if stream.device().context().is_none() { 1 } else { CALLS };
    for _ in 0..calls {
        enqueue(true)?;
    }
    let host = begin.elapsed() / calls;
    stream.synchronize()?;
    println!("  a further call returns after {host:.1?}, and ends {:.1?} after it began", begin.elapsed() / calls);

    let problem = &plan.problem;
    let outputs = Outputs {
        out: Tensor::from_bytes(problem.dtype, &problem.out_shape(), out.read()?)?,
        lse: Tensor::from_bytes(flashstrata::Dtype::F32, &problem.lse_shape(), lse.read()?)?,
    };
    // The result of those heads alone, so that the rest need not be computed in f64.
    let all = all_heads(problem);
    let step = all.len().div_ceil(COMPARED).max(1);
    let heads: Vec<_> = all.into_iter().rev().step_by(step).collect();
    let reference = reference_heads(problem, inputs, &heads)?;
    let plain = plain_heads(problem, inputs, &heads)?;
    let verdict = kernels::check(problem, &outputs, &reference, &plain)?;
    match verdict.wrong {
        Some(wrong) => Err(wrong.to_string().into()),
        None => Ok(()),
    }
}
