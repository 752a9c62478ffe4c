//! FlashAttention-2 on tensor cores (Dao 2023): a block of queries stays with its warps, keys and values stream past it.
//!
//! Each warp has 16 or 32 queries of its own and multiplies them by all keys, so warps never exchange anything: scores become
//! exponentials in the registers that the product left them in, and those are the left factor of the product with the values.
//! Tiles of keys and of values take turns in a ring in shared memory; while one is multiplied the next ones are on their way.
//!
//! What it shows: copies, addresses, softmax and matrix instructions are issued by the same warps, and the tensor cores wait
//! for each of them; [`crate::v3`] gives each its own.

use std::collections::VecDeque;

use arch::Feature;
use ptx::{Compare, Condition, F32, KernelBuilder, KernelError, Pointer, Reg, S32, Shared, U32, U64};

use crate::accumulator::{self, Accumulator, PerRow, Quad, RowState, Visible};
use crate::cache::CacheCode;
use crate::config::{Config, Program, Tiles};
use crate::copies::{self, Copies, Fetched, Stream};
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

/// Steps of f32 whose scores tensor cores sum at a time. They cut each sum, so that the errors of long ones all point towards zero; what is
/// added outside of them is rounded (docs/lab-notes/v2_tc.md).
const SUMMED: u32 = 4;

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
        let modified = if config.softcap || config.alibi { ROOM } else { 0 };
        let addresses = [keys, values].map(|tile| ADDRESSES * (tile.widths().count() as u32 - 1)).iter().sum::<u32>();
        // Where a tile's sequence, part or KV head begins is in registers, and where a page does.
        let begins_anywhere = config.varlen || config.split || config.grouped || config.cache != CacheCode::default();
        let places = u32::from(begins_anywhere) + u32::from(config.cache.page_size.is_some());
        // What is copied through registers is on its way during a product.
        let on_their_way = if copies::are_asynchronous(config.target, config.piece) {
            0
        } else {
            geometry.stage() / (threads * REGISTER)
        };
        let beside = addresses + PLACES * places + on_their_way;
        let roomy = needed + ROOM + 2 * modified + beside;
        while registers(geometry.ctas + 1) >= roomy && shared(&geometry, geometry.ctas + 1) {
            geometry.ctas += 1;
        }
        while geometry.stages < MOST_STAGES && shared(&Self { stages: geometry.stages + 1, ..geometry }, geometry.ctas)
        {
            geometry.stages += 1;
        }
        let taken = needed + SPARE + modified + beside;
        let free = registers(geometry.ctas).saturating_sub(taken);
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

    /// Whether registers are few for what a warp has. The assembler moves instructions within straight code alone, loads as far up as it
    /// finds registers and some further; branches, at little cost, keep it from that (docs/lab-notes/v2_tc.md).
    fn is_tight(&self) -> bool {
        self.fragments > 1 && self.columns > 64
    }

    /// Registers of a thread for scores and output.
    fn accumulators(&self) -> u32 {
        self.fragments * (self.keys.rows + self.columns) / 2
    }

    /// Registers of a thread beside those: exponentials, fragments on their way, the state of rows, addresses.
    fn others(&self) -> u32 {
        // Three products take as much again for what rounding left.
        let parts = if self.product == Product::ThreeTf32 { 3 } else { 1 };
        let summed = if self.sums_apart() { self.fragments * self.keys.rows / 2 } else { 0 };
        12 * parts * self.fragments + 4 * parts * AHEAD as u32 + 20 + summed
    }

    /// Whether tensor cores sum a few steps of scores, or a block of keys, at a time: of f32, whose results are to be as precise.
    fn sums_apart(&self) -> bool {
        !matches!(self.product, Product::Half(_))
    }
}

/// Parts of a multiprocessor that schedule warps, each with a quarter of the registers.
const PARTITIONS: u32 = 4;

/// Registers beside what is needed without which there is no further CTA.
const ROOM: u32 = 16;

/// Registers that the assembler is left beside what is needed before queries stay in some.
const SPARE: u32 = 36;

/// Bytes of a register.
const REGISTER: u32 = 4;

/// Registers for the addresses of each further width of slabs.
const ADDRESSES: u32 = 4;

/// Registers for where something begins that is not at a multiple of a tile.
const PLACES: u32 = 20;

/// The most stages of the ring: a tile more than two blocks ahead is not needed sooner.
const MOST_STAGES: u32 = 4;

/// The tile sizes for a problem, on a GPU of so many multiprocessors.
pub fn default_tiles(sm: arch::Sm, multiprocessors: u32, problem: &Problem) -> Tiles {
    let columns = problem.head_dim.max(problem.head_dim_v) as u32;
    let group = if shares_heads(problem) { problem.group() } else { 1 };
    let rows = problem.seqlen_q * group;
    match (problem.dtype, columns) {
        (Dtype::F32, 0..=128) => Tiles { block_q: 64, block_kv: 32, threads: 128 },
        (Dtype::F32, _) => Tiles { block_q: 64, block_kv: 16, threads: 128 },
        // Without `cp.async` a block is in registers while the one before is multiplied.
        (_, 97..=128) if rows <= 32 && !sm.supports(Feature::CpAsync) => {
            Tiles { block_q: 32, block_kv: 32, threads: 64 }
        }
        // Of few queries, tiles that are not half empty.
        (_, _) if rows <= 32 && !(columns > 128 && is_small(sm)) => Tiles { block_q: 32, block_kv: 64, threads: 64 },
        (_, 0..=128) if rows <= 64 || prefers_small(multiprocessors, problem, columns, group) => {
            Tiles { block_q: 64, block_kv: 64, threads: 128 }
        }
        // Where rows are short, two small CTAs start and end beside each other, and compute less of what the mask hides.
        (_, 193..) if holds_two(sm) && rows <= if problem.mask == Mask::FULL { 512 } else { 2048 } => {
            Tiles { block_q: 64, block_kv: 64, threads: 128 }
        }
        _ => tiles_of(sm, columns),
    }
}

/// Whether small tiles are faster than large ones, of up to 128 columns, where so many heads share a tile:
/// docs/lab-notes/v2_tc.md has what was measured.
fn prefers_small(multiprocessors: u32, problem: &Problem, columns: u32, group: usize) -> bool {
    /// Rows of a large tile, twice those of a small one.
    const LARGE: usize = 128;
    let tiles = count_tiles(problem, group, LARGE);
    // CTAs that a multiprocessor has at once; small ones that begin anywhere take more registers.
    let begins_anywhere = group > 1 || problem.varlen.is_some() || problem.cache.is_some();
    let fit = |tiles: usize, ctas| tiles <= ctas * multiprocessors as usize;
    // Large ones would leave multiprocessors half empty, or some with twice as much to do as others.
    let fit_when_small = fit(tiles.saturating_mul(2), if begins_anywhere { 2 } else { 3 });
    // All at once take as long as the one that sees the most keys: with few before the first query, twice the average.
    let uneven = problem.mask == Mask::CAUSAL && 4 * problem.seqlen_k <= 5 * problem.seqlen_q;
    match columns {
        // Splitting keys fills the GPU just as well.
        0..=64 => uneven && fit_when_small,
        _ => fit_when_small || uneven && fit(tiles, 2),
    }
}

/// The tiles of so many rows, where so many query heads share one.
fn count_tiles(problem: &Problem, group: usize, rows: usize) -> usize {
    problem.batch.saturating_mul(problem.heads_q / group * (problem.seqlen_q * group).div_ceil(rows))
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
    let tiles = count_tiles(problem, group, block_q as usize) as u64;
    // A kernel of parts takes more registers than one of whole rows.
    let resident = u64::from(multiprocessors * Geometry::new(&Config { split: true, ..*config }).ctas);
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
                let (quad, row) = warp.lane.rows(k, fragment.down);
                results.store_nothing(k, &schedule, (quad, row), &Place::of(&work));
            }
        },
        |k| {
            warp.fetch_queries(k, &q);
            let ring = Ring::new(k, &warp, &keys, &values);
            warp.run(k, &ring);
            for Fragment { down, out, state, .. } in &warp.fragments {
                let (quad, row) = warp.lane.rows(k, *down);
                results.store(k, &schedule, (quad, row), &Place::of(&work), out, state);
            }
        },
    );
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}

/// Sixteen queries of a warp.
struct Fragment {
    /// How far down it is among the warp's queries.
    down: i32,
    scores: Accumulator,
    out: Accumulator,
    state: RowState,
    alibi: Option<Alibi>,
}

/// A thread of a warp. Which rows and columns it has is computed where it is needed: registers for them would stay taken.
#[derive(Clone, Copy)]
struct Lane {
    index: Reg<U32>,
    /// The warp's first row in the CTA's tile.
    first: Reg<U32>,
}

impl Lane {
    /// Its place in its quad, and the first of its rows, in the CTA's tile, of the fragment that is so far down.
    fn rows(self, k: &mut KernelBuilder, down: i32) -> (Quad, Reg<S32>) {
        let quad = Quad::of_lane(k, self.index);
        let row = k.add(self.first, quad.row).cast::<S32>();
        (quad, k.add(row, down))
    }

    /// The first of its rows, and the key of its first column in the block of keys that begins with `key`.
    fn corner(self, k: &mut KernelBuilder, down: i32, key: Reg<S32>) -> (Reg<S32>, Reg<S32>) {
        let (quad, row) = self.rows(k, down);
        (row, k.mad(quad.place.cast::<S32>(), 2, key))
    }
}

/// A warp and what it works on.
struct Warp<'a> {
    config: &'a Config,
    geometry: Geometry,
    schedule: &'a Schedule,
    work: &'a Work,
    scores: Scores,
    thread: Reg<U32>,
    lane: Lane,
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
        let left = Reader::left(k, lane, &[queries, values]);
        let rows = Rows::new(k, lane, left, values, config.dtype);
        let q = left.rows_further(k, first);
        let right = Reader::right(k, lane, keys);

        let place = Lane { index: lane, first };
        let columns = geometry.columns;
        let fragments = (0..geometry.fragments)
            .map(|index| {
                let down = (ROWS * index) as i32;
                let alibi = if config.alibi {
                    let (_, row) = place.rows(k, down);
                    scores.alibi(k, schedule, work, row)
                } else {
                    None
                };
                Fragment {
                    down,
                    scores: Accumulator::new(k, config.tiles.block_kv),
                    out: Accumulator::new(k, columns),
                    state: RowState::new(k, scores.to_exponent, 0.0),
                    alibi,
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
            lane: place,
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

    /// The blocks of keys that the tile sees, from the last down, in one loop: a second one without the mask would take a driver twice as
    /// long to compile, and is no faster (docs/lab-notes/v2_tc.md).
    fn run(&self, k: &mut KernelBuilder, ring: &Ring) {
        for Fragment { out, state, .. } in &self.fragments {
            out.clear(k);
            state.clear(k);
        }
        let held = self.hold_queries(k, ring);
        let block = k.mov(self.work.last);
        k.while_(|k| !self.work.is_over(k, block), |k| self.block(k, ring, &held, block));
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
    fn block(&self, k: &mut KernelBuilder, ring: &Ring, held: &[Vec<Part>], block: Reg<S32>) {
        let refill = ring.turn(k, Kind::Keys, block);
        let loaded = refill.load(k, ring);
        let keys = self.keys.further(k, refill.stage);
        self.score(k, &keys, held, |k| refill.copy(k, ring));
        loaded.put(k);
        let key = self.work.key(k, block, self.config.tiles.block_kv);
        if self.config.softcap || self.config.alibi {
            for Fragment { scores, alibi, down, .. } in &self.fragments {
                let (_, column) = self.lane.corner(k, *down, key);
                self.scores.modify(k, scores, alibi.as_ref(), column);
            }
        }
        let at_border = self.work.is_at_border(k, block);
        k.if_(at_border, |k| {
            for fragment in &self.fragments {
                let corner = self.lane.corner(k, fragment.down, key);
                self.hide(k, &fragment.scores, corner);
            }
        });
        // Without a mask the last block has a key for every query.
        let finite = !self.config.causal && !self.config.window && !self.config.alibi;
        // The exponentials are there before the values are waited for: of 16-bit types they take half the registers that scores take.
        let weights: Vec<Weights> = self
            .fragments
            .iter()
            .map(|Fragment { state, scores, out, .. }| {
                let rescale = state.absorb(k, scores, finite);
                if !self.geometry.sums_apart() {
                    self.rescale(k, out, rescale);
                }
                let pairs = scores.values.chunks_exact(2);
                let pairs = pairs.map(|pair| Pair::new(k, [pair[0], pair[1]], self.config.dtype)).collect();
                Weights { pairs, rescale }
            })
            .collect();
        let refill = ring.turn(k, Kind::Values, block);
        let loaded = refill.load(k, ring);
        refill.copy(k, ring);
        let values = self.values.further(k, refill.stage);
        if self.geometry.sums_apart() {
            self.add_sums_of_values(k, &values, &weights);
        } else {
            self.add_values(k, &values, &weights);
        }
        loaded.put(k);
        k.sub_to(block, block, 1);
    }

    /// `scores = queries x keys^T`; while the first fragments are on their way, what `meanwhile` does.
    fn score(
        &self,
        k: &mut KernelBuilder,
        reader: &Reader,
        held: &[Vec<Part>],
        meanwhile: impl Fn(&mut KernelBuilder),
    ) {
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
        let mut sums = scores.clone();
        pipelined(k, &places, load, |k, &(step, row), (queries, part)| {
            if (step, row) == (0, 0) {
                meanwhile(k);
            }
            if let Some(queries) = queries {
                left = queries;
            }
            let apart = self.geometry.sums_apart() && step >= SUMMED;
            if apart && row == 0 && step.is_multiple_of(SUMMED) {
                sums = scores.iter().map(|scores| Accumulator::zeros(k, scores.columns())).collect();
            }
            for (column, right) in (row..).step_by(8).zip(mma::by_columns(part)) {
                for (sums, left) in sums.iter().zip(&left) {
                    mma::multiply(k, &sums.columns_from(column, 8).values, left, right, self.product);
                }
            }
            if apart && ((step + 1).is_multiple_of(SUMMED) || step + 1 == keys.steps()) {
                for (scores, sums) in scores.iter().zip(&sums) {
                    scores.columns_from(row, ROWS).add(k, &sums.columns_from(row, ROWS));
                }
            }
        });
    }

    /// Multiplies the output by what exponentials that are counted from another maximum are multiplied by.
    fn rescale(&self, k: &mut KernelBuilder, out: &Accumulator, factors: PerRow<Reg<F32>>) {
        if self.geometry.is_tight() {
            let changes = accumulator::changes(k, factors);
            k.if_(changes, |k| out.scale_rows(k, factors));
        } else {
            out.scale_rows(k, factors);
        }
    }

    /// `out += weights x values`.
    fn add_values(&self, k: &mut KernelBuilder, rows: &Rows, weights: &[Weights]) {
        let Geometry { values, columns, product, .. } = self.geometry;
        let steps = rows.steps(k, values);
        let step_columns = columns / values.steps();
        let places: Vec<_> = (0..values.rows)
            .step_by(ROWS as usize)
            .flat_map(|row| (0..values.steps()).map(move |step| (row, step)))
            .collect();
        let load = |k: &mut KernelBuilder, &(row, step): &(u32, u32)| steps.load(k, row, step, product);
        let mut left = Vec::new();
        pipelined(k, &places, load, |k, &(row, step), right| {
            if step == 0 {
                left = weights.iter().map(|weights| weights.of_keys(k, row, product)).collect();
            }
            for (fragment, left) in self.fragments.iter().zip(&left) {
                let out = fragment.out.columns_from(step * step_columns, step_columns);
                right.multiply_into(k, &out, left, product);
            }
        });
    }

    /// `out = rescale * out + weights x values`: what tensor cores sum are the products of a block.
    fn add_sums_of_values(&self, k: &mut KernelBuilder, rows: &Rows, weights: &[Weights]) {
        let Geometry { values, columns, product, .. } = self.geometry;
        let steps = rows.steps(k, values);
        let step_columns = columns / values.steps();
        let places: Vec<_> = (0..values.steps())
            .flat_map(|step| (0..values.rows).step_by(ROWS as usize).map(move |row| (step, row)))
            .collect();
        let load = |k: &mut KernelBuilder, &(step, row): &(u32, u32)| steps.load(k, row, step, product);
        let left: Vec<Vec<_>> = (0..values.rows)
            .step_by(ROWS as usize)
            .map(|row| weights.iter().map(|weights| weights.of_keys(k, row, product)).collect())
            .collect();
        let mut sums = Vec::new();
        pipelined(k, &places, load, |k, &(step, row), right| {
            if row == 0 {
                sums = weights.iter().map(|_| Accumulator::zeros(k, step_columns)).collect();
            }
            for (sums, left) in sums.iter().zip(&left[(row / ROWS) as usize]) {
                right.multiply_into(k, sums, left, product);
            }
            if row + ROWS == values.rows {
                for ((fragment, weights), sums) in self.fragments.iter().zip(weights).zip(&sums) {
                    let out = fragment.out.columns_from(step * step_columns, step_columns);
                    out.scale_rows_and_add(k, weights.rescale, sums);
                }
            }
        });
    }

    /// Hides the keys that a fragment's queries do not see. The thread's first row is `row`, the key of its first column `column`.
    fn hide(&self, k: &mut KernelBuilder, scores: &Accumulator, (row, column): (Reg<S32>, Reg<S32>)) {
        let row = k.add(self.work.row, row);
        let seen = [0, 8].map(|offset| {
            let row = k.add(row, offset);
            let (query, _) = self.schedule.query(k, row);
            let (first, end) = self.schedule.seen(k, self.work, query);
            (first.map(|first| k.sub(first, column)), k.sub(end, column))
        });
        let [(first, end), (other_first, other_end)] = seen;
        let first = first.zip(other_first).map(|(first, other)| [first, other]);
        scores.hide(k, &Visible { first, end: [end, other_end] });
    }
}

/// What a block's values are multiplied by, of a fragment.
struct Weights {
    /// Exponentials.
    pairs: Vec<Pair>,
    /// The factors of the output before.
    rescale: PerRow<Reg<F32>>,
}

impl Weights {
    /// The left factor of 16 keys, from `key` on.
    fn of_keys(&self, k: &mut KernelBuilder, key: u32, product: Product) -> Vec<Part> {
        /// Pairs of neighbouring columns that a thread has of a fragment's 16.
        const PAIRS: usize = 4;
        let first = PAIRS * (key / ROWS) as usize;
        mma::left_of_pairs(k, &self.pairs[first..first + PAIRS], product)
    }
}

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

/// A tile that is to come, of a block or of one further up.
#[derive(Clone, Copy)]
struct Coming {
    kind: Kind,
    /// The block that blocks are counted from,
    block: Reg<S32>,
    /// and how many above it is the tile's.
    above: u32,
}

impl Coming {
    /// The one that is so many tiles further on than the keys of a block.
    fn new(further: u32, block: Reg<S32>) -> Self {
        let kind = if further.is_multiple_of(2) { Kind::Keys } else { Kind::Values };
        Self { kind, block, above: further / 2 }
    }

    /// Whether there is such a block; of the first one that is sure.
    fn is_there(&self, k: &mut KernelBuilder, work: &Work) -> Option<Condition> {
        (self.above > 0).then(|| {
            let block = k.sub(self.block, self.above as i32);
            !work.is_over(k, block)
        })
    }
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
            let to = k.add(warp.ring, tile * geometry.stage());
            let tile = Coming::new(tile, work.last);
            let there = tile.is_there(k, work);
            ring.fetch(k, tile, to, there).put(k);
            ring.commit(k);
        }
        ring
    }

    /// Begins to bring a tile, if the condition holds.
    fn fetch(&self, k: &mut KernelBuilder, tile: Coming, to: Reg<U32>, there: Option<Condition>) -> Fetched {
        let work = self.warp.work;
        let Coming { kind, block, above } = tile;
        // That of a block further up, which is read later, has all its rows.
        let rows = (above == 0).then(|| {
            let key = work.key(k, block, self.warp.config.tiles.block_kv);
            k.sub(work.seqlen_k, key).cast::<U32>()
        });
        let of_kind = if kind == Kind::Keys { 0 } else { 1 };
        match &self.source {
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
        }
    }

    /// Ends what is to be waited for as one tile, whether there was one or not.
    fn commit(&self, k: &mut KernelBuilder) {
        if self.source.is_asynchronous(k) {
            k.cp_async_commit();
        }
    }

    /// Waits for the tile whose turn it is. Every warp is then done with the one before.
    fn wait(&self, k: &mut KernelBuilder) {
        if self.source.is_asynchronous(k) {
            k.cp_async_wait(self.warp.geometry.stages - 2);
        }
        k.bar_sync(0);
    }

    /// The turn of the next tile, that of this kind of a block.
    fn turn(&self, k: &mut KernelBuilder, kind: Kind, block: Reg<S32>) -> Refill {
        let geometry = self.warp.geometry;
        self.wait(k);
        let step = geometry.stage();
        let last = (geometry.stages - 1) * step;
        let is_first = k.setp(Compare::Eq, self.stage, 0);
        let before = k.sub(self.stage, step);
        let before = k.selp(last, before, is_first);
        let to = k.add(self.warp.ring, before);
        let stage = k.mov(self.stage);
        let is_last = k.setp(Compare::Eq, self.stage, last);
        k.add_to(self.stage, self.stage, step);
        k.selp_to(self.stage, 0, self.stage, is_last);
        Refill { stage, tile: Coming::new(geometry.stages - 1 + u32::from(kind == Kind::Values), block), to }
    }
}

/// A tile whose turn it is, and the one that then comes to the place of the tile before.
struct Refill {
    /// How far the tile is from the ring's first.
    stage: Reg<U32>,
    /// The one that comes,
    tile: Coming,
    /// and where to.
    to: Reg<U32>,
}

impl Refill {
    /// Where copies are not asynchronous, begins to load the tile into registers, from which it is put when the product is done.
    fn load(&self, k: &mut KernelBuilder, ring: &Ring) -> Fetched {
        if k.target().supports(Feature::CpAsync) {
            return Fetched::default();
        }
        let there = self.tile.is_there(k, ring.warp.work);
        ring.fetch(k, self.tile, self.to, there)
    }

    /// Where copies are asynchronous, begins them.
    fn copy(&self, k: &mut KernelBuilder, ring: &Ring) {
        if !k.target().supports(Feature::CpAsync) {
            return;
        }
        // What has to be loaded into registers after all goes on at once: the products need them.
        let copy = |k: &mut KernelBuilder, there| ring.fetch(k, self.tile, self.to, there).put(k);
        match self.tile.is_there(k, ring.warp.work) {
            Some(there) if ring.warp.geometry.is_tight() => k.if_(there, |k| copy(k, None)),
            there => copy(k, there),
        }
        ring.commit(k);
    }
}
