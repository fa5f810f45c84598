"""Times axisnorm against torch eager, and writes one JSON.

Both run in one process in interleaved rounds of blocks of about 20 ms; a figure is the median over
the rounds of the ratio within a round. A round during which other processes used the processor is
thrown away. ``copy`` is the time of ``y.copy_(x)``, the least that any forward can take.

    python bench/run.py                       # everything, to bench/results/<cpu>.json
    python bench/run.py --only rms_norm --rounds 5 --out /tmp/x.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import axisnorm
from axisnorm import _native

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cases import values

RESULTS = Path(__file__).parent / "results"
BLOCK = 0.02  # seconds

SMALL = ((1, 768), (8, 768))
MEDIUM = ((128, 768), (1024, 768), (4096, 768))
LARGE = ((8192, 1024), (16384, 4096))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Call = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """One operation on one shape and type, by both libraries."""

    op: str
    shape: tuple[int, int]
    dtype: torch.dtype
    size: str

    def calls(self) -> dict[str, Call]:
        n = self.shape[1]
        x = values(self.shape, self.dtype)
        weight = torch.nn.Parameter(values((n,), self.dtype, 1))
        bias = torch.nn.Parameter(values((n,), self.dtype, 2))
        grad = values(self.shape, self.dtype, 3)
        copy = torch.empty_like(x)
        calls: dict[str, Call] = {"copy": lambda: copy.copy_(x)}
        ns = (n,)
        if self.op == "layer_norm forward":
            calls["axisnorm"] = lambda: axisnorm.layer_norm(x, ns, weight, bias)
            calls["torch"] = lambda: F.layer_norm(x, ns, weight, bias)
        elif self.op == "rms_norm forward":
            calls["axisnorm"] = lambda: axisnorm.rms_norm(x, ns, weight)
            calls["torch"] = lambda: F.rms_norm(x, ns, weight)
        elif self.op == "layer_norm backward":
            with torch.enable_grad():
                node = axisnorm.layer_norm(x.clone().requires_grad_(), ns, weight, bias).grad_fn
            _, mean, rstd = torch.ops.aten.native_layer_norm(x, ns, weight, bias, 1e-5)
            op = torch.ops.aten.native_layer_norm_backward
            calls["axisnorm"] = lambda: _native.short_backward(node, grad)
            calls["torch"] = lambda: op(grad, x, ns, mean, rstd, weight, bias, [True] * 3)
        else:
            leaf = x.clone().requires_grad_()
            if self.op == "layer_norm forward+backward":
                inputs = (leaf, weight, bias)
                own: Call = lambda: axisnorm.layer_norm(leaf, ns, weight, bias)  # noqa: E731
                other: Call = lambda: F.layer_norm(leaf, ns, weight, bias)  # noqa: E731
            else:
                inputs = (leaf, weight)
                own = lambda: axisnorm.rms_norm(leaf, ns, weight)  # noqa: E731
                other = lambda: F.rms_norm(leaf, ns, weight)  # noqa: E731
            calls["axisnorm"] = lambda: torch.autograd.grad(own(), inputs, grad)
            calls["torch"] = lambda: torch.autograd.grad(other(), inputs, grad)
        return calls


def cells() -> Iterator[Cell]:
    for op in (
        "layer_norm forward",
        "rms_norm forward",
        "layer_norm backward",
        "layer_norm forward+backward",
        "rms_norm forward+backward",
    ):
        for dtype in DTYPES:
            for size, shapes in (("S", SMALL), ("M", MEDIUM), ("L", LARGE)):
                for shape in shapes:
                    yield Cell(op, shape, dtype, size)


def others_cpu() -> float:
    """Seconds of processor time that everything but this process has used."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = (int(f) for f in fields)
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy - own.user - own.system


def block(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def race(calls: dict[str, Call], rounds: int) -> tuple[dict[str, float], float, int]:
    """Median seconds of each, the median ratio torch / axisnorm, and the rounds thrown away."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, int(BLOCK / max(block(call, 3), 1e-7)))
    kept: list[dict[str, float]] = []
    noisy: list[dict[str, float]] = []
    while len(kept) < rounds and len(noisy) < 3 * rounds:
        before, start = others_cpu(), time.perf_counter()
        times = {name: block(call, counts[name]) for name, call in calls.items()}
        disturbed = others_cpu() - before > 0.02 + 0.04 * (time.perf_counter() - start)
        (noisy if disturbed else kept).append(times)
    used = kept if len(kept) >= 3 else kept + noisy
    medians = {name: statistics.median(t[name] for t in used) for name in calls}
    ratio = statistics.median(t["torch"] / t["axisnorm"] for t in used)
    return medians, ratio, len(noisy)


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    model = re.search(r"model\s*: (\d+)", text)
    return {
        "cpu": f"{name.group(1)} (model {model.group(1)})"
        if name and model
        else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction set": _native.isa(),
        "axisnorm": axisnorm.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--sizes", default="SML", help="of S, M and L")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    info = machine()
    console = Console()
    table = Table(
        "operation", "type", "shape", "size", "torch us", "axisnorm us", "ratio", "x copy"
    )
    results = []
    for cell in cells():
        if options.only not in cell.op or cell.size not in options.sizes:
            continue
        with torch.set_grad_enabled("+" in cell.op):
            seconds, ratio, noisy = race(cell.calls(), options.rounds)
        results.append(
            {
                "op": cell.op,
                "dtype": str(cell.dtype).removeprefix("torch."),
                "shape": list(cell.shape),
                "size": cell.size,
                "torch_us": round(seconds["torch"] * 1e6, 2),
                "axisnorm_us": round(seconds["axisnorm"] * 1e6, 2),
                "copy_us": round(seconds["copy"] * 1e6, 2),
                "ratio": round(ratio, 3),
                "noisy_rounds": noisy,
            }
        )
        row = results[-1]
        table.add_row(
            cell.op, row["dtype"], "x".join(map(str, cell.shape)), cell.size,
            f"{row['torch_us']:.1f}", f"{row['axisnorm_us']:.1f}", f"{ratio:.2f}",
            f"{seconds['axisnorm'] / seconds['copy']:.2f}",
        )  # fmt: skip
    console.print(table)
    if options.out is None:
        words = re.sub(r"\W+", "-", info["cpu"].lower()).strip("-")
        options.out = RESULTS / f"{words}.json"
    options.out.parent.mkdir(exist_ok=True, parents=True)
    options.out.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
