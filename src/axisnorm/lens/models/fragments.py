"""Normalizations written out in operators, found by their data flow and shown on their data.

Where a value is scaled by a deviation of the values that it came from, the operators between are
read: which axes the statistics were taken over, the eps, the weight and the bias. What was read
counts only if computing it again gives the output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...scheme import ArgumentError, Scheme
from ..identify import Identification, on_axes, rivals, tell_apart
from .atoms import Atom, Dims, broadcast, expanded, leaves, of_constant, of_tensor, own, viewed
from .flow import VIEWS, Flow, Node, Pin
from .observe import Call, Operator

__all__ = ["Fragment", "FragmentReader"]

HALF = (torch.float16, torch.bfloat16)
SCALING = frozenset({"mul", "div", "addcmul", "addcdiv", "add", "sub", "rsub"})
"""With one of these a normalization ends, or the weight and the bias after it."""
ROOTS = frozenset({"sqrt", "rsqrt"})
GIVEN_UP = 4
"""After so many scaled values that are no normalization of a tensor none is looked for."""
LARGEST_LIMIT = 0.1
"""A deviation that is at least this, or its inverse at most 1 over it, is clipped, not guarded."""
COSINE = ("linalg_vector_norm", "clone", "clamp_min_", "div")
"""How torch's cosine_similarity scales each of its inputs: what it gives is no input scaled."""
PATIENCE = 24
"""So many operators may lie between a normalized value and its weight."""


@dataclass
class Fragment:
    """One normalization that operators compute together."""

    scheme: Scheme
    identification: Identification
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    call: Call
    operators: tuple[tuple[int, str], ...]
    """The index in the pass and the name of each, in order; the name of one that writes in place
    ends with an underscore."""
    places: tuple[str, ...]
    """The names of a graph's nodes."""
    node: Node
    source: Node
    """Of x."""
    squares_in: torch.dtype
    """The type in which the squares were summed."""
    root: Node = field(repr=False)
    constants: tuple[torch.Tensor, ...] = ()
    """The tensors that weight and bias were made of, weights first."""
    version: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The operators' names."""
        return tuple(spelled.removesuffix("_") for _, spelled in self.operators)

    def with_rivals(self) -> Identification:
        """What it was shown to be, among what it could be taken for."""
        if not self.y.is_inference() and self.y._version != self.version:
            return self.identification  # It was overwritten since.
        others = rivals(self.scheme, tuple(self.x.shape), half=self.x.dtype in HALF)
        if self.scheme.eps_placement == "std":
            others.append(("eps inside the root", self.scheme.replace(eps_placement="variance")))
        found = _told(self, [("as written", self.scheme), *others])
        best = found.best
        if best is None or float(self.x.min()) == float(self.x.max()):
            return found
        # Where eps hides the axes from the data, the operators still say them.
        told = (c for c in found.candidates if not c.fits or c.axes == best.axes)
        return Identification(tuple(told), best)

    def against(self, scheme: Scheme) -> Identification:
        """What is known of it, if it is torch's own function for this scheme."""
        found = self.identification
        best = found.best
        if best is None:
            return found
        named = replace(best, scheme=scheme, name="as called")
        rest = tuple(c for c in found.candidates if c is not best)
        return Identification((named, *rest), named)


class FragmentReader:
    """Reads a stream of operators and finds the normalizations in it."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.open: dict[int, Fragment] = {}
        """Those that a weight or a bias may still follow, by the index of their last operator."""

    def read(self, call: Call, found: Operator) -> Iterator[Fragment]:
        """Take up the next operator; what ended long ago is complete."""
        for node in self.flow.add(call, found):
            # A linear layer flattens its input: that is no end of the norm before it.
            continues = node.name in VIEWS and any(
                p.fit is not None and _is_inside(p.fit.call, call) for p in node.parents
            )
            if node.spread and (node.name in SCALING or continues):
                fragment = _read(node, call)
                if fragment is not None:
                    self._take(fragment)
        yield from self._closed(lambda one: found.index - one.node.index > PATIENCE)

    def end(self, call: Call | None = None) -> Iterator[Fragment]:
        """What is complete as this call ends, or the whole pass."""
        yield from self._closed(lambda one: call is None or one.call is call)

    def _take(self, fragment: Fragment) -> None:
        for index, other in list(self.open.items()):
            if other.root is fragment.root and other.node in _ancestors(fragment.node):
                fragment.call = other.call
                other.node.fit = None
                del self.open[index]
        fragment.node.fit = fragment
        self.open[fragment.node.index] = fragment

    def _closed(self, is_complete: Any) -> Iterator[Fragment]:
        for index, fragment in list(self.open.items()):
            if is_complete(fragment):
                del self.open[index]
                if tuple(spelled for _, spelled in fragment.operators) == COSINE:
                    fragment.node.fit = None
                    continue
                fragment.identification = fragment.with_rivals()
                fragment.node.forget()
                yield fragment
                fragment.node.fit = None


def _is_inside(call: Call, outer: Call) -> bool:
    """Whether a call is, by its path, the other or one inside of it."""
    return outer.path in ("", call.path) or call.path.startswith(f"{outer.path}.")


# --------------------------------------------------------------------------------------------
# The operators between a value and what became of it


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        for parent in waiting.pop().parents:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _pins(node: Node) -> list[Pin]:
    """Of everything of which a statistic is in the node, the likeliest first.

    The latest: what came before is no part of the normalization. But where statistics are in it
    already it may be the centred value, so that of those the first comes first.
    """
    pins = {pin.node: pin for one in (node, *_ancestors(node)) for pin in one.pins}

    def order(pin: Pin) -> tuple[bool, int]:
        mixed = pin.node.mixed and pin.node.fit is None
        return mixed, pin.node.index if mixed else -pin.node.index

    return sorted(pins.values(), key=order)


def _between(root: Node, node: Node) -> list[Node] | None:
    """The nodes from ``root`` to ``node`` in order, None if anything but constants joins in."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one is root or one.constant or one in found:
            continue
        if not one.parents:
            return None
        found.add(one)
        waiting += one.parents
    return sorted(found, key=lambda one: (one.index, one.output))


def _bases(root: Node) -> list[Node]:
    """The root and what it is a view or a wider copy of, from the outermost to the root."""
    chain = [root]
    while True:
        node = chain[-1]
        if node.name not in VIEWS or len(node.parents) != 1 or node.parents[0].numel != node.numel:
            break
        parent = node.parents[0]
        if (
            parent.dtype != node.dtype
            and torch.promote_types(parent.dtype, node.dtype) != node.dtype
        ):
            break
        chain.append(parent)
        if parent.fit is not None:
            break
    return chain[::-1]


def _undone(value: torch.Tensor, chain: Sequence[Node]) -> torch.Tensor:
    """The value of the first of a chain of views, of the last one's."""
    for parent, child in zip(chain[-2::-1], chain[:0:-1], strict=True):
        if child.name == "permute":
            order = [d % len(child.args[1]) for d in child.args[1]]
            value = value.permute([order.index(i) for i in range(len(order))])
        elif child.name == "transpose":
            value = value.transpose(child.args[1], child.args[2])
        elif child.name == "t":
            value = value.t()
        value = value.reshape(parent.shape).to(parent.dtype)
    return value


@dataclass
class _Region:
    """The operators between, with the axes of the base that each value has."""

    base: Node
    chain: list[Node]
    nodes: list[Node]
    dims: dict[Node, Dims]
    every: set[Atom]

    def has_all(self, node: Any) -> bool:
        return isinstance(node, Node) and node in self.dims and self.every <= own(self.dims[node])


def _read(node: Node, call: Call) -> Fragment | None:
    """What the node is the normalized output of, if it is one."""
    for pin in _pins(node):
        root = pin.node
        if root.numel != node.numel or root is node or pin.failures >= GIVEN_UP:
            continue
        nodes = _between(root, node)
        if nodes is None:
            continue
        value = pin.value
        y = node.tensor()
        if value is None or y is None or not value.is_floating_point() or not value.numel():
            continue
        chain = _bases(root)
        for place in range(len(chain)):
            region = _region(chain[place:], nodes, node)
            if region is not None:
                x = _undone(value, chain[place:])
                fragment = _fragment(region, x, y, node, root, call)
                if fragment is not None:
                    return fragment
                pin.failures += 1
                break
    return None


def _region(chain: list[Node], nodes: list[Node], node: Node) -> _Region | None:
    """The axes of all values, if input and output have the same axes in the same places."""
    base = chain[0]
    dims: dict[Node, Dims] = {base: of_tensor(base.shape)}
    for one in (*chain[1:], *nodes):
        found = _dims_of(one, dims)
        if found is None:
            return None
        dims[one] = found
    if node.shape != base.shape:
        return None
    pairs = zip(dims[base], dims[node], strict=True)
    if any(_large(a) != _large(b) for a, b in pairs):
        return None
    every = {leaf for axis in dims[base] for leaf in _large(axis)}
    return _Region(base, chain, nodes, dims, every)


def _large(axis: tuple[Atom, ...]) -> list[Atom]:
    return [leaf for leaf in leaves(axis) if leaf.size != 1]


def _dims_of(node: Node, dims: dict[Node, Dims]) -> Dims | None:
    """The axes of an operator's result, None where they cannot be followed."""
    tensors = [a for a in node.args if isinstance(a, Node)]
    tensors += [a for a in node.kwargs.values() if isinstance(a, Node)]
    if not tensors:
        return None
    given = [dims[t] if t in dims else of_constant(t.shape) for t in tensors]
    name, args, first = node.name, node.args, given[0]
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return viewed(first, node.shape)
    if name == "permute":
        return tuple(first[d] for d in args[1])
    if name in ("transpose", "t"):
        one, other = args[1:3] if name == "transpose" else (0, len(first) - 1)
        order = list(range(len(first)))
        order[one], order[other] = order[other], order[one]
        return tuple(first[d] for d in order)
    if name == "unsqueeze":
        place = args[1] % (len(first) + 1)
        return (*first[:place], (), *first[place:])
    if name == "squeeze":
        asked = args[1] if len(args) > 1 else range(len(first))
        gone = {d % len(first) for d in ((asked,) if isinstance(asked, int) else asked)}
        shape = tensors[0].shape
        return tuple(axis for d, axis in enumerate(first) if d not in gone or shape[d] != 1)
    if name == "expand":
        return expanded(first, node.shape)
    if name in VIEWS:
        return first
    if node.shrinks:
        return _reduced(node, tensors, given)
    return broadcast(given)


def _reduced(node: Node, tensors: list[Node], given: list[Dims]) -> Dims | None:
    """The axes that a reduction leaves."""
    name, first, shape = node.name, given[0], tensors[0].shape
    if name == "bmm":
        # Sums of products over the axis between.
        if _large(first[2]) != _large(given[1][1]) or _large(first[0]) != _large(given[1][0]):
            return None
        return (first[0], (), ())
    if name in ("mm", "mv"):
        # Rows times one column, as of ones.
        return (first[0], ()) if name == "mm" else first[:1]
    if "pool" in name:
        free = len(shape) - (int(name[-2]) if name[-1] == "d" else 2)
        gone = set(range(free, len(shape)))
        if any(node.shape[d] != 1 for d in gone):
            return None
        return tuple(() if d in gone else axis for d, axis in enumerate(first))
    place = 2 if name in ("linalg_vector_norm", "norm") else 1
    asked = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    dims = asked if isinstance(asked, (tuple, list)) else () if asked is None else (asked,)
    if any(not isinstance(d, int) for d in dims):
        return None
    gone = {d % len(first) for d in dims} or set(range(len(first)))
    if len(node.shape) == len(first):
        return tuple(() if d in gone else axis for d, axis in enumerate(first))
    return tuple(axis for d, axis in enumerate(first) if d not in gone)


# --------------------------------------------------------------------------------------------
# What they compute


@dataclass
class _Written:
    """What the operators say before anything is computed."""

    reduced: set[Atom]
    center: bool
    correction: float
    l2: bool
    eps: list[tuple[float, str]]
    """Numbers that may be the eps, with where they stand."""
    weights: list[tuple[torch.Tensor, Node, Node, float]]
    """Factors: the constant, its node, the operator and the power."""
    biases: list[tuple[torch.Tensor, Node, Node, float]]
    squares_in: torch.dtype


def _fragment(
    region: _Region, x: torch.Tensor, y: torch.Tensor, node: Node, root: Node, call: Call
) -> Fragment | None:
    written = _written(region)
    if written is None:
        return None
    try:
        parameters = _parameters(region, written)
    except _NotFollowedError:
        return None
    weight, bias, affine, offset, constants = parameters
    if not _says_something(y, weight, offset):
        return None
    axes = _axes(region, written.reduced, affine)
    if axes is None:
        return None
    operators = tuple(dict.fromkeys((one.index, one.spelled) for one in region.nodes))
    places = dict.fromkeys(one.call.node for one in region.nodes if one.call is not None)
    named = tuple(place for place in places if place is not None)
    by_scalars = _scalars(region)
    values = [(y, 0 if y.is_inference() else y._version)]
    if by_scalars != 1.0 and bias is None:
        values.append(((y.double() / by_scalars).to(y.dtype), 0))
    for (value, version), scheme in itertools.product(
        values, list(_schemes(axes, written, offset, region, y))
    ):
        sizes = scheme.layout(x.dim()).sizes(tuple(x.shape))
        given = [None if p is None else p.reshape(sizes.affine_shape) for p in (weight, bias)]
        fragment = Fragment(
            scheme, Identification((), None), x, value, given[0], given[1], call, operators,
            named, node, region.base, written.squares_in, root, constants, version,
        )  # fmt: skip
        fragment.identification = _told(fragment, [("as written", scheme)])
        if fragment.identification.best is not None:
            return fragment
    return None


def _scalars(region: _Region) -> float:
    """By which numbers the whole is multiplied, as where a scale comes before the statistics."""
    found = 1.0
    for node in region.nodes:
        if node.name not in ("mul", "div") or not region.has_all(node):
            continue
        numbers = [_number(value) for value in node.args[:2] if value not in region.dims]
        for number in numbers:
            if number:
                found *= number if node.name == "mul" else 1 / number
    return found if math.isfinite(found) and found else 1.0


def _says_something(y: torch.Tensor, weight: torch.Tensor | None, offset: float) -> bool:
    """Whether the output depends on what was computed: any formula gives a constant one."""
    silent = weight is not None and bool((weight == -offset).all())
    return not silent and float(y.min()) < float(y.max())


def _told(fragment: Fragment, candidates: list[tuple[str, Scheme]]) -> Identification:
    """The candidates held against input and output.

    Where the operators round to a half type in between, so many roundings more are explained.
    """
    x, y = fragment.x, fragment.y
    found = tell_apart(x, y, candidates, weight=fragment.weight, bias=fragment.bias)
    if fragment.squares_in not in HALF:
        return found
    steps = len(fragment.operators)
    looser = tuple(
        replace(c, tolerance=c.tolerance * steps, fits=c.residual <= c.tolerance * steps)
        for c in found.candidates
    )
    ranked = sorted(
        looser, key=lambda c: (not c.fits, 0.0 if c.name == "as written" else c.residual)
    )
    return Identification(tuple(ranked), ranked[0] if ranked and ranked[0].fits else None)


class _NotFollowedError(Exception):
    """A constant stands where no weight and no bias does."""


def _written(region: _Region) -> _Written | None:
    kept: set[Atom] | None = None
    center = False
    correction, l2 = 0.0, False
    found = _Written(set(), False, 0.0, False, [], [], [], torch.float32)
    for node in region.nodes:
        parents = [p for p in node.parents if not p.constant]
        if node.shrinks:
            if node.name in ("var", "std", "var_mean", "std_mean"):
                correction = max(correction, _correction(node))
            l2 = l2 or node.name in ("linalg_vector_norm", "norm", "sum", "bmm")
            if node.spread and not any(p.spread for p in parents):
                found.squares_in = parents[0].dtype
                wide = node.kwargs.get("dtype")
                found.squares_in = wide if wide is not None else found.squares_in
            elif not node.spread:
                center = True
            continue
        lacking = [p for p in parents if p.spread and not region.has_all(p)]
        if lacking and region.has_all(node):
            kept = (kept or set()).union(*(own(region.dims[p]) for p in lacking))
        if node.spread and not region.has_all(node):
            if _clips(node):
                return None
            found.eps += _eps(node, region)
            correction = max(correction, _divided_by_less(node))
    if kept is None:
        return None
    kept = {leaf for atom in kept for leaf in atom.leaves() if leaf.size != 1}
    found.reduced = {leaf for atom in region.every for leaf in atom.leaves()} - kept
    found.center, found.correction, found.l2 = center, correction, l2 and not center
    return found if found.reduced else None


def _correction(node: Node) -> float:
    """The divisor of var and std: n minus this."""
    for key, value in (*node.kwargs.items(), *[("unbiased", a) for a in node.args[1:]]):
        if isinstance(value, bool) and key == "unbiased":
            return float(value)
        if key == "correction":
            return 1.0 if value is None else float(value)
    return 1.0


def _divided_by_less(node: Node) -> float:
    """1 where a sum over n elements is divided by n - 1."""
    total = node.parents[0] if node.parents else node
    if node.name != "div" or total.name != "sum" or len(node.args) < 2:
        return 0.0
    count = total.parents[0].numel // max(total.numel, 1)
    return float(count > 1 and _number(node.args[1]) == count - 1)


def _clips(node: Node) -> bool:
    """Whether a statistic is held in bounds that ordinary values reach: only what is large, or
    small, is scaled then."""
    if node.name not in ("clamp", "clamp_min", "clamp_max", "maximum", "minimum"):
        return False
    lower, upper = (*node.args[1:3], None, None)[:2]
    if node.name in ("clamp_max", "minimum"):
        lower, upper = None, lower
    lower = _number(node.kwargs.get("min", lower))
    upper = _number(node.kwargs.get("max", upper))
    return (lower is not None and lower > LARGEST_LIMIT) or (
        upper is not None and upper < 1 / LARGEST_LIMIT
    )


def _number(value: Any) -> float | None:
    """A number, or the one element of a constant."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and value.constant and value.numel == 1:
        tensor = value.tensor()
        return None if tensor is None else _shortest(tensor)
    return None


def _shortest(tensor: torch.Tensor) -> float:
    """The shortest decimal number that is rounded to the one element."""
    exact = float(tensor)
    if not math.isfinite(exact) or tensor.dtype == torch.float64:
        return exact
    written = (float(f"{exact:.{digits}e}") for digits in range(9))
    kind = tensor.dtype
    return next((w for w in written if float(torch.tensor(w, dtype=kind)) == exact), exact)


def _eps(node: Node, region: _Region) -> Iterator[tuple[float, str]]:
    """The number that is added to a statistic, or that it is at least."""
    limits = {"clamp_min": 1, "clamp": 1, "maximum": 1}
    values = node.args[1:2] if node.name in limits else node.args if node.name == "add" else ()
    if node.name == "clamp" and "min" in node.kwargs:
        values = (node.kwargs["min"],)
    for value in values:
        number = _number(value)
        if number is None:
            continue
        rooted = _is_rooted(node, region)
        if node.name in limits:
            yield math.sqrt(number) if rooted and number > 0 else number, "max"
        else:
            yield number, "variance" if rooted else "std"


def _is_root(node: Node) -> bool:
    power = node.name == "pow" and node.args[1] in (0.5, -0.5)
    return node.name in ROOTS or power


def _is_rooted(node: Node, region: _Region) -> bool:
    """Whether a root is taken after this before the value is scaled."""
    reached = {node}
    for one in region.nodes:
        if any(p in reached for p in one.parents) and not region.has_all(one):
            if _is_root(one):
                return True
            reached.add(one)
    return False


def _schemes(
    axes: Scheme, written: _Written, offset: float, region: _Region, y: torch.Tensor
) -> Iterator[Scheme]:
    """The formulas that the operators may spell, the likeliest first."""
    kinds = [
        (center, scale, correction)
        for center, scale in (
            (True, "auto"), (False, "auto"), (False, "std"), (False, "l2"), (True, "l2"),
            (True, "var"), (True, "sqrt_std"),
        )
        for correction in (0.0, 1.0)
    ]  # fmt: skip

    def unlikely(kind: tuple[bool, str, float]) -> tuple[bool, ...]:
        center, scale, correction = kind
        return (
            center != written.center,
            (scale == "l2") != written.l2,
            correction != written.correction,
        )

    half = region.base.dtype in HALF and y.dtype in HALF and bool(axes.affine)
    eps = list(dict.fromkeys(written.eps)) or [(0.0, "variance")]
    places = [*eps, *((v, p) for v, _ in eps for p in ("variance", "std") if (v, p) not in eps)]
    for center, scale, correction in sorted(kinds, key=unlikely):
        if correction and (scale == "l2" or (scale == "auto" and not center)):
            continue
        for value, place in places:
            if place == "max" and scale != "l2" and scale != "auto":
                continue
            for rounding in ("once", "before_affine") if half else ("once",):
                yield axes.replace(
                    center=center, scale=scale, correction=correction, eps=value,
                    eps_placement=place, weight_offset=offset, rounding=rounding,
                )  # fmt: skip


# --------------------------------------------------------------------------------------------
# Weight and bias


def _parameters(
    region: _Region, written: _Written
) -> tuple[torch.Tensor | None, torch.Tensor | None, set[Atom], float, tuple[torch.Tensor, ...]]:
    """Weight, bias, the parts of the axes along which they vary, and what is added to the weight.

    Both are tensors of the affine parts in order. Last the tensors that they were made of.
    """
    weights: dict[Node, tuple[Node, float]] = {}
    biases: dict[Node, tuple[Node, float]] = {}
    for node in region.nodes:
        for place, value in enumerate(node.args):
            if not isinstance(value, Node) or not value.constant or value in region.dims:
                continue
            if value.numel == 1 and node.name in ("pow", "clamp", "clamp_min", "maximum", "add",
                                                  "mul", "div", "sub", "where"):  # fmt: skip
                if node.spread and not region.has_all(node):
                    continue
                if value.shape == () or (node.name in ("mul", "div") and len(node.shape) > 1):
                    continue
            if node.shrinks:  # A matrix of ones, by which a sum is taken.
                continue
            if node.name == "mul" or (node.name == "addcmul" and place > 0):
                weights.setdefault(value, (node, 1.0))
            elif node.name == "div" and place == 1:
                weights.setdefault(value, (node, -1.0))
            elif node.name == "add" or (node.name in ("addcmul", "sub") and place == 0):
                biases.setdefault(value, (node, 1.0))
            elif node.name == "sub" and place == 1:
                biases.setdefault(value, (node, -1.0))
            else:
                raise _NotFollowedError
    offset = 0.0
    aligned = []
    for group in (weights, biases):
        values = []
        for constant, (node, sign) in group.items():
            tensor = constant.tensor()
            if tensor is None:
                raise _NotFollowedError
            if group is weights and len(weights) == 1 and sign == 1.0:
                stored = _stored_around_zero(constant)
                if stored is not None:
                    tensor, offset = stored.reshape(tensor.shape), 1.0
            if sign < 0:
                tensor = 1 / tensor.double() if group is weights else -tensor
            values.append((tensor.detach(), _alignment(region, node, constant)))
        aligned.append(values)
    affine = {
        leaf for values in aligned for _, places in values for axis in places for leaf in axis
    }
    order = [leaf for axis in region.dims[region.base] for leaf in leaves(axis) if leaf in affine]
    return (
        _combined(aligned[0], order, math.prod),
        _combined(aligned[1], order, sum),
        affine,
        offset,
        tuple(tensor for one in (*weights, *biases) for tensor in _origins(one)),
    )


def _origins(node: Node) -> Iterator[torch.Tensor]:
    for one in (node, *_ancestors(node)):
        tensor = one.tensor()
        if not one.parents and tensor is not None and tensor.numel() > 1:
            yield tensor


def _stored_around_zero(node: Node) -> torch.Tensor | None:
    """The weight itself, where the factor is 1 + weight."""
    while node.name in ("_to_copy", "alias", "detach", "clone") and node.parents:
        node = node.parents[0]
    if node.name != "add" or len(node.args) < 2:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if _number(one) == 1.0 and isinstance(other, Node):
            while other.name == "_to_copy" and other.parents:
                other = other.parents[0]
            tensor = other.tensor()
            return tensor if tensor is not None and tensor.numel() == node.numel else None
    return None


def _alignment(region: _Region, node: Node, constant: Node) -> list[list[Atom]]:
    """The base's parts that each axis of a constant lies along."""
    after, reached = node, {node}
    for one in region.nodes:
        if region.has_all(after):
            break
        if any(p in reached for p in one.parents) and one.name not in VIEWS:
            reached.add(one)
            after = one
    dims = region.dims[after]
    found: list[list[Atom]] = []
    for place in range(-len(constant.shape), 0):
        size = constant.shape[place]
        axis = _large(dims[place]) if size != 1 and -place <= len(dims) else []
        if size != 1 and (
            math.prod(leaf.size for leaf in axis) != size or any(a.axis is None for a in axis)
        ):
            raise _NotFollowedError
        found.append(axis)
    return found


def _combined(
    values: list[tuple[torch.Tensor, list[list[Atom]]]], order: list[Atom], together: Any
) -> torch.Tensor | None:
    """The constants as one, along the affine parts in order."""
    if not values:
        return None
    shape = [leaf.size for leaf in order]
    found = []
    for tensor, places in values:
        own_leaves = [leaf for axis in places for leaf in axis]
        split = tensor.reshape([leaf.size for leaf in own_leaves])
        places_of = sorted(range(len(own_leaves)), key=lambda i: order.index(own_leaves[i]))
        sizes = [leaf.size if leaf in own_leaves else 1 for leaf in order]
        found.append(split.permute(places_of).reshape(sizes).expand(shape))
    if len(found) == 1:
        return found[0]
    total: torch.Tensor = together([value.double() for value in found])
    return total


# --------------------------------------------------------------------------------------------
# The notation


def _axes(region: _Region, reduced: set[Atom], affine: set[Atom]) -> Scheme | None:
    """The scheme with these axes, any eps and no other constants."""
    shape, base = region.base.shape, region.dims[region.base]
    ndim = len(shape)
    plain = Scheme("[d]")
    parts = [_large(axis) for axis in base]
    roles = [{leaf in reduced for leaf in axis} for axis in parts]
    along = [axis for axis, own_parts in enumerate(parts) if affine & set(own_parts)]
    whole = all(not affine & set(p) or set(p) <= affine for p in parts)
    try:
        if all(len(role) < 2 for role in roles) and whole:
            over = tuple(
                axis for axis, role in enumerate(roles)
                if True in role or (not role and _joins(axis, roles))
            )  # fmt: skip
            if len(along) > len(over) and (*over,) == (ndim - 1,) and along == [ndim - 2, ndim - 1]:
                return Scheme("... h [d]", affine="h d")
            return on_axes(ndim, over, tuple(along), plain)
        if (
            ndim >= 2
            and len(parts[1]) == 2
            and [leaf in reduced for leaf in parts[1]] == [False, True]
            and roles[0] <= {False}
            and all(role <= {True} for role in roles[2:])
            and along in ([], [1])
        ):
            group = Scheme.group_norm(parts[1][0].size)
            if not affine or set(parts[1]) <= affine:
                return group if affine else group.replace(affine="")
            return group.replace(affine="g") if affine == {parts[1][0]} else None
        return _in_parts(parts, reduced, affine, plain)
    except ArgumentError:
        return None


def _joins(axis: int, roles: Sequence[set[bool]]) -> bool:
    """Whether an axis of one element counts as shared: if it stands among axes that are."""
    beside = [roles[i] for i in range(max(axis, 2), len(roles)) if roles[i]]
    before = [roles[i] for i in range(2, axis) if roles[i]]
    return axis >= 2 and bool(beside or before) and all(True in role for role in beside + before)


def _in_parts(
    parts: Sequence[list[Atom]], reduced: set[Atom], affine: set[Atom], like: Scheme
) -> Scheme:
    """Axes of which a part is shared, as in ``b s (h=4 [d])``."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    words, varying = [], []
    for axis in parts:
        if not axis:
            words.append(next(letters))
            continue
        said = []
        for place, leaf in enumerate(axis):
            name = next(letters)
            if leaf in affine:
                varying.append(name)
            size = f"={leaf.size}" if len(axis) > 1 and place < len(axis) - 1 else ""
            said.append(f"[{name}{size}]" if leaf in reduced else f"{name}{size}")
        words.append(f"({' '.join(said)})" if len(axis) > 1 else said[0])
    return like.replace(axes=" ".join(words), affine=" ".join(varying))
