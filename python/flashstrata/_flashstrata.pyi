from pathlib import Path
from types import ModuleType
from typing import Any, Callable, List, Optional, Sequence, Tuple

__version__: str

Memory = Tuple[int, Sequence[int], Sequence[int]]

class Device:
    """A GPU, the processor, or an emulated GPU, and the kernels that were compiled for it."""

    name: str
    def __init__(self, ordinal: int = 0, tuned: bool = False) -> None: ...
    @staticmethod
    def cpu() -> "Device": ...
    @staticmethod
    def emulated(name: str) -> "Device": ...
    def forward(
        self,
        stream: int,
        dtype: str,
        q: Memory,
        k: Memory,
        v: Memory,
        out: Tuple[int, Sequence[int]],
        lse: Tuple[int, int],
        scale: Optional[float],
        left: int,
        right: int,
        softcap: float,
        slopes: Optional[Tuple[int, int]],
        packed: Optional[Tuple[int, int, int, int, int]],
        stratum: Optional[str],
    ) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def forward_host(
        self, problem: str, q: bytes, k: bytes, v: bytes, stratum: Optional[str] = None
    ) -> Tuple[bytes, bytes]: ...
    def plan(self, problem: str, stratum: Optional[str] = None) -> str: ...

class Torch:
    """The short way of a call on torch's own tensors."""

    def __init__(self, torch: ModuleType, open: Callable[[Optional[int]], Device]) -> None: ...
    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale: Optional[float],
        left: int,
        right: int,
        softcap: float,
        slopes: Any,
        packed: Optional[Tuple[Any, Any, int, int]],
        with_lse: bool,
    ) -> Optional[Tuple[Any, Any]]: ...

def dig(problem: str, gpu: str, strata: List[str], full: bool, seed: int) -> Tuple[str, List[str]]: ...
def probe(launch: Path) -> str: ...

def forward_cache(
    device: Device,
    stream: int,
    dtype: str,
    q: Memory,
    k: Memory,
    v: Memory,
    out: Memory,
    lse: Tuple[int, int],
    scale: Optional[float],
    left: int,
    right: int,
    softcap: float,
    slopes: Optional[Tuple[int, int]],
    packed: Optional[Tuple[int, int, int, int, int]],
    cache_seqlens: Optional[int],
    cache_batch_idx: Optional[int],
    block_table: Optional[Tuple[int, int]],
    new: Optional[Tuple[Memory, Memory]],
    rotary: Optional[Tuple[int, int, int, bool, int]],
    splits: Optional[int],
) -> None: ...
