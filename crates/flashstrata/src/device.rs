//! A GPU, the processor at hand, or an emulated GPU.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use arch::{Gpu, UnknownGpu};
use kernels::{Inputs, Layout, Outputs, Problem};

use crate::attention::Attention;
use crate::emulated;
use crate::error::Error;
use crate::hardware::Hardware;
use crate::planner::{Plan, Planner};
use crate::stream::{Backing, Heap, Stream};

/// What computes: a value, as many as one likes, each with its own streams. Clones are the same one.
///
/// ```
/// use flashstrata::Device;
///
/// let device = Device::any();                          // the first GPU; without one, the processor
/// println!("{device}");
/// let emulated = Device::emulated("H100")?;            // to plan for; to run, exactly and very slowly, with the feature `emulator`
/// assert!(emulated.hardware().is_some_and(|gpu| gpu.multiprocessors == 132));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) kind: Kind,
    /// Of a GPU, or of an emulated one.
    hardware: Option<Arc<Hardware>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Cuda(cuda::Context),
    Cpu,
    Emulated(&'static Gpu),
}

impl Device {
    /// A GPU, by its number for the driver.
    ///
    /// # Errors
    /// When there is no driver, no such GPU, or one that is too old.
    pub fn cuda(ordinal: u32) -> Result<Device, Error> {
        Ok(Device::open(ordinal)?)
    }

    fn open(ordinal: u32) -> Result<Device, cuda::Error> {
        let driver = cuda::Driver::load()?;
        let context = driver.context(ordinal)?;
        let hardware = Arc::new(Hardware::of(&driver, context.device()));
        Ok(Device { kind: Kind::Cuda(context), hardware: Some(hardware) })
    }

    /// Every GPU that the driver shows; none where there is no driver.
    pub fn all() -> Vec<Device> {
        let count = cuda::Driver::load().and_then(|driver| driver.device_count()).unwrap_or(0);
        (0..count).filter_map(|ordinal| Device::cuda(ordinal).ok()).collect()
    }

    /// The processor at hand, and the threads of the current rayon pool.
    pub fn cpu() -> Device {
        Device { kind: Kind::Cpu, hardware: None }
    }

    /// A board of the table, emulated on the processor: kernels run exactly, and some ten thousand times slower than on a GPU.
    ///
    /// Planning for it is always possible; its streams need the feature `emulator` of this crate.
    ///
    /// # Errors
    /// When the table has no board of that name; the error lists those it has.
    pub fn emulated(name: &str) -> Result<Device, UnknownGpu> {
        Gpu::find(name).map(|gpu| Device { kind: Kind::Emulated(gpu), hardware: Some(Arc::new(gpu.into())) })
    }

    /// The first GPU; where none can be used ([`Device::cuda`] says why), the processor.
    pub fn any() -> Device {
        Device::cuda(0).unwrap_or_else(|_| Device::cpu())
    }

    /// The board that is emulated, if one is.
    pub fn emulated_gpu(&self) -> Option<&'static Gpu> {
        match self.kind {
            Kind::Cuda(_) | Kind::Cpu => None,
            Kind::Emulated(gpu) => Some(gpu),
        }
    }

    /// Whether it is the processor.
    pub fn is_cpu(&self) -> bool {
        matches!(self.kind, Kind::Cpu)
    }

    /// The driver's context, if it is a GPU.
    pub fn context(&self) -> Option<&cuda::Context> {
        match &self.kind {
            Kind::Cuda(context) => Some(context),
            Kind::Cpu | Kind::Emulated(_) => None,
        }
    }

    /// What plans are made for; the processor needs none.
    pub fn hardware(&self) -> Option<&Hardware> {
        self.hardware.as_deref()
    }

    /// What picks generations and tiles for it.
    ///
    /// # Errors
    /// When the device is the processor, which has neither.
    pub fn planner(&self) -> Result<Planner, Error> {
        let hardware = self.hardware().ok_or(Error::Cpu { what: "generations and tiles to plan" })?;
        Ok(Planner::new(hardware.clone()))
    }

    /// A plan for contiguous tensors, on defaults; [`Device::planner`] has the wishes.
    ///
    /// # Errors
    /// When no generation computes the problem on this device, or it is the processor.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, Error> {
        Ok(self.planner()?.plan(problem, &Layout::contiguous(problem))?)
    }

    /// What computes a problem on tensors that lie as `layout` says: on a GPU the plan by default, compiled.
    ///
    /// # Errors
    /// When the layout cannot be, no generation computes the problem, or the driver refuses a kernel.
    pub fn prepare(&self, problem: &Problem, layout: &Layout) -> Result<Attention, Error> {
        match self.kind {
            Kind::Cpu => Attention::on_cpu(self.clone(), problem, layout),
            _ => self.load(self.planner()?.plan(problem, layout)?),
        }
    }

    /// Attention from host tensors of any strides to host tensors: copies where it must, computes, waits.
    ///
    /// # Errors
    /// When the inputs are not the problem's, nothing computes it, there is no room, or a kernel fails.
    pub fn compute(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, Error> {
        match self.kind {
            Kind::Cpu => Ok(cpu::compute(problem, inputs, cpu::Options::default())?),
            _ => {
                let plan = self.planner()?.plan(problem, &Layout::of(problem, inputs)?)?;
                self.stream()?.run(&plan, inputs)
            }
        }
    }

    /// Compiles a plan's kernels, or finds them compiled.
    ///
    /// # Errors
    /// When the plan is for another architecture, or the driver refuses a kernel.
    pub fn load(&self, plan: Plan) -> Result<Attention, Error> {
        Attention::new(self.clone(), plan)
    }

    /// A new stream, with its own memory.
    ///
    /// # Errors
    /// When the driver fails, or for an emulated GPU the emulator was not built.
    pub fn stream(&self) -> Result<Stream, Error> {
        let backing = match &self.kind {
            Kind::Cuda(context) => Backing::Cuda(context.stream()?),
            Kind::Cpu => Backing::Cpu(Heap::default()),
            Kind::Emulated(gpu) => Backing::Emulator(emulated::emulator(gpu)?),
        };
        Ok(Stream::new(self.clone(), backing))
    }

    /// The caller's stream: work goes behind what is in it, and nothing waits. Null is the default stream.
    ///
    /// # Errors
    /// When the device is no GPU, and has no such streams.
    ///
    /// # Safety
    /// `raw` is a `CUstream` of this GPU's primary context (PyTorch's are), and outlives the result and its buffers.
    pub unsafe fn borrow_stream(&self, raw: *mut c_void) -> Result<Stream, Error> {
        match &self.kind {
            Kind::Cuda(context) => {
                // SAFETY: the caller vouches for the stream.
                let stream = unsafe { cuda::Stream::borrow(context, raw) };
                Ok(Stream::new(self.clone(), Backing::Cuda(stream)))
            }
            Kind::Cpu | Kind::Emulated(_) => Err(Error::NoGpu { what: "a CUstream to borrow" }),
        }
    }

    /// Whether work of the one can go to the other.
    pub(crate) fn is(&self, other: &Device) -> bool {
        match (&self.kind, &other.kind) {
            (Kind::Cuda(one), Kind::Cuda(other)) => one == other,
            (Kind::Cpu, Kind::Cpu) => true,
            (Kind::Emulated(one), Kind::Emulated(other)) => one == other,
            _ => false,
        }
    }
}

impl fmt::Display for Device {
    /// What it is: a GPU with its architecture, or the processor with its instructions and threads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Cpu => write!(f, "CPU ({}, {} threads)", cpu::Instructions::best(), rayon::current_num_threads()),
            Kind::Emulated(gpu) => write!(f, "{} (emulated)", Hardware::from(*gpu)),
            Kind::Cuda(_) => self.hardware.iter().try_for_each(|hardware| hardware.fmt(f)),
        }
    }
}
