"""Reused memory for large outputs of the torch engine.

A large block that goes back to the system and comes again has its pages faulted in once more, which
costs more than the normalization: a LayerNorm of 32 MB took 12 ms instead of 3. So the storages of
large outputs are kept, and one that nobody else holds is handed out again.

A storage is free when its only holders are this module's: no tensor (view, saved tensor, NumPy or
DLPack alias) and no other Python reference. One that was resized or moved to shared memory is let
go. ``AXISNORM_POOL=0`` in the environment turns all of it off.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["empty_cache", "empty_like"]

LEAST = 32 << 20
"""Bytes from which memory is reused: what glibc's allocator always gives back to the system."""

LOOKS = 8
"""How many blocks of a size are looked at, from the newest and from the oldest end."""


def _limit() -> int:
    """The bytes that may be kept: a quarter of the memory of this container, at most 1 GiB."""
    if os.environ.get("AXISNORM_POOL") == "0" or not hasattr(torch._C, "_storage_Use_Count"):
        return 0
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists():
            text = Path(path).read_text().strip()
            total = min(total, int(text)) if text.isdigit() else total
    return min(1 << 30, total // 4)


class _Pool:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept = 0
        self.blocks: dict[int, list[torch.UntypedStorage]] = {}
        # Reentrant, since a collection of garbage during it may normalize, too.
        self.lock = threading.RLock()

    def take(self, size: int) -> torch.UntypedStorage | None:
        """A free block of this size, out of the pool."""
        blocks = self.blocks.get(size, [])
        count = len(blocks)
        newest = range(count - 1, max(count - 1 - LOOKS, -1), -1)
        oldest = range(min(LOOKS, max(count - LOOKS, 0)))
        for i in (*newest, *oldest):
            block = blocks.pop(i)
            if _is_free(block):
                if _is_usable(block, size):
                    return block
                self.kept -= size
                return None
            blocks.insert(i, block)
        return None

    def keep(self, block: torch.UntypedStorage, size: int) -> None:
        self.blocks.setdefault(size, []).append(block)

    def make_room(self, size: int) -> bool:
        """Let free blocks go, oldest first, until ``size`` more bytes fit."""
        for own, blocks in list(self.blocks.items()):
            for _ in range(len(blocks)):
                if self.kept + size <= self.limit:
                    return True
                block = blocks.pop(0)
                if _is_free(block) or not _is_usable(block, own):
                    self.kept -= own
                else:
                    blocks.append(block)
        return self.kept + size <= self.limit

    def clear(self) -> None:
        self.blocks.clear()
        self.kept = 0


def _is_free(block: torch.UntypedStorage) -> bool:
    # Of Python references: the caller's, this one's and getrefcount's.
    return torch._C._storage_Use_Count(block._cdata) == 1 and sys.getrefcount(block) <= 3


def _is_usable(block: torch.UntypedStorage, size: int) -> bool:
    return block.nbytes() == size and not block.is_shared()


_pool = _Pool(_limit())


def _renew_lock() -> None:
    """In a forked child, where another thread may have held it."""
    _pool.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def empty_like(x: Tensor) -> Tensor:
    """``torch.empty_like(x)``, in memory that was used before where there is some."""
    size = x.numel() * x.element_size()
    if size < LEAST or not _pool.limit or not x.is_contiguous():
        return torch.empty_like(x)
    with _pool.lock:
        block = _pool.take(size)
        if block is not None:
            y = torch.empty(0, dtype=x.dtype).set_(block, 0, x.shape, x.stride())
            _pool.keep(block, size)
            return y
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = y.untyped_storage()
        if block.nbytes() == size and _pool.make_room(size):
            _pool.kept += size
            _pool.keep(block, size)
        return y


def empty_cache() -> None:
    """Give the kept memory of large outputs back to the system."""
    with _pool.lock:
        _pool.clear()
