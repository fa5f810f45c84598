"""Which elements share a mean, which share a weight: one normalization on one shape, as data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import reference
from .._route import Route, choose
from ..scheme import ArgumentError, DtypeError, Scheme, Sizes
from .files import names_a_file, read
from .result import Result
from .subject import Subject, is_shape, read_shape, read_subject, shape_said, sized, with_article
from .worked import Worked, work_through

if TYPE_CHECKING:
    import argparse

__all__ = [
    "Equivalent",
    "Explanation",
    "Partition",
    "Worked",
    "axis_dimensions",
    "axis_names",
    "double",
    "explain",
    "explained",
    "finite_double",
    "group_number",
    "holds_no_numbers",
    "input_said",
    "named_norms",
    "not_finite",
    "part_names",
    "partition",
    "statistics_dimensions",
    "with_article",
]

LISTED_ELEMENTS = 4096
"""JSON lists arrays element by element up to this size, and says null above."""

Partition = tuple[tuple[tuple[int, bool], ...], ...]


@dataclass(frozen=True)
class Equivalent:
    """A named norm whose elements share means and variances exactly as the explained one's do."""

    name: str
    scheme: Scheme
    affine_shape: tuple[int, ...]
    differences: tuple[str, ...]
    """What still differs, in sentences. Empty: the two compute the same."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "scheme": str(self.scheme),
            "affine_shape": list(self.affine_shape),
            "same": self.same,
            "differences": list(self.differences),
        }


@dataclass(frozen=True, eq=False)
class Explanation(Result):
    """What one normalization computes on one shape.

    Elements that use the same statistic carry the same number in :attr:`group_index`. With a
    tensor, :attr:`mean`, :attr:`var` and :attr:`worked` hold its actual numbers.
    """

    kind: ClassVar[str] = "explanation"

    scheme: Scheme
    sizes: Sizes
    subject: str
    """What was asked about, in its own words: a notation, a preset, a constructor, a class."""
    route: Route
    equivalents: tuple[Equivalent, ...]
    mean: NDArray[np.float64] | None = None
    var: NDArray[np.float64] | None = None
    worked: Worked | None = None
    x: NDArray[np.float64] | None = None
    """The tensor that was given, in float64."""
    parameters: frozenset[str] | None = None
    """Which of weight and bias a module has; None where that is open, as in a notation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The input's shape."""
        return self.sizes.shape

    @property
    def affine_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias, ``()`` where there are none."""
        return self.sizes.affine_shape

    def has(self, parameter: str) -> bool:
        """Whether there is, or may be, a weight or a bias."""
        if self.parameters is None:
            # RMSNorm is not used with a bias.
            return bool(self.scheme.affine) and (parameter == "weight" or self.scheme.center)
        return parameter in self.parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Which of weight and bias there are, or may be."""
        return tuple(name for name in ("weight", "bias") if self.has(name))

    @property
    def statistics_dimensions(self) -> tuple[int, ...]:
        """The dimensions (split axes as several) along which the statistics used here vary."""
        return statistics_dimensions(self.sizes)

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of the mean and variance that are used."""
        return tuple(self.sizes.expanded[i] for i in self.statistics_dimensions)

    @property
    def num_groups(self) -> int:
        """How many means there are."""
        return math.prod(self.statistics_shape)

    @property
    def group_size(self) -> int:
        """How many elements share one mean."""
        kept = self.statistics_dimensions
        return math.prod(n for i, n in enumerate(self.sizes.expanded) if i not in kept)

    @cached_property
    def group_index(self) -> NDArray[np.int64]:
        """Which statistic each element uses, numbered row-major over the statistics' shape.

        >>> explain("... [d]", (2, 3)).group_index
        array([[0, 0, 0],
               [1, 1, 1]])
        """
        return _numbered(self.sizes, self.statistics_dimensions)

    @cached_property
    def affine_index(self) -> NDArray[np.int64]:
        """Which weight and bias each element uses, as :attr:`group_index` for the statistics."""
        return _numbered(self.sizes, self.sizes.layout.affine)

    @property
    def formula(self) -> str:
        """The formula with this shape's numbers, one equation a line."""
        return "\n".join(_formula(self))

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`. Arrays of more than 4096 elements are None."""
        small = math.prod(self.shape) <= LISTED_ELEMENTS
        moments = self.mean is not None and self.mean.size <= LISTED_ELEMENTS
        return {
            "subject": self.subject,
            "scheme": str(self.scheme),
            "shape": list(self.shape),
            "axes": [
                {"name": name, "size": size, "shares": shares, "affine": affine}
                for name, size, shares, affine in _axis_roles(self.sizes)
            ],
            "num_groups": self.num_groups,
            "group_size": self.group_size,
            "statistics_shape": list(self.statistics_shape),
            "affine_shape": list(self.affine_shape),
            "group_index": self.group_index.tolist() if small else None,
            "formula": self.formula.splitlines(),
            "equivalents": [equivalent.to_dict() for equivalent in self.equivalents],
            "route": {"engine": self.route.engine, "reason": self.route.reason},
            "mean": self.mean.tolist() if moments and self.mean is not None else None,
            "var": self.var.tolist() if moments and self.var is not None else None,
            "worked": self.worked.to_dict() if self.worked else None,
        }

    def __repr__(self) -> str:
        means = "mean" if self.num_groups == 1 else "means"
        elements = "element" if self.group_size == 1 else "elements"
        return (
            f"Explanation('{self.scheme}' on {self.shape}: {self.num_groups} {means} "
            f"of {self.group_size} {elements})"
        )


def explain(subject: Any, shape_or_tensor: Any) -> Explanation:
    """Say which elements share a mean, where weight and bias vary, and what computes the same.

    Args:
        subject: a :class:`~axisnorm.Scheme`, its text, a preset's name, a constructor's call as
            text (``"GroupNorm(2, 4)"``), a norm module or a norm's class of ``torch.nn`` or
            ``axisnorm.nn``, or one of their functions (:func:`functools.partial` gives it
            arguments).
        shape_or_tensor: the input's shape, or the input: then its own means and variances are
            computed and one group is worked through.

    Raises:
        ArgumentError: the subject is no normalization, or does not fit the shape; the input holds
            NaN, infinity or numbers whose squares overflow.
        DtypeError: the input holds no real numbers.

    >>> explanation = explain("... [d]", (2, 3, 4))
    >>> explanation.num_groups, explanation.group_size
    (6, 4)
    >>> [equivalent.name for equivalent in explanation.equivalents]
    ['LayerNorm(4)', 'InstanceNorm', 'GroupNorm(3)']
    """
    tensor = None if is_shape(shape_or_tensor) else shape_or_tensor
    shape = read_shape(shape_or_tensor)
    return explained(read_subject(subject, shape), shape, tensor)


def explained(subject: Subject, shape: tuple[int, ...], tensor: Any = None) -> Explanation:
    """:func:`explain` for what was read already."""
    scheme = subject.scheme
    sizes = scheme.sizes(shape)
    for name, value in (("weight", subject.weight), ("bias", subject.bias)):
        if value is not None:
            sizes.check_parameter(name, value.shape)
    dtype = "float32" if tensor is None else type_name(tensor)
    if not dtype.startswith(("float", "bfloat", "longdouble", "complex")):
        # Integers stand here for the numbers of an example; a norm does not take them.
        dtype = "float32"
    affine = None if subject.parameters is None else bool(subject.parameters)
    running = scheme.statistics == "running"
    explanation = Explanation(
        scheme,
        sizes,
        subject.name,
        choose(scheme, shape, dtype, affine=affine, running=running),
        tuple(_equivalents(scheme, sizes, bool(subject.keeps_running))),
        parameters=subject.parameters,
    )
    if tensor is None or math.prod(shape) == 0:
        return explanation
    return _with_numbers(explanation, tensor, subject)


# --------------------------------------------------------------------------------------------
# Partitions: which elements belong together


def statistics_dimensions(sizes: Sizes) -> tuple[int, ...]:
    """The dimensions, split axes as several, along which the statistics used vary."""
    # Running statistics are shared along axes that statistics of the batch are kept along:
    # InstanceNorm has one mean a sample and channel, but one running mean a channel.
    layout = sizes.layout
    return layout.running if layout.scheme.statistics == "running" else layout.kept


def _numbered(sizes: Sizes, dimensions: Sequence[int]) -> NDArray[np.int64]:
    shape = [n if i in dimensions else 1 for i, n in enumerate(sizes.expanded)]
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return np.ascontiguousarray(np.broadcast_to(numbers, sizes.expanded)).reshape(sizes.shape)


def group_number(sizes: Sizes, told: Sequence[int], index: Sequence[int]) -> int:
    """The group of one element, row-major over the dimensions that the partition tells apart."""
    number = 0
    for own, place in zip(axis_dimensions(sizes), index, strict=True):
        stride = math.prod(sizes.expanded[i] for i in own)
        for i in own:
            stride //= sizes.expanded[i]
            digit, place = divmod(place, stride)
            if i in told:
                number = number * sizes.expanded[i] + digit
    return number


def partition(sizes: Sizes, dimensions: Sequence[int]) -> Partition:
    """The normal form of a partition: two are the same sets of elements iff these are equal.

    For each axis its factors, outer first, each with whether the partition tells it apart.
    Factors of one element say nothing and are left out; neighbours of one kind are one factor.
    Within an axis the strides of the shared factors can be read off the set that holds element
    0, so different normal forms are different sets.
    """
    axes = []
    for own in axis_dimensions(sizes):
        factors: list[tuple[int, bool]] = []
        for dimension in own:
            size, told = sizes.expanded[dimension], dimension in dimensions
            if size == 1:
                continue
            if factors and factors[-1][1] == told:
                factors[-1] = (factors[-1][0] * size, told)
            else:
                factors.append((size, told))
        axes.append(tuple(factors))
    return tuple(axes)


def _axis_roles(sizes: Sizes) -> Iterator[tuple[str, int, str, bool]]:
    """For each axis of the tensor: its name, size, whether it shares a mean, and is affine."""
    told, affine = statistics_dimensions(sizes), sizes.layout.affine
    for own, size, name in zip(axis_dimensions(sizes), sizes.shape, axis_names(sizes), strict=True):
        shared = [i not in told for i in own]
        shares = "all" if all(shared) else "in part" if any(shared) else "no"
        yield name, size, shares, any(i in affine for i in own)


def axis_dimensions(sizes: Sizes) -> list[range]:
    """For each axis of the tensor its dimensions, split axes as several."""
    found = []
    dimension = 0
    for parts in sizes.layout.axes:
        found.append(range(dimension, dimension + len(parts)))
        dimension += len(parts)
    return found


def part_names(sizes: Sizes) -> tuple[str, ...]:
    """A short name for every part; the axes of '...' are called i, j, k, ..."""
    parts = sizes.layout.parts
    taken = {part.name for part in parts}
    letters = "ijklmopqrtuvxyz"
    words = itertools.chain(letters, (f"i{number}" for number in itertools.count(1)))
    free = (word for word in words if word not in taken)
    return tuple(next(free) if part.ellipsis else part.name for part in parts)


def axis_names(sizes: Sizes) -> tuple[str, ...]:
    """A name for every axis of the tensor; a split axis is called by its parts."""
    names = iter(part_names(sizes))
    return tuple(" ".join(next(names) for _ in axis) for axis in sizes.layout.axes)


# --------------------------------------------------------------------------------------------
# Named norms with the same statistics


def named_norms(shape: tuple[int, ...]) -> Iterator[tuple[str, Scheme]]:
    """The named norms that take a tensor of this shape."""
    ndim = len(shape)
    for count in range(1, ndim + 1):
        trailing = shape[ndim - count :]
        said = str(trailing[0]) if count == 1 else str(trailing)
        yield f"LayerNorm({said})", Scheme.layer_norm(ndim=count)
        yield f"RMSNorm({said})", Scheme.rms_norm(ndim=count)
    if ndim >= 3:
        yield "InstanceNorm", Scheme.instance_norm()
        yield "LayerNorm2d", Scheme.layer_norm_2d()
    if ndim >= 2:
        yield "BatchNorm", Scheme.batch_norm()
        yield "BatchNorm in eval", Scheme.batch_norm(statistics="running")
        for groups in _divisors(shape[1]):
            yield f"GroupNorm({groups})", Scheme.group_norm(groups)
        yield "BatchNorm, channels last", Scheme("[...] c", affine="c")
    if ndim >= 3:
        yield "InstanceNorm, channels last", Scheme("n [...] c", affine="c")
        for groups in _divisors(shape[-1]):
            scheme = Scheme(f"n [...] (g={groups} [c])", affine="g c")
            yield f"GroupNorm({groups}), channels last", scheme
    for axis in range(ndim):
        names = [f"[a{i}]" if i == axis else f"a{i}" for i in range(ndim)]
        l2 = Scheme(" ".join(names), center=False, scale="l2", eps=1e-12, eps_placement="max")
        yield f"functional.normalize(dim={axis})", l2


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _equivalents(scheme: Scheme, sizes: Sizes, keeps_running: bool) -> Iterator[Equivalent]:
    own = partition(sizes, statistics_dimensions(sizes))
    seen: set[Partition] = set()
    for name, named in named_norms(sizes.shape):
        if (named.center, named.scale == "l2") != (scheme.center, scheme.scale == "l2"):
            continue
        if named.statistics != scheme.statistics:
            continue
        other = named.sizes(sizes.shape)
        if partition(other, statistics_dimensions(other)) != own:
            continue
        affine = partition(other, other.layout.affine)
        if name.endswith("channels last") and affine in seen:
            continue
        seen.add(affine)
        differences = tuple(_differences(name, scheme, sizes, named, other, keeps_running))
        yield Equivalent(name, named, other.affine_shape, differences)


def _differences(
    name: str, scheme: Scheme, sizes: Sizes, named: Scheme, other: Sizes, keeps_running: bool
) -> Iterator[str]:
    if scheme.affine and partition(sizes, sizes.layout.affine) != partition(
        other, other.layout.affine
    ):
        if named.affine:
            there = f"{_shape_text(other.affine_shape)} along {_affine_axes(other)}"
        else:
            there = "none"
        own = f"{_shape_text(sizes.affine_shape)} along {_affine_axes(sizes)}"
        yield f"weight and bias: {there}, here {own}"
    if scheme.statistics == "batch" and name.startswith("BatchNorm") != keeps_running:
        yield (
            "keeps no running statistics; here they are used in eval mode"
            if keeps_running
            else "keeps running statistics, and uses them in eval mode"
        )
    # eps and momentum are arguments of the named norms; these are not.
    fields = ["correction", "scale", "eps_placement", "weight_offset", "rounding"]
    if keeps_running and name.startswith("BatchNorm"):
        fields.append("running_correction")
    for field in fields:
        here, there_value = getattr(scheme, field), getattr(named, field)
        if here != there_value:
            yield f"{field}: {_plain(there_value)}, here {_plain(here)}"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shape_text(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def _affine_axes(sizes: Sizes) -> str:
    axes = [i for i, role in enumerate(_axis_roles(sizes)) if role[3]]
    word = "axis" if len(axes) == 1 else "axes"
    return f"{word} {', '.join(map(str, axes))}"


# --------------------------------------------------------------------------------------------
# The formula


def _formula(explanation: Explanation) -> Iterator[str]:
    scheme, sizes = explanation.scheme, explanation.sizes
    names = part_names(sizes)
    told = explanation.statistics_dimensions
    n = explanation.group_size

    def at(symbol: str, dimensions: Sequence[int]) -> str:
        return f"{symbol}[{', '.join(names[i] for i in dimensions)}]" if dimensions else symbol

    mean, var = at("mean", told), at("var", told)
    over = ", ".join(names[i] for i in range(len(names)) if i not in told)
    over = f" over {over}" if over else ""
    eps = "eps" if scheme.eps is None else f"{scheme.eps:g}"
    center = scheme.center
    spread = var if center or scheme.scale == "std" else at("meansquare", told)
    root = {
        "l2": f"sqrt({at('sumsquare', told)}",
        "var": f"({var}",
        "sqrt_std": f"sqrt(sqrt({var})",
    }.get(scheme.scale, f"sqrt({spread}")
    plus = f"- {eps[1:]}" if eps.startswith("-") else f"+ {eps}"
    if scheme.eps_placement == "variance":
        below = f"{root} {plus})"
    elif scheme.eps_placement == "std":
        below = f"({root}) {plus})"
    else:
        below = f"max({root}), {eps})"
    result = f"(x - {mean}) / {below}" if center else f"x / {below}"
    if scheme.affine:
        weight, bias = at("weight", sizes.layout.affine), at("bias", sizes.layout.affine)
        offset = f"({_plain(scheme.weight_offset)} + {weight})" if scheme.weight_offset else weight
        if scheme.rounding == "before_affine":
            result = f"round({result})"
        result += f" * {offset}" if explanation.has("weight") else ""
        result += f" + {bias}" if explanation.has("bias") else ""
    yield f"y = {result}"
    if scheme.statistics == "running":
        yield f"{mean}, {var}: running averages of earlier batches, not of this one"
        return
    if center or scheme.scale == "std":
        yield f"{mean} = 1/{_divisor(n, 0)} * sum of x{over}"
        yield f"{var} = 1/{_divisor(n, scheme.correction)} * sum of (x - {mean})^2{over}"
    elif scheme.scale == "l2":
        yield f"{at('sumsquare', told)} = sum of x^2{over}"
    else:
        yield f"{spread} = 1/{_divisor(n, scheme.correction)} * sum of x^2{over}"
    if scheme.eps is None:
        yield "eps = the machine epsilon of the type that is computed in (float32: 1.19e-07)"


def _divisor(n: int, correction: float) -> str:
    """What a sum over n elements is divided by, in letters where there are none."""
    if n == 0:
        return f"(n - {correction:g})" if correction else "n"
    left = n - correction
    return str(int(left)) if left == int(left) else str(left)


# --------------------------------------------------------------------------------------------
# The numbers of one tensor


def type_name(tensor: Any) -> str:
    """The type of a tensor's elements, as in ``"float32"``, whatever their order of bytes."""
    return str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")


def holds_no_numbers(dtype: Any) -> bool:
    """Whether NumPy's type is one of words, dates, records or objects."""
    # The bfloat16 of ml_dtypes says of itself that it is a record.
    return getattr(dtype, "kind", "f") in "OSUVMm" and dtype.name != "bfloat16"


def finite_double(tensor: Any) -> NDArray[np.float64]:
    """A tensor of torch or NumPy in float64.

    Raises:
        ArgumentError: it holds NaN or infinity, or no values at all.
        DtypeError: it is complex, or of no numbers.
    """
    if holds_no_numbers(tensor.dtype):
        raise DtypeError(
            "A group is worked through on real numbers. "
            f"The tensor is {type_name(tensor)}. Give numbers, or only its shape."
        )
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if getattr(tensor, "is_meta", False) or layout != "torch.strided":
        said = "has none" if layout == "torch.strided" else f"is {layout.removeprefix('torch.')}"
        raise ArgumentError(
            f"A group is worked through on a dense tensor with values. This one {said}. "
            "Make it dense, or give only its shape."
        )
    if getattr(tensor, "is_quantized", False):
        tensor = tensor.dequantize()
    if "complex" in str(tensor.dtype):
        raise DtypeError(
            "A group is worked through on real numbers. "
            f"The tensor is {type_name(tensor)}. Give its real part."
        )
    x = double(tensor)
    assert x is not None
    where = not_finite(x, "x")
    if where:
        raise ArgumentError(
            f"A group is worked through on finite numbers. {where}. "
            "Give only its shape, or another tensor."
        )
    return x


def not_finite(values: NDArray[np.float64], name: str) -> str:
    """Where a NaN or infinity stands, and how many others; empty where all numbers are finite.

    >>> not_finite(np.array([[0.0, np.nan], [np.inf, 1.0]]), "x")
    'x[0, 1] is nan and 1 more is not finite'
    """
    finite = np.isfinite(values)
    if finite.all():
        return ""
    index = tuple(int(i) for i in np.argwhere(~finite)[0])
    said = f"{name}[{', '.join(map(str, index))}] is {values[index]:g}"
    others = int(values.size - finite.sum()) - 1
    if others:
        said += f" and {others:,} more {'is' if others == 1 else 'are'} not finite"
    return said


def double(value: Any) -> NDArray[np.float64] | None:
    """A tensor of torch or NumPy in float64, None for None."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_neg().double().numpy()
    return np.asarray(value).astype(np.float64)


def _with_numbers(explanation: Explanation, tensor: Any, subject: Subject) -> Explanation:
    scheme, running = explanation.scheme, subject.running
    if scheme.statistics == "running" and len(running) < 2:
        raise ArgumentError(
            f"'{scheme}' normalizes with running statistics. None came with the tensor. "
            "Explain the module that holds them, or give only the shape."
        )
    x = finite_double(tensor)
    weight, bias = double(subject.weight), double(subject.bias)
    sizes = explanation.sizes
    if scheme.statistics == "running":
        sizes.check_running(*(tuple(value.shape) for value in running.values()))
        mean, var = double(running["running_mean"]), double(running["running_var"])
        assert mean is not None
        assert var is not None
        mean = mean if scheme.center else np.zeros_like(mean)
    else:
        # Arithmetic on arrays without axes gives no arrays. '[...]' takes one axis as well.
        # A negative eps may leave no root.
        with np.errstate(all="ignore"):
            moments = reference.moments(x if x.ndim else x.reshape(1), scheme)
        mean, var = (
            np.asarray(values, dtype=np.float64).reshape(explanation.statistics_shape)
            for values in (moments.mean, moments.var)
        )
    if scheme.statistics == "batch" and not np.isfinite(var).all():
        place = tuple(int(i) for i in np.unravel_index(np.abs(x).argmax(), x.shape))
        raise ArgumentError(
            "A group is worked through in float64, squares included. That of "
            f"x[{', '.join(map(str, place))}] = {x[place]:g} is larger than its largest number. "
            "Give smaller numbers, or only the shape."
        )
    dtype = type_name(tensor)
    told = explanation.statistics_dimensions
    worked = work_through(sizes, told, x, mean, var, weight, bias, dtype)
    return dataclasses.replace(explanation, mean=mean, var=var, worked=worked, x=x)


# --------------------------------------------------------------------------------------------
# The command line


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm explain``."""
    parser.add_argument("scheme", help="'... [d]', 'GroupNorm(2, 4)' or a preset's name")
    parser.add_argument(
        "shape",
        metavar="shape|FILE[:KEY]",
        help="the input's shape, as in 2,3,4, or a file that holds the input (.npy, .npz, "
        ".safetensors, .pt): then its statistics are shown and one group is worked through",
    )
    parser.add_argument(
        "--sizes", metavar="NAME=SIZE,...", help="sizes of named axes or their parts, as in g=2,c=4"
    )


def input_said(text: str) -> Any:
    """What a command line names: a shape, or the tensor in a file."""
    return read(text) if names_a_file(text) else shape_said(text)


def execute(options: argparse.Namespace) -> tuple[Explanation, int]:
    """Run ``axisnorm explain``: the result and the exit status."""
    (subject,) = sized((options.scheme,), options.sizes)
    return explain(subject, input_said(options.shape)), 0
