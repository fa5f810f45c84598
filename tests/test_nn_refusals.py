"""Bad input to a module: which module it was, both shapes, torch's type, and nothing changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import values

import axisnorm
from axisnorm import ArgumentError, DtypeError, nn

# A module, its good shape, one of other channels with what the message says of the module's own,
# and one of another rank (None: any will do).
MODULES: tuple[tuple[Callable[[], torch.nn.Module], Any, Any, str, Any], ...] = (
    (lambda: nn.LayerNorm((4, 8)), (3, 4, 8), (3, 4, 7), "[4, 8]", (8,)),
    (lambda: nn.RMSNorm(8), (3, 8), (3, 7), "[8]", ()),
    (lambda: nn.GroupNorm(2, 8), (3, 8, 5), (3, 6, 5), "(8,)", (8,)),
    (lambda: nn.GroupNorm(2, 8, affine=False), (3, 8, 5), (3, 6, 5), "8 channels", (8,)),
    (lambda: nn.BatchNorm1d(8), (3, 8), (3, 7), "(8,)", (3, 8, 2, 2)),
    (lambda: nn.BatchNorm2d(8, momentum=None), (3, 8, 5, 2), (3, 7, 5, 2), "(8,)", (3, 8)),
    (lambda: nn.BatchNorm2d(8).eval(), (3, 8, 5, 2), (3, 7, 5, 2), "(8,)", (3, 8)),
    (lambda: nn.BatchNorm3d(8, affine=False), (3, 8, 2, 3, 2), (3, 7, 2, 3, 2), "(8,)", (3, 8)),
    (lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False), (3, 8), (3, 7),
     "8 channels", (8,)),
    (lambda: nn.InstanceNorm1d(8), (3, 8, 5), (3, 7, 5), "8 channels", (8,)),
    (lambda: nn.InstanceNorm1d(8), (8, 5), (7, 5), "8 channels", (8,)),
    (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), (3, 8, 5, 2),
     (3, 7, 5, 2), "8 channels", (8, 5)),
    (lambda: nn.InstanceNorm3d(8), (3, 8, 2, 3, 2), (3, 7, 2, 3, 2), "8 channels", (8, 5)),
    (lambda: nn.LayerNorm2d(8), (3, 8, 5, 2), (3, 7, 5, 2), "8 channels", (8,)),
    (lambda: nn.LayerNorm2d(8, affine=False), (3, 8, 5, 2), (3, 7, 5, 2), "8 channels", (8,)),
    (lambda: nn.AddLayerNorm(8, dropout_p=0.5), (3, 8), (3, 7), "[8]", ()),
    (lambda: nn.AddRMSNorm(8, dropout_p=0.5), (3, 8), (3, 7), "[8]", ()),
    (lambda: nn.Norm("n [c] l; affine=c", sizes={"c": 8}), (3, 8, 5), (3, 7, 5), "c=8", (8,)),
    (lambda: nn.Norm("[n] c [l]; affine=c", sizes={"c": 8}, track_running_stats=True),
     (3, 8, 5), (3, 7, 5), "c=8", (8,)),
)  # fmt: skip
Modules = pytest.mark.parametrize(
    ("make", "good", "channels", "own", "rank"), MODULES, ids=[repr(m[0]()) for m in MODULES]
)


class Block(torch.nn.Module):
    """A norm at ``layers.1.norm``, which may take two inputs."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Module()])
        self.layers[1].norm = norm

    def forward(self, x: Any, mask: Any = None) -> torch.Tensor:
        norm = self.layers[1].norm
        x = self.layers[0](x)
        added = isinstance(norm, (nn.AddLayerNorm, nn.AddRMSNorm))
        return norm(x, x, mask) if added else norm(x, mask)


def refusal(model: torch.nn.Module, *args: Any) -> Exception:
    """The error, after which parameters, statistics, counters and the generator are as before."""
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fields = [dict(vars(m)) for m in model.modules()]
    with pytest.raises((ArgumentError, DtypeError)) as found:
        model(*args)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) and value._version == before[key]._version
    assert torch.equal(torch.get_rng_state(), random)
    assert [dict(vars(m)) for m in model.modules()] == fields
    return found.value


def torchs_error(norm: torch.nn.Module, *args: Any) -> type[Exception]:
    """The type that torch's module raises, Exception where it has none or raises nothing."""
    twin = getattr(torch.nn, type(norm).__name__, None)
    if twin is None:
        return Exception
    module = copy.deepcopy(norm)
    module.__class__ = twin
    try:
        module(*args)
    except Exception as error:
        return type(error)
    return Exception


@Modules
@pytest.mark.filterwarnings("ignore:input's size at dim:UserWarning")
def test_shapes(make: Any, good: Any, channels: Any, own: str, rank: Any) -> None:
    model = Block(make())
    norm = model.layers[1].norm
    x = values(channels)
    error = refusal(model, x)
    assert str(error).startswith(f"In layers.1.norm ({type(norm).__name__}): ")
    shape = channels if len(channels) > 2 or "In" not in str(own) else channels[1:]
    assert str(shape) in str(error) and own in str(error)
    assert isinstance(error, torchs_error(norm, x))
    error = refusal(model, values(rank))
    assert "layers.1.norm" in str(error) and str(rank) in str(error)
    assert isinstance(error, torchs_error(norm, values(rank)))
    model(values(good))


@Modules
def test_types_and_values(make: Any, good: Any, channels: Any, own: str, rank: Any) -> None:
    model = Block(make())
    norm = model.layers[1].norm
    place = re.escape(f"In layers.1.norm ({type(norm).__name__}): ")
    x = values(good)
    for bad in (x.int(), x > 0, torch.complex(x, x)):
        if bad.is_complex() and isinstance(norm, nn.RMSNorm):
            continue  # torch's own function takes it
        error = refusal(model, bad)
        assert isinstance(error, DtypeError) and re.match(place + ".*" + str(bad.dtype), str(error))
    mask = torch.ones(9, dtype=torch.bool)
    error = refusal(model, x, mask)
    assert isinstance(error, ArgumentError) and re.match(place + r".*\(9,\)", str(error))
    assert ", ".join(map(str, good)) + ")" in str(error)
    assert isinstance(refusal(model, x, x), DtypeError)
    if norm.state_dict():
        error = refusal(model, x.to("meta"))
        assert isinstance(error, ArgumentError) and re.match(place + ".*meta.*cpu", str(error))
    if hasattr(norm, "eps"):
        for eps in (float("nan"), float("inf"), "small"):
            norm.eps = eps
            error = refusal(model, x)
            assert isinstance(error, ArgumentError) and re.match(place + "eps is a", str(error))


@Modules
def test_not_a_tensor(make: Any, good: Any, channels: Any, own: str, rank: Any) -> None:
    model = Block(make())
    for bad in (None, [1.0], 3.0):
        assert isinstance(refusal(model, bad), DtypeError)
    if list(model.parameters()):
        model.eval()  # without dropout, of which arrays are refused first
        assert isinstance(refusal(model, np.ones(good, np.float32)), DtypeError)


def test_the_place_is_known_where_the_error_has_left_it() -> None:
    bad = values((3, 7))
    norm = nn.LayerNorm(8)
    with pytest.raises(ArgumentError, match=r"^In LayerNorm: The input ends in"):
        norm(bad)
    with pytest.raises(ArgumentError, match=r"^The input ends in"):
        axisnorm.layer_norm(bad, 8)

    class Caller(torch.nn.Module):
        """A module that calls the function."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return axisnorm.layer_norm(x, 8)

    class Careful(torch.nn.Module):
        """A module that goes on after an error."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(norm)

        def forward(self, x: torch.Tensor) -> str:
            try:
                self.inner(x)
            except ArgumentError as error:
                return str(error)
            return ""

    with pytest.raises(ArgumentError, match=r"^In 1\.0 \(Caller\): The input ends in"):
        torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(Caller()))(bad)
    assert Careful()(bad).startswith("In 0 (LayerNorm): The input ends in")


def test_shared_modules_are_named_once() -> None:
    norm = nn.LayerNorm(8)
    model = torch.nn.Sequential(norm, torch.nn.Linear(8, 7), norm)
    with pytest.raises(ArgumentError, match=r"^In 0 \(LayerNorm\)"):
        model(values((3, 8)))
