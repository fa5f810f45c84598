"""The kernels against float64 (float64 against longdouble), on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import DTYPES, assert_close, assert_gradient_close, epsilon, from_numpy, to_numpy, values

import axisnorm
from axisnorm import Scheme, _route, reference

pytestmark = pytest.mark.usefixtures("isa")

# Around every vector width and unrolling: 1 to 2W + 1, and beyond a block of sums.
LENGTHS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    129,
    255,
    768,
    1000,
    5000,
)


def exact(x: torch.Tensor, scheme: Scheme, *parameters: torch.Tensor | None) -> torch.Tensor:
    """The output in float64, or in longdouble rounded to float64 for float64 input."""
    scheme = scheme.replace(eps=reference.resolve_eps(scheme, x.dtype))
    if x.dtype != torch.float64:
        wide = [None if p is None else p.double() for p in parameters]
        return reference.forward(x.double(), scheme, *wide)[0]
    arrays = [None if p is None else p.double().numpy().astype(np.longdouble) for p in parameters]
    with np.errstate(all="ignore"):
        y, _ = reference.forward(x.numpy().astype(np.longdouble), scheme, *arrays)
        return torch.from_numpy(y.astype(np.float64))


def native(x: torch.Tensor, scheme: Scheme, *parameters: torch.Tensor | None) -> torch.Tensor:
    assert _route.choose(scheme, x.shape, str(x.dtype).removeprefix("torch.")).engine == "native"
    return axisnorm.normalize(x, scheme, *parameters)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_lengths(dtype: torch.dtype, center: bool) -> None:
    scheme = Scheme("... [d]; affine=d", center=center)
    for n in LENGTHS:
        for rows in (1, 2, 3, 5):
            x = values((rows, n), dtype, seed=n) * 3 + 1
            weight, bias = values((n,), dtype, 1), values((n,), dtype, 2)
            for row, correct in zip(
                native(x, scheme, weight, bias), exact(x, scheme, weight, bias), strict=True
            ):
                assert_close(row, correct)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameter", DTYPES, ids=str)
def test_parameter_types(dtype: torch.dtype, parameter: torch.dtype) -> None:
    x = values((4, 100), dtype)
    weight, bias = values((100,), parameter, 1), values((100,), parameter, 2)
    scheme = Scheme("... [d]; affine=d", weight_offset=0.5)
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        assert_close(native(x, scheme, w, b), exact(x, scheme, w, b))


HARD = {
    "mean 1e4": lambda z: z + 1e4,
    "mean 1e6": lambda z: z + 1e6,
    "mean -1e4, deviation 0.01": lambda z: 0.01 * z - 1e4,
    "1e19": lambda z: z * 1e19,
    "1e30": lambda z: z * 1e30,
    "1e-30": lambda z: z * 1e-30,
    "denormal": lambda z: z * 1e-42,
    "largest": lambda z: z / z.abs().max() * 3.4e38,
    "an outlier": lambda z: torch.where(torch.arange(z.shape[-1]) == 5, 1e4, z),
    "64 outliers": lambda z: torch.where(torch.arange(z.shape[-1]) < 64, 1e4, z),
    "alternating": lambda z: torch.where(torch.arange(z.shape[-1]) % 2 == 0, 8e3, -8e3),
    "heavy tail": lambda z: z.exp(),
    "a ramp": lambda z: torch.arange(z.shape[-1], dtype=z.dtype).expand(z.shape) + 4e4,
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.0])
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_hard_float32(name: str, eps: float, center: bool) -> None:
    x = HARD[name](values((3, 768), torch.float64)).float()
    scheme = Scheme("... [d]", center=center, eps=eps)
    for row, correct in zip(native(x, scheme), exact(x, scheme), strict=True):
        assert_close(row, correct)


@pytest.mark.parametrize("scale", [1e300, 1.7e308, 1e160, 1e-160, 1e-300, 5e-324])
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_hard_float64(scale: float, center: bool, eps: float) -> None:
    z = values((3, 100), torch.float64)
    x = z / z.abs().max() * scale if scale > 1 else (z * 8 * scale)
    scheme = Scheme("... [d]", center=center, eps=eps)
    for row, correct in zip(native(x, scheme), exact(x, scheme), strict=True):
        assert_close(row, correct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 11, 14, 14), (1, 11, 3, 5), (1, 11, 56, 57)])
def test_rstd_times_weight_out_of_range(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A line multiplies by one product, unless that, or what is added to all, is out of range."""
    scheme = Scheme("n c [h w]; affine=c; eps=0")
    x, weight, bias = values(shape, dtype), values((11,), dtype, 1), values((11,), dtype, 2)
    small, high, large, low, top = (
        (-440, 600, 500, -560, 1023) if dtype == torch.float64 else (-49, 80, 60, -80, 127)
    )
    x[:, 2] *= 2.0**small  # infinite
    weight[2] = 2.0**high
    x[:, 5] *= 2.0**large  # a denormal
    weight[5], bias[5] = 2.0**low, 0
    weight[6], bias[6] = 2.0 ** (low - 40), 0
    weight[7] = 0
    x[:, 8:10].flatten(2)[..., :64] += 0.45  # the mean of these is not that of all
    weight[8], bias[8] = 2.0 ** (top - 2), 1.97 * 2.0**top
    weight[9], bias[9] = -(2.0 ** (top - 2)), -1.97 * 2.0**top

    y = native(x, scheme, weight, bias)
    correct = exact(x, scheme, weight, bias)
    for i in range(11):
        line, wanted = y[:, i], correct[:, i]
        fits = wanted.abs() < 0.99 * torch.finfo(dtype).max
        assert fits.any()
        assert_close(line[fits], wanted[fits])
        alone = native(x[:, i : i + 1].clone(), scheme, weight[i : i + 1], bias[i : i + 1])
        assert torch.equal(alone[:, 0], line)
    rectified = axisnorm.normalize(x, scheme, weight, bias, activation="relu")
    assert torch.equal(rectified, y.relu())


def test_offset_rows_within_a_millionth() -> None:
    x = (values((16, 768), torch.float64) + 1e4).float()
    error = axisnorm.layer_norm(x, 768).double() - exact(x, Scheme.layer_norm())
    assert error.abs().max() < 1e-6


@pytest.mark.parametrize("n", [100_003, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_rows(n: int, dtype: torch.dtype) -> None:
    x = values((1, n), dtype) + 3
    assert_close(native(x, Scheme("... [d]")), exact(x, Scheme("... [d]")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 7, 768, 1000])
@pytest.mark.parametrize("value", [0.1, 1000.3333, 60000.0, 0.0, -3e38])
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.0])
def test_constant_group_gives_exactly_the_bias(
    dtype: torch.dtype, n: int, value: float, eps: float
) -> None:
    constant = torch.full((3, n), value, dtype=torch.float64).to(dtype)
    if not constant.isfinite().all():
        constant = torch.full((3, n), 6e4, dtype=dtype)
    x = constant.requires_grad_()
    weight = torch.full((n,), 2.0, dtype=dtype, requires_grad=True)
    bias = torch.full((n,), 3.0, dtype=dtype, requires_grad=True)
    y = axisnorm.layer_norm(x, n, weight, bias, eps)
    assert torch.equal(y, torch.full_like(y, 3.0))
    y.backward(torch.ones_like(y))
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.full_like(bias, 3.0))
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "... [d]; affine=d",
        "... [d]; affine=d; center=false",
        "... [d]; affine=d; center=false; rounding=before_affine",
        "... [d]; affine=d; weight_offset=1; correction=1",
    ],
)
@pytest.mark.parametrize(
    ("rows", "n"), [(1, 17), (4, 64), (7, 129), (300, 40), (33, 768), (5, 1100)]
)
def test_backward(dtype: torch.dtype, text: str, rows: int, n: int) -> None:
    scheme = Scheme(text).replace(eps=1e-5)
    x, grad = values((rows, n), dtype) * 2 + 3, values((rows, n), dtype, 3)
    weight, bias = values((n,), dtype, 1) + 1, values((n,), dtype, 2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    found = torch.autograd.grad(axisnorm.normalize(leaves[0], scheme, *leaves[1:]), leaves, grad)
    wide = [t.double() for t in (grad, x)]
    parameters = [t.double() for t in (weight, bias)]
    if scheme.rounding == "before_affine" and dtype in (torch.float16, torch.bfloat16):
        # The weight's gradient is that of the rounded value: the reference on the half type.
        correct = reference.backward(grad, x, scheme, *parameters)
    else:
        correct = reference.backward(*wide, scheme, *parameters)
    for actual, wanted, summed in zip(found, correct, (n, rows, rows), strict=True):
        assert_gradient_close(actual, wanted.double(), summed)


@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1e19, 1e36, 3e38])
def test_backward_of_extreme_rows(scale: float) -> None:
    """Rows whose statistics float32 cannot hold, beside ordinary ones."""
    z = values((4, 100), torch.float64)
    x = z.clone()
    x[1] = z[1] / z[1].abs().max() * scale
    x = x.float()
    scheme = Scheme("... [d]; affine=d; eps=0")
    weight, grad = values((100,), torch.float32, 1), values((4, 100), torch.float32, 2)
    if scale < 1:  # so that the gradient, of the size 1 / x, stays finite
        grad[1] *= scale
    leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    found = torch.autograd.grad(axisnorm.normalize(leaf, scheme, w), (leaf, w), grad)
    dx, dw, _ = reference.backward(grad.double(), x.double(), scheme, weight.double())
    assert dw is not None
    for row, correct in zip(found[0], dx, strict=True):
        # Of a gradient that float32 holds as a denormal, the last bit is 1.4e-45.
        assert_gradient_close(row, correct, 100, max(float(correct.abs().max()), 1e-37))
    assert_gradient_close(found[1], dw, 4)


def test_not_finite_rows_stay_alone() -> None:
    x = values((6, 100))
    x[1, 3], x[4, 7] = float("nan"), float("inf")
    y = axisnorm.layer_norm(x, 100)
    assert y[1].isnan().all() and y[4].isnan().all()
    rest = [0, 2, 3, 5]
    assert torch.equal(y[rest], axisnorm.layer_norm(x[rest], 100))


def test_negative_eps_is_the_formula() -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 10.0]])
    y = axisnorm.layer_norm(x, 2, eps=-1.0)
    assert y[0].isnan().all()
    assert_close(y[1], exact(x, Scheme.layer_norm(eps=-1.0))[1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1000, 65), (257, 768), (4097, 9), (65, 1100)])
def test_same_bits_for_every_thread_count(dtype: torch.dtype, rows: int, n: int) -> None:
    x, grad = values((rows, n), dtype), values((rows, n), dtype, 3)
    weight, bias = values((n,), dtype, 1), values((n,), dtype, 2)
    seen = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = axisnorm.layer_norm(leaves[0], n, *leaves[1:])
        seen.append([y, *torch.autograd.grad(y, leaves, grad)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_same_bits_whatever_the_batch(dtype: torch.dtype, center: bool) -> None:
    scheme = Scheme("... [d]; affine=d", center=center)
    for n in (5, 64, 100, 768, 1100):
        x, grad = values((37, n), dtype), values((37, n), dtype, 3)
        weight, bias = values((n,), dtype, 1), values((n,), dtype, 2)

        def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            leaf = x[rows].clone().requires_grad_()  # noqa: B023
            y = axisnorm.normalize(leaf, scheme, weight, bias)  # noqa: B023
            return y, torch.autograd.grad(y, leaf, grad[rows])[0]  # noqa: B023

        y, dx = run(slice(None))
        for rows in (slice(0, 1), slice(1, 4), slice(7, 12), slice(30, 37), slice(36, 37)):
            part, part_dx = run(rows)
            assert torch.equal(part, y[rows]) and torch.equal(part_dx, dx[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_rows_beside_bad_ones_have_the_bits_of_a_row_alone(
    dtype: torch.dtype, center: bool
) -> None:
    """The moments of the next rows are taken while two are written, unless one needs the slow path."""
    scheme = Scheme("... [d]; affine=d; eps=1e-40", center=center)
    largest = torch.finfo(dtype).max
    # Around multiples of four vectors of 2 to 16 elements, and beyond a block of sums.
    for n in (1, 3, 8, 9, 16, 31, 32, 33, 63, 64, 65, 95, 127, 128, 130, 192, 257, 1100):
        x, grad = values((9, n), dtype), values((9, n), dtype, 3)
        weight, bias = values((n,), dtype, 1), values((n,), dtype, 2)

        def run(x: torch.Tensor, rows: slice) -> tuple[torch.Tensor, ...]:
            leaf = x[rows].clone().requires_grad_()
            y = axisnorm.normalize(leaf, scheme, weight, bias)  # noqa: B023
            dx = torch.autograd.grad(y, leaf, grad[rows])[0]  # noqa: B023
            moments = axisnorm.statistics(x[rows], scheme)
            return tuple(t.nan_to_num(0.5) for t in (y.detach(), dx, *moments) if t is not None)

        far = x[0].clone()
        far[:64] += 1000
        bad = [
            torch.full_like(far, float("nan")),
            far.sign() * largest,
            far * torch.finfo(dtype).tiny,
            torch.full_like(far, 0.1),
            far,
        ]
        for first in range(9):
            changed = x.clone()
            for k in range(first, 9, 3):
                changed[k] = bad[(first + k) % len(bad)]
            together = run(changed, slice(None))
            for i in range(9):
                for row, alone in zip(together, run(changed, slice(i, i + 1)), strict=True):
                    assert torch.equal(row[i], alone[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text",
    ["... [d]; affine=d", "... [d]; center=false", "... [d]; affine=d; rounding=before_affine"],
)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_same_bits_wherever_the_output_stands(
    text: str, dtype: torch.dtype, activation: str | None
) -> None:
    """Long rows are written from the first whole vector in a line of the caches on."""
    scheme, rows = Scheme(text), 3
    for n in (600, 1100, 2100):
        x = values((rows, n), dtype)
        weight, bias = values((n,), dtype, 1), values((n,), dtype, 2)
        parameters = (weight, bias) if scheme.affine else (None, None)
        correct = axisnorm.normalize(x, scheme, *parameters, activation=activation)
        if activation is None and scheme.rounding == "once":
            assert_close(correct, exact(x, scheme, *parameters))
        for offset in range(18):
            memory = torch.full((rows * n + 40,), 7.0, dtype=dtype)
            inside = memory[offset : offset + rows * n]
            out = inside.view(rows, n)
            axisnorm.normalize(x, scheme, *parameters, activation=activation, out=out)
            assert torch.equal(out, correct)
            inside.fill_(7)
            assert (memory == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_gives_the_same_bits(dtype: torch.dtype) -> None:
    x, weight, bias = values((5, 77), dtype), values((77,), dtype, 1), values((77,), dtype, 2)
    y = axisnorm.layer_norm(to_numpy(x), 77, to_numpy(weight), to_numpy(bias))
    assert torch.equal(from_numpy(y), axisnorm.layer_norm(x, 77, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(dtype: torch.dtype) -> None:
    x = values((4, 5, 100), dtype) * 3 + 7
    for scheme in (Scheme.layer_norm(), Scheme.rms_norm(eps=1e-6), Scheme("b [s d]; correction=1")):
        found = axisnorm.statistics(x, scheme)
        correct = reference.moments(x.double(), scheme)
        for actual, wanted in zip(found, (correct.mean, correct.var, correct.rstd), strict=True):
            assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert_gradient_close(actual, wanted, 1)


def test_in_place() -> None:
    x = values((6, 100))
    correct = axisnorm.layer_norm(x, 100)
    assert axisnorm.layer_norm(x, 100, out=x) is x
    assert torch.equal(x, correct)
    strided = values((6, 200))[:, :100]
    correct = axisnorm.layer_norm(strided, 100)
    assert torch.equal(axisnorm.layer_norm(strided, 100, out=strided), correct)


def test_half_rounding_is_correct_for_every_bit_pattern() -> None:
    """Every finite half number, in rows of mixed magnitude."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = every[every.isfinite()]
        x = x[: x.numel() // 64 * 64].view(-1, 64)
        scheme = Scheme("... [d]; eps=1e-5")
        for row, correct in zip(native(x, scheme), exact(x, scheme), strict=True):
            assert_close(row, correct)
    assert epsilon(torch.float16) == 2.0**-10
