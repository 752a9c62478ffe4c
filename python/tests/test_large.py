"""More heads or batches than a grid has in y and z, and more elements than 32 bits count: on a GPU, skipped where there is none."""

import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from flashstrata import dispatch, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

STRATA = [None, "naive", "v1", "v2", "v2_kt", "v2_tc", "v3"]
MANY = 70_000


def reference(q, k, v, causal):
    """Out and lse of (batch, seqlen, heads, dim) in f64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        last = torch.arange(scores.shape[-2], device=q.device)[:, None] + scores.shape[-1] - scores.shape[-2]
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=q.device)[None] > last, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def forward(q, k, v, causal, stratum):
    if stratum == "v3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("v3 is for Hopper")
    return dispatch.forward(q, k, v, None, -1, 0 if causal else -1, 0.0, None, stratum=stratum)


def close(out, lse, q, k, v, causal, heads=slice(None), batch=slice(None)):
    """Of the query heads and entries given, whose key heads are as many."""
    expected, expected_lse = reference(q[batch, :, heads], k[batch, :, heads], v[batch, :, heads], causal)
    assert (out[batch, :, heads].double() - expected).abs().max() < 3e-3
    assert (lse[batch, heads].double() - expected_lse).abs().max() < 1e-3


@pytest.mark.parametrize("stratum", STRATA)
@pytest.mark.parametrize("shape", [(1, 5, MANY, 32), (MANY, 5, 1, 32)], ids=["heads", "batches"])
def test_many(shape, stratum):
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    close(*forward(q, k, v, True, stratum), q, k, v, True)


def test_many_packed():
    """Sequences of 0 to 3 tokens, 70,000 of them."""
    offsets = (torch.arange(MANY) % 4).cumsum(0).int()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), offsets]).cuda()
    q, k, v = (torch.randn(int(offsets[-1]), 2, 32, device="cuda", dtype=torch.float16) for _ in range(3))
    out = flash_attn_varlen_func(q, k, v, offsets, offsets, 3, 3)
    for length in range(1, 4):
        where = offsets[:-1][length::4][:, None].long() + torch.arange(length, device="cuda")
        expected, _ = reference(q[where], k[where], v[where], False)
        assert (out[where].double() - expected).abs().max() < 3e-3


@pytest.mark.parametrize("stratum", STRATA)
def test_elements(stratum):
    """Each tensor has 2^31 and some: the first, the last and two between are compared."""
    batch, seqlen, heads, dim = 16_500, 32, 32, 128
    assert batch * seqlen * heads * dim > 2**31
    q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.float16) for _ in range(3))
    out, lse = forward(q, k, v, True, stratum)
    for entry in (0, 8_191, 16_383, 16_384, batch - 1):
        close(out, lse, q, k, v, True, batch=slice(entry, entry + 1))


@pytest.mark.parametrize("stratum", STRATA)
def test_strides(stratum):
    """A head's and an entry's stride are beyond 2^31 elements."""
    apart = 2**31 + 64
    memory = [torch.empty(3 * apart + 128 * 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    q, k, v = (x.as_strided((2, 128, 2, 64), (apart, 64, 2 * apart, 1)) for x in memory)
    for x in (q, k, v):
        x.normal_()
    close(*forward(q, k, v, True, stratum), q, k, v, True)


def test_one_long_row_of_keys():
    """One query on 2^24 keys and some, 2^31 elements, by parts."""
    keys = 2**24 + 100
    q = torch.randn(1, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, keys, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # These four weigh about as much as all others together.
    for key in (0, 2**23, 2**24, keys - 1):
        k[:, key] = q[:, 0, :1] * 1.4
    out = flash_attn_func(q, k, v)
    scores = (q[0, 0].double() @ k[0, :, 0].T.double()) * 128**-0.5
    expected = scores.softmax(-1) @ v[0, :, 0].double()
    assert (out[0, 0].double() - expected).abs().max() < 1e-2
    lengths = torch.tensor([keys], dtype=torch.int32, device="cuda")
    assert (flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)[0, 0].double() - expected).abs().max() < 1e-2
