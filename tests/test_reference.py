"""The reference against torch where torch is right, and against its own derivatives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import SCHEMES, Case, parameters, values

from axisnorm import Scheme, reference


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


def test_agrees_with_torch_in_float64() -> None:
    x = values((4, 8, 3, 5), torch.float64)
    w, b = values((8,), torch.float64, 1), values((8,), torch.float64, 2)
    for scheme, parameters_, expected in (
        (Scheme.group_norm(4), (w, b), F.group_norm(x, 4, w, b)),
        (Scheme.batch_norm(), (w, b), F.batch_norm(x, None, None, w, b, True)),
        (Scheme.instance_norm(), (w, b), F.instance_norm(x, None, None, w, b)),
        (Scheme.layer_norm(ndim=2), (None, None), F.layer_norm(x, (3, 5))),
        (Scheme.rms_norm(), (None, None), F.rms_norm(x, (5,))),
        (Scheme("... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max"), (None, None),
         F.normalize(x, dim=-1)),
    ):  # fmt: skip
        close(reference.forward(x, scheme, *parameters_)[0], expected)


FORMULAS = [
    Scheme("... [d]; affine=d", center=c, scale=s, eps_placement=p, correction=k, eps=0.3)
    for c, s, p, k in itertools.product(
        (True, False), ("auto", "std", "l2", "var", "sqrt_std"), ("variance", "std", "max"), (0, 1)
    )
]


@pytest.mark.parametrize("scheme", FORMULAS, ids=str)
def test_every_formula_by_hand(scheme: Scheme) -> None:
    x = values((5, 9), torch.float64)
    mean = x.mean(1, keepdim=True)
    d = x - mean if scheme.center else x
    e = x - mean if scheme.center or scheme.scale == "std" else x
    variance = (e * e).sum(1, keepdim=True)
    if scheme.scale != "l2":
        variance = variance / (9 - scheme.correction)
    root = {"var": variance, "sqrt_std": variance**0.5}.get(scheme.scale, variance**0.5)
    if scheme.scale == "var":
        divisor = root.clamp_min(0.3) if scheme.eps_placement == "max" else root + 0.3
    elif scheme.scale == "sqrt_std":
        divisor = {
            "variance": (root + 0.3) ** 0.5,
            "std": root**0.5 + 0.3,
            "max": (root**0.5).clamp_min(0.3),
        }[scheme.eps_placement]
    else:
        divisor = {
            "variance": (variance + 0.3) ** 0.5,
            "std": root + 0.3,
            "max": root.clamp_min(0.3),
        }[scheme.eps_placement]
    y, moments = reference.forward(x, scheme)
    close(y, d / divisor)
    close(moments.rstd, 1 / divisor[:, 0])


@pytest.mark.parametrize("case", [*SCHEMES, *(Case(s, (4, 6)) for s in FORMULAS)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_backward_is_the_derivative(case: Case, masked: bool) -> None:
    x = values(case.shape, torch.float64).requires_grad_()
    weight, bias = parameters(case, torch.float64)
    mask = values(case.shape, seed=9) > -0.5 if masked else None
    inputs = [x, *(p.requires_grad_() for p in (weight, bias) if p is not None)]
    y, _ = reference.forward(x, case.scheme, weight, bias, mask=mask)
    grad = values(case.shape, torch.float64, 3)
    correct = torch.autograd.grad(y, inputs, grad)
    with torch.no_grad():
        found = reference.backward(grad, x, case.scheme, weight, bias, mask=mask)
        arrays = [None if t is None else t.numpy() for t in (grad, x, weight, bias, mask)]
    as_numpy = reference.backward(
        arrays[0], arrays[1], case.scheme, arrays[2], arrays[3], mask=arrays[4]
    )
    for a, b, c in zip(found, correct, as_numpy, strict=False):
        close(a, b, 1e-10)
        close(torch.from_numpy(c), b, 1e-10)


# Rounding has no derivative to compare with: its gradients go straight through.
SMOOTH = [case for case in SCHEMES[::3] if case.scheme.rounding == "once"]


@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_first_and_second_derivatives(case: Case) -> None:
    shape = tuple(min(n, 8) if "=" in str(case.scheme.axes) else min(n, 4) for n in case.shape)
    small = Case(case.scheme, case.shape if "(" in case.scheme.axes else shape)
    x = values(small.shape, torch.float64)[:2].clone().requires_grad_()
    small = Case(small.scheme, tuple(x.shape))
    inputs = [x, *(p.requires_grad_() for p in parameters(small, torch.float64) if p is not None)]

    def run(*args: torch.Tensor) -> torch.Tensor:
        return reference.forward(args[0], case.scheme, *args[1:])[0]

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 1)])
@pytest.mark.parametrize("text", ["... [d]", "[n] ...", "n c [...]", "n [c]; center=false"])
def test_empty_and_single(dtype: type, shape: tuple[int, ...], text: str) -> None:
    x = np.ones(shape, dtype)
    for mask in (None, np.zeros(shape, bool)):
        y, moments = reference.forward(x, Scheme(text), mask=mask)
        assert y.shape == shape and np.isfinite(y).all()
        assert np.isfinite(moments.mean).all() and np.isfinite(moments.var).all()
        assert reference.backward(x, x, Scheme(text), mask=mask)[0].shape == shape


@pytest.mark.parametrize("bad", [1e9, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", SCHEMES, ids=str)
def test_masked_values_have_no_influence(case: Case, bad: float) -> None:
    x, grad = values(case.shape), values(case.shape, seed=3)
    weight, bias = parameters(case)
    mask = values(case.shape, seed=9) > -0.5
    mask[0] = False
    clean = torch.where(mask, x, 0.0)
    dirty, dirty_grad = torch.where(mask, x, bad), torch.where(mask, grad, bad)
    for a, b in zip(
        (
            reference.forward(clean, case.scheme, weight, bias, mask=mask)[0],
            *reference.backward(grad, clean, case.scheme, weight, bias, mask=mask),
        ),
        (
            reference.forward(dirty, case.scheme, weight, bias, mask=mask)[0],
            *reference.backward(dirty_grad, dirty, case.scheme, weight, bias, mask=mask),
        ),
        strict=True,
    ):
        if a is not None and b is not None:
            assert a.isfinite().all() and torch.equal(a, b)
    y = reference.forward(dirty, case.scheme, weight, bias, mask=mask)[0]
    assert (y[~mask] == 0).all()


def test_third_derivative_of_layer_norm() -> None:
    """torch's own is wrong from the third order on; nested differences of gradients are not."""
    x = values((3,), torch.float64)
    v = values((3,), torch.float64, 1)

    def third(f):
        leaf = x.clone().requires_grad_()
        total = f(leaf).pow(2).mul(v).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(total, leaf, create_graph=True)
            total = (g * v).sum()
        return float(total.detach())

    def formula(t: torch.Tensor) -> torch.Tensor:
        d = t - t.mean()
        return d / ((d * d).mean() + 1e-5).sqrt()

    correct = third(formula)
    assert abs(
        third(lambda t: reference.forward(t, Scheme.layer_norm())[0]) - correct
    ) < 1e-9 * abs(correct)
