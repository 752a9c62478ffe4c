"""What the producer warp, wgmma, turns (ping-pong), overlap, epilogues and clusters bring: v2_tc and variants of v3 on the same tiles.

    python bench/techniques.py STRATA [--problem P ...] [--rounds N] [--markdown FILE] [--json FILE]

STRATA is the program (`cargo build --release`). Each variant is verified (`strata verify --without ...`) before it is timed, and the
variants follow each other in turn, so that all see the same clocks; a figure is the median of the rounds' medians. v2_tc has no warps
that load: its CTA is that much smaller.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

# Problem, tile of queries and of keys: v3's own.
PROBLEMS = {
    "4x32x4096x64 bf16": (128, 128),
    "4x16x4096x128 bf16": (128, 128),
    "4x16x4096x128 bf16 causal": (128, 128),
    "4x8x4096x256 bf16": (128, 80),
}
VARIANTS = {
    "v2_tc: mma.sync, cp.async by the warps that multiply": ("v2_tc", []),
    "+ wgmma and the copy engine": ("v3", ["--without", "producer,turns,overlap"]),
    "+ a producer warp": ("v3", ["--without", "turns,overlap"]),
    "+ turns": ("v3", ["--without", "overlap"]),
    "+ overlap: v3": ("v3", []),
    "+ clusters of 2 with multicast": ("v3", ["--cluster", "2"]),
    "v3 without an overlapped epilogue": ("v3", ["--without", "epilogue"]),
    "v3 without turns": ("v3", ["--without", "turns"]),
    "v3 without a producer warp": ("v3", ["--without", "producer"]),
}


def covers(options, problem):
    """Whether a variant computes a problem: calls with a mask have no clusters."""
    return "--cluster" not in options or "causal" not in problem


def time_of(strata, problem, stratum, options):
    """The record of one timing."""
    block_q, block_kv = PROBLEMS[problem]
    threads = block_q * 2 + (128 if stratum == "v3" else 0)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "record.json"
        tiles = ["--block-q", str(block_q), "--block-kv", str(block_kv), "--threads", str(threads)]
        command = [strata, "bench", "--stratum", stratum, *options, *tiles, "--problem", problem, "--budget-ms", "100"]
        subprocess.run([*command, "--json", str(file)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())["records"][0]


def table(results):
    lines = ["| TFLOP/s | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for variant in VARIANTS:
        figures = [[record["tflops"] for record in results[problem][variant]] for problem in results]
        cells = [f"{statistics.median(of_problem):.0f}" if of_problem else "-" for of_problem in figures]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strata")
    parser.add_argument("--problem", action="append", choices=list(PROBLEMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    for variant, (stratum, options) in VARIANTS.items():
        verify = [arguments.strata, "verify", "--device", "cuda", "--stratum", stratum, *options]
        command = [*verify, "--dtype", "bf16", "--random", "4"]
        verified = subprocess.run(command, capture_output=True, text=True)
        print(variant, verified.stdout.strip().splitlines()[-1:], file=sys.stderr)
        if verified.returncode != 0:
            sys.exit(f"{variant} is wrong and is not timed:\n{verified.stdout}{verified.stderr}")
    results = {}
    for problem in arguments.problem or PROBLEMS:
        results[problem] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant, (stratum, options) in VARIANTS.items():
                if covers(options, problem):
                    results[problem][variant].append(time_of(arguments.strata, problem, stratum, options))
    text = table(results)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
