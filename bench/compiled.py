"""Times small models eagerly and under torch.compile, with axisnorm's norms and with torch's.

The same models without norms show what compiling does to the rest of them: a ratio compiled/eager
above 1 is the norms' own only as far as it is above that one. The same models with norms' weights
and biases but no statistics show what a compiled program of so many parameters takes at least. All
run in one process in interleaved rounds, as in run.py; a figure is the median over the rounds.
Writes one JSON.

    python bench/compiled.py                  # all, to bench/results/<cpu>-compiled.json
    python bench/compiled.py --only conv --rounds 5 --out /tmp/x.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from run import RESULTS
from torch import Tensor, nn

import axisnorm
from axisnorm.lens.timing import Call, machine, race

DEPTH = 4

Made = tuple[nn.Module, tuple[int, ...]]


def mlp(rows: int) -> Callable[[Any], Made]:
    def make(norms: Any) -> Made:
        layers = [(nn.Linear(256, 256), nn.GELU(), norms.LayerNorm(256)) for _ in range(DEPTH)]
        return nn.Sequential(*(m for layer in layers for m in layer)), (rows, 256)

    return make


def conv(norm: str, *given: int) -> Callable[[Any], Made]:
    def make(norms: Any) -> Made:
        layers = [
            (nn.Conv2d(32, 32, 3, padding=1), getattr(norms, norm)(*given), nn.ReLU())
            for _ in range(DEPTH)
        ]
        return nn.Sequential(*(m for layer in layers for m in layer)), (4, 32, 28, 28)

    return make


class Sums(nn.Module):
    """Norms of residual sums, with ReLU between them."""

    def __init__(self, norms: Any, norm: str, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_sum(norms, norm, size) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, x))
        return x


class Added(nn.Module):
    """The norm of a sum, by another library's norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(residual + x)


def _sum(norms: Any, norm: str, size: int) -> nn.Module:
    own = getattr(norms, f"Add{norm}", None) if norms is axisnorm.nn else None
    return Added(getattr(norms, norm)(size)) if own is None else own(size)


def sums(norm: str, *shape: int) -> Callable[[Any], Made]:
    def make(norms: Any) -> Made:
        return Sums(norms, norm, shape[-1]), shape

    return make


def stack(
    norm: str, *given: int, shape: tuple[int, ...], activation: type[nn.Module] = nn.ReLU
) -> Callable[[Any], Made]:
    def make(norms: Any) -> Made:
        layers = [(getattr(norms, norm)(*given), activation()) for _ in range(DEPTH)]
        return nn.Sequential(*(m for layer in layers for m in layer)), shape

    return make


MODELS = {
    "AddLayerNorm and ReLU, 8 x 64": sums("LayerNorm", 8, 64),
    "AddLayerNorm and ReLU, 512 x 768": sums("LayerNorm", 512, 768),
    "AddRMSNorm and ReLU, 8 x 64": sums("RMSNorm", 8, 64),
    "LayerNorm and ReLU, 8 x 64": stack("LayerNorm", 64, shape=(8, 64)),
    "LayerNorm and ReLU, 512 x 768": stack("LayerNorm", 768, shape=(512, 768)),
    "GroupNorm and ReLU, 8 x 32 x 28 x 28": stack("GroupNorm", 8, 32, shape=(8, 32, 28, 28)),
    "GroupNorm and SiLU, 8 x 32 x 28 x 28": stack(
        "GroupNorm", 8, 32, shape=(8, 32, 28, 28), activation=nn.SiLU
    ),
    "BatchNorm and ReLU, 8 x 32 x 28 x 28": stack("BatchNorm2d", 32, shape=(8, 32, 28, 28)),
    "mlp, LayerNorm, 8 rows": mlp(8),
    "mlp, LayerNorm, 512 rows": mlp(512),
    "conv, BatchNorm": conv("BatchNorm2d", 32),
    "conv, GroupNorm": conv("GroupNorm", 8, 32),
    "conv, InstanceNorm": conv("InstanceNorm2d", 32),
}


class NoNorms:
    """Identity under the name of every norm."""

    def __getattr__(self, name: str) -> type[nn.Identity]:
        return nn.Identity


class Affine(nn.Module):
    """The weight and the bias of a norm along one axis, and nothing else."""

    def __init__(self, *shape: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y if self.bias is None else y + self.bias


AFFINES = SimpleNamespace(
    LayerNorm=Affine,
    RMSNorm=lambda size: Affine(size, bias=False),
    GroupNorm=lambda _, channels: Affine(channels, 1, 1),
    BatchNorm2d=lambda channels: Affine(channels, 1, 1),
    InstanceNorm2d=nn.Identity,
)
"""Weights and biases under the names of norms."""

LIBRARIES = {"axisnorm": axisnorm.nn, "torch": nn, "no norm": NoNorms(), "affine": AFFINES}
NAMES = [f"{library} {mode}" for library in LIBRARIES for mode in ("eager", "compiled")]
RATIOS = {
    f"{library} compiled/eager": (f"{library} compiled", f"{library} eager")
    for library in ("axisnorm", "no norm")
}


def calls(make: Callable[[Any], Made], training: bool) -> dict[str, Call]:
    found: dict[str, Call] = {}
    for name, norms in LIBRARIES.items():
        torch.manual_seed(0)
        model, shape = make(norms)
        model.train(training)
        x, grad = torch.randn(shape), torch.randn(shape)
        x.requires_grad_(training)
        leaves = [x, *model.parameters()]
        for mode, run in {"eager": model, "compiled": torch.compile(model)}.items():

            def call(run: Any = run, x: Tensor = x, grad: Tensor = grad, p: Any = leaves) -> Any:
                if training:
                    return torch.autograd.grad(run(x), p, grad)
                with torch.no_grad():
                    return run(x)

            found[f"{name} {mode}"] = call
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    info = machine()
    words = re.sub(r"\W+", "-", info["cpu"].lower()).strip("-")
    out = options.out or RESULTS / f"{words}-compiled.json"
    table = Table("model", "", *(f"{name} us" for name in NAMES), *RATIOS)
    results = []
    for model, make in MODELS.items():
        if options.only not in model:
            continue
        for training in (False, True):
            torch.compiler.reset()
            found = race(calls(make, training), options.rounds)
            micros = {name: round(found.seconds(name).median * 1e6, 1) for name in NAMES}
            mode = "training" if training else "inference"
            ratios = {name: round(found.ratio(*pair).median, 3) for name, pair in RATIOS.items()}
            results.append({"model": model, "mode": mode, **micros, **ratios})
            out.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
            numbers = [f"{micros[name]:.0f}" for name in NAMES]
            table.add_row(model, mode, *numbers, *(f"{ratio:.2f}" for ratio in ratios.values()))
    console = Console()
    console.print(table)
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
