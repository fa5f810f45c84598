"""What an audit says in a terminal and on the command line, at every width and without colour."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import axisnorm
from axisnorm import Scheme
from axisnorm.__main__ import main
from axisnorm.lens.models.findings import Finding
from axisnorm.lens.models.norms import Audit, Norm
from axisnorm.lens.progress import step, watched
from axisnorm.lens.rendering.folding import folded, shortened, template, worst_first

WIDTHS = (60, 80, 120, 200)


def norm(path: str, scheme: str = "... [d]; affine=d", **more) -> Norm:
    shown, shape = Scheme(scheme), more.pop("shape", (8, 24, 384))
    sizes = shown.layout(len(shape)).sizes(shape)
    said = {
        "cls": "LayerNorm", "kind": "module", "declared": None, "scheme": shown,
        "identification": None, "eps": shown.eps, "shape": shape, "dtype": "float32",
        "affine_shape": sizes.affine_shape, "num_statistics": sizes.num_groups,
        "group_size": sizes.group_size, "calls": 1, "time_share": 0.01, "findings": (),
    }  # fmt: skip
    return Norm(path=path, **{**said, **more})


@pytest.fixture(scope="module")
def graph() -> Audit:
    """As of an ONNX file: fragments with node names, and names without a place to break them."""
    norms = []
    for i in range(6):
        for part in ("attention/output", "output"):
            base = f"/encoder/layer.{i}/{part}/LayerNorm/"
            nodes = tuple(base + op for op in ("ReduceMean", "Sub", "Pow", "Sqrt", "Div"))
            norms.append(norm(base + "Div", kind="fragment", nodes=nodes, time_share=None,
                              cls="LayerNormalization"))  # fmt: skip
    norms.append(norm("node_" + "x" * 90 + "_42", kind="node", cls="SkipLayerNormalization"))
    return Audit("model.onnx", tuple(norms), (), 0.0123, "onnx")


@pytest.fixture(scope="module")
def suspicious() -> Audit:
    """Fifteen findings of all severities, in no order, and a norm of every verdict."""
    severities = ("note", "error", "warning")
    findings = [
        Finding(f"code-{i}", severities[i % 3], f"It is off by {i}.", "Look there.",
                f"backbone.stages.{i % 4}.blocks.{i}.attention.output.normalization")
        for i in range(15)
    ]  # fmt: skip
    norms = [norm(found.path, findings=(found,)) for found in findings]
    norms[1] = replace(norms[1], declared=Scheme("b [s d]; affine=s d"))
    norms[2] = replace(norms[2], scheme=None, declared=Scheme("b [s d]; affine=s d"))
    norms[3] = replace(norms[3], shape=None, calls=0, time_share=None, num_statistics=None)
    return Audit("Suspicious", tuple(norms), tuple(findings), 1.234)


@pytest.mark.parametrize("width", WIDTHS)
def test_reports_keep_to_their_width(graph, suspicious, width):
    for result in (graph, suspicious):
        text = result.to_text(width=width, color=False)
        assert max(map(len, text.splitlines())) <= width
        said = re.sub(r"\s", "", text)
        assert str(len(result.norms)) in said
        for found in result.findings:
            assert re.sub(r"\s", "", found.message + found.remedy) in said
    wide = suspicious.to_text(width=width, color=False)
    assert ("float32" in wide) == (width >= 96) and ("(384,)" in wide) == (width >= 136)


def test_findings_stand_first_by_severity(suspicious):
    lines = suspicious.to_text(width=100, color=False).splitlines()
    assert lines[0].startswith("Suspicious: 15 normalizations, 5 errors, 5 warnings, 5 notes")
    found = [
        match for line in lines if (match := re.match(r"  (error|warning|note) +(code-\d+)", line))
    ]
    assert [match[1] for match in found] == ["error"] * 5 + ["warning"] * 5 + ["note"] * 5
    assert {match[2] for match in found} == {one.code for one in suspicious.findings}
    assert lines.index("Findings") < lines.index("Norms")
    # An empty line between severities, and only there.
    listed = lines[lines.index("Findings") : lines.index("Norms") - 1]
    assert listed.count("") == 2


def test_every_verdict_has_a_sign_without_colour(suspicious):
    text = suspicious.to_text(width=200, color=False)
    assert text.count("✓ one mean a token") == 12
    assert "✗ one mean a token, not what it declares" in text
    assert "declared: b [s d]; affine=s d" in text
    assert "? not verified" in text and "? did not run itself" in text


def test_no_color_is_obeyed(suspicious, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in suspicious.to_text(width=80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in suspicious.to_text(width=80)


def test_identical_norms_share_a_row_and_their_time():
    norms = tuple(norm(f"layers.{i}.norm", time_share=0.0125) for i in range(12))
    norms += (norm("head.norm", "... [d]; affine=d; eps=0.001"),)
    lines = Audit("Model", norms, (), 0.1).to_text(width=120, color=False).splitlines()
    (row,) = [line for line in lines if "layers.{0..11}.norm  x12" in line]
    assert row.endswith("15.0 %") and "4,608" not in row and " 192 " in row
    assert sum("x12" in line for line in lines) == 1


def test_node_names_are_folded_and_shortened(graph):
    text = graph.to_text(width=80, color=False)
    flat = re.sub(r"\s", "", text)
    assert "/encoder/layer.{0..5}/output/" in text and text.count("Div  x6") == 2
    assert "LayerNormalization, 5 operators" in text
    assert "x" * 90 not in flat and "…" in text
    assert template("/a/layer.3/Add_12") == "/a/layer.#/Add_#"
    assert folded([f"n_{i}" for i in (1, 3, 9, 12, 15, 20, 44)]) == "n_{1,3,..,44}"


@pytest.mark.parametrize(
    "path", ["a.b.c", "/" + "x" * 50, "a." * 30 + "end", "word" * 20, "{0..5}." * 9]
)
def test_shortened_paths_keep_their_ends(path):
    for limit in range(8, 60):
        said = shortened(path, limit)
        assert len(said) <= limit
        assert said == path if len(path) <= limit else "…" in said
        assert said[0] == path[0] and said[-1] == path[-1]


@pytest.mark.parametrize("name", ["norm", "q_norm", "layernorm", "self_attn_norm"])
def test_a_path_that_fits_into_its_lines_is_not_shortened(name):
    norms = tuple(norm(f"layers.{i}.self_attn.{name}") for i in range(2))
    result = Audit("Model", norms, (), 0.1)
    for width in range(60, 160):
        text = result.to_text(width=width, color=False)
        assert "…" not in text and "x2" in text, width
        assert "layers.{0..1}." in text and name in text, width
        assert " time\n" in text and "2.0 %" in text, width


def test_places_of_one_finding():
    found = [Finding("mixed-eps", "note", "Several.", "Check.", f"{name}.{i}.norm")
             for name in "abcdef" for i in range(3)]  # fmt: skip
    ((_, where),) = worst_first(found)
    assert where == [f"{name}.{{0..2}}.norm" for name in "abcdef"]
    norms = tuple(norm(one.path, findings=(one,)) for one in found)
    assert "and 2 places more" in Audit("Model", norms, tuple(found), 0.1).to_text(
        width=80, color=False
    )


# --------------------------------------------------------------------------------------------
# Progress


def test_steps_reach_whoever_watches():
    seen = []
    step("nobody watches")
    with watched(lambda *said: seen.append(said)):
        axisnorm.audit(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)), torch.randn(4, 8))
        with watched(lambda *said: None):
            step("an inner watcher has it")
    step("nobody watches again")
    assert [said[0] for said in seen if said[0] != "verifying"] == ["running the model", "timing"]
    assert [said[1] for said in seen if said[0] == "verifying"] == [1, 2]


# --------------------------------------------------------------------------------------------
# The command line

MODELS = """
import torch
from torch import nn

def made(**more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, **more)), (torch.randn(2, 3, 8),)

def plain(): return made()
def other(): return made(eps=1e-3)
def trap():
    return nn.Sequential(nn.BatchNorm1d(8, 4)).eval(), (torch.randn(4, 8),)
def noted():
    return nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8, eps=1e-6)), (torch.randn(4, 8),)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch) -> str:
    (tmp_path / "audited_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "audited_models"
    sys.modules.pop("audited_models", None)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["audit", *arguments])
    return status, *capsys.readouterr()


def test_strict_is_about_errors_and_warnings(capsys, models):
    assert run(capsys, f"{models}:trap", "--strict")[0] == 1
    assert run(capsys, f"{models}:trap")[0] == 0
    status, out, _ = run(capsys, f"{models}:noted", "--strict", "--json")
    data = json.loads(out)
    assert status == 0 and {found["severity"] for found in data["findings"]} == {"note"}


def test_two_models_on_the_command_line(capsys, models, tmp_path):
    page = tmp_path / "two.html"
    given = (f"{models}:plain", "--diff", f"{models}:other", "--html", str(page))
    status, out, err = run(capsys, *given)
    assert (status, err) == (0, "") and "eps: 1e-05 against 0.001" in out
    assert "not the same norms" in page.read_text()
    status, out, _ = run(capsys, *given, "--strict", "--json")
    assert status == 1 and json.loads(out)["schema"] == "axisnorm.differences/1"
    status, out, _ = run(capsys, f"{models}:plain", "--diff", f"{models}:plain", "--strict")
    assert status == 0 and "the same norms" in out


def test_a_swap_on_the_command_line(capsys, models, tmp_path):
    page = tmp_path / "swap.html"
    status, out, err = run(capsys, f"{models}:plain", "--swap", "--strict", "--html", str(page))
    assert (status, err) == (0, "") and "1 replaced, 0 left" in out
    assert re.search(
        r"One forward takes [\d.]+ .s, before it took [\d.]+ .s: [\d.]+ times as fast\.", out
    )
    assert "before it took" in page.read_text()
    status, out, _ = run(capsys, f"{models}:trap", "--swap", "--strict", "--json")
    before, after = json.loads(out)["seconds"]
    assert status == 1 and before > 0 and after > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--swap", "--diff", "audited_models:other"), "not allowed with"),
        (("--swap", "--figure", "a.svg"), "A figure is drawn of one model's audit."),
        (("--diff", "audited_models:other", "--figure", "a.svg"), "Use --html there."),
        (("--diff", "audited_models:missing"), "missing"),
        (("--diff", "no/such/model"), "config.json"),
    ],
)
def test_wrong_use(capsys, models, tmp_path, arguments, said):
    try:
        status = main(["audit", f"{models}:plain", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "a.svg").exists()


def test_help_says_the_exit_statuses(capsys):
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit status: 0 fine; 1 with --strict" in said and "notes do not count" in said


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_progress_is_for_terminals(models, tmp_path, monkeypatch, capfd, option):
    """A bar on a terminal's standard error, gone at the end; none beside JSON."""
    controller, terminal = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        # A terminal that nobody reads blocks whoever writes to it.
        with contextlib.suppress(OSError):  # at its end
            while part := os.read(controller, 4096):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        assert main(["audit", f"{models}:plain", *option]) == 0
    reader.join(timeout=60)
    os.close(controller)
    shown = b"".join(parts).decode()
    assert ("loading" in shown) == (not option)
    if not option:
        assert "\x1b[?25h" in shown and shown.endswith(
            "\x1b[2K"
        )  # the cursor is back, the line empty


@pytest.mark.parametrize("width", [40, 60, 80])
def test_names_that_are_ruled_out_are_whole(width):
    """At 40 columns '(InstanceNorm)' ended in three dots."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8))
    said = axisnorm.audit(model, torch.randn(2, 8, 4, 4)).to_text(width=width, color=False)
    part = said.split("Ruled out by the numbers")[1]
    assert "InstanceNorm" in part and "…" not in part
    assert max(map(len, said.splitlines())) <= width
