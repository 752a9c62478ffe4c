//! What was measured to be fastest, and how it is measured.
//!
//! Tuning is never needed and never happens by itself: [`tune`] is called, its [`Entry`] goes to a file by [`cache::store`],
//! and a [`Planner`](crate::Planner) consults a [`Table`] only when it is given one.
//!
//! ```
//! use flashstrata::tune::{TuneOptions, Timer, candidates, tune};
//! use flashstrata::{Hardware, Layout, Plan, Planner, Problem, Watch};
//!
//! /// Stands for a GPU on which larger tiles of keys are always faster.
//! struct Pretend(Vec<f64>);
//!
//! impl Timer for Pretend {
//!     type Error = std::convert::Infallible;
//!     fn load(&mut self, plan: &Plan) -> Result<(), Self::Error> {
//!         self.0.push(1.0 / f64::from(plan.tiles().block_kv));
//!         Ok(())
//!     }
//!     fn sample(&mut self, candidate: usize) -> Result<f64, Self::Error> {
//!         Ok(self.0[candidate])
//!     }
//! }
//!
//! let problem = Problem::builder(1, 8, 512, 64).build()?;
//! // A measurement belongs to a driver, whose compiler makes the machine code.
//! let hardware = Hardware { driver: Some("580.65.06".into()), ..Hardware::from(flashstrata::Gpu::find("T4")?) };
//! let options = TuneOptions { per_stratum: 3, rounds: 5 };
//! let found = candidates(&Planner::new(hardware), &problem, &Layout::contiguous(&problem), &options)?;
//! let tuned = tune(&found, &mut Pretend(Vec::new()), &options, Watch::default())?;
//! assert!(tuned.entry.median_ms <= tuned.entry.default_ms);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cache;
mod candidates;
mod cuda_timer;
mod model;
mod tuner;

use std::collections::HashMap;
use std::path::PathBuf;

use kernels::{Mask, Problem, Stratum, Tiles};
use serde::{Deserialize, Serialize};

pub use cache::{CacheError, Loaded, Notice};
pub use candidates::{Candidate, Candidates, Pruned, candidates};
pub use cuda_timer::CudaTimer;
pub use tuner::{Measured, Progress, Timer, TuneError, TuneOptions, Tuned, Watch, tune};

use crate::hardware::Hardware;
use crate::planner::tiles_text;

/// Calls that one measurement speaks for: everything a kernel's code depends on, and sizes by powers of two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The GPU's name.
    pub gpu: String,
    /// The driver's version: its compiler makes the machine code.
    pub driver: String,
    /// This library's version: it writes the kernels.
    pub version: String,
    /// Type of q, k, v and out.
    pub dtype: String,
    /// Length of a query and of a key.
    pub head_dim: usize,
    /// Length of a value.
    pub head_dim_v: usize,
    /// `full`, `causal` or `window`.
    pub mask: String,
    /// Whether the batch is packed.
    pub varlen: bool,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Whether there are ALiBi slopes.
    pub alibi: bool,
    /// Query heads per KV head.
    pub group: usize,
    /// `batch * heads_q`, rounded up to a power of two.
    pub heads: usize,
    /// `seqlen_q`, rounded up to a power of two.
    pub seqlen_q: usize,
    /// `seqlen_k`, rounded up to a power of two.
    pub seqlen_k: usize,
}

impl Key {
    /// Of a problem on a GPU, for this version of the library. Without a driver there is none: nothing can have been measured.
    pub fn new(hardware: &Hardware, problem: &Problem) -> Option<Key> {
        let bucket = |length: usize| if length == 0 { 0 } else { length.next_power_of_two() };
        let mask = match problem.mask {
            Mask::FULL => "full",
            Mask::CAUSAL => "causal",
            _ => "window",
        };
        Some(Key {
            gpu: hardware.name.clone(),
            driver: hardware.driver.clone()?,
            version: env!("CARGO_PKG_VERSION").into(),
            dtype: problem.dtype.to_string(),
            head_dim: problem.head_dim,
            head_dim_v: problem.head_dim_v,
            mask: mask.into(),
            varlen: problem.varlen.is_some(),
            softcap: problem.softcap.is_some(),
            alibi: problem.alibi_slopes.is_some(),
            group: problem.group(),
            heads: bucket(problem.batch.saturating_mul(problem.heads_q)),
            seqlen_q: bucket(problem.seqlen_q),
            seqlen_k: bucket(problem.seqlen_k),
        })
    }
}

/// The fastest that was measured for the calls of a key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Which calls.
    pub key: Key,
    /// The problem that was timed.
    pub problem: String,
    /// The generation.
    #[serde(with = "stratum_as_text")]
    pub stratum: Stratum,
    /// Its tiles.
    #[serde(with = "TilesAsFields")]
    pub tiles: Tiles,
    /// The median of its samples.
    pub median_ms: f64,
    /// The median of what is taken without a measurement, in the same run.
    pub default_ms: f64,
    /// How many configurations were timed.
    pub timed: usize,
}

impl Entry {
    /// `1.20 ms where the default takes 1.31 ms`.
    pub fn gain(&self) -> String {
        format!("{:.3} ms where the default takes {:.3} ms", self.median_ms, self.default_ms)
    }
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} ({}), {}", self.problem, self.stratum, tiles_text(self.tiles), self.gain())
    }
}

mod stratum_as_text {
    use kernels::Stratum;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(stratum: &Stratum, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(stratum.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Stratum, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Tiles")]
struct TilesAsFields {
    block_q: u32,
    block_kv: u32,
    threads: u32,
}

/// What was measured, by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table(HashMap<Key, Entry>);

impl Table {
    /// Of these entries; of one key, the last counts.
    pub fn new(entries: impl IntoIterator<Item = Entry>) -> Table {
        Table(entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect())
    }

    /// What a file says: see [`cache::load`].
    ///
    /// # Errors
    /// When the file is there and cannot be read, or was written by a later version.
    pub fn load(path: &std::path::Path) -> Result<Loaded, CacheError> {
        cache::load(path)
    }

    /// What was measured for calls like `problem` on this GPU, with this driver, by this version.
    pub fn get(&self, hardware: &Hardware, problem: &Problem) -> Option<&Entry> {
        self.0.get(&Key::new(hardware, problem)?)
    }

    /// All of them, in no order.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.0.values()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Whether a caller wants measurements consulted, and from where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tuning {
    /// No.
    #[default]
    Off,
    /// From the user's cache: [`cache::default_path`].
    Cached,
    /// From this file.
    File(PathBuf),
}

impl Tuning {
    /// Reads what is to be consulted; nothing where that is nothing, or there is no such file.
    ///
    /// # Errors
    /// As [`Table::load`]; or when the user's cache has no place, for lack of a home directory.
    pub fn load(&self) -> Result<Loaded, CacheError> {
        match self {
            Tuning::Off => Ok(Loaded::default()),
            Tuning::Cached => cache::load(&cache::default_path()?),
            Tuning::File(path) => cache::load(path),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kernels::{Dtype, Layout, ProblemSpec};

    use super::*;
    use crate::{ChosenBy, Planner, Why};

    pub(crate) fn h200(driver: &str) -> Hardware {
        Hardware { driver: Some(driver.into()), ..arch::Gpu::find("H200").unwrap().into() }
    }

    pub(crate) fn entry(problem: &Problem, stratum: Stratum, tiles: Tiles) -> Entry {
        let key = Key::new(&h200("580.1"), problem).unwrap();
        Entry { key, problem: problem.to_string(), stratum, tiles, median_ms: 1.0, default_ms: 2.0, timed: 9 }
    }

    fn half() -> ProblemSpec {
        ProblemSpec::new(2, 16, 1000, 128).dtype(Dtype::Bf16)
    }

    #[test]
    fn a_key_is_what_the_kernels_depend_on_and_sizes_by_powers_of_two() {
        let key = |spec: ProblemSpec| Key::new(&h200("580.1"), &spec.build().unwrap()).unwrap();
        assert_eq!(key(half()), key(ProblemSpec::new(2, 16, 1024, 128).dtype(Dtype::Bf16)));
        assert_eq!((key(half()).heads, key(half()).seqlen_q), (32, 1024));
        for other in [
            half().causal(),
            half().dtype(Dtype::F16),
            half().head_dim_v(64),
            half().heads_kv(4),
            half().seqlen_k(1025),
        ] {
            assert_ne!(key(half()), key(other));
        }
        let problem = half().build().unwrap();
        assert_ne!(Key::new(&h200("580.1"), &problem), Key::new(&h200("580.2"), &problem));
        assert_eq!(Key::new(&arch::Gpu::find("H200").unwrap().into(), &problem), None);
    }

    #[test]
    fn a_planner_takes_what_was_measured_and_says_so() {
        let problem = half().build().unwrap();
        let layout = Layout::contiguous(&problem);
        let tiles = Tiles { block_q: 128, block_kv: 64, threads: 384 };
        let table = Table::new([entry(&problem, Stratum::V3, tiles)]);
        let planner = Planner::new(h200("580.1")).tuned(table.clone());
        let plan = planner.plan(&problem, &layout).unwrap();
        assert_eq!(
            (plan.tiles(), plan.chosen_by.to_string()),
            (tiles, "measured, 1.000 ms where the default takes 2.000 ms".into())
        );
        // Another driver, another mask, a stratum that is asked for, or tiles that are given: as if nothing was measured.
        let default = Planner::new(h200("580.1")).plan(&problem, &layout).unwrap().tiles();
        assert_ne!(default, tiles);
        let other = Planner::new(h200("581")).tuned(table.clone()).plan(&problem, &layout).unwrap();
        assert_eq!((other.tiles(), &other.chosen_by), (default, &ChosenBy::Default));
        let forced = planner.clone().stratum(Stratum::V2).plan(&problem, &layout).unwrap();
        assert_eq!((forced.stratum(), &forced.chosen_by), (Stratum::V2, &ChosenBy::Default));
        // An older generation that was faster: the newer one is passed over, and why.
        let square = Tiles { block_q: 32, block_kv: 32, threads: 128 };
        let table = Table::new([entry(&problem, Stratum::V2, square)]);
        let plan = Planner::new(h200("580.1")).tuned(table).plan(&problem, &layout).unwrap();
        let reasons: Vec<_> = plan.passed_over.iter().map(|one| (one.stratum, one.why.clone())).collect();
        let slower = Why::MeasuredSlower { chosen: Stratum::V2 };
        assert_eq!(reasons, [Stratum::V3, Stratum::V2Tc, Stratum::V2Kt].map(|stratum| (stratum, slower.clone())));
        // Tiles that this library does not have are not taken.
        let none = Tiles { block_q: 7, block_kv: 7, threads: 7 };
        let table = Table::new([entry(&problem, Stratum::V3, none)]);
        assert_eq!(Planner::new(h200("580.1")).tuned(table).plan(&problem, &layout).unwrap().tiles(), default);
    }
}
