"""The doors: numbers that must come out, in torch and NumPy, and clear errors for bad input."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    DTYPES,
    SCHEMES,
    Case,
    epsilon,
    from_numpy,
    parameters,
    to_numpy,
    values,
)

import axisnorm
from axisnorm import ArgumentError, DtypeError, Scheme, reference

Kind = pytest.mark.parametrize("kind", ["torch", "numpy"])


def make(kind: str, data: Any, dtype: str = "float32") -> Any:
    if kind == "torch":
        return torch.tensor(data, dtype=getattr(torch, dtype))
    return np.array(data, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def flat(x: Any) -> list[float]:
    x = x.double() if isinstance(x, torch.Tensor) else x.astype(np.float64)
    return x.reshape(-1).tolist()  # type: ignore[no-any-return]


def near(x: Any, expected: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(flat(x), np.ravel(expected), rtol=0, atol=tolerance)


# --- The founding documents

ARTICLE = [[1, 2, 4, 1], [6, 3, 2, 4], [2, 4, 6, 1]]
QUESTION_X = [
    [[-2.1918, 1.2574, -0.3838, 1.3870], [-0.4043, 1.2972, -1.7326, 0.4047],
     [0.4560, 0.6482, 1.0858, 2.2086]],
    [[-1.4964, 0.3722, -0.7766, 0.3062], [0.9812, 0.1709, -0.9177, -1.2558],
     [-1.1560, -0.0367, 0.5496, -1.1142]],
]  # fmt: skip
QUESTION_Y = [
    [[-1.5194, 0.8530, -0.2758, 0.9422], [-0.2653, 1.2620, -1.4576, 0.4609],
     [-0.9470, -0.6641, -0.0204, 1.6315]],
    [[-1.4058, 0.9872, -0.4840, 0.9026], [1.3933, 0.4803, -0.7463, -1.1273],
     [-0.9869, 0.5545, 1.3619, -0.9294]],
]  # fmt: skip


@Kind
def test_parameters_article(kind: str) -> None:
    x = make(kind, ARTICLE)
    y = [
        [-0.8165, 0.0, 1.6330, -0.8165],
        [1.5213, -0.5071, -1.1832, 0.1690],
        [-0.6509, 0.3906, 1.4321, -1.1717],
    ]
    near(axisnorm.layer_norm(x, [4]), y, 6e-5)
    mean, var, rstd = axisnorm.statistics(x, "n [d]")
    near(mean, [2.0, 3.75, 3.25])
    near(var, [1.5, 2.1875, 3.6875])
    near((x[0, 2] - mean[0]) * rstd[0], 2 / 1.224749, 1e-6)


@Kind
@pytest.mark.parametrize("expanded", [False, True])
def test_integer_and_expanded_parameters(kind: str, expanded: bool) -> None:
    normalized = [[-0.8095, -1.1224, 1.2966, 0.6354], [0.4605, 1.2144, -1.5122, -0.1627]]
    # Values that have these as their normalized ones, up to rounding: they are so already.
    x = make(kind, normalized, "float64")
    correct = axisnorm.layer_norm(x, 4)
    weight, bias = make(kind, [1, 1, 2, 2], "int64"), make(kind, [1, 1, 1, 1], "int64")
    if expanded:
        one = make(kind, [1], "int64")
        bias = one.expand(4) if kind == "torch" else np.broadcast_to(one, (4,))
    y = axisnorm.layer_norm(x, 4, weight, bias)
    near(y, flat(correct * weight + bias), 1e-12)
    near(y[0], [0.1905, -0.1224, 3.5931, 2.2708], 2e-4)
    near(y[1], [1.4605, 2.2144, -2.0243, 0.6746], 2e-4)


@Kind
def test_the_question(kind: str) -> None:
    x = make(kind, QUESTION_X, "float64")
    near(axisnorm.layer_norm(x, 4), QUESTION_Y, 1e-4)  # x is printed with 4 decimals, too
    right = [-1.519391435327454, 0.8530327107709863, -0.2758152854532861, 0.942174010009754]
    near(axisnorm.layer_norm(x, 4)[0, 0], right, 1e-12)
    wrong = [-1.7048934056508998, 0.9571791768620398, -0.3094894774404756, 1.0572037062293356]
    asked = axisnorm.normalize(x, "... [d]; scale=sqrt_std; correction=1; eps=1e-5")
    near(asked[0, 0], wrong, 1e-5)


@Kind
def test_which_mean(kind: str) -> None:
    x = make(kind, flat(values((24,), torch.float64)), "float64").reshape(2, 3, 4)
    for scheme, means in (
        ("[b] s [d]", 3),
        (Scheme.layer_norm((3, 4)), 2),
        (Scheme.layer_norm(4), 6),
    ):
        assert len(flat(axisnorm.statistics(x, scheme)[0])) == means
    token = axisnorm.layer_norm(x, 4)
    instance = axisnorm.instance_norm(x.reshape(2, 3, 4, 1))
    near(instance.reshape(2, 3, 4), flat(token), 1e-14)
    both = x.reshape(2, 12)
    deviation = both - both.mean(1).reshape(2, 1)
    variance = (deviation**2).mean(1).reshape(2, 1)
    near(axisnorm.layer_norm(x, (3, 4)), flat(deviation / (variance + 1e-5) ** 0.5), 1e-12)


# --- Cases that other libraries get wrong, or that need saying


@Kind
@pytest.mark.parametrize("start", [40000, 80000])
def test_offset_row(kind: str, start: int) -> None:
    x = make(kind, [[start + i for i in range(4)]])
    y = [-1.3416354, -0.4472118, 0.4472118, 1.3416354]
    near(axisnorm.layer_norm(x, 4), y)
    near(axisnorm.group_norm(x, 1), y)
    near(axisnorm.instance_norm(x.reshape(1, 1, 4)), y)
    near(axisnorm.batch_norm(x.reshape(4, 1), None, None, training=True), y)
    near(axisnorm.layer_norm_2d(x.reshape(1, 4, 1)), y, 1e-5)


@Kind
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [0.1, 1000.3333, 60000])
@pytest.mark.parametrize("n", [1, 3, 7, 768, 1000])
def test_constant_slices(kind: str, dtype: str, value: float, n: int) -> None:
    row = make(kind, [[value] * n], dtype)
    bias = make(kind, [3.0] * n, dtype)
    one = make(kind, [3.0], dtype)
    outputs = [
        axisnorm.layer_norm(row, n, None, bias),
        axisnorm.group_norm(row, 1, None, bias),
        axisnorm.instance_norm(row.reshape(1, 1, n), None, None, None, one),
        axisnorm.layer_norm_2d(row, None, bias),
    ]
    if n > 1:
        outputs.append(axisnorm.batch_norm(row.reshape(n, 1), None, None, None, one, True))
    for y in outputs:
        assert set(flat(y)) == {3.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_element_slice(dtype: torch.dtype) -> None:
    x = torch.tensor([1e6], dtype=dtype, requires_grad=True)
    w, b = (torch.tensor([v], dtype=dtype, requires_grad=True) for v in (2.0, 3.0))
    y = axisnorm.layer_norm(x, 1, w, b)
    y.backward()
    assert (y.item(), x.grad.item(), w.grad.item(), b.grad.item()) == (3.0, 0.0, 0.0, 1.0)


def test_half_precision_extremes() -> None:
    x = torch.zeros(1, 10, dtype=torch.float16, requires_grad=True)
    y = axisnorm.layer_norm(x, 10, eps=1e-12)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, torch.zeros_like(y)) and x.grad.isfinite().all()
    big = torch.tensor([8000.0, -8000.0], dtype=torch.float16).repeat(1, 2048)
    assert torch.equal(axisnorm.rms_norm(big, 4096, eps=1e-6), big.sign())


@Kind
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", 0.2781974),
        ("bfloat16", 0.279296875),
        ("float16", 0.2783203),
        ("float64", 0.99999999),
    ],
)
def test_rms_norm_machine_epsilon(kind: str, dtype: str, expected: float) -> None:
    near(axisnorm.rms_norm(make(kind, [1e-4] * 4, dtype), 4), [expected] * 4, 5e-8)


@Kind
def test_casting_order(kind: str) -> None:
    x = make(kind, [-0.25, -1.25, 1.0, 2.0], "bfloat16")
    w = make(kind, [1.25, 1.25, 1.25, 2.25], "bfloat16")
    llama = axisnorm.rms_norm(x, 4, w, 1e-6, rounding="before_affine")
    assert flat(llama) == [-0.2431640625, -1.21875, 0.97265625, 3.5]
    assert flat(axisnorm.rms_norm(x, 4, w, 1e-6)) == [-0.2431640625, -1.2109375, 0.97265625, 3.5]
    gemma = axisnorm.rms_norm(x, 4, make(kind, [0.25, 0.25, 0.25, 1.25], "bfloat16"), 1e-6,
                              weight_offset=1.0)  # fmt: skip
    assert flat(gemma) == [-0.2431640625, -1.2109375, 0.97265625, 3.5]


@Kind
def test_batch_norm_bookkeeping(kind: str) -> None:
    x = make(kind, [[2, 15, 2], [2, 17, 2], [-4, -2, -2]])
    mean, var = make(kind, [0.0] * 3), make(kind, [1.0] * 3)
    y = axisnorm.batch_norm(x, mean, var, training=True, momentum=1.0)
    near(mean, [0, 10, 0.6666667])
    near(var, [12, 109, 5.3333333], 1e-5)
    near(y[:, 0], [0.7071063, 0.7071063, -1.4142127])
    batch = make(kind, [[0.0], [4.0]])
    for correction, momentum, expected in ((0, 0.01, (0.02, 1.03)), (1, 0.1, (0.2, 1.7))):
        mean, var = make(kind, [0.0]), make(kind, [1.0])
        scheme = Scheme.batch_norm(momentum=momentum, running_correction=correction)
        axisnorm.normalize(batch, scheme, running_mean=mean, running_var=var)
        near(mean, expected[:1])
        near(var, expected[1:])


@Kind
def test_batch_norm_modes(kind: str) -> None:
    x = make(kind, [[1, 10], [3, 20]])
    mean, var = make(kind, [0.0, 5.0]), make(kind, [4.0, 25.0])
    w, b = make(kind, [2.0, 3.0]), make(kind, [1.0, -1.0])
    near(axisnorm.batch_norm(x, mean, var, w, b), [1.9999987, 1.9999994, 3.9999963, 7.9999982])
    y = axisnorm.batch_norm(x, mean, var, w, b, True)
    near(y, [-0.99999, -3.9999994, 2.99999, 1.9999994])


@Kind
def test_a_failed_or_empty_batch_leaves_no_trace(kind: str) -> None:
    mean, var = make(kind, [0.5] * 4), make(kind, [2.0] * 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        axisnorm.batch_norm(make(kind, [[1.0] * 4]), mean, var, training=True)
    y = axisnorm.batch_norm(make(kind, [[1.0] * 4])[:0], mean, var, training=True)
    assert tuple(y.shape) == (0, 4)
    with pytest.raises(ArgumentError):
        axisnorm.batch_norm(make(kind, [[1.0] * 3] * 2), mean, var, training=True)
    assert flat(mean) == [0.5] * 4 and flat(var) == [2.0] * 4


@Kind
@pytest.mark.parametrize("padding", [0.0, 1e9, float("nan")])
def test_masked_batch_norm(kind: str, padding: float) -> None:
    x = make(kind, [[[1, 5, padding, padding]], [[3, 3, padding, padding]]])
    mask = make(kind, [[[1, 1, 0, 0]], [[1, 1, 0, 0]]], "bool")
    mean, var = make(kind, [0.0]), make(kind, [1.0])
    y = axisnorm.batch_norm(x, mean, var, training=True, momentum=1.0, mask=mask)
    near(mean, [3.0])
    near(var, [2.6666667])
    near(y, [-1.4142100, 1.4142100, 0, 0, 0, 0, 0, 0])
    near(axisnorm.statistics(x, "[n] c [...]", mask=mask)[1], [2.0])
    before = flat(mean) + flat(var)
    axisnorm.batch_norm(x, mean, var, training=True, mask=mask & ~mask)
    assert flat(mean) + flat(var) == before


def test_empty_mask_row() -> None:
    x = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]], requires_grad=True)
    w = torch.ones(4, requires_grad=True)
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    y = axisnorm.layer_norm(x, 4, w, mask=mask)
    near(y.detach(), [-0.99998, 0.99998, 0, 0, 0, 0, 0, 0])
    y.sum().backward()
    assert x.grad.isfinite().all() and w.grad.isfinite().all()
    assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("shape", [(4, 32, 24, 24), (2, 32, 4, 6, 6)])
def test_channels_last(shape: tuple[int, ...]) -> None:
    x = values(shape)
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    last = x.contiguous(memory_format=form)
    for door in (
        lambda t: axisnorm.group_norm(t, 4),
        axisnorm.instance_norm,
        axisnorm.layer_norm_2d,
        lambda t: axisnorm.batch_norm(t, None, None, training=True),
    ):
        assert door(last).is_contiguous(memory_format=form) and door(x).is_contiguous()
        assert (door(last) - door(x)).abs().max() < 1e-6


@Kind
def test_three_layer_norms_of_one_image(kind: str) -> None:
    x = make(kind, list(range(8))).reshape(1, 2, 2, 2)
    near(axisnorm.layer_norm_2d(x), [-0.9999999] * 4 + [0.9999999] * 4)
    near(axisnorm.group_norm(x, 1, eps=1e-6), [
        -1.5275251, -1.0910893, -0.6546536, -0.2182179, 0.2182179, 0.6546536, 1.0910893, 1.5275251,
    ])  # fmt: skip
    near(axisnorm.instance_norm(x), [-1.3416354, -0.4472118, 0.4472118, 1.3416354] * 2)
    y = axisnorm.group_norm(x, 1, make(kind, [2.0, 3.0]), make(kind, [0.5, -0.5]))
    near(y, [
        -2.5550476, -1.6821768, -0.8093061, 0.0635646, 0.1546531, 1.4639591, 2.7732653, 4.0825713,
    ])  # fmt: skip


@Kind
def test_single_elements_do_not_depend_on_the_batch(kind: str) -> None:
    for n in (1, 2):
        x = make(kind, [[5.0, 6.0, 7.0]] * n).reshape(n, 3, 1, 1)
        y = axisnorm.instance_norm(x, None, None, None, make(kind, [1.0, 2.0, 3.0]))
        assert flat(y) == [1.0, 2.0, 3.0] * n
        y = axisnorm.group_norm(make(kind, [[1.0, 2, 3, 4]] * n), 4, None, make(kind, [3.0] * 4))
        assert set(flat(y)) == {3.0}


def test_backward_of_a_view() -> None:
    x = values((4, 3, 2)).permute(2, 1, 0).requires_grad_()
    w, grad = values((4,), seed=1).requires_grad_(), values((2, 3, 4), seed=2)
    flat_x = x.detach().reshape(6, 4).requires_grad_()
    found = torch.autograd.grad(axisnorm.layer_norm(x, 4, w), (x, w), grad)
    wanted = torch.autograd.grad(axisnorm.layer_norm(flat_x, 4, w), (flat_x, w), grad.reshape(6, 4))
    near(found[0].reshape(6, 4), wanted[0])
    near(found[1], wanted[1])


@Kind
def test_rms_family(kind: str) -> None:
    x = make(kind, [1.0, 2, 3, 4])
    for scheme, expected in (
        ("torch.rms_norm", [0.3651483, 0.7302967, 1.0954450, 1.4605934]),
        ("keras.rms_scaling", [0.8940696, 1.7881393, 2.6822089, 3.5762785]),
        ("timm.simple_norm", [0.7745964, 1.5491929, 2.3237893, 3.0983854]),
        ("torch.normalize", [0.1825742, 0.3651484, 0.5477226, 0.7302967]),
    ):
        near(axisnorm.normalize(x, scheme), expected, 2e-6)


@Kind
def test_eps_placement_and_correction(kind: str) -> None:
    x = make(kind, [1e-3, 2e-3, 3e-3, 4e-3])
    near(axisnorm.normalize(x, "[d]"), [-0.4472136, -0.1490712, 0.1490712, 0.4472136])
    y = axisnorm.normalize(x, "[d]; eps_placement=std")
    near(y, [-1.3297472, -0.4432491, 0.4432491, 1.3297472])
    x = make(kind, [1.0, 0, 0, 0])
    near(axisnorm.normalize(x, "[d]; correction=1; eps=0"), [1.5, -0.5, -0.5, -0.5])
    near(axisnorm.normalize(x, "[d]; eps=0")[0], [math.sqrt(3)])
    x = make(kind, [0.09484422, 0.16441762], "float64")
    near(axisnorm.normalize(x, "keras.layer_norm"), [-0.73995596, 0.73995596], 1e-7)


def test_onnx_group_norm() -> None:
    x = torch.arange(16.0).reshape(1, 4, 2, 2)
    y = axisnorm.normalize(x, "n (g=2 [c]) [h w]; affine=g", torch.tensor([1.0, 2.0]))
    near(y[0, 2, 0], [-3.0550475, -2.1821768])
    y = axisnorm.normalize(x, "n (g=2 [c]) [h w]; affine=g c", torch.tensor([1.0, 2, 3, 4]))
    near(y[0, 2, 0], [-4.5825710, -3.2732654])


# --- The same in NumPy, for every scheme, type and layout


@pytest.mark.parametrize("case", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy(case: Case, dtype: torch.dtype) -> None:
    x, (weight, bias) = values(case.shape, dtype), parameters(case, dtype)
    wanted = axisnorm.normalize(x, case.scheme, weight, bias).double()
    arrays = [None if t is None else to_numpy(t) for t in (weight, bias)]
    array = to_numpy(x)
    doubled = np.stack([array, array], -1)[..., 0]
    backwards = array[::-1].copy()[::-1]
    fortran = np.asfortranarray(array)
    read_only = array.copy()
    read_only.flags.writeable = False
    for laid_out in (array, doubled, backwards, fortran, read_only):
        y = axisnorm.normalize(laid_out, case.scheme, *arrays)
        assert y.dtype == array.dtype and y.shape == array.shape
        if laid_out is array and dtype.itemsize == 2:
            assert torch.equal(from_numpy(y).double(), wanted)
        # Another order in memory may sum in another order.
        step = epsilon(dtype) * wanted.abs() * (dtype.itemsize == 2)
        wide = 16 * epsilon(torch.float64 if dtype == torch.float64 else torch.float32)
        assert ((from_numpy(y).double() - wanted).abs() <= step + wide * wanted.abs().max()).all()
        out = np.empty_like(laid_out)
        assert axisnorm.normalize(laid_out, case.scheme, *arrays, out=out) is out
        np.testing.assert_array_equal(out, y)


def test_numpy_specials() -> None:
    x = to_numpy(values((4, 8)))
    wanted = axisnorm.layer_norm(x, 8)
    big = x.astype(">f4")
    y = axisnorm.layer_norm(big, 8)
    assert y.dtype == big.dtype
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-6)
    for scale, dtype in ((1e-4, ">f4"), (1e-9, ">f8"), (1e300, ">f8")):
        ordered = (x * np.float64(scale)).astype(dtype)
        own = ordered.astype(ordered.dtype.newbyteorder("="))
        for norm in (axisnorm.rms_norm, axisnorm.layer_norm):
            np.testing.assert_array_equal(norm(ordered, 8), norm(own, 8))
        out = np.empty_like(ordered)
        assert axisnorm.rms_norm(ordered, 8, out=out) is out
        np.testing.assert_array_equal(out, axisnorm.rms_norm(own, 8))
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 8)
    np.testing.assert_array_equal(axisnorm.layer_norm(unaligned, 8), wanted)
    buffer = np.concatenate([x[:1], x])
    axisnorm.layer_norm(buffer[1:], 8, out=buffer[:4])
    np.testing.assert_array_equal(buffer[:4], wanted)
    y = x.copy()
    assert axisnorm.layer_norm(y, 8, out=y) is y
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(axisnorm.layer_norm(x, 8, [2.0] * 8), wanted * 2)
    with pytest.raises(DtypeError, match="masked array"):
        axisnorm.layer_norm(np.ma.masked_greater(x, 1), 8)
    read_only = x.copy()
    read_only.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        axisnorm.layer_norm(x, 8, out=read_only)
    with pytest.raises(DtypeError, match="updated in place"):
        axisnorm.batch_norm(x, [0.0] * 8, [1.0] * 8, training=True)


@Kind
@pytest.mark.parametrize("place", [0, 1], ids=["mean", "var"])
def test_out_does_not_share_memory_with_moving_statistics(kind: str, place: int) -> None:
    buffer, x = make(kind, [[1.0] * 4] * 3), make(kind, [[1.0, 2, 3, 4], [2, 2, 0, 1]])
    running = [make(kind, [1.0] * 4), make(kind, [1.0] * 4)]
    running[place] = buffer[1]
    with pytest.raises(ArgumentError, match="share memory"):
        axisnorm.batch_norm(x, *running, training=True, out=buffer[:2])
    assert flat(buffer) == [1.0] * 12


@Kind
def test_out_may_share_memory_with_what_is_read(kind: str) -> None:
    """Nothing is overwritten before it is read, whichever row is written first."""

    def square() -> Any:
        return make(kind, values((8, 8), torch.float64).tolist(), "float64")

    wanted = flat(axisnorm.layer_norm(square(), 8, square()[3], square()[5]))
    x = square()
    assert axisnorm.layer_norm(x, 8, x[3], x[5], out=x) is x
    near(x, wanted, 1e-14)
    for read, written in ((slice(0, 7), slice(1, 8)), (slice(1, 8), slice(0, 7))):
        wanted = flat(axisnorm.layer_norm(square()[read], 8))
        x = square()
        axisnorm.layer_norm(x[read], 8, out=x[written])
        near(x[written], wanted, 1e-14)
    x = square().clip(0.5, 2.0)
    wanted = flat(axisnorm.batch_norm(x, x[1] + 0.0, x[6] + 0.0))
    axisnorm.batch_norm(x, x[1], x[6], out=x)
    near(x, wanted, 1e-14)
    for scheme in ("n [d]", "[n] d"):
        wanted = flat(axisnorm.normalize(square(), scheme))
        x = square()
        axisnorm.normalize(x, scheme, out=x.T)
        near(x.T, wanted, 1e-14)


# --- Fused sums


@pytest.mark.parametrize("prenorm", [False, True])
def test_add_norms(prenorm: bool) -> None:
    x, r, w = values((3, 8)), values((3, 8), seed=1), values((8,), seed=2)
    for found, wanted in (
        (
            axisnorm.add_layer_norm(x, r, 8, w, w, prenorm=prenorm),
            axisnorm.layer_norm(r + x, 8, w, w),
        ),
        (axisnorm.add_rms_norm(x, r, 8, w, prenorm=prenorm), axisnorm.rms_norm(r + x, 8, w)),
    ):
        y, h = found if prenorm else (found, r + x)
        assert torch.equal(y, wanted) and torch.equal(h, r + x)


def test_add_norm_dropout() -> None:
    x, r = torch.ones(200, 50), torch.zeros(200, 50)
    _, h = axisnorm.add_layer_norm(x, r, 50, dropout_p=0.25, training=True, prenorm=True)
    assert set(h.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((h == 0).float().mean() - 0.25) < 0.02
    _, h = axisnorm.add_layer_norm(x, r, 50, dropout_p=0.25, prenorm=True)
    assert torch.equal(h, x)
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(ArgumentError, match="dropout_p"):
            axisnorm.add_layer_norm(x, r, 50, dropout_p=bad)
    with pytest.raises(ArgumentError, match="one shape"):
        axisnorm.add_rms_norm(x, r[:1], 50)
    with pytest.raises(ArgumentError, match="torch's generator"):
        axisnorm.add_rms_norm(x.numpy(), r.numpy(), 50, dropout_p=0.1, training=True)


# --- Bad input


def bad_calls(kind: str) -> dict[str, tuple[Any, type[Exception], str]]:
    x = make(kind, [[1.0, 2, 3], [4, 5, 6]])
    image = make(kind, flat(values((2 * 8 * 3,)))).reshape(2, 8, 3)
    four, three = make(kind, [1.0] * 4), make(kind, [1.0] * 3)
    stats = make(kind, [0.0] * 8), make(kind, [1.0] * 8)
    return {
        "empty normalized_shape": (lambda: axisnorm.layer_norm(x, ()), ArgumentError, "at least one"),
        "other size": (lambda: axisnorm.layer_norm(x, 5), ArgumentError, r"\[5\].*\(2, 3\)"),
        "too many axes": (lambda: axisnorm.layer_norm(x, (1, 2, 3)), ArgumentError, "ends in"),
        "negative size": (lambda: axisnorm.layer_norm(x, -3), ArgumentError, "normalized_shape"),
        "float size": (lambda: axisnorm.rms_norm(x, 3.0), ArgumentError, "normalized_shape"),
        "weight": (lambda: axisnorm.layer_norm(x, 3, four), ArgumentError, r"\(3,\).*\(4,\)"),
        "bias": (lambda: axisnorm.layer_norm(x, 3, None, four), ArgumentError, r"\(3,\).*\(4,\)"),
        "rms weight": (lambda: axisnorm.rms_norm(x, 3, four), ArgumentError, r"\(3,\).*\(4,\)"),
        "no affine": (lambda: axisnorm.normalize(x, "n [d]", three), ArgumentError, "affine"),
        "no group": (lambda: axisnorm.group_norm(image, 0), ArgumentError, "num_groups"),
        "negative group": (lambda: axisnorm.group_norm(image, -1), ArgumentError, "num_groups"),
        "indivisible": (lambda: axisnorm.group_norm(image, 3), ArgumentError, "multiple of 3"),
        "rank": (lambda: axisnorm.group_norm(image[0, 0], 1), ArgumentError, "at least 2 axes"),
        "duplicate axis": (lambda: axisnorm.normalize(x, "n [n]"), ArgumentError, "stands once"),
        "missing axis": (lambda: axisnorm.normalize(x, "n [c h]"), ArgumentError, "names 3 axes"),
        "eps nan": (lambda: axisnorm.layer_norm(x, 3, eps=float("nan")), ArgumentError, "finite"),
        "eps inf": (lambda: axisnorm.rms_norm(x, 3, eps=float("inf")), ArgumentError, "finite"),
        "eps text": (lambda: axisnorm.layer_norm(x, 3, eps="x"), ArgumentError, "number"),
        "momentum": (
            lambda: axisnorm.batch_norm(image, *stats, training=True, momentum=float("nan")),
            ArgumentError, "finite",
        ),
        "no momentum": (
            lambda: axisnorm.normalize(
                image, "[n] c [l]; momentum=none", running_mean=stats[0], running_var=stats[1]
            ),
            ArgumentError, "cumulative",
        ),
        "half running": (
            lambda: axisnorm.batch_norm(image, stats[0], None, training=True),
            ArgumentError, "come together",
        ),
        "no running": (lambda: axisnorm.batch_norm(image, None, None), ArgumentError, "come together"),
        "running shape": (lambda: axisnorm.batch_norm(image, three, three), ArgumentError, r"\(8,\)"),
        "integer": (lambda: axisnorm.layer_norm(make(kind, [[1, 2]], "int64"), 2), DtypeError, "int64"),
        "bool": (lambda: axisnorm.rms_norm(make(kind, [[1, 0]], "bool"), 2), DtypeError, "bool"),
        "complex": (
            lambda: axisnorm.layer_norm(make(kind, [[1j, 2]], "complex64"), 2), DtypeError, "complex",
        ),
        "complex weight": (
            lambda: axisnorm.layer_norm(x, 3, make(kind, [1j] * 3, "complex64")), DtypeError, "real",
        ),
        "mask type": (lambda: axisnorm.layer_norm(x, 3, mask=x), DtypeError, "boolean"),
        "mask shape": (lambda: axisnorm.layer_norm(x, 3, mask=four > 0), ArgumentError, "broadcasts"),
        "rounding": (lambda: axisnorm.rms_norm(x, 3, rounding="never"), ArgumentError, "rounding"),
        "offset": (
            lambda: axisnorm.rms_norm(x, 3, weight_offset=float("inf")), ArgumentError, "finite",
        ),
        "correction": (lambda: axisnorm.normalize(x, "n [d]; correction=3"), ArgumentError, "divisor"),
        "scheme": (lambda: axisnorm.normalize(x, 3), ArgumentError, "A scheme is"),
    }  # fmt: skip


@Kind
@pytest.mark.parametrize("name", bad_calls("torch"))
def test_bad_input(kind: str, name: str) -> None:
    call, error, words = bad_calls(kind)[name]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("x", [[[1.0, 2.0]], 3.0, None, "text"])
def test_not_an_array(x: Any) -> None:
    for call in (
        lambda: axisnorm.layer_norm(x, 2),
        lambda: axisnorm.normalize(x, "n [d]"),
        lambda: axisnorm.batch_norm(x, None, None, training=True),
        lambda: axisnorm.group_norm(x, 1),
    ):
        with pytest.raises(DtypeError, match=r"torch\.Tensor or a numpy\.ndarray"):
            call()


def test_errors_are_of_torchs_types_too() -> None:
    x = values((2, 3))
    for own, torchs in (
        (lambda: axisnorm.layer_norm(x, 5), lambda: F.layer_norm(x, (5,))),
        (lambda: axisnorm.group_norm(x, 2), lambda: F.group_norm(x, 2)),
        (lambda: axisnorm.batch_norm(x, torch.zeros(4), torch.ones(4)),
         lambda: F.batch_norm(x, torch.zeros(4), torch.ones(4))),
        (lambda: axisnorm.layer_norm(x.int(), 3), lambda: F.layer_norm(x.int(), (3,))),
    ):  # fmt: skip
        with pytest.raises(Exception) as expected:  # noqa: PT011
            torchs()
        with pytest.raises(expected.type):
            own()


@Kind
@pytest.mark.parametrize("bad", ["1e-5", b"1", [1e-5], None], ids=repr)
def test_what_is_no_number_is_of_torchs_type(kind: str, bad: Any) -> None:
    """A text that float would read is none either."""
    x, image = make(kind, [[1.0, 2, 3]]), make(kind, [[[1.0, 2], [3, 5]]])
    stats = make(kind, [0.0] * 2), make(kind, [1.0] * 2)
    calls = [
        lambda: axisnorm.layer_norm(x, (3,), eps=bad),
        lambda: axisnorm.add_layer_norm(x, x, (3,), eps=bad),
        lambda: axisnorm.rms_norm(x, (3,), weight_offset=bad),
        lambda: axisnorm.layer_norm_2d(image, eps=bad),
        lambda: axisnorm.group_norm(image, 2, eps=bad),
        lambda: axisnorm.instance_norm(image, eps=bad),
        lambda: axisnorm.batch_norm(image, *stats, eps=bad),
        lambda: axisnorm.batch_norm(image, *stats, training=True, momentum=bad),
    ]
    if bad is not None:
        calls.append(lambda: axisnorm.rms_norm(x, (3,), eps=bad))
    for call in calls:
        with pytest.raises(ArgumentError, match="is a number") as found:
            call()
        assert isinstance(found.value, TypeError)


def test_mixed_kinds() -> None:
    with pytest.raises(DtypeError, match="is a torch tensor"):
        axisnorm.layer_norm(values((2, 3)), 3, np.ones(3, np.float32))
    with pytest.raises(ArgumentError, match="one device"):
        axisnorm.layer_norm(values((2, 3)), 3, torch.ones(3, device="meta"))


@Kind
def test_a_nan_weight_where_all_is_masked(kind: str) -> None:
    x = make(kind, [[1.0, 2.0, 3.0, 4.0]])
    weight = make(kind, [1.0, 1.0, float("nan"), 1.0])
    mask = make(kind, [[1, 1, 0, 0]], "bool")
    dx = reference.backward(x, x, Scheme.layer_norm(), weight, mask=mask)[0]
    assert all(map(math.isfinite, flat(dx)))
    y = axisnorm.layer_norm(x, 4, weight, mask=mask)
    assert all(map(math.isfinite, flat(y)))


@Kind
def test_running_statistics_of_l2_have_no_divisor(kind: str) -> None:
    mean, var = make(kind, [0.0, 0.0]), make(kind, [1.0, 1.0])
    scheme = "[n] c; center=false; scale=l2; momentum=1"
    axisnorm.normalize(make(kind, [[3.0, 0], [4, 2]]), scheme, running_mean=mean, running_var=var)
    near(var, [25.0, 4.0])


@Kind
def test_running_statistics_that_cannot_be_written(kind: str) -> None:
    x, mean = make(kind, [[1.0, 2.0], [3.0, 5.0]]), make(kind, [0.5, 0.5])
    one = make(kind, [1.0])
    shared = one.expand(2) if kind == "torch" else np.broadcast_to(one, (2,))
    with pytest.raises(ArgumentError, match="own memory"):
        axisnorm.batch_norm(x, mean, shared, training=True)
    with pytest.raises(DtypeError, match="floating-point"):
        axisnorm.batch_norm(x, mean, make(kind, [1, 1], "int64"), training=True)
    if kind == "torch":
        with pytest.raises(ArgumentError, match="without memory"):
            axisnorm.batch_norm(x, mean, torch._efficientzerotensor(2), training=True)
    assert flat(mean) == [0.5, 0.5]


def test_refused_before_a_random_number_is_drawn() -> None:
    x = torch.ones(3, 4)
    before = torch.get_rng_state()
    with pytest.raises(ArgumentError, match="normalized_shape"):
        axisnorm.add_layer_norm(x, x, 5, dropout_p=0.5, training=True)
    assert torch.equal(torch.get_rng_state(), before)
    for residual in (None, [1.0], np.ones((3, 4), np.float32)):
        with pytest.raises(DtypeError):
            axisnorm.add_layer_norm(x, residual, 4)


@pytest.mark.parametrize("convert", [torch.Tensor.to_mkldnn, torch.Tensor.to_sparse])
def test_tensors_that_are_not_dense(convert: Any) -> None:
    x = convert(torch.ones(4, 4))
    for call in (
        lambda: axisnorm.normalize(x, "n [d]"),
        lambda: axisnorm.statistics(x, "n [d]"),
        lambda: axisnorm.layer_norm_2d(x),
        lambda: axisnorm.normalize(torch.ones(4, 4), "n [d]; affine=n d", x),
    ):
        with pytest.raises(DtypeError, match="dense"):
            call()


@Kind
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (0, 4, 2, 2), (2, 4, 0, 2)])
def test_no_elements(kind: str, shape: tuple[int, ...]) -> None:
    x = make(kind, np.zeros(shape).tolist()).reshape(shape)
    assert axisnorm.layer_norm(x, shape[-1]).shape == x.shape
    assert axisnorm.normalize(x, "[n] c ...").shape == x.shape
    if len(shape) == 4:
        for y in (axisnorm.group_norm(x, 2), axisnorm.instance_norm(x), axisnorm.layer_norm_2d(x)):
            assert y.shape == x.shape


@Kind
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 4, 0, 2)])
def test_an_out_without_elements_does_not_overlap_itself(kind: str, shape: tuple[int, ...]) -> None:
    # NumPy gives such arrays strides of zero.
    x, out = (make(kind, np.zeros(shape).tolist()).reshape(shape) for _ in range(2))
    assert axisnorm.normalize(x, "n [c] ...", out=out) is out


def test_an_out_whose_elements_overlap_by_half_is_refused() -> None:
    memory = np.zeros(5, np.float16)
    out = np.lib.stride_tricks.as_strided(memory.view(np.uint8)[:8].view(np.float32), (4,), (2,))
    with pytest.raises(ArgumentError, match="its own memory"):
        axisnorm.layer_norm(np.ones(4, np.float32), 4, out=out)
    assert not memory.any()


def test_gradients_of_nothing() -> None:
    x, w = torch.zeros(0, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    axisnorm.layer_norm(x, 3, w).sum().backward()
    assert x.grad.shape == (0, 3) and torch.equal(w.grad, torch.zeros(3))


def test_statistics_have_gradients() -> None:
    x = values((3, 5), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: axisnorm.statistics(t, "n [d]"), (x,))
    assert reference.resolve_eps(Scheme.rms_norm(), x.dtype) == 2.0**-52
