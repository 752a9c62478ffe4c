//! Compute capabilities and what one multiprocessor of each holds.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// Threads of a warp, on every architecture.
pub const WARP_THREADS: u32 = 32;

const KIB: u32 = 1024;

/// A compute capability; its number is ten times the major version plus the minor one.
///
/// Displays as `sm_75`; parses from `sm_75`, `sm75`, `75` and `7.5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Sm {
    /// Volta: V100.
    Sm70 = 70,
    /// Turing: T4, RTX 20.
    Sm75 = 75,
    /// Ampere: A100.
    Sm80 = 80,
    /// Ampere: RTX 30, A10.
    Sm86 = 86,
    /// Ampere: Jetson Orin.
    Sm87 = 87,
    /// Ada: RTX 40, L4, L40S.
    Sm89 = 89,
    /// Hopper: H100, H200.
    Sm90 = 90,
    /// Blackwell: B200.
    Sm100 = 100,
    /// Blackwell Ultra: B300.
    Sm103 = 103,
    /// Blackwell: RTX 50.
    Sm120 = 120,
    /// Blackwell: GB10.
    Sm121 = 121,
}

impl Sm {
    /// Every architecture of the table, oldest first.
    pub const ALL: [Sm; 11] = [
        Sm::Sm70,
        Sm::Sm75,
        Sm::Sm80,
        Sm::Sm86,
        Sm::Sm87,
        Sm::Sm89,
        Sm::Sm90,
        Sm::Sm100,
        Sm::Sm103,
        Sm::Sm120,
        Sm::Sm121,
    ];

    /// Ten times the major version plus the minor one: 75 for 7.5, 103 for 10.3.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The major version: 7 for 7.5, 10 for 10.3. Architectures with the same major version from 10 on form the family
    /// that an `f` target is compatible with (PTX ISA, `.target`).
    pub fn major(self) -> u16 {
        self.number() / 10
    }

    /// The minor version: 5 for 7.5, 3 for 10.3.
    pub fn minor(self) -> u16 {
        self.number() % 10
    }

    /// The architecture of that number.
    ///
    /// # Errors
    /// When the number is not in [`Sm::ALL`]; the error lists them.
    pub fn from_number(number: u16) -> Result<Sm, UnknownSm> {
        Sm::ALL.into_iter().find(|sm| sm.number() == number).ok_or_else(|| UnknownSm { given: number.to_string() })
    }

    /// What one multiprocessor holds. Source: NVIDIA's occupancy header (`cuda_occupancy.h`, CUDA 13) and the CUDA
    /// Programming Guide, "Compute Capabilities".
    pub fn limits(self) -> SmLimits {
        // warps, blocks, shared KiB of the SM, reserved bytes, granularity, carve-outs in KiB
        const AMPERE_SMALL: &[u32] = &[0, 8, 16, 32, 64, 100];
        const AMPERE: &[u32] = &[0, 8, 16, 32, 64, 100, 132, 164];
        const HOPPER: &[u32] = &[0, 8, 16, 32, 64, 100, 132, 164, 196, 228];
        let (max_warps, max_blocks, reserved, granularity, carveouts_kib) = match self {
            Sm::Sm70 => (64, 32, 0, 256, &[0, 8, 16, 32, 64, 96][..]),
            Sm::Sm75 => (32, 16, 0, 256, &[32, 64][..]),
            Sm::Sm80 => (64, 32, 1024, 128, AMPERE),
            Sm::Sm86 => (48, 16, 1024, 128, AMPERE_SMALL),
            Sm::Sm87 => (48, 16, 1024, 128, AMPERE),
            Sm::Sm89 => (48, 24, 1024, 128, AMPERE_SMALL),
            Sm::Sm90 | Sm::Sm100 | Sm::Sm103 => (64, 32, 1024, 128, HOPPER),
            Sm::Sm120 | Sm::Sm121 => (48, 24, 1024, 128, AMPERE_SMALL),
        };
        let shared_bytes = carveouts_kib[carveouts_kib.len() - 1] * KIB;
        SmLimits {
            max_warps,
            max_blocks,
            max_threads_per_block: 1024,
            registers: 65536,
            max_registers_per_thread: 255,
            register_granularity: 256,
            sub_partitions: 4,
            shared_bytes,
            shared_default_per_block: 48 * KIB,
            shared_opt_in_per_block: shared_bytes - reserved,
            shared_reserved_per_block: reserved,
            shared_granularity: granularity,
            carveouts_kib,
            // PTX ISA, cluster dimensions: 8 is portable; 16 needs an opt-in and exists on the data-centre parts.
            max_cluster_blocks: match self {
                Sm::Sm90 | Sm::Sm100 | Sm::Sm103 => 16,
                Sm::Sm120 | Sm::Sm121 => 8,
                _ => 1,
            },
            // PTX ISA, tensor memory: 512 columns of 128 lanes.
            tensor_memory_columns: if self.major() == 10 { 512 } else { 0 },
        }
    }
}

impl fmt::Display for Sm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.number())
    }
}

impl Serialize for Sm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Sm {
    type Err = UnknownSm;

    fn from_str(text: &str) -> Result<Sm, UnknownSm> {
        let digits = text.strip_prefix("sm_").or_else(|| text.strip_prefix("sm")).unwrap_or(text);
        let named = |sm: &Sm| digits == sm.number().to_string() || digits == format!("{}.{}", sm.major(), sm.minor());
        Sm::ALL.into_iter().find(named).ok_or_else(|| UnknownSm { given: text.to_owned() })
    }
}

/// The architecture is not in the table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown architecture '{given}': known are {}", list(&Sm::ALL))]
pub struct UnknownSm {
    /// What was asked for.
    pub given: String,
}

/// `a, b, c`.
pub(crate) fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// What one multiprocessor holds, and what one block may take of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SmLimits {
    /// Resident warps.
    pub max_warps: u32,
    /// Resident blocks.
    pub max_blocks: u32,
    /// Threads of one block.
    pub max_threads_per_block: u32,
    /// 32-bit registers of the multiprocessor, and of one block.
    pub registers: u32,
    /// Registers one thread can name.
    pub max_registers_per_thread: u32,
    /// Registers are given to a warp in multiples of this.
    pub register_granularity: u32,
    /// Schedulers; each owns an equal part of the registers.
    pub sub_partitions: u32,
    /// Shared memory of the multiprocessor at its largest carve-out, bytes.
    pub shared_bytes: u32,
    /// Static + dynamic bytes a block may take without asking.
    pub shared_default_per_block: u32,
    /// Static + dynamic bytes a block may take after `cudaFuncAttributeMaxDynamicSharedMemorySize`.
    pub shared_opt_in_per_block: u32,
    /// Bytes the system takes beside each block's own.
    pub shared_reserved_per_block: u32,
    /// Shared memory is given to a block in multiples of this many bytes.
    pub shared_granularity: u32,
    /// The sizes shared memory can be configured to, in KiB, ascending; the rest of the array is L1.
    pub carveouts_kib: &'static [u32],
    /// Blocks of one cluster at most; 1 where there are no clusters.
    pub max_cluster_blocks: u32,
    /// Columns of tensor memory; 0 where there is none.
    pub tensor_memory_columns: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for sm in Sm::ALL {
            assert_eq!(sm.to_string().parse(), Ok(sm));
            assert_eq!(sm.number().to_string().parse(), Ok(sm));
            assert_eq!(format!("{}.{}", sm.major(), sm.minor()).parse(), Ok(sm));
        }
    }

    #[test]
    fn unknown_names_list_the_known() {
        for text in ["", "sm_", "sm_76", "sm_75a", "7.55", "750", "-75", "+75", "075", "sm_99999999", "٧٥"] {
            let error = text.parse::<Sm>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")) && error.contains("sm_70, sm_75"), "{error}");
        }
    }

    /// The columns of NVIDIA's table, written out.
    #[test]
    fn shared_memory_sizes() {
        let sizes = |sm: Sm| (sm.limits().shared_bytes, sm.limits().shared_opt_in_per_block);
        assert_eq!(sizes(Sm::Sm70), (98304, 98304));
        assert_eq!(sizes(Sm::Sm75), (65536, 65536));
        assert_eq!(sizes(Sm::Sm80), (167936, 166912));
        assert_eq!(sizes(Sm::Sm86), (102400, 101376));
        assert_eq!(sizes(Sm::Sm87), (167936, 166912));
        assert_eq!(sizes(Sm::Sm89), (102400, 101376));
        assert_eq!(sizes(Sm::Sm90), (233472, 232448));
        assert_eq!(sizes(Sm::Sm100), (233472, 232448));
        assert_eq!(sizes(Sm::Sm120), (102400, 101376));
    }
}
