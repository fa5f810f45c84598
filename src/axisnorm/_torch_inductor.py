"""What torch's compiler, Inductor, makes of the operators: a call of csrc/torch_ops.cpp.

Without this it calls the operator, through the dispatcher, and gets new tensors. Here it allocates
what is written, in memory that it has planned, and calls the function below the operator, which
takes a quarter of the time. Of Inductor this needs functions that are not public: where one is
missing nothing is changed. It is loaded after Inductor, which takes a second to load.

What Inductor has compiled it keeps on disk, under a key that knows nothing of this package: to that
is added which build of it has been at work, for programs that call its operators.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import codecache, ir, lowering
from torch._inductor.codegen import wrapper as wrapper_code
from torch._inductor.fx_passes import joint_graph, pre_grad
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch._inductor.virtualized import V

from . import _build
from ._torch_fusing import SMOOTH, join_activations, join_smooth
from .scheme import Scheme, as_scheme

__all__ = ["mark_keys", "register"]

_NEEDED = {
    ir: ("FallbackKernel", "FixedLayout", "FlexibleLayout", "IRNode", "as_storage_and_layout",
         "get_stride_order", "ir_node_to_tensor", "is_storage_and_layout"),
    ir.FallbackKernel: ("codegen", "codegen_args", "create", "realize_input",
                        "require_stride_order", "tensor_to_layout"),
    joint_graph: ("pass_patterns",),
    pre_grad: ("efficient_conv_bn_eval_pass",),
    lowering: ("fallback_handler", "lowerings", "register_lowering", "to_dtype"),
}  # fmt: skip

_ops = torch.ops.axisnorm
_CALLED: dict[Any, str] = {
    _ops.norm_fwd_into.default: "op_forward_into",
    _ops.norm_bwd_into.default: "op_backward_into",
    _ops.norm_behind_into.default: "op_behind_into",
    _ops.norm_train_fwd_into.default: "op_train_into",
    _ops.channel_scale_into.default: "op_scale_into",
    _ops.add_norm_fwd_into.default: "op_add_forward_into",
    _ops.add_norm_bwd_into.default: "op_add_backward_into",
}
"""What is called for an operator: the function of csrc/torch_ops.cpp that takes its arguments."""


_UNBOUND = (_ops.norm_train_fwd_into.default, _ops.channel_scale_into.default)
_READ_ANEW = ("mask", "running_mean", "running_var", "seed")
"""What calls that keep what they have read do not take: these operators and arguments."""

_ASSERT = "torch._C._dynamo.guards.assert_size_stride"

_Assert = getattr(wrapper_code, "AssertSizeStrideLine", None)
"""The step of a program that asserts of one input its sizes and strides, in 0.4 us."""


class _Call(ir.FallbackKernel):
    """The call of one of these operators, below the dispatcher.

    Where the sizes are known it is bound: the program makes a function for this place, that takes
    tensors alone, and keeps all that it has found out about them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.python_kernel_name = f"axisnorm_native.{_CALLED[self.op_overload]}"
        self._bound = False

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once("from axisnorm import _native as axisnorm_native")
        name, args = _CALLED[self.op_overload], self._arguments()
        if self._is_bindable(args):
            self._bound = True
            tensors = [arg for arg in args if isinstance(arg, ir.IRNode)]
            given = ["..." if isinstance(arg, ir.IRNode) else repr(arg) for arg in args]
            layouts = tuple(map(_layout, tensors))
            made = f"{name!r}, ({', '.join(given)}), {layouts}, {_ASSERT}"
            made = f"axisnorm_native.bound({made})"
            # Calls that are alike share one function. Within a program's parts names repeat.
            alike = repr((made, [t.get_dtype() for t in tensors]))
            self.python_kernel_name = f"axisnorm_{hashlib.sha256(alike.encode()).hexdigest()[:12]}"
            wrapper.add_import_once(f"{self.python_kernel_name} = {made}")
            self._put_off_asserts(wrapper)
        super().codegen(wrapper)

    def codegen_args(self) -> list[str]:
        if not self._bound:
            return super().codegen_args()
        return [arg.codegen_reference() for arg in self._arguments() if isinstance(arg, ir.IRNode)]

    def _is_bindable(self, args: list[Any]) -> bool:
        op: Any = self.op_overload
        names = (argument.name for argument in op._schema.arguments)
        return (
            op not in _UNBOUND
            and all(map(_is_fixed, args))
            and not any(
                name in _READ_ANEW and arg is not None
                for name, arg in zip(names, args, strict=True)
            )
        )

    def _arguments(self) -> list[Any]:
        args, _ = self.unflatten_args(self.inputs, self.constant_args)
        return list(args)

    def _put_off_asserts(self, wrapper: Any) -> None:
        """Leave the asserts of its inputs to the next step that reads them.

        A bound call looks at its tensors itself, and asserts where they are not those of before.
        """
        lines, pending = wrapper.lines, getattr(wrapper, "_pending_input_asserts", None)
        if _Assert is None or pending is None:
            return
        while lines and isinstance(lines[-1], _Assert):
            line = lines.pop()
            pending[line.name] = (line.size, line.stride)


def _layout(t: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, numbers)) for numbers in (t.get_size(), t.get_stride()))


def _is_fixed(arg: Any) -> bool:
    """Whether this argument is a tensor of known sizes and strides, or the same in every call."""
    if not isinstance(arg, ir.IRNode):
        return arg is None or isinstance(arg, (str, int, float))
    return all(isinstance(n, (int, sympy.Integer)) for n in (*arg.get_size(), *arg.get_stride()))


def _forward(
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    scheme: str,
    running_mean: Any = None,
    running_var: Any = None,
    activation: str | None = None,
) -> tuple[Any, ...]:
    if running_mean is not None and mask is None and not (_is_read(1) or _stands_alone(x)):
        y = _by_running_statistics(
            x, weight, bias, as_scheme(scheme), running_mean, running_var, activation
        )
        if y is not None:
            return y, None
    x, layout = _realized(x)
    y, stats = _new(layout), _like_output(1)
    given = (x, weight, bias, mask, scheme, running_mean, running_var, activation)
    _Call.create(_ops.norm_fwd_into.default, *given, y, stats)
    return y, stats


_ALONE = 1 << 14
"""From so many elements on a call is faster than steps in double, if nothing is fused with them."""

_CALLED_LIBRARIES = ("axisnorm", "mkl", "mkldnn", "onednn", "quantized")
_CALLED_OPERATORS = (
    *(getattr(torch.ops.aten, name).default for name in ("addmm", "baddbmm", "bmm", "mm")),
    torch.ops.aten.convolution.default,
)


def _stands_alone(x: Any) -> bool:
    """Whether Inductor has nothing that it could fuse with the norm of ``x`` being lowered."""
    sizes = x.get_size()
    known = all(isinstance(size, int) or size.is_number for size in sizes)
    if known and math.prod(map(int, sizes)) < _ALONE:
        return False
    norm = V.graph.current_node
    readers = (reader for y in norm.users for reader in y.users)
    return _is_call(norm.args[0]) and all(map(_is_call, readers))


def _is_call(node: Any) -> bool:
    if node.target is operator.getitem:
        node = node.args[0]
    return (
        node.op != "call_function"
        or node.target in _CALLED_OPERATORS
        or getattr(node.target, "namespace", None) in _CALLED_LIBRARIES
    )


_BY_RUNNING_STATISTICS = {
    scheme.replace(statistics="running") for scheme in (Scheme.batch_norm(), Scheme.instance_norm())
}


def _by_running_statistics(
    x: Any,
    weight: Any,
    bias: Any,
    scheme: Scheme,
    running_mean: Any,
    running_var: Any,
    activation: str | None,
) -> Any:
    """Steps that Inductor fuses with what stands around the norm; None: no such norm.

    In double, where nothing that is finite overflows. What the steps for an element share is
    computed before: Inductor would take the root for each.
    """
    if (
        scheme.eps is None
        or scheme.replace(eps=1e-5) not in _BY_RUNNING_STATISTICS
        or x.get_dtype() == torch.float64
        or activation not in (None, "relu")
    ):
        return None
    aten = torch.ops.aten
    view, add, subtract, multiply = (
        lowering.lowerings[op]
        for op in (aten.view.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)
    )
    channels = x.get_size()[1]
    contiguous = ir.FlexibleLayout.contiguous_strides([channels])
    scale = _new(ir.FixedLayout(x.get_device(), torch.float64, [channels], contiguous))
    _Call.create(_ops.channel_scale_into.default, weight, running_var, scheme.eps, scale)

    def along(t: Any) -> Any:
        t = lowering.to_dtype(t, torch.float64)
        return view(t, [channels, *[1] * (len(x.get_size()) - 2)])

    y = subtract(lowering.to_dtype(x, torch.float64), along(running_mean))
    y = multiply(y, along(scale))
    y = y if bias is None else add(y, along(bias))
    if activation is not None:
        y = lowering.lowerings[aten.relu.default](y)
    return lowering.to_dtype(y, x.get_dtype())


def _train_forward(x: Any, *others: Any) -> tuple[Any, ...]:
    given = (*others, None)[:7]  # the last is an activation
    x, layout = _realized(x)
    outputs = (_new(layout), *(_like_output(i, always=True) for i in (1, 2, 3)))
    _Call.create(_ops.norm_train_fwd_into.default, x, *given, *outputs)
    return outputs


def _behind(grad: Any, x: Any, *others: Any) -> Any:
    x, layout = _realized(x)
    behind = _new(layout)
    _Call.create(_ops.norm_behind_into.default, _ordered(grad, layout), x, *others, behind)
    return behind


def _ordered(grad: Any, layout: Any) -> Any:
    """The kernels go through all tensors in one order."""
    if not all(isinstance(step, int) for step in layout.stride):
        return grad
    return ir.FallbackKernel.require_stride_order(grad, ir.get_stride_order(layout.stride))


def _backward(grad: Any, x: Any, *others: Any) -> tuple[Any, ...]:
    x, layout = _realized(x)
    grad = _ordered(grad, layout)
    outputs = (_new(layout), *(_like_output(i) for i in (1, 2)))
    _Call.create(_ops.norm_bwd_into.default, grad, x, *others, *outputs)
    return outputs


def _add_forward(x: Any, residual: Any, *others: Any) -> tuple[Any, ...]:
    given = (*others, None)[:6]  # the last is an activation
    x, layout = _realized(x)
    residual, other = _realized(residual)
    if 0 not in residual.get_stride():
        layout = other
    outputs = (_new(layout), _new(layout) if _is_read(1) else None, _like_output(2))
    _Call.create(_ops.add_norm_fwd_into.default, x, residual, *given, *outputs)
    return outputs


def _add_backward(grad: Any, grad_h: Any, h: Any, *others: Any) -> tuple[Any, ...]:
    h, layout = _realized(h)
    seed = others[2]
    dx = None if seed is None else _new(layout)
    outputs = (dx, _new(layout), _like_output(2), _like_output(3))
    _Call.create(_ops.add_norm_bwd_into.default, grad, grad_h, h, *others, *outputs)
    return outputs


def _realized(x: Any) -> tuple[Any, Any]:
    """The tensor in memory, and the layout of one that torch.empty_like makes of it."""
    x = ir.FallbackKernel.realize_input(x)
    if ir.is_storage_and_layout(x):
        ir.as_storage_and_layout(x, freeze=True)
    with V.graph.fake_mode:
        return x, ir.FallbackKernel.tensor_to_layout(torch.empty_like(ir.ir_node_to_tensor(x)))


def _like_output(index: int, always: bool = False) -> Any:
    """A new tensor for this output of the operator, None where nothing reads it."""
    if not always and not _is_read(index):
        return None
    return _new(ir.FallbackKernel.tensor_to_layout(V.graph.current_node.meta["val"][index]))


def _is_read(index: int) -> bool:
    """Whether anything reads this output of the operator."""
    return any(
        user.target is not operator.getitem or user.args[1] == index
        for user in V.graph.current_node.users
    )


def _new(layout: Any) -> Any:
    empty = lowering.lowerings[torch.ops.aten.empty_strided.default]
    return empty(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)


def _lowered(op: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    by_operator = lowering.fallback_handler(op, add_to_fallback_set=False)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        value = V.graph.current_node.meta["val"]
        device = (value[0] if isinstance(value, tuple) else value).device
        direct = device.type == "cpu" and not V.graph.cpp_wrapper
        return (lower if direct else by_operator)(*args, **kwargs)

    return chosen


@functools.cache
def _fingerprint() -> str:
    """What differs where another build of this package compiles or computes something else."""
    files = [*sorted(Path(__file__).parent.glob("_torch*.py")), Path(_build.native.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _calls_operators(graph: Any) -> bool:
    """Whether this torch.fx.GraphModule calls an operator of this package."""
    return any(
        str(node.target).startswith("axisnorm.")
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


def mark_keys() -> None:
    """Add the fingerprint to what the keys of compiled programs are made of.

    Those of Inductor and of AOTAutograd, which stands before it, are made of the attributes of this
    class.
    """
    if not hasattr(codecache, "FxGraphHashDetails"):
        return
    details = codecache.FxGraphHashDetails
    collect = details.__init__

    @functools.wraps(collect)
    def collect_with_fingerprint(self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        collect(self, gm, *args, **kwargs)
        if gm is not None and _calls_operators(gm):
            self.axisnorm = _fingerprint()

    details.__init__ = collect_with_fingerprint  # type: ignore[method-assign]


class _Joined(PatternMatcherPass):
    """A pass over graphs of forward and backward."""

    def apply(self, gm: Any) -> int:
        return join_activations(gm if isinstance(gm, torch.fx.Graph) else gm.graph)


def register() -> None:
    """Tell Inductor."""
    if not all(hasattr(owner, name) for owner, names in _NEEDED.items() for name in names):
        return
    for op, lower in (
        (_ops.norm_fwd.default, _forward),
        (_ops.norm_bwd.default, _backward),
        (_ops.norm_behind.default, _behind),
        (_ops.norm_train_fwd.default, _train_forward),
        (_ops.add_norm_fwd.default, _add_forward),
        (_ops.add_norm_bwd.default, _add_backward),
    ):
        lowering.register_lowering(op, type_promotion_kind=None)(_lowered(op, lower))
    joint_graph.pass_patterns.append(_Joined())
    # The one pass before gradients that takes patterns and always runs.
    before_gradients = register_graph_pattern(
        CallFunctionVarArgs(list(SMOOTH)), pass_dict=pre_grad.efficient_conv_bn_eval_pass
    )
    before_gradients(lambda match, *_, **__: join_smooth(match.output_node()))
