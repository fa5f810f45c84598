"""Reused memory for large outputs: what is kept, whatever kind of array it is for.

A large block that goes back to the system and comes again has its pages faulted in once more, which
costs more than the normalization: a LayerNorm of 32 MB took 12 ms instead of 3. Smaller blocks come
from all over the heap and are in no cache, or from its end, which malloc gives back to the system.
So the memory of outputs is kept, and a block that nobody else holds is handed out again.
``AXISNORM_POOL=0`` in the environment turns this off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import _build

__all__ = ["Pool", "limit", "total"]


class Pool:
    """The memory that is kept for large tensors, or for arrays.

    Args:
        of_tensors: of which.
        least: bytes from which an output is large.
        is_open: whether any is kept.
    """

    def __init__(self, of_tensors: bool, least: int, is_open: bool = True) -> None:
        self._of_tensors = of_tensors
        self._least = least
        self._native: Any = _build.native if is_open and limit() else None
        if self._native:
            self.most = limit()

    @property
    def least(self) -> int:
        """Bytes from which memory is reused."""
        return self._least if self._native else 1 << 62

    @property
    def most(self) -> int:
        """How many bytes may be kept."""
        return self._native.pool_most(self._of_tensors) if self._native else 0

    @most.setter
    def most(self, most: int) -> None:
        self._native.set_pool_most(self._of_tensors, most)

    @property
    def kept(self) -> int:
        """How many bytes are kept; of tensors, of those in use, too."""
        return self._native.pool_kept(self._of_tensors) if self._native else 0

    def clear(self) -> None:
        """Let all of it go."""
        if self._native:
            self._native.clear_pool(self._of_tensors)


def limit() -> int:
    """The bytes that may be kept: a quarter of the memory of this container, at most 1 GiB."""
    if os.environ.get("AXISNORM_POOL") == "0":
        return 0
    return min(1 << 30, total() // 4)


def total() -> int:
    """The bytes of memory of this machine, or of the container that this process is in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists():
            text = Path(path).read_text().strip()
            found = min(found, int(text)) if text.isdigit() else found
    return found
