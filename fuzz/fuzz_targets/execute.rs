//! Any kernel that parses runs to a report or an error within its budget.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ptx::{Argument, Launch};

fuzz_target!(|text: &str| {
    let Ok(kernels) = ptx::parse(text) else { return };
    for kernel in &kernels {
        let mut memory = emulator::Memory::new();
        let Ok(buffer) = memory.alloc_bytes(&[0x3f; 4096]) else { return };
        // Each parameter gets the pointer's bytes, as many of them as it has room for.
        let bytes = |size: u64| buffer.to_le_bytes().into_iter().chain(std::iter::repeat(0)).take(size.min(4096) as usize).collect();
        let arguments = kernel.params.iter().map(|param| Argument::Bytes(bytes(param.bytes()))).collect();
        let block = kernel.required_block.unwrap_or([64, 1, 1]);
        let launch = Launch { kernel, grid: [2, 1, 1], block, cluster: [1, 1, 1], dynamic_shared: 1024, arguments };
        let options = emulator::Options { budget_per_cta: 10_000, threads: 1, ..emulator::Options::new(arch::Sm::Sm80) };
        let _ = emulator::run(&memory, &launch, &options);
    }
});
