//! Joining the parts of a call whose keys were split among CTAs (Dao et al. 2023, "Flash-Decoding").
//!
//! Each part is an output of its own keys and the logarithm of its sum of exponentials. The whole is their mean, weighted by
//! those sums. A warp joins a row, its lanes neighbouring columns.

use std::f32::consts::LN_2;

use ptx::{Compare, F32, Global, KernelBuilder, KernelError, Pointer, Reg, U32, U64};

use crate::config::{Config, Program};
use crate::convert::Words;
use crate::head::Head;
use crate::softmax::{exp_difference, finite_max};
use crate::strided::Strided;
use crate::tile::SharedMemory;

/// Rows of a CTA, one for each warp.
pub const ROWS: u32 = 4;

const LANES: u32 = 32;

/// The kernel.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn combine(config: &Config) -> Result<Program, KernelError> {
    let mut kernel = KernelBuilder::new("flash_combine", config.target);
    let k = &mut kernel;
    k.require_block([LANES * ROWS, 1, 1]);

    let head = Head::of_cta(k);
    let splits = k.param::<U32>("splits");
    let (out_parts, lse_parts) = (k.pointer_param("out_parts", 4), k.pointer_param("lse_parts", 4));
    let [out_part, lse_part] = ["out_part", "lse_part"].map(|name| k.param::<U64>(name));
    let out = Strided::new(k, "out", config.dtype.bytes() as u32);
    let lse = k.pointer_param("lse", 4);
    let packed = config.varlen.then(|| (k.pointer_param("cu_seqlens_q", 4), k.param::<U32>("total_q")));

    // This warp's row: where its parts are, and where it goes.
    let thread = k.tid_x();
    let (lane, warp) = (k.and(thread, LANES - 1), k.shr(thread, LANES.ilog2()));
    let query = k.mad(head.block, ROWS, warp);
    let row = head.row(k, query);
    let columns = u64::from(config.head_dim_v);
    let (mut length, mut stored) = (head.seqlen_q, query);
    if let Some((cu_seqlens, _)) = packed {
        let place = k.mad_wide(head.batch, 4, cu_seqlens);
        let first = k.ld::<U32, _>(Pointer::<Global>::at(place));
        let end = k.ld::<U32, _>(Pointer::<Global>::at(place).offset(4));
        length = k.sub(end, first).cast();
        stored = k.add(query, first);
    }
    let there = k.setp(Compare::Lt, query.cast(), length);
    k.if_(there, |k| {
        let lse_parts = k.mad(row, 4, lse_parts);
        let max = k.mov::<F32>(f32::NEG_INFINITY);
        let place = k.mov(lse_parts);
        k.for_range::<U32>(0, splits, 1, |k, _| {
            let lse = k.ld::<F32, _>(Pointer::<Global>::at(place));
            k.max_to(max, max, lse);
            k.add_to(place, place, lse_part);
        });
        let base = finite_max(k, max);

        let own: Vec<u32> = (0..config.head_dim_v).step_by(LANES as usize).collect();
        let sums: Vec<Reg<F32>> = own.iter().map(|_| k.mov(0.0)).collect();
        let total = k.mov::<F32>(0.0);
        let out_parts = k.mad(row, 4 * columns, out_parts);
        let (values, place) = (k.mad_wide(lane, 4, out_parts), k.mov(lse_parts));
        k.for_range::<U32>(0, splits, 1, |k, _| {
            let lse = k.ld::<F32, _>(Pointer::<Global>::at(place));
            let weight = exp_difference(k, lse, base);
            k.add_to(total, total, weight);
            for (&first, &sum) in own.iter().zip(&sums) {
                let value = k.mov::<F32>(0.0);
                let within = k.setp(Compare::Lt, lane, config.head_dim_v - first);
                k.when(within, |k| k.ld_to(value, Pointer::<Global>::at(values).offset((4 * first).into())));
                k.fma_to(sum, weight, value, sum);
            }
            k.add_to(place, place, lse_part);
            k.add_to(values, values, out_part);
        });

        let empty = k.setp(Compare::Eq, total, 0.0);
        let divisor = k.selp(1.0, total, empty);
        let to = out.of_head(k, head.batch, head.head);
        let to = out.of_row(k, to, stored.cast());
        let to = k.mad_wide(lane, config.dtype.bytes() as u32, to);
        for (&first, &sum) in own.iter().zip(&sums) {
            let value = k.div_rn(sum, divisor);
            let word = Words::narrow(k, config.dtype, &[value]);
            let within = k.setp(Compare::Lt, lane, config.head_dim_v - first);
            let to = Pointer::at(to).offset(i64::from(first) * config.dtype.bytes() as i64);
            k.when(within, |k| word.store(k, to));
        }

        let log = k.lg2(total);
        let whole = k.fma(log, LN_2, max);
        let index = match packed {
            None => row,
            Some((_, total_q)) => {
                let stored = k.cvt::<U64, _>(stored);
                k.mad_wide(head.head, total_q, stored)
            }
        };
        let lse = k.mad(index, 4, lse);
        let first_lane = k.setp(Compare::Eq, lane, 0);
        k.when(first_lane, |k| k.st(Pointer::<Global>::at(lse), whole));
    });
    Ok(Program { kernel: kernel.finish()?, shared: SharedMemory::default() })
}
