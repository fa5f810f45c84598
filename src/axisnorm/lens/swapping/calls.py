"""What the modules of a model are called with while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..models.observe import Call, observed, unchanged
from .probing import NotProved
from .proving import Signature

__all__ = ["Calls"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class _Seen:
    place: int
    """The module's, in the order in which modules first finish."""
    signatures: dict[Signature, None] = field(default_factory=dict)
    problem: str = ""
    """Why a call is not one of a norm."""
    not_bare: str = ""
    """Why a call is not one of a single tensor and nothing else."""
    inputs: list[Signature] | None = None
    """All inputs of the first call, where they are tensors without names."""


class Calls:
    """The calls of all modules, by their paths."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    @classmethod
    def of(cls, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calls:
        """Run the model once, and leave it as it was."""
        calls = cls()
        with unchanged(model):
            observed(model, args, kwargs, finished=calls._finished)
        return calls

    def order(self, path: str) -> int:
        """The place of a module in the order in which modules finish; last if it did not run."""
        return self._seen[path].place if path in self._seen else len(self._seen)

    def leaves(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules that were called with one tensor and gave one like it."""
        for path, seen in self._seen.items():
            if not seen.problem and not seen.not_bare:
                yield path, model.get_submodule(path)

    def signatures(self, path: str, *, bare: bool) -> tuple[Signature, ...]:
        """What a module was called with.

        Args:
            bare: refuse calls with more than one tensor without a name.

        Raises:
            NotProved: a call was not one of a norm.
        """
        seen = self._seen.get(path, _Seen(0, problem="did not run on this input"))
        problem = seen.problem or (seen.not_bare if bare else "")
        if problem:
            raise NotProved(problem)
        return tuple(seen.signatures)

    def inputs(self, path: str) -> list[Signature] | None:
        """All inputs of a module's first call, None where some are not tensors without names."""
        return self._seen[path].inputs if path in self._seen else None

    def _finished(self, call: Call, output: Any) -> None:
        seen = self._seen.get(call.path)
        if seen is None:
            seen = self._seen[call.path] = _Seen(len(self._seen))
            if not call.kwargs and all(isinstance(x, Tensor) and _is_usual(x) for x in call.args):
                seen.inputs = [_signature(x) for x in call.args]
        if len(call.args) != 1 or call.kwargs:
            given = len(call.args) + len(call.kwargs)
            seen.not_bare = (
                f"it takes {given} inputs" if given != 1 else "its input is given by name"
            )
        given_x = next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)), 0)
        seen.problem = seen.problem or _problem(call, given_x, output)
        if isinstance(given_x, Tensor) and not given_x.is_nested:
            seen.signatures[_signature(given_x)] = None


def _signature(x: Tensor) -> Signature:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return Signature(tuple(x.shape), x.dtype, autocast)


def _is_usual(x: Tensor) -> bool:
    dense = x.layout is torch.strided and not x.is_nested
    return x.dtype in DTYPES and x.device.type == "cpu" and dense


def _problem(call: Call, x: Any, output: Any) -> str:
    if not isinstance(x, Tensor):
        return "its input is not a tensor"
    if x.is_nested or (isinstance(output, Tensor) and output.is_nested):
        return "its input or its output is nested"  # it has no shape
    if not isinstance(output, Tensor) or output.shape != x.shape:
        return "its output is not one tensor of its input's shape"
    if x.device.type != "cpu":
        return "not on the CPU"
    if not _is_usual(x):
        return f"its input is {str(x.dtype).removeprefix('torch.')}, {x.layout}"
    if x.dim() == 0 or x.numel() == 0:
        return "its input has no elements"
    if call.inputs_changed:
        return "it overwrites its own input"
    return ""
