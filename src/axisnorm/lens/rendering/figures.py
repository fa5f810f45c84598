"""The results of the lens as figures, for paper, slides and documentation.

Everything is laid out in inches on one empty Axes, from the measured widths of its texts, so that
nothing overlaps whatever the names and sizes are. No figure touches pyplot.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from matplotlib import rc_context, style
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.patches import Polygon
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Figures are drawn with matplotlib. It is not installed. Run: pip install 'axisnorm[lens]'",
        name=error.name,
    ) from error

from ...scheme import ArgumentError
from ..explain import axis_names
from ..naming import kind_of_mean, kind_of_spread
from . import benchmarked
from .canvas import (
    ACCENT,
    INK,
    MARGIN,
    RULE,
    SOFT,
    Canvas,
    font_of,
    shown,
    text_width,
    wrapped,
)
from .cube import Grouping, affine_grouping, box_of, draw_tensor, footprint, statistics_grouping
from .folding import alike, folded, worst_first
from .placing import place
from .residuals import Chart, chart_of
from .wording import count, seconds, shared_statistic

if TYPE_CHECKING:
    from ..compare import Comparison
    from ..explain import Explanation
    from ..family import Family, Node
    from ..identifying.identification import Candidate, Identification
    from ..models.norms import Audit

__all__ = ["family", "figure", "save", "tensors"]

LEAST_WIDTH = 7.4

_LEFT_OUT = "Dots stand for elements that are left out."


def figure(result: Any) -> Figure:
    """The figure of a result.

    Args:
        result: what :func:`axisnorm.explain`, ``compare``, ``identify`` or ``audit`` returned.

    Raises:
        ArgumentError: there is no figure of this kind of result.

    >>> import axisnorm
    >>> figure(axisnorm.explain("b s [d]; affine=d", (2, 3, 4))).get_label()
    'b s [d]; affine=d on (2, 3, 4)'
    """
    kind = getattr(result, "kind", type(result).__name__)
    if kind not in _FIGURES:
        raise ArgumentError(
            f"Figures are drawn of {', '.join(_FIGURES)}. A {kind} came. Use its to_text() instead."
        )
    # The reader's own settings are for the reader's plots: a dark style would hide black letters.
    with style.context("default"):
        return _FIGURES[kind](result)


def save(drawn: Figure, path: str | PathLike[str]) -> None:
    """Write a figure as PNG or SVG, by the path's suffix: the same figure gives the same bytes.

    Args:
        drawn: what :func:`figure`, :func:`tensors` or :func:`family` returned.
        path: ends in .png or .svg.

    Raises:
        ArgumentError: the suffix is another.

    >>> import axisnorm, tempfile
    >>> path = Path(tempfile.mkdtemp(), "norm.svg")
    >>> save(figure(axisnorm.explain("b s [d]", (2, 3, 4))), path)
    >>> path.read_text()[:5]
    '<?xml'
    """
    suffix = str(path).rpartition(".")[2].lower()
    if suffix not in ("png", "svg"):
        raise ArgumentError(
            f"A figure is written as .png or .svg. '{path}' came. Change the file's suffix."
        )
    file = io.BytesIO()
    with (
        style.context("default"),
        rc_context({"svg.hashsalt": "axisnorm", "text.hinting": "no_hinting"}),
    ):
        metadata = {"Date": None, "Creator": "axisnorm"} if suffix == "svg" else None
        drawn.savefig(file, format=suffix, dpi=200, metadata=metadata)
    content = file.getvalue()
    if suffix == "svg":
        title = shown(str(drawn.get_label()), font_of(9))
        content = _compact(content.decode(), title).encode()
    Path(path).write_bytes(content)


def _compact(svg: str, title: str) -> str:
    """The same picture in half the bytes, with a title for those who do not see it."""

    def short(number: re.Match[str]) -> str:
        return f"{float(number[0]) + 0.0:.2f}".rstrip("0").rstrip(".")

    def shortened(found: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d+", short, " ".join(found[0].split()))

    svg = re.sub(r'\b(?:d|points)="[^"]*"|translate\([^)]*\)', shortened, svg)
    svg = re.sub(r">\s+<", ">\n<", svg)
    named = f'<svg role="img" aria-label="{escape(title)}" '
    return svg.replace("<svg ", named, 1)


# --------------------------------------------------------------------------------------------
# Words


def _facts(result: Explanation) -> str:
    scheme = result.scheme
    word = kind_of_mean(scheme)
    if not scheme.center and scheme.scale == "std":
        word = "variance"
    if scheme.statistics == "running":
        word = f"running {word}"
    said = f"{count(result.num_groups, word)}, "
    said += "each over " if result.num_groups != 1 else "over "
    said += count(result.group_size, "element")
    if result.parameter_names:
        names = " and ".join(result.parameter_names)
        return f"{said}; {names} of shape {result.affine_shape}"
    return f"{said}; no weight, no bias"


def _partition_title(groups: Grouping, result: Explanation) -> str:
    shared = shared_statistic(result.scheme)
    if groups.word != "mean":
        shared = " and ".join(result.parameter_names)
    if groups.few:
        return f"One letter, one {shared}"
    return f"{next(iter(groups.names.values()))}: one {shared}"


# --------------------------------------------------------------------------------------------
# explain


def _explanation(result: Explanation) -> Figure:
    """Which elements share a mean, which share a weight, the formula and what is the same."""
    canvas = Canvas()
    head, body, mono = font_of(13, bold=True, mono=True), font_of(9.5), font_of(9, mono=True)
    panels = []
    if 0 not in result.shape:
        box = box_of([result])
        panels = [statistics_grouping(result, box)]
        if result.scheme.affine:
            panels.append(affine_grouping(result, box))
    footprints = [footprint(groups) for groups in panels]
    titles = [_partition_title(groups, result) for groups in panels]
    widths = [
        max(left + right, text_width(title, font_of(9.5, bold=True)))
        for (left, _, right, _), title in zip(footprints, titles, strict=True)
    ]
    width = max(LEAST_WIDTH, sum(widths) + 0.5 * max(len(widths) - 1, 0) + 2 * MARGIN)
    inner = width - 2 * MARGIN

    y = MARGIN
    if "[" not in result.subject:
        y = canvas.paragraph(MARGIN, y, result.subject, font_of(13, bold=True), inner)
    y = canvas.paragraph(MARGIN, y, str(result.scheme), head, inner)
    y = canvas.paragraph(MARGIN, y + 0.03, f"on {result.shape}: {_facts(result)}", body, inner,
                         color=SOFT)  # fmt: skip
    y += 0.16
    x = MARGIN
    bottom = y
    if not panels:
        empty = [name for name, size in zip(axis_names(result.sizes), result.shape, strict=True)
                 if size == 0]  # fmt: skip
        said = f"Nothing to draw: axis {', '.join(empty)} has no elements."
        bottom = canvas.paragraph(MARGIN, y, said, body, inner, color=SOFT)
    up = max((up for _, up, _, _ in footprints), default=0.0)
    for groups, title, (left, _, _, below), own in zip(
        panels, titles, footprints, widths, strict=True
    ):
        canvas.text(x, y + 0.14, title, font_of(9.5, bold=True), gid=f"{groups.word}-title")
        draw_tensor(canvas, x + left, y + 0.3 + up, groups, groups.word)
        bottom = max(bottom, y + 0.3 + up + below)
        x += own + 0.5
    y = bottom + 0.05
    if panels and panels[0].box.sampled:
        y = canvas.paragraph(MARGIN, y, _LEFT_OUT, font_of(8.5), inner, color=SOFT)
    if panels and result.mean is not None and result.var is not None:
        y = _legend(canvas, y + 0.1, result, panels[0], inner)
    y += 0.14
    for line in result.formula.splitlines():
        y = canvas.paragraph(MARGIN, y, line, mono, inner)
    same = ", ".join(equivalent.name for equivalent in result.equivalents)
    said = f"The same statistics at this shape: {same or 'no named norm'}"
    y = canvas.paragraph(MARGIN, y + 0.1, said, body, inner, color=SOFT)
    return canvas.finish(width, y + MARGIN - 0.08, f"{result.scheme} on {result.shape}")


def _legend(canvas: Canvas, y: float, result: Explanation, groups: Grouping, width: float) -> float:
    """The mean and variance of every group that has a letter, in columns."""
    font, bold = font_of(9), font_of(9, bold=True)
    assert result.mean is not None
    assert result.var is not None
    spread = kind_of_spread(result.scheme)
    entries = []
    for number, name in groups.names.items():
        if not groups.look(number)[1]:
            continue
        said = f"{spread} {result.var.flat[number]:.5g}"
        if result.scheme.center:
            said = f"mean {result.mean.flat[number]:.5g}, {said}"
        entries.append((number, name, said))
    own = max(text_width(said, font) for _, _, said in entries) + 0.55
    columns = max(1, min(4, int(width // own)))
    rows = -(-len(entries) // columns)
    for i, (number, name, said) in enumerate(entries):
        column, row = divmod(i, rows)
        x, line = MARGIN + column * own, y + row * 0.2
        fill, _, color = groups.look(number)
        canvas.axes.add_patch(
            Polygon([(x, line), (x + 0.2, line), (x + 0.2, line + 0.16), (x, line + 0.16)],
                    facecolor=fill, edgecolor=INK, linewidth=0.8, gid=f"legend-{number}")
        )  # fmt: skip
        canvas.text(x + 0.1, line + 0.125, name, bold, color=color, align="center")
        canvas.text(x + 0.28, line + 0.13, said, font, gid=f"legend-text-{number}")
    return y + rows * 0.2


@style.context("default")
def tensors(
    explanations: Sequence[Explanation], titles: Sequence[str], *, columns: int = 3
) -> Figure:
    """Several norms over one tensor, each with its name: the picture of the GroupNorm paper.

    Args:
        explanations: of one shape.
        titles: a name for each.
        columns: how many stand in a row.

    Raises:
        ArgumentError: there are none, their shapes differ, or the titles are not as many.

    >>> import axisnorm
    >>> norms = {"BatchNorm": "[n] c [...]", "InstanceNorm": "n c [...]"}
    >>> both = [axisnorm.explain(scheme, (2, 4, 3, 3)) for scheme in norms.values()]
    >>> tensors(both, list(norms)).get_label()
    'norms over (2, 4, 3, 3)'
    """
    shapes = {explanation.shape for explanation in explanations}
    if len(shapes) != 1 or len(titles) != len(explanations):
        raise ArgumentError(
            "Norms are drawn over one tensor, each with a title. "
            f"{len(explanations)} explanations of shapes {sorted(shapes)} and {len(titles)} titles "
            "came. Explain each norm on the same shape."
        )
    canvas = Canvas()
    box = box_of(explanations, small=True)
    panels = [statistics_grouping(explanation, box) for explanation in explanations]
    footprints = [footprint(groups) for groups in panels]
    left, up, right, below = (max(of) for of in zip(*footprints, strict=True))
    bold, mono, small = font_of(10, bold=True), font_of(8.5, mono=True), font_of(8.5)
    said = [_facts(explanation).partition(";")[0] for explanation in explanations]
    texts = [
        max(
            text_width(title, bold),
            text_width(explanation.scheme.axes, mono),
            text_width(fact, small),
        )
        for title, explanation, fact in zip(titles, explanations, said, strict=True)
    ]
    own = max(left + right, *texts) + 0.35
    tall = 0.55 + up + below + 0.2
    columns = min(columns, len(panels))
    for i, groups in enumerate(panels):
        row, column = divmod(i, columns)
        x, y = MARGIN + column * own, MARGIN + row * tall
        canvas.text(x, y + 0.12, titles[i], bold, gid=f"norm-{i}-title")
        canvas.text(x, y + 0.29, explanations[i].scheme.axes, mono, gid=f"norm-{i}-axes")
        canvas.text(x, y + 0.45, said[i], small, color=SOFT, gid=f"norm-{i}-facts")
        draw_tensor(canvas, x + left, y + 0.55 + up, groups, f"norm-{i}")
    rows = -(-len(panels) // columns)
    shape = next(iter(shapes))
    return canvas.finish(
        2 * MARGIN + columns * own - 0.35, 2 * MARGIN + rows * tall - 0.2, f"norms over {shape}"
    )


# --------------------------------------------------------------------------------------------
# compare


def _comparison(result: Comparison) -> Figure:
    """Both norms over the same tensor, what differs, and the map of the family."""
    canvas = Canvas()
    title, bold, body, small = (
        font_of(13, bold=True),
        font_of(9.5, bold=True),
        font_of(9.5),
        font_of(8.5),
    )
    mono = font_of(9, mono=True)
    sides = (("a", result.a), ("b", result.b))
    columns: list[list[Grouping]] = [[], []]
    if 0 not in result.shape:
        box = box_of([result.a, result.b])
        affine = any(side.scheme.affine for _, side in sides)
        for drawn, (_, side) in zip(columns, sides, strict=True):
            drawn.append(statistics_grouping(side, box))
            if affine:
                drawn.append(affine_grouping(side, box))
    footprints = [[footprint(groups) for groups in drawn] for drawn in columns]
    own = [
        max(
            [3.0, *(left + right for left, _, right, _ in of)]
            + [text_width(_partition_title(groups, side), bold) for groups in drawn]
        )
        for of, drawn, (_, side) in zip(footprints, columns, sides, strict=True)
    ]
    family = _family_size(result.family)
    width = max(LEAST_WIDTH, sum(own) + 0.5 + 2 * MARGIN, family[0] + 2 * MARGIN)
    inner = width - 2 * MARGIN
    places = (MARGIN, MARGIN + own[0] + 0.5)

    verdict = "The same" if result.same else "Not the same"
    y = canvas.paragraph(MARGIN, MARGIN, f"{verdict} on {result.shape}", title, inner)
    top = y + 0.12
    ends = []
    for x, most, (name, side) in zip(places, own, sides, strict=True):
        y = canvas.paragraph(x, top, f"{name}: {side.subject}", bold, most)
        if side.subject != str(side.scheme):
            y = canvas.paragraph(x, y, str(side.scheme), mono, most)
        ends.append(canvas.paragraph(x, y, _facts(side), small, most, color=SOFT))
    y = max(ends) + 0.1
    for row in range(len(columns[0])):
        up = max(of[row][1] for of in footprints)
        for x, of, drawn, (name, side) in zip(places, footprints, columns, sides, strict=True):
            groups = drawn[row]
            gid = f"{name}-{groups.word}"
            if groups.word == "weight" and not side.scheme.affine:
                canvas.text(x, y + 0.14, "No weight, no bias", bold, gid=f"{gid}-title")
                continue
            said = _partition_title(groups, side)
            canvas.text(x, y + 0.14, said, bold, gid=f"{gid}-title")
            draw_tensor(canvas, x + of[row][0], y + 0.3 + up, groups, gid)
        y += 0.3 + up + max(of[row][3] for of in footprints) + 0.12
    if columns[0] and columns[0][0].box.sampled:
        y = canvas.paragraph(MARGIN, y, _LEFT_OUT, small, inner, color=SOFT)
    for heading, sentences in (("Different", result.differences), ("Equal", result.equalities)):
        if not sentences:
            continue
        y = canvas.paragraph(MARGIN, y + 0.06, heading, bold, inner)
        for sentence in sentences:
            canvas.text(MARGIN, y + 9.5 / 72, "-", body, color=SOFT)
            y = canvas.paragraph(MARGIN + 0.14, y, sentence, body, inner - 0.14)
    y = canvas.paragraph(MARGIN, y + 0.16, "The family at this shape", bold, inner)
    y = canvas.paragraph(
        MARGIN, y, "From the most means, at the bottom, to the fewest. A line: each group above "
        "holds so many whole groups below.", small, inner, color=SOFT,
    )  # fmt: skip
    y = _draw_family(canvas, MARGIN + (inner - family[0]) / 2, y + 0.12, result.family)
    return canvas.finish(width, y + MARGIN, f"{result.a.subject} and {result.b.subject}")


_NODE_PADDING = 0.1
_NODE_LINE = 0.165


def _node_lines(node: Node) -> list[tuple[str, FontProperties]]:
    said = f"{count(node.num_groups, 'mean')} of {count(node.group_size, 'element')}"
    lines = [(said, font_of(8.5, bold=True))]
    lines += [(member.name, font_of(8.5)) for member in node.members]
    return lines if node.members else [*lines, ("no named norm", font_of(8.5))]


def _family_places(family: Family) -> tuple[Any, list[tuple[float, float]]]:
    sizes = []
    for node in family.nodes:
        lines = _node_lines(node)
        badges = 0.2 * (node.holds_a + node.holds_b)
        width = max(text_width(text, font) + (badges if place == 0 else 0.0)
                    for place, (text, font) in enumerate(lines))  # fmt: skip
        sizes.append(
            (width + 2 * _NODE_PADDING, len(lines) * _NODE_LINE + 2 * _NODE_PADDING - 0.03)
        )
    edges = [(edge.finer, edge.coarser) for edge in family.edges]
    return place(sizes, edges, across=0.3, between=0.5), sizes


def _family_size(family: Family) -> tuple[float, float]:
    places, _ = _family_places(family)
    return places.width, places.height


def _draw_family(canvas: Canvas, x: float, y: float, family: Family) -> float:
    """Draw the map with its upper left corner at (x, y) and return where it ends."""
    places, sizes = _family_places(family)
    small = font_of(8)
    axes = canvas.axes
    for edge, route in zip(family.edges, places.routes, strict=True):
        axes.plot([x + px for px, _ in route], [y + py for _, py in route], color=SOFT,
                  linewidth=1.1, zorder=1, scalex=False, scaley=False,
                  gid=f"edge-{edge.finer}-{edge.coarser}")  # fmt: skip
        (x0, y0), (x1, y1) = route[0], route[1]
        near = min(0.25 / max(y0 - y1, 0.25), 0.5)
        at = x + x0 + (x1 - x0) * near, y + y0 + (y1 - y0) * near
        said = f"{edge.holds:,}"
        half = text_width(said, small) / 2 + 0.04
        axes.add_patch(Polygon(
            [(at[0] - half, at[1] - 0.07), (at[0] + half, at[1] - 0.07),
             (at[0] + half, at[1] + 0.07), (at[0] - half, at[1] + 0.07)],
            facecolor="white", edgecolor="none", zorder=2,
        ))  # fmt: skip
        canvas.text(at[0], at[1] + 0.04, said, small, color=SOFT, align="center")
    for number, (node, (cx, cy), (width, height)) in enumerate(
        zip(family.nodes, places.nodes, sizes, strict=True)
    ):
        left, top = x + cx - width / 2, y + cy - height / 2
        compared = node.holds_a or node.holds_b
        axes.add_patch(Polygon(
            [(left, top), (left + width, top), (left + width, top + height), (left, top + height)],
            facecolor="#e8effd" if compared else "white", edgecolor=ACCENT if compared else RULE,
            linewidth=1.6 if compared else 1.0, joinstyle="round", zorder=3, gid=f"node-{number}",
        ))  # fmt: skip
        line = top + _NODE_PADDING + 0.11
        for text, font in _node_lines(node):
            soft = not node.members and text == "no named norm"
            canvas.text(left + _NODE_PADDING, line, text, font, color=SOFT if soft else INK)
            line += _NODE_LINE
        badge = left + width - 0.06
        for name, here in (("b", node.holds_b), ("a", node.holds_a)):
            if here:
                axes.add_patch(Polygon(
                    [(badge - 0.18, top + 0.06), (badge, top + 0.06), (badge, top + 0.24),
                     (badge - 0.18, top + 0.24)],
                    facecolor=ACCENT, edgecolor="none", zorder=4,
                ))  # fmt: skip
                canvas.text(badge - 0.09, top + 0.185, name, font_of(8.5, bold=True), color="white",
                            align="center", gid=f"node-{number}-{name}")  # fmt: skip
                badge -= 0.2
    return y + places.height


@style.context("default")
def family(result: Family) -> Figure:
    """The map of the family alone: which norm's groups lie inside which other's.

    Args:
        result: of :func:`axisnorm.lens.family.family_of`.

    >>> import axisnorm
    >>> family(axisnorm.compare("... [d]", "b [s d]", (2, 3, 4)).family).get_label()
    'the family of norms'
    """
    canvas = Canvas()
    width, _ = _family_size(result)
    y = _draw_family(canvas, MARGIN, MARGIN, result)
    return canvas.finish(width + 2 * MARGIN, y + MARGIN, "the family of norms")


# --------------------------------------------------------------------------------------------
# identify

_GOOD, _BAD, _WARN = "#0b6b3a", "#b3261e", "#7a4d00"


def _value(candidate: Candidate, best: bool) -> str:
    said = f"{candidate.residual:.3g}" if math.isfinite(candidate.residual) else "not finite"
    if candidate.mistake is not None:
        said += f"  ! {candidate.mistake.code}"
    return "best  " * best + said


def _beside(candidate: Candidate, chart: Chart, across: float, wide: float) -> tuple[float, str]:
    """Where along the axis the words beside a mark stand: on no band, if there is room."""
    x, band = (across * chart.place(of) for of in (candidate.residual, candidate.tolerance))
    if candidate.residual <= candidate.tolerance:
        return max(x, band) + 0.12, "left"
    before = x - 0.12
    if x < across / 2 or before - wide < band:
        return x + 0.12, "left"
    return before, "right"


def _identification(result: Identification) -> Figure:
    """The verdict, and how far off each candidate is beside what rounding explains."""
    canvas = Canvas()
    bold, body, small = font_of(9.5, bold=True), font_of(9.5), font_of(8.5)
    mono = font_of(8, mono=True)
    chart = chart_of(result)
    names = [
        list(wrapped(shown(candidate.name, bold), bold, 3.0)) for candidate in chart.candidates
    ]
    schemes = [list(wrapped(str(candidate.scheme), mono, 3.0)) for candidate in chart.candidates]
    left = MARGIN + 0.15
    left += max([text_width(line, bold) for lines in names for line in lines]
                + [text_width(line, mono) for lines in schemes for line in lines],
                default=0.0)  # fmt: skip
    across = 4.2
    values = [_value(candidate, candidate is result.best) for candidate in chart.candidates]
    beside = [
        _beside(candidate, chart, across, text_width(said, small))
        for candidate, said in zip(chart.candidates, values, strict=True)
    ]
    # As wide as what stands to the right of marks and bands.
    ends = [
        at + text_width(said, small)
        for (at, align), said in zip(beside, values, strict=True)
        if align == "left"
    ]
    width = left + max([across + 0.25, *ends]) + MARGIN
    inner = width - 2 * MARGIN

    head = "Not identified" if result.best is None else f"Identified: {result.best.name}"
    y = canvas.paragraph(MARGIN, MARGIN, head, font_of(13, bold=True), inner)
    y = canvas.paragraph(MARGIN, y + 0.03, result.conclusion, body, inner)
    if result.best is not None and result.best.correction is not None:
        said = f"It should have been: {result.best.correction}"
        y = canvas.paragraph(MARGIN, y, said, body, inner, color=_WARN)
    if not chart.candidates:
        return canvas.finish(width, y + MARGIN, head)
    top = y + 0.2
    tall = [0.11 + 0.15 * len(own) + 0.13 * len(lines)
            for own, lines in zip(names, schemes, strict=True)]  # fmt: skip
    bottom = top + sum(tall)
    axes = canvas.axes
    for power in chart.ticks:
        x = left + across * chart.place(10.0**power)
        axes.plot([x, x], [top, bottom], color=RULE, linewidth=0.7, zorder=0, scalex=False,
                  scaley=False)  # fmt: skip
        canvas.text(x, bottom + 0.17, f"1e{power}", small, color=SOFT, align="center")
    y = top
    for i, (candidate, height) in enumerate(zip(chart.candidates, tall, strict=True)):
        middle = y + height / 2
        best = candidate is result.best
        band = across * chart.place(candidate.tolerance)
        axes.add_patch(Polygon(
            [(left, middle - 0.11), (left + band, middle - 0.11), (left + band, middle + 0.11),
             (left, middle + 0.11)],
            facecolor="#e3f4ea", edgecolor=_GOOD, linewidth=0.6, zorder=1, gid=f"tolerance-{i}",
        ))  # fmt: skip
        x = left + across * chart.place(candidate.residual)
        marker, color, size = ("*", _GOOD, 12) if best else (
            ("o", _GOOD, 7) if candidate.fits else ("x", _BAD, 7))  # fmt: skip
        axes.plot([x], [middle], marker=marker, color=color, markersize=size, markeredgewidth=1.8,
                  linestyle="none", zorder=6, scalex=False, scaley=False, clip_on=False,
                  gid=f"residual-{i}")  # fmt: skip
        line = y + 0.17
        for said in names[i]:
            canvas.text(left - 0.15, line, said, bold if best else body, align="right",
                        gid=f"name-{i}")  # fmt: skip
            line += 0.15
        for said in schemes[i]:
            canvas.text(left - 0.15, line - 0.01, said, mono, color=SOFT, align="right")
            line += 0.13
        at, align = beside[i]
        canvas.text(left + at, middle + 0.04, values[i], small, color=INK if best else SOFT,
                    align=align, gid=f"value-{i}")  # fmt: skip
        y += height
    y = bottom + 0.26
    keys = "Largest difference from y, on a logarithmic axis. Green band: what rounding explains. "
    keys += "Star: the best, circle: fits, cross: does not."
    if chart.left_out:
        keys += f" {count(chart.left_out, 'further candidate')} left out."
    y = canvas.paragraph(MARGIN, y, keys, small, inner, color=SOFT)
    return canvas.finish(width, y + MARGIN - 0.05, head)


# --------------------------------------------------------------------------------------------
# audit

_SEVERITIES = {"error": ("✗", _BAD), "warning": ("!", _WARN), "note": ("i", SOFT)}

MOST_ROWS = 40
"""A strip shows so many kinds of norms: those that take the most time, in the model's order."""


def _audit(result: Audit) -> Figure:
    """The norms of a model as a strip: what each computes, its share of the time, its findings."""
    canvas = Canvas()
    bold, body, small = font_of(9, bold=True), font_of(9), font_of(8)
    mono = font_of(8, mono=True)
    kinds = list(alike(result.norms))
    shares = [sum(norm.time_share or 0.0 for norm in norms) for norms in kinds]
    kept = sorted(sorted(range(len(kinds)), key=lambda i: -shares[i])[:MOST_ROWS])
    first, second, third = 2.6, 3.4, 1.7
    width = 2 * MARGIN + first + second + third + 1.7 + 0.6
    columns = [MARGIN, MARGIN + first + 0.2, MARGIN + first + second + 0.4,
               MARGIN + first + second + third + 0.6]  # fmt: skip
    inner = width - 2 * MARGIN
    head = f"{result.model}: {count(len(result.norms), 'normalization')}"
    y = canvas.paragraph(MARGIN, MARGIN, head, font_of(13, bold=True), inner)
    if not kinds:
        return canvas.finish(width, y + MARGIN, head)
    said = f"One forward pass takes {seconds(result.seconds)}."
    y = canvas.paragraph(MARGIN, y, said, body, inner, color=SOFT) + 0.16
    for x, title in zip(
        columns, ("norm", "computes", "share of the time", "findings"), strict=True
    ):
        canvas.text(x, y + 0.1, title, bold, color=SOFT)
    y += 0.17
    most = max([*shares, 1e-12])
    axes = canvas.axes
    for i in kept:
        norms, share = kinds[i], shares[i]
        norm = norms[0]
        axes.plot([MARGIN, width - MARGIN], [y, y], color=RULE, linewidth=0.7, scalex=False,
                  scaley=False)  # fmt: skip
        y += 0.05
        path = folded([one.path or "(the model)" for one in norms])
        many = f"  x{len(norms)}" if len(norms) > 1 else ""
        ends = [canvas.paragraph(columns[0], y, path + many, mono, first)]
        ends[0] = canvas.paragraph(columns[0], ends[0], norm.cls, small, first, color=SOFT)
        scheme = norm.scheme or norm.declared
        words = norm.in_words or ("did not run itself" if norm.shape is None else "not verified")
        color = _GOOD if norm.verified else _WARN if norm.scheme is None else _BAD
        ends.append(canvas.paragraph(columns[1], y, words, body, second, color=color))
        if scheme is not None:
            ends[1] = canvas.paragraph(columns[1], ends[1], str(scheme), mono, second, color=SOFT)
        measured = any(one.time_share is not None for one in norms)
        bar = third * 0.62 * max(share, 0.0) / most
        axes.add_patch(Polygon(
            [(columns[2], y + 0.03), (columns[2] + bar, y + 0.03), (columns[2] + bar, y + 0.15),
             (columns[2], y + 0.15)],
            facecolor=ACCENT, edgecolor="none", gid=f"share-{i}",
        ))  # fmt: skip
        said = f"{100 * share:.1f} %" if measured else "-"
        canvas.text(columns[2] + bar + 0.06, y + 0.13, said, body, gid=f"share-text-{i}")
        end = y
        for severity, code in dict.fromkeys((f.severity, f.code) for f in norm.findings):
            sign, color = _SEVERITIES[severity]
            end = canvas.paragraph(columns[3], end, f"{sign} {code}", small, 1.7, color=color)
        y = max([*ends, end, y + 0.2]) + 0.05
    if len(kinds) > len(kept):
        left_out = count(len(kinds) - len(kept), "kind")
        said = f"{left_out} of norms that take less time left out."
        y = canvas.paragraph(MARGIN, y, said, small, inner, color=SOFT)
    if result.findings:
        y = canvas.paragraph(MARGIN, y + 0.14, "Findings", bold, inner)
    for found, where in worst_first(result.findings):
        sign, color = _SEVERITIES[found.severity]
        title = f"{sign} {found.code}{'  ' if where else ''}{'; '.join(where)}"
        y = canvas.paragraph(MARGIN, y + 0.03, title, bold, inner, color=color)
        y = canvas.paragraph(
            MARGIN + 0.14, y, f"{found.message} {found.remedy}", small, inner - 0.14
        )
    return canvas.finish(width, y + MARGIN - 0.05, head)


_FIGURES: dict[str, Callable[[Any], Figure]] = {
    "explanation": _explanation,
    "comparison": _comparison,
    "identification": _identification,
    "audit": _audit,
    "benchmark": benchmarked.figure,
}
