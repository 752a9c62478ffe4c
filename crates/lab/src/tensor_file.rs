//! Reading and writing tensors: safetensors and NumPy's `.npy`.
//!
//! Elements are f32, f16 or bf16; f64 is read as f32, and the [`Loaded`] tensor says so. NumPy has no bf16: as
//! `ml_dtypes` does, it stands in `.npy` as the opaque two-byte type `|V2`, and a `|V2` that is read is taken for bf16.
//!
//! A file is not trusted: what a header claims is checked against the file's length before memory is asked for. `.npy`
//! headers are read here, because `npyz` allocates what a header claims and parses it recursively.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use kernels::{Dtype, Inputs, Tensor, TensorError};
use safetensors::tensor::{Metadata, TensorView};

use crate::atomic_file;
use crate::element::Element;

/// The order of a file's dimensions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `[batch, seqlen, heads, dim]`, as FlashAttention has it.
    #[default]
    Bshd,
    /// `[batch, heads, seqlen, dim]`, as PyTorch's SDPA has it.
    Bhsd,
}

impl Layout {
    /// A tensor of this layout as the view `[batch, seqlen, heads, dim]`, or such a view in this layout.
    ///
    /// # Errors
    /// When it has fewer than three dimensions.
    pub fn view(self, tensor: &Tensor) -> Result<Tensor, TensorError> {
        match self {
            Layout::Bshd => Ok(tensor.clone()),
            Layout::Bhsd => tensor.transpose(1, 2),
        }
    }
}

impl FromStr for Layout {
    type Err = ParseLayoutError;

    fn from_str(text: &str) -> Result<Layout, ParseLayoutError> {
        match text {
            "bshd" => Ok(Layout::Bshd),
            "bhsd" => Ok(Layout::Bhsd),
            _ => Err(ParseLayoutError(text.to_string())),
        }
    }
}

/// A text that names no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("layout is `{0}`: it must be bshd or bhsd")]
pub struct ParseLayoutError(String);

/// A tensor from a file.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The tensor, contiguous.
    pub tensor: Tensor,
    /// Whether the file holds f64, which was rounded to f32.
    pub rounded_from_f64: bool,
}

/// A file that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    /// The operating system refuses.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what its name says.
    #[error("{} is not a readable {format} file: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What it should be.
        format: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// It has no tensor of this name.
    #[error("{} has no tensor `{name}`: it has {}", path.display(), list(names))]
    Missing {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        name: String,
        /// What there is.
        names: Vec<String>,
    },
    /// A type that no kernel takes.
    #[error("{}: tensor `{name}` is of type {dtype}: it must be {allowed}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Its type.
        dtype: String,
        /// The types that are read.
        allowed: &'static str,
    },
    /// A tensor that is not four-dimensional.
    #[error("{}: tensor `{name}` has the shape {shape:?}: it must have 4 dimensions", path.display())]
    Rank {
        /// The file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor that does not fit memory.
    #[error("{}: {source}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TensorError,
    },
}

fn list(names: &[String]) -> String {
    const MOST: usize = 20;
    match names.len() {
        0 => "none".to_string(),
        count if count > MOST => format!("{}, ... ({count} in all)", names[..MOST].join(", ")),
        _ => names.join(", "),
    }
}

/// A file being read.
struct Source<'a> {
    path: &'a Path,
    format: &'static str,
    reader: BufReader<File>,
    length: u64,
}

impl<'a> Source<'a> {
    fn open(path: &'a Path, format: &'static str) -> Result<Source<'a>, TensorFileError> {
        let io = |source| TensorFileError::Io { path: path.to_path_buf(), source };
        let metadata = std::fs::metadata(path).map_err(io)?;
        // To open a pipe would wait for its writer.
        if !metadata.is_file() {
            return Err(io(io::Error::other("not a regular file")));
        }
        let (file, length) = (File::open(path).map_err(io)?, metadata.len());
        Ok(Source { path, format, reader: BufReader::new(file), length })
    }

    fn wrong(&self, reason: impl Into<String>) -> TensorFileError {
        TensorFileError::Format { path: self.path.to_path_buf(), format: self.format, reason: reason.into() }
    }

    fn io(&self, source: io::Error) -> TensorFileError {
        TensorFileError::Io { path: self.path.to_path_buf(), source }
    }

    fn tensor(&self, source: TensorError) -> TensorFileError {
        TensorFileError::Tensor { path: self.path.to_path_buf(), source }
    }

    /// The next `length` bytes, once they are known to be there.
    fn bytes(&mut self, length: u64, what: &str) -> Result<Vec<u8>, TensorFileError> {
        let position = self.reader.stream_position().map_err(|e| self.io(e))?;
        let left = self.length.saturating_sub(position);
        let enough = usize::try_from(length).ok().filter(|_| length <= left);
        let Some(length) = enough else {
            return Err(self.wrong(format!("{what} takes {length} bytes, {left} are left: the file may be cut off")));
        };
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(length);
        reserved.map_err(|_| self.tensor(TensorError::OutOfMemory { bytes: length }))?;
        bytes.resize(length, 0);
        self.reader.read_exact(&mut bytes).map_err(|e| self.io(e))?;
        Ok(bytes)
    }

    fn number<const BYTES: usize>(&mut self, what: &str) -> Result<[u8; BYTES], TensorFileError> {
        let bytes = self.bytes(BYTES as u64, what)?;
        bytes.try_into().map_err(|_| self.wrong(what))
    }

    fn load(&self, name: &str, array: Array) -> Result<Loaded, TensorFileError> {
        let Array { element, shape, bytes } = array;
        let tensor = match element {
            Element::F32 => Tensor::from_bytes(Dtype::F32, &shape, bytes),
            Element::F16 => Tensor::from_bytes(Dtype::F16, &shape, bytes),
            Element::Bf16 => Tensor::from_bytes(Dtype::Bf16, &shape, bytes),
            Element::F64 => {
                let (values, _) = bytes.as_chunks::<8>();
                let values: Vec<f64> = values.iter().map(|value| f64::from_le_bytes(*value)).collect();
                Tensor::from_values(Dtype::F32, &shape, &values)
            }
            other => return Err(self.dtype(name, other.to_string(), "f32, f16, bf16 or f64")),
        };
        Ok(Loaded { tensor: tensor.map_err(|e| self.tensor(e))?, rounded_from_f64: element == Element::F64 })
    }

    fn dtype(&self, name: &str, dtype: String, allowed: &'static str) -> TensorFileError {
        TensorFileError::Dtype { path: self.path.to_path_buf(), name: name.into(), dtype, allowed }
    }
}

/// The types an array may have.
const ARRAY_TYPES: &str = "a float or an integer of 8 to 64 bits, little endian";
/// What the one array of a `.npy` file is called.
const ARRAY: &str = "array";

/// Elements of any type, in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// What an element is.
    pub element: Element,
    /// The extents.
    pub shape: Vec<usize>,
    /// The elements, little endian.
    pub bytes: Vec<u8>,
}

/// Reads the tensor called `name` from a safetensors file as kernels take it, and nothing of the others.
///
/// # Errors
/// When the file cannot be read, is damaged, or lacks it.
pub fn read_safetensors(path: &Path, name: &str) -> Result<Loaded, TensorFileError> {
    let mut source = Source::open(path, "safetensors")?;
    let array = safetensors_array(&mut source, name)?;
    source.load(name, array)
}

/// Reads the tensor called `name` from a safetensors file, whatever its type, and nothing of the others.
///
/// # Errors
/// When the file cannot be read, is damaged, or lacks it.
pub fn read_safetensors_array(path: &Path, name: &str) -> Result<Array, TensorFileError> {
    safetensors_array(&mut Source::open(path, "safetensors")?, name)
}

fn safetensors_array(source: &mut Source<'_>, name: &str) -> Result<Array, TensorFileError> {
    let header_length = u64::from_le_bytes(source.number("the length of the header")?);
    let header = source.bytes(header_length, "the header")?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| source.wrong(e.to_string()))?;
    let data = source.length - 8 - header_length;
    if metadata.data_len() as u64 != data {
        return Err(source.wrong(format!(
            "the tensors take {} bytes, the file has {data} for them: it may be cut off",
            metadata.data_len()
        )));
    }
    let Some(info) = metadata.info(name) else {
        let (name, names) = (name.to_string(), metadata.offset_keys());
        return Err(TensorFileError::Missing { path: source.path.to_path_buf(), name, names });
    };
    let element = match info.dtype {
        safetensors::Dtype::F64 => Element::F64,
        safetensors::Dtype::F32 => Element::F32,
        safetensors::Dtype::F16 => Element::F16,
        safetensors::Dtype::BF16 => Element::Bf16,
        safetensors::Dtype::F8_E4M3 => Element::E4m3,
        safetensors::Dtype::F8_E5M2 => Element::E5m2,
        safetensors::Dtype::I8 => Element::I8,
        safetensors::Dtype::U8 | safetensors::Dtype::BOOL => Element::U8,
        safetensors::Dtype::I16 => Element::I16,
        safetensors::Dtype::U16 => Element::U16,
        safetensors::Dtype::I32 => Element::I32,
        safetensors::Dtype::U32 => Element::U32,
        safetensors::Dtype::I64 => Element::I64,
        safetensors::Dtype::U64 => Element::U64,
        other => return Err(source.dtype(name, other.to_string(), ARRAY_TYPES)),
    };
    let (start, end) = info.data_offsets;
    source.reader.seek(SeekFrom::Start(8 + header_length + start as u64)).map_err(|e| source.io(e))?;
    let bytes = source.bytes((end - start) as u64, name)?;
    Ok(Array { element, shape: info.shape.clone(), bytes })
}

/// Reads a NumPy array as kernels take it; one in Fortran order is brought into C order.
///
/// # Errors
/// When the file cannot be read, is damaged, or holds another type than f32, f16, `|V2` (bf16) or f64.
pub fn read_npy(path: &Path) -> Result<Loaded, TensorFileError> {
    let mut source = Source::open(path, "npy")?;
    let array = npy_array(&mut source)?;
    source.load(ARRAY, array)
}

/// Reads a NumPy array of any type; one in Fortran order is brought into C order. NumPy has no names for the 8-bit floats:
/// `|V1`, as which `ml_dtypes` writes them, is read as u8.
///
/// # Errors
/// When the file cannot be read, is damaged, or holds something else than floats and integers.
pub fn read_npy_array(path: &Path) -> Result<Array, TensorFileError> {
    npy_array(&mut Source::open(path, "npy")?)
}

fn npy_array(source: &mut Source<'_>) -> Result<Array, TensorFileError> {
    let [magic @ .., major, _] = source.number::<8>("the magic number")?;
    let header_length = match (&magic, major) {
        (b"\x93NUMPY", 1) => u64::from(u16::from_le_bytes(source.number("the length of the header")?)),
        (b"\x93NUMPY", 2 | 3) => u64::from(u32::from_le_bytes(source.number("the length of the header")?)),
        (b"\x93NUMPY", _) => return Err(source.wrong(format!("its version is {major}: 1, 2 and 3 are known"))),
        _ => return Err(source.wrong("it does not begin with \\x93NUMPY")),
    };
    let header = source.bytes(header_length, "the header")?;
    let header = String::from_utf8_lossy(&header);
    let field = |key: &str| {
        let (_, rest) = header.split_once(&format!("'{key}':"))?;
        Some(rest.trim_start())
    };
    let descr = field("descr").and_then(|rest| rest.strip_prefix('\'')?.split_once('\'')).map(|(descr, _)| descr);
    let element = match descr {
        Some("<f8") => Element::F64,
        Some("<f4") => Element::F32,
        Some("<f2") => Element::F16,
        Some("|V2" | "<V2") => Element::Bf16,
        Some("|i1") => Element::I8,
        Some("|u1" | "|b1" | "|V1") => Element::U8,
        Some("<i2") => Element::I16,
        Some("<u2") => Element::U16,
        Some("<i4") => Element::I32,
        Some("<u4") => Element::U32,
        Some("<i8") => Element::I64,
        Some("<u8") => Element::U64,
        Some(other) => return Err(source.dtype(ARRAY, other.into(), ARRAY_TYPES)),
        None => return Err(source.wrong("its header gives no simple descr")),
    };
    let fortran = match field("fortran_order") {
        Some(rest) if rest.starts_with("False") => false,
        Some(rest) if rest.starts_with("True") => true,
        _ => return Err(source.wrong("its header gives no fortran_order")),
    };
    let extents = field("shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')')).map(|(extents, _)| extents);
    let extents = extents.and_then(|extents| {
        let extents = extents.split(',').map(str::trim).filter(|extent| !extent.is_empty());
        extents.map(|extent| extent.parse().ok()).collect::<Option<Vec<usize>>>()
    });
    let Some(shape) = extents else { return Err(source.wrong("its header gives no shape")) };
    let length = shape.iter().try_fold(element.bytes(), |bytes, extent| bytes.checked_mul(*extent));
    let Some(length) = length else { return Err(source.tensor(TensorError::TooLarge { shape })) };
    let bytes = source.bytes(length as u64, "the array")?;
    // Version 1 to 3 have 2 and 4 bytes of the header's length after the eight of the magic number.
    let after = source.length - (8 + if major == 1 { 2 } else { 4 } + header_length + length as u64);
    if after > 0 {
        return Err(source.wrong(format!("{after} bytes follow the array of {length} bytes")));
    }
    let bytes = if fortran { c_order(&bytes, &shape, element.bytes()) } else { bytes };
    Ok(Array { element, shape, bytes })
}

/// Elements of `size` bytes from Fortran order into C order.
fn c_order(bytes: &[u8], shape: &[usize], size: usize) -> Vec<u8> {
    // Extents of 1 move nothing; without them there are few.
    let extents: Vec<usize> = shape.iter().copied().filter(|&extent| extent != 1).collect();
    let mut index = vec![0; extents.len()];
    let mut out = Vec::with_capacity(bytes.len());
    while out.len() < bytes.len() {
        let at = index.iter().zip(&extents).rev().fold(0, |at, (index, extent)| at * extent + index);
        out.extend(&bytes[at * size..(at + 1) * size]);
        for (index, extent) in index.iter_mut().zip(&extents).rev() {
            *index += 1;
            if *index < *extent {
                break;
            }
            *index = 0;
        }
    }
    out
}

/// The inputs of a call, from files, and the names of those that were stored in f64.
#[derive(Clone, Debug)]
pub struct LoadedInputs {
    /// Views `[batch, seqlen, heads, dim]`.
    pub inputs: Inputs,
    /// Which of them were rounded from f64 to f32.
    pub rounded_from_f64: Vec<String>,
}

/// Reads `q`, `k` and `v` from a safetensors file, their names following `prefix` (`layer0.`).
///
/// # Errors
/// When the file cannot be read, lacks one of them, or one is not four-dimensional.
pub fn read_inputs(path: &Path, prefix: &str, layout: Layout) -> Result<LoadedInputs, TensorFileError> {
    let read = |name: &str| {
        let name = format!("{prefix}{name}");
        let loaded = read_safetensors(path, &name)?;
        Ok((path, name, loaded))
    };
    arrange([read("q")?, read("k")?, read("v")?], layout)
}

/// Reads `q`, `k` and `v` from one `.npy` file each.
///
/// # Errors
/// When a file cannot be read, or an array is not four-dimensional.
pub fn read_npy_inputs(q: &Path, k: &Path, v: &Path, layout: Layout) -> Result<LoadedInputs, TensorFileError> {
    arrange([(q, "q".into(), read_npy(q)?), (k, "k".into(), read_npy(k)?), (v, "v".into(), read_npy(v)?)], layout)
}

fn arrange(loaded: [(&Path, String, Loaded); 3], layout: Layout) -> Result<LoadedInputs, TensorFileError> {
    let view = |(path, name, loaded): &(&Path, String, Loaded)| {
        let shape = loaded.tensor.shape().to_vec();
        if shape.len() != 4 {
            return Err(TensorFileError::Rank { path: path.to_path_buf(), name: name.clone(), shape });
        }
        layout.view(&loaded.tensor).map_err(|source| TensorFileError::Tensor { path: path.to_path_buf(), source })
    };
    let inputs = Inputs { q: view(&loaded[0])?, k: view(&loaded[1])?, v: view(&loaded[2])?, new: None };
    let rounded = loaded.into_iter().filter(|(_, _, loaded)| loaded.rounded_from_f64);
    Ok(LoadedInputs { inputs, rounded_from_f64: rounded.map(|(_, name, _)| name).collect() })
}

/// Writes named tensors to a safetensors file: all of it, or nothing.
///
/// # Errors
/// When the file cannot be written, or memory does not suffice.
pub fn write_safetensors(path: &Path, tensors: &[(&str, &Tensor)]) -> Result<(), TensorFileError> {
    let format = |reason: String| TensorFileError::Format { path: path.to_path_buf(), format: "safetensors", reason };
    let mut contents = Vec::new();
    for (name, tensor) in tensors {
        contents.push((name, *tensor, bytes_of(path, tensor)?));
    }
    let mut views = Vec::new();
    for (name, tensor, bytes) in &contents {
        let dtype = match tensor.dtype() {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
        };
        let view = TensorView::new(dtype, tensor.shape().to_vec(), bytes).map_err(|e| format(e.to_string()))?;
        views.push((name, view));
    }
    let bytes = safetensors::serialize(views, None).map_err(|e| format(e.to_string()))?;
    write_atomically(path, &[&bytes])
}

/// Writes a tensor to a NumPy file, in C order, bf16 as `|V2`: all of it, or nothing.
///
/// # Errors
/// When the file cannot be written, or memory does not suffice.
pub fn write_npy(path: &Path, tensor: &Tensor) -> Result<(), TensorFileError> {
    let element = match tensor.dtype() {
        Dtype::F32 => Element::F32,
        Dtype::F16 => Element::F16,
        Dtype::Bf16 => Element::Bf16,
    };
    write_npy_bytes(path, element, tensor.shape(), &bytes_of(path, tensor)?)
}

/// Writes elements that lie in C order to a NumPy file, types that NumPy does not know as `ml_dtypes` does: all of it, or nothing.
///
/// # Errors
/// When the file cannot be written.
pub fn write_npy_bytes(path: &Path, element: Element, shape: &[usize], bytes: &[u8]) -> Result<(), TensorFileError> {
    let descr = match element {
        Element::F64 => "<f8",
        Element::F32 => "<f4",
        Element::F16 => "<f2",
        Element::Bf16 => "|V2",
        Element::E4m3 | Element::E5m2 => "|V1",
        Element::I8 => "|i1",
        Element::U8 => "|u1",
        Element::I16 => "<i2",
        Element::U16 => "<u2",
        Element::I32 => "<i4",
        Element::U32 => "<u4",
        Element::I64 => "<i8",
        Element::U64 => "<u8",
    };
    // A Python tuple: that of one extent ends with a comma.
    let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({extents}), }}");
    // The array begins at a multiple of 64 bytes, after 10 bytes, the header and its newline.
    let padding = (10 + header.len() + 1).next_multiple_of(64) - (10 + header.len() + 1);
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let rank = shape.len();
    let reason = format!("an array of {rank} dimensions does not fit its header");
    let length = u16::try_from(header.len());
    let length = length.map_err(|_| TensorFileError::Format { path: path.to_path_buf(), format: "npy", reason })?;
    write_atomically(path, &[b"\x93NUMPY\x01\x00", &length.to_le_bytes(), header.as_bytes(), bytes])
}

fn bytes_of(path: &Path, tensor: &Tensor) -> Result<Vec<u8>, TensorFileError> {
    tensor.to_bytes().map_err(|source| TensorFileError::Tensor { path: path.to_path_buf(), source })
}

fn write_atomically(path: &Path, parts: &[&[u8]]) -> Result<(), TensorFileError> {
    atomic_file::write(path, parts).map_err(|source| TensorFileError::Io { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::{Problem, check_within, reference};
    use proptest::prelude::*;

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/tests/data/minilm").join(name)
    }

    /// A file with these contents, in a folder that goes when it is dropped.
    fn file(name: &str, contents: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, contents).unwrap();
        (folder, path)
    }

    /// The message without the folder.
    fn message<T: std::fmt::Debug>(result: Result<T, TensorFileError>, path: &Path) -> String {
        result.unwrap_err().to_string().replace(&path.display().to_string(), "FILE")
    }

    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        let length = (header.len() as u16).to_le_bytes();
        [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat()
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        for dtype in Dtype::ALL {
            for shape in [&[2, 3, 4, 5][..], &[7], &[], &[0, 3]] {
                let tensor = Tensor::randn(dtype, shape, 1).unwrap();
                let (npy, safetensors) = (folder.path().join("a.npy"), folder.path().join("a.safetensors"));
                write_npy(&npy, &tensor).unwrap();
                write_safetensors(&safetensors, &[("x", &tensor), ("another", &tensor)]).unwrap();
                for loaded in [read_npy(&npy).unwrap(), read_safetensors(&safetensors, "x").unwrap()] {
                    assert_eq!((loaded.tensor.dtype(), loaded.tensor.shape()), (dtype, shape));
                    assert_eq!(loaded.tensor.to_bytes().unwrap(), tensor.to_bytes().unwrap());
                    assert!(!loaded.rounded_from_f64);
                }
                assert_eq!(std::fs::read(&npy).unwrap().len() % 64, tensor.to_bytes().unwrap().len() % 64);
            }
        }
    }

    #[test]
    fn layouts_are_views_of_one_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qkv.safetensors");
        let [q, k, v] = [1, 2, 3].map(|seed| Tensor::randn(Dtype::F16, &[2, 5, 3, 4], seed).unwrap());
        let by_head = Layout::Bhsd.view(&k).unwrap();
        write_safetensors(&path, &[("a.q", &q), ("a.k", &k), ("a.v", &v), ("b.k", &by_head)]).unwrap();
        let loaded = read_inputs(&path, "a.", Layout::Bshd).unwrap();
        assert_eq!(loaded.inputs.k.to_f64(), k.to_f64());
        let stored = read_safetensors(&path, "b.k").unwrap().tensor;
        assert_eq!(stored.shape(), [2, 3, 5, 4]);
        assert_eq!(Layout::Bhsd.view(&stored).unwrap().to_f64(), k.to_f64());
    }

    #[test]
    fn a_writer_that_fails_leaves_the_old_file() {
        let (folder, path) = file("old.npy", b"old");
        let tensor = Tensor::full(Dtype::F32, &[1; 30_000], 0.0).unwrap();
        assert!(write_npy(&path, &tensor).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write_npy(&folder.path().join("no/folder.npy"), &tensor).is_err());
    }

    #[test]
    fn numpy_files_are_read() {
        // np.save of np.array([[1, 2, 3], [4, 5, 6]], order="F") in f64.
        let values: Vec<u8> = [1.0f64, 4.0, 2.0, 5.0, 3.0, 6.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let header = "{'descr': '<f8', 'fortran_order': True, 'shape': (2, 3), }          \n";
        let (_folder, path) = file("a.npy", &npy(header, &values));
        let loaded = read_npy(&path).unwrap();
        assert_eq!((loaded.tensor.shape(), loaded.tensor.dtype()), (&[2, 3][..], Dtype::F32));
        assert_eq!(loaded.tensor.to_f64(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(loaded.rounded_from_f64);
    }

    #[test]
    fn real_activations_are_read() {
        for layer in ["layer0", "layer5"] {
            let read = |file: &str, name: &str| {
                read_safetensors(&data(&format!("{layer}.{file}.safetensors")), &format!("{layer}.{name}"))
                    .unwrap()
                    .tensor
            };
            let tokens_first = |name: &str| Layout::Bhsd.view(&read(name, name)).unwrap();
            let inputs = Inputs { q: tokens_first("q"), k: tokens_first("k"), v: tokens_first("v"), new: None };
            let problem = Problem::builder(1, 12, 384, 32).build().unwrap();
            let outputs = kernels::Outputs { out: tokens_first("o"), lse: read("o", "lse") };
            let verdict = check_within(&problem, &outputs, &reference(&problem, &inputs).unwrap(), 1e-6).unwrap();
            assert!(verdict.passed(), "{verdict:?}");
        }
    }

    #[test]
    fn messages() {
        let mut messages = Vec::new();
        let path = data("layer0.q.safetensors");
        messages.push(message(read_inputs(&path, "layer5.", Layout::Bhsd), &path));
        let whole = std::fs::read(&path).unwrap();
        for cut in [4, 50, 1000] {
            let (_folder, path) = file("a.safetensors", &whole[..cut]);
            messages.push(message(read_safetensors(&path, "layer0.q"), &path));
        }
        let (_folder, path) = file("a.safetensors", &u64::MAX.to_le_bytes());
        messages.push(message(read_safetensors(&path, "q"), &path));
        let header = br#"{"q":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}    "#;
        let (_folder, path) =
            file("a.safetensors", &[&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat());
        messages.push(message(read_safetensors(&path, "q"), &path));
        let huge = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }\n";
        let (_folder, path) = file("a.npy", &npy(huge, &[0; 8]));
        messages.push(message(read_npy(&path), &path));
        let overflow = "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4294967296), }\n";
        let (_folder, path) = file("a.npy", &npy(overflow, &[]));
        messages.push(message(read_npy(&path), &path));
        let (_folder, path) =
            file("a.npy", &npy("{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }\n", &[0; 4]));
        messages.push(message(read_npy(&path), &path));
        let (_folder, path) = file("a.npy", b"PK zip");
        messages.push(message(read_npy(&path), &path));
        let (_folder, path) =
            file("a.npy", &npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n", &[0; 7]));
        messages.push(message(read_npy(&path), &path));
        let (folder, flat) =
            file("a.npy", &npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n", &[0; 4]));
        messages.push(message(read_npy_inputs(&flat, &flat, &flat, Layout::Bshd), &flat));
        let absent = folder.path().join("absent.npy");
        messages.push(message(read_npy(&absent), &absent));
        messages.push("hbsd".parse::<Layout>().unwrap_err().to_string());
        insta::assert_snapshot!(messages.join("\n"));
    }

    proptest! {
        #[test]
        fn hostile_files_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), at in 0usize..150, with: u8) {
            let (_folder, path) = file("a", &bytes);
            prop_assert!(read_npy(&path).is_err() && read_safetensors(&path, "q").is_err());
            let mut changed = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 1), }\n", &[0; 24]);
            let length = changed.len();
            changed[at % length] = with;
            let (_folder, path) = file("a", &changed);
            let _ = read_npy(&path);
            let header = br#"{"q":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}    "#;
            let mut changed = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
            let length = changed.len();
            changed[at % length] = with;
            let (_folder, path) = file("a", &changed);
            let _ = read_safetensors(&path, "q");
        }
    }
}
