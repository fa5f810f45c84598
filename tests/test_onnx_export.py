"""torch.onnx.export: which node each norm becomes, and that onnxruntime computes the same."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from cases import DTYPES, SCHEMES, Case
from torch import Tensor, nn

import axisnorm
from axisnorm import ArgumentError, Scheme, _onnx, reference
from axisnorm.nn import (
    AddLayerNorm,
    AddRMSNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    LayerNorm2d,
    Norm,
    RMSNorm,
)
from axisnorm.reference import Inputs

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# torch's own, in both of its exporters.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX export mode is set to TrainingMode.EVAL:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

# What is rounded once, by the compute type: two computations of a few units in the last place,
# of which onnxruntime's may square before it subtracts the mean.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-8, torch.float16: 2e-3}


class Model(nn.Module):
    """Norms side by side, each of an input that is named with it."""

    def __init__(self, norms: Mapping[str, tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: norm for name, (norm, _) in norms.items()})
        self.inputs = {name: key for name, (_, key) in norms.items()}
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5, generator=generator)
        for name, buffer in self.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 2.0, generator=generator)
        self.to(dtype)

    def forward(self, tokens: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        given: dict[str, tuple[Tensor, ...]] = {
            "tokens": (tokens,),
            "sum": (tokens, tokens * 0.5),
            "masked tokens": (tokens, tokens[..., :1] > -0.5),
            "masked": (tokens, tokens > -1.0),
            "image": (image,),
            "volume": (image.unsqueeze(2),),
            "signal": (image[:, :, 0],),
            "vector": (image[:, :, 0, 0],),
        }
        found: list[Tensor] = []
        for name, norm in self.norms.items():
            y = norm(*given[self.inputs[name]])
            found += y if isinstance(y, tuple) else [y]
        return tuple(found)


def values(batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    tokens = torch.randn(batch, 5, 8, generator=generator) * 2.0 + 1.0
    return tokens.to(dtype), torch.randn(batch, 8, 4, 4, generator=generator).to(dtype)


def exported(
    model: nn.Module, args: tuple[Tensor, ...], opset: int, *, dynamic: bool = True, **options: Any
) -> Any:
    """The ONNX model of torch's default exporter."""
    axis = torch.export.Dim("batch")
    shapes = tuple({0: axis} for _ in args) if dynamic else None
    return torch.onnx.export(
        model, args, dynamo=True, opset_version=opset, verbose=False, dynamic_shapes=shapes,
        **options,
    ).model_proto  # fmt: skip


def scripted(model: nn.Module, args: tuple[Tensor, ...], opset: int) -> Any:
    """The ONNX model of torch's older exporter, with a dynamic batch."""
    file = io.BytesIO()
    names = [f"input{i}" for i in range(len(args))]
    mode = torch.onnx.TrainingMode
    torch.onnx.export(
        model, args, file, dynamo=False, opset_version=opset, input_names=names,
        dynamic_axes={name: {0: "batch"} for name in names},
        training=mode.TRAINING if model.training else mode.EVAL,
        do_constant_folding=not model.training,
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def check(proto: Any, model: nn.Module, args: tuple[Tensor, ...]) -> None:
    """onnxruntime gives what the model does."""
    onnx.checker.check_model(proto)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the older exporter writes the batch of the example
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]
    found = session.run(None, {name: arg.numpy() for name, arg in zip(names, args, strict=True)})
    with torch.no_grad():
        wanted = model(*args)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(found) == len(wanted)
    for y, want in zip(found, wanted, strict=True):
        assert y.dtype == want.numpy().dtype
        largest = float(want.abs().max())
        np.testing.assert_allclose(
            y.astype(np.float64), want.double().numpy(), rtol=0.0,
            atol=TOLERANCES[want.dtype] * max(1.0, largest),
        )  # fmt: skip


def nodes(proto: Any) -> dict[str, list[str]]:
    """The operators of every norm, in order."""
    found: dict[str, list[str]] = {}
    for node in proto.graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        scopes = ast.literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
        paths = [scope for scope in scopes if scope.startswith("norms.")]
        if paths:
            found.setdefault(paths[0].removeprefix("norms."), []).append(node.op_type)
    return found


def small(scheme: str, **sizes: int) -> Norm:
    return Norm(scheme, sizes=sizes)


def test_standard_nodes() -> None:
    norms: dict[str, tuple[nn.Module, str]] = {
        "LayerNorm": (LayerNorm(8), "tokens"),
        "LayerNorm of two axes": (LayerNorm((5, 8), bias=False), "tokens"),
        "RMSNorm": (RMSNorm(8), "tokens"),
        "GroupNorm": (GroupNorm(4, 8), "image"),
        "GroupNorm of vectors": (GroupNorm(2, 8), "vector"),
        "BatchNorm1d": (BatchNorm1d(8), "vector"),
        "BatchNorm2d": (BatchNorm2d(8), "image"),
        "BatchNorm3d": (BatchNorm3d(8, affine=False), "volume"),
        "InstanceNorm1d": (InstanceNorm1d(8), "signal"),
        "InstanceNorm2d": (InstanceNorm2d(8, affine=True), "image"),
        "InstanceNorm3d": (InstanceNorm3d(8, track_running_stats=True), "volume"),
        "LayerNorm2d": (LayerNorm2d(8), "image"),
        "AddLayerNorm": (AddLayerNorm(8, prenorm=True), "sum"),
        "AddRMSNorm": (AddRMSNorm(8), "sum"),
        "QK norm": (small("b s (h=2 [d]); affine=h d", d=4), "tokens"),
        "Gemma": (small("... [d]; affine=d; center=false; weight_offset=1", d=8), "tokens"),
    }
    norms = {name.replace(" ", "_"): pair for name, pair in norms.items()}
    model = Model(norms, torch.float32).eval()
    proto = exported(model, values(3), 23)
    found = nodes(proto)
    for name, node in {
        "LayerNorm": ["LayerNormalization"],
        "LayerNorm_of_two_axes": ["LayerNormalization"],
        "RMSNorm": ["RMSNormalization"],
        "GroupNorm": ["GroupNormalization"],
        "GroupNorm_of_vectors": ["Reshape", "LayerNormalization", "Reshape", "Mul", "Add"],
        "BatchNorm1d": ["BatchNormalization"],
        "BatchNorm2d": ["BatchNormalization"],
        "BatchNorm3d": ["BatchNormalization"],
        "InstanceNorm1d": ["InstanceNormalization"],
        "InstanceNorm2d": ["InstanceNormalization"],
        "InstanceNorm3d": ["BatchNormalization"],
        "LayerNorm2d": ["Transpose", "LayerNormalization", "Transpose"],
        "AddLayerNorm": ["Add", "LayerNormalization"],
        "AddRMSNorm": ["RMSNormalization"],
        "QK_norm": ["Reshape", "LayerNormalization", "Reshape", "Mul", "Add"],
        "Gemma": ["RMSNormalization"],
    }.items():
        assert found[name] == node, name
    check(proto, model, values(5))


def test_half_types_and_older_opsets() -> None:
    """A weight is multiplied before the rounding, unless the scheme says after; LayerNormalization
    and RMSNormalization are defined with float32 statistics, the others are computed in float32."""
    norms: dict[str, tuple[nn.Module, str]] = {
        "layer": (LayerNorm(8), "tokens"),
        "bare": (LayerNorm(8, elementwise_affine=False), "tokens"),
        "rms": (RMSNorm(8), "tokens"),
        "group": (GroupNorm(4, 8), "image"),
        "batch": (BatchNorm2d(8), "image"),
        "instance": (InstanceNorm2d(8), "image"),
        "llama": (small("... [d]; affine=d; center=false; rounding=before_affine", d=8), "tokens"),
        "rounded": (small("... [d]; affine=d; rounding=before_affine", d=8), "tokens"),
    }
    model = Model(norms, torch.float16)
    proto = exported(model, values(3, torch.float16), 18)
    found = nodes(proto)
    assert found["layer"] == ["Cast", "LayerNormalization", "Cast"]
    assert found["bare"] == ["LayerNormalization"]
    assert "RMSNormalization" not in found["rms"]
    assert found["group"] == ["Cast", "Reshape", "InstanceNormalization", "Shape", "Reshape",
                              "Mul", "Add", "Cast"]  # fmt: skip
    assert "BatchNormalization" not in found["batch"]  # this batch's statistics
    assert found["instance"] == ["InstanceNormalization", "Cast"]
    assert found["llama"][-1] == "Mul"
    check(proto, model, values(4, torch.float16))


def test_float64_is_not_computed_in_float32() -> None:
    norms: dict[str, tuple[nn.Module, str]] = {
        "layer": (LayerNorm(8), "tokens"),
        "group": (GroupNorm(4, 8), "image"),
        "batch": (BatchNorm2d(8), "image"),
    }
    model = Model(norms, torch.float64).eval()
    proto = exported(model, values(3, torch.float64), 21, dynamic=False)
    found = nodes(proto)
    assert "LayerNormalization" not in found["layer"]
    assert "GroupNormalization" not in found["group"]
    assert found["batch"] == ["BatchNormalization"]
    check(proto, model, values(3, torch.float64))


def test_masks_and_schemes_without_a_node() -> None:
    norms: dict[str, tuple[nn.Module, str]] = {
        "masked": (LayerNorm(8), "masked tokens"),
        "batch": (small("[b] s [d]; affine=s", s=5), "masked"),
        "std": (small("... [d]; affine=d; eps_placement=std; correction=1", d=8), "tokens"),
    }
    model = Model(norms, torch.float32)
    proto = exported(model, values(3), 20)
    check(proto, model, values(6))


EVERY: dict[str, Callable[[], tuple[nn.Module, str]]] = {
    "layer": lambda: (LayerNorm(8), "tokens"),
    "bare": lambda: (LayerNorm((5, 8), elementwise_affine=False), "tokens"),
    "masked": lambda: (LayerNorm(8), "masked tokens"),
    "rms": lambda: (RMSNorm(8), "tokens"),
    "group": lambda: (GroupNorm(4, 8), "image"),
    "group of vectors": lambda: (GroupNorm(2, 8), "vector"),
    "batch1": lambda: (BatchNorm1d(8), "vector"),
    "batch2": lambda: (BatchNorm2d(8), "image"),
    "batch3": lambda: (BatchNorm3d(8), "volume"),
    "instance1": lambda: (InstanceNorm1d(8), "signal"),
    "instance2": lambda: (InstanceNorm2d(8, affine=True), "image"),
    "instance3": lambda: (InstanceNorm3d(8, track_running_stats=True), "volume"),
    "layer2d": lambda: (LayerNorm2d(8), "image"),
    "bare 2d": lambda: (LayerNorm2d(8, affine=False), "image"),
    "add": lambda: (AddLayerNorm(8, prenorm=True), "sum"),
    "add rms": lambda: (AddRMSNorm(8), "sum"),
    "llama": lambda: (
        small("... [d]; affine=d; center=false; rounding=before_affine", d=8), "tokens"),
    "std": lambda: (
        small("... [d]; affine=d; eps_placement=std; correction=1", d=8), "tokens"),
    "positions": lambda: (small("[b] s [d]; affine=s", s=5), "masked"),
    "heads": lambda: (small("b s (h=2 [d]); affine=d", d=4), "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_older_exporter(dtype: torch.dtype, training: bool) -> None:
    model = Model({name: make() for name, make in EVERY.items()}, dtype).train(training)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    proto = scripted(model, values(3, dtype), 17)
    for name, buffer in model.named_buffers():
        if name in kept:
            assert torch.equal(buffer, kept[name])  # a graph has no state
    found = [node.op_type for node in proto.graph.node]
    assert found.count("LayerNormalization") >= 4
    assert found.count("BatchNormalization") == (0 if training else 4)
    assert found.count("InstanceNormalization") == (3 + training if dtype else 0)
    check(proto, model, values(4, dtype))


def test_older_exporter_reports_shapes() -> None:
    norm = Norm("... [d]", affine="d", sizes={"d": 8})
    with pytest.raises(ArgumentError, match="8"):
        scripted(norm, (torch.randn(2, 4),), 17)


def test_program_that_was_exported_before() -> None:
    """torch.export keeps this library's operators; the table takes them apart."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch = BatchNorm1d(5)
            self.add = AddLayerNorm(8, dropout_p=0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            mean, _, rstd = axisnorm.statistics(x, "n [s] d")
            return self.batch(x), self.add(x, x), mean, rstd

    model = Block()
    model.add.eval()
    (x, _) = values(3)
    program = torch.export.export(model, (x,))
    assert any("axisnorm" in str(node.target) for node in program.graph.nodes)
    plain = program.run_decompositions(axisnorm.onnx.decompositions())
    assert not any("axisnorm" in str(node.target) for node in plain.graph.nodes)
    for y, want in zip(plain.module()(x), program.module()(x), strict=True):
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    for name, buffer in program.module().named_buffers():
        want = dict(plain.module().named_buffers())[name]
        torch.testing.assert_close(want, buffer, rtol=1e-5, atol=1e-5)
    check(torch.onnx.export(plain, (x,), dynamo=True, verbose=False).model_proto, model, (x,))


def test_dropout_of_a_sum_is_a_dropout() -> None:
    model = AddLayerNorm(64, dropout_p=0.5, prenorm=True)
    x = torch.ones(8, 64)
    found = scripted(model, (x, torch.zeros(8, 64)), 17)
    assert [n.op_type for n in found.graph.node if n.op_type == "Dropout"] == ["Dropout"]
    seeded = torch.zeros((), dtype=torch.int64)
    decompose = axisnorm.onnx.decompositions()[torch.ops.axisnorm.add_norm_fwd.default]
    y, h, stats = decompose(x, x * 0.0, None, None, seeded, 0.5, "... [d]")
    assert set(h.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(y, nn.functional.layer_norm(h, (64,)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats[0], h.mean(1), rtol=1e-6, atol=1e-6)


def test_swapped_model() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(2), nn.LayerNorm(36)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    swapped = axisnorm.swap(model, x)
    assert len(swapped.replaced) == 3
    proto = exported(model, (x,), 21)
    found = [node.op_type for node in proto.graph.node if "Normalization" in node.op_type]
    # The exporter folds BatchNorm into the convolution before it.
    assert found == ["GroupNormalization", "LayerNormalization"]
    check(proto, model, (torch.randn(4, 3, 8, 8),))


# --------------------------------------------------------------------------------------------
# What the exporters are given, without them


def options(case: Case) -> Iterator[tuple[torch.dtype, bool, bool, bool]]:
    for dtype in DTYPES:
        for masked in (False, True):
            for weight, bias in ((True, True), (True, False), (False, True), (False, False)):
                if case.scheme.affine or not (weight or bias):
                    yield dtype, masked, weight, bias


@pytest.mark.parametrize("case", SCHEMES, ids=str)
def test_translation_is_the_scheme(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    scheme, shape = case.scheme, case.shape
    sizes = scheme.layout(len(shape)).sizes(shape)
    for dtype, masked, has_weight, has_bias in options(case):
        x = (torch.randn(shape, generator=generator) * 3.0 + 1.0).to(dtype)
        weight, bias = (
            torch.randn(sizes.affine_shape, generator=generator).to(dtype) if given else None
            for given in (has_weight, has_bias)
        )
        mask = torch.rand(shape, generator=generator) > 0.3 if masked else None
        y = _onnx.normalize(Inputs(x, weight, bias, mask), scheme)
        wanted, found = reference.forward(x, scheme, weight, bias, mask=mask)
        assert y.dtype == dtype
        largest = max(1.0, float(wanted.double().abs().max()))
        # A few roundings of the compute type, and for half types the one at the end, which may go
        # the other way where the value lies near the middle of two.
        allowed = {torch.float64: 1e-13, torch.float32: 1e-5}.get(
            dtype, 1.01 * torch.finfo(dtype).eps
        )
        assert float((y.double() - wanted.double()).abs().max()) <= allowed * largest
        if dtype in (torch.float16, torch.bfloat16):
            assert float((y != wanted).double().mean()) <= 0.02
        moments = (found.mean, found.var, found.rstd)
        for t, want in zip(_onnx.moments(x, scheme, mask), moments, strict=True):
            assert t.shape == want.shape
            torch.testing.assert_close(t.double(), want, rtol=1e-4, atol=1e-5)


def test_constant_groups_and_zero_eps() -> None:
    x = torch.full((2, 7), 1e4 / 3)
    bias = torch.arange(7.0)
    for text in ("n [d]; affine=d; correction=1", "n [d]; affine=d; eps=0; eps_placement=std"):
        assert torch.equal(_onnx.normalize(Inputs(x, None, bias), Scheme(text)), bias.expand(2, 7))


def test_given_statistics() -> None:
    x, mean, var = torch.randn(3, 4, 5), torch.randn(4), torch.rand(4) + 0.5
    for text in (
        "[n] c [...]; affine=c; statistics=running",
        "[n] c [...]; affine=c; statistics=running; center=false",
        "[n] c [...]; affine=c; statistics=running; eps_placement=std",
        "[n ...] c; affine=c; statistics=running",
    ):
        scheme = Scheme(text)
        given = x.transpose(1, 2) if "... ]" in text or "...]" in text.split(" c")[0] else x
        y = _onnx.normalize(Inputs(given, mean, None, None, mean, var), scheme)
        wanted, _ = reference.forward(given, scheme, mean, running_mean=mean, running_var=var)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_onnx_is_loaded_by_exports_only() -> None:
    code = """
import sys, torch, axisnorm, axisnorm.onnx
x = torch.randn(2, 4)
axisnorm.onnx.decompositions()
axisnorm.layer_norm(x, 4)
torch.jit.trace(axisnorm.nn.LayerNorm(4), (x,))
torch.export.export(axisnorm.nn.LayerNorm(4), (x,))
print(sorted({m.split(".")[0] for m in sys.modules} & {"onnx", "onnxscript", "onnxruntime"}))
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, env=dict(os.environ), check=True, timeout=300,
    )  # fmt: skip
    assert found.stdout.strip() == "[]"
