"""How the functions of torch's tensors come to the kernels: the short way, the long way, and torch's operators.

What they have in common is said here. ``packed`` is ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)``, ``descales``
``(q_descale, k_descale, v_descale)``, and ``cache``, where k and v are one, ``(k, v, rotary_cos, rotary_sin, cache_seqlens,
cache_batch_idx, cache_leftpad, block_table, rotary_interleaved, num_splits)``; each is None where there is none.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from flashstrata._flashstrata import Torch
from flashstrata.arrays import cpu, gpu

Packed = Optional[Tuple[Tensor, Tensor, int, int]]
Cache = Optional[Tuple[Any, ...]]
Descales = Optional[Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]]
Outputs = Tuple[Tensor, Tensor]

_SCALED = getattr(torch, "float8_e4m3fn", None)
_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", _SCALED: "e4m3"}


def _short_way() -> Callable[..., Optional[tuple[Tensor, Optional[Tensor]]]]:
    """What takes calls of the common kind; where torch is too old for it, none is."""
    try:
        return Torch(torch, lambda index: cpu() if index is None else gpu(index)).forward
    except (AttributeError, ImportError, TypeError):
        return lambda *_: None


short = _short_way()


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Optional[Tensor],
    packed: Packed = None,
    cache: Cache = None,
    descales: Descales = None,
    dropout_p: float = 0.0,
) -> list[Tensor]:
    """The tensors of a call; what is not there yet, and what cannot be, is said."""
    names = ("k", "v") if cache is None or packed is not None else ("k_cache", "v_cache")
    alike, others = dict(zip(names, (k, v))), {"alibi_slopes": alibi_slopes, **named(descales)}
    if packed is not None:
        others |= {"cu_seqlens_q": packed[0], "cu_seqlens_k": packed[1]}
    if cache is not None:
        new = zip(("k", "v", "rotary_cos", "rotary_sin"), cache[:4])
        alike |= {name: tensor for name, tensor in new if tensor is not None}
        others |= dict(zip(("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"), cache[4:8]))
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}: dropout is not supported yet, it must be 0.0")
    given = {"q": q, **alike, **{name: other for name, other in others.items() if other is not None}}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}: it must be a torch.Tensor")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"{name} requires grad: there is no backward pass yet; call under torch.no_grad()")
    for name, tensor in alike.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}: q is on {q.device}, all must be on one device")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: q is {q.dtype}, all must have one dtype")
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"q is on {q.device}: it must be on a CUDA device or on the CPU")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q is {q.dtype}: it must be float16, bfloat16, float32 or float8_e4m3fn")
    if q.dtype == _SCALED and q.device.type == "cpu":
        raise NotImplementedError(f"q is {q.dtype} on the CPU: 8-bit tensors are computed on GPUs alone")
    return list(given.values())


def window(causal: bool, window_size: Tuple[int, int]) -> tuple[int, int]:
    left, right = window_size
    return left, 0 if causal else right


_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack


def is_traced(tensors: list[Tensor]) -> bool:
    """Whether a call is to go by torch's operators: a compiler, a mode, a tracer or a transform looks on at each, or a tensor is of a
    class with an idea of its own of them. The short way knows of these too, but for the compiler."""
    plain = (torch.Tensor, torch.nn.Parameter)
    is_watched = torch.compiler.is_compiling() or _modes() > 0 or _tracing() is not None or _transforms() is not None
    return is_watched or any(type(tensor) not in plain for tensor in tensors)


def _last_contiguous(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    # To torch a tensor without elements is contiguous whatever its strides.
    return tensor.contiguous() if tensor.numel() > 0 else tensor.new_empty(tensor.shape)


def _start(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no memory of its own")
    return address


def _memory(tensor: Tensor) -> tuple[int, Any, Any]:
    return _start(tensor), tensor.shape, tensor.stride()


def _list(
    name: str, tensor: Optional[Tensor], q: Tensor, shape: tuple[Any, ...], dtype: torch.dtype = torch.int32
) -> Optional[Tensor]:
    """Numbers on the device of q, contiguous; an extent that is a name may be any."""
    if tensor is None:
        return None
    fits = len(tensor.shape) == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, tensor.shape))
    if tensor.dtype != dtype or tensor.device != q.device or not fits:
        wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
            f"it must be {str(dtype).removeprefix('torch.')} ({wanted}) on {q.device}"
        )
    return tensor.contiguous()


def _address(tensor: Optional[Tensor]) -> Optional[int]:
    return None if tensor is None else _start(tensor)


def _checked_slopes(alibi_slopes: Optional[Tensor], q: Tensor, batch: int) -> Optional[Tensor]:
    if alibi_slopes is None:
        return None
    heads = q.shape[-2]
    if alibi_slopes.dtype != torch.float32 or alibi_slopes.device != q.device or alibi_slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes is {alibi_slopes.dtype} {tuple(alibi_slopes.shape)} on {alibi_slopes.device}: "
            f"it must be float32 ({heads},) or ({batch}, {heads}) on {q.device}"
        )
    return alibi_slopes.contiguous()


def _checked_cache(q: Tensor, batch: int, k_cache: Tensor, v_cache: Tensor, cache: tuple[Any, ...]) -> tuple[Any, ...]:
    """The cache with its lists contiguous; what is wrong with it is said."""
    k, v, cos, sin, seqlens, batch_idx, leftpad, block_table, interleaved, splits = cache
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must have 4 dimensions")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} has stride {tensor.stride(-1)}: it must be 1")
    if (k is None) != (v is None):
        raise ValueError("k and v go together: one is given without the other")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin go together: one is given without the other")
    if k is not None and seqlens is None:
        raise ValueError("k is given without cache_seqlens: they say where it belongs in the cache")
    if cos is not None and k is None:
        raise ValueError("rotary_cos is given without k: q is turned together with the keys that are appended")
    if leftpad is not None and block_table is not None:
        raise NotImplementedError("cache_leftpad and block_table are given: places before the first key are of rows alone")
    if splits < 0:
        raise ValueError(f"num_splits is {splits}: it must be 0, for as many as fill the GPU, or more")
    if k is not None:
        for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
            if 0 in (stride for stride, extent in zip(tensor.stride(), tensor.shape) if extent > 1):
                raise ValueError(f"{name} has strides {tensor.stride()}: elements of a cache that is written must not share memory")
        k, v = _last_contiguous(k), _last_contiguous(v)
    if cos is not None:
        for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
            if tensor.dim() != 2 or tensor.shape != cos.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: rotary_cos and rotary_sin must both be (positions, rotary_dim / 2)"
                )
        cos, sin = cos.contiguous(), sin.contiguous()
    return (
        k, v, cos, sin,
        _list("cache_seqlens", seqlens, q, (batch,)),
        _list("cache_batch_idx", batch_idx, q, (batch,)),
        _list("cache_leftpad", leftpad, q, (batch,)),
        _list("block_table", block_table, q, (batch, "pages")),
        interleaved, splits,
    )  # fmt: skip


def _cache_arguments(cache: tuple[Any, ...]) -> dict[str, Any]:
    k, v, cos, sin, seqlens, batch_idx, leftpad, block_table, interleaved, splits = cache
    return {
        "seqlens": _address(seqlens),
        "leftpad": _address(leftpad),
        "batch_idx": _address(batch_idx),
        "table": None if block_table is None else (_start(block_table), block_table.shape[1]),
        "new": None if k is None else (_memory(k), _memory(v)),
        "rotary": None if cos is None else (_start(cos), _start(sin), 2 * cos.shape[1], interleaved, cos.shape[0]),
        "splits": splits,
    }


def _checked_descales(q: Tensor, batch: int, heads_kv: int, descales: Descales) -> Optional[list[Tensor]]:
    """What 8-bit tensors are multiplied by, 1 where it is not given."""
    given = named(descales or (None, None, None))
    if q.dtype != _SCALED:
        for name, descale in given.items():
            if descale is not None:
                raise ValueError(f"{name} is given: q is {q.dtype}, and only float8_e4m3fn has descales")
        return None
    shape = (batch, heads_kv)
    checked = (_list(name, descale, q, shape, torch.float32) for name, descale in given.items())
    return [q.new_ones(shape, dtype=torch.float32) if descale is None else descale for descale in checked]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float],
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    packed: Packed = None,
    cache: Cache = None,
    descales: Descales = None,
    stratum: Optional[str] = None,
) -> Outputs:
    """Starts the kernels by the long way, which names what is wrong: out and lse."""
    rank, names = (4, "(batch, seqlen, heads, head_dim)") if packed is None else (3, "(total, heads, head_dim)")
    if q.dim() != rank:
        raise ValueError(f"q has shape {tuple(q.shape)}: it must be {names}")
    q = _last_contiguous(q)
    device, shape = q.device, q.shape
    if packed is None:
        batch, lse_shape, where = shape[0], (shape[0], shape[2], shape[1]), None
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        cu_seqlens_q = _list("cu_seqlens_q", cu_seqlens_q, q, ("batch + 1",))
        cu_seqlens_k = _list("cu_seqlens_k", cu_seqlens_k, q, ("batch + 1",))
        if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.numel() == 0:
            raise ValueError(
                f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)} and cu_seqlens_k {tuple(cu_seqlens_k.shape)}: "
                "both must be (batch + 1,)"
            )
        batch, lse_shape = cu_seqlens_q.numel() - 1, (shape[1], shape[0])
        where = (_start(cu_seqlens_q), _start(cu_seqlens_k), batch, int(max_seqlen_q), int(max_seqlen_k))
    if cache is None:
        k, v = _last_contiguous(k), _last_contiguous(v)
    else:
        cache = _checked_cache(q, batch, k, v, cache)
    descales = _checked_descales(q, batch, k.shape[-2], descales)
    slopes = _checked_slopes(alibi_slopes, q, batch)
    out = q.new_empty((*shape[:-1], v.shape[-1]), dtype=_out_dtype(q))
    lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
    if device.type == "cuda":
        computer, stream = gpu(device.index), torch._C._cuda_getCurrentRawStream(device.index)
    else:
        computer, stream = cpu(), 0
    computer.forward(
        stream,
        _DTYPES[q.dtype],
        _memory(q),
        _memory(k),
        _memory(v),
        (out.data_ptr(), out.stride()),
        (lse.data_ptr(), 4 * lse.numel()),
        softmax_scale,
        left,
        right,
        softcap,
        None if slopes is None else (_start(slopes), slopes.numel()),
        where,
        stratum,
        None if cache is None else _cache_arguments(cache),
        None if descales is None else [_start(descale) for descale in descales],
    )
    return out, lse


def _out_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == _SCALED else q.dtype


# The same as operators of torch's, which compiled graphs and fake tensors go through. (`torch.library.custom_op` would do it in
# fewer lines, and in twice the time of a call.)

_LIBRARY = torch.library.Library("flashstrata", "DEF")


def _operator(name: str, arguments: str, call: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    schema = f"{name}({arguments}) -> (Tensor, Tensor)"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for place in ("CPU", "CUDA"):
        _LIBRARY.impl(name, call, place)
    torch.library.register_fake(f"flashstrata::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.flashstrata, name).default


def _attend(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], packed: Packed, cache: Cache, descales: Descales
) -> Outputs:
    """By the short way where the call is of the common kind."""
    result = short(q, k, v, *options, packed, True, cache, descales)
    if result is not None:
        return result
    checked(q, k, v, options[-1], packed, cache, descales)
    return forward(q, k, v, *options, packed, cache, descales)


def named(descales: Descales) -> dict[str, Optional[Tensor]]:
    """The descales by their names."""
    return dict(zip(("q_descale", "k_descale", "v_descale"), descales or ()))


def written(*caches: Tensor) -> None:
    """Has torch know that they have changed, as an operator of its own would: a gradient that needs what was there is refused."""
    torch.autograd.graph.increment_version([cache for cache in caches if not cache.is_inference()])


def _given(descales: Any) -> Descales:
    return descales if any(one is not None for one in descales) else None


def pages_of(block_table: Tensor) -> Cache:
    """The cache of packed queries."""
    return (*[None] * 7, block_table, False, 0)


def _op(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, *descales):
    return _attend(q, k, v, (softmax_scale, left, right, softcap, alibi_slopes), None, None, _given(descales))


def _varlen_op(q, k, v, cu_q, cu_k, max_q, max_k, block_table, scale, left, right, softcap, slopes, *descales):
    options, packed = (scale, left, right, softcap, slopes), (cu_q, cu_k, max_q, max_k)
    pages = None if block_table is None else pages_of(block_table)
    return _attend(q, k, v, options, packed, pages, _given(descales))


def _cache_op(q, k_cache, v_cache, seqlens, batch_idx, leftpad, block_table, num_splits, *options):
    cache = (None, None, None, None, seqlens, batch_idx, leftpad, block_table, False, num_splits)
    return _attend(q, k_cache, v_cache, options, None, cache, None)


def _append_op(
    q, k_cache, v_cache, k, v, cos, sin, interleaved, seqlens, batch_idx, leftpad, block_table, num_splits, *options
):
    cache = (k, v, cos, sin, seqlens, batch_idx, leftpad, block_table, interleaved, num_splits)
    result = _attend(q, k_cache, v_cache, options, None, cache, None)
    written(k_cache, v_cache)
    return result


def _fake(q, k, v, *_):
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[-1]), dtype=_out_dtype(q))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _varlen_fake(q, k, v, *_):
    total, heads, _ = q.shape
    out = q.new_empty((total, heads, v.shape[-1]), dtype=_out_dtype(q))
    return out, q.new_empty((heads, total), dtype=torch.float32)


_QKV = "Tensor q, Tensor k, Tensor v"
_OFFSETS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_OPTIONS = "float? softmax_scale, SymInt left, SymInt right, float softcap, Tensor? alibi_slopes"
_DESCALES = "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
_PLACES = (
    "Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, SymInt num_splits"
)
_NEW = "Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved"

forward_op = _operator("forward", f"{_QKV}, {_OPTIONS}, {_DESCALES}", _op, _fake)
varlen_forward_op = _operator(
    "varlen_forward", f"{_QKV}, {_OFFSETS}, Tensor? block_table, {_OPTIONS}, {_DESCALES}", _varlen_op, _varlen_fake
)
cache_forward_op = _operator(
    "cache_forward", f"Tensor q, Tensor k_cache, Tensor v_cache, {_PLACES}, {_OPTIONS}", _cache_op, _fake
)
append_forward_op = _operator(
    "append_forward", f"Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_NEW}, {_PLACES}, {_OPTIONS}", _append_op, _fake
)
