//! What a plan is made for.

use arch::{Gpu, PipeRates, Sm};
use serde::Serialize;

/// A GPU as far as plans and tuning depend on it: a value, which needs no GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Hardware {
    /// Its name, as the driver or the table of boards has it.
    pub name: String,
    /// Its architecture.
    #[serde(serialize_with = "as_text")]
    pub sm: Sm,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The driver's version; `None` where there is no driver.
    pub driver: Option<String>,
}

pub(crate) fn as_text<S: serde::Serializer>(value: &impl ToString, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

impl Hardware {
    /// The GPU of a context.
    pub fn of(driver: &cuda::Driver, device: &cuda::DeviceInfo) -> Hardware {
        Hardware {
            name: device.name.clone(),
            sm: device.sm,
            multiprocessors: device.sm_count,
            driver: Some(driver.release()),
        }
    }

    /// The row of the table of boards, if there is one of that name.
    pub fn board(&self) -> Option<&'static Gpu> {
        Gpu::find(&self.name).ok()
    }

    /// What a multiprocessor does per clock: the board's, else the architecture's.
    pub(crate) fn pipe_rates(&self) -> PipeRates {
        self.board().map_or_else(|| self.sm.pipe_rates(), Gpu::pipe_rates)
    }
}

impl From<&Gpu> for Hardware {
    fn from(gpu: &Gpu) -> Self {
        Hardware { name: gpu.name.into(), sm: gpu.sm, multiprocessors: gpu.sm_count, driver: None }
    }
}

impl std::fmt::Display for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {} multiprocessors)", self.name, self.sm, self.multiprocessors)
    }
}
