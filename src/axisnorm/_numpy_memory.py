"""Reused memory for large outputs of the NumPy engine; see ``_memory``.

An output is an array over a block that the pool keeps. Whatever looks at its memory (a view, a
memoryview, a DLPack or torch alias) holds the output or its base, the block: a block that only the
pool refers to is free. The one thing that such an array cannot do is ``resize`` in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _build
from ._memory import Pool

__all__ = ["empty_cache", "empty_like", "least"]

Array = Any

_pool = Pool(of_tensors=False)
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
