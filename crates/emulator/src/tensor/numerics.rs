//! The arithmetic of tensor cores.
//!
//! Products of the operand types are exact in f32, and the manual leaves open in which order and precision they are summed
//! (PTX ISA 9.7.14.5, 9.7.15.5: "at least single precision"). What chips do is modelled where it shows in results, see [`Sums`];
//! elsewhere an accumulator takes the products one by one, `k` ascending, rounding to f32 each time (a fused multiply-add).
//! Results are compared with tolerances, never bit for bit.
//!
//! - f16 accumulators are widened, take all products of the instruction in f32, and are rounded to nearest even once at its end.
//! - tf32 operands are cut, not rounded: the manual says that the lower 13 bits are ignored; `cvt.rna.tf32` is what rounds.
//! - e4m3 and e5m2 are widened exactly. e4m3 has NaN (0x7f, 0xff) and no infinity.
//! - Integer products are summed exactly and wrap into s32, or are clamped to it with `.satfinite`.

use std::ops::Range;

use crate::interpret::Level;
use crate::lanes::f16_to_f32;

/// An operand type of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    S8,
    U8,
}

impl Element {
    pub(crate) fn of(ty: ptx::Type) -> Option<Self> {
        use ptx::Type;
        Some(match ty {
            Type::F16 => Self::F16,
            Type::Bf16 => Self::Bf16,
            Type::Tf32 => Self::Tf32,
            Type::E4m3 => Self::E4m3,
            Type::E5m2 => Self::E5m2,
            Type::S8 => Self::S8,
            Type::U8 => Self::U8,
            _ => return None,
        })
    }

    /// How many stand in a 32-bit register.
    pub(crate) const fn per_word(self) -> usize {
        match self {
            Self::Tf32 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::S8 | Self::U8 => 4,
        }
    }
}

/// How products are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// One by one, each sum rounded.
    Rounded,
    /// Of e4m3 and e5m2 in `wgmma`: all products of an instruction and the accumulator are aligned to the largest of them, and what is
    /// less than 2^-13 of its power of two is cut off each, and off the sum (DeepSeek-V3 Technical Report, 3.3.2: about 14 bits are kept).
    CutBytes,
    /// Of tf32 before sm_90: four products and the accumulator are aligned to the largest exponent, that of a product being the sum of its
    /// factors'; each is cut one bit below an f32's last, and the sum at an f32's last (Khattak and Mikaitis, Accurate Models of NVIDIA
    /// Tensor Cores, arXiv 2512.07004). So each sum is a little nearer to zero, and errors add up where rounding would balance them.
    Cut4,
    /// Of tf32 from sm_90 on: the same with eight products and two bits. Of `mma` an H200 gives the same bits.
    Cut8,
}

impl Sums {
    /// Of a type in `mma`, on an architecture.
    pub(crate) fn of(element: Element, sm: arch::Sm) -> Self {
        match element {
            Element::Tf32 if sm < arch::Sm::Sm90 => Self::Cut4,
            Element::Tf32 => Self::Cut8,
            _ => Self::Rounded,
        }
    }

    /// `c += a * b`: `a` is `[m][k]`, `b` is `[k][n]`, `c` is `[m][n]`. `m` and `n` are multiples of 8.
    #[inline(always)]
    pub(crate) fn multiply_add(self, a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
        match self {
            Self::Rounded => multiply_add(a, b, c, k, n),
            Self::CutBytes => multiply_add_bytes(a, b, c, k, n),
            Self::Cut4 => multiply_add_cut::<4>(a, b, c, k, n, 1),
            // An instruction that has no more than four.
            Self::Cut8 if k == 4 => multiply_add_cut::<4>(a, b, c, k, n, 2),
            Self::Cut8 => multiply_add_cut::<8>(a, b, c, k, n, 2),
        }
    }
}

/// Calls a function with what widens an element type's words as its first argument, so that it is compiled for each type.
macro_rules! widened {
    ($element:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $element {
            $crate::tensor::numerics::Element::F16 => $function($crate::tensor::numerics::f16, $($argument),*),
            $crate::tensor::numerics::Element::Bf16 => $function($crate::tensor::numerics::bf16, $($argument),*),
            $crate::tensor::numerics::Element::Tf32 => $function($crate::tensor::numerics::tf32, $($argument),*),
            $crate::tensor::numerics::Element::E4m3 => $function($crate::tensor::numerics::e4m3, $($argument),*),
            $crate::tensor::numerics::Element::E5m2 => $function($crate::tensor::numerics::e5m2, $($argument),*),
            $crate::tensor::numerics::Element::S8 => $function($crate::tensor::numerics::s8, $($argument),*),
            $crate::tensor::numerics::Element::U8 => $function($crate::tensor::numerics::u8, $($argument),*),
        }
    };
}
pub(crate) use widened;

// The elements of a word from its low bits up.

#[inline(always)]
pub(crate) fn f16(word: u32) -> [f32; 2] {
    [f32::from_bits(f16_to_f32(word & 0xffff)), f32::from_bits(f16_to_f32(word >> 16))]
}

#[inline(always)]
pub(crate) fn bf16(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

#[inline(always)]
pub(crate) fn tf32(word: u32) -> [f32; 1] {
    [f32::from_bits(word & 0xffff_e000)]
}

#[inline(always)]
pub(crate) fn e4m3(word: u32) -> [f32; 4] {
    word.to_le_bytes().map(|byte| E4M3[usize::from(byte)])
}

#[inline(always)]
pub(crate) fn e5m2(word: u32) -> [f32; 4] {
    word.to_le_bytes().map(|byte| f32::from_bits(f16_to_f32(u32::from(byte) << 8)))
}

#[inline(always)]
pub(crate) fn s8(word: u32) -> [f32; 4] {
    word.to_le_bytes().map(|byte| f32::from(byte as i8))
}

#[inline(always)]
pub(crate) fn u8(word: u32) -> [f32; 4] {
    word.to_le_bytes().map(f32::from)
}

/// Every e4m3 number: one sign, four exponent bits of bias 7, three mantissa bits.
static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code >> 3 & 0xf, code & 7);
        let magnitude = if code & 0x7f == 0x7f {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits(((exponent + 120) << 23 | mantissa << 20) as u32)
        };
        table[code] = if code & 0x80 == 0 { magnitude } else { -magnitude };
        code += 1;
    }
    table
};

/// Work that is compiled once per vector width, as the interpreter is; its `run` must be `#[inline(always)]`.
pub(crate) trait Vectorised {
    type Output;
    fn run(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt")]
fn run_avx2<W: Vectorised>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi1,bmi2,popcnt")]
fn run_avx512<W: Vectorised>(work: W) -> W::Output {
    work.run()
}

/// Does work with the vector instructions of a level.
pub(crate) fn at<W: Vectorised>(level: Level, work: W) -> W::Output {
    match level {
        Level::Portable => work.run(),
        // SAFETY: `Level::detect` gives these levels only where the machine has the features they enable.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { run_avx2(work) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { run_avx512(work) },
    }
}

/// `c += a * b`, `k` ascending: `a` is `[m][k]`, `b` is `[k][n]`, `c` is `[m][n]`. `m` and `n` are multiples of 8.
#[inline(always)]
fn multiply_add(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
    let wide = n - n % 32;
    for (a, c) in a.chunks_exact(4 * k).zip(c.chunks_exact_mut(4 * n)) {
        for column in (0..wide).step_by(32) {
            block::<32>(a, b, c, k, n, column);
        }
        for column in (wide..n).step_by(8) {
            block::<8>(a, b, c, k, n, column);
        }
    }
}

/// [`multiply_add`] by [`Sums::CutBytes`].
#[inline(always)]
fn multiply_add_bytes(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
    for (a, c) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (column, c) in (0..n).step_by(8).zip(c.as_chunks_mut().0) {
            cut_bytes(a, &b[column..], c, n);
        }
    }
}

/// The power of two of a number.
#[inline(always)]
fn power(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & f32::INFINITY.to_bits())
}

/// Eight columns of a row by [`Sums::CutBytes`].
#[inline(always)]
fn cut_bytes(a: &[f32], b: &[f32], c: &mut [f32; 8], n: usize) {
    /// Of a float's 23, those that sums do not have.
    const LOST: u32 = (1 << 10) - 1;
    let mut products = [[0.0f32; 8]; 32];
    let mut largest = c.map(f32::abs);
    for ((products, &a), b) in products.iter_mut().zip(a).zip(b.chunks(n)) {
        for lane in 0..8 {
            products[lane] = a * b[lane];
            largest[lane] = largest[lane].max(products[lane].abs());
        }
    }
    // A power of two, of which terms become whole multiples; their sum is exact.
    let power = largest.map(power);
    let mut sums = [0.0f32; 8];
    for terms in products[..a.len()].iter().chain([&*c]) {
        for lane in 0..8 {
            sums[lane] += (terms[lane] / power[lane] * 8192.0).trunc();
        }
    }
    for lane in 0..8 {
        c[lane] = if power[lane] == 0.0 {
            // Products of 8-bit floats are no subnormals: they are all 0.
            c[lane]
        } else if largest[lane].is_infinite() {
            products[..a.len()].iter().fold(c[lane], |sum, products| sum + products[lane])
        } else {
            f32::from_bits((sums[lane] * (power[lane] / 8192.0)).to_bits() & !LOST)
        };
    }
}

/// [`multiply_add`] by [`Sums::Cut4`] or [`Sums::Cut8`]: so many products at a time, cut so many bits below an f32's last.
#[inline(always)]
fn multiply_add_cut<const P: usize>(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize, extra_bits: i32) {
    // Of 0 it is not 0: infinity times that is infinite, as the product is not finite.
    let factor = |x: f32| power(x).max(f32::MIN_POSITIVE);
    let ones = power_of_two(23 + extra_bits);
    for column in (0..n).step_by(8) {
        for depth in (0..k).step_by(P) {
            let mut right = [[0.0f32; 8]; P];
            for (index, right) in right.iter_mut().enumerate() {
                right.copy_from_slice(&b[(depth + index) * n + column..][..8]);
            }
            let powers = right.map(|right| right.map(factor));
            for (a, c) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
                let mut left = [0.0f32; P];
                left.copy_from_slice(&a[depth..][..P]);
                let sums = &mut c[column..][..8];
                let mut before = [0.0f32; 8];
                before.copy_from_slice(sums);
                sums.copy_from_slice(&cut(&left, &left.map(factor), &right, &powers, before, ones));
            }
        }
    }
}

/// Eight columns of a row of [`multiply_add_cut`]: terms are cut to multiples of what is so many times less than the largest power of two.
#[inline(always)]
fn cut<const P: usize>(
    left: &[f32; P],
    left_powers: &[f32; P],
    right: &[[f32; 8]; P],
    right_powers: &[[f32; 8]; P],
    before: [f32; 8],
    ones: f32,
) -> [f32; 8] {
    /// Of an f64's fraction, the bits that an f32 does not have.
    const LOST: u64 = (1 << 29) - 1;
    let mut largest = before.map(power);
    for index in 0..P {
        for lane in 0..8 {
            let power = left_powers[index] * right_powers[index][lane];
            // Not `max`, which asks for NaN: powers are numbers.
            largest[lane] = if power > largest[lane] { power } else { largest[lane] };
        }
    }
    let scales = largest.map(|largest| ones / largest);
    let cut = |term: f32, lane: usize| f64::from((term * scales[lane]).trunc());
    let mut sums = [0.0f64; 8];
    for lane in 0..8 {
        sums[lane] = cut(before[lane], lane);
    }
    for index in 0..P {
        for lane in 0..8 {
            sums[lane] += cut(left[index] * right[index][lane], lane);
        }
    }
    let mut after = [0.0; 8];
    for lane in 0..8 {
        let sum = f64::from_bits(sums[lane].to_bits() & !LOST);
        after[lane] = sum as f32 / scales[lane];
    }
    if largest.iter().fold(false, |any, largest| any | !USUAL.contains(largest)) {
        sum_unusual(left, right, &before, &largest, &mut after);
    }
    after
}

/// Where multiples of the least that counts are normal numbers, and products finite.
const USUAL: Range<f32> = power_of_two(-100)..power_of_two(100);

/// The sums whose largest power is not [`USUAL`]: of zeros, infinities, and numbers so small that what is cut does not matter.
#[cold]
#[inline(never)]
fn sum_unusual(left: &[f32], right: &[[f32; 8]], before: &[f32; 8], largest: &[f32; 8], after: &mut [f32; 8]) {
    for lane in 0..8 {
        if !USUAL.contains(&largest[lane]) {
            after[lane] = left.iter().zip(right).fold(before[lane], |sum, (left, right)| sum + left * right[lane]);
        }
    }
}

/// 2 to that power, of a normal number.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Four rows and `W` columns of [`multiply_add`].
#[inline(always)]
fn block<const W: usize>(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize, column: usize) {
    let mut sums = [[0.0; W]; 4];
    for (row, sums) in sums.iter_mut().enumerate() {
        sums.copy_from_slice(&c[row * n + column..][..W]);
    }
    for (depth, b) in b.chunks_exact(n).enumerate().take(k) {
        let b = &b[column..][..W];
        for (row, sums) in sums.iter_mut().enumerate() {
            let a = a[row * k + depth];
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = a.mul_add(b, *sum);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        c[row * n + column..][..W].copy_from_slice(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_bytes_are_cut_where_the_largest_ends() {
        let sum = |a: [f32; 32], c: f32| {
            let (mut b, mut c) = (vec![0.0; 32 * 8], [c; 8]);
            b.iter_mut().skip(3).step_by(8).for_each(|b| *b = 1.0);
            Sums::CutBytes.multiply_add(&a, &b, &mut c, 32, 8);
            assert!(c[2].total_cmp(&c[4]).is_eq(), "{c:?}");
            c[3]
        };
        let terms = |given: &[f32]| std::array::from_fn(|index| given.get(index).copied().unwrap_or(0.0));
        let tiny = 2f32.powi(-14);
        assert_eq!(sum(terms(&[1.0, 2.0 * tiny]), 0.0), 1.0 + 2.0 * tiny);
        assert_eq!(sum(terms(&[1.0, tiny, tiny, -tiny]), 0.0), 1.0, "each is cut toward zero by itself");
        assert_eq!(sum(terms(&[tiny, tiny]), 0.0), 2.0 * tiny);
        assert_eq!(sum(terms(&[1.0, 1.0, 2.0 * tiny]), 0.0), 2.0, "the sum has as many bits");
        assert_eq!(sum(terms(&[3.0 * tiny]), 1.0 + f32::EPSILON), 1.0 + 2.0 * tiny, "so has the accumulator");
        assert_eq!(sum([0.0; 32], 0.0), 0.0);
        assert_eq!(sum(terms(&[1.0]), f32::INFINITY), f32::INFINITY);
        assert!(sum(terms(&[1.0, f32::NAN]), 1.0).is_nan());
    }

    #[test]
    fn every_fp8_number_is_exact() {
        let value = |code: usize, exponent_bits: u32, bias: i32| {
            let mantissa_bits = 7 - exponent_bits;
            let exponent = (code & 0x7f) >> mantissa_bits;
            let mantissa = (code & ((1 << mantissa_bits) - 1)) as f64 / f64::from(1u32 << mantissa_bits);
            let magnitude = match exponent {
                0 => mantissa * 2f64.powi(1 - bias),
                exponent => (1.0 + mantissa) * 2f64.powi(exponent as i32 - bias),
            };
            if code & 0x80 == 0 { magnitude } else { -magnitude }
        };
        for code in 0..256usize {
            let e4m3 = e4m3(code as u32)[0];
            let e5m2 = e5m2(code as u32)[0];
            match code & 0x7f {
                0x7f => assert!(e4m3.is_nan()),
                _ => assert_eq!(f64::from(e4m3), value(code, 4, 7)),
            }
            match code & 0x7f {
                0x7c => assert!(e5m2.is_infinite()),
                0x7d.. => assert!(e5m2.is_nan()),
                _ => assert_eq!(f64::from(e5m2), value(code, 5, 15)),
            }
        }
        assert_eq!(e4m3(0x7e)[0], 448.0);
    }

    #[test]
    fn words_are_read_from_the_low_bits_up() {
        assert_eq!(f16(0x4000_3c00), [1.0, 2.0]);
        assert_eq!(bf16(0x4000_3f80), [1.0, 2.0]);
        assert_eq!(s8(0x80ff_7f01), [1.0, 127.0, -1.0, -128.0]);
        assert_eq!(u8(0x80ff_7f01), [1.0, 127.0, 255.0, 128.0]);
        assert_eq!(tf32(0x3f80_1fff)[0], 1.0, "cut, not rounded");
    }

    #[test]
    fn products_of_tf32_are_cut_where_the_largest_ends() {
        let sum = |sums: Sums, a: &[f32], c: f32| {
            let (mut b, mut c) = (vec![0.0; 8 * 8], [c; 8]);
            b.iter_mut().skip(3).step_by(8).for_each(|b| *b = 1.5);
            let a: [f32; 8] = std::array::from_fn(|index| a.get(index).map_or(0.0, |a| a / 1.5));
            sums.multiply_add(&a, &b, &mut c, 8, 8);
            c[3]
        };
        let hopper = |a: &[f32], c| sum(Sums::Cut8, a, c);
        let ampere = |a: &[f32], c| sum(Sums::Cut4, a, c);
        let (one, ulp) = (1.0, f32::EPSILON);
        assert_eq!(hopper(&[1.5, -1.5, 3.0 * ulp], 0.0), 3.0 * ulp);
        assert_eq!(hopper(&[0.75 * ulp], one), one, "the sum is cut, not rounded");
        assert_eq!(hopper(&[0.75 * ulp, 0.75 * ulp], one), one + ulp, "of which the terms have more bits");
        assert_eq!(ampere(&[0.75 * ulp, 0.75 * ulp], one), one + ulp);
        assert_eq!(hopper(&[0.375 * ulp; 4], one), one + ulp);
        assert_eq!(ampere(&[0.375 * ulp; 4], one), one, "each is cut by itself");
        assert_eq!(hopper(&[0.375 * ulp; 4], -one), -one + ulp, "below one there are more numbers");
        assert_eq!(hopper(&[0.0, 0.0, 0.0, 0.0, 0.375 * ulp, 0.0, 0.0, 0.375 * ulp], one), one);
        assert_eq!(hopper(&[], 0.0), 0.0);
        assert_eq!(hopper(&[1.5e-38], 1e-38), 2.5e-38);
        assert_eq!(hopper(&[1.5], f32::INFINITY), f32::INFINITY);
        assert!(hopper(&[f32::NAN], 1.0).is_nan());
        let mut c = [1.0; 8];
        Sums::Cut8.multiply_add(&[f32::INFINITY; 8], &[0.0; 64], &mut c, 8, 8);
        assert!(c[0].is_nan());
    }

    struct Product<'a>(Sums, &'a [f32], &'a [f32], &'a mut [f32], usize, usize);

    impl Vectorised for Product<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            self.0.multiply_add(self.1, self.2, self.3, self.4, self.5);
        }
    }

    #[test]
    fn products_agree_with_the_formula_at_every_level() {
        for (m, n, k) in [(8, 8, 16), (16, 8, 4), (64, 40, 8), (64, 256, 32)] {
            let a: Vec<f32> = (0..m * k).map(|i| (i * 37 % 101) as f32 - 50.3).collect();
            let b: Vec<f32> = (0..k * n).map(|i| (i * 53 % 97) as f32 * 0.37).collect();
            let mut expected = vec![0.25f32; m * n];
            for (row, column, depth) in (0..m * n).flat_map(|at| (0..k).map(move |depth| (at / n, at % n, depth))) {
                let sum = &mut expected[row * n + column];
                *sum = a[row * k + depth].mul_add(b[depth * n + column], *sum);
            }
            for level in [Level::Portable, Level::detect()] {
                let mut c = vec![0.25f32; m * n];
                at(level, Product(Sums::Rounded, &a, &b, &mut c, k, n));
                assert_eq!(c, expected, "{m}x{n}x{k} {level:?}");
            }
        }
    }

    #[test]
    fn cut_products_are_near_the_exact_ones_at_every_level() {
        let (m, n, k) = (16, 24, 8);
        let a: Vec<f32> = (0..m * k).map(|i| tf32(((i * 37 % 101) as f32 - 50.3).to_bits())[0]).collect();
        let b: Vec<f32> = (0..k * n).map(|i| tf32(((i * 53 % 97) as f32 * 0.37).to_bits())[0]).collect();
        for (sums, extra_bits) in [(Sums::Cut4, 1), (Sums::Cut8, 2)] {
            let [mut portable, mut detected] = [(); 2].map(|()| vec![0.25f32; m * n]);
            at(Level::Portable, Product(sums, &a, &b, &mut portable, k, n));
            at(Level::detect(), Product(sums, &a, &b, &mut detected, k, n));
            assert_eq!(portable, detected);
            for (index, found) in portable.into_iter().enumerate() {
                let terms =
                    (0..k).map(|depth| f64::from(a[index / n * k + depth]) * f64::from(b[depth * n + index % n]));
                let terms: Vec<f64> = terms.chain([0.25]).collect();
                let largest = terms.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
                let exact: f64 = terms.iter().sum();
                // Each term loses less than one of its last bits, and the sums of all, or of four each, one of theirs.
                let ulp = 2f64.powi(-23) * largest;
                let allowed = 10.0 * ulp / f64::from(1 << extra_bits) + 2.0 * 2f64.powi(-23) * exact.abs().max(largest);
                assert!((f64::from(found) - exact).abs() <= allowed, "{sums:?} {index}: {found} for {exact}");
            }
        }
    }
}
