//! Tensor maps as the driver encodes them.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as Type, CUtensorMapFloatOOBfill as Fill, CUtensorMapInterleave,
    CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle as Swizzles,
};
use ptx::{Element, L2Promotion, OutOfBounds, Swizzle, TensorMap};

use crate::driver::CudaVersion;
use crate::error::{Error, check};

/// The first version that has `cuTensorMapEncodeTiled`.
const NEEDED: CudaVersion = CudaVersion(12_000);

/// The driver's object of a description, made while a context is current.
///
/// # Errors
/// When the description breaks a rule, or the driver is too old or refuses it.
pub(crate) fn encode(map: &TensorMap, kernel: &str) -> Result<Vec<u8>, Error> {
    map.validate().map_err(|error| Error::Launch { kernel: kernel.to_owned(), what: error.to_string() })?;
    let mut version: c_int = 0;
    // SAFETY: a context exists, so the library is there; the driver writes one int.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    let found = CudaVersion(version.try_into().unwrap_or(0));
    if found < NEEDED {
        return Err(Error::DriverTooOld { found, needed: NEEDED });
    }
    let element = match map.element {
        Element::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        Element::U16 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        Element::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        Element::S32 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
        Element::U64 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        Element::S64 => Type::CU_TENSOR_MAP_DATA_TYPE_INT64,
        Element::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Element::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Element::F32Ftz => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ,
        Element::F64 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        Element::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Element::Tf32 => Type::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        Element::Tf32Ftz => Type::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ,
    };
    let swizzle = match map.swizzle {
        Swizzle::None => Swizzles::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::Bytes32 => Swizzles::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::Bytes64 => Swizzles::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::Bytes128 => Swizzles::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let promotion = match map.l2_promotion {
        L2Promotion::None => Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
        L2Promotion::Bytes64 => Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        L2Promotion::Bytes128 => Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        L2Promotion::Bytes256 => Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    };
    let fill = match map.out_of_bounds {
        OutOfBounds::Zeros => Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        OutOfBounds::Nan => Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
    };
    let mut object = CUtensorMap { opaque: [0; 16] };
    // SAFETY: the object is writable and at a multiple of 64; a validated map has `rank` sizes, box sizes and element strides
    // and one stride less, which the driver reads and does not keep. It does not follow the tensor's address.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut object,
            element,
            map.rank() as u32,
            map.address as *mut c_void,
            map.sizes.as_ptr(),
            map.strides.as_ptr(),
            map.box_sizes.as_ptr(),
            map.element_strides.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            promotion,
            fill,
        )
    };
    check("cuTensorMapEncodeTiled", code)?;
    Ok(object.opaque.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// Replaces the address in an object that [`encode`] made, while a context is current.
///
/// # Errors
/// When `words` are not as many as an object's, or the driver refuses the address.
pub(crate) fn set_address(words: &mut [u64], address: u64) -> Result<(), Error> {
    let mut object = CUtensorMap { opaque: [0; 16] };
    object.opaque.copy_from_slice(words);
    // SAFETY: the object is writable and at a multiple of 64, and `encode` made what is in it; the driver does not follow the
    // address (CUDA driver API, cuTensorMapReplaceAddress).
    let code = unsafe { sys::cuTensorMapReplaceAddress(&mut object, address as *mut c_void) };
    check("cuTensorMapReplaceAddress", code)?;
    words.copy_from_slice(&object.opaque);
    Ok(())
}
