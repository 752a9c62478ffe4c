//! Boxes of tensors: which bytes of global memory a tensor copy moves, and where they lie in shared memory (PTX ISA 5.5).

use ptx::{Element, OutOfBounds, TensorMap};

/// Bytes that follow each other on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// In shared memory.
    pub shared: u32,
    /// In global memory; `None` outside the tensor.
    pub global: Option<u64>,
    pub bytes: u32,
}

/// A box in shared memory.
pub(crate) struct Box {
    pub runs: Vec<Run>,
    /// From its first to behind its last byte.
    pub bytes: u32,
    /// Sectors of global memory that its rows touch.
    pub sectors: u64,
}

/// The bytes of the box of a valid map whose first element is at coordinates `at` (the innermost first), at an address of shared
/// memory. Rows are packed; where a swizzle is wider than a row, a row takes the bytes of the swizzle.
pub(crate) fn of(map: &TensorMap, at: &[i32], shared: u32) -> Box {
    let size = map.element.bytes();
    let row = map.box_sizes[0] * size;
    let pitch = map.swizzle.span().unwrap_or(row);
    // The elements of a row that lie in the tensor.
    let first = i64::from(at[0]);
    let low = (-first).clamp(0, map.box_sizes[0].into()) as u32;
    let high = (map.sizes[0] as i64 - first).clamp(low.into(), map.box_sizes[0].into()) as u32;
    let rows: u32 = (1..map.rank()).map(|dimension| map.copied(dimension)).product();
    let mut sectors = 0u64;
    let mut runs = Vec::new();
    for number in 0..rows {
        let mut rest = number;
        let mut address = Some(map.address.wrapping_add_signed(first * i64::from(size)));
        for dimension in 1..map.rank() {
            let copied = map.copied(dimension);
            let place = i64::from(at[dimension]) + i64::from(rest % copied * map.element_strides[dimension]);
            rest /= copied;
            let inside = (0..map.sizes[dimension] as i64).contains(&place);
            let stride = map.strides[dimension - 1] as i64;
            address = address.filter(|_| inside).map(|address| address.wrapping_add_signed(place.wrapping_mul(stride)));
        }
        let (low, high) = if address.is_some() { (low * size, high * size) } else { (row, row) };
        if let Some(address) = address.filter(|_| low < high) {
            let inside = address.wrapping_add(low.into()) % crate::pattern::SECTOR;
            sectors += (inside + u64::from(high - low)).div_ceil(crate::pattern::SECTOR);
        }
        let mut segment = |from: u32, to: u32, address: Option<u64>| {
            let mut at = from;
            while at < to {
                // Chunks of 16 bytes move as wholes.
                let end = if map.swizzle.span().is_some() { to.min((at / 16 + 1) * 16) } else { to };
                let place = map.swizzle.apply(u64::from(shared + number * pitch + at)) as u32;
                let global = address.map(|address| address.wrapping_add(at.into()));
                runs.push(Run { shared: place, global, bytes: end - at });
                at = end;
            }
        };
        segment(0, low, None);
        segment(low, high, address);
        segment(high, row, None);
    }
    Box { runs, bytes: rows * pitch, sectors }
}

/// What an element outside the tensor reads as.
pub(crate) fn fill(map: &TensorMap) -> [u8; 8] {
    let nan: u64 = match map.element {
        _ if map.out_of_bounds == OutOfBounds::Zeros => 0,
        Element::F16 | Element::Bf16 => 0x7fff_7fff_7fff_7fff,
        Element::F64 => 0x7fff_ffff_ffff_ffff,
        _ => 0x7fff_ffff_7fff_ffff,
    };
    nan.to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ptx::Swizzle;

    use super::*;

    /// The same, element by element: address in shared memory, and in global memory.
    fn model(map: &TensorMap, at: &[i32], shared: u32) -> Vec<(u32, Option<u64>)> {
        let size = map.element.bytes();
        let pitch = map.swizzle.span().unwrap_or(map.box_sizes[0] * size);
        let mut out = Vec::new();
        let counts: Vec<u32> = (0..map.rank()).map(|d| map.copied(d)).collect();
        let mut index = vec![0u32; map.rank()];
        for number in 0..counts.iter().product::<u32>() {
            let mut rest = number;
            for (index, count) in index.iter_mut().zip(&counts) {
                *index = rest % count;
                rest /= count;
            }
            let row = number / counts[0];
            let place = map.swizzle.apply(u64::from(shared + row * pitch + index[0] * size)) as u32;
            let mut address = map.address as i64;
            let mut inside = true;
            for d in 0..map.rank() {
                let step = if d == 0 { 1 } else { map.element_strides[d] };
                let at = i64::from(at[d]) + i64::from(index[d] * step);
                inside &= at >= 0 && at < map.sizes[d] as i64;
                address += at * if d == 0 { i64::from(size) } else { map.strides[d - 1] as i64 };
            }
            out.push((place, inside.then_some(address as u64)));
        }
        out.sort_unstable();
        out
    }

    fn maps() -> impl Strategy<Value = (TensorMap, Vec<i32>)> {
        let element = proptest::sample::select(Element::ALL.to_vec());
        let swizzle = proptest::sample::select(Swizzle::ALL.to_vec());
        (element, 1usize..=5, swizzle, any::<bool>()).prop_flat_map(|(element, rank, swizzle, nan)| {
            let row = 16 / element.bytes();
            let widest = swizzle.span().unwrap_or(256) / 16;
            let sizes = proptest::collection::vec(1u64..20, rank);
            let gaps = proptest::collection::vec(0u64..3, rank - 1);
            let boxes = (1..=widest, proptest::collection::vec(1u32..5, rank - 1));
            let steps = proptest::collection::vec(1u32..4, rank);
            let at = proptest::collection::vec(-6i32..25, rank);
            (sizes, gaps, boxes, steps, at).prop_map(move |(sizes, gaps, (chunks, outer), steps, at)| {
                let mut stride = (sizes[0] * u64::from(element.bytes())).next_multiple_of(16);
                let mut strides = Vec::new();
                for (dimension, gap) in gaps.iter().enumerate() {
                    strides.push(stride + 16 * gap);
                    stride = strides[dimension] * sizes[dimension + 1];
                }
                let mut box_sizes = vec![chunks * row];
                box_sizes.extend(outer);
                let mut map = TensorMap::dense(element, 0x7_0000_0000, &sizes, &strides, &box_sizes);
                (map.swizzle, map.element_strides) = (swizzle, steps);
                if nan && element.ty().is_float() {
                    map.out_of_bounds = OutOfBounds::Nan;
                }
                (map, at)
            })
        })
    }

    proptest! {
        #[test]
        fn runs_hold_what_the_manual_says_element_by_element((map, at) in maps()) {
            prop_assert_eq!(map.validate(), Ok(()));
            let size = map.element.bytes();
            let found = of(&map, &at, 1024);
            let mut elements: Vec<(u32, Option<u64>)> = Vec::new();
            for run in &found.runs {
                prop_assert!(run.shared >= 1024 && run.shared + run.bytes <= 1024 + found.bytes);
                for step in (0..run.bytes).step_by(size as usize) {
                    elements.push((run.shared + step, run.global.map(|at| at + u64::from(step))));
                }
            }
            elements.sort_unstable();
            prop_assert_eq!(elements, model(&map, &at, 1024));
        }
    }
}
