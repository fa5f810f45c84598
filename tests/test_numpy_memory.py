"""Reused memory for large NumPy outputs: right with every kind of alias."""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import axisnorm
from axisnorm import _native
from axisnorm._memory import LEAST
from axisnorm._numpy_memory import _pool

X = np.random.default_rng(0).standard_normal((8, LEAST // 32), np.float32)
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


def test_layout_is_numpys() -> None:
    image = np.asfortranarray(X)
    y = axisnorm.layer_norm(image, X.shape[-1])
    assert y.strides == np.empty_like(image).strides and y.flags.f_contiguous
    assert pickle.loads(pickle.dumps(y[:1, :5])).shape == (1, 5)


def test_no_more_than_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "most", 2 * X.nbytes)
    held = [normalized() for _ in range(4)]
    assert _pool.kept == 2 * X.nbytes
    assert len({address(y) for y in held}) == 4


def small(size: int) -> Any:
    return _native.large_array_like(np.empty(size, np.uint8), size)


def test_a_full_pool_looks_at_few_blocks_and_at_all_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_pool, "most", 200)
    held = [small(2) for _ in range(100)]
    assert _pool.kept == 200
    del held[70]
    calls = 0
    while _pool.kept == 200:
        small(1)
        calls += 1
    # Sixteen are looked at in each call.
    assert calls == 70 // 16 + 1
    assert _pool.kept == 199


def test_few_blocks_of_a_size_are_looked_at() -> None:
    held = [small(64) for _ in range(40)]
    middle = address(held[20])
    del held[20]
    for _ in range(3):
        assert address(small(64)) != middle


def test_letting_blocks_go_may_allocate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection of garbage may, in the middle of a search."""
    monkeypatch.setattr(_pool, "most", 8)
    random = np.random.default_rng(0)
    depth = 0
    blocks: dict[int, Any] = {}

    def allocate() -> Any:
        y = small(int(random.integers(1, 4)))
        blocks.setdefault(id(y.base), weakref.ref(y.base, again))
        return y

    def again(gone: Any) -> None:
        nonlocal depth
        for key in [key for key, ref in blocks.items() if ref is gone]:
            del blocks[key]
        if depth < 2:
            depth += 1
            held[int(random.integers(3))] = allocate()
            depth -= 1
            if random.random() < 0.1:
                axisnorm.empty_cache()

    held = [np.empty(0)] * 3
    for _ in range(500):
        held[int(random.integers(3))] = allocate()
        spans = sorted((address(y), y.nbytes) for y in held if y.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert 0 <= _pool.kept <= 8
    depth = 2
    held[:] = [np.empty(0)] * 3
    assert _pool.kept == sum(ref().nbytes for ref in blocks.values() if ref() is not None)


def test_small_outputs_are_numpys_own() -> None:
    assert axisnorm.layer_norm(X[:, :64].copy(), 64).base is None
    np.testing.assert_array_equal(axisnorm.layer_norm(X[:, :64], 64), WANTED)
