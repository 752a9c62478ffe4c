//! How right is right: a kernel's output against the reference, with the plain algorithm's error as the yardstick.

use std::fmt;

use crate::{Dtype, HeadOutput, InputError, Outputs, Problem};

/// `||out - ref|| / ||ref||` that an f32 kernel stays below.
pub const RELATIVE_ERROR_F32: f64 = 1e-5;

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// `max |out - ref|`; NaN when the output holds one.
    pub max_error: f64,
    /// What `max_error` may be: the largest of the elements' bounds.
    pub bound: f64,
    /// `||out - ref|| / ||ref||` in the Frobenius norm.
    pub relative_error: f64,
    /// `max |lse - lse_ref|`; NaN when lse holds one.
    pub max_lse_error: f64,
    /// The first thing that is wrong, if any.
    pub wrong: Option<Wrong>,
}

impl Verdict {
    /// Whether nothing is wrong.
    pub fn passed(&self) -> bool {
        self.wrong.is_none()
    }
}

/// What fails a comparison.
#[derive(Clone, Debug, PartialEq)]
pub enum Wrong {
    /// An element of `out`.
    Out {
        /// The batch entry.
        entry: usize,
        /// The query head.
        head: usize,
        /// The query.
        row: usize,
        /// The column.
        column: usize,
        /// What it is.
        got: f64,
        /// What it should be.
        expected: f64,
        /// By how much it may differ.
        allowed: f64,
    },
    /// An element of `lse`.
    Lse {
        /// The batch entry.
        entry: usize,
        /// The query head.
        head: usize,
        /// The query.
        row: usize,
        /// What it is.
        got: f64,
        /// What it should be.
        expected: f64,
        /// What the difference must stay below.
        allowed: f64,
    },
    /// The relative error as a whole.
    Relative {
        /// What it is.
        got: f64,
        /// What it must stay below.
        allowed: f64,
    },
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Wrong::Out { entry, head, row, column, got, expected, allowed } => write!(
                f,
                "out[batch {entry}, row {row}, head {head}, column {column}] is {got}: expected {expected}, \
                 within {allowed:e}"
            ),
            Wrong::Lse { entry, head, row, got, expected, allowed } => {
                write!(
                    f,
                    "lse[batch {entry}, head {head}, row {row}] is {got}: expected {expected}, within {allowed:e}"
                )
            }
            Wrong::Relative { got, allowed } => {
                write!(f, "the relative error of out is {got:e}: it must be less than {allowed:e}")
            }
        }
    }
}

/// Compares with the reference: `max |out - ref| <= 2 max |pt - ref| + 2 max |((ref + 0.3) - 0.3) - ref|`, the last term
/// in the input type, and in f32 also `||out - ref|| / ||ref|| < 1e-5`; lse within `1e-3 + 4 ulp`.
///
/// `reference` and `plain` are the same heads, of [`reference`](crate::reference()) and [`plain`](crate::plain): the heads that are compared.
///
/// # Errors
/// When the outputs are not of the problem's type and shape, or it has no such head.
pub fn check(
    problem: &Problem,
    outputs: &Outputs,
    reference: &[HeadOutput],
    plain: &[HeadOutput],
) -> Result<Verdict, InputError> {
    let bound = bound(problem.dtype, reference, plain);
    let mut verdict = compare(problem, outputs, reference, |_| bound)?;
    verdict.bound = bound;
    // Written so that NaN fails.
    let precise = problem.dtype != Dtype::F32 || verdict.relative_error < RELATIVE_ERROR_F32;
    if verdict.wrong.is_none() && !precise {
        verdict.wrong = Some(Wrong::Relative { got: verdict.relative_error, allowed: RELATIVE_ERROR_F32 });
    }
    Ok(verdict)
}

/// Compares exactly: within one unit in the last place of the output type; lse within `1e-3 + 4 ulp`.
///
/// # Errors
/// When the outputs are not of the problem's type and shape, or it has no such head.
pub fn check_exact(problem: &Problem, outputs: &Outputs, expected: &[HeadOutput]) -> Result<Verdict, InputError> {
    compare(problem, outputs, expected, |expected| problem.dtype.ulp(expected))
}

/// Compares with a fixed bound on `max |out - expected|`; lse within `1e-3 + 4 ulp`.
///
/// # Errors
/// When the outputs are not of the problem's type and shape, or it has no such head.
pub fn check_within(
    problem: &Problem,
    outputs: &Outputs,
    expected: &[HeadOutput],
    bound: f64,
) -> Result<Verdict, InputError> {
    compare(problem, outputs, expected, |_| bound)
}

fn bound(dtype: Dtype, reference: &[HeadOutput], plain: &[HeadOutput]) -> f64 {
    let elements = |heads: &[HeadOutput]| heads.iter().flat_map(|head| head.out.clone()).collect::<Vec<f64>>();
    let (reference, plain) = (elements(reference), elements(plain));
    let plain_error = reference.iter().zip(&plain).map(|(r, p)| distance(*p, *r)).fold(0.0, worst);
    let rounding = reference.iter().map(|r| {
        let r = dtype.round(*r);
        let there = dtype.round(r + 0.3);
        dtype.round(dtype.round(there - 0.3) - r).abs()
    });
    2.0 * plain_error + 2.0 * rounding.fold(0.0, worst)
}

fn compare(
    problem: &Problem,
    outputs: &Outputs,
    expected: &[HeadOutput],
    allowed: impl Fn(f64) -> f64,
) -> Result<Verdict, InputError> {
    let mut verdict = Verdict { max_error: 0.0, bound: 0.0, relative_error: 0.0, max_lse_error: 0.0, wrong: None };
    let (mut error_squares, mut squares) = (0.0, 0.0);
    for wanted in expected {
        let (entry, head) = (wanted.entry, wanted.head);
        let got = outputs.head(problem, entry, head)?;
        for (element, (&got, &expected)) in got.out.iter().zip(&wanted.out).enumerate() {
            let (error, allowed) = (distance(got, expected), allowed(expected));
            verdict.max_error = worst(verdict.max_error, error);
            verdict.bound = worst(verdict.bound, allowed);
            error_squares += error * error;
            squares += expected * expected;
            let within = error <= allowed;
            if verdict.wrong.is_none() && !within {
                let (row, column) = (element / problem.head_dim_v, element % problem.head_dim_v);
                verdict.wrong = Some(Wrong::Out { entry, head, row, column, got, expected, allowed });
            }
        }
        for (row, (&got, &expected)) in got.lse.iter().zip(&wanted.lse).enumerate() {
            let (error, allowed) = (distance(got, expected), 1e-3 + 4.0 * Dtype::F32.ulp(expected));
            verdict.max_lse_error = worst(verdict.max_lse_error, error);
            let within = error < allowed;
            if verdict.wrong.is_none() && !within {
                verdict.wrong = Some(Wrong::Lse { entry, head, row, got, expected, allowed });
            }
        }
    }
    verdict.relative_error = if error_squares == 0.0 { 0.0 } else { (error_squares / squares).sqrt() };
    Ok(verdict)
}

/// Equal infinities are 0 apart.
fn distance(a: f64, b: f64) -> f64 {
    if a == b { 0.0 } else { (a - b).abs() }
}

/// The larger; NaN when either is.
fn worst(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}
