"""Outputs that were rounded to few evenly spaced values, as whole numbers of 8 bits are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .evidence import INSPECTED, SAMPLED, UNITS, Floats, Pair, measure
from .hypotheses import Sharing

__all__ = ["Grid", "grid_of", "on_grid", "scaled"]

MOST_LEVELS = 1024
"""More values, evenly spaced, are those of a floating type: 8 bits hold 256."""

FEWEST_LEVELS = 8
"""Fewer values are evenly spaced by chance, or because the input takes few."""

SHARED = 8
"""So many elements take each value on average where the values are a grid."""

WHOLE_RANGE = 254
"""Over so many steps the lowest and the highest value stand for all beyond them too."""

LOST = 0.1
"""Of a step, what the type of the output may lose: where it loses more no grid shows."""

EXACT = 1e-9
"""A grid of powers of two, or of whole numbers, is exact in every type."""

MOST_SCALES = 4

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
    steps = np.diff(levels)
    span = float(levels[-1] - levels[0])
    count = round(span / float(steps.min()))
    if count >= MOST_LEVELS:
        return None
    # The ends show the step more exactly than two neighbours do.
    step = span / count
    # Numbers of one size are evenly spaced in every floating type.
    if step <= 4 * UNITS[dtype] * float(np.abs(levels[levels != 0]).min()):
        return None
    places = levels / step
    off, lost = np.abs(places - np.round(places)), UNITS[dtype] * np.abs(places)
    exact = bool((off <= EXACT).all())
    if not exact and (lost.max() > LOST or bool((off > 4 * lost).any())):
        return None
    return Grid(step, float(values.min()), float(values.max()))


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
