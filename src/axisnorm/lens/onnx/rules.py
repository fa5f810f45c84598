"""What is suspicious about the norms of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import TensorProto

from ..models.findings import Finding, findings_of
from .examining import Examined, StandardNode
from .graph import attributes
from .regions import Part
from .search import Found
from .verifying import HALF, Held

__all__ = ["about_model", "about_norm"]

LARGEST_SQUARE = 255.0
"""float16 ends at 65504: above this a square is infinite."""
STALE = 4.0
"""So many running deviations between the means of data and statistics, or so many times the
variance, are no chance."""


def about_norm(
    examined: Examined, norm: Found | StandardNode, held: Held, path: str
) -> Iterator[Finding]:
    """The findings about one norm."""
    broken = [
        name for name, value in held.given.items()
        if value is not None and not np.isfinite(value.astype(np.float64)).all()
    ]  # fmt: skip
    if broken:
        # Nothing can be held against an output of NaN.
        yield Finding(
            "non-finite-parameters",
            "error",
            f"Its {' and '.join(broken)} {'holds' if len(broken) == 1 else 'hold'} NaN or "
            "infinity.",
            "Load the checkpoint again, or one from before training diverged.",
            path,
        )
        return
    declared = held.declared
    identification = held.identification
    if isinstance(norm, Found) and held.scheme and identification and identification.best is None:
        residual = identification.candidates[0].residual
        yield Finding(
            "loses-digits",
            "warning",
            f"At this input its output is off by {residual:.2g} from its own formula, more than "
            "rounding explains.",
            "Subtract the mean before squaring: the mean square minus the squared mean loses the "
            "digits that both share.",
            path,
        )
        identification = None
    yield from findings_of(path, None, declared, identification, held.shape, held.problem)
    if held.generated and held.problem is None and examined.seen is not None:
        yield Finding(
            "generated-data",
            "note",
            "Held against random data: the model's own does not reach it from outside.",
            "What is said of its formula holds for every input.",
            path,
        )
    yield from _formula(examined, norm, held, path)
    yield from _parameters(held, path)
    if held.x is not None and not held.generated and examined.seen is not None:
        yield from _data(examined, norm, held, path)


def _formula(
    examined: Examined, norm: Found | StandardNode, held: Held, path: str
) -> Iterator[Finding]:
    scheme = held.scheme or held.declared
    if isinstance(norm, StandardNode):
        node = norm.node
        if node.op_type == "BatchNormalization" and scheme and scheme.statistics == "batch":
            yield Finding(
                "batch-statistics-in-eval",
                "warning",
                "BatchNormalization runs in training mode: what a sample gives depends on the "
                "samples beside it.",
                "Export the model in eval mode.",
                path,
            )
        if node.op_type == "GroupNormalization" and examined.model.opset < 21:
            yield Finding(
                "deprecated-operator",
                "note",
                "GroupNormalization before opset 21 has one scale and bias a group, not a "
                "channel, and is deprecated.",
                "Convert the model to opset 21, with the scale repeated for each channel.",
                path,
            )
        return
    kinds = {node.op_type for node in norm.region.nodes}
    if scheme is None:
        return
    if "InstanceNormalization" in kinds and "(g=" in scheme.axes:
        yield Finding(
            "instance-norm-as-group-norm",
            "note",
            "A GroupNorm, computed by InstanceNormalization between two Reshapes.",
            "At opset 21 and above one GroupNormalization computes it: --fuse.",
            path,
        )
    if norm.shown.factor != 1.0:
        yield Finding(
            "scalar-scale",
            "note",
            f"The result is multiplied by one number, {norm.shown.factor:.6g}, not by a weight "
            "for each element.",
            "A port has to multiply by it as well.",
            path,
        )
    half = held.element == TensorProto.FLOAT16 and not _widens(norm)
    if half and scheme.eps == 0 and 0.0 in Part(norm.region, examined.places, wide=False).scalars:
        yield Finding(
            "eps-too-small",
            "warning",
            "A number is added against a division by 0, and is 0 in float16.",
            "Compute the norm in float32, or take an eps of at least 1e-7.",
            path,
        )


def _widens(found: Found) -> bool:
    """Whether a half input is computed in float32."""
    return any(
        node.op_type == "Cast" and attributes(node).get("to") == TensorProto.FLOAT
        for node in found.region.nodes
    )


def _parameters(held: Held, path: str) -> Iterator[Finding]:
    weight, bias = held.given.get("weight"), held.given.get("bias")
    if weight is None or weight.size < 2:
        return
    offset = held.scheme.weight_offset if held.scheme is not None else 0.0
    effective = weight.astype(np.float64) + offset
    dead = int((effective == 0).sum())
    if dead:
        yield Finding(
            "dead-channels",
            "warning" if dead < weight.size else "error",
            f"{dead} of {weight.size} weights are 0: their outputs are the bias whatever the "
            "input.",
            "Prune them, or look for a weight that was never loaded.",
            path,
        )
    if (effective == 1).all() and (bias is None or not bias.any()):
        yield Finding(
            "unit-weight",
            "note",
            "Every weight is 1" + (" and every bias 0." if bias is not None else "."),
            "Nothing, if it was not trained; else check that its weights were loaded.",
            path,
        )


def _data(
    examined: Examined, norm: Found | StandardNode, held: Held, path: str
) -> Iterator[Finding]:
    scheme, x = held.scheme or held.declared, held.x
    if scheme is None or x is None or x.size == 0:
        return
    finite = np.isfinite(x)
    largest = float(np.abs(x[finite]).max()) if finite.any() else 0.0
    narrow = held.element == TensorProto.FLOAT16 and isinstance(norm, Found) and not _widens(norm)
    if narrow and largest > LARGEST_SQUARE:
        yield Finding(
            "half-precision-overflow",
            "warning",
            f"Its input reaches {largest:.4g}: in float16 the square is infinite.",
            "Compute the norm in float32 (Cast before and after).",
            path,
        )
    elif held.element in HALF and largest > LARGEST_SQUARE:
        yield Finding(
            "half-precision-overflow",
            "note",
            f"Its input reaches {largest:.4g}, whose square float16 does not hold. Here it is "
            "computed in float32.",
            "Keep it in float32 when the model is converted.",
            path,
        )
    sizes = scheme.layout(x.ndim).sizes(x.shape)
    if scheme.statistics == "running":
        if examined.given:
            yield from _stale(held, sizes, path)
        return
    if sizes.group_size > 1 and scheme.center:
        expanded = x.reshape(sizes.expanded)
        low = expanded.min(axis=sizes.layout.reduced)
        high = expanded.max(axis=sizes.layout.reduced)
        constant = int(((low == high) & np.isfinite(low)).sum())
        if constant:
            yield Finding(
                "constant-groups",
                "note",
                f"At this input {constant} of {low.size} groups hold one value throughout: their "
                "output is the bias.",
                "Padding or dead channels give such groups; else look at what feeds it.",
                path,
            )


def _stale(held: Held, sizes: Any, path: str) -> Iterator[Finding]:
    """Running statistics held against those of the data."""
    mean, var = held.given.get("running_mean"), held.given.get("running_var")
    x = held.x
    if mean is None or var is None or x is None:
        return
    layout = sizes.layout
    others = tuple(i for i in range(len(sizes.expanded)) if i not in layout.running)
    values = x.astype(np.float64).reshape(sizes.expanded)
    if values.size // max(1, mean.size) < 16:
        return
    own_mean = values.mean(axis=others).reshape(mean.shape)
    own_var = values.var(axis=others).reshape(mean.shape)
    eps = float(held.scheme.eps or 0.0) if held.scheme is not None else 0.0
    deviation = np.sqrt(var.astype(np.float64) + eps)
    off = float(np.median(np.abs(own_mean - mean) / deviation))
    ratio = float(np.median((own_var + eps) / (var + eps)))
    if off > STALE or not 1 / STALE**2 < ratio < STALE**2:
        yield Finding(
            "running-statistics-mismatch",
            "warning",
            "Its running statistics do not fit this input: the median channel's mean is "
            f"{off:.3g} running deviations away, its variance {ratio:.3g} times the running one.",
            "Check the preprocessing (scale, channel order), or calibrate the statistics anew.",
            path,
        )


def about_model(examined: Examined) -> Iterator[Finding]:
    """The findings about the model as a whole."""
    if examined.model.custom:
        yield Finding(
            "custom-operators",
            "note",
            f"Operators that are not ONNX's stand in it: {', '.join(examined.model.custom)}. "
            "They are not run.",
            "Read what they compute: a norm in them is not seen.",
        )
    if examined.seen is None:
        yield Finding(
            "model-not-run",
            "warning",
            f"The model was not run as a whole. {examined.problem}",
            "Its norms were run one by one on random data. Give inputs by --inputs, or a model "
            "that onnxruntime takes.",
        )
