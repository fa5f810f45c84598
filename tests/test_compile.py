"""Compilers and exporters: every module, every shape, every transform, each as eager."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_close, values
from family import F64
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.graph import GraphLowering
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import axisnorm
import axisnorm.nn as ann
from axisnorm import _torch

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.isinstance.treespec, LeafSpec.:FutureWarning"
)

MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: ann.LayerNorm(8), (4, 8)),
    "RMSNorm": (lambda: ann.RMSNorm(8), (4, 8)),
    "GroupNorm": (lambda: ann.GroupNorm(2, 8), (4, 8, 3)),
    "BatchNorm1d": (lambda: ann.BatchNorm1d(8), (4, 8)),
    "BatchNorm2d": (lambda: ann.BatchNorm2d(8), (4, 8, 2, 3)),
    "BatchNorm3d": (lambda: ann.BatchNorm3d(8), (4, 8, 2, 3, 2)),
    "InstanceNorm1d": (lambda: ann.InstanceNorm1d(8, affine=True), (4, 8, 3)),
    "InstanceNorm2d": (lambda: ann.InstanceNorm2d(8, track_running_stats=True), (4, 8, 2, 3)),
    "InstanceNorm3d": (lambda: ann.InstanceNorm3d(8), (4, 8, 2, 3, 2)),
    "LayerNorm2d": (lambda: ann.LayerNorm2d(8), (4, 8, 2, 3)),
    "AddLayerNorm": (lambda: ann.AddLayerNorm(8), (4, 8)),
    "AddRMSNorm": (lambda: ann.AddRMSNorm(8), (4, 8)),
    "Norm": (
        lambda: ann.Norm("[n] c ...", affine="c", sizes={"c": 8}, track_running_stats=True),
        (4, 8, 2, 3),
    ),
}
Modules = pytest.mark.parametrize("name", MODULES)
Modes = pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def arguments(name: str, rows: int, seed: int = 0) -> list[Tensor]:
    shape = (rows, *MODULES[name][1][1:])
    return [values(shape, seed=seed + i) for i in range(2 if name.startswith("Add") else 1)]


def same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (key, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(one, other), key


@Modules
@Modes
def test_modules(name: str, train: bool) -> None:
    """Values, gradients and running statistics of eager; at most one recompilation for shapes."""
    eager, module = (MODULES[name][0]().train(train) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for seed, rows in enumerate((4, 5, 7, 9)):
        given = [t.requires_grad_() for t in arguments(name, rows, seed)]
        leaves = [t.detach().clone().requires_grad_() for t in given]
        y, wanted = compiled(*leaves), eager(*given)
        assert torch.equal(y, wanted)
        upstream = values(tuple(y.shape), seed=7)
        y.backward(upstream)
        wanted.backward(upstream)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, given, strict=True))
    same(module, eager)
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert counter.frame_count <= 2


def test_inductor() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch, self.layer = ann.BatchNorm1d(8), ann.AddLayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(self.batch(x) * 2), x).sin()

    eager, module = Block(), Block()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for rows in (4, 6):
        x = values((rows, 8), seed=rows)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        y, wanted = compiled(leaves[0]), eager(leaves[1])
        assert torch.allclose(y, wanted, rtol=1e-6, atol=1e-6)
        y.sum().backward()
        wanted.sum().backward()
        assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-6)
    same(module, eager)


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Inductor generates."""
    found: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(found.append))
    with torch._inductor.utils.fresh_cache():
        yield found


needs_direct_calls = pytest.mark.skipif(
    not _torch.is_connected, reason="this torch has no table of C functions for its tensors"
)


DIRECT = re.compile(r"axisnorm_native\.(bound\('op_|op_)")


@needs_direct_calls
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm1d"])
def test_inductor_calls_below_the_dispatcher(name: str, code: list[str]) -> None:
    eager, module = MODULES[name][0](), MODULES[name][0]()
    run = torch.compile(module, fullgraph=True, dynamic=False)
    shape = MODULES[name][1]
    x = values(shape)
    others = [values((4, 16))[:, ::2], values((8, 4)).t(), values((8,)).expand(4, 8)]
    for t in [x, *others] if name == "LayerNorm" else [x]:
        given, wanted_given = (t.detach().requires_grad_() for _ in range(2))
        y, wanted = run(given), eager(wanted_given)
        assert torch.equal(y, wanted) and y.stride() == wanted.stride()
        upstream = values(shape, seed=7)
        y.backward(upstream)
        wanted.backward(upstream)
        assert torch.equal(given.grad, wanted_given.grad)
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    same(module, eager)
    assert len(code) >= 2
    assert all(DIRECT.search(t) and "torch.ops.axisnorm" not in t for t in code)


@needs_direct_calls
def test_inputs_that_only_norms_read_are_not_asserted(code: list[str]) -> None:
    """A bound call looks at its tensors itself, in a fifth of the time that an assert takes."""
    w, b, v = (values((8,), seed=i) for i in range(3))

    def run(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return axisnorm.layer_norm(x, (8,), w, b) * v + w

    x = values((4, 8), seed=3)
    for _ in range(2):
        torch.testing.assert_close(torch.compile(run)(x, w, b, v), run(x, w, b, v))
    asserted = re.findall(r"assert_size_stride\(arg(\d)_1", code[0])
    assert sorted(asserted) == ["1", "3"]  # w and v, before the last step


@needs_direct_calls
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "AddLayerNorm"])
def test_calls_are_bound_to_the_sizes_that_come(
    name: str, dynamic: bool | None, code: list[str]
) -> None:
    module, shape = MODULES[name][0](), MODULES[name][1]
    run = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6, 4, 6):
        layouts = [values((rows, 8)), values((rows, 16))[:, ::2], values((8, rows)).t()]
        for x in layouts:
            given = [t.detach().requires_grad_() for t in [x] * (2 if name[0] == "A" else 1)]
            upstream = values((8, rows), seed=rows).t()
            y, wanted = run(*given), module(*given)
            assert torch.equal(y, wanted)
            found = torch.autograd.grad(y, given, upstream)
            torch.testing.assert_close(found, torch.autograd.grad(wanted, given, upstream))
    assert shape[1] == 8 and ("axisnorm_native.bound" in code[0]) == (dynamic is not True)


@needs_direct_calls
def test_a_weight_that_changes_between_forward_and_backward() -> None:
    """Of another type under the same name: torch keeps the parameter, not its elements."""
    module = ann.LayerNorm(8)
    x, upstream = values((4, 8)).requires_grad_(), values((4, 8), seed=1)
    run = torch.compile(module, fullgraph=True)
    (wanted,) = torch.autograd.grad(run(x), x, upstream)
    weight, y = module.weight.data, run(x)
    module.weight.data = weight.double()
    (found,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(found, wanted)
    module.weight.data = weight
    y = run(x)
    module.weight.data = weight[:6].clone()
    with pytest.raises(AssertionError, match="size 6==8"):
        torch.autograd.grad(y, x, upstream)


@needs_direct_calls
def test_inductor_copies_nothing_to_the_order_of_eager_mode(code: list[str]) -> None:
    """It computes convolutions channels last, and copied to channels first before each norm."""
    conv = torch.nn.Conv2d(8, 8, 3)
    module = torch.nn.Sequential(conv, ann.GroupNorm(2, 8), torch.nn.ReLU(), conv)
    run = torch.compile(module, fullgraph=True)
    x = values((2, 8, 6, 6))
    y, wanted = run(x), module(x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert y.stride() == wanted.stride()
    y.sum().backward()
    assert "axisnorm_native.bound('op_forward_into'" in code[0]
    assert "axisnorm_native.bound('op_backward_into'" in code[1]
    assert not any("_norm_fwd" in line for line in code[0].splitlines() if "async_compile" in line)


def test_inductor_without_its_private_functions_calls_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from axisnorm import _torch_inductor

    told: list[Any] = []
    monkeypatch.setattr(torch._inductor.fx_passes.joint_graph, "pass_patterns", told)
    monkeypatch.setattr(
        torch._inductor.lowering, "register_lowering", lambda op, **_: lambda _: told.append(op)
    )
    _torch_inductor.register()
    assert len(told) == 7
    monkeypatch.setitem(_torch_inductor._NEEDED, torch._inductor.ir, ("what_no_torch_has",))
    _torch_inductor.register()
    assert len(told) == 7


@needs_direct_calls
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1.0), (torch.float32, 1e30), (torch.float32, 1e-30), (torch.bfloat16, 1.0)],
    ids=str,
)
def test_norms_by_running_statistics_are_fused(
    dtype: torch.dtype, size: float, code: list[str]
) -> None:
    """Right for every finite input: nothing overflows or vanishes on the way."""
    mean, var = size * values((8,), seed=1), values((8,), seed=2).abs() * min(size**2, 3e37)
    weight, bias = values((8,), dtype, 3), values((8,), dtype, 4)
    mean[0], weight[1], var[2] = 3e38, 1e-30, 0

    def norms(x: Tensor) -> tuple[Tensor, ...]:
        return (
            axisnorm.batch_norm(x, mean, var, weight, bias, activation="relu"),
            axisnorm.instance_norm(x, mean, var, use_input_stats=False) * 2,
        )

    x = (size * values((3, 8, 5))).to(dtype)
    x[:, 0] = -3e38
    found = torch.compile(norms, fullgraph=True)(x)
    inputs = (t.double() for t in (x, mean, var, weight, bias))
    x, mean, var, weight, bias = (t if t.dim() == 3 else t[:, None] for t in inputs)
    wanted = (x - mean) / (var + 1e-5).sqrt()
    assert_close(found[0], (wanted * weight + bias).relu())
    assert_close(found[1], wanted * 2)
    assert "op_scale_into" in code[0] and "op_forward_into" not in code[0]


@needs_direct_calls
@pytest.mark.parametrize("dynamic", [True, False])
def test_norms_by_running_statistics_are_called_where_nothing_is_fused(
    dynamic: bool, code: list[str]
) -> None:
    """In a convolutional network the steps in double took longer than the call."""
    conv = torch.nn.Conv2d(8, 8, 3)
    module = torch.nn.Sequential(conv, ann.BatchNorm2d(8), torch.nn.ReLU(), conv).eval()
    x = values((4, 8, 40, 40))
    with torch.no_grad():
        found = torch.compile(module, fullgraph=True, dynamic=dynamic)(x)
        torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
        assert "op_forward_into" in code[0] and "op_scale_into" not in code[0]
        torch.compile(lambda x: module[:3](x) + 1, fullgraph=True, dynamic=dynamic)(x)
        assert "op_forward_into" not in code[1] and "op_scale_into" in code[1]


RELUS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    **{name: MODULES[name] for name in ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm2d")},
    "InstanceNorm1d": MODULES["InstanceNorm1d"],
    "AddLayerNorm": MODULES["AddLayerNorm"],
    "BatchNorm by running statistics": (lambda: ann.BatchNorm1d(8).eval(), (4, 8)),
    "Norm that is rounded before the weight": (
        lambda: ann.Norm("... [d]; rounding=before_affine", affine="d", sizes={"d": 8}),
        (4, 8),
    ),
}


@needs_direct_calls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RELUS)
def test_a_relu_behind_a_norm_becomes_its_activation(
    name: str, dtype: torch.dtype, code: list[str]
) -> None:
    make, shape = RELUS[name]
    norm, relu = make().to(dtype), torch.nn.ReLU(inplace=True)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    start = {key: value.clone() for key, value in norm.state_dict().items()}
    given = [values(shape, dtype, seed=i) for i in range(2 if name.startswith("Add") else 1)]
    upstream = values(shape, dtype, seed=7)

    def run(*given: Tensor) -> Tensor:
        return relu(norm(*given))

    def results(run: Callable[..., Tensor]) -> list[Tensor]:
        norm.load_state_dict(start)
        leaves = [t.clone().requires_grad_() for t in given]
        y = run(*leaves)
        found = torch.autograd.grad(y, [*leaves, *norm.parameters()], upstream)
        return [y, *found, *(t.clone() for t in norm.buffers())]

    for one, other in zip(results(torch.compile(run, fullgraph=True)), results(run), strict=True):
        assert torch.equal(one, other)
    assert "'relu'" in code[0]
    assert "op_behind_into" in code[1]
    assert "bool" not in code[0] + code[1].replace("bool use_fast_math", "")


def test_a_relu_that_is_not_alone_behind_a_norm() -> None:
    weight = values((8,), seed=1)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = axisnorm.layer_norm(x, (8,), weight)
        z = axisnorm.layer_norm(x, (8,), weight, activation="silu")
        clipped = torch.where(torch.relu(x) <= 0, 0, x) + torch.where(y.relu() <= 1, 0, x)
        return y + y.relu() * (y.relu() <= 0).float(), z.relu(), x.relu(), clipped

    given, wanted = (values((4, 8)).requires_grad_() for _ in range(2))
    for one, other in zip(torch.compile(run, fullgraph=True)(given), run(wanted), strict=True):
        torch.testing.assert_close(one, other)
        one.sum().backward(retain_graph=True)
        other.sum().backward(retain_graph=True)
        torch.testing.assert_close(given.grad, wanted.grad)


SMOOTH: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[Tensor], Tensor]]] = {
    "silu": (lambda: torch.nn.SiLU(inplace=True), torch.nn.functional.silu),
    "gelu": (torch.nn.GELU, torch.nn.functional.gelu),
}


@needs_direct_calls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("name", [*RELUS, "BatchNorm1d", "no gradient"])
def test_a_smooth_activation_behind_a_norm_becomes_its_own(
    name: str, activation: str, dtype: torch.dtype, code: list[str]
) -> None:
    make, shape = RELUS.get(name) or MODULES["GroupNorm" if name == "no gradient" else name]
    norm, behind = make().to(dtype), SMOOTH[activation][0]()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    start = {key: value.clone() for key, value in norm.state_dict().items()}
    given = [values(shape, dtype, seed=i) for i in range(2 if name.startswith("Add") else 1)]
    upstream = values(shape, dtype, seed=7)

    def results(run: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        norm.to(kind).load_state_dict(start)
        if name == "no gradient":
            with torch.no_grad():
                return [run(*(t.to(kind) for t in given))]
        leaves = [t.to(kind).requires_grad_() for t in given]
        y = run(*leaves)
        return [y, *torch.autograd.grad(y, [*leaves, *norm.parameters()], upstream.to(kind))]

    wanted = results(lambda *given: SMOOTH[activation][1](norm(*given)), torch.float64)
    found = results(torch.compile(lambda *given: behind(norm(*given)), fullgraph=True), dtype)
    for one, other in zip(found, wanted, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    assert f"'{activation}'" in code[0]
    assert len(code) == 1 or f"'{activation}'" in code[1]
    assert not any(word in text for text in code for word in ("exp(", "erf(", "tanh("))


def test_a_smooth_activation_that_is_not_alone_behind_a_norm() -> None:
    functional = torch.nn.functional

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = axisnorm.layer_norm(x, (8,))
        z = axisnorm.layer_norm(x, (8,), activation="silu")
        tanh = functional.gelu(axisnorm.layer_norm(x, (8,)), approximate="tanh")
        twice = functional.gelu(functional.silu(axisnorm.layer_norm(x, (8,))), approximate="none")
        return y + functional.silu(y), functional.gelu(z), functional.silu(x), tanh, twice

    given, wanted = (values((4, 8)).requires_grad_() for _ in range(2))
    for one, other in zip(torch.compile(run, fullgraph=True)(given), run(wanted), strict=True):
        torch.testing.assert_close(one, other)
        one.sum().backward(retain_graph=True)
        other.sum().backward(retain_graph=True)
        torch.testing.assert_close(given.grad, wanted.grad)


def test_a_smooth_activation_without_the_gradient_of_its_norm() -> None:
    """It was computed where the norm is, which has a gradient."""
    functional = torch.nn.functional

    def gated(x: Tensor) -> Tensor:
        y = axisnorm.layer_norm(x, (8,))
        with torch.no_grad():
            gate = functional.silu(y)
        return gate * x

    def constant(x: Tensor) -> Tensor:
        y = axisnorm.group_norm(x, 2)
        with torch.no_grad():
            return functional.gelu(y)

    given, wanted = (values((4, 8)).requires_grad_() for _ in range(2))
    gated(wanted).sum().backward()
    torch.compile(gated, fullgraph=True)(given).sum().backward()
    torch.testing.assert_close(given.grad, wanted.grad)
    assert not torch.compile(constant, fullgraph=True)(given).requires_grad


def test_activations_by_keyword() -> None:
    """Those of programs without a norm, too, stopped the compiler."""
    functional = torch.nn.functional

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = axisnorm.layer_norm(x, (8,))
        return functional.silu(input=x.sin()), functional.gelu(input=y, approximate="none")

    x = values((4, 8))
    for one, other in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sums", [False, True], ids=["norm", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_what_looks_like_the_backward_of_a_relu_in_another_type(
    dtype: torch.dtype, sums: bool
) -> None:
    weight, other = values((8,), seed=1), values((4, 8), seed=2).to(dtype)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = axisnorm.add_layer_norm(x, x, (8,)) if sums else axisnorm.layer_norm(x, (8,), weight)
        hidden = torch.where(torch.relu(y) <= 0, 0, other)
        return y, hidden, torch.where(torch.relu(y) <= 0, torch.zeros_like(other), y)

    wanted = run(values((4, 8)).requires_grad_())
    found = torch.compile(run, fullgraph=True)(values((4, 8)).requires_grad_())
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "AddLayerNorm", "BatchNorm2d"])
def test_a_relu_is_zero_where_its_float16_is(name: str) -> None:
    make, _ = MODULES[name]
    norm = make().half()
    torch.nn.init.constant_(norm.weight, 2.0**-24)  # what rounds to 0 and what does not
    given = [t.half() for t in arguments(name, 4)]

    def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in given]
        y = run(*leaves)
        return torch.autograd.grad(y, [*leaves, norm.weight, norm.bias], torch.ones_like(y))

    found = gradients(torch.compile(lambda *given: norm(*given).relu(), fullgraph=True))
    for one, other in zip(found, gradients(lambda *given: norm(*given).relu()), strict=True):
        torch.testing.assert_close(one, other)


@needs_direct_calls
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("norm", ["layer", "group", "batch", "masked", "sum"])
def test_activations_are_applied_in_the_same_pass(
    activation: str, norm: str, code: list[str]
) -> None:
    running = torch.zeros(8), torch.ones(8)
    mask = values((4, 8, 6), seed=3) > 0

    def run(x: Tensor) -> Tensor:
        if norm == "layer":
            return axisnorm.layer_norm(x, (6,), activation=activation)
        if norm == "group":
            return axisnorm.group_norm(x, 2, activation=activation)
        if norm == "batch":
            return axisnorm.batch_norm(x, *running, training=True, activation=activation)
        if norm == "sum":
            add = torch.ops.axisnorm.add_norm_fwd
            return add(x, x.flip(0), None, None, None, 0.0, "... [d]", activation)[0]
        return axisnorm.normalize(x, "n c [l]", mask=mask, activation=activation)

    found = []
    for call in (torch.compile(run, fullgraph=True), run):
        x = values((4, 8, 6)).requires_grad_()
        y = call(x)
        y.backward(values((4, 8, 6), seed=2))
        found.append((y, x.grad))
    assert all(map(torch.equal, *found))
    assert f"'{activation}'" in code[0] and f"'{activation}'" in code[1]


@needs_direct_calls
def test_training_by_running_statistics(code: list[str]) -> None:
    """Of a BatchNorm that is frozen, or in evaluation."""
    module, eager = ann.BatchNorm2d(8).eval(), ann.BatchNorm2d(8).eval()
    x, upstream = values((4, 8, 2, 3)), values((4, 8, 2, 3), seed=1)
    given, wanted_given = (x.clone().requires_grad_() for _ in range(2))
    y, wanted = torch.compile(module, fullgraph=True)(given), eager(wanted_given)
    assert torch.equal(y, wanted)
    y.backward(upstream)
    wanted.backward(upstream)
    assert torch.equal(given.grad, wanted_given.grad)
    assert torch.equal(module.weight.grad, eager.weight.grad)
    assert torch.equal(module.bias.grad, eager.bias.grad)
    assert "op_forward_into" in code[0] and "op_backward_into" in code[1]


@pytest.mark.parametrize(
    ("own", "other"),
    [(ann.RMSNorm, torch.nn.RMSNorm), (ann.LayerNorm, torch.nn.LayerNorm)],
)
def test_dynamic_modules_are_compiled_as_often_as_those_of_torch(own: Any, other: Any) -> None:
    """RMSNorm was compiled twice: the default of weight_offset was a variable of the graph."""
    counts = []
    for make in (own, other):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        run = torch.compile(make(8), dynamic=True, fullgraph=True, backend=counter)
        for rows in (4, 5, 7):
            run(values((rows, 8)))
        counts.append(counter.frame_count)
    assert counts[0] <= counts[1]


def test_compiled_graphs_are_cached() -> None:
    found = []
    with torch._inductor.utils.fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            first, second = ann.BatchNorm1d(8), ann.AddLayerNorm(8, dropout_p=0.1)
            run = torch.compile(lambda x: second(first(x), x), fullgraph=True)  # noqa: B023
            run(values((4, 8)).requires_grad_()).sum().backward()
            found.append(dict(torch._dynamo.utils.counters["aot_autograd"]))
    assert found[0].get("autograd_cache_miss") == 1 and found[1].get("autograd_cache_hit") == 1
    assert not any("bypass" in key for counts in found for key in counts)


def test_what_another_version_has_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that call no operator of this package are."""
    from axisnorm import _torch_inductor

    norm, other = ann.LayerNorm(8), torch.nn.Linear(8, 8)
    x = values((4, 8))

    def found(module: torch.nn.Module) -> tuple[int, int]:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        with torch.no_grad():
            torch.compile(module, fullgraph=True)(x)
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        return hits, counters["inductor"]["fxgraph_cache_miss"]

    with torch._inductor.utils.fresh_cache():
        assert [found(norm)[0], found(other)[0]] == [0, 0]
        assert [found(norm)[0], found(other)[0]] == [1, 1]
        monkeypatch.setattr(_torch_inductor, "_fingerprint", lambda: "another version")
        assert found(norm) == (0, 1)
        assert found(norm)[0] == 1
        assert found(other)[0] == 1


def test_negated_tensors_are_compiled_anew() -> None:
    """So that compiled programs need not ask of each input whether its memory holds -x."""
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda x, w, b: axisnorm.layer_norm(x, (8,), w, b), fullgraph=True, backend=counter
    )
    given = [values((8,) if i else (4, 8), seed=i) for i in range(3)]
    wanted = run(*given)
    for i in range(3):
        negated = [torch._neg_view(-t) if j == i else t for j, t in enumerate(given)]
        assert negated[i].is_neg()
        assert torch.equal(run(*negated), wanted)
        assert counter.frame_count == i + 2


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("name", ["norm", "running", "sum"])
def test_compiled_programs_read_negated_gradients(name: str, activation: str | None) -> None:
    """The memory of a gradient may hold the opposite sign, for which nothing is compiled anew."""
    x, residual, weight, bias, mean, grad = (
        values((4, 8) if i in (0, 1, 5) else (8,), seed=i).requires_grad_(i < 4) for i in range(6)
    )

    def norm(*given: Tensor) -> Tensor:
        x, residual, weight, bias = given
        if name == "norm":
            y = axisnorm.layer_norm(x, (8,), weight, bias)
        elif name == "running":
            y = axisnorm.batch_norm(x, mean, mean.abs(), weight, bias)
        else:
            y = axisnorm.add_layer_norm(x, residual, (8,), weight, bias)
        return torch.relu(y) if activation else y

    given = (x, residual, weight, bias)
    used = given if name == "sum" else (x, weight, bias)
    run = torch.compile(norm, fullgraph=True)
    negated = torch._neg_view(-grad)
    assert negated.is_neg()
    wanted = torch.autograd.grad(norm(*given), used, grad)
    for upstream in (grad, negated, grad):  # the second call is made with what the first one kept
        found = torch.autograd.grad(run(*given), used, upstream)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("marked", [0, 2])
def test_marked_dimensions(marked: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: axisnorm.group_norm(x, 2), fullgraph=True, backend=counter)
    x = values((4, 8, 6))
    torch._dynamo.mark_dynamic(x, marked)
    for size in (6, 7, 9):
        given = x if size == 6 else values((4, 8, size) if marked else (size, 8, 6))
        assert torch.equal(run(given), axisnorm.group_norm(given, 2))
    assert counter.frame_count == 1


def test_out_of_many_shapes() -> None:
    """Strides that are symbols were sorted."""
    counter = CompileCounterWithBackend("aot_eager")

    def into(x: Tensor, out: Tensor) -> Tensor:
        return axisnorm.layer_norm(x, 4, out=out)

    run = torch.compile(into, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 3, 5, 7):
        x = values((rows, 6, 4))
        for out in (torch.empty_like(x), torch.empty(6, 4, rows).permute(2, 0, 1)):
            assert run(x, out) is out
            assert torch.equal(out, axisnorm.layer_norm(x, 4))
    assert counter.frame_count <= 3
    with pytest.raises(RuntimeError, match="each of its elements has its own memory"):
        run(x, torch.empty(4).expand(7, 6, 4))


def test_number_of_groups_that_changes() -> None:
    """The second number was symbolic, and refused by hasattr."""
    run = torch.compile(axisnorm.group_norm, fullgraph=True, backend="aot_eager")
    x = values((4, 8))
    for groups in (1, 2, 4):
        assert torch.equal(run(x, groups), axisnorm.group_norm(x, groups))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w, eps: axisnorm.rms_norm(x, (4,), w, eps),
        lambda x, w, eps: axisnorm.layer_norm(x, (4,), w, w, eps),
        lambda x, w, eps: axisnorm.add_rms_norm(x, x, (4,), w, eps),
        lambda x, w, eps: axisnorm.layer_norm_2d(x, w, w, eps),
    ],
    ids=["rms_norm", "layer_norm", "add_rms_norm", "layer_norm_2d"],
)
def test_constants_from_outside_the_function(norm: Callable[..., Any]) -> None:
    x, weight, eps = values((3, 4, 4)), values((4,), seed=1), 1e-3
    compiled = torch.compile(
        lambda x: norm(x, weight, eps), dynamic=True, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), norm(x, weight, 1e-3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ann.BatchNorm1d(8, momentum=None),
        lambda: ann.Norm(
            "[n] c; momentum=none", affine="c", sizes={"c": 8}, track_running_stats=True
        ),
    ],
    ids=["BatchNorm1d", "Norm"],
)
def test_the_average_of_all_batches_is_compiled_once(make: Callable[[], Any]) -> None:
    compiled, eager = make(), make()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(compiled, backend=counter, fullgraph=True)
    for seed in range(10):
        x = values((4, 8), seed=seed)
        torch.testing.assert_close(run(x), eager(x))
    assert counter.frame_count == 1
    assert int(compiled.num_batches_tracked) == 10
    torch.testing.assert_close(compiled.running_mean, eager.running_mean)
    torch.testing.assert_close(compiled.running_var, eager.running_var)


def test_one_value_a_channel_leaves_no_trace() -> None:
    module = ann.BatchNorm1d(3)
    run = torch.compile(module, backend="aot_eager")
    with pytest.raises(Exception, match="more than 1 value per channel"):
        run(torch.zeros(1, 3))
    assert run(torch.zeros(0, 3)).shape == (0, 3)
    same(module, ann.BatchNorm1d(3))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": lambda f: grad(lambda x: f(x).pow(3).sum()),
    "grad of grad": lambda f: grad(lambda x: grad(lambda t: f(t).pow(3).sum())(x).pow(2).sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x + 1,)),
    "jacrev": lambda f: jacrev(f),
    "hessian": lambda f: hessian(lambda x: f(x).pow(3).sum()),
    "vmap": lambda f: vmap(f, in_dims=1),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).pow(3).sum())),
}


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: axisnorm.layer_norm(x, x.shape[-1:], mask=x > -2),
    "sum": lambda x: axisnorm.add_rms_norm(x, x.sin(), x.shape[-1:]),
    "statistics": lambda x: torch.stack(axisnorm.statistics(x, "... [d]")[:2]),
}


@pytest.mark.parametrize(
    ("norm", "transform"),
    [("norm", name) for name in TRANSFORMS]
    + [(norm, name) for norm in ("sum", "statistics") for name in ("grad", "jvp", "vmap")],
)
def test_transforms_under_compile(norm: str, transform: str) -> None:
    """grad was refused, jvp lost the tangents."""
    x = values((3, 3), F64)
    run = TRANSFORMS[transform](NORMS[norm])
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (found, run(x))), strict=True):
        assert b.any() and torch.allclose(a, b, rtol=1e-10, atol=1e-11)


def test_double_backward_of_a_compiled_function_is_right_or_refused() -> None:
    def norm(x: Tensor) -> Tensor:
        return axisnorm.layer_norm(x, 4).pow(3).sum()

    def second(f: Callable[[Tensor], Tensor]) -> Tensor:
        x = values((3, 4), F64).requires_grad_()
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    assert torch.allclose(second(torch.compile(norm, backend="eager")), second(norm))
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        second(torch.compile(norm, backend="aot_eager"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd() -> None:
    x = values((3, 4)).requires_grad_()
    wanted = torch.autograd.grad(axisnorm.layer_norm(x, 4).pow(3).sum(), x)[0]
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
        x.grad = None
        with torch._dynamo.utils.maybe_enable_compiled_autograd(True):
            wrap(lambda t: axisnorm.layer_norm(t, 4).pow(3).sum())(x).backward()
        assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize(
    "module, shape",
    [
        (ann.LayerNorm(4), (3, 4)),
        (ann.RMSNorm((3, 4), activation="gelu"), (2, 3, 4)),
        (ann.GroupNorm(2, 4, activation="relu"), (3, 4, 2)),
        (ann.BatchNorm1d(4), (3, 4, 2)),
        (ann.BatchNorm1d(4, activation="silu").eval(), (3, 4, 2)),
        (ann.AddLayerNorm(4, dropout_p=0.5), (3, 4)),
        (ann.AddRMSNorm(4, prenorm=True), (3, 4)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_of_the_short_way(
    module: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    """Their nodes' backward is in C, which compilers do not look into."""
    torch._dynamo.reset()
    x = values(shape).requires_grad_()
    given = (
        (x, values(shape, seed=1))
        if isinstance(module, (ann.AddLayerNorm, ann.AddRMSNorm))
        else (x,)
    )
    wrt = [x, *module.parameters()]
    for step in range(2):
        if (var := getattr(module, "running_var", None)) is not None:
            var.fill_(step + 1.0)

        def loss() -> Tensor:
            torch.manual_seed(0)
            found = module(*given)
            return sum((y.pow(3).sum() for y in found), torch.tensor(0.0))

        wanted = torch.autograd.grad(loss(), wrt)
        for t in wrt:
            t.grad = None
        with torch._dynamo.utils.maybe_enable_compiled_autograd(True):
            loss().backward()
        for t, g in zip(wrt, wanted, strict=True):
            assert t.grad is not None and torch.allclose(t.grad, g, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(axisnorm.group_norm(x, 2).pow(3).sum(), x)[0]

    def second(x: Tensor) -> Tensor:
        return grad(lambda t: grad(lambda s: axisnorm.layer_norm(s, 3).pow(3).sum())(t).sum())(x)

    x, other = values((2, 4, 3), F64), values((5, 4, 3), F64, 1)
    batched = vmap(lambda t: axisnorm.layer_norm(t, 3))
    for f in (gradient, batched) if mode == "symbolic" else (gradient, batched, second):
        graph = make_fx(f, tracing_mode=mode)(x)
        for given in (x, other) if mode == "symbolic" else (x,):
            assert torch.allclose(graph(given), f(given), rtol=1e-11, atol=1e-12)
    names = [str(node.target) for node in make_fx(gradient)(x).graph.nodes]
    assert "axisnorm.norm_fwd.default" in names and "axisnorm.norm_bwd.default" in names


TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: axisnorm.layer_norm(x, 3, x[0, 0], x[0, 1]),
    "masked": lambda x: axisnorm.rms_norm(x, 3, x[0, 0], mask=torch.ones(4, 1) > 0),
    "batch_norm": lambda x: axisnorm.batch_norm(
        x, torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64), x[0, :, 0], training=True
    ),
    "reference": lambda x: axisnorm.normalize(x, "n [c] l; scale=var"),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_gradient_has_a_gradient(name: str) -> None:
    """The operators of backward had none: a warning, and a gradient that lacked theirs."""

    def gradient(x: Tensor, create_graph: bool = False) -> Tensor:
        y = TRACED[name](x).pow(3).sum()
        return torch.autograd.grad(y, x, create_graph=create_graph)[0]

    x, v = values((2, 4, 3), F64), values((2, 4, 3), F64, 1)
    leaf = x.clone().requires_grad_()
    traced = make_fx(lambda t: gradient(t))(leaf)
    (wanted,) = torch.autograd.grad((gradient(leaf, True) * v).sum(), leaf)
    (found,) = torch.autograd.grad((traced(leaf) * v).sum(), leaf)
    torch.testing.assert_close(found, wanted)
    # The second derivatives are symmetric.
    torch.testing.assert_close(jvp(traced, (x,), (v,))[1], wanted)


@Modes
def test_exported_programs(train: bool, tmp_path: Path) -> None:
    """Saved, loaded and run by another process at another size of the batch."""
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = ["AddLayerNorm", "BatchNorm2d", "InstanceNorm2d", "LayerNorm", "Norm"]
    for name in exported:
        make = MODULES[name][0]
        module, eager = make().train(train), make().train(train)
        given, other = arguments(name, 4), arguments(name, 7, 3)
        program = torch.export.export(
            module, tuple(given), dynamic_shapes=tuple({0: rows} for _ in given)
        )
        torch.export.save(program, tmp_path / f"{name}.pt2")
        run, wanted = program.module(), eager(*other)
        assert torch.equal(run(*other), wanted)
        for key, value in run.state_dict().items():
            assert torch.equal(value, eager.state_dict()[key])
        assert torch.equal(
            program.run_decompositions().module()(*other), make().train(train)(*other)
        )
        torch.save((other, wanted.detach()), tmp_path / f"{name}.pt")
    script = (
        "import pathlib, sys, torch, axisnorm\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.pt2')):\n"
        "    given, wanted = torch.load(path.with_suffix('.pt'))\n"
        "    assert torch.equal(torch.export.load(path).module()(*given), wanted), path\n"
        "    print(path.stem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == exported, done.stderr


@Modes
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_modules(train: bool, tmp_path: Path) -> None:
    for name, (make, _) in MODULES.items():
        eager = make().train(train)
        given, other = arguments(name, 4), arguments(name, 7, 3)
        traced = torch.jit.trace(make().train(train), tuple(given), check_trace=False)
        eager.load_state_dict(traced.state_dict())
        assert torch.equal(traced(*other), eager(*other))
        same(traced, eager)
        torch.jit.save(traced, tmp_path / "traced.pt")
        assert torch.equal(torch.jit.load(tmp_path / "traced.pt")(*other), eager(*other))
