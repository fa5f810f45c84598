"""What an input and an output show, as data: candidates, what they leave open, what decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...scheme import Scheme
from ..result import Result
from .afterwards import Afterwards
from .mistakes import Mistake

__all__ = ["Candidate", "Decision", "Identification"]

LISTED_PARAMETERS = 4096
"""JSON lists fitted parameters up to this size, and says null above."""


@dataclass(frozen=True)
class Candidate:
    """One scheme held against an input and an output."""

    scheme: Scheme
    name: str
    """In words, as in ``"one mean a sample"``."""
    axes: tuple[int, ...]
    """The tensor's axes that share statistics, in whole or in part."""
    residual: float
    """The largest difference between the output and what the scheme computes."""
    mean_residual: float
    tolerance: float
    """The largest difference that rounding in the data's type explains."""
    free_parameters: int
    """How many numbers were fitted rather than given: the fewer the better. An eps in use is not
    counted, one that was fitted is."""
    fits: bool
    """Within the tolerance; in half types also no further off on average than the best."""
    eps_interval: tuple[float, float] | None = None
    """Between which values eps lies if this is the scheme; None where it was not measured. An
    upper end of infinity: this data shows none."""
    mistake: Mistake | None = None
    """The known mistake that the scheme makes: its code and a sentence."""
    correction: Scheme | None = None
    """For a mistake the scheme it should have been."""
    norms: tuple[str, ...] = ()
    """The names of the published norms that compute this, as in :data:`axisnorm.PRESETS`."""
    affine_axes: tuple[int, ...] = ()
    """The tensor's axes along which weight and bias vary."""
    weight: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    """The weight as it is multiplied by, of the scheme's affine shape."""
    bias: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    weight_from: str = "none"
    """``"none"``, ``"given"`` or ``"fitted"``."""
    bias_from: str = "none"
    first: Scheme | None = None
    """The scheme that was applied before this one, where a norm was applied to a norm's output."""
    afterwards: Afterwards | None = None
    """What came after the norm: dropout or an activation, None where nothing did."""
    computed_in: str | None = None
    """The type that the output shows the computation was done in, None where it shows none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        interval = None if self.eps_interval is None else list(self.eps_interval)
        return {
            "scheme": str(self.scheme),
            "name": self.name,
            "axes": list(self.axes),
            "fits": self.fits,
            "residual": _json_number(self.residual),
            "mean_residual": _json_number(self.mean_residual),
            "tolerance": _json_number(self.tolerance),
            "free_parameters": self.free_parameters,
            "eps_interval": interval and [_json_number(value) for value in interval],
            "mistake": self.mistake and self.mistake._asdict(),
            "correction": str(self.correction) if self.correction else None,
            "norms": list(self.norms),
            "affine_axes": list(self.affine_axes),
            "weight": _parameter(self.weight, self.weight_from),
            "bias": _parameter(self.bias, self.bias_from),
            "first": str(self.first) if self.first else None,
            "afterwards": self.afterwards and self.afterwards._asdict(),
            "computed_in": self.computed_in,
        }


def _parameter(values: NDArray[np.float64] | None, source: str) -> dict[str, Any] | None:
    if values is None:
        return None
    listed = values.tolist() if values.size <= LISTED_PARAMETERS else None
    return {"from": source, "shape": list(values.shape), "values": listed}


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Decision:
    """An input, as small as possible, on which schemes that fit alike differ."""

    schemes: tuple[Scheme, ...]
    """The best and those that it decides against or for."""
    x: NDArray[np.float64] = field(compare=False)
    outputs: tuple[NDArray[np.float64], ...] = field(compare=False)
    """What each of the schemes gives for it, without weight and bias."""
    sentence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schemes": [str(scheme) for scheme in self.schemes],
            "x": self.x.tolist(),
            "outputs": [y.tolist() for y in self.outputs],
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class Identification(Result):
    """What an input and an output show: candidates from the best to the worst."""

    kind: ClassVar[str] = "identification"

    candidates: tuple[Candidate, ...]
    best: Candidate | None
    """None where nothing fits, or where nothing that fits says anything of statistics."""
    shape: tuple[int, ...] = ()
    """Of input and output; empty where it was not kept."""
    dtypes: tuple[str, str] = ("", "")
    """Of input and output."""
    reason: str = ""
    """Why there is no best."""
    notes: tuple[str, ...] = ()
    """What else there is to know, in sentences."""
    decisions: tuple[Decision, ...] = ()
    """The smallest further inputs that would decide between what fits alike."""

    @property
    def indistinguishable(self) -> tuple[Scheme, ...]:
        """The schemes that this data cannot tell from the best."""
        found = [c.scheme for c in self.candidates if c.fits and c is not self.best]
        own = self.best.scheme if self.best else None
        return tuple(scheme for scheme in dict.fromkeys(found) if scheme != own)

    @property
    def conclusion(self) -> str:
        """What was found, in one sentence."""
        best = self.best
        if best is None:
            return self.reason or "Nothing that was tried fits."
        found = [f"{best.name}: '{best.scheme}'."]
        found += [] if best.afterwards is None else [best.afterwards.sentence]
        found += [] if best.mistake is None else [best.mistake.sentence]
        return " ".join(found)

    @property
    def tells_nothing(self) -> bool:
        """Whether the best fits no better than the same norm over any other axes.

        A constant input is of this kind: its mean is the same over whatever it is taken.
        """
        best = self.best
        if best is None:
            return False
        center = best.scheme.center
        others = [c for c in self.candidates if c.axes != best.axes and c.scheme.center == center]
        others = others or [c for c in self.candidates if c.scheme.center != center]
        return bool(others) and all(c.fits for c in others)

    @property
    def center_unclear(self) -> bool:
        """Whether the best fits as well with the mean subtracted as without."""
        best = self.best
        return best is not None and any(
            other.replace(eps=best.scheme.eps) == best.scheme.replace(center=not best.scheme.center)
            for other in self.indistinguishable
        )

    @property
    def ruled_out(self) -> tuple[Candidate, ...]:
        """The candidates that do not fit."""
        return tuple(c for c in self.candidates if not c.fits)

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            "shape": list(self.shape),
            "dtypes": list(self.dtypes),
            "conclusion": self.conclusion,
            "best": self.best.to_dict() if self.best else None,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "indistinguishable": [str(scheme) for scheme in self.indistinguishable],
            "notes": list(self.notes),
            "decisions": [decision.to_dict() for decision in self.decisions],
        }


def axes_in_words(axes: Sequence[int]) -> str:
    """As in ``"axis 1"`` and ``"axes 0, 2"``."""
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
