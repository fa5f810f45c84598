"""What was done to the output of a norm: activations, dropout, masks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .activations import ELU, LOST, RELU, Activation, leaky, seen
from .evidence import SAMPLED, Floats, Noise, Pair, measure
from .fit import Fit, predicted
from .hypotheses import Sharing, roundest
from .least_squares import line
from .refuting import Lines

__all__ = ["Afterwards", "Later", "activated", "dropped", "masked"]

MASKED = 0.01
"""A smaller share of outputs that are 0 is no mask: in half types some are by chance."""

DEVIATIONS = 5.0
"""The share of zeros that dropout leaves is no further from its probability."""

RATE_OFF = 2e-3
"""How far the factor of a norm without eps leaves the probability open: eps makes it smaller."""

USUAL_RATES = (0.1, 0.2, 0.5, 0.3, 0.05, 0.15, 0.25, 0.4, 0.01, 0.02, 0.6, 0.7, 0.75, 0.8, 0.9)
"""Probabilities of dropout in use, the commonest first."""

MOST_RATES = 3

CHANCE = 6.0
"""So many deviations a mean over random places is not off."""

FEW = 3
"""Through fewer elements there is always a line."""


class Afterwards(NamedTuple):
    """What came after a norm."""

    code: str
    """``"dropout"``, or an activation as torch.nn.functional calls it."""
    sentence: str
    parameter: float | None = None
    """The probability of dropout, the slope of a leaky ReLU."""


@dataclass(frozen=True, eq=False)
class Later:
    """The output of a norm as far as what came after it shows it."""

    pair: Pair
    whole: Pair
    """The output as it came."""
    where: str
    """Which output the pair is, before a verb."""
    note: str = ""
    """Of a mask, or of dropout."""
    activations: tuple[Activation, ...] = ()
    """One of them came after. Where there is a note too, perhaps."""
    dropout: Afterwards | None = None

    def held(self, fit: Fit) -> tuple[Fit, Afterwards | None, str] | None:
        """The fit held against all outputs, what came after, and a note; None where none fits."""
        z, bound = predicted(self.pair, fit)
        if self.dropout is not None and not _by_chance(self.whole.y != 0, z):
            return None
        unknown = ""
        if fit.affine.fitted:
            bound, few = _moved(self.pair, fit, bound)
            if few:
                total = math.prod(fit.sharing.expanded[i] for i in fit.affine.dimensions)
                unknown = (
                    f" {few:,} of {total:,} weights show in fewer than {FEW} outputs and are not "
                    "determined."
                )
        activations = list(self.activations)
        slope = _slope(z, self.whole.y) if ELU in activations else None
        if slope is not None:
            activations.append(leaky(slope))
        for activation in activations:
            through = _through(activation, self.whole, fit, z, bound)
            if through.fits:
                zeros = int((self.whole.y == 0).sum())
                note = (
                    f"{zeros:,} outputs are 0, as after a ReLU; these elements are counted in the "
                    "statistics."
                    if activation is RELU
                    else f"Each output is the {activation.said} of what the norm gives."
                )
                parameter = slope if activation.code == "leaky_relu" else None
                sentence = f"After the norm came {activation.said}: y = {activation.code}(norm(x))."
                came = Afterwards(activation.code, sentence, parameter)
                return through, came, note + unknown
        return (fit, self.dropout, self.note + unknown) if self.note else None


def masked(pair: Pair) -> list[Later]:
    """Some outputs may have been set to zero afterwards."""
    kept = pair.y != 0
    zeros = int((~kept).sum())
    if not MASKED <= zeros / kept.size <= 1 - MASKED:
        return []
    where = "Where it is not 0, the output"
    said = f"{zeros:,} outputs are 0, as after a mask; these elements are"
    outside = pair.with_mask(kept, statistics=False)
    positive = float(pair.y.min()) == 0
    found = [
        Later(outside, pair, where, f"{said} counted in the statistics.",
              (RELU,) if positive else ())
    ]  # fmt: skip
    # A ReLU decides by what comes of the statistics: it cannot leave anything out of them.
    if not positive or float(pair.x[kept].min()) >= 0:
        inside = pair.with_mask(kept, statistics=True)
        inside.cache["lines"] = Lines.of(outside)
        found.append(Later(inside, pair, where, f"{said} left out of the statistics too."))
    return found


def dropped(pair: Pair, passed: list[tuple[Sharing, bool]]) -> Iterator[Later]:
    """Dropout sets elements to zero at random places and divides the others by 1 - p.

    Args:
        pair: the output.
        passed: the sets of axes that give the elements that are not 0 but for a factor of each
            group, and whether the mean is subtracted.
    """
    kept = pair.y != 0
    share = float((~kept).mean())
    reach = DEVIATIONS * math.sqrt(share * (1 - share) / kept.size) + 1 / kept.size
    # Outputs of which none is negative, though inputs are, passed a ReLU.
    positive = float(pair.y.min()) == 0 and float(pair.x[kept].min()) < 0
    if positive or not MASKED <= share <= 1 - MASKED or not _by_chance(kept, pair.x):
        return
    own = pair.with_mask(kept, statistics=False)
    rates = [rate for rate in USUAL_RATES if abs(rate - share) <= reach]
    for sharing, center in passed[:MOST_RATES]:
        factors = measure(own, own.statistics(sharing), center, None, None, most=SAMPLED)
        base = factors.statistics.var if center else factors.statistics.meansquare
        scale = float(np.median((factors.factor * np.sqrt(base))[factors.informative]))
        rate = 1 - 1 / scale if scale > 1 else 0.0
        if abs(rate - share) <= reach + RATE_OFF and rate > RATE_OFF:
            rates.append(roundest(rate - RATE_OFF, rate + RATE_OFF))
    noise = replace(pair.noise, unit=3.0 * pair.noise.unit, twice_rounded=False)
    for rate in list(dict.fromkeys(rates))[:MOST_RATES]:
        factor = 1 / (1 - rate)
        sentence = (
            f"After the norm came dropout with p = {rate:g}: {share:.1%} of the outputs are 0, "
            f"the others are 1 / (1 - p) = {factor:.4g} times the norm's."
        )
        yield Later(
            own.with_output(pair.y / factor, noise), pair,
            f"But for dropout with p = {rate:g}, the output",
            f"{int((~kept).sum()):,} outputs are 0 and the others larger by {factor:.4g}, as after "
            f"a dropout with p = {rate:g}.",
            dropout=Afterwards("dropout", sentence, rate),
        )  # fmt: skip


def activated(pair: Pair) -> Iterator[Later]:
    """An activation may have come after the norm."""
    for one in seen(pair):
        where = f"Before {one.activations[0].said}, the output"
        if ELU in one.activations:
            where = "Where it is positive, the output"
        yield Later(one.pair, pair, where, activations=one.activations)


def _through(activation: Activation, whole: Pair, fit: Fit, z: Floats, bound: Floats) -> Fit:
    """The fit of a norm with the activation after it, held against every output."""
    y = activation.compute(z)
    known = np.isfinite(bound)
    if whole.mask is not None:
        known &= whole.mask
    if 2 * int(known.sum()) < known.size:
        return replace(fit, fits=False)
    reach = np.where(known, bound, 0.0)
    moved = np.maximum(
        np.abs(activation.compute(z + reach) - y), np.abs(activation.compute(z - reach) - y)
    )
    noise: Noise = whole.noise
    allowed = moved + noise.bound(2, np.abs(y), 0.0) + LOST * noise.compute * np.abs(z)
    difference = np.where(known, np.abs(whole.y - y), 0.0)
    with np.errstate(divide="ignore"):
        ratio = np.divide(difference, allowed, out=np.zeros_like(y), where=difference > 0)
    worst = float(ratio.max())
    return replace(
        fit, residual=float(difference.max()), mean_residual=float(difference.mean()),
        tolerance=float(allowed.max()), worst=worst, fits=worst <= 1.0,
    )  # fmt: skip


def _moved(pair: Pair, fit: Fit, bound: Floats) -> tuple[Floats, int]:
    """How far off each element may be, with the errors of those that weights were fitted to.

    By Cauchy and Schwarz; infinity for those of weights that too few elements show. Also how many
    such weights there are.
    """
    sharing, dimensions = fit.sharing, fit.affine.dimensions
    shape = sharing.expanded
    others = tuple(i for i in range(len(shape)) if i not in dimensions)
    valid = None if pair.mask is None else pair.mask.reshape(shape)
    u = fit.statistics.value(pair.x.reshape(shape), fit.formula.center)
    u = u * fit.statistics.factor(fit.formula, fit.eps)
    fitted = line(u, u, valid, others, fit.affine.bias_from == "fitted", False)
    about = u - (u.sum(others, keepdims=True, where=True if valid is None else valid)
                 / fitted.count if fitted.with_bias else 0.0)  # fmt: skip
    square = np.square(fitted.about).sum(others, keepdims=True)
    errors = np.square(bound.reshape(shape))
    errors = (errors if valid is None else errors * valid).sum(others, keepdims=True)
    taken = 1.0 / fitted.count if fitted.with_bias else 0.0
    with np.errstate(all="ignore"):
        moved = np.sqrt((taken + np.square(about) / square) * errors)
    enough = (square > 0) & (fitted.count >= FEW)
    reach = np.where(np.broadcast_to(enough, shape), bound.reshape(shape) + moved, np.inf)
    return reach.reshape(pair.shape), int((~enough).sum())


def _by_chance(kept: NDArray[np.bool_], values: Floats) -> bool:
    """Whether zeros stand at random places, neither at the small nor at the lowest values."""
    zeros = ~kept
    for own in (values, np.abs(values - float(values.mean()))):
        off = abs(float(own[zeros].mean()) - float(own.mean()))
        if off > CHANCE * float(own.std()) / math.sqrt(int(zeros.sum())):
            return False
    return True


def _slope(z: Floats, y: Floats) -> float | None:
    """What multiplies inputs below zero, None where it is no one number."""
    below = z < -0.1 * float(np.abs(z).max())
    if not below.any():
        return None
    slope = float(np.median(y[below] / z[below]))
    return roundest(0.999 * slope, 1.001 * slope) if 0 < slope < 1 else None
