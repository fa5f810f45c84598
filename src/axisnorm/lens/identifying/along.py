"""Functions along axes that no mean and no variance is part of: softmax, a sum or a largest value
that divides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .evidence import Floats, Pair
from .hypotheses import subsets
from .identification import axes_in_words

__all__ = ["FUNCTIONS", "Along", "along"]

ENOUGH = 4
"""Of fewer elements no function is seen."""

Axes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Function:
    """A function that maps the elements along some axes together."""

    code: str
    said: str
    """What the output is, before the axes."""
    compute: Callable[[Floats, Axes], tuple[Floats, Floats]]
    """The output, and what its error is of besides its own size, in roundings."""
    held: Callable[[Floats, Axes], Floats]
    """What of the output is 1 along the axes."""
    within: bool = False
    """Whether half types round within, too: on CPUs torch's log_softmax does, and its softmax along
    other axes than the last one where several threads share it."""


@dataclass(frozen=True)
class Along:
    """A function of the elements along some axes of the tensor."""

    code: str
    said: str
    axes: Axes

    @property
    def sentence(self) -> str:
        """What it says of a normalization."""
        return (
            f"The output is {self.said} along {axes_in_words(self.axes)}: no mean that is "
            "subtracted and no variance is part of it."
        )


def _softmax(x: Floats, axes: Axes) -> tuple[Floats, Floats]:
    below = x - x.max(axes, keepdims=True)
    y = np.exp(below)
    y /= y.sum(axes, keepdims=True)
    # exp loses what the difference was rounded by.
    return y, y * (np.abs(x) + np.abs(below))


def _log_softmax(x: Floats, axes: Axes) -> tuple[Floats, Floats]:
    most = x.max(axes, keepdims=True)
    below = x - most
    total = np.log(np.exp(below).sum(axes, keepdims=True))
    return below - total, np.abs(x) + np.abs(most) + total


def _over(divisor: Floats, x: Floats, lost: Floats) -> tuple[Floats, Floats]:
    with np.errstate(all="ignore"):
        y = np.where(divisor == 0, 0.0, x / divisor)
        return y, np.where(divisor == 0, 0.0, np.abs(y) * (lost / np.abs(divisor)))


def _over_length(x: Floats, axes: Axes) -> tuple[Floats, Floats]:
    length = np.abs(x).sum(axes, keepdims=True)
    return _over(length, x, length)


def _over_sum(x: Floats, axes: Axes) -> tuple[Floats, Floats]:
    # A sum of numbers of both signs loses digits of the larger ones.
    return _over(x.sum(axes, keepdims=True), x, np.abs(x).sum(axes, keepdims=True))


def _over_largest(x: Floats, axes: Axes) -> tuple[Floats, Floats]:
    largest = np.abs(x).max(axes, keepdims=True)
    return _over(largest, x, largest)


FUNCTIONS = (
    Function("softmax", "softmax(x)", _softmax, lambda y, axes: y.sum(axes), within=True),
    Function("log_softmax", "log_softmax(x)", _log_softmax,
             lambda y, axes: np.exp(np.minimum(y, 1.0)).sum(axes), within=True),
    Function("l1", "x divided by the sum of |x| (L1)", _over_length,
             lambda y, axes: np.abs(y).sum(axes)),
    Function("sum", "x divided by its sum", _over_sum, lambda y, axes: y.sum(axes)),
    Function("max", "x divided by the largest |x|", _over_largest,
             lambda y, axes: np.abs(y).max(axes)),
)  # fmt: skip


def along(pair: Pair) -> Along | None:
    """The function along some axes that gives the output; None where none does."""
    if pair.x.size < ENOUGH or pair.mask is not None or pair.unit != 1:
        return None
    shape = pair.shape
    sets = {tuple(i for i in axes if shape[i] > 1): None for axes in subsets(len(shape))}
    for axes in sets:
        if not axes:
            continue
        for function in FUNCTIONS:
            if _may_be(function, pair, axes) and _is(function, pair, axes):
                return Along(function.code, function.said, axes)
    return None


def _may_be(function: Function, pair: Pair, axes: Axes) -> bool:
    """Whether what is 1 of the function's output nearly is, in half of the groups at least."""
    held = function.held(pair.y, axes)
    own = pair.noise.unit * max(1.0, float(np.abs(pair.y).max()))
    n = math.prod(pair.shape[i] for i in axes)
    allowed = 0.01 + 4 * own + n * (pair.noise.smallest + pair.noise.quantum)
    return bool((np.abs(held - 1) <= allowed).mean() >= 0.5)


def _is(function: Function, pair: Pair, axes: Axes) -> bool:
    with np.errstate(all="ignore"):
        predicted, lost = function.compute(pair.x, axes)
    noise = pair.noise
    n = math.prod(pair.shape[i] for i in axes)
    allowed = noise.bound(n, np.abs(predicted), 0.0)
    inner = noise.compute * (4.0 + 0.5 * math.log2(n))
    allowed = allowed + inner * lost
    if function.within:
        allowed = allowed + noise.unit * lost + noise.smallest + noise.quantum
    return bool((np.abs(pair.y - predicted) <= allowed).all())
