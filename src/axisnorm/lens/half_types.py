"""Rounding to the half types, of which NumPy has only one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["HALF_TYPES", "rounded"]

HALF_TYPES = ("float16", "bfloat16")
"""The types that are computed in a wider one, where the order of roundings shows."""


def rounded(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """The nearest numbers of a half type; ties go to the even one.

    >>> rounded(np.array([1.00390625, 1.01171875]), "bfloat16").tolist()
    [1.0, 1.015625]
    """
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    fraction, exponent = np.frexp(values)
    # Eight bits, and fewer below the smallest normal number.
    bits = np.minimum(8, exponent + 133)
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)
