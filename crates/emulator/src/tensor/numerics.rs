//! The arithmetic of tensor cores.
//!
//! Products of the operand types are exact in f32, and the manual leaves open in which order and precision they are summed
//! (PTX ISA 9.7.14.5, 9.7.15.5: "at least single precision"). The emulator fixes one: an accumulator takes the products one
//! by one, `k` ascending, rounding to f32 each time (a fused multiply-add). Chips sum several at once and truncate what they
//! align, so results are compared with tolerances, never bit for bit.
//!
//! - `wgmma` on e4m3 and e5m2 loses so much on a chip that it shows in results: the products of an instruction and the accumulator
//!   are aligned to the largest of them, and what is less than 2^-13 of its power of two is cut off each, and off the sum
//!   (DeepSeek-V3 Technical Report, 3.3.2: about 14 bits are kept). So does the emulator.
//! - f16 accumulators are widened, take all products of the instruction in f32, and are rounded to nearest even once at its end.
//! - tf32 operands are cut, not rounded: the manual says that the lower 13 bits are ignored; `cvt.rna.tf32` is what rounds.
//! - e4m3 and e5m2 are widened exactly. e4m3 has NaN (0x7f, 0xff) and no infinity.
//! - Integer products are summed exactly and wrap into s32, or are clamped to it with `.satfinite`.

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
pub(crate) fn multiply_add(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
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

/// [`multiply_add`] of 8-bit floats as `wgmma` does it: all products at once, cut to 13 bits after the largest one's first.
#[inline(always)]
pub(crate) fn multiply_add_cut(a: &[f32], b: &[f32], c: &mut [f32], k: usize, n: usize) {
    for (a, c) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (column, c) in (0..n).step_by(8).zip(c.as_chunks_mut().0) {
            cut(a, &b[column..], c, n);
        }
    }
}

/// Eight columns of a row of [`multiply_add_cut`].
#[inline(always)]
fn cut(a: &[f32], b: &[f32], c: &mut [f32; 8], n: usize) {
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
    let power = largest.map(|x| f32::from_bits(x.to_bits() & f32::INFINITY.to_bits()));
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
            multiply_add_cut(&a, &b, &mut c, 32, 8);
            assert!(c[2] == c[4], "{c:?}");
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

    struct Product<'a>(&'a [f32], &'a [f32], &'a mut [f32], usize, usize);

    impl Vectorised for Product<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            multiply_add(self.0, self.1, self.2, self.3, self.4);
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
                at(level, Product(&a, &b, &mut c, k, n));
                assert_eq!(c, expected, "{m}x{n}x{k} {level:?}");
            }
        }
    }
}
