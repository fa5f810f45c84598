"""One hypothesis with its constants and parameters, and how it is held against the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .evidence import Floats, Pair, Statistics, thinned
from .hypotheses import USUAL_EPS, Formula, Sharing, whole
from .least_squares import Line

__all__ = [
    "Affine",
    "AffineOf",
    "Fit",
    "Given",
    "Place",
    "assignments",
    "confirm",
    "for_running",
    "machine_eps",
    "places",
    "predicted",
    "running_statistics",
    "usual_eps",
]


FEW_ELEMENTS = 16
"""Where a weight has no more elements its own error counts at each of them."""


@dataclass(frozen=True, eq=False)
class Given:
    """The parameters and running statistics that came with the data."""

    weight: Floats | None = None
    bias: Floats | None = None
    running_mean: Floats | None = None
    running_var: Floats | None = None


@dataclass(frozen=True, eq=False)
class Affine:
    """Weight and bias of a fit, of the sharing's dimensions where they vary."""

    dimensions: tuple[int, ...] = ()
    weight: Floats | None = None
    """As the formula multiplies by it: with the offset added."""
    bias: Floats | None = None
    weight_from: str = "none"
    """``"none"``, ``"given"`` or ``"fitted"``."""
    bias_from: str = "none"
    offset: float = 0.0
    """1 where the weight that was given is stored around zero."""

    @property
    def fitted(self) -> int:
        """How many numbers were fitted."""
        return sum(
            values.size
            for values, source in ((self.weight, self.weight_from), (self.bias, self.bias_from))
            if values is not None and source == "fitted"
        )


@dataclass(frozen=True, eq=False)
class Fit:
    """A hypothesis with its constants, held against all of the data."""

    sharing: Sharing
    formula: Formula
    affine: Affine
    eps: float
    interval: tuple[float, float]
    eps_fitted: bool
    residual: float
    mean_residual: float
    tolerance: float
    worst: float
    """The largest difference over what rounding allows at its element."""
    misfit: float
    """The root mean square of the differences over that of what rounding allows."""
    fits: bool
    least: float = 0.0
    """The misfit with the eps that fits best, of all real numbers."""
    statistics: Statistics = field(kw_only=True)
    weight_along: Floats | None = None
    """The weight as it broadcasts against the tensor."""
    bias_along: Floats | None = None
    silent_groups: int = 0
    """How many groups are constant and say nothing."""

    @property
    def running(self) -> bool:
        """Whether the statistics were given, not taken of the batch."""
        return self.statistics.running

    @property
    def free_parameters(self) -> int:
        """How many numbers were fitted."""
        return (
            self.affine.fitted
            + self.eps_fitted
            + (self.formula.passes - 1)
            + (self.formula.correction not in (0, 1))
        )


AffineOf = Callable[[Sharing], "tuple[Affine, ...]"]


Assignment = tuple[AffineOf, "Floats | None", "Floats | None"]
"""Where the parameters stand, and weight and bias as they broadcast against the tensor."""


def assignments(pair: Pair, given: Given) -> list[Assignment]:
    """What the given weight and bias may belong to: axes, parts of an axis, an offset of 1."""
    found: list[Assignment] | None = pair.cache.get(given)
    if found is None:
        found = pair.cache[given] = list(_assignments(pair, given))
    return found


def _assignments(pair: Pair, given: Given) -> Iterator[Assignment]:
    known = given.weight if given.weight is not None else given.bias
    if known is None:
        yield (lambda sharing: (Affine(),)), None, None
        return
    for place in places(known, pair.shape):
        for offset in (0.0, 1.0) if given.weight is not None else (0.0,):
            weight = None if given.weight is None else given.weight + offset
            along = [None if p is None else place.along(p) for p in (weight, given.bias)]
            known_ = _KnownAffine(place, weight, given.bias, offset)
            yield known_, along[0], along[1]


@dataclass(frozen=True, eq=False)
class _KnownAffine:
    """Given parameters at one place."""

    place: Place
    weight: Floats | None
    bias: Floats | None
    offset: float

    def __call__(self, sharing: Sharing) -> tuple[Affine, ...]:
        dimensions = self.place.dimensions(sharing)
        if dimensions is None:
            return ()
        sources = ["none" if p is None else "given" for p in (self.weight, self.bias)]
        return (Affine(dimensions, self.weight, self.bias, sources[0], sources[1], self.offset),)


@dataclass(frozen=True)
class Place:
    """Where a parameter may stand: along whole axes and at most one part of one axis."""

    shape: tuple[int, ...]
    """The tensor's."""
    whole: tuple[int, ...]
    part: int | None = None
    """The axis of which the parameter has only a part."""
    inner: bool = False
    """Whether it is the inner part."""
    size: int = 1
    """Of that part."""

    def dimensions(self, sharing: Sharing) -> tuple[int, ...] | None:
        """The dimensions of a sharing's expanded shape, None where it has none such."""
        found = [i for axis in self.whole for i in sharing.dimensions(axis)]
        if self.part is not None:
            if sharing.split != self.part:
                return None
            dimension = sharing.dimensions(self.part)[self.inner]
            if sharing.expanded[dimension] != self.size:
                return None
            found.append(dimension)
        return tuple(sorted(found))

    def along(self, values: Floats) -> Floats:
        """The parameter as it broadcasts against the tensor."""
        axes = sorted((*self.whole, *(() if self.part is None else (self.part,))))
        sizes = [self.size if axis == self.part else self.shape[axis] for axis in axes]
        values = values.reshape(sizes)
        if self.part is not None:
            place, repeats = axes.index(self.part), self.shape[self.part] // self.size
            if self.inner:
                times = [repeats if axis == self.part else 1 for axis in axes]
                values = np.tile(values, times)
            else:
                values = np.repeat(values, repeats, axis=place)
        return values.reshape(tuple(n if i in axes else 1 for i, n in enumerate(self.shape)))


def places(known: Floats, shape: tuple[int, ...]) -> Iterator[Place]:
    """Every place where a parameter of this shape may stand, whole axes first."""
    own = known.shape
    full = len(own) == len(shape) and 1 in own and known.size > 1
    if full and all(n in (1, m) for n, m in zip(own, shape, strict=True)):
        yield Place(shape, tuple(i for i, n in enumerate(own) if n != 1))
        return
    sizes = tuple(n for n in own if n != 1)
    if not sizes:
        yield Place(shape, ())
        return
    axes = [i for i, n in enumerate(shape) if n != 1]
    for chosen in itertools.combinations(reversed(axes), len(sizes)):
        chosen = tuple(sorted(chosen))
        if all(shape[axis] == size for axis, size in zip(chosen, sizes, strict=True)):
            yield Place(shape, chosen)
    for chosen in itertools.combinations(axes, len(sizes)):
        odd = [k for k, axis in enumerate(chosen) if shape[axis] != sizes[k]]
        if len(odd) == 1 and shape[chosen[odd[0]]] % sizes[odd[0]] == 0:
            axis, size = chosen[odd[0]], sizes[odd[0]]
            rest = tuple(other for other in chosen if other != axis)
            for inner in (False, True):
                yield Place(shape, rest, axis, inner, size)


def usual_eps(formula: Formula, pair: Pair) -> Sequence[float]:
    """The values of eps in use with a formula, the commonest first."""
    if pair.unit != 1:
        return (0.0,)
    if formula.placement == "max":
        return (1e-12, *USUAL_EPS)
    if formula.scale == "std" and not formula.center:
        return (1e-3 if not formula.correction else 1e-6, *USUAL_EPS)
    if formula.placement == "std" and formula.correction:
        return (1e-6, *USUAL_EPS)
    if not formula.center and formula.scale == "auto":
        return (1e-6, 1e-5, machine_eps(pair), *USUAL_EPS)
    return USUAL_EPS


def machine_eps(pair: Pair) -> float:
    """What eps=None stands for: the machine epsilon of the compute type."""
    return float(np.finfo("float64" if pair.x_dtype == "float64" else "float32").eps)


def for_running(formula: Formula) -> bool:
    return (
        formula.scale in ("auto", "var", "sqrt_std")
        and not formula.correction
        and formula.passes == 1
    )


def running_statistics(pair: Pair, given: Given) -> Iterator[Statistics]:
    """The running statistics along every set of axes whose sizes they have."""
    if given.running_mean is None or given.running_var is None:
        return
    for place in places(given.running_mean, pair.shape):
        shared = [i for i in range(len(pair.shape)) if i not in place.whole]
        if place.part is not None or not shared:
            continue
        sharing = whole(pair.shape, shared)
        mean, var = place.along(given.running_mean), place.along(given.running_var)
        yield Statistics(sharing, mean, var, var + mean * mean, 2.0, running=True)


def confirm(
    pair: Pair,
    statistics: Statistics,
    formula: Formula,
    affine: Affine,
    weight: Floats | None,
    bias: Floats | None,
    eps: float,
    interval: tuple[float, float],
    eps_fitted: bool,
    *,
    line: Line | None = None,
    most: int | None = None,
) -> Fit:
    """Hold a hypothesis with all its constants against every element, or a sample of them.

    Args:
        pair: the data.
        statistics: of the hypothesis.
        formula: what multiplies the centred value.
        affine: where weight and bias stand.
        weight: as it broadcasts against the tensor.
        bias: as weight.
        eps: of the formula.
        interval: between which values eps lies.
        eps_fitted: whether eps is a fitted number.
        line: how weight and bias were fitted to this data, None where they were not. Where few
            elements share them, the rounding of a large output moves what is left of small ones.
        most: hold it against a sample of so many elements.
    """
    sharing = statistics.sharing
    every = range(len(sharing.expanded))
    cut = () if most is None else thinned(sharing.expanded, every, most=most)
    part = _parts(pair, sharing, cut)
    y = part(pair.y)
    output, allowed = _predicted(pair, statistics, formula, weight, bias, eps, part)
    difference = np.abs(y - output)
    allowed = np.broadcast_to(allowed, difference.shape)
    valid = None if pair.mask is None else part(pair.mask)
    reach = allowed
    if line is not None:
        few = valid is not None or float(line.count.max()) <= FEW_ELEMENTS
        # Of many elements what is allowed of careless arithmetic is enough for weights as well.
        own = allowed if pair.noise.is_careless and not few else line.reach(allowed, valid)
        reach = allowed + own
    if valid is not None:
        difference, allowed, reach = difference[valid], allowed[valid], reach[valid]
    with np.errstate(all="ignore"):
        ratio = np.where(difference == 0, 0.0, difference / reach)
    worst = float(ratio.max(initial=0.0))
    square = float(np.square(allowed).sum())
    misfit = math.sqrt(float(np.square(difference).sum()) / square) if square else math.inf
    return Fit(
        sharing,
        formula,
        affine,
        eps,
        interval,
        eps_fitted,
        residual=float(difference.max(initial=0.0)),
        mean_residual=float(difference.mean()) if difference.size else 0.0,
        tolerance=float(allowed.max(initial=0.0)),
        worst=worst,
        misfit=misfit,
        fits=worst <= 1.0,
        statistics=statistics,
        weight_along=weight,
        bias_along=bias,
        silent_groups=int((statistics.var == 0).sum()),
    )


def predicted(pair: Pair, fit: Fit) -> tuple[Floats, Floats]:
    """What a fit computes for every element, masked or not, and how far rounding may move it."""
    own = fit.statistics, fit.formula, fit.weight_along, fit.bias_along, fit.eps
    output, allowed = _predicted(pair, *own, _parts(pair, fit.sharing, ()))
    shape = pair.shape
    return output.reshape(shape), np.broadcast_to(allowed, output.shape).reshape(shape)


def _parts(pair: Pair, sharing: Sharing, cut: tuple[slice, ...]) -> Callable[[Any], Any]:
    """Of what varies along some axes the elements of a sample, in the sharing's dimensions."""

    def part(values: Any) -> Any:
        values = values.reshape(sharing.expanded) if values.shape == pair.shape else values
        return values[tuple(s if n > 1 else slice(None)
                            for s, n in zip(cut, values.shape, strict=False))]  # fmt: skip

    return part


def _predicted(
    pair: Pair,
    statistics: Statistics,
    formula: Formula,
    weight: Floats | None,
    bias: Floats | None,
    eps: float,
    part: Callable[[Any], Any],
) -> tuple[Floats, Any]:
    """The output and the bound of its error, of the part of the elements that ``part`` takes."""
    x = part(pair.x)
    factor = part(statistics.factor(formula, eps))
    mean = part(statistics.mean) if formula.center else 0.0
    slope: Any = np.abs(factor)
    output = (x - mean) * factor if formula.center else x * factor
    largest_bias: Any = 0.0
    if weight is not None:
        w = part(np.broadcast_to(weight, pair.shape))
        output = output * w
        slope = slope * np.abs(w)
    if bias is not None:
        b = part(np.broadcast_to(bias, pair.shape))
        output = output + b
        largest_bias = np.abs(b)
    n = 2 if statistics.running else statistics.sharing.group_size
    about = part(np.sqrt(statistics.meansquare)) if formula.center else 0.0
    allowed = pair.noise.bound(n, np.abs(output), slope, about, largest_bias)
    return output, allowed * formula.sensitivity
