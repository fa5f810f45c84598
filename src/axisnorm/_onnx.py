"""What ONNX exporters see: a norm as torch's own operators, which have standard nodes.

Each of torch's norms is translated by torch itself, for the opset that is asked for:
LayerNormalization, RMSNormalization (from 23 on), GroupNormalization (from 21 on),
InstanceNormalization, BatchNormalization. A scheme that is one of these is written as torch's
operator here, everything else in elementary operators. Nothing here reads the sizes of a tensor
into the graph, so what was dynamic stays dynamic. ONNX itself is not imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.jit import TracerWarning, is_tracing  # type: ignore[attr-defined]

from . import reference
from .reference import Inputs
from .scheme import Layout, Part, Scheme

__all__ = ["is_exporting", "moments", "moved", "normalize", "quiet"]

is_exporting = torch.onnx.is_in_onnx_export


@contextmanager
def quiet() -> Iterator[None]:
    """Without the tracer's warnings about conditions on sizes, which only validate here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        yield


def normalize(inputs: Inputs, scheme: Scheme) -> Tensor:
    """The normalized tensor, in the type of ``inputs.x``."""
    x = inputs.x
    layout = scheme.layout(x.dim())
    kind = _compute_type(x)
    weight, bias = _parameters(inputs, scheme, kind)
    if weight is None and bias is None:
        return _to(_normalized(inputs, scheme, layout), x.dtype)
    if x.dtype == kind or scheme.rounding == "once":
        wide = inputs._replace(x=_to(x, kind), weight=weight, bias=bias)
        return _to(_normalized(wide, scheme, layout), x.dtype)
    # The normalized value is rounded first. A product of two half numbers is then the same in
    # their own type; anything more is computed in the compute type.
    xhat = _to(_normalized(inputs._replace(weight=None, bias=None), scheme, layout), x.dtype)
    only_scaled = bias is None and not scheme.weight_offset
    if only_scaled and inputs.weight is not None and inputs.weight.dtype == x.dtype:
        y = _affine(xhat, inputs.weight, None, layout)
    else:
        y = _affine(_to(xhat, kind), weight, bias, layout)
    return _to(_masked(y, inputs.mask), x.dtype)


def moments(x: Tensor, scheme: Scheme, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the variance and rstd of every group, each of ``Sizes.statistics_shape``."""
    layout = scheme.layout(x.dim())
    wide = _expanded(_to(x, _compute_type(x)), layout)
    found = _measure(wide, _valid(x, mask, layout), scheme, layout)
    mean, variance, rate = (_squeezed(t, layout) for t in found[1:])
    return mean, variance, rate


def moved(inputs: Inputs, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The running statistics after this batch."""
    x = inputs.x
    layout = scheme.layout(x.dim())
    valid = _valid(x, inputs.mask, layout)
    if valid is None:
        valid = torch.ones_like(_expanded(x, layout), dtype=torch.bool)
    count = _squeezed(_sum(valid.to(_compute_type(x)), layout.reduced), layout)
    mean, variance, rate = moments(x, scheme, inputs.mask)
    found = reference.Moments(mean, variance, rate, count)
    assert scheme.momentum is not None
    return reference.updated_running(
        layout.sizes(x.shape), found, inputs.running_mean, inputs.running_var, scheme.momentum
    )


# --------------------------------------------------------------------------------------------
# Standard nodes


class _Node(NamedTuple):
    """One of torch's norms that computes a scheme without its affine part."""

    run: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    affine: tuple[int, ...]
    """The dimensions among ``Layout.parts`` along which its own weight and bias vary."""
    widens: bool = False
    """Whether it computes in float32 by its definition and rounds once, at its end."""


def _normalized(inputs: Inputs, scheme: Scheme, layout: Layout) -> Tensor:
    """Statistics, then weight and bias as they are given, in the compute type or half types."""
    x, weight, bias = inputs[:3]
    node = _node(inputs, scheme, layout)
    kind = _compute_type(x)
    if node is None:
        xhat = _joined(_decomposed(inputs._replace(x=_to(x, kind)), scheme, layout), layout)
        return _masked(_affine(xhat, weight, bias, layout), inputs.mask)
    if not node.widens:
        x = _to(x, kind)
    if node.affine == layout.affine:
        return node.run(x, weight, bias)
    return _affine(node.run(x, None, None), weight, bias, layout)


def _node(inputs: Inputs, scheme: Scheme, layout: Layout) -> _Node | None:
    """The standard node of a scheme, None where there is none."""
    if inputs.mask is not None or scheme.scale != "auto" or scheme.eps_placement != "variance":
        return None
    eps = reference.resolve_eps(scheme, inputs.x.dtype)
    if inputs.running_mean is not None:
        return _batch_node(inputs, scheme, layout, eps)
    # The other nodes are defined with statistics in float32.
    if inputs.x.dtype == torch.float64 or scheme.correction or not layout.reduced:
        return None
    trailing = _trailing_node(inputs, scheme, layout, eps)
    if layout.affine in ((), layout.reduced):
        return trailing
    return _channel_node(scheme, layout, eps) or trailing


def _batch_node(inputs: Inputs, scheme: Scheme, layout: Layout, eps: float) -> _Node | None:
    """BatchNormalization: given statistics for each element of axis 1."""
    if not scheme.center or layout.ndim < 2 or layout.running != _whole(layout, 1):
        return None
    mean, var = inputs.running_mean, inputs.running_var

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weight, bias, center, spread = (
            None if t is None else _to(t, x.dtype) for t in (weight, bias, mean, var)
        )
        return torch.batch_norm(x, weight, bias, center, spread, False, 0.0, eps, False)

    return _Node(run, layout.running)


def _channel_node(scheme: Scheme, layout: Layout, eps: float) -> _Node | None:
    """InstanceNormalization and GroupNormalization: samples, channels, then reduced axes."""
    if not scheme.center or layout.ndim < 3 or any(p.reduced for p in layout.axes[0]):
        return None
    if not all(part.reduced for axis in layout.axes[2:] for part in axis):
        return None
    channels = layout.axes[1]
    if not any(part.reduced for part in channels):
        return _Node(
            lambda x, weight, bias: torch.instance_norm(
                x, weight, bias, None, None, True, 0.0, eps, False
            ),
            _whole(layout, 1),
        )
    groups = 1 if all(part.reduced for part in channels) else channels[0].size
    if groups is None or any(not part.reduced for part in channels[1:]):
        return None
    return _Node(
        lambda x, weight, bias: torch.group_norm(x, groups, weight, bias, eps, False),
        _whole(layout, 1),
    )


def _trailing_node(inputs: Inputs, scheme: Scheme, layout: Layout, eps: float) -> _Node | None:
    """LayerNormalization and RMSNormalization, which reduce the last axes.

    Other axes are moved to the end where that lets the node take weight and bias too.
    """
    order = (*layout.kept, *layout.reduced)
    back = tuple(order.index(i) for i in range(len(order)))
    moves = order != tuple(range(len(order)))
    own = layout.affine == layout.reduced
    if moves and not own:
        return None
    scripted = is_tracing()
    if scripted and not scheme.center:
        return None  # that exporter has no rms_norm
    known = all(layout.parts[i].size is not None for i in layout.reduced)
    if scripted and not known and (inputs.weight is None or not own):
        return None  # it would write a weight of ones of this very size

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        x = _expanded(x, layout)
        x = x.permute(order) if moves else x
        shape = x.shape[len(layout.kept) :]
        if scripted:  # only their number goes into the graph
            shape = torch.Size(map(int, shape))
        weight, bias = (None if t is None else _split(t, layout) for t in (weight, bias))
        if scheme.center:
            y = torch.layer_norm(x, shape, weight, bias, eps, False)
        else:
            y = torch.rms_norm(x, shape, weight, eps)
            y = y if bias is None else y + bias
        return _joined(y.permute(back) if moves else y, layout)

    return _Node(run, layout.reduced, widens=True)


# --------------------------------------------------------------------------------------------
# Elementary operators


class _Measured(NamedTuple):
    """The statistics of every group, with axes of size 1 for those that it reduces."""

    value: Tensor
    """What is scaled."""
    mean: Tensor
    """What is subtracted: zero where the scheme does not centre."""
    variance: Tensor
    rate: Tensor


def _decomposed(inputs: Inputs, scheme: Scheme, layout: Layout) -> Tensor:
    """The normalized value, with every part of an axis as a dimension."""
    x = _expanded(inputs.x, layout)
    if inputs.running_mean is None:
        found = _measure(x, _valid(inputs.x, inputs.mask, layout), scheme, layout)
        return found.value * found.rate
    mean, variance = (_running(t, x, layout) for t in inputs[4:] if t is not None)
    value = x - mean if scheme.center else x
    return value * _rate(variance, scheme)


def _measure(x: Tensor, valid: Tensor | None, scheme: Scheme, layout: Layout) -> _Measured:
    """The statistics of ``x``, which has every part of an axis as a dimension.

    Centred twice: the mean's own rounding is then taken out, so a constant group is exactly zero.
    """
    axes = layout.reduced
    x = _masked(x, valid)
    count = None
    if valid is not None or scheme.correction:
        seen = torch.ones_like(x) if valid is None else valid.to(x.dtype)
        count = _sum(seen, axes)

    def average(values: Tensor) -> Tensor:
        if valid is None or count is None:
            return values.mean(axes, keepdim=True) if axes else values
        return _sum(values, axes) / count.clamp(min=1.0)

    centred, mean = x, None
    if scheme.center or scheme.scale == "std":
        first = average(x)
        centred = _masked(x - first, valid)
        second = average(centred)
        centred = _masked(centred - second, valid)
        mean = first + second
    value = centred if scheme.center else x
    square = centred * centred
    if scheme.scale == "l2":
        variance = _sum(square, axes)
    elif count is None:
        variance = average(square)
    else:
        free = count - scheme.correction
        variance = _sum(square, axes) / free.masked_fill(free <= 0.0, 1.0)
    if mean is None or not scheme.center:
        mean = torch.zeros_like(variance)
    return _Measured(value, mean, variance, _rate(variance, scheme))


def _rate(variance: Tensor, scheme: Scheme) -> Tensor:
    """What the centred value is multiplied by."""
    eps = reference.resolve_eps(scheme, variance.dtype)
    inner_power, outer_power = reference.exponents(scheme)
    base = variance
    for _ in range({1: 0, 0.5: 1, 0.25: 2}[inner_power]):
        base = base.sqrt()
    inner = base.clamp(min=eps) if scheme.eps_placement == "max" else base + eps
    rate = inner.rsqrt() if outer_power == -0.5 else inner.reciprocal()
    return rate if eps > 0.0 else rate.masked_fill(inner == 0.0, 0.0)


# --------------------------------------------------------------------------------------------
# Axes. Sizes that are not in the notation are left to torch.


def _to(t: Tensor, kind: torch.dtype) -> Tensor:
    # A conversion to the same type would be a node of its own.
    return t if t.dtype == kind else t.to(kind)


def _compute_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _parameters(
    inputs: Inputs, scheme: Scheme, kind: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Weight, with its offset, and bias in the compute type."""
    weight, bias = (None if t is None else _to(t, kind) for t in inputs[1:3])
    if weight is not None and scheme.weight_offset:
        weight = weight + scheme.weight_offset
    return weight, bias


def _whole(layout: Layout, axis: int) -> tuple[int, ...]:
    """The dimensions among ``Layout.parts`` that make up one axis of the tensor."""
    start = sum(len(parts) for parts in layout.axes[:axis])
    return tuple(range(start, start + len(layout.axes[axis])))


def _sizes(parts: Sequence[Part]) -> list[int]:
    return [-1 if part.size is None else part.size for part in parts]


def _expanded(x: Tensor, layout: Layout) -> Tensor:
    """The tensor with every part of an axis as a dimension."""
    for axis in reversed(range(layout.ndim)):
        parts = layout.axes[axis]
        if len(parts) > 1:
            x = x.unflatten(axis, _sizes(parts))
    return x


def _joined(x: Tensor, layout: Layout) -> Tensor:
    """The tensor with its own axes again."""
    for axis, parts in enumerate(layout.axes):
        if len(parts) > 1:
            x = x.flatten(axis, axis + len(parts) - 1)
    return x


def _split(parameter: Tensor, layout: Layout) -> Tensor:
    """A weight or bias with every affine part as a dimension."""
    dimension = 0
    for axis in range(layout.ndim):
        own = [layout.parts[i] for i in _whole(layout, axis) if i in layout.affine]
        if len(own) > 1:
            parameter = parameter.unflatten(dimension, _sizes(own))
        dimension += len(own)
    return parameter


def _spread(values: Tensor, dimensions: Sequence[int], count: int) -> Tensor:
    """The values, which vary along ``dimensions``, as they broadcast against ``count`` of them."""
    for i in range(dimensions[0] + 1 if dimensions else count, count):
        if i not in dimensions:
            values = values.unsqueeze(i - dimensions[0])
    return values


def _running(statistic: Tensor, x: Tensor, layout: Layout) -> Tensor:
    return _spread(_to(statistic, x.dtype), layout.running, len(layout.parts))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, layout: Layout) -> Tensor:
    if weight is None and bias is None:
        return x
    axes = [_whole(layout, axis) for axis in range(layout.ndim)]
    varying = [i for i, axis in enumerate(axes) if any(part in layout.affine for part in axis)]
    split = any(part not in layout.affine for i in varying for part in axes[i])
    if split:
        x = _expanded(x, layout)
        weight, bias = (
            None if t is None else _spread(_split(t, layout), layout.affine, len(layout.parts))
            for t in (weight, bias)
        )
    else:
        weight, bias = (
            None if t is None else _spread(t, varying, layout.ndim) for t in (weight, bias)
        )
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return _joined(x, layout) if split else x


def _valid(x: Tensor, mask: Tensor | None, layout: Layout) -> Tensor | None:
    return None if mask is None else _expanded(mask.expand(x.shape), layout)


def _masked(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else x.masked_fill(valid.logical_not(), 0.0)


def _sum(x: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    # Without dimensions torch would sum over all of them.
    return x.sum(dimensions, keepdim=True) if dimensions else x


def _squeezed(statistic: Tensor, layout: Layout) -> Tensor:
    return statistic.squeeze(layout.reduced) if layout.reduced else statistic
