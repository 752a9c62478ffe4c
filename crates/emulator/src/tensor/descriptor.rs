//! Matrices in shared memory as `wgmma` reads them (PTX ISA 9.7.15.5.1.2).
//!
//! A matrix is made of *chunks* of 16 bytes. In a K-major matrix a chunk holds elements that follow each other along `k`, in an
//! MN-major one along the rows of A or columns of B. Where each chunk lies is said by the canonical layouts of the manual's
//! table in 9.7.15.5.1.2.1.3, and the swizzle then exchanges chunks: it xors address bits 4 and up with bits 7 and up.

use thiserror::Error;

/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 16;

/// Along which dimension elements follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Major {
    K,
    Mn,
}

/// What a 64-bit matrix descriptor says; offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub start: u32,
    pub leading: u32,
    pub stride: u32,
    pub base_offset: u32,
    /// Chunks of a row of the swizzle's pattern: 1 (no swizzle), 2, 4 or 8.
    pub width: u32,
}

/// Why a number is not a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum DescriptorError {
    #[error("bits {bits:#x} are set, which are reserved (14 to 15, 30 to 31, 46 to 48, 52 to 61)")]
    Reserved { bits: u64 },
    #[error("the base offset is {base_offset}, which needs a swizzle (bits 62 and 63 are 0)")]
    BaseOffset { base_offset: u32 },
}

const RESERVED: u64 = 0x3ff1_c000_c000_c000;

impl Descriptor {
    /// Reads a descriptor (9.7.15.5.1.2.2).
    pub(crate) fn decode(bits: u64) -> Result<Self, DescriptorError> {
        if bits & RESERVED != 0 {
            return Err(DescriptorError::Reserved { bits: bits & RESERVED });
        }
        let field = |at: u32| (bits >> at & 0x3fff) as u32 * CHUNK as u32;
        let width = [1, 8, 4, 2][(bits >> 62) as usize];
        let base_offset = (bits >> 49 & 7) as u32;
        if width == 1 && base_offset != 0 {
            return Err(DescriptorError::BaseOffset { base_offset });
        }
        Ok(Self { start: field(0), leading: field(16), stride: field(32), base_offset, width })
    }

    /// The bits that say this.
    #[cfg(test)]
    pub(crate) fn encode(self) -> u64 {
        let field = |bytes: u32| u64::from(bytes / CHUNK as u32);
        let swizzle = [0, 3, 2, 1][self.width.trailing_zeros() as usize];
        field(self.start)
            | field(self.leading) << 16
            | field(self.stride) << 32
            | u64::from(self.base_offset) << 49
            | swizzle << 62
    }

    /// Exchanges chunks. The pattern starts where the base offset says: at address bits 7 to 9 equal to it.
    #[inline(always)]
    fn swizzle(&self, address: u32) -> u32 {
        let row = (address >> 7).wrapping_sub(self.base_offset) & (self.width - 1);
        address ^ row << 4
    }

    /// Calls `visit(mn, chunk, address)` for every chunk of a K-major matrix of `mn` rows (A) or columns (B), and `k` that is 32
    /// bytes long: two chunks.
    #[inline(always)]
    pub(crate) fn for_each_k_major(&self, mn: usize, mut visit: impl FnMut(usize, usize, u32)) {
        // With a swizzle the leading offset is not used.
        let step = if self.width == 1 { self.leading } else { CHUNK as u32 };
        for index in 0..mn {
            let (group, row) = (index as u32 / 8, index as u32 % 8);
            let start = self.start + group * self.stride + row * self.width * CHUNK as u32;
            visit(index, 0, self.swizzle(start));
            visit(index, 1, self.swizzle(start + step));
        }
    }

    /// Calls `visit(k, unit, address)` for every chunk of an MN-major matrix of `units` chunks along M or N.
    #[inline(always)]
    pub(crate) fn for_each_mn_major(&self, units: usize, k: usize, mut visit: impl FnMut(usize, usize, u32)) {
        let chunk = CHUNK as u32;
        // Without a swizzle the two offsets change places.
        let (along_mn, along_k) =
            if self.width == 1 { (self.stride, self.leading) } else { (self.leading, self.stride) };
        for depth in 0..k {
            let (group, row) = (depth as u32 / 8, depth as u32 % 8);
            let start = self.start + group * along_k + row * self.width * chunk;
            for unit in 0..units {
                let (repeat, inside) = (unit as u32 / self.width, unit as u32 % self.width);
                visit(depth, unit, self.swizzle(start + repeat * along_mn + inside * chunk));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A CuTe layout: shapes and strides of modes within modes, flattened, first mode fastest.
    fn layout(mut index: usize, modes: &[(usize, usize)]) -> usize {
        modes.iter().fold(0, |offset, &(shape, stride)| {
            let at = index % shape;
            index /= shape;
            offset + at * stride
        })
    }

    /// `Swizzle<bits, 4, 3>` of byte addresses.
    fn swizzle(bits: u32, address: usize) -> usize {
        address ^ (address >> 7 & ((1 << bits) - 1)) << 4
    }

    fn width(bits: u32) -> u32 {
        1 << bits
    }

    /// The canonical layouts of the manual, element by element, against the chunks.
    #[test]
    fn chunks_lie_where_the_canonical_layouts_put_them() {
        for bits in 0..=3 {
            for element_bytes in [1usize, 2, 4] {
                let t = CHUNK / element_bytes;
                let w = width(bits) as usize;
                let (m, k) = (4, 1);
                let (leading, stride) = (1024 * 3, 1024 * 2);
                let (lbo, sbo) = (leading / element_bytes, stride / element_bytes);
                let descriptor = Descriptor {
                    start: 4096,
                    leading: leading as u32,
                    stride: stride as u32,
                    base_offset: 0,
                    width: width(bits),
                };
                let rows = [(8, w * t), (m, sbo)];
                let columns = [(t, 1), (2 * k, if bits == 0 { lbo } else { t })];
                let mut seen = 0;
                descriptor.for_each_k_major(8 * m, |mn, chunk, address| {
                    let element = layout(mn, &rows) + layout(chunk * t, &columns);
                    assert_eq!(address as usize, swizzle(bits, 4096 + element * element_bytes), "{bits} {mn} {chunk}");
                    seen += 1;
                });
                assert_eq!(seen, 8 * m * 2);

                // Only 16-bit types are MN-major.
                let (m, k) = (2, 2);
                let rows = [(t, 1), (w, t), (m, if bits == 0 { sbo } else { lbo })];
                let columns = [(8, w * t), (k, if bits == 0 { lbo } else { sbo })];
                let mut seen = 0;
                descriptor.for_each_mn_major(w * m, 8 * k, |depth, unit, address| {
                    let element = layout(unit * t, &rows) + layout(depth, &columns);
                    assert_eq!(
                        address as usize,
                        swizzle(bits, 4096 + element * element_bytes),
                        "{bits} {depth} {unit}"
                    );
                    seen += 1;
                });
                assert_eq!(seen, w * m * 8 * k);
            }
        }
    }

    /// A pattern that starts at 0x280 lies as one that starts at 0, moved.
    #[test]
    fn a_base_offset_moves_the_pattern() {
        let at = |start: u32, base_offset: u32| {
            let mut found = Vec::new();
            let descriptor = Descriptor { start, leading: 16, stride: 1024, base_offset, width: 8 };
            descriptor.for_each_k_major(8, |_, _, address| found.push(address - start));
            found
        };
        assert_eq!(at(0x280, 5), at(0, 0));
        assert_ne!(at(0x280, 0), at(0, 0));
    }

    #[test]
    fn descriptors_are_read_field_by_field() {
        // What Triton sets for 128-byte rows.
        let found = Descriptor::decode(0x4000_0040_0001_0000 | 0x8000 >> 4).unwrap();
        assert_eq!(found, Descriptor { start: 0x8000, leading: 16, stride: 1024, base_offset: 0, width: 8 });
        assert_eq!(Descriptor::decode(found.encode()), Ok(found));
        assert_eq!(Descriptor::decode(1 << 52), Err(DescriptorError::Reserved { bits: 1 << 52 }));
        assert_eq!(Descriptor::decode(3 << 49), Err(DescriptorError::BaseOffset { base_offset: 3 }));
        assert_eq!(RESERVED.count_ones(), 2 + 2 + 3 + 10);
    }
}
