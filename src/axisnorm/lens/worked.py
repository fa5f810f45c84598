"""One group of a tensor worked through by hand, with every intermediate value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..scheme import Scheme, Sizes
from .half_types import HALF_TYPES, rounded

__all__ = ["Step", "Worked", "work_through"]

SHOWN = 64
"""How many elements of a group are kept."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One line of the calculation."""

    name: str
    how: str
    """What it is made of, in the names of earlier lines."""
    values: tuple[float, ...]
    """One number, or one for each of the group's elements, at most 64."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "how": self.how, "values": list(self.values)}


@dataclass(frozen=True)
class Worked:
    """One group worked through by hand, in float64."""

    group: tuple[int, ...]
    """Which group: its index in the statistics' shape."""
    index: tuple[int, ...]
    """The element of x that is followed to the end."""
    size: int
    """How many elements the group has."""
    elements: tuple[float, ...]
    """Its elements, at most 64."""
    steps: tuple[Step, ...]
    """Every intermediate value, from the elements to the output."""
    mean: float
    """What is subtracted: 0 where nothing is."""
    var: float
    """What eps is added to: the variance, mean square or sum of squares."""
    x: float
    normalized: float
    weight: float | None
    bias: float | None
    y: float

    @property
    def divides(self) -> float:
        """What the difference is divided by: it stands before the first line that was divided."""
        names = [step.name for step in self.steps]
        return self.steps[names.index("normalized") - 1].values[0]

    @property
    def rstd(self) -> float:
        """What the difference is multiplied by: 1 over what divides, 0 where that is 0."""
        return 1.0 / self.divides if self.divides else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "group": list(self.group),
            "index": list(self.index),
            "size": self.size,
            "elements": list(self.elements),
            "steps": [step.to_dict() for step in self.steps],
            "mean": self.mean,
            "var": self.var,
            "rstd": self.rstd,
            "x": self.x,
            "normalized": self.normalized,
            "weight": self.weight,
            "bias": self.bias,
            "y": self.y,
        }


def work_through(
    sizes: Sizes,
    told: Sequence[int],
    x: Values,
    mean: Values,
    var: Values,
    weight: Values | None,
    bias: Values | None,
    dtype: str,
) -> Worked:
    """Work through the group of the first element.

    Args:
        sizes: of the scheme at x's shape.
        told: the dimensions, split axes as several, along which the statistics vary.
        x: the input in float64.
        mean: the statistics that are used, of one value a group.
        var: as mean.
        weight: of the scheme's affine shape.
        bias: as weight.
        dtype: of the input as it came: half types are rounded to.
    """
    scheme = sizes.layout.scheme
    own = tuple(slice(0, 1) if i in told else slice(None) for i in range(len(sizes.expanded)))

    def of_group(values: Values | None) -> Values | None:
        if values is None:
            return None
        full = np.broadcast_to(values.reshape(sizes.affine_expanded), sizes.expanded)
        return full[own].reshape(-1)

    elements = x.reshape(sizes.expanded)[own].reshape(-1)
    m, v = float(mean.flat[0]), float(var.flat[0])
    weights, biases = of_group(weight), of_group(bias)
    with np.errstate(over="ignore"):
        steps = list(_steps(scheme, elements, m, v, weights, biases, dtype))
    found = {step.name: step.values for step in steps}
    return Worked(
        group=tuple(0 for _ in told),
        index=tuple(0 for _ in sizes.shape),
        size=len(elements),
        elements=_kept(elements),
        steps=tuple(steps),
        mean=m,
        var=v,
        x=float(elements[0]),
        normalized=found["normalized"][0],
        weight=None if weights is None else float(weights[0]),
        bias=None if biases is None else float(biases[0]),
        y=found["y"][0],
    )


def _kept(values: Values) -> tuple[float, ...]:
    return tuple(values[:SHOWN].tolist())


def _steps(
    scheme: Scheme,
    x: Values,
    mean: float,
    var: float,
    weight: Values | None,
    bias: Values | None,
    dtype: str,
) -> Iterator[Step]:
    def one(name: str, how: str, value: float) -> Step:
        return Step(name, how, (float(value),))

    n = len(x)
    spread = "variance"
    value = x - mean if scheme.center else x
    if scheme.statistics == "running":
        if scheme.center:
            yield one("mean", "the running mean", mean)
        yield one("variance", "the running variance", var)
    else:
        deviation, squared = value, "deviations^2"
        if scheme.center or scheme.scale == "std":
            total = float(x.sum())
            # Without centring the mean is not handed down: it enters the variance alone.
            middle = mean if scheme.center else total / n
            deviation = x - middle
            yield one("sum", "sum of x", total)
            yield one("mean", f"sum / {n}", middle)
            yield Step("deviations", "x - mean", _kept(deviation))
        else:
            spread, squared = "mean square", "x^2"
        squares = deviation * deviation
        yield Step("squares", squared, _kept(squares))
        yield one("sum of squares", "sum of the squares", squares.sum())
        if scheme.scale == "l2":
            spread = "sum of squares"
        else:
            yield one(spread, f"sum of squares / {n - scheme.correction:g}", var)
    eps = reference.resolve_eps(scheme, dtype)
    division = [one(*line) for line in _division(scheme, spread, var, eps)]
    yield from division
    divides = division[-1].values[0]
    normalized = value * (1.0 / divides if divides else 0.0)
    below = f"({division[-1].name})" if " + " in division[-1].name else division[-1].name
    above = "(x - mean)" if scheme.center else "x"
    yield Step("normalized", f"{above} / {below}", _kept(normalized))
    if scheme.rounding == "before_affine" and dtype in HALF_TYPES:
        normalized = rounded(normalized, dtype)
        yield Step("rounded", f"normalized, in {dtype}", _kept(normalized))
    y, how = normalized, "normalized"
    for name, values in (("weight", weight), ("bias", bias)):
        # One number for the whole group stands in the last line.
        if values is not None and (values != values[0]).any():
            yield Step(name, f"the {name} of each element", _kept(values))
    if weight is not None:
        y = y * (weight + scheme.weight_offset)
        how += f" * ({scheme.weight_offset:g} + weight)" if scheme.weight_offset else " * weight"
    if bias is not None:
        y = y + bias
        how += " + bias"
    if dtype in HALF_TYPES:
        y = rounded(y, dtype)
        how += f", rounded to {dtype}"
    yield Step("y", how, _kept(y))


def _division(
    scheme: Scheme, spread: str, var: float, eps: float
) -> Iterator[tuple[str, str, float]]:
    """From the variance to what divides, a line for each operation."""
    roots = {"var": 0, "sqrt_std": 2}.get(scheme.scale, 1)
    value, name = var, spread
    plus = f" + {eps:g}"
    if scheme.eps_placement == "variance" and roots:
        if roots == 2:
            value, name = math.sqrt(value), "deviation"
            yield name, f"sqrt({spread})", value
        value += eps
        yield f"{name} + eps", f"{name}{plus}", value
        yield "root", f"sqrt({name} + eps)", _root(value)
        return
    for step in range(roots):
        inner = name
        value, name = _root(value), "deviation" if step + 1 < roots else "root"
        yield name, f"sqrt({inner})", value
    if scheme.eps_placement == "max":
        yield f"max({name}, eps)", f"max({name}, {eps:g})", max(value, eps)
    else:
        yield f"{name} + eps", f"{name}{plus}", value + eps


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan
