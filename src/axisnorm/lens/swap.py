"""Replace the norms of a model by this library's where they are shown to be the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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

from .. import _route, nn
from ..scheme import ArgumentError
from .audit import Audit, Norm, audit
from .explain import with_article
from .identify import tolerance
from .models.observe import Call, observed, run, unchanged, uncompiled
from .models.replaced import Left, Replaced, Replacements
from .swapping.calls import Calls
from .swapping.classes import Proof, door_name, generated, originals
from .swapping.probing import NoNorm, NotProved
from .swapping.proving import attributes_of, check_drop_in, could_be_a_norm, prove
from .swapping.sums import SUM_NORMS, Block, block_of

__all__ = ["Left", "Replaced", "Swap", "swap"]

DROP_INS: Mapping[type, type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(nn, name)
    for name in (
        "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
        "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    )
}  # fmt: skip
"""By exact type: a subclass may have changed anything, and is probed."""


@dataclass(frozen=True)
class Swap(Replacements):
    """What was replaced in a model, what was left, and why."""

    audit: Audit
    _undo: list[_Change] = field(repr=False)

    def undo(self) -> None:
        """Give every module its class back. Parameters and buffers never changed.

        A module whose class has changed once more since then stays as it is.
        """
        _restore(self._undo)

    def __repr__(self) -> str:
        return f"Swap({self.model}: {len(self.replaced)} replaced, {len(self.left)} left)"


def swap(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Swap:
    """Replace in place the norms that are shown to compute what this library's do.

    The model is audited on the inputs. A norm is replaced if this library's forward agrees with
    its own, in value and in every gradient, on fresh inputs that tell norms apart, and in value on
    the very input that it had. A module of exactly one of torch.nn's classes gets the class of
    :mod:`axisnorm.nn`; one of any other class, whatever it is called, a subclass of its own whose
    forward computes by this library what was proved, and by its own code everything else. A block
    that ends in the norm of a residual sum gives the norm the two terms, if its forward does
    nothing but call modules and add.

    Modules keep their identity, parameters, buffers and hooks; ``isinstance``, ``state_dict`` and
    the train or eval mode are as before. Why a norm is left stands in ``left``.

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
    calls = Calls.of(model, args, kwargs)
    left: list[Left] = []
    wanted = _wanted(model, found, calls, left)
    before, differences = _rehearse(model, args, kwargs, wanted)
    replaced: list[Replaced] = []
    changed: list[_Change] = []
    try:
        for path, plan in wanted.items():
            largest, allowed = differences[path]
            if not largest <= allowed:
                reason = f"the outputs differ by {largest:.2g}, rounding explains {allowed:.2g}"
                if math.isnan(allowed):
                    reason = "its output on this input holds NaN or infinity"
                left.append(Left(path, plan.module_kind.__name__, reason))
                continue
            changed.append(_Change.of(plan.module, plan.kind))
            replaced.append(Replaced(path, plan.module_kind.__name__, plan.home, largest, allowed))
        replaced = _with_sums(model, calls, replaced, changed)
        with unchanged(model):
            after = run(model, args, kwargs)
    except BaseException:
        _restore(changed)
        raise
    return Swap(
        type(model).__name__,
        tuple(replaced),
        tuple(left),
        _largest_difference(before, after),
        found,
        changed,
    )


@dataclass(frozen=True)
class _Change:
    """A module's class, before and after."""

    module: torch.nn.Module
    before: type
    after: type

    @classmethod
    def of(cls, module: torch.nn.Module, after: type) -> _Change:
        change = cls(module, type(module), after)
        module.__class__ = after
        return change


def _restore(changed: list[_Change]) -> None:
    while changed:
        change = changed.pop()
        if type(change.module) is change.after:
            change.module.__class__ = change.before


# --------------------------------------------------------------------------------------------
# What is replaced by what


@dataclass(frozen=True)
class _Plan:
    module: torch.nn.Module
    module_kind: type
    kind: type[torch.nn.Module]
    """The class that it gets."""
    home: str
    """What computes then."""


def _wanted(
    model: torch.nn.Module, found: Audit, calls: Calls, left: list[Left]
) -> dict[str, _Plan]:
    """The norms that were proved, in the order in which they ran; the rest goes to ``left``."""
    known: dict[Any, Proof | type[torch.nn.Module] | NotProved] = {}
    norms = {norm.path: norm for norm in found.norms if norm.kind == "module"}
    # What is called or written out in a module's forward, by the path of that module.
    inside = {norm: norm.path.rpartition(":")[0] for norm in found.norms if norm.kind != "module"}
    bare = [
        path for path in inside.values() if next(model.get_submodule(path).children(), None) is None
    ]
    paths = dict.fromkeys([*norms, *bare])
    # Norms that no audit knows, by what they compute.
    paths |= dict.fromkeys(
        path
        for path, module in calls.leaves(model)
        if could_be_a_norm(module) or _is_called_norm(module)
    )
    sharded = {id(module) for one in model.modules() if _shards(one) for module in one.modules()}
    wanted: dict[str, _Plan] = {}
    for path in sorted(paths, key=calls.order):
        module, norm = model.get_submodule(path), norms.get(path)
        try:
            _check_module(module, norm, is_sharded=id(module) in sharded)
            wanted[path] = _plan(module, norm, path, calls, known)
        except NotProved as refusal:
            known_as_norm = norm is not None or _is_called_norm(module) or path in inside.values()
            if known_as_norm or not isinstance(refusal, NoNorm):
                left.append(Left(path, type(module).__name__, str(refusal)))
    # What a module computes is replaced with it, or left for its reason.
    settled = {*wanted, *(one.path for one in left)}
    for norm, path in inside.items():
        if path not in settled:
            what = "a function call" if norm.kind == "function" else "written out in a forward"
            left.append(Left(norm.path, norm.cls, f"{what}, not a module"))
    return wanted


def _shards(module: torch.nn.Module) -> bool:
    """Whether FSDP, of either kind, keeps the parameters of this module and those inside."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def _is_called_norm(module: torch.nn.Module) -> bool:
    """Whether somebody will ask why it was left."""
    kind = type(module)
    own = not kind.__module__.startswith(("torch.", "axisnorm."))
    return own and "norm" in kind.__name__.lower() and next(module.children(), None) is None


def _plan(
    module: torch.nn.Module,
    norm: Norm | None,
    path: str,
    calls: Calls,
    known: dict[Any, Proof | type[torch.nn.Module] | NotProved],
) -> _Plan:
    """What a norm becomes; raises NotProved with the reason where it stays."""
    kind = type(module)
    if kind in DROP_INS:
        assert norm is not None
        _check_audited(norm)
    signatures = calls.signatures(path, bare=kind not in DROP_INS)
    key = (kind, attributes_of(module), frozenset(signatures))
    if key not in known:
        try:
            if kind in DROP_INS:
                for signature in signatures:
                    check_drop_in(module, DROP_INS[kind].forward, signature)
                known[key] = DROP_INS[kind]
            else:
                known[key] = prove(module, signatures)
        except NotProved as refusal:
            # That its formula has no kernel says more than that it is not another formula.
            known[key] = type(refusal)(_without_kernel(norm) or str(refusal))
    result = known[key]
    if isinstance(result, NotProved):
        raise result
    if isinstance(result, Proof):
        home = f"axisnorm.{door_name(result.formula)}"
        return _Plan(module, kind, generated(kind, result), home)
    return _Plan(module, kind, result, f"{nn.__name__}.{result.__name__}")


def _check_module(module: torch.nn.Module, norm: Norm | None, *, is_sharded: bool) -> None:
    """Refuse a module that is more than its class and its parameters."""
    kind = type(module)
    codes = {finding.code for finding in norm.findings} if norm is not None else set()
    tensors = [*module.parameters(), *module.buffers()]
    reasons = {
        "is this library's already": kind.__module__.startswith("axisnorm.") or kind in originals,
        "bypassed in eval: torch's fused encoder layer computes it itself": "bypassed" in codes,
        "did not run on this input": "not-run" in codes,
        "FSDP shards its parameters": is_sharded,
        "its parameters are parametrized": torch.nn.utils.parametrize.is_parametrized(module),
        "it is quantized": "quantized" in kind.__module__,
        "its forward was replaced on the instance": "forward" in vars(module),
        "has forward hooks": module._forward_pre_hooks or module._forward_hooks,
        "has backward hooks": module._backward_pre_hooks or module._backward_hooks,
        "its parameters are not plain tensors": any(
            type(tensor) not in (torch.nn.Parameter, torch.Tensor) for tensor in tensors
        ),
        "not on the CPU": any(tensor.device.type != "cpu" for tensor in tensors),
    }
    for reason, holds in reasons.items():
        if holds:
            # Of a module that no audit calls a norm, nothing is known yet.
            raise NotProved(reason) if norm is not None else NoNorm(reason)


def _check_audited(norm: Norm) -> None:
    """Refuse one of torch.nn's norms that was not seen to compute what it says, or is fast."""
    if norm.scheme is None or not norm.verified:
        problem = next((f.message for f in norm.findings if f.code in
                        ("not-verified", "declared-mismatch")), "it was not verified")  # fmt: skip
        raise NotProved(problem.rstrip("."))
    reason = _without_kernel(norm)
    if reason:
        raise NotProved(reason)


def _without_kernel(norm: Norm | None) -> str:
    """That this library has no kernel for what a norm was shown to compute, empty if it has."""
    if norm is None or norm.scheme is None or not norm.verified:
        return ""
    assert norm.shape is not None
    assert norm.dtype is not None
    route = _route.choose(
        norm.scheme,
        norm.shape,
        norm.dtype,
        affine=bool(norm.affine_shape),
        running=norm.scheme.statistics == "running",
    )
    native = route.engine == "native"
    return "" if native else f"no native kernel ({route.reason}): torch's own is faster"


def _with_sums(
    model: torch.nn.Module, calls: Calls, replaced: list[Replaced], changed: list[_Change]
) -> list[Replaced]:
    """Give blocks that end in the norm of a sum, and their norms, classes that know it."""
    fused = set()
    known: dict[Any, Block | None] = {}
    befores = {id(change.module): change.before for change in changed}
    for path, block in list(model.named_modules()):
        norms = {
            name: befores[id(child)]
            for name, child in block.named_children()
            if befores.get(id(child)) in SUM_NORMS
        }
        inputs = calls.inputs(path)
        if not norms or inputs is None:
            continue
        children = tuple((n, type(c), attributes_of(c)) for n, c in block.named_children())
        key = (type(block), attributes_of(block), children, tuple(inputs))
        if key not in known:
            known[key] = block_of(block, norms, inputs)
        found = known[key]
        if found is not None:
            norm = block.get_submodule(found.norm)
            changed += [_Change.of(block, found.kind), _Change.of(norm, found.norm_kind)]
            fused.add(id(norm))
    return [
        replace(one, after="axisnorm.nn.AddLayerNorm" if one.before == "LayerNorm"
                else "axisnorm.nn.AddRMSNorm")
        if id(model.get_submodule(one.path)) in fused else one
        for one in replaced
    ]  # fmt: skip


def _rehearse(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Mapping[str, _Plan],
) -> tuple[Any, dict[str, tuple[float, float]]]:
    """Run the model as it is, and beside each wanted module its replacement on the same input."""
    found: dict[str, tuple[float, float]] = dict.fromkeys(wanted, (math.inf, 0.0))
    ran: set[str] = set()

    def finished(call: Call, output: Any) -> None:
        if call.path not in wanted:
            return
        plan = wanted[call.path]
        # The replacement must neither count a batch twice nor draw random numbers.
        with unchanged(plan.module):
            again = plan.kind.forward(plan.module, *call.args, **call.kwargs)
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
            a, b = _dense(a), _dense(b)
            difference = (a.double() - b.double()).abs()
            # Where both are the same infinity or both NaN, nothing changed.
            same = (a == b) | ((a != a) & (b != b))
            largest = max(largest, float(torch.where(same, 0.0, difference).nan_to_num(
                math.inf).max()))  # fmt: skip
    return largest


def _dense(output: torch.Tensor) -> torch.Tensor:
    """The elements of any tensor, as one that can be compared."""
    if output.is_quantized:
        return output.dequantize()
    if output.is_nested:
        return torch.cat([part.reshape(-1) for part in output.unbind()])
    if output.layout is not torch.strided:
        output = output.to_dense()
    return torch.view_as_real(output) if output.is_complex() else output


def _plain(output: Any) -> Any:
    """Outputs of transformers as the mappings that they are."""
    return dict(output) if isinstance(output, Mapping) else output
