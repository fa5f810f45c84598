"""Outputs that were rounded to few evenly spaced values, as whole numbers of 8 bits are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .evidence import INSPECTED, SAMPLED, UNITS, Floats, Pair, measure
from .hypotheses import Sharing

__all__ = ["Grid", "grid_of", "on_grid", "scaled", "stand_out"]

MOST_LEVELS = 1024
"""More values, evenly spaced, are those of a floating type: 8 bits hold 256."""

FEWEST_LEVELS = 8
"""Fewer values are evenly spaced by chance, or because the input takes few."""

SHARED = 8
"""So many elements take each value on average where the values are a grid."""

WHOLE_RANGE = 254
"""Over so many steps the lowest and the highest value stand for all beyond them too."""

LOST = 0.1
"""Of a step, what the type of the output loses at most of the levels that show the grid."""

EXACT = 1e-9
"""A grid of powers of two, or of whole numbers, is exact in every type."""

MOST_SCALES = 4

STANDS_OUT = 3
"""So many times more zeros than other values are no chance."""

HALF = 0.51
"""Of a step an output may be off by, with what its scale is off by."""


@dataclass(frozen=True)
class Grid:
    """Evenly spaced values, zero among them."""

    step: float
    lowest: float
    highest: float

    @property
    def clipped(self) -> bool:
        """Whether what lies beyond the ends was moved to them."""
        return self.highest - self.lowest >= (WHOLE_RANGE - 0.5) * self.step

    @property
    def said(self) -> str:
        """The values, in words."""
        what = "whole numbers" if self.step == 1 else f"multiples of {self.step:.6g}"
        return f"The output takes only {what}, from {self.lowest:g} to {self.highest:g}"


def grid_of(values: Floats, dtype: str) -> Grid | None:
    """The grid that the values lie on, None where they are too many or not evenly spaced.

    Args:
        values: the output.
        dtype: the narrowest type that holds them.

    >>> grid_of(np.round(np.random.default_rng(0).normal(size=4096) * 16) / 16, "float32").step
    0.0625
    """
    some = values.ravel()[:: max(1, values.size // INSPECTED)]
    levels = np.unique(some)
    if not FEWEST_LEVELS <= levels.size <= min(MOST_LEVELS, some.size // SHARED):
        return None
    found = _step(levels, UNITS[dtype])
    if found is None:
        return None
    step, highest = found
    # Numbers of one size are evenly spaced in every floating type.
    if step <= 4 * UNITS[dtype] * float(np.abs(levels[levels != 0]).min()):
        return None
    if not bool((np.abs(levels / step - np.round(levels / step)) <= EXACT).all()):
        told = UNITS[dtype] * np.abs(levels) <= LOST * step
        if int(told.sum()) < FEWEST_LEVELS or 2 * UNITS[dtype] * highest > 1:
            return None
    return Grid(step, float(values.min()), float(values.max()))


def stand_out(values: Floats, grid: Grid) -> bool:
    """Whether zeros are many more than the values beside them: something set them to zero."""
    most = max(
        int((np.abs(values - place * grid.step) < 0.25 * grid.step).sum()) for place in (-1, 1)
    )
    return int((values == 0).sum()) > STANDS_OUT * most


def _step(levels: Floats, unit: float) -> tuple[float, int] | None:
    """The step of which all levels are multiples, rounded to a type, and the largest multiple.

    From the smallest level up: each bounds the step more narrowly than those before.
    """
    size = np.unique(np.abs(levels[levels != 0]))
    near = np.diff(levels)
    # Neighbours that rounding moves little are whole steps apart.
    exact = np.maximum(np.abs(levels[1:]), np.abs(levels[:-1])) * unit <= LOST * near
    if not exact.any():
        return None
    step = float(near[exact].min())
    if float(size[-1]) >= MOST_LEVELS * step:
        return None
    low, high = step * (1 - 2 * LOST), step * (1 + 2 * LOST)
    for value in size.tolist():
        count = round(2 * value / (low + high))
        if not count:
            return None
        low = max(low, value * (1 - unit - EXACT) / count)
        high = min(high, value * (1 + unit + EXACT) / count)
        if low > high:
            return None
    # A step that leaves every level a whole number is meant.
    exact_step = float(size[-1]) / count
    span = float(levels[-1] - levels[0])
    even = span / max(1, round(span / exact_step))
    return (even if low <= even <= high else (low + high) / 2), count


def on_grid(pair: Pair, grid: Grid) -> Pair:
    """The same output, believed to be rounded to the grid."""
    if grid.clipped:
        inside = (pair.y > grid.lowest) & (pair.y < grid.highest)
        pair = pair.with_mask(inside, statistics=False)
    return pair.with_noise(replace(pair.noise, quantum=0.5 * grid.step))


def scaled(pair: Pair, passed: Sequence[tuple[Sharing, bool]]) -> Iterator[tuple[Pair, float]]:
    """The output before it was scaled to whole numbers, with what it was multiplied by.

    Args:
        pair: the output, believed to be rounded to whole numbers.
        passed: the sets of axes that give the output but for a factor of each group, and whether
            the mean is subtracted.
    """
    for sharing, center in passed[:MOST_SCALES]:
        factors = measure(pair, pair.statistics(sharing), center, None, None, most=SAMPLED)
        base = factors.statistics.var if center else factors.statistics.meansquare
        scale = float(np.median((factors.factor * np.sqrt(base))[factors.informative]))
        if scale > 1:
            noise = replace(pair.noise, quantum=HALF / scale)
            yield pair.with_output(pair.y / scale, noise), scale
