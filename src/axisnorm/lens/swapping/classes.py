"""The classes that swapped modules get."""

from __future__ import annotations

import copy
import copyreg
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import functional
from ..._torch import in_memory_format
from .inferring import Formula
from .probing import Door
from .settings import Settings, still_hold

__all__ = [
    "Proof",
    "door_name",
    "forward_of",
    "generated",
    "originals",
    "reduced_as",
    "scriptable",
    "subclass",
]


@dataclass(frozen=True)
class Proof:
    """What was shown of a module, and for which inputs."""

    formula: Formula
    doors: frozenset[Door]
    ranks: frozenset[int]
    """The numbers of axes."""
    settings: Settings
    """What its forward reads beside input and parameters."""
    keeps_order: bool = True
    """Whether a transposed input gives an output that is transposed in memory."""


originals: dict[type, type[torch.nn.Module]] = {}
"""The class that each generated class stands for."""

_generated: dict[tuple[type, Proof], type[torch.nn.Module]] = {}


def generated(kind: type[torch.nn.Module], proof: Proof) -> type[torch.nn.Module]:
    """The subclass of a norm class that computes by this library what was proved.

    Every other input goes to the forward of ``kind`` itself.
    """
    if (kind, proof) not in _generated:
        _generated[kind, proof] = subclass(kind, forward_of(kind, proof))
    return _generated[kind, proof]


def subclass(kind: type[torch.nn.Module], forward: Callable[..., Any]) -> type[torch.nn.Module]:
    """A subclass that differs in its forward only, and pickles and copies as ``kind``."""

    def reduce(self: Any, protocol: Any) -> Any:
        # The generated class has no importable name.
        return reduced_as(kind, made, kind.__reduce_ex__(self, protocol))

    metaclass: Any = type(kind)
    made: type[torch.nn.Module] = metaclass(
        kind.__name__,
        (kind,),
        {
            "forward": forward,
            "__reduce_ex__": reduce,
            "__prepare_scriptable__": scriptable,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        },
    )
    originals[made] = kind
    return made


def reduced_as(kind: type, own: type, reduced: Any) -> Any:
    """What ``__reduce_ex__`` gives for an object of class ``own``, as one of ``kind``."""
    if isinstance(reduced, str):  # the name of a global
        return reduced
    make, args, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Which pickle allows for the object's own class only.
        make = object.__new__
    return (make, tuple(kind if one is own else one for one in args), *rest)


def scriptable(module: torch.nn.Module) -> torch.nn.Module:
    """What torch.jit.script compiles: the module as it was, with the same tensors."""
    twin = copy.copy(module)
    prepare = getattr(twin, "__prepare_scriptable__", None)
    return twin if prepare is None else prepare()


def door_name(formula: Formula) -> str:
    """The function of this library that computes the formula."""
    scheme = formula.scheme
    axes = scheme.axes
    last = axes.startswith("... [") and scheme.affine in ("", axes[5:-1])
    if scheme.correction or scheme.statistics != "batch":
        return "normalize"
    if last and not scheme.center and formula.bias is None:
        return "rms_norm"
    if not scheme.center or scheme.rounding != "once":
        return "normalize"
    if last:
        return "layer_norm"
    if scheme.weight_offset == 0:
        if axes in _CHANNELS_FIRST and scheme.affine in ("", "c"):
            return _CHANNELS_FIRST[axes]
        if _GROUPS.fullmatch(axes):
            return "group_norm"
    return "normalize"


_CHANNELS_FIRST = {"n [c] ...": "layer_norm_2d", "n c [...]": "instance_norm"}
_GROUPS = re.compile(r"n \(g=(\d+) \[c\]\) \[\.\.\.\]")


def _computing(formula: Formula) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The call of this library's function, of an input, a weight and a bias."""
    scheme, door = formula.scheme, door_name(formula)
    # None is for rms_norm alone; the other functions take a number.
    eps: Any = scheme.eps
    count = len(scheme.axes[5:-1].split())
    sizes = formula.sizes if len(formula.sizes) == count else ()

    def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is not None and offset:
            # Of its own type, where the fast way has no offset.
            weight = weight + offset
        return functional.layer_norm(x, sizes or x.shape[-count:], weight, bias, eps)

    def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.rms_norm(
            x, sizes or x.shape[-count:], weight, eps, weight_offset=offset, rounding=rounding
        )

    def layer_norm_2d(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm_2d(x, weight, bias, eps)

    def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.instance_norm(x, None, None, weight, bias, True, 0.0, eps)

    def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(x, groups, weight, bias, eps)

    def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.normalize(x, scheme, weight, bias)

    offset, rounding = scheme.weight_offset, scheme.rounding
    match = _GROUPS.fullmatch(scheme.axes)
    groups = int(match.group(1)) if match else 0
    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "layer_norm_2d": layer_norm_2d,
        "instance_norm": instance_norm,
        "group_norm": group_norm,
        "normalize": normalize,
    }[door]


def _written(formula: Formula) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The same call with its constants as text.

    With dynamic shapes, torch.compile takes a number that a function remembers for a variable.
    """
    scheme = formula.scheme
    # The short way of layer_norm adds the offset to the weight, in its type.
    added = repr(scheme.weight_offset) if door_name(formula) == "layer_norm" else "0.0"
    text = (scheme if added == "0.0" else scheme.replace(weight_offset=0.0)).text

    def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is not None and added != "0.0":
            weight = weight + float(added)
        return functional.normalize(x, text, weight, bias)

    return normalize


def forward_of(kind: type[torch.nn.Module], proof: Proof) -> Callable[..., Any]:
    """This library's function where the proof holds, the forward of ``kind`` elsewhere."""
    formula, ranks, settings = proof.formula, proof.ranks, proof.settings
    keeps_order = proof.keeps_order
    weight_name, bias_name = formula.weight, formula.bias
    fixed, sizes, flattened = formula.fixed, formula.sizes, formula.flattened
    weight_shape, bias_shape = formula.shapes
    doors = frozenset((door.x, door.weight, door.bias, door.autocast) for door in proof.doors)
    compute, written = _computing(formula), _written(formula)
    compiling = torch.compiler.is_compiling
    original: Callable[..., Any] = kind.forward
    autocasts, autocast_type = torch.is_autocast_enabled, torch.get_autocast_dtype

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            x = args[0]
            # A parameter that has become something else is none of these: see the doors.
            parameters = self._parameters
            weight, bias = parameters.get(weight_name), parameters.get(bias_name)
            door = (
                x.dtype,
                None if weight is None else weight.dtype,
                None if bias is None else bias.dtype,
                autocast_type("cpu") if autocasts("cpu") else None,
            )
            shape = x.shape
            if (
                door in doors
                and len(shape) in ranks
                and (not sizes or shape[fixed] == sizes)
                and (weight is None or weight.shape == weight_shape)
                and (bias is None or bias.shape == bias_shape)
                and x.is_cpu
                and still_hold(self, settings)
            ):
                if flattened:
                    weight = None if weight is None else weight.reshape(sizes)
                    bias = None if bias is None else bias.reshape(sizes)
                if keeps_order and not x.is_contiguous():
                    return written(x, weight, bias)
                if compiling():
                    return written(x if keeps_order else in_memory_format(x), weight, bias)
                return compute(x, weight, bias)
        return original(self, *args, **kwargs)

    return forward
