"""Compiles the corpus with the installed Triton and writes PTX, launch descriptions, inputs and expected outputs.

    python compile.py OUT [--quick] [--only REGEX] [--cc 75,80,90,100] [--cubin] [--jobs N]

For each case and architecture OUT holds NAME-CC.ptx and NAME-CC.toml; inputs and expected outputs are OUT/data/NAME-*.npy and
the same for every architecture and version of Triton. OUT/index.json says what was compiled and what was not and why; a run
over some cases leaves its other entries. Needs no GPU. Cases for sm_100 have no .toml: they are there to be parsed.
"""

import argparse
import collections
import concurrent.futures
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import tempfile
import traceback

# Names in launch descriptions of CUtensorMapSwizzle's values.
SWIZZLES = ["none", "32B", "64B", "128B"]
GPUS = {75: "rtx2070", 80: "a100", 90: "h200", 100: "b200"}


def specialise(case):
    """The signature, constants and attributes that Triton's own launcher would derive from the arguments."""
    from cases import Map, Out
    from formats import TYPES, Tensor
    signature, constants, attributes = {}, dict(case.constants), {}
    for position, name in enumerate(case.kernel.arg_names):
        divisible = {(position, ): [["tt.divisibility", 16]]}
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        value = case.arguments[name]
        if isinstance(value, (Out, Tensor)):
            signature[name] = "*" + TYPES[value.dtype][0]
            attributes.update(divisible)
        elif isinstance(value, Map):
            layout = f",{value.layout!r}" if value.layout else ""
            signature[name] = f"tensordesc<{TYPES[value.of.dtype][0]}[{','.join(map(str, value.box))}]{layout}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes.update(divisible)
    return signature, constants, attributes


def compile_case(case, cc, cubin):
    """Triton's result for one architecture. Without `cubin` the assembler is not called."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    if not cubin:
        CUDABackend.make_cubin = lambda self, *_: b""
    signature, constants, attributes = specialise(case)
    kind = GluonASTSource if case.kernel.is_gluon() else ASTSource
    source = kind(case.kernel, signature, constants, attributes)
    options = dict(num_warps=case.warps, num_stages=case.stages, **case.options)
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)


def entry_parameters(ptx):
    """The declarations of the entry's parameters."""
    listed = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx).group(1)
    return [p.strip() for p in listed.split(",") if p.strip()]


def array(shape):
    return "x".join(map(str, shape))


def describe(case, cc, compiled):
    """The launch description as text."""
    from cases import Map, Out
    from formats import Tensor
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    cluster = getattr(metadata, "cluster_dims", None) or (getattr(metadata, "num_ctas", 1), 1, 1)
    tail, maps, place = [], [], {}
    arguments = []

    def buffer(name, value):
        how = f"@data/{case.name}-{name}.npy"
        if isinstance(value, Out):
            how = "ones" if value.dtype[0] in "iu" else "nan"
        return f"buf:{value.dtype}:{array(value.shape)}:{how}"

    for name in case.kernel.arg_names:
        value = case.arguments.get(name)
        if name in case.constants or (isinstance(value, int) and value == 1):
            continue
        place[name] = len(arguments)
        if isinstance(value, (Out, Tensor)):
            arguments.append(buffer(name, value))
        elif isinstance(value, Map):
            arguments.append(f"map:{name}")
            shape = value.of.shape
            strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
            arguments += [f"i32:{n}" for n in shape] + [f"i64:{n}" for n in strides]
            maps.append((name, value, compiled.metadata.tensordesc_meta[len(maps)]))
        elif isinstance(value, float):
            arguments.append(f"f32:{value!r}")
        else:
            arguments.append(f"i32:{value}")
    # Triton's grid counts clusters.
    grid = [case.grid[0] * getattr(metadata, "num_ctas", 1), *case.grid[1:]]
    ctas = math.prod(grid)
    parameters = entry_parameters(ptx)
    for size in (getattr(metadata, "global_scratch_size", 0), getattr(metadata, "profile_scratch_size", 0)):
        if len(arguments) < len(parameters):
            arguments.append(f"buf:u8:{size * ctas}:zeros" if size else "null")
    if len(arguments) != len(parameters):
        raise ValueError(f"the entry takes {len(parameters)} parameters, the launch has {len(arguments)}")

    lines = [f'ptx = "{case.name}-{cc}.ptx"', f'entry = "{metadata.name}"', f'gpu = "{GPUS[cc]}"', f"grid = {grid}",
             f"block = [{int(threads.group(1)) if threads else 32 * metadata.num_warps}, 1, 1]", f"cluster = {list(cluster)}",
             f"shared = {metadata.shared}", "args = ["]
    lines += [f'    "{a}",' for a in arguments] + ["]"]
    for name, expect in case.expect.items():
        lines += ["", "[[expect]]"]
        lines += [f"arg = {place[name]}", f'file = "data/{case.name}-{name}-expected.npy"', f"abs = {float(expect.abs)!r}", f"rel = {float(expect.rel)!r}"]
    for name, value, meta in maps:
        box = list(meta["block_size"])
        size = meta["elem_size"]
        shape = value.of.shape
        strides = [math.prod(shape[i + 1:]) * size for i in range(len(shape) - 1)]
        lines += ["", f"[map.{name}]", f'buffer = "{buffer(name, value.of)}"', f"sizes = {list(shape)[::-1]}",
                  f"strides = {strides[::-1]}", f"box = {box[::-1]}", f'swizzle = "{SWIZZLES[meta["swizzle"]]}"']
    return "\n".join(lines) + "\n"


def write_data(case, out):
    """Inputs and expectations, once for all architectures."""
    import numpy as np
    from cases import Map
    from formats import Tensor
    for name, value in case.arguments.items():
        value = value.of if isinstance(value, Map) else value
        if isinstance(value, Tensor):
            np.save(out / f"data/{case.name}-{name}.npy", value.bits)
    for name, expect in case.expect.items():
        integer = np.issubdtype(expect.want.dtype, np.integer)
        buffer = case.arguments[name]
        wide = (buffer.of if isinstance(buffer, Map) else buffer).dtype
        kind = {"f64": np.float64, "i64": np.int64, "u32": np.int64}.get(wide, np.int32 if integer else np.float32)
        np.save(out / f"data/{case.name}-{name}-expected.npy", expect.want.astype(kind))


def opcodes(ptx):
    """The instructions' forms, without registers."""
    text = re.sub(r"//[^\n]*", "", ptx.split("\n\t.section")[0])
    for line in text.splitlines():
        m = re.match(r"\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:[.:]+[a-zA-Z0-9_]+)*)(?:\s|;)", line)
        if m and not line.rstrip().endswith(":"):
            yield m.group(1)


def portable_hash(ptx):
    """A digest without what depends on where the source lies: file names and debug sections."""
    text = "\n".join(line for line in ptx.split("\n\t.section")[0].splitlines() if not line.startswith("\t.file"))
    return hashlib.sha256(text.encode()).hexdigest()


def compile_one(case, cc, out, cubin):
    """Compiles one case for one architecture and writes it. Returns its row of the index."""
    row = dict(case=case.name, kernel=case.kernel.__name__, cc=cc)
    if cc < case.least:
        return dict(row, skipped=f"written for sm_{case.least} and later")
    try:
        compiled = compile_case(case, cc, cubin)
        ptx = compiled.asm["ptx"]
        launch = describe(case, cc, compiled) if cc < 100 else None
    except BaseException as error:  # The compiler's own failures come in every class.
        while error.__cause__:
            error = error.__cause__
        return dict(row, skipped=traceback.format_exception_only(error)[-1].strip().splitlines()[-1][:400])
    stem = f"{case.name}-{cc}"
    (out / f"{stem}.ptx").write_text(ptx)
    row.update(ptx=f"{stem}.ptx", sha256=portable_hash(ptx), bytes=len(ptx))
    if launch:
        (out / f"{stem}.toml").write_text(launch)
        row["launch"] = f"{stem}.toml"
    if cubin:
        (out / f"{stem}.cubin").write_bytes(compiled.asm["cubin"])
        row["cubin"] = f"{stem}.cubin"
    return row


def in_a_process(case, cc, out, cubin):
    """`compile_one` in a process of its own, since the compiler can abort."""
    def child(end):
        # The compiler prints modules and reproducers when a pass fails; the reason goes into the index.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        end.send(compile_one(case, cc, out, cubin))

    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(there, ))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        process.join()
        return dict(case=case.name, kernel=case.kernel.__name__, cc=cc, skipped=f"the compiler ended with status {process.exitcode}")
    finally:
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="a dozen cases")
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--cc", default="", help="architectures (75,80,90,100; with --quick 75,80,90)")
    parser.add_argument("--cubin", action="store_true", help="assemble too, and write the cubins")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    ccs = [int(c) for c in (arguments.cc or ("75,80,90" if arguments.quick else "75,80,90,100")).split(",")]
    (arguments.out / "data").mkdir(parents=True, exist_ok=True)
    # A cache of its own: entries without a cubin must not be found by others.
    cache = tempfile.mkdtemp(prefix="triton-cache-")
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    from cases import CASES
    cases = [c for c in CASES if re.search(arguments.only, c.name) and (c.quick or not arguments.quick)]
    for case in cases:
        write_data(case, arguments.out)
    path = arguments.out / "index.json"
    rows = {(r["case"], r["cc"]): r for r in json.loads(path.read_text())["cases"]} if path.exists() else {}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for future in [pool.submit(in_a_process, case, cc, arguments.out, arguments.cubin) for case in cases for cc in ccs]:
            row = future.result()
            rows[row["case"], row["cc"]] = row
    shutil.rmtree(cache, ignore_errors=True)
    done = [r for r in rows.values() if "ptx" in r]
    forms = collections.Counter()
    for row in done:
        forms.update(opcodes((arguments.out / row["ptx"]).read_text()))
    index = dict(triton=triton.__version__, cases=list(rows.values()), forms=dict(sorted(forms.items())))
    path.write_text(json.dumps(index, indent=1) + "\n")
    print(f"Triton {triton.__version__}: {len(done)} of {len(rows)} compiled, {len(forms)} forms, {sum(forms.values())} instructions")


if __name__ == "__main__":
    main()
