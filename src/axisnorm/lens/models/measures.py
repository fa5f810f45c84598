"""What a norm's data and parameters show at run time, as numbers: no tensor is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...scheme import Scheme, Sizes

__all__ = ["Measured", "Measuring", "Parameter", "RunningShift", "paddings"]

SAMPLED = 1 << 22
"""Variances are taken of so many elements, in whole groups."""


@dataclass(frozen=True)
class Parameter:
    """A weight or a bias."""

    size: int
    not_finite: int
    zeros: int
    negative: int
    mean: float
    deviation: float


@dataclass(frozen=True)
class RunningShift:
    """How far running statistics are from those of the input, over the channels."""

    untouched: bool
    """Whether all means are 0 and all variances 1, as of a new module."""
    shift: tuple[float, float]
    """|mean - running mean| in running deviations: the median channel's and the worst's."""
    ratio: tuple[float, float]
    """The variance over the running one: the median channel's and the one furthest from 1."""
    elements: int
    """Of a channel in this input."""


@dataclass
class Measured:
    """One norm's input, statistics and parameters."""

    largest: float
    """The largest magnitude of the input."""
    constant_groups: int
    groups: int
    variance: float | None
    """The median over the groups of what eps is added to."""
    padded: float
    """The share of the elements that are padding, in groups with others."""
    weight: Parameter | None
    bias: Parameter | None
    running: RunningShift | None
    squares_in: str | None = None
    """The type in which squares were summed, where the operators show it."""
    follows: str | None = None
    """The path of the norm whose output it is given."""


def paddings(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The masks among a model's inputs, true where an element counts.

    A mask is a tensor of samples and positions with ones at one end of each row, some of them
    followed by zeros. A padding mask of torch's attention, true where there is padding, is turned.
    """
    found = []
    named = [*((None, value) for value in args), *kwargs.items()]
    for name, value in named:
        for tensor in tree_leaves(value):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or not tensor.numel():
                continue
            if tensor.is_floating_point() and name is None:
                continue
            if tensor.dtype != torch.bool and (name is None or "mask" not in name):
                continue
            if not bool(((tensor == 0) | (tensor == 1)).all()):
                continue
            mask = tensor.detach().bool()
            if name is not None and "padding_mask" in name:
                mask = ~mask
            steps = (mask[:, 1:] != mask[:, :-1]).sum(1)
            if bool((steps <= 1).all()) and bool(mask.any(1).all()) and not bool(mask.all()):
                found.append(mask)
    return found


class Measuring:
    """Measures norms, with what is known of the model's inputs."""

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        self.masks = masks

    def measured(self, x: torch.Tensor, scheme: Scheme, given: Mapping[str, Any]) -> Measured:
        """The numbers of one call."""
        x = x.detach()
        sizes = scheme.layout(x.dim()).sizes(tuple(x.shape))
        reduced = sizes.layout.reduced
        seen = x.reshape(sizes.expanded)
        low, high = seen.amin(reduced), seen.amax(reduced)
        batch = scheme.statistics == "batch"
        constant = int((low == high).sum()) if batch and sizes.group_size > 1 else 0
        masked = given.get("mask") is not None
        return Measured(
            largest=float(torch.maximum(low.abs().max(), high.abs().max())),
            constant_groups=constant,
            groups=low.numel(),
            variance=_variance(seen, scheme, reduced) if batch else None,
            padded=0.0 if masked or not batch else self.padded(x, sizes),
            weight=_parameter(given.get("weight")),
            bias=_parameter(given.get("bias")),
            running=_running(seen, sizes, given),
        )

    def padded(self, x: torch.Tensor, sizes: Sizes) -> float:
        """The share of padding in groups that have other elements too."""
        shared = [
            axis
            for axis in sizes.layout.reduced_axes
            if axis > 0 and x.shape[axis] > 1 and len(sizes.layout.axes[axis]) == 1
        ]
        for axis in shared:
            for mask in self.masks:
                if tuple(mask.shape) == (x.shape[0], x.shape[axis]):
                    return 1.0 - float(mask.float().mean())
        if x.dim() != 3:
            return 0.0
        return max((_constant_ends(x.movedim(axis, 1)) for axis in shared), default=0.0)


def _constant_ends(x: torch.Tensor) -> float:
    """The share of positions, two or more at the end of a sample, that are all alike."""
    if x.shape[1] < 3 or x.shape[2] < 2:
        return 0.0
    alike = (x == x[:, -1:]).all(2) & (x[:, -1:] == x[:, -1:, :1]).all(2)
    run = alike.flip(1).long().cumprod(1).sum(1)
    # What is constant throughout is no padding.
    run = run * ((run >= 2) & (run < x.shape[1]))
    return float(run.sum()) / (x.shape[0] * x.shape[1])


def _variance(seen: torch.Tensor, scheme: Scheme, reduced: tuple[int, ...]) -> float | None:
    kept = [i for i in range(seen.dim()) if i not in reduced]
    for axis in kept:
        if seen.numel() > SAMPLED and seen.shape[axis] > 1:
            keep = max(1, seen.shape[axis] * SAMPLED // seen.numel())
            step = max(1, seen.shape[axis] // keep)
            seen = seen[(slice(None),) * axis + (slice(None, None, step),)]
    wide = seen.double() if seen.dtype == torch.float64 else seen.float()
    if scheme.scale == "l2":
        found = wide.square().sum(reduced)
    elif scheme.center or scheme.scale == "std":
        found = wide.var(reduced, correction=0)
    else:
        found = wide.square().mean(reduced)
    return float(found.median()) if found.numel() else None


def _parameter(values: Any) -> Parameter | None:
    if not isinstance(values, torch.Tensor) or not values.numel() or values.is_meta:
        return None
    wide = values.detach().double()
    finite = wide[torch.isfinite(wide)]
    return Parameter(
        size=wide.numel(),
        not_finite=wide.numel() - finite.numel(),
        zeros=int((wide == 0).sum()),
        negative=int((wide < 0).sum()),
        mean=float(finite.mean()) if finite.numel() else 0.0,
        deviation=float(finite.std(correction=0)) if finite.numel() else 0.0,
    )


def _running(seen: torch.Tensor, sizes: Sizes, given: Mapping[str, Any]) -> RunningShift | None:
    mean, var = given.get("running_mean"), given.get("running_var")
    if sizes.layout.scheme.statistics != "running" or mean is None or var is None:
        return None
    mean, var = mean.detach().double().flatten(), var.detach().double().flatten()
    untouched = bool((mean == 0).all()) and bool((var == 1).all())
    over = tuple(i for i in range(seen.dim()) if i not in sizes.layout.running)
    wide = seen.float() if seen.dtype != torch.float64 else seen
    found_var, found_mean = torch.var_mean(wide, over, correction=0)
    deviation = (var + (sizes.layout.scheme.eps or 0.0)).clamp_min(1e-38).sqrt()
    shift = (found_mean.double().flatten() - mean).abs() / deviation
    ratio = found_var.double().flatten() / deviation.square()
    furthest = ratio.clamp_min(1e-38).log().abs().argmax()
    return RunningShift(
        untouched=untouched,
        shift=(float(shift.median()), float(shift.max())),
        ratio=(float(ratio.median()), float(ratio[furthest])),
        elements=seen.numel() // max(1, mean.numel()),
    )
