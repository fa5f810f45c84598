"""The chart of an identification: how far off each candidate is, beside what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identifying.identification import Candidate, Identification

__all__ = ["Chart", "chart_of", "eps_in_words"]

MOST_ROWS = 16
"""A chart shows so many candidates, the best first."""


@dataclass(frozen=True)
class Chart:
    """Candidates on one logarithmic axis."""

    candidates: tuple[Candidate, ...]
    left_out: int
    """How many more candidates there are, each further off."""
    low: int
    """The power of ten at the axis's left end."""
    high: int

    @property
    def ticks(self) -> tuple[int, ...]:
        """The powers of ten that are written at the axis, some eight of them."""
        step = max(1, -(-(self.high - self.low) // 8))
        return tuple(range(self.low, self.high + 1, step))

    def place(self, value: float) -> float:
        """Where a value stands between the axis's ends, 0 to 1. Zero is at the left end."""
        if not value > 0:
            return 0.0
        if not math.isfinite(value):
            return 1.0
        return min(max((math.log10(value) - self.low) / (self.high - self.low), 0.0), 1.0)


def chart_of(result: Identification) -> Chart:
    """The candidates of an identification on the axis that shows them all."""
    shown = result.candidates[:MOST_ROWS]
    powers = [
        math.log10(value)
        for candidate in shown
        for value in (candidate.residual, candidate.tolerance)
        if value > 0 and math.isfinite(value)
    ]
    # A residual of zero has no logarithm: it stands at the left end, left of all others.
    low = math.floor(min(powers, default=-8.0) - 0.5)
    high = math.ceil(max(powers, default=0.0) + 0.25)
    return Chart(tuple(shown), len(result.candidates) - len(shown), low, max(high, low + 2))


def eps_in_words(interval: Sequence[float] | None) -> str:
    """An interval of eps as it is said.

    >>> eps_in_words((9e-6, 1.01e-5)), eps_in_words((9.99999e-6, 1.000001e-5))
    ('9e-06 to 1.01e-05', '1e-05 ± 1e-11')
    >>> eps_in_words((0.0, 1e-7)), eps_in_words((0.0, math.inf))
    ('at most 1e-07', 'not determined')
    """
    if interval is None:
        return ""
    low, high = interval
    if math.isinf(high):
        return f"at least {low:.3g}" if low > 0 else "not determined"
    if low <= 0:
        return f"at most {high:.3g}"
    middle, half = (low + high) / 2, (high - low) / 2
    if half < 0.005 * middle:
        return f"{middle:.6g} ± {half:.1g}" if half else f"{middle:.6g}"
    return f"{low:.3g} to {high:.3g}"
