"""A model is read and run once, and its norms are found: the basis of an audit and of fusing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...scheme import ArgumentError
from ..progress import step
from .graph import SHAPE, Graph, scopes
from .inputs import checked, generated
from .places import Places, infer, inferred_sides
from .reading import Model, is_standard
from .regions import COMPLETE, Region
from .running import CannotLoadError, CannotRunError, Inspected, Values, inspect
from .search import Found, Search, possible
from .standard import Declared, declared

__all__ = ["Examined", "StandardNode", "examine"]


@dataclass(frozen=True, eq=False)
class StandardNode:
    """A node that is a norm by its type."""

    graph: Graph
    node: Any
    declared: Declared


@dataclass
class Examined:
    """What is known of a model before any norm is held against its data."""

    model: Model
    graphs: list[Graph]
    inputs: Values
    given: bool
    """Whether the inputs came from the user."""
    places: Places
    seen: Inspected | None
    """What a run showed, None if it could not be run."""
    problem: str
    """Why it could not be run."""
    norms: list[Found | StandardNode] = field(default_factory=list)
    """In the order of the graph; those of bodies after the main graph's."""


def examine(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Examined:
    """Run a model on these or generated inputs, and find its norms.

    Raises:
        ArgumentError: it cannot be run on the inputs that were given.
    """
    graphs = list(scopes(model))
    step("running")
    found = _run(model, graphs, args, kwargs)
    search = Search(found.places)
    for graph in graphs:
        found.norms += _norms(graph, search, found.places)
    return found


def _run(
    model: Model, graphs: list[Graph], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Examined:
    main = graphs[0]
    given = bool(args or kwargs)
    regions = [region for one in possible(main) for region in one]
    wanted = {name for region in regions for name in (region.x, region.y)}
    wanted |= {node.input[0] for node in main.nodes if node.input and _is_norm(node)}
    sides = [name for node in main.nodes if node.op_type in ("Shape", "Size")
             for name in node.output if main.kind(name) == SHAPE]  # fmt: skip
    problem, places = "Its inputs are too large to be generated.", Places({})
    inputs: Values = {}
    for inputs in [checked(main, args, kwargs)] if given else generated(main):
        places = infer(model, inputs)
        unknown = sorted(name for name in wanted if places.shape(name) is None)
        try:
            seen = inspect(model, inputs, measured=unknown, sides=sides)
        except CannotRunError as error:
            problem = str(error)
            if isinstance(error, CannotLoadError):
                break
            if given:
                raise ArgumentError(f"The model has to run on the inputs. {error} Give "
                                    "inputs that it takes.") from error  # fmt: skip
            continue
        for name, shape in seen.shapes.items():
            places.types[name] = (seen.elements[name], shape)
        places.sides |= seen.sides
        for graph in graphs[1:]:
            places.sides |= inferred_sides(graph, places)
        return Examined(model, graphs, inputs, given, places, seen, "")
    for graph in graphs:
        places.sides |= inferred_sides(graph, places)
    return Examined(model, graphs, inputs, given, places, None, problem)


def _is_norm(node: Any) -> bool:
    return declared_of(node, 21, 4) is not None


def declared_of(node: Any, opset: int, ndim: int) -> Declared | None:
    """What a node says of itself; a broken attribute says nothing."""
    try:
        return declared(node, opset, ndim)
    except (KeyError, IndexError, ZeroDivisionError):
        return Declared(None, problem="its attributes or inputs are not complete")


def _norms(graph: Graph, search: Search, places: Places) -> Iterator[Found | StandardNode]:
    found: dict[int, Found | StandardNode] = {}
    claimed: set[int] = set()
    for one in search.norms(graph):
        if _as_one_node(one.region) is None:
            claimed |= {id(node) for node in one.region.nodes}
            found[graph.order[id(one.region.nodes[-1])]] = one
    for node in graph.nodes:
        if id(node) in claimed or not any(graph.varies(name) for name in node.output if name):
            continue
        shape = places.shape(node.input[0]) if node.input else None
        if node.op_type == "EmbedLayerNormalization":
            shape = (1, 1, 1)
        said = declared_of(node, graph.model.opset, len(shape or (1, 1, 1, 1)))
        # LpNormalization with p=1 is no norm of this family.
        if said is not None and (said.scheme is not None or said.problem):
            found[graph.order[id(node)]] = StandardNode(graph, node, said)
    yield from (found[place] for place in sorted(found))


def _as_one_node(region: Region) -> Any | None:
    """The operator that is this norm alone, whatever else its other inputs are computed from."""
    end = region.nodes[-1]
    if end.op_type not in COMPLETE or not is_standard(end.domain):
        return None
    alone = end.input[0] == region.x and end.output[0] == region.y
    if alone and (len(region.nodes) == 1 or _trains(end, region.graph.model.opset)):
        return end
    return None


def _trains(node: Any, opset: int) -> bool:
    said = declared_of(node, opset, 4)
    return said is not None and said.scheme is not None and said.scheme.statistics == "batch"
