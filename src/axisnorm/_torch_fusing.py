"""An activation behind a norm becomes the norm's own in the graphs that Inductor compiles.

SiLU and GELU before gradients are taken, as long as they are one operation. A relu, which has many
spellings, in the graph of forward and backward, where all are the same. In backward the norm is
computed again to know where the relu was zero: Inductor would keep a bool for each element, which
it writes and reads slowly.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["SMOOTH", "join_activations", "join_smooth"]

_ops = torch.ops.axisnorm
_aten = torch.ops.aten
_NORM, _TRAIN = _ops.norm_fwd.default, _ops.norm_train_fwd.default
_SUM = _ops.add_norm_fwd.default

SMOOTH: dict[Any, str] = {torch.nn.functional.silu: "silu", torch.nn.functional.gelu: "gelu"}
"""Activations of the name that norms know them by."""


def join_smooth(activated: Node) -> None:
    """Have the norm before it, if there is one, apply one of ``SMOOTH``."""
    y: Any = next(iter(activated.args), None)
    given = activated.args[1:]
    name = SMOOTH[activated.target]
    if name == "gelu" and "none" not in (*given, activated.kwargs.get("approximate", "none")):
        return
    if (
        _is_output(y, 0)
        and _takes_activation(y.args[0])
        and _are_differentiated_alike(y, activated)
    ):
        _join_forward(activated, y, name)


def _are_differentiated_alike(*nodes: Node) -> bool:
    """Whether all have a gradient or none has. Where one stands under no_grad they differ."""
    values = [node.meta.get("example_value") for node in nodes]
    kinds = {isinstance(value, torch.Tensor) and value.requires_grad for value in values}
    return len(kinds) == 1 and None not in values


def join_activations(graph: Graph) -> int:
    """Change a graph of forward and, where there is one, backward; how much was changed."""
    changed = 0
    for relu in graph.find_nodes(op="call_function", target=_aten.relu.default):
        y = relu.args[0]
        if _is_output(y, 0) and _takes_activation(y.args[0]) and _is_on_cpu(y):
            changed += _join_backward(relu, y.args[0]) + _join_forward(relu, y, "relu")
    return changed


def _takes_activation(node: Any) -> bool:
    """Whether this is a norm that has none. It is the eighth argument, of three operators."""
    # Before gradients are taken an overload need not be chosen.
    target = getattr(node.target, "default", node.target)
    known = target in (_NORM, _TRAIN, _SUM) and not node.kwargs
    return known and not any(node.args[7:])


def _join_forward(activated: Node, y: Node, activation: str) -> int:
    norm: Any = y.args[0]
    if len(y.users) > 1 or sum(_is_output(user, 0) for user in norm.users) > 1:
        return 0
    norm.args = (*(*norm.args, None, None)[:7], activation)
    activated.replace_all_uses_with(y)
    activated.graph.erase_node(activated)
    return 1


def _join_backward(relu: Node, norm: Any) -> int:
    """The backward of relu is where(relu <= 0, 0, grad)."""
    changed = 0
    for compared in list(relu.users):
        if compared.target is not _aten.le.Scalar or compared.args[1] != 0:
            continue
        for where in list(compared.users):
            if where.target is _aten.where.self and where.args[0] is compared:
                changed += _is_zero(where.args[1]) and _replace(where, norm)
        if not compared.users:
            relu.graph.erase_node(compared)
    return changed


def _replace(where: Node, norm: Any) -> int:
    grad: Any = where.args[2]
    outputs = {user.args[1]: user for user in norm.users if _is_output(user)}
    if norm.target is _SUM:
        _, _, weight, bias, _, _, scheme = norm.args[:7]
        x, stats = outputs.get(1), outputs.get(2)
        given = (x, weight, bias, None, None, None)
    else:
        x, weight, bias, mask, scheme, *others = norm.args
        stats = outputs.get(1)
        running = others[:2] if norm.target is _NORM and others else (None, None)
        given = (x, weight, bias, mask, *running)
    if x is None or stats is None or not _are_alike(grad, where, x):
        return 0  # no backward of this norm
    graph = where.graph
    with graph.inserting_before(where):
        args = (grad, *given, stats, scheme, "relu")
        behind = graph.call_function(_ops.norm_behind.default, args)
    behind.meta.update(where.meta)
    where.replace_all_uses_with(behind)
    graph.erase_node(where)
    return 1


def _are_alike(*nodes: Node) -> bool:
    """Whether these are of one shape and type, in which a relu's edge is seen.

    In float16 y is 0 up to 2^-25, which is met where weights are small; that of bfloat16 is 2^-134.
    """
    first, *others = (node.meta["val"] for node in nodes)
    return first.dtype != torch.float16 and all(
        other.shape == first.shape and other.dtype == first.dtype for other in others
    )


def _is_output(node: Any, index: int | None = None) -> bool:
    return (
        isinstance(node, Node)
        and node.target is operator.getitem
        and isinstance(node.args[0], Node)
        and index in (None, node.args[1])
    )


def _is_on_cpu(node: Node) -> bool:
    return bool(node.meta["val"].device.type == "cpu")


def _is_zero(node: Any) -> bool:
    """Whether this is a tensor of zeros."""
    if not isinstance(node, Node) or node.kwargs.get("dtype") == torch.bool:
        return False
    filled = {_aten.scalar_tensor.default: 0, _aten.full.default: 1}
    return node.target in filled and bool(node.args[filled[node.target]] == 0)
