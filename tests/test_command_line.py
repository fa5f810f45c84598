"""The command line: what it prints, and its exit statuses."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import axisnorm
from axisnorm.__main__ import main
from axisnorm.lens import COMMANDS
from axisnorm.scheme import ArgumentError

NO_TORCH = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Absent)
"""

MODELS = """
import torch

def good():
    return torch.nn.Sequential(torch.nn.LayerNorm(8)), (torch.ones(2, 8).cumsum(1),)

def trap():
    norm = torch.nn.BatchNorm2d(64, 32, track_running_stats=False)
    return norm.eval(), (torch.arange(512.0).reshape(2, 64, 2, 2),)

def nothing():
    return 3

def named():
    class Н(torch.nn.LayerNorm):
        pass

    model = torch.nn.Sequential()
    model.add_module("слой\\x1b[31m\\u202e", Н(8))
    model.add_module("é" * 80, torch.nn.BatchNorm1d(8, 4.0))
    return model.eval(), (torch.ones(2, 8).cumsum(1),)

def keywords():
    return torch.nn.LayerNorm(8), {"input": torch.ones(2, 8).cumsum(1)}

def raises():
    raise RuntimeError("first line\\nsecond line")

def leaves():
    raise SystemExit("bye")

def needs(size):
    return torch.nn.LayerNorm(size)

def no_input():
    return torch.nn.Identity()

def wrong_input():
    return torch.nn.LayerNorm(8), (torch.ones(2, 7),)

number = 3
"""


MODULES = ("some_models", "broken_model", "needy_model")


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(MODELS)
    (tmp_path / "broken_model.py").write_text("def f(:\n")
    (tmp_path / "needy_model.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield "some_models"
    sys.modules.pop("some_models", None)


def run(capsys, *arguments):
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    return status, out, err


def test_explain(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = run(capsys, "explain", "... [d]; affine=d", "2,3,4")
    assert (status, err) == (0, "")
    assert " A  A  A  A    D  D  D  D " in out and "InstanceNorm" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("shape", ["2,3,4", "(2, 3, 4)", "2x3x4", "2 3 4"])
def test_explain_json(capsys, shape):
    status, out, _ = run(capsys, "explain", "bert.layer_norm", shape, "--json")
    data = json.loads(out)
    assert status == 0 and data["num_groups"] == 6 and data["scheme"].endswith("eps=1e-12")


def test_audit_of_a_function(capsys, models):
    status, out, err = run(capsys, "audit", f"{models}:good", "--strict")
    assert (status, err) == (0, "") and "one mean a row" in out
    status, out, _ = run(capsys, "audit", f"{models}:trap")
    assert status == 0 and "implausible-eps" in out
    status, out, _ = run(capsys, "audit", f"{models}:trap", "--strict", "--json")
    assert status == 1
    assert [f["code"] for f in json.loads(out)["findings"]] == [
        "implausible-eps", "batch-statistics-in-eval",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "... [d", "2,3"), "A bracket must be closed: column 5 of '... [d'. Add ']'."),
        (("explain", "... [d]", "-1,3"), "'-1,3' came"),
        (("explain", "... [d]", "2,,3"), "'2,,3' came"),
        (("explain", "... [d]", "²"), "'²' came"),
        (("explain", "... [d]", "99999999999999999999999999,3"), "up to 2**44 elements"),
        (("explain", "... [d]", "9" * 5000), "up to 2**44 elements"),
        (("explain", "bert.layernorm", "2,3"), "Did you mean 'bert.layer_norm'"),
        (("explain", "layernorm", "2,3"), "Did you mean"),
        (("explain", "layer_norm", "2,3"), "Did you mean 'torch.layer_norm'?"),
        (("explain", "torch.group_norm", "2,4,3", "--sizes", "g:2"), "Write them as g=2,c=4"),
        (("explain", "torch.group_norm", "2,4,3", "--sizes", "z=2"), "'z' is none of"),
        (("explain", "torch.group_norm", "2,4,3", "--sizes", "g=2,g=4"), "says two of g"),
        (("audit", "some_models:raises"), "RuntimeError: first line."),
        (("audit", "some_models:leaves"), "SystemExit: bye."),
        (("audit", "some_models:needs"), "missing 1 required positional argument: 'size'"),
        (("audit", "some_models:no_input"), "Give the inputs"),
        (("audit", "some_models:wrong_input"), "forward has to work"),
        (("audit", "some_models:number"), "'number' is int"),
        (
            ("audit", "broken_model:f"),
            "Importing 'broken_model' has to work. It raised SyntaxError",
        ),
        (("audit", "needy_model:f"), "No module named 'no_such_dependency'"),
        (("audit", ":f"), "Give both names"),
        (("audit", "some_models:"), "Give both names"),
        (("explain", "... [d]", "2,a"), "A shape is a list of whole numbers"),
        (("explain", "b s [d]", "2,3"), "The input has 2"),
        (("explain", "... [d]"), "required: shape"),
        (("audit", "/no/such/model"), "config.json"),
        (("audit", "no_such_module:f"), "no_such_module"),
        (("audit", "some_models:missing"), "missing"),
        (("audit", "some_models:nothing"), "torch.nn.Module"),
        (("audit", "some_models:good", "--text", "a"), "--text"),
        (("compare", "... [d]", "... [d]"), "required: --shape"),
        (("compare", "... [d]", "--shape", "2,3"), "required: b"),
        (("compare", "... [d]", "... [d]", "--shape", "-1,3"), "'-1,3' came"),
        (("compare", "... [d]", "layernorm", "--shape", "2,3"), "Did you mean"),
        (("compare", "... [d]", "b s [d]", "--shape", "2,3"), "The input has 2"),
        (("compare", "... [d]", "... [d", "--shape", "2,3"), "column 5 of '... [d'"),
        (("compare", "... [d]", "[d]", "--shape", "3", "--sizes", "z=2"), "'z' is none of"),
        (("bench", "layer_norm"), "required: shape"),
        (("bench", "layer_norm", "2,a"), "A shape is a list of whole numbers"),
        (("bench", "b s [d]", "2,3"), "The input has 2"),
        (("bench", "layernorm", "2,3"), "Did you mean"),
        (("bench", "layer_norm", "0,3"), "has none"),
        (("bench", "layer_norm", "2,3", "--dtype", "float8"), "'float8' came"),
        (("bench", "layer_norm", "2,3", "--dtype", ""), "'' came"),
        (("bench", "layer_norm", "2,3", "--rounds", "0"), "0 came"),
        (("bench", "layer_norm", "2,3", "--rounds", "-1"), "-1 came"),
        (("bench", "layer_norm", "2,3", "--rounds", "x"), "invalid int value"),
        (("bench", "layer_norm", "2,3", "--threads", "0"), "threads is a whole number"),
        (("bench", "layer_norm", "2,3", "--channels-last"), "4 or 5 axes"),
        (("bench", "layer_norm", "1048576,1048576"), "Give a smaller shape"),
        (("bench", "group_norm", "2,6,3"), "as in --sizes g=4"),
        (("presets", "torch"), "unrecognized arguments"),
        (("presets", "--html", "a.html"), "unrecognized arguments"),
        (
            ("explain", "... [d]", "2,3", "--html", "no/such/place/a.html"),
            "does not. Make it first",
        ),
        (("explain", "... [d]", "2,3", "--html", "."), "is a directory"),
        (("explain", "... [d]", "2,3", "--figure", "a.gif"), "saved as png or svg"),
        (("explain", "... [d]", "2,3", "--figure", "a"), "saved as png or svg"),
        (("explain", "... [d]", "2,3", "--html", "a.svg", "--figure", "a.svg"), "two files"),
        (("explain", "... [d]", "2,3", "--html", "x" * 300), "File name too long"),
        (("hear",), "invalid choice"),
        ((), "COMMAND"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(capsys, models, arguments, said):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("axisnorm") and said in err
    assert err.count("\n") == 1 and err.endswith("\n")
    assert set(os.listdir()) <= {"__pycache__", *(f"{m}.py" for m in MODULES)}


def test_the_traceback_is_shown_when_asked_for(models):
    with pytest.raises(ArgumentError) as caught:
        main(["audit", f"{models}:raises", "--traceback"])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_keyword_inputs(capsys, models):
    status, out, err = run(capsys, "audit", f"{models}:keywords", "--json")
    assert (status, err) == (0, "") and json.loads(out)["norms"][0]["verified"]


def test_sizes(capsys):
    status, out, _ = run(capsys, "explain", "torch.group_norm", "2,4,3", "--sizes", "g=2", "--json")
    assert status == 0 and json.loads(out)["num_groups"] == 4


def test_compare(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = run(capsys, "compare", "... [d]", "b [s d]", "--shape", "2,3,4")
    assert (status, err) == (0, "")
    assert "6 means of 4 elements against 2 means of 12" in out and "\x1b" not in out
    status, out, _ = run(capsys, "compare", "... [d]", "b [s d]", "--shape", "2x3x4", "--json")
    assert status == 0 and json.loads(out)["statistics"] == "different"


def test_compare_with_sizes(capsys):
    """A size is for whichever of the two has an axis of that name."""
    status, out, _ = run(
        capsys, "compare", "torch.group_norm", "n c [...]; affine=c", "--shape", "2,4,3",
        "--sizes", "g=4", "--json",
    )  # fmt: skip
    assert status == 0 and json.loads(out)["same"]


def test_bench(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = run(capsys, "bench", "layer_norm", "2,3,4", "--rounds", "2")
    assert (status, err) == (0, "")
    assert "F.layer_norm(x, (4,), weight, bias, eps=1e-05)" in out and "\x1b" not in out
    status, out, _ = run(
        capsys, "bench", "group_norm", "2x4x3x3", "--sizes", "g=2", "--dtype", "float32,bfloat16",
        "--channels-last", "--backward", "--rounds", "1", "--threads", "1", "--json",
    )  # fmt: skip
    data = json.loads(out)
    assert status == 0 and data["channels_last"] and data["machine"]["threads"] == 1
    # A name is a name, also with its sizes filled in: no row for the scheme.
    assert data["subject"] == "torch.group_norm"
    assert [timed["name"] for timed in data["measurements"][0]["calls"]] == [
        "axisnorm", "torch", "copy",
    ]  # fmt: skip
    # torch refuses one value; the scheme is said where the preset leaves a size open.
    status, out, _ = run(
        capsys, "bench", "group_norm", "1,2,1", "--sizes", "g=2", "--rounds", "1", "--json"
    )
    own = json.loads(out)["measurements"][0]["calls"][0]["code"]
    assert own == "axisnorm.normalize(x, 'n (g=2 [c]) [...]; affine=g c', weight, bias)"
    assert [(one["dtype"], one["direction"]) for one in data["measurements"]] == [
        (dtype, direction)
        for dtype in ("float32", "bfloat16")
        for direction in ("forward", "forward and backward")
    ]


def test_presets(capsys):
    status, out, err = run(capsys, "presets")
    assert (status, err) == (0, "")
    for name in axisnorm.PRESETS:
        assert name in out
    status, out, _ = run(capsys, "presets", "--json")
    data = json.loads(out)
    assert [one["name"] for one in data["presets"]] == list(axisnorm.PRESETS)
    for one in data["presets"]:
        assert axisnorm.Scheme(one["scheme"]) == axisnorm.PRESETS[one["name"]]


@pytest.mark.parametrize(
    "arguments",
    [("explain", "... [d]", "2,3,4"), ("compare", "... [d]", "b [s d]", "--shape", "2,3,4")],
    ids=["explain", "compare"],
)
def test_files_are_written_beside_the_text(capsys, tmp_path, arguments):
    page, figure = tmp_path / "a.html", tmp_path / "a.PNG"
    page.write_text("old")
    plain = run(capsys, *arguments)
    assert run(capsys, *arguments, "--html", str(page), "--figure", str(figure)) == plain
    assert sorted(os.listdir(tmp_path)) == ["a.PNG", "a.html"]
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert figure.read_bytes().startswith(b"\x89PNG")
    # As any other file that this user makes.
    (tmp_path / "other").touch()
    assert page.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert run(capsys, *arguments, "--figure", str(tmp_path / "b.svg"))[0] == 0
    assert "<svg" in (tmp_path / "b.svg").read_text()


def test_nothing_is_left_behind_when_something_fails(capsys, tmp_path, monkeypatch):
    page = tmp_path / "a.html"
    page.write_text("old")
    long = tmp_path / ("x" * 300 + ".svg")
    given = ("explain", "... [d]", "2,3", "--html", str(page), "--figure")
    status, out, err = run(capsys, *given, str(long))
    assert (status, out) == (2, "") and "File name too long" in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.html"] and page.read_text() == "old"

    def fails(self):
        raise RuntimeError("no ink")

    monkeypatch.setattr("axisnorm.lens.explain.Explanation.figure", fails)
    status, out, err = run(capsys, *given, str(tmp_path / "a.svg"))
    assert (status, out) == (2, "") and "RuntimeError: no ink" in err
    assert os.listdir(tmp_path) == ["a.html"] and page.read_text() == "old"


def test_a_result_is_saved_by_itself(tmp_path):
    found = axisnorm.explain("... [d]", (2, 3))
    found.save_figure(tmp_path / "a.svg")
    found.save_figure(str(tmp_path / "b.svg"))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(ArgumentError, match="png or svg"):
        found.save_figure(tmp_path / "a.pdf")
    with pytest.raises(ArgumentError, match="Make it first"):
        found.save_figure(tmp_path / "no" / "a.svg")
    assert sorted(os.listdir(tmp_path)) == ["a.svg", "b.svg"]
    cell = found._repr_html_()
    assert cell.startswith("<iframe srcdoc=") and "<script" not in cell


def test_a_reader_may_stop_reading():
    """As with axisnorm presets | head -1."""
    done = subprocess.run(
        f"{sys.executable} -m axisnorm presets --json | head -c 1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("{0\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_result_that_cannot_be_printed_is_one_line_and_status_2():
    command = [sys.executable, "-m", "axisnorm", "explain", "torch.layer_norm", "2,3"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot be printed" in done.stderr


def test_a_group_count_that_is_missing_is_asked_for_by_its_option(capsys):
    status, out, err = run(
        capsys, "compare", "torch.group_norm", "keras.group_norm", "--shape", "2,32,32"
    )
    assert (status, out) == (2, "")
    assert "Say one of them, as in --sizes g=4." in err


def test_the_script_and_the_module_are_alike(tmp_path):
    script = Path(sys.executable).with_name("axisnorm")
    (tmp_path / "here.py").write_text(MODELS)
    for arguments, status in (
        (["explain", "... [d]", "2,3"], 0),
        (["compare", "... [d]", "n c [...]", "--shape", "2,3,4", "--json"], 0),
        (["audit", "here:trap", "--strict", "--json"], 1),
        (["explain", "... [d", "2,3"], 2),
        (["--help"], 0),
        ([], 2),
    ):
        done = [
            subprocess.run([*start, *arguments], capture_output=True, text=True, cwd=tmp_path)
            for start in ([str(script)], [sys.executable, "-m", "axisnorm"])
        ]
        assert [one.returncode for one in done] == [status, status], done[0].stderr
        assert done[0].stderr == done[1].stderr
        if "audit" not in arguments:  # whose seconds differ
            assert done[0].stdout == done[1].stdout


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"axisnorm {axisnorm.__version__}\n", "")


@pytest.mark.parametrize("used", ["audit(None)", "swap"])  # an audit reads ONNX without torch
def test_without_torch_the_extra_is_named(used):
    code = f"{NO_TORCH}import axisnorm; axisnorm.{used}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'axisnorm[torch]'" in done.stderr
    code = f"{NO_TORCH}from axisnorm.__main__ import main; sys.exit(main(['audit', 'm:f']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "axisnorm[torch]" in done.stderr


@pytest.mark.parametrize("command", ["audit", "bench"])
def test_without_rich_the_extra_is_named_and_json_does_without(tmp_path, command):
    (tmp_path / "here.py").write_text(MODELS)
    given = ["audit", "here:good"] if command == "audit" else ["bench", "layer_norm", "2,8"]
    code = NO_TORCH.replace('"torch"', '"rich"').replace("'torch'", "'rich'")
    for more, status, said in (
        ([], 2, "Reports are drawn with rich. It is not installed. Run: pip install"),
        (["--json"], 0, ""),
    ):
        run = f"{code}from axisnorm.__main__ import main; sys.exit(main({[*given, *more]}))"
        done = subprocess.run(
            [sys.executable, "-c", run], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == status and said in done.stderr, done.stderr
        assert done.stderr.count("\n") == (status == 2)


def test_a_transformers_directory(capsys, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("COLUMNS", "100")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    capsys.readouterr()
    status, out, err = run(capsys, "audit", str(tmp_path))
    assert (status, err) == (0, "")
    assert "layers.{0..1}." in out and "input_layernorm" in out and " x2" in out
    assert "one root mean square a token" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "... [d]", "2,3"],
        ["compare", "... [d]", "... [d]; center=false", "--shape", "2,3"],
        ["presets"],
    ],
    ids=["explain", "compare", "presets"],
)
def test_some_commands_do_without_torch(arguments):
    code = (
        f"import sys; from axisnorm.__main__ import main; main({arguments}); "
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "axisnorm", "explain", "[d", "2"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_what_is_read_is_never_written_over(capsys, tmp_path, monkeypatch):
    """identify took its input's place with its page."""
    monkeypatch.chdir(tmp_path)
    values = np.arange(6.0).reshape(2, 3)
    for name in ("x.npy", "y.svg.npy"):
        np.save(name, values)
    np.savez("both.npz", x=values, y=values, weight=values[0])
    os.symlink("x.npy", "link.npy")
    os.link("x.npy", "twin.npy")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    before = {name: Path(name).read_bytes() for name in os.listdir() if name != "model"}
    pair = ("identify", "x.npy", "y.svg.npy")
    for given, target in [
        (pair, "x.npy"), (pair, "./x.npy"), (pair, str(tmp_path / "y.svg.npy")),
        (pair, "model/../x.npy"), (pair, "link.npy"), (pair, "twin.npy"),
        (("identify", "both.npz"), "both.npz"),
        (("identify", "both.npz:x", "both.npz:y"), "both.npz"),
        ((*pair, "--weight", "both.npz:weight"), "both.npz"),
        (("audit", "model"), "model/config.json"),
    ]:  # fmt: skip
        status, out, err = run(capsys, *given, "--html", target)
        assert (status, out) == (2, "") and "What is read is not written over" in err, target
    assert {name: Path(name).read_bytes() for name in os.listdir() if name != "model"} == before
    assert (tmp_path / "model/config.json").read_text() == "{}"
    # Pages may lie beside what they are about, and be written again.
    for _ in range(2):
        status, _, err = run(capsys, *pair, "--html", "page.html", "--figure", "page.svg")
        assert (status, err) == (0, "")


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/page.svg").write_text("old")
    os.symlink("there/page.svg", tmp_path / "link.svg")
    axisnorm.explain("... [d]", (2, 3)).save_figure(tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink()
    assert "<svg" in (tmp_path / "there/page.svg").read_text()
    assert os.listdir(tmp_path / "there") == ["page.svg"]


@pytest.mark.parametrize("names", ["a.svg a.svg", "./a.svg a.svg", "there/../a.svg a.svg"])
def test_two_results_have_two_files(capsys, tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    page, figure = names.split()
    given = ("explain", "... [d]", "2,3", "--html", page, "--figure", figure)
    status, out, err = run(capsys, *given)
    assert (status, out) == (2, "") and "Name them differently" in err
    assert os.listdir(tmp_path) == ["there"]


def test_an_interrupt_is_one_line_and_status_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("axisnorm.lens.explain.explained", interrupted)
    assert run(capsys, "explain", "... [d]", "2,3") == (130, "", "axisnorm explain: interrupted\n")
    with pytest.raises(KeyboardInterrupt):
        main(["explain", "... [d]", "2,3", "--traceback"])


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_output_that_is_closed_is_one_line_and_status_2(json_too, tmp_path):
    page = tmp_path / "page.html"
    options = " ".join([f"--html {page}", *json_too])
    command = f"{sys.executable} -m axisnorm explain {options} torch.layer_norm 2,3"
    done = subprocess.run(
        f"{command} >&-", shell=True, executable="/bin/bash", stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "standard output is closed" in done.stderr and not page.exists()
    # Nor does a message go to the output where there is no place for it.
    done = subprocess.run(
        f"{command},a 2>&-", shell=True, executable="/bin/bash", stdout=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_terminal_that_says_no_width_has_the_usual_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert "axes b 2 x d 3 shared" in " ".join(run(capsys, "explain", "b [d]", "2,3")[1].split())
    monkeypatch.setenv("COLUMNS", "1")
    assert run(capsys, "explain", "b [d]", "2,3")[1].strip()


def test_the_command_stands_before_its_options(capsys):
    status, out, err = run(capsys, "--json", "explain", "... [d]", "2,3")
    assert (status, out) == (2, "") and "the command comes first" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_says_the_exit_statuses(capsys, command):
    status, out, _ = run(capsys, *command, "--help")
    said = " ".join(out.split())
    assert status == 0 and "Exit status: 0 fine;" in said and "2 wrong use" in said
    assert "130 interrupted" in said


def test_inputs_may_be_files(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    np.save("x.npy", x)
    np.savez("more.npz", x=x, other=x[0])
    for name in ("x.npy", "more.npz:x"):
        status, out, err = run(capsys, "explain", "LayerNorm(4)", name, "--json")
        assert (status, err) == (0, "")
        assert json.loads(out) == json.loads(axisnorm.explain("LayerNorm(4)", x).to_json())
        given = ("compare", "LayerNorm(4)", "RMSNorm(4)", "--shape", name, "--json")
        status, out, err = run(capsys, *given)
        assert (status, err) == (0, "") and json.loads(out)["largest_difference"] > 0.1
    np.save("nan.npy", np.where(x > x.max() - 1e-9, np.nan, x))
    for name, said in (
        ("missing.npy", "'missing.npy' does not exist"),
        ("more.npz", "needs a key"),
        ("nan.npy", f"x[{', '.join(map(str, np.argwhere(x == x.max())[0]))}] is nan"),
    ):
        for given in (("explain", "[...]", name), ("compare", "[...]", "[...]", "--shape", name)):
            status, out, err = run(capsys, *given)
            assert (status, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "utf-16"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "some_models:named"),
        ("audit", "some_models:named", "--swap"),
        ("audit", "some_models:named", "--diff", "some_models:good"),
        ("audit", "some_models:named", "--strict", "--json"),
        ("explain", "... [d]", "2,3"),
        ("compare", "... [d]", "[...]", "--shape", "2,3", "--json"),
    ],
    ids=" ".join,
)
def test_every_output_takes_every_result(models, monkeypatch, encoding, arguments):
    """Outputs that are not UTF-8 ended with a UnicodeEncodeError, at the line below a head."""
    monkeypatch.setenv("COLUMNS", "100")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(arguments) == (1 if "--strict" in arguments else 0)
    said = written.getvalue().decode("utf-8" if encoding == "ascii" else encoding)
    if "--json" not in arguments:
        # Names do not steer the terminal, nor turn the direction of its lines.
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)
    if "--json" in arguments:
        data = json.loads(said)
        if "audit" in arguments:
            paths = [norm["path"] for norm in data["norms"]]
            assert paths == ["слой\x1b[31m\u202e", "é" * 80]
    elif "audit" in arguments:
        assert ("слой?[31m?" if encoding.startswith("utf") else "\\u0441\\u043b") in said


def test_a_message_does_not_steer_the_terminal(capsys):
    status, out, err = run(capsys, "audit", "no\x1b[31m:such")
    assert (status, out) == (2, "") and "no?[31m" in err and err.count("\n") == 1


@pytest.mark.parametrize("protected", ["page.html", "."])
def test_what_is_write_protected_is_not_replaced(capsys, tmp_path, monkeypatch, protected):
    """A file in a directory that may be written to was replaced, whatever its own rights."""
    (tmp_path / "page.html").write_text("old")
    there = (tmp_path / protected).resolve()
    allowed = os.access
    # For root everything may be written to.
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != there and allowed(path, mode)
    )
    given = ("explain", "... [d]", "2,3", "--html", str(tmp_path / "page.html"))
    status, out, err = run(capsys, *given)
    assert (status, out) == (2, "") and f"'{there}' is write-protected" in err
    assert os.listdir(tmp_path) == ["page.html"] and (tmp_path / "page.html").read_text() == "old"
