//! The dotted parts of an opcode after its name: `.rn`, `.global`, `.v4`, `.f32`.

use std::fmt;

use crate::Type;

macro_rules! modifiers {
    ($($variant:ident $text:literal),+ $(,)?) => {
        /// One dotted part of an opcode.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the variants are the manual's modifiers, under its own names")]
        pub enum Modifier {
            $($variant,)+
            /// A type, such as `.f32`.
            Type(Type),
            /// A matrix shape, such as `.m64n128k16` (rows, columns, depth).
            Shape { m: u16, n: u16, k: u16 },
        }

        impl Modifier {
            fn fixed_name(self) -> Option<&'static str> {
                match self { $(Self::$variant => Some($text),)+ _ => None }
            }

            fn from_fixed_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

modifiers! {
    // Rounding and arithmetic.
    Rn "rn", Rz "rz", Rm "rm", Rp "rp", Rna "rna", Rs "rs", Oob "oob", Pack "pack", Rni "rni", Rzi "rzi", Rmi "rmi", Rpi "rpi",
    Ftz "ftz", Noftz "noftz", Sat "sat", Satfinite "satfinite", Relu "relu", Approx "approx", Full "full", NanMode "NaN", XorSign "xorsign", Abs "abs",
    Lo "lo", Hi "hi", Wide "wide", L "l", R "r", Wrap "wrap", Clamp "clamp", Shiftamt "shiftamt", Cc "cc",
    // Comparison and boolean combination.
    Eq "eq", Ne "ne", Lt "lt", Le "le", Gt "gt", Ge "ge", Ls "ls", Hs "hs",
    Equ "equ", Neu "neu", Ltu "ltu", Leu "leu", Gtu "gtu", Geu "geu", Num "num", Nan "nan", Gl "gl",
    And "and", Or "or", Xor "xor", Popc "popc",
    // State spaces.
    Global "global", Shared "shared", SharedCta "shared::cta", SharedCluster "shared::cluster",
    Local "local", Param "param", ParamEntry "param::entry", ParamFunc "param::func", Const "const", To "to",
    // Memory order, scope, caching.
    Weak "weak", Relaxed "relaxed", Acquire "acquire", Release "release", AcqRel "acq_rel", Sc "sc", Volatile "volatile", Mmio "mmio",
    Cta "cta", Cluster "cluster", Gpu "gpu", Sys "sys",
    Ca "ca", Cg "cg", Cs "cs", Cv "cv", Lu "lu", Wb "wb", Wt "wt", Nc "nc",
    L1EvictFirst "L1::evict_first", L1EvictLast "L1::evict_last", L1EvictNormal "L1::evict_normal", L1EvictUnchanged "L1::evict_unchanged",
    L1NoAllocate "L1::no_allocate", L2CacheHint "L2::cache_hint", L2Bytes64 "L2::64B", L2Bytes128 "L2::128B", L2Bytes256 "L2::256B",
    L2EvictFirst "L2::evict_first", L2EvictLast "L2::evict_last", L2EvictNormal "L2::evict_normal",
    L2EvictUnchanged "L2::evict_unchanged", Fractional "fractional", Range "range", Cvt "cvt",
    V2 "v2", V4 "v4", V8 "v8", X1 "x1", X2 "x2", X4 "x4", X8 "x8", X16 "x16", X32 "x32", X64 "x64", X128 "x128",
    Trans "trans", L1 "L1", L2 "L2", Tensormap "tensormap",
    // Control and synchronisation.
    Uni "uni", Sync "sync", Aligned "aligned", Arrive "arrive", Red "red", Warp "warp", Wait "wait",
    Inval "inval", Init "init", ExpectTx "expect_tx", CompleteTx "complete_tx", ArriveDrop "arrive_drop", TestWait "test_wait",
    TryWait "try_wait", PendingCount "pending_count", NoComplete "noComplete", Parity "parity", Noinc "noinc", Mbarrier "mbarrier",
    MbarrierInit "mbarrier_init", Proxy "proxy", Alias "alias", TensormapGeneric "tensormap::generic", AsyncGeneric "async::generic",
    SyncRestrictSharedCta "sync_restrict::shared::cta", SyncRestrictSharedCluster "sync_restrict::shared::cluster",
    LaunchDependents "launch_dependents", Mask "mask",
    Up "up", Down "down", Bfly "bfly", Idx "idx", All "all", Any "any", Ballot "ballot",
    // Atomics.
    Exch "exch", Cas "cas", Add "add", Inc "inc", Dec "dec", Min "min", Max "max",
    // Asynchronous copies.
    Async "async", CommitGroup "commit_group", WaitGroup "wait_group", WaitAll "wait_all", Reduce "reduce", Bulk "bulk",
    Tensor "tensor", Prefetch "prefetch", Read "read", BulkGroup "bulk_group", CpMask "cp_mask",
    CompleteTxBytes "mbarrier::complete_tx::bytes", MulticastCluster "multicast::cluster", MulticastClusterAll "multicast::cluster::all",
    Dim1 "1d", Dim2 "2d", Dim3 "3d", Dim4 "4d", Dim5 "5d",
    Tile "tile", TileGather4 "tile::gather4", TileScatter4 "tile::scatter4",
    Im2col "im2col", Im2colW "im2col::w", Im2colW128 "im2col::w::128", Im2colNoOffs "im2col_no_offs",
    CtaGroup1 "cta_group::1", CtaGroup2 "cta_group::2",
    Replace "replace", CpFenceproxy "cp_fenceproxy", GlobalAddress "global_address", Rank "rank", BoxDim "box_dim", GlobalDim "global_dim",
    GlobalStride "global_stride", ElementStride "element_stride", Elemtype "elemtype", InterleaveLayout "interleave_layout",
    SwizzleMode "swizzle_mode", FillMode "fill_mode", SwizzleAtomicity "swizzle_atomicity", B1024 "b1024",
    // Matrices.
    Row "row", Col "col", MmaAsync "mma_async", Load "load", Store "store", Mma "mma", A "a", B "b", C "c", D "d",
    B8x16 "b8x16", B6x16P32 "b6x16_p32", B4x16P64 "b4x16_p64",
    // The fifth generation's tensor core.
    Alloc "alloc", Dealloc "dealloc", RelinquishAllocPermit "relinquish_alloc_permit", Ld "ld", St "st", Cp "cp", Shift "shift", Commit "commit",
    Fence "fence", WaitLd "wait::ld", WaitSt "wait::st", BeforeThreadSync "fence::before_thread_sync", AfterThreadSync "fence::after_thread_sync",
    Shape16x64b "16x64b", Shape16x128b "16x128b", Shape16x256b "16x256b", Shape32x32b "32x32b", Shape16x32bx2 "16x32bx2",
    Shape128x256b "128x256b", Shape4x256b "4x256b", Shape128x128b "128x128b", Shape64x128b "64x128b", Shape32x128b "32x128b",
    Warpx2Lo "warpx2::02_13", Warpx2Hi "warpx2::01_23", Warpx4 "warpx4", MbarrierArriveOne "mbarrier::arrive::one", Pack16b "pack::16b", Unpack16b "unpack::16b",
    KindF16 "kind::f16", KindTf32 "kind::tf32", KindF8f6f4 "kind::f8f6f4", KindI8 "kind::i8", KindMxf8f6f4 "kind::mxf8f6f4", KindMxf4 "kind::mxf4",
    KindMxf4nvf4 "kind::mxf4nvf4", BlockScale "block_scale", ScaleVec1x "scale_vec::1X", ScaleVec2x "scale_vec::2X", ScaleVec4x "scale_vec::4X",
    Block16 "block16", Block32 "block32", Ws "ws", AshiftA "ashift",
    CollectorAFill "collector::a::fill", CollectorAUse "collector::a::use", CollectorALastuse "collector::a::lastuse", CollectorADiscard "collector::a::discard",
    // Launching CTAs of a grid that has not begun.
    TryCancel "try_cancel", QueryCancel "query_cancel", IsCanceled "is_canceled", FirstCtaid "get_first_ctaid", FirstCtaidX "get_first_ctaid::x",
    FirstCtaidY "get_first_ctaid::y", FirstCtaidZ "get_first_ctaid::z",
    // Bit permutation modes.
    F4e "f4e", B4e "b4e", Rc8 "rc8", Ecl "ecl", Ecr "ecr", Rc16 "rc16",
    // Predicate tests.
    Finite "finite", Infinite "infinite", Number "number", Notanumber "notanumber", Normal "normal", Subnormal "subnormal",
}

impl Modifier {
    /// The modifier with this name (no leading dot), as `rn`, `f32` or `m16n8k16`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::from_fixed_name(name).or_else(|| Type::from_name(name).map(Self::Type)).or_else(|| Self::shape(name))
    }

    fn shape(name: &str) -> Option<Self> {
        let (m, rest) = name.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k').unwrap_or((rest, "0"));
        let number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
        let shape = Self::Shape { m: number(m)?, n: number(n)?, k: number(k)? };
        // One spelling per shape: `m08n8` is not `m8n8`.
        (shape.to_string().strip_prefix('.') == Some(name)).then_some(shape)
    }

    /// The type this modifier names, if it names one.
    pub const fn as_type(self) -> Option<Type> {
        match self {
            Self::Type(ty) => Some(ty),
            _ => None,
        }
    }
}

impl From<Type> for Modifier {
    fn from(ty: Type) -> Self {
        Self::Type(ty)
    }
}

impl fmt::Display for Modifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Type(ty) => ty.fmt(f),
            Self::Shape { m, n, k: 0 } => write!(f, ".m{m}n{n}"),
            Self::Shape { m, n, k } => write!(f, ".m{m}n{n}k{k}"),
            fixed => write!(f, ".{}", fixed.fixed_name().unwrap_or_default()),
        }
    }
}
