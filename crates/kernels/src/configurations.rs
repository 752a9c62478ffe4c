//! The named set of kernels that is printed for every architecture and given to the assembler.

use ptx::{KernelError, Target};

use crate::cache::CacheCode;
use crate::config::{Config, Program, Without};
use crate::plan::{LaunchPlan, Options, plan_with};
use crate::{Dtype, Layout, PlanError, Problem, Stratum, naive, v1, v2, v2_kt};

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

/// For the strata on tensor cores: a name, and a problem.
const ON_TENSOR_CORES: [(&str, &str); 14] = [
    ("bf16_d64", "1x1x4096x64 bf16"),
    ("bf16_d128", "1x1x4096x128 bf16"),
    ("f16_d128_causal", "1x1x4096x128 f16 causal"),
    ("bf16_d256_causal", "1x1x4096x256 bf16 causal"),
    ("f16_d192_dv128_window", "1x1x4096x192/128 f16 window=512,0"),
    ("e4m3_d64", "1x1x4096x64 e4m3"),
    ("e4m3_d128", "1x1x4096x128 e4m3"),
    ("e4m3_d128_causal", "1x1x4096x128 e4m3 causal"),
    ("e4m3_d256", "1x1x4096x256 e4m3"),
    ("e4m3_d192_dv128_window", "1x1x4096x192/128 e4m3 window=512,0 softcap=30"),
    ("e4m3_d48_dv80_packed", "2x1x70x48/80 e4m3 causal cu_seqlens_q=0,70,100 cu_seqlens_k=0,70,100"),
    ("bf16_d40_dv72_packed", "2x1x70x40/72 bf16 causal cu_seqlens_q=0,70,100 cu_seqlens_k=0,70,100"),
    ("f16_d100_dv68_causal", "1x1x4096x100/68 f16 causal"),
    (
        "f16_d128_everything",
        "2x4/1x70x128 f16 window=50,10 softcap=30 alibi=0.5,0.25,0.125,0.1 cu_seqlens_q=0,70,100 cu_seqlens_k=0,70,100",
    ),
];

/// For [`Stratum::V2Tc`] besides: a name, a problem, and the CTAs that keys are split among.
const OF_V2_TC: [(&str, &str, u32); 16] = [
    ("f16_d96", "1x1x4096x96 f16", 1),
    ("f16_d33_dv40_causal", "1x2x200x33/40 f16 causal", 1),
    ("f16_d128_softcap_alibi", "1x1x4096x128 f16 softcap=30 alibi=0.5", 1),
    ("bf16_d128_decode", "1x8/2x1/8192x128 bf16", 8),
    (
        "bf16_d128_decode_pages",
        "1x8/2x1/512x128 bf16 cache=2 page_size=256 cache_seqlens=400 block_table=1,0 append=1 rotary=128,512",
        8,
    ),
    ("f16_d96_decode", "1x8/2x1/8192x96 f16", 8),
    ("f16_d33_decode", "1x8/2x1/8192x33 f16", 8),
    ("f16_d112_packed", "2x2/1x300x112 f16 cu_seqlens_q=0,300,400 cu_seqlens_k=0,300,400", 1),
    ("f16_d128_causal_packed_split", "2x2/1x300x128 f16 causal cu_seqlens_q=0,300,400 cu_seqlens_k=0,300,400", 8),
    (
        "f16_d128_pages_of_16_split",
        "1x2x5/48x128 f16 window=40,0 cache=3 page_size=16 cache_seqlens=9 block_table=1,0,2",
        8,
    ),
    ("f16_d128_causal_pages", "1x2x300/512x128 f16 causal cache=2 page_size=256 cache_seqlens=512 block_table=1,0", 1),
    ("f16_d72_pages_of_16", "1x2x5/48x72 f16 window=40,0 cache=3 page_size=16 cache_seqlens=9 block_table=1,0,2", 1),
    ("bf16_d40_rows", "1x2x5/48x40 bf16 causal cache=2 cache_seqlens=9 cache_batch_idx=1 append=5", 1),
    ("f32_d64", "1x1x4096x64", 1),
    ("bf16_d256_causal_short", "1x1x512x256 bf16 causal", 1),
    ("f32_d128_causal", "1x1x4096x128 causal", 1),
];

/// For [`Stratum::V3`] besides: a name, and a problem.
const OF_V3: [(&str, &str); 5] = [
    ("bf16_d64_grouped", "1x8/1x64/4096x64 bf16"),
    ("bf16_d128_grouped_causal", "1x8/1x64/4096x128 bf16 causal"),
    ("bf16_d256_grouped", "1x7/1x5/4096x256 bf16"),
    ("e4m3_d128_grouped_causal", "1x8/1x64/4096x128 e4m3 causal"),
    ("e4m3_d256_few_keys", "1x1x64x256 e4m3"),
];

/// The set: each kernel's name, `architecture/kernel/variant`, and the kernel.
///
/// # Errors
/// When a kernel cannot be written for an architecture it claims.
pub fn configurations() -> Result<Vec<(String, Program)>, PlanError> {
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
                by_threads: false,
                grouped: false,
                softcap: false,
                alibi: false,
                tf32: false,
                fine_weights: false,
                without: Without::default(),
                cluster: 1,
                split: false,
                cache: CacheCode::default(),
                vector,
                piece: 2,
                tiles,
            };
            for (name, write) in KERNELS.iter().filter(|(name, _)| every || name.starts_with('v')) {
                all.push((format!("{target}/{name}/{variant}"), write(&config)?));
            }
        }
        let shared = ON_TENSOR_CORES
            .into_iter()
            .flat_map(|(variant, problem)| [Stratum::V2Tc, Stratum::V3].map(|stratum| (stratum, variant, problem, 1)));
        let own = OF_V2_TC
            .into_iter()
            .map(|(variant, problem, splits)| (Stratum::V2Tc, variant, problem, splits))
            .chain(OF_V3.into_iter().map(|(variant, problem)| (Stratum::V3, variant, problem, 1)));
        for (stratum, variant, problem, splits) in shared.chain(own).filter(|(stratum, ..)| stratum.runs_on(target)) {
            let Ok(problem) = problem.parse::<Problem>() else { continue };
            // Calls of one head stand for what fills a GPU.
            let options = Options { splits: Some(splits), multiprocessors: Some(1), ..Options::default() };
            let plan = match plan_with(stratum, &problem, target, &Layout::contiguous(&problem), &options) {
                // A type that the stratum, or the architecture's tensor cores, lack.
                Err(PlanError::Lacks { .. } | PlanError::Dtype { .. }) => continue,
                plan => plan?,
            };
            for LaunchPlan { kernel, shared, .. } in plan.launches {
                all.push((format!("{target}/{}/{variant}", kernel.name), Program { kernel, shared }));
            }
        }
    }
    Ok(all)
}
