"""What explains an output without statistics: the input times numbers plus numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .evidence import Floats, Pair
from .fit import Given, assignments
from .hypotheses import subsets, whole
from .least_squares import line
from .sampling import COLUMNS, ROWS, number_of, offsets, some

__all__ = ["Map", "is_input", "maps", "with_given_parameters"]

BEYOND_THE_NUMBERS = 16
"""So many elements that are not masked there have to be beside the fitted numbers."""


@dataclass(frozen=True)
class Map:
    """The output as the input times a number plus a number, along some axes."""

    axes: tuple[int, ...]
    with_bias: bool
    free_parameters: int
    trivial: bool
    """So few elements share the numbers that any output is such a map."""
    given: bool = False
    """Whether the numbers are the weight and bias that came."""
    mean_residual: float = 0.0
    """What it leaves over on average."""


def maps(pair: Pair, given: Given) -> list[Map]:
    """The maps without statistics that explain the output, those of fewest numbers first.

    Of more numbers than the first that is not trivial none is looked for.
    """
    key = maps, given, pair.noise
    found: list[Map] | None = pair.cache.get(key)
    if found is None:
        found = pair.cache[key] = _maps(pair, given)
    return found


def _maps(pair: Pair, given: Given) -> list[Map]:
    shape = pair.shape
    if is_input(pair, None, None):
        return [Map((), False, 0, False)]
    if with_given_parameters(pair, given):
        return [Map((), given.bias is not None, 0, False, given=True)]
    found = []
    random = np.random.default_rng(0)
    sharing = whole(shape, [])
    sets = {tuple(i for i in axes if shape[i] > 1) for axes in ((), *subsets(len(shape)))}
    least = math.inf
    for axes in sorted(
        sets, key=lambda axes: (number_of(sharing, axes), _unusual(axes, len(shape)))
    ):
        numbers = number_of(sharing, axes)
        each = pair.x.size // max(numbers, 1)
        rows = some(numbers, ROWS, random)
        columns = some(each, COLUMNS, random)
        others = tuple(i for i in range(len(shape)) if i not in axes)
        flat = offsets(shape, axes, rows)[:, None] + offsets(shape, others, columns)
        few = [None if a is None else a.ravel()[flat] for a in (pair.x, pair.y, pair.mask)]
        for with_bias in (False, True):
            fitted = numbers * (1 + with_bias)
            if each < 1 + with_bias or each == 1 or fitted >= least:
                continue
            if _left(pair, few, with_bias) is None:
                continue
            every = [
                None if a is None else a.transpose(*axes, *others).reshape(numbers, each)
                for a in (pair.x, pair.y, pair.mask)
            ]
            left = _left(pair, every, with_bias)
            if left is not None:
                trivial = each <= 1 + with_bias
                if pair.mask is not None:
                    trivial = trivial or int(pair.mask.sum()) - fitted < BEYOND_THE_NUMBERS
                found.append(Map(axes, with_bias, fitted, trivial, mean_residual=left))
                least = least if trivial else fitted
    return sorted(found, key=lambda m: (m.trivial, m.free_parameters))


def is_input(pair: Pair, weight: Floats | None, bias: Floats | None) -> bool:
    """Whether the output is the input, times the weight and plus the bias if there are."""
    if pair.unit != 1:
        return False
    predicted = pair.x if weight is None else pair.x * weight
    shift = 0.0 if bias is None else np.abs(bias)
    predicted = predicted if bias is None else predicted + bias
    off = np.abs(pair.y - predicted) > pair.noise.bound(2, np.abs(predicted), 0.0, 0.0, shift)
    return not bool((off if pair.mask is None else off & pair.mask).any())


def with_given_parameters(pair: Pair, given: Given) -> bool:
    """Whether the given weight and bias alone make the output of the input."""
    if given.weight is None and given.bias is None:
        return False
    return any(is_input(pair, weight, bias) for _, weight, bias in assignments(pair, given))


def _left(pair: Pair, elements: Sequence[Any], with_bias: bool) -> float | None:
    """What is left on average where each row of elements is a number times the input plus one.

    None where rounding does not explain it.
    """
    x, y, valid = elements
    fitted = line(x, y, valid, (1,), with_bias, False)
    w, b = np.abs(fitted.weight), np.abs(fitted.bias)
    allowed = pair.noise.bound(2, np.abs(y), w, 0.0, b)
    allowed = allowed + 4 * pair.noise.compute * w * np.abs(x)
    left = np.abs(fitted.left)
    if not (left <= 2 * fitted.reach(allowed, valid)).all():
        return None
    return float(left.mean(where=True if valid is None else valid))


def _unusual(axes: tuple[int, ...], ndim: int) -> int:
    """Zero for the axes that usually hold the channels."""
    return 0 if axes == (1,) else 1 if axes == (ndim - 1,) else 2
