"""What a normalization computes, as an object.

A :class:`Scheme` says which elements of a tensor share a mean and a variance (the axes in
brackets), which share a weight and a bias (``affine``), and every constant of the formula.
:meth:`Scheme.layout` says what its text means for a number of axes, :meth:`Layout.sizes` what it
means for one shape. All messages about axes and shapes are raised here.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import TracebackType
from typing import Any, ClassVar, NoReturn

__all__ = ["ArgumentError", "DtypeError", "Layout", "Part", "Scheme", "Sizes", "as_scheme"]


class _PlacedError(Exception):
    """An error whose text begins with the torch module that it came from, if from one."""

    def __str__(self) -> str:
        place = _module_of(self.__traceback__)
        return f"In {place}: {super().__str__()}" if place else super().__str__()


def _module_of(traceback: TracebackType | None) -> str:
    """The path and the class of the innermost torch module whose call an error has left.

    A module does not know its place in a model; the model is the outermost one that it has left.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    call = torch.nn.Module._call_impl.__code__
    modules = []
    while traceback:
        if traceback.tb_frame.f_code is call:
            modules.append(traceback.tb_frame.f_locals["self"])
        traceback = traceback.tb_next
    if not modules:
        return ""
    path = next((path for path, m in modules[0].named_modules() if m is modules[-1]), "")
    kind = type(modules[-1]).__name__
    return f"{path} ({kind})" if path else kind


class ArgumentError(_PlacedError, ValueError, RuntimeError):
    """A shape, an axis or a value does not fit. Raised before anything is computed."""


class DtypeError(_PlacedError, TypeError, NotImplementedError):
    """A type is not one that can be normalized. Raised before anything is computed."""


class NumberError(ArgumentError, DtypeError):
    """What is to be a number is none: a wrong argument, and of a wrong type."""


# --------------------------------------------------------------------------------------------
# The notation
#
#   scheme = item+ (";" key "=" value)*
#   item   = atom | "[" atom+ "]"              atom = name | "..." | "(" part+ ")"
#   part   = size | "[" size+ "]"              size = name ["=" int]


@dataclass(frozen=True)
class Part:
    """An axis of the tensor, or one factor of an axis that is seen as several."""

    name: str
    size: int | None = None
    reduced: bool = False
    """Elements that differ only along reduced parts share one mean and one variance."""

    @property
    def ellipsis(self) -> bool:
        return self.name.startswith("...")

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"


Axis = tuple[Part, ...]

_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([A-Za-z_]\w*)|(\d+)|([\[\]()=])|(\S))", re.ASCII)


class _Parser:
    """Recursive descent over the axes of one notation text; every error points at its culprit."""

    def __init__(self, text: str, end: int) -> None:
        self.text = text
        self.end = end
        self.tokens: list[tuple[str, int]] = []
        position = 0
        while match := _TOKEN.match(text, position, end):
            position = match.end()
            if match.group(5):
                self.fail(match.start(5), "Axes are named by words, '...', brackets and sizes")
            self.tokens.append((match.group().strip(), position - len(match.group().lstrip())))
        self.at = 0
        self.seen: set[str] = set()

    def fail(self, position: int, rule: str, remedy: str = "") -> NoReturn:
        raise ArgumentError(_caret(self.text, position, rule, remedy))

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def here(self) -> int:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else self.end

    def take(self) -> tuple[str, int]:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def axes(self) -> tuple[Axis, ...]:
        found: list[Axis] = []
        while self.peek():
            if self.peek() == "[":
                found += self.bracket(self.atom)
            else:
                found.append(self.atom(reduced=False))
        if not any(part.reduced for axis in found for part in axis):
            self.fail(
                self.end,
                "The elements that share a mean stand in brackets",
                "Put at least one axis in brackets, as in '... [d]'.",
            )
        return tuple(found)

    def bracket(self, inner: Any) -> list[Any]:
        _, opened = self.take()
        found = []
        while self.peek() != "]":
            if not self.peek():
                self.fail(opened, "A bracket must be closed", "Add ']'.")
            if self.peek() == "[":
                self.fail(self.here(), "Brackets are never nested", "All brackets are one set.")
            found.append(inner(reduced=True))
        self.take()
        if not found:
            self.fail(opened, "A bracket must not be empty", "Name the axes that share a mean.")
        return found

    def atom(self, reduced: bool) -> Axis:
        token, position = self.peek(), self.here()
        if token == "(":
            return self.parentheses(reduced)
        if token == "...":
            self.take()
            return (self.once("...", position, None, reduced),)
        if not token.isidentifier():
            self.fail(position, "An axis is a name, '...' or parts in parentheses")
        self.take()
        if self.peek() == "=":
            self.fail(
                self.here(), "Sizes stand in parentheses", f"Write '({token}=...)' for this axis."
            )
        return (self.once(token, position, None, reduced),)

    def parentheses(self, reduced: bool) -> Axis:
        _, opened = self.take()
        found: list[Part] = []
        while self.peek() != ")":
            if not self.peek() or self.peek() == "]":
                self.fail(opened, "A parenthesis must be closed", "Add ')'.")
            if self.peek() == "(":
                self.fail(self.here(), "Parentheses are never nested", "List all parts in one.")
            if self.peek() == "[":
                if reduced:
                    self.fail(self.here(), "Brackets are never nested", "All brackets are one set.")
                found += self.bracket(self.size)
            else:
                found.append(self.size(reduced))
        self.take()
        if not found:
            self.fail(opened, "Parentheses must not be empty", "Name the parts of the axis.")
        return tuple(found)

    def size(self, reduced: bool) -> Part:
        token, position = self.peek(), self.here()
        if token == "...":
            self.fail(position, "'...' never stands in parentheses", "It means whole axes.")
        if not token.isidentifier():
            self.fail(position, "A part of an axis is a name, with '=size' if it is known")
        self.take()
        number = None
        if self.peek() == "=":
            self.take()
            if not self.peek().isdigit() or len(self.peek()) > 18:
                self.fail(self.here(), "A size is a whole number", f"Write '{token}=4'.")
            number = int(self.take()[0])
        return self.once(token, position, number, reduced)

    def once(self, name: str, position: int, size: int | None, reduced: bool) -> Part:
        if name in self.seen:
            self.fail(position, f"Each name stands once, and '{name}' came before", "Rename one.")
        self.seen.add(name)
        return Part(name, size, reduced)


def _caret(text: str, position: int, rule: str, remedy: str = "") -> str:
    """A message of three lines with a caret under the culprit."""
    return f"{rule}.\n  {text}\n  {' ' * position}^" + (f"\n{remedy}" if remedy else "")


def _format_axes(axes: Sequence[Axis]) -> str:
    """The canonical text: neighbouring brackets are one, parentheses only where they say more."""
    words = []
    for axis in axes:
        whole = all(part.reduced for part in axis)
        if len(axis) == 1 and axis[0].size is None:
            word = axis[0].name
        else:
            parts = [(str(part), part.reduced and not whole) for part in axis]
            word = f"({_bracketed(parts)})"
        words.append((word, whole))
    return _bracketed(words)


def _bracketed(words: Sequence[tuple[str, bool]]) -> str:
    text = ""
    inside = False
    for word, reduced in words:
        if inside and not reduced:
            text += "]"
        text += " " if text else ""
        text += "[" if reduced and not inside else ""
        text += word
        inside = reduced
    return text + ("]" if inside else "")


# --------------------------------------------------------------------------------------------
# Scheme

_SCALES = ("auto", "std", "l2", "var", "sqrt_std")
_PLACEMENTS = ("variance", "std", "max")
_ROUNDINGS = ("once", "before_affine")
_STATISTICS = ("batch", "running")


@dataclass(frozen=True, repr=False)
class Scheme:
    r"""Which elements share a mean, which share a weight, and the constants of one normalization.

    .. math::
        y = \frac{x - m}{\sqrt{V + \epsilon}} (w + w_0) + b,\qquad
        m = \frac1n \sum x,\quad V = \frac{1}{n - \text{correction}} \sum (x - m)^2

    with sums over the elements that differ only along the bracketed axes.

    Args:
        axes: the tensor's axes in order, for example ``"n (g=4 [c]) [h w]"``. Axes in brackets
            share one mean and one variance, parentheses see one axis as several (outer first),
            ``...`` is any number of further axes. May hold the whole text, with
            ``; key=value`` for the fields below.
        affine: the names along which weight and bias vary, in tensor order. Parts of one tensor
            axis form one dimension: ``"g c"`` has shape (C,).
        center: subtract the mean. ``False`` divides by the root mean square.
        scale: what divides. ``"auto"``: the standard deviation if centred, else the root mean
            square. ``"std"``: the centred deviation in any case. ``"l2"``: the root of the sum of
            squares. ``"var"``: the variance without its root, ``"sqrt_std"``: the root of the
            deviation (two known mistakes).
        correction: the divisor of the variance is n - correction, as in :func:`torch.var`.
        eps: any finite number, or None for the machine epsilon of the compute type (float32 for
            half types).
        eps_placement: ``"variance"``: inside the root. ``"std"``: added to what divides.
            ``"max"``: max(what divides, eps).
        weight_offset: added to the weight. 1.0 where the weight is stored around zero (Gemma).
        rounding: ``"once"``: weight and bias are applied in the compute type. ``"before_affine"``:
            the normalized value is rounded to the input's type first (Llama, ONNX stash_type 1).
        statistics: ``"batch"``, or ``"running"`` to normalize with given running statistics.
        momentum: the weight of the new value in running statistics, None for a cumulative average.
        running_correction: the divisor of the stored variance is n - running_correction.

    Raises:
        ArgumentError: the text is not in the notation, or a field is not one of its values.

    >>> Scheme.group_norm(4)
    Scheme('n (g=4 [c]) [...]; affine=g c')
    >>> Scheme("b s  [ d ]", affine="d", eps=1e-12) == Scheme("b s [d]; affine=d; eps=1e-12")
    True
    >>> Scheme("n c [h w]").sizes((2, 3, 5, 7)).statistics_shape
    (2, 3)
    """

    axes: str
    affine: str = ""
    center: bool = True
    scale: str = "auto"
    correction: float = 0
    eps: float | None = 1e-5
    eps_placement: str = "variance"
    weight_offset: float = 0.0
    rounding: str = "once"
    statistics: str = "batch"
    momentum: float | None = 0.1
    running_correction: float = 1

    # Derived once: the axes as data, the canonical text.
    _parsed: ClassVar[tuple[Axis, ...]]
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.axes, str):
            raise ArgumentError(
                "A scheme's axes are a text such as '... [d]'. "
                f"A {type(self.axes).__name__} came. Write the axes as a string."
            )
        text = self.axes
        head, *rest = text.split(";")
        self._read_fields(text, rest, len(head))
        parsed = _Parser(text, len(head)).axes()
        self._set("axes", _format_axes(parsed))
        self._set("_parsed", parsed)
        self._check_values()
        self._set("affine", self._check_affine())
        self._set("_text", self._write())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _read_fields(self, text: str, fields: Sequence[str], position: int) -> None:
        """Take ``key=value`` items of the text over into the fields."""
        known = {field.name: field for field in dataclasses.fields(self) if field.name != "axes"}
        seen: set[str] = set()
        for item in fields:
            start = position + 1 + len(item) - len(item.lstrip())
            position += 1 + len(item)
            if not item.strip():
                continue
            key, equals, value = (word.strip() for word in item.partition("="))
            if key not in known or not equals or key in seen:
                raise ArgumentError(
                    _caret(text, start, "After ';' come fields as key=value, each once",
                           f"The fields are {', '.join(known)}.")
                )  # fmt: skip
            seen.add(key)
            said = getattr(self, key)
            try:
                read = _read_value(key, value)
            except (KeyError, ValueError):
                raise ArgumentError(
                    _caret(text, start, f"'{value}' is not a value of {key}")
                ) from None
            if said not in (known[key].default, read):
                raise ArgumentError(
                    _caret(text, start, f"{key} is said twice: {read!r} here and {said!r} beside",
                           "Say it once.")
                )  # fmt: skip
            self._set(key, read)

    def _check_values(self) -> None:
        for name, allowed in (
            ("scale", _SCALES),
            ("eps_placement", _PLACEMENTS),
            ("rounding", _ROUNDINGS),
            ("statistics", _STATISTICS),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"{name} is one of {', '.join(map(repr, allowed))}. "
                    f"{getattr(self, name)!r} came. Choose one of them."
                )
        for name in ("correction", "eps", "weight_offset", "momentum", "running_correction"):
            value = getattr(self, name)
            if value is None and name in ("eps", "momentum"):
                continue
            self._set(name, finite(name, value))
        if not isinstance(self.center, (bool, int)):
            raise ArgumentError(f"center is True or False. {self.center!r} came. Give one of them.")
        self._set("center", bool(self.center))
        if self.center and self.scale == "std":
            self._set("scale", "auto")

    def _check_affine(self) -> str:
        names = [part.name for axis in self.parsed for part in axis]
        words = str(self.affine).split()
        where = -1
        for word in words:
            if word == "..." or word not in names:
                raise ArgumentError(
                    f"affine names axes of the scheme. '{word}' is none of '{self.axes}'. "
                    f"Use {', '.join(repr(n) for n in names if n != '...') or 'a named axis'}."
                )
            if names.index(word) <= where:
                raise ArgumentError(
                    "affine names axes once and in the tensor's order. "
                    f"'{self.affine}' came for '{self.axes}'. "
                    f"Write '{' '.join(sorted(set(words), key=names.index))}'."
                )
            where = names.index(word)
        return " ".join(words)

    @property
    def parsed(self) -> tuple[Axis, ...]:
        """The axes as data: for each axis of the notation its parts (``...`` is one of them)."""
        return self._parsed

    @property
    def text(self) -> str:
        """The whole scheme in the notation, without the fields that have their default."""
        return self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Scheme, (self.text,)

    def __str__(self) -> str:
        return self.text

    def _write(self) -> str:
        words = [self.axes]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_write_value(value)}")
        return "; ".join(words)

    def __repr__(self) -> str:
        return f"Scheme({str(self)!r})"

    def replace(self, **fields: Any) -> Scheme:
        """A copy with some fields changed.

        >>> Scheme.layer_norm().replace(eps=1e-12)
        Scheme('... [d]; affine=d; eps=1e-12')
        """
        return dataclasses.replace(self, **fields)

    def with_sizes(self, sizes: Mapping[str, int]) -> Scheme:
        """A copy in which the named axes have these sizes.

        >>> Scheme("n [c] h w", affine="c").with_sizes({"c": 96})
        Scheme('n [(c=96)] h w; affine=c')
        """
        left = dict(sizes)
        axes = []
        for axis in self.parsed:
            parts = []
            for part in axis:
                size = left.pop(part.name, part.size)
                if isinstance(size, bool) or not (size is None or (_is_int(size) and size >= 0)):
                    raise ArgumentError(
                        f"A size is a whole number. {part.name}={size!r} came. Give an int."
                    )
                if part.size not in (None, size):
                    raise ArgumentError(
                        f"'{self.axes}' says {part}. {part.name}={size} came. Give one of them."
                    )
                parts.append(dataclasses.replace(part, size=size))
            axes.append(tuple(parts))
        if left or any(p.ellipsis and p.size is not None for axis in axes for p in axis):
            raise ArgumentError(
                f"sizes names axes of the scheme. {', '.join(map(repr, left or ['...']))} is none "
                f"of '{self.axes}'. Use the names that stand there."
            )
        return self.replace(axes=_format_axes(axes))

    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias where the notation gives all their sizes.

        >>> Scheme.layer_norm((3, 4)).parameter_shape()
        (3, 4)
        """
        names = self.affine.split()
        sizes = [
            [self._known_size(part) for part in axis if part.name in names] for axis in self.parsed
        ]
        return tuple(math.prod(parts) for parts in sizes if parts)

    def running_shape(self) -> tuple[int, ...]:
        """The shape of running statistics where the notation gives all their sizes.

        They vary along the kept axes that are affine too; along all kept ones where none is.

        >>> Scheme.batch_norm().with_sizes({"c": 3}).running_shape()
        (3,)
        """
        kept = [part for axis in self.parsed for part in axis if not part.reduced]
        both = [part for part in kept if part.name in self.affine.split()]
        return tuple(self._known_size(part) for part in both or kept)

    def _known_size(self, part: Part) -> int:
        if part.size is None:
            raise ArgumentError(
                "A parameter needs the size of each of its axes. "
                f"'{part.name}' has none in '{self}'. Give sizes={{'{part.name}': ...}}."
            )
        return part.size

    def layout(self, ndim: int) -> Layout:
        """What the notation means for tensors of ``ndim`` axes.

        Raises:
            ArgumentError: the notation names another number of axes.

        >>> Scheme("[n] c [...]").layout(4).reduced_axes
        (0, 2, 3)
        """
        return _layout(self, ndim)

    def sizes(self, shape: Sequence[int]) -> Sizes:
        """What the notation means for tensors of one shape.

        Raises:
            ArgumentError: the shape does not fit the notation.

        >>> Scheme("n c [h w]").sizes((2, 3, 5, 7)).group_size
        35
        """
        try:
            layout = self.layout(len(shape))
        except ArgumentError:
            # A layout, which is cached by the number of axes, knows no shape.
            raise _wrong_rank(self, len(shape), f", shape {tuple(shape)}") from None
        return layout.sizes(shape)

    # ----------------------------------------------------------------------------------------
    # Constructors: the named norms are choices of axes and constants.

    @classmethod
    def layer_norm(
        cls,
        normalized_shape: int | Sequence[int] | None = None,
        *,
        ndim: int | None = None,
        **fields: Any,
    ) -> Scheme:
        """LayerNorm over the trailing axes (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

        Args:
            normalized_shape: the sizes of the trailing axes, as in :class:`torch.nn.LayerNorm`.
            ndim: only their number (default 1), for any sizes.
            fields: further fields of :class:`Scheme`.

        >>> Scheme.layer_norm(ndim=2)
        Scheme('... [s d]; affine=s d')
        >>> Scheme.layer_norm(768, eps=1e-12)
        Scheme('... [(d=768)]; affine=d; eps=1e-12')
        """
        sizes = None if normalized_shape is None else checked_shape(normalized_shape)
        if sizes is not None and ndim not in (None, len(sizes)):
            raise ArgumentError(
                f"ndim is the number of normalized axes. normalized_shape {sizes} has "
                f"{len(sizes)}, ndim says {ndim}. Give one of them."
            )
        names = trailing_names(len(sizes) if sizes is not None else 1 if ndim is None else ndim)
        scheme = cls(f"... [{' '.join(names)}]", **{"affine": " ".join(names), **fields})
        return scheme if sizes is None else scheme.with_sizes(dict(zip(names, sizes, strict=True)))

    @classmethod
    def rms_norm(
        cls,
        normalized_shape: int | Sequence[int] | None = None,
        *,
        ndim: int | None = None,
        **fields: Any,
    ) -> Scheme:
        """RMSNorm over the trailing axes (Zhang and Sennrich 2019, arXiv:1910.07467).

        >>> Scheme.rms_norm()
        Scheme('... [d]; affine=d; center=false; eps=none')
        """
        fields = {"center": False, "eps": None, **fields}
        return cls.layer_norm(normalized_shape, ndim=ndim, **fields)

    @classmethod
    def group_norm(cls, num_groups: int, **fields: Any) -> Scheme:
        """GroupNorm of channels-first tensors (Wu and He 2018, arXiv:1803.08494).

        >>> Scheme.group_norm(32)
        Scheme('n (g=32 [c]) [...]; affine=g c')
        """
        if not _is_int(num_groups) or num_groups < 1:
            raise ArgumentError(
                f"num_groups is a positive whole number. {num_groups!r} came. "
                "Give a number that divides the channels."
            )
        return cls(f"n (g={int(num_groups)} [c]) [...]", **{"affine": "g c", **fields})

    @classmethod
    def instance_norm(cls, **fields: Any) -> Scheme:
        """InstanceNorm of channels-first tensors (Ulyanov et al. 2016, arXiv:1607.08022).

        >>> Scheme.instance_norm()
        Scheme('n c [...]; affine=c')
        """
        return cls("n c [...]", **{"affine": "c", **fields})

    @classmethod
    def batch_norm(cls, **fields: Any) -> Scheme:
        """BatchNorm of channels-first tensors (Ioffe and Szegedy 2015, arXiv:1502.03167).

        >>> Scheme.batch_norm()
        Scheme('[n] c [...]; affine=c')
        """
        return cls("[n] c [...]", **{"affine": "c", **fields})

    @classmethod
    def layer_norm_2d(cls, **fields: Any) -> Scheme:
        """LayerNorm over the channels of channels-first tensors (ConvNeXt, arXiv:2201.03545).

        >>> Scheme.layer_norm_2d()
        Scheme('n [c] ...; affine=c; eps=1e-06')
        """
        return cls("n [c] ...", **{"affine": "c", "eps": 1e-6, **fields})


def _read_value(key: str, value: str) -> Any:
    if key == "affine":
        return value
    word = value.lower()
    if key == "center":
        return {"true": True, "false": False}[word]
    if key in ("scale", "eps_placement", "rounding", "statistics"):
        return word
    if word == "none" and key in ("eps", "momentum"):
        return None
    return float(value)


def _write_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value).removesuffix(".0")


def _is_int(value: object) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or hasattr(value, "__index__"))


def finite(name: str, value: Any) -> float:
    """The number as a float, refused if it is none or not finite."""
    try:
        # float would read a text, too.
        number = None if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise NumberError(f"{name} is a number. {value!r} came. Give a finite number.")
    if not -math.inf < number < math.inf:  # as compilers can trace it
        raise ArgumentError(f"{name} is a finite number. {value!r} came. Give a finite number.")
    return number + 0.0  # -0.0 is 0.0


def checked_shape(normalized_shape: Any) -> tuple[int, ...]:
    """``normalized_shape`` as torch takes it: an int or a sequence of ints, not empty."""
    sizes: tuple[Any, ...] = (normalized_shape,)
    if isinstance(normalized_shape, Iterable) and getattr(normalized_shape, "ndim", None) != 0:
        sizes = tuple(normalized_shape)
    if not sizes or any(not _is_int(size) or size < 0 for size in sizes):
        raise ArgumentError(
            "normalized_shape names the sizes of at least one trailing axis. "
            f"{normalized_shape!r} came. Give an int or a tuple of ints, as torch.nn.LayerNorm."
        )
    return sizes


def trailing_names(count: int) -> tuple[str, ...]:
    """Names for normalized trailing axes."""
    if not _is_int(count) or count < 1:
        raise ArgumentError(
            f"A layer norm normalizes at least one axis. ndim={count!r} came. Give 1 or more."
        )
    usual = {1: ("d",), 2: ("s", "d"), 3: ("c", "h", "w")}
    return usual.get(count) or tuple(f"d{i}" for i in range(1, count + 1))


def as_scheme(scheme: Scheme | str) -> Scheme:
    """The scheme itself, a preset by its name, or the scheme that a text says.

    >>> as_scheme("bert.layer_norm").eps
    1e-12
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str):
        raise ArgumentError(
            "A scheme is a Scheme, a preset's name or a text such as '... [d]'. "
            f"A {type(scheme).__name__} came. Write the axes as a string."
        )
    return _parse(scheme)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Scheme:
    from .presets import PRESETS

    name = text.strip()
    return PRESETS[name] if name in PRESETS else Scheme(text)


# --------------------------------------------------------------------------------------------
# Layout: what the text means for a number of axes


@dataclass(frozen=True, eq=False)  # cached: the same object for the same meaning
class Layout:
    """The role of every axis of tensors with ``ndim`` axes."""

    scheme: Scheme
    axes: tuple[Axis, ...]
    """For each axis of the tensor its parts, outer first."""

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts in order: the dimensions of the tensor seen with every part as one."""
        return tuple(part for axis in self.axes for part in axis)

    @cached_property
    def reduced_axes(self) -> tuple[int, ...]:
        """The tensor's axes that share statistics, in whole or in part."""
        return tuple(i for i, axis in enumerate(self.axes) if any(part.reduced for part in axis))

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The dimensions among ``parts`` that share statistics."""
        return tuple(i for i, part in enumerate(self.parts) if part.reduced)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The dimensions among ``parts`` along which statistics differ."""
        return tuple(i for i, part in enumerate(self.parts) if not part.reduced)

    @cached_property
    def affine(self) -> tuple[int, ...]:
        """The dimensions among ``parts`` along which weight and bias vary."""
        names = self.scheme.affine.split()
        return tuple(i for i, part in enumerate(self.parts) if part.name in names)

    @cached_property
    def running(self) -> tuple[int, ...]:
        """The dimensions among ``parts`` along which running statistics vary.

        The kept ones that are affine too (BatchNorm and InstanceNorm: the channels); all kept
        ones where none is.
        """
        both = tuple(i for i in self.kept if i in self.affine)
        return both or self.kept

    def sizes(self, shape: Sequence[int]) -> Sizes:
        """What the layout means for one shape (symbolic sizes too).

        Raises:
            ArgumentError: the shape does not fit the notation.
        """
        shape = tuple(shape)
        # Symbolic sizes are not hashable, and must not become part of a cache's key.
        if all(type(size) is int for size in shape):
            return _sizes(self, shape)
        return _compute_sizes(self, shape)


def _wrong_rank(scheme: Scheme, ndim: int, shape: str = "") -> ArgumentError:
    named = sum(not axis[0].ellipsis for axis in scheme.parsed)
    return ArgumentError(
        f"'{scheme.axes}' names {'at least ' if named < len(scheme.parsed) else ''}{named} "
        f"{'axis' if named == 1 else 'axes'}. The input has {ndim}{shape}. "
        "Name every axis of the input, or use '...' for the rest."
    )


@lru_cache(maxsize=4096)
def _layout(scheme: Scheme, ndim: int) -> Layout:
    named = [axis for axis in scheme.parsed if not axis[0].ellipsis]
    extra = ndim - len(named)
    open_ended = len(named) < len(scheme.parsed)
    if extra < 0 or (extra and not open_ended):
        raise _wrong_rank(scheme, ndim)
    axes: list[Axis] = []
    for axis in scheme.parsed:
        if axis[0].ellipsis:
            reduced = axis[0].reduced
            axes += [(Part(f"...{i}", None, reduced),) for i in range(1, extra + 1)]
        else:
            axes.append(axis)
    return Layout(scheme, tuple(axes))


# --------------------------------------------------------------------------------------------
# Sizes: what the layout means for one shape


@dataclass(frozen=True, eq=False)
class Sizes:
    """A layout's sizes for one shape."""

    layout: Layout
    shape: tuple[int, ...]
    expanded: tuple[int, ...]
    """The shape with every part as a dimension of its own."""

    def _pick(self, dimensions: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.expanded[i] for i in dimensions)

    def _broadcast(self, dimensions: Sequence[int]) -> tuple[int, ...]:
        return tuple(n if i in dimensions else 1 for i, n in enumerate(self.expanded))

    @cached_property
    def group_size(self) -> int:
        """How many elements share one mean."""
        return math.prod(self._pick(self.layout.reduced))

    @cached_property
    def num_groups(self) -> int:
        """How many means there are."""
        return math.prod(self.statistics_shape)

    @cached_property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of mean and variance: the kept dimensions, split axes as several."""
        return self._pick(self.layout.kept)

    @cached_property
    def statistics_expanded(self) -> tuple[int, ...]:
        """The statistics' shape as it broadcasts against the expanded tensor."""
        return self._broadcast(self.layout.kept)

    @cached_property
    def affine_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias: parts of one tensor axis form one dimension."""
        shape = []
        dimension = 0
        for axis in self.layout.axes:
            own = [i for i in range(dimension, dimension + len(axis)) if i in self.layout.affine]
            dimension += len(axis)
            if own:
                shape.append(math.prod(self._pick(own)))
        return tuple(shape)

    @cached_property
    def affine_expanded(self) -> tuple[int, ...]:
        """The parameters' shape as it broadcasts against the expanded tensor."""
        return self._broadcast(self.layout.affine)

    @cached_property
    def running_shape(self) -> tuple[int, ...]:
        """The shape of running mean and running variance."""
        return self._pick(self.layout.running)

    @cached_property
    def running_expanded(self) -> tuple[int, ...]:
        """The running statistics' shape as it broadcasts against the expanded tensor."""
        return self._broadcast(self.layout.running)

    def check_parameter(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a weight or bias of another shape than ``affine_shape``."""
        if tuple(shape) != self.affine_shape:
            scheme = self.layout.scheme
            said = f"along '{scheme.affine}'" if scheme.affine else "nowhere (affine is empty)"
            raise ArgumentError(
                f"The {name} varies {said}, so its shape is {self.affine_shape} for an input of "
                f"shape {self.shape}. A {name} of shape {tuple(shape)} came. "
                f"Change one of them, or name the axes: affine=... in '{scheme}'."
            )

    def check_mask(self, shape: Sequence[int]) -> None:
        """Refuse a mask that does not broadcast to the input."""
        wanted = self.shape[len(self.shape) - len(shape) :]
        if len(shape) > len(self.shape) or any(
            m not in (1, n) for m, n in zip(shape, wanted, strict=True)
        ):
            raise ArgumentError(
                f"A mask broadcasts to the input. Its shape is {tuple(shape)}, the input's "
                f"{self.shape}. Insert axes of size 1 where it does not vary."
            )

    def check_running(self, mean: Sequence[int] | None, var: Sequence[int] | None) -> None:
        """Refuse running statistics that are incomplete or of another shape."""
        scheme = self.layout.scheme
        if (mean is None) != (var is None) or (mean is None and scheme.statistics == "running"):
            raise ArgumentError(
                f"running_mean and running_var come together. '{scheme}' got "
                f"{'neither' if mean is None and var is None else 'one of them'}. Give both."
            )
        if mean is not None and scheme.momentum is None and scheme.statistics == "batch":
            raise ArgumentError(
                "momentum=None is a cumulative average, which needs a count of batches. "
                "A function has none. Give a number, or use the BatchNorm module."
            )
        for name, shape in (("running_mean", mean), ("running_var", var)):
            if shape is not None and tuple(shape) != self.running_shape:
                raise ArgumentError(
                    f"{name} has shape {self.running_shape} for an input of shape {self.shape} "
                    f"under '{scheme}'. Shape {tuple(shape)} came. Give one value a channel."
                )


@lru_cache(maxsize=4096)
def _sizes(layout: Layout, shape: tuple[int, ...]) -> Sizes:
    return _compute_sizes(layout, shape)


def _compute_sizes(layout: Layout, shape: tuple[int, ...]) -> Sizes:
    scheme = layout.scheme
    if len(shape) != layout.ndim:
        raise ArgumentError(
            f"This layout has {layout.ndim} axes. Shape {shape} came. Make a layout of its rank."
        )
    expanded: list[int] = []
    for axis, size in zip(layout.axes, shape, strict=True):
        expanded += _split(scheme, axis, size, shape)
    sizes = Sizes(layout, shape, tuple(expanded))
    if scheme.correction > 0 and sizes.group_size != 0 and sizes.group_size <= scheme.correction:
        raise ArgumentError(
            f"The variance's divisor n - correction is positive. {sizes.group_size} elements share "
            f"a mean in shape {shape} under '{scheme}'. Use a smaller correction or larger groups."
        )
    return sizes


def _split(scheme: Scheme, axis: Axis, size: int, shape: tuple[int, ...]) -> Iterator[int]:
    unknown = [part for part in axis if part.size is None]
    known = math.prod(part.size for part in axis if part.size is not None)
    if len(unknown) > 1:
        raise ArgumentError(
            "In parentheses at most one size may be unknown. "
            f"{' and '.join(repr(part.name) for part in unknown)} are in '{scheme}'. "
            f"Write '{unknown[0].name}=...'."
        )
    fits = known == size if not unknown else known and size % known == 0
    if not fits:
        text = _format_axes([axis])
        wanted = f"{known}" if not unknown else f"a multiple of {known}"
        raise ArgumentError(
            f"'{text}' in '{scheme}' is an axis of {wanted} elements. "
            f"It has {size} in shape {shape}. Change the sizes, or the input."
        )
    return (size // known if part.size is None else part.size for part in axis)
