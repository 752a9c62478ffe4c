//! FlashAttention-2 on tensor cores (Dao 2023): a block of queries stays with its warps, keys and values stream past it.
//!
//! Each warp has 16 or 32 queries of its own and multiplies them by all keys, so warps never exchange anything: scores become
//! exponentials in the registers that the product left them in, and those are the left factor of the product with the values.
//! Tiles of keys and of values take turns in a ring in shared memory; while one is multiplied the next ones are on their way. Under
//! a product, the exponentials of the next 16 keys are computed.
//!
//! What it shows: copies, addresses, softmax and matrix instructions are issued by the same warps, and the tensor cores wait
//! for each of them; [`crate::v3`] gives each its own.

use std::collections::VecDeque;
use std::ops::Range;

use arch::Feature;
use ptx::{Compare, KernelBuilder, KernelError, Pointer, Reg, S32, Shared, U32, U64};

use crate::accumulator::{Accumulator, Quad, Raised, RowState, Visible};
use crate::config::{Config, Program, Tiles};
use crate::copies::{Copies, Fetched, Stream};
use crate::mma::{self, Pair, Part, Product, ROWS, Reader, Rows, Tile};
use crate::pages::{PageTable, PagedStream};
use crate::results::{Place, Results};
use crate::schedule::{self, Schedule, Work};
use crate::scores::{Alibi, Scores};
use crate::strided::Strided;
use crate::tile::SharedMemory;
use crate::{Dtype, Mask, PlanError, Problem};

/// Threads of a warp.
const WARP: u32 = 32;

/// Fragments that are loaded ahead of the product that needs them.
const AHEAD: usize = 2;

/// How a configuration's tiles lie in shared memory and in registers.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// All queries of the CTA.
    pub queries: Tile,
    /// A block of keys.
    pub keys: Tile,
    /// A block of values.
    pub values: Tile,
    /// Tiles of keys and values, in turn, on their way or in use.
    pub stages: u32,
    /// Columns of the output that a warp has: those of the values, and of the last step.
    pub columns: u32,
    /// How elements are multiplied.
    pub product: Product,
    /// Sixteen queries each: how many a warp has.
    pub fragments: u32,
    /// CTAs of a multiprocessor that registers are left for.
    pub ctas: u32,
    /// Steps along the columns of a query that stay in registers; the others are loaded for each block of keys.
    pub held: u32,
}

impl Geometry {
    /// Of a configuration.
    pub fn new(config: &Config) -> Self {
        let Tiles { block_q, block_kv, threads } = config.tiles;
        let limits = config.target.sm().limits();
        let keys = Tile::new(block_kv, config.head_dim, config.dtype);
        let values = Tile::new(block_kv, config.head_dim_v, config.dtype);
        let queries = Tile { rows: block_q, ..keys };
        let fragments = block_q / (threads / WARP) / ROWS;
        let columns = values.row_bytes / config.dtype.bytes() as u32;
        let product = Product::of(config.dtype, config.tf32);
        let mut geometry = Self { queries, keys, values, columns, product, stages: 2, fragments, ctas: 1, held: 0 };

        // A warp's registers are those of one of four partitions.
        let registers = |ctas: u32| {
            let warps = (ctas * threads / WARP).div_ceil(PARTITIONS);
            (limits.registers / PARTITIONS / (warps * WARP) / 8 * 8).min(limits.max_registers_per_thread)
        };
        let shared = |geometry: &Self, ctas: u32| {
            ctas * (geometry.bytes() + limits.shared_reserved_per_block) <= limits.shared_bytes
        };
        let needed = geometry.accumulators() + geometry.others();
        // Where another CTA would leave just what is needed, the assembler spills.
        let roomy = needed + ROOM + if config.softcap || config.alibi { 2 * ROOM } else { 0 };
        while registers(geometry.ctas + 1) >= roomy && shared(&geometry, geometry.ctas + 1) {
            geometry.ctas += 1;
        }
        while geometry.stages < MOST_STAGES && shared(&Self { stages: geometry.stages + 1, ..geometry }, geometry.ctas)
        {
            geometry.stages += 1;
        }
        let free = registers(geometry.ctas).saturating_sub(needed + SPARE);
        if config.dtype != Dtype::F32 {
            geometry.held = (free / (4 * fragments)).min(keys.steps());
        }
        geometry
    }

    /// Shared memory in all.
    pub fn bytes(&self) -> u32 {
        self.queries.bytes() + self.stages * self.stage()
    }

    /// Bytes of a stage.
    fn stage(&self) -> u32 {
        self.keys.bytes().max(self.values.bytes())
    }

    /// Registers of a thread for scores and output.
    fn accumulators(&self) -> u32 {
        self.fragments * (self.keys.rows + self.columns) / 2
    }

    /// Registers of a thread beside those: exponentials, fragments on their way, the state of rows, addresses.
    fn others(&self) -> u32 {
        // Three products take as much again for what rounding left.
        let parts = if self.product == Product::ThreeTf32 { 3 } else { 1 };
        12 * parts * self.fragments + 4 * parts * AHEAD as u32 + 20
    }
}

/// Parts of a multiprocessor that schedule warps, each with a quarter of the registers.
const PARTITIONS: u32 = 4;

/// Registers beside what is needed without which there is no further CTA.
const ROOM: u32 = 16;

/// Registers that the assembler is left beside what is needed before queries stay in some.
const SPARE: u32 = 36;

/// The most stages of the ring: a tile more than two blocks ahead is not needed sooner.
const MOST_STAGES: u32 = 4;

/// The tile sizes for a problem.
pub fn default_tiles(sm: arch::Sm, problem: &Problem) -> Tiles {
    let columns = problem.head_dim.max(problem.head_dim_v) as u32;
    let rows = if shares_heads(problem) { problem.seqlen_q * problem.group() } else { problem.seqlen_q };
    match (problem.dtype, columns) {
        (Dtype::F32, 0..=128) => Tiles { block_q: 64, block_kv: 32, threads: 128 },
        (Dtype::F32, _) => Tiles { block_q: 64, block_kv: 16, threads: 128 },
        // Of few queries, tiles that are not half empty.
        (_, _) if rows <= 32 && !(columns > 128 && is_small(sm)) => Tiles { block_q: 32, block_kv: 64, threads: 64 },
        (_, 0..=128) if rows <= 64 => Tiles { block_q: 64, block_kv: 64, threads: 128 },
        // What scores, packed batches and caches need beside takes registers of its own.
        (_, 65..=128)
            if problem.softcap.is_some()
                || problem.alibi_slopes.is_some()
                || problem.varlen.is_some()
                || problem.cache.is_some() =>
        {
            Tiles { block_q: 64, block_kv: 64, threads: 128 }
        }
        // Where rows are short, two small CTAs start and end beside each other, and compute less of what the mask hides.
        (_, 193..) if holds_two(sm) && rows <= if problem.mask == Mask::FULL { 512 } else { 2048 } => {
            Tiles { block_q: 64, block_kv: 64, threads: 128 }
        }
        _ => tiles_of(sm, columns),
    }
}

/// Whether shared memory holds two CTAs with small tiles of 256 columns: queries, keys and values.
fn holds_two(sm: arch::Sm) -> bool {
    const SMALL: u32 = 3 * 64 * 256 * 2;
    sm.limits().shared_bytes >= 2 * SMALL
}

/// Whether shared memory does not hold two CTAs with large tiles of 128 columns.
fn is_small(sm: arch::Sm) -> bool {
    const LARGE: u32 = 128 << 10;
    sm.limits().shared_bytes < LARGE
}

/// Whether the query heads of a KV head share tiles.
pub fn shares_heads(problem: &Problem) -> bool {
    /// Rows of a tile: what they fill of it, or of two, is the question.
    const TILE: usize = 128;
    schedule::shares_heads(problem, TILE, problem.group())
}

/// The tile sizes, by architecture and the larger of `head_dim` and `head_dim_v`.
pub fn tiles_of(sm: arch::Sm, columns: u32) -> Tiles {
    let small = is_small(sm);
    match columns {
        0..=64 => Tiles { block_q: 128, block_kv: 64, threads: 128 },
        65..=128 if small => Tiles { block_q: 64, block_kv: 64, threads: 128 },
        // Before Hopper the assembler spills some with blocks of 64 keys.
        65..=128 if sm < arch::Sm::Sm90 => Tiles { block_q: 128, block_kv: 32, threads: 128 },
        65..=128 => Tiles { block_q: 128, block_kv: 64, threads: 128 },
        _ if small => Tiles { block_q: 64, block_kv: 32, threads: 128 },
        _ => Tiles { block_q: 128, block_kv: 64, threads: 256 },
    }
}

/// How many CTAs the keys of a tile of queries are split among so that a GPU of so many multiprocessors is filled.
pub fn splits(problem: &Problem, config: &Config, multiprocessors: u32) -> u32 {
    /// Keys that are worth a CTA.
    const LEAST: u64 = 512;
    let block_q = config.tiles.block_q;
    let group = if config.grouped { problem.group() } else { 1 };
    let heads = (problem.batch * problem.heads_q / group) as u64;
    let tiles = heads * (problem.seqlen_q as u64 * group as u64).div_ceil(block_q.into());
    let resident = u64::from(multiprocessors * Geometry::new(config).ctas);
    let most = (problem.seqlen_k as u64 / LEAST).min(resident / tiles.max(1));
    most.clamp(1, crate::plan::MAX_SPLITS.into()) as u32
}

/// Checks tile sizes against what the kernel can do with them.
///
/// # Errors
/// When a size is out of its range, or a thread would need more registers than it has.
pub fn check_tiles(config: &Config) -> Result<(), PlanError> {
    let Tiles { block_q, block_kv, threads } = config.tiles;
    let refuse = |argument, value, allowed: String| Err(PlanError::Tile { argument, value, allowed });
    if ![64, 128, 256].contains(&threads) {
        return refuse("threads", threads, "64, 128 or 256".into());
    }
    if block_kv == 0 || !block_kv.is_multiple_of(ROWS) || block_kv > 256 {
        return refuse("block_kv", block_kv, "a multiple of 16, at most 256".into());
    }
    let warps = threads / WARP;
    if ![ROWS * warps, 2 * ROWS * warps].contains(&block_q) {
        return refuse("block_q", block_q, format!("{} or {}: 16 or 32 for each warp", ROWS * warps, 2 * ROWS * warps));
    }
    let geometry = Geometry::new(config);
    let most = 255 - geometry.others();
    if geometry.accumulators() > most {
        let allowed = format!(
            "so small that a thread has at most {most} accumulators: {} x ({block_kv} keys + {} columns) / 2 are {}",
            geometry.fragments,
            geometry.columns,
            geometry.accumulators()
        );
        return refuse("block_kv", block_kv, allowed);
    }
    Ok(())
}

/// The kernel.
///
/// # Errors
/// When an instruction does not exist on the target.
pub fn v2_tc(config: &Config) -> Result<Program, KernelError> {
    let geometry = Geometry::new(config);
    let mut kernel = KernelBuilder::new("flash_v2_tc", config.target);
    let k = &mut kernel;
    k.require_block([config.tiles.threads, 1, 1]);
    k.min_ctas_per_sm(geometry.ctas);

    let schedule = Schedule::new(k, config);
    let [q, keys, values] = ["q", "k", "v"].map(|name| Strided::new(k, name, config.piece));
    let results = Results::new(k, config);
    let scores = Scores::new(k, config);

    let tile = k.ctaid_x();
    let work = schedule.work(k, tile);
    let mut memory = SharedMemory::default();
    let warp = Warp::new(k, config, geometry, &schedule, &work, scores, &mut memory);
    let nothing = work.sees_nothing(k);
    k.if_else(
        nothing,
        |k| {
            for fragment in &warp.fragments {
                results.store_nothing(k, &schedule, (warp.quad, fragment.row), &Place::of(&work));
            }
        },
        |k| {
            warp.fetch_queries(k, &q);
            let ring = Ring::new(k, &warp, &keys, &values);
            warp.run(k, &ring);
            for Fragment { row, out, state, .. } in &warp.fragments {
                results.store(k, &schedule, (warp.quad, *row), &Place::of(&work), out, state);
            }
        },
    );
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}

/// Sixteen queries of a warp.
struct Fragment {
    /// The thread's first row in the CTA's tile.
    row: Reg<S32>,
    scores: Accumulator,
    out: Accumulator,
    state: RowState,
    alibi: Option<Alibi>,
}

/// A warp and what it works on.
struct Warp<'a> {
    config: &'a Config,
    geometry: Geometry,
    schedule: &'a Schedule,
    work: &'a Work,
    scores: Scores,
    thread: Reg<U32>,
    quad: Quad,
    fragments: Vec<Fragment>,
    /// Where the CTA's tile of queries is, and how this lane reads the warp's.
    q_tile: Reg<U32>,
    q: Reader,
    /// The first stage of the ring, and how this lane reads keys and values in it.
    ring: Reg<U32>,
    keys: Reader,
    values: Rows,
    product: Product,
}

impl<'a> Warp<'a> {
    fn new(
        k: &mut KernelBuilder,
        config: &'a Config,
        geometry: Geometry,
        schedule: &'a Schedule,
        work: &'a Work,
        scores: Scores,
        memory: &mut SharedMemory,
    ) -> Self {
        let Geometry { queries, keys, values, stages, .. } = geometry;
        let q_tile = memory.reserve(k, "q", queries.rows, queries.row_bytes, 1);
        let ring = memory.reserve(k, "k, v", stages, geometry.stage(), 1);
        let (q_tile, ring) = (k.address_of(q_tile), k.address_of(ring));

        let thread = k.tid_x();
        let lane = k.and(thread, WARP - 1);
        // Read from one lane, so that the assembler knows it is the same in all.
        let warp = k.shr(thread, WARP.ilog2());
        let warp = k.shfl_idx(warp, 0);
        let first = k.mul(warp, ROWS * geometry.fragments);
        let quad = Quad::of_lane(k, lane);
        let left = Reader::left(k, lane, &[queries, values]);
        let rows = Rows::new(k, lane, left, values, config.dtype);
        let q = left.rows_further(k, first);
        let right = Reader::right(k, lane, keys);
        let row = k.add(first, quad.row);

        let columns = geometry.columns;
        let fragments = (0..geometry.fragments)
            .map(|index| {
                let row = k.add(row, ROWS * index).cast::<S32>();
                Fragment {
                    row,
                    scores: Accumulator::new(k, config.tiles.block_kv),
                    out: Accumulator::new(k, columns),
                    state: RowState::new(k, scores.to_exponent, 0.0),
                    alibi: scores.alibi(k, schedule, work, row),
                }
            })
            .collect();
        Self {
            config,
            geometry,
            schedule,
            work,
            scores,
            thread,
            quad,
            fragments,
            q_tile,
            q: q.further(k, q_tile),
            ring,
            keys: right.further(k, ring),
            values: rows.further(k, ring),
            product: geometry.product,
        }
    }

    /// Begins to bring the queries.
    fn fetch_queries(&self, k: &mut KernelBuilder, q: &Strided) {
        let Self { config, geometry, work, .. } = self;
        let row_bytes = config.head_dim * config.dtype.bytes() as u32;
        let copies = Copies::new(k, self.thread, config.tiles.threads, geometry.queries, row_bytes, config.piece);
        let base = q.of_head(k, work.batch, work.head);
        let base = match work.first_q {
            None => base,
            Some(first) => q.of_row(k, base, first),
        };
        let places = copies.places(k);
        let fetched = copies.fetch(k, self.q_tile, None, |k, index, offset| {
            let (row, column) = places[index];
            let row = k.add(row.cast::<S32>(), offset as i32);
            let row = k.add(row, work.row);
            let (query, head) = self.schedule.query(k, row);
            let there = k.setp(Compare::Lt, query, work.seqlen_q);
            let mut address = q.of_row(k, base, query);
            if let Some(head) = head {
                let head = k.cvt::<U64, _>(head);
                address = k.mad(head, q.head, address);
            }
            (k.add(address, column), Some(there))
        });
        fetched.put(k);
    }

    /// The blocks of keys that the tile sees, from the last down: those at a border masked, the others not.
    fn run(&self, k: &mut KernelBuilder, ring: &Ring) {
        for Fragment { out, state, .. } in &self.fragments {
            out.clear(k);
            state.clear(k);
        }
        let held = self.hold_queries(k, ring);
        let work = self.work;
        let block = k.mov(work.last);
        let down_to = |k: &mut KernelBuilder, border: Option<Reg<S32>>| match (border, work.lowest) {
            (None, None) => k.mov(0),
            (Some(border), None) => border,
            (None, Some(lowest)) => lowest,
            (Some(border), Some(lowest)) => k.max(border, lowest),
        };
        if self.asks_for_borders() {
            let lowest = down_to(k, None);
            k.while_(|k| k.setp(Compare::Ge, block, lowest), |k| self.block(k, ring, &held, block, true));
            return;
        }
        for (border, masked) in [(Some(work.right_border), true), (work.left_border, false)] {
            let border = down_to(k, border);
            k.while_(|k| k.setp(Compare::Ge, block, border), |k| self.block(k, ring, &held, block, masked));
        }
        if let Some(lowest) = work.lowest {
            k.while_(|k| k.setp(Compare::Ge, block, lowest), |k| self.block(k, ring, &held, block, true));
        }
    }

    /// Whether all blocks have one loop, which asks whether they are at a border. A driver compiles it in half the time, and it is as fast
    /// (docs/lab-notes/v3.md, 28). A warp with two fragments has no registers left to ask with, and does so only where scores are capped, for
    /// which more than one loop is too long.
    fn asks_for_borders(&self) -> bool {
        self.config.softcap || self.geometry.fragments == 1
    }

    /// The queries' first steps in registers, of each fragment, as many as there is room for.
    fn hold_queries(&self, k: &mut KernelBuilder, ring: &Ring) -> Vec<Vec<Part>> {
        if self.geometry.held > 0 {
            ring.wait(k);
        }
        let steps = self.q.steps(k, self.geometry.queries);
        (0..self.geometry.held).map(|step| self.load_queries(k, &steps, step)).collect()
    }

    /// A step of the queries, of each fragment.
    fn load_queries(&self, k: &mut KernelBuilder, steps: &[Pointer<Shared>], step: u32) -> Vec<Part> {
        let from = |index| steps[step as usize].offset(self.geometry.queries.rows_from(ROWS * index, step));
        (0..self.geometry.fragments).map(|index| mma::load(k, from(index), self.product)).collect()
    }

    /// A block of keys and its values.
    fn block(&self, k: &mut KernelBuilder, ring: &Ring, held: &[Vec<Part>], block: Reg<S32>, masked: bool) {
        let (stage, coming) = ring.turn(k, Kind::Keys, block, masked);
        let keys = self.keys.further(k, stage);
        self.score(k, &keys, held);
        coming.put(k);
        let modified = self.config.softcap || self.config.alibi;
        if modified || masked {
            let key = self.work.key(k, block, self.config.tiles.block_kv);
            let column = k.mad(self.quad.place.cast::<S32>(), 2, key);
            for fragment in &self.fragments {
                self.scores.modify(k, &fragment.scores, fragment.alibi.as_ref(), column);
            }
            let hide = |k: &mut KernelBuilder| {
                for fragment in &self.fragments {
                    self.hide(k, fragment, column);
                }
            };
            if masked && self.asks_for_borders() {
                let at_border = self.work.is_at_border(k, block);
                k.if_(at_border, hide);
            } else if masked {
                hide(k);
            }
        }
        // Without a mask the last block has a key for every query.
        let finite = !(masked && (self.config.causal || self.config.window)) && !self.config.alibi;
        let raised: Vec<_> =
            self.fragments.iter().map(|fragment| fragment.state.raise(k, &fragment.scores, finite)).collect();
        let (stage, coming) = ring.turn(k, Kind::Values, block, masked);
        let values = self.values.further(k, stage);
        self.add_values(k, &values, &raised);
        coming.put(k);
        k.sub_to(block, block, 1);
    }

    /// `scores = queries x keys^T`.
    fn score(&self, k: &mut KernelBuilder, reader: &Reader, held: &[Vec<Part>]) {
        let Geometry { queries, keys, .. } = self.geometry;
        let (q_steps, k_steps) = (self.q.steps(k, queries), reader.steps(k, keys));
        self.fragments.iter().for_each(|fragment| fragment.scores.clear(k));
        let scores: Vec<_> = self.fragments.iter().map(|fragment| fragment.scores.clone()).collect();
        let places: Vec<_> = (0..keys.steps())
            .flat_map(|step| (0..keys.rows).step_by(ROWS as usize).map(move |row| (step, row)))
            .collect();
        let load = |k: &mut KernelBuilder, &(step, row): &(u32, u32)| {
            let left = (row == 0).then(|| match held.get(step as usize) {
                Some(held) => held.clone(),
                None => self.load_queries(k, &q_steps, step),
            });
            (left, mma::load(k, k_steps[step as usize].offset(keys.rows_from(row, step)), self.product))
        };
        let mut left = Vec::new();
        pipelined(k, &places, load, |k, &(_, row), (queries, part)| {
            if let Some(queries) = queries {
                left = queries;
            }
            for (column, right) in (row..).step_by(8).zip(mma::by_columns(part)) {
                for (scores, left) in scores.iter().zip(&left) {
                    mma::multiply(k, &scores.columns_from(column, 8).values, left, right, self.product);
                }
            }
        });
    }

    /// `out = rescale * out + exponentials x values`, the exponentials of the scores computed on the way.
    fn add_values(&self, k: &mut KernelBuilder, rows: &Rows, raised: &[Raised]) {
        let Geometry { values, columns, product, .. } = self.geometry;
        let steps = rows.steps(k, values);
        let step_columns = columns / values.steps();
        let places: Vec<_> = (0..values.rows)
            .step_by(ROWS as usize)
            .flat_map(|row| (0..values.steps()).map(move |step| (row, step)))
            .collect();
        let factors = |k: &mut KernelBuilder, pairs: &mut [Vec<Pair>]| -> Vec<Vec<Part>> {
            pairs.iter_mut().map(|pairs| mma::left_of_pairs(k, &std::mem::take(pairs), product)).collect()
        };
        let mut raised = raised.to_vec();
        let rescale: Vec<_> = raised.iter().map(|raised| raised.rescale).collect();
        let mut pairs = vec![Vec::new(); self.fragments.len()];
        self.exponentials(k, &raised, 0, 0..PAIRS, &mut pairs);
        let mut left = factors(k, &mut pairs);
        let load = |k: &mut KernelBuilder, &(row, step): &(u32, u32)| steps.load(k, row, step, product);
        pipelined(k, &places, load, |k, &(row, step), right| {
            for ((fragment, rescale), left) in self.fragments.iter().zip(&rescale).zip(&left) {
                let out = fragment.out.columns_from(step * step_columns, step_columns);
                if row == 0 {
                    out.scale_rows(k, *rescale);
                }
                right.multiply_into(k, &out, left, product);
            }
            if row + ROWS < values.rows {
                // A share of the next 16 keys' exponentials.
                let share = |step: u32| (PAIRS as u32 * step / values.steps()) as usize;
                if step == 0 {
                    let after =
                        self.fragments.iter().zip(&raised).map(|(fragment, raised)| fragment.state.after(k, raised));
                    raised = after.collect();
                }
                self.exponentials(k, &raised, row + ROWS, share(step)..share(step + 1), &mut pairs);
                if step + 1 == values.steps() {
                    left = factors(k, &mut pairs);
                }
            }
        });
    }

    /// Adds to `pairs` some of those of 16 keys: the exponentials of their scores.
    fn exponentials(
        &self,
        k: &mut KernelBuilder,
        raised: &[Raised],
        key: u32,
        range: Range<usize>,
        pairs: &mut [Vec<Pair>],
    ) {
        for ((fragment, raised), pairs) in self.fragments.iter().zip(raised).zip(pairs) {
            let sixteen = fragment.scores.columns_from(key, 16);
            for pair in range.clone() {
                let scores = [sixteen.values[2 * pair], sixteen.values[2 * pair + 1]];
                fragment.state.take_in(k, raised, pair % 2, scores);
                pairs.push(Pair::new(k, scores, self.config.dtype));
            }
        }
    }

    /// Hides the keys that the fragment's queries do not see. `column` is the key of the thread's first column.
    fn hide(&self, k: &mut KernelBuilder, fragment: &Fragment, column: Reg<S32>) {
        let row = k.add(self.work.row, fragment.row);
        let seen = [0, 8].map(|offset| {
            let row = k.add(row, offset);
            let (query, _) = self.schedule.query(k, row);
            let (first, end) = self.schedule.seen(k, self.work, query);
            (first.map(|first| k.sub(first, column)), k.sub(end, column))
        });
        let [(first, end), (other_first, other_end)] = seen;
        let first = first.zip(other_first).map(|(first, other)| [first, other]);
        fragment.scores.hide(k, &Visible { first, end: [end, other_end] });
    }
}

/// Pairs of neighbouring columns that a thread has of a fragment's 16.
const PAIRS: usize = 4;

/// Loads what each place needs a few places ahead, and uses it there.
fn pipelined<P, L>(
    k: &mut KernelBuilder,
    places: &[P],
    mut load: impl FnMut(&mut KernelBuilder, &P) -> L,
    mut using: impl FnMut(&mut KernelBuilder, &P, L),
) {
    let mut coming = places.iter();
    let mut loaded: VecDeque<L> = coming.by_ref().take(AHEAD).map(|place| load(k, place)).collect();
    for place in places {
        loaded.extend(coming.next().map(|place| load(k, place)));
        if let Some(loaded) = loaded.pop_front() {
            using(k, place, loaded);
        }
    }
}

/// What a tile of the ring holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Keys,
    Values,
}

/// Tiles of keys and values in turn, on their way or in use.
struct Ring<'a> {
    warp: &'a Warp<'a>,
    source: Source,
    /// The stage of the tile whose turn is next, in bytes from the first one.
    stage: Reg<U32>,
}

/// Where tiles of keys and of values come from.
enum Source {
    Rows([Stream; 2]),
    /// Those of the block whose keys are fetched next, and then its values.
    Pages(PageTable, [PagedStream; 2]),
}

impl Source {
    fn is_asynchronous(&self, k: &KernelBuilder) -> bool {
        match self {
            Source::Rows([keys, _]) => keys.copies.is_asynchronous(k),
            Source::Pages(_, [keys, _]) => keys.copies.is_asynchronous(k),
        }
    }
}

impl<'a> Ring<'a> {
    /// Begins to bring the first tiles, the first of them together with what was asked for before.
    fn new(k: &mut KernelBuilder, warp: &'a Warp<'a>, keys: &Strided, values: &Strided) -> Self {
        let Warp { config, geometry, work, .. } = warp;
        let copies = |k: &mut KernelBuilder, tile: Tile, columns: u32| {
            let row_bytes = columns * config.dtype.bytes() as u32;
            Copies::new(k, warp.thread, config.tiles.threads, tile, row_bytes, config.piece)
        };
        let stream = |k: &mut KernelBuilder, tensor: &Strided, tile: Tile, columns: u32| {
            let copies = copies(k, tile, columns);
            let base = tensor.of_head(k, work.batch_k, work.kv_head);
            let key = work.key(k, work.last, config.tiles.block_kv);
            let key = match work.first_k {
                None => key,
                Some(first) => k.add(key, first),
            };
            let first = tensor.of_row(k, base, key);
            Stream::up(k, copies, first, tensor.row)
        };
        let (head_dim, head_dim_v) = (config.head_dim, config.head_dim_v);
        let source = match work.pages.zip(config.cache.page_size) {
            None => {
                let keys = stream(k, keys, geometry.keys, head_dim);
                Source::Rows([keys, stream(k, values, geometry.values, head_dim_v)])
            }
            Some((row, size)) => {
                let pages = PageTable::new(k, row, size, config.tiles.block_kv, work);
                pages.look_up(k, work, work.last);
                let (k_copies, v_copies) = (copies(k, geometry.keys, head_dim), copies(k, geometry.values, head_dim_v));
                let keys = PagedStream::new(k, k_copies, keys, work.kv_head);
                Source::Pages(pages, [keys, PagedStream::new(k, v_copies, values, work.kv_head)])
            }
        };
        let ring = Self { warp, source, stage: k.mov(0) };
        for tile in 0..geometry.stages - 1 {
            let kind = if tile.is_multiple_of(2) { Kind::Keys } else { Kind::Values };
            let to = k.add(warp.ring, tile * geometry.stage());
            ring.fetch(k, kind, to, (work.last, tile / 2), tile < 2).put(k);
        }
        ring
    }

    /// Begins to bring the tile of a kind of the block that is so many above `block`, if there is one. `border` says that it may
    /// reach past the last key.
    fn fetch(
        &self,
        k: &mut KernelBuilder,
        kind: Kind,
        to: Reg<U32>,
        (block, above): (Reg<S32>, u32),
        border: bool,
    ) -> Fetched {
        let work = self.warp.work;
        let rows = border.then(|| {
            let key = work.key(k, block, self.warp.config.tiles.block_kv);
            k.sub(work.seqlen_k, key).cast::<U32>()
        });
        // The tile of this block is needed for sure.
        let there = (above > 0).then(|| {
            let block = k.sub(block, above as i32);
            !work.is_over(k, block)
        });
        let of_kind = if kind == Kind::Keys { 0 } else { 1 };
        let fetched = match &self.source {
            Source::Rows(streams) => streams[of_kind].fetch(k, to, there, rows),
            Source::Pages(pages, streams) => {
                let block = k.sub(block, above as i32);
                let fetched = streams[of_kind].fetch(k, (pages, work, block), to, there, rows);
                if kind == Kind::Values {
                    let next = k.sub(block, 1);
                    pages.look_up(k, work, next);
                }
                fetched
            }
        };
        if self.source.is_asynchronous(k) {
            k.cp_async_commit();
        }
        fetched
    }

    /// Waits for the tile whose turn it is. Every warp is then done with the one before.
    fn wait(&self, k: &mut KernelBuilder) {
        if self.source.is_asynchronous(k) {
            k.cp_async_wait(self.warp.geometry.stages - 2);
        }
        k.bar_sync(0);
    }

    /// The next tile, that of this kind of a block: how far from the ring's first it is; and the one that begins to come to the
    /// place of the tile before. `border` says that the block may reach past the last key.
    fn turn(&self, k: &mut KernelBuilder, kind: Kind, block: Reg<S32>, border: bool) -> (Reg<U32>, Fetched) {
        let geometry = self.warp.geometry;
        self.wait(k);
        let step = geometry.stage();
        let last = (geometry.stages - 1) * step;
        let is_first = k.setp(Compare::Eq, self.stage, 0);
        let before = k.sub(self.stage, step);
        let before = k.selp(last, before, is_first);
        let to = k.add(self.warp.ring, before);
        // So many tiles further on, keys and values in turn.
        let tile = geometry.stages - 1 + u32::from(kind == Kind::Values);
        let next = if tile.is_multiple_of(2) { Kind::Keys } else { Kind::Values };
        let above = tile / 2;
        let mut fetched = self.fetch(k, next, to, (block, above), border && above == 0);
        if k.target().supports(Feature::CpAsync) {
            // What had to be loaded into registers after all goes on at once: the products need them.
            std::mem::take(&mut fetched).put(k);
        }
        let stage = k.mov(self.stage);
        let is_last = k.setp(Compare::Eq, self.stage, last);
        k.add_to(self.stage, self.stage, step);
        k.selp_to(self.stage, 0, self.stage, is_last);
        (stage, fetched)
    }
}
