"""flash_attn's functions (flash-attn 2.8), with its arguments and defaults, on torch tensors.

Shapes: q ``(batch, seqlen_q, heads, head_dim)``, k ``(batch, seqlen_k, heads_kv, head_dim)``, v ``(batch, seqlen_k, heads_kv,
head_dim_v)``; of packed sequences ``(total, heads, head_dim)`` with ``cu_seqlens`` of ``batch + 1`` int32. ``out`` is like q with
``head_dim_v`` columns; ``softmax_lse`` is ``(batch, heads, seqlen_q)`` or ``(heads, total_q)``, float32.

Tensors may have any strides but for the last dimension, which is copied where it is not contiguous. Nothing is copied
otherwise, nothing waits for the GPU, and work goes to torch's current stream. Tensors of the CPU are computed there, on as many
threads as the processor has (or ``RAYON_NUM_THREADS`` says).
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple, Union

import torch
from torch import Tensor

from flashstrata._flashstrata import Device, Torch

Result = Union[Tensor, Tuple[Tensor, Tensor, Optional[Tensor]]]

_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@functools.lru_cache(maxsize=None)
def _device(index: int) -> Device:
    return Device(index)


@functools.lru_cache(maxsize=None)
def _cpu() -> Device:
    return Device.cpu()


def _short_way() -> Callable[..., Optional[tuple[Tensor, Optional[Tensor]]]]:
    """What takes calls of the common kind; where torch is too old for it, none is."""
    try:
        return Torch(torch, lambda index: _cpu() if index is None else _device(index)).forward
    except (AttributeError, ImportError, TypeError):
        return lambda *_: None


_short = _short_way()


def _refuse(dropout_p: float, q: Tensor, k: Tensor, v: Tensor) -> None:
    """What is not there yet, and what cannot be."""
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}: dropout is not supported yet, it must be 0.0")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError("q, k or v requires grad: there is no backward pass yet; call under torch.no_grad()")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}: q is on {q.device}, all must be on one device")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: q is {q.dtype}, all must have one dtype")
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"q is on {q.device}: it must be on a CUDA device or on the CPU")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q is {q.dtype}: it must be float16, bfloat16 or float32")


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _memory(tensor: Tensor) -> tuple[int, Any, Any]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _slopes(alibi_slopes: Optional[Tensor], q: Tensor) -> Optional[tuple[int, int]]:
    if alibi_slopes is None:
        return None
    if alibi_slopes.dtype != torch.float32 or alibi_slopes.device != q.device or not alibi_slopes.is_contiguous():
        raise ValueError(
            f"alibi_slopes is {alibi_slopes.dtype} on {alibi_slopes.device} with strides {alibi_slopes.stride()}: "
            f"it must be contiguous float32 on {q.device}"
        )
    return alibi_slopes.data_ptr(), alibi_slopes.numel()


def _window(causal: bool, window_size: Tuple[int, int]) -> tuple[int, int]:
    left, right = window_size
    return left, 0 if causal else right


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float],
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    packed: Optional[tuple[Tensor, Tensor, int, int]],
    stratum: Optional[str] = None,
) -> tuple[Tensor, Tensor]:
    """Starts the kernels; ``packed`` is ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)``."""
    q, k, v = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v)
    device = q.device
    shape = q.shape
    # The cheaper call where it makes the same tensor.
    if shape[-1] == v.shape[-1] and q.is_contiguous():
        out = torch.empty_like(q)
    else:
        out = q.new_empty((*shape[:-1], v.shape[-1]))
    if packed is None:
        lse = torch.empty((shape[0], shape[2], shape[1]), dtype=torch.float32, device=device)
        where = None
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if offsets.dtype != torch.int32 or offsets.device != device or not offsets.is_contiguous():
                raise ValueError(
                    f"{name} is {offsets.dtype} on {offsets.device}: it must be contiguous int32 on {device}"
                )
        if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1 or cu_seqlens_q.numel() == 0:
            raise ValueError(
                f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)} and cu_seqlens_k {tuple(cu_seqlens_k.shape)}: "
                "both must be (batch + 1,)"
            )
        lse = torch.empty((shape[1], shape[0]), dtype=torch.float32, device=device)
        batch = cu_seqlens_q.numel() - 1
        where = (cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), batch, int(max_seqlen_q), int(max_seqlen_k))
    if device.type == "cuda":
        computer, stream = _device(device.index), torch._C._cuda_getCurrentRawStream(device.index)
    else:
        computer, stream = _cpu(), 0
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
        _slopes(alibi_slopes, q),
        where,
        stratum,
    )
    return out, lse


# The same as operators of torch's, which compiled graphs and fake tensors go through. (`torch.library.custom_op` would do it in
# fewer lines, and in twice the time of a call.)

_LIBRARY = torch.library.Library("flashstrata", "DEF")


def _operator(name: str, arguments: str, forward: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    schema = f"{name}({arguments}) -> (Tensor, Tensor)"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for place in ("CPU", "CUDA"):
        _LIBRARY.impl(name, forward, place)
    torch.library.register_fake(f"flashstrata::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.flashstrata, name).default


def _op(q, k, v, softmax_scale, left, right, softcap, alibi_slopes):
    return _attend(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, None)


def _fake(q, k, v, softmax_scale, left, right, softcap, alibi_slopes):
    batch, seqlen_q, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    return q.new_empty((batch, seqlen_q, heads, v.shape[-1])), lse


def _varlen_op(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest):
    return _attend(q, k, v, *rest, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))


def _varlen_fake(q, k, v, *_):
    total, heads, _ = q.shape
    return q.new_empty((total, heads, v.shape[-1])), q.new_empty((heads, total), dtype=torch.float32)


_QKV = "Tensor q, Tensor k, Tensor v"
_OFFSETS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_REST = "float? softmax_scale, SymInt left, SymInt right, float softcap, Tensor? alibi_slopes"
_forward_op = _operator("forward", f"{_QKV}, {_REST}", _op, _fake)
_varlen_forward_op = _operator("varlen_forward", f"{_QKV}, {_OFFSETS}, {_REST}", _varlen_op, _varlen_fake)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float],
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    packed: Optional[tuple[Tensor, Tensor, int, int]],
) -> tuple[Tensor, Tensor]:
    """The short way where the call is of the common kind."""
    result = _short(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, packed, True)
    if result is not None:
        return result
    return _forward(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, packed)


def _is_traced(q: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(q) is not torch.Tensor and type(q) is not torch.nn.Parameter


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``softmax(q k^T softmax_scale) v``. Causal masks and windows are aligned bottom right; negative sides are unbounded.

    ``deterministic`` concerns the backward pass: the forward pass always is. With ``return_attn_probs`` the result is
    ``(out, softmax_lse, None)``; the third is the mask of dropout, which there is none of.
    """
    left, right = _window(causal, window_size)
    if dropout_p == 0.0 and not torch.compiler.is_compiling():
        result = _short(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, None, return_attn_probs)
        if result is not None:
            return (*result, None) if return_attn_probs else result[0]
    _refuse(dropout_p, q, k, v)
    if _is_traced(q):
        out, lse = _forward_op(q, k, v, softmax_scale, left, right, softcap, alibi_slopes)
    else:
        out, lse = _forward(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, None)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of kv ``(batch, seqlen_k, 2, heads_kv, head_dim)``."""
    return flash_attn_func(
        q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of qkv ``(batch, seqlen, 3, heads, head_dim)``."""
    return flash_attn_func(
        qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Result:
    """:func:`flash_attn_func` of sequences of different lengths, one after the other.

    With ``block_table`` k and v are pages, see :func:`flashstrata.flash_attn_with_kvcache`."""
    left, right = _window(causal, window_size)
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if dropout_p == 0.0 and block_table is None and not torch.compiler.is_compiling():
        result = _short(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, packed, return_attn_probs)
        if result is not None:
            return (*result, None) if return_attn_probs else result[0]
    _refuse(dropout_p, q, k, v)
    if block_table is not None:
        from flashstrata.kvcache import varlen_on_pages

        out, lse = varlen_on_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, softmax_scale, (left, right), softcap,
            alibi_slopes,
        )  # fmt: skip
    elif _is_traced(q):
        out, lse = _varlen_forward_op(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, left, right, softcap, alibi_slopes
        )
    else:
        out, lse = _forward(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, packed)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of kv ``(total_k, 2, heads_kv, head_dim)``."""
    return flash_attn_varlen_func(
        q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv ``(total, 3, heads, head_dim)``."""
    return flash_attn_varlen_func(
        qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
