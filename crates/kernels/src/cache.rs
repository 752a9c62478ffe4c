//! A cache of keys and values: how many keys each batch entry has in it, where they are, and what a call appends first.

use std::collections::HashSet;
use std::fmt;

use crate::problem::{MAX_EXTENT, ProblemError, ProblemSpec, Varlen};
use crate::{InputError, Inputs, Problem, Tensor, TensorError};

/// That k and v are a cache: `[rows, seqlen_k, heads_kv, dim]`, of which each entry has its own number of keys, or pages
/// `[rows, page_size, heads_kv, dim]`. `seqlen_k` is how many keys an entry has room for.
///
/// Kernels read `seqlens`, `leftpad`, `batch_idx` and the pages' table from memory; a plan depends on their sizes alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cache {
    /// Batch rows of k and v, or pages.
    pub rows: usize,
    /// Keys of each batch entry before the call (`cache_seqlens`); where `None`, the problem's `seqlen_k` or, of a packed
    /// batch, what `cu_seqlens_k` says.
    pub seqlens: Option<Vec<i32>>,
    /// Of those, how many at the front of each entry's are none (`cache_leftpad`): nobody sees them, and the entry's first key
    /// comes behind them. Places and rotary positions count them.
    pub leftpad: Option<Vec<i32>>,
    /// The row that each batch entry's keys are in (`cache_batch_idx`); its own where `None`.
    pub batch_idx: Option<Vec<i32>>,
    /// Where keys are in pages.
    pub pages: Option<Pages>,
    /// What is written behind each entry's keys before they are read.
    pub append: Option<Append>,
}

/// Keys and values in pages.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pages {
    /// Keys of a page.
    pub size: usize,
    /// `[batch, pages of an entry]` (`block_table`): key `j` of entry `b` is row `j % size` of page `table[b][j / size]`.
    pub table: Vec<i32>,
}

/// New keys and values `[batch, seqlen, heads_kv, dim]`, that become the last of each entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Append {
    /// How many of each entry.
    pub seqlen: usize,
    /// How the new keys and the queries are turned before.
    pub rotary: Option<Rotary>,
}

/// Rotary position embedding (Su et al. 2021): pairs of columns are turned by angles that grow with the position, whose cosines
/// and sines are `[positions, dim / 2]` in the problem's type.
///
/// A new key's position is its place in the sequence. Query `i` stands at the first new key, `i` further under a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// The columns that are turned, from the first on.
    pub dim: usize,
    /// Whether neighbouring columns are a pair, rather than those half of `dim` apart.
    pub interleaved: bool,
    /// Positions that there are angles for.
    pub positions: usize,
}

/// What of a cache a kernel's code depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheCode {
    /// Whether the number of keys of an entry is in memory.
    pub lengths: bool,
    /// Whether the place of an entry's first key is in memory.
    pub padded: bool,
    /// Whether the row of an entry is in memory.
    pub indexed: bool,
    /// Keys of a page, where there are pages.
    pub page_size: Option<u32>,
    /// Of new keys and queries, the columns that are turned, and whether neighbours are pairs.
    pub rotary: Option<(u32, bool)>,
}

impl Cache {
    /// What of it a kernel's code depends on.
    pub fn code(&self) -> CacheCode {
        CacheCode {
            lengths: self.seqlens.is_some(),
            padded: self.leftpad.is_some(),
            indexed: self.batch_idx.is_some(),
            page_size: self.pages.as_ref().map(|pages| pages.size as u32),
            rotary: self.rotary().map(|Rotary { dim, interleaved, .. }| (dim as u32, interleaved)),
        }
    }

    /// Keys that are appended to each entry.
    pub fn appended(&self) -> usize {
        self.append.map_or(0, |append| append.seqlen)
    }

    /// How the call turns new keys and queries.
    pub fn rotary(&self) -> Option<Rotary> {
        self.append.and_then(|append| append.rotary)
    }

    /// Keys that an entry has once its new ones are there; `otherwise` is what it has where nothing is said.
    pub(crate) fn keys(&self, entry: usize, otherwise: usize) -> usize {
        let before = self.seqlens.as_ref().and_then(|seqlens| seqlens.get(entry));
        let places = before.map_or(otherwise, |&before| before as usize + self.appended());
        places.saturating_sub(self.leftpad(entry))
    }

    /// Places of an entry's row before its first key.
    pub fn leftpad(&self, entry: usize) -> usize {
        self.leftpad.as_ref().and_then(|leftpad| leftpad.get(entry)).map_or(0, |&leftpad| leftpad as usize)
    }

    /// Pages of an entry's row of the table; 0 without pages.
    pub fn pages_of_entry(&self, batch: usize) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.table.len() / batch.max(1))
    }

    /// The row of the cache that a key of an entry is in, and its place there.
    pub fn place(&self, batch: usize, entry: usize, key: usize) -> (usize, usize) {
        let key = key + self.leftpad(entry);
        match (&self.pages, &self.batch_idx) {
            (Some(Pages { size, table }), _) => {
                let page = table.get(entry * self.pages_of_entry(batch) + key / size);
                (page.map_or(usize::MAX, |&page| page as usize), key % size)
            }
            (None, Some(batch_idx)) => (batch_idx.get(entry).map_or(usize::MAX, |&row| row as usize), key),
            (None, None) => (entry, key),
        }
    }

    /// Checks every value. `lengths` are the keys of each entry where `seqlens` does not say.
    pub(crate) fn check(&self, spec: &ProblemSpec) -> Result<(), CacheError> {
        let Cache { rows, seqlens, leftpad, batch_idx, pages, append } = self;
        let (batch, capacity, appended) = (spec.batch, spec.seqlen_k, self.appended());
        let packed = spec.varlen.is_some();
        let refuse = |given, reason| Err(CacheError::Together { given, reason });
        match (packed, pages, batch_idx, append, seqlens) {
            (true, None, ..) => {
                return refuse("cu_seqlens_k and a cache are given", "of a packed batch only pages are a cache");
            }
            (true, _, _, Some(_), _) => {
                return refuse("cu_seqlens_k and k_new are given", "nothing is appended to a packed batch");
            }
            (_, Some(_), Some(_), ..) => {
                return refuse("block_table and cache_batch_idx are given", "the table says where an entry's keys are");
            }
            (_, Some(_), ..) if leftpad.is_some() => {
                return refuse(
                    "block_table and cache_leftpad are given",
                    "an entry of pages begins with its first key",
                );
            }
            (_, _, _, Some(_), None) => {
                return refuse("k_new is given without cache_seqlens", "they say where it belongs");
            }
            _ => {}
        }
        let extent = |argument, value, least, most| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(CacheError::Extent { argument, value, least, most }),
        };
        let own = pages.is_none() && batch_idx.is_none();
        extent("the first dimension of k", *rows, if own { batch } else { 0 }, MAX_EXTENT)?;
        extent("seqlen_new", appended, 0, capacity)?;
        let lists = [("cache_seqlens", seqlens), ("cache_leftpad", leftpad), ("cache_batch_idx", batch_idx)];
        for (argument, values) in lists {
            if let Some(length) = values.as_ref().map(Vec::len).filter(|&length| length != batch) {
                return Err(CacheError::Length { argument, length, batch });
            }
        }
        within("cache_seqlens", seqlens.iter().flatten().copied().enumerate(), capacity - appended)?;
        for (entry, &value) in leftpad.iter().flatten().enumerate() {
            let keys = seqlens.as_ref().map_or(capacity, |seqlens| seqlens[entry] as usize);
            within("cache_leftpad", std::iter::once((entry, value)), keys)?;
        }
        let last = rows.checked_sub(1);
        if let (Some(batch_idx), Some(last)) = (batch_idx, last) {
            within("cache_batch_idx", batch_idx.iter().copied().enumerate(), last)?;
        }
        if let Some(Pages { size, table }) = pages {
            extent("page_size", *size, 1, MAX_EXTENT)?;
            let of_entry = self.pages_of_entry(batch);
            if table.len() != of_entry * batch || of_entry as u128 * (*size as u128) < capacity as u128 && batch > 0 {
                return Err(CacheError::Table { length: table.len(), batch, size: *size, capacity });
            }
            let needed = (0..batch).flat_map(|entry| {
                let keys = self.keys(entry, spec.keys_otherwise(entry));
                (0..keys.div_ceil(*size)).map(move |page| entry * of_entry + page)
            });
            within("block_table", needed.map(|index| (index, table[index])), last.unwrap_or(0))?;
        }
        if let Some(Rotary { dim, positions, .. }) = self.rotary() {
            if dim == 0 || !dim.is_multiple_of(2) || dim > spec.head_dim {
                return Err(CacheError::RotaryDim { dim, head_dim: spec.head_dim });
            }
            extent("the positions of rotary_cos", positions, capacity.max(1), MAX_EXTENT)?;
        }
        Ok(())
    }
}

/// Values that are 0 to `most`.
fn within(argument: &'static str, values: impl Iterator<Item = (usize, i32)>, most: usize) -> Result<(), CacheError> {
    let mut values = values;
    match values.find(|&(_, value)| usize::try_from(value).map_or(true, |value| value > most)) {
        Some((index, value)) => Err(CacheError::Value { argument, index, value, most }),
        None => Ok(()),
    }
}

impl fmt::Display for Cache {
    /// The words of a problem's text, each with a space before.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, " cache={}", self.rows)?;
        let pages = self.pages.as_ref();
        let lists = [
            ("cache_seqlens", self.seqlens.as_ref()),
            ("cache_leftpad", self.leftpad.as_ref()),
            ("cache_batch_idx", self.batch_idx.as_ref()),
            ("block_table", pages.map(|pages| &pages.table)),
        ];
        if let Some(pages) = pages {
            write!(f, " page_size={}", pages.size)?;
        }
        for (name, values) in lists {
            if let Some(values) = values {
                write!(f, " {name}={}", crate::problem::join(values))?;
            }
        }
        if let Some(append) = self.append {
            write!(f, " append={}", append.seqlen)?;
        }
        if let Some(Rotary { dim, interleaved, positions }) = self.rotary() {
            let name = if interleaved { "rotary_interleaved" } else { "rotary" };
            write!(f, " {name}={dim},{positions}")?;
        }
        Ok(())
    }
}

/// A cache that a call cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// Arguments that exclude or need each other.
    #[error("{given}: {reason}")]
    Together {
        /// Which.
        given: &'static str,
        /// Why they do not go together.
        reason: &'static str,
    },
    /// A size out of its range.
    #[error("{argument} is {value}: it must be {least} to {most}")]
    Extent {
        /// Which.
        argument: &'static str,
        /// What it is.
        value: usize,
        /// The least allowed.
        least: usize,
        /// The most allowed.
        most: usize,
    },
    /// Not one value for each batch entry.
    #[error("{argument} has {length} values: it must have batch = {batch}")]
    Length {
        /// Which.
        argument: &'static str,
        /// How many there are.
        length: usize,
        /// Batch entries.
        batch: usize,
    },
    /// A table that is not a row of pages for each entry.
    #[error(
        "block_table has {length} values: it must have batch = {batch} rows of as many pages of {size} keys as hold {capacity}"
    )]
    Table {
        /// How many there are.
        length: usize,
        /// Batch entries.
        batch: usize,
        /// Keys of a page.
        size: usize,
        /// `seqlen_k`.
        capacity: usize,
    },
    /// A value out of its range.
    #[error("{argument}[{index}] is {value}: it must be 0 to {most}")]
    Value {
        /// Of what.
        argument: &'static str,
        /// Which.
        index: usize,
        /// What it is.
        value: i32,
        /// The most allowed.
        most: usize,
    },
    /// Columns that are no pairs, or more than a key has.
    #[error("the rotary dimension is {dim}: it must be even, at least 2 and at most head_dim = {head_dim}")]
    RotaryDim {
        /// What it is.
        dim: usize,
        /// `head_dim`.
        head_dim: usize,
    },
}

/// What is appended to a cache.
#[derive(Clone, Debug)]
pub struct New {
    /// `[batch, seqlen_new, heads_kv, head_dim]`.
    pub k: Tensor,
    /// `[batch, seqlen_new, heads_kv, head_dim_v]`.
    pub v: Tensor,
    /// Cosines and sines of [`Rotary`], contiguous.
    pub rotary: Option<[Tensor; 2]>,
}

impl New {
    /// Standard normal tensors, and the angles of base 10,000; `None` where nothing is appended.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub(crate) fn randn(problem: &Problem, seed: u64) -> Result<Option<New>, TensorError> {
        let Some(append) = problem.cache.as_ref().and_then(|cache| cache.append) else { return Ok(None) };
        let randn = |dim, stream| {
            let shape = [problem.batch, append.seqlen, problem.heads_kv, dim];
            Tensor::randn(problem.dtype, &shape, seed.wrapping_mul(3).wrapping_add(stream) ^ 1 << 63)
        };
        let angles = |Rotary { dim, positions, .. }: Rotary| {
            let of = |function: fn(f64) -> f64| {
                Tensor::generate(problem.dtype, &[positions, dim / 2], |index| {
                    function(index[0] as f64 * 1e4f64.powf(-2.0 * index[1] as f64 / dim as f64))
                })
            };
            Ok::<_, TensorError>([of(f64::cos)?, of(f64::sin)?])
        };
        let rotary = append.rotary.map(angles).transpose()?;
        Ok(Some(New { k: randn(problem.head_dim, 0)?, v: randn(problem.head_dim_v, 1)?, rotary }))
    }

    /// Each tensor by name, with the shape that the problem asks for.
    pub(crate) fn expected(&self, problem: &Problem) -> Vec<(&'static str, &Tensor, Vec<usize>)> {
        let cache = problem.cache.as_ref();
        let tokens = cache.map_or(0, Cache::appended);
        let shape = |dim| vec![problem.batch, tokens, problem.heads_kv, dim];
        let mut all = vec![("k_new", &self.k, shape(problem.head_dim)), ("v_new", &self.v, shape(problem.head_dim_v))];
        if let (Some([cos, sin]), Some(Rotary { dim, positions, .. })) = (&self.rotary, cache.and_then(Cache::rotary)) {
            all.extend(
                [("rotary_cos", cos), ("rotary_sin", sin)].map(|(name, of)| (name, of, vec![positions, dim / 2])),
            );
        }
        all
    }
}

/// The same inputs with NaN wherever the cache has no key of an entry's: what no call may see.
///
/// # Errors
/// When memory does not suffice.
pub fn unseen_as_nan(problem: &Problem, inputs: Inputs) -> Result<Inputs, TensorError> {
    let Some(cache) = &problem.cache else { return Ok(inputs) };
    let before = |entry| problem.lengths(entry).1 - cache.appended();
    let keys = (0..problem.batch).flat_map(|entry| (0..before(entry)).map(move |key| (entry, key)));
    let used: HashSet<_> = keys.map(|(entry, key)| cache.place(problem.batch, entry, key)).collect();
    let seen = |index: &[usize], x| if used.contains(&(index[0], index[1])) { x } else { f64::NAN };
    Ok(Inputs { k: inputs.k.map(seen)?, v: inputs.v.map(seen)?, ..inputs })
}

/// The same call without a cache: keys and values one entry after the other in a packed batch, the new ones among them, queries
/// and new keys turned.
///
/// # Errors
/// When the inputs are not the problem's, or memory does not suffice.
pub fn without_cache(problem: &Problem, inputs: &Inputs) -> Result<(Problem, Inputs), InputError> {
    inputs.check(problem)?;
    let Some(cache) = &problem.cache else { return Ok((problem.clone(), inputs.clone())) };
    let packed = packed(problem).map_err(|_| TensorError::TooLarge { shape: problem.k_shape() })?;
    let Varlen { cu_seqlens_q, cu_seqlens_k } = packed.varlen.clone().unwrap_or_default();
    let entry_of = |ends: &[i32], token: usize| {
        let entry = ends.partition_point(|&end| end as usize <= token) - 1;
        (entry, token - ends[entry] as usize)
    };
    let turned = |tensor: &Tensor, row: &[usize], column: usize, position: usize| {
        let at = |column| tensor.get(&[row, &[column]].concat()).unwrap_or(f64::NAN);
        let (Some(rotary), Some([cos, sin])) =
            (cache.rotary(), inputs.new.as_ref().and_then(|new| new.rotary.as_ref()))
        else {
            return at(column);
        };
        let Some((pair, [first, second])) = rotary.pair(column) else { return at(column) };
        let angle = |tensor: &Tensor| tensor.get(&[position.min(rotary.positions - 1), pair]).unwrap_or(f64::NAN);
        match column == first {
            true => at(first) * angle(cos) - at(second) * angle(sin),
            false => at(first) * angle(sin) + at(second) * angle(cos),
        }
    };
    let before = |entry: usize| problem.lengths(entry).1 - cache.appended();
    let position = |entry: usize, key: usize| key + cache.leftpad(entry);
    let keys = |tensor: &Tensor, new: Option<&Tensor>, dim: usize, is_key: bool| {
        let shape = [cu_seqlens_k[problem.batch] as usize, problem.heads_kv, dim];
        Tensor::generate(problem.dtype, &shape, |index| {
            let (entry, key) = entry_of(&cu_seqlens_k, index[0]);
            match (new, key.checked_sub(before(entry))) {
                (Some(new), Some(fresh)) if is_key => {
                    turned(new, &[entry, fresh, index[1]], index[2], position(entry, key))
                }
                (Some(new), Some(fresh)) => new.get(&[entry, fresh, index[1], index[2]]).unwrap_or(f64::NAN),
                _ => {
                    let (row, place) = cache.place(problem.batch, entry, key);
                    tensor.get(&[row, place, index[1], index[2]]).unwrap_or(f64::NAN)
                }
            }
        })
    };
    let q_shape = [cu_seqlens_q[problem.batch] as usize, problem.heads_q, problem.head_dim];
    let q = Tensor::generate(problem.dtype, &q_shape, |index| {
        let (entry, i) = entry_of(&cu_seqlens_q, index[0]);
        if problem.varlen.is_some() {
            return inputs.q.get(index).unwrap_or(f64::NAN);
        }
        let further = if problem.mask == crate::Mask::FULL { 0 } else { i };
        turned(&inputs.q, &[entry, i, index[1]], index[2], position(entry, before(entry) + further))
    })?;
    let (new_k, new_v) = (inputs.new.as_ref().map(|new| &new.k), inputs.new.as_ref().map(|new| &new.v));
    let gathered = Inputs {
        q,
        k: keys(&inputs.k, new_k, problem.head_dim, true)?,
        v: keys(&inputs.v, new_v, problem.head_dim_v, false)?,
        descales: inputs.descales.clone(),
        new: None,
    };
    Ok((packed, gathered))
}

/// The problem of [`without_cache`].
///
/// # Errors
/// When the entries have more keys together than a packed batch can have.
pub fn packed(problem: &Problem) -> Result<Problem, ProblemError> {
    let ends = |argument, of: fn((usize, usize)) -> usize| {
        let mut sum = 0;
        let mut ends = vec![0];
        for entry in 0..problem.batch {
            sum += of(problem.lengths(entry));
            let end = i32::try_from(sum);
            ends.push(end.map_err(|_| ProblemError::Extent { argument, value: sum, least: 0, most: MAX_EXTENT })?);
        }
        Ok::<_, ProblemError>(ends)
    };
    let (cu_seqlens_q, cu_seqlens_k) = (ends("total_q", |lengths| lengths.0)?, ends("total_k", |lengths| lengths.1)?);
    let packed = ProblemSpec::packed(problem.heads_q, problem.head_dim, cu_seqlens_q, cu_seqlens_k);
    let ProblemSpec { seqlen_q, seqlen_k, varlen, .. } = packed;
    ProblemSpec { seqlen_q, seqlen_k, varlen, cache: None, ..problem.clone().into_spec() }.build()
}

impl Rotary {
    /// Which pair a column is in, and the pair's columns; `None` of one that stays.
    fn pair(&self, column: usize) -> Option<(usize, [usize; 2])> {
        let half = self.dim / 2;
        let pair = if self.interleaved { column / 2 } else { column % half };
        let columns = if self.interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + half] };
        (column < self.dim).then_some((pair, columns))
    }
}
