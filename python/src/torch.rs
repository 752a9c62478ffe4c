//! The short way of a call on torch's own tensors: they are looked at by C functions, and what torch makes the results of is kept.

use std::collections::HashMap;
use std::sync::Mutex;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

use crate::dlpack::{CPU, CUDA, Exchange, Kind, MOST_DIMENSIONS, View};
use crate::{Addresses, Dims, Flow, Key, PyDevice, locked};
use flashstrata::Dtype;

/// Bytes of the memory that a stream has for an `lse` that is not asked for.
const UNREAD_BYTES: u64 = 1 << 20;

/// What is needed of torch.
#[pyclass(frozen, module = "flashstrata._flashstrata")]
pub(crate) struct Torch {
    exchange: Exchange,
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    is_grad_enabled: Py<PyAny>,
    /// Functions of a shape, strides and a type that make a tensor on the processor, and on the current GPU.
    empty_on_cpu: Py<PyAny>,
    empty_on_gpu: Py<PyAny>,
    current_gpu: Py<PyAny>,
    float32: Py<PyAny>,
    float16: Py<PyAny>,
    bfloat16: Py<PyAny>,
    /// A function of a number, or none for the processor, that has its device.
    open: Py<PyAny>,
    devices: Mutex<HashMap<(i32, i32), Py<PyDevice>, foldhash::fast::RandomState>>,
}

/// `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)`.
type Packed<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, i64, i64);

#[pymethods]
impl Torch {
    /// Of the module torch; `open` has the device of a number, or of none for the processor.
    ///
    /// # Errors
    /// When this version of torch lacks something of it.
    #[new]
    fn new(torch: &Bound<'_, PyModule>, open: Py<PyAny>) -> PyResult<Self> {
        let py = torch.py();
        let tensor = torch.getattr("Tensor")?;
        let guards = py.import("torch._C._dynamo.guards")?;
        Ok(Torch {
            exchange: Exchange::of(&tensor)?,
            tensor: tensor.cast_into::<PyType>()?.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            empty_on_cpu: guards.getattr("_empty_strided_cpu")?.unbind(),
            empty_on_gpu: guards.getattr("_empty_strided_cuda")?.unbind(),
            // Torch built for the processor has none.
            current_gpu: torch
                .getattr("_C")?
                .getattr_opt("_cuda_getDevice")?
                .unwrap_or_else(|| py.None().into_bound(py))
                .unbind(),
            float32: torch.getattr("float32")?.unbind(),
            float16: torch.getattr("float16")?.unbind(),
            bfloat16: torch.getattr("bfloat16")?.unbind(),
            open,
            devices: Mutex::default(),
        })
    }

    /// Starts attention on torch's current stream: `(out, lse)`, where `lse` is None unless `with_lse`.
    ///
    /// None where the call is not of the common kind: tensors of torch's own class, of one device and one type, without
    /// gradients, whose last dimension is contiguous. Then nothing was done.
    #[pyo3(signature = (q, k, v, scale, left, right, softcap, slopes, packed, with_lse))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        scale: Option<f32>,
        left: i64,
        right: i64,
        softcap: f32,
        slopes: Option<&Bound<'py, PyAny>>,
        packed: Option<Packed<'py>>,
        with_lse: bool,
    ) -> PyResult<Option<Results<'py>>> {
        let Some(call) = self.read([q, k, v], slopes, packed.as_ref())? else { return Ok(None) };
        let Call { dtype, dims, device, at: [at_q, at_k, at_v], packed, cu_seqlens, slopes } = call;
        let is_gpu = device.0 == CUDA;
        if is_gpu && self.current_gpu.call0(py)?.extract::<i32>(py)? != device.1 {
            return Ok(None);
        }
        let [q, k, v] = dims;
        let rank = if packed.is_some() { 3 } else { 4 };
        let mut out_shape = q.shape;
        out_shape[rank - 1] = v.shape[rank - 1];
        let key = Key {
            dtype,
            q,
            k,
            v,
            out: contiguous(&out_shape, rank),
            // Torch's own memory is aligned to more than a plan asks for.
            alignment: Addresses::alignment(at_q, at_k, at_v, 0),
            scale: scale.map(f32::to_bits),
            window: (left, right),
            softcap: softcap.to_bits(),
            slopes: slopes.map_or(0, |(_, count)| count),
            packed,
            stratum: None,
        };
        let device = self.device(py, device)?;
        let device = device.get();
        let kept = device.kept(py, &key)?;
        let flow = device.flow(if is_gpu { self.exchange.stream(py, call.device.1)? } else { 0 })?;

        let (out, at_out) = self.empty(py, is_gpu, &kept.out, &out_shape[..rank], dtype)?;
        let lse_bytes = kept.attention.lse_bytes();
        let lse_shape: &[usize] =
            if rank == 3 { &[q.shape[1], q.shape[0]] } else { &[q.shape[0], q.shape[2], q.shape[1]] };
        let (lse, at_lse) = if with_lse || !is_gpu || lse_bytes > UNREAD_BYTES {
            let (lse, at) = self.empty(py, is_gpu, &kept.lse, lse_shape, Dtype::F32)?;
            (Some(lse), at)
        } else {
            (None, self.unread(py, &flow)?)
        };
        let at = Addresses {
            q: at_q,
            k: at_k,
            v: at_v,
            out: at_out,
            lse: (at_lse, lse_bytes),
            cu_seqlens,
            slopes: slopes.map_or(0, |(address, _)| address),
            known: true,
        };
        // SAFETY: the caller holds the tensors, which are of this device and as large as they say; torch keeps memory until the
        // work in the stream that was current has ended.
        py.detach(|| unsafe { device.start(&flow, &kept, &key, &at) })?;
        Ok(Some((out, lse.filter(|_| with_lse))))
    }
}

/// `out`, and `lse` where it was asked for.
type Results<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// What was read of a call's tensors.
struct Call {
    dtype: Dtype,
    dims: [Dims; 3],
    at: [u64; 3],
    device: (i32, i32),
    packed: Option<(usize, usize, usize)>,
    cu_seqlens: [u64; 2],
    slopes: Option<(u64, usize)>,
}

impl Torch {
    /// A tensor of torch's own class; `None` of another.
    fn view(&self, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let class = tensor.get_type_ptr();
        if class != self.tensor.as_ptr().cast() && class != self.parameter.as_ptr().cast() {
            return None;
        }
        // SAFETY: it is of the class, or of the one that inherits from it.
        unsafe { self.exchange.view(tensor) }
    }

    /// `None` where a call is not of the common kind.
    fn read(
        &self,
        tensors: [&Bound<'_, PyAny>; 3],
        slopes: Option<&Bound<'_, PyAny>>,
        packed: Option<&Packed<'_>>,
    ) -> PyResult<Option<Call>> {
        let py = tensors[0].py();
        let [Some(q), Some(k), Some(v)] = tensors.map(|tensor| self.view(tensor)) else {
            return Ok(None);
        };
        let Kind::Float(dtype) = q.kind else { return Ok(None) };
        let rank = if packed.is_some() { 3 } else { 4 };
        let common = |tensor: &View| {
            let last = tensor.rank.wrapping_sub(1);
            tensor.kind == q.kind
                && tensor.device == q.device
                && tensor.rank == rank
                && (tensor.strides[last] == 1 || tensor.shape[last] == 1)
        };
        if !matches!(q.device.0, CPU | CUDA) || ![q, k, v].iter().all(common) {
            return Ok(None);
        }
        if self.is_grad_enabled.call0(py)?.is_truthy(py)? {
            for tensor in tensors {
                if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                    return Ok(None);
                }
            }
        }
        let vector = |tensor: &Bound<'_, PyAny>, kind| {
            let fits = |view: &View| view.kind == kind && view.device == q.device && view.is_contiguous();
            self.view(tensor).filter(fits)
        };
        let slopes = match slopes {
            None => None,
            Some(slopes) => match vector(slopes, Kind::Float(Dtype::F32)) {
                Some(view) => Some((view.address, view.elements())),
                None => return Ok(None),
            },
        };
        let (packed, cu_seqlens) = match packed {
            None => (None, [0; 2]),
            Some((cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)) => {
                let offsets = (vector(cu_seqlens_q, Kind::Int32), vector(cu_seqlens_k, Kind::Int32));
                let longest = (usize::try_from(*longest_q), usize::try_from(*longest_k));
                let ((Some(of_q), Some(of_k)), (Ok(longest_q), Ok(longest_k))) = (offsets, longest) else {
                    return Ok(None);
                };
                if of_q.rank != 1 || of_q.shape != of_k.shape || of_k.rank != 1 || of_q.shape[0] == 0 {
                    return Ok(None);
                }
                (Some((of_q.shape[0] - 1, longest_q, longest_k)), [of_q.address, of_k.address])
            }
        };
        Ok(Some(Call {
            dtype,
            dims: [q, k, v].map(|View { shape, strides, .. }| Dims { shape, strides }),
            at: [q, k, v].map(|view| view.address),
            device: q.device,
            packed,
            cu_seqlens,
            slopes,
        }))
    }

    fn device(&self, py: Python<'_>, device: (i32, i32)) -> PyResult<Py<PyDevice>> {
        if let Some(known) = locked(&self.devices).get(&device) {
            return Ok(known.clone_ref(py));
        }
        let number = (device.0 == CUDA).then_some(device.1);
        let opened: Py<PyDevice> = self.open.call1(py, (number,))?.extract(py)?;
        locked(&self.devices).insert(device, opened.clone_ref(py));
        Ok(opened)
    }

    /// A new contiguous tensor and its address; `kept` holds what torch's function is called with.
    fn empty<'py>(
        &self,
        py: Python<'py>,
        is_gpu: bool,
        kept: &PyOnceLock<Py<PyTuple>>,
        shape: &[usize],
        dtype: Dtype,
    ) -> PyResult<(Bound<'py, PyAny>, u64)> {
        let arguments = kept.get_or_try_init(py, || {
            let dtype = match dtype {
                Dtype::F32 => &self.float32,
                Dtype::F16 => &self.float16,
                // What comes of 8-bit inputs.
                Dtype::Bf16 | Dtype::E4m3 => &self.bfloat16,
            };
            let mut extents = [0; MOST_DIMENSIONS];
            extents[..shape.len()].copy_from_slice(shape);
            let strides = contiguous(&extents, shape.len());
            let (shape, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, &strides[..shape.len()])?);
            Ok::<_, PyErr>((shape, strides, dtype).into_pyobject(py)?.unbind())
        })?;
        let function = if is_gpu { &self.empty_on_gpu } else { &self.empty_on_cpu };
        let tensor = function.bind(py).call1(arguments.bind(py))?;
        // SAFETY: torch's function returns a tensor of its own class.
        let view = unsafe { self.exchange.view(&tensor) };
        let address = view.map_or(0, |view| view.address);
        Ok((tensor, address))
    }

    /// Where an `lse` of at most [`UNREAD_BYTES`] goes that nobody asked for.
    fn unread(&self, py: Python<'_>, flow: &Flow) -> PyResult<u64> {
        let unread = flow.unread.get_or_try_init(py, || {
            let (tensor, address) =
                self.empty(py, true, &PyOnceLock::new(), &[UNREAD_BYTES as usize / 4], Dtype::F32)?;
            Ok::<_, PyErr>((tensor.unbind(), address))
        })?;
        Ok(unread.1)
    }
}

/// Strides of a tensor of which the last dimension varies fastest; 0 beyond its dimensions.
fn contiguous(shape: &[usize; MOST_DIMENSIONS], rank: usize) -> [i64; MOST_DIMENSIONS] {
    let mut strides = [0; MOST_DIMENSIONS];
    let mut within = 1;
    for dimension in (0..rank).rev() {
        strides[dimension] = within;
        within *= shape[dimension].max(1) as i64;
    }
    strides
}
