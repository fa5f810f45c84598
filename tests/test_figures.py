"""The figures: what is drawn is what the results say."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Polygon
from matplotlib.text import Text

import axisnorm
from axisnorm import ArgumentError, Scheme, explain
from axisnorm.lens.audit import Audit
from axisnorm.lens.family import family_of
from axisnorm.lens.identifying.identification import Candidate, Identification
from axisnorm.lens.identifying.mistakes import Mistake
from axisnorm.lens.models.findings import Finding
from axisnorm.lens.rendering import figures
from axisnorm.lens.rendering.canvas import HINTED, font_of, shown, text_width, wrapped
from axisnorm.lens.rendering.palette import FILLS
from axisnorm.lens.rendering.placing import place
from axisnorm.lens.rendering.residuals import MOST_ROWS, chart_of

ARTICLE = np.array([[1, 2, 4, 1], [6, 3, 2, 4], [2, 4, 6, 1]])


def cells(figure: Figure, prefix: str) -> dict[tuple[str, tuple[int, ...]], tuple[int, str]]:
    """Every filled element by its face and index: its group and its fill."""
    found = {}
    for patch in figure.axes[0].patches:
        words = (patch.get_gid() or "").removeprefix(f"{prefix}-").split("-")
        if not (patch.get_gid() or "").startswith(f"{prefix}-") or not words[0].isdigit():
            continue
        index = tuple(int(word) for word in words[2:] if word)
        found[words[1], index] = int(words[0]), matplotlib.colors.to_hex(patch.get_facecolor())
    return found


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def by_gid(figure: Figure, kind: type) -> dict[str, list]:
    found: dict[str, list] = {}
    for artist in figure.findobj(kind):
        if artist.get_gid():
            found.setdefault(artist.get_gid(), []).append(artist)
    return found


def colliding(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie on one another, and texts that leave the figure."""
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    page = figure.bbox
    outside = [(said, "the edge") for said, box in boxes
               if box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1]  # fmt: skip

    def over(a, b) -> bool:
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        tall = min(a.y1, b.y1) - max(a.y0, b.y0)
        return wide > 1 and tall > 0.35 * min(a.height, b.height)

    return outside + [
        (one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if over(a, b)
    ]


CASES = [
    ("b s [d]; affine=d", (2, 3, 4)),
    ("[b] s [d]; affine=s", (2, 3, 4)),
    ("n (g=2 [c]) [h w]; affine=g c", (2, 4, 2, 2)),
    ("n c [h w]; affine=c", (2, 4, 2, 2)),
    ("[n] c [...]; affine=c; statistics=running", (2, 4, 2, 2)),
    ("n [c] ...; affine=c", (2, 4, 2, 2)),
    ("n ([g=3] c) h w; affine=g c", (2, 6, 2, 2)),
    ("n [...] (g=2 [c]); affine=g c", (2, 2, 2, 4)),
    ("n [c] ...; affine=c", (2, 3, 1, 2, 2)),
    ("... [d]; center=false; scale=l2", (3, 4)),
    ("[d]", (5,)),
    ("[...]", ()),
    ("b s (h=2 [d]); affine=h d", (2, 3, 6)),
    ("a b c d [e]", (1, 2, 1, 2, 3)),
]


@pytest.mark.parametrize(("text", "shape"), CASES)
def test_each_face_shows_the_groups_of_its_elements(text, shape) -> None:
    said = explain(text, shape)
    figure = said.figure()
    assert isinstance(figure, Figure)
    pictures = {"mean": said.group_index}
    if said.scheme.affine:
        pictures["weight"] = said.affine_index
    for prefix, numbers in pictures.items():
        found = cells(figure, prefix)
        assert all(group == numbers[index] for (_, index), (group, _) in found.items())
        # What an axis does is seen on a face along which it is whole: each axis is on two of three.
        faces = {name for name, _ in found}
        assert faces == ({"front", "top", "right"} if len(shape) > 2 else {"front"})
        for axis in range(len(shape)):
            assert {index[axis] for _, index in found} == set(range(shape[axis]))
        front = Counter(group for (name, _), (group, _) in found.items() if name == "front")
        indices = [index for name, index in found if name == "front"]
        assert len(set(indices)) == len(indices) == sum(front.values())
        assert front == Counter(int(numbers[index]) for index in indices)
        if len(shape) <= 2:
            assert front == Counter(numbers.ravel().tolist())
        elif len(shape) == 3:
            # The front is the first slice, the top the first row, the right the last column.
            top = Counter(group for (name, _), (group, _) in found.items() if name == "top")
            right = Counter(group for (name, _), (group, _) in found.items() if name == "right")
            assert front == Counter(numbers[0].ravel().tolist())
            assert top == Counter(numbers[:, 0].ravel().tolist())
            assert right == Counter(numbers[:, :, -1].ravel().tolist())
    assert colliding(figure) == []


def test_the_cube_of_images_is_that_of_the_group_norm_paper() -> None:
    """Channels go across, height and width down, samples into the page."""
    figure = explain("n (g=2 [c]) [h w]", (2, 4, 2, 2)).figure()
    found = cells(figure, "mean")
    assert {index for name, index in found if name == "front"} == {
        (0, c, h, w) for c in range(4) for h in range(2) for w in range(2)
    }
    assert {index for name, index in found if name == "top"} == {
        (n, c, 0, 0) for n in range(2) for c in range(4)
    }
    assert {"(g [c]) = 2 x 2 →", "[h w] = 2 x 2 ↓", "n = 2 ↗"} <= set(texts(figure))
    patches = {patch.get_gid(): patch for patch in figure.axes[0].patches}

    def corner(gid: str) -> np.ndarray:
        return patches[gid].get_xy().min(axis=0)

    assert corner("mean-0-front-0-1-0-0")[0] > corner("mean-0-front-0-0-0-0")[0]
    assert corner("mean-0-front-0-0-0-1")[1] > corner("mean-0-front-0-0-0-0")[1]


def test_few_groups_have_a_colour_and_a_letter_each() -> None:
    said = explain("b s [d]; affine=d", (2, 3, 4))
    figure = said.figure()
    found = cells(figure, "mean")
    fills = {}
    for (name, _), (group, fill) in found.items():
        if name == "front":
            fills.setdefault(group, set()).add(fill)
    assert fills == {i: {FILLS[i]} for i in range(3)}
    # One letter a visible element, equal for equal groups: glyphs of one letter have one form.
    letters = [
        p for p in figure.axes[0].patches if (p.get_gid() or "").startswith("mean-letter-front")
    ]
    assert len(letters) == 12
    form = {}
    for glyph in letters:
        index = tuple(int(i) for i in glyph.get_gid().split("-")[3:])
        vertices = glyph.get_path().vertices
        own = np.round(vertices - vertices.mean(axis=0), 6).tobytes()
        form.setdefault(int(said.group_index[index]), set()).add(own)
    assert [len(forms) for forms in form.values()] == [1, 1, 1]
    assert len(set.union(*form.values())) == 3
    assert "One letter, one mean and variance" in texts(figure)
    assert "One letter, one weight and bias" in texts(figure)


def test_of_many_groups_one_is_filled() -> None:
    said = explain("n ([g=3] c) h w", (2, 6, 2, 2))
    assert said.num_groups == 16
    figure = said.figure()
    found = cells(figure, "mean")
    strong = {key for key, (_, fill) in found.items() if fill == "#1d4ed8"}
    assert {(name, index) for name, index in strong if name == "front"} == {
        ("front", (0, c, 0, 0)) for c in range(6) if said.group_index[0, c, 0, 0] == 0
    }
    assert all(found[key][0] == 0 for key in strong)
    letters = [
        p for p in figure.axes[0].patches if (p.get_gid() or "").startswith("mean-letter-front")
    ]
    assert len(letters) == 3
    assert "A: one mean and variance" in texts(figure)


def test_thick_edges_stand_between_groups_alone() -> None:
    figure = explain("a [b]", (3, 4)).figure()
    (lines,) = [c for c in figure.axes[0].collections if c.get_gid() == "mean-boundaries-front"]
    # The four sides, and two lines of four elements each.
    assert len(lines.get_segments()) == 4 + 2 * 4
    inner = lines.get_segments()[4:]
    assert all(abs(a[1] - b[1]) < 1e-9 for a, b in inner)


def test_large_shapes_are_a_sample_that_says_so() -> None:
    said = explain("n (g=32 [c]) [...]; affine=g c", (64, 512, 224, 224))
    figure = said.figure()
    found = cells(figure, "mean")
    assert 0 < len(found) < 150
    for (_, index), (group, _) in found.items():
        n, c = index[:2]
        assert group == n * 32 + c // 16
    assert "Dots stand for elements that are left out." in texts(figure)
    assert any((p.get_gid() or "").startswith("mean-gap-front") for p in figure.axes[0].patches)
    width, height = figure.get_size_inches()
    assert width < 14 and height < 8
    assert colliding(figure) == []


def test_many_axes_are_a_sample_too() -> None:
    axes = " ".join(f"a{i}" for i in range(18))
    figure = explain(f"{axes} [b] c", (2,) * 20).figure()
    found = cells(figure, "mean")
    assert 0 < len(found) < 80
    for (_, index), (group, _) in found.items():
        digits = [*index[:18], index[19]]
        assert group == sum(digit << (18 - i) for i, digit in enumerate(digits))
    assert colliding(figure) == []


def test_no_elements_no_picture() -> None:
    figure = explain("n [c] ...", (2, 0, 3)).figure()
    assert cells(figure, "mean") == {}
    assert "Nothing to draw: axis c has no elements." in texts(figure)


def test_numbers_of_a_tensor_stand_in_the_legend() -> None:
    figure = explain("... [d]", ARTICLE).figure()
    assert {
        "mean 2, variance 1.5",
        "mean 3.75, variance 2.1875",
        "mean 3.25, variance 3.6875",
    } <= set(texts(figure))
    found = by_gid(figure, Polygon)
    for group in range(3):
        assert matplotlib.colors.to_hex(found[f"legend-{group}"][0].get_facecolor()) == FILLS[group]


def test_the_words_of_an_explanation() -> None:
    said = explain("bert.layer_norm", (2, 3, 4))
    shown = texts(said.figure())
    assert shown[:2] == ["bert.layer_norm", "... [d]; affine=d; eps=1e-12"]
    assert "on (2, 3, 4): 6 means, each over 4 elements; weight and bias of shape (4,)" in shown
    assert set(said.formula.splitlines()) <= set(shown)
    assert "The same statistics at this shape: LayerNorm(4), InstanceNorm, GroupNorm(3)" in shown


def test_several_norms_over_one_tensor() -> None:
    shape = (2, 4, 2, 2)
    schemes = ["[n] c [h w]", "n [c h w]", "n c [h w]", "n (g=2 [c]) [h w]", "n [c] h w"]
    said = [explain(text, shape) for text in schemes]
    figure = figures.tensors(
        said, ["BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm", "LayerNorm2d"]
    )
    drawn = [cells(figure, f"norm-{i}") for i in range(5)]
    assert all(found.keys() == drawn[0].keys() for found in drawn)
    for found, one in zip(drawn, said, strict=True):
        assert all(group == one.group_index[index] for (_, index), (group, _) in found.items())
    assert colliding(figure) == []
    with pytest.raises(ArgumentError, match="one tensor"):
        figures.tensors([*said, explain("[d]", (3,))], list("abcdef"))
    with pytest.raises(ArgumentError, match="one tensor"):
        figures.tensors([], [])


# --------------------------------------------------------------------------------------------
# compare and the family


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ("bert.layer_norm", "b [s d]; affine=s d", (2, 3, 4)),
        ("n [c h w]; affine=c h w", "n (g=1 [c]) [h w]; affine=g c", (2, 4, 2, 2)),
        ("[n] c [...]; affine=c", "[n] c [...]; affine=c; statistics=running", (8, 64, 14, 14)),
        ("n [...] c; affine=c", "n (g=2 [c]) ...", (2, 4, 2, 2)),
    ],
)
def test_a_comparison_shows_both_over_one_tensor(a, b, shape) -> None:
    said = axisnorm.compare(a, b, shape)
    figure = said.figure()
    drawn = {}
    for name, side in (("a", said.a), ("b", said.b)):
        drawn[name] = cells(figure, f"{name}-mean")
        assert len(drawn[name]) > 10
        for (_, index), (group, _) in drawn[name].items():
            assert group == side.group_index[index]
        for (_, index), (group, _) in cells(figure, f"{name}-weight").items():
            assert group == side.affine_index[index]
        assert bool(cells(figure, f"{name}-weight")) == bool(side.scheme.affine)
    assert drawn["a"].keys() == drawn["b"].keys()
    shown = " ".join(texts(figure))
    for sentence in (*said.differences, *said.equalities):
        assert sentence in shown
    assert ("Not the same" in shown) != said.same
    assert ("Dots stand for elements that are left out." in texts(figure)) == (
        shape == (8, 64, 14, 14)
    )
    nodes = by_gid(figure, Polygon)
    for number, node in enumerate(said.family.nodes):
        assert f"node-{number}" in nodes
        badges = by_gid(figure, Text)
        assert (f"node-{number}-a" in badges, f"node-{number}-b" in badges) == (
            node.holds_a,
            node.holds_b,
        )
        for member in node.members:
            assert member.name in texts(figure)
    assert colliding(figure) == []


@pytest.mark.parametrize(
    "shape", [(5,), (3, 4), (2, 3, 4), (2, 4, 3, 3), (8, 64, 14, 14), (2, 3, 4, 5, 6)]
)
def test_the_family_map_has_room_for_its_texts(shape) -> None:
    family = family_of(Scheme("... [d]"), Scheme("[...]"), shape)
    figure = figures.family(family)
    assert colliding(figure) == []
    nodes = {gid: patches[0] for gid, patches in by_gid(figure, Polygon).items()}
    frames = [nodes[f"node-{i}"].get_extents() for i in range(len(family.nodes))]
    for one, other in itertools.combinations(frames, 2):
        assert not one.overlaps(other)
    lines = by_gid(figure, matplotlib.lines.Line2D)
    for edge in family.edges:
        (line,) = lines[f"edge-{edge.finer}-{edge.coarser}"]
        points = line.get_transform().transform(line.get_xydata())
        # From the lower node's upper side to the upper node's lower side, through no third node.
        assert points[0][1] == pytest.approx(frames[edge.finer].y1)
        assert points[-1][1] == pytest.approx(frames[edge.coarser].y0)
        between = np.concatenate(
            [np.linspace(p, q, 50)[1:-1] for p, q in itertools.pairwise(points)]
        )
        for number, frame in enumerate(frames):
            if number in (edge.finer, edge.coarser):
                continue
            inside = (
                (between[:, 0] > frame.x0) & (between[:, 0] < frame.x1)
                & (between[:, 1] > frame.y0) & (between[:, 1] < frame.y1)
            )  # fmt: skip
            assert not inside.any(), (edge, number)


def test_places_keep_their_distance() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(2, 9))
        sizes = [(float(w), float(h)) for w, h in rng.uniform(1, 5, (count, 2))]
        edges = [(i, j) for i, j in itertools.combinations(range(count), 2) if rng.random() < 0.4]
        found = place(sizes, edges, across=0.5, between=1.0)
        for i, j in itertools.combinations(range(count), 2):
            (xi, yi), (xj, yj) = found.nodes[i], found.nodes[j]
            apart = abs(xi - xj) >= (sizes[i][0] + sizes[j][0]) / 2 + 0.5 - 1e-9
            assert apart or abs(yi - yj) >= (sizes[i][1] + sizes[j][1]) / 2 + 1.0 - 1e-9
        for i, j in edges:
            assert found.nodes[i][1] > found.nodes[j][1]
        for (x, y), (w, h) in zip(found.nodes, sizes, strict=True):
            assert x - w / 2 >= -1e-9 and x + w / 2 <= found.width + 1e-9
            assert y - h / 2 >= -1e-9 and y + h / 2 <= found.height + 1e-9


# --------------------------------------------------------------------------------------------
# identify


def candidate(scheme: str, name: str, residual: float, fits: bool, **more) -> Candidate:
    axes = Scheme(scheme).layout(3).reduced_axes
    return Candidate(Scheme(scheme), name, axes, residual, residual / 3, 5e-5, 0, fits, **more)


BEST = candidate(
    "... [d]; scale=sqrt_std; correction=1", "one mean a token", 3e-5, True,
    mistake=Mistake("deviation-under-root", "A sample deviation stands under the root."),
    correction=Scheme("... [d]"),
)  # fmt: skip
CANDIDATES = (
    BEST,
    candidate("... [d]; eps=0", "eps 0", 4e-5, True),
    candidate("... [d]", "LayerNorm", 0.41, False),
    candidate("[b] s [d]", "a name in very many words " * 6, float("inf"), False),
    candidate("[b s d]", "one mean in all", 0.0, False),
)
IDENTIFIED = Identification(CANDIDATES, BEST, (2, 3, 4), ("float32", "float32"))


def test_the_residual_chart_marks_residuals_on_a_logarithmic_axis() -> None:
    figure = IDENTIFIED.figure()
    lines, bands = by_gid(figure, matplotlib.lines.Line2D), by_gid(figure, Polygon)
    at = [lines[f"residual-{i}"][0].get_xdata()[0] for i in range(5)]
    assert [lines[f"residual-{i}"][0].get_marker() for i in range(5)] == ["*", "o", "x", "x", "x"]
    ticks = {
        t.get_text(): t.get_position()[0]
        for t in figure.axes[0].texts
        if t.get_text().startswith("1e")
    }
    decade = (ticks["1e0"] - ticks["1e-5"]) / 5
    for x, said in zip(at[:3], CANDIDATES, strict=False):
        assert x == pytest.approx(ticks["1e0"] + decade * np.log10(said.residual))
    assert at[3] == max(at) and at[4] == min(at)
    end = bands["tolerance-0"][0].get_xy()[:, 0].max()
    assert end == pytest.approx(ticks["1e0"] + decade * np.log10(5e-5))
    shown = texts(figure)
    assert "best  3e-05  ! deviation-under-root" in shown
    assert "It should have been: ... [d]" in shown
    assert "not finite" in shown
    assert colliding(figure) == []


def test_values_stay_inside_and_off_the_bands() -> None:
    """Beside a long band the name of a mistake left the figure, or stood half on the band."""
    mistake = Mistake("deviation-under-root", "A sample deviation stands under the root.")
    for powers in itertools.product((-7, -4, -1, 1), repeat=2):
        residuals = [10.0 ** powers[0], 10.0 ** ((powers[0] + powers[1]) / 2), 1e-3, 1e-8, 10.0]
        shown = tuple(
            replace(candidate("... [d]", f"c{i}", residual, residual <= 10.0 ** powers[1]),
                    tolerance=10.0 ** powers[1], mistake=mistake)
            for i, residual in enumerate(residuals)
        )  # fmt: skip
        figure = Identification(shown, shown[0], (2, 3, 4)).figure()
        assert colliding(figure) == [], powers
        figure.draw_without_rendering()
        bands, values = by_gid(figure, Polygon), by_gid(figure, Text)
        for i in range(len(shown)):
            if shown[i].residual > shown[i].tolerance:
                continue
            band = bands[f"tolerance-{i}"][0].get_window_extent()
            assert values[f"value-{i}"][0].get_window_extent().x0 > band.x1, (powers, i)


def test_a_parameter_that_there_is_not_is_not_named() -> None:
    for module, said, title in (
        (torch.nn.LayerNorm(4), "weight and bias of shape (4,)", "One letter, one weight and bias"),
        (torch.nn.LayerNorm(4, bias=False), "weight of shape (4,)", "One letter, one weight"),
        (torch.nn.RMSNorm(4), "weight of shape (4,)", "One letter, one weight"),
    ):
        shown = texts(explain(module, (2, 3, 4)).figure())
        assert any(text.endswith(f"; {said}") for text in shown) and title in shown


def test_nothing_identified_is_drawn_without_a_best() -> None:
    figure = Identification(CANDIDATES[2:], None, reason="Statistics not identifiable.").figure()
    assert "Not identified" in texts(figure) and "Statistics not identifiable." in texts(figure)
    assert "*" not in [line.get_marker() for line in figure.axes[0].lines]
    empty = Identification((), None, reason="Nothing to hold against.").figure()
    assert "Nothing to hold against." in texts(empty)


def test_a_chart_shows_the_best_candidates_and_counts_the_others() -> None:
    many = tuple(
        candidate("... [d]", f"c{i}", 10.0 ** (i - 9), False) for i in range(MOST_ROWS + 4)
    )
    chart = chart_of(Identification(many, None))
    assert chart.candidates == many[:MOST_ROWS] and chart.left_out == 4
    assert chart.place(0.0) == 0.0 and chart.place(float("inf")) == 1.0
    assert chart.place(10.0**chart.low) == 0.0 and chart.place(10.0**chart.high) == 1.0
    assert all(0 < chart.place(c.residual) < 1 for c in chart.candidates)
    assert len(chart.ticks) <= 10
    assert "4 further candidates left out." in " ".join(texts(Identification(many, None).figure()))
    alone = chart_of(Identification((candidate("[d] a b", "zero", 0.0, True),), None))
    assert alone.low < alone.high


# --------------------------------------------------------------------------------------------
# audit


@pytest.fixture(scope="module")
def audited() -> Audit:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.BatchNorm2d(8, 4, track_running_stats=False), torch.nn.ReLU(),
        torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Flatten(2), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.LayerNorm(16),
    )  # fmt: skip
    return axisnorm.audit(model.eval(), torch.randn(2, 8, 4, 4))


def test_an_audit_is_a_strip_of_its_norms(audited) -> None:
    figure = audited.figure()
    shown = texts(figure)
    assert f"Sequential: {len(audited.norms)} normalizations" in shown
    assert {"BatchNorm2d", "GroupNorm", "LayerNorm", "{5,7}  x2"} <= set(shown)
    for norm in audited.norms:
        assert str(norm.scheme) in shown and norm.in_words in shown
    assert "✗ implausible-eps" in shown and "! batch-statistics-in-eval" in shown
    shares = [audited.norms[0].time_share, audited.norms[1].time_share,
              audited.norms[2].time_share + audited.norms[3].time_share]  # fmt: skip
    bars = by_gid(figure, Polygon)
    widths = [np.ptp(bars[f"share-{i}"][0].get_xy()[:, 0]) for i in range(3)]
    np.testing.assert_allclose(
        np.array(widths) / max(widths), np.array(shares) / max(shares), atol=1e-6
    )
    said = by_gid(figure, Text)
    assert [said[f"share-text-{i}"][0].get_text() for i in range(3)] == [
        f"{100 * s:.1f} %" for s in shares
    ]
    assert colliding(figure) == []


def test_a_large_audit_keeps_what_takes_the_most_time(audited) -> None:
    norms = tuple(
        replace(audited.norms[1], path=f"block{'x' * i}", time_share=0.001 * (i % 7 + 1))
        for i in range(60)
    )
    figure = replace(audited, norms=norms, findings=()).figure()
    kept = {int(gid.split("-")[1]) for gid in by_gid(figure, Polygon) if gid.startswith("share-")}
    assert len(kept) == figures.MOST_ROWS == 40
    least = min(norms[i].time_share for i in kept)
    assert all(norms[i].time_share <= least for i in range(60) if i not in kept)
    assert "20 kinds of norms that take less time left out." in texts(figure)
    assert colliding(figure) == []


def test_hostile_names_are_drawn_as_they_are(audited, tmp_path) -> None:
    name = "$\\frac{a}{$</svg><script>漢字\n\x00"
    norms = tuple(replace(norm, path=name, cls=name) for norm in audited.norms)
    figure = replace(audited, model=name, norms=norms,
                     findings=(Finding("class-name-lies", "warning", name, name, name),)).figure()  # fmt: skip
    figure.draw_without_rendering()
    drawn = "$\\frac{a}{$</svg><script>????"
    assert any(drawn in text for text in texts(figure))
    assert colliding(figure) == []
    figures.save(figure, tmp_path / "hostile.svg")
    root = ElementTree.fromstring((tmp_path / "hostile.svg").read_text())
    assert root.get("aria-label") == f"{drawn}: 4 normalizations"
    assert root.find(".//{*}script") is None


# --------------------------------------------------------------------------------------------
# Texts and files


def test_texts_are_measured_as_they_are_drawn() -> None:
    for said in ("mean", "n (g=32 [c]) [...]", "WWW iii", "[h w] = 5 x 7 ↓"):
        for font in (font_of(9.5), font_of(13, bold=True), font_of(8, mono=True)):
            with matplotlib.rc_context({"text.hinting": "no_hinting"}):
                text = Figure(dpi=300).text(0, 0, said, fontproperties=font, parse_math=False)
                width = text.get_window_extent().width / 300
            assert text_width(said, font) / HINTED == pytest.approx(width, abs=0.01)
    lines = list(
        wrapped(
            "a long sentence of words and averyveryverylongwordwithoutanyspace", font_of(10), 1.0
        )
    )
    assert len(lines) > 5
    assert all(text_width(line, font_of(10)) <= 1.0 for line in lines)
    assert (
        " ".join(lines).replace(" ", "")
        == "alongsentenceofwordsandaveryveryverylongwordwithoutanyspace"
    )
    assert shown("ab\u6f22\n", font_of(9)) == "ab??"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_files_are_the_same_each_time_whatever_the_reader_has_set(tmp_path, suffix) -> None:
    said = explain("b s [d]; affine=d", ARTICLE[None])
    said.save_figure(tmp_path / f"one.{suffix}")
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "serif", "text.color": "red",
                                "axes.facecolor": "black", "savefig.facecolor": "black", "figure.dpi": 30,
                                "savefig.dpi": 33, "svg.hashsalt": "other", "lines.linewidth": 9}):  # fmt: skip
        said.save_figure(tmp_path / f"two.{suffix}")
    one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert one.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        assert b"<dc:date>" not in one and b"mean-0-front-0-0-0" in one


def test_other_files_and_results_are_refused(tmp_path) -> None:
    figure = explain("[d]", (3,)).figure()
    with pytest.raises(ArgumentError, match="suffix"):
        figures.save(figure, tmp_path / "figure.pdf")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match="to_text"):
        figures.figure(object())


def test_figures_touch_no_pyplot_and_no_torch() -> None:
    code = (
        "import sys, axisnorm, warnings\nwarnings.simplefilter('error')\n"
        "figure = axisnorm.explain('b s [d]; affine=d', (2, 3, 4)).figure()\n"
        "axisnorm.compare('... [d]', 'b [s d]', (2, 3, 4)).figure()\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "print([name for name in ('matplotlib.pyplot', 'torch') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"
    plain = "import sys, axisnorm\naxisnorm.explain('[d]', (3,)).to_json()\nprint('matplotlib' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", plain], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == "False"


def test_without_matplotlib_the_extra_is_named(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("rendering.figures", "rendering.cube", "rendering.canvas"):
        monkeypatch.delitem(sys.modules, f"axisnorm.lens.{name}", raising=False)
        monkeypatch.delattr(f"axisnorm.lens.{name}", raising=False)
    said = explain("[d]", (3,))
    assert said.num_groups == 1
    with pytest.raises(ModuleNotFoundError, match=r"axisnorm\[lens\]"):
        said.figure()


def test_glyphs_lie_in_their_faces() -> None:
    figure = explain("b s [d]", (2, 3, 4)).figure()
    cells_by_place = {}
    for patch in figure.axes[0].patches:
        words = (patch.get_gid() or "").split("-")
        if words[0] == "mean" and words[1].isdigit():
            cells_by_place["-".join(words[2:])] = patch
    glyphs = [
        p for p in figure.findobj(PathPatch) if (p.get_gid() or "").startswith("mean-letter-")
    ]
    assert len(glyphs) == len(cells_by_place) == 12 + 8 + 6
    for glyph in glyphs:
        corners = cells_by_place[glyph.get_gid().removeprefix("mean-letter-")].get_path()
        assert corners.contains_points(glyph.get_path().vertices).all()


# --------------------------------------------------------------------------------------------
# The gallery

DOCS = Path(__file__).parents[1] / "docs"


def test_the_gallery_is_what_its_command_draws(tmp_path) -> None:
    """After a change of the figures: python docs/gallery.py"""
    stored = {path.name for path in (DOCS / "gallery").iterdir()}
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    gallery.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == stored
    assert len(stored) > 15
    for name in sorted(stored):
        assert (tmp_path / name).read_bytes() == (DOCS / "gallery" / name).read_bytes(), name
    shown = re.findall(r"!\[([^\]]+)\]\(gallery/([^)]+)\)", (DOCS / "gallery.md").read_text())
    assert sorted(name for _, name in shown) == sorted(stored)


def test_gallery_files_are_images_with_a_title() -> None:
    for path in (DOCS / "gallery").iterdir():
        root = ElementTree.fromstring(path.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("role") == "img" and len(root.get("aria-label")) > 10
        assert path.stat().st_size < 400_000
