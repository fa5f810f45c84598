"""The published normalizations that have a name here, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..presets import PRESETS
from .result import Result

if TYPE_CHECKING:
    import argparse

__all__ = ["Presets"]


@dataclass(frozen=True)
class Presets(Result):
    """The schemes that have a name."""

    kind: ClassVar[str] = "presets"

    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {"presets": [{"name": name, "scheme": str(PRESETS[name])} for name in self.names]}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm presets``."""


def execute(options: argparse.Namespace) -> tuple[Presets, int]:
    """Run ``axisnorm presets``: the result and the exit status."""
    return Presets(tuple(PRESETS)), 0
