"""The short way of plain arrays: what it takes, with which bits, and what it leaves to the long way."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import DTYPES, SCHEMES, Case, layouts, parameters, to_numpy, values

import axisnorm
from axisnorm import _build, _native, _numpy, _route, functional, reference

Dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arrays(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The same values, in the same strides."""
    return tuple(None if t is None else to_numpy(t) for t in tensors)


def running_arrays(channels: int, dtype: torch.dtype) -> tuple[Any, ...]:
    mean, var = values((channels,), dtype, 5), values((channels,), dtype, 6).abs() + 0.5
    return arrays(mean, var)


def calls(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Named norms of an array (N, C, ...), and of its trailing axes."""

    def trailing(x: Any, count: int) -> tuple[Any, ...]:
        shape = x.shape[-count:]
        w, b = arrays(values(shape, dtype, 3), values(shape, dtype, 4))
        return shape, w, b

    def channels(x: Any) -> tuple[Any, ...]:
        return arrays(values((x.shape[1],), dtype, 3), values((x.shape[1],), dtype, 4))

    return {
        "layer_norm": lambda x, a: axisnorm.layer_norm(x, *trailing(x, 2), activation=a),
        "layer_norm of a number": lambda x, a: axisnorm.layer_norm(x, x.shape[-1], activation=a),
        "rms_norm": lambda x, a: axisnorm.rms_norm(x, *trailing(x, 1)[:2], activation=a),
        "gemma": lambda x, a: axisnorm.rms_norm(
            x, *trailing(x, 1)[:2], 1e-3, weight_offset=1.0, rounding="before_affine", activation=a
        ),
        "layer_norm_2d": lambda x, a: axisnorm.layer_norm_2d(x, *channels(x), activation=a),
        "group_norm": lambda x, a: axisnorm.group_norm(x, 2, *channels(x), activation=a),
        "instance_norm": lambda x, a: axisnorm.instance_norm(
            x, None, None, *channels(x), activation=a
        ),
        "batch_norm": lambda x, a: axisnorm.batch_norm(
            x, None, None, *channels(x), training=True, activation=a
        ),
        "running": lambda x, a: axisnorm.batch_norm(
            x, *running_arrays(x.shape[1], dtype), *channels(x), activation=a
        ),
        "normalize": lambda x, a: axisnorm.normalize(
            x, "n [c] ...; affine=c", *channels(x), activation=a
        ),
        "add_layer_norm": lambda x, a: axisnorm.add_layer_norm(
            x, x, *trailing(x, 1), prenorm=True, activation=a
        ),
        "add_rms_norm": lambda x, a: axisnorm.add_rms_norm(x, x, *trailing(x, 1)[:2], activation=a),
    }


def bits(found: Any) -> list[tuple[Any, ...]]:
    found = found if isinstance(found, tuple) else (found,)
    return [(y.dtype, y.shape, y.strides, y.tobytes()) for y in found]


def without_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in vars(functional) if name.startswith("_short_")]
    assert len(names) == 6
    for name in names:
        monkeypatch.setattr(functional, name, lambda *_: None)


@Dtypes
@pytest.mark.parametrize("name", calls(torch.float32))
@pytest.mark.parametrize("activation", [None, *reference.ACTIVATIONS])
def test_bits_of_the_long_way(
    dtype: torch.dtype, name: str, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = calls(dtype)[name]
    laid_out = [x for _, t in layouts(values((3, 4, 5, 6), dtype)) for x in arrays(t)]
    found = [bits(norm(x, activation)) for x in laid_out]
    without_short_way(monkeypatch)
    assert found == [bits(norm(x, activation)) for x in laid_out]


@pytest.mark.parametrize("case", SCHEMES, ids=str)
def test_bits_of_every_scheme(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    w, b = arrays(*parameters(case))
    laid_out = [x for _, t in layouts(values(case.shape)) for x in arrays(t)]
    for text in (case.scheme, str(case.scheme)):
        found = [bits(axisnorm.normalize(x, text, w, b)) for x in laid_out]
        with monkeypatch.context() as patch:
            without_short_way(patch)
            assert found == [bits(axisnorm.normalize(x, text, w, b)) for x in laid_out]


@Dtypes
@pytest.mark.parametrize("name", calls(torch.float32))
def test_the_short_way_is_taken(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long_way(*_: Any) -> None:
        raise AssertionError("the long way")

    (x,) = arrays(values((3, 4, 5, 6), dtype))
    calls(dtype)[name](x, None)
    for engine in ("normalize", "add_normalize"):
        monkeypatch.setattr(_numpy, engine, long_way)
    calls(dtype)[name](x, None)


class _Subclass(np.ndarray):
    pass


def _unaligned(x: Any) -> Any:
    raw = np.frombuffer(b"\0" + x.tobytes(), np.uint8)
    return raw[1:].view(x.dtype).reshape(x.shape)


def _uneven(x: Any) -> Any:
    """Elements that are not whole elements apart."""
    dtype = np.dtype({"names": ["x"], "formats": [x.dtype], "itemsize": x.itemsize + 1})
    return np.zeros(x.shape, dtype)["x"]


UNUSUAL: dict[str, Callable[[Any], Any]] = {
    "subclass": lambda x: x.view(_Subclass),
    "masked": lambda x: np.ma.masked_greater(x, 1),
    "another byte order": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "integers": lambda x: x.astype(np.int32),
    "longdouble": lambda x: x.astype(np.longdouble),
    "complex": lambda x: x.astype(np.complex64),
    "unaligned": _unaligned,
    "uneven": _uneven,
    "no elements": lambda x: x[:0],
    "a tensor": torch.from_numpy,
    "a list": lambda x: x.tolist(),
    "a buffer": memoryview,
    "another shape": lambda x: x[..., 1:].copy(),
}


@pytest.mark.parametrize("spoiled", [0, 1, 2], ids=["x", "weight", "bias"])
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_the_short_way_leaves_the_unusual_alone(spoiled: int, unusual: str) -> None:
    given = [*arrays(values((3, 8)), values((8,)), values((8,)))]
    given[spoiled] = UNUSUAL[unusual](given[spoiled])
    x, w, b = given
    mean, var = np.zeros(8, np.float32), np.ones(8, np.float32)
    if spoiled or unusual != "a tensor":
        assert _native.short_layer_norm(x, (8,), w, b, 1e-5, None) is None
        channel = (x, w, b, _route.BATCH, None, 1e-5, mean, var, False, 0.1, None)
        assert _native.short_channel_norm(*channel) is None
    if spoiled:
        assert _native.short_normalize(x, "n [c]; affine=c", w, b, None, None, None) is None
    if spoiled == 1:
        x, w, mean = given[0], None, UNUSUAL[unusual](mean)
        channel = (x, w, None, _route.BATCH, None, 1e-5, mean, var, False, 0.1, None)
        assert _native.short_channel_norm(*channel) is None
    if spoiled == 0:
        r = np.zeros((3, 8), np.float32)
        arguments = ((8,), None, None, 1e-5, 0.0, False, False, None)
        assert _native.short_add_layer_norm(r, x, *arguments) is None


def test_what_the_short_way_leaves_to_the_long_one() -> None:
    x, w = arrays(values((3, 8)), values((8,)))
    mean, var = running_arrays(8, torch.float32)
    assert _native.short_layer_norm(x, (7,), w, None, 1e-5, None) is None
    assert _native.short_layer_norm(x, True, None, None, 1e-5, None) is None
    assert _native.short_layer_norm(x, (8,), w, None, float("inf"), None) is None
    assert _native.short_layer_norm(x, (8,), w, None, 1e-5, "tanh") is None
    moving = (x, w, None, _route.BATCH, None, 1e-5, mean, var, True, 0.1, None)
    assert _native.short_channel_norm(*moving) is None
    one_value = (x[:1], w, None, _route.BATCH, None, 1e-5, None, None, True, 0.1, None)
    assert _native.short_channel_norm(*one_value) is None
    for momentum in (None, "a", float("nan")):
        odd = (x, w, None, _route.BATCH, None, 1e-5, None, None, True, momentum, None)
        assert _native.short_channel_norm(*odd) is None
    no_statistics = (x, w, None, _route.BATCH, None, 1e-5, mean, None, False, 0.1, None)
    assert _native.short_channel_norm(*no_statistics) is None
    assert _native.short_add_layer_norm(x, x, (8,), w, None, 1e-5, 0.1, True, False, None) is None
    assert (
        _native.short_normalize(x, "n [c]; statistics=running", w, None, None, None, None) is None
    )
    with pytest.raises(axisnorm.ArgumentError, match="names"):
        _native.short_normalize(x, "n [c d]", None, None, None, None, None)


def test_inputs_are_left_alone_and_outputs_have_memory_of_their_own() -> None:
    x, w = arrays(values((3, 8)), values((8,)))
    before = x.tobytes(), w.tobytes()
    first = axisnorm.layer_norm(x, 8, w)
    second = axisnorm.layer_norm(x, 8, w)
    assert (x.tobytes(), w.tobytes()) == before
    assert first.flags.owndata and first.flags.writeable and not np.may_share_memory(first, second)
    y, h = axisnorm.add_layer_norm(x, x, 8, w, prenorm=True)
    assert not np.may_share_memory(y, h) and not np.may_share_memory(h, x)


def test_types_are_told_apart_however_many_came_before() -> None:
    """Of the types that came last the numbers are kept."""
    (x,) = arrays(values((3, 8), torch.float64))
    wanted = axisnorm.layer_norm(x, 8).tobytes()
    for length in range(1, 40):
        named = x.astype(np.dtype(">f8", metadata={"length": length}))
        assert axisnorm.layer_norm(named, 8).astype(x.dtype).tobytes() == wanted
        own = x.astype(np.dtype("=f8", metadata={"length": length}))
        assert axisnorm.layer_norm(own, 8).tobytes() == wanted
        assert axisnorm.layer_norm(x, 8).tobytes() == wanted


def test_an_unknown_numpy_has_no_short_way() -> None:
    """A later version of NumPy's C ABI may order its structures and functions otherwise."""
    version = ctypes.CFUNCTYPE(ctypes.c_uint)(lambda: 0x03000000)
    table = (ctypes.c_void_p * 300)(ctypes.cast(version, ctypes.c_void_p).value)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    assert not _build.native.connect_arrays(capsule(ctypes.addressof(table), None, None), {})
    x = np.ones((2, 4), np.float32)
    assert _native.short_layer_norm(x, (4,), None, None, 1e-5, None) is not None


def test_an_unknown_numpy_goes_the_long_way() -> None:
    """Its outputs are made by itself, large ones, too."""
    code = """
import ctypes, sys
import numpy as np
module = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
version = ctypes.CFUNCTYPE(ctypes.c_uint)(lambda: 0x03000000)
table = (ctypes.c_void_p * 300)(ctypes.cast(version, ctypes.c_void_p).value)
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
module._ARRAY_API = capsule(ctypes.addressof(table), None, None)
import axisnorm
for n in (8, 1024, 1 << 18):
    y = axisnorm.layer_norm(np.arange(2 * n, dtype=np.float32).reshape(2, n), n)
    assert abs(y.mean()) < 1e-5 and abs(y.std() - 1) < 1e-3
    print(module.get_handler_name(y))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == 3 * ["default_allocator"], done.stderr
