//! What is asked of an attention call: shapes, type, mask and arithmetic.
//!
//! [`ProblemSpec`] is what a caller fills in, [`Problem`] is one that was checked. Reading its fields goes through
//! `Deref`, so `problem.head_dim` is a plain field, and no unchecked `Problem` exists.

use std::fmt;
use std::ops::{Deref, Range};
use std::str::FromStr;

use crate::Dtype;
use crate::cache::{Append, Cache, CacheError, Pages, Rotary};

/// The largest `head_dim` and `head_dim_v`.
pub const MAX_HEAD_DIM: usize = 256;

/// The largest batch, head count or sequence length: kernels count each of them in 32 bits.
pub const MAX_EXTENT: usize = i32::MAX as usize;

/// The keys a query may see, relative to the diagonal `i + seqlen_k - seqlen_q`, both ends included.
///
/// A side that is `None` is unbounded. Causal is `(None, Some(0))`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mask {
    /// How many keys before the diagonal are seen.
    pub left: Option<usize>,
    /// How many keys after the diagonal are seen.
    pub right: Option<usize>,
}

impl Mask {
    /// Every query sees every key.
    pub const FULL: Mask = Mask { left: None, right: None };
    /// Query `i` sees the keys `j <= i + seqlen_k - seqlen_q`.
    pub const CAUSAL: Mask = Mask { left: None, right: Some(0) };

    /// The window `(left, right)` as the Python and CLI front ends spell it: a negative side is unbounded.
    pub fn window(left: impl Into<i128>, right: impl Into<i128>) -> Mask {
        Mask { left: usize::try_from(left.into()).ok(), right: usize::try_from(right.into()).ok() }
    }

    /// The keys that query `i` of a sequence of `seqlen_q` queries and `seqlen_k` keys sees; maybe none.
    ///
    /// Lengths and `i` are at most [`MAX_EXTENT`].
    pub fn seen_keys(&self, i: usize, seqlen_q: usize, seqlen_k: usize) -> Range<usize> {
        let diagonal = i as i64 + seqlen_k as i64 - seqlen_q as i64;
        let clip = |j: i64| j.clamp(0, seqlen_k as i64) as usize;
        clip(self.first(diagonal))..clip(self.end(diagonal))
    }

    /// The number of pairs of a query and a key it sees.
    fn visible_pairs(&self, seqlen_q: usize, seqlen_k: usize) -> u128 {
        let offset = seqlen_k as i64 - seqlen_q as i64;
        let keys = i128::from(seqlen_k as i64);
        // The sum of clamp(x, 0, keys) over x < n.
        let below = |n: i128| {
            let ramp = n.clamp(0, keys);
            ramp * (ramp - 1) / 2 + (n - keys).max(0) * keys
        };
        let clipped = |c: i64| below(i128::from(c) + seqlen_q as i128) - below(i128::from(c));
        (clipped(self.end(offset)) - clipped(self.first(offset))) as u128
    }

    // A side of more than twice the largest extent is unbounded.
    fn first(&self, diagonal: i64) -> i64 {
        diagonal - side(self.left)
    }

    fn end(&self, diagonal: i64) -> i64 {
        diagonal + side(self.right) + 1
    }
}

fn side(bound: Option<usize>) -> i64 {
    const UNBOUNDED: usize = 1 << 33;
    bound.unwrap_or(UNBOUNDED).min(UNBOUNDED) as i64
}

/// Where each sequence of a packed batch begins: `cu_seqlens_q` and `cu_seqlens_k`, `batch + 1` entries each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Varlen {
    /// Token offsets of the queries; starts at 0, never decreases.
    pub cu_seqlens_q: Vec<i32>,
    /// Token offsets of the keys and values; starts at 0, never decreases.
    pub cu_seqlens_k: Vec<i32>,
}

/// A part of the contract that a kernel may or may not cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// A causal mask.
    Causal,
    /// A window that is neither full nor causal.
    Window,
    /// Fewer KV heads than query heads.
    Gqa,
    /// `head_dim_v` differs from `head_dim`.
    HeadDimV,
    /// `seqlen_q` differs from `seqlen_k`.
    CrossLength,
    /// Capped scores.
    Softcap,
    /// ALiBi slopes.
    Alibi,
    /// Sequences of different lengths, packed.
    Varlen,
    /// A cache of keys and values, whose lengths are in memory, in pages or rows of their own.
    KvCache,
    /// Inputs that are not contiguous `[batch, seqlen, heads, dim]`.
    Strided,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Feature::Causal => "causal",
            Feature::Window => "window",
            Feature::Gqa => "gqa",
            Feature::HeadDimV => "head_dim_v",
            Feature::CrossLength => "cross_length",
            Feature::Softcap => "softcap",
            Feature::Alibi => "alibi",
            Feature::Varlen => "varlen",
            Feature::KvCache => "kv_cache",
            Feature::Strided => "strided",
        })
    }
}

/// An attention call as it is asked for, not yet checked.
///
/// # Text
/// `BxHxSxD [option ...]`, for example `10x64x1024x64` or `2x8/2x100/228x64/32 f16 causal`:
/// batch, heads, sequence length, head dimension. `H` may be `heads_q/heads_kv`, `S` `seqlen_q/seqlen_k`,
/// `D` `head_dim/head_dim_v`. The options, separated by spaces, are `f32`, `f16`, `bf16` or `e4m3`, `causal`,
/// `window=LEFT,RIGHT` (negative: unbounded), `scale=X`, `softcap=X`, `alibi=X,...` and
/// `cu_seqlens_q=N,...` with `cu_seqlens_k=N,...`. Printing gives the shortest such text.
///
/// Of a [`Cache`]: `cache=ROWS`, and then `page_size=N`, `cache_seqlens=N,...`, `cache_leftpad=N,...`, `cache_batch_idx=N,...`,
/// `block_table=N,...`, `append=N` and `rotary=DIM,POSITIONS` or `rotary_interleaved=DIM,POSITIONS`.
#[derive(Clone, Debug, PartialEq)]
pub struct ProblemSpec {
    /// Batch entries; may be 0.
    pub batch: usize,
    /// Queries per entry; with `varlen`, the most of any entry (`max_seqlen_q`). May be 0.
    pub seqlen_q: usize,
    /// Keys per entry; with `varlen`, the most of any entry (`max_seqlen_k`). May be 0.
    pub seqlen_k: usize,
    /// Query heads, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Length of a query and of a key, 1..=256.
    pub head_dim: usize,
    /// Length of a value and of an output row, 1..=256.
    pub head_dim_v: usize,
    /// Type of q, k and v, and [`Dtype::out`] that of out.
    pub dtype: Dtype,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor of the scores; `None` is `1/sqrt(head_dim)`.
    pub softmax_scale: Option<f32>,
    /// `c`: the scores become `c * tanh(score / c)`.
    pub softcap: Option<f32>,
    /// ALiBi slopes, `[heads_q]` or `[batch, heads_q]`.
    pub alibi_slopes: Option<Vec<f32>>,
    /// The packed sequences' offsets.
    pub varlen: Option<Varlen>,
    /// That k and v are a cache.
    pub cache: Option<Cache>,
}

impl ProblemSpec {
    /// Self-attention without mask in f32.
    pub fn new(batch: usize, heads: usize, seqlen: usize, head_dim: usize) -> ProblemSpec {
        ProblemSpec {
            batch,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            heads_q: heads,
            heads_kv: heads,
            head_dim,
            head_dim_v: head_dim,
            dtype: Dtype::F32,
            mask: Mask::FULL,
            softmax_scale: None,
            softcap: None,
            alibi_slopes: None,
            varlen: None,
            cache: None,
        }
    }

    /// A packed batch: the sequence lengths are the longest of `cu_seqlens_q` and of `cu_seqlens_k`.
    pub fn packed(heads: usize, head_dim: usize, cu_seqlens_q: Vec<i32>, cu_seqlens_k: Vec<i32>) -> ProblemSpec {
        let longest = |cu: &[i32]| {
            let lengths = cu.windows(2).map(|w| usize::try_from(i64::from(w[1]) - i64::from(w[0])).unwrap_or(0));
            lengths.max().unwrap_or(0)
        };
        let batch = cu_seqlens_q.len().saturating_sub(1);
        ProblemSpec {
            seqlen_q: longest(&cu_seqlens_q),
            seqlen_k: longest(&cu_seqlens_k),
            varlen: Some(Varlen { cu_seqlens_q, cu_seqlens_k }),
            ..ProblemSpec::new(batch, heads, 0, head_dim)
        }
    }

    /// Another number of keys than of queries.
    pub fn seqlen_k(self, seqlen_k: usize) -> ProblemSpec {
        ProblemSpec { seqlen_k, ..self }
    }

    /// Fewer KV heads than query heads.
    pub fn heads_kv(self, heads_kv: usize) -> ProblemSpec {
        ProblemSpec { heads_kv, ..self }
    }

    /// Values of another length than keys.
    pub fn head_dim_v(self, head_dim_v: usize) -> ProblemSpec {
        ProblemSpec { head_dim_v, ..self }
    }

    /// The type of q, k and v, and [`Dtype::out`] that of out.
    pub fn dtype(self, dtype: Dtype) -> ProblemSpec {
        ProblemSpec { dtype, ..self }
    }

    /// Which keys a query sees.
    pub fn mask(self, mask: Mask) -> ProblemSpec {
        ProblemSpec { mask, ..self }
    }

    /// A causal mask, aligned bottom right.
    pub fn causal(self) -> ProblemSpec {
        self.mask(Mask::CAUSAL)
    }

    /// Another scale than `1/sqrt(head_dim)`.
    pub fn softmax_scale(self, scale: f32) -> ProblemSpec {
        ProblemSpec { softmax_scale: Some(scale), ..self }
    }

    /// Scores capped at `softcap`.
    pub fn softcap(self, softcap: f32) -> ProblemSpec {
        ProblemSpec { softcap: Some(softcap), ..self }
    }

    /// ALiBi slopes, `[heads_q]` or `[batch, heads_q]`.
    pub fn alibi_slopes(self, slopes: Vec<f32>) -> ProblemSpec {
        ProblemSpec { alibi_slopes: Some(slopes), ..self }
    }

    /// Keys and values that are a cache.
    pub fn cache(self, cache: Cache) -> ProblemSpec {
        ProblemSpec { cache: Some(cache), ..self }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// The first value that the contract does not allow.
    pub fn build(self) -> Result<Problem, ProblemError> {
        self.check_extents()?;
        self.check_values()?;
        self.check_varlen()?;
        if let Some(cache) = &self.cache {
            cache.check(&self)?;
        }
        self.check_sizes()?;
        Ok(Problem(self))
    }

    fn check_extents(&self) -> Result<(), ProblemError> {
        let extents = [
            ("batch", self.batch, 0, MAX_EXTENT),
            ("seqlen_q", self.seqlen_q, 0, MAX_EXTENT),
            ("seqlen_k", self.seqlen_k, 0, MAX_EXTENT),
            ("heads_q", self.heads_q, 1, MAX_EXTENT),
            ("heads_kv", self.heads_kv, 1, MAX_EXTENT),
            ("head_dim", self.head_dim, 1, MAX_HEAD_DIM),
            ("head_dim_v", self.head_dim_v, 1, MAX_HEAD_DIM),
        ];
        for (argument, value, least, most) in extents {
            if !(least..=most).contains(&value) {
                return Err(ProblemError::Extent { argument, value, least, most });
            }
        }
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            return Err(ProblemError::Heads { heads_q: self.heads_q, heads_kv: self.heads_kv });
        }
        Ok(())
    }

    fn check_values(&self) -> Result<(), ProblemError> {
        for (argument, value) in [("softmax_scale", self.softmax_scale), ("softcap", self.softcap)] {
            if let Some(value) = value.filter(|v| !(v.is_finite() && *v > 0.0)) {
                return Err(ProblemError::NotPositive { argument, value });
            }
        }
        let Some(slopes) = &self.alibi_slopes else { return Ok(()) };
        if slopes.len() != self.heads_q && Some(slopes.len()) != self.batch.checked_mul(self.heads_q) {
            return Err(ProblemError::AlibiLength { length: slopes.len(), batch: self.batch, heads_q: self.heads_q });
        }
        match slopes.iter().position(|s| !s.is_finite()) {
            Some(index) => Err(ProblemError::AlibiValue { index, value: slopes[index] }),
            None => Ok(()),
        }
    }

    fn check_varlen(&self) -> Result<(), ProblemError> {
        let Some(varlen) = &self.varlen else { return Ok(()) };
        let sides = [
            ("cu_seqlens_q", &varlen.cu_seqlens_q, "max_seqlen_q", self.seqlen_q),
            ("cu_seqlens_k", &varlen.cu_seqlens_k, "max_seqlen_k", self.seqlen_k),
        ];
        for (argument, cu, max_argument, max_seqlen) in sides {
            if cu.len() != self.batch + 1 {
                return Err(ProblemError::CuSeqlensLength { argument, length: cu.len(), batch: self.batch });
            }
            if cu[0] != 0 {
                return Err(ProblemError::CuSeqlensStart { argument, value: cu[0] });
            }
            for (entry, pair) in cu.windows(2).enumerate() {
                let (before, after) = (pair[0], pair[1]);
                if after < before {
                    return Err(ProblemError::CuSeqlensDecrease { argument, index: entry + 1, before, after });
                }
                let length = (after - before) as usize;
                if length > max_seqlen {
                    return Err(ProblemError::MaxSeqlen { argument: max_argument, value: max_seqlen, entry, length });
                }
            }
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ProblemError> {
        let (q, k) = (self.query_tokens() as u128, self.key_tokens() as u128);
        let size = self.dtype.bytes() as u128;
        let tensors = [
            ("q", q * self.heads_q as u128 * self.head_dim as u128 * size),
            ("k", k * self.heads_kv as u128 * self.head_dim as u128 * size),
            ("v", k * self.heads_kv as u128 * self.head_dim_v as u128 * size),
            ("out", q * self.heads_q as u128 * self.head_dim_v as u128 * self.dtype.out().bytes() as u128),
            ("lse", q * self.heads_q as u128 * 4),
        ];
        match tensors.into_iter().find(|(_, bytes)| *bytes > i64::MAX as u128) {
            Some((argument, bytes)) => Err(ProblemError::TensorSize { argument, bytes }),
            None => Ok(()),
        }
    }

    fn query_tokens(&self) -> usize {
        match &self.varlen {
            Some(varlen) => varlen.cu_seqlens_q.last().map_or(0, |&end| end as usize),
            None => self.batch * self.seqlen_q,
        }
    }

    fn key_tokens(&self) -> usize {
        match (&self.cache, &self.varlen) {
            (Some(cache), _) => cache.rows * self.cache_row(cache),
            (None, Some(varlen)) => varlen.cu_seqlens_k.last().map_or(0, |&end| end as usize),
            (None, None) => self.batch * self.seqlen_k,
        }
    }

    /// Keys of a row of a cache, or of a page.
    fn cache_row(&self, cache: &Cache) -> usize {
        cache.pages.as_ref().map_or(self.seqlen_k, |pages| pages.size)
    }

    /// The keys of an entry where a cache does not say.
    pub(crate) fn keys_otherwise(&self, entry: usize) -> usize {
        match &self.varlen {
            Some(varlen) => packed(&varlen.cu_seqlens_k, entry).len(),
            None => self.seqlen_k,
        }
    }
}

/// The tokens of an entry of a packed batch; none when there is no such entry.
fn packed(cu_seqlens: &[i32], entry: usize) -> Range<usize> {
    match cu_seqlens.get(entry..).unwrap_or_default() {
        [start, end, ..] => *start as usize..*end as usize,
        _ => 0..0,
    }
}

/// A checked attention call. Its fields are those of [`ProblemSpec`].
#[derive(Clone, Debug, PartialEq)]
pub struct Problem(ProblemSpec);

impl Deref for Problem {
    type Target = ProblemSpec;

    fn deref(&self) -> &ProblemSpec {
        &self.0
    }
}

/// The bytes a call must move whatever the kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompulsoryBytes {
    /// q, and every key and value that some query sees, once.
    pub read: u128,
    /// out and lse, once.
    pub write: u128,
}

impl Problem {
    /// Shorthand for [`ProblemSpec::new`], which the builder's methods follow.
    pub fn builder(batch: usize, heads: usize, seqlen: usize, head_dim: usize) -> ProblemSpec {
        ProblemSpec::new(batch, heads, seqlen, head_dim)
    }

    /// The specification, to change and build again.
    pub fn into_spec(self) -> ProblemSpec {
        self.0
    }

    /// Factor of the scores: `softmax_scale`, or `1/sqrt(head_dim)`.
    pub fn scale(&self) -> f64 {
        self.softmax_scale.map_or(1.0 / (self.head_dim as f64).sqrt(), f64::from)
    }

    /// How new keys and queries are turned.
    pub fn rotary(&self) -> Option<Rotary> {
        self.cache.as_ref().and_then(Cache::rotary)
    }

    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    /// The KV head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / self.group()
    }

    /// Token ranges of batch entry `entry`'s queries and keys in the packed tensors; in unpacked ones, and of keys in a cache,
    /// from 0.
    ///
    /// Empty when there is no such entry.
    pub fn tokens(&self, entry: usize) -> (Range<usize>, Range<usize>) {
        if entry >= self.batch {
            return (0..0, 0..0);
        }
        let (queries, keys) = match &self.varlen {
            Some(varlen) => (packed(&varlen.cu_seqlens_q, entry), packed(&varlen.cu_seqlens_k, entry)),
            None => (0..self.seqlen_q, 0..self.seqlen_k),
        };
        match &self.cache {
            Some(cache) => (queries, 0..cache.keys(entry, keys.len())),
            None => (queries, keys),
        }
    }

    /// The lengths `(seqlen_q, seqlen_k)` of batch entry `entry`.
    pub fn lengths(&self, entry: usize) -> (usize, usize) {
        let (queries, keys) = self.tokens(entry);
        (queries.len(), keys.len())
    }

    /// The keys that query `i` of batch entry `entry` sees, counted from the entry's first key; maybe none.
    pub fn seen_keys(&self, entry: usize, i: usize) -> Range<usize> {
        let (seqlen_q, seqlen_k) = self.lengths(entry);
        self.mask.seen_keys(i.min(seqlen_q), seqlen_q, seqlen_k)
    }

    /// The ALiBi slope of a batch entry's query head; 0 without ALiBi.
    pub fn slope(&self, entry: usize, head: usize) -> f32 {
        let Some(slopes) = &self.alibi_slopes else { return 0.0 };
        let row = if slopes.len() == self.heads_q { 0 } else { entry * self.heads_q };
        slopes.get(row + head).copied().unwrap_or(0.0)
    }

    /// Queries of all entries together (`total_q`).
    pub fn total_q(&self) -> usize {
        self.query_tokens()
    }

    /// Keys of all entries together (`total_k`); of a cache, those that there is room for.
    pub fn total_k(&self) -> usize {
        self.key_tokens()
    }

    /// `[batch, seqlen_q, heads_q, head_dim]`, or `[total_q, heads_q, head_dim]` when packed.
    pub fn q_shape(&self) -> Vec<usize> {
        self.shape(self.seqlen_q, self.total_q(), self.heads_q, self.head_dim)
    }

    /// `[batch, seqlen_k, heads_kv, head_dim]`, or `[total_k, heads_kv, head_dim]` when packed; of a [`Cache`] as it says.
    pub fn k_shape(&self) -> Vec<usize> {
        self.key_shape(self.head_dim)
    }

    /// `[batch, seqlen_k, heads_kv, head_dim_v]`, or `[total_k, heads_kv, head_dim_v]` when packed; of a [`Cache`] as it says.
    pub fn v_shape(&self) -> Vec<usize> {
        self.key_shape(self.head_dim_v)
    }

    fn key_shape(&self, dim: usize) -> Vec<usize> {
        match &self.cache {
            Some(cache) => vec![cache.rows, self.cache_row(cache), self.heads_kv, dim],
            None => self.shape(self.seqlen_k, self.total_k(), self.heads_kv, dim),
        }
    }

    /// `[batch, seqlen_q, heads_q, head_dim_v]`, or `[total_q, heads_q, head_dim_v]` when packed.
    pub fn out_shape(&self) -> Vec<usize> {
        self.shape(self.seqlen_q, self.total_q(), self.heads_q, self.head_dim_v)
    }

    /// `[batch, heads_q, seqlen_q]`, or `[heads_q, total_q]` when packed.
    pub fn lse_shape(&self) -> Vec<usize> {
        match self.varlen {
            Some(_) => vec![self.heads_q, self.total_q()],
            None => vec![self.batch, self.heads_q, self.seqlen_q],
        }
    }

    /// `[batch, heads_kv]`.
    pub fn descale_shape(&self) -> Vec<usize> {
        vec![self.batch, self.heads_kv]
    }

    fn shape(&self, seqlen: usize, total: usize, heads: usize, dim: usize) -> Vec<usize> {
        match self.varlen {
            Some(_) => vec![total, heads, dim],
            None => vec![self.batch, seqlen, heads, dim],
        }
    }

    /// Floating-point operations as the field counts them: `2 * pairs * heads_q * (head_dim + head_dim_v)`,
    /// that is `4 b h s^2 d`, halved for causal self-attention.
    ///
    /// Pairs are those a mask leaves; causal with `seqlen_q == seqlen_k` counts `s^2 / 2` (without the half diagonal),
    /// so that figures compare with published ones.
    pub fn flops(&self) -> u128 {
        let twice_pairs = |(seqlen_q, seqlen_k): (usize, usize)| {
            if self.mask == Mask::CAUSAL && seqlen_q == seqlen_k {
                seqlen_q as u128 * seqlen_k as u128
            } else {
                2 * self.mask.visible_pairs(seqlen_q, seqlen_k)
            }
        };
        self.sum_over_entries(twice_pairs) * self.heads_q as u128 * (self.head_dim + self.head_dim_v) as u128
    }

    /// The bytes a call must read and write at least. With 10 x 64 heads of 1024 x 64 in f32: 503 MB read.
    pub fn compulsory_bytes(&self) -> CompulsoryBytes {
        // The intervals of neighbouring rows overlap or touch, so what all rows see is one interval.
        let seen = |(seqlen_q, seqlen_k): (usize, usize)| {
            let first = self.mask.seen_keys(0, seqlen_q, seqlen_k);
            let last = self.mask.seen_keys(seqlen_q.saturating_sub(1), seqlen_q, seqlen_k);
            if seqlen_q == 0 { 0 } else { (last.end - first.start) as u128 }
        };
        let size = self.dtype.bytes() as u128;
        let queries = self.total_q() as u128 * self.heads_q as u128;
        let keys = self.sum_over_entries(seen) * self.heads_kv as u128;
        CompulsoryBytes {
            read: size * (queries * self.head_dim as u128 + keys * (self.head_dim + self.head_dim_v) as u128),
            write: queries * (self.dtype.out().bytes() as u128 * self.head_dim_v as u128 + 4),
        }
    }

    fn sum_over_entries(&self, of: impl Fn((usize, usize)) -> u128) -> u128 {
        match self.varlen.is_some() || self.cache.is_some() {
            true => (0..self.batch).map(|entry| of(self.lengths(entry))).sum(),
            false => self.batch as u128 * of((self.seqlen_q, self.seqlen_k)),
        }
    }

    /// The parts of the contract this call needs. Strides belong to the tensors: see [`Inputs::features`](crate::Inputs::features).
    pub fn features(&self) -> Vec<Feature> {
        let needs = [
            (Feature::Causal, self.mask == Mask::CAUSAL),
            (Feature::Window, self.mask != Mask::CAUSAL && self.mask != Mask::FULL),
            (Feature::Gqa, self.heads_q != self.heads_kv),
            (Feature::HeadDimV, self.head_dim != self.head_dim_v),
            (Feature::CrossLength, self.seqlen_q != self.seqlen_k),
            (Feature::Softcap, self.softcap.is_some()),
            (Feature::Alibi, self.alibi_slopes.is_some()),
            (Feature::Varlen, self.varlen.is_some()),
            (Feature::KvCache, self.cache.is_some()),
        ];
        needs.into_iter().filter(|(_, needed)| *needed).map(|(feature, _)| feature).collect()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ProblemSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let pair = |a: usize, b: usize| if a == b { a.to_string() } else { format!("{a}/{b}") };
        write!(f, "{}", self.batch)?;
        for (a, b) in [(self.heads_q, self.heads_kv), (self.seqlen_q, self.seqlen_k), (self.head_dim, self.head_dim_v)]
        {
            write!(f, "x{}", pair(a, b))?;
        }
        if self.dtype != Dtype::F32 {
            write!(f, " {}", self.dtype)?;
        }
        match self.mask {
            Mask::FULL => {}
            Mask::CAUSAL => f.write_str(" causal")?,
            Mask { left, right } => {
                let side = |bound: Option<usize>| bound.map_or("-1".to_string(), |b| b.to_string());
                write!(f, " window={},{}", side(left), side(right))?;
            }
        }
        if let Some(scale) = self.softmax_scale {
            write!(f, " scale={scale}")?;
        }
        if let Some(softcap) = self.softcap {
            write!(f, " softcap={softcap}")?;
        }
        if let Some(slopes) = &self.alibi_slopes {
            write!(f, " alibi={}", join(slopes))?;
        }
        if let Some(varlen) = &self.varlen {
            write!(f, " cu_seqlens_q={}", join(&varlen.cu_seqlens_q))?;
            write!(f, " cu_seqlens_k={}", join(&varlen.cu_seqlens_k))?;
        }
        if let Some(cache) = &self.cache {
            cache.fmt(f)?;
        }
        Ok(())
    }
}

pub(crate) fn join<T: fmt::Display>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

impl FromStr for Problem {
    type Err = ParseProblemError;

    fn from_str(text: &str) -> Result<Problem, ParseProblemError> {
        Ok(text.parse::<ProblemSpec>()?.build()?)
    }
}

impl FromStr for ProblemSpec {
    type Err = ParseProblemError;

    fn from_str(text: &str) -> Result<ProblemSpec, ParseProblemError> {
        let mut words = text.split_whitespace();
        let shape = words.next().unwrap_or_default();
        let parts: Vec<&str> = shape.split('x').collect();
        let [batch, heads, seqlens, dims] = parts[..] else {
            return Err(ParseProblemError::Shape { text: shape.to_string() });
        };
        let ((heads_q, heads_kv), (seqlen_q, seqlen_k), (head_dim, head_dim_v)) =
            (pair("heads", heads)?, pair("seqlen", seqlens)?, pair("head_dim", dims)?);
        let mut spec =
            ProblemSpec { seqlen_q, ..ProblemSpec::new(value("batch", batch)?, heads_q, seqlen_k, head_dim) }
                .heads_kv(heads_kv)
                .head_dim_v(head_dim_v);
        let (mut cu_seqlens_q, mut cu_seqlens_k) = (None, None);
        let (mut page_size, mut block_table) = (None, None);
        for word in words {
            match word.split_once('=') {
                None if word == "causal" => spec = spec.causal(),
                None => match word.parse() {
                    Ok(dtype) => spec = spec.dtype(dtype),
                    Err(_) => return Err(ParseProblemError::Option { text: word.to_string() }),
                },
                Some(("window", sides)) => match values::<i128>("window", sides)?[..] {
                    [left, right] => spec = spec.mask(Mask::window(left, right)),
                    _ => return Err(ParseProblemError::Value { argument: "window", text: sides.to_string() }),
                },
                Some(("scale", scale)) => spec = spec.softmax_scale(value("scale", scale)?),
                Some(("softcap", softcap)) => spec = spec.softcap(value("softcap", softcap)?),
                Some(("alibi", slopes)) => spec = spec.alibi_slopes(values("alibi", slopes)?),
                Some(("cu_seqlens_q", cu)) => cu_seqlens_q = Some(values("cu_seqlens_q", cu)?),
                Some(("cu_seqlens_k", cu)) => cu_seqlens_k = Some(values("cu_seqlens_k", cu)?),
                Some(("cache", rows)) => spec = spec.cache(Cache { rows: value("cache", rows)?, ..Cache::default() }),
                Some(("page_size", size)) => page_size = Some(value("page_size", size)?),
                Some(("block_table", table)) => block_table = Some(list("block_table", table)?),
                Some((option, text)) if spec.cache.is_some() => {
                    let cache = spec.cache.get_or_insert_default();
                    cache_option(cache, option, text)?.ok_or(ParseProblemError::Option { text: word.to_string() })?;
                }
                Some(_) => return Err(ParseProblemError::Option { text: word.to_string() }),
            }
        }
        spec.varlen = match (cu_seqlens_q, cu_seqlens_k) {
            (None, None) => None,
            (Some(cu_seqlens_q), Some(cu_seqlens_k)) => Some(Varlen { cu_seqlens_q, cu_seqlens_k }),
            (Some(_), None) => return Err(ParseProblemError::Alone { given: "cu_seqlens_q", missing: "cu_seqlens_k" }),
            (None, Some(_)) => return Err(ParseProblemError::Alone { given: "cu_seqlens_k", missing: "cu_seqlens_q" }),
        };
        let pages = match (page_size, block_table) {
            (None, None) => return Ok(spec),
            (Some(size), Some(table)) => Some(Pages { size, table }),
            (Some(_), None) => return Err(ParseProblemError::Alone { given: "page_size", missing: "block_table" }),
            (None, Some(_)) => return Err(ParseProblemError::Alone { given: "block_table", missing: "page_size" }),
        };
        match &mut spec.cache {
            Some(cache) => cache.pages = pages,
            None => return Err(ParseProblemError::Alone { given: "block_table", missing: "cache" }),
        }
        Ok(spec)
    }
}

/// Takes in an option of a cache; `None` when it is none.
fn cache_option(cache: &mut Cache, option: &str, text: &str) -> Result<Option<()>, ParseProblemError> {
    match option {
        "cache_seqlens" => cache.seqlens = Some(list("cache_seqlens", text)?),
        "cache_leftpad" => cache.leftpad = Some(list("cache_leftpad", text)?),
        "cache_batch_idx" => cache.batch_idx = Some(list("cache_batch_idx", text)?),
        "append" => {
            let rotary = cache.rotary();
            cache.append = Some(Append { seqlen: value("append", text)?, rotary });
        }
        "rotary" | "rotary_interleaved" => match (&values::<usize>("rotary", text)?[..], &mut cache.append) {
            (&[dim, positions], Some(append)) => {
                append.rotary = Some(Rotary { dim, positions, interleaved: option == "rotary_interleaved" });
            }
            (_, None) => return Err(ParseProblemError::Alone { given: "rotary", missing: "append" }),
            _ => return Err(ParseProblemError::Value { argument: "rotary", text: text.to_string() }),
        },
        _ => return Ok(None),
    }
    Ok(Some(()))
}

/// The same as [`values`], of which there may be none.
fn list<T: FromStr>(argument: &'static str, text: &str) -> Result<Vec<T>, ParseProblemError> {
    if text.is_empty() { Ok(Vec::new()) } else { values(argument, text) }
}

fn value<T: FromStr>(argument: &'static str, text: &str) -> Result<T, ParseProblemError> {
    text.parse().map_err(|_| ParseProblemError::Value { argument, text: text.to_string() })
}

fn values<T: FromStr>(argument: &'static str, text: &str) -> Result<Vec<T>, ParseProblemError> {
    text.split(',').map(|part| value(argument, part)).collect()
}

fn pair(argument: &'static str, text: &str) -> Result<(usize, usize), ParseProblemError> {
    let (first, second) = text.split_once('/').unwrap_or((text, text));
    Ok((value(argument, first)?, value(argument, second)?))
}

/// A value of a [`ProblemSpec`] that the contract does not allow.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// A count or length out of its range.
    #[error("{argument} is {value}: it must be {least} to {most}")]
    Extent {
        /// Which.
        argument: &'static str,
        /// What it was.
        value: usize,
        /// The least allowed.
        least: usize,
        /// The most allowed.
        most: usize,
    },
    /// Query heads that do not divide among the KV heads.
    #[error("heads_q is {heads_q} and heads_kv {heads_kv}: heads_q must be a multiple of heads_kv")]
    Heads {
        /// Query heads.
        heads_q: usize,
        /// KV heads.
        heads_kv: usize,
    },
    /// A scale or cap that is NaN, infinite, zero or negative.
    #[error("{argument} is {value}: it must be finite and greater than 0")]
    NotPositive {
        /// Which.
        argument: &'static str,
        /// What it was.
        value: f32,
    },
    /// Slopes for neither the heads nor the batch's heads.
    #[error(
        "alibi_slopes has {length} values: it must have heads_q = {heads_q} or batch * heads_q = {batch} * {heads_q}"
    )]
    AlibiLength {
        /// How many there were.
        length: usize,
        /// Batch entries.
        batch: usize,
        /// Query heads.
        heads_q: usize,
    },
    /// A slope that is NaN or infinite.
    #[error("alibi_slopes[{index}] is {value}: slopes must be finite")]
    AlibiValue {
        /// Which.
        index: usize,
        /// What it was.
        value: f32,
    },
    /// Offsets that are not `batch + 1`.
    #[error("{argument} has {length} values: it must have batch + 1 = {batch} + 1")]
    CuSeqlensLength {
        /// Which.
        argument: &'static str,
        /// How many there were.
        length: usize,
        /// Batch entries.
        batch: usize,
    },
    /// Offsets that do not start at 0.
    #[error("{argument}[0] is {value}: it must be 0")]
    CuSeqlensStart {
        /// Which.
        argument: &'static str,
        /// What it was.
        value: i32,
    },
    /// Offsets that decrease.
    #[error("{argument}[{index}] is {after}, less than {before} before it: offsets must not decrease")]
    CuSeqlensDecrease {
        /// Which.
        argument: &'static str,
        /// Index of the smaller one.
        index: usize,
        /// The one before it.
        before: i32,
        /// The smaller one.
        after: i32,
    },
    /// A longest length smaller than a sequence.
    #[error("{argument} is {value}: it must be at least {length}, the length of sequence {entry}")]
    MaxSeqlen {
        /// Which.
        argument: &'static str,
        /// What it was.
        value: usize,
        /// The batch entry that is longer.
        entry: usize,
        /// Its length.
        length: usize,
    },
    /// A cache that no call can have.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A tensor whose bytes do not fit 63 bits.
    #[error("{argument} would be {bytes} bytes: a tensor must be at most {} bytes", i64::MAX)]
    TensorSize {
        /// Which.
        argument: &'static str,
        /// Its size.
        bytes: u128,
    },
}

/// A text that is not a problem.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ParseProblemError {
    /// The first word is not four extents.
    #[error(
        "the problem's shape is `{text}`: it must be BATCHxHEADSxSEQLENxHEAD_DIM, such as 10x64x1024x64 or \
         2x8/2x100/228x64/32 (heads_q/heads_kv, seqlen_q/seqlen_k, head_dim/head_dim_v)"
    )]
    Shape {
        /// What it was.
        text: String,
    },
    /// A value that is not a number of its kind.
    #[error("{argument} is `{text}`: it must be {}", expected(argument))]
    Value {
        /// Which.
        argument: &'static str,
        /// What it was.
        text: String,
    },
    /// A word that is no option.
    #[error(
        "`{text}` is no option of a problem: allowed are f32, f16, bf16, e4m3, causal, window=LEFT,RIGHT, scale=X, \
         softcap=X, alibi=X,..., cu_seqlens_q=N,... and cu_seqlens_k=N,..., and of a cache cache=N and what follows it"
    )]
    Option {
        /// What it was.
        text: String,
    },
    /// One of two options that belong together.
    #[error("{given} is given without {missing}: it takes both")]
    Alone {
        /// The one that is there.
        given: &'static str,
        /// The one that is not.
        missing: &'static str,
    },
    /// Well-formed, but not allowed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

fn expected(argument: &str) -> &'static str {
    match argument {
        "window" => "two integers LEFT,RIGHT (negative: unbounded)",
        "scale" | "softcap" => "a number",
        "alibi" => "numbers separated by commas",
        "cu_seqlens_q" | "cu_seqlens_k" | "cache_seqlens" | "cache_leftpad" | "cache_batch_idx" | "block_table" => {
            "32-bit integers separated by commas"
        }
        "rotary" => "two integers DIM,POSITIONS",
        "cache" | "page_size" | "append" => "a non-negative integer",
        "batch" => "a non-negative integer",
        _ => "a non-negative integer, or two with a / between them",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec() -> ProblemSpec {
        ProblemSpec::new(2, 8, 100, 64)
    }

    fn packed(cu_seqlens_q: &[i32], cu_seqlens_k: &[i32]) -> ProblemSpec {
        ProblemSpec::packed(2, 32, cu_seqlens_q.to_vec(), cu_seqlens_k.to_vec())
    }

    #[test]
    fn bad_values_are_named() {
        let bad = [
            ProblemSpec { batch: MAX_EXTENT + 1, ..spec() },
            ProblemSpec { seqlen_q: usize::MAX, ..spec() },
            spec().seqlen_k(usize::MAX),
            ProblemSpec { heads_q: 0, ..spec() },
            spec().heads_kv(0),
            spec().heads_kv(3),
            ProblemSpec { head_dim: 0, ..spec() },
            ProblemSpec { head_dim: 257, ..spec() },
            spec().head_dim_v(0),
            spec().softmax_scale(f32::NAN),
            spec().softmax_scale(0.0),
            spec().softcap(-30.0),
            spec().softcap(f32::INFINITY),
            spec().alibi_slopes(vec![0.5; 7]),
            spec().alibi_slopes([&[0.5; 15][..], &[f32::NAN]].concat()),
            packed(&[0, 5, 3], &[0, 1, 2]),
            packed(&[0, 5, 8], &[1, 1, 2]),
            packed(&[0, 5, 8], &[0, 1]),
            ProblemSpec { batch: 0, ..packed(&[], &[]) },
            ProblemSpec { seqlen_k: 4, ..packed(&[0, 5, 8], &[0, 1, 6]) },
            ProblemSpec::new(MAX_EXTENT, MAX_EXTENT, MAX_EXTENT, 256),
        ];
        let messages = bad.map(|spec| spec.build().unwrap_err().to_string());
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn bad_texts_are_explained() {
        let bad = [
            "",
            "10x64x1024",
            "10x64x1024x64x2",
            "10x64x-1x64",
            "axbxcxd",
            "1x8/2/1x5x64",
            "2x8x100x64 f64",
            "2x8x100x64 causal=1",
            "2x8x100x64 window=3",
            "2x8x100x64 window=a,0",
            "2x8x100x64 scale=big",
            "2x8x100x64 scale=nan",
            "2x8x100x64 alibi=1,,2",
            "2x8x100x64 cu_seqlens_q=0,1,2",
            "2x8x100x64 cu_seqlens_q=0,1,2 cu_seqlens_k=0,1,99999999999",
            "2x8x100x300",
        ];
        let messages = bad.map(|text| format!("{text}: {}", text.parse::<Problem>().unwrap_err()));
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn texts_say_what_they_mean() {
        let problem: Problem = "2x8/2x100/228x64/32 bf16 window=-1,3 scale=0.5 softcap=30".parse().unwrap();
        let expected = ProblemSpec { seqlen_q: 100, heads_q: 8, ..spec() }
            .heads_kv(2)
            .seqlen_k(228)
            .head_dim_v(32)
            .dtype(Dtype::Bf16)
            .mask(Mask { left: None, right: Some(3) })
            .softmax_scale(0.5)
            .softcap(30.0);
        assert_eq!(problem, expected.build().unwrap());
        assert_eq!("10x64x1024x64".parse::<ProblemSpec>().unwrap(), ProblemSpec::new(10, 64, 1024, 64));
        assert_eq!(spec().causal().build().unwrap().to_string(), "2x8x100x64 causal");
    }

    #[test]
    fn the_article_s_problem() {
        let problem = ProblemSpec::new(10, 64, 1024, 64).build().unwrap();
        let CompulsoryBytes { read, write } = problem.compulsory_bytes();
        assert_eq!(read, 503_316_480);
        assert_eq!(write, 167_772_160 + 10 * 64 * 1024 * 4);
        assert_eq!(problem.flops(), 4 * 10 * 64 * 1024 * 1024 * 64);
        let causal = problem.into_spec().causal().build().unwrap();
        assert_eq!(causal.flops(), 2 * 10 * 64 * 1024 * 1024 * 64);
    }

    #[test]
    fn packed_tokens() {
        let problem = packed(&[0, 5, 5], &[0, 2, 9]).causal().build().unwrap();
        assert_eq!((problem.batch, problem.seqlen_q, problem.seqlen_k), (2, 5, 7));
        assert_eq!(problem.tokens(1), (5..5, 2..9));
        assert_eq!(problem.tokens(2), (0..0, 0..0));
        assert_eq!((problem.total_q(), problem.total_k()), (5, 9));
        assert_eq!((problem.q_shape(), problem.lse_shape()), (vec![5, 2, 32], vec![2, 5]));
        assert_eq!([2, 3, 4].map(|i| problem.seen_keys(0, i)), [0..0, 0..1, 0..2]);
        assert_eq!(problem.flops(), 2 * 2 * 64 * 3);
        assert_eq!(problem.compulsory_bytes().read, 4 * 64 * (5 + 2 * 2));
    }

    #[test]
    fn slopes_are_by_head_or_by_batch_and_head() {
        let by_head = spec().alibi_slopes((0..8).map(|i| i as f32).collect()).build().unwrap();
        assert_eq!((by_head.slope(0, 3), by_head.slope(1, 3)), (3.0, 3.0));
        let by_both = spec().alibi_slopes((0..16).map(|i| i as f32).collect()).build().unwrap();
        assert_eq!((by_both.slope(0, 3), by_both.slope(1, 3)), (3.0, 11.0));
        assert_eq!(spec().build().unwrap().slope(1, 3), 0.0);
    }

    #[test]
    fn the_largest_problem_has_figures() {
        let spec = ProblemSpec::new(1, 1, MAX_EXTENT, 256).seqlen_k(MAX_EXTENT);
        let side = Some(usize::MAX);
        for mask in [Mask::FULL, Mask::CAUSAL, Mask { left: side, right: side }, Mask { left: side, right: Some(0) }] {
            let problem = spec.clone().mask(mask).build().unwrap();
            assert!(problem.flops() > 1 << 70);
            assert_eq!(problem.seen_keys(0, MAX_EXTENT - 1), 0..MAX_EXTENT);
            assert_eq!(problem.compulsory_bytes().read, 3 * 4 * 256 * MAX_EXTENT as u128);
        }
    }

    fn side_of_a_window() -> impl Strategy<Value = Option<usize>> {
        prop_oneof![Just(None), (0usize..12).prop_map(Some), Just(Some(usize::MAX))]
    }

    prop_compose! {
        pub(crate) fn any_spec()(
            (batch, group, heads_kv) in (0usize..4, 1usize..5, 1usize..4),
            lengths in proptest::collection::vec((0i32..20, 0i32..20), 4),
            (head_dim, head_dim_v) in (1usize..=256, 1usize..=256),
            dtype in proptest::sample::select(&Dtype::ALL[..]),
            (left, right) in (side_of_a_window(), side_of_a_window()),
            scale in proptest::option::of(0.001f32..100.0),
            cap in proptest::option::of(0.001f32..100.0),
            slope in proptest::option::of(-1.0f32..1.0),
            varlen: bool,
        ) -> ProblemSpec {
            let offsets = |lengths: &mut dyn Iterator<Item = i32>| {
                let mut end = 0;
                let ends = lengths.take(batch).map(|length| { end += length; end });
                std::iter::once(0).chain(ends).collect::<Vec<i32>>()
            };
            let shape = if varlen {
                let cu_seqlens_q = offsets(&mut lengths.iter().map(|l| l.0));
                ProblemSpec::packed(1, head_dim, cu_seqlens_q, offsets(&mut lengths.iter().map(|l| l.1)))
            } else {
                ProblemSpec::new(batch, 1, lengths[0].0 as usize, head_dim).seqlen_k(lengths[0].1 as usize)
            };
            let heads_q = group * heads_kv;
            ProblemSpec { heads_q, heads_kv, head_dim_v, dtype, mask: Mask { left, right }, softmax_scale: scale,
                softcap: cap, alibi_slopes: slope.map(|s| vec![s; heads_q]), ..shape }
        }
    }

    proptest! {
        #[test]
        fn seen_keys_are_those_of_the_definition(spec in any_spec()) {
            let problem = spec.build().unwrap();
            let Mask { left, right } = problem.mask;
            let mut pairs = 0;
            let mut keys = 0;
            for entry in 0..problem.batch {
                let (seqlen_q, seqlen_k) = problem.lengths(entry);
                let mut seen_by_any = vec![false; seqlen_k];
                for i in 0..seqlen_q {
                    let diagonal = i as i128 + seqlen_k as i128 - seqlen_q as i128;
                    let visible = |j: usize| {
                        left.is_none_or(|left| diagonal - left as i128 <= j as i128)
                            && right.is_none_or(|right| j as i128 <= diagonal + right as i128)
                    };
                    let expected: Vec<usize> = (0..seqlen_k).filter(|j| visible(*j)).collect();
                    prop_assert_eq!(problem.seen_keys(entry, i).collect::<Vec<_>>(), expected.clone());
                    expected.iter().for_each(|j| seen_by_any[*j] = true);
                    let square_causal = problem.mask == Mask::CAUSAL && seqlen_q == seqlen_k;
                    pairs += if square_causal { seqlen_k } else { 2 * expected.len() };
                }
                keys += seen_by_any.into_iter().filter(|seen| *seen).count();
            }
            let dims = problem.head_dim + problem.head_dim_v;
            prop_assert_eq!(problem.flops(), (pairs * problem.heads_q * dims) as u128);
            let queries = problem.total_q() * problem.heads_q * problem.head_dim;
            let read = problem.dtype.bytes() * (queries + keys * problem.heads_kv * dims);
            prop_assert_eq!(problem.compulsory_bytes().read, read as u128);
        }

        #[test]
        fn printing_and_parsing_gives_it_back(spec in any_spec()) {
            prop_assert_eq!(spec.to_string().parse::<ProblemSpec>().unwrap(), spec);
        }

        #[test]
        fn any_text_is_a_problem_or_an_error(text in "[0-9x/ a-z=,.-]{0,60}") {
            let _ = text.parse::<Problem>();
        }
    }
}
