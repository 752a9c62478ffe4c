"""The lab: why a kernel is as fast as it is, counted on an emulated GPU. It needs no GPU, and neither torch nor Triton.

:func:`dig` runs the generations of attention on a problem; :func:`probe` runs any kernel in PTX, Triton's above all. Both return
what ``strata dig --json`` and ``strata probe --json`` write, as plain dicts: ``{"schema": 1, "records": [...]}``, where each record
has counters, occupancy, bytes, pipe times, lines with their cost, and findings.
"""

from __future__ import annotations

import json
import pathlib
import re
import tempfile
import warnings
from typing import Any, Optional, Sequence, Union

from flashstrata import _flashstrata

__all__ = ["dig", "probe"]


def dig(
    problem: str, gpu: str = "RTX 2070", strata: Sequence[str] = (), *, full: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Runs strata (all by default) on a problem as ``strata`` writes it, such as ``"2x8/2x512x64 f16 causal"``.

    ``gpu`` is a board by its name; ``full`` runs every head rather than a sample that is scaled; ``seed`` is that of the inputs.
    A warning names each stratum that does not cover the problem.
    """
    document, passed_over = _flashstrata.dig(problem, gpu, list(strata), full, seed)
    for why in dict.fromkeys(passed_over):
        warnings.warn(why, stacklevel=2)
    return json.loads(document)


def probe(
    compiled: Any,
    grid: Union[int, Sequence[int]],
    args: Sequence[Any],
    gpu: Optional[str] = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs a kernel on an emulated GPU and says by source line what it costs and what is wrong with it.

    ``compiled`` is what ``triton.compile`` or a launch of a Triton kernel returns, or PTX as text. ``grid`` is Triton's: of clusters
    where the kernel has several CTAs to one. ``args`` are the kernel's in order, without its constants: arrays of NumPy or torch
    (copied; they are not changed), numbers, None for a null pointer, and text as ``strata probe --arg`` takes it, such as
    ``"buf:f32:8192:uninit"`` for memory in which nothing is yet.

    ``settings`` are those of a launch file of ``strata probe``: ``entry``, ``block``, ``cluster``, ``shared``, ``registers``,
    ``seed``, ``policy``, ``shake``, ``global_races``, ``budget``, ``memory``, ``sample``, ``line``. A hazard, such as a race, is no
    error but in the record.
    """
    ptx = compiled if isinstance(compiled, str) else compiled.asm["ptx"]
    metadata = getattr(compiled, "metadata", None)
    grid = [grid] if isinstance(grid, int) else list(grid)
    if metadata is not None:
        settings.setdefault("entry", metadata.name)
        settings.setdefault("shared", metadata.shared)
        grid[0] *= getattr(metadata, "num_ctas", 1)
    types = _parameters(ptx, settings.get("entry"))
    args = list(args)
    if len(args) > len(types):
        raise ValueError(f"args are {len(args)}: the kernel has {len(types)} parameters ({', '.join(types)}), constants are none")
    # Triton's last parameters are pointers to scratch memory.
    args += [None] * (len(types) - len(args))
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"ptx": "kernel.ptx", "grid": grid}
        settings["args"] = [
            _argument(pathlib.Path(folder), index, value, kind) for index, (value, kind) in enumerate(zip(args, types))
        ]
        if gpu is not None:
            settings["gpu"] = gpu
        (pathlib.Path(folder) / "kernel.ptx").write_text(ptx, encoding="utf-8")
        launch = pathlib.Path(folder) / "launch.toml"
        # Numbers, texts, truths and lists of them are written alike in JSON and in TOML.
        launch.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()), encoding="utf-8")
        return json.loads(_flashstrata.probe(launch))


def _parameters(ptx: str, entry: Optional[str]) -> list[str]:
    """The types of an entry's parameters, such as ``u64``; of a structure, ``b8``."""
    name = re.escape(entry) if entry else r"[\w$]+"
    listed = re.search(rf"\.entry\s+{name}\s*\(([^)]*)\)", ptx)
    if listed is None:
        raise ValueError(f"entry is {entry}: the PTX has no such kernel" if entry else "the PTX has no kernel")
    parameters = [one for one in listed.group(1).split(",") if one.strip()]
    return [re.search(r"\.([usbf]\d+)\b", one).group(1) for one in parameters]


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
        is_float = kind.startswith("f")
        # What PTX calls bits says nothing of the sign.
        kind = kind.replace("b", "i") if kind.startswith("b") else kind
        return f"{kind}:{float(value)!r}" if is_float else f"{kind if int(value) >= 0 else kind.replace('u', 'i')}:{int(value)}"
    import numpy

    name = str(value.dtype).removeprefix("torch.")
    if name not in _ELEMENTS:
        raise ValueError(f"args[{index}] is of {value.dtype}: it must be one of {', '.join(_ELEMENTS)}")
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
