"""An empty figure in inches, and texts that are measured before they are placed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.textpath import text_to_path
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Figures are drawn with matplotlib. It is not installed. Run: pip install 'axisnorm[lens]'",
        name=error.name,
    ) from error

__all__ = [
    "ACCENT",
    "FAINT",
    "INK",
    "MARGIN",
    "RULE",
    "SOFT",
    "Canvas",
    "font_of",
    "shown",
    "text_width",
    "wrapped",
]

INK = "#1f2430"
SOFT = "#5b6472"
FAINT = "#eef0f4"
RULE = "#c5cad3"
ACCENT = "#1d4ed8"

MARGIN = 0.3
"""Around a figure, in inches."""

DPI = 144
"""Of a figure that is shown; a file is finer."""

HINTED = 1.07
"""Renderers that hint move letters to whole pixels: at 144 dpi that widens a line so much."""

_SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"


@lru_cache(maxsize=64)
def font_of(size: float, bold: bool = False, mono: bool = False) -> FontProperties:
    # DejaVu comes with matplotlib: widths are the same on every machine.
    family = _MONO if mono else _SANS
    return FontProperties(family=family, size=size, weight="bold" if bold else "normal")


def shown(text: str, font: FontProperties) -> str:
    """The text with what the font cannot draw as question marks: names may hold anything."""
    glyphs = get_font(findfont(font))
    return "".join(
        letter if letter.isprintable() and glyphs.get_char_index(ord(letter)) else "?"
        for letter in text
    )


def text_width(text: str, font: FontProperties) -> float:
    """In inches."""
    if not text:
        return 0.0
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72 * HINTED


def wrapped(text: str, font: FontProperties, width: float) -> Iterator[str]:
    """Lines of at most ``width`` inches, broken at spaces, and inside words that are longer."""
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if text_width(longer, font) <= width:
            line = longer
            continue
        if line:
            yield line
        while text_width(word, font) > width and len(word) > 1:
            cut = next(n for n in range(len(word) - 1, 0, -1)
                       if n == 1 or text_width(word[:n], font) <= width)  # fmt: skip
            yield word[:cut]
            word = word[cut:]
        line = word
    yield line


class Canvas:
    """One Axes in inches, y downwards, that grows with what is drawn."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(1, 1), dpi=DPI, facecolor="white")
        self.axes: Axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set_axis_off()

    def text(
        self,
        x: float,
        y: float,
        text: str,
        font: FontProperties,
        *,
        color: str = INK,
        align: str = "left",
        gid: str | None = None,
    ) -> float:
        """Place a text on the baseline ``y`` and return its width."""
        text = shown(text, font)
        self.axes.text(
            x, y, text, fontproperties=font, color=color, ha=align, va="baseline", gid=gid,
            parse_math=False, usetex=False, zorder=5,
        )  # fmt: skip
        return text_width(text, font)

    def paragraph(
        self, x: float, y: float, text: str, font: FontProperties, width: float, *, color: str = INK
    ) -> float:
        """Place a text in lines from the top ``y`` and return where it ends."""
        size = font.get_size_in_points() / 72
        for line in wrapped(shown(text, font), font, width):
            self.text(x, y + size, line, font, color=color)
            y += size * 1.45
        return y

    def finish(self, width: float, height: float, title: str) -> Figure:
        self.figure.set_size_inches(width, height)
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.set_gid("axisnorm")
        for artist in self.axes.get_children():
            # Nothing reaches over the figure's edge, and files without clipping are smaller.
            artist.set_clip_on(False)
        self.figure.set_label(title)
        return self.figure
