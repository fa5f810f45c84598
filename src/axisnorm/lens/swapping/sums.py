"""Blocks that end in the norm of a residual sum, as BERT's: norm(dropout(dense(x)) + residual).

A block's forward is traced symbolically. Where it only calls its modules and adds, and the sum
goes nowhere but into the norm, the same calls in the same order, with the sum given to the norm
as its two terms, compute the same. Dropout stays a call of the block's own module.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ... import functional, nn
from .classes import reduced_as, scriptable, subclass
from .probing import SEED, NotProved, calmly, fresh_copy
from .proving import Signature
from .settings import Settings, settings_of, still_hold

__all__ = ["Block", "SumLayerNorm", "SumRMSNorm", "block_of"]

MOST_CHILDREN = 4


class SumLayerNorm(nn.AddLayerNorm):
    """The LayerNorm of a block that gives it the two terms of a sum, or the sum."""

    dropout_p = 0.0
    prenorm = False
    extra_repr = nn.LayerNorm.extra_repr

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if residual is not None and _alike(input, residual):
            return functional.add_layer_norm(
                input, residual, self.normalized_shape, self.weight, self.bias, self.eps, mask=mask
            )
        h = input if residual is None else input + residual
        return functional.layer_norm(
            h, self.normalized_shape, self.weight, self.bias, self.eps, mask=mask
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced_as(nn.LayerNorm, type(self), super().__reduce_ex__(protocol))

    __prepare_scriptable__ = scriptable


class SumRMSNorm(nn.AddRMSNorm):
    """The RMSNorm of a block that gives it the two terms of a sum, or the sum."""

    dropout_p = 0.0
    prenorm = False
    extra_repr = nn.RMSNorm.extra_repr

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if residual is not None and _alike(x, residual):
            return functional.add_rms_norm(
                x, residual, self.normalized_shape, self.weight, self.eps, mask=mask
            )
        h = x if residual is None else x + residual
        return functional.rms_norm(h, self.normalized_shape, self.weight, self.eps, mask=mask)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced_as(nn.RMSNorm, type(self), super().__reduce_ex__(protocol))

    __prepare_scriptable__ = scriptable


SUM_NORMS: Mapping[type, type[torch.nn.Module]] = {
    torch.nn.LayerNorm: SumLayerNorm,
    torch.nn.RMSNorm: SumRMSNorm,
}


def _alike(input: Tensor, residual: Tensor) -> bool:
    """Whether the sum has the shape and type of each term."""
    return input.shape == residual.shape and input.dtype == residual.dtype


@dataclass(frozen=True)
class Block:
    """A block whose norm takes a sum."""

    norm: str
    """The name of the norm in the block."""
    kind: type[torch.nn.Module]
    """The class that the block gets."""
    norm_kind: type[torch.nn.Module]
    """The class that its norm gets."""


_made: dict[tuple[type, str, Settings], type[torch.nn.Module]] = {}


def block_of(
    block: torch.nn.Module,
    norms: Mapping[str, type],
    inputs: Sequence[Signature],
) -> Block | None:
    """The class for a block that gives one of its norms a sum; None where it is no such block.

    Args:
        inputs: what the block was called with.
        norms: those of its children that were replaced, by name, and their classes before.
    """
    children = dict(block.named_children())
    if (
        type(block).__module__.startswith(("torch.", "axisnorm."))
        or not 2 <= len(children) <= MOST_CHILDREN
        or len(norms) != 1
        or block._parameters
        or block._buffers
        or "forward" in vars(block)
        or any(next(child.children(), None) is not None for child in children.values())
    ):
        return None
    ((name, kind),) = norms.items()
    with calmly():
        try:
            copied = fresh_copy(block)
        except NotProved:
            return None
        traced = _traced(copied, name)
        if traced is None:
            return None
        code, forward = traced
        try:
            settings = settings_of(block, *(_small(one) for one in inputs))
        except (NotProved, RuntimeError, ValueError, TypeError):
            return None
        made = _made.get((type(block), code, settings))
        if made is None:
            made = subclass(type(block), _where_it_holds(type(block), name, forward, settings))
            _made[type(block), code, settings] = made
        found = Block(name, made, SUM_NORMS[kind])
        return found if _agrees(copied, found, inputs) else None


def _where_it_holds(
    kind: type[torch.nn.Module], name: str, forward: Callable[..., Any], settings: Settings
) -> Callable[..., Any]:
    """``forward`` while what it was traced with is as it was, the norm takes two terms and nothing
    else looks at its input."""
    original: Callable[..., Any] = kind.forward
    sums = tuple(SUM_NORMS.values())

    @functools.wraps(original)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = getattr(self, name)
        alone = isinstance(norm, sums) and not (norm._forward_pre_hooks or norm._forward_hooks)
        if alone and still_hold(self, settings):
            return forward(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return chosen


class _Children(fx.Tracer):
    """Every module inside is called, none is looked into."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(block: torch.nn.Module, name: str) -> tuple[str, Callable[..., Any]] | None:
    """The block's forward with the sum given to its norm in two terms, and its code.

    None where it does more than call modules and add, or does it differently in the two modes.
    """
    found = []
    for training in (True, False):
        block.train(training)
        try:
            graph = _Children().trace(block)
        except Exception:
            # What a forward does with a proxy can raise anything.
            return None
        if not _with_two_terms(graph, name):
            return None
        graph.lint()
        found.append((graph.python_code("self").src, graph))
    (code, graph), (other, _) = found
    forward: Callable[..., Any] = type(fx.GraphModule(block, graph)).forward
    # What an author calls self is no difference.
    names = [list(inspect.signature(one).parameters)[1:] for one in (forward, type(block).forward)]
    return (code, forward) if code == other and names[0] == names[1] else None


def _with_two_terms(graph: fx.Graph, name: str) -> bool:
    """Give the terms of the sum to the norm ``name``, where the graph is one of these blocks."""
    nodes = list(graph.nodes)
    if any(
        node.op not in ("placeholder", "call_module", "output") and not _is_sum(node)
        for node in nodes
    ):
        return False
    calls = [node for node in nodes if node.op == "call_module" and node.target == name]
    if len(calls) != 1 or len(calls[0].args) != 1 or calls[0].kwargs:
        return False
    (total,) = calls[0].args
    if not isinstance(total, fx.Node) or not _is_sum(total) or list(total.users) != [calls[0]]:
        return False
    calls[0].args = total.args
    graph.erase_node(total)
    return True


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two values that the graph computes, and nothing more."""
    adds = (
        node.op == "call_function" and node.target in (operator.add, torch.add)
    ) or (node.op == "call_method" and node.target == "add")  # fmt: skip
    return (
        adds
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(arg, fx.Node) for arg in node.args)
    )


def _agrees(block: torch.nn.Module, found: Block, inputs: Sequence[Signature]) -> bool:
    """Whether a copy of the block gives the same outputs and gradients, in both modes."""
    kind = type(block)
    other = copy.deepcopy(block)
    other.get_submodule(found.norm).__class__ = found.norm_kind
    for training in (False, True):
        block.train(training)
        other.train(training)
        try:
            before = _results(block, kind.forward, inputs)
        except (RuntimeError, ValueError, TypeError):
            return False
        after = _results(other, found.kind.forward, inputs)
        for one, two in zip(before, after, strict=True):
            if (one is None) != (two is None):
                return False
            if one is None or two is None:
                continue
            limit = 64 * torch.finfo(one.dtype).eps * max(1.0, float(one.abs().max()))
            if not bool(((one.double() - two.double()).abs() <= limit).all()):
                return False
    return True


def _small(one: Signature) -> tuple[int, ...]:
    return (*(min(size, 3) for size in one.shape[:-1]), one.shape[-1])


def _results(
    block: torch.nn.Module, forward: Callable[..., Any], inputs: Sequence[Signature]
) -> list[Tensor | None]:
    """The output and all gradients, with the same inputs and dropout in every call."""
    torch.manual_seed(SEED)
    given = [torch.randn(_small(one)).to(one.dtype).requires_grad_() for one in inputs]
    y = forward(block, *given)
    grads = torch.autograd.grad(y.square().mean(), [*given, *block.parameters()],
                                allow_unused=True)  # fmt: skip
    return [y.detach(), *grads]
