"""Norms as models write them: ``LayerNorm(768)``, ``nn.GroupNorm(32, 64, eps=1e-6)``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..presets import PRESETS
from ..scheme import ArgumentError, Scheme

__all__ = ["constructed"]

_WRITTEN = re.compile(
    r"(?:torch\.|axisnorm\.)?(?:nn\.)?(?P<name>[A-Za-z]\w*?)(?P<rank>[123]d)?"
    r"\s*(?P<call>\(.*?\))?(?P<eval>\.eval\(\)| in eval)?"
)


def constructed(text: str) -> Scheme | None:
    """The scheme of a norm that is written as its constructor's call or as its class, else None.

    Names, arguments and defaults are those of torch.nn and axisnorm.nn. A class alone stands for
    the norm with weight and bias.

    Raises:
        ArgumentError: the arguments are not those of the constructor.

    >>> constructed("nn.GroupNorm(2, 6)")
    Scheme('n (g=2 [c=3]) [...]; affine=g c')
    >>> constructed("LayerNorm((3, 4), eps=1e-12)")
    Scheme('... [(s=3) (d=4)]; affine=s d; eps=1e-12')
    >>> constructed("BatchNorm2d(64).eval()").statistics
    'running'
    >>> constructed("n (g [c])") is None
    True
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        return None
    name, rank, call, evaluated = match.group("name", "rank", "call", "eval")
    make = _CONSTRUCTORS.get(name + (rank or "")) or _CONSTRUCTORS_BY_RANK.get(name)
    if make is None:
        return None
    found = PRESETS[_CLASSES[make]] if call is None else _called(make, name + (rank or ""), call)
    if evaluated and make is _batch_norm:
        found = found.replace(statistics="running")
    return found


def _called(make: Callable[..., Scheme], name: str, call: str) -> Scheme:
    takes = inspect.signature(make)
    try:
        args, given = _literals(call)
    except (ValueError, SyntaxError) as error:
        raise ArgumentError(
            f"A constructor's arguments are numbers here, as in {name}{_without_types(takes)}. "
            f"'{name}{call}' came. Write the numbers that the names stand for."
        ) from error
    try:
        takes.bind(*args, **given)
    except TypeError as error:
        raise ArgumentError(
            f"The constructor is {name}{_without_types(takes)}. "
            f"'{name}{call}' came: {error}. Write its arguments."
        ) from error
    return make(*args, **given)


def _without_types(signature: inspect.Signature) -> str:
    given = (p.replace(annotation=p.empty) for p in signature.parameters.values())
    return f"({', '.join(map(str, given))})"


def _literals(call: str) -> tuple[list[object], dict[str, object]]:
    """The literals between parentheses, by position and by name."""
    found = ast.parse(f"f{call}", mode="eval").body
    if not isinstance(found, ast.Call) or any(word.arg is None for word in found.keywords):
        raise ValueError(call)
    return (
        [ast.literal_eval(arg) for arg in found.args],
        {str(word.arg): ast.literal_eval(word.value) for word in found.keywords},
    )


def _layer_norm(
    normalized_shape: int | Sequence[int],
    eps: float = 1e-5,
    elementwise_affine: bool = True,
    bias: bool = True,
) -> Scheme:
    found = Scheme.layer_norm(normalized_shape, eps=eps)
    return found if elementwise_affine else found.replace(affine="")


def _rms_norm(
    normalized_shape: int | Sequence[int],
    eps: float | None = None,
    elementwise_affine: bool = True,
) -> Scheme:
    found = Scheme.rms_norm(normalized_shape, eps=eps)
    return found if elementwise_affine else found.replace(affine="")


def _group_norm(
    num_groups: int,
    num_channels: Any = None,  # optional, as the lens itself writes GroupNorm(32)
    eps: float = 1e-5,
    affine: bool = True,
    bias: bool = True,
) -> Scheme:
    found = Scheme.group_norm(num_groups, eps=eps)
    if num_channels is not None:
        whole = isinstance(num_channels, int)
        if whole and num_channels % num_groups:
            raise ArgumentError(
                "num_groups divides num_channels. "
                f"{num_groups} and {num_channels} came. Give a divisor."
            )
        found = found.with_sizes({"c": num_channels // num_groups if whole else num_channels})
    return found if affine else found.replace(affine="")


def _instance_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float = 0.1,
    affine: bool = False,
    track_running_stats: bool = False,
    bias: bool = True,
) -> Scheme:
    found = Scheme.instance_norm(eps=eps, momentum=momentum).with_sizes({"c": num_features})
    return found if affine else found.replace(affine="")


def _batch_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
    bias: bool = True,
) -> Scheme:
    found = Scheme.batch_norm(eps=eps, momentum=momentum).with_sizes({"c": num_features})
    return found if affine else found.replace(affine="")


def _layer_norm_2d(
    num_channels: int, eps: float = 1e-6, elementwise_affine: bool = True, bias: bool = True
) -> Scheme:
    found = Scheme.layer_norm_2d(eps=eps).with_sizes({"c": num_channels})
    return found if elementwise_affine else found.replace(affine="")


_CONSTRUCTORS: dict[str, Callable[..., Scheme]] = {
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "GroupNorm": _group_norm,
    "LayerNorm2d": _layer_norm_2d,
}
_CONSTRUCTORS_BY_RANK: dict[str, Callable[..., Scheme]] = {
    "InstanceNorm": _instance_norm,
    "BatchNorm": _batch_norm,
}
_CLASSES: dict[Callable[..., Scheme], str] = {
    _layer_norm: "torch.layer_norm",
    _rms_norm: "torch.rms_norm",
    _group_norm: "torch.group_norm",
    _layer_norm_2d: "convnext.layer_norm_2d",
    _instance_norm: "torch.instance_norm",
    _batch_norm: "torch.batch_norm",
}
"""What a class alone stands for."""
