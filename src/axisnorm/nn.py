"""Modules: drop-in subclasses of torch.nn's norms, and :class:`Norm` for any scheme.

``isinstance``, parameter and buffer names, ``state_dict``, ``repr`` and the constructors are
torch.nn's; only ``forward`` differs. Every module has a ``scheme``, takes a ``mask``, and its last
argument is ``activation``, the name of what follows the norm (:func:`axisnorm.normalize`); the
scheme does not speak of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.parameter import is_lazy

# One by one: torch.compile guards the module that a function is looked up in, too.
from .functional import (
    add_layer_norm,
    add_rms_norm,
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    layer_norm_2d,
    normalize,
    rms_norm,
)
from .reference import checked_activation
from .scheme import ArgumentError, DtypeError, Scheme, as_scheme

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
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "Norm",
    "RMSNorm",
]


class _Traced(torch.nn.Module):
    """What torch's tracers make of these modules, and what follows the norm."""

    __jit_unused_properties__: ClassVar[list[str]] = ["scheme"]

    activation: str | None = None
    """None too for modules that became one of these, or were pickled before there was one."""

    def _set_activation(self, activation: str | None) -> None:
        # The class has None: nothing is added to modules that have no activation.
        if checked_activation(activation) is not None:
            self.activation = activation

    def _with_activation(self, said: str) -> str:
        return said if self.activation is None else f"{said}, activation={self.activation!r}"

    def extra_repr(self) -> str:
        return self._with_activation(super().extra_repr())

    def _node(self, *args: Any) -> Any:
        """A call of this module in the graph that torch.fx records, None if it is the graph's root.

        torch.fx takes the modules of torch.nn for leaves by their Python module's name; these say
        so themselves.
        """
        tracer = next(arg.tracer for arg in args if isinstance(arg, Proxy))
        if not isinstance(tracer, torch.fx.Tracer) or tracer.root is self:
            return None
        given = args[:-1] if args[-1] is None else args  # a mask comes last
        return tracer.create_proxy("call_module", tracer.path_of_module(self), given, {})

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """torch.nn's module with the same tensors, which torch.jit.script can compile."""
        name = type(self).__name__
        if type(self).__module__ != __name__:
            return self  # a subclass, whose forward is its own
        if not hasattr(torch.nn, name):
            raise NotImplementedError(
                f"torch.jit.script compiles what torch.nn has. {name} came. "
                "Use torch.jit.trace or torch.export."
            )
        if self.activation is not None:
            raise NotImplementedError(
                "torch.jit.script compiles what torch.nn has. A norm with an activation came. "
                "Use torch.jit.trace or torch.export, or a module of its own for the activation."
            )
        twin = copy.copy(self)
        twin.__class__ = getattr(torch.nn, name)
        return twin


def _activation(module: Any) -> str | None:
    """What follows a module's norm: nothing, if it is torch.nn's and calls a forward from here."""
    return getattr(module, "activation", None)


def _reset(module: Any, weight: float = 1.0) -> None:
    """The initial weight and bias, of modules that may have neither."""
    if module.weight is not None:
        torch.nn.init.constant_(module.weight, weight)
    if module.bias is not None:
        torch.nn.init.zeros_(module.bias)


def _refuse_kind(input: object) -> NoReturn:
    raise DtypeError(
        f"The input is a torch.Tensor. A {type(input).__name__} came. "
        "Convert it with torch.as_tensor."
    ) from None


def _check_channels(input: Tensor, axis: int, channels: int) -> None:
    """Refuse what a module without tensors of its own would not notice."""
    try:
        wrong = input.dim() > axis and input.shape[axis] != channels
    except AttributeError:
        _refuse_kind(input)
    if wrong:
        raise ArgumentError(
            f"This module normalizes {channels} channels. The input of shape "
            f"{tuple(input.shape)} has {input.shape[axis]} on axis {axis}. Change one of them."
        )


class LayerNorm(_Traced, torch.nn.LayerNorm):
    """LayerNorm over the trailing axes; see :class:`torch.nn.LayerNorm` and
    :func:`axisnorm.layer_norm`.

    >>> LayerNorm(4)(torch.tensor([1.0, 2.0, 4.0, 1.0]))
    tensor([-0.8165,  0.0000,  1.6330, -0.8165], grad_fn=<_ShortNormBackward>)
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
        activation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_activation(activation)

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.layer_norm(self.normalized_shape, eps=self.eps)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy) and (node := self._node(input, mask)) is not None:
            return node
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            mask=mask,
            activation=_activation(self),
        )


class RMSNorm(_Traced, torch.nn.RMSNorm):
    """RMSNorm over the trailing axes; see :class:`torch.nn.RMSNorm` and
    :func:`axisnorm.rms_norm`.

    >>> RMSNorm(4, elementwise_affine=False)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([0.3651, 0.7303, 1.0954, 1.4606])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_activation(activation)

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.rms_norm(self.normalized_shape, eps=self.eps)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Proxy) and (node := self._node(x, mask)) is not None:
            return node
        # A default of the function would be a variable of a dynamic graph, and compiled twice.
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            weight_offset=0.0,
            mask=mask,
            activation=_activation(self),
        )


class GroupNorm(_Traced, torch.nn.GroupNorm):
    """GroupNorm of channels-first tensors; see :class:`torch.nn.GroupNorm` and
    :func:`axisnorm.group_norm`.

    Raises:
        ArgumentError: num_groups is not a positive divisor of num_channels.

    >>> GroupNorm(2, 4, affine=False)(torch.tensor([[0.0, 2.0, 5.0, 9.0]]))
    tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(
                f"num_channels ({num_channels}) must be divisible by num_groups ({num_groups}), a "
                "positive number. Change one of them."
            )
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:  # not an argument of older versions of torch
            self.register_parameter("bias", None)
        self._set_activation(activation)

    def reset_parameters(self) -> None:
        _reset(self)

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.group_norm(self.num_groups, eps=self.eps)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy) and (node := self._node(input, mask)) is not None:
            return node
        weight = self.weight
        if weight is None:
            _check_channels(input, 1, self.num_channels)
        return group_norm(
            input,
            self.num_groups,
            weight,
            self.bias,
            self.eps,
            mask=mask,
            activation=_activation(self),
        )


class _ChannelNorm(_Traced, torch.nn.modules.batchnorm._NormBase):
    """What BatchNorms and InstanceNorms have in common."""

    _ranks: ClassVar[tuple[int, ...]]
    """The numbers of axes of inputs."""

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        _reset(self)

    def _check_input_dim(self, input: Tensor) -> None:
        try:
            rank = input.dim()
        except AttributeError:
            _refuse_kind(input)
        if rank not in self._ranks:
            wanted = " or ".join(f"{n}D" for n in self._ranks)
            raise ArgumentError(
                f"expected {wanted} input (got {rank}D input). Shape {tuple(input.shape)} came for "
                f"{self.num_features} channels. Use the norm of that rank, or reshape."
            )


_is_compiling = torch.compiler.is_compiling
_transforms = torch._C._are_functorch_transforms_active


def _averaging(module: Any, run: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
    """A batch that moves running statistics to the average of all batches: momentum=None."""
    mean, var, counter = module.running_mean, module.running_var, module.num_batches_tracked
    if not (_is_compiling() or _transforms()):
        return run(mean, var, 1.0 / (float(counter) + 1.0))
    # A number that is read off the counter would be compiled in, and vmap has many counters.
    # This batch's own are averaged.
    own = mean.clone(), var.clone()
    y = run(*own, 1.0)
    for running, new in zip((mean, var), own, strict=True):
        running.add_((new - running) * (1.0 / (counter + 1.0)).to(running.dtype))
    return y


def _check_countable(batches: Tensor) -> None:
    """Let torch refuse, while nothing has moved, a counter that a transform captured."""
    if not _is_compiling() and _transforms():
        batches.add_(0)


def _count(batches: Tensor, input: Tensor, mask: Tensor | None) -> None:
    """Count a batch of which something was seen."""
    if input.numel():
        batches.add_(1 if mask is None else mask.any())


class _BatchNorm(_ChannelNorm, torch.nn.modules.batchnorm._BatchNorm):
    """What the three BatchNorms have in common."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # not an argument of older versions of torch
            self.register_parameter("bias", None)
        self._set_activation(activation)

    @property
    def scheme(self) -> Scheme:
        """What this module computes in its present mode."""
        batch = self.training or self.running_mean is None
        return Scheme.batch_norm(
            eps=self.eps, momentum=self.momentum, statistics="batch" if batch else "running"
        )

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy) and (node := self._node(input, mask)) is not None:
            return node
        self._check_input_dim(input)
        weight, running_mean, running_var = self.weight, self.running_mean, self.running_var
        batch = self.training or (running_mean is None and running_var is None)
        counter, momentum = None, self.momentum
        if self.training:
            if not self.track_running_stats:
                running_mean = running_var = None
            else:
                counter = self.num_batches_tracked
        if counter is not None:
            _check_countable(counter)
        if weight is None and running_mean is None:
            _check_channels(input, 1, self.num_features)

        def run(mean: Tensor | None, var: Tensor | None, momentum: float) -> Tensor:
            return batch_norm(
                input,
                mean,
                var,
                weight,
                self.bias,
                batch,
                momentum,
                self.eps,
                mask=mask,
                activation=_activation(self),
            )

        if momentum is None and counter is not None:
            y = _averaging(self, run)
        else:
            y = run(running_mean, running_var, 0.0 if momentum is None else momentum)
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

    _ranks = (2, 3)


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """BatchNorm of (N, C, H, W) tensors; see :class:`torch.nn.BatchNorm2d` and
    :func:`axisnorm.batch_norm`.

    >>> BatchNorm2d(3).eval()(torch.zeros(1, 3, 2, 2)).abs().max().item()
    0.0
    """

    _ranks = (4,)


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """BatchNorm of (N, C, D, H, W) tensors; see :class:`torch.nn.BatchNorm3d` and
    :func:`axisnorm.batch_norm`.

    >>> BatchNorm3d(3).eval()(torch.zeros(1, 3, 2, 2, 2)).abs().max().item()
    0.0
    """

    _ranks = (5,)


class _InstanceNorm(_ChannelNorm, torch.nn.modules.instancenorm._InstanceNorm):
    """What the three InstanceNorms have in common."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # not an argument of older versions of torch
            self.register_parameter("bias", None)
        self._set_activation(activation)

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
        if isinstance(input, Proxy) and (node := self._node(input, mask)) is not None:
            return node
        self._check_input_dim(input)
        axis = input.dim() - self._get_no_batch_dim()
        unbatched = axis == 0
        _check_channels(input, axis, self.num_features)
        y = instance_norm(
            input.unsqueeze(0) if unbatched else input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
            mask=mask,
            activation=_activation(self),
        )
        return y.squeeze(0) if unbatched else y


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """InstanceNorm of (N, C, L) or (C, L) tensors; see :class:`torch.nn.InstanceNorm1d` and
    :func:`axisnorm.instance_norm`.

    >>> InstanceNorm1d(1)(torch.tensor([[[0.0, 2.0]]]))
    tensor([[[-1.0000,  1.0000]]])
    """

    _ranks = (2, 3)


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """InstanceNorm of (N, C, H, W) or (C, H, W) tensors; see :class:`torch.nn.InstanceNorm2d` and
    :func:`axisnorm.instance_norm`.

    >>> InstanceNorm2d(3)(torch.zeros(2, 3, 1, 1)).abs().max().item()
    0.0
    """

    _ranks = (3, 4)


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """InstanceNorm of (N, C, D, H, W) or (C, D, H, W) tensors; see
    :class:`torch.nn.InstanceNorm3d` and :func:`axisnorm.instance_norm`.

    >>> InstanceNorm3d(3)(torch.zeros(2, 3, 1, 1, 1)).abs().max().item()
    0.0
    """

    _ranks = (4, 5)


class _Lazy(torch.nn.modules.batchnorm._LazyNormBase):
    """What the norms have in common whose first input says the number of channels."""

    _ranks: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        super().__init__(eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # not an argument of older versions of torch
            self.register_parameter("bias", None)
        self._set_activation(activation)

    _set_activation: Any
    _check_input_dim: Any = _ChannelNorm._check_input_dim

    def initialize_parameters(self, input: Tensor, mask: Tensor | None = None) -> None:
        # Before anything is made, so that a wrong first input leaves no trace.
        self._check_input_dim(input)
        if self.num_features:
            return
        unbatched = isinstance(self, _InstanceNorm) and input.dim() == self._get_no_batch_dim()
        channels = input.shape[0 if unbatched else 1]
        given: tuple[Any, ...] = (self.weight, self.bias, self.running_mean, self.running_var)
        tensors = [tensor for tensor in given if tensor is not None]
        unknown = [tensor for tensor in tensors if is_lazy(tensor)]
        # A state that was loaded has said the number of channels already.
        self.num_features = channels if unknown or not tensors else len(tensors[0])
        for tensor in unknown:
            tensor.materialize((channels,))
        if unknown:
            self.reset_parameters()


class LazyBatchNorm1d(_Lazy, torch.nn.LazyBatchNorm1d, _BatchNorm):
    """A :class:`BatchNorm1d` whose first input says num_features.

    >>> norm = LazyBatchNorm1d()
    >>> _ = norm(torch.zeros(2, 5))
    >>> norm
    BatchNorm1d(5, eps=1e-05, momentum=0.1, affine=True...track_running_stats=True)
    """

    _ranks = BatchNorm1d._ranks
    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_Lazy, torch.nn.LazyBatchNorm2d, _BatchNorm):
    """A :class:`BatchNorm2d` whose first input says num_features."""

    _ranks = BatchNorm2d._ranks
    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_Lazy, torch.nn.LazyBatchNorm3d, _BatchNorm):
    """A :class:`BatchNorm3d` whose first input says num_features."""

    _ranks = BatchNorm3d._ranks
    cls_to_become = BatchNorm3d


class LazyInstanceNorm1d(_Lazy, torch.nn.LazyInstanceNorm1d, _InstanceNorm):
    """An :class:`InstanceNorm1d` whose first input says num_features.

    >>> norm = LazyInstanceNorm1d(affine=False, track_running_stats=False)
    >>> norm(torch.tensor([[[0.0, 2.0]]]))
    tensor([[[-1.0000,  1.0000]]])
    >>> norm.num_features
    1
    """

    _ranks = InstanceNorm1d._ranks
    cls_to_become = InstanceNorm1d


class LazyInstanceNorm2d(_Lazy, torch.nn.LazyInstanceNorm2d, _InstanceNorm):
    """An :class:`InstanceNorm2d` whose first input says num_features."""

    _ranks = InstanceNorm2d._ranks
    cls_to_become = InstanceNorm2d


class LazyInstanceNorm3d(_Lazy, torch.nn.LazyInstanceNorm3d, _InstanceNorm):
    """An :class:`InstanceNorm3d` whose first input says num_features."""

    _ranks = InstanceNorm3d._ranks
    cls_to_become = InstanceNorm3d


class _Affine(_Traced):
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
        _reset(self, 1.0 - self.scheme.weight_offset)


class LayerNorm2d(_Affine):
    """LayerNorm over the channels of (N, C, H, W) tensors, as in ConvNeXt.

    Args:
        num_channels: C.
        eps: added to the variance.
        affine: whether there are a weight and a bias of shape (C,).
        device: of the parameters.
        dtype: of the parameters.
        bias: whether there is a bias.
        activation: what follows the norm; see :func:`axisnorm.normalize`.

    Raises:
        ArgumentError: the input has not C channels on axis 1.

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
        activation: str | None = None,
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self._set_activation(activation)
        self._add_parameters((num_channels,), affine, affine and bias, device, dtype)

    @property
    def scheme(self) -> Scheme:
        """What this module computes."""
        return Scheme.layer_norm_2d(eps=self.eps)

    def extra_repr(self) -> str:
        said = (
            f"{self.num_channels}, eps={self.eps}, affine={self.affine}, "
            f"bias={self.bias is not None}"
        )
        return self._with_activation(said)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy) and (node := self._node(input, mask)) is not None:
            return node
        _check_channels(input, 1, self.num_channels)
        return layer_norm_2d(
            input, self.weight, self.bias, self.eps, mask=mask, activation=self.activation
        )


class AddLayerNorm(LayerNorm):
    """LayerNorm of a residual sum; see :func:`axisnorm.add_layer_norm`.

    Args:
        normalized_shape: the sizes of the trailing axes that share a mean.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and a bias.
        bias: whether there is a bias.
        device: of the parameters.
        dtype: of the parameters.
        dropout_p: the probability that an element of the first input is dropped, in training.
        prenorm: return (y, h).
        activation: what follows the norm, of y; see :func:`axisnorm.normalize`.

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
        activation: str | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device, dtype, activation=activation
        )
        self.dropout_p = dropout_p
        self.prenorm = prenorm

    def extra_repr(self) -> str:
        said = torch.nn.LayerNorm.extra_repr(self)
        return self._with_activation(f"{said}, dropout_p={self.dropout_p}, prenorm={self.prenorm}")

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(input, Proxy) and (node := self._node(input, residual, mask)) is not None:
            return node
        return add_layer_norm(
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
            activation=self.activation,
        )


class AddRMSNorm(RMSNorm):
    """RMSNorm of a residual sum; see :func:`axisnorm.add_rms_norm`.

    Args:
        normalized_shape: the sizes of the trailing axes that share a root mean square.
        eps: added to the mean square; None is the machine epsilon of the compute type.
        elementwise_affine: whether there is a weight.
        device: of the parameters.
        dtype: of the parameters.
        dropout_p: the probability that an element of the first input is dropped, in training.
        prenorm: return (y, h).
        activation: what follows the norm, of y; see :func:`axisnorm.normalize`.

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
        activation: str | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, activation=activation
        )
        self.dropout_p = dropout_p
        self.prenorm = prenorm

    def extra_repr(self) -> str:
        said = torch.nn.RMSNorm.extra_repr(self)
        return self._with_activation(f"{said}, dropout_p={self.dropout_p}, prenorm={self.prenorm}")

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(x, Proxy) and (node := self._node(x, residual, mask)) is not None:
            return node
        return add_rms_norm(
            x,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            dropout_p=self.dropout_p,
            training=self.training,
            prenorm=self.prenorm,
            mask=mask,
            activation=self.activation,
        )


class Norm(_Affine):
    """Any scheme as a module.

    Args:
        scheme: a :class:`axisnorm.Scheme`, its text, or the name of a preset.
        sizes: the sizes of named axes; those of the affine axes are needed for parameters.
        weight: whether there is a weight, where the scheme has affine axes.
        bias: whether there is a bias, where the scheme has affine axes.
        track_running_stats: keep running statistics in training and normalize with them in
            evaluation. Their shape is that of the kept affine axes. What in torch looks for
            BatchNorms by their class, as torch.optim.swa_utils.update_bn, passes over them.
        device: of the parameters and running statistics.
        dtype: of the parameters and running statistics.
        activation: what follows the norm; see :func:`axisnorm.normalize`.
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
        activation: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        self._set_activation(activation)
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

    def reset_running_stats(self) -> None:
        """A mean of zero, a variance of one, no batch seen."""
        if self.track_running_stats:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        super().reset_parameters()

    def extra_repr(self) -> str:
        said = [repr(str(self._scheme))]
        if self._scheme.affine:
            said += [f"{name}=False" for name, p in self._parameters.items() if p is None]
        if self.track_running_stats and self._scheme.statistics == "batch":
            said.append("track_running_stats=True")
        return self._with_activation(", ".join(said))

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if isinstance(input, Proxy) and (node := self._node(input, mask)) is not None:
            return node
        if not self.track_running_stats:
            return normalize(
                input,
                self._scheme,
                self.weight,
                self.bias,
                mask=mask,
                activation=self.activation,
            )
        scheme = self.scheme

        def run(mean: Tensor, var: Tensor, momentum: float | None) -> Tensor:
            return normalize(
                input,
                scheme if momentum is None else scheme.replace(momentum=momentum),
                self.weight,
                self.bias,
                running_mean=mean,
                running_var=var,
                mask=mask,
                activation=self.activation,
            )

        if self.training:
            _check_countable(self.num_batches_tracked)
        if self.training and scheme.momentum is None:
            y = _averaging(self, run)
        else:
            y = run(self.running_mean, self.running_var, None)
        if self.training:
            _count(self.num_batches_tracked, input, mask)
        return y
