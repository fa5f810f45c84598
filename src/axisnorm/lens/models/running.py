"""A torch model is run, and what each of its normalizations computes is held against its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ... import nn, reference
from ...scheme import ArgumentError, Scheme
from ..explain import with_article
from ..identify import Identification, rivals, tell_apart
from ..progress import step
from .declared import activation_of, declared_scheme
from .findings import Finding, findings_of, mixed_eps
from .flow import VIEWS, Flow, place_of
from .foreign import eps_is_undetermined, guesses, looks_like_a_norm, looks_normalized
from .fragments import Fragment, FragmentReader
from .graphs import observed_graph
from .measures import Measured, Measuring, paddings
from .norms import Audit, Norm, axis_names, kind_of_norm, shared_counts
from .observe import Call, Operator, observed, paths_of, timed, unchanged, uncompiled
from .operators import FUSED_ENCODER, OperatorReader, Performed
from .parameters import Parameter, parameters_of

__all__ = ["audit_module"]

VERIFIED_CALLS = 3
"""How many calls of one module are verified; later calls are counted."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def audit_module(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    source: str = "",
    generated: bool = False,
) -> Audit:
    """Run a torch module as it is, on copies of the inputs, and audit it.

    Args:
        model: a module, TorchScript's too, or an exported program.
        source: what it was read from, by default what it is.
        generated: whether the inputs were made up.

    Raises:
        ArgumentError: it is no torch module, or one without values.
    """
    if isinstance(model, torch.export.ExportedProgram):
        model, source = model.module(), source or "exported"
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "audit runs a torch.nn.Module or reads a model directory or file. "
            f"{with_article(model)} came. Give the model itself."
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ArgumentError(
            "audit runs a model whose parameters have shapes. Those of lazy modules have none yet. "
            "Run the model once before."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            "audit runs the model. Its parameters are on the meta device and have no values. "
            "Load its weights first."
        )
    model = uncompiled(model)
    scripted = isinstance(model, torch.jit.ScriptModule)
    source = source or ("torchscript" if scripted else "module")
    watch = observed_graph if source == "exported" else observed
    step("running the model")
    with unchanged(model):
        watcher = _Watcher(model, args, kwargs, flat=source in ("exported", "torchscript"))
        _, records = watch(
            model,
            args,
            kwargs,
            finished=watcher.finished,
            operator=watcher.operator,
            begins=watcher.flow.before,
        )
        records += watcher.ended()
    modules = {id(m): m for m in model.modules() if id(m) in watcher.seen}
    step("timing")
    spent: dict[Any, float] = {}
    seconds, of_modules = timed(model, args, kwargs, list(modules.values()))
    spent |= of_modules
    merged = _merged(model, records)
    written = [r for r in merged if r.operators]
    if written:
        shares = _operator_shares(watch, model, args, kwargs, written, watcher.names)
        spent |= {key: share * seconds for key, share in shares.items()}
    norms = list(_norms(merged, seconds, spent, generated))
    findings = [finding for norm in norms for finding in norm.findings]
    findings += mixed_eps([(norm.cls, norm.eps) for norm in norms if norm.eps is not None])
    return Audit(_name(model), tuple(norms), tuple(findings), seconds, source)


def _name(model: torch.nn.Module) -> str:
    """The model's class, also where it was exported from one."""
    if isinstance(model, torch.jit.ScriptModule):
        return str(model.original_name)
    if isinstance(model, torch.fx.GraphModule):
        for node in model.graph.nodes:
            for path, cls in node.meta.get("nn_module_stack", {}).values():
                if not path and isinstance(cls, str):
                    return cls.rpartition(".")[2]
    return type(model).__name__


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
    kind: str = "module"
    measured: Measured | None = None
    affine_shape: tuple[int, ...] | None = None
    training: bool | None = None
    place: tuple[int, int] | None = None
    """Where its input lay in memory."""
    nodes: tuple[str, ...] = ()
    ended: int = 0
    """How many operators had run in the pass when it was computed."""
    operators: list[int] = field(default_factory=list)
    """The places in the pass of the operators that compute it, where they are no module."""


def _is_function(record: Any) -> bool:
    return isinstance(record, _Record) and record.module is None


@dataclass(frozen=True)
class _Bypass:
    path: str
    ended: int


class _Watcher:
    """Turns what is observed into records, on the spot."""

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        flat: bool,
    ) -> None:
        self.seen: dict[int, int] = {}
        self.reader = OperatorReader()
        self.flat = flat
        """Whether the model is a graph, whose modules are only names."""
        self.homes = _homes(model)
        self.flow = Flow(_constants(model))
        self.fragments = FragmentReader(self.flow)
        self.names: list[str] = []
        self.mode = model.training
        self.measuring = Measuring(paddings(args, kwargs))

    def finished(self, call: Call, output: Any) -> None:
        module = call.module
        ended = list(self.fragments.end(call))
        for one in ended:
            call.records.append(self.fragment(call, one))
        if module is None or isinstance(module, torch.jit.ScriptModule):
            return
        record = self.read(module, call, output, ended)
        if record is None:
            return
        step("verifying", len(self.seen))
        # The operators inside a norm are the norm, unless it is shown to be something else.
        best = record.identification.best if record.identification else None
        if record.identification is None or (best and record.declared in (None, best.scheme)):
            call.records[:] = [r for r in call.records if not _is_function(r)]
            if isinstance(output, torch.Tensor):
                self.flow.node(output).normalized = call.path or record.cls
        call.records.append(record)

    def ended(self) -> list[_Record]:
        """What is complete as the model ends."""
        return [self.fragment(one.call, one) for one in self.fragments.end()]

    def read(
        self, module: torch.nn.Module, call: Call, output: Any, ended: Sequence[Fragment]
    ) -> _Record | None:
        x, output = _data(call, output)
        if x is None or output is None:
            return None
        if x.is_nested:
            if declared_scheme(module) is None:
                return None
            return replace(_silent(call.path, module, "nested"), ended=len(self.names))
        declared = declared_scheme(module, x.dim())
        if declared is not None and not _fits(declared, x, module):
            # A subclass that normalizes other axes: only what it does can tell which.
            declared = None
        named = "norm" in type(module).__name__.lower()
        own = next((f for f in ended if f.node.tensor() is output and (named or _same(f, x))), None)
        if declared is None and not (
            own or (not call.has_inner and looks_like_a_norm(module, x.shape, output.shape))
        ):
            return None
        inner = [r for r in call.records if _is_function(r)]
        if declared is None and own is None and any(r.kind == "fragment" for r in inner):
            return None  # That is the norm, and this only holds it.
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
            ended=len(self.names),
        )
        if number > VERIFIED_CALLS:
            return record
        if declared is not None:
            record.eps = reference.resolve_eps(declared, x.dtype)
        record.problem = _problem(x, output, call)
        given = {name: getattr(module, name, None) for name in _PARAMETERS}
        given["mask"] = _mask(call)
        if record.problem is None:
            if declared is not None:
                record.identification = _identify(module, call, x, output, declared)
                if _computes_another(record):
                    # A subclass with a forward of its own: its base says nothing of it.
                    record.declared = None
            elif own is not None:
                record.identification = own.identification
                record.shape = tuple(own.x.shape)
                given = {"weight": own.weight, "bias": own.bias}
            else:
                given |= _try_guesses(record, module, x, output)
        known = record.identification is not None and record.identification.best is not None
        # A norm of 2 x is one of x with another eps; what is written there is the former.
        held = known and any(_shown(r) and r.place != place_of(x) for r in inner)
        if (
            declared is None
            and own is None
            and (held or not self.is_one(record, module, x, output))
        ):
            del self.seen[id(module)]
            return None
        self.measure(record, x if own is None else own.x, given, own)
        return record

    def is_one(
        self, record: _Record, module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> bool:
        """Whether a module of another library is a norm, or at least called or looks like one."""
        if record.identification is not None and record.identification.best is not None:
            return True
        if "norm" in type(module).__name__.lower() or declared_scheme(module) is not None:
            return True
        return record.problem is None and any(
            looks_normalized(x, y, guess) for guess in guesses(module, x, y)
        )

    def operator(self, call: Call, found: Operator) -> None:
        self.names.append(found.name)
        if found.name.startswith(FUSED_ENCODER):
            call.records.append(_Bypass(call.path, found.index))
        home = type(call.module).__module__
        if home.startswith(("torch.nn.", "axisnorm.")) and declared_scheme(call.module):
            # The module itself is verified.
            return
        call.records += [self.function(call, one, found) for one in self.reader.read(found)]
        for one in self.fragments.read(call, found):
            call.records.append(self.fragment(call, one))

    def function(self, call: Call, performed: Performed, found: Operator) -> _Record:
        """The record of an operator that is a normalization."""
        x, y, scheme = performed.x, performed.y, performed.scheme
        given = [t for name in _PARAMETERS if (t := performed.given.get(name)) is not None]
        path, cls = self.place(call, performed.name, given)
        home = self.home(given) if "weight" in performed.given else None
        key = (path, performed.name, str(scheme), tuple(x.shape), home)
        record = _Record(
            key=(*key, call.node) if self.flat else key,
            path=path,
            cls=cls,
            module=None,
            declared=scheme,
            identification=None,
            shape=tuple(x.shape),
            dtype=_dtype(x),
            eps=reference.resolve_eps(scheme, x.dtype),
            problem=_problem(x, y, None),
            kind="node" if call.node else "function",
            nodes=(call.node or performed.name,),
            training=self.training(call),
            place=place_of(x),
            ended=found.index + 1,
            operators=[found.index],
            parameters=tuple(parameters_of(_plain(performed.given))),
        )
        if record.problem is None:
            half = x.dtype in (torch.float16, torch.bfloat16)
            candidates = [("as called", scheme), *rivals(scheme, x.shape, half=half)]
            record.identification = tell_apart(x, y, candidates, **performed.given)
        self.measure(record, x, performed.given, None)
        self.flow.node(y).normalized = path
        return record

    def fragment(self, call: Call, one: Fragment) -> _Record:
        """The record of operators that compute a normalization together."""
        called = _function_of(one)
        best = one.identification.best
        scheme = called or (best.scheme if best else one.scheme)
        name = _CALLED[scheme.scale == "l2"] if called else kind_of_norm(scheme, one.x.dim())
        inner = one.call
        path, cls = self.place(inner, name, one.constants, len(one.places))
        key = (path, name, str(scheme), tuple(one.x.shape), self.home(one.constants))
        before = [r.key[:-1] for r in call.records if _is_function(r)]
        nodes = one.names if inner.node is None else one.places
        record = _Record(
            key=(*key, inner.node if self.flat else before.count(key)),
            path=path,
            cls=cls,
            module=None,
            declared=called,
            identification=one.identification,
            shape=tuple(one.x.shape),
            dtype=_dtype(one.x),
            eps=reference.resolve_eps(scheme, one.x.dtype),
            kind="function" if called else "node" if inner.node else "fragment",
            nodes=nodes,
            training=self.training(inner),
            place=place_of(one.x),
            ended=one.node.index + 1,
            operators=[index for index, _ in one.operators],
            parameters=tuple(parameters_of(_plain({"weight": one.weight, "bias": one.bias}))),
        )
        if called is not None:
            record.identification = one.against(called)
        self.measure(record, one.x, {"weight": one.weight, "bias": one.bias}, one)
        one.node.normalized = path
        return record

    def training(self, call: Call) -> bool | None:
        """Whether what calls an operator is in train mode."""
        if call.module is not None:
            return call.module.training
        # An exported program does not know; it is one for inference.
        return False if call.node is not None else self.mode

    def place(
        self, call: Call, name: str, given: Sequence[torch.Tensor], count: int = 1
    ) -> tuple[str, str]:
        """The path and the class of what is no module, as exact as it is known.

        ``count``: of the graph's nodes that compute it. If a module is exported to no others, they
        are the module.
        """
        path = call.path
        if (path and "norm" in call.cls.lower()) or 0 < call.siblings <= count:
            return path, call.cls.rpartition(".")[2]
        home = self.home(given)
        if self.flat and not path and home is not None:
            # TorchScript and branches say nothing of their modules, but parameters are named.
            path = self.homes[home].rpartition(".")[0]
            return path or name, name
        return (f"{path}:{name}" if path else name), name

    def home(self, given: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """What tells the calls of one norm from those of others: its first parameter."""
        # Other weights have no lasting address.
        places = (place_of(tensor) for tensor in given)
        return next((place for place in places if place in self.homes), None)

    def measure(
        self, record: _Record, x: torch.Tensor, given: Mapping[str, Any], own: Fragment | None
    ) -> None:
        """What the findings need to know of the data and the parameters."""
        best = record.identification.best if record.identification else None
        scheme = best.scheme if best else record.declared
        weight = given.get("weight")
        if weight is not None:
            record.affine_shape = tuple(weight.shape)
        if scheme is None or record.problem is not None:
            return
        record.measured = self.measuring.measured(x, scheme, given)
        if own is not None:
            record.measured.squares_in = str(own.squares_in).removeprefix("torch.")
        record.measured.follows = _normalized_by(self.flow, x, own)


_PARAMETERS = ("weight", "bias", "running_mean", "running_var")
_CALLED = {False: "rms_norm", True: "normalize"}


def _computes_another(record: _Record) -> bool:
    """Whether a subclass of torch's or our norms was shown to compute another scheme."""
    found = record.identification
    if type(record.module).__module__.startswith(("torch.", "axisnorm.")) or found is None:
        return False
    fits = any(c.fits for c in found.candidates if c.scheme == record.declared)
    return found.best is not None and not fits and not found.tells_nothing


def _normalized_by(flow: Flow, x: torch.Tensor, own: Fragment | None) -> str | None:
    """The path of the norm whose output this norm is given, None if something lies between."""
    node = own.source if own is not None else flow.nodes.get(x)
    for _ in range(4):
        if node is None or node.normalized is not None:
            return node.normalized if node is not None else None
        same = len(node.parents) == 1 and node.name in VIEWS
        node = node.parents[0] if same else None
    return None


def _function_of(one: Fragment) -> Scheme | None:
    """What torch's function computes that runs as these operators, if it is one.

    eps is added in place by torch's C++, which tells rms_norm from what is written out.
    """
    names = tuple(name for _, name in one.operators if name != "_to_copy")
    best = one.identification.best
    if best is None:
        return None
    if names[:5] == ("pow", "mean", "add_", "rsqrt", "mul") and names[5:] in ((), ("mul",)):
        return best.scheme.replace(eps=_asked_for(best.scheme.eps or 0.0), rounding="once")
    if names == ("linalg_vector_norm", "clamp_min", "expand", "div"):
        return best.scheme
    return None


def _asked_for(eps: float) -> float | None:
    """The eps that was asked for: it arrives rounded to float32, None as that type's epsilon."""
    if eps == float(np.finfo(np.float32).eps):
        return None
    return float(str(np.float32(eps))) if eps == float(np.float32(eps)) else eps


def _same(one: Fragment, x: torch.Tensor) -> bool:
    return one.source.tensor() is x


def _constants(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensors that modules hold."""
    yield from model.parameters()
    yield from model.buffers()
    if isinstance(model, torch.jit.ScriptModule):
        return
    for module in model.modules():
        yield from (v for v in vars(module).values() if isinstance(v, torch.Tensor))


def _homes(model: torch.nn.Module) -> dict[tuple[int, int] | None, str]:
    """The names of parameters and buffers, by where they lie."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {place_of(tensor): name for name, tensor in reversed(named) if place_of(tensor)}


def _operator_shares(
    watch: Any,
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    records: Sequence[_Record],
    names: Sequence[str],
) -> dict[Any, float]:
    """The shares of what is no module in the operators' time, by the keys.

    Of a pass that does nothing else: in the one that verifies, caches are cold. A model that runs
    other operators the second time has no such shares.
    """
    seconds: list[float] = []
    again: list[str] = []

    def timed_operator(call: Call, found: Operator) -> None:
        seconds.append(found.seconds)
        again.append(found.name)

    with unchanged(model):
        watch(model, args, kwargs, finished=lambda call, output: None, operator=timed_operator)
    total = sum(seconds)
    if again != list(names) or not total:
        return {}
    return {record.key: sum(seconds[i] for i in record.operators) / total for record in records}


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
    if module is not None and (activation := activation_of(module)) is not None:
        return f"{activation} follows its norm"
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
) -> dict[str, Any]:
    """Identify a module that declares nothing: the parameters that it was given as."""
    found = []
    for guess in guesses(module, x, y):
        given = guess.parameters
        found.append(tell_apart(x, y, guess.candidates, **given, fitted=guess.fitted))
        best = found[-1].best
        if best is not None:
            record.identification = found[-1]
            record.eps_undetermined = eps_is_undetermined(module, x, y, best, guess)
            return given
    record.identification = min(found, key=_nearest, default=Identification((), None))
    return {}


def _identify(
    module: torch.nn.Module, call: Call, x: torch.Tensor, y: torch.Tensor, declared: Scheme
) -> Identification:
    half = x.dtype in (torch.float16, torch.bfloat16)
    given: dict[str, Any] = {name: getattr(module, name, None) for name in _PARAMETERS}
    given["mask"] = _mask(call)
    candidates = [("as declared", declared), *rivals(declared, tuple(x.shape), half=half)]
    found = tell_apart(x, y, [one for one in candidates if _fits(one[1], x, module)], **given)
    if found.best is None and not type(module).__module__.startswith(("torch.", "axisnorm.")):
        known = {scheme for _, scheme in candidates}
        candidates += [
            one for guess in guesses(module, x, y) for one in guess.candidates
            if one[1] not in known
        ]  # fmt: skip
        found = tell_apart(x, y, [one for one in candidates if _fits(one[1], x, module)], **given)
    return found


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


def _merged(model: torch.nn.Module, records: Sequence[Any]) -> list[_Record]:
    """One record for each norm: those that ran in order, then those that did not."""
    merged: dict[Any, _Record] = {}
    # What is written out is known to be complete only later.
    for record in sorted(records, key=lambda record: record.ended):
        if isinstance(record, _Bypass):
            for path, module in _norm_modules(model, record.path):
                merged.setdefault(id(module), _silent(path, module, "bypassed"))
            continue
        known = merged.get(record.key)
        if known is None or known.calls == 0:
            merged[record.key] = record
            continue
        known.calls += 1
        operators = known.operators + record.operators
        known.operators = operators
        if record.identification is None or _says_nothing(record):
            continue
        # What contradicts counts more than what agrees, and either more than nothing.
        if _says_nothing(known) or (_shown(known) and not _shown(record)):
            merged[record.key] = replace(record, calls=known.calls, operators=operators)
    if not isinstance(model, torch.jit.ScriptModule):
        for path, module in _norm_modules(model, ""):
            merged.setdefault(id(module), _silent(path, module, "not-run"))
    running = [record for record in merged.values() if record.problem != "not-run"]
    return running + [record for record in merged.values() if record.problem == "not-run"]


def _norms(
    records: Sequence[_Record], seconds: float, spent: Mapping[Any, float], generated: bool
) -> Iterator[Norm]:
    for record in records:
        share = spent.get(record.key) if record.calls else None
        share = min(1.0, share / seconds) if share is not None and seconds else None
        yield _norm(record, share, generated)


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


def _norm(record: _Record, share: float | None, generated: bool) -> Norm:
    ran = record.calls > 0
    shape = record.shape if ran else None
    best = record.identification.best if record.identification else None
    scheme = best.scheme if best and not _says_nothing(record) else None
    undetermined = record.eps_undetermined and scheme is not None
    if ran:
        findings = tuple(findings_of(record.path, record.module, record.declared,
                                     record.identification, shape, record.problem,
                                     eps_undetermined=undetermined, measured=record.measured,
                                     generated=generated, kind=record.cls,
                                     dtype=record.dtype, training=record.training))  # fmt: skip
    else:
        quiet = findings_of(record.path, record.module, record.declared, None, None, None)
        findings = (_did_not_run(record), *quiet)
    shown = scheme or record.declared
    sizes = shown.layout(len(shape)).sizes(shape) if shown and shape is not None else None
    means = size = None
    if shown and shape is not None:
        means, size = shared_counts(shown, shape)
    weight = getattr(record.module, "weight", None)
    affine = record.affine_shape
    if affine is None:
        affine = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
    if affine is None:
        affine = sizes.affine_shape if sizes else ()
    eps = record.eps if scheme is None or scheme == record.declared else scheme.eps
    own = {**record.module._parameters, **record.module._buffers} if record.module else {}
    return Norm(
        path=record.path,
        cls=record.cls,
        kind=record.kind,
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
        nodes=record.nodes,
        axes=axis_names(shown, len(shape)) if shown and shape is not None else (),
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
    if record.problem == "nested":
        return Finding(
            "not-verified",
            "warning",
            "Not verified: its input is nested and has no one shape.",
            "Audit with an input that is padded to one length.",
            record.path,
        )
    return Finding("not-run", "note", "It did not run on this input.",
                   "Audit with an input that reaches it.", record.path)  # fmt: skip
