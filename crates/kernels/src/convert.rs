//! Between the stored type and f32: what kernels load, what they compute in, what they store.

use std::panic::Location;

use arch::Feature;
use ptx::{B16, B32, Bf16, Compare, F16, F32, Global, KernelBuilder, Pointer, Reg, U32};

use crate::Dtype;

/// Neighbouring elements of a tensor in registers, as they lie in memory.
#[derive(Clone, Debug)]
pub enum Words {
    /// One element of 16 bits.
    Half(Reg<B16>),
    /// Elements of 32 bits, or pairs of elements of 16 bits.
    Full(Vec<Reg<B32>>),
}

impl Words {
    /// `count` (1, 2 or 4) elements that are 0.
    #[track_caller]
    pub fn zero(k: &mut KernelBuilder, dtype: Dtype, count: usize) -> Self {
        match count * dtype.bytes() {
            2 => Self::Half(k.mov::<B16>(0)),
            bytes => Self::Full((0..bytes / 4).map(|_| k.mov::<B32>(0)).collect()),
        }
    }

    /// Loads the elements.
    #[track_caller]
    pub fn load(&self, k: &mut KernelBuilder, from: Pointer<Global>) {
        match self {
            Self::Half(word) => k.ld_to(*word, from),
            Self::Full(words) => k.ld_vec_to(words, from),
        }
    }

    /// Stores the elements.
    #[track_caller]
    pub fn store(&self, k: &mut KernelBuilder, to: Pointer<Global>) {
        match self {
            Self::Half(word) => k.st(to, *word),
            Self::Full(words) => k.st_vec(to, words),
        }
    }

    /// The elements as f32, exactly.
    #[track_caller]
    pub fn widen(&self, k: &mut KernelBuilder, dtype: Dtype) -> Vec<Reg<F32>> {
        match (self, dtype) {
            (Self::Full(words), Dtype::F32) => words.iter().map(|word| word.cast()).collect(),
            // A bfloat16 is the upper half of the f32 it stands for.
            (Self::Full(words), Dtype::Bf16) => {
                let both = |&word: &Reg<B32>| [k.shl(word, 16).cast(), k.and(word, 0xffff_0000).cast()];
                words.iter().flat_map(both).collect()
            }
            (Self::Full(words), _) => {
                let halves: Vec<_> = words.iter().flat_map(|&word| k.unpack::<F16, _>(word)).collect();
                halves.into_iter().map(|half| k.cvt(half)).collect()
            }
            (Self::Half(word), Dtype::Bf16) => {
                let zero = k.mov::<B16>(0);
                vec![k.pack(zero, *word).cast()]
            }
            (Self::Half(word), _) => vec![k.cvt(word.cast::<F16>())],
        }
    }

    /// 1, 2 or 4 values rounded to the stored type, to nearest, ties to even.
    #[track_caller]
    pub fn narrow(k: &mut KernelBuilder, dtype: Dtype, values: &[Reg<F32>]) -> Self {
        match (dtype, values) {
            (Dtype::F32, _) => Self::Full(values.iter().map(|value| value.cast()).collect()),
            (_, &[value]) => Self::Half(narrow_one(k, dtype, value)),
            _ => Self::Full(
                values
                    .chunks(2)
                    .map(|pair| {
                        let word = k.reg();
                        narrow_pair_to(k, dtype, word, pair[0], pair[1]);
                        word
                    })
                    .collect(),
            ),
        }
    }
}

#[track_caller]
fn narrow_one(k: &mut KernelBuilder, dtype: Dtype, value: Reg<F32>) -> Reg<B16> {
    match dtype {
        Dtype::Bf16 if k.target().supports(Feature::PackedConvert) => k.cvt::<Bf16, _>(value).bits(),
        Dtype::Bf16 => {
            let rounded = round_to_upper_half(k, value);
            k.unpack::<B16, _>(rounded)[1]
        }
        _ => k.cvt::<F16, _>(value).bits(),
    }
}

/// Two values rounded to the 16-bit type `dtype`, as one word, `low` in its lower half.
#[track_caller]
pub fn narrow_pair_to(k: &mut KernelBuilder, dtype: Dtype, to: Reg<B32>, low: Reg<F32>, high: Reg<F32>) {
    k.at(Location::caller(), |k| {
        let packed_convert = k.target().supports(Feature::PackedConvert);
        match dtype {
            Dtype::Bf16 if packed_convert => k.cvt_bf16x2_to(to.cast(), high, low),
            Dtype::Bf16 => {
                let (low, high) = (round_to_upper_half(k, low), round_to_upper_half(k, high));
                k.prmt_to(to.cast::<U32>(), low, high, 0x7632);
            }
            _ if packed_convert => k.cvt_f16x2_to(to.cast(), high, low),
            _ => {
                let (low, high) = (narrow_one(k, dtype, low), narrow_one(k, dtype, high));
                k.pack_to(to, low, high);
            }
        }
    });
}

/// The bits of `value` rounded to bfloat16, in the upper half; for architectures without the conversion.
///
/// Adding half a unit, less one where the last kept bit is even, carries into the kept bits exactly when nearest, ties
/// to even, rounds up. A NaN is kept one by setting its quiet bit instead.
#[track_caller]
fn round_to_upper_half(k: &mut KernelBuilder, value: Reg<F32>) -> Reg<U32> {
    let bits = value.cast::<U32>();
    let last = k.shr(bits, 16);
    let odd = k.and(last, 1);
    let half = k.add(odd, 0x7fff);
    let rounded = k.add(bits, half);
    let quiet = k.or(bits, 0x0040_0000);
    let nan = k.setp(Compare::Neu, value, value);
    k.selp(quiet, rounded, nan)
}
