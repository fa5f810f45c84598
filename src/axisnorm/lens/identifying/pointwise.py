"""Outputs that are a function of their own input alone, which no statistics are part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .activations import FUNCTIONS, LOST
from .evidence import Floats, Pair

__all__ = ["Pointwise", "pointwise"]

SAMPLED = 1 << 14
"""So many elements are looked at before all."""

ENOUGH = 256
"""Of fewer elements no function is seen."""

APART = 0.2
"""At least this share of neighbouring inputs comes from other places along each axis: where groups
of elements do not mix, each may have its own line."""

BENT = 2.0
"""So much more than by the step from one input to the next an output is off every straight line:
lines that differ by less look like one function."""


@dataclass(frozen=True)
class Pointwise:
    """A function of single numbers."""

    code: str
    """Of a known one, else empty."""

    @property
    def sentence(self) -> str:
        """What it says of a normalization."""
        if self.code == "relu":
            return (
                "Where it is not 0, the output is the input, as after relu(x): "
                "nothing was normalized."
            )
        if self.code:
            return f"The output is {self.code}(x), element by element: nothing was normalized."
        return (
            "Each output depends on its own input alone, equal inputs give equal outputs, and on "
            "no straight line: no statistics show, unless all elements share one mean."
        )


def pointwise(pair: Pair) -> Pointwise | None:
    """The function that gives each output of its own input; None where none is seen.

    A straight line is none: norms are made of them.
    """
    if pair.x.size < ENOUGH or pair.unit != 1:
        return None
    size = pair.x.size
    every = size <= SAMPLED
    flat = np.arange(size) if every else np.random.default_rng(0).integers(size, size=SAMPLED)
    few = pair.x.ravel()[flat], pair.y.ravel()[flat]
    if not _bent(*few):
        return None
    for function in FUNCTIONS:
        if _is(function.compute, pair, *few) and _is(function.compute, pair, pair.x, pair.y):
            return Pointwise(function.code)
    if _smooth(pair, flat) and (every or _smooth(pair, np.arange(size))):
        return Pointwise("")
    return None


def _is(compute: Callable[[Floats], Floats], pair: Pair, x: Floats, y: Floats) -> bool:
    with np.errstate(all="ignore"):
        predicted = compute(x)
    bound = pair.noise.bound(2, np.abs(predicted), 0.0) + LOST * pair.noise.compute * np.abs(x)
    return bool((np.abs(y - predicted) <= bound).all())


def _bent(x: Floats, y: Floats) -> bool:
    """Whether no straight line comes near, which is not so of what is nearly one."""
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    centred = x - x.mean()
    slope = float((centred * y).sum()) / max(float((centred * centred).sum()), 1e-300)
    left = y - y.mean() - slope * centred
    off, gaps = float(np.square(left).mean()), float(np.square(np.diff(y)).mean())
    return off > BENT**2 * gaps


def _smooth(pair: Pair, flat: NDArray[np.int64]) -> bool:
    """Whether equal inputs have equal outputs, and larger ones not smaller, at mixed places."""
    x, y = pair.x.ravel()[flat], pair.y.ravel()[flat]
    order = np.lexsort((y, x))
    rising = float((x * (y - y.mean())).sum()) >= 0
    equal = np.diff(x[order]) == 0
    ordered = y[order]
    steps = np.diff(ordered) if rising else -np.diff(ordered)
    allowed = pair.noise.bound(2, np.abs(ordered[1:]), 0.0)
    monotone = bool((steps[~equal] >= -allowed[~equal]).all())
    alike = bool((np.abs(steps[equal]) <= allowed[equal]).all())
    if not alike or not (monotone or int(equal.sum()) >= len(flat) // 2):
        return False
    told = slice(None) if monotone else equal
    places = np.unravel_index(flat[order], pair.shape)
    for size, index in zip(pair.shape, places, strict=True):
        if size > 1 and float((np.diff(index)[told] != 0).mean()) < APART:
            return False
    return True
