"""The guard of the short way: what watches a tensor sees it, and is missed without its row.

Every row of the guard is tested through every short door, and again with that row blind: then the
result must be wrong, or the row guards nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from cases import values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import axisnorm
from axisnorm import _build, _native, _route, _torch
from axisnorm.scheme import ArgumentError

Door = Callable[..., torch.Tensor]
T = torch.Tensor

native = _build.native


SHAPE = (3, 4, 4)


def batch_norm(x: T, w: T, b: T) -> T:
    return axisnorm.batch_norm(x, None, None, w, b, True)


def evaluated(x: T, w: T, b: T) -> T:
    mean, var = torch.linspace(-1, 1, 4), torch.linspace(1, 2, 4)
    return axisnorm.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), w, b)


# Each takes x of that shape, and a weight and a bias of shape (4,).
DOORS: dict[str, Door] = {
    "layer_norm": lambda x, w, b: axisnorm.layer_norm(x, (4,), w, b),
    "rms_norm": lambda x, w, b: axisnorm.rms_norm(x, (4,), w),
    "add_layer_norm": lambda x, w, b: axisnorm.add_layer_norm(x, x, (4,), w, b),
    "add_rms_norm": lambda x, w, b: axisnorm.add_rms_norm(x, x, (4,), w),
    "group_norm": lambda x, w, b: axisnorm.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b: axisnorm.instance_norm(x, None, None, w, b),
    "layer_norm_2d": axisnorm.layer_norm_2d,
    "batch_norm": batch_norm,
    "batch_norm in evaluation": evaluated,
}
# The short way of normalize is for what needs no gradient.
WITHOUT_GRADIENT: dict[str, Door] = {
    **DOORS,
    "normalize": lambda x, w, b: axisnorm.normalize(x, "n (g=2 [c]) [l]; affine=g c", w, b),
    "layer_norm into out": lambda x, w, b: axisnorm.layer_norm(
        x, (4,), w, b, out=torch.empty_like(x)
    ),
    "group_norm into out": lambda x, w, b: axisnorm.group_norm(x, 2, w, b, out=torch.empty_like(x)),
}
FUNCTIONS = {getattr(axisnorm, name.split()[0]) for name in DOORS} | {axisnorm.normalize}
Doors = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))
AllDoors = pytest.mark.parametrize("door", WITHOUT_GRADIENT.values(), ids=list(WITHOUT_GRADIENT))


def given(dtype: torch.dtype = torch.float32) -> list[T]:
    return [values(SHAPE, dtype), values((4,), dtype, 1), values((4,), dtype, 2)]


@contextlib.contextmanager
def blind(**watchers: Any) -> Iterator[None]:
    """The native module with other answers to who is watching."""
    api = torch.Tensor.__dlpack_c_exchange_api__
    assert native.connect(api, {**_torch._CONNECTED, **watchers})
    try:
        yield
    finally:
        assert native.connect(api, _torch._CONNECTED)


def check(right: Callable[[], bool], **blinded: Any) -> None:
    """The result is right, and would not be, or be none, if the guard did not look."""
    assert right()
    with blind(**blinded):
        try:
            missed = not right()
        except RuntimeError:
            missed = True
        assert missed
    assert right()


@AllDoors
def test_forward_mode(door: Door) -> None:
    tensors = given(torch.float64)
    v = values(SHAPE, torch.float64, 5)

    def right() -> bool:
        with fwad.dual_level():
            x = fwad.make_dual(tensors[0], v)
            return fwad.unpack_dual(door(x, *tensors[1:])).tangent is not None

    check(right, forward_ad={"_current_level": -1})


@AllDoors
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing(door: Door) -> None:
    x, w, b = given()
    other = values(SHAPE, seed=7)

    def right() -> bool:
        traced = torch.jit.trace(lambda t: door(t, w, b), (x,), check_trace=False)
        return torch.allclose(traced(other), door(other, w, b), atol=1e-5)

    check(right, tracing=lambda: None)


@AllDoors
def test_function_modes(door: Door) -> None:
    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []

    def right() -> bool:
        seen.clear()
        with Record():
            door(*given())
        return bool(FUNCTIONS & set(seen))

    check(right, function_mode=lambda: False)


@AllDoors
def test_dispatch_modes(door: Door) -> None:
    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    tensors = given()

    def right() -> bool:
        seen.clear()
        with Record():
            door(*tensors)
        return any(name.startswith("axisnorm.") for name in seen)

    check(right, dispatch_modes=lambda: 0)


@Doors
def test_transforms(door: Door) -> None:
    """x is none of the tensors that vmap wraps, but has a gradient outside."""
    x, w, b = given(torch.float64)
    x.requires_grad_()
    scales, grad = torch.tensor([1.0, 3.0], dtype=torch.float64), values(SHAPE, torch.float64, 4)
    (once,) = torch.autograd.grad(door(x, w, b), x, grad)

    def right() -> bool:
        y = torch.func.vmap(lambda s: door(x, w, b) * s)(scales)
        return torch.allclose(torch.autograd.grad(y, x, torch.stack([grad, grad]))[0], 4 * once)

    check(right, transforms=lambda: False)


@AllDoors
def test_subclasses(door: Door) -> None:
    class Tagged(torch.Tensor):
        """A tensor that is told of every function."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[Any] = []
    x, w, b = given()

    def right() -> bool:
        seen.clear()
        y = door(x.as_subclass(Tagged), w, b)
        return type(y) is Tagged and bool(FUNCTIONS & set(seen))

    check(right, Parameter=Tagged)


NEGATED = [
    (name, which)
    for name in WITHOUT_GRADIENT
    for which in range(2 if "rms" in name else 3)
]  # fmt: skip


@pytest.mark.parametrize(("name", "which"), NEGATED)
def test_negative_views(name: str, which: int) -> None:
    door, tensors = WITHOUT_GRADIENT[name], given()
    negated = [torch._neg_view(t) if i == which else t for i, t in enumerate(tensors)]
    wanted = door(*[-t if i == which else t for i, t in enumerate(tensors)])
    check(lambda: torch.equal(door(*negated), wanted), is_neg=lambda _: False)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_negative_running_statistics(which: int, training: bool) -> None:
    x = values(SHAPE)

    def right() -> bool:
        running = [torch.full((4,), 3.0), torch.full((4,), 2.0)]
        plain = [t.clone() for t in running]
        running[which] = torch._neg_view(-running[which])
        assert running[which].is_neg()
        y = axisnorm.batch_norm(x, *running, training=training)
        wanted = axisnorm.batch_norm(x, *plain, training=training)
        return torch.equal(y, wanted) and all(map(torch.equal, running, plain))

    check(right, is_neg=lambda _: False)


@pytest.mark.parametrize("which", [0, 1])
def test_running_statistics_made_in_inference_mode(which: int) -> None:
    """Outside of it torch refuses to change them."""
    x = values(SHAPE)

    def right() -> bool:
        running = [torch.zeros(4), torch.ones(4)]
        with torch.inference_mode():
            running[which] = running[which].clone()
            axisnorm.batch_norm(x, *[t.clone() for t in running], training=True)
        before = [t.clone() for t in running]
        try:
            axisnorm.batch_norm(x, *running, training=True)
        except ArgumentError:
            return all(map(torch.equal, running, before))
        return False

    check(right, is_inference=lambda _: False)


@Doors
def test_negative_gradients(door: Door) -> None:
    x, w, b = given()
    x.requires_grad_()
    grad = values(SHAPE, seed=4)
    (wanted,) = torch.autograd.grad(door(x, w, b), x, -grad)

    def right() -> bool:
        return torch.equal(torch.autograd.grad(door(x, w, b), x, torch._neg_view(grad))[0], wanted)

    check(right, is_neg=lambda _: False)


def test_compilers() -> None:
    """While a compiler or exporter runs, what is called on real tensors is recorded too."""
    x, w, b = given()

    def right() -> bool:
        torch.compiler._is_compiling_flag = True
        try:
            return _native.short_layer_norm(x, (4,), w, b, 1e-5, None) is None
        finally:
            torch.compiler._is_compiling_flag = False

    check(right, compiler={"_is_compiling_flag": False})


# --- Tensors that are no plain memory: no short way takes one, in any place.


def quantized(t: T) -> T:
    return torch._empty_affine_quantized(t.shape, scale=0.1, zero_point=0, dtype=torch.qint8)


def without_storage(t: T) -> T:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def functional(t: T) -> T:
    return torch._to_functional_tensor(t)


SPOILED: dict[str, Callable[[T], Any]] = {
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": quantized,
    "zero": lambda t: torch._efficientzerotensor(t.shape),
    "freed": without_storage,
    "functional": functional,
    "integer": lambda t: t.int(),
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e5m2),
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
}

SHORT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "layer_norm": (_native.short_layer_norm, (0, (4,), 1, 2, 1e-5, None), (0, 2, 3)),
    "rms_norm": (_native.short_rms_norm, (0, (4,), 1, 1e-5, 0.0, "once", None), (0, 2)),
    "group_norm": (
        _native.short_channel_norm,
        (0, 1, 2, _route.GROUP, 2, 1e-5, None, None, True, 0.1, None),
        (0, 1, 2),
    ),
    "batch_norm": (
        _native.short_channel_norm,
        (0, 1, 2, _route.BATCH, None, 1e-5, 3, 4, True, 0.1, None),
        (0, 1, 2, 6, 7),
    ),
    "batch_norm in evaluation": (
        _native.short_channel_norm,
        (0, 1, 2, _route.BATCH, None, 1e-5, 3, 4, False, 0.1, None),
        (0, 1, 2, 6, 7),
    ),
    "normalize": (
        _native.short_normalize,
        (0, "n (g=2 [c]) [l]; affine=g c", 1, 2, None, None, None),
        (0, 2, 3),
    ),
    "normalize by running statistics": (
        _native.short_normalize,
        (0, "[n] c [l]; affine=c; statistics=running", 1, 2, 3, 4, None),
        (0, 2, 3, 4, 5),
    ),
    "layer_norm into out": (
        _native.short_layer_norm,
        (0, (4,), 1, 2, 1e-5, None, 5),
        (0, 2, 3, 6),
    ),
    "rms_norm into out": (
        _native.short_rms_norm,
        (0, (4,), 1, 1e-5, 0.0, "once", None, 5),
        (0, 2, 7),
    ),
    "batch_norm into out": (
        _native.short_channel_norm,
        (0, 1, 2, _route.BATCH, None, 1e-5, 3, 4, True, 0.1, None, 5),
        (0, 1, 2, 6, 7, 11),
    ),
    "normalize into out": (
        _native.short_normalize,
        (0, "n (g=2 [c]) [l]; affine=g c", 1, 2, None, None, None, 5),
        (0, 2, 3, 7),
    ),
    "add_layer_norm": (
        _native.short_add_layer_norm,
        (0, 0, (4,), 1, 2, 1e-5, 0.0, False, False, None),
        (0, 1, 3, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=list(SPOILED))
@pytest.mark.parametrize("name", SHORT)
def test_not_plain_memory(name: str, spoil: Callable[[T], Any]) -> None:
    function, arguments, places = SHORT[name]
    tensors = [*given(), torch.zeros(4), torch.ones(4), torch.zeros(SHAPE)]
    plain = [tensors[a] if type(a) is int and i in places else a for i, a in enumerate(arguments)]
    assert function(*plain) is not None
    before = [t.clone() for t in tensors]
    for place in places:
        spoiled = list(plain)
        spoiled[place] = spoil(tensors[arguments[place]])
        assert function(*spoiled) is None
    assert all(map(torch.equal, tensors, before))


class Described(ctypes.Structure):
    """The head of dlpack.h's DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int))


class ExchangeApi(ctypes.Structure):
    """The table of dlpack.h 1.3."""

    _fields_ = (
        ("version", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("before", "allocate", "export", "take")),
        ("describe", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


@contextlib.contextmanager
def on_another_device(*tensors: T) -> Iterator[None]:
    """The native module with a table that says of these tensors that they are on a GPU."""
    capsules = ctypes.pythonapi
    capsules.PyCapsule_GetPointer.restype = ctypes.c_void_p
    capsules.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    capsules.PyCapsule_New.restype = ctypes.py_object
    capsules.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    name, api = b"dlpack_exchange_api", torch.Tensor.__dlpack_c_exchange_api__
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Described))
    table = ExchangeApi.from_address(capsules.PyCapsule_GetPointer(api, name))
    torchs = kind(table.describe)

    def describe(tensor: T, described: Any) -> int:
        status: int = torchs(tensor, described)
        if any(tensor is one for one in tensors):
            described.contents.device_type = 2  # kDLCUDA
        return status

    own, function = ExchangeApi.from_buffer_copy(table), kind(describe)
    own.describe = ctypes.cast(function, ctypes.c_void_p)
    capsule = capsules.PyCapsule_New(ctypes.addressof(own), name, None)
    assert native.connect(capsule, _torch._CONNECTED)
    try:
        yield
    finally:
        assert native.connect(api, _torch._CONNECTED)


@pytest.mark.parametrize("name", SHORT)
def test_another_device(name: str) -> None:
    """Its addresses mean nothing here. There need not be one to show that none is read."""
    function, arguments, places = SHORT[name]
    tensors = [*given(), torch.zeros(4), torch.ones(4), torch.zeros(SHAPE)]
    plain = [tensors[a] if type(a) is int and i in places else a for i, a in enumerate(arguments)]
    with on_another_device():
        assert function(*plain) is not None
    for place in places:
        with on_another_device(plain[place]):
            assert function(*plain) is None
    assert function(*plain) is not None


def test_gradients_go_the_long_way() -> None:
    text = "[n] c [l]; affine=c; statistics=running"
    tensors = [*given(), torch.zeros(4), torch.ones(4)]
    for i in range(5):
        x, w, b, mean, var = (t.clone().requires_grad_(i == j) for j, t in enumerate(tensors))
        assert _native.short_normalize(x, text, w, b, mean, var, None) is None
        with torch.no_grad():
            assert _native.short_normalize(x, text, w, b, mean, var, None) is not None


@pytest.mark.parametrize("name", [name for name in SHORT if name.endswith("into out")])
def test_gradients_have_no_way_into_out(name: str) -> None:
    function, arguments, places = SHORT[name]
    tensors = [*given(), torch.zeros(4), torch.ones(4), torch.zeros(SHAPE)]
    plain = [tensors[a] if type(a) is int and i in places else a for i, a in enumerate(arguments)]
    for place in places:
        spoiled = list(plain)
        spoiled[place] = plain[place].clone().requires_grad_()
        assert function(*spoiled) is None
        with torch.no_grad():
            assert function(*spoiled) is spoiled[-1]


def test_the_short_way_of_normalize_refuses_as_the_long_way() -> None:
    x, w, b = given()
    with pytest.raises(ArgumentError, match="a multiple of 3"):
        axisnorm.normalize(x, "n (g=3 [c]) [l]", w, b)
    with pytest.raises(ArgumentError, match="running_mean"):
        axisnorm.normalize(x, "[n] c [l]; affine=c; statistics=running", w, b)
    with pytest.raises(ArgumentError, match="weight"):
        axisnorm.normalize(x, "n [c] l; affine=c", torch.ones(3), b)
    with pytest.raises(ArgumentError, match="activation"):
        axisnorm.normalize(x, "n [c] l; affine=c", w, b, activation="tanh")


# --- What torch has a kernel for and axisnorm none goes to torch's own function.


class Meshed(torch.Tensor):
    """A tensor that is spread over a mesh of devices, as a DTensor."""

    device_mesh = None
    __torch_function__ = torch._C._disabled_torch_function_impl


def fake(t: T, device: str) -> T:
    with FakeTensorMode():
        return torch.empty(t.shape, device=device)


FOREIGN: dict[str, Callable[[T], Any]] = {
    "cuda": lambda t: fake(t, "cuda"),
    "mps": lambda t: fake(t, "mps"),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "sparse": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": quantized,
    "on a mesh": lambda t: t.as_subclass(Meshed),
}
TORCHS: dict[str, Callable[[T], T]] = {
    "layer_norm": lambda x: axisnorm.layer_norm(x, (4,)),
    "rms_norm": lambda x: axisnorm.rms_norm(x, (4,)),
    "group_norm": lambda x: axisnorm.group_norm(x, 2),
    "instance_norm": axisnorm.instance_norm,
    "batch_norm": lambda x: axisnorm.batch_norm(x, None, None, training=True),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("name", "kind"),
    # torch has no batch_norm of nested tensors.
    [pair for pair in product(TORCHS, FOREIGN) if pair != ("batch_norm", "nested")],
)
def test_what_has_no_kernel_here(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[T] = []

    def own(x: T, *_: Any, **__: Any) -> T:
        called.append(x)
        return x

    monkeypatch.setattr(torch.nn.functional, name, own)
    x = FOREIGN[kind](given()[0])
    assert TORCHS[name](x) is x
    assert called == [x]
    TORCHS[name](given()[0])
    assert len(called) == 1


# --- The long way has a guard of its own, in Python.

LONG: dict[str, Door] = {
    "native": lambda x, w, b: axisnorm.normalize(x, "... [d]; affine=d", w, b),
    "reference": lambda x, w, b: axisnorm.normalize(
        x, "... [d]; affine=d; eps_placement=std", w, b
    ),
    "channels": lambda x, w, b: axisnorm.normalize(x, "n (g=2 [c]) [l]; affine=g c", w, b),
}
LongDoors = pytest.mark.parametrize("door", LONG.values(), ids=list(LONG))


class Wrapper(torch.Tensor):
    """A tensor around another one, without memory of its own, that is told of every operator."""

    seen: list[str]
    inside: T

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapped = [a for a in args if isinstance(a, Wrapper)]
        wrapped[0].seen.append(str(func))
        plain = [a.inside if isinstance(a, Wrapper) else a for a in args]
        found = func(*plain, **(kwargs or {}))
        return tuple(wrapper(t, wrapped[0].seen) for t in found)


def wrapper(inside: T, seen: list[str]) -> Wrapper:
    made = torch.Tensor._make_wrapper_subclass(
        Wrapper, inside.shape, dtype=inside.dtype, strides=inside.stride()
    )
    made.inside, made.seen = inside, seen
    return made


@LongDoors
@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrapper_subclasses(door: Door, which: int) -> None:
    tensors = given()
    wanted = door(*tensors)
    seen: list[str] = []
    y = door(*[wrapper(t, seen) if i == which else t for i, t in enumerate(tensors)])
    assert seen == ["axisnorm.norm_fwd.default"]
    assert isinstance(y, Wrapper) and torch.equal(y.inside, wanted)


def test_without_memory_nothing_is_shared() -> None:
    """The address of every tensor on this device is 0."""
    x, mean, var = (t.to("meta") for t in (given()[0], torch.zeros(4), torch.ones(4)))
    out = torch.empty_like(x)
    assert axisnorm.batch_norm(x, mean, var, training=True, out=out) is out


@LongDoors
@pytest.mark.parametrize("which", [0, 1, 2])
def test_functional_tensors(door: Door, which: int) -> None:
    tensors = given()
    wrapped = [functional(t) if i == which else t for i, t in enumerate(tensors)]
    y = door(*wrapped)
    assert torch._is_functional_tensor(y)
    torch._sync(y)
    assert torch.equal(torch._from_functional_tensor(y), door(*tensors))


@LongDoors
@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_gradients_without_plain_memory(door: Door, kind: str) -> None:
    tensors = [t.requires_grad_() for t in given()]
    grad = values(SHAPE, seed=4)
    if kind == "negative":
        special, plain = torch._neg_view(grad), -grad
    else:
        special, plain = torch._efficientzerotensor(SHAPE), torch.zeros(SHAPE)
    found = torch.autograd.grad(door(*tensors), tensors, special)
    wanted = torch.autograd.grad(door(*tensors), tensors, plain)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", [n for n in (*LONG, *DOORS) if not n.startswith("add")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_gradients_that_are_traced(name: str) -> None:
    """A trace records the gradient, too: it is that of the input that comes later.

    Of what keeps its output for backward, as sums do, torch traces no gradient.
    """
    door = {**LONG, **DOORS}[name]
    _, w, b = given()
    factor = values(SHAPE, seed=6)

    def gradient(x: T) -> T:
        return torch.autograd.grad((door(x, w, b) * factor).sum(), x)[0]

    x, other = (values(SHAPE, seed=seed).requires_grad_() for seed in (7, 8))
    traced = torch.jit.trace(gradient, (x,), check_trace=False)
    torch.testing.assert_close(traced(other), gradient(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("door", [*LONG.values(), *DOORS.values()], ids=[*LONG, *DOORS])
def test_gradients_that_vmap_batches(door: Door) -> None:
    x, w, b = given(torch.float64)
    y = door(x.requires_grad_(), w, b)
    factors = values((2, *SHAPE), torch.float64, 6)

    def gradient(factor: T) -> T:
        return torch.autograd.grad(y, x, factor, retain_graph=True)[0]

    wanted = torch.stack([gradient(factor) for factor in factors])
    torch.testing.assert_close(torch.vmap(gradient)(factors), wanted)
