"""Reused memory of large outputs: never memory that somebody still holds."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import values

import axisnorm
from axisnorm import _native, _torch_memory
from axisnorm._torch_memory import _pool

SHAPE = (8192, 1024)  # 32 MB


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    axisnorm.empty_cache()
    yield
    axisnorm.empty_cache()


X = values(SHAPE)
CORRECT = axisnorm.layer_norm(X, 1024).clone()


def output() -> torch.Tensor:
    return axisnorm.layer_norm(X, 1024)


def overwrite() -> None:
    """Other large outputs, which would land in memory that was given out too early."""
    kept = [
        axisnorm.layer_norm(X * 0 + i, 1024, None, torch.full((1024,), 1.0 * i)) for i in range(4)
    ]
    assert [float(t[0, 0]) for t in kept] == [0, 1, 2, 3]


def test_memory_is_reused() -> None:
    places = set()
    for _ in range(10):
        places.add(output().data_ptr())
    assert len(places) == 1
    assert _pool.kept == X.nbytes
    axisnorm.empty_cache()
    assert _pool.kept == 0


def test_memory_is_reused_under_compile() -> None:
    """torch.compile evaluates frames itself, and calls of Python functions hold more references."""
    torch._dynamo.reset()
    compiled = torch.compile(output, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        places = {compiled().data_ptr() for _ in range(5)}
    assert len(places) == 1
    assert _pool.kept == X.nbytes


def test_backward_too() -> None:
    leaf = X.clone().requires_grad_()
    for _ in range(5):
        torch.autograd.grad(axisnorm.layer_norm(leaf, 1024), leaf, X)
    assert _pool.kept == 2 * X.nbytes


@pytest.mark.parametrize(
    "hold",
    [
        lambda y: y,
        lambda y: y[3:],
        lambda y: y.view(-1),
        lambda y: y.detach(),
        lambda y: torch.from_dlpack(y),
        lambda y: np.from_dlpack(y),
        lambda y: y.untyped_storage(),
        lambda y: y.storage(),
        lambda y: torch.nn.Parameter(y),
        lambda y: (y.requires_grad_() * y.detach()).grad_fn,
        lambda y: torch.empty(0).set_(y),
        lambda y: [y].__iter__(),
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_held_memory_is_left_alone(hold) -> None:  # type: ignore[no-untyped-def]
    y = output()
    place = y.data_ptr()
    held = hold(y)
    del y
    gc.collect()
    overwrite()
    again = torch.frombuffer(
        (np.ctypeslib.ctypes.c_float * X.numel()).from_address(place), dtype=torch.float32
    )
    assert torch.equal(again, CORRECT.view(-1))
    del held
    gc.collect()
    outputs = [output() for _ in range(8)]
    assert place in {y.data_ptr() for y in outputs}


@pytest.mark.parametrize(
    "look",
    [lambda y: y.numpy(), lambda y: memoryview(y.numpy()), np.asarray],
    ids=["numpy", "memoryview", "asarray"],
)
def test_what_numpy_has_seen_is_left_alone_and_never_handed_out_again(look: Any) -> None:
    """torch never resizes it again: outputs were refused resize_ since an earlier one was looked at."""
    y = output()
    seen = look(y)
    del y
    overwrite()
    assert np.array_equal(np.asarray(seen), CORRECT.numpy())
    del seen
    for y in [output() for _ in range(8)]:
        y.resize_(4096, 4096)


def test_saved_for_backward() -> None:
    leaf = X.clone().requires_grad_()
    y = axisnorm.layer_norm(leaf, 1024)
    z = (y * y).sum()
    del y
    overwrite()
    (found,) = torch.autograd.grad(z, leaf)
    wanted = torch.autograd.grad((axisnorm.layer_norm(leaf, 1024) ** 2).sum(), leaf)[0]
    assert torch.equal(found, wanted)


def test_outputs_can_be_resized() -> None:
    for shape in ((10,), (4096, 4096)):
        y = output()
        y.resize_(shape)
        y.fill_(7.0)
        overwrite()
        assert (y == 7).all()
        del y
        overwrite()
        outputs = [output() for _ in range(5)]
        assert all(torch.equal(y, CORRECT) for y in outputs)
        # A block that has grown would be kept for less than it is.
        assert all(y.untyped_storage().nbytes() == X.nbytes for y in outputs)
        del outputs
    y = output()
    y.untyped_storage().resize_(0)
    del y
    overwrite()
    assert torch.equal(output(), CORRECT)


def test_shared_memory_is_let_go() -> None:
    y = output()
    y.share_memory_()
    place = y.data_ptr()
    del y
    assert output().data_ptr() != place


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y.share_memory_(),
        lambda y: y.resize_(y.numel() * 3),
        lambda y: y.untyped_storage().resize_(0),
    ],
    ids=["shared", "grown", "emptied"],
)
def test_what_is_spoiled_is_let_go_if_its_size_never_comes_again(spoil: Any) -> None:
    """Each kept file descriptors, or more memory than was counted."""
    storages = []
    for i in range(60):
        y = small(1000 + i)
        storages.append(weakref.ref(y.untyped_storage()))
        spoil(y)
        del y
    assert sum(s() is not None for s in storages) < 6
    assert _pool.kept < 6 * 1060
    in_use = [small(2000 + i) for i in range(20)]
    for i in range(60):
        y = small(3000 + i)
        storages.append(weakref.ref(y.untyped_storage()))
        spoil(y)
        del y
    assert sum(s() is not None for s in storages) <= len(in_use) + 6


def test_other_layouts_and_types() -> None:
    image = values((8, 64, 128, 128)).contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        y = axisnorm.layer_norm(image, 128)
        assert y.stride() == image.stride()
    for dtype in (torch.float64, torch.bfloat16):
        x = X.to(dtype)
        for _ in range(3):
            y = axisnorm.layer_norm(x, 1024)
            assert y.dtype == dtype
            assert torch.equal(y, axisnorm.layer_norm(x.clone(), 1024))


@pytest.mark.parametrize("inference", [False, True])
def test_outputs_are_as_new_ones(inference: bool) -> None:
    """Those in memory that was used before, too, whichever mode that was in."""
    with torch.inference_mode(inference):
        new = torch.empty_like(X)
    for mode in (False, True, inference, inference):
        with torch.inference_mode(mode):
            y = output()
            y.add_(1)
        del y
    assert _pool.kept == X.nbytes
    with torch.inference_mode(inference):
        y = output()
    if not inference:
        assert y._version == new._version == 0
    for name in ("_base", "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout"):
        assert getattr(y, name) == getattr(new, name), name
    for name in ("is_inference", "_is_view", "storage_offset", "stride", "is_pinned", "is_shared"):
        assert getattr(y, name)() == getattr(new, name)(), name
    assert y.untyped_storage().nbytes() == X.nbytes
    assert y.untyped_storage().resizable() == new.untyped_storage().resizable()
    assert torch.equal(copy.deepcopy(y), CORRECT)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file), CORRECT)
    assert torch.equal(pickle.loads(pickle.dumps(y)), CORRECT)
    with torch.inference_mode(inference):
        y.set_(torch.ones(3))
    assert y.tolist() == [1, 1, 1]


def test_a_saved_output_that_is_written_is_an_error() -> None:
    for _ in range(2):
        leaf = torch.ones(1024, requires_grad=True)
        y = output()
        z = (y * leaf).sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_a_lazy_clone_is_left_alone() -> None:
    y = output()
    clone = y._lazy_clone()
    del y
    overwrite()
    assert torch.equal(clone, CORRECT)


def test_collections_of_garbage_during_a_search_may_normalize_too() -> None:
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            kept.append(axisnorm.layer_norm(X, 1024, None, torch.full((1024,), 1.0)))

    kept: list[torch.Tensor] = []
    thresholds = gc.get_threshold()
    for i in range(12):
        Garbage()
        gc.set_threshold(1)
        y = axisnorm.layer_norm(X, 1024) if i % 2 else axisnorm.layer_norm(X[:, :512], 512)
        gc.set_threshold(*thresholds)
        assert all(torch.equal(t, CORRECT + 1) for t in kept)
        if i % 2:
            assert torch.equal(y, CORRECT)
        del kept[:-2]
    gc.collect()
    assert kept


def small(size: int) -> torch.Tensor:
    y = _native.reuse(size, ((size,), (1,), torch.uint8))
    return _torch_memory.new_large(torch.empty(size, dtype=torch.uint8)) if y is None else y


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
    middle = held[20].data_ptr()
    del held[20]
    for _ in range(3):
        assert small(64).data_ptr() != middle


def test_letting_blocks_go_may_allocate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection of garbage may, in the middle of a search."""
    monkeypatch.setattr(_pool, "most", 8)
    random = np.random.default_rng(0)
    depth = calls = 0
    blocks: dict[int, Any] = {}

    def allocate() -> torch.Tensor:
        y = small(int(random.integers(1, 4)))
        storage = y.untyped_storage()
        blocks.setdefault(id(storage), weakref.ref(storage, again))
        return y

    def again(gone: Any) -> None:
        nonlocal depth, calls
        calls += 1
        for key in [key for key, ref in blocks.items() if ref is gone]:
            del blocks[key]
        if depth < 2:
            depth += 1
            held[int(random.integers(3))] = allocate()
            depth -= 1
            if random.random() < 0.1:
                axisnorm.empty_cache()

    held = [torch.empty(0)] * 3
    for _ in range(500):
        held[int(random.integers(3))] = allocate()
        spans = sorted((y.data_ptr(), y.nbytes) for y in held if y.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert 0 <= _pool.kept <= 8
    assert calls > 20
    depth = 2
    held[:] = [torch.empty(0)] * 3
    assert _pool.kept == sum(ref().nbytes() for ref in blocks.values() if ref() is not None)


def test_inference_mode_and_gradients_do_not_mix() -> None:
    with torch.inference_mode():
        output()
    leaf = X.clone().requires_grad_()
    axisnorm.layer_norm(leaf, 1024).sum().backward()
    with torch.inference_mode():
        assert torch.equal(output(), CORRECT)


def test_the_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "most", 3 * X.nbytes)
    held = [output() for _ in range(6)]
    assert _pool.kept == 3 * X.nbytes
    assert all(torch.equal(y, CORRECT) for y in held)
    del held
    other = values((16384, 1024))
    for _ in range(3):
        axisnorm.layer_norm(other, 1024)
    assert _pool.kept <= 3 * X.nbytes


def test_threads_get_memory_of_their_own() -> None:
    wrong = []

    def work(i: int) -> None:
        bias = torch.full((1024,), float(i))
        for _ in range(6):
            y = axisnorm.layer_norm(X, 1024, None, bias)
            if not torch.equal(y, CORRECT + i):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_release_from_another_thread() -> None:
    box = [output()]
    place = box[0].data_ptr()
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert output().data_ptr() == place


def test_forked_child() -> None:
    # The child uses no torch operation: a forked child hangs in torch's own parallel loops.
    code = """
import os, torch, axisnorm
x, zero = torch.randn(8192, 1024), torch.zeros(8192, 1024)
y = axisnorm.layer_norm(x, 1024)
kept = y.numpy().tobytes()
child = os.fork()
if not child:
    fine = all(axisnorm.layer_norm(x, 1024).numpy().tobytes() == kept for _ in range(3))
    axisnorm.layer_norm(zero, 1024)
    os._exit(0 if fine and y.numpy().tobytes() == kept else 1)
print(os.waitpid(child, 0)[1])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "0"


@pytest.mark.parametrize(
    "mode",
    [
        "torch._subclasses.FakeTensorMode()",
        "torch.inference_mode()",
        "torch.device('meta')",
        "torch.overrides.BaseTorchFunctionMode()",
    ],
)
def test_the_first_import_in_a_mode(mode: str) -> None:
    code = f"""
import torch, torch._dynamo, torch._subclasses  # torch 2.6 cannot import its own _dynamo in all
x = torch.randn(8192, 1024)
with {mode}:
    import axisnorm.nn
places = {{axisnorm.layer_norm(x, 1024).data_ptr() for _ in range(4)}}
held = axisnorm.layer_norm(x, 1024).untyped_storage()
print(len(places), axisnorm.layer_norm(x, 1024).data_ptr() != held.data_ptr())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "1 True"


def test_switched_off() -> None:
    code = """
import torch, axisnorm
from axisnorm._torch_memory import _pool
x = torch.randn(8192, 1024)
for _ in range(3):
    axisnorm.layer_norm(x, 1024)
print(_pool.most, _pool.kept)
"""
    environment = {**os.environ, "AXISNORM_POOL": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=120,
    )
    assert result.stdout.strip() == "0 0"


def test_small_outputs_are_torchs_business() -> None:
    axisnorm.layer_norm(values((4, 64)), 64)
    assert _pool.kept == 0
    assert X.nbytes >= _torch_memory.least
