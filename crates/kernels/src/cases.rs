//! The cases that every generation and every backend must pass, as data: calls, and what must come out.
//!
//! A backend is a function from a call to its outputs. It fills the outputs with NaN before it runs, so that what it
//! does not write fails; the seed draws fresh inputs.
//!
//! ```
//! use kernels::{Dtype, Outputs, cases::CASES, reference};
//!
//! let mut backend = |problem: &_, inputs: &_| -> Result<Outputs, kernels::InputError> {
//!     Outputs::from_heads(problem, &reference(problem, inputs)?)
//! };
//! for run in CASES[0].runs(Dtype::F16, 1)? {
//!     assert!(run.verify(&mut backend)?.passed());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use safetensors::SafeTensors;

use crate::cache::{Append, Cache, Pages, Rotary, unseen_as_nan};
use crate::reference::{HeadOutput, plain, reference};
use crate::{
    Descales, Dtype, Feature, InputError, Inputs, Mask, Outputs, Problem, ProblemError, ProblemSpec, Tensor,
    TensorError, Verdict, check, check_exact, check_within,
};

/// One numbered case of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its number in the contract.
    pub number: u8,
    /// What it asks for.
    pub title: &'static str,
    build: fn(Dtype, u64) -> Runs,
}

impl Case {
    /// The case's calls in `dtype`, with inputs drawn from `seed`.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn runs(&self, dtype: Dtype, seed: u64) -> Result<Vec<Run>, CaseError> {
        (self.build)(dtype, seed)
    }
}

/// One call of a case.
#[derive(Clone, Debug)]
pub struct Run {
    /// What sets it apart from the case's other calls.
    pub label: &'static str,
    /// What is asked.
    pub problem: Problem,
    /// Of which tensors.
    pub inputs: Inputs,
    /// What must come out.
    pub expect: Expect,
}

/// What must come out of a call.
#[derive(Clone, Debug)]
pub enum Expect {
    /// These outputs, within one unit in the last place; lse as always.
    Exact(Vec<HeadOutput>),
    /// These outputs, within this; lse as always.
    Within(Vec<HeadOutput>, f64),
    /// The f64 reference, within the tolerance.
    Reference,
    /// This reference, known beforehand, within the tolerance.
    Known(Vec<HeadOutput>),
    /// The f64 reference within the tolerance, and exactly what the backend makes of this other call.
    SameAs(Box<(Problem, Inputs)>),
}

impl Run {
    /// The parts of the contract it needs: a kernel that does not cover one of them need not pass.
    pub fn features(&self) -> Vec<Feature> {
        let mut features = self.problem.features();
        features.extend(self.inputs.features());
        features
    }

    /// Runs the call and compares with what must come out, within a share of the largest element, whatever the case asks for.
    ///
    /// # Errors
    /// Those of [`Run::verify`].
    pub fn verify_relative<E>(
        &self,
        backend: &mut impl FnMut(&Problem, &Inputs) -> Result<Outputs, E>,
        share: f64,
    ) -> Result<Verdict, VerifyError<E>> {
        let (problem, inputs) = (&self.problem, &self.inputs);
        let outputs = backend(problem, inputs).map_err(VerifyError::Backend)?;
        let expected = match &self.expect {
            Expect::Exact(expected) | Expect::Within(expected, _) | Expect::Known(expected) => expected.clone(),
            Expect::Reference | Expect::SameAs(_) => reference(problem, inputs)?,
        };
        let largest = expected.iter().flat_map(|head| &head.out).fold(0.0, |largest: f64, x| largest.max(x.abs()));
        Ok(check_within(problem, &outputs, &expected, share * largest)?)
    }

    /// Runs the call and compares.
    ///
    /// # Errors
    /// When the backend refuses a call, or returns outputs that are not the problem's.
    pub fn verify<E>(
        &self,
        backend: &mut impl FnMut(&Problem, &Inputs) -> Result<Outputs, E>,
    ) -> Result<Verdict, VerifyError<E>> {
        let (problem, inputs) = (&self.problem, &self.inputs);
        let outputs = backend(problem, inputs).map_err(VerifyError::Backend)?;
        let reference = match &self.expect {
            Expect::Exact(expected) => return Ok(check_exact(problem, &outputs, expected)?),
            Expect::Within(expected, bound) => return Ok(check_within(problem, &outputs, expected, *bound)?),
            Expect::Known(reference) => reference.clone(),
            Expect::Reference | Expect::SameAs(_) => reference(problem, inputs)?,
        };
        let verdict = check(problem, &outputs, &reference, &plain(problem, inputs)?)?;
        match &self.expect {
            Expect::SameAs(other) if verdict.passed() => {
                let (other_problem, other_inputs) = &**other;
                let expected = backend(other_problem, other_inputs).map_err(VerifyError::Backend)?;
                Ok(check_exact(problem, &outputs, &expected.heads(other_problem)?)?)
            }
            _ => Ok(verdict),
        }
    }
}

/// A case that could not be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CaseError {
    /// Its problem is not allowed.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Its tensors cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Its tensors do not fit its problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The stored activations cannot be read.
    #[error("the stored activations have no readable tensor {name}")]
    Data {
        /// Which tensor.
        name: String,
    },
}

/// A call that brought nothing to compare.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError<E> {
    /// The backend refused or failed.
    #[error(transparent)]
    Backend(E),
    /// Its outputs are not the problem's.
    #[error(transparent)]
    Outputs(#[from] InputError),
}

type Runs = Result<Vec<Run>, CaseError>;

/// The cases, in the contract's order.
pub const CASES: [Case; 16] = [
    Case { number: 1, title: "one key: out is v", build: one_key },
    Case { number: 2, title: "packed sequences of one key, causal", build: packed_single_keys },
    Case { number: 3, title: "rows that see no key are 0 with lse -inf", build: rows_without_keys },
    Case { number: 4, title: "causal, aligned bottom right", build: causal_alignment },
    Case { number: 5, title: "constant rows of 1000", build: constant_rows },
    Case { number: 6, title: "a logit of -20000 beside a masked one", build: extreme_logits },
    Case { number: 7, title: "the first tiles of keys outside the window", build: skipped_tiles },
    Case { number: 8, title: "windows that mean causal, and the diagonal", build: equivalent_windows },
    Case { number: 9, title: "every row and column in its place", build: places },
    Case { number: 10, title: "values of 1 under slowly rising logits", build: rising_logits },
    Case { number: 11, title: "NaN where no query sees", build: invisible_nan },
    Case { number: 12, title: "strided inputs", build: strided },
    Case { number: 13, title: "GQA equals expanded heads", build: gqa },
    Case { number: 14, title: "scores far above the softcap", build: softcap },
    Case { number: 15, title: "real activations", build: real_activations },
    Case { number: 16, title: "keys and values in a cache", build: cached },
];

/// Head dimensions: odd, and the usual ones.
const HEAD_DIMS: [usize; 4] = [33, 32, 64, 128];

/// 100 queries by 228 keys: neither is a multiple of a tile, and both cross tile borders.
fn crossing(head_dim: usize, dtype: Dtype) -> ProblemSpec {
    ProblemSpec::new(1, 2, 100, head_dim).seqlen_k(228).dtype(dtype)
}

/// A call on these inputs.
fn call(label: &'static str, problem: Problem, inputs: Inputs, expect: Expect) -> Run {
    Run { label, problem, inputs, expect }
}

/// A call on normal inputs, compared with the reference.
fn random(label: &'static str, spec: ProblemSpec, seed: u64) -> Result<Run, CaseError> {
    let problem = spec.build()?;
    let inputs = Inputs::randn(&problem, seed)?;
    Ok(call(label, problem, inputs, Expect::Reference))
}

/// A call whose output is exactly `out(entry, head, row, column)`.
fn exact(
    label: &'static str,
    problem: Problem,
    inputs: Inputs,
    out: impl Fn(usize, usize, usize, usize) -> f64,
) -> Result<Run, CaseError> {
    let expected = known(&problem, &inputs, out)?;
    Ok(call(label, problem, inputs, Expect::Exact(expected)))
}

/// The outputs `out(entry, head, row, column)`, with the reference's lse.
fn known(
    problem: &Problem,
    inputs: &Inputs,
    out: impl Fn(usize, usize, usize, usize) -> f64,
) -> Result<Vec<HeadOutput>, InputError> {
    let dim = problem.head_dim_v;
    let mut expected = reference(problem, inputs)?;
    for HeadOutput { entry, head, out: elements, .. } in &mut expected {
        for (element, value) in elements.iter_mut().enumerate() {
            *value = out(*entry, *head, element / dim, element % dim);
        }
    }
    Ok(expected)
}

/// A call in which every query weighs the keys it sees alike, and key `j` has the value `j`: the output is the mean of
/// the visible indices, as the type holds them, which tells where they begin and end.
fn means(label: &'static str, spec: ProblemSpec) -> Result<Run, CaseError> {
    let problem = spec.build()?;
    let inputs = Inputs::of(
        &problem,
        Tensor::full(problem.dtype, &problem.q_shape(), 0.0)?,
        Tensor::full(problem.dtype, &problem.k_shape(), 1.0)?,
        Tensor::generate(problem.dtype, &problem.v_shape(), |index| index[1] as f64)?,
    )?;
    let means = known(&problem, &inputs, |entry, _, row, _| {
        let seen = problem.seen_keys(entry, row);
        let count = seen.len().max(1) as f64;
        seen.map(|key| problem.dtype.round(key as f64)).sum::<f64>() / count
    })?;
    Ok(call(label, problem, inputs, Expect::Known(means)))
}

/// What `v` stands for at an unpacked index. Each KV head has one query head.
fn value_at(inputs: &Inputs, index: [usize; 4]) -> f64 {
    v_descale(inputs, index[0], index[2]) * inputs.v.get(&index).unwrap_or(f64::NAN)
}

fn v_descale(inputs: &Inputs, entry: usize, kv_head: usize) -> f64 {
    inputs.descales.as_ref().map_or(1.0, |descales| descales.of(entry, kv_head)[2])
}

fn one_key(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for (label, seqlen_q) in [("one query", 1), ("100 queries", 100)] {
        for head_dim in HEAD_DIMS {
            let problem = ProblemSpec::new(2, 2, seqlen_q, head_dim).seqlen_k(1).dtype(dtype).build()?;
            let drawn = Inputs::randn(&problem, seed)?;
            let inputs = Inputs { q: drawn.q.map(|_, x| 8.0 * x)?, ..drawn };
            let v = inputs.clone();
            runs.push(exact(label, problem, inputs, |entry, head, _, column| value_at(&v, [entry, 0, head, column]))?);
        }
    }
    Ok(runs)
}

fn packed_single_keys(dtype: Dtype, seed: u64) -> Runs {
    let spec = ProblemSpec::packed(2, 32, vec![0, 76, 110, 256], vec![0, 1, 2, 3]).causal().dtype(dtype);
    let problem = spec.build()?;
    let inputs = Inputs::randn(&problem, seed)?;
    let (v, lengths) = (inputs.clone(), [76, 34, 146]);
    let run = exact("contract", problem, inputs, |entry, head, row, column| {
        let last = row + 1 == lengths[entry];
        let value = || v_descale(&v, entry, head) * v.v.get(&[entry, head, column]).unwrap_or(f64::NAN);
        if last { value() } else { 0.0 }
    })?;
    Ok(vec![run])
}

fn rows_without_keys(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let spec = ProblemSpec::new(1, 2, 5, head_dim).seqlen_k(2).dtype(dtype);
        let problem = spec.clone().causal().build()?;
        let drawn = Inputs::randn(&problem, seed)?;
        // Row 4 weighs both keys alike.
        let inputs = Inputs { q: drawn.q.map(|index, x| if index[1] == 4 { 0.0 } else { x })?, ..drawn };
        let v = inputs.clone();
        runs.push(exact("5 by 2", problem, inputs, |_, head, row, column| {
            let key = |j| value_at(&v, [0, j, head, column]);
            match row {
                4 => (key(0) + key(1)) / 2.0,
                3 => key(0),
                _ => 0.0,
            }
        })?);
        runs.push(random("5 by 2, normal", spec.clone().causal(), seed)?);
        runs.push(random("228 by 100", ProblemSpec { seqlen_q: 228, seqlen_k: 100, ..spec.clone() }.causal(), seed)?);
        let none = spec.seqlen_k(0).build()?;
        let inputs = Inputs::randn(&none, seed)?;
        runs.push(exact("no keys", none, inputs, |_, _, _, _| 0.0)?);
    }
    runs.push(random("no queries", ProblemSpec::new(1, 2, 0, 64).seqlen_k(5).dtype(dtype), seed)?);
    runs.push(random("no batch", ProblemSpec::new(0, 2, 5, 64).dtype(dtype), seed)?);
    Ok(runs)
}

fn causal_alignment(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let small = ProblemSpec::new(1, 1, 2, head_dim).seqlen_k(5).causal().dtype(dtype);
        let large = crossing(head_dim, dtype).causal();
        runs.push(means("2 by 5, means", small.clone())?);
        runs.push(means("100 by 228, means", large.clone())?);
        runs.push(random("2 by 5", small, seed)?);
        runs.push(random("100 by 228", large, seed)?);
    }
    Ok(runs)
}

fn constant_rows(dtype: Dtype, _: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        for (label, mask) in [("full", Mask::FULL), ("causal", Mask::CAUSAL)] {
            let problem = crossing(head_dim, dtype).mask(mask).build()?;
            let value = if dtype.is_scaled() { 100.0 } else { 1000.0 };
            let constant = |shape: Vec<usize>| Tensor::full(dtype, &shape, value);
            let (q, k, v) = (constant(problem.q_shape())?, constant(problem.k_shape())?, constant(problem.v_shape())?);
            let inputs = Inputs::of(&problem, q, k, v)?;
            runs.push(exact(label, problem, inputs, |_, _, _, _| dtype.round(value))?);
        }
    }
    Ok(runs)
}

fn extreme_logits(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let spec = ProblemSpec::new(1, 2, 2, head_dim).causal().softmax_scale(1.0).dtype(dtype);
        let problem = spec.build()?;
        // Query 0 sees a logit of -20000 alone; query 1 sees it and one of 20000.
        let first = |index: &[usize], value: f64| if index[3] == 0 { value } else { 0.0 };
        let inputs = Inputs::of(
            &problem,
            Tensor::generate(dtype, &problem.q_shape(), |index| first(index, -200.0))?,
            Tensor::generate(dtype, &problem.k_shape(), |index| first(index, [100.0, -100.0][index[1]]))?,
            Tensor::randn(dtype, &problem.v_shape(), seed)?,
        )?;
        let v = inputs.clone();
        runs.push(exact("contract", problem, inputs, |_, head, row, column| value_at(&v, [0, row, head, column]))?);
    }
    Ok(runs)
}

fn skipped_tiles(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let cross = crossing(head_dim, dtype).mask(Mask::window(10, 0));
        let square = ProblemSpec::new(1, 2, 228, head_dim).dtype(dtype).mask(Mask::window(8, 3));
        runs.push(means("100 by 228, means", cross.clone())?);
        runs.push(means("228 by 228, means", square.clone())?);
        runs.push(random("100 by 228", cross, seed)?);
        runs.push(random("228 by 228", square, seed)?);
    }
    Ok(runs)
}

fn equivalent_windows(dtype: Dtype, seed: u64) -> Runs {
    const SEQLEN: usize = 100;
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let spec = ProblemSpec::new(1, 2, SEQLEN, head_dim).dtype(dtype);
        let causal = spec.clone().causal().build()?;
        let inputs = Inputs::randn(&causal, seed)?;
        for (label, left) in [("(unbounded, 0)", None), ("(S, 0)", Some(SEQLEN)), ("(S - 1, 0)", Some(SEQLEN - 1))] {
            let problem = spec.clone().mask(Mask { left, right: Some(0) }).build()?;
            let same = Expect::SameAs(Box::new((causal.clone(), inputs.clone())));
            runs.push(call(label, problem, inputs.clone(), same));
        }
        let diagonal = spec.mask(Mask::window(0, 0)).build()?;
        let v = inputs.clone();
        runs.push(exact("(0, 0)", diagonal, inputs, |_, head, row, column| value_at(&v, [0, row, head, column]))?);
    }
    Ok(runs)
}

/// A value by its key and column.
type Value = fn(usize, usize) -> usize;

/// One constant for each index to 227: the index itself, or, where the type has not as many integers, its numbers from 0 up,
/// and from there down.
fn constant(dtype: Dtype, index: usize) -> f64 {
    /// Positive numbers of e4m3.
    const POSITIVE: usize = 126;
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => index as f64,
        Dtype::E4m3 if index > POSITIVE => -constant(dtype, index - POSITIVE),
        Dtype::E4m3 => float8::F8E4M3::from_bits(index as u8).to_f64(),
    }
}

fn places(dtype: Dtype, _: u64) -> Runs {
    let mut runs = Vec::new();
    for (head_dim, head_dim_v) in HEAD_DIMS.map(|dim| (dim, dim)).into_iter().chain([(64, 96), (128, 40)]) {
        // A key is its index in bits of +1 and -1, over and over; a query is the key it looks for. At this scale the
        // probability of every other key is 0.
        let code = |index: usize, column: usize| if index >> (column % 8) & 1 == 1 { 1.0 } else { -1.0 };
        let target = |row: usize| (7 * row + 3) % 228;
        let values: [(&str, Value); 2] =
            [("a constant per column", |_, column| column), ("a constant per row", |key, _| key)];
        for (label, value) in values {
            let problem = crossing(head_dim, dtype).head_dim_v(head_dim_v).softmax_scale(64.0).build()?;
            let value = |key, column| constant(dtype, value(key, column));
            let inputs = Inputs::of(
                &problem,
                Tensor::generate(dtype, &problem.q_shape(), |index| code(target(index[1]), index[3]))?,
                Tensor::generate(dtype, &problem.k_shape(), |index| code(index[1], index[3]))?,
                Tensor::generate(dtype, &problem.v_shape(), |index| value(index[1], index[3]))?,
            )?;
            runs.push(exact(label, problem, inputs, |_, _, row, column| value(target(row), column))?);
        }
    }
    Ok(runs)
}

fn rising_logits(dtype: Dtype, _: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let problem = crossing(head_dim, dtype).softmax_scale(1.0).build()?;
        let first = |index: &[usize], value: f64| if index[3] == 0 { value } else { 0.0 };
        let inputs = Inputs::of(
            &problem,
            Tensor::generate(dtype, &problem.q_shape(), |index| first(index, 1.0))?,
            Tensor::generate(dtype, &problem.k_shape(), |index| first(index, index[1] as f64 / 32.0))?,
            Tensor::full(dtype, &problem.v_shape(), 1.0)?,
        )?;
        let ones = known(&problem, &inputs, |_, _, _, _| 1.0)?;
        let expect = match dtype {
            // The output shows the rounding of its sums: over 228 keys, each is off by at most 228 units of 2^-24.
            Dtype::F32 => Expect::Within(ones, 228.0 * 2f64.powi(-24)),
            Dtype::F16 | Dtype::Bf16 => Expect::Exact(ones),
            // The products with values take rounded probabilities, the sums that they are divided by those that are not.
            Dtype::E4m3 => Expect::Within(ones, 2f64.powi(-4)),
        };
        runs.push(call("ones", problem, inputs, expect));
    }
    Ok(runs)
}

fn invisible_nan(dtype: Dtype, seed: u64) -> Runs {
    const TOKENS: usize = 300;
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let spec = ProblemSpec { batch: 2, ..crossing(head_dim, dtype) };
        for (label, batch) in [("beyond the only sequence", 1), ("beyond each sequence", 2)] {
            let problem = ProblemSpec { batch, ..spec.clone() }.build()?;
            let buffers = ProblemSpec { seqlen_k: TOKENS, ..problem.clone().into_spec() }.build()?;
            let drawn = Inputs::randn(&buffers, seed)?;
            let ended_by = |filler: f64| -> Result<Inputs, TensorError> {
                let end = |t: &Tensor| t.map(|i, x| if i[1] < 228 { x } else { filler })?.narrow(1, 0, 228);
                Ok(Inputs { k: end(&drawn.k)?, v: end(&drawn.v)?, ..drawn.clone() })
            };
            let same = Expect::SameAs(Box::new((problem.clone(), ended_by(0.0)?)));
            runs.push(call(label, problem, ended_by(f64::NAN)?, same));
        }
        // The first query's window begins at key 118.
        let problem = spec.mask(Mask::window(10, 0)).build()?;
        let drawn = Inputs::randn(&problem, seed)?;
        let begun_by = |filler: f64| -> Result<Inputs, TensorError> {
            let begin = |t: &Tensor| t.map(|i, x| if i[1] < 118 { filler } else { x });
            Ok(Inputs { k: begin(&drawn.k)?, v: begin(&drawn.v)?, ..drawn.clone() })
        };
        let same = Expect::SameAs(Box::new((problem.clone(), begun_by(0.0)?)));
        runs.push(call("before the window", problem, begun_by(f64::NAN)?, same));
    }
    Ok(runs)
}

fn strided(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let problem = ProblemSpec { batch: 2, ..crossing(head_dim, dtype) }.build()?;
        let randn = |shape: [usize; 4], stream| Tensor::randn(dtype, &shape, seed.wrapping_add(stream));
        let q = randn([2, 100, 2, head_dim], 0)?;
        let layouts = Inputs::of(
            &problem,
            q.clone(),
            randn([2, 456, 2, head_dim], 1)?.step_by(1, 2)?,
            randn([2, 2, 228, head_dim], 2)?.transpose(1, 2)?,
        )?;
        let expanded = Inputs::of(
            &problem,
            q,
            randn([2, 228, 1, head_dim], 3)?.expand(2, 2)?,
            randn([2, 228, 1, head_dim], 4)?.expand(2, 2)?,
        )?;
        for (label, inputs) in [("every second key, values by head", layouts), ("an expanded head", expanded)] {
            let (q, k, v) = (inputs.q.contiguous()?, inputs.k.contiguous()?, inputs.v.contiguous()?);
            let copies = Inputs { q, k, v, descales: inputs.descales.clone(), new: None };
            let same = Expect::SameAs(Box::new((problem.clone(), copies)));
            runs.push(call(label, problem.clone(), inputs, same));
        }
    }
    Ok(runs)
}

fn gqa(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for (label, ratio, head_dim) in [("3 to 1", 3, 33), ("4 to 1", 4, 64), ("7 to 1", 7, 32), ("4 to 1", 4, 128)] {
        let expanded = ProblemSpec { heads_q: 2 * ratio, heads_kv: 2 * ratio, ..crossing(head_dim, dtype) }.build()?;
        let problem = expanded.clone().into_spec().heads_kv(2).build()?;
        let inputs = Inputs::randn(&problem, seed)?;
        let (k, v) = (inputs.k.repeat_each(2, ratio)?, inputs.v.repeat_each(2, ratio)?);
        let repeat = |descale: &Tensor| descale.repeat_each(1, ratio);
        let descales = match &inputs.descales {
            Some(Descales { q, k, v }) => Some(Descales { q: repeat(q)?, k: repeat(k)?, v: repeat(v)? }),
            None => None,
        };
        let copies = Inputs { q: inputs.q.clone(), k, v, descales, new: None };
        runs.push(call(label, problem, inputs, Expect::SameAs(Box::new((expanded, copies)))));
    }
    Ok(runs)
}

fn softcap(dtype: Dtype, seed: u64) -> Runs {
    let mut runs = Vec::new();
    for head_dim in HEAD_DIMS {
        let problem = crossing(head_dim, dtype).softcap(30.0).build()?;
        let drawn = Inputs::randn(&problem, seed)?;
        let inputs = Inputs { q: drawn.q.map(|_, x| 100.0 * x)?, ..drawn };
        runs.push(call("cap 30", problem, inputs, Expect::Reference));
    }
    Ok(runs)
}

/// A layer's q, k, v and (with lse) o, one file each; `tests/data/minilm/README.md` says what they are.
struct Layer {
    name: &'static str,
    q: &'static [u8],
    k: &'static [u8],
    v: &'static [u8],
    o: &'static [u8],
}

macro_rules! layer {
    ($name:literal) => {
        Layer {
            name: $name,
            q: include_bytes!(concat!("../tests/data/minilm/", $name, ".q.safetensors")),
            k: include_bytes!(concat!("../tests/data/minilm/", $name, ".k.safetensors")),
            v: include_bytes!(concat!("../tests/data/minilm/", $name, ".v.safetensors")),
            o: include_bytes!(concat!("../tests/data/minilm/", $name, ".o.safetensors")),
        }
    };
}

static LAYERS: [Layer; 2] = [layer!("layer0"), layer!("layer5")];

impl Layer {
    /// A stored f32 tensor.
    fn tensor(&self, file: &[u8], tensor: &str) -> Result<Tensor, CaseError> {
        let name = format!("{}.{tensor}", self.name);
        let files = SafeTensors::deserialize(file).ok();
        let stored = files.as_ref().and_then(|files| files.tensor(&name).ok());
        let Some(stored) = stored else { return Err(CaseError::Data { name }) };
        Ok(Tensor::from_bytes(Dtype::F32, stored.shape(), stored.data().to_vec())?)
    }

    /// `[1, 384, 12, 32]` in `dtype`.
    fn tokens_first(&self, file: &[u8], tensor: &str, dtype: Dtype) -> Result<Tensor, CaseError> {
        Ok(self.tensor(file, tensor)?.transpose(1, 2)?.to_dtype(dtype)?)
    }

    fn inputs(&self, problem: &Problem) -> Result<Inputs, CaseError> {
        let tensor = |file, name| self.tokens_first(file, name, problem.dtype);
        Ok(Inputs::of(problem, tensor(self.q, "q")?, tensor(self.k, "k")?, tensor(self.v, "v")?)?)
    }

    /// The stored result.
    fn outputs(&self) -> Result<Outputs, CaseError> {
        Ok(Outputs { out: self.tokens_first(self.o, "o", Dtype::F32)?, lse: self.tensor(self.o, "lse")? })
    }
}

fn real_activations(dtype: Dtype, _: u64) -> Runs {
    let mut runs = Vec::new();
    for layer in &LAYERS {
        let problem = ProblemSpec::new(1, 12, 384, 32).dtype(dtype).build()?;
        // What is stored is the result of the f32 inputs.
        let expect = match dtype {
            Dtype::F32 => Expect::Known(layer.outputs()?.heads(&problem)?),
            Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 => Expect::Reference,
        };
        let inputs = layer.inputs(&problem)?;
        runs.push(call(layer.name, problem, inputs, expect));
    }
    Ok(runs)
}

/// Each entry has its own number of keys: none, all that there is room for, up to a page's border and past it. They are in rows
/// of their own, in rows that are named, or in pages; what is new is appended before, turned or not.
fn cached(dtype: Dtype, seed: u64) -> Runs {
    const CAPACITY: usize = 300;
    let seqlens = |last| vec![0, 256, last];
    let rows = || Cache { rows: 3, seqlens: Some(seqlens(300)), ..Cache::default() };
    let pages = |size| {
        let of_entry = CAPACITY.div_ceil(size);
        let rows = 3 * of_entry + 2;
        let table = (0..3 * of_entry).map(|index| (rows - 1 - index) as i32).collect();
        Cache { rows, seqlens: Some(seqlens(257)), pages: Some(Pages { size, table }), ..Cache::default() }
    };
    let append = |cache: Cache, seqlen, rotary: Option<(usize, bool)>| {
        let rotary = rotary.map(|(dim, interleaved)| Rotary { dim, interleaved, positions: CAPACITY + 20 });
        Cache { append: Some(Append { seqlen, rotary }), ..cache }
    };
    let named = || Cache { rows: 5, seqlens: Some(seqlens(77)), batch_idx: Some(vec![4, 0, 2]), ..Cache::default() };
    let padded = |cache| Cache { leftpad: Some(vec![0, 65, 20]), ..cache };
    let caches = [
        ("rows", 1, rows()),
        ("rows", 70, rows()),
        ("named rows", 5, named()),
        ("rows with places before the first key", 5, padded(rows())),
        ("pages of 1", 5, pages(1)),
        ("pages of 16", 1, pages(16)),
        ("pages of 64", 70, pages(64)),
        ("pages of 100", 3, pages(100)),
        ("pages of 256", 1, pages(256)),
        ("a key appended to rows", 1, append(named(), 1, Some((64, false)))),
        ("keys appended to rows with places before the first key", 4, append(padded(named()), 4, Some((32, false)))),
        ("keys appended to pages", 20, append(pages(16), 20, None)),
        ("keys appended to pages, pairs of neighbours turned", 5, append(pages(64), 7, Some((32, true)))),
    ];
    let mut runs = Vec::new();
    for (index, (label, seqlen_q, cache)) in caches.into_iter().enumerate() {
        for (mask, head_dim) in [(Mask::FULL, 64), (Mask::CAUSAL, 128), (Mask::window(60, 0), 72)] {
            let (mut spec, heads_kv) = (ProblemSpec::new(3, 4, CAPACITY, head_dim), [1, 4, 2][index % 3]);
            spec.seqlen_q = seqlen_q;
            let problem = spec.heads_kv(heads_kv).mask(mask).dtype(dtype).cache(cache.clone()).build()?;
            let inputs = unseen_as_nan(&problem, Inputs::randn(&problem, seed)?)?;
            runs.push(call(label, problem, inputs, Expect::Reference));
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Outcome = Result<Outputs, InputError>;

    fn right(problem: &Problem, inputs: &Inputs) -> Outcome {
        Outputs::from_heads(problem, &reference(problem, inputs)?)
    }

    /// The number of a case's calls that a backend fails.
    fn failures(number: usize, dtype: Dtype, mut backend: impl FnMut(&Problem, &Inputs) -> Outcome) -> usize {
        let runs = CASES[number - 1].runs(dtype, 5).unwrap();
        runs.iter().filter(|run| !run.verify(&mut backend).unwrap().passed()).count()
    }

    #[test]
    fn the_reference_passes_every_case() {
        for case in CASES {
            for dtype in Dtype::ALL {
                for run in case.runs(dtype, 1).unwrap() {
                    let verdict = run.verify(&mut right).unwrap();
                    assert!(verdict.passed(), "case {} {} {}: {verdict:?}", case.number, run.label, run.problem);
                }
            }
        }
    }

    #[test]
    fn the_plain_algorithm_passes_what_is_not_exact() {
        // Case 5 is: probabilities divided before the sum over keys, as the plain algorithm does, miss it by 34 ulp.
        for case in CASES.iter().filter(|case| case.number != 5) {
            for run in case.runs(Dtype::F32, 2).unwrap() {
                let mut backend =
                    |problem: &Problem, inputs: &Inputs| Outputs::from_heads(problem, &plain(problem, inputs)?);
                let verdict = run.verify(&mut backend).unwrap();
                assert!(verdict.passed(), "case {} {} {}: {verdict:?}", case.number, run.label, run.problem);
            }
        }
    }

    #[test]
    fn outputs_that_nothing_wrote_fail() {
        for case in CASES {
            for run in case.runs(Dtype::F16, 3).unwrap() {
                let mut backend = |problem: &Problem, _: &Inputs| Outputs::nan(problem).map_err(InputError::from);
                let empty = run.problem.total_q() == 0;
                assert_eq!(run.verify(&mut backend).unwrap().passed(), empty, "case {} {}", case.number, run.label);
            }
        }
    }

    /// The backend that computes another problem than it is asked.
    fn instead(change: impl Fn(ProblemSpec) -> ProblemSpec) -> impl FnMut(&Problem, &Inputs) -> Outcome {
        move |problem, inputs| {
            let changed = change(problem.clone().into_spec()).build().unwrap();
            Outputs::from_heads(problem, &reference(&changed, inputs)?)
        }
    }

    #[test]
    fn a_wrong_mask_fails() {
        for dtype in Dtype::ALL {
            let top_left = |spec: ProblemSpec| match spec.mask {
                Mask::CAUSAL => {
                    let behind = spec.seqlen_q as i64 - spec.seqlen_k as i64;
                    spec.mask(if behind < 0 { Mask::window(-1, 0) } else { Mask::FULL })
                }
                _ => spec,
            };
            assert!(failures(3, dtype, instead(top_left)) > 0);
            let ignored = |spec: ProblemSpec| spec.mask(Mask::FULL);
            for number in [2, 3, 4, 6, 7, 8, 11] {
                assert!(failures(number, dtype, instead(ignored)) > 0, "case {number}");
            }
            let one_off = |spec: ProblemSpec| {
                let mask = Mask { right: spec.mask.right.map(|right| right + 1), ..spec.mask };
                spec.mask(mask)
            };
            for number in [3, 4, 6, 7, 8] {
                assert!(failures(number, dtype, instead(one_off)) > 0, "case {number}");
            }
        }
    }

    #[test]
    fn an_ignored_softcap_or_scale_fails() {
        for dtype in Dtype::ALL {
            assert!(failures(14, dtype, instead(|spec| ProblemSpec { softcap: None, ..spec })) > 0);
            let scale = |spec: ProblemSpec| spec.softmax_scale(0.2);
            assert!(failures(15, dtype, instead(scale)) > 0);
        }
    }

    #[test]
    fn exchanged_rows_columns_and_heads_fail() {
        let exchanged = |dimension: usize| {
            move |problem: &Problem, inputs: &Inputs| {
                let outputs = right(problem, inputs)?;
                let shape = outputs.out.shape().to_vec();
                let out = outputs.out.map(|index, _| {
                    let mut other = index.to_vec();
                    let exchanged = other[dimension] ^ 1;
                    other[dimension] = if exchanged < shape[dimension] { exchanged } else { other[dimension] };
                    outputs.out.get(&other).unwrap_or(f64::NAN)
                })?;
                Ok(Outputs { out, lse: outputs.lse })
            }
        };
        for dtype in Dtype::ALL {
            assert!(failures(9, dtype, exchanged(1)) > 0);
            assert!(failures(9, dtype, exchanged(3)) > 0);
            assert!(failures(13, dtype, exchanged(2)) > 0);
        }
    }

    #[test]
    fn ignored_strides_fail() {
        let packed = |problem: &Problem, inputs: &Inputs| {
            let dense = |t: &Tensor| {
                let bytes = t.storage().iter().copied().cycle().take(t.len() * t.dtype().bytes()).collect();
                Tensor::from_bytes(t.dtype(), t.shape(), bytes)
            };
            right(
                problem,
                &Inputs { q: dense(&inputs.q)?, k: dense(&inputs.k)?, v: dense(&inputs.v)?, descales: None, new: None },
            )
        };
        assert_eq!(failures(12, Dtype::F32, packed), 8);
    }

    #[test]
    fn the_reference_matches_the_stored_activations() {
        for layer in &LAYERS {
            let problem = ProblemSpec::new(1, 12, 384, 32).build().unwrap();
            let inputs = layer.inputs(&problem).unwrap();
            let stored = layer.outputs().unwrap();
            let verdict = check_within(&problem, &stored, &reference(&problem, &inputs).unwrap(), 1e-6).unwrap();
            assert!(verdict.passed() && verdict.max_lse_error < 1e-5, "{verdict:?}");
            assert!(layer.name != "layer0" || stored.lse.to_f64().into_iter().fold(0.0, f64::max) > 70.0);
        }
    }

    #[test]
    fn a_case_says_what_it_needs() {
        let needs = |number: usize| {
            let mut features = Vec::new();
            for run in CASES[number - 1].runs(Dtype::F32, 1).unwrap() {
                features.extend(run.features());
            }
            features.sort();
            features.dedup();
            features
        };
        assert_eq!(needs(2), [Feature::Causal, Feature::CrossLength, Feature::Varlen]);
        assert_eq!(needs(12), [Feature::CrossLength, Feature::Strided]);
        assert_eq!(needs(13), [Feature::Gqa, Feature::CrossLength]);
        assert_eq!(needs(14), [Feature::CrossLength, Feature::Softcap]);
        assert!(needs(15).is_empty());
    }
}
