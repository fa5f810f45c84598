"""Prints the README's table from a stored benchmark JSON.

python bench/table.py bench/results/<cpu>.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SIZES = {"S": "small", "M": "medium", "L": "large"}
DTYPES = ("float32", "bfloat16", "float16")


def table(path: Path) -> str:
    """Markdown: how many times as fast as torch, the smallest and the largest of the shapes."""
    results = json.loads(path.read_text())["results"]
    rows = ["| | " + " | ".join(SIZES.values()) + " |", "| --- |" + " --- |" * len(SIZES)]
    for op in dict.fromkeys(r["op"] for r in results):
        for dtype in DTYPES:
            cells = []
            if not any((r["op"], r["dtype"]) == (op, dtype) for r in results):
                continue
            for size in SIZES:
                ratios = [
                    r["ratio"]
                    for r in results
                    if (r["op"], r["dtype"], r["size"]) == (op, dtype, size)
                ]
                if not ratios:
                    cells.append("")
                    continue
                low, high = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
                cells.append(f"{low}" if low == high else f"{low} - {high}")
            rows.append(f"| {op} {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
