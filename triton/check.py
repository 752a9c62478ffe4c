"""Runs a compiled corpus through `strata probe` under several schedules and says what fails, by cause.

    python check.py FOLDER... [--strata PROGRAM] [--only REGEX] [--policies eager,lazy,random:1,random:2] [--json FOLDER] [--jobs N]

FOLDER is what `compile.py` wrote. A launch is right when every expected output matches and no hazard is reported, under each
policy. Ends with status 1 when one is not.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys
import tempfile


def outcome(strata, launch, policy, keep):
    """(kind, sentence) of one run: ok, hazard, mismatch, unsupported, refused, slow or crash."""
    with tempfile.TemporaryDirectory() as temporary:
        written = (keep / f"{launch.stem}.json") if keep else pathlib.Path(temporary) / "record.json"
        try:
            done = subprocess.run([strata, "probe", str(launch), "--policy", policy, "--json", str(written)], capture_output=True,
                                  text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return "slow", "did not end in 300 s"
        if done.returncode < 0 or done.returncode > 3 or "panicked" in done.stderr:
            return "crash", f"status {done.returncode}: {done.stderr.strip()[-300:]}"
        if not written.exists():
            text = (done.stderr.strip().splitlines() or ["no message"])[-1]
            unsupported = re.search("unknown form|not executable|not supported|cannot execute|NotYet|not yet", done.stderr)
            return ("unsupported" if unsupported else "refused"), text
        record = json.loads(written.read_text())["records"][0]
    if record.get("hazard"):
        hazard = record["hazard"]
        place = f" [{hazard['file']}:{hazard['line']}]" if hazard.get("line") else ""
        return "hazard", f"{hazard['kind']}: {hazard['instruction']}{place}: {hazard['text']}"
    wrong = [f"argument {c['arg']}: {c['wrong']} of {c['elements']} differ, largest error {c['max_error']}" for c in record["comparisons"] if c["wrong"]]
    if wrong:
        return "mismatch", "; ".join(wrong)
    return ("ok", "") if done.returncode == 0 else ("refused", f"status {done.returncode}")


def cause(sentence):
    """A sentence without its numbers and registers: what has one cause reads the same."""
    return re.sub(r"%\w+", "%", re.sub(r"0x[0-9a-f]+|\d+", "#", sentence))[:160]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--strata", default="strata")
    parser.add_argument("--only", default="", help="launches whose name matches this regular expression")
    parser.add_argument("--policies", default="eager,lazy,random:1,random:2")
    parser.add_argument("--json", type=pathlib.Path, help="keep the records of the last policy here")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    counts, causes, failed = collections.Counter(), collections.defaultdict(list), 0

    def run(job):
        folder, launch = job
        keep = None
        if arguments.json:
            keep = arguments.json / folder.name
            keep.mkdir(parents=True, exist_ok=True)
        results = {}
        for policy in policies:
            results[policy] = outcome(arguments.strata, launch, policy, keep)
            if results[policy][0] in ("unsupported", "refused", "crash"):
                break  # The others would say the same.
        return folder, launch, results

    jobs = [(folder, launch) for folder in arguments.folders for launch in sorted(folder.glob("*.toml")) if re.search(arguments.only, launch.stem)]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for folder, launch, results in pool.map(run, jobs):
            bad = {policy: r for policy, r in results.items() if r[0] != "ok"}
            kind = next(iter(bad.values()))[0] if bad else "ok"
            counts[kind] += 1
            print(f"{folder.name:8} {launch.stem:60} {kind}{' under ' + ', '.join(bad) if bad and len(bad) < len(policies) else ''}", flush=True)
            for kind, sentence in dict.fromkeys(bad.values()):
                causes[kind, cause(sentence)].append((f"{folder.name}/{launch.stem}", sentence))
            failed += bool(bad)
    print("\nBy cause:")
    for (kind, _), cases in sorted(causes.items(), key=lambda c: -len(c[1])):
        print(f"{len(cases):5} {kind}: {cases[0][0]}: {cases[0][1]}")
    print(f"\n{dict(counts)}: {len(jobs) - failed} of {len(jobs)} launches are right under {', '.join(policies)}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
