"""flash_attn's functions (flash-attn 2.8), with its arguments and defaults, on torch tensors.

Shapes: q ``(batch, seqlen_q, heads, head_dim)``, k ``(batch, seqlen_k, heads_kv, head_dim)``, v ``(batch, seqlen_k, heads_kv,
head_dim_v)``; of packed sequences ``(total, heads, head_dim)`` with ``cu_seqlens`` of ``batch + 1`` int32. ``out`` is like q with
``head_dim_v`` columns; ``softmax_lse`` is ``(batch, heads, seqlen_q)`` or ``(heads, total_q)``, float32.

Tensors may have any strides but for the last dimension, which is copied where it is not contiguous. Nothing is copied
otherwise, nothing waits for the GPU, and work goes to torch's current stream. Tensors of the CPU are computed there, on as many
threads as the processor has (or ``RAYON_NUM_THREADS`` says).

Tensors of float8_e4m3fn stand for their numbers times ``q_descale``, ``k_descale`` and ``v_descale``, as in FlashAttention-3: float32
``(batch, heads_kv)``, 1 where not given, copied where not contiguous. Their ``out`` is bfloat16.
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from flashstrata import dispatch

Result = Union[Tensor, Tuple[Tensor, Tensor, Optional[Tensor]]]


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
    *,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
) -> Result:
    """``softmax(q k^T softmax_scale) v``. Causal masks and windows are aligned bottom right; negative sides are unbounded.

    ``deterministic`` concerns the backward pass: the forward pass always is. With ``return_attn_probs`` the result is
    ``(out, softmax_lse, None)``; the third is the mask of dropout, which there is none of.
    """
    left, right = dispatch.window(causal, window_size)
    descales = None if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    if dropout_p == 0.0 and not torch.compiler.is_compiling():
        result = dispatch.short(
            q, k, v, softmax_scale, left, right, softcap, alibi_slopes, None, return_attn_probs, None, descales
        )
        if result is not None:
            return (*result, None) if return_attn_probs else result[0]
    tensors = dispatch.checked(q, k, v, alibi_slopes, None, None, descales, dropout_p)
    options = (softmax_scale, left, right, softcap, alibi_slopes)
    if dispatch.is_traced(tensors):
        out, lse = dispatch.forward_op(q, k, v, *options, q_descale, k_descale, v_descale)
    else:
        out, lse = dispatch.forward(q, k, v, *options, descales=descales)
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
    *,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
) -> Result:
    """:func:`flash_attn_func` of sequences of different lengths, one after the other.

    With ``block_table`` k and v are pages, see :func:`flashstrata.flash_attn_with_kvcache`."""
    left, right = dispatch.window(causal, window_size)
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    pages = None if block_table is None else dispatch.pages_of(block_table)
    descales = None if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    if dropout_p == 0.0 and not torch.compiler.is_compiling():
        result = dispatch.short(
            q, k, v, softmax_scale, left, right, softcap, alibi_slopes, packed, return_attn_probs, pages, descales
        )
        if result is not None:
            return (*result, None) if return_attn_probs else result[0]
    tensors = dispatch.checked(q, k, v, alibi_slopes, packed, pages, descales, dropout_p)
    options = (softmax_scale, left, right, softcap, alibi_slopes)
    if dispatch.is_traced(tensors):
        out, lse = dispatch.varlen_forward_op(
            q, k, v, *packed, block_table, *options, q_descale, k_descale, v_descale
        )
    else:
        out, lse = dispatch.forward(q, k, v, *options, packed, pages, descales)
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
