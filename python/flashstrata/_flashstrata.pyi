from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

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
        slopes: Optional[Tuple[int, int]] = None,
        packed: Optional[Tuple[int, int, int, int, int]] = None,
        stratum: Optional[str] = None,
        cache: Optional[Dict[str, Any]] = None,
        descales: Optional[Sequence[int]] = None,
    ) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def forward_host(
        self,
        problem: str,
        q: bytes,
        k: bytes,
        v: bytes,
        stratum: Optional[str] = None,
        descales: Optional[Tuple[bytes, bytes, bytes]] = None,
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
        cache: Optional[Tuple[Any, ...]] = None,
        descales: Optional[Tuple[Any, Any, Any]] = None,
    ) -> Optional[Tuple[Any, Any]]: ...

def dig(problem: str, gpu: str, strata: List[str], full: bool, seed: int) -> Tuple[str, List[str]]: ...
def probe(launch: Path) -> str: ...
