//! Clocks, power and throttling, as NVML reads them.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use serde::Serialize;

use crate::driver::DeviceInfo;

/// The state of a GPU at one moment; what NVML does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm_mhz: Option<u32>,
    /// Of the memory.
    pub memory_mhz: Option<u32>,
    /// Draw of the board.
    pub power_watts: Option<f64>,
    /// Of the chip, in degrees Celsius.
    pub temperature: Option<u32>,
    /// Why the clocks are lower than they could be, as NVML names it; empty when nothing holds them.
    pub throttle: Vec<String>,
}

impl Clocks {
    /// Reads them; `None` where NVML is absent.
    pub fn read(device: &DeviceInfo) -> Option<Self> {
        let nvml = Nvml::init().ok()?;
        let device = nvml.device_by_pci_bus_id(device.pci_bus_id.as_str()).ok()?;
        let reasons = device.current_throttle_reasons().ok();
        Some(Self {
            sm_mhz: device.clock_info(Clock::SM).ok(),
            memory_mhz: device.clock_info(Clock::Memory).ok(),
            power_watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1e3),
            temperature: device.temperature(TemperatureSensor::Gpu).ok(),
            throttle: reasons.map_or_else(Vec::new, |set| set.iter_names().map(|(name, _)| name.to_owned()).collect()),
        })
    }
}
