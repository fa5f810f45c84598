"""What explain and compare are asked about: a scheme, a name, a module, a function."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..presets import PRESETS
from ..scheme import ArgumentError, Scheme, as_scheme
from .constructors import constructed, likely_constructor, without_affine
from .models.declared import activation_of, declared_scheme, function_scheme

__all__ = [
    "Subject",
    "is_shape",
    "known_scheme",
    "read_shape",
    "read_subject",
    "shape_said",
    "sized",
    "with_article",
]

MOST_ELEMENTS = 1 << 44
"""Shapes of more elements are taken for a mistake: 16 TiB at one byte each."""


@dataclass(frozen=True)
class Subject:
    """One normalization as it was asked about."""

    name: str
    """Its own words: a notation, a preset, a constructor, a module's class, a function."""
    scheme: Scheme
    weight: Any = None
    bias: Any = None
    running: Mapping[str, Any] = field(default_factory=dict)
    """The running statistics that normalize, by their arguments' names."""
    parameters: frozenset[str] | None = None
    """Which of weight and bias there are; None where that is open, as in a notation."""
    keeps_running: bool | None = None
    """Whether training moves running statistics; None where that is open."""


def read_subject(subject: Any, shape: tuple[int, ...], asker: str = "explain") -> Subject:
    """Read what one of the lens's functions was given.

    Args:
        subject: a Scheme, its text, a preset's name, a constructor's call, a module, its class or a
            function.
        shape: of its input.
        asker: the function's name, for messages.

    Raises:
        ArgumentError: it is no normalization, or a module that does not take this shape.
    """
    if isinstance(subject, type):
        subject = _class_name(subject, asker)
    if isinstance(subject, (Scheme, str)):
        return _read_text(subject, shape)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(subject, torch.nn.Module):
        return _read_module(subject, shape, asker)
    if callable(subject):
        return _read_function(subject, len(shape), asker)
    raise ArgumentError(
        f"{asker} takes a Scheme, its text, a norm module or a norm function. "
        f"{with_article(subject)} came. Write the axes as a string, as in '... [d]'."
    )


def _class_name(subject: type, asker: str) -> str:
    """The name of a class of torch.nn or axisnorm.nn that is a norm."""
    home, name = subject.__module__.split(".")[0], subject.__name__
    if home not in ("torch", "axisnorm") or constructed(name) is None:
        raise ArgumentError(
            f"{asker} takes modules, and the norm classes of torch.nn and axisnorm.nn. "
            f"The class {name} came. Give a module that is made of it."
        )
    return name


def _read_text(subject: Scheme | str, shape: tuple[int, ...]) -> Subject:
    name = str(subject).strip()
    written = constructed(name)
    if written is None:
        keeps = "batch_norm" in name if name in PRESETS else None
        return Subject(name, known_scheme(subject), keeps_running=keeps)
    scheme = written.scheme
    if len(shape) == written.unbatched:
        scheme = scheme.replace(axes=re.sub(r"^(n|\[n\]) ", "", scheme.axes))
    scheme.sizes(shape)
    if written.ndims and len(shape) not in written.ndims:
        raise _wrong_rank(name, " or ".join(map(str, written.ndims)), shape)
    return Subject(name, scheme, parameters=written.parameters, keeps_running=written.keeps_running)


def _wrong_rank(name: str, takes: str, shape: tuple[int, ...]) -> ArgumentError:
    return ArgumentError(
        f"A {name} takes inputs of {takes} axes. Shape {shape} has {len(shape)}. "
        "Give a shape that it takes, or the scheme."
    )


def _read_module(module: Any, shape: tuple[int, ...], asker: str) -> Subject:
    _check_made(module)
    found = declared_scheme(module, len(shape))
    if found is None:
        raise ArgumentError(
            f"{asker} knows the norm modules of torch.nn and axisnorm.nn. "
            f"{with_article(module)} came. Run audit on it to see what it computes."
        )
    home = getattr(type(module).forward, "__module__", "torch")
    if home.split(".")[0] not in ("torch", "axisnorm"):
        raise ArgumentError(
            f"{asker} knows what torch.nn and axisnorm.nn compute. {with_article(module)} came, "
            "which has a forward of its own. Run audit on it to see what it computes."
        )
    _check_plain(activation_of(module), module, asker)
    _check_module(module, found, shape)
    running = {}
    if found.statistics == "running":
        running = {k: getattr(module, k) for k in ("running_mean", "running_var")}
    own = {name: getattr(module, name, None) for name in ("weight", "bias")}
    bare = own == {"weight": None, "bias": None}
    return Subject(
        type(module).__name__,
        without_affine(found) if bare and found.affine else found,
        own["weight"],
        own["bias"],
        running,
        frozenset(name for name, value in own.items() if value is not None),
        getattr(module, "running_mean", None) is not None,
    )


def _check_plain(activation: str | None, subject: Any, asker: str) -> None:
    """Refuse what applies an activation to its norm."""
    if activation is not None:
        name = getattr(subject, "__name__", type(subject).__name__)
        raise ArgumentError(
            f"{asker} is about norms alone. A {name} with activation={activation!r} came. "
            "Leave the activation out, or give the scheme."
        )


def _read_function(subject: Any, ndim: int, asker: str) -> Subject:
    function, given = _arguments(subject, asker)
    found = function_scheme(function, given, ndim)
    _check_plain(given.get("activation"), function, asker)
    running = {}
    if found.statistics == "running":
        running = {
            name: given[name]
            for name in ("running_mean", "running_var")
            if given.get(name) is not None
        }
    name = getattr(function, "__name__", type(function).__name__)
    there = frozenset(role for role in ("weight", "bias") if given.get(role) is not None)
    # A call may still give them where none was given yet.
    return Subject(
        name, found, given.get("weight"), given.get("bias"), running, there if there else None
    )


def _arguments(subject: Any, asker: str) -> tuple[Any, dict[str, Any]]:
    """The function inside partial functions, and its arguments by name."""
    partials = []
    while isinstance(subject, functools.partial):
        partials.append(subject)
        subject = subject.func
    args: tuple[Any, ...] = ()
    given: dict[str, Any] = {}
    for one in reversed(partials):
        args, given = (*args, *one.args), {**given, **one.keywords}
    if args:
        try:
            given = dict(inspect.signature(subject).bind_partial(*args, **given).arguments)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{asker} reads a partial function's arguments. Those given do not fit: {error}. "
                "Give them by name, as functools.partial(group_norm, num_groups=4)."
            ) from error
    return subject, given


def known_scheme(subject: Scheme | str) -> Scheme:
    """The scheme, with a word for presets whose names are not quite right."""
    name = subject.strip() if isinstance(subject, str) else ""
    found = constructed(name)
    if found is not None:
        return found.scheme
    if re.fullmatch(r"\w+(\.\w+)*", name) and name not in PRESETS:
        # Names are compared without their library too: 'layernorm' is near 'layer_norm'.
        last = {preset.split(".", 1)[1]: preset for preset in reversed(list(PRESETS))}
        rest = name.rpartition(".")[2]
        if rest in last and not _has_presets(name.partition(".")[0]):
            near = [last[rest]]
        else:
            near = difflib.get_close_matches(name, PRESETS, n=2)
        near = near or [last[word] for word in difflib.get_close_matches(name, last, n=2)]
        meant = " or ".join(f"'{preset}'" for preset in near)
        remedy = f"Did you mean {meant}?" if meant else "axisnorm.PRESETS lists them."
        raise ArgumentError(
            "A norm is a notation with brackets, a constructor's call or a preset's name. "
            f"There is no such preset as '{name}'. {remedy}"
        )
    try:
        return as_scheme(subject)
    except ArgumentError as error:
        likely = likely_constructor(name)
        if likely is None:
            raise
        raise ArgumentError(
            "A constructor's call is one of torch.nn's or axisnorm.nn's norms, with a closing "
            f"parenthesis. '{name}' came. Did you mean {likely}(...)?"
        ) from error


def _has_presets(home: str) -> bool:
    """Whether there are presets of this library or model."""
    return any(preset.startswith(f"{home}.") for preset in PRESETS)


def _check_made(module: Any) -> None:
    """Refuse a lazy module that has seen no input."""
    lazy = sys.modules["torch"].nn.parameter.is_lazy
    if any(lazy(value) for value in (*module.parameters(), *module.buffers())):
        raise ArgumentError(
            "A lazy module has its sizes from its first input. "
            f"{with_article(module)} without any came. Run it once, or give another."
        )


def _check_rank(module: Any, shape: tuple[int, ...]) -> None:
    """Refuse inputs of a rank that BatchNorm2d and its kin refuse themselves."""
    torch = sys.modules["torch"]
    check = getattr(module, "_check_input_dim", None)
    if check is not None and math.prod(shape) <= MOST_ELEMENTS:
        try:
            check(torch.empty(shape, device="meta"))
        except ValueError as error:
            takes = re.search(r"expected (.*?)D? input", str(error))
            said = takes[1].replace("D", "") if takes else "other numbers of"
            raise _wrong_rank(type(module).__name__, said, shape) from error


def _check_module(module: Any, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the module's own sizes do not fit, also without parameters."""
    _check_rank(module, shape)
    normalized = getattr(module, "normalized_shape", None)
    said: Any = getattr(module, "num_features", getattr(module, "num_channels", None))
    came: Any = said
    axis = 0 if scheme.axes.startswith("c") else 1
    where = f"axis {axis}"
    if normalized is not None:
        said, came = tuple(normalized), shape[len(shape) - len(normalized) :]
        where = "trailing axes"
    elif said is not None and axis < len(shape):
        came = shape[axis]
    if came != said:
        raise ArgumentError(
            f"A {type(module).__name__} of {said} takes them from the {where}. "
            f"Shape {shape} has {came} there. Give a shape that fits."
        )


# --------------------------------------------------------------------------------------------
# Shapes and sizes


def is_shape(value: Any) -> bool:
    """Whether it is a shape, not a tensor that has one."""
    if getattr(value, "is_nested", False):
        raise ArgumentError(
            "An input has one shape. A nested tensor has several. Give one of its tensors."
        )
    return not hasattr(value, "dtype") or not hasattr(value, "shape")


def read_shape(value: Any) -> tuple[int, ...]:
    """The shape that is given, itself or by a tensor.

    Raises:
        ArgumentError: it is no tuple of whole numbers, or far too large.
    """
    if not is_shape(value):
        return tuple(int(size) for size in value.shape)
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if any(not hasattr(s, "__index__") or isinstance(s, bool) or s < 0 for s in sizes):
        raise ArgumentError(
            "A shape is a tuple of whole numbers. "
            f"{value!r} came. Give one size an axis, as in (2, 3, 4), or a tensor."
        )
    if math.prod(max(int(size), 1) for size in sizes) > MOST_ELEMENTS:
        raise ArgumentError(
            f"A shape may have up to 2**{MOST_ELEMENTS.bit_length() - 1} elements. "
            f"{value!r} came. Give the shape of a tensor that a machine can hold."
        )
    return tuple(int(size) for size in sizes)


def shape_said(text: str) -> tuple[int, ...]:
    """A shape as it stands on a command line: ``"2,3,4"``, ``"(2, 3, 4)"``, ``"2x3x4"``."""
    came = text.strip()
    if not re.fullmatch(r"([0-9]+(\s*[,x]\s*|\s+|$))*", came.strip("()[] ")):
        raise ArgumentError(
            f"A shape is a list of whole numbers. '{came}' came. Write it as 2,3,4."
        )
    # int() refuses numbers of thousands of digits; twenty are too many here already.
    return tuple(int(word[:20]) for word in re.findall(r"[0-9]+", came))


def sized(texts: tuple[str, ...], sizes: str | None) -> list[Scheme | str]:
    """What a command line names, with the sizes ``"g=2,c=4"`` of the axes that have these names.

    Raises:
        ArgumentError: the sizes are not written so, or a name stands in none of the schemes.
    """
    if sizes is None:
        for text in texts:
            _check_known(known_scheme(text))
        return list(texts)
    said = _sizes_said(sizes)
    schemes = [known_scheme(text) for text in texts]
    names = [{part.name for axis in scheme.parsed for part in axis} for scheme in schemes]
    for name in said:
        if not any(name in own for own in names):
            listed = " and ".join(f"'{scheme.axes}'" for scheme in schemes)
            raise ArgumentError(
                f"sizes names axes of the scheme. '{name}' is none of {listed}. "
                "Use the names that stand there."
            )
    return [
        scheme.with_sizes({name: size for name, size in said.items() if name in own})
        for scheme, own in zip(schemes, names, strict=True)
    ]


def _check_known(scheme: Scheme) -> None:
    """Refuse an axis of several unknown parts, with the option that says one of them."""
    for axis in scheme.parsed:
        unknown = [part.name for part in axis if part.size is None]
        if len(unknown) > 1:
            raise ArgumentError(
                "In parentheses at most one size may be unknown. "
                f"'{unknown[0]}' and '{unknown[1]}' are in '{scheme.axes}'. "
                f"Say one of them, as in --sizes {unknown[0]}=4."
            )


def _sizes_said(text: str) -> dict[str, int]:
    """``"g=2,c=4"`` as a dict."""
    found: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,18})\s*", word)
        if match is None:
            raise ArgumentError(
                f"Sizes are names with whole numbers. '{text}' came. Write them as g=2,c=4."
            )
        if found.setdefault(match[1], int(match[2])) != int(match[2]):
            raise ArgumentError(
                f"Each name has one size. '{text}' says two of {match[1]}. Leave one out."
            )
    return found


def with_article(value: object, *, begins: bool = True) -> str:
    """What came, in words that begin a sentence or stand in it.

    >>> with_article(3), with_article("...", begins=False)
    ('An int', 'a str')
    """
    kind = type(value).__name__
    article = "An" if kind[0].lower() in "aeiou" else "A"
    return f"{article if begins else article.lower()} {kind}"
