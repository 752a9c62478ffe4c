//! The driver and the GPUs it shows.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use arch::Sm;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};

use crate::context::Context;
use crate::error::{Error, check, describe};

/// A version of CUDA: 1000 times the major version plus 10 times the minor one, as the driver states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion(pub u32);

impl CudaVersion {
    /// The first with that version of PTX; `None` for one later than this program knows.
    ///
    /// Source: PTX ISA 9.1, release notes, "PTX release history".
    pub fn of_ptx(ptx: ptx::Version) -> Option<Self> {
        let number = match (u32::from(ptx.major), u32::from(ptx.minor)) {
            (0..=5, _) => 9020,
            (6, 0) => 9000,
            (6, 1) => 9010,
            (6, 2) => 9020,
            (6, minor @ 3..=5) => 10_000 + 10 * (minor - 3),
            (7, minor @ 0..=8) => 11_000 + 10 * minor,
            (8, minor @ 0..=5) => 12_000 + 10 * minor,
            (8, minor @ 6..=8) => 12_010 + 10 * minor,
            (9, minor @ 0..=1) => 13_000 + 10 * minor,
            _ => return None,
        };
        Some(Self(number))
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// The first version with every call that is made: `cuLaunchKernelEx`.
const NEEDED: CudaVersion = CudaVersion(11_080);

/// A driver that was started.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    version: CudaVersion,
}

impl Driver {
    /// Opens and starts the driver.
    ///
    /// # Errors
    /// When there is none, it is too old, or it does not start (no GPU, for one).
    pub fn load() -> Result<Self, Error> {
        // SAFETY: opening the library runs its initialisers, which are the driver's own.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        let mut version: c_int = 0;
        // SAFETY: the library is there, so the call does not panic; it may come before `cuInit` and writes one int.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        let version = CudaVersion(version.try_into().unwrap_or(0));
        if version < NEEDED {
            return Err(Error::DriverTooOld { found: version, needed: NEEDED });
        }
        // SAFETY: no argument points anywhere; the flags must be 0.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_SUCCESS => Ok(Self { version }),
            code => Err(Error::Start { reason: describe(code) }),
        }
    }

    /// The newest CUDA it supports.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// The driver's own version, such as "580.65.06", as NVML tells it; that of CUDA where NVML is absent.
    pub fn release(&self) -> String {
        let told = nvml_wrapper::Nvml::init().and_then(|nvml| nvml.sys_driver_version());
        told.unwrap_or_else(|_| format!("CUDA {}", self.version))
    }

    /// The number of GPUs.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn device_count(&self) -> Result<u32, Error> {
        let mut count: c_int = 0;
        // SAFETY: the driver was started; it writes one int.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(count.try_into().unwrap_or(0))
    }

    /// What a GPU is.
    ///
    /// # Errors
    /// When there is no such GPU, or it is older than every known architecture.
    pub fn device(&self, ordinal: u32) -> Result<DeviceInfo, Error> {
        let count = self.device_count()?;
        if ordinal >= count {
            return Err(Error::Ordinal { ordinal, count });
        }
        DeviceInfo::read(ordinal)
    }

    /// The GPU's primary context, which other users of the driver in this process share.
    ///
    /// # Errors
    /// When there is no such GPU, or its primary context is poisoned.
    pub fn context(&self, ordinal: u32) -> Result<Context, Error> {
        Context::new(self.version, self.device(ordinal)?)
    }
}

/// What the driver tells of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number for the driver.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Where it sits, as NVML names it too.
    pub pci_bus_id: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// The newest known architecture whose PTX it runs.
    pub sm: Sm,
    /// Multiprocessors.
    pub sm_count: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of L2 cache.
    pub l2_bytes: u64,
    /// Bytes of shared memory that a CTA may have.
    pub shared_per_block: u32,
    /// Whether allocations can be ordered by a stream.
    pub(crate) memory_pools: bool,
    pub(crate) device: CUdevice,
}

impl DeviceInfo {
    fn read(ordinal: u32) -> Result<Self, Error> {
        use CUdevice_attribute::*;
        let mut device: CUdevice = 0;
        // SAFETY: the driver was started; it writes one handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
        let attribute = |attribute: CUdevice_attribute| -> Result<u32, Error> {
            let mut value: c_int = 0;
            // SAFETY: the device exists; the driver writes one int.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
            Ok(value.try_into().unwrap_or(0))
        };
        let text = |call, get: unsafe fn(*mut c_char, c_int, CUdevice) -> CUresult| -> Result<String, Error> {
            let mut buffer = [0u8; 256];
            // SAFETY: the driver writes at most the given number of bytes, terminated; one less is offered, so that the
            // last byte stays 0.
            check(call, unsafe { get(buffer.as_mut_ptr().cast(), 255, device) })?;
            let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
            Ok(text.to_string_lossy().into_owned())
        };
        let mut memory_bytes: usize = 0;
        // SAFETY: the device exists; the driver writes one size.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
        let name = text("cuDeviceGetName", sys::cuDeviceGetName)?;
        let (major, minor) = (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let Some(sm) = nearest(major, minor) else { return Err(Error::Architecture { name, major, minor }) };
        Ok(Self {
            ordinal,
            pci_bus_id: text("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId)?,
            name,
            capability: (major, minor),
            sm,
            sm_count: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory_bytes as u64,
            l2_bytes: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            shared_per_block: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory_pools: attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
            device,
        })
    }
}

/// The newest known architecture that is not later: PTX for it compiles for a later one.
fn nearest(major: u32, minor: u32) -> Option<Sm> {
    let number = 10 * major + minor;
    Sm::ALL.into_iter().rev().find(|sm| u32::from(sm.number()) <= number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_of_ptx_has_its_cuda() {
        let of = |major, minor| CudaVersion::of_ptx(ptx::Version { major, minor }).map(|v| v.to_string());
        assert_eq!(of(6, 3).as_deref(), Some("10.0"));
        assert_eq!(of(7, 8).as_deref(), Some("11.8"));
        assert_eq!(of(8, 5).as_deref(), Some("12.5"));
        assert_eq!(of(8, 7).as_deref(), Some("12.8"));
        assert_eq!(of(8, 8).as_deref(), Some("12.9"));
        assert_eq!(of(9, 0).as_deref(), Some("13.0"));
        assert_eq!(of(12, 0), None);
    }

    #[test]
    fn an_unknown_gpu_runs_what_the_one_before_it_runs() {
        assert_eq!(nearest(9, 0), Some(Sm::Sm90));
        assert_eq!(nearest(8, 8), Some(Sm::Sm87));
        assert_eq!(nearest(15, 3), Some(Sm::Sm121));
        assert_eq!(nearest(6, 1), None);
    }

    #[test]
    fn without_a_driver_there_is_a_sentence() {
        // On a machine with a GPU the driver starts; on others it must not panic.
        if let Err(error) = Driver::load() {
            assert!(!error.to_string().is_empty());
        }
    }
}
