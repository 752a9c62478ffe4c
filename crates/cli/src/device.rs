//! `--device`: where kernels run.

use std::fmt;
use std::str::FromStr;

use cuda::{Context, Driver, Stream};

/// What runs the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU, exactly and counted.
    Emulator,
    /// A GPU, by its number.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
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
            "emulator" => Ok(Device::Emulator),
            _ => text
                .strip_prefix("cuda")
                .and_then(cuda)
                .map(Device::Cuda)
                .ok_or_else(|| format!("device is `{text}`: it must be emulator, cuda, or cuda:N for GPU N")),
        }
    }
}

/// A GPU whose context is made anew after a kernel spoiled it.
pub struct Gpu {
    driver: Driver,
    ordinal: u32,
    context: Option<Context>,
}

impl Gpu {
    pub fn open(ordinal: u32) -> Result<Self, cuda::Error> {
        let driver = Driver::load()?;
        Ok(Self { driver, ordinal, context: None })
    }

    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// A context that no kernel has spoiled; streams of a spoiled one must be gone.
    pub fn context(&mut self) -> Result<&Context, cuda::Error> {
        // The spoiled one goes before the new one is asked for: the driver would hand out the same again.
        self.context.take_if(|context| context.poisoned().is_some());
        match &mut self.context {
            Some(context) => Ok(context),
            none => Ok(none.insert(self.driver.context(self.ordinal)?)),
        }
    }

    /// A stream of it.
    pub fn stream(&mut self) -> Result<Stream, cuda::Error> {
        self.context()?.stream()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_they_print() {
        for device in [Device::Emulator, Device::Cuda(0), Device::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for wrong in ["", "cpu", "cuda:", "cuda:x", "cuda0"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }
}
