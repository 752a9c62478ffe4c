//! Tensor maps in file tests.

use ptx::{Element, OutOfBounds, Swizzle, TensorMap, Type};

use super::NamedArgument;

fn numbers<T: std::str::FromStr>(text: &str) -> Result<Vec<T>, String> {
    let number = |part: &str| part.parse().map_err(|_| format!("`{text}` is no list of numbers as 64x8"));
    text.split('x').map(number).collect()
}

/// `m = x f16 64x100 box=64x8 strides=128 steps=1x2 swizzle=128 fill=nan at=0`
pub(super) fn argument(text: &str, line: u32) -> Result<NamedArgument, String> {
    let (name, rest) = text.split_once('=').ok_or("a tensor map is written as m = x f16 64x100 box=64x8")?;
    let mut words = rest.split_whitespace();
    let mut next = || words.next().ok_or("a tensor map needs a buffer, a type of elements and sizes");
    let (of, element, sizes) = (next()?.to_owned(), next()?, numbers::<u64>(next()?)?);
    let element = Element::ALL
        .into_iter()
        .find(|known| known.ty().name() == element)
        .ok_or_else(|| format!("`{element}` is no type of a tensor's elements"))?;
    let mut strides = Vec::new();
    let mut bytes = u64::from(element.bytes());
    for size in &sizes[..sizes.len() - 1] {
        bytes = bytes.saturating_mul(*size);
        strides.push(bytes);
    }
    let boxes = sizes.iter().map(|&size| u32::try_from(size).unwrap_or(u32::MAX)).collect::<Vec<_>>();
    let mut map = TensorMap::dense(element, 0, &sizes, &strides, &boxes);
    for word in words {
        let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` is no `key=value`"))?;
        match (key, value) {
            ("box", list) => map.box_sizes = numbers(list)?,
            ("strides", list) => map.strides = numbers(list)?,
            ("steps", list) => map.element_strides = numbers(list)?,
            ("at", byte) => map.address = byte.parse().map_err(|_| format!("`{byte}` is no number of bytes"))?,
            ("swizzle", "32") => map.swizzle = Swizzle::Bytes32,
            ("swizzle", "64") => map.swizzle = Swizzle::Bytes64,
            ("swizzle", "128") => map.swizzle = Swizzle::Bytes128,
            ("fill", "nan") => map.out_of_bounds = OutOfBounds::Nan,
            _ => return Err(format!("`{word}` is not known; there are box, strides, steps, at, swizzle and fill")),
        }
    }
    Ok(NamedArgument {
        name: name.trim().to_owned(),
        ty: Type::B8,
        elements: None,
        contents: None,
        map: Some((of, map)),
        line,
    })
}
