//! What attention is: computed in f64 from the stored inputs, over the whole contract; and the plain algorithm in the
//! input type, whose error is the yardstick for a kernel's (see [`tolerance`](crate::tolerance)).

use std::ops::{Add, Mul, Range};

use rayon::prelude::*;

use crate::cache::without_cache;
use crate::{InputError, Inputs, Problem, Tensor};

/// Attention of one query head of one batch entry.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadOutput {
    /// The batch entry.
    pub entry: usize,
    /// The query head.
    pub head: usize,
    /// `[seqlen_q, head_dim_v]`, row-major.
    pub out: Vec<f64>,
    /// `[seqlen_q]`, natural logarithm; `-inf` where a query sees no key.
    pub lse: Vec<f64>,
}

/// Attention in f64, of every head: batch entries in order, heads within.
///
/// # Errors
/// When the inputs do not fit the problem.
pub fn reference(problem: &Problem, inputs: &Inputs) -> Result<Vec<HeadOutput>, InputError> {
    reference_heads(problem, inputs, &all_heads(problem))
}

/// Attention in f64, of the given `(batch entry, query head)` pairs.
///
/// # Errors
/// When the inputs do not fit the problem, or it has no such head.
pub fn reference_heads(
    problem: &Problem,
    inputs: &Inputs,
    heads: &[(usize, usize)],
) -> Result<Vec<HeadOutput>, InputError> {
    compute(problem, inputs, heads, exact_row)
}

/// The plain algorithm in the input type: scores and probabilities are written out, rounded to it, and sums are
/// accumulated in f32 one after the other.
///
/// # Errors
/// When the inputs do not fit the problem.
pub fn plain(problem: &Problem, inputs: &Inputs) -> Result<Vec<HeadOutput>, InputError> {
    plain_heads(problem, inputs, &all_heads(problem))
}

/// [`plain`], of the given `(batch entry, query head)` pairs.
///
/// # Errors
/// When the inputs do not fit the problem, or it has no such head.
pub fn plain_heads(
    problem: &Problem,
    inputs: &Inputs,
    heads: &[(usize, usize)],
) -> Result<Vec<HeadOutput>, InputError> {
    compute(problem, inputs, heads, plain_row)
}

/// Every `(batch entry, query head)` pair of a problem, in order.
pub fn all_heads(problem: &Problem) -> Vec<(usize, usize)> {
    (0..problem.batch).flat_map(|entry| (0..problem.heads_q).map(move |head| (entry, head))).collect()
}

/// One head's inputs, copied so that the loops run over contiguous memory.
struct Head<T> {
    /// `[seqlen_q, head_dim]`.
    q: Vec<T>,
    /// `[head_dim, seqlen_k]`: keys transposed.
    keys: Vec<T>,
    /// `[seqlen_k, head_dim_v]`.
    v: Vec<T>,
    seqlen_q: usize,
    seqlen_k: usize,
    slope: f64,
}

impl<T: Element> Head<T> {
    fn gather(problem: &Problem, inputs: &Inputs, entry: usize, head: usize) -> Head<T> {
        let (queries, keys) = problem.tokens(entry);
        let kv_head = problem.kv_head(head);
        let rows = |tensor: &Tensor, tokens: &Range<usize>, head: usize, dim: usize| {
            let element = |(token, column)| match problem.varlen {
                Some(_) => tensor.get(&[token, head, column]),
                None => tensor.get(&[entry, token, head, column]),
            };
            let indices = tokens.clone().flat_map(|token| (0..dim).map(move |column| (token, column)));
            indices.map(|index| T::of(element(index).unwrap_or(f64::NAN))).collect::<Vec<T>>()
        };
        let (dim, seqlen_k) = (problem.head_dim, keys.len());
        let row_major = rows(&inputs.k, &keys, kv_head, dim);
        Head {
            q: rows(&inputs.q, &queries, head, dim),
            keys: (0..dim).flat_map(|column| row_major.iter().skip(column).step_by(dim).copied()).collect(),
            v: rows(&inputs.v, &keys, kv_head, problem.head_dim_v),
            seqlen_q: queries.len(),
            seqlen_k,
            slope: f64::from(problem.slope(entry, head)),
        }
    }

    /// The products of query `i` with the keys in `seen`.
    fn dot(&self, i: usize, seen: &Range<usize>, scores: &mut Vec<T>) {
        let dim = self.q.len() / self.seqlen_q;
        scores.clear();
        scores.resize(seen.len(), T::of(0.0));
        let row = |column: usize| &self.keys[column * self.seqlen_k..][seen.clone()];
        add_scaled_rows(scores, &self.q[i * dim..][..dim], row);
    }

    /// Adds the values in `seen`, weighted.
    fn add_values(&self, weights: &[T], seen: &Range<usize>, out: &mut [T]) {
        let dim = out.len();
        add_scaled_rows(out, weights, |j| &self.v[(seen.start + j) * dim..][..dim]);
    }

    /// The distance of query `i` from key `j`, which ALiBi charges.
    fn distance(&self, i: usize, j: usize) -> f64 {
        (i as f64 + self.seqlen_k as f64 - self.seqlen_q as f64 - j as f64).abs()
    }
}

trait Element: Copy + Send + Sync + Add<Output = Self> + Mul<Output = Self> {
    fn of(value: f64) -> Self;
}

impl Element for f64 {
    fn of(value: f64) -> f64 {
        value
    }
}

impl Element for f32 {
    fn of(value: f64) -> f32 {
        value as f32
    }
}

/// `sum += factors[0] * row(0) + factors[1] * row(1) + ...`, in this order; four rows for each pass over `sum`.
fn add_scaled_rows<'a, T: Element + 'a>(sum: &mut [T], factors: &[T], row: impl Fn(usize) -> &'a [T]) {
    let (fours, rest) = factors.as_chunks::<4>();
    for (four, &[a, b, c, d]) in fours.iter().enumerate() {
        let [ra, rb, rc, rd] = [0, 1, 2, 3].map(|n| row(4 * four + n));
        for ((((s, &xa), &xb), &xc), &xd) in sum.iter_mut().zip(ra).zip(rb).zip(rc).zip(rd) {
            *s = *s + a * xa + b * xb + c * xc + d * xd;
        }
    }
    for (n, &factor) in rest.iter().enumerate() {
        for (s, &x) in sum.iter_mut().zip(row(4 * fours.len() + n)) {
            *s = *s + factor * x;
        }
    }
}

/// Computes rows in parallel. `row(problem, head, i, seen, scratch, out)` fills row `i` of the output, zero before,
/// and returns its lse.
fn compute<T: Element>(
    problem: &Problem,
    inputs: &Inputs,
    heads: &[(usize, usize)],
    row: impl Fn(&Problem, &Head<T>, usize, Range<usize>, &mut Vec<T>, &mut [f64]) -> f64 + Sync,
) -> Result<Vec<HeadOutput>, InputError> {
    inputs.check(problem)?;
    if problem.cache.is_some() {
        let (problem, inputs) = without_cache(problem, inputs)?;
        return compute(&problem, &inputs, heads, row);
    }
    let dim = problem.head_dim_v;
    heads.iter().try_for_each(|(entry, head)| problem.check_head(*entry, *head))?;
    let one = |&(entry, head): &(usize, usize)| {
        let inputs = Head::gather(problem, inputs, entry, head);
        let mut out = vec![0.0; inputs.seqlen_q * dim];
        let rows = out.par_chunks_mut(dim).enumerate();
        let lse = rows.map_init(Vec::new, |scratch, (i, out)| {
            row(problem, &inputs, i, problem.seen_keys(entry, i), scratch, out)
        });
        let lse = lse.collect();
        HeadOutput { entry, head, out, lse }
    };
    Ok(heads.par_iter().map(one).collect())
}

fn exact_row(
    problem: &Problem,
    head: &Head<f64>,
    i: usize,
    seen: Range<usize>,
    scores: &mut Vec<f64>,
    out: &mut [f64],
) -> f64 {
    let (scale, softcap) = (problem.scale(), problem.softcap.map(f64::from));
    head.dot(i, &seen, scores);
    for (score, j) in scores.iter_mut().zip(seen.clone()) {
        *score *= scale;
        if let Some(cap) = softcap {
            *score = cap * (*score / cap).tanh();
        }
        if head.slope != 0.0 {
            *score -= head.slope * head.distance(i, j);
        }
    }
    if scores.iter().all(|score| *score == f64::NEG_INFINITY) {
        return f64::NEG_INFINITY;
    }
    let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - maximum).exp();
        sum += *score;
    }
    head.add_values(scores, &seen, out);
    out.iter_mut().for_each(|x| *x /= sum);
    maximum + sum.ln()
}

fn plain_row(
    problem: &Problem,
    head: &Head<f32>,
    i: usize,
    seen: Range<usize>,
    scores: &mut Vec<f32>,
    out: &mut [f64],
) -> f64 {
    let round = |x: f32| problem.dtype.round(f64::from(x)) as f32;
    let scale = problem.scale() as f32;
    head.dot(i, &seen, scores);
    for (score, j) in scores.iter_mut().zip(seen.clone()) {
        *score = round(*score * scale);
        if let Some(cap) = problem.softcap {
            *score = round(cap * (*score / cap).tanh());
        }
        if head.slope != 0.0 {
            *score = round(*score - head.slope as f32 * head.distance(i, j) as f32);
        }
    }
    if scores.iter().all(|score| *score == f32::NEG_INFINITY) {
        return f64::NEG_INFINITY;
    }
    let maximum = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - maximum).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|p| *p = round(*p / sum));
    let mut row = vec![0.0; out.len()];
    head.add_values(scores, &seen, &mut row);
    for (out, &x) in out.iter_mut().zip(&row) {
        *out = f64::from(round(x));
    }
    f64::from(maximum + sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::tests::any_spec;
    use crate::{Dtype, Mask, ProblemSpec};
    use proptest::prelude::*;

    /// Attention as the contract's sentences say it, element by element.
    fn by_definition(problem: &Problem, inputs: &Inputs, entry: usize, head: usize) -> HeadOutput {
        let (queries, keys) = problem.tokens(entry);
        let at = |tensor: &Tensor, token: usize, head: usize, column: usize| {
            let index = [entry, token, head, column];
            tensor.get(&index[usize::from(problem.varlen.is_some())..]).unwrap()
        };
        let kv_head = head / (problem.heads_q / problem.heads_kv);
        let offset = keys.len() as i64 - queries.len() as i64;
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for i in 0..queries.len() as i64 {
            let visible = (0..keys.len() as i64).filter(|j| {
                let Mask { left, right } = problem.mask;
                left.is_none_or(|left| i128::from(i + offset - j) <= left as i128)
                    && right.is_none_or(|right| i128::from(j - i - offset) <= right as i128)
            });
            let score = |j: i64| {
                let products = (0..problem.head_dim).map(|c| {
                    at(&inputs.q, queries.start + i as usize, head, c)
                        * at(&inputs.k, keys.start + j as usize, kv_head, c)
                });
                let score = problem.scale() * products.sum::<f64>();
                let capped = problem.softcap.map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh());
                capped - f64::from(problem.slope(entry, head)) * (i + offset - j).abs() as f64
            };
            let scores: Vec<(i64, f64)> = visible.map(|j| (j, score(j))).collect();
            let maximum = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s.1 - maximum).exp()).sum();
            for c in 0..problem.head_dim_v {
                let weighted = scores.iter().map(|(j, score)| {
                    (score - maximum).exp() / sum * at(&inputs.v, keys.start + *j as usize, kv_head, c)
                });
                out.push(weighted.sum());
            }
            lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { maximum + sum.ln() });
        }
        HeadOutput { entry, head, out, lse }
    }

    fn close(a: &[f64], b: &[f64], allowed: f64) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() <= allowed)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn the_reference_is_the_definition(spec in any_spec(), seed: u64) {
            let problem = spec.build().unwrap();
            let inputs = Inputs::randn(&problem, seed).unwrap();
            for head in reference(&problem, &inputs).unwrap() {
                let expected = by_definition(&problem, &inputs, head.entry, head.head);
                prop_assert!(close(&head.out, &expected.out, 1e-9));
                prop_assert!(close(&head.lse, &expected.lse, 1e-9));
            }
        }

        #[test]
        fn the_plain_algorithm_is_near(spec in any_spec(), seed: u64) {
            let problem = ProblemSpec { dtype: Dtype::F32, softmax_scale: None, ..spec }.build().unwrap();
            let inputs = Inputs::randn(&problem, seed).unwrap();
            let exact = reference(&problem, &inputs).unwrap();
            for (head, exact) in plain(&problem, &inputs).unwrap().iter().zip(exact) {
                prop_assert!(close(&head.out, &exact.out, 1e-4) && close(&head.lse, &exact.lse, 1e-4));
            }
        }
    }

    #[test]
    fn chosen_heads_are_those_of_the_whole() {
        let problem = ProblemSpec::new(2, 6, 9, 8).heads_kv(2).causal().build().unwrap();
        let inputs = Inputs::randn(&problem, 3).unwrap();
        let whole = reference(&problem, &inputs).unwrap();
        let chosen = reference_heads(&problem, &inputs, &[(1, 4), (0, 2)]).unwrap();
        assert_eq!(chosen, [whole[10].clone(), whole[2].clone()]);
        assert!(reference_heads(&problem, &inputs, &[(2, 0)]).is_err());
        assert_eq!(plain_heads(&problem, &inputs, &[(1, 5)]).unwrap()[0], plain(&problem, &inputs).unwrap()[11]);
    }

    #[test]
    fn a_nan_that_is_seen_shows() {
        let problem = ProblemSpec::new(1, 1, 3, 4).causal().build().unwrap();
        let drawn = Inputs::randn(&problem, 3).unwrap();
        let k = drawn.k.map(|index, x| if index[1] == 1 { f64::NAN } else { x }).unwrap();
        for compute in [reference, plain] {
            let out = &compute(&problem, &Inputs { k: k.clone(), ..drawn.clone() }).unwrap()[0].out;
            assert!(out[..4].iter().all(|x| x.is_finite()) && out[4..].iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn the_plain_algorithm_rounds_to_the_input_type() {
        for dtype in Dtype::ALL {
            let problem = ProblemSpec::new(1, 1, 64, 64).dtype(dtype).build().unwrap();
            let inputs = Inputs::randn(&problem, 3).unwrap();
            let exact = &reference(&problem, &inputs).unwrap()[0].out;
            let plain = &plain(&problem, &inputs).unwrap()[0].out;
            let error = plain.iter().zip(exact).map(|(p, e)| (p - e).abs()).fold(0.0, f64::max);
            assert!(plain.iter().all(|x| dtype.round(*x) == *x));
            assert!((0.05..4.0).contains(&(error / dtype.ulp(1.0))), "{dtype}: {error}");
        }
    }
}
