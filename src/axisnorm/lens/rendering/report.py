"""The results of the lens as text for a terminal: each kind of result has a function here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...presets import PRESETS
from ..explain import axis_dimensions, axis_names, group_number, part_names, partition
from ..identify import kind_of_mean
from .audited import audit, differences, rivals, swap
from .benchmarked import benchmark
from .console import (
    Fitting,
    Flowing,
    Group,
    Padding,
    RenderableType,
    Table,
    Text,
    Unbroken,
    beside,
    section,
    to_text,
)
from .palette import FILLS, letters
from .wording import count, followed, off, shared_statistic

if TYPE_CHECKING:
    from ...scheme import Sizes
    from ..compare import Comparison
    from ..explain import Explanation
    from ..identifying.identification import Candidate, Identification
    from ..presets import Presets
    from ..worked import Worked

__all__ = [
    "audit",
    "benchmark",
    "beside",
    "comparison",
    "differences",
    "explanation",
    "identification",
    "picture",
    "presets",
    "rivals",
    "swap",
    "to_text",
]

_SHOWN_GROUPS = 5
"""How many groups' means are written out."""

_ROOM_FOR_STEPS = 64
"""On so many columns the numbers of a calculation may be broken into lines."""

_ROOM_FOR_CANDIDATES = 64
"""On so many columns names and schemes may be broken into lines."""

_SHOWN_CANDIDATES = 14
"""How many candidates of an identification are listed."""

_DRAWN_IN_FULL = 96
"""Up to how many elements all pictures of a comparison are drawn, however narrow the console."""

_WRITTEN_OUT = 32
"""How many elements of an example are written out."""

_LABELLED = 6
"""How many of the axes that count panels are named over a panel."""

_GAP = -1
"""Stands for the indices of an axis that are left out of a picture."""


# --------------------------------------------------------------------------------------------
# explain


def explanation(result: Explanation) -> RenderableType:
    """One scheme on one shape."""
    parts: list[RenderableType] = [_head(result), Text(), picture(result), Text()]
    parts.append(section("Formula"))
    parts.append(Padding(Text(result.formula, style="bold"), (0, 0, 0, 2)))
    if result.worked is not None:
        parts += [Text(), section("Its means and variances" if result.scheme.center else
                                   "Its groups")]  # fmt: skip
        parts.append(Padding(_moments(result), (0, 0, 0, 2)))
        parts += [Text(), section("One group by hand")]
        parts.append(Padding(_by_hand(result, result.worked), (0, 0, 0, 2)))
    parts += [Text(), section("The same statistics at this shape")]
    parts.append(Padding(_equivalents(result), (0, 0, 0, 2)))
    parts.append(Text())
    route = Text.assemble(("Engine  ", "dim"), result.route.engine, f" ({result.route.reason})")
    parts.append(route)
    return Group(*parts)


def _head(result: Explanation) -> RenderableType:
    names, expanded = part_names(result.sizes), result.sizes.expanded
    axes = []
    for own in axis_dimensions(result.sizes):
        said = " ".join(f"{names[i]} {expanded[i]}" for i in own)
        axes.append(f"({said})" if len(own) > 1 else said)
    title = Text.assemble((str(result.scheme), "bold"))
    if "[" not in result.subject:
        title = Text.assemble((result.subject, "bold"), "  ", (str(result.scheme), "bold cyan"))
    title.append(f"   on {result.shape}", style="dim")
    facts = Table.grid(padding=(0, 2))
    if axes:
        pieces = [f"{axis} x " for axis in axes[:-1]] + axes[-1:]
        facts.add_row(Text("axes", style="dim"), Unbroken(tuple(map(Text, pieces))))
    shared = f"{count(result.group_size, 'element')} each"
    facts.add_row(
        Text("shared", style="dim"),
        Text.assemble(
            (f"{result.num_groups:,}", "bold"),
            f" x {shared_statistic(result.scheme)}, over {shared}",
        ),
    )
    if result.scheme.affine:
        where = ", ".join(_affine_names(result))
        vary = "they vary" if len(result.parameter_names) > 1 else "it varies"
        said = f"shape {result.affine_shape}: {vary} along {where}"
    else:
        said = "none"
    there = result.parameter_names or ("weight", "bias")
    facts.add_row(Text(", ".join(there), style="dim"), Text(said))
    return Group(title, facts)


def _affine_names(result: Explanation) -> list[str]:
    return [part.name for part in result.sizes.layout.parts
            if part.name in result.scheme.affine.split()]  # fmt: skip


def _equivalents(result: Explanation) -> RenderableType:
    if not result.equivalents:
        return Text("no named norm", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for equivalent in result.equivalents:
        said = Text("the same in everything", style="green")
        if not equivalent.same:
            said = Text("; ".join(equivalent.differences))
        table.add_row(Text(equivalent.name, style="bold"), said)
    return table


def _moments(result: Explanation) -> RenderableType:
    """The statistics of the first groups and of the last."""
    shape = result.statistics_shape
    places = list(range(min(result.num_groups, _SHOWN_GROUPS)))
    if len(places) < result.num_groups:
        places[-1] = result.num_groups - 1
    centred = result.scheme.center
    spread = "variance" if centred or result.scheme.scale == "std" else "mean square"
    spread = "sum of squares" if result.scheme.scale == "l2" else spread
    lines = [("group", [str([int(i) for i in np.unravel_index(p, shape)]) for p in places])]
    for name, values in (("mean", result.mean if centred else None), (spread, result.var)):
        if values is not None:
            lines.append((name, [_number(float(values.flat[place])) for place in places]))
    table, narrow = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for name, cells in lines:
        if len(places) < result.num_groups:
            cells.insert(len(cells) - 1, "...")
        style = "dim" if name == "group" else ""
        table.add_row(Text(name, style="dim"), *[Text(cell, style=style) for cell in cells])
    narrow.add_row(*[Text(name, style="dim") for name, _ in lines])
    for group, *own in zip(*(cells for _, cells in lines), strict=True):
        narrow.add_row(Text(group, style="dim"), *map(Text, own))
    return Fitting(table, Group(narrow))


def _by_hand(result: Explanation, worked: Worked) -> RenderableType:
    """Every line of the calculation, then the followed element with its numbers put in."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    group = "group A" if not worked.group else f"group A, {list(worked.group)}"
    rows = [(group, _values(worked.elements, worked.size), "")]
    for step in worked.steps:
        size = worked.size if len(step.values) > 1 else 1
        rows.append((step.name, _values(step.values, size), step.how))
    narrow: list[RenderableType] = []
    for name, values, how in rows:
        table.add_row(Text(name, style="dim"), values, how)
        narrow.append(Text(f"{name}: {how}" if how else name, style="dim"))
        narrow.append(Padding(Text(values), (0, 0, 0, 2)))
    element = [
        Text.assemble((f"{name}  ", "dim"), (said, "bold"))
        for name, said in followed(worked, result.scheme, _number)
    ]
    return Group(Fitting(table, Group(*narrow), _ROOM_FOR_STEPS), *element)


def _values(values: Sequence[float], size: int) -> str:
    """Up to six numbers, and how many more there are; one alone with more digits, to show eps."""
    if size == 1:
        return f"{values[0]:.7g}"
    shown = ", ".join(_number(value) for value in values[:6])
    return shown if size <= 6 else f"{shown}, ... ({size - 6:,} more)"


def _number(value: float) -> str:
    return f"{value:.5g}"


# --------------------------------------------------------------------------------------------
# compare


def comparison(result: Comparison) -> RenderableType:
    """Two schemes on one shape, part by part."""
    parts: list[RenderableType] = [_compared(result), Text()]
    parts += [_compared_pictures(result), Text()]
    parts.append(_verdicts(result))
    if result.agreements:
        parts += [Text(), section("Where they agree")]
        for agreement in result.agreements:
            tried = f"  (tried on {agreement.shape}: {off(agreement.largest_difference)} apart)"
            said = Text.assemble(agreement.condition, (tried, "dim"))
            parts.append(Padding(said, (0, 0, 0, 2)))
    parts += [Text(), _example(result)]
    parts += [Text(), section("The family at this shape"), Padding(_family(result), (0, 0, 0, 2))]
    return Group(*parts)


def _compared(result: Comparison) -> RenderableType:
    different = [part.name for part in result.parts if part.verdict == "different"]
    verdict = Text("the same in everything", style="bold green")
    if different:
        words = (
            ", ".join(different[:-1]) + f" and {different[-1]}" if different[1:] else different[0]
        )
        verdict = Text(f"different in {words}", style="bold yellow")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, side in (("a", result.a), ("b", result.b)):
        said = Text(str(side.scheme), style="bold cyan")
        if side.subject != str(side.scheme):
            said = Text.assemble((f"{side.subject}  ", "bold"), said)
        table.add_row(Text(name, style="bold"), said)
    said = Text.assemble((f"on {result.shape}: ", "dim"), verdict)
    if result.largest_difference is not None:
        apart = f"; on this tensor at most {off(result.largest_difference)} apart"
        said.append(apart, style="bold")
    return Group(table, said)


def _compared_pictures(result: Comparison) -> RenderableType:
    """What shares a mean, once where both share alike, and the weights where they differ."""
    sides = [("a", result.a), ("b", result.b)]
    columns: list[list[RenderableType]] = [
        [picture(side, title=_picture_title(name, side), affine=False)] for name, side in sides
    ]
    alike = result.statistics == "equal" and result.a.statistics_shape == result.b.statistics_shape
    if alike:
        title = _picture_title("a and b", result.a)
        columns = [[picture(result.a, title=title, affine=False)], [Text()]]
    vary = [partition(side.sizes, side.sizes.layout.affine) for _, side in sides]
    if result.affine == "different" and vary[0] != vary[1] and 0 not in result.shape:
        for column, (name, side) in zip(columns, sides, strict=True):
            column.append(_weights(name, side))
    # One below the other, four excerpts of large tensors would be a wall.
    large = math.prod(result.shape) > _DRAWN_IN_FULL and not alike
    narrow = [column[:1] if large else column for column in columns]
    return _in_columns(columns, [[one for one in column if one] for column in narrow])


def _weights(name: str, side: Explanation) -> RenderableType:
    if not side.scheme.affine:
        return Text(f"{name}: no weights", style="bold")
    title = f"{name}: weights of shape {side.affine_shape}"
    told = side.sizes.layout.affine
    return _panels(title, side, _sample(side.sizes), told, capital=False, legend=False)


def _in_columns(
    columns: Sequence[Sequence[RenderableType]], narrow: Sequence[Sequence[RenderableType]]
) -> RenderableType:
    """Columns side by side where the console is wide enough, else others below one another."""
    wide = Table.grid(padding=(0, 6))
    for number, row in enumerate(zip(*columns, strict=True)):
        if number:
            wide.add_row()
        wide.add_row(*row)
    below = [part for column in narrow for one in column for part in (one, Text())]
    return Fitting(wide, Group(*below[:-1]))


def _picture_title(name: str, side: Explanation) -> str:
    means = count(side.num_groups, kind_of_mean(side.scheme))
    return f"{name}: {means} of {count(side.group_size, 'element')}"


def _verdicts(result: Comparison) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for part in result.parts:
        color = "green" if part.verdict == "equal" else "yellow"
        said = Text("\n".join(part.sentences), style="dim" if part.verdict == "equal" else "")
        table.add_row(Text(part.name, style="bold"), Text(part.verdict, style=color), said)
    for note in result.notes:
        table.add_row(Text("note", style="bold"), Text(""), Text(note))
    return table


def _example(result: Comparison) -> RenderableType:
    example = result.example
    if example is None:
        return Text("No tensor of this rank tells their outputs apart.", style="dim")
    where = "of another size tells" if result.same else "tells"
    title = section(f"The smallest tensor that {where} them apart")
    title.append(f"   {example.shape} {example.x.dtype}", style="not bold dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("x", example.x)]
    for side in ("a", "b"):
        for word in ("running_mean", "running_var", "weight", "bias", "y"):
            rows.append((f"{word} of {side}", getattr(example, f"{word}_{side}")))
    for name, values in rows:
        if values is not None:
            style = "bold" if name.startswith("y") else ""
            table.add_row(Text(name, style="dim"), Text(_nested(values), style=style))
    parts: list[RenderableType] = [title, Padding(table, (0, 0, 0, 2))]
    if example.best_of:
        other = "b" if example.best_of == "a" else "a"
        said = f"No weight and bias of {example.best_of} come nearer to the output of {other}."
        parts.append(Padding(Text(said, style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _nested(values: Any) -> str:
    """An array in brackets; of a large one the first elements and the last of each axis."""
    if not values.ndim:
        return f"{float(values):.{5 if values.dtype == np.float16 else 4}g}"
    rows = [_nested(row) for row in values]
    if values.size > _WRITTEN_OUT and len(rows) > 4:
        rows = [*rows[:2], "...", rows[-1]]
    return f"[{', '.join(rows)}]"


def _family(result: Comparison) -> RenderableType:
    family = result.family
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("", Text("means of", style="dim"), "", Text("the named norms", style="dim"))
    for place, node in enumerate(family.nodes):
        names = ", ".join(member.name for member in node.members) or "no named norm"
        said = Text(names, style="bold" if node.compared else "")
        inside = [f"({edge.coarser + 1})" for edge in family.edges if edge.finer == place]
        if inside:
            said.append(
                f"\neach group lies inside one of {' and of '.join(inside)}", "not bold dim"
            )
        table.add_row(
            Text(f"({place + 1})", style="dim"),
            Text(f"{node.num_groups:,} of {node.group_size:,}"),
            Text(node.compared, style="bold yellow"),
            said,
        )
    cases = [Text(case.sentence) for case in family.special_cases]
    return Group(table, *([Text(), *cases] if cases else []))


# --------------------------------------------------------------------------------------------
# identify


def identification(result: Identification) -> RenderableType:
    """What was found, what fits as well, what was ruled out, and what would decide."""
    best = result.best
    head = Text.assemble(
        ("input and output ", "dim"), str(result.shape), (f"  {_types(result)}", "dim")
    )
    parts: list[RenderableType] = [head, Text()]
    if best is None:
        parts.append(Text(f"? {result.conclusion}", style="bold yellow"))
    else:
        parts.append(_found(best))
        if best.mistake is not None:
            parts += [Text(), Text(f"! {best.mistake.code}: {best.mistake.sentence}", "bold red")]
            if best.correction is not None:
                meant = Text.assemble(
                    "  It should have been  ", (str(best.correction), "bold cyan")
                )
                parts.append(meant)
    if result.candidates:
        parts += [Text(), section("Candidates"), Padding(_candidates(result), (0, 0, 0, 2))]
    if result.notes:
        parts += [Text(), section("Notes")]
        parts += [Padding(Text(note), (0, 0, 0, 2)) for note in result.notes]
    if result.decisions:
        parts += [Text(), section("What would decide")]
        parts += [Padding(Text(d.sentence), (0, 0, 0, 2)) for d in result.decisions]
    return Group(*parts)


def _types(result: Identification) -> str:
    x, y = result.dtypes
    return x if x == y else f"{x} to {y}"


def _found(best: Candidate) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, said: str | Text) -> None:
        table.add_row(Text(name, style="dim"), said if isinstance(said, Text) else Text(said))

    row("found", Text.assemble((best.name, "bold green"), "   ", (str(best.scheme), "bold cyan")))
    if best.afterwards is not None:
        row("then", Text(best.afterwards.sentence, "bold"))
    if best.norms:
        row("as", ", ".join(best.norms))
    axes = "axis" if len(best.axes) == 1 else "axes"
    row("shared", f"along {axes} {', '.join(map(str, best.axes))}")
    if best.affine_axes:
        said = []
        for name, values, source in (("weight", best.weight, best.weight_from),
                                     ("bias", best.bias, best.bias_from)):  # fmt: skip
            if values is not None:
                said.append(f"{name} {source}, of shape {values.shape}: {_values_said(values)}")
        along = "axis" if len(best.affine_axes) == 1 else "axes"
        where = f"along {along} {', '.join(map(str, best.affine_axes))}"
        row("weight, bias", "\n".join([where, *said]))
    if best.eps_interval is not None:
        eps = "that of the type" if best.scheme.eps is None else f"{best.scheme.eps:g}"
        row("eps", f"{eps}, {_interval(best.eps_interval)}")
    row("off by", f"{off(best.residual)} (rounding explains up to {off(best.tolerance)})")
    row("fitted", count(best.free_parameters, "number"))
    if best.computed_in is not None:
        row("computed in", best.computed_in)
    return table


def _values_said(values: NDArray[np.float64]) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values.ravel()[:4])
    return shown + (", ..." if values.size > 4 else "")


def _interval(interval: tuple[float, float]) -> str:
    low, high = interval
    if high == float("inf"):
        return "not determined" if low == 0 else f"shown to be {low:.3g} or more"
    if high - low < 1e-3 * high:
        return f"shown to within {(high - low) / 2:.1g}"
    return f"shown to lie between {low:.4g} and {high:.4g}"


def _candidates(result: Identification) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    # Where names and schemes would be broken into many lines, numbers stand below them.
    narrow = Table.grid(padding=(0, 2))
    narrow.add_column(no_wrap=True)
    narrow.add_column(overflow="fold")
    for candidate in result.candidates[:_SHOWN_CANDIDATES]:
        mark, color = ("no", "red")
        if candidate.fits:
            mark, color = ("fits", "green")
        if candidate is result.best:
            mark, color = ("BEST", "bold green")
        fitted = count(candidate.free_parameters, "number") if candidate.free_parameters else ""
        said = Text.assemble((candidate.name, ""), (f"  {candidate.scheme}", "dim"))
        far = f"off by {off(candidate.residual)}"
        fitted = f"{fitted} fitted" if fitted else ""
        table.add_row(Text(mark, style=color), said, Text(far), Text(fitted, style="dim"))
        below = Text.assemble(said, "\n", far, (f", {fitted}" if fitted else "", "dim"))
        narrow.add_row(Text(mark, style=color), below)
    more = len(result.candidates) - _SHOWN_CANDIDATES
    if more > 0:
        for rows in (table, narrow):
            rows.add_row(Text(""), Text(f"and {more} more", style="dim"))
    return Fitting(table, Group(narrow), _ROOM_FOR_CANDIDATES)


# --------------------------------------------------------------------------------------------
# presets


def presets(result: Presets) -> RenderableType:
    """Names and schemes, one library after the other."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    homes = [name.split(".")[0].rstrip("0123456789") for name in result.names]
    before = ""
    for name, library in zip(result.names, homes, strict=True):
        home, _, rest = name.partition(".")
        # Models with one norm each stand together.
        section = library if homes.count(library) > 1 else "models"
        if before not in ("", section):
            table.add_row()
        before = section
        scheme = str(PRESETS[name])
        axes, _, fields = scheme.partition("; ")
        said = Text.assemble((axes, "bold cyan"), (f"; {fields}" if fields else "", "none"))
        table.add_row(Text.assemble((f"{home}.", "dim"), (rest, "bold")), said)
    return table


# --------------------------------------------------------------------------------------------
# The picture


def picture(
    result: Explanation, *, title: str | None = None, affine: bool = True, legend: bool = True
) -> RenderableType:
    """Which elements share a mean and which a weight: the same letter, the same colour.

    The last two axes are the rows and columns of a panel, the others count panels. Of large
    shapes a sample is drawn, with dots for what is left out.

    Args:
        title: over the picture of the means.
        affine: draw the picture of the weights too.
        legend: say which axes are rows, columns and panels.
    """
    if 0 in result.shape:
        empty = [n for n, s in zip(axis_names(result.sizes), result.shape, strict=True) if s == 0]
        return Text(f"Nothing to draw: axis {', '.join(empty)} has no elements.", style="dim")
    drawn = _sample(result.sizes)
    if title is None:
        kind = kind_of_mean(result.scheme)
        title = f"The same letter, the same {kind}"
    told = result.statistics_dimensions
    shown = [_panels(title, result, drawn, told, capital=True, legend=legend)]
    if affine and result.scheme.affine:
        shown.append(_panels("The same letter, the same weight", result, drawn,
                             result.sizes.layout.affine, capital=False))  # fmt: skip
    return beside(shown)


def _sample(sizes: Sizes) -> list[list[int]]:
    """For each axis the indices that are drawn, with gaps where some are left out."""
    ndim = len(sizes.shape)
    drawn = []
    for axis, size in enumerate(sizes.shape):
        if axis < ndim - 4:
            first, whole = 1, 1
        elif axis < ndim - 2:
            first, whole = 1, 3
        elif axis == ndim - 2:
            first, whole = (3, 6) if ndim < 4 else (2, 4)
        else:
            first, whole = (6, 10) if ndim < 3 else (3, 7) if ndim < 4 else (2, 4)
        if len(sizes.layout.axes[axis]) > 1:
            # A split axis shows two neighbours, which may share, and the end, which may not.
            first = max(first, 2)
        if size <= whole:
            drawn.append(list(range(size)))
        elif axis < ndim - 4:
            drawn.append([0, _GAP])
        else:
            drawn.append([*range(first), _GAP, size - 1])
    return drawn


def _leads(leading: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """The indices of every panel along its leading axes; those with a gap end with it."""
    if not leading:
        yield ()
        return
    for index in leading[0]:
        if index == _GAP:
            yield (_GAP,)
        else:
            yield from ((index, *rest) for rest in _leads(leading[1:]))


def _panels(
    title: str,
    result: Explanation,
    drawn: Sequence[Sequence[int]],
    told: Sequence[int],
    *,
    capital: bool,
    legend: bool = True,
) -> RenderableType:
    names: dict[int, str] = {}
    found = letters(capital=capital)
    for index in _leads(drawn):
        if _GAP not in index:
            number = group_number(result.sizes, told, index)
            if number not in names:
                names[number] = next(found)
    cell = max(map(len, names.values())) + 2
    axes = axis_names(result.sizes)
    ndim = len(drawn)
    rows = drawn[-2] if ndim > 1 else [0]
    columns = drawn[-1] if ndim else [0]
    leading = drawn[: max(ndim - 2, 0)]
    order = {number: i for i, number in enumerate(names)}

    def panel(lead: tuple[int, ...]) -> RenderableType:
        label = ", ".join(f"{axes[k]} {i}" for k, i in enumerate(lead))
        if len(lead) > _LABELLED:
            # Of the others the first index alone is drawn.
            last = [(axes[k], lead[k]) for k in range(len(lead) - _LABELLED, len(lead))]
            label = "..., " + ", ".join(f"{axis} {i}" for axis, i in last)
        lines = [Text(label, style="dim", no_wrap=True)] if lead else []
        for row in rows:
            line = Text(no_wrap=True, overflow="crop")
            for column in columns:
                if _GAP in (row, column):
                    text = "..." if column == _GAP and row != _GAP else "."
                    line.append(text.center(cell), style="dim")
                    continue
                index = (*lead, row, column)[-ndim:] if ndim else ()
                number = group_number(result.sizes, told, index)
                fill = FILLS[order[number] % len(FILLS)]
                line.append(names[number].center(cell), style=f"bold black on {fill}")
            lines.append(line)
        return Group(*lines)

    along = Text(style="dim")
    if ndim > 1:
        along.append(f"rows {axes[-2]} ({result.shape[-2]}), ")
    if ndim:
        along.append(f"columns {axes[-1]} ({result.shape[-1]})")
    for k in range(len(leading)):
        along.append(f", {axes[k]} ({result.shape[k]})")
    grid = Table.grid(padding=(0, 2))
    dots = Text("\n...", style="dim")
    outer, inner = leading[:-1], leading[-1:]
    below: list[RenderableType] = []
    left_out = False
    for lead in _leads(outer):
        # Several gaps after one another are one.
        if _GAP in lead:
            if not left_out:
                grid.add_row(Text("...", style="dim"))
                below.append(Text("...", style="dim"))
            left_out = True
            continue
        left_out = False
        cells: list[RenderableType] = []
        for last in inner[0] if inner else [0]:
            cells.append(dots if last == _GAP else panel((*lead, last) if inner else ()))
        grid.add_row(*cells)
        below.append(Flowing(tuple(cells)))
    heading = Text(title, style="bold")
    if any(_GAP in indices for indices in drawn):
        heading.append("  (an excerpt)", style="dim")
    panels = Fitting(grid, Group(*below))
    return Group(heading, along, panels) if legend else Group(heading, panels)
