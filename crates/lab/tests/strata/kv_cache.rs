//! Keys and values in a cache: lengths in memory, pages, rows that are named, and what is appended and turned.

use arch::{Sm, Target};
use emulator::{Device, Options, Policy};
use flashstrata::compute::compute;
use flashstrata::{Append, Cache, Pages, Rotary};
use kernels::cache::unseen_as_nan;
use kernels::plan::{self, plan_with};
use kernels::{Dtype, Inputs, Layout, Mask, ProblemSpec, Stratum, check, plain, reference};

const POLICIES: [Policy; 4] = [Policy::Eager, Policy::Lazy, Policy::Random(1), Policy::Random(2)];

/// Pages of one size: each entry's in a row of the table that names them back to front, some pages unused.
fn pages(batch: usize, size: usize, capacity: usize) -> (usize, Pages) {
    let of_entry = capacity.div_ceil(size).max(1);
    let rows = batch * of_entry + 3;
    let table = (0..batch * of_entry).map(|index| (rows - 2 - index) as i32).collect();
    (rows, Pages { size, table })
}

/// The call on an emulated GPU, with NaN wherever the cache has no key of an entry's, against the reference.
fn within_tolerance(sm: Sm, spec: ProblemSpec, options: &plan::Options, policy: Policy, seed: u64) {
    let problem = spec.build().unwrap();
    let inputs = unseen_as_nan(&problem, Inputs::randn(&problem, seed).unwrap()).unwrap();
    let name = format!("{problem} on {sm}, {options:?}, {policy:?}");
    let layout = Layout::of(&problem, &inputs).unwrap();
    let plan = plan_with(Stratum::V2Tc, &problem, Target::best(sm), &layout, options);
    let plan = plan.unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut device = Device::new(Options { policy, ..Options::new(sm) });
    let computed = compute(&mut device, &plan, &problem, &inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
    let reference = reference(&problem, &inputs).unwrap();
    let verdict = check(&problem, &computed.outputs, &reference, &plain(&problem, &inputs).unwrap()).unwrap();
    assert!(verdict.passed(), "{name}: {verdict:?}");
}

const SMS: [Sm; 3] = [Sm::Sm75, Sm::Sm80, Sm::Sm90];

fn dtype(sm: Sm, index: usize) -> Dtype {
    if sm == Sm::Sm75 { Dtype::F16 } else { [Dtype::F16, Dtype::Bf16][index % 2] }
}

/// Pages of every kind of size, lengths at and off their borders, every kind of mask, split and not, with GQA.
#[test]
fn pages_of_any_size() {
    let masks = [Mask::CAUSAL, Mask::FULL, Mask::window(40, 3), Mask::window(70, -1), Mask::window(-1, 5)];
    let mut count = 0;
    for size in [1, 3, 16, 40, 64, 100, 128, 256] {
        for (seqlen_q, group) in [(1, 4), (5, 3), (70, 1)] {
            for splits in [1, 3] {
                let (sm, policy) = (SMS[count % 3], POLICIES[count % 4]);
                let capacity = 300;
                let (rows, pages) = pages(3, size, capacity);
                let seqlens = [[0, 300, 129], [64, 1, 256], [16 * (count as i32 % 18), 257, 192]][count % 3];
                let cache = Cache { rows, seqlens: Some(seqlens.to_vec()), pages: Some(pages), ..Cache::default() };
                let (d, d_v) = [(64, 64), (128, 128), (40, 72), (33, 20)][count % 4];
                let spec = ProblemSpec { seqlen_q, ..ProblemSpec::new(3, 2 * group, capacity, d) };
                let spec = spec.heads_kv(2).head_dim_v(d_v).mask(masks[count % 5]).dtype(dtype(sm, count)).cache(cache);
                let options = plan::Options { splits: Some(splits), ..plan::Options::default() };
                within_tolerance(sm, spec, &options, policy, count as u64);
                count += 1;
            }
        }
    }
}

/// Lengths that are in memory, of rows that are named or not, with softcap and slopes.
#[test]
fn lengths_in_memory() {
    for (index, sm) in SMS.into_iter().cycle().take(12).enumerate() {
        let batch_idx = (index % 2 == 1).then(|| vec![4, 0, 2]);
        let rows = if batch_idx.is_some() { 5 } else { 3 };
        let seqlens = vec![[0, 1, 64][index % 3], 200, 65 + index as i32];
        let leftpad = (index % 4 > 1).then(|| vec![seqlens[0] / 2, [0, 200, 7][index % 3], 64]);
        let cache = Cache { rows, seqlens: Some(seqlens), leftpad, batch_idx, ..Cache::default() };
        let spec = ProblemSpec { seqlen_q: [1, 7, 40][index % 3], ..ProblemSpec::new(3, 4, 200, 64) };
        let mut spec = spec.heads_kv(2).dtype(dtype(sm, index)).cache(cache);
        spec = match index % 4 {
            0 => spec.causal().alibi_slopes(vec![0.5, 0.25, 0.1, 0.3]),
            1 => spec.softcap(20.0),
            2 => spec.mask(Mask::window(30, 0)),
            _ => spec.causal(),
        };
        let options = plan::Options { splits: Some(1 + index as u32 % 3), ..plan::Options::default() };
        within_tolerance(sm, spec, &options, POLICIES[index % 4], index as u64);
    }
    // In f32 too.
    let cache = Cache { rows: 2, seqlens: Some(vec![70, 5]), ..Cache::default() };
    let problem = ProblemSpec { seqlen_q: 5, ..ProblemSpec::new(2, 4, 100, 64) }.heads_kv(2).causal().cache(cache);
    let problem = problem.build().unwrap();
    let inputs = Inputs::randn(&problem, 1).unwrap();
    let target = Target::best(Sm::Sm80);
    let options = plan::Options::default();
    let plan = plan_with(Stratum::V2Tc, &problem, target, &Layout::contiguous(&problem), &options).unwrap();
    let computed = compute(&mut Device::new(Options::new(Sm::Sm80)), &plan, &problem, &inputs).unwrap();
    let reference = reference(&problem, &inputs).unwrap();
    assert!(kernels::check_within(&problem, &computed.outputs, &reference, 1e-5).unwrap().passed());
}

/// Packed queries on paged keys.
#[test]
fn packed_batches_on_pages() {
    for (index, size) in [1, 16, 64, 256].into_iter().enumerate() {
        for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(30, 4)] {
            let sm = SMS[index % 3];
            let cu_k = vec![0, 200, 200, 457];
            let (rows, pages) = pages(3, size, 257);
            let cache = Cache { rows, pages: Some(pages), ..Cache::default() };
            let spec = ProblemSpec::packed(6, 64, vec![0, 1, 14, 50], cu_k).heads_kv(2);
            let spec = spec.mask(mask).dtype(dtype(sm, index)).cache(cache);
            let options = plan::Options { splits: Some(1 + index as u32 % 2), ..plan::Options::default() };
            within_tolerance(sm, spec, &options, POLICIES[index], index as u64);
        }
    }
}

/// New keys and values, turned or not, behind those of pages, of named rows, of each entry's own.
#[test]
fn what_is_appended_is_seen() {
    let mut count = 0;
    for rotary in [None, Some((64, false)), Some((64, true)), Some((24, false)), Some((10, true))] {
        for (seqlen_q, new) in [(1, 1), (5, 5), (3, 17), (20, 4), (2, 0)] {
            let (sm, capacity) = (SMS[count % 3], 150 + new);
            let rotary = rotary.map(|(dim, interleaved)| Rotary { dim, interleaved, positions: capacity + 9 });
            let (rows, paged) = pages(3, [1, 16, 64, 256][count % 4], capacity);
            let places = [
                Cache { rows: 3, ..Cache::default() },
                Cache { rows: 4, batch_idx: Some(vec![3, 1, 0]), leftpad: Some(vec![0, 70, 17]), ..Cache::default() },
                Cache { rows, pages: Some(paged), ..Cache::default() },
            ];
            let cache = Cache {
                seqlens: Some(vec![[0, 63, 64][count % 3], 150, 17]),
                append: Some(Append { seqlen: new, rotary }),
                ..places[count % 3].clone()
            };
            let spec = ProblemSpec { seqlen_q, ..ProblemSpec::new(3, 4, capacity, 64) }.heads_kv(2).head_dim_v(40);
            let mask = [Mask::CAUSAL, Mask::FULL, Mask::window(50, 0)][(count / 2) % 3];
            let options = plan::Options { splits: Some(1 + count as u32 % 3), ..plan::Options::default() };
            let spec = spec.mask(mask).dtype(dtype(sm, count)).cache(cache);
            within_tolerance(sm, spec, &options, POLICIES[count % 4], count as u64);
            count += 1;
        }
    }
}

#[test]
fn others_refuse_a_cache() {
    let cache = Cache { rows: 1, seqlens: Some(vec![5]), ..Cache::default() };
    let problem = ProblemSpec::new(1, 2, 64, 64).dtype(Dtype::F16).cache(cache).build().unwrap();
    for stratum in Stratum::ALL.into_iter().filter(|&stratum| stratum != Stratum::V2Tc) {
        let error = kernels::plan(stratum, &problem, Target::best(Sm::Sm90), &Layout::contiguous(&problem), None);
        let error = error.unwrap_err();
        assert!(error.is_coverage() && error.to_string().contains("does not cover kv_cache"), "{error}");
    }
}
