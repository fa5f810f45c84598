"""Tensors that show where two normalizations differ and where they agree, tried out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..scheme import ArgumentError, Scheme, Sizes
from .family import refines, unsized
from .half_types import HALF_TYPES
from .meaning import Meaning, alike, same_parameters
from .subject import Subject

__all__ = ["Agreement", "Example", "agreements_of", "smallest_example"]

VISIBLE = 0.1
"""Outputs that differ by this part of their size differ in the first digits."""

MOST_EVEN_AXES = 12
"""Agreements are tried on inputs of at least two elements along each axis, up to this rank."""

LEAST_SHOWN = 1e-4
"""Those that differ by less show nothing to the reader."""

MOST_SHAPES = 400
"""How many shapes are looked at, the smallest first, and how many of them are tried."""
MOST_TRIED = 64


@dataclass(frozen=True, eq=False)
class Example:
    """A tensor that tells two normalizations apart, with both outputs on it."""

    x: NDArray[Any]
    y_a: NDArray[Any]
    y_b: NDArray[Any]
    weight_a: NDArray[Any] | None
    """The weights that were used, None where none is needed to see the difference."""
    weight_b: NDArray[Any] | None
    bias_a: NDArray[Any] | None
    bias_b: NDArray[Any] | None
    running_mean_a: NDArray[Any] | None
    """The running statistics that were used, None where none were."""
    running_var_a: NDArray[Any] | None
    running_mean_b: NDArray[Any] | None
    running_var_b: NDArray[Any] | None
    largest_difference: float
    best_of: str = ""
    """``"a"`` or ``"b"`` where its weight and bias were fitted to the other's output: no other
    choice comes nearer to it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.x.shape

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        arrays = (
            "x", "y_a", "y_b", "weight_a", "weight_b", "bias_a", "bias_b", "running_mean_a",
            "running_var_a", "running_mean_b", "running_var_b",
        )  # fmt: skip
        return {
            "shape": list(self.shape),
            "dtype": str(self.x.dtype),
            **{name: _listed(getattr(self, name)) for name in arrays},
            "largest_difference": self.largest_difference,
            "best_of": self.best_of or None,
        }


def _listed(values: NDArray[Any] | None) -> Any:
    return None if values is None else values.astype(np.float64).tolist()


@dataclass(frozen=True)
class Agreement:
    """A condition under which two normalizations that differ give the same output."""

    condition: str
    """A sentence."""
    shape: tuple[int, ...]
    """Of the input that meets it, on which both were computed."""
    largest_difference: float
    """Between the two outputs there, in float64."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "condition": self.condition,
            "shape": list(self.shape),
            "largest_difference": self.largest_difference,
        }


# --------------------------------------------------------------------------------------------
# The smallest tensor that tells two apart


def smallest_example(a: Subject, b: Subject, ndim: int) -> Example | None:
    """The tensor of the fewest elements, and among those the plainest values.

    Sizes that only say how long an axis is are left open. Groups hold at least two elements each
    unless only smaller ones show the difference.

    >>> from axisnorm import Scheme
    >>> a, b = Subject("a", Scheme.layer_norm(eps=1e-5)), Subject("b", Scheme.rms_norm(eps=1e-5))
    >>> smallest_example(a, b, 2).x.tolist()
    [[0.0, 1.0]]
    """
    pairs = list(_pairs(_open(a), _open(b), ndim))
    for least, dtype in itertools.product((2, 1), ("float32", "float64", "float16")):
        telling = [
            (one, two) for one, two in pairs
            if min(one.group_size, two.group_size) >= least and not alike(one, two, dtype)
        ]  # fmt: skip
        # As they are initialized, then with weights, then on the small numbers that show an eps.
        for tries in (_plain, _weighted, _scaled):
            found = _first(telling, dtype, tries)
            if found is not None:
                return found
    return None


def _first(
    pairs: Sequence[tuple[Meaning, Meaning]],
    dtype: str,
    tries: Callable[[Meaning, Meaning, str], Iterator[Example]],
) -> Example | None:
    """The first try whose outputs visibly differ, or else the one that differs most."""
    best: Example | None = None
    tried = 0
    # Outputs that differ in the last digits show nothing, unless the last digit is the point.
    least = 0.0 if dtype in HALF_TYPES else LEAST_SHOWN
    for one, two in pairs:
        examples = list(tries(one, two, dtype))
        for found in examples:
            if not math.isfinite(found.largest_difference) or _relative(found) <= least:
                continue
            if found.largest_difference >= VISIBLE * _size(found):
                return found
            if best is None or _relative(found) > 2 * _relative(best):
                best = found
        tried += bool(examples)
        # A rounding is never large: what the first shapes show is all there is.
        if tried >= MOST_TRIED or (best is not None and dtype in HALF_TYPES):
            break
    return best


def _open(subject: Subject) -> Subject:
    return dataclasses.replace(subject, scheme=unsized(subject.scheme))


def _size(example: Example) -> float:
    return max(float(np.abs(y).max()) for y in (example.y_a, example.y_b))


def _relative(example: Example) -> float:
    size = _size(example)
    return example.largest_difference / size if size else 0.0


def _pairs(a: Subject, b: Subject, ndim: int, step: int = 1) -> Iterator[tuple[Meaning, Meaning]]:
    """Both on the shapes that fit them, the smallest shapes first; each size times ``step``."""
    both = zip(_units(a, ndim), _units(b, ndim), strict=True)
    units = [step * math.lcm(*factors) for factors in both]
    shapes = [tuple(u * k for u, k in zip(units, c, strict=True)) for c in _counts(ndim)]
    for shape in sorted(shapes, key=lambda shape: (math.prod(shape), shape)):
        try:
            yield Meaning.of(a, shape), Meaning.of(b, shape)
        except ArgumentError:
            continue


@lru_cache(maxsize=16)
def _counts(ndim: int) -> tuple[tuple[int, ...], ...]:
    """Small whole numbers, one an axis, all whose product is at most what leaves enough of them."""
    for most in (64, 32, 16, 12, 8, 6, 4, 3, 2):
        found = list(itertools.islice(_products(ndim, most), MOST_SHAPES + 1))
        if len(found) <= MOST_SHAPES:
            break
    return tuple(found)


def _products(ndim: int, most: int) -> Iterator[tuple[int, ...]]:
    """All tuples of positive numbers whose product is at most ``most``."""
    if not ndim:
        yield ()
        return
    for first in range(1, most + 1):
        for rest in _products(ndim - 1, most // first):
            yield (first, *rest)


def _units(subject: Subject, ndim: int) -> list[int]:
    """What the size of each axis is a multiple of."""
    return [math.prod(part.size or 1 for part in axis) for axis in subject.scheme.layout(ndim).axes]


def _plain(a: Meaning, b: Meaning, dtype: str) -> Iterator[Example]:
    """Both outputs without weight and bias, for the numbers that one would try by hand."""
    if a.statistics == b.statistics and _divides_alike(
        a, b, dtype, but_for=("eps", "eps_placement")
    ):
        return
    for x in _values(a, dtype):
        yield _example(a, b, x)


def _scaled(a: Meaning, b: Meaning, dtype: str) -> Iterator[Example]:
    """As :func:`_plain`, for numbers so small that eps shows."""
    if a.statistics == b.statistics and _divides_alike(a, b, dtype):
        return
    scales = []
    for meaning in (a, b):
        eps, (h, _) = abs(meaning.constants(dtype)["eps"] or 0), reference.exponents(meaning.scheme)
        if eps:
            # The deviation at which V^h is eps, and one at which the larger of them is eps.
            power = round(math.log10(eps) / (2 * h))
            scales += [10.0**power, 10.0 ** (power - 1)]
    for scale in sorted(set(scales), reverse=True):
        for x in _values(a, dtype, scale):
            yield _example(a, b, x, scale=scale)


def _weighted(a: Meaning, b: Meaning, dtype: str) -> Iterator[Example]:
    """Both outputs with weights, for equal statistics."""
    if a.statistics != b.statistics:
        return
    one, two = a.constants(dtype), b.constants(dtype)
    if a.varying != b.varying or not same_parameters(a, b):
        for x in _values(a, dtype):
            yield from _fitted_examples(a, b, x)
    elif any(one[name] != two[name] for name in ("weight_offset", "rounding")):
        for x in _values(a, dtype):
            for weight in _weights(a.sizes, dtype):
                yield _example(a, b, x, (weight, None), (weight, None))


def _divides_alike(a: Meaning, b: Meaning, dtype: str, but_for: tuple[str, ...] = ()) -> bool:
    names = {"correction", "eps", "eps_placement", "formula"}.difference(but_for)
    one, two = a.constants(dtype), b.constants(dtype)
    return all(one[name] == two[name] for name in names)


def _values(meaning: Meaning, dtype: str, scale: float = 1.0) -> Iterator[NDArray[Any]]:
    shape = meaning.sizes.shape
    count = math.prod(shape)
    number = np.arange(count)
    plain = [number, number == 0, number == 1, number**2, number % 2, 2 * number + 1]
    if dtype in HALF_TYPES:
        # Only some numbers show a rounding.
        generator = np.random.default_rng(0)
        plain += [generator.integers(-9, 10, count) for _ in range(40)]
    for values in plain:
        x = (values * scale).reshape(shape).astype(dtype)
        if np.isfinite(x).all():
            yield x


def _weights(sizes: Sizes, dtype: str) -> Iterator[NDArray[Any]]:
    count = math.prod(sizes.affine_shape)
    yield np.arange(1, count + 1).reshape(sizes.affine_shape).astype(dtype)
    if dtype in HALF_TYPES:
        for first in (1.1, 1.3, 3.0, 0.7):
            yield (np.arange(count) + first).reshape(sizes.affine_shape).astype(dtype)


Parameters = tuple[NDArray[Any] | None, NDArray[Any] | None]
"""Weight and bias, or running mean and variance."""


def _example(
    a: Meaning,
    b: Meaning,
    x: NDArray[Any],
    affine_a: Parameters = (None, None),
    affine_b: Parameters = (None, None),
    best_of: str = "",
    scale: float = 1.0,
) -> Example:
    running_a, running_b = _running(a, b, x.dtype, scale)
    y_a = _computed(a, x, affine_a, running_a)
    y_b = _computed(b, x, affine_b, running_b)
    difference = np.abs(y_a.astype(np.float64) - y_b.astype(np.float64))
    (weight_a, bias_a), (weight_b, bias_b) = affine_a, affine_b
    return Example(
        x, y_a, y_b, weight_a, weight_b, bias_a, bias_b, *running_a, *running_b,
        float(difference.max()), best_of,
    )  # fmt: skip


def _computed(
    meaning: Meaning, x: NDArray[Any], affine: Parameters, running: Parameters
) -> NDArray[Any]:
    scheme = meaning.scheme
    if x.dtype not in HALF_TYPES:
        # What is computed in the input's own type is rounded to it once, whatever is said.
        scheme = scheme.replace(rounding="once")
    # Arithmetic on arrays without axes gives no arrays. '[...]' takes one axis as well.
    seen = x if x.ndim else x.reshape(1)
    mean, var = running
    y: NDArray[Any]
    # A negative eps may leave no root.
    with np.errstate(all="ignore"):
        y, _ = reference.forward(seen, scheme, *affine, running_mean=mean, running_var=var)
    return y.reshape(x.shape)


def _running(
    a: Meaning, b: Meaning, dtype: Any, scale: float = 1.0
) -> tuple[Parameters, Parameters]:
    """Running statistics: those of a new module, or different ones where both use some."""
    found: list[Parameters] = []
    for meaning in (a, b):
        if not meaning.running:
            found.append((None, None))
            continue
        shape = meaning.sizes.running_shape
        count = np.arange(math.prod(shape)).reshape(shape)
        # Those of a new module are 0 and 1.
        first = count + 1 if a.running and b.running else 0 * count
        found.append(((first * scale).astype(dtype), ((first + 1) * scale**2).astype(dtype)))
    return found[0], found[1]


# --------------------------------------------------------------------------------------------
# Weights that only one of two can have


def _fitted_examples(a: Meaning, b: Meaning, x: NDArray[Any]) -> Iterator[Example]:
    """One output with its own weight, and the nearest to it that the other can give."""
    running_a, running_b = _running(a, b, x.dtype)
    if a.has_affine:
        affine = _own_parameters(a, b, x.dtype)
        y = _computed(a, x, affine, running_a)
        yield _example(a, b, x, affine, _nearest(b, x, y, running_b), "b")
    if b.has_affine:
        affine = _own_parameters(b, a, x.dtype)
        y = _computed(b, x, affine, running_b)
        yield _example(a, b, x, _nearest(a, x, y, running_a), affine, "a")


def _own_parameters(meaning: Meaning, other: Meaning, dtype: Any) -> Parameters:
    """Weights that differ from one another, and a bias where it is what differs."""
    weight = bias = None
    shape = meaning.sizes.affine_shape
    if meaning.has("weight"):
        weight = (np.arange(math.prod(shape)) + 2).reshape(shape).astype(dtype)
    if meaning.has("bias") and (weight is None or meaning.varying == other.varying):
        bias = np.ones(shape, dtype)
    return weight, bias


def _nearest(meaning: Meaning, x: NDArray[Any], y: NDArray[Any], running: Parameters) -> Parameters:
    """The weight and bias whose output is nearest to ``y``, by least squares in each place."""
    if not meaning.has_affine:
        return None, None
    sizes = meaning.sizes
    normalized = _computed(meaning, x.astype(np.float64), (None, None), running)
    told = sizes.layout.affine
    rest = tuple(i for i in range(len(sizes.expanded)) if i not in told)
    n = math.prod(sizes.expanded[i] for i in rest)
    # One row for each element of the weight.
    rows = [
        values.astype(np.float64).reshape(sizes.expanded).transpose(*told, *rest).reshape(-1, n)
        for values in (normalized, y)
    ]
    xs, ys = rows
    shift, middle = np.zeros(len(xs)), np.zeros(len(xs))
    if meaning.has("bias"):
        shift, middle = xs.mean(axis=1), ys.mean(axis=1)
    weight, size = np.ones(len(xs)), ((xs - shift[:, None]) ** 2).sum(axis=1)
    if meaning.has("weight"):
        covariance = ((xs - shift[:, None]) * (ys - middle[:, None])).sum(axis=1)
        weight = np.where(size > 0, covariance / np.where(size > 0, size, 1.0), 0.0)
    bias = middle - weight * shift if meaning.has("bias") else None
    if bias is not None and not meaning.has("weight"):
        bias = (ys - xs).mean(axis=1)
    shaped = [
        None if values is None else values.reshape(sizes.affine_shape).astype(x.dtype)
        for values in (weight - meaning.scheme.weight_offset if meaning.has("weight") else None,
                       bias)
    ]  # fmt: skip
    return shaped[0], shaped[1]


# --------------------------------------------------------------------------------------------
# Where they agree


def agreements_of(a: Subject, b: Subject, ndim: int) -> Iterator[Agreement]:
    """On which inputs or parameters two that differ agree, each tried on such an input."""
    a, b = _open(a), _open(b)
    # Of many axes two elements each are many in all.
    if ndim > MOST_EVEN_AXES:
        return
    roomy = (pair for pair in _pairs(a, b, ndim, 2) if _is_roomy(*pair))
    pair = next(roomy, None)
    if pair is None:
        return
    one, two = pair
    yield from _statistics_agree(one, two)
    yield from _affine_agree(one, two)


def _is_roomy(a: Meaning, b: Meaning) -> bool:
    """Whether groups are large enough to say something, and every part of an axis is even."""
    even = all(size % 2 == 0 for m in (a, b) for size in m.sizes.expanded if size > 1)
    return even and min(a.group_size, b.group_size) >= 4


def _agreement(condition: str, x: NDArray[Any], y_a: NDArray[Any], y_b: NDArray[Any]) -> Agreement:
    return Agreement(condition, x.shape, float(np.abs(y_a - y_b).max()))


def _statistics_agree(a: Meaning, b: Meaning) -> Iterator[Agreement]:
    """The condition on the data, with the constants of a for both and without weights."""
    if a.statistics == b.statistics or "l2" in (a.spread, b.spread):
        return
    shape = a.sizes.shape
    generator = np.random.default_rng(0)
    x = generator.standard_normal(shape)
    if a.running != b.running:
        yield from _modes_agree(a, b, x)
        return
    if a.running:
        return
    plain = [_bare(meaning.scheme, a.scheme) for meaning in (a, b)]
    centred = a.scheme.center or b.scheme.center
    remark = _remark(a, b)
    if a.shared == b.shared:
        x = _standard(x, plain[0].replace(center=True, scale="auto"), scale=False)
        condition = f"They agree exactly where the mean of every group is 0{remark}."
    elif refines(a.shared, b.shared) or refines(b.shared, a.shared):
        finer, coarser, scheme = "a", "b", plain[0]
        if not refines(a.shared, b.shared):
            finer, coarser, scheme = "b", "a", plain[1]
        x = _standard(x, scheme.replace(center=centred, scale="auto"))
        condition = (
            f"They agree where all groups of {finer} inside one of {coarser} have one "
            f"{_level(a, b)}{remark}."
        )
    else:
        x = _alternating(shape)
        condition = f"They agree where all groups of both have one {_level(a, b)}{remark}."
    y_a, y_b = (reference.forward(x, scheme)[0] for scheme in plain)
    found = _agreement(condition, x, y_a, y_b)
    # A condition that does not hold on such an input is not said.
    if found.largest_difference < 1e-9:
        yield found


def _level(a: Meaning, b: Meaning) -> str:
    if not a.scheme.center and not b.scheme.center:
        return "root mean square"
    same = a.scheme.center == b.scheme.center
    return "mean and one variance" if same else "variance and the mean 0"


def _remark(a: Meaning, b: Meaning) -> str:
    """What else has to be equal."""
    other = [] if _divides_alike(a, b, "float32") else ["with the same constants"]
    if a.statistics != b.statistics:
        if a.varying != b.varying or a.scheme.weight_offset != b.scheme.weight_offset:
            other.append("without weight and bias")
        elif not same_parameters(a, b):
            alone = [name for name in ("weight", "bias") if a.has(name) != b.has(name)]
            other.append(f"without a {' and a '.join(alone)}")
    return f", {' and '.join(other)}" if other else ""


def _bare(scheme: Scheme, like: Scheme) -> Scheme:
    """The scheme without weights, and with the other constants of another."""
    same = {"eps": like.eps, "eps_placement": like.eps_placement, "correction": 0.0}
    return scheme.replace(affine="", rounding="once", weight_offset=0.0, **same)


def _standard(x: NDArray[Any], scheme: Scheme, *, scale: bool = True) -> NDArray[Any]:
    """``x`` with its groups centred as the scheme says, and of variance 1."""
    exact = scheme.replace(eps=0.0)
    y: NDArray[Any]
    y, moments = reference.forward(x, exact)
    if scale:
        return y
    sizes = exact.layout(x.ndim).sizes(x.shape)
    rstd = np.asarray(moments.rstd).reshape(sizes.statistics_expanded)
    return (y.reshape(sizes.expanded) / rstd).reshape(x.shape)


def _alternating(shape: tuple[int, ...]) -> NDArray[Any]:
    """Ones whose sign changes with every step along every axis."""
    return np.where(np.indices(shape).sum(axis=0) % 2, -1.0, 1.0) if shape else np.ones(())


def _modes_agree(a: Meaning, b: Meaning, x: NDArray[Any]) -> Iterator[Agreement]:
    """Training and evaluation, where the running statistics are those of the batch."""
    training, evaluating = (b, a) if a.running else (a, b)
    if not _same_but_source(training.scheme, evaluating.scheme):
        return
    plain = _bare(training.scheme, training.scheme)
    found = reference.moments(x, plain)
    mean, var = (np.asarray(values) for values in (found.mean, found.var))
    if mean.size != math.prod(evaluating.sizes.running_shape):
        return
    shape = evaluating.sizes.running_shape
    stored: dict[str, Any] = {
        "running_mean": mean.reshape(shape),
        "running_var": var.reshape(shape),
    }
    y = [
        reference.forward(x, plain)[0],
        reference.forward(x, plain.replace(statistics="running", affine=""), **stored)[0],
    ]
    condition = (
        "They agree where running_mean and running_var are the mean and the variance of this very "
        "batch, with the divisor n."
    )
    yield _agreement(condition, x, *y)


def _same_but_source(a: Scheme, b: Scheme) -> bool:
    return a.center == b.center and a.scale == b.scale


def _affine_agree(a: Meaning, b: Meaning) -> Iterator[Agreement]:
    """The condition on weights, for equal statistics."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal(a.sizes.shape)
    same = dataclasses.replace(
        b, subject=dataclasses.replace(b.subject, scheme=_like(b.scheme, a.scheme))
    )
    if a.statistics != b.statistics or a.running:
        return
    none: Parameters = (None, None)
    if a.varying is None or b.varying is None:
        if a.varying == b.varying:
            return
        with_weight = a if a.varying is not None else same
        without = same if a.varying is not None else a
        offset = with_weight.scheme.weight_offset
        weight = np.full(with_weight.sizes.affine_shape, 1.0 - offset)
        y = [
            _computed(with_weight, x, (weight, np.zeros_like(weight)), none),
            _computed(without, x, none, none),
        ]
        name = "a" if with_weight is a else "b"
        yield _agreement(
            f"They agree while the weight of {name} is {1 - offset:g} and its bias 0"
            f"{_remark(a, b)}.", x, *y
        )  # fmt: skip
        return
    if a.varying != b.varying:
        if refines(a.varying, b.varying) or refines(b.varying, a.varying):
            finer, coarser = (a, same) if refines(a.varying, b.varying) else (same, a)
            name = "a" if finer is a else "b"
            shape = coarser.sizes.affine_shape
            weight = generator.standard_normal(shape)
            spread = np.broadcast_to(
                weight.reshape(coarser.sizes.affine_expanded), coarser.sizes.expanded
            ).reshape(x.shape)
            y_coarser = _computed(coarser, x, (weight - coarser.scheme.weight_offset, None), none)
            own = _gathered(finer, spread) - finer.scheme.weight_offset
            y = [_computed(finer, x, (own, None), none), y_coarser]
            axes = [
                str(i) for i, (f, c) in enumerate(zip(a.varying, b.varying, strict=True)) if f != c
            ]
            where = f"axis {axes[0]}" if len(axes) == 1 else f"axes {' and '.join(axes)}"
            yield _agreement(
                f"They agree while weight and bias of {name} do not vary along {where}"
                f"{_remark(a, b)}.", x, *y
            )  # fmt: skip
        else:
            y = [_computed(meaning, x, none, none) for meaning in (a, same)]
            yield _agreement(f"They agree without weight and bias{_remark(a, b)}.", x, *y)
        return
    if a.scheme.weight_offset != b.scheme.weight_offset:
        weight = generator.standard_normal(a.sizes.affine_shape)
        step = a.scheme.weight_offset - b.scheme.weight_offset
        moved = dataclasses.replace(
            same,
            subject=dataclasses.replace(
                same.subject,
                scheme=same.scheme.replace(weight_offset=b.scheme.weight_offset),
            ),
        )
        y = [
            _computed(a, x, (weight, None), none),
            _computed(moved, x, (weight + step, None), none),
        ]
        sign = "plus" if step > 0 else "minus"
        yield _agreement(
            f"They agree where the weight of b is that of a {sign} {abs(step):g}"
            f"{_remark(a, b)}.", x, *y
        )  # fmt: skip


def _like(scheme: Scheme, other: Scheme) -> Scheme:
    names = ("eps", "eps_placement", "correction", "scale", "rounding")
    return scheme.replace(**{name: getattr(other, name) for name in names})


def _gathered(meaning: Meaning, values: NDArray[Any]) -> NDArray[Any]:
    """The parameter of which ``values`` are the elements' own."""
    sizes = meaning.sizes
    index = tuple(
        slice(None) if i in sizes.layout.affine else slice(0, 1) for i in range(len(sizes.expanded))
    )
    return values.reshape(sizes.expanded)[index].reshape(sizes.affine_shape)
