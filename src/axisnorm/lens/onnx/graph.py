"""One graph of a model: who computes what, who reads it, and what depends on the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .reading import Model, is_standard, subgraphs

__all__ = ["Graph", "attributes", "scopes"]

CONSTANT, SHAPE, VARYING = "constant", "shape", "varying"

_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli",
           "Multinomial")  # fmt: skip


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of a node by name."""
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


class Graph:
    """The main graph, or the body of a node.

    A value is *constant* where no input reaches it, of *shape* where only the sizes of inputs do,
    and else *varying*.
    """

    def __init__(
        self, model: Model, proto: Any, outer: Graph | None = None, path: str = ""
    ) -> None:
        self.model = model
        self.proto = proto
        self.outer = outer
        self.path = path
        """The names of the nodes whose bodies this stands in, each with a slash."""
        self.nodes: list[Any] = list(proto.node)
        self.order = {id(node): place for place, node in enumerate(self.nodes)}
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.outputs = {value.name for value in proto.output}
        self.initializers = {tensor.name: tensor for tensor in proto.initializer}
        self.inputs = {value.name for value in proto.input} - set(self.initializers)
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in set(self.reads(node)):
                self.consumers.setdefault(name, []).append(node)
        self.kinds: dict[str, str] = dict.fromkeys(self.initializers, CONSTANT)
        self.kinds |= dict.fromkeys(self.inputs, VARYING)
        for node in self.nodes:
            kind = self._kind_of(node)
            self.kinds |= {name: kind for name in node.output if name}

    @staticmethod
    def reads(node: Any) -> Iterator[str]:
        """What a node reads, its bodies included."""
        yield from (name for name in node.input if name)
        for body in subgraphs(node):
            inside = {value.name for value in body.input} | {t.name for t in body.initializer}
            for inner in body.node:
                yield from (name for name in Graph.reads(inner) if name not in inside)
                inside.update(inner.output)
            # A body may hand an outer value through.
            yield from (value.name for value in body.output if value.name not in inside)

    def _kind_of(self, node: Any) -> str:
        if node.op_type in ("Shape", "Size") and is_standard(node.domain):
            return CONSTANT if self.kind(node.input[0]) == CONSTANT else SHAPE
        if node.op_type in _RANDOM:
            return VARYING
        kinds = {self.kind(name) for name in self.reads(node)}
        return next((kind for kind in (VARYING, SHAPE) if kind in kinds), CONSTANT)

    def kind(self, name: str) -> str:
        """How a value depends on the data; of outer graphs too."""
        if name in self.kinds:
            return self.kinds[name]
        return self.outer.kind(name) if self.outer is not None else VARYING

    def varies(self, name: str) -> bool:
        """Whether a value depends on the data of an input."""
        return bool(name) and self.kind(name) == VARYING

    def home(self, name: str) -> Graph | None:
        """The graph that defines a value."""
        if name in self.producer or name in self.initializers or name in self.inputs:
            return self
        return self.outer.home(name) if self.outer is not None else None

    def value(self, name: str) -> NDArray[Any] | None:
        """The numbers of an initializer or a Constant node, of outer graphs too."""
        home = self.home(name)
        if home is None:
            return None
        if name in home.initializers:
            return self.model.constant(home.initializers[name])
        node = home.producer.get(name)
        return constant_value(node) if node is not None and node.op_type == "Constant" else None


def constant_value(node: Any) -> NDArray[Any] | None:
    """What a Constant node holds, None for a sparse or textual one."""
    for name, value in attributes(node).items():
        if name == "value":
            return numpy_helper.to_array(value)
        if name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
    return None


def scopes(model: Model) -> Iterator[Graph]:
    """The main graph and all bodies in it, outer ones first."""
    yield from _inside(Graph(model, model.proto.graph))


def _inside(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for body in subgraphs(node):
            yield from _inside(Graph(graph.model, body, graph, f"{graph.path}{node.name}/"))
