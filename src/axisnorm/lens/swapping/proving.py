"""The proof that a module computes what a function of this library does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import _route
from ...scheme import ArgumentError
from ..models.declared import declared_scheme
from .branching import check_branches
from .classes import Proof, forward_of
from .inferring import Formula, check_purity, infer, small_shape
from .probing import (
    Door,
    Forward,
    NoNorm,
    NotProved,
    calmly,
    check_agreement,
    check_nan,
    free_sizes,
    fresh_copy,
    probes,
)
from .settings import Settings, is_plain, of_every_module, settings_of

__all__ = ["Signature", "attributes_of", "check_drop_in", "could_be_a_norm", "prove"]


LARGE = 1000.0
"""By which parameters are multiplied."""


@dataclass(frozen=True)
class Signature:
    """What a module was called with: one tensor, and gave one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    """To what autocast casts; None where it was off."""


def attributes_of(module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
    """What tells two modules of one class apart, but for the values of their parameters."""
    own = [
        (name, value if is_plain(value) else id(value))
        for name, value in vars(module).items()
        if name not in of_every_module
    ]
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    return (("training", module.training), *own, *tensors)


def could_be_a_norm(module: torch.nn.Module) -> bool:
    """Whether it is worth a probe: a leaf with at most two parameters and nothing else."""
    return (
        not type(module).__module__.startswith("torch.")
        and next(module.children(), None) is None
        and next(module.buffers(), None) is None
        and sum(1 for _ in module.parameters()) <= 2
    )


def prove(module: torch.nn.Module, signatures: Collection[Signature]) -> Proof:
    """Show what a module of any class computes, on fresh inputs like those it was called with.

    Raises:
        NotProved: it is not shown, with the reason; NoNorm where it is none at all.
    """
    if next(module.children(), None) is not None:
        raise NotProved("it has modules inside")
    if next(module.buffers(), None) is not None:
        raise NotProved("it has buffers")
    if sum(1 for _ in module.parameters()) > 2:
        raise NotProved("it has more than a weight and a bias")
    with calmly():
        first, *_ = signatures
        try:
            small, free = small_shape(module, first.shape, first.dtype)
            check_purity(module, small, first.dtype)
            formula = infer(module, small, free, first.dtype)
        except NotProved as refusal:
            raise NoNorm(str(refusal)) from refusal
        _check_kernel(formula, first)
        check_branches(module, small, free, first.dtype)
        if formula.weight or formula.bias:
            rounding = _rounding(module, formula, small, free)
            formula = replace(formula, scheme=formula.scheme.replace(rounding=rounding))
        own = {_door(module, formula, signature) for signature in signatures}
        for door in own:
            _check_door(module, formula, small, free, door, thorough=True)
        for signature in signatures:
            if len(signature.shape) != len(small):
                _check_rank(module, formula, signature)
        doors = {
            door for door in _candidates(formula)
            if door in own or _holds(module, formula, small, free, door, thorough=False)
        }  # fmt: skip
        ranks = frozenset(len(signature.shape) for signature in signatures)
        settings, keeps_order = settings_of(module, small), _keeps_order(module, small, first.dtype)
        return Proof(formula, frozenset(own | doors), ranks, settings, keeps_order)


def check_drop_in(module: torch.nn.Module, drop_in: Forward, signature: Signature) -> None:
    """Show on fresh inputs that a drop-in class agrees with a module of torch.nn's own.

    Raises:
        NotProved: it does not.
    """
    kind = type(module)
    scheme = declared_scheme(module, len(signature.shape))
    assert scheme is not None
    with calmly():
        copied = fresh_copy(module)

        def accepts(shape: tuple[int, ...]) -> bool:
            try:
                with torch.no_grad():
                    kind.forward(fresh_copy(module), torch.randn(shape).to(signature.dtype))
            except (RuntimeError, ValueError, Warning):
                return False
            return True

        shape, free = free_sizes(accepts, signature.shape)
        weight, bias = (
            name if copied._parameters.get(name) is not None else None
            for name in ("weight", "bias")
        )
        with Door(signature.dtype, None, None, signature.autocast).entered():
            for probe in probes(shape, free, signature.dtype, scheme.eps, thorough=False):
                check_agreement(
                    copied, kind.forward, drop_in, scheme, (weight, bias), probe, bits=False
                )


def _keeps_order(module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the output of a transposed input is transposed, as that of an operation on elements.

    That of torch's norms is not, and what follows may rely on either.
    """
    backwards = tuple(range(len(shape) - 1, -1, -1))
    x = torch.randn(shape[::-1]).to(dtype).permute(backwards)
    with torch.no_grad():
        y: torch.Tensor = fresh_copy(module)(x)
    return y.stride() == torch.empty_like(x).stride()


def _check_kernel(formula: Formula, signature: Signature) -> None:
    dtype = str(signature.dtype).removeprefix("torch.")
    affine = bool(formula.scheme.affine)
    route = _route.choose(formula.scheme, signature.shape, dtype, affine=affine)
    if route.engine != "native":
        raise NotProved(f"no native kernel ({route.reason}): torch's own is faster")


def _door(module: torch.nn.Module, formula: Formula, signature: Signature) -> Door:
    """The types of a call."""
    weight, bias = (
        None if name is None else module.get_parameter(name).dtype
        for name in (formula.weight, formula.bias)
    )
    return Door(signature.dtype, weight, bias, signature.autocast)


def _candidates(formula: Formula) -> list[Door]:
    """The combinations of types that models use."""
    single, half, autocast = torch.float32, torch.bfloat16, torch.bfloat16
    kinds = [
        (single, single, None), (torch.float64, torch.float64, None),
        *((x, p, None) for x in (half, torch.float16) for p in (x, single)),
        (single, half, None),
        (single, single, autocast), (half, single, autocast), (half, half, autocast),
    ]  # fmt: skip
    doors = [
        Door(x, None if formula.weight is None else p, None if formula.bias is None else p, mode)
        for x, p, mode in kinds
    ]
    return list(dict.fromkeys(doors))


def _rounding(
    module: torch.nn.Module, formula: Formula, shape: tuple[int, ...], free: frozenset[int]
) -> str:
    """Where the module rounds, which half types show."""
    for half in (torch.bfloat16, torch.float16):
        door = Door(half, half if formula.weight else None, half if formula.bias else None)
        for rounding in ("once", "before_affine"):
            rounded = replace(formula, scheme=formula.scheme.replace(rounding=rounding))
            if _holds(module, rounded, shape, free, door, thorough=False):
                return rounding
    return "once"


def _holds(*args: Any, thorough: bool) -> bool:
    try:
        _check_door(*args, thorough=thorough)
    except NotProved:
        return False
    return True


def _check_door(
    module: torch.nn.Module,
    formula: Formula,
    shape: tuple[int, ...],
    free: frozenset[int],
    door: Door,
    *,
    thorough: bool,
) -> None:
    """The formula for inputs and parameters of these types."""
    kind = type(module)
    copied = fresh_copy(module)
    for name, dtype in ((formula.weight, door.weight), (formula.bias, door.bias)):
        if name is not None:
            parameter = copied.get_parameter(name)
            parameter.data = parameter.data.to(dtype)
    ranks = frozenset(range(len(shape) + 1))
    new = forward_of(kind, Proof(formula, frozenset({door}), ranks, Settings()))
    with door.entered():
        for probe in probes(shape, free, door.x, formula.scheme.eps, thorough=thorough):
            check_agreement(
                copied, kind.forward, new, formula.scheme, (formula.weight, formula.bias), probe,
                bits=True,
            )  # fmt: skip
        if thorough:
            (probe, *_) = probes(shape, free, door.x, formula.scheme.eps, thorough=False)
            check_nan(copied, kind.forward, new, probe)
            # What an output is limited to shows on large ones.
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.mul_(LARGE)
            probe = replace(probe, name="with large parameters")
            check_agreement(
                copied, kind.forward, new, formula.scheme, (formula.weight, formula.bias), probe,
                bits=True,
            )  # fmt: skip


def _check_rank(module: torch.nn.Module, formula: Formula, signature: Signature) -> None:
    """The formula for inputs of another number of axes."""
    try:
        formula.scheme.layout(len(signature.shape)).sizes(signature.shape)
    except ArgumentError as error:
        raise NotProved(
            f"with {len(signature.shape)} axes it is not '{formula.scheme}', as with others"
        ) from error
    small, free = small_shape(module, signature.shape, signature.dtype)
    other = infer(module, small, free, signature.dtype)
    if other.scheme != formula.scheme.replace(rounding="once"):
        raise NotProved(
            f"with {len(signature.shape)} axes it is '{other.scheme}', with others "
            f"'{formula.scheme}'"
        )
    door = _door(module, formula, signature)
    _check_door(module, formula, small, free, door, thorough=True)
