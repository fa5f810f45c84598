"""Watching an exported program run, node by node of its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export._tree_utils import reorder_kwargs
from torch.utils._pytree import tree_leaves

from .observe import Call, Operator, Operators, copied

__all__ = ["observed_graph"]


class _Interpreter(torch.fx.Interpreter):
    """Says which node runs."""

    def __init__(self, module: torch.fx.GraphModule, starts: Callable[[Any], None]) -> None:
        super().__init__(module)
        self.starts = starts

    def run_node(self, n: torch.fx.Node) -> Any:
        self.starts(n)
        return super().run_node(n)


def _home(node: torch.fx.Node) -> tuple[str, str]:
    """The path and the class of the module that a node was exported from."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    path, cls = stack[-1] if stack else ("", "")
    return path, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"


def observed_graph(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    operator: Callable[[Call, Operator], None],
    finished: Callable[[Call, Any], None] | None = None,
    begins: Callable[[str, tuple[Any, ...]], None] | None = None,
) -> tuple[Any, list[Any]]:
    """As :func:`~axisnorm.lens.models.observe.observed`, for the module of an exported program.

    A call stands for a node, with the path and class of the module that it was exported from;
    there are no modules that finish.
    """
    records: list[Any] = []
    current = Call(None, "", records=records)
    busy = False

    siblings = Counter(_home(n) for n in model.graph.nodes if n.op == "call_function")

    def starts(node: torch.fx.Node) -> None:
        nonlocal current
        path, cls = _home(node)
        count = siblings[path, cls] if path else 0
        current = Call(None, path, records=records, node=node.name, cls=cls, siblings=count)

    def seen(found: Operator) -> None:
        nonlocal busy
        if not busy:
            busy = True
            try:
                operator(current, found)
            finally:
                busy = False

    own_args, own_kwargs = copied(args, kwargs)
    flat = tree_leaves((own_args, reorder_kwargs(own_kwargs, model._in_spec)))
    with torch.no_grad(), Operators(seen, begins):
        output = _Interpreter(model, starts).run(*flat, enable_io_processing=False)
    output = model.graph.process_outputs(output)
    return output, records
