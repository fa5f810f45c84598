"""Autograd over the whole family: orders one to three, forward mode, and what torch does to graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cases import values
from family import F64, FAMILY, MEAN, VAR, Member
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

import axisnorm

Family = pytest.mark.parametrize("member", FAMILY.values(), ids=FAMILY)
# torch's own, of its formulas for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def gradients(member: Member, tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(member.loss(*tensors), tensors, **options)


def equal(found: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@Family
def test_first_and_second_order(member: Member) -> None:
    tensors = member.tensors()
    assert gradcheck(
        member.call,
        tensors,
        check_forward_ad=True,
        check_batched_grad=True,
        fast_mode=True,
    )
    assert gradgradcheck(
        member.call, tensors, check_fwd_over_rev=True, check_batched_grad=True, fast_mode=True
    )


@Family
def test_third_order_in_every_nesting(member: Member) -> None:
    """Forward and reverse mode in the eight orders, against a difference of second derivatives."""
    points = member.tensors(grad=False)
    along = [values(tuple(t.shape), F64, 70 + i) for i, t in enumerate(points)]
    everything = tuple(range(len(points)))

    def reverse(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def derivative(*tensors: Tensor) -> Tensor:
            found = grad(f, argnums=everything)(*tensors)
            return torch.stack([(g * v).sum() for g, v in zip(found, along, strict=True)]).sum()

        return derivative

    def forward(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: jvp(f, tensors, tuple(along))[1]

    def eager(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def derivative(*tensors: Tensor) -> Tensor:
            leaves = [t if t.requires_grad else t.clone().requires_grad_() for t in tensors]
            found = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
            return torch.stack([(g * v).sum() for g, v in zip(found, along, strict=True)]).sum()

        return derivative

    def energy(*tensors: Tensor) -> Tensor:
        return member.loss(*tensors) ** 2 / 2

    second = eager(eager(energy))
    step = 1e-4
    difference = (
        second(*[t + step * v for t, v in zip(points, along, strict=True)])
        - second(*[t - step * v for t, v in zip(points, along, strict=True)])
    ) / (2 * step)
    wanted = eager(second)(*points)
    scale = 1 + wanted.abs()
    assert abs(wanted - difference) < 1e-4 * scale
    for order in product((reverse, forward), repeat=3):
        derivative: Callable[..., Tensor] = energy
        for mode in order:
            derivative = mode(derivative)
        assert abs(derivative(*points) - wanted) < 1e-9 * scale


@Family
def test_each_input_alone(member: Member) -> None:
    wanted = gradients(member, member.tensors())
    for i, expected in enumerate(wanted):
        tensors = [t.requires_grad_(i == k) for k, t in enumerate(member.tensors(grad=False))]
        found = torch.autograd.grad(member.loss(*tensors), tensors[i])
        assert torch.allclose(found[0], expected, rtol=1e-12, atol=1e-13)


@Family
def test_what_torch_does_to_graphs(member: Member) -> None:
    tensors = member.tensors()
    before = [t.detach().clone() for t in tensors]
    wanted = gradients(member, tensors)
    for reentrant in (False, True):
        leaves = member.tensors()
        outputs = checkpoint(member.outputs, *leaves, use_reentrant=reentrant)
        Member(lambda *_: outputs, member.shapes).loss().backward()  # noqa: B023
        assert equal([t.grad for t in leaves], wanted)
    with torch.autograd.graph.save_on_cpu():
        loss = member.loss(*tensors)
    assert equal(torch.autograd.grad(loss, tensors), wanted)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        loss = member.loss(*tensors)
    for keep in (True, True, False):
        assert equal(torch.autograd.grad(loss, tensors, retain_graph=keep), wanted)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)
    loss, found = member.loss(*tensors), []
    thread = threading.Thread(target=lambda: found.append(torch.autograd.grad(loss, tensors)))
    thread.start()
    thread.join()
    assert equal(found[0], wanted)
    unused = torch.zeros(3, requires_grad=True)
    graph = member.loss(*tensors)
    *found, nothing = torch.autograd.grad(graph, [*tensors, unused], materialize_grads=True)
    assert equal(found, wanted) and not nothing.any()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert equal(gradients(member, tensors), wanted)
    with torch.inference_mode():
        found = member.outputs(*[t.clone() for t in tensors])
    for y, expected in zip(found, member.outputs(*tensors), strict=True):
        assert torch.allclose(y, expected.detach(), rtol=1e-13, atol=1e-14)
    assert equal(tensors, before)


@Family
def test_change_between_forward_and_backward(member: Member) -> None:
    """Is refused by torch, or has no influence."""
    leaves = member.tensors()
    wanted = gradients(member, leaves)
    for i in range(len(leaves)):
        tensors = [t * 1 for t in leaves]
        loss = member.loss(*tensors)
        with torch.no_grad():
            tensors[i].add_(1)
        try:
            found = torch.autograd.grad(loss, leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            assert equal(found, wanted)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "add_layer_norm"])
def test_hooks_of_tensors_and_modules(name: str) -> None:
    member = FAMILY[name]
    leaves = member.tensors()
    inner = [t * 1 for t in leaves]
    wanted = gradients(member, leaves)
    seen = []
    inner[0].register_hook(lambda g: seen.append(g.clone()))
    inner[1].register_hook(lambda g: 2 * g)
    found = torch.autograd.grad(member.loss(*inner), leaves)
    assert torch.equal(seen[0], wanted[0])
    assert equal(found, [wanted[0], 2 * wanted[1], *wanted[2:]])
    module = axisnorm.nn.LayerNorm(4)
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    module(values((3, 4)).requires_grad_()).sum().backward()
    assert calls == ["before", "after", "backward"]


def test_gradient_of_given_running_statistics() -> None:
    """Silently none, where torch refuses them and torch.func had the right one."""
    x = values((4, 3, 2), F64)
    for norm in (
        lambda m, v: axisnorm.batch_norm(x, m, v),
        lambda m, v: axisnorm.instance_norm(x, m, v, None, None, False),
        lambda m, v: axisnorm.normalize(
            x, "[n] c [l]; affine=c; statistics=running", running_mean=m, running_var=v
        ),
        lambda m, v: torch.ops.axisnorm.norm_fwd(
            x, None, None, None, "[n] c [l]; affine=c; statistics=running", m, v
        )[0],
    ):
        m, v = MEAN.clone().requires_grad_(), VAR.clone().requires_grad_()
        found = torch.autograd.grad(norm(m, v).pow(2).sum(), (m, v))
        plain = (x - m[:, None]) / (v[:, None] + 1e-5).sqrt()
        wanted = torch.autograd.grad(plain.pow(2).sum(), (m, v))
        assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


def test_running_statistics_that_move_have_no_gradient() -> None:
    x, mean, var = values((4, 3)), torch.zeros(3), torch.ones(3, requires_grad=True)
    with pytest.raises(axisnorm.ArgumentError, match=r"running_var is moved.*no gradient"):
        axisnorm.batch_norm(x, mean, var, training=True)
    assert not mean.any()
    with torch.no_grad():
        axisnorm.batch_norm(x, mean, var, training=True)
    assert mean.all()


def test_forward_mode_of_the_ops() -> None:
    """The ops dropped tangents, which exported and traced programs call."""
    x, v = values((3, 4), F64), values((3, 4), F64, 1)
    ops = torch.ops.axisnorm
    for op, door in (
        (
            lambda t: ops.norm_fwd(t, None, None, None, "n [d]")[0],
            lambda t: axisnorm.layer_norm(t, 4),
        ),
        (
            lambda t: ops.norm_moments(t, None, "n [d]")[1],
            lambda t: axisnorm.statistics(t, "n [d]")[1],
        ),
        (
            lambda t: ops.add_norm_fwd(t, x, None, None, None, 0.0, "n [d]")[0],
            lambda t: axisnorm.add_layer_norm(t, x, 4),
        ),
    ):
        wanted = jvp(door, (x,), (v,))[1]
        assert wanted.any()
        assert torch.allclose(jvp(op, (x,), (v,))[1], wanted)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, v)
            tangent = torch.autograd.forward_ad.unpack_dual(op(dual)).tangent
        assert torch.allclose(tangent, wanted)
