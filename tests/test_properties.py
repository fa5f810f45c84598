"""Random schemes, shapes, layouts, types and masks against float64."""

from __future__ import annotations

import torch
from cases import DTYPES, assert_close, assert_gradient_close
from hypothesis import given, settings
from hypothesis import strategies as st

import axisnorm
from axisnorm import Scheme, reference


@st.composite
def problems(draw: st.DrawFn) -> tuple[Scheme, torch.Tensor, list[torch.Tensor | None], bool]:
    """A scheme, an input of any layout and type, weight and bias, and whether to mask."""
    words, shape, names, reduced = [], [], [], []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        inside = draw(st.booleans())
        if draw(st.integers(0, 3)) == 0:
            outer, inner = draw(st.integers(1, 4)), draw(st.integers(1, 5))
            deep = draw(st.booleans()) and not inside
            word = f"({name}={outer} {f'[{name}x]' if deep else f'{name}x'})"
            names += [name, f"{name}x"]
            shape.append(outer * inner)
            reduced.append(inside or deep)
        else:
            word = name
            names.append(name)
            shape.append(draw(st.integers(1, 9)))
            reduced.append(inside)
        words.append(f"[{word}]" if inside else word)
    if not any(reduced):
        words.append("[z]")
        names.append("z")
        shape.append(draw(st.integers(1, 70)))
    affine = " ".join(name for name in names if draw(st.booleans()))
    scheme = Scheme(
        " ".join(words),
        affine,
        center=draw(st.booleans()),
        scale=draw(st.sampled_from(["auto", "auto", "auto", "std", "l2", "var", "sqrt_std"])),
        eps=draw(st.sampled_from([1e-5, 1e-12, 0.1, None])),
        eps_placement=draw(st.sampled_from(["variance", "variance", "std", "max"])),
        weight_offset=draw(st.sampled_from([0.0, 1.0])),
    )
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    order = draw(st.permutations(range(len(shape))))
    x = random(tuple(shape[i] for i in order)).permute(sorted(order, key=order.__getitem__))
    x = x * draw(st.sampled_from([1.0, 1.0, 100.0])) + draw(st.sampled_from([0.0, 0.0, 50.0]))
    if draw(st.booleans()):
        x = torch.stack([x, x], -1)[..., 0]
    assert list(x.shape) == shape or sorted(x.shape) == sorted(shape)
    x = x.reshape(shape) if list(x.shape) != shape else x
    sizes = scheme.layout(x.dim()).sizes(x.shape).affine_shape
    parameters = [random(sizes) if affine and draw(st.booleans()) else None for _ in range(2)]
    return scheme, x, parameters, draw(st.booleans())


@given(problems())
@settings(max_examples=300, deadline=None)
def test_forward_and_backward(
    problem: tuple[Scheme, torch.Tensor, list[torch.Tensor | None], bool],
) -> None:
    scheme, x, (weight, bias), masked = problem
    mask = (x > x.double().median()) if masked else None
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    given = iter(leaves[1:])
    w = next(given) if weight is not None else None
    b = next(given) if bias is not None else None
    y = axisnorm.normalize(leaves[0], scheme, w, b, mask=mask)
    exact = scheme.replace(eps=reference.resolve_eps(scheme, x.dtype))
    wide = [None if t is None else t.double() for t in (weight, bias)]
    correct, _ = reference.forward(x.double(), exact, *wide, mask=mask)
    # A group of very small variance multiplies the rounding of its own mean.
    assert_close(y.detach(), correct, 8.0)
    grad = torch.ones_like(x) + x * 0.01
    found = torch.autograd.grad(y, leaves, grad)
    gradients = reference.backward(grad.double(), x.double(), exact, *wide, mask=mask)
    _, moments = reference.forward(x.double(), exact, mask=mask)
    steepest = float(moments.rstd.abs().max()) * float(
        (1 + (wide[0].abs().max() if wide[0] is not None else 1)) * grad.double().abs().max()
    )
    scales = iter((steepest, None, None))
    for actual, wanted in zip(found, (g for g in gradients if g is not None), strict=True):
        scale = next(scales)
        largest = max(scale or 0.0, float(wanted.abs().max()), float(correct.abs().max()))
        assert_gradient_close(actual, wanted, x.numel() * 4, largest * x.numel() ** 0.5)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=80)
)
@settings(max_examples=300, deadline=None)
def test_every_finite_row(row: list[float]) -> None:
    x = torch.tensor([row])
    for scheme in (Scheme("n [d]; eps=0"), Scheme("n [d]"), Scheme("n [d]; center=false; eps=0")):
        y = axisnorm.normalize(x, scheme)
        assert y.isfinite().all()
        assert_close(y, reference.forward(x.double(), scheme)[0])


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_finite_row_in_float64(row: list[float], center: bool) -> None:
    import numpy as np

    x = torch.tensor([row], dtype=torch.float64)
    scheme = Scheme("n [d]; eps=0", center=center)
    y = axisnorm.normalize(x, scheme)
    with np.errstate(all="ignore"):
        correct = reference.forward(x.numpy().astype(np.longdouble), scheme)[0]
    assert_close(y, torch.from_numpy(correct.astype(np.float64)))
