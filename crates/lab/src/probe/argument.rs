//! The grammar of kernel arguments: `buf:f16:2x4x256x64:randn`, `f32:0.125`, `null`, `map:NAME`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use crate::element::{Element, Number, ParseElementError};

/// One argument of a kernel, as it is asked for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub enum ArgumentSpec {
    /// A pointer to memory of its own.
    Buffer(BufferSpec),
    /// A number.
    Scalar(Element, Number),
    /// The null pointer.
    Null,
    /// The tensor map of this name.
    Map(String),
}

/// Memory that an argument points to.
#[derive(Clone, Debug, PartialEq)]
pub struct BufferSpec {
    /// What an element is.
    pub element: Element,
    /// The extents, outermost first.
    pub shape: Vec<u64>,
    /// What it holds when the kernel starts.
    pub init: Init,
}

impl BufferSpec {
    /// How many elements; `None` where 64 bits do not suffice.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent))
    }

    /// Its size in bytes; `None` where 64 bits do not suffice.
    pub fn bytes(&self) -> Option<u64> {
        self.elements()?.checked_mul(self.element.bytes() as u64)
    }
}

/// What a buffer holds when the kernel starts.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// Nothing: to read it before writing it is an error.
    Uninitialised,
    /// The same number everywhere.
    Fill(Number),
    /// The index of each element.
    Ramp,
    /// Standard normal numbers; of integers sixteen times that, rounded, without the sign where there is none.
    Randn,
    /// What a file holds.
    File(FileTensor),
}

/// An array in a file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct FileTensor {
    /// The `.npy` or `.safetensors` file.
    pub path: PathBuf,
    /// Its name in a `.safetensors` file.
    pub tensor: Option<String>,
}

impl FileTensor {
    /// The same with a relative path taken from `folder`.
    pub fn in_folder(self, folder: &Path) -> Self {
        Self { path: folder.join(self.path), ..self }
    }
}

impl ArgumentSpec {
    /// The same with a relative path taken from `folder`.
    pub fn in_folder(self, folder: &Path) -> Self {
        match self {
            Self::Buffer(BufferSpec { element, shape, init: Init::File(file) }) => {
                Self::Buffer(BufferSpec { element, shape, init: Init::File(file.in_folder(folder)) })
            }
            other => other,
        }
    }
}

/// A text that is no argument.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum ParseArgumentError {
    #[error("argument `{given}`: {reason}")]
    Element { given: String, reason: ParseElementError },
    #[error(
        "argument is `{0}`: it must be buf:DTYPE:SHAPE:INIT (`buf:f16:2x4x256x64:randn`), DTYPE:NUMBER (`f32:0.125`), null or map:NAME"
    )]
    Form(String),
    #[error("argument `{given}`: shape is `{shape}`: it must be extents with x between them, as 2x4x256x64")]
    Shape { given: String, shape: String },
    #[error(
        "argument `{given}`: contents are `{init}`: they must be randn, zeros, ones, ramp, uninit, a number (nan and -inf of floats) \
         or @FILE.npy or @FILE.safetensors#NAME"
    )]
    Init { given: String, init: String },
    #[error("argument `{given}`: `{number}` is no {element}{range}")]
    Number { given: String, number: String, element: Element, range: String },
    #[error("`{0}`: a file must end in .npy, or in .safetensors followed by # and the tensor's name")]
    File(String),
}

impl TryFrom<String> for FileTensor {
    type Error = ParseArgumentError;

    fn try_from(text: String) -> Result<Self, ParseArgumentError> {
        text.parse()
    }
}

impl FromStr for FileTensor {
    type Err = ParseArgumentError;

    fn from_str(text: &str) -> Result<Self, ParseArgumentError> {
        if text.ends_with(".npy") {
            return Ok(Self { path: text.into(), tensor: None });
        }
        match text.split_once(".safetensors#") {
            Some((stem, name)) if !name.is_empty() => {
                Ok(Self { path: format!("{stem}.safetensors").into(), tensor: Some(name.into()) })
            }
            _ => Err(ParseArgumentError::File(text.into())),
        }
    }
}

impl fmt::Display for FileTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tensor {
            Some(tensor) => write!(f, "{}#{tensor}", self.path.display()),
            None => write!(f, "{}", self.path.display()),
        }
    }
}

impl TryFrom<String> for ArgumentSpec {
    type Error = ParseArgumentError;

    fn try_from(text: String) -> Result<Self, ParseArgumentError> {
        text.parse()
    }
}

impl FromStr for ArgumentSpec {
    type Err = ParseArgumentError;

    fn from_str(text: &str) -> Result<Self, ParseArgumentError> {
        let given = || text.to_owned();
        if text == "null" {
            return Ok(Self::Null);
        }
        let form = || ParseArgumentError::Form(given());
        let (kind, rest) = text.split_once(':').ok_or_else(form)?;
        match kind {
            "map" if !rest.is_empty() => return Ok(Self::Map(rest.into())),
            "map" => return Err(form()),
            "buf" => {}
            _ => {
                let element = kind.parse().map_err(|reason| ParseArgumentError::Element { given: given(), reason })?;
                return Ok(Self::Scalar(element, number(text, element, rest)?));
            }
        }
        let mut parts = rest.splitn(3, ':');
        let (Some(element), Some(shape), Some(init)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(form());
        };
        let element: Element =
            element.parse().map_err(|reason| ParseArgumentError::Element { given: given(), reason })?;
        let extents: Option<Vec<u64>> = shape.split('x').map(|extent| extent.parse().ok()).collect();
        let shape = extents.ok_or_else(|| ParseArgumentError::Shape { given: given(), shape: shape.into() })?;
        let integer =
            |value: i128| if element.is_float() { Number::Float(value as f64) } else { Number::Integer(value) };
        let init = match (init, init.strip_prefix('@')) {
            (_, Some(file)) => Init::File(file.parse()?),
            ("uninit", _) => Init::Uninitialised,
            ("zeros", _) => Init::Fill(integer(0)),
            ("ones", _) => Init::Fill(integer(1)),
            ("ramp", _) => Init::Ramp,
            ("randn", _) => Init::Randn,
            _ => match number(text, element, init) {
                Ok(number) => Init::Fill(number),
                // A word that could have been a number is told what numbers there are, any other what words there are.
                Err(error) if init.parse::<f64>().is_ok() => return Err(error),
                Err(_) => return Err(ParseArgumentError::Init { given: given(), init: init.into() }),
            },
        };
        Ok(Self::Buffer(BufferSpec { element, shape, init }))
    }
}

fn number(given: &str, element: Element, text: &str) -> Result<Number, ParseArgumentError> {
    let number = match element.range() {
        None => text.parse().ok().map(Number::Float),
        Some((least, most)) => {
            let value: Option<i128> = match text.strip_prefix("0x") {
                Some(digits) => i128::from_str_radix(digits, 16).ok(),
                None => text.parse().ok(),
            };
            value.filter(|value| (least..=most).contains(value)).map(Number::Integer)
        }
    };
    let range = || element.range().map_or_else(String::new, |(least, most)| format!(": it must be {least} to {most}"));
    let error = || ParseArgumentError::Number { given: given.into(), number: text.into(), element, range: range() };
    number.ok_or_else(error)
}

impl fmt::Display for ArgumentSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Map(name) => write!(f, "map:{name}"),
            Self::Scalar(element, number) => write!(f, "{element}:{number}"),
            Self::Buffer(BufferSpec { element, shape, init }) => {
                let extents: Vec<String> = shape.iter().map(u64::to_string).collect();
                write!(f, "buf:{element}:{}:", extents.join("x"))?;
                match init {
                    Init::Uninitialised => f.write_str("uninit"),
                    Init::Fill(number) => write!(f, "{number}"),
                    Init::Ramp => f.write_str("ramp"),
                    Init::Randn => f.write_str("randn"),
                    Init::File(file) => write!(f, "@{file}"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> ArgumentSpec {
        text.parse().unwrap()
    }

    fn buffer(element: Element, shape: &[u64], init: Init) -> ArgumentSpec {
        ArgumentSpec::Buffer(BufferSpec { element, shape: shape.into(), init })
    }

    #[test]
    fn every_form_is_read() {
        assert_eq!(parse("null"), ArgumentSpec::Null);
        assert_eq!(parse("map:q"), ArgumentSpec::Map("q".into()));
        assert_eq!(parse("f32:0.125"), ArgumentSpec::Scalar(Element::F32, Number::Float(0.125)));
        assert_eq!(parse("f16:-inf"), ArgumentSpec::Scalar(Element::F16, Number::Float(f64::NEG_INFINITY)));
        assert_eq!(parse("i64:-3"), ArgumentSpec::Scalar(Element::I64, Number::Integer(-3)));
        assert_eq!(
            parse("u64:0xffffffffffffffff"),
            ArgumentSpec::Scalar(Element::U64, Number::Integer(u64::MAX.into()))
        );
        assert_eq!(parse("buf:f16:2x4x256x64:randn"), buffer(Element::F16, &[2, 4, 256, 64], Init::Randn));
        assert_eq!(parse("buf:i32:0:ones"), buffer(Element::I32, &[0], Init::Fill(Number::Integer(1))));
        assert_eq!(parse("buf:f32:8:-inf"), buffer(Element::F32, &[8], Init::Fill(Number::Float(f64::NEG_INFINITY))));
        assert_eq!(parse("buf:u8:8:7"), buffer(Element::U8, &[8], Init::Fill(Number::Integer(7))));
        assert_eq!(parse("buf:u8:8:uninit"), buffer(Element::U8, &[8], Init::Uninitialised));
        let file = |path: &str, tensor: Option<&str>| {
            buffer(Element::Bf16, &[3, 1], Init::File(FileTensor { path: path.into(), tensor: tensor.map(Into::into) }))
        };
        assert_eq!(parse("buf:bf16:3x1:@a:b/x.npy"), file("a:b/x.npy", None));
        assert_eq!(parse("buf:bf16:3x1:@x.safetensors#layer0.q#1"), file("x.safetensors", Some("layer0.q#1")));
        assert_eq!(parse("buf:bf16:3x1:@x.npy").in_folder(Path::new("/d")), file("/d/x.npy", None));
        assert_eq!(parse("buf:bf16:3x1:@/e/x.npy").in_folder(Path::new("/d")), file("/e/x.npy", None));
    }

    #[test]
    fn messages_say_what_is_allowed() {
        let wrong = [
            "",
            "nul",
            "buf",
            "buf:f32",
            "buf:f32:4",
            "buf:f33:4:zeros",
            "buf:f32:4x:zeros",
            "buf:f32:-4:zeros",
            "buf:f32:4:zeroes",
            "buf:i8:4:300",
            "buf:i32:4:nan",
            "buf:f32:4:@x.txt",
            "buf:f32:4:@x.safetensors",
            "i32:0.5",
            "i32:3000000000",
            "u32:-1",
            "f32:x",
            "map:",
            "half:1",
        ];
        let messages: Vec<String> =
            wrong.iter().map(|text| text.parse::<ArgumentSpec>().unwrap_err().to_string()).collect();
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn sizes_do_not_wrap() {
        let ArgumentSpec::Buffer(huge) = parse("buf:f64:4294967296x4294967296:zeros") else { panic!() };
        assert_eq!((huge.elements(), huge.bytes()), (None, None));
        let ArgumentSpec::Buffer(huge) = parse("buf:f64:4294967296x2147483648:zeros") else { panic!() };
        assert_eq!((huge.elements(), huge.bytes()), (Some(1 << 63), None));
    }

    fn specs() -> impl Strategy<Value = ArgumentSpec> {
        let element = proptest::sample::select(&Element::ALL[..]);
        let number = |element: Element, bits: u64| {
            let number = element.read(&bits.to_le_bytes());
            // NaN differs from itself.
            if number.to_f64().is_nan() { Number::Float(0.5) } else { number }
        };
        let init = prop_oneof![
            Just(Init::Uninitialised),
            Just(Init::Ramp),
            Just(Init::Randn),
            "[a-z:/ ]{1,8}".prop_map(|s| Init::File(FileTensor { path: format!("{s}.npy").into(), tensor: None })),
            ("[a-z:/ ]{1,8}", "[a-z.#:]{1,8}")
                .prop_map(|(s, t)| Init::File(FileTensor { path: format!("{s}.safetensors").into(), tensor: Some(t) })),
        ];
        prop_oneof![
            Just(ArgumentSpec::Null),
            "[^:]{1,9}".prop_map(ArgumentSpec::Map),
            (element.clone(), any::<u64>()).prop_map(move |(e, bits)| ArgumentSpec::Scalar(e, number(e, bits))),
            (element.clone(), any::<Vec<u64>>().prop_filter("extents", |v| !v.is_empty()), init)
                .prop_map(|(element, shape, init)| ArgumentSpec::Buffer(BufferSpec { element, shape, init })),
            (element, any::<u64>()).prop_map(move |(element, bits)| {
                ArgumentSpec::Buffer(BufferSpec { element, shape: vec![2], init: Init::Fill(number(element, bits)) })
            }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read(spec in specs()) {
            prop_assert_eq!(spec.to_string().parse::<ArgumentSpec>().unwrap(), spec);
        }

        #[test]
        fn any_text_is_answered(text in ".{0,40}") {
            let _ = text.parse::<ArgumentSpec>();
        }

        #[test]
        fn almost_right_text_is_answered(text in "(buf|map|f32|i8|u64|null)?:?(f16|e4m3|i64|f99)?:?[0-9x]{0,30}:?(randn|@|@x.npy|nan|-inf|9999999999999999999999999999999999999999|#)?") {
            if let Ok(ArgumentSpec::Buffer(buffer)) = text.parse::<ArgumentSpec>() {
                let _ = buffer.bytes();
            }
        }
    }
}
