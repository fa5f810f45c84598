"""Least squares for a weight and a bias along any axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .evidence import Floats

__all__ = ["Line", "line"]


CANCELLED = 6 / math.sqrt(3)
"""Six deviations of errors that are spread evenly: further off is none of a billion elements."""


@dataclass(frozen=True, eq=False)
class Line:
    """y = w u + b, fitted to the elements along some axes."""

    axes: tuple[int, ...]
    """Along which one weight and one bias hold."""
    weight: Floats
    bias: Floats
    count: Floats
    """How many elements each was fitted to."""
    left: Floats
    """What is left of y."""
    about: Floats
    """What the weight multiplies, less its mean where a bias was fitted."""
    with_bias: bool
    fixed: bool

    @property
    def leverage(self) -> Floats:
        """How much of an element's own error the fit takes up, between 0 and 1."""
        taken = 1.0 / self.count if self.with_bias else np.zeros_like(self.count)
        if self.fixed:
            return taken
        square = np.square(self.about)
        total = square.sum(self.axes, keepdims=True)
        return taken + np.divide(square, total, out=np.zeros_like(square), where=total > 0)

    def reach(self, errors: Floats, valid: NDArray[np.bool_] | None) -> Floats:
        """How far errors of y up to these move the fit at each element, at least by its own.

        By Cauchy and Schwarz, as the squares of an element's row of the projection sum to its
        leverage: needed where a weight has few elements, or some large outputs and some small.
        Without a mask the errors of many elements mostly cancel.
        """
        square = np.square(errors)
        if valid is not None:
            square = np.where(valid, square, 0.0)
        moved = np.sqrt(self.leverage * square.sum(self.axes, keepdims=True))
        if valid is None:
            moved = moved * np.minimum(1.0, CANCELLED / np.sqrt(self.count))
        return np.maximum(moved, errors)


def line(
    u: Floats,
    y: Floats,
    valid: NDArray[np.bool_] | None,
    axes: tuple[int, ...],
    with_bias: bool,
    fixed: bool,
) -> Line:
    """The weight and bias of y = w u + b for the elements along ``axes``.

    Args:
        u: what the weight multiplies.
        y: the output, of its shape.
        valid: the elements that count, None: all.
        axes: along which one weight holds.
        with_bias: fit a bias too; else it is 0.
        fixed: the weight is 1.
    """
    count: Floats
    if valid is not None:
        u, y = np.where(valid, u, 0.0), np.where(valid, y, 0.0)
        count = np.maximum(valid.sum(axes, keepdims=True), 1.0)
    else:
        count = np.full((1,) * u.ndim, float(math.prod(u.shape[i] for i in axes)))
    if with_bias:
        mu, my = u.sum(axes, keepdims=True) / count, y.sum(axes, keepdims=True) / count
        uc, yc = u - mu, y - my
        if valid is not None:
            uc, yc = np.where(valid, uc, 0.0), np.where(valid, yc, 0.0)
    else:
        mu = my = np.zeros((1,) * u.ndim)
        uc, yc = u, y
    if fixed:
        w = np.ones((1,) * u.ndim)
    else:
        uu = (uc * uc).sum(axes, keepdims=True)
        uy = (uc * yc).sum(axes, keepdims=True)
        w = np.divide(uy, uu, out=np.zeros_like(uy), where=uu > 0)
    b = my - w * mu
    return Line(axes, w, b, count, yc - w * uc, uc, with_bias, fixed)
