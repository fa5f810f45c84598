"""Reused memory for large outputs of the torch engine; see ``_memory``.

A storage is free when its only holders are the pool's: no tensor (view, saved tensor, NumPy or
DLPack alias) and no other Python reference. One that was resized, moved to shared memory or seen by
NumPy, after which torch does not resize it, is let go.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _build
from ._memory import Pool

__all__ = ["empty_cache", "empty_like", "empty_strided", "least", "new_large"]

LEAST = 1 << 20
"""Bytes from which memory is reused. Below, looking for it costs as much as it saves."""

_native = _build.native
_guards = torch._C._dynamo.guards

empty_strided = getattr(_guards, "_empty_strided_cpu", None)
"""(sizes, strides, dtype) -> a tensor of a processor, below the dispatcher; None in some torch."""

_count = getattr(torch._C, "_storage_Use_Count", None)
_over = getattr(_guards, "_reinterpret_tensor", None)  # (base, sizes, strides, offset) -> a tensor


def _storage() -> torch.UntypedStorage:
    return torch.empty(1, device="cpu").untyped_storage()


def _base(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """A tensor of this type in this memory, without elements."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (0,), (1,))


def _connect() -> bool:
    """Whether this torch says who holds a storage."""
    if not (_native and _count and _over):
        return False
    given = {
        "make_tensor": _over,
        "make_base": _base,
        "count": _count,
        "size": torch.UntypedStorage.nbytes,
        "address": torch.UntypedStorage.data_ptr,
        "resizable": torch.UntypedStorage.resizable,
        "new_storage": _storage,
        "dtype": torch.float32,
    }
    # A mode that this module is first imported in would be among the holders.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return _native.connect_storages(given)


_pool = Pool(of_tensors=True, least=LEAST, is_open=_connect())
least = _pool.least


def empty_like(x: Tensor, form: torch.memory_format = torch.preserve_format) -> Tensor:
    """``torch.empty_like(x)``, in memory that was used before where there is some."""
    size = x.nbytes
    if size < least or not x.is_cpu or type(x) not in (Tensor, torch.nn.Parameter):
        return torch.empty_like(x, memory_format=form)
    like = x if x.is_contiguous() else torch.empty_like(x, device="meta", memory_format=form)
    y = _native.reuse(size, (tuple(x.shape), like.stride(), x.dtype))
    return new_large(x, form) if y is None else y


def new_large(x: Tensor, form: torch.memory_format = torch.preserve_format) -> Tensor:
    """``torch.empty_like(x)``, whose memory is kept for others."""
    y = torch.empty_like(x, memory_format=form)
    storage = y.untyped_storage()
    if storage.nbytes() == y.nbytes:
        _native.keep_storage(storage, x.dtype)
    return y


def empty_cache() -> None:
    """Give the kept memory of large outputs back to the system."""
    _pool.clear()
