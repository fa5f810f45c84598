"""Where the nodes of a graph stand, in rows, so that few of its edges cross and none is hidden.

The figures and the pages draw the same map: each measures its own texts and asks here for places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Places", "place"]

SWEEPS = 12
"""Passes over the rows, up and down, that order and align the nodes."""


@dataclass(frozen=True)
class Places:
    """Places of the centres of nodes, y downwards, and the corners of edges."""

    nodes: tuple[tuple[float, float], ...]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    """For each edge its points, from the lower node's upper side to the upper node's lower side."""
    width: float
    height: float


def place(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    *,
    across: float,
    between: float,
) -> Places:
    """Place nodes in rows: an edge's first node is lower than its second.

    Args:
        sizes: width and height of each node.
        edges: pairs of places in ``sizes``, without cycles.
        across: the least distance between neighbours of one row.
        between: the distance between rows.

    >>> found = place([(4, 1), (4, 1), (4, 1)], [(0, 1), (1, 2), (0, 2)], across=1, between=2)
    >>> [y for _, y in found.nodes]
    [6.5, 3.5, 0.5]
    >>> len(found.routes[2])
    4
    """
    ranks = [0] * len(sizes)
    for _ in sizes:
        for low, high in edges:
            ranks[high] = max(ranks[high], ranks[low] + 1)
    # Long edges pass between the nodes of the rows that they cross: each takes a place there.
    widths = [width for width, _ in sizes]
    paths: list[list[int]] = []
    for low, high in edges:
        path = [low]
        for rank in range(ranks[low] + 1, ranks[high]):
            path.append(len(widths))
            widths.append(0.0)
            ranks.append(rank)
        paths.append([*path, high])
    near: list[list[int]] = [[] for _ in widths]
    for path in paths:
        for one, other in pairwise(path):
            near[one].append(other)
            near[other].append(one)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for i, rank in enumerate(ranks):
        rows[rank].append(i)
    x = _aligned(rows, ranks, near, widths, across)
    heights = [max((sizes[i][1] for i in row if i < len(sizes)), default=0.0) for row in rows]
    tops = [0.0] * len(rows)
    for rank in reversed(range(len(rows) - 1)):
        tops[rank] = tops[rank + 1] + heights[rank + 1] + between
    middle = [tops[rank] + heights[rank] / 2 for rank in ranks]
    left = min((x[i] - widths[i] / 2 for i in range(len(widths))), default=0.0)
    right = max((x[i] + widths[i] / 2 for i in range(len(widths))), default=0.0)
    routes = []
    for path in paths:
        low, high = path[0], path[-1]
        points = [(x[low] - left, middle[low] - sizes[low][1] / 2)]
        for i in path[1:-1]:
            # Upright beside the nodes of the row that it crosses.
            half = heights[ranks[i]] / 2
            points += [(x[i] - left, middle[i] + half), (x[i] - left, middle[i] - half)]
        routes.append((*points, (x[high] - left, middle[high] + sizes[high][1] / 2)))
    nodes = tuple((x[i] - left, middle[i]) for i in range(len(sizes)))
    height = tops[0] + heights[0] if rows else 0.0
    return Places(nodes, tuple(routes), right - left, height)


def _aligned(
    rows: list[list[int]],
    ranks: Sequence[int],
    near: Sequence[Sequence[int]],
    widths: Sequence[float],
    across: float,
) -> list[float]:
    """The x of every node: each row in the order and near the middle of what it is tied to."""
    x = [0.0] * len(widths)
    for row in rows:
        _packed(row, x, widths, across)
    for sweep in range(SWEEPS):
        upwards = sweep % 2 == 0
        for rank in range(len(rows)) if upwards else reversed(range(len(rows))):
            tied = {
                i: [x[k] for k in near[i] if (ranks[k] < rank) == upwards] or [x[i]]
                for i in rows[rank]
            }
            wanted = {i: sum(of) / len(of) for i, of in tied.items()}
            rows[rank].sort(key=lambda i: (wanted[i], i))
            for i in rows[rank]:
                x[i] = wanted[i]
            _spread(rows[rank], x, widths, across)
    return x


def _packed(row: Sequence[int], x: list[float], widths: Sequence[float], across: float) -> None:
    total = sum(widths[i] for i in row) + across * max(len(row) - 1, 0)
    at = -total / 2
    for i in row:
        x[i] = at + widths[i] / 2
        at += widths[i] + across


def _spread(row: Sequence[int], x: list[float], widths: Sequence[float], across: float) -> None:
    """Push neighbours apart until none overlap, as far to one side as to the other."""
    wanted = [x[i] for i in row]
    for one, other in pairwise(row):
        x[other] = max(x[other], x[one] + (widths[one] + widths[other]) / 2 + across)
    moved = sum(x[i] - want for i, want in zip(row, wanted, strict=True)) / max(len(row), 1)
    for i in row:
        x[i] -= moved
