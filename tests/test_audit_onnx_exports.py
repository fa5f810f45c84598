"""What torch's two exporters make of norms, and models that others made."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axisnorm
from axisnorm.lens.onnx.fusing import fuse


class Llama(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Sample(nn.Module):
    """The Annotated Transformer's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(size) + 0.5)
        self.b = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b


class PerPixel(nn.Module):
    """ConvNeXt's, written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.bias = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(var + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Unit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


TOKENS, IMAGES = (2, 3, 8), (2, 4, 6, 6)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "LayerNorm": (lambda: nn.LayerNorm(8), TOKENS, "... [d]; affine=d"),
    "LayerNorm of two axes": (
        lambda: nn.LayerNorm((3, 8), eps=1e-6), TOKENS, "... [s d]; affine=s d; eps=1e-06"),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGES, "n (g=2 [c]) [...]; affine=g c"),
    "InstanceNorm": (
        lambda: nn.InstanceNorm2d(4, affine=True), IMAGES, "n c [...]; affine=c"),
    "BatchNorm": (
        lambda: nn.BatchNorm2d(4).eval(), IMAGES,
        "[n] c [...]; affine=c; statistics=running; running_correction=0"),
    "Llama": (lambda: Llama(8), TOKENS, "... [d]; affine=d; center=false; eps=1e-06"),
    "Sample": (
        lambda: Sample(8), TOKENS, "... [d]; affine=d; correction=1; eps=1e-06; eps_placement=std"),
    "PerPixel": (lambda: PerPixel(4), IMAGES, "n [c] ...; affine=c; eps=1e-06"),
    "Unit": (
        lambda: Unit(), TOKENS,
        "... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max"),
}  # fmt: skip


def export(model: nn.Module, x: Any, path: Path, opset: int, dynamo: bool, **said: Any) -> Path:
    args = x if isinstance(x, tuple) else (x,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, args, str(path), opset_version=opset, dynamo=dynamo, verbose=False, **said
        )
    return path


class Every(nn.Module):
    """One of each beside the others: exporting is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(make() for make, _, _ in MODULES.values())
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, tokens: torch.Tensor, images: torch.Tensor) -> list[torch.Tensor]:
        given = {TOKENS: tokens, IMAGES: images}
        shapes = [shape for _, shape, _ in MODULES.values()]
        return [
            torch.relu(norm(torch.tanh(given[shape])))
            for norm, shape in zip(self.norms, shapes, strict=True)
        ]


@pytest.mark.parametrize("dynamo, opset", [(False, 9), (False, 14), (False, 17), (True, 18),
                                           (True, 23)])  # fmt: skip
def test_both_exporters(dynamo: bool, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Every()
    model.train(False)
    inputs = torch.randn(TOKENS), torch.randn(IMAGES)
    path = export(model, inputs, tmp_path / "m.onnx", opset, dynamo)
    found = axisnorm.audit(path)
    wanted = [scheme for _, _, scheme in MODULES.values()]
    assert sorted(str(norm.scheme) for norm in found.norms) == sorted(wanted)
    assert all(norm.verified for norm in found.norms)


def test_batch_norm_that_trains(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    for dynamo, opset in ((False, 15), (True, 18)):
        path = export(model.eval(), torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", opset, dynamo)
        (norm,) = axisnorm.audit(path).norms
        assert norm.scheme is not None and norm.scheme.statistics == "batch"
        assert norm.axes == ("[n]", "c", "[h]", "[w]")


class Hidden(nn.Module):
    """Of a BERT the last hidden state, from two inputs in order."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2,
                            num_attention_heads=2, intermediate_size=32,
                            max_position_embeddings=16)  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False).eval()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden


def test_a_bert(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 7))
    named = {"input_names": ["input_ids", "attention_mask"], "output_names": ["hidden"]}
    inputs = ids, torch.ones_like(ids)
    path = export(Hidden().eval(), inputs, tmp_path / "b.onnx", 14, False, **named)
    found = axisnorm.audit(path, input_ids=ids.numpy(), attention_mask=np.ones((2, 7), np.int64))
    assert [str(n.scheme) for n in found.norms] == ["... [d]; affine=d; eps=1e-12"] * 5
    assert all(norm.verified and norm.num_statistics == 14 for norm in found.norms)
    fused = fuse(path, tmp_path / "f.onnx", opset=17)
    assert len(fused.replaced) == 5 and fused.largest_difference < 1e-4
    again = axisnorm.audit(tmp_path / "f.onnx")
    assert [norm.cls for norm in again.norms] == ["LayerNormalization"] * 5
    generated = axisnorm.audit(path)
    assert [norm.eps for norm in generated.norms] == [1e-12] * 5


def test_the_models_of_a_text_recogniser(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.origin is None:
        pytest.skip("rapidocr-onnxruntime is not installed")
    models = Path(spec.origin).parent / "models"
    (recogniser,) = models.glob("*_rec_infer.onnx")
    found = axisnorm.audit(recogniser)
    written_out = [norm for norm in found.norms if norm.kind == "fragment"]
    assert [norm.eps for norm in written_out] == [1e-5, 1e-5, 1e-5, 1e-5, 1e-6]
    assert {str(norm.scheme.replace(eps=1e-5)) for norm in written_out if norm.scheme} == {
        "... [d]; affine=d"
    }
    others = [norm for norm in found.norms if norm.kind == "node"]
    assert {norm.cls for norm in others} == {"BatchNormalization"}
    assert all(norm.verified for norm in found.norms)
    fused = fuse(recogniser, tmp_path / "out.onnx", opset=17)
    assert len(fused.replaced) == 5, fused.to_json()
