"""Times axisnorm against torch eager, and writes one JSON.

Both run in one process in interleaved rounds of blocks of about 20 ms; a figure is the median over
the rounds of the ratio within a round. A round during which other processes used the processor is
thrown away. ``copy`` is the time of ``y.copy_(x)``, which reads and writes as much as a forward.

    python bench/run.py                       # everything, to bench/results/<cpu>.json
    python bench/run.py --only rms_norm --rounds 5 --out /tmp/x.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import axisnorm
from axisnorm import _native
from axisnorm.lens.timing import Call, machine, race

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cases import values

RESULTS = Path(__file__).parent / "results"

TOKENS = {
    "S": ((1, 768), (8, 768)),
    "M": ((128, 768), (1024, 768), (4096, 768)),
    "L": ((8192, 1024), (16384, 4096)),
}
IMAGES = {
    "M": ((8, 384, 14, 14), (1, 320, 64, 64), (8, 96, 56, 56)),
    "L": ((32, 64, 112, 112),),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMAGE_DTYPES = (torch.float32, torch.bfloat16)

Norm = Callable[..., Tensor]
"""(x, weight, bias, more) -> y"""


@dataclass(frozen=True)
class Operation:
    """What is timed, by both libraries."""

    name: str
    own: Norm
    other: Norm
    shapes: dict[str, tuple[tuple[int, ...], ...]]
    bias: bool = True
    residual: bool = False
    running: bool = False
    channels_last: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES


def _last(x: Tensor) -> tuple[int]:
    return (x.shape[-1],)


def _by_permutation(x: Tensor, w: Tensor, b: Tensor, _: Any) -> Tensor:
    """LayerNorm2d as models write it."""
    y = F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), w, b, 1e-6)
    return y.permute(0, 3, 1, 2)


GROUPS = 32
OPERATIONS = (
    Operation(
        "layer_norm",
        lambda x, w, b, _: axisnorm.layer_norm(x, _last(x), w, b),
        lambda x, w, b, _: F.layer_norm(x, _last(x), w, b),
        TOKENS,
    ),
    Operation(
        "rms_norm",
        lambda x, w, b, _: axisnorm.rms_norm(x, _last(x), w),
        lambda x, w, b, _: F.rms_norm(x, _last(x), w),
        TOKENS,
        bias=False,
    ),
    Operation(
        "add + layer_norm",
        lambda x, w, b, r: axisnorm.add_layer_norm(x, r, _last(x), w, b),
        lambda x, w, b, r: F.layer_norm(r + x, _last(x), w, b),
        TOKENS,
        residual=True,
    ),
    Operation(
        "dropout + add + layer_norm",
        lambda x, w, b, r: axisnorm.add_layer_norm(
            x, r, _last(x), w, b, dropout_p=0.1, training=True
        ),
        lambda x, w, b, r: F.layer_norm(r + F.dropout(x, 0.1, True), _last(x), w, b),
        TOKENS,
        residual=True,
    ),
    Operation(
        "layer_norm_2d",
        lambda x, w, b, _: axisnorm.layer_norm_2d(x, w, b),
        _by_permutation,
        IMAGES,
        dtypes=IMAGE_DTYPES,
    ),
    Operation(
        "group_norm",
        lambda x, w, b, _: axisnorm.group_norm(x, GROUPS, w, b),
        lambda x, w, b, _: F.group_norm(x, GROUPS, w, b),
        IMAGES,
        dtypes=IMAGE_DTYPES,
    ),
    Operation(
        "group_norm channels_last",
        lambda x, w, b, _: axisnorm.group_norm(x, GROUPS, w, b),
        lambda x, w, b, _: F.group_norm(x, GROUPS, w, b),
        IMAGES,
        dtypes=IMAGE_DTYPES,
        channels_last=True,
    ),
    Operation(
        "instance_norm",
        lambda x, w, b, _: axisnorm.instance_norm(x, None, None, w, b),
        lambda x, w, b, _: F.instance_norm(x, None, None, w, b),
        IMAGES,
        dtypes=IMAGE_DTYPES,
    ),
    Operation(
        "batch_norm training",
        lambda x, w, b, s: axisnorm.batch_norm(x, *s, w, b, True),
        lambda x, w, b, s: F.batch_norm(x, *s, w, b, True),
        IMAGES,
        dtypes=IMAGE_DTYPES,
        running=True,
    ),
    Operation(
        "batch_norm training channels_last",
        lambda x, w, b, s: axisnorm.batch_norm(x, *s, w, b, True),
        lambda x, w, b, s: F.batch_norm(x, *s, w, b, True),
        IMAGES,
        dtypes=IMAGE_DTYPES,
        running=True,
        channels_last=True,
    ),
    Operation(
        "batch_norm evaluation",
        lambda x, w, b, s: axisnorm.batch_norm(x, *s, w, b),
        lambda x, w, b, s: F.batch_norm(x, *s, w, b),
        IMAGES,
        dtypes=IMAGE_DTYPES,
        running=True,
    ),
    # torch's two calls.
    Operation(
        "batch_norm evaluation + relu",
        lambda x, w, b, s: axisnorm.batch_norm(x, *s, w, b, activation="relu"),
        lambda x, w, b, s: F.relu(F.batch_norm(x, *s, w, b)),
        IMAGES,
        dtypes=IMAGE_DTYPES,
        running=True,
    ),
    Operation(
        "group_norm + silu",
        lambda x, w, b, _: axisnorm.group_norm(x, GROUPS, w, b, activation="silu"),
        lambda x, w, b, _: F.silu(F.group_norm(x, GROUPS, w, b)),
        IMAGES,
        dtypes=IMAGE_DTYPES,
    ),
    Operation(
        "layer_norm_2d + gelu",
        lambda x, w, b, _: axisnorm.layer_norm_2d(x, w, b, activation="gelu"),
        lambda x, w, b, _: F.gelu(_by_permutation(x, w, b, _)),
        IMAGES,
        dtypes=IMAGE_DTYPES,
    ),
)


@dataclass(frozen=True)
class Cell:
    """One operation on one shape and type, forward or forward and backward."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: str
    direction: str

    @property
    def op(self) -> str:
        return f"{self.operation.name} {self.direction}"

    def calls(self) -> dict[str, Call]:
        operation = self.operation
        axis = -1 if operation.shapes is TOKENS else 1
        layout = torch.channels_last if operation.channels_last else torch.contiguous_format

        def tensor(seed: int) -> Tensor:
            return values(self.shape, self.dtype, seed).contiguous(memory_format=layout)

        channels = (self.shape[axis],)
        x, grad, copy = tensor(0), tensor(3), torch.empty_like(tensor(0))
        weight = torch.nn.Parameter(values(channels, self.dtype, 1))
        bias = torch.nn.Parameter(values(channels, self.dtype, 2)) if operation.bias else None
        more: Any = None
        if operation.residual:
            more = tensor(4)
        if operation.running:
            more = tuple(f(channels, dtype=self.dtype) for f in (torch.zeros, torch.ones))
        calls: dict[str, Call] = {"copy": lambda: copy.copy_(x)}
        if self.direction == "forward":
            calls["axisnorm"] = lambda: operation.own(x, weight, bias, more)
            calls["torch"] = lambda: operation.other(x, weight, bias, more)
            return calls
        leaf = x.clone().requires_grad_()
        wanted = [t for t in (leaf, weight, bias) if t is not None]
        if operation.residual:
            wanted.append(more.requires_grad_())
        if self.direction == "backward":
            return {**calls, **self._kernels(leaf, grad, weight, bias)}
        calls["axisnorm"] = lambda: torch.autograd.grad(
            operation.own(leaf, weight, bias, more), wanted, grad
        )
        calls["torch"] = lambda: torch.autograd.grad(
            operation.other(leaf, weight, bias, more), wanted, grad
        )
        return calls

    def _kernels(
        self, leaf: Tensor, grad: Tensor, weight: Tensor, bias: Tensor | None
    ) -> dict[str, Call]:
        """LayerNorm's backward without autograd around it."""
        shape = _last(leaf)
        with torch.enable_grad():
            node = axisnorm.layer_norm(leaf, shape, weight, bias).grad_fn
        x = leaf.detach()
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        op = torch.ops.aten.native_layer_norm_backward
        return {
            "axisnorm": lambda: _native.node_backward(node, grad),
            "torch": lambda: op(grad, x, shape, mean, rstd, weight, bias, [True] * 3),
        }


def cells() -> Iterator[Cell]:
    for operation in OPERATIONS:
        directions = ["forward", "forward+backward"]
        if operation.name == "layer_norm":
            directions.insert(1, "backward")
        for direction in directions:
            for dtype in operation.dtypes:
                for size, shapes in operation.shapes.items():
                    for shape in shapes:
                        yield Cell(operation, shape, dtype, size, direction)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--sizes", default="SML", help="of S, M and L")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    info = machine()
    if options.out is None:
        words = re.sub(r"\W+", "-", info["cpu"].lower()).strip("-")
        options.out = RESULTS / f"{words}.json"
    options.out.parent.mkdir(exist_ok=True, parents=True)
    console = Console()
    table = Table(
        "operation", "type", "shape", "size", "torch us", "axisnorm us", "ratio", "x copy"
    )
    results = []
    for cell in cells():
        dtype = str(cell.dtype).removeprefix("torch.")
        if options.only not in cell.op or cell.size not in options.sizes:
            continue
        if dtype not in options.dtypes.split(","):
            continue
        with torch.set_grad_enabled("+" in cell.direction):
            found = race(cell.calls(), options.rounds)
        seconds = {name: found.seconds(name).median for name in found.rounds[0]}
        ratio = found.ratio("torch", "axisnorm").median
        results.append(
            {
                "op": cell.op,
                "dtype": dtype,
                "shape": list(cell.shape),
                "size": cell.size,
                "torch_us": round(seconds["torch"] * 1e6, 2),
                "axisnorm_us": round(seconds["axisnorm"] * 1e6, 2),
                "copy_us": round(seconds["copy"] * 1e6, 2),
                "ratio": round(ratio, 3),
                "noisy_rounds": found.noisy,
            }
        )
        # After each cell: a run that is stopped keeps what it has.
        options.out.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
        row = results[-1]
        table.add_row(
            cell.op, row["dtype"], "x".join(map(str, cell.shape)), cell.size,
            f"{row['torch_us']:.1f}", f"{row['axisnorm_us']:.1f}", f"{ratio:.2f}",
            f"{seconds['axisnorm'] / seconds['copy']:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
