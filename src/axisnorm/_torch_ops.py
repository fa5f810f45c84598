"""The operators ``torch.ops.axisnorm``: what compilers, exporters, modes and tensor subclasses see.

Each has a kernel, a fake, a gradient and a meaning under torch.func. The kernels are in C for plain
tensors, csrc/torch_ops.cpp; what is unusual goes through :mod:`axisnorm._torch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import _torch, reference
from .reference import Inputs, checked_activation
from .scheme import as_scheme

__all__ = [
    "TAGS",
    "Rules",
    "behind_by_reference",
    "into",
    "ops",
    "register",
    "tell_inductor",
]

# Any strides will do: a compiler need not copy to those that a tensor has in eager mode.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library = torch.library.Library("axisnorm", "DEF")
_INPUTS = "Tensor x, Tensor? weight, Tensor? bias, Tensor? mask"
_RUNNING = "Tensor? running_mean, Tensor? running_var"
for _schema in (
    f"norm_fwd({_INPUTS}, str scheme, Tensor? running_mean=None, Tensor? running_var=None,"
    " str? activation=None) -> (Tensor y, Tensor stats)",
    # The gradient of what the activation is applied to.
    f"norm_behind(Tensor grad, {_INPUTS}, {_RUNNING}, Tensor stats, str scheme, str activation)"
    " -> Tensor",
    f"norm_bwd(Tensor grad, {_INPUTS}, {_RUNNING}, Tensor stats, str scheme)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "norm_moments(Tensor x, Tensor? mask, str scheme) -> (Tensor mean, Tensor var, Tensor rstd)",
    f"norm_train_fwd({_INPUTS}, str scheme, Tensor running_mean, Tensor running_var,"
    " str? activation=None)"
    " -> (Tensor y, Tensor stats, Tensor running_mean_out, Tensor running_var_out)",
    # The same, into tensors that are there.
    f"norm_fwd_into({_INPUTS}, str scheme, {_RUNNING}, str? activation, Tensor(a!) y,"
    " Tensor(b!)? stats) -> ()",
    f"norm_behind_into(Tensor grad, {_INPUTS}, {_RUNNING}, Tensor stats, str scheme,"
    " str activation, Tensor(a!) behind) -> ()",
    f"norm_bwd_into(Tensor grad, {_INPUTS}, {_RUNNING}, Tensor stats, str scheme, Tensor(a!) dx,"
    " Tensor(b!)? dweight, Tensor(c!)? dbias) -> ()",
    f"norm_train_fwd_into({_INPUTS}, str scheme, Tensor running_mean, Tensor running_var,"
    " str? activation, Tensor(a!) y, Tensor(b!) stats, Tensor(c!) running_mean_out,"
    " Tensor(d!) running_var_out) -> ()",
    "channel_scale_into(Tensor? weight, Tensor var, float eps, Tensor(a!) scale) -> ()",
):
    _library.define(_schema, tags=TAGS)
ops = torch.ops.axisnorm


def _op_forward(
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
    _torch._check(inputs, as_scheme(scheme))
    checked_activation(activation)
    y, stats = _torch._forward(inputs, as_scheme(scheme), activation=activation)
    if running_mean is not None:
        stats.zero_()  # not written, and what an op gives is the same in every call
    return y, stats


_is_inductor_told = not _torch.is_connected


def tell_inductor() -> None:
    """Inductor asks for what it compiles by the fakes, once it is loaded itself."""
    global _is_inductor_told
    if not _is_inductor_told and "torch._inductor.lowering" in sys.modules:
        from . import _torch_inductor

        _is_inductor_told = True
        _torch_inductor.register()
        _torch_inductor.mark_keys()


def _fake_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scheme: str,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    tell_inductor()
    checked_activation(activation)
    inputs = Inputs(x, weight, bias, mask, running_mean, running_var)
    sizes = _torch._check(inputs, as_scheme(scheme))
    return torch.empty_like(x), x.new_empty((3, sizes.num_groups), dtype=_torch._compute_type(x))


def _op_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    stats: Tensor,
    scheme: str,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(x, weight, bias, mask, running_mean, running_var)
    found = _torch._backward(grad, inputs, stats, as_scheme(scheme), (True, True, True))
    dx, dweight, dbias = (x.new_empty(0) if g is None else g for g in found)
    return dx, dweight, dbias


def _fake_backward(
    _grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (
        x.new_empty(0) if p is None else torch.empty_like(p, memory_format=torch.contiguous_format)
        for p in (weight, bias)
    )
    return torch.empty_like(x), dweight, dbias


def _op_behind(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    stats: Tensor,
    scheme: str,
    activation: str,
) -> Tensor:
    inputs = Inputs(x, weight, bias, mask, running_mean, running_var)
    sizes = _torch._check(inputs, as_scheme(scheme))
    checked_activation(activation)
    _torch._check_memory(grad, stats, *inputs)
    _torch._check_saved(grad, x, stats, sizes)
    if _torch._route_of(inputs, sizes).engine == "native":
        return _torch._native_behind(grad, inputs, sizes, stats, activation)
    found = behind_by_reference(grad, *inputs, stats, scheme, activation)
    return torch.empty_like(x).copy_(found)


def _fake_behind(_grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def behind_by_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    _stats: Tensor,
    scheme: str,
    activation: str,
) -> Tensor:
    return reference.behind(
        grad,
        x,
        as_scheme(scheme),
        weight,
        bias,
        mask=mask,
        running_mean=running_mean,
        running_var=running_var,
        activation=activation,
    )


def into(kernel: Callable[..., tuple[Tensor, ...]], count: int) -> Callable[..., None]:
    """A kernel that writes its results into the last ``count`` arguments, where not None."""

    def write(*args: Any) -> None:
        # Compiled programs call it below the dispatcher, which would do this.
        given = [t.resolve_neg() if isinstance(t, Tensor) else t for t in args[:-count]]
        for target, found in zip(args[-count:], kernel(*given), strict=True):
            if target is not None:
                target.copy_(found)

    return write


def _op_scale_into(weight: Tensor | None, var: Tensor, eps: float, scale: Tensor) -> None:
    v = var.double() + eps
    rstd = torch.where(v == 0, 0.0, v.rsqrt())
    scale.copy_(rstd if weight is None else rstd * weight)


def _op_moments(x: Tensor, mask: Tensor | None, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    return _torch._moments(x, mask, as_scheme(scheme))


def _fake_moments(x: Tensor, mask: Tensor | None, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    shape = _torch._check(Inputs(x, mask=mask), as_scheme(scheme)).statistics_shape
    kind = _torch._compute_type(x)
    return (
        x.new_empty(shape, dtype=kind),
        x.new_empty(shape, dtype=kind),
        x.new_empty(shape, dtype=kind),
    )


def _op_train_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scheme: str,
    running_mean: Tensor,
    running_var: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    moved = running_mean.clone(), running_var.clone()
    inputs, meaning = Inputs(x, weight, bias, mask, *moved), as_scheme(scheme)
    _torch._check(inputs, meaning)
    checked_activation(activation)
    found: list[_torch.Statistics] = []
    used = inputs._replace(running_mean=None, running_var=None)
    y, stats = _torch._forward(used, meaning, found, activation=activation)
    _torch._move(inputs, meaning, found[0])
    return y, stats, *moved


def _fake_train_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scheme: str,
    running_mean: Tensor,
    running_var: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, stats = _fake_forward(x, weight, bias, mask, scheme, running_mean, running_var, activation)
    return y, stats, torch.empty_like(running_mean), torch.empty_like(running_var)


def _forward_by_reference(
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
    y, moments = _torch._differentiable(inputs, as_scheme(scheme), activation)
    return y, _torch._narrowed(moments, _torch._compute_type(x))


def _backward_by_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    _stats: Tensor,
    scheme: str,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(x, weight, bias, mask, running_mean, running_var)
    dx, dweight, dbias = _torch._reference_backward(grad, inputs, as_scheme(scheme))
    nothing = x.new_empty(0)
    return dx, nothing if dweight is None else dweight, nothing if dbias is None else dbias


def _train_by_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scheme: str,
    running_mean: Tensor,
    running_var: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    meaning = as_scheme(scheme)
    y, moments = _torch._differentiable(Inputs(x, weight, bias, mask), meaning, activation)
    moved = _torch._moved(Inputs(x, None, None, mask, running_mean, running_var), meaning, moments)
    return y, _torch._narrowed(moments, _torch._compute_type(x)), *moved


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, mask, ctx.scheme, *running, ctx.activation = inputs
    ctx.save_for_backward(x, weight, bias, mask, *running, output[1])
    ctx.mark_non_differentiable(output[1])


def _keep_for_train_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, mask, ctx.scheme, _, _, ctx.activation = inputs
    _, *others = output
    ctx.save_for_backward(x, weight, bias, mask, None, None, others[0])
    ctx.mark_non_differentiable(*others)


def _op_gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, stats = ctx.saved_tensors
    scheme = as_scheme(ctx.scheme)
    needs = ctx.needs_input_grad
    found = _torch._gradients(grad, Inputs(*inputs), stats, scheme, needs, ctx.activation)
    return (*found, *[None] * 5)


def _keep_for_moments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, ctx.scheme = inputs
    ctx.save_for_backward(x, mask)


def _moments_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Through the reference, which torch differentiates."""
    x, mask = ctx.saved_tensors
    with torch.enable_grad():
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        values = _torch._moments_by_reference(x, mask, ctx.scheme)
        total = torch.stack([(v * g).sum() for v, g in zip(values, grads, strict=True)]).sum()
        (dx,) = torch.autograd.grad(total, x, create_graph=_torch._grad_enabled())
    return dx, None, None


@dataclass(frozen=True)
class Rules:
    """What torch asks about an op."""

    implementation: Callable[..., Any]
    fake: Callable[..., Any]
    by_reference: Callable[..., Any]
    """The same, of operations that torch differentiates and batches."""
    keep: Callable[[Any, tuple[Any, ...], Any], None] = _torch._nothing
    """Keeps in a node what ``gradients`` needs."""
    gradients: Callable[..., Any] | None = None
    """None where the reference has the gradient."""
    differentiable: int | None = None
    """How many of the inputs ``gradients`` is for, by default all: where a later one needs a
    gradient, the reference has it."""


def register(library: torch.library.Library, name: str, rules: Rules) -> None:
    """Give an op its kernel, its fake, its gradient, and its meaning under torch.func."""
    library.impl(name, rules.implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"axisnorm::{name}", rules.fake, lib=library)

    # vmap decomposes the op: what arrives here are the tensors that vmap batches.
    library.impl(name, rules.by_reference, "FuncTorchBatched")
    library.impl(name, _autograd_kernel(name, rules), "Autograd")


def _autograd_kernel(name: str, rules: Rules) -> Callable[..., Any]:
    """The op above autograd.

    What torch.library.register_autograd makes has no forward mode, silently, and cannot be called
    under the transforms of torch.func.
    """
    op = getattr(torch.ops.axisnorm, name).default
    arity = len(op._schema.arguments)
    differentiable = arity if rules.differentiable is None else rules.differentiable
    if rules.gradients is None:
        differentiable = 0

    def below(inputs: tuple[Any, ...]) -> Any:
        if not _torch._dispatch_modes() and _torch._is_plain(
            *(t for t in inputs if isinstance(t, Tensor))
        ):
            return rules.implementation(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    class Node(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = below(inputs)
            rules.keep(ctx, inputs, output)
            return output

        backward = staticmethod(rules.gradients or _torch._nothing)

    Node.__name__ = f"axisnorm_{name}"

    def kernel(*inputs: Any) -> Any:
        if (
            _torch._transforms()
            or forward_ad._current_level >= 0
            or _torch._needs_grad(*(t for t in inputs[differentiable:] if isinstance(t, Tensor)))
        ):
            return rules.by_reference(*inputs)
        if _torch._grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in inputs
        ):
            # The dispatcher leaves out what has its default, None.
            return Node.apply(*inputs, *[None] * (arity - len(inputs)))
        return below(inputs)

    return kernel


def _new_stats(x: Tensor, groups: int) -> Tensor:
    return x.new_empty((3, groups), dtype=_torch._compute_type(x))


_op_norm: Callable[..., Any] = _op_forward
_op_train: Callable[..., Any] = _op_train_forward
_op_norm_backward: Callable[..., Any] = _op_backward
_op_norm_behind: Callable[..., Any] = _op_behind
_op_norm_into = into(_op_forward, 2)
_op_norm_backward_into = into(_op_backward, 3)
_op_norm_behind_into = into(lambda *args: (_op_behind(*args),), 1)
_op_train_into = into(_op_train_forward, 4)
_op_channel_scale: Callable[..., Any] = _op_scale_into
if _torch.is_connected:
    _torch._native.connect_ops(
        {
            "new_stats": _new_stats,
            "nothing": lambda x: x.new_empty(0),
            "forward": _op_forward,
            "backward": _op_backward,
            "behind": _op_behind,
            "train": _op_train_forward,
            "forward_into": _op_norm_into,
            "backward_into": _op_norm_backward_into,
            "behind_into": _op_norm_behind_into,
            "train_into": _op_train_into,
            "scale_into": _op_scale_into,
        }
    )
    _op_norm, _op_train = _torch._native.op_forward, _torch._native.op_train
    _op_norm_backward = _torch._native.op_backward
    _op_norm_behind = _torch._native.op_behind
    _op_norm_into = _torch._native.op_forward_into
    _op_norm_backward_into = _torch._native.op_backward_into
    _op_norm_behind_into = _torch._native.op_behind_into
    _op_train_into = _torch._native.op_train_into
    _op_channel_scale = _torch._native.op_scale_into

for _name, _rules in {
    "norm_fwd": Rules(
        _op_norm,
        _fake_forward,
        _forward_by_reference,
        _keep_for_backward,
        _op_gradients,
        differentiable=5,
    ),
    "norm_bwd": Rules(_op_norm_backward, _fake_backward, _backward_by_reference),
    "norm_behind": Rules(_op_norm_behind, _fake_behind, behind_by_reference),
    "norm_moments": Rules(
        _op_moments,
        _fake_moments,
        _torch._moments_by_reference,
        _keep_for_moments,
        _moments_gradients,
    ),
    "norm_train_fwd": Rules(
        _op_train,
        _fake_train_forward,
        _train_by_reference,
        _keep_for_train_backward,
        _op_gradients,
        differentiable=5,
    ),
}.items():
    register(_library, _name, _rules)

for _name, _kernel in {
    "norm_fwd_into": _op_norm_into,
    "norm_bwd_into": _op_norm_backward_into,
    "norm_behind_into": _op_norm_behind_into,
    "norm_train_fwd_into": _op_train_into,
    "channel_scale_into": _op_channel_scale,
}.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"axisnorm::{_name}", _torch._nothing, lib=_library)
