"""The drop-in functions against torch in f64, on a GPU; skipped where there is none."""

import math
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import flashstrata  # noqa: E402
from flashstrata import flash_attn_func, flash_attn_varlen_func  # noqa: E402


def reference(q, k, v, causal=False, window=(-1, -1)):
    """Out and lse of (batch, seqlen, heads, dim) in f64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    position = torch.arange(scores.shape[-2], device=q.device)[:, None] + scores.shape[-1] - scores.shape[-2]
    key = torch.arange(scores.shape[-1], device=q.device)[None]
    left, right = window[0], 0 if causal else window[1]
    if right >= 0:
        scores = scores.masked_fill(key > position + right, -math.inf)
    if left >= 0:
        scores = scores.masked_fill(key < position - left, -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return (p @ v).transpose(1, 2), lse


def close(out, expected):
    assert not out.isnan().any()
    error = (out.double() - expected).abs().max().item()
    assert error < (2e-2 if out.dtype == torch.bfloat16 else 3e-3), error


def lse_close(lse, expected):
    assert torch.where(lse.double() == expected, 0.0, (lse.double() - expected).abs()).max() < 2e-3


def tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dtype):
    def tensor(seqlen, count):
        return torch.randn(batch, seqlen, count, dim, device="cuda", dtype=dtype)

    return tensor(seqlen_q, heads), tensor(seqlen_k, heads_kv), tensor(seqlen_k, heads_kv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [32, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 203), (256, 256), (1, 339), (799, 3), (1023, 1024)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(dtype, dim, seqlen_q, seqlen_k, causal):
    q, k, v = tensors(2, seqlen_q, seqlen_k, 6, 2, dim, dtype)
    try:
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    except NotImplementedError as error:
        assert dtype == torch.float32 and dim > 128, error
        return
    expected, expected_lse = reference(q, k, v, causal)
    close(out, expected)
    lse_close(lse, expected_lse)


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="8-bit kernels are of compute capability 9.0")
@pytest.mark.parametrize("given", [(), ("q", "k", "v"), ("v",)])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_eight_bits(given, dim):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(2, 333, 500, 6, 2, dim, torch.float32))
    descales = {f"{name}_descale": 0.5 * torch.rand(2, 2, device="cuda") + 0.25 for name in given}
    ones = torch.ones(2, 2, device="cuda")

    def scaled(name, x):
        descale = descales.get(f"{name}_descale", ones).repeat_interleave(x.shape[2] // 2, 1)
        return x.double() * descale[:, None, :, None]

    expected, expected_lse = reference(scaled("q", q), scaled("k", k), scaled("v", v), causal=True)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **descales)
    assert out.dtype == torch.bfloat16 and not out.isnan().any()
    assert (out.double() - expected).abs().max() < 0.05 * expected.abs().max()
    lse_close(lse, expected_lse)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    offsets = (torch.arange(3, device="cuda") * n for n in (333, 500))
    offsets = [one.int() for one in offsets]
    packed = flash_attn_varlen_func(*rows, *offsets, 333, 500, causal=True, **descales)
    assert torch.equal(packed, out.flatten(0, 1))
    # Of one number for all, which is copied.
    one = torch.full((1, 1), 0.7, device="cuda")
    same = [flash_attn_func(q, k, v, v_descale=x) for x in (one.expand(2, 2), one.expand(2, 2).contiguous())]
    assert torch.equal(*same)
    columns_apart = v.transpose(-1, -3).contiguous().transpose(-1, -3)
    assert torch.equal(flash_attn_func(q, k, columns_apart, causal=True, **descales), out)


@pytest.mark.parametrize("window", [(64, 0), (-1, 17), (100, 100), (0, 0), (33, -1)])
def test_windows(window):
    q, k, v = tensors(2, 333, 500, 4, 4, 64, torch.bfloat16)
    close(flash_attn_func(q, k, v, window_size=window), reference(q, k, v, window=window)[0])


def test_packed_tensors_and_strides():
    qkv = torch.randn(2, 257, 3, 4, 64, device="cuda", dtype=torch.float16)
    q, k, v = qkv.unbind(2)
    expected = reference(q, k, v, causal=True)[0]
    close(flashstrata.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    close(flashstrata.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    close(flash_attn_func(*by_head, causal=True), expected)
    columns_apart = k.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    close(flash_attn_func(q, columns_apart, v, causal=True), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_different_lengths(causal):
    lengths_q, lengths_k = [100, 0, 1, 333], [200, 70, 0, 333]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(sum(lengths_k), 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 333, 333, causal=causal, return_attn_probs=True)
    assert lse.shape == (4, sum(lengths_q))
    for entry in range(4):
        queries, keys = slice(cu_q[entry], cu_q[entry + 1]), slice(cu_k[entry], cu_k[entry + 1])
        if lengths_k[entry] == 0:
            assert (out[queries] == 0).all() and (lse[:, queries] == -math.inf).all()
        elif lengths_q[entry]:
            expected, expected_lse = reference(q[None, queries], k[None, keys], v[None, keys], causal)
            close(out[queries], expected[0])
            lse_close(lse[:, queries], expected_lse[0])


def test_compiled_is_the_same():
    q, k, v = tensors(1, 200, 200, 4, 4, 64, torch.bfloat16)

    def layer(q, k, v):
        return flash_attn_func(q * 2, k, v, causal=True) + 1

    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v))


def test_what_is_not_there_says_so():
    q, k, v = tensors(1, 16, 16, 2, 2, 64, torch.float16)
    given = {"q": q, "k": k, "v": v}
    for other in ({"dropout_p": 0.1}, {"q": q.clone().requires_grad_()}):
        with pytest.raises(NotImplementedError):
            flash_attn_func(**(given | other))
    for other in ({"q": q.cpu()}, {"k": k.bfloat16()}, {"k": k[..., :32]}, {"v": v.cpu()}, {x: given[x].double() for x in given}):
        with pytest.raises(ValueError):
            flash_attn_func(**(given | other))


def test_the_same_bits_beside_other_work():
    q, k, v = tensors(2, 2048, 2048, 16, 16, 128, torch.bfloat16)
    first, first_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for repeat in range(1000):
        if repeat % 5 == 0:
            with torch.cuda.stream(other):
                a @ a
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        different += (out != first).sum() + (lse != first_lse).sum()
    assert different.item() == 0


def test_threads_and_streams():
    q, k, v = tensors(2, 300, 300, 4, 4, 64, torch.float16)
    expected = flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                if not torch.equal(flash_attn_func(q, k, v, causal=True), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_arguments_are_named():
    q, k, v = tensors(1, 16, 16, 2, 2, 64, torch.float16)
    for given, says in (
        ((q, k.cpu(), v), "k is on cpu"),
        ((q.cpu(), k, v), "k is on cuda"),
        ((q, k, v.bfloat16()), "v is torch.bfloat16"),
        ((q.double(), k.double(), v.double()), "q is torch.float64"),
        ((q[0], k[0], v[0]), "q has shape"),
    ):
        with pytest.raises(ValueError, match=says):
            flash_attn_func(*given)
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn_func(q, k, v, alibi_slopes=torch.zeros(2))
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is torch.int32 \(2,\) on cpu"):
        flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets.cuda(), 16, 16)


def test_a_tensor_that_is_freed_on_another_stream():
    stream = torch.cuda.Stream()
    for _ in range(20):
        q, k, v = tensors(2, 1000, 1000, 8, 8, 64, torch.float16)
        expected = reference(q, k, v)[0]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            out = flash_attn_func(q, k, v)
        for x in (q, k, v):
            x.record_stream(stream)
        del q, k, v, x
        # What was freed is not given to others before the stream is done with it.
        poison = [torch.full((2, 1000, 8, 64), math.nan, device="cuda", dtype=torch.float16) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(stream)
        close(out, expected)
        del poison


def test_a_graph_is_replayed():
    q, k, v = tensors(2, 512, 512, 8, 2, 128, torch.bfloat16)
    one_query = q[:, :1].clone()
    graphs = []
    for given in ((q, k, v), (one_query, k, v)):
        # Kernels are compiled before; memory of the stream's own is not there yet.
        flash_attn_func(*given, causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse, _ = flash_attn_func(*given, causal=True, return_attn_probs=True)
        graphs.append((graph, given, out, lse))
    for _ in range(3):
        for x in (q, k, v, one_query):
            x.copy_(torch.randn_like(x))
        for graph, given, out, lse in graphs:
            graph.replay()
            expected, expected_lse = reference(*given, causal=True)
            close(out, expected)
            lse_close(lse, expected_lse)
    close(flash_attn_func(q, k, v, causal=True), reference(q, k, v, causal=True)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus():
    q, k, v = tensors(2, 300, 300, 4, 4, 64, torch.float16)
    there = [x.to("cuda:1") for x in (q, k, v)]
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        out = flash_attn_func(*there, causal=True)
        assert out.device == there[0].device and torch.cuda.current_device() == 0
        close(out.to("cuda:0"), reference(q, k, v, causal=True)[0])
        close(flash_attn_func(q, k, v, causal=True), reference(q, k, v, causal=True)[0])
    with torch.cuda.device(1):
        close(flash_attn_func(*there).to("cuda:0"), reference(q, k, v)[0])
    with pytest.raises(ValueError, match="k is on cuda:1"):
        flash_attn_func(q, there[1], v)


def test_a_forked_process_has_an_error():
    import os
    import signal

    q, k, v = tensors(1, 64, 64, 2, 2, 64, torch.float16)
    flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        # The driver does not survive a fork; the call must say so, neither hang nor crash.
        signal.alarm(60)
        try:
            flash_attn_func(q, k, v)
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    close(flash_attn_func(q, k, v), reference(q, k, v)[0])
