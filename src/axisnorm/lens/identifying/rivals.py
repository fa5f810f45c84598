"""Given schemes held against an input and an output: each is computed and compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...scheme import Scheme, Sizes
from ..explain import axis_dimensions, partition
from ..naming import affine_axes, is_trailing, kind_of_mean, meanings, on_axes
from .identification import Candidate, Identification

__all__ = ["fitted_eps", "rivals", "tell_apart", "tolerance"]

SAMPLED_ELEMENTS = 1 << 16
"""Whole groups are compared until they hold this many elements; always at least one."""

Array = Any
"""A numpy.ndarray or a torch.Tensor."""


def tolerance(dtype: str, group_size: int, largest: float, offset: float = 0.0) -> float:
    """The largest difference that computing in ``dtype`` explains.

    The sums of n elements are in error by about log2(n) roundings in a tree, the mean by its own
    size, and both reach the output divided by the deviation.

    Args:
        dtype: the narrowest type of input and output.
        group_size: how many elements share a mean.
        largest: the largest magnitude of the output or one of its terms.
        offset: the largest |mean| / deviation, times the largest weight.

    >>> tolerance("float32", 768, 4.0) < 1e-5
    True
    """
    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype)
    if unit is None:
        unit = float(np.finfo(dtype).eps)
    compute = max(2.0**-23, unit) if unit > 2.0**-40 else unit
    # Half types are computed in float32 and rounded once or twice at the end.
    inner = 2.0**-23 if unit > 2.0**-20 else compute
    steps = 4.0 + math.log2(max(group_size, 1))
    # Below the smallest normal number (float16: the smallest at all) no digits are left.
    least = {"float16": 2.0**-24, "float64": 2.0**-1022}.get(dtype, 2.0**-126)
    return largest * (unit + inner * steps) + offset * inner * 4.0 + least


def tell_apart(
    x: Array,
    y: Array,
    candidates: Iterable[tuple[str, Scheme]],
    *,
    weight: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    fitted: Collection[Scheme] = (),
) -> Identification:
    """Compute each scheme on ``x`` in float64 and compare with ``y``, on whole groups.

    Args:
        x: the input.
        y: the output, of the input's shape.
        candidates: schemes with names in words, the likeliest first: among equal fits the first
            of the fewest free parameters is the best.
        weight: the parameters that were used, of each scheme's affine shape.
        bias: as weight.
        mask: the elements that count, broadcastable against x.
        running_mean: given where a scheme normalizes with running statistics.
        running_var: as running_mean.
        fitted: those of the schemes whose eps was fitted to this data.

    >>> x = np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> y = np.array([[1.5, -0.5, -0.5, -0.5]])
    >>> found = tell_apart(x, y, [("LayerNorm", Scheme.layer_norm()),
    ...                           ("Bessel", Scheme.layer_norm(correction=1, eps=0))])
    >>> found.best.name, [c.name for c in found.ruled_out]
    ('Bessel', ['LayerNorm'])
    """
    found = [
        _try(x, y, name, scheme, weight, bias, mask, running_mean, running_var)
        for name, scheme in candidates
    ]
    found = [replace(c, free_parameters=1) if c.scheme in fitted else c for c in found]
    if _narrowest(x, y).endswith("float16"):
        # Two rounding points differ in the last bit of a part of the elements only: the right
        # one in few, the wrong one in many. A measured share for bfloat16 is 23 %.
        least = min((c.mean_residual for c in found if c.fits), default=0.0)
        found = [
            replace(c, fits=c.fits and c.mean_residual <= 2 * least + 0.003 * c.tolerance)
            for c in found
        ]
    order = {id(candidate): place for place, candidate in enumerate(found)}

    def rank(candidate: Candidate) -> tuple[Any, ...]:
        if not candidate.fits:
            return (1, candidate.residual, 0)
        return (0, candidate.free_parameters, order[id(candidate)])

    ranked = tuple(sorted(found, key=rank))
    best = ranked[0] if ranked and ranked[0].fits else None
    return Identification(ranked, best)


def _try(
    x: Array,
    y: Array,
    name: str,
    scheme: Scheme,
    weight: Array | None,
    bias: Array | None,
    mask: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
) -> Candidate:
    sizes = scheme.layout(len(x.shape)).sizes(tuple(x.shape))
    axes = sizes.layout.reduced_axes
    running = scheme.statistics == "running"
    given = {
        "weight": weight if scheme.affine else None,
        "bias": bias if scheme.affine else None,
        "running_mean": running_mean if running else None,
        "running_var": running_var if running else None,
    }
    x, y, mask, given = _sampled(sizes, x, y, mask, given)
    # In half types the rounding point shows, so the prediction is rounded as the scheme says.
    half = _narrowest(x, y).endswith("float16")
    wide = {name: value if half else _double(value) for name, value in given.items()}
    # An eps that depends on the type is that of the data, not of this computation.
    exact = scheme.replace(eps=reference.resolve_eps(scheme, x.dtype))
    predicted, moments = reference.forward(x if half else _double(x), exact, mask=mask, **wide)
    predicted = _double(predicted)
    difference = abs(_double(y) - predicted)
    residual = _largest(difference)
    if not math.isfinite(residual):
        residual = math.inf
    factor = 1.0 + abs(scheme.weight_offset)
    if given["weight"] is not None:
        factor = abs(scheme.weight_offset) + _largest(abs(_double(given["weight"])))
    largest = _largest(abs(predicted))
    if given["bias"] is not None:
        largest += _largest(abs(_double(given["bias"])))
    offset = factor * _largest(abs(moments.mean * moments.rstd))
    count = math.prod(difference.shape)
    allowed = tolerance(_narrowest(x, y), sizes.group_size, largest, offset)
    return Candidate(
        scheme,
        name,
        axes,
        residual,
        float(difference.sum()) / count if count else 0.0,
        allowed,
        free_parameters=0,
        fits=residual <= allowed,
    )


def fitted_eps(
    x: Array, y: Array, scheme: Scheme, weight: Array | None, bias: Array | None
) -> tuple[float, float] | None:
    """The eps that the data shows if this is its scheme, and how uncertain it is.

    Each group is what eps = 0 gives times one factor, and the factor gives the eps. Both numbers
    are medians over the groups. None where eps has no effect on any group.
    """
    bare = scheme.replace(eps=0.0, rounding="once")
    sizes = bare.layout(len(x.shape)).sizes(tuple(x.shape))
    dtype = _narrowest(x, y)
    given = {"weight": weight, "bias": bias, "running_mean": None, "running_var": None}
    x, y, _, given = _sampled(sizes, x, y, None, given)
    weight, bias = _double(given["weight"]), _double(given["bias"])
    x, y = _double(x), _double(y)
    predicted, moments = reference.forward(x, bare, weight)
    if bias is not None:
        y = y - (reference.forward(x, bare, weight, bias)[0] - predicted)
    cut = bare.layout(len(x.shape)).sizes(tuple(x.shape))
    told = tuple(i for i in range(len(cut.expanded)) if i not in cut.layout.kept)

    def summed(values: Array) -> NDArray[np.float64]:
        return np.asarray(values.reshape(cut.expanded).sum(told)).reshape(-1)

    with np.errstate(all="ignore"):
        size = summed(predicted * predicted)
        factor = summed(y * predicted) / size
        variance = np.asarray(moments.var).reshape(-1)
        if scheme.eps_placement == "variance":
            base, eps = variance, variance * (factor**-2 - 1.0)
        else:
            base = np.sqrt(variance)
            eps = base * (1.0 / factor - 1.0)
        offset = abs(np.asarray(moments.mean).reshape(-1)) / np.sqrt(variance)
        reach = summed(abs(y) + abs(predicted)) / np.sqrt(size * max(cut.group_size, 1))
    usable = np.isfinite(eps) & np.isfinite(offset) & np.isfinite(reach) & (factor > 0)
    if not usable.any():
        return None
    eps, base, offset, reach = eps[usable], base[usable], offset[usable], reach[usable]
    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype) or float(np.finfo(dtype).eps)
    compute = unit if unit < 2.0**-40 else 2.0**-23
    # The type of the computation bounds V, that of the output each of n elements of the factor.
    rounding = compute * (4.0 + offset) + unit * reach / math.sqrt(cut.group_size)
    median = float(np.median(eps))
    spread = float(np.median(abs(eps - median))) / math.sqrt(len(eps))
    return median, float(np.median((base + abs(eps)) * rounding)) + 3.0 * spread


def _double(values: Array | None) -> Array:
    if values is None:
        return None
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)
    return values.detach().double()


def _largest(values: Array) -> float:
    return float(values.max()) if math.prod(values.shape) else 0.0


def _narrowest(x: Array, y: Array) -> str:
    names = [str(array.dtype).removeprefix("torch.") for array in (x, y)]
    order = ("bfloat16", "float16", "float32", "float64")
    return min(names, key=lambda name: order.index(name) if name in order else 2)


def _sampled(
    sizes: Sizes, x: Array, y: Array, mask: Array | None, given: dict[str, Array | None]
) -> tuple[Array, Array, Array | None, dict[str, Array | None]]:
    """The data cut along axes that share nothing, so that whole groups are left of it.

    The indices that stay are evenly spaced. Parameters that vary along a cut axis are cut alike.
    """
    layout, shape = sizes.layout, list(sizes.shape)
    for axis, own in enumerate(axis_dimensions(sizes)):
        first, parts = own[0], layout.axes[axis]
        total = math.prod(shape)
        if len(parts) > 1 or parts[0].reduced or parts[0].size is not None:
            continue
        if total <= SAMPLED_ELEMENTS or shape[axis] < 2:
            continue
        keep = max(1, shape[axis] * SAMPLED_ELEMENTS // total)
        index = np.linspace(0, shape[axis] - 1, keep).round().astype(np.int64)
        shape[axis] = keep
        x, y = _take(x, axis, index), _take(y, axis, index)
        if mask is not None:
            trailing = axis - len(sizes.shape) + len(mask.shape)
            if trailing >= 0 and mask.shape[trailing] != 1:
                mask = _take(mask, trailing, index)
        for names, dimensions in (
            (("weight", "bias"), layout.affine),
            (("running_mean", "running_var"), layout.running),
        ):
            if first in dimensions:
                place = _parameter_axis(sizes, axis, dimensions)
                for name in names:
                    if given[name] is not None:
                        given[name] = _take(given[name], place, index)
    return x, y, mask, given


def _parameter_axis(sizes: Sizes, axis: int, dimensions: Sequence[int]) -> int:
    """Which axis of the parameters belongs to this axis of the tensor."""
    return sum(any(i in dimensions for i in own) for own in axis_dimensions(sizes)[:axis])


def _take(values: Array, axis: int, index: Any) -> Array:
    if isinstance(values, np.ndarray):
        return values.take(index, axis=axis)
    import torch

    return values.index_select(axis, torch.from_numpy(index).to(values.device))


# --------------------------------------------------------------------------------------------
# Rivals: what else it might be


def rivals(scheme: Scheme, shape: Sequence[int], *, half: bool = False) -> list[tuple[str, Scheme]]:
    """What people take a norm for, with the parameters of ``scheme``: other means, other formulas.

    Rivals that share the same elements at this shape are left out: they are the same norm.

    >>> [name for name, _ in rivals(Scheme.layer_norm(), (2, 3, 4))][:2]
    ['one mean a sample', 'one mean a position (BatchNorm)']
    """
    ndim = len(shape)
    sizes = scheme.layout(ndim).sizes(tuple(shape))
    affine = affine_axes(sizes)
    seen = {partition(sizes, sizes.layout.kept)}
    found: list[tuple[str, Scheme]] = []
    for reduced, (word, norm) in meanings(ndim, is_trailing(sizes)).items():
        rival = on_axes(ndim, reduced, affine, scheme)
        other = rival.layout(ndim).sizes(tuple(shape))
        key = partition(other, other.layout.kept)
        if key not in seen:
            seen.add(key)
            known = f" ({norm})" if norm else ""
            found.append((f"one {kind_of_mean(scheme)} {word}{known}", rival))
    here = scheme.replace(statistics="batch")
    if scheme.statistics == "running":
        found.insert(0, ("statistics of this batch", here))
    if scheme.scale == "auto":
        if scheme.center:
            found.append(("no mean subtracted (RMSNorm)", here.replace(center=False)))
            if sizes.group_size > 1:
                bessel = here.replace(correction=1)
                found.append(("sample deviation (divisor n - 1)", bessel))
                found.append(("sample deviation, eps outside the root",
                              bessel.replace(eps_placement="std")))  # fmt: skip
        else:
            found.append(("mean subtracted (LayerNorm)", here.replace(center=True)))
    if scheme.eps_placement == "variance":
        found.append(("eps outside the root", here.replace(eps_placement="std")))
    if scheme.affine:
        offset = 0.0 if scheme.weight_offset else 1.0
        stored = "as it is" if not offset else "around zero (1 + weight)"
        found.append((f"weight stored {stored}", here.replace(weight_offset=offset)))
        if half:
            other_way = "before_affine" if scheme.rounding == "once" else "once"
            found.append((f"rounding {other_way}", here.replace(rounding=other_way)))
    return found
