"""The torch engine: what may watch a tensor, autograd, transforms, ops, compilers."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from cases import (
    DTYPES,
    SCHEMES,
    Case,
    assert_close,
    assert_gradient_close,
    epsilon,
    from_numpy,
    layouts,
    parameters,
    to_numpy,
    values,
)
from conftest import needs_short_way
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import axisnorm
from axisnorm import Scheme, _native, _route, _torch, _torch_memory, _torch_ops, reference
from axisnorm.reference import ACTIVATIONS

Doors = pytest.mark.parametrize(
    "door",
    [
        lambda x, w=None, b=None: axisnorm.layer_norm(x, (x.shape[-1],), w, b),
        lambda x, w=None, b=None: axisnorm.normalize(x, "... [d]; affine=d", w, b),
        lambda x, w=None, b=None: axisnorm.normalize(
            x, "... [d]; affine=d; eps_placement=std", w, b
        ),
    ],
    ids=["short", "native", "reference"],
)
Door = Callable[..., torch.Tensor]


@needs_short_way
def test_the_short_way_is_taken() -> None:
    x, w, b = values((2, 8)), values((8,)), values((8,))
    assert _native.short_layer_norm(x, (8,), w, b, 1e-5, None) is not None
    assert _native.short_layer_norm(x, 8, w, b, 1e-5, None) is not None
    assert _native.short_layer_norm(x, [8], None, torch.nn.Parameter(b), 1, "relu") is not None
    assert _native.short_layer_norm(x.requires_grad_(), (8,), w, b, 1e-5, None).requires_grad
    assert _native.short_rms_norm(x, (8,), w, None, 0.0, "once", None) is not None


@pytest.mark.parametrize(
    "arguments",
    [
        (values((8, 2)).T, (8,), None, None, 1e-5),
        (values((2, 8)), (7,), None, None, 1e-5),
        (values((2, 8)), (), None, None, 1e-5),
        (values((2, 8)), 9, None, None, 1e-5),
        (values((2, 8)), True, None, None, 1e-5),
        (values((2, 8)), (1, 2, 8), None, None, 1e-5),
        (values((2, 8)), (8,), values((1, 8)), None, 1e-5),
        (values((2, 8)), (8,), None, values((2,)), 1e-5),
        (values((2, 8)), (8,), torch.ones(8, dtype=torch.int64), None, 1e-5),
        (values((2, 8)), (8,), torch.ones(1).expand(8), None, 1e-5),
        (values((2, 8)), (8,), None, None, float("nan")),
        (values((2, 8)), (8,), None, None, "1e-5"),
        (values((2, 8)).int(), (8,), None, None, 1e-5),
        (values((0, 8)), (8,), None, None, 1e-5),
        (values((2, 8)).to("meta"), (8,), None, None, 1e-5),
        (values((2, 8)).to_sparse(), (8,), None, None, 1e-5),
    ],
)
def test_the_short_way_leaves_the_unusual_alone(arguments: tuple[Any, ...]) -> None:
    assert _native.short_layer_norm(*arguments, None) is None


# --- One test for each line of the guard: without it the result is silently wrong.


@Doors
def test_forward_mode_tangents(door: Door) -> None:
    x, v = values((3, 8), torch.float64), values((3, 8), torch.float64, 1)
    with fwad.dual_level():
        tangent = fwad.unpack_dual(door(fwad.make_dual(x, v))).tangent
    step = 1e-6
    difference = (door(x + step * v) - door(x - step * v)) / (2 * step)
    assert (tangent - difference).abs().max() < 1e-8


@Doors
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(door: Door) -> None:
    x, w, b = values((3, 8)), values((8,), seed=1), values((8,), seed=2)
    traced = torch.jit.trace(lambda t: door(t, w, b), (x,))
    for other in (values((3, 8), seed=5), values((4, 8), seed=6)):
        assert torch.equal(traced(other), door(other, w, b))


@Doors
@pytest.mark.parametrize("which", [0, 1, 2])
def test_negative_views(door: Door, which: int) -> None:
    tensors = [values((3, 8)), values((8,), seed=1), values((8,), seed=2)]
    negated = [torch._neg_view(t) if i == which else t for i, t in enumerate(tensors)]
    plain = [-t if i == which else t for i, t in enumerate(tensors)]
    assert negated[which].is_neg()
    assert torch.equal(door(*negated), door(*plain))


@Doors
@pytest.mark.parametrize("which", [0, 1, 2])
def test_zero_tensors_without_memory(door: Door, which: int) -> None:
    tensors = [values((3, 8)), values((8,), seed=1), values((8,), seed=2)]
    zero = [torch._efficientzerotensor(t.shape) if i == which else t for i, t in enumerate(tensors)]
    plain = [torch.zeros_like(t) if i == which else t for i, t in enumerate(tensors)]
    assert torch.equal(door(*zero), door(*plain))


@Doors
def test_functionalization(door: Door) -> None:
    x = values((3, 8))
    y = torch.func.functionalize(lambda t: door(t.clone().mul_(2)))(x)
    assert_close(y, door(x.double() * 2))


@Doors
def test_vmap(door: Door) -> None:
    x, w = values((4, 3, 8)), values((8,), seed=1)
    assert_close(torch.func.vmap(lambda t: door(t, w))(x), door(x.double(), w.double()))
    inner = torch.func.vmap(door, in_dims=(1, None))(x, w).transpose(0, 1)
    assert_close(inner, door(x.double(), w.double()))


@Doors
def test_transforms_agree_with_autograd(door: Door) -> None:
    x = values((5,), torch.float64)
    jacobian = torch.autograd.functional.jacobian(door, x)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert (transform(door)(x) - jacobian).abs().max() < 1e-12

    def energy(t: torch.Tensor) -> torch.Tensor:
        return door(t).pow(3).sum()

    hessian = torch.autograd.functional.hessian(energy, x)
    assert (torch.func.hessian(energy)(x) - hessian).abs().max() < 1e-10
    nested = torch.func.jacfwd(torch.func.jacfwd(energy))(x)
    assert (nested - hessian).abs().max() < 1e-10


@Doors
def test_meta_and_fake_tensors(door: Door) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    y = door(torch.empty(3, 8, device="meta"))
    assert (y.shape, y.device.type) == ((3, 8), "meta")
    with FakeTensorMode():
        y = door(torch.empty(3, 8, dtype=torch.bfloat16))
    assert (y.shape, y.dtype) == ((3, 8), torch.bfloat16)


@Doors
def test_dispatch_mode_sees_the_op(door: Door) -> None:
    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = values((3, 8)).requires_grad_()
    with Record():
        door(x).sum().backward()
    assert "axisnorm.norm_fwd.default" in seen and "axisnorm.norm_bwd.default" in seen


@Doors
def test_function_mode_sees_the_call(door: Door) -> None:
    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Record():
        y = door(values((3, 8)))
    assert axisnorm.layer_norm in seen or axisnorm.normalize in seen
    assert torch.equal(y, door(values((3, 8))))


@Doors
def test_subclass(door: Door) -> None:
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[Any] = []
    x = values((3, 8))
    y = door(x.as_subclass(Tagged))
    assert type(y) is Tagged and torch.equal(y.as_subclass(torch.Tensor), door(x))
    assert axisnorm.layer_norm in seen or axisnorm.normalize in seen
    y = door(x, values((8,), seed=1).as_subclass(Tagged))
    assert torch.equal(y.as_subclass(torch.Tensor), door(x, values((8,), seed=1)))


@Doors
def test_fx_records_the_call(door: Door) -> None:
    graph = torch.fx.symbolic_trace(lambda x: axisnorm.layer_norm(x, (8,)))
    assert axisnorm.layer_norm in [node.target for node in graph.graph.nodes]
    x = values((3, 8))
    assert torch.equal(graph(x), axisnorm.layer_norm(x, (8,)))


def test_quantized_and_nested_go_to_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(values((3, 8)), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([values((2, 8)), values((3, 8))])
    with pytest.raises(NotImplementedError):
        axisnorm.layer_norm(quantized, 8)
    w, b = values((8,), seed=1), values((8,), seed=2)
    y = axisnorm.layer_norm(nested, 8, w, b)
    assert y.is_nested and torch.allclose(y[0], F.layer_norm(nested[0], (8,), w, b))
    z = torch.randn(3, 8, dtype=torch.complex64)
    assert torch.equal(axisnorm.rms_norm(z, 8), F.rms_norm(z, (8,)))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_rms_norm"])
def test_jagged_tensors_go_to_torch(name: str) -> None:
    """Their protocol takes rms_norm, by its name, for torch's, and refused our other arguments."""
    rows, w = [values((2, 8)), values((3, 8), seed=1)], values((8,), seed=2).requires_grad_()
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    given = (x, x, (8,), w) if name.startswith("add") else (x, (8,), w)
    y = getattr(axisnorm, name)(*given)
    whole = torch.cat(rows) * (2 if name.startswith("add") else 1)
    wanted = getattr(F, name.removeprefix("add_"))(whole, (8,), w)
    assert y.is_nested and torch.allclose(y.values(), wanted, rtol=1e-5, atol=1e-6)
    (found,) = torch.autograd.grad(y.values().pow(3).sum(), w)
    (exact,) = torch.autograd.grad(wanted.pow(3).sum(), w)
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-5)


# --- Autograd


@pytest.mark.parametrize("case", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout_and_gradient(case: Case, dtype: torch.dtype) -> None:
    x, grad = values(case.shape, dtype), values(case.shape, dtype, 3)
    eps = reference.resolve_eps(case.scheme, dtype)
    wide = case.scheme.replace(eps=eps)
    weight, bias = parameters(case, dtype)
    given = [None if t is None else t.double() for t in (weight, bias)]
    rounded = case.scheme.rounding == "before_affine" and dtype.itemsize == 2
    # Rounding to a half type happens only in that type, so there the reference runs on it.
    source = x if rounded else x.double()
    correct, _ = reference.forward(source, wide, *given)
    correct_grads = reference.backward(grad if rounded else grad.double(), source, wide, *given)
    summed = x.numel()
    for _, laid_out in layouts(x):
        leaves = [t.detach().requires_grad_() for t in (laid_out, weight, bias) if t is not None]
        y = axisnorm.normalize(leaves[0], case.scheme, *leaves[1:])
        assert y.dtype == dtype and y.shape == x.shape
        assert y.stride() == torch.empty_like(laid_out).stride()
        if rounded:
            assert torch.equal(y, correct)
        else:
            assert_close(y, correct)
        with torch.no_grad():
            assert torch.equal(axisnorm.normalize(laid_out, case.scheme, weight, bias), y)
        found = torch.autograd.grad(y, leaves, grad)
        for actual, wanted in zip(found, correct_grads, strict=False):
            assert wanted is not None
            assert_gradient_close(actual, wanted.double(), summed)


@Doors
def test_second_derivatives(door: Door) -> None:
    x, w, b = (
        t.requires_grad_()
        for t in (
            values((3, 5), torch.float64),
            values((5,), torch.float64, 1),
            values((5,), torch.float64, 2),
        )
    )
    assert torch.autograd.gradcheck(door, (x, w, b))
    assert torch.autograd.gradgradcheck(door, (x, w, b))
    assert torch.autograd.gradgradcheck(lambda t, s: door(t, None, s), (x, b))


@Doors
def test_third_derivative(door: Door) -> None:
    x, v = values((4,), torch.float64), values((4,), torch.float64, 1)

    def third(f: Door) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        total = (f(leaf) ** 2 * v).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(total, leaf, create_graph=True)
            total = (g * v).sum()
        return total

    def plain(t: torch.Tensor) -> torch.Tensor:
        return reference.forward(t, Scheme.layer_norm())[0]

    def placed(t: torch.Tensor) -> torch.Tensor:
        return reference.forward(t, Scheme.layer_norm(eps_placement="std"))[0]

    wanted = third(placed if torch.equal(door(x), placed(x)) else plain)
    assert abs(third(door) - wanted) < 1e-9 * abs(wanted)


@Doors
def test_weight_that_depends_on_the_input(door: Door) -> None:
    """Under create_graph the weight's own dependence on x must not come in twice."""
    x = values((3, 5), torch.float64).requires_grad_()

    def run(t: torch.Tensor) -> torch.Tensor:
        return door(t, t.mean(0).tanh(), t[0] ** 2)

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


@Doors
def test_nothing_given_is_modified(door: Door) -> None:
    x = values((4, 3, 8)).transpose(0, 1).requires_grad_()
    w, b = values((8,), seed=1).requires_grad_(), values((8,), seed=2).requires_grad_()
    grad = values((3, 4, 8), seed=3)
    kept = [t.detach().clone() for t in (x, w, b, grad)]
    y = door(x, w, b)
    torch.autograd.grad(y, (x, w, b), grad)
    assert all(torch.equal(a, b) for a, b in zip((x, w, b, grad), kept, strict=True))


@Doors
def test_incoming_gradients_of_any_layout(door: Door) -> None:
    x, w = values((4, 8)).requires_grad_(), values((8,), seed=1).requires_grad_()
    grad = values((4, 8), seed=3)
    wanted = torch.autograd.grad(door(x, w), (x, w), grad)
    for _, laid_out in layouts(grad):
        found = torch.autograd.grad(door(x, w), (x, w), laid_out)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    ones = torch.autograd.grad(door(x, w), (x, w), torch.ones(4, 8))
    expanded = torch.autograd.grad(door(x, w), (x, w), torch.ones(()).expand(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(ones, expanded, strict=True))


@pytest.mark.parametrize("text", ["n c [h w]; affine=c", "n [c] h w; affine=c", "n c h [w]"])
@pytest.mark.parametrize(
    "strided",
    [
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x[..., :1].expand_as(x),
    ],
    ids=["every second element", "expanded"],
)
def test_other_strides_take_one_copy(text: str, strided: Any, monkeypatch: Any) -> None:
    """It took two in forward and three in backward: of x, of the gradient and of the result."""
    x = strided(values((3, 4, 5, 6)))
    scheme = Scheme(text)
    weight = torch.ones(4) if scheme.affine else None
    copies = []
    copy_ = torch.Tensor.copy_
    contiguous = torch.Tensor.contiguous

    def counted_copy(self: torch.Tensor, other: torch.Tensor, *args: Any) -> torch.Tensor:
        copies.append(self)
        return copy_(self, other, *args)

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.is_contiguous():
            copies.append(self)
        return contiguous(self, *args, **kwargs)

    leaf = x.detach().requires_grad_()
    monkeypatch.setattr(torch.Tensor, "copy_", counted_copy)
    monkeypatch.setattr(torch.Tensor, "contiguous", counted)
    y = axisnorm.normalize(leaf, scheme, weight)
    assert len(copies) == 1
    torch.autograd.grad(y, leaf, torch.ones(3, 4, 5, 6))
    assert len(copies) == 2


@Doors
def test_only_what_needs_a_gradient_gets_one(door: Door) -> None:
    x, w, b = values((4, 8)), values((8,), seed=1), values((8,), seed=2)
    for needs in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)):
        leaves = [t.clone().requires_grad_(bool(n)) for t, n in zip((x, w, b), needs, strict=True)]
        door(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [bool(n) for n in needs]


@Doors
def test_changed_input_is_noticed(door: Door) -> None:
    x = values((4, 8)).requires_grad_()
    h = x * 1
    y = door(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@Doors
def test_saved_tensor_hooks_checkpoint_and_anomaly(door: Door) -> None:
    x, w = values((4, 8)).requires_grad_(), values((8,), seed=1).requires_grad_()
    wanted = torch.autograd.grad(door(x, w).pow(2).sum(), (x, w))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = door(x, w).pow(2).sum()
    found = torch.autograd.grad(y, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    y = torch.utils.checkpoint.checkpoint(door, x, w, use_reentrant=False).pow(2).sum()
    found = torch.autograd.grad(y, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            door(x, w).sum().backward()


def test_outputs_and_gradients_are_laid_out_as_what_they_belong_to() -> None:
    """Of many shapes in turn, of other types than the input, and where an axis of one has any stride."""
    random = torch.Generator().manual_seed(0)
    for i in range(300):
        sizes = torch.randint(1, 4, (1 + i % 8,), generator=random).tolist()
        x = values(tuple(sizes), torch.bfloat16 if i % 3 == 0 else torch.float32)
        if sizes[0] == 1:
            x = x.as_strided(sizes, (1000, *x.stride()[1:]))
        x.requires_grad_()
        w = values((sizes[-1],), torch.float32 if i % 2 else x.dtype).requires_grad_()
        y = axisnorm.layer_norm(x, sizes[-1:], w)
        for t, model in zip((y, *torch.autograd.grad(y.sum(), (x, w))), (x, x, w), strict=True):
            like = torch.empty_like(model)
            assert (t.shape, t.stride(), t.dtype) == (like.shape, like.stride(), like.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_inputs_are_copied_by_tiles(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Each element comes to its place, and those of large tensors are copied by all threads."""
    monkeypatch.setattr(_torch_memory, "LEAST", 0)
    tiled = 0
    for sizes in ((3, 130, 1031), (65, 64), (7, 33, 5, 17), (2, 3, 4, 5, 6), (200, 1, 129), (9,)):
        x = values(sizes, dtype)
        for axes in itertools.permutations(range(x.dim())):
            for given in (x.permute(axes), x.permute(axes)[..., 1:], x.permute(axes)[1:, None]):
                copy, source = (
                    torch.zeros(given.shape, dtype=dtype),
                    (given.data_ptr(), given.stride()),
                )
                if _native.transpose(source, copy.data_ptr(), copy.shape, copy.element_size()):
                    assert torch.equal(copy, given)
                    tiled += 1
                copy = _torch._contiguous(given)
                assert torch.equal(copy, given) and copy.is_contiguous()
    assert tiled > 100


ORDERED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda p, x: p.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda p, x: p.rms_norm(x, x.shape[-2:]),
    "group_norm": lambda p, x: p.group_norm(x, 2),
    "instance_norm": lambda p, x: p.instance_norm(x),
    "batch_norm": lambda p, x: p.batch_norm(x, None, None, training=True),
    "batch_norm in evaluation": lambda p, x: p.batch_norm(x, x[0].mean((1, 2)), x.new_ones(4)),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("dense", [True, False])
def test_outputs_are_in_the_order_of_torchs(name: str, dense: bool) -> None:
    """Of input in any order: programs view what they get, and multiply its rows."""
    norm, sizes = ORDERED[name], (2, 4, 3, 5)
    for order in itertools.permutations(range(4)):
        memory = values((*(sizes[axis] for axis in order), 1 if dense else 2))
        x = memory[..., 0].permute(*(order.index(axis) for axis in range(4)))
        assert x.shape == sizes
        theirs = norm(F, x)
        if name == "rms_norm":  # of older versions of torch it has any order
            theirs = theirs.contiguous()
        if order == (0, 2, 3, 1):  # channels_last
            theirs = torch.empty_like(theirs, memory_format=torch.channels_last).copy_(theirs)
        for given in (x, x.detach().requires_grad_()):
            y = norm(axisnorm, given)
            assert y.stride() == theirs.stride()
            torch.testing.assert_close(y.detach(), theirs, rtol=1e-4, atol=1e-5)
        assert norm(axisnorm, x.to("meta")).stride() == theirs.stride()
        (y,) = torch.vmap(lambda t: norm(axisnorm, t))(x[None])
        torch.testing.assert_close(y, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ORDERED)
def test_outputs_of_expanded_inputs_are_in_an_order_of_torchs(name: str) -> None:
    norm, sizes = ORDERED[name], (2, 4, 3, 5)
    for expanded in itertools.product((False, True), repeat=4):
        small = [1 if e else size for e, size in zip(expanded, sizes, strict=True)]
        for order in itertools.permutations(range(4)):
            memory = values([small[axis] for axis in order])
            x = memory.permute([order.index(axis) for axis in range(4)]).expand(sizes)
            for given in (x, x.to("meta"), x.detach().requires_grad_()):
                y = norm(axisnorm, given)
                assert y.is_contiguous() or y.is_contiguous(memory_format=torch.channels_last)


def test_a_collection_of_garbage_during_a_call_may_normalize_too() -> None:
    shapes = [(*(2,) * axes, size, 2) for axes in range(5) for size in range(1, 9)]
    given, last = [values(shape) for shape in shapes], (2,)

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gc.disable()
            for x in given:
                axisnorm.layer_norm(x, last)

    thresholds = gc.get_threshold()
    gc.freeze()  # what is there already costs most of a collection's time
    try:
        for soon in range(1, 8):
            for x in given:
                gc.collect()  # tuples that are kept for reuse, too
                Garbage()
                gc.set_threshold(soon)
                gc.enable()
                axisnorm.layer_norm(x, last)
                gc.disable()
                assert all(axisnorm.layer_norm(t, last).shape == t.shape for t in given)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        gc.enable()


@Doors
def test_nothing_leaks(door: Door) -> None:
    x, w = values((64, 128)).requires_grad_(), values((128,), seed=1).requires_grad_()

    def run() -> None:
        for _ in range(50):
            door(x, w, w).sum().backward()
            with torch.no_grad():
                door(x, w, w)

    run()
    gc.collect()
    before = sum(type(o) is torch.Tensor for o in gc.get_objects())
    run()
    gc.collect()
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) <= before


# --- Ops and compilers


@pytest.mark.parametrize("case", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_operators_in_c_are_those_in_python(case: Case, dtype: torch.dtype) -> None:
    ops, scheme = torch.ops.axisnorm, case.scheme
    x, grad = values(case.shape, dtype), values(case.shape, dtype, seed=3)
    parameters_ = parameters(case, dtype)
    shape = scheme.layout(len(case.shape)).sizes(case.shape).running_shape
    running = values(shape, torch.float32, 5), values(shape, dtype, 6).abs()
    kept = [t.clone() for t in running]

    def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
        return found

    def written(op: Any, args: tuple[Any, ...], wanted: tuple[Tensor, ...]) -> None:
        targets = [torch.full_like(t, 7) if t.numel() else None for t in wanted]
        assert op(*args, *targets) is None
        for target, t in zip(targets, wanted, strict=True):
            assert target is None or torch.equal(target, t)

    for _, given in layouts(x):
        for text, moments in (
            (str(scheme.replace(statistics="batch")), (None, None)),
            (str(scheme.replace(statistics="running")), running),
        ):
            for activation in (None, *ACTIVATIONS):
                args = (given, *parameters_, None, text, *moments, activation)
                y, stats = same(ops.norm_fwd(*args), _torch_ops._op_forward(*args))
                written(ops.norm_fwd_into, args, (y, stats))
                written(ops.norm_fwd_into, args, (y, stats[:0]))
            back = (grad, given, *parameters_, None, *moments, stats, text)
            for activation in ACTIVATIONS:
                args = (*back, activation)
                behind = same((ops.norm_behind(*args),), (_torch_ops._op_behind(*args),))
                written(ops.norm_behind_into, args, behind)
            written(
                ops.norm_bwd_into,
                back,
                same(ops.norm_bwd(*back), _torch_ops._op_backward(*back)),
            )
        for activation in (None, *ACTIVATIONS) if scheme.momentum is not None else ():
            text = str(scheme.replace(statistics="batch"))
            train = (given, *parameters_, None, text, *running, activation)
            found = same(ops.norm_train_fwd(*train), _torch_ops._op_train_forward(*train))
            written(ops.norm_train_fwd_into, train, found)
            assert all(map(torch.equal, running, kept))


def test_operators_that_write_take_what_the_kernels_do_not() -> None:
    """Masks, nothing at all, negated memory, memory of another order."""
    ops, text = torch.ops.axisnorm, "... [d]"
    x, mask = values((4, 8)), values((4, 8), seed=1) > 0
    negated = torch._neg_view(-x)
    for given, valid in ((x, mask), (x[:0], None), (negated, None), (x.t().contiguous().t(), None)):
        y, stats = ops.norm_fwd(given, None, None, valid, text)
        into = torch.full(given.shape, 7.0), torch.full_like(stats, 7)
        ops.norm_fwd_into(given, None, None, valid, text, None, None, None, *into)
        assert all(map(torch.equal, into, (y, stats)))
        back = (given, given, None, None, valid, None, None, stats, text)
        dx = torch.full(given.shape, 7.0)
        ops.norm_behind_into(*back, "silu", dx)
        assert torch.equal(dx, ops.norm_behind(*back, "silu"))
        ops.norm_bwd_into(*back, dx, None, None)
        assert torch.equal(dx, ops.norm_bwd(*back)[0])
        if given is negated:  # a gradient, as compiled programs pass it on below the dispatcher
            _torch_ops._op_norm_behind_into(given, x, *back[2:], "silu", into[0])
            assert torch.equal(into[0], ops.norm_behind(x, x, *back[2:], "silu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck_of_operators_that_write() -> None:
    ops, text, x = torch.ops.axisnorm, "[n] c; affine=c", values((4, 8))
    w, var = values((8,), seed=1), values((8,), seed=2).abs()
    y, stats, mean, moved = ops.norm_train_fwd(x, w, None, None, text, w, var)
    into = [torch.empty_like(t) for t in (y, stats, mean, moved)]
    for op, args in (
        (ops.norm_fwd_into, (x, w, None, None, text, None, None, "gelu", into[0], None)),
        (
            ops.norm_behind_into,
            (x, x, w, None, None, None, None, stats, text, "relu", into[0]),
        ),
        (ops.norm_bwd_into, (x, x, w, None, None, None, None, stats, text, into[0], into[2], None)),
        (ops.norm_train_fwd_into, (x, w, None, None, text, w, var, None, *into)),
        (ops.channel_scale_into, (w, var, 1e-5, torch.empty(8, dtype=torch.float64))),
    ):
        torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_scale_of_channels(dtype: torch.dtype, weighted: bool) -> None:
    weight, var = values((5,), dtype, 1) if weighted else None, values((5,), dtype, 2).abs()
    var[0] = -0.5  # with eps nothing is left: the root's reciprocal is zero
    var[1] = torch.finfo(dtype).max
    scale = torch.empty(5, dtype=torch.float64)
    torch.ops.axisnorm.channel_scale_into(weight, var, 0.5, scale)
    rstd = 1 / (var.double() + 0.5).sqrt()
    rstd[0] = 0
    torch.testing.assert_close(scale, rstd if weight is None else rstd * weight, rtol=1e-15, atol=0)


def test_operators_refuse_what_does_not_fit() -> None:
    ops, x = torch.ops.axisnorm, values((4, 8))
    for weight in (torch.ones(7), torch.ones(1, 8)):
        with pytest.raises(axisnorm.ArgumentError, match="weight"):
            ops.norm_fwd(x, weight, None, None, "... [d]; affine=d")
    with pytest.raises(axisnorm.ArgumentError, match="running_mean"):
        ops.norm_train_fwd(x, None, None, None, "[n] d", torch.zeros(7), torch.ones(7))
    with pytest.raises(axisnorm.ArgumentError, match="running"):
        ops.norm_fwd(x, None, None, None, "[n] d; statistics=running")
    _, stats = ops.norm_fwd(x, None, None, None, "... [d]")
    back = (None, None, None, None, None)
    for run in (
        lambda: ops.norm_fwd(x, None, None, None, "... [d]", activation="tanh"),
        lambda: ops.norm_train_fwd(x, None, None, None, "[n] d", x[0], x[1], "tanh"),
        lambda: ops.norm_behind(x, x, *back, stats, "... [d]", "tanh"),
    ):
        with pytest.raises(axisnorm.ArgumentError, match=r"An activation is .* 'tanh' came"):
            run()
    for grad, kept in ((x[:2], stats), (x, stats[:, :2])):
        with pytest.raises(axisnorm.ArgumentError, match="A gradient has the input's shape"):
            ops.norm_behind(grad, x, *back, kept, "... [d]", "relu")


@needs_short_way
def test_what_operators_know_of_shapes_does_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_route, "MOST_PREPARED", 5)
    _route.prepared.clear()
    for rows in range(1, 12):
        torch.ops.axisnorm.norm_fwd(values((rows, 8)), None, None, None, "... [d]")
    assert 0 < len(_route.prepared) <= 5


@pytest.mark.parametrize("case", SCHEMES[::4], ids=str)
def test_the_operators_of_backward_have_gradients(case: Case) -> None:
    """They had none, but for a warning: programs that were traced with them can be differentiated."""
    ops, text = torch.ops.axisnorm, str(case.scheme)
    x, grad = (values(case.shape, torch.float64, seed) for seed in (0, 8))
    weight, bias = (None if p is None else p.double() for p in parameters(case))

    def backward(grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        stats = ops.norm_fwd(x, weight, bias, None, text)[1]
        given = (grad, x, weight, bias, None, None, None, stats, text)
        return ops.norm_behind(*given, "silu"), *(t for t in ops.norm_bwd(*given) if t.numel())

    given = [None if t is None else t.requires_grad_() for t in (grad, x, weight)]
    assert torch.autograd.gradcheck(backward, given, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("case", SCHEMES[::4], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck(case: Case) -> None:
    x = values(case.shape).requires_grad_()
    weight, bias = (None if p is None else p.requires_grad_() for p in parameters(case))
    mask = values(case.shape, seed=9) > 0
    ops = torch.ops.axisnorm
    text = str(case.scheme)
    torch.library.opcheck(ops.norm_fwd.default, (x, weight, bias, None, text))
    torch.library.opcheck(ops.norm_fwd.default, (x, weight, bias, mask, text))
    torch.library.opcheck(ops.norm_fwd.default, (x, weight, bias, mask, text, None, None, "silu"))
    x, weight, bias = (None if t is None else t.detach() for t in (x, weight, bias))
    _, stats = ops.norm_fwd(x, weight, bias, None, text)
    back = (x, x, weight, bias, None, None, None, stats, text)
    torch.library.opcheck(ops.norm_bwd.default, back)
    torch.library.opcheck(ops.norm_behind.default, (*back, "silu"))
    torch.library.opcheck(ops.norm_moments.default, (x, mask, text))
    shape = case.scheme.layout(len(case.shape)).sizes(case.shape).running_shape
    if case.scheme.statistics == "batch" and case.scheme.momentum is not None:
        running = torch.zeros(shape), torch.ones(shape)
        for given in (None, mask):
            torch.library.opcheck(
                ops.norm_train_fwd.default, (x, weight, bias, given, text, *running, "gelu")
            )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck_with_given_statistics() -> None:
    """The op gave memory that nobody had written for the statistics of the batch."""
    ops, text = torch.ops.axisnorm, "[n] c [l]; affine=c; statistics=running"
    x, c = values((3, 2, 5)), values((2,), seed=1).abs()
    given = (c, c, None, text, c + 1, c + 2)
    torch.library.opcheck(ops.norm_fwd.default, (x.clone().requires_grad_(), *given))
    for _ in range(3):
        spoiled = torch.full((3, 2), 7.0)
        del spoiled
        y, stats = ops.norm_fwd(x, *given)
        assert not stats.any()
    torch.library.opcheck(ops.norm_bwd.default, (x, x, c, c, None, c + 1, c + 2, stats, text))
    wanted = torch.nn.functional.batch_norm(x, c + 1, c + 2, c, c, False)
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6)


@Doors
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(door: Door, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, b: door(x * 2, w, b) + 1, fullgraph=True, dynamic=dynamic)
    w, b = values((8,), seed=1).requires_grad_(), values((8,), seed=2).requires_grad_()
    for rows in (3, 5, 6):
        x, grad = values((rows, 8)).requires_grad_(), values((rows, 8), seed=4)
        y, wanted = compiled(x, w, b), door(x * 2, w, b) + 1
        assert torch.equal(y, wanted)
        found = torch.autograd.grad(y, (x, w, b), grad)
        for a, c in zip(found, torch.autograd.grad(wanted, (x, w, b), grad), strict=True):
            assert torch.equal(a, c)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_every_door(dynamic: bool) -> None:
    x, c = values((2, 6, 4, 5)), values((6,), seed=1)
    mean, var = torch.zeros(6), torch.ones(6)
    for door in (
        lambda t: axisnorm.group_norm(t, 3, c, c),
        lambda t: axisnorm.instance_norm(t, None, None, c, c),
        lambda t: axisnorm.layer_norm_2d(t, c, c),
        lambda t: axisnorm.batch_norm(t, mean.clone(), var.clone(), c, c, True),
        lambda t: axisnorm.rms_norm(t, (5,), rounding="before_affine"),
        lambda t: axisnorm.normalize(t, Scheme("n (g=2 [c]) h [w]"), mask=t > 0),
        lambda t: axisnorm.statistics(t, "n [c] h w")[1],
        lambda t: axisnorm.add_layer_norm(t, t, 5, prenorm=True)[0],
    ):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(door, fullgraph=True, dynamic=dynamic)(x), door(x))
    torch._dynamo.reset()
    compiled = torch.compile(axisnorm.batch_norm, fullgraph=True, dynamic=dynamic)
    # By running statistics: in double, with what stands around it.
    torch.testing.assert_close(
        compiled(x, mean, var, c, c), axisnorm.batch_norm(x, mean, var, c, c), rtol=2e-7, atol=2e-7
    )


def test_compiled_batch_norm_moves_its_statistics() -> None:
    torch._dynamo.reset()
    x = values((4, 3, 5)) + 2
    states = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, fullgraph=True)):
        module = axisnorm.nn.BatchNorm1d(3)
        wrap(module)(x)
        states.append(module.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert states[0]["running_mean"].abs().min() > 0.1 and states[0]["num_batches_tracked"] == 1


def test_compile_does_not_recompile_for_every_shape() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x: axisnorm.layer_norm(x, (8,)), backend=counter, dynamic=True)
    for rows in range(2, 12):
        compiled(values((rows, 8)))
    assert counter.frame_count == 1


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = axisnorm.nn.LayerNorm(8)
            self.image = axisnorm.nn.Norm("n (c [d])", affine="c d", sizes={"c": 2, "d": 4})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.image(self.norm(x))

    model = Model().eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (values((3, 8)),), dynamic_shapes=({0: batch},))
    assert "axisnorm.norm_fwd" in str(program.graph)
    x = values((7, 8), seed=5)
    assert torch.equal(program.module()(x), model(x))


# --- The rest of the contract


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_leaves_types_alone(dtype: torch.dtype) -> None:
    x, w = values((3, 8), dtype), values((8,), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert axisnorm.layer_norm(x, 8, w).dtype == dtype
        assert axisnorm.rms_norm(x, 8, w).dtype == dtype


def test_threads_are_torchs() -> None:
    from axisnorm import _build

    assert _build.native is not None
    assert _build.native.max_threads() == torch.get_num_threads()


def test_out_variants() -> None:
    x, w = values((4, 8)), values((8,), seed=1)
    wanted = axisnorm.layer_norm(x, 8, w)
    out = torch.empty(4, 8)
    assert axisnorm.layer_norm(x, 8, w, out=out) is out and torch.equal(out, wanted)
    strided = torch.empty(8, 4).T
    assert torch.equal(axisnorm.layer_norm(x, 8, w, out=strided), wanted)
    # out that overlaps an input in part, or a parameter
    buffer = torch.empty(5, 8)
    buffer[1:] = x
    assert torch.equal(axisnorm.layer_norm(buffer[1:], 8, w, out=buffer[:4]), wanted)
    rows = values((8, 8))
    wanted = axisnorm.layer_norm(rows, 8, rows[3].clone())
    assert torch.equal(axisnorm.layer_norm(rows, 8, rows[3], out=rows), wanted)
    for bad, words in (
        (torch.empty(4, 7), "out is like the input"),
        (torch.empty(4, 8, dtype=torch.float64), "out is like the input"),
        ([0.0], "out is like the input"),
    ):
        with pytest.raises(axisnorm.ArgumentError, match=words):
            axisnorm.layer_norm(x, 8, w, out=bad)
    with pytest.raises(axisnorm.ArgumentError, match="no gradient"):
        axisnorm.layer_norm(x, 8, w.requires_grad_(), out=out)


INTO: dict[str, Callable[[Any, Any, Any], Any]] = {
    "layer_norm": lambda x, w, out: axisnorm.layer_norm(x, x.shape[-2:], out=out),
    "rms_norm": lambda x, w, out: axisnorm.rms_norm(x, x.shape[-1:], out=out),
    "group_norm": lambda x, w, out: axisnorm.group_norm(x, 2, w, out=out),
    "layer_norm_2d": lambda x, w, out: axisnorm.layer_norm_2d(x, w, out=out, activation="silu"),
    "batch_norm": lambda x, w, out: axisnorm.batch_norm(x, w + 0, w + 1, w, training=True, out=out),
    "normalize": lambda x, w, out: axisnorm.normalize(x, "n [c] [...]", out=out),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("name", INTO)
def test_out_in_every_layout(name: str, kind: str, dtype: torch.dtype) -> None:
    """Into memory of its own, into x's, and into such that overlaps x by a few elements."""

    def call(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        weight = torch.ones(4, dtype=dtype)
        if kind == "torch":
            return INTO[name](x, weight, out)
        target = None if out is None else to_numpy(out)
        y = INTO[name](to_numpy(x), to_numpy(weight), target)
        assert out is None or y is target
        return from_numpy(y) if out is None else out

    values_of_x = values((3, 4, 5, 6), dtype)
    for label, x in layouts(values_of_x):
        wanted = call(x.clone(memory_format=torch.preserve_format), None)
        for other, out in layouts(torch.empty_like(values_of_x)):
            found = call(x, out)
            assert found is out
            # Another order in memory may sum in another order.
            tolerance = {"rtol": 8 * epsilon(dtype), "atol": 8 * epsilon(dtype)}
            assert torch.allclose(found, wanted, **tolerance), (label, other)
            assert torch.equal(x, values_of_x)
        x = x.clone(memory_format=torch.preserve_format)
        assert call(x, x) is x and torch.allclose(x, wanted, **tolerance)
    for before, behind in ((0, 7), (7, 0)):
        memory = torch.empty(values_of_x.numel() + 7, dtype=dtype)
        x, out = (
            memory[start:][: values_of_x.numel()].view(3, 4, 5, 6) for start in (before, behind)
        )
        assert torch.equal(call(x.copy_(values_of_x), out), call(values_of_x, None))


@needs_short_way
def test_the_short_way_writes_into_out() -> None:
    x, w, out = values((2, 8)), values((8,)), torch.empty(2, 8)
    for target in (out, x):
        versions = target._version
        assert _native.short_layer_norm(x, 8, w, None, 1e-5, None, target) is target
        assert target._version > versions
    arrays = x.numpy(), w.numpy(), out.numpy()
    assert (
        _native.short_layer_norm(arrays[0], 8, arrays[1], None, 1e-5, None, arrays[2]) is arrays[2]
    )
    with torch.inference_mode():
        made = torch.empty(2, 8)
        assert _native.short_layer_norm(x, 8, w, None, 1e-5, None, made) is made
    arrays[2].flags.writeable = False
    assert _native.short_layer_norm(arrays[0], 8, None, None, 1e-5, None, arrays[2]) is None


@pytest.mark.parametrize("shared", [False, True])
def test_out_of_inference_mode(shared: bool) -> None:
    """It was overwritten, and then torch's copy to it failed."""
    with torch.inference_mode():
        out = values((2, 8))
        kept = out.clone()
        axisnorm.layer_norm(kept.clone(), 8, out=out.clone())
    x = out if shared else values((2, 8), seed=1)
    with pytest.raises(axisnorm.ArgumentError, match="inference mode"):
        axisnorm.layer_norm(x, 8, out=out)
    assert torch.equal(out, kept)


# --- Regressions, named after what went wrong


def test_shape_list_changed_before_backward() -> None:
    sizes = [4]
    x = values((2, 3, 4)).requires_grad_()
    y = axisnorm.layer_norm(x, sizes)
    sizes[:] = [3, 4]
    grad = values((2, 3, 4), seed=1)
    wanted = torch.autograd.grad(axisnorm.layer_norm(x, (4,)), x, grad)[0]
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], wanted)


@Doors
def test_parameter_replaced_by_a_smaller_one_before_backward(door: Door) -> None:
    w = torch.nn.Parameter(torch.ones(40))
    x = values((2, 40)).requires_grad_()
    y = door(x, w)
    w.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="weight varies along"):
        y.backward(torch.ones(2, 40))


@Doors
@pytest.mark.parametrize("which", [0, 1])
def test_freed_storage(door: Door, which: int) -> None:
    tensors = [values((4, 8)), values((8,), seed=1)]
    tensors[which].untyped_storage().resize_(0)
    with pytest.raises(axisnorm.ArgumentError, match="storage was freed"):
        door(*tensors)


@pytest.mark.parametrize("create_graph", [False, True])
def test_freed_gradient(create_graph: bool) -> None:
    x, w = values((3, 4)).requires_grad_(), values((4,)).requires_grad_()
    for y in (axisnorm.layer_norm(x, 4, w), axisnorm.add_layer_norm(x, x, 4, w)):
        grad = torch.ones(3, 4, requires_grad=True)
        grad.untyped_storage().resize_(0)
        with pytest.raises(axisnorm.ArgumentError, match="storage was freed"):
            torch.autograd.grad(y, x, grad, create_graph=create_graph)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("which", range(6))
def test_freed_storage_on_the_long_way(
    which: int, training: bool, masked: bool, requires_grad: bool
) -> None:
    """Running statistics crashed, which were read or written without asking for their memory."""
    x = values((3, 4, 2)).requires_grad_(requires_grad)
    parameters = [values((4,), seed=seed).exp() for seed in range(4)]
    mask = torch.ones(3, 4, 2, dtype=torch.bool) if masked else None
    tensors = [x, *parameters, mask]
    if tensors[which] is None:
        return
    kept = [t.clone() for t in parameters[2:]]
    tensors[which].untyped_storage().resize_(0)
    for placement in ("variance", "std"):
        scheme = Scheme.batch_norm(eps_placement=placement)
        scheme = scheme if training else scheme.replace(statistics="running")
        with pytest.raises(axisnorm.ArgumentError, match="storage was freed"):
            axisnorm.normalize(
                x, scheme, *parameters[:2], running_mean=parameters[2], running_var=parameters[3],
                mask=mask,
            )  # fmt: skip
    for t, old in zip(parameters[2:], kept, strict=True):
        assert not t.untyped_storage().nbytes() or torch.equal(t, old)


@pytest.mark.parametrize("masked", [False, True])
def test_freed_storage_of_statistics_sums_and_second_derivatives(masked: bool) -> None:
    """What torch computes crashed."""
    mask = torch.ones(3, 4, dtype=torch.bool) if masked else None
    gone = values((3, 4)).requires_grad_()
    gone.untyped_storage().resize_(0)
    with pytest.raises(axisnorm.ArgumentError, match="storage was freed"):
        axisnorm.statistics(gone, "n [d]", mask=mask)
    for pair in ((gone, values((3, 4))), (values((3, 4)), gone)):
        with pytest.raises(axisnorm.ArgumentError, match="storage was freed"):
            axisnorm.add_layer_norm(*pair, 4, mask=mask)
    x, weight = values((3, 4)).requires_grad_(), values((4,)).requires_grad_()
    for y in (
        axisnorm.layer_norm(x, 4, weight, mask=mask),
        axisnorm.add_layer_norm(x, x.detach(), 4, weight, mask=mask),
    ):
        data = weight.data
        copy = data.clone()
        data.untyped_storage().resize_(0)
        with pytest.raises(axisnorm.ArgumentError, match="storage was freed"):
            torch.autograd.grad(y, x, torch.ones(3, 4), create_graph=True)
        data.untyped_storage().resize_(copy.nbytes)
        data.copy_(copy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_gradient_of_compiled_and_traced_statistics() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return axisnorm.statistics(x, "n [d]")[1].sum() * 10 + x.sum()

    x = values((3, 5)).requires_grad_()
    wanted = torch.autograd.grad(total(x), x)[0]
    torch._dynamo.reset()
    for f in (torch.compile(total, fullgraph=True), torch.jit.trace(total, (x,))):
        assert torch.allclose(torch.autograd.grad(f(x), x)[0], wanted)


@Doors
def test_parameter_that_becomes_negative(door: Door) -> None:
    x, data = values((2, 4)), values((4,), seed=1)
    p = torch.nn.Parameter(data.clone())
    with torch.no_grad():
        door(x, p)
        p.data = torch._neg_view(p.data)
        assert torch.equal(door(x, p), door(x, -data))


def test_out_is_a_change_that_autograd_sees() -> None:
    a = values((4, 8)).requires_grad_()
    x = a.exp()
    with torch.no_grad():
        axisnorm.layer_norm(x, (8,), out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_out_that_overlaps_by_address() -> None:
    memory = values((50,)).numpy()
    x = torch.from_numpy(memory)[:32].view(4, 8)
    out = torch.from_numpy(memory[4:])[:32].view(4, 8)
    wanted = axisnorm.layer_norm(x.clone(), 8)
    assert torch.equal(axisnorm.layer_norm(x, 8, out=out), wanted)
    for bad in (torch.zeros(8).expand(4, 8), torch.zeros(32).as_strided((4, 8), (4, 1))):
        with pytest.raises(axisnorm.ArgumentError, match="its own memory"):
            axisnorm.layer_norm(values((4, 8)), 8, out=bad)
    memory = torch.zeros(12)
    with pytest.raises(axisnorm.ArgumentError, match="share memory"):
        axisnorm.batch_norm(
            values((3, 4, 1)), memory[:4], torch.ones(4), training=True, out=memory.view(3, 4, 1)
        )


@Doors
def test_dual_and_batched_gradients(door: Door) -> None:
    x, v, t = (values((3, 4), torch.float64, i) for i in range(3))
    x.requires_grad_()

    def pull(g: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(door(x), x, g)[0]

    with fwad.dual_level():
        tangent = fwad.unpack_dual(pull(fwad.make_dual(v, t))).tangent
    assert torch.allclose(tangent, pull(t))  # the gradient is linear in what comes in
    batch = torch.stack([v, t])
    y = door(x)
    found = torch.autograd.grad(y, x, batch, is_grads_batched=True)[0]
    assert torch.allclose(found, torch.stack([pull(v), pull(t)]))
    jacobian = torch.autograd.functional.jacobian(door, x)
    assert torch.allclose(torch.autograd.functional.jacobian(door, x, vectorize=True), jacobian)


@pytest.mark.parametrize("scale", [1.0, 1e125, 1e155, 1e170, 1e300])
def test_constant_groups_of_the_reference_in_float64(scale: float) -> None:
    x = torch.full((1, 4, 1), scale, dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64).reshape(1, 4, 1)
    (dx,) = torch.autograd.grad(axisnorm.group_norm(x, 1, torch.ones(4)), x, grad)
    wanted = (grad - grad.mean()) / 1e-5**0.5
    assert torch.allclose(dx, wanted, rtol=1e-12)
    mask = torch.ones(1, 4, 1, dtype=torch.bool)
    rstd = axisnorm.statistics(x.detach(), "n [c l]", mask=mask)[2]
    assert abs(rstd.item() * 1e-5**0.5 - 1) < 1e-15
    (dx,) = torch.autograd.grad(
        axisnorm.group_norm(
            torch.ones_like(x).requires_grad_() * 1.0, 1, torch.ones(4), eps=1e-300
        ).sum()
        + x.sum(),
        x,
    )
    assert dx.isfinite().all()


def test_equal_gradients_of_a_constant_row_cancel_exactly() -> None:
    for dtype in DTYPES:
        x = torch.full((2, 768), 1000.3333, dtype=dtype, requires_grad=True)
        for g in (0.7, 0.1, 3.3):
            y = axisnorm.layer_norm(x, 768, None, torch.full((768,), 3.0, dtype=dtype))
            assert not torch.autograd.grad(y, x, torch.full_like(y, g))[0].any()


def test_rstd_below_the_normal_range() -> None:
    x = torch.tensor([[1e18, -2e18, 3e18, 5e17]])
    for eps in (1e76, 1e84, 1e90):
        correct = reference.forward(x.double(), Scheme.layer_norm(eps=eps))[0]
        y = axisnorm.layer_norm(x, 4, eps=eps).double()
        assert (y - correct).abs().max() <= max(4e-7 * correct.abs().max(), 6e-45)


def test_text_of_a_scheme_under_compile() -> None:
    torch._dynamo.reset()
    x, mean, var = values((4, 3, 5)), torch.zeros(3), torch.ones(3)
    for text in ("torch.batch_norm.eval", "[n] c [l]; affine=c; statistics = running"):

        def run(t: torch.Tensor, text: str = text) -> torch.Tensor:
            return axisnorm.normalize(t, text, running_mean=mean, running_var=var)

        compiled = torch.compile(run, fullgraph=True)
        torch.testing.assert_close(compiled(x), run(x), rtol=2e-7, atol=2e-7)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_compiled_out_is_checked() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x, out: axisnorm.layer_norm(x, (4,), out=out))
    with pytest.raises(Exception, match="out is like the input"):
        run(values((3, 4)), torch.empty(2, 3, 4))


def test_evaluation_then_training_then_backward_of_the_first() -> None:
    module = axisnorm.nn.BatchNorm1d(3).eval()
    x = values((4, 3)).requires_grad_()
    y = module(x)
    module.train()(x.detach())
    y.sum().backward()
    assert x.grad is not None
