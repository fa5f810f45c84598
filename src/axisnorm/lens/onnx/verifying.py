"""What a norm of a graph computes on its own data, held against what it might be taken for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ...scheme import ArgumentError, Scheme
from ..identify import Identification, rivals, tell_apart
from .examining import StandardNode
from .graph import Graph
from .places import Places
from .probing import fitting
from .regions import Part, Region, constants
from .running import CannotRunError, Values, fetch, session
from .search import Found
from .standard import Declared

__all__ = ["Held", "hold", "needs", "parameters"]

Array = NDArray[Any]

SEED = 0
HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass
class Held:
    """A norm held against data."""

    scheme: Scheme | None
    declared: Scheme | None
    identification: Identification | None
    shape: tuple[int, ...] | None
    element: int | None
    affine_shape: tuple[int, ...]
    problem: str | None
    given: Mapping[str, Array | None]
    """Weight, bias and running statistics, as far as they are constants of the graph."""
    x: Array | None
    """What was normalized, to be looked at and let go."""
    generated: bool
    """Whether x was made for this, because the model's own is not to be had or says nothing."""


def needs(norm: Found | StandardNode) -> list[str]:
    """The varying values that the norm is held against."""
    if isinstance(norm, Found):
        return [norm.region.x]
    graph, node = norm.graph, norm.node
    wanted = [name for name in node.input if name and graph.varies(name)]
    if node.op_type == "BatchNormalization" and norm.declared.scheme is not None and (
        norm.declared.scheme.statistics == "batch"
    ):  # fmt: skip
        wanted = wanted[:1]
    return wanted


def hold(norm: Found | StandardNode, values: Values | None, places: Places) -> Held:
    """Hold a norm against the model's own data; ``values``: what :func:`needs` names.

    Without it, or where it tells nothing apart, against random data.
    """
    one = _fragment if isinstance(norm, Found) else _node
    held = None
    if values is not None:
        held = one(norm, values, places, False)
        found = held.identification
        unclear = found is None or found.tells_nothing or found.center_unclear
        if held.problem is None and not unclear:
            return held
        if held.problem is not None and held.declared is None and held.scheme is None:
            return held
    random = _random(norm, places)
    if random is None:
        if held is not None:
            return held
        element = places.types.get(needs(norm)[0], (None, None))[0] if needs(norm) else None
        declared = norm.declared.scheme if isinstance(norm, StandardNode) else None
        return Held(None, declared, None, None, element, (),
                    "the shape of its input is not known", {}, None, True)  # fmt: skip
    made = one(norm, random, places, True)
    if held is not None:
        made.x = held.x
        made.generated = False
    return made


def _random(norm: Found | StandardNode, places: Places) -> Values | None:
    """Random values of the inputs' types and shapes."""
    random = np.random.default_rng(SEED)
    found: dict[str, Array] = {}
    for name in needs(norm):
        element, shape = places.types.get(name, (None, None))
        if element is None or shape is None:
            return None
        if element == TensorProto.BFLOAT16:
            element = TensorProto.FLOAT
        dtype = helper.tensor_dtype_to_np_dtype(element)
        if dtype.kind in "iu":
            found[name] = np.zeros(shape, dtype)
        else:
            found[name] = random.standard_normal(shape).astype(dtype)
    return found


# --------------------------------------------------------------------------------------------
# Nodes


def _node(norm: Any, values: Values, places: Places, generated: bool) -> Held:
    graph, node, said = norm.graph, norm.node, norm.declared
    element = places.types.get(node.input[0], (None, None))[0]
    held = Held(None, said.scheme, None, None, element, (), said.problem or None, {}, None,
                generated)  # fmt: skip
    try:
        inputs = _inputs(graph, node, values)
        if said.scheme is None or said.problem:
            held.x = inputs[node.input[0]]
            held.shape = held.x.shape
            return held
        x, y = _computed(graph, node, said, inputs)
    except CannotRunError as error:
        shape = places.shape(node.input[0])
        held.shape = shape if element in (1, 10, 11, 16) else None
        held.problem = str(error).rstrip(".")
        held.problem = held.problem[:1].lower() + held.problem[1:]
        return held
    if said.added:
        # The sum of half types is not rounded before it is normalized.
        x = sum((inputs[name] for name in said.added), x.astype(np.float64))
    held.x, held.shape = x, x.shape
    if said.embedded:
        held.element = int(helper.np_dtype_to_tensor_dtype(x.dtype))
    sizes = said.scheme.layout(x.ndim).sizes(x.shape)
    held.affine_shape = sizes.affine_shape
    given: dict[str, Array | None] = {}
    named = {"weight": said.weight, "bias": said.bias}
    for key, name in named.items():
        try:
            given[key] = None if not name else _broadcast(inputs[name], sizes.affine_shape)
        except CannotRunError as error:
            held.problem = str(error).rstrip(".")
            return held
    for key, name in (("running_mean", said.running_mean), ("running_var", said.running_var)):
        given[key] = None if not name else inputs[name].reshape(sizes.running_shape)
    computed = {key for key, name in named.items() if name and graph.varies(name)}
    held.given = {key: value for key, value in given.items() if key not in computed}
    candidates = [("as declared", said.scheme)]
    _tell(held, x, y, candidates, given, half=y.dtype == np.float16)
    return held


def _broadcast(value: Array, shape: tuple[int, ...]) -> Array:
    squeezed = value
    while squeezed.ndim > len(shape) and squeezed.shape[0] == 1:
        squeezed = squeezed[0]
    try:
        return np.broadcast_to(squeezed, shape)
    except ValueError:
        raise CannotRunError(f"A parameter of shape {value.shape} is none of {shape}.") from None


def _inputs(graph: Graph, node: Any, values: Values) -> dict[str, Array]:
    wanted = [name for name in node.input if name and name not in values]
    still = [name for name in wanted if not graph.varies(name)]
    missing = set(wanted) - set(still)
    found = {**values, **constants(graph, still)}
    if missing:
        # Of a batch norm in training mode the running statistics are not used.
        size = found[node.input[1]]
        found |= {name: np.ones_like(size) for name in missing}
    return found


def _computed(
    graph: Graph, node: Any, said: Declared, inputs: dict[str, Array]
) -> tuple[Array, Array]:
    """What the node normalized, before anything that is added, and its output."""
    alone = type(node)()
    alone.CopyFrom(node)
    del alone.output[1:]
    if node.op_type == "BatchNormalization" and graph.model.opset >= 14:
        alone.output.extend(node.output[1:])
    wanted = [alone.output[0]]
    if said.embedded:
        alone.output.extend(["mask_index", "embedding_sum"])
        wanted.append("embedding_sum")
    if any(value.dtype.name == "bfloat16" for value in inputs.values()) or (
        inputs[node.input[0]].dtype == np.float32
    ):
        inputs = {
            name: v.astype(np.float32) if v.dtype.name in ("bfloat16", "float16") else v
            for name, v in inputs.items()
        }
    opsets = graph.model.proto.opset_import
    training = said.scheme is not None and said.scheme.statistics == "batch"
    if node.op_type == "BatchNormalization" and graph.model.opset < 14 and training:
        # onnxruntime takes the training mode of opset 14 alone. It is the same formula.
        alone.attribute.append(helper.make_attribute("training_mode", 1))
        alone.output.extend(["mean", "variance"])
        opsets = [helper.make_opsetid("", 14)]
    used = [name for name in dict.fromkeys(node.input) if name]
    proto = helper.make_model(
        helper.make_graph(
            [alone],
            "node",
            [helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(inputs[name].dtype), inputs[name].shape)
             for name in used],
            [helper.make_empty_tensor_value_info(name) for name in wanted],
        ),
        opset_imports=opsets,
        ir_version=max(graph.model.proto.ir_version, 4),
    )  # fmt: skip
    results = fetch(session(proto), wanted, {name: inputs[name] for name in used})
    return (results[1] if said.embedded else inputs[node.input[0]]), results[0]


# --------------------------------------------------------------------------------------------
# Fragments


def parameters(found: Found, part: Part) -> dict[str, Array | None] | None:
    """Weight and bias in the scheme's affine shape, None where they are not to be had."""
    shown = found.shown
    if shown.computed:
        return None
    leaves = list(part.leaves.values())
    given: dict[str, Array | None] = {"weight": None, "bias": None}
    for key, match in (("weight", shown.match), ("bias", shown.bias_match)):
        if match is not None:
            value = np.squeeze(leaves[match.leaf])
            given[key] = np.ascontiguousarray(value.transpose(match.order))
    return given


def _fragment(norm: Any, values: Values, places: Places, generated: bool) -> Held:
    region, shown = norm.region, norm.shown
    x = values[region.x]
    element = places.types[region.x][0]
    # bfloat16 comes as float32.
    part = Part(region, places, wide=element == TensorProto.BFLOAT16)
    offset = shown.match.offset if shown.match is not None else 0.0
    scheme = shown.scheme.replace(weight_offset=offset)
    if shown.match is not None and element in HALF:
        scheme = scheme.replace(rounding=_rounding(region, part, shown.match.leaf, places))
    held = Held(scheme, None, shown.identification, x.shape, element, (), None, {}, x, generated)
    try:
        sizes = scheme.layout(x.ndim).sizes(x.shape)
    except ArgumentError:
        # A group that does not fit this shape: it was another one's.
        held.scheme, held.problem = None, f"'{scheme}' does not fit its input of {x.shape}"
        return held
    held.affine_shape = sizes.affine_shape
    given = parameters(norm, part)
    if given is None:
        return held
    given = {k: None if v is None else v.reshape(sizes.affine_shape) for k, v in given.items()}
    held.given = given
    if not np.isfinite(x).all():
        return held
    try:
        y = part.run(x)
    except CannotRunError as error:
        held.problem = str(error).rstrip(".")
        return held
    weight, bias = given["weight"], given["bias"]
    if shown.factor != 1.0:
        if weight is None:
            y = (y / shown.factor).astype(y.dtype)
            bias = None if bias is None else bias / shown.factor
        else:
            weight = (weight * shown.factor).astype(weight.dtype)
    half = y.dtype == np.float16
    own = Held(scheme, None, None, x.shape, element, (), None, {}, x, generated)
    _tell(own, x, y, [("as found", scheme)], {"weight": weight, "bias": bias}, half=half)
    if own.scheme is not None and own.identification is not None:
        held.identification = own.identification
        # onnxruntime leaves out a rounding to a half type that is cast back at once. The graph
        # has it.
        if own.scheme.replace(rounding=scheme.rounding) != scheme:
            held.scheme = own.scheme
    elif not half and own.identification is not None:
        held.identification = own.identification
        # Off by more than rounding: by its own digits, if it is still the nearest.
        if own.identification.candidates[0].scheme != scheme:
            held.scheme = None
    return held


def _rounding(region: Region, part: Part, leaf: int, places: Places) -> str:
    """Whether the value is in the input's type already when the weight is multiplied."""
    reached = {list(part.leaves)[leaf]}
    inside = {id(node) for node in region.nodes}
    for node in part.nodes:
        if reached & set(node.input):
            if id(node) in inside:
                done = places.types.get(node.output[0], (None, None))[0]
                return "before_affine" if done == places.types[region.x][0] else "once"
            reached |= set(node.output)
    return "once"


def _tell(
    held: Held,
    x: Array,
    y: Array,
    candidates: list[tuple[str, Scheme]],
    given: Mapping[str, Array | None],
    *,
    half: bool,
) -> None:
    """Compare candidates and what they are taken for, and keep what fits."""
    scheme = candidates[0][1]
    if x.size == 0:
        held.problem = "its input has no elements"
        return
    if not np.isfinite(x).all():
        held.problem = "its input holds NaN or infinity"
        return
    tried = fitting([*candidates, *rivals(scheme, x.shape, half=half)], x.shape, given)
    fields = {name: value for name, value in given.items() if value is not None}
    # A negative running variance has no root.
    with np.errstate(invalid="ignore"):
        found = tell_apart(x, y, tried, **fields)
    held.identification = found
    held.scheme = found.best.scheme if found.best is not None else None
    if found.best is not None and held.declared is not None:
        # Where a half output is rounded is the runtime's choice, not another norm.
        other = held.declared.replace(rounding=found.best.scheme.rounding)
        held.declared = other if other == found.best.scheme else held.declared
    if found.tells_nothing:
        held.scheme = scheme
