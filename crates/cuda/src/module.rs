//! Kernels that the driver compiled.

use std::ffi::{CString, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUjit_option, CUmodule, CUresult};
use ptx::Kernel;
use serde::Serialize;

use crate::context::{Context, Handle};
use crate::driver::CudaVersion;
use crate::error::{Error, describe};

/// What the compiler made of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Attributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spills, and arrays that did not fit registers.
    pub local_bytes: u32,
    /// Bytes of shared memory that the kernel declares itself.
    pub static_shared: u32,
    /// Threads that a CTA can have at most.
    pub max_threads: u32,
}

/// What the driver's compiler said; empty when the driver had the machine code in its own cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompilerLog {
    /// All of it.
    pub text: String,
}

impl CompilerLog {
    /// The lines that a user should see: spills, wgmma that lost its asynchrony, and what the compiler calls a warning.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.text.lines().map(str::trim).filter(|line| {
            let spills = line.contains("bytes spill") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
            spills || line.contains("Potential Performance Loss") || line.to_ascii_lowercase().contains("warning")
        })
    }
}

/// A compiled kernel of a context.
#[derive(Clone, Debug)]
pub struct Function {
    pub(crate) context: Context,
    pub(crate) loaded: Arc<Loaded>,
}

impl Function {
    /// What the compiler made of it.
    pub fn attributes(&self) -> Attributes {
        self.loaded.attributes
    }

    /// What the compiler said.
    pub fn log(&self) -> &CompilerLog {
        &self.loaded.log
    }
}

/// A module with one kernel; its context unloads it.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub name: String,
    pub function: Handle<sys::CUfunc_st>,
    module: Handle<sys::CUmod_st>,
    attributes: Attributes,
    log: CompilerLog,
    /// Bytes of dynamic shared memory that a launch may have without asking for more.
    granted_shared: Mutex<u32>,
}

/// Bytes of each of the compiler's two logs.
const LOG_BYTES: usize = 1 << 16;

impl Loaded {
    pub fn new(context: &Context, kernel: &Kernel, text: &str) -> Result<Self, Error> {
        let name = &kernel.name;
        let device = context.device();
        if !kernel.target.runs_on(device.sm) {
            let (target, device, sm) = (kernel.target, device.name.clone(), device.sm);
            return Err(Error::Target { kernel: name.clone(), target, device, sm });
        }
        let terminated = |what: &str, text: &str| {
            let refuse = |_| Error::Launch { kernel: name.clone(), what: format!("its {what} has a null byte") };
            CString::new(text).map_err(refuse)
        };
        let (image, entry) = (terminated("text", text)?, terminated("name", name)?);
        let (mut said, mut complained) = (vec![0u8; LOG_BYTES], vec![0u8; LOG_BYTES]);
        let mut options = [
            CUjit_option::CU_JIT_INFO_LOG_BUFFER,
            CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_LOG_VERBOSE,
            CUjit_option::CU_JIT_GENERATE_LINE_INFO,
        ];
        let number = |n: usize| std::ptr::without_provenance_mut::<c_void>(n);
        let mut values = [
            said.as_mut_ptr().cast::<c_void>(),
            number(LOG_BYTES),
            complained.as_mut_ptr().cast::<c_void>(),
            number(LOG_BYTES),
            number(1),
            number(1),
        ];
        let _current = context.current()?;
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is terminated; the options and their values are as many as stated, numbers stand in the pointers
        // as the call wants them, and both logs live and are as long as stated (CUDA driver API, cuModuleLoadDataEx).
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let text_of = |log: &[u8]| {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
            String::from_utf8_lossy(&log[..end]).trim().to_owned()
        };
        match code {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                return Err(Error::PtxTooNew {
                    kernel: name.clone(),
                    ptx: kernel.version,
                    needed: CudaVersion::of_ptx(kernel.version),
                    driver: context.0.driver,
                });
            }
            CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_INVALID_IMAGE
            | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_INVALID_SOURCE => {
                let log = text_of(&complained);
                return Err(Error::Compile { kernel: name.clone(), code: describe(code), log });
            }
            code => context.check("cuModuleLoadDataEx", code)?,
        }
        let module = Handle(module);
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the module was just loaded; the name is terminated; the driver writes one handle.
        let found = unsafe { sys::cuModuleGetFunction(&mut function, module.0, entry.as_ptr()) };
        let mut loaded = Self {
            name: name.clone(),
            function: Handle(function),
            module,
            attributes: Attributes::default(),
            log: CompilerLog { text: text_of(&said) },
            granted_shared: Mutex::new(0),
        };
        let ready = context.check("cuModuleGetFunction", found).and_then(|()| loaded.read_attributes(context));
        if let Err(error) = ready {
            loaded.unload();
            return Err(error);
        }
        Ok(loaded)
    }

    fn read_attributes(&mut self, context: &Context) -> Result<(), Error> {
        use CUfunction_attribute::*;
        let function = self.function.0;
        let read = |attribute| -> Result<u32, Error> {
            let mut value: c_int = 0;
            // SAFETY: the function belongs to a module that is loaded; the driver writes one int.
            let code = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, function) };
            context.check("cuFuncGetAttribute", code)?;
            Ok(value.try_into().unwrap_or(0))
        };
        self.attributes = Attributes {
            registers: read(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: read(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared: read(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: read(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        self.granted_shared = Mutex::new(read(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?);
        Ok(())
    }

    /// Allows launches with that much dynamic shared memory, and with that many CTAs to a cluster.
    pub fn grant(&self, context: &Context, dynamic_shared: u32, cluster: u32) -> Result<(), Error> {
        /// A cluster of this many CTAs needs no permission (CUDA C++ Programming Guide, thread block clusters).
        const PORTABLE_CLUSTER: u32 = 8;
        let set = |attribute, value: u32| {
            // SAFETY: the function belongs to a module that is loaded.
            let code = unsafe { sys::cuFuncSetAttribute(self.function.0, attribute, value as c_int) };
            context.check("cuFuncSetAttribute", code)
        };
        if cluster > PORTABLE_CLUSTER {
            set(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        let mut granted = self.granted_shared.lock().unwrap_or_else(PoisonError::into_inner);
        if dynamic_shared <= *granted {
            return Ok(());
        }
        let (fixed, most) = (self.attributes.static_shared, context.device().shared_per_block);
        if u64::from(fixed) + u64::from(dynamic_shared) > u64::from(most) {
            let what = format!(
                "shared memory is {fixed} static + {dynamic_shared} dynamic bytes; {} allows a block {most}",
                context.device().name
            );
            return Err(Error::Launch { kernel: self.name.clone(), what });
        }
        set(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_shared)?;
        *granted = dynamic_shared;
        Ok(())
    }

    /// Gives the module back; its context is current.
    pub fn unload(&self) {
        // SAFETY: called once, by the context that holds it or before anyone does; no function of it is used after that.
        let _ = unsafe { sys::cuModuleUnload(self.module.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_the_lines_that_cost() {
        let text = "ptxas info    : Function properties for v1\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                    ptxas info    : Used 40 registers\n    40 bytes stack frame, 64 bytes spill stores, 72 bytes spill loads\n\
                    ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to...\n";
        let log = CompilerLog { text: text.into() };
        let warnings: Vec<&str> = log.warnings().collect();
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].starts_with("40 bytes stack frame") && warnings[1].contains("C7510"));
    }
}
