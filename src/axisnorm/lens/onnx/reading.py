"""An ONNX file as data: parsed, its large weights apart, its local functions in line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import inliner, numpy_helper

from ...scheme import ArgumentError

__all__ = ["Model", "graphs_of", "is_standard", "read", "subgraphs"]

LARGE = 4096
"""Bytes from which on a weight is kept apart from the graph."""

OLDEST = 7
"""The first opset that is read."""

STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


@dataclass
class Model:
    """A parsed file."""

    path: Path
    proto: Any
    """The ModelProto: nodes have unique names, functions are in line, large weights are stubs."""
    weights: dict[str, NDArray[Any]]
    """The large initializers of the main graph, by name."""
    had_functions: bool

    @property
    def opset(self) -> int:
        """Of the standard domain."""
        return next(one.version for one in self.proto.opset_import if is_standard(one.domain))

    @property
    def custom(self) -> list[str]:
        """Operators of other domains, as ``domain:type``."""
        found = {
            f"{node.domain}:{node.op_type}"
            for graph in graphs_of(self.proto.graph)
            for node in graph.node
            if node.domain not in STANDARD_DOMAINS
        }
        return sorted(found)

    def constant(self, tensor: Any) -> NDArray[Any]:
        """The values of an initializer."""
        if tensor.name in self.weights and tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self.weights[tensor.name]
        return numpy_helper.to_array(tensor)


def is_standard(domain: str) -> bool:
    """Whether this is ONNX's own domain, which has two names."""
    return domain in ("", "ai.onnx")


def subgraphs(node: Any) -> Iterator[Any]:
    """The bodies of If, Loop, Scan and their kin."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs_of(graph: Any) -> Iterator[Any]:
    """A graph and all graphs inside it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs_of(inner)


def read(path: str | Path) -> Model:
    """Parse an ONNX file; nothing in it is run.

    Raises:
        ArgumentError: it is no ONNX file, is cut off, is older than opset 7, or lacks the data
            that it keeps in other files.
    """
    place = Path(path)
    if not place.is_file():
        raise ArgumentError(
            f"An ONNX model is a file. '{place}' is {'a directory' if place.is_dir() else 'none'}. "
            "Give the path of the .onnx file."
        )
    try:
        proto = onnx.load(str(place), load_external_data=False)
    except Exception as error:  # the parser raises its own kinds, by version
        raise _not_onnx(place, "cannot be parsed: it is cut off or of another kind") from error
    if not place.stat().st_size:
        raise _not_onnx(place, "is empty")
    if not proto.graph.output:
        raise _not_onnx(place, "has no graph with an output")
    if not any(is_standard(one.domain) for one in proto.opset_import):
        raise _not_onnx(place, "names no opset")
    opset = next(one.version for one in proto.opset_import if is_standard(one.domain))
    if opset < OLDEST:
        raise ArgumentError(
            f"ONNX models are read from opset {OLDEST} on. '{place.name}' has opset {opset}. "
            "Convert it with onnx.version_converter."
        )
    try:
        _check(proto)
    except (ValueError, KeyError, TypeError) as error:
        raise _not_onnx(
            place, "is damaged: its names, types or sizes contradict one another"
        ) from error
    had_functions = bool(proto.functions)
    weights = _apart(proto, place)
    # The parser's memory goes with the message that it filled: what is left is parsed anew.
    light = onnx.ModelProto()
    light.ParseFromString(proto.SerializeToString())
    del proto
    if had_functions:
        light = inliner.inline_local_functions(light)
    _name_nodes(light.graph)
    return Model(place, light, weights, had_functions)


def _not_onnx(place: Path, what: str) -> ArgumentError:
    return ArgumentError(
        f"An audit reads ONNX files. '{place.name}' {what}. Export or download it again."
    )


def _check(proto: Any) -> None:
    """Look at all names, types and sizes once.

    Raises:
        ValueError: a name is no text, a size is negative or not that of the data.
        KeyError: a type is not known.
        TypeError: as ValueError, by the version of the parser.
    """
    for graph in [*graphs_of(proto.graph), *proto.functions]:
        for node in graph.node:
            names = [node.name, node.op_type, node.domain, *node.input, *node.output]
            names += [attribute.name for attribute in node.attribute]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a name is no text")
            for attribute in node.attribute:
                onnx.helper.get_attribute_value(attribute)
    for graph in graphs_of(proto.graph):
        for value in (*graph.input, *graph.output):
            if not isinstance(value.name, str):
                raise ValueError("a name is no text")
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
                onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for tensor, _ in _tensors(graph):
            if not isinstance(tensor.name, str) or any(size < 0 for size in tensor.dims):
                raise ValueError("a name is no text, or a size is negative")
            if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.data_type != (
                onnx.TensorProto.STRING
            ):
                dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                if tensor.HasField("raw_data"):
                    if len(tensor.raw_data) != _size(tensor.dims, dtype):
                        raise ValueError("the data of a tensor has another size")
                else:
                    numpy_helper.to_array(tensor)


def _size(dims: Any, dtype: Any) -> int:
    """How many bytes a tensor takes; the small types are packed."""
    bits = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}.get(dtype.name)
    count = math.prod(dims)
    return (count * bits + 7) // 8 if bits else count * int(dtype.itemsize)


def _apart(proto: Any, place: Path) -> dict[str, NDArray[Any]]:
    """Take the large weights out of the graph, and the external ones from their files."""
    weights = {}
    if proto.ir_version >= 4:
        _constants_as_initializers(proto.graph)
    for depth, graph in enumerate(graphs_of(proto.graph)):
        for tensor, initializer in _tensors(graph):
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            main = initializer and depth == 0
            if not external and not (main and len(tensor.raw_data) >= LARGE):
                continue
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            plain = dtype.kind in "fiu" and dtype.itemsize * 8 == _bits(dtype)
            if external:
                data = _from_file(tensor, place, dtype)
            else:
                data = np.frombuffer(tensor.raw_data, dtype=np.uint8)
            if main and plain:
                weights[tensor.name] = data.view(dtype).reshape(tuple(tensor.dims))
                tensor.ClearField("raw_data")
                tensor.ClearField("external_data")
                _stub(tensor)
            elif external:
                tensor.raw_data = data.tobytes()
                tensor.ClearField("external_data")
                tensor.data_location = onnx.TensorProto.DEFAULT
    return weights


def _constants_as_initializers(graph: Any) -> None:
    """Large Constant nodes become initializers, which can be kept apart."""
    left = []
    for node in graph.node:
        large = [
            one.t
            for one in node.attribute
            if node.op_type == "Constant" and one.name == "value" and len(one.t.raw_data) >= LARGE
        ]
        if not large:
            left.append(node)
            continue
        tensor = graph.initializer.add()
        tensor.CopyFrom(large[0])
        tensor.name = node.output[0]
    if len(left) < len(graph.node):
        kept = type(graph)()
        kept.node.extend(left)
        graph.ClearField("node")
        graph.node.extend(kept.node)


def _bits(dtype: Any) -> int:
    """As NumPy's own types count: the small ones of ml_dtypes are packed otherwise."""
    return int(dtype.name[-2:].lstrip("t")) if dtype.name[-2:].lstrip("t").isdigit() else 0


def _tensors(graph: Any) -> Iterator[tuple[Any, bool]]:
    """The tensors of a graph without its bodies, each with whether it is an initializer."""
    for tensor in graph.initializer:
        yield tensor, True
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t, False


def _stub(tensor: Any) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "weights"


def _from_file(tensor: Any, place: Path, dtype: Any) -> NDArray[np.uint8]:
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    home = place.parent.resolve()
    file = (home / location).resolve()
    if not location or not file.is_relative_to(home):
        raise ArgumentError(
            f"External data lies beside its model. '{place.name}' points to '{location}'. "
            "Save the model with its data in one directory."
        )
    if not file.is_file():
        raise ArgumentError(
            f"'{place.name}' keeps its weights in '{location}'. There is no such file beside it. "
            "Put it there."
        )
    try:
        offset = int(said.get("offset", 0))
        length = int(said.get("length", -1))
    except ValueError:
        raise _not_onnx(place, f"has a broken place in '{location}'") from None
    wanted = _size(tensor.dims, dtype)
    length = wanted if length < 0 else length
    if length != wanted or offset < 0 or offset + length > file.stat().st_size:
        raise ArgumentError(
            f"'{location}' holds the weights of '{place.name}'. It has no {wanted} bytes at "
            f"{offset} for '{tensor.name}'. Save or download both again."
        )
    if not length:
        return np.zeros(0, np.uint8)
    return np.memmap(file, np.uint8, "r", offset, (length,))


def _name_nodes(graph: Any) -> None:
    """Every node gets a name, and no two the same, so that times and findings can name them."""
    taken = {node.name for inner in graphs_of(graph) for node in inner.node}
    seen: set[str] = set()
    for inner in graphs_of(graph):
        for place, node in enumerate(inner.node):
            name = node.name
            if not name or name in seen:
                stem = name or f"{node.op_type}_{place}"
                name, count = stem, 1
                while name in seen or (name in taken and name != node.name) or name == node.name:
                    name, count = f"{stem}_{count}", count + 1
                node.name = name
            seen.add(name)
