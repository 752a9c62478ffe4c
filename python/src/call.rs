//! What a call is: everything that a plan depends on, and apart from it where its tensors are.

use flashstrata::{
    Append, Cache, DeviceSlice, DeviceSliceMut, Dtype, Layout, Mask, Operands, Pages, Problem, ProblemSpec, Rotary,
    Stratum, Varlen, View, appended, layout,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::dlpack::MOST_DIMENSIONS;

/// A tensor of a call: extents and strides of its dimensions, 0 beyond them. Strides are in elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Dims {
    pub shape: [usize; MOST_DIMENSIONS],
    pub strides: [i64; MOST_DIMENSIONS],
}

/// What a call is, its memory aside: everything that a plan depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub dtype: Dtype,
    pub q: Dims,
    pub k: Dims,
    pub v: Dims,
    /// Strides of `out`, whose shape is q's with v's columns.
    pub out: [i64; MOST_DIMENSIONS],
    /// What divides every address.
    pub alignment: u64,
    pub scale: Option<u32>,
    pub window: (i64, i64),
    pub softcap: u32,
    /// Slopes given: none, `heads` of them, or `batch * heads`.
    pub slopes: usize,
    /// Of a packed batch: its entries, and the longest sequences of queries and of keys.
    pub packed: Option<(usize, usize, usize)>,
    pub stratum: Option<Stratum>,
    pub cache: Option<CacheKey>,
}

/// That k and v are a cache, and how.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    /// Whether `cache_seqlens`, `cache_leftpad` and `cache_batch_idx` are given.
    pub seqlens: bool,
    pub leftpad: bool,
    pub batch_idx: bool,
    /// Of pages, how many the table has for each entry.
    pub pages_of_entry: Option<usize>,
    /// Keys and values to append.
    pub new: Option<[Dims; 2]>,
    /// Columns that are turned, whether neighbours are pairs, and positions.
    pub rotary: Option<(usize, bool, usize)>,
    /// Among how many CTAs keys are split; 0 leaves it to the library.
    pub splits: u32,
}

/// Where a call's tensors are, each null where there is none.
#[derive(Clone, Copy, Default)]
pub(crate) struct Addresses {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub out: u64,
    /// And its bytes.
    pub lse: (u64, u64),
    pub cu_seqlens: [u64; 2],
    pub slopes: u64,
    /// Of 8-bit inputs, what multiplies q, k and v.
    pub descales: [u64; 3],
    pub cache: CacheAddresses,
    /// Whether they are known to be of the device: the driver is asked otherwise.
    pub known: bool,
}

/// Where a cache's are, beside k and v.
#[derive(Clone, Copy, Default)]
pub(crate) struct CacheAddresses {
    pub seqlens: u64,
    pub leftpad: u64,
    pub batch_idx: u64,
    pub table: u64,
    pub new: [u64; 2],
    pub rotary: [u64; 2],
}

/// What a problem has of the caller's integers and slopes.
#[derive(Default)]
struct Values {
    varlen: Option<Varlen>,
    slopes: Option<Vec<f32>>,
    seqlens: Option<Vec<i32>>,
    leftpad: Option<Vec<i32>>,
    batch_idx: Option<Vec<i32>>,
    table: Option<Vec<i32>>,
}

impl Addresses {
    /// What divides those that a plan depends on: a power of two, at most the 16 that plans ask for.
    pub fn alignment(q: u64, k: u64, v: u64, out: u64) -> u64 {
        1 << (q | k | v | out | 16).trailing_zeros()
    }
}

impl Key {
    /// The same call; where nothing is said of its cache, which has a row for each entry, of tensors like those of other calls.
    pub fn simplified(self) -> Key {
        let plain = self.packed.is_none() && self.k.shape[0] == self.q.shape[0];
        Key { cache: self.cache.filter(|cache| !plain || *cache != CacheKey::default()), ..self }
    }

    /// Dimensions of q: 3 of a packed batch, otherwise 4.
    pub fn rank(&self) -> usize {
        if self.packed.is_some() { 3 } else { 4 }
    }

    /// Dimensions of k and v, which are 4 of a cache too.
    fn rank_of_keys(&self) -> usize {
        if self.cache.is_some() { 4 } else { self.rank() }
    }

    pub fn batch(&self) -> usize {
        self.packed.map_or(self.q.shape[0], |(batch, ..)| batch)
    }

    pub fn out_shape(&self) -> [usize; MOST_DIMENSIONS] {
        let mut shape = self.q.shape;
        shape[self.rank() - 1] = self.v.shape[self.rank_of_keys() - 1];
        shape
    }

    /// Keys that an entry has room for.
    fn capacity(&self) -> usize {
        match (self.packed, self.cache.and_then(|cache| cache.pages_of_entry)) {
            (Some((.., longest)), _) => longest,
            (None, Some(pages)) => pages.saturating_mul(self.k.shape[1]),
            (None, None) => self.k.shape[1],
        }
    }

    /// Values of the same number as the caller's, which are on the device, where kernels read them: plans depend on no more.
    fn stand_ins(&self) -> PyResult<Values> {
        let (batch, cache) = (self.batch(), self.cache.unwrap_or_default());
        let varlen = match self.packed {
            None => None,
            Some((_, longest_q, longest_k)) => Some(Varlen {
                cu_seqlens_q: stand_in("max_seqlen_q", batch, longest_q, self.q.shape[0])?,
                cu_seqlens_k: match self.cache {
                    None => stand_in("max_seqlen_k", batch, longest_k, self.k.shape[0])?,
                    Some(_) => vec![0; batch + 1],
                },
            }),
        };
        let new = cache.new.map_or(0, |[k, _]| k.shape[1]);
        let before = i32::try_from(self.capacity().saturating_sub(new)).unwrap_or(i32::MAX);
        Ok(Values {
            varlen,
            slopes: (self.slopes > 0).then(|| vec![0.0; self.slopes]),
            seqlens: cache.seqlens.then(|| vec![before; batch]),
            leftpad: cache.leftpad.then(|| vec![0; batch]),
            batch_idx: cache.batch_idx.then(|| vec![0; batch]),
            table: cache.pages_of_entry.map(|pages| vec![0; pages * batch]),
        })
    }

    /// The caller's values themselves.
    ///
    /// # Safety
    /// The addresses are of host memory, as large as the tensors are.
    unsafe fn read(&self, at: &Addresses) -> Values {
        let (batch, cache) = (self.batch(), self.cache.unwrap_or_default());
        let list = |given: bool, address: u64, length: usize| {
            // SAFETY: as the caller says.
            given.then(|| unsafe { std::slice::from_raw_parts(address as usize as *const i32, length) }.to_vec())
        };
        let [cu_seqlens_q, cu_seqlens_k] = at.cu_seqlens.map(|address| list(self.packed.is_some(), address, batch + 1));
        let slopes = || {
            // SAFETY: as the caller says.
            unsafe { std::slice::from_raw_parts(at.slopes as usize as *const f32, self.slopes) }.to_vec()
        };
        Values {
            varlen: cu_seqlens_q
                .zip(cu_seqlens_k)
                .map(|(cu_seqlens_q, cu_seqlens_k)| Varlen { cu_seqlens_q, cu_seqlens_k }),
            slopes: (self.slopes > 0).then(slopes),
            seqlens: list(cache.seqlens, at.cache.seqlens, batch),
            leftpad: list(cache.leftpad, at.cache.leftpad, batch),
            batch_idx: list(cache.batch_idx, at.cache.batch_idx, batch),
            table: list(cache.pages_of_entry.is_some(), at.cache.table, cache.pages_of_entry.unwrap_or(0) * batch),
        }
    }

    /// The problem, as far as plans depend on it.
    pub fn problem(&self) -> PyResult<Problem> {
        self.problem_of(self.stand_ins()?)
    }

    /// The problem with the caller's values, where it has any.
    ///
    /// # Safety
    /// The addresses are of host memory, as large as the tensors are.
    pub unsafe fn problem_of_host(&self, at: &Addresses) -> PyResult<Option<Problem>> {
        if self.packed.is_none() && self.slopes == 0 && self.cache.is_none() {
            return Ok(None);
        }
        // SAFETY: as the caller says.
        self.problem_of(unsafe { self.read(at) }).map(Some)
    }

    fn problem_of(&self, values: Values) -> PyResult<Problem> {
        let (rank, rank_of_keys) = (self.rank(), self.rank_of_keys());
        let (heads_q, head_dim) = (self.q.shape[rank - 2], self.q.shape[rank - 1]);
        let cache = self.cache.map(|cache| Cache {
            rows: self.k.shape[0],
            seqlens: values.seqlens,
            leftpad: values.leftpad,
            batch_idx: values.batch_idx,
            pages: values.table.map(|table| Pages { size: self.k.shape[1], table }),
            append: cache.new.map(|[k, _]| Append {
                seqlen: k.shape[1],
                rotary: cache.rotary.map(|(dim, interleaved, positions)| Rotary { dim, interleaved, positions }),
            }),
        });
        let spec = ProblemSpec {
            seqlen_q: self.packed.map_or(self.q.shape[1], |(_, longest, _)| longest),
            dtype: self.dtype,
            heads_kv: self.k.shape[rank_of_keys - 2],
            head_dim_v: self.v.shape[rank_of_keys - 1],
            mask: Mask::window(self.window.0, self.window.1),
            softmax_scale: self.scale.map(f32::from_bits),
            softcap: Some(f32::from_bits(self.softcap)).filter(|&cap| cap != 0.0),
            alibi_slopes: values.slopes,
            varlen: values.varlen,
            cache,
            ..ProblemSpec::new(self.batch(), heads_q, self.capacity(), head_dim)
        };
        spec.build().map_err(value_error)
    }

    pub fn layout(&self, problem: &Problem) -> PyResult<Layout> {
        let out = Dims { shape: self.out_shape(), strides: self.out };
        let (rank, rank_of_keys) = (self.rank(), self.rank_of_keys());
        let layout = layout(
            problem,
            &self.view(&self.q, rank, self.dtype),
            &self.view(&self.k, rank_of_keys, self.dtype),
            &self.view(&self.v, rank_of_keys, self.dtype),
            &self.view(&out, rank, self.dtype.out()),
        );
        let layout = layout.map_err(value_error)?;
        match self.cache.and_then(|cache| cache.new) {
            None => Ok(layout),
            Some(new) => {
                let [k, v] = new.each_ref().map(|dims| self.view(dims, 4, self.dtype));
                appended(problem, layout, &k, &v).map_err(value_error)
            }
        }
    }

    fn view<'a>(&self, dims: &'a Dims, rank: usize, dtype: Dtype) -> View<'a> {
        View { dtype, shape: &dims.shape[..rank], strides: &dims.strides[..rank], address: self.alignment }
    }

    /// Operands of a call.
    ///
    /// # Safety
    /// The addresses are of memory of the stream's device, as large as the tensors are, that stays until the call has ended.
    pub unsafe fn operands(&self, at: &Addresses) -> Operands<'static> {
        let (rank, rank_of_keys, batch) = (self.rank(), self.rank_of_keys(), self.batch());
        let reach = |dims: &Dims, rank: usize, dtype| reach(dtype, &dims.shape[..rank], &dims.strides[..rank]);
        let out = Dims { shape: self.out_shape(), strides: self.out };
        // SAFETY: as the caller says.
        unsafe {
            let slice = if at.known { DeviceSlice::borrow_known } else { DeviceSlice::borrow };
            let slice_mut = if at.known { DeviceSliceMut::borrow_known } else { DeviceSliceMut::borrow };
            let words = |address, count: usize| slice(address, 4 * count as u64);
            let mut operands = Operands::new(
                slice(at.q, reach(&self.q, rank, self.dtype)),
                slice(at.k, reach(&self.k, rank_of_keys, self.dtype)),
                slice(at.v, reach(&self.v, rank_of_keys, self.dtype)),
                slice_mut(at.out, reach(&out, rank, self.dtype.out())),
                slice_mut(at.lse.0, at.lse.1),
            );
            if self.packed.is_some() {
                let [q, k] = at.cu_seqlens.map(|address| words(address, batch + 1));
                operands = operands.cu_seqlens(q, k);
            }
            if self.slopes > 0 {
                operands = operands.alibi_slopes(words(at.slopes, self.slopes));
            }
            if self.dtype.is_scaled() {
                let heads_kv = self.k.shape[rank_of_keys - 2];
                let [q, k, v] = at.descales.map(|address| words(address, batch * heads_kv));
                operands = operands.descales(q, k, v);
            }
            let Some(cache) = &self.cache else { return operands };
            if cache.seqlens {
                operands = operands.cache_seqlens(words(at.cache.seqlens, batch));
            }
            if cache.leftpad {
                operands = operands.cache_leftpad(words(at.cache.leftpad, batch));
            }
            if cache.batch_idx {
                operands = operands.cache_batch_idx(words(at.cache.batch_idx, batch));
            }
            if let Some(pages) = cache.pages_of_entry {
                operands = operands.block_table(words(at.cache.table, pages * batch));
            }
            if let Some([k, v]) = &cache.new {
                let [at_k, at_v] = at.cache.new;
                operands = operands.append(slice(at_k, reach(k, 4, self.dtype)), slice(at_v, reach(v, 4, self.dtype)));
            }
            if let Some((dim, _, positions)) = cache.rotary {
                let bytes = (positions * (dim / 2) * self.dtype.bytes()) as u64;
                let [cos, sin] = at.cache.rotary.map(|address| slice(address, bytes));
                operands = operands.rotary(cos, sin);
            }
            operands
        }
    }
}

pub(crate) fn value_error(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Offsets of a packed batch of which the lengths are not known here, for they are on the device: some that have the longest
/// and the sum. Plans depend on no more.
fn stand_in(argument: &str, batch: usize, longest: usize, total: usize) -> PyResult<Vec<i32>> {
    let refuse = |what: String| PyValueError::new_err(format!("{argument} is {longest}: {what}"));
    if total > batch.saturating_mul(longest) {
        return Err(refuse(format!("{batch} sequences of so many at most cannot have {total} tokens in all")));
    }
    let end = |entry: usize| i32::try_from(total.min(entry * longest));
    let ends: Result<Vec<i32>, _> = (0..=batch).map(end).collect();
    ends.map_err(|_| refuse(format!("{total} tokens in all are more than 32-bit offsets can tell")))
}

/// Extents and strides of an argument of a call, which has the dimensions that `wanted` names.
pub(crate) fn dims(name: &str, wanted: &[&str], shape: &[usize], strides: &[i64]) -> PyResult<Dims> {
    if shape.len() != wanted.len() || strides.len() != wanted.len() {
        let wanted = wanted.join(", ");
        return Err(PyValueError::new_err(format!("{name} has shape {shape:?}: it must be [{wanted}]")));
    }
    Ok(Dims { shape: padded(shape), strides: padded(strides) })
}

pub(crate) fn padded<T: Copy + Default>(of: &[T]) -> [T; MOST_DIMENSIONS] {
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
