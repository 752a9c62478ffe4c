"""The corpus on a real GPU: outputs of every case, and Nsight Compute's counters of some.

    python on_chip.py OUT

Needs a GPU of compute capability 9.0 with permission to read its counters, Triton and ncu. Compiles the corpus there, launches
every case once and compares its outputs; launches the cases of CHOSEN once each under ncu. OUT then holds
counters.json (versions; per case: digest of the PTX, verdict, counters) and corpus.tar.xz (PTX, cubins, launch descriptions,
inputs and expected outputs), so that the emulator can run the same PTX afterwards and `compare.py` can put both side by side.
"""

import csv
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

CC = 90
# With and without conflicts, in each type that the kernel has.
CHOSEN = "^(" + "|".join([
    "attention_v1-.*", "attention_v2-(f16|bf16|f32-tf32|f32-fma|f16-causal|f16-gqa|f16-small|e4m3)", "attention_backward_(dq|dkdv)-.*",
    "attention_descriptors-.*", "decode_split-.*", "linear_attention-.*", "matmul-.*", "matmul_device_descriptors-.*",
    "matmul_host_descriptors-.*", "matmul_batched-.*", "mlp-.*", "softmax-.*", "softmax_online-.*", "layer_norm-.*", "layer_norm_backward-.*",
    "rms_norm-.*", "cross_entropy-.*", "rope-.*", "transpose_through_shared-.*", "transpose_direct-.*", "permute_heads-.*",
    "tile_reduce-.*", "row_reduce-.*", "copy_strided-.*", "copy_shifted-.*", "gather_in_row-.*", "histogram", "sort_rows-.*", "embedding.*",
    "causal_convolution-.*", "stencil-.*", "recurrence"]) + f")-{CC}$"

GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
COUNTERS = {
    "warp_instructions": "smsp__inst_executed.sum",
    "global_load_requests": GLOBAL.format("requests", "ld"),
    "global_load_sectors": GLOBAL.format("sectors", "ld"),
    "global_store_requests": GLOBAL.format("requests", "st"),
    "global_store_sectors": GLOBAL.format("sectors", "st"),
    "shared_load_instructions": "smsp__sass_inst_executed_op_shared_ld.sum",
    "shared_store_instructions": "smsp__sass_inst_executed_op_shared_st.sum",
    "ldmatrix_instructions": "smsp__inst_executed_op_ldsm.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_load_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "occupancy_theoretical_pct": "sm__maximum_warps_per_active_cycle_pct",
    "registers": "launch__registers_per_thread",
    "limit_blocks_registers": "launch__occupancy_limit_registers",
    "limit_blocks_shared_mem": "launch__occupancy_limit_shared_mem",
    "limit_blocks_warps": "launch__occupancy_limit_warps",
    "limit_blocks_blocks": "launch__occupancy_limit_blocks",
}
# Asked for where this ncu knows them.
OPTIONAL = {
    "shared_wavefronts_lines": "memory_l1_wavefronts_shared",
    "shared_wavefronts_lines_ideal": "memory_l1_wavefronts_shared_ideal",
    "global_atomic_requests": GLOBAL.format("requests", "atom"),
    "global_reduction_requests": GLOBAL.format("requests", "red"),
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "async_copy_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts.sum",
    "async_copy_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum",
    "tensor_hmma": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "tensor_gmma": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "tensor_imma": "sm__inst_executed_pipe_tensor_op_imma.sum",
    "special_functions": "sm__inst_executed_pipe_xu.sum",
    "ffma_threads": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "local_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "local_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
}


def launch_all(folder, wanted):
    """Launches every case that matches; prints one JSON object, a verdict by case."""
    from device import Driver, entries, launch
    driver = Driver()
    verdicts = {}
    for path in entries(folder, CC, wanted):
        try:
            verdicts[path.stem] = launch(driver, path)
        except (RuntimeError, ValueError, KeyError) as error:
            verdicts[path.stem] = f"error: {error}"
            if str(error).startswith("cuCtxSynchronize"):  # The context is lost: start again where it stopped.
                print(json.dumps(verdicts))
                sys.exit(9)
    print(json.dumps(verdicts))


def verdicts_of(folder):
    """Every case's outputs. A case that breaks the context ends its process; the next process goes on after it."""
    verdicts = {}
    while True:
        done = "^(?!(" + "|".join(map(re.escape, verdicts)) + ")$)" if verdicts else ""
        child = subprocess.run([sys.executable, __file__, "--launch", str(folder), done], capture_output=True, text=True, timeout=180)
        new = json.loads(child.stdout.splitlines()[-1]) if child.stdout.strip() else {}
        verdicts.update(new)
        if child.returncode != 9 or not new:
            if child.returncode not in (0, 9):
                verdicts["(process)"] = child.stderr[-500:]
            return verdicts


def known(metrics):
    """Which of the optional metrics this ncu has."""
    listed = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True).stdout
    return {k: m for k, m in metrics.items() if m.startswith("memory_") or m.rsplit(".", 1)[0] in listed}


def profile(folder, out):
    """Counters of each chosen case, in the order of the launches."""
    metrics = {**COUNTERS, **known(OPTIONAL)}
    report = out / "profile"
    command = ["ncu", "--target-processes", "all", "--clock-control", "none", "--metrics", ",".join(metrics.values()), "-f", "-o", str(report),
               sys.executable, __file__, "--launch", str(folder), CHOSEN]
    with open(out / "ncu.log", "w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=280)
    text = subprocess.run(["ncu", "--import", f"{report}.ncu-rep", "--csv", "--page", "raw", "--print-units", "base", "--print-fp"],
                          capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]  # The row after the names holds units.
    # What was launched, in order: the child's verdicts, without the cases that failed before their launch.
    verdicts = next((json.loads(line) for line in (out / "ncu.log").read_text().splitlines() if line.startswith("{")), {})
    launched = [name for name, verdict in verdicts.items() if not (verdict or "").startswith("error")]
    if len(launched) != len(rows):
        raise SystemExit(f"{len(launched)} launches, but ncu counted {len(rows)}: see ncu.log")
    counted = {}
    for name, row in zip(launched, rows):
        counted[name] = {"kernel": row["Kernel Name"]}
        for key, metric in metrics.items():
            try:
                counted[name][key] = float(row[metric].replace(",", ""))
            except (KeyError, ValueError):
                pass  # A metric that this chip or ncu does not have.
    return counted, len(rows)


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path("/tmp/corpus")
    shutil.rmtree(folder, ignore_errors=True)
    here = pathlib.Path(__file__).parent
    built = subprocess.run([sys.executable, str(here / "compile.py"), str(folder), "--cubin", "--cc", str(CC), "--jobs", str(os.cpu_count() or 4)],
                           capture_output=True, text=True)
    print(built.stdout, built.stderr[-2000:], flush=True)
    index = json.loads((folder / "index.json").read_text())
    verdicts = verdicts_of(folder)
    wrong = {k: v for k, v in verdicts.items() if v}
    print(f"{len(verdicts) - len(wrong)} of {len(verdicts)} cases are right on this GPU", *(f"\n  {k}: {v}" for k, v in wrong.items()), flush=True)
    with tarfile.open(out / "corpus.tar.xz", "w:xz", preset=1) as archive:
        archive.add(folder, "corpus")
    document = dict(triton=index["triton"], skipped=[r for r in index["cases"] if "skipped" in r],
                    cases={r["ptx"][:-4]: dict(sha256=r["sha256"], verdict=verdicts.get(r["ptx"][:-4], "not run")) for r in index["cases"] if "ptx" in r})
    (out / "counters.json").write_text(json.dumps(document, indent=1))
    counted, rows = profile(folder, out)
    print(f"{rows} launches counted, {len(counted)} assigned")
    for key, counters in counted.items():
        document["cases"][key]["counters"] = counters
    (out / "counters.json").write_text(json.dumps(document, indent=1))
    for file in out.glob("profile*"):
        file.unlink()


if __name__ == "__main__":
    if sys.argv[1] == "--launch":
        launch_all(sys.argv[2], sys.argv[3])
    else:
        main(pathlib.Path(sys.argv[1]))
