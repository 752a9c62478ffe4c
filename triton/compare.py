"""Puts what the emulator predicts beside what a chip counted, as Markdown.

    python compare.py COUNTERS.json FOLDER > table.md

COUNTERS.json is what `on_chip.py` wrote; FOLDER holds, for each case, CASE.json: what `strata probe CASE.toml --json` wrote for the
same PTX. One number in a cell: both agree exactly. Two: the chip's / the emulator's.
"""

import json
import pathlib
import sys

# Counters that must be equal, then those that a chip's arbitration blurs. Name here -> heading.
COLUMNS = {
    "global_load_requests": "global load requests",
    "global_load_sectors": "global load sectors",
    "global_store_requests": "global store requests",
    "global_store_sectors": "global store sectors",
    "shared_load_instructions": "shared loads",
    "shared_store_instructions": "shared stores",
    "shared_load_wavefronts": "shared load wavefronts",
    "shared_load_bank_conflicts": "load conflicts",
    "shared_store_wavefronts": "shared store wavefronts",
    "shared_store_bank_conflicts": "store conflicts",
    "global_atomic_requests": "global atomics",
    "warp_instructions": "warp instructions (SASS)",
    "occupancy_theoretical_pct": "occupancy, %",
}
TOLERANCE = 0.03


def predicted(record):
    """The emulator's counters under the names of COLUMNS."""
    counters = dict(record.get("counters_sass") or {})
    counters["occupancy_theoretical_pct"] = (record.get("occupancy") or {}).get("theoretical_pct")
    return counters


def number(value):
    return f"{value:,.4g}" if value != int(value) else f"{int(value):,}"


def cell(counted, model):
    """The text of one cell and the relative difference, None where one of the two is missing."""
    if counted is None or model is None:
        return "", None
    if counted == model:
        return number(counted), 0.0
    difference = (model - counted) / counted if counted else float("inf")
    percent = f" ({100 * difference:+.2f} %)" if counted else ""
    return f"{number(counted)} / {number(model)}{percent}", abs(difference)


def main():
    document = json.loads(pathlib.Path(sys.argv[1]).read_text())
    folder = pathlib.Path(sys.argv[2])
    rows, missing = [], []
    exact, near, far = ({k: 0 for k in COLUMNS} for _ in range(3))
    worst = {}
    for name, case in sorted(document["cases"].items()):
        if "counters" not in case:
            continue
        path = folder / f"{name}.json"
        if not path.exists():
            missing.append(name)
            continue
        model = predicted(json.loads(path.read_text())["records"][0])
        counted = dict(case["counters"])
        # ptxas makes a reduction of an atomic whose result nobody reads, so the two are counted together.
        counted["global_atomic_requests"] = counted.get("global_atomic_requests", 0) + counted.get("global_reduction_requests", 0)
        cells = []
        for key in COLUMNS:
            text, difference = cell(counted.get(key), model.get(key))
            cells.append(text)
            if difference is None:
                continue
            (exact if difference == 0 else near if difference <= TOLERANCE else far)[key] += 1
            if difference > worst.get(key, (0.0, ""))[0]:
                worst[key] = (difference, name)
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    print(f"Triton {document['triton']}. {len(rows)} launches.\n")
    print("| counter | equal | within 3 % | further off | worst |\n|---|---|---|---|---|")
    for key, heading in COLUMNS.items():
        difference, name = worst.get(key, (0.0, ""))
        print(f"| {heading} | {exact[key]} | {near[key]} | {far[key]} | {f'{100 * difference:.2f} % `{name}`' if name else ''} |")
    print("\n| launch | " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * (len(COLUMNS) + 1))
    print("\n".join(rows))
    if missing:
        print(f"\nWithout a prediction: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
