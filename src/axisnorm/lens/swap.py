"""Replace the norms of a model by this library's where they are shown to be the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "swap changes a model of torch. It is not installed. Run: pip install 'axisnorm[torch]'",
        name=error.name,
    ) from error
from torch.utils._pytree import tree_leaves

from .. import _route, functional, nn
from ..scheme import ArgumentError
from .audit import Audit, Norm, audit
from .explain import with_article
from .identify import tolerance
from .models.observe import Call, observed, run, unchanged, uncompiled
from .result import Result

__all__ = ["Left", "Replaced", "Swap", "swap"]

DROP_INS: Mapping[type, type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(nn, name)
    for name in (
        "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
        "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    )
}  # fmt: skip
"""By exact type: a subclass may have changed anything."""

_ROUNDED_FIRST = (
    "llama.LlamaRMSNorm", "mistral.MistralRMSNorm", "mixtral.MixtralRMSNorm",
    "qwen2.Qwen2RMSNorm", "qwen2_moe.Qwen2MoeRMSNorm", "qwen3.Qwen3RMSNorm",
    "qwen3_moe.Qwen3MoeRMSNorm", "phi3.Phi3RMSNorm", "deepseek_v3.DeepseekV3RMSNorm",
    "granite.GraniteRMSNorm", "smollm3.SmolLM3RMSNorm", "glm.GlmRMSNorm", "mamba.MambaRMSNorm",
)  # fmt: skip
FOREIGN: Mapping[str, tuple[str, float]] = {
    **dict.fromkeys(_ROUNDED_FIRST, ("before_affine", 0.0)),
    "olmo2.Olmo2RMSNorm": ("once", 0.0),
    "gemma.GemmaRMSNorm": ("once", 1.0),
    "gemma2.Gemma2RMSNorm": ("once", 1.0),
    "gemma3.Gemma3RMSNorm": ("once", 1.0),
}
"""RMSNorm classes of transformers.models by module and name: rounding, and weight offset.

Their weight is ``weight``. Which rounding they have only shows in half types, so it is known
here and not concluded from a float32 input.
"""


@dataclass(frozen=True)
class Replaced:
    """A module that computes by this library now."""

    path: str
    before: str
    """Its class before."""
    after: str
    largest_difference: float
    """Between its outputs before and after, on the inputs that it had in the model."""
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Left:
    """A norm that stays as it was."""

    path: str
    cls: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Swap(Result):
    """What was replaced in a model, what was left, and why."""

    kind: ClassVar[str] = "swap"

    model: str
    audit: Audit
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    largest_difference: float
    """Between the model's outputs before and after."""
    _undo: list[tuple[torch.nn.Module, type]] = field(repr=False)
    seconds: tuple[float, float] | None = None
    """Of one forward before and after, where they were measured: medians of up to seven."""

    def undo(self) -> None:
        """Give every module its class back. Parameters and buffers never changed."""
        _restore(self._undo)

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            "model": self.model,
            "replaced": [replaced.to_dict() for replaced in self.replaced],
            "left": [left.to_dict() for left in self.left],
            "largest_difference": self.largest_difference,
            "seconds": None if self.seconds is None else list(self.seconds),
        }

    def __repr__(self) -> str:
        return f"Swap({self.model}: {len(self.replaced)} replaced, {len(self.left)} left)"


def swap(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Swap:
    """Replace in place the norms that are shown to compute what this library's do.

    The model is audited on the inputs. A norm is replaced if its class is exactly one of
    torch.nn's (or a known one of transformers), if it was shown to compute what it declares, and
    if this library's forward gives its output again on the very input that it had. Modules keep
    their identity, parameters, buffers and hooks; ``isinstance`` and ``state_dict`` are as before.

    Args:
        model: the model, changed in place.
        args: inputs of its forward, on which everything is verified.
        kwargs: as args.

    Raises:
        ArgumentError: there is no input. Whatever is raised, the model is as before.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    >>> swapped = swap(model, torch.randn(2, 3, 4))
    >>> [(r.path, r.after) for r in swapped.replaced], swapped.largest_difference < 1e-5
    ([('1', 'axisnorm.nn.LayerNorm')], True)
    >>> swapped.undo()
    >>> type(model[1]) is torch.nn.LayerNorm
    True
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"swap changes a torch.nn.Module. {with_article(model)} came. Give the model."
        )
    if not args and not kwargs:
        raise ArgumentError(
            "swap replaces only what it has verified on inputs. None came. "
            "Call swap(model, x) with inputs of its forward."
        )
    model = uncompiled(model)
    found = audit(model, *args, **kwargs)
    left: list[Left] = []
    wanted: dict[str, tuple[torch.nn.Module, type[torch.nn.Module], Callable[..., Any]]] = {}
    for norm in found.norms:
        if norm.kind == "function":
            left.append(Left(norm.path, norm.cls, "a function call, not a module"))
            continue
        module = model.get_submodule(norm.path)
        reason = _reason(norm, module)
        if reason:
            left.append(Left(norm.path, norm.cls, reason))
        else:
            wanted[norm.path] = (module, type(module), _replacement(type(module)).forward)

    before, differences = _rehearse(model, args, kwargs, wanted)
    replaced: list[Replaced] = []
    changed: list[tuple[torch.nn.Module, type]] = []
    try:
        for path, (module, kind, _) in wanted.items():
            largest, allowed = differences[path]
            if not largest <= allowed:
                reason = f"the outputs differ by {largest:.2g}, rounding explains {allowed:.2g}"
                left.append(Left(path, kind.__name__, reason))
                continue
            changed.append((module, kind))
            new = _replacement(kind)
            module.__class__ = new
            home = f"{nn.__name__}.{new.__name__}" if kind in DROP_INS else "axisnorm.rms_norm"
            replaced.append(Replaced(path, kind.__name__, home, largest, allowed))
        with unchanged(model):
            after = run(model, args, kwargs)
    except BaseException:
        _restore(changed)
        raise
    return Swap(
        type(model).__name__,
        found,
        tuple(replaced),
        tuple(left),
        _largest_difference(before, after),
        changed,
    )


def _restore(changed: list[tuple[torch.nn.Module, type]]) -> None:
    while changed:
        module, kind = changed.pop()
        module.__class__ = kind


def _reason(norm: Norm, module: torch.nn.Module) -> str:
    """Why a norm is left as it is, empty if it can be replaced."""
    kind = type(module)
    if kind.__module__.startswith("axisnorm."):
        return "is this library's already"
    codes = {finding.code for finding in norm.findings}
    if "bypassed" in codes:
        return "bypassed in eval: torch's fused encoder layer computes it itself"
    if "not-run" in codes:
        return "did not run on this input"
    if kind not in DROP_INS and _foreign_name(kind) not in FOREIGN:
        return "not exactly a class that is known"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if module._forward_pre_hooks or module._forward_hooks:
        return "has forward hooks"
    if module._backward_pre_hooks or module._backward_hooks:
        return "has backward hooks"
    tensors = [*module.parameters(), *module.buffers()]
    if any(type(tensor) not in (torch.nn.Parameter, torch.Tensor) for tensor in tensors):
        return "its parameters are not plain tensors"
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return "not on the CPU"
    if norm.scheme is None or not norm.verified:
        problem = next((f.message for f in norm.findings if f.code in
                        ("not-verified", "declared-mismatch")), "it was not verified")  # fmt: skip
        return problem.rstrip(".")
    if kind not in DROP_INS:
        rounding, offset = FOREIGN[_foreign_name(kind)]
        scheme = norm.scheme.replace(rounding=rounding)
        if scheme.center or scheme.weight_offset != offset or scheme.scale != "auto":
            return f"computes '{norm.scheme}', which is not what its class is known for"
    assert norm.shape is not None
    assert norm.dtype is not None
    route = _route.choose(
        norm.scheme,
        norm.shape,
        norm.dtype,
        affine=bool(norm.affine_shape),
        running=norm.scheme.statistics == "running",
    )
    if route.engine != "native":
        return f"no native kernel ({route.reason}): torch's own is faster"
    return ""


def _rehearse(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Mapping[str, tuple[torch.nn.Module, type, Callable[..., Any]]],
) -> tuple[Any, dict[str, tuple[float, float]]]:
    """Run the model as it is, and beside each wanted module its replacement on the same input."""
    found: dict[str, tuple[float, float]] = dict.fromkeys(wanted, (math.inf, 0.0))
    ran: set[str] = set()

    def finished(call: Call, output: Any) -> None:
        if call.path not in wanted:
            return
        module, _, forward = wanted[call.path]
        # The replacement must neither count a batch twice nor draw random numbers.
        with unchanged(module):
            again = forward(module, *call.args, **call.kwargs)
        difference = _largest_difference(output, again)
        allowed = math.inf
        if isinstance(output, torch.Tensor):
            largest = float(output.abs().max()) if output.numel() else 0.0
            kind = str(output.dtype).removeprefix("torch.")
            # Two computations, each with its own roundings.
            allowed = 2 * tolerance(kind, output.numel(), largest, largest)
        known = found[call.path] if call.path in ran else (0.0, allowed)
        ran.add(call.path)
        found[call.path] = (max(known[0], difference), max(known[1], allowed))

    with unchanged(model):
        output, _ = observed(model, args, kwargs, finished=finished)
    return output, found


def _largest_difference(before: Any, after: Any) -> float:
    """Between the tensors of two outputs, in float64."""
    largest = 0.0
    for a, b in zip(tree_leaves(_plain(before)), tree_leaves(_plain(after)), strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.numel():
            difference = (a.double() - b.double()).abs()
            # Where both are the same infinity or both NaN, nothing changed.
            same = (a == b) | ((a != a) & (b != b))
            largest = max(largest, float(torch.where(same, 0.0, difference).nan_to_num(
                math.inf).max()))  # fmt: skip
    return largest


def _plain(output: Any) -> Any:
    """Outputs of transformers as the mappings that they are."""
    return dict(output) if isinstance(output, Mapping) else output


# --------------------------------------------------------------------------------------------
# Classes of other libraries


def _foreign_name(kind: type) -> str:
    *home, folder, _ = ("", "", *kind.__module__.split("."))
    return f"{folder}.{kind.__name__}" if home[2:] == ["transformers", "models"] else ""


_generated: dict[type, type[torch.nn.Module]] = {}


def _replacement(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class that a module of exactly this class gets."""
    if kind in DROP_INS:
        return DROP_INS[kind]
    if kind not in _generated:
        _generated[kind] = _subclass(kind)
    return _generated[kind]


def _subclass(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of an RMSNorm class of transformers that differs in its forward only."""
    rounding, offset = FOREIGN[_foreign_name(kind)]

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return functional.rms_norm(
            hidden_states, weight.shape, weight, eps, weight_offset=offset, rounding=rounding
        )

    def reduce(self: Any, protocol: Any) -> Any:
        # The generated class has no importable name: pickles and copies are of the original.
        return object.__new__, (kind,), dict(self.__dict__)

    own = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__,
           "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}  # fmt: skip
    return type(kind.__name__, (kind,), own)
