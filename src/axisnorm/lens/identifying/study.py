"""What one input and output show: hypotheses in the order in which they are believed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import reference
from ...scheme import Scheme
from ..naming import affine_axes, in_words
from .afterwards import Afterwards, Later, activated, dropped, masked
from .along import along
from .deciding import decisions
from .digits import computed_in, rounding_order
from .evidence import (
    CHANCE,
    CLEARLY_WORSE,
    UNITS,
    Floats,
    Noise,
    Pair,
    double,
    measure,
    printed_decimals,
)
from .fit import Fit, Given, machine_eps, places, predicted, usual_eps
from .fitting import CARELESS
from .hypotheses import (
    CENTRED,
    UNCENTRED,
    USUAL_EPS,
    Sharing,
    distinct_sharings,
    is_known,
    named_like,
    published,
    sharings,
)
from .identification import Candidate, Decision, Identification, axes_in_words
from .maps import Map, is_input, maps, with_given_parameters
from .mistakes import mistake_of, twice
from .pointwise import pointwise
from .quantized import grid_of, on_grid, scaled, stand_out
from .refuting import Lines
from .search import UNSEEN, known_fits, nearest, nearest_screened, proportional, ruled_out, search

__all__ = ["Study", "map_in_words"]

LISTED = 24
"""So many candidates are kept, those that fit first."""

NEAREST = 6
"""So many candidates are kept where none fits."""

PLAUSIBLE_EPS = 0.01
"""A fitted eps above this is no eps that anyone chose, unless it is small beside the variance."""

PLAUSIBLE_SHARE = 0.05

BY_CHANCE = 1e-5
"""Data that is standardized has a root mean square near 1: so near it is seldom."""

ENOUGH_ELEMENTS = 64

NEARLY_AS_GOOD = 2.0
"""The input itself explains an output as well where it is on average no further off than this."""

LIKE_NONE = 8.0
"""Weights so many roundings from 1, and biases from 0, may be none."""

NEARLY = 32.0
"""A misfit above this is none that carelessness explains."""

ABOUT_AS_GOOD = 1.2
"""Fits whose differences are so many times larger on average are as good."""

COMPOSED = 4
"""So many norms of norms that fit alike are told."""

COMMON_EPS = USUAL_EPS[:6]
"""Those that are tried where each takes long."""

FIRST_NORMS = 6
"""So many norms that may have come first are looked at closely."""

COMPOSED_ELEMENTS = 1 << 18
"""Norms of norms are sought in arrays up to this size."""


@dataclass(frozen=True, eq=False)
class _Found:
    """Fits with how they were come by."""

    fits: list[Fit]
    pair: Pair
    notes: tuple[str, ...] = ()
    first: Scheme | None = None
    first_open: Scheme | None = None
    """What may have come first instead, as well as the norm itself."""
    last_plain: bool = False
    """Whether what follows is far-fetched: a map without statistics is plainer."""
    later: Later | None = None
    """What the pair shows of the output, where something came after the norm."""
    afterwards: Afterwards | None = None


class Study:
    """What one pair of arrays shows."""

    def __init__(self, pair: Pair, given: Given, dtypes: tuple[str, ...]) -> None:
        self.pair = pair
        self.given = given
        self.dtypes = (dtypes[0], dtypes[1])
        self.nearest: list[Fit] = []
        self.maps: list[Map] = []
        self.later: Later | None = None
        """What shows these maps."""
        self.pointwise = pointwise(pair)
        digits = printed_decimals(pair.y, self.dtypes[1])
        self.grid = grid_of(pair.y, pair.y_dtype)
        if digits is not None and self.grid is not None:
            # Multiples of 0.1 have three decimals, too: the coarser of both was rounded to.
            if self.grid.step > 2 * 10.0**-digits:
                digits = None
            else:
                self.grid = None
        self.rough: list[tuple[Pair, str]] = []
        """The output, believed to be rounded once more, with a sentence that says so."""
        if digits is not None:
            self.rough = list(self.printed(digits))
        elif self.grid is not None:
            half = 0.5 * self.grid.step
            said = f"{self.grid.said}: it is taken to be rounded to them, off by up to {half:g}."
            self.rough = [(on_grid(pair, self.grid), said)]
        self.believed = pair if self.grid is None else self.rough[0][0]
        """The output with the rounding that is believed where more than a norm is sought."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pair.shape

    def result(self) -> Identification:
        found = self.found()
        if found is None:
            return self.nothing()
        own_maps = maps(found.pair, self.given)
        found, fits = self.with_its_first(found, self.ranked(found))
        found, fits = self.with_another_first(found, fits)
        best = fits[0]
        least = min((m.free_parameters for m in own_maps if not m.trivial), default=None)
        if own_maps and own_maps[0].free_parameters == 0 and best.affine.fitted == 0:
            return self.identity(found, fits, own_maps[0])
        small = best.affine.fitted == 0 and not self.implausible(best)
        if least is not None and least <= best.free_parameters - small:
            return self.map_only(own_maps, found.later)
        if self.says_nothing(best, BY_CHANCE):
            return self.map_only(own_maps, found.later)
        result, where = self.identified(found, fits), _where(found.later)
        if best.eps_fitted and not best.affine.fitted and self.hidden(best, found.pair):
            reason = (
                f"{where} is one number times the input less its mean "
                f"({result.candidates[0].name}): nothing shows that a variance is part of it."
            )
            return replace(result, best=None, reason=reason, notes=(), decisions=())
        if self.only_bias(found.pair, best):
            reason = (
                f"{where} is the bias alone as far as rounding shows: nothing of the input is seen "
                "in it."
            )
            return replace(result, best=None, reason=reason, notes=(), decisions=())
        off = self.off_the_input(found.pair, best)
        if off is not None:
            what = _input_in_words(best.weight_along is not None, best.bias_along is not None)
            reason = (
                f"{where} is nearly {what}, off by up to {off:.2g}: nothing shows "
                "that it was normalized, and what fits below changes nothing."
            )
            return replace(result, best=None, reason=reason, decisions=())
        return result

    # ---- the search

    def found(self) -> _Found | None:
        """The first explanation, the plainest first."""
        for attempt in self.attempts():
            found = self.held(attempt)
            if found is not None:
                if not all(self.doubtful(fit) for fit in found.fits):
                    return found
                other = self.plainer(all(map(self.like_none, found.fits)))
                if other is not None:
                    return other
                if not all(self.any_factor(fit) for fit in found.fits):
                    return found
                continue
            if not self.nearest:
                near = [*attempt.fits, *nearest(attempt.pair, self.given)]
                self.nearest = sorted(near, key=lambda fit: fit.misfit)
            if attempt.last_plain:
                self.maps = self.plain_maps() if attempt.later is None else maps(
                    attempt.pair, self.given
                )  # fmt: skip
                if any(not m.trivial for m in self.maps):
                    self.later = attempt.later
                    break
        return None

    def held(self, attempt: _Found) -> _Found | None:
        """The fits of an attempt that explain every output; None where there are none."""
        fits = [fit for fit in attempt.fits if fit.fits]
        if attempt.later is None:
            return replace(attempt, fits=fits) if fits else None
        passed = [own for own in map(attempt.later.held, fits) if own is not None]
        if not passed:
            return None
        # What came after is that of all: fits of one pair differ in constants.
        _, came, note = passed[0]
        kept = [fit for fit, own, _ in passed if own == came]
        return replace(attempt, fits=kept, notes=(*attempt.notes, note), afterwards=came)

    def doubtful(self, fit: Fit) -> bool:
        """Whether a fitted weight has values for each sample: seldom meant, often a mask.

        Or whether it is one number beside a fitted eps: two norms may give these two. Or whether it
        is nearly 1, with a bias of nearly 0.
        """
        own = set(fit.sharing.dimensions(0)) & set(fit.affine.dimensions)
        alone = fit.eps_fitted and not fit.affine.dimensions
        return fit.affine.fitted > 0 and (
            alone or (len(self.shape) > 1 and bool(own)) or self.like_none(fit)
        )

    def like_none(self, fit: Fit) -> bool:
        """Whether fitted weights are nearly 1 and biases nearly 0: rounding alone may be so."""
        weight, bias = fit.affine.weight, fit.affine.bias
        near = LIKE_NONE * self.pair.noise.unit
        size = float(np.abs(self.pair.y).max())
        return (weight is None or float(np.abs(weight - 1).max()) <= near) and (
            bias is None or float(np.abs(bias).max()) <= near * size
        )

    def any_factor(self, fit: Fit) -> bool:
        """Whether each group has a fitted weight of its own, which takes up any divisor."""
        kept = {i for i in fit.sharing.kept if fit.sharing.expanded[i] > 1}
        return not fit.running and kept <= set(fit.affine.dimensions)

    def plainer(self, like_none: bool) -> _Found | None:
        """A mask or a second norm in place of such weights; careless arithmetic where the weights
        are like none."""
        careless = self.sloppy(fitting=False) if like_none else ()
        others = self.seen_through(self.laters(), False)
        for attempt in itertools.chain(careless, others, self.composed()):
            found = self.held(attempt)
            if found is not None:
                return found
        return None

    def plain_maps(self) -> list[Map]:
        """The maps without statistics that fit, where any do with the least of rounding."""
        for pair in (self.pair, *(pair for pair, _ in self.rough)):
            found = maps(pair, self.given)
            if any(not m.trivial for m in found):
                return found
        return maps(self.pair, self.given)

    def attempts(self) -> Iterator[_Found]:
        pair, given = self.pair, self.given
        # Weights that vary leave no output a function of its own input alone.
        fitting = self.pointwise is None
        if not self.rough:
            yield _Found(search(pair, given, fitting=fitting), pair)
        else:
            # What was printed with few decimals, or quantized, is that far off, unless it is a
            # whole number of them by its own.
            exact = _Found(search(pair, given, fitting=False), pair)
            if any(fit.fits and not fit.free_parameters for fit in exact.fits):
                yield exact
            yield from self.whole_numbers()
            for rough, note in self.rough:
                yield _Found(search(rough, given, fitting=fitting), rough, (note,))
            if self.grid is None:
                yield _Found(search(pair, given, fitting=fitting), pair)
        if with_given_parameters(pair, given):
            yield _Found([], pair, last_plain=True)
        yield from self.with_fitted_parameters(pair)
        yield from self.sloppy(fitting=False)
        yield _Found([], pair, last_plain=True)
        if self.pointwise is not None and self.pointwise.code:
            return
        laters = []
        for later in self.laters():
            laters.append(later)
            yield from self.seen_through([later], False)
            if later.dropout is not None and is_input(later.pair, None, None):
                yield _Found([], later.pair, last_plain=True, later=later)
        if self.pointwise is not None:
            return
        yield from self.sloppy(fitting=True)
        for later in laters:
            yield from self.seen_through([later], True)
            yield _Found([], later.pair, last_plain=True, later=later)
        yield from self.composed()

    def whole_numbers(self) -> Iterator[_Found]:
        """A norm times a scale, rounded to whole numbers: the scale is fitted."""
        bare = self.given.weight is None and self.given.bias is None
        if self.grid is None or self.grid.step != 1 or not bare:
            return
        rough, _ = self.rough[0]
        if any(m.free_parameters <= 2 and not m.trivial for m in maps(rough, self.given)):
            # One scale of all elements says nothing: a norm would have one too many.
            return
        fits = search(rough, self.given, fitting=False)
        if any(fit.fits for fit in fits):
            return
        for zero in dict.fromkeys((0.0, float(np.round(rough.y.mean())))):
            shifted = rough if not zero else rough.with_output(rough.y - zero, rough.noise)
            for pair, scale in scaled(shifted, proportional(shifted)):
                point = f" and the zero point {zero:g}" if zero else ""
                note = (
                    f"{self.grid.said}: it is taken to be the norm with the scale 1 / "
                    f"{scale:.5g}{point}, rounded, off by up to half a step of {1 / scale:.3g}."
                )
                yield _Found(search(pair, self.given, fitting=False), pair, (note,))

    def printed(self, digits: int) -> Iterator[tuple[Pair, str]]:
        """Computed in the type of the arrays, then in float32, before it was printed."""
        noise, quantum = self.pair.noise, 0.5 * 10.0**-digits
        inputs = printed_decimals(self.pair.x, self.dtypes[0])
        input_quantum = 0.0
        if inputs is not None and abs(inputs - digits) <= 1:
            input_quantum = 0.5 * 10.0**-inputs
        noise = replace(noise, quantum=quantum, input_quantum=input_quantum)
        said = (
            f"The output has {digits} decimals: it is taken to be rounded to them, off by up to "
            f"{quantum:g}."
        )
        yield self.pair.with_noise(noise), said
        single = UNITS["float32"]
        if noise.compute < single:
            noise = replace(noise, unit=single, compute=single)
            yield self.pair.with_noise(noise), said

    def with_fitted_parameters(self, pair: Pair) -> Iterator[_Found]:
        """Without the parameters that came: perhaps others were used."""
        given = self.given
        if given.weight is None and given.bias is None:
            return
        bare = Given(None, None, given.running_mean, given.running_var)
        names = " and ".join(
            name for name, p in (("weight", given.weight), ("bias", given.bias)) if p is not None
        )
        note = f"With the given {names} nothing fits this output. What is said here does without."
        yield _Found(search(pair, bare), pair, (note,))

    def laters(self) -> Iterator[Later]:
        """What may have come after a norm, and what it leaves to be seen of its output."""
        rounded = self.grid is not None and not stand_out(self.pair.y, self.grid)
        masks = [] if rounded else masked(self.believed)
        yield from masks
        if masks:
            bare = self.given.weight is None and self.given.bias is None
            yield from dropped(self.believed, proportional(masks[0].pair) if bare else [])
        yield from activated(self.believed)

    def seen_through(self, laters: Iterable[Later], fitting: bool) -> Iterator[_Found]:
        """The norms that may have come before, with weights that are known or fitted ones too."""
        for later in laters:
            # A fitted weight takes up the factor of dropout: the mask alone says as much.
            if not (fitting and later.dropout is not None):
                fits = search(later.pair, self.given, fitting=fitting, named=True)
                yield _Found(fits, later.pair, later=later)

    def composed(self) -> Iterator[_Found]:
        """A norm may have been applied to the output of another one, or of itself."""
        pair = self.pair
        if pair.x.size > COMPOSED_ELEMENTS or pair.unit != 1:
            return
        given = Given(self.given.weight, self.given.bias)
        whole = [s for s in distinct_sharings(self.shape) if s.split is None]
        near = []
        for first, seconds in self.first_norms():
            # Before its eps is known, the first norm is only nearly right.
            noise = replace(pair.noise, compute=max(pair.noise.compute, 1e-4))
            middle = self.normalized(first)
            off = nearest_screened(pair.with_input(middle).with_noise(noise), given, seconds)
            if off <= 1:
                near.append((off, first))
        near.sort(key=lambda one: one[0])
        middles: dict[Scheme, list[Floats]] = {}
        for (_, first), eps in itertools.product(near[:FIRST_NORMS], COMMON_EPS):
            scheme = first.replace(eps=eps)
            middle, before = self.normalized(scheme), middles.setdefault(first, [])
            unseen = UNSEEN * pair.noise.unit * float(np.abs(middle).max())
            if any(float(np.abs(middle - other).max()) <= unseen for other in before):
                continue
            before.append(middle)
            after = pair.with_input(middle).with_noise(self.after(scheme))
            # A second norm with an eps of its own fits any factor near 1.
            fits = [f for f in known_fits(after, given, whole) if not f.eps_fitted]
            if fits:
                yield _Found(fits, after, (), scheme)
                return

    def first_norms(self) -> Iterator[tuple[Scheme, list[Sharing]]]:
        """Norms that may have come first, each with the sets of axes that the second may have."""
        weight, lines = self.given.weight, Lines.of(self.pair)
        whole_only = [s for s in distinct_sharings(self.shape) if s.split is None]
        known = weight if weight is not None else self.given.bias
        weighted: set[int] = set() if known is None else {
            axis
            for place in places(known, self.shape)
            for axis in (*place.whole, *(() if place.part is None else (place.part,)))
        }  # fmt: skip
        for sharing in whole_only:
            seconds = []
            for second in whole_only:
                held = {*sharing.kept, *second.kept, *weighted}
                if not lines.refute(second, held, self.pair.noise.worst):
                    seconds.append(second)
            if not seconds:
                continue
            for center in (True, False):
                for dimensions in self.own_dimensions(sharing, weight):
                    yield sharing.scheme(dimensions, center=center, eps=1e-5), seconds

    def own_dimensions(self, sharing: Sharing, weight: Floats | None) -> list[tuple[int, ...]]:
        known = weight if weight is not None else self.given.bias
        if known is None:
            return [()]
        found = [place.dimensions(sharing) for place in places(known, self.shape)]
        return [dimensions for dimensions in found if dimensions is not None]

    def normalized(self, scheme: Scheme) -> Floats:
        own = scheme.layout(len(self.shape)).sizes(self.shape).affine_shape
        parameters = [
            None if p is None or not scheme.affine else p.reshape(own)
            for p in (self.given.weight, self.given.bias)
        ]
        return double(reference.forward(self.pair.x, scheme, *parameters)[0])

    def with_its_first(self, found: _Found, fits: list[Fit]) -> tuple[_Found, list[Fit]]:
        """Where a norm seems applied to its own output: whether the root mean square came first.

        The two differ by eps times the share of the mean in the mean square.
        """
        best = fits[0]
        if best.formula.passes == 1 or not best.formula.center:
            return found, fits
        plain = best.sharing.scheme(center=False)
        for eps in COMMON_EPS:
            first = plain.replace(eps=eps)
            after = found.pair.with_input(self.normalized(first)).with_noise(self.after(first))
            others = [
                fit for fit in known_fits(after, self.given, [best.sharing])
                if fit.formula.plain and not fit.free_parameters
            ]  # fmt: skip
            if not others:
                continue
            if best.eps_fitted:
                # Where an eps in use explains it, none has to be fitted.
                return replace(found, fits=others, pair=after, first=first), others
            return replace(found, first_open=first), fits
        return found, fits

    def with_another_first(self, found: _Found, fits: list[Fit]) -> tuple[_Found, list[Fit]]:
        """Where the factors of groups are clearly nearer to those of a norm of a norm's output.

        With an eps in use each, these differ from one norm by parts in a million.
        """
        best, pair = fits[0], self.pair
        exact = pair.unit == 1 and pair.mask is None and not self.rough and not best.running
        if not exact or found.first is not None or found.later is not None:
            return found, fits
        if best.affine.fitted or pair.x.size > COMPOSED_ELEMENTS:
            return found, fits
        two_passes, most = best.formula.passes == 2, ABOUT_AS_GOOD * best.mean_residual
        if not two_passes:
            told = best.statistics, best.formula.center, best.weight_along, best.bias_along
            free = measure(found.pair, *told).misfit
            far = CLEARLY_WORSE * max(free, CHANCE)
            # A plain norm with an eps that no one uses is plainer than two norms.
            if best.misfit <= far or (best.formula.plain and best.least <= far):
                return found, fits
            most = best.mean_residual / CLEARLY_WORSE
        near: list[tuple[float, Scheme, Pair, Fit]] = []
        chosen = dict.fromkeys([(), *self.own_dimensions(best.sharing, self.given.weight)])
        for center, dimensions, eps in itertools.product((True, False), chosen, COMMON_EPS):
            first = best.sharing.scheme(dimensions, center=center, eps=eps)
            after = pair.with_input(self.normalized(first)).with_noise(self.after(first))
            near += [
                (fit.mean_residual, first, after, fit)
                for fit in known_fits(after, self.given, [best.sharing])
                if fit.formula.plain and not fit.free_parameters
                and not (two_passes and self.scheme(fit) == self.scheme(best) == first)
            ]  # fmt: skip
        least = min((off for off, *_ in near), default=math.inf)
        if least > most:
            return found, fits
        # With and without the second mean, which is 0, and with some eps the numbers are the same.
        near = [one for one in near if one[0] <= ABOUT_AS_GOOD * least]
        near.sort(key=lambda one: self.unusual(one[1].eps, one[3]))
        alike = [f"'{self.scheme(own)}' of the output of '{first}'" for _, first, _, own in near]
        said = "As good a fit: {}."
        if two_passes and not best.eps_fitted:
            note = said.format(", ".join(alike[:COMPOSED]))
            return replace(found, notes=(*found.notes, note)), fits
        notes = ["One norm alone comes less near the factors of the groups."]
        if alike[1:]:
            notes.append(said.format(", ".join(alike[1 : COMPOSED + 1])))
        _, first, after, fit = near[0]
        return replace(found, fits=[fit], pair=after, notes=tuple(notes), first=first), [fit]

    def unusual(self, eps: float | None, last: Fit) -> tuple[int, int]:
        """How far the eps of two norms are from the commonest ones."""
        places = [
            usual.index(own) if own is not None and own in usual else len(usual)
            for own, usual in (
                (eps, USUAL_EPS), (last.eps, USUAL_EPS),
                (last.eps, usual_eps(last.formula, self.pair)),
            )
        ]  # fmt: skip
        return places[0] + places[1], places[2]

    def after(self, first: Scheme) -> Noise:
        """What is believed of rounding where a norm came first: its mean was rounded, too."""
        moments = reference.moments(self.pair.x, first)
        offset = float(np.abs(moments.mean * moments.rstd).max())
        noise = self.pair.noise
        # An error of the input counts twice.
        lost = max(noise.input_quantum, 2.0 * noise.compute * offset)
        return replace(noise, input_quantum=lost)

    def sloppy(self, *, fitting: bool) -> Iterator[_Found]:
        """Computed in a narrower type than the arrays have, or with sums that lose digits."""
        noise = self.pair.noise
        if self.grid is not None:
            return
        sentences = (
            "The output is further off than careful arithmetic of its type explains.",
            "The output is only as exact as a computation in float32.",
        )
        if noise.twice_rounded:
            sentences = (
                f"Only a computation in {self.pair.y_dtype} itself explains the differences.", ""
            )  # fmt: skip
        for own, said in zip(noise.careless(), sentences, strict=False):
            near = min((fit.misfit for fit in self.nearest), default=math.inf)
            far = near * noise.unit > NEARLY * own.unit
            # Far off, only what was refuted before it was fitted may be nearer than that.
            only = frozenset(self.pair.cache.get(CARELESS, ())) if far else None
            if fitting and far and not only:
                continue
            pair = self.pair.with_noise(own)
            fits = search(pair, self.given, fitting=fitting, only=only, named=only is None)
            yield _Found(fits, pair, (said,))

    # ---- what fits, in order

    def ranked(self, found: _Found) -> list[Fit]:
        fits = found.fits
        if found.pair.x.size >= ENOUGH_ELEMENTS:
            least = min(fit.least for fit in fits)
            most = max(CLEARLY_WORSE * least, found.pair.noise.chance)
            fits = [fit for fit in fits if fit.least <= most]
        plain = [fit for fit in fits if fit.formula.passes == 1]
        ordered = sorted(plain or fits, key=lambda fit: self.rank(fit))
        # Of what no one would have chosen, the plain formula alone says enough.
        return [
            fit
            for fit in ordered
            if fit is ordered[0]
            or not self.implausible(fit)
            or (fit.formula.scale == "auto" and fit.sharing.split is None)
        ]

    def implausible(self, fit: Fit) -> bool:
        """Whether its eps is one that no one would have chosen."""
        if not fit.eps_fitted or fit.eps <= PLAUSIBLE_EPS:
            return False
        base = fit.statistics.base(fit.formula)
        return fit.eps > PLAUSIBLE_SHARE * float(np.median(base))

    def rank(self, fit: Fit) -> tuple[Any, ...]:
        formulas = CENTRED if fit.formula.center else UNCENTRED
        place = formulas.index(fit.formula) if fit.formula in formulas else len(formulas)
        scheme = self.scheme(fit)
        named = bool(self.norms(scheme))
        return (
            fit.free_parameters, self.implausible(fit), fit.running, not named, place,
            fit.sharing.split is not None, not fit.formula.center,
        )  # fmt: skip

    def scheme(self, fit: Fit, sharing: Sharing | None = None) -> Scheme:
        """The fit as a scheme, on the axes of another sharing of the same elements if given."""
        dimensions = fit.affine.dimensions
        if sharing is not None and sharing is not fit.sharing:
            moved: list[int] = []
            for axis in range(len(self.shape)):
                own, other = fit.sharing.dimensions(axis), sharing.dimensions(axis)
                used = [k for k, i in enumerate(own) if i in dimensions]
                whole = len(used) == len(own) or len(own) != len(other)
                moved += other if used and whole else [other[k] for k in used]
            dimensions = tuple(moved)
        eps: float | None = fit.eps
        if self.pair.unit < 1:
            # Beside an input so large every eps in use is 0: the commonest stands for all.
            eps = usual_eps(fit.formula, replace(self.pair, unit=1.0))[0]
        if not fit.formula.center and fit.formula.scale == "auto" and eps == machine_eps(self.pair):
            eps = None
        return (sharing or fit.sharing).scheme(
            dimensions,
            **fit.formula.constants,
            eps=eps,
            weight_offset=fit.affine.offset,
            statistics="running" if fit.running else "batch",
        )

    def interval(self, fit: Fit) -> tuple[float, float]:
        """Between which values eps lies, in the unit of the input as it came."""
        if self.pair.unit == 1:
            return fit.interval
        h, _ = fit.formula.exponents
        with np.errstate(all="ignore"):
            square = np.float64(self.pair.unit) ** (2 * h)
            low, high = (float(eps / square) if eps else 0.0 for eps in fit.interval)
        return low, high

    def norms(self, scheme: Scheme) -> tuple[str, ...]:
        """The published norms that compute this."""
        half = self.pair.noise.twice_rounded
        found = published(
            scheme, self.shape, without_affine=not scheme.affine, any_rounding=not half
        )
        return tuple(found)

    def says_nothing(self, best: Fit, by_chance: float) -> bool:
        """Whether an eps is all that gives the scale, in every group alike.

        Nothing is predicted then. Without a mean that is subtracted this begins where a fitted eps
        is a larger share of the variance than ``by_chance``, and is so of any that hides it.
        """
        if best.affine.fitted or best.running:
            return False
        base = best.statistics.base(best.formula)
        if not best.formula.center and self.hidden(best, self.pair):
            return True
        if not best.eps_fitted:
            return False
        chance = not best.formula.center and best.eps > by_chance * float(np.median(base))
        if not self.implausible(best) and not chance:
            return False
        statistics = self.pair.statistics(best.sharing)
        values = statistics.var if best.formula.center else statistics.meansquare
        return float(values.max() - values.min()) <= 1e-6 * float(values.max())

    def hidden(self, fit: Fit, pair: Pair) -> bool:
        """Whether eps is so large that no variance changes a digit."""
        base = fit.statistics.base(fit.formula)
        return pair.unit == 1 and float(base.max()) <= pair.noise.unit * fit.eps

    def only_bias(self, pair: Pair, best: Fit) -> bool:
        """Whether rounding may hide all that a norm gives beside the bias."""
        if best.bias_along is None:
            return False
        output, allowed = predicted(pair, best)
        told = ... if pair.mask is None else pair.mask
        part = np.square(output - best.bias_along)[told]
        return float(part.mean()) <= float(np.square(allowed)[told].mean())

    def off_the_input(self, pair: Pair, best: Fit) -> float | None:
        """How far the output is off the input, with the given parameters alone.

        None where a norm is told from that: where it is further away than rounding explains, or
        comes clearly nearer.
        """
        if best.affine.fitted or pair.unit != 1:
            return None
        plain, told = pair.x, np.ones(pair.shape, bool) if pair.mask is None else pair.mask
        plain = plain if best.weight_along is None else plain * best.weight_along
        plain = plain if best.bias_along is None else plain + best.bias_along
        output, allowed = predicted(pair, best)
        off = np.abs(pair.y - plain)[told]
        if float(off.mean()) > NEARLY_AS_GOOD * float(np.abs(pair.y - output)[told].mean()):
            return None
        alike = np.abs(output - plain)[told] <= allowed[told]
        return float(off.max()) if bool(alike.all()) else None

    # ---- results

    def identified(self, found: _Found, fits: Sequence[Fit]) -> Identification:
        every = list(sharings(self.shape))
        candidates: list[Candidate] = []
        seen: set[Any] = set()
        for fit in fits:
            same = [fit.sharing]
            if not fit.running:
                same += named_like(fit.sharing, every)
            for sharing in self.by_name(same):
                scheme = self.scheme(fit, sharing)
                if self.usual_form(scheme) in seen:
                    continue
                seen.add(self.usual_form(scheme))
                candidates.append(self.candidate(fit, scheme, found))
        best = candidates[0]
        best, rounded = self.with_rounding(found, fits[0], best)
        candidates = [best, *rounded, *candidates[1:]]
        notes = [*found.notes, *self.notes(found, fits[0], best)]
        others = [c for c in self.others(found) if self.usual_form(c.scheme) not in seen]
        candidates = (candidates + others)[:LISTED]
        result = Identification(
            tuple(candidates), best, self.shape, self.dtypes, notes=tuple(notes)
        )
        fitted = fits[0].affine.weight_from == "fitted"
        return replace(result, decisions=tuple(decisions(result, fitted=fitted)))

    def by_name(self, same: Sequence[Sharing]) -> list[Sharing]:
        return sorted(same, key=lambda sharing: not is_known(sharing))

    def usual_form(self, scheme: Scheme) -> Any:
        """Two are the same norm for every shape of this rank if and only if these are equal."""
        layout = scheme.layout(len(self.shape))
        axes = tuple(tuple((part.size, part.reduced) for part in axis) for axis in layout.axes)
        return axes, layout.affine, scheme.replace(axes="[d]", affine="")

    def candidate(self, fit: Fit, scheme: Scheme, found: _Found) -> Candidate:
        sizes = scheme.layout(len(self.shape)).sizes(self.shape)
        mistake = mistake_of(scheme, self.shape)
        first = found.first
        if fit.formula.passes == 2:
            first = scheme
        if first is not None:
            mistake = twice(scheme, first, found.first_open)
        shape = sizes.affine_shape
        weight, bias = (
            None if p is None or p.size != math.prod(shape) else p.reshape(shape)
            for p in (fit.affine.weight, fit.affine.bias)
        )
        code, meant = mistake or (None, None)
        return Candidate(
            scheme,
            in_words(scheme, self.shape),
            sizes.layout.reduced_axes,
            fit.residual,
            fit.mean_residual,
            fit.tolerance,
            fit.free_parameters,
            fit.fits,
            self.interval(fit),
            code,
            meant,
            norms=self.norms(scheme),
            affine_axes=affine_axes(sizes),
            weight=weight,
            bias=bias,
            weight_from=fit.affine.weight_from,
            bias_from=fit.affine.bias_from,
            first=first,
            afterwards=found.afterwards,
            computed_in=computed_in(found.pair, fit, self.dtypes[1]),
        )

    def others(self, found: _Found) -> list[Candidate]:
        """What was ruled out: the same formula over other axes."""
        best = found.fits[0]
        shown: list[Candidate] = []
        if found.first is not None or found.pair.mask is not None:
            return shown
        fitting = {(fit.sharing.key, fit.running, fit.formula) for fit in found.fits}
        for fit in ruled_out(found.pair, self.given, best):
            if (fit.sharing.key, fit.running, fit.formula) in fitting:
                continue
            scheme = self.scheme(fit)
            shown.append(self.candidate(fit, scheme, replace(found, first=None)))
        return sorted(shown, key=lambda c: c.residual)

    def with_rounding(
        self, found: _Found, fit: Fit, best: Candidate
    ) -> tuple[Candidate, list[Candidate]]:
        """In half types: whether the normalized value was rounded before weight and bias."""
        if not found.pair.noise.twice_rounded or fit.weight_along is None:
            return best, []
        early = replace(best, scheme=best.scheme.replace(rounding="before_affine"))
        early = replace(early, norms=self.norms(early.scheme))
        if fit.affine.weight_from != "given":
            return best, [early]
        order = rounding_order(found.pair, fit)
        if order is None:
            return best, [early]
        return (early if order == "before_affine" else best), []

    def notes(self, found: _Found, fit: Fit, best: Candidate) -> Iterator[str]:
        interval = best.eps_interval
        if interval is not None:
            inside = [eps for eps in COMMON_EPS if interval[0] <= eps <= interval[1]]
            if not math.isfinite(interval[1]):
                yield "eps is not determined: on this input any value gives the same output."
            elif len(inside) > 1:
                *most, last = [f"{eps:g}" for eps in sorted(inside)]
                yield (
                    f"eps lies between {interval[0]:.3g} and {interval[1]:.3g}: of the values in "
                    f"use it may be {', '.join(most)} or {last}."
                )
        if fit.affine.weight_from == "fitted":
            yield (
                "The weight was fitted, so what only scales the output cannot be seen: the "
                "divisor n or n - 1, and whether the weight is stored as w or as 1 + w."
            )
        mask = None if found.later is None else found.pair.mask
        if mask is not None and best.afterwards is None and fit.affine.weight_from == "fitted":
            share = 1 - float(mask.mean())
            yield (
                f"If dropout left these zeros, {share:.1%} of all, weight and bias contain its "
                f"factor 1 / (1 - p), about {1 / (1 - share):.3g}."
            )
        if best.scheme.weight_offset:
            yield "The given weight is stored around zero: 1 is added to it."
        if fit.weight_along is not None and not best.scheme.affine:
            weight, bias = fit.affine.weight, fit.affine.bias
            if fit.affine.weight_from == "given" or weight is None:
                yield "Weight and bias are one number each."
            else:
                plus = "" if bias is None else f", the bias {float(bias):.6g}"
                yield f"The weight is one number, {float(weight):.6g}{plus}."
        given_running = self.given.running_mean is not None
        if given_running and not fit.running:
            yield "The running statistics were not used: these are the statistics of the batch."
        if fit.running:
            yield "The running statistics were used, not those of the batch."
        if fit.silent_groups:
            groups = math.prod(fit.sharing.expanded[i] for i in fit.sharing.kept)
            one = fit.silent_groups == 1
            yield (
                f"{fit.silent_groups:,} of {groups:,} groups {'is' if one else 'are'} constant "
                f"and say{'s' if one else ''} nothing."
            )

    # ---- when there is no norm to name

    def identity(self, found: _Found, fits: Sequence[Fit], own: Map) -> Identification:
        said = self.unchanged(own, found.later)
        if self.says_nothing(fits[0], 0.0):
            return Identification(
                tuple(self.near()), None, self.shape, self.dtypes, f"{said}.", found.notes
            )
        result = self.identified(found, fits)
        reason = f"{said}, or the input was normalized already and what fits below changes nothing."
        return replace(result, best=None, reason=reason, decisions=())

    def unchanged(self, own: Map, later: Later | None) -> str:
        """The sentence, without its end, of an output that is no normalization."""
        weight = own.given and self.given.weight is not None
        what = _input_in_words(weight, own.given and self.given.bias is not None)
        return f"{_where(later)} is {what}: nothing was normalized"

    def map_only(self, found_maps: Sequence[Map], later: Later | None) -> Identification:
        function = along(self.believed)
        if function is not None:
            reason = function.sentence
            return Identification(tuple(self.near()), None, self.shape, self.dtypes, reason=reason)
        own = found_maps[0] if found_maps else Map((), True, 2, False)
        what = map_in_words(own.axes, len(self.shape))
        reason = f"{_where(later)} is {what}: statistics not identifiable from this batch."
        notes = []
        if own.trivial:
            each = self.pair.x.size // math.prod(self.shape[i] for i in own.axes)
            notes.append(
                f"{each} elements share each weight and bias: any output of this shape is such "
                "a map. Give weight and bias, or a larger input."
            )
        decision = Decision(
            (),
            2.0 * (self.pair.x / self.pair.unit) + 1.0 if self.pair.x.size <= 64 else np.zeros(0),
            (),
            "Run it on 2 * x + 1. An output that stays the same, but for eps, is normalized with "
            "the statistics of the batch; one that follows the input uses stored ones, or none.",
        )
        return Identification(
            tuple(self.near()), None, self.shape, self.dtypes, reason, tuple(notes), (decision,)
        )

    def near(self) -> list[Candidate]:
        found = _Found([], self.pair)
        kept = [fit for fit in self.nearest if not fit.fits and not fit.affine.fitted][:NEAREST]
        return [self.candidate(fit, self.scheme(fit), found) for fit in kept]

    def nothing(self) -> Identification:
        own = self.maps
        if own and own[0].free_parameters == 0:
            reason = f"{self.unchanged(own[0], self.later)}."
            return Identification(tuple(self.near()), None, self.shape, self.dtypes, reason=reason)
        if own:
            return self.map_only(own, self.later)
        near = self.near()
        plain = self.pointwise or along(self.believed)
        if plain is not None:
            reason = plain.sentence
            return Identification(tuple(near), None, self.shape, self.dtypes, reason)
        reason = "Nothing that was tried fits."
        if near:
            reason += (
                f" The nearest is '{near[0].scheme}', off by up to {near[0].residual:.2g} where "
                f"rounding explains {near[0].tolerance:.2g}."
            )
        notes: tuple[str, ...] = ()
        one = sum(n > 1 for n in self.shape) == 1 or self.shape[0] == 1
        if one or self.shape[0] == 2:
            shared = "a weight" if one else "a weight and a bias"
            samples = "this one sample" if one else "these two samples"
            notes = (
                f"With {shared} for each element of {samples} any output fits: give the weight "
                "and bias that were used, or an input of more samples.",
            )
        return Identification(tuple(near), None, self.shape, self.dtypes, reason, notes)


def _input_in_words(weight: bool, bias: bool) -> str:
    times, plus = (
        " times the given weight" if weight else "",
        " plus the given bias" if bias else "",
    )
    return f"the input{times}{plus}"


def _where(later: Later | None) -> str:
    return "The output" if later is None else later.where


def map_in_words(axes: Sequence[int], ndim: int) -> str:
    """What numbers that vary along these axes do.

    >>> map_in_words((1,), 4), map_in_words((0, 1), 4)
    ('a per-channel affine map', 'an affine map for each index of axes 0, 1')
    """
    if not axes:
        return "one affine map of all elements"
    if tuple(axes) in ((1,), (ndim - 1,)):
        return "a per-channel affine map"
    return f"an affine map for each index of {axes_in_words(axes)}"
