"""Least squares for a weight and a bias along any axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .evidence import Floats

__all__ = ["left_over", "line"]


def left_over(
    u: Floats, y: Floats, valid: NDArray[np.bool_] | None, with_bias: bool, *, fixed: bool = False
) -> Floats:
    """The sum of squares of every row that weights, and biases, leave over."""
    _, _, _, left = line(u, y, valid, (1,), with_bias, fixed)
    return np.square(left).sum(1)


def line(
    u: Floats,
    y: Floats,
    valid: NDArray[np.bool_] | None,
    axes: tuple[int, ...],
    with_bias: bool,
    fixed: bool,
) -> tuple[Floats, Floats, Floats, Floats]:
    """The weight and bias of y = w u + b for the elements along ``axes``.

    Args:
        u: what the weight multiplies.
        y: the output, of its shape.
        valid: the elements that count, None: all.
        axes: along which one weight holds.
        with_bias: fit a bias too; else it is 0.
        fixed: the weight is 1.

    Returns:
        Weight, bias, the number of elements, and what is left of y, all of u's number of axes.
    """
    count: Any
    if valid is not None:
        u, y = np.where(valid, u, 0.0), np.where(valid, y, 0.0)
        count = np.maximum(valid.sum(axes, keepdims=True), 1)
    else:
        count = np.full((1,) * u.ndim, math.prod(u.shape[i] for i in axes))
    if with_bias:
        mu, my = u.sum(axes, keepdims=True) / count, y.sum(axes, keepdims=True) / count
        uc, yc = u - mu, y - my
        if valid is not None:
            uc, yc = np.where(valid, uc, 0.0), np.where(valid, yc, 0.0)
    else:
        mu = my = np.zeros((1,) * u.ndim)
        uc, yc = u, y
    if fixed:
        w: Any = np.ones((1,) * u.ndim)
    else:
        uu = (uc * uc).sum(axes, keepdims=True)
        uy = (uc * yc).sum(axes, keepdims=True)
        w = np.divide(uy, uu, out=np.zeros_like(uy), where=uu > 0)
    b = my - w * mu
    left = yc - w * uc
    return w, b, count, left
