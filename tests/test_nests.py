"""Every scheme, layout, type, mask and instruction set through the native nests, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import (
    DTYPES,
    SCHEMES,
    Case,
    assert_close,
    assert_gradient_close,
    layouts,
    parameters,
    values,
)
from conftest import needs_short_way
from family import FAMILY, ROW, SUM, Member
from torch.utils.checkpoint import checkpoint

import axisnorm
from axisnorm import Scheme, _build, _route, reference

# Groups, maps and channels around the widths of vectors and tiles.
MORE = tuple(
    Case(Scheme(text), shape)
    for text, shape in (
        ("n c [...]; affine=c", (3, 5, 7, 7)),
        ("n c [...]; affine=c", (2, 3, 1)),
        ("n c [...]; affine=c", (2, 70, 2, 2)),
        ("[n] c [...]; affine=c", (6, 3, 49)),
        ("[n] c [...]; affine=c", (9, 130)),
        ("[n] c [...]; affine=c", (5, 40, 2, 2)),
        ("[n] c [...]; affine=c", (20, 11, 4, 4)),
        ("n c [...]; affine=c", (4, 11, 4, 4)),
        ("n (g=4 [c]) [...]; affine=g c", (2, 80, 7, 7)),
        ("n (g=3 [c]) [...]; affine=g c", (2, 96, 3, 3)),
        ("n (g=4 [c]) [...]; affine=g c", (2, 12, 5, 5)),
        ("n (g=4 [c]) [...]; affine=g", (2, 12, 5, 5)),
        ("n (g=4 [c]) [...]; affine=c", (2, 12, 5, 5)),
        ("n (g=2 [c]) [...]; affine=g c", (2, 6, 2, 3, 4)),
        ("n [c] ...; affine=c; eps=1e-6", (2, 33, 5, 13)),
        ("n [c] ...; affine=c; eps=1e-6; center=false", (2, 33, 65)),
        ("n [c] ...; affine=c; weight_offset=1; correction=1", (2, 20, 3, 3)),
        ("[n c] d; affine=d", (3, 4, 37)),
        ("[n] c [l]; affine=c l", (3, 4, 40)),
        ("[a] b [c] d [e]; affine=b d", (3, 2, 4, 3, 5)),
        ("[a b]", (7, 9)),
        ("n [c h w]; affine=c h w", (3, 4, 5, 6)),
        ("n (h=4 [d]) s; affine=d", (2, 32, 9)),
        ("n [c] l; affine=c l", (2, 9, 20)),
        ("[n] c h; affine=c", (4, 3, 50)),
        ("[b] s d; affine=b d", (5, 3, 40)),
    )
)


def wide(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().double()


def is_native(case: Case, dtype: torch.dtype) -> bool:
    name = str(dtype).removeprefix("torch.")
    return _route.choose(case.scheme, case.shape, name).engine == "native"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", SCHEMES + MORE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_forward_and_backward(case: Case, dtype: torch.dtype, masked: bool) -> None:
    if not is_native(case, dtype):
        pytest.skip("the formula has no kernel: see test_what_has_no_kernel")
    scheme = case.scheme.replace(eps=reference.resolve_eps(case.scheme, dtype))
    valid = values(case.shape, seed=9) > -0.5 if masked else None
    for name, x in layouts(values(case.shape, dtype) * 2 + 1):
        if valid is not None:
            # What stands in the masked places has no influence.
            x = torch.empty_like(x).copy_(torch.where(valid, x, float("nan")))
        weight, bias = parameters(case, dtype)
        x = x.detach().requires_grad_()
        for t in (weight, bias):
            if t is not None:
                t.requires_grad_()
        y = axisnorm.normalize(x, scheme, weight, bias, mask=valid)
        assert y.stride() == torch.empty_like(x).stride(), name
        given = (wide(x), scheme, wide(weight), wide(bias))
        once = scheme.rounding == "once" or dtype.itemsize > 2
        if once:
            assert_close(y.detach(), reference.forward(*given, mask=valid)[0])
        grad = values(case.shape, dtype, seed=5)
        y.backward(grad)
        dx, dweight, dbias = reference.backward(grad.double(), *given, mask=valid)
        assert_gradient_close(x.grad, dx, 30, max(1.0, float(dx.abs().max())))
        if weight is None:
            continue
        summed = x.numel() // weight.numel()
        rounding = 0.0 if once else 4 * torch.finfo(dtype).eps * summed**0.5
        scale = max(1.0, float(dweight.abs().max())) * (1 + rounding / torch.finfo(dtype).eps)
        assert_gradient_close(weight.grad, dweight, summed, scale)
        assert_gradient_close(bias.grad, dbias, summed, max(1.0, float(dbias.abs().max())))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "text", ["[n] c [...]; affine=c", "n c [...]; affine=c", "n [c] h w; affine=c", "[n] c h w"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_running_statistics_normalize(text: str, dtype: torch.dtype, masked: bool) -> None:
    case = Case(Scheme(text, statistics="running"), (3, 5, 6, 7))
    sizes = case.scheme.layout(4).sizes(case.shape)
    mean, var = values(sizes.running_shape, seed=3), values(sizes.running_shape, seed=4).abs() + 0.5
    valid = values(case.shape, seed=9) > -0.5 if masked else None
    for _, x in layouts(values(case.shape, dtype)):
        weight, bias = parameters(case, dtype)
        x = x.detach().requires_grad_()
        for t in (weight, bias):
            if t is not None:
                t.requires_grad_()
        running = {"running_mean": mean, "running_var": var}
        y = axisnorm.normalize(x, case.scheme, weight, bias, mask=valid, **running)
        given = (wide(x), case.scheme, wide(weight), wide(bias))
        running = {name: t.double() for name, t in running.items()}
        assert_close(y.detach(), reference.forward(*given, mask=valid, **running)[0])
        grad = values(case.shape, dtype, seed=5)
        y.backward(grad)
        dx, dweight, dbias = reference.backward(grad.double(), *given, mask=valid, **running)
        assert_gradient_close(x.grad, dx, 4)
        if weight is not None:
            assert_gradient_close(weight.grad, dweight, 1000)
            assert_gradient_close(bias.grad, dbias, 100)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(4, 40, 7, 7), (1, 40, 4, 4), (2, 40, 3), (40, 40, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_lines_of_running_statistics_out_of_range(
    shape: tuple[int, ...], dtype: torch.dtype, activation: str | None
) -> None:
    """Short lines are taken in the order of memory; channels that float cannot hold are not."""
    mean, var = values((40,), seed=3).double(), values((40,), seed=4).abs().double() + 0.5
    mean[7], mean[39], var[20] = 2.0**110, -(2.0**112), 2.0**260
    x = values(shape, dtype, seed=1)
    x[:, 7], x[:, 39] = 2.0**110, -(2.0**111)
    weight, bias = values((40,), dtype, seed=5), values((40,), dtype, seed=6)
    weight[39] = 0
    y = axisnorm.batch_norm(x, mean, var, weight, bias, activation=activation)
    z = reference.forward(
        x.double(), Scheme.batch_norm().replace(statistics="running"), weight.double(),
        bias.double(), running_mean=mean, running_var=var,
    )[0]  # fmt: skip
    assert_close(y, z if activation is None else z.relu())
    # Such channels are read again after the others are written, so not where y stands.
    assert axisnorm.batch_norm(x, mean, var, weight, bias, activation=activation, out=x) is x
    assert torch.equal(x, y)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6])
@pytest.mark.parametrize(
    "text,shape",
    [
        ("n [c] h w", (2, 300, 5, 9)),
        ("[n] c h w", (400, 3, 4, 4)),
        ("[n] c [h w]", (4, 3, 200, 300)),
        ("n (g=2 [c]) [h w]", (1, 6, 200, 200)),
        ("[n c h w]", (2, 3, 200, 200)),
        ("[n] [h w] c", (3, 100, 100, 6)),
    ],
)
def test_offset_and_long_groups(
    text: str, shape: tuple[int, ...], mean: float, dtype: torch.dtype
) -> None:
    """Split means keep what a mean in the compute type would lose."""
    scheme = Scheme(text.replace("] [", " "))
    for _, x in layouts(values(shape, torch.float64).to(dtype) + mean):
        exact, _ = reference.forward(x.numpy().astype(np.longdouble), scheme)
        assert_close(axisnorm.normalize(x, scheme), torch.from_numpy(exact.astype(np.float64)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """Each float is the bias of a constant group once: ties, denormals, infinities, every NaN."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator, dtype=torch.int64)
    bits[0::8] &= ~0x7F800000  # denormal
    bits[1::8] |= 0x7FFFFFFF  # NaN, all bits
    bits[2::8] = bits[2::8] & ~0xFFFF | 0x8000  # halfway between two bfloat16
    bits[3::8] = bits[3::8] & 0x1FFF | 0x38801000 + (bits[3::8] & 0x3E000)  # and two float16
    bits[4::8] = 0x7F7FFFFF - bits[4::8] % 65536  # carried into infinity
    bias = bits.to(torch.int32).view(torch.float32)
    expected = bias.to(dtype)
    weight = torch.ones(4096)
    for text, shape, layout in (
        ("n [c]; affine=c", (3, 4096), torch.contiguous_format),
        ("n c [...]; affine=c", (2, 4096, 5, 5), torch.contiguous_format),
        ("n c [...]; affine=c", (2, 4096, 5, 5), torch.channels_last),
        ("[n] c; affine=c", (40, 4096), torch.contiguous_format),
        ("n (g=64 [c]) [...]; affine=g c", (2, 4096, 3, 3), torch.channels_last),
    ):
        for skipped in (0, 1, 15, 40):  # of the channels: they begin anywhere in a block
            if skipped and "g=" in text:
                continue
            kept = slice(skipped, 4096 - skipped)
            size = (shape[0], 4096 - 2 * skipped, *shape[2:])
            x = torch.full(size, 2.0, dtype=dtype).contiguous(memory_format=layout)
            y = axisnorm.normalize(x, Scheme(text), weight[kept], bias[kept])
            want = expected[kept].reshape((-1,) + (1,) * (len(size) - 2)).expand(size)
            assert torch.equal(y.isnan(), want.isnan())
            assert torch.equal(y.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_extremes_in_one_group(dtype: torch.dtype, layout: torch.memory_format) -> None:
    """Overflow, denormals, constants and NaN in some groups leave the others alone."""
    info = torch.finfo(dtype)
    for text in ("[n] c [h w]; affine=c", "n c [h w]; affine=c", "n [h] c w; affine=c"):
        case = Case(Scheme(text, eps=1e-5), (4, 6, 5, 7))
        x = values(case.shape, dtype).contiguous(memory_format=layout)
        x[:, 0] = x[:, 0].sign() * info.max * 0.5
        x[:, 1] = x[:, 1] * info.tiny
        x[:, 2] = 0.1
        x[:, 3] *= 1e-3
        x[1, 4] = float("nan")
        weight, bias = parameters(case, dtype)
        scheme = case.scheme
        y = axisnorm.normalize(x, scheme, weight, bias)
        exact = reference.forward(x.double(), scheme, wide(weight), wide(bias))[0]
        assert torch.equal(y.isnan(), exact.isnan())
        assert_close(y.nan_to_num(), exact.nan_to_num())
        x.requires_grad_()
        weight.requires_grad_()
        grad = values(case.shape, dtype, seed=2)
        axisnorm.normalize(x, scheme, weight, bias).backward(grad)
        dx, dweight, _ = reference.backward(
            grad.double(), x.detach().double(), scheme, wide(weight), wide(bias)
        )
        finite = dx.isfinite() & (dx.abs() < info.max)
        assert_gradient_close(
            torch.where(finite, x.grad, 0.0), torch.where(finite, dx, 0.0), 30,
            float(dx[finite].abs().max()),
        )  # fmt: skip
        fine = dweight.isfinite()
        assert torch.equal(weight.grad.isfinite(), fine)
        assert_gradient_close(weight.grad[fine], dweight[fine], 200)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", SCHEMES + MORE, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_bits_do_not_depend_on_threads(case: Case, layout: str) -> None:
    # Large enough for threads: the last axis is longer, if its size is free.
    shape = (*case.shape[:-1], case.shape[-1] * 40)
    try:
        case.scheme.layout(len(shape)).sizes(shape)
    except axisnorm.ArgumentError:
        shape = (case.shape[0] * 40, *case.shape[1:])
    case = Case(case.scheme, shape)
    x = dict(layouts(values(shape)))[layout]
    grad, found = values(shape, seed=1), []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        weight, bias = parameters(case)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        y = axisnorm.normalize(leaves[0], case.scheme, *leaves[1:])
        y.backward(grad)
        found.append([y.detach(), *[t.grad for t in leaves]])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    "text", ["n (g=4 [c]) [...]; affine=g c", "n c [...]; affine=c", "n [c] ...; affine=c"]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_group_does_not_depend_on_its_batch(text: str, layout: torch.memory_format) -> None:
    case = Case(Scheme(text), (9, 8, 6, 6))
    x = values(case.shape).contiguous(memory_format=layout).requires_grad_()
    weight, bias = parameters(case)
    grad = values(case.shape, seed=1).contiguous(memory_format=layout)
    y = axisnorm.normalize(x, case.scheme, weight, bias)
    (dx,) = torch.autograd.grad(y, x, grad)
    for i in range(9):
        one = x.detach()[i : i + 1].clone(memory_format=torch.preserve_format).requires_grad_()
        alone = axisnorm.normalize(one, case.scheme, weight, bias)
        assert torch.equal(alone, y[i : i + 1])
        assert torch.equal(torch.autograd.grad(alone, one, grad[i : i + 1])[0], dx[i : i + 1])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3, 14, 45])
def test_a_group_does_not_depend_on_the_groups_beside_it(dtype: torch.dtype, size: int) -> None:
    """Short groups are measured some at once, unless one of them is out of the type's range."""
    scheme = Scheme("n c [h w]; affine=c", eps=1e-40)
    x = values((1, 11, size, size), dtype)
    x[:, 5] *= 2.0**-60 if dtype == torch.float32 else 1
    x[:, 9] = float("nan")
    grad = values(x.shape, dtype, seed=1)
    weight, bias = values((11,), dtype, seed=2), values((11,), dtype, seed=3)

    def both(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x[:, part].clone().requires_grad_()
        y = axisnorm.normalize(leaf, scheme, weight[part], bias[part])
        return y.detach(), torch.autograd.grad(y, leaf, grad[:, part].clone())[0]

    y, dx = both(slice(None))
    for i in range(x.shape[1]):
        alone = both(slice(i, i + 1))
        assert torch.equal(alone[0].nan_to_num(), y[:, i : i + 1].nan_to_num())
        assert torch.equal(alone[1].nan_to_num(), dx[:, i : i + 1].nan_to_num())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3, 4, 7, 14])
@pytest.mark.parametrize(
    "text,samples,channels",
    [
        ("n c [h w]; affine=c", 2, 1),
        ("n c [h w]; affine=c; center=false", 2, 1),
        ("n (g=11 [c]) [h w]; affine=g c", 2, 18),
        ("[n] c [h w]; affine=c", 9, 1),
        ("[n] c [h w]; affine=c; rounding=before_affine", 18, 1),
    ],
)
def test_short_groups_at_once_have_the_bits_of_one_after_the_other(
    text: str, samples: int, channels: int, size: int, dtype: torch.dtype
) -> None:
    """A group that needs the slow path makes those beside it be taken one by one."""
    scheme = Scheme(text)
    x = values((samples, 11 * channels, size, size), dtype)
    grad = values(x.shape, dtype, seed=1)
    weight, bias = (values((x.shape[1],), dtype, seed=seed).requires_grad_() for seed in (2, 3))

    def everything(x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = axisnorm.normalize(leaf, scheme, weight, bias)
        return [y.detach(), *torch.autograd.grad(y, (leaf, weight, bias), grad)]

    beside = torch.arange(x.shape[1]) // channels != 5
    expected = everything(x, grad)
    for bad in (float("nan"), 2.0**120, 0.0):
        changed, other = x.clone(), grad.clone()
        changed[:, ~beside] *= bad
        other[:, ~beside] *= bad
        for found, right in zip(everything(changed, other), expected, strict=True):
            one = right.ndim == 1
            assert torch.equal(found[beside] if one else found[:, beside],
                               right[beside] if one else right[:, beside])  # fmt: skip


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "text,shape",
    [
        ("n c [l]", (3, 7, 197)),
        ("n (g=2 [c]) [l]", (3, 4, 50)),
        ("n c [l]; center=false", (3, 5, 33)),
        ("n c [l]; affine=l", (2, 2, 66_000)),
        ("n c [l]", (9, 1, 66_000)),
        ("n c [l]; affine=l", (9, 1, 66_000)),
    ],
)
@pytest.mark.parametrize("sliced", [False, True], ids=["", "sliced"])
def test_a_sample_that_is_rows_has_the_bits_of_its_batch_that_is_lines(
    text: str, shape: tuple[int, ...], dtype: torch.dtype, sliced: bool
) -> None:
    case = Case(Scheme(text), shape)
    weight, bias = parameters(case, dtype)
    wide = values((shape[0], shape[1] + 2 * sliced, shape[2]), dtype)
    x = wide[:, sliced : sliced + shape[1]]
    grad = values(shape, dtype, seed=1)

    def both(part: slice, short: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x[part].detach().requires_grad_()
        if short:
            trailing = (shape[-1],)
            y = axisnorm.layer_norm(leaf, trailing, weight, bias)
        else:
            y = axisnorm.normalize(leaf, case.scheme, weight, bias)
        return y.detach(), torch.autograd.grad(y, leaf, grad[part])[0]

    # The door of layer_norm reads rows itself.
    doors = (False, True) if text.startswith("n c [l]") and case.scheme.center else (False,)
    y, dx = both(slice(None), False)
    for short in doors:
        for i in range(shape[0]):
            alone = both(slice(i, i + 1), short)
            assert torch.equal(alone[0][0], y[i])
            assert torch.equal(alone[1][0], dx[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_constant_groups(dtype: torch.dtype, layout: torch.memory_format) -> None:
    """Exactly the bias, and no gradient for an upstream gradient that is constant, too."""
    for text, affine in (
        ("n c [h w]; affine=c", 6),
        ("[n] c [h w]; affine=c", 6),
        ("n (g=2 [c]) [h w]; affine=g c", 6),
        ("n [c] h w; affine=c", 6),
        ("[n] c h w; affine=c", 6),
    ):
        x = torch.full((3, 6, 5, 9), 1000.3333, dtype=dtype).contiguous(memory_format=layout)
        x.requires_grad_()
        weight = torch.full((affine,), 1.1, dtype=dtype, requires_grad=True)
        y = axisnorm.normalize(x, text, weight, torch.full((affine,), 3.0, dtype=dtype))
        assert (y == 3.0).all()
        y.backward(torch.full_like(x, 0.3))
        assert not x.grad.any() and not weight.grad.any()


def test_what_has_no_kernel() -> None:
    """Exactly these go through the reference, and say why."""
    found = {}
    for case in SCHEMES + MORE:
        route = _route.choose(case.scheme, case.shape)
        if route.engine == "reference":
            found[str(case.scheme)] = route.reason
    formula = "the formula is not rstd = 1 / sqrt(variance + eps)"
    assert found == {
        "... [d]; affine=d; eps=0.001; eps_placement=std": formula,
        "... [d]; affine=d; eps=0.3; eps_placement=max": formula,
        "... [d]; affine=d; center=false; scale=std; correction=1": formula,
        "... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max": formula,
        "... [d]; affine=d; scale=var; eps=0.01": formula,
        "... [d]; affine=d; scale=sqrt_std; correction=1": formula,
    }
    for scheme, shape, dtype, reason in (
        ("n [d]", (0, 4), "float32", "there is no element"),
        ("n [d]", (2, 4), "complex64", "no kernel for complex64"),
        (" ".join("abcdefghijklmnop") + " [q]", (1,) * 17, "float32",
         "more than 16 axes and parts of axes"),
    ):  # fmt: skip
        found_route = _route.choose(Scheme(scheme), shape, dtype)
        assert (found_route.engine, found_route.reason) == ("reference", reason)


def test_how_many_other_groups_there_are_changes_no_bits() -> None:
    """From 65536 elements beside each other on, short lines were taken one by one."""
    x, grad = (values((64, 17, 1000, 4), seed=seed) for seed in (1, 2))

    def results(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x[:, :samples].clone().requires_grad_()
        y = axisnorm.normalize(leaf, "[t] n c [l]")
        return y, torch.autograd.grad(y, leaf, grad[:, :samples])[0]

    whole = results(17)
    for samples in (1, 16):
        for one, other in zip(results(samples), whole, strict=True):
            assert torch.equal(one, other[:, :samples])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["... [d]", "... [d]; affine=d", "n [d] [s]"])
def test_a_group_of_one_element_does_not_depend_on_its_batch(text: str, dtype: torch.dtype) -> None:
    """One alone was a row, and several were lanes, whose derivative was rounded otherwise."""
    scheme = Scheme(text, center=False)
    shape = (40, 1, 1) if "s" in text else (40, 1)
    x, grad = values(shape, dtype), values(shape, dtype, 1)
    weight = torch.full((1,), 1.3) if scheme.affine else None

    def both(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x[part].clone().requires_grad_()
        y = axisnorm.normalize(leaf, scheme, weight)
        return y, torch.autograd.grad(y, leaf, grad[part])[0]

    whole = both(slice(None))
    for i in range(40):
        for one, other in zip(both(slice(i, i + 1)), whole, strict=True):
            assert torch.equal(one[0], other[i])


def test_rows_lines_and_lanes() -> None:
    reasons = {
        "rows": "each group is a row of contiguous elements",
        "lines": "each group is a set of contiguous lines",
        "lanes": "neighbours in memory belong to different groups",
    }
    for scheme, shape, loops in (
        (Scheme.layer_norm(), (8, 768), "rows"),
        (Scheme.batch_norm(), (8, 64, 7, 7), "lines"),
        (Scheme.group_norm(4), (8, 64, 7, 7), "lines"),
        (Scheme.layer_norm_2d(), (8, 64, 7, 7), "lanes"),
        (Scheme.batch_norm(), (8, 64), "lanes"),
        (Scheme.batch_norm(), (8, 64, 2, 2), "lanes"),
        (Scheme.batch_norm(), (8, 64, 4, 4), "lines"),
        (Scheme.batch_norm(), (32, 64, 4, 4), "lanes"),
    ):
        assert _route.choose(scheme, shape).reason == reasons[loops]
    sizes = Scheme.group_norm(4).layout(4).sizes((8, 64, 7, 7))
    channels_last = (64 * 49, 1, 7 * 64, 64)
    axes = _route.axes(sizes, True)
    assert _build.native.loops(axes, channels_last, False, False) == "lanes"


@pytest.mark.parametrize(
    "text,shape",
    [
        ("[a] [b]; affine=b", (400_000, 4)),
        ("n [h] [w]; affine=w", (2, 100_000, 8)),
        ("n [c] l; affine=c", (50_000, 4, 16)),
        ("n [h] w; affine=h w", (50_000, 4, 16)),
        ("[n] c; affine=c", (400_000, 4)),
    ],
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_gradients_summed_over_many_groups(text: str, shape: tuple[int, ...], masked: bool) -> None:
    scheme = Scheme(text.replace("[h] [w]", "[h w]").replace("[a] [b]", "[a b]"))
    x, grad = values(shape), torch.full(shape, 0.1)
    mask = torch.ones(shape, dtype=torch.bool) if masked else None
    weight, bias = parameters(Case(scheme, shape))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    axisnorm.normalize(x, scheme, weight, bias, mask=mask).backward(grad)
    exact = float(torch.tensor(0.1).double()) * x.numel() / bias.numel()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, exact), rtol=3e-7, atol=0)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("text", ["n c [h w]", "[n] c [h w]", "n (g=2 [c]) [h w]"])
def test_masked_gradients_of_float64_that_cancel(text: str) -> None:
    """They were summed without their rounding errors, those without a mask with them."""
    scheme = Scheme(text, affine="g c" if "g=" in text else "c")
    x, grad = (values((2, 4, 64, 128), torch.float64, seed) for seed in (1, 2))
    mask = values(x.shape, seed=3) > -1
    mean = (grad * mask).sum((0, 2, 3), keepdim=True) / mask.sum((0, 2, 3), keepdim=True)
    grad = grad - mean
    weight, bias = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    axisnorm.normalize(x, scheme, weight, bias, mask=mask).backward(grad)
    wide = [t.detach().numpy().astype(np.longdouble) for t in (grad, x, weight, bias)]
    _, *exact = reference.backward(*wide[:2], scheme, *wide[2:], mask=mask.numpy())
    for found, wanted in zip((weight.grad, bias.grad), exact, strict=True):
        assert abs(found.numpy() - wanted).max() < 2**-50 * (x.numel() / 4) ** 0.5


def test_running_statistics_whose_xhat_overflows() -> None:
    x, mean, var = torch.full((2, 1, 4), 2e37), torch.zeros(1), torch.full((1,), 1e-10)
    for layout in (x, x.expand(2, 1, 4).transpose(0, 2).contiguous().transpose(0, 2)):
        y = axisnorm.batch_norm(layout, mean, var, torch.zeros(1), torch.ones(1))
        assert (y == 1).all()
        y = axisnorm.batch_norm(layout, mean, var, torch.tensor([1e-10]), torch.ones(1))
        torch.testing.assert_close(y, torch.full_like(y, 2e27 / (1e-10 + 1e-5) ** 0.5))


def test_a_variance_beyond_float32_moves_the_running_one() -> None:
    x = torch.tensor([[2e19], [-2e19]])
    for given in (x, x.numpy()):
        like = torch.ones if given is x else np.ones
        mean, var = like(1) * 0, like(1)
        axisnorm.batch_norm(given, mean, var, training=True, momentum=0.1)
        assert float(var[0]) == pytest.approx(8e37, rel=1e-6)
    wide = torch.ones(1, dtype=torch.float64)
    axisnorm.batch_norm(x * 1e11, torch.zeros(1).double(), wide, training=True, momentum=0.1)
    assert float(wide) == pytest.approx(8e59, rel=1e-6)


@pytest.mark.parametrize("native", [True, False])
def test_the_mean_of_very_large_values_moves_the_running_one(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of 1e308 times a count is infinite."""
    if not native:
        monkeypatch.setattr(_route._build, "native", None)
    x = (
        torch.tensor([1e308, 0.5e308, 1.5e308], dtype=torch.float64)
        .reshape(3, 1, 1)
        .expand(3, 1, 2)
    )
    for norm in (
        lambda t, mean, var: axisnorm.batch_norm(t, mean, var, training=True, momentum=1.0),
        lambda t, mean, var: axisnorm.instance_norm(t, mean, var, momentum=1.0),
    ):
        for given in (x, x.numpy()):
            like = torch.ones if given is x else np.ones
            mean, var = (like(1, dtype=given.dtype) for _ in range(2))
            norm(given, mean, var)
            assert float(mean[0]) == pytest.approx(1e308, rel=1e-15)


FAMILY_OF_ROWS = {
    "layer_norm of a tuple": Member(lambda x, w, b: axisnorm.layer_norm(x, (4,), w, b), ROW),
    "rms_norm of a tuple": Member(lambda x, w: axisnorm.rms_norm(x, (4,), w), ROW[:2]),
    "add_layer_norm of a tuple": Member(
        lambda x, r, w, b: axisnorm.add_layer_norm(x, r, (4,), w, b, prenorm=True), SUM
    ),
}


@pytest.mark.parametrize("name", [*FAMILY, *FAMILY_OF_ROWS])
@pytest.mark.parametrize("gradient", ["contiguous", "transposed", "expanded", "differentiable"])
def test_saved_tensors_are_unpacked_once(name: str, gradient: str) -> None:
    """A checkpoint refuses to unpack one again, so a backward has one try, whatever its gradients."""
    member = {**FAMILY, **FAMILY_OF_ROWS}[name]
    tensors = member.tensors()
    wanted = member.outputs(*tensors)
    outputs = checkpoint(member.outputs, *tensors, use_reentrant=False)
    grads = []
    for y in wanted:
        grad = values(y.shape, y.dtype, 7)
        if gradient == "transposed":
            grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
        if gradient == "expanded":
            grad = torch.ones((), dtype=y.dtype).expand(y.shape)
        grads.append(grad)
    create = gradient == "differentiable"
    found = torch.autograd.grad(outputs, tensors, grads, create_graph=create)
    for a, b in zip(found, torch.autograd.grad(wanted, tensors, grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_running_statistics_that_share_memory_with_a_saved_tensor(masked: bool) -> None:
    x = values((8, 4)).requires_grad_()
    var = torch.full((4,), 5.0)
    weight = var.detach().requires_grad_()
    mask = torch.ones(8, 1, dtype=torch.bool) if masked else None
    y = axisnorm.batch_norm(x, torch.zeros(4), var, weight, None, True, 1.0, mask=mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().sum().backward()


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_running_statistics_may_move_before_backward(masked: bool) -> None:
    x, weight = values((8, 4)).requires_grad_(), values((4,), seed=1).requires_grad_()
    mask = torch.ones(8, 1, dtype=torch.bool) if masked else None
    found = []
    for moved in (False, True):
        mean, var = values((4,), seed=2), torch.full((4,), 5.0)
        y = axisnorm.batch_norm(x, mean, var, weight, mask=mask)
        if moved:
            axisnorm.batch_norm(x.detach(), mean, var, training=True)
        found.append(torch.autograd.grad(y.square().sum(), (x, weight)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_what_was_saved_of_out_is_gone() -> None:
    for scheme in ("n [d]", "[n] d", "n [d]; eps_placement=std"):
        x, out = values((8, 4)), torch.zeros(8, 4)
        scale = torch.ones(8, 4, requires_grad=True)
        product = (scale * out).sum()
        axisnorm.normalize(x, scheme, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("shape", [(3, 2, 40), (5, 2)], ids=["lines", "lanes"])
@pytest.mark.parametrize(
    "x,mean,var", [(3e38, -3e38, 1e38), (1e30, 0.0, 1e80), (1e-38, 0.0, 1e-90)]
)
def test_running_statistics_beyond_float32(
    x: float, mean: float, var: float, shape: tuple[int, ...], masked: bool
) -> None:
    """x - mean, or one over the deviation, overflows or is denormal, and y is not."""
    scheme = Scheme("[n] c [...]; affine=c; statistics=running; eps=0")
    given = torch.full(shape, x).requires_grad_()
    weight = torch.full((2,), 1e-6 if var < 1e-45 else 1.0, dtype=torch.float64).requires_grad_()
    running = {
        "running_mean": torch.full((2,), mean, dtype=torch.float64),
        "running_var": torch.full((2,), var, dtype=torch.float64),
    }
    mask = torch.ones(shape, dtype=torch.bool) if masked else None
    y = axisnorm.normalize(given, scheme, weight, mask=mask, **running)
    args = given.detach().double(), scheme, weight.detach()
    assert_close(y.detach(), reference.forward(*args, mask=mask, **running)[0])
    size = 1e30 if var > 1e45 else 1e-30 if var < 1e-45 else 1.0
    grad = values(shape, seed=3) * size
    found = torch.autograd.grad(y, (given, weight), grad)
    exact = reference.backward(grad.double(), *args, mask=mask, **running)
    for a, b in zip(found, exact, strict=False):
        assert b is not None
        assert_gradient_close(a, b, given.numel(), float(b.abs().max()))


@needs_short_way
def test_a_bias_may_change_before_backward() -> None:
    x = values((3, 4, 5)).requires_grad_()
    weight, bias = torch.ones(4, requires_grad=True), torch.randn(4, requires_grad=True)
    for norm in (
        lambda: axisnorm.group_norm(x, 2, weight, bias),
        lambda: axisnorm.instance_norm(x, None, None, weight, bias),
        lambda: axisnorm.batch_norm(x, None, None, weight, bias, True),
    ):
        y = norm()
        with torch.no_grad():
            bias.add_(1)
        grads = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert torch.equal(grads[2], torch.full((4,), 15.0))


@pytest.mark.usefixtures("isa")
def test_lanes_with_one_large_step() -> None:
    x = torch.zeros(1, 1000, 16)
    x[:, 0] = 1e5
    scheme = Scheme.layer_norm_2d()
    assert_close(axisnorm.normalize(x, scheme), reference.forward(x.double(), scheme)[0])
    ones = torch.full((100_000, 16), 0.1, dtype=torch.float64)
    y = axisnorm.normalize(ones, "[n] d; center=false; eps=0")
    assert_close(y, torch.ones_like(y), 4)


def test_the_deviations_of_lanes_are_rounded_once() -> None:
    """Of many variances at once roots are estimated, and made better until floats do not show it."""
    deviation = torch.arange(1, 512).float().outer(2.0 ** torch.arange(-30, 30, 4)).flatten()
    x = torch.stack((deviation, -deviation) * 8).expand(2, 16, -1)  # all sums are exact
    _, var, rstd = axisnorm.statistics(x, "n [c] l; eps=0")
    assert torch.equal(var.squeeze(), deviation.square().expand(2, -1))
    assert torch.equal(rstd.squeeze(), (1 / deviation.double()).float().expand(2, -1))


def test_masked_constants_in_float64() -> None:
    for text, shape in (
        ("[n] d", (1000, 7)),
        ("n [c] l", (5, 96, 3)),
        ("[n] c [l]; affine=c l", (4, 5, 9)),
    ):
        x = torch.full(shape, 0.1, dtype=torch.float64, requires_grad=True)
        mask = values(shape, seed=1) < 0
        axisnorm.normalize(x, text, mask=mask).backward(torch.full_like(x, 1.1))
        assert not x.grad.any()


def running_statistics(
    scheme: Scheme, shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those that the scheme takes, if it takes any."""
    if scheme.statistics != "running":
        return None, None
    size = scheme.layout(len(shape)).sizes(shape).running_shape
    return values(size, seed=2), values(size, seed=3).abs()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text,shape,channels_last",
    [
        ("... [d]; affine=d", (7, 64), False),
        ("... [d]; affine=d", (5, 70), False),
        ("... [d]; affine=d", (5, 1100), False),
        ("n c [...]; affine=c", (3, 5, 8, 8), False),
        ("n (g=4 [c]) [...]; affine=g c", (2, 64, 3, 3), True),
        ("[n] c [...]; affine=c", (2, 64, 5, 5), True),
        ("[n] c [...]; affine=c; statistics=running", (3, 5, 8, 8), False),
        ("[n] c [...]; affine=c; statistics=running", (2, 64, 5, 5), True),
        ("n [c] ...; affine=c", (2, 6, 16, 8), False),
    ],
)
def test_writing_past_the_caches_gives_the_same_bits(
    text: str, shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    scheme, x = Scheme(text), values(shape, dtype).contiguous(memory_format=layout)
    weight, bias = (t.to(dtype).requires_grad_() for t in parameters(Case(scheme, shape)))
    grad = values(shape, dtype, seed=1).contiguous(memory_format=layout)
    mean, var = running_statistics(scheme, shape)
    found = []
    for limit in (1 << 60, 0):
        before = _build.native.stream_from(limit)
        try:
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = axisnorm.normalize(leaf, scheme, weight, bias, running_mean=mean, running_var=var)
            y.backward(grad)
            # An output whose lines do not stand at whole vectors.
            out = torch.full((x.numel() + 1,), 7.0, dtype=dtype)
            beside = out[1:].view(shape) if not channels_last else None
            with torch.no_grad():
                axisnorm.normalize(
                    x, scheme, weight, bias, running_mean=mean, running_var=var, out=beside
                )
        finally:
            _build.native.stream_from(before)
        found.append((y.detach(), leaf.grad, out))
    for stored, streamed in zip(*found, strict=True):
        assert torch.equal(stored, streamed)
    assert torch.isfinite(found[1][0]).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text,shape,channels_last",
    [
        ("... [d]; affine=d", (7, 70), False),
        ("... [d]; affine=d", (7, 1100), False),
        ("... [d]", (7, 70), False),
        ("n c [...]; affine=c", (3, 5, 8, 9), False),
        ("n (g=4 [c]) [...]; affine=g c", (5, 64, 3, 3), False),
        ("[n] c [...]; affine=c", (3, 6, 5, 5), False),
        ("n [c] ...; affine=c", (3, 6, 16, 8), False),
        ("[n] c [...]; affine=c; statistics=running", (3, 6, 5, 5), False),
        # Blocks of 12, 8, 6, 4, 2 and 1 vectors, a tail, and too many for the first cache.
        ("[n] c [...]; affine=c", (2, 531, 5, 5), True),
        ("[n] c [...]; affine=c", (2, 700, 3, 3), True),
        ("[n] c [...]; affine=c; rounding=before_affine", (2, 96, 5, 5), True),
        ("[n] c [...]; affine=c; statistics=running", (2, 200, 5, 5), True),
        ("n (g=4 [c]) [...]; affine=g c", (2, 64, 5, 5), True),
        ("n (g=4 [c]) [...]; affine=g", (2, 64, 5, 5), True),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_reading_one_row_after_another_gives_the_same_bits(
    text: str,
    shape: tuple[int, ...],
    channels_last: bool,
    dtype: torch.dtype,
    activation: str | None,
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    scheme, x = Scheme(text), values(shape, dtype).contiguous(memory_format=layout)
    grad = values(shape, dtype, seed=1).contiguous(memory_format=layout)
    weight, bias = (
        t if t is None else t.to(dtype).requires_grad_() for t in parameters(Case(scheme, shape))
    )
    mean, var = running_statistics(scheme, shape)
    found = []
    for limit in (1 << 60, 0):
        before = _build.native.read_singly_from(limit)
        try:
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = axisnorm.normalize(
                leaf,
                scheme,
                weight,
                bias,
                running_mean=mean,
                running_var=var,
                activation=activation,
            )
            y.backward(grad)
            z = axisnorm.add_layer_norm(x, grad, shape[-1:])
        finally:
            _build.native.read_singly_from(before)
        found.append((y.detach(), leaf.grad, z))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert found[0][1].any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["n c [...]; affine=c", "n (g=2 [c]) [...]; affine=g c"])
def test_where_a_line_begins_in_memory_does_not_change_its_bits(
    text: str, dtype: torch.dtype
) -> None:
    """Whole vectors are written where vectors stand, and single elements before them."""
    shape, scheme = (2, 6, 13, 21), Scheme(text)
    x = values(shape, dtype)
    weight, bias = (t.to(dtype) for t in parameters(Case(scheme, shape)))
    aligned = axisnorm.normalize(x, scheme, weight, bias)
    for first in range(1, 18):
        out = torch.full((x.numel() + 18,), 7.0, dtype=dtype)
        axisnorm.normalize(x, scheme, weight, bias, out=out[first:][: x.numel()].view(shape))
        assert torch.equal(out[first:][: x.numel()].view(shape), aligned)
        assert (out[:first] == 7).all() and (out[first + x.numel() :] == 7).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_sums_that_overflow_on_the_way_but_cancel(dtype: torch.dtype, masked: bool) -> None:
    """dweight and dbias were NaN or infinite where a partial sum exceeds the type that sums."""
    largest = torch.finfo(dtype).max
    for case in (
        Case(Scheme("... [d]; affine=d"), (600, 40)),
        Case(Scheme("... [d]; affine=d; center=false; rounding=before_affine"), (10, 33)),
        Case(Scheme("n c [...]; affine=c"), (4, 5, 10, 10)),
        Case(Scheme("[n] c [l]; affine=c l"), (8, 3, 40)),
        Case(Scheme("n [c] ...; affine=c"), (2, 12, 10, 20)),
        Case(Scheme("n [c] l; affine=c l"), (4, 12, 20)),
        Case(Scheme("[n] c; affine=c"), (64, 40)),
        Case(Scheme("n (g=4 [c]) [...]; affine=g c"), (2, 12, 6, 6)),
    ):
        half = (case.shape[0] + 1) // 2
        x = values((half, *case.shape[1:]), dtype)
        grad = values(x.shape, dtype, 3).sign() * (largest * 0.9)
        # The second half takes away what the first one has added; so the rest is what remains.
        x = torch.cat([x, x])[: case.shape[0]].requires_grad_()
        grad = torch.cat([grad, -grad])[: case.shape[0]]
        grad[0] = grad[0] * (1 - 1 / 64)
        valid = torch.ones(case.shape, dtype=torch.bool) if masked else None
        weight, bias = (torch.nn.Parameter(t) for t in parameters(case, torch.float64))
        y = axisnorm.normalize(x, case.scheme, weight, bias, mask=valid)
        found = torch.autograd.grad(y, (weight, bias), grad)
        scaled = 2.0**-64
        _, *true = reference.backward(
            grad.double() * scaled, x.detach().double(), case.scheme, weight, bias
        )
        for actual, exact in zip(found, true, strict=True):
            wanted = exact / scaled
            assert bool(wanted.isfinite().all())
            error = (actual - wanted).abs().max()
            # Of the terms, which are up to a few times as large as the gradient.
            own = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
            half_units = torch.finfo(dtype).eps if "before" in str(case.scheme) else 0.0
            size = float(grad.double().abs().max()) * x.numel() / weight.numel()
            assert error <= (8 * own + half_units) * size
