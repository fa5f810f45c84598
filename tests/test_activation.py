"""Activations after norms: values, gradients, routes, what watches, modules, refusals."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    DTYPES,
    Case,
    assert_close,
    from_numpy,
    layouts,
    parameters,
    to_numpy,
    values,
)
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import axisnorm
import axisnorm.nn as ann
from axisnorm import ArgumentError, Scheme, _route, reference

NAMES = reference.ACTIVATIONS
Names = pytest.mark.parametrize("name", NAMES)
Dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

CASES = tuple(
    Case(Scheme(text), shape)
    for text, shape in (
        # rows, with parameters, without, with one of them; longer than a strip
        ("... [d]; affine=d", (6, 33)),
        ("... [d]; eps=1e-3", (3, 40)),
        ("... [d]; affine=d; center=false; eps=1e-6; weight_offset=1", (5, 64)),
        ("... [d]; affine=d; rounding=before_affine", (5, 31)),
        ("... [d]; affine=d", (2, 2100)),
        # lines
        ("n (g=2 [c]) [...]; affine=g c", (2, 6, 5, 7)),
        ("n c [...]; affine=c", (3, 5, 7, 7)),
        ("[n] c [...]; affine=c", (4, 6, 6, 6)),
        ("[n] c [l]; affine=c l", (3, 4, 40)),
        ("n c [...]; affine=c; rounding=before_affine", (2, 3, 6, 6)),
        # lanes
        ("n [c] ...; affine=c; eps=1e-6", (2, 33, 5, 13)),
        ("n [c] l; affine=c l", (2, 9, 20)),
        ("[n] c [...]; affine=c", (9, 130)),
        ("n (g=3 [c]) [...]; affine=g c", (2, 96, 3, 3)),
    )
)


def exact(z: Tensor, name: str) -> Tensor:
    """An activation in float64, and in its derivative, with all digits in the lower tail too."""
    z = z.double()
    if name == "relu":
        return z.relu()
    if name == "silu":
        e = (-z.abs()).exp()
        return z * torch.where(z < 0, e, 1.0) / (1 + e)
    tail = 0.5 * torch.special.erfc(z.abs() * 0.5**0.5)
    return z * torch.where(z < 0, tail, 1 - tail)


def composed(inputs: reference.Inputs, scheme: Scheme, name: str) -> tuple[Tensor, Tensor]:
    """The norm in float64 and what follows it."""
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
    x, weight, bias, mask, mean, var = wide
    z, _ = reference.forward(x, scheme, weight, bias, mask=mask, running_mean=mean, running_var=var)
    return z, exact(z, name)


def assert_gradients(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...], summed: int) -> None:
    """The gradient behind the activation is rounded to the input's type, too."""
    for found, true in zip(actual, wanted, strict=True):
        own = torch.finfo(found.dtype).eps
        wide = torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
        allowed = (2 * own + wide * (8 + summed**0.5)) * float(true.abs().max())
        assert float((found.double() - true.double()).abs().max()) <= allowed


# --------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", CASES, ids=str)
@Dtypes
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_every_loop_layout_and_type(case: Case, dtype: torch.dtype, masked: bool) -> None:
    scheme = case.scheme.replace(eps=reference.resolve_eps(case.scheme, dtype))
    valid = values(case.shape, seed=9) > -0.5 if masked else None
    upstream = values(case.shape, dtype, 7)
    for number, (_, x) in enumerate(layouts(values(case.shape, dtype) * 2 + 1)):
        name = NAMES[number % 3 if dtype != torch.float32 else (number + masked) % 3]
        weight, bias = parameters(case, dtype)
        if not case.scheme.center:
            bias = None
        given = reference.Inputs(x.detach().requires_grad_(), weight, bias, valid)
        leaves = [t.requires_grad_() for t in given[:3] if t is not None]
        z, wanted = composed(given, scheme, name)
        y = axisnorm.normalize(x.detach(), scheme, weight, bias, mask=valid, activation=name)
        # A half type rounds once more before the affine part, where a tie may fall either way.
        loose = scheme.rounding == "before_affine" and x.dtype.itemsize == 2
        scale = float(z.detach().abs().max())
        assert_close(y.detach(), wanted.detach(), 1e5 if loose else 6, scale)
        assert y.stride() == torch.empty_like(x).stride()
        again = axisnorm.normalize(given.x, scheme, weight, bias, mask=valid, activation=name)
        assert torch.equal(again, y)
        found = torch.autograd.grad(again, leaves, upstream)
        true = torch.autograd.grad(wanted, leaves, upstream.double())
        if not loose:
            assert_gradients(found, true, z.numel())
        if valid is not None:
            assert torch.equal(y[~valid], torch.zeros_like(y)[~valid])
            assert torch.equal(found[0][~valid], torch.zeros_like(y)[~valid])


@pytest.mark.usefixtures("isa")
@Names
@Dtypes
@pytest.mark.parametrize("channels_last", [False, True])
def test_running_statistics_that_normalize(
    name: str, dtype: torch.dtype, channels_last: bool
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = values((2, 19, 5, 7), dtype).contiguous(memory_format=layout)
    weight, bias = (values((19,), dtype, seed) for seed in (1, 2))
    mean, var = values((19,), torch.float32, 3), values((19,), torch.float32, 4).exp()
    for scheme, call in (
        (Scheme.batch_norm(statistics="running"), axisnorm.batch_norm),
        (
            Scheme.instance_norm(statistics="running"),
            functools.partial(axisnorm.instance_norm, use_input_stats=False),
        ),
    ):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        inputs = reference.Inputs(*leaves, None, mean, var)
        z, wanted = composed(inputs, scheme, name)
        plain = call(x, mean, var, weight, bias, activation=name)
        assert_close(plain, wanted.detach(), 6, float(z.detach().abs().max()))
        y = call(leaves[0], mean, var, *leaves[1:], activation=name)
        assert torch.equal(y, plain)
        upstream = values(x.shape, dtype, 7)
        found = torch.autograd.grad(y, leaves, upstream)
        assert_gradients(found, torch.autograd.grad(wanted, leaves, upstream.double()), z.numel())


@pytest.mark.usefixtures("isa")
@Names
def test_running_statistics_move_as_without_activation(name: str) -> None:
    x, weight = values((4, 5, 3, 3)), values((5,), seed=1)
    moved = []
    for activation in (None, name):
        for tensor in (x, x.clone().requires_grad_(), to_numpy(x)):
            given = torch.zeros(5), torch.ones(5)
            arrays = tuple(map(to_numpy, given)) if isinstance(tensor, np.ndarray) else given
            kept = to_numpy(weight) if isinstance(tensor, np.ndarray) else weight
            axisnorm.batch_norm(tensor, *arrays, kept, training=True, activation=activation)
            moved.append(torch.stack(given))
    for found in moved[1:]:
        torch.testing.assert_close(found, moved[0], rtol=1e-6, atol=1e-7)


SIZES = (torch.finfo(torch.float32).max / 4, 1e30, 1e-30, 1e-42)


@pytest.mark.usefixtures("isa")
@Names
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [CASES[i] for i in (0, 5, 6, 10, 13)], ids=str)
def test_groups_that_float32_cannot_hold(case: Case, size: float, name: str) -> None:
    scheme = case.scheme.replace(eps=0.0)
    x = (values(case.shape, torch.float64) * size).clamp(-3e38, 3e38).float()
    leaves = [x.requires_grad_(), *(t.requires_grad_() for t in parameters(case) if t is not None)]
    z, wanted = composed(reference.Inputs(*leaves), scheme, name)
    y = axisnorm.normalize(leaves[0], scheme, *leaves[1:], activation=name)
    assert_close(y.detach(), wanted.detach(), 6, float(z.detach().abs().max()))
    # Neither its product with rstd overflows, nor does the gradient behind the activation lose digits.
    upstream = values(case.shape, seed=7) * min(max(size, 1e-6), 1e30)
    found = torch.autograd.grad(y, leaves, upstream)
    assert_gradients(found, torch.autograd.grad(wanted, leaves, upstream.double()), z.numel())


@pytest.mark.usefixtures("isa")
@Names
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_constant_group_gives_the_activation_of_its_bias(case: Case, name: str) -> None:
    weight, bias = parameters(case)
    if bias is None:
        bias = torch.zeros(())
    elif case.scheme.center:
        bias = bias.reshape(case.scheme.layout(len(case.shape)).sizes(case.shape).affine_shape)
    scheme = case.scheme.replace(center=True, weight_offset=0.0)
    x = torch.full(case.shape, 3.7)
    given = (weight, None) if weight is None else (weight, bias)
    y = axisnorm.normalize(x, scheme, *given, activation=name)
    plain = axisnorm.normalize(x, scheme, *given)
    assert_close(y, exact(plain, name), 2, float(plain.abs().max()) or 1.0)


def evaluated(z: Tensor, name: str | None) -> Tensor:
    """The activation of values that the norm gives back as they are."""
    y = axisnorm.batch_norm(
        z[None, None], z.new_zeros(1), z.new_ones(1), eps=1e-30, activation=name
    )
    return y[0, 0]


SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 1e-30, 88.0, -88.0, 104.0, -104.0, 1e30, -1e30, 3e38, -3e38)


@pytest.mark.usefixtures("isa")
@Names
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_and_derivatives_in_their_whole_range(name: str, dtype: torch.dtype) -> None:
    count = 400_001 if dtype == torch.float32 else 20_001
    near, far = (torch.linspace(-limit, limit, count, dtype=dtype) for limit in (15, 100))
    z = torch.cat([near, far, torch.tensor(SPECIAL, dtype=dtype)])
    # The norm multiplies by 1 / sqrt(1 + 1e-30), and its result may be off by a rounding.
    z = evaluated(z, None)
    leaf = z.clone().requires_grad_()
    y = evaluated(leaf, name)
    wanted = exact(z, name)
    info = torch.finfo(dtype)
    unit = info.eps * 2.0 ** (torch.frexp(z.abs().clamp_min(info.tiny))[1] - 1).to(dtype)
    error = (y.detach().double() - wanted).abs()
    assert float((error / unit).max()) <= 3.0
    upstream = values((z.numel(),), dtype, 5)
    (slope,) = torch.autograd.grad(y, leaf, upstream)
    wide = z.double().requires_grad_()
    (true,) = torch.autograd.grad(exact(wide, name), wide, upstream.double())
    # The derivative is at most 1.13.
    assert float(((slope.double() - true).abs() / upstream.double().abs()).max()) <= 3 * info.eps


@pytest.mark.usefixtures("isa")
@Names
@Dtypes
def test_infinities_and_nan(name: str, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    z = torch.tensor([inf, -inf, nan, 1.0], dtype=dtype)
    expected = torch.tensor([inf, 0.0, nan, float(exact(torch.ones(()), name))])
    torch.testing.assert_close(evaluated(z, name).float(), expected, equal_nan=True,
                               rtol=torch.finfo(dtype).eps, atol=0.0)  # fmt: skip
    array = to_numpy(z)[None, None]
    found = axisnorm.normalize(
        array, "n c [...]; affine=c; eps_placement=std; eps=1e-30; statistics=running",
        running_mean=np.zeros(1), running_var=np.ones(1), activation=name,
    )  # fmt: skip
    torch.testing.assert_close(from_numpy(found)[0, 0].float(), expected, equal_nan=True,
                               rtol=torch.finfo(dtype).eps, atol=0.0)  # fmt: skip


@pytest.mark.usefixtures("isa")
@Names
def test_float32_is_the_function_of_what_the_norm_gives(name: str) -> None:
    """The value that is activated has the bits of the plain norm."""
    for case in CASES:
        x = values(case.shape)
        weight, bias = parameters(case)
        z = axisnorm.normalize(x, case.scheme, weight, bias)
        y = axisnorm.normalize(x, case.scheme, weight, bias, activation=name)
        assert torch.equal(evaluated(z.flatten(), name).view(x.shape), y)


@pytest.mark.usefixtures("isa")
@Names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_on_neither_threads_nor_batch(name: str, dtype: torch.dtype) -> None:
    calls: tuple[tuple[Callable[..., Tensor], tuple[int, ...]], ...] = (
        (lambda x: axisnorm.layer_norm(x, 300, activation=name), (600, 300)),
        (lambda x: axisnorm.group_norm(x, 4, activation=name), (16, 32, 20, 20)),
        (lambda x: axisnorm.layer_norm_2d(x, activation=name), (16, 32, 20, 20)),
        (lambda x: axisnorm.instance_norm(x, activation=name), (1, 2, 400, 410)),
    )
    for call, shape in calls:
        x = values(shape, dtype).requires_grad_()
        found = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            y = call(x)
            (dx,) = torch.autograd.grad(y, x, values(shape, dtype, 3))
            found.append((y.detach(), dx))
        for y, dx in found[1:]:
            assert torch.equal(y, found[0][0])
            assert torch.equal(dx, found[0][1])
        assert torch.equal(call(x.detach()[:1]), found[0][0][:1])


# --------------------------------------------------------------------------------------------
# Ways of calling


@Names
@Dtypes
def test_numpy_gives_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    for case in CASES:
        x = values(case.shape, dtype)
        weight, bias = parameters(case, dtype)
        valid = values(case.shape, seed=9) > -0.5
        wanted = axisnorm.normalize(x, case.scheme, weight, bias, mask=valid, activation=name)
        arrays = [None if t is None else to_numpy(t) for t in (x, weight, bias)]
        out = np.empty_like(arrays[0])
        found = axisnorm.normalize(
            arrays[0], case.scheme, *arrays[1:], mask=to_numpy(valid), out=out, activation=name
        )
        assert found is out
        assert torch.equal(from_numpy(found), wanted)


@Names
@Dtypes
def test_schemes_without_a_kernel(name: str, dtype: torch.dtype) -> None:
    scheme = Scheme("... [d]; affine=d; scale=var; eps=1e-2")
    x, weight, bias = (values(s, dtype, i) for i, s in enumerate(((3, 9), (9,), (9,))))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    z, wanted = composed(reference.Inputs(*leaves), scheme, name)
    y = axisnorm.normalize(x, scheme, weight, bias, activation=name)
    assert_close(y, wanted.detach(), 4, float(z.detach().abs().max()))
    arrays = [to_numpy(t) for t in (x, weight, bias)]
    array = axisnorm.normalize(arrays[0], scheme, *arrays[1:], activation=name)
    assert_close(from_numpy(array), wanted.detach(), 4, float(z.detach().abs().max()))
    upstream = values(x.shape, dtype, 7)
    found = torch.autograd.grad(
        axisnorm.normalize(leaves[0], scheme, *leaves[1:], activation=name), leaves, upstream
    )
    true = torch.autograd.grad(wanted, leaves, upstream.double())
    assert_gradients(found, true, 9)
    explicit = reference.backward(
        upstream.double().numpy(), *(t.double().numpy() if not isinstance(t, Scheme) else t
                                     for t in (x, scheme, weight, bias)), activation=name,
    )  # fmt: skip
    for derivative, expected in zip(explicit, true, strict=True):
        np.testing.assert_allclose(derivative, expected.double(), rtol=0.02, atol=1e-2)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "normalize": (lambda x, **more: axisnorm.normalize(x, "n [c] ...", **more), (2, 6, 3, 3)),
    "layer_norm": (lambda x, **more: axisnorm.layer_norm(x, 6, **more), (2, 3, 6)),
    "rms_norm": (lambda x, **more: axisnorm.rms_norm(x, 6, **more), (2, 3, 6)),
    "layer_norm_2d": (axisnorm.layer_norm_2d, (2, 6, 3, 3)),
    "group_norm": (lambda x, **more: axisnorm.group_norm(x, 2, **more), (2, 6, 3, 3)),
    "instance_norm": (axisnorm.instance_norm, (2, 6, 3, 3)),
    "batch_norm": (
        lambda x, **more: axisnorm.batch_norm(x, None, None, training=True, **more), (2, 6, 3, 3)
    ),
    "add_layer_norm": (
        lambda x, **more: axisnorm.add_layer_norm(x, 2 * x, 6, **more), (2, 3, 6)
    ),
    "add_rms_norm": (lambda x, **more: axisnorm.add_rms_norm(x, -3 * x, 6, **more), (2, 3, 6)),
}  # fmt: skip
Functions = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if not name.startswith("add")])
@Names
def test_out_and_masks(function: str, name: str) -> None:
    call, shape = FUNCTIONS[function]
    x = values(shape)
    y = call(x, activation=name)
    assert_close(y, exact(call(x.double()), name), 6)
    out = torch.empty_like(x)
    assert call(x, out=out, activation=name) is out
    assert torch.equal(out, y)
    valid = torch.ones(shape, dtype=torch.bool)
    torch.testing.assert_close(call(x, mask=valid, activation=name), y)
    own = x.clone()
    assert call(own, out=own, activation=name) is own
    assert torch.equal(own, y)


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@Functions
@Names
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_whoever_watches_sees_the_norm_and_torchs_function(function: str, name: str) -> None:
    call, shape = FUNCTIONS[function]
    x = values(shape)
    eager = call(x, activation=name)
    with _Recorded() as seen:
        watched = call(x, activation=name)
    assert f"aten::{name}" in seen.names
    torch.testing.assert_close(watched, eager)
    leaf = x.clone().requires_grad_()
    y = call(leaf, activation=name)
    with _Recorded() as seen:
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(x))
    assert {"axisnorm::norm_bwd", "axisnorm::add_norm_bwd"} & set(seen.names)
    (plain,) = torch.autograd.grad(call(leaf, activation=name), leaf, torch.ones_like(x))
    torch.testing.assert_close(dx, plain, atol=1e-5, rtol=1e-5)
    traced = torch.jit.trace(lambda x: call(x, activation=name), x, check_trace=False)
    torch.testing.assert_close(traced(x), eager)
    assert call(x.to("meta"), activation=name).is_meta


@Functions
@Names
def test_transforms(function: str, name: str) -> None:
    call, shape = FUNCTIONS[function]

    def activated(x: Tensor) -> Tensor:
        return call(x, activation=name)

    def two_steps(x: Tensor) -> Tensor:
        return getattr(F, name)(call(x))

    x, direction = values(shape, torch.float64), values(shape, torch.float64, 3)
    torch.testing.assert_close(
        jvp(activated, (x,), (direction,)), jvp(two_steps, (x,), (direction,))
    )
    many = values((3, *shape), torch.float64)
    torch.testing.assert_close(vmap(activated)(many), vmap(two_steps)(many))

    def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (f(x) * direction).sum()

    torch.testing.assert_close(vmap(grad(loss(activated)))(many), vmap(grad(loss(two_steps)))(many))
    leaf = x.requires_grad_()
    rows = torch.eye(x.numel(), dtype=x.dtype)[:4].view(4, *shape)
    batched = [
        torch.autograd.grad(f(leaf), leaf, rows, is_grads_batched=True)[0]
        for f in (activated, two_steps)
    ]
    torch.testing.assert_close(*batched)


@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize("summed", [False, True], ids=["", "of a sum"])
def test_third_derivatives(name: str, summed: bool) -> None:
    x = values((3, 4), torch.float64).requires_grad_()
    weight, bias = (values((4,), torch.float64, i).requires_grad_() for i in (1, 2))
    directions = [values((3, 4), torch.float64, 10 + i) for i in range(3)]

    def third(y: Tensor) -> tuple[Tensor, ...]:
        value = (y * directions[0]).sum()
        for direction in directions[1:]:
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            value = (first * direction).sum()
        return torch.autograd.grad(value, (x, weight, bias))

    # Written out: torch's own layer_norm has other third derivatives by x.
    residual = values((3, 4), torch.float64, 4)
    h = x + residual if summed else x
    centred = h - h.mean(-1, keepdim=True)
    z = centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    if summed:
        y = axisnorm.add_layer_norm(x, residual, 4, weight, bias, activation=name)
    else:
        y = axisnorm.layer_norm(x, 4, weight, bias, activation=name)
    torch.testing.assert_close(third(y), third(getattr(F, name)(z)))


SUMS: dict[str, Callable[..., Any]] = {
    "add_layer_norm": axisnorm.add_layer_norm,
    "add_rms_norm": lambda x, r, n, w, _, **more: axisnorm.add_rms_norm(x, r, n, w, **more),
    "gemma": lambda x, r, n, w, _, **more: axisnorm.add_rms_norm(
        x, r, n, w, 1e-3, weight_offset=1.0, **more
    ),
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sum_norm", SUMS)
@Names
@Dtypes
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
def test_sums(
    sum_norm: str, name: str, dtype: torch.dtype, dropout_p: float, strided: bool
) -> None:
    """y is activated and h is not; their gradients are those of the three steps."""
    norm = SUMS[sum_norm]
    x, residual, up, up_h = (values((5, 33), dtype, i) for i in range(4))
    if strided:  # not for the short way
        x, residual = (t.T.contiguous().T for t in (x, residual))
    weight, bias = (values((33,), dtype, i) for i in (5, 6))
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    options: dict[str, Any] = {"dropout_p": dropout_p, "training": True}

    def call(**more: Any) -> Any:
        torch.manual_seed(1)
        return norm(x, residual, 33, weight, bias, **options, **more)

    y, h = call(prenorm=True, activation=name)
    plain, same_h = call(prenorm=True)
    assert torch.equal(h, same_h)
    assert torch.equal(call(activation=name), y)
    with torch.no_grad():
        assert torch.equal(call(activation=name), y)
    kept = (call(prenorm=True)[1] - residual).detach().double() if dropout_p else None
    wide = [t.detach().double().requires_grad_() for t in leaves]
    factor = 1.0 if kept is None else 1 / (1 - dropout_p) * (kept != 0)
    wide_h = wide[1] + wide[0] * factor
    # h is rounded to its type, through which gradients pass.
    rounded = wide_h + (h.detach().double() - wide_h.detach())
    wide_plain = _wide_norm(sum_norm, rounded, *wide[2:], dtype)
    wanted = exact(wide_plain, name)
    assert_close(y.detach(), wanted.detach(), 6, float(plain.detach().abs().max()))
    used = [0, 1, 2, 3] if sum_norm == "add_layer_norm" else [0, 1, 2]
    found = torch.autograd.grad((y, h), [leaves[i] for i in used], (up, up_h))
    true = torch.autograd.grad(
        (wanted, wide_h), [wide[i] for i in used], (up.double(), up_h.double())
    )
    assert_gradients(found, true, x.numel())


def _wide_norm(
    sum_norm: str, h: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> Tensor:
    if sum_norm == "add_layer_norm":
        return reference.forward(h, Scheme.layer_norm(33), weight, bias)[0]
    eps = reference.resolve_eps(Scheme.rms_norm(33), dtype) if sum_norm == "add_rms_norm" else 1e-3
    offset = 1.0 if sum_norm == "gemma" else 0.0
    return reference.forward(h, Scheme.rms_norm(33, eps=eps, weight_offset=offset), weight)[0]


@Names
@Dtypes
def test_sums_of_arrays_have_the_bits_of_tensors(name: str, dtype: torch.dtype) -> None:
    x, residual, weight, bias = (values((5, 33), dtype, i) for i in range(4))
    weight, bias = weight[0], bias[0]
    for norm in SUMS.values():
        for order in (lambda t: t, lambda t: t.T.contiguous().T):
            tensors = [*map(order, (x, residual)), 33, weight, bias]
            arrays = [t if isinstance(t, int) else to_numpy(t) for t in tensors]
            found = norm(*arrays, prenorm=True, activation=name)
            for y, wanted in zip(found, norm(*tensors, prenorm=True, activation=name), strict=True):
                assert torch.equal(from_numpy(y), wanted)


@Names
def test_a_bias_that_changed_before_backward_is_refused(name: str) -> None:
    """The derivative of an activation depends on the bias, a norm's own gradient does not."""
    x, bias = values((2, 4)).requires_grad_(), torch.nn.Parameter(torch.zeros(4))
    calls = (
        functools.partial(axisnorm.layer_norm, x, 4, None, bias),
        functools.partial(axisnorm.group_norm, x, 2, None, bias),
        functools.partial(axisnorm.layer_norm, x, 4, None, bias, mask=x > -9),
        functools.partial(axisnorm.add_layer_norm, x, x.detach(), 4, None, bias),
        functools.partial(axisnorm.add_layer_norm, x.T.contiguous().T, x.detach(), 4, None, bias),
    )
    for call in calls:
        y = call(activation=name)
        with torch.no_grad():
            bias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("batch_norm", "relu"),
        ("group_norm", "silu"),
        ("rms_norm", "gelu"),
        ("add_layer_norm", "gelu"),
        ("add_rms_norm", "relu"),
    ],
)
def test_compiled(function: str, name: str) -> None:
    call, shape = FUNCTIONS[function]
    compiled = torch.compile(
        lambda x: call(x, activation=name), fullgraph=True, backend="aot_eager"
    )
    x = values(shape).requires_grad_()
    eager, found = call(x, activation=name), compiled(x)
    torch.testing.assert_close(found, eager)
    upstream = values(shape, seed=3)
    torch.testing.assert_close(
        torch.autograd.grad(found, x, upstream),
        torch.autograd.grad(eager, x, upstream),
        atol=1e-5,
        rtol=1e-5,
    )


@Functions
@pytest.mark.parametrize(
    "wrong",
    ["tanh", "ReLU", "", F.relu, True, ("relu",)],
    ids=["tanh", "ReLU", "empty", "function", "bool", "tuple"],
)
def test_wrong_activations_are_refused(function: str, wrong: Any) -> None:
    call, shape = FUNCTIONS[function]
    x = values(shape)
    for given in (x, x.clone().requires_grad_(), to_numpy(x)):
        with pytest.raises(ArgumentError, match=r"'relu', 'silu', 'gelu' or None\. .* came"):
            call(given, activation=wrong)


def test_a_refused_activation_leaves_no_trace() -> None:
    x, running = values((4, 3, 2)), (torch.zeros(3), torch.ones(3))
    out = torch.full_like(x, 7.0)
    for more in ({}, {"out": out}, {"mask": x > 0}):
        with pytest.raises(ArgumentError):
            axisnorm.batch_norm(x, *running, training=True, activation="tanh", **more)
    assert torch.equal(torch.stack(running), torch.stack([torch.zeros(3), torch.ones(3)]))
    assert bool((out == 7.0).all())


# --------------------------------------------------------------------------------------------
# Modules

MODULES: dict[str, tuple[Callable[..., torch.nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (functools.partial(ann.LayerNorm, 8), (4, 8)),
    "RMSNorm": (functools.partial(ann.RMSNorm, 8), (4, 8)),
    "GroupNorm": (functools.partial(ann.GroupNorm, 2, 8), (4, 8, 3)),
    "BatchNorm1d": (functools.partial(ann.BatchNorm1d, 8), (4, 8)),
    "BatchNorm2d": (functools.partial(ann.BatchNorm2d, 8, momentum=None), (4, 8, 2, 3)),
    "BatchNorm3d": (functools.partial(ann.BatchNorm3d, 8), (4, 8, 2, 3, 2)),
    "InstanceNorm1d": (functools.partial(ann.InstanceNorm1d, 8, affine=True), (4, 8, 3)),
    "InstanceNorm2d": (
        functools.partial(ann.InstanceNorm2d, 8, track_running_stats=True), (4, 8, 2, 3)
    ),
    "InstanceNorm3d": (functools.partial(ann.InstanceNorm3d, 8), (4, 8, 2, 3, 2)),
    "LazyBatchNorm2d": (ann.LazyBatchNorm2d, (4, 8, 2, 3)),
    "LazyInstanceNorm1d": (ann.LazyInstanceNorm1d, (4, 8, 3)),
    "LayerNorm2d": (functools.partial(ann.LayerNorm2d, 8), (4, 8, 2, 3)),
    "Norm": (
        functools.partial(
            ann.Norm, "[n] c ...", affine="c", sizes={"c": 8}, track_running_stats=True
        ),
        (4, 8, 2, 3),
    ),
    "Norm, no statistics": (functools.partial(ann.Norm, "n [c] ..."), (4, 8, 2, 3)),
}  # fmt: skip
SUM_MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "AddLayerNorm": functools.partial(ann.AddLayerNorm, 8, dropout_p=0.5),
    "AddRMSNorm": functools.partial(ann.AddRMSNorm, 8),
}
Modules = pytest.mark.parametrize("module", MODULES)


@Modules
@Names
def test_modules(module: str, name: str) -> None:
    make, shape = MODULES[module]
    x = values(shape)
    plain, activated = make(), make(activation=name)
    for train in (True, False):
        plain.train(train), activated.train(train)
        assert_close(activated(x), exact(plain(x), name), 6)
    assert repr(activated) == f"{repr(plain)[:-1]}, activation={name!r})"
    assert list(activated.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(activated.state_dict()[key], value)
    activated.load_state_dict(plain.state_dict())
    for again in (copy.deepcopy(activated), pickle.loads(pickle.dumps(activated)),
                  _saved(activated)):  # fmt: skip
        assert again.activation == name
        assert torch.equal(again(x), activated(x))


@pytest.mark.parametrize("module", SUM_MODULES)
@Names
def test_modules_of_sums(module: str, name: str) -> None:
    make = SUM_MODULES[module]
    x, residual = values((4, 8)), values((4, 8), seed=1)
    plain, activated = make(prenorm=True), make(prenorm=True, activation=name)
    for train in (True, False):
        found = []
        for norm in (plain, activated):
            torch.manual_seed(2)
            found.append(norm.train(train)(x, residual))
        assert_close(found[1][0], exact(found[0][0], name), 6)
        assert torch.equal(found[0][1], found[1][1])
    assert repr(activated) == f"{repr(plain)[:-1]}, activation={name!r})"
    assert list(activated.state_dict()) == list(plain.state_dict())
    for again in (copy.deepcopy(activated), _saved(activated)):
        assert torch.equal(again(x, residual)[0], activated(x, residual)[0])
    assert "activation" not in vars(plain)
    with pytest.raises(ArgumentError, match="'tanh' came"):
        make(activation="tanh")


def test_programs_of_sums() -> None:
    model = ann.AddLayerNorm(8, activation="silu").eval()
    given = values((4, 8)), values((4, 8), seed=1)
    program = torch.export.export(model, given)
    assert "aten.silu" in str(program.graph)
    torch.testing.assert_close(program.module()(*given), model(*given))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.isinstance.treespec, LeafSpec")
def test_onnx_of_sums() -> None:
    pytest.importorskip("onnxscript")
    model = ann.AddRMSNorm(8, activation="silu").eval()
    program = torch.onnx.export(
        model, (values((4, 8)), values((4, 8))), dynamo=True, opset_version=23, verbose=False
    )
    assert program is not None
    nodes = [node.op_type for node in program.model.graph if node.op_type != "Constant"]
    assert nodes == ["Add", "RMSNormalization", "Sigmoid", "Mul"]


def _saved(module: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded: torch.nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@Modules
def test_modules_without_activation_are_as_before(module: str) -> None:
    plain = MODULES[module][0]()
    # So a module that was pickled before there were activations is read as it was.
    assert "activation" not in vars(plain)
    assert plain.activation is None
    assert "activation" not in repr(plain)
    with pytest.raises(ArgumentError, match="'tanh' came"):
        MODULES[module][0](activation="tanh")


def test_an_activation_set_later_or_on_a_module_of_torch() -> None:
    norm, x = ann.LayerNorm(8), values((4, 8))
    norm.activation = "gelu"
    assert torch.equal(norm(x), axisnorm.layer_norm(x, 8, activation="gelu"))
    norm.activation = "tanh"
    with pytest.raises(ArgumentError):
        norm(x)
    theirs = torch.nn.LayerNorm(8)
    theirs.__class__ = ann.LayerNorm
    torch.testing.assert_close(theirs(x), F.layer_norm(x, (8,)))


def test_a_batch_that_is_refused_is_not_counted() -> None:
    norm = ann.BatchNorm1d(3)
    norm.activation = "tanh"
    with pytest.raises(ArgumentError):
        norm(values((4, 3)))
    assert int(norm.num_batches_tracked) == 0
    assert bool((norm.running_mean == 0).all())


def test_traces_of_modules() -> None:
    model = torch.nn.Sequential(ann.GroupNorm(2, 8, activation="silu"))
    x = values((2, 8, 3))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    with pytest.raises(NotImplementedError, match="activation"):
        torch.jit.script(model)
    program = torch.export.export(model, (x,))
    assert "silu" in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.isinstance.treespec, LeafSpec")
def test_onnx() -> None:
    pytest.importorskip("onnxscript")
    model = torch.nn.Sequential(*(ann.LayerNorm(8, activation=name) for name in NAMES)).eval()
    program = torch.onnx.export(
        model, (values((4, 8)),), dynamo=True, opset_version=20, verbose=False
    )
    assert program is not None
    nodes = [node.op_type for node in program.model.graph if node.op_type != "Constant"]
    norm = "LayerNormalization"
    assert nodes == [norm, "Relu", norm, "Sigmoid", "Mul", norm, "Gelu"]


# --------------------------------------------------------------------------------------------
# The lens, which is about norms alone


@Names
def test_the_lens_says_that_an_activation_follows(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), ann.LayerNorm(8, activation=name))
    x = values((3, 4))
    (norm,) = axisnorm.audit(model, x).norms
    assert not norm.verified
    assert norm.scheme is None
    (finding,) = [f for f in norm.findings if f.code == "not-verified"]
    assert (finding.severity, finding.message) == (
        "note", f"Not verified: {name} follows its norm."
    )  # fmt: skip
    swapped = axisnorm.swap(model, x)
    assert not swapped.replaced
    assert [one.reason for one in swapped.left] == ["is this library's already"]
    assert type(model[1]) is ann.LayerNorm
    for subject in (
        model[1],
        functools.partial(axisnorm.layer_norm, activation=name),
        ann.AddLayerNorm(8, activation=name),
    ):
        with pytest.raises(ArgumentError, match="norms alone"):
            axisnorm.explain(subject, (3, 8))
        with pytest.raises(ArgumentError, match="norms alone"):
            axisnorm.compare(subject, "... [d]", (3, 8))


def test_codes_are_those_of_the_kernels() -> None:
    assert [_route.activation_code(name) for name in (None, *NAMES)] == [0, 1, 2, 3]
