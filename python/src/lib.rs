//! The library for Python: what `flashstrata/*.py` calls.
//!
//! Tensors come as `(address, shape, strides)`, strides in elements. Everything a kernel's code depends on is a `Key`; a call
//! whose key was seen before takes the compiled kernels as they are.

mod kvcache;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flashstrata::{
    Attention, Device, DeviceSlice, DeviceSliceMut, Dtype, Error, Inputs, Layout, Mask, Operands, Problem, ProblemSpec,
    Stratum, Stream, Tensor, Tuning, Varlen, View, layout,
};
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A tensor in somebody's memory: its first element's address, its shape, and its strides in elements.
type Memory = (u64, Vec<usize>, Vec<i64>);

/// Kernels that are kept for calls to come; with more they are all forgotten.
const MOST_KEPT: usize = 1024;

/// What a call is, its memory aside: everything that a plan depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    dtype: Dtype,
    shapes: [Vec<usize>; 3],
    strides: [Vec<i64>; 4],
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

impl Key {
    fn problem(&self) -> Result<Problem, PyErr> {
        let [q, k, v] = &self.shapes;
        let rank = if self.packed.is_some() { 3 } else { 4 };
        for (name, shape) in [("q", q), ("k", k), ("v", v)] {
            if shape.len() != rank {
                let dims = if rank == 3 { "[total, heads, head_dim]" } else { "[batch, seqlen, heads, head_dim]" };
                return Err(PyValueError::new_err(format!("{name} has shape {shape:?}: it must be {dims}")));
            }
        }
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

    fn view<'a>(&'a self, index: usize, shape: &'a [usize]) -> View<'a> {
        View { dtype: self.dtype, shape, strides: &self.strides[index], address: self.alignment }
    }

    fn layout(&self, problem: &Problem) -> Result<Layout, PyErr> {
        let [q, k, v] = [0, 1, 2].map(|index| self.view(index, &self.shapes[index]));
        let shape = problem.out_shape();
        layout(problem, &q, &k, &v, &self.view(3, &shape)).map_err(|error| PyValueError::new_err(error.to_string()))
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

/// A GPU, the processor, or an emulated GPU, and the kernels that were compiled for it.
#[pyclass(frozen, name = "Device", module = "flashstrata._flashstrata")]
struct PyDevice {
    device: Device,
    kept: Mutex<HashMap<Key, Arc<Attention>>>,
    /// By the driver's handle.
    streams: Mutex<HashMap<usize, Stream>>,
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

    fn attention(&self, key: Key) -> PyResult<Arc<Attention>> {
        if let Some(kept) = locked(&self.kept).get(&key) {
            return Ok(kept.clone());
        }
        let problem = key.problem()?;
        let layout = key.layout(&problem)?;
        let mut planner = self.device.planner().map_err(python_error)?;
        if let Some(stratum) = key.stratum {
            planner = planner.stratum(stratum);
        }
        if let Some(tuning) = &self.tuning {
            let loaded = tuning.load().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            planner = planner.tuned(loaded.table);
        }
        let plan = planner.plan(&problem, &layout).map_err(|error| python_error(error.into()))?;
        let attention = Arc::new(self.device.load(plan).map_err(python_error)?);
        let mut kept = locked(&self.kept);
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        kept.insert(key, attention.clone());
        Ok(attention)
    }
}

impl PyDevice {
    /// What computes a call on the processor, whose plans are not worth keeping. It reads offsets and slopes now.
    ///
    /// # Safety
    /// The addresses are of host memory, that is as large.
    unsafe fn on_cpu(
        &self,
        key: &Key,
        slopes: Option<(u64, usize)>,
        packed: Option<(u64, u64, usize, usize, usize)>,
    ) -> PyResult<Attention> {
        if let Some(stratum) = key.stratum {
            return Err(PyValueError::new_err(format!("stratum is {stratum}: the CPU has code of its own")));
        }
        let mut spec = key.problem()?.into_spec();
        // SAFETY: as the caller says.
        unsafe {
            if let Some((cu_seqlens_q, cu_seqlens_k, batch, ..)) = packed {
                let offsets = |address| std::slice::from_raw_parts(address as usize as *const i32, batch + 1).to_vec();
                let (cu_seqlens_q, cu_seqlens_k) = (offsets(cu_seqlens_q), offsets(cu_seqlens_k));
                spec.varlen = Some(Varlen { cu_seqlens_q, cu_seqlens_k });
            }
            if let Some((address, count)) = slopes {
                spec.alibi_slopes = Some(std::slice::from_raw_parts(address as usize as *const f32, count).to_vec());
            }
        }
        let problem = spec.build().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let layout = key.layout(&problem)?;
        self.device.prepare(&problem, &layout).map_err(python_error)
    }
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
        let dtype = parse_dtype(dtype)?;
        let addresses = q.0 | k.0 | v.0 | out.0;
        let reaches = [(&q.1, &q.2), (&k.1, &k.2), (&v.1, &v.2)].map(|(shape, strides)| reach(dtype, shape, strides));
        let mut out_shape = q.1.clone();
        if let (Some(width), Some(dim)) = (out_shape.last_mut(), v.1.last()) {
            *width = *dim;
        }
        let out_bytes = reach(dtype, &out_shape, &out.1);
        let key = Key {
            dtype,
            shapes: [q.1, k.1, v.1],
            strides: [q.2, k.2, v.2, out.1],
            alignment: 1 << (addresses | 256).trailing_zeros(),
            scale: scale.map(f32::to_bits),
            window: (left, right),
            softcap: softcap.to_bits(),
            slopes: slopes.map_or(0, |(_, count)| count),
            packed: packed.map(|(_, _, batch, longest_q, longest_k)| (batch, longest_q, longest_k)),
            stratum: stratum.map(parse_stratum).transpose()?,
        };
        py.detach(|| {
            let attention = match self.device.is_cpu() {
                // SAFETY: the Python side passes tensors of the device, which are as large.
                true => Arc::new(unsafe { self.on_cpu(&key, slopes, packed)? }),
                false => self.attention(key)?,
            };
            // SAFETY: the Python side passes tensors of this device that it holds on to during the call, and whose allocator
            // keeps memory until the work in the stream that was current has ended.
            let operands = unsafe {
                let slice = DeviceSlice::borrow;
                let mut operands = Operands::new(
                    slice(q.0, reaches[0]),
                    slice(k.0, reaches[1]),
                    slice(v.0, reaches[2]),
                    DeviceSliceMut::borrow(out.0, out_bytes),
                    DeviceSliceMut::borrow(lse.0, lse.1),
                );
                if let Some((cu_seqlens_q, cu_seqlens_k, batch, ..)) = packed {
                    let bytes = 4 * (batch as u64 + 1);
                    operands = operands.cu_seqlens(slice(cu_seqlens_q, bytes), slice(cu_seqlens_k, bytes));
                }
                if let Some((address, count)) = slopes {
                    operands = operands.alibi_slopes(slice(address, 4 * count as u64));
                }
                operands
            };
            let mut streams = locked(&self.streams);
            let stream = match streams.entry(stream) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) if self.device.is_cpu() => new.insert(self.device.stream().map_err(python_error)?),
                Entry::Vacant(new) => {
                    // SAFETY: torch's streams, and the default one, are those of the primary context, and stay.
                    let borrowed = unsafe { self.device.borrow_stream(stream as *mut c_void) };
                    new.insert(borrowed.map_err(python_error)?)
                }
            };
            let enqueue = || stream.enqueue(&attention, operands).map_err(python_error);
            if self.device.is_cpu() { pool()?.install(enqueue) } else { enqueue() }
        })
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
    module.add_function(wrap_pyfunction!(kvcache::forward_cache, module)?)
}
