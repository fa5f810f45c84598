"""What compilers see in place of the short way: the operator, by as few steps as will do.

torch.compile guards everything that it meets on the way, and checks that at each call: the steps of
the long way cost more than a small norm. As the short way these functions return None for what they
are not sure of. A number is written by an f-string and by float or int, which makes a constant of
one that the compiler holds for a variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _route, _torch, _torch_ops
from ._torch import activate, split
from .reference import ACTIVATIONS
from .scheme import trailing_names

__all__ = ["add_layer_norm", "add_rms_norm", "substitute"]

_has_torch_function = torch.overrides.has_torch_function
_is_exporting = torch.onnx.is_in_onnx_export
_norm = _torch_ops.ops.norm_fwd.default
_train = _torch_ops.ops.norm_train_fwd.default
_strided = torch.strided

_TRAILING = tuple(
    f"... [{names}]; affine={names}; "
    for names in (" ".join(trailing_names(n)) for n in range(1, 9))
)
"""The axes of norms over 1 to 8 trailing axes."""

_CHANNELS = {
    _route.INSTANCE: "n c [...]; affine=c; ",
    _route.BATCH: "[n] c [...]; affine=c; ",
    _route.LAYER_2D: "n [c] ...; affine=c; ",
}
"""The axes of other norms, but for GroupNorm's."""


def layer_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    activation: Any,
    out: Any = None,
) -> Tensor | None:
    """What ``short_layer_norm`` is."""
    if out is not None or not _is_known(activation) or not _is_usual(x, weight, bias, eps):
        return None
    axes = _trailing(x, normalized_shape)
    if axes is None:
        return None
    return _activated_norm(x, weight, bias, f"{axes}eps={float(eps)!r}", activation)


def rms_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any,
    eps: Any,
    weight_offset: Any,
    rounding: Any,
    activation: Any,
    out: Any = None,
) -> Tensor | None:
    """What ``short_rms_norm`` is."""
    if out is not None or not _is_known(activation):
        return None
    text = _rms_text(x, normalized_shape, weight, eps, weight_offset, rounding)
    return None if text is None else _activated_norm(x, weight, None, text, activation)


def _rms_text(
    x: Any, normalized_shape: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any
) -> str | None:
    if not _is_usual(x, weight, None, 0.0 if eps is None else eps):
        return None
    if not isinstance(weight_offset, float) or not -1e300 < weight_offset < 1e300:
        return None
    axes = _trailing(x, normalized_shape)
    if axes is None or rounding not in ("once", "before_affine"):
        return None
    epsilon = "none" if eps is None else f"{float(eps)!r}"
    text = f"{axes}center=false; eps={epsilon}; weight_offset={float(weight_offset)!r}"
    return f"{text}; rounding={rounding}"


def add_layer_norm(
    x: Any,
    residual: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    dropout_p: Any,
    training: Any,
    prenorm: Any,
    activation: Any,
) -> Any:
    """What ``short_add_layer_norm`` is, where nothing is dropped."""
    if (training and dropout_p) or not _is_known(activation):
        return None
    if not _is_usual(x, weight, bias, eps) or not _is_like(residual, x):
        return None
    axes = _trailing(x, normalized_shape)
    if axes is None:
        return None
    text = f"{axes}eps={float(eps)!r}"
    return _sum(x, residual, weight, bias, text, prenorm, activation)


def add_rms_norm(
    x: Any,
    residual: Any,
    normalized_shape: Any,
    weight: Any,
    eps: Any,
    weight_offset: Any,
    rounding: Any,
    dropout_p: Any,
    training: Any,
    prenorm: Any,
    activation: Any,
) -> Any:
    """What ``short_add_rms_norm`` is, where nothing is dropped."""
    if (training and dropout_p) or not _is_known(activation):
        return None
    text = _rms_text(x, normalized_shape, weight, eps, weight_offset, rounding)
    if text is None or not _is_like(residual, x):
        return None
    return _sum(x, residual, weight, None, text, prenorm, activation)


def channel_norm(
    x: Any,
    weight: Any,
    bias: Any,
    kind: int,
    groups: Any,
    eps: Any,
    running_mean: Any,
    running_var: Any,
    batch: Any,
    momentum: Any,
    activation: Any,
    out: Any = None,
) -> Tensor | None:
    """What ``short_channel_norm`` is."""
    if out is not None or not _is_known(activation):
        return None
    if not _is_usual(x, weight, bias, eps) or x.dim() < 2:
        return None
    if kind == _route.GROUP:
        if not isinstance(groups, int) or groups < 1:
            return None
        axes = f"n (g={int(groups)} [c]) [...]; affine=g c; "
    else:
        axes = _CHANNELS[kind]
    text = f"{axes}eps={float(eps)!r}"
    if batch is True and kind == _route.BATCH and x.numel() == x.shape[1]:
        return None  # an error
    if running_mean is None and running_var is None and batch is True:
        return _activated_norm(x, weight, bias, text, activation)
    if not isinstance(running_mean, Tensor) or not isinstance(running_var, Tensor):
        return None
    if batch is False:
        text = f"{text}; statistics=running"
        return _activated_norm(x, weight, bias, text, activation, running_mean, running_var)
    if batch is not True or not isinstance(momentum, float) or not -1e300 < momentum < 1e300:
        return None
    text = f"{text}; momentum={float(momentum)!r}"
    fused, behind = split(activation)
    y, _, mean, var = _train(x, weight, bias, None, text, running_mean, running_var, fused)
    running_mean.copy_(mean)
    running_var.copy_(var)
    return activate(y, behind)


def _activated_norm(
    x: Any,
    weight: Any,
    bias: Any,
    text: str,
    activation: Any,
    running_mean: Any = None,
    running_var: Any = None,
) -> Tensor:
    fused, behind = split(activation)
    y = _norm(x, weight, bias, None, text, running_mean, running_var, fused)[0]
    return activate(y, behind)


def _is_known(activation: Any) -> bool:
    return activation is None or activation in ACTIVATIONS


def _is_usual(x: Any, weight: Any, bias: Any, eps: Any) -> bool:
    """Whether these are plain tensors of a processor, and a number."""
    # No class is compared: that Tensor is the same object under two names would be guarded, too.
    return (
        isinstance(x, Tensor)
        and (weight is None or isinstance(weight, Tensor))
        and (bias is None or isinstance(bias, Tensor))
        and not _has_torch_function((x, weight, bias))
        and x.is_cpu
        and x.layout == _strided
        and x.is_floating_point()
        and not hasattr(x, "device_mesh")
        and isinstance(eps, float)
        and -1e300 < eps < 1e300
        and not _is_exporting()
    )


def _is_like(residual: Any, x: Tensor) -> bool:
    """Whether these two are added by the operator: of one shape, type and device."""
    return (
        isinstance(residual, Tensor)
        and not _has_torch_function((residual,))
        and residual.is_cpu
        and residual.layout == _strided
        and residual.dtype == x.dtype
        and residual.shape == x.shape
        and not hasattr(residual, "device_mesh")
    )


def _sum(
    x: Tensor,
    residual: Tensor,
    weight: Any,
    bias: Any,
    text: str,
    prenorm: Any,
    activation: Any,
) -> Any:
    add = torch.ops.axisnorm.add_norm_fwd.default
    fused, behind = split(activation)
    y, h, _ = add(x, residual, weight, bias, None, 0.0, text, fused)
    y = activate(y, behind)
    return (y, h) if prenorm else y


def _trailing(x: Tensor, shape: Any) -> str | None:
    """The axes of a norm over the trailing axes, if x ends in ``shape``."""
    if not isinstance(shape, tuple) or not 1 <= len(shape) <= 8 or x.dim() < len(shape):
        return None
    return _TRAILING[len(shape) - 1] if tuple(x.shape[-len(shape) :]) == shape else None


def substitute(short: str, seen: Callable[..., Any]) -> None:
    """Have compilers see ``seen`` where the native module's ``short`` is called."""
    if _torch.is_connected:
        short_way = getattr(_torch._native, short)
        torch.compiler.substitute_in_graph(short_way, skip_signature_check=True)(seen)


substitute("short_layer_norm", layer_norm)
substitute("short_rms_norm", rms_norm)
substitute("short_channel_norm", channel_norm)
substitute("short_normalize", _torch._nothing)
