"""The lab: why a kernel is as fast as it is, counted on an emulated GPU. It needs no GPU, and neither torch nor Triton.

:func:`dig` runs the generations of attention on a problem; :func:`probe` runs any kernel in PTX, Triton's above all. Both return
what ``strata dig --json`` and ``strata probe --json`` write, as plain dicts: ``{"schema": 1, "records": [...]}``, where each record
has counters, occupancy, bytes, pipe times, lines with their cost, and findings.
"""

from __future__ import annotations

import json
import operator
import os
import pathlib
import re
import tempfile
import warnings
from typing import Any, Optional, Sequence, Union

from flashstrata import _flashstrata

__all__ = ["dig", "probe"]


def dig(
    problem: str,
    gpu: str = "RTX 2070",
    strata: Union[str, Sequence[str]] = (),
    *,
    full: bool = False,
    seed: Optional[int] = None,
) -> dict[str, Any]:
    """Runs strata (one, several, or all by default) on a problem as ``strata`` writes it, such as ``"2x8/2x512x64 f16 causal"``.

    ``gpu`` is a board by its name; ``full`` runs every head rather than a sample that is scaled; ``seed`` is that of the inputs, 0
    by default. A warning names each stratum that does not cover the problem; where none does, there are no records.
    """
    named = [strata] if isinstance(strata, str) else list(strata)
    document, passed_over = _flashstrata.dig(problem, gpu, named, full, 0 if seed is None else seed)
    for why in dict.fromkeys(passed_over):
        warnings.warn(why, stacklevel=2)
    return json.loads(document)


# Of a launch file of ``strata probe``.
_SETTINGS = (
    "entry", "block", "cluster", "shared", "registers", "seed", "policy", "shake", "global_races", "budget", "memory", "sample",
    "line",
)  # fmt: skip


def probe(
    compiled: Any,
    grid: Union[int, Sequence[int]],
    args: Sequence[Any],
    gpu: Optional[str] = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs a kernel on an emulated GPU and says by source line what it costs and what is wrong with it.

    ``compiled`` is what ``triton.compile`` or a launch of a Triton kernel returns, or PTX as text. ``grid`` is Triton's, a number or
    a tuple: of clusters where the kernel has several CTAs to one. ``args`` are the kernel's in order, without its constants, and of
    Triton's kernels without the scratch memory that Triton adds: arrays of NumPy or torch (copied; they are not changed), numbers,
    None for a null pointer, and text as ``strata probe --arg`` takes it, such as ``"buf:f32:8192:uninit"`` for memory in which
    nothing is yet.

    ``settings`` are those of a launch file of ``strata probe``, None for the default: ``entry``, ``block``, ``cluster``, ``shared``,
    ``registers``, ``seed``, ``policy``, ``shake``, ``global_races``, ``budget``, ``memory``, ``sample``, ``line``; ``block`` and
    ``cluster`` are given as ``grid`` is. A hazard, such as a race, is no error but in the record.
    """
    for name in settings:
        if name not in _SETTINGS:
            raise TypeError(f"{name} is no argument of probe: its settings are {', '.join(_SETTINGS)}")
    settings = {name: value for name, value in {"gpu": gpu, **settings}.items() if value is not None}
    ptx = compiled if isinstance(compiled, str) else compiled.asm["ptx"]
    metadata = getattr(compiled, "metadata", None)
    grid = _extents("grid", grid)
    scratch = 0
    if metadata is not None:
        settings.setdefault("entry", metadata.name)
        settings.setdefault("shared", metadata.shared)
        grid[0] *= getattr(metadata, "num_ctas", 1)
        # The last parameters are pointers to memory of Triton's own.
        scratch = sum(hasattr(metadata, name) for name in ("global_scratch_size", "profile_scratch_size"))
    for name in ("block", "cluster"):
        if name in settings:
            settings[name] = _extents(name, settings[name])
    types = _parameters(ptx, settings.get("entry"))
    args = list(args)
    if len(args) == len(types) - scratch:
        args += [None] * scratch
    if len(args) != len(types):
        wanted = types[: len(types) - scratch]
        raise ValueError(f"args are {len(args)}: the kernel has {len(wanted)} parameters ({', '.join(wanted)}), constants are none")
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"ptx": "kernel.ptx", "grid": grid}
        settings["args"] = [
            _argument(pathlib.Path(folder), index, value, kind) for index, (value, kind) in enumerate(zip(args, types))
        ]
        (pathlib.Path(folder) / "kernel.ptx").write_text(ptx, encoding="utf-8")
        launch = pathlib.Path(folder) / "launch.toml"
        # Numbers, texts, truths and lists of them are written alike in JSON and in TOML; NumPy's integers become Python's.
        lines = (f"{name} = {json.dumps(value, default=operator.index)}\n" for name, value in settings.items())
        launch.write_text("".join(lines), encoding="utf-8")
        try:
            return json.loads(_flashstrata.probe(launch))
        except ValueError as error:
            raise ValueError(_in_our_words(str(error), folder)) from None


def _extents(name: str, value: Any) -> list[int]:
    """One to three numbers of CTAs or threads."""
    allowed = "it must be a number, or a tuple of up to three"
    if callable(value):
        raise TypeError(f"{name} is a function: {allowed}, such as what the function returns")
    try:
        extents = [operator.index(extent) for extent in (value if hasattr(value, "__len__") else [value])]
    except TypeError:
        raise TypeError(f"{name} is {value!r}: {allowed}") from None
    if not 1 <= len(extents) <= 3 or not all(1 <= extent < 1 << 32 for extent in extents):
        raise ValueError(f"{name} is {value!r}: {allowed}, each from 1 to {(1 << 32) - 1}")
    return extents


def _in_our_words(error: str, folder: str) -> str:
    """An error of ``strata probe`` without what only its files and its command line have."""
    of_file = re.search(r"TOML parse error.*?\d+ \| (\w+) = [^\n]*\n[^\n]*\n(.*)", error, re.DOTALL)
    error = f"{of_file[1]}: {of_file[2].strip()}" if of_file else error
    return re.sub(r"--(?=\w)", "", error.replace(folder + os.sep, ""))


def _parameters(ptx: str, entry: Optional[str]) -> list[str]:
    """The types of an entry's parameters, such as ``u64``; of a structure, ``b8``."""
    code = re.sub(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', " ", ptx, flags=re.DOTALL)
    kernels = {one[1]: one[2] or "" for one in re.finditer(r"\.entry\s+([\w$%]+)(?:\s*\(([^)]*)\))?", code)}
    if entry is None and len(kernels) == 1:
        (entry,) = kernels
    if entry not in kernels:
        raise ValueError(f"entry is {entry}: it must be a kernel of the PTX, which has {', '.join(kernels) or 'none'}")
    return re.findall(r"\.param\b[^,]*?\.([usbf]\d+)\b", kernels[entry])


_ELEMENTS = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32",
    "uint64": "u64", "bool": "u8",
}  # fmt: skip


def _argument(folder: pathlib.Path, index: int, value: Any, kind: str) -> str:
    """An argument in the words of ``strata probe``, its contents in a file."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return value
    if not hasattr(value, "dtype") or not getattr(value, "shape", ()):
        try:
            number = float(value) if kind.startswith("f") else int(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or (isinstance(number, int) and number != value):
            wanted = "a number" if kind.startswith("f") else "an integer"
            raise ValueError(f"args[{index}] is {value!r}: the parameter is {kind}, it must be {wanted}")
        # What PTX calls bits says nothing of the sign.
        kind = kind.replace("b", "i")
        return f"{kind.replace('u', 'i') if number < 0 else kind}:{number!r}"
    import numpy

    if isinstance(value, numpy.ma.MaskedArray):
        raise ValueError(f"args[{index}] is a masked array: no mask is looked at, it must be a plain array (filled())")
    name = str(value.dtype).removeprefix("torch.")
    if name not in _ELEMENTS:
        raise ValueError(f"args[{index}] is of {value.dtype}: it must be one of {', '.join(_ELEMENTS)}, in native byte order")
    if hasattr(value, "detach"):
        import torch

        value = value.detach().cpu().contiguous()
        # NumPy has none of these: their bits stand for them.
        bits = {1: torch.uint8, 2: torch.uint16}
        value = value.view(bits[value.itemsize]) if "bfloat" in name or "float8" in name else value
        value = value.numpy()
    elif "bfloat" in name or "float8" in name:
        value = value.view(f"u{value.itemsize}")
    value = value.view(numpy.uint8) if name == "bool" else value
    path = folder / f"{index}.npy"
    numpy.save(path, numpy.ascontiguousarray(value))
    return f"buf:{_ELEMENTS[name]}:{'x'.join(map(str, value.shape))}:@{path.name}"
