"""What an input and an output show, whatever was computed: rounding, moments, factors.

The output of every normalization is, within a group, one factor times the input minus an offset.
So the offset is tested and the factor is measured for a set of axes before any formula is thought
of, and a formula with its eps is read off the factors of groups of different variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hypotheses import Formula, Sharing

__all__ = [
    "INSPECTED",
    "UNITS",
    "Factors",
    "Noise",
    "Pair",
    "Screened",
    "Statistics",
    "Sums",
    "eps_interval",
    "measure",
    "pair_of",
    "printed_decimals",
    "rough_statistics",
    "screen",
    "spread",
    "thinned",
]

Floats = NDArray[np.float64]

UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
"""Half the distance between 1 and the next number: the largest relative error of a rounding."""

SMALLEST = {"float16": 2.0**-25, "bfloat16": 0.0, "float32": 2.0**-150, "float64": 0.0}
"""Half the distance between the smallest numbers."""

THINNED = 1 << 16
"""So many numbers of sums are kept before an axis is split into all its parts."""

SAMPLED = 1 << 16
"""So many elements are enough to see that something does not fit."""

FEW_GROUPS = 4096

REFUTED = 1.25
"""No factor explains what is so much further off than rounding allows: the bound itself follows
from a factor that is slightly off."""

LARGEST, SMALL_OUTPUT = 2.0**200, 2.0**-100
"""Inputs beyond these, or below their inverse, are searched in another unit: the products of
squares that a search takes would leave the range of double."""

SLOPPY = 8.0
"""So much further off is an output that was computed without care for rounding."""

INSPECTED = 1 << 15
"""So many values tell the type that all of them fit in."""


# --------------------------------------------------------------------------------------------
# The data


CLEARLY_WORSE = 3.0
"""What leaves so many times more over than another one does is clearly worse."""

CHANCE, CHANCE_COARSE = 0.05, 0.35
"""Of what rounding allows, so much is left over by chance; more of an output of few values."""


@dataclass(frozen=True, eq=False)
class Noise:
    """How far an output may be off by rounding alone: relative to its parts."""

    unit: float
    """Half a unit in the last place of the output's type."""
    compute: float
    """The same of the type of the computation."""
    quantum: float = 0.0
    """Half a unit of the last decimal, where the output was printed, or half a step."""
    input_quantum: float = 0.0
    """The same of the input."""
    smallest: float = 0.0
    twice_rounded: bool = False
    """Half types: the normalized value may be rounded before weight and bias."""
    slack: float = 1.0
    offset: float = 0.0
    """How many roundings of the mean square reach the variance, where it is computed as the mean
    square minus the squared mean: the factor loses digits with the square of mean / deviation."""

    def careless(self) -> list[Noise]:
        """The same, with arithmetic that loses digits or in a narrower type, the worst last."""
        single = UNITS["float32"]
        if self.twice_rounded:
            return [replace(self, unit=4 * self.unit, compute=self.unit / 4, twice_rounded=False)]
        own = replace(self, slack=SLOPPY, offset=SLOPPY)
        narrow = replace(own, unit=single, compute=single)
        return [own, narrow] if self.compute < single else [own]

    @property
    def chance(self) -> float:
        """The share of what rounding allows below which less left over shows nothing."""
        # Where rounding the output is most of the error, it takes few values: these may lie near
        # one formula by chance.
        return CHANCE_COARSE if self.unit > self.compute or self.quantum else CHANCE

    @property
    def is_careless(self) -> bool:
        """Whether arithmetic is believed to lose digits, or to be in a half type."""
        return self.slack > 1 or self.compute > UNITS["float32"]

    @cached_property
    def worst(self) -> Noise:
        """The most that is believed of rounding before an output is said to be something else."""
        return self if self.is_careless else self.careless()[-1]

    @cached_property
    def summed(self) -> Noise:
        """The same, but the worst for a computation in double: sums are not exact enough then."""
        return self if self.compute >= UNITS["float32"] else self.worst

    def relative(self, group_size: Any, sensitivity: float = 1.0) -> Any:
        """What is allowed for one unit of output: sums of n add log2(n) / 2 roundings to r.

        Args:
            group_size: how many elements share a mean.
            sensitivity: how much more than through a root an error of the variance moves it.
        """
        inner = self.compute * (8.0 + 0.5 * np.log2(np.maximum(group_size, 2)))
        outer = self.unit * (2.0 if self.twice_rounded else 1.0)
        return self.slack * (outer + sensitivity * inner)

    def bound(
        self, group_size: Any, output: Any, slope: Any, mean: Any = 0.0, bias: Any = 0.0
    ) -> Any:
        """The largest error of an output.

        Args:
            group_size: how many elements share a mean.
            output: its magnitude.
            slope: what the input is multiplied by, its magnitude.
            mean: the size of what is summed to the mean, where one is subtracted: the mean is
                off by some of its roundings.
            bias: what is added, its magnitude.
        """
        relative = self.relative(group_size)
        if self.offset:
            relative = relative + self.offset * self.compute * (mean * slope) ** 2
        rest = 4.0 * self.compute * mean * slope + 2.0 * self.input_quantum * slope
        return relative * (output + bias) + self.slack * (rest + self.quantum + self.smallest)


@dataclass(frozen=True, eq=False)
class Pair:
    """An input and an output in float64, with what is known of their rounding."""

    x: Floats
    y: Floats
    x_dtype: str
    y_dtype: str
    noise: Noise
    mask: NDArray[np.bool_] | None = None
    """The elements of the output that count."""
    masked_statistics: bool = False
    """Whether the mask holds for the statistics too."""
    unit: float = 1.0
    """The power of two that the input was multiplied by. Where it is not 1 every eps in use is
    too small, or too large, to be told from 0."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """What was found before; what depends on the noise has it in its key."""
    sums: dict[Any, Any] = field(default_factory=dict)
    """What was summed of the input, and of the mask where it holds for the statistics."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both."""
        return self.x.shape

    def statistics(self, sharing: Sharing) -> Statistics:
        """The moments of the input over the elements that share."""
        found: Statistics | None = self.sums.get(sharing.key)
        if found is None or found.sharing != sharing:
            found = _statistics(self, sharing)
            self.sums[sharing.key] = found
        return found

    def rough_sums(self) -> tuple[float, Sums]:
        """A number near the input's mean, and sums of the input less that and of its square."""
        found: tuple[float, Sums] | None = self.sums.get("rough")
        if found is None:
            shift = float(self.x.mean())
            x = self.x - shift
            planes = [x, x * x]
            if self.mask is not None and self.masked_statistics:
                planes = [plane * self.mask for plane in planes]
                planes.append(self.mask.astype(np.float64))
            found = self.sums["rough"] = shift, Sums(np.stack(planes))
        return found

    def with_noise(self, noise: Noise) -> Pair:
        """The same data, believed to be rounded in another way."""
        return replace(self, noise=noise)

    def with_mask(self, mask: NDArray[np.bool_], *, statistics: bool) -> Pair:
        """The same data, of which fewer count, in the statistics neither where said."""
        mask = mask if self.mask is None else mask & self.mask
        sums = {} if statistics else self.sums
        return replace(self, mask=mask, masked_statistics=statistics, cache={}, sums=sums)

    def with_output(self, y: Floats, noise: Noise) -> Pair:
        """Another output of the same input."""
        return replace(self, y=y, noise=noise, cache={})

    def with_input(self, x: Floats) -> Pair:
        """The same output, made of another input."""
        return replace(self, x=x, cache={}, sums={})


def pair_of(x: Any, y: Any) -> Pair:
    """The arrays in float64, with the rounding that their types and values show."""
    x_dtype, y_dtype = (str(a.dtype).removeprefix("torch.") for a in (x, y))
    wide_x, wide_y = double(x), double(y)
    own = _narrowest_type(wide_y, y_dtype)
    narrow = UNITS[own]
    compute = max(UNITS[x_dtype], narrow) if x_dtype == "float64" else UNITS["float32"]
    compute = min(max(compute, UNITS["float64"]), UNITS["float32"])
    unit = max(narrow, compute)
    noise = Noise(unit, compute, smallest=SMALLEST[own], twice_rounded=narrow > UNITS["float32"])
    scale = _unit_of(wide_x, wide_y)
    return Pair(wide_x * scale, wide_y, x_dtype, own, noise, unit=scale)


def _unit_of(x: Floats, y: Floats) -> float:
    """The power of two that brings a very large or small input near 1; 1 for all others."""
    largest = float(np.abs(x).max())
    small = largest < 1 / LARGEST and float(np.abs(y).max()) > SMALL_OUTPUT
    if largest <= LARGEST and not small:
        return 1.0
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, min(-exponent, 1000))


def double(values: Any) -> Floats:
    """The array as float64, from NumPy or torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.ascontiguousarray(values, dtype=np.float64)


def _narrowest_type(values: Floats, dtype: str) -> str:
    """The narrowest type that holds all values, where they are enough not to do so by chance."""
    some = values.ravel()[:: max(1, values.size // INSPECTED)]
    order = ["float64", "float32", "float16", "bfloat16"]
    found = dtype
    if np.unique(some).size < 32:
        return found
    for name in order[order.index(dtype) + 1 :]:
        if name == "bfloat16":
            bits = some.astype(np.float32).view(np.uint32)
            fits = bool(((bits & 0xFFFF) == 0).all()) and found != "float16"
            fits = fits and bool((some.astype(np.float32) == some).all())
        else:
            with np.errstate(over="ignore"):
                fits = bool((some.astype(name).astype(np.float64) == some).all())
        if fits:
            found = name
    return found


def printed_decimals(values: Floats, dtype: str) -> int | None:
    """With how many decimals the values were printed, None where they are not decimals.

    >>> printed_decimals(np.array([0.1234, -1.5]), "float64")
    4
    >>> printed_decimals(np.array([1.5, -0.5]), "float64") is None
    True
    """
    if dtype not in ("float32", "float64"):
        return None
    some = values.ravel()[:: max(1, values.size // INSPECTED)]
    largest = float(np.abs(some).max(initial=0.0))
    # Dyadic numbers of few digits are exact, not rounded.
    if bool((np.ldexp(some, 10) == np.round(np.ldexp(some, 10))).all()):
        return None
    for digits in range(3, 10):
        if 10.0**-digits < 8 * UNITS[dtype] * largest:
            return None
        rounded = np.round(some, digits).astype(dtype).astype(np.float64)
        if bool((rounded == some).all()):
            return digits
    return None


# --------------------------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True, eq=False)
class Statistics:
    """The moments of every group, of the expanded shape with 1 where it is shared."""

    sharing: Sharing
    mean: Floats
    var: Floats
    """Of divisor n."""
    meansquare: Floats
    count: Floats | float
    """How many elements each group has."""
    running: bool = False

    @cached_property
    def largest(self) -> tuple[float, float]:
        """The largest magnitude of a mean, and the largest root mean square."""
        return float(np.abs(self.mean).max()), math.sqrt(float(self.meansquare.max()))

    def base(self, formula: Formula) -> Floats:
        """V^h: what eps is added to."""
        h, _ = formula.exponents
        centred = formula.center or formula.scale == "std" or self.running
        value = self.var if centred else self.meansquare
        if formula.scale == "l2":
            value = value * self.count
        elif formula.correction and not self.running:
            free = self.count - formula.correction
            value = value * self.count / np.where(np.asarray(free) > 0, free, np.nan)
        if h == 1:
            return value
        return np.sqrt(value) if h == 0.5 else np.asarray(value**h)

    def factor(self, formula: Formula, eps: float | Floats) -> Floats:
        """What the centred value is multiplied by, zero where that is infinite."""
        _, a = formula.exponents
        base = self.base(formula)
        if formula.placement == "max":
            inner = np.maximum(base, eps)
        elif formula.passes == 2:
            inner = base + eps * (base + eps)
        else:
            inner = base + eps
        with np.errstate(all="ignore"):
            factor = 1.0 / np.sqrt(inner) if a == -0.5 else inner**a
        return np.where(inner > 0, factor, 0.0)

    def cut(self, index: tuple[slice, ...]) -> Statistics:
        """Those of some groups."""

        def part(values: Floats) -> Floats:
            pairs = zip(index, values.shape, strict=True)
            return values[tuple(own if size > 1 else slice(None) for own, size in pairs)]

        count = self.count if isinstance(self.count, float) else part(self.count)
        mean, var, meansquare = part(self.mean), part(self.var), part(self.meansquare)
        return Statistics(self.sharing, mean, var, meansquare, count, running=self.running)

    def value(self, x: Floats, center: bool) -> Floats:
        """x of the expanded shape, centred or not."""
        return x - self.mean if center else x


def _statistics(pair: Pair, sharing: Sharing) -> Statistics:
    x = pair.x.reshape(sharing.expanded)
    if pair.mask is None or not pair.masked_statistics:
        n: Floats | float = float(sharing.group_size)
        first = x[tuple(slice(0, 1) if i in sharing.reduced else slice(None)
                        for i in range(x.ndim))]  # fmt: skip
        shifted = x - first
        about = shifted.mean(sharing.reduced, keepdims=True)
        shifted -= about
        rest = shifted.mean(sharing.reduced, keepdims=True)
        shifted -= rest
        mean = first + about + rest
        var = np.square(shifted, out=shifted).mean(sharing.reduced, keepdims=True)
    else:
        valid = pair.mask.reshape(sharing.expanded)
        count = valid.sum(sharing.reduced, keepdims=True).astype(np.float64)
        n = np.maximum(count, 1.0)
        x = np.where(valid, x, 0.0)
        mean = x.sum(sharing.reduced, keepdims=True) / n
        shifted = np.where(valid, x - mean, 0.0)
        mean = mean + shifted.sum(sharing.reduced, keepdims=True) / n
        shifted = np.where(valid, x - mean, 0.0)
        var = np.square(shifted).sum(sharing.reduced, keepdims=True) / n
    return Statistics(sharing, mean, var, var + mean * mean, n)


# --------------------------------------------------------------------------------------------
# Screening: which sets of axes and which offset explain the output, whatever the factors


@dataclass(frozen=True)
class Screened:
    """A set of axes held against the data with a factor of its own for every group."""

    sharing: Sharing
    center: bool
    misfit: float
    """What is left of the output's sum of squares: 0 is a perfect fit."""
    allowed: float


def screen(
    pair: Pair, candidates: Iterable[Sharing], weight: Floats | None, bias: Floats | None
) -> list[Screened]:
    """The misfit of every set of axes, from moments that are summed one axis after the other.

    Args:
        weight: of the tensor's number of axes, broadcastable against it; None: one.
        bias: as weight; None: zero.
    """
    key = "moments", id(weight), id(bias)
    moments: _Moments | None = pair.cache.get(key)
    if moments is None:
        moments = pair.cache[key] = _Moments(pair, weight, bias)
    found = []
    for sharing in candidates:
        found += moments.screened(sharing, pair.noise)
    return found


class Sums:
    """Sums of a stack of arrays over any set of axes, each from sums that were made before."""

    def __init__(self, table: Floats) -> None:
        self.whole: dict[tuple[int, ...], Floats] = {(): table}
        self.split: dict[Any, dict[int, Floats]] = {}

    def over(self, axes: tuple[int, ...]) -> Floats:
        """The sums over whole axes, kept as axes of size 1."""
        if axes not in self.whole:
            base = self.over(axes[1:] if len(axes) > 1 else ())
            self.whole[axes] = base.sum(axes[0] + 1, keepdims=True)
        return self.whole[axes]

    def of(self, sharing: Sharing, *, thin: bool = False) -> Floats:
        """The sums over the elements that share.

        Args:
            thin: for a split axis leave out groups, not elements of groups, to save time.
        """
        axes = tuple(i for i, own in enumerate(sharing.axes) if len(own) == 1 and own[0][1])
        if sharing.split is None:
            return self.over(axes)
        axis = sharing.split
        (outer, outer_shared), (inner, _) = sharing.axes[axis]
        shared = outer if outer_shared else inner
        made = self.split.setdefault((axes, axis, outer_shared, thin), {})
        done = max((size for size in made if shared % size == 0), default=0)
        if not done:
            done = 1
            made[1] = self._thinned(axes, axis) if thin else self.over(axes)
        base, left = made[done], shared // done
        before, after = base.shape[: axis + 1], base.shape[axis + 2 :]
        rest = base.shape[axis + 1] // left
        if left == 1:
            return base
        if outer_shared:
            table = base.reshape(*before, left, rest, *after).sum(axis + 1)
        else:
            table = base.reshape(*before, rest, left, *after).sum(axis + 2)
        made[shared] = table
        return table

    def _thinned(self, axes: tuple[int, ...], axis: int) -> Floats:
        """Whole groups, evenly spaced, so that the sums over parts of an axis take little time."""
        table = self.over(axes)
        for other in range(table.ndim - 1):
            size = table.shape[other + 1]
            if other == axis or other in axes or table.size <= THINNED or size < 2:
                continue
            keep = max(2, size * THINNED // table.size)
            index = np.linspace(0, size - 1, min(keep, size)).round().astype(np.int64)
            table = table.take(index, axis=other + 1)
        return table


class _Moments:
    """The moments of input and output that a misfit follows from."""

    def __init__(self, pair: Pair, weight: Floats | None, bias: Floats | None) -> None:
        self.parameters = weight, bias
        self.count = pair.y.size
        self.shift = float(pair.x.mean())
        x = pair.x - self.shift
        y = pair.y if bias is None else pair.y - bias
        self.biased = bias is not None
        self.size = float(np.abs(pair.y).max())
        if bias is not None:
            self.size += float(np.abs(bias).max())
        self.deviation = float(pair.x.std())
        planes = [x, x * x, x * y, y, y * y]
        self.weighted = weight is not None or pair.mask is not None
        if self.weighted:
            w: Any = 1.0 if weight is None else np.broadcast_to(weight, x.shape)
            if pair.mask is not None:
                w = w * pair.mask
                planes[4] = planes[4] * pair.mask
            ww = w * w
            planes = [x, ww * planes[1], w * planes[2], w * y, planes[4], ww * x, ww]
        if pair.mask is not None and pair.masked_statistics:
            planes[0] = x * pair.mask
            planes.append(pair.mask.astype(np.float64))
        self.total = float(planes[4].sum())
        self.sums = Sums(np.stack(planes))

    def screened(self, sharing: Sharing, noise: Noise) -> list[Screened]:
        """With and without the mean subtracted."""
        k = self.shift
        table = self.sums.of(sharing, thin=True)
        n: Any = float(sharing.group_size)
        if len(table) == 8:
            n = np.maximum(table[7], 1.0)
        x, xx, xy, y, yy = table[:5]
        total = float(yy.sum())
        wwx, ww = (table[5], table[6]) if self.weighted else (x, n)
        mean = x / n
        found = []
        for center in (True, False):
            if center:
                if sharing.group_size == 1:
                    continue
                dd = xx - 2 * mean * wwx + mean * mean * ww
                dy = xy - mean * y
                size = xx + mean * mean * ww
            else:
                dd = xx + 2 * k * wwx + k * k * ww
                dy = xy + k * y
                size = dd
            informative = dd > 1e-13 * size
            ratio = np.divide(dy, dd, out=np.zeros_like(dy), where=informative)
            left = float((yy - ratio * dy).sum())
            misfit = max(left, 0.0) / total if total else 0.0
            digits = np.divide(size, dd, out=np.ones_like(dd), where=informative)
            # What cancels in a group's sums of squares is lost of its output.
            lost = 64 * 2.0**-52 * float((digits * yy).sum()) / total if total else 0.0
            found.append(Screened(sharing, center, misfit, self._allowed(sharing, noise) + lost))
        return found

    def _allowed(self, sharing: Sharing, noise: Noise) -> float:
        spread = self.deviation
        y_size = math.sqrt(self.total / max(self.count, 1))
        absolute = noise.slack * (noise.quantum + noise.smallest) / y_size if y_size else 0.0
        offset = noise.compute * 4 * abs(self.shift) / spread if spread else 0.0
        inputs = noise.input_quantum * 2 / spread if spread else 0.0
        # A bias that was added brought its own rounding.
        added = self.size / y_size if self.biased and y_size else 1.0
        worst = noise.relative(sharing.group_size) * added + absolute + offset + inputs
        return float((3 * worst) ** 2)


def rough_statistics(pair: Pair, candidates: Iterable[Sharing]) -> Iterator[Statistics]:
    """Statistics from sums, right to about twelve digits unless an offset is large."""
    shift, sums = pair.rough_sums()
    inside = len(sums.whole[()]) == 3
    for sharing in candidates:
        shape = tuple(
            1 if i in sharing.reduced else size for i, size in enumerate(sharing.expanded)
        )
        table = sums.of(sharing)
        table = table.reshape(len(table), *shape)
        n: Any = np.maximum(table[2], 1.0) if inside else float(sharing.group_size)
        first, second = table[0] / n, table[1] / n
        var = np.maximum(second - first * first, 0.0)
        mean = first + shift
        yield Statistics(sharing, mean, var, var + mean * mean, n)


# --------------------------------------------------------------------------------------------
# Factors: what each group was multiplied by


@dataclass(frozen=True, eq=False)
class Factors:
    """What the centred value of every group was multiplied by, and how far that may be off."""

    statistics: Statistics
    center: bool
    factor: Floats
    uncertainty: Floats
    """The true factor lies no further off, if this is the set of axes and the noise is right."""
    informative: NDArray[np.bool_]
    """The groups that are not constant."""
    weight: Floats
    """How much of the output's square an error of the factor moves, over what rounding allows."""
    misfit: float
    """The root mean square of what is left, over what rounding allows."""
    worst: float
    """The largest of what is left over what rounding and the factor's uncertainty allow."""

    def refutes(self, formula: Formula) -> bool:
        """Whether some element is too far off, whatever factor the formula gives its group."""
        return self.worst > REFUTED * formula.sensitivity

    def misfit_of(self, formula: Formula, eps: float) -> float:
        """The same with the factor that the formula gives."""
        (misfit,) = self.misfits_of(formula, [eps])
        return misfit

    def misfits_of(self, formula: Formula, several: Sequence[float]) -> list[float]:
        """The same for several values of eps at once."""
        eps = np.asarray(several, float).reshape(-1, *[1] * self.factor.ndim)
        error = self.factor - self.statistics.factor(formula, eps)
        error = np.where(self.informative, error, 0.0)
        moved = (self.weight * error * error).reshape(len(several), -1).sum(1)
        return [math.sqrt(self.misfit**2 + own) for own in moved.tolist()]

    def nearest_eps(self, formula: Formula, interval: tuple[float, float]) -> float:
        """The eps in the interval with the least misfit."""
        low, high = interval
        if not math.isfinite(high):
            return low
        for _ in range(5):  # each leaves a quarter: about a thousandth in all
            several = np.linspace(low, high, 9).tolist()
            misfits = self.misfits_of(formula, several)
            place = misfits.index(min(misfits))
            low, high = several[max(place - 1, 0)], several[min(place + 1, 8)]
        return (low + high) / 2


def measure(
    pair: Pair,
    statistics: Statistics,
    center: bool,
    weight: Floats | None,
    bias: Floats | None,
    *,
    most: int | None = None,
) -> Factors:
    """The factor of every group, or of a sample of groups and elements, by least squares.

    At the true factor what is left of the output is rounding alone. Its sum of squares is larger
    by dd (r - r_true)^2 than the least one, which bounds the distance.
    """
    sharing = statistics.sharing
    y = pair.y if bias is None else pair.y - bias
    x, y = pair.x.reshape(sharing.expanded), y.reshape(sharing.expanded)
    parameters = [
        None if p is None else np.broadcast_to(p, pair.shape).reshape(sharing.expanded)
        for p in (weight, bias, pair.mask)
    ]
    if most is not None:
        cut = thinned(sharing.expanded, sharing.kept, sharing.reduced, most=most)
        x, y = x[cut], y[cut]
        parameters = [None if p is None else p[cut] for p in parameters]
        statistics = statistics.cut(cut)
    w_, bias_, valid = parameters
    d = statistics.value(x, center)
    w: Any = 1.0
    if w_ is not None:
        w = w_
        d = d * w
    if valid is not None:
        d, y = np.where(valid, d, 0.0), np.where(valid, y, 0.0)
    axes = sharing.reduced if not statistics.running else _kept_of(statistics)
    dd = (d * d).sum(axes, keepdims=True)
    dy = (d * y).sum(axes, keepdims=True)
    largest = float(dd.max(initial=0.0))
    informative = dd > 1e-26 * largest
    factor = np.divide(dy, dd, out=np.zeros_like(dy), where=informative)
    left = y - factor * d
    size = np.abs(factor * w)
    magnitude = 0.0 if bias_ is None else np.abs(bias_)
    mean = np.sqrt(statistics.meansquare) if center else 0.0
    tau = pair.noise.bound(_n(statistics), np.abs(y), size, mean, magnitude)
    tau = np.broadcast_to(tau, y.shape)
    allowed = (tau * tau).sum(axes, keepdims=True)
    remaining = (left * left).sum(axes, keepdims=True)
    with np.errstate(all="ignore"):
        uncertainty = np.sqrt(np.maximum(allowed - remaining, 0.25 * allowed) / dd)
    uncertainty = np.where(informative, uncertainty, np.inf)
    total = max(float(allowed.sum()), 1e-300)
    misfit = math.sqrt(float(remaining.sum()) / total)
    reach = tau + np.where(informative, uncertainty, 0.0) * np.abs(d)
    with np.errstate(all="ignore"):
        ratio = np.abs(left, out=left) / reach
    worst = float(np.max(ratio, initial=0.0, where=informative & (left > 0)))
    return Factors(statistics, center, factor, uncertainty, informative, dd / total, misfit, worst)


def thinned(
    shape: Sequence[int], *choices: Sequence[int], most: int = SAMPLED
) -> tuple[slice, ...]:
    """Evenly spaced indices, the longest dimension cut first.

    Args:
        shape: the sizes.
        choices: the dimensions that are cut; others only when these are down to a few.
        most: about how many elements are left.
    """
    sizes, steps = list(shape), [1] * len(shape)
    for dimensions in choices:
        while dimensions and math.prod(sizes) > most:
            longest = max(dimensions, key=lambda i: sizes[i])
            if sizes[longest] < 3:
                break
            steps[longest] *= 2
            sizes[longest] = -(-shape[longest] // steps[longest])
    return tuple(slice(None, None, step) for step in steps)


def _kept_of(statistics: Statistics) -> tuple[int, ...]:
    """The dimensions along which running statistics do not vary."""
    return tuple(i for i, size in enumerate(statistics.mean.shape)
                 if size == 1)  # fmt: skip


def _n(statistics: Statistics) -> int:
    return 2 if statistics.running else statistics.sharing.group_size


def eps_interval(factors: Factors, formula: Formula) -> tuple[float, float] | None:
    """The values of eps with which the formula gives every factor, None where there is none.

    Every group allows an interval; the true eps lies in all of them.
    """
    base = np.broadcast_to(factors.statistics.base(formula), factors.factor.shape).ravel()
    every = slice(None)
    # Of many groups some are enough to see that no eps gives the factors of all.
    few = slice(None, None, max(1, base.size // FEW_GROUPS))
    for part in (few, every):
        keep = (factors.informative & (factors.factor != 0)).ravel()[part]
        found = _interval(
            formula,
            base[part][keep],
            factors.factor.ravel()[part][keep],
            factors.uncertainty.ravel()[part][keep] * formula.sensitivity,
        )
        if found is None or base.size <= FEW_GROUPS:
            return found
    return found


def _interval(
    formula: Formula, base: Floats, factor: Floats, off: Floats
) -> tuple[float, float] | None:
    """For groups of these variances and factors, off by up to so much."""
    if not factor.size or not np.isfinite(base).all():
        return None
    if bool((factor + off <= 0).any()):
        return None
    _, a = formula.exponents
    with np.errstate(all="ignore"):
        least = (factor + off) ** (1 / a)
        most = np.where(factor > off, np.maximum(factor - off, 1e-300) ** (1 / a), np.inf)
    if formula.placement == "max":
        if bool((most < base).any()):
            return None
        low = np.where(least > base, least, -np.inf)
        high = most
        # Clamped everywhere, it would be one factor for all: no statistics.
        if bool((least > base).all()):
            return None
    elif formula.passes == 2:
        with np.errstate(all="ignore"):
            low, high = (
                0.5 * (np.sqrt(np.maximum(base * base + 4 * (inner - base), 0.0)) - base)
                for inner in (least, most)
            )
            low = np.where(least < base, -np.inf, low)
        if bool((most < base).any()):
            return None
    else:
        low, high = least - base, most - base
    lowest, highest = float(low.max()), float(high.min())
    if lowest > highest or highest < 0:
        return None
    return max(lowest, 0.0), highest


def spread(values: Floats, shape: Sequence[int], sharing: Sharing, affine: Sequence[int]) -> Floats:
    """A parameter along these dimensions, as it broadcasts against the tensor."""
    dimensions = tuple(n if i in affine else 1 for i, n in enumerate(sharing.expanded))
    full = np.asarray(values, dtype=np.float64).reshape(dimensions)
    target = []
    out = []
    for axis in range(len(sharing.axes)):
        own = sharing.dimensions(axis)
        varies = any(i in affine for i in own)
        target += [sharing.expanded[i] if varies else 1 for i in own]
        out.append(shape[axis] if varies else 1)
    return np.broadcast_to(full, target).reshape(out)
