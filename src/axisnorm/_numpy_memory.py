"""The memory of the NumPy engine's outputs: aligned, and reused for large ones; see ``_memory``.

NumPy's own begins at any multiple of 16 bytes, so that stores of 64 bytes cross from one cache line
into the next three times out of four: then an rms_norm of 128 rows of 768 numbers takes twice as
long.

An output owns its memory as any array does, but a large one gives it back to the pool, by NumPy's
protocol for that (PyDataMem_Handler, csrc/numpy_array.cpp). What is in the pool is free: whatever
looks at an array's memory (a view, a memoryview, a DLPack or torch alias) holds the array.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from . import _build
from ._memory import Pool

__all__ = ["ALIGNED", "empty_cache", "empty_like", "least"]

Array = Any

LEAST = 512 << 10
"""Bytes from which memory is reused. At half of it, what NumPy makes beside it may lose as much."""

ALIGNED = 3 << 9
"""Bytes from which an output begins with a cache line. With what stands in front of it, one of 1 KB
is too long for malloc's quickest blocks, and takes 15 ns more than NumPy's."""

_native = _build.native
_pool = Pool(of_tensors=False, least=LEAST)
least = _pool.least


def empty_like(x: Array, order: Literal["C", "K"] = "K") -> Array:
    """``numpy.empty_like(x)``, aligned, a large one in memory that was used before."""
    plain = _native and type(x) is np.ndarray
    y = _native.array_like(x, x.nbytes, order == "C") if plain else None
    return np.empty_like(x, order=order) if y is None else y


def empty_cache() -> None:
    """Give the kept memory of large outputs back to the system."""
    _pool.clear()
