"""compare: which parts of two normalizations are equal, and a tensor on which they differ."""

import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axisnorm.nn
from axisnorm import PRESETS, Scheme, reference
from axisnorm.lens.compare import compare
from axisnorm.lens.explain import explain, partition, statistics_dimensions
from axisnorm.lens.family import family_of, reasons, refines
from axisnorm.lens.half_types import rounded
from axisnorm.lens.meaning import Meaning, alike
from axisnorm.lens.naming import in_words
from axisnorm.lens.subject import Subject
from axisnorm.scheme import ArgumentError

WHICH_MEAN = (2, 3, 4)
PARTS = ("statistics", "affine", "constants", "running")


def verdicts(found):
    return [part for part in PARTS if getattr(found, part) == "different"]


def recomputed(found, name):
    """The example's output by the engine of NumPy arrays, which the search does not use."""
    example, side = found.example, getattr(found, name)
    running = {}
    if side.scheme.statistics == "running":
        running = {
            key: getattr(example, f"{key}_{name}") for key in ("running_mean", "running_var")
        }
    axes = unsized_axes(side.scheme)
    return axisnorm.normalize(
        example.x, side.scheme.replace(axes=axes), getattr(example, f"weight_{name}"),
        getattr(example, f"bias_{name}"), **running,
    )  # fmt: skip


def unsized_axes(scheme):
    """A module's own size is left open; no scheme of these tests has other sizes than groups'."""
    return scheme.axes.replace("(d=4)", "d").replace("(d=768)", "d")


# --------------------------------------------------------------------------------------------
# The questions that people ask


def test_layer_norm_of_bert_against_the_one_of_the_picture():
    found = compare("... [d]; affine=d", "b [s d]; affine=s d", WHICH_MEAN)
    assert not found.same and found.same_in == ()
    assert verdicts(found) == ["statistics", "affine"]
    assert found.differences == (
        "6 means of 4 elements against 2 means of 12: one mean a token against one mean a sample.",
        "Each group of b is made of 3 groups of a.",
        "Weight and bias: shape (4,) along axis 2 against shape (3, 4) along axes 1 and 2.",
        "Any weight of a is one of b that repeats along axis 1; the reverse does not hold.",
    )
    example = found.example
    assert example.x.tolist() == [[[0, 1], [2, 3]]]
    root = math.sqrt(1.25 + 1e-5)
    np.testing.assert_allclose(example.y_a.ravel(), np.array([-1, 1, -1, 1]) * 0.99998, atol=1e-6)
    np.testing.assert_allclose(
        example.y_b.ravel(), np.array([-1.5, -0.5, 0.5, 1.5]) / root, rtol=1e-6
    )
    np.testing.assert_allclose(example.y_a, F.layer_norm(torch.tensor(example.x), (2,)), atol=1e-6)
    np.testing.assert_allclose(
        example.y_b, F.layer_norm(torch.tensor(example.x), (2, 2)), atol=1e-6
    )


def test_the_batch_norm_of_the_picture():
    found = compare("b s [d]", "[b] s [d]", WHICH_MEAN)
    assert found.differences[0].startswith("6 means of 4 elements against 3 means of 8")
    assert any("running statistics" in note for note in found.notes)


def test_layer_norm_of_bert_against_instance_norm():
    found = compare("bert.layer_norm", "torch.instance_norm", WHICH_MEAN)
    assert verdicts(found) == ["affine", "constants"]
    assert found.equalities[0] == "Both take 6 means of 4 elements: one mean a token."
    assert found.differences[:2] == (
        "Weight and bias: shape (4,) along axis 2 against shape (3,) along axis 1.",
        "Neither can stand in for the other.",
    )
    assert found.differences[2] == (
        "eps: 1e-12 against 1e-05. That makes the output of b 0.0005 % smaller at variance 1 and "
        "29 % smaller at variance 1e-05."
    )
    (agreement,) = found.agreements
    assert agreement.condition == ("They agree without weight and bias, with the same constants.")
    assert agreement.largest_difference < 1e-12
    # Without weight and bias, and with one eps, there is no difference at all.
    assert compare("... [d]", "n c [...]", WHICH_MEAN).same


def test_no_weight_of_one_gives_the_output_of_the_other():
    """The fitted output is the nearest there is: any other weight and bias are further off."""
    found = compare("bert.layer_norm", "torch.instance_norm", WHICH_MEAN)
    example = found.example
    assert example.best_of == "b" and example.weight_b.shape == (1,)
    target, normalized = example.y_a.astype(float).ravel(), example.y_b.astype(float).ravel()
    normalized = (normalized - example.bias_b) / example.weight_b
    least = np.square(example.y_b - example.y_a).sum()
    for weight, bias in itertools.product(np.linspace(-5, 5, 41), np.linspace(-3, 3, 25)):
        assert np.square(weight * normalized + bias - target).sum() >= least - 1e-5


def test_group_norm_of_one_group_against_layer_norm_over_the_image():
    found = compare(Scheme.group_norm(1), Scheme.layer_norm(ndim=3), (2, 3, 4, 5))
    assert verdicts(found) == ["affine"]
    assert found.equalities[0] == "Both take 2 means of 60 elements: one mean a sample."
    assert found.differences == (
        "Weight and bias: shape (3,) along axis 1 against shape (3, 4, 5) along axes 1, 2 and 3.",
        "Any weight of a is one of b that repeats along axes 2 and 3; the reverse does not hold.",
    )
    assert found.agreements[0].condition == (
        "They agree while weight and bias of b do not vary along axes 2 and 3."
    )
    cases = [case.sentence for case in found.family.special_cases]
    assert (
        "GroupNorm(1) is LayerNorm((3, 4, 5)), with a weight that is constant along axes 2 and 3."
        in cases
    )


def test_layer_norm_against_rms_norm_on_centred_data():
    found = compare("torch.layer_norm", "torch.rms_norm", WHICH_MEAN)
    assert verdicts(found) == ["statistics", "constants"]
    assert found.differences[0] == (
        "a subtracts the mean and divides by the deviation, b divides by the root mean square and "
        "subtracts nothing."
    )
    (agreement,) = found.agreements
    assert agreement.condition == (
        "They agree exactly where the mean of every group is 0, with the same constants."
    )
    assert agreement.largest_difference < 1e-12
    # On such data they do agree; on other data they do not.
    x = np.random.default_rng(1).standard_normal(WHICH_MEAN)
    centred = x - x.mean(axis=-1, keepdims=True)
    for values, same in ((centred, True), (x, False)):
        layer = axisnorm.layer_norm(values, 4, eps=1e-5)
        rms = axisnorm.rms_norm(values, 4, eps=1e-5)
        assert np.allclose(layer, rms, atol=1e-12) is same


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("torch.batch_norm", "torch.batch_norm.eval"),
        (nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval()),
        (functools.partial(F.batch_norm, training=True), F.batch_norm),
    ],
    ids=["presets", "modules", "functions"],
)
def test_batch_norm_in_training_against_evaluation(a, b):
    found = compare(a, b, (2, 3, 4, 4))
    assert verdicts(found) == ["running"]
    assert found.differences == (
        "a normalizes with the statistics of this batch (training), b with the running statistics "
        "(evaluation).",
        "running_var is stored with the divisor n - 1 and training divides by n: at n = 32 "
        "evaluation divides by sqrt(32/31) = 1.016 times the deviation, once the averages have "
        "settled.",
    )
    (agreement,) = found.agreements
    assert "of this very batch, with the divisor n" in agreement.condition
    assert agreement.largest_difference < 1e-12
    example = found.example
    assert (example.running_mean_b.tolist(), example.running_var_b.tolist()) == ([0], [1])
    assert example.running_mean_a is None
    norm = nn.BatchNorm2d(1)
    x = torch.tensor(example.x)
    np.testing.assert_allclose(example.y_b, norm.eval()(x).detach(), atol=1e-6)
    np.testing.assert_allclose(example.y_a, norm.train()(x).detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "different", "said"),
    [
        ("keras.layer_norm", ["constants"], "eps: 1e-05 against 0.001."),
        ("flax.layer_norm", ["constants"], "eps: 1e-05 against 1e-06."),
        ("onnx17.layer_norm", ["constants"], "Rounding to the type of the input: once"),
        ("bert.layer_norm", ["constants"], "eps: 1e-05 against 1e-12."),
        ("keras.rms_norm", ["constants"], "eps: the machine epsilon"),
        ("flax.rms_norm", ["constants"], "against 1e-06"),
        ("onnx23.rms_norm", ["constants"], "also before weight and bias"),
        ("t5.layer_norm", ["constants"], "also before weight and bias"),
        ("llama.rms_norm", ["constants"], "also before weight and bias"),
        ("gemma.rms_norm", ["constants"], "multiplied by weight against (1 + weight)"),
        ("onnx15.batch_norm", ["running"], "divisor n - 1 against n"),
        ("onnx6.instance_norm", [], None),
    ],
)
def test_torch_against_other_frameworks(name, different, said):
    own = "rms_norm" if not PRESETS[name].center else name.split(".", 1)[1]
    shape = (2, 3, 4, 4) if "batch" in name else WHICH_MEAN
    found = compare(f"torch.{own}", name, shape)
    assert verdicts(found) == different
    assert found.same is (not different)
    assert said is None or any(said in sentence for sentence in found.differences)


@pytest.mark.parametrize("name", ["keras.batch_norm", "flax.batch_norm"])
def test_channels_first_against_channels_last(name):
    found = compare("torch.batch_norm", name, (2, 3, 4, 4))
    assert found.differences[0] == (
        "3 means of 32 elements against 4 means of 24: along axes 0, 2 and 3 against "
        "along axes 0, 1 and 2."
    )
    assert (
        "a has its channels in axis 1 and b in the last: each on its own layout, they share the "
        "same elements." in found.notes
    )
    assert (
        "A new batch counts 0.1 against 0.01 in the running statistics (0.9 and 0.99 where "
        "momentum is the weight of the old value)." in found.differences
    )
    # The layouts alone are no difference on one axis of features.
    flat = compare("torch.batch_norm", name, (8, 3))
    assert (flat.statistics, flat.affine, flat.running) == ("equal", "equal", "different")
    assert any("a stores 1.14286 times the variance of b" in s for s in flat.differences)


def test_the_sample_deviation_of_the_founding_question():
    found = compare("... [d]; affine=d; correction=1; eps=0", nn.LayerNorm(4), (1, 4))
    assert verdicts(found) == ["constants"]
    assert found.differences[0] == (
        "The variance is a sum divided by n - 1 = 3 against n = 4. The outputs are in the ratio "
        "sqrt(3/4) = 0.866, as far as eps does not matter."
    )
    x = np.array([[1.0, 0, 0, 0]])
    one = axisnorm.normalize(x, found.a.scheme.replace(affine=""))
    other = axisnorm.normalize(x, found.b.scheme.replace(affine="", eps=0))
    np.testing.assert_allclose(one / other, math.sqrt(3 / 4))


def test_llama_is_t5_and_gemma_is_neither():
    assert compare("llama.rms_norm", "t5.layer_norm", WHICH_MEAN).same
    found = compare("llama.rms_norm", "gemma.rms_norm", WHICH_MEAN)
    assert verdicts(found) == ["constants"]
    assert found.differences[0] == (
        "The normalized value is multiplied by weight against (1 + weight): the weight of b is "
        "that of a minus 1."
    )
    (agreement,) = found.agreements
    assert agreement.condition.startswith("They agree where the weight of b is that of a minus 1")
    assert agreement.largest_difference < 1e-12
    np.testing.assert_array_equal(found.example.weight_a, found.example.weight_b)


def test_rounding_shows_in_half_types_only():
    found = compare("... [d]; affine=d", "... [d]; affine=d; rounding=before_affine", WHICH_MEAN)
    assert (found.same, found.same_in) == (False, ("float64", "float32"))
    assert "26 % of the outputs in bfloat16" in found.differences[0]
    example = found.example
    assert example.x.dtype == np.float16
    assert example.largest_difference > 0
    # Without a weight there is nothing to round before.
    bare = compare("... [d]", "... [d]; rounding=before_affine", WHICH_MEAN)
    assert bare.same and len(bare.same_in) == 4
    assert bare.notes == ("rounding is once against before_affine, which has no effect here.",)


def test_the_share_of_outputs_that_rounding_moves_is_measured():
    """By torch, whose bfloat16 is not NumPy's."""
    found = compare("... [d]; affine=d", "... [d]; affine=d; rounding=before_affine", WHICH_MEAN)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200_000, generator=generator, dtype=torch.float64)
    weight = (
        (torch.rand(200_000, generator=generator, dtype=torch.float64) + 0.5).bfloat16().double()
    )
    once, twice = (x * weight).bfloat16(), (x.bfloat16().double() * weight).bfloat16()
    share = float((once != twice).double().mean())
    assert 0.23 < share < 0.29
    assert f"{100 * share:.0f} %" in ("25 %", "26 %", "27 %") and "26 %" in found.differences[0]


def test_rounding_is_that_of_torch():
    """On numbers of float32, which torch rounds once."""
    generator = np.random.default_rng(3)
    normal = generator.standard_normal(20_000).astype(np.float32).astype(float)
    values = normal * np.exp2(np.arange(20_000) % 200 - 100.0)
    ties = np.array([0.0, 1.00390625, -1.01171875, 1.5, -255.5])
    tiny = np.array([1.0, 1.5, 2.5, -3.5, 0.5, 0.25]) * 2.0**-133
    values = np.concatenate([values, ties, tiny])
    expected = torch.tensor(values).float().bfloat16().double().numpy()
    np.testing.assert_array_equal(rounded(values, "bfloat16"), expected)
    half = normal[:100]
    np.testing.assert_array_equal(rounded(half, "float16"), torch.tensor(half).half().double())


def test_eps_of_the_type_is_a_number_in_each():
    found = compare(
        "torch.rms_norm", "... [d]; affine=d; center=false; eps=1.1920928955078125e-07", WHICH_MEAN
    )
    assert found.same_in == ("float32", "float16", "bfloat16") and not found.same
    assert "In float32 and half types that is the same number." in found.differences[0]
    assert found.example.x.dtype == np.float64
    same = compare("torch.rms_norm", "... [d]; affine=d; center=false; eps=none", WHICH_MEAN)
    assert same.same


def test_a_tensor_is_computed_by_both():
    """Centred data of a model, on which LayerNorm and RMSNorm are one."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    centred = x - x.mean(-1, keepdim=True)
    a, b = nn.LayerNorm(4, bias=False), nn.RMSNorm(4, eps=1e-5)
    nn.init.uniform_(a.weight)
    b.weight = a.weight
    found = compare(a, b, centred)
    assert found.largest_difference < 1e-6 and not found.same
    assert "on this tensor at most" in found.to_text(width=200, color=False)
    expected = (a(x) - b(x)).abs().max().item()
    assert compare(a, b, x).largest_difference == pytest.approx(expected, rel=1e-5)
    assert compare(a, b, tuple(x.shape)).largest_difference is None
    assert compare("torch.batch_norm", "torch.batch_norm.eval", x).largest_difference is None
    norm = nn.BatchNorm1d(3)
    difference = compare(norm.train(), "torch.batch_norm", x.numpy()).largest_difference
    assert difference == 0
    assert compare("[...]", "[...]; center=false", np.array(2.0)).largest_difference == (
        pytest.approx(1, abs=1e-5)
    )
    with pytest.raises(ArgumentError, match=r"x\[0, 0, 0\] is nan and 23 more are not finite"):
        compare(a, b, x * math.nan)


@pytest.mark.parametrize("ndim", [0, 1, 5, 6, 8, 12, 20])
def test_any_rank(ndim):
    shape = (2,) * ndim
    found = compare("[...]", "[...]; center=false", shape)
    assert verdicts(found) == ["statistics"] and found.example.shape == (1,) * max(ndim - 1, 0) + (
        (2,) if ndim else ()
    )
    if ndim > 1:
        other = compare("... [d]", "... [s d]", shape)
        assert other.example.x.size == 4 and other.example.largest_difference > 1
        assert len(other.to_text(width=80, color=False).splitlines()) < 110


def test_running_statistics_of_different_shapes():
    found = compare(
        "n c [...]; statistics=running", "n c [...]; affine=c; statistics=running", (2, 3, 4)
    )
    assert found.differences[0] == (
        "6 running means of 4 elements against 3 running means of 8: one running mean a sample and "
        "channel against one running mean a channel."
    )
    example = found.example
    assert example.running_mean_a.size == 2 * example.running_mean_b.size
    assert found.to_json()


@pytest.mark.parametrize("eps", [-0.5, 1e-40, 1e-300, 1e30])
def test_any_eps(eps):
    found = compare("... [d]", f"... [d]; eps={eps}", (2, 3))
    assert verdicts(found) == ["constants"]
    assert found.example.largest_difference > 0
    assert json.loads(found.to_json(), parse_constant=pytest.fail) and found.to_text()


# --------------------------------------------------------------------------------------------
# The same under other names, and equal at this shape only


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ("... [d]; affine=d", "batch step [feature]; affine=feature", (2, 3, 4)),
        ("n (g=1 [c]) [...]", "x [y z]", (2, 3, 4)),
        ("[n] c [...]; affine=c", "[x] y [z w]; affine=y", (2, 3, 4, 5)),
        (nn.LayerNorm(4), axisnorm.nn.LayerNorm(4), (2, 3, 4)),
        (nn.LayerNorm(4), functools.partial(F.layer_norm, normalized_shape=(4,)), (2, 3, 4)),
        (axisnorm.layer_norm, Scheme.layer_norm(4), (2, 3, 4)),
        (functools.partial(F.group_norm, num_groups=2), nn.GroupNorm(2, 4), (2, 4, 3)),
        (functools.partial(F.normalize, dim=-1), "torch.normalize", (2, 3, 4)),
        ("... [d]; eps_placement=max; eps=0", "... [d]; eps=0", (2, 3)),
        ("... [d]; scale=var; eps_placement=std", "... [d]; scale=var", (2, 3)),
        ("... [d]; center=false; scale=l2", "... [d]; center=false", (3, 1)),
    ],
)
def test_same(a, b, shape):
    found = compare(a, b, shape)
    assert found.same and verdicts(found) == []
    assert found.differences == () and len(found.equalities) == 4
    assert len(found.same_in) == 4


def test_equal_here_because():
    found = compare("n c [h w]", "n [c h w]", (2, 1, 4, 4))
    assert found.same
    assert found.notes == (
        "The statistics are equal here because c = 1; on other sizes they differ.",
    )
    # The example is of another shape, on which they differ.
    assert found.example.shape == (1, 2, 1, 2)
    assert reasons(Scheme("n c [h w]"), Scheme("n [c] h w"), (2, 3, 1, 1)) == ""
    assert reasons(Scheme("n [c] h w"), Scheme("n [c h w]"), (2, 3, 1, 1)) == "h = 1 and w = 1"
    assert reasons(Scheme("n c [h w]"), Scheme("n (g=4 [c]) [h w]"), (2, 4, 3, 3)) == (
        "axis 1 has one element in each of the 4 groups"
    )


def test_constants_without_effect_are_no_difference():
    found = compare("... [d]; affine=d", "... [d]; affine=d; eps=1e-6", (2, 3, 1))
    assert found.same and found.constants == "equal"
    assert "eps is 1e-05 against 1e-06, which has no effect here." in found.notes
    # Where only one of them gives nothing but the bias, they do not differ in their constants.
    assert verdicts(compare("[...]", "[...]; center=false", ())) == ["statistics"]


def test_parameters_that_are_there():
    found = compare(nn.LayerNorm(4, bias=False), nn.LayerNorm(4), WHICH_MEAN)
    assert verdicts(found) == ["affine"]
    assert found.differences == (
        "Weight alone against weight and bias, of shape (4,) along axis 2.",
    )
    assert found.example.best_of == "a" and found.example.bias_b is not None
    bare = compare(nn.LayerNorm(4, elementwise_affine=False), nn.LayerNorm(4), WHICH_MEAN)
    assert bare.differences == ("Weight and bias: none against shape (4,) along axis 2.",)
    assert bare.agreements[0].condition == "They agree while the weight of b is 1 and its bias 0."
    offset = compare("... [d]", "... [d]; affine=d; weight_offset=1", WHICH_MEAN)
    assert offset.agreements[0].condition == "They agree while the weight of b is 0 and its bias 0."


def test_running_statistics():
    layer = compare("torch.layer_norm", "torch.batch_norm", (8, 3, 4))
    assert layer.running == "different"
    assert layer.differences[-1] == (
        "b keeps running statistics and normalizes with them in evaluation; a keeps none and "
        "computes the same in training and in evaluation."
    )
    trap = nn.BatchNorm1d(3, track_running_stats=False).eval()
    found = compare(trap, "torch.batch_norm", (4, 3))
    assert verdicts(found) == ["running"] and len(found.same_in) == 4
    assert "uses the statistics of the batch in evaluation too" in found.differences[0]
    assert "Every output is the same" in found.notes[0]
    tracked = nn.InstanceNorm1d(3, track_running_stats=True)
    both = compare(tracked, nn.InstanceNorm1d(3, track_running_stats=True).eval(), (2, 3, 4))
    assert both.differences[0] == (
        "6 means of 4 elements against 3 running means of 8: one mean a sample and "
        "channel against one running mean a channel."
    )
    cumulative = compare(nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3), (4, 3))
    assert cumulative.differences == (
        "A new batch counts as much as every other against 0.1 in the running statistics.",
    )


# --------------------------------------------------------------------------------------------
# Every verdict against what is computed

SCHEMES = [
    Scheme(text)
    for text in (
        "... [d]; affine=d", "... [d]", "... [s d]; affine=s d", "n c [...]; affine=c",
        "n [c] ...; affine=c; eps=1e-6", "[n] c [...]; affine=c", "[...] c; affine=c",
        "n (g=2 [c]) [...]; affine=g c", "n (g=2 [c]) [...]; affine=g", "n (g=1 [c]) [...]; affine=g c",
        "n (g=4 [c]) [...]; affine=g c", "n ([g=2] c) ...", "... [d]; affine=d; center=false",
        "... [d]; affine=d; center=false; scale=std", "... [d]; center=false; scale=l2",
        "... [d]; affine=d; correction=1", "... [d]; affine=d; eps_placement=std",
        "... [d]; affine=d; eps_placement=max", "... [d]; affine=d; weight_offset=1",
        "... [d]; affine=d; scale=var", "... [d]; affine=d; scale=sqrt_std",
        "... [d]; affine=d; rounding=before_affine", "[...]", "... [d]; affine=d; eps=0.001",
    )
]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4, 1), (1, 4, 2), (1, 2, 2), (3, 4, 4)])
def test_alike_is_what_gives_equal_outputs(shape):
    """For every pair: alike exactly if random inputs and weights give equal outputs."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal(shape) * 0.01
    meanings = []
    for scheme in SCHEMES:
        try:
            meanings.append(Meaning.of(Subject(str(scheme), scheme), shape))
        except ArgumentError:
            continue
    full = generator.uniform(0.5, 2.0, shape)

    def output(meaning):
        """With weights that two of one affine have alike, and others have not."""
        if not meaning.has_affine:
            return reference.forward(x, meaning.scheme.replace(rounding="once"))[0]
        sizes = meaning.sizes
        index = tuple(
            slice(None) if i in sizes.layout.affine else slice(0, 1)
            for i in range(len(sizes.expanded))
        )
        weight = full.reshape(sizes.expanded)[index].reshape(sizes.affine_shape)
        scheme = meaning.scheme.replace(rounding="once")
        return reference.forward(x, scheme, weight, weight / 3)[0]

    outputs = [output(meaning) for meaning in meanings]
    pairs = list(itertools.combinations(range(len(meanings)), 2))
    assert len(pairs) > 100
    seen = set()
    for i, k in pairs:
        one, two = meanings[i], meanings[k]
        equal = np.allclose(outputs[i], outputs[k], rtol=1e-9, atol=1e-12)
        said = alike(one, two, "float64")
        assert said == equal, (str(one.scheme), str(two.scheme), shape)
        seen.add(said)
    assert seen == {True, False}


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4, 1), (4, 8, 2)])
def test_examples_show_a_difference(shape):
    """Of every pair that differs there is an example, and another engine computes it too."""
    shown = 0
    for a, b in itertools.combinations(SCHEMES[::2], 2):
        try:
            found = compare(a, b, shape)
        except ArgumentError:
            continue
        if found.same and found.example is None:
            continue
        example = found.example
        assert example is not None, (str(a), str(b))
        if example.x.dtype == np.float16:
            assert example.largest_difference > 0
            continue
        y_a, y_b = recomputed(found, "a"), recomputed(found, "b")
        largest = max(abs(y_a).max(), abs(y_b).max())
        np.testing.assert_allclose(example.y_a, y_a, atol=1e-5 * largest)
        np.testing.assert_allclose(example.y_b, y_b, atol=1e-5 * largest)
        assert abs(y_a - y_b).max() >= 0.1 * largest, (str(a), str(b))
        shown += 1
        for agreement in found.agreements:
            assert agreement.largest_difference < 1e-9
    assert shown > 40


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("... [d]", "b [s d]"), ("... [d]", "[b] s [d]"), ("n [c ...]", "n c [...]"),
        ("n (g=2 [c]) [...]", "n c [...]"), ("[n] c [...]", "n c [...]"), ("[...]", "n [...] c"),
    ],
)  # fmt: skip
def test_no_smaller_tensor_tells_them_apart(a, b):
    """Every smaller shape with two elements a group gives equal outputs for random numbers."""
    found = compare(a, b, (2, 4, 3))
    size = found.example.x.size
    generator = np.random.default_rng(11)
    tried = 0
    for shape in itertools.product(range(1, size), repeat=3):
        if math.prod(shape) >= size:
            continue
        x = generator.standard_normal(shape)
        try:
            sides = [explain(scheme, shape) for scheme in (a, b)]
            y_a, y_b = (axisnorm.normalize(x, scheme) for scheme in (a, b))
        except ArgumentError:
            continue
        if min(side.group_size for side in sides) < 2:
            continue
        tried += 1
        np.testing.assert_allclose(y_a, y_b, atol=1e-12)
    assert tried


def test_presets_can_all_be_compared():
    names = [name for name in PRESETS if "g=32" not in str(PRESETS[name])]
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        pair = [
            PRESETS[n].with_sizes({"g": 2}) if "(g [" in str(PRESETS[n]) else n
            for n in (name, other)
        ]
        found = compare(*pair, (2, 4, 3, 3))
        assert found.same is (not found.differences)
        assert json.loads(found.to_json())["same"] is found.same
        assert str(found.shape) in found.to_text(width=80, color=False)


# --------------------------------------------------------------------------------------------
# The family


def index_of(scheme, shape):
    return explain(scheme, shape).group_index.ravel()


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 6, 1), (1, 6, 3), (4, 6, 6)])
def test_refines_is_what_group_indices_say(shape):
    schemes = ["a b [c]", "a [b] c", "a [b c]", "[a] b [c]", "[a b c]", "a (g=2 [b]) c",
               "a (g=3 [b]) c", "a ([g=2] b) c", "a ([g=3] b) [c]", "a (g=6 [b]) c"]  # fmt: skip
    keys, indices = [], []
    for scheme in schemes:
        sizes = Scheme(scheme).layout(3).sizes(shape)
        keys.append(partition(sizes, statistics_dimensions(sizes)))
        indices.append(index_of(scheme, shape))
    found = set()
    for i, k in itertools.permutations(range(len(schemes)), 2):
        pairs = len(set(zip(indices[i].tolist(), indices[k].tolist(), strict=True)))
        inside = pairs == len(set(indices[i].tolist()))
        assert refines(keys[i], keys[k]) == inside, (schemes[i], schemes[k], shape)
        found.add(inside)
    assert found == {True, False}


def test_family_at_a_shape():
    family = compare("... [d]", "b [s d]", WHICH_MEAN).family
    names = [[member.name for member in node.members] for node in family.nodes]
    assert names == [
        ["LayerNorm2d"],
        ["LayerNorm(4)", "RMSNorm(4)", "InstanceNorm", "GroupNorm(3)"],
        ["BatchNorm"],
        ["LayerNorm((3, 4))", "GroupNorm(1)"],
    ]
    assert [(node.num_groups, node.compared) for node in family.nodes] == [
        (8, ""), (6, "a"), (3, ""), (2, "b"),
    ]  # fmt: skip
    assert {(e.finer, e.coarser, e.holds) for e in family.edges} == {
        (0, 3, 4),
        (1, 2, 2),
        (1, 3, 3),
    }
    assert [case.sentence for case in family.special_cases] == [
        "RMSNorm(4) is LayerNorm(4) where every mean is 0.",
        "InstanceNorm is LayerNorm(4), without weight and bias.",
        "GroupNorm(3) is InstanceNorm here, because axis 1 has one element in each of the 3 groups.",
        "GroupNorm(1) is LayerNorm((3, 4)), with a weight that is constant along axis 2.",
    ]


@pytest.mark.parametrize("shape", [(2, 6, 4), (1, 4, 5, 5), (3, 1, 4), (5, 7), (2, 3, 4, 5, 6)])
def test_family_is_the_order_of_the_group_indices(shape):
    """Its edges are those of the whole order, without the steps that others make up."""
    family = family_of(Scheme.layer_norm(), Scheme.batch_norm(), shape)
    indices = [index_of(node.members[0].scheme, shape) for node in family.nodes if node.members]
    assert len(indices) == len(family.nodes)
    below = set()
    for i, k in itertools.permutations(range(len(indices)), 2):
        if len(set(zip(indices[i], indices[k], strict=True))) == len(set(indices[i])):
            below.add((i, k))
    covers = {(i, k) for i, k in below
              if not any((i, j) in below and (j, k) in below for j in range(len(indices)))}  # fmt: skip
    assert {(edge.finer, edge.coarser) for edge in family.edges} == covers
    for edge in family.edges:
        fine, coarse = family.nodes[edge.finer], family.nodes[edge.coarser]
        assert edge.holds * fine.group_size == coarse.group_size


def test_special_cases_are_true():
    """Each that names no condition but the shape gives equal outputs without weights."""
    generator = np.random.default_rng(2)
    checked = 0
    for shape in [(2, 6, 4), (1, 4, 5), (3, 1, 4), (2, 4, 1, 1)]:
        x = generator.standard_normal(shape)
        family = family_of(Scheme.layer_norm(), Scheme.batch_norm(), shape)
        schemes = {m.name: m.scheme for node in family.nodes for m in node.members}
        for case in family.special_cases:
            if "mean is 0" in case.sentence:
                continue
            y = [
                axisnorm.normalize(x, schemes[name].replace(affine="", eps=1e-5))
                for name in (case.special, case.general)
            ]
            np.testing.assert_allclose(*y, atol=1e-12)
            checked += 1
    assert checked > 10


# --------------------------------------------------------------------------------------------
# As text, as data, wrong use


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text(width):
    found = compare("... [d]; affine=d", "b [s d]; affine=s d", WHICH_MEAN)
    text = found.to_text(width=width, color=False)
    assert all(len(line) <= width for line in text.splitlines())
    assert "different in statistics and affine" in text
    assert "[[[0, 1], [2, 3]]]" in text and "[[[-1, 1], [-1, 1]]]" in text
    assert "\x1b" not in text and "\x1b" in found.to_text(width=width, color=True)
    assert "the same in everything" in compare("b [d]", "x [y]", (2, 3)).to_text(color=False)


def test_weights_are_drawn_where_they_differ():
    text = compare("bert.layer_norm", "torch.instance_norm", WHICH_MEAN).to_text(
        width=100, color=False
    )
    assert "a and b: 6 means of 4 elements" in text and text.count(" D  D  D  D") == 1
    assert "a: weights of shape (4,)" in text and " a  b  c  d " in text
    assert "b: weights of shape (3,)" in text and " c  c  c  c " in text
    assert "weights of shape" not in compare("... [d]", "b [s d]", WHICH_MEAN).to_text(color=False)


def test_large_examples_are_shown_in_part():
    found = compare("keras.group_norm", Scheme.group_norm(32), (2, 64, 64))
    text = found.to_text(width=80, color=False)
    assert len(text.splitlines()) < 110 and "..." in text
    assert found.example.x.size == 1024


def test_json_is_stable():
    data = json.loads(compare("... [d]", "b [s d]", WHICH_MEAN).to_json())
    assert list(data) == [
        "schema", "shape", "a", "b", "same", "same_in", "statistics", "affine", "constants",
        "running", "differences", "equalities", "notes", "agreements", "example",
        "largest_difference", "family",
    ]  # fmt: skip
    assert data["schema"] == "axisnorm.comparison/1"
    assert (data["statistics"], data["affine"]) == ("different", "equal")
    assert data["example"]["x"] == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("a", "b", "shape", "said"),
    [
        ("... [d", "... [d]", (2, 3), "A bracket must be closed"),
        ("... [d]", "bert.layernorm", (2, 3), "Did you mean 'bert.layer_norm'"),
        ("... [d]", "b s [d]", (2, 3), "The input has 2"),
        ("... [d]", nn.LayerNorm(5), (2, 3), "has \\(3,\\) there"),
        (nn.Linear(2, 3), "... [d]", (2, 3), "compare knows the norm modules"),
        (3, "... [d]", (2, 3), "compare takes a Scheme"),
        ("... [d]", "... [d]", ("a",), "tuple of whole numbers"),
        ("torch.group_norm", "... [d]", (2, 4, 3), "Write 'g=...'"),
        (functools.partial(F.layer_norm, 1, 2, 3, 4, 5, 6, 7), "... [d]", (2, 3), "do not fit"),
    ],
)
def test_wrong_use(a, b, shape, said):
    with pytest.raises(ArgumentError, match=said):
        compare(a, b, shape)


def test_evaluation_is_no_special_case_of_training():
    found = compare("torch.batch_norm", "torch.batch_norm.eval", (2, 3, 4, 4))
    assert any("BatchNorm in eval" in [m.name for m in n.members] for n in found.family.nodes)
    assert not any("in eval" in case.sentence for case in found.family.special_cases)


def test_the_batch_norm_of_the_picture_for_text_has_one_mean_a_position():
    found = compare("... [d]; affine=d", "[b] s [d]; affine=s", WHICH_MEAN)
    assert found.differences[0] == (
        "6 means of 4 elements against 3 means of 8: one mean a token against one mean a position."
    )


def test_an_uncentred_value_over_a_deviation_has_no_root_mean_square():
    found = compare("keras.rms_scaling", "timm.simple_norm", (2, 4))
    assert found.equalities[0] == "Both take 2 deviations of 4 elements: one deviation a row."
    against = compare("keras.rms_scaling", "keras.rms_norm", (2, 4))
    assert against.statistics == "different"


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ("max", "in b it is the least that divides"),
        ("std", "in b it stands outside the root, added to what divides"),
    ],
)
def test_where_eps_stands_is_said_in_whole_sentences(placement, said):
    found = compare("... [d]", f"... [d]; eps_placement={placement}", (2, 4))
    assert f"eps in a stands inside the root, {said}." in " ".join(found.differences)


def test_a_norm_without_a_bias_is_said_to_have_none():
    """LayerNorm and RMSNorm were said to have weights and biases that vary alike."""
    for a, b in (("LayerNorm(4)", "RMSNorm(4)"), ("LayerNorm", torch.nn.RMSNorm(4))):
        found = compare(a, b, (2, 3, 4))
        assert found.affine == "different"
        assert "Weight and bias against weight alone, of shape (4,) along axis 2." in (
            found.differences
        )
        (agreement,) = found.agreements
        assert agreement.condition.endswith("with the same constants and without a bias.")
        # The same picture twice would show nothing.
        assert "a: weights of shape" not in found.to_text(width=120)
    # Where a notation leaves it open, the weights are what is compared.
    found = compare("torch.layer_norm", "llama.rms_norm", (2, 3, 4))
    assert found.affine == "equal"
    assert "The weight varies alike: shape (4,) along axis 2." in found.equalities
    assert "b, which subtracts no mean, is not used with a bias." in found.equalities
    same = compare("llama.rms_norm", "gemma.rms_norm", (2, 3, 4))
    assert same.parts[1].sentences == ("The weight varies alike: shape (4,) along axis 2.",)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 6, 4, 4), (5, 6)])
def test_one_group_of_channels_is_all_of_them(shape):
    """GroupNorm(1) was said to have one mean a sample and group of channels."""
    for groups, plain in ((1, "n [c ...]"), (shape[1], "n c [...]")):
        if shape[1] == groups and len(shape) < 3:
            continue
        scheme = Scheme.group_norm(groups)
        assert in_words(scheme, shape) == in_words(Scheme(plain, affine="c"), shape)
    if shape[1] % 2 == 0:
        assert "group of channels" in in_words(Scheme.group_norm(2), shape)
