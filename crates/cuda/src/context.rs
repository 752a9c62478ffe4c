//! A GPU's primary context: what memory, modules and streams belong to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUresult};
use ptx::Kernel;

use crate::driver::{CudaVersion, DeviceInfo};
use crate::error::{Class, Error, class, describe};
use crate::module::{Function, Loaded};
use crate::stream::Stream;

/// A driver handle.
///
/// SAFETY of `Send` and `Sync`: the driver's handles may be used from any thread (CUDA driver API, "Context management").
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle<T>(pub *mut T);

// SAFETY: see `Handle`.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: see `Handle`.
unsafe impl<T> Sync for Handle<T> {}

/// The primary context of a GPU, retained; clones are the same one.
///
/// A kernel that faults poisons it: every later call says so. The driver then refuses this process for good, so
/// [`Driver::context`](crate::Driver::context) does too; another process is not concerned.
#[derive(Clone, Debug)]
pub struct Context(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    raw: Handle<sys::CUctx_st>,
    pub driver: CudaVersion,
    pub device: DeviceInfo,
    /// Compiled kernels, by their text. The text holds the target and the version, so equal texts are equal modules.
    modules: Mutex<HashMap<String, Arc<Loaded>>>,
    /// The first fault.
    poisoned: OnceLock<String>,
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// The number of the GPU whose memory it is, also where the driver moves it (managed memory); `None` for host memory.
    pub device: Option<u32>,
}

/// Makes a context current while it lives; then the one before is current again.
pub(crate) struct Current {
    pushed: bool,
}

impl Current {
    fn of(context: CUcontext) -> Result<Self, CUresult> {
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: the driver was started; it writes one handle.
        let code = unsafe { sys::cuCtxGetCurrent(&mut before) };
        if code == CUresult::CUDA_SUCCESS && before == context {
            return Ok(Self { pushed: false });
        }
        // SAFETY: the context is retained by the `Inner` that calls this.
        match unsafe { sys::cuCtxPushCurrent_v2(context) } {
            CUresult::CUDA_SUCCESS => Ok(Self { pushed: true }),
            code => Err(code),
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = std::ptr::null_mut();
            // SAFETY: this thread pushed a context and pops as many as it pushes; the driver writes one handle.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

impl PartialEq for Context {
    /// Whether they are clones of one.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Context {
    pub(crate) fn new(driver: CudaVersion, device: DeviceInfo) -> Result<Self, Error> {
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: the device exists; the driver writes one handle. `Inner` releases it.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device.device) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(match class(code) {
                Class::Lost => Error::Lost { device: device.name, code: describe(code) },
                Class::Fault(_) => Error::Poisoned { by: describe(code) },
                Class::Refused => Error::Driver { call: "cuDevicePrimaryCtxRetain", code: describe(code) },
            });
        }
        let inner = Inner { raw: Handle(raw), driver, device, modules: Mutex::default(), poisoned: OnceLock::new() };
        let context = Self(Arc::new(inner));
        // A context that someone else poisoned tells so here.
        context.memory()?;
        Ok(context)
    }

    /// What the GPU is.
    pub fn device(&self) -> &DeviceInfo {
        &self.0.device
    }

    /// The message of the fault that poisoned it.
    pub fn poisoned(&self) -> Option<&str> {
        self.0.poisoned.get().map(String::as_str)
    }

    /// Bytes of device memory that are free, and all of them.
    ///
    /// # Errors
    /// When the context is poisoned or the device lost.
    pub fn memory(&self) -> Result<(u64, u64), Error> {
        let _current = self.current()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a context is current; the driver writes two sizes.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// What the driver knows of an address that someone else brings.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn pointer(&self, address: u64) -> Result<PointerInfo, Error> {
        use sys::CUpointer_attribute::*;
        let _current = self.current()?;
        let (mut kind, mut managed, mut ordinal) = (0u32, 0u32, -1i32);
        let mut attributes =
            [CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
        let mut values: [*mut std::ffi::c_void; 3] =
            [(&raw mut kind).cast(), (&raw mut managed).cast(), (&raw mut ordinal).cast()];
        // SAFETY: a context is current; the driver writes each value, of the size its attribute has (CUDA driver API,
        // cuPointerGetAttributes; a boolean takes at most 4 bytes), and takes any address: of one it does not know, the values
        // are 0.
        let code = unsafe {
            sys::cuPointerGetAttributes(
                attributes.len() as u32,
                attributes.as_mut_ptr(),
                values.as_mut_ptr(),
                address as sys::CUdeviceptr,
            )
        };
        self.check("cuPointerGetAttributes", code)?;
        let device = kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 || managed & 0xff != 0;
        Ok(PointerInfo { device: device.then(|| u32::try_from(ordinal).unwrap_or(self.device().ordinal)) })
    }

    /// A new stream, which does not wait for the default one.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn stream(&self) -> Result<Stream, Error> {
        Stream::new(self.clone())
    }

    /// The kernel, compiled by the driver; from the cache, if the same text was compiled before.
    ///
    /// # Errors
    /// When the driver does not know that PTX, or refuses it.
    pub fn function(&self, kernel: &Kernel) -> Result<Function, Error> {
        let text = kernel.to_string();
        if let Some(loaded) = self.modules().get(&text) {
            return Ok(Function { context: self.clone(), loaded: loaded.clone() });
        }
        let loaded = Arc::new(Loaded::new(self, kernel, &text)?);
        let kept = self.modules().entry(text).or_insert_with(|| loaded.clone()).clone();
        // Two threads may have compiled it: one of the modules is kept.
        if !Arc::ptr_eq(&kept, &loaded) {
            let _current = self.current()?;
            loaded.unload();
        }
        Ok(Function { context: self.clone(), loaded: kept })
    }

    fn modules(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Loaded>>> {
        self.0.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes it current for a while; refused once it is poisoned.
    pub(crate) fn current(&self) -> Result<Current, Error> {
        if let Some(by) = self.0.poisoned.get() {
            return Err(Error::Poisoned { by: by.clone() });
        }
        Current::of(self.0.raw.0).map_err(|code| Error::Driver { call: "cuCtxPushCurrent", code: describe(code) })
    }

    pub(crate) fn check(&self, call: &'static str, code: CUresult) -> Result<(), Error> {
        self.check_launched(call, code, || "a launch of someone else in this process".into())
    }

    /// The answer of a call as a result; a fault is put down to what `launched` says, and poisons the context.
    pub(crate) fn check_launched(
        &self,
        call: &'static str,
        code: CUresult,
        launched: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let error = match class(code) {
            Class::Fault(fault) => Error::Fault { fault, code: describe(code), launch: launched() },
            Class::Lost => Error::Lost { device: self.0.device.name.clone(), code: describe(code) },
            Class::Refused => return Err(Error::Driver { call, code: describe(code) }),
        };
        let _ = self.0.poisoned.set(error.to_string());
        Err(error)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // In a poisoned context these calls fail, and the release takes everything down.
        if let Ok(_current) = Current::of(self.raw.0) {
            let modules = self.modules.get_mut().unwrap_or_else(PoisonError::into_inner);
            for loaded in modules.values() {
                loaded.unload();
            }
        }
        // SAFETY: it was retained once, by `Context::new`, and nothing of it is left.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.device) };
    }
}
