"""What the last digits of an output show: where it was rounded, and in what type computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..half_types import HALF_TYPES, rounded
from .evidence import UNITS, Floats, Pair

if TYPE_CHECKING:
    from .fit import Fit

__all__ = ["computed_in", "round_to", "rounding_order"]

ENOUGH = 64
"""Of fewer elements the last digits show nothing."""

ALL_BUT_FEW = 0.97
"""The share of half outputs that float32 arithmetic rounds correctly is above this."""


def round_to(values: Floats, dtype: str) -> Floats:
    """The nearest values of a type, as float64.

    >>> round_to(np.array([1.0 + 2**-8 + 2**-20]), "bfloat16").item()
    1.0078125
    """
    if dtype in HALF_TYPES:
        return rounded(values, dtype)
    return values.astype(dtype).astype(np.float64)


def prediction(pair: Pair, fit: Fit, rounding: str = "once") -> Floats:
    """What a fit computes in float64, with the normalized value rounded where that is said."""
    statistics = fit.statistics
    sharing = statistics.sharing
    x = pair.x.reshape(sharing.expanded)
    value = statistics.value(x, fit.formula.center) * statistics.factor(fit.formula, fit.eps)
    value = value.reshape(pair.shape)
    if rounding == "before_affine":
        value = round_to(value, pair.x_dtype)
    if fit.weight_along is not None:
        value = value * fit.weight_along
    if fit.bias_along is not None:
        value = value + fit.bias_along
    return value


def rounding_order(pair: Pair, fit: Fit) -> str | None:
    """``"once"`` or ``"before_affine"``, None where this output shows neither.

    The right order gives all outputs but few; the other misses those that it rounds otherwise.
    """
    off = [
        int((pair.y != round_to(prediction(pair, fit, order), pair.y_dtype)).sum())
        for order in ("once", "before_affine")
    ]
    if abs(off[0] - off[1]) <= 3 * math.sqrt(min(off)) + 1:
        return None
    return "once" if off[0] < off[1] else "before_affine"


def computed_in(pair: Pair, fit: Fit, y_dtype: str) -> str | None:
    """The type of the computation, None where the output does not show it."""
    if fit.affine.fitted or fit.eps_fitted or not fit.fits or pair.mask is not None:
        return None
    if pair.x.size < ENOUGH or pair.noise.quantum:
        return None
    if pair.y_dtype == "float64":
        return "float32" if pair.noise.compute == UNITS["float32"] else "float64"
    if pair.y_dtype != y_dtype:
        return pair.y_dtype  # a wider type holds values of this one
    orders = ("once", "before_affine") if fit.weight_along is not None else ("once",)
    right = max(
        float((pair.y == round_to(prediction(pair, fit, order), pair.y_dtype)).mean())
        for order in orders
    )
    if pair.y_dtype == "float32":
        return "float64" if right > 0.999 else "float32"
    return "float32" if right > ALL_BUT_FEW else pair.y_dtype
