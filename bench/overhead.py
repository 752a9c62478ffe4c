"""What a call costs beside its kernel: the time of the host, call by call.

    python bench/overhead.py [--device cuda|cpu] [--calls 2000] [--samples 15] [--json FILE]

The problem is so small that the GPU is done with a call before the host has prepared the next. Of each contender, medians with the
middle half of the samples, which take turns:

- `returns`: from the call to its return while the GPU is kept busy with something else before. Nothing waits for a kernel, so this
  is what a call costs beyond it: all that the host does, the driver's launch included.
- `rate`: calls back to back, to the end of the last one's kernel, over their number: what a user sees of small calls.
- `kernel`: what the GPU takes for a call, of calls that queue behind other work. It is hidden behind the host where it is less.

`launch`, one fill of a tensor by torch, and `allocation`, one of its size, are what a call cannot do without. Contenders that are not there are left out, and that is said.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashstrata
from flashstrata import dispatch

# A clock cycle of a GPU takes about half a nanosecond.
CYCLES_A_CALL = 200_000
# A GPU's queue holds about a thousand launches; a call beyond that waits.
QUEUED = 200


def contenders(device, dtype, batch, seqlen, heads, dim):
    """Functions of nothing by name, and why others are not there."""

    def tensor():
        return torch.randn(batch, seqlen, heads, dim, device=device, dtype=dtype)

    q, k, v = tensor(), tensor(), tensor()
    offsets = torch.arange(0, (batch + 1) * seqlen, seqlen, device=device, dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    found, absent = {}, {}
    found["flash_attn_func"] = lambda: flashstrata.flash_attn_func(q, k, v, causal=True)
    found["flash_attn_func, with lse"] = lambda: flashstrata.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    found["flash_attn_varlen_func"] = lambda: flashstrata.flash_attn_varlen_func(
        *rows, offsets, offsets, seqlen, seqlen, causal=True
    )
    lengths = torch.full((batch,), seqlen - 1, device=device, dtype=torch.int32)
    one = [x[:, :1].clone() for x in (q, k, v)]
    found["flash_attn_with_kvcache"] = lambda: flashstrata.flash_attn_with_kvcache(one[0], k, v, cache_seqlens=lengths, causal=True)
    found["the same, a key appended"] = lambda: flashstrata.flash_attn_with_kvcache(
        one[0], k, v, *one[1:], cache_seqlens=lengths, causal=True
    )
    found["the operator"] = lambda: dispatch.forward_op(q, k, v, None, -1, 0, 0.0, None)

    def layer(q, k, v):
        return flashstrata.flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(layer, fullgraph=True)
    found["torch.compile"] = lambda: compiled(q, k, v)

    backends = {"torch flash": SDPBackend.FLASH_ATTENTION}
    if device == "cuda":
        backends["torch cuDNN"] = SDPBackend.CUDNN_ATTENTION
    for name, backend in backends.items():
        # The backend is chosen once, outside of what is timed.
        found[name] = (lambda: F.scaled_dot_product_attention(*by_head, is_causal=True), backend)
    for name, module in (("flash_attn 2", "flash_attn"), ("flash_attn 3", "flash_attn_interface"), ("flash_attn 4", "flash_attn.cute")):
        try:
            function = __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
            found[name] = lambda function=function: function(q, k, v, causal=True)
        except Exception as error:  # noqa: BLE001: whatever somebody's import raises
            absent[name] = f"{type(error).__name__}: {error}"
    out = torch.empty_like(q)
    found["launch"] = lambda: out.zero_()
    found["allocation"] = lambda: torch.empty_like(q)
    return found, absent


class Chosen:
    """A context for torch's backend, where a contender has one."""

    def __init__(self, contender):
        self.call, backend = contender if isinstance(contender, tuple) else (contender, None)
        self.context = sdpa_kernel(backend) if backend is not None else None

    def __enter__(self):
        if self.context is not None:
            self.context.__enter__()
        return self.call

    def __exit__(self, *error):
        if self.context is not None:
            self.context.__exit__(*error)


def host_us(call, calls, is_gpu):
    """Microseconds until a call returns, with the GPU behind."""
    done, taken = 0, 0
    while done < calls:
        now = min(QUEUED, calls - done) if is_gpu else calls
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(CYCLES_A_CALL * QUEUED)
        begin = time.perf_counter_ns()
        for _ in range(now):
            call()
        taken += time.perf_counter_ns() - begin
        done += now
    return taken / calls / 1e3


def rate_us(call, calls, is_gpu):
    """Microseconds a call of calls back to back, to the end of the last."""
    if is_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    if is_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / calls / 1e3


def kernel_us(call):
    """Microseconds that the GPU takes for a call when the next ones are queued already."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES_A_CALL * QUEUED)
    begin.record()
    for _ in range(QUEUED):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / QUEUED * 1e3


def middle(samples):
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return {"median": median, "low": low, "high": high}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2000, help="in a sample")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--problem", default="1x16x1x64", help="batch x seqlen x heads x head_dim")
    parser.add_argument("--json", help="a file for all figures")
    arguments = parser.parse_args()

    is_gpu = arguments.device == "cuda"
    shape = [int(extent) for extent in arguments.problem.split("x")]
    found, absent = contenders(arguments.device, torch.bfloat16, *shape)
    for name, why in absent.items():
        print(f"{name} is not here: {why}", file=sys.stderr)
    figures = {}
    with torch.no_grad():
        for name, contender in list(found.items()):
            try:
                with Chosen(contender) as call:
                    for _ in range(20):
                        call()
                figures[name] = {"returns": [], "rate": [], "kernel": []}
            except Exception as error:  # noqa: BLE001
                print(f"{name} fails: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        gc.disable()
        for _ in range(arguments.samples):
            for name, of in figures.items():
                with Chosen(found[name]) as call:
                    of["returns"].append(host_us(call, arguments.calls, is_gpu))
                    of["rate"].append(rate_us(call, arguments.calls, is_gpu))
                    if is_gpu:
                        of["kernel"].append(kernel_us(call))
        gc.enable()

    where = torch.cuda.get_device_name() if is_gpu else "CPU"
    print(f"{arguments.problem} bf16 causal on {where}, torch {torch.__version__}; microseconds a call, middle half in parentheses")
    print(f"{'':28}{'returns':>24}{'rate':>24}{'kernel':>9}")
    rows = []
    for name, of in figures.items():
        row = {"name": name, "returns": middle(of["returns"]), "rate": middle(of["rate"])}
        text = "".join(
            f"{row[figure]['median']:>9.2f} ({row[figure]['low']:.2f}-{row[figure]['high']:.2f})".rjust(24)
            for figure in ("returns", "rate")
        )
        if is_gpu:
            row["kernel_us"] = statistics.median(of["kernel"])
            text += f"{row['kernel_us']:>9.2f}"
        rows.append(row)
        print(f"{name:28}{text}")
    if arguments.json:
        document = {"device": where, "torch": torch.__version__, "flashstrata": flashstrata.__version__, "problem": arguments.problem}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(document | {"rows": rows, "absent": absent}, file, indent=1)


if __name__ == "__main__":
    main()
