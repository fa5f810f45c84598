"""What pages are made of: pieces of HTML, everything that is said escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from .folding import pieces

__all__ = [
    "Cell",
    "Page",
    "code",
    "file_text",
    "filled",
    "finite",
    "listed",
    "number",
    "path",
    "severe",
    "signed",
    "table",
]

Page = tuple[str, str, dict[str, Any], tuple[str, ...]]
"""Title, body, the script's data and the names of its files."""


def code(text: object) -> str:
    """A text of the notation or of a program."""
    return f"<code>{escape(str(text))}</code>"


Cell = str | tuple[str, float | str | None]
"""A cell's HTML, with what it is sorted by where that is not its text."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    numbers: Sequence[int] = (),
    sortable: bool = False,
    stack: bool = True,
    caption: str = "",
    name: str = "",
    marks: Sequence[Mapping[str, str]] = (),
) -> str:
    """A table; the first cell of each row names it. Its rows are cards on narrow screens.

    ``name`` is its id, and ``marks`` are data attributes of each row, by which forms find it.
    """

    def cell(column: int, cell: Cell) -> str:
        text, value = cell if isinstance(cell, tuple) else (cell, "")
        tag, role = ("td", "cell") if column else ('th scope="row"', "rowheader")
        kind = ' class="number"' if column in numbers else ""
        order = "" if value == "" else f' data-value="{_sorted_by(value)}"'
        # Roles said again: on narrow screens rows are blocks, whose heads stand in data-head.
        return (
            f'<{tag} role="{role}"{kind}{order} data-head="{escape(heads[column])}">'
            f"<div>{text}</div></{tag[:2]}>"
        )

    def head(column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        said = escape(text)
        if sortable:
            said = f'<button type="button">{said}<span aria-hidden="true"></span></button>'
        return f'<th scope="col" role="columnheader"{kind}>{said}</th>'

    def marked(place: int) -> str:
        named = marks[place].items() if marks else ()
        return "".join(f' data-{key}="{escape(value)}"' for key, value in named)

    body = "".join(
        f'<tr role="row"{marked(place)}>'
        f"{''.join(cell(column, one) for column, one in enumerate(row))}</tr>"
        for place, row in enumerate(rows)
    )
    kinds = " ".join(["data", *(["sortable"] if sortable else []), *(["stack"] if stack else [])])
    title = f'<caption class="hidden">{escape(caption)}</caption>' if caption else ""
    own = f' id="{name}"' if name else ""
    said = "".join(head(column, text) for column, text in enumerate(heads))
    return (
        f'<div class="scroll"><table class="{kinds}" role="table"{own}>{title}'
        f'<thead role="rowgroup"><tr role="row">{said}</tr>'
        f'</thead><tbody role="rowgroup">{body}</tbody></table></div>'
    )


def _sorted_by(value: float | str | None) -> str:
    return "" if value is None else escape(str(value))


def listed(sentences: Iterable[str]) -> str:
    """Sentences, each a point."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def number(value: float) -> str:
    """A number as it is said."""
    return f"{value:.6g}"


def signed(kind: str, sign: str, word: str) -> str:
    """A word in its colour, with a sign that says the same without colour."""
    return (
        f'<span class="{kind} nowrap"><span aria-hidden="true">{sign} </span>{escape(word)}</span>'
    )


@cache
def file_text(name: str) -> str:
    """A file of this room."""
    return (Path(__file__).parent / name).read_text("utf-8").strip()


def filled(name: str, **pieces: str) -> str:
    """A file with pieces of HTML in the places of its {{names}}."""
    # One pass: what is filled in is not looked at again, whatever it holds.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], file_text(name))


def finite(value: float) -> float | None:
    """The value where JSON has it."""
    return value if math.isfinite(value) else None


def path(said: str) -> str:
    """A path that may be broken between its pieces."""
    return f"<code>{'<wbr>'.join(map(escape, pieces(said)))}</code>"


_SEVERITIES = {"error": ("bad", "✗"), "warning": ("warn", "!"), "note": ("soft", "i")}


def severe(severity: str, word: str) -> str:
    """A word in the colour and with the sign of a finding's severity."""
    return signed(*_SEVERITIES[severity], word)
