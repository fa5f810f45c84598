"""Modules: drop-in subclasses of torch.nn's norms, and :class:`Norm` for any scheme.

``isinstance``, parameter and buffer names, ``state_dict``, ``repr`` and the constructors are
torch.nn's; only ``forward`` differs. Every module has a ``scheme`` and takes a ``mask``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import functional
from .scheme import ArgumentError, Scheme, as_scheme

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNorm2d",
    "Norm",
    "RMSNorm",
]


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm over the trailing axes; see :class:`torch.nn.LayerNorm` and
    :func:`axisnorm.layer_norm`.

    >>> LayerNorm(4)(torch.tensor([1.0, 2.0, 4.0, 1.0]))
    tensor([-0.8165,  0.0000,  1.6330, -0.8165], grad_fn=<_ShortNormBackward>)
    """

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.layer_norm(self.normalized_shape, eps=self.eps)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, mask=mask
        )


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the trailing axes; see :class:`torch.nn.RMSNorm` and
    :func:`axisnorm.rms_norm`.

    >>> RMSNorm(4, elementwise_affine=False)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([0.3651, 0.7303, 1.0954, 1.4606])
    """

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.rms_norm(self.normalized_shape, eps=self.eps)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps, mask=mask)


class GroupNorm(torch.nn.GroupNorm):
    """GroupNorm of channels-first tensors; see :class:`torch.nn.GroupNorm` and
    :func:`axisnorm.group_norm`.

    Raises:
        ArgumentError: num_groups is not a positive divisor of num_channels.

    >>> GroupNorm(2, 4, affine=False)(torch.tensor([[0.0, 2.0, 5.0, 9.0]]))
    tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """

    def __init__(self, num_groups: int, num_channels: int, *args: Any, **kwargs: Any) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(
                "num_channels must be divisible by num_groups, a positive number. "
                f"num_channels={num_channels} and num_groups={num_groups} came. Change one of them."
            )
        super().__init__(num_groups, num_channels, *args, **kwargs)

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.group_norm(self.num_groups, eps=self.eps)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, mask=mask
        )


def _count(batches: Tensor, input: Tensor, mask: Tensor | None) -> None:
    """Count a batch of which something was seen."""
    if input.numel():
        batches.add_(1 if mask is None else mask.any())


class _BatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """What the three BatchNorms have in common."""

    @property
    def scheme(self) -> Scheme:
        """What this module computes in its present mode."""
        batch = self.training or self.running_mean is None
        return Scheme.batch_norm(
            eps=self.eps, momentum=self.momentum, statistics="batch" if batch else "running"
        )

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        batch = self.training or (self.running_mean is None and self.running_var is None)
        tracked = not self.training or self.track_running_stats
        counter = self.num_batches_tracked if self.training and tracked else None
        momentum = 0.0 if self.momentum is None else self.momentum
        if counter is not None and self.momentum is None:
            momentum = 1.0 / (float(counter) + 1.0)
        y = functional.batch_norm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            batch,
            momentum,
            self.eps,
            mask=mask,
        )
        # Last, so that a call that failed or saw no element leaves no trace.
        if counter is not None:
            _count(counter, input, mask)
        return y


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """BatchNorm of (N, C) or (N, C, L) tensors; see :class:`torch.nn.BatchNorm1d` and
    :func:`axisnorm.batch_norm`.

    >>> BatchNorm1d(1, affine=False)(torch.tensor([[0.0], [2.0]]))
    tensor([[-1.0000],
            [ 1.0000]])
    """


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """BatchNorm of (N, C, H, W) tensors; see :class:`torch.nn.BatchNorm2d` and
    :func:`axisnorm.batch_norm`.

    >>> BatchNorm2d(3).eval()(torch.zeros(1, 3, 2, 2)).abs().max().item()
    0.0
    """


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """BatchNorm of (N, C, D, H, W) tensors; see :class:`torch.nn.BatchNorm3d` and
    :func:`axisnorm.batch_norm`.

    >>> BatchNorm3d(3).eval()(torch.zeros(1, 3, 2, 2, 2)).abs().max().item()
    0.0
    """


class _InstanceNorm(torch.nn.modules.instancenorm._InstanceNorm):
    """What the three InstanceNorms have in common."""

    @property
    def scheme(self) -> Scheme:
        """What this module computes in its present mode."""
        batch = self.training or not self.track_running_stats
        return Scheme.instance_norm(
            eps=self.eps,
            momentum=0.0 if self.momentum is None else self.momentum,
            affine="c" if self.affine or self.track_running_stats else "",
            statistics="batch" if batch else "running",
        )

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        unbatched = input.dim() == self._get_no_batch_dim()
        channels = input.shape[0 if unbatched else 1]
        if channels != self.num_features:
            raise ArgumentError(
                f"This module normalizes {self.num_features} channels (num_features). The input of "
                f"shape {tuple(input.shape)} has {channels}. Change one of them."
            )
        y = functional.instance_norm(
            input.unsqueeze(0) if unbatched else input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
            mask=mask,
        )
        return y.squeeze(0) if unbatched else y


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """InstanceNorm of (N, C, L) tensors; see :class:`torch.nn.InstanceNorm1d` and
    :func:`axisnorm.instance_norm`.

    >>> InstanceNorm1d(1)(torch.tensor([[[0.0, 2.0]]]))
    tensor([[[-1.0000,  1.0000]]])
    """


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """InstanceNorm of (N, C, H, W) tensors; see :class:`torch.nn.InstanceNorm2d` and
    :func:`axisnorm.instance_norm`.

    >>> InstanceNorm2d(3)(torch.zeros(2, 3, 1, 1)).abs().max().item()
    0.0
    """


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """InstanceNorm of (N, C, D, H, W) tensors; see :class:`torch.nn.InstanceNorm3d` and
    :func:`axisnorm.instance_norm`.

    >>> InstanceNorm3d(3)(torch.zeros(2, 3, 1, 1, 1)).abs().max().item()
    0.0
    """


class _Affine(torch.nn.Module):
    """A weight and a bias, each of which may be None."""

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def _add_parameters(
        self, shape: Sequence[int], weight: bool, bias: bool, device: Any, dtype: Any
    ) -> None:
        for name, wanted in (("weight", weight), ("bias", bias)):
            values = torch.empty(tuple(shape), device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if values is None else torch.nn.Parameter(values))
        self.reset_parameters()

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """A weight that multiplies by one, a bias of zero."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.scheme.weight_offset)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class LayerNorm2d(_Affine):
    """LayerNorm over the channels of (N, C, H, W) tensors, as in ConvNeXt.

    Args:
        num_channels: C.
        eps: added to the variance.
        affine: whether there are a weight and a bias of shape (C,).
        bias: whether there is a bias.

    >>> LayerNorm2d(2, affine=False)(torch.tensor([0.0, 2.0]).reshape(1, 2, 1, 1)).flatten()
    tensor([-1.0000,  1.0000])
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self._add_parameters((num_channels,), affine, affine and bias, device, dtype)

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.layer_norm_2d(eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}, affine={self.affine}"

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if input.dim() < 2 or input.shape[1] != self.num_channels:
            raise ArgumentError(
                f"This module normalizes {self.num_channels} channels on axis 1. An input of shape "
                f"{tuple(input.shape)} came. Give a channels-first tensor."
            )
        return functional.layer_norm_2d(input, self.weight, self.bias, self.eps, mask=mask)


class AddLayerNorm(LayerNorm):
    """LayerNorm of a residual sum; see :func:`axisnorm.add_layer_norm`.

    Args:
        normalized_shape: the sizes of the trailing axes that share a mean.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and a bias.
        bias: whether there is a bias.
        dropout_p: the probability that an element of the first input is dropped, in training.
        prenorm: return (y, h).

    >>> layer = AddLayerNorm(2, elementwise_affine=False)
    >>> layer(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor([-1.0000,  1.0000])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dropout_p: float = 0.0,
        prenorm: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.dropout_p = dropout_p
        self.prenorm = prenorm

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}, prenorm={self.prenorm}"

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return functional.add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            dropout_p=self.dropout_p,
            training=self.training,
            prenorm=self.prenorm,
            mask=mask,
        )


class AddRMSNorm(RMSNorm):
    """RMSNorm of a residual sum; see :func:`axisnorm.add_rms_norm`.

    Args:
        normalized_shape: the sizes of the trailing axes that share a root mean square.
        eps: added to the mean square; None is the machine epsilon of the compute type.
        elementwise_affine: whether there is a weight.
        dropout_p: the probability that an element of the first input is dropped, in training.
        prenorm: return (y, h).

    >>> AddRMSNorm(2, elementwise_affine=False)(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]))
    tensor([0.8485, 1.1314])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dropout_p: float = 0.0,
        prenorm: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.dropout_p = dropout_p
        self.prenorm = prenorm

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}, prenorm={self.prenorm}"

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return functional.add_rms_norm(
            x,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            dropout_p=self.dropout_p,
            training=self.training,
            prenorm=self.prenorm,
            mask=mask,
        )


class Norm(_Affine):
    """Any scheme as a module.

    Args:
        scheme: a :class:`axisnorm.Scheme`, its text, or the name of a preset.
        sizes: the sizes of named axes; those of the affine axes are needed for parameters.
        weight: whether there is a weight, where the scheme has affine axes.
        bias: whether there is a bias, where the scheme has affine axes.
        track_running_stats: keep running statistics in training and normalize with them in
            evaluation. Their shape is that of the kept affine axes.
        fields: further fields of the scheme.

    Raises:
        ArgumentError: a size is missing, or does not fit.

    >>> norm = Norm("n [c] h w", affine="c", sizes={"c": 96}, eps=1e-6)
    >>> norm
    Norm('n [(c=96)] h w; affine=c; eps=1e-06')
    >>> norm(torch.randn(2, 96, 7, 7)).shape
    torch.Size([2, 96, 7, 7])
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        scheme: Scheme | str,
        *,
        sizes: Mapping[str, int] | None = None,
        weight: bool = True,
        bias: bool | None = None,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        read = as_scheme(scheme).replace(**fields).with_sizes(sizes or {})
        self._scheme = read
        self.track_running_stats = track_running_stats or read.statistics == "running"
        affine = bool(read.affine)
        has_bias = read.center if bias is None else bias
        shape = read.parameter_shape() if affine and (weight or has_bias) else ()
        if self.track_running_stats:
            channels = read.running_shape()
            self.register_buffer("running_mean", torch.zeros(channels, device=device, dtype=dtype))
            self.register_buffer("running_var", torch.ones(channels, device=device, dtype=dtype))
            self.register_buffer(
                "num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device)
            )
        self._add_parameters(shape, affine and weight, affine and has_bias, device, dtype)

    @property
    def scheme(self) -> Scheme:
        """What this module computes in its present mode."""
        if not self.track_running_stats:
            return self._scheme
        return self._scheme.replace(statistics="batch" if self.training else "running")

    def extra_repr(self) -> str:
        return repr(str(self._scheme))

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.track_running_stats:
            return functional.normalize(input, self._scheme, self.weight, self.bias, mask=mask)
        scheme = self.scheme
        if self.training and scheme.momentum is None:
            scheme = scheme.replace(momentum=1.0 / (float(self.num_batches_tracked) + 1.0))
        y = functional.normalize(
            input,
            scheme,
            self.weight,
            self.bias,
            running_mean=self.running_mean,
            running_var=self.running_var,
            mask=mask,
        )
        if self.training:
            _count(self.num_batches_tracked, input, mask)
        return y
