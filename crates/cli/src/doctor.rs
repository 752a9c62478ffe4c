//! `strata doctor`: what this machine has, and what each absence costs.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use cuda::{Clocks, CudaVersion, DeviceInfo, Driver};
use kernels::Stratum;

use crate::{Failure, output};

/// Prints what was found; an absence is no failure.
pub fn doctor() -> Result<(), Failure> {
    output::print(&Machine::look().text())?;
    Ok(())
}

/// What a machine has, or why it has not.
struct Machine {
    instructions: String,
    threads: usize,
    driver: Result<CudaVersion, String>,
    gpus: Vec<Result<(DeviceInfo, Option<Clocks>), String>>,
    /// Each tool's name, and where and which it is.
    tools: Vec<(&'static Tool, Option<(PathBuf, String)>)>,
    counters: Counters,
}

/// Whether the driver lets this user read a GPU's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counters {
    Allowed,
    AdministratorsOnly,
    Unknown,
}

/// A program that is not part of this one.
struct Tool {
    name: &'static str,
    /// What there is not without it.
    cost: &'static str,
    /// Where it comes from.
    remedy: &'static str,
}

const TOOLS: [Tool; 4] = [
    Tool {
        name: "ptxas",
        cost: "registers are estimated, and nothing is known of the machine code before a GPU runs it",
        remedy: "pip install nvidia-cuda-nvcc",
    },
    Tool {
        name: "ncu",
        cost: "no counters of a chip to hold the emulator's against",
        remedy: "Nsight Compute, of the CUDA toolkit",
    },
    Tool { name: "nsys", cost: "no timeline of a program on a GPU", remedy: "Nsight Systems" },
    Tool {
        name: "compute-sanitizer",
        cost: "no check of memory and races on the chip; the emulator has its own",
        remedy: "compute-sanitizer, of the CUDA toolkit",
    },
];

impl Machine {
    fn look() -> Self {
        let (driver, gpus) = match Driver::load() {
            Err(error) => (Err(error.to_string()), Vec::new()),
            Ok(driver) => {
                let look = |ordinal| {
                    let device = driver.device(ordinal).map_err(|error| error.to_string())?;
                    let clocks = Clocks::read(&device);
                    Ok((device, clocks))
                };
                (Ok(driver.version()), (0..driver.device_count().unwrap_or(0)).map(look).collect())
            }
        };
        let tools = TOOLS.iter().map(|tool| (tool, find(tool.name))).collect();
        Self {
            instructions: cpu::Instructions::best().to_string(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            driver,
            gpus,
            tools,
            counters: Counters::look(),
        }
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |mark: &str, what: &str, found: &str| {
            let _ = writeln!(out, "{mark:<7} {what:<18} {found}");
        };
        line(
            "ok",
            "CPU",
            &format!("{}, {} threads: `run` and the library compute there", self.instructions, self.threads),
        );
        line("ok", "emulator", "every stratum runs on the CPU, for every architecture");
        match &self.driver {
            Ok(version) => line("ok", "driver", &format!("CUDA {version}")),
            Err(why) => {
                line("absent", "driver", why);
                line("", "", "cost: no time is measured; `verify` and `dig` run on the emulator");
            }
        }
        if self.driver.is_ok() && self.gpus.is_empty() {
            line("absent", "GPU", "the driver shows none; CUDA_VISIBLE_DEVICES may hide it");
        }
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            let what = format!("GPU {ordinal}");
            match gpu {
                Err(why) => line("no", &what, why),
                Ok((device, clocks)) => {
                    let gib = device.memory_bytes as f64 / f64::from(1 << 30);
                    let mib = device.l2_bytes >> 20;
                    let (major, minor) = device.capability;
                    let about = format!(
                        "{} ({major}.{minor}, {} SMs, {gib:.0} GiB, L2 {mib} MiB)",
                        device.name, device.sm_count
                    );
                    line("ok", &what, &about);
                    let runs = Stratum::ALL.iter().filter(|stratum| stratum.coverage().min_sm <= device.sm);
                    let runs: Vec<&str> = runs.map(|stratum| stratum.name()).collect();
                    line(
                        "",
                        "",
                        &format!("runs {}", if runs.is_empty() { "no stratum".into() } else { runs.join(", ") }),
                    );
                    match clocks {
                        Some(clocks) => line("", "", &state(clocks)),
                        None => line("", "", "NVML is absent: figures carry no clocks, power and throttle reasons"),
                    }
                }
            }
        }
        for (tool, found) in &self.tools {
            match found {
                Some((path, version)) => line("ok", tool.name, format!("{} {version}", path.display()).trim_end()),
                None => {
                    line("absent", tool.name, &format!("not on PATH ({})", tool.remedy));
                    line("", "", &format!("cost: {}", tool.cost));
                }
            }
        }
        match self.counters {
            Counters::Allowed => line("ok", "counters", "this user may read a GPU's counters"),
            Counters::AdministratorsOnly => {
                line("no", "counters", "the driver lets administrators alone read them (ERR_NVGPUCTRPERM)");
                line("", "", "set the module option NVreg_RestrictProfilingToAdminUsers=0, or run ncu as root");
            }
            Counters::Unknown => {
                line("unknown", "counters", "no /proc/driver/nvidia/params: the driver does not say who may")
            }
        }
        out
    }
}

fn state(clocks: &Clocks) -> String {
    let number = |value: Option<f64>, unit: &str| value.map(|value| format!("{value:.0} {unit}"));
    let parts = [
        number(clocks.sm_mhz.map(f64::from), "MHz"),
        number(clocks.memory_mhz.map(f64::from), "MHz memory"),
        number(clocks.power_watts, "W"),
        number(clocks.temperature.map(f64::from), "°C"),
        (!clocks.throttle.is_empty()).then(|| format!("held by {}", clocks.throttle.join(", "))),
    ];
    format!("now {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// Where a program is on PATH, and the version it states.
fn find(name: &str) -> Option<(PathBuf, String)> {
    let directories = std::env::var_os("PATH")?;
    let path =
        std::env::split_paths(&directories).map(|directory| directory.join(name)).find(|path| is_program(path))?;
    let said = Command::new(&path).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let version =
        said.lines().find_map(|line| Some(line[line.find("release ").or(line.find("ersion "))?..].to_owned()));
    let version = version.map(|text| text.split_once(' ').map_or(String::new(), |(_, number)| number.to_owned()));
    Some((path, version.unwrap_or_default()))
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file())
}

impl Counters {
    /// Asks the driver.
    pub fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        counters(&read("/proc/driver/nvidia/params"), &read("/proc/self/status"))
    }
}

/// From the driver's parameters and the status of this process, as /proc shows them.
fn counters(params: &str, status: &str) -> Counters {
    /// The bit of CAP_SYS_ADMIN (capabilities(7)).
    const SYS_ADMIN: u32 = 21;
    let value = |text: &str, key: &str| {
        text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_owned()))
    };
    let administrator = value(status, "CapEff")
        .and_then(|mask| u64::from_str_radix(&mask, 16).ok())
        .is_some_and(|mask| mask >> SYS_ADMIN & 1 == 1);
    match value(params, "RmProfilingAdminOnly").as_deref() {
        None => Counters::Unknown,
        Some("0") => Counters::Allowed,
        Some(_) if administrator => Counters::Allowed,
        Some(_) => Counters::AdministratorsOnly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_told_what_it_lacks() {
        let machine = Machine {
            instructions: "AVX-512 and AMX".into(),
            threads: 2,
            driver: Err(cuda::Error::NoDriver.to_string()),
            gpus: Vec::new(),
            tools: TOOLS.iter().map(|tool| (tool, None)).collect(),
            counters: Counters::Unknown,
        };
        insta::assert_snapshot!(machine.text());
    }

    #[test]
    fn looking_does_not_fail_anywhere() {
        assert!(Machine::look().text().lines().count() > 5);
    }

    #[test]
    fn counters_are_read_from_what_the_driver_says() {
        let user = "Name:\tstrata\nCapEff:\t0000000000000000\n";
        let root = "Name:\tstrata\nCapEff:\t000001ffffffffff\n";
        assert_eq!(counters("", root), Counters::Unknown);
        assert_eq!(counters("RmProfilingAdminOnly: 0\n", user), Counters::Allowed);
        assert_eq!(counters("ResmanDebugLevel: 4\nRmProfilingAdminOnly: 1\n", user), Counters::AdministratorsOnly);
        assert_eq!(counters("RmProfilingAdminOnly: 1\n", root), Counters::Allowed);
    }
}
