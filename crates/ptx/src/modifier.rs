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
    Rn "rn", Rz "rz", Rm "rm", Rp "rp", Rna "rna", Rni "rni", Rzi "rzi", Rmi "rmi", Rpi "rpi",
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
    V2 "v2", V4 "v4", V8 "v8", X1 "x1", X2 "x2", X4 "x4", Trans "trans", L1 "L1", L2 "L2",
    // Control and synchronisation.
    Uni "uni", Sync "sync", Aligned "aligned", Arrive "arrive", Red "red", Warp "warp", Wait "wait",
    Up "up", Down "down", Bfly "bfly", Idx "idx", All "all", Any "any", Ballot "ballot",
    // Atomics.
    Exch "exch", Cas "cas", Add "add", Inc "inc", Dec "dec", Min "min", Max "max",
    // Asynchronous copies.
    Async "async", CommitGroup "commit_group", WaitGroup "wait_group", WaitAll "wait_all",
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
