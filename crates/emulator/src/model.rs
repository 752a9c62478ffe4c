//! The time each pipe of a GPU would need for what a run counted, and the DRAM bytes behind an L2 cache.
//!
//! # Pipe times
//! A pipe's time is its work divided by what all multiprocessors together do per clock: no latency, no waiting of one
//! pipe for another. The largest time is the modelled limiter; the modelled time of a launch is that pipe's, stretched
//! by the tail where the pipe belongs to the multiprocessors. It is what the launch cannot be faster than, not a
//! prediction of how well it hides latency; occupancy stands beside it for that.
//!
//! The work of an instruction is that of the machine instructions `ptxas` makes of it. Most are one of one kind; those
//! that become several are listed in the `mix` function of this module's source, each read off `ptxas` 13.0 listings for
//! sm_75, sm_80 and sm_90 (the path taken by ordinary values; out-of-line slow paths are not counted). Moves between
//! registers, parameter loads and address-space conversions cost nothing: the assembler renames them away.
//!
//! # The tail
//! CTAs are dealt out whole, so the busiest multiprocessor runs `ceil(ctas / SMs)` of them where the average is
//! `ctas / SMs`. As the pipes are taken to be the limit, it does not matter how many of them are resident at a time.
//!
//! # DRAM
//! For each direction `unique <= DRAM <= requested`. Nothing is in L2 when a launch begins, so the first touch of a byte
//! goes to DRAM. Whether later ones do depends on what the CTAs resident at once touch. They are neighbours, share what
//! CTAs of the launch share on average, and hold at least what one CTA touches:
//! `footprint = max(resident * (unique_read + unique_written), per_cta_read + per_cta_written) / ctas`.
//!
//! - When the footprint fits into L2, all later touches hit: DRAM = unique.
//! - When it does not, resident CTAs still fetch once what they share, as they run side by side, but the CTAs that take
//!   their places fetch it again: `max(unique, per_cta / resident)`. What one CTA touches repeatedly misses every time:
//!   `requested - per_cta` more.
//!
//! L1 is not modelled: it would serve repeated touches of a CTA that are close in time.

use arch::{Gpu, Occupancy, PipeRates, WARP_THREADS};
use ptx::{Instruction, Kernel, Modifier, Opcode, Type};

use crate::{Access, Report, TensorWork};

/// A throughput limit of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pipe {
    /// Instruction issue by the schedulers.
    Issue,
    /// f32 add, multiply, multiply-add; 32-bit integer multiply.
    Fma,
    /// f16 and bf16 arithmetic, and their widening to f32.
    Half,
    /// Integer addition, logic, shifts, comparison, selection, minimum and maximum.
    Alu,
    /// Exponential, reciprocal, logarithm, sine, tanh; conversions between integers and floats.
    Special,
    /// Products of matrices on the tensor cores.
    Tensor,
    /// Wavefronts of shared memory, and shuffles, which use the same crossbar.
    Shared,
    /// Sectors between L1 and the multiprocessor.
    L1,
    /// Sectors between L2 and the multiprocessors.
    L2,
    /// Bytes between L2 and device memory.
    Dram,
}

impl Pipe {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Issue,
        Self::Fma,
        Self::Half,
        Self::Alu,
        Self::Special,
        Self::Tensor,
        Self::Shared,
        Self::L1,
        Self::L2,
        Self::Dram,
    ];

    /// The name records carry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Issue => "issue",
            Self::Fma => "fma",
            Self::Half => "half",
            Self::Alu => "alu",
            Self::Special => "special",
            Self::Tensor => "tensor",
            Self::Shared => "shared",
            Self::L1 => "l1",
            Self::L2 => "l2",
            Self::Dram => "dram",
        }
    }

    /// Whether each multiprocessor has its own, so that the tail stretches its time.
    pub const fn of_multiprocessor(self) -> bool {
        !matches!(self, Self::L2 | Self::Dram)
    }
}

impl std::fmt::Display for Pipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Issue => "instruction issue",
            Self::Fma => "FMA pipe",
            Self::Half => "half-precision pipe",
            Self::Alu => "ALU",
            Self::Special => "special functions",
            Self::Tensor => "tensor cores",
            Self::Shared => "shared memory",
            Self::L1 => "L1",
            Self::L2 => "L2",
            Self::Dram => "DRAM",
        })
    }
}

/// What one pipe has to do in a launch, and how long that takes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PipeTime {
    /// Which.
    pub pipe: Pipe,
    /// How much, of the whole launch: warp instructions (issue), results of single threads (FMA, half, ALU, special
    /// functions), operations of which a multiply-add is two (tensor), wavefronts (shared), bytes (L1, L2, DRAM).
    pub work: f64,
    /// Without the tail.
    pub seconds: f64,
}

/// Bytes between L2 and DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramBytes {
    /// Read.
    pub read: u64,
    /// Written.
    pub written: u64,
}

/// What a launch would take on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Each pipe that the GPU's rates are known of, in the order of [`Pipe::ALL`].
    pub pipes: Vec<PipeTime>,
    /// The pipe that takes longest, the tail included.
    pub limiter: Pipe,
    /// What the limiter takes, the tail included.
    pub seconds: f64,
    /// `ceil(ctas / SMs) * SMs / ctas`: how much longer the busiest multiprocessor works than the average one.
    pub tail: f64,
    /// CTAs divided by those resident at once: 1.2 means that a second wave is a fifth full.
    pub waves: f64,
    /// Modelled DRAM traffic.
    pub dram: DramBytes,
}

impl Model {
    /// The time of a pipe, tail included; `None` where the GPU's rate is not known.
    pub fn seconds_of(&self, pipe: Pipe) -> Option<f64> {
        let time = self.pipes.iter().find(|time| time.pipe == pipe)?;
        Some(time.seconds * if pipe.of_multiprocessor() { self.tail } else { 1.0 })
    }
}

/// What a launch of `kernel`, of which `report` counted all CTAs or equal ones, would take on `gpu`.
///
/// `occupancy` says how many CTAs one multiprocessor holds.
pub fn model(kernel: &Kernel, report: &Report, gpu: &Gpu, occupancy: &Occupancy) -> Model {
    let scale = report.ctas_total as f64 / report.ctas_run.max(1) as f64;
    let mut total = Work::default();
    works(kernel, report, gpu).for_each(|work| total.add(&work));
    let dram = dram_bytes(report, gpu, occupancy);

    let sms = f64::from(gpu.sm_count) * gpu.clock_hz();
    let mut pipes = Vec::new();
    for pipe in Pipe::ALL {
        let (work, seconds) = match (pipe, gpu.l2_bandwidth()) {
            (Pipe::Dram, _) => {
                let bytes = (dram.read + dram.written) as f64;
                (bytes, bytes / gpu.memory_bandwidth as f64)
            }
            (Pipe::L2, None) => continue,
            (Pipe::Tensor, _) if total.tensor == 0.0 || total.unrated => continue,
            (Pipe::L2, Some(bandwidth)) => (total.sector_bytes * scale, total.sector_bytes * scale / bandwidth),
            _ => (total.on(pipe) * scale, total.clocks(pipe, &gpu.pipe_rates()) * scale / sms),
        };
        pipes.push(PipeTime { pipe, work, seconds });
    }

    let ctas = report.ctas_total.max(1);
    let sm_count = u64::from(gpu.sm_count.max(1));
    let tail = (ctas.div_ceil(sm_count) * sm_count) as f64 / ctas as f64;
    let waves = ctas as f64 / (sm_count * u64::from(occupancy.blocks_per_sm.max(1))) as f64;
    let stretched = |time: &PipeTime| time.seconds * if time.pipe.of_multiprocessor() { tail } else { 1.0 };
    let (limiter, seconds) = pipes
        .iter()
        .map(|time| (time.pipe, stretched(time)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or((Pipe::Issue, 0.0));
    Model { limiter, seconds, tail, waves, dram, pipes }
}

/// What each instruction has to do on a pipe, by position in [`Kernel::instructions`], of the whole launch, in the units of
/// [`PipeTime::work`]; for DRAM the bytes it requests, as what reaches DRAM is not known by instruction.
pub fn work_by_instruction(kernel: &Kernel, report: &Report, gpu: &Gpu, pipe: Pipe) -> Vec<f64> {
    let scale = report.ctas_total as f64 / report.ctas_run.max(1) as f64;
    works(kernel, report, gpu).map(|work| scale * work.on(pipe)).collect()
}

/// What the executions of each instruction have to do.
fn works<'a>(kernel: &'a Kernel, report: &'a Report, gpu: &'a Gpu) -> impl Iterator<Item = Work> + 'a {
    let counted = report.merged.iter().zip(&report.ptx);
    kernel.instructions().zip(counted).map(move |(instruction, (merged, ptx))| {
        // The followers of a merged access are gone from the instruction stream.
        let executed = merged.executions.saturating_sub(ptx.requests.saturating_sub(merged.requests));
        let mut work = Work::default();
        work.mix.add(mix(instruction, gpu), executed as f64);
        if let Some(product) = TensorWork::of(instruction) {
            work.tensor = product.flops as f64 * (ptx.active_lanes / u64::from(WARP_THREADS)) as f64;
            match product.rate(&gpu.pipe_rates().tensor) {
                Some(rate) => work.tensor_clocks = work.tensor / f64::from(rate),
                None => work.unrated = work.tensor > 0.0,
            }
        }
        let access = Access::of(instruction);
        if access.is_some_and(Access::is_global) {
            work.sector_bytes = 32.0 * merged.sectors as f64;
        }
        if access != Some(Access::GlobalAtomic) {
            work.wavefronts = merged.wavefronts as f64;
        }
        work
    })
}

/// What instructions have to do.
#[derive(Default)]
struct Work {
    mix: Mix,
    wavefronts: f64,
    sector_bytes: f64,
    /// Operations of tensor instructions, and the clocks of a multiprocessor that they take.
    tensor: f64,
    tensor_clocks: f64,
    /// Whether some of them have no rate that is known.
    unrated: bool,
}

impl Work {
    fn add(&mut self, other: &Self) {
        self.mix.add(other.mix, 1.0);
        self.wavefronts += other.wavefronts;
        self.sector_bytes += other.sector_bytes;
        self.tensor += other.tensor;
        self.tensor_clocks += other.tensor_clocks;
        self.unrated |= other.unrated;
    }

    /// On one pipe, in the units of [`PipeTime::work`].
    fn on(&self, pipe: Pipe) -> f64 {
        let (mix, lanes) = (&self.mix, f64::from(WARP_THREADS));
        match pipe {
            Pipe::Issue => mix.issue,
            Pipe::Fma => lanes * mix.fma,
            Pipe::Half => 2.0 * lanes * mix.half,
            Pipe::Alu => lanes * (mix.alu + mix.convert_packed),
            Pipe::Special => lanes * (mix.special + mix.exp2 + mix.convert),
            Pipe::Tensor => self.tensor,
            Pipe::Shared => self.wavefronts + mix.shuffle,
            Pipe::L1 | Pipe::L2 | Pipe::Dram => self.sector_bytes,
        }
    }

    /// Clocks that a pipe of one multiprocessor takes for it.
    fn clocks(&self, pipe: Pipe, rates: &PipeRates) -> f64 {
        let (mix, lanes) = (&self.mix, f64::from(WARP_THREADS));
        match pipe {
            Pipe::Issue => mix.issue / f64::from(rates.issue),
            Pipe::Fma => lanes * mix.fma / f64::from(rates.fma),
            Pipe::Half => 2.0 * lanes * mix.half / f64::from(rates.half),
            Pipe::Alu => {
                lanes * (mix.alu / f64::from(rates.alu) + mix.convert_packed / f64::from(rates.convert_packed))
            }
            Pipe::Special => {
                lanes
                    * (mix.special / f64::from(rates.special)
                        + mix.exp2 / f64::from(rates.exp2)
                        + mix.convert / f64::from(rates.convert))
            }
            Pipe::Tensor => self.tensor_clocks,
            // A warp shuffle takes one clock (CUDA Programming Guide, throughput table: 32 lanes a clock).
            Pipe::Shared => self.wavefronts / rates.shared_wavefronts + mix.shuffle,
            Pipe::L1 | Pipe::L2 | Pipe::Dram => self.sector_bytes / f64::from(rates.l1_bytes),
        }
    }
}

/// The module documentation's L2 model.
fn dram_bytes(report: &Report, gpu: &Gpu, occupancy: &Occupancy) -> DramBytes {
    let wide = u128::from;
    let traffic = &report.traffic;
    let run = wide(report.ctas_run.max(1));
    let total = wide(report.ctas_total);
    let resident = (wide(gpu.sm_count.into()) * wide(occupancy.blocks_per_sm.into())).min(total).max(1);
    let distinct = wide(traffic.unique_read) + wide(traffic.unique_written);
    let of_ctas = wide(traffic.per_cta_read) + wide(traffic.per_cta_written);
    let fits = (resident * distinct).max(of_ctas) / run <= wide(gpu.l2_bytes);
    let dram = |unique: u64, per_cta: u64, requested: u64| {
        let moved = if fits {
            wide(unique)
        } else {
            (wide(per_cta) / resident).max(wide(unique)) + wide(requested.saturating_sub(per_cta))
        };
        (moved * total / run) as u64
    };
    DramBytes {
        read: dram(traffic.unique_read, traffic.per_cta_read, traffic.requested_read),
        written: dram(traffic.unique_written, traffic.per_cta_written, traffic.requested_written),
    }
}

/// Warp instructions by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Mix {
    issue: f64,
    fma: f64,
    half: f64,
    alu: f64,
    special: f64,
    exp2: f64,
    convert: f64,
    convert_packed: f64,
    shuffle: f64,
}

impl Mix {
    const NOTHING: Self = Self {
        issue: 0.0,
        fma: 0.0,
        half: 0.0,
        alu: 0.0,
        special: 0.0,
        exp2: 0.0,
        convert: 0.0,
        convert_packed: 0.0,
        shuffle: 0.0,
    };

    fn add(&mut self, other: Self, times: f64) {
        self.issue += times * other.issue;
        self.fma += times * other.fma;
        self.half += times * other.half;
        self.alu += times * other.alu;
        self.special += times * other.special;
        self.exp2 += times * other.exp2;
        self.convert += times * other.convert;
        self.convert_packed += times * other.convert_packed;
        self.shuffle += times * other.shuffle;
    }

    /// Each of its instructions takes an issue slot.
    fn issued(self) -> Self {
        let Self { fma, half, alu, special, exp2, convert, convert_packed, shuffle, issue } = self;
        Self { issue: issue + fma + half + alu + special + exp2 + convert + convert_packed + shuffle, ..self }
    }
}

const fn fma(fma: f64) -> Mix {
    Mix { fma, ..Mix::NOTHING }
}

const fn alu(alu: f64) -> Mix {
    Mix { alu, ..Mix::NOTHING }
}

const fn half(half: f64) -> Mix {
    Mix { half, ..Mix::NOTHING }
}

const fn convert(convert: f64) -> Mix {
    Mix { convert, ..Mix::NOTHING }
}

const fn special(special: f64, fma: f64, alu: f64) -> Mix {
    Mix { special, fma, alu, ..Mix::NOTHING }
}

const SLOT: Mix = Mix { issue: 1.0, ..Mix::NOTHING };

/// The machine instructions of one PTX instruction.
fn mix(instruction: &Instruction, gpu: &Gpu) -> Mix {
    let ty = instruction.ty().unwrap_or(Type::B32);
    let ftz = instruction.has(Modifier::Ftz);
    let approx = instruction.has(Modifier::Approx);
    let wide = if ty.bits() == 64 { 2.0 } else { 1.0 };
    // 32-bit integer products run on 64 lanes also where f32 has 128 (CUDA Programming Guide, throughput table).
    let imad = f64::from(gpu.pipe_rates().fma) / 64.0;
    // f32 functions that do not flush subnormals scale their argument and result: compare, multiply, function, multiply.
    let scaled =
        |special: Mix| if ftz { special } else { Mix { fma: special.fma + 2.0, alu: special.alu + 1.0, ..special } };
    let arithmetic = |integer: Mix| match ty {
        Type::F32 => fma(1.0),
        Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 => half(1.0),
        // No rate for f64 is stated: it takes its slot alone.
        Type::F64 => SLOT,
        _ => integer,
    };
    let kinds = match instruction.opcode() {
        Opcode::Add | Opcode::Sub => arithmetic(alu(wide)),
        Opcode::Mul | Opcode::Mad if ty.bits() == 64 => arithmetic(Mix { fma: 3.0 * imad, alu: 1.0, ..Mix::NOTHING }),
        Opcode::Mul | Opcode::Mad | Opcode::Fma => arithmetic(fma(imad)),
        Opcode::Div if ty == Type::F32 => match (approx, instruction.has(Modifier::Full)) {
            (true, _) if ftz => special(1.0, 1.0, 0.0),
            (true, _) => special(1.0, 3.0, 3.0),
            (_, true) if ftz => special(1.0, 3.0, 3.0),
            (_, true) => special(1.0, 5.0, 4.0),
            _ => special(1.0, 5.0, 2.0),
        },
        Opcode::Div | Opcode::Rem => match ty.bits() {
            64 => Mix { special: 1.0, convert: 2.0, fma: 30.0 * imad, alu: 39.0, ..Mix::NOTHING },
            _ => {
                let sign = if ty.is_signed() { 7.0 } else { 0.0 };
                Mix { special: 1.0, convert: 2.0, fma: 4.0 * imad, alu: 11.0 + sign, ..Mix::NOTHING }
            }
        },
        Opcode::Rcp if approx => {
            if ftz {
                special(1.0, 0.0, 0.0)
            } else {
                special(1.0, 2.0, 4.0)
            }
        }
        Opcode::Rcp => special(1.0, 3.0, 4.0),
        Opcode::Sqrt if approx => scaled(special(1.0, 0.0, 0.0)),
        Opcode::Sqrt => special(1.0, 4.0, 3.0),
        Opcode::Rsqrt | Opcode::Lg2 => scaled(special(1.0, 0.0, 0.0)),
        Opcode::Ex2 => scaled(Mix { exp2: 1.0, ..Mix::NOTHING }),
        Opcode::Sin | Opcode::Cos => special(1.0, 1.0, 0.0),
        Opcode::Tanh => special(1.0, 0.0, 0.0),
        Opcode::Abs | Opcode::Neg | Opcode::Min | Opcode::Max | Opcode::Copysign => alu(wide),
        Opcode::And | Opcode::Or | Opcode::Xor | Opcode::Not | Opcode::Shl | Opcode::Shr | Opcode::Selp => alu(wide),
        Opcode::Shf | Opcode::Lop3 | Opcode::Prmt | Opcode::Setp | Opcode::Testp => alu(wide),
        Opcode::Bfe | Opcode::Bfi => alu(2.0 * wide),
        // FLO, POPC and BREV run on the special-function unit's lanes.
        Opcode::Bfind | Opcode::Brev | Opcode::Clz | Opcode::Popc => special(wide, 0.0, 0.0),
        Opcode::Cvt => conversion(instruction),
        Opcode::Mov => match instruction.operands() {
            [_, ptx::Operand::Special(_)] => SLOT,
            [_, ptx::Operand::Vector(parts)] if parts.len() > 1 && ty.bits() == 32 => alu(1.0),
            _ => Mix::NOTHING,
        },
        Opcode::Cvta => Mix::NOTHING,
        Opcode::Ld if Access::of(instruction).is_none() && !instruction.has(Modifier::Local) => Mix::NOTHING,
        Opcode::Shfl => Mix { shuffle: 1.0, ..Mix::NOTHING },
        _ => SLOT,
    };
    kinds.issued()
}

fn conversion(instruction: &Instruction) -> Mix {
    let types: Vec<Type> = instruction.types().collect();
    match types[..] {
        [Type::F16x2 | Type::Bf16x2, Type::F32] => Mix { convert_packed: 1.0, ..Mix::NOTHING },
        [Type::F32, Type::F16] => half(1.0),
        [Type::F32, Type::Bf16] | [Type::Tf32, Type::F32] => alu(1.0),
        [to, from] if to.is_float() || from.is_float() => convert(1.0),
        // Between integers: an extension or nothing.
        [to, from] if to.bits() > from.bits() && from.bits() < 32 => alu(1.0),
        _ => Mix::NOTHING,
    }
}

#[cfg(test)]
mod tests {
    use arch::{BlockResources, Sm, Target};
    use ptx::{Address, Bank, Base, Operand, Register, Statement, Version};

    use super::*;
    use crate::{InstructionCounters, Traffic};

    const F: Operand = Operand::Register(Register { bank: 0, index: 0 });

    fn kernel(instructions: Vec<Instruction>) -> Kernel {
        Kernel {
            banks: vec![Bank { prefix: "%f".into(), ty: Type::F32, count: Some(1) }],
            body: instructions.into_iter().map(Statement::Instruction).collect(),
            ..Kernel::new("k", Target::from(Sm::Sm75), Version { major: 7, minor: 8 })
        }
    }

    fn fma() -> Instruction {
        Instruction::new(Opcode::Fma, vec![Modifier::Rn, Type::F32.into()], vec![F; 4]).unwrap()
    }

    fn shared_load() -> Instruction {
        let address = Operand::Memory(Address { base: Base::Absolute, offset: 0 });
        Instruction::new(Opcode::Ld, vec![Modifier::Shared, Type::F32.into()], vec![F, address]).unwrap()
    }

    fn report(counted: Vec<InstructionCounters>, ctas_run: u64, ctas_total: u64) -> Report {
        let traffic = Traffic::default();
        let watched = Vec::new();
        let (live_registers, races_complete) = (32, true);
        let (ptx, merged) = (counted.clone(), counted);
        Report { ptx, merged, traffic, ctas_run, ctas_total, live_registers, watched, races_complete }
    }

    fn executed(executions: u64) -> InstructionCounters {
        InstructionCounters { executions, active_lanes: 32 * executions, ..Default::default() }
    }

    fn rtx2070() -> (&'static Gpu, Occupancy) {
        let gpu = Gpu::find("RTX 2070").unwrap();
        let block = BlockResources { threads: 128, registers: 72, dynamic_shared: 12288, ..Default::default() };
        (gpu, arch::occupancy(gpu.sm, &block).unwrap())
    }

    fn close(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 1e-9
    }

    /// The wavefronts of the article's v2 at d 32, loads and stores (`truth/rtx2070`, 20 times 95,453,184): at half a
    /// wavefront a clock on 36 multiprocessors of 1.62 GHz.
    #[test]
    fn wavefronts_take_the_shared_pipe_two_clocks_on_turing() {
        let (gpu, occupancy) = rtx2070();
        let wavefronts = 20 * 95_453_184;
        let counted = InstructionCounters { requests: 1, wavefronts, ..executed(1) };
        let model = model(&kernel(vec![shared_load()]), &report(vec![counted], 20480, 20480), gpu, &occupancy);
        assert_eq!(model.limiter, Pipe::Shared);
        // 568.9 CTAs for each multiprocessor, 569 for the busiest.
        assert!(close(model.tail, 569.0 * 36.0 / 20480.0));
        assert!(close(model.seconds, wavefronts as f64 * 2.0 / (36.0 * 1.62e9) * model.tail));
    }

    #[test]
    fn a_sampled_run_is_scaled() {
        let (gpu, occupancy) = rtx2070();
        let of = |run, total, executions| {
            model(&kernel(vec![fma()]), &report(vec![executed(executions)], run, total), gpu, &occupancy)
        };
        let (whole, part) = (of(3600, 3600, 3_600_000), of(36, 3600, 36_000));
        assert_eq!(whole, part);
        // 32 of 64 lanes a clock; 100 CTAs on each multiprocessor leave no tail.
        assert_eq!(whole.limiter, Pipe::Fma);
        assert!(close(whole.seconds, 3_600_000.0 * 0.5 / (36.0 * 1.62e9)));
    }

    #[test]
    fn followers_of_a_merged_load_take_no_issue_slot() {
        let (gpu, occupancy) = rtx2070();
        let load = InstructionCounters { requests: 10, wavefronts: 10, wavefronts_ideal: 10, ..executed(10) };
        let mut report = report(vec![load; 4], 36, 36);
        for follower in &mut report.merged[1..] {
            (follower.requests, follower.wavefronts, follower.wavefronts_ideal) = (0, 0, 0);
        }
        let model = model(&kernel(vec![shared_load(); 4]), &report, gpu, &occupancy);
        let issued = model.pipes.iter().find(|time| time.pipe == Pipe::Issue).unwrap();
        assert_eq!(issued.work, 10.0);
    }

    /// Ten waves of 180 CTAs on 4 MiB of L2, each byte shared by some CTAs.
    #[test]
    fn dram_bytes_depend_on_what_fits_into_l2() {
        let (gpu, occupancy) = rtx2070();
        let dram = |unique: u64, per_cta: u64, requested: u64| {
            let mut report = report(Vec::new(), 1800, 1800);
            (report.traffic.unique_read, report.traffic.per_cta_read) = (unique << 20, per_cta << 20);
            report.traffic.requested_read = requested << 20;
            let read = model(&kernel(Vec::new()), &report, gpu, &occupancy).dram.read;
            assert!(unique << 20 <= read && read <= requested << 20);
            read
        };
        // 3.6 MiB a wave fit: every repeated touch hits.
        assert_eq!(dram(36, 72, 360), 36 << 20);
        // 4.2 MiB do not: what a CTA touches repeatedly misses, what resident CTAs share is fetched once.
        assert_eq!(dram(42, 84, 370), (42 + 370 - 84) << 20);
        // All 1800 CTAs share 42 MiB: each of the ten waves fetches them.
        assert_eq!(dram(42, 1800 * 42, 1800 * 42), 420 << 20);
    }

    #[test]
    fn nothing_takes_no_time() {
        let (gpu, occupancy) = rtx2070();
        assert_eq!(model(&kernel(Vec::new()), &report(Vec::new(), 0, 0), gpu, &occupancy).seconds, 0.0);
    }
}
