//! FlashAttention on Hopper (Shah et al. 2024): one warp loads, two or three warpgroups compute.
//!
//! The copy engine brings tiles of queries, keys and values to shared memory, asked by a single thread that runs ahead as
//! far as the rings of tiles let it. Warpgroups of 64 queries each multiply straight from there. What one has to wait for,
//! another computes on: the scores of the next block are under way while the values of this one are multiplied, and while a
//! warpgroup has the tensor cores the others exponentiate. CTAs stay, and a tile's last product runs beside the next tile's first.
//!
//! Where queries are few the query heads of a KV head share tiles: the rows of one are those heads, query after query.
//!
//! On 8-bit inputs the matrix instructions want both factors' inner dimension contiguous, and that of values is not: the other
//! three warps of the warpgroup that loads turn each tile of values once it has come.
//!
//! On request two CTAs make a cluster, which computes neighbouring tiles of queries of one head: each has half of every block of keys
//! and values brought to both, so that L2 is asked for half as much.
//!
//! What it shows: the tensor cores are hardly ever idle; below 128 columns the exponentials are as much the limit.

use ptx::{
    Along, B32, Compare, F32, Global, KernelBuilder, KernelError, Pointer, Pred, Reg, S32, Special, TensorMapParam,
    U32, U64,
};

use crate::accumulator::{self, Accumulator, Quad, RowState, Visible};
use crate::config::{Config, Program, Technique, Tiles};
use crate::copies::Copies;
use crate::hopper::{
    BARRIER, Cursor, ROWS, Ring, SLAB_ROW, Tile, Transposer, Turns, WARPGROUP, multiply_registers, multiply_rows, slab,
};
use crate::results::{Place, Results};
use crate::schedule::{self, Schedule, Work};
use crate::scores::{Alibi, Scores};
use crate::strided::Strided;
use crate::tile::SharedMemory;
use crate::{Dtype, Mask, PlanError, Problem, mma};

/// Registers per thread of the loading warpgroup and of the computing ones, by how many compute. Together they are what
/// the CTA was launched with.
const REGISTERS: [(u32, u32); 3] = [(56, 256), (24, 240), (32, 160)];

/// The same where the loading warpgroup copies by itself.
const REGISTERS_BY_THREADS: [(u32, u32); 3] = [(56, 256), (40, 232), (32, 160)];

/// Those of a computing one where none loads.
const REGISTERS_OF_ALL: [u32; 3] = [255, 255, 168];

/// Rows of a tile that the loading warpgroup copies at once: a thread for each chunk of a slab's row.
const ROW_STEP: u32 = WARPGROUP * mma::CHUNK / SLAB_ROW;

/// Those of a configuration.
fn registers(config: &Config) -> (u32, u32) {
    let index = (config.tiles.block_q / ROWS) as usize - 1;
    match config.by_threads {
        _ if config.without.producer => (0, REGISTERS_OF_ALL[index]),
        true => REGISTERS_BY_THREADS[index],
        false => REGISTERS[index],
    }
}

/// Tiles of keys, and of values, on their way or in use.
const STAGES: u32 = 2;

/// Warps of the loading warpgroup that turn tiles of values.
const TRANSPOSERS: u32 = 3;

/// The exponent of the largest 8-bit exponential: 256 where 448 is the most, and the least that is not 0 is 2^-17 of it.
const TOP: f32 = 8.0;

/// How the tiles of a configuration lie in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Warpgroups that load: one or none.
    pub producers: u32,
    /// Warpgroups that compute.
    pub consumers: u32,
    /// The queries of one of them.
    pub queries: Tile,
    /// A block of keys.
    pub keys: Tile,
    /// A block of values, as it is loaded.
    pub values: Tile,
    /// The same, turned, where matrix instructions want it so.
    pub turned: Option<Tile>,
    /// Tiles of queries for each warpgroup: two, where there is room for the next while one is in use.
    pub query_stages: u32,
}

impl Geometry {
    /// Of a configuration, where a block has `limit` bytes of shared memory.
    pub fn new(config: &Config, limit: u32) -> Self {
        let (block_kv, dtype) = (config.tiles.block_kv, config.dtype);
        let tile = |rows, columns| Tile { rows, columns: padded(dtype, columns), dtype };
        let values = tile(block_kv, config.head_dim_v);
        let mut geometry = Self {
            producers: u32::from(!config.without.producer),
            consumers: config.tiles.block_q / ROWS,
            queries: tile(ROWS, config.head_dim),
            keys: tile(block_kv, config.head_dim),
            values,
            turned: dtype.is_scaled().then_some(Tile { rows: values.columns, columns: block_kv, dtype }),
            query_stages: 2,
        };
        if geometry.bytes() > limit {
            geometry.query_stages = 1;
        }
        geometry
    }

    /// Threads of a CTA: those of the warpgroup that loads, if there is one, and of those that compute.
    pub fn threads(&self) -> u32 {
        WARPGROUP * (self.producers + self.consumers)
    }

    /// Shared memory in all.
    pub fn bytes(&self) -> u32 {
        let queries = self.query_stages * self.consumers * self.queries.bytes();
        let turned = self.turned.map_or(0, Tile::bytes);
        queries + STAGES * (self.keys.bytes() + self.values.bytes() + turned) + BARRIER * self.barriers()
    }

    /// Barriers, and words of as many bytes after them: the numbers of the next tiles, and whether loading has ended.
    fn barriers(&self) -> u32 {
        let turned = if self.turned.is_some() { 3 * STAGES } else { 0 };
        2 * (self.query_stages * self.consumers + 2 * STAGES + NEXT_STAGES) + NEXT_STAGES + turned
    }
}

/// Columns of a tile: in the slabs of 16-bit types all of them, of 8-bit ones as many as are turned together.
fn padded(dtype: Dtype, columns: u32) -> u32 {
    columns.next_multiple_of(if dtype.is_scaled() { 32 } else { slab(dtype) })
}

/// Places for the number of the next tile, and the barriers of each.
const NEXT_STAGES: u32 = 2;

/// The tile sizes measured fastest on an H200 (docs/lab-notes/v3.md): two warpgroups of 64 queries and 128 keys, or 80 where
/// the head dimension leaves no room for more, or 64 where rows are so short that what a block has beyond their end counts.
/// Where the head dimension is at most 64 a third warpgroup keeps the tensor cores busy beside the exponentials, unless a
/// causal mask leaves short rows for which smaller tiles waste less. Products of 8-bit types take half the time: what holds
/// for 64 columns of 16 bits holds for 128 of theirs. Rows that heads share have no more warpgroups than they fill.
pub fn default_tiles(problem: &Problem) -> Tiles {
    const SHORT: usize = 2048;
    const LONG: usize = 8192;
    let columns = problem.head_dim.max(problem.head_dim_v);
    let short = problem.mask != Mask::FULL && problem.seqlen_k < SHORT;
    let scaled = problem.dtype.is_scaled();
    let (consumers, block_kv) = match columns {
        _ if has_fine_weights(problem) => (2, FEW),
        0..=64 if !short => (3, 128),
        65..=128 if scaled && (problem.mask == Mask::FULL || problem.seqlen_k >= LONG) => (3, 96),
        // A capped score is so many instructions that a driver compiles larger blocks of them for about a second or more.
        193.. if problem.softcap.is_some() => (2, 64),
        129.. if problem.softcap.is_some() => (2, if scaled { 96 } else { 80 }),
        129.. if scaled => (2, 128),
        0..=128 => (2, 128),
        129..=192 => (2, 112),
        _ if short || problem.seqlen_k < SHORT / 2 => (2, 64),
        _ => (2, 80),
    };
    let filled = || (problem.seqlen_q * rows_of_query(problem)).div_ceil(ROWS as usize) as u32;
    let consumers = if shares_heads(problem, consumers * ROWS) { consumers.min(filled()) } else { consumers };
    Tiles { block_q: consumers * ROWS, block_kv, threads: WARPGROUP * (consumers + 1) }
}

/// Whether weights are fine: of 8-bit types where keys are few. A rounding to 4 bits moves a weight by up to a 16th; of hundreds that
/// averages out, but of few it is luck whether what they weigh is as near as the contract asks (docs/lab-notes/v3.md, 30).
pub fn has_fine_weights(problem: &Problem) -> bool {
    problem.dtype.is_scaled() && problem.seqlen_k <= FEW as usize
}

/// The most keys that are few: one block of them.
const FEW: u32 = 64;

/// The numbers that a weight is the sum of.
fn parts(config: &Config) -> u32 {
    if config.fine_weights { 2 } else { 1 }
}

/// Rows that a query has in tiles that the heads of its group share: a power of two, so that tiles are boxes of whole queries and
/// a row's query is a shift away.
pub fn rows_of_query(problem: &Problem) -> usize {
    problem.group().next_power_of_two()
}

/// Whether the query heads of a KV head share tiles of `block_q` rows.
pub fn shares_heads(problem: &Problem, block_q: u32) -> bool {
    let rows = rows_of_query(problem);
    rows <= ROWS as usize && schedule::shares_heads(problem, block_q as usize, rows)
}

/// Checks tile sizes against what the kernel can do with them.
///
/// # Errors
/// When a size is out of its range, or a thread would need more registers than it has.
pub fn check_tiles(config: &Config) -> Result<(), PlanError> {
    /// Registers that addresses and the like need beside the accumulators.
    const OTHERS: u32 = 32;
    let Tiles { block_q, block_kv, threads } = config.tiles;
    let refuse = |argument, value, allowed: String| Err(PlanError::Tile { argument, value, allowed });
    if ![ROWS, 2 * ROWS, 3 * ROWS].contains(&block_q) {
        return refuse("block_q", block_q, "64, 128 or 192".into());
    }
    // The inner dimension of a matrix instruction.
    let step = 32 / config.dtype.bytes() as u32;
    if block_kv == 0 || !block_kv.is_multiple_of(step) || block_kv > 256 {
        return refuse("block_kv", block_kv, format!("a multiple of {step}, at most 256"));
    }
    if config.without.producer && config.dtype.is_scaled() {
        return Err(PlanError::Needs { dtype: config.dtype, part: Technique::Producer });
    }
    let consumers = block_q / ROWS;
    if threads != WARPGROUP * (consumers + 1) {
        return refuse(
            "threads",
            threads,
            format!("{}: a warpgroup that loads and one for each 64 queries", WARPGROUP * (consumers + 1)),
        );
    }
    let columns = padded(config.dtype, config.head_dim_v);
    let most = registers(config).1.min(255) - OTHERS;
    let weights = |block_kv: u32| parts(config) * block_kv * config.dtype.bytes() as u32 / 8;
    let needed = |block_kv: u32| block_kv / 2 + weights(block_kv) + columns / 2;
    if needed(block_kv) > most {
        let largest = (0..block_kv).step_by(step as usize).rfind(|&block_kv| needed(block_kv) <= most);
        let allowed = format!(
            "at most {}: a thread of {block_q} queries has {most} registers for scores, exponentials and output",
            largest.unwrap_or(0)
        );
        return refuse("block_kv", block_kv, allowed);
    }
    Ok(())
}

/// The most CTAs that load blocks together.
pub const MAX_CLUSTER: u32 = 2;

/// Checks whether CTAs can load the blocks of a configuration together: all of them must go through the same ones in the same order.
///
/// # Errors
/// When they cannot.
pub fn check_cluster(config: &Config) -> Result<(), PlanError> {
    let of = match config.cluster {
        1 => return Ok(()),
        _ if config.causal || config.window => "without a mask",
        _ if config.varlen => "whose sequences have one length",
        _ if config.without.producer => "with a warpgroup that loads",
        _ => return Ok(()),
    };
    Err(PlanError::Cluster { cluster: config.cluster, of })
}

/// How many of so many `heads` have their tiles taken together: as many as leave their keys and values in L2, in sections of
/// about one size. Without a mask the tiles of a head follow each other: they run at the same time and read the same keys.
pub fn section(problem: &Problem, heads: u64, blocks: u32) -> u32 {
    /// What of L2 the keys and values of a section may take.
    const BYTES: u64 = 32 << 20;
    if problem.mask == Mask::FULL || blocks == 0 {
        return 1;
    }
    let columns = (problem.head_dim + problem.head_dim_v) as u64;
    let bytes = problem.seqlen_k as u64 * columns * problem.dtype.bytes() as u64;
    let of_kv_head = heads / ((problem.batch * problem.heads_kv) as u64).max(1);
    let fit = BYTES * of_kv_head / bytes.max(1);
    let sections = heads.div_ceil(fit.clamp(1, heads));
    heads.div_ceil(sections) as u32
}

/// What every warp of the CTA knows.
struct Cta<'a> {
    config: &'a Config,
    geometry: Geometry,
    schedule: Schedule,
    scores: Scores,
    descales: Option<DescaleParams>,
    /// This warp's warpgroup: 0 loads, where one does.
    warpgroup: Reg<U32>,
    lane: Reg<U32>,
    /// In a cluster, the first row of each block that this CTA loads for all.
    share: Option<Reg<U32>>,
    /// Of each computing warpgroup.
    queries: Vec<Ring>,
    keys: Ring,
    /// As matrix instructions read them.
    values: Ring,
    /// Where they are loaded, to be turned.
    loaded: Option<Loaded>,
    /// Where the loading warp says which tile is next, and the numbers themselves.
    next: Ring,
    numbers: Reg<U32>,
}

/// Values that are to be turned.
#[derive(Clone, Copy)]
struct Loaded {
    ring: Ring,
    /// Of each tile, a word that is not 0 where no more tiles come.
    ended: Reg<U32>,
}

impl Loaded {
    fn ended(&self, k: &mut KernelBuilder, at: Cursor) -> Pointer<ptx::Shared> {
        Pointer::at(Ring { tiles: self.ended, step: BARRIER, ..self.ring }.tile(k, at))
    }
}

/// The kernel.
///
/// # Errors
/// When the target is not sm_90a.
pub fn v3(config: &Config) -> Result<Program, KernelError> {
    let limit = config.target.sm().limits().shared_opt_in_per_block;
    let geometry = Geometry::new(config, limit);
    let mut kernel = KernelBuilder::new("flash_v3", config.target);
    let k = &mut kernel;
    k.require_block([geometry.threads(), 1, 1]);
    k.min_ctas_per_sm(1);
    if config.cluster > 1 {
        k.require_cluster([config.cluster, 1, 1]);
    }

    let source = Source::new(k, config);
    let schedule = Schedule::new(k, config).padded(k);
    let results = Results::new(k, config);
    let scores = Scores::new(k, config);
    let descales = DescaleParams::new(k, config);
    let mut memory = SharedMemory::default();
    let cta = Cta::new(k, config, geometry, (schedule, scores, descales), &mut memory);

    match source {
        Source::Maps(maps) if config.without.producer => consume(k, &cta, &results, Some(maps)),
        source => {
            let loads = k.setp(Compare::Eq, cta.warpgroup, 0);
            k.if_else(loads, |k| produce(k, &cta, source), |k| consume(k, &cta, &results, None));
        }
    }
    if config.cluster > 1 {
        // Until every CTA is here, another may still arrive at this one's barriers.
        k.cluster_sync();
    }
    Ok(Program { kernel: kernel.finish()?, shared: memory })
}

impl<'a> Cta<'a> {
    /// Lays out shared memory and prepares the barriers.
    fn new(
        k: &mut KernelBuilder,
        config: &'a Config,
        geometry: Geometry,
        (schedule, scores, descales): (Schedule, Scores, Option<DescaleParams>),
        memory: &mut SharedMemory,
    ) -> Self {
        let Geometry { consumers, queries, keys, values, turned, query_stages, .. } = geometry;
        let mut reserve = |k: &mut KernelBuilder, name, tiles, tile: Tile| {
            let bytes = tile.dtype.bytes() as u32;
            let place = memory.reserve(k, name, tiles * tile.rows, tile.bytes() / tile.rows / bytes, bytes);
            k.address_of(place)
        };
        let q_tiles = reserve(k, "q", query_stages * consumers, queries);
        let k_tiles = reserve(k, "k", STAGES, keys);
        let v_tiles = reserve(k, "v", STAGES, values);
        let turned_tiles = turned.map(|turned| reserve(k, "v_turned", STAGES, turned));
        let barriers = memory.reserve(k, "barriers", geometry.barriers(), 1, BARRIER);
        let barriers = k.address_of(barriers);
        let mut used = 0;
        let mut ring = |k: &mut KernelBuilder, tiles: Reg<U32>, step: u32, stages: u32| {
            let place = k.add(barriers, BARRIER * used);
            used += 2 * stages;
            Ring::new(tiles, place, step, stages)
        };
        let q = (0..consumers)
            .map(|group| {
                let tiles = k.add(q_tiles, group * query_stages * queries.bytes());
                ring(k, tiles, queries.bytes(), query_stages)
            })
            .collect();
        let ctas = config.cluster;
        let kv = Ring { ctas, ..ring(k, k_tiles, keys.bytes(), STAGES) };
        let v = Ring { ctas, ..ring(k, v_tiles, values.bytes(), STAGES) };
        let turned = turned_tiles.zip(turned).map(|(tiles, turned)| ring(k, tiles, turned.bytes(), STAGES));
        let next = ring(k, barriers, BARRIER, NEXT_STAGES);
        let numbers = k.add(barriers, BARRIER * used);
        let loaded = turned.map(|_| Loaded { ring: v, ended: k.add(numbers, BARRIER * NEXT_STAGES) });

        let thread = k.tid_x();
        let lane = k.and(thread, 31);
        // Read from one lane, so that the assembler knows it is the same in all.
        let warpgroup = k.shr(thread, WARPGROUP.ilog2());
        let warpgroup = k.shfl_idx(warpgroup, 0);
        let share = (ctas > 1).then(|| {
            let rank = k.special(Special::ClusterCtarank);
            k.mul(rank, config.tiles.block_kv / ctas)
        });
        let cta = Self {
            config,
            geometry,
            schedule,
            scores,
            descales,
            warpgroup,
            lane,
            share,
            queries: q,
            keys: kv,
            values: turned.unwrap_or(v),
            loaded,
            next,
            numbers,
        };
        let first = k.setp(Compare::Eq, thread, 0);
        k.if_(first, |k| {
            let writers = if config.by_threads { WARPGROUP } else { 1 };
            cta.queries.iter().for_each(|ring| ring.init(k, writers, 4));
            cta.keys.init(k, writers, 4 * consumers);
            cta.values.init(k, if loaded.is_some() { TRANSPOSERS } else { writers }, 4 * consumers);
            cta.next.init(k, 1, 4 * consumers);
            if let Some(Loaded { ring, ended }) = loaded {
                ring.init(k, writers, TRANSPOSERS);
                let zero = k.mov::<U32>(0);
                for stage in 0..STAGES {
                    k.st(Pointer::<ptx::Shared>::at(ended).offset((BARRIER * stage).into()), zero);
                }
            }
            k.fence_mbarrier_init();
        });
        if ctas > 1 {
            k.cluster_sync();
        } else {
            k.bar_sync(0);
        }
        cta
    }

    /// Where the copy engine finds a row of queries, or of keys: the tensor's coordinates beyond the columns.
    ///
    /// A packed batch is addressed so that what is past the sequence's end counts as outside the tensor: see
    /// [`crate::plan::packed_rows`].
    fn rows(
        &self,
        k: &mut KernelBuilder,
        row: Reg<S32>,
        head: Reg<U32>,
        batch: Reg<U32>,
        packed: Option<(Reg<S32>, Reg<S32>)>,
    ) -> Vec<Reg<S32>> {
        let head = head.cast();
        match packed {
            None => vec![row, head, batch.cast()],
            Some((first, length)) => {
                let end = k.mov::<S32>(crate::plan::PACKED_END);
                let from_end = k.sub(row, length);
                let within = k.add(from_end, end);
                let behind = k.add(first, length);
                vec![within, head, behind, end]
            }
        }
    }
}

/// Where the tiles come from.
enum Source {
    /// Tensors that the copy engine can address.
    Maps([TensorMapParam; 3]),
    /// Any others, which the loading warpgroup's threads copy.
    Tensors([Strided; 3]),
}

impl Source {
    /// Declares the parameters.
    fn new(k: &mut KernelBuilder, config: &Config) -> Self {
        match config.by_threads {
            false => Self::Maps(["q_map", "k_map", "v_map"].map(|name| k.tensor_map_param(name))),
            true => Self::Tensors(["q", "k", "v"].map(|name| Strided::new(k, name, config.piece))),
        }
    }
}

/// The warpgroup that loads: for each tile its queries, then its keys and values from the last block down.
fn produce(k: &mut KernelBuilder, cta: &Cta, source: Source) {
    k.fewer_registers(registers(cta.config).0);
    match source {
        Source::Maps(maps) => {
            let thread = k.tid_x();
            let one = k.setp(Compare::Eq, thread, 0);
            k.if_(one, |k| {
                let [at_queries, at_keys] = [(); 2].map(|()| Cursor::new(k));
                for_each_tile(k, cta, |k, work, choose| load(k, cta, work, choose, maps, at_queries, at_keys));
                if let Some(loaded) = cta.loaded {
                    loaded.ring.wait_empty(k, at_keys);
                    let place = loaded.ended(k, at_keys);
                    let ended = k.mov::<U32>(1);
                    k.st(place, ended);
                    loaded.ring.fill(k, at_keys);
                }
            });
            if let (Some(loaded), Some(turned)) = (cta.loaded, cta.geometry.turned) {
                let warp = k.shr(thread, 5);
                let warp = k.shfl_idx(warp, 0);
                let turns = k.setp(Compare::Ge, warp, 1);
                k.if_(turns, |k| turn(k, cta, loaded, turned, warp));
            }
        }
        Source::Tensors(tensors) => {
            let gather = Gather::new(k, cta, tensors);
            for_each_tile(k, cta, |k, work, choose| {
                choose(k);
                gather.load(k, work);
            });
        }
    }
}

/// Goes through the CTA's tiles, as far as some query sees a key.
///
/// `load` calls the second of its functions, which chooses the next tile, when little of the tile is left to load: who chooses early
/// takes what another, done before, should have had. The answer takes about as long as a load.
fn for_each_tile(
    k: &mut KernelBuilder,
    cta: &Cta,
    load: impl FnOnce(&mut KernelBuilder, &Work, &dyn Fn(&mut KernelBuilder)),
) {
    let counter = cta.config.dynamic.then(|| k.pointer_param("counter", 8));
    let ctas = k.special(Special::NctaidX);
    let at_next = Cursor::new(k);
    let tile = k.ctaid_x();
    k.while_(
        |k| k.setp(Compare::Lt, tile, cta.schedule.tiles),
        |k| {
            let work = cta.schedule.work(k, tile);
            let following = k.reg();
            let choose = |k: &mut KernelBuilder| match counter {
                None => k.add_to(following, tile, ctas),
                Some(counter) => {
                    let taken = k.atomic_add(Pointer::at(counter), 1);
                    k.add_to(following, taken, ctas);
                }
            };
            let nothing = work.sees_nothing(k);
            k.if_else(nothing, choose, |k| load(k, &work, &choose));
            if counter.is_some() {
                cta.next.wait_empty(k, at_next);
                let place = number(k, cta, at_next);
                k.st(place, following);
                cta.next.fill(k, at_next);
                cta.next.advance(k, at_next);
            }
            k.mov_to(tile, following);
        },
    );
    if let Some(counter) = counter {
        // The last CTA to end leaves the counters as it found them.
        let last = k.sub(ctas, 1);
        let ended = k.atomic_inc(Pointer::at(counter).offset(4), last);
        let all = k.setp(Compare::Eq, ended, last);
        let zero = k.mov::<U32>(0);
        k.when(all, |k| k.st(Pointer::<Global>::at(counter), zero));
    }
}

/// Has the copy engine bring what a tile needs, asked by one thread.
fn load(
    k: &mut KernelBuilder,
    cta: &Cta,
    work: &Work,
    choose_next: &dyn Fn(&mut KernelBuilder),
    [q_map, k_map, v_map]: [TensorMapParam; 3],
    at_queries: Cursor,
    at_keys: Cursor,
) {
    let Geometry { keys, values, .. } = cta.geometry;
    load_queries(k, cta, work, q_map, at_queries);
    let block = k.mov(work.last);
    let last_but_one = k.add(work.first_block(), 1);
    let last_but_one = k.min(last_but_one, work.last);
    k.while_(
        |k| !work.is_over(k, block),
        |k| {
            let little_left = k.setp(Compare::Eq, block, last_but_one);
            k.if_(little_left, choose_next);
            let to_values = cta.loaded.map_or(cta.values, |loaded| loaded.ring);
            for (ring, tile, map) in [(cta.keys, keys, k_map), (to_values, values, v_map)] {
                load_block(k, cta, work, block, (ring, tile, map), at_keys);
            }
            cta.keys.advance(k, at_keys);
            k.sub_to(block, block, 1);
        },
    );
}

/// Has every warpgroup's queries brought.
fn load_queries(k: &mut KernelBuilder, cta: &Cta, work: &Work, map: TensorMapParam, at: Cursor) {
    let queries = cta.geometry.queries;
    for (group, ring) in cta.queries.iter().enumerate() {
        let full = ring.begin_filling(k, at, queries.bytes());
        let row = k.add(work.row, (group as u32 * ROWS) as i32);
        let (query, head) = cta.schedule.query(k, row);
        let packed = work.first_q.map(|first| (first, work.seqlen_q));
        let mut rows = cta.rows(k, query, work.head, work.batch, packed);
        if head.is_some() {
            // The box has a query's heads one after the other.
            rows.swap(0, 1);
        }
        let to = ring.tile(k, at);
        queries.load(k, to, map, &rows, (full, ring.ctas));
    }
    cta.queries[0].advance(k, at);
}

/// Has a block of keys or values brought, or this CTA's share of it to all of the cluster.
fn load_block(
    k: &mut KernelBuilder,
    cta: &Cta,
    work: &Work,
    block: Reg<S32>,
    (ring, tile, map): (Ring, Tile, TensorMapParam),
    at: Cursor,
) {
    let mut key = work.key(k, block, cta.config.tiles.block_kv);
    if let Some(first) = cta.share {
        key = k.add(key, first.cast::<S32>());
    }
    let packed = work.first_k.map(|first| (first, work.seqlen_k));
    let rows = cta.rows(k, key, work.kv_head, work.batch, packed);
    let full = ring.begin_filling(k, at, tile.bytes());
    let mut to = ring.tile(k, at);
    if let Some(first) = cta.share {
        to = k.mad(first, SLAB_ROW, to);
    }
    tile.load(k, to, map, &rows, (full, ring.ctas));
}

/// A thread that computes and has the copy engine bring tiles as well, where no warpgroup does.
struct Loader<'a> {
    cta: &'a Cta<'a>,
    maps: [TensorMapParam; 3],
    /// Whether this is the thread.
    one: Reg<Pred>,
    at_queries: Cursor,
    at_keys: Cursor,
    at_values: Cursor,
}

impl<'a> Loader<'a> {
    fn new(k: &mut KernelBuilder, cta: &'a Cta<'a>, maps: [TensorMapParam; 3]) -> Self {
        let thread = k.tid_x();
        let one = k.setp(Compare::Eq, thread, 0);
        let [at_queries, at_keys, at_values] = [(); 3].map(|()| Cursor::new(k));
        Self { cta, maps, one, at_queries, at_keys, at_values }
    }

    /// Asks for what a tile begins with: its queries, two blocks of keys, one of values.
    fn begin(&self, k: &mut KernelBuilder, work: &Work) {
        k.if_(self.one, |k| {
            load_queries(k, self.cta, work, self.maps[0], self.at_queries);
            for further in [0, 1] {
                self.keys(k, work, work.last, further);
            }
            self.values(k, work, work.last, 0);
        });
        k.bar_warp_sync();
    }

    /// After a block asks for what takes the place of its keys, and of the values before its own.
    fn refill(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) {
        k.if_(self.one, |k| {
            self.keys(k, work, block, STAGES);
            self.values(k, work, block, STAGES - 1);
        });
        k.bar_warp_sync();
    }

    /// The keys so many blocks after this one, if there are any.
    fn keys(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>, further: u32) {
        let tile = self.cta.geometry.keys;
        self.load(k, work, (block, further), (self.cta.keys, tile, self.maps[1]), self.at_keys);
    }

    fn values(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>, further: u32) {
        let tile = self.cta.geometry.values;
        self.load(k, work, (block, further), (self.cta.values, tile, self.maps[2]), self.at_values);
    }

    fn load(
        &self,
        k: &mut KernelBuilder,
        work: &Work,
        (block, further): (Reg<S32>, u32),
        (ring, tile, map): (Ring, Tile, TensorMapParam),
        at: Cursor,
    ) {
        let block = k.sub(block, further as i32);
        let over = work.is_over(k, block);
        k.if_(!over, |k| {
            load_block(k, self.cta, work, block, (ring, tile, map), at);
            ring.advance(k, at);
        });
    }
}

/// The warps that turn values: tile after tile, until no more come.
fn turn(k: &mut KernelBuilder, cta: &Cta, loaded: Loaded, turned: Tile, warp: Reg<U32>) {
    let place = k.sub(warp, 1);
    let transposer = Transposer::new(k, place, cta.lane, TRANSPOSERS);
    let leader = k.setp(Compare::Eq, cta.lane, 0);
    // Both rings have as many tiles: one cursor is that of both.
    let at = Cursor::new(k);
    k.while_(
        |k| {
            loaded.ring.wait_full(k, at);
            let ended = loaded.ended(k, at);
            let ended = k.ld::<U32, _>(ended);
            k.setp(Compare::Eq, ended, 0)
        },
        |k| {
            cta.values.wait_empty(k, at);
            let (from, to) = (loaded.ring.tile(k, at), cta.values.tile(k, at));
            transposer.turn(k, (cta.geometry.values, from), (turned, to));
            cta.values.fill_part(k, at, leader);
            loaded.ring.release(k, at, leader);
            loaded.ring.advance(k, at);
        },
    );
}

/// The loading warpgroup's threads, which copy the tiles themselves where the copy engine cannot address the tensors.
struct Gather<'a> {
    cta: &'a Cta<'a>,
    q: Gathered,
    k: Gathered,
    v: Gathered,
    at_queries: Cursor,
    at_keys: Cursor,
    /// One tile behind: the values that are on their way.
    at_values: Cursor,
}

/// A tensor, and how the threads share its tiles.
struct Gathered {
    tensor: Strided,
    copies: Copies,
    /// Rows of a tile.
    rows: u32,
    /// This thread's first row of a tile, and the byte in it.
    row: Reg<U32>,
    column: Reg<U64>,
    /// Bytes from one of its rows to the next.
    step: Reg<U64>,
}

impl Gathered {
    fn new(k: &mut KernelBuilder, cta: &Cta, tensor: Strided, tile: Tile, columns: u32) -> Self {
        let thread = k.tid_x();
        let bytes = |columns: u32| columns * cta.config.dtype.bytes() as u32;
        let row_bytes = bytes(tile.columns);
        let tile = mma::Tile { rows: tile.rows, row_bytes };
        let copies = Copies::new(k, thread, WARPGROUP, tile, bytes(columns), cta.config.piece);
        // Every slab is of one width.
        let (row, column) = copies.places(k)[0];
        let step = k.mul(tensor.row, u64::from(ROW_STEP));
        Self { tensor, copies, rows: tile.rows, row, column, step }
    }

    /// Begins to bring rows from `first` on of a sequence of `length` rows, the first of which is row `begin`.
    fn fetch(
        &self,
        k: &mut KernelBuilder,
        to: Reg<U32>,
        (batch, head): (Reg<U32>, Reg<U32>),
        begin: Option<Reg<S32>>,
        (first, length): (Reg<S32>, Reg<S32>),
    ) {
        let left = k.sub(length, first);
        // The thread's last row, which is asked for first.
        let row = k.add(first, self.row.cast::<S32>());
        let last = self.rows - ROW_STEP;
        let row = k.add(row, last as i32);
        let row = match begin {
            None => row,
            Some(begin) => k.add(row, begin),
        };
        let head = self.tensor.of_head(k, batch, head);
        let head = k.add(head, self.column);
        let mut address = self.tensor.of_row(k, head, row);
        let fetched = self.copies.fetch(k, to, None, |k, _, offset| {
            if offset < last {
                address = k.sub(address, self.step);
            }
            let row = k.add(self.row, offset).cast::<S32>();
            (address, Some(k.setp(Compare::Lt, row, left)))
        });
        fetched.put(k);
        k.cp_async_commit();
    }
}

impl<'a> Gather<'a> {
    fn new(k: &mut KernelBuilder, cta: &'a Cta<'a>, [q, keys, v]: [Strided; 3]) -> Self {
        let Geometry { queries, keys: key_tile, values, .. } = cta.geometry;
        let Config { head_dim, head_dim_v, .. } = *cta.config;
        let [at_queries, at_keys, at_values] = [(); 3].map(|()| Cursor::new(k));
        Self {
            cta,
            q: Gathered::new(k, cta, q, queries, head_dim),
            k: Gathered::new(k, cta, keys, key_tile, head_dim),
            v: Gathered::new(k, cta, v, values, head_dim_v),
            at_queries,
            at_keys,
            at_values,
        }
    }

    /// Copies what a tile needs. While a tile of keys or values is on its way the one before it arrives.
    fn load(&self, k: &mut KernelBuilder, work: &Work) {
        let Self { cta, at_queries, at_keys, .. } = *self;
        for (group, ring) in cta.queries.iter().enumerate() {
            ring.wait_empty(k, at_queries);
            let row = k.add(work.row, (group as u32 * ROWS) as i32);
            let to = ring.tile(k, at_queries);
            self.q.fetch(k, to, (work.batch, work.head), work.first_q, (row, work.seqlen_q));
        }
        self.arrived(k, 0);
        cta.queries.iter().for_each(|ring| ring.fill(k, at_queries));
        cta.queries[0].advance(k, at_queries);

        let block = k.mov(work.last);
        let on_their_way = k.mov_p(false);
        k.while_(
            |k| !work.is_over(k, block),
            |k| {
                let key = work.key(k, block, cta.config.tiles.block_kv);
                let (head, rows) = ((work.batch, work.kv_head), (key, work.seqlen_k));
                cta.keys.wait_empty(k, at_keys);
                let to = cta.keys.tile(k, at_keys);
                self.k.fetch(k, to, head, work.first_k, rows);
                k.if_(on_their_way, |k| self.values_arrived(k, 1));
                cta.values.wait_empty(k, at_keys);
                let to = cta.values.tile(k, at_keys);
                self.v.fetch(k, to, head, work.first_k, rows);
                k.mov_p_to(on_their_way, true);
                self.arrived(k, 1);
                cta.keys.fill(k, at_keys);
                cta.keys.advance(k, at_keys);
                k.sub_to(block, block, 1);
            },
        );
        self.values_arrived(k, 0);
    }

    /// The values on their way have come; of what was asked for after them, `behind` tiles may not.
    fn values_arrived(&self, k: &mut KernelBuilder, behind: u32) {
        self.arrived(k, behind);
        self.cta.values.fill(k, self.at_values);
        self.cta.values.advance(k, self.at_values);
    }

    /// All but the last `behind` tiles have come, and matrix instructions may read them.
    fn arrived(&self, k: &mut KernelBuilder, behind: u32) {
        k.cp_async_wait(behind);
        k.fence_proxy_async();
    }
}

/// Where the number of the next tile lies.
fn number(k: &mut KernelBuilder, cta: &Cta, at: Cursor) -> Pointer<ptx::Shared> {
    let next = Ring { tiles: cta.numbers, ..cta.next };
    Pointer::at(next.tile(k, at))
}

/// Where the descales of 8-bit inputs are: kernel parameters.
struct DescaleParams {
    /// Of q, k and v.
    tensors: [Reg<U64>; 3],
    heads_kv: Reg<U32>,
}

impl DescaleParams {
    /// Declares `q_descale`, `k_descale`, `v_descale` and `heads_kv`.
    fn new(k: &mut KernelBuilder, config: &Config) -> Option<Self> {
        config.dtype.is_scaled().then(|| Self {
            tensors: ["q_descale", "k_descale", "v_descale"].map(|name| k.pointer_param(name, 4)),
            heads_kv: k.param("heads_kv"),
        })
    }

    /// Those of a tile.
    fn of(&self, k: &mut KernelBuilder, work: &Work) -> [Reg<F32>; 3] {
        let index = k.mad(work.batch, self.heads_kv, work.kv_head);
        self.tensors.map(|tensor| {
            let place = k.mad_wide(index, 4, tensor);
            k.ld(Pointer::<Global>::at(place))
        })
    }
}

/// The tile that a warpgroup computes.
struct Current<'w> {
    work: &'w Work,
    /// How products become its scores.
    scores: Scores,
    alibi: Option<Alibi>,
}

/// Whether a block waits for its tile's queries.
#[derive(Clone, Copy)]
enum Queries {
    AreThere,
    Come,
    /// Where it is the tile's first.
    ComeIf(Reg<Pred>),
}

/// A tile, and the one before, whose last product is left to run beside the first scores of this.
struct Ends<'w> {
    tile: &'w Current<'w>,
    place: &'w Place,
    /// Whether there was one before, and where its output belongs.
    under_way: Reg<Pred>,
    before: &'w Place,
}

/// A warpgroup that computes.
struct Consumer<'a> {
    cta: &'a Cta<'a>,
    results: &'a Results,
    loader: Option<Loader<'a>>,
    turns: Option<Turns>,
    /// The lane that speaks for its warp.
    leader: Reg<Pred>,
    quad: Quad,
    /// The thread's first row in the CTA's tile.
    row: Reg<S32>,
    queries: Ring,
    at_queries: Cursor,
    at_keys: Cursor,
    at_values: Cursor,
    /// Descriptors of the first tile of each ring.
    q: Reg<U64>,
    k: Reg<U64>,
    v: Reg<U64>,
    /// The tile of values that is the right factor, and how they lie in it.
    factor: Tile,
    along: Along,
    scores: Accumulator,
    /// The exponentials of a block, rounded: the left factor of the product with its values. Of fine weights the first of two, of
    /// which the other is what rounding lost.
    p: Vec<Vec<Reg<B32>>>,
    out: Accumulator,
    state: RowState,
    always: Reg<Pred>,
    never: Reg<Pred>,
}

/// What the code of a tile's blocks is.
///
/// A driver takes most of its time to find registers for matrix instructions, again for each copy of them, so the fewer there are the
/// sooner a kernel is compiled. Some kernels are slower for it (docs/lab-notes/v3.md, 25).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    /// A tile's first block, beside the tile before or alone, those at a border and the others each have their own.
    Separate,
    /// First blocks and those at a border issue matrix instructions in one place, the others have a loop.
    Borders,
    /// All blocks issue them in one place.
    Shared,
    /// As before, and what becomes of scores is written once: a tile's output is stored before the next one's first scores are taken in.
    Single,
}

impl Code {
    fn of(config: &Config) -> Self {
        let scored = config.softcap || config.alibi;
        match () {
            () if scored || config.without.epilogue => Self::Single,
            // The more columns, the longer the products and the more registers they have: what is beside them no longer counts.
            () if config.head_dim_v > 128 => Self::Shared,
            () if (config.causal || config.window) && !config.dtype.is_scaled() => Self::Borders,
            () => Self::Separate,
        }
    }
}

/// By how much exponents may be larger than those of the maximum that they are counted from, so that the output is seldom rescaled. It
/// pays for wide ones alone (docs/lab-notes/v3.md, 20). 16-bit weights are far from their largest; 8-bit ones are not.
fn slack(config: &Config) -> f32 {
    match config.head_dim_v > 192 && !config.dtype.is_scaled() && !config.without.slack {
        true => 8.0,
        false => 0.0,
    }
}

/// A warpgroup that computes, and where `maps` are given loads as well.
fn consume(k: &mut KernelBuilder, cta: &Cta, results: &Results, maps: Option<[TensorMapParam; 3]>) {
    let consumer = Consumer::new(k, cta, results, maps);
    consumer.run(k);
}

impl<'a> Consumer<'a> {
    fn new(k: &mut KernelBuilder, cta: &'a Cta<'a>, results: &'a Results, maps: Option<[TensorMapParam; 3]>) -> Self {
        let Geometry { producers, consumers, queries, keys, values, turned, query_stages } = cta.geometry;
        if producers > 0 {
            k.more_registers(registers(cta.config).1);
        }
        let group = if producers > 0 { k.sub(cta.warpgroup, producers) } else { cta.warpgroup };
        let leader = k.setp(Compare::Eq, cta.lane, 0);
        let loader = maps.map(|maps| Loader::new(k, cta, maps));
        let turns = if cta.config.without.turns { None } else { Turns::new(k, group, consumers) };

        let quad = Quad::of_lane(k, cta.lane);
        let thread = k.tid_x();
        let warp = k.shr(thread, 5);
        let warp = k.and(warp, 3);
        let row = k.mad(warp, 16, quad.row);
        let row = k.mad(group, ROWS, row).cast::<S32>();

        // This warpgroup's own ring of queries: like the first one's, further on.
        let first = cta.queries[0];
        let tiles = k.mad(group, query_stages * queries.bytes(), first.tiles);
        let barriers = k.mad(group, 2 * query_stages * BARRIER, first.barriers);
        let own = Ring { tiles, barriers, ..first };
        let q = queries.descriptor(k, own.tiles);
        let kv = keys.descriptor(k, cta.keys.tiles);
        let (factor, along, v) = match turned {
            None => (values, Along::Columns, values.transposed_descriptor(k, cta.values.tiles)),
            Some(turned) => (turned, Along::Rows, turned.descriptor(k, cta.values.tiles)),
        };

        let block_kv = cta.config.tiles.block_kv;
        let [at_queries, at_keys, at_values] = [(); 3].map(|()| Cursor::new(k));
        Self {
            cta,
            results,
            loader,
            turns,
            leader,
            quad,
            row,
            queries: own,
            at_queries,
            at_keys,
            at_values,
            q,
            k: kv,
            v,
            factor,
            along,
            scores: Accumulator::new(k, block_kv),
            p: (0..parts(cta.config)).map(|_| k.regs(block_kv as usize * cta.config.dtype.bytes() / 8)).collect(),
            out: Accumulator::new(k, values.columns),
            state: if turned.is_some() {
                let scale = k.reg();
                RowState::new(k, scale, TOP)
            } else {
                RowState::new(k, cta.scores.to_exponent, 0.0).with_slack(slack(cta.config))
            },
            always: k.mov_p(true),
            never: k.mov_p(false),
        }
    }

    /// Takes tile after tile. A tile's last product with values is left to run beside the next one's first scores.
    fn run(&self, k: &mut KernelBuilder) {
        let schedule = &self.cta.schedule;
        let ctas = k.special(Special::NctaidX);
        let at_next = Cursor::new(k);
        let tile = k.ctaid_x();
        let under_way = k.mov_p(false);
        let place = Place::new(k, self.cta.config);
        if Code::of(self.cta.config) != Code::Separate {
            // Before the first tile a product is computed as well, of nothing.
            self.state.clear(k);
            self.out.clear(k);
            self.p.iter().flatten().for_each(|&weights| k.mov_to(weights, 0));
        }
        k.while_(
            |k| k.setp(Compare::Lt, tile, schedule.tiles),
            |k| {
                let work = schedule.work(k, tile);
                let descales = self.cta.descales.as_ref().map(|descales| descales.of(k, &work));
                let scores = match descales {
                    None => self.cta.scores,
                    Some([q, keys, _]) => {
                        let descale = k.mul(q, keys);
                        self.cta.scores.scaled(k, descale)
                    }
                };
                let own_place = Place::of(&work).scaled(descales.map(|[.., v]| v));
                let nothing = work.sees_nothing(k);
                k.if_else(
                    nothing,
                    |k| self.store_nothing(k, &own_place),
                    |k| {
                        let alibi = scores.alibi(k, schedule, &work, self.row);
                        let tile = Current { work: &work, scores, alibi };
                        let ends = Ends { tile: &tile, place: &own_place, under_way, before: &place };
                        match Code::of(self.cta.config) {
                            Code::Separate => self.separate_blocks(k, &ends),
                            code => self.blocks(k, &ends, code),
                        }
                        self.queries.advance(k, self.at_queries);
                    },
                );
                if self.cta.config.dynamic {
                    self.cta.next.wait_full(k, at_next);
                    let from = number(k, self.cta, at_next);
                    let next = k.ld::<U32, _>(from);
                    let next = k.shfl_idx(next, 0);
                    k.mov_to(tile, next);
                    self.cta.next.release(k, at_next, self.leader);
                    self.cta.next.advance(k, at_next);
                } else {
                    k.add_to(tile, tile, ctas);
                }
            },
        );
        if let Some(turns) = &self.turns {
            turns.finish(k);
        }
        k.if_(under_way, |k| {
            self.add_values(k);
            k.wgmma_wait(0);
            self.store(k, &place, &self.state);
        });
    }

    /// The blocks of a tile, from the last down, each kind with its own code.
    fn separate_blocks(&self, k: &mut KernelBuilder, ends: &Ends) {
        let Ends { tile, place, under_way, before } = *ends;
        let config = self.cta.config;
        let work = tile.work;
        let block = k.mov(work.last);
        k.if_else(
            under_way,
            |k| {
                self.ask_for_tile(k, work);
                self.multiply(k, work, block, Queries::Come);
                self.first(k, &Ends { under_way: self.always, ..*ends }, block);
                self.ask_for_block(k, work, block);
            },
            |k| self.first_alone(k, tile, block),
        );
        before.set(k, place);
        self.out.clear(k);
        k.mov_p_to(under_way, true);
        let further = |k: &mut KernelBuilder, border: Option<Reg<S32>>, hide: &dyn Fn(&mut KernelBuilder)| {
            let finite = !config.causal && !config.window;
            k.while_(
                |k| match border {
                    Some(border) => k.setp(Compare::Gt, block, border),
                    None => k.setp(Compare::Gt, block, work.first_block()),
                },
                |k| {
                    k.sub_to(block, block, 1);
                    self.multiply(k, work, block, Queries::AreThere);
                    self.take_in(k, tile, block, (self.always, finite), |k| hide(k));
                    self.ask_for_block(k, work, block);
                },
            );
        };
        if config.window {
            return further(k, None, &|k| self.hide_at_border(k, work, block));
        }
        if config.causal {
            further(k, Some(work.right_border), &|k| self.hide(k, work, block));
        }
        further(k, None, &|_| {});
    }

    /// The first block of the first tile.
    fn first_alone(&self, k: &mut KernelBuilder, tile: &Current, block: Reg<S32>) {
        self.ask_for_tile(k, tile.work);
        self.in_turn(k, |k| {
            self.queries.wait_full(k, self.at_queries);
            self.cta.keys.wait_full(k, self.at_keys);
            self.score(k);
        });
        k.wgmma_wait(0);
        self.scored(k, tile.work, block);
        self.hide_at_border(k, tile.work, block);
        self.state.clear(k);
        self.set_scale(k, tile);
        self.state.absorb(k, &self.scores, false);
        self.narrow(k);
        self.ask_for_block(k, tile.work, block);
    }

    /// The blocks of a tile, from the last down: each one's scores beside the product with the values of the one before.
    fn blocks(&self, k: &mut KernelBuilder, ends: &Ends, code: Code) {
        let Ends { tile, place, under_way, before } = *ends;
        let work = tile.work;
        self.ask_for_tile(k, work);
        let block = k.mov(work.last);
        let first = k.mov_p(true);
        k.while_(
            |k| k.setp(Compare::Ge, block, work.first_block()),
            |k| {
                self.multiply(k, work, block, Queries::ComeIf(first));
                if code == Code::Single {
                    k.if_(first, |k| self.change(k, ends));
                    self.take_in(k, tile, block, (under_way, false), |k| self.hide_at_border(k, work, block));
                } else {
                    k.if_else(
                        first,
                        |k| {
                            self.first(k, ends, block);
                            before.set(k, place);
                            self.out.clear(k);
                        },
                        |k| self.further(k, tile, block, code),
                    );
                }
                k.mov_p_to(first, false);
                k.mov_p_to(under_way, true);
                self.ask_for_block(k, work, block);
                k.sub_to(block, block, 1);
                if code == Code::Borders {
                    self.between_borders(k, tile, block);
                }
            },
        );
    }

    /// The blocks from this one down that all queries see, if it is one of them.
    fn between_borders(&self, k: &mut KernelBuilder, tile: &Current, block: Reg<S32>) {
        let work = tile.work;
        let lowest = match (work.left_border, work.lowest) {
            (Some(border), Some(lowest)) => k.max(border, lowest),
            (_, Some(lowest)) => lowest,
            _ => k.mov(0),
        };
        let at_right = k.setp(Compare::Ge, block, work.right_border);
        let lowest = k.selp(i32::MAX, lowest, at_right);
        k.while_(
            |k| k.setp(Compare::Ge, block, lowest),
            |k| {
                self.multiply(k, work, block, Queries::AreThere);
                self.take_in(k, tile, block, (self.always, false), |_| {});
                self.ask_for_block(k, work, block);
                k.sub_to(block, block, 1);
            },
        );
    }

    /// The scores of a block, and beside what follows the product with the values of the one before.
    fn multiply(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>, queries: Queries) {
        self.in_turn(k, |k| {
            match queries {
                Queries::AreThere => {}
                Queries::Come => self.queries.wait_full(k, self.at_queries),
                Queries::ComeIf(first) => k.if_(first, |k| self.queries.wait_full(k, self.at_queries)),
            }
            self.cta.keys.wait_full(k, self.at_keys);
            self.score(k);
            self.add_values(k);
        });
        k.wgmma_wait(self.beside());
        self.scored(k, work, block);
    }

    /// The scores of a tile's first block, beside the last product of the tile before, whose output is stored. If there was none, that goes
    /// to a place without rows: in straight code the assembler puts stores between exponentials.
    fn first(&self, k: &mut KernelBuilder, ends: &Ends, block: Reg<S32>) {
        let Ends { tile, under_way, before, .. } = *ends;
        self.hide_at_border(k, tile.work, block);
        let state = self.state.another(k, tile.scores.to_exponent);
        state.clear(k);
        state.absorb(k, &self.scores, false);
        k.wgmma_wait(0);
        self.valued(k, under_way);
        self.narrow(k);
        self.store(k, before, &self.state);
        self.state.set(k, &state);
        self.set_scale(k, tile);
    }

    /// Stores the output of the tile before, once its last product is there, and makes way for the next one's.
    fn change(&self, k: &mut KernelBuilder, ends: &Ends) {
        let Ends { tile, place, before, .. } = *ends;
        k.wgmma_wait(0);
        self.store(k, before, &self.state);
        self.state.clear(k);
        self.set_scale(k, tile);
        before.set(k, place);
        self.out.clear(k);
    }

    /// The scores of a block after a tile's first, which may be at a border, and is if those that are not have their own loop.
    fn further(&self, k: &mut KernelBuilder, tile: &Current, block: Reg<S32>, code: Code) {
        let masked = self.cta.config.causal || self.cta.config.window;
        self.take_in(k, tile, block, (self.always, !masked), |k| match code {
            Code::Borders => self.hide(k, tile.work, block),
            _ if masked => self.hide_at_border(k, tile.work, block),
            _ => {}
        });
    }

    /// Takes in a block's scores, some of which are to be hidden, and frees the space of the block before, if there was one under way. `finite`
    /// promises that every row has seen a key.
    fn take_in(
        &self,
        k: &mut KernelBuilder,
        tile: &Current,
        block: Reg<S32>,
        (under_way, finite): (Reg<Pred>, bool),
        hide: impl FnOnce(&mut KernelBuilder),
    ) {
        let config = self.cta.config;
        self.modify(k, tile, block);
        hide(k);
        let rescale = self.state.absorb(k, &self.scores, finite);
        let seldom = slack(config) > 0.0 || config.dtype.is_scaled();
        if seldom {
            let changes = accumulator::changes(k, rescale);
            // The branch also keeps the assembler from waiting before it exponentiates: it moves instructions within straight code.
            k.if_(changes, |k| {
                k.wgmma_wait(0);
                self.out.scale_rows(k, rescale);
            });
        }
        k.wgmma_wait(0);
        self.valued(k, under_way);
        self.narrow(k);
        if !seldom {
            self.out.scale_rows(k, rescale);
        }
    }

    /// Products that are left to run beside exponentials.
    fn beside(&self) -> u32 {
        if self.cta.config.without.overlap { 0 } else { 1 }
    }

    /// Where no warpgroup loads: has a tile's first blocks brought.
    fn ask_for_tile(&self, k: &mut KernelBuilder, work: &Work) {
        if let Some(loader) = &self.loader {
            loader.begin(k, work);
        }
    }

    /// Where no warpgroup loads: has blocks brought to the places that this one and the values before it leave.
    fn ask_for_block(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) {
        if let Some(loader) = &self.loader {
            loader.refill(k, work, block);
        }
    }

    /// Of 8-bit inputs, each head has its own scale.
    fn set_scale(&self, k: &mut KernelBuilder, tile: &Current) {
        if self.cta.descales.is_some() {
            self.state.set_scale(k, tile.scores.to_exponent);
        }
    }

    /// Issues matrix instructions when it is this warpgroup's turn.
    fn in_turn(&self, k: &mut KernelBuilder, issue: impl FnOnce(&mut KernelBuilder)) {
        if let Some(turns) = &self.turns {
            turns.begin(k);
        }
        issue(k);
        if let Some(turns) = &self.turns {
            turns.end(k);
        }
    }

    /// The scores of the block at the cursor, under way.
    fn score(&self, k: &mut KernelBuilder) {
        let Geometry { queries, keys, .. } = self.cta.geometry;
        let q = self.queries.descriptor(k, self.at_queries, self.q);
        let kv = self.cta.keys.descriptor(k, self.at_keys, self.k);
        let first = (self.never, self.always);
        multiply_rows(k, &self.scores, (queries, q), (keys, kv), first);
    }

    /// The scores have come: their keys' space is free, and with the tile's last block that of the queries.
    fn scored(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) {
        self.cta.keys.release(k, self.at_keys, self.leader);
        self.cta.keys.advance(k, self.at_keys);
        let last = k.setp_and(Compare::Eq, block, work.first_block(), self.leader);
        self.queries.release(k, self.at_queries, last);
    }

    /// `out += p x values` of the block at the cursor, under way.
    fn add_values(&self, k: &mut KernelBuilder) {
        self.cta.values.wait_full(k, self.at_values);
        let v = self.cta.values.descriptor(k, self.at_values, self.v);
        multiply_registers(k, &self.out, &self.p, (self.factor, v, self.along), self.always);
    }

    /// Exponentials become the left factor of the product with their values.
    fn narrow(&self, k: &mut KernelBuilder) {
        self.scores.narrow_to(k, self.cta.config.dtype, &self.p[0]);
        if let [rounded, rest] = &self.p[..] {
            self.scores.narrow_rest_to(k, rounded, rest);
        }
    }

    /// The product has come, if one was under way: its values' space is free.
    fn valued(&self, k: &mut KernelBuilder, under_way: Reg<Pred>) {
        let leader = k.and_p(self.leader, under_way);
        self.cta.values.release(k, self.at_values, leader);
        self.cta.values.advance_if(k, self.at_values, under_way);
    }

    /// The key of the thread's first column.
    fn column(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) -> Reg<S32> {
        let key = work.key(k, block, self.cta.config.tiles.block_kv);
        k.mad(self.quad.place.cast::<S32>(), 2, key)
    }

    /// Products become scores, where that takes more than a factor.
    fn modify(&self, k: &mut KernelBuilder, tile: &Current, block: Reg<S32>) {
        let Config { softcap, alibi, .. } = *self.cta.config;
        if softcap || alibi {
            let column = self.column(k, tile.work, block);
            tile.scores.modify(k, &self.scores, tile.alibi.as_ref(), column);
        }
    }

    /// Hides keys where the block is at a border, which the first block of a tile may or may not be.
    fn hide_at_border(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) {
        let at_border = work.is_at_border(k, block);
        k.if_(at_border, |k| self.hide(k, work, block));
    }

    fn hide(&self, k: &mut KernelBuilder, work: &Work, block: Reg<S32>) {
        let column = self.column(k, work, block);
        let row = k.add(work.row, self.row);
        let seen = [0, 8].map(|offset| {
            let row = k.add(row, offset);
            let (query, _) = self.cta.schedule.query(k, row);
            let (first, end) = self.cta.schedule.seen(k, work, query);
            (first.map(|first| k.sub(first, column)), k.sub(end, column))
        });
        let [(first, end), (other_first, other_end)] = seen;
        let first = first.zip(other_first).map(|(first, other)| [first, other]);
        self.scores.hide(k, &Visible { first, end: [end, other_end] });
    }

    /// Divides by the sums and stores the output and its logarithms.
    fn store(&self, k: &mut KernelBuilder, place: &Place, state: &RowState) {
        let cta = self.cta;
        self.results.store(k, &cta.schedule, (self.quad, self.row), place, &self.out, state);
    }

    /// The output of a tile of which no query sees a key: zeros, and minus infinity.
    fn store_nothing(&self, k: &mut KernelBuilder, place: &Place) {
        let cta = self.cta;
        self.results.store_nothing(k, &cta.schedule, (self.quad, self.row), place);
    }
}
