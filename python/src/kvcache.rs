//! Attention over a cache of keys and values: what `flashstrata/kvcache.py` calls.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use flashstrata::{
    Append, Attention, Cache, DeviceSlice, DeviceSliceMut, Dtype, Layout, Mask, Operands, Pages, Problem, ProblemSpec,
    Rotary, Stream, Tuning, Varlen, View, appended, layout,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::{MOST_KEPT, Memory, PyDevice, locked, parse_dtype, pool, python_error, reach};

/// What is kept of calls, for those to come.
#[derive(Default)]
pub(crate) struct Kept {
    attentions: Mutex<HashMap<Key, Arc<Attention>>>,
    /// By the driver's handle.
    streams: Mutex<HashMap<usize, Stream>>,
}

/// Shape and strides of a tensor.
type Dims = (Vec<usize>, Vec<i64>);

/// What a call is, its memory aside: everything that a plan depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    dtype: Dtype,
    q: Dims,
    k: Dims,
    v: Dims,
    out: Dims,
    new: Option<[Dims; 2]>,
    /// What divides every address.
    alignment: u64,
    scale: Option<u32>,
    window: (i64, i64),
    softcap: u32,
    /// Slopes given: none, `heads` of them, or `batch * heads`.
    slopes: usize,
    batch: usize,
    /// Of packed queries: the longest sequences of queries and of keys.
    packed: Option<(usize, usize)>,
    lengths: bool,
    named_rows: bool,
    /// Of pages, how many the table has for each entry.
    pages_of_entry: Option<usize>,
    rotary: Option<(usize, bool, usize)>,
    splits: Option<u32>,
}

/// What a problem has of the caller's integers and slopes: what stands for them, or on the processor what they are.
#[derive(Default)]
struct Values {
    varlen: Option<Varlen>,
    slopes: Option<Vec<f32>>,
    seqlens: Option<Vec<i32>>,
    batch_idx: Option<Vec<i32>>,
    table: Option<Vec<i32>>,
}

fn value_error(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

impl Key {
    /// Keys that an entry has room for.
    fn capacity(&self) -> usize {
        match (self.packed, self.pages_of_entry) {
            (Some((_, longest_k)), _) => longest_k,
            (None, Some(pages)) => pages.saturating_mul(self.k.0[1]),
            (None, None) => self.k.0[1],
        }
    }

    fn appended(&self) -> usize {
        self.new.as_ref().map_or(0, |[k, _]| k.0[1])
    }

    /// Values of the same number as the caller's: kernels read those from the device, and a plan depends on their number alone.
    fn stand_ins(&self) -> Values {
        let before = self.capacity().saturating_sub(self.appended()).try_into().unwrap_or(i32::MAX);
        let ends = |entry: usize, (longest, _)| self.q.0[0].min(entry * longest) as i32;
        Values {
            varlen: self.packed.map(|packed| Varlen {
                cu_seqlens_q: (0..=self.batch).map(|entry| ends(entry, packed)).collect(),
                cu_seqlens_k: vec![0; self.batch + 1],
            }),
            slopes: (self.slopes > 0).then(|| vec![0.0; self.slopes]),
            seqlens: self.lengths.then(|| vec![before; self.batch]),
            batch_idx: self.named_rows.then(|| vec![0; self.batch]),
            table: self.pages_of_entry.map(|pages| vec![0; pages * self.batch]),
        }
    }

    fn problem(&self, values: Values) -> PyResult<Problem> {
        let (rank, k, v) = (self.q.0.len(), &self.k.0, &self.v.0);
        let rank_of_q = if self.packed.is_some() { 3 } else { 4 };
        for (name, shape, expected) in [("q", &self.q.0, rank_of_q), ("k_cache", k, 4), ("v_cache", v, 4)] {
            if shape.len() != expected {
                return Err(PyValueError::new_err(format!(
                    "{name} has shape {shape:?}: it must have {expected} dimensions"
                )));
            }
        }
        let (heads_q, head_dim) = (self.q.0[rank - 2], self.q.0[rank - 1]);
        let cache = Cache {
            rows: k[0],
            seqlens: values.seqlens,
            batch_idx: values.batch_idx,
            pages: values.table.map(|table| Pages { size: k[1], table }),
            append: self.new.as_ref().map(|[new, _]| Append {
                seqlen: new.0[1],
                rotary: self.rotary.map(|(dim, interleaved, positions)| Rotary { dim, interleaved, positions }),
            }),
        };
        let spec = ProblemSpec {
            batch: self.batch,
            seqlen_q: self.packed.map_or(self.q.0[rank.saturating_sub(3)], |(longest_q, _)| longest_q),
            dtype: self.dtype,
            heads_kv: k[2],
            head_dim_v: v[3],
            mask: Mask::window(self.window.0, self.window.1),
            softmax_scale: self.scale.map(f32::from_bits),
            softcap: Some(f32::from_bits(self.softcap)).filter(|&cap| cap != 0.0),
            alibi_slopes: values.slopes,
            varlen: values.varlen,
            cache: Some(cache),
            ..ProblemSpec::new(self.batch, heads_q, self.capacity(), head_dim)
        };
        spec.build().map_err(value_error)
    }

    fn view<'a>(&self, (shape, strides): &'a Dims) -> View<'a> {
        View { dtype: self.dtype, shape, strides, address: self.alignment }
    }

    fn layout(&self, problem: &Problem) -> PyResult<Layout> {
        let [q, k, v, out] = [&self.q, &self.k, &self.v, &self.out].map(|dims| self.view(dims));
        let layout = layout(problem, &q, &k, &v, &out).map_err(value_error)?;
        match &self.new {
            None => Ok(layout),
            Some([k, v]) => appended(problem, layout, &self.view(k), &self.view(v)).map_err(value_error),
        }
    }

    fn reach(&self, (shape, strides): &Dims) -> u64 {
        reach(self.dtype, shape, strides)
    }
}

/// Where a call's integers and slopes are, each null where there are none.
struct Places {
    cu_seqlens: [u64; 2],
    slopes: u64,
    seqlens: u64,
    batch_idx: u64,
    table: u64,
}

impl Places {
    /// The values themselves.
    ///
    /// # Safety
    /// The addresses are of host memory, as large as `key` says.
    unsafe fn read(&self, key: &Key) -> Values {
        let list = |address: u64, length: usize| {
            // SAFETY: as the caller says.
            (address != 0)
                .then(|| unsafe { std::slice::from_raw_parts(address as usize as *const i32, length) }.to_vec())
        };
        let slopes = || {
            // SAFETY: as the caller says.
            unsafe { std::slice::from_raw_parts(self.slopes as usize as *const f32, key.slopes) }.to_vec()
        };
        let [cu_seqlens_q, cu_seqlens_k] = self.cu_seqlens.map(|address| list(address, key.batch + 1));
        Values {
            varlen: cu_seqlens_q
                .zip(cu_seqlens_k)
                .map(|(cu_seqlens_q, cu_seqlens_k)| Varlen { cu_seqlens_q, cu_seqlens_k }),
            slopes: (self.slopes != 0).then(slopes),
            seqlens: list(self.seqlens, key.batch),
            batch_idx: list(self.batch_idx, key.batch),
            table: list(self.table, key.pages_of_entry.unwrap_or(0) * key.batch),
        }
    }
}

impl PyDevice {
    fn cached_attention(&self, key: &Key) -> PyResult<Arc<Attention>> {
        if let Some(kept) = locked(&self.caches.attentions).get(key) {
            return Ok(kept.clone());
        }
        let problem = key.problem(key.stand_ins())?;
        let layout = key.layout(&problem)?;
        let mut planner = self.device.planner().map_err(python_error)?;
        if let Some(splits) = key.splits {
            planner = planner.splits(splits);
        } else if let Some(tuning) = &self.tuning {
            planner =
                planner.tuned(Tuning::load(tuning).map_err(|error| PyRuntimeError::new_err(error.to_string()))?.table);
        }
        let plan = planner.plan(&problem, &layout).map_err(|error| python_error(error.into()))?;
        let attention = Arc::new(self.device.load(plan).map_err(python_error)?);
        let mut kept = locked(&self.caches.attentions);
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        kept.insert(key.clone(), attention.clone());
        Ok(attention)
    }

    fn cached_stream(&self, handle: usize) -> PyResult<Stream> {
        if self.device.is_cpu() {
            return self.device.stream().map_err(python_error);
        }
        match locked(&self.caches.streams).entry(handle) {
            Entry::Occupied(known) => Ok(known.get().clone()),
            Entry::Vacant(new) => {
                // SAFETY: torch's streams, and the default one, are those of the primary context, and stay.
                let borrowed = unsafe { self.device.borrow_stream(handle as *mut c_void) };
                Ok(new.insert(borrowed.map_err(python_error)?).clone())
            }
        }
    }
}

/// Starts attention over a cache on a stream of the driver and does not wait. `out` and `lse` are written, and with `new` the
/// cache.
///
/// Addresses of integers are of int32, contiguous. `packed` is `(cu_seqlens_q, cu_seqlens_k, batch, max_seqlen_q, max_seqlen_k)`,
/// `block_table` its address and the pages of an entry, `new` the keys and values to append, `rotary` `(cos, sin, dim,
/// interleaved, positions)`.
#[pyfunction]
#[pyo3(signature = (
    device, stream, dtype, q, k, v, out, lse, scale, left, right, softcap, slopes, packed, cache_seqlens, cache_batch_idx,
    block_table, new, rotary, splits
))]
pub(crate) fn forward_cache(
    py: Python<'_>,
    device: &PyDevice,
    stream: usize,
    dtype: &str,
    q: Memory,
    k: Memory,
    v: Memory,
    out: Memory,
    lse: (u64, u64),
    scale: Option<f32>,
    left: i64,
    right: i64,
    softcap: f32,
    slopes: Option<(u64, usize)>,
    packed: Option<(u64, u64, usize, usize, usize)>,
    cache_seqlens: Option<u64>,
    cache_batch_idx: Option<u64>,
    block_table: Option<(u64, usize)>,
    new: Option<(Memory, Memory)>,
    rotary: Option<(u64, u64, usize, bool, usize)>,
    splits: Option<u32>,
) -> PyResult<()> {
    let addresses = q.0 | k.0 | v.0 | out.0;
    let at = [q.0, k.0, v.0, out.0];
    let new_at = new.as_ref().map(|(k, v)| [k.0, v.0]);
    let key = Key {
        dtype: parse_dtype(dtype)?,
        batch: packed.map_or(q.1.first().copied().unwrap_or(0), |(_, _, batch, ..)| batch),
        q: (q.1, q.2),
        k: (k.1, k.2),
        v: (v.1, v.2),
        out: (out.1, out.2),
        new: new.map(|(k, v)| [(k.1, k.2), (v.1, v.2)]),
        alignment: 1 << (addresses | 16).trailing_zeros(),
        scale: scale.map(f32::to_bits),
        window: (left, right),
        softcap: softcap.to_bits(),
        slopes: slopes.map_or(0, |(_, count)| count),
        packed: packed.map(|(_, _, _, longest_q, longest_k)| (longest_q, longest_k)),
        lengths: cache_seqlens.is_some(),
        named_rows: cache_batch_idx.is_some(),
        pages_of_entry: block_table.map(|(_, pages)| pages),
        rotary: rotary.map(|(_, _, dim, interleaved, positions)| (dim, interleaved, positions)),
        splits,
    };
    for (name, (shape, _)) in [("k_cache", &key.k), ("v_cache", &key.v)]
        .into_iter()
        .chain(key.new.iter().flat_map(|[k, v]| [("k", k), ("v", v)]))
    {
        if shape.len() != 4 {
            return Err(PyValueError::new_err(format!("{name} has shape {shape:?}: it must have 4 dimensions")));
        }
    }
    let places = Places {
        cu_seqlens: packed.map_or([0; 2], |(q, k, ..)| [q, k]),
        slopes: slopes.map_or(0, |(address, _)| address),
        seqlens: cache_seqlens.unwrap_or(0),
        batch_idx: cache_batch_idx.unwrap_or(0),
        table: block_table.map_or(0, |(address, _)| address),
    };
    py.detach(|| {
        let on_cpu = device.device.is_cpu();
        let attention = if on_cpu {
            // SAFETY: the Python side passes tensors of the device, which are as large.
            let problem = key.problem(unsafe { places.read(&key) })?;
            Arc::new(device.device.prepare(&problem, &key.layout(&problem)?).map_err(python_error)?)
        } else {
            device.cached_attention(&key)?
        };
        // SAFETY: the Python side passes tensors of this device that it holds on to during the call, and whose allocator keeps
        // memory until the work in the stream that was current has ended; the cache is the caller's to write.
        let operands = unsafe {
            let slice = DeviceSlice::borrow;
            let integers = |address, count: usize| slice(address, 4 * count as u64);
            let mut operands = Operands::new(
                slice(at[0], key.reach(&key.q)),
                slice(at[1], key.reach(&key.k)),
                slice(at[2], key.reach(&key.v)),
                DeviceSliceMut::borrow(at[3], key.reach(&key.out)),
                DeviceSliceMut::borrow(lse.0, lse.1),
            );
            if packed.is_some() {
                let [q, k] = places.cu_seqlens.map(|address| integers(address, key.batch + 1));
                operands = operands.cu_seqlens(q, k);
            }
            if let Some((address, count)) = slopes {
                operands = operands.alibi_slopes(integers(address, count));
            }
            if let Some(address) = cache_seqlens {
                operands = operands.cache_seqlens(integers(address, key.batch));
            }
            if let Some(address) = cache_batch_idx {
                operands = operands.cache_batch_idx(integers(address, key.batch));
            }
            if let Some((address, pages)) = block_table {
                operands = operands.block_table(integers(address, pages * key.batch));
            }
            if let (Some([at_k, at_v]), Some([k, v])) = (new_at, &key.new) {
                operands = operands.append(slice(at_k, key.reach(k)), slice(at_v, key.reach(v)));
            }
            if let Some((cos, sin, dim, _, positions)) = rotary {
                let bytes = (positions * (dim / 2) * key.dtype.bytes()) as u64;
                operands = operands.rotary(slice(cos, bytes), slice(sin, bytes));
            }
            operands
        };
        let stream = device.cached_stream(stream)?;
        let enqueue = || stream.enqueue(&attention, operands).map_err(python_error);
        if on_cpu { pool()?.install(enqueue) } else { enqueue() }
    })
}
