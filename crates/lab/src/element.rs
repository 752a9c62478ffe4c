//! Types of elements as buffers and files hold them, beyond those that attention is computed in.

use std::fmt;
use std::str::FromStr;

use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
    /// 8-bit float with 4 exponent bits and no infinity.
    E4m3,
    /// 8-bit float with 5 exponent bits.
    E5m2,
    /// 8-bit signed integer.
    I8,
    /// 8-bit unsigned integer.
    U8,
    /// 16-bit signed integer.
    I16,
    /// 16-bit unsigned integer.
    U16,
    /// 32-bit signed integer.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit signed integer.
    I64,
    /// 64-bit unsigned integer.
    U64,
}

/// The value of an element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Of a float.
    Float(f64),
    /// Of an integer.
    Integer(i128),
}

impl Number {
    /// The nearest double.
    pub fn to_f64(self) -> f64 {
        match self {
            Self::Float(value) => value,
            Self::Integer(value) => value as f64,
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
        }
    }
}

/// A name of no element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no element type: it must be {names}", names = Element::ALL.map(Element::name).join(", "))]
pub struct ParseElementError(String);

impl Element {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::E4m3,
        Self::E5m2,
        Self::I8,
        Self::U8,
        Self::I16,
        Self::U16,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
    ];

    /// As arguments name it: `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
        }
    }

    /// Its size.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::E4m3 | Self::E5m2 | Self::I8 | Self::U8 => 1,
        }
    }

    /// Whether its values are floats.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16 | Self::E4m3 | Self::E5m2)
    }

    /// The distance from 1 to the next value of a float type; 0 for integers.
    pub const fn epsilon(self) -> f64 {
        match self {
            Self::F64 => f64::EPSILON,
            Self::F32 => f32::EPSILON as f64,
            Self::F16 => 1.0 / 1024.0,
            Self::Bf16 => 1.0 / 128.0,
            Self::E4m3 => 1.0 / 8.0,
            Self::E5m2 => 1.0 / 4.0,
            _ => 0.0,
        }
    }

    /// The least and the greatest value of an integer type; `None` for floats.
    pub const fn range(self) -> Option<(i128, i128)> {
        let bits = 8 * self.bytes();
        match self {
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => Some((-(1 << (bits - 1)), (1 << (bits - 1)) - 1)),
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Some((0, (1 << bits) - 1)),
            _ => None,
        }
    }

    /// The value that the first bytes hold (little endian); missing bytes are zero.
    pub fn read(self, bytes: &[u8]) -> Number {
        let mut wide = [0; 8];
        wide.iter_mut().zip(bytes.iter().take(self.bytes())).for_each(|(to, from)| *to = *from);
        let bits = u64::from_le_bytes(wide);
        match self {
            Self::F64 => Number::Float(f64::from_bits(bits)),
            Self::F32 => Number::Float(f32::from_bits(bits as u32).into()),
            Self::F16 => Number::Float(f16::from_bits(bits as u16).to_f64()),
            Self::Bf16 => Number::Float(bf16::from_bits(bits as u16).to_f64()),
            Self::E4m3 => Number::Float(F8E4M3::from_bits(bits as u8).to_f64()),
            Self::E5m2 => Number::Float(F8E5M2::from_bits(bits as u8).to_f64()),
            Self::I8 => Number::Integer((bits as i8).into()),
            Self::I16 => Number::Integer((bits as i16).into()),
            Self::I32 => Number::Integer((bits as i32).into()),
            Self::I64 => Number::Integer((bits as i64).into()),
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Number::Integer(bits.into()),
        }
    }

    /// Appends the bytes of a value, rounded to nearest for floats, wrapped for integers.
    pub fn write(self, value: Number, out: &mut Vec<u8>) {
        match self {
            Self::F64 => out.extend(value.to_f64().to_le_bytes()),
            Self::F32 => out.extend((value.to_f64() as f32).to_le_bytes()),
            Self::F16 => out.extend(f16::from_f64(value.to_f64()).to_le_bytes()),
            Self::Bf16 => out.extend(bf16::from_f64(value.to_f64()).to_le_bytes()),
            Self::E4m3 => out.push(F8E4M3::from_f64(value.to_f64()).to_bits()),
            // The conversion would make infinity the largest finite number.
            Self::E5m2 if value.to_f64() == f64::INFINITY => out.push(0x7c),
            Self::E5m2 if value.to_f64() == f64::NEG_INFINITY => out.push(0xfc),
            Self::E5m2 => out.push(F8E5M2::from_f64(value.to_f64()).to_bits()),
            _ => {
                let integer = match value {
                    Number::Integer(integer) => integer,
                    Number::Float(float) => float as i128,
                };
                out.extend(&integer.to_le_bytes()[..self.bytes()]);
            }
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Element {
    type Err = ParseElementError;

    fn from_str(text: &str) -> Result<Self, ParseElementError> {
        Self::ALL.into_iter().find(|element| element.name() == text).ok_or_else(|| ParseElementError(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(element: Element, value: f64) -> Vec<u8> {
        let mut out = Vec::new();
        element.write(Number::Float(value), &mut out);
        out
    }

    #[test]
    fn names_and_sizes_agree() {
        for element in Element::ALL {
            assert_eq!(element.name().parse(), Ok(element));
            assert_eq!(bits(element, 1.0).len(), element.bytes());
            assert_eq!(element.read(&bits(element, 3.0)).to_f64(), 3.0);
        }
        assert!("f8".parse::<Element>().unwrap_err().to_string().contains("it must be f64, f32, f16"));
    }

    /// Encodings from the OCP 8-bit floating point specification, tables 1 and 2.
    #[test]
    fn eight_bit_floats() {
        assert_eq!((bits(Element::E4m3, 448.0), bits(Element::E5m2, 57344.0)), (vec![0x7e], vec![0x7b]));
        assert_eq!((bits(Element::E4m3, 0.001953125), bits(Element::E5m2, 0.0000152587890625)), (vec![1], vec![1]));
        assert_eq!((bits(Element::E4m3, -1.0), bits(Element::E5m2, -1.0)), (vec![0xb8], vec![0xbc]));
        // Ties go to even.
        assert_eq!((bits(Element::E4m3, 1.0625), bits(Element::E4m3, 1.1875)), (vec![0x38], vec![0x3a]));
        for (element, nan) in [(Element::E4m3, 0x7f), (Element::E5m2, 0x7e)] {
            assert!(element.read(&[nan]).to_f64().is_nan() && element.read(&bits(element, f64::NAN)).to_f64().is_nan());
        }
        assert_eq!(Element::E5m2.read(&[0x7c]).to_f64(), f64::INFINITY);
        for element in [Element::E4m3, Element::E5m2] {
            for code in 0..=255 {
                let value = element.read(&[code]).to_f64();
                assert!(value.is_nan() || bits(element, value) == [code], "{element} {code:#x} {value}");
            }
        }
    }

    #[test]
    fn integers_wrap_and_keep_all_bits() {
        assert_eq!(Element::U64.read(&[0xff; 8]), Number::Integer(u64::MAX.into()));
        assert_eq!(Element::I8.read(&[0xff]), Number::Integer(-1));
        let mut out = Vec::new();
        Element::U8.write(Number::Integer(258), &mut out);
        assert_eq!(out, [2]);
        assert_eq!(Element::I16.range(), Some((-32768, 32767)));
        assert_eq!(Element::U64.range(), Some((0, u64::MAX.into())));
    }
}
