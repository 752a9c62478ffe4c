//! What was counted of one stratum on one problem and GPU, or of one kernel from elsewhere: all that findings and comparisons may speak from.

use std::collections::BTreeMap;

use arch::{BlockResources, Gpu, Occupancy, OccupancyError};
use emulator::{Access, Counters, DramBytes, InstructionCounters, Level, Model, Pipe, Report, Traffic};
use kernels::Problem;
use ptx::{Instruction, Kernel};
use serde::{Deserialize, Serialize};

use crate::ptxas::Tool;
use crate::registers::{RegisterSource, Registers};

/// One launch of a stratum: the kernel, what it counted, and what follows from that on the GPU.
#[derive(Clone, Debug)]
pub struct LaunchEvidence {
    /// What ran.
    pub kernel: Kernel,
    /// What it counted. `ctas_total` is that of the whole problem, so that scaled counters are the whole launch's.
    pub report: Report,
    /// Threads of a CTA.
    pub threads: u32,
    /// Static and dynamic shared bytes of a CTA.
    pub shared_bytes: u32,
    /// Registers of a thread.
    pub registers: Registers,
    /// CTAs on a multiprocessor.
    pub occupancy: Occupancy,
    /// Pipe times and DRAM bytes of the whole launch.
    pub model: Model,
}

impl LaunchEvidence {
    /// What follows from a launch's counters on a GPU.
    ///
    /// # Errors
    /// When a CTA of it does not fit on a multiprocessor.
    pub fn of(
        kernel: Kernel,
        report: Report,
        threads: u32,
        dynamic_shared: u32,
        registers: Registers,
        gpu: &Gpu,
    ) -> Result<Self, OccupancyError> {
        let static_shared = u32::try_from(kernel.static_shared_bytes()).unwrap_or(u32::MAX);
        let block =
            BlockResources { threads, registers: registers.count, static_shared, dynamic_shared, carveout_kib: None };
        let occupancy = arch::occupancy(gpu.sm, &block)?;
        let model = emulator::model(&kernel, &report, gpu, &occupancy);
        let shared_bytes = static_shared.saturating_add(dynamic_shared);
        Ok(Self { kernel, report, threads, shared_bytes, registers, occupancy, model })
    }

    /// Totals of the whole launch.
    pub fn counters(&self, level: Level) -> Counters {
        self.report.scaled(&self.kernel, level)
    }

    /// Bytes of the whole launch.
    pub fn traffic(&self) -> Traffic {
        let scaled = |bytes: u64| scale(bytes, self.report.ctas_total, self.report.ctas_run);
        let Traffic { unique_read, unique_written, requested_read, requested_written, per_cta_read, per_cta_written } =
            self.report.traffic;
        Traffic {
            unique_read: scaled(unique_read),
            unique_written: scaled(unique_written),
            requested_read: scaled(requested_read),
            requested_written: scaled(requested_written),
            per_cta_read: scaled(per_cta_read),
            per_cta_written: scaled(per_cta_written),
        }
    }

    /// Every instruction with its counters after the merge, of the whole launch.
    pub fn instructions(&self) -> impl Iterator<Item = (&Instruction, InstructionCounters)> {
        let scaled = |n: u64| scale(n, self.report.ctas_total, self.report.ctas_run);
        self.kernel.instructions().zip(&self.report.merged).map(move |(instruction, counted)| {
            let counted = InstructionCounters {
                executions: scaled(counted.executions),
                active_lanes: scaled(counted.active_lanes),
                requests: scaled(counted.requests),
                sectors: scaled(counted.sectors),
                sectors_ideal: scaled(counted.sectors_ideal),
                wavefronts: scaled(counted.wavefronts),
                wavefronts_ideal: scaled(counted.wavefronts_ideal),
                bytes: scaled(counted.bytes),
            };
            (instruction, counted)
        })
    }

    /// The source place of an instruction; line 0 when unknown.
    pub fn place(&self, instruction: &Instruction) -> Place {
        let location = self.kernel.user_location(instruction);
        let file = location.and_then(|location| self.kernel.files.get(location.file as usize));
        Place { file: file.cloned().unwrap_or_default(), line: location.map_or(0, |location| location.line) }
    }
}

/// A count of some CTAs as that of all.
pub(crate) fn scale(n: u64, numerator: u64, denominator: u64) -> u64 {
    (u128::from(n) * u128::from(numerator) / u128::from(denominator.max(1))) as u64
}

/// A line of a source file.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// As the kernel names it; empty when unknown.
    pub file: String,
    /// Counted from 1; 0 when unknown.
    pub line: u32,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.line == 0 {
            return f.write_str("an unknown line");
        }
        write!(f, "{}:{}", self.file.rsplit('/').next().unwrap_or_default(), self.line)
    }
}

/// What was launched, on one GPU: a stratum on a problem, or a kernel from elsewhere.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The stratum's name, or the kernel's.
    pub stratum: String,
    /// The whole problem, also when only some of its heads were run; `None` of a kernel that is no stratum.
    pub problem: Option<Problem>,
    /// The board that is modelled.
    pub gpu: &'static Gpu,
    /// In the order they run.
    pub launches: Vec<LaunchEvidence>,
}

impl Evidence {
    /// Totals of all launches.
    pub fn counters(&self, level: Level) -> Counters {
        let mut total = Counters::default();
        self.launches.iter().for_each(|launch| total += launch.counters(level));
        total
    }

    /// Bytes of all launches, summed; `unique` is counted in each launch anew.
    pub fn traffic(&self) -> Traffic {
        self.launches.iter().map(LaunchEvidence::traffic).fold(Traffic::default(), |sum, of| Traffic {
            unique_read: sum.unique_read + of.unique_read,
            unique_written: sum.unique_written + of.unique_written,
            requested_read: sum.requested_read + of.requested_read,
            requested_written: sum.requested_written + of.requested_written,
            per_cta_read: sum.per_cta_read + of.per_cta_read,
            per_cta_written: sum.per_cta_written + of.per_cta_written,
        })
    }

    /// Modelled DRAM bytes of all launches.
    pub fn dram(&self) -> DramBytes {
        self.launches.iter().fold(DramBytes::default(), |sum, launch| DramBytes {
            read: sum.read + launch.model.dram.read,
            written: sum.written + launch.model.dram.written,
        })
    }

    /// Modelled seconds of all launches, one after the other.
    pub fn seconds(&self) -> f64 {
        self.launches.iter().fold(0.0, |sum, launch| sum + launch.model.seconds)
    }

    /// What a pipe needs in all launches; `None` where the GPU's rate is not known.
    pub fn seconds_of(&self, pipe: Pipe) -> Option<f64> {
        self.launches.iter().map(|launch| launch.model.seconds_of(pipe)).sum()
    }

    /// The launch that takes longest, whose occupancy and limiter stand for the stratum.
    pub fn main_launch(&self) -> Option<&LaunchEvidence> {
        self.launches.iter().max_by(|a, b| a.model.seconds.total_cmp(&b.model.seconds))
    }

    /// Bytes that must be read and written at least: the problem's, or the distinct ones where no problem is known.
    pub fn compulsory(&self) -> DramBytes {
        let narrow = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
        match &self.problem {
            Some(problem) => {
                let bytes = problem.compulsory_bytes();
                DramBytes { read: narrow(bytes.read), written: narrow(bytes.write) }
            }
            None => {
                let traffic = self.traffic();
                DramBytes { read: traffic.unique_read, written: traffic.unique_written }
            }
        }
    }

    /// The foreign tools that had a part in it, with their versions.
    pub fn tools(&self) -> BTreeMap<String, String> {
        let asked = self.launches.iter().any(|launch| launch.registers.source == RegisterSource::Ptxas);
        let version = asked.then(|| Tool::Ptxas.version()).flatten();
        version.map(|version| ("ptxas".into(), version.into())).into_iter().collect()
    }

    /// Totals per source line at a level, by file and line.
    pub fn by_line(&self, level: Level) -> BTreeMap<Place, Counters> {
        let mut lines = BTreeMap::<Place, Counters>::new();
        for launch in &self.launches {
            for line in launch.report.by_line(&launch.kernel, level) {
                let place = Place { file: line.file, line: line.line };
                *lines.entry(place).or_default() +=
                    line.counters.scaled(launch.report.ctas_total, launch.report.ctas_run);
            }
        }
        lines
    }

    /// Lines with their part of `weight` summed over instructions, heaviest first; lines without any are left out.
    pub fn lines_by(&self, weight: impl Fn(&Instruction, &InstructionCounters) -> u64) -> Vec<(Place, u64)> {
        let mut lines = BTreeMap::<Place, u64>::new();
        for launch in &self.launches {
            for (instruction, counted) in launch.instructions() {
                let weight = weight(instruction, &counted);
                if weight > 0 {
                    *lines.entry(launch.place(instruction)).or_default() += weight;
                }
            }
        }
        let mut lines: Vec<_> = lines.into_iter().collect();
        lines.sort_by_key(|&(_, weight)| std::cmp::Reverse(weight));
        lines
    }
}

/// Whether an instruction loads from, or stores to, shared memory.
pub(crate) fn is_shared(instruction: &Instruction) -> bool {
    Access::of(instruction).is_some_and(Access::is_shared)
}
