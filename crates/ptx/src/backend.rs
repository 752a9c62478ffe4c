//! What runs launches.

use arch::Sm;

use crate::Launch;

/// Memory and a processor for [`Launch`]es: the emulator, or a GPU.
///
/// Addresses are those that kernels see. One launch ends before the next begins.
pub trait Backend {
    /// What a launch tells when it has ended.
    type Report;
    /// Why something was refused or failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The architecture that kernels must be written for.
    fn sm(&self) -> Sm;

    /// How many CTAs run at once where each takes a multiprocessor for itself; `None` where that does not matter, and a CTA
    /// need not do the work of several.
    fn multiprocessors(&self) -> Option<u32>;

    /// An allocation of `bytes` bytes with nothing in it, at a multiple of 256.
    ///
    /// # Errors
    /// When there is no room.
    fn alloc(&mut self, bytes: u64) -> Result<u64, Self::Error>;

    /// An allocation that holds `contents`.
    ///
    /// # Errors
    /// When there is no room.
    fn upload(&mut self, contents: &[u8]) -> Result<u64, Self::Error> {
        let address = self.alloc(contents.len() as u64)?;
        self.write(address, contents)?;
        Ok(address)
    }

    /// Gives an allocation back.
    ///
    /// # Errors
    /// When `address` is not the start of one.
    fn free(&mut self, address: u64) -> Result<(), Self::Error>;

    /// Copies `contents` to `address`.
    ///
    /// # Errors
    /// When the bytes are not inside one allocation.
    fn write(&mut self, address: u64, contents: &[u8]) -> Result<(), Self::Error>;

    /// Copies `bytes` bytes out.
    ///
    /// # Errors
    /// When the bytes are not inside one allocation.
    fn read(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, Self::Error>;

    /// Runs a launch to its end.
    ///
    /// # Errors
    /// When the launch does not fit the kernel or the architecture, or the kernel faults.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<Self::Report, Self::Error>;
}
