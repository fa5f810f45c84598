"""Norms that are written out become the standard operator, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from onnx_graphs import Builder, layer_norm, parameter

import axisnorm
from axisnorm.lens.onnx.fusing import Fusion, fuse


def run(path: Path, x: Any) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def kinds(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def fused(path: Path, tmp_path: Path, *args: Any, **kwargs: Any) -> tuple[Fusion, Path]:
    out = tmp_path / "out.onnx"
    found = fuse(path, out, *args, **kwargs)
    assert (found.written == out) == out.exists()
    if found.written is not None:
        onnx.checker.check_model(onnx.shape_inference.infer_shapes(onnx.load(out)), full_check=True)
    return found, out


def random(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("said", [
    {}, {"weight": parameter(8)}, {"weight": parameter(8), "bias": parameter(8)},
    {"bias": parameter(8)}, {"square": "mean square", "keepdims": 0}, {"value": 1e-12},
    {"weight": parameter(8), "offset": 1.0}, {"weight": np.array([1.7])},
])  # fmt: skip
def test_layer_norm(said: dict[str, Any], tmp_path: Path) -> None:
    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", layer_norm(b, **said), x=("n", 3, 8))
    found, out = fused(path, tmp_path)
    assert [one.after for one in found.replaced] == ["LayerNormalization"] and not found.left
    assert kinds(out) == ["LayerNormalization", "Relu"]
    x = random(5, 3, 8)
    np.testing.assert_allclose(run(out, x)[0], run(path, x)[0], atol=1e-6)
    assert found.largest_difference < 1e-5
    # Its weights are used no more.
    assert len(onnx.load(out).graph.initializer) == (2 if "bias" in said else 1)
    norm = axisnorm.audit(out).norms[0]
    assert norm.kind == "node" and norm.verified
    assert norm.eps == said.get("value", 1e-5)


def test_rms_norm_needs_its_opset(tmp_path: Path) -> None:
    b = Builder(18)
    path = b.save(tmp_path / "m.onnx", layer_norm(b, center=False, weight=parameter(8)))
    found, out = fused(path, tmp_path)
    assert found.written is None and not out.exists()
    assert "--opset 23" in found.left[0].reason
    found, out = fused(path, tmp_path, opset=23)
    assert kinds(out) == ["RMSNormalization", "Relu"] and found.opset == 23
    x = random(2, 3, 8)
    np.testing.assert_allclose(run(out, x)[0], run(path, x)[0], atol=1e-6)


@pytest.mark.parametrize("x", [(2, 4, 6, 6), ("n", 4, "h", "w")])
def test_group_norm(x: tuple[Any, ...], tmp_path: Path) -> None:
    from test_audit_onnx import group_norm

    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", group_norm(b, "x", 2, 4), x=x)
    found, out = fused(path, tmp_path, opset=21)
    assert kinds(out) == ["GroupNormalization", "Relu"], found.to_json()
    data = random(2, 4, 6, 6)
    np.testing.assert_allclose(run(out, data)[0], run(path, data)[0], atol=2e-6)


def test_instance_norm(tmp_path: Path) -> None:
    b = Builder(11)
    y = layer_norm(b, axes=(2, 3), weight=parameter(4, 1, 1), bias=parameter(4, 1, 1))
    path = b.save(tmp_path / "m.onnx", y, x=("n", 4, 5, 5))
    _, out = fused(path, tmp_path)
    assert kinds(out) == ["InstanceNormalization", "Relu"]
    x = random(3, 4, 5, 5)
    np.testing.assert_allclose(run(out, x)[0], run(path, x)[0], atol=2e-6)


def test_between_transposes(tmp_path: Path) -> None:
    b = Builder(17)
    y = layer_norm(b, b.Transpose("x", perm=[0, 2, 3, 1]), weight=parameter(6))
    path = b.save(tmp_path / "m.onnx", b.Transpose(y, perm=[0, 3, 1, 2]), x=(2, 6, 5, 5))
    _, out = fused(path, tmp_path)
    assert kinds(out) == ["Transpose", "LayerNormalization", "Transpose", "Relu"]
    x = random(2, 6, 5, 5)
    np.testing.assert_allclose(run(out, x)[0], run(path, x)[0], atol=2e-6)


def test_half_precision(tmp_path: Path) -> None:
    b = Builder(17, TensorProto.FLOAT16)
    wide = b.Cast("x", to=TensorProto.FLOAT)
    b.dtype = TensorProto.FLOAT
    inside = layer_norm(b, wide)
    b.dtype = TensorProto.FLOAT16
    y = b.Mul(b.Cast(inside, to=TensorProto.FLOAT16), b.constant(parameter(8)))
    path = b.save(tmp_path / "m.onnx", y)
    found, out = fused(path, tmp_path)
    assert kinds(out) == ["LayerNormalization", "Relu"], found.to_json()
    x = random(2, 3, 8).astype(np.float16)
    np.testing.assert_allclose(run(out, x)[0], run(path, x)[0], atol=3e-3)


@pytest.mark.parametrize("said, reason", [
    ({"sample": True}, "n - 1"),
    ({"eps": "outside"}, "outside"),
    ({"axes": (1,), "size": 3}, "axis 1"),
])  # fmt: skip
def test_what_no_operator_computes_stays(said: Any, reason: str, tmp_path: Path) -> None:
    b = Builder(17)
    found, _ = fused(b.save(tmp_path / "m.onnx", layer_norm(b, **said)), tmp_path)
    assert reason in found.left[0].reason and found.written is None


def test_open_sizes_stay(tmp_path: Path) -> None:
    b = Builder(17)
    found, _ = fused(b.save(tmp_path / "m.onnx", layer_norm(b), x=("n", "s", "d")), tmp_path)
    assert "left open" in found.left[0].reason


def test_what_others_read_is_kept(tmp_path: Path) -> None:
    b = Builder(17)
    y = layer_norm(b, weight=parameter(8))
    mean = next(node.output[0] for node in b.nodes if node.op_type == "ReduceMean")
    path = b.save(tmp_path / "m.onnx", [y, mean])
    _, out = fused(path, tmp_path)
    assert sorted(kinds(out)) == ["LayerNormalization", "ReduceMean", "Relu", "Relu"]
    x = random(2, 3, 8)
    for one, other in zip(run(out, x), run(path, x), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_names_metadata_and_external_data_stay(tmp_path: Path) -> None:
    b = Builder(17)
    y = layer_norm(b, b.MatMul("x", b.constant(parameter(64, 64), "big")), size=64,
                   weight=parameter(64))  # fmt: skip
    path = b.save(tmp_path / "m.onnx", y, x=("n", 64))
    model = onnx.load(path)
    entry = model.metadata_props.add()
    entry.key, entry.value = "author", "someone"
    model.producer_name = "hand"
    onnx.save_model(model, path, save_as_external_data=True, location="w", size_threshold=0)
    _, out = fused(path, tmp_path)
    after = onnx.load(out, load_external_data=False)
    assert [p.value for p in after.metadata_props] == ["someone"]
    assert after.producer_name == "hand" and after.graph.input[0].name == "x"
    big = next(t for t in after.graph.initializer if t.name == "big")
    assert big.data_location == TensorProto.EXTERNAL and (tmp_path / "out.onnx.data").exists()
    x = random(5, 64)
    np.testing.assert_allclose(run(out, x)[0], run(path, x)[0], rtol=1e-5, atol=1e-6)


def test_nothing_is_written_where_the_outputs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the last check alone sees a difference."""
    from axisnorm.lens.onnx import fusing

    monkeypatch.setattr(fusing, "AGREES", {"float32": 0.0})
    b = Builder(17)
    y = layer_norm(b, b.MatMul("x", b.constant(parameter(8, 8))), square="mean square")
    found, out = fused(b.save(tmp_path / "m.onnx", y), tmp_path)
    assert found.written is None and found.largest_difference > 0
    assert "would move" in found.left[0].reason and not out.exists()


def test_bad_arguments_write_nothing(tmp_path: Path) -> None:
    b = Builder(18)
    path = b.save(tmp_path / "m.onnx", layer_norm(b))
    whole = path.read_bytes()
    for out, said in (
        (tmp_path / "none" / "o.onnx", {}), (tmp_path, {}), (tmp_path / "o.onnx", {"opset": 17}),
        (tmp_path / "o.onnx", {"opset": 999}), (tmp_path / "o.onnx", {"z": np.ones(3)}),
        (path, {}), (tmp_path / "." / "m.onnx", {}), ("/dev/null", {}),
    ):  # fmt: skip
        with pytest.raises(axisnorm.ArgumentError):
            fuse(path, out, **said)
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == whole


def test_an_operator_between_transposes_is_not_left(tmp_path: Path) -> None:
    """Nothing is written out there, so that --strict has nothing to say."""
    b = Builder(17)
    last = b.Transpose("x", perm=[0, 2, 3, 1])
    y = b.LayerNormalization(last, b.constant(parameter(6)))
    path = b.save(tmp_path / "m.onnx", b.Transpose(y, perm=[0, 3, 1, 2]), x=(2, 6, 5, 5))
    done = fuse(path, tmp_path / "o.onnx")
    assert (done.replaced, done.left) == ((), ())
    (norm,) = axisnorm.audit(path).norms
    assert (norm.cls, norm.kind, len(norm.nodes)) == ("LayerNormalization", "fragment", 3)


def test_what_was_written_is_said(tmp_path: Path) -> None:
    b = Builder(17)
    path, out = b.save(tmp_path / "m.onnx", layer_norm(b)), tmp_path / "o.onnx"
    assert f"Written: {out}, opset 17." in fuse(path, out).to_text(width=400)
    again = fuse(out, tmp_path / "p.onnx")
    assert "Nothing was written" in again.to_text() and not (tmp_path / "p.onnx").exists()


def test_a_page_does_not_replace_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from axisnorm.__main__ import main

    b = Builder(17)
    path = str(b.save(tmp_path / "m.onnx", layer_norm(b)))
    whole = Path(path).read_bytes()
    for more in (["--html", path], ["--html", "f.onnx", "--fuse", "f.onnx"]):
        assert main(["audit", path, *more]) == 2
        assert "is not written over" in capsys.readouterr().err
    assert Path(path).read_bytes() == whole


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from axisnorm.__main__ import main

    b = Builder(14)
    path = b.save(tmp_path / "m.onnx", layer_norm(b, weight=parameter(8)))
    out = tmp_path / "o.onnx"
    assert main(["audit", str(path), "--fuse", str(out)]) == 0
    assert "--opset 17" in capsys.readouterr().out and not out.exists()
    assert main(["audit", str(path), "--fuse", str(out), "--opset", "17"]) == 0
    assert "LayerNormalization" in capsys.readouterr().out and out.exists()
    assert main(["audit", str(out), "--fuse", str(path), "--strict"]) == 0
    assert main(["audit", str(path), "--opset", "17"]) == 2
    assert main(["audit", "somewhere", "--fuse", str(out)]) == 2
