"""The standard operator that computes what a fragment was shown to compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ...scheme import ArgumentError, Scheme
from .places import Places
from .regions import Part
from .search import Found
from .verifying import parameters

__all__ = ["Replacement", "cannot", "is_replaced", "replacement"]

SINCE = {
    "InstanceNormalization": 6,
    "LayerNormalization": 17,
    "GroupNormalization": 21,
    "RMSNormalization": 23,
}
"""The opset from which on an operator is what is meant here."""


@dataclass
class Replacement:
    """Nodes that compute a fragment's output from its input."""

    found: Found
    operator: str
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, NDArray[Any]] = field(default_factory=dict)

    def part(self, part: Part) -> Any:
        """The nodes as a model with the input and output of the fragment's part."""
        proto = part.proto()
        del proto.graph.node[:]
        proto.graph.node.extend(self.nodes)
        proto.graph.initializer.extend(
            numpy_helper.from_array(value, name) for name, value in self.initializers.items()
        )
        return proto


def is_replaced(found: Found, places: Places) -> bool:
    """Whether the standard operator computes it already, between other nodes."""
    operator = operator_of(found.shown.scheme, places.shape(found.region.x) or ())
    return any(node.op_type == operator for node in found.region.nodes)


def cannot(found: Found, opset: int, places: Places) -> str:
    """Why no standard operator stands for a fragment, empty where one does."""
    operator = operator_of(found.shown.scheme, places.shape(found.region.x) or ())
    if operator is None:
        return _reason(found.shown.scheme)
    kinds = [node.op_type for node in found.region.nodes]
    needed = SINCE[operator]
    if opset < needed:
        return f"{operator} needs opset {needed}, the model has {opset}: --opset {needed}"
    if found.shown.computed:
        return "its weight or bias is computed by the graph from other constants"
    turned = _per_pixel(found.shown.scheme, places.shape(found.region.x) or ())
    if turned and kinds.count("Transpose") < 2:
        return f"{operator} normalizes trailing axes, and this is axis 1: it would need Transposes"
    return ""


def operator_of(scheme: Scheme, shape: tuple[int, ...]) -> str | None:
    """The operator whose formula and axes these are."""
    if scheme.scale != "auto" or scheme.correction or scheme.eps_placement != "variance":
        return None
    if scheme.statistics != "batch" or scheme.eps is None or scheme.eps < 0:
        return None
    try:
        layout = scheme.layout(len(shape))
        sizes = layout.sizes(shape)
    except ArgumentError:
        return None
    ndim, reduced, affine = layout.ndim, layout.reduced_axes, sizes.affine_shape
    whole = all(len(axis) == 1 for axis in layout.axes)
    along = tuple(
        i
        for i, axis in enumerate(layout.axes)
        if any(p.name in scheme.affine.split() for p in axis)
    )
    space = tuple(range(2, ndim))
    if not whole:
        first = layout.axes[1] if ndim > 1 else ()
        grouped = len(first) == 2 and not first[0].reduced and first[1].reduced
        rest = all(len(axis) == 1 for i, axis in enumerate(layout.axes) if i != 1)
        fits = grouped and rest and reduced == (1, *space) and along in ((), (1,))
        return "GroupNormalization" if fits and scheme.center else None
    if ndim >= 3 and reduced == space and along == (1,) and scheme.center and affine:
        return "InstanceNormalization"
    trailing = tuple(range(ndim - len(reduced), ndim))
    if (reduced == trailing and along in ((), reduced)) or _per_pixel(scheme, shape):
        return "LayerNormalization" if scheme.center else "RMSNormalization"
    return None


def _per_pixel(scheme: Scheme, shape: tuple[int, ...]) -> bool:
    """Whether the channels of axis 1 share a mean, and a weight varies along them at most."""
    layout = scheme.layout(len(shape))
    names = [axis[0].name for axis in layout.axes]
    return (
        len(shape) >= 3
        and layout.reduced_axes == (1,)
        and all(len(axis) == 1 for axis in layout.axes)
        and scheme.affine in ("", names[1])
    )


def _reason(scheme: Scheme) -> str:
    if scheme.scale == "l2":
        return "LpNormalization has no eps and no weight"
    if scheme.correction:
        return "no operator divides the variance by n - 1"
    if scheme.eps_placement == "max":
        return "no operator takes the larger of the deviation and eps"
    if scheme.eps_placement != "variance":
        return "no operator adds eps outside of the root"
    if scheme.scale != "auto":
        return f"no operator divides by '{scheme.scale}'"
    return f"no operator has its axes: '{scheme.axes}'"


def replacement(
    found: Found, places: Places, sizes: tuple[int | None, ...], name: str
) -> Replacement | str:
    """The operator in place of a fragment, or why it cannot be.

    Args:
        sizes: of the input, None where the model leaves them open.
        name: of the new node; its constants are called after it.
    """
    region, shown = found.region, found.shown
    shape = places.shape(region.x) or ()
    scheme = shown.scheme
    operator = operator_of(scheme, shape) or ""
    part = Part(region, places, wide=False)
    given = parameters(found, part) or {}
    dtype = helper.tensor_dtype_to_np_dtype(part.element)
    layout = scheme.layout(len(shape))
    pixel = _per_pixel(scheme, shape)
    reduced = layout.reduced_axes
    own = (1,) if operator in ("GroupNormalization", "InstanceNormalization") else reduced
    fixed = len(sizes) == len(shape) and all(sizes[i] is not None for i in own)
    if given.get("weight") is None and given.get("bias") is None and not fixed:
        return f"{operator} needs a scale, and the size of its axis is left open"
    target = tuple(shape[i] for i in own)
    offset = shown.match.offset if shown.match is not None else 0.0
    weight = _parameter(given.get("weight"), scheme, shape, target, 1.0)
    weight = ((weight.astype(np.float64) + offset) * shown.factor).astype(dtype)
    bias = given.get("bias")
    made = Replacement(found, operator)
    made.initializers[f"{name}.scale"] = weight
    inputs = [region.x, f"{name}.scale"]
    if bias is not None or operator in ("GroupNormalization", "InstanceNormalization"):
        made.initializers[f"{name}.bias"] = _parameter(bias, scheme, shape, target, 0.0).astype(
            dtype
        )
        inputs.append(f"{name}.bias")
    said: dict[str, Any] = {"epsilon": float(scheme.eps or 0.0)}
    result = region.y
    added = operator == "RMSNormalization" and bias is not None
    if operator in ("LayerNormalization", "RMSNormalization"):
        said["axis"] = -len(reduced)
    if operator == "GroupNormalization":
        said["num_groups"] = int(layout.axes[1][0].size or 0)
    order = [0, *range(2, len(shape)), 1]
    back = [0, len(shape) - 1, *range(1, len(shape) - 1)]
    if pixel:
        inputs[0] = f"{name}.last"
        made.nodes.append(
            helper.make_node("Transpose", [region.x], inputs[:1], name=f"{name}.in", perm=order)
        )
        result = f"{name}.normalized"
    final = result
    if added:
        result = f"{name}.scaled"
    made.nodes.append(
        helper.make_node(operator, inputs[: 2 if added else 3], [result], name=name, **said)
    )
    if added:
        made.nodes.append(
            helper.make_node("Add", [result, inputs[2]], [final], name=f"{name}.shift")
        )
    if pixel:
        made.nodes.append(
            helper.make_node("Transpose", [final], [region.y], name=f"{name}.out", perm=back)
        )
    return made


def _parameter(
    value: NDArray[Any] | None,
    scheme: Scheme,
    shape: tuple[int, ...],
    target: tuple[int, ...],
    missing: float,
) -> NDArray[Any]:
    """A parameter in the shape that the operator takes; one value a group is repeated."""
    if value is None:
        return np.full(target, missing, np.float32)
    value = value.reshape(scheme.layout(len(shape)).sizes(shape).affine_shape)
    if value.shape != target:
        value = np.repeat(value, target[0] // value.shape[0])
    return np.ascontiguousarray(value).reshape(target)
