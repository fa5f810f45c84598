"""ONNX's own norm operators and onnxruntime's, read as schemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...scheme import Scheme
from ..identify import on_axes
from .graph import attributes
from .reading import is_standard

__all__ = ["Declared", "declared"]

ELSEWHERE = ("com.microsoft",)


@dataclass(frozen=True)
class Declared:
    """What the specification says that a node computes."""

    scheme: Scheme | None
    """None where it is no norm of this family."""
    weight: str = ""
    """The names of its parameters, empty where it has none."""
    bias: str = ""
    running_mean: str = ""
    running_var: str = ""
    added: tuple[str, ...] = ()
    """What is added to the input first."""
    embedded: bool = False
    """Whether what was normalized is no input but a sum of rows of tables."""
    problem: str = ""
    """Why it cannot be held against its data."""


def declared(node: Any, opset: int, ndim: int) -> Declared | None:
    """What a node says of itself for an input of this rank; None where it is no norm.

    Args:
        opset: of the standard domain, which decides what GroupNormalization's scale is.
        ndim: the rank of the input.
    """
    if is_standard(node.domain):
        read = _STANDARD.get(node.op_type)
    else:
        read = _CONTRIBUTED.get(node.op_type) if node.domain in ELSEWHERE else None
    return read(node, opset, ndim) if read is not None else None


def _input(node: Any, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def _shortest(value: float) -> float:
    """An attribute as it was written before it became float32."""
    return float(str(np.float32(value)))


def _eps(node: Any, default: float) -> float:
    return _shortest(attributes(node).get("epsilon", default))


def _trailing(node: Any, ndim: int, **fields: Any) -> Declared:
    axis = attributes(node).get("axis", -1) % max(ndim, 1)
    weight, bias = _input(node, 1), _input(node, 2)
    scheme = Scheme.layer_norm(ndim=max(1, ndim - axis), eps=_eps(node, 1e-5), **fields)
    return Declared(scheme if weight or bias else scheme.replace(affine=""), weight, bias)


def _layer_norm(node: Any, opset: int, ndim: int) -> Declared:
    return _trailing(node, ndim)


def _rms_norm(node: Any, opset: int, ndim: int) -> Declared:
    return _trailing(node, ndim, center=False)


def _group_norm(node: Any, opset: int, ndim: int) -> Declared:
    groups = attributes(node)["num_groups"]
    # Opset 18 gave each group a scale; 21 gives each channel one.
    affine = "g c" if opset >= 21 else "g"
    scheme = Scheme.group_norm(groups, eps=_eps(node, 1e-5), affine=affine)
    return Declared(scheme, _input(node, 1), _input(node, 2))


def _instance_norm(node: Any, opset: int, ndim: int) -> Declared:
    scheme = Scheme.instance_norm(eps=_eps(node, 1e-5))
    return Declared(scheme, _input(node, 1), _input(node, 2))


def _batch_norm(node: Any, opset: int, ndim: int) -> Declared:
    said = attributes(node)
    if opset >= 14:
        training = bool(said.get("training_mode", 0))
    else:
        # Before, the outputs said it.
        training = len([name for name in node.output if name]) > 1
    fields: dict[str, Any] = {
        "eps": _eps(node, 1e-5),
        # ONNX's momentum is the weight of the old value.
        "momentum": _shortest(1.0 - _shortest(said.get("momentum", 0.9))),
        "running_correction": 0,
        "statistics": "batch" if training else "running",
    }
    scheme = Scheme.batch_norm(**fields)
    if not said.get("spatial", 1) and opset < 9:
        # One statistic for every place of a sample.
        names = " ".join(f"a{i}" for i in range(1, ndim))
        scheme = Scheme(f"[n] {names}", affine=names, **fields)
    weight, bias, mean, var = (_input(node, place) for place in (1, 2, 3, 4))
    if training:
        mean = var = ""
    return Declared(scheme, weight, bias, mean, var)


def _mean_variance(node: Any, opset: int, ndim: int) -> Declared:
    said = attributes(node)
    axes = [axis % ndim for axis in said.get("axes", [0, 2, 3])]
    if opset < 9 and "axes" not in said:
        axes = [0, 2, 3] if said.get("across_channels", 0) == 0 else [0, 1, 2, 3]
    like = Scheme("[d]", eps=1e-9, eps_placement="std")
    return Declared(on_axes(ndim, sorted(axes), (), like))


def _lp(node: Any, opset: int, ndim: int) -> Declared:
    said = attributes(node)
    if said.get("p", 2) != 2:
        return Declared(None)
    like = Scheme("[d]", center=False, scale="l2", eps=0.0)
    return Declared(on_axes(ndim, [said.get("axis", -1) % ndim], (), like))


def _skip(node: Any, opset: int, ndim: int) -> Declared:
    simplified = "Simplified" in node.op_type
    scheme = Scheme.layer_norm(center=not simplified, eps=_eps(node, 1e-12))
    bias = "" if simplified else _input(node, 3)
    added = (_input(node, 1), _input(node, 3 if simplified else 4))
    return Declared(scheme, _input(node, 2), bias, added=tuple(name for name in added if name))


def _embed(node: Any, opset: int, ndim: int) -> Declared:
    scheme = Scheme.layer_norm(eps=_eps(node, 1e-12))
    return Declared(scheme, _input(node, 5), _input(node, 6), embedded=True)


def _group_norm_elsewhere(node: Any, opset: int, ndim: int) -> Declared:
    said = attributes(node)
    groups, last = said["groups"], said.get("channels_last", 1)
    axes = f"n [...] (g={groups} [c])" if last else f"n (g={groups} [c]) [...]"
    scheme = Scheme(axes, affine="g c", eps=_eps(node, 1e-5))
    problem = ""
    if said.get("activation", 0):
        problem = "its activation (SiLU) is applied in it"
    added = (_input(node, 3), _input(node, 4)) if node.op_type == "SkipGroupNorm" else ()
    return Declared(scheme, _input(node, 1), _input(node, 2),
                    added=tuple(name for name in added if name), problem=problem)  # fmt: skip


Reader = Callable[[Any, int, int], Declared]

_STANDARD: dict[str, Reader] = {
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    # onnxruntime's, though it stands in ONNX's domain.
    "SimplifiedLayerNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "BatchNormalization": _batch_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LpNormalization": _lp,
}

_CONTRIBUTED: dict[str, Reader] = {
    "SkipLayerNormalization": _skip,
    "SkipSimplifiedLayerNormalization": _skip,
    "EmbedLayerNormalization": _embed,
    "GroupNorm": _group_norm_elsewhere,
    "SkipGroupNorm": _group_norm_elsewhere,
    "LayerNormalization": _layer_norm,
    "SimplifiedLayerNormalization": _rms_norm,
}


def common_prefix(names: Sequence[str]) -> str:
    """The path that names separated by slashes share.

    >>> common_prefix(["/norm1/ReduceMean", "/norm1/Sub"])
    '/norm1'
    """
    parts = [name.split("/")[:-1] for name in names]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return "/".join(shared)
