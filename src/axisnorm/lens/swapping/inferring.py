"""What a module computes, concluded from its outputs and gradients on fresh inputs.

Nothing is believed because of a name. Which elements share statistics is read off the gradient of
single outputs, where weight and bias act off the gradients of the parameters, and every constant
off the output of inputs on which it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...scheme import Scheme
from ..identify import on_axes
from .probing import SEED, NotProved, free_sizes, fresh_copy

__all__ = ["Formula", "check_purity", "infer", "small_shape"]

POSITIONS = 8
"""How many outputs are differentiated."""

CLEAR = 1e-4
"""Constants that are measured in float32 are this near to their value."""


@dataclass(frozen=True)
class Formula:
    """A scheme, and which of a module's attributes are its parameters."""

    scheme: Scheme
    weight: str | None
    bias: str | None
    flattened: bool
    """Whether a parameter has axes of size 1, which a scheme has not."""
    first: int
    """The first of the axes whose size is given, from the end where it is negative."""
    sizes: tuple[int, ...]
    """Theirs: the shape of weight and bias, without axes of size 1."""
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    """Of weight and bias as they are."""

    @property
    def fixed(self) -> slice:
        """Of the input's shape, the part that is given."""
        return slice(self.first, (self.first + len(self.sizes)) or None)


@dataclass(frozen=True)
class _Structure:
    reduced: tuple[int, ...]
    """The axes that share statistics as a whole."""
    split: tuple[int, int] | None
    """An axis that does so in groups, and their number."""
    affine: tuple[int, ...]
    weight: str | None
    bias: str | None


def check_purity(module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a module that is more than a function of its input and its parameters.

    Raises:
        NotProved: it has state, depends on its mode or draws random numbers.
    """
    copied = fresh_copy(module)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    given = x.clone()
    state = _state(copied)
    outputs = []
    for training in (True, True, False):
        copied.train(training)
        with torch.no_grad():
            outputs.append(_run(copied, x))
        if not torch.equal(x, given):
            raise NotProved("it overwrites its own input")
    y = outputs[0].clone()
    if _state(copied) != state:
        raise NotProved("its forward changes the module")
    if not _equal(outputs[1], y):
        raise NotProved("it gives another output in every call")
    if not _equal(outputs[2], y):
        raise NotProved("its output depends on its training mode")
    if not _equal(_run(copied, x), y):
        raise NotProved("its output depends on whether gradients are recorded")


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes, each as what it is equal to only while it does not change."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name == "training":
            continue
        if isinstance(value, dict):
            found[name] = {key: _fixed(one) for key, one in value.items()}
        elif isinstance(value, (list, set)):
            found[name] = [_fixed(one) for one in value]
        else:
            found[name] = _fixed(value)
    return found


def _fixed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, (int, float, str, bool, tuple)) else id(value)


def _run(module: torch.nn.Module, x: Tensor) -> Tensor:
    try:
        y = type(module).forward(module, x)
    except Exception as error:
        raise NotProved(f"it raises {type(error).__name__} for a tensor of random numbers") from (
            error
        )
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise NotProved("its output is not a tensor of its input's shape")
    return y


def small_shape(
    module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], frozenset[int]]:
    """A small shape that the module takes, near to ``shape``, and the axes that have any size."""
    copied = fresh_copy(module)
    generator = torch.Generator().manual_seed(SEED)

    def accepts(sizes: tuple[int, ...]) -> bool:
        try:
            with torch.no_grad():
                _run(copied, torch.randn(sizes, generator=generator).to(dtype))
        except NotProved:
            return False
        return True

    return free_sizes(accepts, shape)


def infer(
    module: torch.nn.Module, small: tuple[int, ...], free: frozenset[int], dtype: torch.dtype
) -> Formula:
    """What the module computes on inputs like these.

    Args:
        small: a shape that it takes.
        free: the axes of which it takes any size.
        dtype: of its inputs.

    Raises:
        NotProved: it is no norm that this library has in one formula.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    copied = fresh_copy(module, wide).eval()
    generator = torch.Generator().manual_seed(SEED)

    def normal(sizes: Sequence[int]) -> Tensor:
        return torch.randn(tuple(sizes), generator=generator, dtype=wide)

    x = normal(small)
    found = _structure(copied, x, generator)
    measured = _Measured(copied, found, normal(small))
    offset = measured.weight_offset() if found.weight is not None else 0.0
    center = measured.is_centred()
    correction = measured.correction(center)
    eps = measured.eps(center, correction)
    said = [value for value in vars(module).values() if isinstance(value, float)]
    # None is the machine epsilon, which another type has another one of.
    machine = not center and math.isclose(eps, 2.0**-23, rel_tol=CLEAR) and not any(said)
    like = Scheme(
        "[d]",
        center=center,
        correction=correction,
        eps=None if machine else _published(eps, said),
        weight_offset=offset,
    )
    scheme = _scheme(x.dim(), found, like)
    given = found.affine
    if not given:
        changed = (*found.reduced, *((found.split[0],) if found.split else ()))
        given = tuple(sorted(axis for axis in changed if axis not in free))
    if given and given != tuple(range(given[0], given[0] + len(given))):
        raise NotProved("its parameters vary along axes that are not neighbours")
    first = given[0] if given else 0
    sizes = tuple(small[axis] for axis in given)
    weight, bias = (
        None if name is None else tuple(module.get_parameter(name).shape)
        for name in (found.weight, found.bias)
    )
    return Formula(
        scheme,
        found.weight,
        found.bias,
        any(shape not in (None, sizes) for shape in (weight, bias)),
        first - x.dim() if given and scheme.axes.startswith("...") else first,
        sizes,
        (weight, bias),
    )


# --------------------------------------------------------------------------------------------
# Which elements share statistics and parameters


def _structure(module: torch.nn.Module, x: Tensor, generator: torch.Generator) -> _Structure:
    """Read off the gradients of single outputs."""
    x = x.requires_grad_()
    y = _run(module, x)
    if not y.requires_grad:
        raise NotProved("its output has no gradient")
    named = dict(module.named_parameters())
    groups: set[tuple[str | int, ...]] = set()
    reached: dict[str, list[tuple[tuple[int, ...], list[int], float]]] = {n: [] for n in named}
    for _ in range(POSITIONS):
        place = tuple(int(torch.randint(n, (), generator=generator)) for n in x.shape)
        try:
            dx, *rest = torch.autograd.grad(
                y[place], [x, *named.values()], retain_graph=True, allow_unused=True
            )
        except Exception as error:
            raise NotProved(f"its gradient raises {type(error).__name__}") from error
        if dx is None:
            raise NotProved("its output does not depend on its input")
        groups.add(_group(dx, place))
        for name, grad in zip(named, rest, strict=True):
            if grad is None:
                continue
            places = grad.nonzero()
            if len(places) != 1:
                raise NotProved(f"'{name}' is not a weight or a bias that varies along whole axes")
            value = float(grad[tuple(places[0])])
            reached[name].append((place, places[0].tolist(), value))
    if len(groups) != 1:
        raise NotProved("which elements share statistics depends on the place")
    (roles,) = groups
    reduced = tuple(axis for axis, role in enumerate(roles) if role == "whole")
    split = [(axis, role) for axis, role in enumerate(roles) if isinstance(role, int)]
    if not reduced and not split:
        raise NotProved("no elements share statistics")
    if len(split) > 1:
        raise NotProved("it normalizes parts of several axes")
    used = {name: found for name, found in reached.items() if found}
    axes = {_varies_along(name, named[name], x, found) for name, found in used.items()}
    if len(axes) > 1:
        raise NotProved("its weight and its bias vary along different axes")
    biases = [n for n, found in used.items() if all(value == 1.0 for *_, value in found)]
    weights = [name for name in used if name not in biases]
    if len(biases) > 1 or len(weights) > 1:
        raise NotProved("its parameters are not one weight and one bias")
    return _Structure(
        reduced,
        (split[0][0], x.shape[split[0][0]] // int(split[0][1])) if split else None,
        next(iter(axes), ()),
        weights[0] if weights else None,
        biases[0] if biases else None,
    )


def _group(dx: Tensor, place: tuple[int, ...]) -> tuple[str | int, ...]:
    """For each axis: "kept", "whole", or the size of the groups that an output depends on."""
    places = dx.nonzero()
    if not len(places):
        raise NotProved("an output does not depend on the input")
    roles: list[str | int] = []
    count = 1
    for axis, size in enumerate(dx.shape):
        own = places[:, axis].unique()
        count *= len(own)
        first = int(own[0])
        if len(own) == 1 and first == place[axis]:
            roles.append("kept")
        elif len(own) == size:
            roles.append("whole")
        elif (
            int(own[-1]) - first + 1 == len(own) and size % len(own) == 0 and first % len(own) == 0
        ):
            roles.append(len(own))
        else:
            raise NotProved("the elements that share statistics are not a group along its axes")
    if count != len(places):
        raise NotProved("the elements that share statistics are not a group along its axes")
    return tuple(roles)


def _varies_along(
    name: str,
    parameter: Tensor,
    x: Tensor,
    reached: Sequence[tuple[tuple[int, ...], list[int], float]],
) -> tuple[int, ...]:
    """The axes of the input along which a parameter varies."""
    axes: list[int] = []
    for dimension, size in enumerate(parameter.shape):
        if size == 1:
            continue
        axis = next(
            (
                axis
                for axis in range(axes[-1] + 1 if axes else 0, x.dim())
                if x.shape[axis] == size
                and all(at[dimension] == place[axis] for place, at, _ in reached)
            ),
            None,
        )
        if axis is None:
            raise NotProved(f"'{name}' does not vary along axes of the input, in their order")
        axes.append(axis)
    if not axes:
        raise NotProved(f"'{name}' is one number for all elements")
    return tuple(axes)


def _scheme(ndim: int, found: _Structure, like: Scheme) -> Scheme:
    if found.split is None:
        return on_axes(ndim, found.reduced, found.affine, like)
    axis, groups = found.split
    if axis == 1 and found.reduced == tuple(range(2, ndim)) and found.affine in ((), (1,)):
        return like.replace(axes=f"n (g={groups} [c]) [...]", affine="g c" if found.affine else "")
    names = [f"a{i}" for i in range(ndim)]
    affine = [f"g a{i}" if i == axis else names[i] for i in found.affine]
    names = [f"[{name}]" if i in found.reduced else name for i, name in enumerate(names)]
    names[axis] = f"(g={groups} [{names[axis]}])"
    return like.replace(axes=" ".join(names), affine=" ".join(affine))


# --------------------------------------------------------------------------------------------
# The constants


class _Measured:
    """The normalized value z of an input, with the weight at 1 and the bias at 0."""

    def __init__(self, module: torch.nn.Module, found: _Structure, x: Tensor) -> None:
        self.module = module
        self.found = found
        self.x = x

    def _output(self, x: Tensor, weight: float) -> Tensor:
        with torch.no_grad():
            for name, value in ((self.found.weight, weight), (self.found.bias, 0.0)):
                if name is not None:
                    self.module.get_parameter(name).fill_(value)
            return _run(self.module, x)

    def _z(self, x: Tensor) -> Tensor:
        """Of the compute type; the weight's offset does not count."""
        if self.found.weight is None:
            return self._output(x, 1.0)
        return self._output(x, 2.0) - self._output(x, 1.0)

    def weight_offset(self) -> float:
        z, y = self._z(self.x), self._output(self.x, 1.0)
        if not bool(z.any()):
            raise NotProved("its output is zero")
        factor = float((y * z).sum() / z.square().sum())
        if not torch.allclose(y, factor * z, rtol=CLEAR, atol=CLEAR * float(z.abs().max())):
            raise NotProved("its output is not a normalized value times a weight plus a bias")
        return round(factor - 1.0, 4) + 0.0

    def _grouped(self, values: Tensor) -> Tensor:
        """A row for each group."""
        shape = list(values.shape)
        kept = [axis for axis in range(len(shape)) if axis not in self.found.reduced]
        inside = [axis for axis in range(len(shape)) if axis in self.found.reduced]
        if self.found.split is not None:
            axis, groups = self.found.split
            shape[axis : axis + 1] = [groups, shape[axis] // groups]
            kept = [i + (i > axis) for i in kept]
            inside = [i + (i > axis) for i in inside] + [axis + 1]
        return values.reshape(shape).permute(*kept, *inside).reshape(
            -1, math.prod(shape[i] for i in inside)
        )  # fmt: skip

    def _deviations(self, x: Tensor, center: bool) -> Tensor:
        rows = self._grouped(x).double()
        return rows - rows.mean(1, keepdim=True) if center else rows

    def _rates(self, x: Tensor, center: bool) -> tuple[Tensor, Tensor]:
        """1 / r^2 where z = r d, and the mean of d^2, of every group."""
        d = self._deviations(x, center)
        z = self._grouped(self._z(x)).double()
        rates = (z * d).sum(1) / d.square().sum(1)
        return rates.pow(-2), d.square().mean(1)

    def is_centred(self) -> bool:
        x = self.x + 0.5
        z = self._grouped(self._z(x)).double()
        residuals = []
        for center in (True, False):
            d = self._deviations(x, center)
            rates = (z * d).sum(1, keepdim=True) / d.square().sum(1, keepdim=True)
            residuals.append(float((z - rates * d).abs().max() / z.abs().max()))
        if not min(residuals) < CLEAR:
            raise NotProved(
                "within a group its output is not the input, or the input less its mean, times "
                "one factor"
            )
        return residuals[0] < residuals[1]

    def correction(self, center: bool) -> int:
        # So large that eps does not count.
        squares, spread = self._rates(self.x * 1e4, center)
        count = self._grouped(self.x).shape[1]
        ratio = float((squares / spread).median())
        known = {0: 1.0, 1: count / max(count - 1, 1)}
        nearest = min(known, key=lambda correction: abs(known[correction] - ratio))
        if not math.isclose(ratio, known[nearest], rel_tol=CLEAR):
            raise NotProved("it does not divide by the root of a variance or a mean square")
        return nearest

    def eps(self, center: bool, correction: int) -> float:
        # So small that nothing but eps counts.
        squares, spread = self._rates(self.x * 1e-9, center)
        count = self._grouped(self.x).shape[1]
        own = spread * (count / (count - correction))
        eps = float((squares - own).median())
        if not math.isfinite(eps):
            raise NotProved("small inputs give no finite output")
        return eps if eps > 1e-3 * float(own.median()) else 0.0


def _published(eps: float, said: Sequence[float]) -> float:
    """The number that was meant by a measured one."""
    for known in (*said, 1e-5, 1e-6, 1e-12, 1e-8, 1e-3, float(f"{eps:.2e}")):
        if math.isclose(eps, known, rel_tol=CLEAR):
            return known
    return eps
