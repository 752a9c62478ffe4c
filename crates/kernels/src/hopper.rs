//! What Hopper adds to the vocabulary: tiles that the copy engine fills and matrix instructions read from shared memory,
//! rings of them between the warp that loads and the warpgroups that compute, and turns.

use std::panic::Location;

use ptx::{Along, KernelBuilder, Pointer, Pred, Reg, S32, TensorMapParam, U32, U64};

use crate::Dtype;
use crate::accumulator::Accumulator;

/// Threads of a warpgroup: four warps that issue matrix instructions together.
pub const WARPGROUP: u32 = 128;

/// Rows of the left factor that a warpgroup's matrix instruction multiplies.
pub const ROWS: u32 = 64;

/// Bytes of a slab's row, the widest that the swizzles of the copy engine and of matrix descriptors know.
pub const SLAB_ROW: u32 = 128;

/// Bytes along the inner dimension of one matrix instruction.
const STEP: u32 = 32;

/// Columns of a slab. A tile of more columns is several slabs, one after the other.
pub const fn slab(dtype: Dtype) -> u32 {
    SLAB_ROW / dtype.bytes() as u32
}

/// A tile in shared memory: slabs of 128 bytes of columns, the 16-byte chunks of each row permuted by the 128-byte swizzle, as
/// the copy engine leaves them. It starts at a multiple of 1024 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// Rows, a multiple of 8.
    pub rows: u32,
    /// Columns that products read, a multiple of 32 bytes. The last slab is a whole one all the same.
    pub columns: u32,
    /// The type of its elements, of 16 or 8 bits.
    pub dtype: Dtype,
}

impl Tile {
    /// Its size.
    pub fn bytes(self) -> u32 {
        self.slab_bytes() * self.columns.div_ceil(slab(self.dtype))
    }

    fn slab_bytes(self) -> u32 {
        self.rows * SLAB_ROW
    }

    /// Its slabs: the first column and the byte at which the slab starts.
    pub fn slabs(self) -> impl Iterator<Item = (u32, u32)> {
        let starts = (0..self.columns).step_by(slab(self.dtype) as usize);
        starts.zip(0..).map(move |(column, index)| (column, index * self.slab_bytes()))
    }

    /// Has the copy engine bring the tile's elements: `rows` are the coordinates of the tensor's dimensions beyond the
    /// columns. What lies outside the tensor becomes 0. The map's box says how many rows come: to this CTA, or to the same place
    /// in each of the cluster's `ctas`.
    #[track_caller]
    pub fn load(
        self,
        k: &mut KernelBuilder,
        to: Reg<U32>,
        map: TensorMapParam,
        rows: &[Reg<S32>],
        (full, ctas): (Reg<U32>, u32),
    ) {
        k.at(Location::caller(), |k| {
            for (column, offset) in self.slabs() {
                let column = k.mov::<S32>(column as i32);
                let coordinates = [&[column][..], rows].concat();
                let (to, full) = (Pointer::at(to).offset(offset.into()), Pointer::at(full));
                match ctas {
                    1 => k.tensor_load(to, map, &coordinates, full),
                    _ => k.tensor_load_to_ctas(to, map, &coordinates, full, (1 << ctas) - 1),
                }
            }
        });
    }

    /// The descriptor of the tile at `address` for products along its rows (its columns are the inner dimension).
    #[track_caller]
    pub fn descriptor(self, k: &mut KernelBuilder, address: Reg<U32>) -> Reg<U64> {
        // Eight rows of a slab lie 1024 bytes apart from the next eight; the leading offset has no meaning here.
        matrix_descriptor(k, address, 16, 8 * SLAB_ROW)
    }

    /// The descriptor of the tile at `address` for products along its columns (its rows are the inner dimension).
    #[track_caller]
    pub fn transposed_descriptor(self, k: &mut KernelBuilder, address: Reg<U32>) -> Reg<U64> {
        matrix_descriptor(k, address, self.slab_bytes(), 8 * SLAB_ROW)
    }

    /// How far `descriptor` moves along the columns, from instruction to instruction.
    fn along_columns(self) -> impl Iterator<Item = u64> {
        let bytes = (0..self.columns * self.dtype.bytes() as u32).step_by(STEP as usize);
        bytes.map(move |byte| u64::from((byte / SLAB_ROW * self.slab_bytes() + byte % SLAB_ROW) >> 4))
    }

    /// How far `transposed_descriptor` moves along the rows, from instruction to instruction.
    fn along_rows(self) -> impl Iterator<Item = u64> {
        let rows = (0..self.rows).step_by(STEP as usize / self.dtype.bytes());
        rows.map(|row| u64::from((row * SLAB_ROW) >> 4))
    }

    /// How far the descriptor of the right factor of a product moves along the inner dimension, from instruction to
    /// instruction, where it lies so: [`Tile::descriptor`] and [`Tile::transposed_descriptor`].
    fn steps(self, along: Along) -> Vec<u64> {
        match along {
            Along::Rows => self.along_columns().collect(),
            Along::Columns => self.along_rows().collect(),
        }
    }
}

/// A matrix descriptor with the 128-byte swizzle (PTX ISA, "Shared memory matrix layout" of wgmma): the address and the
/// offsets in units of 16 bytes at bits 0, 16 and 32, the swizzle at bit 62.
fn matrix_descriptor(k: &mut KernelBuilder, address: Reg<U32>, leading: u32, stride: u32) -> Reg<U64> {
    const SWIZZLE_128: u64 = 1 << 62;
    let fixed = SWIZZLE_128 | u64::from(leading >> 4) << 16 | u64::from(stride >> 4) << 32;
    let address = k.shr(address, 4);
    let address = k.and(address, 0x3fff);
    let address = k.cvt::<U64, _>(address);
    k.or(address, fixed)
}

/// `scores = queries x keys^T` of one warpgroup, under way: to be waited for.
#[track_caller]
pub fn multiply_rows(
    k: &mut KernelBuilder,
    scores: &Accumulator,
    (queries, q): (Tile, Reg<U64>),
    (keys, kv): (Tile, Reg<U64>),
    (never, always): (Reg<Pred>, Reg<Pred>),
) {
    k.at(Location::caller(), |k| {
        k.wgmma_fence();
        for (step, (a, b)) in queries.along_columns().zip(keys.along_columns()).enumerate() {
            let (a, b) = (k.add(q, a), k.add(kv, b));
            let accumulate = if step == 0 { never } else { always };
            k.wgmma_shared(&scores.values, a, b, accumulate, queries.dtype.ty());
        }
        k.wgmma_commit();
    });
}

/// `out += p x values` of one warpgroup, under way: to be waited for. `p` is in registers, see [`Accumulator::narrow_to`];
/// the values lie `along` the tile's rows, or along its columns in the order of [`Transposer`].
#[track_caller]
pub fn multiply_registers(
    k: &mut KernelBuilder,
    out: &Accumulator,
    p: &[Vec<Reg<ptx::B32>>],
    (values, v, along): (Tile, Reg<U64>, Along),
    always: Reg<Pred>,
) {
    k.at(Location::caller(), |k| {
        k.wgmma_fence();
        for (index, b) in values.steps(along).into_iter().enumerate() {
            let b = k.add(v, b);
            for part in p {
                k.wgmma_registers(&out.values, &part[4 * index..][..4], (b, along), always, values.dtype.ty());
            }
        }
        k.wgmma_commit();
    });
}

/// Warps that turn tiles of values of an 8-bit type: `[keys][columns]` becomes `[columns][keys]`, which is the only way that
/// matrix instructions take 8-bit factors from shared memory.
///
/// The order within every 16 keys and every 16 columns is such that nothing has to be exchanged between lanes. Place
/// `4 t + i` has key `8 (i / 2) + 2 t + i mod 2`: a register of the left factor takes four neighbouring keys (PTX ISA,
/// "Register fragments for wgmma.mma_async.m64nNk32"), and those are what lane `t` of a quad has of the scores. Row `r` has
/// column `2 r`, and row `8 + r` column `2 r + 1`: the bytes of a pair of columns, which are transposed together, go to rows
/// whose chunks lie in different banks.
#[derive(Clone, Copy, Debug)]
pub struct Transposer {
    /// Among those that transpose.
    warp: Reg<U32>,
    warps: u32,
    /// Where the lane reads, and where it writes, in tiles at address 0.
    reads: Reg<U32>,
    writes: Reg<U32>,
}

/// Keys whose bytes make a row of 16 bytes.
const KEYS: u32 = 16;

/// Columns that an instruction transposes.
const COLUMNS: u32 = 32;

impl Transposer {
    /// The warp that is `warp` of so many `warps`.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, warp: Reg<U32>, lane: Reg<U32>, warps: u32) -> Self {
        k.at(Location::caller(), |k| {
            // Lanes 0 to 15 have the addresses of 16 keys' bytes in one chunk, the others in the next.
            let swizzle = k.and(lane, 7);
            let key = k.and(lane, KEYS - 1);
            let chunk = k.shr(lane, 4);
            let chunk = k.xor(chunk, swizzle);
            let reads = k.mul(key, SLAB_ROW);
            let reads = k.mad(chunk, 16, reads);
            let reads = k.mad(warp, KEYS * SLAB_ROW, reads);
            // Each has the address of a row of the transpose.
            let writes = k.mul(lane, SLAB_ROW);
            let writes = k.mad(swizzle, 16, writes);
            Self { warp, warps, reads, writes }
        })
    }

    /// Turns this warp's part of the tile at `source`, every so many'th 16 keys.
    #[track_caller]
    pub fn turn(&self, k: &mut KernelBuilder, (from, source): (Tile, Reg<U32>), (to, destination): (Tile, Reg<U32>)) {
        k.at(Location::caller(), |k| {
            let reads = k.add(self.reads, source);
            let writes = k.add(self.writes, destination);
            let groups = from.rows / KEYS;
            for first in (0..groups).step_by(self.warps as usize) {
                let group = k.add(self.warp, first);
                let part = |k: &mut KernelBuilder| self.turn_keys(k, (from, reads), (to, writes), first, group);
                if first + self.warps <= groups {
                    part(k);
                } else {
                    let there = k.setp(ptx::Compare::Lt, group, groups);
                    k.if_(there, part);
                }
            }
        });
    }

    /// Turns the 16 keys of `group`; `reads` already is at those of the warp's place.
    fn turn_keys(
        &self,
        k: &mut KernelBuilder,
        (from, reads): (Tile, Reg<U32>),
        (to, writes): (Tile, Reg<U32>),
        first: u32,
        group: Reg<U32>,
    ) {
        let in_slab = slab(to.dtype) / KEYS;
        let chunk = k.and(group, in_slab - 1);
        let chunk = k.shl(chunk, 4);
        let mut writes = k.xor(writes, chunk);
        if to.columns > slab(to.dtype) {
            let slab = k.shr(group, in_slab.ilog2());
            writes = k.mad(slab, to.slab_bytes(), writes);
        }
        for column in (0..from.columns).step_by(COLUMNS as usize) {
            let (slab, within) = (column / slab(from.dtype), column % slab(from.dtype));
            let place = if within == 0 { reads } else { k.xor(reads, within) };
            let place = Pointer::at(place).offset((slab * from.slab_bytes() + first * KEYS * SLAB_ROW).into());
            let pairs = k.ldmatrix(4, place, true);
            let turned: Vec<_> = pairs
                .chunks_exact(2)
                .flat_map(|pair| [0x6420, 0x7531].map(|bytes| k.prmt(pair[0], pair[1], bytes)))
                .collect();
            k.stmatrix(Pointer::at(writes).offset((column * SLAB_ROW).into()), &turned);
        }
    }
}

/// Tiles in shared memory that one warp fills and others read, one after the other and round again.
///
/// Each has two barriers: *full* completes when its bytes have come, *empty* when every reading warp is done with it. CTAs of a
/// cluster may fill each other's tiles: they go round together.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// The address of the first tile.
    pub tiles: Reg<U32>,
    /// The address of the first barrier; all the full ones, then all the empty ones.
    pub barriers: Reg<U32>,
    /// Bytes from one tile to the next.
    pub step: u32,
    /// How many tiles there are.
    pub stages: u32,
    /// CTAs of the cluster that fill each other's tiles: a tile is free when the warps of all of them are done with theirs.
    pub ctas: u32,
}

/// Bytes of a barrier in shared memory.
pub const BARRIER: u32 = 8;

/// Where a warp stands in a ring: which tile, and how often it has been round, modulo 2.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    stage: Reg<U32>,
    round: Reg<U32>,
}

impl Cursor {
    /// At the first tile.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder) -> Self {
        Self { stage: k.mov(0), round: k.mov(0) }
    }
}

impl Ring {
    /// A ring of `stages` tiles of `step` bytes that the CTA itself fills, and its barriers, which `2 * stages` of them follow
    /// each other.
    pub fn new(tiles: Reg<U32>, barriers: Reg<U32>, step: u32, stages: u32) -> Self {
        Self { tiles, barriers, step, stages, ctas: 1 }
    }

    /// Prepares the barriers, for so many threads that say a tile is there and so many warps of each CTA that say they are done
    /// with it; one thread of the CTA does, before any other uses them.
    #[track_caller]
    pub fn init(&self, k: &mut KernelBuilder, writers: u32, readers: u32) {
        k.at(Location::caller(), |k| {
            for stage in 0..self.stages {
                k.mbarrier_init(Pointer::at(self.barriers).offset((BARRIER * stage).into()), writers);
                let empty = Pointer::at(self.barriers).offset((BARRIER * (self.stages + stage)).into());
                k.mbarrier_init(empty, readers * self.ctas);
            }
        });
    }

    /// The address of the tile at the cursor.
    #[track_caller]
    pub fn tile(&self, k: &mut KernelBuilder, at: Cursor) -> Reg<U32> {
        k.mad(at.stage, self.step, self.tiles)
    }

    /// The descriptor of the tile at the cursor, from that of the first.
    #[track_caller]
    pub fn descriptor(&self, k: &mut KernelBuilder, at: Cursor, first: Reg<U64>) -> Reg<U64> {
        let offset = k.mul_wide(at.stage, self.step >> 4);
        k.add(first, offset)
    }

    /// The address of the cursor's full barrier.
    #[track_caller]
    pub fn full(&self, k: &mut KernelBuilder, at: Cursor) -> Reg<U32> {
        k.mad(at.stage, BARRIER, self.barriers)
    }

    /// Waits until the tile has come.
    #[track_caller]
    pub fn wait_full(&self, k: &mut KernelBuilder, at: Cursor) {
        k.at(Location::caller(), |k| {
            let full = self.full(k, at);
            k.mbarrier_wait(Pointer::at(full), at.round);
        });
    }

    /// Waits until the tile may be filled, which the first time round it may, and expects `bytes` to come.
    /// Returns the barrier they are to complete on.
    #[track_caller]
    pub fn begin_filling(&self, k: &mut KernelBuilder, at: Cursor, bytes: u32) -> Reg<U32> {
        k.at(Location::caller(), |k| {
            let full = self.wait_empty(k, at);
            k.mbarrier_arrive_expect(Pointer::at(full), bytes);
            full
        })
    }

    /// Waits until the tile may be filled. Returns the barrier that says it is.
    #[track_caller]
    pub fn wait_empty(&self, k: &mut KernelBuilder, at: Cursor) -> Reg<U32> {
        k.at(Location::caller(), |k| {
            let full = self.full(k, at);
            let before = k.xor(at.round, 1);
            k.mbarrier_wait(self.empty(full), before);
            full
        })
    }

    /// Says that this thread's part of a tile is there.
    #[track_caller]
    pub fn fill(&self, k: &mut KernelBuilder, at: Cursor) {
        k.at(Location::caller(), |k| {
            let full = self.full(k, at);
            k.mbarrier_arrive(Pointer::at(full));
        });
    }

    /// Says that this warp's part of a tile, which its own stores filled, is there for matrix instructions.
    #[track_caller]
    pub fn fill_part(&self, k: &mut KernelBuilder, at: Cursor, leader: Reg<Pred>) {
        k.at(Location::caller(), |k| {
            let full = self.full(k, at);
            k.fence_proxy_async();
            k.bar_warp_sync();
            k.when(leader, |k| k.mbarrier_arrive(Pointer::at(full)));
        });
    }

    /// Says that this warp is done with the tile, to every CTA that fills it.
    #[track_caller]
    pub fn release(&self, k: &mut KernelBuilder, at: Cursor, leader: impl Into<ptx::Condition>) {
        let leader = leader.into();
        k.at(Location::caller(), |k| {
            let full = self.full(k, at);
            if self.ctas == 1 {
                let empty = self.empty(full);
                return k.when(leader, |k| k.mbarrier_arrive(empty));
            }
            for rank in 0..self.ctas {
                let there = k.address_in_cta(full, rank);
                let empty = self.empty(there);
                k.when(leader, |k| k.mbarrier_arrive_in_cluster(empty));
            }
        });
    }

    fn empty<S: ptx::StateSpace<Address = U32>>(&self, full: Reg<U32>) -> Pointer<S> {
        Pointer::at(full).offset((BARRIER * self.stages).into())
    }

    /// Moves the cursor to the next tile where the condition holds.
    #[track_caller]
    pub fn advance_if(&self, k: &mut KernelBuilder, at: Cursor, condition: Reg<Pred>) {
        k.at(Location::caller(), |k| {
            let step = k.selp(1u32, 0u32, condition);
            if self.stages == 1 {
                return k.xor_to(at.round, at.round, step);
            }
            k.add_to(at.stage, at.stage, step);
            self.wrap(k, at);
        });
    }

    /// Moves the cursor to the next tile.
    #[track_caller]
    pub fn advance(&self, k: &mut KernelBuilder, at: Cursor) {
        k.at(Location::caller(), |k| {
            if self.stages == 1 {
                return k.xor_to(at.round, at.round, 1);
            }
            k.add_to(at.stage, at.stage, 1);
            self.wrap(k, at);
        });
    }

    fn wrap(&self, k: &mut KernelBuilder, at: Cursor) {
        let over = k.setp(ptx::Compare::Eq, at.stage, self.stages);
        k.when(over, |k| {
            k.mov_to(at.stage, 0);
        });
        k.when(over, |k| k.xor_to(at.round, at.round, 1));
    }
}

/// Warpgroups that take turns: while one has the tensor cores, the others compute on what theirs gave.
///
/// Each waits at a named barrier of its own, at which the one before it arrives.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    own: Reg<U32>,
    next: Reg<U32>,
    groups: u32,
    group: Reg<U32>,
}

/// Named barriers before the turns' own: the CTA's.
const FIRST_TURN: u32 = 1;

impl Turns {
    /// The turns of `groups` warpgroups, this one being `group`; the first may begin. None when there is but one group.
    #[track_caller]
    pub fn new(k: &mut KernelBuilder, group: Reg<U32>, groups: u32) -> Option<Self> {
        (groups > 1).then(|| {
            k.at(Location::caller(), |k| {
                let own = k.add(group, FIRST_TURN);
                let last = k.setp(ptx::Compare::Eq, group, groups - 1);
                let next = k.add(group, FIRST_TURN + 1);
                k.when(last, |k| k.mov_to(next, FIRST_TURN));
                k.when(last, |k| k.bar_arrive(FIRST_TURN, 2 * WARPGROUP));
                Self { own, next, groups, group }
            })
        })
    }

    /// Waits for this warpgroup's turn.
    #[track_caller]
    pub fn begin(&self, k: &mut KernelBuilder) {
        k.bar_sync_count(self.own, 2 * WARPGROUP);
    }

    /// Hands over.
    #[track_caller]
    pub fn end(&self, k: &mut KernelBuilder) {
        k.bar_arrive(self.next, 2 * WARPGROUP);
    }

    /// After the last turn: the first warpgroup takes what the last one handed over, so that no barrier is left half full.
    #[track_caller]
    pub fn finish(&self, k: &mut KernelBuilder) {
        k.at(Location::caller(), |k| {
            let _ = self.groups;
            let first = k.setp(ptx::Compare::Eq, self.group, 0);
            k.if_(first, |k| self.begin(k));
        });
    }
}
