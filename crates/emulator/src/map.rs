//! Tensor maps as they lie in emulated memory: 128 bytes, as on the chip, but in an encoding of the emulator's own.

use crate::lanes::number;
use ptx::{Element, L2Promotion, Modifier, OutOfBounds, Swizzle, TensorMap};

/// What tells the emulator's encoding from another, in its last eight bytes.
const TAG: [u8; 8] = *b"stratatm";

/// A tensor map as bytes. All zeros are one too, for `tensormap.replace` to fill.
pub(crate) type Blob = [u8; TensorMap::BYTES as usize];

// Where fields stand.
const ADDRESS: usize = 0;
const RANK: usize = 8;
const ELEMENT: usize = 9;
const INTERLEAVE: usize = 10;
const SWIZZLE: usize = 11;
const FILL: usize = 12;
const PROMOTION: usize = 13;
const STRIDES: usize = 16;
const SIZES: usize = 48;
const BOXES: usize = 88;
const STEPS: usize = 108;
const TAG_AT: usize = 120;

fn put(blob: &mut Blob, at: usize, bytes: &[u8]) {
    blob[at..at + bytes.len()].copy_from_slice(bytes);
}

fn get(blob: &Blob, at: usize, bytes: usize) -> u64 {
    number(&blob[at..at + bytes])
}

/// The emulator's encoding of a valid map.
pub(crate) fn encode(map: &TensorMap) -> Blob {
    let mut blob = [0; TensorMap::BYTES as usize];
    put(&mut blob, ADDRESS, &map.address.to_le_bytes());
    blob[RANK] = map.rank() as u8 - 1;
    blob[ELEMENT] = place(&Element::ALL, map.element);
    blob[SWIZZLE] = place(&Swizzle::ALL, map.swizzle);
    blob[FILL] = u8::from(map.out_of_bounds == OutOfBounds::Nan);
    blob[PROMOTION] = place(&PROMOTIONS, map.l2_promotion);
    for (index, stride) in map.strides.iter().enumerate() {
        put(&mut blob, STRIDES + 8 * index, &stride.to_le_bytes());
    }
    for index in 0..map.rank() {
        put(&mut blob, SIZES + 8 * index, &map.sizes[index].to_le_bytes());
        put(&mut blob, BOXES + 4 * index, &map.box_sizes[index].to_le_bytes());
        blob[STEPS + index] = map.element_strides[index] as u8;
    }
    put(&mut blob, TAG_AT, &TAG);
    blob
}

const PROMOTIONS: [L2Promotion; 4] =
    [L2Promotion::None, L2Promotion::Bytes64, L2Promotion::Bytes128, L2Promotion::Bytes256];

fn place<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).unwrap_or(0) as u8
}

/// The map that some bytes are.
///
/// # Errors
/// A sentence, when they are none, or one that breaks a rule.
pub(crate) fn decode(blob: &Blob) -> Result<TensorMap, String> {
    if blob[TAG_AT..] != TAG {
        return Err("the 128 bytes are not a tensor map of this emulator: one of the driver's cannot be read; pass a \
                    tensor map argument, or build it by `tensormap.replace` from zeros"
            .into());
    }
    let rank = usize::from(blob[RANK]) + 1;
    if rank > TensorMap::MAX_RANK {
        return Err(format!("tensor map: rank is {rank}; allowed is 1 to 5"));
    }
    if blob[INTERLEAVE] != 0 {
        return Err(format!("tensor map: interleave_layout is {}; executable is 0, none", blob[INTERLEAVE]));
    }
    let known = |all: usize, code: u8, field: &str| match usize::from(code) {
        code if code < all => Ok(code),
        code => Err(format!("tensor map: {field} is {code}; executable is 0 to {}", all - 1)),
    };
    let map = TensorMap {
        element: Element::ALL[known(Element::ALL.len(), blob[ELEMENT], "elemtype")?],
        address: get(blob, ADDRESS, 8),
        sizes: (0..rank).map(|index| get(blob, SIZES + 8 * index, 8)).collect(),
        strides: (1..rank).map(|index| get(blob, STRIDES + 8 * (index - 1), 8)).collect(),
        box_sizes: (0..rank).map(|index| get(blob, BOXES + 4 * index, 4) as u32).collect(),
        element_strides: (0..rank).map(|index| blob[STEPS + index].into()).collect(),
        swizzle: Swizzle::ALL[known(Swizzle::ALL.len(), blob[SWIZZLE], "swizzle_mode")?],
        l2_promotion: PROMOTIONS[known(PROMOTIONS.len(), blob[PROMOTION], "L2 promotion")?],
        out_of_bounds: match known(2, blob[FILL], "fill_mode")? {
            0 => OutOfBounds::Zeros,
            _ => OutOfBounds::Nan,
        },
    };
    map.validate().map_err(|error| error.to_string())?;
    Ok(map)
}

/// `tensormap.replace` (PTX ISA 9.7.9.28): puts a field's new value. `index` is of the fields with a value per dimension.
///
/// # Errors
/// A sentence, when the bytes are no tensor map or the index or the value is none of the field's.
pub(crate) fn replace(blob: &mut Blob, field: Modifier, index: usize, value: u64) -> Result<(), String> {
    if blob[TAG_AT..] != TAG {
        if blob.iter().any(|byte| *byte != 0) {
            return Err("the 128 bytes are neither zeros nor a tensor map of this emulator".into());
        }
        put(blob, TAG_AT, &TAG);
    }
    let dimensions = if field == Modifier::GlobalStride { TensorMap::MAX_RANK - 1 } else { TensorMap::MAX_RANK };
    if index >= dimensions {
        return Err(format!("dimension {index} of `{field}` is named; allowed are 0 to {}", dimensions - 1));
    }
    let code = |limit: u64| match value {
        value if value <= limit => Ok(value as u8),
        value => Err(format!("`{field}` is set to {value}; allowed is 0 to {limit}")),
    };
    match field {
        Modifier::GlobalAddress => put(blob, ADDRESS, &value.to_le_bytes()),
        Modifier::Rank => blob[RANK] = code(4)?,
        Modifier::BoxDim => put(blob, BOXES + 4 * index, &(value as u32).to_le_bytes()),
        Modifier::GlobalDim => put(blob, SIZES + 8 * index, &value.to_le_bytes()),
        Modifier::GlobalStride => put(blob, STRIDES + 8 * index, &value.to_le_bytes()),
        Modifier::ElementStride => blob[STEPS + index] = code(255)?,
        Modifier::Elemtype => blob[ELEMENT] = code(15)?,
        Modifier::InterleaveLayout => blob[INTERLEAVE] = code(2)?,
        Modifier::SwizzleMode => blob[SWIZZLE] = code(4)?,
        Modifier::FillMode => blob[FILL] = code(1)?,
        other => return Err(format!("`{other}` is not executable yet")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_come_back() {
        let mut map = TensorMap::dense(Element::Bf16, 0x7_0000_0000, &[64, 33, 5], &[256, 1 << 33], &[32, 8, 2]);
        map.swizzle = Swizzle::Bytes64;
        map.out_of_bounds = OutOfBounds::Nan;
        map.element_strides = vec![1, 2, 3];
        map.l2_promotion = L2Promotion::Bytes128;
        assert_eq!(decode(&encode(&map)), Ok(map));
    }

    #[test]
    fn a_map_is_built_from_zeros_and_foreign_bytes_are_refused() {
        let map = TensorMap::dense(Element::F16, 0x7_0000_0000, &[64, 33], &[256], &[32, 8]);
        let mut blob = [0; 128];
        assert!(decode(&blob).unwrap_err().contains("not a tensor map of this emulator"));
        for (field, index, value) in [
            (Modifier::GlobalAddress, 0, map.address),
            (Modifier::Rank, 0, 1),
            (Modifier::BoxDim, 0, 32),
            (Modifier::BoxDim, 1, 8),
            (Modifier::GlobalDim, 0, 64),
            (Modifier::GlobalDim, 1, 33),
            (Modifier::GlobalStride, 0, 256),
            (Modifier::ElementStride, 0, 1),
            (Modifier::ElementStride, 1, 1),
            (Modifier::Elemtype, 0, 6),
        ] {
            replace(&mut blob, field, index, value).unwrap();
        }
        assert_eq!(decode(&blob), Ok(map));
        assert!(replace(&mut blob, Modifier::BoxDim, 5, 1).unwrap_err().contains("0 to 4"));
        assert!(replace(&mut [1; 128], Modifier::Rank, 0, 1).is_err());
    }
}
