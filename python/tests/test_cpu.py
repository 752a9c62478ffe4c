"""torch's functions on tensors of the CPU; skipped where torch is absent."""

import pytest

torch = pytest.importorskip("torch")

from flashstrata import dispatch, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def expected(q, k, v, causal=False):
    """SDPA in float64 of (batch, seqlen, heads, dim); causal for equal lengths."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return SDPA(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_is_what_torch_computes(dtype, causal):
    q, k, v = tensors((2, 133, 6, 64), (2, 133, 2, 64), (2, 133, 2, 64), dtype=dtype)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (out.double() - expected(q, k, v, causal)).abs().max() < bound
    assert lse.shape == (2, 6, 133) and lse.isfinite().all()


def test_strides_are_free():
    (qkv,) = tensors((1, 50, 3, 4, 32))
    out = flash_attn_qkvpacked_func(qkv)
    assert (out.double() - expected(*qkv.unbind(2))).abs().max() < 1e-5
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv.unbind(2))
    assert torch.equal(flash_attn_func(q, k, v), out)


def test_packed_sequences():
    q, k, v = tensors((70, 4, 32), (90, 4, 32), (90, 4, 32))
    offsets = torch.tensor([0, 20, 20, 70], dtype=torch.int32), torch.tensor([0, 30, 40, 90], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, *offsets, 50, 50)
    assert (out[:20].double() - expected(q[None, :20], k[None, :30], v[None, :30])[0]).abs().max() < 1e-5
    assert (out[20:].double() - expected(q[None, 20:], k[None, 40:], v[None, 40:])[0]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash_attn_varlen_func(q, k, v, offsets[0], torch.tensor([0, 30, 20, 90], dtype=torch.int32), 50, 90)


def test_alibi_slopes_are_read():
    q, k, v = tensors((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    steep = flash_attn_func(q, k, v, alibi_slopes=torch.tensor([1e4, 1e4]))
    assert torch.allclose(steep, v)


def test_compiled():
    q, k, v = tensors((1, 40, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v, causal=True) * 2)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads(threads):
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = tensors((1, 200, 2, 64), (1, 200, 2, 64), (1, 200, 2, 64))
    out = flash_attn_func(q, k, v)
    with ThreadPoolExecutor(threads) as pool:
        assert all(torch.equal(out, one) for one in pool.map(lambda _: flash_attn_func(q, k, v), range(16)))


def test_refusals_name_the_argument():
    q, k, v = tensors((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    with pytest.raises(NotImplementedError, match="requires grad"):
        flash_attn_func(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match="k is torch.float16"):
        flash_attn_func(q.detach(), k.half(), v)
    with pytest.raises(ValueError, match="meta"):
        flash_attn_func(*(x.detach().to("meta") for x in (q, k, v)))


def test_the_short_way_is_the_long_way():
    """Calls of the common kind take a way of their own: the same results, and what it leaves alone has the same errors."""
    q, k, v = tensors((2, 33, 4, 32), (2, 40, 2, 32), (2, 40, 2, 48), dtype=torch.bfloat16)
    slopes = torch.rand(2, 4)
    for given in ((None, -1, -1, 0.0, None), (0.3, 8, 0, 20.0, None), (None, -1, 0, 0.0, slopes)):
        short, long = dispatch.short(q, k, v, *given, None, True), dispatch.forward(q, k, v, *given, None)
        assert all(torch.equal(one, other) and one.stride() == other.stride() for one, other in zip(short, long))
    offsets = torch.tensor([0, 11, 33], dtype=torch.int32), torch.tensor([0, 40, 40], dtype=torch.int32)
    packed = [x[0] for x in (q, k, v)], (None, -1, 0, 0.0, None), (*offsets, 22, 40)
    short, long = dispatch.short(*packed[0], *packed[1], packed[2], True), dispatch.forward(*packed[0], *packed[1], packed[2])
    assert all(torch.equal(one, other) for one, other in zip(short, long))
    assert dispatch.short(q, k, v, None, -1, -1, 0.0, None, None, False)[1] is None
    columns_apart = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    others = [
        (q, columns_apart, v), (q, k.half(), v), (q.double(), k.double(), v.double()), (q[0], k[0], v[0]),
        (q.float().requires_grad_(), k.float(), v.float()), tuple(x.to("meta") for x in (q, k, v)),
    ]  # fmt: skip
    for other in others:
        assert dispatch.short(*other, None, -1, -1, 0.0, None, None, False) is None


def test_a_last_dimension_that_is_not_contiguous_is_copied():
    q, k, v = tensors((1, 33, 2, 32), (1, 40, 2, 32), (1, 40, 2, 32))
    columns_apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert columns_apart[0].stride(-1) != 1
    assert torch.equal(flash_attn_func(*columns_apart), flash_attn_func(q, k, v))


def test_parameters_without_gradients():
    q, k, v = (torch.nn.Parameter(x) for x in tensors((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16)))
    with pytest.raises(NotImplementedError, match="requires grad"):
        flash_attn_func(q, k, v)
    with torch.no_grad():
        assert flash_attn_func(q, k, v).shape == q.shape


def test_shapes_that_do_not_fit_are_named():
    q, k, v = tensors((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    with pytest.raises(ValueError, match="q has shape"):
        flash_attn_func(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="heads"):
        flash_attn_func(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="v has the shape"):
        flash_attn_func(q, k, v[:, :5])
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn_func(q, k, v, alibi_slopes=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="cu_seqlens_q is torch.int64"):
        flash_attn_varlen_func(q[0], k[0], v[0], torch.tensor([0, 9]), torch.tensor([0, 9]), 9, 9)


def test_eight_bits_are_of_gpus():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors((2, 9, 2, 16), (2, 9, 2, 16), (2, 9, 2, 16)))
    with pytest.raises(NotImplementedError, match="q is torch.float8_e4m3fn on the CPU"):
        flash_attn_func(q, k, v)
    descale = torch.ones(2, 2)
    with pytest.raises(NotImplementedError, match="q is torch.float8_e4m3fn on the CPU"):
        flash_attn_func(q, k, v, q_descale=descale, k_descale=descale, v_descale=descale)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert dispatch.forward_op(*fakes, None, -1, 0, 0.0, None)[0].dtype == torch.bfloat16
    halves = [x.half() for x in (q, k, v)]
    with pytest.raises(ValueError, match="v_descale is given: q is torch.float16"):
        flash_attn_func(*halves, v_descale=descale)
    for wrong, says in ((descale[:1], r"k_descale is torch.float32 \(1, 2\)"), (descale.half(), "k_descale is torch.float16")):
        with pytest.raises(ValueError, match=says):
            dispatch.forward(q, k, v, None, -1, 0, 0.0, None, descales=(descale, wrong, descale))


def test_a_forked_process_computes():
    import os

    q, k, v = tensors((1, 300, 2, 64), (1, 300, 2, 64), (1, 300, 2, 64))
    out = flash_attn_func(q, k, v).flatten().tolist()
    child = os.fork()
    if child == 0:
        # Torch's own threads do not survive: nothing here is computed by it.
        os._exit(0 if flash_attn_func(q, k, v).flatten().tolist() == out else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
