"""Norms as models write them: ``LayerNorm(768)``, ``nn.GroupNorm(32, 64, eps=1e-6)``."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..presets import PRESETS
from ..scheme import ArgumentError, Scheme

__all__ = ["Written", "constructed", "likely_constructor", "without_affine"]

_WRITTEN = re.compile(
    r"(?:torch\.|axisnorm\.)?(?:nn\.)?(?P<name>[A-Za-z]\w*?)(?P<rank>[123]d)?"
    r"\s*(?P<call>\(.*?\))?(?:(?:\.| in )(?P<mode>eval|train)(?:\(\))?)?"
)


class Written(NamedTuple):
    """A norm as its constructor's call says it."""

    scheme: Scheme
    parameters: frozenset[str]
    """Which of weight and bias it has."""
    keeps_running: bool = False
    """Whether its training moves running statistics."""
    ndims: tuple[int, ...] = ()
    """How many axes its input has, where its name says so."""
    unbatched: int | None = None
    """With so many axes its input has none for the samples."""


def constructed(text: str) -> Written | None:
    """The norm that is written as its constructor's call or as its class, else None.

    Names, arguments and defaults are those of torch.nn and axisnorm.nn. A class alone stands for
    the norm with all of its parameters.

    Raises:
        ArgumentError: the arguments are not those of the constructor.

    >>> constructed("nn.GroupNorm(2, 6)").scheme
    Scheme('n (g=2 [c=3]) [...]; affine=g c')
    >>> constructed("LayerNorm((3, 4), eps=1e-12)").scheme
    Scheme('... [(s=3) (d=4)]; affine=s d; eps=1e-12')
    >>> constructed("BatchNorm2d(64).eval()").scheme.statistics
    'running'
    >>> sorted(constructed("LayerNorm(4)").parameters), sorted(constructed("RMSNorm").parameters)
    (['bias', 'weight'], ['weight'])
    >>> constructed("n (g [c])") is None
    True
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        return None
    name, rank, call, mode = match.group("name", "rank", "call", "mode")
    make = _CONSTRUCTORS.get(name + (rank or "")) or _CONSTRUCTORS_BY_RANK.get(name)
    if make is None:
        return None
    if call is None:
        scheme = PRESETS[_CLASSES[make]]
        both = frozenset({"weight", "bias"} if scheme.center else {"weight"})
        found = Written(scheme, both, make is _batch_norm)
    else:
        found = _called(make, name + (rank or ""), call)
    if mode == "eval" and found.keeps_running:
        found = found._replace(scheme=found.scheme.replace(statistics="running"))
    if not found.parameters:
        found = found._replace(scheme=without_affine(found.scheme))
    if rank and name in _CONSTRUCTORS_BY_RANK:
        space = int(rank[0])
        less = space == 1 or make is _instance_norm
        found = found._replace(ndims=(space + 1, space + 2) if less else (space + 2,))
        if make is _instance_norm:
            found = found._replace(unbatched=space + 1)
    return found


def without_affine(scheme: Scheme) -> Scheme:
    """The scheme of the norm without weight and bias.

    >>> without_affine(Scheme.instance_norm(statistics="running"))
    Scheme('[n] c [...]; statistics=running')
    """
    if scheme.statistics != "running":
        return scheme.replace(affine="")
    # There affine says along which axes the running statistics vary; now brackets say it: those of
    # InstanceNorm are shared by the samples too.
    words = []
    for axis in scheme.parsed:
        parts = [str(part) if part.name in scheme.affine.split() else f"[{part}]" for part in axis]
        words.append(f"({' '.join(parts)})" if len(axis) > 1 or axis[0].size else parts[0])
    return scheme.replace(axes=" ".join(words), affine="")


def likely_constructor(text: str) -> str | None:
    """The constructor that is meant by a call that is none, else None.

    >>> likely_constructor("LayrNorm(4)"), likely_constructor("layernorm(4)")
    ('LayerNorm', 'LayerNorm')
    >>> likely_constructor("n(g [c])") is None
    True
    """
    match = re.match(r"(?:torch\.|axisnorm\.)?(?:nn\.)?([A-Za-z_]\w*)\(", text.strip())
    if match is None:
        return None
    names = [
        *_CONSTRUCTORS,
        *(f"{n}{d}" for n in _CONSTRUCTORS_BY_RANK for d in ("1d", "2d", "3d")),
    ]
    plain = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(match[1].lower().replace("_", ""), plain, n=1)
    return plain[near[0]] if near else None


def _called(make: Callable[..., Written], name: str, call: str) -> Written:
    takes = inspect.signature(make)
    try:
        args, given = _literals(call)
    except (ValueError, SyntaxError) as error:
        raise ArgumentError(
            f"A constructor's arguments are numbers here, as in {name}{_without_types(takes)}. "
            f"'{name}{call}' came. Write the call alone, with the numbers that names stand for."
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
    if (
        not isinstance(found, ast.Call)
        or not isinstance(found.func, ast.Name)
        or any(word.arg is None for word in found.keywords)
    ):
        raise ValueError(call)
    return (
        [ast.literal_eval(arg) for arg in found.args],
        {str(word.arg): ast.literal_eval(word.value) for word in found.keywords},
    )


def _written(
    scheme: Scheme, affine: object, bias: object = True, *, keeps_running: object = False
) -> Written:
    names = {"weight": affine, "bias": affine and bias}
    parameters = frozenset(name for name, there in names.items() if there)
    return Written(scheme, parameters, bool(keeps_running))


def _layer_norm(
    normalized_shape: int | Sequence[int],
    eps: float = 1e-5,
    elementwise_affine: bool = True,
    bias: bool = True,
) -> Written:
    return _written(Scheme.layer_norm(normalized_shape, eps=eps), elementwise_affine, bias)


def _rms_norm(
    normalized_shape: int | Sequence[int],
    eps: float | None = None,
    elementwise_affine: bool = True,
) -> Written:
    return _written(Scheme.rms_norm(normalized_shape, eps=eps), elementwise_affine, bias=False)


def _group_norm(
    num_groups: int,
    num_channels: Any = None,  # optional, as the lens itself writes GroupNorm(32)
    eps: float = 1e-5,
    affine: bool = True,
    bias: bool = True,
) -> Written:
    found = Scheme.group_norm(num_groups, eps=eps)
    if num_channels is not None:
        whole = isinstance(num_channels, int)
        if whole and num_channels % num_groups:
            raise ArgumentError(
                "num_groups divides num_channels. "
                f"{num_groups} and {num_channels} came. Give a divisor."
            )
        found = found.with_sizes({"c": num_channels // num_groups if whole else num_channels})
    return _written(found, affine, bias)


def _instance_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = False,
    track_running_stats: bool = False,
    bias: bool = True,
) -> Written:
    found = Scheme.instance_norm(eps=eps, momentum=momentum).with_sizes({"c": num_features})
    return _written(found, affine, bias, keeps_running=track_running_stats)


def _batch_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
    bias: bool = True,
) -> Written:
    found = Scheme.batch_norm(eps=eps, momentum=momentum).with_sizes({"c": num_features})
    return _written(found, affine, bias, keeps_running=track_running_stats)


def _layer_norm_2d(
    num_channels: int, eps: float = 1e-6, elementwise_affine: bool = True, bias: bool = True
) -> Written:
    found = Scheme.layer_norm_2d(eps=eps).with_sizes({"c": num_channels})
    return _written(found, elementwise_affine, bias)


_CONSTRUCTORS: dict[str, Callable[..., Written]] = {
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "GroupNorm": _group_norm,
    "LayerNorm2d": _layer_norm_2d,
    "SyncBatchNorm": _batch_norm,
}
_CONSTRUCTORS_BY_RANK: dict[str, Callable[..., Written]] = {
    "InstanceNorm": _instance_norm,
    "BatchNorm": _batch_norm,
}
_CLASSES: dict[Callable[..., Written], str] = {
    _layer_norm: "torch.layer_norm",
    _rms_norm: "torch.rms_norm",
    _group_norm: "torch.group_norm",
    _layer_norm_2d: "convnext.layer_norm_2d",
    _instance_norm: "torch.instance_norm",
    _batch_norm: "torch.batch_norm",
}
"""What a class alone stands for."""
