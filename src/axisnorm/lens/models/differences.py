"""Two models compared norm by norm: a port against its original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ...scheme import ArgumentError, Axis, Scheme
from ..compare import DTYPES, Part, compared, moved_channels
from ..meaning import Meaning
from ..result import Result
from ..subject import Subject, with_article
from .norms import Audit, Norm
from .parameters import ROLES, Parameter

__all__ = ["Differences", "Pair", "differences"]

PARTS = ("statistics", "affine", "constants", "running", "parameters", "values", "dtype")
"""What of two norms is compared, in this order."""

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""How far rounding to a type may move a number, relative to it."""

GRAPHS = ("onnx",)
"""Sources that only infer: what training would do with running statistics is not in them."""


@dataclass(frozen=True)
class Pair:
    """A norm of each model that stand for one another."""

    a: Norm
    b: Norm
    by: str
    """``"path"``, or ``"order"``: by execution order and structure."""
    parts: tuple[Part, ...]
    """Statistics, affine, constants and running as :func:`axisnorm.compare` has them, then
    parameters (their shapes), values and dtype. A verdict is ``"equal"``, ``"different"``, or
    ``"unknown"`` where one of the audits does not say enough."""
    notes: tuple[str, ...] = ()
    """What differs without effect, and what was not shown by execution."""
    largest_difference: float | None = None
    """Between the values of weights, biases and running statistics; None where one has none, or
    some are too large to be kept and differ."""

    @property
    def same(self) -> bool:
        """Whether nothing that can be compared differs."""
        return not self.different

    @property
    def different(self) -> tuple[Part, ...]:
        """The parts that differ."""
        return tuple(part for part in self.parts if part.verdict == "different")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "a": _side(self.a),
            "b": _side(self.b),
            "by": self.by,
            "same": self.same,
            "parts": {part.name: part.to_dict() for part in self.parts},
            "notes": list(self.notes),
            "largest_difference": self.largest_difference,
        }


def _side(norm: Norm) -> dict[str, Any]:
    scheme = norm.scheme or norm.declared
    return {
        "path": norm.path,
        "class": norm.cls,
        "kind": norm.kind,
        "scheme": str(scheme) if scheme else None,
        "verified": norm.verified,
        "shape": list(norm.shape) if norm.shape is not None else None,
        "dtype": norm.dtype,
        "affine_shape": list(norm.affine_shape),
    }


@dataclass(frozen=True)
class Differences(Result):
    """Two models, norm by norm.

    Sentences call the models *a* and *b*, and say a's number first.
    """

    kind: ClassVar[str] = "differences"

    a: Audit
    b: Audit
    pairs: tuple[Pair, ...]
    """In the order of a."""
    only_a: tuple[Norm, ...]
    """Norms of a that no norm of b stands for."""
    only_b: tuple[Norm, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether every norm has its counterpart and nothing that can be compared differs."""
        return not (self.only_a or self.only_b) and all(pair.same for pair in self.pairs)

    @property
    def alignment(self) -> str:
        """How norms were paired: ``"path"``, ``"order"``, ``"both"``, or ``"none"`` were."""
        ways = {pair.by for pair in self.pairs}
        return "both" if len(ways) > 1 else next(iter(ways), "none")

    @property
    def aligned(self) -> str:
        """How norms were paired, in a sentence."""
        counts = Counter(pair.by for pair in self.pairs)
        if not counts:
            return "No norm of the one has anything in common with a norm of the other."
        words = {"path": "by path", "order": "by execution order and structure"}
        said = " and ".join(
            f"{count} {'pair' if count == 1 else 'pairs'} {words[way]}"
            for way, count in sorted(counts.items(), reverse=True)
        )
        return f"{said}."

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """What differs, in sentences that begin with the norm's path in a."""
        found = []
        for pair in self.pairs:
            where = pair.a.path or "the model"
            if pair.by == "order" and pair.a.path != pair.b.path:
                where += f" ({pair.b.path} in b)"
            found += [f"{where}: {s}" for part in pair.different for s in part.sentences]
        for name, norms in (("a", self.only_a), ("b", self.only_b)):
            found += [
                f"{norm.path or 'the model'}: {norm.cls} is only in {name}." for norm in norms
            ]
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            **{
                name: {"model": one.model, "source": one.source, "norms": len(one.norms)}
                for name, one in (("a", self.a), ("b", self.b))
            },
            "same": self.same,
            "alignment": self.alignment,
            "pairs": [pair.to_dict() for pair in self.pairs],
            "only_a": [_side(norm) for norm in self.only_a],
            "only_b": [_side(norm) for norm in self.only_b],
            "differences": list(self.differences),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        different = sum(not pair.same for pair in self.pairs)
        return (
            f"Differences({self.a.model} with {self.b.model}: {len(self.pairs)} pairs, "
            f"{different} differ, {len(self.only_a)} only in a, {len(self.only_b)} only in b)"
        )


def differences(a: Audit, b: Audit) -> Differences:
    """Compare the norms of two audited models; :meth:`Audit.diff` documents it.

    Raises:
        ArgumentError: one is no audit.
    """
    for one in (a, b):
        if not isinstance(one, Audit):
            raise ArgumentError(
                "A model is compared by its audit. "
                f"{with_article(one)} came. Give axisnorm.audit(model, x)."
            )
    places = _paired(a.norms, b.norms)
    pairs = tuple(
        _pair(a.norms[i], b.norms[j], way, a.source in GRAPHS, b.source in GRAPHS)
        for i, j, way in places
    )
    ours, theirs = {i for i, _, _ in places}, {j for _, j, _ in places}
    ran = [j for i, j, _ in places if a.norms[i].calls and b.norms[j].calls]
    only_a = tuple(norm for i, norm in enumerate(a.norms) if i not in ours)
    only_b = tuple(norm for j, norm in enumerate(b.norms) if j not in theirs)
    notes = [] if ran == sorted(ran) else ["The pairs run in another order in b than in a."]
    for graph, name, alone in ((a, "a", only_b), (b, "b", only_a)):
        schemes = [norm.scheme or norm.declared for norm in alone]
        if graph.source in GRAPHS and any(s and s.statistics == "running" for s in schemes):
            notes.append(
                f"Exporters put a batch norm with running statistics into the weights of the "
                f"layer before it: what {name} lacks may be there."
            )
    return Differences(a, b, pairs, only_a, only_b, tuple(notes))


# --------------------------------------------------------------------------------------------
# Which norm stands for which

_Places = list[tuple[int, int, str]]


def _paired(a: Sequence[Norm], b: Sequence[Norm]) -> _Places:
    """Places in a and in b that stand for one another, in a's order.

    By paths, and what they leave over by order between the same neighbours. Where the numbers in
    paths were given anew, order and values agree better than paths do, and win.
    """
    one, two = ([_Traits.of(norm) for norm in norms] for norms in (a, b))
    keys = [_keys(norms) for norms in (a, b)]
    by_order: _Places = [
        (i, j, "path" if keys[0][i] == keys[1][j] else "order") for i, j in _aligned(one, two)
    ]
    there = {key: j for j, key in enumerate(keys[1])}
    by_path: _Places = [(i, there[key], "path") for i, key in enumerate(keys[0]) if key in there]
    if not by_path:
        return by_order
    runs = (
        _runs(len(a), {i for i, _, _ in by_path}),
        _runs(len(b), {j for _, j, _ in by_path}),
    )
    for i, j, _ in [(-1, -1, ""), *by_path]:
        ours, theirs = runs[0].get(i, []), runs[1].get(j, [])
        found = _aligned([one[k] for k in ours], [two[k] for k in theirs])
        by_path += [(ours[k], theirs[m], "order") for k, m in found]

    def likeness(places: _Places) -> int:
        return sum(_likeness(one[i], two[j]) + 2 * (way == "path") for i, j, way in places)

    return sorted(by_path if likeness(by_path) >= likeness(by_order) else by_order)


def _keys(norms: Sequence[Norm]) -> list[tuple[str, int]]:
    """For each norm its path and how often that came before, in the spelling of modules."""
    seen: Counter[str] = Counter()
    keys = []
    for norm in norms:
        path = norm.path
        if path.startswith("/"):
            # Exporters write a module's path with slashes and the operator behind the last.
            path = path.lstrip("/").rpartition("/")[0].replace("/", ".") or path
        keys.append((path, seen[path]))
        seen[path] += 1
    return keys


def _runs(count: int, anchors: set[int]) -> dict[int, list[int]]:
    """The places that are no anchors, by the anchor before them; -1 before the first."""
    runs: dict[int, list[int]] = {}
    before = -1
    for place in range(count):
        if place in anchors:
            before = place
        else:
            runs.setdefault(before, []).append(place)
    return runs


@dataclass(frozen=True)
class _Traits:
    """What two norms are recognized by."""

    structure: Any
    """Which axes share, counted from the last, and what is made of them."""
    affine: tuple[int, ...]
    eps: float | None
    values: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, norm: Norm) -> _Traits:
        scheme = norm.scheme or norm.declared
        structure: Any = None
        if scheme is not None:
            axes: tuple[int, ...] = ()
            if norm.shape is not None:
                ndim = len(norm.shape)
                axes = tuple(axis - ndim for axis in scheme.layout(ndim).reduced_axes)
            structure = (axes, scheme.center, scheme.scale)
        affine = tuple(size for size in norm.affine_shape if size != 1)
        values = frozenset((one.role, one.digest) for one in norm.parameters)
        return cls(structure, affine, norm.eps, values)


def _likeness(a: _Traits, b: _Traits) -> int:
    """How much speaks for one norm standing for the other; below zero nothing does."""
    found = (
        2 * (a.structure is not None and a.structure == b.structure)
        + 2 * (a.affine == b.affine)
        + 4 * (a.values == b.values and bool(a.values))
    )
    return found + (a.eps == b.eps) if found else -1


def _aligned(a: Sequence[_Traits], b: Sequence[_Traits]) -> list[tuple[int, int]]:
    """The pairs in order whose likeness is largest in sum (Needleman and Wunsch 1970)."""
    if not a or not b:
        return []
    gains = [[_likeness(x, y) for y in b] for x in a]
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        row, below, gain = best[i], best[i + 1], gains[i]
        for j in range(len(b) - 1, -1, -1):
            row[j] = max(below[j], row[j + 1], below[j + 1] + gain[j])
    pairs, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if gains[i][j] > 0 and best[i][j] == best[i + 1][j + 1] + gains[i][j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


# --------------------------------------------------------------------------------------------
# One pair


def _pair(a: Norm, b: Norm, way: str, a_infers: bool, b_infers: bool) -> Pair:
    norms = a, b
    one, two = a.scheme or a.declared, b.scheme or b.declared
    notes = list(_not_shown(a, b))
    if a_infers != b_infers:
        a, b, one, two, said = _without_units(a, one, b, two, a_infers)
        notes += said
    values, largest = _values(a, one, b, two)
    if one is not None and two is not None:
        one, two, said = _comparable(a, one, b, two, a_infers, b_infers)
        notes += said
        if a_infers != b_infers and _folded(one, two, values):
            notes.append(f"The weight of {'a' if a_infers else 'b'} has the offset in it, as "
                         "exporters compute it once.")  # fmt: skip
            two = two.replace(weight_offset=one.weight_offset)
        parts, said = _meanings(a, one, b, two)
        notes += said
    else:
        named = [name for name, scheme in (("a", one), ("b", two)) if scheme is None]
        sentence = f"What {' and '.join(named)} computes is not known."
        parts = tuple(Part(name, "unknown", (sentence,)) for name in PARTS[:4])
    parts = (*parts, _shapes(a, b), values, _dtype(a, b))
    return Pair(*norms, way, parts, tuple(notes), largest)


def _not_shown(a: Norm, b: Norm) -> Iterator[str]:
    for name, norm in (("a", a), ("b", b)):
        if norm.scheme is None and norm.declared is not None:
            yield f"{name} is taken for what it declares: execution showed nothing."
    if a.shape is not None and b.shape is not None and a.shape != b.shape:
        yield f"Their inputs have the shapes {a.shape} and {b.shape}."


def _without_units(
    a: Norm, one: Scheme | None, b: Norm, two: Scheme | None, a_infers: bool
) -> tuple[Norm, Norm, Scheme | None, Scheme | None, list[str]]:
    """Both norms without a graph's weight of ones and bias of zeros where the other has none."""
    graph, other = (a, b) if a_infers else (b, a)
    theirs = {one.role for one in other.parameters}
    if other.affine_shape and not other.parameters:
        return a, b, one, two, []
    units = {"weight": 1.0, "bias": 0.0}
    gone = [
        p.role for p in graph.parameters
        if p.role in units and p.role not in theirs and p.smallest == p.largest == units[p.role]
    ]  # fmt: skip
    if not gone:
        return a, b, one, two, []
    left = tuple(p for p in graph.parameters if p.role not in gone)
    plain = not {p.role for p in left} & set(units)
    graph = replace(graph, parameters=left, affine_shape=() if plain else graph.affine_shape)
    scheme = one if a_infers else two
    if plain and scheme is not None:
        scheme = scheme.replace(affine="")
    values = " and a ".join(f"{role} of {units[role]:.0f}" for role in gone)
    note = f"The graph has a {values}, which its operator wants."
    if a_infers:
        return graph, b, scheme, two, [note]
    return a, graph, one, scheme, [note]


def _comparable(
    a: Norm, one: Scheme, b: Norm, two: Scheme, a_infers: bool, b_infers: bool
) -> tuple[Scheme, Scheme, list[str]]:
    """Both schemes without what one of the audits cannot know."""
    notes = []
    for name, norm in (("a", a), ("b", b)):
        if norm.eps_undetermined:
            notes.append(f"The eps of {name} is not determined by its input, and not compared.")
            if name == "a":
                one = one.replace(eps=two.eps, eps_placement=two.eps_placement)
            else:
                two = two.replace(eps=one.eps, eps_placement=one.eps_placement)
    running = one.statistics == two.statistics == "running"
    update = {"momentum": one.momentum, "running_correction": one.running_correction}
    if running and (a_infers or b_infers) and two.replace(**update) != two:
        notes.append(
            "How training would update running statistics is not compared: a graph infers."
        )
        two = two.replace(**update)
    return one, two, notes


def _folded(one: Scheme, two: Scheme, values: Part) -> bool:
    """Whether what is multiplied is the same though the weights are stored around 0 and 1."""
    return one.weight_offset != two.weight_offset and values.verdict == "equal"


def _meanings(a: Norm, one: Scheme, b: Norm, two: Scheme) -> tuple[tuple[Part, ...], list[str]]:
    """The four parts of :func:`axisnorm.compare`, at a shape that both norms take."""
    if a.shape is None and b.shape is None:
        if one == two:
            said = (f"Both declare '{one}'.",)
            return tuple(Part(name, "equal", said) for name in PARTS[:4]), []
        said = (f"Neither ran; they declare '{one}' against '{two}'.",)
        return tuple(Part(name, "different", said) for name in PARTS[:1]) + tuple(
            Part(name, "unknown", said) for name in PARTS[1:4]
        ), []
    dtypes = [dtype for dtype in DTYPES if dtype in (a.dtype, b.dtype)] or list(DTYPES)
    notes = []
    found = None
    order = _channels_moved(a.shape, b.shape)
    if order is not None:
        moved = _moved(two, order)
        found = _at(a, one, b, moved, a.shape)
        if found:
            notes.append("a has its channels in axis 1 and b in the last; b is read with them "
                         "moved.")  # fmt: skip
    ends = [_from_the_end(one, a.shape), _from_the_end(two, b.shape)]
    for first, second in ((one, two), (ends[0], ends[1])):
        for shape in (a.shape, b.shape):
            found = found or _at(a, first, b, second, shape)
    if found is None:
        sentence = f"'{one}' on {a.shape} and '{two}' on {b.shape} do not take one another's input."
        return tuple(Part(name, "unknown", (sentence,)) for name in PARTS[:4]), notes
    parts = compared(*found, dtypes)
    elsewhere = compared(*found)
    if parts[2].verdict == "equal" and elsewhere[2].verdict == "different":
        hidden = " ".join(elsewhere[2].sentences)
        notes.append(f"Without effect in {' and '.join(dtypes)}: {hidden}")
    moved_note = moved_channels(*found)
    return parts, notes + ([moved_note] if moved_note else [])


def _at(
    a: Norm, one: Scheme, b: Norm, two: Scheme, shape: tuple[int, ...] | None
) -> tuple[Meaning, Meaning] | None:
    """Both as they are at a shape, None if one does not take it."""
    if shape is None:
        return None
    try:
        return (
            Meaning.of(_subject(a, one), shape),
            Meaning.of(_subject(b, two), shape),
        )
    except ArgumentError:
        return None


def _subject(norm: Norm, scheme: Scheme) -> Subject:
    known = bool(norm.parameters) or not norm.affine_shape
    roles = frozenset(one.role for one in norm.parameters) & {"weight", "bias"}
    return Subject(str(scheme), scheme, parameters=roles if known else None)


def _channels_moved(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The axes of b in a's order, where b is a with its channels moved to the end or from there."""
    if a is None or b is None or len(a) != len(b) or len(a) < 3 or a[1:] == b[1:]:
        return None
    ndim = len(a)
    for order in ((0, ndim - 1, *range(1, ndim - 1)), (0, *range(2, ndim), 1)):
        if tuple(b[i] for i in order[1:]) == a[1:]:
            return order
    return None


def _moved(scheme: Scheme, order: Sequence[int]) -> Scheme:
    """The same norm of a tensor whose axes stand in another order."""
    axes = scheme.layout(len(order)).axes
    moved = [axes[i] for i in order]
    names = [part.name for axis in moved for part in axis]
    affine = sorted(scheme.affine.split(), key=names.index)
    return scheme.replace(axes=_written(moved), affine=" ".join(affine))


def _from_the_end(scheme: Scheme, shape: tuple[int, ...] | None) -> Scheme:
    """The same norm of tensors with any number of axes before those that it names a use of."""
    if shape is None:
        return scheme
    axes = scheme.layout(len(shape)).axes
    affine = scheme.affine.split()
    used = [any(part.reduced or part.name in affine for part in axis) for axis in axes]
    first = used.index(True)
    return scheme.replace(axes=f"... {_written(axes[first:])}") if first else scheme


def _written(axes: Sequence[Axis]) -> str:
    """Axes in the notation, each with a name of its own."""
    said = []
    for place, axis in enumerate(axes):
        parts = []
        for part in axis:
            text = f"any{place}" if part.ellipsis else str(part)
            parts.append(f"[{text}]" if part.reduced else text)
        said.append(f"({' '.join(parts)})" if len(axis) > 1 or axis[0].size else parts[0])
    return " ".join(said)


# --------------------------------------------------------------------------------------------
# Parameters and their values


def _shapes(a: Norm, b: Norm) -> Part:
    one, two = ({p.role: p.shape for p in norm.parameters} or {"weight": norm.affine_shape}
                for norm in (a, b))  # fmt: skip
    sentences = [
        f"{role}: shape {one[role]} against {two[role]}."
        for role in ROLES
        if role in one and role in two and _long(one[role]) != _long(two[role])
    ]
    if sentences:
        return Part("parameters", "different", tuple(sentences))
    shape = a.affine_shape or b.affine_shape
    said = f"Parameters of shape {shape}." if shape else "No parameters."
    return Part("parameters", "equal", (said,))


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the axes of size 1, which only place a parameter beside the input."""
    return tuple(size for size in shape if size != 1)


def _values(a: Norm, one: Scheme | None, b: Norm, two: Scheme | None) -> tuple[Part, float | None]:
    """What is multiplied and added, so that a weight around 0 is compared as 1 + weight."""
    for name, norm in (("a", a), ("b", b)):
        if norm.affine_shape and not norm.parameters:
            said = f"The values of {name} are not known."
            return Part("values", "unknown", (said,)), None
    step = (one.weight_offset if one else 0.0) - (two.weight_offset if two else 0.0)
    theirs = {parameter.role: parameter for parameter in b.parameters}
    sentences: dict[str, list[str]] = {"equal": [], "different": [], "unknown": []}
    largest: float | None = 0.0
    for mine in a.parameters:
        other = theirs.get(mine.role)
        if other is None or _long(mine.shape) != _long(other.shape):
            continue
        verdict, said, off = _apart(mine, other, step if mine.role == "weight" else 0.0)
        sentences[verdict].append(said)
        largest = None if largest is None or off is None else max(largest, off)
    for verdict in ("different", "unknown", "equal"):
        if sentences[verdict]:
            return Part("values", verdict, tuple(sentences[verdict])), largest
    said = "There are no values to compare."
    return Part("values", "equal", (said,)), None


def _apart(a: Parameter, b: Parameter, step: float) -> tuple[str, str, float | None]:
    """The verdict, the sentence, and the largest difference where it is known."""
    if a.digest == b.digest and not step:
        return "equal", f"{a.role}: the same values.", 0.0
    unit = max(ROUNDING.get(one.dtype, 0.0) for one in (a, b))
    size = max(abs(value) for one in (a, b) for value in (one.smallest, one.largest)) + abs(step)
    if a.values is None or b.values is None:
        off = max(abs(x + step - y) for x, y in ((a.smallest, b.smallest), (a.largest, b.largest),
                                                 (a.mean, b.mean)))  # fmt: skip
        if off <= unit * size:
            said = "too large to be kept, and alike in least, largest and mean."
            return "unknown", f"{a.role}: {said}", None
        said = f"apart by {off:.2g} or more, by their least, largest and mean."
        return "different", f"{a.role}: {said}", None
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.values.ravel() + step - b.values.ravel())
    off = float(np.nan_to_num(apart, nan=np.inf).max())
    # Half types lose small numbers altogether; 2**-24 is the least that float16 has.
    if off <= unit * size + 2.0**-24 * (unit > ROUNDING["float32"]):
        kind = next(one.dtype for one in (a, b) if ROUNDING.get(one.dtype) == unit)
        return (
            "equal",
            f"{a.role}: at most {off:.2g} apart, which rounding to {kind} explains.",
            off,
        )
    return "different", f"{a.role}: the largest difference of values is {off:.2g}.", off


def _dtype(a: Norm, b: Norm) -> Part:
    if a.dtype is None or b.dtype is None:
        return Part("dtype", "unknown", ("One of them did not run.",))
    if a.dtype != b.dtype:
        return Part("dtype", "different", (f"Inputs of {a.dtype} against {b.dtype}.",))
    return Part("dtype", "equal", (f"Inputs of {a.dtype}.",))
