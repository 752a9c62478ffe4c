"""flash_attn_with_kvcache and packed queries on pages: tensors of the CPU, and of a GPU where there is one, against plain torch."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from flashstrata import dispatch, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def turned(x, cos, sin, positions, interleaved):
    """x (seqlen, heads, dim) turned as at its positions."""
    dim = 2 * cos.shape[1]
    cos, sin = cos[positions].float()[:, None], sin[positions].float()[:, None]
    y = x.float().clone()
    first, second = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 : dim])
    a, b = first.float() * cos - second.float() * sin, first.float() * sin + second.float() * cos
    if interleaved:
        y[..., 0:dim:2], y[..., 1:dim:2] = a, b
    else:
        y[..., : dim // 2], y[..., dim // 2 : dim] = a, b
    return y.to(x.dtype)


def attention(q, k, v, causal, window, softcap, slopes=None):
    """One entry's in f64: q (seqlen_q, heads, dim), k and v (seqlen_k, heads_kv, dim)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0], device=q.device)[None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (position - key).abs()
    left, right = window
    hidden = torch.zeros_like(scores[0], dtype=torch.bool)
    if causal or right >= 0:
        hidden |= key > position + (0 if causal else right)
    if left >= 0:
        hidden |= key < position - left
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0) if k.shape[0] else scores
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def paged(cache, page_size, generator):
    """The same cache in pages that are dealt out at random, and the table."""
    batch, room = cache[0].shape[:2]
    of_entry = -(-room // page_size)
    pages = batch * of_entry + 2
    table = torch.randperm(pages, generator=generator)[: batch * of_entry].int().view(batch, of_entry)
    made = []
    for tensor in cache:
        padded = torch.full((batch, of_entry * page_size, *tensor.shape[2:]), float("nan")).to(tensor)
        padded[:, :room] = tensor
        to = torch.full((pages, page_size, *tensor.shape[2:]), float("nan")).to(tensor)
        to[table.flatten().long().to(tensor.device)] = padded.view(-1, page_size, *tensor.shape[2:])
        made.append(to)
    return made, table.to(cache[0].device)


CASES = list(
    itertools.product(
        [None, 1, 16, 48, 64, 256],
        [(1, 0), (1, 1), (5, 5), (3, 9), (33, 2)],
        ["full", "causal", "window"],
    )
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_any_cache(device, index):
    page_size, (seqlen_q, new), mask = CASES[index]
    generator = torch.Generator().manual_seed(index)
    dtype = [torch.float16, torch.bfloat16, torch.float32][index % 3]
    heads, heads_kv = [(4, 4), (4, 2), (6, 2), (4, 1)][index % 4]
    dim, room = [64, 128, 40][index % 3], 300

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    lengths = [[0, 64, 256], [300 - new, 1, 128], [63, 65, 17]][index % 3]
    named = page_size is None and index % 2 == 1
    rows = [4, 0, 2] if named else [0, 1, 2]
    q = randn(3, seqlen_q, heads, dim)
    cache = [randn(5 if named else 3, room, heads_kv, dim) for _ in range(2)]
    for row, length in zip(rows, lengths):
        for tensor in cache:
            tensor[row, length:] = float("nan")
    k, v = (randn(3, new, heads_kv, dim), randn(3, new, heads_kv, dim)) if new else (None, None)
    rotary = [None, (dim, True), (dim, False), (16, False)][index % 4] if new else None
    cos = sin = None
    if rotary is not None:
        angles = torch.arange(2 * room)[:, None] / 1e4 ** (torch.arange(rotary[0] // 2) / (rotary[0] // 2))
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    # Of rows, places before an entry's first key, in which nobody looks.
    pads = [min(length, [0, 17, 64][(entry + index) % 3]) for entry, length in enumerate(lengths)]
    pads = pads if page_size is None and index % 4 > 1 else [0, 0, 0]
    for row, pad in zip(rows, pads):
        for tensor in cache:
            tensor[row, :pad] = float("nan")
    causal, window = mask == "causal", (40, 5) if mask == "window" else (-1, -1)
    softcap = 20.0 if index % 5 == 4 else 0.0
    slopes = torch.rand(heads, generator=generator).to(device) if index % 7 == 3 else None

    expected_cache = [tensor.clone() for tensor in cache]
    expected = []
    for entry, (row, length, pad) in enumerate(zip(rows, lengths, pads)):
        key, query = None if k is None else k[entry], q[entry]
        if rotary is not None:
            further = torch.arange(seqlen_q) if mask != "full" else torch.zeros(seqlen_q, dtype=torch.int64)
            key = turned(key, cos, sin, (length + torch.arange(new)).to(device), rotary[1])
            query = turned(query, cos, sin, (length + further).to(device), rotary[1])
        if new:
            expected_cache[0][row, length : length + new] = key
            expected_cache[1][row, length : length + new] = v[entry]
        keys, values = (tensor[row, pad : length + new] for tensor in expected_cache)
        expected.append(attention(query, keys, values, causal, window, softcap, slopes))

    table = None
    given, wanted = cache, expected_cache
    if page_size is not None:
        given, table = paged(cache, page_size, generator)
        wanted = paged(expected_cache, page_size, torch.Generator().manual_seed(0))[0]
        for which in range(2):
            wanted[which] = given[which].clone()
            for entry, length in enumerate(lengths):
                for place in range(length, length + new):
                    page = table[entry, place // page_size]
                    wanted[which][page, place % page_size] = expected_cache[which][entry, place]
    out, lse = flash_attn_with_kvcache(
        q, *given, k, v, cos, sin,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cache_batch_idx=torch.tensor(rows, dtype=torch.int32, device=device) if named else None,
        cache_leftpad=torch.tensor(pads, dtype=torch.int32, device=device) if any(pads) else None,
        block_table=table, causal=causal, window_size=window, softcap=softcap,
        rotary_interleaved=rotary is not None and rotary[1], alibi_slopes=slopes,
        num_splits=[0, 1, 3][index % 3], return_softmax_lse=True,
    )  # fmt: skip
    tolerance = TOLERANCE[dtype]
    for entry, (result, of_result) in enumerate(expected):
        torch.testing.assert_close(out[entry].double(), result, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[entry].double(), of_result, atol=2e-3 if dtype != torch.float32 else 1e-4, rtol=1e-4)
    # The cache has what is new, to the rounding of the rotation, and is otherwise what it was.
    for found, want in zip(given, wanted):
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_packed_queries_on_pages(device, page_size):
    generator = torch.Generator().manual_seed(page_size)
    cu_q, lengths = [0, 1, 1, 20], [200, 5, 130]
    q = torch.randn(20, 6, 64, generator=generator).to(device, torch.float16)
    cache = [torch.randn(3, 200, 2, 64, generator=generator).to(device, torch.float16) for _ in range(2)]
    pages, table = paged(cache, page_size, generator)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    out, lse, _ = flash_attn_varlen_func(
        q, *pages, ints(cu_q), ints([0, 200, 205, 335]), 19, 200, causal=True, block_table=table, return_attn_probs=True
    )
    for entry, length in enumerate(lengths):
        rows = slice(cu_q[entry], cu_q[entry + 1])
        result, of_result = attention(q[rows], *(tensor[entry, :length] for tensor in cache), True, (-1, -1), 0.0)
        torch.testing.assert_close(out[rows].double(), result, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[:, rows].double(), of_result, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_of_named_rows(device):
    generator = torch.Generator().manual_seed(8)
    q = torch.randn(2, 3, 4, 64, generator=generator).to(device, torch.float16)
    cache = [torch.randn(3, 80, 2, 64, generator=generator).to(device, torch.float16) for _ in range(2)]
    pages, table = paged(cache, 16, generator)
    lengths, rows = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([70, 33], [2, 0]))
    out = flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, cache_batch_idx=rows, block_table=table)
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, cache_batch_idx=rows), atol=2e-3, rtol=2e-3)


def some_cache(device="cpu", dtype=torch.float32):
    """What a call has: q, the caches, and by name all that may be given of rows, and of pages."""
    generator = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, cache = randn(2, 3, 4, 32), [randn(4, 50, 2, 32), randn(4, 50, 2, 48)]
    rows = dict(cache_seqlens=ints([20, 47]), cache_batch_idx=ints([3, 1]), cache_leftpad=ints([4, 0]), num_splits=2)
    pages = dict(cache_seqlens=ints([20, 47]), block_table=ints([[2], [0]]))
    new = dict(k=randn(2, 3, 2, 32), v=randn(2, 3, 2, 48), rotary_cos=randn(60, 8), rotary_sin=randn(60, 8))
    return q, cache, rows, pages, new


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("in_pages", [False, True])
def test_compiled_and_fake(device, appends, in_pages):
    q, cache, rows, pages, new = some_cache(device)
    given = (pages if in_pages else rows) | (new if appends else {})

    def layer(q, k_cache, v_cache, given):
        out, lse = flash_attn_with_kvcache(q * 2, k_cache, v_cache, **given, causal=True, return_softmax_lse=True)
        # What was appended is seen by what comes after.
        return out, lse, k_cache.sum()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    caches = [[tensor.clone() for tensor in cache] for _ in range(2)]
    expected, found = layer(q, *caches[0], given), compiled(q, *caches[1], given)
    assert all(torch.equal(one, other) for one, other in zip((*expected, *caches[0]), (*found, *caches[1])))
    assert torch.equal(caches[0][0], cache[0]) == (not appends)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor
        of_fakes = {name: fake(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        out, lse = flash_attn_with_kvcache(fake(q), *map(fake, cache), **of_fakes, return_softmax_lse=True)
    for one, other in zip((out, lse), expected):
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_the_operators_are_what_they_say(device):
    q, cache, rows, pages, new = some_cache(device)
    options = (None, -1, 0, 0.0, None)
    places = [
        tuple(given.get(name) for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"))
        for given in (rows, pages)
    ]
    for place in places:
        torch.library.opcheck(dispatch.cache_forward_op, (q, *cache, *place, 0, *options))
        torch.library.opcheck(dispatch.append_forward_op, (q, *cache, *new.values(), False, *place, 0, *options))
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    packed = (ints([0, 2, 6]), ints([0, 20, 67]), 4, 47)
    torch.library.opcheck(dispatch.varlen_forward_op, (q.flatten(0, 1), *cache, *packed, places[1][-1], *options))
    torch.library.opcheck(dispatch.forward_op, (q, *(tensor[:2] for tensor in cache), *options))


@pytest.mark.parametrize("device", DEVICES)
def test_the_short_way_is_the_long_way(device):
    q, cache, rows, pages, new = some_cache(device)
    names = ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
    options = (None, 30, 0, 0.0, None)

    def tuple_of(given):
        return (*(given.get(name) for name in names), True, given.get("num_splits", 0))

    for given in (rows, pages, rows | new, pages | new, {"cache_seqlens": rows["cache_seqlens"]}):
        short_cache, long_cache = ([tensor.clone() for tensor in cache] for _ in range(2))
        short = dispatch.short(q, *short_cache, *options, None, True, tuple_of(given))
        long = dispatch.forward(q, *long_cache, *options, None, tuple_of(given))
        for one, other in zip((*short, *short_cache), (*long, *long_cache)):
            assert torch.equal(one, other) and one.stride() == other.stride()
    # Nothing is said of this cache: it is tensors like others.
    plain = dispatch.short(q, *(tensor[:2] for tensor in cache), *options, None, True, tuple_of({}))
    assert torch.equal(plain[0], flash_attn_func(q, *(tensor[:2] for tensor in cache), causal=True, window_size=(30, 0)))
    lengths = rows["cache_seqlens"]
    for other in (
        {"cache_seqlens": lengths.long()}, {"cache_seqlens": lengths[:1]}, {"cache_seqlens": lengths[None]},
        {"block_table": lengths}, {"num_splits": -1}, {"k": new["k"], "v": new["v"]}, rows | {"k": new["k"]},
        rows | new | {"rotary_sin": None}, rows | new | {"rotary_sin": new["rotary_sin"][:9]}, rows | new | {"k": new["k"].half()},
        rows | {"rotary_cos": new["rotary_cos"], "rotary_sin": new["rotary_sin"]}, rows | new | {"k": new["k"][0]},
    ):  # fmt: skip
        assert dispatch.short(q, *cache, *options, None, True, tuple_of(other)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_recorded_step_is_replayed_at_other_lengths():
    q, cache, rows, pages, new = some_cache("cuda", torch.bfloat16)
    for given in (rows | new, pages | new):
        lengths = given["cache_seqlens"]
        flash_attn_with_kvcache(q, *cache, **given, causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attn_with_kvcache(q, *cache, **given, causal=True)
        for step in ((5, 6), (40, 41), (4, 0)):
            lengths.copy_(torch.tensor(step))
            q.copy_(torch.randn_like(q))
            copies = [tensor.clone() for tensor in cache]
            graph.replay()
            assert torch.equal(out, flash_attn_with_kvcache(q, *copies, **given, causal=True))
            assert all(torch.equal(one, other) for one, other in zip(cache, copies))


def test_a_length_for_all():
    q, cache = torch.randn(2, 3, 4, 32), torch.randn(2, 2, 50, 4, 32)
    whole = flash_attn_with_kvcache(q, *cache, causal=True)
    part = flash_attn_with_kvcache(q, *cache, cache_seqlens=20, causal=True)
    for length, found in ((50, whole), (20, part)):
        for entry in range(2):
            want, _ = attention(q[entry], cache[0, entry, :length], cache[1, entry, :length], True, (-1, -1), 0.0)
            torch.testing.assert_close(found[entry].double(), want, atol=1e-5, rtol=1e-5)
    k = v = torch.randn(2, 1, 4, 32)
    flash_attn_with_kvcache(q[:, :1], *cache, k, v, cache_seqlens=20)
    assert torch.equal(cache[0, :, 20], k[:, 0]) and torch.equal(cache[1, :, 20], v[:, 0])


def test_what_is_refused():
    q, cache = torch.randn(2, 3, 4, 32), torch.randn(2, 2, 50, 4, 32)
    k = torch.randn(2, 3, 4, 32)
    lengths = torch.tensor([5, 6], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    angles = torch.randn(60, 16)
    refused = [
        (ValueError, r"cache_leftpad is torch.int64 \(2,\) on cpu: it must be int32 \(2,\) on cpu", dict(cache_leftpad=lengths.long())),
        (ValueError, r"cache_leftpad\[1\] is 7: it must be 0 to 6", dict(cache_seqlens=lengths, cache_leftpad=lengths + torch.tensor([0, 1]).int())),
        (NotImplementedError, "cache_leftpad and block_table are given", dict(cache_leftpad=lengths, block_table=table)),
        (ValueError, "k and v go together", dict(k=k, cache_seqlens=lengths)),
        (ValueError, "k is given without cache_seqlens", dict(k=k, v=k)),
        (ValueError, "rotary_cos is given without k", dict(rotary_cos=angles, rotary_sin=angles)),
        (ValueError, "go together", dict(k=k, v=k, rotary_cos=angles, cache_seqlens=lengths)),
        (ValueError, "cache_seqlens is torch.int64", dict(cache_seqlens=lengths.long())),
        (ValueError, "cache_seqlens is 51: it must be 0 to 50", dict(cache_seqlens=51)),
        (ValueError, r"cache_seqlens\[1\] is 51: it must be 0 to 50", dict(cache_seqlens=lengths + 45)),
        (ValueError, r"cache_seqlens\[0\] is 50: it must be 0 to 47", dict(k=k, v=k, cache_seqlens=lengths + 45)),
        (ValueError, r"cache_batch_idx\[0\] is 5", dict(cache_seqlens=lengths, cache_batch_idx=lengths)),
        (ValueError, r"block_table\[0\] is 2", dict(cache_seqlens=lengths, block_table=table + 2)),
        (ValueError, "the positions of rotary_cos", dict(k=k, v=k, rotary_cos=angles[:40], rotary_sin=angles[:40], cache_seqlens=lengths)),
        (ValueError, "num_splits is -1", dict(num_splits=-1)),
        (ValueError, "k is torch.float16", dict(k=k.half(), v=k.half(), cache_seqlens=lengths)),
        (ValueError, "k_new", dict(k=k[:, :, :2], v=k[:, :, :2], cache_seqlens=lengths)),
    ]  # fmt: skip
    before = cache.clone()
    for kind, text, arguments in refused:
        with pytest.raises(kind, match=text):
            flash_attn_with_kvcache(q, *cache, **arguments)
    assert torch.equal(cache, before)
    with pytest.raises(NotImplementedError, match="requires grad"):
        flash_attn_with_kvcache(q.requires_grad_(), *cache, cache_seqlens=lengths)
