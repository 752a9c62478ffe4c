from flashstrata._flashstrata import Device as Device, __version__ as __version__
from flashstrata.arrays import attention as attention
from flashstrata.interface import (
    flash_attn_func as flash_attn_func,
    flash_attn_kvpacked_func as flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func as flash_attn_qkvpacked_func,
    flash_attn_varlen_func as flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
)
from flashstrata.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
