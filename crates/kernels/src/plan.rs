//! Which kernels compute a call, how they are launched, and what a stratum covers of the contract.
//!
//! A [`Plan`] knows no backend: its [`LaunchPlan`]s name buffers by role, and [`Plan::launches`] fills in a backend's
//! addresses.

use std::fmt;
use std::str::FromStr;

use arch::{BlockResources, Sm, Target, occupancy};
use ptx::{Argument, Kernel, KernelError, L2Promotion, Launch, Swizzle, TensorMap, TensorMapError};

use crate::cache::{Append, Cache, Rotary};
use crate::config::{Config, Program, Technique, Tiles, Without};
use crate::tile::{GROUP, SharedMemory};
use crate::{
    Dtype, Feature, Inputs, Mask, Problem, Strides, append, combine, copies, hopper, naive, v1, v2, v2_kt, v2_tc, v3,
};

/// A generation of the attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stratum {
    /// Scores, softmax and output as three kernels through memory.
    Naive,
    /// FlashAttention: keys outer, queries inner, the state in memory.
    V1,
    /// FlashAttention-2: a block of queries kept, the state in registers.
    V2,
    /// The same on keys that a kernel of its own transposed.
    V2Kt,
    /// FlashAttention-2 on tensor cores: each warp multiplies its own queries, fragments come from swizzled tiles.
    V2Tc,
    /// FlashAttention-3: Hopper's copy engine and matrix instructions, one warp that loads and warpgroups that compute.
    V3,
}

/// What of the contract a stratum computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// The oldest architecture.
    pub min_sm: Sm,
    /// What the target must have beside that; later architectures may not.
    pub needs: Option<arch::Feature>,
    /// Types of q, k and v.
    pub dtypes: &'static [Dtype],
    /// The largest `head_dim` and `head_dim_v`; the smallest is 1.
    pub max_head_dim: usize,
    /// The largest `seqlen_q` and `seqlen_k`.
    pub max_seqlen: usize,
    /// Features beside full self-attention on contiguous tensors.
    pub features: &'static [Feature],
}

impl Stratum {
    /// Those that compute on CUDA cores, in every type and on every architecture.
    pub const ON_CUDA_CORES: [Stratum; 4] = [Stratum::Naive, Stratum::V1, Stratum::V2, Stratum::V2Kt];

    /// All of them, oldest first.
    pub const ALL: [Stratum; 6] = [Stratum::Naive, Stratum::V1, Stratum::V2, Stratum::V2Kt, Stratum::V2Tc, Stratum::V3];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Stratum::Naive => "naive",
            Stratum::V1 => "v1",
            Stratum::V2 => "v2",
            Stratum::V2Kt => "v2_kt",
            Stratum::V2Tc => "v2_tc",
            Stratum::V3 => "v3",
        }
    }

    /// What it computes; a plan for anything else is refused with [`PlanError::Feature`] and the like.
    pub fn coverage(self) -> Coverage {
        let on_cuda_cores = Coverage {
            min_sm: Sm::Sm75,
            needs: None,
            dtypes: &Dtype::UNSCALED,
            max_head_dim: 128,
            // Positions are signed 32-bit numbers, and a tile may reach past the end.
            max_seqlen: i32::MAX as usize - 2 * MAX_BLOCK as usize,
            features: &[Feature::Causal, Feature::Gqa, Feature::HeadDimV, Feature::CrossLength, Feature::Strided],
        };
        match self {
            Stratum::Naive | Stratum::V1 | Stratum::V2 | Stratum::V2Kt => on_cuda_cores,
            Stratum::V2Tc => Coverage {
                min_sm: Sm::Sm75,
                needs: None,
                dtypes: &Dtype::UNSCALED,
                max_head_dim: 256,
                max_seqlen: PACKED_END as usize,
                features: &[
                    Feature::Causal,
                    Feature::Window,
                    Feature::Gqa,
                    Feature::HeadDimV,
                    Feature::CrossLength,
                    Feature::Softcap,
                    Feature::Alibi,
                    Feature::Varlen,
                    Feature::KvCache,
                    Feature::Strided,
                ],
            },
            Stratum::V3 => Coverage {
                min_sm: Sm::Sm90,
                needs: Some(arch::Feature::Wgmma),
                dtypes: &[Dtype::F16, Dtype::Bf16, Dtype::E4m3],
                max_head_dim: 256,
                max_seqlen: PACKED_END as usize,
                features: &[
                    Feature::Causal,
                    Feature::Window,
                    Feature::Gqa,
                    Feature::HeadDimV,
                    Feature::CrossLength,
                    Feature::Softcap,
                    Feature::Alibi,
                    Feature::Varlen,
                    Feature::Strided,
                ],
            },
        }
    }

    /// Whether the target has what the stratum stands on.
    pub fn runs_on(self, target: Target) -> bool {
        let Coverage { min_sm, needs, .. } = self.coverage();
        target.sm() >= min_sm && needs.is_none_or(|needs| target.supports(needs))
    }

    /// The error that results of a type may have, as a share of the largest element, where that is more than the contract's
    /// tolerance: tensor cores multiply f32 in parts and cut their sums.
    pub fn relative_error(self, dtype: Dtype) -> Option<f64> {
        (self == Stratum::V2Tc && dtype == Dtype::F32).then_some(1e-5)
    }

    /// The tile sizes it uses for a problem, on a GPU of so many multiprocessors, unless told otherwise.
    pub fn default_tiles(self, sm: Sm, multiprocessors: u32, problem: &Problem) -> Tiles {
        match self {
            Stratum::Naive | Stratum::V1 | Stratum::V2 | Stratum::V2Kt => {
                square_tiles(sm, problem.head_dim, problem.head_dim_v)
            }
            Stratum::V2Tc => v2_tc::default_tiles(sm, multiprocessors, problem),
            Stratum::V3 => v3::default_tiles(problem),
        }
    }
}

/// The tiles of the generations on CUDA cores: the article's 32 queries by 32 keys and 128 threads.
///
/// Where the shared memory they take leaves a multiprocessor fewer than 8 warps, which is where head dimensions are
/// large, 256 threads on 64 or 48 queries share the tiles of keys and values instead.
pub(crate) fn square_tiles(sm: Sm, head_dim: usize, head_dim_v: usize) -> Tiles {
    const ENOUGH_WARPS: u32 = 8;
    let square = Tiles { block_q: 32, block_kv: 32, threads: 128 };
    let wide = [64, 48].map(|block_q| Tiles { block_q, block_kv: 32, threads: 256 });
    let warps = |tiles: &Tiles| {
        let Tiles { block_q, block_kv, threads } = *tiles;
        let (depth, width) = (head_dim.next_multiple_of(4) as u32, head_dim_v.next_multiple_of(16) as u32);
        let dynamic_shared = 4 * (block_q * depth + block_kv * (depth + width) + block_q * block_kv);
        let block = BlockResources { threads, registers: 1, dynamic_shared, ..Default::default() };
        let warps = occupancy(sm, &block).map_or(0, |occupancy| occupancy.warps_per_sm);
        warps.min(ENOUGH_WARPS)
    };
    wide.into_iter().fold(square, |best, tiles| if warps(&tiles) > warps(&best) { tiles } else { best })
}

impl fmt::Display for Stratum {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no stratum.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stratum is `{0}`: it must be naive, v1, v2, v2_kt, v2_tc or v3")]
pub struct ParseStratumError(String);

impl FromStr for Stratum {
    type Err = ParseStratumError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|stratum| stratum.name() == text);
        known.ok_or_else(|| ParseStratumError(text.to_string()))
    }
}

/// Where the elements of a call's tensors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Of q.
    pub q: Strides,
    /// Of k.
    pub k: Strides,
    /// Of v.
    pub v: Strides,
    /// Of out.
    pub out: Strides,
    /// Of the keys and the values that are appended to a cache.
    pub new: [Strides; 2],
    /// A power of two that divides every tensor's address, in bytes.
    pub alignment: u64,
}

impl Layout {
    /// Contiguous `[batch, seqlen, heads, dim]` tensors, or `[total, heads, dim]` of a packed batch, at addresses that are
    /// multiples of 16.
    pub fn contiguous(problem: &Problem) -> Layout {
        let strides = |shape: Vec<usize>| match shape[..] {
            [_, seqlen, heads, dim] => Strides::bshd(seqlen, heads, dim),
            [.., heads, dim] => Strides { batch: 0, ..Strides::bshd(0, heads, dim) },
            _ => Strides { batch: 0, seq: 0, head: 0 },
        };
        let appended = problem.cache.as_ref().map_or(0, Cache::appended);
        let new = [problem.head_dim, problem.head_dim_v].map(|dim| Strides::bshd(appended, problem.heads_kv, dim));
        Layout {
            q: strides(problem.q_shape()),
            k: strides(problem.k_shape()),
            v: strides(problem.v_shape()),
            out: strides(problem.out_shape()),
            new,
            alignment: 16,
        }
    }

    /// These tensors, each storage at an address that is a multiple of 16, and a contiguous output.
    ///
    /// # Errors
    /// When a tensor is not an attention tensor: see [`Inputs::check`].
    pub fn of(problem: &Problem, inputs: &Inputs) -> Result<Layout, crate::InputError> {
        inputs.check(problem)?;
        let mut layout = Layout::contiguous(problem);
        for (strides, tensor) in [(&mut layout.q, &inputs.q), (&mut layout.k, &inputs.k), (&mut layout.v, &inputs.v)] {
            *strides = tensor.attention_strides().unwrap_or(*strides);
            let offset = tensor.offset() as u64 * tensor.dtype().bytes() as u64;
            layout.alignment = 1 << (layout.alignment | offset).trailing_zeros();
        }
        if let Some(new) = &inputs.new {
            for (strides, tensor) in layout.new.iter_mut().zip([&new.k, &new.v]) {
                *strides = tensor.attention_strides().unwrap_or(*strides);
            }
        }
        Ok(layout)
    }

    /// The elements, 1, 2, 4 or 8, by which every row of the output can be accessed.
    fn out_vector(&self, problem: &Problem) -> u32 {
        let bytes = problem.dtype.out().bytes() as u64;
        let Strides { batch, seq, head } = self.out;
        let fits = |elements: &u32| {
            let steps = [batch, seq, head, problem.head_dim_v];
            self.alignment.is_multiple_of(u64::from(*elements) * bytes)
                && steps.into_iter().all(|step| (step as u64).is_multiple_of(u64::from(*elements)))
        };
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// The elements, 1, 2 or 4, by which every row of every tensor can be accessed.
    fn vector(&self, problem: &Problem) -> u32 {
        let out = (self.out, problem.seqlen_q, problem.heads_q, problem.head_dim_v);
        let [q, k, v] = self.inputs(problem);
        self.widest(problem, &[q, k, v, out], &[4, 2])
    }

    /// The bytes, 2 to 16, by which every row of q, k and v can be copied.
    fn piece(&self, problem: &Problem) -> u32 {
        let bytes = problem.dtype.bytes() as u32;
        let elements = [16, 8, 4].map(|piece| piece / bytes);
        bytes * self.widest(problem, &self.inputs(problem), &elements)
    }

    /// Of each input, its strides, rows, heads and columns.
    fn inputs(&self, problem: &Problem) -> [(Strides, usize, usize, usize); 3] {
        // A stride between pages, or rows that are named, is taken however few there are.
        let keys = if problem.cache.is_some() { usize::MAX } else { problem.seqlen_k };
        [
            (self.q, problem.seqlen_q, problem.heads_q, problem.head_dim),
            (self.k, keys, problem.heads_kv, problem.head_dim),
            (self.v, keys, problem.heads_kv, problem.head_dim_v),
        ]
    }

    /// The first of these numbers of elements by which every row of the tensors can be accessed; 1 where there is none.
    fn widest(&self, problem: &Problem, tensors: &[(Strides, usize, usize, usize)], elements: &[u32]) -> u32 {
        let bytes = problem.dtype.bytes() as u64;
        let fits = |elements: &u32| {
            let elements = u64::from(*elements);
            self.alignment.is_multiple_of(elements * bytes)
                && tensors.iter().all(|&(strides, seqlen, heads, dim)| {
                    let batch = if seqlen == usize::MAX { usize::MAX } else { problem.batch };
                    let steps =
                        [(strides.batch, batch), (strides.seq, seqlen), (strides.head, heads), (dim, usize::MAX)];
                    steps.into_iter().all(|(stride, extent)| extent <= 1 || (stride as u64).is_multiple_of(elements))
                })
        };
        elements.iter().copied().find(fits).unwrap_or(1)
    }
}

/// What a kernel's pointer argument points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// The queries.
    Q,
    /// The keys.
    K,
    /// The values.
    V,
    /// The output.
    Out,
    /// The logarithms of the sums of exponentials.
    Lse,
    /// Where each sequence of a packed batch begins, of queries.
    CuSeqlensQ,
    /// The same of keys.
    CuSeqlensK,
    /// ALiBi's slopes.
    AlibiSlopes,
    /// Keys and values to append to a cache.
    KNew,
    /// See [`Buffer::KNew`].
    VNew,
    /// Cosines of the angles that new keys and queries are turned by.
    RotaryCos,
    /// Their sines.
    RotarySin,
    /// How many keys each entry has in a cache.
    CacheSeqlens,
    /// How many places of a cache's row there are before each entry's first key.
    CacheLeftpad,
    /// In which row of a cache each entry's are.
    CacheBatchIdx,
    /// Which pages each entry's are in.
    BlockTable,
    /// What the elements of 8-bit queries are multiplied by.
    QDescale,
    /// The same of keys.
    KDescale,
    /// The same of values.
    VDescale,
    /// One of [`Plan::workspaces`].
    Workspace(usize),
}

/// One kernel argument, by role.
#[derive(Clone, Debug, PartialEq)]
pub enum ArgRef {
    /// A tensor map of a buffer, whose address is filled in.
    TensorMap(Buffer, Box<TensorMap>),
    /// The address of a buffer.
    Buffer(Buffer),
    /// A signed 32-bit integer.
    S32(i32),
    /// An unsigned 32-bit integer.
    U32(u32),
    /// An unsigned 64-bit integer.
    U64(u64),
    /// A single-precision number.
    F32(f32),
}

/// Memory that a plan needs beside the call's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// What it holds.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// Whether it must be zero before the first launch, which each launch leaves it; otherwise nothing need be in it.
    pub zeroed: bool,
}

/// The addresses of a call's buffers in a backend's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// The first query.
    pub q: u64,
    /// The first key.
    pub k: u64,
    /// The first value.
    pub v: u64,
    /// The first output row.
    pub out: u64,
    /// The first lse.
    pub lse: u64,
    /// `cu_seqlens_q` of a packed batch, 32-bit integers.
    pub cu_seqlens_q: u64,
    /// `cu_seqlens_k` of a packed batch, 32-bit integers.
    pub cu_seqlens_k: u64,
    /// `alibi_slopes`, f32.
    pub alibi_slopes: u64,
    /// The first key to append.
    pub k_new: u64,
    /// The first value to append.
    pub v_new: u64,
    /// `rotary_cos`.
    pub rotary_cos: u64,
    /// `rotary_sin`.
    pub rotary_sin: u64,
    /// `cache_seqlens`, 32-bit integers.
    pub cache_seqlens: u64,
    /// `cache_leftpad`, 32-bit integers.
    pub cache_leftpad: u64,
    /// `cache_batch_idx`, 32-bit integers.
    pub cache_batch_idx: u64,
    /// `block_table`, 32-bit integers.
    pub block_table: u64,
    /// Of 8-bit inputs, their descales, f32.
    pub q_descale: u64,
    /// The same of keys.
    pub k_descale: u64,
    /// The same of values.
    pub v_descale: u64,
    /// One per [`Plan::workspaces`], each a multiple of 16.
    pub workspaces: Vec<u64>,
}

impl Buffers {
    /// The address of one; 0 of a workspace that is not there.
    pub fn address(&self, buffer: Buffer) -> u64 {
        match buffer {
            Buffer::Q => self.q,
            Buffer::K => self.k,
            Buffer::V => self.v,
            Buffer::Out => self.out,
            Buffer::Lse => self.lse,
            Buffer::CuSeqlensQ => self.cu_seqlens_q,
            Buffer::CuSeqlensK => self.cu_seqlens_k,
            Buffer::AlibiSlopes => self.alibi_slopes,
            Buffer::KNew => self.k_new,
            Buffer::VNew => self.v_new,
            Buffer::RotaryCos => self.rotary_cos,
            Buffer::RotarySin => self.rotary_sin,
            Buffer::QDescale => self.q_descale,
            Buffer::KDescale => self.k_descale,
            Buffer::VDescale => self.v_descale,
            Buffer::CacheSeqlens => self.cache_seqlens,
            Buffer::CacheLeftpad => self.cache_leftpad,
            Buffer::CacheBatchIdx => self.cache_batch_idx,
            Buffer::BlockTable => self.block_table,
            Buffer::Workspace(index) => self.workspaces.get(index).copied().unwrap_or(0),
        }
    }
}

/// One launch of a plan.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// What runs.
    pub kernel: Kernel,
    /// CTAs; x alone, so that their number may exceed 65,535.
    pub grid: [u32; 3],
    /// Threads.
    pub block: [u32; 3],
    /// Bytes of shared memory.
    pub dynamic_shared: u32,
    /// The shared memory, tile by tile.
    pub shared: SharedMemory,
    /// In the kernel's order.
    pub arguments: Vec<ArgRef>,
    /// CTAs of one head of the grid.
    blocks: u32,
    /// Query heads for each of the grid's heads.
    group: u32,
    /// Heads of a batch entry in the grid.
    heads: u32,
    /// Where tiles are numbered by [`crate::schedule`]: the heads that are taken together.
    section: Option<u32>,
    /// How often the grid has each tile, with another part of the keys each time.
    splits: u32,
    /// Whether CTAs stay and take one tile after the other, so that no more need be launched than fit the multiprocessors, one
    /// each.
    stays: bool,
}

impl LaunchPlan {
    /// The number of CTAs.
    pub fn ctas(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }
}

/// How a call is computed.
#[derive(Clone, Debug)]
pub struct Plan {
    /// By which generation.
    pub stratum: Stratum,
    /// What its kernels were compiled for.
    pub config: Config,
    /// One after the other; none when there is no query.
    pub launches: Vec<LaunchPlan>,
    /// Memory to bring.
    pub workspaces: Vec<Workspace>,
    /// Bytes that divide every address.
    alignment: u64,
    batch: usize,
    heads_q: usize,
}

/// Why a call is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A part that cannot be left out.
    #[error("without {part}: v3 on {dtype} has no such variant, for that part turns its values")]
    Needs {
        /// Type of the inputs.
        dtype: Dtype,
        /// The part.
        part: Technique,
    },
    /// A call whose blocks CTAs cannot load together.
    #[error("cluster is {cluster}: CTAs of v3 load blocks together in calls {of} alone")]
    Cluster {
        /// How many were to.
        cluster: u32,
        /// The calls in which they can.
        of: &'static str,
    },
    /// A part of the contract the stratum does not cover.
    #[error("{stratum} does not cover {feature}: it covers {}", list(stratum.coverage().features))]
    Feature {
        /// The stratum.
        stratum: Stratum,
        /// The part.
        feature: Feature,
    },
    /// A size beyond the stratum's.
    #[error("{argument} is {value}: {stratum} covers at most {most}")]
    Extent {
        /// The stratum.
        stratum: Stratum,
        /// Which size.
        argument: &'static str,
        /// What it is.
        value: usize,
        /// What it may be.
        most: usize,
    },
    /// An architecture without the stratum.
    #[error("target is {target}: {stratum} needs {min_sm} or later")]
    Target {
        /// The stratum.
        stratum: Stratum,
        /// The target.
        target: Target,
        /// The oldest architecture.
        min_sm: Sm,
    },
    /// A target that is late enough and still lacks what the stratum stands on.
    #[error("target is {target}: {stratum} needs {needs}")]
    Lacks {
        /// The stratum.
        stratum: Stratum,
        /// The target.
        target: Target,
        /// What it lacks.
        needs: arch::Feature,
    },
    /// A type the stratum does not compute in.
    #[error("dtype is {dtype}: {stratum} covers {}", list(stratum.coverage().dtypes))]
    Dtype {
        /// The stratum.
        stratum: Stratum,
        /// The type.
        dtype: Dtype,
    },
    /// A tensor that the copy engine cannot address.
    #[error("{argument}: {error}")]
    TensorMap {
        /// Which tensor.
        argument: &'static str,
        /// What is wrong with it.
        error: TensorMapError,
    },
    /// A tile size out of its range.
    #[error("{argument} is {value}: it must be {allowed}")]
    Tile {
        /// Which size.
        argument: &'static str,
        /// What it is.
        value: u32,
        /// What it may be.
        allowed: String,
    },
    /// More shared memory than a block may have.
    #[error("{stratum} needs {sum} bytes of shared memory > {allowed} allowed per block on {sm}")]
    Shared {
        /// The stratum.
        stratum: Stratum,
        /// The sum, term by term.
        sum: String,
        /// The bytes a block may have.
        allowed: u32,
        /// Where.
        sm: Sm,
    },
    /// More CTAs than a grid may have.
    #[error("batch x heads x blocks is {ctas} CTAs: a grid has at most {}", i32::MAX)]
    Grid {
        /// How many there would be.
        ctas: u128,
    },
    /// A stride or a workspace whose bytes do not fit 63 bits.
    #[error("{argument} takes {bytes} bytes: the most is {}", i64::MAX)]
    Size {
        /// Of what.
        argument: &'static str,
        /// How many.
        bytes: u128,
    },
    /// A buffer the plan's kernels cannot read.
    #[error("{argument} is at address {address:#x}: the plan was made for addresses that are multiples of {alignment}")]
    Misaligned {
        /// Which buffer.
        argument: &'static str,
        /// Where it is.
        address: u64,
        /// What must divide that.
        alignment: u64,
    },
    /// Not as many workspaces as the plan names.
    #[error("{given} workspaces are given: the plan has {needed}")]
    Workspaces {
        /// How many there were.
        given: usize,
        /// How many it takes.
        needed: usize,
    },
    /// A kernel that could not be written.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl PlanError {
    /// Whether it says that the stratum does not cover the call, rather than that something is wrong with what was asked.
    pub fn is_coverage(&self) -> bool {
        use PlanError::*;
        matches!(
            self,
            Feature { .. }
                | Extent { .. }
                | Target { .. }
                | Lacks { .. }
                | Dtype { .. }
                | TensorMap { .. }
                | Cluster { .. }
                | Needs { .. }
        )
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// The end that every sequence of a packed batch has for the copy engine.
///
/// The tensor map of a packed batch has rows along two dimensions of the same stride, and a third whose coordinate, this
/// number, takes their sum back by as much: row `length - n` from the end is `PACKED_END - n` in the first, whose extent this
/// is, and the sequence's end in the second. What is past the sequence's end is then outside the tensor, and read as 0.
/// (The arrangement is that of Triton's ragged tensor descriptors.)
pub const PACKED_END: i32 = 1 << 30;

/// The most CTAs that keys are split among.
pub(crate) const MAX_SPLITS: u32 = 256;

/// The largest `block_q` and `block_kv`.
const MAX_BLOCK: u32 = 256;

/// The most accumulators, scores and outputs, of one thread.
const MAX_ACCUMULATORS: u32 = 160;

impl Tiles {
    /// Checks the sizes against what the kernels can do with them.
    fn check(&self, config: &Config) -> Result<(), PlanError> {
        let Tiles { block_q, block_kv, threads } = *self;
        let refuse = |argument, value, allowed: String| Err(PlanError::Tile { argument, value, allowed });
        if block_kv == 0 || !block_kv.is_multiple_of(GROUP) || block_kv > MAX_BLOCK {
            return refuse("block_kv", block_kv, format!("a multiple of 16, at most {MAX_BLOCK}"));
        }
        let columns = config.padded_head_dim().max(config.padded_head_dim_v()).max(block_kv) / config.vector;
        let least_threads = columns.next_power_of_two().max(32);
        if !threads.is_power_of_two() || !(least_threads..=1024).contains(&threads) {
            return refuse("threads", threads, format!("a power of two from {least_threads} to 1024"));
        }
        let groups = threads / GROUP;
        if block_q == 0 || !block_q.is_multiple_of(groups) || block_q / groups > GROUP || block_q > MAX_BLOCK {
            let most = (groups * GROUP).min(MAX_BLOCK);
            return refuse("block_q", block_q, format!("a multiple of {groups} (threads / 16), at most {most}"));
        }
        let rows = block_q / groups;
        let accumulators = rows * (block_kv + config.padded_head_dim_v()) / GROUP;
        if accumulators > MAX_ACCUMULATORS {
            let allowed = format!(
                "so small that a thread holds at most {MAX_ACCUMULATORS} accumulators; {rows} queries x ({block_kv} keys + {} \
                 columns) / 16 lanes are {accumulators}",
                config.padded_head_dim_v()
            );
            return refuse("block_q", block_q, allowed);
        }
        Ok(())
    }
}

impl fmt::Display for SharedMemory {
    /// The sum, term by term: `q 32x64x4 = 8192 + ... = N`.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for (index, (name, rows, columns, bytes)) in self.tiles.iter().enumerate() {
            let plus = if index == 0 { "" } else { " + " };
            let product = u64::from(*rows) * u64::from(*columns) * u64::from(*bytes);
            write!(f, "{plus}{name} {rows}x{columns}x{bytes} = {product}")?;
        }
        write!(f, "{}{}", if self.tiles.is_empty() { "" } else { " = " }, self.bytes())
    }
}

/// What a caller may choose about a plan; by default the stratum chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Options {
    /// Tile sizes.
    pub tiles: Option<Tiles>,
    /// The CTAs that the keys of a tile of queries are split among, their results joined by a kernel of its own, of
    /// [`Stratum::V2Tc`]; 1 splits nothing. By default as many as fill the GPU.
    pub splits: Option<u32>,
    /// The multiprocessors of the GPU, which are to be filled; by default those of the largest of its architecture.
    pub multiprocessors: Option<u32>,
    /// Whether f32 is multiplied as tf32, 11 bits, of [`Stratum::V2Tc`]; by default in three products, to f32's precision.
    pub tf32: bool,
    /// What of [`Stratum::V3`] is left out, to measure what it brings.
    pub without: Without,
    /// The CTAs of [`Stratum::V3`] that load blocks of keys and values together, 1 or 2, of calls without a mask whose sequences
    /// have one length; by default 1. Of an odd number of tiles one more is computed, and not stored.
    pub cluster: Option<u32>,
}

impl Options {
    /// The multiprocessors that are to be filled, on an architecture.
    fn multiprocessors_of(&self, sm: Sm) -> u32 {
        let largest = || arch::GPUS.iter().filter(|gpu| gpu.sm == sm).map(|gpu| gpu.sm_count).max();
        self.multiprocessors.or_else(largest).unwrap_or(1)
    }
}

/// Plans a call.
///
/// `tiles` are the stratum's default ones unless given.
///
/// # Errors
/// When the stratum does not cover the call, the tiles do not fit the architecture, or the sizes exceed what a launch can have.
pub fn plan(
    stratum: Stratum,
    problem: &Problem,
    target: Target,
    layout: &Layout,
    tiles: Option<Tiles>,
) -> Result<Plan, PlanError> {
    plan_with(stratum, problem, target, layout, &Options { tiles, ..Options::default() })
}

/// Plans a call as the caller chose.
///
/// # Errors
/// Those of [`plan()`], or when there are no splits or too many.
pub fn plan_with(
    stratum: Stratum,
    problem: &Problem,
    target: Target,
    layout: &Layout,
    options: &Options,
) -> Result<Plan, PlanError> {
    let config = configure(stratum, problem, target, layout, options)?;
    let mut planner = Planner { stratum, problem, layout, config, launches: Vec::new(), workspaces: Vec::new() };
    match stratum {
        Stratum::Naive => planner.naive()?,
        Stratum::V1 => planner.v1()?,
        Stratum::V2 => planner.v2()?,
        Stratum::V2Kt => planner.v2_kt()?,
        Stratum::V2Tc => planner.v2_tc(options)?,
        Stratum::V3 => planner.v3()?,
    }
    let Planner { config, launches, workspaces, .. } = planner;
    Ok(Plan {
        stratum,
        config,
        launches,
        workspaces,
        alignment: match stratum {
            // What the copy engine needs, whatever the output's rows are accessed by.
            Stratum::V3 if !config.by_threads => 16,
            Stratum::V2Tc | Stratum::V3 => {
                (u64::from(config.vector) * problem.dtype.out().bytes() as u64).max(config.piece.into())
            }
            _ => u64::from(config.vector) * problem.dtype.bytes() as u64,
        },
        batch: problem.batch,
        heads_q: problem.heads_q,
    })
}

/// What a call's kernels are compiled for: the first half of [`plan_with`], in which nothing is written yet.
///
/// # Errors
/// When the stratum does not cover the call, or has no such tiles.
pub fn configure(
    stratum: Stratum,
    problem: &Problem,
    target: Target,
    layout: &Layout,
    options: &Options,
) -> Result<Config, PlanError> {
    covered(stratum, problem, target)?;
    if let Some(splits) = options.splits.filter(|splits| !(1..=MAX_SPLITS).contains(splits)) {
        let allowed = format!("1 to {MAX_SPLITS}");
        return Err(PlanError::Tile { argument: "splits", value: splits, allowed });
    }
    if let Some(cluster) = options.cluster.filter(|cluster| !(1..=v3::MAX_CLUSTER).contains(cluster)) {
        let allowed = format!("1 to {}", v3::MAX_CLUSTER);
        return Err(PlanError::Tile { argument: "cluster", value: cluster, allowed });
    }
    let window = problem.mask != Mask::FULL && problem.mask != Mask::CAUSAL;
    let sm = target.sm();
    let tiles = options.tiles.unwrap_or_else(|| stratum.default_tiles(sm, options.multiprocessors_of(sm), problem));
    let config = Config {
        target,
        dtype: problem.dtype,
        head_dim: problem.head_dim as u32,
        head_dim_v: problem.head_dim_v as u32,
        causal: problem.mask == Mask::CAUSAL,
        window,
        varlen: problem.varlen.is_some(),
        // Where tiles differ in length, who is done takes the next.
        dynamic: stratum == Stratum::V3
            && (problem.mask != Mask::FULL || problem.varlen.is_some())
            && !options.without.producer,
        by_threads: false,
        grouped: match stratum {
            Stratum::V2Tc => v2_tc::shares_heads(problem),
            Stratum::V3 => !options.without.grouping && v3::shares_heads(problem, tiles.block_q),
            _ => false,
        },
        tf32: options.tf32,
        fine_weights: stratum == Stratum::V3 && v3::has_fine_weights(problem),
        without: options.without,
        cluster: options.cluster.filter(|_| stratum == Stratum::V3).unwrap_or(1),
        split: false,
        cache: problem.cache.as_ref().map_or_else(Default::default, Cache::code),
        softcap: problem.softcap.is_some(),
        alibi: problem.alibi_slopes.is_some(),
        vector: match stratum {
            Stratum::V2Tc | Stratum::V3 => layout.out_vector(problem),
            _ => layout.vector(problem),
        },
        piece: layout.piece(problem),
        tiles,
    };
    match stratum {
        Stratum::V2Tc => v2_tc::check_tiles(&config)?,
        Stratum::V3 => v3::check_tiles(&config).and_then(|()| v3::check_cluster(&config))?,
        _ => config.tiles.check(&config)?,
    }
    Ok(config)
}

/// Whether a stratum covers a problem on an architecture; [`Feature::Strided`] is the tensors' matter, not the problem's.
///
/// # Errors
/// The first part that it does not cover.
pub fn covered(stratum: Stratum, problem: &Problem, target: Target) -> Result<(), PlanError> {
    let Coverage { min_sm, needs, dtypes, max_head_dim, max_seqlen, features } = stratum.coverage();
    if target.sm() < min_sm {
        return Err(PlanError::Target { stratum, target, min_sm });
    }
    if let Some(needs) = needs.filter(|&needs| !target.supports(needs)) {
        return Err(PlanError::Lacks { stratum, target, needs });
    }
    if !dtypes.contains(&problem.dtype) {
        return Err(PlanError::Dtype { stratum, dtype: problem.dtype });
    }
    let of_type = match (stratum, problem.dtype) {
        (Stratum::V2Tc, Dtype::Bf16) => Some(arch::Feature::Bf16Mma),
        (Stratum::V2Tc, Dtype::F32) => Some(arch::Feature::Tf32Mma),
        _ => None,
    };
    if let Some(needs) = of_type.filter(|&needs| !target.supports(needs)) {
        return Err(PlanError::Lacks { stratum, target, needs });
    }
    if let Some(feature) = problem.features().into_iter().find(|feature| !features.contains(feature)) {
        return Err(PlanError::Feature { stratum, feature });
    }
    let extents = [
        ("head_dim", problem.head_dim, max_head_dim),
        ("head_dim_v", problem.head_dim_v, max_head_dim),
        ("seqlen_q", problem.seqlen_q, max_seqlen),
        ("seqlen_k", problem.seqlen_k, max_seqlen),
    ];
    match extents.into_iter().find(|(_, value, most)| value > most) {
        Some((argument, value, most)) => Err(PlanError::Extent { stratum, argument, value, most }),
        None => Ok(()),
    }
}

/// A plan in the making.
struct Planner<'a> {
    stratum: Stratum,
    problem: &'a Problem,
    layout: &'a Layout,
    config: Config,
    launches: Vec<LaunchPlan>,
    workspaces: Vec<Workspace>,
}

impl Planner<'_> {
    fn naive(&mut self) -> Result<(), PlanError> {
        let Tiles { block_q, block_kv, threads } = self.config.tiles;
        let columns = (self.problem.seqlen_k as u64).next_multiple_of(u64::from(block_kv));
        let (scores, scores_row) = (self.workspace("scores", &[self.queries(), columns.into(), 4])?, 4 * columns);
        let sums = self.workspace("l", &[self.queries(), 4])?;
        let scores = [ArgRef::Buffer(scores), ArgRef::U64(scores_row)];
        let sums = [ArgRef::Buffer(sums)];
        let key_blocks = self.key_blocks();

        let (q, k, v, out) = (self.q()?, self.k()?, self.v()?, self.out()?);
        let blocks = self.query_blocks(block_q) * key_blocks;
        let arguments = [&[ArgRef::U32(key_blocks as u32)][..], &q, &k, &scores].concat();
        self.launch(naive::scores, Heads::Query, blocks, arguments)?;
        let blocks = self.query_blocks(threads / 32);
        let arguments = [&[ArgRef::U32(columns as u32)][..], &scores, &sums, &[ArgRef::Buffer(Buffer::Lse)]].concat();
        self.launch(naive::softmax, Heads::Query, blocks, arguments)?;
        let arguments = [&scores[..], &sums, &v, &out].concat();
        self.launch(naive::output, Heads::Query, self.query_blocks(block_q), arguments)
    }

    fn v1(&mut self) -> Result<(), PlanError> {
        let sums = self.workspace("l", &[self.queries(), 4])?;
        let mut arguments = [&self.q()?[..], &self.k()?, &self.v()?, &self.out()?].concat();
        arguments.extend([ArgRef::Buffer(Buffer::Lse), ArgRef::Buffer(sums)]);
        if self.problem.dtype != Dtype::F32 {
            let row = 4 * self.problem.head_dim_v as u64;
            let state = self.workspace("o", &[self.queries(), row.into()])?;
            arguments.extend([ArgRef::Buffer(state), ArgRef::U64(row)]);
        }
        let blocks = u64::from(self.problem.seqlen_q > 0);
        self.launch(v1::v1, Heads::Query, blocks, arguments)
    }

    fn v2(&mut self) -> Result<(), PlanError> {
        let mut arguments = [&self.q()?[..], &self.k()?, &self.v()?, &self.out()?].concat();
        arguments.push(ArgRef::Buffer(Buffer::Lse));
        self.launch(v2::v2, Heads::Query, self.query_blocks(self.config.tiles.block_q), arguments)
    }

    fn v2_kt(&mut self) -> Result<(), PlanError> {
        let (problem, config) = (self.problem, self.config);
        let keys = self.key_blocks() * u64::from(config.tiles.block_kv);
        let keys = keys.next_multiple_of(u64::from(v2_kt::TRANSPOSED));
        let row = u128::from(keys) * problem.dtype.bytes() as u128;
        let head = row * problem.head_dim as u128;
        let batch = head * problem.heads_kv as u128;
        let buffer = self.workspace("k_transposed", &[batch, problem.batch as u128])?;
        let transposed = tensor(buffer, "k_transposed", [batch, head, row])?;

        let blocks = keys / u64::from(v2_kt::TRANSPOSED) * u64::from(config.head_dim.div_ceil(v2_kt::TRANSPOSED));
        let blocks = if problem.seqlen_q > 0 { blocks } else { 0 };
        let arguments = [self.k()?, transposed.clone()].concat();
        self.launch(v2_kt::transpose_keys, Heads::Key, blocks, arguments)?;

        let mut arguments = [&self.q()?[..], &transposed, &self.v()?, &self.out()?].concat();
        arguments.push(ArgRef::Buffer(Buffer::Lse));
        self.launch(v2_kt::v2_kt, Heads::Query, self.query_blocks(config.tiles.block_q), arguments)
    }

    fn v2_tc(&mut self, options: &Options) -> Result<(), PlanError> {
        let (problem, sm) = (self.problem, self.config.target.sm());
        let splits =
            options.splits.unwrap_or_else(|| v2_tc::splits(problem, &self.config, options.multiprocessors_of(sm)));
        let q = match problem.cache.as_ref().and_then(|cache| cache.append) {
            Some(append) => self.append(append)?,
            None => self.q()?,
        };
        let tensors = [q, self.k()?, self.v()?].concat();
        self.config.split = splits > 1;
        if splits == 1 {
            let results = self.results()?;
            return self.launch_scheduled(v2_tc::v2_tc, Vec::new(), tensors, results, 1, false);
        }

        // The parts, each like an unpacked batch in f32.
        let heads_in_all = problem.batch as u128 * problem.heads_q as u128;
        let rows = heads_in_all * problem.seqlen_q as u128;
        let row = 4 * problem.head_dim_v as u128;
        let head = row * problem.seqlen_q as u128;
        let parts = self.workspace("out_parts", &[u128::from(splits), rows, row])?;
        let lse_parts = self.workspace("lse_parts", &[u128::from(splits), rows, 4])?;
        let sizes = [ArgRef::U64((rows * row) as u64), ArgRef::U64((rows * 4) as u64)];
        let mut results = tensor(parts, "out_parts", [head * problem.heads_q as u128, head, row])?;
        results.push(ArgRef::Buffer(lse_parts));
        results.extend(sizes.clone());
        self.launch_scheduled(v2_tc::v2_tc, Vec::new(), tensors, results, splits, false)?;

        let mut arguments = vec![ArgRef::U32(splits), ArgRef::Buffer(parts), ArgRef::Buffer(lse_parts)];
        arguments.extend(sizes);
        arguments.extend(self.out()?);
        arguments.push(ArgRef::Buffer(Buffer::Lse));
        if self.config.varlen {
            arguments.extend([ArgRef::Buffer(Buffer::CuSeqlensQ), ArgRef::U32(problem.total_q() as u32)]);
        }
        self.launch(combine::combine, Heads::Query, self.query_blocks(combine::ROWS), arguments)
    }

    /// Appends to the cache before anything is read; gives the queries, turned or as they are.
    fn append(&mut self, append: Append) -> Result<Vec<ArgRef>, PlanError> {
        let problem = self.problem;
        let new_rows = append.seqlen * problem.heads_kv;
        let mut arguments = vec![ArgRef::U32(new_rows as u32), ArgRef::U32(problem.heads_kv as u32)];
        arguments.push(ArgRef::Buffer(Buffer::CacheSeqlens));
        arguments.extend(self.places());
        for (buffer, name, strides) in
            [(Buffer::KNew, "k_new", self.layout.new[0]), (Buffer::VNew, "v_new", self.layout.new[1])]
        {
            arguments.extend(self.tensor(buffer, name, strides)?);
        }
        arguments.extend([self.k()?, self.v()?].concat());
        let (mut rows, mut queries) = (new_rows as u64, self.q()?);
        if let Some(Rotary { positions, .. }) = append.rotary {
            let q_rows = problem.seqlen_q * problem.heads_q;
            let row = (problem.head_dim * problem.dtype.bytes()) as u128;
            let of_entry = row * q_rows as u128;
            let turned = self.workspace("q_turned", &[of_entry, problem.batch as u128])?;
            let turned = tensor(turned, "q_turned", [of_entry, row, row * problem.heads_q as u128])?;
            arguments.extend([Buffer::RotaryCos, Buffer::RotarySin].map(ArgRef::Buffer));
            arguments.extend([positions, q_rows, problem.heads_q].map(|value| ArgRef::U32(value as u32)));
            arguments.extend(std::mem::replace(&mut queries, turned.clone()));
            arguments.extend(turned);
            rows += q_rows as u64;
        }
        if i32::try_from(rows).is_err() {
            return Err(PlanError::Grid { ctas: rows.into() });
        }
        self.launch(append::append, Heads::All, rows.div_ceil(append::ROWS.into()), arguments)?;
        Ok(queries)
    }

    /// Which rows or pages of a cache each entry's keys are in.
    fn places(&self) -> Vec<ArgRef> {
        let Some(cache) = &self.problem.cache else { return Vec::new() };
        let mut places = Vec::new();
        if cache.batch_idx.is_some() {
            places.push(ArgRef::Buffer(Buffer::CacheBatchIdx));
        }
        if cache.pages.is_some() {
            let of_entry = cache.pages_of_entry(self.problem.batch);
            places.extend([ArgRef::Buffer(Buffer::BlockTable), ArgRef::U32(of_entry as u32)]);
        }
        places
    }

    /// The output and the logarithms.
    fn results(&self) -> Result<Vec<ArgRef>, PlanError> {
        let mut results = self.out()?;
        results.push(ArgRef::Buffer(Buffer::Lse));
        if self.config.varlen {
            results.push(ArgRef::U32(self.problem.total_q() as u32));
        }
        Ok(results)
    }

    fn v3(&mut self) -> Result<(), PlanError> {
        // Of a block, what one CTA loads.
        let keys = self.config.tiles.block_kv / self.config.cluster;
        if self.problem.seqlen_q == 0 || self.problem.batch == 0 {
            return Ok(());
        }
        let maps = [(Buffer::Q, "q", hopper::ROWS), (Buffer::K, "k", keys), (Buffer::V, "v", keys)];
        let maps = maps.into_iter().map(|(buffer, argument, rows)| self.tensor_map(buffer, argument, rows));
        let inputs = match maps.collect() {
            Err(PlanError::TensorMap { .. })
                if copies::are_asynchronous(self.config.target, self.config.piece)
                    && !self.config.dtype.is_scaled()
                    && !self.config.without.producer
                    && self.config.cluster == 1 =>
            {
                // What the copy engine cannot address threads copy, each tile in its turn, and each head's by itself.
                self.config = Config { by_threads: true, dynamic: false, grouped: false, ..self.config };
                v3::check_tiles(&self.config)?;
                [self.q()?, self.k()?, self.v()?].concat()
            }
            maps => maps?,
        };
        let padding = self.config.grouped.then(|| ArgRef::U32(v3::rows_of_query(self.problem).ilog2()));
        let results = self.results()?;
        self.launch_scheduled(v3::v3, inputs, Vec::from_iter(padding), results, 1, true)
    }

    /// Adds a launch of a kernel that takes its tiles from [`crate::schedule`], one CTA each or, where CTAs stay, one after the
    /// other; none when there is no query. `first` are the arguments before the schedule's, `tensors` and `results` those after.
    fn launch_scheduled(
        &mut self,
        write: fn(&Config) -> Result<Program, KernelError>,
        first: Vec<ArgRef>,
        tensors: Vec<ArgRef>,
        results: Vec<ArgRef>,
        splits: u32,
        stays: bool,
    ) -> Result<(), PlanError> {
        let (problem, config) = (self.problem, self.config);
        if problem.seqlen_q == 0 || problem.batch == 0 {
            return Ok(());
        }
        // The heads that the grid runs over, and the rows that a query has of each.
        let (heads, rows_of_query) = match (config.grouped, self.stratum) {
            (false, _) => (problem.heads_q, 1),
            (true, Stratum::V3) => (problem.heads_kv, v3::rows_of_query(problem)),
            (true, _) => (problem.heads_kv, problem.group()),
        };
        let rows = problem.seqlen_q as u64 * rows_of_query as u64;
        let blocks = rows.div_ceil(config.tiles.block_q.into()).next_multiple_of(config.cluster.into());
        let heads_in_all = problem.batch as u64 * heads as u64;
        let tiles = u128::from(heads_in_all) * u128::from(blocks);
        let ctas = tiles * u128::from(splits);
        let Some(ctas) = i32::try_from(ctas).ok().map(|ctas| ctas as u32) else {
            return Err(PlanError::Grid { ctas });
        };
        let tiles = ctas / splits;
        let blocks = blocks as u32;
        let section = v3::section(problem, heads_in_all, blocks);
        let mut arguments = first;
        arguments.extend([
            ArgRef::S32(problem.seqlen_q as i32),
            ArgRef::S32(problem.seqlen_k as i32),
            ArgRef::U32(heads as u32),
            ArgRef::U32(problem.group() as u32),
            ArgRef::U32(blocks),
            ArgRef::U32(tiles),
            ArgRef::U32(heads_in_all as u32),
            ArgRef::U32(section),
        ]);
        if config.split {
            arguments.push(ArgRef::U32(splits));
        }
        if config.varlen {
            arguments.extend([ArgRef::Buffer(Buffer::CuSeqlensQ), ArgRef::Buffer(Buffer::CuSeqlensK)]);
        }
        if let Some(cache) = problem.cache.as_ref().filter(|_| config.cache.lengths) {
            arguments.extend([ArgRef::Buffer(Buffer::CacheSeqlens), ArgRef::S32(cache.appended() as i32)]);
        }
        if config.cache.padded {
            arguments.push(ArgRef::Buffer(Buffer::CacheLeftpad));
        }
        arguments.extend(self.places());
        if config.window {
            // Positions add up to less than the lengths together: a side that is further away is unbounded.
            let most = (problem.seqlen_q + problem.seqlen_k).min(PACKED_END as usize);
            let side = |side: Option<usize>| ArgRef::S32(side.unwrap_or(most).min(most) as i32);
            arguments.extend([side(problem.mask.left), side(problem.mask.right)]);
        }
        arguments.extend(tensors);
        arguments.extend(results);
        arguments.push(ArgRef::F32(problem.scale() as f32));
        arguments.extend(problem.softcap.map(ArgRef::F32));
        if let Some(slopes) = &problem.alibi_slopes {
            let of_entry = if slopes.len() == problem.heads_q { 0 } else { problem.heads_q };
            arguments.extend([ArgRef::Buffer(Buffer::AlibiSlopes), ArgRef::U32(of_entry as u32)]);
        }
        if problem.dtype.is_scaled() {
            arguments.extend([Buffer::QDescale, Buffer::KDescale, Buffer::VDescale].map(ArgRef::Buffer));
            arguments.push(ArgRef::U32(problem.heads_kv as u32));
        }
        if config.dynamic {
            let counter = self.workspace("counter", &[8])?;
            self.workspaces.iter_mut().for_each(|workspace| workspace.zeroed = true);
            arguments.push(ArgRef::Buffer(counter));
        }
        let Program { kernel, shared } = write(&config)?;
        self.fits(&shared)?;
        self.launches.push(LaunchPlan {
            block: kernel.required_block.unwrap_or([config.tiles.threads, 1, 1]),
            kernel,
            grid: [ctas, 1, 1],
            dynamic_shared: shared.bytes() as u32,
            shared,
            arguments,
            blocks,
            group: (problem.heads_q / heads) as u32,
            heads: heads as u32,
            section: Some(section),
            splits,
            stays,
        });
        Ok(())
    }

    /// A tensor's map for the copy engine, by boxes of a slab's columns and so many rows.
    fn tensor_map(&self, buffer: Buffer, argument: &'static str, rows: u32) -> Result<ArgRef, PlanError> {
        let problem = self.problem;
        let (strides, seqlen, heads, dim) = match buffer {
            Buffer::Q => (self.layout.q, problem.seqlen_q, problem.heads_q, problem.head_dim),
            Buffer::K => (self.layout.k, problem.seqlen_k, problem.heads_kv, problem.head_dim),
            _ => (self.layout.v, problem.seqlen_k, problem.heads_kv, problem.head_dim_v),
        };
        let (bytes, slab) = (problem.dtype.bytes() as u64, hopper::slab(problem.dtype));
        // Of a dimension that has one element or none, the stride says nothing.
        let stride = |extent: usize, stride: usize| if extent <= 1 { 16 } else { stride as u64 * bytes };
        let (row, head) = (stride(seqlen, strides.seq), stride(heads, strides.head));
        let (heads, dim) = (heads as u64, dim as u64);
        let (mut sizes, mut strides, mut boxes) = if self.config.varlen {
            let row = strides.seq as u64 * bytes;
            let end = PACKED_END as u64;
            let back = (1u64 << 34).wrapping_sub(row);
            (vec![dim, end, heads, end, end + 1], vec![row, head, row, back], vec![slab, rows, 1, 1, 1])
        } else {
            let batch = stride(problem.batch, strides.batch);
            let (seqlen, batches) = (seqlen.max(1) as u64, problem.batch as u64);
            (vec![dim, seqlen, heads, batches], vec![row, head, batch], vec![slab, rows, 1, 1])
        };
        if buffer == Buffer::Q && self.config.grouped {
            // The heads of one query after the other's; those of the next group stand for what a power of two has beyond.
            let rows_of_query = v3::rows_of_query(problem) as u32;
            sizes.swap(1, 2);
            strides.swap(0, 1);
            (boxes[1], boxes[2]) = (rows_of_query, rows / rows_of_query);
        }
        // The address comes with the call; one that is aligned as all are said to be stands for it.
        let address = self.layout.alignment;
        let mut map = TensorMap::dense(problem.dtype.element(), address, &sizes, &strides, &boxes);
        map.swizzle = Swizzle::Bytes128;
        map.l2_promotion = L2Promotion::Bytes256;
        map.validate().map_err(|error| PlanError::TensorMap { argument, error })?;
        Ok(ArgRef::TensorMap(buffer, Box::new(map)))
    }

    fn queries(&self) -> u128 {
        self.problem.total_q() as u128 * self.problem.heads_q as u128
    }

    fn query_blocks(&self, block: u32) -> u64 {
        (self.problem.seqlen_q as u64).div_ceil(block.into())
    }

    fn key_blocks(&self) -> u64 {
        (self.problem.seqlen_k as u64).div_ceil(self.config.tiles.block_kv.into())
    }

    fn q(&self) -> Result<Vec<ArgRef>, PlanError> {
        self.tensor(Buffer::Q, "q", self.layout.q)
    }

    fn k(&self) -> Result<Vec<ArgRef>, PlanError> {
        self.tensor(Buffer::K, "k", self.layout.k)
    }

    fn v(&self) -> Result<Vec<ArgRef>, PlanError> {
        self.tensor(Buffer::V, "v", self.layout.v)
    }

    fn out(&self) -> Result<Vec<ArgRef>, PlanError> {
        self.tensor(Buffer::Out, "out", self.layout.out)
    }

    fn tensor(&self, buffer: Buffer, name: &'static str, strides: Strides) -> Result<Vec<ArgRef>, PlanError> {
        let dtype = if buffer == Buffer::Out { self.problem.dtype.out() } else { self.problem.dtype };
        let bytes = |stride: usize| stride as u128 * dtype.bytes() as u128;
        tensor(buffer, name, [bytes(strides.batch), bytes(strides.head), bytes(strides.seq)])
    }

    /// A workspace of so many bytes, a product.
    fn workspace(&mut self, name: &'static str, factors: &[u128]) -> Result<Buffer, PlanError> {
        let bytes = factors.iter().fold(1, |bytes: u128, factor| bytes.saturating_mul(*factor));
        self.workspaces.push(Workspace { name, bytes: in_63_bits(name, bytes)?, zeroed: false });
        Ok(Buffer::Workspace(self.workspaces.len() - 1))
    }

    /// Whether a block may have so much shared memory.
    fn fits(&self, shared: &SharedMemory) -> Result<(), PlanError> {
        let (stratum, sm) = (self.stratum, self.config.target.sm());
        let allowed = sm.limits().shared_opt_in_per_block;
        if shared.bytes() > u64::from(allowed) {
            return Err(PlanError::Shared { stratum, sum: shared.to_string(), allowed, sm });
        }
        Ok(())
    }

    /// Adds a launch of `blocks` CTAs per head; none when there is no CTA.
    fn launch(
        &mut self,
        write: fn(&Config) -> Result<Program, KernelError>,
        heads: Heads,
        blocks: u64,
        arguments: Vec<ArgRef>,
    ) -> Result<(), PlanError> {
        let problem = self.problem;
        let Program { kernel, shared } = write(&self.config)?;
        self.fits(&shared)?;
        let (heads, group) = match heads {
            Heads::Query => (problem.heads_q, problem.group()),
            Heads::Key => (problem.heads_kv, 1),
            Heads::All => (1, problem.heads_q),
        };
        let ctas = problem.batch as u128 * heads as u128 * u128::from(blocks);
        let Some(grid) = i32::try_from(ctas).ok().map(|ctas| ctas as u32) else {
            return Err(PlanError::Grid { ctas });
        };
        if grid == 0 {
            return Ok(());
        }
        let mut all = vec![
            ArgRef::S32(problem.seqlen_q as i32),
            ArgRef::S32(problem.seqlen_k as i32),
            ArgRef::U32(heads as u32),
            ArgRef::U32(group as u32),
            ArgRef::U32(blocks as u32),
            ArgRef::F32(problem.scale() as f32),
        ];
        all.extend(arguments);
        let block = kernel.required_block.unwrap_or([self.config.tiles.threads, 1, 1]);
        self.launches.push(LaunchPlan {
            block,
            kernel,
            grid: [grid, 1, 1],
            dynamic_shared: shared.bytes() as u32,
            shared,
            arguments: all,
            blocks: blocks as u32,
            group: (problem.heads_q / heads) as u32,
            heads: heads as u32,
            section: None,
            splits: 1,
            stays: false,
        });
        Ok(())
    }
}

/// Which heads a grid runs over.
#[derive(Clone, Copy, Debug)]
enum Heads {
    Query,
    Key,
    /// Over none: CTAs have rows of all heads.
    All,
}

/// A tensor's arguments: its address, and its strides by batch entry, head and row in bytes.
fn tensor(buffer: Buffer, name: &'static str, strides: [u128; 3]) -> Result<Vec<ArgRef>, PlanError> {
    let strides = strides.into_iter().map(|stride| in_63_bits(name, stride).map(ArgRef::U64));
    std::iter::once(Ok(ArgRef::Buffer(buffer))).chain(strides).collect()
}

fn in_63_bits(argument: &'static str, bytes: u128) -> Result<u64, PlanError> {
    i64::try_from(bytes).map(|bytes| bytes as u64).map_err(|_| PlanError::Size { argument, bytes })
}

impl Plan {
    /// Whether the launches can run on these addresses.
    ///
    /// # Errors
    /// When an address is not aligned as the layout said, or there are not as many workspaces as the plan has.
    pub fn check(&self, buffers: &Buffers) -> Result<(), PlanError> {
        // Nothing runs, so nothing is read: tensors without an element may be anywhere.
        if self.launches.is_empty() {
            return Ok(());
        }
        let (given, needed) = (buffers.workspaces.len(), self.workspaces.len());
        if given != needed {
            return Err(PlanError::Workspaces { given, needed });
        }
        let tensors = [("q", buffers.q), ("k", buffers.k), ("v", buffers.v), ("out", buffers.out)];
        let tensors = tensors.map(|(argument, address)| (argument, address, self.alignment));
        let workspaces = buffers.workspaces.iter().zip(&self.workspaces).map(|(&address, w)| (w.name, address, 16));
        for (argument, address, alignment) in tensors.into_iter().chain([("lse", buffers.lse, 4)]).chain(workspaces) {
            if !address.is_multiple_of(alignment) {
                return Err(PlanError::Misaligned { argument, address, alignment });
            }
        }
        Ok(())
    }

    /// The launches on a backend's addresses, to run one after the other. Where CTAs stay, no more are launched than there are
    /// `multiprocessors`, if those are said; otherwise one for each tile.
    ///
    /// # Errors
    /// As [`Plan::check`].
    pub fn launches(&self, buffers: &Buffers, multiprocessors: Option<u32>) -> Result<Vec<Launch<'_>>, PlanError> {
        self.check(buffers)?;
        let argument = |argument: &ArgRef| match *argument {
            ArgRef::Buffer(buffer) => Argument::Pointer(buffers.address(buffer)),
            ArgRef::TensorMap(buffer, ref map) => {
                Argument::TensorMap(Box::new(TensorMap { address: buffers.address(buffer), ..*map.clone() }))
            }
            ArgRef::S32(value) => Argument::S32(value),
            ArgRef::U32(value) => Argument::U32(value),
            ArgRef::U64(value) => Argument::U64(value),
            ArgRef::F32(value) => Argument::F32(value),
        };
        let launch = |plan| {
            let LaunchPlan { kernel, grid, block, dynamic_shared, arguments, stays, .. }: &LaunchPlan = plan;
            let arguments = arguments.iter().map(argument).collect();
            let cluster = kernel.required_cluster.unwrap_or([1, 1, 1]);
            let resident = multiprocessors.filter(|_| *stays).unwrap_or(u32::MAX);
            // Whole clusters.
            let resident = (resident / cluster[0]).max(1) * cluster[0];
            Launch {
                kernel,
                grid: [grid[0].min(resident), grid[1], grid[2]],
                block: *block,
                cluster,
                dynamic_shared: *dynamic_shared,
                arguments,
            }
        };
        Ok(self.launches.iter().map(launch).collect())
    }

    /// For each launch, the linear indices of the CTAs that compute (or, for keys shared by a group, prepare) one head.
    ///
    /// Running these alone leaves that head's output complete. Empty when there is no such head.
    pub fn ctas_of(&self, entry: usize, head: usize) -> Vec<Vec<u64>> {
        let there = entry < self.batch && head < self.heads_q;
        let of = |launch: &LaunchPlan| {
            let index = entry as u64 * u64::from(launch.heads) + head as u64 / u64::from(launch.group);
            let blocks = u64::from(launch.blocks);
            let Some(section) = launch.section.map(u64::from) else {
                return (index * blocks..(index + 1) * blocks).collect();
            };
            let before = index / section * section;
            let heads = section.min(self.batch as u64 * u64::from(launch.heads) - before);
            let tiles = launch.ctas() / u64::from(launch.splits);
            let of_part = |part| {
                let first = part * tiles + before * blocks + index - before;
                (0..blocks).map(move |from_last| first + from_last * heads)
            };
            (0..u64::from(launch.splits)).flat_map(of_part).collect()
        };
        self.launches.iter().map(|launch| if there { of(launch) } else { Vec::new() }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemSpec;

    fn planned(stratum: Stratum, spec: ProblemSpec, sm: Sm, tiles: Option<Tiles>) -> Result<Plan, PlanError> {
        let problem = spec.build().unwrap();
        plan(stratum, &problem, Target::best(sm), &Layout::contiguous(&problem), tiles)
    }

    fn refused(spec: ProblemSpec, tiles: Option<Tiles>) -> String {
        planned(Stratum::V2, spec, Sm::Sm75, tiles).unwrap_err().to_string()
    }

    fn tiles(block_q: u32, block_kv: u32, threads: u32) -> Option<Tiles> {
        Some(Tiles { block_q, block_kv, threads })
    }

    #[test]
    fn parts_of_the_keys_are_resident_together() {
        for spec in ["1x32x1/65536x128 bf16", "1x32x1/65536x64 bf16", "1x32/8x1/65536x128 bf16"] {
            let problem: Problem = spec.parse().unwrap();
            let options = Options { multiprocessors: Some(132), ..Options::default() };
            let layout = Layout::contiguous(&problem);
            let plan = plan_with(Stratum::V2Tc, &problem, Target::best(Sm::Sm90), &layout, &options).unwrap();
            assert!(plan.config.split, "{spec}");
            let resident = u64::from(132 * v2_tc::Geometry::new(&plan.config).ctas);
            let ctas = plan.launches[0].ctas();
            assert!(ctas <= resident, "{spec}: {ctas} CTAs, of which {resident} are resident");
        }
    }

    #[test]
    fn tiles_are_small_where_large_ones_do_not_fill_the_gpu() {
        let block_q = |text: &str, multiprocessors| {
            Stratum::V2Tc.default_tiles(Sm::Sm90, multiprocessors, &text.parse().unwrap()).block_q
        };
        for (text, small) in [
            // 128, 192 and 256 large tiles: small ones all run at once, three on a multiprocessor, in the first two cases.
            ("1x16x1024x128 bf16", true),
            ("1x24x1024x128 bf16", true),
            ("1x32x1024x128 bf16", false),
            // Under a causal mask large ones that all run at once take as long as the longest.
            ("1x32x1024x128 bf16 causal", true),
            ("1x32x1024/2048x128 bf16 causal", false),
            ("1x32x2048x128 bf16 causal", false),
            ("1x16x1024x64 bf16 causal", true),
            ("1x32x1024x64 bf16 causal", false),
            // Keys are split instead.
            ("1x16x1024x64 bf16", false),
            ("1x16x512/16384x64 bf16 causal", false),
        ] {
            assert_eq!(block_q(text, 132), if small { 64 } else { 128 }, "{text}");
            assert_eq!(block_q(text, 1), 128, "{text}");
        }
    }

    #[test]
    fn refusals_say_what_and_why() {
        let spec = || ProblemSpec::new(1, 2, 64, 64);
        let messages = [
            refused(spec().mask(Mask::window(4, 0)), None),
            refused(spec().softcap(30.0), None),
            refused(ProblemSpec::packed(2, 64, vec![0, 4], vec![0, 4]), None),
            refused(ProblemSpec::new(1, 1, 8, 160), None),
            refused(spec().seqlen_k(i32::MAX as usize), None),
            refused(spec(), tiles(64, 128, 128)),
            refused(spec(), tiles(64, 64, 100)),
            refused(spec(), tiles(31, 32, 128)),
            refused(spec(), tiles(32, 24, 128)),
            refused(spec(), tiles(32, u32::MAX, 128)),
            refused(spec(), tiles(256, 256, 256)),
            refused(ProblemSpec::new(1 << 16, 1 << 8, 1 << 12, 1), None),
            planned(Stratum::V1, spec(), Sm::Sm70, None).unwrap_err().to_string(),
        ];
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn addresses_are_checked() {
        let plan = planned(Stratum::V2Kt, ProblemSpec::new(1, 2, 64, 64), Sm::Sm75, None).unwrap();
        let buffers =
            |k, workspaces| Buffers { q: 256, k, v: 512, out: 1024, lse: 2048, workspaces, ..Default::default() };
        assert_eq!(plan.launches(&buffers(4096, vec![4096]), None).unwrap().len(), 2);
        let error = plan.launches(&buffers(4100, vec![4096]), None).unwrap_err().to_string();
        assert_eq!(error, "k is at address 0x1004: the plan was made for addresses that are multiples of 16");
        let error = plan.launches(&buffers(4096, vec![]), None).unwrap_err().to_string();
        assert_eq!(error, "0 workspaces are given: the plan has 1");
    }

    #[test]
    fn the_copy_engine_refuses_tensors_it_cannot_address() {
        let problem = ProblemSpec::new(1, 2, 64, 33).dtype(Dtype::F16).head_dim_v(64).build().unwrap();
        let target = Target::best(Sm::Sm90);
        let contiguous = Layout::contiguous(&problem);
        let refused = |layout: Layout| plan(Stratum::V3, &problem, target, &layout, None).unwrap_err().to_string();
        // Rows of 33 elements, and tensors of even rows at addresses in between.
        assert!(refused(contiguous).starts_with("q: tensor map: strides[0] is 132"), "{}", refused(contiguous));
        let even = Strides { batch: 64 * 80, seq: 80, head: 40 };
        let padded = Layout { q: even, k: even, ..contiguous };
        assert!(plan(Stratum::V3, &problem, target, &padded, None).is_ok());
        assert!(refused(Layout { alignment: 8, ..padded }).starts_with("q: tensor map: address is 0x8"));
        let plan = plan(Stratum::V3, &problem, target, &padded, None).unwrap();
        let buffers = Buffers { q: 8, ..Default::default() };
        let error = plan.launches(&buffers, None).unwrap_err().to_string();
        assert_eq!(error, "q is at address 0x8: the plan was made for addresses that are multiples of 16");
    }

    #[test]
    fn heads_share_tiles_of_v3_where_that_takes_fewer() {
        let tiles_of = |text: &str, without: Without| {
            let problem: Problem = text.parse().unwrap();
            let options = Options { without, ..Options::default() };
            let target = Target::best(Sm::Sm90);
            let plan = plan_with(Stratum::V3, &problem, target, &Layout::contiguous(&problem), &options).unwrap();
            (plan.config.grouped, plan.launches[0].ctas())
        };
        let shared = |text: &str, shared: u64, apart: u64| {
            assert_eq!(tiles_of(text, Without::default()), (true, shared), "{text}");
            assert_eq!(tiles_of(text, [Technique::Grouping].into_iter().collect()), (false, apart), "{text}");
        };
        let apart = |text: &str| assert!(!tiles_of(text, Without::default()).0, "{text}");
        shared("2x32/8x1/999x128 bf16", 16, 64);
        shared("1x8/1x64/999x128 bf16 causal", 4, 8);
        shared("1x7/1x16/999x128 f16", 1, 7);
        shared("1x64/1x100/999x64 e4m3", 34, 64);
        shared("2x4/2x70x64 bf16 cu_seqlens_q=0,20,90 cu_seqlens_k=0,20,90", 4, 8);
        // Full tiles, a head to each KV head, groups with more rows than a tile, rows that the copy engine cannot address.
        apart("1x8/1x128/999x128 bf16");
        apart("1x8x1/999x128 bf16");
        apart("1x65/1x1/999x128 bf16");
        apart("1x8/1x1/999x36 bf16");
    }

    #[test]
    fn arguments_are_the_kernels_parameters() {
        for stratum in Stratum::ON_CUDA_CORES {
            for dtype in Dtype::UNSCALED {
                let plan = planned(stratum, ProblemSpec::new(2, 2, 65, 40).dtype(dtype), Sm::Sm80, None).unwrap();
                let workspaces = vec![1 << 20; plan.workspaces.len()];
                for launch in plan.launches(&Buffers { workspaces, ..Default::default() }, None).unwrap() {
                    let params = &launch.kernel.params;
                    assert_eq!(launch.arguments.len(), params.len(), "{}", launch.kernel.name);
                    for (argument, param) in launch.arguments.iter().zip(params) {
                        assert!(argument.fits(param), "{}: {}", launch.kernel.name, param.name);
                        assert_eq!(matches!(argument, Argument::Pointer(_)), param.pointee.is_some(), "{}", param.name);
                    }
                }
            }
        }
    }

    #[test]
    fn no_grid_is_empty() {
        for stratum in Stratum::ON_CUDA_CORES {
            for (batch, seqlen_q, launches) in [(0, 5, false), (1, 0, false), (1, 5, true)] {
                for seqlen_k in [0, 5] {
                    let spec = ProblemSpec { seqlen_q, ..ProblemSpec::new(batch, 2, seqlen_k, 8) };
                    let plan = planned(stratum, spec, Sm::Sm75, None).unwrap();
                    assert_eq!(!plan.launches.is_empty(), launches, "{stratum} {batch} {seqlen_q} {seqlen_k}");
                    assert!(plan.launches.iter().all(|launch| launch.grid[0] > 0));
                }
            }
        }
    }

    #[test]
    fn accesses_are_as_wide_as_everything_is_aligned() {
        let problem = ProblemSpec::new(2, 3, 16, 40).dtype(Dtype::F16).build().unwrap();
        let contiguous = Layout::contiguous(&problem);
        assert_eq!(contiguous.vector(&problem), 4);
        assert_eq!(Layout { alignment: 4, ..contiguous }.vector(&problem), 2);
        let odd = Strides { seq: 123, ..contiguous.k };
        assert_eq!(Layout { k: odd, ..contiguous }.vector(&problem), 1);
        let broadcast = Strides { head: 0, ..contiguous.k };
        assert_eq!(Layout { k: broadcast, ..contiguous }.vector(&problem), 4);
    }

    #[test]
    fn square_tiles_keep_eight_warps() {
        let tiles = |sm, dim| {
            let Tiles { block_q, block_kv, threads } = square_tiles(sm, dim, dim);
            (block_q, block_kv, threads)
        };
        assert_eq!([32, 64].map(|dim| tiles(Sm::Sm75, dim)), [(32, 32, 128); 2]);
        assert_eq!([96, 128].map(|dim| tiles(Sm::Sm75, dim)), [(64, 32, 256), (48, 32, 256)]);
        assert_eq!([Sm::Sm80, Sm::Sm90].map(|sm| tiles(sm, 128)), [(32, 32, 128); 2]);
        assert_eq!(tiles(Sm::Sm86, 128), (64, 32, 256));
    }

    #[test]
    fn a_head_has_its_ctas() {
        let spec = ProblemSpec::new(2, 6, 65, 32).heads_kv(2);
        let plan = planned(Stratum::V2Kt, spec, Sm::Sm75, None).unwrap();
        assert_eq!(plan.ctas_of(1, 4), [vec![9, 10, 11], vec![30, 31, 32]]);
        assert_eq!(plan.ctas_of(2, 0), [vec![], Vec::<u64>::new()]);
    }
}
