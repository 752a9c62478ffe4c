//! The emulator as a backend.

use arch::Sm;
use ptx::{Backend, Launch};
use thiserror::Error;

use crate::{Memory, MemoryError, Options, Report, RunError, run};

/// An emulated GPU: its memory, and how launches are run on it.
pub struct Device<'a> {
    /// Global memory.
    pub memory: Memory,
    /// How each launch is run.
    pub options: Options<'a>,
    /// What [`Backend::multiprocessors`] says. Unless set, CTAs that could stay and take tile after tile are launched one for each,
    /// which is what counters and samples are of.
    pub multiprocessors: Option<u32>,
}

impl<'a> Device<'a> {
    /// A device with nothing allocated.
    pub fn new(options: Options<'a>) -> Self {
        Self { memory: Memory::new(), options, multiprocessors: None }
    }
}

/// What went wrong on an emulated device.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum DeviceError {
    /// An allocation or a transfer was refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A launch did not finish.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl Backend for Device<'_> {
    type Report = Report;
    type Error = DeviceError;

    fn sm(&self) -> Sm {
        self.options.sm
    }

    fn multiprocessors(&self) -> Option<u32> {
        self.multiprocessors
    }

    fn alloc(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        Ok(self.memory.alloc(bytes)?)
    }

    fn upload(&mut self, contents: &[u8]) -> Result<u64, DeviceError> {
        Ok(self.memory.alloc_bytes(contents)?)
    }

    fn free(&mut self, address: u64) -> Result<(), DeviceError> {
        Ok(self.memory.free(address)?)
    }

    fn write(&mut self, address: u64, contents: &[u8]) -> Result<(), DeviceError> {
        Ok(self.memory.write(address, contents)?)
    }

    fn read(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, DeviceError> {
        Ok(self.memory.read(address, bytes)?)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<Report, DeviceError> {
        self.memory.load(launch.kernel)?;
        Ok(run(&self.memory, launch, &self.options)?)
    }
}
