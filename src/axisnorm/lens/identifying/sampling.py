"""Samples of elements: some values of a weight, each with some of the elements that use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .evidence import Floats, Statistics
from .hypotheses import Sharing

__all__ = [
    "COLUMNS",
    "ROWS",
    "Sample",
    "groups",
    "groups_at",
    "number_of",
    "offsets",
    "some",
    "summed",
    "varying",
]

ROWS, COLUMNS = 12, 64
"""Of a weight so many values are tried on so many elements each before all data."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Some values of a weight, each with some of the elements that use it."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    x: Floats
    """The elements of the input: a row for each value of the weight."""
    y: Floats
    valid: NDArray[np.bool_] | None
    known: Floats | None
    """The given weight at the elements."""

    @cached_property
    def count(self) -> Any:
        """How many elements each row has."""
        if self.valid is None:
            return self.y.shape[1]
        return np.maximum(self.valid.sum(1), 1)

    @cached_property
    def sums(self) -> tuple[Floats, Floats, Floats]:
        """Of every row of the output: its sum, its sum of squares, and that about its mean."""
        sy, syy = self.y.sum(1), np.einsum("kl,kl->k", self.y, self.y)
        return sy, syy, np.maximum(syy - sy * sy / self.count, 0.0)

    @cached_property
    def slope(self) -> Floats:
        """About what the input is multiplied by, for each row."""
        return self.y.std(1, keepdims=True) / np.maximum(self.x.std(1, keepdims=True), 1e-300)

    def left(self, d: Floats, factors: Sequence[Floats]) -> tuple[Floats, Floats]:
        """What weights, and weights and biases, leave over in all, for each choice of factors."""
        if self.valid is not None:
            d = np.where(self.valid, d, 0.0)
        stacked = np.stack(factors)
        su = np.einsum("fkl,kl->fk", stacked, d)
        suy = np.einsum("fkl,kl->fk", stacked, d * self.y)
        np.square(stacked, out=stacked)
        suu = np.einsum("fkl,kl->fk", stacked, d * d)
        sy, syy, centred = self.sums
        cuu, cuy = suu - su * su / self.count, suy - su * sy / self.count
        with np.errstate(all="ignore"):
            plain = np.where(suu > 0, syy - suy * suy / suu, syy)
            biased = np.where(cuu > 1e-14 * suu, centred - cuy * cuy / cuu, centred)
        return np.maximum(plain, 0.0).sum(1), np.maximum(biased, 0.0).sum(1)


def varying(statistics: Statistics) -> tuple[int, ...]:
    """The dimensions along which statistics vary."""
    if statistics.running:
        return tuple(i for i, size in enumerate(statistics.mean.shape) if size > 1)
    return statistics.sharing.kept


def number_of(sharing: Sharing, dimensions: Sequence[int]) -> int:
    """How many values a weight along these dimensions has."""
    return math.prod(sharing.expanded[i] for i in dimensions)


def some(size: int, most: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Up to ``most`` of the numbers below ``size``, in order."""
    if size <= most:
        return np.arange(size)
    return np.sort(random.choice(size, most, replace=False))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def offsets(
    shape: Sequence[int], dimensions: Sequence[int], index: NDArray[np.int64],
    strides: Sequence[int] | None = None,
) -> NDArray[np.int64]:  # fmt: skip
    """What indices over some dimensions add to the place in the flattened tensor."""
    total = np.zeros(index.shape, np.int64)
    if not dimensions:
        return total
    strides = _strides(shape) if strides is None else strides
    digits = np.unravel_index(index, [shape[i] for i in dimensions])
    for i, digit in zip(dimensions, digits, strict=True):
        total += digit * strides[i]
    return total


def summed(statistics: Statistics) -> int:
    """How many elements a mean was made of, 2 where it was given."""
    return 2 if statistics.running else statistics.sharing.group_size


def groups(statistics: Statistics, sample: Sample, dimensions: Sequence[int]) -> NDArray[np.int64]:
    """The number of the group of every element of a sample."""
    return groups_at(statistics, dimensions, sample.rows, sample.columns)


def groups_at(
    statistics: Statistics,
    dimensions: Sequence[int],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The same for the elements at these places along the weight's and the other dimensions."""
    shape = statistics.sharing.expanded
    told = varying(statistics)
    sizes = [shape[i] if i in told else 1 for i in range(len(shape))]
    strides = [s if i in told else 0 for i, s in enumerate(_strides(sizes))]
    others = [i for i in range(len(shape)) if i not in dimensions]
    return (
        offsets(shape, dimensions, rows, strides)[:, None]
        + offsets(shape, others, columns, strides)[None, :]
    )
