//! Host tensors: typed, strided, reference-counted; read and built in f64.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use half::{bf16, f16};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cache::New;
use crate::reference::{HeadOutput, all_heads};
use crate::{Feature, Problem};

/// The type of a tensor's elements, stored little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// The type as tensor maps name it.
    pub const fn element(self) -> ptx::Element {
        match self {
            Dtype::F32 => ptx::Element::F32,
            Dtype::F16 => ptx::Element::F16,
            Dtype::Bf16 => ptx::Element::Bf16,
        }
    }

    /// The type as instructions name it.
    pub const fn ty(self) -> ptx::Type {
        match self {
            Dtype::F32 => ptx::Type::F32,
            Dtype::F16 => ptx::Type::F16,
            Dtype::Bf16 => ptx::Type::Bf16,
        }
    }

    /// All of them.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// `x` rounded to the nearest value of the type, ties to even.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Dtype::F32 => f64::from(x as f32),
            Dtype::F16 => f16::from_f32(to_odd(x)).to_f64(),
            Dtype::Bf16 => bf16::from_f32(to_odd(x)).to_f64(),
        }
    }

    /// One unit in the last place at `x`: the distance between neighbours of the type in `x`'s binade.
    pub fn ulp(self, x: f64) -> f64 {
        let (fraction_bits, least_exponent) = match self {
            Dtype::F32 => (23, -126),
            Dtype::F16 => (10, -14),
            Dtype::Bf16 => (7, -126),
        };
        let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        2f64.powi(exponent.max(least_exponent) - fraction_bits)
    }

    fn write(self, x: f64, bytes: &mut [u8]) {
        match self {
            Dtype::F32 => bytes.copy_from_slice(&(x as f32).to_le_bytes()),
            Dtype::F16 => bytes.copy_from_slice(&f16::from_f32(to_odd(x)).to_le_bytes()),
            Dtype::Bf16 => bytes.copy_from_slice(&bf16::from_f32(to_odd(x)).to_le_bytes()),
        }
    }

    fn read(self, bytes: &[u8]) -> f64 {
        match (self, bytes) {
            (Dtype::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
            (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
            (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
            _ => f64::NAN,
        }
    }
}

/// Rounds to odd, after which rounding to a narrower type gives what rounding `x` at once would.
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if x.is_nan() || f64::from(nearest) == x {
        return nearest;
    }
    let away = u32::from(f64::from(nearest).abs() > x.abs());
    f32::from_bits((nearest.to_bits() - away) | 1)
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        })
    }
}

/// A text that names no type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dtype is `{0}`: it must be f32, f16 or bf16")]
pub struct ParseDtypeError(String);

impl FromStr for Dtype {
    type Err = ParseDtypeError;

    fn from_str(text: &str) -> Result<Dtype, ParseDtypeError> {
        let known = Dtype::ALL.into_iter().find(|dtype| dtype.to_string() == text);
        known.ok_or_else(|| ParseDtypeError(text.to_string()))
    }
}

/// Where an attention tensor's elements are, in elements; the last dimension is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// From one batch entry to the next; 0 when packed.
    pub batch: usize,
    /// From one token to the next.
    pub seq: usize,
    /// From one head to the next; 0 for an expanded head.
    pub head: usize,
}

impl Strides {
    /// Of a contiguous `[batch, seqlen, heads, dim]`.
    pub fn bshd(seqlen: usize, heads: usize, dim: usize) -> Strides {
        Strides { batch: seqlen * heads * dim, seq: heads * dim, head: dim }
    }

    /// Of a contiguous `[batch, heads, seqlen, dim]`.
    pub fn bhsd(seqlen: usize, heads: usize, dim: usize) -> Strides {
        Strides { batch: seqlen * heads * dim, seq: dim, head: seqlen * dim }
    }
}

/// A tensor in host memory: a view of shared storage. Cloning and the view methods copy no elements.
#[derive(Clone)]
pub struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    storage: Arc<Vec<u8>>,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Tensor { dtype, shape, strides, offset, .. } = self;
        write!(f, "Tensor({dtype} {shape:?}, strides {strides:?}, offset {offset})")
    }
}

impl Tensor {
    /// A contiguous tensor over little-endian bytes.
    ///
    /// # Errors
    /// When `bytes` is not the shape's length.
    pub fn from_bytes(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Result<Tensor, TensorError> {
        if byte_length(dtype, shape)? != bytes.len() {
            return Err(TensorError::Length { shape: shape.to_vec(), length: bytes.len() / dtype.bytes() });
        }
        Ok(Tensor {
            dtype,
            shape: shape.to_vec(),
            strides: contiguous_strides(shape),
            offset: 0,
            storage: Arc::new(bytes),
        })
    }

    /// A contiguous tensor of `values` in row-major order, rounded to `dtype`.
    ///
    /// # Errors
    /// When there are not as many values as the shape has elements, or memory does not suffice.
    pub fn from_values<T: Copy + Into<f64>>(
        dtype: Dtype,
        shape: &[usize],
        values: &[T],
    ) -> Result<Tensor, TensorError> {
        if byte_length(dtype, shape)? != values.len().saturating_mul(dtype.bytes()) {
            return Err(TensorError::Length { shape: shape.to_vec(), length: values.len() });
        }
        let mut values = values.iter();
        Self::generate(dtype, shape, |_| values.next().map_or(f64::NAN, |&value| value.into()))
    }

    /// A contiguous tensor whose element at `index` is `value(index)`, rounded to `dtype`; called in row-major order.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn generate(
        dtype: Dtype,
        shape: &[usize],
        mut value: impl FnMut(&[usize]) -> f64,
    ) -> Result<Tensor, TensorError> {
        let length = byte_length(dtype, shape)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| TensorError::OutOfMemory { bytes: length })?;
        bytes.resize(length, 0);
        let mut index = vec![0; shape.len()];
        for element in bytes.chunks_exact_mut(dtype.bytes()) {
            dtype.write(value(&index), element);
            advance(&mut index, shape);
        }
        Self::from_bytes(dtype, shape, bytes)
    }

    /// A contiguous tensor of one value.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn full(dtype: Dtype, shape: &[usize], value: f64) -> Result<Tensor, TensorError> {
        Self::generate(dtype, shape, |_| value)
    }

    /// A contiguous tensor of standard normal values: the same for the same seed, on every machine.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn randn(dtype: Dtype, shape: &[usize], seed: u64) -> Result<Tensor, TensorError> {
        let mut normal = normals(ChaCha8Rng::seed_from_u64(seed));
        Self::generate(dtype, shape, |_| normal())
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The extent of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// From one index to the next in each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Index of the first element in the storage.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The bytes this tensor is a view of.
    pub fn storage(&self) -> &[u8] {
        &self.storage
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at `index`, or `None` outside the shape.
    pub fn get(&self, index: &[usize]) -> Option<f64> {
        let inside = index.len() == self.shape.len() && index.iter().zip(&self.shape).all(|(i, extent)| i < extent);
        inside.then(|| self.at(index))
    }

    fn at(&self, index: &[usize]) -> f64 {
        let element: usize = index.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum();
        let start = (self.offset + element) * self.dtype.bytes();
        self.dtype.read(self.storage.get(start..start + self.dtype.bytes()).unwrap_or_default())
    }

    /// Every element in row-major order.
    pub fn to_f64(&self) -> Vec<f64> {
        let mut index = vec![0; self.shape.len()];
        let elements = 0..self.len();
        let element = |_| {
            let value = self.at(&index);
            advance(&mut index, &self.shape);
            value
        };
        elements.map(element).collect()
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let expected = contiguous_strides(&self.shape);
        let same = |((extent, a), b): ((&usize, &usize), &usize)| *extent <= 1 || a == b;
        self.is_empty() || self.shape.iter().zip(&self.strides).zip(&expected).all(same)
    }

    /// A row-major copy; the tensor itself when it is one already.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn contiguous(&self) -> Result<Tensor, TensorError> {
        if self.is_contiguous() { Ok(self.clone()) } else { Self::generate(self.dtype, &self.shape, |i| self.at(i)) }
    }

    /// The elements as little-endian bytes in row-major order.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TensorError> {
        let tensor = self.contiguous()?;
        let start = tensor.offset * tensor.dtype.bytes();
        let length = tensor.len() * tensor.dtype.bytes();
        Ok(tensor.storage.get(start..start + length).unwrap_or_default().to_vec())
    }

    /// A contiguous copy in another type.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn to_dtype(&self, dtype: Dtype) -> Result<Tensor, TensorError> {
        Self::generate(dtype, &self.shape, |index| self.at(index))
    }

    /// A contiguous copy with each element replaced by `value(index, element)`.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn map(&self, mut value: impl FnMut(&[usize], f64) -> f64) -> Result<Tensor, TensorError> {
        Self::generate(self.dtype, &self.shape, |index| value(index, self.at(index)))
    }

    /// The view with dimensions `a` and `b` exchanged.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor, TensorError> {
        self.dimension(a)?;
        self.dimension(b)?;
        let mut view = self.clone();
        view.shape.swap(a, b);
        view.strides.swap(a, b);
        Ok(view)
    }

    /// The view of `length` indices from `start` on in `dimension`.
    ///
    /// # Errors
    /// When they are not all there.
    pub fn narrow(&self, dimension: usize, start: usize, length: usize) -> Result<Tensor, TensorError> {
        let extent = self.dimension(dimension)?;
        match start.checked_add(length) {
            Some(end) if end <= extent => {}
            _ => return Err(TensorError::Narrow { dimension, start, length, extent }),
        }
        let mut view = self.clone();
        view.offset += if length == 0 { 0 } else { start * view.strides[dimension] };
        view.shape[dimension] = length;
        Ok(view)
    }

    /// The view of one index of `dimension`, without that dimension.
    ///
    /// # Errors
    /// When there is no such index.
    pub fn select(&self, dimension: usize, index: usize) -> Result<Tensor, TensorError> {
        let mut view = self.narrow(dimension, index, 1)?;
        view.shape.remove(dimension);
        view.strides.remove(dimension);
        Ok(view)
    }

    /// The view of every `step`-th index in `dimension`, from the first on.
    ///
    /// # Errors
    /// When there is no such dimension, or `step` is 0.
    pub fn step_by(&self, dimension: usize, step: usize) -> Result<Tensor, TensorError> {
        let extent = self.dimension(dimension)?;
        if step == 0 {
            return Err(TensorError::Step { dimension });
        }
        let mut view = self.clone();
        view.shape[dimension] = extent.div_ceil(step);
        view.strides[dimension] = view.strides[dimension].saturating_mul(step);
        Ok(view)
    }

    /// The view in which `dimension`, of extent 1, repeats `length` times at stride 0.
    ///
    /// # Errors
    /// When the extent is not 1.
    pub fn expand(&self, dimension: usize, length: usize) -> Result<Tensor, TensorError> {
        let extent = self.dimension(dimension)?;
        if extent != 1 {
            return Err(TensorError::Expand { dimension, extent });
        }
        let mut view = self.clone();
        view.shape[dimension] = length;
        view.strides[dimension] = 0;
        byte_length(view.dtype, &view.shape)?;
        Ok(view)
    }

    /// The copy in which each index of `dimension` is repeated `times` times in a row (KV heads for their query heads).
    ///
    /// # Errors
    /// When there is no such dimension, or memory does not suffice.
    pub fn repeat_each(&self, dimension: usize, times: usize) -> Result<Tensor, TensorError> {
        let extent = self.dimension(dimension)?;
        let mut shape = self.shape.clone();
        shape[dimension] = extent.saturating_mul(times);
        let mut source = Vec::with_capacity(shape.len());
        Self::generate(self.dtype, &shape, |index| {
            source.clear();
            source.extend_from_slice(index);
            source[dimension] /= times;
            self.at(&source)
        })
    }

    fn dimension(&self, dimension: usize) -> Result<usize, TensorError> {
        let rank = self.shape.len();
        self.shape.get(dimension).copied().ok_or(TensorError::Dimension { dimension, rank })
    }

    /// The strides of `[batch, seqlen, heads, dim]` or of packed `[total, heads, dim]`; `None` when it is neither,
    /// or the last dimension is not contiguous.
    pub fn attention_strides(&self) -> Option<Strides> {
        let (batch, seq, head, last) = match self.strides[..] {
            [batch, seq, head, last] => (batch, seq, head, last),
            [seq, head, last] => (0, seq, head, last),
            _ => return None,
        };
        (last == 1 || self.shape.last() == Some(&1)).then_some(Strides { batch, seq, head })
    }
}

fn contiguous_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension].max(1);
    }
    strides
}

fn advance(index: &mut [usize], shape: &[usize]) {
    for (i, extent) in index.iter_mut().zip(shape).rev() {
        *i += 1;
        if *i < *extent {
            return;
        }
        *i = 0;
    }
}

/// The bytes of a shape, all of whose extents multiplied (those of 0 taken as 1) fit 63 bits.
fn byte_length(dtype: Dtype, shape: &[usize]) -> Result<usize, TensorError> {
    let bound = shape.iter().try_fold(dtype.bytes(), |bytes, extent| bytes.checked_mul((*extent).max(1)));
    match bound {
        Some(bytes) if i64::try_from(bytes).is_ok() => Ok(if shape.contains(&0) { 0 } else { bytes }),
        _ => Err(TensorError::TooLarge { shape: shape.to_vec() }),
    }
}

/// A tensor that cannot be made or viewed as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// Values that do not fill the shape.
    #[error("{length} values are given for the shape {shape:?}: it takes the product of its extents")]
    Length {
        /// The shape.
        shape: Vec<usize>,
        /// How many values there were.
        length: usize,
    },
    /// A shape whose bytes do not fit 63 bits.
    #[error("the shape {shape:?} is too large: a tensor must be at most {} bytes", i64::MAX)]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
    },
    /// Host memory does not suffice.
    #[error("out of memory: {bytes} bytes were asked for")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A dimension the tensor does not have.
    #[error("dimension is {dimension}: it must be less than the tensor's rank, {rank}")]
    Dimension {
        /// Which was asked for.
        dimension: usize,
        /// How many there are.
        rank: usize,
    },
    /// Indices past a dimension's end.
    #[error("{length} indices from {start} are asked of dimension {dimension}: its extent is {extent}")]
    Narrow {
        /// Which dimension.
        dimension: usize,
        /// First index.
        start: usize,
        /// Number of indices.
        length: usize,
        /// Number there are.
        extent: usize,
    },
    /// A step of 0.
    #[error("the step in dimension {dimension} is 0: it must be at least 1")]
    Step {
        /// Which dimension.
        dimension: usize,
    },
    /// A dimension that cannot be expanded.
    #[error("dimension {dimension} has extent {extent}: only an extent of 1 can be expanded")]
    Expand {
        /// Which dimension.
        dimension: usize,
        /// Its extent.
        extent: usize,
    },
}

/// The tensors of a call.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[batch, seqlen_q, heads_q, head_dim]`, or packed `[total_q, heads_q, head_dim]`.
    pub q: Tensor,
    /// `[batch, seqlen_k, heads_kv, head_dim]`, or packed.
    pub k: Tensor,
    /// `[batch, seqlen_k, heads_kv, head_dim_v]`, or packed.
    pub v: Tensor,
    /// What is appended to a cache before.
    pub new: Option<New>,
}

impl Problem {
    pub(crate) fn check_head(&self, entry: usize, head: usize) -> Result<(), InputError> {
        let (batch, heads_q) = (self.batch, self.heads_q);
        let there = entry < batch && head < heads_q;
        if there { Ok(()) } else { Err(InputError::Head { entry, head, batch, heads_q }) }
    }
}

impl Inputs {
    /// Standard normal inputs for `problem`, contiguous.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn randn(problem: &Problem, seed: u64) -> Result<Inputs, TensorError> {
        let randn =
            |shape: Vec<usize>, stream| Tensor::randn(problem.dtype, &shape, seed.wrapping_mul(3).wrapping_add(stream));
        Ok(Inputs {
            q: randn(problem.q_shape(), 0)?,
            k: randn(problem.k_shape(), 1)?,
            v: randn(problem.v_shape(), 2)?,
            new: New::randn(problem, seed)?,
        })
    }

    /// Whether these are tensors that `problem` describes. A packed tensor may hold more tokens than `cu_seqlens` use.
    ///
    /// # Errors
    /// The first tensor of a wrong type, shape or layout.
    pub fn check(&self, problem: &Problem) -> Result<(), InputError> {
        let mut inputs = vec![
            ("q", &self.q, problem.q_shape()),
            ("k", &self.k, problem.k_shape()),
            ("v", &self.v, problem.v_shape()),
        ];
        let appends = problem.cache.as_ref().is_some_and(|cache| cache.append.is_some());
        match &self.new {
            Some(new) if appends && new.rotary.is_some() >= problem.rotary().is_some() => {
                inputs.extend(new.expected(problem));
            }
            _ if appends => return Err(InputError::NothingNew),
            _ => {}
        }
        for (argument, tensor, expected) in inputs {
            if tensor.dtype != problem.dtype {
                return Err(InputError::Dtype { argument, dtype: tensor.dtype, expected: problem.dtype });
            }
            let (shape, packed) = (tensor.shape(), problem.varlen.is_some() && expected.len() == 3);
            if packed && shape.len() == expected.len() && shape[0] < expected[0] {
                return Err(InputError::CuSeqlensEnd { argument, end: expected[0], tokens: shape[0] });
            }
            let first = usize::from(packed);
            if shape.len() != expected.len() || shape[first..] != expected[first..] {
                return Err(InputError::Shape { argument, shape: shape.to_vec(), expected });
            }
            let is_turned = expected.len() == 2;
            if !is_turned && tensor.attention_strides().is_none() || is_turned && !tensor.is_contiguous() {
                let stride = tensor.strides.last().copied().unwrap_or(0);
                return Err(InputError::LastStride { argument, stride });
            }
        }
        Ok(())
    }

    /// What the tensors' layout needs of a kernel: [`Feature::Strided`] unless all are contiguous.
    pub fn features(&self) -> Vec<Feature> {
        let strided = [&self.q, &self.k, &self.v].into_iter().any(|tensor| !tensor.is_contiguous());
        if strided { vec![Feature::Strided] } else { Vec::new() }
    }
}

/// What a call writes.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// `[batch, seqlen_q, heads_q, head_dim_v]`, or packed, in the problem's type.
    pub out: Tensor,
    /// `[batch, heads_q, seqlen_q]`, or packed `[heads_q, total_q]`, f32.
    pub lse: Tensor,
}

impl Outputs {
    /// Outputs for `problem`, filled with NaN: what a kernel does not write shows.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn nan(problem: &Problem) -> Result<Outputs, TensorError> {
        Ok(Outputs {
            out: Tensor::full(problem.dtype, &problem.out_shape(), f64::NAN)?,
            lse: Tensor::full(Dtype::F32, &problem.lse_shape(), f64::NAN)?,
        })
    }

    /// Whether these are the outputs of `problem`.
    ///
    /// # Errors
    /// The first tensor of a wrong type or shape.
    pub fn check(&self, problem: &Problem) -> Result<(), InputError> {
        let outputs = [
            ("out", &self.out, problem.dtype, problem.out_shape()),
            ("lse", &self.lse, Dtype::F32, problem.lse_shape()),
        ];
        for (argument, tensor, dtype, expected) in outputs {
            if tensor.dtype != dtype {
                return Err(InputError::Dtype { argument, dtype: tensor.dtype, expected: dtype });
            }
            if tensor.shape != expected {
                return Err(InputError::Shape { argument, shape: tensor.shape.clone(), expected });
            }
        }
        Ok(())
    }

    /// One head of the outputs.
    ///
    /// # Errors
    /// When the outputs are not of the problem's type and shape, or it has no such head.
    pub fn head(&self, problem: &Problem, entry: usize, head: usize) -> Result<HeadOutput, InputError> {
        self.check(problem)?;
        problem.check_head(entry, head)?;
        let queries = problem.tokens(entry).0;
        let (out, lse) = match problem.varlen {
            Some(_) => (self.out.transpose(0, 1)?.select(0, head)?, self.lse.select(0, head)?),
            None => (self.out.select(0, entry)?.select(1, head)?, self.lse.select(0, entry)?.select(0, head)?),
        };
        let rows = |tensor: Tensor| Ok::<_, TensorError>(tensor.narrow(0, queries.start, queries.len())?.to_f64());
        Ok(HeadOutput { entry, head, out: rows(out)?, lse: rows(lse)? })
    }

    /// Every head of the outputs: batch entries in order, heads within.
    ///
    /// # Errors
    /// When the outputs are not of the problem's type and shape.
    pub fn heads(&self, problem: &Problem) -> Result<Vec<HeadOutput>, InputError> {
        all_heads(problem).into_iter().map(|(entry, head)| self.head(problem, entry, head)).collect()
    }

    /// The outputs that `heads` make together, rounded to their types; NaN where a head is missing.
    ///
    /// # Errors
    /// When a head is not one of the problem's.
    pub fn from_heads(problem: &Problem, heads: &[HeadOutput]) -> Result<Outputs, InputError> {
        let (heads_q, dim) = (problem.heads_q, problem.head_dim_v);
        let mut out = vec![f64::NAN; problem.total_q() * heads_q * dim];
        let mut lse = vec![f64::NAN; problem.total_q() * heads_q];
        for HeadOutput { entry, head, out: rows, lse: row_lse } in heads {
            problem.check_head(*entry, *head)?;
            let queries = problem.tokens(*entry).0;
            let expected = vec![queries.len(), dim];
            if rows.len() != queries.len() * dim || row_lse.len() != queries.len() {
                return Err(InputError::Shape { argument: "out", shape: vec![row_lse.len(), rows.len()], expected });
            }
            let (token, first) = match problem.varlen {
                Some(_) => (queries.start, head * problem.total_q() + queries.start),
                None => (entry * queries.len(), (entry * heads_q + head) * queries.len()),
            };
            for (i, row) in rows.chunks_exact(dim).enumerate() {
                out[((token + i) * heads_q + head) * dim..][..dim].copy_from_slice(row);
            }
            lse[first..][..row_lse.len()].copy_from_slice(row_lse);
        }
        Ok(Outputs {
            out: Tensor::from_values(problem.dtype, &problem.out_shape(), &out)?,
            lse: Tensor::from_values(Dtype::F32, &problem.lse_shape(), &lse)?,
        })
    }
}

/// A tensor that does not fit its problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// Another type than the problem's.
    #[error("{argument} is of type {dtype}: the problem's is {expected}")]
    Dtype {
        /// Which tensor.
        argument: &'static str,
        /// Its type.
        dtype: Dtype,
        /// The problem's.
        expected: Dtype,
    },
    /// Another shape than the problem's.
    #[error("{argument} has the shape {shape:?}: the problem asks for {expected:?}")]
    Shape {
        /// Which tensor.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// The problem's.
        expected: Vec<usize>,
    },
    /// Packed sequences that end past the tensor.
    #[error("cu_seqlens of {argument} end at {end}: {argument} holds {tokens} tokens")]
    CuSeqlensEnd {
        /// Which tensor.
        argument: &'static str,
        /// The last offset.
        end: usize,
        /// The tensor's tokens.
        tokens: usize,
    },
    /// A last dimension that is not contiguous.
    #[error("the last dimension of {argument} has stride {stride}: it must be 1")]
    LastStride {
        /// Which tensor.
        argument: &'static str,
        /// Its last stride.
        stride: usize,
    },
    /// No tensors to append, or no angles to turn them by.
    #[error("k_new, v_new, rotary_cos or rotary_sin are not given: the problem appends to its cache")]
    NothingNew,
    /// A head the problem does not have.
    #[error("head {head} of batch entry {entry} is asked for: the problem has {batch} entries of {heads_q} heads")]
    Head {
        /// The batch entry.
        entry: usize,
        /// The query head.
        head: usize,
        /// Entries there are.
        batch: usize,
        /// Query heads there are.
        heads_q: usize,
    },
    /// A view that cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// Standard normal numbers, one a call, by Box and Muller 1958: two normals from two uniforms.
pub fn normals(mut rng: impl Rng) -> impl FnMut() -> f64 {
    let mut second = None;
    move || {
        second.take().unwrap_or_else(|| {
            let radius = (-2.0 * f64::ln(1.0 - rng.random::<f64>())).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * rng.random::<f64>()).sin_cos();
            second = Some(radius * sin);
            radius * cos
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemSpec;
    use proptest::prelude::*;

    fn counting(shape: &[usize]) -> Tensor {
        let mut next = 0.0;
        let count = |_: &[usize]| {
            next += 1.0;
            next - 1.0
        };
        Tensor::generate(Dtype::F32, shape, count).unwrap()
    }

    #[test]
    fn every_half_is_read_and_written_as_it_is() {
        for bits in 0..=u16::MAX {
            for dtype in [Dtype::F16, Dtype::Bf16] {
                let x = dtype.read(&bits.to_le_bytes());
                let mut back = [0; 2];
                dtype.write(x, &mut back);
                assert!(x.is_nan() || back == bits.to_le_bytes(), "{dtype} {bits:#x}");
            }
        }
    }

    #[test]
    fn rounding_is_to_even_and_once() {
        // Just above the tie between 1 and the next f16: rounding to f32 first would make it the tie.
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(Dtype::F16.round(tie), 1.0);
        assert_eq!(Dtype::F16.round(tie + 2f64.powi(-40)), 1.0 + 2f64.powi(-10));
        assert_eq!(Dtype::F16.round(-tie - 2f64.powi(-40)), -1.0 - 2f64.powi(-10));
        assert_eq!(Dtype::Bf16.round(1.0 + 2f64.powi(-8) + 2f64.powi(-50)), 1.0 + 2f64.powi(-7));
        assert_eq!(Dtype::F16.round(65519.99), 65504.0);
        assert_eq!(Dtype::F16.round(65520.0), f64::INFINITY);
        assert_eq!(Dtype::Bf16.round(-1e300), f64::NEG_INFINITY);
        assert_eq!(Dtype::F16.round(1e-300), 0.0);
        assert!(Dtype::Bf16.round(f64::NAN).is_nan());
    }

    #[test]
    fn one_ulp_is_the_distance_between_neighbours() {
        assert_eq!(Dtype::F32.ulp(1.0), f64::from(f32::EPSILON));
        assert_eq!(Dtype::F16.ulp(-1000.0), 0.5);
        assert_eq!(Dtype::Bf16.ulp(1000.0), 4.0);
        assert_eq!(Dtype::F16.ulp(0.0), 2f64.powi(-24));
        assert_eq!(Dtype::F32.ulp(0.0), f64::from(f32::from_bits(1)));
    }

    #[test]
    fn views_share_the_elements() {
        let tensor = counting(&[2, 3, 4]);
        let view = tensor.transpose(0, 2).unwrap().narrow(0, 1, 3).unwrap().step_by(0, 2).unwrap();
        assert_eq!((view.shape(), view.strides(), view.offset()), (&[2, 3, 2][..], &[2, 4, 12][..], 1));
        assert_eq!(view.get(&[1, 2, 1]), Some(23.0));
        assert_eq!(view.get(&[2, 0, 0]), None);
        assert_eq!(view.storage().as_ptr(), tensor.storage().as_ptr());
        assert!(!view.is_contiguous());
        let copy = view.contiguous().unwrap();
        assert_eq!(copy.to_f64(), [1.0, 13.0, 5.0, 17.0, 9.0, 21.0, 3.0, 15.0, 7.0, 19.0, 11.0, 23.0]);
        assert_eq!(copy.to_bytes().unwrap().len(), 48);
        assert_eq!(tensor.select(1, 2).unwrap().to_f64(), [8.0, 9.0, 10.0, 11.0, 20.0, 21.0, 22.0, 23.0]);
        assert_eq!(counting(&[1, 2]).expand(0, 3).unwrap().to_f64(), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!(counting(&[2, 1]).repeat_each(0, 2).unwrap().to_f64(), [0.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn strides_of_both_layouts() {
        let tensor = counting(&[2, 5, 3, 4]);
        assert_eq!(tensor.attention_strides(), Some(Strides::bshd(5, 3, 4)));
        let by_head = counting(&[2, 3, 5, 4]).transpose(1, 2).unwrap();
        assert_eq!(by_head.attention_strides(), Some(Strides::bhsd(5, 3, 4)));
        assert_eq!(tensor.transpose(2, 3).unwrap().attention_strides(), None);
        assert_eq!(counting(&[5, 3, 4]).attention_strides(), Some(Strides { batch: 0, seq: 12, head: 4 }));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let tensor = counting(&[2, 3]);
        let errors = [
            Tensor::from_values(Dtype::F32, &[2, 3], &[1.0f32]).unwrap_err(),
            Tensor::full(Dtype::F32, &[usize::MAX, 0, 2], 0.0).unwrap_err(),
            Tensor::full(Dtype::F32, &[1 << 60], 0.0).unwrap_err(),
            tensor.transpose(0, 2).unwrap_err(),
            tensor.narrow(1, 2, 2).unwrap_err(),
            tensor.narrow(1, usize::MAX, 2).unwrap_err(),
            tensor.step_by(0, 0).unwrap_err(),
            tensor.expand(0, 4).unwrap_err(),
        ];
        insta::assert_snapshot!(errors.map(|e| e.to_string()).join("\n"));
    }

    #[test]
    fn inputs_that_do_not_fit_are_named() {
        let problem = ProblemSpec::new(2, 4, 5, 8).heads_kv(2).seqlen_k(7).build().unwrap();
        let right = Inputs::randn(&problem, 1).unwrap();
        assert_eq!(right.check(&problem), Ok(()));
        let wrong = |q: &Tensor, k: &Tensor, v: &Tensor, problem: &Problem| {
            Inputs { q: q.clone(), k: k.clone(), v: v.clone(), new: None }.check(problem).unwrap_err().to_string()
        };
        let Inputs { q, k, v, .. } = &right;
        let packed = ProblemSpec::packed(4, 8, vec![0, 3, 9], vec![0, 2, 4]).build().unwrap();
        let tokens = Inputs::randn(&packed, 1).unwrap();
        let messages = [
            wrong(&q.to_dtype(Dtype::F16).unwrap(), k, v, &problem),
            wrong(q, &k.narrow(1, 0, 6).unwrap(), v, &problem),
            wrong(q, k, &v.narrow(0, 0, 1).unwrap(), &problem),
            wrong(q, k, &k.select(0, 0).unwrap(), &problem),
            wrong(&counting(&[2, 5, 8, 4]).transpose(2, 3).unwrap(), k, v, &problem),
            wrong(&tokens.q.narrow(0, 0, 8).unwrap(), &tokens.k, &tokens.v, &packed),
            Outputs::nan(&packed).unwrap().check(&problem).unwrap_err().to_string(),
            Outputs::nan(&problem).unwrap().head(&problem, 0, 4).unwrap_err().to_string(),
        ];
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn normal_values_are_normal_and_the_seed_s() {
        let drawn = Tensor::randn(Dtype::F32, &[100, 1000], 7).unwrap();
        let values = drawn.to_f64();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / 100_000.0;
        assert!(mean(&mut values.iter().copied()).abs() < 0.01);
        assert!((mean(&mut values.iter().map(|x| x * x)) - 1.0).abs() < 0.02);
        assert!((mean(&mut values.iter().map(|x| x.powi(4))) - 3.0).abs() < 0.1);
        assert_eq!(values, Tensor::randn(Dtype::F32, &[100, 1000], 7).unwrap().to_f64());
        assert_ne!(values, Tensor::randn(Dtype::F32, &[100, 1000], 8).unwrap().to_f64());
    }

    #[test]
    fn heads_come_back_from_outputs() {
        for problem in [
            ProblemSpec::new(2, 3, 5, 4).head_dim_v(2).build().unwrap(),
            ProblemSpec::packed(3, 4, vec![0, 2, 2, 7], vec![0, 1, 3, 4]).build().unwrap(),
        ] {
            let out = counting(&problem.out_shape());
            let lse = counting(&problem.lse_shape());
            let outputs = Outputs { out, lse };
            let heads = outputs.heads(&problem).unwrap();
            let back = Outputs::from_heads(&problem, &heads).unwrap();
            assert_eq!(back.out.to_f64(), outputs.out.to_f64());
            assert_eq!(back.lse.to_f64(), outputs.lse.to_f64());
            assert!(Outputs::from_heads(&problem, &[HeadOutput { out: vec![], ..heads[0].clone() }]).is_err());
        }
    }

    proptest! {
        #[test]
        fn rounding_gives_the_nearest_value(bits: u64, halves: u16) {
            let x = f64::from_bits(bits);
            for (dtype, neighbour) in [(Dtype::F16, f16::from_bits(halves).to_f64()), (Dtype::Bf16, bf16::from_bits(halves).to_f64())] {
                let near = neighbour * (1.0 + x.sin() * 1e-3);
                for x in [x, near] {
                    let rounded = dtype.round(x);
                    prop_assert!(!(x.is_finite() && rounded.is_finite() && neighbour.is_finite())
                        || (rounded - x).abs() <= (neighbour - x).abs());
                }
            }
        }
    }
}
