//! How much memory a call takes beside its tensors.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::{Dtype, Layout, Problem};

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, and a count.
struct Counting;

// SAFETY: each call is the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        let now = NOW.fetch_add(block.size(), Ordering::Relaxed) + block.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, block: Block) {
        NOW.fetch_sub(block.size(), Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.dealloc(memory, block) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// 32k tokens, causal so that it takes seconds: nothing is as large as the scores, nor grows with the number of keys.
#[test]
fn a_call_takes_64_megabytes_at_most() {
    for (text, dtype) in [("1x1x32768x128 causal", Dtype::F32), ("1x2x32768x128 bf16 causal", Dtype::Bf16)] {
        let problem: Problem = text.parse().unwrap();
        let tensor = vec![0u32; 32768 * problem.heads_q * 128 * dtype.bytes() / 4];
        let mut out = tensor.clone();
        let mut lse = vec![0f32; 32768 * problem.heads_q];
        let memory = cpu::Memory {
            q: tensor.as_ptr().cast(),
            k: tensor.as_ptr().cast(),
            v: tensor.as_ptr().cast(),
            out: out.as_mut_ptr().cast(),
            lse: lse.as_mut_ptr(),
            new: None,
        };
        let before = NOW.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        // SAFETY: the tensors are the problem's, contiguous and aligned.
        unsafe { cpu::attention(&problem, &Layout::contiguous(&problem), memory, cpu::Options::default()) }.unwrap();
        let taken = MOST.load(Ordering::Relaxed) - before;
        assert!(taken < 64 << 20, "{text}: {taken} bytes");
        println!("{text}: {taken} bytes");
    }
}
