//! The interpreter: runs a warp until it stops.
//!
//! The loop is compiled once per vector width (see [`Level`]); the functions it is made of are inlined into each, so that
//! their plain loops over 32 lanes become the vector instructions of that width.

use ptx::Modifier;

use crate::access;
use crate::call;
use crate::cta::{Arrival, Fail, Stop, Worker};
use crate::engine::Flow;
use crate::fault::FaultKind;
use crate::lanes::{self, ALL, Lanes, WARP, Wide, collect, each, expand};
use crate::program::{Code, Op, PredicateRef, UNGUARDED, WATCHED};
use crate::small;
use crate::tensor;
use crate::warp::Warp;

/// The vector instructions the interpreter is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best this machine has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("fma")
            {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Runs a warp until it stops or has executed `fuel` instructions; what is left of them stays in `fuel`.
    pub(crate) fn run(self, worker: &mut Worker<'_>, warp: &mut Warp, fuel: &mut u64) -> Result<Stop, Fail> {
        match self {
            Self::Portable => interpret::<PORTABLE>(worker, warp, fuel),
            // SAFETY: `detect` gives these levels only where the machine has the features they enable.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { interpret_avx2(worker, warp, fuel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { interpret_avx512(worker, warp, fuel) },
        }
    }
}

/// Values of the constant parameter that says which width a copy of the loop is for.
pub(crate) const PORTABLE: u8 = 0;
#[cfg(target_arch = "x86_64")]
const AVX2: u8 = 1;
#[cfg(target_arch = "x86_64")]
pub(crate) const AVX512: u8 = 2;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt")]
fn interpret_avx2(worker: &mut Worker<'_>, warp: &mut Warp, fuel: &mut u64) -> Result<Stop, Fail> {
    interpret::<AVX2>(worker, warp, fuel)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi1,bmi2,popcnt")]
fn interpret_avx512(worker: &mut Worker<'_>, warp: &mut Warp, fuel: &mut u64) -> Result<Stop, Fail> {
    interpret::<AVX512>(worker, warp, fuel)
}

/// A warp's registers as the loop reaches them.
///
/// Places come from the decoder, which counts them; [`Warp::new`] makes the files that large. Checking each again would cost
/// more than the work on it.
pub(crate) struct File<'w> {
    narrow: &'w mut [Lanes],
    wide: &'w mut [Wide],
    predicates: &'w mut [u32],
}

impl<'w> File<'w> {
    #[inline(always)]
    pub(crate) fn of(warp: &'w mut Warp) -> Self {
        Self { narrow: &mut warp.narrow, wide: &mut warp.wide, predicates: &mut warp.predicates }
    }

    #[inline(always)]
    pub(crate) fn narrow(&self, place: u32) -> [u32; WARP] {
        debug_assert!((place as usize) < self.narrow.len());
        // SAFETY: the decoder hands out narrow places below `Program::narrow`, the length of this file.
        unsafe { self.narrow.get_unchecked(place as usize).0 }
    }

    #[inline(always)]
    pub(crate) fn wide(&self, place: u32) -> [u64; WARP] {
        debug_assert!((place as usize) < self.wide.len());
        // SAFETY: the decoder hands out wide places below `Program::wide`, the length of this file.
        unsafe { self.wide.get_unchecked(place as usize).0 }
    }

    #[inline(always)]
    pub(crate) fn set_narrow(&mut self, place: u32, values: [u32; WARP], mask: u32) {
        debug_assert!((place as usize) < self.narrow.len());
        // SAFETY: as in `narrow`.
        let register = unsafe { &mut self.narrow.get_unchecked_mut(place as usize).0 };
        if mask == ALL {
            *register = values;
        } else {
            let lanes = expand(mask);
            for lane in 0..WARP {
                register[lane] = values[lane] & lanes[lane] | register[lane] & !lanes[lane];
            }
        }
    }

    #[inline(always)]
    pub(crate) fn set_wide(&mut self, place: u32, values: [u64; WARP], mask: u32) {
        debug_assert!((place as usize) < self.wide.len());
        // SAFETY: as in `wide`.
        let register = unsafe { &mut self.wide.get_unchecked_mut(place as usize).0 };
        if mask == ALL {
            *register = values;
        } else {
            for lane in 0..WARP {
                if mask >> lane & 1 == 1 {
                    register[lane] = values[lane];
                }
            }
        }
    }

    #[inline(always)]
    fn fma(&mut self, op: &Op, mask: u32) {
        let (a, b, c) = (self.narrow(op.a), self.narrow(op.b), self.narrow(op.c));
        let mut out = [0; WARP];
        for lane in 0..WARP {
            out[lane] = f(a[lane]).mul_add(f(b[lane]), f(c[lane])).to_bits();
        }
        self.set_narrow(op.d, out, mask);
    }

    #[inline(always)]
    pub(crate) fn predicate(&self, reference: PredicateRef) -> u32 {
        let value = self.predicates[(reference / 2) as usize];
        if reference & 1 == 1 { !value } else { value }
    }

    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, place: u32, value: u32, mask: u32) {
        let predicate = &mut self.predicates[place as usize];
        *predicate = *predicate & !mask | value & mask;
    }

    /// A register that may be wide, cut to 32 bits.
    #[inline(always)]
    pub(crate) fn low(&self, (place, is_wide): (u32, bool)) -> [u32; WARP] {
        if is_wide { each(self.wide(place), |value| value as u32) } else { self.narrow(place) }
    }

    /// A register that may be narrow, with zeros above.
    #[inline(always)]
    pub(crate) fn full(&self, (place, is_wide): (u32, bool)) -> [u64; WARP] {
        if is_wide { self.wide(place) } else { each(self.narrow(place), u64::from) }
    }

    /// Writes to a register that may be narrow or wide.
    #[inline(always)]
    pub(crate) fn set(&mut self, (place, is_wide): (u32, bool), values: [u64; WARP], mask: u32) {
        if is_wide {
            self.set_wide(place, values, mask)
        } else {
            self.set_narrow(place, each(values, |value| value as u32), mask)
        }
    }
}

#[inline(always)]
fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

#[inline(always)]
fn binary(a: [u32; WARP], b: [u32; WARP], function: impl Fn(u32, u32) -> u32) -> [u32; WARP] {
    let mut out = [0; WARP];
    for lane in 0..WARP {
        out[lane] = function(a[lane], b[lane]);
    }
    out
}

#[inline(always)]
fn binary_wide(a: [u64; WARP], b: [u64; WARP], function: impl Fn(u64, u64) -> u64) -> [u64; WARP] {
    let mut out = [0; WARP];
    for lane in 0..WARP {
        out[lane] = function(a[lane], b[lane]);
    }
    out
}

#[inline(always)]
fn widening(a: [u32; WARP], b: [u32; WARP], c: [u64; WARP], function: impl Fn(u32, u32, u64) -> u64) -> [u64; WARP] {
    let mut out = [0; WARP];
    for lane in 0..WARP {
        out[lane] = function(a[lane], b[lane], c[lane]);
    }
    out
}

#[inline(always)]
fn compare<T: Copy + PartialOrd>(a: [T; WARP], b: [T; WARP]) -> (u32, u32, u32) {
    (collect(|lane| a[lane] < b[lane]), collect(|lane| a[lane] == b[lane]), collect(|lane| a[lane] > b[lane]))
}

#[inline(always)]
fn interpret<const LEVEL: u8>(worker: &mut Worker<'_>, warp: &mut Warp, fuel: &mut u64) -> Result<Stop, Fail> {
    let program = worker.program;
    let ops = program.ops.as_slice();
    loop {
        if *fuel == 0 {
            return Ok(Stop::Pause);
        }
        if warp.pc >= warp.meet {
            warp.join();
        }
        let pc = warp.pc;
        let op = &ops[pc];
        *fuel -= 1;
        worker.executions[pc] += 1;
        let mut mask = warp.active;
        if op.guard != UNGUARDED {
            mask &= if op.guard & WATCHED == 0 {
                File::of(warp).predicate(op.guard)
            } else {
                tensor::watch(worker, warp, op)?
            };
        }
        if mask != ALL {
            worker.idle_lanes[pc] += u64::from(mask.count_zeros());
        }

        macro_rules! fail {
            ($kind:expr) => {
                return Err(Box::new(($kind, pc, warp.index, mask.trailing_zeros() & 31)))
            };
        }
        macro_rules! narrow {
            ($function:expr; 1) => {{
                let mut file = File::of(warp);
                let out = each(file.narrow(op.a), $function);
                file.set_narrow(op.d, out, mask);
            }};
            ($function:expr; 2) => {{
                let mut file = File::of(warp);
                let out = binary(file.narrow(op.a), file.narrow(op.b), $function);
                file.set_narrow(op.d, out, mask);
            }};
        }
        macro_rules! wide {
            ($function:expr) => {{
                let mut file = File::of(warp);
                let out = binary_wide(file.wide(op.a), file.wide(op.b), $function);
                file.set_wide(op.d, out, mask);
            }};
        }
        macro_rules! widen {
            ($addend:expr, $function:expr) => {{
                let mut file = File::of(warp);
                let addend = if $addend { file.wide(op.c) } else { [0; WARP] };
                let out = widening(file.narrow(op.a), file.narrow(op.b), addend, $function);
                file.set_wide(op.d, out, mask);
            }};
        }

        match op.code {
            Code::Nop => {}
            Code::FmaF32 => {
                let mut file = File::of(warp);
                file.fma(op, mask);
                if mask == ALL && op.aux > 1 {
                    // The multiply-adds that follow need no look at guard, meeting point or code.
                    let ahead = (op.aux as usize).min(warp.meet - pc).min(usize::try_from(*fuel).unwrap_or(usize::MAX));
                    let run = pc + 1..(pc + ahead).max(pc + 1);
                    *fuel -= run.len() as u64;
                    let mut file = File::of(warp);
                    for (op, executions) in ops[run.clone()].iter().zip(&mut worker.executions[run.clone()]) {
                        file.fma(op, ALL);
                        *executions += 1;
                    }
                    warp.pc = run.end;
                    continue;
                }
            }
            Code::Mov32 => narrow!(|a| a; 1),
            Code::AddF32 => narrow!(|a, b| (f(a) + f(b)).to_bits(); 2),
            Code::SubF32 => narrow!(|a, b| (f(a) - f(b)).to_bits(); 2),
            Code::MulF32 => narrow!(|a, b| (f(a) * f(b)).to_bits(); 2),
            Code::MaxF32 => narrow!(|a, b| lanes::max(f(a), f(b)).to_bits(); 2),
            Code::MinF32 => narrow!(|a, b| lanes::min(f(a), f(b)).to_bits(); 2),
            Code::NegF32 => narrow!(|a| a ^ 0x8000_0000; 1),
            Code::AbsF32 => narrow!(|a| a & 0x7fff_ffff; 1),
            Code::Ex2F32 => narrow!(|a| lanes::exp2(f(a)).to_bits(); 1),
            Code::Ex2FtzF32 => narrow!(|a| lanes::flush(lanes::exp2(lanes::flush(f(a)))).to_bits(); 1),
            Code::RcpF32 => narrow!(|a| (1.0 / f(a)).to_bits(); 1),
            Code::DivF32 => narrow!(|a, b| (f(a) / f(b)).to_bits(); 2),
            Code::Add32 => narrow!(|a, b| a.wrapping_add(b); 2),
            Code::Sub32 => narrow!(|a, b| a.wrapping_sub(b); 2),
            Code::Mul32 => narrow!(|a, b| a.wrapping_mul(b); 2),
            Code::Mad32 => {
                let mut file = File::of(warp);
                let product = binary(file.narrow(op.a), file.narrow(op.b), |a, b| a.wrapping_mul(b));
                let out = binary(product, file.narrow(op.c), |p, c| p.wrapping_add(c));
                file.set_narrow(op.d, out, mask);
            }
            Code::And32 => narrow!(|a, b| a & b; 2),
            Code::Or32 => narrow!(|a, b| a | b; 2),
            Code::Xor32 => narrow!(|a, b| a ^ b; 2),
            Code::Shl32 => narrow!(|a, b| if b < 32 { a << (b & 31) } else { 0 }; 2),
            Code::ShrU32 => narrow!(|a, b| if b < 32 { a >> (b & 31) } else { 0 }; 2),
            Code::ShrS32 => narrow!(|a, b| ((a as i32) >> b.min(31)) as u32; 2),
            Code::MinU32 => narrow!(|a, b| a.min(b); 2),
            Code::MaxU32 => narrow!(|a, b| a.max(b); 2),
            Code::MinS32 => narrow!(|a, b| (a as i32).min(b as i32) as u32; 2),
            Code::MaxS32 => narrow!(|a, b| (a as i32).max(b as i32) as u32; 2),
            Code::Mov64 => {
                let mut file = File::of(warp);
                let value = file.wide(op.a);
                file.set_wide(op.d, value, mask);
            }
            Code::Add64 => wide!(|a, b| a.wrapping_add(b)),
            Code::Sub64 => wide!(|a, b| a.wrapping_sub(b)),
            Code::Mul64 => wide!(|a, b| a.wrapping_mul(b)),
            Code::Mad64 => {
                let mut file = File::of(warp);
                let product = binary_wide(file.wide(op.a), file.wide(op.b), |a, b| a.wrapping_mul(b));
                let out = binary_wide(product, file.wide(op.c), |p, c| p.wrapping_add(c));
                file.set_wide(op.d, out, mask);
            }
            Code::And64 => wide!(|a, b| a & b),
            Code::Or64 => wide!(|a, b| a | b),
            Code::Xor64 => wide!(|a, b| a ^ b),
            Code::Shl64 => {
                let mut file = File::of(warp);
                let out = binary_wide(file.wide(op.a), each(file.narrow(op.b), u64::from), |a, b| {
                    if b < 64 { a << (b & 63) } else { 0 }
                });
                file.set_wide(op.d, out, mask);
            }
            Code::ShrU64 => {
                let mut file = File::of(warp);
                let out = binary_wide(file.wide(op.a), each(file.narrow(op.b), u64::from), |a, b| {
                    if b < 64 { a >> (b & 63) } else { 0 }
                });
                file.set_wide(op.d, out, mask);
            }
            Code::MulWideU => widen!(false, |a, b, _| u64::from(a) * u64::from(b)),
            Code::MadWideU => widen!(true, |a, b, c| (u64::from(a) * u64::from(b)).wrapping_add(c)),
            Code::MulWideS => widen!(false, |a, b, _| (i64::from(a as i32) * i64::from(b as i32)) as u64),
            Code::MadWideS => {
                widen!(true, |a, b, c| ((i64::from(a as i32) * i64::from(b as i32)) as u64).wrapping_add(c))
            }
            Code::ZeroExtend => {
                let mut file = File::of(warp);
                let out = each(file.narrow(op.a), u64::from);
                file.set_wide(op.d, out, mask);
            }
            Code::SignExtend => {
                let mut file = File::of(warp);
                let out = each(file.narrow(op.a), |a| i64::from(a as i32) as u64);
                file.set_wide(op.d, out, mask);
            }
            Code::Truncate => {
                let mut file = File::of(warp);
                let out = each(file.wide(op.a), |a| a as u32);
                file.set_narrow(op.d, out, mask);
            }
            Code::Pack64 => {
                let mut file = File::of(warp);
                let out = widening(file.narrow(op.a), file.narrow(op.b), [0; WARP], |a, b, _| {
                    u64::from(b) << 32 | u64::from(a)
                });
                file.set_wide(op.d, out, mask);
            }
            Code::Unpack64 => {
                let mut file = File::of(warp);
                let value = file.wide(op.a);
                file.set_narrow(op.d, each(value, |v| v as u32), mask);
                file.set_narrow(op.b, each(value, |v| (v >> 32) as u32), mask);
            }
            Code::Pack32 => narrow!(|a, b| b << 16 | a & 0xffff; 2),
            Code::Unpack32 => {
                let mut file = File::of(warp);
                let value = file.narrow(op.a);
                file.set_narrow(op.d, each(value, |v| v & 0xffff), mask);
                file.set_narrow(op.b, each(value, |v| v >> 16), mask);
            }
            Code::F16ToF32 => narrow!(lanes::f16_to_f32; 1),
            Code::F32ToF16 => narrow!(lanes::f32_to_f16; 1),
            Code::F32ToBf16 => narrow!(lanes::f32_to_bf16; 1),
            // The first operand goes to the upper half (9.7.9.22).
            Code::F32ToF16x2 => narrow!(|a, b| lanes::f32_to_f16(a) << 16 | lanes::f32_to_f16(b); 2),
            Code::F32ToBf16x2 => narrow!(|a, b| lanes::f32_to_bf16(a) << 16 | lanes::f32_to_bf16(b); 2),
            Code::SetpF32 | Code::SetpU32 | Code::SetpS32 | Code::SetpU64 | Code::SetpS64 | Code::SetpOther => {
                set_predicate(worker, warp, op, mask);
            }
            Code::Selp32 => {
                let mut file = File::of(warp);
                let chosen = expand(file.predicate(op.c));
                let (a, b) = (file.narrow(op.a), file.narrow(op.b));
                let mut out = [0; WARP];
                for lane in 0..WARP {
                    out[lane] = a[lane] & chosen[lane] | b[lane] & !chosen[lane];
                }
                file.set_narrow(op.d, out, mask);
            }
            Code::Selp64 => {
                let mut file = File::of(warp);
                let chosen = file.predicate(op.c);
                let (a, b) = (file.wide(op.a), file.wide(op.b));
                let out = std::array::from_fn(|lane| if chosen >> lane & 1 == 1 { a[lane] } else { b[lane] });
                file.set_wide(op.d, out, mask);
            }
            Code::PredicateMov | Code::PredicateAnd | Code::PredicateOr | Code::PredicateXor | Code::PredicateNot => {
                let mut file = File::of(warp);
                let (a, b) = (file.predicate(op.a), file.predicate(op.b));
                let value = match op.code {
                    Code::PredicateAnd => a & b,
                    Code::PredicateOr => a | b,
                    Code::PredicateXor => a ^ b,
                    Code::PredicateNot => !a,
                    _ => a,
                };
                file.set_predicate(op.d, value, mask);
            }
            Code::Scalar => scalar(worker, warp, op, mask),
            Code::Carry => small::carry(worker, warp, op, mask),
            Code::Small => small::execute(worker, warp, op, mask, worker.clock.wrapping_sub(*fuel))?,
            Code::LoadShared => access::load_shared::<LEVEL>(worker, warp, op, mask)?,
            Code::StoreShared => access::store_shared(worker, warp, op, mask)?,
            Code::LoadGlobal => access::load_global::<LEVEL>(worker, warp, op, mask)?,
            Code::StoreGlobal => access::store_global(worker, warp, op, mask)?,
            Code::LoadLocal => access::local(worker, warp, op, mask, false)?,
            Code::StoreLocal => access::local(worker, warp, op, mask, true)?,
            Code::LoadConstant | Code::LoadParameter => access::load_constant(worker, warp, op, mask)?,
            Code::AtomicShared => access::atomic_shared(worker, warp, op, mask)?,
            Code::AtomicGlobal => access::atomic_global(worker, warp, op, mask)?,
            Code::Cluster => access::cluster(worker, warp, op, mask)?,
            Code::CopyAsync => access::copy_async(worker, warp, op, mask)?,
            Code::CopyCommit => warp.copies.push(Vec::new()),
            Code::CopyWait => {
                worker.finish_copies(warp, op.aux as usize, op.a == 1);
                worker.complete_arrivals(warp.index)?;
            }
            Code::Engine => match worker.engine(warp, op, mask)? {
                Flow::Next => {}
                Flow::Stay => continue,
                Flow::Stop(stop) => return Ok(stop),
            },
            Code::Shuffle | Code::Vote | Code::WarpFunction | Code::WarpSync => {
                if mask != 0 && !exchange::<LEVEL>(worker, warp, op, mask)? {
                    continue;
                }
                if op.code == Code::WarpSync {
                    worker.lanes_meet(warp.index);
                }
            }
            Code::ActiveMask => {
                let active = warp.active;
                File::of(warp).set_narrow(op.d, [active; WARP], mask);
            }
            Code::BarrierSync | Code::BarrierArrive | Code::BarrierReduce => {
                if mask != 0 {
                    match arrival(worker, warp, op, mask)? {
                        Some(stop) => return Ok(stop),
                        None => continue,
                    }
                }
            }
            Code::Tensor => {
                if mask != 0
                    && let Some(stop) = tensor::execute(worker, warp, op, mask)?
                {
                    return Ok(stop);
                }
            }
            Code::BranchByIndex => {
                let table = &program.tables[op.aux as usize];
                let index = File::of(warp).narrow(op.a);
                // What the table does not have is undefined (9.7.12.3): here the last target.
                warp.scatter(mask, |lane| table[(index[lane] as usize).min(table.len() - 1)] as usize);
                continue;
            }
            Code::Branch => {
                warp.branch(mask, op.aux as usize);
                continue;
            }
            Code::Call => {
                call::call(worker, warp, op, mask)?;
                continue;
            }
            Code::Return => {
                call::ret(worker, warp, op, mask);
                continue;
            }
            Code::Exit => {
                if mask != 0 {
                    if warp.exit(mask) {
                        continue;
                    }
                    if warp.live == 0 {
                        return Ok(Stop::Done);
                    }
                    fail!(FaultKind::Divergent { active: mask, expected: warp.live });
                }
            }
            Code::Trap => {
                if mask != 0 {
                    fail!(FaultKind::Trap);
                }
            }
        }
        warp.pc = pc + 1;
    }
}

#[inline(never)]
fn set_predicate(worker: &Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) {
    let comparison = &worker.program.comparisons[op.aux as usize];
    let mut file = File::of(warp);
    let (less, equal, greater) = match op.code {
        Code::SetpF32 => compare(each(file.narrow(op.a), f32::from_bits), each(file.narrow(op.b), f32::from_bits)),
        Code::SetpU32 => compare(file.narrow(op.a), file.narrow(op.b)),
        Code::SetpS32 => compare(each(file.narrow(op.a), |x| x as i32), each(file.narrow(op.b), |x| x as i32)),
        Code::SetpU64 => compare(file.wide(op.a), file.wide(op.b)),
        Code::SetpS64 => compare(each(file.wide(op.a), |x| x as i64), each(file.wide(op.b), |x| x as i64)),
        _ => {
            let (a, b) = (file.full((op.a, comparison.wide)), file.full((op.b, comparison.wide)));
            let mut masks = (0, 0, 0);
            if let Some(order) = comparison.function {
                for lane in 0..WARP {
                    let (less, equal, greater) = order(a[lane], b[lane]);
                    masks.0 |= u32::from(less) << lane;
                    masks.1 |= u32::from(equal) << lane;
                    masks.2 |= u32::from(greater) << lane;
                }
            }
            masks
        }
    };
    let holds = comparison.compare.mask(less, equal, greater);
    let combine = |value: u32| match comparison.combine {
        Some((Modifier::And, with)) => value & file.predicate(with),
        Some((Modifier::Or, with)) => value | file.predicate(with),
        Some((_, with)) => value ^ file.predicate(with),
        None => value,
    };
    let (value, complement) = (combine(holds), combine(!holds));
    file.set_predicate(op.d, value, mask);
    if let Some(other) = comparison.other {
        file.set_predicate(other, complement, mask);
    }
}

#[inline(never)]
fn scalar(worker: &Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) {
    use crate::allocate::Width;
    let info = &worker.program.scalars[op.aux as usize];
    let mut file = File::of(warp);
    let sources = info.sources.map(|(place, width)| match width {
        // No function of scalars has 128-bit operands.
        Width::Wide | Width::Double => file.wide(place),
        // A function with fewer operands has places that are not its own here; it does not look at them.
        Width::Narrow => file.narrow.get(place as usize).map_or([0; WARP], |lanes| each(lanes.0, u64::from)),
        Width::Predicate => {
            let predicate = file.predicate(place);
            std::array::from_fn(|lane| u64::from(predicate >> lane & 1))
        }
    });
    let [a, b, c, d] = sources;
    let out: [u64; WARP] = std::array::from_fn(|lane| {
        if mask >> lane & 1 == 1 { (info.function)(a[lane], b[lane], c[lane], d[lane]) } else { 0 }
    });
    match info.destination {
        Width::Wide | Width::Double => file.set_wide(op.d, out, mask),
        Width::Narrow => file.set_narrow(op.d, each(out, |x| x as u32), mask),
        Width::Predicate => file.set_predicate(op.d, collect(|lane| out[lane] & 1 == 1), mask),
    }
}

/// Exchanges and votes, which all lanes of the member mask execute together. False when the lanes had to wait for others.
#[inline(always)]
fn exchange<const LEVEL: u8>(worker: &Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<bool, Fail> {
    let (pc, index, live) = (warp.pc, warp.index, warp.live);
    let fail = |kind| Box::new((kind, pc, index, mask.trailing_zeros() & 31));
    let info = (op.code != Code::WarpSync).then(|| worker.program.warp_ops[op.aux as usize]);
    let members = {
        let file = File::of(warp);
        file.narrow(info.map_or(op.a, |info| info.members))[mask.trailing_zeros() as usize]
    };
    if mask & !members != 0 {
        return Err(fail(FaultKind::NotMember { mask: members }));
    }
    let expected = members & live;
    if mask & expected != expected {
        if mask == warp.active && warp.park() {
            return Ok(false);
        }
        return Err(fail(FaultKind::Divergent { active: mask, expected }));
    }
    let Some(info) = info else { return Ok(true) };
    let mut file = File::of(warp);
    if op.code == Code::WarpFunction {
        worker.program.warp_functions[op.c as usize].execute(&mut file, op, mask);
        return Ok(true);
    }
    if op.code == Code::Vote {
        let votes = file.predicate(op.a) & mask;
        match info.mode {
            Modifier::Ballot => file.set_narrow(op.d, [votes; WARP], mask),
            mode => {
                let holds = match mode {
                    Modifier::All => votes == mask,
                    Modifier::Any => votes != 0,
                    _ => votes == 0 || votes == mask,
                };
                file.set_predicate(op.d, if holds { ALL } else { 0 }, mask);
            }
        }
        return Ok(true);
    }
    // PTX ISA 9.7.9.6, in its own names.
    let (a, b, c) = (file.narrow(op.a), file.narrow(op.b), file.narrow(info.clamp));
    let mut sources = [0; WARP];
    let mut valid = [0; WARP];
    macro_rules! sources {
        ($source:expr) => {
            for lane in 0..WARP {
                let (bval, cval, segmask) = (b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31);
                let max_lane = lane as u32 & segmask | cval & !segmask & 31;
                let source: fn(u32, u32, u32, u32) -> (u32, bool) = $source;
                let (source, is_valid) = source(lane as u32, bval, segmask, max_lane);
                sources[lane] = if is_valid { source & 31 } else { lane as u32 };
                valid[lane] = u32::from(is_valid);
            }
        };
    }
    match info.mode {
        Modifier::Up => {
            sources!(|lane, bval, _, max| (lane.wrapping_sub(bval), lane as i32 - bval as i32 >= max as i32))
        }
        Modifier::Down => sources!(|lane, bval, _, max| (lane + bval, lane + bval <= max)),
        Modifier::Bfly => sources!(|lane, bval, _, max| (lane ^ bval, lane ^ bval <= max)),
        _ => sources!(|lane, bval, segmask, max| {
            let source = lane & segmask | bval & !segmask;
            (source, source <= max)
        }),
    }
    let out = access::pick::<LEVEL>(&a, WARP, &sources);
    let in_range = if info.in_range.is_some() { collect(|lane| valid[lane] == 1) } else { 0 };
    file.set_narrow(op.d, out, mask);
    if let Some(predicate) = info.in_range {
        file.set_predicate(predicate, in_range, mask);
    }
    Ok(true)
}

/// A warp reaches a barrier; `None` when its lanes have to wait for other lanes of the warp first.
#[inline(never)]
fn arrival(worker: &Worker<'_>, warp: &mut Warp, op: &Op, mask: u32) -> Result<Option<Stop>, Fail> {
    let info = &worker.program.barriers[op.aux as usize];
    if mask != warp.live {
        let (pc, index, expected) = (warp.pc, warp.index, warp.live);
        if !info.aligned && mask == warp.active && warp.park() {
            return Ok(None);
        }
        return Err(Box::new((FaultKind::Divergent { active: mask, expected }, pc, index, mask.trailing_zeros() & 31)));
    }
    let file = File::of(warp);
    let lane = mask.trailing_zeros() as usize;
    let id = file.narrow(info.id)[lane];
    let threads = info.threads.map(|place| file.narrow(place)[lane]);
    let votes = info.reduce.map_or(0, |(_, predicate)| (file.predicate(predicate) & mask).count_ones());
    Ok(Some(Stop::Barrier(Arrival { id, threads, waits: op.code != Code::BarrierArrive, votes })))
}
