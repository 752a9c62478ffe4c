//! The short way of a call on torch's own tensors: they are looked at by C functions, and what torch makes the results of is kept.

use std::collections::HashMap;
use std::sync::Mutex;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

use crate::call::{Addresses, CacheAddresses, CacheKey, Key};
use crate::dlpack::{CPU, CUDA, Exchange, Kind, MOST_DIMENSIONS, View};
use crate::{Flow, PyDevice, locked};
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
    /// How many modes look on at each operator; what traces them, and what transforms them, or none.
    modes: Py<PyAny>,
    tracing: Py<PyAny>,
    transforms: Py<PyAny>,
    /// Functions of a shape, strides and a type that make a tensor on the processor, and on the current GPU.
    empty_on_cpu: Py<PyAny>,
    empty_on_gpu: Py<PyAny>,
    float32: Py<PyAny>,
    float16: Py<PyAny>,
    bfloat16: Py<PyAny>,
    /// A function of a number, or none for the processor, that has its device.
    open: Py<PyAny>,
    devices: Mutex<HashMap<(i32, i32), Py<PyDevice>, foldhash::fast::RandomState>>,
}

/// `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)`.
type Packed<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, i64, i64);

/// Of a cache, `(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, rotary_interleaved,
/// num_splits)`.
type Cached<'py> = (
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    bool,
    i64,
);

/// `(q_descale, k_descale, v_descale)`.
type Descaled<'py> = [Option<Bound<'py, PyAny>>; 3];

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
        let internal = torch.getattr("_C")?;
        Ok(Torch {
            exchange: Exchange::of(&tensor)?,
            tensor: tensor.cast_into::<PyType>()?.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            empty_on_cpu: guards.getattr("_empty_strided_cpu")?.unbind(),
            empty_on_gpu: guards.getattr("_empty_strided_cuda")?.unbind(),
            modes: internal.getattr("_len_torch_dispatch_stack")?.unbind(),
            tracing: internal.getattr("_get_tracing_state")?.unbind(),
            transforms: internal.getattr("_functorch")?.getattr("peek_interpreter_stack")?.unbind(),
            float32: torch.getattr("float32")?.unbind(),
            float16: torch.getattr("float16")?.unbind(),
            bfloat16: torch.getattr("bfloat16")?.unbind(),
            open,
            devices: Mutex::default(),
        })
    }

    /// Starts attention on torch's current stream: `(out, lse)`, where `lse` is None unless `with_lse`.
    ///
    /// None where something of torch's looks on at its operators, and where the call is not of the common kind: tensors of torch's own class, of one device and one type, without
    /// gradients, whose last dimension is contiguous, and whose shapes are those that go together. Then nothing was done.
    #[pyo3(signature = (q, k, v, scale, left, right, softcap, slopes, packed, with_lse, cache = None, descales = None))]
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
        cache: Option<Cached<'py>>,
        descales: Option<Descaled<'py>>,
    ) -> PyResult<Option<Results<'py>>> {
        if self.is_watched(py)? {
            return Ok(None);
        }
        let Some(reader) = self.reader(q)? else { return Ok(None) };
        let options = (scale, (left, right), softcap);
        let Some((key, mut at)) =
            reader.call([k, v], options, slopes, packed.as_ref(), cache.as_ref(), descales.as_ref())
        else {
            return Ok(None);
        };
        let on = reader.q.device;
        let is_gpu = on.0 == CUDA;
        let device = self.device(py, on)?;
        let device = device.get();
        let kept = device.kept(py, &key)?;
        let flow = device.flow(if is_gpu { self.exchange.stream(py, on.1)? } else { 0 })?;

        let rank = key.rank();
        let (out, at_out) = self.empty(py, is_gpu, &kept.out, &key.out_shape()[..rank], key.dtype.out())?;
        // It is of the current GPU, which q need not be on.
        let Some(at_out) = at_out.filter(|view| view.device == on).map(|view| view.address) else { return Ok(None) };
        let lse_bytes = kept.attention.lse_bytes();
        let shape = key.q.shape;
        let lse_shape: &[usize] = if rank == 3 { &[shape[1], shape[0]] } else { &[shape[0], shape[2], shape[1]] };
        let (lse, at_lse) = if with_lse || !is_gpu || lse_bytes > UNREAD_BYTES {
            let (lse, view) = self.empty(py, is_gpu, &kept.lse, lse_shape, Dtype::F32)?;
            (Some(lse), view.map_or(0, |view| view.address))
        } else {
            (None, self.unread(py, &flow)?)
        };
        (at.out, at.lse) = (at_out, (at_lse, lse_bytes));
        // SAFETY: the caller holds the tensors, which are of this device and as large as they say; torch keeps memory until the
        // work in the stream that was current has ended.
        py.detach(|| unsafe { device.start(&flow, &kept, &key, &at) })?;
        Ok(Some((out, lse.filter(|_| with_lse))))
    }
}

/// `out`, and `lse` where it was asked for.
type Results<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// What looks at a call's tensors: they are to be like q. What it does not take is `None`.
struct Reader<'a> {
    torch: &'a Torch,
    q: View,
    dtype: Dtype,
    /// Whether tensors must not ask for gradients.
    grad: bool,
}

impl Reader<'_> {
    /// A tensor of q's type, device, and so many dimensions.
    fn like_q(&self, tensor: &Bound<'_, PyAny>, rank: usize) -> Option<View> {
        let view = self.torch.view(tensor)?;
        let fits = view.kind == self.q.kind && view.device == self.q.device && view.rank == rank;
        (fits && !self.asks_for_gradients(tensor)).then_some(view)
    }

    /// The same, with a contiguous last dimension.
    fn rows(&self, tensor: &Bound<'_, PyAny>, rank: usize) -> Option<View> {
        let last = rank - 1;
        self.like_q(tensor, rank).filter(|view| view.strides[last] == 1 || view.shape[last] == 1)
    }

    /// Numbers one after the other, of the device that q is on.
    fn list(&self, tensor: &Bound<'_, PyAny>, kind: Kind) -> Option<View> {
        let view = self.torch.view(tensor)?;
        let fits = view.kind == kind && view.device == self.q.device && view.is_contiguous();
        (fits && (kind == Kind::Int32 || !self.asks_for_gradients(tensor))).then_some(view)
    }

    fn asks_for_gradients(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let asked = || tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy();
        self.grad && asked().unwrap_or(true)
    }

    /// The whole call, but for the addresses of its results.
    fn call(
        &self,
        [k, v]: [&Bound<'_, PyAny>; 2],
        (scale, window, softcap): (Option<f32>, (i64, i64), f32),
        slopes: Option<&Bound<'_, PyAny>>,
        packed: Option<&Packed<'_>>,
        cache: Option<&Cached<'_>>,
        descales: Option<&Descaled<'_>>,
    ) -> Option<(Key, Addresses)> {
        let rank = if packed.is_some() { 3 } else { 4 };
        let q = self.q;
        let rank_of_keys = if cache.is_some() { 4 } else { rank };
        let [k, v] = [self.rows(k, rank_of_keys)?, self.rows(v, rank_of_keys)?];
        let mut key = Key {
            dtype: self.dtype,
            q: q.dims(),
            k: k.dims(),
            v: v.dims(),
            out: [0; MOST_DIMENSIONS],
            // Torch's own memory is aligned to more than a plan asks for.
            alignment: Addresses::alignment(q.address, k.address, v.address, 0),
            scale: scale.map(f32::to_bits),
            window,
            softcap: softcap.to_bits(),
            slopes: 0,
            packed: None,
            stratum: None,
            cache: None,
        };
        let mut at = Addresses { q: q.address, k: k.address, v: v.address, known: true, ..Addresses::default() };
        if q.rank != rank || q.strides[rank - 1] != 1 && q.shape[rank - 1] != 1 {
            return None;
        }
        if let Some((cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)) = packed {
            let (of_q, of_k) = (self.list(cu_seqlens_q, Kind::Int32)?, self.list(cu_seqlens_k, Kind::Int32)?);
            if of_q.rank != 1 || of_q.shape != of_k.shape || of_k.rank != 1 {
                return None;
            }
            let batch = of_q.shape[0].checked_sub(1)?;
            key.packed = Some((batch, usize::try_from(*longest_q).ok()?, usize::try_from(*longest_k).ok()?));
            at.cu_seqlens = [of_q.address, of_k.address];
        }
        if let Some(slopes) = slopes {
            let view = self.list(slopes, Kind::Float(Dtype::F32))?;
            let heads = q.shape[rank - 2];
            if view.shape[..view.rank] != [heads] && view.shape[..view.rank] != [key.batch(), heads] {
                return None;
            }
            (key.slopes, at.slopes) = (view.elements(), view.address);
        }
        if let Some(cache) = cache {
            let overlaps = |view: &View| (0..view.rank).any(|at| view.strides[at] == 0 && view.shape[at] > 1);
            if cache.0.is_some() && (overlaps(&k) || overlaps(&v)) {
                return None;
            }
            let (of_cache, places) = self.cache(cache, key.batch())?;
            (key.cache, at.cache) = (Some(of_cache), places);
            key = key.simplified();
        }
        if self.dtype.is_scaled() {
            let wanted = [key.batch(), k.shape[k.rank - 2]];
            for (descale, to) in descales?.iter().zip(&mut at.descales) {
                let view = self.list(descale.as_ref()?, Kind::Float(Dtype::F32))?;
                if view.shape[..view.rank] != wanted {
                    return None;
                }
                *to = view.address;
            }
        } else if descales.is_some() {
            return None;
        }
        key.out = contiguous(&key.out_shape(), rank);
        Some((key, at))
    }

    /// What a call's cache is.
    fn cache(&self, cache: &Cached<'_>, batch: usize) -> Option<(CacheKey, CacheAddresses)> {
        let (k, v, cos, sin, seqlens, batch_idx, leftpad, table, interleaved, splits) = cache;
        let (mut key, mut at) = (CacheKey::default(), CacheAddresses::default());
        key.splits = u32::try_from(*splits).ok()?;
        for (list, given, to) in [
            (seqlens, &mut key.seqlens, &mut at.seqlens),
            (batch_idx, &mut key.batch_idx, &mut at.batch_idx),
            (leftpad, &mut key.leftpad, &mut at.leftpad),
        ] {
            let Some(list) = list else { continue };
            let view = self.list(list, Kind::Int32)?;
            if view.shape[..view.rank] != [batch] {
                return None;
            }
            (*given, *to) = (true, view.address);
        }
        if let Some(table) = table {
            let view = self.list(table, Kind::Int32)?;
            if view.rank != 2 || view.shape[0] != batch || key.leftpad {
                return None;
            }
            (key.pages_of_entry, at.table) = (Some(view.shape[1]), view.address);
        }
        match (k, v) {
            (None, None) => {}
            (Some(k), Some(v)) if key.seqlens => {
                let new = [self.rows(k, 4)?, self.rows(v, 4)?];
                (key.new, at.new) = (Some(new.map(|view| view.dims())), new.map(|view| view.address));
            }
            _ => return None,
        }
        match (cos, sin) {
            (None, None) => {}
            (Some(cos), Some(sin)) if key.new.is_some() => {
                let [cos, sin] = [self.like_q(cos, 2)?, self.like_q(sin, 2)?];
                if cos.shape != sin.shape || !cos.is_contiguous() || !sin.is_contiguous() {
                    return None;
                }
                key.rotary = Some((2 * cos.shape[1], *interleaved, cos.shape[0]));
                at.rotary = [cos.address, sin.address];
            }
            _ => return None,
        }
        Some((key, at))
    }
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

    /// Whether a mode, a tracer or a transform is to see each operator.
    fn is_watched(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.modes.call0(py)?.extract::<usize>(py)? > 0
            || !self.tracing.call0(py)?.is_none(py)
            || !self.transforms.call0(py)?.is_none(py))
    }

    /// What reads a call of these queries; `None` where they are not of the common kind.
    fn reader(&self, q: &Bound<'_, PyAny>) -> PyResult<Option<Reader<'_>>> {
        let Some(view) = self.view(q).filter(|view| matches!(view.device.0, CPU | CUDA)) else { return Ok(None) };
        let Kind::Float(dtype) = view.kind else { return Ok(None) };
        if dtype.is_scaled() && view.device.0 == CPU {
            return Ok(None);
        }
        let grad = self.is_grad_enabled.call0(q.py())?.is_truthy(q.py())?;
        let reader = Reader { torch: self, q: view, dtype, grad };
        Ok(if reader.asks_for_gradients(q) { None } else { Some(reader) })
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

    /// A new contiguous tensor and where it is; `kept` holds what torch's function is called with.
    fn empty<'py>(
        &self,
        py: Python<'py>,
        is_gpu: bool,
        kept: &PyOnceLock<Py<PyTuple>>,
        shape: &[usize],
        dtype: Dtype,
    ) -> PyResult<(Bound<'py, PyAny>, Option<View>)> {
        let arguments = kept.get_or_try_init(py, || {
            let dtype = match dtype {
                Dtype::F32 => &self.float32,
                Dtype::F16 => &self.float16,
                // No result is of 8 bits.
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
        Ok((tensor, view))
    }

    /// Where an `lse` of at most [`UNREAD_BYTES`] goes that nobody asked for.
    fn unread(&self, py: Python<'_>, flow: &Flow) -> PyResult<u64> {
        let unread = flow.unread.get_or_try_init(py, || {
            let (tensor, view) = self.empty(py, true, &PyOnceLock::new(), &[UNREAD_BYTES as usize / 4], Dtype::F32)?;
            Ok::<_, PyErr>((tensor.unbind(), view.map_or(0, |view| view.address)))
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
