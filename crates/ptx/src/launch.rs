//! A kernel with all a back end needs to run it.

use crate::{Kernel, ParameterDecl};

/// One kernel argument by value.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// An address in the memory of the back end that runs the launch.
    Pointer(u64),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit signed integer.
    S32(i32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// A 64-bit signed integer.
    S64(i64),
    /// A single-precision number.
    F32(f32),
    /// Bytes for a structure parameter.
    Bytes(Vec<u8>),
}

impl Argument {
    /// The bytes as they lie in parameter memory (little endian).
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Pointer(v) | Self::U64(v) => v.to_le_bytes().to_vec(),
            Self::S64(v) => v.to_le_bytes().to_vec(),
            Self::U32(v) => v.to_le_bytes().to_vec(),
            Self::S32(v) => v.to_le_bytes().to_vec(),
            Self::F32(v) => v.to_le_bytes().to_vec(),
            Self::Bytes(bytes) => bytes.clone(),
        }
    }

    /// Whether it has the size the parameter has.
    pub fn fits(&self, param: &ParameterDecl) -> bool {
        self.to_bytes().len() as u64 == param.bytes()
    }
}

/// A kernel and how it is launched: what the emulator and the driver both take.
#[derive(Clone, Debug)]
pub struct Launch<'k> {
    /// What runs.
    pub kernel: &'k Kernel,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y and z; `[1, 1, 1]` without clusters.
    pub cluster: [u32; 3],
    /// Bytes of dynamic shared memory per CTA.
    pub dynamic_shared: u32,
    /// One per parameter, in order.
    pub arguments: Vec<Argument>,
}

impl Launch<'_> {
    /// The number of CTAs.
    pub fn ctas(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    /// The threads of a CTA.
    pub fn threads(&self) -> u64 {
        self.block.iter().map(|&n| u64::from(n)).product()
    }
}
