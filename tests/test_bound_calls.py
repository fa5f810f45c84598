"""Calls of compiled programs, that keep what they have found out about their tensors."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import values
from torch import Tensor

from axisnorm import _torch
from axisnorm.scheme import ArgumentError

pytestmark = pytest.mark.skipif(
    not _torch.is_connected, reason="this torch has no table of C functions for its tensors"
)

native: Any = _torch._native


def text() -> str:
    """A new string, not the one that a program's code holds."""
    return "".join(["... [d]; ", "affine=d; eps=1e-05"])


def bound(name: str, *args: Any, layouts: Any = None, check: Any = None) -> Callable[..., None]:
    """A call of tensors of any layout, if none is given."""
    layouts = layouts or (((), ()),) * args.count(...)
    return native.bound(name, args, layouts, check or (lambda *_: None))  # type: ignore[no-any-return]


def bound_norm(**given: Any) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Of x, weight and y."""
    args = (..., ..., None, None, text(), None, None, "relu", ..., None)
    return bound("op_forward_into", *args, **given)


def wanted_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.empty_like(x)
    native.op_forward_into(x, weight, None, None, text(), None, None, "relu", y, None)
    return y


def test_other_kinds_of_tensors_come() -> None:
    """Each is read again: sizes, strides, types, and where a tensor begins."""
    norm = bound_norm()
    plain = [values((4, 8), seed=1), values((4, 8), seed=2), values((6, 8)), values((5, 7, 16))]
    other = [values((4, 16))[:, ::2], values((8, 4)).t(), values((8,)).expand(4, 8)]
    typed = [values((4, 8), torch.bfloat16), values((4, 8), torch.float64), values((33,))[1:]]
    for x in (*plain, *other, *typed, *plain[::-1], *other[::-1]):
        x = x.view(4, 8) if x.dim() == 1 else x
        for dtype in (torch.float32, x.dtype):
            weight = values((x.shape[-1],), seed=9).to(dtype)
            y = torch.full_like(x, torch.nan)
            for _ in range(3):
                assert norm(x, weight, y) is None
                assert torch.equal(y, wanted_norm(x, weight))
                y.fill_(torch.nan)


def test_what_comes_is_checked_in_every_call() -> None:
    norm, x, weight = bound_norm(), values((4, 8)), values((8,), seed=1)
    y = torch.empty_like(x)
    norm(x, weight, y)
    known = y.clone()
    for wrong in (values((6,)), values((8, 1)), values((9, 8))):
        with pytest.raises(ArgumentError):
            norm(x, wrong, y)
        assert torch.equal(y, known)
    with pytest.raises((RuntimeError, ValueError)):
        norm(values((5, 8)), weight, y)
    norm(values((4, 8), seed=2), weight, y)
    assert torch.equal(y, wanted_norm(values((4, 8), seed=2), weight))


def test_negated_gradients_and_subclasses() -> None:
    class Own(Tensor):
        pass

    args = (..., None, ..., ..., None, None, ..., 0.0, text(), None, ..., ..., None)
    backward = bound("op_add_backward_into", *args)
    grad, h, weight = values((4, 8)), values((4, 8), seed=1), values((8,), seed=2)
    stats = torch.ops.axisnorm.norm_fwd(h, weight, None, None, text())[1]
    wanted = torch.ops.axisnorm.add_norm_bwd(grad, None, h, weight, None, None, stats, 0.0, text())
    negated = torch._neg_view(-grad)
    assert negated.is_neg()
    for given in (grad, negated, grad, grad.as_subclass(Own), negated):
        dh, dweight = torch.full_like(h, torch.nan), torch.full_like(weight, torch.nan)
        backward(given, h, weight, stats, dh, dweight)
        assert torch.equal(dh, wanted[1]) and torch.equal(dweight, wanted[2])


@pytest.mark.parametrize("given", [True, False])
def test_running_statistics_are_read_in_every_call(given: bool) -> None:
    mean, var = values((3,), seed=1), values((3,), seed=2).abs()
    running = (..., ...) if given else (mean, var)
    scheme = "n c [...]; affine=c; statistics=running"
    args = (..., None, None, None, scheme, *running, None, ..., ...)
    norm = bound("op_forward_into", *args)
    x = values((2, 3, 4))
    y, stats = torch.empty_like(x), torch.empty(3, 6)
    for _ in range(3):
        stats.fill_(torch.nan)
        if given:
            mean, var = mean + 1, var + 1
            norm(x, mean, var, y, stats)
        else:
            mean.add_(1)
            norm(x, y, stats)
        torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, mean, var))
        assert not stats.any()


def test_seeds_are_read_in_every_call() -> None:
    args = (..., ..., None, None, ..., 0.5, text(), None, ..., None, None)
    norm = bound("op_add_forward_into", *args)
    x, residual = values((4, 64)), values((4, 64), seed=1)
    y = torch.empty_like(x)
    for number in range(3):
        seed = torch.tensor(number)
        wanted = torch.ops.axisnorm.add_norm_fwd(x, residual, None, None, seed, 0.5, text())
        norm(x, residual, seed, y)
        assert torch.equal(y, wanted[0])


def test_it_keeps_its_arguments_and_nothing_else() -> None:
    """The text of the scheme lives as long as the call does, tensors do not."""
    norm, x, weight = bound_norm(), values((4, 8)), values((8,), seed=1)
    y = torch.empty_like(x)
    gc.collect()
    garbage = [text() + " " * i for i in range(100)]
    counts = [sys.getrefcount(t) for t in (x, weight, y)]
    for _ in range(5):
        norm(x, weight, y)
    assert [sys.getrefcount(t) for t in (x, weight, y)] == counts and garbage
    assert torch.equal(y, wanted_norm(x, weight))
    made = weakref.ref(norm)
    del norm
    assert made() is None


def test_threads_share_a_call() -> None:
    """It is large enough to be computed without the GIL, and others are read meanwhile."""
    norm, weight = bound_norm(), torch.ones(512)
    inputs = [values((256 + 64 * (i % 2), 512), seed=i) for i in range(4)]
    wanted = [wanted_norm(x, weight) for x in inputs]
    right = []

    def work(i: int) -> None:
        for _ in range(20):
            y = torch.empty_like(inputs[i])
            norm(inputs[i], weight, y)
            right.append(torch.equal(y, wanted[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 80 and all(right)


def test_layouts_are_asserted_before_anything_is_read() -> None:
    """The operators in Python trust what is saved for backward: they would write past its end."""
    guards = torch._C._dynamo.guards.assert_size_stride
    args = (..., ..., ..., None, None, None, None, ..., text(), ..., ..., None)
    layouts = (((4, 8), (8, 1)),) * 2 + (
        ((8,), (1,)),
        ((3, 4), (4, 1)),
        ((4, 8), (8, 1)),
        ((8,), (1,)),
    )
    backward = bound("op_backward_into", *args, layouts=layouts, check=guards)
    grad, x, weight = values((4, 8)), values((4, 8), seed=1), values((8,), seed=2)
    stats = torch.ops.axisnorm.norm_fwd(x, weight, None, None, text())[1]
    wanted = torch.ops.axisnorm.norm_bwd(grad, x, weight, None, None, None, None, stats, text())
    for wrong in (None, 0, 1, 2, 3):
        given = [grad, x, weight, stats]
        dx, dweight = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
        if wrong is not None:
            given[wrong] = given[wrong][..., :-1]
            with pytest.raises(AssertionError):
                backward(*given, dx, dweight)
            assert dx.isnan().all() and dweight.isnan().all()
        else:
            backward(*given, dx, dweight)
            assert torch.equal(dx, wanted[0]) and torch.equal(dweight, wanted[1])


def test_wrong_use() -> None:
    args = (..., ..., None, None, text(), None, None, None, ..., None)
    with pytest.raises(ValueError, match="no operator op_nothing of 10 arguments"):
        bound("op_nothing", *args)
    with pytest.raises(ValueError, match="of 9 arguments"):
        bound("op_forward_into", *args[1:])
    with pytest.raises(ValueError, match="each tensor has a layout"):
        bound("op_forward_into", *args, layouts=(((), ()),))
    for wrong in (("op_forward_into", args), ("op_forward_into", list(args), (), print)):
        with pytest.raises(TypeError, match="bound takes"):
            native.bound(*wrong)
    with pytest.raises(TypeError, match="op_forward_into is called with 3 tensors"):
        bound("op_forward_into", *args)(values((4, 8)), values((8,)))  # type: ignore[call-arg]
