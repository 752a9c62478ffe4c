//! Kernel arguments as the driver takes them: a pointer to each value.

use std::ffi::c_void;

use ptx::Launch;

use crate::error::Error;
use crate::tensor_map;

/// The values of a launch's arguments, each at an address that is a multiple of 8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    words: Vec<u64>,
    /// The first word of each argument.
    starts: Vec<usize>,
}

impl Packed {
    /// # Errors
    /// When there are not as many arguments as parameters, or one has the wrong size.
    pub fn new(launch: &Launch<'_>) -> Result<Self, Error> {
        let kernel = launch.kernel;
        let refuse = |what| Err(Error::Launch { kernel: kernel.name.clone(), what });
        let (given, wanted) = (launch.arguments.len(), kernel.params.len());
        if given != wanted {
            return refuse(format!("{given} arguments given; the kernel has {wanted} parameters"));
        }
        let mut packed = Self { words: Vec::new(), starts: Vec::new() };
        for (index, (argument, param)) in launch.arguments.iter().zip(&kernel.params).enumerate() {
            let bytes = match argument.to_bytes() {
                Ok(bytes) => bytes,
                Err(map) => tensor_map::encode(map, &kernel.name)?,
            };
            if !argument.fits(param) {
                let (name, given, wanted) = (&param.name, bytes.len(), param.bytes());
                return refuse(format!("argument {index} (`{name}`) has {given} bytes; the parameter has {wanted}"));
            }
            packed.starts.push(packed.words.len());
            packed.words.extend(bytes.chunks(8).map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            }));
        }
        Ok(packed)
    }

    /// The words of an argument.
    pub fn get_mut(&mut self, argument: usize) -> Option<&mut [u64]> {
        let start = *self.starts.get(argument)?;
        let end = self.starts.get(argument + 1).copied().unwrap_or(self.words.len());
        self.words.get_mut(start..end)
    }

    /// One pointer per argument, valid while `self` is.
    pub fn pointers(&self) -> Vec<*mut c_void> {
        self.starts.iter().map(|&start| self.words[start..].as_ptr().cast_mut().cast()).collect()
    }
}

#[cfg(test)]
mod tests {
    use ptx::{Argument, Kernel};

    use super::*;

    fn kernel() -> Kernel {
        let text = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k(\n.param .u64 p,\n.param .f32 scale,\n.param .align 8 .b8 s[12]\n)\n{\nret;\n}\n";
        ptx::parse(text).unwrap().remove(0)
    }

    fn launch(kernel: &Kernel, arguments: Vec<Argument>) -> Launch<'_> {
        Launch { kernel, grid: [1; 3], block: [32, 1, 1], cluster: [1; 3], dynamic_shared: 0, arguments }
    }

    #[test]
    fn every_argument_lies_where_its_pointer_points() {
        let kernel = kernel();
        let structure: Vec<u8> = (1..13).collect();
        let arguments =
            vec![Argument::Pointer(0x7_0000_0010), Argument::F32(0.125), Argument::Bytes(structure.clone())];
        let packed = Packed::new(&launch(&kernel, arguments)).unwrap();
        assert_eq!(packed.starts, [0, 1, 2]);
        assert_eq!(packed.words[0], 0x7_0000_0010);
        assert_eq!(packed.words[1], u64::from(0.125f32.to_bits()));
        let bytes: Vec<u8> = packed.words[2..].iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes[..12], structure);
        let base = packed.words.as_ptr() as usize;
        let offsets: Vec<usize> = packed.pointers().iter().map(|pointer| *pointer as usize - base).collect();
        assert_eq!(offsets, [0, 8, 16]);
        let mut packed = packed;
        packed.get_mut(0).unwrap()[0] = 7;
        assert_eq!(packed.words[0], 7);
        assert_eq!([1, 2, 3].map(|index| packed.get_mut(index).map(|words| words.len())), [Some(1), Some(2), None]);
    }

    #[test]
    fn a_wrong_argument_is_named() {
        let kernel = kernel();
        let error = Packed::new(&launch(&kernel, vec![])).unwrap_err().to_string();
        assert_eq!(error, "launch of `k`: 0 arguments given; the kernel has 3 parameters");
        let arguments = vec![Argument::U32(1), Argument::F32(0.0), Argument::Bytes(vec![0; 12])];
        let error = Packed::new(&launch(&kernel, arguments)).unwrap_err().to_string();
        assert_eq!(error, "launch of `k`: argument 0 (`p`) has 4 bytes; the parameter has 8");
    }
}
