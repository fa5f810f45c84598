"""Axes followed through views: which parts of which axes of a tensor stand where in another.

A tensor's axes are seen as atoms. Views regroup, permute and split them; what is reduced loses
its atoms; broadcasting aligns them. Which elements share a statistic can then be read off the
atoms that it has kept, however the tensor was reshaped in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Atom", "Dims", "broadcast", "expanded", "leaves", "of_constant", "of_tensor", "own", "viewed",
]  # fmt: skip


@dataclass(eq=False)
class Atom:
    """A part of an axis. It may be split later, for all tensors that have it."""

    size: int
    axis: int | None
    """Of the tensor that is followed; None for what comes from elsewhere, along which the values
    that are followed are only repeated."""
    parts: list[Atom] = field(default_factory=list)

    def split(self, outer: int) -> None:
        """See it as two, the outer one of this size."""
        self.parts = [Atom(outer, self.axis), Atom(self.size // outer, self.axis)]

    def leaves(self) -> Iterator[Atom]:
        """Its smallest parts, the outer ones first."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


Dims = tuple[tuple[Atom, ...], ...]
"""The atoms of each axis of a tensor, the outer ones first."""


def of_tensor(shape: Sequence[int]) -> Dims:
    """Those of the tensor that is followed: one for each axis."""
    return tuple((Atom(size, axis),) for axis, size in enumerate(shape))


def of_constant(shape: Sequence[int]) -> Dims:
    """Those of a tensor that is not computed from it."""
    return tuple((Atom(size, None),) if size != 1 else () for size in shape)


def leaves(atoms: Sequence[Atom]) -> list[Atom]:
    """The smallest parts, in order."""
    return [leaf for atom in atoms for leaf in atom.leaves()]


def own(dims: Dims) -> set[Atom]:
    """The parts of the tensor's axes along which the values differ."""
    return {leaf for axis in dims for leaf in leaves(axis) if leaf.axis is not None}


def viewed(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Those after ``view(shape)``, None where a new axis cuts across the parts of two."""
    waiting = [leaf for axis in dims for leaf in leaves(axis) if leaf.size != 1]
    waiting.reverse()
    found = []
    for size in shape:
        axis: list[Atom] = []
        missing = size
        while missing > 1:
            if not waiting:
                return None
            leaf = waiting.pop()
            if missing % leaf.size:
                # The outer part belongs here, the inner one to the next axis.
                if leaf.size % missing:
                    return None
                leaf.split(missing)
                leaf, inner = leaf.parts
                waiting.append(inner)
            axis.append(leaf)
            missing //= leaf.size
        found.append(tuple(axis))
    return tuple(found)


def expanded(dims: Dims, shape: Sequence[int]) -> Dims:
    """Those after ``expand(shape)``: along new axes the values are repeated."""
    dims = ((),) * (len(shape) - len(dims)) + dims
    return tuple(
        (Atom(size, None),) if not leaves(axis) and size != 1 else axis
        for axis, size in zip(dims, shape, strict=True)
    )


def broadcast(given: Sequence[Dims]) -> Dims | None:
    """Those of what is computed from these elementwise, None where axes of two kinds meet."""
    found: list[tuple[Atom, ...]] = []
    for place in range(-max(map(len, given)), 0):
        best: tuple[Atom, ...] = ()
        for dims in given:
            other = dims[place] if -place <= len(dims) else ()
            if _rank(other) == _rank(best) == 3 and leaves(other) != leaves(best):
                return None
            if _rank(other) > _rank(best):
                best = other
        found.append(best)
    return tuple(found)


def _rank(axis: tuple[Atom, ...]) -> int:
    """What decides along an axis: values that differ, then repeated ones, then one alone."""
    known = leaves(axis)
    if all(leaf.size == 1 for leaf in known):
        return 1 if known else 0
    return 3 if any(leaf.axis is not None for leaf in known) else 2
