"""Times attention's forward pass side by side with its peers, in one process, after verifying what it times.

    python bench/side_by_side.py [--lengths 512,1024,...] [--dims 64,128,256] [--json FILE] [--markdown FILE]

Problems: hidden size 2048, batch x seqlen = 16,384, bf16, without mask and causal. TFLOP/s are `4 b h s^2 d` over the median
time, halved for causal masks. Samples of the contenders follow each other in turn, so that all see the same clocks; the interval is
the middle half of the samples. The rate of a large matrix product, before and after, says what the card gave that day.

Contenders that are not there are left out, and that is said: `ours` (what the library picks, and each generation named by
`--strata`), `cudnn` and `fa2` (torch's backends), `fa4` and `fa3` (where they can be imported).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashstrata
from flashstrata import dispatch

HIDDEN, TOKENS = 2048, 16384
AHEAD_CLOCKS = 500_000
PEERS = ("cudnn", "fa2", "fa3", "fa4")


def scores_of(q, k, causal):
    """Scaled scores of (batch, heads, seqlen, dim), minus infinity where a causal mask hides the key."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        i = torch.arange(scores.shape[-2], device=q.device)[:, None] + scores.shape[-1] - scores.shape[-2]
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=q.device)[None] > i, -math.inf)
    return scores


def by_head(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def reference(q, k, v, causal):
    """Out and lse in f64."""
    q, k, v = by_head(q.double(), k.double(), v.double())
    scores = scores_of(q, k, causal)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return (p @ v).transpose(1, 2), lse


def allowed_error(q, k, v, causal, ref):
    """CONTRACT's tolerance: twice the error of the plain algorithm in the input type, and of rounding."""
    qh, kh, vh = by_head(q, k, v)
    p = torch.softmax(scores_of(qh, kh, causal).float(), -1).nan_to_num(0.0).to(q.dtype)
    plain = ((p @ vh).transpose(1, 2).double() - ref).abs().max().item()
    rounded = ref.to(q.dtype)
    rounding = ((rounded + 0.3) - 0.3 - rounded).abs().max().item()
    return 2 * plain + 2 * rounding


def verify(stratum, dim, causal, dtype):
    """Problems off the tiles' borders, into memory that was NaN; ends the program where one is wrong."""
    worst = 0.0
    for batch, seqlen_q, seqlen_k, heads, heads_kv in [
        (2, 256, 256, 2, 2),
        (1, 300, 500, 4, 2),
        (1, 77, 33, 2, 1),
        (2, 513, 1030, 3, 1),
        (1, 1, 700, 8, 2),
        (3, 2049, 2049, 6, 6),
    ]:
        def tensor(seqlen, count):
            return torch.randn(batch, seqlen, count, dim, device="cuda", dtype=dtype)

        q, k, v = tensor(seqlen_q, heads), tensor(seqlen_k, heads_kv), tensor(seqlen_k, heads_kv)
        # What the allocator gives next is this.
        poison = torch.full_like(q, math.nan), torch.full((batch, heads, seqlen_q), math.nan, device="cuda")
        del poison
        out, lse = dispatch.forward(q, k, v, None, -1, 0 if causal else -1, 0.0, None, stratum=stratum)
        ref, ref_lse = reference(q, k, v, causal)
        error, allowed = (out.double() - ref).abs().max().item(), allowed_error(q, k, v, causal, ref)
        lse_error = torch.where(lse.double() == ref_lse, 0.0, (lse.double() - ref_lse).abs()).max().item()
        if not error <= allowed or not lse_error < 1e-3:
            name = f"{stratum} {dtype} d {dim} causal={causal} {batch}x{heads}/{heads_kv}x{seqlen_q}/{seqlen_k}"
            raise SystemExit(f"WRONG: {name}: out off by {error}, allowed {allowed}; lse off by {lse_error}")
        worst = max(worst, error / allowed)
    return worst


def contenders(strata, wanted):
    """Functions of q, k, v (batch, seqlen, heads, dim) and causal, by name, and why others are not there."""

    def ours(stratum):
        return lambda q, k, v, causal: dispatch.forward(
            q, k, v, None, -1, 0 if causal else -1, 0.0, None, stratum=stratum
        )

    def sdpa(backend):
        def call(q, k, v, causal):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
                )

        return call

    found, absent = {"ours": ours(None)}, {}
    found |= {stratum: ours(stratum) for stratum in strata}
    found |= {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    for name, module in (("fa4", "flash_attn.cute"), ("fa3", "flash_attn_interface")):
        try:
            function = __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
            found[name] = lambda q, k, v, causal, function=function: function(q, k, v, causal=causal)
        except Exception as error:  # noqa: BLE001: whatever somebody's import raises
            absent[name] = f"{type(error).__name__}: {error}"
    return {name: call for name, call in found.items() if not wanted or name in wanted}, absent


def sample(calls, samples, inner):
    """Milliseconds of each call, sample by sample in turn, and why others failed."""
    times, failed = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            times[name] = []
        except Exception as error:  # noqa: BLE001
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    for _ in range(samples):
        events = []
        for name in times:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The GPU is kept waiting while the CPU prepares the calls: what is timed is kernels, not how fast they are asked for.
            torch.cuda._sleep(AHEAD_CLOCKS)
            begin.record()
            for _ in range(inner):
                calls[name]()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            times[name].append(begin.elapsed_time(end) / inner)
    return times, failed


def gemm_rate():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times, _ = sample({"gemm": lambda: a @ b}, 9, 5)
    return 2 * 8192**3 / statistics.median(times["gemm"]) / 1e9


def markdown(document):
    """The table: in each cell ours, and the best peer with its name."""
    cells = {(cell["dim"], cell["mask"], cell["seqlen"]): cell["tflops"] for cell in document["cells"]}
    lengths = sorted({length for _, _, length in cells})
    lines = ["| d, mask | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    ratios = []
    for dim, mask in dict.fromkeys((dim, mask) for dim, mask, _ in cells):
        row = [f"{dim}, {mask}"]
        for length in lengths:
            rates = cells.get((dim, mask, length), {})
            peers = {name: rate for name, rate in rates.items() if name in PEERS}
            if "ours" not in rates or not peers:
                row.append("")
                continue
            best = max(peers, key=peers.get)
            ratios.append(rates["ours"] / peers[best])
            row.append(f"{rates['ours']:.0f} / {peers[best]:.0f} {best}")
        lines.append("| " + " | ".join(row) + " |")
    if ratios:
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        lines.append(f"\nOurs over the best peer: geometric mean {mean:.3f}, least {min(ratios):.3f}.")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text):
        return [int(item) for item in text.split(",")]

    def names(text):
        return [item for item in text.split(",") if item]

    parser.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--masks", type=names, default=["full", "causal"])
    parser.add_argument("--strata", type=names, default=[], help="generations beside the one that the library picks")
    parser.add_argument("--contenders", type=names, default=[], help="only these")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--sample-ms", type=float, default=3.0, help="milliseconds that one sample takes, about")
    parser.add_argument("--json", help="a file for all figures")
    parser.add_argument("--markdown", help="a file for the table")
    arguments = parser.parse_args()

    began = time.time()
    torch.manual_seed(0)
    calls, absent = contenders(arguments.strata, arguments.contenders)
    for name, why in absent.items():
        print(f"{name} is not here: {why}", file=sys.stderr)
    for stratum in ([None] if "ours" in calls else []) + arguments.strata:
        for dim in arguments.dims:
            for mask in arguments.masks:
                worst = max(verify(stratum, dim, mask == "causal", dtype) for dtype in (torch.bfloat16, torch.float16))
                print(f"verified {stratum or 'ours'} d {dim} {mask}: errors at most {worst:.2f} of what is allowed")
    print(f"{time.time() - began:.0f} s so far", flush=True)

    rates, cells = [gemm_rate()], []
    for dim in arguments.dims:
        for mask in arguments.masks:
            causal = mask == "causal"
            for seqlen in arguments.lengths:
                batch, heads = max(TOKENS // seqlen, 1), HIDDEN // dim
                q, k, v = (
                    torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
                )
                flops = 4 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
                inner = max(1, round(arguments.sample_ms * 5e11 / flops))
                these = {name: (lambda call=call: call(q, k, v, causal)) for name, call in calls.items()}
                times, failed = sample(these, arguments.samples, inner)
                cell = {"dim": dim, "mask": mask, "seqlen": seqlen, "failed": failed, "tflops": {}, "interval": {}}
                for name, of in times.items():
                    low, middle, high = statistics.quantiles(of, n=4) if len(of) > 1 else of * 3
                    cell["tflops"][name] = flops / middle / 1e9
                    cell["interval"][name] = [flops / high / 1e9, flops / low / 1e9]
                cells.append(cell)
                line = "  ".join(f"{name} {rate:.0f}" for name, rate in cell["tflops"].items())
                print(f"d {dim} {mask} {seqlen}: {line}" + (f"  failed: {failed}" if failed else ""), flush=True)
    rates.append(gemm_rate())
    print(f"8192^3 matrix product: {rates[0]:.0f} before, {rates[1]:.0f} after; {time.time() - began:.0f} s")

    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "flashstrata": flashstrata.__version__,
        "gemm_tflops": rates,
        "absent": absent,
        "cells": cells,
    }
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    if arguments.markdown:
        with open(arguments.markdown, "w", encoding="utf-8") as file:
            file.write(markdown(document))


if __name__ == "__main__":
    main()
