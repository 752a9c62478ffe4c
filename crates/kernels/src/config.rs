//! What a kernel is compiled for.

use std::fmt;
use std::str::FromStr;

use ptx::{Kernel, KernelBuilder, Target};

use crate::Dtype;
use crate::cache::CacheCode;
use crate::tile::{GROUP, SharedMemory};

/// The sizes a kernel works in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Queries of a tile.
    pub block_q: u32,
    /// Keys of a tile.
    pub block_kv: u32,
    /// Threads of a CTA.
    pub threads: u32,
}

/// A part of [`crate::v3`] that can be left out, to measure what it brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Technique {
    /// A warpgroup of its own that loads: without it a thread of those that compute asks for tiles, two blocks ahead and not
    /// beyond the tile of queries, and CTAs take every so many'th tile.
    Producer,
    /// Warpgroups that take turns at the tensor cores.
    Turns,
    /// Exponentials beside the product with the values of the block before.
    Overlap,
    /// A tile's last product with values and the storing of its output beside the first scores of the next tile.
    Epilogue,
    /// Outputs of more than 192 columns that are rescaled where a row's maximum has grown by a factor of 256, not at each that is larger.
    Slack,
    /// Tiles that the query heads of a KV head share, where queries are so few that they leave tiles of their own empty.
    Grouping,
}

impl Technique {
    /// All of them.
    pub const ALL: [Technique; 6] = [
        Technique::Producer,
        Technique::Turns,
        Technique::Overlap,
        Technique::Epilogue,
        Technique::Slack,
        Technique::Grouping,
    ];
}

impl fmt::Display for Technique {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Technique::Producer => "producer",
            Technique::Turns => "turns",
            Technique::Overlap => "overlap",
            Technique::Epilogue => "epilogue",
            Technique::Slack => "slack",
            Technique::Grouping => "grouping",
        })
    }
}

impl FromStr for Technique {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let all = Self::ALL.map(|part| part.to_string()).join(", ");
        Self::ALL.into_iter().find(|part| part.to_string() == name).ok_or(format!("{name:?} is none of {all}"))
    }
}

/// Parts that are left out; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Without {
    /// [`Technique::Producer`].
    pub producer: bool,
    /// [`Technique::Turns`].
    pub turns: bool,
    /// [`Technique::Overlap`].
    pub overlap: bool,
    /// [`Technique::Epilogue`].
    pub epilogue: bool,
    /// [`Technique::Slack`].
    pub slack: bool,
    /// [`Technique::Grouping`].
    pub grouping: bool,
}

impl FromIterator<Technique> for Without {
    fn from_iter<I: IntoIterator<Item = Technique>>(parts: I) -> Self {
        parts.into_iter().fold(Self::default(), |without, part| match part {
            Technique::Producer => Self { producer: true, ..without },
            Technique::Turns => Self { turns: true, ..without },
            Technique::Overlap => Self { overlap: true, ..without },
            Technique::Epilogue => Self { epilogue: true, ..without },
            Technique::Slack => Self { slack: true, ..without },
            Technique::Grouping => Self { grouping: true, ..without },
        })
    }
}

/// Everything a kernel's code depends on; lengths, strides, the GQA ratio and the scale are its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// The architecture.
    pub target: Target,
    /// Type of q, k and v; that of out follows from it.
    pub dtype: Dtype,
    /// Length of a query and of a key.
    pub head_dim: u32,
    /// Length of a value and of an output row.
    pub head_dim_v: u32,
    /// Whether the mask is causal.
    pub causal: bool,
    /// Whether the mask is a window, whose sides are then parameters.
    pub window: bool,
    /// Whether the batch is packed, its sequences of different lengths.
    pub varlen: bool,
    /// Whether CTAs take the next tile from a counter in memory, rather than every so many'th.
    pub dynamic: bool,
    /// Whether threads copy the tiles of [`crate::v3`], rather than the copy engine.
    pub by_threads: bool,
    /// Whether the rows of a tile are the query heads of a KV head, query after query.
    pub grouped: bool,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Whether scores have ALiBi's bias.
    pub alibi: bool,
    /// Whether f32 is multiplied as tf32, rather than in three products.
    pub tf32: bool,
    /// Whether 8-bit weights are multiplied as sums of two numbers, as precise as of 16 bits.
    pub fine_weights: bool,
    /// What of [`crate::v3`] is left out.
    pub without: Without,
    /// CTAs of [`crate::v3`] that load each block of keys and values together: neighbouring tiles of queries of one head.
    pub cluster: u32,
    /// Whether the keys are split among several CTAs, whose results [`crate::combine`] joins.
    pub split: bool,
    /// What of a cache of keys and values is in memory.
    pub cache: CacheCode,
    /// Neighbouring elements, 1, 2, 4 or 8, that every tensor's rows can be accessed by; of [`crate::v2_tc`] and
    /// [`crate::v3`], the output's.
    pub vector: u32,
    /// Bytes, 2 to 16, that rows of q, k and v can be copied by.
    pub piece: u32,
    /// Tile sizes.
    pub tiles: Tiles,
}

impl Config {
    /// The beginning of a kernel for this configuration.
    pub(crate) fn builder(&self, name: &str) -> KernelBuilder {
        let mut k = KernelBuilder::new(name, self.target);
        k.require_block([self.tiles.threads, 1, 1]);
        if self.vector == 1 || self.tiles.threads > 128 {
            // Left to itself the assembler aims at several CTAs and spills: where a tile is loaded element by element, as
            // many registers are on their way, and of wide tiles shared memory holds one CTA.
            k.min_ctas_per_sm(1);
        }
        k
    }

    /// `head_dim` as a tile in shared memory has it: a multiple of the 4 words that are read at once.
    pub fn padded_head_dim(&self) -> u32 {
        self.head_dim.next_multiple_of(4)
    }

    /// `head_dim_v` as a tile in shared memory has it: a multiple of the 16 lanes that share a row.
    pub fn padded_head_dim_v(&self) -> u32 {
        self.head_dim_v.next_multiple_of(GROUP)
    }
}

/// A kernel and the shared memory it is launched with.
#[derive(Clone, Debug)]
pub struct Program {
    /// The kernel.
    pub kernel: Kernel,
    /// Its tiles.
    pub shared: SharedMemory,
}
