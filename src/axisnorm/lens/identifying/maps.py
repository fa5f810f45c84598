"""What explains an output without statistics: the input times numbers plus numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .evidence import Floats, Pair
from .fit import Given, assignments
from .hypotheses import subsets, whole
from .least_squares import line
from .sampling import COLUMNS, ROWS, number_of, offsets, some

__all__ = ["Map", "maps", "with_given_parameters"]


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


def maps(pair: Pair, given: Given) -> list[Map]:
    """The maps without statistics that explain the output, those of fewest numbers first."""
    shape = pair.shape
    found = []
    if is_input(pair, None, None):
        found.append(Map((), False, 0, False))
    elif with_given_parameters(pair, given):
        found.append(Map((), given.bias is not None, 0, False, given=True))
    random = np.random.default_rng(0)
    sharing = whole(shape, [])
    sets = {tuple(i for i in axes if shape[i] > 1) for axes in ((), *subsets(len(shape)))}
    for axes in sorted(
        sets, key=lambda axes: (number_of(sharing, axes), _unusual(axes, len(shape)))
    ):
        numbers = number_of(sharing, axes)
        each = pair.x.size // max(numbers, 1)
        rows = some(numbers, ROWS, random)
        columns = some(each, COLUMNS, random)
        others = tuple(i for i in range(len(shape)) if i not in axes)
        flat = offsets(shape, axes, rows)[:, None] + offsets(shape, others, columns)
        for with_bias in (False, True):
            if each < 1 + with_bias or each == 1:
                continue
            if not _is_map(pair, flat, with_bias):
                continue
            every = np.arange(pair.x.size).reshape(shape).transpose(*axes, *others)
            every = every.reshape(numbers, each)
            if _is_map(pair, every, with_bias):
                fitted = numbers * (1 + with_bias)
                found.append(Map(axes, with_bias, fitted, each <= 1 + with_bias))
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


def _is_map(pair: Pair, places: NDArray[np.int64], with_bias: bool) -> bool:
    """Whether each row of elements is one number times the input plus a number."""
    x, y = pair.x.ravel()[places], pair.y.ravel()[places]
    valid = None if pair.mask is None else pair.mask.ravel()[places]
    fitted = line(x, y, valid, (1,), with_bias, False)
    w, b = np.abs(fitted.weight), np.abs(fitted.bias)
    allowed = pair.noise.bound(2, np.abs(y), w, 0.0, b)
    allowed = allowed + 4 * pair.noise.compute * w * np.abs(x)
    return bool((np.abs(fitted.left) <= 2 * fitted.reach(allowed, valid)).all())


def _unusual(axes: tuple[int, ...], ndim: int) -> int:
    """Zero for the axes that usually hold the channels."""
    return 0 if axes == (1,) else 1 if axes == (ndim - 1,) else 2
