//! A probed kernel as a subject of mutation.

use emulator::{Options, Report, RunError};
use ptx::{Kernel, Launch};

use super::buffers::{self, Placed};
use super::{BUDGET, Launched, ProbeError, Settings, launched};
use crate::execute::Watch;
use crate::mutate::{MutateError, Mutated, Ran, Subject, mutate};

/// Changes the kernel of a probe in every way and runs each; see [`crate::mutate`]. A result is right when every buffer is as
/// [`Settings::expect`] says, or, where that says nothing, as the kernel itself leaves it.
///
/// # Errors
/// As [`probe`](super::probe), and when the kernel does not work as it is.
pub fn mutate_probed(settings: &Settings, watch: Watch<'_>) -> Result<Mutated, ProbeError> {
    let mut probed = Launching { settings, launched: launched(settings)?, expected: Vec::new() };
    let (placed, _) = probed.launch(&probed.launched.kernel, &probed.options())?;
    probed.expected = placed.all()?;
    mutate(&probed, watch).map_err(|error| match error {
        MutateError::Run(RunError::Cancelled) => ProbeError::Cancelled,
        error => error.into(),
    })
}

struct Launching<'a> {
    settings: &'a Settings,
    launched: Launched,
    /// What buffers hold after the kernel has run.
    expected: Vec<Vec<u8>>,
}

impl Launching<'_> {
    /// Runs a kernel; its arguments afterwards.
    fn launch(&self, kernel: &Kernel, options: &Options<'_>) -> Result<(Placed, Report), ProbeError> {
        let placed = buffers::place(
            self.settings,
            kernel,
            Watch { cancel: options.cancel, progress: None, ..Watch::default() },
        )?;
        let Launched { grid, block, cluster, .. } = self.launched;
        let (dynamic_shared, arguments) = (self.settings.shared.unwrap_or(0), placed.arguments.clone());
        let launch = Launch { kernel, grid, block, cluster, dynamic_shared, arguments };
        let report = emulator::run(&placed.memory, &launch, options)?;
        Ok((placed, report))
    }

    fn is_right(&self, placed: &Placed, same: bool) -> Result<bool, ProbeError> {
        if self.settings.expect.is_empty() {
            return Ok(same);
        }
        let compared = self.settings.expect.iter().map(|expected| Ok(placed.compare(expected)?.wrong == 0));
        compared.collect::<Result<Vec<bool>, ProbeError>>().map(|right| right.into_iter().all(|right| right))
    }
}

impl Subject for Launching<'_> {
    fn kernel(&self) -> &Kernel {
        &self.launched.kernel
    }

    fn options(&self) -> Options<'static> {
        Options { budget_per_cta: self.settings.budget.unwrap_or(BUDGET), ..Options::new(self.launched.gpu.sm) }
    }

    fn run(&self, kernel: &Kernel, options: &Options<'_>) -> Result<Ran, RunError> {
        let ran = self.launch(kernel, options).and_then(|(placed, report)| {
            let same = placed.all()? == self.expected;
            Ok(Ran { right: self.is_right(&placed, same)?, same, ..Ran::of(&report) })
        });
        ran.map_err(|error| match error {
            ProbeError::Run(error) => error,
            ProbeError::Cancelled => RunError::Cancelled,
            error => RunError::Launch(error.to_string()),
        })
    }
}
