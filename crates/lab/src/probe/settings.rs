//! What is asked of a probe: from the command line, from a TOML file, or from both.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use emulator::Policy;
use serde::Deserialize;

use super::ProbeError;
use crate::thresholds::Thresholds;

use super::argument::{ArgumentSpec, FileTensor};

/// A launch file larger than this is none.
const MAX_LAUNCH_BYTES: u64 = 1 << 20;

/// What is asked. Whatever is left out has a default or comes from the kernel.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The PTX file.
    pub ptx: Option<PathBuf>,
    /// The kernel; needed when the file has several.
    pub entry: Option<String>,
    /// CTAs in x, y and z.
    pub grid: Option<Dims>,
    /// Threads of a CTA in x, y and z; by default those that the kernel requires.
    pub block: Option<Dims>,
    /// CTAs of a cluster in x, y and z; by default those that the kernel requires.
    pub cluster: Option<Dims>,
    /// Bytes of dynamic shared memory of a CTA.
    pub shared: Option<u32>,
    /// The board that is emulated, by name; by default one of the architecture that the PTX is for.
    pub gpu: Option<String>,
    /// Registers of a thread; by default what `ptxas` says, else an estimate.
    pub registers: Option<u32>,
    /// One per parameter of the kernel, in order.
    pub args: Vec<ArgumentSpec>,
    /// The tensor maps that arguments name.
    pub map: BTreeMap<String, MapSpec>,
    /// What buffers must hold after the run.
    pub expect: Vec<Expectation>,
    /// Buffers that are written to files after the run.
    pub out: Vec<Output>,
    /// Seed of `randn`, and of the policy `random` that names none; 0 by default.
    pub seed: Option<u64>,
    /// When asynchronous work completes.
    pub policy: Option<PolicySpec>,
    /// How many schedules are tried; 1 by default.
    pub shake: Option<u32>,
    /// Whether races between CTAs on global memory are looked for.
    pub global_races: Option<bool>,
    /// Warp instructions that a CTA may execute before it is taken for hung.
    pub budget: Option<u64>,
    /// Bytes that the buffers may take together.
    pub memory: Option<Size>,
    /// CTAs that are run in place of all.
    pub sample: Option<u64>,
    /// The source line whose accesses are explained.
    pub line: Option<LineSpec>,
    /// Where findings begin.
    pub thresholds: Option<Thresholds>,
}

impl Settings {
    /// Reads a launch file. Paths in it are relative to its folder.
    ///
    /// # Errors
    /// When it cannot be read, or is not a launch file.
    pub fn read(path: &Path) -> Result<Self, ProbeError> {
        let text = crate::text_file::read(path, MAX_LAUNCH_BYTES)?;
        let settings: Self = toml::from_str(&text)
            .map_err(|error| ProbeError::LaunchFile { path: path.into(), reason: error.to_string() })?;
        Ok(settings.in_folder(path.parent().unwrap_or(Path::new(""))))
    }

    fn in_folder(self, folder: &Path) -> Self {
        let expect = self.expect.into_iter().map(|one| Expectation { file: one.file.in_folder(folder), ..one });
        let out = self.out.into_iter().map(|one| Output { path: folder.join(one.path), ..one });
        let map = self.map.into_iter().map(|(name, map)| {
            let buffer = map.buffer.map(|buffer| buffer.in_folder(folder));
            (name, MapSpec { buffer, ..map })
        });
        Self {
            ptx: self.ptx.map(|path| folder.join(path)),
            args: self.args.into_iter().map(|argument| argument.in_folder(folder)).collect(),
            expect: expect.collect(),
            out: out.collect(),
            map: map.collect(),
            ..self
        }
    }

    /// These settings, and where they say nothing those of `other`.
    pub fn or(self, other: Self) -> Self {
        Self {
            ptx: self.ptx.or(other.ptx),
            entry: self.entry.or(other.entry),
            grid: self.grid.or(other.grid),
            block: self.block.or(other.block),
            cluster: self.cluster.or(other.cluster),
            shared: self.shared.or(other.shared),
            gpu: self.gpu.or(other.gpu),
            registers: self.registers.or(other.registers),
            args: if self.args.is_empty() { other.args } else { self.args },
            map: if self.map.is_empty() { other.map } else { self.map },
            expect: if self.expect.is_empty() { other.expect } else { self.expect },
            out: if self.out.is_empty() { other.out } else { self.out },
            seed: self.seed.or(other.seed),
            policy: self.policy.or(other.policy),
            shake: self.shake.or(other.shake),
            global_races: self.global_races.or(other.global_races),
            budget: self.budget.or(other.budget),
            memory: self.memory.or(other.memory),
            sample: self.sample.or(other.sample),
            line: self.line.or(other.line),
            thresholds: self.thresholds.or(other.thresholds),
        }
    }
}

/// A text that is not what an option takes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is `{given}`: it must be {allowed}")]
pub struct ParseSettingError {
    what: &'static str,
    given: String,
    allowed: &'static str,
}

/// Up to three dimensions: `4`, `4,2` or `[4, 2, 1]` in a file; those left out are 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawDims")]
pub struct Dims(pub [u32; 3]);

#[derive(Deserialize)]
#[serde(untagged)]
enum RawDims {
    One(u32),
    Several(Vec<u32>),
    Text(String),
}

impl TryFrom<RawDims> for Dims {
    type Error = ParseSettingError;

    fn try_from(raw: RawDims) -> Result<Self, ParseSettingError> {
        match raw {
            RawDims::One(x) => Ok(Self([x, 1, 1])),
            RawDims::Several(dims) => Self::of(&dims).ok_or_else(|| Self::error(&format!("{dims:?}"))),
            RawDims::Text(text) => text.parse(),
        }
    }
}

impl Dims {
    fn of(dims: &[u32]) -> Option<Self> {
        let mut all = [1; 3];
        all.get_mut(..dims.len()).filter(|to| !to.is_empty())?.copy_from_slice(dims);
        Some(Self(all))
    }

    fn error(given: &str) -> ParseSettingError {
        ParseSettingError { what: "size", given: given.into(), allowed: "X, X,Y or X,Y,Z" }
    }
}

impl FromStr for Dims {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let dims: Option<Vec<u32>> = text.split([',', 'x']).map(|extent| extent.trim().parse().ok()).collect();
        dims.and_then(|dims| Self::of(&dims)).ok_or_else(|| Self::error(text))
    }
}

/// A number of bytes: `65536`, `512M`, `8G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawSize")]
pub struct Size(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum RawSize {
    Number(u64),
    Text(String),
}

impl TryFrom<RawSize> for Size {
    type Error = ParseSettingError;

    fn try_from(raw: RawSize) -> Result<Self, ParseSettingError> {
        match raw {
            RawSize::Number(bytes) => Ok(Self(bytes)),
            RawSize::Text(text) => text.parse(),
        }
    }
}

impl FromStr for Size {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let (digits, unit) = match text.as_bytes().last() {
            Some(b'K') => (&text[..text.len() - 1], 1 << 10),
            Some(b'M') => (&text[..text.len() - 1], 1 << 20),
            Some(b'G') => (&text[..text.len() - 1], 1 << 30),
            _ => (text, 1u64),
        };
        let allowed = "a number of bytes, or one that ends in K, M or G";
        let error = || ParseSettingError { what: "memory", given: text.into(), allowed };
        digits.parse().ok().and_then(|n: u64| n.checked_mul(unit)).map(Self).ok_or_else(error)
    }
}

/// When asynchronous work completes: `eager`, `lazy`, `random` (seeded by the settings) or `random:SEED`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum PolicySpec {
    /// At once.
    #[default]
    Eager,
    /// As late as the program allows.
    Lazy,
    /// In an order drawn from a seed.
    Random(Option<u64>),
}

impl PolicySpec {
    /// The policy, with `seed` where none is named.
    pub fn policy(self, seed: u64) -> Policy {
        match self {
            Self::Eager => Policy::Eager,
            Self::Lazy => Policy::Lazy,
            Self::Random(own) => Policy::Random(own.unwrap_or(seed)),
        }
    }
}

impl TryFrom<String> for PolicySpec {
    type Error = ParseSettingError;

    fn try_from(text: String) -> Result<Self, ParseSettingError> {
        text.parse()
    }
}

impl FromStr for PolicySpec {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let allowed = "eager, lazy, random or random:SEED";
        let error = || ParseSettingError { what: "policy", given: text.into(), allowed };
        match text {
            "eager" => Ok(Self::Eager),
            "lazy" => Ok(Self::Lazy),
            "random" => Ok(Self::Random(None)),
            _ => {
                let seed = text.strip_prefix("random:").and_then(|seed| seed.parse().ok());
                seed.map(|seed| Self::Random(Some(seed))).ok_or_else(error)
            }
        }
    }
}

/// A source line: `31`, or `attention.py:31` where several files have one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawLine")]
pub struct LineSpec {
    /// How the file's name ends; any file when left out.
    pub file: Option<String>,
    /// Counted from 1.
    pub line: u32,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawLine {
    Number(u32),
    Text(String),
}

impl TryFrom<RawLine> for LineSpec {
    type Error = ParseSettingError;

    fn try_from(raw: RawLine) -> Result<Self, ParseSettingError> {
        match raw {
            RawLine::Number(line) => line.to_string().parse(),
            RawLine::Text(text) => text.parse(),
        }
    }
}

impl LineSpec {
    /// Whether a file's line is meant.
    pub fn is(&self, file: &str, line: u32) -> bool {
        let tail = |wanted: &str| file.strip_suffix(wanted).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'));
        self.line == line && self.file.as_deref().is_none_or(tail)
    }
}

impl FromStr for LineSpec {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let (file, line) = match text.rsplit_once(':') {
            Some((file, line)) => (Some(file.to_owned()), line),
            None => (None, text),
        };
        let line = line.parse().ok().filter(|&line| line > 0);
        let error = || ParseSettingError { what: "line", given: text.into(), allowed: "N or FILE:N, counted from 1" };
        line.map(|line| Self { file, line }).ok_or_else(error)
    }
}

impl fmt::Display for LineSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{file}:{}", self.line),
            None => write!(f, "line {}", self.line),
        }
    }
}

/// `FILE.npy=INDEX`: the buffer of an argument, written to a file after the run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Output {
    /// The file.
    pub path: PathBuf,
    /// The argument, counted from 0.
    pub arg: usize,
}

impl TryFrom<String> for Output {
    type Error = ParseSettingError;

    fn try_from(text: String) -> Result<Self, ParseSettingError> {
        text.parse()
    }
}

impl FromStr for Output {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let allowed = "FILE.npy=INDEX, INDEX that of a buffer argument counted from 0";
        let error = || ParseSettingError { what: "output", given: text.into(), allowed };
        let (path, arg) = text.rsplit_once('=').filter(|(path, _)| path.ends_with(".npy")).ok_or_else(error)?;
        Ok(Self { path: path.into(), arg: arg.parse().map_err(|_| error())? })
    }
}

/// What the buffer of an argument must hold after the run.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// The argument, counted from 0.
    pub arg: usize,
    /// The values.
    pub file: FileTensor,
    /// Absolute error allowed; by default that of the type.
    pub abs: Option<f64>,
    /// Error allowed relative to the value expected, added to the absolute one; by default that of the type.
    pub rel: Option<f64>,
}

/// `INDEX=FILE`.
impl FromStr for Expectation {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let allowed = "INDEX=FILE.npy or INDEX=FILE.safetensors#NAME, INDEX that of a buffer argument counted from 0";
        let error = || ParseSettingError { what: "expectation", given: text.into(), allowed };
        let (arg, file) = text.split_once('=').ok_or_else(error)?;
        let (arg, file) = (arg.parse().map_err(|_| error())?, file.parse().map_err(|_| error())?);
        Ok(Self { arg, file, abs: None, rel: None })
    }
}

/// `ABS,REL`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute error allowed.
    pub abs: f64,
    /// Error allowed relative to the value expected, added to the absolute one.
    pub rel: f64,
}

impl FromStr for Tolerance {
    type Err = ParseSettingError;

    fn from_str(text: &str) -> Result<Self, ParseSettingError> {
        let error =
            || ParseSettingError { what: "tolerance", given: text.into(), allowed: "ABS,REL, neither negative" };
        let number = |text: &str| text.parse().ok().filter(|value: &f64| *value >= 0.0);
        let (abs, rel) = text.split_once(',').ok_or_else(error)?;
        Ok(Self { abs: number(abs).ok_or_else(error)?, rel: number(rel).ok_or_else(error)? })
    }
}

/// A tensor map: how a box of a tensor is copied. Dimensions are counted from the innermost one.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapSpec {
    /// The buffer argument that it is of, counted from 0.
    pub arg: Option<usize>,
    /// Or a buffer of its own.
    pub buffer: Option<ArgumentSpec>,
    /// Elements of a box in each dimension.
    #[serde(rename = "box")]
    pub box_: Vec<u32>,
    /// Elements of the tensor in each dimension; by default the buffer's.
    pub sizes: Option<Vec<u64>>,
    /// Bytes from one index to the next in each dimension but the innermost; by default without gaps.
    pub strides: Option<Vec<u64>>,
    /// Elements from one to the next that is copied; by default 1.
    pub element_strides: Option<Vec<u32>>,
    /// `none`, `32B`, `64B` or `128B`.
    pub swizzle: Option<String>,
    /// `zero` or `nan`: what stands for elements outside the tensor.
    pub fill: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_policies_and_lines() {
        assert_eq!("4".parse(), Ok(Dims([4, 1, 1])));
        assert_eq!("4,2".parse(), Ok(Dims([4, 2, 1])));
        assert_eq!("4x2x3".parse(), Ok(Dims([4, 2, 3])));
        for wrong in ["", "4,", "1,2,3,4", "-1", "4294967296"] {
            assert!(wrong.parse::<Dims>().is_err(), "{wrong}");
        }
        assert_eq!("8G".parse(), Ok(Size(8 << 30)));
        assert!(
            "G".parse::<Size>().is_err() && "99999999999G".parse::<Size>().is_err() && "é".parse::<Size>().is_err()
        );
        assert_eq!("random:7".parse(), Ok(PolicySpec::Random(Some(7))));
        assert_eq!("random".parse::<PolicySpec>().unwrap().policy(3), Policy::Random(3));
        assert!("random:x".parse::<PolicySpec>().is_err());
        let line: LineSpec = "a.py:31".parse().unwrap();
        assert!(line.is("/x/a.py", 31) && line.is("a.py", 31) && !line.is("/x/aa.py", 31) && !line.is("a.py", 3));
        assert!("0".parse::<LineSpec>().is_err() && "x".parse::<LineSpec>().is_err());
        assert_eq!("o.npy=3".parse(), Ok(Output { path: "o.npy".into(), arg: 3 }));
        assert!("o.txt=3".parse::<Output>().is_err() && "o.npy".parse::<Output>().is_err());
        assert_eq!("1e-3,0".parse(), Ok(Tolerance { abs: 1e-3, rel: 0.0 }));
        assert!("1,-1".parse::<Tolerance>().is_err() && "nan,0".parse::<Tolerance>().is_err());
    }

    #[test]
    fn a_launch_file_says_the_same_as_the_command_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("launch.toml");
        let text = r#"
            ptx = "k.ptx"
            entry = "k"
            grid = [8, 2]
            block = 128
            cluster = "1,1,1"
            shared = 4096
            gpu = "H100"
            policy = "lazy"
            memory = "1G"
            line = "k.py:3"
            args = ["buf:f16:2x4:randn", "buf:f16:8:@in.npy", "f32:0.125", "null", "map:q"]
            out = ["o.npy=1"]
            [[expect]]
            arg = 0
            file = "o.safetensors#o"
            abs = 1e-3
            [map.q]
            arg = 0
            box = [4, 2]
            swizzle = "128B"
        "#;
        std::fs::write(&path, text).unwrap();
        let settings = Settings::read(&path).unwrap();
        assert_eq!(settings.ptx, Some(folder.path().join("k.ptx")));
        assert_eq!(settings.args.len(), 5);
        assert_eq!(settings.args[1].to_string(), format!("buf:f16:8:@{}", folder.path().join("in.npy").display()));
        assert_eq!((settings.grid, settings.block), (Some(Dims([8, 2, 1])), Some(Dims([128, 1, 1]))));
        assert_eq!(settings.expect[0].file.path, folder.path().join("o.safetensors"));
        assert_eq!(settings.map["q"].box_, [4, 2]);
        let line = Settings { grid: Some(Dims([1, 1, 1])), ..Settings::default() };
        let both = line.or(settings);
        assert_eq!((both.grid, both.entry.as_deref()), (Some(Dims([1, 1, 1])), Some("k")));
    }

    #[test]
    fn a_wrong_launch_file_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("launch.toml");
        for (text, said) in [
            ("grids = [1]", "unknown field `grids`"),
            ("grid = [1, 2, 3, 4]", "size is `[1, 2, 3, 4]`: it must be X, X,Y or X,Y,Z"),
            ("args = [\"buf:f16\"]", "argument is `buf:f16`: it must be"),
            ("grid = ", "line 1"),
        ] {
            std::fs::write(&path, text).unwrap();
            let message = Settings::read(&path).unwrap_err().to_string();
            assert!(message.contains(said) && message.contains("launch.toml"), "{message}");
        }
    }
}
