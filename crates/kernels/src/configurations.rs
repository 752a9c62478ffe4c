//! The named set of kernels that is printed for every architecture and given to the assembler.

use arch::Feature;
use ptx::{KernelError, Target};

use crate::config::{Config, Program, Tiles};
use crate::{Dtype, naive, v1, v2, v2_kt, v2_tc};

/// A function that writes a kernel.
type Write = fn(&Config) -> Result<Program, KernelError>;

/// Every kernel, by name.
const KERNELS: [(&str, Write); 7] = [
    ("naive_scores", naive::scores),
    ("naive_softmax", naive::softmax),
    ("naive_output", naive::output),
    ("v1", v1::v1),
    ("v2", v2::v2),
    ("v2_kt", v2_kt::v2_kt),
    ("transpose_keys", v2_kt::transpose_keys),
];

/// The architectures the strata are for.
const TARGETS: [&str; 7] = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Name, type, `head_dim`, `head_dim_v`, causal, elements per access, and whether every kernel is in the set for it or only
/// the three generations.
const VARIANTS: [(&str, Dtype, u32, u32, bool, u32, bool); 5] = [
    ("f32_d64", Dtype::F32, 64, 64, false, 4, true),
    ("f32_d32", Dtype::F32, 32, 32, false, 4, false),
    ("f32_d128", Dtype::F32, 128, 128, false, 4, false),
    ("f16_d128_causal", Dtype::F16, 128, 128, true, 4, false),
    ("bf16_d33_dv40_causal_scalar", Dtype::Bf16, 33, 40, true, 1, true),
];

/// The same of the generation on tensor cores: type, `head_dim`, `head_dim_v`, causal, bytes per copy, and whether all else that a kernel can
/// do is in it: windows, packed batches, grouped heads, capped scores, ALiBi.
const TENSOR_CORE_VARIANTS: [(&str, Dtype, u32, u32, bool, u32, bool); 7] = [
    ("f16_d64", Dtype::F16, 64, 64, false, 16, false),
    ("f16_d128", Dtype::F16, 128, 128, false, 16, false),
    ("f16_d96_causal", Dtype::F16, 96, 96, true, 16, false),
    ("f16_d128_everything", Dtype::F16, 128, 128, false, 16, true),
    ("f16_d256", Dtype::F16, 256, 256, false, 16, false),
    ("bf16_d128_causal", Dtype::Bf16, 128, 128, true, 16, false),
    ("bf16_d33_dv40_causal_scalar", Dtype::Bf16, 33, 40, true, 2, false),
];

/// A kernel for full self-attention without anything else.
fn plain(target: Target, dtype: Dtype, head_dim: u32, head_dim_v: u32, tiles: Tiles) -> Config {
    Config {
        target,
        dtype,
        head_dim,
        head_dim_v,
        causal: false,
        window: false,
        varlen: false,
        dynamic: false,
        by_threads: false,
        grouped: false,
        softcap: false,
        alibi: false,
        tf32: false,
        split: false,
        vector: 1,
        piece: 2,
        tiles,
    }
}

/// The set: each kernel's name, `architecture/kernel/variant`, and the kernel.
///
/// # Errors
/// When a kernel cannot be written for an architecture it claims.
pub fn configurations() -> Result<Vec<(String, Program)>, KernelError> {
    let mut all = Vec::new();
    for target in TARGETS.iter().filter_map(|name| name.parse::<Target>().ok()) {
        for (variant, dtype, head_dim, head_dim_v, causal, vector, every) in VARIANTS {
            let tiles = crate::plan::square_tiles(target.sm(), head_dim as usize, head_dim_v as usize);
            let config = Config { causal, vector, ..plain(target, dtype, head_dim, head_dim_v, tiles) };
            for (name, write) in KERNELS.iter().filter(|(name, _)| every || name.starts_with('v')) {
                all.push((format!("{target}/{name}/{variant}"), write(&config)?));
            }
        }
        for (variant, dtype, head_dim, head_dim_v, causal, piece, everything) in TENSOR_CORE_VARIANTS {
            if dtype == Dtype::Bf16 && !target.supports(Feature::Bf16Mma) {
                continue;
            }
            let tiles = v2_tc::tiles_of(target.sm(), head_dim.max(head_dim_v));
            let config = Config {
                causal,
                window: everything,
                varlen: everything,
                grouped: everything,
                softcap: everything,
                alibi: everything,
                vector: piece / dtype.bytes() as u32,
                piece,
                ..plain(target, dtype, head_dim, head_dim_v, tiles)
            };
            all.push((format!("{target}/v2_tc/{variant}"), v2_tc::v2_tc(&config)?));
        }
    }
    Ok(all)
}
