"""The command line: what it prints, and its exit statuses."""

import json
import subprocess
import sys

import pytest

import axisnorm
from axisnorm.__main__ import main
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

def keywords():
    return torch.nn.LayerNorm(8), {"input": torch.ones(2, 8).cumsum(1)}

def raises():
    raise RuntimeError("first line\\nsecond line")

def leaves():
    raise SystemExit("bye")

def needs(size):
    return torch.nn.LayerNorm(size)

def no_input():
    return torch.nn.LayerNorm(8)

def wrong_input():
    return torch.nn.LayerNorm(8), (torch.ones(2, 7),)

number = 3
"""


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
        (("explain", "torch.group_norm", "2,4,3", "--sizes", "g:2"), "Write them as g=2,c=4"),
        (("explain", "torch.group_norm", "2,4,3", "--sizes", "z=2"), "'z' is none of"),
        (("audit", "some_models:raises"), "RuntimeError: first line."),
        (("audit", "some_models:leaves"), "SystemExit: bye."),
        (("audit", "some_models:needs"), "missing 1 required positional argument: 'size'"),
        (("audit", "some_models:no_input"), "It got no inputs"),
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
        (("hear",), "invalid choice"),
        ((), "COMMAND"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(capsys, models, arguments, said):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("axisnorm") and said in err
    assert err.count("\n") == 1 and err.endswith("\n")


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


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"axisnorm {axisnorm.__version__}\n", "")


@pytest.mark.parametrize("name", ["audit", "swap"])
def test_without_torch_the_extra_is_named(name):
    code = f"{NO_TORCH}import axisnorm; axisnorm.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'axisnorm[torch]'" in done.stderr
    code = f"{NO_TORCH}from axisnorm.__main__ import main; sys.exit(main(['audit', 'm:f']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "axisnorm[torch]" in done.stderr


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
    assert "layers.{0..1}." in out and "input_layernorm  x2" in out
    assert "one root mean square a token" in out


def test_explain_does_without_torch():
    code = (
        "import sys; from axisnorm.__main__ import main; main(['explain', '... [d]', '2,3']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "axisnorm", "explain", "[d", "2"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
