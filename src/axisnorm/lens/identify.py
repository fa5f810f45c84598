"""Which of several schemes an input and an output show: each is computed and compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..scheme import Scheme, Sizes, trailing_names
from .explain import axis_dimensions, partition, statistics_dimensions

__all__ = [
    "Candidate",
    "Identification",
    "affine_axes",
    "fitted_eps",
    "in_words",
    "on_axes",
    "rivals",
    "tell_apart",
    "tolerance",
]

SAMPLED_ELEMENTS = 1 << 16
"""Whole groups are compared until they hold this many elements; always at least one."""

Array = Any
"""A numpy.ndarray or a torch.Tensor."""


@dataclass(frozen=True)
class Candidate:
    """One scheme held against an input and an output."""

    scheme: Scheme
    name: str
    """In words, as in ``"one mean a sample"``."""
    axes: tuple[int, ...]
    """The tensor's axes that share statistics, in whole or in part."""
    residual: float
    """The largest difference between the output and what the scheme computes."""
    mean_residual: float
    tolerance: float
    """The largest difference that rounding in the data's type explains."""
    free_parameters: int
    """How many numbers were fitted rather than given: the fewer the better."""
    fits: bool
    """Within the tolerance; in half types also no further off on average than the best."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scheme": str(self.scheme),
            "name": self.name,
            "axes": list(self.axes),
            "fits": self.fits,
            "residual": _json_number(self.residual),
            "tolerance": _json_number(self.tolerance),
            "free_parameters": self.free_parameters,
        }


@dataclass(frozen=True)
class Identification:
    """What an input and an output show: candidates from the best to the worst."""

    candidates: tuple[Candidate, ...]
    best: Candidate | None
    """None where nothing fits."""

    @property
    def indistinguishable(self) -> tuple[Scheme, ...]:
        """The schemes that this data cannot tell from the best."""
        return tuple(c.scheme for c in self.candidates if c.fits and c is not self.best)

    @property
    def tells_nothing(self) -> bool:
        """Whether the best fits no better than the same norm over any other axes.

        A constant input is of this kind: its mean is the same over whatever it is taken.
        """
        best = self.best
        if best is None:
            return False
        center = best.scheme.center
        others = [c for c in self.candidates if c.axes != best.axes and c.scheme.center == center]
        others = others or [c for c in self.candidates if c.scheme.center != center]
        return bool(others) and all(c.fits for c in others)

    @property
    def center_unclear(self) -> bool:
        """Whether the best fits as well with the mean subtracted as without."""
        best = self.best
        return best is not None and any(
            other.replace(eps=best.scheme.eps) == best.scheme.replace(center=not best.scheme.center)
            for other in self.indistinguishable
        )

    @property
    def ruled_out(self) -> tuple[Candidate, ...]:
        """The candidates that do not fit."""
        return tuple(c for c in self.candidates if not c.fits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "best": self.best.to_dict() if self.best else None,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "indistinguishable": [str(scheme) for scheme in self.indistinguishable],
        }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    return largest * (unit + inner * steps) + offset * inner * 4.0


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
    for reduced, (word, norm) in meanings(ndim, _is_trailing(sizes)).items():
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


def kind_of_mean(scheme: Scheme) -> str:
    """What there is one of for each group."""
    if scheme.scale == "l2":
        return "length"
    return "mean" if scheme.center else "root mean square"


def in_words(scheme: Scheme, shape: Sequence[int]) -> str:
    """What shares a mean, in the words of the field.

    >>> in_words(Scheme.layer_norm(), (8, 24, 384)), in_words(Scheme.batch_norm(), (8, 3, 7, 7))
    ('one mean a token', 'one mean a channel')
    >>> in_words(Scheme.group_norm(4), (8, 32, 7, 7))
    'one mean a sample and group of channels'
    """
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    running = "running " if scheme.statistics == "running" else ""
    what = f"one {running}{kind_of_mean(scheme)}"
    layout = sizes.layout
    split = [axis for axis in layout.axes if len({part.reduced for part in axis}) > 1]
    if split:
        return f"{what} a sample and group of channels"
    told = statistics_dimensions(sizes)
    reduced = tuple(
        axis for axis, own in enumerate(axis_dimensions(sizes)) if not any(i in told for i in own)
    )
    kept = [i for i in range(len(shape)) if i not in reduced]
    if [layout.axes[i][-1].name for i in kept] == ["c"]:
        return f"{what} a channel"
    known = meanings(len(shape), _is_trailing(sizes)).get(reduced)
    if known:
        return f"{what} {known[0]}"
    if not kept:
        return f"{what} in all"
    said = ", ".join(map(str, kept))
    return f"{what} for each index of {'axis' if len(kept) == 1 else 'axes'} {said}"


def _is_trailing(sizes: Sizes) -> bool:
    """Whether features are the last axis (tokens), not axis 1 (images)."""
    layout = sizes.layout
    last = (layout.ndim - 1,)
    if affine_axes(sizes):
        return affine_axes(sizes) == last
    channels_first = any(axis[-1].name == "c" for axis in layout.axes[:2])
    return layout.reduced_axes == last and not channels_first


def meanings(ndim: int, trailing: bool) -> dict[tuple[int, ...], tuple[str, str]]:
    """For sets of axes that share a mean: a mean of what, and which norm is known for it.

    ``trailing``: the features are the last axis, as in tokens; otherwise axis 1, as in images.
    """
    last = ndim - 1
    found: dict[tuple[int, ...], tuple[str, str]] = {}
    rest = tuple(range(1, ndim))
    if rest:
        found[rest] = ("a sample", "")
    if ndim == 3 and trailing:
        found[0, 2] = ("a position", "BatchNorm")
        found[0, 1] = ("a feature", "BatchNorm over tokens")
        found[2,] = ("a token", "LayerNorm")
        found[1,] = ("a sample and feature", "InstanceNorm over positions")
    elif ndim >= 3 and not trailing:
        found[(0, *range(2, ndim))] = ("a channel", "BatchNorm")
        found[tuple(range(2, ndim))] = ("a sample and channel", "InstanceNorm")
        found[1,] = ("a pixel", "LayerNorm2d")
        found.setdefault((last,), ("a row of the last axis", "LayerNorm"))
    elif ndim >= 3:
        found[last,] = ("a row of the last axis", "LayerNorm")
        found[tuple(range(last))] = ("a feature", "BatchNorm")
        found[tuple(range(1, last))] = ("a sample and feature", "InstanceNorm, channels last")
        found[(0, *range(2, ndim))] = ("an index of axis 1", "BatchNorm")
    elif ndim == 2:
        found = {(1,): ("a row", "LayerNorm"), (0,): ("a feature", "BatchNorm")}
    return found


def affine_axes(sizes: Sizes) -> tuple[int, ...]:
    """The tensor's axes along which weight and bias vary, in whole or in part."""
    affine = sizes.layout.affine
    return tuple(
        axis for axis, own in enumerate(axis_dimensions(sizes)) if any(i in affine for i in own)
    )


def on_axes(ndim: int, reduced: Sequence[int], affine: Sequence[int], like: Scheme) -> Scheme:
    """The scheme with ``like``'s constants whose mean is shared along these whole axes."""
    reduced, affine = tuple(reduced), tuple(affine)
    count = len(reduced)
    trailing = tuple(range(ndim - count, ndim))
    if reduced == trailing and affine in ((), trailing):
        names = trailing_names(count)
        axes = f"... [{' '.join(names)}]"
        names = tuple("" for _ in range(ndim - count)) + names
    elif ndim >= 3 and affine in ((), (1,)) and reduced in _channels_first(ndim):
        axes = _channels_first(ndim)[reduced]
        names = ("n", "c") + ("",) * (ndim - 2)
    else:
        usual = {1: ("d",), 2: ("n", "d"), 3: ("b", "s", "d"), 4: ("n", "c", "h", "w")}
        names = usual.get(ndim, tuple(f"a{i}" for i in range(ndim)))
        axes = " ".join(f"[{name}]" if i in reduced else name for i, name in enumerate(names))
    said = " ".join(names[i] for i in affine)
    return like.replace(axes=axes, affine=said, statistics="batch")


def _channels_first(ndim: int) -> dict[tuple[int, ...], str]:
    space = tuple(range(2, ndim))
    return {(1,): "n [c] ...", space: "n c [...]", (0, *space): "[n] c [...]",
            (1, *space): "n [c ...]"}  # fmt: skip
