"""Numbers in words, the same in every kind of report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...scheme import Scheme

if TYPE_CHECKING:
    from ..worked import Worked

__all__ = [
    "count",
    "encodable",
    "followed",
    "forward_times",
    "off",
    "seconds",
    "shared_statistic",
    "visible",
]

_PLAIN = {"─": "-", "━": "-", "✓": "+", "✗": "x", "…": "...", "±": "+-", "≠": "!="}
"""What stands for the signs of a report where the reader's encoding has none."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal or turns the direction of writing, all but the end of a line."""


def visible(text: str) -> str:
    """The text with a question mark for each sign that would steer a terminal.

    Names of modules and files may hold anything.

    >>> visible("norm\\x1b[31m")
    'norm?[31m'
    """
    return _UNSEEN.sub("?", text)


def encodable(text: str, encoding: str | None, *, as_json: bool = False) -> str:
    """The text as an output of this encoding can write it, the nearest where it cannot.

    >>> encodable("✓ 1 ± 2 in é", "ascii"), encodable('["é"]', "ascii", as_json=True)
    ('+ 1 +- 2 in \\\\xe9', '["\\\\u00e9"]')
    """
    encoding = encoding or "utf-8"
    if as_json and not encoding.lower().startswith("utf"):
        # JSON is read as UTF-8, whatever the terminal's encoding.
        encoding = "ascii"

    def plain(found: re.Match[str]) -> str:
        letter = found[0]
        try:
            letter.encode(encoding)
        except UnicodeEncodeError:
            if as_json:
                return json.dumps(letter)[1:-1]
            return _PLAIN.get(letter) or letter.encode("ascii", "backslashreplace").decode()
        return letter

    return re.sub(r"[^\x00-\x7f]", plain, text)


def followed(
    worked: Worked, scheme: Scheme, number: Callable[[float], str]
) -> list[tuple[str, str]]:
    """The followed element with its numbers put in: what is computed, and how.

    Args:
        scheme: that is worked through.
        number: writes a number.
    """
    steps = {step.name: step for step in worked.steps}
    where = f"[{', '.join(map(str, worked.index))}]" if worked.index else ""

    def signed(value: float) -> str:
        return f"({number(value)})" if value < 0 else number(value)

    above = number(worked.x)
    if scheme.center:
        above = f"({above} - {signed(worked.mean)})"
    line = f"{above} / {worked.divides:.7g} = {number(worked.normalized)}"
    if worked.divides == 0:
        line = f"{above} / 0, which is taken as 0"
    value = worked.normalized
    if "rounded" in steps:
        value = steps["rounded"].values[0]
        line += f", rounded {number(value)}"
    lines = [(f"x{where}", line)]
    if worked.weight is not None or worked.bias is not None:
        line = number(value)
        if worked.weight is not None:
            weight = signed(worked.weight)
            if scheme.weight_offset:
                weight = f"({scheme.weight_offset:g} + {weight})"
            line += f" * {weight}"
        if worked.bias is not None:
            line += f" + {signed(worked.bias)}"
        _, rounded_to, dtype = steps["y"].how.partition(", rounded to ")
        lines.append((f"y{where}", f"{line} = {number(worked.y)}{rounded_to}{dtype}"))
    return lines


def count(number: int, word: str) -> str:
    """A number of things.

    >>> count(1, "mean"), count(2000, "mean")
    ('1 mean', '2,000 means')
    """
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def off(value: float) -> str:
    """A difference as it is said."""
    return f"{value:.2g}"


def seconds(value: float) -> str:
    """A time as it is said.

    >>> seconds(1.5), seconds(0.01234), seconds(0.0000216)
    ('1.50 s', '12.3 ms', '21.6 us')
    """
    if math.isnan(value):  # an ONNX file that could not be run as a whole
        return "an unknown time"
    if value >= 1:
        return f"{value:.2f} s"
    # What .3g would round to 1000 is said in the next unit.
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} us"


def shared_statistic(scheme: Scheme) -> str:
    """What the elements of a group share.

    >>> shared_statistic(Scheme("... [d]; center=false"))
    'root mean square'
    """
    if scheme.scale == "l2":
        word = "length"
    elif scheme.center:
        word = "mean and variance"
    else:
        word = "variance" if scheme.scale == "std" else "root mean square"
    return f"running {word}" if scheme.statistics == "running" else word


def forward_times(before: float, after: float) -> str:
    """What a swap makes of the time of a forward.

    >>> forward_times(0.1, 0.08)
    'One forward takes 80 ms, before it took 100 ms: 1.25 times as fast.'
    """
    ratio = f"{before / after:.2f} times as fast" if after else "too short to be compared"
    return f"One forward takes {seconds(after)}, before it took {seconds(before)}: {ratio}."
