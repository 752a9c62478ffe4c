//! A GPU, or the emulator in its place.

use std::ffi::c_void;
use std::sync::Arc;

use arch::{Gpu, UnknownGpu};
use kernels::{Layout, Problem};

use crate::attention::Attention;
use crate::error::Error;
use crate::hardware::Hardware;
use crate::planner::{Plan, PlanFailure, Planner};
use crate::stream::{Backing, Stream};

/// What computes: a value, as many as one likes, each with its own streams. Clones are the same one.
///
/// ```
/// use flashstrata::Device;
///
/// let device = Device::any();                          // the first GPU; without one, the emulator, which says so
/// if let Some(emulation) = device.emulation() {
///     println!("slow: {} is emulated ({})", emulation.gpu.name, emulation.why());
/// }
/// # Ok::<(), flashstrata::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) kind: Kind,
    hardware: Arc<Hardware>,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Cuda(cuda::Context),
    Emulated(Emulation),
}

/// That a device is none: kernels run on the CPU, exactly, and some ten thousand times slower than on a GPU.
#[derive(Clone, Debug)]
pub struct Emulation {
    /// The board that is emulated.
    pub gpu: &'static Gpu,
    /// Why no GPU was taken; `None` where the emulator was asked for.
    pub instead_of: Option<cuda::Error>,
}

impl Emulation {
    /// A sentence.
    pub fn why(&self) -> String {
        self.instead_of.as_ref().map_or_else(|| "as asked".into(), ToString::to_string)
    }
}

/// The board that is emulated where none is named: the kernels that run on it run everywhere.
const DEFAULT_EMULATED: &str = "RTX 2070";

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
        Ok(Device { kind: Kind::Cuda(context), hardware })
    }

    /// Every GPU that the driver shows; none where there is no driver.
    pub fn all() -> Vec<Device> {
        let count = cuda::Driver::load().and_then(|driver| driver.device_count()).unwrap_or(0);
        (0..count).filter_map(|ordinal| Device::cuda(ordinal).ok()).collect()
    }

    /// A board of the table, emulated on the CPU: see [`Emulation`].
    ///
    /// # Errors
    /// When the table has no board of that name; the error lists those it has.
    pub fn emulated(name: &str) -> Result<Device, UnknownGpu> {
        Gpu::find(name).map(|gpu| Device::of_board(gpu, None))
    }

    fn of_board(gpu: &'static Gpu, instead_of: Option<cuda::Error>) -> Device {
        Device { kind: Kind::Emulated(Emulation { gpu, instead_of }), hardware: Arc::new(gpu.into()) }
    }

    /// The first GPU; where none can be used, the emulator. [`Device::emulation`] tells which it is, and why.
    pub fn any() -> Device {
        let emulated = |why| {
            let board = Gpu::find(DEFAULT_EMULATED).unwrap_or(&arch::GPUS[0]);
            Device::of_board(board, Some(why))
        };
        Device::open(0).unwrap_or_else(emulated)
    }

    /// That it is the emulator, if it is.
    pub fn emulation(&self) -> Option<&Emulation> {
        match &self.kind {
            Kind::Cuda(_) => None,
            Kind::Emulated(emulation) => Some(emulation),
        }
    }

    /// The driver's context, if it is a GPU.
    pub fn context(&self) -> Option<&cuda::Context> {
        match &self.kind {
            Kind::Cuda(context) => Some(context),
            Kind::Emulated(_) => None,
        }
    }

    /// What plans are made for.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// What picks generations and tiles for it.
    pub fn planner(&self) -> Planner {
        Planner::new((*self.hardware).clone())
    }

    /// A plan for contiguous tensors, on defaults; [`Device::planner`] has the wishes.
    ///
    /// # Errors
    /// When no generation computes the problem on this device.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, PlanFailure> {
        self.planner().plan(problem, &Layout::contiguous(problem))
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
    /// When the driver fails.
    pub fn stream(&self) -> Result<Stream, Error> {
        let backing = match &self.kind {
            Kind::Cuda(context) => Backing::Cuda(context.stream()?),
            Kind::Emulated(Emulation { gpu, .. }) => {
                let device = emulator::Device::new(emulator::Options::new(gpu.sm));
                Backing::Emulator(emulator::Device { multiprocessors: Some(gpu.sm_count), ..device })
            }
        };
        Ok(Stream::new(self.clone(), backing))
    }

    /// The caller's stream: work goes behind what is in it, and nothing waits. Null is the default stream.
    ///
    /// # Errors
    /// When the device is the emulator, which has no such streams.
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
            Kind::Emulated(_) => Err(Error::Emulated { what: "a CUstream to borrow" }),
        }
    }

    /// Whether work of the one can go to the other.
    pub(crate) fn is(&self, other: &Device) -> bool {
        match (&self.kind, &other.kind) {
            (Kind::Cuda(one), Kind::Cuda(other)) => one == other,
            (Kind::Emulated(one), Kind::Emulated(other)) => one.gpu == other.gpu,
            _ => false,
        }
    }
}
