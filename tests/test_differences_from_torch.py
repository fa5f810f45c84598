"""Where axisnorm differs from torch on purpose: one test for each row of the documented table.

Each shows torch's side too, so that a row goes when torch no longer differs.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import values
from torch.utils.checkpoint import checkpoint

import axisnorm
from axisnorm import ArgumentError, DtypeError, nn

TABLE = Path(__file__).parents[1] / "docs" / "differences-from-torch.md"


def test_the_table_has_a_row_for_each_test_here() -> None:
    rows = re.findall(r"^\| (\w+) \|", TABLE.read_text(), re.MULTILINE)
    assert rows.pop(0) == "name"
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert rows == tests[1:]


def off(actual: torch.Tensor, exact: torch.Tensor | float) -> float:
    return float((actual.double() - exact).abs().max())


def test_mean_far_from_zero() -> None:
    x = torch.tensor([40000.0, 40001, 40002, 40003])
    exact = F.layer_norm(x.double(), (4,))
    column, row = x.reshape(4, 1), x.reshape(1, 1, 4)
    for package in (F, axisnorm):
        y = package.batch_norm(column, None, None, training=True)
        z = package.instance_norm(row)
        errors = off(y.reshape(4), exact), off(z.reshape(4), exact)
        assert max(errors) < 1e-6 if package is axisnorm else min(errors) > 5e-4


def test_constant_group() -> None:
    def outputs(package: Any, value: float, dtype: torch.dtype) -> list[torch.Tensor]:
        x = torch.full((2, 1000), value, dtype=dtype)
        bias, three = torch.full((1000,), 3.0, dtype=dtype), torch.full((1,), 3.0, dtype=dtype)
        return [
            package.layer_norm(x, (1000,), None, bias),
            package.group_norm(x, 1, None, bias),
            package.instance_norm(x.reshape(2, 1, 1000), None, None, None, three),
            package.batch_norm(x.reshape(2000, 1), None, None, None, three, True),
        ]

    for dtype in (torch.float32, torch.float16):
        found = outputs(F, 1000.3333, dtype)
        exact = outputs(axisnorm, 1000.3333, dtype)
        assert all(torch.equal(y, torch.full_like(y, 3.0)) for y in exact)
        errors = [off(y, 3.0) for y in found]
        assert min(errors[1:]) > 5e-4 if dtype == torch.float32 else errors[0] > 5e-3
    x, bias = torch.full((2, 4, 3), 2.0), torch.arange(4.0)
    assert F.group_norm(x, 4, None, bias, 0.0).isnan().all()
    assert off(axisnorm.group_norm(x, 4, None, bias, 0.0), bias.reshape(4, 1)) == 0


def test_large_magnitude() -> None:
    x = torch.tensor([[1e30, -1e30, 3e30, 0.0]])
    assert F.layer_norm(x, (4,)).isnan().all()
    assert off(axisnorm.layer_norm(x, 4), F.layer_norm(x.double(), (4,))) < 1e-6


def test_forward_mode_twice() -> None:
    x = torch.tensor([1.0, 2, 4, 1], dtype=torch.float64)

    def hessian(package: Any, transform: Any) -> torch.Tensor:
        def energy(t: torch.Tensor) -> torch.Tensor:
            return package.layer_norm(t, (4,)).pow(3).sum()

        return transform(transform(energy))(x)

    exact = hessian(F, torch.func.jacrev)
    assert off(hessian(F, torch.func.jacfwd), exact) > 1.0
    assert off(hessian(axisnorm, torch.func.jacfwd), exact) < 1e-12


def test_second_derivative_without_weight() -> None:
    x = values((2, 3), torch.float64).requires_grad_()
    b = values((3,), torch.float64, 1).requires_grad_()

    def norm(package: Any) -> Any:
        return lambda t, s: package.layer_norm(t, (3,), None, s)

    assert torch.autograd.gradgradcheck(norm(axisnorm), (x, b))
    assert not torch.autograd.gradgradcheck(norm(F), (x, b), raise_exception=False)


def test_bias_without_weight() -> None:
    x, grad = values((2, 4, 3)), values((2, 4, 3), seed=1)
    bias = values((4,), seed=2).requires_grad_()
    with pytest.raises(RuntimeError, match="does not have a device"):
        F.group_norm(x, 2, None, bias).backward(grad)
    axisnorm.group_norm(x, 2, None, bias).backward(grad)
    assert off(bias.grad, grad.double().sum((0, 2))) < 1e-6


def test_one_value_per_channel() -> None:
    x, bias = torch.tensor([[5.0, 6, 7, 8]]), torch.tensor([1.0, 2, 3, 4])
    with pytest.raises(ValueError, match="more than 1 value"):
        F.group_norm(x, 4, None, bias)
    assert off(F.group_norm(x.repeat(2, 1), 4, None, bias), bias) < 1e-4
    assert axisnorm.group_norm(x, 4, None, bias).tolist() == [bias.tolist()]
    image = x.reshape(1, 4, 1, 1)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        F.instance_norm(image, bias=bias)
    assert axisnorm.instance_norm(image, bias=bias).flatten().tolist() == bias.tolist()
    for package in (F, axisnorm):
        with pytest.raises(ValueError, match="more than 1 value"):
            package.batch_norm(x, None, None, training=True)


def test_failed_batch() -> None:
    for package, counted in ((torch.nn, 1), (nn, 0)):
        module = package.BatchNorm1d(4)
        with pytest.raises(ValueError, match="more than 1 value"):
            module(torch.ones(1, 4))
        assert module.num_batches_tracked == counted


def test_empty_batch() -> None:
    for package, counted in ((torch.nn, 1), (nn, 0)):
        module = package.BatchNorm1d(4)
        assert module(torch.ones(0, 4)).shape == (0, 4)
        assert module.num_batches_tracked == counted
        assert not module.running_mean.any()


def test_empty_group() -> None:
    for package in (F, axisnorm):
        weight = torch.ones(4, requires_grad=True)
        package.group_norm(torch.ones(2, 4, 0), 4, weight).sum().backward()
        assert weight.grad.isnan().all() if package is F else not weight.grad.any()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
def test_average_of_all_batches() -> None:
    x = values((4, 3))

    def over_many(package: Any) -> torch.Tensor:
        models = [package.BatchNorm1d(3, momentum=None) for _ in range(2)]
        parameters, buffers = torch.func.stack_module_state(models)

        def run(p: Any, b: Any) -> torch.Tensor:
            return torch.func.functional_call(models[0], (p, b), (x,))

        return torch.vmap(run)(parameters, buffers)[1].detach()

    def exported(package: Any) -> torch.Tensor:
        module = package.BatchNorm1d(3, momentum=None)
        return torch.export.export(module, (x,), strict=True).module()(x).detach()

    for call in (over_many, exported):
        with pytest.raises(Exception, match=r"item\(\)|data-dependent"):
            call(torch.nn)
        assert off(call(nn), F.batch_norm(x.double(), None, None, training=True)) < 1e-5


def test_number_of_channels() -> None:
    x = torch.ones(2, 80, 3)
    with pytest.warns(UserWarning, match="does not match num_features"):
        torch.nn.InstanceNorm1d(64)(x)
    torch.nn.GroupNorm(4, 64, affine=False)(x)
    torch.nn.BatchNorm1d(64, affine=False, track_running_stats=False)(x)
    for module in (
        nn.InstanceNorm1d(64),
        nn.GroupNorm(4, 64, affine=False),
        nn.BatchNorm1d(64, affine=False, track_running_stats=False),
    ):
        with pytest.raises(ArgumentError, match=r"64 channels.*\(2, 80, 3\) has 80"):
            module(x)


def test_unread_parameters() -> None:
    x, c = values((2, 3, 4)), torch.ones(3)
    calls = (
        lambda p: p.batch_norm(x[:0], c, c, torch.ones(7)),
        lambda p: p.batch_norm(x[:0], None, None),
        lambda p: p.batch_norm(x, None, None, None, torch.ones(1, 3), True),
        lambda p: p.instance_norm(x[:, :1], None, None, None, torch.tensor(1.0)),
    )
    for call in calls:
        call(F)
        with pytest.raises(ArgumentError, match=r"so its shape is|has shape|come together"):
            call(axisnorm)
    w = torch.ones(4) * (1 + 1j)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(F.rms_norm(x, (4,), w), F.rms_norm(x, (4,), torch.ones(4)))
    with pytest.raises(DtypeError, match="real"):
        axisnorm.rms_norm(x, (4,), w)


def test_missing_axes() -> None:
    for call in (
        lambda p: p.batch_norm(torch.tensor(1.0), None, None, training=True),
        lambda p: p.instance_norm(
            torch.tensor(1.0), torch.ones(1), torch.ones(1), use_input_stats=False
        ),
        lambda p: p.instance_norm(
            torch.ones(3), torch.ones(3), torch.ones(3), use_input_stats=False
        ),
    ):
        with pytest.raises(IndexError):
            call(F)
        with pytest.raises(ArgumentError, match="at least 2 axes"):
            call(axisnorm)


def test_not_a_tensor() -> None:
    for make in (
        lambda p: p.GroupNorm(2, 4),
        lambda p: p.BatchNorm1d(4),
        lambda p: p.InstanceNorm1d(4),
    ):
        with pytest.raises(AttributeError):
            make(torch.nn)([1.0])
        with pytest.raises(TypeError):
            make(nn)([1.0])


def test_eps_not_finite() -> None:
    x, nan = values((2, 4, 3)), float("nan")
    running = torch.zeros(4), torch.ones(4)
    with pytest.raises(ArgumentError, match="momentum is a finite number"):
        axisnorm.batch_norm(x, *running, training=True, momentum=nan)
    assert not running[0].any()
    F.batch_norm(x, *running, training=True, momentum=nan)
    assert running[0].isnan().all()
    assert not F.layer_norm(x, (3,), eps=float("inf")).any()
    with pytest.raises(ArgumentError, match="eps is a finite number"):
        axisnorm.layer_norm(x, (3,), eps=float("inf"))
    for package in (F, axisnorm):
        for call in (
            lambda p: p.layer_norm(x, (3,), eps=nan),
            lambda p: p.rms_norm(x, (3,), eps=nan),
            lambda p: p.group_norm(x, 2, eps=nan),
            lambda p: p.instance_norm(x, eps=nan),
            lambda p: p.batch_norm(x, None, None, training=True, eps=nan),
        ):
            if package is F:
                assert call(package).isnan().all()
            else:
                with pytest.raises(ArgumentError, match="eps is a finite number"):
                    call(package)


def test_normalized_shape_of_a_function() -> None:
    x = values((2, 4))
    for name in ("layer_norm", "rms_norm"):
        with pytest.raises(TypeError, match="must be tuple of ints"):
            getattr(F, name)(x, 4)
        y = getattr(axisnorm, name)(x, 4)
        assert torch.equal(y, getattr(axisnorm, name)(x, (4,)))


def test_first_argument() -> None:
    x = values((2, 4, 3))
    for name, others in (
        ("layer_norm", {"normalized_shape": (3,)}),
        ("rms_norm", {"normalized_shape": (3,)}),
        ("group_norm", {"num_groups": 2}),
        ("instance_norm", {}),
        ("batch_norm", {"running_mean": None, "running_var": None, "training": True}),
    ):
        wanted = getattr(F, name)(input=x, **others)
        assert off(getattr(axisnorm, name)(x=x, **others), wanted.double()) < 1e-5
    for module in (nn.LayerNorm(3), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4)):
        assert torch.equal(module.eval()(input=x), module(x))


def test_num_groups() -> None:
    with pytest.raises(ZeroDivisionError):
        torch.nn.GroupNorm(0, 8)
    torch.nn.GroupNorm(-1, 8)
    for groups in (0, -1):
        with pytest.raises(ArgumentError, match="divisible"):
            nn.GroupNorm(groups, 8)


def test_checkpointed_batch() -> None:
    x = values((4, 3)).requires_grad_()
    for after, reentrant, counts in (
        (torch.nn.Identity(), False, (2, 1)),
        (torch.nn.Tanh(), False, (2, 2)),
        (torch.nn.Identity(), True, (2, 2)),
    ):
        for package, count in zip((torch.nn, nn), counts, strict=True):
            norm = package.BatchNorm1d(3)
            model = torch.nn.Sequential(norm, after)
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            assert norm.num_batches_tracked == count
            mean = torch.zeros(3)
            for _ in range(count):
                mean = 0.9 * mean + 0.1 * x.detach().mean(0)
            torch.testing.assert_close(norm.running_mean, mean)


def test_inference_input() -> None:
    with torch.inference_mode():
        x = values((3, 4)) * 2
    w = torch.ones(4, requires_grad=True)
    F.rms_norm(x, (4,), w).sum().backward()
    for call in (
        lambda: axisnorm.rms_norm(x, (4,), w),
        lambda: F.layer_norm(x, (4,), w),
        lambda: F.linear(x, w),
    ):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            call()
    axisnorm.rms_norm(x.clone(), (4,), w).sum().backward()


def test_channels_last() -> None:
    x = values((2, 8, 4, 4)).contiguous(memory_format=torch.channels_last)
    calls = (
        lambda p: p.instance_norm(x),
        lambda p: p.layer_norm(x, (4, 4)),
    )
    for call in calls:
        assert call(F).is_contiguous()
        assert call(axisnorm).is_contiguous(memory_format=torch.channels_last)


def test_lazy_features() -> None:
    plain = {"affine": False, "track_running_stats": False}
    for package, features in ((torch.nn, 0), (nn, 3)):
        module = package.LazyBatchNorm1d(**plain)
        module(torch.ones(2, 3, 4))
        assert module.num_features == features
    theirs, ours = torch.nn.LazyInstanceNorm1d(**plain), nn.LazyInstanceNorm1d(**plain)
    with pytest.warns(UserWarning, match="does not match num_features"):
        theirs(torch.ones(2, 3, 4))
    ours(torch.ones(2, 3, 4))
    assert (theirs.num_features, ours.num_features) == (0, 3)
    with pytest.raises(ValueError, match="num_features"):
        torch.nn.LazyInstanceNorm1d()(torch.ones(3, 4))
    unbatched = nn.LazyInstanceNorm1d()
    unbatched(torch.ones(3, 4))
    assert unbatched.weight.shape == (3,)


def test_lazy_refusal() -> None:
    for package, features in ((torch.nn, 3), (nn, 0)):
        module = package.LazyBatchNorm2d()
        with pytest.raises(ValueError, match="expected 4D input"):
            module(torch.ones(2, 3, 4))
        assert module.num_features == features
    assert module(torch.ones(2, 5, 4, 4)).shape == (2, 5, 4, 4)
    assert type(module) is nn.BatchNorm2d


def test_lazy_state() -> None:
    x, state = torch.ones(2, 3, 4), nn.InstanceNorm1d(3, affine=True).state_dict()
    for package, features in ((torch.nn, 0), (nn, 3)):
        module = package.LazyInstanceNorm1d(track_running_stats=False)
        module.load_state_dict(state)
        if features:
            module(x)
        else:
            with pytest.raises(ValueError, match="num_features"):
                module(x)
        assert module.num_features == features


def test_mixed_types() -> None:
    x, w = values((2, 4)), values((4,), torch.float16, 1)
    exact = F.layer_norm(x.double(), (4,), w.double())
    for call in (lambda p: p.layer_norm(x, (4,), w), lambda p: p.group_norm(x, 1, w)):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            call(F)
        y = call(axisnorm)
        assert y.dtype == torch.float32 and off(y, exact) < 1e-6
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        c = values((4,), dtype, 1).abs()
        exact = F.batch_norm(x.double(), c.double(), c.double(), c.double())
        for call in (
            lambda p, c=c: p.batch_norm(x, c, c, c),
            lambda p, c=c: p.instance_norm(x.unsqueeze(-1), c, c, c, use_input_stats=False),
        ):
            with pytest.raises(RuntimeError, match=r"mixed dtype|expected scalar type"):
                call(F)
            y = call(axisnorm)
            assert y.dtype == torch.float32 and off(y.reshape(2, 4), exact) < 1e-5


def test_rms_norm_warning() -> None:
    x, w = values((2, 4), torch.bfloat16), values((4,), seed=1)
    torch.set_warn_always(True)  # torch's warns once in a process, perhaps in an earlier test
    try:
        with pytest.warns(UserWarning, match="Mismatch dtype"):
            wanted = F.rms_norm(x, (4,), w)
    finally:
        torch.set_warn_always(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = axisnorm.rms_norm(x, 4, w)
    assert y.dtype == wanted.dtype
    assert off(y, F.rms_norm(x.double(), (4,), w.double(), 2.0**-23)) < 0.01


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting() -> None:
    model = torch.nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(5), nn.LazyBatchNorm1d())
    x = values((4, 3, 5))
    wanted = model(x)  # the lazy norm is none after this
    norms = list(model)
    model[0].reset_running_stats()
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), wanted)
    for before, after in zip(norms, model, strict=True):
        assert type(after) is getattr(torch.nn, type(before).__name__)
        assert after.weight is before.weight
    assert scripted[0].num_batches_tracked == norms[0].num_batches_tracked == 1
    for module in (
        nn.LayerNorm2d(3),
        nn.AddLayerNorm(5),
        nn.AddRMSNorm(5),
        nn.Norm("n [d]"),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace or torch\.export"):
            torch.jit.script(torch.nn.Sequential(module))

    class Own(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + 1

    assert torch.equal(torch.jit.script(Own(5))(x), x + 1)


def test_exact_class() -> None:
    from torch.ao.quantization import fuse_modules
    from torch.fx.experimental.optimization import fuse

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), torch.nn.ReLU())
    x = values((2, 3, 6, 6))
    model(x)
    wanted = model.eval()(x)
    with pytest.raises(AssertionError, match="fuser method"):
        fuse_modules(model, [["0", "1"]])
    unfused = fuse(model)
    assert isinstance(unfused.get_submodule("1"), nn.BatchNorm2d)
    assert torch.equal(unfused(x), wanted)

    for module in model.modules():
        if type(module).__module__ == "axisnorm.nn":
            module.__class__ = getattr(torch.nn, type(module).__name__)
    assert type(fuse_modules(model, [["0", "1"]])[1]) is torch.nn.Identity
    fused = fuse(model)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())
    for one in (fuse_modules(model, [["0", "1"]]), fused):
        torch.testing.assert_close(one(x), wanted, rtol=1e-4, atol=1e-5)
