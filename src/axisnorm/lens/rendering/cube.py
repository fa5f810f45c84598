"""A tensor as a box whose visible faces show which elements belong together.

Groups are made axis by axis, so what is hidden inside the box follows from what its faces show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from matplotlib.collections import LineCollection
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from ...scheme import Sizes
from ..explain import axis_dimensions, group_number, part_names
from .canvas import ACCENT, FAINT, INK, SOFT, Canvas, font_of, text_width
from .palette import FILLS, letters

if TYPE_CHECKING:
    from ..explain import Explanation

__all__ = [
    "Box",
    "Grouping",
    "affine_grouping",
    "box_of",
    "draw_tensor",
    "footprint",
    "statistics_grouping",
]

CELL = 0.34
"""The side of an element's square, in inches."""

DEPTH = (0.58, -0.44)
"""Where one element along the axis that goes into the page stands, in cells; y points down."""

GAP = 0.62
"""The width of what stands for the elements that are left out, in cells."""

# --------------------------------------------------------------------------------------------
# The sample that is drawn, as at most three sides

Tick = int | None
"""The index of an element along one side; None where some are left out."""


@dataclass(frozen=True)
class Side:
    """One side of the drawn box: an axis of the tensor, or neighbouring axes in one."""

    axes: tuple[int, ...]
    ticks: tuple[Tick, ...]

    @cached_property
    def offsets(self) -> tuple[float, ...]:
        """Where each tick begins, and where the last one ends, in cells."""
        widths = [GAP if tick is None else 1.0 for tick in self.ticks]
        return tuple(itertools.accumulate(widths, initial=0.0))

    @property
    def length(self) -> float:
        return self.offsets[-1]


def roles_of(sizes: Sizes, told: Sequence[int]) -> list[tuple[bool, ...]]:
    """For each axis of the tensor, which of its parts the partition tells apart."""
    return [
        tuple(i in told for i in own if sizes.expanded[i] != 1) for own in axis_dimensions(sizes)
    ]


def _sides_of(shape: Sequence[int], roles: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    """The axes of each side. Of more than three axes, neighbours of one role become one side."""
    ndim = len(shape)
    if ndim <= 3:
        return [(axis,) for axis in range(ndim)]

    def breaks(start: int) -> tuple[int, int]:
        run = range(start, start + ndim - 2)
        changes = sum(of[i] != of[i + 1] for of in roles for i in run[:-1])
        # As in the picture of Wu and He: space is one side, wherever it does as well.
        return changes, (2, 1, 0).index(start)

    start = min((2, 1, 0), key=breaks)
    run = tuple(range(start, start + ndim - 2))
    rest = [(axis,) for axis in range(ndim) if axis not in run]
    return sorted([*rest, run])


def _sampled(size: int, first: int, whole: int) -> tuple[Tick, ...]:
    if size <= whole:
        return tuple(range(size))
    return (*range(first), None, size - 1)


def _split_sample(parts: Sequence[int], limit: int) -> tuple[Tick, ...]:
    """Of an axis of several parts, outer first: the beginning and the end of each part."""
    total = math.prod(parts)
    if total <= limit:
        return tuple(range(total))
    for first in (2, 1):
        found: list[Tick] = [0]
        step = 1
        for i, size in enumerate(reversed(parts)):
            blocks = _sampled(size, 1 if i else first, 2 if i else first + 1)
            inner, found = found, []
            for block in blocks:
                if block is None:
                    found.append(None)
                else:
                    found += [None if tick is None else tick + block * step for tick in inner]
            step *= size
            if len(found) > limit + 4:
                break
        else:
            return tuple(found)
    # Too many parts for all of their ends.
    return _sampled(total, max(limit - 2, 1), limit)


@dataclass(frozen=True)
class Box:
    """Which elements of a tensor are drawn, and along which side."""

    shape: tuple[int, ...]
    depth: Side | None
    rows: Side
    columns: Side

    @property
    def sampled(self) -> bool:
        sides = [side for side in (self.depth, self.rows, self.columns) if side]
        return any(None in side.ticks for side in sides)

    def index(self, depth: Tick, row: Tick, column: Tick) -> tuple[int, ...] | None:
        """The element of the tensor at three ticks, None where elements are left out."""
        found = [0] * len(self.shape)
        for side, tick in ((self.depth, depth), (self.rows, row), (self.columns, column)):
            if side is None:
                continue
            if tick is None:
                return None
            for axis in reversed(side.axes):
                tick, found[axis] = divmod(tick, self.shape[axis])
        return tuple(found)


def box_of(explanations: Sequence[Explanation], *, small: bool = False) -> Box:
    """One box for explanations of one shape, so that they can be compared."""
    shape = explanations[0].shape
    roles = [
        roles_of(e.sizes, told)
        for e in explanations
        for told in (e.statistics_dimensions, e.sizes.layout.affine)
    ]
    axes = _sides_of(shape, roles)
    parts = []
    for axis in range(len(shape)):
        # Parts of the explanation that splits the axis most; sizes of one mean nothing.
        splits = [
            [
                e.sizes.expanded[i]
                for i in axis_dimensions(e.sizes)[axis]
                if e.sizes.expanded[i] != 1
            ]
            for e in explanations
        ]
        parts.append(max(splits, key=len))

    def side(own: tuple[int, ...], first: int, whole: int) -> Side:
        own_parts = [part for axis in own for part in parts[axis]]
        mixed = len(own) > 1 and any(of[i] != of[own[0]] for of in roles for i in own)
        if len(own_parts) > 1 and (mixed or len(own) == 1):
            return Side(own, _split_sample(own_parts, whole))
        return Side(own, _sampled(math.prod(shape[axis] for axis in own), first, whole))

    cut = 1 if small else 0
    if len(axes) < 3:
        rows = side(axes[0], 4 - cut, 6) if len(axes) == 2 else Side((), (0,))
        columns = side(axes[-1], 6 - cut, 10 - 2 * cut) if axes else Side((), (0,))
        return Box(shape, None, rows, columns)
    # The side of several axes goes down, as H and W do in the picture of Wu and He.
    down = 2 if len(axes[2]) > 1 else 1
    return Box(
        shape,
        side(axes[0], 2, 4 - cut),
        side(axes[down], 3 - cut, 5 - cut),
        side(axes[3 - down], 4 - cut, 8 - 2 * cut),
    )


# --------------------------------------------------------------------------------------------
# One tensor


@dataclass(frozen=True)
class Grouping:
    """Which elements belong together, and how the groups are drawn."""

    word: str
    """``"mean"`` or ``"weight"``: the beginning of every artist's id."""
    box: Box
    sizes: Sizes
    told: tuple[int, ...]

    @cached_property
    def names(self) -> dict[int, str]:
        """A letter for each group that is drawn, in the tensor's order."""
        box = self.box
        depths: Sequence[Tick] = box.depth.ticks if box.depth else (0,)
        found = set()
        for place in itertools.product(depths, box.rows.ticks, box.columns.ticks):
            if (index := box.index(*place)) is not None:
                found.add(self.number(index))
        names = letters(capital=self.word == "mean")
        return {number: next(names) for number in sorted(found)}

    def number(self, index: Sequence[int]) -> int:
        return group_number(self.sizes, self.told, index)

    @property
    def few(self) -> bool:
        """Whether each group gets a colour; else one of them is shown."""
        return len(self.names) <= len(FILLS)

    def look(self, number: int) -> tuple[str, str, str]:
        """Fill, letter and the letter's colour."""
        place = list(self.names).index(number)
        if self.few:
            return FILLS[place % len(FILLS)], self.names[number], INK
        if place == 0:
            return ACCENT, self.names[number], "white"
        return FAINT, "", INK


def statistics_grouping(result: Explanation, box: Box) -> Grouping:
    return Grouping("mean", box, result.sizes, result.statistics_dimensions)


def affine_grouping(result: Explanation, box: Box) -> Grouping:
    return Grouping("weight", box, result.sizes, result.sizes.layout.affine)


@dataclass(frozen=True)
class _Face:
    """One visible face of the box: where it begins, and its two directions."""

    name: str
    origin: tuple[float, float]
    across: tuple[float, float]
    down: tuple[float, float]
    columns: Side
    rows: Side
    element: Callable[[Tick, Tick], tuple[int, ...] | None]
    """The element at a tick of the rows and one of the columns."""
    shade: float

    def at(self, across: float, down: float) -> tuple[float, float]:
        return (
            self.origin[0] + CELL * (across * self.across[0] + down * self.down[0]),
            self.origin[1] + CELL * (across * self.across[1] + down * self.down[1]),
        )


def _faces(box: Box, x: float, y: float) -> Iterator[_Face]:
    """The faces of the box whose front's upper left corner is (x, y), farthest first."""
    rows, columns, depth = box.rows, box.columns, box.depth
    if depth is not None:
        far = DEPTH[0] * depth.length * CELL, DEPTH[1] * depth.length * CELL
        yield _Face(
            "top", (x + far[0], y + far[1]), (1.0, 0.0), (-DEPTH[0], -DEPTH[1]), columns,
            Side(depth.axes, depth.ticks[::-1]), lambda d, c: box.index(d, rows.ticks[0], c), 0.97,
        )  # fmt: skip
        yield _Face(
            "right", (x + columns.length * CELL, y), DEPTH, (0.0, 1.0), depth, rows,
            lambda r, d: box.index(d, r, columns.ticks[-1]), 0.86,
        )  # fmt: skip
    front = depth.ticks[0] if depth is not None else 0
    yield _Face("front", (x, y), (1.0, 0.0), (0.0, 1.0), columns, rows,
                lambda r, c: box.index(front, r, c), 1.0)  # fmt: skip


def _shaded(color: str, shade: float) -> str:
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(channel * shade):02x}" for channel in channels)


def _draw_face(canvas: Canvas, face: _Face, groups: Grouping, gid: str) -> None:
    numbers: dict[tuple[int, int], int] = {}
    axes = canvas.axes
    for (r, row), (c, column) in itertools.product(
        enumerate(face.rows.ticks), enumerate(face.columns.ticks)
    ):
        index = face.element(row, column)
        left, right = face.columns.offsets[c : c + 2]
        top, bottom = face.rows.offsets[r : r + 2]
        corners = [face.at(left, top), face.at(right, top), face.at(right, bottom),
                   face.at(left, bottom)]  # fmt: skip
        where = "-".join(map(str, index)) if index is not None else f"gap-{r}-{c}"
        if index is None:
            patch = Polygon(corners, facecolor="#fafbfc", edgecolor="none", linewidth=0)
            patch.set_gid(f"{gid}-gap-{face.name}-{r}-{c}")
            axes.add_patch(patch)
            continue
        number = numbers[r, c] = groups.number(index)
        fill, letter, color = groups.look(number)
        patch = Polygon(corners, facecolor=_shaded(fill, face.shade), edgecolor="white",
                        linewidth=0.6, joinstyle="round")  # fmt: skip
        patch.set_gid(f"{gid}-{number}-{face.name}-{where}")
        axes.add_patch(patch)
        if letter:
            center = face.at((left + right) / 2, (top + bottom) / 2)
            axes.add_patch(_glyph(letter, center, face, color, f"{gid}-letter-{face.name}-{where}"))
    _draw_gaps(canvas, face)
    lines = list(_boundaries(face, numbers))
    axes.add_collection(
        LineCollection(lines, colors=INK, linewidths=1.3, capstyle="round",
                       gid=f"{gid}-boundaries-{face.name}"),
        autolim=False,
    )  # fmt: skip


def _draw_gaps(canvas: Canvas, face: _Face) -> None:
    """Three dots in the middle of every strip that is left out."""
    for side, along in ((face.columns, True), (face.rows, False)):
        middle = (face.rows if along else face.columns).length / 2
        for i, tick in enumerate(side.ticks):
            if tick is not None:
                continue
            center = (side.offsets[i] + side.offsets[i + 1]) / 2
            points = [center - 0.16, center, center + 0.16]
            at = [face.at(p, middle) if along else face.at(middle, p) for p in points]
            canvas.axes.plot(*zip(*at, strict=True), linestyle="none", marker="o", markersize=1.7,
                             color=SOFT, scalex=False, scaley=False)  # fmt: skip


def _glyph(
    letter: str, center: tuple[float, float], face: _Face, color: str, gid: str
) -> PathPatch:
    """A letter that lies in its face."""
    size = {1: 0.52, 2: 0.4}.get(len(letter), 0.28) * CELL * 72
    path = TextPath((0, 0), letter, size=size, prop=font_of(size, bold=True))
    box = path.get_extents()
    shift = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    vertices = [
        (
            center[0] + ((gx - shift[0]) * face.across[0] - (gy - shift[1]) * face.down[0]) / 72,
            center[1] + ((gx - shift[0]) * face.across[1] - (gy - shift[1]) * face.down[1]) / 72,
        )
        for gx, gy in path.vertices
    ]
    patch = PathPatch(Path(vertices, path.codes), facecolor=color, edgecolor="none", linewidth=0)
    patch.set_gid(gid)
    return patch


Segment = tuple[tuple[float, float], tuple[float, float]]


def _boundaries(face: _Face, numbers: dict[tuple[int, int], int]) -> Iterator[Segment]:
    """The outline, and the edges between elements of different groups."""
    across, down = face.columns.offsets, face.rows.offsets
    right, bottom = face.columns.length, face.rows.length
    corners = [face.at(0, 0), face.at(right, 0), face.at(right, bottom), face.at(0, bottom)]
    yield from zip(corners, [*corners[1:], corners[0]], strict=True)
    for (r, c), number in numbers.items():
        if numbers.get((r, c + 1), number) != number:
            yield face.at(across[c + 1], down[r]), face.at(across[c + 1], down[r + 1])
        if numbers.get((r + 1, c), number) != number:
            yield face.at(across[c], down[r + 1]), face.at(across[c + 1], down[r + 1])


MOST_NAMES = 6
"""A side of more parts is called by its first and its last."""


def _axis_label(groups: Grouping, side: Side) -> str:
    """The notation of a side's axes with their sizes: ``[h w] = 5 x 7``, ``(g [c]) = 2 x 4``."""
    sizes, names = groups.sizes, part_names(groups.sizes)
    own = [i for axis in side.axes for i in axis_dimensions(sizes)[axis]]
    if len(own) > MOST_NAMES:
        size = math.prod(sizes.expanded[i] for i in own)
        return f"{names[own[0]]} {names[own[1]]} ... {names[own[-1]]} = {size:,}"
    text, inside = "", False
    for axis in side.axes:
        parts = axis_dimensions(sizes)[axis]
        for i in parts:
            shared = groups.word == "mean" and i not in groups.told
            text += "]" if inside and not shared else ""
            text += " " if text else ""
            text += "(" if len(parts) > 1 and i == parts[0] else ""
            text += ("[" if shared and not inside else "") + names[i]
            inside = shared
            if len(parts) > 1 and i == parts[-1]:
                text += "])" if inside else ")"
                inside = False
    counts = " x ".join(f"{sizes.expanded[i]:,}" for i in own)
    return f"{text}{']' if inside else ''} = {counts}"


def footprint(groups: Grouping) -> tuple[float, float, float, float]:
    """What a tensor with its labels takes up: left and above of its front, right and below."""
    box, font = groups.box, font_of(8.5)
    left = text_width(_label_text(groups, "rows"), font) + 0.1 if box.rows.axes else 0.0
    right, up = box.columns.length * CELL, 0.0
    if box.depth is not None:
        label = text_width(_label_text(groups, "depth"), font) + 0.14
        up = -DEPTH[1] * box.depth.length * CELL
        far = DEPTH[0] * box.depth.length * CELL
        right += max(far, far / 2 + label)
    if box.columns.axes:
        label = text_width(_label_text(groups, "columns"), font)
        middle = box.columns.length * CELL / 2
        left, right = max(left, label / 2 - middle), max(right, middle + label / 2)
    return left, up, right, box.rows.length * CELL + 0.3


def _label_text(groups: Grouping, which: str) -> str:
    side: Side = getattr(groups.box, which)
    arrow = {"rows": "↓", "columns": "→", "depth": "↗"}[which]
    return f"{_axis_label(groups, side)} {arrow}"


def draw_tensor(canvas: Canvas, x: float, y: float, groups: Grouping, gid: str) -> None:
    """Draw the box with the front's upper left corner at (x, y), and name its sides."""
    box, font = groups.box, font_of(8.5)
    for face in _faces(box, x, y):
        _draw_face(canvas, face, groups, gid)
    height, width = box.rows.length * CELL, box.columns.length * CELL
    if box.rows.axes:
        canvas.text(x - 0.1, y + height / 2 + 0.04, _label_text(groups, "rows"), font, color=SOFT,
                    align="right", gid=f"{gid}-label-rows")  # fmt: skip
    if box.columns.axes:
        canvas.text(x + width / 2, y + height + 0.2, _label_text(groups, "columns"), font,
                    color=SOFT, align="center", gid=f"{gid}-label-columns")  # fmt: skip
    if box.depth is not None:
        far = box.depth.length * CELL / 2
        canvas.text(x + width + far * DEPTH[0] + 0.14, y + height + far * DEPTH[1] + 0.06,
                    _label_text(groups, "depth"), font, color=SOFT,
                    gid=f"{gid}-label-depth")  # fmt: skip
