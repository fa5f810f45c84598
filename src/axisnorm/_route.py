"""Which engine computes a normalization, and over which loops: a pure decision.

The call and ``explain`` share it, so what ``explain`` says is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from . import _build
from .scheme import Layout, Scheme, Sizes

__all__ = ["DTYPES", "Loops", "Route", "choose", "loops", "overlaps_itself", "route"]

DTYPES = ("float32", "float64", "float16", "bfloat16")
"""The types that are normalized, in the order of csrc/norm.h."""


@dataclass(frozen=True)
class Loops:
    """A nest of loops over one tensor: ``rows`` groups of ``n`` contiguous elements."""

    rows: int
    n: int
    stride: int
    """Elements between the starts of two rows; 0 for an expanded row."""


@dataclass(frozen=True)
class Route:
    """Who computes, and why."""

    engine: str
    """``"native"`` or ``"reference"``."""
    reason: str


NATIVE = Route("native", "each mean is taken over contiguous trailing elements")


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
    'axes that share a mean are not the trailing ones'
    """
    layout = scheme.layout(len(shape))
    with_affine = bool(scheme.affine) if affine is None else affine
    return route(layout.sizes(tuple(shape)), dtype, with_affine, masked, running)


def route(sizes: Sizes, dtype: str, affine: bool, masked: bool, running: bool) -> Route:
    """:func:`choose` for a layout's sizes."""
    if not _build.native:
        return Route("reference", "this installation has no native module")
    if dtype not in DTYPES:
        return Route("reference", f"no kernel for {dtype}")
    if masked:
        return Route("reference", "a mask is given")
    if running:
        return Route("reference", "running statistics normalize")
    return _route(sizes, affine)


@lru_cache(maxsize=4096)
def _route(sizes: Sizes, affine: bool) -> Route:
    layout = sizes.layout
    scheme = layout.scheme
    if 0 in sizes.shape:
        return Route("reference", "there is no element")
    if scheme.scale != "auto" or scheme.eps_placement != "variance":
        return Route("reference", "the formula is not rstd = 1 / sqrt(variance + eps)")
    if not _trailing(layout, sizes):
        return Route("reference", "axes that share a mean are not the trailing ones")
    if affine and _long(sizes, layout.affine) != _long(sizes, layout.reduced):
        return Route("reference", "weight and bias do not vary along just the axes of the mean")
    return NATIVE


def _long(sizes: Sizes, dimensions: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of more than one element; the others have no say in what is computed."""
    return tuple(i for i in dimensions if sizes.expanded[i] != 1)


def _trailing(layout: Layout, sizes: Sizes) -> bool:
    kept, reduced = _long(sizes, layout.kept), _long(sizes, layout.reduced)
    return not kept or not reduced or max(kept) < min(reduced)


def loops(sizes: Sizes, strides: Sequence[int]) -> Loops | None:
    """The loops over a tensor of these strides (in elements), or None where a copy must be made.

    >>> loops(Scheme.layer_norm().layout(3).sizes((2, 3, 4)), (12, 4, 1))
    Loops(rows=6, n=4, stride=4)
    >>> loops(Scheme.layer_norm().layout(3).sizes((2, 3, 4)), (24, 8, 1)).stride
    8
    >>> loops(Scheme.layer_norm().layout(3).sizes((2, 3, 4)), (12, 1, 3)) is None
    True
    """
    layout = sizes.layout
    expanded: list[int] = []
    dimension = 0
    for axis, stride in zip(layout.axes, strides, strict=True):
        inner = 1
        steps = []
        for size in reversed(sizes.expanded[dimension : dimension + len(axis)]):
            steps.append(stride * inner)
            inner *= size
        expanded += reversed(steps)
        dimension += len(axis)
    inside = _collapsed(sizes, _long(sizes, layout.reduced), expanded)
    outside = _collapsed(sizes, _long(sizes, layout.kept), expanded)
    if inside != 1 or outside is None:
        return None
    return Loops(sizes.num_groups, sizes.group_size, outside)


def _collapsed(sizes: Sizes, dimensions: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of these dimensions seen as one, or None if they are not evenly spaced."""
    if not dimensions:
        return 1
    for outer, inner in pairwise(dimensions):
        if strides[outer] != strides[inner] * sizes.expanded[inner]:
            return None
    return strides[dimensions[-1]]


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may share memory, as in an expanded one.

    >>> overlaps_itself((4, 8), (0, 1)), overlaps_itself((4, 8), (8, 1))
    (True, False)
    """
    reach = 0
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
