"""Parts of a graph that have one varying input and might be a normalization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from ...scheme import ArgumentError
from .graph import SHAPE, VARYING, Graph
from .places import Places
from .reading import is_standard
from .running import CannotRunError, Values, fetch, session

__all__ = ["Part", "Region", "chain", "constants", "is_end", "is_trivial", "next_end", "restores"]

REDUCTIONS = frozenset(
    ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "GlobalAveragePool", "AveragePool")
)
COMPLETE = frozenset(
    ("InstanceNormalization", "LpNormalization", "MeanVarianceNormalization", "LayerNormalization",
     "RMSNormalization", "SimplifiedLayerNormalization", "GroupNormalization",
     "BatchNormalization")
)  # fmt: skip
"""Operators that are a norm in themselves, and may be a step of a larger one."""

RESTORING = frozenset(
    ("Cast", "CastLike", "Identity", "Dropout", "Transpose", "Reshape", "Flatten", "Squeeze",
     "Unsqueeze")
)  # fmt: skip
"""What changes the form or type of a value, to be undone behind the norm."""

ARITHMETIC = frozenset(
    ("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Reciprocal", "Pow", "Max", "Min", "Clip",
     "Where", "Expand", "Sum", "Mean", "Less", "LessOrEqual", "Greater", "GreaterOrEqual",
     "Equal", "Not")
)  # fmt: skip

DIVIDING = frozenset(("Div", "Reciprocal", "Pow"))
ENDS = frozenset(("Div", "Mul", "Sub", "Add")) | COMPLETE

MOST_NODES = 48


def is_light(node: Any) -> bool:
    """Whether an operator can stand inside a norm."""
    kind = node.op_type
    if not is_standard(node.domain):
        return False
    return kind in ARITHMETIC or kind in RESTORING or kind in REDUCTIONS or kind in COMPLETE


def _clamps(graph: Graph, node: Any) -> bool:
    """Whether a Relu keeps a difference of mean squares from being negative.

    Others are activations: to pass them would join what lies before to every norm behind.
    """
    if node.op_type != "Relu" or not is_standard(node.domain):
        return False
    before = graph.producer.get(node.input[0])
    return before is not None and before.op_type == "Sub"


def is_end(node: Any) -> bool:
    """Whether a norm may be complete with this operator."""
    return node.op_type in ENDS and is_standard(node.domain)


def restores(node: Any) -> bool:
    """Whether an operator changes form or type alone."""
    return node.op_type in RESTORING and is_standard(node.domain)


@dataclass(frozen=True, eq=False)
class Region:
    """What lies between one varying value and another."""

    graph: Graph
    x: str
    y: str
    nodes: tuple[Any, ...]
    """Those that the data passes, in order."""

    @property
    def reduces(self) -> bool:
        """Whether something in it can have statistics, and divide by them."""
        kinds = {node.op_type for node in self.nodes}
        return bool(kinds & COMPLETE) or bool(kinds & REDUCTIONS and _divides(self.nodes))


def _divides(nodes: Sequence[Any]) -> bool:
    return any(node.op_type in DIVIDING for node in nodes)


def chain(graph: Graph, node: Any) -> Iterator[Region]:
    """The regions that end with this node, each with an earlier input: the smallest first.

    A region's input is a value that all data passes on its way to the end.
    """
    nodes = [node]
    frontier = {name for name in graph.reads(node) if graph.varies(name)}
    for _ in range(MOST_NODES):
        if len(frontier) == 1:
            (x,) = frontier
            ordered = sorted(nodes, key=lambda one: graph.order[id(one)])
            yield Region(graph, x, node.output[0], tuple(ordered))
        made = [(graph.order[id(graph.producer[name])], name) for name in frontier
                if name in graph.producer]  # fmt: skip
        # One may come from outside: the others can still lead to it.
        if not made or len(made) < len(frontier) - 1:
            return
        producer = graph.nodes[max(made)[0]]
        if not (is_light(producer) or _clamps(graph, producer)):
            return
        frontier -= set(producer.output)
        frontier |= {name for name in graph.reads(producer) if graph.varies(name)}
        nodes.append(producer)


def next_end(graph: Graph, y: str) -> Any | None:
    """The one operator that reads a value, None where several do or the graph gives it out."""
    readers = [node for node in graph.consumers.get(y, []) if node.op_type not in ("Shape", "Size")]
    if len(readers) != 1 or y in graph.outputs or not is_light(readers[0]):
        return None
    node = readers[0]
    if node.op_type in COMPLETE or node.op_type in REDUCTIONS:
        return None
    return node


def constants(graph: Graph, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """The values of constants, also of those that the graph computes from others."""
    found, computed = {}, []
    for name in dict.fromkeys(names):
        value = graph.value(name)
        if value is None:
            computed.append(name)
        else:
            found[name] = value
    for name in computed:
        home = graph.home(name)
        if home is None or name not in home.producer:
            raise CannotRunError(f"The value of '{name}' is not known.")
        part = Part(Region(home, "", name, ()), Places({}), wide=False)
        found[name] = part.run(None)
    return found


# --------------------------------------------------------------------------------------------
# A region as a model of its own


class Part:
    """A region that can be run on any input, with any parameters.

    ``wide``: in float32 throughout, whatever its types are, so that its formula shows.
    """

    def __init__(self, region: Region, places: Places, *, wide: bool) -> None:
        self.region = region
        self.wide = wide
        self.element = int(TensorProto.FLOAT)
        if not wide and region.x in places.types:
            self.element = places.types[region.x][0]
        self.leaves: dict[str, NDArray[Any]] = {}
        """The parameters: constants of more than one floating number, by name."""
        self.scalars: list[float] = []
        """Single floating constants and attributes: one of them is eps."""
        self.sides: list[str] = []
        """Values that depend on sizes outside of the region."""
        self._initializers: dict[str, Any] = {}
        self._nodes: dict[int, tuple[Graph, Any]] = {}
        self._gather()
        self.side_values = {name: places.sides[name] for name in self.sides if name in places.sides}
        self._session: Any = None

    def _gather(self) -> None:
        graph, inside = self.region.graph, {id(node) for node in self.region.nodes}
        own = {name for node in self.region.nodes for name in node.output} | {self.region.x}
        todo = [self.region.y]
        seen = {self.region.x}
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            home = graph.home(name)
            if home is None:
                raise ArgumentError(
                    f"Every value of a graph is computed in it. '{name}' is not. Export it again."
                )
            if name in home.initializers:
                self._constant(name, home.model.constant(home.initializers[name]))
                continue
            node = home.producer.get(name)
            if node is None or (home.kind(name) == VARYING and id(node) not in inside):
                raise ArgumentError(
                    f"A region has one varying input. It reads '{name}' too. Audit its parts."
                )
            if home.kind(name) == SHAPE and node.op_type in ("Shape", "Size"):
                if node.input[0] not in own:
                    self.sides.append(name)
                    continue
                todo += node.input  # found in the region itself
            elif node.op_type == "Constant":
                value = home.value(name)
                if value is not None:
                    self._constant(name, value)
                    continue
            self._nodes[id(node)] = (home, node)
            todo += [one for one in graph.reads(node) if one not in seen]
            if id(node) in inside:
                self.scalars += [
                    float(one.f) for one in node.attribute if one.type == AttributeProto.FLOAT
                ]

    def _constant(self, name: str, value: NDArray[Any]) -> None:
        floating = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
        if floating and value.size == 1:
            self.scalars.append(_shortest(value))
        if floating and self.wide:
            value = value.astype(np.float32)
        if floating and value.size > 1:
            self.leaves[name] = value
        else:
            self._initializers[name] = numpy_helper.from_array(np.asarray(value), name)

    @property
    def nodes(self) -> list[Any]:
        """All nodes, those for parameters and shapes too, in order."""
        depth: dict[int, int] = {}
        graph: Graph | None = self.region.graph
        while graph is not None:
            depth[id(graph)] = -len(depth)
            graph = graph.outer
        found = [
            (depth[id(home)], home.order[id(node)], node) for home, node in self._nodes.values()
        ]
        return [node for _, _, node in sorted(found, key=lambda one: one[:2])]

    def proto(self) -> Any:
        """The region as a model."""
        model = self.region.graph.model
        nodes = [_widened(node) if self.wide else node for node in self.nodes]
        inputs = [_open_input(self.region.x, self.element)] if self.region.x else []
        inputs += [_open_input(name, _element_of(value)) for name, value in self.leaves.items()]
        inputs += [_open_input(name, TensorProto.INT64) for name in self.sides]
        graph = helper.make_graph(
            nodes,
            "region",
            inputs,
            [helper.make_empty_tensor_value_info(self.region.y)],
            list(self._initializers.values()),
        )
        return helper.make_model(
            graph, opset_imports=model.proto.opset_import, ir_version=max(model.proto.ir_version, 4)
        )

    def run(self, x: NDArray[Any] | None, leaves: Values | None = None) -> NDArray[Any]:
        """The region's output.

        Raises:
            CannotRunError: onnxruntime cannot compute it for this input.
        """
        missing = [name for name in self.sides if name not in self.side_values]
        if missing:
            raise CannotRunError(f"The sizes of '{missing[0]}' are not known.")
        if self._session is None:
            self._session = session(self.proto(), threads=1)
        values = {**self.leaves, **(leaves or {}), **self.side_values}
        if x is not None:
            values[self.region.x] = x
        return fetch(self._session, [self.region.y], values)[0]

    def signature(self) -> bytes:
        """The same for regions that differ in names and parameters alone."""
        numbers: dict[str, int] = {self.region.x: 0}

        def number(name: str) -> str:
            return str(numbers.setdefault(name, len(numbers))) if name else ""

        said = []
        for name, value in self.leaves.items():
            said.append(f"{number(name)}:{value.shape}{is_trivial(value)}")
        for name, side in self.side_values.items():
            said.append(f"{number(name)}={side.tolist()}")
        for node in self.nodes:
            shown = type(node)()
            shown.CopyFrom(node)
            shown.name = shown.doc_string = ""
            shown.ClearField("metadata_props")
            for field in (shown.input, shown.output):
                renamed = [number(one) for one in field]
                del field[:]
                field.extend(renamed)
            said.append(shown.SerializeToString(deterministic=True).hex())
        for name, tensor in self._initializers.items():
            said.append(
                f"{number(name)}={tensor.data_type}{numpy_helper.to_array(tensor).tolist()}"
            )
        return " ".join([*said, number(self.region.y)]).encode()


def is_trivial(value: NDArray[Any]) -> bool:
    """Whether a parameter is all ones or all zeros."""
    return bool((value == value.flat[0]).all()) and float(value.flat[0]) in (0.0, 1.0)


def _shortest(value: NDArray[Any]) -> float:
    """A number as it was written before it was rounded to its type."""
    number = value.reshape(-1)[0]
    return float(str(number)) if value.dtype.kind == "f" else float(f"{float(number):.2e}")


def _element_of(value: NDArray[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(value.dtype))


def _open_input(name: str, element: int) -> Any:
    return helper.make_tensor_value_info(name, element, None)


FLOATING = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def _widened(node: Any) -> Any:
    """The node in float32."""
    wide = type(node)()
    wide.CopyFrom(node)
    for attribute in wide.attribute:
        if attribute.name in ("to", "dtype") and attribute.i in FLOATING:
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t") and attribute.t.data_type in FLOATING:
            values = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(values))
    return wide
