"""torch's own descriptions of its norms, run on ours: sample inputs, error inputs, module inputs.

They ship in ``torch.testing._internal`` and are what torch tests its own operators and modules
with. The exact values are torch's in float64. What differs on purpose is not among them: it stands
in docs/differences-from-torch.md, and test_differences_from_torch.py shows it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import DTYPES, assert_close, assert_gradient_close, epsilon

import axisnorm
from axisnorm import Scheme, nn

OPS = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm")
MODULES = (
    "LayerNorm", "RMSNorm", "GroupNorm",
    *[f"{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3)],
)  # fmt: skip
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Descriptions:
    """What torch says of its norms: by the name of the operator, and of the module."""

    ops: dict[str, Any]
    native_layer_norm: Any
    modules: dict[str, Any]
    where: ModuleType


@pytest.fixture(scope="module")
def torchs() -> Descriptions:
    """Importing the descriptions takes seconds and changes torch: what it changes is put back."""
    calls = torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__
    from torch.testing._internal import common_methods_invocations, common_modules

    torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__ = calls
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    found = [op for op in common_methods_invocations.op_db if not op.variant_test_name]
    names = {op.name: op for op in found}
    return Descriptions(
        {name: names[f"nn.functional.{name}"] for name in OPS},
        names["native_layer_norm"],
        {info.module_cls.__name__: info for info in common_modules.module_db},
        common_modules,
    )


def copied(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A leaf of its own for a tensor, in another type if one is given."""
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach().clone()
    own = own.to(dtype) if dtype and own.is_floating_point() else own
    return own.requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class Outcome:
    """What a call gives and leaves behind."""

    y: torch.Tensor
    grads: list[torch.Tensor | None]
    state: list[torch.Tensor]


def called(function: Callable[..., Any], sample: Any, dtype: torch.dtype | None = None) -> Outcome:
    """A description's sample on copies of its tensors, in a wider type if one is given."""
    args = [copied(a, dtype) for a in (sample.input, *sample.args)]
    kwargs = {key: copied(a, dtype) for key, a in sample.kwargs.items()}
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    y = function(*args, **kwargs)
    leaves = [t for t in tensors if t.requires_grad]
    grads = torch.autograd.grad(y, leaves, incoming(sample.input).to(y.dtype), allow_unused=True)
    return Outcome(y.detach(), list(grads), [t for t in tensors if not t.requires_grad])


def incoming(x: torch.Tensor) -> torch.Tensor:
    """A gradient for an output like x, the same for every caller."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def gradient_scale(x: torch.Tensor, scheme: Scheme, weight: torch.Tensor | None) -> float:
    """The size of the terms whose sum is dx: they cancel where a group is small."""
    rstd = axisnorm.statistics(x.detach().double(), scheme)[2]
    largest = 1.0 if weight is None else float(weight.detach().double().abs().max())
    return float(rstd.nan_to_num().abs().max() * incoming(x).double().abs().max()) * largest


def assert_agrees(
    ours: Outcome, torchs: Outcome, exact: Outcome, x: torch.Tensor, scale: float
) -> None:
    """Ours against the exact values, and against torch's as torch compares its own."""
    # In float64 the exact values are computed in float64, too.
    ulps = 8.0 if x.dtype == torch.float64 else 4.0
    assert torch.equal(ours.y.isnan(), exact.y.isnan())
    assert_close(ours.y.nan_to_num(), exact.y.nan_to_num(), ulps)
    # torch rounds the factor and the offset of BatchNorm to half types before it applies them.
    largest = float(exact.y.nan_to_num().abs().max()) if x.numel() else 0.0
    torch.testing.assert_close(
        ours.y, torchs.y, rtol=0, atol=ulps * epsilon(x.dtype) * max(1.0, largest), equal_nan=True,
        check_stride=bool(x.numel()),
    )  # fmt: skip
    scales = [
        scale,
        *[max(1.0, largest) * float(incoming(x).abs().max()) if x.numel() else 1.0] * 2,
    ]
    for own, theirs, right, size in zip(
        ours.grads, torchs.grads, exact.grads, scales, strict=False
    ):
        assert (own is None) == (theirs is None)
        if own is not None and right is not None:
            assert own.dtype == theirs.dtype and torch.equal(own.isnan(), right.isnan())
            own, right = own.nan_to_num(), right.nan_to_num()
            size = max(size, float(right.abs().max())) if right.numel() else size
            assert_gradient_close(own, right, 2 * x.numel(), size)
    for own, right in zip(ours.state, exact.state, strict=True):
        counter = not own.is_floating_point()
        bound = (
            0.0 if counter or not right.numel() else ulps * epsilon(own.dtype) * right.abs().max()
        )
        assert ((own.to(right.dtype) - right).abs() <= bound).all()


def op_scheme(name: str, sample: Any) -> tuple[Scheme, torch.Tensor | None]:
    """What a sample computes, for the size of its gradients, and its weight."""
    args, kwargs = list(sample.args), sample.kwargs
    if name in ("layer_norm", "rms_norm"):
        fields = {"eps": kwargs["eps"]} if "eps" in kwargs else {}
        weight = args[1] if len(args) > 1 else None
        return getattr(Scheme, name)(args[0], **fields), weight
    eps = kwargs.get("eps", 1e-5)
    if name == "group_norm":
        return Scheme.group_norm(args[0], eps=eps), kwargs.get("weight")
    if name == "instance_norm":
        return Scheme.instance_norm(eps=eps), kwargs.get("weight")
    return Scheme.batch_norm(eps=eps), args[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_operator_samples(name: str, dtype: torch.dtype, torchs: Descriptions) -> None:
    op = torchs.ops[name]
    assert dtype in op.supported_dtypes("cpu")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    if op.reference_inputs_func is not None:
        samples += op.reference_inputs("cpu", dtype, requires_grad=True)
    assert len(samples) > 5
    for sample in samples:
        ours = called(getattr(axisnorm, name), sample)
        exact = called(op.op, sample, torch.float64)
        scale = 0.0
        if sample.input.dim() > 1 or name in ("layer_norm", "rms_norm"):
            running = name == "batch_norm" and not sample.kwargs.get("training")
            if sample.input.numel() and not running:
                scale = gradient_scale(sample.input, *op_scheme(name, sample))
        assert_agrees(ours, called(op.op, sample), exact, sample.input, scale)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_samples(dtype: torch.dtype, torchs: Descriptions) -> None:
    """Of these torch has a kernel and axisnorm has none."""
    op = torchs.ops["rms_norm"]
    for sample in op.sample_inputs("cpu", dtype):
        ours = axisnorm.rms_norm(sample.input, *sample.args, **sample.kwargs)
        wanted = op.op(sample.input, *sample.args, **sample.kwargs)
        assert torch.equal(ours, wanted)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011
        function(*args, **kwargs)
    return found.value


@pytest.mark.parametrize(("name", "count"), [("layer_norm", 4), ("rms_norm", 3), ("group_norm", 2)])
def test_operator_error_inputs(name: str, count: int, torchs: Descriptions) -> None:
    described = torchs.native_layer_norm if name == "layer_norm" else torchs.ops[name]
    errors = list(described.error_inputs("cpu"))
    assert len(errors) == count
    for error in errors:
        sample = error.sample_input
        wanted = error_of(torchs.ops[name].op, sample.input, *sample.args, **sample.kwargs)
        assert isinstance(wanted, error.error_type) and re.search(error.error_regex, str(wanted))
        own = error_of(getattr(axisnorm, name), sample.input, *sample.args, **sample.kwargs)
        assert isinstance(own, axisnorm.ArgumentError) and isinstance(own, type(wanted))
        shape = str(tuple(sample.input.shape))
        assert any(said in str(own) for said in (shape, "at least one"))


def made(package: Any, name: str, described: Any, **kwargs: Any) -> torch.nn.Module:
    constructor = described.constructor_input
    return getattr(package, name)(*constructor.args, **constructor.kwargs, **kwargs)


def pair(name: str, described: Any, training: bool, **kwargs: Any) -> list[torch.nn.Module]:
    """Ours and torch's, of equal parameters and statistics that are none of their initial ones."""
    modules = [made(package, name, described, **kwargs) for package in (nn, torch.nn)]
    generator = torch.Generator().manual_seed(3)
    for tensor in modules[1].state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    modules[0].load_state_dict(modules[1].state_dict())
    return [module.train(training) for module in modules]


def module_called(
    module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None
) -> Outcome:
    given = copied(x, dtype)
    y = module(given)
    grads = torch.autograd.grad(y, [given, *module.parameters()], incoming(x).to(y.dtype))
    return Outcome(y.detach(), list(grads), list(module.buffers()))


def module_inputs(info: Any, dtype: torch.dtype, training: bool) -> Iterator[tuple[Any, Any]]:
    """Each description with its input, images also in the memory format channels_last."""
    described = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    for one in described:
        (x,) = one.forward_input.args
        yield one, x
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if form is not None and x.numel():
            yield one, x.detach().contiguous(memory_format=form).requires_grad_()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_module_inputs(name: str, training: bool, torchs: Descriptions) -> None:
    info = torchs.modules[name]
    assert info.module_cls is getattr(torch.nn, name)
    assert {torch.float32, torch.float64} <= set(info.supported_dtypes("cpu"))
    for dtype in DTYPES:
        for described, x in module_inputs(info, dtype, training):
            ours, theirs = pair(name, described, training, device="cpu", dtype=dtype)
            assert repr(ours) == repr(theirs) and isinstance(ours, type(theirs))
            wide = copy.deepcopy(theirs).double()
            exact = module_called(wide, x, torch.float64)
            scale = 0.0
            unbatched = name.startswith("Instance") and x.dim() == ours._get_no_batch_dim()
            if x.numel() and ours.scheme.statistics == "batch":
                batched = x.unsqueeze(0) if unbatched else x
                scale = gradient_scale(batched, ours.scheme, ours.weight)
            own, wanted = module_called(ours, x), module_called(theirs, x)
            # torch gives contiguous memory where these formats come in, of some norms.
            # (Of an unbatched input axis 1 is not that of the channels.)
            if not x.is_contiguous() and not unbatched:
                y = torch.empty_like(x).copy_(wanted.y)
                wanted = Outcome(y, wanted.grads, wanted.state)
            elif not x.numel():
                # torch counts an empty batch.
                own.state[2:], exact.state[2:] = [], []
            assert_agrees(own, wanted, exact, x, scale)


@pytest.mark.parametrize("name", MODULES)
def test_module_error_inputs(name: str, torchs: Descriptions) -> None:
    info = torchs.modules[name]
    if info.module_error_inputs_func is None:
        assert not name.startswith(("Batch", "Group"))
        return
    for training in (True, False):
        errors = info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        assert errors
        for error in errors:
            described = error.module_error_input
            construction = torchs.where.ModuleErrorEnum.CONSTRUCTION_ERROR
            if error.error_on == construction:
                own, wanted = (error_of(made, p, name, described) for p in (nn, torch.nn))
            elif not training and described.constructor_input.kwargs["eps"] == 0.0:
                # Both allow it in evaluation.
                ours, theirs = pair(name, described, training)
                x = described.forward_input.args[0]
                torch.testing.assert_close(ours(x), theirs(x))
                continue
            else:
                ours, theirs = pair(name, described, training)
                before = copy.deepcopy(ours.state_dict())
                own, wanted = (error_of(m, *described.forward_input.args) for m in (ours, theirs))
                after = ours.state_dict()
                assert all(torch.equal(after[key], value) for key, value in before.items())
            assert isinstance(own, axisnorm.ArgumentError) and isinstance(own, type(wanted))
            assert isinstance(own, error.error_type)
            if training or error.error_on == construction:
                assert re.search(error.error_regex, str(own))


@pytest.mark.parametrize("name", [name for name in MODULES if name.endswith("d")])
def test_lazy_module_inputs(name: str, torchs: Descriptions) -> None:
    """torch describes no lazy norm of its own: their eager forms without the number of channels."""
    for described, x in module_inputs(torchs.modules[name], torch.float32, True):
        constructor = described.constructor_input
        _, *args = constructor.args
        kwargs = constructor.kwargs
        if name.startswith("Instance"):
            if x.dim() == getattr(torch.nn, name)(3)._get_no_batch_dim():
                continue  # torch takes the channels from another axis
            kwargs = (
                {"affine": True, "track_running_stats": False, **kwargs}
                if len(args) < 4
                else kwargs
            )
        ours, theirs = (getattr(p, f"Lazy{name}")(*args, **kwargs) for p in (nn, torch.nn))
        assert repr(ours) == repr(theirs)
        y, wanted = ours(x), theirs(x)
        assert type(ours) is getattr(nn, name) and type(theirs) is getattr(torch.nn, name)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
        theirs.load_state_dict(ours.state_dict())
