"""Reused memory for large outputs of the torch engine; see ``_memory``.

A storage is free when its only holders are the pool's: no tensor (view, saved tensor, NumPy or
DLPack alias) and no other Python reference. One that was resized or moved to shared memory is let
go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._memory import LEAST, Pool, limit

__all__ = ["LEAST", "empty_cache", "empty_like", "empty_strided"]


def _is_held(block: torch.UntypedStorage) -> bool:
    return torch._C._storage_Use_Count(block._cdata) > 1


def _is_usable(block: torch.UntypedStorage, size: int) -> bool:
    return block.nbytes() == size and not block.is_shared()


empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
"""(sizes, strides, dtype) -> a tensor of a processor, below the dispatcher; None in some torch."""


def _new(x: Tensor) -> Tensor:
    """A tensor of this type without elements."""
    if empty_strided is None or not x.is_cpu:
        return x.new_empty(0)
    return empty_strided((0,), (1,), x.dtype)  # a third of the time


_pool = Pool(limit() if hasattr(torch._C, "_storage_Use_Count") else 0, _is_usable, _is_held)


def empty_like(x: Tensor) -> Tensor:
    """``torch.empty_like(x)``, in memory that was used before where there is some."""
    size = x.nbytes
    if size < LEAST or not _pool.most:
        return torch.empty_like(x)
    with _pool.lock:
        block = _pool.take(size)
        if block is not None:
            like = x if x.is_contiguous() else torch.empty_like(x, device="meta")
            y = _new(x).set_(block, 0, x.shape, like.stride())
            _pool.put_back(block, size)
            return y
        y = torch.empty_like(x)
        block = y.untyped_storage()
        if block.nbytes() == size and _pool.make_room(size):
            _pool.put_back(block, size)
        return y


def empty_cache() -> None:
    """Give the kept memory of large outputs back to the system."""
    _pool.clear()
