//! Calls over a cache: what is written where, and what is refused, on an emulated GPU and on the processor.

use flashstrata::{
    Append, Cache, Device, DeviceBuffer, Dtype, Inputs, Layout, New, Operands, Outputs, Pages, Planner, Problem,
    ProblemSpec, Rotary, Stratum, Stream, Tensor,
};
use kernels::{check, plain, reference};

const CAPACITY: usize = 96;

/// Three entries of 0, 32 and 41 keys in pages of 32, to which five are appended.
fn problem(dtype: Dtype, rotary: Option<Rotary>) -> Problem {
    let pages = Pages { size: 32, table: vec![7, 2, 5, 1, 0, 8, 3, 9, 6] };
    let cache = Cache {
        rows: 11,
        seqlens: Some(vec![0, 32, 41]),
        pages: Some(pages),
        append: Some(Append { seqlen: 5, rotary }),
        ..Cache::default()
    };
    let spec = ProblemSpec { seqlen_q: 5, ..ProblemSpec::new(3, 4, CAPACITY, 32) };
    spec.heads_kv(2).head_dim_v(16).causal().dtype(dtype).cache(cache).build().unwrap()
}

/// A call's memory on a stream.
struct Resident {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
    new: [DeviceBuffer; 2],
    rotary: Option<[DeviceBuffer; 2]>,
    seqlens: DeviceBuffer,
    table: DeviceBuffer,
}

impl Resident {
    fn new(stream: &Stream, problem: &Problem, inputs: &Inputs) -> Resident {
        let upload = |tensor: &Tensor| stream.upload(&tensor.to_bytes().unwrap()).unwrap();
        let New { k: k_new, v: v_new, rotary } = inputs.new.as_ref().unwrap();
        let cache = problem.cache.as_ref().unwrap();
        let Outputs { out, lse } = Outputs::nan(problem).unwrap();
        Resident {
            q: upload(&inputs.q),
            k: upload(&inputs.k),
            v: upload(&inputs.v),
            out: upload(&out),
            lse: upload(&lse),
            new: [upload(k_new), upload(v_new)],
            rotary: rotary.as_ref().map(|angles| [upload(&angles[0]), upload(&angles[1])]),
            seqlens: stream.upload(cache.seqlens.as_ref().unwrap()).unwrap(),
            table: stream.upload(&cache.pages.as_ref().unwrap().table).unwrap(),
        }
    }

    fn operands(&mut self) -> Operands<'_> {
        let Resident { q, k, v, out, lse, new, rotary, seqlens, table } = self;
        let operands = Operands::new(&*q, &*k, &*v, out, lse).cache_seqlens(&*seqlens).block_table(&*table);
        let operands = operands.append(&new[0], &new[1]);
        match rotary {
            Some([cos, sin]) => operands.rotary(&*cos, &*sin),
            None => operands,
        }
    }
}

/// What a buffer holds.
fn tensor(buffer: &DeviceBuffer, dtype: Dtype, shape: Vec<usize>) -> Tensor {
    Tensor::from_bytes(dtype, &shape, buffer.read::<u8>().unwrap()).unwrap()
}

#[test]
fn what_is_new_is_written_and_nothing_else() {
    for device in [Device::emulated("H100").unwrap(), Device::emulated("T4").unwrap(), Device::cpu()] {
        for rotary in [None, Some(false), Some(true)] {
            let rotary = rotary.map(|interleaved| Rotary { dim: 24, interleaved, positions: 100 });
            let dtype = Dtype::F16;
            let problem = problem(dtype, rotary);
            let inputs = kernels::cache::unseen_as_nan(&problem, Inputs::randn(&problem, 3).unwrap()).unwrap();
            let stream = device.stream().unwrap();
            let attention = device.prepare(&problem, &Layout::contiguous(&problem)).unwrap();
            let mut resident = Resident::new(&stream, &problem, &inputs);
            stream.enqueue(&attention, resident.operands()).unwrap();

            let out = tensor(&resident.out, dtype, problem.out_shape());
            let outputs = Outputs { out, lse: tensor(&resident.lse, Dtype::F32, problem.lse_shape()) };
            let expected = reference(&problem, &inputs).unwrap();
            let verdict = check(&problem, &outputs, &expected, &plain(&problem, &inputs).unwrap()).unwrap();
            assert!(verdict.passed(), "{device} {rotary:?}: {verdict:?}");

            // The cache: the packed call's keys where they belong, and what was there elsewhere.
            let (packed, gathered) = kernels::cache::without_cache(&problem, &inputs).unwrap();
            let cache = problem.cache.as_ref().unwrap();
            for (buffer, before, after) in
                [(&resident.k, &inputs.k, &gathered.k), (&resident.v, &inputs.v, &gathered.v)]
            {
                let mut wanted = std::collections::HashMap::new();
                for entry in 0..problem.batch {
                    let (keys, length) = (packed.tokens(entry).1, problem.lengths(entry).1);
                    for key in length - 5..length {
                        wanted.insert(cache.place(problem.batch, entry, key), keys.start + key);
                    }
                }
                let found = tensor(buffer, dtype, before.shape().to_vec());
                let different = |index: &[usize], x: f64| {
                    let want = match wanted.get(&(index[0], index[1])) {
                        Some(&token) => after.get(&[token, index[2], index[3]]).unwrap(),
                        None => before.get(index).unwrap(),
                    };
                    // Turned in f32 here, in f64 there: a unit in the last place apart at most.
                    let allowed = if rotary.is_some() { dtype.ulp(want) } else { 0.0 };
                    let same = (x - want).abs() <= allowed || x.is_nan() && want.is_nan();
                    f64::from(u8::from(!same))
                };
                let different: f64 = found.map(different).unwrap().to_f64().iter().sum();
                assert_eq!(different, 0.0, "{device} {rotary:?}");
            }
        }
    }
}

#[test]
fn what_is_missing_or_too_small_is_named() {
    let device = Device::emulated("H100").unwrap();
    let stream = device.stream().unwrap();
    let problem = problem(Dtype::F16, Some(Rotary { dim: 32, interleaved: true, positions: 96 }));
    let inputs = Inputs::randn(&problem, 3).unwrap();
    let attention = device.prepare(&problem, &Layout::contiguous(&problem)).unwrap();
    let mut resident = Resident::new(&stream, &problem, &inputs);
    let mut refused = Vec::new();
    for missing in ["cache_seqlens", "block_table", "k_new", "rotary_cos"] {
        let Resident { q, k, v, out, lse, new, rotary, seqlens, table } = &mut resident;
        let mut operands = Operands::new(&*q, &*k, &*v, out, lse);
        if missing != "cache_seqlens" {
            operands = operands.cache_seqlens(&*seqlens);
        }
        if missing != "block_table" {
            operands = operands.block_table(&*table);
        }
        if missing != "k_new" {
            operands = operands.append(&new[0], &new[1]);
        }
        if let Some([cos, sin]) = rotary.as_ref().filter(|_| missing != "rotary_cos") {
            operands = operands.rotary(cos, sin);
        }
        refused.push(stream.enqueue(&attention, operands).unwrap_err().to_string());
    }
    let short = stream.alloc(8).unwrap();
    refused.push(stream.enqueue(&attention, resident.operands().cache_seqlens(&short)).unwrap_err().to_string());
    refused.push(stream.enqueue(&attention, resident.operands().append(&short, &short)).unwrap_err().to_string());
    insta::assert_snapshot!(refused.join("\n"), @r"
    cache_seqlens is not given: the plan's problem has it
    block_table is not given: the plan's problem has it
    k_new is not given: the plan's problem has it
    rotary_cos is not given: the plan's problem has it
    cache_seqlens has 8 bytes: the call needs 12
    k_new has 8 bytes: the call needs 1920
    ");
    assert!(tensor(&resident.out, Dtype::F16, problem.out_shape()).to_f64().iter().all(|x| x.is_nan()));
}

#[test]
fn caches_that_cannot_be_are_named() {
    let right = || problem(Dtype::F16, None).into_spec();
    let with = |change: fn(&mut Cache)| {
        let mut spec = right();
        change(spec.cache.get_or_insert_default());
        spec.build().unwrap_err().to_string()
    };
    let packed = Cache { append: None, seqlens: None, pages: None, ..right().cache.unwrap() };
    let refused = [
        with(|cache| cache.seqlens = None),
        with(|cache| cache.seqlens = Some(vec![0, 32])),
        with(|cache| cache.seqlens = Some(vec![0, 92, 41])),
        with(|cache| cache.seqlens = Some(vec![0, -1, 41])),
        with(|cache| cache.batch_idx = Some(vec![0, 1, 2])),
        with(|cache| (cache.pages, cache.batch_idx) = (None, Some(vec![0, 11, 2]))),
        with(|cache| cache.leftpad = Some(vec![0, 1, 2])),
        with(|cache| (cache.pages, cache.leftpad) = (None, Some(vec![0, 1, 42]))),
        with(|cache| (cache.pages, cache.rows) = (None, 2)),
        with(|cache| cache.pages = Some(Pages { size: 32, table: vec![0; 6] })),
        with(|cache| cache.pages = Some(Pages { size: 0, table: vec![0; 6] })),
        with(|cache| cache.pages = Some(Pages { size: 32, table: vec![0, 0, 0, 0, 11, 0, 0, 0, 0] })),
        with(|cache| cache.append = Some(Append { seqlen: 97, rotary: None })),
        with(|cache| {
            cache.append = Some(Append { seqlen: 5, rotary: Some(Rotary { dim: 7, interleaved: true, positions: 96 }) })
        }),
        with(|cache| {
            cache.append = Some(Append { seqlen: 5, rotary: Some(Rotary { dim: 8, interleaved: true, positions: 95 }) })
        }),
        ProblemSpec::packed(2, 32, vec![0, 5], vec![0, 5]).cache(packed).build().unwrap_err().to_string(),
    ];
    insta::assert_snapshot!(refused.join("\n"), @r"
    k_new is given without cache_seqlens: they say where it belongs
    cache_seqlens has 2 values: it must have batch = 3
    cache_seqlens[1] is 92: it must be 0 to 91
    cache_seqlens[1] is -1: it must be 0 to 91
    block_table and cache_batch_idx are given: the table says where an entry's keys are
    cache_batch_idx[1] is 11: it must be 0 to 10
    block_table and cache_leftpad are given: an entry of pages begins with its first key
    cache_leftpad[2] is 42: it must be 0 to 41
    the first dimension of k is 2: it must be 3 to 2147483647
    block_table has 6 values: it must have batch = 3 rows of as many pages of 32 keys as hold 96
    page_size is 0: it must be 1 to 2147483647
    block_table[4] is 11: it must be 0 to 10
    seqlen_new is 97: it must be 0 to 96
    the rotary dimension is 7: it must be even, at least 2 and at most head_dim = 32
    the positions of rotary_cos is 95: it must be 96 to 2147483647
    cu_seqlens_k and a cache are given: of a packed batch only pages are a cache
    ");
}

#[test]
fn others_are_passed_over_and_the_plan_says_why() {
    let problem = problem(Dtype::Bf16, None);
    let planner = Planner::new(flashstrata::Gpu::find("H200").unwrap().into());
    let plan = planner.plan(&problem, &Layout::contiguous(&problem)).unwrap();
    assert_eq!(plan.stratum(), Stratum::V2Tc);
    let why = plan.passed_over[0].why.to_string();
    assert!(why.starts_with("v3 does not cover kv_cache: it covers causal"), "{why}");
    // Problems print and are read as they are.
    assert_eq!(problem.to_string().parse::<Problem>().unwrap(), problem);
}
