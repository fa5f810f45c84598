"""The inputs of an ONNX model: those that were given, checked, or random ones of its types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ...scheme import ArgumentError
from .graph import Graph

__all__ = ["checked", "generated", "required"]

SEED = 0

SIZES = ((2, 16, 32), (1, 16, 64), (1, 32, 224), (1, 8, 48), (1, 64, 320), (1, 1, 8), (2, 128, 128))
"""Tried in this order for open axes: of the batch, of sequences, of height and width."""

MOST_ELEMENTS = 1 << 28
"""Of a generated input."""

THROUGH = ("Cast", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Transpose")


def required(graph: Graph) -> list[Any]:
    """The graph's inputs that have no default, in order."""
    return [value for value in graph.proto.input if value.name not in graph.initializers]


def checked(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The given arrays by the names of the inputs.

    Raises:
        ArgumentError: a name, a number or a shape is wrong.
    """
    wanted = required(graph)
    names = [value.name for value in wanted]
    if len(args) > len(names):
        raise ArgumentError(
            f"The model takes {len(names)} inputs: {', '.join(names)}. {len(args)} came. "
            "Give one array for each, in order or by name."
        )
    given = dict(zip(names, args, strict=False))
    known = {value.name: value for value in graph.proto.input}
    for name, value in kwargs.items():
        if name in given or name not in known:
            what = "came twice" if name in given else "is none of them"
            raise ArgumentError(
                f"The model's inputs are {', '.join(names)}. '{name}' {what}. Name each once."
            )
        given[name] = value
    missing = [name for name in names if name not in given]
    if missing:
        raise ArgumentError(
            f"The model takes {len(names)} inputs: {', '.join(names)}. {', '.join(missing)} did "
            "not come. Give one array for each, or none at all for generated ones."
        )
    return {name: _fitting(known[name], value) for name, value in given.items()}


def _fitting(value: Any, given: Any) -> NDArray[Any]:
    array = np.asarray(given.detach().cpu().numpy() if hasattr(given, "detach") else given)
    element, dims = _type(value)
    wanted = helper.tensor_dtype_to_np_dtype(element)
    if array.dtype != wanted:
        if not np.can_cast(array.dtype, wanted, "same_kind"):
            raise ArgumentError(
                f"The input '{value.name}' is {wanted.name}. {array.dtype.name} came. "
                f"Convert it, as in x.astype('{wanted.name}')."
            )
        array = array.astype(wanted)
    if dims is not None and (
        len(dims) != array.ndim
        or any(isinstance(d, int) and d != n for d, n in zip(dims, array.shape, strict=True))
    ):
        said = ", ".join(str(d) if d else "?" for d in dims)
        raise ArgumentError(
            f"The input '{value.name}' has shape ({said}). {tuple(array.shape)} came. "
            "Give an array of that shape."
        )
    return np.ascontiguousarray(array).reshape(array.shape)


def _type(value: Any) -> tuple[int, list[int | str | None] | None]:
    if not value.type.HasField("tensor_type"):
        raise ArgumentError(
            "An audit runs models whose inputs are tensors. "
            f"'{value.name}' is a {value.type.WhichOneof('value') or 'value of no type'}. "
            "Export the model with tensors as inputs."
        )
    kind = value.type.tensor_type
    if kind.elem_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        raise ArgumentError(
            f"An audit runs models on numbers. The input '{value.name}' is none. "
            "Export the model without its text processing."
        )
    if not kind.HasField("shape"):
        return kind.elem_type, None
    dims: list[int | str | None] = []
    for dim in kind.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param or None)
    return kind.elem_type, dims


def generated(graph: Graph, seed: int = SEED) -> Iterator[dict[str, NDArray[Any]]]:
    """Random inputs, the same every time, for one choice of open sizes after another."""
    wanted = [(value.name, *_type(value)) for value in required(graph)]
    seen = set()
    for batch, length, space in SIZES:
        chosen: dict[str, int] = {}
        shapes = {}
        for name, _, dims in wanted:
            said = [] if dims is None else dims
            shapes[name] = tuple(
                d if isinstance(d, int) else _open(d, place, len(said), (batch, length, space),
                                                   chosen)
                for place, d in enumerate(said)
            )  # fmt: skip
        if any(math.prod(shape) > MOST_ELEMENTS for shape in shapes.values()):
            continue
        key = tuple(shapes.items())
        if key in seen:
            continue
        seen.add(key)
        random = np.random.default_rng(seed)
        yield {
            name: _values(graph, name, element, shapes[name], random) for name, element, _ in wanted
        }


def _open(
    name: str | int | None, place: int, ndim: int, sizes: tuple[int, int, int],
    chosen: dict[str, int],
) -> int:  # fmt: skip
    batch, length, space = sizes
    said = name.lower() if isinstance(name, str) else ""
    if "past" in said and "+" not in said:
        size = 0
    elif "batch" in said or (place == 0 and not any(w in said for w in ("seq", "len", "tok"))):
        size = batch
    elif place == 1 and ndim == 4:
        size = 3
    else:
        size = space if ndim >= 4 and place >= 2 and "seq" not in said else length
    return chosen.setdefault(name, size) if isinstance(name, str) else size


def _values(
    graph: Graph, name: str, element: int, shape: tuple[int, ...], random: np.random.Generator
) -> NDArray[Any]:
    dtype = helper.tensor_dtype_to_np_dtype(element)
    if dtype.kind == "b" or "mask" in name.lower():
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        below = _table_size(graph, name)
        if "position" in name.lower() and shape:
            return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
        if below is None:
            return np.ones(shape, dtype)
        return random.integers(0, below, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _table_size(graph: Graph, name: str) -> int | None:
    """How many rows the table has from which this input picks, the smallest of several."""
    found = []
    todo, seen = [name], {name}
    while todo:
        for node in graph.consumers.get(todo.pop(), []):
            table = None
            if node.op_type == "Gather" and node.input[1] in seen:
                table = node.input[0]
            elif node.op_type == "EmbedLayerNormalization":
                table = node.input[2] if node.input[0] in seen else node.input[4]
            if table:
                home = graph.home(table)
                tensor = home.initializers.get(table) if home is not None else None
                if tensor is not None and tensor.dims:
                    found.append(int(tensor.dims[0]))
            elif node.op_type in THROUGH and node.output[0] not in seen:
                seen.add(node.output[0])
                todo.append(node.output[0])
    return min(found, default=None)
