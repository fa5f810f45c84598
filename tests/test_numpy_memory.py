"""Reused memory for large NumPy outputs: right with every kind of alias."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import axisnorm
from axisnorm._numpy_memory import LEAST, _pool

X = np.random.default_rng(0).standard_normal((8, LEAST // 16), np.float32)
WANTED = axisnorm.layer_norm(X[:, :64].copy(), 64)


def normalized() -> Any:
    return axisnorm.layer_norm(X, X.shape[-1])


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    axisnorm.empty_cache()
    yield
    axisnorm.empty_cache()


def address(y: Any) -> int:
    return int(y.__array_interface__["data"][0])


def test_released_memory_is_used_again() -> None:
    first = address(normalized())
    assert _pool.kept == X.nbytes
    again = normalized()
    assert address(again) == first
    np.testing.assert_allclose(again.mean(-1), 0, atol=1e-5)
    axisnorm.empty_cache()
    assert _pool.kept == 0
    np.testing.assert_allclose(again.std(-1), 1, atol=1e-4)


@pytest.mark.parametrize(
    "alias",
    [
        lambda y: y,
        lambda y: y[1:3, ::2],
        lambda y: y.reshape(-1)[-1:],
        lambda y: memoryview(y),
        lambda y: torch.from_numpy(y)[0].numpy(),
        lambda y: np.from_dlpack(y),
        lambda y: y.view(np.uint8),
        lambda y: y.T,
        lambda y: np.lib.stride_tricks.as_strided(y, (4,), (4,)),
    ],
    ids=[
        "itself",
        "slice",
        "flat",
        "memoryview",
        "torch",
        "dlpack",
        "view",
        "transpose",
        "strided",
    ],
)
def test_memory_in_use_is_left_alone(alias: Any) -> None:
    y = normalized()
    copy = np.array(alias(y))
    held, where = alias(y), address(y)
    del y
    for _ in range(3):
        assert address(normalized()) != where
    np.testing.assert_array_equal(np.array(held), copy)
    del held
    outputs = [normalized() for _ in range(4)]
    assert where in {address(y) for y in outputs}


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("step", [1, 2])
def test_any_order_of_axes_is_numpys(axes: tuple[int, ...], step: int) -> None:
    x = X.reshape(8, 32, -1).transpose(axes)[::step]
    for _ in range(2):
        y = axisnorm.normalize(x, "[a] b c")
        wanted = np.empty_like(x)
        assert y.strides == wanted.strides and y.flags == wanted.flags
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-5)


def test_layout_is_numpys() -> None:
    image = np.asfortranarray(X)
    y = axisnorm.layer_norm(image, X.shape[-1])
    assert y.strides == np.empty_like(image).strides and y.flags.f_contiguous
    assert pickle.loads(pickle.dumps(y[:1, :5])).shape == (1, 5)


@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_outputs_are_as_new_ones(size: int) -> None:
    for shape in ((size, 1), (2, 3)):
        for _ in range(2):
            y = normalized()
            assert y.base is None and y.flags.owndata and y.flags.writeable and y.flags.aligned
            assert y.strides == X.strides and y.dtype == X.dtype
            kept = y[0, 0]
            y.resize(shape)
            y[1:] = 7
            assert y[0, 0] == kept and (y[1:] == 7).all()
            assert not np.may_share_memory(y, normalized())
            del y
    assert normalized().nbytes == X.nbytes
    np.testing.assert_allclose(normalized().mean(-1), 0, atol=1e-5)


def test_memory_that_was_resized_is_kept_for_what_it_is() -> None:
    y = normalized()
    y.resize(X.size * 2)
    del y
    assert _pool.kept == 2 * X.nbytes
    y = axisnorm.layer_norm(np.tile(X, (2, 1)), X.shape[-1])
    assert _pool.kept == 0 and y.nbytes == 2 * X.nbytes


@pytest.mark.parametrize("size", [0, 1, 4, LEAST // 4 - 1])
def test_memory_that_became_small_is_let_go(size: int) -> None:
    """A small block takes a page, and no large output is ever made of it."""
    y = normalized()
    y.resize(size)
    del y
    assert _pool.kept == 0


def test_release_by_another_thread() -> None:
    box = [normalized()]
    where = address(box[0])
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert address(normalized()) == where


def test_no_more_than_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "most", 2 * X.nbytes)
    held = [normalized() for _ in range(4)]
    newest = {address(y) for y in held[:2]}
    assert len({address(y) for y in held}) == 4 and _pool.kept == 0
    while held:
        held.pop()
    assert _pool.kept == 2 * X.nbytes
    assert {address(y) for y in [normalized(), normalized()]} == newest
    axisnorm.layer_norm(np.tile(X, (2, 1)), X.shape[-1])  # as large as both
    assert _pool.kept == 2 * X.nbytes
    axisnorm.layer_norm(np.tile(X, (3, 1)), X.shape[-1])
    assert _pool.kept == 2 * X.nbytes


def test_small_outputs_are_numpys_own() -> None:
    assert axisnorm.layer_norm(X[:, :64].copy(), 64).base is None
    np.testing.assert_array_equal(axisnorm.layer_norm(X[:, :64], 64), WANTED)
