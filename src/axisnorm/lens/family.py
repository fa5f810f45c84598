"""The family of the named norms at one shape: which shares in which, and which is a special case.

Two norms whose elements share their statistics alike stand in one node. A norm is finer than
another if each of its groups lies inside one of the other's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..scheme import ArgumentError, Scheme, Sizes
from .explain import Partition, axis_names, named_norms, partition, statistics_dimensions

__all__ = ["Edge", "Family", "Member", "Node", "SpecialCase", "family_of", "reasons", "refines"]

USUAL_GROUPS = 32
"""The number of groups of the GroupNorm paper."""

LONGEST_LISTED = 1 << 20
"""Axes up to this length are compared element by element where their parts do not nest."""


@dataclass(frozen=True)
class Member:
    """A named norm in a node."""

    name: str
    scheme: Scheme
    affine_shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "scheme": str(self.scheme),
            "affine_shape": list(self.affine_shape),
        }


@dataclass(frozen=True)
class Node:
    """The norms whose elements share their statistics in one way at this shape."""

    num_groups: int
    group_size: int
    members: tuple[Member, ...]
    """The named norms; none where this way has no name."""
    holds_a: bool = False
    holds_b: bool = False

    @property
    def compared(self) -> str:
        """Which of the compared two are here: ``"a"``, ``"b"``, ``"a, b"`` or nothing."""
        return ", ".join(name for name, here in (("a", self.holds_a), ("b", self.holds_b)) if here)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "num_groups": self.num_groups,
            "group_size": self.group_size,
            "members": [member.to_dict() for member in self.members],
            "holds_a": self.holds_a,
            "holds_b": self.holds_b,
        }


@dataclass(frozen=True)
class Edge:
    """Each group of one node holds several whole groups of another, with no node between."""

    finer: int
    """The place of the node of smaller groups in :attr:`Family.nodes`."""
    coarser: int
    holds: int
    """How many of the finer groups each coarser one holds."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"finer": self.finer, "coarser": self.coarser, "holds": self.holds}


@dataclass(frozen=True)
class SpecialCase:
    """One named norm computes what another does, under a condition."""

    special: str
    general: str
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"special": self.special, "general": self.general, "sentence": self.sentence}


@dataclass(frozen=True)
class Family:
    """A graph of the named norms, from the smallest groups to the largest."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    special_cases: tuple[SpecialCase, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "nodes": [node.to_dict() for node in self.nodes],
            "edges": [edge.to_dict() for edge in self.edges],
            "special_cases": [case.to_dict() for case in self.special_cases],
        }


def family_of(a: Scheme, b: Scheme, shape: tuple[int, ...]) -> Family:
    """The family map of two schemes among the named norms.

    >>> family = family_of(Scheme.layer_norm(), Scheme.layer_norm(ndim=2), (2, 3, 4))
    >>> [(node.num_groups, node.compared) for node in family.nodes]
    [(8, ''), (6, 'a'), (3, ''), (2, 'b')]
    >>> [case.sentence for case in family.special_cases][0]
    'RMSNorm(4) is LayerNorm(4) where every mean is 0.'
    """
    own = [_shared(scheme, shape) for scheme in (a, b)]
    grouped: dict[Partition, list[tuple[str, Scheme]]] = {}
    for name, named in named_norms(shape):
        key = _shared(named, shape)
        known = name.endswith("channels last") and grouped.get(key)
        if _is_usual(name, shape) or (key in own and _is_alike(named, (a, b)) and not known):
            grouped.setdefault(key, []).append((name, named))
    for key in own:
        grouped.setdefault(key, [])
    order = sorted(grouped, key=lambda key: (_group_size(key), str(key)))
    nodes = tuple(
        Node(
            _count(key),
            _group_size(key),
            tuple(Member(name, s, _sizes(s, shape).affine_shape) for name, s in grouped[key]),
            own[0] == key,
            own[1] == key,
        )
        for key in order
    )
    cases = [case for key in order for case in _special_cases(grouped[key], shape)]
    return Family(nodes, tuple(_edges(order)), tuple(cases))


def _is_usual(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a named norm is always in the map: those that an input of this rank is used with."""
    if name.endswith(("channels last", "in eval")) or name.startswith("functional"):
        return False
    if name.startswith("GroupNorm"):
        groups = int(name[len("GroupNorm(") : -1])
        return groups in (1, shape[1]) or groups == _middle_groups(shape[1])
    if name.startswith(("LayerNorm(", "RMSNorm(")):
        count = name.count(",") + 1
        return count < max(len(shape), 2) and (name.startswith("LayerNorm") or count == 1)
    return True


def _middle_groups(channels: int) -> int:
    """A number of groups between one and all channels, 32 where that is one."""
    if channels > USUAL_GROUPS and channels % USUAL_GROUPS == 0:
        return USUAL_GROUPS
    return next((g for g in range(2, min(channels, 64)) if channels % g == 0), 1)


def _is_alike(named: Scheme, compared: tuple[Scheme, Scheme]) -> bool:
    kind = (named.center, named.scale == "l2", named.statistics)
    return any(kind == (s.center, s.scale == "l2", s.statistics) for s in compared)


def _sizes(scheme: Scheme, shape: tuple[int, ...]) -> Sizes:
    return scheme.sizes(shape)


def _shared(scheme: Scheme, shape: tuple[int, ...]) -> Partition:
    sizes = _sizes(scheme, shape)
    return partition(sizes, statistics_dimensions(sizes))


def _count(key: Partition) -> int:
    return math.prod(size for axis in key for size, told in axis if told)


def _group_size(key: Partition) -> int:
    return math.prod(size for axis in key for size, told in axis if not told)


# --------------------------------------------------------------------------------------------
# Finer and coarser


def refines(finer: Partition, coarser: Partition) -> bool:
    """Whether each group of the one lies inside one group of the other.

    >>> rows, all_in_one = (((2, True),), ((3, False),)), (((2, False),), ((3, False),))
    >>> refines(rows, all_in_one), refines(all_in_one, rows)
    (True, False)
    """
    return all(_axis_refines(f, c) for f, c in zip(finer, coarser, strict=True))


def _axis_refines(
    finer: tuple[tuple[int, bool], ...], coarser: tuple[tuple[int, bool], ...]
) -> bool:
    if not any(told for _, told in coarser) or all(told for _, told in finer):
        return True
    fine, coarse = _intervals(finer), _intervals(coarser)
    cuts = sorted({cut for low, high, _ in (*fine, *coarse) for cut in (low, high)})
    if all(high % low == 0 for low, high in pairwise(cuts) if low):
        # Both are made of the same digits: what the coarser tells apart the finer has to.
        return all(_is_told(fine, low) or not _is_told(coarse, low) for low in cuts[:-1])
    if cuts[-1] > LONGEST_LISTED:
        return False
    labels = _labels(finer), _labels(coarser)
    pairs = len(set(zip(*(label.tolist() for label in labels), strict=True)))
    return pairs == len(np.unique(labels[0]))


def _intervals(factors: Sequence[tuple[int, bool]]) -> list[tuple[int, int, bool]]:
    """For each factor of an axis its stride, the next outer one's, and whether it is told apart."""
    found = []
    stride = 1
    for size, told in reversed(factors):
        found.append((stride, stride * size, told))
        stride *= size
    return found


def _is_told(intervals: Sequence[tuple[int, int, bool]], place: int) -> bool:
    return any(told for low, high, told in intervals if low <= place < high)


def _labels(factors: Sequence[tuple[int, bool]]) -> NDArray[np.int64]:
    sizes = [size for size, _ in factors]
    digits = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    label = np.zeros(math.prod(sizes), dtype=np.int64)
    for digit, (size, told) in zip(digits, factors, strict=True):
        label = label * size + digit if told else label
    return label


def _edges(order: Sequence[Partition]) -> Iterator[Edge]:
    below = {
        (i, k)
        for i, fine in enumerate(order)
        for k, coarse in enumerate(order)
        if i != k and refines(fine, coarse)
    }
    for i, k in sorted(below):
        if not any((i, j) in below and (j, k) in below for j in range(len(order))):
            size = _group_size(order[i])
            yield Edge(i, k, _group_size(order[k]) // size if size else 0)


# --------------------------------------------------------------------------------------------
# Special cases


def _special_cases(
    members: Sequence[tuple[str, Scheme]], shape: tuple[int, ...]
) -> Iterator[SpecialCase]:
    """What each norm of one node has to do with one that stands before it."""
    before: list[tuple[str, Scheme]] = []
    for name, scheme in members:
        if not scheme.center:
            first = next((one for one, other in members if other.center), None)
            if first and scheme.scale == "auto":
                yield SpecialCase(name, first, f"{name} is {first} where every mean is 0.")
            continue
        if before:
            if scheme.statistics == "running":
                # It has the places of its statistics in common with training, not their values.
                continue
            own = _affine(scheme, shape)
            # One with the same weight says more than one with another.
            near = next((one for one in before if _affine(one[1], shape) == own), before[0])
            yield _special_case(near, (name, scheme), shape)
        before.append((name, scheme))


def _affine(scheme: Scheme, shape: tuple[int, ...]) -> Partition:
    sizes = _sizes(scheme, shape)
    return partition(sizes, sizes.layout.affine)


def _special_case(
    one: tuple[str, Scheme], two: tuple[str, Scheme], shape: tuple[int, ...]
) -> SpecialCase:
    """Two norms of the same statistics: equal, or one with the weights of the other repeated."""
    (name, scheme), (other_name, other) = one, two
    why = reasons(scheme, other, shape)
    because = f" here, because {why}" if why else ""
    own, others = _affine(scheme, shape), _affine(other, shape)
    special, general, condition = other_name, name, ""
    if own != others and not refines(own, others) and not refines(others, own):
        condition = ", without weight and bias"
    elif own != others:
        if not refines(own, others):
            special, general = name, other_name
        axes = _repeating(own, others)
        where = f"along {'axis' if len(axes) == 1 else 'axes'} {_listed(axes)}"
        condition = f", with a weight that is constant {where}"
    # In evaluation a BatchNorm computes something else.
    said = f"{special} is {general}".replace("BatchNorm", "BatchNorm in training")
    return SpecialCase(special, general, f"{said}{because}{condition}.")


def _repeating(finer: Partition, coarser: Partition) -> list[int]:
    return [i for i, (f, c) in enumerate(zip(finer, coarser, strict=True)) if f != c]


def _listed(items: Sequence[Any]) -> str:
    words = [str(item) for item in items]
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]


def reasons(a: Scheme, b: Scheme, shape: tuple[int, ...], *, affine: bool = False) -> str:
    """Which sizes make two schemes share alike at this shape that do not at larger ones.

    >>> reasons(Scheme.instance_norm(), Scheme.group_norm(3), (2, 3, 4))
    'axis 1 has one element in each of the 3 groups'
    >>> reasons(Scheme.instance_norm(), Scheme.layer_norm(ndim=2), (2, 1, 4))
    'c = 1'
    """
    a, b = unsized(a), unsized(b)

    def alike(sizes: tuple[int, ...]) -> bool:
        keys = []
        for scheme in (a, b):
            found = _sizes(scheme, sizes)
            told = found.layout.affine if affine else statistics_dimensions(found)
            keys.append(partition(found, told))
        return keys[0] == keys[1]

    found = []
    for axis, size in enumerate(shape):
        larger = (*shape[:axis], 2 * max(size, 1), *shape[axis + 1 :])
        try:
            if not alike(shape) or alike(larger):
                continue
        except ArgumentError:
            continue
        found.append(_reason(a, b, shape, axis))
    return _listed(found) if found else ""


def _reason(a: Scheme, b: Scheme, shape: tuple[int, ...], axis: int) -> str:
    if shape[axis] == 1:
        named = [axis_names(_sizes(scheme, shape))[axis] for scheme in (a, b)]
        # The name that says more: 'c' rather than one that only counts axes.
        name = next((n for n in named if " " not in n and n not in "ijkl"), f"axis {axis}")
        return f"{name} = 1"
    for scheme in (a, b):
        sizes = _sizes(scheme, shape)
        parts = sizes.layout.axes[axis]
        if len(parts) > 1:
            known = math.prod(part.size or 1 for part in parts)
            if known == shape[axis]:
                return f"axis {axis} has one element in each of the {known} groups"
    return f"axis {axis} has {shape[axis]} elements"


def unsized(scheme: Scheme) -> Scheme:
    """The scheme for any sizes: of each axis one part is free, the numbers of groups stay."""
    words = []
    for axis in scheme.parsed:
        parts = list(axis)
        if all(part.size is not None for part in parts):
            free = next((i for i in reversed(range(len(parts))) if parts[i].reduced), -1)
            parts[free] = type(parts[free])(parts[free].name, None, parts[free].reduced)
        said = " ".join(f"[{part}]" if part.reduced else str(part) for part in parts)
        words.append(said if len(parts) == 1 and parts[0].size is None else f"({said})")
    return scheme.replace(axes=" ".join(words))
