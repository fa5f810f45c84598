"""The memory of NumPy outputs: aligned, large ones' reused, right with every kind of alias."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import DTYPES, to_numpy, values

import axisnorm
from axisnorm import _numpy_memory
from axisnorm._numpy_memory import ALIGNED, LEAST, _pool

X = np.random.default_rng(0).standard_normal((8, LEAST // 16), np.float32)

SMALL = (ALIGNED, 8 * 768 * 4, LEAST - 1024)
Sizes = pytest.mark.parametrize("size", [*SMALL, X.nbytes])


def rows(size: int) -> Any:
    """An array of so many bytes."""
    return X.reshape(-1)[: size // 4].reshape(8, -1)


def normalized(x: Any = X) -> Any:
    return axisnorm.layer_norm(x, x.shape[-1])


def allocator(y: Any) -> str:
    """The name of what gave an array its memory."""
    module = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
    return str(module.get_handler_name(y))


def run(code: str, **environment: str) -> str:
    """What another process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
@Sizes
def test_memory_in_use_is_left_alone(alias: Any, size: int) -> None:
    x = rows(size)
    y = normalized(x)
    copy = np.array(alias(y))
    held, where = alias(y), address(y)
    del y
    for _ in range(3):
        assert address(normalized(x)) != where
    np.testing.assert_array_equal(np.array(held), copy)
    del held
    outputs = [normalized(x) for _ in range(4)]
    assert where in {address(y) for y in outputs} or size < LEAST  # of those malloc decides


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("step", [1, 2, -1])
@Sizes
def test_any_order_of_axes_is_numpys(axes: tuple[int, ...], step: int, size: int) -> None:
    x = rows(size).reshape(8, 16, -1).transpose(axes)[::step]
    for _ in range(2):
        y = axisnorm.normalize(x, "[a] b c")
        wanted = np.empty_like(x)
        assert y.strides == wanted.strides and y.flags == wanted.flags
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-5)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: np.broadcast_to(x[:, :1], (8, 768)),
        lambda x: np.broadcast_to(x, (3, *x.shape)).transpose(1, 0, 2),
        lambda x: np.broadcast_to(x[0, :4, None, None], (4, 24, 32)).transpose(2, 0, 1),
        lambda x: x.reshape(8, 1, 2, 1, -1).transpose(4, 3, 2, 0, 1),
        lambda x: x.reshape(8, 2, 1, -1)[:, ::-1].swapaxes(1, 3),
        lambda x: x.reshape((1,) * 27 + (2, 4, -1, 2, 2)).swapaxes(0, 28).swapaxes(3, 29),
        lambda x: np.lib.stride_tricks.as_strided(x, (32, 32, 2), (4, 4, 4)),
        lambda x: np.lib.stride_tricks.as_strided(x, (32, 32, 2), (4, 16, 4)),
    ],
)
@pytest.mark.parametrize("order", ["K", "C"])
def test_any_strides_are_numpys(view: Any, order: Any) -> None:
    """Equal strides, strides of no length, axes of one element and as many as old NumPys have."""
    x = view(rows(8 * 768 * 4))
    y, wanted = _numpy_memory.empty_like(x, order), np.empty_like(x, order=order)
    assert allocator(y) == "axisnorm"
    assert y.strides == wanted.strides and y.flags == wanted.flags and y.shape == x.shape


@Sizes
def test_layout_is_numpys(size: int) -> None:
    image = np.asfortranarray(rows(size))
    y = normalized(image)
    assert y.strides == np.empty_like(image).strides and y.flags.f_contiguous
    for copy in (pickle.loads(pickle.dumps(y[:1, :5])), y[:1, :5].copy()):
        np.testing.assert_array_equal(copy, y[:1, :5])
        assert copy.flags.owndata and allocator(copy) == "default_allocator"


@pytest.mark.parametrize("length", [1 << 16, 1 << 20])
@Sizes
def test_outputs_are_as_new_ones(length: int, size: int) -> None:
    x = rows(size)
    for shape in ((length, 1), (2, 3)):
        for _ in range(2):
            y = normalized(x)
            assert y.base is None and y.flags.owndata and y.flags.writeable and y.flags.aligned
            assert y.strides == x.strides and y.dtype == x.dtype
            kept = y[0, 0]
            y.resize(shape)
            y[1:] = 7
            assert y[0, 0] == kept and (y[1:] == 7).all()
            assert not np.may_share_memory(y, normalized(x))
            del y
    assert normalized(x).nbytes == size
    np.testing.assert_allclose(normalized(x).mean(-1), 0, atol=1e-5)


def outputs(x: Any) -> dict[str, Callable[[], Any]]:
    """By the short way in C, and by the long way."""
    d = x.shape[-1]
    mask = np.ones((*x.shape[:-1], 1), bool)
    swapped = x.swapaxes(0, 1)
    return {
        "layer_norm": lambda: [axisnorm.layer_norm(x, d)],
        "rms_norm": lambda: [axisnorm.rms_norm(x, d)],
        "channels": lambda: [axisnorm.layer_norm_2d(x[..., None, None], eps=1e-5)],
        "add_layer_norm": lambda: axisnorm.add_layer_norm(x, x, d, prenorm=True),
        "add_rms_norm": lambda: [axisnorm.add_rms_norm(x, x, d)],
        "any order": lambda: [axisnorm.normalize(swapped, "[a b] c")],
        "masked": lambda: [axisnorm.layer_norm(x, d, mask=mask)],
        "sum of any order": lambda: axisnorm.add_layer_norm(swapped, swapped, d, prenorm=True),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", outputs(X[:, None]))
@Sizes
def test_outputs_begin_with_a_cache_line(name: str, dtype: torch.dtype, size: int) -> None:
    """As tensors do: NumPy's own begin 16, 32 or 48 bytes behind one as a rule."""
    x = to_numpy(values((4, 2, size // 8 // dtype.itemsize), dtype))
    assert x.nbytes == size
    held = [y for _ in range(8) for y in outputs(x)[name]()]
    assert {address(y) % 64 for y in held} == {0}
    assert {allocator(y) for y in held} == {"axisnorm"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outputs_of_a_few_bytes_are_numpys_own(dtype: Any) -> None:
    x = np.ones((2, ALIGNED // np.dtype(dtype).itemsize // 2 - 1), dtype)
    for array in (x, x.T):
        y = axisnorm.normalize(array, "[a] b")
        assert allocator(y) == "default_allocator"
        assert y.base is None and y.flags.owndata and y.strides == array.strides


@Sizes
def test_what_is_resized_keeps_its_elements_and_stays_aligned(size: int) -> None:
    x = rows(size)
    held = [normalized(x).reshape(-1) if i % 2 else normalized(x) for i in range(6)]
    held = [y if y.base is None else y.base for y in held]
    wanted = normalized(x).reshape(-1)
    for length in (x.size + 1, 3, 1, x.size, 3 * x.size + 5, 1 << 20, 64, 2 << 20, 700):
        common = min(length, wanted.size)
        for y in held:
            y.resize(length, refcheck=False)
            np.testing.assert_array_equal(y[:common], wanted[:common])
            assert not y[common:].any() and address(y) % 64 == 0
        wanted = np.concatenate([wanted[:common], np.zeros(length - common, np.float32)])


def test_small_outputs_are_not_kept() -> None:
    large = normalized()
    where = address(large)
    for kept in (0, X.nbytes):
        for size in SMALL:
            for _ in range(3):
                y, h = axisnorm.add_layer_norm(rows(size), rows(size), size // 32, prenorm=True)
                del y, h
                assert _pool.kept == kept
        large = None
    assert address(normalized()) == where


def test_a_small_output_that_became_large_is_kept_as_one() -> None:
    y = normalized(rows(SMALL[1]))
    y.resize(X.shape)
    where = address(y)
    del y
    assert _pool.kept == X.nbytes
    y = normalized()
    assert address(y) == where and _pool.kept == 0
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)


def traced() -> int:
    """The bytes of arrays that tracemalloc knows of."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    found = tracemalloc.take_snapshot().filter_traces([arrays])
    return sum(trace.size for trace in found.traces)


@Sizes
def test_tracemalloc_counts_outputs(size: int) -> None:
    x = rows(size)
    normalized(x)  # whatever is made once, and of a large one its memory
    tracemalloc.start()
    try:
        before = traced()
        y = normalized(x)
        assert traced() - before == size
        y.resize(2 * x.size)
        assert traced() - before == 2 * size
        del y
        assert traced() == before
    finally:
        tracemalloc.stop()


CHILD = """
import os
import numpy as np
import axisnorm
xs = [np.random.default_rng(0).standard_normal((8, n), np.float32) for n in (48, 768, 40000)]
for x in xs:
    axisnorm.layer_norm(x, x.shape[-1])
held = [axisnorm.layer_norm(x, x.shape[-1]) for x in xs]
wanted = [y.copy() for y in held]
child = os.fork()
for x, y, known in zip(xs, held, wanted):
    again = axisnorm.layer_norm(x, x.shape[-1])
    assert (y == known).all() and (again == known).all()
    y.resize(3, refcheck=False)
    again.resize(2 * x.size, refcheck=False)
    assert (again[: x.size] == known.reshape(-1)).all()
held = y = again = None
axisnorm.empty_cache()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""


def test_outputs_of_before_a_fork() -> None:
    assert run(CHILD, OMP_NUM_THREADS="1") == "both"


def test_without_a_pool_outputs_are_aligned() -> None:
    code = """
import numpy as np
import axisnorm
from axisnorm._numpy_memory import _pool
held = []
for n in (48, 768, 1 << 18):
    for _ in range(4):
        held.append(axisnorm.layer_norm(np.ones((8, n), np.float32), n))
        axisnorm.layer_norm(np.ones((8, n), np.float32), n)
print({y.__array_interface__["data"][0] % 64 for y in held}, _pool.most, _pool.kept)
"""
    assert run(code, AXISNORM_POOL="0") == "{0} 0 0"


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


@Sizes
def test_release_by_another_thread(size: int) -> None:
    x = rows(size)
    box = [normalized(x)]
    where = address(box[0])
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    y = normalized(x)
    assert address(y) == where or size < LEAST
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)


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
