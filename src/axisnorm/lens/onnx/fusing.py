"""Norms that are written out become the standard operator, where it is shown to be the same."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, defs, helper, numpy_helper, version_converter

from ...scheme import ArgumentError
from ..identify import tolerance
from ..models.replaced import Left, Replaced, Replacements
from ..progress import step
from ..result import checked_target
from .auditing import batches, graph_of, paths_of, written_out
from .examining import Examined, StandardNode, examine
from .graph import Graph
from .inputs import generated
from .places import infer
from .reading import Model, read
from .regions import Part
from .replacing import Replacement, cannot, is_replaced, replacement
from .running import CannotRunError, Values, fetch, session
from .search import Found

__all__ = ["Fusion", "fuse"]

INLINE = 1 << 31
"""From so many bytes on a file of Protocol Buffers cannot hold a model's weights."""

ALIGNED = 1 << 12
"""Where weights begin in a file beside the model, so that they can be mapped."""

AGREES = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-6}
"""How far a model's outputs may move, by their type, as a share of the largest: rounding that the
layers behind a norm make larger."""


@dataclass(frozen=True)
class Fusion(Replacements):
    """What became a standard operator, what was left, and why."""

    written: Path | None
    """The file, None where nothing was to be replaced or the outputs differ."""
    opset: int
    """Of the file that was written."""

    @property
    def outcome(self) -> str:
        """Which file was written, or why none was."""
        if self.written is not None:
            return f"Written: {self.written}, opset {self.opset}."
        return "Nothing was written: no norm is replaced."


def fuse(
    path: str | Path,
    out: str | Path,
    /,
    *args: Any,
    opset: int | None = None,
    **kwargs: Any,
) -> Fusion:
    """Write an ONNX file in which norms that are written out are the standard operator.

    A fragment is replaced where a standard operator has its formula and axes, and gives its
    output on the model's own data and on random data. Then the outputs of the whole model are
    compared; the file is written only if they agree. What else reads a value inside a fragment
    still finds it. Names, metadata and external data stay; weights that nothing reads are left
    out.

    Args:
        path: the model.
        out: the file to write.
        args: arrays for its inputs, in order. Random ones where none are given.
        opset: raise the model to this opset first. Without it operators of later opsets are
            not used, and it is said which would be.
        kwargs: as args, by name.

    Raises:
        ArgumentError: the file cannot be read, run, converted or written.

    >>> import onnx
    >>> directory = Path(tempfile.mkdtemp())
    >>> onnx.save(onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     written_out (float[2, 4] x) => (float[2, 4] y) {
    ...         mean = ReduceMean<axes = [-1]>(x)
    ...         d = Sub(x, mean)
    ...         square = Mul(d, d)
    ...         variance = ReduceMean<axes = [-1]>(square)
    ...         eps = Constant<value = float {1e-5}>()
    ...         sum = Add(variance, eps)
    ...         deviation = Sqrt(sum)
    ...         y = Div(d, deviation)
    ...     }'''), directory / "model.onnx")
    >>> done = fuse(directory / "model.onnx", directory / "fused.onnx")
    >>> [(one.before, one.after) for one in done.replaced], done.largest_difference < 1e-6
    ([('norm in 7 nodes', 'LayerNormalization')], True)
    """
    target = checked_target(out, reads=[path])
    step("reading")
    original = read(path)
    model = original
    if opset is not None and opset != original.opset:
        step("converting")
        model = _raised(original, opset)
    return _fused(original, model, target, args, kwargs)


def _raised(model: Model, opset: int) -> Model:
    if opset < model.opset:
        raise ArgumentError(
            f"An opset is raised, never lowered. The model has {model.opset}, {opset} came. "
            "Leave --opset out, or name a later one."
        )
    if opset > defs.onnx_opset_version():
        raise ArgumentError(
            f"An opset is one that the installed onnx knows, up to {defs.onnx_opset_version()}. "
            f"{opset} came. Name an earlier one, or install a later onnx."
        )
    try:
        proto = version_converter.convert_version(model.proto, opset)
    except Exception as error:  # the converter's own kinds
        said = str(error).strip().splitlines()[0][:200] if str(error).strip() else "no reason"
        raise ArgumentError(
            f"The model has to be convertible to opset {opset}. ONNX's converter says: {said}. "
            "Export it at that opset."
        ) from error
    # The converter keeps the graph alone.
    proto.metadata_props.extend(model.proto.metadata_props)
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(proto, field, getattr(model.proto, field))
    known = {one.domain for one in proto.opset_import}
    proto.opset_import.extend(
        one for one in model.proto.opset_import if one.domain not in (*known, "ai.onnx")
    )
    return Model(model.path, proto, model.weights, model.had_functions)


def _fused(
    original: Model,
    model: Model,
    target: Path,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Fusion:
    examined = examine(model, args, kwargs)
    if examined.seen is None:
        raise ArgumentError(
            f"A fused model is verified by running it. {examined.problem} "
            "Give inputs that it takes, or a model that onnxruntime runs."
        )
    paths = paths_of(examined.norms)
    sizes = _open_sizes(model)
    done: list[tuple[Replacement, Replaced]] = []
    left: list[Left] = []
    wanted: list[Found | StandardNode] = []
    planned: dict[int, Replacement] = {}
    for norm in examined.norms:
        if not isinstance(norm, Found) or is_replaced(norm, examined.places):
            continue
        if graph_of(norm) is not examined.graphs[0]:
            made: Replacement | str = "it stands in a body, whose data is not to be had"
        else:
            made = cannot(norm, model.opset, examined.places) or replacement(
                norm,
                examined.places,
                sizes.get(norm.region.x, ()),
                _unused(model, paths[id(norm)]),
            )
        if isinstance(made, str):
            left.append(Left(paths[id(norm)], written_out(norm), made))
        else:
            wanted.append(norm)
            planned[id(norm)] = made
    for batch, values in batches(examined, wanted):
        for norm in batch:
            step("checking")
            made = planned[id(norm)]
            checked = _checked(examined, made, values, paths[id(norm)])
            if isinstance(checked, str):
                left.append(Left(paths[id(norm)], written_out(made.found), checked))
            else:
                done.append((made, checked))
    name = original.path.name
    if not done:
        return Fusion(name, (), tuple(left), 0.0, None, model.opset)
    step("comparing")
    proto, weights = _rewritten(model, [made for made, _ in done])
    difference, agrees = _compared(original, proto, weights, examined)
    replaced = tuple(one for _, one in done)
    if not agrees:
        left += [
            Left(one.path, one.before, f"the model's outputs would move by {difference:.2g}")
            for one in replaced
        ]
        return Fusion(name, (), tuple(left), difference, None, model.opset)
    step("writing")
    _write(target, proto, weights, beside=_is_external(original))
    return Fusion(name, replaced, tuple(left), difference, target, model.opset)


def _unused(model: Model, where: str) -> str:
    """A name for a node that no value or node of the graph has."""
    taken = {node.name for node in model.proto.graph.node}
    taken |= {name for node in model.proto.graph.node for name in node.output}
    name, count = f"{where}.fused", 1
    while any(one.startswith(name) for one in taken):
        name, count = f"{where}.fused{count}", count + 1
    return name


def _open_sizes(model: Model) -> dict[str, tuple[int | None, ...]]:
    """The sizes of values as the model fixes them, whatever its inputs are."""
    return infer(model, {}).fixed


# --------------------------------------------------------------------------------------------
# One fragment


def _checked(examined: Examined, made: Replacement, values: Values, where: str) -> Replaced | str:
    """The replacement against the fragment on the model's own data and on random data."""
    region = made.found.region
    part = Part(region, examined.places, wide=False)
    x = values[region.x]
    if part.element == TensorProto.BFLOAT16:
        return "it is in bfloat16, on which onnxruntime's CPU does not compute"
    random = np.random.default_rng(0)
    data = [x] if np.isfinite(x).all() else []
    data += [
        (scale * random.standard_normal(x.shape) + shift).astype(x.dtype)
        for scale, shift in ((1.0, 0.3), (0.02, 0.0))
    ]
    largest = worst = 0.0
    try:
        opened = session(made.part(part), threads=1)
        for values_in in data:
            before = part.run(values_in).astype(np.float64)
            inputs = {**part.leaves, **part.side_values, region.x: values_in}
            taken = {one.name for one in opened.get_inputs()}
            inputs = {name: value for name, value in inputs.items() if name in taken}
            after = fetch(opened, [region.y], inputs)[0].astype(np.float64)
            if before.shape != after.shape:
                return f"{made.operator} gives another shape"
            difference = float(np.abs(before - after).max()) if before.size else 0.0
            allowed = _allowed(made, values_in, before, part)
            largest = max(largest, difference)
            worst = max(worst, allowed)
            if not difference <= allowed:
                return f"{made.operator} differs by {difference:.2g}, more than rounding explains"
    except CannotRunError as error:
        return str(error).rstrip(".")
    return Replaced(where, written_out(made.found), made.operator, largest, worst)


def _allowed(made: Replacement, x: NDArray[Any], before: NDArray[Any], part: Part) -> float:
    """What rounding explains, of two computations."""
    scheme = made.found.shown.scheme
    sizes = scheme.layout(x.ndim).sizes(x.shape)
    values = x.astype(np.float64).reshape(sizes.expanded)
    axes = sizes.layout.reduced
    mean = np.abs(values.mean(axis=axes))
    spread = values.std(axis=axes) if scheme.center else np.sqrt((values**2).mean(axis=axes))
    with np.errstate(divide="ignore", invalid="ignore"):
        offset = mean / np.sqrt(spread**2 + float(scheme.eps or 0.0))
    offset = float(offset[np.isfinite(offset)].max(initial=0.0))
    terms = [float(np.abs(v).max()) for v in made.initializers.values() if v.size]
    own = float(np.abs(before).max(initial=0.0)) + (terms[1] if len(terms) > 1 else 0.0)
    dtype = str(x.dtype)
    bound = 2.0 * tolerance(dtype, sizes.group_size, own, offset * terms[0])
    # Half types may be rounded at every step of a fragment.
    return bound * (4.0 if dtype == "float16" else 1.0)


# --------------------------------------------------------------------------------------------
# The whole model


def _rewritten(
    model: Model, replacements: Sequence[Replacement]
) -> tuple[Any, dict[str, NDArray[Any]]]:
    """The model with the operators in place of the fragments, and its large weights."""
    proto = type(model.proto)()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    ends = {made.found.region.nodes[-1].name: made for made in replacements}
    nodes: list[Any] = []
    for node in graph.node:
        made = ends.get(node.name)
        if made is None:
            nodes.append(node)
        else:
            nodes += made.nodes
    used_before = _used(graph, list(graph.node))
    # What nothing read before stays: it may be there for another reader.
    silent = {node.name for node in graph.node if not used_before & set(node.output)}
    nodes = _without_unused(graph, nodes, silent)
    kept = type(graph)()
    kept.node.extend(nodes)
    graph.ClearField("node")
    graph.node.extend(kept.node)
    used = _used(graph, list(graph.node))
    gone = {t.name for t in graph.initializer if t.name in used_before and t.name not in used}
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name in gone:
            del graph.initializer[place]
    inputs = {value.name for value in graph.input}
    if gone & inputs:
        for place in reversed(range(len(graph.input))):
            if graph.input[place].name in gone:
                del graph.input[place]
    made_here = {name for node in graph.node for name in node.output}
    for place in reversed(range(len(graph.value_info))):
        name = graph.value_info[place].name
        if name not in made_here and name not in used:
            del graph.value_info[place]
    for made in replacements:
        for name, value in made.initializers.items():
            graph.initializer.append(numpy_helper.from_array(value, name))
            if proto.ir_version < 4:
                graph.input.append(
                    helper.make_tensor_value_info(
                        name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
                    )
                )
    weights = {name: value for name, value in model.weights.items() if name not in gone}
    return proto, weights


def _used(graph: Any, nodes: Sequence[Any]) -> set[str]:
    found = {name for node in nodes for name in Graph.reads(node)}
    return found | {value.name for value in graph.output}


def _without_unused(graph: Any, nodes: list[Any], silent: set[str]) -> list[Any]:
    """The nodes without those whose results nothing reads any more."""
    while True:
        used = _used(graph, nodes)
        left = [node for node in nodes if used & set(node.output) or node.name in silent]
        if len(left) == len(nodes):
            return left
        nodes = left


def _compared(
    original: Model, proto: Any, weights: Values, examined: Examined
) -> tuple[float, bool]:
    """The largest difference of the outputs, and whether it is rounding."""
    tried = [examined.inputs]
    if not examined.given:
        shapes = {name: value.shape for name, value in examined.inputs.items()}
        same = [v for v in generated(examined.graphs[0], seed=1)
                if {name: value.shape for name, value in v.items()} == shapes]  # fmt: skip
        tried += same[:1]
    before = session(original.proto, original.weights)
    wanted = [[np.asarray(one) for one in fetch(before, None, inputs)] for inputs in tried]
    del before
    try:
        after = session(proto, weights)
        results = [fetch(after, None, inputs) for inputs in tried]
    except CannotRunError:
        return math.inf, False
    largest, agrees = 0.0, True
    for ones, others in zip(wanted, results, strict=True):
        for one, other in zip(ones, others, strict=True):
            difference, same_enough = _apart(one, np.asarray(other))
            largest = max(largest, difference)
            agrees = agrees and same_enough
    return largest, agrees


def _apart(one: NDArray[Any], other: NDArray[Any]) -> tuple[float, bool]:
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf, False
    if one.dtype.kind != "f":
        equal = bool((one == other).all())
        return 0.0 if equal else math.inf, equal
    finite = np.isfinite(one)
    if not (finite == np.isfinite(other)).all():
        return math.inf, False
    one, other = one[finite], other[finite]
    if not one.size:
        return 0.0, True
    kind = str(one.dtype)
    difference = float(np.abs(one.astype(np.float64) - other).max())
    size = float(np.abs(one.astype(np.float64)).max())
    return difference, difference <= AGREES[kind] * max(size, float(np.finfo(kind).tiny))


# --------------------------------------------------------------------------------------------
# The file


def _is_external(model: Model) -> bool:
    """Whether the weights lay in files of their own."""
    return any(isinstance(value, np.memmap) or isinstance(value.base, np.memmap)
               for value in model.weights.values())  # fmt: skip


def _write(target: Path, proto: Any, weights: Values, *, beside: bool) -> None:
    """Write the model, in full or not at all."""
    size = sum(value.nbytes for value in weights.values())
    beside = beside or size + proto.ByteSize() >= INLINE
    data = target.with_name(target.name + ".data")
    stubs = [t for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    waiting: dict[Path, Path] = {}
    try:
        if beside:
            waiting[data] = _temporary(data)
            with waiting[data].open("wb") as file:
                for tensor in stubs:
                    file.write(b"\0" * (-file.tell() % ALIGNED))
                    value = np.ascontiguousarray(weights[tensor.name])
                    file.flush()
                    place = file.tell()
                    value.tofile(file)
                    tensor.ClearField("external_data")
                    for key, said in (
                        ("location", data.name), ("offset", place), ("length", value.nbytes),
                    ):  # fmt: skip
                        entry = tensor.external_data.add()
                        entry.key, entry.value = key, str(said)
        else:
            for tensor in stubs:
                tensor.ClearField("external_data")
                tensor.data_location = TensorProto.DEFAULT
                tensor.raw_data = np.ascontiguousarray(weights[tensor.name]).tobytes()
        waiting[target] = _temporary(target)
        waiting[target].write_bytes(proto.SerializeToString())
        for place_to, temporary in list(waiting.items()):
            temporary.replace(place_to)
            del waiting[place_to]
    except OSError as error:
        raise ArgumentError(
            f"A model is written to a file. '{target}' cannot be: {error.strerror}. Name another."
        ) from error
    finally:
        for temporary in waiting.values():
            temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    # mkstemp makes files for the owner alone; these are like any other.
    mask = os.umask(0)
    os.umask(mask)
    Path(name).chmod(0o666 & ~mask)
    return Path(name)
