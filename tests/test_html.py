"""The pages: clicked through and walked through in a headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import SCHEMES
from playwright.sync_api import Browser, Page, sync_playwright

import axisnorm
from axisnorm import PRESETS, ArgumentError, Scheme, compare, explain
from axisnorm.lens.explain import named_norms, partition
from axisnorm.lens.identifying.identification import Candidate, Decision, Identification
from axisnorm.lens.identifying.mistakes import Mistake
from axisnorm.lens.models.differences import Differences
from axisnorm.lens.models.findings import Finding
from axisnorm.lens.models.norms import Audit
from axisnorm.lens.naming import kind_of_spread
from axisnorm.lens.presets import Presets
from axisnorm.lens.rendering import html

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
LENS = Path(html.__file__).parent
SECONDS = 20_000
"""Of patience with the browser, in milliseconds, before a test fails instead of waiting."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for this file."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: pages are tested by clicking through them")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--headless=new"], timeout=3 * SECONDS
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test on any error of its script and any request to a network."""
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(SECONDS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            problems.append(request.url)
            if not request.url.startswith(("file:", "data:", "about:"))
            else None
        ),
    )
    yield page
    page.close()
    assert problems == []


@pytest.fixture
def opened(page: Page, tmp_path: Path):
    """Opens a result's page from a file, as a reader does."""

    def show(result) -> Page:
        path = tmp_path / "page.html"
        path.write_text(html.page(result), "utf-8")
        page.goto(path.as_uri())
        return page

    return show


@pytest.fixture
def notation(page: Page) -> Page:
    """A blank page with the script's rules for the notation."""
    page.goto("about:blank")
    page.add_script_tag(content=(LENS / "page/notation.js").read_text())
    return page


# --------------------------------------------------------------------------------------------
# The script's rules against those of Python

FITTING = [
    *((case.scheme.text, case.shape) for case in SCHEMES),
    *((scheme.text, shape) for name, scheme in PRESETS.items() if "group" not in name
      for shape in ((2, 3, 4, 5), (2, 6, 3, 2))),
    ("torch.group_norm; eps=1e-3".replace("torch.group_norm", "n (g=3 [c]) [...]; affine=g c"), (2, 6, 4)),
    ("n [...] (g=2 [c]); affine=g c; eps=1e-3", (2, 3, 4, 6)),
    ("n ([g=3] c) h w; affine=g c", (2, 6, 2, 3)),
    ("n (g=2 [c] e=3) h", (2, 12, 2)),
    ("n ([g=3] e [c=2]) h; affine=e", (2, 12, 2)),
    ("[...]", ()), ("[...]", (3,)), ("[d]", (5,)), ("[d]; correction=2", (5,)),
    ("b t [n c] h w; affine=c", (2, 2, 3, 4, 2, 2)),
    ("  b   s[d]  ;affine = d;eps= 1E-12 ", (2, 3, 4)),
    ("b [s][d]; affine=s d; momentum=none; running_correction=0", (2, 3, 4)),
    ("i [j ...]", (2, 3, 4, 2)), ("n c [...]; affine=c; statistics=running", (2, 3, 4)),
    ("n c [...]; statistics=running", (2, 3, 4)), ("n [c] ...", (2, 0, 3)),
    ("[d]; correction=0.5; eps=12345678", (7,)), ("[d]; eps=0.0001; center=TRUE; scale=std", (7,)),
    ("[d]; eps=-1e-5; weight_offset=-0.0", (7,)), ("a [(c=2)]", (3, 2)), ("a (g [c=2]); affine=g", (3, 8)),
]  # fmt: skip

DESCRIBE = """([text, shape]) => {
  const sizes = sizesOf(readScheme(text), shape);
  return {
    text: sizes.scheme.text, groups: groupIndex(sizes), affine: groupIndex(sizes, sizes.affine),
    affineShape: sizes.affineShape, statisticsShape: sizes.statisticsShape,
    groupSize: sizes.groupSize, groupCount: sizes.groupCount, formula: formula(sizes),
    partition: partition(sizes), names: sizes.names,
  };
}"""


def test_the_script_reads_and_numbers_as_python_does(notation: Page) -> None:
    assert len(FITTING) > 90
    for text, shape in FITTING:
        found = notation.evaluate(DESCRIBE, [text, list(shape)])
        said = explain(text, shape)
        where = f"{text} on {shape}"
        assert found["text"] == str(said.scheme), where
        assert found["groups"] == said.group_index.ravel().tolist(), where
        assert found["affine"] == said.affine_index.ravel().tolist(), where
        assert tuple(found["affineShape"]) == said.affine_shape, where
        assert tuple(found["statisticsShape"]) == said.statistics_shape, where
        assert (found["groupCount"], found["groupSize"]) == (said.num_groups, said.group_size), (
            where
        )
        assert "\n".join(found["formula"]) == said.formula, where
        form = partition(said.sizes, said.statistics_dimensions)
        assert json.loads(found["partition"]) == json.loads(json.dumps(form)), where


WRONG = [
    ("", (2,)), ("b s d", (2, 3, 4)), ("b [s", (2, 3)), ("b []", (2, 3)), ("b [[s]]", (2, 3)),
    ("b s] [d]", (2, 3)), ("b (c [d", (2, 3)), ("b ()", (2, 3)), ("b [()]", (2, 3)), ("b ((c) [d])", (2, 3)),
    ("b ([c] [...])", (2, 3)), ("b (2 [d])", (2, 3)), ("b s=2 [d]", (2, 3, 4)), ("b (g= [c])", (2, 3)),
    ("b (g=c [c])", (2, 3)), ("b b [d]", (2, 3, 4)), ("... ... [d]", (2, 3)), ("b, [d]", (2, 3)),
    ("b ä [d]", (2, 3, 4)), ("b 3 [d]", (2, 3, 4)), ("b [(c [d])]", (2, 3)), ("b = [d]", (2, 3)),
    ("b [d]; eps", (2, 3)), ("b [d]; eps=small", (2, 3)), ("b [d]; epsilon=1", (2, 3)),
    ("b [d]; eps=1; eps=1", (2, 3)), ("b [d]; center=no", (2, 3)), ("b [d]; scale=big", (2, 3)),
    ("b [d]; eps=nan", (2, 3)), ("b [d]; momentum=inf", (2, 3)), ("b [d]; affine=c", (2, 3)),
    ("b [...]; affine=...", (2, 3)), ("b s [d]; affine=d b", (2, 3, 4)), ("b s [d]; affine=d d", (2, 3, 4)),
    ("b [d]; toString=1", (2, 3)), ("b s [d]", (2, 3)), ("... s [d]", (2,)), ("[d]", (2, 3)),
    ("n (g=4 [c])", (2, 6)), ("n (g [c])", (2, 6)), ("n (g=2 [c=2])", (2, 6)), ("n (g=0 [c])", (2, 6)),
    ("[d]; correction=3", (3,)), ("b [d]; correction=1", (3, 1)), ("b (g=1234567890123456789 [c])", (2, 3)),
]  # fmt: skip


def test_the_script_refuses_with_the_words_of_python(notation: Page) -> None:
    for text, shape in WRONG:
        with pytest.raises(ArgumentError) as refused:
            Scheme(text).sizes(shape)
        said = notation.evaluate(
            """([text, shape]) => {
              try { sizesOf(readScheme(text), shape); } catch (error) {
                return error instanceof ArgumentError ? error.message : `not refused: ${error}`;
              }
              return "not refused";
            }""",
            [text, list(shape)],
        )
        assert said == str(refused.value), text


def test_the_script_writes_numbers_as_python_does(notation: Page) -> None:
    rng = np.random.default_rng(0)
    numbers = [0.0, 1.0, -1.5, 1e-5, 1e-4, 123456.0, 1234567.0, 1e15, 1e16, 1e22, 0.1 + 0.2, 5e-324,
               *(rng.normal(size=200) * 10.0 ** rng.integers(-12, 20, 200)).tolist()]  # fmt: skip
    for value in numbers:
        assert notation.evaluate("general", value) == f"{value:g}"
        assert notation.evaluate("represented", value) == repr(value).removesuffix(".0")


def test_the_named_norms_are_those_of_python(notation: Page) -> None:
    for shape in [(5,), (2, 6), (2, 6, 4), (2, 12, 3, 3), (1, 2, 3, 4, 5)]:
        found = notation.evaluate("shape => namedNorms(shape)", list(shape))
        known = {name: str(scheme) for name, scheme in named_norms(shape)}
        picture = {"batch norm of the picture for text": "[b] s [d]; affine=s"}
        assert len(found) >= len(shape)
        for norm in found:
            assert norm["text"] == (known | picture)[norm["name"]], norm


# --------------------------------------------------------------------------------------------
# The page of an explanation

X = np.random.default_rng(0).normal(size=(2, 3, 4)).round(2)
TEXT = "b s [d]; affine=d"


def drawn(page: Page, root: str = "#tensor") -> list[tuple[tuple[int, ...], int, bool]]:
    """Every drawn element, in the box and in the slices: its index, its group, whether it is lit."""
    found = page.eval_on_selector_all(
        f"{root} [data-index]",
        "cells => cells.map(c => [c.dataset.index, Number(c.dataset.group), c.classList.contains('on')])",
    )
    return [
        (tuple(int(i) for i in index.split(",") if i), group, lit) for index, group, lit in found
    ]


def cell(page: Page, index: tuple[int, ...], root: str = "#tensor"):
    return page.locator(f'{root} td.cell[data-index="{",".join(map(str, index))}"]')


def info(page: Page) -> dict[str, str]:
    names = page.locator("#info dt").all_inner_texts()
    return dict(zip(names, page.locator("#info dd").all_inner_texts(), strict=True))


@pytest.mark.parametrize(
    ("text", "shape"),
    [(TEXT, (2, 3, 4)), ("n (g=2 [c]) [h w]; affine=g c", (2, 4, 2, 2)), ("[d]", (5,)), ("a [b]", (3, 4)),
     ("[...]", ()), ("n [c] ...; affine=c", (2, 3, 2, 3, 4)), ("n ([g=3] c) h w; affine=g c", (2, 6, 2, 3)),
     ("n (g=32 [c]) [...]; affine=g c", (64, 512, 24, 24)), ("b t [n c] h w; affine=c", (2, 2, 3, 4, 2, 2))],
)  # fmt: skip
def test_every_drawn_element_has_its_group(opened, text, shape) -> None:
    said = explain(text, shape)
    page = opened(said)
    elements = drawn(page)
    assert all(group == said.group_index[index] for index, group, _ in elements)
    # Slices of small tensors are whole, large ones are a sample that a page can show.
    if said.group_index.size <= 48:
        assert {index for index, _, _ in elements} == set(np.ndindex(shape))
    assert 0 < page.locator("td.cell").count() <= 200
    assert ("Dots stand for elements" in page.inner_text("#note")) == bool(
        page.locator(".box .gap, td.gap, .more").count()
    )
    if said.scheme.affine:
        page.get_by_label("their weight and bias").click()
        assert all(group == said.affine_index[index] for index, group, _ in drawn(page))


def test_one_letter_is_one_group(opened) -> None:
    page = opened(explain(TEXT, X))
    letters: dict[int, set[str]] = {}
    for group, letter in page.eval_on_selector_all(
        "td.cell", "cells => cells.map(c => [c.dataset.group, c.querySelector('b').textContent])"
    ) + page.eval_on_selector_all(
        ".letter", "all => all.map(t => [t.dataset.group, t.textContent])"
    ):
        letters.setdefault(int(group), set()).add(letter)
    assert letters == {i: {"ABCDEF"[i]} for i in range(6)}


def test_pointing_at_an_element_lights_its_group(opened) -> None:
    said = explain(TEXT, X)
    page = opened(said)
    cell(page, (1, 0, 2)).hover()
    lit = {index for index, _, on in drawn(page) if on}
    assert lit == {(1, 0, d) for d in range(4)}
    shown = info(page)
    assert shown["element"] == f"x[1, 0, 2] = {X[1, 0, 2]:g}"
    assert shown["group"] == "D, [b, s] = [1, 0], 4 of 6"
    assert shown["size"] == "4 elements"
    assert float(shown["mean"]) == pytest.approx(said.mean[1, 0], rel=1e-5)
    assert float(shown["variance"]) == pytest.approx(said.var[1, 0], rel=1e-5)
    assert shown["weight, bias"] == "weight[2], shared by 6 elements"
    page.mouse.move(5, 5)
    assert not any(on for _, _, on in drawn(page))
    # The box lights up the slices too.
    page.locator('.front polygon[data-index="0,1,1"]').hover()
    assert {index for index, _, on in drawn(page) if on} == {(0, 1, d) for d in range(4)}


def test_without_a_tensor_symbols_stand_for_numbers(opened) -> None:
    page = opened(explain("n (g=2 [c]) [h w]", (2, 4, 2, 2)))
    cell(page, (1, 3, 0, 1)).hover()
    shown = info(page)
    assert (shown["mean"], shown["variance"]) == ("mean[1, 1]", "var[1, 1]")
    assert shown["element"] == "x[1, 3, 0, 1]"


def test_the_keyboard_walks_keeps_and_lets_go(opened) -> None:
    page = opened(explain(TEXT, X))
    here = "document.activeElement.dataset.index"
    cell(page, (0, 0, 0)).focus()
    for key, at in [
        ("ArrowRight", "0,0,1"), ("ArrowDown", "0,1,1"), ("End", "0,1,3"), ("ArrowRight", "0,1,3"),
        ("PageDown", "1,1,3"), ("PageDown", "1,1,3"), ("ArrowUp", "1,0,3"), ("Home", "1,0,0"),
        ("ArrowLeft", "1,0,0"), ("ArrowUp", "1,0,0"), ("PageUp", "0,0,0"),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate(here) == at, key
        assert page.locator('td[tabindex="0"]').count() == 1
    assert page.inner_text("#status").startswith("group A, size 4 elements, mean ")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.mouse.move(5, 5)
    assert {index[:2] for index, _, on in drawn(page) if on} == {(0, 0)}
    cell(page, (0, 0, 0)).focus()
    page.keyboard.press("Escape")
    assert not any(on for _, _, on in drawn(page))
    assert page.inner_text("#status") == ""
    page.keyboard.press("ArrowRight")
    assert {index[:2] for index, _, on in drawn(page) if on} == {(0, 0)}
    page.keyboard.press("Tab")
    assert not any(on for _, _, on in drawn(page))


def test_the_tab_key_visits_what_can_be_used(opened) -> None:
    page = opened(explain(TEXT, X))
    visited = []
    for _ in range(6):
        page.keyboard.press("Tab")
        visited.append(page.evaluate(
            "(e => e.id || e.name || e.dataset.index || e.tagName)(document.activeElement)"
        ))  # fmt: skip
    assert visited == ["scheme", "shape", "reset", "norm", "word", "0,0,0"]


def test_every_named_norm_can_be_chosen(opened) -> None:
    page = opened(explain(TEXT, X))
    norms = page.eval_on_selector_all("[name=norm]", "all => all.map(radio => radio.value)")
    assert "[b] s [d]; affine=s" in norms and len(norms) == 10
    own = partition(explain(TEXT, X).sizes, (0, 1))
    for text in norms:
        page.locator(f'[name=norm][value="{text}"]').click()
        said = explain(text, X)
        assert page.input_value("#scheme") == text
        assert page.locator("[name=norm]:checked").get_attribute("value") == text
        assert all(group == said.group_index[index] for index, group, _ in drawn(page))
        assert page.inner_text("#formula") == said.formula
        assert page.inner_text("#facts").startswith(f"{said.num_groups} ")
        cell(page, (1, 2, 3)).hover()
        group = said.group_index[1, 2, 3]
        shown = info(page)
        if said.scheme.center:
            assert float(shown["mean"]) == pytest.approx(said.mean.flat[group], rel=1e-5, abs=1e-9)
            assert float(shown["variance"]) == pytest.approx(said.var.flat[group], rel=1e-5)
        else:
            assert float(shown["mean square"]) == pytest.approx(said.var.flat[group], rel=1e-5)
    page.get_by_role("button", name="As asked").click()
    same = page.locator("label.same").all_inner_texts()
    assert [name.split(" =")[0] for name in same] == [
        "LayerNorm(4)",
        "InstanceNorm",
        "GroupNorm(3)",
    ]
    assert partition(explain("n c [...]", X).sizes, (0, 1)) == own


@pytest.mark.parametrize(
    "text",
    [
        "b s [d]; correction=1",
        "b [s d]; center=false",
        "b s [d]; center=false; scale=std; correction=1",
        "b [s] d; center=false; scale=l2",
        "b s [d]; scale=l2",
        "b s (g=2 [d]); scale=var",
    ],
)
def test_numbers_are_those_of_python_for_every_kind_of_scheme(opened, text) -> None:
    for asked in (text, TEXT):
        page = opened(explain(asked, X))
        page.fill("#scheme", text)
        said = explain(text, X)
        for index in ((0, 0, 0), (1, 2, 3)):
            cell(page, index).hover()
            shown = info(page)
            group = said.group_index[index]
            spread = kind_of_spread(said.scheme)
            assert float(shown[spread]) == pytest.approx(said.var.flat[group], rel=1e-5)
            assert ("mean" in shown) == said.scheme.center
            if said.scheme.center:
                assert float(shown["mean"]) == pytest.approx(said.mean.flat[group], rel=1e-5)


def test_arrow_keys_walk_through_the_norms(opened) -> None:
    page = opened(explain("... [d]; affine=d", X))
    page.focus("[name=norm]:checked")
    visited = [page.evaluate("document.activeElement.value")]
    for _ in range(3):
        page.keyboard.press("ArrowDown")
        visited.append(page.evaluate("document.activeElement.value"))
        assert page.locator("[name=norm]:checked").get_attribute("value") == visited[-1]
        assert page.input_value("#scheme") == visited[-1]
    norms = page.eval_on_selector_all("[name=norm]", "all => all.map(radio => radio.value)")
    assert visited == norms[:4]


def test_one_group_is_worked_through(opened) -> None:
    norm = torch.nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 3.0, 4.0, 5.0]))
        norm.bias.fill_(0.5)
    x = torch.tensor([[1.0, 2.0, 4.0, 1.0], [6.0, 3.0, 2.0, 4.0]])
    said = explain(norm, x)
    page = opened(said)
    rows = page.locator("h2:has-text('One group by hand') + div tbody tr").all()
    assert len(rows) == 1 + len(said.worked.steps)
    for row, step in zip(rows[1:], said.worked.steps, strict=True):
        name, values, how = row.locator("th, td").all_inner_texts()
        assert (name, how) == (step.name, step.how)
        assert [float(v) for v in values.split(", ")] == pytest.approx(step.values, rel=1e-5)
    y = norm(x)[0, 0].item()
    assert f"-0.816494 * 2 + 0.5 = {y:.6g}" in page.inner_text("main")


def test_what_is_typed_is_drawn_and_what_is_wrong_is_pointed_at(opened) -> None:
    page = opened(explain(TEXT, X))
    page.fill("#shape", "2, 6, 2, 3")
    # The shape has four axes now, the notation names three.
    with pytest.raises(ArgumentError) as refused:
        explain(TEXT, (2, 6, 2, 3))
    assert page.inner_text("#error") == str(refused.value)
    assert page.get_attribute("#scheme", "aria-invalid") == "true"
    assert {len(index) for index, _, _ in drawn(page)} == {3}
    page.fill("#scheme", "n (g=3 [c]) [h w]; affine=g c")
    assert page.locator("#error").is_hidden()
    assert page.get_attribute("#scheme", "aria-invalid") == "false"
    said = explain("n (g=3 [c]) [h w]; affine=g c", (2, 6, 2, 3))
    assert all(group == said.group_index[index] for index, group, _ in drawn(page))
    page.fill("#scheme", "n (g=3 [c) [h w]")
    with pytest.raises(ArgumentError) as refused:
        Scheme("n (g=3 [c) [h w]")
    assert page.inner_text("#error") == str(refused.value)
    assert page.inner_text("#error").splitlines()[2].index("^") == 2 + "n (g=3 [c) [h w]".index(")")
    page.fill("#scheme", "bert.layer_norm")
    assert page.locator("#error").is_hidden()
    assert "1e-12" in page.inner_text("#formula")
    page.fill("#scheme", "bert.layernorm")
    assert "There is no such preset as 'bert.layernorm'." in page.inner_text("#error")
    page.fill("#scheme", "... [d]")
    page.fill("#shape", "2, b")
    assert page.inner_text("#error").startswith("A shape is a list of whole numbers. '2, b' came.")
    assert page.get_attribute("#shape", "aria-invalid") == "true"
    page.fill("#shape", "4, 0")
    assert "has no elements" in page.inner_text("#tensor")


def test_norms_may_be_typed_as_their_constructors(opened) -> None:
    page = opened(explain(TEXT, X))
    for shape, written in {
        "2, 4, 6": ("GroupNorm(2, 4)", "nn.GroupNorm( 1,4 )", "LayerNorm(6)", "LayerNorm((4, 6))",
                    "torch.nn.BatchNorm1d(4)", "RMSNorm(6)"),
        "2, 3, 4, 4": ("LayerNorm2d(3)", "BatchNorm2d(3)", "GroupNorm(3)"),
    }.items():  # fmt: skip
        page.fill("#shape", shape)
        for call in written:
            page.fill("#scheme", call)
            assert page.inner_text("#error") == "", call
            said = explain(call, tuple(map(int, shape.split(","))))
            assert page.inner_text("#formula") == said.formula
            assert all(group == said.group_index[index] for index, group, _ in drawn(page))
    page.fill("#scheme", "GroupNorm(5, 3)")
    assert "'GroupNorm(5, 3)' is none at this shape" in page.inner_text("#error")


def test_the_page_names_the_parameters_that_there_are(opened) -> None:
    """The formula of a LayerNorm without a bias added one."""
    for module, facts in (
        (torch.nn.LayerNorm(4, bias=False), "Weight: shape (4,)."),
        (torch.nn.LayerNorm(4), "Weight and bias: shape (4,)."),
        (torch.nn.LayerNorm(4, elementwise_affine=False), "No weight, no bias."),
        (torch.nn.RMSNorm(4), "Weight: shape (4,)."),
    ):
        said = explain(module, (2, 4))
        page = opened(said)
        assert page.inner_text("#formula") == said.formula
        assert page.inner_text("#facts").endswith(facts)


def test_roles_and_names_for_a_screen_reader(opened) -> None:
    page = opened(explain(TEXT, X))
    tree = page.locator("main").aria_snapshot()
    for said in (
        'heading "b s [d]; affine=d" [level=1]',
        'combobox "Scheme": b s [d]; affine=d',
        'textbox "Shape": 2, 3, 4',
        'group "Named norms on this shape (= the same statistics)"',
        'radio "LayerNorm(4) (the same statistics)"',
        'radio "their statistics" [checked]',
        'img "The tensor as a box, s = 3, [d] = 4, b = 2"',
        'grid "b = 1"',
        f'gridcell "b 1, s 2, d 3: group F, value {X[1, 2, 3]:g}"',
        "- status",
    ):
        assert said in tree, said
    assert page.get_attribute("#status", "aria-live") == "polite"
    assert page.get_attribute("html", "lang") == "en"


def test_print_shows_the_picture_and_no_controls(opened) -> None:
    page = opened(explain(TEXT, X))
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("form").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#tensor svg").is_visible()
    assert page.locator("#formula").is_visible()
    page.emulate_media(media="screen", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 29)"
    assert page.locator("form").is_visible()


def test_a_large_tensor_is_no_wall(opened) -> None:
    page = opened(explain("torch.batch_norm", (64, 512, 224, 224)))
    for width in (400, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") < 2000
    assert "Dots stand for elements that are left out." in page.inner_text("#note")


def test_the_page_is_one_file_that_asks_for_nothing(opened) -> None:
    text = html.page(explain(TEXT, X))
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", text)
    assert not re.search(r"\b(src|href)=", text)
    assert "default-src 'none'" in text
    assert len(text) < 100_000
    opened(explain(TEXT, X))


def test_many_axes_and_many_divisors_are_no_wall_either(opened) -> None:
    axes = " ".join(f"a{i}" for i in range(18))
    text, shape = f"{axes} [b] c", (2,) * 20
    page = opened(explain(text, shape))
    assert 0 < page.locator("td.cell").count() <= 60
    elements = drawn(page)
    for index, group, _ in elements:
        digits = [*index[:18], index[19]]
        assert group == sum(digit << (18 - i) for i, digit in enumerate(digits))
    page.fill("#scheme", "n [c] ...")
    page.fill("#shape", "2, 5040, 4")
    # 60 divisors.
    assert page.locator("[name=groups] option").count() == 61
    assert page.locator(".chip [name=norm]").count() < 12
    page.focus("[name=groups]")
    page.select_option("[name=groups]", label="720 groups")
    assert page.input_value("#scheme") == "n (g=720 [c]) [...]; affine=g c"
    said = explain("n (g=720 [c]) [...]; affine=g c", (2, 5040, 4))
    assert all(group == said.group_index[index] for index, group, _ in drawn(page))
    assert page.evaluate("document.activeElement.name") == "groups"


# --------------------------------------------------------------------------------------------
# The page of a comparison


def test_what_is_pointed_at_lights_up_under_both_norms(opened) -> None:
    shape = (2, 3, 4)
    page = opened(axisnorm.compare("bert.layer_norm", "b [s d]; affine=s d", shape))
    a, b = explain("... [d]", shape), explain("b [s d]", shape)
    cell(page, (1, 2, 0), "#tensor-a").hover()
    for root, said in (("#tensor-a", a), ("#tensor-b", b)):
        elements = drawn(page, root)
        assert {index for index, _, _ in elements} == set(np.ndindex(shape))
        for index, group, lit in elements:
            assert group == said.group_index[index]
            assert lit == (group == said.group_index[1, 2, 0])
    assert info(page) == {
        "element": "x[1, 2, 0]",
        "a": "group F, [i, j] = [1, 2], 4 elements",
        "b": "group B, [b] = [1], 12 elements",
    }
    cell(page, (0, 0, 0), "#tensor-b").focus()
    assert page.inner_text("#status") == (
        "a: group A, [i, j] = [0, 0], 4 elements; b: group A, [b] = [0], 12 elements"
    )
    page.get_by_label("their weight and bias").click()
    own = {
        root: {group for _, group, _ in drawn(page, root)} for root in ("#tensor-a", "#tensor-b")
    }
    assert own == {"#tensor-a": set(range(4)), "#tensor-b": set(range(12))}


def test_a_comparison_says_what_differs_and_shows_the_family(opened) -> None:
    said = axisnorm.compare("bert.layer_norm", "n c [...]; affine=c", (2, 3, 4))
    page = opened(said)
    text = page.inner_text("main")
    assert said.differences and said.equalities
    for sentence in (*said.differences, *said.equalities, *said.notes,
                     *(a.condition for a in said.agreements),
                     *(case.sentence for case in said.family.special_cases)):  # fmt: skip
        assert sentence in text
    verdicts = page.locator("table.data").first.locator("tbody td:nth-child(2)").all_inner_texts()
    assert [v.split()[-1] for v in verdicts] == [
        said.statistics,
        said.affine,
        said.constants,
        said.running,
    ]
    nodes = page.locator(".map .node")
    assert nodes.count() == len(said.family.nodes)
    for place, node in enumerate(said.family.nodes):
        shown = nodes.nth(place).locator("text").all_text_contents()
        assert shown[0].startswith(f"{node.num_groups} mean")
        names = [member.name for member in node.members] or ["no named norm"]
        assert shown[1 : 1 + len(names)] == names
        assert sorted(shown[1 + len(names) :]) == ["a"] * node.holds_a + ["b"] * node.holds_b
    assert page.locator(".map .edge").count() == len(said.family.edges)
    rows = page.locator(".narrow tbody tr").all()
    assert len(rows) == said.example.x.size
    for row, y_a, y_b in zip(rows, said.example.y_a.flat, said.example.y_b.flat, strict=True):
        shown = [float(text) for text in row.locator("td").all_inner_texts()]
        np.testing.assert_allclose(shown[1:3], [y_a, y_b], rtol=1e-5)


def overlaps(page: Page, selector: str) -> list[str]:
    """Pairs of texts whose boxes lie on one another by more than a hair."""
    return page.evaluate(
        """selector => {
          const all = [...document.querySelectorAll(selector)].map(
            (text) => [text.textContent, text.getBoundingClientRect()]);
          const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
          return all.flatMap(([said, box], i) => all.slice(i + 1)
            .filter(([, other]) => over(box, other)).map(([other]) => `${said} | ${other}`));
        }""",
        selector,
    )


@pytest.mark.parametrize("shape", [(2, 3, 4), (8, 64, 14, 14), (2, 4, 3, 3)])
def test_texts_of_the_pictures_do_not_overlap(opened, shape) -> None:
    page = opened(axisnorm.compare("torch.layer_norm", "[n] c [...]; affine=c", shape))
    assert page.locator(".map text").count() > 8
    assert overlaps(page, ".map text") == []
    assert overlaps(page, ".box .label, .box .letter") == []
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".map .node")].flatMap((node) => {
          const frame = node.querySelector("rect").getBoundingClientRect();
          return [...node.querySelectorAll("text")].map((text) => text.getBoundingClientRect())
            .filter((box) => box.right > frame.right - 2 || box.left < frame.left + 2);
        }).length"""
    )
    assert outside == 0


# --------------------------------------------------------------------------------------------
# The page of an identification


def candidate(scheme: str, name: str, residual: float, fits: bool, **more) -> Candidate:
    axes = Scheme(scheme).layout(3).reduced_axes
    return Candidate(
        Scheme(scheme), name, axes, residual, residual / 3, 5e-5, more.pop("free", 0), fits, **more
    )


BEST = candidate(
    "... [d]; scale=sqrt_std; correction=1", "one mean a token", 3e-5, True,
    mistake=Mistake("deviation-under-root", "A sample deviation stands under the root."),
    correction=Scheme("... [d]"), eps_interval=(9.9e-6, 1.02e-5), affine_axes=(2,),
    weight=np.linspace(0.5, 1.5, 4), weight_from="fitted", free=4,
)  # fmt: skip
CANDIDATES = (
    BEST,
    candidate("... [d]; scale=sqrt_std; correction=1; eps=0", "eps 0", 4e-5, True, free=5),
    candidate("... [d]", "LayerNorm", 0.41, False, norms=("torch.layer_norm",)),
    candidate("b [s d]", "one mean a sample", 0.093, False),
    candidate("[b] s [d]", "one mean a position", float("inf"), False),
    candidate("[b s d]", "one mean in all", 0.0, False),
)
IDENTIFIED = Identification(
    CANDIDATES, BEST, (2, 3, 4), ("float32", "float32"), notes=("y has 4 decimals.",),
    decisions=(Decision((BEST.scheme, CANDIDATES[1].scheme), np.array([[0.0, 0.002]]),
                        (np.array([[-0.7, 0.7]]), np.array([[-0.9, 0.9]])), "A smaller input shows eps."),),
)  # fmt: skip


def test_an_identification_says_its_verdict_first(opened) -> None:
    page = opened(IDENTIFIED)
    text = page.inner_text("main")
    assert page.inner_text("h1") == "Identified: one mean a token"
    order = [text.index(word) for word in (
        IDENTIFIED.conclusion, "A known mistake: deviation-under-root", "It should have been ... [d].",
        "9.9e-06 to 1.02e-05", "y has 4 decimals.", str(CANDIDATES[1].scheme), "A smaller input shows eps.",
        "How far off each candidate is",
    )]  # fmt: skip
    assert order == sorted(order)
    assert "fitted along axis 2: 0.5, 0.833333, 1.16667, 1.5" in text
    # The norm is drawn on the data's shape.
    assert all(
        group == explain("... [d]", (2, 3, 4)).group_index[index]
        for index, group, _ in drawn(page, ".mini")
    )
    assert page.locator(".mini polygon.cell").count() == 26


def test_the_residual_chart_has_a_mark_at_each_residual(opened) -> None:
    page = opened(IDENTIFIED)
    marks = page.eval_on_selector_all(
        ".chart g",
        """all => all.map((g) => ({
          kind: g.getAttribute("class"), x: parseFloat(g.querySelector(".mark").getAttribute("x")),
          band: parseFloat(g.querySelector(".band").getAttribute("width")),
          name: g.querySelector(".name tspan").textContent, value: g.querySelector(".value").textContent,
        }))""",
    )
    assert [mark["name"] for mark in marks] == [c.name for c in CANDIDATES]
    assert [mark["kind"] for mark in marks] == ["best", "fits", "off", "off", "off", "off"]
    assert marks[0]["value"] == "3e-05 ! deviation-under-root"
    ticks = page.eval_on_selector_all(
        ".chart .tick",
        "all => all.map(t => [Number(t.textContent), parseFloat(t.getAttribute('x'))])",
    )
    (first, left), (last, right) = ticks[0], ticks[-1]
    scale = (right - left) / (np.log10(last) - np.log10(first))
    for mark, said in zip(marks, CANDIDATES, strict=True):
        if 0 < said.residual < np.inf:
            expected = left + scale * (np.log10(said.residual) - np.log10(first))
            assert mark["x"] == pytest.approx(expected, abs=0.02)
        assert mark["band"] == pytest.approx(
            left + scale * (np.log10(5e-5) - np.log10(first)), abs=0.02
        )
    assert marks[4]["value"] == "not finite" and marks[4]["x"] == max(mark["x"] for mark in marks)
    assert marks[5]["value"] == "0" and marks[5]["x"] == min(mark["x"] for mark in marks)
    assert overlaps(page, ".chart text") == []


def test_words_of_the_residual_chart_stay_in_it(opened) -> None:
    """On narrow screens, and beside long bands, they were cut off."""
    mistake = Mistake("deviation-under-root", "A sample deviation stands under the root.")
    for tolerance in (1e-7, 1e-5, 1e-2, 1.0):
        shown = tuple(
            replace(candidate("... [d]; scale=sqrt_std; correction=1; eps_placement=std",
                              "one root mean square for each index of axes 1, 2, 3", residual,
                              residual <= tolerance), tolerance=tolerance, mistake=mistake)
            for residual in (1e-8, 1e-6, 3e-5, 1e-3, 0.3)
        )  # fmt: skip
        page = opened(Identification(shown, shown[0], (2, 3, 4), ("float32", "float32")))
        for width in (360, 740, 1000, 1400):
            page.set_viewport_size({"width": width, "height": 800})
            cut = page.eval_on_selector_all(
                ".chart text",
                """all => all.filter((text) => {
                  const [own, chart] = [text, text.closest("svg")].map((e) => e.getBoundingClientRect());
                  return own.width && (own.left < chart.left - 1 || own.right > chart.right + 1);
                }).map((text) => text.textContent)""",
            )
            assert cut == [], (tolerance, width)


def test_candidates_are_sorted_by_their_heads(opened) -> None:
    page = opened(IDENTIFIED)
    table = page.locator("table.sortable")

    def ranks() -> list[int]:
        return [int(text) for text in table.locator("tbody td:nth-child(2)").all_inner_texts()]

    head = table.get_by_role("columnheader", name="residual")
    assert ranks() == [1, 2, 3, 4, 5, 6]
    head.get_by_role("button").click()
    # What is not finite stands last, upwards and downwards.
    assert ranks() == [6, 1, 2, 4, 3, 5]
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert ranks() == [3, 4, 2, 1, 6, 5]
    assert head.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert ranks() == [1, 2, 3, 4, 5, 6]
    assert head.get_attribute("aria-sort") is None


def test_nothing_identified_says_so(opened) -> None:
    reason = "A per-channel affine map: statistics not identifiable from this batch."
    page = opened(
        Identification(CANDIDATES[2:], None, (2, 3, 4), ("float32", "float32"), reason=reason)
    )
    assert page.inner_text("h1") == "Not identified"
    assert reason in page.inner_text("main")
    assert page.locator(".chart .best, .mini").count() == 0
    assert page.locator(".chart .off").count() == 4
    # A best of which no shape was kept is said and not drawn.
    page = opened(Identification(CANDIDATES, BEST))
    assert page.inner_text("h1") == "Identified: one mean a token"
    assert page.locator(".chart .best").count() == 1 and page.locator(".mini").count() == 0


# --------------------------------------------------------------------------------------------
# The pages of an audit, a swap and the presets


class Model(torch.nn.Module):
    """Several norms, one of them with a suspicious eps, two of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.trap = torch.nn.BatchNorm2d(8, 4, track_running_stats=False)
        self.group = torch.nn.GroupNorm(2, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.group(self.trap(self.convolution(x)).relu()).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x * 2 + 1)
        return x


@pytest.fixture(scope="module")
def audited():
    torch.manual_seed(0)
    return axisnorm.audit(Model().eval(), torch.randn(2, 3, 6, 6))


def test_an_audit_shows_findings_first_and_draws_each_way_of_sharing(opened, audited) -> None:
    page = opened(audited)
    text = page.inner_text("main")
    assert page.inner_text("h1") == "Model: 4 normalizations"
    assert page.inner_text(".lead") == "1 error, 1 warning."
    order = [
        text.index(word) for word in ("implausible-eps", "What they compute", "Norms, in the order")
    ]
    assert order == sorted(order)
    for finding in audited.findings:
        assert finding.message in text and finding.remedy in text
    rows = page.locator("#norms tbody tr")
    assert rows.count() == 3
    for place, norm in enumerate(audited.norms[:3]):
        said = explain(norm.scheme, norm.shape)
        root = f"figure:nth-child({place + 1})"
        pictured = drawn(page, f"{root} .mini")
        assert len(pictured) > 10
        assert all(group == said.group_index[index] for index, group, _ in pictured)
        assert page.inner_text(f"{root} figcaption").startswith(norm.in_words)
        assert page.locator(f"{root} .label").count() >= 2
        shown = rows.nth(place).locator("td").all_inner_texts()
        assert str(norm.scheme) in shown[1] and norm.in_words in shown[1]
        assert shown[3] == f"{norm.num_statistics:,}\nof {norm.group_size:,}"
        assert (shown[4], shown[5], shown[7]) == (f"{norm.eps:g}", "float32", "✓ yes")


def test_identical_norms_unfold_to_their_paths(opened, audited) -> None:
    row = opened(audited).locator("#norms tbody tr").nth(2)
    assert row.locator("th").inner_text().startswith("blocks.{0..1}")
    assert not row.locator("details li").first.is_visible()
    row.locator("summary").focus()
    row.page.keyboard.press("Enter")
    shares = [f"{100 * norm.time_share:.1f} %" for norm in audited.norms[2:]]
    said = row.locator("details li").all_inner_texts()
    assert said == [f"blocks.0 {shares[0]}", f"blocks.1 {shares[1]}"]


def suspicious(audited) -> Audit:
    """Findings of all severities; one norm that is not what it declares, one that did not run."""
    found = [
        Finding("implausible-eps", "error", "eps is 4.", "Give 1e-5.", "trap"),
        Finding("class-name-lies", "warning", "It is another.", "Rename it.", "group"),
        Finding("mixed-eps", "note", "Several eps.", "Check it."),
        Finding("class-name-lies", "note", "It is an RMSNorm.", "Port it.", "blocks.0"),
    ]
    first, second, third, fourth = audited.norms
    norms = (
        replace(first, findings=(found[0],)),
        replace(second, declared=Scheme("n (g=4 [c]) [...]; affine=g c"), findings=(found[1],)),
        replace(third, kind="fragment", nodes=("ReduceMean_1", "Sub_2", "Div_7")),
        replace(fourth, shape=None, calls=0, time_share=None, num_statistics=None, scheme=None),
    )
    return replace(audited, norms=norms, findings=tuple(found))


def test_findings_are_filtered_by_severity_and_code(opened, audited) -> None:
    page = opened(suspicious(audited))
    rows = page.locator("#findings tbody tr")

    def shown() -> list[str]:
        return [row.locator("td").nth(1).inner_text() for row in rows.all() if row.is_visible()]

    assert shown() == ["trap", "group", "the model", "blocks.0"]
    page.get_by_label("note (2)").focus()
    page.keyboard.press("Space")
    assert shown() == ["trap", "group"]
    status = page.locator("form[data-rows=findings] [role=status]")
    assert status.inner_text() == "2 of 4 rows shown."
    page.get_by_label("note (2)").press("Space")
    page.get_by_role("combobox").select_option("class-name-lies")
    assert shown() == ["group", "blocks.0"]
    page.get_by_label("warning (1)").uncheck(force=True)
    assert shown() == ["blocks.0"]
    page.get_by_role("combobox").select_option("all")
    page.get_by_label("warning (1)").check(force=True)
    assert len(shown()) == 4 and status.inner_text() == ""


def test_norms_are_searched(opened, audited) -> None:
    page = opened(suspicious(audited))
    rows = page.locator("#norms tbody tr")

    def shown() -> list[str]:
        return [row.locator("th code").first.inner_text() for row in rows.all() if row.is_visible()]

    assert shown() == ["trap", "group", "blocks.0", "blocks.1"]
    for words, found in [
        ("GROUPNORM", ["group"]), ("blocks layer", ["blocks.0", "blocks.1"]), ("sub_2", ["blocks.0"]),
        ("implausible", ["trap"]), ("no such norm", []), ("", ["trap", "group", "blocks.0", "blocks.1"]),
    ]:  # fmt: skip
        page.get_by_label("Search").fill(words)
        assert shown() == found, words
    page.get_by_label("Search").press("Enter")
    assert page.url.startswith("file:") and "?" not in page.url


def test_what_is_declared_stands_beside_what_is_identified(opened, audited) -> None:
    page = opened(suspicious(audited))
    versus = page.locator("#norms .versus")
    assert versus.count() == 1
    declared, identified = versus.locator("div").all()
    assert declared.inner_text() == "declared\nn (g=4 [c]) [...]; affine=g c"
    assert identified.inner_text() == "identified\nn (g=2 [c]) [...]; affine=g c"
    one, two = (part.bounding_box() for part in (declared, identified))
    assert one["y"] == two["y"] and two["x"] >= one["x"] + one["width"]
    verified = page.locator("#norms tbody td:nth-child(9)").all_inner_texts()
    assert verified == ["✓ yes", "✗ differs", "✓ yes", "? did not run"]
    page.locator("#norms tbody tr").nth(2).locator("summary").click()
    said = page.locator("#norms tbody tr").nth(2).locator("li").all_inner_texts()
    assert said == ["ReduceMean_1", "Sub_2", "Div_7"]


def test_every_column_of_an_audit_sorts(opened, audited) -> None:
    page = opened(suspicious(audited))
    heads = page.locator("#norms thead th")
    names = heads.all_inner_texts()
    assert [name.split()[0] for name in names] == ["norm", "class", "computes", "input", "statistics",
                                                  "eps", "type", "time", "verified", "findings"]  # fmt: skip
    paths = ["trap", "group", "blocks.0", "blocks.1"]
    expected = {"norm": [2, 3, 1, 0], "class": [0, 1, 2, 3], "eps": [1, 2, 3, 0],
                "verified": [3, 1, 0, 2], "findings": [0, 1, 2, 3]}  # fmt: skip
    for place in range(heads.count()):
        heads.nth(place).get_by_role("button").focus()
        page.keyboard.press("Enter")
        assert heads.nth(place).get_attribute("aria-sort") == "ascending"
        assert page.locator("#norms [aria-sort]").count() == 1
        name = names[place].split()[0]
        shown = page.locator("#norms tbody th code:first-child").all_inner_texts()
        order = [paths.index(path) for path in shown if path in paths]
        assert sorted(order) == [0, 1, 2, 3]
        assert order == expected.get(name, order), name


def test_an_audit_prints_whole(opened, audited) -> None:
    page = opened(audited)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("#norms details li").first.is_visible()
    assert not page.locator("form").first.is_visible()
    assert page.locator("#norms thead").is_visible()
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator("#norms details li").first.is_visible()


def test_an_audit_speaks_to_screen_readers(opened, audited) -> None:
    page = opened(suspicious(audited))
    for name in ("Findings", "Norms"):
        table = page.get_by_role("table", name=name)
        assert table.count() == 1
        assert table.get_by_role("columnheader").count() > 3
        assert table.get_by_role("rowheader").count() > 2
    assert page.get_by_role("img", name=re.compile("as a box")).count() == 3
    assert page.get_by_role("checkbox").count() == 3
    assert page.get_by_role("searchbox", name=re.compile("Search")).count() == 1


def test_without_a_script_an_audit_says_all(browser: Browser, tmp_path: Path, audited) -> None:
    path = tmp_path / "page.html"
    path.write_text(html.page(suspicious(audited)), "utf-8")
    page = browser.new_page(java_script_enabled=False)
    page.goto(path.as_uri())
    assert not any(form.is_visible() for form in page.locator("form").all())
    assert page.locator("#findings tbody tr").count() == 4
    assert page.locator("#norms tbody tr").count() == 4
    page.close()


def ported(audited) -> Differences:
    first, second, third, _ = audited.norms
    other = replace(second, scheme=second.scheme.replace(eps=1e-3), declared=None, eps=1e-3)
    return audited.diff(replace(audited, model="Port", norms=(first, other, third)))


def test_two_models_are_shown_norm_by_norm(opened, audited) -> None:
    result = ported(audited)
    page = opened(result)
    assert page.inner_text("h1") == "Model and Port: not the same norms"
    rows = page.locator("#pairs tbody tr")
    said = [row.locator("th, td").all_inner_texts() for row in rows.all()]
    assert [(one[0], one[1]) for one in said] == [
        ("group", "≠ different"), ("trap", "= the same"), ("blocks.0", "= the same"),
        ("blocks.1", "≠ only in a"),
    ]  # fmt: skip
    assert "eps: 1e-05 against 0.001" in said[0][4] and "eps=0.001" in said[0][3]
    assert said[3][3] == "-" and str(audited.norms[3].scheme) in said[3][2]
    page.get_by_label("the same (2)").uncheck(force=True)
    assert [row.locator("th").inner_text() for row in rows.all() if row.is_visible()] == [
        "group", "blocks.1",
    ]  # fmt: skip
    same = opened(audited.diff(audited))
    assert same.inner_text("h1") == "Model and Model: the same norms"
    assert same.locator("#pairs .bad").count() == 0


def test_an_audit_is_sorted_by_time(opened, audited) -> None:
    page = opened(audited)
    shares = [audited.norms[0].time_share, audited.norms[1].time_share,
              audited.norms[2].time_share + audited.norms[3].time_share]  # fmt: skip

    def names() -> list[str]:
        heads = page.locator("table.sortable tbody th").all_inner_texts()
        return [head.split("\n")[0] for head in heads]

    came = names()
    page.get_by_role("button", name="time").click()
    assert names() == [came[i] for i in sorted(range(3), key=lambda i: shares[i])]
    page.get_by_role("button", name="time").click()
    assert names() == [came[i] for i in sorted(range(3), key=lambda i: -shares[i])]


def test_swap_and_presets_have_pages(opened, audited) -> None:
    swap = axisnorm.swap(Model().eval(), torch.randn(2, 3, 6, 6))
    page = opened(swap)
    assert f"{len(swap.replaced)} replaced, {len(swap.left)} left" in page.inner_text("h1")
    assert swap.replaced
    for one in swap.replaced:
        assert page.get_by_role("row", name=one.path).first.inner_text().count(one.after) == 1
    page = opened(Presets(tuple(PRESETS)))
    assert page.locator("tbody tr").count() == len(PRESETS)
    with pytest.raises(ArgumentError, match="Pages are made of"):
        html.page(object())


# --------------------------------------------------------------------------------------------
# What holds for every page

STRUCK = "<img src=x onerror=window.struck=1><svg onload=window.struck=1>"
HOSTILE = f"\"'>{STRUCK}</script><script>window.struck=1</script>{STRUCK}&amp;<!--{{{{body}}}}"


def results(audited) -> dict[str, object]:
    comparison = axisnorm.compare("bert.layer_norm", "n c [...]; affine=c", (2, 3, 4))
    return {"explanation": explain(TEXT, X), "comparison": comparison, "identification": IDENTIFIED,
            "audit": suspicious(audited), "differences": ported(audited)}  # fmt: skip


def test_hostile_names_are_text(opened, audited) -> None:
    named = {
        "explanation": replace(explain(TEXT, X), subject=HOSTILE),
        "comparison": replace(
            axisnorm.compare("bert.layer_norm", "n c [...]; affine=c", (2, 3, 4)),
            a=replace(explain(TEXT, (2, 3, 4)), subject=HOSTILE), notes=(HOSTILE,),
        ),
        "identification": replace(
            IDENTIFIED, notes=(HOSTILE,), best=replace(BEST, name=HOSTILE, mistake=Mistake(HOSTILE, HOSTILE)),
            candidates=(replace(BEST, name=HOSTILE, mistake=Mistake(HOSTILE, HOSTILE)),),
        ),
        "audit": replace(
            audited, model=HOSTILE,
            norms=tuple(
                replace(norm, path=HOSTILE, cls=HOSTILE, dtype=HOSTILE, nodes=(HOSTILE, HOSTILE))
                for norm in audited.norms
            ),
            findings=(Finding(HOSTILE, "warning", HOSTILE, HOSTILE, HOSTILE),),
        ),
    }  # fmt: skip
    named["differences"] = named["audit"].diff(replace(audited, model=HOSTILE))
    for kind, result in named.items():
        page = opened(result)
        assert page.evaluate("window.struck") is None, kind
        assert page.locator("img, main script, [onerror], [onload]").count() == 0, kind
        assert HOSTILE in page.locator("body").inner_text(), kind
        assert page.locator("script").count() == 2, kind
    frame = opened(explain(TEXT, X))
    frame.set_content(html.fragment(named["audit"]))
    assert frame.evaluate("window.struck") is None
    assert frame.locator("script, img").count() == 0
    assert "\ud800" not in html.page(replace(audited, model="half a pair: \ud800"))


CONTRAST = """() => {
  const channels = (color) => {
    const numbers = color.match(/[\\d.]+(e-?\\d+)?/g).map(Number);
    return color.startsWith("color(") ? numbers.map((n, i) => (i < 3 ? n * 255 : n)) : numbers;
  };
  const luminance = ([r, g, b]) => [r, g, b].map((n) => n / 255)
    .map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4))
    .reduce((sum, n, i) => sum + n * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/rgba\\(.*, 0\\)|transparent/.test(color)) return channels(color);
    }
    return [255, 255, 255];
  };
  const poor = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (!walker.currentNode.textContent.trim() || box.width < 2 || box.height < 2) continue;
    if (element.closest("svg, script, style, datalist, :disabled, .chip:has(:disabled)")) continue;
    count += 1;
    const found = ratio(channels(style.color), behind(element));
    if (found < 4.5) poor.push(`${walker.currentNode.textContent.trim()}: ${found.toFixed(2)}`);
  }
  for (const glyph of document.querySelectorAll(".box .letter")) {
    if (getComputedStyle(glyph).display === "none") continue;
    const cell = [...glyph.closest("g").querySelectorAll("polygon.cell")]
      .find((one) => one.dataset.group === glyph.dataset.group);
    count += 1;
    const found = ratio(channels(getComputedStyle(glyph).fill), channels(getComputedStyle(cell).fill));
    if (found < 4.5) poor.push(`letter ${glyph.textContent}: ${found.toFixed(2)}`);
  }
  for (const text of document.querySelectorAll(".map text, .chart text, .box .label")) {
    const frame = text.classList.contains("badge-name") ? text.previousElementSibling
      : text.closest(".node")?.querySelector("rect");
    const under = frame ? channels(getComputedStyle(frame).fill) : behind(text.closest("div, main"));
    count += 1;
    const found = ratio(channels(getComputedStyle(text).fill), under);
    if (found < 4.5) poor.push(`${text.textContent}: ${found.toFixed(2)}`);
  }
  return [count, poor];
}"""


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize(
    "kind", ["explanation", "comparison", "identification", "audit", "differences"]
)
def test_texts_are_easy_to_read(opened, audited, kind, mode) -> None:
    page = opened(results(audited)[kind])
    page.emulate_media(color_scheme=mode)
    count, poor = page.evaluate(CONTRAST)
    assert count > 40
    assert poor == []
    cells = page.locator("td.cell")
    if cells.count():
        # With one group lit, and with more groups than colours.
        cells.nth(3).focus()
        assert page.locator("td.on").count() > 1
        assert page.evaluate(CONTRAST)[1] == []
    if kind == "explanation":
        page.fill("#scheme", "b [s] d")
        page.fill("#shape", "5, 3, 6")
        page.locator("td.cell").nth(1).focus()
        assert page.locator(".many td.on").count() > 1
        assert page.evaluate(CONTRAST)[1] == []
        page.fill("#scheme", "b [s")
        assert page.locator("#error").is_visible()
        assert page.evaluate(CONTRAST)[1] == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 29)"
    assert dark == (mode == "dark")


@pytest.mark.parametrize(
    "kind", ["explanation", "comparison", "identification", "audit", "differences"]
)
def test_narrow_screens_need_no_sideways_scrolling(opened, audited, kind) -> None:
    page = opened(results(audited)[kind])
    for width in (400, 640, 1400):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_long_names_do_not_widen_the_page(opened) -> None:
    names = [f"{word}_{'very_' * 12}long" for word in ("batch", "step", "feature")]
    text = f"{names[0]} {names[1]} [{names[2]}]; affine={names[2]}"
    for result in (explain(text, (12, 33, 400)), compare(text, "... [d]", (12, 33, 400))):
        page = opened(result)
        for width in (360, 1000):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            # The box is drawn, not only its labels.
            assert page.locator(".box svg .front").first.bounding_box()["width"] > 50


def test_a_notebook_and_its_page_do_not_meet(page: Page, audited) -> None:
    host = "<style>td { color: rgb(1, 2, 3) }</style><h1 id=scheme>Notebook</h1><table><tr><td>1</td></tr></table>"
    page.set_content(host)
    look = """() => [...document.querySelectorAll("h1, td")].map((e) => getComputedStyle(e))
        .map((s) => [s.fontSize, s.color, s.margin, s.padding].join())"""
    before = page.evaluate(look)
    page.set_content(host + html.fragment(explain(TEXT, X)))
    assert page.evaluate(look) == before
    assert explain(TEXT, X)._repr_html_() == html.fragment(explain(TEXT, X))
    frame = page.frame_locator("iframe")
    frame.locator('td.cell[data-index="1,0,2"]').hover()
    assert frame.locator("td.on").count() == 4
    assert page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert page.locator("iframe").get_attribute("title") == "axisnorm: explanation"
    assert (
        frame.locator("td.on").first.evaluate("cell => getComputedStyle(cell).color")
        == "rgb(20, 23, 29)"
    )
