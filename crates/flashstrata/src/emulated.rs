//! What a stream of an emulated GPU runs on: the emulator, where the feature of that name has it built.

use arch::Gpu;
use ptx::Backend;

use crate::error::Error;

/// Whatever runs kernels and is no GPU.
pub(crate) type Emulator = Box<dyn Backend<Report = (), Error = Error> + Send>;

/// A board with nothing in its memory.
#[cfg(not(feature = "emulator"))]
pub(crate) fn emulator(gpu: &Gpu) -> Result<Emulator, Error> {
    Err(Error::NoEmulator { gpu: gpu.name })
}

/// A board with nothing in its memory.
#[cfg(feature = "emulator")]
pub(crate) fn emulator(gpu: &Gpu) -> Result<Emulator, Error> {
    let device = emulator::Device::new(emulator::Options::new(gpu.sm));
    Ok(Box::new(Uncounted(emulator::Device { multiprocessors: Some(gpu.sm_count), ..device })))
}

/// An emulated GPU of which nobody asks what it counted.
#[cfg(feature = "emulator")]
struct Uncounted(emulator::Device<'static>);

#[cfg(feature = "emulator")]
impl Backend for Uncounted {
    type Report = ();
    type Error = Error;

    fn sm(&self) -> arch::Sm {
        self.0.sm()
    }

    fn multiprocessors(&self) -> Option<u32> {
        self.0.multiprocessors()
    }

    fn alloc(&mut self, bytes: u64) -> Result<u64, Error> {
        Ok(self.0.alloc(bytes)?)
    }

    fn free(&mut self, address: u64) -> Result<(), Error> {
        Ok(self.0.free(address)?)
    }

    fn write(&mut self, address: u64, contents: &[u8]) -> Result<(), Error> {
        Ok(self.0.write(address, contents)?)
    }

    fn read(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, Error> {
        Ok(self.0.read(address, bytes)?)
    }

    fn launch(&mut self, launch: &ptx::Launch<'_>) -> Result<(), Error> {
        self.0.launch(launch)?;
        Ok(())
    }
}
