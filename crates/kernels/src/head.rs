//! What one CTA works on: a batch entry, a head, a block of it, and where their rows are in memory.
//!
//! The functions here declare kernel parameters as they are asked for them: a kernel's signature is the order of its
//! calls, and [`crate::plan()`] passes the arguments in that order.

use std::panic::Location;

use ptx::{Compare, F32, KernelBuilder, Pred, Reg, S32, U32, U64};

use crate::Dtype;

/// The rows of one head in global memory.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The address of the first row.
    pub base: Reg<U64>,
    /// Bytes from one row to the next.
    pub stride: Reg<U64>,
    /// How many rows there are.
    pub rows: Reg<S32>,
    /// Elements of a row.
    pub columns: u32,
    /// The type of an element.
    pub dtype: Dtype,
    /// Neighbouring elements, 1, 2 or 4, that may be accessed at once.
    pub vector: u32,
}

impl Matrix {
    /// The address of a row.
    #[track_caller]
    pub fn row(&self, k: &mut KernelBuilder, row: Reg<U32>) -> Reg<U64> {
        let row = k.cvt::<U64, _>(row);
        k.mad(row, self.stride, self.base)
    }
}

/// This CTA's batch entry and head, and which block of it.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Queries of the sequence.
    pub seqlen_q: Reg<S32>,
    /// Keys of the sequence.
    pub seqlen_k: Reg<S32>,
    /// Factor of the scores.
    pub scale: Reg<F32>,
    /// Which block of the head this CTA computes.
    pub block: Reg<U32>,
    /// Head and batch entry as one index, `batch * heads + head`.
    index: Reg<U32>,
    /// Batch entry.
    pub batch: Reg<U32>,
    /// Query head.
    pub head: Reg<U32>,
    kv_head: Reg<U32>,
}

impl Head {
    /// Declares `seqlen_q`, `seqlen_k`, `heads`, `group` (query heads per KV head), `blocks` (CTAs per head) and `scale`,
    /// and splits the CTA's index: block fastest, then head, then batch entry.
    #[track_caller]
    pub fn of_cta(k: &mut KernelBuilder) -> Self {
        k.at(Location::caller(), |k| {
            let (seqlen_q, seqlen_k) = (k.param::<S32>("seqlen_q"), k.param::<S32>("seqlen_k"));
            let (heads, group) = (k.param::<U32>("heads"), k.param::<U32>("group"));
            let blocks = k.param::<U32>("blocks");
            let scale = k.param::<F32>("scale");
            let cta = k.ctaid_x();
            let split = |k: &mut KernelBuilder, index: Reg<U32>, by: Reg<U32>| {
                let quotient = k.div(index, by);
                let product = k.mul(quotient, by);
                (quotient, k.sub(index, product))
            };
            let (index, block) = split(k, cta, blocks);
            let (batch, head) = split(k, index, heads);
            let kv_head = k.div(head, group);
            Self { seqlen_q, seqlen_k, scale, block, index, batch, head, kv_head }
        })
    }

    /// A tensor's rows for this CTA's query head: declares `name` and its strides by batch entry, head and row, in bytes.
    #[track_caller]
    pub fn of_query(&self, k: &mut KernelBuilder, name: &str, columns: u32, dtype: Dtype, vector: u32) -> Matrix {
        k.at(Location::caller(), |k| self.matrix(k, name, self.head, self.seqlen_q, columns, dtype, vector))
    }

    /// A tensor's rows for this CTA's KV head: declares `name` and its strides by batch entry, head and row, in bytes.
    #[track_caller]
    pub fn of_key(&self, k: &mut KernelBuilder, name: &str, columns: u32, dtype: Dtype, vector: u32) -> Matrix {
        k.at(Location::caller(), |k| self.matrix(k, name, self.kv_head, self.seqlen_k, columns, dtype, vector))
    }

    fn matrix(
        &self,
        k: &mut KernelBuilder,
        name: &str,
        head: Reg<U32>,
        rows: Reg<S32>,
        columns: u32,
        dtype: Dtype,
        vector: u32,
    ) -> Matrix {
        let pointer = k.pointer_param(name, vector * dtype.bytes() as u32);
        let by_batch = k.param::<U64>(&format!("{name}_batch"));
        let by_head = k.param::<U64>(&format!("{name}_head"));
        let stride = k.param::<U64>(&format!("{name}_row"));
        let (batch, head) = (k.cvt::<U64, _>(self.batch), k.cvt::<U64, _>(head));
        let base = k.mad(batch, by_batch, pointer);
        let base = k.mad(head, by_head, base);
        Matrix { base, stride, rows, columns, dtype, vector }
    }

    /// A dense f32 workspace `[batch, heads, seqlen_q, columns]`: declares `name` and `name_row`, the bytes of a row.
    #[track_caller]
    pub fn of_workspace(&self, k: &mut KernelBuilder, name: &str, columns: u32, vector: u32) -> Matrix {
        k.at(Location::caller(), |k| {
            let pointer = k.pointer_param(name, 4 * vector);
            let stride = k.param::<U64>(&format!("{name}_row"));
            let first = self.first_row(k);
            let base = k.mad(first, stride, pointer);
            Matrix { base, stride, rows: self.seqlen_q, columns, dtype: Dtype::F32, vector }
        })
    }

    /// A dense f32 tensor `[batch, heads, seqlen_q]`, one number per query: declares `name`; its address at this head.
    #[track_caller]
    pub fn per_query(&self, k: &mut KernelBuilder, name: &str) -> Reg<U64> {
        k.at(Location::caller(), |k| {
            let pointer = k.pointer_param(name, 4);
            let first = self.first_row(k);
            k.mad(first, 4, pointer)
        })
    }

    /// The index of a query of this head among all queries of all heads.
    #[track_caller]
    pub fn row(&self, k: &mut KernelBuilder, query: Reg<U32>) -> Reg<U64> {
        k.at(Location::caller(), |k| {
            let query = k.cvt::<U64, _>(query);
            k.mad_wide(self.index, self.seqlen_q.cast::<U32>(), query)
        })
    }

    /// The index of this head's first query among all queries of all heads.
    fn first_row(&self, k: &mut KernelBuilder) -> Reg<U64> {
        k.mul_wide(self.index, self.seqlen_q.cast::<U32>())
    }

    /// How many keys the queries before `end` may see: all, or under a causal mask `end + seqlen_k - seqlen_q`, at least 0.
    ///
    /// `end` may be past the last query.
    #[track_caller]
    pub fn visible_keys(&self, k: &mut KernelBuilder, end: Reg<S32>, causal: bool) -> Reg<S32> {
        if !causal {
            return self.seqlen_k;
        }
        k.at(Location::caller(), |k| {
            let offset = k.sub(self.seqlen_k, self.seqlen_q);
            let diagonal = k.add(end, offset);
            let visible = k.min(diagonal, self.seqlen_k);
            k.max(visible, 0)
        })
    }

    /// Whether a query is one of the sequence.
    #[track_caller]
    pub fn has_query(&self, k: &mut KernelBuilder, query: Reg<U32>) -> Reg<Pred> {
        k.setp(Compare::Lt, query.cast::<S32>(), self.seqlen_q)
    }
}
