"""Fresh inputs for a module, and whether two forwards agree on them in value and gradient."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...scheme import ArgumentError, Scheme
from ..models.observe import random_states_kept

__all__ = [
    "Door",
    "Forward",
    "NoNorm",
    "NotProved",
    "Probe",
    "calmly",
    "check_agreement",
    "free_sizes",
    "fresh_copy",
    "probes",
]

Forward = Callable[..., Any]
"""An unbound forward: of a module and its input."""

SEED = 20
UNIT = 2.0**-23
"""Of float32, in which half types are computed and statistics are kept."""

FURTHER = 3
"""How much larger an axis is in the probe of another shape."""

UNEQUAL_SHARE = 0.01
"""Of the elements of a half type that may differ in their last bit.

Two float32 computations that differ in their last bits round to two half numbers for less than
one element in a thousand; two rounding points, for one in four (measured: 24 to 26 %).
"""


LEAST = {torch.float16: 2.0**-10}
"""Of inputs less than this, the gradient may be beyond the range of the type, where torch's own
norms give NaN. That their eps counts is shown in float32."""


class NotProved(Exception):  # noqa: N818, it is an answer
    """Why a module is not shown to be a norm of this library, in a short sentence."""


class NoNorm(NotProved):
    """Why a module is not one normalized value times a weight plus a bias at all."""


@dataclass(frozen=True)
class Door:
    """The types with which a forward is called; autocast's is None where it is off."""

    x: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    autocast: torch.dtype | None = None

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.autocast is not None
        return torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=enabled)


@dataclass(frozen=True)
class Probe:
    """An input and the gradient of the output."""

    name: str
    x: Tensor
    grad: Tensor


@contextlib.contextmanager
def calmly() -> Iterator[None]:
    """Random states stay as they are, and gradients can be taken whatever mode surrounds."""
    usual = torch.get_default_device().type == "cpu"
    with (
        contextlib.nullcontext() if usual else torch.device("cpu"),
        random_states_kept(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def fresh_copy(module: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A copy with random parameters and running statistics, of ``dtype`` if one is given.

    Raises:
        NotProved: it cannot be copied.
    """
    generator = torch.Generator().manual_seed(SEED)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        size = torch.rand(parameter.shape, generator=generator) + 0.25
        sign = torch.rand(parameter.shape, generator=generator) < 0.75
        values = torch.where(sign, size, -size).to(dtype or parameter.dtype)
        memo[id(parameter)] = torch.nn.Parameter(values)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and "running" in name:
            positive = torch.rand(buffer.shape, generator=generator) + 0.5
            memo[id(buffer)] = positive.to(buffer.dtype)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NotProved(f"it cannot be copied ({type(error).__name__})") from error


def free_sizes(
    accepts: Callable[[tuple[int, ...]], bool], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """A small shape that the module accepts, near to ``shape``, and the axes that had a choice.

    Args:
        accepts: whether the module takes a shape; a warning is a no.
    """

    def silently(shape: tuple[int, ...]) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return accepts(shape)

    free = set()
    for axis, size in enumerate(shape):
        # Different sizes, so that no axis is taken for another; many where many may share a mean.
        small = 3 + axis if axis < len(shape) - 1 else 16
        small += 8 * (small == size)
        before, after = shape[:axis], shape[axis + 1 :]
        # Two sizes, since one might be chance: 4 channels fit 4 groups.
        if all(silently((*before, other, *after)) for other in (small, small + FURTHER)):
            shape = (*before, small, *after)
            free.add(axis)
    return shape, frozenset(free)


def probes(
    shape: tuple[int, ...],
    free: frozenset[int],
    dtype: torch.dtype,
    eps: float | None,
    *,
    thorough: bool,
) -> Iterator[Probe]:
    """Inputs on which two norms differ if they differ at all."""
    generator = torch.Generator().manual_seed(SEED + 1)

    def probe(name: str, values: Tensor) -> Probe:
        grad = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        return Probe(name, values.to(dtype), grad.to(dtype))

    def normal(sizes: Sequence[int]) -> Tensor:
        return torch.randn(tuple(sizes), generator=generator, dtype=torch.float64)

    yield probe("whose mean is not 0", normal(shape) + 0.5)
    least = LEAST.get(dtype, 0.0)
    small = math.sqrt(eps) if eps else 1e-3
    yield probe("whose square is like eps", normal(shape) * max(small, least))
    if not thorough:
        return
    yield probe("whose mean is large", normal(shape) + 3.0)
    yield probe("of size 1000", normal(shape) * 1e3)
    other = [size + FURTHER * (axis in free) for axis, size in enumerate(shape)]
    yield probe("of another shape", normal(other))
    one = [1 if axis in free and axis == 0 else size for axis, size in enumerate(shape)]
    yield probe("of one sample", normal(one))
    backwards = tuple(range(len(shape)))[::-1]
    yield probe("that is transposed", normal(shape[::-1]).permute(backwards))
    if eps and small >= least:
        yield probe("that is constant", torch.full(shape, 1.1, dtype=torch.float64))
        yield probe("of zeros", torch.zeros(shape, dtype=torch.float64))


# --------------------------------------------------------------------------------------------
# Agreement


def check_agreement(
    module: torch.nn.Module,
    original: Forward,
    replacement: Forward,
    scheme: Scheme,
    names: tuple[str | None, str | None],
    probe: Probe,
    *,
    bits: bool,
) -> None:
    """Compare two forwards of a module on one probe, in value and in every gradient.

    Args:
        module: a copy, whose buffers may change.
        names: of the module's weight and bias.
        bits: whether half types are compared bit by bit, which shows their rounding points.

    Raises:
        NotProved: they differ by more than their roundings explain.
    """
    # Without buffers a forward leaves nothing behind.
    other = copy.deepcopy(module) if next(module.buffers(), None) is not None else module
    try:
        before = _outcome(module, original, probe)
    except Exception as error:
        raise NotProved(f"it raises {type(error).__name__} for an input {probe.name}") from error
    try:
        after = _outcome(other, replacement, probe)
    except ArgumentError as error:
        raise NotProved(f"an input {probe.name} is none of '{scheme}'") from error
    for (name, moved), (_, ours) in zip(module.named_buffers(), other.named_buffers(), strict=True):
        limit = 64 * UNIT * max(1.0, moved.abs().amax().item())
        if not (moved.double() - ours.double()).abs().amax().item() <= limit:
            raise NotProved(f"'{name}' moves differently for an input {probe.name}")
    weight, bias = (None if name is None else module._parameters[name] for name in names)
    allowed = _allowed(module, probe, scheme, weight, bias)
    for what, one in before.items():
        two = after[what]
        kind = "output" if what == "output" else "gradient"
        said = "its output" if what == "output" else f"its gradient of {what}"
        if (one is None) != (two is None):
            raise NotProved(f"{said} exists in one of the two only")
        if one is None or two is None:
            continue
        if one.dtype != two.dtype or one.shape != two.shape:
            raise NotProved(
                f"{said} is {_type(one)}, not {_type(two)} as its input"
                if one.dtype != two.dtype
                else f"{said} has another shape than its input"
            )
        limit = allowed.get(what, allowed[kind])
        if bits and what == "output" and one.dtype in (torch.float16, torch.bfloat16):
            _check_bits(one, two, limit, probe)
            continue
        difference = (one.double() - two.double()).abs().amax().item() if one.numel() else 0.0
        if not difference <= limit:
            raise NotProved(
                f"{said} differs from '{scheme}' by {difference:.2g} for an input {probe.name}; "
                f"rounding explains {limit:.2g}"
            )


def check_nan(
    module: torch.nn.Module, original: Forward, replacement: Forward, probe: Probe
) -> None:
    """Compare where two forwards are NaN if one element of the input is.

    Raises:
        NotProved: the original replaces NaN by numbers, or refuses it.
    """
    x = probe.x.clone()
    x.view(-1)[0] = math.nan
    try:
        with torch.no_grad():
            before, after = (forward(module, x).isnan() for forward in (original, replacement))
    except Exception as error:
        raise NotProved(f"it raises {type(error).__name__} for an input with NaN") from error
    if not torch.equal(before, after):
        raise NotProved("of an input with NaN it gives numbers where a norm gives NaN")


def _check_bits(one: Tensor, two: Tensor, limit: float, probe: Probe) -> None:
    unequal = (one != two).double().mean().item()
    largest = (one.double() - two.double()).abs().amax().item()
    # Few elements are few chances: of less than a hundred, one may differ.
    if unequal > max(UNEQUAL_SHARE, 1 / one.numel()) or not largest <= limit:
        raise NotProved(
            f"in {_type(one)} it rounds elsewhere: {unequal:.0%} of the elements differ for an "
            f"input {probe.name}"
        )


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _outcome(module: torch.nn.Module, forward: Forward, probe: Probe) -> dict[str, Tensor | None]:
    """The output and the gradients of the input and of each parameter."""
    x = probe.x.detach().requires_grad_()
    y = forward(module, x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise NotProved("its output is not a tensor of its input's shape")
    named = [("its input", x), *((f"'{n}'", p) for n, p in module.named_parameters())]
    grads = torch.autograd.grad(
        y, [tensor for _, tensor in named], probe.grad.to(y.dtype), allow_unused=True
    )
    found: dict[str, Tensor | None] = {"output": y.detach()}
    return found | {name: grad for (name, _), grad in zip(named, grads, strict=True)}


def _allowed(
    module: torch.nn.Module,
    probe: Probe,
    scheme: Scheme,
    weight: Tensor | None,
    bias: Tensor | None,
) -> dict[str, float]:
    """How far roundings take two computations apart.

    With u the unit of the compute type, k roundings in a row, the largest |x| rstd = M and |xhat|
    = X, the mean is in error by k u |x|, so xhat by k u (X + M), and the gradient of the input, r
    (g - mean(g) - xhat mean(g xhat)), by that times r G X. A half type adds its own roundings of
    the output, and of the gradients at every operator that autograd differentiates.
    """
    x = probe.x.detach().double()
    running = {}
    if scheme.statistics == "running":
        buffers: Mapping[str, Any] = module._buffers
        running = {name: buffers[name].double() for name in ("running_mean", "running_var")}
    plain = scheme.replace(rounding="once")
    xhat, moments = reference.forward(x, plain, **running)
    ones = None if weight is None else weight.detach().double().abs() + abs(scheme.weight_offset)
    largest = 1.0 if ones is None else ones.amax().item()
    offset = 0.0 if bias is None else bias.detach().abs().amax().item()
    size = xhat.abs().amax().item()
    rate = moments.rstd.abs().amax().item()
    mean = x.abs().amax().item() * rate if scheme.center else 0.0
    grad = probe.grad.double().abs().amax().item()
    count = scheme.layout(x.dim()).sizes(tuple(x.shape)).group_size
    wide = x.numel() / max(1, 1 if weight is None else weight.numel())
    unit = 2.0**-52 if probe.x.dtype == torch.float64 else UNIT
    roundings = unit * (8 + 2 * math.log2(max(count, 2)))
    error = roundings * (size + mean)
    narrow = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(probe.x.dtype, 0.0)
    types = [p.dtype for p in module.parameters()]
    if narrow == 0.0 and (torch.bfloat16 in types or torch.float16 in types):
        narrow = 2.0**-7
    # An element of a half type is rounded where it stands, and is at least this far from zero.
    tiny = 2.0**-24 if probe.x.dtype == torch.float16 else 0.0
    relative = 4 * (error + roundings + narrow)
    return {
        "output": largest * error + unit * offset + narrow * 2 * (largest * size + offset) + tiny,
        "its input": rate * grad * largest * (1 + size) * relative + tiny,
        "gradient": wide * grad * (1 + size) * relative + tiny,
    }
