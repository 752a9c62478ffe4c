//! Measures, compares and explains kernels.

pub mod atomic_file;
pub mod bench;
pub mod compare;
pub mod dig;
pub mod element;
pub mod evidence;
pub mod execute;
pub mod facts;
pub mod figures;
pub mod findings;
pub mod mutate;
pub mod probe;
pub mod ptxas;
pub mod record;
pub mod registers;
pub mod sample;
pub mod sass;
pub mod source;
pub mod tensor_file;
pub mod text_file;
pub mod verify;

pub use bench::{BenchError, Measured, MeasuredLaunch, bench};
pub use compare::{Incomparable, transition};
pub use dig::{DigError, Digger, Dug};
pub use element::Element;
pub use evidence::{Evidence, LaunchEvidence, Place};
pub use execute::{ExecuteError, Executed, Execution, Watch, execute};
pub use findings::{Finding, Severity, findings};
pub use record::{Accuracy, Document, Record, Sampling};
pub use registers::{RegisterSource, Registers};
pub use sample::{Sample, SampleError, Source};
pub use source::Sources;
pub use verify::{CaseId, Checked, Coverage, Outcome, verify};
