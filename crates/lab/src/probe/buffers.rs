//! Arguments in the emulator's memory: placed before a run, compared and written after it.

use emulator::Memory;
use kernels::normals;
use ptx::{Argument, Kernel, ParameterDecl};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::Serialize;

use super::ProbeError;
use super::argument::{ArgumentSpec, BufferSpec, FileTensor, Init};
use super::settings::{Expectation, MapSpec, Settings};
use crate::element::{Element, Number};
use crate::execute::Watch;
use crate::tensor_file::{self, Array};

/// Bytes that buffers may take together unless the user says otherwise.
const MEMORY: u64 = 4 << 30;
/// Elements that are made in one piece.
const PIECE: u64 = 1 << 16;
/// Pieces that are made before looking whether to stop.
const PIECES: u64 = 64;

/// A kernel's arguments in memory.
pub(super) struct Placed {
    pub memory: Memory,
    pub arguments: Vec<Argument>,
    /// By argument; of a tensor map the buffer that it is of.
    buffers: Vec<Option<(u64, BufferSpec)>>,
}

/// Whether these are arguments that the kernel takes, and fit the memory allowed.
pub(super) fn check(kernel: &Kernel, settings: &Settings) -> Result<(), ProbeError> {
    let (args, params) = (&settings.args, &kernel.params);
    if args.len() != params.len() {
        let params: Vec<String> = params.iter().map(describe).collect();
        return Err(ProbeError::Count { given: args.len(), kernel: kernel.name.clone(), params });
    }
    for (index, (argument, param)) in args.iter().zip(params).enumerate() {
        if !fits(argument, param) {
            let (argument, param) = (argument.to_string(), describe(param));
            return Err(ProbeError::Type { index, argument, param });
        }
        if let ArgumentSpec::Map(name) = argument {
            let known = || settings.map.keys().cloned().collect();
            let map = settings.map.get(name).ok_or_else(|| ProbeError::Map { name: name.clone(), known: known() })?;
            map_buffer(name, map, args)?;
        }
    }
    let allowed = settings.memory.map_or(MEMORY, |size| size.0);
    let mut asked = 0u64;
    let own = settings.map.values().filter_map(|map| map.buffer.as_ref());
    for (index, argument) in args.iter().chain(own).enumerate() {
        if let ArgumentSpec::Buffer(buffer) = argument {
            // One bit a byte says what was written.
            let extra = |bytes: u64| if buffer.init == Init::Uninitialised { bytes / 8 } else { 0 };
            let bytes = buffer.bytes().and_then(|bytes| bytes.checked_add(extra(bytes)));
            asked = bytes.and_then(|bytes| asked.checked_add(bytes)).unwrap_or(u64::MAX);
            if asked > allowed {
                return Err(ProbeError::Memory { index, argument: argument.to_string(), asked, allowed });
            }
        }
    }
    let buffer = |what: &'static str, index: usize| match args.get(index) {
        Some(ArgumentSpec::Buffer(_) | ArgumentSpec::Map(_)) => Ok(()),
        Some(other) => Err(ProbeError::NoBuffer { what, index, argument: other.to_string() }),
        None => Err(ProbeError::Index { what, index, count: args.len() }),
    };
    settings.expect.iter().try_for_each(|one| buffer("expect", one.arg))?;
    settings.out.iter().try_for_each(|one| buffer("out", one.arg))
}

fn describe(param: &ParameterDecl) -> String {
    match param.elements {
        Some(n) => format!("{} ({}[{n}])", param.name, param.ty),
        None => format!("{} ({})", param.name, param.ty),
    }
}

fn fits(argument: &ArgumentSpec, param: &ParameterDecl) -> bool {
    let (bytes, is_float) = match argument {
        ArgumentSpec::Buffer(_) | ArgumentSpec::Null => (8, false),
        ArgumentSpec::Scalar(element, _) => (element.bytes() as u64, element.is_float()),
        ArgumentSpec::Map(_) => (128, false),
    };
    // `.b32` holds anything of its size.
    use ptx::Type::{S8, S16, S32, S64, U8, U16, U32, U64};
    let is_integer = matches!(param.ty, U8 | U16 | U32 | U64 | S8 | S16 | S32 | S64);
    let named = param.elements.is_none() && (param.ty.is_float() || is_integer);
    bytes == param.bytes() && (!named || param.ty.is_float() == is_float)
}

/// Allocates and fills buffers, and places the variables of the kernel's module.
pub(super) fn place(settings: &Settings, kernel: &Kernel, watch: Watch<'_>) -> Result<Placed, ProbeError> {
    let seed = settings.seed.unwrap_or(0);
    let mut placed = Placed { memory: Memory::new(), arguments: Vec::new(), buffers: Vec::new() };
    for (index, argument) in settings.args.iter().enumerate() {
        let (value, buffer) = match argument {
            ArgumentSpec::Buffer(spec) => {
                let address = fill(&mut placed.memory, index, spec, seed, watch)?;
                (Argument::Pointer(address), Some((address, spec.clone())))
            }
            ArgumentSpec::Scalar(element, number) => {
                let mut bytes = Vec::new();
                element.write(*number, &mut bytes);
                (Argument::Bytes(bytes), None)
            }
            ArgumentSpec::Null => (Argument::Pointer(0), None),
            // Made below, when all buffers have their addresses.
            ArgumentSpec::Map(_) => (Argument::Pointer(0), None),
        };
        placed.arguments.push(value);
        placed.buffers.push(buffer);
    }
    for (index, argument) in settings.args.iter().enumerate() {
        if let ArgumentSpec::Map(name) = argument {
            placed.arguments[index] = map(&mut placed, index, name, settings, seed, watch)?;
        }
    }
    placed.memory.load(kernel)?;
    Ok(placed)
}

/// The buffer that a tensor map is of.
fn map_buffer<'a>(name: &str, map: &'a MapSpec, args: &'a [ArgumentSpec]) -> Result<&'a BufferSpec, ProbeError> {
    let wrong = |reason: &str| ProbeError::MapField { name: name.into(), reason: reason.into() };
    match (map.arg.map(|arg| args.get(arg)), &map.buffer) {
        (Some(Some(ArgumentSpec::Buffer(buffer))), None) | (None, Some(ArgumentSpec::Buffer(buffer))) => Ok(buffer),
        (Some(_), Some(_)) | (None, None) => Err(wrong("give either arg or buffer")),
        _ => Err(wrong("arg must be that of a buffer argument, counted from 0, and buffer a `buf:`")),
    }
}

/// A tensor map as the emulator takes it.
fn map(
    placed: &mut Placed,
    index: usize,
    name: &str,
    settings: &Settings,
    seed: u64,
    watch: Watch<'_>,
) -> Result<Argument, ProbeError> {
    use ptx::{Element as TensorElement, OutOfBounds, Swizzle, TensorMap};
    let spec = settings.map.get(name);
    let spec =
        spec.ok_or_else(|| ProbeError::Map { name: name.into(), known: settings.map.keys().cloned().collect() })?;
    let wrong = |reason: String| ProbeError::MapField { name: name.into(), reason };
    let buffer = map_buffer(name, spec, &settings.args)?;
    let address = match spec.arg.and_then(|arg| placed.buffers.get(arg)?.as_ref()) {
        Some((address, _)) => *address,
        None => fill(&mut placed.memory, index, buffer, seed, watch)?,
    };
    placed.buffers[index] = Some((address, buffer.clone()));
    let element = match buffer.element {
        Element::F64 => TensorElement::F64,
        Element::F32 => TensorElement::F32,
        Element::F16 => TensorElement::F16,
        Element::Bf16 => TensorElement::Bf16,
        Element::E4m3 | Element::E5m2 | Element::I8 | Element::U8 => TensorElement::U8,
        Element::I16 | Element::U16 => TensorElement::U16,
        Element::I32 => TensorElement::S32,
        Element::U32 => TensorElement::U32,
        Element::I64 => TensorElement::S64,
        Element::U64 => TensorElement::U64,
    };
    let sizes = spec.sizes.clone().unwrap_or_else(|| buffer.shape.iter().rev().copied().collect());
    let strides = spec.strides.clone().unwrap_or_else(|| {
        let whole = sizes.iter().take(sizes.len().saturating_sub(1));
        whole
            .scan(buffer.element.bytes() as u64, |bytes, &size| {
                *bytes = bytes.saturating_mul(size);
                Some(*bytes)
            })
            .collect()
    });
    let mut map = TensorMap::dense(element, address, &sizes, &strides, &spec.box_);
    if let Some(strides) = &spec.element_strides {
        map.element_strides = strides.clone();
    }
    map.swizzle = match spec.swizzle.as_deref() {
        None | Some("none") => Swizzle::None,
        Some("32B") => Swizzle::Bytes32,
        Some("64B") => Swizzle::Bytes64,
        Some("128B") => Swizzle::Bytes128,
        Some(other) => return Err(wrong(format!("swizzle is `{other}`: it must be none, 32B, 64B or 128B"))),
    };
    map.out_of_bounds = match spec.fill.as_deref() {
        None | Some("zero") => OutOfBounds::Zeros,
        Some("nan") => OutOfBounds::Nan,
        Some(other) => return Err(wrong(format!("fill is `{other}`: it must be zero or nan"))),
    };
    map.validate().map_err(|source| ProbeError::MapShape { name: name.into(), source })?;
    Ok(Argument::TensorMap(Box::new(map)))
}

/// A buffer with its contents; its address.
fn fill(memory: &mut Memory, index: usize, spec: &BufferSpec, seed: u64, watch: Watch<'_>) -> Result<u64, ProbeError> {
    let element = spec.element;
    let (count, bytes) = (spec.elements().unwrap_or(u64::MAX), spec.bytes().unwrap_or(u64::MAX));
    let array = match &spec.init {
        Init::Uninitialised => return Ok(memory.alloc(bytes)?),
        Init::File(file) => Some(read(file, count, || ArgumentSpec::Buffer(spec.clone()).to_string())?),
        _ => None,
    };
    let address = memory.alloc_zeroed(bytes)?;
    if let Some(array) = array {
        memory.write(address, &converted(array, element))?;
        return Ok(address);
    }
    if let Init::Fill(number) = spec.init {
        let mut zero = Vec::new();
        element.write(number, &mut zero);
        if zero.iter().all(|&byte| byte == 0) {
            return Ok(address);
        }
    }
    let pieces = count.div_ceil(PIECE);
    for batch in (0..pieces).step_by(PIECES as usize) {
        if watch.is_cancelled() {
            return Err(ProbeError::Cancelled);
        }
        let numbers: Vec<u64> = (batch..pieces.min(batch + PIECES)).collect();
        let contents: Vec<Vec<u8>> =
            numbers.par_iter().map(|&piece| contents(index, spec, count, piece, seed)).collect();
        for (piece, contents) in numbers.iter().zip(contents) {
            memory.write(address + piece * PIECE * element.bytes() as u64, &contents)?;
        }
    }
    Ok(address)
}

/// One piece of what a buffer starts with.
fn contents(index: usize, spec: &BufferSpec, count: u64, piece: u64, seed: u64) -> Vec<u8> {
    let element = spec.element;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Every piece of every argument has numbers of its own.
    rng.set_stream((index as u64) << 40 | piece);
    let mut normal = normals(rng);
    let mut out = Vec::new();
    for at in piece * PIECE..count.min((piece + 1) * PIECE) {
        let number = match (&spec.init, element.range()) {
            (Init::Fill(number), _) => *number,
            (Init::Randn, None) => Number::Float(normal()),
            (Init::Randn, Some((least, most))) => {
                let value = (16.0 * normal()).round() as i128;
                Number::Integer(if least == 0 { value.abs().min(most) } else { value.clamp(least, most) })
            }
            (_, None) => Number::Float(at as f64),
            (_, Some(_)) => Number::Integer(at.into()),
        };
        element.write(number, &mut out);
    }
    out
}

/// The array of a file, which must have as many elements as the buffer.
fn read(file: &FileTensor, count: u64, asked_by: impl Fn() -> String) -> Result<Array, ProbeError> {
    let array = match &file.tensor {
        Some(name) => tensor_file::read_safetensors_array(&file.path, name)?,
        None => tensor_file::read_npy_array(&file.path)?,
    };
    let found: u64 = array.shape.iter().map(|&extent| extent as u64).product();
    if found != count {
        let (file, shape) = (file.to_string(), array.shape);
        return Err(ProbeError::FileShape { file, shape, wanted: count, asked_by: asked_by() });
    }
    Ok(array)
}

/// Whether an array of unsigned numbers has the bits of elements that NumPy has no type for.
fn is_bits_of(array: Element, element: Element) -> bool {
    matches!((array, element), (Element::U8, Element::E4m3 | Element::E5m2) | (Element::U16, Element::Bf16))
}

/// An array's bytes as elements of another type: bit for bit where the size says the same and NumPy has no name for the type,
/// rounded otherwise.
fn converted(array: Array, element: Element) -> Vec<u8> {
    if array.element == element || is_bits_of(array.element, element) {
        return array.bytes;
    }
    let mut out = Vec::new();
    for chunk in array.bytes.chunks(array.element.bytes()) {
        element.write(array.element.read(chunk), &mut out);
    }
    out
}

/// How a buffer compares with what it should hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The argument, counted from 0.
    pub arg: usize,
    /// Its type.
    pub dtype: String,
    /// The file it was compared with.
    pub file: String,
    /// Elements compared.
    pub elements: u64,
    /// Elements that are off by more than `abs + rel * |expected|`.
    pub wrong: u64,
    /// Absolute error allowed.
    pub abs: f64,
    /// Relative error allowed.
    pub rel: f64,
    /// The largest error; infinite where one of the two is not finite and the other is something else.
    pub max_error: f64,
    /// `||found - expected|| / ||expected||`; `None` where that is no number.
    pub relative_error: Option<f64>,
    /// The element that is off by most beyond what is allowed, or by most.
    pub worst: Option<Worst>,
}

/// An element that is off.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Where, outermost dimension first.
    pub index: Vec<u64>,
    /// What the kernel left there.
    pub found: String,
    /// What the file has there.
    pub expected: String,
}

/// The error allowed where the user says nothing, absolute and relative alike.
fn default_tolerance(element: Element) -> f64 {
    match element {
        Element::F64 => 1e-10,
        _ if element.is_float() => (4.0 * element.epsilon()).max(1e-5),
        _ => 0.0,
    }
}

impl Placed {
    /// The bytes that an argument's buffer holds, and what they are.
    fn contents(&self, arg: usize) -> Result<(Vec<u8>, &BufferSpec), ProbeError> {
        let Some((address, spec)) = self.buffers.get(arg).and_then(Option::as_ref) else {
            return Err(ProbeError::Index { what: "buffer", index: arg, count: self.buffers.len() });
        };
        Ok((self.memory.read(*address, spec.bytes().unwrap_or(u64::MAX))?, spec))
    }

    /// The bytes of every buffer argument.
    pub(super) fn all(&self) -> Result<Vec<Vec<u8>>, ProbeError> {
        let given = (0..self.buffers.len()).filter(|&arg| self.buffers[arg].is_some());
        given.map(|arg| Ok(self.contents(arg)?.0)).collect()
    }

    /// Writes a buffer to a `.npy` file.
    pub(super) fn write(&self, path: &std::path::Path, arg: usize) -> Result<(), ProbeError> {
        let (bytes, spec) = self.contents(arg)?;
        let shape: Vec<usize> = spec.shape.iter().map(|&extent| extent as usize).collect();
        Ok(tensor_file::write_npy_bytes(path, spec.element, &shape, &bytes)?)
    }

    /// Compares a buffer with a file.
    pub(super) fn compare(&self, expected: &Expectation) -> Result<Comparison, ProbeError> {
        let (bytes, spec) = self.contents(expected.arg)?;
        let element = spec.element;
        let count = spec.elements().unwrap_or(u64::MAX);
        let mut array = read(&expected.file, count, || ArgumentSpec::Buffer(spec.clone()).to_string())?;
        if is_bits_of(array.element, element) {
            array.element = element;
        }
        let default = default_tolerance(element);
        let (abs, rel) = (expected.abs.unwrap_or(default), expected.rel.unwrap_or(default));
        let (mut wrong, mut max_error, mut worst) = (0, 0.0f64, None);
        let (mut difference, mut norm, mut beyond) = (0.0, 0.0, f64::NEG_INFINITY);
        let pairs = bytes.chunks(element.bytes()).zip(array.bytes.chunks(array.element.bytes()));
        for (index, (found, wanted)) in pairs.enumerate() {
            let (found, wanted) = (element.read(found), array.element.read(wanted));
            let error = error(found, wanted);
            let allowed = abs + if rel == 0.0 { 0.0 } else { rel * wanted.to_f64().abs() };
            // Infinity allows nothing but itself.
            let excess = if error == f64::INFINITY { error } else { error - allowed };
            wrong += u64::from(excess > 0.0);
            max_error = max_error.max(error);
            difference += error * error;
            norm += wanted.to_f64().powi(2);
            if error > 0.0 && excess > beyond {
                beyond = excess;
                worst = Some((index as u64, found, wanted));
            }
        }
        let worst = worst.map(|(index, found, wanted)| Worst {
            index: unravel(index, &spec.shape),
            found: found.to_string(),
            expected: wanted.to_string(),
        });
        Ok(Comparison {
            arg: expected.arg,
            dtype: element.to_string(),
            file: expected.file.to_string(),
            elements: count,
            wrong,
            abs,
            rel,
            max_error,
            relative_error: Some((difference / norm).sqrt()).filter(|error| error.is_finite()),
            worst,
        })
    }
}

/// How far two numbers are apart; 0 of two NaNs, infinite where only one is a NaN.
fn error(found: Number, wanted: Number) -> f64 {
    if let (Number::Integer(a), Number::Integer(b)) = (found, wanted) {
        return a.abs_diff(b) as f64;
    }
    let (a, b) = (found.to_f64(), wanted.to_f64());
    match (a.is_nan(), b.is_nan()) {
        (true, true) => 0.0,
        (true, false) | (false, true) => f64::INFINITY,
        _ if a == b => 0.0,
        _ => (a - b).abs(),
    }
}

fn unravel(mut flat: u64, shape: &[u64]) -> Vec<u64> {
    let mut index = vec![0; shape.len()];
    for (index, &extent) in index.iter_mut().zip(shape).rev() {
        *index = flat % extent.max(1);
        flat /= extent.max(1);
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(args: &[&str]) -> Settings {
        Settings { args: args.iter().map(|text| text.parse().unwrap()).collect(), ..Settings::default() }
    }

    /// A kernel whose module has no variables.
    fn kernel() -> Kernel {
        Kernel::new("k", arch::Sm::Sm90.into(), ptx::Version { major: 8, minor: 0 })
    }

    fn held(placed: &Placed, arg: usize) -> Vec<f64> {
        let (bytes, spec) = placed.contents(arg).unwrap();
        bytes.chunks(spec.element.bytes()).map(|chunk| spec.element.read(chunk).to_f64()).collect()
    }

    #[test]
    fn buffers_hold_what_was_asked_for() {
        let args = ["buf:f16:2x3:ramp", "buf:i8:4:ones", "buf:f32:2:-inf", "buf:i32:70000:ramp", "buf:e4m3:3:0.3"];
        let placed = place(&settings(&args), &kernel(), Watch::default()).unwrap();
        assert_eq!(held(&placed, 0), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(held(&placed, 1), [1.0; 4]);
        assert_eq!(held(&placed, 2), [f64::NEG_INFINITY; 2]);
        assert_eq!(held(&placed, 3)[69_999], 69_999.0);
        assert_eq!(held(&placed, 4), [0.3125; 3]);
    }

    #[test]
    fn random_numbers_depend_on_seed_and_argument_alone() {
        let draw = |seed, args: &[&str], arg| {
            held(&place(&Settings { seed: Some(seed), ..settings(args) }, &kernel(), Watch::default()).unwrap(), arg)
        };
        let one = draw(1, &["buf:f32:100000:randn"], 0);
        assert_eq!(one, draw(1, &["buf:f32:100000:randn", "null"], 0));
        assert_ne!(one[..4], draw(2, &["buf:f32:100000:randn"], 0)[..4]);
        assert_ne!(one[..4], draw(1, &["null", "buf:f32:100000:randn"], 1)[..4]);
        assert_ne!(one[..4], one[PIECE as usize..][..4]);
        let mean = one.iter().sum::<f64>() / 1e5;
        let variance = one.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        let bytes = draw(1, &["buf:u8:1000:randn"], 0);
        assert!(bytes.iter().all(|&x| x <= 128.0) && bytes.iter().any(|&x| x > 16.0));
    }

    #[test]
    fn comparisons_find_the_worst_element() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("e.npy");
        let expected = [0.0f32, 1.0, 2.5, 3.0, f32::NAN, 5.0];
        let bytes: Vec<u8> = expected.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensor_file::write_npy_bytes(&path, Element::F32, &[2, 3], &bytes).unwrap();
        let placed = place(&settings(&["buf:f16:2x3:ramp"]), &kernel(), Watch::default()).unwrap();
        let expectation = |tolerance: Option<f64>| Expectation {
            arg: 0,
            file: FileTensor { path: path.clone(), tensor: None },
            abs: tolerance,
            rel: tolerance,
        };
        let compared = placed.compare(&expectation(None)).unwrap();
        assert_eq!((compared.wrong, compared.max_error), (2, f64::INFINITY));
        assert_eq!(compared.worst.unwrap().index, [1, 1]);
        assert_eq!((compared.abs, compared.rel), (0.00390625, 0.00390625));
        assert_eq!(placed.compare(&expectation(Some(0.5))).unwrap().wrong, 1);
    }
}
