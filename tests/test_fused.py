"""Norms of a residual sum: values, dropout's bits and their statistics, autograd, who watches."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from cases import (
    DTYPES,
    assert_close,
    assert_gradient_close,
    from_numpy,
    layouts,
    to_numpy,
    values,
)
from conftest import ISAS, needs_short_way
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import axisnorm
from axisnorm import (
    ArgumentError,
    DtypeError,
    Scheme,
    _build,
    _native,
    _torch_residual,
    reference,
)

T = torch.Tensor
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 257, 768, 1000)
P = 0.3

Dropped = pytest.mark.parametrize("p", [0.0, P], ids=["plain", "dropout"])


def add(
    x: T, residual: T, weight: T | None = None, bias: T | None = None, p: float = P, seed: int = 0
) -> tuple[T, T]:
    """y and h over the last axis, from one state of the generator."""
    torch.manual_seed(seed)
    return axisnorm.add_layer_norm(  # type: ignore[no-any-return]
        x, residual, (x.shape[-1],), weight, bias, dropout_p=p, training=True, prenorm=True
    )


def drawn(seed: int = 0) -> T:
    """The number that :func:`add` draws."""
    torch.manual_seed(seed)
    return torch.empty((), dtype=torch.int64).random_()


def factors(shape: tuple[int, ...], p: float = P, seed: int = 0) -> T:
    """What :func:`add` multiplies x by: 0 or 1 / (1 - p)."""
    if not p:
        return torch.ones(shape, dtype=torch.float64)
    ones = torch.ones(shape, dtype=torch.float64)
    return reference.dropout(ones, Scheme.layer_norm(), drawn(seed), p)


def leaves(shape: tuple[int, ...], dtype: torch.dtype, *, grad: bool = True) -> tuple[T, T, T, T]:
    """x, residual, weight and bias."""
    n = shape[-1]
    made = (
        values(shape, dtype, 1),
        values(shape, dtype, 2),
        values((n,), dtype, 3),
        values((n,), dtype, 4),
    )
    return tuple(t.requires_grad_(grad) for t in made)  # type: ignore[return-value]


# --- The random numbers


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in whole numbers, from its definition."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second % 2**32,
            first >> 32 ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


# The known answers that are published with Random123 (kat_vectors, philox4x32 10).
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    c, k, a = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
    assert philox(c, k) == a
    for convert in (torch.tensor, np.array):
        wide = tuple(convert([word]) for word in c)
        found = reference.philox(wide, tuple(convert([word]) for word in k))
        assert [word.item() for word in found] == a


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_element_gets_which_bits(dtype: torch.dtype) -> None:
    rows, n, seed = 5, 150, 7
    number = int(drawn(seed))
    key = [number % 2**32, number >> 32]
    words = [
        [philox([c // 64 * 16 + c % 16, 0, r, 0], key)[c // 16 % 4] for c in range(n)]
        for r in range(rows)
    ]
    x = torch.ones(rows, n, dtype=dtype)
    for p in (0.1, 0.5, 0.9):
        _, h = add(x, torch.zeros_like(x), p=p, seed=seed)
        kept = torch.tensor(words) >= round(p * 2**32)
        assert torch.equal(h, (kept.double() / (1 - p)).to(dtype))
        assert 0.02 < kept.double().mean() < 0.98


def test_bits_of_the_whole_word() -> None:
    """The probability is not rounded to fewer than 32 bits."""
    seed = int(drawn())
    word = philox([0, 0, 0, 0], [seed % 2**32, seed >> 32])[0]
    x = torch.ones(1, 1, dtype=torch.float64)
    for threshold, kept in ((word, True), (word + 1, False)):
        _, h = add(x, torch.zeros_like(x), p=threshold / 2**32)
        assert bool(h) is kept


def test_rate() -> None:
    x = torch.ones(2000, 500)
    count = x.numel()
    for p in (0.01, 0.1, 0.5, 0.93):
        _, h = add(x, torch.zeros_like(x), p=p)
        dropped = float((h == 0).double().sum())
        assert abs(dropped - p * count) < 5 * math.sqrt(p * (1 - p) * count)
        rows, columns = (h == 0).double().mean(1), (h == 0).double().mean(0)
        # Of 2000 rows and 500 columns, each within 5 deviations, too.
        assert (rows - p).abs().max() < 5 * math.sqrt(p * (1 - p) / 500) + 1 / 500
        assert (columns - p).abs().max() < 5 * math.sqrt(p * (1 - p) / 2000)


def correlation(a: T, b: T) -> float:
    """In standard deviations of that of independent values."""
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()) * math.sqrt(a.numel()))


def test_independence() -> None:
    x = torch.ones(512, 640)

    def mask(seed: int) -> T:
        return add(x, torch.zeros_like(x), p=0.5, seed=seed)[1] == 0

    m = mask(0)
    for step in (1, 2, 4, 8, 15, 16, 17, 32, 48, 64, 128):
        assert abs(correlation(m[:, step:], m[:, :-step])) < 5, f"{step} columns apart"
        assert abs(correlation(m[step:], m[:-step])) < 5, f"{step} rows apart"
        assert abs(correlation(m[step:, step:], m[:-step, :-step])) < 5
    for seed in (1, 2, 2**31):
        assert abs(correlation(m, mask(seed))) < 5
    torch.manual_seed(0)
    calls = [
        axisnorm.add_rms_norm(x, x * 0, (640,), dropout_p=0.5, training=True, prenorm=True)[1] == 0
        for _ in range(3)
    ]
    assert torch.equal(calls[0], m)
    assert abs(correlation(calls[0], calls[1])) < 5 and abs(correlation(calls[1], calls[2])) < 5


def test_words_are_uniform() -> None:
    """Chi-square of every byte, and of the levels that elements reach."""
    row, number = torch.arange(512).reshape(-1, 1), torch.arange(512)
    seed = drawn()
    words = torch.stack(
        reference.philox((number, number >> 32, row, row >> 32), (seed, seed >> 32))
    )
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((words >> shift & 255).flatten(), minlength=256).double()
        expected = words.numel() / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255)
    x = torch.ones(256, 1024)
    levels = [add(x, torch.zeros_like(x), p=k / 16)[1] != 0 for k in range(1, 16)]
    bins = torch.stack(levels).sum(0)
    counts = torch.bincount(bins.flatten(), minlength=16).double()
    expected = x.numel() / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 15 + 5 * math.sqrt(2 * 15)
    # One draw of the generator, compared with several levels: who passes one passes all below.
    assert all((a | ~b).all() for a, b in itertools.pairwise(levels))


@pytest.mark.parametrize("p", [1e-300, 1e-12, 2.0**-34])
def test_almost_never_dropped(p: float) -> None:
    x, r = values((64, 100)), values((64, 100), seed=1)
    y, h = add(x, r, p=p)
    assert torch.equal(h, r + x) and torch.equal(y, axisnorm.layer_norm(h, 100))


@pytest.mark.parametrize("p", [1 - 2.0**-53, 1 - 1e-12])
def test_almost_always_dropped(p: float) -> None:
    x, r = values((64, 100)), values((64, 100), seed=1)
    y, h = add(x, r, p=p)
    assert torch.equal(h, r) and torch.equal(y, axisnorm.layer_norm(r, 100))


def test_dropped_elements_have_no_influence() -> None:
    x, r = torch.ones(8, 100), values((8, 100))
    wanted = add(x, r)
    dropped = factors((8, 100)) == 0
    for poison in (float("nan"), float("inf")):
        found = add(torch.where(dropped, poison, x), r)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# --- The generator


def test_manual_seed_reproduces() -> None:
    x = values((4, 100))
    torch.manual_seed(11)
    first = [axisnorm.add_layer_norm(x, x, 100, dropout_p=P, training=True) for _ in range(3)]
    torch.manual_seed(11)
    again = [axisnorm.add_layer_norm(x, x, 100, dropout_p=P, training=True) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_one_number_is_drawn_on_every_way(requires_grad: bool) -> None:
    x = values((6, 6)).requires_grad_(requires_grad)
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    wanted = torch.get_rng_state()
    for layout in (x, x.T):
        add(layout, layout)
        assert torch.equal(torch.get_rng_state(), wanted)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_the_generator_is_left_alone() -> None:
    x, w = values((3, 4)), torch.ones(5)
    nested = torch.nested.nested_tensor(list(x))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    before = torch.get_rng_state()
    axisnorm.add_layer_norm(x, x, 4, dropout_p=0.5)
    axisnorm.add_layer_norm(x, x, 4, training=True)
    axisnorm.add_layer_norm(x.T, x.T, 3, dropout_p=0.5)
    axisnorm.nn.AddRMSNorm(4, dropout_p=0.5).eval()(x, x)
    drop: dict[str, Any] = {"dropout_p": 0.5, "training": True}
    mask = x > 0
    for call in (
        lambda: axisnorm.add_layer_norm(x, x, 5, **drop),
        lambda: axisnorm.add_layer_norm(x, x[:2], 4, **drop),
        lambda: axisnorm.add_layer_norm(x, x, 4, w, **drop),
        lambda: axisnorm.add_layer_norm(x, x, 4, None, w, **drop),
        lambda: axisnorm.add_layer_norm(x, x, 4, freed, **drop),
        lambda: axisnorm.add_layer_norm(x, x, 4, eps=float("nan"), **drop),
        lambda: axisnorm.add_layer_norm(x, x, 4, dropout_p=1.0, training=True),
        lambda: axisnorm.add_layer_norm(x, x, 4, dropout_p=float("nan"), training=True),
        lambda: axisnorm.add_layer_norm(x, None, 4, **drop),
        lambda: axisnorm.add_layer_norm(x, x.numpy(), 4, **drop),
        lambda: axisnorm.add_layer_norm(x, x.to("meta"), 4, **drop),
        lambda: axisnorm.add_layer_norm(x.int(), x.int(), 4, **drop),
        lambda: axisnorm.add_layer_norm(x.int(), x, 4, **drop),
        lambda: axisnorm.add_layer_norm(x, x.double(), 4, w, **drop),
        lambda: axisnorm.add_layer_norm(x, x + 1j, 4, **drop),
        lambda: axisnorm.add_rms_norm(x, x + 1j, 4, weight_offset=1.0, **drop),
        lambda: axisnorm.add_rms_norm(x, x + 1j, 4, mask=mask, **drop),
        lambda: axisnorm.add_layer_norm(x, x.to_sparse(), 4, **drop),
        lambda: axisnorm.add_layer_norm(x.to_sparse(), x, 4, **drop),
        lambda: axisnorm.add_layer_norm(x, x.to(torch.float8_e5m2), 4, **drop),
        lambda: axisnorm.add_layer_norm(x.to(torch.float8_e5m2), x, 4, **drop),
        lambda: axisnorm.add_layer_norm(x, nested, 4, **drop),
        lambda: axisnorm.add_layer_norm(nested, x, 4, **drop),
        lambda: axisnorm.add_layer_norm(nested, nested, 4, **drop),
        lambda: axisnorm.add_layer_norm(x, x, 4, w, **drop, mask=mask),
        lambda: axisnorm.add_layer_norm(x, x, 4, **drop, mask=x),
        lambda: axisnorm.add_layer_norm(x, x, 4, **drop, mask=torch.ones(5) > 0),
        lambda: axisnorm.add_rms_norm(x, x, 4, w, **drop),
        lambda: axisnorm.add_rms_norm(x, x, 4, rounding="never", **drop),
        lambda: axisnorm.add_rms_norm(x, x, 4, weight_offset=float("inf"), **drop),
    ):
        with pytest.raises((ArgumentError, DtypeError)):
            call()
        assert torch.equal(torch.get_rng_state(), before)


def test_threads_draw_their_own_numbers() -> None:
    x = torch.ones(2, 256)
    found: list[bytes] = []

    def run() -> None:
        for _ in range(200):
            h = axisnorm.add_layer_norm(
                x, torch.zeros_like(x), (256,), dropout_p=0.5, training=True, prenorm=True
            )[1]
            found.append(h.numpy().tobytes())

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(found)) == len(found) == 800


def test_inference_mode_and_then_training() -> None:
    x = values((2, 8))
    with torch.inference_mode():
        first = add(x, x)[1]
    second = add(x, x)[1]
    assert torch.equal(first, second)


# --- Values


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@Dropped
def test_values(dtype: torch.dtype, p: float) -> None:
    """h is the sum, rounded once; y is what the norm of h is, bit for bit."""
    for n in LENGTHS:
        for rows in (1, 2, 3, 5):
            x, r, w, b = leaves((rows, n), dtype, grad=False)
            y, h = add(x, r, w, b, p)
            seed = drawn() if p else None
            assert torch.equal(h, reference.residual_sum(x, r, Scheme.layer_norm(), seed, p))
            assert torch.equal(y, axisnorm.layer_norm(h, n, w, b))
            torch.manual_seed(0)
            alone = axisnorm.add_layer_norm(x, r, (n,), w, b, dropout_p=p, training=True)
            assert torch.equal(alone, y)
            torch.manual_seed(0)
            rms = axisnorm.add_rms_norm(x, r, (n,), w, dropout_p=p, training=True)
            assert torch.equal(rms, axisnorm.rms_norm(h, n, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@Dropped
def test_the_sum_is_rounded_once(dtype: torch.dtype, p: float) -> None:
    x, r, w, b = leaves((40, 200), dtype, grad=False)
    y, h = add(x, r, w, b, p)
    exact = r.double() + x.double() * factors((40, 200), p)
    unit = torch.finfo(dtype).eps
    wide = max(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps, 1e-16)
    allowed = 0.5 * unit * exact.abs() + 3 * wide * (r.double().abs() + 2 * x.double().abs())
    assert ((h.double() - exact).abs() <= allowed).all()
    assert_close(y, reference.forward(h.double(), Scheme.layer_norm(), w.double(), b.double())[0])


def test_without_dropout_the_sum_is_torchs() -> None:
    for dtype in DTYPES:
        x, r, *_ = leaves((16, 77), dtype, grad=False)
        assert torch.equal(add(x, r, p=0.0)[1], r + x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ["once", "before_affine"])
def test_rms_options(dtype: torch.dtype, rounding: str) -> None:
    x, r, w, _ = leaves((5, 64), dtype, grad=False)
    options: dict[str, Any] = {"eps": 1e-3, "weight_offset": 1.0, "rounding": rounding}
    for laid_out in (x, x.T.contiguous().T):
        y, h = axisnorm.add_rms_norm(laid_out, r, 64, w, prenorm=True, **options)
        assert torch.equal(y, axisnorm.rms_norm(h, 64, w, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@Dropped
def test_layouts(dtype: torch.dtype, p: float) -> None:
    shape = (4, 3, 33)
    x, r, w, b = leaves(shape, dtype, grad=False)
    wanted = add(x, r, w, b, p)
    for _, other_x in layouts(x):
        for _, other_r in layouts(r):
            found = add(other_x, other_r, w, b, p)
            assert all(torch.equal(a, c) for a, c in zip(found, wanted, strict=True))
            leaf = other_x.detach().requires_grad_()
            found = add(leaf, other_r, w, b, p)
            assert all(torch.equal(a, c) for a, c in zip(found, wanted, strict=True))
    for (_, other_x), (_, other_r) in zip(layouts(x), layouts(r), strict=True):
        y, h = add(other_x, other_r, w, b, p)
        assert y.stride() == h.stride() == (other_r + other_x).stride()


def test_expanded_rows() -> None:
    x, row = values((5, 64)), values((64,), seed=1)
    for a, b in ((x, row.expand(5, 64)), (row.expand(5, 64), x)):
        found, wanted = add(a, b), add(a.contiguous(), b.contiguous())
        assert all(torch.equal(c, d) for c, d in zip(found, wanted, strict=True))
        assert found[1].is_contiguous()
    x = values((6, 5, 4)).transpose(0, 1)
    assert add(x, values((4,), seed=1).expand(5, 6, 4))[0].stride() == x.stride()


def test_several_axes_and_lists() -> None:
    x, r = values((4, 3, 5, 7)), values((4, 3, 5, 7), seed=1)
    w = values((5, 7), seed=2)
    torch.manual_seed(0)
    y, h = axisnorm.add_layer_norm(x, r, [5, 7], w, dropout_p=P, training=True, prenorm=True)
    flat = add(x.reshape(12, 35), r.reshape(12, 35), w.flatten())
    assert torch.equal(y.reshape(12, 35), flat[0]) and torch.equal(h.reshape(12, 35), flat[1])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@Dropped
def test_no_elements(shape: tuple[int, int], p: float) -> None:
    x, r, w, b = leaves(shape, torch.float32)
    y, h = add(x, r, w, b, p)
    assert y.shape == h.shape == shape
    torch.autograd.backward((y.sum(), h.sum()))
    assert x.grad is not None and x.grad.shape == shape


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1e19, 1e36])
def test_rows_out_of_the_range_of_the_type(scale: float) -> None:
    """Rows that the norm redoes in double, beside ordinary ones, both ways."""
    x, r = values((4, 100)) / 8, values((4, 100), seed=1) / 8
    x[1] *= scale
    r[1] *= scale
    scheme = Scheme("... [d]; affine=d; eps=0")
    grad, grad_h, w = values((4, 100), seed=2), values((4, 100), seed=3), values((100,), seed=4)
    if scale < 1:  # so that the gradient, of the size 1 / h, stays finite
        grad[1] *= scale
    a, b, c = (t.clone().requires_grad_() for t in (x, r, w))
    torch.manual_seed(0)
    y, h = axisnorm.add_layer_norm(
        a, b, (100,), c, eps=0.0, dropout_p=P, training=True, prenorm=True
    )
    assert torch.equal(h, reference.residual_sum(x, r, scheme, drawn(), P))
    for row, correct in zip(y, reference.forward(h.double(), scheme, w.double())[0], strict=True):
        assert_close(row, correct)
    dx, dr = torch.autograd.grad((y, h), (a, b), (grad, grad_h))
    exact = reference.backward(grad.double(), h.detach().double(), scheme, w.double())[0]
    exact = exact + grad_h.double()
    for row, correct in zip(dr, exact, strict=True):
        assert_gradient_close(row, correct, 100, max(float(correct.abs().max()), 1e-37))
    for row, correct in zip(dx, exact * factors((4, 100)), strict=True):
        assert_gradient_close(row, correct, 100, max(float(correct.abs().max()), 1e-37))


def test_a_constant_sum_gives_the_bias() -> None:
    bias = torch.full((768,), 3.0)
    x = torch.full((4, 768), 500.3333)
    y = axisnorm.add_layer_norm(x, x, (768,), None, bias)
    assert torch.equal(y, torch.full_like(y, 3.0))


def test_every_instruction_set_has_the_same_sum() -> None:
    native = _build.native
    assert native is not None
    before = native.isa()
    try:
        for dtype in DTYPES:
            x, r, *_ = leaves((7, 333), dtype, grad=False)
            sums = []
            for name in ISAS:
                assert native.set_isa(name)
                sums.append(add(x, r)[1])
            assert all(torch.equal(s, sums[0]) for s in sums)
    finally:
        native.set_isa(before)


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@Dropped
def test_same_bits_for_every_thread_count(dtype: torch.dtype, p: float) -> None:
    x, r, w, b = leaves((301, 257), dtype)
    grads = values((301, 257), dtype, 5), values((301, 257), dtype, 6)
    seen = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        out = add(x, r, w, b, p)
        seen.append([*out, *torch.autograd.grad(out, (x, r, w, b), grads)])
    for other in seen[1:]:
        assert all(torch.equal(a, c) for a, c in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_whatever_rows_follow(dtype: torch.dtype) -> None:
    x, r, w, b = leaves((9, 130), dtype, grad=False)
    y, h = add(x, r, w, b)
    for rows in (1, 2, 5, 8):
        part = add(x[:rows], r[:rows], w, b)
        assert torch.equal(part[0], y[:rows]) and torch.equal(part[1], h[:rows])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_beside_bad_ones(dtype: torch.dtype) -> None:
    """Without h they stand in place of y, from where the slow path reads them again."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for n in (9, 64, 130, 257, 1100):
        x, r, w, b = leaves((11, n), dtype, grad=False)
        far = x[0].clone()
        far[:64] += 1000
        bad = (
            torch.full_like(far, torch.nan),
            far.sign() * largest,
            far * tiny,
            far,
            far * 0 + 0.1,
        )
        for first in range(5):
            changed = x.clone()
            for k, row in enumerate(bad):
                changed[(first + 2 * k) % 11] = row
            rest = torch.zeros_like(r) if first % 2 else r
            y, h = add(changed, rest, w, b, 0.0)
            alone = axisnorm.add_layer_norm(changed, rest, (n,), w, b)
            for found in (y, alone):
                assert torch.equal(
                    found.nan_to_num(0.5), axisnorm.layer_norm(h, n, w, b).nan_to_num(0.5)
                )


# --- Gradients


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@Dropped
@pytest.mark.parametrize("prenorm", [False, True])
def test_gradients(dtype: torch.dtype, p: float, prenorm: bool) -> None:
    for rows, n in ((1, 17), (3, 8), (4, 64), (5, 129), (70, 40), (33, 768), (5, 1100)):
        x, r, w, b = leaves((rows, n), dtype)
        grads = values((rows, n), dtype, 5), values((rows, n), dtype, 6)
        y, h = add(x, r, w, b, p)
        out = (y, h) if prenorm else (y,)
        found = torch.autograd.grad(out, (x, r, w, b), grads[: len(out)])
        wide = [t.detach().double() for t in (grads[0], h)]
        scheme = Scheme.layer_norm()
        dh, dw, db = reference.backward(
            wide[0], wide[1], scheme, w.detach().double(), b.detach().double()
        )
        if prenorm:
            dh = dh + grads[1].double()
        assert dw is not None and db is not None
        for actual, exact, summed in (
            (found[0], dh * factors((rows, n), p), n),
            (found[1], dh, n),
            (found[2], dw, rows),
            (found[3], db, rows),
        ):
            assert actual.dtype == dtype
            assert_gradient_close(actual, exact, summed)
        assert not found[0][factors((rows, n), p) == 0].any()
        if not prenorm:
            parts = [t.detach().requires_grad_() for t in (h, w, b)]
            plain = torch.autograd.grad(
                axisnorm.layer_norm(parts[0], n, *parts[1:]), parts, grads[0]
            )
            assert all(torch.equal(a, c) for a, c in zip(found[1:], plain, strict=True))
            assert p or torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@Dropped
def test_gradients_of_every_layout(dtype: torch.dtype, p: float) -> None:
    x, r, w, b = leaves((4, 3, 20), dtype)
    grads = values((4, 3, 20), dtype, 5), values((4, 3, 20), dtype, 6)
    wanted = torch.autograd.grad(add(x, r, w, b, p), (x, r, w, b), grads)
    for _, other_x in layouts(x.detach()):
        for _, other_r in layouts(r.detach()):
            a, c = other_x.requires_grad_(), other_r.requires_grad_()
            found = torch.autograd.grad(add(a, c, w, b, p), (a, c, w, b), grads)
            assert all(torch.equal(u, v) for u, v in zip(found, wanted, strict=True))
    for _, first in layouts(grads[0]):
        for _, second in layouts(grads[1]):
            found = torch.autograd.grad(add(x, r, w, b, p), (x, r, w, b), (first, second))
            assert all(torch.equal(u, v) for u, v in zip(found, wanted, strict=True))
    one = torch.ones((), dtype=dtype)
    full = torch.autograd.grad(add(x, r, w, b, p)[0], (x, r, w, b), torch.ones_like(x))
    expanded = torch.autograd.grad(add(x, r, w, b, p)[0], (x, r, w, b), one.expand(4, 3, 20))
    assert all(torch.equal(u, v) for u, v in zip(full, expanded, strict=True))


Ways = pytest.mark.parametrize("way", ["short", "long", "reference"])


def on(way: str, x: T, r: T, w: T | None = None, b: T | None = None, p: float = P) -> Any:
    """y and h by one of the three ways."""
    if way == "long":  # parameters that are not contiguous
        w, b = (None if t is None else torch.stack([t, t], 1)[:, 0] for t in (w, b))
        x = torch.stack([x, x], -1)[..., 0]
    if way == "reference":
        scheme = "... [d]; affine=d; eps_placement=std; eps=1e-3"
        torch.manual_seed(0)
        return _torch_residual.normalize(x, r, w, b, scheme, p, True)
    return add(x, r, w, b, p)


@Ways
@Dropped
def test_numerical_gradients(way: str, p: float) -> None:
    inputs = leaves((2, 4), torch.float64)
    assert torch.autograd.gradcheck(lambda *t: on(way, *t, p=p), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: on(way, *t, p=p), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: on(way, *t, p=p)[0], inputs)
    x, r, *_ = inputs
    assert torch.autograd.gradcheck(lambda x, r: on(way, x, r, p=p)[0], (x, r))
    assert torch.autograd.gradgradcheck(lambda x, r: on(way, x, r, p=p), (x, r))


@Ways
def test_third_derivative(way: str) -> None:
    x, r = values((2, 4), torch.float64), values((2, 4), torch.float64, 1)
    v = values((2, 4), torch.float64, 2)
    factor = factors((2, 4))

    def plain(t: T) -> T:
        scheme = Scheme("... [d]")
        if way == "reference":
            scheme = Scheme("... [d]; eps_placement=std; eps=1e-3")
        return reference.forward(r + factor * t, scheme)[0]

    def third(f: Callable[[T], T]) -> T:
        leaf = x.clone().requires_grad_()
        total = (f(leaf) ** 2 * v).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(total, leaf, create_graph=True)
            total = (g * v).sum()
        return total

    wanted = third(plain)
    assert abs(third(lambda t: on(way, t, r)[0]) - wanted) < 1e-9 * abs(wanted)


@Ways
@Dropped
def test_only_what_needs_a_gradient_gets_one(way: str, p: float) -> None:
    for needs in (
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (1, 0, 1, 0),
        (0, 1, 1, 1),
    ):
        tensors = leaves((4, 8), torch.float32, grad=False)
        given = [t.requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=True)]
        y, h = on(way, *given, p=p)
        assert y.requires_grad
        # A sum of constants is one.
        assert h.requires_grad == (needs[0] or needs[1])
        y.pow(2).sum().backward()
        assert [t.grad is not None for t in given] == [bool(n) for n in needs]
        complete = [t.detach().requires_grad_() for t in tensors]
        all_found = torch.autograd.grad(on(way, *complete, p=p)[0].pow(2).sum(), complete)
        for t, found in zip(given, all_found, strict=True):
            assert t.grad is None or torch.equal(t.grad, found)


@Ways
@Dropped
def test_only_the_sum_is_used(way: str, p: float) -> None:
    tensors = leaves((4, 8), torch.float32)
    _, h = on(way, *tensors, p=p)
    grad = values((4, 8), seed=7)
    dx, dr, dw, db = torch.autograd.grad(h, tensors, grad, allow_unused=True)
    assert torch.equal(dr, grad) and dw is None and db is None
    assert torch.equal(dx, (grad.double() * factors((4, 8), p).float().double()).float())


@Ways
def test_a_changed_sum_is_noticed(way: str) -> None:
    x, r, w, b = leaves((4, 8), torch.float32)
    y, h = on(way, x, r, w, b)
    h.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@Ways
def test_changed_inputs_do_not_matter(way: str) -> None:
    """As with torch's own addition, which keeps none of them."""
    x, r, w, b = leaves((4, 8), torch.float32)
    a, c = x * 1, r * 1
    y, _ = on(way, a, c, w, b)
    wanted = torch.autograd.grad(on(way, x, r, w, b)[0].sum(), (x, r, w, b))
    with torch.no_grad():
        a.add_(1)
        c.add_(1)
    found = torch.autograd.grad(y.sum(), (x, r, w, b))
    assert all(torch.equal(u, v) for u, v in zip(found, wanted, strict=True))


@Ways
@Dropped
def test_nothing_given_is_modified(way: str, p: float) -> None:
    tensors = leaves((4, 8), torch.float32)
    grads = values((4, 8), seed=5), values((4, 8), seed=6)
    kept = [t.detach().clone() for t in (*tensors, *grads)]
    torch.autograd.grad(on(way, *tensors, p=p), tensors, grads)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, *grads), kept, strict=True))


@Ways
def test_saved_tensor_hooks_checkpoint_and_anomaly(way: str) -> None:
    tensors = leaves((4, 8), torch.float32)

    def loss(*t: T) -> T:
        y, h = on(way, *t)
        return (y * h).pow(2).sum()

    wanted = torch.autograd.grad(loss(*tensors), tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        total = loss(*tensors)
    found = torch.autograd.grad(total, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    total = torch.utils.checkpoint.checkpoint(loss, *tensors, use_reentrant=False)
    found = torch.autograd.grad(total, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            loss(*tensors).backward()


def test_checkpoint_draws_the_same_again() -> None:
    tensors = leaves((4, 64), torch.float32)

    def loss(*t: T) -> T:
        return (
            axisnorm.add_layer_norm(t[0], t[1], 64, *t[2:], dropout_p=P, training=True).pow(2).sum()
        )  # type: ignore[no-any-return]

    torch.manual_seed(4)
    wanted = torch.autograd.grad(loss(*tensors), tensors)
    torch.manual_seed(4)
    total = torch.utils.checkpoint.checkpoint(loss, *tensors, use_reentrant=False)
    found = torch.autograd.grad(total, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@Ways
def test_backward_twice(way: str) -> None:
    tensors = leaves((4, 8), torch.float32)
    y, h = on(way, *tensors)
    grads = values((4, 8), seed=5), values((4, 8), seed=6)
    first = torch.autograd.grad((y, h), tensors, grads, retain_graph=True)
    second = torch.autograd.grad((y, h), tensors, grads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@Ways
def test_nothing_leaks(way: str) -> None:
    tensors = leaves((64, 128), torch.float32)

    def run() -> None:
        for _ in range(30):
            y, h = on(way, *tensors)
            (y.sum() + h.sum()).backward()
            with torch.no_grad():
                on(way, *tensors)

    run()
    gc.collect()
    before = sum(type(o) is torch.Tensor for o in gc.get_objects())
    run()
    gc.collect()
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) <= before


@Ways
def test_dual_and_batched_gradients(way: str) -> None:
    x, r, *_ = leaves((3, 4), torch.float64)
    grads = [values((3, 4), torch.float64, i) for i in range(5, 8)]

    def pull(g: T, s: T) -> T:
        return torch.autograd.grad(on(way, x, r), x, (g, s))[0]

    with fwad.dual_level():
        g, s, t = grads
        tangent = fwad.unpack_dual(pull(fwad.make_dual(g, t), s)).tangent
    zero = torch.zeros_like(s)
    assert torch.allclose(tangent, pull(t, zero))  # the gradient is linear in what comes in
    batch = torch.stack(grads[:2])
    found = torch.autograd.grad(on(way, x, r)[0], x, batch, is_grads_batched=True)[0]
    wanted = [torch.autograd.grad(on(way, x, r)[0], x, g)[0] for g in grads[:2]]
    assert torch.allclose(found, torch.stack(wanted))


def test_x_is_the_residual() -> None:
    x = values((3, 8), torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(axisnorm.add_layer_norm(x, x, (8,))[0].sum(), x)
    (wanted,) = torch.autograd.grad(axisnorm.layer_norm(x + x, (8,))[0].sum(), x)
    assert torch.allclose(found, wanted)


# --- Who is watching: each of x, residual, weight and bias


@needs_short_way
def test_the_short_way_is_taken() -> None:
    x, r, w, b = leaves((2, 8), torch.float32, grad=False)
    short = _native.short_add_layer_norm
    assert short(x, r, (8,), w, b, 1e-5, 0.0, False, False, None) is not None
    assert short(x, r, [8], None, None, 1, 0.5, True, True, "relu")[1].shape == (2, 8)
    assert short(x, r.requires_grad_(), (8,), w, b, 1e-5, 0.5, True, False, "gelu").requires_grad
    assert (
        _native.short_add_rms_norm(x, r, (8,), w, None, 0.0, "once", 0.0, False, False, None)
        is not None
    )


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t.double() if t.dim() == 2 else t[:-1],
        lambda t: t[..., :-1],
        lambda t: t.to("meta"),
        lambda t: t.to_sparse(),
        lambda t: torch._neg_view(t),
        lambda t: torch._efficientzerotensor(t.shape),
        lambda t: t.int(),
        lambda t: t.numpy(),
        lambda t: 3.0,
    ],
)
def test_the_short_way_leaves_the_unusual_alone(which: int, spoil: Callable[[T], Any]) -> None:
    given: list[Any] = list(leaves((2, 8), torch.float32, grad=False))
    given[which] = spoil(given[which])
    x, r, w, b = given
    before = torch.get_rng_state()
    assert _native.short_add_layer_norm(x, r, (8,), w, b, 1e-5, 0.5, True, True, None) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@Dropped
def test_forward_mode_tangents(which: int, p: float) -> None:
    tensors = list(leaves((3, 8), torch.float64, grad=False))
    v = values(tuple(tensors[which].shape), torch.float64, 9)
    for way in ("short", "long"):
        with fwad.dual_level():
            dual = [fwad.make_dual(t, v) if i == which else t for i, t in enumerate(tensors)]
            tangents = [fwad.unpack_dual(t).tangent for t in on(way, *dual, p=p)]
        step = 1e-6
        up, down = (
            on(way, *[t + s * v if i == which else t for i, t in enumerate(tensors)], p=p)
            for s in (step, -step)
        )
        for tangent, high, low in zip(tangents, up, down, strict=True):
            difference = (high - low) / (2 * step)
            error = difference if tangent is None else tangent - difference
            assert error.abs().max() < 1e-8


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace() -> None:
    tensors = leaves((3, 8), torch.float32, grad=False)
    traced = torch.jit.trace(lambda *t: axisnorm.add_layer_norm(t[0], t[1], (8,), *t[2:]), tensors)
    other = leaves((5, 8), torch.float32, grad=False)[:2]
    other = (other[0] + 1, other[1] * 2)
    wanted = axisnorm.add_layer_norm(*other, (8,), *tensors[2:])
    assert torch.equal(traced(*other, *tensors[2:]), wanted)
    dropping = torch.jit.trace(
        lambda x, r: axisnorm.add_layer_norm(
            x, r, (8,), dropout_p=0.5, training=True, prenorm=True
        ),
        tensors[:2],
        check_trace=False,
    )
    sums = [dropping(torch.ones(64, 8), torch.zeros(64, 8))[1] for _ in range(2)]
    assert not torch.equal(*sums)
    assert all(set(s.unique().tolist()) == {0.0, 2.0} for s in sums)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@Dropped
def test_negative_views_and_zero_tensors(which: int, p: float) -> None:
    tensors = leaves((3, 8), torch.float32, grad=False)
    for make, plain in (
        (torch._neg_view, torch.neg),
        (lambda t: torch._efficientzerotensor(t.shape), torch.zeros_like),
    ):
        odd = [make(t) if i == which else t for i, t in enumerate(tensors)]
        usual = [plain(t) if i == which else t for i, t in enumerate(tensors)]
        for found, wanted in zip(add(*odd, p=p), add(*usual, p=p), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_freed_storage(which: int) -> None:
    tensors = leaves((4, 8), torch.float32, grad=False)
    tensors[which].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="storage was freed"):
        add(*tensors)


def test_functionalization() -> None:
    x, r, *_ = leaves((3, 8), torch.float32, grad=False)
    y = torch.func.functionalize(lambda t: axisnorm.add_layer_norm(t.clone().mul_(2), r, (8,)))(x)
    assert_close(y, reference.forward((2 * x + r).double(), Scheme.layer_norm())[0])


def test_vmap() -> None:
    x, r, w = values((4, 3, 8)), values((4, 3, 8), seed=1), values((8,), seed=2)

    def plain(a: T, b: T) -> T:
        return axisnorm.add_layer_norm(a, b, (8,), w)  # type: ignore[no-any-return]

    assert_close(torch.func.vmap(plain)(x, r), axisnorm.layer_norm((x + r).double(), 8, w.double()))

    def dropping(a: T, b: T) -> T:
        return axisnorm.add_layer_norm(  # type: ignore[no-any-return]
            a, b, (8,), dropout_p=0.5, training=True, prenorm=True
        )[1]

    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(dropping)(x, r)
    ones, zeros = torch.ones(2, 64, 8), torch.zeros(2, 64, 8)
    same = torch.func.vmap(dropping, randomness="same")(ones, zeros)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(dropping, randomness="different")(ones, zeros)
    assert not torch.equal(different[0], different[1])
    for h in (*same, *different):
        assert set(h.unique().tolist()) == {0.0, 2.0}
        assert abs((h == 0).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(512)


@Dropped
def test_transforms_agree_with_autograd(p: float) -> None:
    x, r, w, b = leaves((2, 5), torch.float64, grad=False)
    # vmap draws by another function: one state of it is one seed all the same.
    seed = drawn() if p else None

    def door(t: T) -> T:
        h = reference.residual_sum(t, r, Scheme.layer_norm(), seed, p)
        return reference.forward(h, Scheme.layer_norm(), w, b)[0]

    def own(t: T) -> T:
        return add(t, r, w, b, p)[0]

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(own(leaf).pow(3).sum(), leaf)
    assert torch.allclose(torch.func.grad(lambda t: door(t).pow(3).sum())(x), wanted)
    if not p:
        assert torch.allclose(torch.func.grad(lambda t: own(t).pow(3).sum())(x), wanted)
        jacobian = torch.autograd.functional.jacobian(own, x)
        for transform in (torch.func.jacrev, torch.func.jacfwd):
            assert torch.allclose(transform(own)(x), jacobian)
        hessian = torch.autograd.functional.hessian(lambda t: own(t).pow(3).sum(), x)
        assert torch.allclose(torch.func.hessian(lambda t: own(t).pow(3).sum())(x), hessian)
    else:
        found = torch.func.grad(lambda t: add(t, torch.zeros_like(t), p=p)[1].sum())(x)
        assert set(found.unique().tolist()) <= {0.0, 1 / (1 - p)}


@Dropped
def test_meta_and_fake_tensors(p: float) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.get_rng_state()
    x = torch.empty(3, 8, device="meta")
    for t in axisnorm.add_layer_norm(x, x, 8, dropout_p=p, training=True, prenorm=True):
        assert (t.shape, t.device.type) == ((3, 8), "meta")
    with FakeTensorMode():
        x = torch.empty(8, 3, dtype=torch.bfloat16).T
        for t in axisnorm.add_rms_norm(x, x, 8, dropout_p=p, training=True, prenorm=True):
            assert (t.shape, t.dtype, t.stride()) == ((3, 8), torch.bfloat16, (1, 3))
    assert torch.equal(torch.get_rng_state(), before)


@Dropped
def test_dispatch_mode_sees_the_op(p: float) -> None:
    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    tensors = leaves((3, 8), torch.float32)
    wanted = add(*tensors, p=p)
    grads = torch.autograd.grad(wanted[0].pow(2).sum(), tensors)
    with Record():
        found = add(*tensors, p=p)
        found_grads = torch.autograd.grad(found[0].pow(2).sum(), tensors)
    assert "axisnorm.add_norm_fwd.default" in seen and "axisnorm.add_norm_bwd.default" in seen
    pairs = zip((*found, *found_grads), (*wanted, *grads), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("door", [axisnorm.add_layer_norm, axisnorm.add_rms_norm])
def test_function_modes_and_subclasses_see_the_call(door: Any) -> None:
    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, r, w, _ = leaves((3, 8), torch.float32, grad=False)
    wanted = door(x, r, 8, w, prenorm=True)
    seen: list[Any] = []
    with Record():
        found = door(x, r, 8, w, prenorm=True)
    assert door in seen and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for which in range(3):
        seen.clear()
        given = [t.as_subclass(Tagged) if i == which else t for i, t in enumerate((x, r, w))]
        found = door(*given[:2], 8, given[2], prenorm=True)
        assert door in seen
        for a, b in zip(found, wanted, strict=True):
            assert type(a) is Tagged and torch.equal(a.as_subclass(torch.Tensor), b)


def test_fx_records_the_call() -> None:
    graph = torch.fx.symbolic_trace(lambda x, r: axisnorm.add_layer_norm(x, r, (8,)))
    assert axisnorm.add_layer_norm in [node.target for node in graph.graph.nodes]
    x, r, *_ = leaves((3, 8), torch.float32, grad=False)
    assert torch.equal(graph(x, r), axisnorm.add_layer_norm(x, r, (8,)))


# --- Ops and compilers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@Dropped
def test_opcheck(p: float) -> None:
    ops = torch.ops.axisnorm
    x, r, w, b = leaves((5, 6), torch.float32)
    seed = torch.tensor(77) if p else None
    text = "... [d]; affine=d"
    for args in ((x, r, w, b), (x, r, None, None), (x.detach().T.contiguous().T, r, w, b)):
        for activation in (None, "silu"):
            torch.library.opcheck(ops.add_norm_fwd.default, (*args, seed, p, text, activation))
    w, b = w.detach(), b.detach()
    y, h, stats = ops.add_norm_fwd(x.detach(), r.detach(), w, b, seed, p, text)
    for grad_h in (None, y):
        for parameters in ((w, b), (None, None)):
            torch.library.opcheck(
                ops.add_norm_bwd.default, (y, grad_h, h, *parameters, seed, stats, p, text)
            )


@Dropped
def test_the_operator_of_backward_has_gradients(p: float) -> None:
    ops, text = torch.ops.axisnorm, "... [d]; affine=d"
    seed = torch.tensor(77) if p else None

    def backward(grad: T, grad_h: T, h: T, w: T, b: T) -> tuple[T, ...]:
        stats = ops.norm_fwd(h, w, b, None, text)[1]
        found = ops.add_norm_bwd(grad, grad_h, h, w, b, seed, stats, p, text)
        return tuple(t for t in found if t.numel())

    x, r, w, b = leaves((5, 6), torch.float64)
    given = (values((5, 6), torch.float64, 9).requires_grad_(), r, x, w, b)
    assert torch.autograd.gradcheck(backward, given, check_forward_ad=True, fast_mode=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@Dropped
def test_ops_that_write(p: float) -> None:
    ops, text = torch.ops.axisnorm, "... [d]; affine=d"
    x, r = values((5, 6)), values((5, 6), seed=1)
    w, b = values((6,), seed=2), values((6,), seed=3)
    seed = torch.tensor(77) if p else None

    def written(op: Any, args: tuple[Any, ...], wanted: tuple[T, ...]) -> None:
        targets = [torch.full_like(t, 7) if t.numel() else None for t in wanted]
        op(*args, *targets)
        for target, t in zip(targets, wanted, strict=True):
            assert target is None or torch.equal(target, t)
        torch.library.opcheck(op.default, (*args, *targets))

    for given in (x, x.t().contiguous().t()):  # the kernels take the first, Python the second
        for parameters in ((w, b), (None, None)):
            for activation in ("relu", "silu", "gelu", None):
                args = (given, r, *parameters, seed, p, text, activation)
                found = ops.add_norm_fwd(*args)
                h = found[1]
                wanted, _ = ops.norm_fwd(h, *parameters, None, text, None, None, activation)
                assert torch.equal(found[0], wanted)
            written(ops.add_norm_fwd_into, args, found)
            written(ops.add_norm_fwd_into, args, (found[0], found[1][:0], found[2][:0]))
            for grad_h in (None, given):
                back = (r, grad_h, found[1], *parameters, seed, found[2], p, text)
                written(ops.add_norm_bwd_into, back, ops.add_norm_bwd(*back))


def test_ops_refuse_what_does_not_fit() -> None:
    ops = torch.ops.axisnorm
    x = values((3, 8))
    for residual in (x[:2], x.double()):
        with pytest.raises(ArgumentError, match="one shape, type and device"):
            ops.add_norm_fwd(x, residual, None, None, None, 0.0, "... [d]")
    with pytest.raises(ArgumentError, match="An activation is"):
        ops.add_norm_fwd(x, x, None, None, None, 0.0, "... [d]", "tanh")


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_gradients_of_the_op_with_an_activation(activation: str) -> None:
    tensors = [t.double().detach().requires_grad_() for t in leaves((3, 8), torch.float32)]

    def op(x: T, r: T, w: T, b: T) -> tuple[T, T]:
        text = "... [d]; affine=d"
        y, h, _ = torch.ops.axisnorm.add_norm_fwd(x, r, w, b, None, 0.0, text, activation)
        return y, h

    assert torch.autograd.gradcheck(op, tensors)
    assert torch.autograd.gradgradcheck(op, tensors)
    only_h = torch.autograd.grad(op(*tensors)[1].sum(), tensors[0])[0]
    assert torch.equal(only_h, torch.ones_like(only_h))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic: bool) -> None:
    def door(x: T, r: T, w: T, b: T) -> tuple[T, T]:
        return axisnorm.add_layer_norm(x * 2, r, (8,), w, b, prenorm=True)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    compiled = torch.compile(door, fullgraph=True, dynamic=dynamic)
    for rows in (3, 5, 6):
        tensors = leaves((rows, 8), torch.float32)
        grads = values((rows, 8), seed=5), values((rows, 8), seed=6)
        found, wanted = compiled(*tensors), door(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        pairs = zip(
            torch.autograd.grad(found, tensors, grads),
            torch.autograd.grad(wanted, tensors, grads),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_compiled_dropout(dynamic: bool, prenorm: bool) -> None:
    def door(x: T, r: T, w: T, b: T) -> tuple[T, T]:
        found = axisnorm.add_layer_norm(
            x * 1, r, (64,), w, b, dropout_p=0.5, training=True, prenorm=prenorm
        )
        return found if prenorm else (found, r)

    torch._dynamo.reset()
    compiled = torch.compile(door, fullgraph=True, dynamic=dynamic)
    _, r, w, b = leaves((32, 64), torch.float32)
    x = torch.full((32, 64), 3.0, requires_grad=True)
    torch.manual_seed(5)
    first, second = compiled(x, r, w, b), compiled(x, r, w, b)
    torch.manual_seed(5)
    assert torch.equal(compiled(x, r, w, b)[0], first[0])
    assert not torch.equal(first[0], second[0])
    y, h = first
    grad = values((32, 64), seed=5)
    dx, dr, dw, db = torch.autograd.grad(y, (x, r, w, b), grad)
    kept = (dx != 0).double()
    assert abs(kept.mean() - 0.5) < 5 * 0.5 / math.sqrt(2048)
    # The gradient says what was kept; the output must be that of the same elements.
    exact = (r.double() + 6 * kept).detach()
    if prenorm:
        assert torch.allclose(h.double(), exact, atol=1e-5)
    scheme = Scheme.layer_norm()
    wide = [t.detach().double() for t in (w, b)]
    assert torch.allclose(y.double(), reference.forward(exact, scheme, *wide)[0], atol=1e-5)
    dh, exact_w, exact_b = reference.backward(grad.double(), exact, scheme, *wide)
    for actual, wanted in ((dx, 2 * kept * dh), (dr, dh), (dw, exact_w), (db, exact_b)):
        assert wanted is not None
        assert torch.allclose(actual.double(), wanted, atol=1e-4)


def test_export() -> None:
    layer = axisnorm.nn.AddLayerNorm(8, dropout_p=0.5, prenorm=True)
    x, r, *_ = leaves((3, 8), torch.float32, grad=False)
    batch = torch.export.Dim("batch")
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(layer.eval(), (x, r), dynamic_shapes=shapes)
    assert "axisnorm.add_norm_fwd" in str(program.graph) and "rand" not in str(program.graph)
    other = torch.cat([x, r])
    for a, b in zip(program.module()(other, other), layer(other, other), strict=True):
        assert torch.equal(a, b)
    program = torch.export.export(layer.train(), (x, r), dynamic_shapes=shapes)
    h = program.module()(torch.ones(64, 8), torch.zeros(64, 8))[1]
    assert set(h.unique().tolist()) == {0.0, 2.0}


# --- The rest of the contract


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_gives_the_same_bits(dtype: torch.dtype) -> None:
    tensors = leaves((5, 77), dtype, grad=False)
    x, r, w, b = (to_numpy(t) for t in tensors)
    wanted = add(*tensors, p=0.0)
    strided = np.stack([x, x], -1)[..., 0]
    fortran = np.asfortranarray(r)
    frozen = x.copy()
    frozen.flags.writeable = False
    for a in (x, strided, np.asfortranarray(x), frozen):
        for c in (r, fortran, r[::-1].copy()[::-1]):
            found = axisnorm.add_layer_norm(a, c, 77, w, b, prenorm=True)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == x.dtype and torch.equal(from_numpy(one), other)
            assert torch.equal(
                from_numpy(axisnorm.add_layer_norm(a, c, 77, w, b, training=True)), wanted[0]
            )
            y = axisnorm.add_rms_norm(a, c, 77, w)
            assert torch.equal(from_numpy(y), axisnorm.add_rms_norm(*tensors[:2], 77, tensors[2]))


def test_numpy_specials() -> None:
    x, r = np.ones((3, 4), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    y, h = axisnorm.add_layer_norm(x, r.astype(np.float64), 4, prenorm=True)
    assert h.dtype == np.float64 and np.array_equal(h, r + x)
    assert np.array_equal(y, axisnorm.layer_norm(h, 4))
    y, h = axisnorm.add_layer_norm(x.astype(">f4"), r.astype(">f4"), 4, prenorm=True)
    assert np.array_equal(h, r + x)
    empty = np.ones((0, 4), ml_dtypes.bfloat16)
    assert axisnorm.add_layer_norm(empty, empty, 4).shape == (0, 4)
    unaligned = np.frombuffer(b"\0" + r.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 4)
    assert np.array_equal(
        axisnorm.add_layer_norm(x, unaligned, 4), axisnorm.add_layer_norm(x, r, 4)
    )
    with pytest.raises(DtypeError, match="masked array"):
        axisnorm.add_layer_norm(np.ma.masked_greater(x, 1), x, 4)
    mask = r > 2
    y = axisnorm.add_layer_norm(x, r, 4, mask=mask)
    assert np.array_equal(y, axisnorm.layer_norm(r + x, 4, mask=mask))


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_types_are_added_by_torch(
    dtype: torch.dtype, other: torch.dtype, autocast: bool
) -> None:
    x, r = values((3, 8), dtype), values((3, 8), other, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, h = axisnorm.add_layer_norm(x, r, 8, prenorm=True)
        wanted = r + x
        assert h.dtype == wanted.dtype and torch.equal(h, wanted)
        assert torch.equal(y, axisnorm.layer_norm(wanted, 8))
        torch.manual_seed(0)
        h = axisnorm.add_layer_norm(x, r, 8, dropout_p=0.5, training=True, prenorm=True)[1]
        torch.manual_seed(0)
        assert torch.equal(h, r + F.dropout(x, 0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_leaves_types_alone(dtype: torch.dtype) -> None:
    x, w = values((3, 8), dtype), values((8,), torch.float32, 1)
    with torch.autocast("cpu", torch.bfloat16):
        y, h = axisnorm.add_layer_norm(x, x, 8, w, prenorm=True)
    assert y.dtype == h.dtype == dtype and torch.equal(h, x + x)


@pytest.mark.parametrize("parameter", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameter_types(dtype: torch.dtype, parameter: torch.dtype) -> None:
    x, r = values((4, 40), dtype), values((4, 40), dtype, 1)
    w = values((40,), parameter, 2).requires_grad_()
    b = values((40,), parameter, 3).requires_grad_()
    y, h = add(x, r, w, b)
    assert torch.equal(y, axisnorm.layer_norm(h, 40, w, b))
    grad = values((4, 40), dtype, 4)
    found = torch.autograd.grad(y, (w, b), grad)
    wanted = torch.autograd.grad(axisnorm.layer_norm(h, 40, w, b), (w, b), grad)
    assert all(
        torch.equal(a, c) and a.dtype == parameter for a, c in zip(found, wanted, strict=True)
    )


def test_masked_rows_take_two_steps() -> None:
    x, r, w, b = leaves((3, 8), torch.float32, grad=False)
    mask = values((3, 8), seed=9) > 0
    y, h = axisnorm.add_layer_norm(x, r, 8, w, b, mask=mask, prenorm=True)
    assert torch.equal(h, r + x) and torch.equal(y, axisnorm.layer_norm(h, 8, w, b, mask=mask))
    torch.manual_seed(1)
    h = axisnorm.add_rms_norm(x, r, 8, mask=mask, dropout_p=P, training=True, prenorm=True)[1]
    torch.manual_seed(1)
    assert torch.equal(h, r + F.dropout(x, P))


def test_tensors_that_torch_alone_adds() -> None:
    z = torch.randn(3, 8, dtype=torch.complex64)
    assert torch.allclose(axisnorm.add_rms_norm(z, z, 8), F.rms_norm(z + z, (8,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([values((2, 8)), values((3, 8))])
    with pytest.raises(RuntimeError):
        axisnorm.add_layer_norm(nested, nested, 8)
    sparse = values((3, 8)).to_sparse()
    x = values((3, 8), seed=1)
    assert torch.equal(axisnorm.add_layer_norm(sparse, x, 8), axisnorm.layer_norm(x + sparse, 8))


def test_modules() -> None:
    x, r, *_ = leaves((4, 8), torch.float32)
    for layer in (
        axisnorm.nn.AddLayerNorm(8, dropout_p=P, prenorm=True),
        axisnorm.nn.AddRMSNorm(8, dropout_p=P, prenorm=True),
    ):
        for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.manual_seed(0)
            y, h = other(x, r)
            assert torch.equal(h, reference.residual_sum(x, r, layer.scheme, drawn(), P))
            name = "layer_norm" if isinstance(layer, torch.nn.LayerNorm) else "rms_norm"
            assert torch.equal(y, getattr(axisnorm, name)(h, 8, layer.weight))
            y.sum().backward()
            assert other.weight.grad is not None
        _, h = layer.eval()(x, r)
        assert torch.equal(h, r + x)
        assert not layer.state_dict().keys() - {"weight", "bias"}


def test_training_with_dropout() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList(
        [
            torch.nn.Linear(8, 32),
            axisnorm.nn.AddLayerNorm(32, dropout_p=0.1),
            torch.nn.Linear(32, 2),
        ]
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = values((64, 8)), values((64, 2), seed=1)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        hidden = model[0](x)
        loss = (model[2](model[1](hidden.relu(), hidden)) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.7


def test_large_outputs_reuse_memory() -> None:
    x = torch.ones(1024, 8192)
    axisnorm.empty_cache()
    y, h = axisnorm.add_layer_norm(x, x, (8192,), prenorm=True)
    places = {y.data_ptr(), h.data_ptr()}
    del y, h
    y, h = axisnorm.add_layer_norm(x, x, (8192,), prenorm=True)
    assert {y.data_ptr(), h.data_ptr()} == places
    assert torch.equal(h, x + x) and not y.any()
    axisnorm.empty_cache()


def test_without_the_native_module() -> None:
    import subprocess
    import sys

    code = """
import sys
sys.modules["axisnorm._native"] = None
import numpy, torch, axisnorm
from axisnorm import reference
x, r = (torch.randn(3, 70, dtype=torch.float64, requires_grad=True) for _ in range(2))
torch.manual_seed(0)
y, h = axisnorm.add_layer_norm(x, r, (70,), dropout_p=0.5, training=True, prenorm=True)
torch.manual_seed(0)
seed = torch.empty((), dtype=torch.int64).random_()
wanted = reference.residual_sum(x, r, axisnorm.Scheme.layer_norm(), seed, 0.5)
assert torch.equal(h, wanted)
g = torch.autograd.grad((y, h), (x, r), (torch.ones_like(y), x.detach()))
scheme = axisnorm.Scheme.layer_norm()
dh = reference.backward(torch.ones_like(y), h.detach(), scheme)[0] + x.detach()
assert torch.allclose(g[1], dh)
assert torch.allclose(g[0], reference.dropout(dh, scheme, seed, 0.5))
a = numpy.ones((2, 4), numpy.float32)
assert axisnorm.add_layer_norm(a, a, 4).shape == (2, 4)
print("fine")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.stdout.strip() == "fine", result.stderr
