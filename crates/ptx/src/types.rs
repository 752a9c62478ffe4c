//! The fundamental types of PTX (PTX ISA, section 5.2).

use std::fmt;

macro_rules! types {
    ($($variant:ident $text:literal $bits:literal),+ $(,)?) => {
        /// A PTX type: what a register holds or an instruction computes in.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the variants are the types of the manual, under its own names")]
        pub enum Type { $($variant),+ }

        impl Type {
            /// Every type, in the order of the manual.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name without its leading dot, as in `f32`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The width in bits; 1 for a predicate.
            pub const fn bits(self) -> u32 {
                match self { $(Self::$variant => $bits),+ }
            }

            /// The type with this name (no leading dot).
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

types! {
    Pred "pred" 1,
    B1 "b1" 1, U2 "u2" 2, S2 "s2" 2, U4 "u4" 4, S4 "s4" 4,
    B8 "b8" 8, B16 "b16" 16, B32 "b32" 32, B64 "b64" 64, B128 "b128" 128,
    U8 "u8" 8, U16 "u16" 16, U32 "u32" 32, U64 "u64" 64,
    S8 "s8" 8, S16 "s16" 16, S32 "s32" 32, S64 "s64" 64,
    U16x2 "u16x2" 32, S16x2 "s16x2" 32,
    F16 "f16" 16, F16x2 "f16x2" 32, Bf16 "bf16" 16, Bf16x2 "bf16x2" 32,
    E4m3 "e4m3" 8, E5m2 "e5m2" 8, E4m3x2 "e4m3x2" 16, E5m2x2 "e5m2x2" 16,
    E2m3x2 "e2m3x2" 16, E3m2x2 "e3m2x2" 16, Ue8m0x2 "ue8m0x2" 16,
    Tf32 "tf32" 32, F32 "f32" 32, F32x2 "f32x2" 64, F64 "f64" 64,
}

impl Type {
    /// The width in bytes in memory.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// Whether arithmetic on this type is two's complement with a sign.
    pub const fn is_signed(self) -> bool {
        matches!(self, Self::S2 | Self::S4 | Self::S8 | Self::S16 | Self::S16x2 | Self::S32 | Self::S64)
    }

    /// Whether this is a floating-point type, packed ones included.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16
                | Self::F16x2
                | Self::Bf16
                | Self::Bf16x2
                | Self::E4m3
                | Self::E5m2
                | Self::E4m3x2
                | Self::E5m2x2
                | Self::E2m3x2
                | Self::E3m2x2
                | Self::Ue8m0x2
                | Self::Tf32
                | Self::F32
                | Self::F32x2
                | Self::F64
        )
    }

    /// The integer or bit type of twice the width (the result of `mul.wide`), where there is one.
    pub const fn widened(self) -> Option<Self> {
        match self {
            Self::U16 => Some(Self::U32),
            Self::S16 => Some(Self::S32),
            Self::U32 => Some(Self::U64),
            Self::S32 => Some(Self::S64),
            _ => None,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ".{}", self.name())
    }
}
