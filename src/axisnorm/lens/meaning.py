"""What of a normalization shows at one shape: its scheme without names and what has no effect.

Two normalizations are the same at a shape if their meanings are equal there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import reference
from ..scheme import Scheme, Sizes
from .explain import Partition, axis_dimensions, partition, statistics_dimensions
from .half_types import HALF_TYPES
from .subject import Subject

__all__ = ["Meaning", "alike", "same_parameters"]


@dataclass(frozen=True)
class Meaning:
    """One normalization at one shape."""

    subject: Subject
    sizes: Sizes

    @classmethod
    def of(cls, subject: Subject, shape: tuple[int, ...]) -> Meaning:
        """Raises ArgumentError if the subject does not take this shape."""
        return cls(subject, subject.scheme.sizes(shape))

    @property
    def scheme(self) -> Scheme:
        return self.subject.scheme

    @cached_property
    def shared(self) -> Partition:
        """Which elements share the statistics that are used."""
        return partition(self.sizes, statistics_dimensions(self.sizes))

    @cached_property
    def group_size(self) -> int:
        size = 1
        for axis in self.shared:
            for count, told in axis:
                size *= 1 if told else count
        return size

    @property
    def running(self) -> bool:
        """Whether running statistics normalize."""
        return self.scheme.statistics == "running"

    @property
    def gives_the_bias(self) -> bool:
        """Whether groups of one element leave nothing but the bias."""
        return self.scheme.center and not self.running and self.group_size <= 1

    @property
    def spread(self) -> str:
        """What divides: ``"running"``, ``"std"``, ``"rms"`` or ``"l2"``, before its constants."""
        if self.running:
            return "running"
        if self.scheme.scale == "l2":
            # The length of one number is its root mean square.
            return "l2" if self.group_size > 1 else "std" if self.scheme.center else "rms"
        return "std" if self.scheme.center or self.scheme.scale == "std" else "rms"

    @property
    def statistics(self) -> tuple[Any, ...]:
        """Which elements share what."""
        return self.shared, self.scheme.center, self.spread

    @property
    def has_affine(self) -> bool:
        """Whether there is a weight or a bias."""
        return bool(self.scheme.affine) and self.subject.parameters != frozenset()

    @cached_property
    def varying(self) -> Partition | None:
        """Along which elements weight and bias vary, None where there are none."""
        return partition(self.sizes, self.sizes.layout.affine) if self.has_affine else None

    @property
    def formula(self) -> str:
        """``"root"``, or one of the known mistakes ``"var"`` and ``"sqrt_std"``."""
        return self.scheme.scale if self.scheme.scale in ("var", "sqrt_std") else "root"

    def constants(self, dtype: str = "float32", *, all_of_them: bool = False) -> dict[str, Any]:
        """The constants that have an effect on inputs of a type, by name.

        ``all_of_them``: also those that have none because every group holds one element.
        """
        scheme = self.scheme
        eps, placement = reference.resolve_eps(scheme, dtype), scheme.eps_placement
        if placement == "max" and eps <= 0:
            eps = 0.0
        if eps == 0 or (self.formula == "var" and placement == "std"):
            placement = "variance"
        bare = self.gives_the_bias and not all_of_them
        weighted = self.has_affine and not bare
        divided = not self.running and self.spread != "l2" and not bare
        return {
            "correction": scheme.correction if divided else 0,
            "eps": None if bare else eps,
            "eps_placement": None if bare else placement,
            "formula": None if bare else self.formula,
            "weight_offset": scheme.weight_offset if weighted and self.has("weight") else 0.0,
            "rounding": scheme.rounding if weighted and dtype in HALF_TYPES else "once",
        }

    def has(self, name: str) -> bool:
        """Whether there is, or may be, a weight or a bias."""
        parameters = self.subject.parameters
        return self.has_affine and (parameters is None or name in parameters)

    @property
    def keeps_running(self) -> bool | None:
        """Whether training moves running statistics, None where nothing says.

        A notation says so by being a batch norm's: one mean and one weight for each index of one
        axis.
        """
        if self.subject.keeps_running is not None:
            return self.subject.keeps_running
        if self.running:
            return True
        layout = self.sizes.layout
        if not layout.kept or 0 not in layout.reduced_axes or layout.ndim < 2:
            return False
        one_axis = any(list(own) == list(layout.kept) for own in axis_dimensions(self.sizes))
        return True if one_axis and layout.kept == layout.affine else None

    @property
    def mixes_samples(self) -> bool:
        """Whether an output depends on the rest of the batch, axis 0."""
        layout = self.sizes.layout
        return not self.running and 0 in layout.reduced_axes and layout.ndim > 1


def alike(a: Meaning, b: Meaning, dtype: str) -> bool:
    """Whether every output is equal in a type, given the same parameters and running statistics."""
    return (
        a.statistics == b.statistics
        and a.varying == b.varying
        and same_parameters(a, b)
        and a.constants(dtype) == b.constants(dtype)
    )


def same_parameters(a: Meaning, b: Meaning) -> bool:
    """Whether both have weight and bias, or one of them alone; what is open agrees with either."""
    said, others = a.subject.parameters, b.subject.parameters
    if not a.has_affine or not b.has_affine or said is None or others is None:
        return a.has_affine == b.has_affine
    return said == others
