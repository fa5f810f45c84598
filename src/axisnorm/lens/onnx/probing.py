r"""What a part of a graph computes, shown by running it on inputs made for the question.

Every normalization is, within the elements that share a mean, one factor times the input minus an
offset. Of a function that can be run at will each part of this can be measured alone:

* the bias is the half of :math:`f(x) + f(-x)`;
* a scale of the input that leaves the output as it is shows statistics of this input;
* one changed element changes all that share its mean;
* of groups with mean 0 and mean square 1 the output is the weight times the input;
* the factor at smaller and smaller inputs shows eps and where it stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...scheme import ArgumentError, Scheme, Sizes
from ..identify import Identification, on_axes, rivals, tell_apart
from .regions import Part, is_trivial
from .running import CannotRunError

__all__ = ["Match", "Shown", "arrange", "fitting", "study"]

Floats = NDArray[Any]
Function = Callable[[Floats], Floats]

LARGE_SCALE = 2048.0
"""At this deviation even a group count that stands as eps does not change what is measured."""
CLOSE = 2e-3
"""Relative to the largest output: what float32 sums of any order agree within."""
ENOUGH = 1 << 14
"""Of larger inputs a part is studied."""
WIDEST = 1 << 20
"""So many elements an input has at most that is made for one with axes of size 1."""
SEED = 0


@dataclass(frozen=True)
class Match:
    """A constant of the graph that serves as weight or bias."""

    leaf: int
    """Which of the part's leaves."""
    order: tuple[int, ...]
    """The constant's axes, without those of size 1, in the order of the scheme's affine."""
    offset: float
    """What is added to it."""
    factor: float
    trivial: bool
    """Whether the constant is all ones or all zeros."""
    values: Floats = field(compare=False)
    """The constant with its offset, in the shape of the scheme's parameter."""


@dataclass(frozen=True)
class Shown:
    """What a part was shown to compute."""

    scheme: Scheme
    identification: Identification
    """Of its output on random input, with random parameters."""
    match: Match | None
    """The constant that is its weight."""
    bias_match: Match | None
    factor: float
    """What the result is multiplied by besides: 1 where the weight says all."""
    computed: bool
    """Whether weight or bias is no constant of the graph, but computed from some."""
    shape: tuple[int, ...]
    """Of the input that it was studied on."""


def study(part: Part, shape: Sequence[int]) -> Shown | None:
    """The normalization that a part computes on inputs of this shape; None where it is none."""
    random = np.random.default_rng(SEED)
    whole = _convenient(part, tuple(shape), random)
    if whole is None:
        return None
    small = _cut(part, whole, random)
    found = _studied(part, small, random)
    if small == whole or (found is not None and _shares(part, whole, found.scheme, random)):
        return found
    # A constant of the graph may hold how many elements share a mean, or how many groups there are.
    return _studied(part, whole, random)


def _shares(
    part: Part, shape: tuple[int, ...], scheme: Scheme, random: np.random.Generator
) -> bool:
    """Whether on this shape too one changed element changes those that the scheme says."""
    try:
        sizes = scheme.layout(len(shape)).sizes(shape)
    except ArgumentError:
        return False
    groups = np.arange(sizes.num_groups).reshape(sizes.statistics_expanded)
    groups = np.broadcast_to(groups, sizes.expanded).reshape(shape)
    place = tuple(size // 2 for size in shape)
    expected = groups == groups[place]
    try:
        changed = _changed(part, _drawn(part, random), shape, place, random)
    except CannotRunError:
        return False
    return bool(not (changed & ~expected).any() and changed.sum() >= 0.9 * expected.sum())


def _drawn(part: Part, random: np.random.Generator) -> dict[str, Floats]:
    """Random parameters between 0.5 and 1.5."""
    return {
        name: (0.5 + random.random(value.shape)).astype(value.dtype)
        for name, value in part.leaves.items()
    }


def _changed(
    part: Part,
    leaves: dict[str, Floats],
    shape: tuple[int, ...],
    place: tuple[int, ...],
    random: np.random.Generator,
) -> NDArray[np.bool_]:
    """Which outputs one large element changes."""
    x = (LARGE_SCALE * random.standard_normal(shape)).astype(np.float32)
    before = part.run(x, leaves)
    x[place] += LARGE_SCALE * 3.0 * math.sqrt(x.size)
    return np.asarray(np.abs(part.run(x, leaves) - before) > 1e-4 * np.abs(before).max())


def _studied(part: Part, shape: tuple[int, ...], random: np.random.Generator) -> Shown | None:
    """What the part computes on inputs of just this shape."""
    randomised = _drawn(part, random)
    plain = {name: value for name, value in part.leaves.items() if is_trivial(value)}
    tried = [randomised]
    if plain and len(plain) < len(randomised):
        # Ones and zeros in front of the real weight and bias.
        tried.append({**randomised, **plain})
    best: Shown | None = None
    for leaves in tried:
        found = _Study(part, shape, leaves, random).result()
        if found is not None and not found.computed:
            return found
        best = best or found
    return best


def _takes(part: Part, shape: tuple[int, ...], random: np.random.Generator) -> bool:
    try:
        y = part.run(random.standard_normal(shape).astype(np.float32))
    except CannotRunError:
        return False
    return y.shape == shape


def _convenient(
    part: Part, shape: tuple[int, ...], random: np.random.Generator
) -> tuple[int, ...] | None:
    """A shape that the part takes, with axes of size 0 and 1 widened; None where it keeps no
    shape."""
    shape = tuple(size or 3 for size in shape)
    if not shape or not _takes(part, shape, random):
        return None
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    for axes in (ones, *([axis] for axis in ones)):
        wider = tuple(3 if axis in axes and shape[axis] == 1 else n for axis, n in enumerate(shape))
        if wider != shape and math.prod(wider) <= WIDEST and _takes(part, wider, random):
            shape = wider
    return shape


def _cut(part: Part, shape: tuple[int, ...], random: np.random.Generator) -> tuple[int, ...]:
    """A smaller shape that the part takes too, the first axes cut first."""
    for axis in range(len(shape)):
        while math.prod(shape) > ENOUGH and shape[axis] > 3:
            cut = (*shape[:axis], max(3, shape[axis] // 4), *shape[axis + 1 :])
            if not _takes(part, cut, random):
                break
            shape = cut
    return shape


_ROOTS = {
    "auto": {"variance": (1.0, -0.5), "std": (0.5, -1.0), "max": (0.5, -1.0)},
    "var": {"variance": (1.0, -1.0)},
    "sqrt_std": {"variance": (0.5, -0.5), "std": (0.25, -1.0)},
}
"""By what divides and where eps stands the powers in (V^a + eps)^b, as the reference computes."""


class _Study:
    """One attempt, with one choice of parameters."""

    def __init__(
        self,
        part: Part,
        shape: tuple[int, ...],
        leaves: dict[str, Floats],
        random: np.random.Generator,
    ) -> None:
        self.part, self.shape, self.leaves, self.random = part, shape, leaves, random

    def f(self, x: Floats) -> Floats:
        """The part's output in float64."""
        return self.part.run(x.astype(np.float32), self.leaves).astype(np.float64)

    def odd(self, x: Floats) -> Floats:
        """What is left of the output without its bias."""
        return self.f(x) - self.bias

    def result(self) -> Shown | None:
        with np.errstate(all="ignore"):
            try:
                return self._result()
            except CannotRunError:
                return None

    def _result(self) -> Shown | None:
        x = LARGE_SCALE * (self.random.standard_normal(self.shape) + 0.25)
        y, mirrored = self.f(x), self.f(-x)
        self.bias = 0.5 * (y + mirrored)
        g = y - self.bias
        largest = _size(g)
        if not (np.isfinite(y).all() and np.isfinite(mirrored).all()) or largest < 1e-30:
            return None
        other = LARGE_SCALE * (self.random.random(self.shape) - 0.75)
        again = 0.5 * (self.f(other) + self.f(-other))
        if _size(again - self.bias) > CLOSE * (largest + _size(self.bias)):
            return None
        self.bias = 0.5 * (self.bias + again)
        power = self._power(x, g)
        if power is None:
            return None
        sharing = self._sharing(power)
        if sharing is None:
            return None
        reduced, blocks = sharing
        return self._formula(power, reduced, blocks)

    def _power(self, x: Floats, g: Floats) -> float | None:
        """With which power of the input's scale the output grows: 0 for what divides by it."""
        ratio = float((self.odd(32.0 * x) * g).sum() / (g * g).sum())
        power = math.log(ratio, 32.0) if ratio > 0 else math.inf
        # -1: divided by the variance; 1/2: by the root of the deviation.
        return next((known for known in (0.0, -1.0, 0.5) if abs(power - known) < 0.002), None)

    def _sharing(self, power: float) -> tuple[tuple[int, ...], dict[int, tuple[int, bool]]] | None:
        """Which axes share statistics whole, and which in blocks: their number, and if they are
        runs of neighbours; None where only an element's own value counts."""
        ndim = len(self.shape)
        places = [tuple(n // 2 for n in self.shape), tuple(n - 1 for n in self.shape),
                  (0,) * ndim]  # fmt: skip
        forms = []
        for place in places:
            changed = np.zeros(self.shape, bool)
            for _ in range(2):
                changed |= _changed(self.part, self.leaves, self.shape, place, self.random)
            form = []
            for axis, size in enumerate(self.shape):
                others = tuple(i for i in range(ndim) if i != axis)
                along = np.asarray(changed.any(axis=others))
                form.append(_form(along, place[axis], size))
            product = math.prod(int(changed.any(axis=tuple(i for i in range(ndim) if i != a)).sum())
                                for a in range(ndim))  # fmt: skip
            # A few may stay as they were by chance.
            if None in form or changed.sum() < 0.9 * product:
                return None
            forms.append(tuple(form))
        if len(set(forms)) != 1:
            return None
        reduced, blocks = [], {}
        for axis, one in enumerate(forms[0]):
            if one == "all":
                reduced.append(axis)
            elif isinstance(one, tuple):
                blocks[axis] = one
        if not reduced and not blocks:
            return None
        return tuple(reduced), blocks

    def _formula(
        self, power: float, reduced: tuple[int, ...], blocks: dict[int, tuple[int, bool]]
    ) -> Shown | None:
        shape = self.shape
        like = Scheme("[d]", eps=0.0)
        plain = arrange(shape, reduced, blocks, (), like)
        if plain is None:
            return None
        sizes = plain.layout(len(shape)).sizes(shape)
        count = sizes.group_size
        if count < 2:
            return None
        normal = self.random.standard_normal
        # Of several distributions: a sum of magnitudes is not the root of a sum of squares.
        draws = normal(shape), self.random.random(shape), normal(shape) ** 3, normal(shape)
        units = [reference.forward(values, plain)[0] for values in draws]
        total, square = np.zeros(shape), np.zeros(shape)
        outputs = [self.odd(LARGE_SCALE * unit) * LARGE_SCALE**-power for unit in units]
        for unit, output in zip(units, outputs, strict=True):
            total, square = total + unit * output, square + unit * unit
        weight = total / square
        for unit, output in zip(units, outputs, strict=True):
            if _size(output - weight * unit) > CLOSE * _size(output):
                return None
        along = _along(weight, shape)
        bias_along = _along(self.bias, shape) if _size(self.bias) > CLOSE * 1e-2 else ()
        if not set(bias_along) <= set(along or bias_along):
            return None
        affine = along or bias_along
        flat = _size(self.bias) <= CLOSE * 1e-2
        if not affine and not flat:
            return None
        per_group = [
            axis for axis in affine
            if axis in blocks and all(_constant_in_blocks(v, axis, blocks[axis])
                                      for v in (weight, self.bias))
        ]  # fmt: skip
        shown = arrange(shape, reduced, blocks, affine, like, per_group)
        if shown is None:
            return None
        own = _small(weight, shown, shape)
        match = self._leaf(own, (0.0, 1.0)) if along else None
        bias_match = self._leaf(_small(self.bias, shown, shape), (0.0,)) if bias_along else None
        x = LARGE_SCALE * (units[0] + 2.0 * self._per_group(sizes, self.random.standard_normal))
        outputs[0] *= LARGE_SCALE**power
        center = _size(self.odd(x) - outputs[0]) < 5 * CLOSE * _size(outputs[0])
        curve = list(self._factors(units[0], weight, power))
        measured = _Measured(
            own if along else None,
            _small(self.bias, shown, shape) if bias_along else None,
            match,
            bias_match if bias_match is not None and abs(bias_match.factor - 1.0) < CLOSE else None,
            match.factor if match else 1.0 if along else float(own.mean()),
        )
        if not power:
            shown = shown.replace(center=center)
        return self._decide(list(_formulas(shown, power, count)), curve, measured)

    def _per_group(self, sizes: Sizes, draw: Callable[[tuple[int, ...]], Floats]) -> Floats:
        """One drawn number for each group, of the input's shape."""
        values = np.reshape(draw(sizes.statistics_shape), sizes.statistics_expanded)
        return np.broadcast_to(values, sizes.expanded).reshape(self.shape)

    def _leaf(self, own: Floats, offsets: Sequence[float]) -> Match | None:
        """The constant of the graph that these values are, up to a factor."""
        for leaf, (name, value) in enumerate(self.leaves.items()):
            squeezed = np.squeeze(value).astype(np.float64)
            if squeezed.size != own.size:
                continue
            for order in itertools.permutations(range(squeezed.ndim)):
                turned = squeezed.transpose(order).reshape(own.shape)
                for offset in offsets:
                    ratio = own / (turned + offset)
                    factor = float(np.median(ratio))
                    if _size(ratio - factor) < CLOSE * abs(factor):
                        trivial = is_trivial(self.part.leaves[name])
                        return Match(leaf, order, offset, factor, trivial, turned + offset)
        return None

    def _factors(self, unit: Floats, weight: Floats, power: float) -> Iterator[tuple[float, float]]:
        """For smaller and smaller deviations s the share of what eps = 0 would give."""
        wanted = weight * unit
        size = float((wanted * wanted).sum())
        for exponent in range(-1, 36):
            s = 10.0 ** (-exponent / 2)
            yield s, float((self.odd(s * unit) * wanted).sum()) / size / s**power

    def _eps(
        self, curve: Sequence[tuple[float, float]], variance: float, scheme: Scheme
    ) -> list[tuple[str, float]]:
        """Where eps stands and how large it is, by the spread of what each place would need."""
        found = []
        for placement, (inner, outer) in _ROOTS.get(scheme.scale, _ROOTS["auto"]).items():
            values = []
            for s, share in curve:
                if 1e-4 < share < 0.9:
                    divisor = (variance * s * s) ** inner
                    added = 0.0 if placement == "max" else 1.0
                    values.append(divisor * (share ** (1.0 / outer) - added))
            if values:
                middle = float(np.median(values))
                spread = float(np.median(np.abs(np.asarray(values) / middle - 1.0)))
                found.append((spread, placement, self._written(middle)))
        if not found:
            return [("variance", 0.0)]
        found.sort()
        return [(placement, eps) for spread, placement, eps in found if spread <= 0.01]

    def _written(self, eps: float) -> float:
        """eps as a number of the graph, where one is as near as the measurement."""
        near = [s for s in self.part.scalars if abs(s - eps) <= 5e-3 * eps]
        if near:
            best = min(near, key=lambda s: abs(s - eps))
            return float(str(np.float32(best)))
        return float(f"{eps:.2e}")

    def _decide(
        self,
        formulas: Sequence[tuple[Scheme, float]],
        curve: Sequence[tuple[float, float]],
        measured: _Measured,
    ) -> Shown | None:
        """Hold the formulas against outputs on groups of many means and deviations."""
        sizes = formulas[0][0].layout(len(self.shape)).sizes(self.shape)
        x = self.random.standard_normal(self.shape)
        x += self._per_group(sizes, lambda shape: self.random.uniform(-1, 1, shape))
        x *= self._per_group(sizes, lambda shape: 10.0 ** self.random.uniform(-0.5, 0.5, shape))
        x = x.astype(np.float32)
        y = self.f(x)
        # Where no constant says how large the weight is, the formula's own factor is in it.
        known = measured.match is not None or measured.weight is None
        exact = [one for one in formulas if abs(measured.factor * math.sqrt(one[1]) - 1.0) < 2e-4]
        tried = [
            (formula.replace(eps=eps, eps_placement=placement), variance)
            for formula, variance in (exact or formulas if known else formulas)
            for placement, eps in self._eps(curve, variance, formula)
        ]
        if known and not exact:
            # The factor may be anybody's: the formula whose eps the graph has is meant.
            written = {float(str(np.float32(scalar))) for scalar in self.part.scalars}
            tried.sort(key=lambda one: one[0].eps not in written)
        for scheme, variance in tried:
            own = 1.0 / math.sqrt(variance)
            rest = measured.factor / own if known and not exact else 1.0
            found = self._held(x, y, scheme, measured, own, rest)
            if found is not None:
                computed = (measured.weight is not None and measured.match is None) or (
                    measured.bias is not None and measured.bias_match is None
                )
                return Shown(scheme, found, measured.match, measured.bias_match, rest,
                             computed, self.shape)  # fmt: skip
        return None

    def _held(
        self,
        x: Floats,
        y: Floats,
        scheme: Scheme,
        measured: _Measured,
        own: float,
        rest: float,
    ) -> Identification | None:
        """The formula against its rivals on this data, None if it does not fit."""
        weight, bias = measured.weight, measured.bias
        if weight is None:
            y = y / rest
            bias = None if bias is None else bias / rest
        elif measured.match is not None:
            weight = measured.match.values * rest
        else:
            weight = weight / own
        candidates = [("as found", scheme), *rivals(scheme, self.shape)]
        given: dict[str, Any] = {"weight": weight, "bias": bias}
        # The weight that was measured has its offset in it.
        candidates = [one for one in candidates if one[1].weight_offset == 0.0]
        candidates = fitting(candidates, self.shape, given)
        found = tell_apart(x, y.astype(np.float32), candidates, **given)
        mine = next(c for c in found.candidates if c.scheme == scheme)
        return found if mine.fits else None


@dataclass(frozen=True)
class _Measured:
    """Weight and bias as the outputs show them."""

    weight: Floats | None
    bias: Floats | None
    match: Match | None
    bias_match: Match | None
    factor: float
    """What the weight is off by from the constant that it is; the weight itself if it is one
    number."""


def _formulas(scheme: Scheme, power: float, count: int) -> Iterator[tuple[Scheme, float]]:
    """What may divide, each with its square for a group of variance 1."""
    if power:
        yield scheme.replace(scale="var" if power == -1.0 else "sqrt_std"), 1.0
        return
    sample = count / (count - 1.0)
    yield scheme, 1.0
    if not scheme.center:
        yield scheme.replace(scale="std"), 1.0
        yield scheme.replace(scale="std", correction=1), sample
    yield scheme.replace(correction=1), sample
    yield scheme.replace(scale="l2"), float(count)


def fitting(
    candidates: Sequence[tuple[str, Scheme]],
    shape: tuple[int, ...],
    given: Mapping[str, Floats | None],
) -> list[tuple[str, Scheme]]:
    """The candidates that take an input of this shape with these parameters."""
    shapes = {v.shape for k, v in given.items() if v is not None and k in ("weight", "bias")}
    found = []
    for name, scheme in candidates:
        try:
            sizes = scheme.layout(len(shape)).sizes(shape)
        except ArgumentError:
            continue
        if not scheme.affine or shapes <= {sizes.affine_shape}:
            found.append((name, scheme))
    return found


def _size(values: Floats) -> float:
    return float(np.abs(values).max()) if values.size else 0.0


def _form(along: NDArray[np.bool_], place: int, size: int) -> Any:
    """What changed along one axis: ``"own"``, ``"all"``, or blocks as (number, neighbours)."""
    count = int(along.sum())
    if count == size and size > 1:
        return "all"
    if count == 1:
        return "own"
    if count == 0 or size % count:
        return None
    groups = size // count
    start = place // count * count
    if along[start : start + count].all():
        return (groups, True)
    if along[place % groups :: groups].all():
        return (groups, False)
    return None


def _along(values: Floats, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which values differ."""
    largest = _size(values)
    return tuple(
        axis for axis in range(len(shape))
        if _size(values - values.take([0], axis=axis)) > CLOSE * largest
    )  # fmt: skip


def _constant_in_blocks(values: Floats, axis: int, block: tuple[int, bool]) -> bool:
    groups, neighbours = block
    moved = np.moveaxis(values, axis, 0)
    parts = moved.reshape(groups, -1, *moved.shape[1:]) if neighbours else moved.reshape(
        -1, groups, *moved.shape[1:]).swapaxes(0, 1)  # fmt: skip
    return _size(parts - parts[:, :1]) <= CLOSE * max(_size(values), 1e-30)


def _small(values: Floats, scheme: Scheme, shape: tuple[int, ...]) -> Floats:
    """Values of the input's shape as a parameter of the scheme."""
    sizes = scheme.layout(len(shape)).sizes(shape)
    told = sizes.layout.affine
    whole = values.reshape(sizes.expanded)
    index = tuple(slice(None) if i in told else 0 for i in range(len(sizes.expanded)))
    return np.asarray(whole[index]).reshape(sizes.affine_shape)


def arrange(
    shape: Sequence[int],
    reduced: Sequence[int],
    blocks: dict[int, tuple[int, bool]],
    affine: Sequence[int],
    like: Scheme,
    per_group: Sequence[int] = (),
) -> Scheme | None:
    """The scheme whose statistics are shared along these axes, and along others in blocks.

    >>> arrange((2, 8, 5, 5), (2, 3), {1: (4, True)}, (1,), Scheme("[d]"))
    Scheme('n (g=4 [c]) [...]; affine=g c')
    """
    ndim = len(shape)
    if not blocks:
        return on_axes(ndim, reduced, affine, like)
    if len(blocks) > 1:
        return None
    ((axis, (groups, neighbours)),) = blocks.items()
    names = _names(ndim, axis)
    words: list[str] = []
    said: list[str] = []
    for i, name in enumerate(names):
        if i == axis:
            words.append(f"(g={groups} [{name}])" if neighbours else f"([{name}] g={groups})")
            if i in affine:
                both = ("g", name) if neighbours else (name, "g")
                said += ["g"] if i in per_group else both
        else:
            words.append(f"[{name}]" if i in reduced else name)
            said += [name] if i in affine else []
    rest = tuple(range(2, ndim))
    if neighbours and axis == 1 and tuple(reduced) == rest and not set(affine) - {1}:
        words = [names[0], words[1], "[...]"]
    return like.replace(axes=" ".join(words), affine=" ".join(said))


def _names(ndim: int, axis: int) -> tuple[str, ...]:
    space = {0: (), 1: ("l",), 2: ("h", "w"), 3: ("d", "h", "w")}.get(ndim - 2)
    if space is not None and axis == 1:
        return ("n", "c", *space)
    if space is not None and axis == ndim - 1:
        return ("n", *space, "c")
    return tuple("c" if i == axis else f"a{i}" for i in range(ndim))
