//! What can go wrong on a GPU, and what to do about it.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};
use thiserror::Error;

use crate::driver::CudaVersion;

/// Why a call was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// libcuda is not there.
    #[error(
        "no NVIDIA driver: libcuda was not found on the library path; install the driver (520 or later), or use the emulator"
    )]
    NoDriver,
    /// The driver does not start.
    #[error("the NVIDIA driver is there but does not start: {reason}")]
    Start {
        /// What it says.
        reason: String,
    },
    /// A driver without calls that are needed.
    #[error("the driver supports CUDA {found}: {needed} or later is needed (driver 520 or later)")]
    DriverTooOld {
        /// What it supports.
        found: CudaVersion,
        /// What is needed.
        needed: CudaVersion,
    },
    /// No such GPU.
    #[error("GPU {ordinal} is asked for: the driver shows {count}")]
    Ordinal {
        /// Which was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A GPU older than every architecture that kernels are written for.
    #[error("{name} has compute capability {major}.{minor}: 7.0 or later is needed")]
    Architecture {
        /// The GPU.
        name: String,
        /// Before the point.
        major: u32,
        /// After the point.
        minor: u32,
    },
    /// PTX of a version that the driver's compiler does not know.
    #[error("kernel `{kernel}` is written in PTX {ptx}, which needs a driver for CUDA {}: this one is for CUDA {driver}; update it", needed.as_ref().map_or("later than any known".to_string(), ToString::to_string))]
    PtxTooNew {
        /// Whose.
        kernel: String,
        /// The version.
        ptx: ptx::Version,
        /// The first CUDA version with it.
        needed: Option<CudaVersion>,
        /// What the driver supports.
        driver: CudaVersion,
    },
    /// PTX for another architecture than the GPU's.
    #[error("kernel `{kernel}` is written for {target}: {device} is {sm}, which does not run it; write it for {}", arch::Target::best(*sm))]
    Target {
        /// Whose.
        kernel: String,
        /// What it is for.
        target: arch::Target,
        /// The GPU.
        device: String,
        /// Its architecture.
        sm: arch::Sm,
    },
    /// PTX that the driver's compiler refuses.
    #[error("kernel `{kernel}` does not compile ({code}):\n{log}")]
    Compile {
        /// Which.
        kernel: String,
        /// The driver's code.
        code: String,
        /// The compiler's words.
        log: String,
    },
    /// A launch that does not fit its kernel or the GPU.
    #[error("launch of `{kernel}`: {what}")]
    Launch {
        /// Which kernel.
        kernel: String,
        /// What does not fit.
        what: String,
    },
    /// Not enough device memory.
    #[error("out of device memory: {asked} bytes asked for, {free} of {total} free")]
    OutOfMemory {
        /// Bytes.
        asked: u64,
        /// Bytes.
        free: u64,
        /// Bytes.
        total: u64,
    },
    /// A transfer outside what was allocated.
    #[error("{bytes} bytes at {address:#x} are not inside one allocation of this stream")]
    OutOfBounds {
        /// Where it starts.
        address: u64,
        /// How long it is.
        bytes: u64,
    },
    /// A kernel did something wrong; this process can use no GPU any more.
    ///
    /// The driver says so of these codes ("the process must be terminated and relaunched"), and on an H200 with driver 580
    /// neither releasing nor resetting the primary context nor a context of one's own helped.
    #[error("{fault} ({code}) in {launch}; the driver refuses all further work of this process: start a new one")]
    Fault {
        /// What it did.
        fault: &'static str,
        /// The driver's code.
        code: String,
        /// The kernel and its launch.
        launch: String,
    },
    /// A call on a context in which a kernel faulted before.
    #[error("an earlier fault left the driver unusable in this process: {by}")]
    Poisoned {
        /// The message of that fault.
        by: String,
    },
    /// The device is gone.
    #[error(
        "{device} is lost ({code}): the driver refuses this process; the kernel log has the Xid. Start a new one, on another GPU (cuda:N) or after `nvidia-smi --gpu-reset`"
    )]
    Lost {
        /// Its name.
        device: String,
        /// The driver's code.
        code: String,
    },
    /// Any other answer of the driver.
    #[error("{call}: {code}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's code and its words.
        code: String,
    },
}

/// What a code says of the context it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// The call did not happen; the context is as it was.
    Refused,
    /// A kernel faulted.
    Fault(&'static str),
    /// The device is gone.
    Lost,
}

pub(crate) fn class(code: CUresult) -> Class {
    use CUresult::*;
    match code {
        CUDA_ERROR_ILLEGAL_ADDRESS => Class::Fault("illegal memory access"),
        CUDA_ERROR_MISALIGNED_ADDRESS => Class::Fault("misaligned memory access"),
        CUDA_ERROR_INVALID_ADDRESS_SPACE => Class::Fault("access in the wrong state space"),
        CUDA_ERROR_INVALID_PC => Class::Fault("jump to a wrong address"),
        CUDA_ERROR_ILLEGAL_INSTRUCTION => Class::Fault("illegal instruction"),
        CUDA_ERROR_HARDWARE_STACK_ERROR => Class::Fault("stack error"),
        CUDA_ERROR_LAUNCH_FAILED => Class::Fault("launch failure"),
        CUDA_ERROR_LAUNCH_TIMEOUT => Class::Fault("time-out"),
        CUDA_ERROR_ASSERT => Class::Fault("trap"),
        CUDA_ERROR_CONTAINED => Class::Fault("contained memory error"),
        CUDA_ERROR_TENSOR_MEMORY_LEAK => Class::Fault("tensor memory left allocated"),
        CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUDA_ERROR_DEINITIALIZED
        | CUDA_ERROR_UNKNOWN => Class::Lost,
        _ => Class::Refused,
    }
}

/// The driver's name of a code, and its words.
pub(crate) fn describe(code: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: both calls take any code and write a pointer to a static, terminated string, or null (CUDA driver API,
        // error handling); the pointer is valid for the write.
        unsafe {
            let known = get(code, &mut text) == CUresult::CUDA_SUCCESS && !text.is_null();
            known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("error {}", code as u32));
    text(sys::cuGetErrorString).map_or(name.clone(), |words| format!("{name}: {words}"))
}

/// An error of a call that concerns no context.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), Error> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Error::Driver { call, code: describe(code) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_was_found_and_what_would_do() {
        let too_new = Error::PtxTooNew {
            kernel: "v2".into(),
            ptx: ptx::Version { major: 8, minor: 6 },
            needed: CudaVersion::of_ptx(ptx::Version { major: 8, minor: 6 }),
            driver: CudaVersion(12040),
        };
        assert_eq!(
            too_new.to_string(),
            "kernel `v2` is written in PTX 8.6, which needs a driver for CUDA 12.7: this one is for CUDA 12.4; update it"
        );
        let fault = Error::Fault {
            fault: "illegal memory access",
            code: "CUDA_ERROR_ILLEGAL_ADDRESS".into(),
            launch: "`v2` (grid [8, 1, 1], block [128, 1, 1])".into(),
        };
        assert!(fault.to_string().starts_with("illegal memory access (CUDA_ERROR_ILLEGAL_ADDRESS) in `v2` (grid"));
        assert!(fault.to_string().ends_with("start a new one"));
        let target = Error::Target {
            kernel: "v2".into(),
            target: arch::Sm::Sm100.into(),
            device: "H200".into(),
            sm: arch::Sm::Sm90,
        };
        assert_eq!(
            target.to_string(),
            "kernel `v2` is written for sm_100: H200 is sm_90, which does not run it; write it for sm_90a"
        );
        let lost = Error::Lost { device: "H200".into(), code: "CUDA_ERROR_ECC_UNCORRECTABLE".into() };
        assert!(lost.to_string().starts_with("H200 is lost (CUDA_ERROR_ECC_UNCORRECTABLE): "));
        assert!(lost.to_string().contains("another GPU"));
        let memory = Error::OutOfMemory { asked: 9, free: 4, total: 8 };
        assert_eq!(memory.to_string(), "out of device memory: 9 bytes asked for, 4 of 8 free");
        assert!(Error::NoDriver.to_string().contains("libcuda was not found"));
    }

    #[test]
    fn faults_and_losses_are_told_from_refusals() {
        assert_eq!(class(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), Class::Fault("illegal memory access"));
        assert_eq!(class(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE), Class::Lost);
        assert_eq!(class(CUresult::CUDA_ERROR_OUT_OF_MEMORY), Class::Refused);
    }
}
