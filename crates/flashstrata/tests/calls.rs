//! What a call computes through each entry, and what it refuses.

use flashstrata::half::{bf16, f16};
use flashstrata::{
    Device, DeviceSlice, Dtype, Error, HostOutputs, Inputs, Layout, Operands, Outputs, Planner, Problem, ProblemSpec,
    Stratum, Stream, Tensor, Tiles,
};
use kernels::{check, plain, reference};

fn device(name: &str) -> Device {
    Device::emulated(name).unwrap()
}

fn assert_right(problem: &Problem, inputs: &Inputs, outputs: &Outputs) {
    let verdict =
        check(problem, outputs, &reference(problem, inputs).unwrap(), &plain(problem, inputs).unwrap()).unwrap();
    assert!(verdict.passed(), "{problem}: {verdict:?}");
}

fn outputs_of(problem: &Problem, out: Vec<u8>, lse: Vec<u8>) -> Outputs {
    Outputs {
        out: Tensor::from_bytes(problem.dtype, &problem.out_shape(), out).unwrap(),
        lse: Tensor::from_bytes(Dtype::F32, &problem.lse_shape(), lse).unwrap(),
    }
}

/// Through device memory: twice on the stream's own workspace, once on the caller's, which holds rubbish.
fn through_device_memory(stream: &Stream, planner: &Planner, problem: &Problem) -> Stratum {
    let inputs = Inputs::randn(problem, 5).unwrap();
    let plan = planner.plan(problem, &Layout::contiguous(problem)).unwrap();
    let attention = stream.device().load(plan).unwrap();
    let plan = attention.plan().unwrap();
    let upload = |tensor: &Tensor| stream.upload(&tensor.to_bytes().unwrap()).unwrap();
    let (q, k, v) = (upload(&inputs.q), upload(&inputs.k), upload(&inputs.v));
    let cu_seqlens = problem
        .varlen
        .as_ref()
        .map(|varlen| (stream.upload(&varlen.cu_seqlens_q).unwrap(), stream.upload(&varlen.cu_seqlens_k).unwrap()));
    let mut workspace = stream.upload(&vec![0xa5u8; plan.workspace_bytes() as usize]).unwrap();
    let mut results = Vec::new();
    for call in 0..3 {
        let mut out = stream.upload(&vec![0xffu8; plan.out_bytes() as usize]).unwrap();
        let mut lse = stream.upload(&vec![0xffu8; plan.lse_bytes() as usize]).unwrap();
        let mut operands = Operands::new(&q, &k, &v, &mut out, &mut lse);
        if let Some((q, k)) = &cu_seqlens {
            operands = operands.cu_seqlens(q, k);
        }
        if call == 1 {
            operands = operands.workspace(&mut workspace);
        }
        stream.enqueue(&attention, operands).unwrap();
        results.push((out.read::<u8>().unwrap(), lse.read::<u8>().unwrap()));
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{problem}: not the same bits each time");
    let (out, lse) = results.swap_remove(0);
    assert_right(problem, &inputs, &outputs_of(problem, out, lse));
    plan.stratum()
}

#[test]
fn calls_on_device_memory_are_right_and_reuse_workspaces() {
    let turing = device("RTX 2070");
    let stream = turing.stream().unwrap();
    // One stream for all, so that its own workspace has been others' before.
    for (spec, stratum) in [
        (ProblemSpec::new(1, 2, 70, 40).causal(), Stratum::V2Kt),
        (ProblemSpec::new(2, 2, 33, 16).dtype(Dtype::F16), Stratum::V2Tc),
        (ProblemSpec { seqlen_q: 3, ..ProblemSpec::new(1, 4, 100, 24) }.heads_kv(2), Stratum::V2),
    ] {
        let problem = spec.build().unwrap();
        assert_eq!(through_device_memory(&stream, &turing.planner().unwrap(), &problem), stratum);
    }
    let problem = ProblemSpec::new(1, 1, 40, 16).build().unwrap();
    for stratum in Stratum::ON_CUDA_CORES {
        assert_eq!(through_device_memory(&stream, &turing.planner().unwrap().stratum(stratum), &problem), stratum);
    }
}

#[test]
fn hopper_finds_its_counter_zeroed() {
    let hopper = device("H100");
    let stream = hopper.stream().unwrap();
    for spec in [
        ProblemSpec::new(1, 2, 150, 64).dtype(Dtype::Bf16).causal(),
        ProblemSpec::packed(2, 32, vec![0, 70, 70, 90], vec![0, 10, 20, 120]).dtype(Dtype::F16),
    ] {
        let problem = spec.build().unwrap();
        assert_eq!(through_device_memory(&stream, &hopper.planner().unwrap(), &problem), Stratum::V3);
    }
}

#[test]
fn host_slices_of_every_type_and_host_tensors_of_any_strides() {
    fn of<T: flashstrata::Element>(stream: &Stream) {
        let problem = ProblemSpec::new(1, 2, 37, 16).heads_kv(1).dtype(T::DTYPE).causal().build().unwrap();
        let inputs = Inputs::randn(&problem, 2).unwrap();
        let slice = |tensor: &Tensor| bytemuck::pod_collect_to_vec::<u8, T>(&tensor.to_bytes().unwrap());
        let (q, k, v) = (slice(&inputs.q), slice(&inputs.k), slice(&inputs.v));
        let HostOutputs { out, lse } = stream.attention(&problem, &q, &k, &v).unwrap();
        let (out, lse) = (bytemuck::cast_slice(&out).to_vec(), bytemuck::cast_slice(&lse).to_vec());
        assert_right(&problem, &inputs, &outputs_of(&problem, out, lse));
    }
    let stream = device("T4").stream().unwrap();
    of::<f32>(&stream);
    of::<f16>(&stream);
    of::<bf16>(&stream);

    let problem = ProblemSpec::new(2, 3, 20, 16).build().unwrap();
    let Inputs { q, k, v, .. } = Inputs::randn(&problem, 3).unwrap();
    let by_head = k.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
    let inputs = Inputs { q, k: by_head, v, new: None };
    let layout = Layout::of(&problem, &inputs).unwrap();
    let plan = stream.device().planner().unwrap().plan(&problem, &layout).unwrap();
    assert_right(&problem, &inputs, &stream.run(&plan, &inputs).unwrap());
}

#[test]
fn empty_calls_have_empty_results() {
    let stream = device("T4").stream().unwrap();
    for spec in [ProblemSpec::new(0, 2, 5, 8), ProblemSpec { seqlen_q: 0, ..ProblemSpec::new(1, 2, 5, 8) }] {
        let problem = spec.build().unwrap();
        let keys = vec![1.0f32; problem.total_k() * 16];
        let result = stream.attention(&problem, &[], &keys, &keys).unwrap();
        assert!(result.out.is_empty() && result.lse.is_empty());
    }
    // No key: rows of 0, and lse minus infinity.
    let problem = ProblemSpec { seqlen_k: 0, ..ProblemSpec::new(1, 1, 3, 8) }.build().unwrap();
    let result = stream.attention(&problem, &[1.0f32; 24], &[], &[]).unwrap();
    assert_eq!((result.out, result.lse), (vec![0.0; 24], vec![f32::NEG_INFINITY; 3]));
}

/// Everything that the contract wants refused, with what is said of it, and that nothing was written.
#[test]
fn bad_input_is_named_and_nothing_is_written() {
    let device = device("RTX 2070");
    let stream = device.stream().unwrap();
    let mut said = Vec::new();
    let mut say = |what: &str, error: Error| said.push(format!("{what}: {error}"));
    let spec = || ProblemSpec::new(2, 4, 8, 16);

    // Values.
    for (what, spec) in [
        ("heads that do not divide", spec().heads_kv(3)),
        ("head_dim of 0", ProblemSpec { head_dim: 0, ..spec() }),
        ("head_dim_v too large", spec().head_dim_v(257)),
        ("NaN scale", spec().softmax_scale(f32::NAN)),
        ("negative scale", spec().softmax_scale(-1.0)),
        ("softcap of 0", spec().softcap(0.0)),
        ("slopes of other heads", spec().alibi_slopes(vec![0.5; 3])),
        ("an infinite slope", spec().alibi_slopes(vec![f32::INFINITY; 4])),
        ("cu_seqlens that decrease", ProblemSpec::packed(2, 16, vec![0, 5, 3], vec![0, 5, 6])),
        ("cu_seqlens that do not start at 0", ProblemSpec::packed(2, 16, vec![1, 5, 6], vec![0, 5, 6])),
        ("cu_seqlens of another batch", ProblemSpec::packed(2, 16, vec![0, 5], vec![0, 5, 6])),
        (
            "a max_seqlen that is too small",
            ProblemSpec { seqlen_k: 4, ..ProblemSpec::packed(2, 16, vec![0, 5], vec![0, 5]) },
        ),
        ("a tensor beyond every address", ProblemSpec::new(1 << 30, 1 << 10, 1 << 20, 64)),
    ] {
        say(what, spec.build().unwrap_err().into());
    }

    // Host slices.
    let problem = spec().heads_kv(2).build().unwrap();
    let (q, k) = (vec![0.0f32; 2 * 8 * 4 * 16], vec![0.0f32; 2 * 8 * 2 * 16]);
    let mut out = vec![f32::NAN; q.len()];
    let mut lse = vec![f32::NAN; 2 * 4 * 8];
    say("k of other heads", stream.attention(&problem, &q, &q, &k).unwrap_err());
    say("v too short", stream.attention_into(&problem, &q, &k, &k[1..], &mut out, &mut lse).unwrap_err());
    say("out too short", stream.attention_into(&problem, &q, &k, &k, &mut out[1..], &mut lse).unwrap_err());
    say("lse too long", stream.attention_into(&problem, &q, &k, &k, &mut out, &mut [0.0; 65]).unwrap_err());
    let half = vec![f16::ZERO; q.len()];
    say("another type", stream.attention(&problem, &half, &half, &half).unwrap_err());
    let window = spec().mask(flashstrata::Mask::window(3, 1)).build().unwrap();
    say("what no stratum covers here", stream.attention(&window, &q, &q, &q).unwrap_err());
    let planner = device.planner().unwrap().stratum(Stratum::V3);
    let v3 = planner.plan(&problem, &Layout::contiguous(&problem)).unwrap_err();
    say("a stratum that the GPU has not", v3.into());
    let tiles = device.planner().unwrap().stratum(Stratum::V2).tiles(Tiles { block_q: 33, block_kv: 32, threads: 128 });
    say("tiles that cannot be", tiles.plan(&problem, &Layout::contiguous(&problem)).unwrap_err().into());
    assert!(out.iter().chain(&lse).all(|x| x.is_nan()));

    // Host tensors.
    let plan = device.plan(&problem).unwrap();
    let Inputs { q: tq, k: tk, v: tv, .. } = Inputs::randn(&problem, 1).unwrap();
    let with = |q: &Tensor, k: &Tensor, v: &Tensor| Inputs { q: q.clone(), k: k.clone(), v: v.clone(), new: None };
    say("q of another batch", stream.run(&plan, &with(&tq.narrow(0, 0, 1).unwrap(), &tk, &tv)).unwrap_err());
    let turned = Tensor::randn(Dtype::F32, &[2, 8, 16, 2], 1).unwrap().transpose(2, 3).unwrap();
    say("a last dimension with gaps", stream.run(&plan, &with(&tq, &turned, &tv)).unwrap_err());
    let packed = ProblemSpec::packed(2, 16, vec![0, 5], vec![0, 5]).build().unwrap();
    let packed_plan = device.planner().unwrap().stratum(Stratum::V2).plan(&packed, &Layout::contiguous(&packed));
    say("a packed batch on a stratum without", packed_plan.unwrap_err().into());

    // Device memory.
    let planner = device.planner().unwrap().stratum(Stratum::V2Kt);
    let attention = device.load(planner.plan(&problem, &Layout::contiguous(&problem)).unwrap()).unwrap();
    let (dq, dk) = (stream.upload(&q).unwrap(), stream.upload(&k).unwrap());
    let mut dout = stream.upload(&out).unwrap();
    let mut dlse = stream.upload(&lse).unwrap();
    let mut small = stream.alloc(16).unwrap();
    say("q too small", stream.enqueue(&attention, Operands::new(&dk, &dk, &dk, &mut dout, &mut dlse)).unwrap_err());
    say("lse too small", stream.enqueue(&attention, Operands::new(&dq, &dk, &dk, &mut dout, &mut small)).unwrap_err());
    let operands = Operands::new(&dq, &dk, &dk, &mut dout, &mut dlse).workspace(&mut small);
    say("workspace too small", stream.enqueue(&attention, operands).unwrap_err());
    let wide = stream.upload(&vec![0u8; 4 * k.len() + 64]).unwrap();
    let off = |bytes| wide.slice().offset(bytes).unwrap();
    let operands = Operands::new(&dq, off(4), &dk, &mut dout, &mut dlse);
    say("k where the plan's kernels cannot read it", stream.enqueue(&attention, operands).unwrap_err());
    let operands = Operands::new(&dq, off(3), &dk, &mut dout, &mut dlse);
    say("k between two elements", stream.enqueue(&attention, operands).unwrap_err());
    let other = device.stream().unwrap();
    let foreign = other.upload(&k).unwrap();
    let operands = Operands::new(&dq, &dk, &foreign, &mut dout, &mut dlse);
    say("v of another stream", stream.enqueue(&attention, operands).unwrap_err());
    let elsewhere = Device::emulated("T4").unwrap();
    let loaded = elsewhere.load(elsewhere.plan(&problem).unwrap()).unwrap();
    let operands = Operands::new(&dq, &dk, &dk, &mut dout, &mut dlse);
    say("kernels of another device", stream.enqueue(&loaded, operands).unwrap_err());
    let hopper = Device::emulated("H100").unwrap();
    say("a plan for another architecture", hopper.load(attention.plan().unwrap().clone()).unwrap_err());
    // SAFETY: the emulator refuses before it looks at the stream.
    say("a raw stream of the emulator", unsafe { device.borrow_stream(std::ptr::null_mut()) }.unwrap_err());
    say("more memory than there is", stream.alloc(1 << 62).unwrap_err());
    say("more than a buffer holds", small.write(&[0u8; 17]).unwrap_err());
    assert!(dout.read::<f32>().unwrap().iter().all(|x| x.is_nan()));
    assert!(dlse.read::<f32>().unwrap().iter().all(|x| x.is_nan()));

    // SAFETY: on the emulator an address that is no memory is found out.
    let nowhere = unsafe { DeviceSlice::borrow(0x10, 1 << 20) };
    let operands = Operands::new(nowhere, &dk, &dk, &mut dout, &mut dlse);
    assert!(matches!(stream.enqueue(&attention, operands), Err(Error::Emulator(_))));
    let filters = vec![("0x7[0-9a-f]+", "0x[address]")];
    insta::with_settings!({ filters => filters }, { insta::assert_snapshot!(said.join("\n")) });
}

/// On a machine without a GPU this is the processor; with one, it is that.
#[test]
fn a_device_says_what_it_is() {
    let any = Device::any();
    if any.is_cpu() {
        assert!(any.context().is_none() && any.hardware().is_none() && Device::all().is_empty());
        assert!(Device::cuda(0).is_err() && any.to_string().starts_with("CPU ("));
    } else {
        assert!(any.context().is_some() && !Device::all().is_empty());
    }
    assert_eq!(device("T4").emulated_gpu().unwrap().name, "T4");
    assert!(any.emulated_gpu().is_none() && device("T4").to_string().ends_with("(emulated)"));
    assert!(Device::emulated("T5").unwrap_err().to_string().contains("nearest"));
}

/// Streams and buffers go to other threads.
#[test]
fn streams_can_be_shared_and_sent() {
    fn is<T: Send + Sync>() {}
    is::<Device>();
    is::<Stream>();
    is::<flashstrata::DeviceBuffer>();
    is::<flashstrata::Attention>();
    is::<Planner>();
}

/// The processor takes the same calls: host slices, its own buffers, somebody else's memory, host tensors of any strides.
#[test]
fn the_processor_takes_every_kind_of_call() {
    let device = Device::cpu();
    let stream = device.stream().unwrap();
    let problem: Problem = "2x4/2x30/50x24 causal".parse().unwrap();
    let inputs = Inputs::randn(&problem, 5).unwrap();
    let outputs = device.compute(&problem, &inputs).unwrap();
    assert_right(&problem, &inputs, &outputs);
    let floats = |tensor: &Tensor| -> Vec<f32> { tensor.to_f64().into_iter().map(|x| x as f32).collect() };
    let (q, k, v) = (floats(&inputs.q), floats(&inputs.k), floats(&inputs.v));
    let host = stream.attention(&problem, &q, &k, &v).unwrap();
    assert_eq!((&host.out, &host.lse), (&floats(&outputs.out), &floats(&outputs.lse)));

    let attention = device.prepare(&problem, &Layout::contiguous(&problem)).unwrap();
    assert!(attention.plan().is_none() && attention.workspace_bytes() == 0);
    let (dq, dk, dv) = (stream.upload(&q).unwrap(), stream.upload(&k).unwrap(), stream.upload(&v).unwrap());
    let mut out = stream.upload(&vec![f32::NAN; host.out.len()]).unwrap();
    let mut lse = stream.upload(&vec![f32::NAN; host.lse.len()]).unwrap();
    stream.enqueue(&attention, Operands::new(&dq, &dk, &dv, &mut out, &mut lse)).unwrap();
    assert_eq!((out.read::<f32>().unwrap(), lse.read::<f32>().unwrap()), (host.out.clone(), host.lse.clone()));

    // SAFETY: `q` lives until the call has returned.
    let borrowed = unsafe { DeviceSlice::borrow(q.as_ptr() as u64, size_of_val(&q[..]) as u64) };
    stream.enqueue(&attention, Operands::new(borrowed, &dk, &dv, &mut out, &mut lse)).unwrap();
    assert_eq!(out.read::<f32>().unwrap(), host.out);
    // A buffer that is too small, and things that only a GPU has.
    let short = stream.alloc(8).unwrap();
    let refused = stream.enqueue(&attention, Operands::new(&short, &dk, &dv, &mut out, &mut lse));
    assert!(matches!(refused, Err(Error::Bytes { argument: "q", given: 8, .. })));
    assert!(matches!(device.plan(&problem), Err(Error::Cpu { .. })));
    assert!(matches!(device.planner(), Err(Error::Cpu { .. })));
    // SAFETY: no stream is made of it.
    assert!(matches!(unsafe { device.borrow_stream(std::ptr::null_mut()) }, Err(Error::NoGpu { .. })));
    let emulated = Device::emulated("T4").unwrap();
    let loaded = emulated.load(emulated.plan(&problem).unwrap()).unwrap();
    let elsewhere = stream.enqueue(&loaded, Operands::new(&dq, &dk, &dv, &mut out, &mut lse));
    assert!(matches!(elsewhere, Err(Error::OtherDevice { .. })));
    assert!(matches!(device.load(loaded.plan().unwrap().clone()), Err(Error::Architecture { .. })));
}
