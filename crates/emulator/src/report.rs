//! What a run counted.

use std::ops::AddAssign;

use ptx::{Kernel, Modifier, Opcode};
use serde::{Deserialize, Serialize};

use crate::tensor::TensorWork;

/// At which level accesses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// As the PTX states them.
    Ptx,
    /// After the merge of neighbouring narrow accesses that `ptxas` performs (modelled).
    Merged,
}

impl Level {
    /// The name records carry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ptx => "ptx",
            Self::Merged => "merged",
        }
    }
}

/// What one instruction of the kernel did over all warps that ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstructionCounters {
    /// Warps that executed it, lanes all masked off included.
    pub executions: u64,
    /// Lanes that were active in those executions, summed.
    pub active_lanes: u64,
    /// Accesses to global or shared memory; an execution with no active lane is none. Zero for the followers of a merged access.
    pub requests: u64,
    /// Distinct 32-byte sectors of global memory, summed over requests.
    pub sectors: u64,
    /// The fewest sectors that many bytes could have taken, summed over requests.
    pub sectors_ideal: u64,
    /// Passes through the shared-memory banks, summed over requests; of an atomic on 16 bits of global memory, rounds of the loop of
    /// compare and swap that it becomes.
    pub wavefronts: u64,
    /// The passes that the access width alone demands.
    pub wavefronts_ideal: u64,
    /// Bytes that bulk and tensor copies move.
    pub bytes: u64,
}

impl AddAssign for InstructionCounters {
    fn add_assign(&mut self, other: Self) {
        self.executions += other.executions;
        self.active_lanes += other.active_lanes;
        self.requests += other.requests;
        self.sectors += other.sectors;
        self.sectors_ideal += other.sectors_ideal;
        self.wavefronts += other.wavefronts;
        self.wavefronts_ideal += other.wavefronts_ideal;
        self.bytes += other.bytes;
    }
}

impl InstructionCounters {
    /// What a part of the requests counts, where all count alike.
    pub fn of_requests(self, requests: u64) -> Self {
        let part = |n: u64| (u128::from(n) * u128::from(requests) / u128::from(self.requests.max(1))) as u64;
        Self {
            requests: part(self.requests),
            sectors: part(self.sectors),
            sectors_ideal: part(self.sectors_ideal),
            wavefronts: part(self.wavefronts),
            wavefronts_ideal: part(self.wavefronts_ideal),
            bytes: part(self.bytes),
            ..self
        }
    }

    /// What `times` executions count that each count this.
    pub(crate) fn times(self, times: u64) -> Self {
        Self {
            executions: self.executions * times,
            active_lanes: self.active_lanes * times,
            requests: self.requests * times,
            sectors: self.sectors * times,
            sectors_ideal: self.sectors_ideal * times,
            wavefronts: self.wavefronts * times,
            wavefronts_ideal: self.wavefronts_ideal * times,
            bytes: self.bytes * times,
        }
    }
}

/// Bytes between the SMs and memory. Of every launch: `unique <= dram <= requested`, each way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Distinct sectors read, in bytes.
    pub unique_read: u64,
    /// Distinct sectors written, in bytes.
    pub unique_written: u64,
    /// Distinct sectors each CTA reads, in bytes, summed over CTAs.
    pub per_cta_read: u64,
    /// Distinct sectors each CTA writes, in bytes, summed over CTAs.
    pub per_cta_written: u64,
    /// Sectors of all load requests, in bytes.
    pub requested_read: u64,
    /// Sectors of all store requests, in bytes.
    pub requested_written: u64,
}

/// A warp's addresses in one watched access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// By lane, when this shape was first met; of no meaning where the lane is not active.
    pub addresses: [u64; 32],
    /// A bit per lane that takes part.
    pub active: u32,
    /// Executions whose addresses differ from these by a multiple of 128 bytes in all lanes alike.
    pub executions: u64,
}

impl Shape {
    /// The lanes that take part.
    pub fn lanes(&self) -> impl Iterator<Item = usize> {
        let active = self.active;
        (0..32).filter(move |lane| active >> lane & 1 == 1)
    }

    /// Whether the addresses differ from another's by a multiple of 128 bytes in all lanes alike.
    pub fn is_like(&self, other: &Self) -> bool {
        let first = self.active.trailing_zeros() as usize % 32;
        let apart = self.addresses[first].wrapping_sub(other.addresses[first]);
        let alike = |lane: usize| self.addresses[lane].wrapping_sub(other.addresses[lane]) == apart;
        self.active == other.active && apart.is_multiple_of(128) && self.lanes().all(alike)
    }
}

/// What a machine instruction that a watched one becomes accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes from the watched instruction's own address.
    pub offset: i32,
    /// Bytes per lane.
    pub bytes: u32,
}

/// The addresses that an instruction named in [`Options::watch`](crate::Options::watch) accessed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// Its position in [`Kernel::instructions`].
    pub position: usize,
    /// Bytes per lane as PTX states it.
    pub bytes: u32,
    /// What is accessed in its place after the modelled merge; nothing where another instruction's access does it.
    pub merged: Vec<Part>,
    /// In the order they were met, first those of the first CTA; only the first 64 and the latest are kept.
    pub shapes: Vec<Shape>,
}

/// The counters of one execution of a launch, or of the part of it that was run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// By position in [`Kernel::instructions`], as the PTX states the accesses.
    pub ptx: Vec<InstructionCounters>,
    /// The same after the modelled merge.
    pub merged: Vec<InstructionCounters>,
    /// Global memory.
    pub traffic: Traffic,
    /// CTAs that were executed.
    pub ctas_run: u64,
    /// CTAs of the launch. Counters times `ctas_total / ctas_run` are those of the whole launch, exactly where all CTAs do equal work.
    pub ctas_total: u64,
    /// Registers live at once, at most: what a register allocator cannot do without.
    pub live_registers: u32,
    /// The accesses that were watched, by position.
    pub watched: Vec<Watched>,
    /// Whether the search for races had to forget or leave out nothing, and no atomic on global memory met an access that nothing
    /// orders and that it must not be exchanged with: then there is no race under any schedule, where the order in which threads
    /// synchronise does not depend on it.
    pub races_complete: bool,
}

/// Totals under the names that records use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the names are those of the interchange format")]
pub struct Counters {
    pub warp_instructions: u64,
    pub thread_instructions: u64,
    pub global_load_requests: u64,
    pub global_load_sectors: u64,
    pub global_store_requests: u64,
    pub global_store_sectors: u64,
    pub global_atomic_requests: u64,
    pub global_atomic_sectors: u64,
    pub shared_load_instructions: u64,
    pub shared_load_wavefronts: u64,
    pub shared_load_wavefronts_ideal: u64,
    pub shared_load_bank_conflicts: u64,
    pub shared_store_instructions: u64,
    pub shared_store_wavefronts: u64,
    pub shared_store_wavefronts_ideal: u64,
    pub shared_store_bank_conflicts: u64,
    pub shared_atomic_instructions: u64,
    pub shared_atomic_wavefronts: u64,
    pub shared_atomic_wavefronts_ideal: u64,
    pub cp_async_instructions: u64,
    pub bulk_load_requests: u64,
    pub bulk_load_sectors: u64,
    pub bulk_load_bytes: u64,
    pub bulk_store_requests: u64,
    pub bulk_store_sectors: u64,
    pub bulk_store_bytes: u64,
    pub ldmatrix_instructions: u64,
    pub stmatrix_instructions: u64,
    pub mma_instructions: u64,
    pub wgmma_instructions: u64,
    pub tensor_flops: u64,
}

/// What kind of memory access an instruction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `ld.global`, or a generic load.
    GlobalLoad,
    /// `st.global`, or a generic store.
    GlobalStore,
    /// An atomic or a reduction on global memory, or a generic one.
    GlobalAtomic,
    /// `ld.shared`.
    SharedLoad,
    /// `st.shared`.
    SharedStore,
    /// An atomic or a reduction on shared memory.
    SharedAtomic,
    /// `cp.async`: reads global memory, writes shared memory.
    Copy,
    /// A bulk or tensor copy to shared memory. These go past the load and store units, and their counters are their own.
    BulkLoad,
    /// A bulk or tensor copy, or a reduction, from shared to global memory.
    BulkStore,
    /// `ldmatrix`: its wavefronts are those of shared loads, its requests are counted apart, as Nsight Compute does.
    MatrixLoad,
    /// `stmatrix`, likewise.
    MatrixStore,
}

impl Access {
    /// What an instruction accesses, if global or shared memory.
    pub fn of(instruction: &ptx::Instruction) -> Option<Self> {
        let shared = instruction.has(Modifier::Shared)
            || instruction.has(Modifier::SharedCta)
            || instruction.has(Modifier::SharedCluster);
        let other = [Modifier::Param, Modifier::ParamEntry, Modifier::ParamFunc, Modifier::Const, Modifier::Local];
        let bulk = instruction.has(Modifier::Bulk)
            || instruction.has(Modifier::Async) && instruction.opcode() != Opcode::CpAsync;
        match instruction.opcode() {
            Opcode::CpAsync if instruction.has(Modifier::BulkGroup) => Some(Self::BulkStore),
            Opcode::CpAsync | Opcode::St | Opcode::Red if bulk => {
                instruction.has(Modifier::CompleteTxBytes).then_some(Self::BulkLoad)
            }
            Opcode::Ld if shared => Some(Self::SharedLoad),
            Opcode::St if shared => Some(Self::SharedStore),
            Opcode::Atom | Opcode::Red if shared => Some(Self::SharedAtomic),
            Opcode::Ld | Opcode::St if other.iter().any(|&space| instruction.has(space)) => None,
            Opcode::Ld => Some(Self::GlobalLoad),
            Opcode::St => Some(Self::GlobalStore),
            Opcode::Atom | Opcode::Red => Some(Self::GlobalAtomic),
            Opcode::CpAsync if shared => Some(Self::Copy),
            Opcode::Ldmatrix => Some(Self::MatrixLoad),
            Opcode::Stmatrix => Some(Self::MatrixStore),
            _ => None,
        }
    }

    /// Whether its lanes access global memory, each at an address of its own.
    pub const fn is_global(self) -> bool {
        matches!(self, Self::GlobalLoad | Self::GlobalStore | Self::GlobalAtomic | Self::Copy)
    }

    /// Whether its lanes access shared memory, each at an address of its own.
    pub const fn is_shared(self) -> bool {
        matches!(
            self,
            Self::SharedLoad
                | Self::SharedStore
                | Self::SharedAtomic
                | Self::MatrixLoad
                | Self::MatrixStore
                | Self::Copy
        )
    }
}

/// What one source line caused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineCounters {
    /// The file as the kernel names it; empty when the instructions have no location.
    pub file: String,
    /// Counted from 1; 0 when unknown.
    pub line: u32,
    /// What its instructions did.
    pub counters: Counters,
}

impl Report {
    /// The per-instruction counters of a level.
    pub fn at(&self, level: Level) -> &[InstructionCounters] {
        match level {
            Level::Ptx => &self.ptx,
            Level::Merged => &self.merged,
        }
    }

    /// Totals of the CTAs that were run. `kernel` is the one that ran.
    pub fn counters(&self, kernel: &Kernel, level: Level) -> Counters {
        let mut total = Counters::default();
        for (instruction, counted) in kernel.instructions().zip(self.at(level)) {
            total.count(instruction, counted);
        }
        total
    }

    /// Totals scaled from the CTAs that were run to the whole launch.
    pub fn scaled(&self, kernel: &Kernel, level: Level) -> Counters {
        self.counters(kernel, level).scaled(self.ctas_total, self.ctas_run)
    }

    /// Totals per source line (see [`Kernel::user_location`]), by file and line.
    pub fn by_line(&self, kernel: &Kernel, level: Level) -> Vec<LineCounters> {
        let mut lines = std::collections::BTreeMap::<(u32, u32), Counters>::new();
        for (instruction, counted) in kernel.instructions().zip(self.at(level)) {
            let place =
                kernel.user_location(instruction).map_or((u32::MAX, 0), |location| (location.file, location.line));
            lines.entry(place).or_default().count(instruction, counted);
        }
        let file = |file: u32| kernel.files.get(file as usize).cloned().unwrap_or_default();
        lines.into_iter().map(|((index, line), counters)| LineCounters { file: file(index), line, counters }).collect()
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.warp_instructions += other.warp_instructions;
        self.thread_instructions += other.thread_instructions;
        self.global_load_requests += other.global_load_requests;
        self.global_load_sectors += other.global_load_sectors;
        self.global_store_requests += other.global_store_requests;
        self.global_store_sectors += other.global_store_sectors;
        self.global_atomic_requests += other.global_atomic_requests;
        self.global_atomic_sectors += other.global_atomic_sectors;
        self.shared_load_instructions += other.shared_load_instructions;
        self.shared_load_wavefronts += other.shared_load_wavefronts;
        self.shared_load_wavefronts_ideal += other.shared_load_wavefronts_ideal;
        self.shared_load_bank_conflicts += other.shared_load_bank_conflicts;
        self.shared_store_instructions += other.shared_store_instructions;
        self.shared_store_wavefronts += other.shared_store_wavefronts;
        self.shared_store_wavefronts_ideal += other.shared_store_wavefronts_ideal;
        self.shared_store_bank_conflicts += other.shared_store_bank_conflicts;
        self.shared_atomic_instructions += other.shared_atomic_instructions;
        self.shared_atomic_wavefronts += other.shared_atomic_wavefronts;
        self.shared_atomic_wavefronts_ideal += other.shared_atomic_wavefronts_ideal;
        self.cp_async_instructions += other.cp_async_instructions;
        self.bulk_load_requests += other.bulk_load_requests;
        self.bulk_load_sectors += other.bulk_load_sectors;
        self.bulk_load_bytes += other.bulk_load_bytes;
        self.bulk_store_requests += other.bulk_store_requests;
        self.bulk_store_sectors += other.bulk_store_sectors;
        self.bulk_store_bytes += other.bulk_store_bytes;
        self.ldmatrix_instructions += other.ldmatrix_instructions;
        self.stmatrix_instructions += other.stmatrix_instructions;
        self.mma_instructions += other.mma_instructions;
        self.wgmma_instructions += other.wgmma_instructions;
        self.tensor_flops += other.tensor_flops;
    }
}

impl Counters {
    fn count(&mut self, instruction: &ptx::Instruction, counted: &InstructionCounters) {
        self.warp_instructions += counted.executions;
        self.thread_instructions += counted.active_lanes;
        if let Some(work) = TensorWork::of(instruction) {
            // Lanes masked off together do nothing.
            let executions = counted.active_lanes / 32;
            self.tensor_flops += work.flops * executions;
            match instruction.opcode() {
                Opcode::Mma => self.mma_instructions += counted.executions,
                _ => self.wgmma_instructions += counted.executions,
            }
        }
        let access = Access::of(instruction);
        match access {
            Some(Access::GlobalLoad) => {
                self.global_load_requests += counted.requests;
                self.global_load_sectors += counted.sectors;
            }
            Some(Access::GlobalStore) => {
                self.global_store_requests += counted.requests;
                self.global_store_sectors += counted.sectors;
            }
            Some(Access::GlobalAtomic) => {
                self.global_atomic_requests += counted.requests.max(counted.wavefronts);
                self.global_atomic_sectors += counted.sectors;
                // There is none on 16 bits alone: it is a loop that reads a word, then compares and swaps it until nobody came between.
                if counted.wavefronts > 0 {
                    self.global_load_requests += counted.requests;
                    self.global_load_sectors += counted.sectors;
                }
            }
            Some(Access::SharedLoad | Access::MatrixLoad) => {
                match access {
                    Some(Access::MatrixLoad) => self.ldmatrix_instructions += counted.requests,
                    _ => self.shared_load_instructions += counted.requests,
                }
                self.shared_load_wavefronts += counted.wavefronts;
                self.shared_load_wavefronts_ideal += counted.wavefronts_ideal;
                self.shared_load_bank_conflicts += counted.wavefronts - counted.wavefronts_ideal;
            }
            Some(Access::SharedStore | Access::MatrixStore) => {
                match access {
                    Some(Access::MatrixStore) => self.stmatrix_instructions += counted.requests,
                    _ => self.shared_store_instructions += counted.requests,
                }
                self.shared_store_wavefronts += counted.wavefronts;
                self.shared_store_wavefronts_ideal += counted.wavefronts_ideal;
                self.shared_store_bank_conflicts += counted.wavefronts - counted.wavefronts_ideal;
            }
            Some(Access::SharedAtomic) => {
                self.shared_atomic_instructions += counted.requests;
                self.shared_atomic_wavefronts += counted.wavefronts;
                self.shared_atomic_wavefronts_ideal += counted.wavefronts_ideal;
            }
            Some(Access::Copy) => {
                self.cp_async_instructions += counted.executions;
                self.global_load_requests += counted.requests;
                self.global_load_sectors += counted.sectors;
            }
            Some(Access::BulkLoad) => {
                self.bulk_load_requests += counted.requests;
                self.bulk_load_sectors += counted.sectors;
                self.bulk_load_bytes += counted.bytes;
            }
            Some(Access::BulkStore) => {
                self.bulk_store_requests += counted.requests;
                self.bulk_store_sectors += counted.sectors;
                self.bulk_store_bytes += counted.bytes;
            }
            None => {}
        }
    }

    /// Each counter with its name.
    pub const fn named(&self) -> [(&'static str, u64); 31] {
        [
            ("warp_instructions", self.warp_instructions),
            ("thread_instructions", self.thread_instructions),
            ("global_load_requests", self.global_load_requests),
            ("global_load_sectors", self.global_load_sectors),
            ("global_store_requests", self.global_store_requests),
            ("global_store_sectors", self.global_store_sectors),
            ("global_atomic_requests", self.global_atomic_requests),
            ("global_atomic_sectors", self.global_atomic_sectors),
            ("shared_load_instructions", self.shared_load_instructions),
            ("shared_load_wavefronts", self.shared_load_wavefronts),
            ("shared_load_wavefronts_ideal", self.shared_load_wavefronts_ideal),
            ("shared_load_bank_conflicts", self.shared_load_bank_conflicts),
            ("shared_store_instructions", self.shared_store_instructions),
            ("shared_store_wavefronts", self.shared_store_wavefronts),
            ("shared_store_wavefronts_ideal", self.shared_store_wavefronts_ideal),
            ("shared_store_bank_conflicts", self.shared_store_bank_conflicts),
            ("shared_atomic_instructions", self.shared_atomic_instructions),
            ("shared_atomic_wavefronts", self.shared_atomic_wavefronts),
            ("shared_atomic_wavefronts_ideal", self.shared_atomic_wavefronts_ideal),
            ("cp_async_instructions", self.cp_async_instructions),
            ("bulk_load_requests", self.bulk_load_requests),
            ("bulk_load_sectors", self.bulk_load_sectors),
            ("bulk_load_bytes", self.bulk_load_bytes),
            ("bulk_store_requests", self.bulk_store_requests),
            ("bulk_store_sectors", self.bulk_store_sectors),
            ("bulk_store_bytes", self.bulk_store_bytes),
            ("ldmatrix_instructions", self.ldmatrix_instructions),
            ("stmatrix_instructions", self.stmatrix_instructions),
            ("mma_instructions", self.mma_instructions),
            ("wgmma_instructions", self.wgmma_instructions),
            ("tensor_flops", self.tensor_flops),
        ]
    }

    /// Each counter times `numerator / denominator`, rounded down.
    pub fn scaled(self, numerator: u64, denominator: u64) -> Self {
        let scale = |n: u64| (u128::from(n) * u128::from(numerator) / u128::from(denominator.max(1))) as u64;
        Self {
            warp_instructions: scale(self.warp_instructions),
            thread_instructions: scale(self.thread_instructions),
            global_load_requests: scale(self.global_load_requests),
            global_load_sectors: scale(self.global_load_sectors),
            global_store_requests: scale(self.global_store_requests),
            global_store_sectors: scale(self.global_store_sectors),
            global_atomic_requests: scale(self.global_atomic_requests),
            global_atomic_sectors: scale(self.global_atomic_sectors),
            shared_load_instructions: scale(self.shared_load_instructions),
            shared_load_wavefronts: scale(self.shared_load_wavefronts),
            shared_load_wavefronts_ideal: scale(self.shared_load_wavefronts_ideal),
            shared_load_bank_conflicts: scale(self.shared_load_bank_conflicts),
            shared_store_instructions: scale(self.shared_store_instructions),
            shared_store_wavefronts: scale(self.shared_store_wavefronts),
            shared_store_wavefronts_ideal: scale(self.shared_store_wavefronts_ideal),
            shared_store_bank_conflicts: scale(self.shared_store_bank_conflicts),
            shared_atomic_instructions: scale(self.shared_atomic_instructions),
            shared_atomic_wavefronts: scale(self.shared_atomic_wavefronts),
            shared_atomic_wavefronts_ideal: scale(self.shared_atomic_wavefronts_ideal),
            cp_async_instructions: scale(self.cp_async_instructions),
            bulk_load_requests: scale(self.bulk_load_requests),
            bulk_load_sectors: scale(self.bulk_load_sectors),
            bulk_load_bytes: scale(self.bulk_load_bytes),
            bulk_store_requests: scale(self.bulk_store_requests),
            bulk_store_sectors: scale(self.bulk_store_sectors),
            bulk_store_bytes: scale(self.bulk_store_bytes),
            ldmatrix_instructions: scale(self.ldmatrix_instructions),
            stmatrix_instructions: scale(self.stmatrix_instructions),
            mma_instructions: scale(self.mma_instructions),
            wgmma_instructions: scale(self.wgmma_instructions),
            tensor_flops: scale(self.tensor_flops),
        }
    }
}
