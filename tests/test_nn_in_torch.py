"""The modules among torch's own tools: parametrizations, fusion, wrappers, tracers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases import values
from torch import distributed
from torch.nn.utils import parametrizations, parametrize

from axisnorm import nn

Make = Callable[[], torch.nn.Module]

# Every kind of module with the shape of its input.
EVERY: tuple[tuple[Make, tuple[int, ...]], ...] = (
    (lambda: nn.LayerNorm(8), (4, 3, 8)),
    (lambda: nn.RMSNorm(8), (4, 3, 8)),
    (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    (lambda: nn.GroupNorm(2, 4, affine=False), (3, 4, 5)),
    (lambda: nn.BatchNorm1d(4), (3, 4)),
    (lambda: nn.BatchNorm2d(4, momentum=None), (3, 4, 5, 2)),
    (lambda: nn.BatchNorm3d(4, affine=False, track_running_stats=False), (3, 4, 2, 2, 2)),
    (lambda: nn.InstanceNorm1d(4), (3, 4, 5)),
    (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 2)),
    (lambda: nn.InstanceNorm3d(4), (4, 2, 3, 2)),
    (lambda: nn.LayerNorm2d(4), (3, 4, 5, 2)),
    (lambda: nn.Norm("n (g=2 [c]) [l]; affine=g c", sizes={"c": 2}), (3, 4, 5)),
    (lambda: nn.Norm("[n] (c=4) [l]; affine=c", track_running_stats=True), (3, 4, 5)),
)
Every = pytest.mark.parametrize(("make", "shape"), EVERY, ids=[str(make()) for make, _ in EVERY])


class Model(torch.nn.Module):
    """A norm somewhere inside, between other operations."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"norm": norm})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["norm"](x * 2).relu() + x


class Sum(torch.nn.Module):
    """The norm of a residual sum."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = self.norm(x, residual)
        return y[0] + y[1] if isinstance(y, tuple) else y


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


# --- torch.fx


@pytest.mark.parametrize("training", [True, False])
@Every
def test_fx_takes_the_modules_for_leaves(
    make: Make, shape: tuple[int, ...], training: bool
) -> None:
    model = randomized(Model(make())).train(training)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [(node.target, len(node.args), node.kwargs) for node in calls] == [("inner.norm", 1, {})]
    assert not [node for node in traced.graph.nodes if node.op == "get_attr"]
    x = values(shape)
    assert torch.equal(traced(x), model(x))
    for key, value in model.state_dict().items():
        assert torch.equal(traced.state_dict()[key], value)
    other = training is False
    assert torch.equal(traced.train(other)(x), model.train(other)(x))


@pytest.mark.parametrize("make", [nn.AddLayerNorm, nn.AddRMSNorm])
def test_fx_takes_norms_of_sums_for_leaves(make: Callable[..., torch.nn.Module]) -> None:
    model = randomized(Sum(make(8)))
    traced = torch.fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["norm"]
    x, residual = values((3, 8)), values((3, 8), seed=1)
    assert torch.equal(traced(x, residual), model(x, residual))


def test_fx_passes_masks_on() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.norm(x, mask)

    model = Masked()
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    x = values((3, 4, 5))
    assert torch.equal(traced(x, x > 0), model(x, x > 0))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [(nn.LayerNorm(8), (3, 8)), (nn.GroupNorm(2, 4), (3, 4, 5)), (nn.RMSNorm(8), (3, 8))],
)
def test_fx_of_a_norm_alone_records_the_function(
    norm: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    """The root of a graph cannot be a call in it."""
    traced = torch.fx.symbolic_trace(norm)
    (call,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert call.target.__module__ == "axisnorm.functional"
    x = values(shape)
    assert torch.equal(traced(x), norm(x))


# --- torch.jit.trace


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@Every
def test_traced_in_evaluation_then_run_on_other_input(make: Make, shape: tuple[int, ...]) -> None:
    model = randomized(Model(make())).eval()
    traced = torch.jit.trace(model, values(shape))
    x = values(shape, seed=5).requires_grad_()
    y, wanted = traced(x), model(x)
    assert torch.equal(y, wanted)
    (found,), (exact,) = (torch.autograd.grad(out.sum(), x) for out in (y, wanted))
    torch.testing.assert_close(found, exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_batch_norm_goes_on_training() -> None:
    x = values((3, 4, 5))
    ours, traced_of = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    traced = torch.jit.trace(traced_of, values((3, 4, 5), seed=9), check_trace=False)
    traced_of.reset_running_stats()
    for seed in range(3):
        torch.testing.assert_close(traced(x + seed), ours(x + seed))
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(traced.state_dict()[key], value)


# --- torch.nn.utils


class Twice(torch.nn.Module):
    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return 2 * t


PARAMETERS = [(make, shape, name) for make, shape in EVERY for name, _ in make().named_parameters()]


@pytest.mark.parametrize(
    ("make", "shape", "name"), PARAMETERS, ids=[f"{make()} {name}" for make, _, name in PARAMETERS]
)
def test_parametrized(make: Make, shape: tuple[int, ...], name: str) -> None:
    module = randomized(make())
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        getattr(doubled, name).mul_(2)
    parametrize.register_parametrization(module, name, Twice())
    x = values(shape)
    y, wanted = module(x), doubled(x)
    assert torch.equal(y, wanted)
    y.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    original = getattr(module.parametrizations, name).original
    torch.testing.assert_close(original.grad, 2 * getattr(doubled, name).grad)
    parametrize.remove_parametrizations(module, name)
    assert type(module) is type(doubled) and torch.equal(module.eval()(x), doubled.eval()(x))


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_norms_of_weights(wrap: Callable[..., torch.nn.Module]) -> None:
    x = values((3, 4, 8))
    ours, torchs = (wrap(package.LayerNorm(8)) for package in (nn, torch.nn))
    torchs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), torchs(x))


def test_a_convolution_takes_the_batch_norm_in() -> None:
    conv, norm = torch.nn.Conv2d(3, 4, 3), randomized(nn.BatchNorm2d(4))
    x = values((2, 3, 6, 6))
    norm(conv(x))
    conv.eval(), norm.eval()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
    torch.testing.assert_close(fused(x), norm(conv(x)), rtol=1e-4, atol=1e-5)


def test_batch_norms_become_synchronized_ones() -> None:
    model = torch.nn.Sequential(randomized(nn.BatchNorm2d(4)), nn.LayerNorm(5), nn.BatchNorm1d(4))
    model[0](values((2, 4, 3, 5)))
    before = copy.deepcopy(model)
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(m) for m in converted] == [
        torch.nn.SyncBatchNorm,
        nn.LayerNorm,
        torch.nn.SyncBatchNorm,
    ]
    assert list(converted.state_dict()) == list(before.state_dict())
    x = values((2, 4, 3, 5), seed=1)
    torch.testing.assert_close(converted[0].eval()(x), before[0].eval()(x))


def test_memory_formats_of_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8),
                                nn.InstanceNorm2d(8), nn.LayerNorm2d(8))  # fmt: skip
    x = values((2, 3, 6, 6))
    wanted = copy.deepcopy(model)(x)
    y = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)


# --- Wrappers


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(str(Path(folder) / "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        distributed.destroy_process_group()


def every_norm() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), nn.LayerNorm(8), torch.nn.Sequential(nn.RMSNorm(8), nn.BatchNorm1d(3)),
        nn.GroupNorm(3, 3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        nn.Norm("b s [d]; affine=d", sizes={"d": 8}),
    )  # fmt: skip


def trained(model: torch.nn.Module) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(values((4, 3, 8))).square().sum().backward()
        optimizer.step()
    return model


def distributed_data_parallel(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model[1], nn.LayerNorm)
    return model


def sharded_in_flat_parameters(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True,
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrap",
    [distributed_data_parallel, sharded, sharded_in_flat_parameters],
    ids=lambda w: w.__name__,
)
@pytest.mark.usefixtures("one_process")
def test_training_in_a_wrapper(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    wanted = trained(every_norm()).state_dict()
    model = every_norm()
    trained(wrap(model))
    for key, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, wanted[key])
