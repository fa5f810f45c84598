"""What a normalization might be: which elements share, what divides, where eps stands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ...presets import PRESETS
from ...scheme import ArgumentError, Scheme
from ..explain import partition
from ..naming import on_axes

__all__ = [
    "CENTRED",
    "UNCENTRED",
    "USUAL_EPS",
    "Formula",
    "Sharing",
    "affine_choices",
    "distinct_sharings",
    "is_known",
    "named_like",
    "published",
    "roundest",
    "sharings",
    "subsets",
    "whole",
]

USUAL_EPS = (1e-5, 1e-6, 1e-12, 1e-3, 1e-8, 0.0, 1e-9, 1e-7, 1e-10, 1e-4)
"""Values of eps that are in use, the commonest first."""

MOST_SPLITS = 64
"""Of an axis with more divisors the smallest and largest are tried."""

Factor = tuple[int, bool]
"""The size of an axis or a part of one, and whether it is shared."""


@dataclass(frozen=True)
class Sharing:
    """Which elements of one shape share statistics: for each axis its factors, outer first."""

    axes: tuple[tuple[Factor, ...], ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(math.prod(size for size, _ in axis) for axis in self.axes)

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """The shape with every factor as a dimension."""
        return tuple(size for axis in self.axes for size, _ in axis)

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The dimensions of ``expanded`` that are shared."""
        flags = [shared for axis in self.axes for _, shared in axis]
        return tuple(i for i, shared in enumerate(flags) if shared)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The dimensions of ``expanded`` along which statistics differ."""
        return tuple(i for i in range(len(self.expanded)) if i not in self.reduced)

    @cached_property
    def group_size(self) -> int:
        """How many elements share one mean."""
        return math.prod(self.expanded[i] for i in self.reduced)

    @cached_property
    def split(self) -> int | None:
        """The axis that is seen as two, None without one."""
        return next((i for i, axis in enumerate(self.axes) if len(axis) > 1), None)

    @cached_property
    def own_dimensions(self) -> tuple[tuple[int, ...], ...]:
        """For each axis of the tensor the dimensions of ``expanded`` that belong to it."""
        found, start = [], 0
        for axis in self.axes:
            found.append(tuple(range(start, start + len(axis))))
            start += len(axis)
        return tuple(found)

    def dimensions(self, axis: int) -> tuple[int, ...]:
        """The dimensions of ``expanded`` that belong to an axis of the tensor."""
        return self.own_dimensions[axis]

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """For each dimension of ``expanded`` the axis of the tensor as a bit, 0 of one element."""
        return tuple(
            1 << i if self.shape[i] > 1 else 0 for i, axis in enumerate(self.axes) for _ in axis
        )

    def touched(self, dimensions: Iterable[int]) -> int:
        """The axes of the tensor that these dimensions belong to, as bits."""
        bits, found = self.bits, 0
        for i in dimensions:
            found |= bits[i]
        return found

    @cached_property
    def key(self) -> tuple[tuple[Factor, ...], ...]:
        """Two are the same sets of elements of this shape if and only if these are equal."""
        axes = []
        for axis in self.axes:
            factors: list[Factor] = []
            for size, shared in axis:
                if size == 1:
                    continue
                if factors and factors[-1][1] == shared:
                    factors[-1] = (factors[-1][0] * size, shared)
                else:
                    factors.append((size, shared))
            axes.append(tuple(factors))
        return tuple(axes)

    def scheme(self, affine: Sequence[int] = (), **constants: object) -> Scheme:
        """The scheme that says this, with a weight along these dimensions of ``expanded``."""
        affine = tuple(affine)
        like = Scheme("[d]").replace(**constants)
        axes = tuple(i for i in range(len(self.axes)) if set(self.dimensions(i)) & set(affine))
        if self.split is None:
            statistics = like.statistics
            reduced = [i for i, axis in enumerate(self.axes) if axis[0][1]]
            found = on_axes(len(self.axes), reduced, axes, like)
            return found.replace(statistics=statistics)
        text, names = self._split_text(axes)
        return like.replace(axes=text, affine=" ".join(names[i] for i in affine))

    def _split_text(self, affine: Sequence[int]) -> tuple[str, list[str]]:
        """The notation and the name of every dimension of ``expanded``, with one axis split."""
        ndim, axis = len(self.axes), self.split or 0
        others = {i: own[0][1] for i, own in enumerate(self.axes) if i != axis}
        (outer, outer_shared), (_, inner_shared) = self.axes[axis]
        first_kept = not others.get(0, False)
        alone = set(affine) <= {axis}
        if inner_shared and first_kept and alone and ndim >= 2:
            after = [others[i] for i in range(2, ndim)] if axis == 1 else [False]
            if axis == 1 and all(after):
                names = ["n", "g", "c"] + [""] * (ndim - 2)
                return f"n (g={outer} [c]) [...]", names
            if axis == ndim - 1 and ndim > 2 and all(others[i] for i in range(1, axis)):
                return f"n [...] (g={outer} [c])", ["n"] + [""] * (ndim - 2) + ["g", "c"]
        usual = {1: ("d",), 2: ("n", "d"), 3: ("b", "s", "d"), 4: ("n", "c", "h", "w")}
        own = usual.get(ndim, tuple(f"a{i}" for i in range(ndim)))
        part = "g" if own[axis] != "d" else "h"
        words, names = [], []
        for i, name in enumerate(own):
            if i != axis:
                words.append(f"[{name}]" if others[i] else name)
                names.append(name)
                continue
            left, right = f"{part}={outer}", name
            words.append(f"([{left}] {right})" if outer_shared else f"({left} [{right}])")
            names += [part, name]
        return " ".join(words), names


def sharings(shape: Sequence[int]) -> Iterator[Sharing]:
    """Every set of axes, then every set with one further axis shared in part.

    Those with axes of size 1 are among them: they name the same elements in other ways.

    >>> [str(sharing.scheme()) for sharing in sharings((2, 4))]
    ['... [d]', '[n] d', '... [s d]', 'n (g=2 [c]) [...]', 'n ([h=2] d)', '[n] (h=2 [d])', \
'[n] ([h=2] d)']
    """
    ndim = len(shape)
    for reduced in subsets(ndim):
        yield whole(shape, reduced)
    for axis, size in enumerate(shape):
        for others in ((), *subsets(ndim)):
            if axis in others:
                continue
            for outer in divisors(size):
                for inner_shared in (True, False):
                    base = whole(shape, others).axes
                    parts = ((outer, not inner_shared), (size // outer, inner_shared))
                    yield Sharing((*base[:axis], parts, *base[axis + 1 :]))


@lru_cache(maxsize=64)
def distinct_sharings(shape: tuple[int, ...]) -> tuple[Sharing, ...]:
    """Of those that are the same sets of elements of this shape the first; none of one element."""
    found: dict[Any, Sharing] = {}
    for sharing in sharings(shape):
        if sharing.group_size > 1:
            found.setdefault(sharing.key, sharing)
    return tuple(found.values())


def whole(shape: Sequence[int], reduced: Sequence[int]) -> Sharing:
    """The elements that differ only along these whole axes share."""
    return Sharing(tuple(((size, i in reduced),) for i, size in enumerate(shape)))


def subsets(ndim: int) -> list[tuple[int, ...]]:
    """Every non-empty set of axes, those nearest to the end first, small before large."""
    return [
        tuple(sorted(axes))
        for count in range(1, ndim + 1)
        for axes in itertools.combinations(range(ndim - 1, -1, -1), count)
    ]


@lru_cache(maxsize=256)
def divisors(size: int) -> tuple[int, ...]:
    """The divisors other than 1 and the number itself."""
    small = [i for i in range(2, math.isqrt(size) + 1) if size % i == 0]
    found = sorted({*small, *(size // i for i in small)})
    return tuple(found if len(found) <= MOST_SPLITS else found[: MOST_SPLITS // 2]
                 + found[-MOST_SPLITS // 2 :])  # fmt: skip


@lru_cache(maxsize=4096)
def affine_choices(sharing: Sharing) -> list[tuple[int, ...]]:
    """The dimensions of ``expanded`` along which a weight may vary, the likeliest first.

    Any set of whole axes; where an axis is split also its parts alone.
    """
    ndim = len(sharing.axes)

    def of(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for axis in axes for i in sharing.dimensions(axis))

    found = [of(axes) for axes in subsets(ndim)]
    if sharing.split is not None:
        outer, inner = sharing.dimensions(sharing.split)
        rest = [axes for axes in ((), *subsets(ndim)) if sharing.split not in axes]
        found += [tuple(sorted((*of(axes), part))) for part in (outer, inner) for axes in rest]
    # A weight along axes of one element is one along none.
    return [axes for axes in found if math.prod(sharing.expanded[i] for i in axes) > 1]


# --------------------------------------------------------------------------------------------
# Formulas


@dataclass(frozen=True)
class Formula:
    """What multiplies the centred value, as a function of the statistics and eps."""

    center: bool
    scale: str
    correction: float
    placement: str
    passes: int = 1
    """2: the norm is applied to its own output."""

    @property
    def plain(self) -> bool:
        """What LayerNorm and RMSNorm compute."""
        return self == Formula(self.center, "auto", 0, "variance")

    @property
    def exponents(self) -> tuple[float, float]:
        """(h, a) such that the factor is (V^h + eps)^a, or max(V^h, eps)^a."""
        inside = self.placement == "variance"
        if self.scale == "var":
            return 1, -1
        if self.scale == "sqrt_std":
            return (0.5, -0.5) if inside else (0.25, -1)
        return (1, -0.5) if inside else (0.5, -1)

    @property
    def sensitivity(self) -> float:
        """How much more an error of the variance moves the output than through a root."""
        return 2.0 if self.scale == "var" else 1.0

    @property
    def constants(self) -> dict[str, object]:
        """As fields of a scheme."""
        return {
            "center": self.center,
            "scale": self.scale,
            "correction": self.correction,
            "eps_placement": self.placement,
        }

    def without_constant_factor(self) -> Formula:
        """The formula that differs by a factor that a fitted weight takes up."""
        return replace(self, correction=0, scale="auto" if self.scale == "l2" else self.scale)


def _formulas(center: bool) -> Iterator[Formula]:
    yield Formula(center, "auto", 0, "variance")
    if center:
        yield Formula(center, "auto", 1, "variance")
        yield Formula(center, "auto", 0, "std")
        yield Formula(center, "auto", 1, "std")
    else:
        yield Formula(center, "auto", 0, "std")
        yield Formula(center, "std", 0, "variance")
        yield Formula(center, "std", 1, "variance")
        yield Formula(center, "std", 0, "std")
        yield Formula(center, "std", 1, "std")
    yield Formula(center, "l2", 0, "max")
    yield Formula(center, "l2", 0, "variance")
    yield Formula(center, "l2", 0, "std")
    yield Formula(center, "auto", 0, "max")
    if center:
        yield Formula(center, "auto", 1, "max")
    for correction in (1, 0):
        yield Formula(center, "sqrt_std", correction, "variance")
        yield Formula(center, "sqrt_std", correction, "std")
    for correction in (0, 1):
        yield Formula(center, "var", correction, "variance")
    if not center:
        yield Formula(center, "auto", 1, "variance")
    yield Formula(center, "auto", 0, "variance", passes=2)


CENTRED = tuple(_formulas(True))
"""The formulas that subtract the mean, the likeliest first."""
UNCENTRED = tuple(_formulas(False))
"""The formulas that do not."""


def roundest(low: float, high: float) -> float:
    """The number of the fewest digits between two positive ones, the nearest to their middle.

    >>> roundest(0.00031, 0.00044), roundest(1.2345e-5, 1.2348e-5)
    (0.0004, 1.2346e-05)
    """
    middle = (low + high) / 2
    for digits in range(17):
        value = float(f"{middle:.{digits}e}")
        if low <= value <= high:
            return value
    return middle


# --------------------------------------------------------------------------------------------
# Names


def published(
    scheme: Scheme,
    shape: Sequence[int],
    *,
    without_affine: bool = False,
    any_rounding: bool = False,
) -> list[str]:
    """The presets that compute this at this shape: elements that share, constants, affine.

    Args:
        scheme: what is computed.
        shape: the input's.
        without_affine: presets with weights count too.
        any_rounding: presets that round elsewhere count too, as in types where that is the same.

    >>> published(Scheme.layer_norm(eps=1e-12), (2, 3, 4))
    ['bert.layer_norm']
    """
    shape = tuple(shape)
    sizes = scheme.layout(len(shape)).sizes(shape)
    statistics = partition(sizes, sizes.layout.kept)
    affine = partition(sizes, sizes.layout.affine)
    outer = [size for axis in sizes.layout.axes if len(axis) > 1 and (size := axis[0].size)]
    fields = ["center", "scale", "correction", "eps", "eps_placement", "weight_offset",
              "statistics"]  # fmt: skip
    if not any_rounding:
        fields.append("rounding")
    found = []
    for name, preset in PRESETS.items():
        if any(getattr(scheme, field) != getattr(preset, field) for field in fields):
            continue
        names = [part.name for axis in preset.parsed for part in axis]
        if "g" in names and outer:
            preset = Scheme(str(preset).replace("g=32", "g")).with_sizes({"g": outer[0]})
        try:
            other = preset.layout(len(shape)).sizes(shape)
        except ArgumentError:
            continue
        same = partition(other, other.layout.kept) == statistics
        if same and (without_affine or partition(other, other.layout.affine) == affine):
            found.append(name)
    return found


def named_like(sharing: Sharing, others: Sequence[Sharing]) -> list[Sharing]:
    """Those of the sharings that are the same sets at this shape, and norms with a name."""
    known = []
    for other in others:
        if other.key == sharing.key and other != sharing and is_known(other):
            known.append(other)
    return known


def is_known(sharing: Sharing) -> bool:
    """Whether a norm with a name shares along these axes."""
    ndim = len(sharing.axes)
    reduced = {i for i, axis in enumerate(sharing.axes) if any(shared for _, shared in axis)}
    if sharing.split is not None:
        axis = sharing.axes[sharing.split]
        rest = reduced - {sharing.split}
        if axis[0][1]:
            return False
        first = sharing.split == 1 and rest == set(range(2, ndim))
        last = sharing.split == ndim - 1 and rest in (set(range(1, ndim - 1)), set())
        return ndim >= 2 and (first or last)
    trailing = reduced == set(range(ndim - len(reduced), ndim))
    if ndim < 2 or trailing:
        return True
    space = set(range(2, ndim))
    batch = reduced in ({0, *space}, set(range(ndim - 1)))
    instance = ndim >= 3 and reduced == set(range(1, ndim - 1))
    return batch or instance or (ndim == 4 and reduced == {1})
