"""torch's normalization operators, as a dispatch mode sees them, read as schemes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...scheme import Scheme
from .observe import Operator

__all__ = ["FUSED_ENCODER", "OperatorReader", "Performed"]

FUSED_ENCODER = "aten._transformer_encoder_layer_fwd"
"""One operator for a whole encoder layer, with both of its norms inside."""


@dataclass(frozen=True)
class Performed:
    """One normalization that an operator computed."""

    name: str
    """Of the function in torch.nn.functional."""
    scheme: Scheme
    x: torch.Tensor
    y: torch.Tensor
    given: Mapping[str, Any]
    """weight, bias, running_mean and running_var, as far as there are."""
    seconds: float


class OperatorReader:
    """Reads a stream of operators."""

    def __init__(self) -> None:
        self.view: tuple[torch.Tensor, torch.Tensor] | None = None
        """What instance_norm hands to its batch norm, and what it is a view of."""

    def read(self, found: Operator) -> Iterator[Performed]:
        """The normalization that this operator is, if it is one."""
        name = found.name.removeprefix("aten.").removesuffix(".default")
        read = _READERS.get(name)
        if read is not None:
            yield read(found, self.view)
        if name == "view":
            self.view = (found.args[0], found.result)
        elif not name.startswith("empty"):
            self.view = None


def _fields(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def _affine(scheme: Scheme, given: Mapping[str, Any]) -> Scheme:
    return scheme if "weight" in given or "bias" in given else scheme.replace(affine="")


def _layer_norm(found: Operator, view: Any) -> Performed:
    x, shape, weight, bias, eps = found.args[:5]
    given = _fields(weight=weight, bias=bias)
    scheme = _affine(Scheme.layer_norm(ndim=len(shape), eps=eps), given)
    return Performed("layer_norm", scheme, x, found.result[0], given, found.seconds)


def _rms_norm(found: Operator, view: Any) -> Performed:
    x, shape, weight, eps = (*found.args, None, None)[:4]
    given = _fields(weight=weight)
    scheme = _affine(Scheme.rms_norm(ndim=len(shape), eps=eps), given)
    return Performed("rms_norm", scheme, x, found.result[0], given, found.seconds)


def _group_norm(found: Operator, view: Any) -> Performed:
    x, weight, bias, _, _, _, groups, eps = found.args[:8]
    given = _fields(weight=weight, bias=bias)
    scheme = _affine(Scheme.group_norm(groups, eps=eps), given)
    return Performed("group_norm", scheme, x, found.result[0], given, found.seconds)


def _own(found: Operator, view: Any) -> Performed:
    x, weight, bias, mask, text = found.args[:5]
    given = _fields(weight=weight, bias=bias, mask=mask, **found.kwargs)
    scheme = _affine(Scheme(text), given)
    return Performed("normalize", scheme, x, found.result[0], given, found.seconds)


def _batch_norm(found: Operator, view: Any) -> Performed:
    x, weight, bias, mean, var, training, momentum, eps = found.args[:8]
    return _batch(found, view, x, weight, bias, mean, var, training, momentum, eps)


def _batch_norm_without(found: Operator, view: Any) -> Performed:
    x, weight, bias, training, momentum, eps = found.args[:6]
    return _batch(found, view, x, weight, bias, None, None, training, momentum, eps)


def _batch_norm_training(found: Operator, view: Any) -> Performed:
    x, weight, bias, mean, var, momentum, eps = found.args[:7]
    return _batch(found, view, x, weight, bias, mean, var, True, momentum, eps)


def _batch_norm_running(found: Operator, view: Any) -> Performed:
    x, weight, bias, mean, var, momentum, eps = found.args[:7]
    return _batch(found, view, x, weight, bias, mean, var, False, momentum, eps)


def _batch(
    found: Operator, view: Any, x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any,
    training: bool, momentum: float, eps: float,
) -> Performed:  # fmt: skip
    y = found.result[0]
    fields = {"eps": eps, "statistics": "batch" if training else "running"}
    if momentum is not None:
        fields["momentum"] = momentum
    # instance_norm is a batch norm of one sample whose channels are all samples' channels, seen
    # through a view, with the parameters repeated.
    if training and x.shape[0] == 1 and view is not None and view[1] is x and view[0].dim() >= 2:
        whole = view[0]
        if whole.dim() == x.dim() and math.prod(whole.shape[:2]) == x.shape[1]:
            channels = whole.shape[1]
            given = _fields(weight=weight, bias=bias)
            given = {name: value[:channels] for name, value in given.items()}
            scheme = _affine(Scheme.instance_norm(**fields), given)
            shaped = y.view(whole.shape)
            return Performed("instance_norm", scheme, whole, shaped, given, found.seconds)
    given = _fields(weight=weight, bias=bias)
    scheme = _affine(Scheme.batch_norm(**fields), given)
    if not training:
        given |= _fields(running_mean=mean, running_var=var)
    return Performed("batch_norm", scheme, x, y, given, found.seconds)


_READERS = {
    "axisnorm.norm_fwd": _own,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm_without,
    "_batch_norm_with_update": _batch_norm_training,
    "_batch_norm_no_update": _batch_norm_running,
    "_native_batch_norm_legit_no_training": _batch_norm_running,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
}
