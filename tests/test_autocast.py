"""Mixed precision: which type comes out, against torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_close, values
from torch import Tensor
from torch._subclasses import FakeTensorMode

import axisnorm

NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda m, x, w, b: m.layer_norm(x, (4,), w, b),
    "rms_norm": lambda m, x, w, b: m.rms_norm(x, (4,), w),
    "group_norm": lambda m, x, w, b: m.group_norm(x, 2, w, b),
    "instance_norm": lambda m, x, w, b: m.instance_norm(x.mT[None], None, None, w, b),
    "batch_norm, training": lambda m, x, w, b: m.batch_norm(x, None, None, w, b, True),
    "batch_norm, moving": lambda m, x, w, b: m.batch_norm(
        x, torch.zeros(4), torch.ones(4), w, b, True
    ),
    "batch_norm": lambda m, x, w, b: m.batch_norm(x, torch.zeros(4), torch.ones(4), w, b),
}
OTHERS: dict[str, Callable[..., Tensor]] = {
    "layer_norm_2d": lambda m, x, w, b: m.layer_norm_2d(x[..., None, None], w, b),
    "add_layer_norm": lambda m, x, w, b: m.add_layer_norm(x, x, 4, w, b),
    "normalize": lambda m, x, w, b: m.normalize(x, "[n] d; affine=d; eps_placement=std", w, b),
    "mask": lambda m, x, w, b: m.layer_norm(x, 4, w, b, mask=x > -1),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_what_torch_takes_comes_out_as_from_torch(norm: Any, autocast: torch.dtype | None) -> None:
    """Every pair of types that torch takes: the same type; those that it refuses: the input's."""
    taken = 0
    for dtype in DTYPES:
        for parameter in DTYPES:
            x, w, b = (
                values((3, 4), dtype),
                values((4,), parameter, 1),
                values((4,), parameter, 2),
            )
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                y = norm(axisnorm, x, w, b)
                try:
                    wanted = norm(F, x, w, b).dtype
                except RuntimeError:
                    wanted = dtype
                else:
                    taken += 1
            assert y.dtype == wanted == dtype
            assert_close(y, norm(axisnorm, x.double(), w.double(), b.double()))
    assert taken >= 3


@pytest.mark.parametrize("norm", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_norms_that_torch_has_not_do_as_layer_norm(norm: Any, autocast: torch.dtype) -> None:
    for dtype in DTYPES:
        x, w, b = values((3, 4), dtype), values((4,), seed=1), values((4,), seed=2)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        with torch.autocast("cpu", autocast):
            y = norm(axisnorm, *leaves)
        assert y.dtype == dtype and torch.equal(y, norm(axisnorm, *leaves))
        y.sum().backward()
        assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_types_on_an_accelerator_are_torchs(name: str, autocast: torch.dtype) -> None:
    """Some of torch's norms leave the half types there. No accelerator is needed to see it."""
    enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        for dtype in (torch.float32, autocast):
            x = torch.empty(3, 4, device="cuda", dtype=dtype)
            w, b = torch.empty(2, 4, device="cuda")
            for on in (False, True):
                torch.set_autocast_enabled("cuda", on)
                torch.set_autocast_dtype("cuda", autocast)
                try:
                    found, wanted = (NORMS[name](m, x, w, b).dtype for m in (axisnorm, F))
                except RuntimeError:  # torch refuses the pair of types
                    assert not on and dtype != torch.float32
                    continue
                finally:
                    torch.set_autocast_enabled("cuda", enabled)
                    torch.set_autocast_dtype("cuda", before)
                assert found == wanted, (dtype, on)


def test_autocast_under_compile() -> None:
    """A product of half type is normalized by parameters of float32, in eager and compiled."""
    torch._dynamo.reset()
    linear, norm = torch.nn.Linear(4, 4), axisnorm.nn.LayerNorm(4)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return norm(linear(x))

    x = values((3, 4))
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, run(x))
    found = torch.autograd.grad(y.float().sum(), norm.weight)[0]
    assert found.dtype == torch.float32
