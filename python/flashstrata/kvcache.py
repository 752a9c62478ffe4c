"""flash_attn_with_kvcache, and packed queries on pages: keys and values in a cache that has its own number of keys for each entry.

Lengths, rows and pages are read by the kernels: nothing waits for the GPU.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from flashstrata import interface
from flashstrata._flashstrata import forward_cache


def _memory(tensor: Tensor) -> tuple[int, Any, Any]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _integers(name: str, tensor: Optional[Tensor], q: Tensor, shape: tuple[Optional[int], ...]) -> Optional[Tensor]:
    """int32 on the device of q, contiguous; an extent of None may be any."""
    if tensor is None:
        return None
    fits = len(tensor.shape) == len(shape) and all(n is None or n == m for n, m in zip(shape, tensor.shape))
    if tensor.dtype != torch.int32 or tensor.device != q.device or not fits:
        wanted = ", ".join("pages" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: it must be int32 ({wanted}) on {q.device}"
        )
    return tensor.contiguous()


def _like_q(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device or tensor.dtype != q.dtype:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: q is {q.dtype} on {q.device}")


def _address(tensor: Optional[Tensor]) -> Optional[int]:
    return None if tensor is None else tensor.data_ptr()


def _start(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: Optional[tuple[Tensor, Tensor]] = None,
    rotary: Optional[tuple[Tensor, Tensor, bool]] = None,
    cache_seqlens: Optional[Tensor] = None,
    cache_batch_idx: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    packed: Optional[tuple[Tensor, Tensor, int, int]] = None,
    softmax_scale: Optional[float] = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    device = q.device
    out = torch.empty((*q.shape[:-1], v_cache.shape[-1]), dtype=q.dtype, device=device)
    where = None
    if packed is None:
        shape = (q.shape[0], q.shape[2], q.shape[1])
    else:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        shape = (q.shape[1], q.shape[0])
        where = (
            cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), cu_seqlens_q.numel() - 1, int(max_seqlen_q), int(max_seqlen_k)
        )  # fmt: skip
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    angles = None
    if rotary is not None:
        cos, sin, interleaved = rotary
        angles = (cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1], interleaved, cos.shape[0])
    if device.type == "cuda":
        computer, stream = interface._device(device.index), torch._C._cuda_getCurrentRawStream(device.index)
    else:
        computer, stream = interface._cpu(), 0
    forward_cache(
        computer,
        stream,
        interface._DTYPES[q.dtype],
        _memory(q),
        _memory(k_cache),
        _memory(v_cache),
        _memory(out),
        (lse.data_ptr(), 4 * lse.numel()),
        softmax_scale,
        *window,
        softcap,
        interface._slopes(alibi_slopes, q),
        where,
        _address(cache_seqlens),
        _address(cache_batch_idx),
        None if block_table is None else (block_table.data_ptr(), block_table.shape[1]),
        None if new is None else (_memory(new[0]), _memory(new[1])),
        angles,
        num_splits if num_splits > 0 else None,
    )
    return out, lse


def _caches(k_cache: Tensor, v_cache: Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(cache.shape)}: it must have 4 dimensions")
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} has stride {cache.stride(-1)}: it must be 1")


def varlen_on_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor,
    softmax_scale: Optional[float],
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """``flash_attn_varlen_func`` of k and v in pages ``(pages, page_size, heads_kv, head_dim)``."""
    _caches(k, v)
    batch = cu_seqlens_q.numel() - 1
    starts = tuple(
        _integers(name, tensor, q, (batch + 1,))
        for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    )
    return _start(
        interface._last_contiguous(q),
        k,
        v,
        block_table=_integers("block_table", block_table, q, (batch, None)),
        packed=(*starts, max_seqlen_q, max_seqlen_k),
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Attention of q ``(batch, seqlen_q, heads, head_dim)`` over a cache, which gets k and v appended first, in place.

    ``k_cache`` and ``v_cache`` are ``(batch_cache, seqlen_cache, heads_kv, head_dim)``, of which entry b has the first
    ``cache_seqlens[b]`` keys of row ``cache_batch_idx[b]`` (row b without); or pages ``(pages, page_size, heads_kv, head_dim)``
    of any size, where its key j is row ``j % page_size`` of page ``block_table[b, j // page_size]``. k and v ``(batch, seqlen_new,
    heads_kv, head_dim)`` are written behind those keys and are seen too.

    With ``rotary_cos`` and ``rotary_sin`` ``(positions, rotary_dim / 2)``, k is turned by its positions ``cache_seqlens[b] + i``, and
    q likewise under a causal mask or a window, otherwise all of it as at ``cache_seqlens[b]``.

    Masks are aligned bottom right, to the keys that an entry has. ``num_splits`` 0 leaves to the library among how many CTAs the keys
    are split. With ``return_softmax_lse`` the result is ``(out, softmax_lse)``.
    """
    if cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad is given: keys before an entry's first are not supported yet")
    interface._refuse(0.0, q, k_cache, v_cache)
    _caches(k_cache, v_cache)
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}: it must be (batch, seqlen_q, heads, head_dim)")
    batch = q.shape[0]
    if (k is None) != (v is None):
        raise ValueError("k and v go together: one is given without the other")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together: one is given without the other")
    if k is not None and cache_seqlens is None:
        raise ValueError("k is given without cache_seqlens: they say where it belongs in the cache")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos is given without k: q is turned together with the keys that are appended")
    if num_splits < 0:
        raise ValueError(f"num_splits is {num_splits}: it must be 0, for as many as fill the GPU, or more")
    window = interface._window(causal, window_size)

    if isinstance(cache_seqlens, int):
        room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
        new_keys = 0 if k is None else k.shape[1]
        if not 0 <= cache_seqlens <= room - new_keys:
            raise ValueError(f"cache_seqlens is {cache_seqlens}: it must be 0 to {room - new_keys}, for which there is room")
        if k is None and cache_batch_idx is None and block_table is None and k_cache.shape[0] == batch and num_splits == 0:
            # A cache whose entries are of one length that is known is just tensors.
            k_cache, v_cache, cache_seqlens = k_cache[:, :cache_seqlens], v_cache[:, :cache_seqlens], None
        else:
            cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    is_plain = k is None and cache_seqlens is None and cache_batch_idx is None and block_table is None
    if is_plain and k_cache.shape[0] == batch and num_splits == 0:
        result = interface.flash_attn_func(
            q, k_cache, v_cache, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs=True
        )
        return (result[0], result[1]) if return_softmax_lse else result[0]

    new = rotary = None
    if k is not None and v is not None:
        _like_q("k", k, q)
        _like_q("v", v, q)
        new = (interface._last_contiguous(k), interface._last_contiguous(v))
    if rotary_cos is not None and rotary_sin is not None:
        for name, tensor in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            _like_q(name, tensor, q)
            if tensor.dim() != 2 or tensor.shape != rotary_cos.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: rotary_cos and rotary_sin must both be (positions, rotary_dim / 2)"
                )
        rotary = (rotary_cos.contiguous(), rotary_sin.contiguous(), rotary_interleaved)
    out, lse = _start(
        interface._last_contiguous(q),
        k_cache,
        v_cache,
        new,
        rotary,
        _integers("cache_seqlens", cache_seqlens, q, (batch,)),
        _integers("cache_batch_idx", cache_batch_idx, q, (batch,)),
        _integers("block_table", block_table, q, (batch, None)),
        None,
        softmax_scale,
        window,
        softcap,
        alibi_slopes,
        num_splits,
    )
    return (out, lse) if return_softmax_lse else out
