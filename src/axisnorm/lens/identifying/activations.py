"""Activations that may follow a norm: what they compute, and where their input is seen again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .evidence import Floats, Noise, Pair

__all__ = ["ELU", "FUNCTIONS", "LOST", "RELU", "Activation", "Seen", "leaky", "seen"]

KNOTS = 1 << 14
"""So many values of a function are tabulated to begin its inverse with."""

STEPS = 3
"""Newton's steps after that: each leaves about a millionth of the error."""

ENOUGH = 64
"""Of fewer outputs on the branch that is inverted nothing is said of an activation."""

LINEAR = 0.75
"""Outputs of sigmoid and tanh above this say little of their input."""

STEEP, SLOPE = 0.5, 0.7
"""Above this input the slope of no gate is smaller than this: a rounded output tells its input."""

LOST = 16.0
"""So many roundings of its input an activation may lose: torch's erf in float32 loses 11."""

SAME = 0.25
"""Inputs of two activations that differ by less of a rounding are one."""

ERF_STEP, ERF_REACH = 2.0**-11, 6.0
"""The error function is tabulated so closely, up to where it is 1: math.erf takes one number."""

FLAT = 0.35
"""Outputs below zero that are smaller than this beside those above are what a leaky ReLU gives."""


@dataclass(frozen=True, eq=False)
class Activation:
    """A function of single numbers with a name."""

    code: str
    """As the function is called in torch.nn.functional."""
    said: str
    compute: Callable[[Floats], Floats]


@dataclass(frozen=True, eq=False)
class Seen:
    """The input of an activation, computed from the outputs that show it, as a pair."""

    pair: Pair
    """The output's place is taken by the activation's input; the mask tells where it is known."""
    activations: tuple[Activation, ...]
    """That have this input there, and differ elsewhere."""


@cache
def _erf_table() -> tuple[Floats, Floats]:
    """The error function and its slope at the knots."""
    knots = np.arange(round(ERF_REACH / ERF_STEP) + 1) * ERF_STEP
    values = np.array([math.erf(knot) for knot in knots.tolist()])
    return values, 2.0 / math.sqrt(math.pi) * np.exp(-knots * knots)


def _erf(values: Floats) -> Floats:
    """By Taylor's series about the nearest knot: the fifth term is below the last digit."""
    table, slopes = _erf_table()
    size = np.minimum(np.abs(values), ERF_REACH)
    place = np.rint(size / ERF_STEP).astype(np.int64)
    x = place * ERF_STEP
    d = size - x
    series = d * (1 + d * (-x + d * ((2 * x * x - 1) / 3 + d * (3 * x - 2 * x**3) / 6)))
    return np.copysign(table[place] + slopes[place] * series, values)


def _gelu(z: Floats) -> Floats:
    return 0.5 * z * (1.0 + _erf(z / math.sqrt(2.0)))


def _gelu_tanh(z: Floats) -> Floats:
    return 0.5 * z * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))


def _sigmoid(z: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def _silu(z: Floats) -> Floats:
    return z * _sigmoid(z)


def _quick_gelu(z: Floats) -> Floats:
    return z * _sigmoid(1.702 * z)


def _mish(z: Floats) -> Floats:
    return z * np.tanh(np.logaddexp(0.0, z))


def _relu(z: Floats) -> Floats:
    return np.maximum(z, 0.0)


def _elu(z: Floats) -> Floats:
    return np.where(z > 0, z, np.expm1(np.minimum(z, 0.0)))


def leaky(slope: float) -> Activation:
    """A leaky ReLU."""
    return Activation(
        "leaky_relu",
        f"leaky ReLU of slope {slope:g}",
        lambda z: np.where(z > 0, z, slope * z),
    )


RELU = Activation("relu", "ReLU", _relu)
ELU = Activation("elu", "ELU", _elu)
SIGMOID = Activation("sigmoid", "sigmoid", _sigmoid)
TANH = Activation("tanh", "tanh", np.tanh)

GATED = (
    Activation("gelu", "GELU", _gelu),
    Activation("gelu_tanh", "GELU by tanh", _gelu_tanh),
    Activation("silu", "SiLU", _silu),
    Activation("quick_gelu", "quick GELU", _quick_gelu),
    Activation("mish", "Mish", _mish),
)
"""The input times a gate that opens with it: a positive output has one input."""

FUNCTIONS = (
    RELU, SIGMOID, TANH, *GATED, ELU, *(leaky(slope) for slope in (0.01, 0.1, 0.2)),
    Activation("exp", "exp", np.exp),
    Activation("abs", "abs", np.abs),
    Activation("square", "square", np.square),
    Activation("softplus", "softplus", lambda z: np.logaddexp(0.0, z)),
)  # fmt: skip
"""What an output may be of its own input alone."""

LOWEST = {
    one.code: float(one.compute(np.linspace(-3.0, 0.0, 3001)).min()) for one in GATED
}  # fmt: skip
"""The smallest output of each."""


def seen(pair: Pair) -> Iterator[Seen]:
    """The activations that the outputs may have passed, with what they were made of."""
    y = pair.y
    above, below = y > 0, y < 0
    if above.sum() < ENOUGH:
        return
    # The output of a norm was rounded before it went on, and functions lose some digits.
    noise = replace(pair.noise, unit=3.0 * pair.noise.unit, twice_rounded=False)
    # Where no slope is smaller, half a step of the output over the slope is that of the input.
    lowest, highest, half = float(y.min()), float(y.max()), pair.noise.quantum
    if lowest >= 0:
        # Where no output comes near 1 a sigmoid is nearly exp, and tanh nearly a line.
        if LINEAR < highest <= 1 + half and (lowest > 0 or half):
            low = (y <= LINEAR) & (y >= (1 - LINEAR if half else 0))
            z = np.log(np.where(low, y, 0.5)) - np.log1p(-np.where(low, y, 0.5))
            own = replace(noise, quantum=4.0 * noise.unit + half / (LINEAR * (1 - LINEAR)))
            yield Seen(_with_output(pair, z, low, own), (SIGMOID,))
        return
    if LINEAR < max(highest, -lowest) <= 1 + half:
        middle = np.abs(y) <= LINEAR
        own = replace(noise, unit=2.0 * noise.unit, quantum=half / (1 - LINEAR**2))
        z = np.arctanh(np.where(middle, y, 0.0))
        yield Seen(_with_output(pair, z, middle, own), (TANH,))
    enough = int(below.sum()) >= ENOUGH
    found: list[Seen] = []
    for one in GATED:
        least = LOWEST[one.code]
        off = 4 * noise.unit * abs(least) + half
        # Many outputs come near the lowest one: where none does it is another activation.
        if least - off <= lowest and (not enough or lowest <= 0.995 * least + off):
            open_ = above
            if half:
                open_ = y >= float(one.compute(np.asarray(STEEP)))
            z, known = _inverted(one, y, open_)
            near = SAME * noise.unit * np.abs(z)
            if found and bool((np.abs(found[-1].pair.y - z) <= near).all()):
                found[-1] = replace(found[-1], activations=(*found[-1].activations, one))
                continue
            own = replace(noise, quantum=half / SLOPE)
            found.append(Seen(_with_output(pair, z, known, own), (one,)))
    yield from found
    small = float(np.abs(y[below]).mean()) < FLAT * float(y[above].mean())
    if enough and (small or -1 - half <= lowest <= -0.5):
        yield Seen(_with_output(pair, y, above, noise), (ELU,))


def _with_output(pair: Pair, z: Floats, known: NDArray[np.bool_], noise: Noise) -> Pair:
    return pair.with_mask(known, statistics=False).with_output(z, noise)


def _inverted(
    activation: Activation, y: Floats, above: NDArray[np.bool_]
) -> tuple[Floats, NDArray[np.bool_]]:
    """The positive inputs of positive outputs, and where they were found."""
    values = y[above]
    knots = np.linspace(0.0, 1.0, KNOTS) ** 2 * (float(values.max()) + 1.0)
    table = activation.compute(knots)
    slopes = np.gradient(table, knots)
    z = np.interp(values, table, knots)
    for _ in range(STEPS):
        z = np.maximum(z - (activation.compute(z) - values) / np.interp(z, knots, slopes), 0.0)
    good = np.abs(activation.compute(z) - values) <= 1e-14 * values
    inverse, known = np.zeros_like(y), above.copy()
    inverse[above], known[above] = z, good
    return inverse, known
