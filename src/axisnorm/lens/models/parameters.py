"""The parameters of a norm as far as two models are compared by them: small ones whole."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..explain import double

__all__ = ["ROLES", "Parameter", "parameters_of"]

KEPT = 1 << 16
"""Values are kept up to this many; of larger parameters only what summarizes them."""

ROLES: Mapping[str, tuple[str, ...]] = {
    "weight": ("weight", "gamma", "scale", "g", "w", "a_2", "alpha"),
    "bias": ("bias", "beta", "shift", "offset", "b", "b_2"),
    "running_mean": ("running_mean", "moving_mean"),
    "running_var": ("running_var", "moving_variance", "moving_var"),
}
"""What a parameter is for, with the names that libraries give it."""


@dataclass(frozen=True)
class Parameter:
    """One parameter or running statistic: a summary, and its values where they are few."""

    role: str
    """``"weight"``, ``"bias"``, ``"running_mean"`` or ``"running_var"``."""
    shape: tuple[int, ...]
    dtype: str
    digest: str
    """Of the values in float64, in row-major order: equal values have equal digests, whatever
    their type and however axes of size 1 stand among the others."""
    smallest: float
    largest: float
    mean: float
    values: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    """None where there are more than 65536."""

    @classmethod
    def of(cls, role: str, values: Any) -> Parameter:
        """The summary of a tensor or array.

        >>> Parameter.of("weight", np.array([1.0, 2.0, 4.5], np.float32)).mean
        2.5
        """
        wide = double(values)
        assert wide is not None
        wide = np.ascontiguousarray(wide)
        some = wide if wide.size else np.zeros(1)
        with np.errstate(invalid="ignore", over="ignore"):  # the mean of infinities
            mean = float(some.mean())
        return cls(
            role,
            wide.shape,
            str(values.dtype).removeprefix("torch."),
            # Adding zero makes -0.0 the 0.0 that it equals.
            hashlib.blake2b((wide + 0.0).tobytes(), digest_size=16).hexdigest(),
            float(some.min()),
            float(some.max()),
            mean,
            wide if wide.size <= KEPT else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the values."""
        return {
            "role": self.role,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "digest": self.digest,
            "smallest": _finite(self.smallest),
            "largest": _finite(self.largest),
            "mean": _finite(self.mean),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def parameters_of(named: Mapping[str, Any]) -> Iterator[Parameter]:
    """The parameters among named tensors whose names say what they are for."""
    for role, names in ROLES.items():
        for name in names:
            value = named.get(name)
            if value is not None:
                yield Parameter.of(role, value)
                break
