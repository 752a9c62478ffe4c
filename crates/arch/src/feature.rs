//! What an architecture can do.

use std::fmt;

use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::pipes::TensorOperand;
use crate::sm::Sm;
use crate::target::{Suffix, Target};

macro_rules! features {
    ($($(#[$doc:meta])* $feature:ident, $name:literal, [$($target:expr),+];)+) => {
        /// Something that not every architecture can do. Which ones can is stated per instruction in the PTX ISA, under
        /// "Target ISA Notes"; a test compares the table with what `ptxas` accepts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Feature {
            $($(#[$doc])* $feature,)+
        }

        impl Feature {
            /// Every feature, by the architecture that brought it.
            pub const ALL: &[Feature] = &[$(Feature::$feature),+];

            /// What the field calls it; `Display` prints it.
            pub fn name(self) -> &'static str {
                match self { $(Feature::$feature => $name,)+ }
            }

            /// The lowest targets that have it, one for each line of descent; any target that includes one of them has it too.
            pub fn requires(self) -> &'static [Target] {
                match self { $(Feature::$feature => const { &[$($target),+] },)+ }
            }
        }
    };
}

const fn from(sm: Sm) -> Target {
    Target::raw(sm, Suffix::Portable)
}
const fn family(sm: Sm) -> Target {
    Target::raw(sm, Suffix::Family)
}
const fn only(sm: Sm) -> Target {
    Target::raw(sm, Suffix::Specific)
}

features! {
    /// `mma` on f16; see [`MMA_FORMS`] for the shapes.
    F16Mma, "f16 mma", [from(Sm::Sm70)];
    /// `mma` on signed and unsigned 8-bit integers.
    Int8Mma, "int8 mma", [from(Sm::Sm75)];
    /// `ldmatrix`: 8x8 matrices of 16-bit elements from shared memory to fragments.
    Ldmatrix, "ldmatrix", [from(Sm::Sm75)];
    /// `tanh.approx.f32`.
    TanhApprox, "tanh.approx", [from(Sm::Sm75)];
    /// `ex2.approx.f16` and `.f16x2`.
    Ex2F16, "ex2 on f16", [from(Sm::Sm75)];
    /// `mma` on bf16.
    Bf16Mma, "bf16 mma", [from(Sm::Sm80)];
    /// `mma` on tf32.
    Tf32Mma, "tf32 mma", [from(Sm::Sm80)];
    /// `cp.async` with its groups: global to shared memory without registers.
    CpAsync, "cp.async", [from(Sm::Sm80)];
    /// `mbarrier`: barriers in shared memory.
    Mbarrier, "mbarrier", [from(Sm::Sm80)];
    /// `cvt.rn.f16x2.f32`: two f32 into one register of f16, likewise bf16.
    PackedConvert, "packed f32 to f16x2 conversion", [from(Sm::Sm80)];
    /// `fma.rn.bf16x2`.
    Bf16Fma, "bf16 fma", [from(Sm::Sm80)];
    /// `max.NaN.f32`, which propagates NaN.
    MaxNan, "max.NaN", [from(Sm::Sm80)];
    /// `redux.sync` on integers: a warp-wide reduction in one instruction.
    Redux, "redux.sync", [from(Sm::Sm80)];
    /// `createpolicy` and `.L2::cache_hint`.
    CachePolicy, "L2 cache policies", [from(Sm::Sm80)];
    /// `mma` on e4m3 and e5m2.
    Fp8Mma, "fp8 mma", [from(Sm::Sm89)];
    /// `cvt` between f32 or f16 and e4m3x2 or e5m2x2.
    Fp8Convert, "fp8 conversion", [from(Sm::Sm89)];
    /// `stmatrix`: fragments to 8x8 matrices in shared memory.
    Stmatrix, "stmatrix", [from(Sm::Sm90)];
    /// `add`, `sub` and `mul` on bf16 and bf16x2.
    Bf16Arithmetic, "bf16 add and mul", [from(Sm::Sm90)];
    /// `elect.sync`: one lane of a warp.
    Elect, "elect.sync", [from(Sm::Sm90)];
    /// `mbarrier.arrive.expect_tx`: barriers that count bytes.
    MbarrierTx, "mbarrier transactions", [from(Sm::Sm90)];
    /// `cp.async.bulk.tensor` and `cp.async.bulk`: the tensor memory accelerator.
    Tma, "tma", [from(Sm::Sm90)];
    /// `fence.proxy.async`: orders ordinary accesses and those of the asynchronous engines.
    FenceProxyAsync, "fence.proxy.async", [from(Sm::Sm90)];
    /// Clusters of blocks, `barrier.cluster` and distributed shared memory.
    Clusters, "clusters", [from(Sm::Sm90)];
    /// `griddepcontrol`: a kernel starts before its predecessor ends.
    DependentLaunch, "programmatic dependent launch", [from(Sm::Sm90)];
    /// `tensormap.replace`: a tensor map changed by the kernel.
    TensormapReplace, "tensormap.replace", [only(Sm::Sm90), family(Sm::Sm100), family(Sm::Sm120)];
    /// `setmaxnreg`: registers move between warps.
    Setmaxnreg, "setmaxnreg", [only(Sm::Sm90), family(Sm::Sm100), family(Sm::Sm120)];
    /// `wgmma`: a warp group's matrix product out of shared memory.
    Wgmma, "wgmma", [only(Sm::Sm90)];
    /// `tcgen05`: matrix products into tensor memory.
    Tcgen05, "tcgen05", [family(Sm::Sm100)];
    /// `fma.rn.f32x2`, `add` and `mul` likewise: two f32 in one instruction.
    PackedF32, "f32x2 arithmetic", [from(Sm::Sm100)];
    /// `max.f32 d, a, b, c`.
    Max3, "three-input max", [from(Sm::Sm100)];
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Feature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Target {
    /// Whether code for this target may use the feature.
    pub fn supports(self, feature: Feature) -> bool {
        feature.requires().iter().any(|&lowest| self.includes(lowest))
    }

    /// As [`Target::supports`], with the reason when it may not.
    ///
    /// # Errors
    /// Names the lowest architectures that have the feature.
    pub fn require(self, feature: Feature) -> Result<(), Unsupported> {
        if self.supports(feature) { Ok(()) } else { Err(Unsupported { target: self, feature }) }
    }

    /// Everything that code for this target may use.
    pub fn features(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |&feature| self.supports(feature))
    }

    /// The `mma` forms that code for this target may use.
    pub fn mma_forms(self) -> impl Iterator<Item = &'static MmaForm> {
        MMA_FORMS.iter().filter(move |form| self.includes(form.since.into()))
    }
}

impl Sm {
    /// Whether the chip can do it at all: code for its most specific target may use it.
    pub fn supports(self, feature: Feature) -> bool {
        Target::best(self).supports(feature)
    }

    /// The least specific target of this architecture that may use the feature: `sm_90a` for `wgmma` on 9.0.
    ///
    /// # Errors
    /// When the chip cannot do it; names the lowest architectures that can.
    pub fn target_for(self, feature: Feature) -> Result<Target, Unsupported> {
        [Suffix::Portable, Suffix::Family, Suffix::Specific]
            .into_iter()
            .filter_map(|suffix| Target::new(self, suffix).ok())
            .find(|target| target.supports(feature))
            .ok_or(Unsupported { target: Target::best(self), feature })
    }
}

/// A target lacks a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("target {target} has no {feature}: it needs {}", lowest(*feature))]
pub struct Unsupported {
    /// The target.
    pub target: Target,
    /// What it lacks.
    pub feature: Feature,
}

fn lowest(feature: Feature) -> String {
    let one = |target: &Target| match target.suffix() {
        Suffix::Portable => format!("{target} or later"),
        Suffix::Family => format!("{target} (or a later f or a target of its family)"),
        Suffix::Specific => target.to_string(),
    };
    feature.requires().iter().map(one).collect::<Vec<_>>().join(" or ")
}

/// A shape of `mma.sync` and the architecture that brought it (PTX ISA, "Matrix multiply-accumulate operation using mma").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MmaForm {
    /// Type of A and B.
    pub operand: TensorOperand,
    /// Rows of A and D.
    pub m: u32,
    /// Columns of B and D.
    pub n: u32,
    /// Columns of A, rows of B.
    pub k: u32,
    /// The first architecture that has it.
    pub since: Sm,
}

const fn mma(operand: TensorOperand, m: u32, n: u32, k: u32, since: Sm) -> MmaForm {
    MmaForm { operand, m, n, k, since }
}

/// The dense `mma.sync` shapes of the operand types attention uses.
pub const MMA_FORMS: &[MmaForm] = &[
    mma(TensorOperand::F16, 8, 8, 4, Sm::Sm70),
    mma(TensorOperand::F16, 16, 8, 8, Sm::Sm75),
    mma(TensorOperand::F16, 16, 8, 16, Sm::Sm80),
    mma(TensorOperand::Bf16, 16, 8, 8, Sm::Sm80),
    mma(TensorOperand::Bf16, 16, 8, 16, Sm::Sm80),
    mma(TensorOperand::Tf32, 16, 8, 4, Sm::Sm80),
    mma(TensorOperand::Tf32, 16, 8, 8, Sm::Sm80),
    mma(TensorOperand::Int8, 8, 8, 16, Sm::Sm75),
    mma(TensorOperand::Int8, 16, 8, 16, Sm::Sm80),
    mma(TensorOperand::Int8, 16, 8, 32, Sm::Sm80),
    mma(TensorOperand::Fp8, 16, 8, 16, Sm::Sm89),
    mma(TensorOperand::Fp8, 16, 8, 32, Sm::Sm89),
];

impl fmt::Display for MmaForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m{}n{}k{} {}", self.m, self.n, self.k, self.operand)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap()
    }

    #[test]
    fn generations_differ_as_the_strata_need() {
        let turing = target("sm_75");
        assert!(turing.supports(Feature::Ldmatrix) && turing.supports(Feature::F16Mma));
        assert!(!turing.supports(Feature::Bf16Mma) && !turing.supports(Feature::CpAsync));
        assert!(target("sm_80").supports(Feature::CpAsync) && !target("sm_80").supports(Feature::Fp8Mma));
        assert!(target("sm_90").supports(Feature::Tma) && !target("sm_90").supports(Feature::Wgmma));
        assert!(target("sm_90a").supports(Feature::Wgmma) && !target("sm_100a").supports(Feature::Wgmma));
        assert!(target("sm_100a").supports(Feature::Tcgen05) && target("sm_103f").supports(Feature::Tcgen05));
        assert!(!target("sm_100").supports(Feature::Tcgen05) && !target("sm_120a").supports(Feature::Tcgen05));
    }

    #[test]
    fn a_chip_names_the_target_it_needs() {
        assert_eq!(Sm::Sm90.target_for(Feature::Tma), Ok(target("sm_90")));
        assert_eq!(Sm::Sm90.target_for(Feature::Setmaxnreg), Ok(target("sm_90a")));
        assert_eq!(Sm::Sm103.target_for(Feature::Tcgen05), Ok(target("sm_103f")));
        assert!(Sm::Sm90.supports(Feature::Wgmma) && !Sm::Sm120.supports(Feature::Wgmma));
        let error = Sm::Sm75.target_for(Feature::CpAsync).unwrap_err().to_string();
        assert_eq!(error, "target sm_75 has no cp.async: it needs sm_80 or later");
        let error = Sm::Sm89.target_for(Feature::Tcgen05).unwrap_err().to_string();
        assert!(error.contains("needs sm_100f (or a later f or a target of its family)"), "{error}");
    }

    #[test]
    fn lists_grow_with_the_architecture() {
        assert_eq!(target("sm_70").features().collect::<Vec<_>>(), [Feature::F16Mma]);
        for (older, newer) in Sm::ALL.iter().zip(&Sm::ALL[1..]) {
            let newer: Vec<_> = Target::from(*newer).features().collect();
            assert!(Target::from(*older).features().all(|feature| newer.contains(&feature)));
        }
        let turing: Vec<_> = target("sm_75").mma_forms().map(MmaForm::to_string).collect();
        assert_eq!(turing, ["m8n8k4 f16", "m16n8k8 f16", "m8n8k16 int8"]);
    }

    /// A type's feature starts where its first shape does.
    #[test]
    fn mma_features_agree_with_the_forms() {
        for (feature, operand) in [
            (Feature::F16Mma, TensorOperand::F16),
            (Feature::Bf16Mma, TensorOperand::Bf16),
            (Feature::Tf32Mma, TensorOperand::Tf32),
            (Feature::Int8Mma, TensorOperand::Int8),
            (Feature::Fp8Mma, TensorOperand::Fp8),
        ] {
            let first = MMA_FORMS.iter().filter(|form| form.operand == operand).map(|form| form.since).min().unwrap();
            assert_eq!(feature.requires(), [Target::from(first)]);
        }
    }
}
