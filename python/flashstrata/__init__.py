"""FlashAttention in Rust: a drop-in for flash_attn's forward functions, without a CUDA toolkit.

``from flashstrata import flash_attn_func`` takes the place of ``from flash_attn import flash_attn_func``. Those functions need
torch; :func:`attention`, for arrays of NumPy, CuPy and JAX, :mod:`flashstrata.lab` and :class:`Device` do not.
"""

from typing import Any

from flashstrata._flashstrata import Device, __version__
from flashstrata.arrays import attention

_OF_TORCH = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__all__ = ["Device", "__version__", "attention", *_OF_TORCH]


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCH:
        raise AttributeError(f"module 'flashstrata' has no attribute '{name}'")
    from flashstrata import interface, kvcache

    return getattr(kvcache if name == "flash_attn_with_kvcache" else interface, name)
