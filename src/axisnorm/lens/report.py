"""The results of the lens as text for a terminal. The only renderer: results are data."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

try:
    from rich import box
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Reports are drawn with rich. It is not installed. Run: pip install 'axisnorm[lens]'",
        name=error.name,
    ) from error

from .explain import axis_dimensions, axis_names, part_names
from .identify import kind_of_mean

if TYPE_CHECKING:
    from ..scheme import Sizes
    from .audit import Audit, Norm
    from .explain import Explanation, Worked
    from .findings import Finding
    from .swap import Swap

__all__ = ["audit", "beside", "explanation", "picture", "rivals", "swap", "to_text"]

# Twelve fills on which black letters read, neighbours far apart. Letters say the same.
_FILLS = (
    "#8ecae6", "#ffb703", "#95d5b2", "#f4978e", "#cdb4db", "#ffe066",
    "#a0c4ff", "#e9a36b", "#b7e4c7", "#ffadd6", "#b8c0ff", "#d4d97a",
)  # fmt: skip

_PATH_WIDTH = 32
"""Columns that a path may take in a table before it is broken at its dots."""

_GAP = -1
"""Stands for the indices of an axis that are left out of a picture."""


def to_text(
    renderable: RenderableType, *, width: int | None = None, color: bool | None = None
) -> str:
    """The renderable as text for a terminal of ``width`` columns."""
    if color is None:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="auto" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(renderable)
    lines = captured.get().splitlines()
    return "\n".join(line if color else line.rstrip() for line in lines)


# --------------------------------------------------------------------------------------------
# explain


def explanation(result: Explanation) -> RenderableType:
    """One scheme on one shape."""
    parts: list[RenderableType] = [_head(result), Text(), picture(result), Text()]
    parts.append(_section("Formula"))
    parts.append(Padding(Text(result.formula, style="bold"), (0, 0, 0, 2)))
    if result.worked is not None:
        parts += [Text(), _section("One group by hand")]
        parts.append(Padding(_by_hand(result, result.worked), (0, 0, 0, 2)))
    parts += [Text(), _section("The same statistics at this shape")]
    parts.append(Padding(_equivalents(result), (0, 0, 0, 2)))
    parts.append(Text())
    route = Text.assemble(("Engine  ", "dim"), result.route.engine, f" ({result.route.reason})")
    parts.append(route)
    return Group(*parts)


def _section(title: str) -> Text:
    return Text(title, style="bold cyan")


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
        facts.add_row(Text("axes", style="dim"), _Unbroken(tuple(map(Text, pieces))))
    means = "mean and variance" if result.scheme.center else "root mean square"
    if result.scheme.scale == "l2":
        means = "length"
    kind = f"running {means}" if result.scheme.statistics == "running" else means
    shared = f"{_count(result.group_size, 'element')} each"
    facts.add_row(
        Text("shared", style="dim"),
        Text.assemble((f"{result.num_groups:,}", "bold"), f" x {kind}, over {shared}"),
    )
    if result.scheme.affine:
        where = ", ".join(_affine_names(result))
        said = f"shape {result.affine_shape}: they vary along {where}"
    else:
        said = "none"
    facts.add_row(Text("weight, bias", style="dim"), Text(said))
    return Group(title, facts)


def _affine_names(result: Explanation) -> list[str]:
    return [part.name for part in result.sizes.layout.parts
            if part.name in result.scheme.affine.split()]  # fmt: skip


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


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


def _by_hand(result: Explanation, worked: Worked) -> RenderableType:
    scheme = result.scheme
    shown = [_number(value) for value in worked.elements[:6]]
    more = len(worked.elements) - len(shown)
    elements = ", ".join(shown) + (f", ... ({more} more)" if more else "")
    rows: list[tuple[str, str]] = [
        (f"group {'A' if not worked.group else 'A, ' + str(list(worked.group))}", elements)
    ]
    if scheme.center:
        rows.append(("mean", _number(worked.mean)))
    rows.append(("variance" if scheme.center else "mean square", _number(worked.var)))
    rows.append(("1 / what divides", _number(worked.rstd)))
    x = f"{_number(worked.x)} - {_number(worked.mean)}" if scheme.center else _number(worked.x)
    where = ", ".join(map(str, worked.index))
    center = f"({x})" if scheme.center else x
    normalized = _number(worked.normalized)
    rows.append((f"x[{where}]", f"{center} * {_number(worked.rstd)} = {normalized}"))
    if worked.weight is not None or worked.bias is not None:
        said = normalized
        if worked.weight is not None:
            offset = f"({scheme.weight_offset:g} + {_number(worked.weight)})"
            said += f" * {offset if scheme.weight_offset else _number(worked.weight)}"
        if worked.bias is not None:
            said += f" + {_number(worked.bias)}"
        rows.append((f"y[{where}]", f"{said} = {_number(worked.y)}"))
    table = Table.grid(padding=(0, 2))
    for name, said in rows:
        table.add_row(Text(name, style="dim"), Text(said))
    return table


def _number(value: float) -> str:
    return f"{value:.5g}"


# --------------------------------------------------------------------------------------------
# audit and swap


def audit(result: Audit) -> RenderableType:
    """Identical norms in one row, what was ruled out, and the findings."""
    kinds = list(_alike(result.norms))
    title = Text.assemble(
        (result.model, "bold"),
        f": {_count(len(result.norms), 'normalization')}",
        (f"   (one forward pass takes {_seconds(result.seconds)})", "dim"),
    )
    if not kinds:
        return title
    parts: list[RenderableType] = [title, Text(), _table(kinds)]
    if any(norm.identification for norm in result.norms):
        parts += [Text(), rivals(result.norms)]
    parts += [Text(), _findings(result.findings)]
    return Group(*parts)


def _table(kinds: Sequence[Sequence[Norm]]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("norm", no_wrap=True, overflow="fold")
    table.add_column("computes", overflow="fold")
    table.add_column("means", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for norms in kinds:
        first = norms[0]
        calls = f", {first.calls} calls" if first.calls > 1 else ""
        name = Group(
            _paths([norm.path for norm in norms]), Text(f"{first.cls}{calls}", style="dim")
        )
        table.add_row(name, _computes(first), _means(first), _share(norms))
    return table


def _paths(paths: Sequence[str]) -> _Unbroken:
    """Paths of one template and how many they are, broken at their dots."""
    said = folded([path or "(the model)" for path in paths])
    # The dots of {0..5} stand together.
    pieces = [Text(piece) for piece in re.split(r"(?<=[^.]\.)(?=[^.])", said)]
    if len(paths) > 1:
        pieces[-1].append(f"  x{len(paths)}", style="bold")
    return _Unbroken(tuple(pieces))


def _computes(norm: Norm) -> Text:
    if norm.shape is None:
        return Text.assemble(("did not run itself", "yellow"), (f"\n{norm.declared}", "dim"))
    if norm.scheme is None:
        return Text.assemble(("not verified", "yellow"), (f"\n{norm.declared or ''}", "dim"))
    color = "green" if norm.verified else "yellow" if norm.center_unclear else "red"
    said = str(norm.scheme)
    if norm.eps_undetermined:
        # Its eps is one of many that fit.
        said = f"{norm.scheme.replace(eps=1e-5)} (eps not determined)"
    return Text.assemble((norm.in_words, color), (f"\n{said}", "dim"))


def _means(norm: Norm) -> Text:
    if norm.num_statistics is None:
        return Text("-", style="dim")
    return Text.assemble(f"{norm.num_statistics:,}", (f"\nof {norm.group_size:,}", "dim"))


def _share(norms: Sequence[Norm]) -> Text:
    shares = [norm.time_share for norm in norms if norm.time_share is not None]
    return Text(f"{100 * sum(shares):.1f} %") if shares else Text("-", style="dim")


def rivals(norms: Sequence[Norm]) -> RenderableType:
    """What the norms were shown not to be, with how far off each would have been."""
    off: dict[str, list[float]] = {}
    unclear: dict[str, int] = {}
    for norm in norms:
        if norm.identification is None or norm.identification.best is None:
            continue
        fits: dict[str, bool] = {}
        least: dict[str, float] = {}
        for candidate in norm.identification.candidates:
            if candidate is norm.identification.best:
                continue
            name = candidate.name
            fits[name] = fits.get(name, False) or candidate.fits
            least[name] = min(least.get(name, candidate.residual), candidate.residual)
        # A norm counts once, also where several candidates have one name.
        for name, fit in fits.items():
            if fit:
                unclear[name] = unclear.get(name, 0) + 1
            else:
                off.setdefault(name, []).append(least[name])
    table = Table.grid(padding=(0, 2))
    # Other means before other formulas, the plainest first.
    means = sorted(off, key=lambda name: (not name.startswith("one "), len(name)))
    for name in [name for name in means if "as declared" not in name][:8]:
        count = len(off[name])
        table.add_row(
            Text(name),
            Text(f"{count} of {len(norms)}", style="dim"),
            Text(f"off by {_off(min(off[name]))}" + (" or more" if count > 1 else "")),
        )
    parts: list[RenderableType] = [
        _section("Ruled out by the numbers"),
        Padding(table, (0, 0, 0, 2)),
    ]
    shown = [norm.identification.best for norm in norms
             if norm.identification and norm.identification.best]  # fmt: skip
    if shown:
        parts.append(Text.assemble(
            "What is said above agrees within ",
            (_off(max(best.residual for best in shown)), "bold green"),
            (f" (rounding explains up to {_off(max(best.tolerance for best in shown))}).", "dim"),
        ))  # fmt: skip
    if unclear:
        said = ", ".join(f"{name} ({count})" for name, count in unclear.items())
        parts.append(Text(f"This input cannot tell from it: {said}.", style="dim"))
    return Group(*parts)


def _off(value: float) -> str:
    return f"{value:.2g}"


def _findings(findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text.assemble(_section("Findings"), "  none")
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.severity, finding.code, finding.message, finding.remedy)
        grouped.setdefault(key, []).append(finding.path)
    order = {"error": 0, "warning": 1, "note": 2}
    colors = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for (severity, code, message, remedy), paths in sorted(
        grouped.items(), key=lambda item: order[item[0][0]]
    ):
        where = "; ".join(folded(group) for group in _same_template(paths) if any(group))
        said = Text.assemble((code, "bold"), f"  {where}\n" if where else "\n", message)
        table.add_row(Text(severity, style=colors[severity]), said.append(f"\n{remedy}", "dim"))
    return Group(_section("Findings"), Padding(table, (0, 0, 0, 2)))


def _alike(norms: Sequence[Norm]) -> Iterator[list[Norm]]:
    """Norms that differ in nothing but numbers in their paths, in order of the first."""
    groups: dict[Any, list[Norm]] = {}
    for norm in norms:
        key = (
            _template(norm.path), norm.cls, norm.declared, norm.scheme, norm.shape, norm.dtype,
            norm.calls, tuple((f.code, f.message) for f in norm.findings),
        )  # fmt: skip
        groups.setdefault(key, []).append(norm)
    yield from groups.values()


def _template(path: str) -> str:
    return ".".join("#" if word.isdigit() else word for word in path.split("."))


def _same_template(paths: Sequence[str]) -> Iterator[list[str]]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_template(path), []).append(path)
    yield from groups.values()


def folded(paths: Sequence[str]) -> str:
    """Paths of one template as one: ``a.0.norm`` and ``a.1.norm`` are ``a.{0..1}.norm``."""
    unique = list(dict.fromkeys(paths))
    if len(unique) == 1:
        return unique[0]
    words = []
    for column in zip(*[path.split(".") for path in unique], strict=True):
        values = sorted({int(word) for word in column if word.isdigit()})
        if not values or len(set(column)) == 1:
            words.append(column[0])
        elif values == list(range(values[0], values[-1] + 1)):
            words.append(f"{{{values[0]}..{values[-1]}}}")
        else:
            words.append(f"{{{','.join(map(str, values))}}}")
    return ".".join(words)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def swap(result: Swap) -> RenderableType:
    """What was replaced, what was left and why, and how far the outputs moved."""
    parts: list[RenderableType] = [
        Text.assemble(
            (result.model, "bold"),
            f": {len(result.replaced)} replaced, {len(result.left)} left. "
            f"Largest difference of the outputs: {_off(result.largest_difference)}",
        )
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="fold")
    table.add_column(overflow="fold")
    done: dict[tuple[str, str, str], list[str]] = {}
    for replaced in result.replaced:
        key = (_template(replaced.path), replaced.before, replaced.after)
        done.setdefault(key, []).append(replaced.path)
    for (_, before, after), paths in done.items():
        table.add_row(Text("replaced", style="green"), _paths(paths),
                      Text(f"{before} -> {after}", style="dim"))  # fmt: skip
    kept: dict[tuple[str, str], list[str]] = {}
    for left in result.left:
        kept.setdefault((_template(left.path), left.reason), []).append(left.path)
    for (_, reason), paths in kept.items():
        table.add_row(Text("left", style="yellow"), _paths(paths), Text(reason))
    return Group(*parts, Padding(table, (0, 0, 0, 2)))


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


def beside(shown: Sequence[RenderableType], *, gap: int = 6) -> RenderableType:
    """Side by side where the console is wide enough, else one below the other."""
    if len(shown) == 1:
        return shown[0]
    wide = Table.grid(padding=(0, gap))
    wide.add_row(*shown)
    below = [part for one in shown for part in (one, Text())]
    return _Fitting(wide, Group(*below[:-1]))


@dataclass(frozen=True)
class _Unbroken:
    """Pieces of text in lines that end only between pieces, unless one is wider than a line."""

    pieces: tuple[Text, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(overflow="fold", no_wrap=False)
        for piece in self.pieces:
            if line and len(line) + len(piece.plain.rstrip()) > options.max_width:
                yield line
                line = Text(overflow="fold", no_wrap=False)
            line.append_text(piece)
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [len(piece) for piece in self.pieces]
        wanted = max(*widths, min(sum(widths), _PATH_WIDTH))
        return Measurement(max(widths), wanted).with_maximum(options.max_width)


@dataclass(frozen=True)
class _Fitting:
    """The first of two arrangements where the console is wide enough, else the second."""

    wide: Table
    narrow: Group

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(max_width=1000), self.wide).maximum
        yield self.wide if needed <= options.max_width else self.narrow


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


def _numbers(result: Explanation, drawn: Sequence[Sequence[int]], told: Sequence[int]) -> Any:
    """The group of every drawn element, without numbering the whole tensor."""
    grids = np.meshgrid(*[np.maximum(i, 0) for i in drawn], indexing="ij", sparse=True)
    expanded = result.sizes.expanded
    number: NDArray[np.int64] = np.zeros([len(i) for i in drawn], dtype=np.int64)
    for own, grid in zip(axis_dimensions(result.sizes), grids, strict=True):
        digits = np.unravel_index(grid, [expanded[i] for i in own])
        for i, digit in zip(own, digits, strict=True):
            if i in told:
                number = number * expanded[i] + digit
    return number


def _letters(capital: bool) -> Iterator[str]:
    alphabet = [chr(ord("A" if capital else "a") + i) for i in range(26)]
    for length in itertools.count(1):
        for word in itertools.product(alphabet, repeat=length):
            yield "".join(word)


def _panels(
    title: str,
    result: Explanation,
    drawn: Sequence[Sequence[int]],
    told: Sequence[int],
    *,
    capital: bool,
    legend: bool = True,
) -> RenderableType:
    numbers = _numbers(result, drawn, told)
    names: dict[int, str] = {}
    letters = _letters(capital)
    for place in np.ndindex(numbers.shape):
        if all(indices[i] != _GAP for indices, i in zip(drawn, place, strict=True)):
            number = int(numbers[place])
            if number not in names:
                names[number] = next(letters)
    cell = max(map(len, names.values())) + 2
    axes = axis_names(result.sizes)
    ndim = len(drawn)
    rows = drawn[-2] if ndim > 1 else [0]
    columns = drawn[-1] if ndim else [0]
    leading = drawn[: max(ndim - 2, 0)]
    order = {number: i for i, number in enumerate(names)}

    def panel(lead: tuple[int, ...]) -> RenderableType:
        label = ", ".join(f"{axes[k]} {leading[k][i]}" for k, i in enumerate(lead))
        lines = [Text(label, style="dim", no_wrap=True)] if lead else []
        for r, row in enumerate(rows):
            line = Text(no_wrap=True, overflow="crop")
            for c, column in enumerate(columns):
                if _GAP in (row, column):
                    text = "..." if column == _GAP and row != _GAP else "."
                    line.append(text.center(cell), style="dim")
                    continue
                place = (*lead, r, c)[-ndim:] if ndim else ()
                number = int(numbers[place])
                fill = _FILLS[order[number] % len(_FILLS)]
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
    for lead in np.ndindex(*[len(i) for i in outer]):
        if any(outer[k][i] == _GAP for k, i in enumerate(lead)):
            if lead[-1:] and outer[-1][lead[-1]] == _GAP:
                grid.add_row(Text("...", style="dim"))
            continue
        cells: list[RenderableType] = []
        for i, index in enumerate(inner[0] if inner else [0]):
            place = (*lead, i) if inner else ()
            cells.append(dots if index == _GAP else panel(place))
        grid.add_row(*cells)
    heading = Text(title, style="bold")
    if any(_GAP in indices for indices in drawn):
        heading.append("  (a sample)", style="dim")
    return Group(heading, along, grid) if legend else Group(heading, grid)
