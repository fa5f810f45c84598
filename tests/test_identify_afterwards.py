"""What came after a norm, what is no norm at all, and how long it takes to say so."""

import json
import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from axisnorm import Scheme, identify, reference
from axisnorm.lens.explain import partition
from axisnorm.lens.identifying.activations import FUNCTIONS, GATED, _erf
from axisnorm.lens.identifying.evidence import pair_of
from axisnorm.lens.identifying.pointwise import pointwise
from axisnorm.lens.identifying.quantized import grid_of

LAYER_NORM, FITTED = Scheme("... [d]"), Scheme("... [d]; affine=d")
HALF = (torch.float16, torch.bfloat16)


def normal(*shape, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def uniform(*shape, seed=1, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=random, dtype=torch.float64) + 0.5).to(dtype)


def dropout(y, p, seed=3):
    kept = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) >= p
    return torch.where(kept, y / (1 - p), torch.zeros_like(y))


def normalized(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def elements(scheme, shape):
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    return partition(sizes, sizes.layout.kept)


# --------------------------------------------------------------------------------------------
# Dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.123])
def test_dropout_after_a_norm(p, dtype):
    x = normal(64, 128, dtype=dtype)
    found = identify(x, dropout(normalized(x), p))
    best = found.best
    assert best.scheme == LAYER_NORM and best.free_parameters == 0
    assert best.afterwards.code == "dropout" and best.afterwards.parameter == p
    assert (
        f"dropout with p = {p:g}" in found.conclusion and f"{1 / (1 - p):.4g}" in found.conclusion
    )
    assert best.eps_interval[0] <= 1e-5 <= best.eps_interval[1]


@pytest.mark.parametrize("text", ["... [d]; center=false; eps=1e-6", "n (g=4 [c]) [...]", "[n] d"])
def test_dropout_after_other_norms(text):
    x = normal(48, 64)
    y = torch.from_numpy(reference.forward(x.numpy(), Scheme(text))[0])
    best = identify(x, dropout(y, 0.2)).best
    assert elements(best.scheme, x.shape) == elements(Scheme(text), x.shape)
    assert best.scheme.center == Scheme(text).center
    assert best.afterwards.code == "dropout" and best.afterwards.parameter == 0.2


def test_dropout_beside_given_weights():
    x, weight, bias = normal(40, 32), uniform(32), normal(32, seed=5)
    y = dropout(normalized(x, weight, bias), 0.3)
    best = identify(x, y, weight=weight, bias=bias).best
    assert best.scheme == FITTED and best.weight_from == "given"
    assert best.afterwards.code == "dropout" and best.afterwards.parameter == 0.3


def test_the_factor_of_dropout_is_in_fitted_weights_and_said():
    x, weight, bias = normal(64, 32), uniform(32), normal(32, seed=5)
    found = identify(x, dropout(normalized(x, weight, bias), 0.25))
    assert found.best.scheme == FITTED and found.best.afterwards is None
    np.testing.assert_allclose(found.best.weight, weight / 0.75, rtol=1e-4)
    assert any("If dropout left these zeros" in note and "1.3" in note for note in found.notes)


def test_zeros_that_are_no_dropout():
    x = normal(64, 128)
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) > 0.2
    found = identify(x, normalized(x) * kept)
    assert found.best.scheme == LAYER_NORM and found.best.afterwards is None
    assert any("as after a mask" in note for note in found.notes)
    # The factor does not belong to the share of zeros.
    best = identify(x, normalized(x) * kept * 2).best
    assert best.afterwards is None and best.weight == pytest.approx(2, rel=1e-6)
    found = identify(x, normalized(x).relu())
    assert found.best.afterwards.code == "relu"


def test_dropout_of_what_is_no_norm():
    x = normal(64, 128)
    assert identify(x, dropout(normal(64, 128, seed=9), 0.2)).best is None
    found = identify(x, dropout(x, 0.2))
    said = "But for dropout with p = 0.2, the output is the input"
    assert found.best is None and found.reason.startswith(said)
    found = identify(x, dropout(x * uniform(128), 0.2))
    assert found.best is None and found.reason.startswith("Where it is not 0, the output is")


# --------------------------------------------------------------------------------------------
# Activations

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "mish": F.mish,
    "elu": F.elu,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.07),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", ACTIVATIONS)
@pytest.mark.parametrize("weights", ["none", "given", "fitted"])
def test_an_activation_after_a_norm(code, weights, dtype):
    x, weight, bias = normal(64, 96, dtype=dtype), uniform(96, dtype=dtype), normal(96, seed=7)
    parameters = {} if weights == "none" else {"weight": weight, "bias": 0.5 * bias.to(dtype)}
    y = ACTIVATIONS[code](normalized(x, *parameters.values()))
    found = identify(x, y, **(parameters if weights == "given" else {}))
    best = found.best
    assert best.scheme == (LAYER_NORM if weights == "none" else FITTED)
    assert best.weight_from == weights
    # In bfloat16 the two kinds of GELU are one.
    assert best.afterwards.code.replace("_tanh", "") == code.replace("_tanh", "")
    assert best.afterwards.code == code or dtype in HALF
    assert "(norm(x))." in found.conclusion
    if code == "leaky_relu":
        assert best.afterwards.parameter == pytest.approx(0.07, rel=2e-3 if dtype in HALF else 0)


def test_an_activation_in_double():
    x = normal(32, 48, dtype=torch.float64)
    for code in ("gelu", "silu", "sigmoid", "elu"):
        best = identify(x, ACTIVATIONS[code](normalized(x))).best
        assert best.scheme == LAYER_NORM and best.afterwards.code == code


def test_an_activation_after_norms_of_an_image():
    x, weight, bias = normal(8, 6, 8, 8), uniform(6), normal(6, seed=4)
    y = F.gelu(F.group_norm(x, 3, weight, bias))
    found = identify(x, y)
    best = found.best
    assert best.scheme == Scheme.group_norm(3) and best.afterwards.code == "gelu"
    assert any("1 of 6 weights show in fewer than 3 outputs" in note for note in found.notes)
    np.testing.assert_allclose(best.weight.ravel()[1:], weight[1:], rtol=1e-4)
    for after, where in ((F.silu, "Before SiLU"), (F.relu, "Where it is not 0")):
        found = identify(x, after(F.batch_norm(x, None, None, weight, bias, training=True)))
        assert found.best is None and found.reason.startswith(where)
        assert "a per-channel affine map: statistics not identifiable" in found.reason


def test_the_error_function_to_the_last_digits():
    values = np.concatenate([np.linspace(-8, 8, 20001), 10.0 ** np.arange(-300, 1)])
    exact = np.array([math.erf(value) for value in values])
    np.testing.assert_allclose(_erf(values), exact, rtol=4e-16, atol=0)


@pytest.mark.parametrize("one", GATED, ids=lambda one: one.code)
def test_an_activation_of_what_is_no_norm(one):
    x, z = normal(64, 96, dtype=torch.float64), normal(64, 96, seed=8, dtype=torch.float64)
    assert identify(x, torch.from_numpy(one.compute(z.numpy()))).best is None


def test_an_activation_that_is_a_little_off_is_not_named():
    x = normal(64, 96)
    z = normalized(x)
    y = F.gelu(z)
    y = torch.where(z < -0.5, 0.99 * y, y)
    assert identify(x, y).best is None


# --------------------------------------------------------------------------------------------
# Functions of single elements


@pytest.mark.parametrize("one", FUNCTIONS, ids=lambda one: one.said.replace(" ", "-"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_of_single_elements_is_named(one, dtype):
    x = normal(64, 96, dtype=dtype)
    y = torch.from_numpy(one.compute(x.double().numpy())).to(dtype)
    found = identify(x, y)
    assert found.best is None and "nothing was normalized" in found.reason
    assert one.code in found.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_without_a_name(dtype):
    x = normal(64, 96, dtype=dtype)
    found = identify(x, torch.atan(3 * x))
    assert found.best is None and "depends on its own input alone" in found.reason


def test_what_is_no_function_of_single_elements():
    x = normal(64, 96, dtype=torch.bfloat16)
    for y in (normalized(x), normalized(x).relu(), F.gelu(normalized(x)), x * 2, x):
        assert pointwise(pair_of(x, y)) is None
    # Repeated samples have equal outputs for equal inputs, but only in their own columns.
    x = normal(8, 96).repeat(8, 1)
    assert pointwise(pair_of(x, normalized(x, uniform(96)))) is None
    # Groups that do not mix: each has its own line.
    x = normal(4, 256) + 100 * torch.arange(4.0)[:, None]
    y = normalized(x) + 100 * torch.arange(4.0)[:, None]
    assert pointwise(pair_of(x, y)) is None


def test_a_function_of_a_norm_over_all_elements_is_seen_through():
    x = normal(64, 96)
    best = identify(x, F.layer_norm(x * 2, (64, 96)).relu()).best
    assert best.axes == (0, 1) and best.afterwards.code == "relu"


# --------------------------------------------------------------------------------------------
# Quantized outputs


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_outputs_on_a_grid(dtype):
    x = normal(64, 128, dtype=dtype)
    found = identify(x, (normalized(x.float()) * 16).round().to(dtype) / 16)
    assert found.best.scheme.replace(eps=1e-5) == LAYER_NORM and found.best.free_parameters == 0
    assert any("only multiples of 0.0625" in note for note in found.notes)
    assert found.best.residual <= 1 / 32 + 1e-6 and found.best.tolerance >= 1 / 32


@pytest.mark.parametrize("zero", [0, 128])
@pytest.mark.parametrize("scale", [20.0, 60.0])
def test_whole_numbers_of_eight_bits(scale, zero):
    x = normal(64, 128)
    y = ((normalized(x) * scale).round() + zero).clamp(-128 + zero, 127 + zero)
    found = identify(x, y)
    assert found.best.scheme.replace(eps=1e-5) == LAYER_NORM and found.best.axes == (1,)
    (note,) = (note for note in found.notes if "whole numbers" in note)
    said = float(note.split("1 / ")[1].split(",")[0].split(" ")[0])
    assert said == pytest.approx(scale, rel=2e-3)
    assert ("zero point 128" in note) == bool(zero)


def test_whole_numbers_of_fitted_weights():
    x, weight, bias = normal(64, 64), uniform(64), normal(64, seed=2)
    found = identify(x, (normalized(x, weight, bias) * 20).round())
    assert found.best.scheme.replace(eps=1e-5) == FITTED
    np.testing.assert_allclose(found.best.weight, 20 * weight, atol=0.3)


def eight_bits(y, dtype):
    """Rounded to 255 multiples of a step that no type holds exactly, and kept in a type."""
    step = y.float().abs().max() / 127
    return (step * (y.float() / step).round().clamp(-127, 127)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("fitted", [False, True])
def test_eight_bits_in_any_type(fitted, dtype):
    """In half types no grid was seen, and zeros by rounding were said to be a dropout's."""
    x = normal(64, 256, dtype=dtype)
    parameters = (uniform(256), normal(256, seed=2)) if fitted else ()
    y = normalized(x.float(), *parameters)
    found = identify(x, eight_bits(y, dtype))
    assert found.best.scheme.replace(eps=1e-5) == (FITTED if fitted else LAYER_NORM)
    assert found.best.afterwards is None
    said = float(found.notes[0].split("multiples of ")[1].split(",")[0])
    assert said == pytest.approx(float(y.abs().max()) / 127, rel=2e-3)
    # What rounds to zero of the input itself is no dropout either.
    assert "dropout" not in identify(x, eight_bits(x, dtype)).conclusion


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("code", ["relu", "gelu", "silu", "elu", "tanh", "sigmoid"])
def test_eight_bits_after_an_activation(code, dtype):
    x, weight, bias = normal(64, 256, dtype=dtype), uniform(256), 0.3 * normal(256, seed=2)
    for parameters in ((), (weight, bias)):
        y = ACTIVATIONS[code](normalized(x.float(), *parameters))
        found = identify(x, eight_bits(y, dtype))
        assert found.best.scheme.replace(eps=1e-5) == (FITTED if parameters else LAYER_NORM)
        assert found.best.afterwards.code.replace("_tanh", "") == code


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_eight_bits_that_clip_after_dropout(p, dtype):
    """Outputs at the ends were held against the norm, so the dropout was said to be a mask."""
    x = normal(64, 256, dtype=dtype)
    y = dropout(normalized(x.float()), p)
    most = 0.6 * y.abs().max()
    found = identify(x, eight_bits(y.clamp(-most, most), dtype))
    assert found.best.scheme.replace(eps=1e-5) == LAYER_NORM
    assert found.best.afterwards[::2] == ("dropout", p)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_tenths_have_one_decimal(dtype):
    x = normal(64, 128, dtype=dtype)
    best = identify(x, ((normalized(x.float()) * 10).round() / 10).to(dtype)).best
    assert best.scheme.replace(eps=1e-5) == LAYER_NORM and best.free_parameters == 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_zeros_of_the_smallest_outputs_are_no_dropout(dtype):
    x = normal(64, 256, dtype=dtype)
    z = normalized(x.float())
    for y in (z * (z.abs() > 0.02), x.float() * (x.float().abs() > 0.02)):
        found = identify(x, y.to(dtype))
        assert "dropout" not in found.conclusion
        assert found.best is None or found.best.afterwards is None


def test_what_is_no_grid():
    x = normal(64, 128)
    for y in (normalized(x), normalized(x).relu(), x.sign()):
        assert grid_of(y.double().numpy(), "float32") is None
    # Numbers of one size are evenly spaced in bfloat16.
    for y in (normalized(x), x.log_softmax(-1), 3 + 0.1 * x):
        assert grid_of(y.bfloat16().double().numpy(), "bfloat16") is None
    found = identify(x, (normal(64, 128, seed=6) * 20).round())
    assert found.best is None


# --------------------------------------------------------------------------------------------
# Results


def test_what_came_after_is_in_every_form():
    x = normal(32, 64)
    found = identify(x, F.gelu(normalized(x)))
    data = json.loads(found.to_json())
    assert data["best"]["afterwards"]["code"] == "gelu"
    assert data["best"]["afterwards"]["parameter"] is None
    said = data["best"]["afterwards"]["sentence"]
    assert said in data["conclusion"] and said in found.to_text(width=200, color=False)
    assert said.split(":")[0] in found.to_html()
    assert json.loads(identify(x, normalized(x)).to_json())["best"]["afterwards"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_samples_leave_a_weight_for_each_element_open(dtype):
    x = normal(2, 16, 16, 16, dtype=dtype)
    weight, bias = uniform(16, 16, 16, dtype=dtype), normal(16, 16, 16, seed=4, dtype=dtype)
    found = identify(x, F.layer_norm(x, (16, 16, 16), weight, bias))
    assert found.best is None
    assert any("any output" in note and "ive " in note for note in found.notes)


# --------------------------------------------------------------------------------------------
# Time: a bound that a slow and busy machine keeps, three times what is promised


def nothing_explains(x):
    noise, weight, bias = normal(*x.shape, seed=11), uniform(x.shape[-1]), normal(x.shape[-1])
    norm = normalized(x, weight, bias)
    yield from (noise, x.sigmoid(), x.log_softmax(-1), (x * 8).round() / 8, noise.relu())
    # A little off, but more than rounding in bfloat16 explains.
    near = norm + 2e-2 * noise
    one_off = x.clone()
    one_off[3, 7] += 0.5
    yield from (dropout(noise, 0.1), near, F.gelu(near), x + 1e-3 * noise, near.relu(), x + norm)
    yield from (one_off, x + 1e-2 * noise, 2 * x + 1 + 1e-3 * noise, norm.sigmoid() + x)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_that_nothing_fits_is_said_soon(dtype):
    x = normal(64, 256, dtype=dtype)
    for y in nothing_explains(x.float()):
        least = np.inf
        for _ in range(3):
            start = time.process_time()
            found = identify(x, y.to(dtype))
            least = min(least, time.process_time() - start)
        assert found.best is None and least < 0.9, found.reason


# --------------------------------------------------------------------------------------------
# Functions along axes that are no normalizations

ALONG = {
    "softmax(x)": torch.softmax,
    "log_softmax(x)": torch.log_softmax,
    "x divided by the sum of |x| (L1)": lambda x, dim: F.normalize(x, 1, dim),
    "x divided by its sum": lambda x, dim: (x.double() / x.double().sum(dim, True)).to(x.dtype),
    "x divided by the largest |x|": lambda x, dim: F.normalize(x, math.inf, dim),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("said", ALONG)
def test_a_function_along_an_axis_is_named(said, dtype):
    for shape, axis in (((16, 32), 1), ((16, 32), 0), ((3, 4, 5, 6), 2)):
        x = 3 * normal(*shape, dtype=dtype)
        found = identify(x, ALONG[said](x, axis))
        assert found.best is None
        assert found.reason.startswith(f"The output is {said} along axis {axis}:"), found.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_what_is_near_a_function_along_an_axis_is_not_named_so(dtype):
    x = 2 * normal(32, 64, dtype=dtype)
    wide = x.double()
    near = (
        (1.05 * wide).softmax(1),
        (1.05 * wide).log_softmax(1),
        wide.roll(1, 0).softmax(1),
        wide.softmax(1) * (1 + 0.05 * normal(32, 64, seed=4)),
        1.05 * F.normalize(wide, 1, 1),
        normalized(wide).softmax(1),
    )
    for y in near:
        found = identify(x, y.to(dtype))
        assert found.best is None and "no variance is part of it" not in found.reason


# --------------------------------------------------------------------------------------------
# What is nearly the input


def test_what_is_nearly_the_input_is_no_norm():
    x, noise = normal(64, 256), normal(64, 256, seed=1)
    found = identify(x.bfloat16(), (x + 1e-5 * noise).bfloat16())
    assert found.best is None and found.reason.startswith("The output is")
    x = x.bfloat16()
    found = identify(x, (x.float().sigmoid() + 1e-3 * noise).bfloat16())
    assert found.best is None and found.reason.startswith("Before sigmoid, the output is")


def test_one_scale_of_all_elements_on_a_grid_is_a_map():
    x = normal(64, 256)
    found = identify(x, (30 * x).round())
    assert found.best is None and "one affine map of all elements" in found.reason
    # A norm of many groups tells its scale.
    found = identify(x, (30 * normalized(x)).round())
    assert found.best.scheme == LAYER_NORM


def test_a_divisor_larger_than_the_groups_of_other_axes():
    x = normal(32, 64, dtype=torch.float64)
    assert identify(x, 0.5 * normalized(x)).best.axes == (1,)


def test_a_weight_for_each_row_does_not_take_up_a_curve():
    """With a weight and a bias for each 32 elements the sum was said to be a norm."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(8, 128, 32, 32, generator=random)
    x = (x * (0.5 + torch.rand(8, 1, 1, 1, generator=random)) + 0.3).bfloat16()
    found = identify(x, (torch.sigmoid(normalized(x.float())) + x.float()).bfloat16())
    assert found.best is None
