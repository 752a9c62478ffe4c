//! GPUs as facts: SM tables, occupancy, pipe rates, and what an architecture can do.

mod sm;
mod target;

pub use sm::{Sm, SmLimits, UnknownSm};
pub use target::{Suffix, Target, TargetError};
