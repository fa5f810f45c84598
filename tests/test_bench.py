"""Benchmarks: what is timed against what, in which order, and what is said about it. No time is
asserted."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_command_line import NO_TORCH
from test_figures import colliding

import axisnorm
from axisnorm import PRESETS, ArgumentError, DtypeError, Scheme, bench, reference
from axisnorm.lens import timing
from axisnorm.lens.bench import Benchmark
from axisnorm.lens.contenders import contenders, numpy_inputs, torch_inputs
from axisnorm.lens.explain import explained
from axisnorm.lens.meaning import Meaning
from axisnorm.lens.subject import read_subject
from axisnorm.lens.timing import Race, Spread, race, undisturbed

SHAPES = {
    "torch.group_norm": (2, 6, 4),
    "onnx18.group_norm": (2, 6, 4),
    "onnx21.group_norm": (2, 6, 4),
    "keras.group_norm": (2, 3, 64),
    "flax.group_norm": (2, 3, 64),
    "onnx13.mean_variance_norm": (4, 3, 5, 5),
}
"""Of presets that (4, 5, 6) does not fit."""

NOTATIONS = {
    "b s (h=3 [d]); affine=h d": (2, 3, 24),
    "n (g=3 [c]) [h w]; affine=g c": (2, 6, 3, 4),
    "n [...] (g=2 [c]); affine=g c": (2, 3, 3, 8),
    "[...] c; affine=c": (4, 3, 3, 5),
    "n [...] c; affine=c": (4, 3, 3, 5),
    "[n] s [d]; affine=s": (3, 4, 8),
    "b s [d]; affine=b d": (2, 3, 16),
    "... [s d]; affine=s d": (3, 5, 7),
    "[n] (g=2 c) [h w]; affine=g c; statistics=running": (4, 6, 3, 3),
    "... [d]; affine=d; scale=sqrt_std; eps=1e-3": (4, 17),
    "... [d]; affine=d; scale=var; eps=1e-2": (4, 17),
    "... [d]; affine=d; eps=0.3; eps_placement=max": (4, 17),
    "... [d]; center=false; correction=1": (4, 17),
    "b [...]; affine=b": (5,),
    "n [c] h w; affine=c": (2, 3, 2, 2),
}


def case(text):
    """A preset or a notation, with a shape that it fits."""
    if text not in PRESETS:
        return text, NOTATIONS.get(text, (4, 5, 6))
    free = [part.size for axis in PRESETS[text].parsed if len(axis) > 1 for part in axis]
    scheme = PRESETS[text].with_sizes({"g": 3}) if free == [None, None] else text
    return scheme, SHAPES.get(text, (4, 5, 6))


def prepared(subject, shape, dtype="float32", *, backward=False, channels_last=False):
    """What is timed, and with which arrays."""
    read = read_subject(subject, shape)
    explanation, meaning = explained(read, shape), Meaning.of(read, shape)
    given = torch_inputs(
        meaning, explanation, dtype, channels_last=channels_last, backward=backward
    )
    return given, contenders(meaning, explanation, dtype, given)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Blocks of one call."""
    monkeypatch.setattr(timing, "BLOCK", 0.0)


def exact(given, scheme):
    """The output in float64."""
    wide = {k: v.detach().double() for k, v in (*given.leaves.items(), *given.running.items())}
    x = wide.pop("x")
    if scheme.statistics == "batch":
        wide = {k: v for k, v in wide.items() if not k.startswith("running")}
    return reference.forward(x, scheme, **wide)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("text", [*PRESETS, *NOTATIONS])
def test_everything_that_is_timed_computes_the_scheme(text, dtype):
    """Also what is taken for today's: torch's own function or the formula."""
    subject, shape = case(text)
    scheme = read_subject(subject, shape).scheme
    given, (*norms, copy) = prepared(subject, shape, dtype)
    expected = exact(given, scheme.replace(eps=reference.resolve_eps(scheme, np.dtype("float32"))))
    largest = expected.abs().max()
    # torch rounds in the weight's place in half types; its float32 is a naive sum.
    allowed = largest * (2**-7 if dtype == "bfloat16" else 2**-18)
    assert {"axisnorm", "torch"} <= {one.name for one in norms}
    for one in norms:
        y = one.call()
        assert y.dtype == getattr(torch, dtype) and tuple(y.shape) == shape
        assert (y.double() - expected).abs().max() <= allowed, one.code
    assert (copy.name, copy.code) == ("copy", "y.copy_(x)")
    assert torch.equal(copy.call(), given.x)


@pytest.mark.parametrize(
    "text", ["torch.layer_norm", "llama.rms_norm", "gemma.rms_norm", "convnext.layer_norm_2d",
             "torch.batch_norm", "b s (h=3 [d]); affine=h d", "n [...] (g=2 [c]); affine=g c"],
)  # fmt: skip
def test_gradients_are_those_of_the_scheme(text):
    subject, shape = case(text)
    given, (*norms, copy) = prepared(subject, shape, backward=True)
    scheme = read_subject(subject, shape).scheme
    wide = [v.detach().double() for v in given.leaves.values()]
    x, parameters = wide[0], dict(zip([*given.leaves][1:], wide[1:], strict=True))
    gradients = reference.backward(given.grad.double(), x, scheme, **parameters)
    expected = [one for one in gradients if one is not None]
    for one in norms:
        found = one.call()
        assert len(found) == len(given.leaves) == len(expected)
        for actual, wanted in zip(found, expected, strict=True):
            assert (actual.double() - wanted).abs().max() <= 2**-18 * wanted.abs().max(), one.code
    assert copy.code == "y.copy_(x), dx.copy_(dy)"
    y, dx = copy.call()
    assert torch.equal(y, given.x) and torch.equal(dx, given.grad)


@pytest.mark.parametrize(
    ("subject", "shape", "codes"),
    [
        ("... [d]; affine=d", (2, 3, 4), [
            "axisnorm.normalize(x, '... [d]; affine=d', weight, bias)",
            "axisnorm.layer_norm(x, (4,), weight, bias, eps=1e-05)",
            "F.layer_norm(x, (4,), weight, bias, eps=1e-05)"]),
        ("bert.layer_norm", (2, 3, 4), [
            "axisnorm.layer_norm(x, (4,), weight, bias, eps=1e-12)",
            "F.layer_norm(x, (4,), weight, bias, eps=1e-12)"]),
        ("n (g=2 [c]) [h w]; affine=g c", (2, 4, 3, 3), [
            "axisnorm.normalize(x, 'n (g=2 [c]) [h w]; affine=g c', weight, bias)",
            "axisnorm.group_norm(x, 2, weight, bias, eps=1e-05)",
            "F.group_norm(x, 2, weight, bias, eps=1e-05)"]),
        ("n c [h w]", (2, 4, 3, 3), [
            "axisnorm.normalize(x, 'n c [h w]')",
            "axisnorm.layer_norm(x, (3, 3), None, None, eps=1e-05)",
            "F.layer_norm(x, (3, 3), None, None, eps=1e-05)"]),
        ("torch.instance_norm", (2, 4, 3), [
            "axisnorm.instance_norm(x, None, None, weight, bias, eps=1e-05)",
            "F.instance_norm(x, None, None, weight, bias, eps=1e-05)"]),
        ("torch.batch_norm", (2, 4, 3), [
            "axisnorm.batch_norm(x, running_mean, running_var, weight, bias, training=True, "
            "momentum=0.1, eps=1e-05)",
            "F.batch_norm(x, running_mean, running_var, weight, bias, training=True, "
            "momentum=0.1, eps=1e-05)"]),
        ("torch.batch_norm.eval", (2, 4, 3), [
            "axisnorm.batch_norm(x, running_mean, running_var, weight, bias, training=False, "
            "eps=1e-05)",
            "F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=1e-05)"]),
        ("keras.batch_norm", (2, 3, 4), [
            "axisnorm.normalize(x, 'keras.batch_norm', weight, bias)",
            "F.batch_norm(x.movedim(-1, 1), None, None, weight, bias, training=True, eps=0.001)"
            ".movedim(1, -1)"]),
        ("gemma.rms_norm", (2, 3, 4), [
            "axisnorm.rms_norm(x, (4,), weight, eps=1e-06, weight_offset=1.0)",
            "y = x / sqrt(meansquare[i, j] + 1e-06) * (1 + weight[d])"]),
        ("convnext.layer_norm_2d", (2, 4, 3, 3), [
            "axisnorm.layer_norm_2d(x, weight, bias, eps=1e-06)",
            "F.layer_norm(x.movedim(1, -1), (4,), weight, bias, eps=1e-06).movedim(-1, 1)"]),
        ("torch.normalize", (2, 4), [
            "axisnorm.normalize(x, 'torch.normalize')", "F.normalize(x, dim=1, eps=1e-12)"]),
        ("b s (h=2 [d]); affine=h d", (2, 3, 8), [
            "axisnorm.normalize(x, 'b s (h=2 [d]); affine=h d', weight, bias)",
            "y = (x - mean[b, s, h]) / sqrt(var[b, s, h] + 1e-05) * weight[h, d] + bias[h, d]"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_timed_against_what(subject, shape, codes):
    _, (*norms, _) = prepared(subject, shape)
    assert [one.code for one in norms] == codes
    assert norms[-1].written_out == ("movedim" in codes[-1] or codes[-1].startswith("y = "))


def test_the_code_that_is_shown_runs_and_gives_what_was_timed():
    scope = {"axisnorm": axisnorm, "F": torch.nn.functional}
    for text in ("... [d]; affine=d", "torch.batch_norm", "torch.batch_norm.eval",
                 "torch.instance_norm", "keras.batch_norm", "keras.layer_norm",
                 "gemma.rms_norm", "convnext.layer_norm_2d", "torch.normalize"):  # fmt: skip
        shape = (4, 5, 6)
        given, (*norms, _) = prepared(text, shape)
        for one in norms:
            running = {name: array.clone() for name, array in given.running.items()}
            if not one.code.startswith("y ="):
                y = eval(one.code, scope, {**given.leaves, **running})
                assert torch.equal(y, one.call()), one.code


def test_rounding_decides_only_in_half_types():
    """In float32 Llama's norm is torch's; in bfloat16 torch has no function for it."""
    subject, shape = "llama.rms_norm", (4, 8)
    assert prepared(subject, shape)[1][-2].code == "F.rms_norm(x, (8,), weight, eps=1e-06)"
    half = prepared(subject, shape, "bfloat16")[1][-2]
    assert half.written_out and half.code.startswith("y = round(")


def test_a_named_norm_is_timed_as_itself_where_others_compute_the_same():
    """Groups of one channel are instances, and one channel is a layer."""
    _, calls = prepared(PRESETS["torch.group_norm"].with_sizes({"g": 4}), (2, 4, 3, 3))
    assert calls[-2].code.startswith("F.group_norm(x, 4")
    _, calls = prepared("torch.instance_norm", (2, 1, 3, 3))
    assert calls[-2].code.startswith("F.instance_norm(")
    # In the notation: by the norm that is the same at other sizes too.
    _, calls = prepared("n c [...]; affine=c", (2, 4, 3, 3))
    assert calls[-2].code.startswith("F.instance_norm(")


def test_what_torch_refuses_is_not_taken_for_today():
    """One value a channel: torch's batch_norm and instance_norm raise."""
    for text in ("torch.batch_norm", "torch.instance_norm"):
        given, (own, today, _) = prepared(text, (1, 3, 1))
        assert "batch_norm" not in today.code and "instance_norm" not in today.code
        assert torch.equal(own.call(), given.bias.reshape(1, 3, 1))
        # What torch makes of it is some ulp of x / sqrt(eps) off.
        assert (today.call() - own.call()).abs().max() < 2**-22 * given.x.abs().max() / 1e-5**0.5


def test_each_contender_moves_running_statistics_of_its_own():
    given, (own, torchs, _) = prepared("torch.batch_norm", (8, 3, 4))
    before = {name: array.clone() for name, array in given.running.items()}
    for _ in range(3):
        own.call(), torchs.call()
    for name, array in given.running.items():
        assert torch.equal(array, before[name])
    moved = [one.call.keywords["running_mean"] for one in (own, torchs)]
    assert torch.allclose(*moved, atol=1e-6) and not torch.equal(moved[0], before["running_mean"])


def test_channels_last():
    given, _ = prepared("n (g=2 [c]) [h w]; affine=g c", (2, 4, 3, 3),
                            channels_last=True, backward=True)  # fmt: skip
    for array in (given.x, given.grad):
        assert array.is_contiguous(memory_format=torch.channels_last)
        assert not array.is_contiguous()
    given, _ = prepared("n c [...]", (2, 4, 3, 3, 2), channels_last=True)
    assert given.x.is_contiguous(memory_format=torch.channels_last_3d)
    found = bench("torch.instance_norm", (2, 4, 3, 3), channels_last=True, rounds=1)
    assert found.channels_last and "(2, 4, 3, 3), channels last" in found.to_text(width=100)


# --------------------------------------------------------------------------------------------
# The rounds


class Clock:
    """A clock that stands still but in the calls."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def call(self, name, *seconds):
        """A call of so many seconds, in turn."""
        times = iter(seconds * 10_000)

        def run():
            self.log.append(name)
            self.now += next(times)

        return run


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(timing, "_others_cpu", lambda: 0.0)


def test_rounds_are_interleaved(monkeypatch, quiet):
    monkeypatch.setattr(timing, "BLOCK", 6.0)
    clock = Clock()
    found = race({"a": clock.call("a", 3.0), "b": clock.call("b", 1.5)}, 3, clock=clock)
    warm = ["a"] * 4 + ["b"] * 4
    # Blocks of 6 s: two calls of the one, four of the other, in turn.
    assert clock.log == warm + (["a"] * 2 + ["b"] * 4) * 3
    assert found.rounds == ({"a": 3.0, "b": 1.5},) * 3 and found.noisy == 0
    assert found.seconds("a") == Spread(3.0, 3.0, 3.0)
    assert found.ratio("a", "b") == Spread(2.0, 2.0, 2.0)


def test_a_block_stays_as_long_where_calls_become_slower(monkeypatch, quiet):
    """A run on a machine that becomes busy took minutes: a block had as many calls as before."""
    monkeypatch.setattr(timing, "BLOCK", 6.0)
    clock = Clock()
    # Ten quick calls, four before the rounds and a block of six, and slow ones from then on.
    found = race({"a": clock.call("a", *[1.0] * 10, *[6.0] * 100)}, 3, clock=clock)
    assert [times["a"] for times in found.rounds] == [1.0, 6.0, 6.0]
    assert len(clock.log) == 4 + 6 + 6 + 1


def test_a_ratio_is_taken_within_a_round(quiet):
    """A machine that becomes slower and slower says the same of both."""
    slower = Race(tuple({"a": 2.0 * k, "b": 1.0 * k} for k in (1, 2, 3, 4, 5)), 0)
    assert slower.ratio("a", "b") == (2.0, 2.0, 2.0)
    assert slower.seconds("a") == (6.0, 4.0, 8.0)


def test_rounds_that_others_disturb_do_not_count(monkeypatch):
    others = iter(range(1000))
    quiet = iter([True, False, True, True, False, True] * 10)
    state = {"used": 0.0}

    def used():
        return state["used"]

    def one_round():
        number = next(others)
        if not next(quiet):
            state["used"] += 1.0
        return {"a": float(number)}

    monkeypatch.setattr(timing, "_others_cpu", used)
    found = undisturbed(one_round, 4)
    assert [times["a"] for times in found.rounds] == [0.0, 2.0, 3.0, 5.0] and found.noisy == 2


def test_where_others_always_disturb_all_rounds_count(monkeypatch):
    used = iter(range(1000))
    monkeypatch.setattr(timing, "_others_cpu", lambda: float(next(used)))
    found = undisturbed(lambda: {"a": 1.0}, 4)
    assert len(found.rounds) == found.noisy == 12
    monkeypatch.setattr(timing, "_others_cpu", lambda: 0.0)
    assert len(undisturbed(lambda: {"a": 1.0}, 1).rounds) == 1


# --------------------------------------------------------------------------------------------
# The result


@functools.cache
def measured() -> Benchmark:
    return bench("llama.rms_norm", (4, 8), dtype=("float32", "bfloat16"), backward=True, rounds=2)


def test_the_measurements():
    found = measured()
    assert [(one.dtype, one.direction) for one in found.measurements] == [
        ("float32", "forward"), ("float32", "forward and backward"),
        ("bfloat16", "forward"), ("bfloat16", "forward and backward"),
    ]  # fmt: skip
    assert (found.subject, found.shape) == ("llama.rms_norm", (4, 8))
    for one in found.measurements:
        assert [timed.name for timed in one.calls] == ["axisnorm", "torch", "copy"]
        assert one.calls[-1].copies == 1.0 and one.agree
        assert [timed.ratio is None for timed in one.calls] == [False, True, True]
        assert one.today.name == "torch" and one.ratio == one.calls[0].ratio.median
        for timed in one.calls:
            assert 0 < timed.seconds.low <= timed.seconds.median <= timed.seconds.high
        wanted = ["y"] if one.direction == "forward" else ["dx", "dweight"]
        assert list(one.differences) == wanted
    assert found.machine["torch"] == torch.__version__
    assert found.machine["threads"] == torch.get_num_threads()
    assert "float32 forward" in repr(found)


@pytest.mark.parametrize("color", [False, True])
def test_the_text(color):
    text = measured().to_text(width=90, color=color)
    assert ("\x1b" in text) == color
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "llama.rms_norm  ... [d]; affine=d; center=false; eps=1e-06" in plain
    for one in measured().measurements:
        assert f"{one.dtype}, {one.direction}\n" in re.sub(r" +\n", "\n", plain)
    assert plain.count("The results agree: y within") == 2
    assert plain.count("The results agree: dx within") == 2
    assert plain.count(" times as long as a copy of the tensor.") == 2
    assert "F.rms_norm(x, (8,), weight, eps=1e-06)   in float32" in plain
    assert "copy      y.copy_(x), dx.copy_(dy)   in forward and backward" in plain
    assert "torch has no function for this at this shape" in plain
    assert f"torch {torch.__version__}" in plain


def test_a_narrow_text_loses_no_number():
    found = bench("... [d]; affine=d", (4, 8), rounds=1)
    text = found.to_text(width=80, color=False)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "axisnorm.layer_norm, which computes the same" in " ".join(text.split())


def timed_as(found, ratio, **changes):
    one = found.measurements[0]
    first = replace(one.calls[0], ratio=Spread(*ratio), copies=123.4)
    one = replace(one, calls=(first, *one.calls[1:]), **changes)
    return replace(found, measurements=(one,))


def test_the_sentences():
    said = timed_as(measured(), (2.0, 1.5, 4.0)).measurements[0].conclusions
    assert said[0] == (
        "axisnorm is 2 times as fast as torch (1.5 to 4 in the middle half of the rounds)."
    )
    assert said[1] == "axisnorm takes 123 times as long as a copy of the tensor."
    said = timed_as(measured(), (0.5, 0.25, 0.8)).measurements[0].conclusions
    assert said[0] == (
        "torch is 2 times as fast as axisnorm (1.25 to 4 in the middle half of the rounds)."
    )
    noisy = timed_as(measured(), (2.0, 1.5, 4.0), noisy_rounds=1)
    assert "Other processes used the processor during 1 round: " in noisy.to_text(width=200)


def test_results_that_do_not_agree_are_said_so():
    for ulps in (3000.0, float("inf"), float("nan")):
        found = timed_as(measured(), (2.0, 1.5, 4.0), differences={"y": ulps})
        assert not found.measurements[0].agree
        assert "The results do not agree: y" in " ".join(found.to_text(width=90).split())
        data = json.loads(found.to_json())["measurements"][0]
        assert data["agree"] is False and data["differences"][0]["of"] == "y"
    assert timed_as(measured(), (2.0, 1.5, 4.0), differences={"y": 2800.0}).measurements[0].agree


def test_a_wrong_result_is_noticed(monkeypatch):
    """What is compared are the results of the very calls that are timed."""
    right = torch.nn.functional.layer_norm
    monkeypatch.setattr(
        torch.nn.functional, "layer_norm", lambda *args, **given: right(*args, **given) * 1.001
    )
    (one,) = bench("layer_norm", (4, 64), rounds=1).measurements
    assert not one.agree
    # 0.001 of the largest element are between 0.001 / 2^-23 and twice that many ulp.
    assert 0.0009 * 2**23 < one.differences["y"] < 0.0021 * 2**23


def test_no_kernel_is_said():
    found = bench("torch.normalize", (4, 8), rounds=1)
    assert json.loads(found.to_json())["engine"] == found.route.engine == "reference"
    assert "axisnorm has no kernel here" in found.to_text(width=200)


def test_page_and_figure(tmp_path):
    found = measured()
    page = found.to_html()
    assert page.startswith("<!doctype html>")
    for one in found.measurements:
        for sentence in one.conclusions:
            assert sentence in page
    assert page.count("<code>axisnorm.rms_norm(") == 4
    struck = replace(found, subject="<img src=x onerror=alert(1)>").to_html()
    assert "<img" not in struck and "&lt;img" in struck
    assert found._repr_html_().startswith("<iframe srcdoc=")
    figure = found.figure()
    assert colliding(figure) == []
    bars = {p.get_gid(): p.get_extents().width for p in figure.axes[0].patches if p.get_gid()}
    assert len(bars) == 12
    for place, one in enumerate(found.measurements):
        for timed in one.calls:
            shown = bars[f"time-{place}-{timed.name}"] / bars[f"time-{place}-copy"]
            assert shown == pytest.approx(
                timed.seconds.median / one.calls[-1].seconds.median, rel=1e-6
            )
    found.save_figure(tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


# --------------------------------------------------------------------------------------------
# What is given


def test_subjects():
    for subject in (
        Scheme.layer_norm(),
        "layer_norm",
        "torch.layer_norm",
        torch.nn.LayerNorm(8),
        functools.partial(torch.nn.functional.layer_norm, normalized_shape=8),
    ):
        found = bench(subject, (4, 8), rounds=1)
        assert found.measurements[0].today.code.startswith("F.layer_norm(x, (8,), ")
    bare = bench(torch.nn.LayerNorm(8, elementwise_affine=False), (4, 8), rounds=1)
    assert "None, None" in bare.measurements[0].today.code
    unbiased = bench(torch.nn.LayerNorm(8, bias=False), (4, 8), rounds=1, backward=True)
    assert "weight, None" in unbiased.measurements[0].today.code
    assert list(unbiased.measurements[1].differences) == ["dx", "dweight"]


def test_threads_are_put_back():
    before = torch.get_num_threads()
    found = bench("layer_norm", (4, 8), threads=1, rounds=1)
    assert found.machine["threads"] == 1 and torch.get_num_threads() == before
    torch.set_num_threads(2)
    try:
        assert bench("layer_norm", (4, 8), threads=1, rounds=1).machine["threads"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nothing_is_left_behind():
    assert torch.is_grad_enabled()
    state = torch.get_rng_state()
    bench("layer_norm", (4, 8), rounds=1)
    assert torch.is_grad_enabled() and torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        bench("layer_norm", (4, 8), rounds=1, backward=True)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("subject", "shape", "given", "said"),
    [
        ("b s [d]", (2, 3), {}, "names 3 axes. The input has 2"),
        ("layernorm", (2, 3), {}, "Did you mean"),
        ("... [d", (2, 3), {}, "closed"),
        ("layer_norm", (0, 3), {}, "has none. Give a larger shape"),
        ("layer_norm", (2, 3), {"rounds": 0}, "rounds is a whole number from 1"),
        ("layer_norm", (2, 3), {"rounds": 1.5}, "rounds is a whole number from 1"),
        ("layer_norm", (2, 3), {"threads": 0}, "threads is a whole number from 1"),
        ("layer_norm", (2, 3), {"threads": 10**9}, "threads is a whole number from 1"),
        ("layer_norm", (2, 3), {"channels_last": True}, "4 or 5 axes. Shape (2, 3) has 2"),
        ("layer_norm", (1 << 20, 1 << 20), {}, "tensors of the shape"),
        ("group_norm", (2, 6), {}, "at most one"),
        (3, (2, 3), {}, "bench takes a Scheme"),
    ],
)  # fmt: skip
def test_refusals(subject, shape, given, said):
    with pytest.raises(ArgumentError) as caught:
        bench(subject, shape, **given)
    assert said in str(caught.value)


def test_types():
    found = bench("layer_norm", (2, 3), dtype=torch.float64, rounds=1)
    assert [one.dtype for one in found.measurements] == ["float64"]
    found = bench("layer_norm", (2, 3), dtype=[torch.float16, "float32", "float16"], rounds=1)
    assert [one.dtype for one in found.measurements] == ["float16", "float32"]


@pytest.mark.parametrize("dtype", ["float8", "int32", (), "float32, float16", None, torch.int8])
def test_types_that_are_refused(dtype):
    with pytest.raises(DtypeError):
        bench("layer_norm", (2, 3), dtype=dtype)


def test_a_tensor_is_no_shape():
    with pytest.raises(ArgumentError, match="Give its shape"):
        bench("layer_norm", torch.ones(2, 3))


# --------------------------------------------------------------------------------------------
# Without torch


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("text", ["... [d]; affine=d", "torch.batch_norm", "torch.batch_norm.eval",
                                  "gemma.rms_norm", "timm.simple_norm", "torch.normalize",
                                  "n (g=3 [c]) [h w]; affine=g c"])  # fmt: skip
def test_numpys_formula_computes_the_scheme(text, dtype):
    subject, shape = case(text)
    read = read_subject(subject, shape)
    explanation, meaning = explained(read, shape), Meaning.of(read, shape)
    given = numpy_inputs(meaning, explanation, dtype, channels_last=False)
    *norms, copy = contenders(meaning, explanation, dtype, given)
    assert norms[-1].name == "numpy" and norms[-1].written_out
    wide = {k: v.astype(np.float64) for k, v in given.leaves.items()}
    if meaning.running:
        wide |= {k: v.astype(np.float64) for k, v in given.running.items()}
    expected, _ = reference.forward(wide.pop("x"), read.scheme, **wide)
    digits = {"float32": 2**-18, "float64": 2**-46, "float16": 2**-10}[dtype]
    for one in norms:
        y = one.call()
        assert y.dtype == dtype and y.shape == shape
        assert abs(y - expected).max() <= digits * abs(expected).max(), one.code
    assert copy.call() is None and copy.code == "numpy.copyto(y, x)"
    assert np.array_equal(copy.call.args[0], given.x)


def test_numpy_has_channels_last_too():
    read = read_subject("n c [...]", (2, 3, 4, 5))
    explanation, meaning = explained(read, (2, 3, 4, 5)), Meaning.of(read, (2, 3, 4, 5))
    given = numpy_inputs(meaning, explanation, "float32", channels_last=True)
    assert given.x.shape == (2, 3, 4, 5) and given.x.strides == (240, 4, 60, 12)


def without_torch(*arguments):
    code = f"{NO_TORCH}from axisnorm.__main__ import main; sys.exit(main({list(arguments)}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_without_torch_numpy_is_compared():
    done = without_torch("bench", "layer_norm", "8,16", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["machine"]["torch"] is None
    (one,) = data["measurements"]
    assert [timed["name"] for timed in one["calls"]] == ["axisnorm", "numpy", "copy"]
    assert one["agree"] and "as fast as " in one["conclusions"][0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--backward",), "axisnorm[torch]"),
        (("--dtype", "bfloat16"), "axisnorm[torch]"),
        (("--threads", "1"), "OMP_NUM_THREADS"),
    ],
)
def test_without_torch_what_needs_it_is_refused(more, said):
    done = without_torch("bench", "layer_norm", "8,16", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and said in done.stderr
