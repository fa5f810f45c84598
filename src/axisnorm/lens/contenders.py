"""What a benchmark times at one shape: axisnorm's calls, what people run today, and a copy.

Today's is torch's own function where a named norm computes the same at the shape, else the formula
as people write it in torch operations; without torch, in NumPy's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from .. import functional, reference
from ..presets import PRESETS
from ..scheme import Scheme
from .explain import Explanation, named_norms
from .family import reasons
from .half_types import HALF_TYPES
from .meaning import Meaning, alike
from .timing import Call

__all__ = ["Contender", "Inputs", "contenders", "numpy_inputs", "torch_inputs"]

Array = Any
"""A numpy.ndarray or a torch.Tensor."""


@dataclass(frozen=True)
class Contender:
    """A call that is timed."""

    name: str
    """``"axisnorm"``, ``"named"``, ``"torch"``, ``"numpy"`` or ``"copy"``."""
    code: str
    """The call as it is written, with F for torch.nn.functional, or the formula."""
    call: Call
    written_out: bool = False
    """Whether it is no function of its library but a formula of its operations."""


@dataclass(frozen=True)
class Inputs:
    """The arrays of one benchmark."""

    x: Array
    weight: Array | None = None
    bias: Array | None = None
    running: Mapping[str, Array] = field(default_factory=dict)
    """``running_mean`` and ``running_var``, where they normalize or move."""
    grad: Array | None = None
    """Of the output, where forward and backward are timed."""

    @property
    def leaves(self) -> dict[str, Array]:
        """What has a gradient."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias}
        return {name: array for name, array in named.items() if array is not None}


def torch_inputs(
    meaning: Meaning, explanation: Explanation, dtype: str, *, channels_last: bool, backward: bool
) -> Inputs:
    """Standard normal tensors, the same in every run."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Array:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    def positive(shape: tuple[int, ...]) -> Array:
        return normal(shape).abs_().add_(0.5)

    def tensor() -> Array:
        x = normal(explanation.shape)
        if not channels_last:
            return x
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last)

    given = _filled(meaning, explanation, tensor(), normal, positive)
    if not backward:
        return given
    for leaf in given.leaves.values():
        leaf.requires_grad_()
    return replace(given, grad=tensor())


def numpy_inputs(
    meaning: Meaning, explanation: Explanation, dtype: str, *, channels_last: bool
) -> Inputs:
    """Standard normal arrays, the same in every run."""
    random = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> Array:
        return random.standard_normal(shape, np.float32).astype(dtype)

    def positive(shape: tuple[int, ...]) -> Array:
        return abs(normal(shape)) + np.asarray(0.5, dtype)

    x = normal(explanation.shape)
    if channels_last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    return _filled(meaning, explanation, x, normal, positive)


def _filled(
    meaning: Meaning, explanation: Explanation, x: Array, normal: Any, positive: Any
) -> Inputs:
    sizes, scheme = explanation.sizes, explanation.scheme
    weight = positive(sizes.affine_shape) if explanation.has("weight") else None
    bias = normal(sizes.affine_shape) if explanation.has("bias") else None
    # What training stores is timed where torch stores the same.
    as_torch = scheme.momentum is not None and scheme.running_correction == 1
    running = {}
    if scheme.statistics == "running" or (as_torch and meaning.keeps_running):
        shape = sizes.running_shape
        running = {"running_mean": normal(shape), "running_var": positive(shape)}
    return Inputs(x, weight, bias, running)


def contenders(
    meaning: Meaning, explanation: Explanation, dtype: str, given: Inputs
) -> list[Contender]:
    """Whose calls are timed: axisnorm's first, then today's, a copy last.

    A scheme in the notation is timed as :func:`axisnorm.normalize` takes it, and as the function
    that computes the same, where there is one; what came by a name, as that function alone.
    """
    in_numpy = isinstance(given.x, np.ndarray)
    today, copy = (_numpy_today, _numpy_copy) if in_numpy else (_torch_today, _torch_copy)
    found = [*_own(meaning, dtype, given), today(meaning, explanation, dtype, given)]
    if given.grad is not None:
        found = [replace(one, call=_with_backward(one.call, given)) for one in found]
    return [*found, copy(given)]


def _with_backward(forward: Call, given: Inputs) -> Call:
    import torch

    leaves = list(given.leaves.values())
    return lambda: torch.autograd.grad(forward(), leaves, given.grad)


def _torch_copy(given: Inputs) -> Contender:
    import torch

    x = given.x.detach()
    y = torch.empty_like(x)
    if given.grad is None:
        return Contender("copy", "y.copy_(x)", lambda: y.copy_(x))
    dx, dy = torch.empty_like(x), given.grad
    return Contender("copy", "y.copy_(x), dx.copy_(dy)", lambda: (y.copy_(x), dx.copy_(dy)))


def _numpy_copy(given: Inputs) -> Contender:
    y = np.empty_like(given.x)
    return Contender("copy", "numpy.copyto(y, x)", partial(np.copyto, y, given.x))


# --------------------------------------------------------------------------------------------
# The named norms that compute the same


@dataclass(frozen=True)
class _Named:
    """A norm of torch.nn that computes what is benchmarked, at its shape and in its type."""

    name: str
    """As :func:`~axisnorm.lens.explain.named_norms` says it, without numbers: ``"LayerNorm"``."""
    scheme: Scheme
    numbers: tuple[int, ...]
    """Those in its name: the shape of a LayerNorm, the groups of a GroupNorm."""


def _named(meaning: Meaning, dtype: str, fields: tuple[str, ...] = ()) -> Iterator[_Named]:
    """The named norms that compute the same, first those that do so at other sizes too.

    ``fields`` of the scheme are arguments of the norm's function too, as eps is of all.
    """
    own = meaning.scheme
    found = []
    for said, norm in named_norms(meaning.sizes.shape):
        constants = {name: getattr(own, name) for name in ("eps", *fields)}
        scheme = norm.replace(affine=norm.affine if own.affine else "", **constants)
        other = Meaning.of(replace(meaning.subject, scheme=scheme), meaning.sizes.shape)
        if not alike(meaning, other, dtype):
            continue
        if _is_refused(said, meaning, dtype):
            continue
        if said.startswith("RMSNorm") and "bias" in (meaning.subject.parameters or ()):
            continue  # which its function has not
        name = re.sub(r"\(.*\)", "", said)
        found.append(_Named(name, scheme, tuple(int(n) for n in re.findall(r"\d+", said))))
    shape = meaning.sizes.shape
    words = meaning.subject.name.replace("_", "").lower()

    def surprise(norm: _Named) -> tuple[bool, bool]:
        by_chance = reasons(own, norm.scheme, shape) or reasons(
            own, norm.scheme, shape, affine=True
        )
        return norm.name.lower() not in words, bool(by_chance)

    return iter(sorted(found, key=surprise))


def _is_refused(said: str, meaning: Meaning, dtype: str) -> bool:
    """Whether torch's function raises, for an eps or for but one value to take statistics of."""
    if not said.startswith(("BatchNorm", "InstanceNorm", "GroupNorm")):
        return False
    if said.startswith("GroupNorm"):
        # It counts the samples in.
        return meaning.sizes.shape[0] * meaning.group_size == 1
    too_few = meaning.group_size == 1 and not meaning.running
    return too_few or reference.resolve_eps(meaning.scheme, dtype) <= 0


def _arguments(norm: _Named, meaning: Meaning, dtype: str, given: Inputs) -> dict[str, Any]:
    """What the norm's function is given after x, in its order, by torch's names."""
    sizes = norm.scheme.sizes(meaning.sizes.shape)
    affine = {
        name: _shaped(array, sizes.affine_shape)
        for name, array in (("weight", given.weight), ("bias", given.bias))
    }
    eps = {"eps": reference.resolve_eps(norm.scheme, dtype)}
    kind = norm.name.removesuffix(", channels last")
    if kind == "LayerNorm":
        return {"normalized_shape": norm.numbers, **affine, **eps}
    if kind == "RMSNorm":
        return {"normalized_shape": norm.numbers, "weight": affine["weight"], **eps}
    if kind == "GroupNorm":
        return {"num_groups": norm.numbers[0], **affine, **eps}
    if kind == "LayerNorm2d":
        return {**affine, **eps}
    if kind == "functional.normalize":
        return {"dim": norm.numbers[0], **eps}
    running = {
        name: _shaped(array, sizes.running_shape) for name, array in _own_running(given).items()
    } or {"running_mean": None, "running_var": None}
    if kind == "InstanceNorm":
        return {**running, **affine, **eps}
    moving = {"momentum": norm.scheme.momentum} if given.running and not meaning.running else {}
    return {**running, **affine, "training": not meaning.running, **moving, **eps}


_FUNCTIONS = {
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
    "GroupNorm": "group_norm",
    "InstanceNorm": "instance_norm",
    "BatchNorm": "batch_norm",
    "BatchNorm in eval": "batch_norm",
}
"""Of torch.nn.functional and of axisnorm, for channels first."""


def _shaped(array: Array | None, shape: tuple[int, ...]) -> Array | None:
    return array if array is None or array.shape == shape else array.reshape(shape)


def _own_running(given: Inputs) -> dict[str, Array]:
    """A copy for each contender, which may change it."""
    return {name: array + 0 for name, array in given.running.items()}


def _written(function: str, arguments: Mapping[str, Any], x: str = "x") -> str:
    """A call as it is written."""
    words = [x]
    for name, value in arguments.items():
        if value is None or hasattr(value, "dtype"):
            words.append("None" if value is None else name)
        elif name in ("normalized_shape", "num_groups", "scheme"):
            words.append(repr(value))
        else:
            words.append(f"{name}={value!r}")
    return f"{function}({', '.join(words)})"


# --------------------------------------------------------------------------------------------
# axisnorm's calls


def _own(meaning: Meaning, dtype: str, given: Inputs) -> Iterator[Contender]:
    in_notation = "[" in meaning.subject.name
    function, arguments = _own_function(meaning, dtype, given)
    if function is None or in_notation:
        known = in_notation or PRESETS.get(meaning.subject.name) == meaning.scheme
        general: dict[str, Any] = {
            "scheme": meaning.subject.name if known else str(meaning.scheme),
            **{name: array for name, array in given.leaves.items() if name != "x"},
        }
        running = _own_running(given)
        code = _written("axisnorm.normalize", general)
        code = code[:-1] + "".join(f", {name}={name}" for name in running) + ")"
        call = partial(functional.normalize, given.x, **general, **running)
        yield Contender("axisnorm", code, call)
    if function is not None:
        call = partial(getattr(functional, function), given.x, **arguments)
        name = "named" if in_notation else "axisnorm"
        yield Contender(name, _written(f"axisnorm.{function}", arguments), call)


def _own_function(meaning: Meaning, dtype: str, given: Inputs) -> tuple[str | None, dict[str, Any]]:
    """The function of axisnorm that computes the same, and its arguments."""
    more = () if meaning.scheme.center else ("weight_offset", "rounding")
    for norm in _named(meaning, dtype, more):
        function = {**_FUNCTIONS, "LayerNorm2d": "layer_norm_2d"}.get(norm.name)
        if function is not None:
            default = Scheme.rms_norm()
            own = {name: getattr(meaning.scheme, name) for name in more}
            own = {name: value for name, value in own.items() if value != getattr(default, name)}
            return function, {**_arguments(norm, meaning, dtype, given), **own}
    return None, {}


# --------------------------------------------------------------------------------------------
# What people run today


def _torch_today(
    meaning: Meaning, explanation: Explanation, dtype: str, given: Inputs
) -> Contender:
    import torch.nn.functional as F

    for norm in _named(meaning, dtype):
        arguments = _arguments(norm, meaning, dtype, given)
        function = {**_FUNCTIONS, "functional.normalize": "normalize"}.get(norm.name)
        if function is not None:
            code = _written(f"F.{function}", arguments)
            return Contender("torch", code, partial(getattr(F, function), given.x, **arguments))
        # The channels are in another place than torch's function has them.
        first, last = -1, 1
        kind = norm.name.removesuffix(", channels last")
        if kind == "LayerNorm2d":
            first, last = 1, -1
            arguments = {"normalized_shape": (given.x.shape[1],), **arguments}
            kind = "LayerNorm"
        moved = getattr(F, _FUNCTIONS[kind])
        code = _written(f"F.{_FUNCTIONS[kind]}", arguments, f"x.movedim({first}, {last})")
        return Contender(
            "torch",
            f"{code}.movedim({last}, {first})",
            _moved(moved, given.x, first, last, arguments),
            written_out=True,
        )
    call = _formula(meaning, dtype, given, _TORCH)
    return Contender("torch", _said(explanation), call, written_out=True)


def _moved(function: Any, x: Array, first: int, last: int, arguments: dict[str, Any]) -> Call:
    return lambda: function(x.movedim(first, last), **arguments).movedim(last, first)


def _numpy_today(
    meaning: Meaning, explanation: Explanation, dtype: str, given: Inputs
) -> Contender:
    call = _formula(meaning, dtype, given, _NUMPY)
    return Contender("numpy", _said(explanation), call, written_out=True)


def _said(explanation: Explanation) -> str:
    return explanation.formula.splitlines()[0]


@dataclass(frozen=True)
class _Operations:
    """What torch and NumPy call by different names."""

    module: str
    cast: str
    correction: str


_TORCH = _Operations("torch", "to", "correction")
_NUMPY = _Operations("numpy", "astype", "ddof")


def _formula(meaning: Meaning, dtype: str, given: Inputs, operations: _Operations) -> Call:
    """The formula in operations on whole tensors, half types in float32, as models write it."""
    import importlib

    xp: ModuleType = importlib.import_module(operations.module)
    scheme, sizes = meaning.scheme, meaning.sizes
    eps = reference.resolve_eps(scheme, dtype)
    # Over no axes torch would reduce over all: each group is one element of a further axis.
    axes, further = (sizes.layout.reduced, ()) if sizes.layout.reduced else ((-1,), (1,))
    own = getattr(xp, dtype)
    wide = xp.float32 if dtype in HALF_TYPES else own
    statistics, affine = (*sizes.running_expanded, *further), (*sizes.affine_expanded, *further)
    running = [_shaped(array, statistics) for array in given.running.values()]
    weight, bias = (_shaped(array, affine) for array in (given.weight, given.bias))

    def cast(array: Array, kind: Any) -> Array:
        return array if array.dtype == kind else getattr(array, operations.cast)(kind)

    def call() -> Array:
        x = cast(given.x, wide).reshape((*sizes.expanded, *further))
        if meaning.running:
            mean, var = (cast(array, wide) for array in running)
        elif scheme.center or scheme.scale == "std":
            mean = x.mean(axes, keepdims=True)
            var = x.var(axes, keepdims=True, **{operations.correction: scheme.correction})
        elif scheme.scale == "l2":
            var = (x * x).sum(axes, keepdims=True)
        elif scheme.correction:
            var = (x * x).sum(axes, keepdims=True) / (sizes.group_size - scheme.correction)
        else:
            var = (x * x).mean(axes, keepdims=True)
        value = x - mean if scheme.center else x
        if scheme.scale == "sqrt_std":
            var = xp.sqrt(var)
        if scheme.eps_placement == "variance":
            below = var + eps if scheme.scale == "var" else xp.sqrt(var + eps)
        else:
            root = var if scheme.scale == "var" else xp.sqrt(var)
            below = root + eps if scheme.eps_placement == "std" else root.clip(eps, None)
        y = value / below
        if scheme.rounding == "before_affine":
            y = cast(y, own)
        if weight is not None:
            factor = cast(weight, y.dtype)
            y = y * (factor + scheme.weight_offset if scheme.weight_offset else factor)
        if bias is not None:
            y = y + cast(bias, y.dtype)
        return cast(y, own).reshape(sizes.shape)

    return call
