"""What reports for a terminal are made of: rich's parts, and two of our own."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

try:
    from rich import box
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.padding import Padding
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Reports are drawn with rich. It is not installed. Run: pip install 'axisnorm[lens]'",
        name=error.name,
    ) from error

from .wording import visible

__all__ = [
    "Console",
    "ConsoleOptions",
    "Fitting",
    "Flowing",
    "Group",
    "Measurement",
    "Padding",
    "RenderResult",
    "RenderableType",
    "Table",
    "Text",
    "Unbroken",
    "beside",
    "box",
    "section",
    "to_text",
]

PREFERRED_WIDTH = 32
"""Columns that pieces may take in a table before they are broken into lines."""


def to_text(
    renderable: RenderableType, *, width: int | None = None, color: bool | None = None
) -> str:
    """The renderable as text for a terminal of ``width`` columns."""
    if color is None:
        # Standard output is None where it was closed before the program began.
        color = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(
        file=io.StringIO(),
        width=None if width is None else max(width, 1),
        force_terminal=color,
        no_color=not color,
        color_system="auto" if color else None,
        highlight=False,
        legacy_windows=False,
        # A terminal whose size nobody knows is said to have none.
        _environ={name: value for name, value in os.environ.items()
                  if (name, value) != ("COLUMNS", "0")},
    )  # fmt: skip
    with console.capture() as captured:
        console.print(_Visible(renderable))
    lines = captured.get().splitlines()
    return "\n".join(line if color else line.rstrip() for line in lines)


@dataclass(frozen=True)
class _Visible:
    """A report in which no name steers the terminal."""

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.shown, options):
            yield Segment(visible(segment.text), segment.style, segment.control)


def section(title: str) -> Text:
    """The head of a part of a report."""
    return Text(title, style="bold cyan")


@dataclass(frozen=True)
class Unbroken:
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
        wanted = max(*widths, min(sum(widths), PREFERRED_WIDTH))
        return Measurement(max(widths), wanted).with_maximum(options.max_width)


@dataclass(frozen=True)
class Fitting:
    """The first of two arrangements where the console is wide enough, else the second."""

    wide: Table
    narrow: Group
    enough: int = 1000
    """On so many columns the first is taken even if its lines have to be broken."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= self.enough:
            yield self.wide
            return
        needed = Measurement.get(console, options.update(max_width=1000), self.wide).maximum
        yield self.wide if needed <= options.max_width else self.narrow

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        wide = Measurement.get(console, options, self.wide).maximum
        return Measurement(Measurement.get(console, options, self.narrow).minimum, wide)


@dataclass(frozen=True)
class Flowing:
    """Parts side by side, as many as the console is wide enough for, the rest below."""

    parts: tuple[RenderableType, ...]
    gap: int = 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line: list[RenderableType] = []
        used = 0
        for part in self.parts:
            own = Measurement.get(console, options, part).maximum
            if line and used + self.gap + own > options.max_width:
                yield self._row(line)
                line, used = [], 0
            used += own + (self.gap if line else 0)
            line.append(part)
        yield self._row(line)

    def _row(self, line: Sequence[RenderableType]) -> Table:
        row = Table.grid(padding=(0, self.gap))
        row.add_row(*line)
        return row

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [Measurement.get(console, options, part).maximum for part in self.parts]
        return Measurement(max(widths), sum(widths) + self.gap * (len(widths) - 1))


def beside(shown: Sequence[RenderableType], *, gap: int = 6) -> RenderableType:
    """Side by side where the console is wide enough, else one below the other."""
    if len(shown) == 1:
        return shown[0]
    wide = Table.grid(padding=(0, gap))
    wide.add_row(*shown)
    below = [part for one in shown for part in (one, Text())]
    return Fitting(wide, Group(*below[:-1]))
