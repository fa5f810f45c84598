"""Two models norm by norm: which norm stands for which, and what of a pair differs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import axisnorm
from axisnorm import ArgumentError, Scheme
from axisnorm.lens.models.norms import Audit, Norm
from axisnorm.lens.models.parameters import KEPT, Parameter, parameters_of

SHAPES = {1: (4,), 2: (4, 8), 3: (2, 3, 8), 4: (2, 8, 4, 4)}


def norm(path, scheme, shape=(2, 3, 8), *, weight=None, bias=None, **more) -> Norm:
    """A norm as an audit of another kind of source would give it."""
    scheme = Scheme(scheme)
    sizes = scheme.layout(len(shape)).sizes(shape)
    given = {"weight": weight, "bias": bias, **more.pop("running", {})}
    said = {
        "cls": "Norm", "kind": "node", "declared": None, "scheme": scheme, "identification": None,
        "eps": scheme.eps, "dtype": "float32", "affine_shape": sizes.affine_shape,
        "num_statistics": sizes.num_groups, "group_size": sizes.group_size, "calls": 1,
        "time_share": None, "findings": (), "parameters": tuple(parameters_of(given)),
    }  # fmt: skip
    return Norm(path=path, shape=shape, **{**said, **more})


def audit(*norms, source="onnx", model="Model") -> Audit:
    return Audit(model, norms, (), 0.01, source)


def blocks(count, *, seed=0, cls=nn.LayerNorm, drop=None, **more):
    """Norms of random weights in a row, so that each can be told from the others."""
    torch.manual_seed(seed)
    layers = [cls(8, **more) for _ in range(count)]
    for layer in layers:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    return nn.Sequential(*[layer for i, layer in enumerate(layers) if i != drop])


def audited(model, *shape):
    torch.manual_seed(1)
    return axisnorm.audit(model, torch.randn(*(shape or (2, 3, 8))))


def differing(pair):
    return [part.name for part in pair.different]


# --------------------------------------------------------------------------------------------
# What differs


def test_a_model_is_the_same_as_itself():
    found = audited(blocks(3)).diff(audited(blocks(3)))
    assert found.same and not found.differences
    assert found.alignment == "path" and found.aligned == "3 pairs by path."
    assert [pair.largest_difference for pair in found.pairs] == [0.0, 0.0, 0.0]
    assert all(part.verdict == "equal" for pair in found.pairs for part in pair.parts)


def test_another_eps_and_momentum_as_in_a_port_from_keras():
    class Model(nn.Module):
        def __init__(self, **more):
            super().__init__()
            self.norm, self.other = nn.BatchNorm2d(8, **more), nn.GroupNorm(2, 8)

        def forward(self, x):
            return self.other(self.norm(x))

    a, b = (
        audited(Model(**more).eval(), *SHAPES[4]) for more in ({}, {"eps": 1e-3, "momentum": 0.01})
    )
    found = a.diff(b)
    first, second = found.pairs
    assert differing(first) == ["constants", "running"] and second.same
    assert found.differences[0].startswith("norm: eps: 1e-05 against 0.001.")
    assert "counts 0.1 against 0.01" in found.differences[1]
    # What the sentence says of the outputs is so.
    x = np.full((1, 2, 1), 1.0) * [[-1.0], [1.0]]
    one, two = (axisnorm.normalize(x, s, running_mean=np.zeros(2), running_var=np.ones(2))
                for s in (first.a.scheme.replace(affine="c"), first.b.scheme.replace(affine="c")))  # fmt: skip
    smaller = 100 * (1 - np.abs(two / one).max())
    assert "0.049 % smaller at variance 1" in found.differences[0]
    assert smaller == pytest.approx(0.049, abs=1e-3)


def test_a_layer_norm_that_became_an_rms_norm():
    a, b = blocks(3), blocks(3)
    b[1] = nn.RMSNorm(8, eps=1e-5)
    b[1].weight = a[1].weight
    found = audited(a).diff(audited(b))
    assert [pair.same for pair in found.pairs] == [True, False, True]
    assert differing(found.pairs[1]) == ["statistics", "affine"]
    assert "a subtracts the mean" in found.differences[0]
    assert found.differences[1].startswith("1: Weight and bias against weight alone")


def test_values_differ_by_what_they_differ():
    a, b = blocks(2), blocks(2)
    with torch.no_grad():
        b[1].weight[3] += 0.25
    found = audited(a).diff(audited(b))
    assert differing(found.pairs[1]) == ["values"]
    assert found.pairs[1].largest_difference == pytest.approx(0.25, rel=1e-6)
    assert found.differences == ("1: weight: the largest difference of values is 0.25.",)


def test_running_statistics_are_values_too():
    a, b = nn.BatchNorm1d(8).eval(), nn.BatchNorm1d(8).eval()
    b.running_var.fill_(3.0)
    pair = audited(nn.Sequential(a), 4, 8).diff(audited(nn.Sequential(b), 4, 8)).pairs[0]
    assert differing(pair) == ["values"] and pair.largest_difference == 2.0
    assert "running_var" in pair.different[0].sentences[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_rounding_explains_is_equal(dtype):
    weight = np.random.default_rng(0).uniform(0.5, 1.5, 8)
    a = audit(norm("n", "... [d]; affine=d", weight=weight))
    b = audit(norm("n", "... [d]; affine=d", weight=weight.astype(dtype)))
    pair = a.diff(b).pairs[0]
    assert pair.same and 0 < pair.largest_difference < np.finfo(dtype).eps
    off = audit(norm("n", "... [d]; affine=d", weight=(weight * 1.01).astype(dtype)))
    assert differing(a.diff(off).pairs[0]) == ["values"]


def test_a_weight_around_zero_is_that_around_one():
    weight = np.random.default_rng(0).uniform(0.5, 1.5, 8).astype(np.float32)
    a = audit(norm("n", "... [d]; affine=d; center=false", weight=weight))
    b = audit(norm("n", "... [d]; affine=d; center=false; weight_offset=1", weight=weight - 1))
    assert differing(a.diff(b).pairs[0]) == ["constants"]
    assert differing(b.diff(a).pairs[0]) == ["constants"]
    unshifted = audit(norm("n", "... [d]; affine=d; center=false; weight_offset=1", weight=weight))
    assert differing(a.diff(unshifted).pairs[0]) == ["constants", "values"]


def test_an_exporter_adds_the_offset_of_a_weight_once():
    weight = np.random.default_rng(0).uniform(0.5, 1.5, 8).astype(np.float32)
    text = "... [d]; affine=d; center=false"
    model = audit(norm("n", f"{text}; weight_offset=1", weight=weight - 1), source="module")
    graph = audit(norm("n", text, weight=weight))
    assert model.diff(graph).same and graph.diff(model).same
    lost = audit(norm("n", text, weight=weight - 1))
    assert differing(model.diff(lost).pairs[0]) == ["constants", "values"]


def test_units_that_an_operator_wants_are_no_difference():
    text = "... [d]; affine=d"
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    weight = np.linspace(0.5, 1.5, 8, dtype=np.float32)
    plain = audit(norm("n", "... [d]"), source="module")
    assert plain.diff(audit(norm("n", text, weight=ones, bias=zeros))).same
    assert audit(norm("n", text, weight=ones)).diff(plain).same
    assert not plain.diff(audit(norm("n", text, weight=weight))).same
    unbiased = audit(norm("n", text, weight=weight), source="module")
    assert unbiased.diff(audit(norm("n", text, weight=weight, bias=zeros))).same
    assert not unbiased.diff(audit(norm("n", text, weight=weight, bias=ones))).same
    shown = plain.diff(audit(norm("n", text, weight=ones, bias=zeros))).pairs[0]
    assert [one.role for one in shown.b.parameters] == ["weight", "bias"]


def test_large_parameters_are_compared_by_their_summaries():
    values = np.random.default_rng(0).standard_normal(KEPT + 8)
    shape = (2, KEPT + 8)
    made = [audit(norm("n", "n [d]; affine=d", shape, weight=w))
            for w in (values, values.copy(), values[::-1].copy(), values + 1)]  # fmt: skip
    assert all(one.norms[0].parameters[0].values is None for one in made)
    same, unknown, different = (made[0].diff(other).pairs[0] for other in made[1:])
    assert same.same and same.largest_difference == 0.0
    verdicts = {part.name: part.verdict for part in unknown.parts}
    assert verdicts["values"] == "unknown" and unknown.same and unknown.largest_difference is None
    assert (
        differing(different) == ["values"]
        and "apart by 1 or more" in different.different[0].sentences[0]
    )


def test_shapes_of_parameters():
    a = audit(norm("n", "n (g=2 [c]) h w; affine=g", SHAPES[4], weight=np.ones(2)))
    b = audit(norm("n", "n (g=2 [c]) h w; affine=g c", SHAPES[4], weight=np.ones(8)))
    pair = a.diff(b).pairs[0]
    assert differing(pair) == ["affine", "parameters"]
    assert pair.different[1].sentences == ("weight: shape (2,) against (8,).",)
    # Axes of size 1 only place the weight beside the input.
    placed = audit(
        norm("n", "n (g=2 [c]) h w; affine=g c", SHAPES[4], weight=np.ones((1, 8, 1, 1)))
    )
    assert placed.diff(b).same


def test_half_a_model():
    a, b = blocks(1), blocks(1).half()
    b = axisnorm.audit(b, torch.randn(2, 3, 8).half())
    assert differing(audited(a).diff(b).pairs[0]) == ["dtype"]


# --------------------------------------------------------------------------------------------
# Meaning, not words


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("... [d]; affine=d", (2, 3, 8)), ("b s [d]; affine=d", (4, 5, 8))),
        (("... [d]; affine=d", (2, 3, 8)), ("n [c]; affine=c", (6, 8))),
        (("b s [d]; affine=d", (2, 3, 8)), ("n [c]; affine=c", (6, 8))),
        (("n (g=1 [c]) [h w]; affine=g c", (2, 8, 4, 4)), ("n [c ...]; affine=c", (2, 8, 4, 4))),
        # Channels first, and the same image with channels last.
        (("n [c] ...; affine=c", (2, 8, 4, 6)), ("... [d]; affine=d", (2, 4, 6, 8))),
        (("... [d]; affine=d", (2, 4, 6, 8)), ("n [c] ...; affine=c", (2, 8, 4, 6))),
        (("n (g=2 [c]) [...]; affine=g c", (2, 8, 4, 6)), ("n [...] (g=2 [c]); affine=g c", (2, 4, 6, 8))),
        (("[n] c [...]; affine=c", (2, 8, 4, 6)), ("[...] c; affine=c", (2, 4, 6, 8))),
        # Rounding before the weight, and an eps that is the type's: nothing of it shows in float32.
        (("... [d]; affine=d", (2, 3, 8)), ("... [d]; affine=d; rounding=before_affine", (2, 3, 8))),
        (("... [d]; eps=none", (2, 3, 8)), (f"... [d]; eps={2.0**-23!r}", (2, 3, 8))),
    ],
)  # fmt: skip
def test_other_words_for_the_same_norm(a, b):
    found = audit(norm("n", *a)).diff(audit(norm("n", *b)))
    assert found.same, found.differences


def test_channels_last_that_share_other_elements():
    a = norm("n", "n c [...]; affine=c", (2, 8, 4, 6))
    found = audit(a).diff(audit(norm("n", "... [d]; affine=d", (2, 4, 6, 8))))
    assert differing(found.pairs[0]) == ["statistics"]
    assert any("b is read with them moved" in note for note in found.pairs[0].notes)


def test_rounding_shows_in_half_types():
    a, b = (
        norm("n", f"... [d]; affine=d{more}", dtype="float16")
        for more in ("", "; rounding=before_affine")
    )
    assert differing(audit(a).diff(audit(b)).pairs[0]) == ["constants"]
    wide = [replace(one, dtype="float32") for one in (a, b)]
    pair = audit(wide[0]).diff(audit(wide[1])).pairs[0]
    assert pair.same and "Without effect in float32: Rounding" in pair.notes[0]


def test_a_graph_does_not_train():
    text = "[n] c [...]; affine=c; statistics=running"
    trained = norm("n", text, (2, 8, 4, 4))
    graph = norm("n", f"{text}; momentum=0.01; running_correction=0", (2, 8, 4, 4))
    assert audit(trained, source="module").diff(audit(graph, source="onnx")).same
    assert audit(graph, source="onnx").diff(audit(trained, source="module")).same
    both = audit(trained, source="module").diff(audit(graph, source="module"))
    assert differing(both.pairs[0]) == ["running"]


def test_what_an_audit_does_not_know_is_not_compared():
    known = norm("n", "... [d]; affine=d; eps=1e-12", weight=np.ones(8))
    bare = replace(known, parameters=())
    pair = audit(known).diff(audit(bare)).pairs[0]
    verdicts = {part.name: part.verdict for part in pair.parts}
    assert pair.same and verdicts["values"] == "unknown" and verdicts["constants"] == "equal"
    nothing = replace(known, scheme=None)
    verdicts = {p.name: p.verdict for p in audit(known).diff(audit(nothing)).pairs[0].parts}
    assert verdicts["statistics"] == "unknown" and verdicts["values"] == "equal"
    # An eps that the input does not show agrees with any.
    from axisnorm.lens.models.findings import Finding

    open_eps = replace(known, scheme=known.scheme.replace(eps=1e-5), eps=None,
                       findings=(Finding("eps-undetermined", "note", "", ""),))  # fmt: skip
    for a, b in ((known, open_eps), (open_eps, known)):
        pair = audit(a).diff(audit(b)).pairs[0]
        assert pair.same and "not determined" in " ".join(pair.notes)


def test_norms_that_did_not_run():
    class Model(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.used, self.unused = nn.LayerNorm(8), nn.LayerNorm(8, eps=eps)

        def forward(self, x):
            return self.used(x)

    a, same, other = (audited(Model(eps)) for eps in (1e-5, 1e-5, 1e-3))
    assert a.diff(same).same
    assert differing(a.diff(other).pairs[1]) == ["statistics"]
    assert "Neither ran" in a.diff(other).differences[0]


# --------------------------------------------------------------------------------------------
# Which norm stands for which


def places(found):
    return [(pair.a.path, pair.b.path) for pair in found.pairs]


def test_batch_norms_that_an_exporter_put_into_weights_are_spoken_of():
    running = "[n] c [...]; affine=c; statistics=running"
    model = audit(norm("n", running, (2, 8, 4, 4)), source="module")
    found = model.diff(audit())
    assert not found.same and "may be there" in " ".join(found.notes)
    assert not audit(norm("n", "... [d]"), source="module").diff(audit()).notes


def test_missing_and_further_norms():
    a, b = blocks(4), blocks(4)
    named_a = nn.Sequential(*a)
    named_b = nn.Module()
    for i in (0, 1, 3):
        named_b.add_module(str(i), b[i])
    named_b.add_module("extra", nn.LayerNorm(5))
    named_b.forward = lambda x: (named_b.extra(torch.randn(2, 5)), b[3](b[1](b[0](x))))[1]
    found = audited(named_a).diff(audited(named_b))
    assert places(found) == [("0", "0"), ("1", "1"), ("3", "3")]
    assert [n.path for n in found.only_a] == ["2"] and [n.path for n in found.only_b] == ["extra"]
    assert found.differences == ("2: LayerNorm is only in a.", "extra: LayerNorm is only in b.")
    assert not found.same


@pytest.mark.parametrize("drop", range(4))
def test_numbers_that_were_given_anew(drop):
    """A removed layer moves the numbers of those behind it: values tell which are which."""
    found = audited(blocks(4)).diff(audited(blocks(4, drop=drop)))
    kept = [str(i) for i in range(4) if i != drop]
    assert found.alignment == ("order" if drop == 0 else "path" if drop == 3 else "both")
    assert [a for a, _ in places(found)] == kept and [b for _, b in places(found)] == [
        "0",
        "1",
        "2",
    ]
    assert [n.path for n in found.only_a] == [str(drop)] and all(pair.same for pair in found.pairs)


def test_without_common_paths_order_and_structure_decide():
    schemes = [
        "... [d]; affine=d",
        "... [d]; affine=d; center=false",
        "b [s d]",
        "... [d]; affine=d",
    ]
    a = audit(*[norm(f"encoder.{i}.norm", text) for i, text in enumerate(schemes)])
    b = audit(*[norm(f"node_{i}", text) for i, text in enumerate(schemes)])
    found = a.diff(b)
    assert found.same and found.alignment == "order"
    assert found.aligned == "4 pairs by execution order and structure."
    without = audit(*[norm(f"node_{i}", text) for i, text in enumerate(schemes) if i != 1])
    found = a.diff(without)
    assert [pair.a.path for pair in found.pairs] == [f"encoder.{i}.norm" for i in (0, 2, 3)]
    assert [n.path for n in found.only_a] == ["encoder.1.norm"]
    assert found.differences == ("encoder.1.norm: Norm is only in a.",)
    changed = audit(
        *[norm(f"node_{i}", text + "; eps=1e-3" * (i == 3)) for i, text in enumerate(schemes)]
    )
    assert a.diff(changed).differences[0].startswith("encoder.3.norm (node_3 in b): eps: 1e-05")


def test_nothing_in_common():
    found = audit(norm("a", "[n] c [...]; affine=c", (2, 5, 4, 4))).diff(
        audit(norm("b", "... [d]; affine=d", (2, 3, 8)))
    )
    assert not found.pairs and found.alignment == "none" and not found.same
    assert "anything in common" in found.aligned
    empty = audit().diff(audit())
    assert empty.same and not empty.differences


def test_paths_of_an_exporter_are_those_of_modules():
    a = audit(*[norm(f"encoder.layer.{i}.output.LayerNorm", "... [d]; affine=d") for i in range(3)])
    names = [f"/encoder/layer.{i}/output/LayerNorm/LayerNormalization" for i in (0, 2, 1)]
    found = a.diff(audit(*[norm(name, "... [d]; affine=d") for name in names]))
    assert found.alignment == "path" and found.same
    assert [pair.b.path for pair in found.pairs] == [names[0], names[2], names[1]]
    assert found.notes == ("The pairs run in another order in b than in a.",)


def test_what_paths_leave_over_is_paired_between_its_neighbours():
    text = "... [d]; affine=d"
    a = audit(*[norm(path, text) for path in ("first", "norm1", "middle", "last")])
    b = audit(*[norm(path, text) for path in ("first", "ln_1", "middle", "last", "head")])
    found = a.diff(b)
    assert places(found)[1] == ("norm1", "ln_1") and found.alignment == "both"
    assert found.aligned == "3 pairs by path and 1 pair by execution order and structure."
    assert [n.path for n in found.only_b] == ["head"]


def test_one_path_twice():
    """Calls of one function with other weights have one path: they are told by their order."""

    class Model(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.eps = eps

        def forward(self, x):
            x = nn.functional.layer_norm(x, (8,))
            return nn.functional.layer_norm(x, (3, 8), eps=self.eps)

    found = audited(Model(1e-5)).diff(audited(Model(1e-3)))
    assert [pair.same for pair in found.pairs] == [True, False]


def test_hundreds_of_norms_are_aligned_quickly():
    import time

    rng = np.random.default_rng(0)
    weights = rng.standard_normal((300, 8))
    a = audit(*[norm(f"a.{i}", "... [d]; affine=d", weight=w) for i, w in enumerate(weights)])
    kept = [i for i in range(300) if i % 7]
    b = audit(*[norm(f"b.{i}", "... [d]; affine=d", weight=weights[i]) for i in kept])
    begun = time.perf_counter()
    found = a.diff(b)
    assert time.perf_counter() - begun < 20
    assert places(found) == [(f"a.{i}", f"b.{i}") for i in kept]
    assert all(pair.same for pair in found.pairs) and len(found.only_a) == 300 - len(kept)


# --------------------------------------------------------------------------------------------
# Results


def test_text_and_json_and_wrong_use():
    a, b = audited(blocks(6)), audited(blocks(6, eps=1e-3))
    found = a.diff(b)
    for width in (60, 80, 120, 200):
        text = found.to_text(width=width, color=False)
        assert max(map(len, text.splitlines())) <= width
        assert "{0..5}  x6" in text and text.count("eps: 1e-05") == 1
    data = json.loads(found.to_json())
    assert data["schema"] == "axisnorm.differences/1" and not data["same"]
    assert [pair["a"]["path"] for pair in data["pairs"]] == list("012345")
    assert data["pairs"][0]["parts"]["constants"]["verdict"] == "different"
    assert "6 differ" in repr(found)
    assert "the same norms" in a.diff(a).to_text(color=False)
    with pytest.raises(ArgumentError, match=r"compared by its audit\. A Sequential came"):
        a.diff(blocks(2))
    with pytest.raises(ArgumentError, match="Figures are drawn"):
        found.figure()


def test_parameters_are_summaries():
    values = np.array([[1.0, -2.0], [4.0, 0.0]], np.float32)
    found = Parameter.of("weight", values)
    assert (found.smallest, found.largest, found.mean) == (-2.0, 4.0, 0.75)
    assert found.shape == (2, 2) and found.dtype == "float32"
    assert Parameter.of("weight", torch.from_numpy(values).double()).digest == found.digest
    assert Parameter.of("weight", values + 1e-3).digest != found.digest
    assert (
        Parameter.of("weight", np.array([-0.0])).digest
        == Parameter.of("weight", np.array([0.0])).digest
    )
    named = {
        "gamma": values,
        "beta": values,
        "moving_mean": values,
        "other": values,
        "running_var": None,
    }
    assert [one.role for one in parameters_of(named)] == ["weight", "bias", "running_mean"]
    assert [one.role for one in audited(blocks(1)).norms[0].parameters] == ["weight", "bias"]


def test_ranks_that_are_no_flattened_tokens_are_not_compared():
    """A norm of images is none of sequences, however many axes there are before them."""
    a = norm("n", "[n] c [h w]; affine=c", (2, 8, 4, 4))
    b = norm("n", "[n] c [l]; affine=c", (2, 8, 4))
    pair = audit(a).diff(audit(b)).pairs[0]
    verdicts = {part.name: part.verdict for part in pair.parts}
    assert verdicts["statistics"] == "unknown" and pair.same
    assert "do not take one another's input" in pair.parts[0].sentences[0]
