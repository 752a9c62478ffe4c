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
/// in the output's type, and in f32 also `||out - ref|| / ||ref|| < 1e-5`; lse within `1e-3 + 4 ulp`,
/// and on 8-bit inputs what the matrix units lose of it ([`LOST_OF_PRODUCTS`](crate::reference::LOST_OF_PRODUCTS)).
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
    let bound = bound(problem.dtype.out(), reference, plain);
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
    compare(problem, outputs, expected, |expected| problem.dtype.out().ulp(expected))
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
            let lost = wanted.lse_lost.get(row).copied().unwrap_or(0.0);
            let (error, allowed) = (distance(got, expected), 1e-3 + 4.0 * Dtype::F32.ulp(expected) + lost);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Inputs, ProblemSpec, plain, reference};

    struct Call {
        problem: Problem,
        reference: Vec<HeadOutput>,
        plain: Vec<HeadOutput>,
    }

    impl Call {
        fn new(dtype: Dtype) -> Call {
            let problem = ProblemSpec::new(2, 2, 33, 32).causal().dtype(dtype).build().unwrap();
            let inputs = Inputs::randn(&problem, 9).unwrap();
            let (reference, plain) = (reference(&problem, &inputs).unwrap(), plain(&problem, &inputs).unwrap());
            Call { problem, reference, plain }
        }

        /// The verdict on the reference with a change.
        fn verdict(&self, change: impl Fn(&mut Vec<HeadOutput>)) -> Verdict {
            let mut heads = self.reference.clone();
            change(&mut heads);
            let outputs = Outputs::from_heads(&self.problem, &heads).unwrap();
            check(&self.problem, &outputs, &self.reference, &self.plain).unwrap()
        }
    }

    #[test]
    fn the_reference_and_the_plain_algorithm_pass() {
        for dtype in Dtype::ALL {
            let call = Call::new(dtype);
            assert!(call.verdict(|_| {}).passed());
            // Of the scores rounded to 16 bits, lse is not good enough, and need not be.
            let verdict = call.verdict(|heads| {
                heads.iter_mut().zip(&call.plain).for_each(|(head, plain)| head.out = plain.out.clone());
            });
            assert!(verdict.passed() && 2.0 * verdict.max_error <= verdict.bound, "{verdict:?}");
        }
    }

    #[test]
    fn one_wrong_element_fails_and_is_named() {
        for dtype in Dtype::ALL {
            let call = Call::new(dtype);
            let bound = call.verdict(|_| {}).bound;
            for wrong in [f64::NAN, f64::INFINITY, 2.0 * bound + call.reference[3].out[5 * 32 + 7]] {
                let verdict = call.verdict(|heads| heads[3].out[5 * 32 + 7] = wrong);
                let Some(Wrong::Out { entry, head, row, column, .. }) = verdict.wrong else { panic!("{verdict:?}") };
                assert_eq!((entry, head, row, column), (1, 1, 5, 7));
                assert_eq!(verdict.max_error.is_nan(), wrong.is_nan());
            }
            let nothing = Outputs::nan(&call.problem).unwrap();
            assert!(!check(&call.problem, &nothing, &call.reference, &call.plain).unwrap().passed());
        }
    }

    #[test]
    fn a_wrong_lse_fails() {
        let call = Call::new(Dtype::F16);
        for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, call.reference[1].lse[4] + 1.1e-3] {
            let verdict = call.verdict(|heads| heads[1].lse[4] = wrong);
            assert!(matches!(verdict.wrong, Some(Wrong::Lse { entry: 0, head: 1, row: 4, .. })), "{verdict:?}");
        }
        assert!(call.verdict(|heads| heads[1].lse[4] += 0.9e-3).passed());
    }

    #[test]
    fn f32_errors_that_are_small_but_everywhere_fail() {
        let call = Call::new(Dtype::F32);
        let spread = |heads: &mut Vec<HeadOutput>| {
            heads.iter_mut().flat_map(|head| &mut head.out).for_each(|x| *x *= 1.0 + 1.1e-5);
        };
        let mut looser = Call { plain: call.reference.clone(), ..call };
        looser.plain.iter_mut().flat_map(|head| &mut head.out).for_each(|x| *x += 1e-3);
        let verdict = looser.verdict(spread);
        assert!(matches!(verdict.wrong, Some(Wrong::Relative { .. })), "{verdict:?}");
    }

    #[test]
    fn exact_is_one_unit_in_the_last_place() {
        for dtype in Dtype::ALL {
            let problem = ProblemSpec::new(1, 1, 1, 1).dtype(dtype).build().unwrap();
            let head = |x: f64| vec![HeadOutput { entry: 0, head: 0, out: vec![x], lse: vec![0.0], lse_lost: vec![] }];
            let exact = |got: f64, expected: f64| {
                let outputs = Outputs::from_heads(&problem, &head(got)).unwrap();
                check_exact(&problem, &outputs, &head(expected)).unwrap().passed()
            };
            let ulp = dtype.out().ulp(3.0);
            assert!(exact(3.0, 3.0) && exact(3.0 + ulp, 3.0) && exact(3.0 - ulp, 3.0));
            assert!(!exact(3.0 + 2.0 * ulp, 3.0) && !exact(f64::NAN, 3.0) && !exact(1e-3, 0.0));
        }
    }

    #[test]
    fn messages() {
        let out = Wrong::Out { entry: 1, head: 2, row: 3, column: 4, got: f64::NAN, expected: 0.5, allowed: 1e-3 };
        let lse = Wrong::Lse { entry: 1, head: 2, row: 3, got: 7.5, expected: f64::NEG_INFINITY, allowed: 1e-3 };
        let relative = Wrong::Relative { got: 2.5e-5, allowed: 1e-5 };
        insta::assert_snapshot!([out, lse, relative].map(|wrong| wrong.to_string()).join("\n"));
    }
}
