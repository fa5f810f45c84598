"""Benchmarks, for a terminal, as a page, and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from .markup import Cell, Page, code, table
from .wording import count, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..bench import Benchmark, Measurement, Timed
    from .console import RenderableType

__all__ = ["benchmark", "figure", "page"]


def benchmark(result: Benchmark) -> RenderableType:
    """The times in each type and direction, what they say, and what ran."""
    from .console import Group, Padding, Table, Text, section

    title = Text.assemble((result.scheme, "bold"))
    if result.subject != result.scheme:
        title = Text.assemble((result.subject, "bold"), "  ", (result.scheme, "bold cyan"))
    title.append(f"   on {_shape(result)}", style="dim")
    parts: list[RenderableType] = [title]
    for one in result.measurements:
        times = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "left"):
            times.add_column(justify=justify, no_wrap=True)
        times.add_column(justify="right")
        times.add_column(justify="right")
        times.add_row("", *(Text(head, style="dim") for head in _HEADS))
        for timed in one.calls:
            name, *cells = _row(timed)
            ratio = timed.ratio.median if timed.ratio else 1.0
            color = "green" if ratio > 1 else "yellow"
            style = f"bold {color}" if timed.ratio else ""
            times.add_row(Text(name, style="bold"), *cells[:-1], Text(cells[-1], style=style))
        said = [Text(sentence) for sentence in one.conclusions]
        if not one.agree:
            said[-1].stylize("bold yellow")
        parts += [Text(), section(f"{one.dtype}, {one.direction}")]
        parts += [Padding(times, (0, 0, 0, 2)), Padding(Group(*said), (0, 0, 0, 2))]
    calls = Table.grid(padding=(0, 2))
    calls.add_column(no_wrap=True)
    calls.add_column(overflow="fold")
    for name, written, where in _calls(result):
        calls.add_row(Text(name, style="bold"), Text.assemble(written, (where, "dim")))
    parts += [Text(), section("What ran"), Padding(calls, (0, 0, 0, 2))]
    parts += [Text(), *(Text(line, style="dim") for line in _circumstances(result))]
    return Group(*parts)


_HEADS = ("median", "middle half", "copies", "times as fast")


def _row(timed: Timed) -> tuple[str, str, str, str, str]:
    low, high = seconds(timed.seconds.low), seconds(timed.seconds.high)
    number_low, unit = low.split()
    short = f"{number_low} - {high}" if high.endswith(f" {unit}") else f"{low} - {high}"
    ratio = f"{timed.ratio.median:.2f}" if timed.ratio else ""
    return _name(timed), seconds(timed.seconds.median), short, (
        f"{timed.copies:.2f}"), ratio  # fmt: skip


def _name(timed: Timed) -> str:
    """Of a scheme's own function its name, so that its row is not taken for normalize's."""
    return timed.code.partition("(")[0] if timed.name == "named" else timed.name


def _shape(result: Benchmark) -> str:
    return f"{result.shape}, channels last" if result.channels_last else str(result.shape)


def _calls(result: Benchmark) -> Iterator[tuple[str, str, str]]:
    """Each call once, in the order of the tables, with where it ran if not everywhere."""
    found: dict[str, dict[str, list[Measurement]]] = {}
    for one in result.measurements:
        for timed in one.calls:
            found.setdefault(_name(timed), {}).setdefault(timed.code, []).append(one)
    for name, codes in found.items():
        for written, ran in codes.items():
            where = ", ".join(_where(ran, result.measurements))
            yield name, written, f"   in {where}" if len(codes) > 1 else ""


def _where(ran: Sequence[Measurement], all_of_them: Sequence[Measurement]) -> list[str]:
    """The types alone where a call is of both directions, the directions where of all types."""
    for attribute in ("dtype", "direction"):
        values = dict.fromkeys(getattr(one, attribute) for one in ran)
        if [one for one in all_of_them if getattr(one, attribute) in values] == list(ran):
            return list(values)
    return [f"{one.dtype} {one.direction}" for one in ran]


def _circumstances(result: Benchmark) -> Iterator[str]:
    if result.route.engine == "reference":
        yield f"axisnorm has no kernel here ({result.route.reason}): its reference computes this."
    noisy = sum(one.noisy_rounds for one in result.measurements)
    if noisy:
        yield (
            f"Other processes used the processor during {count(noisy, 'round')}: times are "
            "steadier when nothing else runs."
        )
    here = result.machine
    threads = count(here["threads"], "thread")
    isa = f", instruction set {here['instruction_set']}" if here["instruction_set"] else ""
    yield f"{here['cpu']}, {threads} of {here['cores']} cores{isa}"
    names = {"axisnorm": "axisnorm", "torch": "torch", "numpy": "NumPy", "python": "Python"}
    versions = [f"{said} {here[name]}" for name, said in names.items() if here[name]]
    yield f"{', '.join(versions)}; {here['date']}"


def page(result: Benchmark) -> Page:
    """The same as a page."""
    title = f"{result.subject} on {_shape(result)}"
    named = "" if result.subject == result.scheme else f" {code(result.scheme)}"
    head = code(result.subject) if not named else escape(result.subject)
    body = [
        f"<h1>{head}{named}</h1>",
        f'<p class="soft">How fast it is on a tensor of shape {escape(_shape(result))}.</p>',
    ]
    for one in result.measurements:
        rows: list[Sequence[Cell]] = [
            (*map(escape, _row(timed)), code(timed.code)) for timed in one.calls
        ]
        what = f"{one.dtype}, {one.direction}"
        body.append(f"<h2>{escape(what)}</h2>")
        body.append(table(("timed", *_HEADS, "what ran"), rows, numbers=(1, 3, 4), caption=what))
        body.append("".join(f"<p>{escape(sentence)}</p>" for sentence in one.conclusions))
    body += [f'<p class="note">{escape(line)}</p>' for line in _circumstances(result)]
    return title, "\n".join(body), {}, ()


BAR = 3.4
"""Inches of the longest bar."""


def figure(result: Benchmark) -> Figure:
    """The times as bars, on a scale for each measurement; half of the rounds as lines."""
    from matplotlib.patches import Polygon

    from .canvas import ACCENT, INK, MARGIN, RULE, SOFT, Canvas, font_of, text_width

    canvas = Canvas()
    axes = canvas.axes
    bold, body, small = font_of(9.5, bold=True), font_of(9.5), font_of(8.5)
    names = [_name(timed) for one in result.measurements for timed in one.calls]
    left = MARGIN + max(text_width(name, bold) for name in names) + 0.12
    width = left + BAR + 1.9 + MARGIN
    inner = width - 2 * MARGIN
    head = f"{result.subject} on {_shape(result)}"
    y = canvas.paragraph(MARGIN, MARGIN, head, font_of(13, bold=True), inner)
    for place, one in enumerate(result.measurements):
        y = canvas.paragraph(MARGIN, y + 0.12, f"{one.dtype}, {one.direction}", bold, inner) + 0.04
        longest = max(timed.seconds.high for timed in one.calls)
        for timed in one.calls:
            median, low, high = (BAR * value / longest for value in timed.seconds)
            color = ACCENT if timed.ratio else RULE
            axes.add_patch(Polygon(
                [(left, y), (left + median, y), (left + median, y + 0.16), (left, y + 0.16)],
                facecolor=color, edgecolor="none", gid=f"time-{place}-{timed.name}",
            ))  # fmt: skip
            axes.plot([left + low, left + high], [y + 0.08] * 2, color=INK, linewidth=1.2, zorder=3,
                      scalex=False, scaley=False)  # fmt: skip
            canvas.text(left - 0.12, y + 0.13, _name(timed), body, align="right")
            said = seconds(timed.seconds.median)
            if timed.ratio:
                said += f"   {timed.ratio.median:.2f} times as fast"
            canvas.text(left + max(median, high) + 0.08, y + 0.13, said, small)
            y += 0.22
    for line in _circumstances(result):
        y = canvas.paragraph(MARGIN, y + 0.06, line, small, inner, color=SOFT)
    return canvas.finish(width, y + MARGIN - 0.05, head)
