//! What one multiprocessor does in one clock.

use std::fmt;

use serde::Serialize;

use crate::sm::Sm;

/// The operand type of a tensor-core product; it accumulates in f32 (int8: in i32).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorOperand {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// f32 rounded to 10 bits of mantissa.
    Tf32,
    /// e4m3 and e5m2.
    Fp8,
    /// Signed or unsigned bytes.
    Int8,
}

impl fmt::Display for TensorOperand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TensorOperand::F16 => "f16",
            TensorOperand::Bf16 => "bf16",
            TensorOperand::Tf32 => "tf32",
            TensorOperand::Fp8 => "fp8",
            TensorOperand::Int8 => "int8",
        })
    }
}

/// Dense tensor-core rates, in operations per multiprocessor and clock; a multiply-add is two. `None` where the tensor
/// cores lack the type, or no source states the rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TensorRates {
    /// f16 with f16 accumulators.
    pub f16_accumulate_f16: Option<u32>,
    /// f16 with f32 accumulators.
    pub f16: Option<u32>,
    /// bf16 with f32 accumulators.
    pub bf16: Option<u32>,
    /// tf32 with f32 accumulators.
    pub tf32: Option<u32>,
    /// fp8 with f32 accumulators.
    pub fp8: Option<u32>,
    /// int8 with i32 accumulators.
    pub int8: Option<u32>,
}

impl TensorRates {
    /// The rate of an operand type with f32 (int8: i32) accumulators.
    pub fn of(&self, operand: TensorOperand) -> Option<u32> {
        match operand {
            TensorOperand::F16 => self.f16,
            TensorOperand::Bf16 => self.bf16,
            TensorOperand::Tf32 => self.tf32,
            TensorOperand::Fp8 => self.fp8,
            TensorOperand::Int8 => self.int8,
        }
    }

    /// As on GeForce parts, where products with f32 accumulators run at half rate (Turing, GA102, Ada and RTX Blackwell
    /// whitepapers: the two figures per type in their appendices).
    pub(crate) fn halve_f32_accumulate(self) -> TensorRates {
        let half = |rate: Option<u32>| rate.map(|rate| rate / 2);
        TensorRates { f16: half(self.f16), bf16: half(self.bf16), tf32: half(self.tf32), fp8: half(self.fp8), ..self }
    }
}

/// What one multiprocessor does in one clock. Lanes are results for single threads: a warp instruction takes
/// `32 / lanes` clocks of its pipe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PipeRates {
    /// Warp instructions issued, all schedulers together.
    pub issue: u32,
    /// f32 multiply-add lanes.
    pub fma: u32,
    /// f16 results of packed (f16x2) arithmetic; an instruction yields two per lane.
    pub half: u32,
    /// Lanes for integer addition, logic, shifts, comparison, min and max.
    pub alu: u32,
    /// Special-function lanes: rcp, rsqrt, lg2, sin, cos, tanh.
    pub special: u32,
    /// ex2 lanes.
    pub exp2: u32,
    /// Lanes for conversions between f32 and other types.
    pub convert: u32,
    /// Lanes for conversions of two f32 to f16x2 or bf16x2.
    pub convert_packed: u32,
    /// Wavefronts of shared memory.
    pub shared_wavefronts: f64,
    /// Bytes loaded from L1.
    pub l1_bytes: u32,
    /// Tensor cores.
    pub tensor: TensorRates,
}

impl Sm {
    /// The rates of the architecture's full parts; [`crate::Gpu::pipe_rates`] gives a board's own.
    pub fn pipe_rates(self) -> PipeRates {
        PipeRates {
            // Four schedulers of one warp instruction a clock each (Volta whitepaper, and each one since).
            issue: 4,
            // CUDA Programming Guide, "Throughput of Native Arithmetic Instructions": 32-bit add, multiply, multiply-add.
            fma: match self {
                Sm::Sm70 | Sm::Sm75 | Sm::Sm80 => 64,
                _ => 128,
            },
            // The same table: 16-bit add, multiply, multiply-add (half2). From sm_86 on the non-data-centre parts run it at
            // the f32 rate (GA102, Ada and RTX Blackwell whitepapers: "Peak FP16 TFLOPS (non-Tensor)" equals FP32's).
            half: match self {
                Sm::Sm80 | Sm::Sm90 | Sm::Sm100 | Sm::Sm103 => 256,
                _ => 128,
            },
            // The same table: compare, minimum, maximum, logic, shift. RTX Blackwell's whitepaper doubles integer lanes;
            // as it does not say that of minimum and maximum, 64 is kept there.
            alu: 64,
            // The same table: reciprocal, square root, base-2 logarithm and exponential, sine, cosine, tanh.
            special: 16,
            // Doubled on Blackwell Ultra (NVIDIA, "Inside NVIDIA Blackwell Ultra": attention-layer exponentials, 10.7 against
            // 5 Tera exponentials a second).
            exp2: if self == Sm::Sm103 { 32 } else { 16 },
            // The same table: "all other type conversions".
            convert: 16,
            // F2FP packs on the ALU from sm_80 on: from SASS listings, the rate not yet checked on a chip. Before that, it is
            // two plain conversions and a permute.
            convert_packed: match self {
                Sm::Sm70 | Sm::Sm75 => 8,
                _ => 64,
            },
            // Replaying kernels against a chip's counters: 0.5 on sm_75, 1 on sm_80 and sm_90; the others by l1_bytes.
            shared_wavefronts: if self == Sm::Sm75 { 0.5 } else { 1.0 },
            // Volta whitepaper: 128 B a clock; GA102 whitepaper: 128 B "versus 64 B in Turing"; A100 whitepaper: 128 B.
            l1_bytes: if self == Sm::Sm75 { 64 } else { 128 },
            tensor: self.tensor_rates(),
        }
    }

    /// Checked against the vendor's peak figures in the tests of the GPU table.
    fn tensor_rates(self) -> TensorRates {
        // `f16` is the rate with f32 accumulators; tf32 runs at half of it, fp8 and int8 at twice.
        let rates = |f16: u32, bf16_tf32: bool, fp8: bool, int8: bool| TensorRates {
            f16_accumulate_f16: Some(f16),
            f16: Some(f16),
            bf16: bf16_tf32.then_some(f16),
            tf32: bf16_tf32.then_some(f16 / 2),
            fp8: fp8.then_some(2 * f16),
            int8: int8.then_some(2 * f16),
        };
        match self {
            // Volta whitepaper: 8 tensor cores of 64 multiply-adds.
            Sm::Sm70 => rates(1024, false, false, false),
            // Turing whitepaper: 8 tensor cores of 64 f16 multiply-adds, twice that in int8.
            Sm::Sm75 => rates(1024, false, false, true),
            // A100 whitepaper: 4 tensor cores of 256 f16 multiply-adds.
            Sm::Sm80 => rates(2048, true, false, true),
            // GA102 whitepaper, A10 datasheet: 4 tensor cores of 128.
            Sm::Sm86 => rates(1024, true, false, true),
            // Jetson AGX Orin technical brief: 170 sparse int8 TOPS on 16 multiprocessors at 1.3 GHz.
            Sm::Sm87 => rates(2048, true, false, true),
            // Ada whitepaper: as GA102, and fp8.
            Sm::Sm89 => rates(1024, true, true, true),
            // H100 whitepaper: 4 tensor cores of 512.
            Sm::Sm90 => rates(4096, true, true, true),
            // Blackwell architecture brief: 2.25 dense f16 PFLOP/s on 148 multiprocessors.
            Sm::Sm100 => rates(8192, true, true, true),
            // As sm_100; its tcgen05 has no int8 (ptxas accepts kind::i8 for sm_100a, not for sm_103a).
            Sm::Sm103 => rates(8192, true, true, false),
            // RTX Blackwell whitepapers (RTX PRO 6000: full rate); GB10 by its architecture, without a source of its own.
            Sm::Sm120 | Sm::Sm121 => rates(1024, true, true, true),
        }
    }
}
