"""FlashAttention in Rust: a drop-in for flash_attn's forward functions, without a CUDA toolkit.

``from flashstrata import flash_attn_func`` takes the place of ``from flash_attn import flash_attn_func``.
"""

from flashstrata._flashstrata import Device, __version__
from flashstrata.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "Device",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
