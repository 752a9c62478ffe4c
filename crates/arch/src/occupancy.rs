//! How many blocks of a kernel one multiprocessor holds, and what limits them.

use std::fmt;

use serde::Serialize;
use thiserror::Error;

use crate::sm::{Sm, WARP_THREADS, list};

/// What one block of a kernel takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BlockResources {
    /// Threads of the block.
    pub threads: u32,
    /// Registers of a thread, as the assembler reports them.
    pub registers: u32,
    /// Shared bytes declared in the kernel.
    pub static_shared: u32,
    /// Shared bytes asked for at launch.
    pub dynamic_shared: u32,
    /// The shared-memory size the multiprocessor is configured to, KiB; `None` lets [`occupancy()`] choose.
    pub carveout_kib: Option<u32>,
}

/// What stops one more block from fitting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limiter {
    /// Warp slots.
    Warps,
    /// The register file.
    Registers,
    /// Shared memory at the configured carve-out.
    Shared,
    /// Block slots.
    Blocks,
}

impl fmt::Display for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limiter::Warps => "warps",
            Limiter::Registers => "registers",
            Limiter::Shared => "shared memory",
            Limiter::Blocks => "blocks",
        })
    }
}

/// Blocks that fit by each resource alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BlockLimits {
    /// By warp slots.
    pub warps: u32,
    /// By the register file.
    pub registers: u32,
    /// By shared memory at the configured carve-out; `None` when a block takes none.
    pub shared: Option<u32>,
    /// By block slots.
    pub blocks: u32,
}

/// How full a multiprocessor gets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Occupancy {
    /// Resident blocks of one multiprocessor.
    pub blocks_per_sm: u32,
    /// Resident warps of one multiprocessor.
    pub warps_per_sm: u32,
    /// Resident warps as a percentage of the warp slots.
    pub theoretical_pct: f64,
    /// Blocks by each resource alone.
    pub limits: BlockLimits,
    /// Every resource tied for the smallest limit.
    pub limiters: Vec<Limiter>,
    /// Shared bytes a block takes: static + dynamic + reserved, rounded up to the granularity.
    pub shared_per_block: u32,
    /// The carve-out the figures hold for, KiB.
    pub carveout_kib: u32,
}

/// The occupancy of a kernel on one multiprocessor, by the rules of NVIDIA's `cuda_occupancy.h`:
///
/// - warps: `floor(max_warps / warps)` with `warps = ceil(threads / 32)`;
/// - registers: given per warp in multiples of 256 out of four sub-partitions,
///   `floor(4 * floor(16384 / ceil_to(32 * registers, 256)) / warps)`;
/// - shared memory: `floor(carveout / ceil_to(static + dynamic + reserved, granularity))`;
/// - blocks: the multiprocessor's block slots.
///
/// Without a carve-out given, the smallest one is taken at which shared memory limits no more than the other resources
/// do; where there is none, the largest. The driver may configure more, which leaves `blocks_per_sm` as it is and
/// raises `limits.shared`: compare that limit with a profiler's only at the carve-out the profiler saw.
///
/// Named barriers, clusters and tensor memory, which limit too from sm_90 on, are not modelled.
///
/// # Errors
/// When the block cannot be launched at all: the error names what is too large and what is allowed.
pub fn occupancy(sm: Sm, block: &BlockResources) -> Result<Occupancy, OccupancyError> {
    let limits = sm.limits();
    if !(1..=limits.max_threads_per_block).contains(&block.threads) {
        return Err(OccupancyError::Threads { sm, threads: block.threads, allowed: limits.max_threads_per_block });
    }
    if !(1..=limits.max_registers_per_thread).contains(&block.registers) {
        let allowed = limits.max_registers_per_thread;
        return Err(OccupancyError::RegistersPerThread { sm, registers: block.registers, allowed });
    }

    let warps = block.threads.div_ceil(WARP_THREADS);
    let by_warps = limits.max_warps / warps;

    let registers_per_warp = (WARP_THREADS * block.registers).next_multiple_of(limits.register_granularity);
    let warps_per_partition = limits.registers / limits.sub_partitions / registers_per_warp;
    let by_registers = warps_per_partition * limits.sub_partitions / warps;
    if by_registers == 0 {
        return Err(OccupancyError::RegistersPerBlock {
            sm,
            registers: block.registers,
            warps,
            registers_per_warp,
            fitting_warps: warps_per_partition * limits.sub_partitions,
        });
    }

    // In u64: the two sizes are the caller's and may be anything.
    let reserved = limits.shared_reserved_per_block;
    let shared = u64::from(block.static_shared) + u64::from(block.dynamic_shared) + u64::from(reserved);
    if shared > u64::from(limits.shared_bytes) {
        return Err(OccupancyError::SharedPerBlock {
            sm,
            static_bytes: block.static_shared,
            dynamic_bytes: block.dynamic_shared,
            reserved_bytes: reserved,
            sum: shared,
            allowed: limits.shared_bytes,
        });
    }
    let shared_per_block = (shared as u32).next_multiple_of(limits.shared_granularity);
    let by_shared = |carveout_kib: u32| (carveout_kib * 1024).checked_div(shared_per_block);

    let by_others = by_warps.min(by_registers).min(limits.max_blocks);
    let carveouts = limits.carveouts_kib;
    let carveout_kib = match block.carveout_kib {
        Some(kib) if !carveouts.contains(&kib) => {
            return Err(OccupancyError::Carveout { sm, given: kib, allowed: carveouts });
        }
        Some(kib) => kib,
        None => {
            let enough = |&&kib: &&u32| by_shared(kib).is_none_or(|blocks| blocks >= by_others);
            carveouts.iter().find(enough).copied().unwrap_or(limits.shared_bytes / 1024)
        }
    };
    let by_shared = by_shared(carveout_kib);
    if by_shared == Some(0) {
        return Err(OccupancyError::CarveoutTooSmall { sm, given: carveout_kib, shared_per_block });
    }

    let blocks_per_sm = by_others.min(by_shared.unwrap_or(u32::MAX));
    let by_limiter = [
        (Limiter::Warps, Some(by_warps)),
        (Limiter::Registers, Some(by_registers)),
        (Limiter::Shared, by_shared),
        (Limiter::Blocks, Some(limits.max_blocks)),
    ];
    let warps_per_sm = blocks_per_sm * warps;
    Ok(Occupancy {
        blocks_per_sm,
        warps_per_sm,
        theoretical_pct: 100.0 * f64::from(warps_per_sm) / f64::from(limits.max_warps),
        limits: BlockLimits { warps: by_warps, registers: by_registers, shared: by_shared, blocks: limits.max_blocks },
        limiters: by_limiter.into_iter().filter(|&(_, blocks)| blocks == Some(blocks_per_sm)).map(|(l, _)| l).collect(),
        shared_per_block,
        carveout_kib,
    })
}

/// Why a block cannot be launched.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OccupancyError {
    /// No threads, or too many.
    #[error("threads per block is {threads}: {sm} allows 1 to {allowed}")]
    Threads {
        /// The architecture.
        sm: Sm,
        /// Threads asked for.
        threads: u32,
        /// The most it allows.
        allowed: u32,
    },
    /// No registers, or more than a thread can name.
    #[error("registers per thread is {registers}: {sm} allows 1 to {allowed}")]
    RegistersPerThread {
        /// The architecture.
        sm: Sm,
        /// Registers asked for.
        registers: u32,
        /// The most it allows.
        allowed: u32,
    },
    /// The block's warps together need more registers than there are.
    #[error(
        "registers per thread is {registers}, {registers_per_warp} for a warp: {sm} holds {fitting_warps} such warps, \
         the block has {warps}"
    )]
    RegistersPerBlock {
        /// The architecture.
        sm: Sm,
        /// Registers of a thread.
        registers: u32,
        /// Warps of the block.
        warps: u32,
        /// Registers a warp is given.
        registers_per_warp: u32,
        /// Warps of that size that fit.
        fitting_warps: u32,
    },
    /// More shared memory than a block may take.
    #[error(
        "shared memory per block is {static_bytes} static + {dynamic_bytes} dynamic + {reserved_bytes} reserved \
         = {sum} bytes: {sm} allows {allowed}"
    )]
    SharedPerBlock {
        /// The architecture.
        sm: Sm,
        /// Declared in the kernel.
        static_bytes: u32,
        /// Asked for at launch.
        dynamic_bytes: u32,
        /// Taken by the system.
        reserved_bytes: u32,
        /// All three.
        sum: u64,
        /// The most it allows, reserved bytes included.
        allowed: u32,
    },
    /// Not a size the multiprocessor can be configured to.
    #[error("carve-out is {given} KiB: {sm} can be configured to {} KiB", list(allowed))]
    Carveout {
        /// The architecture.
        sm: Sm,
        /// KiB asked for.
        given: u32,
        /// KiB it can be.
        allowed: &'static [u32],
    },
    /// Not one block fits into the carve-out.
    #[error("carve-out is {given} KiB: a block takes {shared_per_block} bytes of shared memory on {sm}")]
    CarveoutTooSmall {
        /// The architecture.
        sm: Sm,
        /// KiB asked for.
        given: u32,
        /// Bytes a block takes.
        shared_per_block: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(threads: u32, registers: u32, dynamic_shared: u32) -> BlockResources {
        BlockResources { threads, registers, dynamic_shared, ..Default::default() }
    }

    /// Nsight Compute's report of the article's v2 at head_dim 32 on an RTX 2070.
    #[test]
    fn rtx_2070_report() {
        let o = occupancy(Sm::Sm75, &block(128, 72, 12288)).unwrap();
        assert_eq!(o.limits, BlockLimits { warps: 8, registers: 7, shared: Some(5), blocks: 16 });
        assert_eq!((o.blocks_per_sm, o.warps_per_sm, o.theoretical_pct), (5, 20, 62.5));
        assert_eq!((o.limiters, o.carveout_kib), (vec![Limiter::Shared], 64));
    }

    /// The article's v1: 28 KiB of shared memory, two blocks, 25 %.
    #[test]
    fn article_v1() {
        let o = occupancy(Sm::Sm75, &block(128, 64, 28 * 1024)).unwrap();
        assert_eq!((o.blocks_per_sm, o.theoretical_pct), (2, 25.0));
        assert_eq!((o.limits.shared, o.limiters), (Some(2), vec![Limiter::Shared]));
    }

    /// Nsight Compute's reports of four Triton kernels on an H200: registers, dynamic shared bytes, the carve-out at
    /// which its limit by shared memory is 4, shared bytes, limit by registers, occupancy. Warps limit to 16 in all.
    #[test]
    fn h200_reports() {
        let records = [
            (255, 32768, 132, 33792, 2, 12.5),
            (204, 28800, 132, 29824, 2, 12.5),
            (171, 28800, 132, 29824, 2, 12.5),
            (111, 40960, 164, 41984, 4, 25.0),
        ];
        for (registers, dynamic, carveout, shared, by_registers, pct) in records {
            let chosen = occupancy(Sm::Sm90, &block(128, registers, dynamic)).unwrap();
            assert_eq!((chosen.theoretical_pct, chosen.blocks_per_sm), (pct, by_registers));
            assert!(chosen.limits.shared >= Some(by_registers), "the chosen carve-out limits no more than registers");

            let seen = BlockResources { carveout_kib: Some(carveout), ..block(128, registers, dynamic) };
            let o = occupancy(Sm::Sm90, &seen).unwrap();
            assert_eq!(
                (o.limits.shared, o.limits.registers, o.limits.warps, o.shared_per_block, o.theoretical_pct),
                (Some(4), by_registers, 16, shared, pct)
            );
        }
    }

    #[test]
    fn every_tied_limiter_is_named() {
        let o = occupancy(Sm::Sm75, &block(64, 32, 4096)).unwrap();
        assert_eq!(o.limiters, [Limiter::Warps, Limiter::Shared, Limiter::Blocks]);
        let o = occupancy(Sm::Sm75, &block(64, 32, 0)).unwrap();
        assert_eq!((o.limits.shared, o.limiters), (None, vec![Limiter::Warps, Limiter::Blocks]));
    }

    #[test]
    fn smallest_carveout_that_does_not_limit() {
        let carveout = |dynamic| occupancy(Sm::Sm80, &block(1024, 32, dynamic)).unwrap().carveout_kib;
        assert_eq!([0, 3072, 7168, 31744, 60_000, 160_000].map(carveout), [8, 8, 16, 64, 132, 164]);
    }

    #[test]
    fn refused_blocks() {
        let message = |sm, b: BlockResources| occupancy(sm, &b).unwrap_err().to_string();
        assert_eq!(message(Sm::Sm75, block(0, 32, 0)), "threads per block is 0: sm_75 allows 1 to 1024");
        assert_eq!(message(Sm::Sm75, block(1025, 32, 0)), "threads per block is 1025: sm_75 allows 1 to 1024");
        assert_eq!(message(Sm::Sm75, block(32, 256, 0)), "registers per thread is 256: sm_75 allows 1 to 255");
        assert_eq!(
            message(Sm::Sm90, block(512, 255, 0)),
            "registers per thread is 255, 8192 for a warp: sm_90 holds 8 such warps, the block has 16"
        );
        let shared = BlockResources { static_shared: 1024, ..block(128, 64, 166_912) };
        assert_eq!(
            message(Sm::Sm80, shared),
            "shared memory per block is 1024 static + 166912 dynamic + 1024 reserved = 168960 bytes: sm_80 allows 167936"
        );
        let most = BlockResources { static_shared: u32::MAX, ..block(128, 64, u32::MAX) };
        assert!(message(Sm::Sm80, most).contains("= 8589935614 bytes"));
        assert!(occupancy(Sm::Sm80, &block(128, 64, 166_912)).is_ok());
        let odd = BlockResources { carveout_kib: Some(48), ..block(128, 64, 0) };
        assert_eq!(message(Sm::Sm75, odd), "carve-out is 48 KiB: sm_75 can be configured to 32, 64 KiB");
        let small = BlockResources { carveout_kib: Some(32), ..block(128, 64, 40_000) };
        assert!(message(Sm::Sm75, small).starts_with("carve-out is 32 KiB: a block takes 40192 bytes"));
    }
}
