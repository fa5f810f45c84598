"""Reused memory for large outputs of the NumPy engine; see ``_memory``.

An output is an array over a block that the pool keeps. Whatever looks at its memory (a view, a
memoryview, a DLPack or torch alias) holds the output or its base, the block: a block that only the
pool refers to is free. The one thing that such an array cannot do is ``resize`` in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._memory import LEAST, Pool, limit

__all__ = ["empty_cache", "empty_like"]

Array = Any


def _is_usable(block: Array, size: int) -> bool:
    return bool(block.nbytes == size)


_pool: Pool[Array] = Pool(limit(), _is_usable)


def empty_like(x: Array) -> Array:
    """``numpy.empty_like(x)``, in memory that was used before where there is some."""
    if x.nbytes < LEAST or not _pool.most or type(x) is not np.ndarray:
        return np.empty_like(x)
    # The strides of numpy.empty_like, for the price of a few pages.
    strides = np.empty_like(x, subok=False).strides
    with _pool.lock:
        block = _pool.take(x.nbytes)
        if block is None:
            block = np.empty(x.nbytes, np.uint8)
            if not _pool.make_room(x.nbytes):
                return np.ndarray(x.shape, x.dtype, block, strides=strides)
        y = np.ndarray(x.shape, x.dtype, block, strides=strides)
        _pool.put_back(block, x.nbytes)
        return y


def empty_cache() -> None:
    """Give the kept memory of large outputs back to the system."""
    _pool.clear()
