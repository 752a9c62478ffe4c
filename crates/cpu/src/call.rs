//! A call: what is computed, and where its rows are.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kernels::{Dtype, Layout, Problem, Strides};

use crate::buffer::Buffer;
use crate::cache::NewMemory;

/// Where a call's tensors begin.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// The first element of the queries.
    pub q: *const u8,
    /// The first element of the keys.
    pub k: *const u8,
    /// The first element of the values.
    pub v: *const u8,
    /// The first element of the output.
    pub out: *mut u8,
    /// `[batch, heads_q, seqlen_q]`, or packed `[heads_q, total_q]`.
    pub lse: *mut f32,
    /// What is appended to a cache, whose keys and values are then written.
    pub new: Option<NewMemory>,
}

/// A call, as its tiles see it.
pub(crate) struct Call<'a> {
    pub problem: &'a Problem,
    layout: &'a Layout,
    memory: Memory,
    /// Whether a score is a product of a query and a key by the scale, and no more: then products are kept as scores.
    pub plain: bool,
    /// Of scores, as they are kept, for `e^` and for `2^`.
    scale: f64,
    pub scale_log2: f32,
}

// SAFETY: threads read the inputs, which nobody writes during a call (`attention`), and each writes rows of its own.
unsafe impl Sync for Call<'_> {}

/// The keys or the values of a KV head.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    /// The first element of key 0.
    pub first: *const u8,
    /// Elements from a row to the next.
    pub stride: usize,
    /// Elements of a row.
    pub dim: usize,
}

impl<'a> Call<'a> {
    pub fn new(problem: &'a Problem, layout: &'a Layout, memory: Memory) -> Self {
        let plain = problem.softcap.is_none() && problem.alibi_slopes.is_none();
        let scale = if plain { problem.scale() } else { 1.0 };
        Self { problem, layout, memory, plain, scale, scale_log2: (scale * std::f64::consts::LOG2_E) as f32 }
    }

    pub fn dtype(&self) -> Dtype {
        self.problem.dtype
    }

    /// Elements to a row, from the tensor's first.
    fn offset(&self, strides: Strides, entry: usize, token: usize, head: usize) -> usize {
        let batch = if self.problem.varlen.is_some() { 0 } else { entry * strides.batch };
        batch + token * strides.seq + head * strides.head
    }

    /// The first element of a query's row.
    pub fn query(&self, entry: usize, head: usize, i: usize) -> *const u8 {
        let token = self.problem.tokens(entry).0.start + i;
        let offset = self.offset(self.layout.q, entry, token, head);
        // SAFETY: the layout's rows are within the tensor (`attention`).
        unsafe { self.memory.q.add(offset * self.dtype().bytes()) }
    }

    pub fn keys(&self, entry: usize, kv_head: usize) -> Rows {
        self.rows(self.memory.k, self.layout.k, entry, kv_head, self.problem.head_dim)
    }

    pub fn values(&self, entry: usize, kv_head: usize) -> Rows {
        self.rows(self.memory.v, self.layout.v, entry, kv_head, self.problem.head_dim_v)
    }

    fn rows(&self, tensor: *const u8, strides: Strides, entry: usize, kv_head: usize, dim: usize) -> Rows {
        let token = self.problem.tokens(entry).1.start;
        let offset = self.offset(strides, entry, token, kv_head);
        // SAFETY: the layout's rows are within the tensor (`attention`).
        Rows { first: unsafe { tensor.add(offset * self.dtype().bytes()) }, stride: strides.seq, dim }
    }

    /// Writes a query's result: its output row, and `lse` from the largest score and the sum of exponentials.
    ///
    /// # Safety
    /// No other thread writes or reads the row.
    pub unsafe fn write(&self, entry: usize, head: usize, i: usize, out: &[f32], max: f32, sum: f32) {
        let tokens = self.problem.tokens(entry).0;
        let row = match self.problem.varlen {
            Some(_) => head * self.problem.total_q() + tokens.start + i,
            None => (entry * self.problem.heads_q + head) * self.problem.seqlen_q + i,
        };
        // Of a row that sees no key the sum is 0, and its logarithm minus infinity.
        let lse = f64::from(max) * self.scale + f64::from(sum).ln();
        let lse = if sum == 0.0 { f32::NEG_INFINITY } else { lse as f32 };
        let offset = self.offset(self.layout.out, entry, tokens.start + i, head);
        // SAFETY: the row is the caller's, and within the tensors (`attention`).
        unsafe {
            self.memory.lse.add(row).write(lse);
            narrow(self.dtype(), out, self.memory.out.add(offset * self.dtype().bytes()));
        }
    }
}

/// Writes elements, rounded to the type.
///
/// # Safety
/// There is room for them at `to`.
pub(crate) unsafe fn narrow(dtype: Dtype, from: &[f32], to: *mut u8) {
    // SAFETY: as the caller says.
    unsafe {
        match dtype {
            Dtype::F32 => std::slice::from_raw_parts_mut(to.cast(), from.len()).copy_from_slice(from),
            Dtype::F16 => std::slice::from_raw_parts_mut(to.cast::<f16>(), from.len()).convert_from_f32_slice(from),
            Dtype::Bf16 => std::slice::from_raw_parts_mut(to.cast::<bf16>(), from.len()).convert_from_f32_slice(from),
        }
    }
}

/// The elements at `from` as f32.
///
/// # Safety
/// There are as many as `to` has.
#[inline(always)]
pub(crate) unsafe fn widen(dtype: Dtype, from: *const u8, to: &mut [f32]) {
    // SAFETY: as the caller says.
    unsafe {
        match dtype {
            Dtype::F32 => to.copy_from_slice(std::slice::from_raw_parts(from.cast(), to.len())),
            Dtype::F16 => std::slice::from_raw_parts(from.cast::<f16>(), to.len()).convert_to_f32_slice(to),
            Dtype::Bf16 => {
                let from = std::slice::from_raw_parts(from.cast::<u16>(), to.len());
                to.iter_mut().zip(from).for_each(|(to, &from)| *to = f32::from_bits(u32::from(from) << 16));
            }
        }
    }
}

/// Asks for some bytes, where the processor can be told to: to the second-level cache, or to the first as well.
#[inline(always)]
pub(crate) fn prefetch<const FIRST_LEVEL: bool>(first: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let address = first.wrapping_add(line).cast();
        // SAFETY: nothing is read; any address will do.
        unsafe {
            if FIRST_LEVEL { _mm_prefetch::<_MM_HINT_T0>(address) } else { _mm_prefetch::<_MM_HINT_T1>(address) }
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, bytes);
}

impl Rows {
    /// The first element of a row.
    ///
    /// # Safety
    /// There is such a row.
    pub unsafe fn row(self, dtype: Dtype, row: usize) -> *const u8 {
        // SAFETY: as the caller says.
        unsafe { self.first.add(row * self.stride * dtype.bytes()) }
    }

    /// Has rows brought to the second-level cache, where the processor can be told to.
    #[inline(always)]
    pub fn prefetch(self, dtype: Dtype, rows: Range<usize>) {
        for row in rows {
            let first = self.first.wrapping_add(row * self.stride * dtype.bytes());
            prefetch::<false>(first, self.dim * dtype.bytes());
        }
    }

    /// Copies some rows as f32, `stride` elements from one to the next.
    ///
    /// # Safety
    /// There are such rows.
    #[inline(always)]
    pub unsafe fn copy(self, dtype: Dtype, rows: Range<usize>, stride: usize, copies: &mut Buffer) {
        copies.resize(rows.len() * stride);
        for (row, copy) in rows.zip(copies.chunks_exact_mut(stride)) {
            // SAFETY: as the caller says.
            unsafe { widen(dtype, self.row(dtype, row), &mut copy[..self.dim]) };
        }
    }
}
