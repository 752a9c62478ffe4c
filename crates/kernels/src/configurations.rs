//! The named set of kernels that is printed for every architecture and given to the assembler.

use ptx::{KernelError, Target};

use crate::config::{Config, Program};
use crate::{Dtype, ProblemSpec, Stratum, naive, v1, v2, v2_kt, v3};

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

/// Of the Hopper stratum: name, type, `head_dim`, `head_dim_v`, causal, a window, a packed batch, elements per store.
const HOPPER: [(&str, Dtype, u32, u32, bool, bool, bool, u32); 6] = [
    ("bf16_d64", Dtype::Bf16, 64, 64, false, false, false, 8),
    ("bf16_d128", Dtype::Bf16, 128, 128, false, false, false, 8),
    ("f16_d128_causal", Dtype::F16, 128, 128, true, false, false, 8),
    ("bf16_d256_causal", Dtype::Bf16, 256, 256, true, false, false, 8),
    ("f16_d192_dv128_window", Dtype::F16, 192, 128, false, true, false, 8),
    ("bf16_d40_dv33_causal_packed_scalar", Dtype::Bf16, 40, 33, true, false, true, 1),
];

/// The set: each kernel's name, `architecture/kernel/variant`, and the kernel.
///
/// # Errors
/// When a kernel cannot be written for an architecture it claims.
pub fn configurations() -> Result<Vec<(String, Program)>, KernelError> {
    let mut all = Vec::new();
    for target in TARGETS.iter().filter_map(|name| name.parse::<Target>().ok()) {
        for (variant, dtype, head_dim, head_dim_v, causal, vector, every) in VARIANTS {
            let tiles = crate::plan::square_tiles(target.sm(), head_dim as usize, head_dim_v as usize);
            let config = Config {
                target,
                dtype,
                head_dim,
                head_dim_v,
                causal,
                window: false,
                varlen: false,
                dynamic: false,
                vector,
                tiles,
            };
            for (name, write) in KERNELS.iter().filter(|(name, _)| every || name.starts_with('v')) {
                all.push((format!("{target}/{name}/{variant}"), write(&config)?));
            }
        }
        if !Stratum::V3.runs_on(target) {
            continue;
        }
        for (variant, dtype, head_dim, head_dim_v, causal, window, varlen, vector) in HOPPER {
            let spec = ProblemSpec::new(1, 1, 4096, head_dim as usize).head_dim_v(head_dim_v as usize);
            let tiles = v3::default_tiles(&spec);
            let dynamic = causal || window || varlen;
            let config = Config { target, dtype, head_dim, head_dim_v, causal, window, varlen, dynamic, vector, tiles };
            all.push((format!("{target}/v3/{variant}"), v3::v3(&config)?));
        }
    }
    Ok(all)
}
