"""ONNX: what ``torch.onnx.export`` makes of the norms.

A module, or a function that calls :mod:`axisnorm`, needs nothing but ``torch.onnx.export``: while
an export is under way each norm is written as the operator of torch that has a standard node, by
both exporters. A program that :func:`torch.export.export` made before has this library's own
operators in it; :func:`decompositions` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import (
    _onnx,
    _torch,
    _torch_residual,  # noqa: F401  # it defines the last of the operators
)
from .reference import Inputs
from .scheme import as_scheme

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What each operator of this library is in torch's own operators.

    A table for :meth:`torch.export.ExportedProgram.run_decompositions`. The results are those of
    the operators within rounding; only what dropout drops differs.

    >>> program = torch.export.export(torch.nn.Softmax(-1), (torch.randn(2, 3),))
    >>> len(program.run_decompositions(decompositions()).graph.nodes)
    3
    """
    ops = torch.ops.axisnorm
    return {
        ops.norm_fwd.default: _norm,
        ops.norm_moments.default: _moments,
        ops.norm_train_fwd.default: _train,
        ops.add_norm_fwd.default: _add_norm,
    }


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scheme: str,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(x, weight, bias, mask, running_mean, running_var)
    meaning = as_scheme(scheme)
    mean, _, rstd = (t.flatten() for t in _onnx.moments(x, meaning, mask))
    y = _torch.activate(_onnx.normalize(inputs, meaning), activation)
    return y, torch.stack([mean, torch.zeros_like(mean), rstd])


def _moments(x: Tensor, mask: Tensor | None, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    return _onnx.moments(x, as_scheme(scheme), mask)


def _train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scheme: str,
    running_mean: Tensor,
    running_var: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, stats = _norm(x, weight, bias, mask, scheme, activation=activation)
    inputs = Inputs(x, None, None, mask, running_mean, running_var)
    return y, stats, *_onnx.moved(inputs, as_scheme(scheme))


def _add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scheme: str,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    total = residual + (x if seed is None else torch.dropout(x, dropout_p, True))
    y, stats = _norm(total, weight, bias, None, scheme, activation=activation)
    return y, total, stats
