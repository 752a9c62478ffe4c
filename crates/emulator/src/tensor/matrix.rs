//! `ldmatrix`, `stmatrix`, `movmatrix` (PTX ISA 9.7.14.5.15 to 9.7.14.5.17): 8x8 matrices of 16-bit elements, each row 16 bytes.
//!
//! Lanes `8 i` to `8 i + 7` give the addresses of the rows of matrix `i`. In registers, lane `4 r + t` holds elements `2 t` and
//! `2 t + 1` of row `r`; of the transposed matrix where `.trans` says so.

use crate::access;
use crate::cta::{Fail, Worker};
use crate::lanes::WARP;
use crate::warp::Warp;

/// Exchanges rows and columns of a matrix in a register.
pub(crate) fn transposed(register: &[u32; WARP]) -> [u32; WARP] {
    std::array::from_fn(|lane| {
        let (row, pair) = (lane / 4, lane % 4);
        // Element (row, column) of the result is (column, row) of the source.
        let element = |column: usize| register[4 * column + row / 2] >> (16 * (row % 2)) & 0xffff;
        element(2 * pair) | element(2 * pair + 1) << 16
    })
}

/// The lanes that give addresses.
fn lanes(matrices: usize) -> u32 {
    u32::MAX >> (WARP - 8 * matrices)
}

pub(crate) fn load(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    memory: u32,
    transpose: bool,
    registers: &[u32],
) -> Result<(), Fail> {
    let (addresses, _) = access::matrix_rows(worker, warp, memory, lanes(registers.len()), false)?;
    // All are read before any is written: the address register may be among them.
    let mut values = [[0u32; WARP]; 4];
    for (matrix, value) in values.iter_mut().enumerate().take(registers.len()) {
        for (lane, word) in value.iter_mut().enumerate() {
            let start = addresses[8 * matrix + lane / 4] as usize + 4 * (lane % 4);
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&worker.shared[start..start + 4]);
            *word = u32::from_le_bytes(bytes);
        }
        if transpose {
            *value = transposed(value);
        }
    }
    for (&register, value) in registers.iter().zip(values) {
        warp.narrow[register as usize].0 = value;
    }
    Ok(())
}

pub(crate) fn store(
    worker: &mut Worker<'_>,
    warp: &mut Warp,
    memory: u32,
    transpose: bool,
    registers: &[u32],
) -> Result<(), Fail> {
    let (addresses, overwrites) = access::matrix_rows(worker, warp, memory, lanes(registers.len()), true)?;
    for (matrix, &register) in registers.iter().enumerate() {
        let value = warp.narrow[register as usize].0;
        let value = if transpose { transposed(&value) } else { value };
        for (lane, word) in value.iter().enumerate() {
            let start = addresses[8 * matrix + lane / 4] as usize + 4 * (lane % 4);
            worker.shared[start..start + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
    if let Some(overwrites) = overwrites {
        access::note_write(worker, &overwrites, warp.index);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_exchanges_rows_and_columns() {
        let matrix: [u32; WARP] = std::array::from_fn(|lane| {
            let (row, pair) = (lane as u32 / 4, lane as u32 % 4);
            (8 * row + 2 * pair) | ((8 * row + 2 * pair + 1) << 16)
        });
        let found = transposed(&matrix);
        for (row, column) in (0..8).flat_map(|row| (0..8).map(move |column| (row, column))) {
            let element = found[(4 * row + column / 2) as usize] >> (16 * (column % 2)) & 0xffff;
            assert_eq!(element, 8 * column + row);
        }
        assert_eq!(transposed(&found), matrix);
    }
}
