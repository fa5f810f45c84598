"""swap: only what is proved is replaced, and everything can be undone."""

import copy
import io
import json
import math

import pytest
import torch
from torch import nn

import axisnorm.nn
from axisnorm import _build
from axisnorm.lens.audit import audit
from axisnorm.lens.swap import DROP_INS, swap
from axisnorm.scheme import ArgumentError

SEED = torch.Generator().manual_seed(22)


def randn(*shape):
    return torch.randn(*shape, generator=SEED)


def images():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8, affine=False),
        nn.InstanceNorm2d(8), nn.Flatten(2), nn.LayerNorm(36), nn.RMSNorm(36),
    )  # fmt: skip


def randomized(model):
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_all_of_torchs_norms(training):
    model = randomized(images()).train(training)
    x = randn(4, 3, 8, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(module) for module in model]
    found = swap(model, x)
    assert [r.path for r in found.replaced] == ["1", "2", "3", "5", "6"]
    assert not found.left
    assert all(r.largest_difference <= r.tolerance < 1e-4 for r in found.replaced)
    assert found.largest_difference < 1e-4
    assert [type(model[i]) for i in (1, 2, 3, 5, 6)] == [
        axisnorm.nn.BatchNorm2d, axisnorm.nn.GroupNorm, axisnorm.nn.InstanceNorm2d,
        axisnorm.nn.LayerNorm, axisnorm.nn.RMSNorm,
    ]  # fmt: skip
    assert [id(module) for module in model] == identities
    assert isinstance(model[2], nn.GroupNorm)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    found.undo()
    assert [type(model[i]) for i in (1, 2, 3, 5, 6)] == [
        nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm, nn.RMSNorm,
    ]  # fmt: skip
    found.undo()


def test_outputs_and_gradients_after_the_swap():
    model = randomized(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.RMSNorm(16)))
    original = copy.deepcopy(model)
    x = randn(5, 16)
    assert swap(model, x).largest_difference == pytest.approx(
        (original(x) - model(x)).abs().max().item(), abs=1e-9
    )
    for one, other in ((original, model),):
        one(x).square().sum().backward()
        other(x).square().sum().backward()
    for a, b in zip(original.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8),
        nn.BatchNorm2d(8).eval(),
        nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8, affine=True),
    ],
)
def test_what_would_be_slower_is_left(norm, monkeypatch):
    """The reference is right, but no gain: the model must not get slower by a swap."""
    monkeypatch.setattr(_build, "native", None)
    model = nn.Sequential(norm)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = swap(model, randn(4, 8, 5, 5))
    assert not found.replaced
    assert "no native kernel" in found.left[0].reason
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def with_hook():
    norm = nn.LayerNorm(8)
    norm.register_forward_hook(lambda module, inputs, output: None)
    return norm


def with_forward():
    norm = nn.LayerNorm(8)
    norm.forward = lambda x: nn.LayerNorm.forward(norm, x)
    return norm


def parametrized():
    norm = nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    return norm


def in_double():
    """A LayerNorm that computes something else through an instance hook."""
    norm = nn.LayerNorm(8)
    norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    return norm


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (with_hook(), "forward hooks"),
        (with_forward(), "forward was replaced"),
        (parametrized(), "parametrized"),
        (in_double(), "forward hooks"),
        (axisnorm.nn.LayerNorm(8), "already"),
    ],
)
def test_what_is_left_and_why(module, reason):
    kind, model = type(module), nn.Sequential(module)
    found = swap(model, randn(4, 6, 8))
    assert not found.replaced and type(module) is kind
    left = found.left[-1]
    assert left.path == "0" and reason in left.reason
    assert reason in found.to_text(width=200, color=False)


def test_functions_and_bypassed_norms_are_left():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    found = swap(layer, randn(4, 3, 8))
    assert not found.replaced
    assert [left.path for left in found.left] == ["norm1", "norm2"]
    assert all(left.reason.startswith("bypassed") for left in found.left)
    assert type(layer.norm1) is nn.LayerNorm
    # In training the modules themselves run.
    assert len(swap(layer.train(), randn(4, 3, 8)).replaced) == 2


def test_inputs_that_prove_nothing():
    found = swap(nn.Sequential(nn.LayerNorm(8)), torch.full((2, 8), math.nan))
    assert not found.replaced and "NaN" in found.left[0].reason


def test_a_constant_input_proves_nothing():
    found = swap(nn.Sequential(nn.LayerNorm(8)), torch.zeros(4, 6, 8))
    assert not found.replaced and "tells nothing apart" in found.left[0].reason


def test_an_exception_undoes_everything(monkeypatch):
    class Fails(nn.Module):
        def forward(self, x):
            if type(model[0]) is axisnorm.nn.LayerNorm:
                raise KeyError("after the swap")
            return x

    model = nn.Sequential(nn.LayerNorm(8), Fails())
    with pytest.raises(KeyError, match="after the swap"):
        swap(model, randn(2, 8))
    assert type(model[0]) is nn.LayerNorm


def test_wrong_use():
    with pytest.raises(ArgumentError, match="inputs"):
        swap(nn.LayerNorm(8))
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        swap("model", randn(2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classes_of_transformers(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm
    model = randomized(nn.Sequential(llama(64), gemma(64))).to(dtype)
    x = randn(8, 16, 64).to(dtype)
    before = model(x)
    found = swap(model, x)
    assert [r.path for r in found.replaced] == ["0", "1"]
    assert type(model[0]) is not llama and isinstance(model[0], llama)
    if dtype == torch.bfloat16:
        # The rounding point is the class's own: nearly all bits are.
        assert (model(x) == before).float().mean() > 0.99
    buffer = io.BytesIO()
    torch.save(model[0], buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is llama and torch.equal(again.weight, model[0].weight)
    assert type(copy.deepcopy(model[1])) is gemma
    found.undo()
    assert type(model[0]) is llama and type(model[1]) is gemma


def test_shared_modules_are_replaced_once():
    norm = nn.LayerNorm(8)
    model = nn.Sequential(norm, nn.Linear(8, 8), norm)
    found = swap(model, randn(2, 8))
    assert [r.path for r in found.replaced] == ["0"]
    assert type(model[2]) is axisnorm.nn.LayerNorm
    assert audit(model, randn(2, 8)).norms[0].calls == 2


def test_the_drop_ins_cover_torchs_norms():
    assert {kind.__name__ for kind in DROP_INS} == {
        "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
        "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    }  # fmt: skip


def test_paths_break_at_dots_and_the_root_has_a_name():
    long = nn.ModuleDict(
        {"attention_output_dense_layer": nn.ModuleDict({"a_norm_of_layers": nn.LayerNorm(8)})}
    )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_rather_long_encoder_name = long

        def forward(self, x):
            return self.a_rather_long_encoder_name["attention_output_dense_layer"][
                "a_norm_of_layers"
            ](x)

    text = swap(Model(), randn(2, 8)).to_text(width=80, color=False)
    for piece in (
        "a_rather_long_encoder_name.",
        "attention_output_dense_layer.",
        "a_norm_of_layers",
    ):
        assert piece in text
    assert "axisnorm.nn.LayerNorm" in text
    assert "(the model)" in swap(nn.LayerNorm(8), randn(2, 8)).to_text(width=80, color=False)


def test_json():
    data = json.loads(swap(nn.Sequential(nn.LayerNorm(8)), randn(2, 8)).to_json())
    assert list(data) == ["schema", "model", "replaced", "left", "largest_difference", "seconds"]
    assert data["replaced"][0]["after"] == "axisnorm.nn.LayerNorm"
