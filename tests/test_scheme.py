"""The notation: what it means, how it is written, how it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axisnorm import PRESETS, ArgumentError, Scheme
from axisnorm.scheme import as_scheme


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("...[d]", "... [d]"),
        ("n  [ c   ... ]", "n [c ...]"),
        ("n [c] [h] [w]", "n [c h w]"),
        ("n ([a b]) [c] [(d e=3)]", "n [(a b) c (d e=3)]"),
        ("(n) ([c])", "n [c]"),
        ("n (g=4 [c]) [h w];affine=g c;eps=1e-6", "n (g=4 [c]) [h w]; affine=g c; eps=1e-06"),
        ("[d]; eps=1e-5; correction=0; center=true; scale=auto", "[d]"),
        ("[d]; scale=std", "[d]"),
        ("[d]; center=False; scale=std", "[d]; center=false; scale=std"),
        ("[d]; eps=None; momentum=none", "[d]; eps=none; momentum=none"),
        ("[d]; correction=1.0; weight_offset=1", "[d]; correction=1; weight_offset=1"),
        ("[d]; correction=1234567", "[d]; correction=1234567"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    scheme = Scheme(text)
    assert str(scheme) == canonical
    assert Scheme(canonical) == scheme and hash(Scheme(canonical)) == hash(scheme)
    assert eval(repr(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "culprit", "words"),
    [
        ("n c [c w]", 5, "stands once"),
        ("n [ ] c", 2, "not be empty"),
        ("n [[c]]", 3, "never nested"),
        ("n [c [d]]", 5, "never nested"),
        ("n [(g [c])]", 6, "never nested"),
        ("n ((g) [c])", 3, "never nested"),
        ("n ([c]", 2, "must be closed"),
        ("n [c", 2, "must be closed"),
        ("n c", 3, "in brackets"),
        ("", 0, "in brackets"),
        ("n () [c]", 2, "not be empty"),
        ("a=4 [b]", 1, "in parentheses"),
        ("(a=x) [b]", 3, "whole number"),
        ("(... [c])", 1, "never stands in parentheses"),
        ("... ... [c]", 4, "stands once"),
        ("n $ [c]", 2, "named by words"),
        ("[n]]", 3, "An axis is a name"),
        ("n [c]; esp=3", 7, "key=value"),
        ("n [c]; eps", 7, "key=value"),
        ("n [c]; eps=1; eps=1", 14, "each once"),
        ("n [c]; center=maybe", 7, "not a value"),
        ("n [c]; eps=tiny", 7, "not a value"),
    ],
)
def test_errors_point_at_their_culprit(text: str, culprit: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as error:
        Scheme(text)
    _, shown, caret, *_ = str(error.value).split("\n")
    assert shown == f"  {text}"
    assert caret == " " * (culprit + 2) + "^"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"affine": "e"}, "is none of"),
        ({"affine": "..."}, "is none of"),
        ({"affine": "d s"}, "tensor's order"),
        ({"affine": "d d"}, "tensor's order"),
        ({"eps": float("nan")}, "eps is a finite number"),
        ({"eps": float("inf")}, "eps is a finite number"),
        ({"eps": "small"}, "eps is a number"),
        ({"scale": "rms"}, "scale is one of"),
        ({"eps_placement": "outside"}, "eps_placement is one of"),
        ({"rounding": "twice"}, "rounding is one of"),
        ({"statistics": "moving"}, "statistics is one of"),
        ({"correction": None}, "correction is a number"),
        ({"eps": 10**400}, "eps is a number"),
        ({"center": "false"}, "center is True or False"),
    ],
)
def test_bad_fields(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Scheme("... [s d]", **fields)


def test_a_field_said_twice() -> None:
    with pytest.raises(ArgumentError, match="said twice"):
        Scheme("[d]; eps=1e-3", eps=1e-4)
    assert Scheme("[d]; eps=1e-3", eps=1e-3).eps == 1e-3


@pytest.mark.parametrize(
    ("scheme", "shape", "affine", "statistics", "running", "group"),
    [
        (Scheme.layer_norm((3, 4)), (2, 3, 4), (3, 4), (2,), (2,), 12),
        (Scheme.layer_norm(), (2, 3, 4), (4,), (2, 3), (2, 3), 4),
        (Scheme.batch_norm(), (2, 3, 4, 5), (3,), (3,), (3,), 40),
        (Scheme.batch_norm(), (2, 3), (3,), (3,), (3,), 2),
        (Scheme.instance_norm(), (2, 3, 4, 5), (3,), (2, 3), (3,), 20),
        (Scheme.instance_norm(), (2, 3), (3,), (2, 3), (3,), 1),
        (Scheme.group_norm(2), (3, 8, 5), (8,), (3, 2), (2,), 20),
        (Scheme("n (g=2 [c]) [...]; affine=g"), (3, 8, 5), (2,), (3, 2), (2,), 20),
        (Scheme("n (g=2 [c]) [...]; affine=c"), (3, 8, 5), (4,), (3, 2), (3, 2), 20),
        (Scheme.layer_norm_2d(), (2, 3, 4, 5), (3,), (2, 4, 5), (2, 4, 5), 3),
        (Scheme("b s (h=2 [d]); affine=h d"), (2, 3, 8), (8,), (2, 3, 2), (2,), 4),
        (Scheme("b s [d]; affine=b d"), (2, 3, 8), (2, 8), (2, 3), (2,), 8),
        (Scheme("[b] s [d]; affine=s"), (2, 3, 8), (3,), (3,), (3,), 16),
        (Scheme("[...]"), (2, 3, 8), (), (), (), 48),
        (Scheme("[...]"), (), (), (), (), 1),
        (Scheme("n [c]"), (0, 4), (), (0,), (0,), 4),
        (Scheme("n [c]"), (4, 0), (), (4,), (4,), 0),
    ],
)
def test_sizes(scheme, shape, affine, statistics, running, group) -> None:
    sizes = scheme.layout(len(shape)).sizes(shape)
    assert sizes.affine_shape == affine
    assert sizes.statistics_shape == statistics
    assert sizes.running_shape == running
    assert sizes.group_size == group


@pytest.mark.parametrize(
    ("scheme", "shape", "words"),
    [
        ("n [c]", (2,), "names 2 axes"),
        ("n [c]", (2, 3, 4), "names 2 axes"),
        ("n c [...]", (2,), "at least 2 axes"),
        ("n (g=3 [c])", (2, 8), "a multiple of 3"),
        ("n (g=2 [c=3])", (2, 8), "an axis of 6"),
        ("n (g [c])", (2, 8), "at most one size may be unknown"),
        ("n [(d=5)]", (2, 3), "an axis of 5"),
        ("n [d]; correction=3", (2, 3), "divisor n - correction"),
        ("n (g=0 [c])", (2, 8), "a multiple of 0"),
    ],
)
def test_shapes_that_do_not_fit(scheme: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Scheme(scheme).layout(len(shape)).sizes(shape)


@pytest.mark.parametrize("value", [(), (-1,), (2.0,), "4", (True,)])
def test_bad_normalized_shape(value: object) -> None:
    with pytest.raises(ArgumentError, match="normalized_shape"):
        Scheme.layer_norm(value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_bad_num_groups(value: object) -> None:
    with pytest.raises(ArgumentError, match="num_groups"):
        Scheme.group_norm(value)


def test_sizes_by_name() -> None:
    scheme = Scheme("b s (h [d])", affine="h d").with_sizes({"h": 2, "d": 3})
    assert str(scheme) == "b s (h=2 [d=3]); affine=h d"
    assert scheme.parameter_shape() == (6,)
    for sizes, words in (
        ({"x": 2}, "names axes"),
        ({"h": 4}, "Give one of them"),
        ({"b": 1.5}, "whole number"),
    ):
        with pytest.raises(ArgumentError, match=words):
            scheme.with_sizes(sizes)
    with pytest.raises(ArgumentError, match="Give sizes="):
        Scheme("n [c]", affine="c").parameter_shape()


def test_zero_has_one_sign() -> None:
    assert hash(Scheme("[d]", eps=0.0)) == hash(Scheme("[d]", eps=-0.0))
    with pytest.raises(ArgumentError, match="whole number"):
        Scheme(f"n (g={'9' * 5000} [c])")


def test_presets_round_trip() -> None:
    for name, scheme in PRESETS.items():
        assert Scheme(str(scheme)) == scheme == as_scheme(name)
    assert PRESETS["keras.layer_norm"].eps == 1e-3
    assert PRESETS["gemma.rms_norm"].weight_offset == 1
    assert PRESETS["keras.batch_norm"].running_correction == 0
    assert PRESETS["onnx18.group_norm"].affine == "g"


def test_copies_are_equal() -> None:
    scheme = Scheme.group_norm(4, eps=1e-3)
    for other in (copy.copy(scheme), copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert other == scheme and hash(other) == hash(scheme) and other.layout(3).ndim == 3


@pytest.mark.parametrize("value", [3, None, ["n", "[c]"]])
def test_not_a_scheme(value: object) -> None:
    with pytest.raises(ArgumentError, match="A scheme is"):
        as_scheme(value)


@st.composite
def notations(draw: st.DrawFn) -> tuple[str, int]:
    """Random axes in the notation, and how many axes a tensor needs for it."""
    names = iter("abcdefghijklmnop")
    axes, reduced = [], False
    for _ in range(draw(st.integers(1, 4))):
        inside = draw(st.booleans())
        reduced |= inside
        if draw(st.booleans()):
            parts = [
                f"{next(names)}"
                + (f"={draw(st.integers(1, 5))}" if i or draw(st.booleans()) else "")
                for i in range(draw(st.integers(1, 3)))
            ]
            word = f"({' '.join(parts)})"
        else:
            word = next(names)
        axes.append(f"[{word}]" if inside else word)
    if not reduced:
        axes.append(f"[{next(names)}]")
    return " ".join(axes), len(axes)


@given(notations())
def test_every_notation_round_trips(notation: tuple[str, int]) -> None:
    text, ndim = notation
    scheme = Scheme(text)
    again = Scheme(str(scheme))
    assert again == scheme and str(again) == str(scheme)
    layout = scheme.layout(ndim)
    assert layout.ndim == ndim
    assert sorted(layout.reduced + layout.kept) == list(range(len(layout.parts)))
