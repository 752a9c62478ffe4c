//! Times calls: `cargo run --release -p cpu --example time -- "1x16x2048x64 causal"`.

use std::time::Instant;

use kernels::{Inputs, Layout, Outputs, Problem};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for text in std::env::args().skip(1) {
        let problem: Problem = text.parse()?;
        let inputs = Inputs::randn(&problem, 1)?;
        let mut layout = Layout::of(&problem, &inputs)?;
        // `[batch, heads, seqlen, dim]`, as PyTorch has it.
        let bhsd = kernels::Strides::bhsd;
        (layout.q, layout.k) = (
            bhsd(problem.seqlen_q, problem.heads_q, problem.head_dim),
            bhsd(problem.seqlen_k, problem.heads_kv, problem.head_dim),
        );
        (layout.out, layout.v) = (
            bhsd(problem.seqlen_q, problem.heads_q, problem.head_dim_v),
            bhsd(problem.seqlen_k, problem.heads_kv, problem.head_dim_v),
        );
        let outputs = Outputs::nan(&problem)?;
        let mut out = outputs.out.storage().to_vec();
        let mut lse = vec![0f32; problem.total_q() * problem.heads_q];
        let memory = cpu::Memory {
            q: inputs.q.storage().as_ptr(),
            k: inputs.k.storage().as_ptr(),
            v: inputs.v.storage().as_ptr(),
            out: out.as_mut_ptr(),
            lse: lse.as_mut_ptr(),
            new: None,
        };
        let mut times = Vec::new();
        let begin = Instant::now();
        while times.len() < 3 || begin.elapsed().as_secs_f64() < 2.0 {
            let start = Instant::now();
            // SAFETY: the tensors are the problem's.
            unsafe { cpu::attention(&problem, &layout, memory, cpu::Options::default())? };
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{text}: {:.3} ms (least {:.3}), {:.1} GFLOP/s",
            median * 1e3,
            times[0] * 1e3,
            problem.flops() as f64 / median / 1e9
        );
    }
    Ok(())
}
