//! What the processor can do.

use std::fmt;

use pulp::{Arch, Simd, WithSimd};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::amx::Amx;

/// The vectors, and the matrix unit, that calls are computed with.
#[derive(Clone, Copy, Debug)]
pub struct Instructions {
    vectors: Arch,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    pub(crate) amx: Option<Amx>,
}

impl Instructions {
    fn of(vectors: Arch) -> Instructions {
        Instructions {
            vectors,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            amx: None,
        }
    }

    /// The fastest that this processor has.
    pub fn best() -> Instructions {
        Instructions {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            amx: Amx::new(),
            ..Instructions::of(Arch::new())
        }
    }

    /// All that this processor has, the fastest first, down to those that every processor has.
    pub fn all() -> Vec<Instructions> {
        let mut all = Vec::new();
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        all.extend(Some(Instructions::best()).filter(|best| best.amx.is_some()));
        all.push(Instructions::of(Arch::new()));
        #[cfg(target_arch = "x86_64")]
        if let (Arch::V4(_), Some(v3)) = (Arch::new(), pulp::x86::V3::try_new()) {
            all.push(Instructions::of(Arch::V3(v3)));
        }
        if !matches!(Arch::new(), Arch::Scalar) {
            all.push(Instructions::of(Arch::Scalar));
        }
        all
    }

    /// Elements of a vector of f32.
    pub(crate) fn lanes(self) -> usize {
        self.run(Lanes)
    }

    /// Runs code on its vectors; where there are none, on four floats in their place.
    #[inline(always)]
    pub(crate) fn run<W: WithSimd>(self, work: W) -> W::Output {
        match self.vectors {
            Arch::Scalar => work.with_simd(pulp::Scalar128b),
            vectors => vectors.dispatch(work),
        }
    }
}

struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

impl fmt::Display for Instructions {
    /// `AVX-512 and AMX`, say.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.vectors {
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) => "AVX2",
            #[cfg(target_arch = "aarch64")]
            Arch::Neon(_) => "NEON",
            _ => "no vectors",
        })?;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if self.amx.is_some() {
            f.write_str(" and AMX")?;
        }
        Ok(())
    }
}
