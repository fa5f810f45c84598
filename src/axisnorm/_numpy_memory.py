"""Reused memory for large outputs of the NumPy engine; see ``_memory``.

An output owns its memory as any array does, but gives it back to the pool, by NumPy's protocol for
that (PyDataMem_Handler, csrc/numpy_array.cpp). What is in the pool is free: whatever looks at an
array's memory (a view, a memoryview, a DLPack or torch alias) holds the array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _build
from ._memory import Pool

__all__ = ["empty_cache", "empty_like", "least"]

Array = Any

LEAST = 512 << 10
"""Bytes from which memory is reused. At half of it, what NumPy makes beside it may lose as much."""

_pool = Pool(of_tensors=False, least=LEAST)
least = _pool.least


def empty_like(x: Array) -> Array:
    """``numpy.empty_like(x)``, in memory that was used before where there is some."""
    size = x.nbytes
    if size < least or type(x) is not np.ndarray:
        return np.empty_like(x)
    return _build.native.large_array_like(x, size)


def empty_cache() -> None:
    """Give the kept memory of large outputs back to the system."""
    _pool.clear()
