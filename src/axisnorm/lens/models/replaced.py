"""What was replaced in a model and what was left, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..result import Result

__all__ = ["Left", "Replaced", "Replacements"]


@dataclass(frozen=True)
class Replaced:
    """A norm that is computed by another class or operator now."""

    path: str
    before: str
    """Its class before."""
    after: str
    largest_difference: float
    """Between its outputs before and after, on the inputs that it had in the model."""
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Left:
    """A norm that stays as it was."""

    path: str
    cls: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Replacements(Result):
    """What was replaced in a model, what was left, and why."""

    kind: ClassVar[str] = "swap"

    model: str
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    largest_difference: float
    """Between the model's outputs before and after."""
    seconds: tuple[float, float] | None = field(default=None, kw_only=True)
    """Of one forward before and after, where they were measured: medians of up to seven."""

    @property
    def outcome(self) -> str:
        """What became of it besides, as a sentence; empty where nothing did."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            "model": self.model,
            "replaced": [one.to_dict() for one in self.replaced],
            "left": [one.to_dict() for one in self.left],
            "largest_difference": self.largest_difference,
            "seconds": None if self.seconds is None else list(self.seconds),
        }
