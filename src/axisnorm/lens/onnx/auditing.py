"""The audit of an ONNX file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import TensorProto

from ... import reference
from ..models.findings import mixed_eps
from ..models.norms import Audit, Norm, axis_names, shared_counts
from ..models.parameters import Parameter
from ..progress import step
from .examining import Examined, StandardNode, examine
from .reading import read
from .regions import COMPLETE
from .rules import about_model, about_norm
from .running import Values, capture
from .search import Found
from .standard import common_prefix
from .verifying import Held, hold, needs

__all__ = ["audit_onnx", "batches", "graph_of", "paths_of", "written_out"]

CAPTURED = 1 << 28
"""So many bytes of a model's values are held at once, or one value."""


DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
}


def audit_onnx(
    path: str | Path, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Audit:
    """Read and run an ONNX file, and hold each of its norms against its own data.

    Args:
        path: the file; nothing in it but the operators that onnxruntime knows is run.
        args: arrays for its inputs, in order. Random ones where none are given.
        kwargs: the same by name.

    Raises:
        ArgumentError: it is no such file, or the inputs are not its.
    """
    step("reading")
    examined = examine(read(path), args, kwargs or {})
    norms = list(_norms(examined))
    findings = [finding for norm in norms for finding in norm.findings]
    findings += mixed_eps([(norm.cls, norm.eps) for norm in norms if norm.eps is not None])
    findings += about_model(examined)
    seconds = examined.seen.seconds if examined.seen is not None else math.nan
    return Audit(Path(path).name, tuple(norms), tuple(findings), seconds, source="onnx")


def _norms(examined: Examined) -> Iterator[Norm]:
    done = 0
    paths = paths_of(examined.norms)
    for batch, values in batches(examined, examined.norms):
        for norm in batch:
            step("checking", done, len(examined.norms))
            done += 1
            wanted = needs(norm)
            own = {name: values[name] for name in wanted if name in values}
            held = hold(norm, own if len(own) == len(wanted) and own else None, examined.places)
            yield _norm(examined, norm, held, paths[id(norm)])


def graph_of(norm: Found | StandardNode) -> Any:
    return norm.region.graph if isinstance(norm, Found) else norm.graph


def _nodes(norm: Found | StandardNode) -> tuple[Any, ...]:
    return norm.region.nodes if isinstance(norm, Found) else (norm.node,)


def batches(
    examined: Examined, norms: Sequence[Found | StandardNode]
) -> Iterator[tuple[list[Found | StandardNode], Values]]:
    """The norms in order with their inputs, so many at a time that these can be held."""
    batch: list[Found | StandardNode] = []
    held = 0
    for norm in norms:
        size = sum(_bytes(examined, name) for name in needs(norm))
        if batch and held + size > CAPTURED:
            yield batch, _captured(examined, batch)
            batch, held = [], 0
        batch.append(norm)
        held += size
    if batch:
        yield batch, _captured(examined, batch)


def _bytes(examined: Examined, name: str) -> int:
    shape = examined.places.shape(name)
    return 8 * math.prod(shape) if shape is not None else 0


def _captured(examined: Examined, norms: Sequence[Found | StandardNode]) -> Values:
    """The inputs of norms of the main graph, none where the model could not be run."""
    inside = [norm for norm in norms if graph_of(norm) is examined.graphs[0]]
    if examined.seen is None:
        return {}
    names = list(dict.fromkeys(name for norm in inside for name in needs(norm)))
    wide = [n for n in names if examined.places.types.get(n, (0,))[0] == TensorProto.BFLOAT16]
    return capture(examined.model, examined.inputs, names, widen=wide)


def paths_of(norms: Sequence[Found | StandardNode]) -> dict[int, str]:
    """A name for each: the node's, or the path that a fragment's nodes share."""
    found = {}
    shared: dict[str, int] = {}
    for norm in norms:
        names = [node.name for node in _nodes(norm)]
        prefix = common_prefix(names) if len(names) > 1 else ""
        shared[prefix] = shared.get(prefix, 0) + 1
        found[id(norm)] = (prefix, names[-1])
    return {
        key: graph_of(norm).path + (prefix if prefix and shared[prefix] == 1 else last)
        for norm, (key, (prefix, last)) in zip(norms, found.items(), strict=True)
    }


def _norm(examined: Examined, norm: Found | StandardNode, held: Held, path: str) -> Norm:
    shape, scheme = held.shape, held.scheme
    shown = scheme or held.declared
    means = size = None
    axes: tuple[str, ...] = ()
    if shown is not None and shape is not None:
        means, size = shared_counts(shown, shape)
        axes = axis_names(shown, len(shape))
    nodes = _nodes(norm)
    dtype = _dtype(held.element)
    eps = None
    if shown is not None:
        eps = reference.resolve_eps(shown, dtype or "float32")
    cls = norm.node.op_type if isinstance(norm, StandardNode) else _class(norm)
    return Norm(
        path=path,
        cls=cls,
        kind="node" if isinstance(norm, StandardNode) else "fragment",
        declared=held.declared,
        scheme=scheme,
        identification=held.identification,
        eps=eps,
        shape=shape,
        dtype=dtype,
        affine_shape=held.affine_shape,
        num_statistics=means,
        group_size=size,
        calls=1 if shape is not None else 0,
        time_share=_share(examined, nodes),
        findings=tuple(about_norm(examined, norm, held, path)),
        nodes=tuple(node.name for node in nodes),
        axes=axes,
        parameters=tuple(
            Parameter.of(role, value) for role, value in held.given.items() if value is not None
        ),
    )


def _dtype(element: int | None) -> str | None:
    return DTYPES.get(element) if element is not None else None


def written_out(found: Found) -> str:
    """What a fragment is, in the words of the field, and how long."""
    return f"{_word(found)} in {len(found.region.nodes)} nodes"


def _class(found: Found) -> str:
    """The operator that is the norm among nodes that turn its input or scale its output."""
    whole = [node.op_type for node in found.region.nodes if node.op_type in COMPLETE]
    return whole[-1] if whole else f"{_word(found)} written out"


def _word(found: Found) -> str:
    if found.shown.scheme.scale == "l2":
        return "length"
    return "norm" if found.shown.scheme.center else "RMS norm"


def _share(examined: Examined, nodes: Sequence[Any]) -> float | None:
    seen = examined.seen
    if seen is None or not seen.seconds:
        return None
    spent = [seen.spent[node.name] for node in nodes if node.name in seen.spent]
    return min(1.0, sum(spent) / seen.seconds) if spent else None
