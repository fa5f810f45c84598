"""torch's normalization operators, as a dispatch mode sees them, read as schemes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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


@dataclass
class _Chain:
    """functional.rms_norm on the CPU: five or six operators in a row."""

    x: torch.Tensor
    last: torch.Tensor
    step: int = 0
    dims: int = 0
    eps: float | None = 0.0
    seconds: float = 0.0

    def follow(self, found: Operator) -> bool:
        """Take the next operator up, False if it is another one."""
        args = found.args
        if self.step == 4:
            if found.name != "aten.mul.Tensor" or args[0] is not self.x:
                return False
            if args[1] is not self.last:
                return False
        elif not args or args[0] is not self.last:
            return False
        elif self.step == 1:
            ndim = self.x.dim()
            if found.name != "aten.mean.dim":
                return False
            dims = sorted(d % ndim for d in args[1])
            self.dims = len(dims)
            if dims != list(range(ndim - len(dims), ndim)):
                return False
        elif self.step == 2:
            if found.name != "aten.add_.Scalar":
                return False
            self.eps = _written(float(args[1]))
        elif found.name != "aten.rsqrt.default":
            return False
        self.step += 1
        self.last = found.result
        return True

    def performed(self, y: torch.Tensor, weight: torch.Tensor | None = None) -> Performed:
        given = _fields(weight=weight)
        scheme = _affine(Scheme.rms_norm(ndim=self.dims, eps=self.eps), given)
        return Performed("rms_norm", scheme, self.x, y, given, self.seconds)


class OperatorReader:
    """Reads a stream of operators; the tensors of the last ones are kept, no more."""

    def __init__(self) -> None:
        self.chain: _Chain | None = None
        self.view: tuple[torch.Tensor, torch.Tensor] | None = None

    def end(self) -> Iterator[Performed]:
        """What the operators so far were, as those that follow belong elsewhere."""
        if self.chain is not None and self.chain.step == 5:
            yield self.chain.performed(self.chain.last)
        self.chain = None
        self.view = None

    def read(self, found: Operator) -> Iterator[Performed]:
        """The normalizations that are complete with this operator."""
        name = found.name.removeprefix("aten.").removesuffix(".default")
        # First, as it may complete one of the operators before.
        yield from self.root_mean_square(found)
        read = _READERS.get(name)
        if read is not None:
            yield read(found, self.view)
        if name == "view":
            self.view = (found.args[0], found.result)
        elif not name.startswith("empty"):
            self.view = None

    def root_mean_square(self, found: Operator) -> Iterator[Performed]:
        """x^2, mean, + eps, rsqrt, x *, and where there is a weight, * weight.

        eps is added in place by torch's C++, which tells this sequence from written out ones.
        """
        chain, args = self.chain, found.args
        if chain is not None and chain.step == 5:
            self.chain = None
            weight = args[1] if found.name == "aten.mul.Tensor" and len(args) > 1 else None
            own = chain.x.shape[chain.x.dim() - chain.dims :]
            if isinstance(weight, torch.Tensor) and args[0] is chain.last and weight.shape == own:
                chain.seconds += found.seconds
                yield chain.performed(found.result, weight)
                return
            yield chain.performed(chain.last)
            chain = None
        if found.name == "aten.pow.Tensor_Scalar" and args[1] == 2:
            self.chain = _Chain(args[0], found.result, 1, seconds=found.seconds)
        elif chain is not None:
            chain.seconds += found.seconds
            self.chain = chain if chain.follow(found) else None


def _written(eps: float) -> float | None:
    """eps as it was written: it arrives rounded to float32, None as that type's epsilon."""
    if eps == float(np.finfo(np.float32).eps):
        return None
    return float(str(np.float32(eps))) if eps == float(np.float32(eps)) else eps


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
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
}
