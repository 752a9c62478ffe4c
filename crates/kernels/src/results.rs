//! What a kernel writes: the output and the logarithms of its rows' sums of exponentials.

use std::panic::Location;

use ptx::{Compare, F32, Global, KernelBuilder, Pointer, Reg, S32, U32, U64};

use crate::Dtype;
use crate::accumulator::{Accumulator, OutRows, PerRow, Quad, RowState};
use crate::config::Config;
use crate::schedule::{Schedule, Work};
use crate::strided::Strided;

/// The tensors a kernel writes: kernel parameters.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    out: Strided,
    lse: Reg<U64>,
    /// Queries of a packed batch in all.
    total_q: Option<Reg<U32>>,
    /// Where keys are split, bytes of the output and of the logarithms from one part to the next.
    parts: Option<[Reg<U64>; 2]>,
    /// Whether the output's columns lie as [`Accumulator::store_interleaved`] has them.
    interleaved: bool,
    /// The output's columns, their type, and how many are stored at once.
    columns: u32,
    dtype: Dtype,
    vector: u32,
}

/// A tile of queries whose output is to be stored: to be remembered while the next one begins.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    batch: Reg<U32>,
    head: Reg<U32>,
    index: Reg<U32>,
    row: Reg<S32>,
    seqlen_q: Reg<S32>,
    first_q: Option<Reg<S32>>,
    /// Where keys are split, which part of them it is of.
    part: Option<Reg<U32>>,
    /// Of 8-bit inputs, what the output is multiplied by.
    v_descale: Option<Reg<F32>>,
}

impl Place {
    /// Of a tile.
    pub fn of(work: &Work) -> Self {
        let Work { batch, head, index, row, seqlen_q, first_q, part, .. } = *work;
        Self { batch, head, index, row, seqlen_q, first_q, part, v_descale: None }
    }

    /// The same, its output to be multiplied by this.
    pub fn scaled(self, v_descale: Option<Reg<F32>>) -> Self {
        Self { v_descale, ..self }
    }

    /// One that is nowhere yet, where keys are not split.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, config: &Config) -> Self {
        k.at(Location::caller(), |k| Self {
            batch: k.mov(0),
            head: k.mov(0),
            index: k.mov(0),
            row: k.mov(0),
            seqlen_q: k.mov(0),
            first_q: config.varlen.then(|| k.mov(0)),
            part: None,
            v_descale: config.dtype.is_scaled().then(|| k.mov(0.0)),
        })
    }

    /// Takes another one's place.
    #[track_caller]
    pub fn set(&self, k: &mut KernelBuilder, other: &Self) {
        k.mov_to(self.batch, other.batch);
        k.mov_to(self.head, other.head);
        k.mov_to(self.index, other.index);
        k.mov_to(self.row, other.row);
        k.mov_to(self.seqlen_q, other.seqlen_q);
        if let (Some(to), Some(from)) = (self.first_q, other.first_q) {
            k.mov_to(to, from);
        }
        if let (Some(to), Some(from)) = (self.v_descale, other.v_descale) {
            k.mov_to(to, from);
        }
    }
}

impl Results {
    /// Declares `out` and its strides by batch entry, head and row in bytes, `lse`, and of a packed batch `total_q`.
    ///
    /// Where keys are split these are of the parts, in f32, each like an unpacked batch of the longest sequence: declares
    /// `out_part` and `lse_part`, the bytes of one.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, config: &Config) -> Self {
        k.at(Location::caller(), |k| {
            let columns = config.head_dim_v;
            let (dtype, vector) = match config.split {
                true => (Dtype::F32, if columns.is_multiple_of(2) { 2 } else { 1 }),
                false => (config.dtype.out(), config.vector),
            };
            let out = Strided::new(k, "out", vector * dtype.bytes() as u32);
            let lse = k.pointer_param("lse", 4);
            let total_q = (config.varlen && !config.split).then(|| k.param("total_q"));
            let parts = config.split.then(|| ["out_part", "lse_part"].map(|name| k.param(name)));
            let interleaved = config.dtype.is_scaled();
            Self { out, lse, total_q, parts, interleaved, columns, dtype, vector }
        })
    }

    /// Divides sixteen rows of a warp by their sums and stores them and their logarithms. `row` is the thread's first row in
    /// the tile.
    #[track_caller]
    pub fn store(
        &self,
        k: &mut KernelBuilder,
        schedule: &Schedule,
        (quad, row): (Quad, Reg<S32>),
        place: &Place,
        out: &Accumulator,
        state: &RowState,
    ) {
        k.at(Location::caller(), |k| {
            let (mut factors, lse) = state.finish(k);
            if let Some(v_descale) = place.v_descale {
                factors = factors.map(|factor| k.mul(factor, v_descale));
            }
            let (rows, lse_rows) = self.rows(k, schedule, row, place);
            store_lse(k, quad, &rows, lse_rows, lse);
            match self.interleaved {
                false => out.store(k, quad, &rows, factors),
                true => out.store_interleaved(k, quad, &rows, factors),
            }
        });
    }

    /// Stores what comes of rows that see no key: zeros, and minus infinity.
    #[track_caller]
    pub fn store_nothing(
        &self,
        k: &mut KernelBuilder,
        schedule: &Schedule,
        (quad, row): (Quad, Reg<S32>),
        place: &Place,
    ) {
        k.at(Location::caller(), |k| {
            let (rows, lse_rows) = self.rows(k, schedule, row, place);
            let none = k.mov(f32::NEG_INFINITY);
            store_lse(k, quad, &rows, lse_rows, [none; 2]);
            rows.clear(k, quad);
        });
    }

    /// Where this thread's rows of the output and of the logarithms are.
    fn rows(
        &self,
        k: &mut KernelBuilder,
        schedule: &Schedule,
        row: Reg<S32>,
        place: &Place,
    ) -> (OutRows, PerRow<Pointer<Global>>) {
        let first = k.add(place.row, row);
        let mut base = self.out.of_head(k, place.batch, place.head);
        let mut lse_base = self.lse;
        if let (Some([out, lse]), Some(part)) = (self.parts, place.part) {
            let part = k.cvt::<U64, _>(part);
            base = k.mad(part, out, base);
            lse_base = k.mad(part, lse, lse_base);
        }
        // Of a packed batch, lse is [heads, total_q] and `out_batch` is 0.
        let (lse_row, lse_index) = match self.total_q {
            None => (schedule.seqlen_q.cast(), place.index),
            Some(total_q) => (total_q, place.head),
        };
        let rows = [0, 8].map(|offset| {
            let row = k.add(first, offset);
            let (query, head) = schedule.query(k, row);
            let mut inside = k.setp(Compare::Lt, query, place.seqlen_q);
            let stored = match (self.total_q, place.first_q) {
                (Some(_), Some(first_q)) => k.add(query, first_q),
                _ => query,
            };
            let mut out = self.out.of_row(k, base, stored);
            let mut index = lse_index;
            if let Some(head) = head {
                inside = schedule.is_of_group(k, head, inside);
                index = k.add(index, head);
                let head = k.cvt::<U64, _>(head);
                out = k.mad(head, self.out.head, out);
            }
            let lse = k.cvt::<U64, _>(stored.cast::<U32>());
            let lse = k.mad_wide(index, lse_row, lse);
            let lse = k.mad(lse, 4, lse_base);
            (out, inside, Pointer::at(lse))
        });
        let out = OutRows {
            rows: rows.map(|(out, ..)| out),
            inside: rows.map(|(_, inside, _)| inside),
            columns: self.columns,
            dtype: self.dtype,
            vector: self.vector,
        };
        (out, rows.map(|(.., lse)| lse))
    }
}

fn store_lse(
    k: &mut KernelBuilder,
    quad: Quad,
    rows: &OutRows,
    lse_rows: PerRow<Pointer<Global>>,
    lse: PerRow<Reg<F32>>,
) {
    for row in 0..2 {
        let one = k.setp_and(Compare::Eq, quad.place, 0, rows.inside[row]);
        k.when(one, |k| k.st(lse_rows[row], lse[row]));
    }
}
