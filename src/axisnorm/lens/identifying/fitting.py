"""Weights and biases that are not given: fitted to a sample, then to all data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .evidence import CLEARLY_WORSE, Floats, Pair, Statistics, rough_statistics, spread
from .fit import Affine, AffineOf, Fit, Given, confirm, for_running, running_statistics, usual_eps
from .hypotheses import (
    CENTRED,
    UNCENTRED,
    Formula,
    Sharing,
    affine_choices,
    is_known,
    roundest,
)
from .least_squares import line
from .refuting import Lines, none_between, refuted_for_every_eps
from .sampling import (
    COLUMNS,
    ROWS,
    Sample,
    groups,
    groups_at,
    number_of,
    offsets,
    some,
    summed,
    varying,
)

__all__ = ["CARELESS", "Place", "varies_within", "with_fitted_weights"]

REFINED = 4
"""So many sets of axes with as many weights are looked at closely where weights are fitted."""

NEAR = 30.0
"""How much worse than the best a set of axes may be on a sample before eps is fitted."""

AS_NEAR = 1.1
"""One factor for all groups that leaves no more than so many times what formulas leave is as good
as they are."""

SUSPECTS = (4, 256), (2, 4096)
"""Of so many weights so many elements are searched for some of nearly one variance."""

MOST_SUSPECTS = 16
"""Where more are left the second look takes longer than it saves."""

HELD, HELD_ELEMENTS = 12, 1 << 22
"""So many fits of a sample are held against all data, of small arrays more: where none of them
holds, the output only comes near many."""

SPREAD = 1 << 16
"""Of so many elements those are taken whose groups have every variance."""

REFUTED_ELEMENTS = 1 << 15
"""So many elements are looked at together: of fewer the calls take longer than the numbers."""

CARELESS = "careless"
"""Of what is kept for a pair: the sets of axes, each with the dimensions of a weight, that only the
worst rounding believed explains perhaps."""

Place = tuple[Any, tuple[int, ...]]
"""The axes of a sharing, and the dimensions along which its weight varies."""

SCREENED_EPS = (1e-12, 1e-6, 1e-5, 1e-3)
"""Values of eps that stand for all where weights are fitted to a sample."""

EPS_STEP = 8.0
"""Between variances that differ much so far apart are the values of eps that are tried, and so
many of them at most."""
MOST_EPS = 12

MOST_LEADS = 48

REFUTED = np.ones((2, 2, 2), bool)
"""Of a variance without its root and of other formulas, with and without the mean, without and with
a bias."""

TOGETHER = 8
"""So many values of eps are tried at once where the border of those that pass is sought."""

EVERY, FEW = slice(None), slice(None, None, 4)
"""The rows of a sample, and those that are enough to refute most formulas."""

MOST_OPEN, BETWEEN = 8, 8
"""Between up to so many neighbours of those tried so many more values of eps are tried each."""

MOST_USUAL = 4
"""So many values of eps in use that fit a sample are held against all data."""

OPEN = 1.5
"""What rounding allows may be so much more beside another bias."""

LARGE = 10.0
"""An eps so many times larger than variances makes the factor the same for all groups."""

LARGE_FOR_ONE = 0.05
"""So many times with one weight for all: with an eps near the variances, too, they give any two
factors."""

EXPLAINED = 0.05
EXPLAINED_VAR = 0.2
"""What a hypothesis must leave over at most, of the output's variance, to be looked at: with an
eps between those that are tried. A variance without its root moves with eps twice as much."""

EVIDENCE_BITS = 60.0
"""What a fit with fitted weights must explain beyond them, so that it is no chance."""


def with_fitted_weights(
    pair: Pair,
    given: Given,
    every: Sequence[Sharing],
    affine_of: AffineOf,
    weight: Floats | None,
    bias: Floats | None,
    limit: int,
    *,
    only: Collection[Place] | None = None,
    axes: Sequence[int] | None = None,
) -> list[Fit]:
    """Fit what is missing of weight and bias for sets of axes that share them.

    With fewer numbers than ``limit``, with which a map without statistics explains the output, and
    in these places alone, or along these axes, where they are told.
    """
    fitter = _Fitter(pair, affine_of, weight, bias, limit, only, axes)
    stages = (
        [sharing for sharing in every if sharing.split is None],
        [sharing for sharing in every if sharing.split is not None and is_known(sharing)],
        [sharing for sharing in every if sharing.split is not None and not is_known(sharing)],
    )
    found: list[Fit] = []
    given_statistics = list(running_statistics(pair, given))
    for stage in stages:
        found += fitter.fits([*given_statistics, *stage])
        given_statistics = []
        if any(fit.fits for fit in found):
            break
    return found


def varies_within(sharing: Sharing, dimensions: Iterable[int], axes: Sequence[int]) -> bool:
    """Whether what varies along these dimensions varies along these axes of the tensor alone."""
    own = {i for axis in axes for i in sharing.dimensions(axis)}
    return all(i in own or sharing.expanded[i] == 1 for i in dimensions)


@dataclass(frozen=True, eq=False)
class _Lead:
    """A set of axes with weights along others that came near on a sample."""

    sharing: Sharing
    dimensions: tuple[int, ...]
    center: bool
    with_bias: bool
    family: str
    """Which formulas: those of one power of the variance."""
    score: float
    """What is left over what rounding allows, for each element that is not used up."""
    numbers: int
    """How many numbers are fitted."""
    free: bool
    """Whether each weight meets one group alone."""
    statistics: Statistics


class _Fitter:
    """Least squares for weight and bias on a sample, then on all data."""

    def __init__(
        self,
        pair: Pair,
        affine_of: AffineOf,
        weight: Floats | None,
        bias: Floats | None,
        limit: int = 0,
        only: Collection[Place] | None = None,
        axes: Sequence[int] | None = None,
    ) -> None:
        self.pair = pair
        self.only = only
        self.axes = axes
        self.limit = limit
        self.affine_of = affine_of
        self.weight = weight
        self.bias = bias
        self.y = pair.y if bias is None else pair.y - bias
        self.slope = float(self.y.std()) / max(float(pair.x.std()), 1e-300)
        self.lines = Lines.of(pair)
        self.random = np.random.default_rng(0)
        self.samples: dict[Any, Sample] = {}
        self.left = max(HELD, HELD_ELEMENTS // pair.x.size)
        """So many fits may still be held against all data."""

    def fits(self, sources: Iterable[Sharing | Statistics]) -> list[Fit]:
        """The fits of fewest numbers, sought in the order of their numbers."""
        leads = [lead for lead in self.leads(*sources) if lead.numbers < self.limit]
        near: list[_Lead] = []
        for free in (False, True):
            # Where each weight meets one group it takes up the factor, and the fit is perfect
            # though eps is not known yet: that says nothing against the others.
            own = sorted((lead for lead in leads if lead.free == free), key=lambda d: d.score)
            most = max(NEAR * own[0].score, 1.0) if own else 0.0
            near += [lead for lead in own[:MOST_LEADS] if lead.score <= most]
        near.sort(key=lambda lead: (lead.numbers, lead.score))
        alike = itertools.groupby(near, key=lambda lead: lead.numbers)
        chosen = [list(leads)[:REFINED] for _, leads in alike]
        found: list[Fit] = []
        # Those of fewest numbers alone, as they may fit; then all others at once.
        for part in (chosen[:1], chosen[1:]):
            made = [[trial for lead in leads for trial in self.trials(lead)] for leads in part]
            refute(list(itertools.chain(*made)), FEW)
            for trials in made:
                found += self.refined(trials)
                if any(fit.fits for fit in found) or self.left <= 0:
                    return found
        return found

    # ---- screening on a sample

    def choices(self, sharing: Sharing) -> list[tuple[int, ...]]:
        """The dimensions along which the weight may vary, none for one number."""
        if self.weight is not None or self.bias is not None:
            return [affine.dimensions for affine in self.affine_of(sharing)]
        found = affine_choices(sharing)
        # Of one group alone, or in another unit, one number takes up whatever factor there is.
        shown = self.kept(sharing) and self.pair.unit == 1
        if shown and (sharing.split is None or is_known(sharing)):
            found = [(), *found]
        if sharing.split is not None:
            own = set(sharing.dimensions(sharing.split))
            axes = [set(sharing.dimensions(axis)) for axis in range(len(sharing.axes))]
            if is_known(sharing):
                # Beside the channels' weights one for each element of a sample is in use.
                axes.append(set().union(*axes[1:]))
            found = [d for d in found if set(d) <= own or set(d) in axes]
        return found

    def leads(self, *sources: Sharing | Statistics) -> Iterator[_Lead]:
        """What came near on a sample, of what is not refuted before."""
        places = [place for source in sources for place in self.places(source)]
        for place, refuted in zip(places, self.refuted(places), strict=True):
            if not refuted.all():
                yield from self.near(*place, refuted)

    def places(self, source: Sharing | Statistics) -> Iterator[tuple[Statistics, tuple[int, ...]]]:
        """The dimensions along which a weight may vary, where some lines are not refuted."""
        statistics = source if isinstance(source, Statistics) else None
        sharing = source.sharing if isinstance(source, Statistics) else source
        kept = self.kept(sharing if statistics is None else statistics)
        along, worst = sharing.touched(kept), self.pair.noise.worst
        for dimensions in self.choices(sharing):
            if self.lines.refute_axes(along | sharing.touched(dimensions), worst):
                continue
            if self.only is not None and (sharing.axes, dimensions) not in self.only:
                continue
            if self.axes is not None and not varies_within(sharing, dimensions, self.axes):
                continue
            numbers = number_of(sharing, dimensions)
            if self.pair.x.size < 2 * numbers or numbers >= self.limit:
                continue
            if self.without_line(sharing, kept, dimensions):
                continue
            if statistics is None:
                (statistics,) = rough_statistics(self.pair, [sharing])
            if not self.without_line(sharing, kept, dimensions, statistics):
                yield statistics, dimensions

    def kept(self, source: Sharing | Statistics) -> list[int]:
        """The dimensions along which statistics vary."""
        sharing = source.sharing if isinstance(source, Statistics) else source
        told = varying(source) if isinstance(source, Statistics) else sharing.kept
        return [i for i in told if sharing.expanded[i] > 1]

    def near(
        self,
        statistics: Statistics,
        dimensions: tuple[int, ...],
        refuted: NDArray[np.bool_],
    ) -> Iterator[_Lead]:
        sharing = statistics.sharing
        each = self.pair.x.size // max(number_of(sharing, dimensions), 1)
        # Where each weight meets one group alone, weight and bias take up anything.
        free = set(self.kept(statistics)) <= set(dimensions)
        sample = self.sample(sharing, dimensions)
        group = groups(statistics, sample, dimensions)
        meansquare = statistics.meansquare.ravel()[group]
        var = statistics.var.ravel()[group]
        for center, own in zip((True, False), refuted.transpose(1, 0, 2).tolist(), strict=True):
            (no_var, no_var_bias), (no_root, no_root_bias) = own
            no_weight, no_bias = no_var and no_root, no_var_bias and no_root_bias
            if no_weight and no_bias:
                continue
            d = sample.x - statistics.mean.ravel()[group] if center else sample.x
            if sample.known is not None:
                d = d * sample.known
            about = math.sqrt(float(meansquare.mean())) if center else 0.0
            allowed = self._allowed(statistics, sample, about)
            given = center or statistics.running
            unit = self.pair.noise.unit
            tried = list(_factors(var if given else meansquare, unit))
            if no_root and no_root_bias:
                tried = [(kind, f) for kind, f in tried if kind == "var"]
            elif not given:
                # The uncentred value over the centred deviation.
                tried += [("deviation", f) for k, f in _factors(var, unit) if k == "root"]
            families, factors = [k for k, _ in tried], [f for _, f in tried]
            if not factors:
                continue
            lefts = sample.left(d, [*factors, np.ones_like(d)])
            shown = not given and _shows(meansquare, statistics.meansquare)
            numbers = number_of(sharing, dimensions)
            for with_bias in (0, 1):
                if no_bias if with_bias else no_weight:
                    continue
                if with_bias and (self.bias is not None or free or each <= 2):
                    continue
                if not with_bias and (self.weight is not None or (free and not center)):
                    continue
                share = max(1 - (1 + with_bias) / sample.x.shape[1], 1e-9)
                # The sums that it is the difference of leave these digits open.
                floor = 1e-14 * float(sample.sums[1].sum())
                best: dict[str, float] = {}
                worst: dict[str, float] = {}
                for family, left in zip(families, lefts[with_bias][:-1].tolist(), strict=True):
                    left = max(left, floor)
                    best[family] = min(left, best.get(family, math.inf))
                    worst[family] = max(left, worst.get(family, 0.0))
                closed = (no_var_bias, no_root_bias) if with_bias else (no_var, no_root)
                ranked = [family for family in best if not closed[family != "var"]]
                ranked.sort(key=lambda family: best[family])
                if not ranked or (free and closed[1]):
                    continue
                total = float(sample.sums[1 + with_bias].sum())
                most = NEAR * best[ranked[0]]
                one = max(float(lefts[with_bias][-1]), floor)
                if not free and best[ranked[0]] > NEAR * max(one, allowed):
                    # One factor for all groups is so much nearer than any of a formula.
                    continue
                if shown and one < AS_NEAR * best[ranked[0]]:
                    # It is as near, and without the mean nothing else shows statistics.
                    continue
                for family in ["root"] if free else ranked[:2]:
                    left = best[family]
                    explained = EXPLAINED_VAR if family == "var" else EXPLAINED
                    if left > min(most, explained * total):
                        continue
                    score = left / allowed / share
                    # Many an eps was tried: where none matters beside what is too much, none will.
                    flat = worst[family] - left < left * (1 - 1 / max(score, 1.0))
                    if flat and family == "root" and left > 100 * floor:
                        continue
                    yield _Lead(
                        sharing,
                        dimensions,
                        center,
                        bool(with_bias),
                        family,
                        score,
                        numbers * (2 if with_bias and self.weight is None else 1),
                        free,
                        statistics,
                    )

    def without_line(
        self,
        sharing: Sharing,
        kept: Sequence[int],
        dimensions: tuple[int, ...],
        statistics: Statistics | None = None,
    ) -> bool:
        """Whether elements of one group and one weight are on no line."""
        fixed = *kept, *dimensions
        noise, worst = self.pair.noise.summed, self.pair.noise.worst
        if not self.lines.refute(sharing, fixed, noise, statistics):
            return False
        if statistics is None:
            # Too much may be allowed: then the next look decides.
            return self.lines.refute(sharing, fixed, worst)
        if not self.lines.refute(sharing, fixed, worst, statistics):
            self.leave_open(sharing, dimensions)
        return True

    def leave_open(self, sharing: Sharing, dimensions: tuple[int, ...]) -> None:
        """Keep what careless arithmetic explains perhaps."""
        self.pair.cache.setdefault(CARELESS, set()).add((sharing.axes, dimensions))

    def refuted(
        self, places: Sequence[tuple[Statistics, tuple[int, ...]]]
    ) -> list[NDArray[np.bool_]]:
        """Whether no formula can fit, for each set of axes with the dimensions of a weight.

        Each array is by kind of formula (of a variance without its root, others), with and without
        the mean, without a bias and with one.
        """
        found: dict[int, NDArray[np.bool_]] = {}
        noise, cache = self.pair.noise.summed, self.pair.cache
        bare = self.weight is None and self.bias is None
        for k, (statistics, dimensions) in enumerate(places):
            known = bare and not statistics.running
            if known and ("refuted", noise, statistics.sharing.axes, dimensions) in cache:
                found[k] = REFUTED
        left = [k for k in range(len(places)) if k not in found]
        exact, worst, near = {}, {}, {}
        for most in SUSPECTS:
            samples = {k: self.sample(places[k][0].sharing, places[k][1], most) for k in left}
            alike = itertools.groupby(
                sorted(left, key=lambda k: samples[k].x.shape), key=lambda k: samples[k].x.shape
            )
            for shape, group in alike:
                own, step = list(group), max(1, REFUTED_ELEMENTS // math.prod(shape))
                for start in range(0, len(own), step):
                    some = own[start : start + step]
                    answers = self._refuted([(*places[k], samples[k]) for k in some])
                    for place, k in enumerate(some):
                        exact[k], worst[k], near[k] = (a[..., place] for a in answers)
            for k in left:
                centred, others = exact[k][..., 0], exact[k][..., 1:].all(-1)
                found[k] = np.stack([centred, others], axis=1)
            left = [
                k for k in left
                if samples[k].x.shape[1] == most[1] and (near[k] & ~exact[k]).any()
            ]  # fmt: skip
            if len(left) > MOST_SUSPECTS:
                break
        for k in exact:
            statistics, dimensions = places[k]
            if (exact[k] & ~worst[k]).any():
                self.leave_open(statistics.sharing, dimensions)
            elif bare and not statistics.running and worst[k].all():
                # What the most that is believed does not explain, no later look does.
                cache["refuted", noise.worst, statistics.sharing.axes, dimensions] = True
        return [found[k] for k in range(len(places))]

    def _refuted(
        self, places: Sequence[tuple[Statistics, tuple[int, ...], Sample]]
    ) -> list[NDArray[np.bool_]]:
        """Three arrays: for what is believed of rounding, for the worst that is, and for the
        former if all variances were the same.

        Each is by kind of formula (of a variance without its root, others), without a bias and with
        one, by numerator (the mean subtracted, not, the uncentred value over the centred deviation)
        and by place.
        """
        d, variance, about, largest = [], [], [], []
        for statistics, dimensions, sample in places:
            group = groups(statistics, sample, dimensions)
            mean, var, meansquare = (
                v.ravel()[group] for v in (statistics.mean, statistics.var, statistics.meansquare)
            )
            known = 1.0 if sample.known is None else sample.known
            plain = sample.x * known
            d.append([(sample.x - mean) * known, plain, plain])
            variance.append([var, var if statistics.running else meansquare, var])
            about.append([math.sqrt(float(meansquare.max())), 0.0, 0.0])
            largest.append(float(np.max(np.abs(known))))
        noise, shape = self.pair.noise.summed, places[0][2].x.shape
        masked = self.pair.mask is not None

        def three(values: Sequence[Any]) -> NDArray[Any]:
            """The same for each of three hypotheses of a place."""
            return np.repeat(np.asarray(values), 3, axis=0)

        found, near = refuted_for_every_eps(
            (noise, noise.worst),
            np.asarray(d).reshape(-1, *shape),
            three([sample.y for _, _, sample in places]),
            three([sample.valid for _, _, sample in places]) if masked else None,
            np.asarray(variance).reshape(-1, *shape),
            three([summed(statistics) for statistics, _, _ in places]),
            np.asarray(about).ravel(),
            three(largest),
        )
        answers = (*found, near[0])
        return [own.reshape(2, 2, -1, 3).transpose(0, 1, 3, 2) for own in answers]

    def _at(self, values: Floats, flat: NDArray[np.int64]) -> Floats:
        return np.broadcast_to(values, self.pair.shape).reshape(-1)[flat]

    def _allowed(self, statistics: Statistics, sample: Sample, about: float) -> float:
        """About the sum of squares that rounding allows."""
        noise, n = self.pair.noise, summed(statistics)
        slope = self.slope
        outputs = noise.relative(n) ** 2 * float(sample.sums[1].sum())
        return max(outputs + sample.y.size * noise.bound(n, 0.0, slope, about) ** 2, 1e-300)

    def sample(
        self,
        sharing: Sharing,
        dimensions: tuple[int, ...],
        most: tuple[int, int] = (ROWS, COLUMNS),
    ) -> Sample:
        # Along whole axes the sample does not depend on how others are split.
        shape = sharing.expanded
        axes = tuple(a for a in range(len(sharing.axes))
                     if set(sharing.dimensions(a)) <= set(dimensions))  # fmt: skip
        covered = {i for a in axes for i in sharing.dimensions(a)}
        key: Any = axes if covered == set(dimensions) else (sharing.axes, dimensions)
        key = key, most
        found = self.samples.get(key)
        if found is None:
            others = tuple(i for i in range(len(shape)) if i not in dimensions)
            rows = some(math.prod(shape[i] for i in dimensions), most[0], self.random)
            columns = some(math.prod(shape[i] for i in others), most[1], self.random)
            found = self.samples[key] = self.picked(shape, dimensions, rows, columns)
        return found

    def picked(
        self,
        shape: Sequence[int],
        dimensions: Sequence[int],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
    ) -> Sample:
        """The elements at these places along the weight's dimensions and along the others."""
        others = [i for i in range(len(shape)) if i not in dimensions]
        flat = offsets(shape, dimensions, rows)[:, None] + offsets(shape, others, columns)
        pair = self.pair
        valid = None if pair.mask is None else pair.mask.ravel()[flat]
        y = self.y.ravel()[flat]
        return Sample(
            rows,
            columns,
            pair.x.ravel()[flat],
            y if valid is None else np.where(valid, y, 0.0),
            valid,
            None if self.weight is None else self._at(self.weight, flat),
        )

    # ---- the formula and its eps, on elements of groups of every variance

    def refined(self, trials: Sequence[_Trial]) -> list[Fit]:
        """The fits of trials of as many numbers."""
        open_ = [trial for trial in trials if not trial.refuted]
        refute(open_, EVERY)
        # How near the nearest came is asked for where nothing fits.
        ordered = sorted(open_ or trials, key=lambda trial: trial.least)
        near = [t for t in ordered if t.least <= max(NEAR**2 * ordered[0].least, 1.0)]
        near = near[: 2 * REFINED]
        fits = [trial.fit(self) for trial in near if self.left > 0 and not trial.refuted]
        found = [fit for fit in fits if fit is not None]
        return found or [trial.nearly() for trial in near[:1]]

    def trials(self, lead: _Lead) -> Iterator[_Trial]:
        sharing, statistics = lead.sharing, lead.statistics
        if not statistics.running:
            statistics = self.pair.statistics(sharing)
            lead = replace(lead, statistics=statistics)
        elements = _Elements(self, lead, self.spread_sample(lead))
        seen = set()
        for formula in CENTRED if lead.center else UNCENTRED:
            # A given weight takes up no factor.
            alike = formula if elements.fixed else formula.without_constant_factor()
            if formula.passes == 2 or alike in seen or _family(formula) != lead.family:
                continue
            if statistics.running and not for_running(formula):
                continue
            if lead.free and not alike.plain:
                # A weight for each group takes up whatever formula there is.
                continue
            seen.add(alike)
            yield _Trial(elements, alike)

    def spread_sample(self, lead: _Lead) -> Sample:
        """Elements of groups of every variance, from the least to the largest."""
        sharing, statistics, dimensions = lead.sharing, lead.statistics, lead.dimensions
        key = "spread", sharing.axes, dimensions, lead.center, statistics.running
        found = self.samples.get(key)
        if found is None:
            shape = sharing.expanded
            others = tuple(i for i in range(len(shape)) if i not in dimensions)
            rows = some(number_of(sharing, dimensions), ROWS, self.random)
            every = some(math.prod(shape[i] for i in others), SPREAD, self.random)
            first = groups_at(statistics, dimensions, rows[:1], every)
            value = (statistics.var if lead.center else statistics.meansquare).ravel()[first[0]]
            order = np.argsort(value, kind="stable")
            take = np.unique(np.linspace(0, order.size - 1, COLUMNS).round().astype(np.int64))
            found = self.picked(shape, dimensions, rows, every[order[take]])
            self.samples[key] = found
        return found


def refute(trials: Sequence[_Trial], rows: slice) -> None:
    """Find what trials leave over for every eps, and which of them none explains."""
    for own in _alike(trials):
        for trial, curve in zip(own, curves(own, [t.seen_eps() for t in own], rows), strict=True):
            trial.keep(curve)
    between = {trial: eps for trial in trials if (eps := trial.between()) is not None}
    for own in _alike(between):
        # Nearer to one another they refute more.
        for trial, curve in zip(own, curves(own, [between[t] for t in own], rows), strict=True):
            ratios = np.square(curve.left) / curve.allowed
            count = len(between[trial]) // (BETWEEN + 1)
            ratios = ratios[: count * (BETWEEN + 1)].reshape(count, BETWEEN + 1, -1)
            trial.refuted = all(none_between(part) for part in ratios)


def _alike(trials: Iterable[_Trial]) -> Iterable[list[_Trial]]:
    """Those that are held against the data at once: for one, the calls take the time."""
    alike: dict[Any, list[_Trial]] = {}
    for trial in trials:
        key = trial.y.shape, trial.valid is None, trial.lead.with_bias, trial.fixed
        alike.setdefault(key, []).append(trial)
    return alike.values()


@dataclass(frozen=True, eq=False)
class _Curve:
    """What a formula leaves over with several values of eps, each with each weight."""

    rows: slice
    eps: Sequence[float]
    left: Floats
    """The length of what is left over."""
    allowed: Floats
    """What rounding allows of its square."""
    size: Floats
    """The length of what the weight multiplies."""
    about: Floats
    """The same, less its mean where a bias was fitted."""


def curves(
    trials: Sequence[_Trial], several: Sequence[Sequence[float]], rows: slice
) -> Iterator[_Curve]:
    """Those of trials of one kind."""
    first, most = trials[0], max(map(len, several))
    # The last one fills up shorter lists.
    several = [[*eps, *itertools.repeat(eps[-1], most - len(eps))] for eps in several]
    u = np.stack([
        trial.normalized(np.asarray(eps)[:, None, None], rows)
        for trial, eps in zip(trials, several, strict=True)
    ])  # fmt: skip
    y = np.stack([trial.y[rows] for trial in trials])[:, None]
    valid = None
    if first.valid is not None:
        valid = np.stack([trial.valid[rows] for trial in trials if trial.valid is not None])
        valid = valid[:, None]
        u = np.where(valid, u, 0.0)
    fitted = line(u, y, valid, (3,), first.lead.with_bias, first.fixed)
    left, size, about = (
        np.sqrt(np.einsum("tekl,tekl->tek", v, v)) for v in (fitted.left, u, fitted.about)
    )
    for place, trial in enumerate(trials):
        count = fitted.count[0 if valid is None else place]
        bias = fitted.bias[place if first.lead.with_bias else 0]
        allowed = np.broadcast_to(trial.allowing(count, bias, rows)[..., 0], left[place].shape)
        yield _Curve(rows, several[place], left[place], allowed, size[place], about[place])


def _family(formula: Formula) -> str:
    if formula.scale == "var":
        return "var"
    if formula.scale == "sqrt_std":
        return "fourth root"
    return "deviation" if formula.scale == "std" and not formula.center else "root"


def _shows(some: Floats, every: Floats) -> bool:
    """Whether the variances of some elements are about as different as all are."""
    least, most = float(every.min()), float(every.max())
    return least > 0 and math.log(most / least) <= 2 * math.log(float(some.max() / some.min()))


def _factors(value: Floats, unit: float) -> Iterator[tuple[str, Floats]]:
    """The factors that are tried first, with an eps of every size that matters.

    Args:
        value: the variances, or mean squares, of the elements of a sample.
        unit: the relative error of a rounding: a smaller eps changes no digit.
    """
    least, most = float(value.min()), float(value.max())
    if most == 0:
        return
    safe = value
    if least == 0:
        safe = np.where(value > 0, value, np.inf)
        least = float(safe.min())
    few = np.sort(safe.ravel()[:: max(1, safe.size // 64)])
    middle = float(few[few.size // 2])
    if not math.isfinite(middle):
        middle = most
    root = np.sqrt(safe)
    yield "root", 1.0 / root
    # Where variances differ much, every size between them changes the factors in its own way.
    between = range(-1, min(math.ceil(math.log(most / least, EPS_STEP)) + 2, MOST_EPS))
    own = [least * EPS_STEP**k for k in between] if most > 4 * least else [middle]
    for eps in (*SCREENED_EPS, *own):
        if unit * least < eps:
            yield "root", 1.0 / np.sqrt(value + eps)
    yield "var", 1.0 / safe
    yield "fourth root", 1.0 / np.sqrt(root)
    for eps in own if most > 4 * least else [0.3 * middle]:
        yield "var", 1.0 / (value + eps)
        yield "fourth root", 1.0 / np.sqrt(root + math.sqrt(eps))


class _Elements:
    """A sample of a lead's elements: what any of its formulas is held against."""

    def __init__(self, fitter: _Fitter, lead: _Lead, sample: Sample) -> None:
        statistics = lead.statistics
        self.lead, self.pair = lead, fitter.pair
        self.group = groups(statistics, sample, lead.dimensions)
        self.y, self.valid = sample.y, sample.valid
        self.d = sample.x - statistics.mean.ravel()[self.group] if lead.center else sample.x
        self.fixed = sample.known is not None
        if sample.known is not None:
            self.d = self.d * sample.known
        about = np.sqrt(statistics.meansquare.ravel()[self.group]) if lead.center else 0.0
        noise, n = self.pair.noise, summed(statistics)
        self.relative = noise.relative(n)
        square = np.square(noise.bound(n, np.abs(self.y), sample.slope, about))
        square = np.broadcast_to(square, self.y.shape)
        if self.valid is not None:
            square = np.where(self.valid, square, 0.0)
        self.allowed = square.sum(1)


class _Trial:
    """A formula for a lead: the eps with which weights fit best, and between which they fit."""

    tried: dict[float, tuple[float, float]]
    """What is left over what rounding allows, in all and for the worst weight, for each eps."""
    least: float
    """The least of them in all."""
    curve: _Curve
    refuted = False
    """Whether no eps leaves every weight as little as rounding."""

    def __init__(self, elements: _Elements, formula: Formula) -> None:
        lead, pair = elements.lead, elements.pair
        statistics = lead.statistics
        self.lead, self.formula, self.pair, self.elements = lead, formula, pair, elements
        self.y, self.valid, self.d = elements.y, elements.valid, elements.d
        self.fixed = elements.fixed
        full = np.broadcast_to(statistics.base(formula), statistics.mean.shape)
        self.base = full.ravel()[elements.group]
        self.allowed = np.maximum(elements.allowed * formula.sensitivity**2, 1e-300)
        self.relative = elements.relative * formula.sensitivity
        self.middle = float(np.median(self.base[self.base > 0])) if (self.base > 0).any() else 1.0
        self.grid = {*usual_eps(formula, pair), *(self.middle * 10.0**k for k in range(-8, 4))}
        if formula.placement == "max":
            # Clamped everywhere, it would be one factor for all: no statistics.
            self.grid = {eps for eps in self.grid if eps < float(self.base.max())} or {0.0}
        # Below this size no digit of a factor shows eps: all that are in use are one.
        self.unseen = 0.01 * pair.noise.unit * float(self.base.min())

    def seen_eps(self) -> list[float]:
        """The values of eps that are tried first and differ in some digit."""
        return sorted({eps if eps > self.unseen else 0.0 for eps in self.grid})

    def keep(self, curve: _Curve) -> None:
        """Keep what was found."""
        square = np.square(curve.left)
        total, worst = square.sum(1) / curve.allowed.sum(1), (square / curve.allowed).max(1)
        pairs = zip(total.tolist(), worst.tolist(), strict=True)
        found = dict(zip(curve.eps, pairs, strict=True))
        self.curve = curve
        self.tried = {eps: found[eps if eps > self.unseen else 0.0] for eps in self.grid}
        self.least = min(total for total, _ in self.tried.values())

    def between(self) -> list[float] | None:
        """Values of eps between those tried that show whether none fits; None where some may."""
        if self.least <= 1:
            return None
        open_ = np.flatnonzero(~self.none_passes(self.curve)).tolist()
        if not open_:
            self.refuted = True
            return None
        eps = self.curve.eps
        if len(open_) > MOST_OPEN or any(not eps[k] or k + 1 == len(eps) for k in open_):
            return None
        points = (np.geomspace(eps[k], eps[k + 1], BETWEEN + 1).tolist() for k in open_)
        return list(itertools.chain(*points))

    def none_passes(self, curve: _Curve) -> NDArray[np.bool_]:
        """Whether some weight leaves more than rounding allows, for each eps up to the next one.

        Relative to one group the factors of an eps lie between those of the two that were tried
        next to it. So they are those of either but for a share, and what is left over is no
        shorter than what that one leaves, less the share of what the weight gives.
        """
        y, base = self.y[curve.rows], self.base[curve.rows]
        y = y if self.valid is None else np.where(self.valid[curve.rows], y, 0.0)
        length = np.sqrt(np.square(y).sum(1))
        least, most = base.min(1), base.max(1)
        eps, (_, a) = np.asarray(curve.eps)[:, None], self.formula.exponents
        if self.formula.placement == "max":
            inner = np.maximum(least, eps), np.maximum(most, eps)
        else:
            inner = least + eps, most + eps
        with np.errstate(all="ignore"):
            ratio = (inner[1] / inner[0]) ** -a
            # Beyond the largest eps all factors become one.
            share = np.sqrt(ratio / np.concatenate([ratio[1:], np.ones_like(ratio[:1])])) - 1
            above = np.zeros(curve.left.shape, bool)
            # From the eps before and from the one after, which the last stretch does not have.
            for here, part in ((slice(None), slice(None)), (slice(1, None), slice(-1))):
                moved = share[part] * curve.size[here]
                own = curve.about[here] - moved
                weight = 1.0 if self.fixed else length / own
                rest = curve.left[here] - weight * moved
                far = (own > 0) & (rest > 0) & (np.square(rest) > OPEN * curve.allowed[here])
                above[part] |= far
        return np.asarray(above.any(1))

    def normalized(self, eps: float | Floats, rows: slice = EVERY) -> Floats:
        """What the weights multiply."""
        _, a = self.formula.exponents
        base = self.base[rows]
        inner = np.maximum(base, eps) if self.formula.placement == "max" else base + eps
        with np.errstate(all="ignore"):
            factor = 1 / np.sqrt(inner) if a == -0.5 else inner**a
        return np.asarray(self.d[rows] * np.where(inner > 0, factor, 0.0))

    def ratio(self, eps: float) -> tuple[float, float]:
        """What is left over what rounding allows: in all, and for the worst weight."""
        return self.ratios([eps])[eps]

    def ratios(self, several: Sequence[float]) -> dict[float, tuple[float, float]]:
        """The same for several eps at once: for one, the calls take longer than the numbers."""
        square, allowed = self.squares(several)
        total, worst = square.sum(1) / allowed.sum(1), (square / allowed).max(1)
        return dict(zip(several, zip(total.tolist(), worst.tolist(), strict=True), strict=True))

    def squares(self, several: Sequence[float]) -> tuple[Floats, Floats]:
        """What is left over and what rounding allows of it, for each eps and each weight."""
        eps = np.asarray(several, float)[:, None, None]
        valid = None if self.valid is None else self.valid[None]
        lead = self.lead
        fitted = line(self.normalized(eps), self.y[None], valid, (2,), lead.with_bias, self.fixed)
        allowed = np.broadcast_to(
            self.allowing(fitted.count, fitted.bias)[..., 0], fitted.left.shape[:2]
        )
        return np.square(fitted.left).sum(2), allowed

    def allowing(self, count: Floats, bias: Floats, rows: slice = EVERY) -> Floats:
        """What rounding allows of the squares of what is left over, for each weight."""
        # The sum of product and bias may be small where both are not.
        return self.allowed[rows, None] + count * np.square(self.relative * bias)

    def line(self, eps: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Weights and biases, what they leave over, and what rounding allows of its squares."""
        fitted = line(
            self.normalized(eps), self.y, self.valid, (1,), self.lead.with_bias, self.fixed
        )
        allowed = self.allowing(fitted.count, fitted.bias)[:, 0]
        return fitted.weight, fitted.bias, fitted.left, allowed

    def passes(self, eps: float) -> bool:
        """Whether weights exist with which rounding explains all that is left."""
        return self.ratio(eps)[1] <= 1.0

    def fit(self, fitter: _Fitter) -> Fit | None:
        """The fit on all data, None where it says nothing of statistics."""
        # Squares were compared: an eps in use is not clearly further off than the nearest one.
        most = max(CLEARLY_WORSE**2 * self.least, self.pair.noise.chance**2)
        usual = [eps for eps in usual_eps(self.formula, self.pair)
                 if eps in self.tried and self.tried[eps][1] <= 1.0
                 and self.tried[eps][0] <= most]  # fmt: skip
        if not usual:
            relatives = list(self.relatives())
            found = self.ratios([own for _, _, own in relatives]) if relatives else {}
            for formula, eps, own in relatives:
                if found[own][1] <= 1.0:
                    interval = self.interval(own)
                    scaled = interval[0] * (eps / own), interval[1] * (eps / own)
                    return self.confirmed(fitter, eps, scaled, False, formula)
        if not usual:
            near = min(self.tried, key=lambda eps: self.tried[eps][0])
            if near > 10 * LARGE * self.middle:
                return None
            if self.flat():
                return self.nearly(near)
        best, fitted = (usual[0], False) if usual else (self.nearest(), True)
        if not self.passes(best) or (fitted and self.pair.unit != 1):
            return self.nearly(best)
        known = None if fitted else self.confirmed(fitter, best, (best, best), False)
        seen = {eps if eps > self.unseen else 0.0: eps for eps in reversed(usual)}
        for other in list(reversed(seen.values()))[1:MOST_USUAL]:
            # Weights of a sample have fewer elements to agree with.
            if known is None or known.fits or fitter.left <= 0:
                break
            best, known = other, self.confirmed(fitter, other, (other, other), False)
        if known is not None and not known.fits:
            return known
        high = self.edge(best, down=False)
        # One number for all takes up the factor that an eps above all variances gives.
        alone = not self.lead.center or not self.lead.dimensions or fitted
        unbounded = high == math.inf and alone
        most = LARGE if self.lead.dimensions else LARGE_FOR_ONE
        if unbounded or (fitted and best > most * self.middle):
            return None
        interval = self.edge(best, down=True), high
        if fitted:
            around = 0.1 * (interval[1] - interval[0])
            best = roundest(max(best - around, interval[0]), min(best + around, interval[1]))
        if known is not None:
            return replace(known, interval=interval)
        return self.confirmed(fitter, best, interval, fitted)

    def flat(self) -> bool:
        """Whether eps hardly matters, of all sizes, beside what is too much left over."""
        totals = [total for total, _ in self.tried.values()]
        least, most = min(totals), max(totals)
        return least > 1 and most - least < least - 1

    def relatives(self) -> Iterator[tuple[Formula, float, float]]:
        """Formulas that differ by a constant factor: an eps in use, and what it is here."""
        n = self.lead.statistics.count
        running = self.lead.statistics.running
        if self.fixed or self.formula.correction or running or not isinstance(n, float):
            return
        h, _ = self.formula.exponents
        sample = replace(self.formula, correction=1)
        length = replace(self.formula, scale="l2")
        for formula, factor in ((sample, n / (n - 1)), (length, n)):
            known = formula in CENTRED or formula in UNCENTRED
            for eps in usual_eps(formula, self.pair) if known else ():
                if eps:
                    yield formula, eps, eps / factor**h

    def nearest(self) -> float:
        """The eps with the least left over, closer and closer around the best one tried."""
        order = sorted(self.tried)
        place = min(range(len(order)), key=lambda i: self.tried[order[i]][0])
        low = order[max(place - 1, 0)] or self.middle * 1e-10
        high = order[min(place + 1, len(order) - 1)]
        left, right = math.log(max(low, 1e-300)), math.log(max(high, 1e-300))
        best, before = math.exp((left + right) / 2), math.inf
        for step in range(27):  # each leaves a quarter: as far as the digits go
            points = np.linspace(left, right, 9).tolist()
            several = [math.exp(point) for point in points]
            square, allowed = self.squares(several)
            over = square.sum(1) / allowed.sum(1)
            at = int(over.argmin())
            best, least = several[at], float(over[at])
            # The first steps are too wide to count on a curvature that hardly changes.
            if step and none_between(square / allowed):
                break
            left, right = points[max(at - 1, 0)], points[min(at + 1, 8)]
            if step % 3 == 2:
                # Near a true eps what is left falls with the square of the distance.
                if least > 0.5 * before:
                    break
                before = least
            if right - left < 1e-15:
                break
        return best

    def interval(self, eps: float) -> tuple[float, float]:
        """Between which values of eps, around one that passes, all pass."""
        return self.edge(eps, down=True), self.edge(eps, down=False)

    def edge(self, eps: float, *, down: bool) -> float:
        """The outer side of the border, from steps that grow until one does not pass."""
        if down and self.passes(0.0):
            return 0.0
        steps = self.steps(eps, down=down)
        inside = outside = eps
        while inside == outside:
            several = list(itertools.islice(steps, TOGETHER))
            if not several:
                return math.inf
            inside, outside = self.border(inside, several)
        for _ in range(2):
            between = np.linspace(inside, outside, 2 * TOGETHER + 1)[1:].tolist()
            inside, outside = self.border(inside, between)
        return outside

    def border(self, inside: float, several: Sequence[float]) -> tuple[float, float]:
        """The last eps that passes and the first that does not, the last of all where all pass."""
        found = self.ratios(several)
        for eps in several:
            if not found[eps][1] <= 1.0:
                return inside, eps
            inside = eps
        return inside, inside

    def steps(self, eps: float, *, down: bool) -> Iterator[float]:
        """Values of eps further and further away."""
        limit = self.middle * 1e6
        step = max(eps, self.middle * 1e-12) * 2.0**-50
        while True:
            # Below, steps become factors where they would reach zero.
            eps = eps + step if not down else eps - step if step < eps / 2 else eps / 4
            yield eps
            if eps > limit:
                return
            step *= 4

    def nearly(self, eps: float | None = None) -> Fit:
        """How near it comes, with weights for the sample alone."""
        lead = self.lead
        if eps is None:
            eps = min(self.tried, key=lambda eps: self.tried[eps][0])
        w, b, left, allowed = self.line(eps)
        off = np.abs(left)
        affine = Affine(lead.dimensions, w, b, "given" if self.fixed else "fitted",
                        "fitted" if lead.with_bias else "none")  # fmt: skip
        misfit = math.sqrt(float(np.square(off).sum()) / float(allowed.sum()))
        worst = math.sqrt(float((np.square(off).sum(1) / allowed).max()))
        return Fit(
            lead.sharing, self.formula, affine, eps, (eps, eps), True,
            residual=float(off.max()), mean_residual=float(off.mean()),
            tolerance=math.sqrt(float(allowed.max()) / off.shape[1]),
            worst=worst, misfit=misfit, fits=False, least=misfit, statistics=lead.statistics,
        )  # fmt: skip

    def confirmed(
        self,
        fitter: _Fitter,
        eps: float,
        interval: tuple[float, float],
        fitted: bool,
        formula: Formula | None = None,
    ) -> Fit | None:
        """Weights fitted to all data, and every element held against them."""
        fitter.left -= 1
        pair, lead, formula = self.pair, self.lead, formula or self.formula
        sharing, statistics = lead.sharing, lead.statistics
        shape = sharing.expanded
        x, y = pair.x.reshape(shape), fitter.y.reshape(shape)
        u = statistics.value(x, formula.center) * statistics.factor(formula, eps)
        if fitter.weight is not None:
            u = u * np.broadcast_to(fitter.weight, pair.shape).reshape(shape)
        others = tuple(i for i in range(len(shape)) if i not in lead.dimensions)
        valid = None if pair.mask is None else pair.mask.reshape(shape)
        fitted_line = line(u, y, valid, others, lead.with_bias, self.fixed)
        w, b = fitted_line.weight, fitted_line.bias
        (known,) = fitter.affine_of(sharing) if self.fixed or fitter.bias is not None else (None,)
        picked = tuple(shape[i] for i in lead.dimensions)
        weight = fitter.weight if self.fixed else spread(w, pair.shape, sharing, lead.dimensions)
        bias = fitter.bias
        if lead.with_bias:
            bias = spread(b, pair.shape, sharing, lead.dimensions)
        affine = Affine(
            lead.dimensions,
            known.weight if known is not None and self.fixed else w.reshape(picked),
            b.reshape(picked) if lead.with_bias else None if known is None else known.bias,
            "given" if self.fixed else "fitted",
            "fitted" if lead.with_bias else "none" if fitter.bias is None else "given",
            known.offset if known is not None else 0.0,
        )
        fit = confirm(
            pair, statistics, formula, affine, weight, bias, eps, interval, fitted, line=fitted_line
        )
        fit = replace(fit, least=fit.misfit)
        freedom = pair.x.size - affine.fitted - fit.eps_fitted
        size = math.sqrt(float(np.square(fitter.y).mean()))
        bits = freedom * math.log2(max(size / max(fit.tolerance, 1e-300), 1.0))
        enough = bits >= EVIDENCE_BITS
        return replace(fit, fits=fit.fits and enough)
