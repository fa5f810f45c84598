"""Draws docs/same-tensor.svg: one tensor under six norms, with axisnorm's own pictures.

python docs/figure.py
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from axisnorm import explain
from axisnorm.lens.rendering import report

SHAPE = (2, 4, 3)  # samples, channels, positions
NORMS = (
    ("BatchNorm", "[n] c [l]"),
    ("InstanceNorm", "n c [l]"),
    ("LayerNorm(3), as for text", "... [l]"),
    ("LayerNorm((4, 3)), GroupNorm(1)", "n [c l]"),
    ("GroupNorm(2)", "n (g=2 [c]) [l]"),
    ("LayerNorm2d", "n [c] l"),
)


def main() -> None:
    cells = []
    for name, scheme in NORMS:
        cell = Table.grid()
        cell.add_row(Text(name, style="bold"))
        cell.add_row(Text(scheme, style="dim"))
        picture = report.picture(explain(scheme, SHAPE), title="", affine=False, legend=False)
        cell.add_row(picture)
        cells.append(cell)
    grid = Table.grid(padding=(1, 4))
    grid.add_row(*cells[:3])
    grid.add_row(*cells[3:])
    console = Console(record=True, width=94, file=io.StringIO(), force_terminal=True)
    console.print(grid)
    svg = console.export_svg(
        title="2 samples x 4 channels x 3 positions: the same letter, the same mean",
        theme=DEFAULT_TERMINAL_THEME,
        unique_id="axisnorm",
    )
    (Path(__file__).parent / "same-tensor.svg").write_text(svg)


if __name__ == "__main__":
    main()
