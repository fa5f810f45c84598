"""The transforms of torch.func over the whole family, and running statistics under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import values
from family import F64, FAMILY, Member, fresh
from torch import Tensor
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

import axisnorm
import axisnorm.nn

# Running statistics made inside cannot be mapped over: see below.
MAPPED = {name: member for name, member in FAMILY.items() if "moving" not in name}
Mapped = pytest.mark.parametrize("member", MAPPED.values(), ids=MAPPED)
# torch's own, of its formulas for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def close(found: Any, wanted: Any) -> bool:
    found, wanted = (torch.utils._pytree.tree_leaves(t) for t in (found, wanted))
    return all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-11) for a, b in zip(found, wanted, strict=True)
    )


@Mapped
def test_vmap_over_each_input(member: Member) -> None:
    """One input mapped over its last axis, the others not; all of them; in chunks; nested."""
    plain = member.tensors(grad=False)
    batches = [torch.stack([t, t * 0.5 + 1, t - 2]) for t in plain]
    for i, batch in enumerate(batches):
        last = batch.movedim(0, -1)
        in_dims = tuple(-1 if i == k else None for k in range(len(plain)))
        given = [last if i == k else t for k, t in enumerate(plain)]
        rows = [member.outputs(*[b if i == k else t for k, t in enumerate(plain)]) for b in batch]
        wanted = [torch.stack(ys) for ys in zip(*rows, strict=True)]
        assert close(vmap(member.outputs, in_dims=in_dims)(*given), wanted)
    rows = [member.outputs(*row) for row in zip(*batches, strict=True)]
    wanted = [torch.stack(ys) for ys in zip(*rows, strict=True)]
    assert close(vmap(member.outputs)(*batches), wanted)
    assert close(vmap(member.outputs, chunk_size=2)(*batches), wanted)
    nested = vmap(vmap(member.outputs, in_dims=0), in_dims=-1)
    doubled = [torch.stack([b, b - 1], -1) for b in batches]
    assert close([y[0] for y in nested(*doubled)], wanted)


@Mapped
def test_transforms_agree(member: Member) -> None:
    tensors = member.tensors(grad=False)
    leaves = member.tensors()
    wanted = torch.autograd.grad(member.loss(*leaves), leaves)
    everything = tuple(range(len(tensors)))
    assert close(grad(member.loss, argnums=everything)(*tensors), wanted)
    value, pull = vjp(member.loss, *tensors)
    assert close(pull(torch.ones_like(value)), wanted)
    tangents = tuple(t + 1 for t in tensors)
    total = torch.stack([(g * t).sum() for g, t in zip(wanted, tangents, strict=True)]).sum()
    assert close(jvp(member.loss, tuple(tensors), tangents)[1], total)

    def of_first(x: Tensor) -> Tensor:
        return member.outputs(x, *tensors[1:])[-1]

    assert close(jacrev(of_first, chunk_size=5)(tensors[0]), jacfwd(of_first)(tensors[0]))
    samples = torch.stack([tensors[0], tensors[0] * 2 + 1])
    found = vmap(grad(lambda x: member.loss(x, *tensors[1:])))(samples)
    for row, sample in zip(found, samples, strict=True):
        leaf = sample.clone().requires_grad_()
        assert close(row, torch.autograd.grad(member.loss(leaf, *tensors[1:]), leaf)[0])


@pytest.mark.parametrize(
    "name", ["layer_norm", "batch_norm, training", "eps=1e-3; eps_placement=std"]
)
def test_hessian(name: str) -> None:
    member = FAMILY[name]
    x, *others = member.tensors(grad=False)

    def energy(t: Tensor) -> Tensor:
        return member.call(t, *others).pow(3).sum()

    wanted = torch.autograd.functional.hessian(energy, x)
    assert wanted.abs().max() > 0.1
    assert close(hessian(energy)(x), wanted)
    assert close(jacrev(jacfwd(energy))(x), wanted)


def test_vmap_over_a_mask() -> None:
    x, masks = values((3, 4), F64), values((5, 3, 4)) > -0.5
    wanted = torch.stack([axisnorm.layer_norm(x, 4, mask=m) for m in masks])
    assert close(vmap(lambda m: axisnorm.layer_norm(x, 4, mask=m))(masks), wanted)


def test_vmap_of_the_ops() -> None:
    """Exported and compiled programs call the ops: no fallback that loops, and warns of it."""
    ops = torch.ops.axisnorm
    x, grads = values((5, 3, 4), F64), values((5, 3, 4), F64, 1)
    seeds = torch.arange(5)
    w = values((4,), F64, 2)

    def backward(g: Tensor, t: Tensor) -> Any:
        stats = ops.norm_fwd(t, w, None, None, "n [d]; affine=d")[1]
        return ops.norm_bwd(g, t, w, None, None, None, None, stats, "n [d]; affine=d")

    def add_backward(g: Tensor, t: Tensor, seed: Tensor) -> Any:
        _, h, stats = ops.add_norm_fwd(t, g, w, None, seed, 0.5, "n [d]; affine=d")
        return ops.add_norm_bwd(g, None, h, w, None, seed, stats, 0.5, "n [d]; affine=d")

    for f, given in (
        (lambda t: ops.norm_fwd(t, w, None, None, "n [d]; affine=d"), (x,)),
        (lambda t: ops.norm_moments(t, None, "n [d]"), (x,)),
        (lambda t: ops.norm_train_fwd(t, w, None, None, "[n] d; affine=d", w, w.exp()), (x,)),
        (lambda t, s: ops.add_norm_fwd(t, t, w, None, s, 0.5, "n [d]; affine=d"), (x, seeds)),
        (backward, (grads, x)),
        (add_backward, (grads, x, seeds)),
    ):
        rows = [f(*row) for row in zip(*given, strict=True)]
        wanted = [torch.stack(t) for t in zip(*rows, strict=True)]
        # hi + lo, each of which may be rounded otherwise
        assert close(vmap(f)(*given), wanted)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("mask", [None, torch.ones(64, dtype=torch.bool)], ids=["fused", "steps"])
def test_randomness_of_dropout(randomness: str, mask: Tensor | None) -> None:
    def h(x: Tensor) -> Tensor:
        return axisnorm.add_layer_norm(
            x, torch.zeros_like(x), 64, dropout_p=0.5, training=True, prenorm=True, mask=mask
        )[1]

    run = vmap(h, randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness error mode"):
            run(torch.ones(3, 64))
        return
    kept = run(torch.ones(3, 64)) != 0
    assert 0.2 < kept.double().mean() < 0.8
    assert torch.equal(kept[0], kept[1]) is (randomness == "same")


# --- Running statistics


def moved(norm: Any, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    mean, var = fresh()
    norm(x, mean, var, **options)
    return mean, var


@pytest.mark.parametrize("norm", [F.batch_norm, axisnorm.batch_norm], ids=["torch", "axisnorm"])
def test_running_statistics_that_a_transform_captures(norm: Any) -> None:
    """grad and jvp move them, as torch's do; they were refused."""
    x = values((4, 3), F64)
    wanted = moved(F.batch_norm, x, training=True)
    mask = torch.ones(4, 1, dtype=torch.bool)
    for transform in (
        lambda f: grad(f)(x),
        lambda f: jvp(f, (x,), (x,)),
        lambda f: jacrev(f)(x),
        lambda f: jacfwd(f)(x),
        lambda f: grad(lambda t: grad(f)(t).pow(2).sum())(x),
    ):
        for options in ({}, {"mask": mask}) if norm is axisnorm.batch_norm else ({},):
            mean, var = fresh()

            def run(
                t: Tensor, options: Any = options, mean: Tensor = mean, var: Tensor = var
            ) -> Tensor:
                return norm(t, mean, var, training=True, **options).pow(3).sum()

            transform(run)
            assert close((mean, var), wanted)
            if norm is axisnorm.batch_norm:  # of its own, torch tells autograd nothing
                assert mean._version > 0


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_vmap_moves_the_running_statistics_of_each_sample(norm: str) -> None:
    x = values((5, 4, 3, 2), F64)
    options = {"training": True} if norm == "batch_norm" else {}
    for given, in_dims in ((x, 0), (x[0], None)):
        mean, var = torch.zeros(3, 5, dtype=F64), torch.ones(5, 3, dtype=F64)
        vmap(lambda t, m, v: getattr(axisnorm, norm)(t, m, v, **options), in_dims=(in_dims, 1, 0))(
            given, mean, var
        )
        for i in range(5):
            sample = x[i] if in_dims == 0 else x[0]
            assert close((mean[:, i], var[i]), moved(getattr(F, norm), sample, **options))


@pytest.mark.parametrize("mapped", [(None, None), (0, None), (None, 0)])
def test_vmap_of_running_statistics_that_are_shared(mapped: tuple[Any, Any]) -> None:
    """Refused in words, and none of the two has moved."""
    x = values((5, 4, 3))
    mean, var = (
        torch.full((3,) if dim is None else (5, 3), float(i)) for i, dim in enumerate(mapped)
    )
    with pytest.raises(axisnorm.ArgumentError, match=r"Under vmap .* not mapped over"):
        vmap(lambda t, m, v: axisnorm.batch_norm(t, m, v, training=True), in_dims=(0, *mapped))(
            x, mean, var
        )
    assert not mean.any() and (var == 1).all()
    with pytest.raises(RuntimeError, match="not batched"):
        vmap(lambda t, m, v: F.batch_norm(t, m, v, training=True), in_dims=(0, *mapped))(
            x, mean, var
        )


@pytest.mark.parametrize("train", [True, False])
def test_ensembles(train: bool) -> None:
    for make, shape in (
        (lambda: axisnorm.nn.LayerNorm(3), (4, 3)),
        (lambda: axisnorm.nn.RMSNorm(3), (4, 3)),
        (lambda: axisnorm.nn.GroupNorm(1, 3), (4, 3)),
        (lambda: axisnorm.nn.LayerNorm2d(3), (4, 3, 2, 2)),
        (lambda: axisnorm.nn.BatchNorm1d(3), (4, 3)),
        (lambda: axisnorm.nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
        (
            lambda: axisnorm.nn.Norm("[n] c", affine="c", sizes={"c": 3}, track_running_stats=True),
            (4, 3),
        ),
    ):
        x = values(shape)
        models = [make().train(train) for _ in range(3)]
        for i, model in enumerate(models):
            for p in model.parameters():
                torch.nn.init.constant_(p, 0.5 + i)
        parameters, buffers = stack_module_state(models)
        base = make().to("meta").train(train)

        def call(p: Any, b: Any, t: Tensor, base: Any = base) -> Tensor:
            return functional_call(base, (p, b), (t,))

        found = (
            vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
            if buffers or parameters
            else None
        )
        for i, model in enumerate(models):
            assert torch.allclose(found[i], model(x), rtol=1e-5, atol=1e-6)
            for name, buffer in model.named_buffers():
                assert torch.allclose(buffers[name][i], buffer)


def test_gradients_of_a_functional_call() -> None:
    module = axisnorm.nn.BatchNorm1d(3)
    x = values((4, 3))
    state = {k: v.clone() for k, v in module.named_parameters()}

    def loss(state: Any) -> tuple[Tensor, Any]:
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        return functional_call(module, (state, buffers), (x,)).pow(2).sum(), buffers

    found, buffers = grad(loss, has_aux=True)(state)
    assert not module.running_mean.any() and module.num_batches_tracked == 0
    module(x).pow(2).sum().backward()
    for name, p in module.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-5, atol=1e-6)
    for name, buffer in module.named_buffers():
        assert torch.allclose(buffers[name], buffer)


STATEFUL: tuple[Callable[..., torch.nn.Module], ...] = (
    lambda momentum: axisnorm.nn.BatchNorm1d(3, momentum=momentum),
    lambda momentum: axisnorm.nn.Norm(
        "[n] c", affine="c", sizes={"c": 3}, momentum=momentum, track_running_stats=True
    ),
)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("make", STATEFUL, ids=["BatchNorm1d", "Norm"])
def test_a_captured_module_that_is_refused_has_not_moved(make: Any, momentum: Any) -> None:
    """torch refuses the counter; the statistics had moved by then."""
    module, x = make(momentum), values((4, 3))
    for transform in (
        lambda f: grad(lambda t: f(t).pow(3).sum())(x),
        lambda f: jvp(f, (x,), (x,)),
        lambda f: vmap(f)(x.expand(2, 4, 3)),
    ):
        with pytest.raises(RuntimeError, match=r"mutate a captured Tensor|vmap"):
            transform(module)
        for key, value in make(momentum).state_dict().items():
            assert torch.equal(module.state_dict()[key], value)


@pytest.mark.parametrize("make", STATEFUL, ids=["BatchNorm1d", "Norm"])
def test_an_ensemble_that_averages_all_batches(make: Any) -> None:
    """The counters of a batch of modules were read as one number, which vmap refuses."""
    models = [make(None) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    base = make(None).to("meta")
    for seed in range(3):
        xs = values((3, 4, 3), seed=seed)
        found = vmap(lambda p, b, t: functional_call(base, (p, b), (t,)))(parameters, buffers, xs)
        for y, model, x in zip(found, models, xs, strict=True):
            torch.testing.assert_close(y, model(x))
    for i, model in enumerate(models):
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name][i], buffer)


@pytest.mark.parametrize("make", STATEFUL, ids=["BatchNorm1d", "Norm"])
def test_functionalized_training(make: Any) -> None:
    """functionalize refused the Function that moves running statistics."""
    module, x = make(0.1), values((4, 3))

    def step(buffers: Any, t: Tensor) -> Tensor:
        return functional_call(module, buffers, (t,))

    traced = make_fx(functionalize(step))(dict(make(0.1).named_buffers()), x)
    for run in (functionalize(step), traced):
        eager, buffers = make(0.1), dict(make(0.1).named_buffers())
        torch.testing.assert_close(run(buffers, x), eager(x))
        for name, buffer in eager.named_buffers():
            assert torch.equal(buffers[name], buffer)
    found = functionalize(grad(lambda t: make(0.1)(t).pow(3).sum()))(x)
    torch.testing.assert_close(found, grad(lambda t: make(0.1)(t).pow(3).sum())(x))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("make", STATEFUL, ids=["BatchNorm1d", "Norm"])
def test_functionalized_training_of_a_captured_module(make: Any, momentum: Any) -> None:
    """What is functional was written to statistics that are not, which torch asserts."""
    module, eager, x = make(momentum), make(momentum), values((4, 3))
    for _ in range(2):
        torch.testing.assert_close(functionalize(lambda t: module(t))(x), eager(x))
    for key, value in eager.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)
