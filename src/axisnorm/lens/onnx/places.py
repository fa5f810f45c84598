"""The types and shapes of a model's values at given inputs, as far as they are known."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper, shape_inference

from .graph import Graph, attributes
from .reading import Model, graphs_of, is_standard

__all__ = ["Places", "infer", "inferred_sides"]

Shape = tuple[int, ...]

KEEPS_SHAPE = frozenset(
    ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization",
     "GroupNorm", "SkipGroupNorm", "BiasGelu", "FastGelu", "Gelu", "QuickGelu")
)  # fmt: skip
"""onnxruntime's operators, unknown to shape inference, whose output is like their first input."""


@dataclass
class Places:
    """What is known of values from a run or from the file."""

    types: dict[str, tuple[int, Shape | None]]
    """Element type and shape by name."""
    sides: dict[str, NDArray[Any]] = field(default_factory=dict)
    """The outputs of Shape and Size nodes."""
    fixed: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Shapes with None for the sizes that the inputs decide."""

    def shape(self, name: str) -> Shape | None:
        """The shape of a value."""
        return self.types[name][1] if name in self.types else None


def infer(model: Model, inputs: Mapping[str, NDArray[Any]]) -> Places:
    """What ONNX's own inference says when the inputs have these shapes."""
    proto = type(model.proto)()
    proto.CopyFrom(model.proto)
    for graph in graphs_of(proto.graph):
        del graph.value_info[:]
        for node in graph.node:
            contributed = not is_standard(node.domain) or node.op_type.startswith("Simplified")
            if contributed and node.op_type in KEEPS_SHAPE:
                source, result = node.input[0], node.output[0]
                node.Clear()
                node.CopyFrom(helper.make_node("Identity", [source], [result]))
    for value in proto.graph.input:
        if value.name in inputs and value.type.HasField("tensor_type"):
            kind = value.type.tensor_type
            kind.ClearField("shape")
            for size in inputs[value.name].shape:
                kind.shape.dim.add().dim_value = size
    for value in proto.graph.output:
        # As exported: what the shape was with other inputs.
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    # Where the file contradicts itself, what it says by itself is left.
    with contextlib.suppress(shape_inference.InferenceError):
        proto = shape_inference.infer_shapes(proto, data_prop=True)
    types: dict[str, tuple[int, Shape | None]] = {}
    fixed: dict[str, tuple[int | None, ...]] = {}
    for graph in graphs_of(proto.graph):
        for value in (*graph.value_info, *graph.input, *graph.output):
            kind = value.type.tensor_type
            if value.type.HasField("tensor_type") and kind.elem_type:
                dims = kind.shape.dim
                known = kind.HasField("shape") and all(d.HasField("dim_value") for d in dims)
                shape = tuple(d.dim_value for d in dims) if known else None
                types[value.name] = (kind.elem_type, shape)
                if kind.HasField("shape"):
                    fixed[value.name] = tuple(
                        d.dim_value if d.HasField("dim_value") else None for d in dims
                    )
    return Places(types, fixed=fixed)


def inferred_sides(graph: Graph, places: Places) -> dict[str, NDArray[Any]]:
    """What the Shape and Size nodes of a graph give, where the shapes are known."""
    found: dict[str, NDArray[Any]] = {}
    for node in graph.nodes:
        if node.op_type not in ("Shape", "Size") or not is_standard(node.domain):
            continue
        shape = places.shape(node.input[0])
        if shape is not None:
            said = attributes(node)
            part = np.asarray(shape, np.int64)[said.get("start", 0) : said.get("end")]
            found[node.output[0]] = part if node.op_type == "Shape" else np.asarray(np.prod(part))
    return found
