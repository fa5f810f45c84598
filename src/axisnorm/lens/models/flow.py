"""The data flow of a running model: which operators the tensors that are alive came from.

What is remembered ends where a value is mixed along its axes (a matrix product, a convolution, an
attention): no normalization reaches across. The tensors themselves are not kept, but for those
of which a statistic was taken, as long as something that was computed from it is alive.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from .observe import Call, Operator

__all__ = ["REDUCTIONS", "SPREADS", "VIEWS", "Flow", "Node"]

REMEMBERED = 96
"""Of so many operators back is known what they did: the longest spelling seen has 20."""
PINNED = 4
"""So many operators lie at most between a value and the reduction of it, as cast and square."""

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "unsqueeze",
    "squeeze", "expand", "alias", "detach", "clone", "_to_copy", "lift_fresh_copy", "contiguous",
    "lift_fresh", "_conj",
})  # fmt: skip
"""Operators that change where values stand or in which type, not what they are."""
REDUCTIONS = frozenset({
    "mean", "sum", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "bmm", "mm",
    "mv", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
})  # fmt: skip
SPREADS = frozenset({"var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm"})
"""Reductions that give a deviation or a sum of squares by themselves."""

MATRIX_PRODUCTS = {"bmm": 2, "mm": 1, "mv": 0}
"""Those by which einsum takes sums: so many last axes of the result have one element then."""


WRITTEN_TO = frozenset({"out", "out0", "out1"})
"""Arguments that are results."""


class Node:
    """One tensor: the operator that made it and what that was given."""

    __slots__ = ("__weakref__", "args", "call", "constant", "dtype", "fit", "index", "kwargs",
                 "mixed", "name", "normalized", "output", "parents", "pins", "reduced", "shape",
                 "shrinks", "spelled", "spread", "squared", "tensor", "weights")  # fmt: skip

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor = weakref.ref(tensor)
        self.shape: tuple[int, ...] = () if tensor.is_nested else tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.index = index
        """Of the operator in the pass."""
        self.name = ""
        """The operator's without namespace and overload; empty where nothing is remembered."""
        self.spelled = ""
        """The name with the underscore of an operator that writes in place."""
        self.args: tuple[Any, ...] = ()
        """With nodes in the place of tensors."""
        self.kwargs: dict[str, Any] = {}
        self.output = 0
        """Which of the operator's results it is."""
        self.parents: tuple[Node, ...] = ()
        self.constant = False
        """Whether it depends on parameters and numbers alone."""
        self.reduced = False
        """Whether statistics of what it came from are in it."""
        self.mixed = False
        """The same, but for those of a normalization that is already known."""
        self.shrinks = False
        """Whether it is a reduction itself."""
        self.squared = False
        self.spread = False
        """Whether a deviation, or what takes its place, is in it."""
        self.pins: tuple[Pin, ...] = ()
        self.weights: tuple[torch.Tensor, ...] = ()
        """The constant operands, which may have no other owner."""
        self.call: Call | None = None
        self.fit: Any = None
        """What it was shown to be the output of."""
        self.normalized: str | None = None
        """The path of the norm that gave it."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def forget(self) -> None:
        """Follow nothing further back from here."""
        self.name, self.args, self.kwargs = "", (), {}
        self.parents, self.pins, self.weights = (), (), ()
        self.reduced = self.mixed = self.shrinks = self.squared = self.spread = False


class Pin:
    """A tensor of which a statistic was taken, kept as it was then."""

    __slots__ = ("__weakref__", "failures", "node", "tensor", "version")

    def __init__(self, node: Node, tensor: torch.Tensor) -> None:
        self.node, self.tensor = node, tensor
        self.failures = 0
        """How often something that looked like a normalization of it was none."""
        self.version = tensor._version if not tensor.is_inference() else 0

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor, None if it was written to since by another name."""
        tensor = self.tensor
        same = tensor.is_inference() or tensor._version == self.version
        return tensor if same else None


class Flow:
    """The nodes of the tensors that are alive."""

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        self.nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.constants = frozenset(places_of(constants))
        self.pins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The pins, by the tensor."""
        self.recent: deque[Node] = deque()
        """The nodes whose operators are remembered, the oldest first."""

    def node(self, tensor: torch.Tensor) -> Node:
        """The tensor's node, a new one if no operator was seen to make it."""
        known = self.nodes.get(tensor)
        if known is None:
            known = Node(tensor, -1)
            alone = not tensor.is_nested and tensor.numel() == 1
            known.constant = alone or place_of(tensor) in self.constants
            self.nodes[tensor] = known
        return known

    def before(self, name: str, args: Sequence[Any]) -> None:
        """What an operator is about to overwrite is kept if it is still needed."""
        if not _base(name).endswith("_") or not args or not isinstance(args[0], torch.Tensor):
            return
        pin = self.pins.get(args[0])
        if pin is not None and pin.value is not None:
            del self.pins[args[0]]
            pin.tensor = args[0].clone()
            pin.version = pin.tensor._version if not pin.tensor.is_inference() else 0

    def add(self, call: Call, found: Operator) -> list[Node]:
        """The nodes of an operator's results."""
        name = _base(found.name).removesuffix("_") or _base(found.name)
        # Where the result is written to was no input.
        kwargs = {key: value for key, value in found.kwargs.items() if key not in WRITTEN_TO}
        found = replace(found, kwargs=kwargs)
        given = [a for a in tree_leaves((found.args, kwargs)) if isinstance(a, torch.Tensor)]
        parents = tuple(self.node(tensor) for tensor in given)
        results = found.result if isinstance(found.result, (tuple, list)) else (found.result,)
        made = []
        for place, tensor in enumerate(results):
            if not isinstance(tensor, torch.Tensor):
                continue
            node = Node(tensor, found.index)
            node.output, node.call = place, call
            self._describe(node, name, found, parents)
            # An operator that writes in place gives the tensor another node.
            self.nodes[tensor] = node
            made.append(node)
        self.recent += (node for node in made if node.parents and not node.constant)
        while self.recent and self.recent[0].index < found.index - REMEMBERED:
            self.recent.popleft().forget()
        return made

    def _describe(self, node: Node, name: str, found: Operator, parents: tuple[Node, ...]) -> None:
        random = torch.Tag.nondeterministic_seeded in found.tags or name.startswith("empty")
        node.constant = all(p.constant for p in parents) and not random
        elementwise = torch.Tag.pointwise in found.tags or name in VIEWS
        shrinks = name in REDUCTIONS and node.numel <= max((p.numel for p in parents), default=0)
        if name in MATRIX_PRODUCTS:
            shrinks = all(
                size == 1 for size in node.shape[len(node.shape) - MATRIX_PRODUCTS[name] :]
            )
        if not (elementwise or shrinks):
            return
        node.name, node.spelled, node.parents = name, _base(found.name), parents
        node.args = tuple(self._with_nodes(value) for value in found.args)
        node.kwargs = {key: self._with_nodes(value) for key, value in found.kwargs.items()}
        if node.constant:
            return
        data = [p for p in parents if not p.constant]
        # Weights that are made on the spot, as 1 + weight.
        node.weights = tuple(
            tensor for p in parents if p.constant and (tensor := p.tensor()) is not None
        )
        node.shrinks = shrinks
        node.reduced = shrinks or any(p.reduced for p in data)
        node.mixed = shrinks or any(p.mixed and p.fit is None for p in data)
        twice = name == "mul" and len(data) == 2 and data[0] is data[1]
        power = name == "pow" and node.args[1] == 2
        node.squared = twice or power or name == "square" or any(p.squared for p in data)
        node.spread = any(p.spread for p in data)
        if shrinks:
            is_mean = name in ("var_mean", "std_mean") and node.output == 1
            products = name in MATRIX_PRODUCTS and len(data) > 1
            measured = name in SPREADS or products or any(p.squared for p in data)
            node.spread = (node.spread or measured) and not is_mean
            node.pins = tuple(pin for p in data for pin in self._pinned(p))
        # A square of a statistic measures no spread.
        node.squared = node.squared and not shrinks

    def _with_nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._with_nodes(item) for item in value)
        return value

    def _pinned(self, node: Node) -> Iterator[Pin]:
        """Of what the reduction might be a statistic, kept from now on."""
        for _ in range(PINNED):
            tensor = node.tensor()
            if not node.shrinks and tensor is not None:
                pin = self.pins.get(tensor)
                if pin is None or pin.node is not node:
                    pin = Pin(node, tensor)
                    self.pins[tensor] = pin
                yield pin
            if node.fit is not None:
                return
            data = [p for p in node.parents if not p.constant]
            if not data or any(p is not data[0] for p in data):
                return
            node = data[0]


def _base(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def place_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where a tensor lies in memory, and its size; None for one that has no place of its own."""
    try:
        return tensor.data_ptr(), tensor.numel()
    except (RuntimeError, NotImplementedError):
        return None  # It has no storage.


def places_of(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        place = place_of(tensor)
        if place is not None:
            yield place
