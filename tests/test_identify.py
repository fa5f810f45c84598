"""What was computed, found from an input and an output alone."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from axisnorm import PRESETS, Scheme, identify, reference
from axisnorm.lens.explain import partition
from axisnorm.lens.identifying.hypotheses import Sharing, sharings
from axisnorm.lens.identifying.mistakes import CODES
from axisnorm.scheme import ArgumentError, DtypeError

KEYS = {
    "schema", "shape", "dtypes", "conclusion", "best", "candidates", "indistinguishable", "notes",
    "decisions",
}  # fmt: skip


def forward(x, scheme, *parameters, **given):
    # The variances of the largest numbers are infinite, though the output is not.
    with np.errstate(over="ignore"):
        return reference.forward(x, scheme, *parameters, **given)[0]


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def uniform(*shape, seed=1, dtype=np.float64):
    return np.random.default_rng(seed).uniform(0.5, 1.5, size=shape).astype(dtype)


def elements(scheme, shape):
    """Which elements share a mean."""
    sizes = scheme.layout(len(shape)).sizes(shape)
    return partition(sizes, sizes.layout.kept)


def constants(scheme):
    return scheme.center, scheme.scale, scheme.correction, scheme.eps, scheme.eps_placement


# --------------------------------------------------------------------------------------------
# One group: divisor, eps, its placement


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_bessel(dtype):
    x = np.array([[1, 0, 0, 0]], dtype)
    found = identify(x, np.array([[1.5, -0.5, -0.5, -0.5]], dtype))
    best = found.best
    assert constants(best.scheme)[:3] == (True, "auto", 1) and best.scheme.eps < 1e-7
    assert best.eps_interval[0] == 0 and best.eps_interval[1] < 2e-6
    assert best.mistake.code == "sample-deviation"
    assert best.correction == best.scheme.replace(correction=0)
    other = next(c for c in found.candidates if c.scheme == Scheme("... [d]; eps=0.0625"))
    assert other.fits and other.free_parameters == 1 and best.free_parameters == 0
    assert other.scheme in found.indistinguishable
    assert found.candidates.index(other) > found.candidates.index(best) == 0


def test_keras_eps_of_two_numbers():
    x = np.array([0.09484422, 0.16441762])
    found = identify(x, np.array([-0.73995596, 0.73995596]))
    assert found.best.scheme == Scheme("... [d]; eps=1e-3")
    low, high = found.best.eps_interval
    assert 9.9e-4 < low <= 0.00099999979 <= high < 1.01e-3
    assert "keras.layer_norm" in found.best.norms
    assert not any(s.correction for s in found.indistinguishable)


@pytest.mark.parametrize(
    ("y", "scheme", "code"),
    [
        ([0.3651483, 0.7302967, 1.0954450, 1.4605934], "... [d]; center=false", None),
        (
            [0.8940696, 1.7881393, 2.6822089, 3.5762785],
            "... [d]; center=false; scale=std; eps=1e-3",
            None,
        ),
        (
            [0.7745964, 1.5491929, 2.3237893, 3.0983854],
            "... [d]; center=false; scale=std; correction=1",
            None,
        ),
        (
            [0.1825742, 0.3651484, 0.5477226, 0.7302967],
            "... [d]; center=false; scale=l2; eps_placement=max",
            "length-instead-of-rms",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_relatives_of_rms_norm(y, scheme, code, dtype, shape):
    x = np.array([1, 2, 3, 4], dtype).reshape(shape)
    best = identify(x, np.array(y, dtype).reshape(shape)).best
    expected = Scheme(scheme)
    eps = expected.eps if expected.eps == 1e-3 else best.scheme.eps
    assert best.scheme.replace(eps=eps) == expected.replace(eps=eps)
    assert best.eps_interval[0] <= best.scheme.eps <= 1.1e-3
    assert (best.mistake.code if best.mistake else None) == code


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_where_eps_stands(dtype):
    x = np.array([1, 2, 3, 4], dtype) * dtype(1e-3)
    inside = identify(x, np.array([-0.4472136, -0.1490712, 0.1490712, 0.4472136], dtype)).best
    assert inside.scheme == Scheme("... [d]") and inside.mistake is None
    outside = identify(x, np.array([-1.3297472, -0.4432491, 0.4432491, 1.3297472], dtype)).best
    assert outside.scheme == Scheme("... [d]; eps_placement=std")
    assert outside.mistake.code == "eps-outside-root" and outside.correction == Scheme("... [d]")
    for best in (inside, outside):
        assert best.eps_interval[0] <= 1e-5 <= best.eps_interval[1]
        assert best.eps_interval[1] - best.eps_interval[0] < 1e-8


FIRST_ROW = [-2.1918, 1.2574, -0.3838, 1.3870]


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4)])
def test_the_deviation_under_the_root(shape):
    wrong = [-1.7048934056508998, 0.9571791768620398, -0.3094894774404756, 1.0572037062293356]
    found = identify(np.reshape(FIRST_ROW, shape), np.reshape(wrong, shape))
    assert found.best.scheme == Scheme("... [d]; scale=sqrt_std; correction=1")
    assert found.best.mistake.code == "deviation-under-root"
    assert "sample standard deviation" in found.best.mistake.sentence
    assert found.best.mistake.sentence in found.conclusion
    assert found.best.correction == Scheme("... [d]")
    # What it should have been gives what the asker expected.
    right = [-1.519391435327454, 0.8530327107709863, -0.2758152854532861, 0.942174010009754]
    meant = forward(np.reshape(FIRST_ROW, shape), found.best.correction)
    np.testing.assert_allclose(meant.ravel(), right, rtol=1e-12)
    best = identify(np.reshape(FIRST_ROW, shape), np.reshape(right, shape)).best
    assert best.scheme == Scheme("... [d]") and best.mistake is None


def test_printed_numbers():
    x = [[[-2.1918, 1.2574, -0.3838, 1.3870], [-0.4043, 1.2972, -1.7326, 0.4047],
          [0.4560, 0.6482, 1.0858, 2.2086]],
         [[-1.4964, 0.3722, -0.7766, 0.3062], [0.9812, 0.1709, -0.9177, -1.2558],
          [-1.1560, -0.0367, 0.5496, -1.1142]]]  # fmt: skip
    y = [[[-1.5194, 0.8530, -0.2758, 0.9422], [-0.2653, 1.2620, -1.4576, 0.4609],
          [-0.9470, -0.6641, -0.0204, 1.6315]],
         [[-1.4058, 0.9872, -0.4840, 0.9026], [1.3933, 0.4803, -0.7463, -1.1273],
          [-0.9869, 0.5545, 1.3619, -0.9294]]]  # fmt: skip
    found = identify(np.array(x), np.array(y))
    assert found.best.scheme == Scheme("... [d]") and found.best.axes == (2,)
    assert any("4 decimals" in note for note in found.notes)
    # Whole numbers are exact, though they have no decimals.
    x = np.array([[1.0, 2, 4, 1], [6, 3, 2, 4], [2, 4, 6, 1]])
    y = [[-0.8165, 0.0, 1.6330, -0.8165], [1.5213, -0.5071, -1.1832, 0.1690],
         [-0.6509, 0.3906, 1.4321, -1.1717]]  # fmt: skip
    assert identify(x, np.array(y)).best.scheme == Scheme("... [d]")


def test_eps_of_groups_of_different_variance():
    x = normal(64, 256, dtype=np.float32) * np.float32(10.0) ** np.linspace(-2, 1, 64)[:, None]
    for eps in (1e-3, 1e-5, 3.3e-4):
        best = identify(x, forward(x.astype(np.float32), Scheme("... [d]").replace(eps=eps))).best
        low, high = best.eps_interval
        assert low <= eps <= high and high - low < 0.01 * eps
        assert best.scheme.eps == eps and best.free_parameters == (eps == 3.3e-4)
    # In float32 these are one.
    x = normal(64, 256, dtype=np.float32)
    found = identify(x, forward(x, Scheme("... [d]; eps=1e-12")))
    assert found.best.eps_interval[0] == 0 < 1e-12 < found.best.eps_interval[1] < 1e-5
    assert any("may be 0, 1e-12" in note for note in found.notes)


def test_a_divisor_that_is_neither_n_nor_n_minus_1():
    x = normal(12, 20) * np.linspace(0.1, 3, 12)[:, None]
    best = identify(x, forward(x, Scheme("... [d]; correction=3; eps=1e-3"))).best
    assert best.scheme == Scheme("... [d]; correction=3; eps=1e-3") and best.free_parameters == 1


# --------------------------------------------------------------------------------------------
# Which elements share a mean, which a weight


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize(
    ("scheme", "weight_shape", "axes", "affine_axes"),
    [
        (Scheme.group_norm(1), (3,), (1, 2, 3), (1,)),
        (Scheme.layer_norm((3, 4, 4)), (3, 4, 4), (1, 2, 3), (1, 2, 3)),
        (Scheme.layer_norm_2d(), (3,), (1,), (1,)),
    ],
)
def test_three_layer_norms_of_an_image(scheme, weight_shape, axes, affine_axes, fitted):
    x, weight = normal(2, 3, 4, 4), uniform(*weight_shape)
    best = identify(x, forward(x, scheme, weight), weight=None if fitted else weight).best
    assert best.axes == axes and best.affine_axes == affine_axes
    assert elements(best.scheme, x.shape) == elements(scheme, x.shape)
    assert best.scheme.layout(4).sizes(x.shape).affine_shape == weight_shape
    assert best.free_parameters == (weight.size if fitted else 0)
    assert best.weight_from == ("fitted" if fitted else "given")
    np.testing.assert_allclose(best.weight, weight, rtol=1e-9)
    assert best.eps_interval[0] <= scheme.eps <= best.eps_interval[1]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "text",
    [
        "... [d]", "... [s d]", "[b] s [d]", "[b s] d", "b [s] d", "b s (h=4 [d])",
        "b s ([h=2] d)", "n (g=3 [c]) [...]", "(v=2 [n]) c [l]", "[b] s d", "[b s d]",
    ],
)  # fmt: skip
def test_every_set_of_axes(text, dtype):
    x = (normal(4, 6, 8) * 2 + 1).astype(dtype)
    found = identify(x, forward(x, Scheme(text)))
    assert elements(found.best.scheme, x.shape) == elements(Scheme(text), x.shape)
    assert found.best.free_parameters == 0 and found.best.scheme.center
    assert found.best.eps_interval[0] <= 1e-5 <= found.best.eps_interval[1]


@pytest.mark.parametrize(
    ("text", "shape"),
    [("[b] s [d]; affine=s", (5, 3, 8)), ("b s (h=2 [d]); affine=h d", (3, 5, 8)),
     ("b s (h=2 [d]); affine=d", (3, 5, 8)), ("n (g=2 [c]) [...]; affine=g", (4, 6, 5)),
     ("(v=2 [n]) c [l]; affine=c", (6, 3, 5)), ("b s [d]; affine=s", (4, 3, 8))],
)  # fmt: skip
@pytest.mark.parametrize("fitted", [False, True])
def test_every_place_of_a_weight(text, shape, fitted):
    scheme = Scheme(text)
    own = scheme.layout(3).sizes(shape).affine_shape
    x, weight, bias = normal(*shape), uniform(*own), normal(*own, seed=2)
    given = {} if fitted else {"weight": weight, "bias": bias}
    found = identify(x, forward(x, scheme, weight, bias), **given)
    if text == "[b] s [d]; affine=s" and fitted:
        # Each weight meets one group alone: any output is such a map.
        assert found.best is None
        return
    best = found.best
    sizes = best.scheme.layout(3).sizes(shape)
    assert elements(best.scheme, shape) == elements(scheme, shape)
    assert partition(sizes, sizes.layout.affine) == partition(
        scheme.layout(3).sizes(shape), scheme.layout(3).affine
    )
    np.testing.assert_allclose(best.weight.ravel(), weight.ravel(), rtol=1e-8)
    np.testing.assert_allclose(best.bias.ravel(), bias.ravel(), rtol=1e-8, atol=1e-8)


def test_axes_of_size_one_leave_norms_open():
    x = normal(1, 4, 5, 6)
    found = identify(x, forward(x, Scheme.instance_norm(affine="")))
    named = {found.best.scheme, *found.indistinguishable}
    assert {Scheme("... [s d]"), Scheme("[n] c [...]")} <= named
    decision = next(d for d in found.decisions if Scheme("[n] c [...]") in d.schemes)
    outputs = [forward(decision.x, scheme) for scheme in decision.schemes]
    for y, computed in zip(decision.outputs, outputs, strict=True):
        np.testing.assert_allclose(y, computed)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.02
    assert decision.x.size <= 8 and "shape" in decision.sentence


def test_decisions_tell_what_fits_alike_apart():
    x = np.array([[1.0, 0.0, 0.0, 0.0]])
    found = identify(x, np.array([[1.5, -0.5, -0.5, -0.5]]))
    assert found.decisions
    decided = set()
    for decision in found.decisions:
        best = forward(decision.x, decision.schemes[0])
        for scheme in decision.schemes[1:]:
            decided.add(scheme)
            assert np.abs(forward(decision.x, scheme) - best).max() > 0.01 * np.abs(best).max()
    assert Scheme("... [d]; eps=0.0625") in decided


def test_given_weight_of_ambiguous_shape():
    x, weight, bias = normal(4, 4, 4, 4), uniform(4), normal(4, seed=5)
    for affine in "nchw":
        scheme = Scheme("n [c h w]", affine=affine)
        best = identify(x, forward(x, scheme, weight, bias), weight=weight, bias=bias).best
        assert best.affine_axes == ("nchw".index(affine),) and best.axes == (1, 2, 3)


def test_weight_in_broadcast_shape_and_scalar():
    x, weight = normal(3, 4, 5, 6), uniform(4)
    y = forward(x, Scheme.batch_norm(), weight, weight)
    best = identify(x, y, weight=weight.reshape(1, 4, 1, 1), bias=weight.reshape(1, 4, 1, 1)).best
    assert best.scheme == Scheme.batch_norm() and best.free_parameters == 0
    found = identify(x, forward(x, Scheme("... [d]")) * 2 + 1, weight=np.array([2.0]),
                     bias=np.array([1.0]))  # fmt: skip
    assert found.best.scheme == Scheme("... [d]")
    assert "Weight and bias are one number each." in found.notes


def test_the_part_that_is_missing_is_fitted():
    x, weight, bias = normal(8, 3, 16), uniform(16), normal(16, seed=4)
    y = forward(x, Scheme.layer_norm(), weight, bias)
    best = identify(x, y, weight=weight).best
    assert (best.weight_from, best.bias_from) == ("given", "fitted") and best.free_parameters == 16
    np.testing.assert_allclose(best.bias, bias, rtol=1e-9, atol=1e-12)
    best = identify(x, y, bias=bias).best
    assert (best.weight_from, best.bias_from) == ("fitted", "given")
    np.testing.assert_allclose(best.weight, weight, rtol=1e-9)


def test_a_given_weight_that_was_not_used():
    x, weight = normal(4, 6, 5, 5), uniform(6)
    found = identify(x, forward(x, Scheme.group_norm(2), weight, weight), weight=weight + 1)
    assert found.best.scheme == Scheme.group_norm(2) and found.best.weight_from == "fitted"
    assert any("nothing fits this output" in note for note in found.notes)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_weight_against_one_plus_weight(offset):
    x, weight = normal(8, 32), uniform(32)
    scheme = Scheme.rms_norm(eps=1e-6, weight_offset=offset)
    found = identify(x, forward(x, scheme, weight), weight=weight)
    assert found.best.scheme == scheme
    assert ("gemma.rms_norm" in found.best.norms) == bool(offset)


@pytest.mark.parametrize("rounding", ["once", "before_affine"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_rounding_point(rounding, dtype):
    x, weight = normal(64, 96, dtype=dtype), uniform(96, dtype=dtype)
    scheme = Scheme.rms_norm(eps=1e-6, rounding=rounding)
    found = identify(x, forward(x, scheme, weight), weight=weight)
    assert found.best.scheme == scheme and found.best.computed_in == "float32"
    assert ("llama.rms_norm" in found.best.norms) == (rounding == "before_affine")
    # Where the weight has to be fitted, this stays open.
    found = identify(x, forward(x, scheme, weight))
    roundings = {found.best.scheme.rounding} | {s.rounding for s in found.indistinguishable}
    assert roundings == {"once", "before_affine"}


# --------------------------------------------------------------------------------------------
# Running statistics, and maps that say nothing of statistics


SMALL = np.array([[1.0, 10.0], [3.0, 20.0]])
EVAL = np.array([[1.9999987, 1.9999994], [3.9999963, 7.9999982]])
TRAIN = np.array([[-0.99999, -3.9999994], [2.99999, 1.9999994]])
GIVEN = {"weight": np.array([2.0, 3.0]), "bias": np.array([1.0, -1.0]),
         "running_mean": np.array([0.0, 5.0]), "running_var": np.array([4.0, 25.0])}  # fmt: skip


def test_batch_norm_modes():
    found = identify(SMALL, EVAL, **GIVEN)
    assert found.best.scheme == Scheme("[n] d; affine=d; statistics=running")
    assert "torch.batch_norm.eval" in found.best.norms
    found = identify(SMALL, TRAIN, **GIVEN)
    assert found.best.scheme == Scheme("[n] d; affine=d")
    assert any("running statistics were not used" in note for note in found.notes)


@pytest.mark.parametrize("y", [EVAL, TRAIN])
def test_one_batch_does_not_say_the_statistics(y):
    found = identify(SMALL, y)
    said = "a per-channel affine map: statistics not identifiable from this batch"
    assert found.best is None and said in found.conclusion and said in found.to_text(width=200)
    assert found.decisions[0].sentence.startswith("Run it on 2 * x + 1.")
    assert found.indistinguishable == ()


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_images_of_a_batch_norm(statistics):
    x, weight, bias = normal(5, 4, 6, 6), uniform(4), normal(4, seed=3)
    mean, var = normal(4, seed=6), uniform(4, seed=7)
    scheme = Scheme.batch_norm(statistics=statistics)
    given = {"running_mean": mean, "running_var": var} if statistics == "running" else {}
    y = forward(x, scheme, weight, bias, **given)
    everything = {"running_mean": mean, "running_var": var, "weight": weight, "bias": bias}
    found = identify(x, y, **everything)
    assert found.best.scheme == scheme and found.best.free_parameters == 0
    found = identify(x, y)
    assert found.best is None and "a per-channel affine map" in found.conclusion
    # With statistics but without parameters the map says no more.
    found = identify(x, y, running_mean=mean, running_var=var)
    assert found.best is None and "a per-channel affine map" in found.conclusion


def test_other_maps():
    x = normal(6, 5, 4)
    found = identify(x, 0.3 * x - 2)
    assert found.best is None and "one affine map of all elements" in found.conclusion
    found = identify(x, x * uniform(6, 5, 1))
    assert found.best is None and "axes 0, 1" in found.conclusion
    found = identify(x, x.copy())
    assert found.best is None and found.conclusion.startswith("The output is the input")
    once = forward(x, Scheme("... [d]"))
    found = identify(once, once)
    assert found.best is None and found.conclusion.startswith("The output is the input")


def test_nothing_fits():
    x = normal(6, 5, 16)
    found = identify(x, normal(6, 5, 16, seed=9))
    assert found.best is None and found.conclusion.startswith("Nothing that was tried fits.")
    near = found.candidates[0]
    assert str(near.scheme) in found.conclusion and f"{near.residual:.2g}" in found.conclusion
    assert near.residual > 1 > near.tolerance and not near.fits
    assert found.indistinguishable == () and found.ruled_out == found.candidates


def test_constant_groups_say_nothing():
    x = normal(8, 16)
    x[2], x[5] = 3.0, -1.0
    found = identify(x, forward(x, Scheme("... [d]")))
    assert found.best.scheme == Scheme("... [d]")
    assert "2 of 8 groups are constant and say nothing." in found.notes


def test_centred_input_leaves_the_mean_open():
    half = np.random.default_rng(0).integers(1, 9, size=(8, 8)).astype(np.float64)
    x = np.concatenate([half, -half], axis=1)
    found = identify(x, forward(x, Scheme("... [d]")))
    both = {found.best.scheme, *found.indistinguishable}
    assert {Scheme("... [d]"), Scheme("... [d]; center=false")} <= both
    assert found.center_unclear


# --------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("text", "code", "meant"),
    [
        ("... [d]; scale=sqrt_std; correction=1", "deviation-under-root", "... [d]"),
        ("... [d]; scale=sqrt_std", "deviation-under-root", "... [d]"),
        ("... [d]; scale=var", "variance-without-root", "... [d]"),
        ("... [d]; correction=1", "sample-deviation", "... [d]"),
        ("... [d]; correction=1; eps=1e-6; eps_placement=std", "sample-deviation",
         "... [d]; eps=1e-6"),
        ("... [d]; eps=1e-3; eps_placement=std", "eps-outside-root", "... [d]; eps=1e-3"),
        ("... [d]; center=false; eps=1e-3; eps_placement=std", "eps-outside-root",
         "... [d]; center=false; eps=1e-3"),
        ("... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max", "length-instead-of-rms",
         "... [d]; center=false; eps=1e-12"),
        ("n c [h] w", "axes-off-by-one", "... [d]"),
        ("n c [h] w; center=false; eps=1e-6", "axes-off-by-one", "... [d]; center=false; eps=1e-6"),
    ],
)  # fmt: skip
def test_known_mistakes(text, code, meant):
    x = normal(3, 4, 5, 7) * np.linspace(0.3, 2, 5)[:, None] + 0.5
    best = identify(x, forward(x, Scheme(text))).best
    assert best.scheme == Scheme(text)
    assert best.mistake.code == code and best.correction == Scheme(meant)
    assert code in CODES and len(best.mistake.sentence) > 40


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_published_norms_are_named(name):
    preset = PRESETS[name]
    if "g" in [part.name for axis in preset.parsed for part in axis]:
        preset = Scheme(str(preset).replace("(g=32 ", "(g ")).with_sizes({"g": 2})
    shape = (3, 6, 5, 6)
    # Small values, so that each eps shows; the last sees nothing below 1e-9.
    x = normal(*shape) * np.exp(normal(3, 1, 5, 1, seed=3)) * 1e-2
    own = preset.layout(4).sizes(shape).affine_shape
    given = {"weight": uniform(*own), "bias": normal(*own, seed=8)} if preset.affine else {}
    if preset.statistics == "running":
        given |= {"running_mean": normal(6, seed=4), "running_var": uniform(6, seed=5)}
    y = forward(x, preset, **given)
    found = identify(x, y, **given)
    same = [name for name, other in PRESETS.items()
            if constants(other) == constants(PRESETS[name])]  # fmt: skip
    assert set(found.best.norms) & set(same), (found.best.scheme, found.best.norms)
    assert elements(found.best.scheme, shape) == elements(preset, shape)
    assert found.best.eps_interval[0] <= reference.resolve_eps(preset, x.dtype)
    assert reference.resolve_eps(preset, x.dtype) <= found.best.eps_interval[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [("[b] d", "... [d]"), ("[b] d", "... [d]; center=false; eps=1e-6")],
)
def test_another_norm_came_first(first, second):
    x = normal(16, 64) * np.linspace(0.5, 3, 64) + normal(64, seed=5)
    x = x.astype(np.float32)
    best = identify(x, forward(forward(x, Scheme(first)), Scheme(second))).best
    assert elements(best.first, x.shape) == elements(Scheme(first), x.shape)
    assert best.scheme == Scheme(second) and best.free_parameters == 0


def test_normalized_twice():
    x = normal(4, 6, 16) * 2 + 1
    once = Scheme("... [d]")
    best = identify(x, forward(forward(x, once), once)).best
    assert best.scheme == once and best.first == once and best.correction == once
    assert best.mistake.code == "normalized-twice"
    assert best.eps_interval[0] <= 1e-5 <= best.eps_interval[1]
    # By another norm first.
    best = identify(x, forward(forward(x, Scheme("[b s] d")), once)).best
    assert best.mistake.code == "normalized-twice" and best.first == Scheme("[b s] d")
    assert best.scheme == once and best.free_parameters == 0
    # With weights.
    norm, weight, bias = Scheme.layer_norm(), uniform(16), normal(16, seed=2)
    y = forward(forward(x, norm, weight, bias), norm, weight, bias)
    best = identify(x, y, weight=weight, bias=bias).best
    assert best.mistake.code == "normalized-twice" and best.scheme == best.first == norm


@pytest.mark.parametrize("inside", [False, True])
def test_masked_outputs(inside):
    x = normal(4, 6, 8) + 2
    mask = np.arange(6)[None, :, None] < np.array([6, 4, 5, 2])[:, None, None]
    scheme = Scheme("[b s] d")
    y = forward(x, scheme, mask=mask) if inside else forward(x, scheme) * mask
    found = identify(x, y)
    assert found.best.scheme == scheme and found.best.free_parameters == 0
    said = "left out of the statistics too" if inside else "counted in the statistics"
    assert any(said in note for note in found.notes)


# --------------------------------------------------------------------------------------------
# Types: what rounding explains, what was computed in what


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_torch_layers(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, 5, 7, generator=generator).to(dtype) * 3 + 1
    weight = (torch.rand(8, generator=generator) + 0.5).to(dtype)
    bias = torch.randn(8, generator=generator).to(dtype)
    for y, scheme, given in (
        (F.layer_norm(x, (7,)), Scheme("... [d]"), {}),
        (F.group_norm(x, 4, weight, bias), Scheme.group_norm(4), {"weight": weight, "bias": bias}),
        (F.batch_norm(x, None, None, weight, bias, training=True), Scheme.batch_norm(),
         {"weight": weight, "bias": bias}),
        (F.instance_norm(x), Scheme("n c [...]"), {}),
        (F.rms_norm(x, (7,)), Scheme("... [d]; center=false"), {}),
    ):  # fmt: skip
        best = identify(x, y, **given).best
        assert elements(best.scheme, tuple(x.shape)) == elements(scheme, tuple(x.shape))
        assert best.scheme.center == scheme.center and best.scheme.affine == scheme.affine
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        expected = 1e-5 if scheme.center else eps
        assert best.eps_interval[0] <= expected <= best.eps_interval[1]


def test_computed_in_a_half_type():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 16, 64, generator=generator).bfloat16()
    spread = x.var(-1, keepdim=True, unbiased=False)
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-5)
    found = identify(x, y)
    assert elements(found.best.scheme, (8, 16, 64)) == elements(Scheme("... [d]"), (8, 16, 64))
    assert found.best.computed_in == "bfloat16"
    assert "Only a computation in bfloat16 itself explains the differences." in found.notes


def test_computed_in_float32_and_kept_in_float64():
    x = normal(16, 64)
    narrow = x.astype(np.float32)
    y = forward(narrow, Scheme("... [d]")).astype(np.float64)
    assert identify(x, y).best.scheme == Scheme("... [d]")
    assert identify(x, y).best.computed_in == "float32"
    assert identify(x, forward(x, Scheme("... [d]"))).best.computed_in == "float64"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 64, generator=generator)
    assert identify(x, F.layer_norm(x, (64,))).best.computed_in == "float32"


def test_large_offsets():
    x = normal(16, 64, dtype=np.float32) + np.float32(1000)
    best = identify(x, forward(x, Scheme("... [d]"))).best
    assert best.scheme.replace(eps=1e-5) == Scheme("... [d]")
    assert best.eps_interval[0] <= 1e-5 <= best.eps_interval[1]


def test_memory_layout_does_not_matter():
    x = normal(6, 4, 5, 8)
    scheme = Scheme("n (g=2 [c]) [...]")
    y = forward(x, scheme)
    with pytest.raises(ArgumentError, match=r"y\.transpose"):
        identify(x, y.T)
    for pair in (
        (np.asfortranarray(x), np.ascontiguousarray(y.T).T),
        (np.repeat(x, 2, axis=0)[::2], np.repeat(y, 3, axis=3)[..., ::3]),
        (torch.from_numpy(x).to(memory_format=torch.channels_last), torch.from_numpy(y)),
    ):
        assert identify(*pair).best.scheme == scheme
    last = [np.moveaxis(a, 1, -1) for a in (x, y)]
    assert identify(*last).best.scheme == Scheme("n [...] (g=2 [c])")


def test_inputs_are_not_changed():
    x, weight = normal(4, 6, 8), uniform(8)
    y = forward(x, Scheme.layer_norm(), weight)
    kept = [a.copy() for a in (x, y, weight)]
    for a in (x, y, weight):
        a.flags.writeable = False
    identify(x, y, weight=weight)
    for a, before in zip((x, y, weight), kept, strict=True):
        np.testing.assert_array_equal(a, before)


def test_large_pairs():
    x = normal(16, 64, 32, 32, dtype=np.float32)
    found = identify(x, forward(x, Scheme("n (g=8 [c]) [...]")))
    assert found.best.scheme == Scheme("n (g=8 [c]) [...]") and found.best.residual < 1e-6
    weight, bias = uniform(64, dtype=np.float32), normal(64, seed=3, dtype=np.float32)
    found = identify(x, forward(x, Scheme.group_norm(8), weight, bias))
    assert found.best.scheme == Scheme.group_norm(8)
    np.testing.assert_allclose(found.best.weight.ravel(), weight, rtol=1e-5)


# --------------------------------------------------------------------------------------------
# Results


def test_json_and_text(capsys):
    x, weight = normal(4, 3, 16), uniform(16)
    found = identify(x, forward(x, Scheme.layer_norm(), weight))
    data = json.loads(found.to_json())
    assert set(data) == KEYS and data["schema"] == "axisnorm.identification/1"
    assert data["best"] == data["candidates"][0]
    assert data["best"]["scheme"] == "... [d]; affine=d" and data["best"]["axes"] == [2]
    assert data["best"]["weight"]["from"] == "fitted" and data["best"]["weight"]["shape"] == [16]
    assert data["shape"] == [4, 3, 16] and data["dtypes"] == ["float64", "float64"]
    assert data["indistinguishable"] == [str(s) for s in found.indistinguishable]
    text = found.to_text(width=100, color=False)
    assert "BEST  one mean a token" in text and "torch.layer_norm" in text and "\x1b" not in text
    assert "\x1b" in found.to_text(width=100, color=True)
    assert all(len(line) <= 60 for line in found.to_text(width=60, color=False).splitlines())


def test_infinite_ends_are_null_in_json():
    x = normal(12, 5)
    mean, var = normal(5, seed=2), uniform(5)
    y = forward(x, Scheme.batch_norm(statistics="running"), uniform(5, seed=9),
                running_mean=mean, running_var=var)  # fmt: skip
    found = identify(x, y, running_mean=mean, running_var=var)
    assert math.isinf(found.best.eps_interval[1])
    assert json.loads(found.to_json())["best"]["eps_interval"] == [0.0, None]
    assert "not determined" in found.to_text(width=100)


def test_sets_of_axes_are_counted_right():
    every = list(sharings((2, 3, 4)))
    assert len({s.key for s in every}) == len(every) == 7 + 2 * 4
    assert all(s.shape == (2, 3, 4) for s in every)
    halves = Sharing((((2, False),), ((3, False),), ((2, False), (2, True))))
    assert halves in every and halves.group_size == 2 and halves.split == 2
    assert str(halves.scheme()) == "b s (h=2 [d])"


# --------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (normal(2, 3), normal(3, 2), r"have \(2, 3\) and \(3, 2\). .*y.transpose\(1, 0\)"),
        (normal(2, 6), normal(12), r"y.reshape\(2, 6\)"),
        (normal(2, 6), normal(5), "of one call"),
        (normal(1), normal(1), "at least two"),
        (np.float64(3.0), np.float64(2.0), "at least two"),
        (normal(0, 3), normal(0, 3), "at least two"),
        (np.full((2, 3), 2.5), normal(2, 3), "x is 2.5 throughout"),
        (normal(2, 3), np.zeros((2, 3)), "y is 0 throughout"),
        ([[1.0, 2.0]], normal(1, 2), "x is a list"),
        (normal(2, 3), None, "y is a NoneType"),
    ],
)
def test_arrays_that_say_nothing(x, y, said):
    with pytest.raises(ArgumentError, match=said) as caught:
        identify(x, y)
    assert str(caught.value).count(". ") >= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["x", "y", "weight", "running_var"])
def test_values_that_are_not_finite_are_located(name, value):
    arrays = {"x": normal(4, 3), "y": normal(4, 3, seed=1), "weight": uniform(3),
              "running_mean": normal(3), "running_var": uniform(3)}  # fmt: skip
    index = (2, 1) if name in "xy" else (1,)
    arrays[name][index] = value
    with pytest.raises(ArgumentError, match=rf"{name}\[{', '.join(map(str, index))}\] is {value}"):
        identify(arrays.pop("x"), arrays.pop("y"), **arrays)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, bool, np.complex64, object])
def test_types_that_are_not_floating(dtype):
    x = np.array([[1, 2, 3], [4, 5, 7]])
    with pytest.raises(DtypeError, match="x is"):
        identify(x.astype(dtype), x.astype(np.float64))
    with pytest.raises(DtypeError, match="weight is"):
        identify(x * 1.0, x * 2.0, weight=np.ones(3, dtype))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": np.ones(5)}, r"Its shape is \(5,\), the input's \(4, 3\)"),
        ({"bias": np.ones((4, 3, 2))}, "no axes have these sizes"),
        ({"weight": np.ones(3), "bias": np.ones(4)}, "weight and bias have one shape"),
        ({"running_mean": np.ones(3)}, "come together"),
        ({"running_mean": np.ones(3), "running_var": np.ones(4)}, "have one shape"),
        ({"running_mean": np.ones(3), "running_var": -np.ones(3)}, "not negative"),
    ],
)
def test_parameters_that_do_not_fit(given, said):
    with pytest.raises(ArgumentError, match=said):
        identify(normal(4, 3), normal(4, 3, seed=1), **given)


# --------------------------------------------------------------------------------------------
# Regressions


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 256), (16, 32)])
def test_a_fitted_norm_is_seen_through_a_relu(dtype, shape):
    # Some weights are fitted to a few outputs, some of them small beside weight times input.
    random = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)
    weight, bias = torch.randn(2, shape[-1], generator=random).to(dtype)
    found = identify(x, F.layer_norm(x, shape[-1:], weight, bias).relu())
    assert found.best.scheme == Scheme("... [d]; affine=d") and found.best.weight_from == "fitted"
    assert any("as after a ReLU" in note for note in found.notes)


@pytest.mark.parametrize("placement", ["std", "variance"])
def test_a_sample_deviation_shows_in_eps_where_weights_are_fitted(placement):
    scheme = Scheme(f"... [d]; affine=d; correction=1; eps=1e-3; eps_placement={placement}")
    x = normal(40, 8) * 10.0 ** np.linspace(-3, 1, 40)[:, None]
    best = identify(x, forward(x, scheme, uniform(8))).best
    assert best.scheme == scheme and best.free_parameters == 8
    assert best.eps_interval[0] <= 1e-3 <= best.eps_interval[1]
    plain = identify(x, forward(x, scheme.replace(correction=0), uniform(8))).best
    assert plain.scheme == scheme.replace(correction=0)


def test_a_weight_for_each_element_of_one_sample_is_said_to_be_possible():
    x = normal(64)
    found = identify(x, forward(x, Scheme("[d]; affine=d"), uniform(64)))
    assert found.best is None and any("any output fits" in note for note in found.notes)


def test_a_division_by_the_mean_absolute_deviation_is_no_norm():
    x = normal(16, 32)
    centred = x - x.mean(-1, keepdims=True)
    for divisor in (np.abs(centred).mean(-1, keepdims=True), 1.0):
        assert identify(x, centred / divisor).best is None


def test_subnormal_numbers():
    x = normal(16, 32) * 1e-310
    assert identify(x, forward(x, Scheme("... [d]"))).conclusion


@pytest.mark.parametrize("given", ["nothing", "weight", "bias", "weight and bias"])
@pytest.mark.parametrize("seed", range(3))
def test_an_affine_map_with_the_given_parameters_is_no_norm(given, seed):
    # Standardized data has a root mean square near 1: with a fitted eps it would be an RMSNorm.
    x = normal(64, 256, seed=seed, dtype=np.float32)
    parameters = {}
    if "weight" in given:
        parameters["weight"] = uniform(256, dtype=np.float32)
    if "bias" in given:
        parameters["bias"] = normal(256, seed=9, dtype=np.float32)
    y = x * parameters.get("weight", 1) + parameters.get("bias", 0)
    found = identify(x, y, **parameters)
    assert found.best is None and found.indistinguishable == ()
    assert "nothing was normalized" in found.reason
    assert ("times the given weight" in found.reason) == ("weight" in given)
    assert ("plus the given bias" in found.reason) == ("bias" in given)


def test_a_relu_is_no_norm():
    x = normal(64, 256, dtype=np.float32)
    found = identify(x, np.maximum(x, 0))
    assert found.best is None and "Where it is not 0, the output is the input" in found.reason


@pytest.mark.parametrize("factor", [0.999, 1 / math.sqrt(1 + 1e-5), 0.5, 0.8])
def test_a_number_times_the_input_is_no_norm(factor):
    for seed in range(3):
        x = normal(32, 64, seed=seed)
        found = identify(x, x * factor)
        assert found.best is None and "one affine map of all elements" in found.reason


@pytest.mark.parametrize("scale", [1e300, 1e200, 1e154, 1e100, 1e61, 1e-61, 1e-160, 1e-300])
@pytest.mark.parametrize(
    "text", ["... [d]", "... [d]; center=false", "[n] d", "... [d]; correction=1", "n (g=4 [d])"]
)
def test_squares_that_have_no_place_in_double(scale, text):
    x = normal(6, 20) * scale
    scheme = Scheme(text, eps=0.0)
    best = identify(x, forward(x, scheme)).best
    assert elements(best.scheme, x.shape) == elements(scheme, x.shape)
    assert constants(best.scheme)[:3] == constants(scheme)[:3] and best.free_parameters == 0
    low, high = best.eps_interval
    assert low == 0 and (high > 1 if scale > 1 else high < 1e-100)


@pytest.mark.parametrize("scale", [1e300, 1e150, 1e-150, 1e-300])
def test_what_is_no_norm_of_extreme_numbers_is_none(scale):
    x = normal(6, 20) * scale
    for y in (np.tanh(x / scale), x / scale, forward(x, Scheme("... [d]; scale=var; eps=0"))):
        if np.isfinite(y).all():
            found = identify(x, y)
            assert found.best is None and "nan" not in found.to_text()
    json.loads(identify(x, np.tanh(x / scale)).to_json())


def test_running_statistics_of_extreme_numbers():
    x = normal(6, 4, 5) * 1e200
    mean, var = normal(4, seed=2) * 1e200, uniform(4) * 1e300
    y = (x - mean[:, None]) / np.sqrt(var)[:, None]
    found = identify(x, y, running_mean=mean, running_var=var)
    assert found.best.scheme.statistics == "running" and found.best.free_parameters == 0


def test_the_repr_of_a_candidate_lists_no_parameters():
    x = normal(8, 300)
    best = identify(x, forward(x, Scheme("... [d]; affine=d"), uniform(300))).best
    assert best.weight.shape == (300,) and "array(" not in repr(best)


@pytest.mark.parametrize("eps", [0.03, 0.3, 1.7])
@pytest.mark.parametrize(
    "text",
    ["", "center=false", "eps_placement=std", "scale=var", "center=false; scale=std"],
)
def test_an_unusual_eps_beside_fitted_weights_and_very_different_groups(text, eps):
    x = normal(48, 24) * 10 ** np.random.default_rng(3).uniform(-1.5, 1.5, (48, 1))
    scheme = Scheme(f"... [d]; affine=d; {text}", eps=eps)
    y = forward(x, scheme, uniform(24), normal(24, seed=5))
    best = identify(x.astype(np.float32), y.astype(np.float32)).best
    assert best.axes == (1,) and best.scheme.center == scheme.center
    assert best.scheme.scale == scheme.scale
    assert best.eps_interval[0] <= eps * 1.01 and best.eps_interval[1] >= eps * 0.99


# --------------------------------------------------------------------------------------------
# One number as weight and bias, and which norm came first


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("weight", "bias"), [(-1.0, 0.0), (1.0, 1.0), (2.0, 1.0), (0.5, 0.0)])
def test_one_number_as_weight_and_bias(weight, bias, dtype):
    """An affine map of 128 numbers was said, or a divisor n - 48, where one or two explain it."""
    x = (normal(64, 64) * np.linspace(0.5, 2, 64)[:, None]).astype(dtype)
    once = Scheme("... [d]")
    y = (weight * forward(x.astype(np.float64), once) + bias).astype(dtype)
    found = identify(x, y)
    best = found.best
    assert best.axes == (1,) and best.affine_axes == () and best.scheme == once
    assert best.free_parameters == 1 + (bias != 0) and best.weight_from == "fitted"
    off = 1e-3 if dtype == np.float16 else 1e-5
    assert best.weight == pytest.approx(weight, abs=off)
    assert (best.bias is None) == (bias == 0)
    if bias:
        assert best.bias == pytest.approx(bias, abs=off)
    assert any(note.startswith("The weight is one number") for note in found.notes)


def test_what_one_number_is_not_fitted_to():
    x = normal(64, 64) * np.linspace(0.5, 2, 64)[:, None]
    once = Scheme("... [d]")
    # A norm without a weight, and one whose weights differ.
    assert identify(x, forward(x, once)).best.free_parameters == 0
    best = identify(x, forward(x, Scheme.layer_norm(64), uniform(64), normal(64, seed=2))).best
    assert best.affine_axes == (1,) and best.free_parameters == 128
    # Over all elements one factor is no statistics, nor is it where nothing is divided.
    for axes in (1, (0, 1)):
        assert identify(x, x - x.mean(axes, keepdims=True)).best is None
    assert identify(x, -forward(x, Scheme("[b d]"))).best is None
    # Of two norms there is an eps that fits with one number: no number has to be fitted.
    small = 0.05 * x
    y = forward(forward(small, once), Scheme("... [d]; center=false; eps=1e-6"))
    best = identify(small, y).best
    assert best.mistake.code == "normalized-twice" and best.free_parameters == 0


def test_a_root_mean_square_before_a_layer_norm_is_told_where_it_shows():
    """A layer norm of an RMSNorm was said to be applied to its own output."""
    once, rms = Scheme("... [d]"), Scheme("... [d]; center=false")
    values = normal(64, 64) * np.linspace(0.5, 2, 64)[:, None]
    values -= values.mean(1, keepdims=True)

    def of(x, first):
        return identify(x, forward(forward(x, first), once)).best

    centred, moved = values.astype(np.float32), (values + 3).astype(np.float32)
    for first in (once, rms):
        sentence = of(centred, first).mistake.sentence
        assert "its own output, or to that of '... [d]; center=false'" in sentence
    assert of(moved, rms).first == rms and "own output" not in of(moved, rms).mistake.sentence
    best = of(moved, once)
    assert best.first == once and best.mistake.sentence.endswith("is applied to its own output.")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("... [d]", "... [d]; center=false; eps=1e-6"),
        ("... [d]; center=false; eps=1e-6", "... [d]"),
        ("... [d]", "... [d]; eps=1e-6"),
        ("... [d]; eps=1e-6", "... [d]"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_one_norm_is_not_said_where_two_are_clearly_nearer(first, second, seed):
    """These differ from a norm with eps outside of the root by less than its bound."""
    random = np.random.default_rng(seed)
    x = (random.normal(size=(64, 256)) * random.uniform(0.5, 1.5, (64, 1)) + 0.3).astype("float32")
    found = identify(x, forward(forward(x, Scheme(first)), Scheme(second)))
    best = found.best
    assert best.mistake.code == "normalized-twice" and best.first is not None
    again = forward(forward(x.astype(float), best.first), best.scheme)
    other = forward(forward(x.astype(float), Scheme(first)), Scheme(second))
    assert np.abs(again - other).max() <= 2e-7 * np.abs(other).max()
    # What fits as well is told.
    named = (str(best.first), str(best.scheme)) == (str(Scheme(first)), str(Scheme(second)))
    assert named or any("As good a fit" in note for note in found.notes)


def test_an_eps_that_barely_fits_does_not_rule_its_formula_out():
    """Of LayerNorm applied twice only a variance clamped at eps was said to be possible."""
    random = np.random.default_rng(0)
    x = (random.normal(size=(64, 256)) * random.uniform(0.5, 1.5, (64, 1)) + 0.3).astype("float32")
    weight, bias = uniform(256, dtype="float32"), normal(256, dtype="float32")
    y = forward(forward(x, Scheme("... [d]")), Scheme("... [d]; affine=d"), weight, bias)
    best = identify(x, y).best
    assert constants(best.scheme)[:3] == (True, "auto", 0)
    assert best.scheme.eps_placement == "variance" and best.eps_interval[0] == 0


@pytest.mark.parametrize("text", ["[c h w]", "[c] h w", "c [h w]", "(g=2 [c]) [h w]"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_for_each_element_of_a_sample(text, dtype):
    """Fitted biases of half types were said to show a computation in the half type itself."""
    random = np.random.default_rng(0)
    x = torch.tensor(1.5 * random.normal(size=(32, 6, 8, 4)) + 0.3).to(dtype)
    weight = torch.tensor(random.uniform(0.5, 1.5, (6, 8, 4))).to(dtype)
    bias = torch.tensor(0.3 * random.normal(size=(6, 8, 4))).to(dtype)
    y = forward(x.double(), Scheme(f"n {text}"))
    y = (y * weight.double() + bias.double()).to(dtype)
    for given in ({"weight": weight}, {"bias": bias}, {}):
        found = identify(x, y, **given)
        assert elements(found.best.scheme, x.shape) == elements(Scheme(f"n {text}"), x.shape)
        assert found.best.affine_axes == (1, 2, 3) and found.best.mistake is None
        assert not any("Only a computation in" in note for note in found.notes)


def test_careless_arithmetic_of_a_half_type_needs_no_weights():
    for seed in range(4):
        random = np.random.default_rng(seed)
        x = torch.tensor(1.5 * random.normal(size=(6, 8, 5, 7)) + 1).to(torch.float16)
        d = x - x.mean((2, 3), keepdim=True)
        y = d / torch.sqrt((d * d).mean((2, 3), keepdim=True) + 1e-5)
        found = identify(x, y)
        assert found.best.scheme.affine == "" and found.best.free_parameters == 0


@pytest.mark.parametrize("eps", [1e-6, 1e-8, 1e-12, 4e-7])
@pytest.mark.parametrize("center", [True, False])
def test_an_eps_in_use_that_is_clearly_nearer_comes_first(eps, center):
    """The commonest was said wherever rounding allowed it, and two norms where it was far off."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        x = random.normal(size=(32, 16)) * random.uniform(0.5, 1.5, (32, 1)) * math.sqrt(eps) * 20
        scheme = Scheme("... [d]", eps=eps, center=center)
        for dtype in (np.float32, np.float64):
            wide = x.astype(dtype)
            best = identify(wide, forward(wide, scheme)).best
            low, high = best.eps_interval
            assert best.first is None and low <= eps <= high
            # That no one uses is not said where one in use is as near.
            assert eps == 4e-7 or best.scheme.eps == pytest.approx(eps, rel=0.05)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_eps_beside_which_no_statistics_show_is_a_map(dtype):
    x = (1e-19 * normal(5, 4, 4, 16)).astype(dtype)
    found = identify(x, forward(x, Scheme("n c [h] w; center=false; eps=1e-3")))
    assert found.best is None and "statistics not identifiable" in found.reason
    # A mean that is subtracted still shows over which axes.
    best = identify(x, forward(x, Scheme("n c [h] w; eps=1e-3"))).best
    assert best.axes == (2,) and best.scheme.center


@pytest.mark.parametrize(
    "text",
    ["n [d]; affine=d; correction=1", "n [d]; affine=d; scale=l2; eps=1e-12; eps_placement=max",
     "n [d]; affine=d; correction=1; eps=1e-6; eps_placement=std", "n [d]; affine=d"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_given_weight_takes_up_no_constant_factor(text, dtype):
    """With a fitted bias the divisor n - 1 was not found, and the weight said to be another."""
    scheme = Scheme(text)
    x, weight, bias = normal(48, 8, dtype=dtype), uniform(8, dtype=dtype), normal(8, dtype=dtype)
    found = identify(x, forward(x, scheme, weight, bias), weight=weight)
    best = found.best
    assert constants(best.scheme)[:3] == constants(scheme)[:3]
    assert (best.weight_from, best.bias_from) == ("given", "fitted")
    np.testing.assert_allclose(best.bias, bias, atol=1e-5)


@pytest.mark.parametrize("placement", ["max", "std"])
def test_a_variance_that_eps_hides_is_no_part_of_the_output(placement):
    """It was said to divide without its root."""
    scheme = Scheme(f"n c [h] w; eps=2.1e-6; eps_placement={placement}")
    for seed in range(4):
        x = 1e-10 * np.random.default_rng(seed).normal(size=(2, 12, 32, 6))
        found = identify(x, forward(x, scheme))
        if found.best is None:
            assert "nothing shows that a variance" in found.reason or "map" in found.reason
        else:
            assert found.best.scheme.scale != "var"


@pytest.mark.parametrize("scale", [1e-18, 1e-14, 1.4e-13])
@pytest.mark.parametrize("given", [False, True])
def test_a_bias_that_hides_the_input_is_no_norm(given, scale):
    """Of numbers so small a variance without its root was said to divide."""
    scheme = Scheme(
        "[a] b (g=3 [c]) [d e]; affine=b g; scale=sqrt_std; eps=6e-8; eps_placement=std"
    )
    for seed in range(6):
        x = (scale * normal(1, 2, 12, 2, 8, seed=seed)).astype(np.float32)
        weight, bias = uniform(2, 3, dtype="float32"), normal(2, 3, seed=seed + 9, dtype="float32")
        y = forward(x, scheme, weight, bias)
        found = identify(x, y, **({"weight": weight} if given else {}))
        assert found.best is None
