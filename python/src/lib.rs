//! The library for Python: what `flashstrata/*.py` calls.
//!
//! A call is a `Key`, everything that a kernel's code depends on, and addresses: one whose key was seen before takes the compiled
//! kernels as they are. Tensors come as `(address, shape, strides)`, strides in elements, or as objects of torch's.

mod dlpack;
mod kvcache;
mod lab;
mod torch;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flashstrata::{
    Attention, Device, DeviceSlice, DeviceSliceMut, Dtype, Error, Inputs, Layout, Mask, Operands, Problem, ProblemSpec,
    Stratum, Stream, Tensor, Tuning, Varlen, View, layout,
};
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyTuple};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::dlpack::MOST_DIMENSIONS;

/// A tensor in somebody's memory: its first element's address, its shape, and its strides in elements.
type Memory = (u64, Vec<usize>, Vec<i64>);

/// Kernels that are kept for calls to come; with more they are all forgotten.
const MOST_KEPT: usize = 1024;

/// A tensor of a call: extents and strides of its dimensions, 0 beyond them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Dims {
    shape: [usize; MOST_DIMENSIONS],
    strides: [i64; MOST_DIMENSIONS],
}

/// What a call is, its memory aside: everything that a plan depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    dtype: Dtype,
    q: Dims,
    k: Dims,
    v: Dims,
    /// Of `out`, whose shape is q's with v's columns.
    out: [i64; MOST_DIMENSIONS],
    /// What divides every address.
    alignment: u64,
    scale: Option<u32>,
    window: (i64, i64),
    softcap: u32,
    /// Slopes given: none, `heads` of them, or `batch * heads`.
    slopes: usize,
    /// Of a packed batch: its entries, and the longest sequences of queries and of keys.
    packed: Option<(usize, usize, usize)>,
    stratum: Option<Stratum>,
}

/// Where a call's tensors are. Offsets and slopes are null where there are none.
#[derive(Clone, Copy)]
struct Addresses {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    lse: (u64, u64),
    cu_seqlens: [u64; 2],
    slopes: u64,
    /// Whether they are known to be of the device: the driver is asked otherwise.
    known: bool,
}

impl Addresses {
    /// What divides those that a plan depends on: a power of two, at most the 16 that plans ask for.
    fn alignment(q: u64, k: u64, v: u64, out: u64) -> u64 {
        1 << (q | k | v | out | 16).trailing_zeros()
    }
}

impl Key {
    /// Dimensions of q, k and v: 3 of a packed batch, otherwise 4.
    fn rank(&self) -> usize {
        if self.packed.is_some() { 3 } else { 4 }
    }

    fn out_shape(&self) -> [usize; MOST_DIMENSIONS] {
        let mut shape = self.q.shape;
        shape[self.rank() - 1] = self.v.shape[self.rank() - 1];
        shape
    }

    fn problem(&self) -> Result<Problem, PyErr> {
        let rank = self.rank();
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|dims| &dims.shape[..rank]);
        let (heads_q, head_dim) = (q[rank - 2], q[rank - 1]);
        let mut spec = match self.packed {
            None => {
                let mut spec = ProblemSpec::new(q[0], heads_q, q[1], head_dim);
                spec.seqlen_k = k[1];
                spec
            }
            Some((batch, longest_q, longest_k)) => {
                let lengths = [
                    stand_in("max_seqlen_q", batch, longest_q, q[0])?,
                    stand_in("max_seqlen_k", batch, longest_k, k[0])?,
                ];
                let [cu_seqlens_q, cu_seqlens_k] = lengths;
                let mut spec = ProblemSpec::packed(heads_q, head_dim, cu_seqlens_q, cu_seqlens_k);
                (spec.seqlen_q, spec.seqlen_k) = (longest_q, longest_k);
                spec
            }
        };
        spec.dtype = self.dtype;
        spec.heads_kv = k[rank - 2];
        spec.head_dim_v = v[rank - 1];
        spec.mask = Mask::window(self.window.0, self.window.1);
        spec.softmax_scale = self.scale.map(f32::from_bits);
        spec.softcap = Some(f32::from_bits(self.softcap)).filter(|&cap| cap != 0.0);
        // The kernels read them from the device; a plan depends on their number alone.
        spec.alibi_slopes = (self.slopes > 0).then(|| vec![0.0; self.slopes]);
        spec.build().map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn layout(&self, problem: &Problem) -> Result<Layout, PyErr> {
        let (dtype, rank, address) = (self.dtype, self.rank(), self.alignment);
        let out = Dims { shape: self.out_shape(), strides: self.out };
        let [q, k, v, out] = [&self.q, &self.k, &self.v, &out].map(|dims| View {
            dtype,
            shape: &dims.shape[..rank],
            strides: &dims.strides[..rank],
            address,
        });
        layout(problem, &q, &k, &v, &out).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Operands of a call.
    ///
    /// # Safety
    /// The addresses are of memory of the stream's device, as large as the tensors are, that stays until the call has ended.
    unsafe fn operands(&self, at: &Addresses) -> Operands<'static> {
        let rank = self.rank();
        let reach = |shape: &[usize], strides: &[i64]| reach(self.dtype, &shape[..rank], &strides[..rank]);
        // SAFETY: as the caller says.
        unsafe {
            let slice = if at.known { DeviceSlice::borrow_known } else { DeviceSlice::borrow };
            let slice_mut = if at.known { DeviceSliceMut::borrow_known } else { DeviceSliceMut::borrow };
            let input = |address, dims: &Dims| slice(address, reach(&dims.shape, &dims.strides));
            let mut operands = Operands::new(
                input(at.q, &self.q),
                input(at.k, &self.k),
                input(at.v, &self.v),
                slice_mut(at.out, reach(&self.out_shape(), &self.out)),
                slice_mut(at.lse.0, at.lse.1),
            );
            if let Some((batch, ..)) = self.packed {
                let [q, k] = at.cu_seqlens.map(|address| slice(address, 4 * (batch as u64 + 1)));
                operands = operands.cu_seqlens(q, k);
            }
            if self.slopes > 0 {
                operands = operands.alibi_slopes(slice(at.slopes, 4 * self.slopes as u64));
            }
            operands
        }
    }
}

/// Offsets of a packed batch of which the lengths are not known here, for they are on the device: some that have the longest
/// and the sum. Plans depend on no more.
fn stand_in(argument: &str, batch: usize, longest: usize, total: usize) -> Result<Vec<i32>, PyErr> {
    let refuse = |what: String| PyValueError::new_err(format!("{argument} is {longest}: {what}"));
    if total > batch.saturating_mul(longest) {
        return Err(refuse(format!("{batch} sequences of so many at most cannot have {total} tokens in all")));
    }
    let end = |entry: usize| i32::try_from(total.min(entry * longest));
    let ends: Result<Vec<i32>, _> = (0..=batch).map(end).collect();
    ends.map_err(|_| refuse(format!("{total} tokens in all are more than 32-bit offsets can tell")))
}

/// Refusals are `ValueError`, calls that no kernel computes `NotImplementedError`, failures of the GPU `RuntimeError`.
fn python_error(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Plan(_) => PyNotImplementedError::new_err(text),
        Error::Cuda(_) | Error::Emulator(_) => PyRuntimeError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

/// What is kept of a call for those to come.
struct Kept {
    attention: Attention,
    /// What torch makes `out` and `lse` of, see [`torch`].
    out: PyOnceLock<Py<PyTuple>>,
    lse: PyOnceLock<Py<PyTuple>>,
}

impl Kept {
    fn of(attention: Attention) -> Arc<Kept> {
        Arc::new(Kept { attention, out: PyOnceLock::new(), lse: PyOnceLock::new() })
    }
}

/// A stream of the caller's.
struct Flow {
    stream: Stream,
    /// Memory for an `lse` that nobody asked for: a tensor of torch's and its address. It is never given back, for a recorded
    /// graph may write there whenever it is replayed; what is in it nobody reads.
    unread: PyOnceLock<(Py<PyAny>, u64)>,
}

/// A GPU, the processor, or an emulated GPU, and the kernels that were compiled for it.
#[pyclass(frozen, name = "Device", module = "flashstrata._flashstrata")]
struct PyDevice {
    device: Device,
    kept: Mutex<HashMap<Key, Arc<Kept>, foldhash::fast::RandomState>>,
    /// By the driver's handle.
    streams: Mutex<HashMap<usize, Arc<Flow>, foldhash::fast::RandomState>>,
    tuning: Option<Tuning>,
    /// Of calls over a cache.
    caches: kvcache::Kept,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PyDevice {
    fn of(device: Device) -> PyDevice {
        PyDevice {
            device,
            kept: Mutex::default(),
            streams: Mutex::default(),
            tuning: None,
            caches: kvcache::Kept::default(),
        }
    }

    /// What computes a call, known or new.
    fn kept(&self, py: Python<'_>, key: &Key) -> PyResult<Arc<Kept>> {
        if let Some(kept) = locked(&self.kept).get(key) {
            return Ok(kept.clone());
        }
        py.detach(|| {
            let kept = Kept::of(self.attention(key)?);
            let mut all = locked(&self.kept);
            if all.len() >= MOST_KEPT {
                all.clear();
            }
            all.insert(key.clone(), kept.clone());
            Ok(kept)
        })
    }

    fn attention(&self, key: &Key) -> PyResult<Attention> {
        let problem = key.problem()?;
        let layout = key.layout(&problem)?;
        if self.device.is_cpu() {
            return match key.stratum {
                Some(stratum) => {
                    Err(PyValueError::new_err(format!("stratum is {stratum}: the CPU has code of its own")))
                }
                None => self.device.prepare(&problem, &layout).map_err(python_error),
            };
        }
        let mut planner = self.device.planner().map_err(python_error)?;
        if let Some(stratum) = key.stratum {
            planner = planner.stratum(stratum);
        }
        if let Some(tuning) = &self.tuning {
            let loaded = tuning.load().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            planner = planner.tuned(loaded.table);
        }
        let plan = planner.plan(&problem, &layout).map_err(|error| python_error(error.into()))?;
        self.device.load(plan).map_err(python_error)
    }

    /// The stream of this handle. Each call of the processor has its own: they share its threads, and one that waited for another
    /// on a thread of that one's would wait for ever.
    fn flow(&self, handle: usize) -> PyResult<Arc<Flow>> {
        let flow = |stream| Arc::new(Flow { stream, unread: PyOnceLock::new() });
        if self.device.is_cpu() {
            return self.device.stream().map(flow).map_err(python_error);
        }
        let mut streams = locked(&self.streams);
        if let Some(known) = streams.get(&handle) {
            return Ok(known.clone());
        }
        // SAFETY: torch's streams, and the default one, are those of the primary context, and stay.
        let stream = unsafe { self.device.borrow_stream(handle as *mut c_void) };
        let flow = flow(stream.map_err(python_error)?);
        streams.insert(handle, flow.clone());
        Ok(flow)
    }

    /// Starts a call, which `kept` computes, and does not wait.
    ///
    /// # Safety
    /// The addresses are of this device's memory, as large as the tensors are, that stays until the call has ended.
    unsafe fn start(&self, flow: &Flow, kept: &Kept, key: &Key, at: &Addresses) -> PyResult<()> {
        if !self.device.is_cpu() {
            // SAFETY: as the caller says.
            return flow.stream.enqueue(&kept.attention, unsafe { key.operands(at) }).map_err(python_error);
        }
        // What the processor computes depends on the offsets and the slopes, which are read now.
        // SAFETY: as the caller says.
        let read = unsafe { self.read_on_cpu(key, at)? };
        let attention = read.as_ref().unwrap_or(&kept.attention);
        pool()?.install(|| {
            // SAFETY: as the caller says.
            flow.stream.enqueue(attention, unsafe { key.operands(at) }).map_err(python_error)
        })
    }

    /// A call of the processor's with its offsets and slopes, if it has any.
    ///
    /// # Safety
    /// The addresses are of host memory, that is as large.
    unsafe fn read_on_cpu(&self, key: &Key, at: &Addresses) -> PyResult<Option<Attention>> {
        if key.packed.is_none() && key.slopes == 0 {
            return Ok(None);
        }
        let mut spec = key.problem()?.into_spec();
        // SAFETY: as the caller says.
        unsafe {
            if let Some((batch, ..)) = key.packed {
                let offsets = |address| std::slice::from_raw_parts(address as usize as *const i32, batch + 1).to_vec();
                let [cu_seqlens_q, cu_seqlens_k] = at.cu_seqlens.map(offsets);
                spec.varlen = Some(Varlen { cu_seqlens_q, cu_seqlens_k });
            }
            if key.slopes > 0 {
                let slopes = std::slice::from_raw_parts(at.slopes as usize as *const f32, key.slopes);
                spec.alibi_slopes = Some(slopes.to_vec());
            }
        }
        let problem = spec.build().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let layout = key.layout(&problem)?;
        self.device.prepare(&problem, &layout).map(Some).map_err(python_error)
    }
}

/// Extents and strides of an argument of a call.
fn dims(name: &str, packed: bool, shape: &[usize], strides: &[i64]) -> PyResult<Dims> {
    let rank = if packed { 3 } else { 4 };
    if shape.len() != rank {
        let dims = if packed { "[total, heads, head_dim]" } else { "[batch, seqlen, heads, head_dim]" };
        return Err(PyValueError::new_err(format!("{name} has shape {shape:?}: it must be {dims}")));
    }
    Ok(Dims { shape: padded(shape), strides: padded(strides) })
}

fn padded<T: Copy + Default>(of: &[T]) -> [T; MOST_DIMENSIONS] {
    std::array::from_fn(|dimension| of.get(dimension).copied().unwrap_or_default())
}

/// The bytes from a tensor's first element to the end of its last.
fn reach(dtype: Dtype, shape: &[usize], strides: &[i64]) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    let last: i64 =
        shape.iter().zip(strides).map(|(&extent, &stride)| (extent as i64 - 1).saturating_mul(stride)).sum();
    u64::try_from(last).unwrap_or(0).saturating_add(1).saturating_mul(dtype.bytes() as u64)
}

#[pymethods]
impl PyDevice {
    /// The GPU of this number; `tuned` consults the user's file of measurements (`strata tune`).
    #[new]
    #[pyo3(signature = (ordinal = 0, tuned = false))]
    fn new(ordinal: u32, tuned: bool) -> PyResult<Self> {
        let device = Device::cuda(ordinal).map_err(python_error)?;
        Ok(PyDevice { tuning: tuned.then_some(Tuning::Cached), ..PyDevice::of(device) })
    }

    /// A board of this name, emulated on the CPU: exact, and very slow.
    #[staticmethod]
    fn emulated(name: &str) -> PyResult<Self> {
        Device::emulated(name).map(PyDevice::of).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The processor.
    #[staticmethod]
    fn cpu() -> Self {
        PyDevice::of(Device::cpu())
    }

    /// Its name.
    #[getter]
    fn name(&self) -> String {
        self.device.hardware().map_or_else(|| self.device.to_string(), |hardware| hardware.name.clone())
    }

    /// Starts attention on a stream of the driver and does not wait. `out` and `lse` are written.
    ///
    /// Without `packed` the tensors have four dimensions; with `(cu_seqlens_q, cu_seqlens_k, batch, max_seqlen_q, max_seqlen_k)`
    /// three, and the first two are addresses. `slopes` is `(address, count)` or None.
    #[pyo3(signature = (stream, dtype, q, k, v, out, lse, scale, left, right, softcap, slopes, packed, stratum))]
    fn forward(
        &self,
        py: Python<'_>,
        stream: usize,
        dtype: &str,
        q: Memory,
        k: Memory,
        v: Memory,
        out: (u64, Vec<i64>),
        lse: (u64, u64),
        scale: Option<f32>,
        left: i64,
        right: i64,
        softcap: f32,
        slopes: Option<(u64, usize)>,
        packed: Option<(u64, u64, usize, usize, usize)>,
        stratum: Option<&str>,
    ) -> PyResult<()> {
        let dims = |name, tensor: &Memory| dims(name, packed.is_some(), &tensor.1, &tensor.2);
        let key = Key {
            dtype: parse_dtype(dtype)?,
            q: dims("q", &q)?,
            k: dims("k", &k)?,
            v: dims("v", &v)?,
            out: padded(&out.1),
            alignment: Addresses::alignment(q.0, k.0, v.0, out.0),
            scale: scale.map(f32::to_bits),
            window: (left, right),
            softcap: softcap.to_bits(),
            slopes: slopes.map_or(0, |(_, count)| count),
            packed: packed.map(|(_, _, batch, longest_q, longest_k)| (batch, longest_q, longest_k)),
            stratum: stratum.map(parse_stratum).transpose()?,
        };
        let at = Addresses {
            q: q.0,
            k: k.0,
            v: v.0,
            out: out.0,
            lse,
            cu_seqlens: packed.map_or([0; 2], |(q, k, ..)| [q, k]),
            slopes: slopes.map_or(0, |(address, _)| address),
            known: false,
        };
        let (kept, flow) = (self.kept(py, &key)?, self.flow(stream)?);
        // SAFETY: the Python side passes tensors of this device that it holds on to during the call, and whose allocator
        // keeps memory until the work in the stream that was current has ended.
        py.detach(|| unsafe { self.start(&flow, &kept, &key, &at) })
    }

    /// Waits for what is in a stream of the driver.
    fn synchronize(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        let flow = self.flow(stream)?;
        py.detach(|| flow.stream.synchronize().map_err(python_error))
    }

    /// Attention of contiguous host tensors, given and returned as bytes: `(out, lse)`.
    #[pyo3(signature = (problem, q, k, v, stratum = None))]
    fn forward_host<'py>(
        &self,
        py: Python<'py>,
        problem: &str,
        q: &[u8],
        k: &[u8],
        v: &[u8],
        stratum: Option<&str>,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let value = |error: &dyn std::error::Error| PyValueError::new_err(error.to_string());
        let problem: Problem = problem.parse().map_err(|error: flashstrata::ParseProblemError| value(&error))?;
        let stratum = stratum.map(parse_stratum).transpose()?;
        let tensor = |shape: Vec<usize>, bytes: &[u8]| Tensor::from_bytes(problem.dtype, &shape, bytes.to_vec());
        let inputs = Inputs {
            q: tensor(problem.q_shape(), q).map_err(|error| value(&error))?,
            k: tensor(problem.k_shape(), k).map_err(|error| value(&error))?,
            v: tensor(problem.v_shape(), v).map_err(|error| value(&error))?,
            new: None,
            descales: None,
        };
        let pool = pool()?;
        let outputs = py.detach(|| -> Result<_, Error> {
            let Some(stratum) = stratum else {
                return pool.install(|| self.device.compute(&problem, &inputs));
            };
            let plan = self.device.planner()?.stratum(stratum).plan(&problem, &Layout::contiguous(&problem))?;
            self.device.stream()?.run(&plan, &inputs)
        });
        let outputs = outputs.map_err(python_error)?;
        Ok((PyBytes::new(py, outputs.out.storage()), PyBytes::new(py, outputs.lse.storage())))
    }

    /// What would run for a problem as `strata` writes it, and why no newer generation.
    #[pyo3(signature = (problem, stratum = None))]
    fn plan(&self, problem: &str, stratum: Option<&str>) -> PyResult<String> {
        let problem: Problem = problem
            .parse()
            .map_err(|error: flashstrata::ParseProblemError| PyValueError::new_err(error.to_string()))?;
        let planner = self.device.planner().map_err(python_error)?;
        let planner = match stratum {
            Some(stratum) => planner.stratum(parse_stratum(stratum)?),
            None => planner,
        };
        let plan = planner.plan(&problem, &Layout::contiguous(&problem)).map_err(|error| python_error(error.into()))?;
        Ok(plan.to_string())
    }
}

fn parse_dtype(name: &str) -> PyResult<Dtype> {
    name.parse().map_err(|_| PyValueError::new_err(format!("dtype is {name}: it must be f32, f16 or bf16")))
}

fn parse_stratum(name: &str) -> PyResult<Stratum> {
    name.parse().map_err(|error| PyValueError::new_err(format!("{error}")))
}

/// The threads that the processor computes on. A process that was forked has none of its parent's, and gets its own.
fn pool() -> PyResult<Arc<ThreadPool>> {
    static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);
    let process = std::process::id();
    let mut kept = locked(&POOL);
    if let Some((_, pool)) = kept.as_ref().filter(|(of, _)| *of == process) {
        return Ok(pool.clone());
    }
    let pool = ThreadPoolBuilder::new().build().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let pool = Arc::new(pool);
    // Dropping the parent's would wait for threads that are not there.
    std::mem::forget(kept.replace((process, pool.clone())));
    Ok(pool)
}

/// What Python imports.
#[pymodule]
fn _flashstrata(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<PyDevice>()?;
    module.add_class::<torch::Torch>()?;
    module.add_function(wrap_pyfunction!(lab::dig, module)?)?;
    module.add_function(wrap_pyfunction!(lab::probe, module)?)?;
    module.add_function(wrap_pyfunction!(kvcache::forward_cache, module)?)
}
