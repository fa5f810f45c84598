"""Norm modules of other libraries: what they might compute, to be tried on their data.

Nothing is believed because of a name. A module that has the shape of a norm is held against
every scheme here, and is reported as what fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import reference
from ...scheme import ArgumentError, Scheme
from ..identify import Candidate, fitted_eps, meanings, on_axes

__all__ = ["Guess", "eps_is_undetermined", "guesses", "looks_like_a_norm", "looks_normalized"]

EPS_NAMES = (
    "eps", "epsilon", "variance_epsilon", "layer_norm_eps", "norm_eps", "layer_norm_epsilon",
)  # fmt: skip
USUAL_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0)
LARGEST_EPS = 0.1
"""Attributes up to this might be an eps whatever they are called."""


@dataclass(frozen=True)
class Guess:
    """Schemes to try with one choice of weight and bias."""

    candidates: list[tuple[str, Scheme]]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    fitted: frozenset[Scheme]
    """Those whose eps is neither an attribute of the module nor shown to be a usual one."""
    running: tuple[torch.Tensor, torch.Tensor] | None = None
    """Running mean and variance, where the schemes use some."""

    @property
    def parameters(self) -> dict[str, torch.Tensor | None]:
        """By the names that :func:`tell_apart` has for them."""
        mean, var = self.running or (None, None)
        return {
            "weight": self.weight, "bias": self.bias, "running_mean": mean, "running_var": var,
        }  # fmt: skip


def looks_like_a_norm(
    module: torch.nn.Module, shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> bool:
    """Whether a module keeps the shape and has at most a weight and a bias that fit it."""
    if type(module).__module__.startswith("torch.nn.") or shape != out_shape or not shape:
        return False
    parameters = list(module._parameters.values())
    given = [parameter for parameter in parameters if parameter is not None]
    if next(module.children(), None) is not None or len(given) > 2:
        return False
    if not all(_affine_choices(tuple(parameter.shape), shape) for parameter in given):
        return False
    return bool(given) or _running(module) is not None or "norm" in type(module).__name__.lower()


def _running(module: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Running mean and variance under the names that all libraries have for them."""
    mean, var = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    if isinstance(mean, torch.Tensor) and isinstance(var, torch.Tensor) and mean.dim() == 1:
        return mean, var
    return None


def _frozen(module: Any, shape: tuple[int, ...]) -> Iterator[Guess]:
    """A batch norm of running statistics, whose weight and bias may be buffers."""
    running = _running(module)
    if running is None or len(shape) < 2 or shape[1] != len(running[0]):
        return
    weight, bias = (
        value if isinstance(value, torch.Tensor) and value.shape == running[0].shape else None
        for value in (getattr(module, name, None) for name in ("weight", "bias"))
    )
    said = list(_eps_said(module).values())
    schemes = {eps: Scheme.batch_norm(statistics="running", eps=eps) for eps in (*said, *USUAL_EPS)}
    fitted = frozenset(scheme for eps, scheme in schemes.items() if eps not in said)
    yield Guess([("BatchNorm", s) for s in schemes.values()], weight, bias, fitted, running)


def guesses(module: Any, x: torch.Tensor, y: torch.Tensor) -> Iterator[Guess]:
    """Schemes that the module might compute, with its parameters as weight and bias.

    The likeliest come first: the last axis or the weight's own axes. Their eps is fitted to the
    data; an attribute of the module or a usual value is taken where it agrees.
    """
    shape, half = tuple(x.shape), x.dtype in (torch.float16, torch.bfloat16)
    yield from _frozen(module, shape)
    said = _eps_said(module)
    named = {name: value for name, value in module._parameters.items() if value is not None}
    for weight, bias in _roles(named):
        tensor = weight if weight is not None else bias
        choices: Sequence[tuple[int, ...]] = [()]
        if tensor is not None:
            choices = _affine_choices(tuple(tensor.shape), shape)
        for affine in choices:
            found, fitted = [], set()
            for name, scheme in _schemes(shape, affine, half):
                if not _fits_parameters(scheme, shape, weight, bias):
                    continue
                eps, is_fitted = _eps(x, y, scheme, weight, bias, said)
                found.append((name, scheme.replace(eps=eps)))
                if is_fitted:
                    fitted.add(found[-1][1])
            yield Guess(found, weight, bias, frozenset(fitted))


def _fits_parameters(
    scheme: Scheme,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> bool:
    try:
        own = scheme.layout(len(shape)).sizes(shape).affine_shape
    except ArgumentError:
        return False
    return all(tuple(p.shape) == own for p in (weight, bias) if p is not None)


def _eps_said(module: Any) -> dict[str, float]:
    """The attributes of the module that may be its eps, those that are called so first."""
    own = {name: getattr(module, name, None) for name in EPS_NAMES} | vars(module)
    return {
        name: float(value)
        for name, value in own.items()
        if isinstance(value, float) and (name in EPS_NAMES or 0 < value <= LARGEST_EPS)
    }


def _eps(
    x: torch.Tensor,
    y: torch.Tensor,
    scheme: Scheme,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    said: Mapping[str, float],
) -> tuple[float, bool]:
    """The eps to try, and whether it was fitted.

    A usual value that agrees only because the data says little counts as fitted too.
    """
    known = [*said.values(), *USUAL_EPS]
    found = fitted_eps(x, y, scheme, weight, bias) if scheme.eps_placement != "max" else None
    if found is None:
        return known[0], False
    eps, uncertainty = found
    near = [value for value in known if abs(value - eps) <= uncertainty]
    if near:
        return near[0], near[0] not in said.values() and uncertainty > 0.1 * near[0]
    if eps <= 0 or eps > LARGEST_EPS or uncertainty >= eps:
        return known[0], False
    digits = max(0, min(2, round(math.log10(eps / uncertainty)) - 1)) if uncertainty else 2
    return float(f"{eps:.{digits}e}"), True


def eps_is_undetermined(
    module: Any, x: torch.Tensor, y: torch.Tensor, best: Candidate, guess: Guess
) -> bool:
    """Whether the data shows nothing of an eps that the module does not say either."""
    said = _eps_said(module)
    eps = best.scheme.eps
    if eps is None or any(said.get(name) == eps for name in EPS_NAMES):
        return False
    if best.scheme.eps_placement == "max":
        return True
    if guess.running is not None:
        return best.scheme in guess.fitted
    found = fitted_eps(x, y, best.scheme, guess.weight, guess.bias)
    return found is None or found[1] >= eps


def looks_normalized(x: torch.Tensor, y: torch.Tensor, guess: Guess) -> bool:
    """Whether the output without weight and bias has one size in every group, the input not."""
    if guess.running is not None:
        return False
    for axes, scheme in {c.layout(x.dim()).reduced_axes: c for _, c in guess.candidates}.items():
        # What a weight of one and a bias of zero do, in the layout of the scheme.
        plain = scheme.replace(center=False, weight_offset=0.0, rounding="once", eps=0.0)
        ones = torch.ones_like(x, dtype=torch.float64)
        factor, shift = ones, torch.zeros_like(ones)
        if guess.weight is not None:
            factor = reference.forward(ones, plain, guess.weight.detach().double())[0]
        if guess.bias is not None:
            one = torch.ones_like(guess.bias, dtype=torch.float64)
            bias = guess.bias.detach().double()
            shift = reference.forward(ones, plain, one, bias)[0] - ones
        if not bool((factor.abs() > 1e-3).all()):
            continue
        if float(shift.square().mean()) > 4 * float(y.detach().double().square().mean()):
            # It is no bias: what is left without it has one size whatever the output is.
            continue
        sizes = [
            values.square().mean(axes).sqrt().flatten()
            for values in (x.detach().double(), (y.detach().double() - shift) / factor)
        ]
        before, after = (_variation(size) for size in sizes)
        if after < 0.02 and before > 5 * after:
            return True
    return False


def _variation(values: torch.Tensor) -> float:
    """The deviation over the mean, of few values infinite."""
    mean = float(values.mean())
    return float(values.std()) / mean if len(values) > 3 and mean > 0 else math.inf


def _roles(
    named: dict[str, torch.Tensor],
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The parameters as weight and bias, in the order that their names make likely."""
    if not named:
        yield None, None
    elif len(named) == 1:
        (value,) = named.values()
        yield value, None
        yield None, value
    else:
        ordered = sorted(named, key=lambda name: name.startswith(("b", "shift", "offset")))
        first, second = (named[name] for name in ordered[:2])
        yield first, second
        yield second, first


def _affine_choices(own: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The axes along which a parameter of shape ``own`` may vary."""
    ndim = len(shape)
    found = []
    if own and own == shape[ndim - len(own) :]:
        found.append(tuple(range(ndim - len(own), ndim)))
    if len(own) == 1 and ndim >= 3 and own[0] == shape[1]:
        found.append((1,))
    return found


def _schemes(
    shape: tuple[int, ...], affine: tuple[int, ...], half: bool
) -> Iterator[tuple[str, Scheme]]:
    """The formulas to try, with any eps."""
    ndim = len(shape)
    own = affine or (ndim - 1,)
    centred = Scheme("[d]")
    plain = Scheme("[d]", center=False)
    kinds = [
        ("LayerNorm", centred),
        ("RMSNorm", plain),
        ("RMSNorm with 1 + weight", plain.replace(weight_offset=1.0)),
        ("LayerNorm with 1 + weight", centred.replace(weight_offset=1.0)),
        ("sample deviation, eps outside the root",
         centred.replace(correction=1, eps_placement="std")),
        ("sample deviation", centred.replace(correction=1)),
        ("LayerNorm, eps outside the root", centred.replace(eps_placement="std")),
        ("RMSNorm, eps outside the root", plain.replace(eps_placement="std")),
        ("not centred, over the sample deviation",
         plain.replace(scale="std", correction=1)),
        ("not centred, over the deviation", plain.replace(scale="std")),
        ("length", plain.replace(scale="l2", eps_placement="max")),
    ]  # fmt: skip
    for name, kind in kinds:
        if kind.weight_offset and not affine:
            continue
        for rounding in ("once", "before_affine") if half and affine else ("once",):
            like = kind.replace(rounding=rounding)
            yield name, on_axes(ndim, own, affine, like)
    trailing = affine != (1,)
    for reduced, (word, _) in meanings(ndim, trailing).items():
        if reduced != own:
            yield f"one mean {word}", on_axes(ndim, reduced, affine, centred)
            bessel = centred.replace(correction=1)
            yield f"one mean {word}, sample deviation", on_axes(ndim, reduced, affine, bessel)
            yield f"one root mean square {word}", on_axes(ndim, reduced, affine, plain)
