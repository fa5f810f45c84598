"""explain: exact group indices, equivalents, formulas, worked numbers and pictures."""

import functools
import itertools
import json
import math
import re
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

import axisnorm.nn
from axisnorm.lens.compare import compare
from axisnorm.lens.explain import explain, named_norms, partition
from axisnorm.lens.family import unsized
from axisnorm.lens.rendering.wording import followed
from axisnorm.scheme import ArgumentError, DtypeError, Scheme

WHICH_MEAN = (2, 3, 4)


@pytest.mark.parametrize(
    ("scheme", "means"),
    [("b s [d]", 6), ("b [s d]", 2), ("[b] s [d]", 3), ("n c [...]", 6)],
)
def test_which_mean(scheme, means):
    found = explain(scheme, WHICH_MEAN)
    assert found.num_groups == means
    assert found.group_size == 24 // means
    assert len(np.unique(found.group_index)) == means


def test_group_index_is_exact():
    b, s, _ = np.indices(WHICH_MEAN)
    np.testing.assert_array_equal(explain("b s [d]", WHICH_MEAN).group_index, 3 * b + s)
    np.testing.assert_array_equal(explain("[b] s [d]", WHICH_MEAN).group_index, s)
    n, c, h, w = np.indices((2, 6, 2, 3))
    grouped = explain("n (g=3 [c]) [h w]; affine=g c", (2, 6, 2, 3))
    np.testing.assert_array_equal(grouped.group_index, 3 * n + c // 2)
    np.testing.assert_array_equal(grouped.affine_index, c)
    # A bracket outside: channels are shared with a stride.
    strided = explain("n ([g=3] c) h w", (2, 6, 2, 3))
    expected = ((n * 2 + c % 2) * 2 + h) * 3 + w
    np.testing.assert_array_equal(strided.group_index, expected)


def test_running_statistics_are_shared_by_the_batch():
    batch = explain("n c [...]; affine=c", (2, 3, 4))
    running = explain("n c [...]; affine=c; statistics=running", (2, 3, 4))
    assert (batch.num_groups, running.num_groups) == (6, 3)
    np.testing.assert_array_equal(running.group_index, np.indices((2, 3, 4))[1])


def by_name(found):
    return {equivalent.name: equivalent for equivalent in found.equivalents}


def test_is_instance_norm_a_kind_of_layer_norm():
    names = by_name(explain("... [d]; affine=d", WHICH_MEAN))
    assert list(names) == ["LayerNorm(4)", "InstanceNorm", "GroupNorm(3)"]
    assert names["LayerNorm(4)"].same
    assert names["InstanceNorm"].affine_shape == (3,)
    assert names["InstanceNorm"].differences == (
        "weight and bias: (3,) along axis 1, here (4,) along axis 2",
    )
    # Without weight and bias there is no difference at all.
    assert by_name(explain("... [d]", WHICH_MEAN))["InstanceNorm"].same


def test_group_norm_of_one_group_and_layer_norm_over_the_image():
    names = by_name(explain("n [c h w]; affine=c h w", (2, 3, 4, 5)))
    assert names["LayerNorm((3, 4, 5))"].same
    assert names["GroupNorm(1)"].affine_shape == (3,)
    assert not names["GroupNorm(1)"].same


def test_equal_sizes_do_not_make_equal_parameters():
    """(4,) along axis 1 is not (4,) along axis 2."""
    names = by_name(explain("... [d]; affine=d", (2, 4, 4)))
    assert not names["InstanceNorm"].same


def test_differences_in_constants_are_said():
    found = by_name(explain("... [d]; affine=d; correction=1; eps_placement=std", (2, 3, 4)))
    assert found["LayerNorm(4)"].differences == (
        "correction: 0, here 1",
        "eps_placement: variance, here std",
    )
    assert [e.name for e in explain("llama.rms_norm", (2, 3, 4)).equivalents] == ["RMSNorm(4)"]


def test_equal_partitions_are_those_with_equal_group_indices():
    """The normal form decides as the group indices themselves do, for every pair."""
    schemes = [
        "a b c [d]", "a b [c d]", "a [b c d]", "[a b c d]", "[a] b c d", "[a] b [c d]",
        "a [b] c d", "a (g=2 [b]) c d", "a ([g=2] b) c d", "a (g=3 [b]) [c d]",
        "a (g=6 [b]) c d", "a (g=1 [b]) c d", "a (g=2 [b] e=3) c d", "a b ([c] e=2) d",
    ]  # fmt: skip
    for shape in [(2, 6, 2, 3), (1, 6, 2, 1), (2, 6, 4, 1), (3, 6, 2, 2)]:
        found = [explain(scheme, shape) for scheme in schemes]
        for one, other in itertools.combinations(found, 2):
            same_form = partition(one.sizes, one.statistics_dimensions) == partition(
                other.sizes, other.statistics_dimensions
            )
            # Equal sets: each index of one belongs to one index of the other.
            pairs = np.unique(
                np.stack([one.group_index.ravel(), other.group_index.ravel()]), axis=1
            ).shape[1]
            assert same_form == (pairs == one.num_groups == other.num_groups), (
                one.scheme, other.scheme, shape)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "shape", "groups"),
    [
        (torch.nn.LayerNorm(4), (2, 3, 4), 6),
        (torch.nn.LayerNorm((3, 4)), (2, 3, 4), 2),
        (torch.nn.RMSNorm(4), (2, 3, 4), 6),
        (torch.nn.GroupNorm(2, 4), (3, 4, 5), 6),
        (torch.nn.BatchNorm2d(3), (2, 3, 4, 4), 3),
        (torch.nn.InstanceNorm1d(3), (2, 3, 4), 6),
        (torch.nn.InstanceNorm1d(3), (3, 4), 3),
        (axisnorm.nn.LayerNorm(4), (2, 3, 4), 6),
        (axisnorm.nn.LayerNorm2d(3), (2, 3, 4, 5), 40),
        (axisnorm.nn.Norm("n [c] h w", affine="c", sizes={"c": 3}), (2, 3, 4, 5), 40),
    ],
)
def test_modules(module, shape, groups):
    found = explain(module, shape)
    assert found.num_groups == groups
    assert found.subject == type(module).__name__


@pytest.mark.parametrize(
    ("written", "meant", "shape"),
    [
        ("LayerNorm", "... [d]; affine=d", (2, 3, 4)),
        ("LayerNorm(4)", nn.LayerNorm(4), (2, 3, 4)),
        ("nn.LayerNorm((3, 4), eps=1e-12)", nn.LayerNorm((3, 4), eps=1e-12), (2, 3, 4)),
        ("LayerNorm(4, elementwise_affine=False)", "... [d]", (2, 4)),
        ("torch.nn.RMSNorm(4, 1e-6)", nn.RMSNorm(4, 1e-6), (2, 4)),
        ("RMSNorm([3, 4], elementwise_affine=False)", "... [s d]; center=false; eps=none", (3, 4)),
        ("nn.GroupNorm(2, 4)", nn.GroupNorm(2, 4), (2, 4, 3)),
        ("GroupNorm(2)", nn.GroupNorm(2, 4), (2, 4, 3)),
        ("GroupNorm(2, 4, affine=False)", "n (g=2 [c]) [...]", (2, 4, 3)),
        ("LayerNorm2d(4)", "convnext.layer_norm_2d", (2, 4, 3, 3)),
        ("LayerNorm2d(4, elementwise_affine=False)", "n [c] ...; eps=1e-6", (2, 4, 3)),
        ("InstanceNorm2d(4)", "n c [...]", (2, 4, 3, 3)),
        ("InstanceNorm2d(4, affine=True)", "n c [...]; affine=c", (2, 4, 3, 3)),
        ("BatchNorm1d(4, momentum=0.5)", nn.BatchNorm1d(4, momentum=0.5), (2, 4)),
        ("BatchNorm2d(4, affine=False)", "[n] c [...]", (2, 4, 3, 3)),
        ("BatchNorm3d(4).eval()", nn.BatchNorm3d(4).eval(), (2, 4, 3, 3, 3)),
        ("BatchNorm in eval", "torch.batch_norm.eval", (2, 4)),
        ("GroupNorm(2, 4).eval()", nn.GroupNorm(2, 4), (2, 4, 3)),
    ],
)
def test_norms_as_models_write_them(written, meant, shape):
    found, expected = axisnorm.explain(written, shape), axisnorm.explain(meant, shape)
    assert unsized(found.scheme) == unsized(expected.scheme)
    assert np.array_equal(found.group_index, expected.group_index)
    assert found.affine_shape == expected.affine_shape


def test_every_norm_that_is_listed_can_be_asked_for():
    for name, scheme in named_norms((2, 4, 3)):
        if name.endswith("channels last") or "normalize" in name:
            continue
        assert unsized(axisnorm.explain(name, (2, 4, 3)).scheme) == scheme


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("LayerNorm(x)", "arguments are numbers here"),
        ("LayerNorm(print(1))", "arguments are numbers here"),
        ("LayerNorm(*[4])", "arguments are numbers here"),
        ("LayerNorm(4)(x)", "arguments are numbers here"),
        ("LayerNorm()", "missing a required argument: 'normalized_shape'"),
        ("LayerNorm(4, epsilon=1e-5)", "unexpected keyword argument 'epsilon'"),
        ("LayerNorm(5)", "an axis of 5 elements"),
        ("GroupNorm(3, 4)", "num_groups divides num_channels"),
        ("GroupNorm(2, 'a')", "A size is a whole number"),
        ("BatchNorm2d(3)", "an axis of 3 elements"),
        ("layer_norm", "Did you mean 'torch.layer_norm'"),
        ("F.layer_norm", "Did you mean 'torch.layer_norm'?"),
        ("LayrNorm(4)", "'LayrNorm\\(4\\)' came. Did you mean LayerNorm"),
        ("layer_norm(4)", "Did you mean LayerNorm"),
        ("nn.groupnorm(2, 4)", "Did you mean GroupNorm"),
        ("BatchNorm4d(4)", "Did you mean BatchNorm"),
        ("LayerNorm(4", "closing parenthesis"),
        ("LayerNorm(4).cuda()", "Write the call alone"),
        ("BatchNorm2d(4)", "A BatchNorm2d\\(4\\) takes inputs of 4 axes. Shape \\(2, 4\\) has 2"),
        ("InstanceNorm2d", "takes inputs of 3 or 4 axes"),
        (torch.nn.BatchNorm2d(4), "A BatchNorm2d takes inputs of 4 axes"),
        (axisnorm.nn.BatchNorm3d(4), "A BatchNorm3d takes inputs of 5 axes"),
        (torch.nn.LazyBatchNorm1d(), "A lazy module has its sizes from its first input"),
        (torch.nn.Linear, "The class Linear came"),
        (int, "The class int came"),
        ("n(g c)", "brackets"),
    ],
    ids=str,
)
def test_constructors_that_cannot_be_read(written, message):
    with pytest.raises(ArgumentError, match=message):
        axisnorm.explain(written, (2, 4))


@pytest.mark.parametrize(
    ("written", "module", "shape"),
    [
        ("LayerNorm(4)", nn.LayerNorm(4), (2, 3, 4)),
        ("LayerNorm", nn.LayerNorm(4), (2, 3, 4)),
        (nn.LayerNorm, nn.LayerNorm(4), (2, 3, 4)),
        (axisnorm.nn.LayerNorm2d, axisnorm.nn.LayerNorm2d(3), (2, 3, 4, 4)),
        ("LayerNorm2d(3)", axisnorm.nn.LayerNorm2d(3), (2, 3, 4)),
        ("LayerNorm(4, bias=False)", nn.LayerNorm(4, bias=False), (2, 3, 4)),
        ("LayerNorm(4, elementwise_affine=False)", nn.LayerNorm(4, elementwise_affine=False), (2, 4)),
        ("RMSNorm(4)", nn.RMSNorm(4), (2, 3, 4)),
        ("RMSNorm(4, elementwise_affine=False)", nn.RMSNorm(4, elementwise_affine=False), (2, 4)),
        ("GroupNorm(2, 4, affine=False)", nn.GroupNorm(2, 4, affine=False), (2, 4, 3)),
        ("BatchNorm1d(3)", nn.BatchNorm1d(3), (2, 3, 4)),
        ("BatchNorm1d(3).train()", nn.BatchNorm1d(3), (2, 3)),
        ("BatchNorm1d(3).eval()", nn.BatchNorm1d(3).eval(), (2, 3)),
        ("SyncBatchNorm(3)", nn.SyncBatchNorm(3), (2, 3, 4)),
        ("BatchNorm2d(3, affine=False).eval()", nn.BatchNorm2d(3, affine=False).eval(), (2, 3, 4, 4)),
        *(
            (f"BatchNorm1d(3, track_running_stats=False){mode}",
             nn.BatchNorm1d(3, track_running_stats=False).train(not mode), (2, 3, 4))
            for mode in ("", ".eval()")
        ),
        *(
            (f"InstanceNorm1d(3, affine={affine}, track_running_stats={track}){mode}",
             nn.InstanceNorm1d(3, affine=affine, track_running_stats=track).train(not mode), shape)
            for affine in (True, False)
            for track in (True, False)
            for mode in ("", ".eval()")
            for shape in ((2, 3, 4), (3, 4))
        ),
        ("InstanceNorm2d(3)", nn.InstanceNorm2d(3), (3, 4, 5)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_written_is_the_module_that_it_makes(written, module, shape):
    found, expected = explain(written, shape), explain(module, shape)
    assert unsized(found.scheme) == unsized(expected.scheme)
    assert found.parameters == expected.parameters
    assert np.array_equal(found.group_index, expected.group_index)
    assert found.formula == expected.formula
    assert found.equivalents == expected.equivalents
    if isinstance(module, nn.Module) and not isinstance(module, nn.SyncBatchNorm):
        # What it is said to compute is what it computes.
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        y = explain(module, x).worked.y
        assert y == pytest.approx(module(x).flatten()[0].item(), rel=1e-4, abs=1e-6)
    assert compare(written, module, shape).same


def test_a_batch_norm_is_the_batch_norm():
    """It was said to differ from BatchNorm, which keeps running statistics."""
    said = "keeps running statistics, and uses them in eval mode"
    for subject in ("torch.batch_norm", "BatchNorm1d(3)", nn.BatchNorm1d(3), "onnx15.batch_norm"):
        (batch,) = explain(subject, (2, 3, 4)).equivalents
        stored = "running_correction: 1, here 0"
        assert batch.differences == ((stored,) if subject == "onnx15.batch_norm" else ())
    for subject in ("[n] c [...]; affine=c", nn.BatchNorm1d(3, track_running_stats=False)):
        (batch,) = explain(subject, (2, 3, 4)).equivalents
        assert batch.differences == (said,)
    tracked = explain(nn.InstanceNorm1d(3, track_running_stats=True), (2, 3, 4)).equivalents
    assert "InstanceNorm" in [one.name for one in tracked]
    assert not any(one.same for one in tracked)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (np.array([["a", "b"]]), "Give numbers"),
        (np.array([[None, 1.0]]), "The tensor is object"),
        (np.zeros((1, 2), "M8[s]"), "Give numbers"),
        (np.zeros((1, 2), [("a", "f4")]), "Give numbers"),
        (torch.zeros(1, 2, device="meta"), "This one has none"),
        (torch.zeros(1, 2).to_sparse(), "This one is sparse_coo"),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_tensors_without_numbers(tensor, said):
    for ask in (
        lambda: explain("... [d]", tensor),
        lambda: compare("... [d]", "[...]", tensor),
    ):
        with pytest.raises((ArgumentError, DtypeError), match=said):
            ask()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_has_no_shape():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    for ask in (explain, lambda subject, x: compare(subject, subject, x)):
        with pytest.raises(ArgumentError, match="A nested tensor has several"):
            ask("... [d]", nested)


def test_the_order_of_bytes_does_not_matter():
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float16)
    swapped = x.astype(x.dtype.newbyteorder())
    assert explain("llama.rms_norm", swapped).to_json() == explain("llama.rms_norm", x).to_json()


def test_a_negative_eps_is_subtracted():
    assert "sqrt(var[i] - 1)" in explain("... [d]; eps=-1", (2, 3)).formula
    assert "(sqrt(var[i]) - 1)" in explain("... [d]; eps=-1; eps_placement=std", (2, 3)).formula


def test_functions():
    assert explain(torch.nn.functional.instance_norm, (2, 3, 4)).num_groups == 6
    assert explain(torch.nn.functional.layer_norm, (2, 3, 4)).num_groups == 6
    four = functools.partial(axisnorm.group_norm, num_groups=2, eps=1e-3)
    assert explain(four, (3, 4, 5)).num_groups == 6
    assert explain(four, (3, 4, 5)).scheme.eps == 1e-3
    # Positional arguments are told apart by the function's own signature.
    inner = functools.partial(torch.nn.functional.layer_norm, torch.ones(2, 3, 4), (3, 4))
    assert explain(inner, (2, 3, 4)).num_groups == 2
    outer = functools.partial(functools.partial(axisnorm.layer_norm, eps=1.0), eps=0.5)
    assert explain(outer, (2, 3)).scheme.eps == 0.5
    norm = functools.partial(axisnorm.normalize, scheme="n c [...]")
    assert explain(norm, (2, 3, 4)).num_groups == 6
    with pytest.raises(ArgumentError, match="computes what its scheme says"):
        explain(axisnorm.normalize, (2, 3, 4))
    with pytest.raises(ArgumentError, match="num_groups"):
        explain(torch.nn.functional.group_norm, (3, 4, 5))
    with pytest.raises(ArgumentError, match="A weight of shape"):
        explain(
            functools.partial(axisnorm.layer_norm, normalized_shape=4, weight=torch.ones(3)), (2, 4)
        )
    with pytest.raises(ArgumentError, match="softmax"):
        explain(torch.nn.functional.softmax, (3, 4, 5))


def test_lengths():
    """torch.nn.functional.normalize, along any axes."""
    x = torch.arange(24.0).reshape(2, 3, 4) + 1
    for dim in (1, 2, -3, (1, 2)):
        function = functools.partial(torch.nn.functional.normalize, dim=dim)
        found = explain(function, x)
        assert found.worked.y == pytest.approx(function(x)[0, 0, 0].item(), rel=1e-6)
    assert explain(torch.nn.functional.normalize, (2, 3)).group_size == 3
    for wrong in ({"p": 1}, {"dim": 3}):
        with pytest.raises(ArgumentError, match="for p=2 and axes"):
            explain(functools.partial(torch.nn.functional.normalize, **wrong), x)


ARTICLE = [[1, 2, 4, 1], [6, 3, 2, 4], [2, 4, 6, 1]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_article_by_hand(make):
    found = explain("... [d]", make(ARTICLE))
    np.testing.assert_allclose(found.mean, [2.0, 3.75, 3.25])
    np.testing.assert_allclose(found.var, [1.5, 2.1875, 3.6875])
    worked = found.worked
    assert worked.elements == (1, 2, 4, 1)
    assert worked.rstd == pytest.approx(1 / 1.224749, abs=1e-6)
    assert worked.normalized == pytest.approx(-0.8165, abs=5e-5)
    assert "(1 - 2) / 1.224749 = -0.81649" in found.to_text(width=100, color=False)


def test_every_intermediate_value():
    steps = explain("... [d]; affine=d", np.array(ARTICLE)).worked.steps
    said = {step.name: (step.how, step.values) for step in steps}
    assert said["sum"] == ("sum of x", (8,))
    assert said["mean"] == ("sum / 4", (2,))
    assert said["deviations"] == ("x - mean", (-1, 0, 2, -1))
    assert said["squares"] == ("deviations^2", (1, 0, 4, 1))
    assert said["sum of squares"][1] == (6,)
    assert said["variance"] == ("sum of squares / 4", (1.5,))
    assert said["variance + eps"] == ("variance + 1e-05", (1.50001,))
    assert said["root"][1][0] == pytest.approx(1.224749, abs=1e-6)
    assert said["normalized"][0] == "(x - mean) / root"
    assert said["normalized"][1] == pytest.approx([-0.8165, 0, 1.6330, -0.8165], abs=5e-5)
    assert list(said)[-1] == "y"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["once", "before_affine"])
def test_the_followed_element_is_what_its_line_says(dtype, rounding):
    """The last lines multiplied what was not rounded yet, and had no sign of it."""
    x = torch.tensor([[-1.3, 0.4, 2.7], [0.1, 5.0, -2.2]], dtype=dtype)
    weight = torch.tensor([-1.7, 0.3, 2.9], dtype=dtype)
    call = functools.partial(
        axisnorm.rms_norm, normalized_shape=3, weight=weight, rounding=rounding, eps=1e-6
    )
    found = explain(call, x)
    (x_name, x_line), (y_name, y_line) = followed(found.worked, found.scheme, "{:.17g}".format)
    assert (x_name, y_name) == ("x[0, 0]", "y[0, 0]")
    y_sum, _, y_result = y_line.partition(" = ")
    assert eval(y_sum) == pytest.approx(float(y_result.split(",")[0]), rel=2**-7)
    assert y_line.endswith(f", rounded to {str(dtype)[6:]}") == (dtype != torch.float32)
    # What is multiplied is what the line before ended with.
    assert y_line.startswith(re.split(", rounded | = ", x_line)[-1])
    assert (" rounded " in x_line) == (rounding == "before_affine" and dtype != torch.float32)
    assert "* (-1.7" in y_line
    assert eval(x_line.split(" = ")[0]) == pytest.approx(found.worked.normalized, rel=1e-5)
    text = found.to_text(width=120, color=False)
    assert "weight" in text.split("One group by hand")[1].split("y[0, 0]")[0]


def test_weights_that_vary_in_the_group_are_written_out():
    norm = nn.LayerNorm(3)
    norm.weight.data, norm.bias.data = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.0, 5.0, 0.0])
    steps = {s.name: s.values for s in explain(norm, torch.tensor([[1.0, 2.0, 4.0]])).worked.steps}
    assert steps["weight"] == (1, 2, -3) and steps["bias"] == (0, 5, 0)
    by_hand = np.array(steps["normalized"]) * steps["weight"] + steps["bias"]
    assert steps["y"] == pytest.approx(by_hand)


WORKED = [
    name for name, scheme in axisnorm.PRESETS.items()
    if "g=32" not in str(scheme) and "(g [" not in str(scheme) and scheme.statistics == "batch"
] + [
    "... [d]; scale=var", "... [d]; scale=sqrt_std", "... [d]; scale=sqrt_std; eps_placement=std",
    "... [d]; scale=sqrt_std; eps_placement=max", "... [d]; scale=var; eps_placement=max",
    "... [d]; correction=0.5", "... [d]; scale=l2", "n (g=2 [c]) [...]; affine=g c", "... [d]; eps=0",
]  # fmt: skip


@pytest.mark.parametrize("scheme", WORKED)
def test_what_is_worked_is_what_is_computed(scheme):
    scheme = axisnorm.PRESETS.get(scheme) or Scheme(scheme)
    x = np.random.default_rng(0).standard_normal((3, 4, 2, 2)) * 0.1
    x[1] = 0.7
    shape = scheme.layout(4).sizes(x.shape).affine_shape
    weight = bias = None
    if scheme.affine:
        weight, bias = (np.random.default_rng(i).standard_normal(shape) for i in (1, 2))
    call = functools.partial(axisnorm.normalize, scheme=scheme, weight=weight, bias=bias)
    worked = explain(call, x).worked
    y = call(x)
    assert worked.y == pytest.approx(y.flat[0], rel=1e-12)
    assert worked.rstd == pytest.approx(axisnorm.statistics(x, scheme)[2].flat[0], rel=1e-12)
    # The group of constants too, which comes first when it stands first.
    constant = explain(call, x[1:]).worked
    assert constant.y == pytest.approx(call(x[1:]).flat[0], rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["once", "before_affine"])
def test_half_types_are_rounded_as_they_are_computed(dtype, rounding):
    x = (torch.arange(64.0).reshape(2, 32) * 0.37 - 5).to(dtype)
    weight = (torch.arange(32.0) * 0.11 + 0.7).to(dtype)
    call = functools.partial(
        axisnorm.rms_norm, normalized_shape=32, weight=weight, eps=1e-6, rounding=rounding
    )
    worked = explain(call, x).worked
    found = {step.name: step.values for step in worked.steps}
    assert ("rounded" in found) == (rounding == "before_affine")
    assert found["y"] == tuple(call(x)[0].double().tolist())


def test_running_statistics_of_an_instance_norm():
    """Which has a mean a sample and channel in training, and one a channel in evaluation."""
    norm = torch.nn.InstanceNorm1d(3, track_running_stats=True, affine=True).eval()
    norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    norm.running_var.copy_(torch.tensor([4.0, 9.0, 16.0]))
    x = torch.arange(24.0).reshape(2, 3, 4)
    found = explain(norm, x)
    np.testing.assert_allclose(found.mean, [1, 2, 3])
    assert [step.name for step in found.worked.steps] == [
        "mean", "variance", "variance + eps", "root", "normalized", "y",
    ]  # fmt: skip
    assert found.worked.y == pytest.approx(norm(x)[0, 0, 0].item(), rel=1e-6)
    given = {"running_mean": norm.running_mean, "running_var": norm.running_var}
    function = functools.partial(torch.nn.functional.batch_norm, **given)
    assert explain(function, x).worked.mean == 1
    with pytest.raises(ArgumentError, match="running"):
        explain(torch.nn.functional.batch_norm, x)


def test_parameters_that_a_module_has():
    """Formula and numbers have a weight and a bias where the module has them."""
    x = torch.arange(24.0).reshape(2, 3, 4)
    for module, end, label in (
        (torch.nn.LayerNorm(4), " * weight[d] + bias[d]", "weight, bias"),
        (torch.nn.LayerNorm(4, bias=False), " * weight[d]", "weight "),
        (torch.nn.LayerNorm(4, elementwise_affine=False), " + 1e-05)", "weight, bias  none"),
        (torch.nn.RMSNorm(4), " * weight[d]", "weight "),
        (torch.nn.BatchNorm1d(3, affine=False).eval(), " + 1e-05)", "weight, bias  none"),
        (torch.nn.InstanceNorm1d(3, track_running_stats=True).eval(), " + 1e-05)", "  none"),
    ):
        found = explain(module, x)
        assert found.formula.splitlines()[0].endswith(end), found.formula
        assert any(line.startswith(label) or line.endswith(label)
                   for line in found.to_text(width=80, color=False).splitlines())  # fmt: skip
        assert found.worked.y == pytest.approx(module(x)[0, 0, 0].item(), rel=1e-5)
    instance = explain(torch.nn.InstanceNorm1d(3, track_running_stats=True).eval(), x)
    assert (instance.num_groups, instance.affine_shape) == (3, ())


def test_numbers_that_cannot_be_worked_through():
    with pytest.raises(DtypeError, match="complex64"):
        explain("... [d]", torch.ones(2, 3, dtype=torch.complex64))
    with pytest.raises(ArgumentError, match="affine is empty"):
        explain(functools.partial(axisnorm.normalize, scheme="... [d]", weight=np.ones(3)), (2, 3))
    constant = explain("... [d]; eps=0", np.ones((2, 3)))
    assert (constant.worked.y, constant.worked.rstd) == (0, 0)
    assert "(1 - 1) / 0, which is taken as 0" in constant.to_text(width=80, color=False)
    negative = explain("... [d]; eps=-5", np.array(ARTICLE))
    assert json.loads(negative.to_json())["worked"]["y"] is None and negative.to_text()


def test_means_and_variances_are_shown():
    text = explain("... [d]", np.array(ARTICLE)).to_text(width=80, color=False)
    assert "mean      2    3.75    3.25" in text and "variance  1.5  2.1875  3.6875" in text
    many = explain("... [d]", np.ones((9, 9, 4))).to_text(width=80, color=False)
    assert "[0, 3]  ...  [8, 8]" in many


def test_long_groups_are_worked_in_part():
    x = np.random.default_rng(0).standard_normal((8, 197, 768)).astype(np.float32)
    found = explain("... [d]; affine=d", x)
    worked = found.worked
    assert (worked.size, len(worked.elements), len(worked.steps[3].values)) == (768, 64, 64)
    expected = axisnorm.layer_norm(x.astype(np.float64), 768)
    assert worked.y == pytest.approx(expected[0, 0, 0], rel=1e-9)
    text = found.to_text(width=80, color=False)
    assert "(762 more)" in text
    assert len(text.splitlines()) < 75 and max(map(len, text.splitlines())) <= 80
    assert len(found.to_json()) < 200_000


def test_a_module_is_worked_with_its_parameters():
    norm = torch.nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 3.0, 4.0, 5.0]))
        norm.bias.fill_(0.5)
    x = torch.tensor(ARTICLE, dtype=torch.float32)
    worked = explain(norm, x).worked
    assert (worked.weight, worked.bias) == (2.0, 0.5)
    assert worked.y == pytest.approx(norm(x)[0, 0].item(), abs=1e-6)


def test_running_statistics_of_a_module_are_the_ones_used():
    norm = torch.nn.BatchNorm1d(2).eval()
    norm.running_mean.copy_(torch.tensor([0.0, 5.0]))
    norm.running_var.copy_(torch.tensor([4.0, 25.0]))
    found = explain(norm, torch.tensor([[1.0, 10.0], [3.0, 20.0]]))
    np.testing.assert_allclose(found.mean, [0, 5])
    np.testing.assert_allclose(found.var, [4, 25])
    assert found.worked.normalized == pytest.approx(0.5, abs=1e-5)


def test_formula_has_the_numbers_of_the_shape():
    lines = explain("... [d]; affine=d", WHICH_MEAN).formula.splitlines()
    assert lines == [
        "y = (x - mean[i, j]) / sqrt(var[i, j] + 1e-05) * weight[d] + bias[d]",
        "mean[i, j] = 1/4 * sum of x over d",
        "var[i, j] = 1/4 * sum of (x - mean[i, j])^2 over d",
    ]
    bessel = explain("b [d]; correction=1; eps_placement=std", (2, 4)).formula
    assert "1/3 * sum" in bessel and "(sqrt(var[b]) + 1e-05)" in bessel


def test_picture_reads_without_colour():
    text = explain("b s [d]; affine=d", WHICH_MEAN).to_text(width=100, color=False)
    assert " A  A  A  A    D  D  D  D " in text
    assert " a  b  c  d    a  b  c  d" in text
    assert "\x1b" not in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\x1b" in explain("b s [d]", WHICH_MEAN).to_text(width=100, color=True)


def test_large_shapes_are_drawn_as_a_sample():
    text = explain("n (g=4 [c]) [h w]; affine=g c", (64, 512, 224, 224)).to_text(
        width=100, color=False
    )
    lines = text.splitlines()
    assert len(lines) < 45 and max(map(len, lines)) <= 100
    # Two neighbouring channels share a mean, the last channel has another one.
    assert "n 0, g c 0" in text and "n 0, g c 511" in text
    assert " A  A ... A    A  A ... A   ...   B  B ... B" in text


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [("[...]", ()), ("[d]", (5,)), ("n [c] ...", (2, 0, 3)), ("a b c d e [f]", (9, 3, 2, 2, 2, 3)),
     ("[d]", (1,)), ("... [d]", (30, 40)), ("... [d]", (8, 197, 768)),
     ("n [c] h w", (64, 3, 224, 224)), ("a [b] c d e", (50, 40, 30, 20, 10)),
     ("a b (g=4 [c]) d e f", (50, 40, 32, 20, 10, 70)), ("[a] b c d e f g", (3, 4, 5, 6, 7, 8, 9))],
)  # fmt: skip
def test_every_rank_is_drawn(scheme, shape):
    found = explain(scheme, shape)
    text = found.to_text(width=80, color=False)
    assert str(found.scheme) in text
    assert len(text.splitlines()) < 70 and max(map(len, text.splitlines())) <= 80
    assert json.loads(found.to_json())["num_groups"] == found.num_groups
    if 0 in shape:
        assert "no elements" in text


def test_divisors_are_whole_numbers_and_never_zero():
    assert "1/1000000 * sum of (x" in explain("[d]", (1000000,)).formula
    assert "1/999999 * sum of (x" in explain("[d]; correction=1", (1000000,)).formula
    assert "1/n * sum of x" in explain("[d]", (0,)).formula


def test_a_split_axis_is_one_axis_and_none_is_broken():
    shape = (2, 8, 128, 128, 128, 128)
    text = explain("n (g=2 [c]) [...]", shape).to_text(width=40, color=False)
    assert "n 2 x (g 2 c 4) x" in text
    for name in "ijkl":
        assert f"{name} 128" in text


def test_json_is_stable():
    data = json.loads(explain("... [d]; affine=d", WHICH_MEAN).to_json())
    assert list(data) == [
        "schema", "subject", "scheme", "shape", "axes", "num_groups", "group_size", "statistics_shape",
        "affine_shape", "group_index", "formula", "equivalents", "route", "mean", "var", "worked",
    ]  # fmt: skip
    assert data["axes"][2] == {"name": "d", "size": 4, "shares": "all", "affine": True}
    assert data["group_index"][1][2] == [5, 5, 5, 5]
    assert json.loads(explain("... [d]", (100, 100)).to_json())["group_index"] is None


@pytest.mark.parametrize(
    ("subject", "shape"),
    [
        ("b s [d]", (2, 3)),
        ("... [d", (2, 3)),
        ("n (g=4 [c])", (2, 6)),
        (torch.nn.Linear(3, 3), (2, 3)),
        (torch.nn.LayerNorm(5), (2, 3)),
        (torch.nn.LayerNorm(5, elementwise_affine=False), (2, 3)),
        (3, (2, 3)),
        ("[d]", ("a",)),
        ("[d]", (-1,)),
        ("[d]", np.array([1.0, np.nan])),
        ("[n] c; statistics=running", np.ones((2, 3))),
    ],
)
def test_wrong_use(subject, shape):
    with pytest.raises(ArgumentError):
        explain(subject, shape)


def test_without_rich_the_extra_is_named(monkeypatch):
    for name in ("report", "audited", "console"):
        monkeypatch.delitem(sys.modules, f"axisnorm.lens.rendering.{name}", raising=False)
        monkeypatch.delattr(f"axisnorm.lens.rendering.{name}", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    found = explain(Scheme.layer_norm(), (2, 3))
    assert found.num_groups == 2
    with pytest.raises(ModuleNotFoundError, match=r"axisnorm\[lens\]"):
        found.to_text()


def test_values_that_are_not_finite_are_located():
    x = np.zeros((2, 3, 4))
    x[1, 0, 2], x[1, 2, 3] = math.inf, math.nan
    with pytest.raises(ArgumentError, match=r"x\[1, 0, 2\] is inf and 1 more is not finite"):
        explain("... [d]", x)


def test_one_mean_is_no_means():
    assert repr(explain("[...]", (1,))).endswith("1 mean of 1 element)")


def test_large_shapes_take_no_memory_until_their_elements_are_asked_for():
    tracemalloc.start()
    found = explain("... [d]; affine=d", (1000, 1000, 1000))
    found.to_text(width=80), found.to_json()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16e6 and found.num_groups == 10**6


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("n (g=2 [c]) [h w]; affine=g c", (2, 4, 5, 5)),
        ("... [d]; affine=d", (2, 3, 4)),
        ("[n] c [...]; affine=c", (32, 64, 112, 112)),
        ("a b [c] d e (f=2 [g]) h", (2, 3, 4, 2, 3, 4, 2)),
    ],
)
def test_narrow_terminals_lose_no_column_of_a_picture(text, shape):
    """At 40 columns the last column of two of three panels was cut off."""

    def drawn(width):
        said = explain(text, shape).to_text(width=width, color=False).split("Formula")[0]
        assert max(map(len, said.splitlines())) <= width
        pictures = said[said.index("The same letter") :]
        rows = [line.split() for line in pictures.splitlines() if line.startswith(" ")]
        return sorted(word for row in rows for word in row if word.isalpha())

    assert drawn(40) == drawn(60) == drawn(80) == drawn(200)


@pytest.mark.parametrize("ndim", [5, 9, 20, 40, 64])
def test_many_axes_are_a_short_picture(ndim):
    """Every further axis of two elements doubled the time that a picture took."""
    text = " ".join(f"[a{i}]" if i % 2 else f"a{i}" for i in range(ndim))
    shape = (1,) * max(ndim - 20, 0) + (2,) * min(ndim, 20)
    found = explain(text, shape)
    said = found.to_text(width=100, color=False).split("Formula")[0]
    assert len(said.splitlines()) < 60
    # Below: what is left out is said once, whatever the number of axes.
    assert said.count("\n...\n") == (1 if ndim > 4 else 0)


@pytest.mark.parametrize("width", [40, 50, 80, 200])
def test_numbers_stay_whole_on_narrow_terminals(width):
    """At 40 columns means were cut to '0.1…', and numbers of the calculation ended their lines."""
    x = np.random.default_rng(0).standard_normal((9, 6)) * 100 - 33
    found = explain("n [c]; affine=c", x)
    text = found.to_text(width=width, color=False)
    words = set(re.split(r"[\s,()]+", text))
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    shown = [*found.mean[:4], found.mean[-1], *found.var[:4], found.var[-1]]
    for step in found.worked.steps:
        shown += step.values if len(step.values) > 1 else ()
        if len(step.values) == 1:
            assert f"{step.values[0]:.7g}" in words
    assert {f"{value:.5g}" for value in shown} <= words


def test_a_forward_of_its_own_is_not_vouched_for():
    """A norm over the channels that is written as a LayerNorm was explained as one."""

    class OverChannels(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    class OtherDefaults(nn.LayerNorm):
        def __init__(self, size):
            super().__init__(size, eps=1e-6)

    for ask in (
        lambda module: explain(module, (2, 4, 3, 4)),
        lambda module: compare("... [d]", module, (2, 4, 3, 4)),
    ):
        with pytest.raises(ArgumentError, match="An OverChannels came, which has a forward of"):
            ask(OverChannels(4))
        ask(OtherDefaults(4)), ask(axisnorm.nn.LayerNorm(4))
    assert explain(OtherDefaults(4), (2, 4)).scheme.eps == 1e-6


def test_squares_that_overflow_are_refused():
    """They were worked through to an output of 0, where normalize gives the right one."""
    x = np.array([[1.0, 2.0, 3.0], [-4e300, 1e300, 2e300]])
    for scheme in ("n [d]", "n [d]; center=false"):
        assert np.abs(axisnorm.normalize(x, scheme)).max() > 0.5
        with pytest.raises(ArgumentError, match=re.escape("x[1, 0] = -4e+300 is larger")):
            explain(scheme, x)
    assert explain("n [d]", x[:1] * 1e150).worked.y == pytest.approx(-(1.5**0.5))


def test_the_formula_of_a_function_has_what_it_was_given():
    """A weight without a bias was explained as having one."""
    x, weight, bias = torch.randn(2, 4), torch.ones(4), torch.zeros(4)
    norm = functools.partial(torch.nn.functional.layer_norm, normalized_shape=(4,))
    for given, end in (
        ({"weight": weight}, " * weight[d]"),
        ({"bias": bias}, " + bias[d]"),
        ({"weight": weight, "bias": bias}, " * weight[d] + bias[d]"),
        ({}, " * weight[d] + bias[d]"),
    ):
        found = explain(functools.partial(norm, **given), x)
        assert found.formula.splitlines()[0].endswith(f"1e-05){end}")
