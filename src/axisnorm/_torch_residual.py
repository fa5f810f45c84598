"""The torch engine for the norm of a residual sum: h = residual + dropout(x), y = norm(h).

One pass over memory where :mod:`axisnorm._torch` would make three. What dropout drops follows from
a seed, an int64 tensor that is drawn from torch's generator before the op, and from the place of an
element, so backward computes it again and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import _onnx, _route, _torch, _torch_memory, _torch_ops, reference
from .reference import Inputs, checked_activation
from .scheme import ArgumentError, DtypeError, Scheme, Sizes, as_scheme

__all__ = [
    "check_kinds",
    "check_steps",
    "is_fused",
    "normalize",
]

_native = _torch._native


class Sum(NamedTuple):
    """What is added and normalized."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    """Of dropout; None where nothing is dropped."""
    dropout_p: float


class Saved(NamedTuple):
    """What backward needs."""

    h: Tensor
    weight: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    stats: Tensor
    dropout_p: float


def is_fused(x: Tensor, residual: Any) -> bool:
    """Whether this engine adds these two, which have one shape."""
    return (
        isinstance(residual, Tensor)
        and not _torch.is_foreign(x)
        and not _torch.is_foreign(residual)
        and x.dtype in _torch._CODES
        and (x.dtype, x.device) == (residual.dtype, residual.device)
    )


def check_kinds(x: Tensor, residual: Tensor) -> None:
    """Refuse two that have no shapes to compare, or that torch cannot add."""
    for t in (x, residual):
        if t.is_nested and t.layout == torch.strided:
            raise DtypeError(
                "x and residual have a shape, which nested tensors of strided layout lack. "
                "One came. Make it with layout=torch.jagged."
            )
    if residual.layout not in (torch.strided, x.layout):
        raise DtypeError(
            f"The residual is dense, or of the layout of x. {residual.layout} and {x.layout} came. "
            "Convert one of them, for example by to_dense()."
        )


def check_steps(
    x: Tensor, residual: Tensor, others: Sequence[Any], scheme: str, dropout_p: float
) -> None:
    """Refuse what the steps, dropout, sum and norm, could not do, before the first one draws.

    Args:
        others: weight, bias and mask.
    """
    if _torch._is_compiling() or _torch.is_tracing():
        return
    if _torch.is_foreign(x) or _torch.is_foreign(residual):
        if dropout_p and x.layout not in (torch.strided, torch.jagged):
            raise DtypeError(
                f"Dropout takes dense tensors. A {x.layout} one came. "
                "Convert it, for example x.to_dense()."
            )
        return
    if dropout_p and not x.is_floating_point():
        raise DtypeError(
            f"Dropout scales what it keeps, so x is real floating-point. {x.dtype} came. "
            "Convert it, for example x.float()."
        )
    if x.device != residual.device:
        raise ArgumentError(
            f"x and residual are on one device. {x.device} and {residual.device} came. "
            "Move one of them."
        )
    if not _torch._is_watched() and _torch._is_plain(x, residual, *others):
        _torch._check_memory(x, residual, *others)
    meaning = as_scheme(scheme)
    plain = meaning.weight_offset == 0 and meaning.rounding == "once" and others[2] is None
    if (x.is_complex() or residual.is_complex()) and plain and not meaning.center:
        return  # of which torch has a kernel
    for t in (x, residual):
        if t.is_complex() or (t.is_floating_point() and t.dtype not in _torch._CODES):
            _torch._check(Inputs(t, *others), meaning)  # raises
    summed = torch.promote_types(x.dtype, residual.dtype)
    like = x if x.dtype == summed else residual
    _torch._check(Inputs(like, *others), meaning)


def normalize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    dropout_p: float,
    prenorm: bool,
    activation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y and h (None where neither ``prenorm`` nor backward asks for it)."""
    if _torch._is_compiling() or _torch.is_tracing():
        fused, behind = _torch.split(activation)
        if _onnx.is_exporting():
            h = residual + (torch.dropout(x, dropout_p, True) if dropout_p else x)
            y = _torch.exported(Inputs(h, weight, bias), scheme)
        else:
            given = Sum(x, residual, weight, bias, _seed(x, dropout_p), dropout_p)
            y, h = _by_ops(given, scheme, fused)
        return _torch.activate(y, behind), h
    meaning = as_scheme(scheme)
    tensors = (x, residual, weight, bias)
    _torch._check(Inputs(x, weight, bias), meaning)
    transformed = _torch._transforms()
    plain = not transformed and _torch._is_plain(*tensors)
    if plain:
        _torch._check_memory(*tensors)
    # Nothing is refused after this.
    given = Sum(*tensors, _seed(x, dropout_p), dropout_p)
    if transformed or forward_ad._current_level >= 0:
        y, h, _ = _forward_by_reference(*given, str(meaning))
        return _torch.activate(y, activation), h
    if _torch._dispatch_modes() or not plain:
        y, h = _by_ops(given, str(meaning))
        return _torch.activate(y, activation), h
    if _torch._needs_grad(*tensors):
        return _AddNorm.apply(*given, meaning, activation)
    y, known_h, _ = _forward(given, meaning, prenorm, activation)
    return y, known_h


def _seed(x: Tensor, dropout_p: float) -> Tensor | None:
    """One number of torch's generator, where something is dropped."""
    if not dropout_p:
        return None
    if _torch._is_compiling() or _torch._transforms():
        # What compilers and vmap have a rule for.
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
    return torch.empty((), dtype=torch.int64, device=x.device).random_()


def _by_ops(given: Sum, scheme: str, activation: str | None = None) -> tuple[Tensor, Tensor]:
    y, h, _ = torch.ops.axisnorm.add_norm_fwd(*given, scheme, activation)
    return y, h


# --------------------------------------------------------------------------------------------
# Autograd. h is an output of the node, whether the caller sees it or not: so what is saved of it
# still depends on x and residual when backward itself is differentiated.


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *given, ctx.scheme, ctx.activation = args
        used = Sum(*given)
        y, h, stats = _forward(used, ctx.scheme, True, ctx.activation)
        assert h is not None
        ctx.save_for_backward(h, used.weight, used.bias, used.seed, stats)
        ctx.dropout_p = used.dropout_p
        # An output that nobody used has no gradient rather than one of zeros.
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_h: Tensor | None) -> tuple[Any, ...]:
        saved = Saved(*(*ctx.saved_tensors, ctx.dropout_p))
        found = _gradients(grad, grad_h, saved, ctx.scheme, ctx.needs_input_grad, ctx.activation)
        return (*found, *[None] * 4)


class _ShortAddNorm(Function):
    """The node of the short way: forward(ctx, x, residual, weight, bias, found)."""

    forward = staticmethod(_native.add_node_forward if _native else _torch._nothing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_h: Tensor | None) -> tuple[Any, ...]:
        if _torch._is_compiling():  # compiled autograd
            return _traced_backward(ctx, grad, grad_h)
        return _native.add_node_backward(ctx, grad, grad_h)


def _traced_backward(ctx: Any, grad: Tensor | None, grad_h: Tensor | None) -> tuple[Any, ...]:
    """The gradients by operators. What is kept of the statistics is no tensor: measured again."""
    kept, tensors = ctx.kept, ctx.saved_tensors
    constants, activation, dropout_p = kept[2:-3], kept[-3], kept[-2]
    h, weight, bias = tensors[0], tensors[1], kept[1] if activation is None else tensors[2]
    scheme = _torch._scheme_of_rows(*constants)
    stats = torch.ops.axisnorm.norm_fwd(h, weight, bias, None, str(scheme))[1]
    seed = torch.tensor(kept[-1]) if dropout_p else None
    saved = Saved(h, weight, bias, seed, stats, dropout_p)
    found = _gradients(grad, grad_h, saved, scheme, ctx.needs_input_grad, activation)
    return (*found, None)


def _long_backward(
    ctx: Any, tensors: tuple[Tensor | None, ...], grad: Tensor | None, grad_h: Tensor | None
) -> tuple[Any, ...]:
    """The gradients where something watches, create_graph for example."""
    h, weight, *others = tensors
    assert h is not None
    kept, bias, *constants, activation, dropout_p, seed = ctx.kept
    bias = others[0] if activation else bias  # saved where there is an activation
    scheme = _torch._scheme_of_rows(*constants)
    stats = torch.frombuffer(bytearray(kept), dtype=_torch._compute_type(h)).view(3, -1)
    saved = Saved(h, weight, bias, torch.tensor(seed) if dropout_p else None, stats, dropout_p)
    found = _gradients(grad, grad_h, saved, scheme, ctx.needs_input_grad, activation)
    return (*found, None)


def _gradients(
    grad: Tensor | None,
    grad_h: Tensor | None,
    saved: Saved,
    scheme: Scheme,
    needs: Sequence[bool],
    activation: str | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, residual, weight and bias, None where not needed."""
    dx: Tensor | None
    dweight = dbias = None
    if grad is None:  # y was not used
        if grad_h is None:
            return None, None, None, None
        dh = grad_h
        dx = _dropped(dh, saved, scheme) if needs[0] else None
        return dx, dh if needs[1] else None, None, None
    compiling = _torch._is_compiling()
    inputs = Inputs(saved.h, saved.weight, saved.bias)
    if not compiling:
        # Saved tensors can have got other data since.
        _torch._check(inputs, scheme)
        _torch._check_plain_memory(*inputs, grad, grad_h)
    differentiated = _torch._grad_enabled() or forward_ad._current_level >= 0
    if not compiling and (
        differentiated
        or _torch._transforms()
        or _torch._is_batched(grad)
        or (grad_h is not None and _torch._is_batched(grad_h))
    ):
        dh, dweight, dbias = _torch._reference_backward(grad, inputs, scheme, activation)
        if grad_h is not None:
            dh = dh + grad_h
        dx = _dropped(dh, saved, scheme) if needs[0] else None
    elif (
        compiling
        or _torch._dispatch_modes()
        or _torch.is_tracing()
        or not _torch._is_plain(grad, grad_h, *saved[:5])
    ):
        if activation is not None:
            norm = (*inputs, saved.stats, str(scheme), activation)
            grad = torch.ops.axisnorm.norm_behind(grad, *norm)
        *first, dropout_p = saved
        dx, dh, dweight, dbias = torch.ops.axisnorm.add_norm_bwd(
            grad, grad_h, *first, dropout_p, str(scheme)
        )
        dx = dh if saved.seed is None else dx
    else:
        return _backward(grad, grad_h, saved, scheme, needs, activation)
    return (
        dx if needs[0] else None,
        dh if needs[1] else None,
        dweight if needs[2] else None,
        dbias if needs[3] else None,
    )


def _dropped(dh: Tensor, saved: Saved, scheme: Scheme) -> Tensor:
    """The gradient of x for that of h."""
    if saved.seed is None:
        return dh
    return reference.dropout(dh, scheme, saved.seed, saved.dropout_p).to(dh.dtype)


# --------------------------------------------------------------------------------------------
# Plain tensors


def _forward(
    given: Sum, scheme: Scheme, keep_h: bool, activation: str | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, h and the statistics (3, groups): hi, lo and rstd."""
    x, residual = given.x, given.residual
    sizes = scheme.sizes(x.shape)
    _torch._check_memory(*given[:5])
    inputs = Inputs(x, given.weight, given.bias)
    if _torch._route_of(inputs, sizes).engine == "native":
        stats = x.new_empty((3, sizes.num_groups), dtype=_torch._compute_type(x))
        return *_native_forward(given, sizes, stats, keep_h, activation), stats
    h = torch.empty_like(_model(x, residual))
    h.copy_(reference.residual_sum(x, residual, scheme, given.seed, given.dropout_p))
    y, stats = _torch._forward(inputs._replace(x=h), scheme, activation=activation)
    return y, h, stats


def _model(x: Tensor, residual: Tensor) -> Tensor:
    """Whose memory format the outputs have: the first operand's of residual + x, as with torch."""
    return x if 0 in residual.stride() else residual


def _native_forward(
    given: Sum, sizes: Sizes, stats: Tensor, keep_h: bool, activation: str | None
) -> tuple[Tensor, Tensor | None]:
    x, x_stride = _rows(given.x, sizes)
    residual, residual_stride = _rows(given.residual, sizes)
    weight, bias = _torch._parameter(given.weight, x), _torch._parameter(given.bias, x)
    model = _model(given.x, given.residual)
    y, y_target, y_stride = _target(model, sizes)
    h, h_target, h_stride = _target(model, sizes) if keep_h else (None, None, 0)
    _native.add_forward(
        x.data_ptr(),
        residual.data_ptr(),
        _torch._address(weight),
        _torch._address(bias),
        y_target.data_ptr(),
        _torch._address(h_target),
        stats.data_ptr(),
        *_dropout(given.seed, given.dropout_p),
        sizes.num_groups,
        sizes.group_size,
        x_stride,
        residual_stride,
        y_stride,
        h_stride,
        *_constants(x, weight, bias, sizes),
        _route.activation_code(activation),
    )
    _copy_back(y, y_target)
    _copy_back(h, h_target)
    return y, h


def _backward(
    grad: Tensor,
    grad_h: Tensor | None,
    saved: Saved,
    scheme: Scheme,
    needs: Sequence[bool],
    activation: str | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    h = saved.h
    sizes = scheme.sizes(h.shape)
    _torch._check_memory(grad, grad_h, *saved[:5])
    if grad.shape != h.shape or saved.stats.numel() != 3 * sizes.num_groups:
        raise ArgumentError(
            f"A gradient has the sum's shape {tuple(h.shape)}. {tuple(grad.shape)} came. "
            "The sum was changed since the forward pass: leave it alone until backward."
        )
    inputs = Inputs(h, saved.weight, saved.bias)
    if _torch._route_of(inputs, sizes).engine == "native":
        if activation is not None:
            grad = _torch._native_behind(grad, inputs, sizes, saved.stats, activation)
        return _native_backward(grad, grad_h, saved, sizes, needs)
    found, dweight, dbias = _torch._reference_backward(grad, inputs, scheme, activation)
    dh = torch.empty_like(h).copy_(found if grad_h is None else found + grad_h)
    dx = torch.empty_like(h).copy_(_dropped(dh, saved, scheme)) if saved.seed is not None else dh
    return (
        dx if needs[0] else None,
        dh if needs[1] else None,
        dweight if needs[2] else None,
        dbias if needs[3] else None,
    )


def _native_backward(
    grad: Tensor, grad_h: Tensor | None, saved: Saved, sizes: Sizes, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    h, h_stride = _rows(saved.h, sizes)
    grad, grad_stride = _rows(grad, sizes)
    grad_h_stride = 0
    if grad_h is not None:
        grad_h, grad_h_stride = _rows(grad_h, sizes)
    weight, bias = _torch._parameter(saved.weight, h), _torch._parameter(saved.bias, h)
    dropped = saved.seed is not None
    nothing = (None, None, 0)
    wants_dh = needs[1] or (needs[0] and not dropped)
    dh, dh_target, dh_stride = _target(saved.h, sizes) if wants_dh else nothing
    dx, dx_target, dx_stride = _target(saved.h, sizes) if needs[0] and dropped else nothing
    dweight = torch.empty_like(weight) if needs[2] and weight is not None else None
    dbias = torch.empty_like(bias) if needs[3] and bias is not None else None
    _native.add_backward(
        grad.data_ptr(),
        _torch._address(grad_h),
        h.data_ptr(),
        _torch._address(weight),
        saved.stats.data_ptr(),
        _torch._address(dh_target),
        _torch._address(dx_target),
        _torch._address(dweight),
        _torch._address(dbias),
        *_dropout(saved.seed, saved.dropout_p),
        sizes.num_groups,
        sizes.group_size,
        grad_stride,
        grad_h_stride,
        h_stride,
        dh_stride,
        dx_stride,
        *_constants(h, weight, bias, sizes),
    )
    _copy_back(dh, dh_target)
    _copy_back(dx, dx_target)
    if not dropped:
        dx = dh
    return dx if needs[0] else None, dh if needs[1] else None, dweight, dbias


def _rows(t: Tensor, sizes: Sizes) -> tuple[Tensor, int]:
    """The tensor, or a contiguous copy where its rows are not, and the distance of its rows."""
    axes = len(sizes.layout.reduced)
    found = _route.row_stride(t.shape, t.stride(), axes)
    if found is None:
        t = t.contiguous()
        found = _route.row_stride(t.shape, t.stride(), axes)
        assert found is not None
    return t, found


def _target(model: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, int]:
    """A new tensor, the one that the kernel writes in its place, and the distance of its rows."""
    made = target = _torch_memory.empty_like(model)
    axes = len(sizes.layout.reduced)
    found = _route.row_stride(made.shape, made.stride(), axes)
    if found is None:
        target = torch.empty_like(made, memory_format=torch.contiguous_format)
        found = sizes.group_size
    return made, target, found


def _copy_back(made: Tensor | None, target: Tensor | None) -> None:
    if made is not None and target is not None and target is not made:
        made.copy_(target)


def _dropout(seed: Tensor | None, dropout_p: float) -> tuple[float, int]:
    return (0.0, 0) if seed is None else (dropout_p, int(seed))


def _constants(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: Sizes
) -> tuple[Any, ...]:
    scheme = sizes.layout.scheme
    return (
        *[_torch._CODES[x.dtype if t is None else t.dtype] for t in (x, weight, bias)],
        scheme.center,
        scheme.rounding == "before_affine",
        reference.resolve_eps(scheme, x.dtype),
        scheme.weight_offset,
    )


# --------------------------------------------------------------------------------------------
# Ops

_library = torch.library.Library("axisnorm", "FRAGMENT")
for _schema in (
    "add_norm_fwd(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed,"
    " float dropout_p, str scheme, str? activation=None) -> (Tensor y, Tensor h, Tensor stats)",
    "add_norm_bwd(Tensor grad, Tensor? grad_h, Tensor h, Tensor? weight, Tensor? bias,"
    " Tensor? seed, Tensor stats, float dropout_p, str scheme)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    # The same, into tensors that are there.
    "add_norm_fwd_into(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed,"
    " float dropout_p, str scheme, str? activation, Tensor(a!) y, Tensor(b!)? h, Tensor(c!)? stats)"
    " -> ()",
    "add_norm_bwd_into(Tensor grad, Tensor? grad_h, Tensor h, Tensor? weight, Tensor? bias,"
    " Tensor? seed, Tensor stats, float dropout_p, str scheme, Tensor(a!)? dx,"
    " Tensor(b!) dresidual, Tensor(c!)? dweight, Tensor(d!)? dbias) -> ()",
):
    _library.define(_schema, tags=_torch_ops.TAGS)


def _op_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, scheme, activation = _read(args)
    meaning = as_scheme(scheme)
    _check_sum(given, meaning)
    y, h, stats = _forward(given, meaning, True, checked_activation(activation))
    assert h is not None
    return y, h, stats


def _read(args: Sequence[Any]) -> tuple[Sum, str, str | None]:
    """The arguments of add_norm_fwd, of which the dispatcher leaves out a last None."""
    return Sum(*args[:6]), args[6], args[7] if len(args) > 7 else None


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _torch_ops.tell_inductor()
    given, scheme, activation = _read(args)
    checked_activation(activation)
    sizes = _check_sum(given, as_scheme(scheme))
    x, residual = given.x, given.residual
    stats = x.new_empty((3, sizes.num_groups), dtype=_torch._compute_type(x))
    model = _model(x, residual)
    return torch.empty_like(model), torch.empty_like(model), stats


def _check_sum(given: Sum, scheme: Scheme) -> Sizes:
    x, residual = given.x, given.residual
    if x.shape != residual.shape or not is_fused(x, residual):
        raise ArgumentError(
            "x and residual are dense, of one shape, type and device. "
            f"{tuple(x.shape)}, {x.dtype} and {tuple(residual.shape)}, {residual.dtype} came. "
            "Convert one of them."
        )
    return _torch._check(Inputs(x, given.weight, given.bias), scheme)


def _op_backward(
    grad: Tensor, grad_h: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *values, scheme = args
    saved = Saved(*values)
    found = _backward(grad, grad_h, saved, as_scheme(scheme), (True,) * 4)
    dx, dh, dweight, dbias = (saved.h.new_empty(0) if g is None else g for g in found)
    # Without dropout dx is dh, and an op's outputs are tensors of their own.
    return saved.h.new_empty(0) if saved.seed is None else dx, dh, dweight, dbias


def _fake_backward(
    _grad: Tensor, _grad_h: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *values, _ = args
    saved = Saved(*values)
    h = saved.h
    dweight, dbias = (
        h.new_empty(0) if p is None else torch.empty_like(p, memory_format=torch.contiguous_format)
        for p in (saved.weight, saved.bias)
    )
    dx = h.new_empty(0) if saved.seed is None else torch.empty_like(h)
    return dx, torch.empty_like(h), dweight, dbias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, seed, ctx.dropout_p, ctx.scheme, ctx.activation = inputs
    _, h, stats = output
    ctx.save_for_backward(h, weight, bias, seed, stats)
    ctx.set_materialize_grads(False)
    constant = () if any(ctx.needs_input_grad[:2]) else (h,)
    ctx.mark_non_differentiable(stats, *constant)


def _op_gradients(
    ctx: Any, grad: Tensor | None, grad_h: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    saved = Saved(*(*ctx.saved_tensors, ctx.dropout_p))
    scheme = as_scheme(ctx.scheme)
    found = _gradients(grad, grad_h, saved, scheme, ctx.needs_input_grad, ctx.activation)
    return (*found, *[None] * 4)


def _forward_by_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, scheme, activation = _read(args)
    meaning = as_scheme(scheme)
    h = reference.residual_sum(given.x, given.residual, meaning, given.seed, given.dropout_p)
    y, moments = reference.forward(h, meaning, given.weight, given.bias, activation=activation)
    return y, h, _torch._narrowed(moments, _torch._compute_type(h))


def _backward_by_reference(
    grad: Tensor, grad_h: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *values, scheme = args
    saved, meaning = Saved(*values), as_scheme(scheme)
    inputs = Inputs(saved.h, saved.weight, saved.bias)
    dh, dweight, dbias = _torch._reference_backward(grad, inputs, meaning)
    dh = dh if grad_h is None else dh + grad_h
    nothing = saved.h.new_empty(0)
    return (
        nothing if saved.seed is None else _dropped(dh, saved, meaning),
        dh,
        nothing if dweight is None else dweight,
        nothing if dbias is None else dbias,
    )


for _name, _rules in {
    "add_norm_fwd": _torch_ops.Rules(
        _op_forward, _fake_forward, _forward_by_reference, _keep_for_backward, _op_gradients
    ),
    "add_norm_bwd": _torch_ops.Rules(_op_backward, _fake_backward, _backward_by_reference),
}.items():
    _torch_ops.register(_library, _name, _rules)

_op_forward_into = _torch_ops.into(_op_forward, 3)
_op_backward_into = _torch_ops.into(_op_backward, 4)
if _torch.is_connected:
    _native.connect_add_ops({"forward_into": _op_forward_into, "backward_into": _op_backward_into})
    _op_forward_into = _native.op_add_forward_into
    _op_backward_into = _native.op_add_backward_into
for _name, _kernel in {
    "add_norm_fwd_into": _op_forward_into,
    "add_norm_bwd_into": _op_backward_into,
}.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"axisnorm::{_name}", _torch._nothing, lib=_library)


# --------------------------------------------------------------------------------------------
# The short way, in csrc/torch_door.cpp

if _torch.is_connected:
    with torch.inference_mode(False):
        _kept_seed = torch.empty((), dtype=torch.int64, device="cpu")
    _native.connect_add(
        {
            "apply_node": super(Function, _ShortAddNorm).apply,
            "long_backward": _long_backward,
            "draw": Tensor.random_,
            "seed": _kept_seed,
        }
    )
    if hasattr(_ShortAddNorm, "_backward_cls"):
        _native.quicken_add(_ShortAddNorm._backward_cls)
