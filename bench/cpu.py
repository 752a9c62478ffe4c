"""Times attention on the processor side by side with its peers, in one process, after verifying what it times.

    python bench/cpu.py [--lengths 512,2048,8192] [--dims 64,128] [--json FILE] [--markdown FILE] [--no-peers]

Batch 1, 16 heads, float32 and bfloat16, without mask and causal, and one query over 8192 keys. Times are medians; the
contenders are timed in turn, round by round, so that all see the same machine. GFLOP/s are `4 h s^2 d` over the time, halved for
causal masks; of one query, microseconds are told instead.

The contenders: `ours`, torch's scaled_dot_product_attention, and, built from `bench/cpu` with cargo, candle-nn's and burn-flex's
attention in the same process. What is not there is left out, and that is said; so is candle or burn in rows where, by its
rate in others, a call would take longer than `--patience`. Each has as many threads as there are
processors; torch's are started and left waiting as it does by default. The rate of a large matrix product in torch, before and
after, says what the machine gave.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import flashstrata
from flashstrata import flash_attn_func

HEADS = 16
KEYS_OF_ONE_QUERY = 8192
OVER = {"the better of torch and burn": ("torch", "burn"), "candle": ("candle",)}
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Shape(ctypes.Structure):
    _fields_ = [
        ("heads", ctypes.c_size_t), ("seqlen_q", ctypes.c_size_t), ("seqlen_k", ctypes.c_size_t),
        ("head_dim", ctypes.c_size_t), ("causal", ctypes.c_bool), ("bf16", ctypes.c_bool),
    ]  # fmt: skip


def peers():
    """candle's and burn's functions, or None."""
    folder = Path(__file__).parent / "cpu"
    try:
        subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without candle and burn: {error}", file=sys.stderr)
        return None
    library = ctypes.CDLL(str(folder / "target/release/libpeers.so"))
    for prepare in (library.prepare_candle, library.prepare_burn):
        prepare.argtypes = [Shape, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        prepare.restype = ctypes.c_void_p
    library.run.argtypes, library.run.restype = [ctypes.c_void_p], ctypes.c_bool
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    return library


def contenders(library, q, k, v, causal):
    """Name to a function of no arguments; tensors are (1, heads, seqlen, dim)."""
    mine = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "ours": lambda: flash_attn_func(*mine, causal=causal),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    }
    free = []
    if library is not None:
        shape = Shape(q.shape[1], q.shape[2], k.shape[2], q.shape[3], causal, q.dtype == torch.bfloat16)
        for name, prepare in (("candle", library.prepare_candle), ("burn", library.prepare_burn)):
            call = prepare(shape, q.data_ptr(), k.data_ptr(), v.data_ptr())
            calls[name] = lambda call=call: library.run(call)
            free.append(call)
    return calls, lambda: [library.free(call) for call in free]


def verify(q, k, v, causal):
    """Some rows against float64: within 1e-5 of their norm in float32, in bfloat16 as close as torch to a factor of 2."""
    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)
    rows = sorted({0, q.shape[2] // 2, q.shape[2] - 1})
    queries = q[:, :, rows].double()
    scores = queries @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.arange(k.shape[2])[None] > torch.tensor(rows)[:, None] + k.shape[2] - q.shape[2]
        scores = scores.masked_fill(hidden, -math.inf)
    expected = scores.softmax(-1) @ v.double()
    error = out[:, :, rows].double() - expected
    if q.dtype == torch.float32:
        found, allowed = (error.norm() / expected.norm()).item(), 1e-5
    else:
        found, allowed = error.abs().max().item(), allowed_of_bf16(q, k, v, causal, rows, expected)
    if not found <= allowed:
        raise SystemExit(f"wrong: {found} off where {allowed} is allowed")


def allowed_of_bf16(q, k, v, causal, rows, expected):
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=causal)[:, :, rows]
    return 2 * (peer.double() - expected).abs().max().item() + 2 * torch.finfo(q.dtype).eps * expected.abs().max().item()


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(calls, rounds):
    """Name to (median, first quartile, third quartile) in seconds.

    In each round a contender runs until it is warm, and then is timed: without a pause, for a virtual processor that was idle is
    slow for some milliseconds, and after what the others' threads may still be waiting for.
    """
    warm, timed, slow = 0.04, 0.08, 5.0
    samples = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            taken = samples[name]
            if turn > 1 and min(taken) > slow:
                continue
            begin = time.perf_counter()
            while time.perf_counter() - begin < warm and not (taken and min(taken) > slow):
                call()
            begin = time.perf_counter()
            while True:
                taken.append(seconds(call))
                if time.perf_counter() - begin > timed:
                    break

    def summary(taken):
        quartiles = statistics.quantiles(taken, n=4) if len(taken) > 1 else [taken[0]] * 3
        return statistics.median(taken), quartiles[0], quartiles[2]

    return {name: summary(taken) for name, taken in samples.items()}


def gemm_rate():
    a = torch.randn(4096, 4096)
    a @ a
    return 2 * 4096**3 / statistics.median(seconds(lambda: a @ a) for _ in range(5)) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=30.0, help="seconds that a call may take")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.add_argument("--no-peers", action="store_true", help="torch alone")
    options = parser.parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    library = None if options.no_peers else peers()
    torch.manual_seed(0)
    rates = [gemm_rate()]
    cells = [
        (dtype, dim, length, length, causal)
        for dtype in NAMES
        for dim in map(int, options.dims.split(","))
        for length in map(int, options.lengths.split(","))
        for causal in (False, True)
    ]
    cells += [(dtype, dim, 1, KEYS_OF_ONE_QUERY, False) for dtype in NAMES for dim in map(int, options.dims.split(","))]
    rows, slowest = [], {}
    for dtype, dim, seqlen_q, seqlen_k, causal in cells:
        q, k, v = (torch.randn(1, HEADS, length, dim).to(dtype) for length in (seqlen_q, seqlen_k, seqlen_k))
        verify(q, k, v, causal)
        flops = 4 * HEADS * seqlen_q * seqlen_k * dim / (2 if causal else 1)
        calls, free = contenders(library, q, k, v, causal)
        def short(name):
            return name in ("ours", "torch") or flops < options.patience * slowest.get((name, dtype), math.inf)

        patient = {name: call for name, call in calls.items() if short(name)}
        times = measure(patient, options.rounds)
        free()
        for name, time in times.items():
            slowest[name, dtype] = min(flops / time[0], slowest.get((name, dtype), math.inf))
        row = {
            "dtype": NAMES[dtype], "head_dim": dim, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal,
            "seconds": {name: time[0] for name, time in times.items()},
            "quartiles": {name: time[1:] for name, time in times.items()},
            "gflops": {name: flops / time[0] / 1e9 for name, time in times.items()},
        }  # fmt: skip
        rows.append(row)
        print(text(row), file=sys.stderr, flush=True)
    rates.append(gemm_rate())
    report = markdown(rows, rates, threads)
    print(report)
    if options.markdown:
        Path(options.markdown).write_text(report)
    if options.json:
        Path(options.json).write_text(json.dumps({"gemm_gflops": rates, "threads": threads, "rows": rows}, indent=1))


def text(row):
    mask = "causal" if row["causal"] else ""
    shape = f"{row['seqlen_q']}/{row['seqlen_k']}x{row['head_dim']} {row['dtype']} {mask}"
    return f"{shape}: " + ", ".join(f"{name} {1e3 * time:.2f} ms" for name, time in row["seconds"].items())


def ratio(row, names):
    return min(row["seconds"][name] for name in names if name in row["seconds"]) / row["seconds"]["ours"]


def markdown(rows, rates, threads):
    names = list(rows[0]["seconds"])
    lines = [
        f"flashstrata {flashstrata.__version__} on {flashstrata.Device.cpu().name}; torch {torch.__version__}; {threads} threads; "
        f"f32 matrix product {min(rates):.0f} to {max(rates):.0f} GFLOP/s.",
        "",
        "| type | d | queries | keys | mask | " + " | ".join(names) + " | over torch and burn | over candle |",
        "|---|---|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for row in rows:
        def cell(name):
            if name not in row["seconds"]:
                return "slow"
            if row["seqlen_q"] == 1:
                return f"{1e6 * row['seconds'][name]:.0f} us"
            return f"{row['gflops'][name]:.0f}"

        mask = "causal" if row["causal"] else "none"
        over = [f"{ratio(row, group):.2f}" if set(group) & set(row["seconds"]) else "" for group in OVER.values()]
        values = [row["dtype"], row["head_dim"], row["seqlen_q"], row["seqlen_k"], mask, *map(cell, names), *over]
        lines.append("| " + " | ".join(map(str, values)) + " |")
    lines.append("")
    for title, group in OVER.items():
        ratios = [ratio(row, group) for row in rows if set(group) & set(row["seconds"])]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(f"Over {title}: geometric mean {mean:.2f}, least {min(ratios):.2f}.")
    of_gemm = [r for r in rows if (r["dtype"], r["head_dim"], r["seqlen_q"], r["causal"]) == ("f32", 128, 8192, False)]
    for row in of_gemm:
        lines.append(f"f32, d 128, 8192 keys, no mask: {100 * row['gflops']['ours'] / max(rates):.0f} % of the matrix product's rate.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
