"""What two normalizations have in common at one shape, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import reference
from ..scheme import ArgumentError, Scheme
from .explain import (
    Explanation,
    Partition,
    double,
    explained,
    finite_double,
    input_said,
    statistics_dimensions,
)
from .family import Family, family_of, reasons, refines
from .half_types import HALF_TYPES, rounded
from .meaning import Meaning, alike, same_parameters
from .naming import affine_axes, in_words, kind_of_mean
from .result import Result
from .subject import is_shape, read_shape, read_subject, sized
from .witness import Agreement, Example, agreements_of, smallest_example

if TYPE_CHECKING:
    import argparse

__all__ = ["DTYPES", "Comparison", "Part", "compare", "compared"]

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Part:
    """One part of the comparison: its verdict, and what is equal or differs in sentences."""

    name: str
    """``"statistics"``, ``"affine"``, ``"constants"`` or ``"running"``."""
    verdict: str
    """``"equal"`` or ``"different"``."""
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"verdict": self.verdict, "sentences": list(self.sentences)}


@dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Two normalizations at one shape, part by part.

    Sentences call the two *a* and *b*, and say a's number first: "6 means of 4 elements against
    2 means of 12".
    """

    kind: ClassVar[str] = "comparison"

    a: Explanation
    b: Explanation
    parts: tuple[Part, ...]
    """Statistics, affine, constants and running, in this order."""
    notes: tuple[str, ...]
    """What differs without effect at this shape, and why what is equal here is not elsewhere."""
    same_in: tuple[str, ...]
    """The types in which both give the same output for every input at this shape."""
    agreements: tuple[Agreement, ...]
    """On which inputs they agree although they differ, each tried out."""
    example: Example | None
    """The smallest tensor of this rank that tells them apart; None if there is none."""
    family: Family
    """Which of the named norms is a special case of which at this shape."""
    largest_difference: float | None = None
    """Between both outputs on the tensor that was given for a shape, in float64 and with the
    weights that modules have; None without a tensor, or without the running statistics it needs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The input's shape."""
        return self.a.shape

    @property
    def statistics(self) -> str:
        """Whether the same elements share a mean, and the same is made of them."""
        return self.parts[0].verdict

    @property
    def affine(self) -> str:
        """Whether weight and bias vary along the same elements."""
        return self.parts[1].verdict

    @property
    def constants(self) -> str:
        """Whether eps, its place, the divisor, the weight's offset and the rounding are equal."""
        return self.parts[2].verdict

    @property
    def running(self) -> str:
        """Whether statistics come from the same source, in training and in evaluation."""
        return self.parts[3].verdict

    @property
    def same(self) -> bool:
        """Whether nothing differs at this shape."""
        return all(part.verdict == "equal" for part in self.parts)

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs, in sentences."""
        return self._sentences("different")

    @property
    def equalities(self) -> tuple[str, ...]:
        """What is equal, in sentences."""
        return self._sentences("equal")

    def _sentences(self, verdict: str) -> tuple[str, ...]:
        return tuple(s for part in self.parts if part.verdict == verdict for s in part.sentences)

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            "shape": list(self.shape),
            "a": _side_data(self.a),
            "b": _side_data(self.b),
            "same": self.same,
            "same_in": list(self.same_in),
            **{part.name: part.verdict for part in self.parts},
            "differences": list(self.differences),
            "equalities": list(self.equalities),
            "notes": list(self.notes),
            "agreements": [agreement.to_dict() for agreement in self.agreements],
            "example": self.example.to_dict() if self.example else None,
            "largest_difference": self.largest_difference,
            "family": self.family.to_dict(),
        }

    def __repr__(self) -> str:
        said = ", ".join(f"{part.name} {part.verdict}" for part in self.parts)
        return f"Comparison({self.a.subject} with {self.b.subject} on {self.shape}: {said})"


def _side_data(side: Explanation) -> dict[str, Any]:
    return {
        "subject": side.subject,
        "scheme": str(side.scheme),
        "num_groups": side.num_groups,
        "group_size": side.group_size,
        "statistics_shape": list(side.statistics_shape),
        "affine_shape": list(side.affine_shape),
    }


def compare(a: Any, b: Any, shape: Any) -> Comparison:
    """Say in which parts two normalizations are equal at a shape and in which they differ.

    They are the same if all four parts are equal: the statistics (which elements share a mean,
    and what is made of them), the affine (along which elements weight and bias vary), the
    constants (divisor, eps and its place, weight offset, rounding) and running statistics. Names
    of axes mean nothing, and neither do the values of a module's parameters.

    Args:
        a: a :class:`~axisnorm.Scheme`, its text, a preset's name, a constructor's call as text
            (``"GroupNorm(2, 4)"``), a norm module (in its train or eval mode) or a norm's class
            of ``torch.nn`` or ``axisnorm.nn``, or one of their functions
            (:func:`functools.partial` gives it arguments).
        b: as a.
        shape: of the input of both, or an input: then both are computed on it too.

    Raises:
        ArgumentError: one of them is no normalization, or does not fit the shape; the input
            holds NaN or infinity.
        DtypeError: the input holds no real numbers.

    >>> found = compare("... [d]", "b [s d]", (2, 3, 4))
    >>> found.differences[0]
    '6 means of 4 elements against 2 means of 12: one mean a token against one mean a sample.'
    >>> found.example.x.tolist(), found.example.y_a.round(2).tolist()
    ([[[0.0, 1.0], [2.0, 3.0]]], [[[-1.0, 1.0], [-1.0, 1.0]]])
    >>> compare("... [d]; affine=d", "batch step [feature]; affine=feature", (2, 3, 4)).same
    True
    """
    sizes = read_shape(shape)
    one, two = (Meaning.of(read_subject(s, sizes, "compare"), sizes) for s in (a, b))
    parts = compared(one, two)
    ndim = len(sizes)
    return Comparison(
        explained(one.subject, sizes),
        explained(two.subject, sizes),
        parts,
        tuple(_notes(one, two)),
        tuple(dtype for dtype in DTYPES if alike(one, two, dtype)),
        () if moved_channels(one, two) else tuple(agreements_of(one.subject, two.subject, ndim)),
        smallest_example(one.subject, two.subject, ndim),
        family_of(one.scheme, two.scheme, sizes),
        None if is_shape(shape) else _difference_on(one, two, shape),
    )


def compared(a: Meaning, b: Meaning, dtypes: Sequence[str] = DTYPES) -> tuple[Part, ...]:
    """Statistics, affine, constants and running of two meanings at one shape, in this order.

    ``dtypes``: constants that show in none of these types of input count as equal.
    """
    return _statistics(a, b), _affine(a, b), _constants(a, b, dtypes), _running(a, b)


def _difference_on(a: Meaning, b: Meaning, tensor: Any) -> float | None:
    x = finite_double(tensor)
    x = x if x.ndim else x.reshape(1)
    outputs = []
    for meaning in (a, b):
        subject = meaning.subject
        if meaning.running and len(subject.running) < 2:
            return None
        if meaning.running:
            meaning.sizes.check_running(*(tuple(v.shape) for v in subject.running.values()))
        stored: dict[str, Any] = {n: double(value) for n, value in subject.running.items()}
        weight, bias = double(subject.weight), double(subject.bias)
        scheme = meaning.scheme.replace(rounding="once")
        with np.errstate(all="ignore"):
            outputs.append(reference.forward(x, scheme, weight, bias, **stored)[0])
    return float(np.abs(outputs[0] - outputs[1]).max()) if x.size else 0.0


def _part(name: str, equal: Sequence[str], different: Sequence[str]) -> Part:
    return Part(name, "different", tuple(different)) if different else Part(
        name, "equal", tuple(equal)
    )  # fmt: skip


# --------------------------------------------------------------------------------------------
# Statistics: which elements share what


def _statistics(a: Meaning, b: Meaning) -> Part:
    different = []
    if a.shared != b.shared:
        counts = f"{_groups(a)} {_elements(a)} against {_groups(b)}"
        words = [in_words(meaning.scheme, meaning.sizes.shape) for meaning in (a, b)]
        if words[0] == words[1]:
            words = [_shared_along(meaning) for meaning in (a, b)]
        different.append(f"{counts}: {words[0]} against {words[1]}.")
        different.append(_nesting(a, b))
    if (a.scheme.center, _spread(a, b)) != (b.scheme.center, _spread(b, a)):
        said = f"a {_divides(a)}, b {_divides(b)}."
        if a.shared == b.shared and {a.spread, b.spread} == {"rms", "l2"}:
            n = a.group_size
            ratio = n**-0.5 if a.spread == "l2" else n**0.5
            said += f" The outputs are in the ratio {_root(ratio**2)}, the group holding {n}."
        different.append(said)
    # Of two names for the same sets the plainer: a sample, not a sample and its only group.
    plainer = min((in_words(m.scheme, m.sizes.shape) for m in (a, b)), key=len)
    return _part("statistics", [f"Both take {_groups(a)} {_elements(a)}: {plainer}."], different)


def _spread(meaning: Meaning, other: Meaning) -> str:
    """What divides; the source of running statistics is another part's business."""
    return "" if meaning.running or other.running else meaning.spread


def _groups(meaning: Meaning) -> str:
    """As in ``"6 means of 4"``."""
    count = math.prod(meaning.sizes.expanded[i] for i in statistics_dimensions(meaning.sizes))
    kind = kind_of_mean(meaning.scheme)
    kind = f"running {kind}" if meaning.running else kind
    return f"{count:,} {kind}{'' if count == 1 else 's'} of {meaning.group_size:,}"


def _elements(meaning: Meaning) -> str:
    return "element" if meaning.group_size == 1 else "elements"


def _shared_along(meaning: Meaning) -> str:
    """Along which axes elements share, as in ``"along axes 1 in part, 2 and 3"``."""
    axes = []
    for axis, factors in enumerate(meaning.shared):
        if any(not told for _, told in factors):
            part = " in part" if any(told for _, told in factors) else ""
            axes.append(f"{axis}{part}")
    if not axes:
        return "along no axis"
    return f"along {'axis' if len(axes) == 1 else 'axes'} {_listed(axes)}"


def _nesting(a: Meaning, b: Meaning) -> str:
    for fine, coarse, names in ((a, b, ("a", "b")), (b, a, ("b", "a"))):
        if refines(fine.shared, coarse.shared) and fine.group_size:
            holds = coarse.group_size // fine.group_size
            return f"Each group of {names[1]} is made of {holds:,} groups of {names[0]}."
    return "No group of one lies inside a group of the other."


def _divides(meaning: Meaning) -> str:
    scheme = meaning.scheme
    kind = "running " if meaning.running else ""
    if scheme.center:
        length = "length of what is left" if meaning.spread == "l2" else f"{kind}deviation"
        return f"subtracts the {kind}mean and divides by the {length}"
    if scheme.scale == "std":
        return f"divides by the {kind}deviation and subtracts nothing"
    if meaning.spread == "l2":
        return "divides by the length, the root of the sum of squares, and subtracts nothing"
    return f"divides by the {kind}root mean square and subtracts nothing"


def _root(square: float) -> str:
    """A square root with its number, as in ``"sqrt(3/4) = 0.8660"``."""
    fraction = Fraction(square).limit_denominator(1 << 24)
    exact = math.isclose(float(fraction), square, rel_tol=1e-12)
    said = f"sqrt({fraction}) = " if exact and fraction.denominator < 1 << 20 else ""
    return f"{said}{math.sqrt(square):.4g}"


# --------------------------------------------------------------------------------------------
# Affine: which elements share a weight


def _affine(a: Meaning, b: Meaning) -> Part:
    if not a.has_affine and not b.has_affine:
        return Part("affine", "equal", ("Neither has weight and bias.",))
    if a.varying != b.varying:
        different = [f"Weight and bias: {_varies(a)} against {_varies(b)}."]
        if a.varying is not None and b.varying is not None:
            if refines(a.varying, b.varying):
                different.append(_repeated("a", "b", a.varying, b.varying))
            elif refines(b.varying, a.varying):
                different.append(_repeated("b", "a", a.varying, b.varying))
            else:
                different.append("Neither can stand in for the other.")
        return Part("affine", "different", tuple(different))
    if not same_parameters(a, b):
        there = [[n for n in ("weight", "bias") if meaning.has(n)] for meaning in (a, b)]
        one, two = (" and ".join(n) if len(n) > 1 else f"{n[0]} alone" for n in there)
        sentence = f"{one.capitalize()} against {two}, of {_varies(a)}."
        return Part("affine", "different", (sentence,))
    there = [_parameters(meaning) for meaning in (a, b)]
    common = [name for name in there[0] if name in there[1]]
    who = "Weight and bias vary" if len(common) > 1 else f"The {common[0]} varies"
    said = [f"{who} alike: {_varies(a)}"]
    if a.sizes.affine_shape != b.sizes.affine_shape:
        said[0] += f", stored in shape {b.sizes.affine_shape} by b"
    for name, own, others in (("a", *there), ("b", *reversed(there))):
        if len(own) < len(others):
            said.append(f"{name}, which subtracts no mean, is not used with a bias")
    return Part("affine", "equal", tuple(f"{one}." for one in said))


def _parameters(meaning: Meaning) -> list[str]:
    """Which of weight and bias there are; where that is open, those that such norms have."""
    open_ = meaning.subject.parameters is None
    usual = ("weight", "bias") if meaning.scheme.center or not open_ else ("weight",)
    return [name for name in usual if meaning.has(name)]


def _repeated(finer: str, coarser: str, one: Partition, two: Partition) -> str:
    axes = [str(i) for i, (f, c) in enumerate(zip(one, two, strict=True)) if f != c]
    where = f"{'axis' if len(axes) == 1 else 'axes'} {_listed(axes)}"
    return (
        f"Any weight of {coarser} is one of {finer} that repeats along {where}; "
        "the reverse does not hold."
    )


def _varies(meaning: Meaning) -> str:
    if not meaning.has_affine:
        return "none"
    return f"shape {meaning.sizes.affine_shape} {_along(meaning)}"


def _along(meaning: Meaning) -> str:
    axes = affine_axes(meaning.sizes)
    if not axes:
        return "along no axis"
    return f"along {'axis' if len(axes) == 1 else 'axes'} {_listed([str(i) for i in axes])}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]


# --------------------------------------------------------------------------------------------
# Constants


def _constants(a: Meaning, b: Meaning, dtypes: Sequence[str]) -> Part:
    # Where only one of them gives the bias, its constants are compared as for other groups.
    full = not (a.gives_the_bias and b.gives_the_bias)
    found = [[m.constants(dtype, all_of_them=full) for m in (a, b)] for dtype in dtypes]

    def differs(name: str) -> bool:
        return any(one[name] != two[name] for one, two in found)

    different = []
    if differs("correction") and not a.running and not b.running:
        different.append(_corrections(a, b))
    if differs("eps"):
        different.append(f"eps: {_eps(a)} against {_eps(b)}.")
    if differs("eps_placement"):
        one, two = (_PLACES[m.scheme.eps_placement] for m in (a, b))
        different.append(f"eps in a {one}, in b it {two}.")
    if differs("formula"):
        one, two = (_FORMULAS[m.formula] for m in (a, b))
        different.append(f"What divides: {one} against {two}.")
    if any(map(differs, ("eps", "eps_placement", "formula"))) and "l2" not in (a.spread, b.spread):
        different[-1] += f" {_effect(a, b)}"
    if differs("weight_offset"):
        one, two = (_offset(m) for m in (a, b))
        step = a.scheme.weight_offset - b.scheme.weight_offset
        move = f"plus {step:g}" if step > 0 else f"minus {-step:g}"
        different.append(
            f"The normalized value is multiplied by {one} against {two}: "
            f"the weight of b is that of a {move}."
        )
    if differs("rounding"):
        different.append(_roundings(a, b))
    return _part("constants", [_same_constants(a, b, full)], different)


def _corrections(a: Meaning, b: Meaning) -> str:
    one, two = (_divisor(m) for m in (a, b))
    said = f"The variance is a sum divided by {one} against {two}."
    free = [m.group_size - m.scheme.correction for m in (a, b)]
    if a.shared != b.shared or min(free) <= 0 or a.formula != "root" or b.formula != "root":
        return said
    # V is S / (n - correction), and the output has its root below.
    ratio = _root(free[0] / free[1])
    return f"{said} The outputs are in the ratio {ratio}, as far as eps does not matter."


def _divisor(meaning: Meaning) -> str:
    correction, n = meaning.scheme.correction, meaning.group_size
    if not correction:
        return f"n = {n:,}"
    sign = "-" if correction > 0 else "+"
    return f"n {sign} {abs(correction):g} = {n - correction:,g}"


def _eps(meaning: Meaning) -> str:
    if meaning.scheme.eps is None:
        return "the machine epsilon of the compute type (1.19e-07 in float32)"
    return f"{meaning.scheme.eps:g}"


_PLACES = {
    "variance": "stands inside the root",
    "std": "stands outside the root, added to what divides",
    "max": "is the least that divides",
}
_FORMULAS = {
    "root": "the root of the variance",
    "var": "the variance without its root",
    "sqrt_std": "the root of the deviation",
}


def _effect(a: Meaning, b: Meaning) -> str:
    """How far the outputs are apart, at a usual variance and where eps matters most."""
    one = a.scheme
    two = one.replace(eps=b.scheme.eps, eps_placement=b.scheme.eps_placement, scale=b.scheme.scale)
    eps = max(abs(reference.resolve_eps(scheme, "float32")) for scheme in (one, two))
    outside = {one.eps_placement, two.eps_placement} - {"variance"}
    small = (eps / 2) ** 2 if outside else eps
    kind = "variance" if a.spread != "rms" else "mean square"
    ratios = [(place, _ratio(one, two, place)) for place in (1.0, small) if place]
    if all(ratio == 1 for _, ratio in ratios):
        return "In float32 and half types that is the same number."
    said = [f"{_apart(ratio)} at {kind} {place:.0g}" for place, ratio in ratios]
    return f"That makes the output of b {' and '.join(said)}."


def _apart(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "infinitely larger"
    if ratio > 2 or 0 < ratio < 0.5:
        return f"{max(ratio, 1 / ratio):.3g} times {'larger' if ratio > 1 else 'smaller'}"
    return f"{_percent(abs(ratio - 1))} {'larger' if ratio >= 1 else 'smaller'}"


def _ratio(one: Scheme, two: Scheme, variance: float) -> float:
    rates = [_rate(scheme, variance) for scheme in (one, two)]
    return rates[1] / rates[0] if all(map(math.isfinite, rates)) and rates[0] else math.inf


def _rate(scheme: Scheme, variance: float) -> float:
    """What the centred value is multiplied by."""
    h, a = reference.exponents(scheme)
    eps, base = reference.resolve_eps(scheme, "float32"), variance**h
    inner = max(base, eps) if scheme.eps_placement == "max" else base + eps
    return inner**a if inner > 0 else math.inf


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def _offset(meaning: Meaning) -> str:
    offset = meaning.scheme.weight_offset
    return "weight" if not offset else f"({offset:g} + weight)"


def _roundings(a: Meaning, b: Meaning) -> str:
    one, two = (
        "also before weight and bias"
        if m.scheme.rounding == "before_affine"
        else "once, at the end"
        for m in (a, b)
    )
    shares = [
        f"{_percent(_rounded_apart(dtype))} of the outputs in {dtype}" for dtype in HALF_TYPES
    ]
    return (
        f"Rounding to the type of the input: {one}, against {two}. That makes no difference in "
        f"float32 and float64; with normal data it moves {' and '.join(shares)}."
    )


@lru_cache(maxsize=2)
def _rounded_apart(dtype: str) -> float:
    """The share of outputs that the order of roundings changes, for normal data and weights."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal(1 << 16)
    weight = rounded(generator.uniform(0.5, 1.5, x.size), dtype)
    once = rounded(x * weight, dtype)
    return float(np.mean(once != rounded(rounded(x, dtype) * weight, dtype)))


def _same_constants(meaning: Meaning, other: Meaning, full: bool) -> str:
    if not full:
        return "No constant matters: a group of one element gives the bias."
    scheme = meaning.scheme
    place = _PLACES[scheme.eps_placement].removeprefix("stands ")
    said = [f"eps {_eps(meaning)}{' which' * place.startswith('is ')} {place}"]
    if not meaning.running and meaning.spread != "l2":
        alone = meaning.group_size == other.group_size
        said.append(f"divisor {_divisor(meaning) if alone else _less(scheme.correction)}")
    if meaning.has_affine:
        said.append(f"times {_offset(meaning)}")
        if scheme.rounding == "before_affine":
            said.append("rounded also before weight and bias")
    return f"The same constants: {', '.join(said)}."


# --------------------------------------------------------------------------------------------
# Running statistics, training and evaluation


def _running(a: Meaning, b: Meaning) -> Part:
    different = []
    keeps = a.keeps_running, b.keeps_running
    if a.running != b.running:
        one, two = (
            "the running statistics (evaluation)" if m.running else
            f"the statistics of this batch ({'training' if m.keeps_running else 'always'})"
            for m in (a, b)
        )  # fmt: skip
        different.append(f"a normalizes with {one}, b with {two}.")
        different += _gap(a, b)
    elif None not in keeps and keeps[0] != keeps[1]:
        name, other = ("a", "b") if keeps[0] else ("b", "a")
        different.append(
            f"{name} keeps running statistics and normalizes with them in evaluation; {other} "
            f"{_alone(b if keeps[0] else a)}."
        )
    if all(keeps):
        different += _updates(a, b)
    return _part("running", [_same_running(a, b)], different)


def _alone(meaning: Meaning) -> str:
    if meaning.mixes_samples:
        return "keeps none, and uses the statistics of the batch in evaluation too"
    return "keeps none and computes the same in training and in evaluation"


def _gap(a: Meaning, b: Meaning) -> Iterator[str]:
    """How far what was stored is from what training divides by, even for one and the same data."""
    evaluating, training = (a, b) if a.running else (b, a)
    correction = evaluating.scheme.running_correction - training.scheme.correction
    n = training.sizes.group_size
    if correction and n > evaluating.scheme.running_correction:
        stored = n - evaluating.scheme.running_correction
        yield (
            f"running_var is stored with the divisor {_less(evaluating.scheme.running_correction)} "
            f"and training divides by {_less(training.scheme.correction)}: at n = {n:,} "
            f"evaluation divides by {_root((n - training.scheme.correction) / stored)} times the "
            "deviation, once the averages have settled."
        )


def _less(correction: float) -> str:
    return f"n - {correction:g}" if correction else "n"


def _updates(a: Meaning, b: Meaning) -> Iterator[str]:
    one, two = a.scheme, b.scheme
    if one.momentum != two.momentum:
        yield (
            f"A new batch counts {_momentum(one)} against {_momentum(two)} in the running "
            f"statistics{_old_momentum(one, two)}."
        )
    if one.running_correction != two.running_correction:
        n = a.sizes.group_size
        said = (
            f"The stored variance has the divisor {_less(one.running_correction)} against "
            f"{_less(two.running_correction)}"
        )
        free = [n - s.running_correction for s in (one, two)]
        if a.sizes.group_size == b.sizes.group_size and min(free) > 0:
            said += f": at n = {n:,}, a stores {free[1] / free[0]:.6g} times the variance of b"
        yield f"{said}."


def _momentum(scheme: Scheme) -> str:
    return "as much as every other" if scheme.momentum is None else f"{scheme.momentum:g}"


def _old_momentum(one: Scheme, two: Scheme) -> str:
    if one.momentum is None or two.momentum is None:
        return ""
    old = f"{1 - one.momentum:g} and {1 - two.momentum:g}"
    return f" ({old} where momentum is the weight of the old value)"


def _same_running(a: Meaning, b: Meaning) -> str:
    if a.running:
        return "Both normalize with running statistics, updated alike."
    if a.keeps_running and b.keeps_running:
        return (
            "Both normalize with the statistics of the batch in training and with running "
            "statistics in evaluation, updated alike."
        )
    if None in (a.keeps_running, b.keeps_running):
        return "Both normalize with the statistics of this batch."
    if a.mixes_samples or b.mixes_samples:
        return "Neither keeps running statistics: evaluation uses the batch's too."
    return "Neither keeps running statistics: training and evaluation are the same."


# --------------------------------------------------------------------------------------------
# Notes


def _notes(a: Meaning, b: Meaning) -> Iterator[str]:
    one, two, shape = a.scheme, b.scheme, a.sizes.shape
    if a.shared == b.shared:
        why = reasons(one, two, shape)
        if why:
            yield f"The statistics are equal here because {why}; on other sizes they differ."
    if a.varying is not None and a.varying == b.varying:
        why = reasons(one, two, shape, affine=True)
        if why:
            yield f"Weight and bias vary alike here because {why}; on other sizes they do not."
    yield from _without_effect(a, b)
    moved = moved_channels(a, b)
    if moved:
        yield moved
    if all(alike(a, b, dtype) for dtype in DTYPES) and _running(a, b).verdict == "different":
        yield "Every output is the same: what differs is what training stores for evaluation."
    for name, meaning in (("a", a), ("b", b)):
        if meaning.keeps_running is None and meaning.mixes_samples:
            yield (
                f"{name} takes its statistics over several samples: outside training it needs "
                "running statistics, or its output depends on the rest of the batch."
            )
    single = [name for name, meaning in (("a", a), ("b", b)) if meaning.gives_the_bias]
    if single:
        yield f"Each group of {' and '.join(single)} holds one element: what is left is the bias."


def _without_effect(a: Meaning, b: Meaning) -> Iterator[str]:
    """Fields that differ in the notation and show in no output at this shape."""
    shown = [m.constants("float16") for m in (a, b)]
    wide = [m.constants("float64") for m in (a, b)]
    for name in ("correction", "eps", "eps_placement", "weight_offset", "rounding"):
        one, two = getattr(a.scheme, name), getattr(b.scheme, name)
        hidden = shown[0][name] == shown[1][name] and wide[0][name] == wide[1][name]
        if one != two and hidden and not (a.running and b.running and name == "correction"):
            values = [f"{v:g}" if isinstance(v, float) else str(v) for v in (one, two)]
            yield f"{name} is {values[0]} against {values[1]}, which has no effect here."


def moved_channels(a: Meaning, b: Meaning) -> str:
    """Whether the two are the same, one with channels first and one with channels last."""
    shape = a.sizes.shape
    if len(shape) < 3 or a.shared == b.shared:
        return ""
    for first, last, names in ((a, b, "ab"), (b, a, "ba")):
        order = (0, *range(2, len(shape)), 1)
        try:
            there = Meaning.of(last.subject, tuple(shape[i] for i in order))
        except ArgumentError:
            continue
        same = tuple(first.shared[i] for i in order) == there.shared
        affine = first.varying is None or tuple(first.varying[i] for i in order) == there.varying
        if same and affine and layout_matters(first, last):
            return (
                f"{names[0]} has its channels in axis 1 and {names[1]} in the last: each on its "
                "own layout, they share the same elements."
            )
    return ""


def layout_matters(first: Meaning, last: Meaning) -> bool:
    """Whether weights stand along axis 1 in the one and along the last axis in the other."""
    ndim = len(first.sizes.shape)
    return affine_axes(first.sizes) == (1,) and affine_axes(last.sizes) == (ndim - 1,)


# --------------------------------------------------------------------------------------------
# The command line


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm compare``."""
    parser.add_argument("a", help="'... [d]', 'GroupNorm(2, 4)' or a preset's name")
    parser.add_argument("b", help="what to compare it with, in the same words")
    parser.add_argument(
        "--shape",
        metavar="SHAPE|FILE[:KEY]",
        required=True,
        help="the input's shape, as in 2,3,4, or a file that holds an input (.npy, .npz, "
        ".safetensors, .pt): then both are computed on it too",
    )
    parser.add_argument(
        "--sizes", metavar="NAME=SIZE,...", help="sizes of named axes or their parts, as in g=2,c=4"
    )


def execute(options: argparse.Namespace) -> tuple[Comparison, int]:
    """Run ``axisnorm compare``: the result and the exit status."""
    a, b = sized((options.a, options.b), options.sizes)
    return compare(a, b, input_said(options.shape)), 0
