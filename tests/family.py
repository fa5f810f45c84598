"""Every norm of the family as a function of the tensors that it is differentiated by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import values
from torch import Tensor

import axisnorm

F64 = torch.float64


@dataclass(frozen=True)
class Member:
    """One norm, with the shapes of what it takes."""

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def tensors(self, *, grad: bool = True) -> list[Tensor]:
        """Leaves of float64, the same in every call."""
        return [
            values(shape, F64, seed).requires_grad_(grad) for seed, shape in enumerate(self.shapes)
        ]

    def outputs(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.call(*tensors)
        return found if isinstance(found, tuple) else (found,)

    def loss(self, *tensors: Tensor) -> Tensor:
        """A sum in which every element of every output has its own factor."""
        terms = [
            (y * (torch.arange(y.numel(), dtype=F64) * 0.7 + i).cos().reshape(y.shape)).sum()
            for i, y in enumerate(self.outputs(*tensors))
        ]
        return torch.stack(terms).sum()


MASK = values((3, 4), seed=99) > -0.5
CHANNEL_MASK = values((4, 1, 2), seed=98) > -0.5
GROUP_MASK = values((2, 1, 3), seed=98) > -0.5
MEAN, VAR = values((3,), F64, 5), values((3,), F64, 6).exp()


def fresh() -> tuple[Tensor, Tensor]:
    """Running statistics to move."""
    return torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)


ROW = (3, 4), (4,), (4,)
SUM = (3, 4), (3, 4), (4,), (4,)
BATCH = (4, 3, 2), (3,), (3,)

FAMILY = {
    "layer_norm": Member(lambda x, w, b: axisnorm.layer_norm(x, 4, w, b), ROW),
    "layer_norm, two axes": Member(
        lambda x, w, b: axisnorm.layer_norm(x, (3, 2), w, b), ((2, 3, 2), (3, 2), (3, 2))
    ),
    "layer_norm, weight": Member(lambda x, w: axisnorm.layer_norm(x, 4, w), ROW[:2]),
    "layer_norm, bias": Member(lambda x, b: axisnorm.layer_norm(x, 4, None, b), ROW[:2]),
    "layer_norm, mask": Member(lambda x, w, b: axisnorm.layer_norm(x, 4, w, b, mask=MASK), ROW),
    "rms_norm": Member(lambda x, w: axisnorm.rms_norm(x, 4, w), ROW[:2]),
    "rms_norm, offset": Member(
        lambda x, w: axisnorm.rms_norm(x, 4, w, 1e-3, weight_offset=1.0), ROW[:2]
    ),
    "rms_norm, rounding": Member(
        lambda x, w: axisnorm.rms_norm(x, 4, w, rounding="before_affine"), ROW[:2]
    ),
    "layer_norm_2d": Member(axisnorm.layer_norm_2d, ((2, 3, 2, 2), (3,), (3,))),
    "group_norm": Member(lambda x, w, b: axisnorm.group_norm(x, 2, w, b), ((2, 4, 3), (4,), (4,))),
    "group_norm, mask": Member(
        lambda x, w, b: axisnorm.group_norm(x, 2, w, b, mask=GROUP_MASK), ((2, 4, 3), (4,), (4,))
    ),
    "instance_norm": Member(lambda x, w, b: axisnorm.instance_norm(x, None, None, w, b), BATCH),
    "instance_norm, moving": Member(
        lambda x, w, b: axisnorm.instance_norm(x, *fresh(), w, b), BATCH
    ),
    "instance_norm, evaluation": Member(
        lambda x, w, b: axisnorm.instance_norm(x, MEAN, VAR, w, b, False), BATCH
    ),
    "batch_norm, training": Member(
        lambda x, w, b: axisnorm.batch_norm(x, None, None, w, b, True), BATCH
    ),
    "batch_norm, moving": Member(
        lambda x, w, b: axisnorm.batch_norm(x, *fresh(), w, b, True), ((4, 3), (3,), (3,))
    ),
    "batch_norm, mask": Member(
        lambda x, w, b: axisnorm.batch_norm(x, None, None, w, b, True, mask=CHANNEL_MASK), BATCH
    ),
    "batch_norm, evaluation": Member(
        lambda x, w, b, m, v: axisnorm.batch_norm(x, m, v.exp(), w, b), (*BATCH, (3,), (3,))
    ),
    "layer_norm, gelu": Member(
        lambda x, w, b: axisnorm.layer_norm(x, 4, w, b, activation="gelu"), ROW
    ),
    "rms_norm, silu, mask": Member(
        lambda x, w: axisnorm.rms_norm(x, 4, w, mask=MASK, activation="silu"), ROW[:2]
    ),
    "group_norm, silu": Member(
        lambda x, w, b: axisnorm.group_norm(x, 2, w, b, activation="silu"), ((2, 4, 3), (4,), (4,))
    ),
    "batch_norm, moving, gelu": Member(
        lambda x, w, b: axisnorm.batch_norm(x, *fresh(), w, b, True, activation="gelu"), BATCH
    ),
    "batch_norm, evaluation, silu": Member(
        lambda x, w, b: axisnorm.batch_norm(x, MEAN, VAR, w, b, activation="silu"), BATCH
    ),
    "add_layer_norm": Member(lambda x, r, w, b: axisnorm.add_layer_norm(x, r, 4, w, b), SUM),
    "add_layer_norm, prenorm": Member(
        lambda x, r, w, b: axisnorm.add_layer_norm(x, r, 4, w, b, prenorm=True), SUM
    ),
    "add_layer_norm, mask": Member(
        lambda x, r, w, b: axisnorm.add_layer_norm(x, r, 4, w, b, prenorm=True, mask=MASK), SUM
    ),
    "add_rms_norm": Member(
        lambda x, r, w: axisnorm.add_rms_norm(x, r, 4, w, weight_offset=1.0, prenorm=True), SUM[:3]
    ),
    "statistics": Member(lambda x: axisnorm.statistics(x, "n [d]"), ROW[:1]),
    "statistics, mask": Member(
        lambda x: axisnorm.statistics(x, "n [d]; eps_placement=std", mask=MASK), ROW[:1]
    ),
    **{
        text: Member(
            lambda x, w, b, s=text: axisnorm.normalize(x, f"... [d]; affine=d; {s}", w, b), ROW
        )
        for text in (
            "correction=1; eps=1e-3",
            "eps=1e-3; eps_placement=std",
            "eps=0.3; eps_placement=max",
            "center=false; scale=std; correction=1",
            "center=false; scale=l2; eps=1e-12; eps_placement=max",
            "scale=var; eps=1e-2",
            "scale=sqrt_std; correction=1",
            "scale=sqrt_std; eps_placement=std",
        )
    },
    "AdaLN": Member(
        lambda x, w, b: axisnorm.normalize(x, "b s [d]; affine=b d", w, b),
        ((2, 2, 3), (2, 3), (2, 3)),
    ),
    "QK norm, mask": Member(
        lambda x, w: axisnorm.normalize(
            x, "b s (h=2 [d]); affine=h d; center=false", w, mask=GROUP_MASK.mT[..., :1]
        ),
        ((2, 3, 4), (4,)),
    ),
}
