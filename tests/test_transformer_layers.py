"""Transformer layers of other libraries with these norms: torch's encoder, BERT, tensor2tensor."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import axisnorm
from axisnorm import PRESETS, audit, identify, swap
from axisnorm.nn import LayerNorm, Norm


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)
    for parameter in layer.parameters():  # otherwise every weight of a norm is one
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5)
    return layer


def with_own_norms(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    """A copy whose norms were constructed as this library's."""
    layer = copy.deepcopy(layer)
    for name in ("norm1", "norm2"):
        old = getattr(layer, name)
        new = LayerNorm(old.normalized_shape, old.eps, bias=old.bias is not None)
        new.load_state_dict(old.state_dict())
        setattr(layer, name, new)
    return layer


def gradients(model: nn.Module, x: Tensor, **kwargs: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x, **kwargs)
    y = y if isinstance(y, Tensor) else y[0]
    wanted = torch.autograd.grad((y * randn(*y.shape, seed=5)).sum(), [x, *model.parameters()])
    return [y.detach(), *wanted]


def close(found: Any, wanted: Any) -> None:
    """Within some roundings of float32, which go through a few layers."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_encoder_layer_in_training(norm_first: bool, bias: bool) -> None:
    layer = encoder_layer(norm_first=norm_first, bias=bias)
    x = randn(4, 3, 8)
    padding = torch.tensor([[False, False, True]] * 4)
    mine = with_own_norms(layer)
    close(gradients(mine, x), gradients(layer, x))
    close(
        gradients(mine, x, src_key_padding_mask=padding),
        gradients(layer, x, src_key_padding_mask=padding),
    )


def test_encoder_layer_in_inference_takes_torchs_fused_path() -> None:
    layer = encoder_layer().eval()
    mine = with_own_norms(layer)
    x = randn(4, 3, 8)
    called = []
    forward = LayerNorm.forward
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(LayerNorm, "forward", lambda *args: called.append(1) or forward(*args))
        close(mine(x), layer(x))
        assert not called
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = mine(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(called) == 2
    close(slow, layer(x))
    found = audit(mine, x)
    assert [norm.path for norm in found.norms] == ["norm1", "norm2"]
    assert {finding.code for finding in found.findings} == {"bypassed"}


def test_swap_of_an_encoder_says_what_is_bypassed() -> None:
    encoder = nn.TransformerEncoder(encoder_layer(), 2, norm=nn.LayerNorm(8))
    x = randn(4, 3, 8)
    inside = [f"layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2)]
    found = swap(encoder.eval(), x)
    assert [replaced.path for replaced in found.replaced] == ["norm"]
    assert {left.path: left.reason.split(":")[0] for left in found.left} == dict.fromkeys(
        inside, "bypassed in eval"
    )
    assert "bypassed in eval" in found.to_text(width=200, color=False)
    found.undo()
    assert type(encoder.norm) is nn.LayerNorm
    found = swap(encoder.train(), x)
    assert sorted(replaced.path for replaced in found.replaced) == [*inside, "norm"]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # once a process
def test_encoder_with_padding_goes_through_a_nested_tensor() -> None:
    plain = nn.TransformerEncoder(encoder_layer(), 2, norm=nn.LayerNorm(8)).eval()
    mine = copy.deepcopy(plain).train()
    x = randn(3, 4, 8)
    swap(mine, x)
    mine.eval()
    padding = torch.tensor([[False] * 4, [False, False, True, True], [False] * 3 + [True]])
    with torch.no_grad():
        close(mine(x, src_key_padding_mask=padding), plain(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_swap_of_an_encoder_that_gives_its_layers_nested_tensors() -> None:
    """The shape of a nested tensor was asked for, which it has not."""
    encoder = nn.TransformerEncoder(encoder_layer(), 2, norm=nn.LayerNorm(8)).eval()
    x, padding = randn(3, 4, 8), torch.tensor([[False] * 4, [False, True, True, True]] * 2)[:3]
    wanted = encoder(x, src_key_padding_mask=padding)
    found = swap(encoder, x, src_key_padding_mask=padding)
    assert [replaced.path for replaced in found.replaced] == ["norm"]
    assert all(left.reason.startswith("bypassed in eval") for left in found.left)
    close(encoder(x, src_key_padding_mask=padding), wanted)
    for layout in (torch.strided, torch.jagged):
        rows = torch.nested.nested_tensor([randn(2, 8), randn(3, 8)], layout=layout)
        model = nn.Sequential(nn.LayerNorm(8))
        found = swap(model, rows)
        assert not found.replaced
        assert ["nested" in left.reason for left in found.left] == [True]


def test_swapped_encoder_trains_as_before() -> None:
    plain = nn.TransformerEncoder(encoder_layer(norm_first=True), 2, enable_nested_tensor=False)
    mine = copy.deepcopy(plain)
    x, target = randn(4, 3, 8), randn(4, 3, 8, seed=1)
    assert len(swap(mine, x).replaced) == 4
    losses = []
    for model in (plain, mine):
        optimizer = torch.optim.SGD(model.parameters(), 0.003)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][2] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    close(mine.state_dict(), plain.state_dict())


def test_bert_layer() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertLayer

    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    plain = BertLayer(config)
    mine = copy.deepcopy(plain)
    x = randn(2, 5, 16)
    found = swap(mine, x)
    assert [replaced.path for replaced in found.replaced] == [
        "attention.output.LayerNorm", "output.LayerNorm",
    ]  # fmt: skip
    assert {norm.scheme.eps for norm in found.audit.norms if norm.scheme} == {1e-12}
    assert all(norm.verified for norm in found.audit.norms)
    close(gradients(mine, x), gradients(plain, x))


def tensor2tensor_layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """layer_norm_compute of tensor2tensor/layers/common_layers.py, in NumPy."""
    mean = np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * scale + bias


def test_tensor2tensor_layer_norm() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 5, 16)) * 1e-3  # where eps shows
    scale, bias = rng.standard_normal((2, 16))
    y = tensor2tensor_layer_norm(x, scale, bias)
    name = "tensor2tensor.layer_norm"
    np.testing.assert_allclose(axisnorm.normalize(x, name, scale, bias), y, rtol=0, atol=1e-13)
    module = Norm(name, sizes={"d": 16}, dtype=torch.float64)
    module.load_state_dict({"weight": torch.tensor(scale), "bias": torch.tensor(bias)})
    np.testing.assert_allclose(module(torch.tensor(x)).detach().numpy(), y, rtol=0, atol=1e-13)
    best = identify(x, y, weight=scale, bias=bias).best
    assert best is not None
    assert best.scheme.eps == PRESETS[name].eps == 1e-6
    assert best.axes == (2,)
