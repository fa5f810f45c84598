"""The norms that are written out in a graph: regions, tried from their ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from ...scheme import ArgumentError
from ..progress import step
from .graph import Graph
from .places import Places
from .probing import Shown, study
from .regions import REDUCTIONS, Part, Region, chain, is_end, next_end, restores

__all__ = ["Found", "Search", "possible"]

FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

MOST_STEPS = 12
"""So many operators after a complete norm are looked at for its weight, bias and form."""


@dataclass(frozen=True, eq=False)
class Found:
    """A region and what it was shown to compute."""

    region: Region
    shown: Shown


def possible(graph: Graph) -> Iterator[list[Region]]:
    """For each operator with which a norm may be complete its regions, the smallest first."""
    for node in graph.nodes:
        if not is_end(node) or not any(graph.varies(name) for name in node.output if name):
            continue
        regions = [region for region in chain(graph, node) if region.reduces]
        if regions:
            yield regions


class Search:
    """Looks for norms in the graphs of one model; what was tried once is remembered."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.known: dict[bytes, Shown | None] = {}

    def norms(self, graph: Graph) -> Iterator[Found]:
        """The norms of one graph, each once, in order."""
        claimed: set[int] = set()
        ends: set[int] = set()
        for regions in possible(graph):
            step("searching")
            # What passes through a whole norm is what follows it.
            left = [one for one in regions if not ends & {id(node) for node in one.nodes}]
            if not left or id(left[0].nodes[-1]) in claimed:
                continue
            found = self.widest(left)
            if found is None:
                continue
            found = self.extended(found)
            claimed |= {id(node) for node in found.region.nodes}
            ends.add(id(found.region.nodes[-1]))
            yield found

    def widest(self, regions: Sequence[Region]) -> Found | None:
        """The largest of the regions that is a norm.

        An earlier input counts where it is centred or only given another form: a norm of a
        multiple of it is not its norm.
        """
        best: Found | None = None
        for region in regions:
            if best is not None and not _leads(region, best.region):
                break
            shown = self.study(region)
            if shown is not None:
                best = Found(region, shown)
        return best

    def extended(self, found: Found) -> Found:
        """The norm with what stands behind it: weight, bias, its form and type restored."""
        graph, y = found.region.graph, found.region.y
        for _ in range(MOST_STEPS):
            node = next_end(graph, y)
            if node is None:
                break
            y = node.output[0]
            own = {id(one) for one in found.region.nodes}
            regions = [
                region for region in chain(graph, node)
                if own <= {id(one) for one in region.nodes} and region.reduces
            ]  # fmt: skip
            if not regions:
                break
            larger = self.widest(regions)
            if larger is None or not _belongs(found.shown, larger.shown):
                if not restores(node):
                    break
                continue
            found = larger
        return found

    def study(self, region: Region) -> Shown | None:
        """What the region computes, None if it is no norm or cannot be run alone."""
        x, y = (self.places.types.get(name) for name in (region.x, region.y))
        if x is None or x[1] is None or x[0] not in FLOATING:
            return None
        if y is not None and (y[0] != x[0] or y[1] not in (None, x[1])):
            return None
        try:
            part = Part(region, self.places, wide=True)
        except ArgumentError:
            return None
        key = hashlib.sha256(part.signature() + str(x[1]).encode()).digest()
        if key not in self.known:
            self.known[key] = study(part, x[1])
        return self.known[key]


def _belongs(found: Shown, larger: Shown) -> bool:
    """Whether what comes behind a norm is of it: no second weight, and no number after a weight."""
    if found.scheme.affine and found.factor == 1.0 != larger.factor:
        return False
    pairs = (found.match, larger.match), (found.bias_match, larger.bias_match)
    return all(own is None or own.trivial or other is not None for own, other in pairs)


def _leads(region: Region, inside: Region) -> bool:
    """Whether what a larger region has more may belong to the norm."""
    own = {id(node) for node in inside.nodes}
    more = [node for node in region.nodes if id(node) not in own]
    return any(node.op_type in REDUCTIONS for node in more) or all(map(restores, more))
