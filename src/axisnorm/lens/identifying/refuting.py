"""What no weight and no eps can explain, seen on a few elements before anything is fitted.

Both bounds are safe: what they refute leaves more over than rounding allows, whatever the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .evidence import Floats, Noise, Pair, Statistics
from .hypotheses import Sharing, whole
from .least_squares import line
from .sampling import COLUMNS, ROWS, number_of, offsets, some

__all__ = ["Lines", "none_between", "refuted_for_every_eps"]

KINDS = (1.0, 2.0), (0.5, 1.0)
"""Of a variance that divides without its root, and of all other formulas: the largest power of the
variance that divides, and how much more than through a root its error moves the output."""

FEW = 3
"""Through fewer elements there is always a line."""

ALIKE = 32
"""So many elements of groups of nearly one variance are looked at for each weight."""

MIDDLE = 64
"""The middle variance is sought among so many elements of each weight, evenly spaced."""

LEAST_ALLOWED = 0.02
"""Of what rounding allows of a row on the whole, at least this share is allowed of each element."""

Part = tuple[int, int, bool]
"""An axis that is seen as two, the size of its outer part, and whether the inner one is held."""


class Lines:
    """Whether the output is a line of the input where neither a group nor a weight changes.

    There every norm is one slope times the input plus one number. Where a sample of such elements
    is on no line, no norm with these groups and these weights made it.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.largest = float(np.abs(pair.x).max())
        self.furthest = _furthest(pair)
        self.bits = [1 << i for i, n in enumerate(pair.shape) if n > 1]
        self.made: dict[tuple[int, Part | None], _Cells | None] = {}
        self.answers: dict[tuple[int, Part | None, Noise], bool] = {}

    @classmethod
    def of(cls, pair: Pair) -> Lines:
        """Those of a pair, made once."""
        found: Lines | None = pair.cache.get("lines")
        if found is None:
            found = pair.cache["lines"] = cls(pair)
        return found

    def refute(
        self,
        sharing: Sharing,
        fixed: Iterable[int],
        noise: Noise,
        statistics: Statistics | None = None,
    ) -> bool:
        """Whether elements alike in these dimensions are on no line.

        Args:
            sharing: whose expanded shape the dimensions are of.
            fixed: all along which statistics or parameters vary.
            noise: the most that is believed of rounding.
            statistics: of the sharing: less is allowed where the means are known to be small.
        """
        fixed = tuple(fixed)
        touched = sharing.touched(fixed)
        if self.refute_axes(touched, noise):
            return True
        part = self._part(sharing, fixed)
        if statistics is not None:
            largest = statistics.largest
            if self._refuted(self._of_axes(touched), noise, *largest):
                return True
            return part is not None and self._refuted(
                self._of_part(sharing, touched, part), noise, *largest
            )
        if part is None:
            return False
        key = touched, part, noise
        answer = self.answers.get(key)
        if answer is None:
            cells = self._of_part(sharing, touched, part)
            answer = self.answers[key] = self._refuted(cells, noise, self.largest, self.largest)
        return answer

    def refute_axes(self, touched: int, noise: Noise) -> bool:
        """Whether elements alike along these whole axes, told as bits, are on no line."""
        key = touched, None, noise
        answer = self.answers.get(key)
        if answer is None:
            # Where more is held the line holds all the more: what is off none then is off none now.
            more = (touched | bit for bit in self.bits if not touched & bit)
            answer = any(self.refute_axes(axes, noise) for axes in more)
            if not answer:
                answer = self._refuted(self._of_axes(touched), noise, self.largest, self.largest)
            self.answers[key] = answer
        return answer

    def _refuted(self, cells: _Cells | None, noise: Noise, mean: float, about: float) -> bool:
        return cells is not None and cells.refuted(noise, mean, about, self.pair.x.size)

    def _part(self, sharing: Sharing, fixed: Sequence[int]) -> Part | None:
        """The axis of which a part alone is held."""
        if sharing.split is None:
            return None
        outer, inner = sharing.dimensions(sharing.split)
        if (outer in fixed) == (inner in fixed):
            return None
        return sharing.split, sharing.expanded[outer], inner in fixed

    def _of_axes(self, touched: int) -> _Cells | None:
        key = touched, None
        if key not in self.made:
            shape = self.pair.shape
            axes = tuple(i for i in range(len(shape)) if touched & 1 << i)
            self.made[key] = self._fitted(whole(shape, []), axes)
        return self.made[key]

    def _of_part(self, sharing: Sharing, touched: int, part: Part) -> _Cells | None:
        key = touched, part
        if key not in self.made:
            axis, _, inner = part
            dimensions = [
                i for other, own in enumerate(sharing.own_dimensions) for i in own
                if other != axis and touched & 1 << other
            ]  # fmt: skip
            dimensions.append(sharing.dimensions(axis)[inner])
            self.made[key] = self._fitted(sharing, tuple(sorted(dimensions)))
        return self.made[key]

    def _fitted(self, sharing: Sharing, dimensions: tuple[int, ...]) -> _Cells | None:
        shape = sharing.expanded
        rows = number_of(sharing, dimensions)
        others = tuple(i for i in range(len(shape)) if i not in dimensions)
        each = number_of(sharing, others)
        if each < FEW:
            return None
        random = np.random.default_rng(0)
        places = np.unravel_index(self.furthest, shape)
        picked = [
            _with(some(number, most, random), [shape[i] for i in own], [places[i] for i in own])
            for own, number, most in ((dimensions, rows, ROWS), (others, each, COLUMNS))
        ]
        flat = (
            offsets(shape, dimensions, picked[0])[:, None]
            + offsets(shape, others, picked[1])[None, :]
        )  # fmt: skip
        pair = self.pair
        valid = None if pair.mask is None else pair.mask.ravel()[flat]
        x, y = pair.x.ravel()[flat], pair.y.ravel()[flat]
        fitted = line(x, y, valid, (1,), True, False)
        count = fitted.count[:, 0]
        spread = np.sqrt(np.square(fitted.about).sum(1) / count)
        left = np.sqrt(np.square(fitted.left).sum(1) / count)
        slope = np.abs(fitted.weight[:, 0])
        size = y if valid is None else np.where(valid, y, 0.0)
        size = np.sqrt(np.square(size).sum(1) / count)
        told = spread > 0
        found = left, spread, np.hypot(left, slope * spread), size
        return _Cells(*(values[told] for values in found))


def _furthest(pair: Pair) -> int:
    """The element furthest off one line of all: if any is on no line of its own few, it is."""
    valid = None if pair.mask is None else pair.mask.reshape(1, -1)
    fitted = line(pair.x.reshape(1, -1), pair.y.reshape(1, -1), valid, (1,), True, False)
    return int(np.abs(fitted.left).argmax())


def _with(
    index: NDArray[np.int64], shape: Sequence[int], place: Sequence[Any]
) -> NDArray[np.int64]:
    """The indices over some dimensions with this place among them."""
    if not shape:
        return index
    return np.union1d(index, np.ravel_multi_index(tuple(place), tuple(shape)))


@dataclass(frozen=True, eq=False)
class _Cells:
    """Lines fitted to elements of several groups and weights; root mean squares of each."""

    left: Floats
    """What is left of the output."""
    spread: Floats
    """Of the input, about its mean."""
    about: Floats
    """Of the output, about its mean."""
    size: Floats
    """Of the output."""

    def refuted(self, noise: Noise, mean: float, about: float, n: int) -> bool:
        """Whether one is further off than rounding explains, whatever its slope.

        Args:
            noise: what is believed of rounding.
            mean: no mean that is subtracted is larger.
            about: no root mean square is.
            n: how many elements may share a mean.
        """
        left, spread, moved, size = self.left, self.spread, self.about, self.size
        alone = noise.bound(n, size, 0.0, 0.0, size)
        if not (left > alone).any():
            return False
        slope = 2 * (moved + alone) / spread
        allowed = noise.bound(n, size, slope, about, size + slope * mean)
        # Beside a spread so small any slope is possible.
        told = allowed < 0.5 * slope * spread
        for _ in range(3):
            if (told & (left > allowed)).any():
                return True
            # Nor is a slope steeper than the output and its rounding together.
            slope = np.where(told, np.minimum(slope, (moved + allowed) / spread), slope)
            allowed = noise.bound(n, size, slope, about, size + slope * mean)
        return bool((told & (left > allowed)).any())


def refuted_for_every_eps(
    noises: Sequence[Noise],
    d: Floats,
    y: Floats,
    valid: NDArray[np.bool_] | None,
    variance: Floats,
    n: NDArray[np.int64],
    about: Floats,
    known: Floats,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    r"""Whether no formula leaves as little as rounding, without a bias and with one.

    A row of elements shares one weight, which takes up constant factors. So a formula counts
    relative to one variance: its factors lie between 1, of an infinite eps, and the inverse ratio
    of variances, or its root. Of u, in the middle, they differ by at most e. What is left of y is
    then no smaller than what u leaves, less \|w\| \|e\|, where the weight is at most
    \|y\| / (\|u\| - \|e\|). Of each row elements of nearly one variance are held
    against this.

    Args:
        noises: what is believed of rounding.
        d: the values that are scaled, times the given weight: rows of elements of hypotheses.
        y: the output, of d's shape.
        valid: the elements that count, of d's shape. None: all.
        variance: what divides, or the mean square, of d's shape.
        n: how many elements share a mean, for each hypothesis.
        about: the size of the mean that is subtracted, for each hypothesis.
        known: the largest given weight, for each hypothesis.

    Returns:
        Two arrays by noise, by kind of formula (of a variance without its root, others), without a
        bias and with one, and by hypothesis. The second says whether no formula would fit if all
        variances were the same: then more elements, some of nearer variances, may refute them.
    """
    usable: NDArray[np.bool_] = variance > 0 if valid is None else valid & (variance > 0)
    found = np.zeros((2, len(noises), len(KINDS), 2, len(d)), bool)
    size = variance.shape[2]
    count = min(ALIKE, size)
    if count < FEW:
        return found[0], found[1]
    # The elements whose variances are nearest to the one in the middle.
    logarithm = np.log(np.where(usable, variance, 1.0))
    few = np.where(usable, logarithm, np.inf)[..., :: max(1, size // MIDDLE)]
    place = np.isfinite(few).sum(2, keepdims=True) // 2
    middle = np.take_along_axis(np.sort(few, axis=2), np.minimum(place, few.shape[2] - 1), 2)
    distance = np.where(usable & np.isfinite(middle), np.abs(logarithm - middle), np.inf)
    if count < size:
        take = np.argpartition(distance, count - 1, axis=2)[..., :count]
        d, y, variance = (np.take_along_axis(v, take, 2) for v in (d, y, variance))
        usable = np.take_along_axis(usable, take, 2)
    enough = np.asarray(usable.all(2))
    variance = np.where(enough[..., None], variance, 1.0)
    ends = variance.min(2, keepdims=True) * variance.max(2, keepdims=True)
    whole = np.sqrt(ends) / variance
    for kind, (power, sensitivity) in enumerate(KINDS):
        # What is off a wider range is off a narrower one.
        left = np.asarray(~found[0, :, 0].all((0, 1)) if kind else np.ones(len(d), bool))
        found[:, :, kind] = True
        if left.any():
            ratio = whole[left] if power == 1 else whole[left] ** power
            found[:, :, kind, :, left] = _none_of(
                noises, d[left], y[left], ratio, n[left], about[left], known[left], sensitivity,
                enough[left],
            ).transpose(3, 0, 1, 2)  # fmt: skip
    return found[0], found[1]


def _none_of(
    noises: Sequence[Noise],
    d: Floats,
    y: Floats,
    ratio: Floats,
    n: NDArray[np.int64],
    about: Floats,
    known: Floats,
    sensitivity: float,
    enough: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """The same for one kind of formula, whose factors lie between 1 and these ratios.

    Args:
        ratio: what u is multiplied by at the most or least, for each element.
        sensitivity: how much more than through a root an error of the variance moves the output.
        enough: the rows that have enough elements.

    Returns:
        The two arrays as one, without the axis of the kinds.
    """
    found = np.zeros((2, len(noises), 2, len(d)), bool)
    size, middle_y = np.sqrt(_dot(y, y) / y.shape[-1]), y.mean(2)
    u, e = d * (0.5 * (1 + ratio)), np.abs(d * (0.5 * (1 - ratio)))
    shifted, middle_u = e.mean(2), u.mean(2)
    steepest = (2 * ratio.max((1, 2)) * known)[:, None]
    for bias in (0, 1):
        own_y = y - middle_y[..., None] if bias else y
        own_u = u - middle_u[..., None] if bias else u
        least = np.sqrt(_dot(own_u, own_u)) - np.sqrt(_dot(e, e))
        told = enough & (least > 0)
        weight = np.sqrt(_dot(own_y, own_y)) / np.where(told, least, 1.0)
        shift = bias * (np.abs(middle_y) + weight * (np.abs(middle_u) + shifted))
        slope = weight * steepest
        for place, noise in enumerate(noises):
            more = noise.relative(n, sensitivity) / noise.relative(n)
            allowed = noise.bound(
                n[:, None, None], np.abs(y), slope[..., None], about[:, None, None],
                shift[..., None],
            )  # fmt: skip
            all_alike = noise.bound(n[:, None], size, slope, about[:, None], shift)
            allowed = np.maximum(allowed, LEAST_ALLOWED * all_alike[..., None])
            allowed = more[:, None, None] * allowed
            # Nothing is allowed of outputs that are all 0, and nothing is left of them.
            one = 1 / np.where(allowed > 0, allowed, 1.0)
            off = _off(y * one, u * one, e * one, one if bias else None)
            found[:, place, bias] = (told & off).any(2)
    return found


def _off(y: Floats, u: Floats, e: Floats, one: Floats | None) -> NDArray[np.bool_]:
    """Whether more is left of y than errors up to 1, whatever multiplies u, off by up to e, and
    whether more is if u is right.

    Args:
        y: the output over what rounding allows of it: rows of elements.
        u: what a weight multiplies, likewise.
        e: how far off that may be, likewise.
        one: what a bias multiplies. None: there is none.
    """
    most = math.sqrt(y.shape[-1])
    if one is not None:
        square = _dot(one, one)
        y = y - (_dot(one, y) / square)[..., None] * one
        u = u - (_dot(one, u) / square)[..., None] * one
    uu, moved = _dot(u, u), np.sqrt(_dot(e, e))
    least = np.sqrt(uu) - moved
    told = least > 0
    weight = (np.sqrt(_dot(y, y)) + most) / np.where(told, least, 1.0)
    rest = y - (_dot(u, y) / np.where(told, uu, 1.0))[..., None] * u
    left = np.sqrt(_dot(rest, rest))
    return np.stack([told & (left > weight * moved + most), left > most])


def none_between(ratios: Floats) -> bool:
    """Whether no eps between those tried leaves every weight as little as rounding.

    What is left is nearly a parabola in the logarithm of eps, so between two neighbours it is
    lower than both by an eighth of its second difference at most. All of it is believed, as the
    curvature itself changes.

    Args:
        ratios: what is left over what rounding allows, for each of three or more evenly spaced
            logarithms of eps, and each weight.
    """
    bend = np.abs(np.diff(ratios, 2, axis=0))
    bend = np.maximum(np.concatenate([bend[:1], bend]), np.concatenate([bend, bend[-1:]]))
    lower = np.minimum(ratios[:-1], ratios[1:]) - bend
    return bool((lower > 1.0).any(1).all())


def _dot(a: Floats, b: Floats) -> Floats:
    return np.asarray(np.einsum("...l,...l->...", a, b))
