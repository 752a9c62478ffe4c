//! Tensor maps: how a box of a tensor in global memory is copied to shared memory and back (PTX ISA 5.5).

use thiserror::Error;

use crate::Type;

/// What a tensor map's elements are (PTX ISA 5.5.1; the driver's `CUtensorMapDataType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are the driver's element types, under its own names")]
pub enum Element {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    /// `f32` whose subnormals are flushed to zero.
    F32Ftz,
    F64,
    Bf16,
    Tf32,
    /// `tf32` whose subnormals are flushed to zero.
    Tf32Ftz,
}

impl Element {
    /// All of them, in the order of the codes that `tensormap.replace` takes (PTX ISA 9.7.9.28).
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::U16,
        Self::U32,
        Self::S32,
        Self::U64,
        Self::S64,
        Self::F16,
        Self::F32,
        Self::F32Ftz,
        Self::F64,
        Self::Bf16,
        Self::Tf32,
        Self::Tf32Ftz,
    ];

    /// The bytes an element takes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::S32 | Self::F32 | Self::F32Ftz | Self::Tf32 | Self::Tf32Ftz => 4,
            Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }

    /// The number type an element holds.
    pub const fn ty(self) -> Type {
        match self {
            Self::U8 => Type::U8,
            Self::U16 => Type::U16,
            Self::U32 => Type::U32,
            Self::S32 => Type::S32,
            Self::U64 => Type::U64,
            Self::S64 => Type::S64,
            Self::F16 => Type::F16,
            Self::F32 | Self::F32Ftz => Type::F32,
            Self::F64 => Type::F64,
            Self::Bf16 => Type::Bf16,
            Self::Tf32 | Self::Tf32Ftz => Type::Tf32,
        }
    }

    const fn is_float(self) -> bool {
        self.ty().is_float()
    }
}

/// How the 16-byte chunks of a box are permuted in shared memory (PTX ISA 5.5.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Rows as they are.
    #[default]
    None,
    /// Within 32 bytes: address bit 4 is exclusive-ored with bit 7.
    Bytes32,
    /// Within 64 bytes: bits 4 and 5 with bits 7 and 8.
    Bytes64,
    /// Within 128 bytes: bits 4 to 6 with bits 7 to 9.
    Bytes128,
}

impl Swizzle {
    /// All of them, in the order of the codes that `tensormap.replace` takes.
    pub const ALL: [Self; 4] = [Self::None, Self::Bytes32, Self::Bytes64, Self::Bytes128];

    /// The bytes within which chunks move; `None` without a swizzle.
    pub const fn span(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }

    /// Where the byte lies that would be at `address` without a swizzle.
    pub const fn apply(self, address: u64) -> u64 {
        let mask = match self {
            Self::None => 0,
            Self::Bytes32 => 1,
            Self::Bytes64 => 3,
            Self::Bytes128 => 7,
        };
        address ^ ((address >> 7 & mask) << 4)
    }
}

/// How much of a sector's surroundings L2 fetches along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum L2Promotion {
    /// Nothing.
    #[default]
    None,
    /// 64 bytes.
    Bytes64,
    /// 128 bytes.
    Bytes128,
    /// 256 bytes.
    Bytes256,
}

/// What a load puts in place of elements outside the tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutOfBounds {
    /// Zeros.
    #[default]
    Zeros,
    /// NaNs, of floating-point elements.
    Nan,
}

/// A tensor in global memory and the box of it that one copy moves: what the driver's `cuTensorMapEncodeTiled` takes.
///
/// Dimensions are counted from the innermost one, whose elements follow each other. Chunks are not interleaved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// What an element is.
    pub element: Element,
    /// The tensor's address in the memory of the back end that runs the launch.
    pub address: u64,
    /// Elements along each dimension, 1 to 5 dimensions.
    pub sizes: Vec<u64>,
    /// Bytes from one element to the next along each dimension but the innermost.
    pub strides: Vec<u64>,
    /// Elements that a copy spans along each dimension.
    pub box_sizes: Vec<u32>,
    /// Along each dimension, of how many elements one is copied; all 1 for dense boxes. The innermost one is ignored.
    pub element_strides: Vec<u32>,
    /// How rows lie in shared memory.
    pub swizzle: Swizzle,
    /// What L2 fetches along.
    pub l2_promotion: L2Promotion,
    /// What stands for elements outside the tensor.
    pub out_of_bounds: OutOfBounds,
}

/// Why a tensor map is not one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tensor map: {field} is {value}; allowed is {allowed}")]
pub struct TensorMapError {
    /// The field, with its index where it has several values.
    pub field: String,
    /// What it is.
    pub value: String,
    /// What it may be.
    pub allowed: &'static str,
}

impl TensorMap {
    /// Dimensions at most.
    pub const MAX_RANK: usize = 5;
    /// Bytes of the object a kernel sees.
    pub const BYTES: u64 = 128;

    /// A map of dense boxes without swizzle.
    pub fn dense(element: Element, address: u64, sizes: &[u64], strides: &[u64], box_sizes: &[u32]) -> Self {
        Self {
            element,
            address,
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            box_sizes: box_sizes.to_vec(),
            element_strides: vec![1; sizes.len()],
            swizzle: Swizzle::None,
            l2_promotion: L2Promotion::None,
            out_of_bounds: OutOfBounds::Zeros,
        }
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.sizes.len()
    }

    /// Elements that one copy moves along a dimension.
    pub fn copied(&self, dimension: usize) -> u32 {
        let stride = if dimension == 0 { 1 } else { self.element_strides[dimension] };
        self.box_sizes[dimension].div_ceil(stride)
    }

    /// Bytes that one copy moves.
    pub fn box_bytes(&self) -> u64 {
        (0..self.rank()).map(|dimension| u64::from(self.copied(dimension))).product::<u64>()
            * u64::from(self.element.bytes())
    }

    /// Checks the rules of `cuTensorMapEncodeTiled` (CUDA driver API, tensor map object management).
    ///
    /// # Errors
    /// The first field that breaks one.
    pub fn validate(&self) -> Result<(), TensorMapError> {
        let refuse = |field: String, value: &dyn std::fmt::Display, allowed| {
            Err(TensorMapError { field, value: value.to_string(), allowed })
        };
        let rank = self.rank();
        if !(1..=Self::MAX_RANK).contains(&rank) {
            return refuse("sizes".into(), &format!("of {rank} dimensions"), "1 to 5 dimensions");
        }
        let counts = [
            ("strides", self.strides.len(), rank - 1, "one for each dimension but the innermost"),
            ("box_sizes", self.box_sizes.len(), rank, "one for each dimension"),
            ("element_strides", self.element_strides.len(), rank, "one for each dimension"),
        ];
        for (field, found, wanted, allowed) in counts {
            if found != wanted {
                return refuse(field.into(), &format!("of {found} values for {rank} dimensions"), allowed);
            }
        }
        if !self.address.is_multiple_of(16) {
            return refuse("address".into(), &format!("{:#x}", self.address), "a multiple of 16");
        }
        for (index, size) in self.sizes.iter().enumerate() {
            if !(1..=1 << 32).contains(size) {
                return refuse(format!("sizes[{index}]"), size, "1 to 2^32");
            }
        }
        for (index, stride) in self.strides.iter().enumerate() {
            if !stride.is_multiple_of(16) || *stride >= 1 << 40 {
                return refuse(format!("strides[{index}]"), stride, "a multiple of 16 bytes below 2^40");
            }
        }
        for (index, size) in self.box_sizes.iter().enumerate() {
            if !(1..=256).contains(size) {
                return refuse(format!("box_sizes[{index}]"), size, "1 to 256");
            }
        }
        let row = self.box_sizes[0] * self.element.bytes();
        if !row.is_multiple_of(16) {
            return refuse(
                "box_sizes[0]".into(),
                &format!("{}, which is {row} bytes", self.box_sizes[0]),
                "a multiple of 16 bytes",
            );
        }
        if let Some(span) = self.swizzle.span().filter(|&span| row > span) {
            let value = format!("{}, which is {row} bytes with a swizzle of {span}", self.box_sizes[0]);
            return refuse("box_sizes[0]".into(), &value, "at most the bytes of the swizzle");
        }
        for (index, stride) in self.element_strides.iter().enumerate() {
            if !(1..=8).contains(stride) {
                return refuse(format!("element_strides[{index}]"), stride, "1 to 8");
            }
        }
        if self.out_of_bounds == OutOfBounds::Nan && !self.element.is_float() {
            return refuse("out_of_bounds".into(), &"NaN of integers", "NaN for floating-point elements only");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        TensorMap::dense(Element::F16, 0x7_0000_0000, &[64, 100], &[128], &[64, 8])
    }

    #[test]
    fn a_bad_field_is_named_with_its_value() {
        assert_eq!(map().validate(), Ok(()));
        assert_eq!(map().box_bytes(), 1024);
        let message = |change: fn(&mut TensorMap)| {
            let mut map = map();
            change(&mut map);
            map.validate().map_err(|error| error.to_string()).unwrap_err()
        };
        assert_eq!(message(|m| m.address += 8), "tensor map: address is 0x700000008; allowed is a multiple of 16");
        assert_eq!(
            message(|m| m.strides[0] = 100),
            "tensor map: strides[0] is 100; allowed is a multiple of 16 bytes below 2^40"
        );
        assert_eq!(message(|m| m.box_sizes[1] = 257), "tensor map: box_sizes[1] is 257; allowed is 1 to 256");
        assert_eq!(
            message(|m| m.box_sizes[0] = 4),
            "tensor map: box_sizes[0] is 4, which is 8 bytes; allowed is a multiple of 16 bytes"
        );
        assert!(message(|m| m.swizzle = Swizzle::Bytes64).contains("128 bytes with a swizzle of 64"));
        assert!(message(|m| m.sizes.clear()).contains("of 0 dimensions"));
        assert!(message(|m| m.element_strides[1] = 9).contains("element_strides[1] is 9"));
        assert!(message(|m| m.sizes[1] = 0).contains("sizes[1] is 0"));
        assert!(message(|m| m.strides.push(16)).contains("of 2 values for 2 dimensions"));
        assert!(
            message(|m| (m.element, m.out_of_bounds) = (Element::U16, OutOfBounds::Nan)).contains("NaN of integers")
        );
    }

    #[test]
    fn strided_boxes_hold_fewer_elements() {
        let mut map = map();
        map.element_strides[1] = 3;
        assert_eq!((map.copied(0), map.copied(1)), (64, 3));
    }

    #[test]
    fn swizzles_permute_chunks() {
        assert_eq!(Swizzle::Bytes128.apply(0x0380), 0x03f0);
        assert_eq!(Swizzle::Bytes64.apply(0x0380), 0x03b0);
        assert_eq!(Swizzle::Bytes32.apply(0x0380), 0x0390);
        assert_eq!(Swizzle::None.apply(0x0380), 0x0380);
        assert_eq!(Swizzle::Bytes128.apply(Swizzle::Bytes128.apply(0x1234)), 0x1234);
    }
}
