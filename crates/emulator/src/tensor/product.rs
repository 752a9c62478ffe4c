//! A product of matrices in the registers of a warp, or of the four warps of a warpgroup.

use crate::lanes::Lanes;
use crate::tensor::fragment::{self, read_a, read_b};
use crate::tensor::numerics::{Element, Sums, Vectorised, widened};

/// What accumulators hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulator {
    F16,
    F32,
    S32,
}

impl Accumulator {
    pub(crate) fn of(ty: ptx::Type) -> Option<Self> {
        match ty {
            ptx::Type::F16 => Some(Self::F16),
            ptx::Type::F32 => Some(Self::F32),
            ptx::Type::S32 => Some(Self::S32),
            _ => None,
        }
    }

    /// Registers of a lane for `elements` elements.
    pub(crate) const fn registers(self, elements: usize) -> usize {
        match self {
            Self::F16 => elements / 2,
            Self::F32 | Self::S32 => elements,
        }
    }
}

/// The types and extents of a product; `m` is a warp's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Element,
    pub b: Element,
    /// What is added to, and what comes out.
    pub c: Accumulator,
    pub d: Accumulator,
    /// `.satfinite`: integer sums are clamped.
    pub clamp: bool,
    pub sums: Sums,
}

impl Shape {
    /// Registers of a lane that hold A, B (one column group), and the accumulator in and out.
    pub(crate) const fn registers(&self) -> [usize; 4] {
        let elements = self.m * self.n / 32;
        [
            self.m * self.k / (32 * self.a.per_word()),
            8 * self.k / (32 * self.b.per_word()),
            self.c.registers(elements),
            self.d.registers(elements),
        ]
    }

    /// Puts what accumulators hold into `out`, `[m][n]`; of integers, and where they are not read, zeros.
    #[inline(always)]
    pub(crate) fn read_accumulator(&self, file: &[Lanes], places: Option<&[u32]>, out: &mut [f32]) {
        match (self.c, places) {
            (Accumulator::F16, Some(places)) => fragment::read_halves(file, places, self.m, self.n, out),
            (Accumulator::F32, Some(places)) => fragment::read_words(file, places, self.m, self.n, out),
            _ => out.fill(0.0),
        }
    }

    /// Puts the result into registers. Integers are added to what `from` holds.
    #[inline(always)]
    pub(crate) fn write_accumulator(&self, sums: &[f32], file: &mut [Lanes], from: Option<&[u32]>, to: &[u32]) {
        let Self { m, n, clamp, .. } = *self;
        match self.d {
            Accumulator::F16 => fragment::write_halves(sums, m, n, file, to),
            Accumulator::F32 => fragment::write_words(sums, m, n, file, to),
            Accumulator::S32 => fragment::add_integers(sums, m, n, clamp, file, from, to),
        }
    }
}

/// `mma.sync`: `d = a * b + c` in one warp, `n` is 8.
pub(crate) struct WarpProduct<'a> {
    pub shape: Shape,
    pub file: &'a mut [Lanes],
    pub a: &'a [u32],
    pub b: &'a [u32],
    pub c: &'a [u32],
    pub d: &'a [u32],
}

/// The deepest `k`, and the elements of an operand or accumulator of [`WarpProduct`] at most.
const DEEPEST: usize = 32;

impl Vectorised for WarpProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Shape { m, n, k, .. } = self.shape;
        let (mut a, mut b, mut c) = ([0.0; 16 * DEEPEST], [0.0; 8 * DEEPEST], [0.0; 16 * 8]);
        let (a, b, c) = (&mut a[..m * k], &mut b[..8 * k], &mut c[..m * n]);
        widened!(self.shape.a, read_a(self.file, self.a, m, k, a));
        widened!(self.shape.b, read_b(self.file, self.b, b));
        self.shape.read_accumulator(self.file, Some(self.c), c);
        self.shape.sums.multiply_add(a, b, c, k, n);
        self.shape.write_accumulator(c, self.file, Some(self.c), self.d);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::interpret::Level;
    use crate::lanes::WARP;
    use crate::tensor::numerics;

    /// The bits of a small number, and what they are as a number.
    fn bits_of(element: Element, seed: usize) -> (u32, f64) {
        let small = (seed * 29 % 15) as f64 - 7.0;
        match element {
            Element::F16 => (f16::from_f64(small * 0.25).to_bits().into(), small * 0.25),
            Element::Bf16 => (bf16::from_f64(small * 0.5).to_bits().into(), small * 0.5),
            Element::Tf32 => ((small as f32 * 0.125).to_bits(), small * 0.125),
            Element::E4m3 => (seed as u32 * 7 % 64, f64::from(numerics::e4m3(seed as u32 * 7 % 64)[0])),
            Element::E5m2 => (seed as u32 * 5 % 72, f64::from(numerics::e5m2(seed as u32 * 5 % 72)[0])),
            Element::S8 => ((seed * 31 % 256) as u32, f64::from((seed * 31 % 256) as u8 as i8)),
            Element::U8 => ((seed * 31 % 256) as u32, f64::from((seed * 31 % 256) as u8)),
        }
    }

    /// Element `i` of A in a lane, as the manual's formulas for each shape give row and column, written out.
    fn a_place(shape: &Shape, lane: usize, i: usize) -> (usize, usize) {
        let (group, thread) = (lane >> 2, lane % 4);
        let (row_high, column) = match (shape.m, shape.k, shape.a.per_word()) {
            // .m16n8k8 f16: rows by register, columns 2 t + i.
            (16, 8, 2) => (i >= 2, 2 * thread + (i & 1)),
            // .m16n8k16 f16.
            (16, 16, 2) => ((2..4).contains(&i) || i >= 6, 2 * thread + (i & 1) + if i >= 4 { 8 } else { 0 }),
            // .m16n8k4 and .m16n8k8 tf32.
            (16, 4, 1) => (i == 1, thread),
            (16, 8, 1) => (i == 1 || i == 3, thread + if i >= 2 { 4 } else { 0 }),
            // .m8n8k16 and .m16n8k16 of bytes.
            (8, 16, 4) => (false, 4 * thread + (i & 3)),
            (16, 16, 4) => (i >= 4, 4 * thread + (i & 3)),
            // .m16n8k32.
            (16, 32, 4) => ((4..8).contains(&i) || i >= 12, 4 * thread + (i & 3) + if i >= 8 { 16 } else { 0 }),
            other => unreachable!("{other:?}"),
        };
        (group + if row_high { 8 } else { 0 }, column)
    }

    fn b_place(shape: &Shape, lane: usize, i: usize) -> (usize, usize) {
        let (group, thread) = (lane >> 2, lane % 4);
        let row = match (shape.k, shape.b.per_word()) {
            (8, 2) => 2 * thread + i,
            (16, 2) => 2 * thread + (i & 1) + if i >= 2 { 8 } else { 0 },
            (4, 1) => thread,
            (8, 1) => thread + 4 * i,
            (16, 4) => 4 * thread + i,
            (32, 4) => 4 * thread + (i & 3) + if i >= 4 { 16 } else { 0 },
            other => unreachable!("{other:?}"),
        };
        (row, group)
    }

    fn c_place(shape: &Shape, lane: usize, i: usize) -> (usize, usize) {
        let (group, thread) = (lane >> 2, lane % 4);
        match shape.m {
            8 => (group, 2 * thread + i),
            _ => (if i < 2 { group } else { group + 8 }, 2 * thread + (i & 1)),
        }
    }

    fn check(shape: Shape) {
        let [a_count, b_count, c_count, d_count] = shape.registers();
        let mut file = vec![Lanes([0; WARP]); a_count + b_count + c_count + d_count];
        let places: Vec<u32> = (0..file.len() as u32).collect();
        let (a_places, rest) = places.split_at(a_count);
        let (b_places, rest) = rest.split_at(b_count);
        let (c_places, d_places) = rest.split_at(c_count);
        let mut exact = vec![0.0f64; shape.m * shape.n];
        // What is summed, without signs: rounding is relative to it.
        let mut size = exact.clone();
        let (mut a, mut b) = (vec![0.0; shape.m * shape.k], vec![0.0; shape.k * 8]);
        for lane in 0..WARP {
            for (element, count, places, matrix, stride, place) in [
                (shape.a, a_count, a_places, &mut a, shape.k, a_place as fn(&Shape, usize, usize) -> (usize, usize)),
                (shape.b, b_count, b_places, &mut b, 8, b_place),
            ] {
                let per_word = element.per_word();
                for i in 0..count * per_word {
                    let (row, column) = place(&shape, lane, i);
                    let (bits, value) = bits_of(element, row * 40 + column * 3 + per_word);
                    file[places[i / per_word] as usize].0[lane] |= bits << (32 / per_word * (i % per_word));
                    matrix[row * stride + column] = value;
                }
            }
            for i in 0..shape.m * shape.n / 32 {
                let (row, column) = c_place(&shape, lane, i);
                let value = (row * 8 + column) as f64 - 60.0;
                let (register, bits) = match shape.c {
                    Accumulator::F16 => (i / 2, u32::from(f16::from_f64(value).to_bits()) << (16 * (i % 2))),
                    Accumulator::F32 => (i, (value as f32).to_bits()),
                    Accumulator::S32 => (i, value as i32 as u32),
                };
                file[c_places[register] as usize].0[lane] |= bits;
                exact[row * shape.n + column] = value;
                size[row * shape.n + column] = value.abs();
            }
        }
        for (row, column, depth) in
            (0..exact.len()).flat_map(|at| (0..shape.k).map(move |depth| (at / shape.n, at % shape.n, depth)))
        {
            let product = a[row * shape.k + depth] * b[depth * 8 + column];
            exact[row * shape.n + column] += product;
            size[row * shape.n + column] += product.abs();
        }
        for level in [Level::Portable, Level::detect()] {
            let mut file = file.clone();
            numerics::at(
                level,
                WarpProduct { shape, file: &mut file, a: a_places, b: b_places, c: c_places, d: d_places },
            );
            for lane in 0..WARP {
                for i in 0..shape.m * shape.n / 32 {
                    let (row, column) = c_place(&shape, lane, i);
                    let (expected, size) = (exact[row * shape.n + column], size[row * shape.n + column]);
                    let summing = size * shape.k as f64 * 2f64.powi(-24);
                    let word = |register: usize| file[d_places[register] as usize].0[lane];
                    let (found, tolerance) = match shape.d {
                        Accumulator::F16 => {
                            let half = f16::from_bits((word(i / 2) >> (16 * (i % 2))) as u16);
                            (half.to_f64(), summing + expected.abs() * 2f64.powi(-11))
                        }
                        Accumulator::F32 => (f32::from_bits(word(i)).into(), summing),
                        Accumulator::S32 => (f64::from(word(i) as i32), 0.0),
                    };
                    assert!(
                        (found - expected).abs() <= tolerance,
                        "{shape:?} {level:?} lane {lane} element {i}: {found} for {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_shape_multiplies() {
        use Accumulator::{F16, F32, S32};
        use Element::{Bf16, E4m3, E5m2, S8, Tf32, U8};
        let shape =
            |m, k, a, b, c, d| Shape { m, n: 8, k, a, b, c, d, clamp: false, sums: Sums::of(a, arch::Sm::Sm90) };
        for k in [8, 16] {
            for (c, d) in [(F16, F16), (F32, F32), (F32, F16), (F16, F32)] {
                check(shape(16, k, Element::F16, Element::F16, c, d));
            }
            check(shape(16, k, Bf16, Bf16, F32, F32));
        }
        for k in [4, 8] {
            check(shape(16, k, Tf32, Tf32, F32, F32));
        }
        for k in [16, 32] {
            for (a, b) in [(E4m3, E4m3), (E4m3, E5m2), (E5m2, E4m3), (E5m2, E5m2)] {
                check(shape(16, k, a, b, F32, F32));
                check(shape(16, k, a, b, F16, F16));
            }
            for (a, b) in [(S8, S8), (S8, U8), (U8, S8), (U8, U8)] {
                check(shape(16, k, a, b, S32, S32));
                check(shape(8, 16, a, b, S32, S32));
            }
        }
    }

    #[test]
    fn integers_wrap_or_are_clamped() {
        for (clamp, expected) in [(false, (i32::MAX).wrapping_add(16 * 127 * 127)), (true, i32::MAX)] {
            let shape = Shape {
                m: 8,
                n: 8,
                k: 16,
                a: Element::S8,
                b: Element::S8,
                c: Accumulator::S32,
                d: Accumulator::S32,
                clamp,
                sums: Sums::Rounded,
            };
            let mut file = vec![Lanes([0x7f7f_7f7f; WARP]); 2];
            file.extend([Lanes([i32::MAX as u32; WARP]); 2]);
            let product = WarpProduct { shape, file: &mut file, a: &[0], b: &[1], c: &[2, 3], d: &[2, 3] };
            numerics::at(Level::Portable, product);
            assert_eq!(file[2].0, [expected as u32; WARP]);
        }
    }
}
