"""What the tests and the benchmarks normalize: schemes, shapes, layouts, types, tolerances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from axisnorm import Scheme

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A scheme with a shape that it fits."""

    scheme: Scheme
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.scheme}|{'x'.join(map(str, self.shape))}"


SCHEMES = tuple(
    Case(Scheme(text), shape)
    for text, shape in (
        ("... [d]; affine=d", (6, 33)),
        ("... [d]; affine=d", (2, 3, 129)),
        ("... [s d]; affine=s d", (3, 5, 7)),
        ("... [d]; affine=d; center=false; eps=none", (6, 40)),
        ("... [d]; affine=d; center=false; eps=1e-6; weight_offset=1", (5, 64)),
        ("... [d]; affine=d; center=false; eps=1e-6; rounding=before_affine", (5, 64)),
        ("... [d]; affine=d; rounding=before_affine", (5, 31)),
        ("... [d]; affine=d; correction=1; eps=1e-3", (4, 17)),
        ("... [d]; affine=d; eps=1e-3; eps_placement=std", (4, 17)),
        ("... [d]; affine=d; eps=0.3; eps_placement=max", (4, 17)),
        ("... [d]; affine=d; center=false; scale=std; correction=1", (4, 17)),
        ("... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max", (4, 17)),
        ("... [d]; affine=d; scale=var; eps=1e-2", (4, 17)),
        ("... [d]; affine=d; scale=sqrt_std; correction=1", (4, 17)),
        ("n (g=4 [c]) [...]; affine=g c", (2, 8, 3, 5)),
        ("n (g=4 [c]) [...]; affine=g", (2, 8, 3, 5)),
        ("n (g=4 [c]) [h w]", (2, 8, 3, 5)),
        ("n c [...]; affine=c", (2, 6, 4, 5)),
        ("n c [...]", (2, 6, 4, 5)),
        ("[n] c [...]; affine=c", (4, 6, 3, 3)),
        ("n [c ...]; affine=c", (3, 4, 2, 2)),
        ("n [c] ...; affine=c; eps=1e-6", (2, 12, 3, 4)),
        ("[b] s [d]; affine=s", (3, 4, 8)),
        ("b s [d]; affine=b d", (2, 3, 16)),
        ("b s (h=3 [d]); affine=h d", (2, 3, 24)),
        ("b s (h=3 [d]); affine=d", (2, 3, 24)),
        ("n [(c=2) d]", (5, 2, 9)),
    )
)


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values in memory laid out in every way that matters."""
    yield "contiguous", x
    yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    yield "sliced", wide[..., : x.shape[-1]]
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    yield "offset by one element", shifted.copy_(x)
    doubled = torch.stack([x, torch.full_like(x, float("nan"))], 1)
    yield "every second row", doubled[:, 0]
    if x.dim() == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        yield "channels_last_3d", x.contiguous(memory_format=torch.channels_last_3d)


def parameters(
    case: Case, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A weight and a bias for the case, None where it has no affine axes."""
    if not case.scheme.affine:
        return None, None
    shape = case.scheme.layout(len(case.shape)).sizes(case.shape).affine_shape
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    return weight.to(dtype), bias.to(dtype)


def values(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Standard normal values of a type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def epsilon(dtype: torch.dtype) -> float:
    """The distance between 1 and the next number of the type."""
    return torch.finfo(dtype).eps


def assert_close(
    actual: torch.Tensor, exact: torch.Tensor, ulps: float = 4.0, scale: float | None = None
) -> None:
    """An output against the exact one, given in a wider type.

    float32 and float64: within ``ulps`` units in the last place of the largest output or of
    ``scale``. Half types: correctly rounded up to 2 % of half a unit, beside the float32 error.
    """
    assert actual.shape == exact.shape
    if exact.numel() == 0:
        return
    error = _error(actual, exact)
    largest = exact.abs().max() if scale is None else torch.tensor(scale)
    info = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32)
    allowed = ulps * info.eps * largest.clamp_min(info.smallest_normal)
    if actual.dtype in (torch.float16, torch.bfloat16):
        info = torch.finfo(actual.dtype)
        exponent = torch.frexp(exact.abs().clamp_min(info.smallest_normal))[1] - 1
        allowed = allowed + 0.51 * info.eps * 2.0**exponent
    worst = (error - allowed).max()
    assert worst <= 0, f"off by {error.max():.3g} where {largest:.3g} is the largest output"


def assert_gradient_close(
    actual: torch.Tensor, exact: torch.Tensor, summed: int, scale: float | None = None
) -> None:
    """A gradient that sums ``summed`` terms, relative to its largest element or to ``scale``."""
    assert actual.shape == exact.shape
    if exact.numel() == 0:
        return
    own = epsilon(actual.dtype)
    wide = epsilon(torch.float64 if actual.dtype == torch.float64 else torch.float32)
    largest = float(exact.abs().max()) if scale is None else scale
    allowed = largest * (0.51 * own * (own != wide) + wide * (8 + summed**0.5))
    error = float(_error(actual, exact).max())
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def _error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The distance of each element; none where the exact value is too large for the type, and
    the actual one infinite."""
    overflow = exact.abs() >= torch.finfo(actual.dtype).max
    actual = actual.to(exact.dtype)
    return torch.where(
        overflow & (actual == exact.sign() * float("inf")), 0.0, (actual - exact).abs()
    )


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """The same bits as an array (bfloat16 through ml_dtypes)."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_numpy(x: np.ndarray) -> torch.Tensor:
    """The inverse of :func:`to_numpy`."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
