"""Compares a new benchmark JSON with a stored one: no ratio may fall by more than a quarter.

    python bench/guard.py bench/results/<cpu>.json /tmp/new.json

Ratios against torch in one process carry over between machines better than times do. The exit
status is 1 where one fell.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ALLOWED = 0.75


def ratios(path: Path) -> dict[tuple[str, str, tuple[int, ...]], float]:
    results = json.loads(path.read_text())["results"]
    return {(r["op"], r["dtype"], tuple(r["shape"])): r["ratio"] for r in results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stored", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    stored, new = ratios(options.stored), ratios(options.new)
    shared = stored.keys() & new.keys()
    fallen = [key for key in sorted(shared) if new[key] < ALLOWED * stored[key]]
    for op, dtype, shape in fallen:
        key = (op, dtype, shape)
        print(f"{op} {dtype} {'x'.join(map(str, shape))}: {stored[key]:.2f} -> {new[key]:.2f}")
    print(
        f"{len(shared)} cells compared, {len(fallen)} fell below {ALLOWED:.0%} of the stored ratio"
    )
    return 1 if fallen or not shared else 0


if __name__ == "__main__":
    raise SystemExit(main())
