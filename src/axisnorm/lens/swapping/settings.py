"""What the forward of a module reads beside its input and its parameters.

A proof holds for the values that were there. They are compared again at every call, so that an
eps or a flag that is changed later changes what is computed, as before the swap.
"""

from __future__ import annotations

import copy
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .probing import NotProved, fresh_copy

__all__ = ["Held", "Settings", "is_plain", "of_every_module", "settings_of", "still_hold"]

LIBRARIES = ("torch", "axisnorm", "numpy", "math", "builtins", "typing")
"""Whose own variables are no settings of a norm."""


@dataclass(frozen=True, eq=False)
class Held:
    """A value that stands in a container, which may change and has no hash."""

    owner: dict[str, Any] | None
    """The variables of a module of code; None for an attribute of the norm."""
    name: str
    value: Any


@dataclass(frozen=True)
class Settings:
    """What was there when the norm was proved."""

    plain: tuple[tuple[str, Any], ...] = ()
    """The norm's attributes."""
    inner: tuple[tuple[str, str, Any], ...] = ()
    """Attributes of its attributes, as of a configuration."""
    held: tuple[Held, ...] = ()


def still_hold(module: Any, settings: Settings) -> bool:
    """Whether everything that the forward of ``module`` reads is as it was."""
    # Loops that torch.compile reads.
    for name, value in settings.plain:
        if getattr(module, name) != value:
            return False
    for name, inner, value in settings.inner:
        if getattr(getattr(module, name), inner) != value:
            return False
    for one in settings.held:
        now = getattr(module, one.name) if one.owner is None else one.owner[one.name]
        if now != one.value:
            return False
    return True


def is_plain(value: Any) -> bool:
    """Whether a value is what it is equal to, and never changes."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _is_container(value: Any) -> bool:
    if isinstance(value, dict):
        return all(is_plain(one) or _is_container(one) for one in value.values())
    return isinstance(value, (list, set)) and all(is_plain(o) or _is_container(o) for o in value)


of_every_module = frozenset(vars(torch.nn.Module()))
"""The attributes that say nothing of a class."""


def settings_of(module: torch.nn.Module, *shapes: tuple[int, ...]) -> Settings:
    """What the module's forward reads for inputs of these shapes.

    Raises:
        NotProved: it changes a variable of its own code.
    """
    kind = type(module)
    copied = fresh_copy(module, torch.float32)
    variables = [Held(owner, name, copy.deepcopy(owner[name])) for owner, name in _variables(kind)]
    read = _watch(copied)
    inner = {
        name: _watch(value)
        for name, value in vars(copied).items()
        # One that is no copy stays as it is.
        if value is not vars(module).get(name) and _is_configuration(value)
    }
    with torch.no_grad():
        kind.forward(copied, *map(torch.zeros, shapes))
    for one in variables:
        if one.owner is not None and one.owner[one.name] != one.value:
            raise NotProved(f"its forward changes the variable '{one.name}'")
    own = {
        name: getattr(module, name)
        for name in sorted(read - of_every_module)
        if name in vars(module) or is_plain(getattr(kind, name, kind))
    }
    held = [Held(None, n, copy.deepcopy(v)) for n, v in own.items() if _is_container(v)]
    return Settings(
        tuple((name, value) for name, value in own.items() if is_plain(value)),
        tuple(
            (name, one, value)
            for name, names in inner.items()
            for one in sorted(names)
            if is_plain(value := getattr(getattr(module, name), one, names))
        ),
        (*held, *variables),
    )


def _is_configuration(value: Any) -> bool:
    own = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.Tensor, torch.nn.Module, types.ModuleType))
        and not callable(value)
        and own.__module__.split(".")[0] not in LIBRARIES
    )


def _watch(value: Any) -> set[str]:
    """The names of the attributes of ``value`` that are read from now on."""
    kind: Any = type(value)
    read: set[str] = set()

    def watched(self: Any, name: str) -> Any:
        if not name.startswith("__"):
            read.add(name)
        return kind.__getattribute__(self, name)

    try:
        watching = type(kind)(kind.__name__, (kind,), {"__getattribute__": watched})
        object.__setattr__(value, "__class__", watching)
    except TypeError:
        # A class that allows no other in its place: nothing of it is seen.
        return read
    return read


def _variables(kind: type[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """The variables of modules of code that the forward of a class reads, by their homes."""
    waiting: list[Any] = [kind.forward]
    seen: set[Any] = set()
    found: set[tuple[int, str]] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        if function.__module__.split(".")[0] in LIBRARIES:
            continue
        for owner, name in _names(function.__code__, function.__globals__, kind):
            value = owner.get(name)
            value = value.fget if isinstance(value, property) else value
            waiting.append(value)
            is_setting = value is not None and (is_plain(value) or _is_container(value))
            if is_setting and isinstance(owner, dict) and (id(owner), name) not in found:
                found.add((id(owner), name))
                yield owner, name


def _names(code: Any, variables: dict[str, Any], kind: type) -> Iterator[tuple[Any, str]]:
    """What a function's code names: variables, and what the class or another module has."""
    home: Any = None
    for one in dis.get_instructions(code):
        name = str(one.argval)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = variables.get(name)
            named = isinstance(value, types.ModuleType)
            home = vars(value) if named and _is_own(value) else None
            yield variables, name
            continue
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if home is not None:
                yield home, name
            else:
                owner = next((c for c in kind.__mro__ if name in vars(c)), kind)
                yield vars(owner), name
        if one.opname != "CACHE":
            home = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant, variables, kind)


def _is_own(module: Any) -> bool:
    return module.__name__.split(".")[0] not in LIBRARIES
