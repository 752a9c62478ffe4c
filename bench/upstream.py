"""Runs flash-attn's own tests against flashstrata: their file, by path, with our functions under their names.

    python bench/upstream.py flash-attention/tests/test_flash_attn.py  [--sample 40] [--seed 0] [--budget 300]
    python bench/upstream.py flash-attention/hopper/test_flash_attn.py ...

The files are those of github.com/Dao-AILab/flash-attention and are not changed; they need pytest and einops. Of each test function
a seeded sample of its cases is drawn (the wide ones have a hundred thousand), the functions take turns until the budget of
seconds is spent, and each answers with

    passed + failed + unsupported + skipped by upstream, of so many drawn, of so many that it has

`unsupported` are cases that raise `NotImplementedError` or that a table here names, and their reasons are listed. Some are known by
their parameters (dropout): these are counted in full and none is drawn. Exit status 1 when a case failed.

What stands in for flash_attn: its attention functions are ours. What its tests borrow beside those is written here in plain torch:
unpadding, rotary embedding, and the backward pass. Upstream's older file computes gradients before it looks at the output, so a
gradient must come from somewhere; it is torch's, of the same formula, and says nothing of ours, which has none. Functions that
test the backward pass alone are not drawn. The newer file has a switch for it (`FLASH_ATTENTION_DISABLE_BACKWARD`), which is on
here, as is the one for windows (`FLASH_ATTENTION_DISABLE_LOCAL`), for with it each of its cases asks for chunks as well.

`--device cpu` and `--longest 128` try this script where there is no GPU: what asks for "cuda" gets the CPU, in short cases.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import sys
import time
import types

import pytest
import torch

import flashstrata


class Unsupported(NotImplementedError):
    """What is not there, and is known not to be."""


# Test functions that are not drawn, and why.
NOT_DRAWN = {
    r"deterministic|bwd_varlen_overflow": "tests the backward pass alone",
    "generator_arg|varlen_paged_kv_num_splits": "calls flash_attn's C++ extension or private functions",
    "bw_compatibility": "compares the schemas of FlashAttention-3's operators",
    "test_flash_attn_combine": "a function of FlashAttention-3's for parts of a result",
    "block_table_bounds": "wants an error for lengths that only the GPU knows, which takes waiting for it",
}
# Cases that are not drawn, by their parameters.
NOT_COVERED = [
    ("dropout", lambda case: case.get("dropout_p", 0.0) > 0.0),
    ("FP8 in a cache", lambda case: case.get("dtype") == torch.float8_e4m3fn and "page_size" in case),
    ("qv, a second product of scores", lambda case: case.get("has_qv", False)),
    ("cache_leftpad of pages", lambda case: case.get("has_leftpad", False) and case.get("page_size") is not None),
    ("tokens between sequences that nobody uses", lambda case: case.get("add_unused_qkv", False)),
    ("queries of different lengths over a cache", lambda case: case.get("varlen_q", False)),
]


# Attention in plain torch, for gradients.


def plain_attention(q, k, v, scale, left, right, softcap, slopes):
    """Out in float32 of (batch, seqlen, heads, dim)."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    position = torch.arange(rows, device=q.device)[:, None] + columns - rows
    key = torch.arange(columns, device=q.device)[None]
    if slopes is not None:
        scores = scores - slopes.reshape(-1, q.shape[1], 1, 1) * (position - key).abs()
    hidden = torch.zeros(rows, columns, dtype=torch.bool, device=q.device)
    if right >= 0:
        hidden |= key > position + right
    if left >= 0:
        hidden |= key < position - left
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return (p.masked_fill(hidden.all(-1, keepdim=True), 0.0) @ v).transpose(1, 2)


def plain_varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap, slopes):
    out = []
    for entry, (rows, columns) in enumerate(zip(bounds(cu_seqlens_q), bounds(cu_seqlens_k))):
        of_entry = slopes if slopes is None or slopes.dim() == 1 else slopes[entry]
        if rows.stop > rows.start:
            one = plain_attention(q[None, rows], k[None, columns], v[None, columns], scale, left, right, softcap, of_entry)
            out.append(one[0])
    # What lies behind the last sequence has no output.
    return torch.cat([*out, torch.zeros_like(q[cu_seqlens_q[-1] :, :, : v.shape[-1]]).float()])


def bounds(cu_seqlens):
    return [slice(begin, end) for begin, end in itertools.pairwise(cu_seqlens.tolist())]


class Attention(torch.autograd.Function):
    """Our output, and torch's gradients."""

    @staticmethod
    def forward(context, ours, plain, q, k, v):
        context.plain = plain
        context.save_for_backward(q, k, v)
        with torch.no_grad():
            out, lse = ours(q, k, v)
        context.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(context, grad, _):
        inputs = [x.detach().requires_grad_() for x in context.saved_tensors]
        with torch.enable_grad():
            out = context.plain(*inputs)
        return None, None, *torch.autograd.grad(out, inputs, grad.float())


def attention(q, k, v, varlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, **extras):
    """Out and lse; `varlen` is `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)` or nothing."""
    if dropout_p > 0.0:
        raise Unsupported("dropout")
    if v.shape[-1] > 256:
        raise Unsupported("values of more than 256 columns")
    function = flashstrata.flash_attn_varlen_func if varlen else flashstrata.flash_attn_func
    known = inspect.signature(function).parameters
    extras = {name: value for name, value in extras.items() if value is not None}
    for name in extras:
        if name not in known:
            raise Unsupported(f"{name} is given")
    left, right = (int(side) for side in window_size)

    def ours(q, k, v):
        out, lse, *_ = function(
            q, k, v, *varlen, 0.0, softmax_scale, causal, (left, right), softcap, alibi_slopes, False, True, **extras
        )
        return out, lse

    def plain(q, k, v):
        scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
        mask = (left, 0 if causal else right)
        if varlen:
            return plain_varlen_attention(q, k, v, *varlen[:2], scale, *mask, softcap, alibi_slopes)
        return plain_attention(q, k, v, scale, *mask, softcap, alibi_slopes)

    return Attention.apply(ours, plain, q, k, v)


# flash_attn's functions, of version 2 and of version 3.


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    out, lse = attention(q, k, v, (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = attention(
        q, k, v, varlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, block_table=block_table
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, *arguments, **named):
    return flash_attn_func(*qkv.unbind(2), *arguments, **named)


def flash_attn_kvpacked_func(q, kv, *arguments, **named):
    return flash_attn_func(q, *kv.unbind(2), *arguments, **named)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *arguments, **named):
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **named
    )


def flash_attn_varlen_kvpacked_func(q, kv, *arguments, **named):
    return flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **named)


def refuse(**given):
    """What version 3 has beyond version 2, where it is given."""
    for name, value in given.items():
        if value is not None and (isinstance(value, torch.Tensor) or value != 0):
            raise Unsupported(f"{name} is given")


def flash_attn_3_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    refuse(qv=qv, attention_chunk=attention_chunk)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out, lse = attention(q, k, v, (), 0.0, softmax_scale, causal, window_size, softcap, None, **descales)
    return (out, lse) if return_attn_probs else out


def flash_attn_3_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    refuse(qv=qv, attention_chunk=attention_chunk)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    used = {
        name: None if lengths is None or torch.equal(lengths, offsets.diff()) else lengths
        for name, lengths, offsets in (("seqused_q", seqused_q, cu_seqlens_q), ("seqused_k", seqused_k, cu_seqlens_k))
    }
    out, lse = attention(q, k, v, varlen, 0.0, softmax_scale, causal, window_size, softcap, None, **used, **descales)
    return (out, lse) if return_attn_probs else out


def flash_attn_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
    num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    if rotary_seqlens is not cache_seqlens:
        refuse(rotary_seqlens=rotary_seqlens)
    refuse(qv=qv, cu_seqlens_q=cu_seqlens_q, attention_chunk=attention_chunk)
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return flashstrata.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse,
    )  # fmt: skip


def absent(name):
    def function(*_, **__):
        raise Unsupported(name)

    return function


# What tests borrow beside attention.


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Rows that a mask keeps: themselves, their indices, offsets, the longest sequence, and the lengths of what is used."""
    kept = attention_mask if unused_mask is None else attention_mask | unused_mask
    lengths, used = kept.sum(1, dtype=torch.int32), attention_mask.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states, indices, batch, seqlen):
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Rotates pairs of the first columns of (batch, seqlen, heads, dim)."""
    if cu_seqlens is not None:
        raise Unsupported("rotary embedding of packed sequences")
    columns = 2 * cos.shape[-1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    positions = offsets + torch.arange(x.shape[1], device=x.device)
    cos, sin = (table[positions].unsqueeze(2).float() for table in (cos, sin))
    turned = x[..., :columns].float()
    if interleaved:
        one, two = turned[..., 0::2], turned[..., 1::2]
    else:
        one, two = turned.chunk(2, -1)
    pair = one * cos - two * sin, one * sin + two * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = torch.cat([turned.to(x.dtype), x[..., columns:]], -1)
    return x.copy_(turned) if inplace else turned


def install():
    """Puts modules of flash_attn's names where imports look first."""
    of_version_2 = {
        function.__name__: function
        for function in (
            flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
            flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func,
        )
    } | {"flash_attn_with_kvcache": flashstrata.flash_attn_with_kvcache}  # fmt: skip
    modules = {
        "flash_attn": of_version_2,
        "flash_attn.flash_attn_interface": of_version_2
        | {"USE_TRITON_ROCM": False, "_get_block_size_n": absent("dropout")},
        "flash_attn.bert_padding": {"unpad_input": unpad_input, "pad_input": pad_input},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb},
        "flash_attn_interface": {
            "flash_attn_func": flash_attn_3_func,
            "flash_attn_varlen_func": flash_attn_3_varlen_func,
            "flash_attn_with_kvcache": flash_attn_3_with_kvcache,
            "flash_attn_combine": absent("flash_attn_combine"),
            # Hints for a scheduler of theirs.
            "get_scheduler_metadata": lambda *_, **__: None,
        },
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module


class OnCpu(torch.overrides.TorchFunctionMode):
    """What asks for "cuda" gets the CPU."""

    def __torch_function__(self, function, _, arguments=(), named=None):
        named = dict(named or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*arguments, **named)


class Runner:
    """A plugin of pytest's that draws cases, and notes how they end."""

    def __init__(self, options):
        self.options, self.began = options, time.monotonic()
        self.functions = {}
        self.log = open(options.log, "w", encoding="utf-8") if options.log else None  # noqa: SIM115

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        """Replaces a function's parametrisations by one of the cases drawn, for pytest would make all of them."""
        if not name.startswith("test") or not inspect.isfunction(obj):
            return
        if self.options.only and not re.search(self.options.only, name):
            obj.__test__ = False
            return
        marks = getattr(obj, "pytestmark", [])
        sweeps = [mark for mark in marks if mark.name == "parametrize"]
        names, axes = [], []
        for mark in sweeps:
            argnames, values = mark.args[0], mark.args[1]
            argnames = [one.strip() for one in argnames.split(",")] if isinstance(argnames, str) else list(argnames)
            names.extend(argnames)
            is_bare = isinstance(mark.args[0], str) and len(argnames) == 1
            axes.append([(value,) if is_bare else tuple(value) for value in values])
        record = {"cases": math.prod(len(axis) for axis in axes), "not drawn": collections.Counter(), "drawn": 0}
        record |= {"ends": collections.Counter(), "reasons": collections.Counter(), "failures": []}
        self.functions[name] = record
        for pattern, why in NOT_DRAWN.items():
            if re.search(pattern, name):
                record["not drawn"][why] = record["cases"]
                obj.__test__ = False
                return
        if not sweeps:
            record["drawn"] = 1
            return
        eligible = []
        for case in itertools.product(*axes):
            values = tuple(itertools.chain(*case))
            by_name = dict(zip(names, values))
            why = next((why for why, applies in NOT_COVERED if applies(by_name)), None)
            if why is None and self.is_too_long(by_name):
                why = f"longer than {self.options.longest}"
            if why is None:
                eligible.append(values)
            else:
                record["not drawn"][why] += 1
        draw = random.Random(f"{self.options.seed} {name}")
        drawn = draw.sample(eligible, min(self.options.sample, len(eligible)))
        record["drawn"] = len(drawn)
        if not drawn:
            obj.__test__ = False
            return
        obj.pytestmark = [mark for mark in marks if mark.name != "parametrize"]
        pytest.mark.parametrize(names, drawn)(obj)

    def is_too_long(self, case):
        lengths = [value for name, value in case.items() if name.startswith("seqlen") and not isinstance(value, bool)]
        return self.options.longest is not None and any(length > self.options.longest for length in lengths)

    def pytest_collection_modifyitems(self, items):
        """Functions take turns, so that a budget that ends leaves none out."""
        turn = collections.Counter()

        def key(item):
            name = item.function.__name__
            turn[name] += 1
            return turn[name]

        order = {item: key(item) for item in items}
        items.sort(key=order.get)

    def pytest_collectreport(self, report):
        if report.failed:
            print(report.longreprtext)

    def pytest_runtest_setup(self, item):
        if time.monotonic() - self.began > self.options.budget:
            pytest.skip("the budget is spent")
        if self.log:
            print(json.dumps({"begins": item.name}), file=self.log, flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        record = self.functions[item.function.__name__]
        end = None
        if call.excinfo is not None:
            error = call.excinfo.value
            text = str(error).strip().splitlines()
            text = text[0] if text else type(error).__name__
            if isinstance(error, pytest.skip.Exception):
                end = "not run" if "budget" in str(error) else "skipped"
                record["reasons"][f"{end}: {text}"] += 1
            elif isinstance(error, NotImplementedError):
                end = "unsupported"
                record["reasons"][f"{end}: {re.sub(r'[0-9][0-9,.]*', 'n', text)}"] += 1
            else:
                end = "failed"
                record["failures"].append(f"{item.name}: {type(error).__name__}: {text[:300]}")
        elif call.when == "call":
            end = "passed"
        if end:
            record["ends"][end] += 1
            if self.log:
                print(json.dumps({"ends": item.name, "end": end, "s": round(call.duration, 3)}), file=self.log, flush=True)
        return report


def table(functions):
    lines = []
    for name, record in functions.items():
        ends = record["ends"]
        counts = ", ".join(f"{ends[end]} {end}" for end in ("passed", "failed", "unsupported", "skipped", "not run") if ends[end])
        lines.append(f"{name}: {counts or 'none run'}; {record['drawn']:,} drawn of {record['cases']:,}")
        lines.extend(f"    not drawn, {count:,}: {why}" for why, count in record["not drawn"].items())
        lines.extend(f"    {why} ({count})" for why, count in record["reasons"].most_common())
        lines.extend(f"    FAILED {failure}" for failure in record["failures"])
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="flash-attn's tests/test_flash_attn.py or hopper/test_flash_attn.py")
    parser.add_argument("--sample", type=int, default=40, help="cases of each function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no case begins")
    parser.add_argument("--only", help="a regular expression that functions' names must match")
    parser.add_argument("--longest", type=int, help="only cases of sequences no longer than this")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--log", help="a file that gets a line when a case begins and when it ends")
    parser.add_argument("--json", help="a file for all counts")
    options = parser.parse_args()
    if importlib.util.find_spec("einops") is None:
        parser.error("upstream's tests import einops, which is not installed")

    for switch in ("BACKWARD", "LOCAL"):
        os.environ.setdefault(f"FLASH_ATTENTION_DISABLE_{switch}", "TRUE")
    install()
    mode = None
    if options.device == "cpu":
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 40)
        mode = OnCpu()
        mode.__enter__()
    runner = Runner(options)
    arguments = [options.file, "-q", "--tb=no", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-o", "addopts="]
    status = pytest.main(arguments, plugins=[runner])
    if mode:
        mode.__exit__(None, None, None)

    print(table(runner.functions))
    ends = sum((record["ends"] for record in runner.functions.values()), collections.Counter())
    cases = sum(record["cases"] for record in runner.functions.values())
    drawn = sum(record["drawn"] for record in runner.functions.values())
    print(f"in all: {dict(ends)}; {drawn:,} drawn of {cases:,}, seed {options.seed}; flashstrata {flashstrata.__version__}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"seed": options.seed, "functions": runner.functions}, file, indent=1)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(int(status))
    raise SystemExit(1 if ends["failed"] else 0)


if __name__ == "__main__":
    main()
