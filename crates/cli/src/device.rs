//! `--device`: where kernels run.

use std::fmt;
use std::str::FromStr;

/// What runs the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The processor, by code of its own.
    Cpu,
    /// The processor, which executes a GPU's kernels exactly and counts.
    Emulator,
    /// A GPU, by its number.
    Cuda(u32),
}

impl Device {
    /// The library's device; `gpu` is the board that the emulator emulates.
    pub fn open(self, gpu: &str) -> anyhow::Result<flashstrata::Device> {
        match self {
            Device::Cpu => Ok(flashstrata::Device::cpu()),
            Device::Emulator => Ok(flashstrata::Device::emulated(gpu)?),
            Device::Cuda(ordinal) => Ok(flashstrata::Device::cuda(ordinal)?),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Emulator => f.write_str("emulator"),
            Device::Cuda(0) => f.write_str("cuda"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let cuda = |rest: &str| match rest.strip_prefix(':') {
            Some(ordinal) => ordinal.parse().ok(),
            None => rest.is_empty().then_some(0),
        };
        match text {
            "cpu" => Ok(Device::Cpu),
            "emulator" => Ok(Device::Emulator),
            _ => text
                .strip_prefix("cuda")
                .and_then(cuda)
                .map(Device::Cuda)
                .ok_or_else(|| format!("device is `{text}`: it must be cpu, emulator, cuda, or cuda:N for GPU N")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_they_print() {
        for device in [Device::Cpu, Device::Emulator, Device::Cuda(0), Device::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for wrong in ["", "cpu:0", "cuda:", "cuda:x", "cuda0"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }
}
