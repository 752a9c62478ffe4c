//! Random small problems, stratified: each kind of mask, head dimension, length, layout, sharing of heads and score comes as often
//! as its share says in every stretch of problems, and which meet in a problem is drawn.

use std::collections::BTreeMap;
use std::fmt;

use kernels::cache::unseen_as_nan;
use kernels::cases::{CaseError, Expect, Run};
use kernels::{Append, Cache, Dtype, Inputs, Mask, Pages, ProblemSpec, Rotary, Tensor, TensorError};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Checked, Outcome};

/// What a random problem was drawn as: a kind of each thing that varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits([&'static str; DIMENSIONS.len()]);

/// What varies, each with its kinds; one that is listed twice comes twice as often.
const DIMENSIONS: [(&str, &[&str]); 8] = [
    ("mask", &["full", "causal", "causal", "left window", "two-sided window"]),
    ("head_dim", &["multiple of 8", "multiple of 8", "odd", "over 128", "head_dim_v differs"]),
    ("lengths", &["at tile borders", "off tile borders", "off tile borders", "few queries", "few keys", "none"]),
    ("strides", &["contiguous", "head by head", "padded rows", "every second row", "expanded head"]),
    ("batch", &["equal lengths", "equal lengths", "packed"]),
    ("heads", &["one each", "shared by 2", "shared by 3", "shared by 7"]),
    ("score", &["plain", "plain", "plain", "scale", "softcap", "alibi"]),
    (
        "cache",
        &[
            "none",
            "none",
            "none",
            "none",
            "none",
            "none",
            "lengths",
            "named rows",
            "pages",
            "pages",
            "appended",
            "turned",
        ],
    ),
];

impl Traits {
    /// Of the problem of that number: the kinds of a dimension are dealt like cards, so that each stretch of as many problems
    /// as it has kinds has all of them.
    fn draw(seed: u64, number: u32) -> Traits {
        let mut dimension = 0u64;
        Traits(DIMENSIONS.map(|(_, kinds)| {
            let deal = u64::from(number) / kinds.len() as u64;
            let mut rng = ChaCha8Rng::seed_from_u64(seed ^ deal << 8 ^ dimension << 56);
            dimension += 1;
            let mut cards: Vec<usize> = (0..kinds.len()).collect();
            cards.shuffle(&mut rng);
            kinds[cards[number as usize % kinds.len()]]
        }))
    }

    fn of(&self, dimension: &str) -> &'static str {
        let index = DIMENSIONS.iter().position(|(name, _)| *name == dimension);
        index.map_or("", |index| self.0[index])
    }
}

/// Of how many random calls of each kind what came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Passed, failed and not covered, by the dimension's place and the kind.
    counts: BTreeMap<(usize, &'static str), [usize; 3]>,
}

impl Coverage {
    /// Counts a call; one of the contract's is not.
    pub fn count(&mut self, one: &Checked) {
        let Some(Traits(kinds)) = one.traits else { return };
        let outcome = match one.outcome {
            Outcome::Passed => 0,
            Outcome::Failed(_) => 1,
            Outcome::NotCovered => 2,
        };
        let dtypes = Dtype::ALL.map(|dtype| (dtype, ["f32", "f16", "bf16", "e4m3"]));
        let dtype = dtypes.iter().position(|(dtype, _)| *dtype == one.problem.dtype).map_or("", |i| dtypes[i].1[i]);
        self.counts.entry((0, dtype)).or_default()[outcome] += 1;
        for (index, kind) in kinds.into_iter().enumerate() {
            self.counts.entry((index + 1, kind)).or_default()[outcome] += 1;
        }
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }
}

impl fmt::Display for Coverage {
    /// A line for each dimension: its kinds with the calls that ran, of those drawn.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = std::iter::once("dtype").chain(DIMENSIONS.iter().map(|(name, _)| *name));
        for (index, name) in names.enumerate() {
            let kinds = self.counts.range((index, "")..(index + 1, ""));
            let kinds = kinds.map(|((_, kind), [passed, failed, not_covered])| {
                let failures = if *failed > 0 { format!(", {failed} FAILED") } else { String::new() };
                format!("{kind} {}/{}{failures}", passed + failed, passed + failed + not_covered)
            });
            writeln!(f, "  {name:<9} {}", kinds.collect::<Vec<_>>().join("; "))?;
        }
        Ok(())
    }
}

/// The problem of that number under a seed, and what it was drawn as.
pub(super) fn random(dtype: Dtype, seed: u64, number: u32) -> Result<(Run, Traits), CaseError> {
    let seed = seed.wrapping_mul(3).wrapping_add(dtype as u64);
    let traits = Traits::draw(seed, number);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(u64::from(number) + 1);
    let rng = &mut rng;

    let group = match traits.of("heads") {
        "one each" => 1,
        "shared by 2" => 2,
        "shared by 3" => 3,
        _ => 7,
    };
    let heads_kv: usize = rng.random_range(1..=if group > 3 { 1 } else { 2 });
    let (head_dim, head_dim_v) = head_dims(rng, traits.of("head_dim"));
    let packed = traits.of("batch") == "packed";
    let batch = rng.random_range(1..=if packed { 4 } else { 2 });
    let mut lengths: Vec<(usize, usize)> = (0..batch).map(|_| lengths(rng, traits.of("lengths"))).collect();
    if packed && batch > 1 && rng.random_range(0..3) == 0 {
        // A sequence without queries, or without keys, among others.
        let empty = rng.random_range(0..batch);
        if rng.random() { lengths[empty].0 = 0 } else { lengths[empty].1 = 0 }
    }
    let mut spec = if packed {
        let sums = |of: fn(&(usize, usize)) -> usize| {
            let mut sum = 0;
            std::iter::once(0)
                .chain(lengths.iter().map(|one| {
                    sum += of(one);
                    sum as i32
                }))
                .collect()
        };
        ProblemSpec::packed(heads_kv * group, head_dim, sums(|one| one.0), sums(|one| one.1))
    } else {
        let (seqlen_q, seqlen_k) = lengths[0];
        ProblemSpec { seqlen_q, ..ProblemSpec::new(batch, heads_kv * group, seqlen_k, head_dim) }
    };
    spec = spec.heads_kv(heads_kv).head_dim_v(head_dim_v).dtype(dtype);
    let mut side = |most: usize| Some(rng.random_range(0..=most));
    spec = match traits.of("mask") {
        "causal" => spec.causal(),
        "left window" => {
            let left = side(200);
            spec.mask(Mask { left, right: Some(0) })
        }
        "two-sided window" => {
            let (left, right) = (side(150), side(80));
            spec.mask(Mask { left, right })
        }
        _ => spec,
    };
    spec = match traits.of("score") {
        "scale" => spec.softmax_scale(rng.random_range(0.02..0.5)),
        "softcap" => spec.softcap(rng.random_range(1.0..30.0)),
        "alibi" => {
            let slopes = if rng.random() { 1 } else { spec.batch.max(1) } * spec.heads_q;
            spec.alibi_slopes((0..slopes).map(|_| rng.random_range(0.0..0.5)).collect())
        }
        _ => spec,
    };
    spec.cache = cache(rng, &spec, traits.of("cache"));
    let problem = spec.build()?;
    let Inputs { q, k, v, new, descales } = unseen_as_nan(&problem, Inputs::randn(&problem, rng.random())?)?;
    // Rows that are written are one each.
    let laid =
        Some(traits.of("strides")).filter(|&laid| new.is_none() || laid != "expanded head").unwrap_or("contiguous");
    // An expanded head stands for KV heads that are one; queries of several heads are laid like keys of others.
    let inputs = Inputs {
        q: if laid == "expanded head" { q } else { lay(q, laid, rng)? },
        k: lay(k, laid, rng)?,
        v: if rng.random() { lay(v, laid, rng)? } else { v },
        new,
        descales,
    };
    Ok((Run { label: "random", problem, inputs, expect: Expect::Reference }, traits))
}

/// A cache of as many keys for each entry as it has room for, or fewer; of a packed batch, pages.
fn cache(rng: &mut ChaCha8Rng, spec: &ProblemSpec, kind: &str) -> Option<Cache> {
    if kind == "none" {
        return None;
    }
    let (batch, capacity, packed) = (spec.batch, spec.seqlen_k, spec.varlen.is_some());
    let append = (!packed && ["appended", "turned"].contains(&kind)).then(|| {
        let dim = 2 * rng.random_range(0..=spec.head_dim / 2);
        let positions = capacity.max(1) + rng.random_range(0..9);
        let rotary = Rotary { dim, interleaved: rng.random(), positions };
        let most = if rng.random() { 1 } else { 70 };
        let seqlen = rng.random_range(0..=capacity.min(most));
        Append { seqlen, rotary: Some(rotary).filter(|rotary| kind == "turned" && rotary.dim > 0) }
    });
    let most = (capacity - append.map_or(0, |append| append.seqlen)) as i32;
    let mut length = || match rng.random_range(0..4) {
        0 => [0, most, most.min(64)][rng.random_range(0..3)],
        _ => rng.random_range(0..=most),
    };
    let seqlens = (!packed).then(|| (0..batch).map(|_| length()).collect());
    let mut cache = Cache { rows: batch, seqlens, append, ..Cache::default() };
    if kind == "named rows" && !packed {
        cache.rows = batch + rng.random_range(0..3);
        let mut rows: Vec<i32> = (0..cache.rows as i32).collect();
        rows.shuffle(rng);
        rows.truncate(batch);
        cache.batch_idx = Some(rows);
        if let Some(seqlens) = cache.seqlens.as_ref().filter(|_| rng.random()) {
            cache.leftpad = Some(seqlens.iter().map(|&length| rng.random_range(0..=length)).collect());
        }
    } else if packed || kind == "pages" || kind != "lengths" && rng.random() {
        let size = [1, 7, 16, 16, 32, 48, 64, 100, 128, 256][rng.random_range(0..10)];
        let of_entry = capacity.div_ceil(size) + rng.random_range(0..2);
        cache.rows = batch * of_entry + rng.random_range(0..3);
        let mut table: Vec<i32> = (0..cache.rows as i32).collect();
        table.shuffle(rng);
        table.truncate(batch * of_entry);
        cache.pages = Some(Pages { size, table });
    }
    Some(cache)
}

fn head_dims(rng: &mut ChaCha8Rng, kind: &str) -> (usize, usize) {
    let mut of = |dims: &[usize]| dims[rng.random_range(0..dims.len())];
    let eights = [8, 16, 24, 32, 40, 64, 72, 80, 96, 128];
    match kind {
        "odd" => {
            let dim = of(&[1, 3, 7, 33, 45, 50, 65, 99, 127]);
            (dim, dim)
        }
        "over 128" => {
            let dim = of(&[136, 160, 192, 193, 224, 256]);
            (dim, dim)
        }
        "head_dim_v differs" => (of(&eights), of(&[1, 8, 20, 33, 64, 96, 128])),
        _ => {
            let dim = of(&eights);
            (dim, dim)
        }
    }
}

/// Queries and keys: of a tile or three.
fn lengths(rng: &mut ChaCha8Rng, kind: &str) -> (usize, usize) {
    const TILES: [usize; 6] = [32, 64, 80, 96, 128, 192];
    let mut border = |off: bool| {
        let tile = TILES[rng.random_range(0..TILES.len())];
        let length = tile * rng.random_range(1..=if tile > 100 { 1 } else { 3 });
        match off {
            true => length + rng.random_range(0..=tile) - tile / 2,
            false => length,
        }
    };
    match kind {
        "at tile borders" => (border(false), border(false)),
        "few queries" => {
            let keys = border(true) + 100;
            (rng.random_range(1..=5), keys)
        }
        "few keys" => {
            let queries = border(true);
            (queries, rng.random_range(1..=5))
        }
        "none" => {
            let other = border(true);
            if rng.random() { (other, 0) } else { (0, other) }
        }
        _ => (border(true), border(true)),
    }
}

/// The same elements elsewhere, or for an expanded head those of the first for all.
fn lay(tensor: Tensor, kind: &str, rng: &mut ChaCha8Rng) -> Result<Tensor, TensorError> {
    let rank = tensor.shape().len();
    let (seq, head, dim) = (rank - 3, rank - 2, rank - 1);
    let heads = tensor.shape()[head];
    match kind {
        "head by head" => tensor.transpose(seq, head)?.contiguous()?.transpose(seq, head),
        "padded rows" => {
            let width = tensor.shape()[dim];
            let (before, after) = (rng.random_range(0..=8), rng.random_range(0..=8));
            within(&tensor, dim, before + width + after, |index| index.checked_sub(before).filter(|&i| i < width))?
                .narrow(dim, before, width)
        }
        "every second row" => {
            let rows = tensor.shape()[seq];
            within(&tensor, seq, 2 * rows, |index| (index % 2 == 0).then_some(index / 2))?.step_by(seq, 2)
        }
        "expanded head" if heads > 1 => tensor.narrow(head, 0, 1)?.contiguous()?.expand(head, heads),
        _ => Ok(tensor),
    }
}

/// A tensor with `extent` indices of a dimension, of which `of` says where in `tensor` they come from; NaN elsewhere.
fn within(
    tensor: &Tensor,
    dimension: usize,
    extent: usize,
    of: impl Fn(usize) -> Option<usize>,
) -> Result<Tensor, TensorError> {
    let mut shape = tensor.shape().to_vec();
    shape[dimension] = extent;
    Tensor::generate(tensor.dtype(), &shape, |index| {
        let mut source = index.to_vec();
        let Some(inside) = of(index[dimension]) else { return f64::NAN };
        source[dimension] = inside;
        tensor.get(&source).unwrap_or(f64::NAN)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use kernels::{Feature, reference};

    use super::*;
    use crate::verify::CaseId;

    #[test]
    fn random_problems_come_again_and_differ() {
        let problem = |dtype, seed, number| random(dtype, seed, number).unwrap().0.problem.to_string();
        assert_eq!(problem(Dtype::F16, 7, 3), problem(Dtype::F16, 7, 3));
        assert_ne!(problem(Dtype::F16, 7, 3), problem(Dtype::F16, 8, 3));
        let others: HashSet<_> = (0..60).map(|number| problem(Dtype::F16, 7, number)).collect();
        assert!(others.len() >= 58, "{others:?}");
    }

    #[test]
    fn every_kind_comes_in_its_share() {
        let mut coverage = Coverage::default();
        for number in 0..60 {
            let (run, traits) = random(Dtype::Bf16, 3, number).unwrap();
            let case = CaseId::Random(number);
            let one = Checked {
                case,
                label: String::new(),
                problem: run.problem,
                traits: Some(traits),
                outcome: Outcome::Passed,
            };
            coverage.count(&one);
        }
        // 60 is a multiple of every number of kinds but the four of heads, of which it is one too.
        for (index, (name, kinds)) in DIMENSIONS.iter().enumerate() {
            for kind in *kinds {
                let share = kinds.iter().filter(|other| *other == kind).count() * 60 / kinds.len();
                assert_eq!(coverage.counts[&(index + 1, *kind)], [share, 0, 0], "{name} {kind}");
            }
        }
        assert!(
            coverage.to_string().starts_with("  dtype     bf16 60/60\n  mask      causal 24/24; full 12/12;"),
            "{coverage}"
        );
    }

    #[test]
    fn what_is_drawn_is_what_it_says() {
        for number in 0..60 {
            let (Run { problem, inputs, .. }, traits) = random(Dtype::F32, 5, number).unwrap();
            inputs.check(&problem).unwrap();
            let needs = problem.features();
            let has = |feature| needs.contains(&feature);
            assert_eq!(has(Feature::Varlen), traits.of("batch") == "packed");
            assert_eq!(has(Feature::Softcap), traits.of("score") == "softcap");
            assert_eq!(has(Feature::Alibi), traits.of("score") == "alibi");
            assert_eq!(has(Feature::Gqa), traits.of("heads") != "one each");
            assert_eq!(has(Feature::Window), traits.of("mask").contains("window"), "{problem}");
            assert_eq!(has(Feature::KvCache), traits.of("cache") != "none");
            // No element that is asked for lies where the padding is.
            let cached = has(Feature::KvCache);
            let finite = |tensor: &Tensor| cached || tensor.to_f64().iter().all(|x| x.is_finite());
            assert!(finite(&inputs.q) && finite(&inputs.k) && finite(&inputs.v), "{problem} {traits:?}");
            assert!(reference(&problem, &inputs).is_ok());
            let work = problem.total_q() * problem.seqlen_k * problem.heads_q;
            assert!(work < 8_000_000, "{problem}");
        }
    }
}
