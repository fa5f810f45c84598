"""The smallest further input that tells schemes apart which fit alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...scheme import ArgumentError, Scheme
from .identification import Decision, Identification

__all__ = ["decisions"]

VISIBLE = 0.02
"""Two outputs are apart where they differ by this share of the largest: in any type."""

MOST_ELEMENTS, MOST_SHAPES = 48, 100
SCALES = (1.0, 1e-3, 1e-5)
DECIDED = 6
"""So many alternatives are decided, the likeliest."""


def decisions(result: Identification, *, fitted: bool) -> Iterator[Decision]:
    """Inputs that decide between the best and what fits as well.

    Args:
        fitted: the weight was fitted: it takes up any constant factor.
    """
    best = result.best
    if best is None or best.first is not None:
        return
    ndim = len(result.shape)
    grouped: dict[bytes, Decision] = {}
    for other in result.indistinguishable[:DECIDED]:
        found = _decide(best.scheme, other, ndim)
        if found is None or (fitted and _one_factor(*found[1])):
            continue
        x, outputs = found
        key = x.tobytes() + str(x.shape).encode()
        if key in grouped:
            old = grouped[key]
            grouped[key] = Decision((*old.schemes, other), x, (*old.outputs, outputs[1]))
        else:
            grouped[key] = Decision((best.scheme, other), x, outputs)
    for decision in grouped.values():
        gives = [
            f"'{scheme}' gives {_said(y)}"
            for scheme, y in zip(decision.schemes, decision.outputs, strict=True)
        ]
        yield replace(
            decision,
            sentence=f"For x = {_said(decision.x)} of shape {decision.x.shape}, without weight "
            f"and bias, {'; '.join(gives)}.",
        )


def _one_factor(first: NDArray[np.float64], second: NDArray[np.float64]) -> bool:
    """Whether one is a number times the other."""
    ratio = float((first * second).sum()) / max(float((second * second).sum()), 1e-300)
    return bool(np.abs(first - ratio * second).max() <= VISIBLE * np.abs(first).max())


def _decide(
    first: Scheme, second: Scheme, ndim: int
) -> tuple[NDArray[np.float64], tuple[NDArray[np.float64], NDArray[np.float64]]] | None:
    plain = [
        scheme.replace(affine="", statistics="batch", rounding="once") for scheme in (first, second)
    ]
    if first.statistics != second.statistics or plain[0] == plain[1]:
        return None
    for shape in _shapes(plain, ndim):
        for scale in SCALES:
            x = _values(shape) * scale
            try:
                outputs = tuple(reference.forward(x, scheme)[0] for scheme in plain)
            except ArgumentError:
                continue
            largest = max(float(np.abs(y).max()) for y in outputs)
            if largest and float(np.abs(outputs[0] - outputs[1]).max()) > VISIBLE * largest:
                return x, (outputs[0], outputs[1])
    return None


def _shapes(schemes: Sequence[Scheme], ndim: int) -> Iterator[tuple[int, ...]]:
    """Small shapes that both schemes divide, the smallest first."""
    choices = []
    layouts = [scheme.layout(ndim) for scheme in schemes]
    alike = layouts[0].reduced_axes == layouts[1].reduced_axes
    for axis in range(ndim):
        step = 1
        for layout in layouts:
            known = math.prod(part.size or 1 for part in layout.axes[axis])
            step = math.lcm(step, known)
        # Along axes that neither of them shares more groups decide nothing more.
        counts = (1,) if alike and axis not in layouts[0].reduced_axes else (1, 2, 3, 4)
        choices.append([step * count for count in counts])
    shapes = [s for s in itertools.product(*choices) if 2 <= math.prod(s) <= MOST_ELEMENTS]
    shapes.sort(key=lambda shape: (math.prod(shape), shape))
    yield from shapes[:MOST_SHAPES]


def _values(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Small whole numbers without a pattern along any axis."""
    count = math.prod(shape)
    numbers = np.array([1, 2, 4, 8, 3, 6, 12, 5, 10, 7, 14, 11, 9, 13, 0], dtype=np.float64)
    return np.resize(numbers, count).reshape(shape)


def _said(values: NDArray[np.float64]) -> str:
    shown = [f"{value:.4g}" for value in values.ravel()[:6]]
    return f"[{', '.join(shown)}{', ...' if values.size > 6 else ''}]"
