"""Sessions of onnxruntime: a whole model, a part of one, and what its nodes cost."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ...scheme import ArgumentError
from .reading import Model, graphs_of

__all__ = [
    "CannotLoadError", "CannotRunError", "Inspected", "Values", "capture", "fetch", "inspect",
    "session",
]  # fmt: skip

Values = Mapping[str, NDArray[Any]]


class CannotRunError(ArgumentError):
    """onnxruntime refused a model or its inputs, with what it says."""


class CannotLoadError(CannotRunError):
    """onnxruntime does not take the model, whatever its inputs are."""


def first_line(error: BaseException) -> str:
    """What onnxruntime says, without its codes and the rest of its lines."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    said = text.split(" : ")[-1] if text.startswith("[ONNXRuntimeError]") else text
    # Some begin with a line of the runtime's source and a function's signature.
    said = re.sub(r"^/\S+:\d+ .*?\) (?=[A-Z])", "", said)
    return said[:200].strip().rstrip(".")


def session(
    proto: Any,
    weights: Values | None = None,
    *,
    threads: int = 0,
    profile: Path | None = None,
    optimized: bool = False,
) -> Any:
    """An InferenceSession that runs the nodes as they stand, unless ``optimized``.

    Raises:
        CannotRunError: onnxruntime does not take the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    # Packed copies of weights cost their size again.
    options.add_session_config_entry("session.disable_prepacking", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile / "run")
    names = [t.name for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    if names and weights is not None:
        held = [onnxruntime.OrtValue.ortvalue_from_numpy(_contiguous(weights[n])) for n in names]
        options.add_external_initializers(names, held)
    try:
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its classes are private and many
        said = f"onnxruntime does not take the model: {first_line(error)}."
        raise CannotLoadError(said) from error


def _contiguous(values: NDArray[Any]) -> NDArray[Any]:
    """A contiguous array, which onnxruntime takes; NumPy's own function gives scalars an axis."""
    return np.ascontiguousarray(values).reshape(values.shape)


def fetch(opened: Any, names: Iterable[str] | None, inputs: Values) -> list[NDArray[Any]]:
    """Run a session.

    Raises:
        CannotRunError: the run fails.
    """
    wanted = None if names is None else list(names)
    given = {name: _value(array) for name, array in inputs.items()}
    try:
        return [value.numpy() for value in opened.run_with_ort_values(wanted, given)]
    except Exception as error:
        raise CannotRunError(f"onnxruntime cannot run the model: {first_line(error)}.") from error


def _value(array: NDArray[Any]) -> Any:
    """An array as onnxruntime's own value, also of types that are none of NumPy's."""
    made = onnxruntime.OrtValue
    if array.dtype.name == "bfloat16":
        bits = array.view(np.uint16)
        return made.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return made.ortvalue_from_numpy(array)


class Inspected:
    """What one run of a model showed."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.elements: dict[str, int] = {}
        self.sides: dict[str, NDArray[Any]] = {}
        self.seconds = 0.0
        self.spent: dict[str, float] = {}
        """Seconds by node."""


def inspect(
    model: Model, inputs: Values, *, measured: Iterable[str] = (), sides: Iterable[str] = ()
) -> Inspected:
    """Run a model: how large values are, what small ones hold, and how long nodes take.

    Args:
        measured: values of which only shape and type are taken.
        sides: values that are taken whole: shapes.
    """
    proto = _copy(model)
    graph = proto.graph
    known = {value.name for value in graph.output}
    measured, sides = list(dict.fromkeys(measured)), list(dict.fromkeys(sides))
    wanted = list(sides)
    graph.output.extend(helper.make_empty_tensor_value_info(n) for n in sides if n not in known)
    if measured:
        for place, values in (("flat", [-1]), ("zero", [0]), ("one", [1])):
            fixed = helper.make_tensor(f"axisnorm_{place}", TensorProto.INT64, [1], values)
            graph.initializer.append(fixed)
    inside = {node.name for inner in graphs_of(graph) for node in inner.node}
    inside -= {node.name for node in graph.node}
    for number, name in enumerate(measured):
        stem = f"axisnorm_{number}"
        graph.node.extend([
            helper.make_node("Shape", [name], [f"{stem}_shape"], name=f"{stem}_a"),
            helper.make_node("Reshape", [name, "axisnorm_flat"], [f"{stem}_flat"],
                             name=f"{stem}_b"),
            _first_element(model.opset, f"{stem}_flat", f"{stem}_first", f"{stem}_c"),
        ])  # fmt: skip
        wanted += [f"{stem}_shape", f"{stem}_first"]
        graph.output.extend(
            helper.make_empty_tensor_value_info(n) for n in (f"{stem}_shape", f"{stem}_first")
        )
    found = Inspected()
    first = [graph.output[0].name]
    with tempfile.TemporaryDirectory() as directory:
        opened = session(proto, model.weights, profile=Path(directory))
        given = {name: _value(array) for name, array in inputs.items()}
        try:
            for _ in range(2):  # the first run allocates
                results = opened.run_with_ort_values(wanted or first, given)
        except Exception as error:
            said = f"onnxruntime cannot run the model: {first_line(error)}."
            raise CannotRunError(said) from error
        events = json.loads(Path(opened.end_profiling()).read_text())
    results = results[: len(wanted)] if wanted else []
    for name, value in zip(sides, results, strict=False):
        found.sides[name] = value.numpy()
    pairs = zip(results[len(sides) :: 2], results[len(sides) + 1 :: 2], strict=True)
    for name, (shape, element) in zip(measured, pairs, strict=True):
        found.shapes[name] = tuple(int(size) for size in shape.numpy())
        found.elements[name] = int(element.element_type())
    _times(found, events, inside)
    return found


def _first_element(opset: int, name: str, result: str, node: str) -> Any:
    if opset >= 10:
        return helper.make_node(
            "Slice", [name, "axisnorm_zero", "axisnorm_one"], [result], name=node
        )
    return helper.make_node("Slice", [name], [result], name=node, starts=[0], ends=[1], axes=[0])


def _times(found: Inspected, events: list[Any], bodies: set[str]) -> None:
    """The nodes' times of the last run, without what was added for looking."""
    runs = [event for event in events if event.get("name") == "model_run"]
    begin = runs[-1]["ts"] if runs else 0
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time") and event["ts"] >= begin:
            node = name.removesuffix("_kernel_time")
            found.spent[node] = found.spent.get(node, 0.0) + event["dur"] * 1e-6
    # Nodes of bodies count in the node that they stand in. Operators that onnxruntime computes
    # by others count, under the names of these.
    found.seconds = sum(
        seconds
        for node, seconds in found.spent.items()
        if node not in bodies and not node.startswith("axisnorm_")
    )


def _copy(model: Model) -> Any:
    proto = type(model.proto)()
    proto.CopyFrom(model.proto)
    return proto


def capture(
    model: Model, inputs: Values, names: Iterable[str], *, widen: Iterable[str] = ()
) -> dict[str, NDArray[Any]]:
    """The values of these names in one run; those in ``widen`` as float32."""
    proto = _copy(model)
    known = {value.name for value in proto.graph.output}
    wide, wanted = set(widen), []
    for place, name in enumerate(names):
        if name in wide:
            proto.graph.node.append(
                helper.make_node("Cast", [name], [f"axisnorm_wide_{place}"], to=TensorProto.FLOAT)
            )
        shown = f"axisnorm_wide_{place}" if name in wide else name
        wanted.append(shown)
        if shown not in known and shown not in inputs:
            proto.graph.output.append(helper.make_empty_tensor_value_info(shown))
    asked = [name for name in dict.fromkeys(wanted) if name not in inputs]
    results: dict[str, NDArray[Any]] = {}
    if asked:
        values = fetch(session(proto, model.weights), asked, inputs)
        results = dict(zip(asked, values, strict=True))
    return {
        name: inputs[shown] if shown in inputs else results[shown]
        for name, shown in zip(names, wanted, strict=True)
    }
