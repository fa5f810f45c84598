"""What compilers see in place of the short way: the operator, by as few steps as will do.

torch.compile guards everything that it meets on the way, and checks that at each call: the steps of
the long way cost more than a small norm. It does not guard what a function finds in its closure, so
these stand in another function, which has all that they use as its variables. As the short way they
return None for what they are not sure of. A number is written by an f-string and by float or int,
which makes a constant of one that the compiler holds for a variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import (
    _route,
    _torch,
    _torch_ops,
    _torch_residual,  # noqa: F401  # it defines the last of the operators
)
from .reference import ACTIVATIONS
from .scheme import trailing_names

__all__ = ["substitute"]

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


class Seen(NamedTuple):
    """The functions, each for the short one of its name."""

    layer_norm: Callable[..., Tensor | None]
    rms_norm: Callable[..., Tensor | None]
    channel_norm: Callable[..., Tensor | None]
    add_layer_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]


def _seen() -> Seen:
    ops = _torch_ops.ops
    norm, train, add = (op.default for op in (ops.norm_fwd, ops.norm_train_fwd, ops.add_norm_fwd))
    trailing, channel_axes, activations = _TRAILING, _CHANNELS, ACTIVATIONS
    group, batch_norm, layer_2d = _route.GROUP, _route.BATCH, _route.LAYER_2D
    split, activate = _torch.split, _torch.activate
    has_torch_function = torch.overrides.has_torch_function
    is_exporting = torch.onnx.is_in_onnx_export
    strided = torch.strided
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    tensor = Tensor
    is_instance, has_attribute, length = isinstance, hasattr, len
    real, whole, sequence = float, int, tuple

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
        if out is not None or not is_known(activation) or not is_usual(x, weight, bias, eps):
            return None
        axes = trailing_axes(x, normalized_shape)
        if axes is None:
            return None
        return activated_norm(x, weight, bias, f"{axes}eps={real(eps)!r}", activation)

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
        if out is not None or not is_known(activation):
            return None
        text = rms_text(x, normalized_shape, weight, eps, weight_offset, rounding)
        return None if text is None else activated_norm(x, weight, None, text, activation)

    def rms_text(
        x: Any, normalized_shape: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any
    ) -> str | None:
        if not is_usual(x, weight, None, 0.0 if eps is None else eps):
            return None
        if not is_instance(weight_offset, real) or not -1e300 < weight_offset < 1e300:
            return None
        axes = trailing_axes(x, normalized_shape)
        if axes is None or rounding not in ("once", "before_affine"):
            return None
        epsilon = "none" if eps is None else f"{real(eps)!r}"
        text = f"{axes}center=false; eps={epsilon}; weight_offset={real(weight_offset)!r}"
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
        if (training and dropout_p) or not is_known(activation):
            return None
        if not is_usual(x, weight, bias, eps) or not is_like(residual, x):
            return None
        axes = trailing_axes(x, normalized_shape)
        if axes is None:
            return None
        text = f"{axes}eps={real(eps)!r}"
        return norm_of_sum(x, residual, weight, bias, text, prenorm, activation)

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
        if (training and dropout_p) or not is_known(activation):
            return None
        text = rms_text(x, normalized_shape, weight, eps, weight_offset, rounding)
        if text is None or not is_like(residual, x):
            return None
        return norm_of_sum(x, residual, weight, None, text, prenorm, activation)

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
        if out is not None or not is_known(activation):
            return None
        if not is_usual(x, weight, bias, eps) or x.dim() < 2:
            return None
        if kind != layer_2d and not is_ordered(x):
            return None
        if kind == group:
            if not is_instance(groups, whole) or groups < 1:
                return None
            axes = f"n (g={whole(groups)} [c]) [...]; affine=g c; "
        else:
            axes = channel_axes[kind]
        text = f"{axes}eps={real(eps)!r}"
        if batch is True and kind == batch_norm and x.numel() == x.shape[1]:
            return None  # an error
        if running_mean is None and running_var is None and batch is True:
            return activated_norm(x, weight, bias, text, activation)
        if not is_instance(running_mean, tensor) or not is_instance(running_var, tensor):
            return None
        if batch is False:
            text = f"{text}; statistics=running"
            return activated_norm(x, weight, bias, text, activation, running_mean, running_var)
        if batch is not True or not is_instance(momentum, real) or not -1e300 < momentum < 1e300:
            return None
        text = f"{text}; momentum={real(momentum)!r}"
        fused, behind = split_known(activation)
        y, _, mean, var = train(x, weight, bias, None, text, running_mean, running_var, fused)
        running_mean.copy_(mean)
        running_var.copy_(var)
        return y if behind is None else activate(y, behind)

    def activated_norm(
        x: Any,
        weight: Any,
        bias: Any,
        text: str,
        activation: Any,
        running_mean: Any = None,
        running_var: Any = None,
    ) -> Tensor:
        fused, behind = split_known(activation)
        y = norm(x, weight, bias, None, text, running_mean, running_var, fused)[0]
        return y if behind is None else activate(y, behind)

    def is_known(activation: Any) -> bool:
        return activation is None or activation in activations

    def split_known(activation: Any) -> tuple[Any, Any]:
        return (None, None) if activation is None else split(activation)

    def is_usual(x: Any, weight: Any, bias: Any, eps: Any) -> bool:
        """Whether these are plain tensors of a processor, and a number."""
        # No class is compared: that Tensor is one object under two names would be guarded, too.
        return (
            is_instance(x, tensor)
            and (weight is None or is_instance(weight, tensor))
            and (bias is None or is_instance(bias, tensor))
            and not has_torch_function((x, weight, bias))
            and x.is_cpu
            and x.layout == strided
            and x.is_floating_point()
            and not has_attribute(x, "device_mesh")
            and is_instance(eps, real)
            and -1e300 < eps < 1e300
            and not is_exporting()
        )

    def is_ordered(x: Tensor) -> bool:
        """Whether the output has the order of this input; what has another one is copied first."""
        form = formats.get(x.dim())
        return x.is_contiguous() or (form is not None and x.is_contiguous(memory_format=form))

    def is_like(residual: Any, x: Tensor) -> bool:
        """Whether these two are added by the operator: of one shape, type and device."""
        return (
            is_instance(residual, tensor)
            and not has_torch_function((residual,))
            and residual.is_cpu
            and residual.layout == strided
            and residual.dtype == x.dtype
            and residual.shape == x.shape
            and not has_attribute(residual, "device_mesh")
        )

    def norm_of_sum(
        x: Tensor,
        residual: Tensor,
        weight: Any,
        bias: Any,
        text: str,
        prenorm: Any,
        activation: Any,
    ) -> Any:
        fused, behind = split_known(activation)
        y, h, _ = add(x, residual, weight, bias, None, 0.0, text, fused)
        y = y if behind is None else activate(y, behind)
        return (y, h) if prenorm else y

    def trailing_axes(x: Tensor, shape: Any) -> str | None:
        """The axes of a norm over the trailing axes, if x ends in ``shape``."""
        if (
            not is_instance(shape, sequence)
            or not 1 <= length(shape) <= 8
            or x.dim() < length(shape)
            or not is_ordered(x)
        ):
            return None
        return trailing[length(shape) - 1] if sequence(x.shape[-length(shape) :]) == shape else None

    return Seen(layer_norm, rms_norm, channel_norm, add_layer_norm, add_rms_norm)


def substitute(short: str, seen: Callable[..., Any]) -> None:
    """Have compilers see ``seen`` where the native module's ``short`` is called."""
    if _torch.is_connected:
        short_way = getattr(_torch._native, short)
        torch.compiler.substitute_in_graph(short_way, skip_signature_check=True)(seen)


for _name, _function in _seen()._asdict().items():
    substitute(f"short_{_name}", _function)
substitute("short_normalize", _torch._nothing)
