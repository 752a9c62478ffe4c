//! Tensors by the table of C functions that DLPack 1.3 has array types carry: what takes a dozen of Python's attributes otherwise
//! is one call, and nothing is allocated.
//!
//! The types are dlpack.h's ("DLPackExchangeAPI", "DLTensor"), with numbers where it has enums, whose later values must be read
//! as well.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use flashstrata::Dtype;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::call::Dims;

/// The version of the table whose fields these are.
const MAJOR: u32 = 1;

/// `kDLCPU`, `kDLCUDA` and `kDLCUDAHost`.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

/// `kDLInt`, `kDLFloat`, `kDLBfloat` and `kDLFloat8_e4m3fn`.
const INT: u8 = 0;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const E4M3FN: u8 = 10;

#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

type FromPyObject = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> i32;
type CurrentWorkStream = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32;

#[repr(C)]
struct Table {
    version: [u32; 2],
    before: *const c_void,
    allocator: *const c_void,
    managed_from_py_object: *const c_void,
    managed_to_py_object: *const c_void,
    from_py_object: Option<FromPyObject>,
    current_work_stream: Option<CurrentWorkStream>,
}

/// Dimensions that a tensor of a call has at most.
pub(crate) const MOST_DIMENSIONS: usize = 4;

/// A tensor in somebody's memory. Extents and strides beyond `rank` are 0; strides are in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub address: u64,
    /// [`CPU`], [`CUDA`] or another of DLPack's, and which.
    pub device: (i32, i32),
    pub kind: Kind,
    pub rank: usize,
    pub shape: [usize; MOST_DIMENSIONS],
    pub strides: [i64; MOST_DIMENSIONS],
}

/// What a tensor's elements are, as far as calls take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Float(Dtype),
    Int32,
    Other,
}

impl View {
    pub fn dims(&self) -> Dims {
        Dims { shape: self.shape, strides: self.strides }
    }

    /// Whether its elements lie one after the other.
    pub fn is_contiguous(&self) -> bool {
        let mut within = 1;
        (0..self.rank).rev().all(|dimension| {
            let fits = self.shape[dimension] == 1 || self.strides[dimension] == within;
            within *= self.shape[dimension] as i64;
            fits
        })
    }

    /// The product of its extents.
    pub fn elements(&self) -> usize {
        self.shape[..self.rank].iter().product()
    }
}

/// The functions of an array type.
#[derive(Clone, Copy)]
pub(crate) struct Exchange {
    from_py_object: FromPyObject,
    current_work_stream: CurrentWorkStream,
}

impl Exchange {
    /// Those of a class.
    ///
    /// # Errors
    /// When it has none, or of another version.
    pub fn of(class: &Bound<'_, PyAny>) -> PyResult<Exchange> {
        let capsule = class.getattr("__dlpack_c_exchange_api__")?.cast_into::<PyCapsule>()?;
        let pointer = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?.cast::<Table>();
        // SAFETY: a capsule of this name holds a table that stays as long as the process; the version comes first in each.
        let version = unsafe { (*pointer.as_ptr()).version };
        if version[0] != MAJOR {
            return Err(PyTypeError::new_err(format!(
                "DLPack's functions are of version {version:?}: it must be {MAJOR}"
            )));
        }
        // SAFETY: the fields are those of this version, and a function that is absent is null.
        let table = unsafe { pointer.as_ref() };
        match (table.from_py_object, table.current_work_stream) {
            (Some(from_py_object), Some(current_work_stream)) => Ok(Exchange { from_py_object, current_work_stream }),
            _ => Err(PyTypeError::new_err("DLPack's functions lack those of borrowed tensors")),
        }
    }

    /// A tensor of at most [`MOST_DIMENSIONS`] dimensions; `None` of another, and of one that has no memory.
    ///
    /// # Safety
    /// It is of the class that the functions are of.
    pub unsafe fn view(&self, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let mut out = MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the object is of the class, and alive while it is borrowed; the function fills the structure when it returns 0,
        // and otherwise leaves an exception.
        let tensor = unsafe {
            if (self.from_py_object)(tensor.as_ptr().cast(), out.as_mut_ptr()) != 0 {
                drop(PyErr::take(tensor.py()));
                return None;
            }
            out.assume_init()
        };
        let rank = tensor.ndim as usize;
        if rank > MOST_DIMENSIONS {
            return None;
        }
        let (mut shape, mut strides) = ([0; MOST_DIMENSIONS], [0; MOST_DIMENSIONS]);
        // SAFETY: there are `ndim` of either (of none the pointers may be null), in the tensor's memory, which nothing changes
        // while it is borrowed and Python's lock is held.
        unsafe {
            for dimension in 0..rank {
                shape[dimension] = usize::try_from(*tensor.shape.add(dimension)).unwrap_or(0);
                strides[dimension] = *tensor.strides.add(dimension);
            }
        }
        let kind = match (tensor.code, tensor.bits, tensor.lanes) {
            (FLOAT, 16, 1) => Kind::Float(Dtype::F16),
            (BFLOAT, 16, 1) => Kind::Float(Dtype::Bf16),
            (FLOAT, 32, 1) => Kind::Float(Dtype::F32),
            (E4M3FN, 8, 1) => Kind::Float(Dtype::E4m3),
            (INT, 32, 1) => Kind::Int32,
            _ => Kind::Other,
        };
        let device_type = if tensor.device_type == CUDA_HOST { CPU } else { tensor.device_type };
        // What torch makes up as it is asked for it, or has in another tensor's place, lies nowhere.
        if tensor.data.is_null() && shape[..rank].iter().all(|&extent| extent > 0) {
            return None;
        }
        let address = tensor.data.addr() as u64 + tensor.byte_offset;
        Some(View { address, device: (device_type, tensor.device_id), kind, rank, shape, strides })
    }

    /// The driver's handle of the stream that the framework puts work on, on a GPU.
    ///
    /// # Errors
    /// When there is none.
    pub fn stream(&self, py: Python<'_>, ordinal: i32) -> PyResult<usize> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the function writes one pointer, and leaves an exception where it does not return 0.
        match unsafe { (self.current_work_stream)(CUDA, ordinal, &mut stream) } {
            0 => Ok(stream.addr()),
            _ => Err(PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("there is no current stream"))),
        }
    }
}
