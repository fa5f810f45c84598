"""The torch engine: ops for the dispatcher, autograd, and the short way for plain eager tensors.

A tensor that nothing watches is computed at once. Everything else goes where torch expects it:
torch.func transforms and forward mode see the differentiable reference, dispatch modes, tracers,
compilers and tensor subclasses see ``torch.ops.axisnorm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.graph import increment_version
from torch.overrides import handle_torch_function, has_torch_function

from . import _build, _onnx, _route, _torch_memory, reference
from ._torch_memory import empty_cache
from .reference import Inputs
from .scheme import ArgumentError, DtypeError, Scheme, Sizes, as_scheme

__all__ = [
    "Inputs",
    "Tensor",
    "activate",
    "empty_cache",
    "exported",
    "handle_torch_function",
    "has_torch_function",
    "in_memory_format",
    "is_connected",
    "is_foreign",
    "is_tracing",
    "normalize",
    "split",
    "statistics",
]

_native = _build.native

TILED = 6 << 20
"""Bytes up to which a transposed tensor is copied by tiles; beyond, memory decides."""
_C = torch._C

NAMES = {getattr(torch, name): name for name in _route.DTYPES}
_CODES = {getattr(torch, name): code for code, name in enumerate(_route.DTYPES)}


# --------------------------------------------------------------------------------------------
# Who is watching

_is_compiling = torch.compiler.is_compiling
_is_exporting = getattr(torch.compiler, "is_exporting", None)  # new in torch 2.7
_dispatch_modes = _C._len_torch_dispatch_stack
_transforms = _C._are_functorch_transforms_active
_tracing = _C._get_tracing_state
_grad_enabled = torch.is_grad_enabled
_PLAIN = (Tensor, torch.nn.Parameter)


def is_foreign(x: Tensor) -> bool:
    """Whether torch has a kernel for this tensor and axisnorm has none."""
    return (
        x.device.type not in ("cpu", "meta")
        or x.is_nested
        or x.layout != torch.strided
        or x.is_quantized
        or hasattr(x, "device_mesh")
    )


def is_tracing() -> bool:
    """Whether torch.jit.trace is recording, so that shapes are traced values."""
    return _tracing() is not None


def in_memory_format(x: Tensor) -> Tensor:
    """x with its memory in the order of its axes or in channels_last; a copy if it is in neither.

    A norm's output has the input's order. That of torch's norms is one of these, and programs rely
    on it: by view(), and for the speed of the product of matrices that follows.
    """
    if is_foreign(x) or x.is_contiguous() or _onnx.is_exporting():
        return x
    axes = tuple(range(x.dim()))
    orders = [axes] if x.dim() not in (4, 5) else [axes, (0, *axes[2:], 1)]
    return x if any(_descends(x, order) for order in orders) else _contiguous(x)


def _contiguous(x: Tensor) -> Tensor:
    """x.contiguous(), of a large tensor without a gradient in memory that was used before.

    Up to the size of a cache it is copied by tiles, up to ten times as fast as by torch.
    """
    seen = _native is None or _is_compiling() or is_tracing() or _is_watched() or _needs_grad(x)
    if seen or not _is_plain(x) or x.nbytes < _torch_memory.LEAST:
        return x.contiguous()
    _check_memory(x)
    y = _torch_memory.empty_like(x, torch.contiguous_format)
    source = (x.data_ptr(), x.stride())
    tiled = x.nbytes <= TILED and _native.transpose(source, y.data_ptr(), x.shape, x.element_size())
    return y if tiled else y.copy_(x)


def _descends(x: Tensor, order: Sequence[int]) -> bool:
    """Whether axes in this order are from the outermost in memory to the innermost."""
    strides = x.stride()
    # The sizes of a trace are tensors.
    sizes = [2] * x.dim() if is_tracing() else x.shape
    # What is made for expanded axes that are outermost is outermost.
    outermost = itertools.takewhile(
        lambda axis: sizes[axis] == 1 or not strides[axis], range(x.dim())
    )
    first = len(list(outermost))
    steps = [strides[axis] for axis in order if axis >= first and sizes[axis] != 1]
    return all(steps) and all(outer >= inner for outer, inner in itertools.pairwise(steps))


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors in memory, so that their data may be read directly."""
    for t in tensors:
        if t is not None and not (
            type(t) in _PLAIN
            and t.is_cpu
            and not t.is_neg()
            and not t._is_zerotensor()
            and not torch._is_functional_tensor(t)
        ):
            return False
    return True


def _is_watched() -> bool:
    """Whether a transform, forward mode or a dispatch mode is to see the op."""
    return bool(_transforms() or forward_ad._current_level >= 0 or _dispatch_modes())


def _is_batched(t: Tensor) -> bool:
    """Whether this is one tensor of a batch that is_grads_batched=True passes through autograd."""
    return torch._C._functorch.is_legacy_batchedtensor(t)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return _grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# --------------------------------------------------------------------------------------------
# The short way: plain eager tensors, trailing axes. csrc/torch_door.cpp holds the guard, reads the
# tensors and computes; what it is not sure of, it leaves to the long way by returning None.


def _nothing(*_: Any) -> None:
    """What stands where there is no short way."""


class _ShortNorm(Function):
    """The autograd node of the short way: forward(ctx, x, weight, bias, (y, kept))."""

    forward = staticmethod(_native.node_forward if _native else _nothing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _is_compiling():  # compiled autograd
            return _traced_backward(ctx, grad)
        return _native.node_backward(ctx, grad)


def _traced_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by operators. What is kept of the statistics is no tensor: measured again."""
    kept, saved = ctx.kept, ctx.saved_tensors
    activation = kept[-1]
    x, weight, bias = saved[0], saved[1], kept[1] if activation is None else saved[2]
    constants = kept[2:-1]
    running = (None, None)
    if constants[-1] is True and len(constants) == 4:
        # A slice, since a constant that nothing was done with is not seen as one yet.
        running = _constant_running(kept[0][:])
    text = str(_scheme_of(constants))
    inputs = (x, weight, bias, None, *running)
    ops = torch.ops.axisnorm
    stats = ops.norm_fwd(x, weight, bias, None, text, *running)[1]
    if activation is not None:
        grad = ops.norm_behind(grad, *inputs, stats, text, activation)
    found = ops.norm_bwd(grad, *inputs, stats, text)
    return (*(g if n else None for g, n in zip(found, ctx.needs_input_grad, strict=False)), None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_running(kept: bytes) -> tuple[Tensor, Tensor]:
    return _running_of(kept)


def _running_of(kept: bytes) -> tuple[Tensor, Tensor]:
    mean, var = torch.frombuffer(bytearray(kept), dtype=torch.float64).view(2, -1)
    return mean, var


def _long_backward(
    ctx: Any, saved: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients where something watches, create_graph for example."""
    x = saved[0]
    assert x is not None
    kept, bias, *constants, activation = ctx.kept
    # The bias is saved where there is an activation.
    inputs = Inputs(x, saved[1], saved[2] if activation else bias)
    needs = ctx.needs_input_grad
    scheme = _scheme_of(constants)
    if scheme.statistics == "running":
        mean, var = _running_of(kept)
        inputs = inputs._replace(running_mean=mean, running_var=var)
        stats = mean.new_empty((3, _sizes(inputs.x, scheme).num_groups))  # not read
    else:
        stats = torch.frombuffer(bytearray(kept), dtype=_compute_type(x)).view(3, -1)
    return (*_gradients(grad, inputs, stats, scheme, needs, activation), None)


def _scheme_of(constants: Sequence[Any]) -> Scheme:
    """Of what a node keeps: the norm's sizes or its kind, and the rest of its constants."""
    if isinstance(constants[0], tuple):
        return _scheme_of_rows(*constants)
    kind, groups, eps, given = constants
    scheme = (
        Scheme.group_norm(groups, eps=eps)
        if kind == _route.GROUP
        else {
            _route.INSTANCE: Scheme.instance_norm,
            _route.BATCH: Scheme.batch_norm,
            _route.LAYER_2D: Scheme.layer_norm_2d,
        }[kind](eps=eps)
    )
    return scheme.replace(statistics="running") if given else scheme


def _scheme_of_rows(
    shape: tuple[int, ...], eps: float | None, offset: float, center: bool, rounded: bool
) -> Scheme:
    return Scheme.layer_norm(
        ndim=len(shape),
        eps=eps,
        center=center,
        weight_offset=offset,
        rounding="before_affine" if rounded else "once",
    )


# What the native module asks, calls and compares types with. Whoever may be watching is asked by a
# function without arguments that returns a number or a bool, or by a module's variable.
_CONNECTED: dict[str, Any] = {
    "Tensor": Tensor,
    "Parameter": torch.nn.Parameter,
    "empty_like": torch.empty_like,
    "large_empty_like": _torch_memory.empty_like,
    "new_large": _torch_memory.new_large,
    "large": _torch_memory.least,
    "empty_strided": _torch_memory.empty_strided,
    "dtypes": tuple(_CODES),
    "increment_version": increment_version,
    "dispatch_modes": _dispatch_modes,
    "function_mode": _C._is_torch_function_mode_enabled,
    "transforms": _transforms,
    "tracing": _tracing,
    "grad_enabled": _grad_enabled,
    "inference_mode": torch.is_inference_mode_enabled,
    "model": torch.empty(0, device="cpu"),
    "is_neg": Tensor.is_neg,
    "is_inference": Tensor.is_inference,
    "compiler": vars(torch.compiler),
    "forward_ad": vars(forward_ad),
}
is_connected = bool(
    _native
    and hasattr(Tensor, "__dlpack_c_exchange_api__")
    and _native.connect(Tensor.__dlpack_c_exchange_api__, _CONNECTED)
)

if is_connected:
    _native.connect_nodes(
        {
            # Function.apply looks for torch.func transforms, which the guard has done.
            "apply_node": super(Function, _ShortNorm).apply,
            "long_backward": _long_backward,
        }
    )
    if hasattr(_ShortNorm, "_backward_cls"):
        _native.quicken(_ShortNorm._backward_cls)


# --------------------------------------------------------------------------------------------
# The long way


def normalize(
    inputs: Inputs,
    scheme: Scheme | str,
    out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Normalize a torch tensor; batch statistics move given running statistics."""
    if _is_compiling() or is_tracing():
        if out is not None:
            _check_out(inputs, out)
        fused, behind = split(activation)
        if _onnx.is_exporting():
            y = exported(inputs, scheme)
        else:
            y = _normalize_by_ops(inputs, scheme, fused)
        y = activate(y, behind)
        return y if out is None else out.copy_(y)
    scheme = as_scheme(scheme)
    _check(inputs, scheme)
    moving = inputs.running_mean is not None and scheme.statistics == "batch"
    plain = _is_plain(*inputs, out)
    if plain and not _is_watched():
        _check_memory(*inputs, out)
    if out is not None:
        _check_out(inputs, out)
    if moving:
        _check_moving(inputs, out)
    used = inputs
    if inputs.running_mean is not None:
        # Those that normalize are kept for backward, and may move before it.
        kept = [None if moving or t is None else t.clone() for t in inputs[4:]]
        used = inputs._replace(running_mean=kept[0], running_var=kept[1])
    found: list[Statistics] | None = [] if moving else None
    if _is_watched() or not plain or _needs_grad(*inputs[4:]):
        y = activate(_normalize_by_ops(inputs if moving else used, str(scheme)), activation)
        moving = False
    elif _needs_grad(*inputs[:3]):
        y = _Norm.apply(*used, scheme, found, activation)
    else:
        y, _ = _forward(used, scheme, found, out, activation)
    if moving and found:
        _move(inputs, scheme, found[0])
    return y if out is None or y is out else out.copy_(y)


def split(activation: Any) -> tuple[Any, Any]:
    """What an operator applies in a program that is compiled, and what stands behind it.

    In one that is exported or traced an activation is torch's, which every reader of it knows.
    """
    apart = _is_exporting is None or _is_exporting() or not _is_compiling()
    return (None, activation) if apart else (activation, None)


def activate(y: Tensor, activation: str | None) -> Tensor:
    """By torch's own function, for what the kernels do not compute. It leaves masked zeros zero."""
    return y if activation is None else getattr(torch.nn.functional, activation)(y)


def statistics(x: Tensor, scheme: Scheme | str, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Mean, variance and rstd of every group, in the compute type."""
    inputs = Inputs(x, mask=mask)
    if _is_compiling() or is_tracing():
        if _onnx.is_exporting():
            with _onnx.quiet():
                _check(inputs, as_scheme(scheme))
                return _onnx.moments(x, as_scheme(scheme), mask)
        return tuple(torch.ops.axisnorm.norm_moments(x, mask, _text(scheme)))
    scheme = as_scheme(scheme)
    _check(inputs, scheme)
    plain = not _is_watched() and _is_plain(*inputs)
    if plain:
        _check_memory(*inputs)
    if _needs_grad(x) and not _dispatch_modes():
        return _moments_by_reference(x, mask, str(scheme))
    if not plain:
        return tuple(torch.ops.axisnorm.norm_moments(x, mask, str(scheme)))
    return _moments(x, mask, scheme)


def exported(inputs: Inputs, scheme: Scheme | str) -> Tensor:
    """What an ONNX exporter gets: a graph without state, so running statistics do not move."""
    meaning = as_scheme(scheme)
    with _onnx.quiet():
        _check(inputs, meaning)
        if meaning.statistics == "batch":
            inputs = inputs._replace(running_mean=None, running_var=None)
        return _onnx.normalize(inputs, meaning)


def _differentiable(
    inputs: Inputs, scheme: Scheme, activation: str | None = None
) -> tuple[Tensor, reference.Moments]:
    return reference.forward(
        inputs.x,
        scheme,
        inputs.weight,
        inputs.bias,
        mask=inputs.mask,
        running_mean=inputs.running_mean,
        running_var=inputs.running_var,
        activation=activation,
    )


def _check_moving(inputs: Inputs, out: Tensor | None) -> None:
    """Refuse running statistics that cannot both be written."""
    for name, running in zip(Inputs._fields[4:], inputs[4:], strict=True):
        assert running is not None
        _check_writable(name, running)
        if _needs_grad(running):
            raise ArgumentError(
                f"{name} is moved, and what it was has no gradient. One that requires a gradient "
                "came. Give its detach()."
            )
        if running.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"{name} is moved, and tensors made in inference mode cannot be. One came. "
                "Give its clone()."
            )
        if running._is_zerotensor():
            raise ArgumentError(
                f"{name} is moved, and zeros without memory cannot be. Such a tensor came. "
                "Give torch.zeros."
            )
        if out is not None and _is_plain(running, out) and _share_memory(running, out):
            raise ArgumentError(
                f"out and {name} share memory. Both are written. Give them memory of their own."
            )


def _move(inputs: Inputs, scheme: Scheme, found: Statistics) -> None:
    """Move the running statistics, after everything else has succeeded."""
    running_mean, running_var = inputs[4:]
    assert running_mean is not None
    assert running_var is not None
    with torch.no_grad():
        if isinstance(found, Measured) and _moves_natively(inputs, scheme):
            found.move(running_mean, running_var)
            increment_version((running_mean, running_var))
            return
        moved = _moved(inputs, scheme, found)
        for running, new in zip((running_mean, running_var), moved, strict=True):
            running.copy_(new)


def _moves_natively(inputs: Inputs, scheme: Scheme) -> bool:
    return all(
        t is not None and t.dtype in _CODES and t.is_contiguous() and _is_plain(t)
        for t in inputs[4:]
    ) and bool(_route.channels(_sizes(inputs.x, scheme)))


def _moved(inputs: Inputs, scheme: Scheme, found: Statistics) -> tuple[Tensor, Tensor]:
    moments = found.moments() if isinstance(found, Measured) else found
    moments = reference.Moments(
        moments.mean.detach(), moments.var.detach(), moments.rstd, moments.count.detach()
    )
    assert scheme.momentum is not None
    return reference.updated_running(
        _sizes(inputs.x, scheme), moments, inputs.running_mean, inputs.running_var, scheme.momentum
    )


def _sizes(x: Tensor, scheme: Scheme) -> Sizes:
    return scheme.sizes(x.shape)


@dataclass(frozen=True)
class Measured:
    """The statistics of every group as the kernels leave them, in the compute type."""

    sizes: Sizes
    dtype: torch.dtype
    """Of the tensor."""
    stats: Tensor
    """(3, groups): hi, lo and rstd, where hi + lo is the mean."""
    var: Tensor
    count: Tensor | None
    """How many elements of each group were valid, where there is a mask."""

    def moments(self) -> reference.Moments:
        shape = self.sizes.statistics_shape
        mean, var, rstd = (
            t.double().reshape(shape)
            for t in (self.stats[0].double() + self.stats[1].double(), self.var, self.stats[2])
        )
        count = self.count
        if count is None:
            count = torch.full(shape, float(self.sizes.group_size), dtype=torch.float64)
        return reference.Moments(mean, var, rstd, count.reshape(shape))

    def move(self, running_mean: Tensor, running_var: Tensor) -> None:
        scheme = self.sizes.layout.scheme
        channels = _route.channels(self.sizes)
        assert channels is not None
        _native.move(
            running_mean.data_ptr(),
            running_var.data_ptr(),
            _CODES[running_mean.dtype],
            _CODES[running_var.dtype],
            *channels,
            self.stats.data_ptr(),
            self.var.data_ptr(),
            _address(self.count),
            self.sizes.group_size,
            scheme.correction,
            scheme.running_correction,
            scheme.momentum,
            _CODES[self.dtype],
        )


Statistics = reference.Moments | Measured


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        scheme: Scheme,
        found: list[Statistics] | None,
        activation: str | None,
    ) -> Tensor:
        inputs = Inputs(x, weight, bias, mask, running_mean, running_var)
        y, stats = _forward(inputs, scheme, found, activation=activation)
        ctx.save_for_backward(*inputs, stats)
        ctx.scheme, ctx.activation = scheme, activation
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad
        found = _gradients(grad, Inputs(*inputs), stats, ctx.scheme, needs, ctx.activation)
        return (*found, *[None] * 6)


def _gradients(
    grad: Tensor,
    inputs: Inputs,
    stats: Tensor,
    scheme: Scheme,
    needs: Sequence[bool],
    activation: str | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, None where not needed."""
    compiling = _is_compiling()
    if not compiling:
        # Saved tensors can have got other data since.
        _check(inputs, scheme)
        _check_plain_memory(*inputs, grad)
    differentiated = _grad_enabled() or forward_ad._current_level >= 0
    if not compiling and (differentiated or _transforms() or _is_batched(grad)):
        # create_graph, a dual or a batched gradient: by the reference, whose operations torch can
        # differentiate and batch again.
        found = _reference_backward(grad, inputs, scheme, activation)
    elif compiling or _dispatch_modes() or is_tracing() or not _is_plain(grad, stats, *inputs):
        if activation is not None:
            grad = torch.ops.axisnorm.norm_behind(grad, *inputs, stats, str(scheme), activation)
        found = torch.ops.axisnorm.norm_bwd(grad, *inputs, stats, str(scheme))
    else:
        return _backward(grad, inputs, stats, scheme, needs, activation)
    dx, dweight, dbias = (g if need else None for g, need in zip(found, needs, strict=False))
    return dx, dweight, dbias


def _reference_backward(
    grad: Tensor, inputs: Inputs, scheme: Scheme, activation: str | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return reference.backward(
        grad,
        inputs.x,
        scheme,
        inputs.weight,
        inputs.bias,
        mask=inputs.mask,
        running_mean=inputs.running_mean,
        running_var=inputs.running_var,
        activation=activation,
    )


# --------------------------------------------------------------------------------------------
# Plain tensors


def _forward(
    inputs: Inputs,
    scheme: Scheme,
    found: list[Statistics] | None = None,
    out: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the statistics (3, groups): hi, lo and rstd. ``found`` takes all of them."""
    x = inputs.x
    sizes = _sizes(x, scheme)
    _check_memory(*inputs, out)
    kind = _compute_type(x)
    if _route_of(inputs, sizes).engine == "native":
        stats = x.new_empty((3, sizes.num_groups), dtype=kind)
        measured = None
        if found is not None:
            measured = _new_measured(inputs, sizes, stats)
            found.append(measured)
        return _native_forward(inputs, sizes, stats, measured, out, activation), stats
    y, moments = _differentiable(inputs, scheme, activation)
    if found is not None:
        found.append(moments)
    return (torch.empty_like(x) if out is None else out).copy_(y), _narrowed(moments, kind)


def _narrowed(moments: reference.Moments, kind: torch.dtype) -> Tensor:
    """The statistics (3, groups) as the kernels leave them: hi, lo and rstd."""
    mean, rstd = moments.mean.flatten(), moments.rstd.flatten()
    high = mean.to(kind)
    return torch.stack([high, (mean - high).to(kind), rstd.to(kind)])


def _new_measured(inputs: Inputs, sizes: Sizes, stats: Tensor) -> Measured:
    x = inputs.x
    var = x.new_empty(sizes.num_groups, dtype=torch.float64)  # may not fit the compute type
    masked = inputs.mask is not None
    count = x.new_empty(sizes.num_groups, dtype=torch.float64) if masked else None
    return Measured(sizes, x.dtype, stats, var, count)


def _backward(
    grad: Tensor,
    inputs: Inputs,
    stats: Tensor,
    scheme: Scheme,
    needs: Sequence[bool],
    activation: str | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x = inputs.x
    sizes = _sizes(x, scheme)
    _check_memory(grad, stats, *inputs)
    _check_saved(grad, x, stats, sizes)
    if _route_of(inputs, sizes).engine == "native":
        if activation is not None:
            grad = _native_behind(grad, inputs, sizes, stats, activation)
        return _native_backward(grad, inputs, sizes, stats, needs)
    dx, dweight, dbias = _reference_backward(grad, inputs, scheme, activation)
    return (
        torch.empty_like(x).copy_(dx) if needs[0] else None,
        dweight if needs[1] else None,
        dbias if needs[2] else None,
    )


def _check_saved(grad: Tensor, x: Tensor, stats: Tensor, sizes: Sizes) -> None:
    if grad.shape != x.shape or stats.numel() != 3 * sizes.num_groups:
        raise ArgumentError(
            f"A gradient has the input's shape {tuple(x.shape)}. {tuple(grad.shape)} came. "
            "The input was changed since the forward pass: leave it alone until backward."
        )


def _moments(x: Tensor, mask: Tensor | None, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    kind = _compute_type(x)
    _check_memory(x, mask)
    found = _measure(Inputs(x, mask=mask), scheme)
    if isinstance(found, Measured):
        shape = found.sizes.statistics_shape
        mean, rstd = found.stats[0] + found.stats[1], found.stats[2].clone()
        return mean.reshape(shape), found.var.to(kind).reshape(shape), rstd.reshape(shape)
    return found.mean.to(kind), found.var.to(kind), found.rstd.to(kind)


def _moments_by_reference(
    x: Tensor, mask: Tensor | None, scheme: str
) -> tuple[Tensor, Tensor, Tensor]:
    found = reference.moments(x, as_scheme(scheme), mask=mask)
    kind = _compute_type(x)
    return found.mean.to(kind), found.var.to(kind), found.rstd.to(kind)


def _measure(inputs: Inputs, scheme: Scheme) -> Statistics:
    """The statistics alone."""
    x = inputs.x
    sizes = _sizes(x, scheme)
    if _route_of(inputs, sizes).engine != "native":
        return reference.moments(x, scheme, mask=inputs.mask)
    stats = x.new_empty((3, sizes.num_groups), dtype=_compute_type(x))
    measured = _new_measured(inputs, sizes, stats)
    _run_forward(Inputs(x, mask=inputs.mask), sizes, None, measured)
    return measured


def _route_of(inputs: Inputs, sizes: Sizes) -> _route.Route:
    if inputs.x.device.type != "cpu":
        return _route.Route("reference", f"no kernel for {inputs.x.device.type} tensors")
    return _route.route(sizes, NAMES[inputs.x.dtype], _is_affine(inputs))


def _is_affine(inputs: Inputs) -> bool:
    return inputs.weight is not None or inputs.bias is not None


def _native_forward(
    inputs: Inputs,
    sizes: Sizes,
    stats: Tensor,
    measured: Measured | None,
    out: Tensor | None,
    activation: str | None,
) -> Tensor:
    x = inputs.x
    y = _torch_memory.empty_like(x) if out is None else out
    target = y
    if out is not None and any(_share_memory(out, t) for t in inputs):
        # Nothing is overwritten before it is read.
        target = torch.empty_like(x)
    _run_forward(inputs, sizes, target, measured, stats, activation)
    if target is not y:
        y.copy_(target)
    elif out is not None:
        increment_version(out)  # as copy_ does: what was saved of it is gone
    return y


def _native_behind(
    grad: Tensor, inputs: Inputs, sizes: Sizes, stats: Tensor, activation: str
) -> Tensor:
    """The gradient of what is activated, by its value, which follows from the statistics."""
    behind = _torch_memory.empty_like(inputs.x)
    _run_forward(inputs, sizes, behind, None, stats, activation, grad)
    return behind


def _run_forward(
    inputs: Inputs,
    sizes: Sizes,
    y: Tensor | None,
    measured: Measured | None,
    stats: Tensor | None = None,
    activation: str | None = None,
    grad: Tensor | None = None,
) -> None:
    """One call of the kernel, which writes ``y`` and the statistics (reads them with ``grad``)."""
    x, mask = inputs.x, inputs.mask
    target = y
    weight, bias = _parameter(inputs.weight, x), _parameter(inputs.bias, x)
    running = [_running(t) for t in inputs[4:]]
    expanded = None if mask is None else mask.expand(x.shape)
    stats = stats if measured is None else measured.stats

    def refused() -> str | None:
        return _native.forward(
            _route.axes(sizes, _is_affine(inputs)),
            _given(x),
            _given(target),
            _given(expanded),
            _address(weight),
            _address(bias),
            *[_address(t) for t in running],
            _address(stats),
            _address(None if measured is None else measured.var),
            _address(None if measured is None else measured.count),
            _constants(x, weight, bias, running, sizes),
            _route.activation_code(activation),
            _given(grad),
        )

    if refused() is None:
        return
    if grad is not None:  # expanded, or of another memory format
        grad = _laid_out_for(x, grad)
        if refused() is None:
            return
    x = _laid_out_for(x, x)
    if refused() is None:
        return
    # The axes are interleaved: everything in one order.
    x = x.contiguous()
    if target is not None and not target.is_contiguous():
        target = torch.empty_like(x)
    if expanded is not None:
        expanded = expanded.contiguous()
    if grad is not None:
        grad = grad.contiguous()
    again = refused()
    assert again is None, again
    if y is not None and target is not None:
        y.copy_(target)


def _native_backward(
    grad: Tensor, inputs: Inputs, sizes: Sizes, stats: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, mask = inputs.x, inputs.mask
    weight, bias = _parameter(inputs.weight, x), _parameter(inputs.bias, x)
    running = [_running(t) for t in inputs[4:]]
    expanded = None if mask is None else mask.expand(x.shape)
    dx = target = dweight = dbias = None
    if needs[0]:
        dx = target = _torch_memory.empty_like(x)
    if needs[1] and weight is not None:
        dweight = torch.empty_like(weight)
    if needs[2] and bias is not None:
        dbias = torch.empty_like(bias)

    def refused() -> str | None:
        return _native.backward(
            _route.axes(sizes, _is_affine(inputs)),
            _given(grad),
            _given(x),
            _given(target),
            _given(expanded),
            _address(weight),
            _address(bias),
            *[_address(t) for t in running],
            stats.data_ptr(),
            _address(dweight),
            _address(dbias),
            _constants(x, weight, bias, running, sizes),
        )

    if refused() is None:
        return dx, dweight, dbias
    grad = _laid_out_for(x, grad)  # expanded, or of another memory format
    if refused() is not None:
        x = _laid_out_for(x, x)
    if refused() is not None:
        grad, x = grad.contiguous(), x.contiguous()
        if target is not None and not target.is_contiguous():
            target = torch.empty_like(x)
        if expanded is not None:
            expanded = expanded.contiguous()
        again = refused()
        assert again is None, again
    if dx is not None and target is not None and target is not dx:
        dx.copy_(target)
    return dx, dweight, dbias


def _laid_out_for(x: Tensor, t: Tensor) -> Tensor:
    """``t``, or a copy of it that is laid out as what is made for x is."""
    like = torch.empty_like(x)
    return t if like.stride() == t.stride() else like.copy_(t)


def _given(t: Tensor | None) -> tuple[int, tuple[int, ...]]:
    return (0, ()) if t is None else (t.data_ptr(), t.stride())


def _constants(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Sequence[Tensor | None],
    sizes: Sizes,
) -> tuple[Any, ...]:
    scheme = sizes.layout.scheme
    code = _CODES[x.dtype]
    return (
        code,
        *[code if t is None else _CODES[t.dtype] for t in (weight, bias, *running)],
        scheme.center,
        scheme.rounding == "before_affine",
        reference.resolve_eps(scheme, x.dtype),
        scheme.correction,
        scheme.weight_offset,
    )


def _parameter(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Weight or bias as the kernel takes it: contiguous, of one of its types."""
    if parameter is None:
        return None
    if parameter.dtype not in _CODES:
        parameter = parameter.to(_compute_type(x))
    return parameter.contiguous()


def _running(statistic: Tensor | None) -> Tensor | None:
    return None if statistic is None else statistic.contiguous()


def _share_memory(a: Tensor, b: Tensor | None) -> bool:
    """Whether the addresses of two tensors overlap, whatever storages they stand in."""
    if b is None:
        return False
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a_start < b_end and b_start < a_end


def _span(t: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _compute_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# --------------------------------------------------------------------------------------------
# Checks, before anything is computed


def _check_memory(*tensors: Tensor | None) -> None:
    """Refuse tensors whose storage was freed, as sharding does between uses."""
    for t in tensors:
        if t is not None and t.numel() and not t.data_ptr() and t.device.type == "cpu":
            raise ArgumentError(
                f"Tensors have their data. One of shape {tuple(t.shape)} has none: its storage was "
                "freed. Restore it before the call."
            )


def _check_plain_memory(*tensors: Tensor | None) -> None:
    """The same of those among them that are ordinary tensors."""
    if not _is_watched():
        plain = (t for t in tensors if t is not None and _is_plain(t) and not _is_batched(t))
        _check_memory(*plain)


def _is_dense(t: Tensor) -> bool:
    return t.layout == torch.strided and not t.is_quantized and not t.is_nested


def _check(inputs: Inputs, scheme: Scheme) -> Sizes:
    x, weight, bias, mask, running_mean, running_var = inputs
    if not _is_dense(x):
        raise DtypeError(
            f"The input is a dense tensor. A {x.layout} one came, or one that is quantized or "
            "nested. Convert it, for example x.to_dense()."
        )
    if x.dtype not in _CODES:
        raise DtypeError(
            f"The input is a real floating-point tensor: {', '.join(_route.DTYPES)}. "
            f"{x.dtype} came. Convert it, for example x.float()."
        )
    sizes = scheme.sizes(x.shape)
    for name, t in zip(Inputs._fields[1:], inputs[1:], strict=True):
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise DtypeError(
                f"The {name} of a torch tensor is a torch tensor. A {type(t).__name__} came. "
                "Convert it with torch.as_tensor."
            )
        if t.device != x.device:
            raise ArgumentError(
                f"All tensors are on one device. The input is on {x.device}, the {name} on "
                f"{t.device}. Move one of them."
            )
        if t.is_complex() or not _is_dense(t):
            raise DtypeError(
                f"The {name} is real and dense. {t.dtype}, {t.layout} came. Give such a tensor."
            )
        if name.startswith("running") and t.dtype not in _CODES:
            raise DtypeError(
                f"{name} is floating-point. {t.dtype} came. Convert it, for example to float32."
            )
    if weight is not None:
        sizes.check_parameter("weight", weight.shape)
    if bias is not None:
        sizes.check_parameter("bias", bias.shape)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise DtypeError(
                f"A mask is boolean, True where an element counts. {mask.dtype} came. "
                "Compare, for example mask != 0."
            )
        sizes.check_mask(mask.shape)
    sizes.check_running(
        None if running_mean is None else running_mean.shape,
        None if running_var is None else running_var.shape,
    )
    return sizes


def _check_writable(name: str, t: Tensor) -> None:
    if _route.overlaps_itself(t.shape, t.stride()):
        raise ArgumentError(
            f"{name} is written to, so each of its elements has its own memory. One of strides "
            f"{t.stride()} for shape {tuple(t.shape)} came. Give {name}.contiguous()."
        )


def _check_out(inputs: Inputs, out: Tensor) -> None:
    x = inputs.x
    if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device) != (
        x.shape,
        x.dtype,
        x.device,
    ):
        came = (
            f"shape {tuple(out.shape)}, {out.dtype}, {out.device}"
            if isinstance(out, Tensor)
            else f"a {type(out).__name__}"
        )
        raise ArgumentError(
            f"out is like the input: shape {tuple(x.shape)}, {x.dtype}, {x.device}. {came} came. "
            "Make it with torch.empty_like(x)."
        )
    _check_writable("out", out)
    # Compilers of dynamic shapes know of no inference tensors.
    if not _is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            "out is written to, and tensors made in inference mode cannot be outside of it. "
            "One came. Give its clone()."
        )
    if _needs_grad(*inputs[:3], out):
        raise ArgumentError(
            "out= has no gradient. The input, the parameters or out require one. "
            "Leave out away, or call under torch.no_grad()."
        )


# --------------------------------------------------------------------------------------------
# The way through the operators of _torch_ops.py


def _text(scheme: Scheme | str) -> str:
    return scheme if isinstance(scheme, str) else scheme.text


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _uses_running(text: str) -> bool:
    return as_scheme(text).statistics == "running"


def _normalize_by_ops(
    inputs: Inputs, scheme: Scheme | str, activation: str | None = None
) -> Tensor:
    ops = torch.ops.axisnorm
    x, weight, bias, mask, running_mean, running_var = inputs
    text = _text(scheme)
    if running_mean is None or running_var is None:
        return ops.norm_fwd(x, weight, bias, mask, text, None, None, activation)[0]
    running = (running_mean, running_var)
    if _uses_running(text):
        return ops.norm_fwd(x, weight, bias, mask, text, *running, activation)[0]
    y, _, mean, var = ops.norm_train_fwd(x, weight, bias, mask, text, *running, activation)
    if not _is_compiling() and _transforms() and not _functionalizes():
        _Move.apply(running_mean, running_var, mean, var)
        return y
    for running, moved in ((running_mean, mean), (running_var, var)):
        running.copy_(moved if _is_compiling() else _reachable(moved, running))
    return y


def _reachable(moved: Tensor, target: Tensor) -> Tensor:
    """What can be written to ``target``, which a function under functionalize may have captured."""
    if not torch._is_functional_tensor(moved) or torch._is_functional_tensor(target):
        return moved
    torch._sync(moved)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(moved)


def _functionalizes() -> bool:
    """Whether torch.func.functionalize is among the transforms: it takes no Function."""
    functorch = torch._C._functorch
    levels = functorch.get_interpreter_stack() or ()
    return any(level.key() == functorch.TransformType.Functionalize for level in levels)


class _Move(Function):
    """Moves running statistics under torch.func as torch's own batch norm does.

    Those that a function under grad or jvp captures move although it is transformed; under vmap
    each sample has its own.
    """

    @staticmethod
    def forward(running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        running_mean.copy_(mean)
        running_var.copy_(var)
        return mean.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(*_: Any) -> None:
        """The output has no tangent."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, None]:
        if None in in_dims[:2]:
            raise ArgumentError(
                "Under vmap each sample moves running statistics of its own. running_mean or "
                "running_var is not mapped over. Map over both, or leave them away "
                "(track_running_stats=False)."
            )
        moved = (t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=True) if d is not None)
        return _Move.apply(*moved), None
