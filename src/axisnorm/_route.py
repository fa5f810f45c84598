"""Which engine computes a normalization, and over which loops: a pure decision.

The call and ``explain`` share it, so what ``explain`` says is what runs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import _build
from .reference import ACTIVATIONS
from .scheme import Scheme, Sizes, as_scheme

__all__ = [
    "DTYPES",
    "Route",
    "activation_code",
    "axes",
    "channels",
    "choose",
    "overlaps_itself",
    "prepare",
    "prepared",
    "route",
    "row_stride",
]

DTYPES = ("float32", "float64", "float16", "bfloat16")
"""The types that are normalized, in the order of csrc/norm.h."""

GROUP, INSTANCE, BATCH, LAYER_2D = range(4)
"""The norms of channels-first tensors, as csrc/torch_door.cpp counts them."""


@dataclass(frozen=True)
class Route:
    """Who computes, and why."""

    engine: str
    """``"native"`` or ``"reference"``."""
    reason: str


_ROWS = {
    "rows": "each group is a row of contiguous elements",
    "lines": "each group is a set of contiguous lines",
    "lanes": "neighbours in memory belong to different groups",
}
MOST_AXES = 16
"""As many parts of axes as csrc/norm.h has loops."""


def choose(
    scheme: Scheme,
    shape: Sequence[int],
    dtype: str = "float32",
    *,
    affine: bool | None = None,
    masked: bool = False,
    running: bool = False,
) -> Route:
    """The engine for one scheme and shape, with the reason.

    Args:
        affine: whether a weight or a bias is given; by default whether the scheme names axes.
        masked: whether a mask is given.
        running: whether running statistics normalize.

    >>> choose(Scheme.layer_norm(), (8, 768)).engine
    'native'
    >>> choose(Scheme.batch_norm(), (8, 64, 7, 7)).reason
    'each group is a set of contiguous lines'
    """
    sizes = scheme.sizes(tuple(shape))
    with_affine = bool(scheme.affine) if affine is None else affine
    found = route(sizes, dtype, with_affine)
    if found.engine == "native":
        strides = [math.prod(sizes.shape[i + 1 :]) for i in range(len(sizes.shape))]
        loops = _build.native.loops(axes(sizes, with_affine), strides, masked, running)
        return Route("native", _ROWS[loops])
    return found


def route(sizes: Sizes, dtype: str, affine: bool) -> Route:
    """The engine for a layout's sizes."""
    if not _build.native:
        return Route("reference", "this installation has no native module")
    if dtype not in DTYPES:
        return Route("reference", f"no kernel for {dtype}")
    return _route(sizes, affine)


@lru_cache(maxsize=4096)
def _route(sizes: Sizes, affine: bool) -> Route:
    scheme = sizes.layout.scheme
    if 0 in sizes.shape:
        return Route("reference", "there is no element")
    if scheme.scale != "auto" or scheme.eps_placement != "variance":
        return Route("reference", "the formula is not rstd = 1 / sqrt(variance + eps)")
    if len(sizes.expanded) > MOST_AXES:
        return Route("reference", f"more than {MOST_AXES} axes and parts of axes")
    contiguous = [math.prod(sizes.shape[i + 1 :]) for i in range(len(sizes.shape))]
    refused = _build.native.loops(axes(sizes, affine), contiguous, False, False)
    if refused not in _ROWS:
        return Route("reference", refused)
    return Route("native", "")


@lru_cache(maxsize=4096)
def axes(sizes: Sizes, affine: bool) -> bytes:
    """The parts of the axes as the native module reads them: size, role, axis, elements inside."""
    layout = sizes.layout
    numbers: list[int] = []
    dimension = 0
    for axis, parts in enumerate(layout.axes):
        inside = [*sizes.expanded[dimension : dimension + len(parts)]]
        for part, size in enumerate(inside):
            role = (
                (dimension in layout.reduced)
                + 2 * (affine and dimension in layout.affine)
                + 4 * (dimension in layout.running)
            )
            numbers += [size, role, axis, math.prod(inside[part + 1 :])]
            dimension += 1
    return struct.pack(f"{len(numbers)}q", *numbers)


@lru_cache(maxsize=4096)
def channels(sizes: Sizes) -> tuple[int, int, int] | None:
    """How groups, in order, belong to the channels of running statistics.

    The number of channels, of groups for each of them, and of those between two channels; None
    where the channels are not evenly spaced.
    """
    layout = sizes.layout
    kept = [i for i in layout.kept if sizes.expanded[i] != 1]
    inside = [i for i in kept if i in layout.running]
    if inside and kept[kept.index(inside[0]) : kept.index(inside[-1]) + 1] != inside:
        return None
    count = math.prod(sizes.expanded[i] for i in inside)
    after = math.prod(sizes.expanded[i] for i in kept if inside and i > inside[-1])
    return count, sizes.num_groups // count, after


Prepared = tuple[Any, ...]
prepared: dict[tuple[str, tuple[int, ...], bool], Prepared | None] = {}
MOST_PREPARED = 4096


def prepare(scheme: str, shape: tuple[int, ...], affine: bool) -> Prepared | None:
    """What csrc/torch_ops.cpp needs to know of a scheme and a shape; None: no kernel."""
    meaning = as_scheme(scheme)
    sizes = meaning.sizes(shape)
    found: Prepared | None = None
    if route(sizes, "float32", affine).engine == "native":
        found = (
            axes(sizes, affine),
            sizes.num_groups,
            meaning.center,
            meaning.rounding == "before_affine",
            meaning.eps,
            meaning.correction,
            meaning.weight_offset,
            meaning.statistics == "running",
            sizes.affine_shape,
            sizes.running_shape,
            channels(sizes),
            meaning.momentum,
            meaning.running_correction,
        )
    if len(prepared) >= MOST_PREPARED:
        prepared.clear()
    prepared[scheme, shape, affine] = found
    return found


if _build.native:
    _build.native.connect_schemes({"prepared": prepared, "prepare": prepare})


def activation_code(name: str | None) -> int:
    """As csrc/norm.h counts what follows a norm."""
    return 0 if name is None else 1 + ACTIVATIONS.index(name)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], width: int = 1) -> bool:
    """Whether two elements of a tensor may share memory, as in an expanded one.

    Args:
        width: that of an element, in the unit of the strides.

    >>> overlaps_itself((4, 8), (0, 1)), overlaps_itself((4, 8), (8, 1))
    (True, False)
    """
    if 0 in shape:
        return False
    axes = [(abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1]
    for i, (stride, _) in enumerate(axes):
        # Not by sorting, which compilers cannot do with symbols.
        reach = width - 1
        for k, (other, size) in enumerate(axes):
            if k != i and other <= stride:
                reach += other * (size - 1)
        if stride <= reach:
            return True
    return False


def row_stride(shape: Sequence[int], strides: Sequence[int], axes: int) -> int | None:
    """The elements between the starts of two rows, of the trailing ``axes``.

    None where the elements of a row are not contiguous or the rows not evenly spaced.

    >>> row_stride((2, 3, 4), (24, 8, 1), 1), row_stride((2, 3, 4), (0, 4, 1), 2)
    (8, 0)
    >>> row_stride((2, 3, 4), (0, 4, 1), 1) is None
    True
    """
    inside = len(shape) - axes
    reach, between, expected = 1, None, None
    for axis in range(len(shape) - 1, -1, -1):
        size, stride = shape[axis], strides[axis]
        if size == 1:
            continue
        if axis >= inside:
            if stride != reach:
                return None
            reach *= size
        else:
            if between is None:
                between = stride
            elif stride != expected:
                return None
            expected = stride * size
    return reach if between is None else between
