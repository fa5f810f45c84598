"""Watching a torch model run without changing it: its modules, its operators, its time."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

__all__ = [
    "Call", "Operator", "Operators", "copied", "observed", "paths_of", "random_states_kept", "run",
    "timed", "unchanged", "uncompiled",
]  # fmt: skip


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever is drawn inside from torch's, NumPy's and Python's generators is not missed after.

    Each run of a model then draws the same.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cuda = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if cuda else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Whatever runs inside leaves buffers, train and eval modes and random states as they were."""
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in _own_buffers(module)
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with random_states_kept():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with _mode(model), torch.no_grad():
            for module, name, buffer, saved in buffers:
                if not isinstance(module, torch.jit.ScriptModule):
                    module._buffers[name] = buffer
                if buffer is not None and saved is not None and not _equal(buffer, saved):
                    buffer.copy_(saved)


def _own_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    if isinstance(module, torch.jit.ScriptModule):
        return [*module.named_buffers(recurse=False)]
    return [*module._buffers.items()]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta:
        return True
    # NaN in a buffer is equal to itself here.
    return a.shape == b.shape and bool(torch.all((a == b) | ((a != a) & (b != b))))


def run(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The model's output on copies of the inputs, without gradients."""
    with _mode(model), torch.no_grad():
        own_args, own_kwargs = copied(args, kwargs)
        return model(*own_args, **own_kwargs)


def copied(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs, which the model may overwrite."""
    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = tree_map_only(torch.Tensor, _copy, (tuple(args), dict(kwargs)))
    return found


def _mode(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Outside inference mode, which hides the operators that functions are made of.

    A model that was made in that mode can only run in it.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile was given; any other model itself."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, torch.nn.Module) else model


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    """A compiled model runs as it was written: in compiled code there are no modules to watch."""
    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    return stance("force_eager") if stance is not None else contextlib.nullcontext()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


@dataclass
class Call:
    """A module while it runs."""

    module: torch.nn.Module | None
    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    records: list[Any] = field(default_factory=list)
    """What the watcher kept of this call and the calls inside, in order."""
    has_inner: bool = False
    """Whether another module ran inside."""
    node: str | None = None
    """The name of a graph's node, None for a module."""
    cls: str = ""
    """The class that a graph's node was in."""
    siblings: int = 0
    """How many nodes a graph has of the same module."""

    @property
    def inputs_changed(self) -> bool:
        """Whether the module wrote into its own positional inputs."""
        return _versions(self.args) != self.versions


def _versions(values: Sequence[Any]) -> tuple[int, ...]:
    # Inference tensors do not count their changes.
    return tuple(
        value._version
        for value in values
        if isinstance(value, torch.Tensor) and not value.is_inference()
    )


@dataclass(frozen=True)
class Operator:
    """One call of a torch operator."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    seconds: float
    index: int = 0
    """How many operators ran before it."""
    tags: Sequence[Any] = ()


class Operators(TorchDispatchMode):
    """Sees every operator below autograd, inside of a graph's branches too.

    A mode for torch functions or a hook of a module would turn TransformerEncoderLayer's
    inference path off, and the model would be another one; this does not.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        seen: Callable[[Operator], None],
        begins: Callable[[str, tuple[Any, ...]], None] | None,
    ) -> None:
        super().__init__()
        self.seen, self.begins, self.count = seen, begins, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.branch(func, args, kwargs)
        if func._can_decompose():
            # In a branch and in inference mode, what is made of operators comes whole.
            with self:
                return func.decompose(*args, **kwargs)
        if self.begins is not None:
            self.begins(str(func), args)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        self.seen(Operator(str(func), args, kwargs, result, seconds, self.count, func.tags))
        self.count += 1
        return result

    def branch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A part of the model that is given to an operator as a function."""
        if func.name() == "cond":
            predicate, one, other, operands = args
            with self:
                return (one if predicate else other)(*operands)
        if func.name() == "wrap_with_set_grad_enabled":
            # Nothing here has gradients.
            with self:
                return args[1](*args[2:])
        return func(*args, **kwargs)


def observed(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    finished: Callable[[Call, Any], None],
    operator: Callable[[Call, Operator], None] | None = None,
    begins: Callable[[str, tuple[Any, ...]], None] | None = None,
) -> tuple[Any, list[Any]]:
    """Run the model once and report each of its modules as it finishes.

    Args:
        finished: is given the call and the output while both still exist.
        operator: is given each operator and the innermost call it ran in.
        begins: is given each operator's name and arguments before it runs.

    Returns:
        The model's output, and what the two put into the calls' ``records``, in order.
    """
    paths = paths_of(model)
    stack = [Call(None, "")]
    busy = False
    done: torch.nn.Module | None = None

    def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not busy and id(module) in paths:
            stack[-1].has_inner = True
            stack.append(Call(module, paths[id(module)], inputs, versions=_versions(inputs)))

    def after(
        module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        nonlocal busy, done
        if busy or stack[-1].module is not module:
            return
        done = module
        call = stack.pop()
        call.kwargs = keywords
        busy = True
        try:
            # What the watcher computes is not part of the model, and faster unwatched.
            with _disable_current_modes():
                finished(call, output)
        finally:
            busy = False
        stack[-1].records += call.records

    def left(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Called after ``after``, and alone where the module raised."""
        nonlocal done
        if not busy and done is not module and stack[-1].module is module:
            failed = stack.pop()
            stack[-1].records += failed.records
        done = None

    def seen(found: Operator) -> None:
        nonlocal busy
        if operator is not None and not busy:
            busy = True
            try:
                operator(stack[-1], found)
            finally:
                busy = False

    with contextlib.ExitStack() as cleanup:
        for handle in (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, with_kwargs=True),
            register_module_forward_hook(left, always_call=True),
        ):
            cleanup.callback(handle.remove)
            # The handle forgets this entry, and torch.compile would warn of a hook for ever after.
            cleanup.callback(_global_forward_hooks_with_kwargs.pop, handle.id, None)
        cleanup.enter_context(_eagerly())
        cleanup.enter_context(_mode(model))
        cleanup.enter_context(torch.no_grad())
        # Copying the inputs is not part of the model.
        own_args, own_kwargs = copied(args, kwargs)
        if operator is not None:
            cleanup.enter_context(Operators(seen, begins))
        output = model(*own_args, **own_kwargs)
    return output, stack[0].records


def paths_of(model: torch.nn.Module) -> dict[int, str]:
    """The path of each module of the model, by its id; the first of a shared one's."""
    return {id(module): path for path, module in model.named_modules()}


def timed(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[torch.nn.Module],
    *,
    budget: float = 2.0,
    rounds: int = 7,
) -> tuple[float, dict[int, float]]:
    """Seconds of the forward pass, and of each module in it by its id: medians of some rounds.

    Only these modules are watched, with two readings of a clock each. Rounds stop when ``budget``
    seconds are used, after one at least.
    """
    wanted = {id(module) for module in modules}
    starts: dict[int, float] = {}
    spent: dict[int, float] = {}
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def before(module: torch.nn.Module, inputs: Any) -> None:
        if id(module) in wanted:
            starts[id(module)] = now()

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if id(module) in starts:
            seconds = now() - starts.pop(id(module))
            spent[id(module)] = spent.get(id(module), 0.0) + seconds

    totals: list[float] = []
    shares: dict[int, list[float]] = {key: [] for key in wanted}
    begun = time.perf_counter()
    with contextlib.ExitStack() as cleanup:
        for handle in (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after),
        ):
            cleanup.callback(handle.remove)
        cleanup.enter_context(_eagerly())
        while not totals or (
            len(totals) < rounds and time.perf_counter() - begun + totals[-1] < budget
        ):
            spent.clear()
            with unchanged(model):
                start = now()
                run(model, args, kwargs)
                totals.append(now() - start)
            for key in wanted:
                shares[key].append(spent.get(key, 0.0))
    return statistics.median(totals), {k: statistics.median(v) for k, v in shares.items()}
