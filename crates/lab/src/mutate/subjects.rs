//! Kernels to mutate: launches of strata, and runs of file tests.

use std::cell::RefCell;

use emulator::filetest::{Call, FileTest, Outcome, Placed, Run, Stop};
use emulator::{Device, DeviceError, MemoryError, Options, Report, RunError};
use kernels::{Inputs, Outputs, Plan, Problem};
use ptx::Kernel;
use thiserror::Error;

use super::{Ran, Subject};
use flashstrata::compute::{ComputeError, compute};

/// A kernel that cannot be made a subject.
#[derive(Debug, Error)]
pub enum SubjectError {
    /// The stratum does not compute the problem.
    #[error("{0}")]
    Compute(Box<ComputeError<DeviceError>>),
    /// There is no such launch.
    #[error("launch {index} is asked for; the plan has {count}")]
    Launch {
        /// Which.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The file test's run does not do what the file says.
    #[error("{0}")]
    FileTest(String),
}

impl Ran {
    /// What a report says of a run whose result is not compared.
    pub(crate) fn of(report: &Report) -> Self {
        let executions = report.ptx.iter().map(|counters| counters.executions).collect();
        Self { right: true, same: true, executions, races_complete: report.races_complete }
    }
}

/// One launch of a stratum's plan, on a problem.
pub struct StratumLaunch {
    plan: Plan,
    launch: usize,
    problem: Problem,
    inputs: Inputs,
    expected: Outputs,
}

impl StratumLaunch {
    /// The launch of this index of a plan for the problem. What it computes now is taken for right.
    ///
    /// # Errors
    /// When the plan does not compute, or has no such launch.
    pub fn new(plan: Plan, launch: usize, problem: Problem, inputs: Inputs) -> Result<Self, SubjectError> {
        let count = plan.launches.len();
        if launch >= count {
            return Err(SubjectError::Launch { index: launch, count });
        }
        let mut device = Self::device(Options::new(plan.config.target.sm()));
        let computed = compute(&mut device, &plan, &problem, &inputs);
        let expected = computed.map_err(|error| SubjectError::Compute(Box::new(error)))?.outputs;
        Ok(Self { plan, launch, problem, inputs, expected })
    }

    /// A device on which a CTA that stays takes every tile: its rings go round.
    fn device(options: Options<'_>) -> Device<'_> {
        Device { multiprocessors: Some(1), ..Device::new(options) }
    }
}

impl Subject for StratumLaunch {
    fn kernel(&self) -> &Kernel {
        &self.plan.launches[self.launch].kernel
    }

    fn options(&self) -> Options<'static> {
        Options::new(self.plan.config.target.sm())
    }

    fn run(&self, kernel: &Kernel, options: &Options<'_>) -> Result<Ran, RunError> {
        let mut plan = self.plan.clone();
        plan.launches[self.launch].kernel = kernel.clone();
        let mut device = Self::device(options.clone());
        match compute(&mut device, &plan, &self.problem, &self.inputs) {
            Ok(computed) => {
                let ran = computed.reports.get(self.launch).map(Ran::of).unwrap_or_default();
                let right = same(&computed.outputs, &self.expected);
                Ok(Ran { right, same: right, ..ran })
            }
            Err(ComputeError::Backend(DeviceError::Run(error))) => Err(error),
            Err(error) => Err(RunError::Launch(error.to_string())),
        }
    }
}

/// Whether outputs are the same bit for bit; NaN as good as NaN.
fn same(found: &Outputs, expected: &Outputs) -> bool {
    let equal = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
    let all = |found: Vec<f64>, expected: Vec<f64>| found.iter().zip(&expected).all(equal);
    all(found.out.to_f64(), expected.out.to_f64()) && all(found.lse.to_f64(), expected.lse.to_f64())
}

/// One run of a file test.
pub struct FileTestRun<'a> {
    test: &'a FileTest,
    run: &'a Run,
    kernel: Kernel,
}

impl<'a> FileTestRun<'a> {
    /// A run of a file test that expects no fault.
    ///
    /// # Errors
    /// When it does not do what the file says.
    pub fn new(test: &'a FileTest, run: &'a Run) -> Result<Self, SubjectError> {
        let mut kernel = None;
        let checked = test.check(run, |call| {
            kernel = Some(call.kernel.clone());
            emulator::filetest::emulate(call)
        });
        match (checked, kernel) {
            (Ok(()), Some(kernel)) => Ok(Self { test, run, kernel }),
            (Err(error), _) => Err(SubjectError::FileTest(error.to_string())),
            (Ok(()), None) => Err(SubjectError::FileTest("it was not run".into())),
        }
    }
}

impl Subject for FileTestRun<'_> {
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    fn options(&self) -> Options<'static> {
        Options { budget_per_cta: 1 << 24, ..Options::new(self.run.sm) }
    }

    fn run(&self, kernel: &Kernel, options: &Options<'_>) -> Result<Ran, RunError> {
        let ended: RefCell<Result<Ran, RunError>> = RefCell::new(Ok(Ran::default()));
        let checked = self.test.check(self.run, |call| {
            let call = Call { kernel, ..call.clone() };
            launch(&call, options)
                .map(|(outcome, ran)| {
                    *ended.borrow_mut() = Ok(ran);
                    outcome
                })
                .map_err(|error| {
                    let stop = Stop::from(error.clone());
                    *ended.borrow_mut() = Err(error);
                    stop
                })
        });
        ended.into_inner().map(|ran| Ran { right: checked.is_ok(), same: checked.is_ok(), ..ran })
    }
}

fn launch(call: &Call<'_>, options: &Options<'_>) -> Result<(Outcome, Ran), RunError> {
    let refuse = |error: MemoryError| RunError::Launch(error.to_string());
    let placed = Placed::new(call).map_err(refuse)?;
    let report = emulator::run(&placed.memory, &call.launch(&placed.addresses), options)?;
    Ok((Outcome { buffers: placed.buffers().map_err(refuse)?, counters: None }, Ran::of(&report)))
}
