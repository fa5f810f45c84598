"""A torch model is run, and what each of its normalizations computes is held against its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import nn, reference
from ...scheme import ArgumentError, Scheme
from ..explain import statistics_dimensions, with_article
from ..identify import Identification, rivals, tell_apart
from ..progress import step
from .declared import declared_scheme
from .findings import Finding, findings_of, mixed_eps
from .foreign import eps_is_undetermined, guesses, looks_like_a_norm, looks_normalized
from .norms import Audit, Norm
from .observe import Call, observed, paths_of, timed, unchanged, uncompiled
from .operators import FUSED_ENCODER, OperatorReader, Performed
from .parameters import Parameter, parameters_of

__all__ = ["audit_module"]

VERIFIED_CALLS = 3
"""How many calls of one module are verified; later calls are counted."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def audit_module(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Audit:
    """Run a torch module as it is, on copies of the inputs, and audit it.

    Raises:
        ArgumentError: it is no torch module, or one without modules.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "audit runs a torch.nn.Module or reads a model directory. "
            f"{with_article(model)} came. Give the model itself."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError(
            "audit watches the modules of a model while they run. TorchScript has compiled "
            "them away. Audit the module that was scripted."
        )
    model = uncompiled(model)
    step("running the model")
    with unchanged(model):
        watcher = _Watcher(model)
        _, records = observed(
            model, args, kwargs, finished=watcher.finished, operator=watcher.operator
        )
    modules = {id(m): m for m in model.modules() if id(m) in watcher.seen}
    step("timing")
    spent: dict[Any, float] = {}
    seconds, of_modules = timed(model, args, kwargs, list(modules.values()))
    spent |= of_modules
    if any(map(_is_function, records)):
        spent |= _function_seconds(model, args, kwargs)
    norms = list(_norms(model, records, seconds, spent))
    findings = [finding for norm in norms for finding in norm.findings]
    findings += mixed_eps([(norm.cls, norm.eps) for norm in norms if norm.eps is not None])
    return Audit(type(model).__name__, tuple(norms), tuple(findings), seconds)


# --------------------------------------------------------------------------------------------
# One run


@dataclass
class _Record:
    """One call of a norm, as numbers: no tensor is kept."""

    key: Any
    path: str
    cls: str
    module: torch.nn.Module | None
    declared: Scheme | None
    identification: Identification | None
    shape: tuple[int, ...]
    dtype: str
    eps: float | None
    eps_undetermined: bool = False
    problem: str | None = None
    calls: int = 1
    parameters: tuple[Parameter, ...] = ()


def _is_function(record: Any) -> bool:
    return isinstance(record, _Record) and record.module is None


@dataclass(frozen=True)
class _Bypass:
    path: str


class _Watcher:
    """Turns what is observed into records, on the spot."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen: dict[int, int] = {}
        self.reader = OperatorReader()
        self.parameters = _addresses(model)

    def finished(self, call: Call, output: Any) -> None:
        call.records += self.functions(call, self.reader.end())
        module = call.module
        if module is None:
            return
        record = self.read(module, call, output)
        if record is None:
            return
        step("verifying", len(self.seen))
        # The operators inside a norm are the norm, unless it is shown to be something else.
        best = record.identification.best if record.identification else None
        if record.identification is None or (best and record.declared in (None, best.scheme)):
            call.records[:] = [r for r in call.records if not _is_function(r)]
        call.records.append(record)

    def read(self, module: torch.nn.Module, call: Call, output: Any) -> _Record | None:
        x, output = _data(call, output)
        if x is None or output is None:
            return None
        declared = declared_scheme(module, x.dim())
        if declared is not None and not _fits(declared, x, module):
            # A subclass that normalizes other axes: only what it does can tell which.
            declared = None
        if declared is None and not (
            not call.has_inner and looks_like_a_norm(module, tuple(x.shape), tuple(output.shape))
        ):
            return None
        number = self.seen[id(module)] = self.seen.get(id(module), 0) + 1
        record = _Record(
            key=id(module),
            path=call.path,
            cls=type(module).__name__,
            module=module,
            declared=declared,
            identification=None,
            shape=tuple(x.shape),
            dtype=_dtype(x),
            eps=None,
        )
        if number > VERIFIED_CALLS:
            return record
        if declared is not None:
            record.eps = reference.resolve_eps(declared, x.dtype)
        record.problem = _problem(x, output, call)
        if record.problem is None:
            if declared is None:
                _try_guesses(record, module, x, output)
            else:
                record.identification = _identify(module, call, x, output, declared)
        unknown = record.identification is None or record.identification.best is None
        named = "norm" in type(module).__name__.lower() or declared_scheme(module) is not None
        if (
            declared is None
            and unknown
            and not named
            and not (
                record.problem is None
                and any(looks_normalized(x, output, guess) for guess in guesses(module, x, output))
            )
        ):
            del self.seen[id(module)]
            return None
        return record

    def operator(self, call: Call, found: Any) -> None:
        if found.name.startswith(FUSED_ENCODER):
            call.records.append(_Bypass(call.path))
        home = type(call.module).__module__
        if home.startswith(("torch.nn.", "axisnorm.")) and declared_scheme(call.module):
            # The module itself is verified.
            return
        call.records += self.functions(call, self.reader.read(found))

    def functions(self, call: Call, performed: Iterator[Performed]) -> list[_Record]:
        return [_function_record(call, one, self.parameters) for one in performed]


def _function_seconds(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[Any, float]:
    """The seconds of the functional calls in a pass that does nothing else, by their keys.

    In the pass that verifies, caches are cold and what is measured is not the model's time.
    """
    spent: dict[Any, float] = {}
    reader = OperatorReader()
    parameters = _addresses(model)

    def add(call: Call, performed: Iterator[Performed]) -> None:
        for one in performed:
            key = _function_key(call, one, parameters)
            spent[key] = spent.get(key, 0.0) + one.seconds

    with unchanged(model):
        observed(
            model,
            args,
            kwargs,
            finished=lambda call, output: add(call, reader.end()),
            operator=lambda call, found: add(call, reader.read(found)),
        )
    return spent


def _addresses(model: torch.nn.Module) -> frozenset[int]:
    return frozenset(parameter.data_ptr() for parameter in model.parameters())


def _function_key(call: Call, performed: Performed, parameters: frozenset[int]) -> tuple[Any, ...]:
    # Calls with the same parameter are calls of one norm. Other weights have no lasting address.
    weight = performed.given.get("weight")
    place = None if weight is None or weight.data_ptr() not in parameters else weight.data_ptr()
    return call.path, performed.name, str(performed.scheme), tuple(performed.x.shape), place


def _function_record(call: Call, performed: Performed, parameters: frozenset[int]) -> _Record:
    x, y, scheme = performed.x, performed.y, performed.scheme
    record = _Record(
        key=_function_key(call, performed, parameters),
        path=f"{call.path}:{performed.name}" if call.path else performed.name,
        cls=performed.name,
        module=None,
        declared=scheme,
        identification=None,
        shape=tuple(x.shape),
        dtype=_dtype(x),
        eps=reference.resolve_eps(scheme, x.dtype),
        problem=_problem(x, y, None),
        parameters=tuple(parameters_of(_plain(performed.given))),
    )
    if record.problem is None:
        half = x.dtype in (torch.float16, torch.bfloat16)
        candidates = [("as called", scheme), *rivals(scheme, x.shape, half=half)]
        record.identification = tell_apart(x, y, candidates, **performed.given)
    return record


def _data(call: Call, output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the module normalized and what became of it, None where it is not one tensor."""
    given = [*call.args, *call.kwargs.values()]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if isinstance(call.module, (nn.AddLayerNorm, nn.AddRMSNorm)) and len(tensors) > 1:
        if call.module.prenorm:
            return output[1], output[0]
        return tensors[0] + tensors[1], output
    x = tensors[0] if tensors else None
    return x, output if isinstance(output, torch.Tensor) else None


def _mask(call: Call) -> torch.Tensor | None:
    if not type(call.module).__module__.startswith("axisnorm."):
        return None
    tensors = [value for value in call.args if isinstance(value, torch.Tensor)]
    masks = [value for value in tensors if value.dtype == torch.bool]
    return call.kwargs.get("mask", masks[0] if masks else None)


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _problem(x: torch.Tensor, y: torch.Tensor, call: Call | None) -> str | None:
    """Why input and output cannot be compared, None if they can."""
    if call is not None and call.inputs_changed:
        return "it overwrites its own input"
    module = call.module if call is not None else None
    drops = getattr(module, "dropout_p", 0.0) if module is not None and module.training else 0.0
    # With prenorm the module returns the sum itself.
    if drops and not getattr(module, "prenorm", False):
        return "its dropout is random"
    for name, tensor in (("input", x), ("output", y)):
        if tensor.layout is not torch.strided or tensor.is_nested:
            return f"its {name} is not a dense tensor"
        if tensor.is_meta:
            return f"its {name} has no data"
        if tensor.dtype not in DTYPES:
            return f"its {name} is {_dtype(tensor)}"
    if x.shape != y.shape:
        return f"its output has shape {tuple(y.shape)}, its input {tuple(x.shape)}"
    if x.numel() == 0:
        return "its input has no elements"
    if not bool(torch.isfinite(x).all()):
        return "its input holds NaN or infinity"
    return None


def _try_guesses(
    record: _Record, module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Identify a module that declares nothing."""
    found = []
    for guess in guesses(module, x, y):
        given = {"weight": guess.weight, "bias": guess.bias}
        found.append(tell_apart(x, y, guess.candidates, **given, fitted=guess.fitted))
        best = found[-1].best
        if best is not None:
            record.identification = found[-1]
            record.eps_undetermined = eps_is_undetermined(module, x, y, best, **given)
            return
    record.identification = min(found, key=_nearest, default=Identification((), None))


def _identify(
    module: torch.nn.Module, call: Call, x: torch.Tensor, y: torch.Tensor, declared: Scheme
) -> Identification:
    half = x.dtype in (torch.float16, torch.bfloat16)
    given: dict[str, Any] = {
        name: getattr(module, name, None)
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    given["mask"] = _mask(call)
    others = rivals(declared, tuple(x.shape), half=half)
    if not type(module).__module__.startswith(("torch.", "axisnorm.")):
        others += [one for guess in guesses(module, x, y) for one in guess.candidates]
    unique = {scheme: name for name, scheme in reversed([("as declared", declared), *others])}
    candidates = [(name, scheme) for scheme, name in reversed(unique.items())]
    candidates = [one for one in candidates if _fits(one[1], x, module)]
    return tell_apart(x, y, candidates, **given)


def _fits(scheme: Scheme, x: torch.Tensor, module: torch.nn.Module) -> bool:
    """Whether the scheme takes this input with the module's parameters."""
    try:
        sizes = scheme.layout(x.dim()).sizes(tuple(x.shape))
    except ArgumentError:
        return False
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    return not scheme.affine or shapes <= {sizes.affine_shape}


def _nearest(found: Identification) -> float:
    return found.candidates[0].residual if found.candidates else math.inf


# --------------------------------------------------------------------------------------------
# From records to norms


def _norms(
    model: torch.nn.Module, records: Sequence[Any], seconds: float, spent: Mapping[Any, float]
) -> Iterator[Norm]:
    merged: dict[Any, _Record] = {}
    for record in records:
        if isinstance(record, _Bypass):
            for path, module in _norm_modules(model, record.path):
                merged.setdefault(id(module), _silent(path, module, "bypassed"))
            continue
        known = merged.get(record.key)
        if known is None or known.calls == 0:
            merged[record.key] = record
            continue
        known.calls += 1
        if record.identification is None or _says_nothing(record):
            continue
        # What contradicts counts more than what agrees, and either more than nothing.
        if _says_nothing(known) or (_shown(known) and not _shown(record)):
            merged[record.key] = replace(record, calls=known.calls)
    for path, module in _norm_modules(model, ""):
        merged.setdefault(id(module), _silent(path, module, "not-run"))
    running = [record for record in merged.values() if record.problem != "not-run"]
    silent = [record for record in merged.values() if record.problem == "not-run"]
    for record in (*running, *silent):
        share = spent.get(record.key) if record.calls else None
        yield _norm(record, min(1.0, share / seconds) if share is not None and seconds else None)


def _says_nothing(record: _Record) -> bool:
    return record.identification is not None and record.identification.tells_nothing


def _shown(record: _Record) -> bool:
    best = record.identification.best if record.identification else None
    return best is not None and record.declared in (None, best.scheme)


def _norm_modules(model: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    paths = paths_of(model)
    for module in model.get_submodule(path).modules():
        if declared_scheme(module) is not None:
            yield paths[id(module)], module


def _silent(path: str, module: torch.nn.Module, why: str) -> _Record:
    declared = declared_scheme(module)
    eps = declared.eps if declared else None
    return _Record(id(module), path, type(module).__name__, module, declared, None, (), "", eps,
                   problem=why, calls=0)  # fmt: skip


def _norm(record: _Record, share: float | None) -> Norm:
    ran = record.calls > 0
    shape = record.shape if ran else None
    best = record.identification.best if record.identification else None
    scheme = best.scheme if best and not _says_nothing(record) else None
    undetermined = record.eps_undetermined and scheme is not None
    if ran:
        findings = tuple(findings_of(record.path, record.module, record.declared,
                                     record.identification, shape, record.problem,
                                     eps_undetermined=undetermined))  # fmt: skip
    else:
        quiet = findings_of(record.path, record.module, record.declared, None, None, None)
        findings = (_did_not_run(record), *quiet)
    shown = scheme or record.declared
    sizes = shown.layout(len(shape)).sizes(shape) if shown and shape is not None else None
    means = size = None
    if sizes is not None:
        told = statistics_dimensions(sizes)
        means = math.prod(n for i, n in enumerate(sizes.expanded) if i in told)
        size = math.prod(n for i, n in enumerate(sizes.expanded) if i not in told)
    weight = getattr(record.module, "weight", None)
    affine = tuple(weight.shape) if weight is not None else sizes.affine_shape if sizes else ()
    eps = record.eps if scheme is None or scheme == record.declared else scheme.eps
    own = {**record.module._parameters, **record.module._buffers} if record.module else {}
    return Norm(
        path=record.path,
        cls=record.cls,
        kind="function" if record.module is None else "module",
        declared=record.declared,
        scheme=scheme,
        identification=record.identification,
        eps=None if undetermined else eps,
        shape=shape,
        dtype=record.dtype or None,
        affine_shape=affine,
        num_statistics=means,
        group_size=size,
        calls=record.calls,
        time_share=share,
        findings=findings,
        parameters=record.parameters or tuple(parameters_of(_plain(own))),
    )


def _plain(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those whose values can be read: dense, and not of a class that shards or fakes them."""
    return {
        name: value
        for name, value in named.items()
        if type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.is_floating_point()
        and not value.is_meta
    }


def _did_not_run(record: _Record) -> Finding:
    if record.problem == "bypassed":
        return Finding(
            "bypassed",
            "note",
            "torch's fused encoder layer computes this norm itself: the module is not called, "
            "so nothing that replaces or hooks it has an effect.",
            "In train mode, or with torch.backends.mha.set_fastpath_enabled(False), it is.",
            record.path,
        )
    return Finding("not-run", "note", "It did not run on this input.",
                   "Audit with an input that reaches it.", record.path)  # fmt: skip
