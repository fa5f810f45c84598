"""The modules: torch.nn's in everything but what they compute wrongly."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from cases import values

from axisnorm import ArgumentError, Scheme, nn

Make = Callable[..., torch.nn.Module]

# Name, constructor arguments, an input's shape.
DROP_INS: tuple[tuple[str, tuple[object, ...], dict[str, object], tuple[int, ...]], ...] = (
    ("LayerNorm", (8,), {}, (3, 8)),
    ("LayerNorm", ((4, 8),), {"bias": False, "eps": 1e-3}, (3, 4, 8)),
    ("LayerNorm", (8,), {"elementwise_affine": False}, (3, 8)),
    ("RMSNorm", (8,), {}, (3, 8)),
    ("RMSNorm", ([4, 8],), {"eps": 1e-6}, (3, 4, 8)),
    ("GroupNorm", (2, 8), {}, (3, 8, 5)),
    ("GroupNorm", (4, 8), {"affine": False}, (3, 8, 5, 2)),
    ("BatchNorm1d", (8,), {}, (3, 8)),
    ("BatchNorm1d", (8,), {"momentum": None}, (3, 8, 5)),
    ("BatchNorm2d", (8,), {"affine": False, "momentum": 0.3}, (3, 8, 5, 2)),
    ("BatchNorm2d", (8,), {"track_running_stats": False}, (3, 8, 5, 2)),
    ("BatchNorm3d", (8,), {}, (3, 8, 2, 3, 2)),
    ("InstanceNorm1d", (8,), {}, (3, 8, 5)),
    ("InstanceNorm1d", (8,), {"affine": True}, (8, 5)),
    ("InstanceNorm2d", (8,), {"affine": True, "track_running_stats": True}, (3, 8, 5, 2)),
    ("InstanceNorm2d", (8,), {"track_running_stats": True, "momentum": None}, (3, 8, 5, 2)),
    ("InstanceNorm3d", (8,), {}, (3, 8, 2, 3, 2)),
)
DropIns = pytest.mark.parametrize(
    ("name", "args", "kwargs", "shape"), DROP_INS, ids=[f"{d[0]}-{d[2]}" for d in DROP_INS]
)


def pair(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> list[torch.nn.Module]:
    """Ours and torch's with the same random parameters."""
    ours, torchs = (getattr(package, name)(*args, **kwargs) for package in (nn, torch.nn))
    for i, parameter in enumerate(torchs.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    ours.load_state_dict(torchs.state_dict())
    return [ours, torchs]


@DropIns
def test_drop_in(name, args, kwargs, shape) -> None:  # type: ignore[no-untyped-def]
    ours, torchs = pair(name, args, kwargs)
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(ours) == repr(torchs)
    assert [k for k, _ in ours.named_parameters()] == [k for k, _ in torchs.named_parameters()]
    assert [k for k, _ in ours.named_buffers()] == [k for k, _ in torchs.named_buffers()]
    for training in (True, True, False):
        for module in (ours, torchs):
            module.train(training)
        x = values(shape, seed=int(training)).requires_grad_()
        y, wanted = ours(x), torchs(x)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=2e-6)
        leaves = [x, *ours.parameters()], [x, *torchs.parameters()]
        grad = values(shape, seed=7)
        for a, b in zip(
            torch.autograd.grad(y, leaves[0], grad),
            torch.autograd.grad(wanted, leaves[1], grad),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for key, value in torchs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-5, atol=1e-6)
    torchs.load_state_dict(ours.state_dict())


@DropIns
def test_copies(name, args, kwargs, shape) -> None:  # type: ignore[no-untyped-def]
    ours, _ = pair(name, args, kwargs)
    ours.eval()
    y = ours(values(shape))
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is type(ours) and torch.equal(other(values(shape)), y)
    moved = copy.deepcopy(ours).to(torch.float64)
    assert moved(values(shape, torch.float64)).dtype == torch.float64
    assert torch.equal(moved.to(torch.float32)(values(shape)), y)


@DropIns
def test_device_and_dtype(name, args, kwargs, shape) -> None:  # type: ignore[no-untyped-def]
    ours = getattr(nn, name)(*args, **kwargs, device="meta", dtype=torch.bfloat16)
    tensors = [*ours.parameters(), *(b for b in ours.buffers() if b.is_floating_point())]
    assert all(t.device.type == "meta" and t.dtype == torch.bfloat16 for t in tensors)
    made = ours.to_empty(device="cpu")
    made.reset_parameters() if hasattr(made, "reset_parameters") else None
    assert torch.isfinite(made.eval()(values(shape, torch.bfloat16)).float()).all()


LAZY = tuple(f"Lazy{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3))


@pytest.mark.parametrize("name", [*sorted({d[0] for d in DROP_INS}), *LAZY])
def test_constructors_are_torchs(name: str) -> None:
    ours, torchs = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(package, name)).parameters.values()
        ]
        for package in (nn, torch.nn)
    )
    # Older versions of torch cannot leave the bias of some of them away.
    known = {parameter for parameter, *_ in torchs}
    assert [one for one in ours if one[0] in known] == torchs
    assert {parameter for parameter, *_ in ours} - known <= {"bias", "activation"}


@DropIns
def test_state_travels_both_ways(name, args, kwargs, shape) -> None:  # type: ignore[no-untyped-def]
    ours, torchs = pair(name, args, kwargs)
    ours(values(shape))
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    torchs.load_state_dict(saved)
    again = getattr(nn, name)(*args, **kwargs)
    again.load_state_dict(torchs.state_dict())
    assert list(saved) == list(torchs.state_dict())
    assert saved._metadata == torchs.state_dict()._metadata
    assert torch.equal(again.eval()(values(shape)), ours.eval()(values(shape)))
    shallow = copy.copy(ours)
    assert all(a is b for a, b in zip(shallow.parameters(), ours.parameters(), strict=True))


def test_whole_modules_load_with_weights_only() -> None:
    for module in (nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Norm("n [d]; affine=d", sizes={"d": 4})):
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        allowed = [type(module), Scheme, set]
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(buffer, weights_only=True)
        x = values((3, 4))
        assert torch.equal(loaded.eval()(x), module.eval()(x))


# Constructor arguments and an input's shape of the modules that torch has not.
OWN: tuple[tuple[Callable[..., torch.nn.Module], tuple[int, ...]], ...] = (
    (lambda **k: nn.LayerNorm2d(8, **k), (3, 8, 5, 2)),
    (lambda **k: nn.LayerNorm2d(8, bias=False, **k), (3, 8, 5, 2)),
    (lambda **k: nn.LayerNorm2d(8, affine=False, **k), (3, 8, 5, 2)),
    (lambda **k: nn.AddLayerNorm(8, **k), (3, 8)),
    (lambda **k: nn.AddLayerNorm((3, 8), bias=False, dropout_p=0.5, **k), (2, 3, 8)),
    (lambda **k: nn.AddRMSNorm(8, eps=1e-6, **k), (3, 8)),
    (lambda **k: nn.Norm("n [c] h w", affine="c", sizes={"c": 8}, **k), (3, 8, 5, 2)),
    (lambda **k: nn.Norm("b s (h [d])", affine="h d", sizes={"h": 2, "d": 4}, **k), (3, 5, 8)),
    (lambda **k: nn.Norm("gemma.rms_norm", sizes={"d": 8}, **k), (3, 8)),
    (
        lambda **k: nn.Norm("[n] c [l]; affine=c", sizes={"c": 8}, track_running_stats=True, **k),
        (3, 8, 5),
    ),
)
Own = pytest.mark.parametrize(("make", "shape"), OWN, ids=[str(make()) for make, _ in OWN])


@Own
def test_own_modules_live_like_torchs(make: Make, shape: tuple[int, ...]) -> None:
    module = make(dtype=torch.float64)
    assert all(t.dtype in (torch.float64, torch.int64) for t in module.state_dict().values())
    inputs = [values(shape, torch.float64)] * (
        2 if isinstance(module, (nn.AddLayerNorm, nn.AddRMSNorm)) else 1
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module(*inputs)
    y = module.eval()(*inputs)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded = make(dtype=torch.float64)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (
        copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module)), loaded.eval(),
    ):  # fmt: skip
        assert type(other) is type(module) and repr(other) == repr(module)
        assert torch.equal(other(*inputs), y)
    halves = copy.deepcopy(module).to(torch.bfloat16)
    assert halves(*[t.bfloat16() for t in inputs]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "make",
    [
        *[lambda d=d, **k: getattr(nn, d[0])(*d[1], **d[2], **k) for d in DROP_INS],
        *[make for make, _ in OWN],
    ],
)
def test_made_on_meta_then_reset(make: Make) -> None:
    """No value of the memory that to_empty gives is left, running statistics included."""
    module = make(device="meta")
    assert all(t.is_meta for t in module.state_dict().values())
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(77)
    if module.state_dict():
        module.reset_parameters()
    fresh = make().state_dict()
    assert all(torch.equal(module.state_dict()[key], value) for key, value in fresh.items())


def test_skip_init() -> None:
    for made in (
        torch.nn.utils.skip_init(nn.LayerNorm, 8),
        torch.nn.utils.skip_init(nn.BatchNorm2d, 8, bias=False),
        torch.nn.utils.skip_init(nn.GroupNorm, 2, 8),
        torch.nn.utils.skip_init(nn.LayerNorm2d, 8),
        torch.nn.utils.skip_init(nn.AddRMSNorm, 8),
        torch.nn.utils.skip_init(nn.Norm, "n [d]; affine=d", sizes={"d": 8}),
    ):
        assert made.weight.shape == (8,) and not made.weight.is_meta


def test_repr_of_norm_says_what_is_not_usual() -> None:
    text = "n c [l]; affine=c"
    norm = nn.Norm(text, sizes={"c": 2}, bias=False, track_running_stats=True)
    assert repr(norm) == "Norm('n (c=2) [l]; affine=c', bias=False, track_running_stats=True)"
    assert (
        repr(nn.LayerNorm2d(4, bias=False)) == "LayerNorm2d(4, eps=1e-06, affine=True, bias=False)"
    )


@pytest.mark.parametrize(
    ("name", "args"),
    [("GroupNorm", (2, 8)), ("BatchNorm1d", (8,)), ("InstanceNorm1d", (8, 1e-5, 0.1, True))],
)
def test_bias_where_torchs_own_class_does_not_know_it(
    name: str, args: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in older versions of torch, whose reset_parameters takes every norm to have a bias."""
    base = getattr(torch.nn, name)
    base = base if name == "GroupNorm" else base.__mro__[1]
    newer = base.__init__

    def older(self: torch.nn.Module, *given: object) -> None:
        newer(self, *given)

    def reset(self: torch.nn.Module) -> None:
        raise AssertionError

    monkeypatch.setattr(base, "__init__", older)
    monkeypatch.setattr(base, "reset_parameters", reset)
    module = getattr(nn, name)(*args, bias=False)
    assert [key for key, _ in module.named_parameters()] == ["weight"] and module.bias is None
    torch.nn.init.zeros_(module.weight)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8))
    assert getattr(nn, name)(*args).bias.shape == (8,)


# --- Lazy forms


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("bias", [True, False])
def test_lazy_forms(name: str, bias: bool) -> None:
    rank = 2 + int(name[-2])
    x = values((3, 4, *[2] * (rank - 2)))
    known = "bias" in inspect.signature(getattr(torch.nn, name)).parameters
    ours = getattr(nn, name)(bias=bias)
    if not bias and not known:
        assert ours.bias is None  # there is nothing of torch's to compare with
        return
    torchs = getattr(torch.nn, name)(**({"bias": bias} if known else {}))
    assert isinstance(ours, getattr(torch.nn, name)) and repr(ours) == repr(torchs)
    assert ours.has_uninitialized_params() and list(ours.state_dict()) == list(torchs.state_dict())
    y = ours(x)
    eager = getattr(nn, name.removeprefix("Lazy"))
    assert type(ours) is eager and ours.num_features == 4 and (ours.bias is None) is not bias
    fresh = eager(4, affine=True, track_running_stats=True, bias=bias)
    assert torch.equal(fresh(x), y)
    assert all(torch.equal(v, ours.state_dict()[k]) for k, v in fresh.state_dict().items())
    torchs(x)
    torchs.load_state_dict(ours.state_dict())
    # State of a norm that has its channels makes them in one that has not.
    twin = getattr(nn, name)(bias=bias)
    twin.load_state_dict(ours.state_dict())
    assert not twin.has_uninitialized_params()
    twin.eval()(x)
    assert type(twin) is eager and twin.num_features == 4
    assert all(torch.equal(v, ours.state_dict()[k]) for k, v in twin.state_dict().items())
    masked = getattr(nn, name)()
    masked(x, x > 0)
    assert masked.num_features == 4


def test_schemes_say_what_the_modules_compute() -> None:
    for module, shape in (
        (nn.LayerNorm((4, 8)), (3, 4, 8)),
        (nn.RMSNorm(8), (3, 8)),
        (nn.GroupNorm(2, 8), (3, 8, 5)),
        (nn.BatchNorm2d(8), (3, 8, 5, 2)),
        (nn.InstanceNorm1d(8, affine=True), (3, 8, 5)),
        (nn.LayerNorm2d(8), (3, 8, 5, 2)),
        (nn.Norm("[b] s [d]", affine="s", sizes={"s": 4}), (3, 4, 8)),
    ):
        from axisnorm import normalize

        x = values(shape)
        y = normalize(x, module.scheme, module.weight, getattr(module, "bias", None))
        assert torch.equal(module(x), y)
    module = nn.BatchNorm1d(3).eval()
    assert module.scheme.statistics == "running"
    assert nn.BatchNorm1d(3, track_running_stats=False).eval().scheme.statistics == "batch"
    assert nn.BatchNorm1d(3, momentum=None).scheme.momentum is None
    assert nn.InstanceNorm1d(3, track_running_stats=True).eval().scheme.statistics == "running"


def test_batch_norm_leaves_no_trace_of_a_failed_or_empty_call() -> None:
    module = nn.BatchNorm1d(4)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="more than 1 value"):
        module(torch.ones(1, 4))
    with pytest.raises(ValueError, match="weight varies along"):
        module(torch.ones(3, 5))
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        module(torch.ones(3, 4, 2, 2))
    assert module(torch.ones(0, 4)).shape == (0, 4)
    assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())


def test_cumulative_average() -> None:
    for module in (
        nn.BatchNorm1d(1, momentum=None),
        nn.Norm("[n] (c=1); affine=c; momentum=none", track_running_stats=True),
    ):
        module(torch.tensor([[0.0], [2.0]]))
        module(torch.tensor([[10.0], [14.0]]))
        assert (module.running_mean.item(), module.running_var.item()) == (6.5, 5.0)
        assert module.num_batches_tracked.item() == 2


def test_a_batch_that_is_all_masked_is_not_counted() -> None:
    module = nn.BatchNorm1d(1, momentum=None)
    x = torch.tensor([[0.0], [2.0]])
    module(x, torch.zeros(2, 1, dtype=torch.bool))
    assert module.num_batches_tracked == 0
    module(x + 10)
    assert module.running_mean.item() == 11.0


def test_masks() -> None:
    x = values((3, 4, 6))
    mask = torch.arange(6) < torch.tensor([6, 3, 0]).reshape(3, 1, 1)
    for module in (nn.InstanceNorm1d(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)):
        dirty = torch.where(mask, x, float("nan"))
        y = module(dirty, mask)
        assert y.isfinite().all() and (y.masked_select(~mask) == 0).all()
    module = nn.BatchNorm1d(4, affine=False)
    y = module(x, mask)
    valid = torch.cat([x[0], x[1, :, :3]], 1)
    assert torch.allclose(module.running_mean, 0.1 * valid.mean(1), atol=1e-6)
    assert torch.allclose(module.running_var, 0.9 + 0.1 * valid.var(1), atol=1e-6)


def test_wrong_channels() -> None:
    for module in (nn.InstanceNorm1d(64), nn.InstanceNorm1d(64, affine=True), nn.LayerNorm2d(64)):
        with pytest.raises(ArgumentError, match="64 channels"):
            module(torch.ones(2, 80, 3))
    for groups, channels in ((0, 8), (-1, 8), (3, 8)):
        with pytest.raises(ArgumentError, match="divisible"):
            nn.GroupNorm(groups, channels)


def test_norm_parameters() -> None:
    norm = nn.Norm("b s (h [d])", affine="h d", sizes={"h": 2, "d": 3}, dtype=torch.float64)
    assert norm.weight.shape == norm.bias.shape == (6,)
    assert norm.weight.dtype == torch.float64
    assert nn.Norm("... [(d=4)]; affine=d; center=false").bias is None
    gemma = nn.Norm("gemma.rms_norm", sizes={"d": 4})
    assert torch.equal(gemma.weight, torch.zeros(4))
    x = values((2, 4))
    assert torch.equal(gemma(x), nn.RMSNorm(4, eps=1e-6)(x))
    plain = nn.Norm("n [d]")
    assert plain.weight is None and list(plain.parameters()) == []
    with pytest.raises(ArgumentError, match="Give sizes="):
        nn.Norm("n [d]", affine="d")
    tracked = nn.Norm(Scheme("n c [l]", affine="c"), sizes={"c": 3}, track_running_stats=True)
    tracked(values((2, 3, 5)))
    assert tracked.num_batches_tracked == 1
    assert tracked.eval().scheme.statistics == "running"
    assert tracked(values((2, 3, 5))).shape == (2, 3, 5)


def test_add_norms() -> None:
    x, r = values((3, 8)), values((3, 8), seed=1)
    layer = nn.AddLayerNorm(8, prenorm=True)
    y, h = layer(x, r)
    assert torch.equal(h, x + r) and torch.equal(y, nn.LayerNorm(8)(h))
    rms = nn.AddRMSNorm(8, dropout_p=0.5)
    assert torch.equal(rms.eval()(x, r), nn.RMSNorm(8)(x + r))
    assert "dropout_p=0.5" in repr(rms)
    torch.manual_seed(3)
    first = rms.train()(x, r)
    torch.manual_seed(3)
    assert torch.equal(rms(x, r), first)


def test_in_a_model() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), torch.nn.ReLU(), nn.GroupNorm(2, 8),
        nn.LayerNorm2d(8), torch.nn.Flatten(), nn.LayerNorm(8 * 36), torch.nn.Linear(8 * 36, 2),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, target = values((16, 3, 8, 8)), values((16, 2), seed=1)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
