//! A tensor in global memory whose batch entries, heads and rows lie so many bytes apart.

use std::panic::Location;

use ptx::{KernelBuilder, Reg, S32, U32, U64};

/// A tensor: kernel parameters.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    base: Reg<U64>,
    batch: Reg<U64>,
    /// Bytes from one head to the next.
    pub head: Reg<U64>,
    /// Bytes from one row to the next.
    pub row: Reg<U64>,
}

impl Strided {
    /// Declares `name`, aligned to so many bytes, and its strides by batch entry, head and row in bytes.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, name: &str, align: u32) -> Self {
        k.at(Location::caller(), |k| {
            let base = k.pointer_param(name, align);
            let [batch, head, row] = ["batch", "head", "row"].map(|by| k.param(&format!("{name}_{by}")));
            Self { base, batch, head, row }
        })
    }

    /// The address of a head's first row.
    #[track_caller]
    pub fn of_head(&self, k: &mut KernelBuilder, batch: Reg<U32>, head: Reg<U32>) -> Reg<U64> {
        k.at(Location::caller(), |k| {
            let (batch, head) = (k.cvt::<U64, _>(batch), k.cvt::<U64, _>(head));
            let base = k.mad(batch, self.batch, self.base);
            k.mad(head, self.head, base)
        })
    }

    /// What is so many batch entries, or pages, further on than `first`.
    #[track_caller]
    pub fn of_batch(&self, k: &mut KernelBuilder, first: Reg<U64>, batch: Reg<U32>) -> Reg<U64> {
        k.at(Location::caller(), |k| {
            let batch = k.cvt::<U64, _>(batch);
            k.mad(batch, self.batch, first)
        })
    }

    /// The address of a row, of those that begin at `first`; the row is not negative.
    #[track_caller]
    pub fn of_row(&self, k: &mut KernelBuilder, first: Reg<U64>, row: Reg<S32>) -> Reg<U64> {
        k.at(Location::caller(), |k| {
            let row = k.cvt::<U64, _>(row.cast::<U32>());
            k.mad(row, self.row, first)
        })
    }
}
