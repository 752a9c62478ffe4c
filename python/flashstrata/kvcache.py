"""flash_attn_with_kvcache: keys and values in a cache that has its own number of keys for each entry.

Lengths, rows and pages are read by the kernels: nothing waits for the GPU.
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from flashstrata import dispatch


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
    of any size, where its key j is row ``j % page_size`` of page ``block_table[r, j // page_size]``, r as above. k and v ``(batch, seqlen_new,
    heads_kv, head_dim)`` are written behind those keys and are seen too.

    With ``rotary_cos`` and ``rotary_sin`` ``(positions, rotary_dim / 2)``, k is turned by its positions ``cache_seqlens[b] + i``, and
    q likewise under a causal mask or a window, otherwise all of it as at ``cache_seqlens[b]``.

    The first ``cache_leftpad[b]`` keys of a row are none: nobody sees them, ``cache_seqlens`` and positions count them.

    Masks are aligned bottom right, to the keys that an entry has. ``num_splits`` 0 leaves to the library among how many CTAs the keys
    are split. With ``return_softmax_lse`` the result is ``(out, softmax_lse)``.
    """
    left, right = dispatch.window(causal, window_size)
    options = (softmax_scale, left, right, softcap, alibi_slopes)
    if isinstance(cache_seqlens, int):
        new_keys = 0 if k is None else k.shape[1]
        room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
        if not 0 <= cache_seqlens <= room - new_keys:
            raise ValueError(f"cache_seqlens is {cache_seqlens}: it must be 0 to {room - new_keys}, for which there is room")
        # In memory it is no part of the problem, which then is the same at each length.
        is_full = k is None and cache_seqlens == room
        cache_seqlens = None if is_full else torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if block_table is not None and cache_batch_idx is not None:
        # The kernels know pages by the table alone.
        block_table, cache_batch_idx = block_table.index_select(0, cache_batch_idx), None
    new = (k, v, rotary_cos, rotary_sin)
    places = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    cache = (*new, *places, rotary_interleaved, num_splits)
    result = None
    if not torch.compiler.is_compiling():
        result = dispatch.short(q, k_cache, v_cache, *options, None, return_softmax_lse, cache)
    if result is None:
        tensors = dispatch.checked(q, k_cache, v_cache, alibi_slopes, None, cache)
        if not dispatch.is_traced(tensors):
            result = dispatch.forward(q, k_cache, v_cache, *options, None, cache)
        elif k is None:
            result = dispatch.cache_forward_op(q, k_cache, v_cache, *places, num_splits, *options)
        else:
            result = dispatch.append_forward_op(
                q, k_cache, v_cache, *new, rotary_interleaved, *places, num_splits, *options
            )
            return result if return_softmax_lse else result[0]
    if k is not None:
        dispatch.written(k_cache, v_cache)
    return result if return_softmax_lse else result[0]
