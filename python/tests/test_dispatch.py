"""What torch watches, and what it makes up: calls go by its operators, or say what is wrong, on the CPU."""

import pytest

torch = pytest.importorskip("torch")

from flashstrata import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402


def three(*shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape or (1, 9, 2, 16), generator=generator) for _ in range(3)]


def close(found, q, k, v):
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_tracers_see_the_operator():
    q, k, v = three()
    others = [x + 1 for x in (q, k, v)]
    with torch.no_grad():
        traced = torch.jit.trace(flash_attn_func, (q, k, v))
        close(traced(*others), *others)
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda *given: flash_attn_func(*given))(q, k, v)
    assert "flashstrata.forward" in graph.code
    close(graph(*others), *others)


def test_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names, given = [], three()
    with Seen():
        out = flash_attn_func(*given)
    assert "flashstrata.forward.default" in names
    close(out, *given)


def test_tensors_without_memory():
    q, k, v = three()
    close(torch.func.functionalize(flash_attn_func)(q, k, v), q, k, v)
    with pytest.raises(ValueError, match="no memory"):
        flash_attn_func(q, torch._efficientzerotensor(k.shape), v)
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    lengths = fake.from_tensor(torch.tensor([3], dtype=torch.int32))
    assert flash_attn_func(q, fake.from_tensor(k), v).shape == q.shape
    assert flash_attn_func(q, k, v, alibi_slopes=fake.from_tensor(torch.ones(2))).shape == q.shape
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths).shape == q.shape


def test_operators_check_what_they_are_given():
    q, k, v = three()
    options = (None, -1, -1, 0.0, None)
    with pytest.raises(ValueError, match="k is torch.float16: q is torch.float32"):
        torch.ops.flashstrata.forward(q, k.half(), v.half(), *options)
    with pytest.raises(ValueError, match="q is torch.float64: it must be float16"):
        torch.ops.flashstrata.forward(q.double(), k.double(), v.double(), *options)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        torch.ops.flashstrata.forward(q.requires_grad_(), k, v, *options)


def test_slopes():
    q, k, v = three(2, 9, 4, 16)
    slopes = torch.rand(2, 4)
    expected = flash_attn_func(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(flash_attn_func(q, k, v, alibi_slopes=slopes.t().contiguous().t()), expected)
    one = torch.rand(4)
    torch.testing.assert_close(
        flash_attn_func(q, k, v, alibi_slopes=one.expand(2, 4)), flash_attn_func(q, k, v, alibi_slopes=one)
    )
    for wrong in (slopes.t().contiguous(), torch.ones(0), torch.ones(2, 1), torch.ones(1, 2, 4)):
        with pytest.raises(ValueError, match=r"it must be float32 \(4,\) or \(2, 4\)"):
            flash_attn_func(q, k, v, alibi_slopes=wrong)
    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        flash_attn_func(q, k, v, alibi_slopes=slopes.requires_grad_())


def test_what_is_no_tensor():
    q, k, v = three()
    for given, name in (((None, k, v), "q is NoneType"), ((q, None, v), "k is NoneType"), ((q.numpy(), k, v), "q is ndarray")):
        with pytest.raises(TypeError, match=name + ": it must be a torch.Tensor"):
            flash_attn_func(*given)
    rows = [x[0] for x in (q, k, v)]
    with pytest.raises(TypeError, match="cu_seqlens_q is list: it must be a torch.Tensor"):
        flash_attn_varlen_func(*rows, [0, 9], torch.tensor([0, 9], dtype=torch.int32), 9, 9)


def test_nothing_of_every_stride():
    q, k, v = (torch.zeros(0, 9, 2, 32)[..., ::2] for _ in range(3))
    assert flash_attn_func(q, k, v).shape == (0, 9, 2, 16)


def test_an_append_is_a_change():
    q, k, v = three()
    weight = torch.ones(16, requires_grad=True)
    caches = [torch.zeros(1, 32, 2, 16) for _ in range(2)]
    with torch.enable_grad():
        used = (caches[0] * weight).sum()
    with torch.no_grad():
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()
    with torch.inference_mode():
        flash_attn_with_kvcache(q, *(cache.clone() for cache in caches), k, v, cache_seqlens=3)
    with pytest.raises(ValueError, match="k_cache has strides .* must not share memory"):
        flash_attn_with_kvcache(q, torch.zeros(1, 32, 1, 16).expand(1, 32, 2, 16), caches[1], k, v, cache_seqlens=3)
