"""The search for what was computed: candidates are screened cheaply, confirmed on all data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .evidence import (
    CLEARLY_WORSE,
    SAMPLED,
    UNITS,
    Factors,
    Floats,
    Pair,
    Screened,
    Statistics,
    Sums,
    eps_interval,
    measure,
    rough_statistics,
    screen,
)
from .fit import (
    Affine,
    AffineOf,
    Fit,
    Given,
    assignments,
    confirm,
    for_running,
    running_statistics,
    usual_eps,
)
from .fitting import Place, varies_within, with_fitted_weights
from .hypotheses import (
    CENTRED,
    UNCENTRED,
    Formula,
    Sharing,
    distinct_sharings,
    is_known,
    roundest,
)
from .maps import maps
from .refuting import Lines

__all__ = [
    "UNSEEN",
    "known_fits",
    "nearest",
    "nearest_screened",
    "proportional",
    "ruled_out",
    "search",
]

WORSE_THAN_A_MAP = 2.0
"""A norm with fitted weights is off by no more than so many times what a map leaves on average."""

ALIKE = 4.0
"""By so much smaller groups may come nearer by their number alone."""

UNSEEN = 0.01
"""Of a rounding: what changes by less, as by an eps so small beside the variance, is the same."""

LOOKS = 1 << 12, SAMPLED
"""A formula is held against so many elements before all."""

KEPT = 24
"""So many sets of axes that pass the screening are looked at closely, of small arrays more."""

KEPT_ELEMENTS = 1 << 19

KEPT_BESIDE_A_MAP = 4
"""So many where the output is about the input times the given weight plus the given bias: any set
of axes whose groups are large and alike fits, too, and none of them is what was asked for."""

NEAREST = 6
"""So many sets of axes that do not fit are looked at, to say how near they come."""


def search(
    pair: Pair,
    given: Given,
    *,
    fitting: bool = True,
    only: Collection[Place] | None = None,
    named: bool = False,
) -> list[Fit]:
    """Every hypothesis that fits, and those with fitted weights that came near.

    Without fitted weights first: a hypothesis that needs none is simpler than any that does.
    Weights are fitted in these places alone, where they are told, or where an axis is divided only
    in groups that a norm with a name has.
    """
    every = distinct_sharings(pair.shape)
    found: list[Fit] = []
    for affine_of, weight, bias in assignments(pair, given):
        found += _with_known_weights(pair, given, every, affine_of, weight, bias)
        if any(fit.fits and fit.affine.offset == 0 for fit in found) and weight is not None:
            # The weight as it is fits: no need to try it around zero.
            break
    fitted = [fit for fit in found if fit.fits]
    if not fitting or any(fit.formula.correction in (0, 1) for fit in fitted):
        return found
    if fitted:
        # A divisor that no one uses is one weight for all elements, too.
        only = {(sharing.axes, ()) for sharing in every}
    limit, plain = pair.x.size, next((m for m in maps(pair, given) if not m.trivial), None)
    if plain is not None:
        # A norm of fewer numbers gives the same map only where it varies along these axes alone.
        limit = plain.free_parameters
        every = tuple(s for s in every if varies_within(s, s.kept, plain.axes))
    if named:
        every = tuple(s for s in every if s.split is None or is_known(s))
    for affine_of, weight, bias in assignments(pair, given):
        if given.weight is not None and given.bias is not None:
            break
        axes = None if plain is None else plain.axes
        found += with_fitted_weights(
            pair, given, every, affine_of, weight, bias, limit, only=only, axes=axes
        )
    if plain is not None:
        # What a map without statistics explains better is explained by it.
        found = [
            replace(fit, fits=False)
            if fit.mean_residual > WORSE_THAN_A_MAP * plain.mean_residual + 0.01 * fit.tolerance
            else fit
            for fit in found
        ]
    return found


def proportional(pair: Pair) -> list[tuple[Sharing, bool]]:
    """The sets of axes that give the output but for a factor of each group, the largest first.

    Each with whether the mean is subtracted.
    """
    screened = screen(pair, distinct_sharings(pair.shape), None, None)
    passed = [one for one in screened if one.misfit <= one.allowed]
    least = min((one.misfit for one in passed), default=0.0)
    near = [one for one in passed if one.misfit <= ALIKE * least]
    near.sort(key=lambda one: (-one.sharing.group_size, one.misfit))
    return [(one.sharing, one.center) for one in near]


def known_fits(pair: Pair, given: Given, every: Sequence[Sharing]) -> Iterator[Fit]:
    """The fits over these sets of axes that need no fitted weights."""
    for affine_of, weight, bias in assignments(pair, given):
        found = _with_known_weights(pair, given, every, affine_of, weight, bias)
        yield from (fit for fit in found if fit.fits)


def nearest_screened(pair: Pair, given: Given, every: Sequence[Sharing]) -> float:
    """How near the nearest of these sets of axes comes: up to 1 it may be the one."""
    found = [
        one.misfit / one.allowed
        for affine_of, weight, bias in assignments(pair, given)
        for one in screen(pair, [s for s in every if affine_of(s)], weight, bias)
    ]
    return min(found, default=math.inf)


def ruled_out(pair: Pair, given: Given, best: Fit) -> Iterator[Fit]:
    """The formula and parameters of a fit over other axes, and other formulas over its own."""
    every = [s for s in distinct_sharings(pair.shape) if s.split is None]
    if best.sharing.split is not None:
        every.append(best.sharing)
    weight, bias = best.weight_along, best.bias_along
    axes = {a for a in range(len(pair.shape))
            if set(best.sharing.dimensions(a)) & set(best.affine.dimensions)}  # fmt: skip
    formulas = [replace(best.formula, passes=1), CENTRED[0], UNCENTRED[0], CENTRED[2]]
    if best.affine.weight_from != "fitted":
        # A fitted weight takes up a divisor.
        formulas.insert(3, CENTRED[1])
    for statistics in [*rough_statistics(pair, every), *running_statistics(pair, given)]:
        own = statistics.sharing.key == best.sharing.key and statistics.running == best.running
        dimensions = tuple(i for a in sorted(axes) for i in statistics.sharing.dimensions(a))
        affine = replace(best.affine, dimensions=dimensions)
        for formula in dict.fromkeys(formulas if own else formulas[:1]):
            if own and formula == best.formula:
                continue
            if statistics.running and not for_running(formula):
                continue
            if formula.correction >= statistics.sharing.group_size:
                continue
            fit = confirm(
                pair, statistics, formula, affine, weight, bias, best.eps,
                (best.eps, best.eps), best.eps_fitted, most=SAMPLED,
            )  # fmt: skip
            if not fit.fits:
                yield fit


def _with_known_weights(
    pair: Pair,
    given: Given,
    every: Sequence[Sharing],
    affine_of: AffineOf,
    weight: Floats | None,
    bias: Floats | None,
) -> Iterator[Fit]:
    lines, noise = Lines.of(pair), pair.noise.summed
    possible = [
        sharing for sharing in every
        if not any(lines.refute(sharing, (*sharing.kept, *affine.dimensions), noise)
                   for affine in affine_of(sharing))
    ]  # fmt: skip
    screened = _screened(pair, possible, affine_of, weight, bias)
    passed = [s for s in screened if s.misfit <= s.allowed]
    scale = _scale(pair, weight, bias)
    if scale is not None:
        passed = list(_alike_in_all_groups(pair, passed, scale))
    kept = max(KEPT, KEPT_ELEMENTS // pair.x.size)
    plain = scale is not None and abs(scale - 1) <= pair.noise.relative(2)
    if len(passed) > KEPT_BESIDE_A_MAP and (
        plain or any(m.free_parameters == 0 for m in maps(pair, given))
    ):
        kept = KEPT_BESIDE_A_MAP
    for one in passed[:kept]:
        if pair.x.size > SAMPLED and pair.noise.compute >= UNITS["float32"]:
            # For a computation in double, sums are not exact enough to refute anything.
            (rough,) = rough_statistics(pair, [one.sharing])
            if not _possible(pair, rough, one.center, weight, bias, SAMPLED):
                continue
        statistics = pair.statistics(one.sharing)
        (affine,) = affine_of(one.sharing)
        yield from _read_formulas(pair, statistics, one.center, affine, weight, bias)
    for statistics in running_statistics(pair, given):
        for affine in affine_of(statistics.sharing):
            for center in (True, False):
                yield from _read_formulas(pair, statistics, center, affine, weight, bias)


def nearest(pair: Pair, given: Given) -> Iterator[Fit]:
    """The plain formula over the sets of axes that come nearest, where nothing fits."""
    every = distinct_sharings(pair.shape)
    whole = [sharing for sharing in every if sharing.split is None]
    for affine_of, weight, bias in assignments(pair, given):
        near = _screened(pair, whole, affine_of, weight, bias) or _screened(
            pair, every, affine_of, weight, bias
        )
        for one in near[:NEAREST]:
            (affine,) = affine_of(one.sharing)
            yield _nearest(pair, pair.statistics(one.sharing), one.center, affine, weight, bias)


def _screened(
    pair: Pair,
    every: Sequence[Sharing],
    affine_of: AffineOf,
    weight: Floats | None,
    bias: Floats | None,
) -> list[Screened]:
    """The sets of axes that the parameters fit, the nearest first."""
    fitting = [sharing for sharing in every if affine_of(sharing)]
    return sorted(screen(pair, fitting, weight, bias), key=lambda s: s.misfit)


def _formulas(statistics: Statistics, center: bool) -> list[Formula]:
    formulas = CENTRED if center else UNCENTRED
    return [f for f in formulas if not statistics.running or for_running(f)]


def _possible(
    pair: Pair,
    statistics: Statistics,
    center: bool,
    weight: Floats | None,
    bias: Floats | None,
    most: int,
) -> bool:
    """Whether a sample of so many elements leaves a formula open."""
    few = measure(pair, statistics, center, weight, bias, most=most)
    formulas = [f for f in _formulas(statistics, center) if not few.refutes(f)]
    if not formulas:
        return False
    possible = any(eps_interval(few, formula) is not None for formula in formulas)
    return possible or _free_correction(few, statistics, center) is not None


def _scale(pair: Pair, weight: Floats | None, bias: Floats | None) -> float | None:
    """The number that the input, with weight and bias, was multiplied by; None where it was not."""
    y = pair.y if bias is None else pair.y - bias
    u = pair.x if weight is None else pair.x * weight
    if pair.mask is not None:
        u, y = u[pair.mask], y[pair.mask]
    ratio = float((u * y).sum()) / max(float((u * u).sum()), 1e-300)
    allowed = pair.noise.bound(2, np.abs(y), 0.0)
    fits = float(np.square(y - ratio * u).sum()) <= 4 * float(np.square(allowed).sum())
    return ratio if fits and ratio > 0 else None


def _alike_in_all_groups(
    pair: Pair, passed: Sequence[Screened], scale: float
) -> Iterator[Screened]:
    """Of those that do not centre the ones whose groups could have one factor."""
    sums = Sums(np.square(pair.x)[None])
    for one in passed:
        if not one.center:
            n = one.sharing.group_size
            values = sums.of(one.sharing, thin=True) / n
            least, most = float(values.min()), float(values.max())
            # One factor for variances so different is possible where eps is much larger.
            inner = float(max(np.float64(scale) ** p / np.float64(most) ** (-p / 2)
                              for p in (-1.0, -2.0)))  # fmt: skip
            if most - least > 16 * pair.noise.relative(n) * most * max(1.0, inner):
                continue
        yield one


def _read_formulas(
    pair: Pair,
    statistics: Statistics,
    center: bool,
    affine: Affine,
    weight: Floats | None,
    bias: Floats | None,
) -> Iterator[Fit]:
    """The formulas that give the factor of every group, with the eps that the factors show."""
    looks = (most for most in LOOKS if pair.x.size >= 2 * most)
    if not all(_possible(pair, statistics, center, weight, bias, most) for most in looks):
        return
    factors = measure(pair, statistics, center, weight, bias)
    formulas = [f for f in _formulas(statistics, center) if not factors.refutes(f)]
    if not formulas:
        return
    correction = _free_correction(factors, statistics, center)
    if correction is not None:
        formulas.append(Formula(center, "auto", correction, "variance"))
    for formula in formulas:
        interval = eps_interval(factors, formula)
        if interval is None:
            continue
        nearest = _Nearest(factors, formula, interval)
        # An eps so near one that does not fit changes no digit of a factor.
        least = float(factors.statistics.base(formula).min()) * pair.noise.unit
        tried: list[tuple[float, float]] = []
        for eps, fitted in _eps_choices(interval, nearest, formula, pair):
            if any(abs(eps - other) <= step for other, step in tried):
                continue
            hypothesis = pair, statistics, formula, affine, weight, bias, eps, interval, fitted
            looks = (most for most in LOOKS if pair.x.size >= 2 * most)
            seen = (confirm(*hypothesis, most=most) for most in looks)
            few = next((fit for fit in seen if not fit.fits), None)
            fit = confirm(*hypothesis) if few is None else few
            if fit.fits:
                yield replace(fit, least=factors.misfit_of(formula, nearest.eps))
                break
            # Nor does one that moves no output as far as the furthest one is off.
            far = 0.5 * (fit.worst - 1) if formula.passes == 1 and pair.unit == 1 else 0.0
            tried.append((eps, max(far, UNSEEN) * least))


def _free_correction(factors: Any, statistics: Statistics, center: bool) -> float | None:
    """A divisor n - c that is neither n nor n - 1: 1 / factor^2 is a line in the variance."""
    keep = factors.informative & (factors.factor > 0)
    own = factors.statistics
    variance = np.broadcast_to(own.var if center else own.meansquare, factors.factor.shape)[keep]
    n = statistics.count
    if statistics.running or not isinstance(n, float) or variance.size < 3 or n < 4:
        return None
    inverse = factors.factor[keep] ** -2.0
    off = 2 * factors.uncertainty[keep] / factors.factor[keep] * inverse
    scale = 1.0 / np.maximum(off, 1e-300)
    columns = np.stack([variance * scale, scale], 1)
    if not (np.isfinite(columns).all() and np.isfinite(inverse * scale).all()):
        return None
    (slope, _), *_ = np.linalg.lstsq(columns, inverse * scale, rcond=None)
    if not slope > 0:
        return None
    correction = n * (1 - 1 / slope)
    rounded = float(round(correction))
    near = 1.5 < correction < n - 1
    if near and abs(correction - rounded) < 0.05 * max(1.0, correction) and rounded < n:
        return rounded
    return None


@dataclass(frozen=True)
class _Nearest:
    """The eps that fits best: sought where no eps in use fits, or where how well it does counts."""

    factors: Factors
    formula: Formula
    interval: tuple[float, float]

    @cached_property
    def eps(self) -> float:
        return self.factors.nearest_eps(self.formula, self.interval)


def _eps_choices(
    interval: tuple[float, float], nearest: _Nearest, formula: Formula, pair: Pair
) -> Iterator[tuple[float, bool]]:
    """Values of eps in the interval with whether they are fitted: those in use come first."""
    low, high = interval
    usual = [eps for eps in usual_eps(formula, pair) if low <= eps <= high]
    if len(usual) > 1 and math.isfinite(high):
        off = dict(zip(usual, nearest.factors.misfits_of(formula, usual), strict=True))
        # Those that are clearly further off than another one come later.
        most = max(pair.noise.chance, CLEARLY_WORSE * min(off.values()))
        usual.sort(key=lambda eps: off[eps] > most)
    yield from ((eps, False) for eps in usual)
    if math.isfinite(high) and high > 0 and pair.unit == 1:
        around, eps = 0.1 * (high - low), nearest.eps
        yield roundest(max(eps - around, low), min(eps + around, high)), True
        yield eps, True


def _nearest(
    pair: Pair,
    statistics: Statistics,
    center: bool,
    affine: Affine,
    weight: Floats | None,
    bias: Floats | None,
) -> Fit:
    """The plain formula with the eps that comes nearest, for what does not fit."""
    formula = (CENTRED if center else UNCENTRED)[0]
    factors = measure(pair, statistics, center, weight, bias, most=SAMPLED)
    keep = factors.informative & (factors.factor > 0)
    eps = 1e-5
    if keep.any():
        shown = factors.factor[keep] ** -2.0
        base = factors.statistics.base(formula)
        shown = shown - np.broadcast_to(base, factors.factor.shape)[keep]
        middle = float(np.median(shown))
        if 1e-12 < middle < 1.0:
            eps = roundest(middle * 0.999, middle * 1.001)
    fit = confirm(
        pair, statistics, formula, affine, weight, bias, eps, (eps, eps), True, most=SAMPLED
    )
    return replace(fit, fits=False)
