//! A kernel with all a back end needs to run it.

use crate::{Kernel, ParameterDecl, TensorMap};

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
    /// A tensor map, for a parameter of 128 bytes at a multiple of 64. Each back end makes its own object of it.
    TensorMap(Box<TensorMap>),
}

impl Argument {
    /// The bytes as they lie in parameter memory (little endian).
    ///
    /// # Errors
    /// A tensor map, whose bytes are the back end's own.
    pub fn to_bytes(&self) -> Result<Vec<u8>, &TensorMap> {
        Ok(match self {
            Self::Pointer(v) | Self::U64(v) => v.to_le_bytes().to_vec(),
            Self::S64(v) => v.to_le_bytes().to_vec(),
            Self::U32(v) => v.to_le_bytes().to_vec(),
            Self::S32(v) => v.to_le_bytes().to_vec(),
            Self::F32(v) => v.to_le_bytes().to_vec(),
            Self::Bytes(bytes) => bytes.clone(),
            Self::TensorMap(map) => return Err(map),
        })
    }

    /// How many bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.to_bytes().map_or(TensorMap::BYTES, |bytes| bytes.len() as u64)
    }

    /// Whether it has the size the parameter has.
    pub fn fits(&self, param: &ParameterDecl) -> bool {
        self.bytes() == param.bytes()
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

    /// Clusters in x, y and z.
    pub fn clusters(&self) -> [u32; 3] {
        std::array::from_fn(|axis| self.grid[axis] / self.cluster[axis].max(1))
    }

    /// The threads of a CTA.
    pub fn threads(&self) -> u64 {
        self.block.iter().map(|&n| u64::from(n)).product()
    }
}
