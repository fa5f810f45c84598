"""Reused memory for large outputs: the blocks that are kept, whatever kind of array they are.

A large block that goes back to the system and comes again has its pages faulted in once more, which
costs more than the normalization: a LayerNorm of 32 MB took 12 ms instead of 3. Smaller blocks come
from all over the heap and are in no cache. So the memory of outputs is kept, and a block that
nobody else holds is handed out again. ``AXISNORM_POOL=0`` in the environment turns this off.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["LEAST", "Pool", "limit", "total"]

LEAST = 2 << 20
"""Bytes from which memory is reused. Below, looking for it costs as much as it saves."""

LOOKS = 8
"""How many blocks of a size are looked at, from the newest and from the oldest end."""

Block = TypeVar("Block")


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


class Pool(Generic[Block]):
    """Blocks by size, newest last.

    Args:
        most: how many bytes may be kept.
        is_usable: whether a block still is what it was, of so many bytes.
        is_held: whether something else than a Python reference holds a block.

    A block that one variable refers to, and no list, is free. Its references are counted right in
    the methods, where they are that variable's and getrefcount's: a Python function that counted
    would be called with one more while torch.compile's frame evaluation is active.
    """

    def __init__(
        self,
        most: int,
        is_usable: Callable[[Block, int], bool],
        is_held: Callable[[Block], bool] | None = None,
    ) -> None:
        self.most = most
        self.kept = 0
        self.blocks: dict[int, list[Block]] = {}
        self.is_usable = is_usable
        self.is_held = is_held or (lambda _: False)
        # Reentrant, since a collection of garbage during it may normalize, too: there nothing is
        # found in a pool that is busy, and nothing kept.
        self.lock = threading.RLock()
        self.is_busy = False
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """In a forked child, where another thread may have held it."""
        self.lock = threading.RLock()
        self.is_busy = False

    def take(self, size: int) -> Block | None:
        """A free block of this size, out of the pool."""
        blocks = self.blocks.get(size)
        if not blocks or self.is_busy:
            return None
        self.is_busy = True
        try:
            return self._take_from(blocks, size)
        finally:
            self.is_busy = False

    def _take_from(self, blocks: list[Block], size: int) -> Block | None:
        last = len(blocks) - 1
        for look in range(min(len(blocks), 2 * LOOKS)):
            i = last - look if look < LOOKS else look - LOOKS
            block = blocks.pop(i)
            if sys.getrefcount(block) <= 2 and not self.is_held(block):
                if self.is_usable(block, size):
                    return block
                self.kept -= size
                return None
            blocks.insert(i, block)
        return None

    def put_back(self, block: Block, size: int) -> None:
        """Keep a block that was taken, or for which room was made."""
        self.blocks.setdefault(size, []).append(block)

    def make_room(self, size: int) -> bool:
        """Let free blocks go, oldest first, until ``size`` more bytes fit.

        Few are looked at, so that a full pool of blocks in use costs no more than an empty one.
        Those that stay are looked at last next time.
        """
        if self.is_busy:
            return False
        self.is_busy = True
        try:
            return self._make_room(size)
        finally:
            self.is_busy = False

    def _make_room(self, size: int) -> bool:
        looks = 2 * LOOKS
        for own in list(self.blocks):
            blocks = self.blocks.pop(own)
            for _ in range(min(looks, len(blocks))):
                if self.kept + size <= self.most:
                    break
                looks -= 1
                block = blocks.pop(0)
                free = sys.getrefcount(block) <= 2 and not self.is_held(block)
                if free or not self.is_usable(block, own):
                    self.kept -= own
                else:
                    blocks.append(block)
            if blocks:
                self.blocks[own] = blocks
            if not looks or self.kept + size <= self.most:
                break
        fits = self.kept + size <= self.most
        self.kept += size if fits else 0
        return fits

    def clear(self) -> None:
        """Let all blocks go."""
        with self.lock:
            self.blocks.clear()
            self.kept = 0
