//! The strata on the emulator: the contract's cases, shapes off the tiles' borders, and the counters they must show.

mod contract;
mod counters;
mod hopper;
mod kv_cache;
mod tensor_cores;

use arch::Sm;
use kernels::{Inputs, Problem, Stratum, Tiles};
use lab::{ExecuteError, Execution, Watch, execute};

/// Runs a stratum on the emulator with all checks on, the output filled with NaN before; on its own tiles unless given.
fn run(
    stratum: Stratum,
    sm: Sm,
    problem: &Problem,
    inputs: &Inputs,
    tiles: Option<Tiles>,
) -> Result<Execution, ExecuteError> {
    let tiles = tiles.unwrap_or_else(|| stratum.default_tiles(sm, 1, problem));
    execute(stratum, tiles, problem, inputs, sm, Watch { cancel: None, progress: None, ..Watch::default() })
}
