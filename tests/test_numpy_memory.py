"""Reused memory for large NumPy outputs: right with every kind of alias."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import axisnorm
from axisnorm._memory import LEAST, LOOKS, Pool
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


def test_a_full_pool_looks_at_few_blocks_and_at_all_in_turn() -> None:
    looked: list[int] = []

    def is_held(block: list[int]) -> bool:
        looked.extend(block)
        return block != [70]

    pool: Pool[list[int]] = Pool(100, lambda block, size: True, is_held)
    for number in range(100):
        assert pool.make_room(1)
        pool.put_back([number], 1)
    calls = 0
    while not pool.make_room(1):
        calls += 1
        assert len(looked) <= calls * 2 * LOOKS and calls < 100
    assert looked == list(range(71))
    assert pool.kept == 100
    assert sum(map(len, pool.blocks.values())) == 99


@pytest.mark.parametrize("seed", range(20))
def test_collections_of_garbage_during_a_search_may_allocate_too(seed: int) -> None:
    random = np.random.default_rng(seed)
    depth = 0

    def allocate() -> bytearray:
        size = int(random.integers(1, 4))
        with pool.lock:
            block = pool.take(size)
            if block is None:
                block = bytearray(size)
                if pool.make_room(size):
                    pool.put_back(block, size)
            else:
                pool.put_back(block, size)
        return block

    def is_true_after_a_collection(*_: object) -> bool:
        nonlocal depth
        if depth < 2 and random.random() < 0.3:
            depth += 1
            allocate()
            depth -= 1
        return random.random() < 0.5

    pool: Pool[bytearray] = Pool(8, is_true_after_a_collection, is_true_after_a_collection)
    held = [allocate() for _ in range(3)]
    for _ in range(60):
        held[int(random.integers(3))] = allocate()
        assert pool.kept == sum(size * len(blocks) for size, blocks in pool.blocks.items()) <= 8


def test_small_outputs_are_numpys_own() -> None:
    assert axisnorm.layer_norm(X[:, :64].copy(), 64).base is None
    np.testing.assert_array_equal(axisnorm.layer_norm(X[:, :64], 64), WANTED)
