//! The program `strata`.

mod arguments;
mod bench;
mod chart;
mod device;
mod dig;
mod doctor;
mod explain;
mod facts;
mod gate;
mod history;
mod html;
mod mutation_report;
mod output;
mod plan;
mod probe;
mod probe_report;
mod profile;
mod progress;
mod prose;
mod question;
mod record;
mod report;
mod run;
mod tune;
mod verify;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;

use arguments::{Arguments, Command};

/// Why a command did not end well.
enum Failure {
    /// The answer is no: a wrong result, a hazard. Exit status 1.
    No(anyhow::Error),
    /// Bad usage or input, or something the machine refuses. Exit status 2.
    Input(anyhow::Error),
    /// There is no answer: records that are incomparable. Exit status 3.
    CannotSay(anyhow::Error),
    /// Ctrl-C. Exit status 130.
    Interrupted,
    /// Whoever read the output has had enough. Exit status 0.
    BrokenPipe,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        match error.downcast_ref::<std::io::Error>() {
            Some(io) if io.kind() == std::io::ErrorKind::BrokenPipe => Self::BrokenPipe,
            _ => Self::Input(error),
        }
    }
}

impl Failure {
    /// A fault of a kernel is an answer, a refusal is not.
    fn of_execution(error: lab::ExecuteError) -> Self {
        match error {
            lab::ExecuteError::Cancelled => Self::Interrupted,
            lab::ExecuteError::Fault { .. } => Self::No(error.into()),
            _ => Self::Input(error.into()),
        }
    }
}

/// Set by Ctrl-C.
static CANCEL: AtomicBool = AtomicBool::new(false);

/// While nothing is finished that could be told, Ctrl-C ends the program at once.
static NOTHING_FINISHED: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let interrupted = ExitCode::from(130);
    // Without a handler, Ctrl-C ends the program at once: nothing is lost but what was finished.
    let _ = ctrlc::set_handler(|| {
        if CANCEL.swap(true, Ordering::Relaxed) || NOTHING_FINISHED.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    let result = match arguments.command {
        Command::Dig(arguments) => dig::dig(&arguments),
        Command::Plan(arguments) => plan::plan(&arguments),
        Command::Tune(arguments) => tune::tune(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Probe(arguments) => probe::run(&arguments),
        Command::Facts(arguments) => facts::facts(&arguments),
        Command::Verify(arguments) => verify::verify(&arguments),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::History(arguments) => history::history(&arguments),
        Command::Compare(arguments) => history::compare_records(&arguments),
        Command::Gate(arguments) => gate::run(&arguments),
        Command::Accept(arguments) => gate::accept(&arguments),
        Command::Explain(arguments) => explain::explain(&arguments),
        Command::Profile(arguments) => profile::profile(&arguments),
        Command::Import(arguments) => profile::import(&arguments),
        Command::Report(arguments) => html::report(&arguments),
        Command::Doctor => doctor::doctor(),
    };
    match result {
        Ok(()) | Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(Failure::No(error)) => complain(&error, 1),
        Err(Failure::Input(error)) => complain(&error, 2),
        Err(Failure::CannotSay(error)) => complain(&error, 3),
        Err(Failure::Interrupted) => interrupted,
    }
}

fn complain(error: &anyhow::Error, status: u8) -> ExitCode {
    eprintln!("error: {}", told(error));
    ExitCode::from(status)
}

/// An error and its causes; a cause whose words an error already has is not said again.
fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let error = lab::tensor_file::read_npy(std::path::Path::new("nowhere.npy")).unwrap_err();
        let reason = std::io::Error::from_raw_os_error(2).to_string();
        assert_eq!(told(&error.into()), format!("nowhere.npy: {reason}"));
        let error = Err::<(), _>(std::io::Error::from_raw_os_error(2)).context("cannot write x").unwrap_err();
        assert_eq!(told(&error), format!("cannot write x: {reason}"));
    }
}
