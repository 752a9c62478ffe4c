"""Times decoding, one query against many cached keys, as a share of a copy's bandwidth; verifies each call before it times it.

    python bench/decode.py [--batch 1,8,64] [--keys 8192,65536] [--pages 16,256] [--json FILE]

bf16, 32 query heads on 8, d 128. Bytes are those of keys and values; a copy's are read and written. Keys and values lie in one tensor, as
`flash_attn_func` takes them, in a cache whose lengths are in memory, or in a cache of pages in any order. Calls are recorded as a
graph, so that the host's time does not count; what it is, `bench/overhead.py` says.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

from flashstrata import flash_attn_func, flash_attn_with_kvcache

HEADS, HEADS_KV, DIM = 32, 8, 128


def normal(device, *shape):
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def reference(q, k, v):
    """Out in f64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    return (torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v).transpose(1, 2)


def seconds(call, device, calls, rounds=7, is_recorded=True):
    """Median time of a call."""
    if device == "cpu":
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def run():
        for _ in range(calls):
            call()

    if is_recorded:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        run = graph.replay
    run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def calls_of(q, k, v, pages):
    """By name, a call on the same keys and values wherever they lie."""
    batch, keys = k.shape[:2]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=q.device)
    yield "no cache", lambda: flash_attn_func(q, k, v)
    yield "cache", lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    for size in (size for size in pages if keys % size == 0):
        table = torch.randperm(batch * keys // size, device=q.device).int()
        paged = [torch.empty_like(x).view(-1, size, HEADS_KV, DIM) for x in (k, v)]
        for to, x in zip(paged, (k, v)):
            to[table.long()] = x.view(-1, size, HEADS_KV, DIM)
        rows = table.view(batch, -1)
        yield f"pages of {size}", lambda: flash_attn_with_kvcache(q, *paged, cache_seqlens=lengths, block_table=rows)


def main():
    def numbers(text):
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64])
    parser.add_argument("--keys", type=numbers, default=[8192, 65536])
    parser.add_argument("--pages", type=numbers, default=[16, 256])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    device = arguments.device

    source = torch.empty(1 << (30 if device == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A graph's copies are slower: those are not kernels.
    copied = 2 * source.numel() / seconds(lambda: target.copy_(source), device, 10, is_recorded=False)
    print(f"a copy moves {copied / 1e9:.0f} GB/s")
    del source, target

    results = []
    for batch in arguments.batch:
        for keys in arguments.keys:
            q = normal(device, batch, 1, HEADS, DIM)
            k, v = (normal(device, batch, keys, HEADS_KV, DIM) for _ in range(2))
            wanted = reference(q[:1], k[:1], v[:1])
            for name, call in calls_of(q, k, v, arguments.pages):
                error = (call()[:1].double() - wanted).abs().max().item()
                # Outputs are means of many values: a few units in bfloat16's last place.
                if not error <= 2**-7 * wanted.abs().max().item() + 2**-12:
                    sys.exit(f"batch {batch}, {keys} keys, {name}: off by {error}, and not timed")
                took = seconds(call, device, max(1, min(50, (64 << 23) // (batch * keys))))
                rate = (k.nbytes + v.nbytes) / took
                results.append({"batch": batch, "keys": keys, "where": name, "us": 1e6 * took, "bytes_per_s": rate, "copy": copied})
                print(f"batch {batch:3}, {keys:6} keys, {name:13} {1e6 * took:9.1f} us {rate / 1e9:6.0f} GB/s {rate / copied:6.1%} of the copy")
            del q, k, v
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
