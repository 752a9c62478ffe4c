//! The library for Python: what `flashstrata/*.py` calls.
//!
//! A call is a `Key`, everything that a kernel's code depends on, and addresses: one whose key was seen before takes the compiled
//! kernels as they are. Tensors come as `(address, shape, strides)`, strides in elements, or as objects of torch's.

mod call;
mod dlpack;
mod lab;
mod torch;

use std::collections::HashMap;
use std::ffi::c_void;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flashstrata::{Attention, Descales, Device, Dtype, Error, Inputs, Layout, Problem, Stream, Tensor, Tuning};
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyTuple};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::call::{Addresses, CacheAddresses, CacheKey, Key, dims, padded, value_error};

/// A tensor in somebody's memory: its first element's address, its shape, and its strides in elements.
type Memory = (u64, Vec<usize>, Vec<i64>);

/// Kernels that are kept for calls to come; with more they are all forgotten.
const MOST_KEPT: usize = 1024;

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
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PyDevice {
    fn of(device: Device) -> PyDevice {
        PyDevice { device, kept: Mutex::default(), streams: Mutex::default(), tuning: None }
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
        let splits = key.cache.map_or(0, |cache| cache.splits);
        if splits > 0 {
            planner = planner.splits(splits);
        } else if let Some(tuning) = &self.tuning {
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
        let flow = flow(stream.map_err(|error| match error {
            Error::NoGpu { .. } => PyValueError::new_err(format!(
                "the device is {}: an emulated GPU has no streams of the driver, and takes host tensors (forward_host)",
                self.device
            )),
            error => python_error(error),
        })?);
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
        // What the processor computes depends on the caller's integers and slopes, which are read now.
        // SAFETY: as the caller says.
        let read = match unsafe { key.problem_of_host(at)? } {
            None => None,
            Some(problem) => Some(self.device.prepare(&problem, &key.layout(&problem)?).map_err(python_error)?),
        };
        let attention = read.as_ref().unwrap_or(&kept.attention);
        pool()?.install(|| {
            // SAFETY: as the caller says.
            flow.stream.enqueue(attention, unsafe { key.operands(at) }).map_err(python_error)
        })
    }
}

/// That k and v are a cache, as Python says it: addresses of contiguous int32, each None where there is none.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct CacheArguments {
    seqlens: Option<u64>,
    leftpad: Option<u64>,
    batch_idx: Option<u64>,
    /// And the pages that it has of each entry.
    table: Option<(u64, usize)>,
    /// Keys and values to append.
    new: Option<(Memory, Memory)>,
    /// `(cos, sin, dim, interleaved, positions)`.
    rotary: Option<(u64, u64, usize, bool, usize)>,
    splits: u32,
}

impl CacheArguments {
    fn key(&self) -> PyResult<CacheKey> {
        let new = |name: &str, (_, shape, strides): &Memory| {
            dims(name, &["batch", "seqlen", "heads", "head_dim"], shape, strides)
        };
        Ok(CacheKey {
            seqlens: self.seqlens.is_some(),
            leftpad: self.leftpad.is_some(),
            batch_idx: self.batch_idx.is_some(),
            pages_of_entry: self.table.map(|(_, pages)| pages),
            new: match &self.new {
                None => None,
                Some((k, v)) => Some([new("k", k)?, new("v", v)?]),
            },
            rotary: self.rotary.map(|(_, _, dim, interleaved, positions)| (dim, interleaved, positions)),
            splits: self.splits,
        })
    }

    fn addresses(&self) -> CacheAddresses {
        CacheAddresses {
            seqlens: self.seqlens.unwrap_or(0),
            leftpad: self.leftpad.unwrap_or(0),
            batch_idx: self.batch_idx.unwrap_or(0),
            table: self.table.map_or(0, |(address, _)| address),
            new: self.new.as_ref().map_or([0; 2], |(k, v)| [k.0, v.0]),
            rotary: self.rotary.map_or([0; 2], |(cos, sin, ..)| [cos, sin]),
        }
    }
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

    /// Starts attention on a stream of the driver and does not wait. `out` and `lse` are written, and a cache that has new keys.
    ///
    /// Without `packed` the tensors have four dimensions; with `(cu_seqlens_q, cu_seqlens_k, batch, max_seqlen_q, max_seqlen_k)`
    /// three, and the first two are addresses. `slopes` is `(address, count)` or None, `descales` the addresses of what multiplies
    /// 8-bit q, k and v, contiguous `[batch, heads_kv]`.
    #[pyo3(signature = (
        stream, dtype, q, k, v, out, lse, scale, left, right, softcap, slopes = None, packed = None, stratum = None,
        cache = None, descales = None
    ))]
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
        cache: Option<CacheArguments>,
        descales: Option<[u64; 3]>,
    ) -> PyResult<()> {
        let one_by_one = ["batch", "seqlen", "heads", "head_dim"];
        let in_a_row = ["total", "heads", "head_dim"];
        let of_q: &[&str] = if packed.is_some() { &in_a_row } else { &one_by_one };
        let (of_k, [k_name, v_name]): (&[&str], _) = match cache {
            None => (of_q, ["k", "v"]),
            Some(_) => (&["rows", "seqlen", "heads", "head_dim"], ["k_cache", "v_cache"]),
        };
        let key = Key {
            dtype: parse(dtype)?,
            q: dims("q", of_q, &q.1, &q.2)?,
            k: dims(k_name, of_k, &k.1, &k.2)?,
            v: dims(v_name, of_k, &v.1, &v.2)?,
            out: padded(&out.1),
            alignment: Addresses::alignment(q.0, k.0, v.0, out.0),
            scale: scale.map(f32::to_bits),
            window: (left, right),
            softcap: softcap.to_bits(),
            slopes: slopes.map_or(0, |(_, count)| count),
            packed: packed.map(|(_, _, batch, longest_q, longest_k)| (batch, longest_q, longest_k)),
            stratum: stratum.map(parse).transpose()?,
            cache: cache.as_ref().map(CacheArguments::key).transpose()?,
        }
        .simplified();
        if key.dtype.is_scaled() != descales.is_some() {
            return Err(PyValueError::new_err(format!("dtype is {dtype}: e4m3 has descales, and no other type has")));
        }
        let at = Addresses {
            q: q.0,
            k: k.0,
            v: v.0,
            out: out.0,
            lse,
            cu_seqlens: packed.map_or([0; 2], |(q, k, ..)| [q, k]),
            slopes: slopes.map_or(0, |(address, _)| address),
            descales: descales.unwrap_or_default(),
            cache: cache.as_ref().map_or_else(CacheAddresses::default, CacheArguments::addresses),
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

    /// Attention of contiguous host tensors, given and returned as bytes: `(out, lse)`. `descales` are of 8-bit q, k and v.
    #[pyo3(signature = (problem, q, k, v, stratum = None, descales = None))]
    fn forward_host<'py>(
        &self,
        py: Python<'py>,
        problem: &str,
        q: &[u8],
        k: &[u8],
        v: &[u8],
        stratum: Option<&str>,
        descales: Option<(Vec<u8>, Vec<u8>, Vec<u8>)>,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let problem = parse::<Problem>(problem)?;
        let stratum = stratum.map(parse).transpose()?;
        let tensor =
            |dtype, shape: Vec<usize>, bytes: Vec<u8>| Tensor::from_bytes(dtype, &shape, bytes).map_err(value_error);
        let descale = |bytes| tensor(Dtype::F32, problem.descale_shape(), bytes);
        let inputs = Inputs {
            q: tensor(problem.dtype, problem.q_shape(), q.to_vec())?,
            k: tensor(problem.dtype, problem.k_shape(), k.to_vec())?,
            v: tensor(problem.dtype, problem.v_shape(), v.to_vec())?,
            new: None,
            descales: match descales {
                None => None,
                Some((q, k, v)) => Some(Descales { q: descale(q)?, k: descale(k)?, v: descale(v)? }),
            },
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
        let problem = parse::<Problem>(problem)?;
        let planner = self.device.planner().map_err(python_error)?;
        let planner = match stratum {
            Some(stratum) => planner.stratum(parse(stratum)?),
            None => planner,
        };
        let plan = planner.plan(&problem, &Layout::contiguous(&problem)).map_err(|error| python_error(error.into()))?;
        Ok(plan.to_string())
    }
}

fn parse<T: FromStr<Err: std::error::Error>>(text: &str) -> PyResult<T> {
    text.parse().map_err(value_error)
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
    module.add_function(wrap_pyfunction!(lab::probe, module)?)
}
