"""The doors: one function that normalizes by a scheme, and the named norms on top of it.

Everything takes torch tensors and NumPy arrays alike and returns what came in. Argument order,
defaults and error types are those of :mod:`torch.nn.functional` where it has the function.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _build, _numpy, _route
from .reference import checked_activation
from .scheme import (
    ArgumentError,
    DtypeError,
    Scheme,
    checked_shape,
    finite,
    trailing_names,
)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "empty_cache",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "layer_norm_2d",
    "normalize",
    "rms_norm",
    "statistics",
]

Array = Any
"""A numpy.ndarray or a torch.Tensor."""


_native = _build.native

# Plain arrays, and once torch is seen its plain tensors that nothing watches; None for everything
# else.
_short_layer_norm: Callable[..., Any] = _numpy.short_layer_norm
_short_rms_norm: Callable[..., Any] = _numpy.short_rms_norm
_short_channel_norm: Callable[..., Any] = _numpy.short_channel_norm
_short_normalize: Callable[..., Any] = _numpy.short_normalize
_short_add_layer_norm: Callable[..., Any] = _numpy.short_add_layer_norm
_short_add_rms_norm: Callable[..., Any] = _numpy.short_add_rms_norm


def normalize(
    x: Array,
    scheme: Scheme | str,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""Normalize ``x`` as a scheme says.

    .. math:: y = \frac{x - m}{\sqrt{V + \epsilon}} (w + w_0) + b

    Args:
        x: float32, float64, float16 or bfloat16, of any shape that fits the scheme.
        scheme: a :class:`Scheme`, its text, or the name of a preset.
        weight: of shape ``Sizes.affine_shape``: the affine axes, parts of one axis as one. Its
            type may be another than x's (torch takes few such pairs): computed in the compute
            type, the output has x's.
        bias: of the same shape.
        running_mean: of shape ``Sizes.running_shape``. With ``statistics=batch`` it moves towards
            this batch's mean, with ``statistics=running`` it is what is subtracted.
        running_var: likewise for the variance.
        mask: boolean, broadcast to x; True where an element counts. Statistics and gradients are
            those of the valid elements, the output is 0 at the others, whatever stands there.
        out: where to write, like x; it may be x itself. Has no gradient.
        activation: ``"relu"``, ``"silu"`` or ``"gelu"`` (of erf, torch's default), applied to the
            result before it is rounded to x's type, in the same pass over memory. Where torch
            exports or transforms it is torch's own function, after the rounding.

    Returns:
        An array of x's type and shape, in the order in memory of x. The functions that torch has
        give contiguous memory for tensors that are transposed otherwise than by channels_last, as
        torch's do.

    Raises:
        ArgumentError: a shape, an axis, a value or the activation does not fit.
        DtypeError: x is not a floating-point array, or a mask is not boolean.

    >>> x = np.array([[1.0, 2.0, 4.0, 1.0], [6.0, 3.0, 2.0, 4.0]])
    >>> normalize(x, "n [d]").round(4).tolist()
    [[-0.8165, 0.0, 1.633, -0.8165], [1.5213, -0.5071, -1.1832, 0.169]]
    >>> normalize(x, "[n] d").round(4).tolist()
    [[-1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, 1.0]]
    """
    if mask is None:
        text = scheme.text if isinstance(scheme, Scheme) else scheme
        y = _short_normalize(x, text, weight, bias, running_mean, running_var, activation, out)
        if y is not None:
            return y
    inputs = (x, weight, bias, mask, running_mean, running_var)
    engine = _engine(*inputs)
    if engine is None:
        return _handle(
            normalize, inputs, x, scheme, weight, bias, running_mean=running_mean,
            running_var=running_var, mask=mask, out=out, activation=activation,
        )  # fmt: skip
    return engine.normalize(engine.Inputs(*inputs), scheme, out, checked_activation(activation))


def statistics(
    x: Array, scheme: Scheme | str, *, mask: Array | None = None
) -> tuple[Array, Array, Array]:
    r"""The mean, variance and rstd of every group.

    Args:
        x: as in :func:`normalize`.
        scheme: a :class:`Scheme`, its text, or the name of a preset.
        mask: as in :func:`normalize`.

    Returns:
        Three arrays of shape ``Sizes.statistics_shape`` in the compute type (float32 for half
        types): what is subtracted (0 where the scheme does not centre), the variance with the
        scheme's correction (the mean square where it does not centre), and what multiplies,
        :math:`1 / \sqrt{V + \epsilon}`.

    >>> mean, var, rstd = statistics(np.array([[1.0, 2.0, 4.0, 1.0]]), "n [d]")
    >>> mean.tolist(), var.tolist(), rstd.round(4).tolist()
    ([2.0], [1.5], [0.8165])
    """
    engine = _engine(x, mask)
    if engine is None:
        return _handle(statistics, (x, mask), x, scheme, mask=mask)
    return engine.statistics(x, scheme, mask)


def layer_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""LayerNorm over the trailing axes (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} w + b

    with one mean and one variance (divisor n) for each element of the leading axes.

    Args:
        x: of shape (..., \*normalized_shape).
        normalized_shape: the sizes of the trailing axes that share a mean.
        weight: of shape normalized_shape.
        bias: of shape normalized_shape.
        eps: added to the variance.
        mask: see :func:`normalize`.
        out: see :func:`normalize`.
        activation: see :func:`normalize`.

    Raises:
        ArgumentError: x does not end in normalized_shape, or a parameter has another shape.

    >>> layer_norm(np.array([[1.0, 2.0, 4.0, 1.0]]), 4).round(4).tolist()
    [[-0.8165, 0.0, 1.633, -0.8165]]
    """
    if mask is None:
        y = _short_layer_norm(x, normalized_shape, weight, bias, eps, activation, out)
        if y is not None:
            return y
    inputs = (x, weight, bias, mask)
    engine = _engine(*inputs)
    if engine is None:
        return _handle(
            layer_norm, inputs, x, normalized_shape, weight, bias, eps, mask=mask, out=out,
            activation=activation,
        )  # fmt: skip
    activation = checked_activation(activation)
    eps = finite("eps", eps)
    sizes = checked_shape(normalized_shape)
    if mask is None and out is None and _foreign(engine, x):
        return engine.activate(_own("layer_norm", x, sizes, weight, bias, eps), activation)
    scheme = f"{_trailing(engine, x, sizes)}; eps={eps!r}"
    laid_out = _laid_out(engine, x, out)
    if laid_out is not x:
        return layer_norm(laid_out, sizes, weight, bias, eps, mask=mask, activation=activation)
    return engine.normalize(engine.Inputs(*inputs), scheme, out, activation)


def rms_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""RMSNorm over the trailing axes (Zhang and Sennrich 2019, arXiv:1910.07467).

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} (w + w_0)

    Args:
        x: of shape (..., \*normalized_shape).
        normalized_shape: the sizes of the trailing axes that share a root mean square.
        weight: of shape normalized_shape.
        eps: added to the mean square; None is the machine epsilon of the compute type (float32
            for half types).
        weight_offset: 1.0 where the weight is stored around zero (Gemma).
        rounding: ``"before_affine"`` rounds x / rms to the type of x before the weight (Llama).
        mask: see :func:`normalize`.
        out: see :func:`normalize`.
        activation: see :func:`normalize`.

    Raises:
        ArgumentError: x does not end in normalized_shape, or the weight has another shape.

    >>> rms_norm(np.array([1.0, 2.0, 3.0, 4.0]), 4).round(7).tolist()
    [0.3651484, 0.7302967, 1.0954451, 1.4605935]
    """
    if mask is None:
        y = _short_rms_norm(
            x, normalized_shape, weight, eps, weight_offset, rounding, activation, out
        )
        if y is not None:
            return y
    inputs = (x, weight, None, mask)
    engine = _engine(*inputs)
    if engine is None:
        return _handle(
            rms_norm, inputs, x, normalized_shape, weight, eps, weight_offset=weight_offset,
            rounding=rounding, mask=mask, out=out, activation=activation,
        )  # fmt: skip
    activation = checked_activation(activation)
    sizes = checked_shape(normalized_shape)
    eps = None if eps is None else finite("eps", eps)
    plain = weight_offset == 0 and rounding == "once" and mask is None and out is None
    if plain and engine is not _numpy and (engine.is_foreign(x) or x.is_complex()):
        return engine.activate(_own("rms_norm", x, sizes, weight, eps), activation)
    fields = _rms_fields(eps, weight_offset, rounding)
    scheme = f"{_trailing(engine, x, sizes)}; {fields}"
    laid_out = _laid_out(engine, x, out)
    if laid_out is not x:
        return rms_norm(
            laid_out, sizes, weight, eps, weight_offset=weight_offset, rounding=rounding, mask=mask,
            activation=activation,
        )  # fmt: skip
    return engine.normalize(engine.Inputs(*inputs), scheme, out, activation)


def layer_norm_2d(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-6,
    *,
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""LayerNorm over the channels of a channels-first tensor (ConvNeXt, arXiv:2201.03545).

    One mean for each sample and position, taken over the channels.

    Args:
        x: of shape (N, C, ...).
        weight: of shape (C,).
        bias: of shape (C,).
        eps: added to the variance.
        mask: see :func:`normalize`.
        out: see :func:`normalize`.
        activation: see :func:`normalize`.

    >>> layer_norm_2d(np.array([[[0.0], [2.0]]])).round(4).tolist()
    [[[-1.0], [1.0]]]
    """
    if mask is None:
        y = _short_channel_norm(
            x, weight, bias, _route.LAYER_2D, None, eps, None, None, True, 0.0, activation, out
        )
        if y is not None:
            return y
    return normalize(
        x, f"n [c] ...; affine=c; eps={finite('eps', eps)!r}", weight, bias, mask=mask, out=out,
        activation=activation,
    )  # fmt: skip


def group_norm(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    """GroupNorm of a channels-first tensor (Wu and He 2018, arXiv:1803.08494).

    One mean for each sample and group of C / num_groups channels.

    Args:
        x: of shape (N, C, ...).
        num_groups: divides C.
        weight: of shape (C,).
        bias: of shape (C,).
        eps: added to the variance.
        mask: see :func:`normalize`.
        out: see :func:`normalize`.
        activation: see :func:`normalize`.

    Raises:
        ArgumentError: num_groups does not divide the channels.

    >>> group_norm(np.array([[0.0, 2.0, 5.0, 9.0]]), 2).round(4).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """
    if mask is None:
        y = _short_channel_norm(
            x, weight, bias, _route.GROUP, num_groups, eps, None, None, True, 0.0, activation, out
        )
        if y is not None:
            return y
    activation = checked_activation(activation)
    eps = finite("eps", eps)
    whole = isinstance(num_groups, int) or hasattr(num_groups, "__index__")
    if not whole or num_groups < 1:
        raise ArgumentError(
            f"num_groups is a positive whole number. {num_groups!r} came. "
            "Give a number that divides the channels."
        )
    engine = _engine(x, weight, bias, mask)
    if mask is None and out is None and engine is not None and _foreign(engine, x):
        return engine.activate(_own("group_norm", x, num_groups, weight, bias, eps), activation)
    text = f"n (g={int(num_groups)} [c]) [...]; affine=g c; eps={eps!r}"
    laid_out = _laid_out(engine, x, out)
    if laid_out is not x:
        return group_norm(laid_out, num_groups, weight, bias, eps, mask=mask, activation=activation)
    return normalize(x, text, weight, bias, mask=mask, out=out, activation=activation)


def instance_norm(
    x: Array,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    """InstanceNorm of a channels-first tensor (Ulyanov et al. 2016, arXiv:1607.08022).

    One mean for each sample and channel.

    Args:
        x: of shape (N, C, ...).
        running_mean: of shape (C,). Moves towards the mean over the samples.
        running_var: of shape (C,).
        weight: of shape (C,).
        bias: of shape (C,).
        use_input_stats: False normalizes with the running statistics.
        momentum: the weight of the new value in running statistics.
        eps: added to the variance.
        mask: see :func:`normalize`.
        out: see :func:`normalize`.
        activation: see :func:`normalize`.

    >>> instance_norm(np.array([[[0.0, 2.0], [5.0, 9.0]]])).round(4).tolist()
    [[[-1.0, 1.0], [-1.0, 1.0]]]
    """
    if mask is None:
        y = _short_channel_norm(
            x, weight, bias, _route.INSTANCE, None, eps, running_mean, running_var, use_input_stats,
            momentum, activation, out,
        )  # fmt: skip
        if y is not None:
            return y
    activation = checked_activation(activation)
    eps, momentum = finite("eps", eps), finite("momentum", momentum)
    engine = _engine(x, weight, bias, mask, running_mean, running_var)
    if mask is None and out is None and engine is not None and _foreign(engine, x):
        y = _own(
            "instance_norm", x, running_mean, running_var, weight, bias, use_input_stats, momentum,
            eps,
        )  # fmt: skip
        return engine.activate(y, activation)
    laid_out = _laid_out(engine, x, out)
    if laid_out is not x:
        return instance_norm(
            laid_out, running_mean, running_var, weight, bias, use_input_stats, momentum, eps,
            mask=mask, activation=activation,
        )  # fmt: skip
    return normalize(
        x, _channels("n c [...]", use_input_stats, momentum, eps), weight, bias,
        running_mean=running_mean, running_var=running_var, mask=mask, out=out,
        activation=activation,
    )  # fmt: skip


def batch_norm(
    x: Array,
    running_mean: Array | None,
    running_var: Array | None,
    weight: Array | None = None,
    bias: Array | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Array | None = None,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""BatchNorm of a channels-first tensor (Ioffe and Szegedy 2015, arXiv:1502.03167).

    In training one mean for each channel, over batch and positions, with the divisor n; the
    stored variance has the divisor n - 1. Otherwise the running statistics.

    .. math:: \text{running} \leftarrow (1 - \text{momentum}) \text{running}
              + \text{momentum} \cdot \text{new}

    Args:
        x: of shape (N, C, ...).
        running_mean: of shape (C,), changed in training; None only in training. Under
            torch.func.vmap each sample changes its own, so it is mapped over.
        running_var: of shape (C,).
        weight: of shape (C,).
        bias: of shape (C,).
        training: normalize with this batch's statistics.
        momentum: the weight of the new value in running statistics.
        eps: added to the variance.
        mask: see :func:`normalize`.
        out: see :func:`normalize`.
        activation: see :func:`normalize`.

    Raises:
        ArgumentError: in training, there is but one value a channel, or eps is not positive; in
            evaluation, eps is negative. Nothing has changed then.

    >>> x = np.array([[1.0, 10.0], [3.0, 20.0]])
    >>> batch_norm(x, np.array([0.0, 5.0]), np.array([4.0, 25.0])).round(4).tolist()
    [[0.5, 1.0], [1.5, 3.0]]
    """
    if not (type(eps) is float and eps > 0.0):
        eps = _batch_eps(eps, training)
    if mask is None:
        y = _short_channel_norm(
            x, weight, bias, _route.BATCH, None, eps, running_mean, running_var, training, momentum,
            activation, out,
        )  # fmt: skip
        if y is not None:
            return y
    activation = checked_activation(activation)
    eps, momentum = finite("eps", eps), finite("momentum", momentum)
    engine = _engine(x, weight, bias, mask, running_mean, running_var)
    # torch has a meaning for one axis, if it is empty.
    one_axis = len(x.shape) == 1 and not x.shape[0] and engine is not _numpy
    if mask is None and out is None and engine is not None and (_foreign(engine, x) or one_axis):
        y = _own("batch_norm", x, running_mean, running_var, weight, bias, training, momentum, eps)
        return engine.activate(y, activation)
    if training and engine is not None and len(x.shape) >= 2 and not engine.is_tracing():
        values = math.prod(x.shape) // x.shape[1] if x.shape[1] else 0
        if values == 1:
            raise ArgumentError(
                "Expected more than 1 value per channel when training. "
                f"Shape {tuple(x.shape)} has one. Use a larger batch, or evaluate with running "
                "statistics."
            )
    laid_out = _laid_out(engine, x, out)
    if laid_out is not x:
        return batch_norm(
            laid_out, running_mean, running_var, weight, bias, training, momentum, eps, mask=mask,
            activation=activation,
        )  # fmt: skip
    return normalize(
        x, _channels("[n] c [...]", training, momentum, eps), weight, bias,
        running_mean=running_mean, running_var=running_var, mask=mask, out=out,
        activation=activation,
    )  # fmt: skip


def add_layer_norm(
    x: Array,
    residual: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = False,
    prenorm: bool = False,
    mask: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""LayerNorm of a residual sum, in one pass over memory.

    .. math:: h = \text{residual} + \mathrm{dropout}(x), \quad y = \mathrm{layer\_norm}(h)

    h is rounded to the type of x before it is normalized. What dropout drops follows from torch's
    generator, which one number is drawn from (:func:`torch.manual_seed` reproduces it), and from
    an element's place, by Philox4x32-10 (Salmon et al. 2011): backward computes it again, and
    nothing of it is kept. Kept elements are divided by 1 - dropout_p. Compiled functions draw
    other numbers, as they do for torch's own dropout.

    Args:
        x: of shape (..., \*normalized_shape).
        residual: of the same shape.
        normalized_shape: the sizes of the trailing axes that share a mean.
        weight: of shape normalized_shape.
        bias: of shape normalized_shape.
        eps: added to the variance.
        dropout_p: the probability that an element of x is dropped, in training.
        training: whether dropout acts.
        prenorm: return (y, h).
        mask: see :func:`normalize`. With one, dropout (torch's own), sum and norm are three steps.
        activation: of y; see :func:`normalize`.

    Raises:
        ArgumentError: the shapes differ, or do not end in normalized_shape. No random number has
            been drawn then.

    >>> add_layer_norm(np.array([1.0, 2.0]), np.array([1.0, 4.0]), 2).round(4).tolist()
    [-1.0, 1.0]
    """
    if mask is None:
        found = _short_add_layer_norm(
            x, residual, normalized_shape, weight, bias, eps, dropout_p, training, prenorm,
            activation,
        )  # fmt: skip
        if found is not None:
            return found
    inputs = (x, residual, weight, bias, mask)
    if _engine(*inputs) is None:
        return _handle(
            add_layer_norm, inputs, x, residual, normalized_shape, weight, bias, eps,
            dropout_p=dropout_p, training=training, prenorm=prenorm, mask=mask,
            activation=activation,
        )  # fmt: skip
    activation = checked_activation(activation)
    eps = finite("eps", eps)

    def norm(h: Array) -> Array:
        return layer_norm(h, normalized_shape, weight, bias, eps, mask=mask, activation=activation)

    return _add_norm(
        inputs, norm, normalized_shape, f"eps={eps!r}", dropout_p, training, prenorm, activation
    )


def add_rms_norm(
    x: Array,
    residual: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    dropout_p: float = 0.0,
    training: bool = False,
    prenorm: bool = False,
    mask: Array | None = None,
    activation: str | None = None,
) -> Array:
    r"""RMSNorm of a residual sum, in one pass over memory.

    .. math:: h = \text{residual} + \mathrm{dropout}(x), \quad y = \mathrm{rms\_norm}(h)

    with h and dropout as in :func:`add_layer_norm`.

    Args:
        x: of shape (..., \*normalized_shape).
        residual: of the same shape.
        normalized_shape: the sizes of the trailing axes that share a root mean square.
        weight: of shape normalized_shape.
        eps: added to the mean square; None is the machine epsilon of the compute type.
        weight_offset: see :func:`rms_norm`.
        rounding: see :func:`rms_norm`.
        dropout_p: the probability that an element of x is dropped, in training.
        training: whether dropout acts.
        prenorm: return (y, h).
        mask: see :func:`normalize`. With one, dropout (torch's own), sum and norm are three steps.
        activation: of y; see :func:`normalize`.

    Raises:
        ArgumentError: as :func:`add_layer_norm`.

    >>> add_rms_norm(np.array([1.0, 2.0]), np.array([2.0, 2.0]), 2).round(4).tolist()
    [0.8485, 1.1314]
    """
    if mask is None:
        found = _short_add_rms_norm(
            x, residual, normalized_shape, weight, eps, weight_offset, rounding, dropout_p,
            training, prenorm, activation,
        )  # fmt: skip
        if found is not None:
            return found
    inputs = (x, residual, weight, None, mask)
    if _engine(*inputs) is None:
        return _handle(
            add_rms_norm, inputs, x, residual, normalized_shape, weight, eps,
            weight_offset=weight_offset, rounding=rounding, dropout_p=dropout_p, training=training,
            prenorm=prenorm, mask=mask, activation=activation,
        )  # fmt: skip
    activation = checked_activation(activation)

    def norm(h: Array) -> Array:
        return rms_norm(
            h, normalized_shape, weight, eps, weight_offset=weight_offset, rounding=rounding,
            mask=mask, activation=activation,
        )  # fmt: skip

    fields = _rms_fields(eps, weight_offset, rounding)
    return _add_norm(
        inputs, norm, normalized_shape, fields, dropout_p, training, prenorm, activation
    )


def empty_cache() -> None:
    """Give the memory that is kept for large outputs back to the system.

    At most a quarter of the memory, and 1 GiB, is kept of torch tensors, and as much of arrays;
    ``AXISNORM_POOL=0`` in the environment keeps none.

    >>> empty_cache()
    """
    _numpy.empty_cache()
    if _torch_engine is not None:
        _torch_engine.empty_cache()


# --------------------------------------------------------------------------------------------


def _add_norm(
    inputs: tuple[Array, ...],
    norm: Callable[[Array], Array],
    normalized_shape: Any,
    fields: str,
    dropout_p: float,
    training: bool,
    prenorm: bool,
    activation: str | None,
) -> Array:
    """The norm of a sum by one engine, or in two steps: by torch, then by ``norm``.

    Args:
        inputs: x, residual, weight, bias and mask.
        fields: those of the norm's scheme.
    """
    x, residual, weight, bias, mask = inputs
    engine = _engine(x) or _torch_engine
    if (_engine(residual) or _torch_engine) is not engine:
        raise DtypeError(
            "x and residual are of one kind. A torch tensor and a NumPy array came. Convert one."
        )
    if engine is not _numpy:
        _torch_sum.check_kinds(x, residual)
    if tuple(x.shape) != tuple(residual.shape):
        raise ArgumentError(
            f"x and residual have one shape. {tuple(x.shape)} and {tuple(residual.shape)} came. "
            "Expand one of them first."
        )
    scheme = f"{_trailing(engine, x, checked_shape(normalized_shape))}; {fields}"
    dropout_p = finite("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(
            f"dropout_p is a probability in [0, 1). {dropout_p!r} came. Give such a number."
        )
    dropped = dropout_p if training else 0.0
    y: Array
    h: Array
    if engine is _numpy:
        if dropped:
            raise ArgumentError(
                "Dropout draws from torch's generator, which NumPy arrays have not. "
                f"dropout_p={dropout_p} came in training. Drop elements of x before the call."
            )
        if mask is None:
            y, h = _numpy.add_normalize(x, residual, weight, bias, scheme, prenorm, activation)
            return (y, h) if prenorm else y
    elif mask is None and _torch_sum.is_fused(x, residual):
        y, h = _torch_sum.normalize(x, residual, weight, bias, scheme, dropped, prenorm, activation)
        return (y, h) if prenorm else y
    if engine is not _numpy:
        _torch_sum.check_steps(x, residual, (weight, bias, mask), scheme, dropped)
    if dropped:
        x = sys.modules["torch"].nn.functional.dropout(x, dropped)
    h = residual + x
    y = norm(h)
    return (y, h) if prenorm else y


def _rms_fields(eps: float | None, weight_offset: float, rounding: str) -> str:
    """The fields of an RMSNorm's scheme."""
    # Formatted with !r: compilers cannot trace repr of a number that they hold for a variable.
    text = "none" if eps is None else f"{finite('eps', eps)!r}"
    return (
        f"center=false; eps={text}; weight_offset={finite('weight_offset', weight_offset)!r}"
        f"; rounding={rounding}"
    )


def _trailing(engine: Any, x: Array, sizes: tuple[int, ...]) -> str:
    """The axes of a norm over the trailing axes, refused where x does not end in ``sizes``."""
    names = trailing_names(len(sizes))
    axes = affine = " ".join(names)
    if engine.is_tracing():
        # The shape is made of traced values: the op compares, from the sizes in its scheme.
        axes = " ".join(f"({name}={size})" for name, size in zip(names, sizes, strict=True))
    else:
        shape = tuple(x.shape)
        if len(shape) < len(sizes) or shape[len(shape) - len(sizes) :] != sizes:
            raise ArgumentError(
                f"The input ends in normalized_shape. Given normalized_shape={list(sizes)}, the "
                f"input has shape {shape}. Change one of them."
            )
    return f"... [{axes}]; affine={affine}"


def _batch_eps(eps: Any, training: bool) -> float:
    """The eps of a BatchNorm, which torch wants positive; zero will do in evaluation."""
    eps = finite("eps", eps)
    if eps < 0.0 or (training and eps == 0.0):
        wanted = "positive during training" if training else "non-negative"
        raise ArgumentError(
            f"batch_norm eps must be {wanted}. {eps!r} came. Give a small positive number."
        )
    return eps


def _channels(axes: str, batch: bool, momentum: float, eps: float) -> str:
    statistics = "batch" if batch else "running"
    return f"{axes}; affine=c; eps={eps!r}; momentum={momentum!r}; statistics={statistics}"


_torch_engine: Any = None
_torch_sum: Any = None
"""The engine for norms of a sum."""


def _load_torch() -> Any:
    """Load the torch engine, once torch itself is loaded."""
    global _torch_engine, _short_layer_norm, _short_rms_norm, _short_channel_norm
    global _torch_sum, _short_add_layer_norm, _short_add_rms_norm, _short_normalize
    if _torch_engine is None and sys.modules.get("torch") is not None:
        from . import _torch, _torch_graph, _torch_residual  # noqa: F401

        if _torch.is_connected:
            _short_layer_norm = _native.short_layer_norm
            _short_rms_norm = _native.short_rms_norm
            _short_channel_norm = _native.short_channel_norm
            _short_normalize = _native.short_normalize
            _short_add_layer_norm = _native.short_add_layer_norm
            _short_add_rms_norm = _native.short_add_rms_norm
        _torch_sum = _torch_residual
        _torch_engine = _torch
    return _torch_engine


def _engine(x: Array, *others: Array | None) -> Any:
    """The engine of x's kind, or None where torch's function protocol is to be asked first."""
    if isinstance(x, np.ndarray):
        return _numpy
    engine = _torch_engine or _load_torch()
    if engine is not None:
        if engine.has_torch_function((x, *others)):
            return None
        if isinstance(x, engine.Tensor):
            return engine
    raise DtypeError(
        "The input is a torch.Tensor or a numpy.ndarray. "
        f"A {type(x).__name__} came. Convert it with torch.as_tensor or numpy.asarray."
    )


def _handle(function: Any, relevant: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    # A subclass may know the function of this name from torch, which has fewer arguments.
    given = {k: v for k, v in kwargs.items() if v is not function.__kwdefaults__.get(k, function)}
    return _torch_engine.handle_torch_function(function, relevant, *args, **given)


def _laid_out(engine: Any, x: Array, out: Array | None) -> Array:
    """x in the order in memory that the output of torch's function of this name has."""
    return (
        x if engine is None or engine is _numpy or out is not None else engine.in_memory_format(x)
    )


def _foreign(engine: Any, x: Array) -> bool:
    return engine is not _numpy and engine.is_foreign(x)


def _own(name: str, *args: Any) -> Array:
    """torch's own function, for tensors that axisnorm has no kernel for and torch has."""
    return getattr(sys.modules["torch"].nn.functional, name)(*args)


_load_torch()
