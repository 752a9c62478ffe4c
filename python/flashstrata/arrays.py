"""Attention on arrays of NumPy, CuPy and JAX. Torch is not needed."""

from __future__ import annotations

import functools
import sys
from typing import Any, Optional, Tuple

from flashstrata._flashstrata import Device

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

# Of DLPack.
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13


@functools.lru_cache(maxsize=None)
def gpu(ordinal: int) -> Device:
    return Device(ordinal)


@functools.lru_cache(maxsize=None)
def cpu() -> Device:
    return Device.cpu()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: Optional[float] = None,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """``softmax(q k^T softmax_scale) v`` of arrays of NumPy, CuPy, JAX or torch; the result is an array of the same library.

    Shapes, types, masks and what is not copied are those of :func:`flashstrata.flash_attn_func`: q ``(batch, seqlen_q, heads,
    head_dim)``, k and v ``(batch, seqlen_k, heads_kv, head_dim)``; float32, float16, or bfloat16 (of NumPy by ml_dtypes), in
    native byte order. NumPy's arrays that lie backwards are copied, and masked ones refused. With ``return_lse`` the result is
    ``(out, lse)``, where lse ``(batch, heads, seqlen_q)`` is float32.

    Arrays of the CPU are computed there. CuPy's go to its current stream, and nothing waits. JAX has no stream that others could
    put work on: the call waits for its arrays, and for the result. Other arrays of the CPU that have ``__dlpack__`` are computed
    too; their result is NumPy's.
    """
    library = _library(q)
    for name, array in (("k", k), ("v", v)):
        if _library(array) != library:
            raise ValueError(f"{name} is an array of {_library(array)}: q is of {library}, all must be of one library")
    if library == "torch":
        from flashstrata import interface

        result = interface.flash_attn_func(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            return_attn_probs=return_lse,
        )  # fmt: skip
        return result[:2] if return_lse else result
    place, ordinal = _device(q)
    for name, array in (("k", k), ("v", v)):
        if _device(array) != (place, ordinal):
            raise ValueError(f"{name} is on device {_device(array)}: q is on {(place, ordinal)}, all must be on one")
    options = (softmax_scale, window_size[0], 0 if causal else window_size[1], softcap)
    if place in (_CPU, _CUDA_HOST):
        out, lse = _on_cpu(q, k, v, options)
        if library == "jax":
            import jax.numpy

            out, lse = jax.numpy.asarray(out), jax.numpy.asarray(lse)
    elif place in (_CUDA, _CUDA_MANAGED) and library == "cupy":
        out, lse = _by_cupy(q, k, v, ordinal, options)
    elif place in (_CUDA, _CUDA_MANAGED) and library == "jax":
        out, lse = _by_jax(q, k, v, ordinal, options)
    else:
        raise ValueError(f"q is an array of {library} on DLPack's device {(place, ordinal)}: it must be on the CPU or a GPU of CUDA")
    return (out, lse) if return_lse else out


def _library(array: Any) -> str:
    name = type(array).__module__.partition(".")[0]
    # JAX's arrays are of its other package.
    name = {"jaxlib": "jax"}.get(name, name)
    if name not in ("numpy", "cupy", "jax", "torch") and not hasattr(array, "__dlpack__"):
        raise TypeError(f"an array is {type(array)}: it must be of NumPy, CuPy, JAX or torch, or have __dlpack__")
    return name


def _device(array: Any) -> tuple[int, int]:
    """DLPack's kind of device, and its number."""
    kind, ordinal = array.__dlpack_device__()
    return int(kind), int(ordinal)


def _on_cpu(q: Any, k: Any, v: Any, options: tuple) -> tuple[Any, Any]:
    import numpy

    def own(name: str, array: Any) -> Any:
        if isinstance(array, numpy.ma.MaskedArray):
            raise ValueError(f"{name} is a masked array: no mask is looked at, it must be a plain array (filled())")
        if isinstance(array, numpy.ndarray):
            return array
        # DLPack of JAX knows bfloat16, NumPy's does not.
        if _library(array) == "jax":
            return numpy.asarray(array)
        try:
            return numpy.from_dlpack(array)
        except (BufferError, RuntimeError) as error:
            allowed = "float16 or float32 in native byte order"
            raise ValueError(f"{name} is {type(array)}, which NumPy cannot read ({error}): it must be {allowed}") from error

    arrays = (own("q", q), own("k", k), own("v", v))
    return _start(numpy, cpu(), 0, arrays, options, lambda array: array.__array_interface__)


def _by_cupy(q: Any, k: Any, v: Any, ordinal: int, options: tuple) -> tuple[Any, Any]:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(ordinal):
        stream = cupy.cuda.get_current_stream().ptr
        return _start(cupy, gpu(ordinal), stream, (q, k, v), options, lambda array: array.__cuda_array_interface__)


def _by_jax(q: Any, k: Any, v: Any, ordinal: int, options: tuple) -> tuple[Any, Any]:
    import jax

    class Library:
        """Arrays beside the inputs, with memory of their own."""

        float32 = jax.numpy.float32

        @staticmethod
        def empty(shape: tuple, dtype: Any) -> Any:
            return jax.block_until_ready(jax.device_put(jax.numpy.zeros(shape, dtype), q.device))

        ascontiguousarray = staticmethod(lambda array: array)

    jax.block_until_ready((q, k, v))
    device = gpu(ordinal)
    result = _start(Library, device, 0, (q, k, v), options, lambda array: array.__cuda_array_interface__)
    device.synchronize(0)
    return result


def _start(library: Any, device: Device, stream: int, arrays: tuple, options: tuple, interface: Any) -> tuple[Any, Any]:
    """Starts the call; `library` makes arrays, and `interface` has an array's address and strides, in bytes."""
    dtype = arrays[0].dtype
    if dtype.name not in _DTYPES:
        raise ValueError(f"q is {dtype.name}: it must be float16, bfloat16 or float32")
    inputs = []
    for name, array in zip("qkv", arrays):
        if not array.dtype.isnative:
            raise ValueError(f"{name} is {array.dtype.name} ({array.dtype.str}): it must be in native byte order")
        if array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype.name}: q is {dtype.name}, all must have one type")
        if array.ndim != 4:
            dims = "(batch, seqlen, heads, head_dim)"
            raise ValueError(f"{name} has shape {tuple(array.shape)}: it must be {dims}")
        address, strides = _memory(interface(array), dtype.itemsize)
        if strides is None or (strides[-1] != 1 and array.shape[-1] != 1):
            array = library.ascontiguousarray(array)
            address, strides = _memory(interface(array), dtype.itemsize)
        # The array, which may be a copy, lives as long as the call.
        inputs.append((array, (address, array.shape, strides)))
    (q, _), _, (v, _) = inputs
    out = library.empty((*q.shape[:3], v.shape[3]), dtype)
    lse = library.empty((q.shape[0], q.shape[2], q.shape[1]), library.float32)
    of_out, of_lse = _memory(interface(out), dtype.itemsize), _memory(interface(lse), 4)
    device.forward(
        stream, _DTYPES[dtype.name], *(memory for _, memory in inputs), of_out, (of_lse[0], 4 * lse.size), *options
    )
    return out, lse


def _memory(interface: dict[str, Any], itemsize: int) -> tuple[int, Optional[tuple[int, ...]]]:
    """Address and strides in elements; no strides where they are no whole elements, or go backwards."""
    shape, strides = interface["shape"], interface.get("strides")
    if strides is None:
        strides, within = [], itemsize
        for extent in reversed(shape):
            strides.insert(0, within)
            within *= max(extent, 1)
    if any(stride < 0 or stride % itemsize for stride in strides):
        return interface["data"][0], None
    return interface["data"][0], tuple(stride // itemsize for stride in strides)
