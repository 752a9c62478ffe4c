//! Boards: how many multiprocessors, at what clock, on what memory.

use serde::Serialize;
use thiserror::Error;

use crate::pipes::{PipeRates, TensorOperand};
use crate::sm::Sm;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A board one can buy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Its name: "RTX 2070".
    pub name: &'static str,
    /// Other names it goes by, among them the driver's.
    pub aliases: &'static [&'static str],
    /// Architecture.
    pub sm: Sm,
    /// Multiprocessors.
    pub sm_count: u32,
    /// Guaranteed clock in MHz, where the vendor states one.
    pub base_mhz: Option<u32>,
    /// Boost clock in MHz: what the vendor's peak figures outside the tensor cores are computed with.
    pub boost_mhz: u32,
    /// Clock in MHz that the vendor's tensor-core peaks are computed with; on Hopper and B200 below the boost clock.
    pub tensor_mhz: u32,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Bandwidth of device memory in bytes per second.
    pub memory_bandwidth: u64,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Bytes that L2 serves per clock to all multiprocessors together, where the vendor states it.
    pub l2_bytes_per_clock: Option<u32>,
    /// Tensor products with f32 accumulators run at half the architecture's rate: GeForce boards.
    pub half_rate_f32_accumulate: bool,
    /// Where the figures come from.
    pub source: &'static str,
}

const fn gpu(name: &'static str, sm: Sm, sm_count: u32, boost_mhz: u32) -> Gpu {
    Gpu {
        name,
        aliases: &[],
        sm,
        sm_count,
        base_mhz: None,
        boost_mhz,
        tensor_mhz: boost_mhz,
        memory_bytes: 0,
        memory_bandwidth: 0,
        l2_bytes: 0,
        l2_bytes_per_clock: None,
        half_rate_f32_accumulate: false,
        source: "",
    }
}

impl Gpu {
    const fn memory(self, gib: u64, gigabytes_per_second: u64, l2_mib: u64) -> Gpu {
        Gpu {
            memory_bytes: gib * GIB,
            memory_bandwidth: gigabytes_per_second * 1_000_000_000,
            l2_bytes: l2_mib * MIB,
            ..self
        }
    }
}

/// The boards of the table, by architecture.
pub const GPUS: &[Gpu] = &[
    Gpu {
        aliases: &["V100", "V100-SXM2-32GB"],
        l2_bytes_per_clock: Some(2048),
        source: "NVIDIA V100 datasheet and Volta whitepaper, table 1; L2 rate: A100 whitepaper, comparison with V100",
        ..gpu("V100 SXM", Sm::Sm70, 80, 1530).memory(32, 900, 6)
    },
    Gpu {
        base_mhz: Some(585),
        source: "NVIDIA Turing whitepaper, appendix B (Tesla T4); T4 product brief for the base clock",
        ..gpu("T4", Sm::Sm75, 40, 1590).memory(16, 320, 4)
    },
    Gpu {
        base_mhz: Some(1410),
        half_rate_f32_accumulate: true,
        source: "NVIDIA Turing whitepaper, appendix A (GeForce RTX 2070, reference clocks)",
        ..gpu("RTX 2070", Sm::Sm75, 36, 1620).memory(8, 448, 4)
    },
    Gpu {
        aliases: &["A100-SXM4-40GB", "A100 40GB"],
        l2_bytes_per_clock: Some(5120),
        source: "NVIDIA A100 whitepaper, table 4; L2 rate: the same, \"A100 L2 cache\" (5120 B per clock)",
        ..gpu("A100 SXM 40GB", Sm::Sm80, 108, 1410).memory(40, 1555, 40)
    },
    Gpu {
        aliases: &["A100", "A100 SXM", "A100-SXM4-80GB", "A100 80GB"],
        l2_bytes_per_clock: Some(5120),
        source: "NVIDIA A100 80GB datasheet (SXM); L2: A100 whitepaper",
        ..gpu("A100 SXM 80GB", Sm::Sm80, 108, 1410).memory(80, 2039, 40)
    },
    Gpu {
        base_mhz: Some(1395),
        half_rate_f32_accumulate: true,
        source: "NVIDIA Ampere GA102 whitepaper, appendix A (GeForce RTX 3090)",
        ..gpu("RTX 3090", Sm::Sm86, 82, 1695).memory(24, 936, 6)
    },
    Gpu {
        base_mhz: Some(2235),
        half_rate_f32_accumulate: true,
        source: "NVIDIA Ada whitepaper, appendix A (GeForce RTX 4090)",
        ..gpu("RTX 4090", Sm::Sm89, 128, 2520).memory(24, 1008, 72)
    },
    Gpu {
        base_mhz: Some(1110),
        source: "NVIDIA L40S product brief and datasheet; L2: Ada whitepaper (full AD102), unchecked: a board database says 48 MB",
        ..gpu("L40S", Sm::Sm89, 142, 2520).memory(48, 864, 96)
    },
    Gpu {
        aliases: &["H100", "H100 80GB HBM3", "H100 SXM5"],
        tensor_mhz: 1830,
        source: "NVIDIA H100 datasheet and whitepaper, table 3; clocks from its peaks: 66.9 f32 and 989.4 dense f16 TFLOP/s",
        ..gpu("H100 SXM", Sm::Sm90, 132, 1980).memory(80, 3350, 50)
    },
    Gpu {
        tensor_mhz: 1620,
        source: "NVIDIA H100 datasheet and whitepaper, table 3; clocks from its peaks: 51.2 f32 and 756 dense f16 TFLOP/s",
        ..gpu("H100 PCIe", Sm::Sm90, 114, 1755).memory(80, 2000, 50)
    },
    Gpu {
        aliases: &["H200 SXM"],
        tensor_mhz: 1830,
        source: "NVIDIA H200 datasheet (memory; peaks as H100 SXM); multiprocessors and L2 as the driver reports them",
        ..gpu("H200", Sm::Sm90, 132, 1980).memory(141, 4800, 60)
    },
    Gpu {
        aliases: &["B200 SXM"],
        tensor_mhz: 1850,
        source: "NVIDIA HGX B200 datasheet (memory; 2.25 dense f16 PFLOP/s, from which the tensor clock); multiprocessors \
                 and L2 as the driver reports them; boost clock unchecked. The driver's bus width and memory clock make \
                 7.67 TB/s (pytorch/ao, pull request 4002)",
        ..gpu("B200", Sm::Sm100, 148, 1965).memory(180, 8000, 126)
    },
    Gpu {
        base_mhz: Some(2017),
        half_rate_f32_accumulate: true,
        source: "NVIDIA RTX Blackwell whitepaper, appendix A (GeForce RTX 5090)",
        ..gpu("RTX 5090", Sm::Sm120, 170, 2407).memory(32, 1792, 96)
    },
];

impl Gpu {
    /// The board of that name, whatever its case, spaces and dashes, with or without the vendor's and the series' name:
    /// "rtx2070", "NVIDIA GeForce RTX 2070", "h100-sxm".
    ///
    /// # Errors
    /// When no board has that name; the error lists the known ones and the nearest.
    pub fn find(name: &str) -> Result<&'static Gpu, UnknownGpu> {
        let wanted = plain(name);
        GPUS.iter()
            .find(|gpu| gpu.names().any(|known| plain(known) == wanted))
            .ok_or_else(|| UnknownGpu { given: name.to_owned(), nearest: nearest(&wanted) })
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }

    /// The rates of one of its multiprocessors.
    pub fn pipe_rates(&self) -> PipeRates {
        let rates = self.sm.pipe_rates();
        let tensor = if self.half_rate_f32_accumulate { rates.tensor.halve_f32_accumulate() } else { rates.tensor };
        PipeRates { tensor, ..rates }
    }

    /// Clocks per second at boost.
    pub fn clock_hz(&self) -> f64 {
        f64::from(self.boost_mhz) * 1e6
    }

    /// f32 operations per second of the whole board at boost; a multiply-add is two.
    pub fn peak_f32(&self) -> f64 {
        f64::from(2 * self.pipe_rates().fma * self.sm_count) * self.clock_hz()
    }

    /// Dense tensor operations per second of the whole board, with f32 (int8: i32) accumulators, at the tensor clock;
    /// `None` where the rate is not known.
    pub fn peak_tensor(&self, operand: TensorOperand) -> Option<f64> {
        let rate = self.pipe_rates().tensor.of(operand)?;
        Some(f64::from(rate) * f64::from(self.sm_count) * f64::from(self.tensor_mhz) * 1e6)
    }

    /// Bandwidth of L2 in bytes per second at boost, where the vendor states its rate.
    pub fn l2_bandwidth(&self) -> Option<f64> {
        self.l2_bytes_per_clock.map(|bytes| f64::from(bytes) * self.clock_hz())
    }
}

/// Lower case letters and digits alone, without the names that every board of the vendor or a series carries.
fn plain(name: &str) -> String {
    let mut name: String = name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    for prefix in ["nvidia", "tesla", "geforce"] {
        if let Some(rest) = name.strip_prefix(prefix) {
            name = rest.to_owned();
        }
    }
    name
}

fn nearest(wanted: &str) -> &'static str {
    let similarity =
        |gpu: &Gpu| gpu.names().map(|known| strsim::jaro_winkler(wanted, &plain(known))).fold(0.0, f64::max);
    GPUS.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b))).map_or("", |gpu| gpu.name)
}

/// No board has that name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "unknown GPU '{given}': nearest is '{nearest}'; known are {}",
    GPUS.iter().map(|gpu| gpu.name).collect::<Vec<_>>().join(", ")
)]
pub struct UnknownGpu {
    /// What was asked for.
    pub given: String,
    /// The most similar name of the table.
    pub nearest: &'static str,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_forgiving() {
        for (given, name) in [
            ("rtx2070", "RTX 2070"),
            ("NVIDIA GeForce RTX 2070", "RTX 2070"),
            ("h100-sxm", "H100 SXM"),
            ("H100_PCIe", "H100 PCIe"),
            ("NVIDIA H100 80GB HBM3", "H100 SXM"),
            ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
            ("a100", "A100 SXM 80GB"),
            ("tesla t4", "T4"),
            ("NVIDIA H200", "H200"),
        ] {
            assert_eq!(Gpu::find(given).unwrap().name, name);
        }
    }

    #[test]
    fn unknown_names_get_the_list_and_the_nearest() {
        let error = Gpu::find("RTX 2071").unwrap_err();
        assert_eq!(error.nearest, "RTX 2070");
        assert!(error.to_string().starts_with("unknown GPU 'RTX 2071': nearest is 'RTX 2070'; known are V100 SXM, T4"));
        assert_eq!(Gpu::find("h20").unwrap_err().nearest, "H200");
        assert!(Gpu::find("").is_err() && Gpu::find("ß—日本").is_err() && Gpu::find("nvidia").is_err());
    }

    #[test]
    fn rows_are_complete_and_names_distinct() {
        let mut seen = HashSet::new();
        for gpu in GPUS {
            assert!(gpu.names().all(|name| seen.insert(plain(name))), "{} twice", gpu.name);
            assert!(gpu.memory_bytes > 0 && gpu.memory_bandwidth > 0 && gpu.l2_bytes > 0 && !gpu.source.is_empty());
            assert!(gpu.base_mhz.is_none_or(|base| base <= gpu.boost_mhz) && gpu.tensor_mhz <= gpu.boost_mhz);
        }
    }

    /// The vendor's own peaks, in TFLOP/s (int8: TOP/s), dense, with f32 accumulators: f32, f16, tf32, fp8, int8.
    #[test]
    fn peaks_are_the_vendors() {
        type Peaks = (&'static str, f64, [Option<f64>; 4]);
        let stated: &[Peaks] = &[
            ("V100 SXM", 15.7, [Some(125.0), None, None, None]),
            ("T4", 8.1, [Some(65.0), None, None, Some(130.0)]),
            ("RTX 2070", 7.5, [Some(29.9), None, None, Some(119.4)]),
            ("A100 SXM 40GB", 19.5, [Some(312.0), Some(156.0), None, Some(624.0)]),
            ("A100 SXM 80GB", 19.5, [Some(312.0), Some(156.0), None, Some(624.0)]),
            ("RTX 3090", 35.6, [Some(71.0), Some(35.6), None, Some(284.0)]),
            ("RTX 4090", 82.6, [Some(165.2), Some(82.6), Some(330.3), Some(660.6)]),
            ("L40S", 91.6, [Some(362.0), Some(183.0), Some(733.0), Some(733.0)]),
            ("H100 SXM", 66.9, [Some(989.4), Some(494.7), Some(1978.9), Some(1978.9)]),
            ("H100 PCIe", 51.2, [Some(756.0), Some(378.0), Some(1513.0), Some(1513.0)]),
            ("H200", 66.9, [Some(989.4), Some(494.7), Some(1978.9), Some(1978.9)]),
            ("B200", 75.0, [Some(2250.0), Some(1125.0), Some(4500.0), Some(4500.0)]),
            ("RTX 5090", 104.8, [Some(209.5), Some(104.8), Some(419.0), Some(838.0)]),
        ];
        assert_eq!(stated.len(), GPUS.len());
        let operands = [TensorOperand::F16, TensorOperand::Tf32, TensorOperand::Fp8, TensorOperand::Int8];
        // The vendor rounds, the L40S most: 362 where its clock and multiprocessors give 366.
        let close = |ours: f64, stated: f64| (ours / (stated * 1e12) - 1.0).abs() < 0.0125;
        for (name, f32, tensor) in stated {
            let gpu = Gpu::find(name).unwrap();
            assert!(close(gpu.peak_f32(), *f32), "{name} f32: {:.1}", gpu.peak_f32() / 1e12);
            for (operand, stated) in operands.into_iter().zip(tensor) {
                match (gpu.peak_tensor(operand), stated) {
                    (Some(ours), Some(stated)) => assert!(close(ours, *stated), "{name} {operand}: {:.1}", ours / 1e12),
                    (ours, stated) => assert_eq!((ours, *stated), (None, None), "{name} {operand}"),
                }
            }
        }
    }

    /// GeForce boards keep the full rate with f16 accumulators and in int8.
    #[test]
    fn geforce_halves_f32_accumulation_alone() {
        let rates = Gpu::find("RTX 2070").unwrap().pipe_rates().tensor;
        assert_eq!((rates.f16, rates.f16_accumulate_f16, rates.int8), (Some(512), Some(1024), Some(2048)));
        assert_eq!(Gpu::find("T4").unwrap().pipe_rates().tensor.f16, Some(1024));
    }
}
