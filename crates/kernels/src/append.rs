//! Writing new keys and values into a cache, and turning them and the queries by their positions.
//!
//! A warp writes a row, its lanes neighbouring columns.

use ptx::{Compare, F32, Global, KernelBuilder, KernelError, Pointer, Reg, S32, U32, U64};

use crate::config::{Config, Program};
use crate::convert::Words;
use crate::head::Head;
use crate::strided::Strided;
use crate::tile::SharedMemory;

/// Rows of a CTA, one for each warp.
pub const ROWS: u32 = 4;

const LANES: u32 = 32;

/// The kernel.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn append(config: &Config) -> Result<Program, KernelError> {
    let mut kernel = KernelBuilder::new("flash_append", config.target);
    let k = &mut kernel;
    k.require_block([LANES * ROWS, 1, 1]);

    let entry = Head::of_cta(k);
    let (new_rows, heads_kv) = (k.param::<U32>("new_rows"), k.param::<U32>("heads_kv"));
    let cache_seqlens = k.pointer_param("cache_seqlens", 4);
    let cache_batch_idx = config.cache.indexed.then(|| k.pointer_param("cache_batch_idx", 4));
    let pages = config.cache.page_size;
    let block_table = pages.map(|size| (size, k.pointer_param("block_table", 4), k.param::<U32>("pages_of_entry")));
    let element = config.dtype.bytes() as u32;
    let [k_new, v_new, keys, values] = ["k_new", "v_new", "k", "v"].map(|name| Strided::new(k, name, element));
    let turn = config.cache.rotary.map(|(dim, interleaved)| {
        let [cos, sin] = ["rotary_cos", "rotary_sin"].map(|name| k.pointer_param(name, element));
        let rotary = Rotary { dim, interleaved, cos, sin, positions: k.param("positions") };
        let (q_rows, heads_q) = (k.param::<U32>("q_rows"), k.param::<U32>("heads_q"));
        let [q, q_turned] = ["q", "q_turned"].map(|name| Strided::new(k, name, element));
        (rotary, q_rows, heads_q, [q, q_turned])
    });

    let thread = k.tid_x();
    let (lane, warp) = (k.and(thread, LANES - 1), k.shr(thread, LANES.ilog2()));
    let row = k.mad(entry.block, ROWS, warp);
    let place = k.mad_wide(entry.batch, 4, cache_seqlens);
    let before = k.ld::<U32, _>(Pointer::<Global>::at(place));
    let copy = Rows { config, lane };
    let split = |k: &mut KernelBuilder, row: Reg<U32>, heads: Reg<U32>| {
        let token = k.div(row, heads);
        let heads = k.mul(token, heads);
        (token, k.sub(row, heads))
    };

    let is_new = k.setp(Compare::Lt, row, new_rows);
    k.if_(is_new, |k| {
        let (token, head) = split(k, row, heads_kv);
        let position = k.add(before, token);
        // Not past what the entry has room for, whatever memory says.
        let there = k.setp(Compare::Lt, position, entry.seqlen_k.cast());
        k.if_(there, |k| {
            let (mut row, mut within) = (entry.batch, position);
            if let Some(cache_batch_idx) = cache_batch_idx {
                let place = k.mad_wide(entry.batch, 4, cache_batch_idx);
                row = k.ld(Pointer::<Global>::at(place));
            }
            if let Some((size, table, pages_of_entry)) = block_table {
                let page = k.div(position, size);
                let wide = k.cvt::<U64, _>(page);
                let index = k.mad_wide(entry.batch, pages_of_entry, wide);
                let place = k.mad(index, 4, table);
                row = k.ld(Pointer::<Global>::at(place));
                let before = k.mul(page, size);
                within = k.sub(position, before);
            }
            let address = |k: &mut KernelBuilder, tensor: &Strided, batch: Reg<U32>, row: Reg<U32>| {
                let head = tensor.of_head(k, batch, head);
                tensor.of_row(k, head, row.cast::<S32>())
            };
            let (from, to) = (address(k, &k_new, entry.batch, token), address(k, &keys, row, within));
            match &turn {
                Some((rotary, ..)) => copy.turned(k, rotary, position, (from, to)),
                None => copy.columns(k, 0..config.head_dim, (from, to)),
            }
            let (from, to) = (address(k, &v_new, entry.batch, token), address(k, &values, row, within));
            copy.columns(k, 0..config.head_dim_v, (from, to));
        });
    });
    if let Some((rotary, q_rows, heads_q, [q, q_turned])) = &turn {
        let row = k.sub(row, new_rows);
        let is_query = k.setp(Compare::Lt, row, *q_rows);
        k.if_(is_query, |k| {
            let (query, head) = split(k, row, *heads_q);
            // Without a mask all stand at the first new key.
            let position = if config.causal || config.window { k.add(before, query) } else { before };
            let [from, to] = [q, q_turned].map(|tensor| {
                let head = tensor.of_head(k, entry.batch, head);
                tensor.of_row(k, head, query.cast())
            });
            copy.turned(k, rotary, position, (from, to));
        });
    }
    Ok(Program { kernel: kernel.finish()?, shared: SharedMemory::default() })
}

/// Rotary position embedding: what turns pairs of columns.
struct Rotary {
    dim: u32,
    interleaved: bool,
    cos: Reg<U64>,
    sin: Reg<U64>,
    positions: Reg<U32>,
}

/// How a warp writes rows.
struct Rows<'a> {
    config: &'a Config,
    lane: Reg<U32>,
}

impl Rows<'_> {
    /// Copies columns as they are.
    fn columns(&self, k: &mut KernelBuilder, columns: std::ops::Range<u32>, (from, to): (Reg<U64>, Reg<U64>)) {
        let Self { config, lane } = self;
        let bytes = config.dtype.bytes() as u32;
        let (from, to) = (k.mad_wide(*lane, bytes, from), k.mad_wide(*lane, bytes, to));
        for first in columns.clone().step_by(LANES as usize) {
            let within = k.setp(Compare::Lt, *lane, columns.end - first);
            let word = Words::zero(k, config.dtype, 1);
            let offset = i64::from(first * bytes);
            k.when(within, |k| word.load(k, Pointer::at(from).offset(offset)));
            k.when(within, |k| word.store(k, Pointer::at(to).offset(offset)));
        }
    }

    /// Copies a row, pairs of its first columns turned as at `position`.
    fn turned(&self, k: &mut KernelBuilder, rotary: &Rotary, position: Reg<U32>, (from, to): (Reg<U64>, Reg<U64>)) {
        let Self { config, lane } = self;
        let (dtype, bytes) = (config.dtype, config.dtype.bytes() as u32);
        let half = rotary.dim / 2;
        let last = k.sub(rotary.positions, 1);
        let position = k.min(position, last);
        let angle = k.mul_wide(position, half * bytes);
        let [cos, sin] = [rotary.cos, rotary.sin].map(|angles| {
            let row = k.add(angles, angle);
            k.mad_wide(*lane, bytes, row)
        });
        // From one pair to the next, and from a pair's first column to its second.
        let (step, apart) = if rotary.interleaved { (2, 1) } else { (1, half) };
        let (pair_from, pair_to) = (k.mad_wide(*lane, step * bytes, from), k.mad_wide(*lane, step * bytes, to));
        for first in (0..half).step_by(LANES as usize) {
            let within = k.setp(Compare::Lt, *lane, half - first);
            let angle = i64::from(first * bytes);
            let columns = [first * step, first * step + apart].map(|column| i64::from(column * bytes));
            let places = [
                Pointer::at(pair_from).offset(columns[0]),
                Pointer::at(pair_from).offset(columns[1]),
                Pointer::at(cos).offset(angle),
                Pointer::at(sin).offset(angle),
            ];
            let [x, y, cos, sin] = places.map(|place| -> Reg<F32> {
                let word = Words::zero(k, dtype, 1);
                k.when(within, |k| word.load(k, place));
                word.widen(k, dtype)[0]
            });
            let (x_cos, y_sin, x_sin, y_cos) = (k.mul(x, cos), k.mul(y, sin), k.mul(x, sin), k.mul(y, cos));
            let turned = [k.sub(x_cos, y_sin), k.add(x_sin, y_cos)];
            for (value, column) in turned.into_iter().zip(columns) {
                let word = Words::narrow(k, dtype, &[value]);
                k.when(within, |k| word.store(k, Pointer::at(pair_to).offset(column)));
            }
        }
        self.columns(k, rotary.dim..config.head_dim, (from, to));
    }
}
