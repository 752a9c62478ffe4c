"""Times a few queries of heads that share keys, against many keys: chunks of a prompt, guesses of a speculative decoder.

    python bench/few_queries.py [--queries 4,16,64,256] [--json FILE]

bf16, 4096 or 8192 keys, groups of 4, 7, 8 and 16 heads; microseconds a call by `v2_tc` and by `v3`, which take the heads of a group as rows of one tile,
by what the library chooses, and by torch's FlashAttention-2 and cuDNN. Each is verified before it is timed. Calls are recorded as a
graph, so that the host's time does not count.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode import normal, seconds
from flashstrata import dispatch
from side_by_side import reference

# Batch, query heads, KV heads, keys, head dimension.
PROBLEMS = [
    (16, 32, 8, 8192, 128),
    (16, 64, 8, 8192, 128),
    (4, 64, 8, 8192, 128),
    (1, 64, 8, 8192, 128),
    (16, 28, 4, 4096, 128),
    (16, 64, 4, 4096, 128),
    (16, 64, 8, 4096, 64),
    (16, 32, 4, 4096, 256),
]


def contenders(q, k, v, causal):
    """By name, a call."""
    right = 0 if causal else -1
    for name, stratum in [("v2_tc", "v2_tc"), ("v3", "v3"), ("chosen", None)]:
        yield name, lambda stratum=stratum: dispatch.forward(q, k, v, None, -1, right, 0.0, None, stratum=stratum)[0]
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    if not causal:
        for name, backend in [("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cuDNN", SDPBackend.CUDNN_ATTENTION)]:
            def call(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*turned, enable_gqa=True).transpose(1, 2)

            yield name, call


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=lambda text: [int(number) for number in text.split(",")], default=[4, 16, 64, 256])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    results = []
    for batch, heads, heads_kv, keys, dim in PROBLEMS:
        k, v = (normal("cuda", batch, keys, heads_kv, dim) for _ in range(2))
        for queries in arguments.queries:
            q = normal("cuda", batch, queries, heads, dim)
            # Of the first batch entry.
            wanted, _ = reference(*(x[:1] for x in (q, k, v)), arguments.causal)
            times = {}
            for name, call in contenders(q, k, v, arguments.causal):
                try:
                    out = call()
                except RuntimeError as error:
                    print(f"{name} does not take it: {str(error)[:60]}", file=sys.stderr)
                    continue
                error = (out[:1].double() - wanted).abs().max().item()
                # Outputs are means of many values: a few units in bfloat16's last place.
                if not error <= 2**-7 * wanted.abs().max().item() + 2**-12:
                    sys.exit(f"{batch}x{heads}/{heads_kv}x{queries}/{keys}x{dim}, {name}: off by {error}, and not timed")
                times[name] = 1e6 * seconds(call, "cuda", 20, rounds=5)
            results.append({"problem": f"{batch}x{heads}/{heads_kv}x{queries}/{keys}x{dim}", "causal": arguments.causal, "us": times})
            cells = "  ".join(f"{name} {took:8.1f}" for name, took in times.items())
            print(f"{results[-1]['problem']:26} {cells}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
