"""ONNX files: every norm in every spelling is found once and named right, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save_model
from onnx_graphs import Builder, layer_norm, parameter

import axisnorm
from axisnorm import Scheme
from axisnorm.lens.models.norms import Norm

LN = "... [d]"


def only(path: Path, *args: Any, **kwargs: Any) -> Norm:
    """The one norm of a model, verified."""
    found = axisnorm.audit(path, *args, **kwargs)
    assert found.source == "onnx"
    assert [norm.path for norm in found.norms] == [found.norms[0].path], found.to_json()
    assert found.norms[0].verified
    return found.norms[0]


def scheme_of(path: Path) -> str:
    return str(only(path).scheme)


def none(path: Path) -> None:
    assert axisnorm.audit(path).norms == ()


# --------------------------------------------------------------------------------------------
# Written out

SPELLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "positive axis": {"axes": (2,)},
    "keepdims 0": {"keepdims": 0},
    "sum and divide": {"mean": "sum and divide"},
    "sum and multiply": {"mean": "sum and multiply"},
    "product": {"square": "mul"},
    "sum of squares": {"square": "sum of squares"},
    "length": {"square": "length"},
    "mean square": {"square": "mean square"},
    "reciprocal": {"root": "reciprocal"},
    "power": {"root": "pow"},
}


@pytest.mark.parametrize("opset", [7, 18])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_layer_norm_written_out(spelling: str, opset: int, tmp_path: Path) -> None:
    b = Builder(opset)
    out = layer_norm(b, **SPELLINGS[spelling], weight=parameter(8), bias=parameter(8, seed=2))
    norm = only(b.save(tmp_path / "m.onnx", out))
    assert (str(norm.scheme), norm.kind) == ("... [d]; affine=d", "fragment")
    assert norm.nodes and norm.axes == ("b", "s", "[d]")
    assert (norm.num_statistics, norm.group_size, norm.affine_shape) == (6, 8, (8,))


FORMULAS = [
    ({"eps": "outside"}, "... [d]; eps_placement=std"),
    ({"eps": "max", "value": 1e-3}, "... [d]; eps=0.001; eps_placement=max"),
    ({"eps": "none"}, "... [d]; eps=0"),
    ({"value": 1e-12}, "... [d]; eps=1e-12"),
    ({"value": 32.0, "weight": parameter(8)}, "... [d]; affine=d; eps=32"),
    ({"sample": True}, "... [d]; correction=1"),
    ({"sample": True, "eps": "outside"}, "... [d]; correction=1; eps_placement=std"),
    ({"center": False, "value": 1e-6}, "... [d]; center=false; eps=1e-06"),
    ({"center": False, "weight": parameter(8)}, "... [d]; affine=d; center=false"),
    (
        {"center": False, "weight": parameter(8), "offset": 1.0},
        "... [d]; affine=d; center=false; weight_offset=1",
    ),
    ({"bias": parameter(8)}, "... [d]; affine=d"),
    ({"weight": parameter(1, 1, 8)}, "... [d]; affine=d"),
    ({"weight": np.ones(8), "bias": np.zeros(8)}, "... [d]; affine=d"),
]


@pytest.mark.parametrize("said, scheme", FORMULAS, ids=[s for _, s in FORMULAS])
def test_formulas_written_out(said: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    b = Builder(18)
    assert scheme_of(b.save(tmp_path / "m.onnx", layer_norm(b, **said))) == scheme


def test_known_mistakes_written_out(tmp_path: Path) -> None:
    """No root, and a root of the deviation."""
    for name in ("var", "sqrt_std"):
        b = Builder(18)
        d = b.Sub("x", b.reduce("ReduceMean", "x", (-1,)))
        v = b.reduce("ReduceMean", b.Mul(d, d), (-1,))
        e = b.constant(1e-5)
        divisor = b.Add(v, e) if name == "var" else b.Sqrt(b.Add(b.Sqrt(v), e))
        path = b.save(tmp_path / f"{name}.onnx", b.Div(d, divisor))
        assert scheme_of(path) == f"... [d]; scale={name}"


def test_a_norm_of_a_norm(tmp_path: Path) -> None:
    """Its input has no mean: only other data shows that it would be subtracted."""
    b = Builder(18)
    found = axisnorm.audit(b.save(tmp_path / "m.onnx", layer_norm(b, layer_norm(b))))
    assert [str(norm.scheme) for norm in found.norms] == [LN, LN]
    assert all(norm.verified for norm in found.norms)


MORE: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "reversed difference": (
        lambda b: b.Neg(layer_norm_of(b, b.Sub(b.reduce("ReduceMean", "x", (-1,)), "x"))),
        (2, 3, 8), LN),
    "one over the root": (
        lambda b: b.Mul("x", b.Div(b.constant(1.0), b.Sqrt(b.Add(
            b.reduce("ReduceMean", b.Mul("x", "x"), (-1,)), b.constant(1e-5))))),
        (2, 3, 8), "... [d]; center=false"),
    "a weight of every head": (
        lambda b: layer_norm(b, center=False, weight=parameter(3, 8)),
        (2, 5, 3, 8), "n c h [w]; affine=h w; center=false"),
    "groups of features": (
        lambda b: b.Reshape(layer_norm(b, b.Reshape("x", b.constant(np.array([0, 3, 2, 4])))),
                            b.constant(np.array([0, 3, 8]))),
        (2, 3, 8), "n l (g=2 [c])"),
    "tokens in one axis": (
        lambda b: b.Reshape(layer_norm(b, b.Reshape("x", b.constant(np.array([-1, 8]))),
                                       weight=parameter(8)), b.constant(np.array([2, 3, 8]))),
        (2, 3, 8), "... [d]; affine=d"),
    "a quantized weight": (
        lambda b: b.Mul(layer_norm(b), b.DequantizeLinear(
            b.constant(np.arange(1, 9, dtype=np.int8)), b.constant(0.1),
            b.constant(np.int8(0)))),
        (2, 3, 8), "... [d]; affine=d"),
    "over the deviation, not centred": (
        lambda b: b.Div("x", b.Sqrt(b.Add(b.reduce("ReduceMean", b.Mul(
            *[b.Sub("x", b.reduce("ReduceMean", "x", (-1,)))] * 2), (-1,)), b.constant(1e-5)))),
        (2, 3, 8), "... [d]; center=false; scale=std"),
    "statistics of the batch, channels last": (
        lambda b: layer_norm(b, axes=(0, 1, 2), weight=parameter(6)),
        (2, 5, 5, 6), "[n c h] w; affine=w"),
    "a variance clamped by Relu": (
        lambda b: clamped_norm(b), (2, 3, 8), "... [d]; affine=d"),
    "a length chosen by comparison": (
        lambda b: chosen_length(b), (2, 3, 8),
        "... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max"),
    "an eps below what float32 squares": (
        lambda b: layer_norm(b, value=1e-30), (2, 3, 8), "... [d]; eps=1e-30"),
    "no samples": (lambda b: layer_norm(b), (0, 3, 8), LN),
    "one row": (lambda b: layer_norm(b), (8,), LN),
    "one token": (lambda b: layer_norm(b, weight=parameter(8)), (1, 1, 8), "... [d]; affine=d"),
}  # fmt: skip


def clamped_norm(b: Builder) -> str:
    """The mean square minus the squared mean, kept from being negative."""
    m = b.reduce("ReduceMean", "x", (-1,))
    v = b.Relu(b.Sub(b.reduce("ReduceMean", b.Mul("x", "x"), (-1,)), b.Mul(m, m)))
    y = b.Mul(b.Sub("x", m), b.Reciprocal(b.Sqrt(b.Add(v, b.constant(1e-5)))))
    return str(b.Mul(y, b.constant(parameter(8))))


def chosen_length(b: Builder) -> str:
    n, e = b.reduce("ReduceL2", "x", (-1,)), b.constant(1e-12)
    return str(b.Div("x", b.Where(b.Less(n, e), e, n)))


def layer_norm_of(b: Builder, d: str) -> str:
    """Of what has no mean any more."""
    v = b.reduce("ReduceMean", b.Mul(d, d), (-1,))
    return str(b.Dropout(b.Identity(b.Div(d, b.Sqrt(b.Add(v, b.constant(1e-5)))))))


@pytest.mark.parametrize("name", MORE)
def test_other_spellings(name: str, tmp_path: Path) -> None:
    make, shape, scheme = MORE[name]
    b = Builder(18)
    assert scheme_of(b.save(tmp_path / "m.onnx", make(b), x=shape)) == scheme


def test_a_scale_of_one_number(tmp_path: Path) -> None:
    b = Builder(18)
    norm = only(b.save(tmp_path / "m.onnx", layer_norm(b, weight=np.array([1.7]))))
    assert str(norm.scheme) == LN
    assert "1.7" in next(f.message for f in norm.findings if f.code == "scalar-scale")


def test_a_length_times_one_number_has_the_eps_that_is_written(tmp_path: Path) -> None:
    """It is a multiple of an RMSNorm as well, but with an eps that nobody wrote."""
    b = Builder(18)
    length = b.Clip(b.reduce("ReduceL2", "x", (-1,)), b.constant(1e-5))
    out = b.Mul(b.Div("x", length), b.constant(np.array([1.7])))
    assert scheme_of(b.save(tmp_path / "m.onnx", out)) == (
        "... [d]; center=false; scale=l2; eps_placement=max"
    )


@pytest.mark.parametrize("opset", [14, 18])
def test_a_mean_over_the_channels_of_a_pixel(opset: int, tmp_path: Path) -> None:
    b = Builder(opset)
    out = layer_norm(b, axes=(1,), weight=parameter(6, 1, 1), bias=parameter(6, 1, 1, seed=2))
    norm = only(b.save(tmp_path / "m.onnx", out, x=(2, 6, 5, 5)))
    assert str(norm.scheme) == "n [c] ...; affine=c"
    assert norm.in_words == "one mean a pixel"


def test_weights_before_the_input(tmp_path: Path) -> None:
    """As TensorFlow writes it: x (w r) + (b - m w r)."""
    b = Builder(13)
    m = b.reduce("ReduceMean", "x", (-1,))
    v = b.reduce("ReduceMean", b.Pow(b.Sub("x", m), b.constant(2.0)), (-1,))
    r = b.Reciprocal(b.Sqrt(b.Add(v, b.constant(1e-3))))
    a = b.Mul(r, b.constant(parameter(8)))
    out = b.Add(b.Mul("x", a), b.Sub(b.constant(parameter(8, seed=2)), b.Mul(m, a)))
    assert scheme_of(b.save(tmp_path / "m.onnx", out)) == "... [d]; affine=d; eps=0.001"


def test_rms_norm_by_length(tmp_path: Path) -> None:
    """x / |x| * sqrt(n) * w is an RMSNorm, x / |x| alone has no factor of n."""
    b = Builder(18)
    unit = b.LpNormalization("x", axis=-1, p=2)
    out = b.Mul(b.Mul(unit, b.constant(8**0.5)), b.constant(parameter(8)))
    assert scheme_of(b.save(tmp_path / "m.onnx", out)) == "... [d]; affine=d; center=false; eps=0"
    b = Builder(18)
    length = b.reduce("ReduceL2", "x", (-1,))
    out = b.Div("x", b.Clip(length, b.constant(1e-12)))
    assert scheme_of(b.save(tmp_path / "l.onnx", out)) == (
        "... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max"
    )


def test_between_casts(tmp_path: Path) -> None:
    """A half input, computed in float32."""
    b = Builder(17, TensorProto.FLOAT16)
    wide = b.Cast("x", to=TensorProto.FLOAT)
    b.dtype = TensorProto.FLOAT
    inside = layer_norm(b, wide)
    back = b.Cast(inside, to=TensorProto.FLOAT16)
    b.dtype = TensorProto.FLOAT16
    norm = only(b.save(tmp_path / "m.onnx", b.Mul(back, b.constant(parameter(8)))))
    assert norm.dtype == "float16"
    assert str(norm.scheme) == "... [d]; affine=d; rounding=before_affine"
    assert len(norm.nodes) == 10


def test_an_input_in_bfloat16(tmp_path: Path) -> None:
    """NumPy has no such type, and onnxruntime takes it all the same."""
    b = Builder(17)
    out = layer_norm(b, b.Cast("x", to=TensorProto.FLOAT))
    path = b.save(tmp_path / "m.onnx", out, inputs={"x": (TensorProto.BFLOAT16, (2, 3, 8))})
    norm = only(path)
    assert (str(norm.scheme), norm.shape) == (LN, (2, 3, 8))


def test_in_half_precision_throughout(tmp_path: Path) -> None:
    b = Builder(17, TensorProto.FLOAT16)
    out = layer_norm(b, value=1e-8, weight=parameter(8))
    path = b.save(tmp_path / "m.onnx", out)
    found = axisnorm.audit(path, 300 * np.ones((2, 3, 8), np.float16))
    codes = {finding.code for finding in found.findings}
    assert {"eps-too-small", "half-precision-overflow", "constant-groups"} <= codes


@pytest.mark.parametrize("inner", ["written out", "LayerNormalization"])
def test_between_transposes(inner: str, tmp_path: Path) -> None:
    """Axes are said in the terms of what goes in."""
    b = Builder(17)
    last = b.Transpose("x", perm=[0, 2, 3, 1])
    if inner == "written out":
        y = layer_norm(b, last, weight=parameter(6), bias=parameter(6, seed=2))
    else:
        y = b.LayerNormalization(last, b.constant(parameter(6)), b.constant(parameter(6, seed=2)))
    out = b.Transpose(y, perm=[0, 3, 1, 2])
    norm = only(b.save(tmp_path / "m.onnx", out, x=(2, 6, 5, 5)))
    assert str(norm.scheme) == "n [c] ...; affine=c"
    assert norm.shape == (2, 6, 5, 5)


def group_norm(b: Builder, x: str, groups: int, channels: int, *, shape_of: bool = True) -> str:
    """As torch exports it."""
    cut = b.Reshape(x, b.constant(np.array([0, groups, -1])))
    ones, zeros = b.constant(np.ones(groups)), b.constant(np.zeros(groups))
    y = b.InstanceNormalization(cut, ones, zeros, epsilon=1e-5)
    back = b.Shape(x) if shape_of else b.constant(np.array([2, channels, 6, 6]))
    y = b.Reshape(y, back)
    weight = b.constant(parameter(channels, 1, 1))
    return str(b.Add(b.Mul(y, weight), b.constant(parameter(channels, 1, 1, seed=2))))


@pytest.mark.parametrize("shape_of", [False, True])
@pytest.mark.parametrize("x", [(2, 4, 6, 6), ("n", 4, "h", "w")])
def test_group_norm_by_instance_norm(x: tuple[Any, ...], shape_of: bool, tmp_path: Path) -> None:
    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", group_norm(b, "x", 2, 4, shape_of=shape_of), x=x)
    norm = only(path, np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32))
    assert str(norm.scheme) == "n (g=2 [c]) [...]; affine=g c"
    assert (norm.affine_shape, norm.num_statistics, norm.group_size) == ((4,), 4, 72)
    assert "instance-norm-as-group-norm" in {f.code for f in norm.findings}


def test_groups_are_those_of_the_whole_input(tmp_path: Path) -> None:
    """A large input is cut for the study, and 32 groups of fewer channels cut through channels."""
    b = Builder(17)
    cut = b.Reshape("x", b.constant(np.array([0, 32, -1])))
    ones, zeros = b.constant(np.ones(32)), b.constant(np.zeros(32))
    y = b.Reshape(b.InstanceNormalization(cut, ones, zeros), b.Shape("x"))
    norm = only(b.save(tmp_path / "m.onnx", y, x=(2, 64, 32, 32)))
    assert norm.scheme is not None and norm.scheme.axes == "n (g=32 [c]) [...]"


def test_group_norm_of_channels_last(tmp_path: Path) -> None:
    b = Builder(17)
    y = group_norm(b, b.Transpose("x", perm=[0, 3, 1, 2]), 2, 4)
    path = b.save(tmp_path / "m.onnx", b.Transpose(y, perm=[0, 2, 3, 1]), x=(2, 6, 6, 4))
    assert scheme_of(path) == "n [h w] (g=2 [c]); affine=g c"


@pytest.mark.parametrize("mean", ["GlobalAveragePool", "AveragePool"])
def test_instance_norm_by_pooling(mean: str, tmp_path: Path) -> None:
    b = Builder(13)
    said = {} if mean == "GlobalAveragePool" else {"kernel_shape": [5, 5]}
    d = b.Sub("x", b.node(mean, "x", **said))
    v = b.node(mean, b.Mul(d, d), **said)
    out = b.Mul(b.Div(d, b.Sqrt(b.Add(v, b.constant(1e-5)))), b.constant(parameter(6, 1, 1)))
    norm = only(b.save(tmp_path / "m.onnx", out, x=(1, 6, 5, 5)))
    assert str(norm.scheme) == "n c [...]; affine=c"


def test_batch_norm_of_computed_statistics(tmp_path: Path) -> None:
    """What torch's exporter makes of a BatchNorm without running statistics."""
    b = Builder(18)
    m = b.reduce("ReduceMean", "x", (0, 2, 3), 0)
    kept = b.reduce("ReduceMean", "x", (0, 2, 3))
    v = b.reduce("ReduceMean", b.Mul(b.Sub("x", kept), b.Sub("x", kept)), (0, 2, 3), 0)
    w = b.constant(parameter(6))
    out = b.BatchNormalization("x", w, b.constant(parameter(6, seed=2)), m, v)
    norm = only(b.save(tmp_path / "m.onnx", out, x=(2, 6, 5, 5)))
    assert norm.scheme is not None and norm.scheme.statistics == "batch"
    assert norm.axes == ("[n]", "c", "[h]", "[w]")


def test_two_norms_that_share_a_mean(tmp_path: Path) -> None:
    b = Builder(17)
    m = b.reduce("ReduceMean", "x", (-1,))
    d = b.Sub("x", m)
    v = b.reduce("ReduceMean", b.Mul(d, d), (-1,))
    outs = []
    for seed in (1, 2):
        s = b.Sqrt(b.Add(v, b.constant(1e-5)))
        outs.append(b.Mul(b.Div(d, s), b.constant(parameter(8, seed=seed))))
    found = axisnorm.audit(b.save(tmp_path / "m.onnx", outs))
    assert [str(norm.scheme) for norm in found.norms] == ["... [d]; affine=d"] * 2


def test_what_stands_behind_a_norm_is_not_of_it(tmp_path: Path) -> None:
    """A position embedding is no bias, a second scale no weight, a residual no step."""
    b = Builder(17)
    first = b.Add(layer_norm(b, weight=parameter(8)), b.constant(parameter(3, 8)))
    second = layer_norm(b, b.Add(first, "x"), weight=parameter(8), bias=parameter(8))
    out = b.Mul(second, b.constant(parameter(8, seed=5)))
    found = axisnorm.audit(b.save(tmp_path / "m.onnx", out))
    assert [len(norm.nodes) for norm in found.norms] == [8, 9]
    assert [str(norm.scheme) for norm in found.norms] == ["... [d]; affine=d"] * 2


# --------------------------------------------------------------------------------------------
# Near misses


def magnitude(b: Builder) -> str:
    return str(b.Sqrt(b.Add(b.Mul("x", "x"), b.Mul(b.Relu("x"), b.Relu("x")))))


def length(b: Builder) -> str:
    return str(b.Mul("x", b.Sqrt(b.reduce("ReduceSum", b.Mul("x", "x"), (-1,)))))


def mean_subtracted(b: Builder) -> str:
    return str(b.Div(b.Sub("x", b.reduce("ReduceMean", "x", (1,))), b.constant(8**0.5)))


def temperature(b: Builder) -> str:
    return str(b.Softmax(b.Div("x", b.constant(0.7)), axis=-1))


def softmax_by_hand(b: Builder) -> str:
    e = b.Exp(b.Sub("x", b.reduce("ReduceMax", "x", (-1,))))
    return str(b.Div(e, b.reduce("ReduceSum", e, (-1,))))


def attention_scale(b: Builder) -> str:
    return str(b.Div(b.MatMul("x", b.Transpose("x", perm=[0, 2, 1])), b.constant(8**0.5)))


def squeeze_and_excitation(b: Builder) -> str:
    pooled = b.reduce("ReduceMean", "x", (1,))
    return str(b.Mul("x", b.Sigmoid(b.Div(pooled, b.constant(3.0)))))


def distance(b: Builder) -> str:
    d = b.Sub("x", b.constant(parameter(8)))
    return str(b.Div(b.Sqrt(b.reduce("ReduceSumSquare", d, (-1,))), b.constant(2.0)))


def variance(b: Builder) -> str:
    d = b.Sub("x", b.reduce("ReduceMean", "x", (-1,)))
    return str(b.Div(b.reduce("ReduceSum", b.Mul(d, d), (-1,)), b.constant(8.0)))


def standardized_by_constants(b: Builder) -> str:
    return str(b.Div(b.Sub("x", b.constant(parameter(8))), b.constant(parameter(8, seed=3))))


def global_response(b: Builder) -> str:
    g = b.Sqrt(b.reduce("ReduceSum", b.Mul("x", "x"), (1,)))
    n = b.Div(g, b.Add(b.reduce("ReduceMean", g, (-1,)), b.constant(1e-6)))
    return str(b.Add(b.Mul(b.Mul("x", n), b.constant(parameter(8))), "x"))


def sum_to_one(b: Builder) -> str:
    return str(b.Div("x", b.reduce("ReduceSum", "x", (-1,))))


def sum_of_magnitudes(b: Builder) -> str:
    return str(b.Div("x", b.reduce("ReduceSum", b.Abs("x"), (-1,))))


def largest_magnitude(b: Builder) -> str:
    return str(b.Div("x", b.reduce("ReduceMax", b.Abs("x"), (-1,))))


def norm_of_order_one(b: Builder) -> str:
    return str(b.LpNormalization("x", axis=-1, p=1))


def local_response(b: Builder) -> str:
    return str(b.LRN(b.Unsqueeze("x", b.constant(np.array([3]))), size=3))


MISSES = [
    magnitude, length, mean_subtracted, temperature, softmax_by_hand, attention_scale,
    squeeze_and_excitation, distance, variance, standardized_by_constants, global_response,
    sum_to_one, sum_of_magnitudes, largest_magnitude, norm_of_order_one, local_response,
]  # fmt: skip


@pytest.mark.parametrize("miss", MISSES, ids=lambda miss: miss.__name__)
def test_a_near_miss_is_no_norm(miss: Any, tmp_path: Path) -> None:
    b = Builder(18)
    none(b.save(tmp_path / "m.onnx", miss(b)))


# --------------------------------------------------------------------------------------------
# Operators


def four(name: str) -> Any:
    return parameter(4, seed=sum(map(ord, name)))


NODES: dict[str, tuple[int, Any, tuple[int, ...], str]] = {
    "LayerNormalization": (
        17, lambda b: b.LayerNormalization("x", b.constant(parameter(8))), (2, 3, 8),
        "... [d]; affine=d"),
    "LayerNormalization over two axes": (
        17, lambda b: b.LayerNormalization("x", b.constant(parameter(3, 8)), axis=1), (2, 3, 8),
        "... [s d]; affine=s d"),
    "LayerNormalization with a broadcast scale": (
        17, lambda b: b.LayerNormalization("x", b.constant(parameter(1)), epsilon=1e-6),
        (2, 3, 8), "... [d]; affine=d; eps=1e-06"),
    "RMSNormalization": (
        23, lambda b: b.RMSNormalization("x", b.constant(parameter(8)), epsilon=1e-6), (2, 3, 8),
        "... [d]; affine=d; center=false; eps=1e-06"),
    "SimplifiedLayerNormalization": (
        17, lambda b: b.SimplifiedLayerNormalization(
            "x", b.constant(parameter(8)), axis=-1, epsilon=1e-6), (2, 3, 8),
        "... [d]; affine=d; center=false; eps=1e-06"),
    "GroupNormalization 18": (
        18, lambda b: b.GroupNormalization(
            "x", b.constant(parameter(2)), b.constant(parameter(2)), num_groups=2), (2, 4, 3, 3),
        "n (g=2 [c]) [...]; affine=g"),
    "GroupNormalization 21": (
        21, lambda b: b.GroupNormalization(
            "x", b.constant(four("w")), b.constant(four("b")), num_groups=2), (2, 4, 3, 3),
        "n (g=2 [c]) [...]; affine=g c"),
    "InstanceNormalization": (
        7, lambda b: b.InstanceNormalization("x", b.constant(four("w")), b.constant(four("b"))),
        (2, 4, 3, 3), "n c [...]; affine=c"),
    "MeanVarianceNormalization": (
        13, lambda b: b.MeanVarianceNormalization("x"), (2, 4, 3, 3),
        "[n] c [...]; eps=1e-09; eps_placement=std"),
    "MeanVarianceNormalization of channels": (
        9, lambda b: b.MeanVarianceNormalization("x", axes=[1]), (2, 4, 3, 3),
        "n [c] ...; eps=1e-09; eps_placement=std"),
    "LpNormalization": (
        9, lambda b: b.LpNormalization("x", axis=1), (2, 4, 3, 3),
        "n [c] ...; center=false; scale=l2; eps=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_an_operator_is_what_its_specification_says(name: str, tmp_path: Path) -> None:
    opset, make, shape, scheme = NODES[name]
    b = Builder(opset)
    norm = only(b.save(tmp_path / "m.onnx", make(b), x=shape))
    assert (str(norm.scheme), norm.declared, norm.kind) == (scheme, norm.scheme, "node")
    assert norm.cls == name.split()[0] and norm.nodes == (norm.path,)


def batch_norm(b: Builder, *, outputs: int = 1, shape: tuple[int, ...] = (4,), **said: Any) -> str:
    names = [b.constant(parameter(*shape, seed=seed)) for seed in range(4)]
    return b.node("BatchNormalization", "x", *names, outputs=outputs, **said)


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_batch_norm_with_running_statistics(opset: int, tmp_path: Path) -> None:
    b = Builder(opset)
    norm = only(b.save(tmp_path / "m.onnx", batch_norm(b), x=(2, 4, 3, 3)))
    assert norm.scheme == Scheme.batch_norm(statistics="running", running_correction=0)
    assert "one mean a channel (BatchNorm)" not in norm.in_words
    ruled_out = [c.name for c in norm.identification.ruled_out] if norm.identification else []
    assert "statistics of this batch" in ruled_out


def test_batch_norm_of_every_place(tmp_path: Path) -> None:
    b = Builder(7)
    out = batch_norm(b, shape=(4, 3, 3), spatial=0)
    norm = only(b.save(tmp_path / "m.onnx", out, x=(2, 4, 3, 3)))
    assert norm.affine_shape == (4, 3, 3)


@pytest.mark.parametrize("opset, said", [(9, {"outputs": 5}), (15, {"outputs": 3})])
def test_batch_norm_in_training_mode(opset: int, said: dict[str, Any], tmp_path: Path) -> None:
    b = Builder(opset)
    mode = {"training_mode": 1} if opset > 13 else {}
    norm = only(b.save(tmp_path / "m.onnx", batch_norm(b, **said, **mode), x=(2, 4, 3, 3)))
    assert norm.scheme == Scheme.batch_norm(running_correction=0)
    assert [f.code for f in norm.findings] == ["batch-statistics-in-eval"]


TWO = {"x": (TensorProto.FLOAT, (2, 3, 8)), "skip": (TensorProto.FLOAT, (2, 3, 8))}


def test_operators_of_onnxruntime(tmp_path: Path) -> None:
    own = {"domain": "com.microsoft"}
    b = Builder(17)
    w, v = b.constant(parameter(8)), b.constant(parameter(8, seed=2))
    out = b.SkipLayerNormalization("x", "skip", w, v, v, **own)
    assert scheme_of(b.save(tmp_path / "s.onnx", out, inputs=TWO)) == "... [d]; affine=d; eps=1e-12"
    b = Builder(17)
    w = b.constant(parameter(8))
    out = b.SkipSimplifiedLayerNormalization("x", "skip", w, epsilon=1e-6, **own)
    path = b.save(tmp_path / "r.onnx", out, inputs=TWO)
    assert scheme_of(path) == "... [d]; affine=d; center=false; eps=1e-06"
    b = Builder(17)
    tables = [b.constant(parameter(rows, 8, seed=rows)) for rows in (20, 9, 2)]
    w, v = b.constant(parameter(8)), b.constant(parameter(8, seed=2))
    out = b.EmbedLayerNormalization("ids", "segments", *tables, w, v, outputs=2, **own)
    ids = dict.fromkeys(("ids", "segments"), (TensorProto.INT32, (2, 5)))
    norm = only(b.save(tmp_path / "e.onnx", out, inputs=ids))
    assert (norm.shape, norm.eps) == ((2, 5, 8), 1e-12)


def test_an_operator_that_the_runtime_has_not(tmp_path: Path) -> None:
    b = Builder(17)
    said = {"groups": 2, "activation": 0, "channels_last": 1, "domain": "com.microsoft"}
    y = b.GroupNorm("x", b.constant(four("w")), b.constant(four("b")), **said)
    path = b.save(tmp_path / "m.onnx", layer_norm(b, y, size=4), x=(2, 3, 3, 4))
    first, second = (found := axisnorm.audit(path)).norms
    assert str(first.declared) == "n [...] (g=2 [c]); affine=g c"
    assert (first.scheme, [f.code for f in first.findings]) == (None, ["not-verified"])
    # What the runtime has is shown all the same.
    assert str(second.scheme) == LN and second.verified
    assert "model-not-run" in {f.code for f in found.findings}


def test_custom_operators_are_not_run(tmp_path: Path) -> None:
    b = Builder(17)
    y = b.Secret(layer_norm(b), domain="somewhere.else")
    found = axisnorm.audit(b.save(tmp_path / "m.onnx", y))
    assert [str(norm.scheme) for norm in found.norms] == [LN]
    assert "somewhere.else:Secret" in next(
        f.message for f in found.findings if f.code == "custom-operators"
    )


# --------------------------------------------------------------------------------------------
# Open cases

X25 = np.arange(16, dtype=np.float32).reshape(1, 4, 2, 2)


@pytest.mark.parametrize(
    "opset, scale, row, affine",
    [
        (18, [1, 2], [-3.0550475, -2.1821768], "g"),
        (21, [1, 2, 3, 4], [-4.5825710, -3.2732654], "g c"),
    ],
)
def test_group_normalization_by_its_opset(
    opset: int, scale: list[int], row: list[float], affine: str, tmp_path: Path
) -> None:
    import onnxruntime

    b = Builder(opset)
    w, v = b.constant(np.array(scale, float)), b.constant(np.zeros(len(scale)))
    y = b.GroupNormalization("x", w, v, num_groups=2)
    path = b.save(tmp_path / "m.onnx", y, x=(1, 4, 2, 2), relu=False)
    norm = only(path, X25)
    assert norm.scheme is not None and norm.scheme.affine == affine
    (out,) = onnxruntime.InferenceSession(path).run(None, {"x": X25})
    np.testing.assert_allclose(out[0, 2, 0], row, atol=2e-6)
    again = axisnorm.normalize(X25, norm.scheme, np.array(scale, np.float32))
    np.testing.assert_allclose(again[0, 2, 0], row, atol=2e-6)
    assert ("deprecated-operator" in {f.code for f in norm.findings}) == (opset == 18)


# --------------------------------------------------------------------------------------------
# Bodies, functions, files


def body(opset: int = 17) -> tuple[list[Any], list[Any]]:
    """The nodes and weights of a norm of the outer value x, with y as its result."""
    b = Builder(opset)
    out = layer_norm(b, weight=parameter(8))
    nodes = [*b.nodes, helper.make_node("Relu", [out], ["inner"])]
    return nodes, [numpy_helper.from_array(v, k) for k, v in b.constants.items()]


def info(name: str, kind: int = TensorProto.FLOAT, shape: Any = (2, 3, 8)) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def save(path: Path, nodes: list[Any], inputs: list[Any], functions: Any = ()) -> Path:
    graph = helper.make_graph(nodes, "graph", inputs, [info("y", shape=None)])
    opsets = [helper.make_opsetid("", 17)]
    opsets += [helper.make_opsetid(one.domain, 1) for one in functions]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)
    save_model(model, path)
    return path


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_a_norm_in_a_body(kind: str, tmp_path: Path) -> None:
    nodes, weights = body()
    if kind == "If":
        other = helper.make_graph([helper.make_node("Abs", ["x"], ["a"])], "e", [], [info("a")])
        inside = helper.make_graph(nodes, "t", [], [info("inner")], weights)
        node = helper.make_node("If", ["c"], ["y"], then_branch=inside, else_branch=other)
        inputs = [info("x"), info("c", TensorProto.BOOL, ())]
    elif kind == "Loop":
        nodes.append(helper.make_node("Identity", ["go"], ["on"]))
        inside = helper.make_graph(
            nodes, "b",
            [info("i", TensorProto.INT64, ()), info("go", TensorProto.BOOL, ()), info("x")],
            [info("on", TensorProto.BOOL, ()), info("inner")], weights,
        )  # fmt: skip
        node = helper.make_node("Loop", ["n", "", "start"], ["y"], body=inside)
        inputs = [info("n", TensorProto.INT64, ()), info("start")]
    else:
        inside = helper.make_graph(nodes, "b", [info("x")], [info("inner")], weights)
        node = helper.make_node("Scan", ["all"], ["y"], body=inside, num_scan_inputs=1)
        inputs = [info("all", shape=(4, 2, 3, 8))]
    node.name = "outer"
    norm = only(save(tmp_path / "m.onnx", [node], inputs))
    assert str(norm.scheme) == "... [d]; affine=d"
    assert norm.path.startswith("outer/") and norm.shape == (2, 3, 8)
    assert "generated-data" in {f.code for f in norm.findings}


def test_a_norm_in_a_local_function(tmp_path: Path) -> None:
    b = Builder(17)
    out = layer_norm(b)
    constants = [
        helper.make_node("Constant", [], [k], value=numpy_helper.from_array(v))
        for k, v in b.constants.items()
    ]
    function = helper.make_function(
        "own", "norm", ["x"], [out], [*constants, *b.nodes], [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("norm", ["x"], ["a"], domain="own"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("norm", ["b"], ["y"], domain="own"),
    ]
    found = axisnorm.audit(save(tmp_path / "m.onnx", nodes, [info("x")], [function]))
    assert [str(norm.scheme) for norm in found.norms] == [LN, LN]


@pytest.mark.parametrize("kind", ["text", "cut", "empty", "directory", "none", "old", "no data"])
def test_a_file_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    b = Builder(17)
    b.save(path, layer_norm(b, weight=np.ones((3, 8))))
    whole = path.read_bytes()
    if kind in ("text", "cut", "empty"):
        path.write_bytes({"text": b"not a model", "cut": whole[:-200], "empty": b""}[kind])
    elif kind in ("directory", "none"):
        path.unlink()
        if kind == "directory":
            path.mkdir()
    elif kind == "old":
        b = Builder(17)
        b.opset = 6
        b.save(path, "x")
    else:
        import onnx

        onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="data",
                        size_threshold=0, convert_attribute=True)  # fmt: skip
        (tmp_path / "data").unlink()
    with pytest.raises(axisnorm.ArgumentError) as caught:
        axisnorm.audit(path)
    assert str(caught.value).count(". ") == 2, caught.value


def test_external_data(tmp_path: Path) -> None:
    import onnx

    b = Builder(17)
    path = tmp_path / "m.onnx"
    b.save(path, layer_norm(b, weight=parameter(4096), size=4096), x=(2, 4096))
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="data",
                    size_threshold=0)  # fmt: skip
    assert scheme_of(path) == "... [d]; affine=d"
    outside = tmp_path / "inside" / "m.onnx"
    outside.parent.mkdir()
    outside.write_bytes(path.read_bytes().replace(b"data", b"../d"))
    with pytest.raises(axisnorm.ArgumentError):
        axisnorm.audit(outside)


def test_inputs(tmp_path: Path) -> None:
    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", layer_norm(b), x=("batch", 3, 8))
    x = np.random.default_rng(0).standard_normal((5, 3, 8)).astype(np.float32)
    assert only(path, x).shape == only(path, x=x).shape == (5, 3, 8)
    for args, kwargs in (
        ((x, x), {}), ((), {"y": x}), ((x,), {"x": x}), ((x[0],), {}), ((x[:, :2],), {}),
        ((np.ones((1, 3, 8), complex),), {}),
    ):  # fmt: skip
        with pytest.raises(axisnorm.ArgumentError):
            axisnorm.audit(path, *args, **kwargs)


def test_ids_are_rows_of_their_table(tmp_path: Path) -> None:
    b = Builder(17)
    y = layer_norm(b, b.Gather(b.constant(parameter(7, 8)), b.Cast("ids", to=TensorProto.INT64)))
    ids = {"ids": (TensorProto.INT32, ("batch", "sequence"))}
    assert only(b.save(tmp_path / "m.onnx", y, inputs=ids)).shape == (2, 16, 8)


def test_sizes_are_tried_until_one_runs(tmp_path: Path) -> None:
    """An input that only one of the generated sizes fits."""
    b = Builder(17)
    y = b.Reshape("x", b.constant(np.array([1, 3, 224, 224])))
    y = layer_norm(b, y, axes=(1,))
    path = b.save(tmp_path / "m.onnx", y, x=("n", "c", "h", "w"))
    assert only(path).shape == (1, 3, 224, 224)


# --------------------------------------------------------------------------------------------
# Findings


def codes(path: Path, *args: Any) -> set[str]:
    return {finding.code for finding in axisnorm.audit(path, *args).findings}


def test_findings_about_parameters(tmp_path: Path) -> None:
    b = Builder(17)
    dead = layer_norm(b, weight=np.array([1.0, 0, 1, 0, 1, 1, 1, 1]))
    assert "dead-channels" in codes(b.save(tmp_path / "d.onnx", dead))
    b = Builder(17)
    unit = layer_norm(b, weight=np.ones(8), bias=np.zeros(8))
    assert "unit-weight" in codes(b.save(tmp_path / "u.onnx", unit))
    b = Builder(17)
    mixed = layer_norm(b, b.Relu(b.MatMul(layer_norm(b), b.constant(parameter(8, 8)))), value=1e-6)
    assert "mixed-eps" in codes(b.save(tmp_path / "m.onnx", mixed))


def test_values_of_parameters_are_compared(tmp_path: Path) -> None:
    """Of written out norms and of operators, and only what does not depend on the input."""
    weight, bias = parameter(8), parameter(8, seed=2)
    b = Builder(17)
    written = axisnorm.audit(b.save(tmp_path / "w.onnx", layer_norm(b, weight=weight, bias=bias)))
    found = {}
    for name, factor in (("same", 1.0), ("other", 1.01)):
        b = Builder(17)
        y = b.LayerNormalization("x", b.constant(factor * weight), b.constant(bias))
        found[name] = axisnorm.audit(b.save(tmp_path / f"{name}.onnx", y))
    roles = [(one.role, one.shape) for one in written.norms[0].parameters]
    assert roles == [("weight", (8,)), ("bias", (8,))]
    assert np.array_equal(written.norms[0].parameters[0].values, weight)
    (pair,) = written.diff(found["same"]).pairs
    assert pair.same and pair.largest_difference == 0.0
    (pair,) = written.diff(found["other"]).pairs
    assert [part.name for part in pair.different] == ["values"]
    b = Builder(17)
    y = b.LayerNormalization("x", "w", b.constant(np.zeros(8)))
    inputs = {"x": (TensorProto.FLOAT, (2, 3, 8)), "w": (TensorProto.FLOAT, (8,))}
    norm = only(b.save(tmp_path / "c.onnx", y, inputs=inputs), w=np.zeros(8, np.float32),
                x=np.random.default_rng(0).standard_normal((2, 3, 8)))  # fmt: skip
    assert [one.role for one in norm.parameters] == ["bias"]
    assert "dead-channels" not in {f.code for f in norm.findings}


@pytest.mark.parametrize("written", [True, False])
def test_a_weight_of_nan(written: bool, tmp_path: Path) -> None:
    """It is said, and nothing is made of the output."""
    weight = parameter(8)
    weight[2] = np.nan
    b = Builder(17)
    y = layer_norm(b, weight=weight) if written else b.LayerNormalization("x", b.constant(weight))
    (finding,) = axisnorm.audit(b.save(tmp_path / "m.onnx", y)).findings
    assert (finding.code, finding.severity) == ("non-finite-parameters", "error")


def test_parameters_that_the_formula_does_not_take(tmp_path: Path) -> None:
    """A scale of more axes than are normalized, and a variance below zero."""
    b = Builder(17)
    y = b.LayerNormalization("x", b.constant(parameter(3, 8)), axis=-1)
    (finding,) = axisnorm.audit(b.save(tmp_path / "m.onnx", y)).findings
    assert finding.code == "not-verified" and "(3, 8)" in finding.message
    b = Builder(17)
    w = b.constant(four("w"))
    y = b.BatchNormalization("x", w, w, w, b.constant(-four("v")))
    (finding,) = axisnorm.audit(b.save(tmp_path / "b.onnx", y, x=(2, 4, 3, 3))).findings
    assert finding.code == "declared-mismatch"


def test_infinite_groups_are_not_constant(tmp_path: Path) -> None:
    b = Builder(17)
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    x[0, 0], x[1, 1] = np.inf, 2.0
    norm = only(b.save(tmp_path / "m.onnx", layer_norm(b)), x)
    assert [f.message for f in norm.findings if f.code == "constant-groups"] == [
        "At this input 1 of 6 groups hold one value throughout: their output is the bias."
    ]


def test_a_spelling_that_loses_digits(tmp_path: Path) -> None:
    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", layer_norm(b, square="mean square"))
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    assert codes(path, x + 300) == {"loses-digits"} and codes(path, x) == set()
    assert str(axisnorm.audit(path, x + 300).norms[0].scheme) == LN


def test_running_statistics_that_do_not_fit(tmp_path: Path) -> None:
    b = Builder(15)
    path = b.save(tmp_path / "m.onnx", batch_norm(b), x=(8, 4, 3, 3))
    x = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype(np.float32)
    assert "running-statistics-mismatch" in codes(path, 100 * x)
    assert "running-statistics-mismatch" not in codes(path, x + 1)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from axisnorm.__main__ import main

    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", layer_norm(b, weight=np.zeros(8)), x=("n", 3, 8))
    np.savez(tmp_path / "x.npz", x=np.ones((4, 3, 8), np.float32))
    assert main(["audit", str(path), "--inputs", str(tmp_path / "x.npz"), "--json"]) == 0
    assert '"source": "onnx"' in capsys.readouterr().out
    assert main(["audit", str(path), "--strict"]) == 1
    assert main(["audit", str(path), "--text", "words"]) == 2
    capsys.readouterr()
    assert main(["audit", str(path), "--inputs", str(tmp_path / "none.npz")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "none.npz" in said


def without(module: str, path: Path) -> subprocess.CompletedProcess[str]:
    """An audit in a process that has not this module."""
    code = (
        "import sys\nclass No:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.split('.')[0] == {module!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, No())\nfrom axisnorm.__main__ import main\n"
        f"sys.exit(main(['audit', {str(path)!r}, '--json']))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_torch_is_not_needed_and_onnx_is(tmp_path: Path) -> None:
    b = Builder(17)
    path = b.save(tmp_path / "m.onnx", layer_norm(b))
    done = without("torch", path)
    assert done.returncode == 0, done.stderr
    assert [norm["scheme"] for norm in json.loads(done.stdout)["norms"]] == [LN]
    for module in ("onnx", "onnxruntime"):
        done = without(module, path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "axisnorm[onnx]" in done.stderr and f"{module} is not installed" in done.stderr
