//! Calls whose keys and values are a cache: what is new is written into it, each entry's keys are brought together, and what is
//! left is a call of a packed batch.

use kernels::{Cache, Layout, Problem, Rotary, Strides};

use crate::call::{Element, Memory, narrow, widen};
use crate::{Error, Options, attention};

/// What is appended to a cache, and the angles it is turned by.
#[derive(Clone, Copy, Debug)]
pub struct NewMemory {
    /// The first new key.
    pub k: *const u8,
    /// The first new value.
    pub v: *const u8,
    /// Cosines and sines, where the problem has them.
    pub rotary: Option<[*const u8; 2]>,
}

/// Elements in memory that is aligned for any type.
fn buffer(bytes: usize) -> Result<Vec<u64>, Error> {
    let mut words = Vec::new();
    words.try_reserve_exact(bytes.div_ceil(8)).map_err(|_| Error::Memory { bytes: bytes as u64 })?;
    words.resize(bytes.div_ceil(8), 0);
    Ok(words)
}

/// Computes a call of a cache.
///
/// # Safety
/// As [`attention`]; where keys are appended nobody else reads or writes the cache.
pub(crate) unsafe fn of_cache(
    problem: &Problem,
    cache: &Cache,
    layout: &Layout,
    memory: Memory,
    options: Options<'_>,
) -> Result<(), Error> {
    let packed = kernels::cache::packed(problem)?;
    let size = problem.dtype.bytes();
    let before = |entry: usize| problem.lengths(entry).1 - cache.appended();
    let position = |entry: usize, key: usize| key + cache.leftpad(entry);
    let offset = |strides: Strides, [row, token, head]: [usize; 3]| {
        (row * strides.batch + token * strides.seq + head * strides.head) * size
    };
    let turn = cache.rotary().zip(memory.new.and_then(|new| new.rotary));
    let turned = Turned { element: Element::of(problem.dtype)?, problem, turn };

    if let Some(new) = memory.new {
        for entry in 0..problem.batch {
            for (token, head) in pairs(cache.appended(), problem.heads_kv) {
                let (row, place) = cache.place(problem.batch, entry, before(entry) + token);
                let [from_k, from_v] = layout.new.map(|strides| offset(strides, [entry, token, head]));
                let (to_k, to_v) = (offset(layout.k, [row, place, head]), offset(layout.v, [row, place, head]));
                // SAFETY: the problem's rows and pages are within the cache, and its new rows within theirs.
                unsafe {
                    turned.copy(
                        new.k.add(from_k),
                        memory.k.cast_mut().add(to_k),
                        position(entry, before(entry) + token),
                    );
                    let bytes = problem.head_dim_v * size;
                    new.v.add(from_v).copy_to_nonoverlapping(memory.v.cast_mut().add(to_v), bytes);
                }
            }
        }
    }

    let gather = |tensor: *const u8, strides: Strides, dim: usize| {
        let bytes = dim * size;
        let mut rows = buffer(packed.total_k() * problem.heads_kv * bytes)?;
        let mut to = rows.as_mut_ptr().cast::<u8>();
        for entry in 0..problem.batch {
            for (key, head) in pairs(problem.lengths(entry).1, problem.heads_kv) {
                let (row, place) = cache.place(problem.batch, entry, key);
                // SAFETY: the problem's rows and pages are within the cache; there are as many rows in the buffer.
                unsafe {
                    tensor.add(offset(strides, [row, place, head])).copy_to_nonoverlapping(to, bytes);
                    to = to.add(bytes);
                }
            }
        }
        Ok::<_, Error>(rows)
    };
    let (keys, values) =
        (gather(memory.k, layout.k, problem.head_dim)?, gather(memory.v, layout.v, problem.head_dim_v)?);

    let row_bytes = problem.head_dim * size;
    let mut queries = buffer(packed.total_q() * problem.heads_q * row_bytes)?;
    let mut to = queries.as_mut_ptr().cast::<u8>();
    for entry in 0..problem.batch {
        let tokens = problem.tokens(entry).0;
        for (i, head) in pairs(tokens.len(), problem.heads_q) {
            let further = if problem.mask == kernels::Mask::FULL { 0 } else { i };
            let batch = if problem.varlen.is_some() { 0 } else { entry };
            // SAFETY: as above.
            unsafe {
                let from = memory.q.add(offset(layout.q, [batch, tokens.start + i, head]));
                turned.copy(from, to, position(entry, before(entry) + further));
                to = to.add(row_bytes);
            }
        }
    }

    let out_row = problem.head_dim_v * size;
    let rows = packed.total_q() * problem.heads_q;
    let (mut out, mut lse) = (buffer(rows * out_row)?, buffer(4 * rows)?);
    let of_packed = Memory {
        q: queries.as_ptr().cast(),
        k: keys.as_ptr().cast(),
        v: values.as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        lse: lse.as_mut_ptr().cast(),
        new: None,
    };
    // SAFETY: the buffers are as large as the packed problem's contiguous tensors, and ours.
    unsafe { attention(&packed, &Layout::contiguous(&packed), of_packed, options)? };

    let (out, lse) = (out.as_ptr().cast::<u8>(), lse.as_ptr().cast::<f32>());
    for entry in 0..problem.batch {
        let (tokens, first) = (problem.tokens(entry).0, packed.tokens(entry).0.start);
        for (i, head) in pairs(tokens.len(), problem.heads_q) {
            let (batch, row) = match problem.varlen {
                Some(_) => (0, head * problem.total_q() + tokens.start + i),
                None => (entry, (entry * problem.heads_q + head) * problem.seqlen_q + i),
            };
            // SAFETY: the rows are those of the call's outputs.
            unsafe {
                let from = out.add(((first + i) * problem.heads_q + head) * out_row);
                let to = memory.out.add(offset(layout.out, [batch, tokens.start + i, head]));
                from.copy_to_nonoverlapping(to, out_row);
                memory.lse.add(row).write(lse.add(head * packed.total_q() + first + i).read());
            }
        }
    }
    Ok(())
}

/// Each token with each head, heads within.
fn pairs(tokens: usize, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).flat_map(move |token| (0..heads).map(move |head| (token, head)))
}

/// What copies queries and new keys.
struct Turned<'a> {
    element: Element,
    problem: &'a Problem,
    /// By what they are turned, if they are.
    turn: Option<(Rotary, [*const u8; 2])>,
}

impl Turned<'_> {
    /// Copies a row, turned as at `position`.
    ///
    /// # Safety
    /// `from` and `to` are rows of `head_dim` elements.
    unsafe fn copy(&self, from: *const u8, to: *mut u8, position: usize) {
        let (element, dim) = (self.element, self.problem.head_dim);
        let Some((rotary, angles)) = self.turn else {
            // SAFETY: as the caller says.
            unsafe { from.copy_to_nonoverlapping(to, dim * element.bytes()) };
            return;
        };
        let half = rotary.dim / 2;
        let position = position.min(rotary.positions - 1);
        let (mut row, mut turned) = ([0f32; kernels::problem::MAX_HEAD_DIM], [0f32; kernels::problem::MAX_HEAD_DIM]);
        let mut both = [[0f32; kernels::problem::MAX_HEAD_DIM / 2]; 2];
        // SAFETY: as the caller says; there are angles for each position.
        unsafe {
            widen(element, from, &mut row[..dim]);
            for (angles, to) in angles.into_iter().zip(&mut both) {
                widen(element, angles.add(position * half * element.bytes()), &mut to[..half]);
            }
        }
        turned[..dim].copy_from_slice(&row[..dim]);
        for pair in 0..half {
            let (first, second) = if rotary.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let [cos, sin] = both.map(|angles| angles[pair]);
            turned[first] = row[first] * cos - row[second] * sin;
            turned[second] = row[first] * sin + row[second] * cos;
        }
        // SAFETY: as the caller says.
        unsafe { narrow(element, &turned[..dim], to) };
    }
}
