"""audit on exported programs, TorchScript, pickles and bare modules; no file runs code unasked."""

import dataclasses
import json
import pickle
import zipfile
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from axisnorm.__main__ import main
from axisnorm.lens.audit import audit
from axisnorm.lens.models.sources import load_path
from axisnorm.lens.models.untrusted import danger, file_kind
from axisnorm.scheme import ArgumentError, Scheme

SEED = torch.Generator().manual_seed(20)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning",
                                        "ignore::UserWarning", "ignore::torch.jit.TracerWarning")  # fmt: skip


def randn(*shape):
    return torch.randn(*shape, generator=SEED) + 0.3


class Root(nn.Module):
    """An RMSNorm whose class does not say so."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(8, generator=SEED) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class Model(nn.Module):
    """One norm of each kind: a module, a module of another library, a fragment, functions."""

    def __init__(self):
        super().__init__()
        self.first, self.root, self.fc = nn.LayerNorm(8), Root(), nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(6)
        self.g = nn.Parameter(torch.rand(8, generator=SEED) + 0.5)
        nn.init.uniform_(self.bn.running_mean, 0.1, 0.4, generator=SEED)

    def forward(self, x):
        x = self.fc(self.root(self.fc(self.first(x))))
        d = x - x.mean(-1, keepdim=True)
        x = d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.g
        x = F.group_norm(self.bn(x).tanh(), 2)
        return self.fc(F.normalize(x.tanh(), dim=-1))


SCHEMES = [
    "... [d]; affine=d",
    "... [d]; affine=d; center=false; eps=1e-06",
    "... [d]; affine=d",
    "[n] c [...]; affine=c; statistics=running",
    "n (g=2 [c]) [...]",
    "... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max",
]
X = randn(4, 6, 8)


@pytest.fixture(scope="module")
def model():
    return Model().eval()


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.export.save(torch.export.export(model, (X,)), folder / "exported.pt2")
    torch.jit.script(model).save(folder / "scripted.pt")
    torch.jit.trace(model, X).save(folder / "traced.pt")
    torch.save(model, folder / "pickled.pt")
    torch.save(model.state_dict(), folder / "weights.bin")
    return folder


def kinds(model):
    program = torch.export.export(model, (X,))
    return {
        "module": model,
        "exported": program,
        "decomposed": program.run_decompositions(),
        "scripted": torch.jit.script(model),
        "traced": torch.jit.trace(model, X),
    }


@pytest.mark.parametrize("kind", ["module", "exported", "decomposed", "scripted", "traced"])
def test_every_form_of_a_model_has_the_same_norms(model, kind):
    found = audit(kinds(model)[kind], X)
    assert found.model == "Model"
    assert [norm.scheme for norm in found.norms] == [Scheme(text) for text in SCHEMES]
    assert all(norm.verified and norm.calls == 1 for norm in found.norms)
    assert all(0 < norm.time_share <= 1 for norm in found.norms)
    # Where a path is known at all, it is the module's.
    first, root, _, bn, *_ = found.norms
    assert (first.path, root.path, bn.path) == ("first", "root", "bn")
    nodes = [norm.nodes for norm in found.norms]
    if kind in ("exported", "decomposed"):
        assert found.source == "exported"
        assert nodes[1] == ("pow_1", "mean", "add", "rsqrt", "mul", "mul_1")
        assert (root.cls, root.kind) == ("Root", "node")
    if kind == "module":
        assert (root.cls, root.kind, root.nodes) == ("Root", "module", ())
        assert found.norms[2].path == "LayerNorm" and found.norms[2].kind == "fragment"


@pytest.mark.parametrize(
    ("name", "source"),
    [("exported.pt2", "exported"), ("scripted.pt", "torchscript"), ("traced.pt", "torchscript")],
)
def test_files(files, name, source, capsys):
    found = audit(files / name, X)
    assert found.source == source and len(found.norms) == len(SCHEMES)
    if source == "exported":
        # It was saved with its inputs.
        assert main(["audit", str(files / name), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["norms"]) == len(SCHEMES)


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors", ".bin", ""])
def test_a_file_is_what_it_holds(files, tmp_path, suffix):
    for name in ("scripted.pt", "exported.pt2"):
        copy = tmp_path / f"model{suffix}"
        copy.write_bytes((files / name).read_bytes())
        assert file_kind(copy) == {"s": "torchscript", "e": "exported"}[name[0]]
        if suffix != ".onnx":  # which names another reader
            assert len(audit(copy, X).norms) == len(SCHEMES)


def test_dynamic_shapes(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x, *, y):
            return self.norm(x + y)

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Two(), (X,), {"y": X}, dynamic_shapes={"x": {0: batch}, "y": {0: batch}}
    )
    (norm,) = audit(program, X[:3], y=X[:3]).norms
    assert norm.verified and norm.shape == (3, 6, 8)
    torch.export.save(program, tmp_path / "dynamic.pt2")
    assert danger(tmp_path / "dynamic.pt2", "exported") is None
    assert audit(tmp_path / "dynamic.pt2", X[:3], y=X[:3]).norms == (
        dataclasses.replace(norm, time_share=ANY),
    )


def test_branches_of_graphs():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            def one(x):
                return F.layer_norm(x, (8,))

            def other(x):
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

            return self.fc(torch.cond(x.sum() > 0, one, other, (x,)))

    program = torch.export.export(Branches(), (X,))
    for x, scheme in ((X.abs(), "... [d]"), (-X.abs(), "... [d]; center=false; eps=1e-06")):
        (norm,) = audit(program, x).norms
        assert norm.scheme == Scheme(scheme) and norm.verified


def test_training_graphs_are_not_changed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6)).train()
    for form in (torch.jit.script(model), torch.export.export(model, (X,))):
        before = {name: value.clone() for name, value in form.state_dict.items()} if isinstance(
            form, torch.export.ExportedProgram
        ) else {name: value.clone() for name, value in form.state_dict().items()}  # fmt: skip
        (norm,) = audit(form, X).norms
        assert norm.scheme.statistics == "batch"
        after = form.state_dict if isinstance(
            form, torch.export.ExportedProgram
        ) else form.state_dict()  # fmt: skip
        assert all(torch.equal(after[name], value) for name, value in before.items())


# --------------------------------------------------------------------------------------------
# Code in files


class Runs:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return exec, (f"open({str(self.place)!r}, 'w').close()",)


def with_member(source, target, end, content):
    """The archive with one member replaced, or added beside the others."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        names = old.namelist()
        for name in names:
            new.writestr(name, content if name.endswith(end) else old.read(name))
        if not any(name.endswith(end) for name in names):
            new.writestr(f"{names[0].split('/')[0]}/{end}", content)
    return target


@pytest.mark.parametrize("kind", ["module", "weights", "anything", "legacy"])
def test_pickles_are_not_loaded(files, tmp_path, kind):
    ran = tmp_path / "ran"
    path = {"module": files / "pickled.pt", "weights": files / "weights.bin"}.get(kind)
    if kind == "anything":
        path = tmp_path / "evil.pt"
        torch.save({"model": Runs(ran)}, path)
    if kind == "legacy":
        path = tmp_path / "evil.pth"
        torch.save({"model": Runs(ran)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ArgumentError, match=r"pickle.*--trust"):
        audit(path, X)
    assert not ran.exists()


def test_a_trusted_pickle(files, capsys, monkeypatch):
    assert len(audit(files / "pickled.pt", X, trust=True).norms) == len(SCHEMES)
    with pytest.raises(ArgumentError, match="weights without the model"):
        audit(files / "weights.bin", X, trust=True)
    assert main(["audit", str(files / "pickled.pt")]) == 2
    assert "--trust" in capsys.readouterr().err


def test_a_program_with_a_pickle_inside_is_not_loaded(files, tmp_path):
    ran = tmp_path / "ran"
    evil = tmp_path / "evil.zip"
    torch.save((Runs(ran),), evil)
    path = with_member(
        files / "exported.pt2", tmp_path / "evil.pt2", "sample_inputs/model.pt", evil.read_bytes()
    )
    with pytest.raises(ArgumentError, match="pickle of more than tensors"):
        audit(path, X)
    opaque = with_member(
        files / "exported.pt2", tmp_path / "opaque.pt2", "data/constants/opaque_obj_0",
        pickle.dumps(Runs(ran)),
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="pickled object"):
        audit(opaque, X)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.ops.aten.rsqrt.default", "torch.serialization.os.system"),
        ("torch.ops.aten.rsqrt.default", "torch.load"),
        ("torch.ops.aten.rsqrt.default", "_operator.methodcaller"),
        ("torch.ops.aten.rsqrt.default", "torch.ops.unknown.op.default"),
    ],
)
def test_a_program_that_calls_other_functions_is_not_loaded(files, tmp_path, old, new):
    with zipfile.ZipFile(files / "exported.pt2") as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("models/model.json")]
        text = archive.read(name).decode().replace(old, new)
    assert new in text
    path = with_member(files / "exported.pt2", tmp_path / "evil.pt2", "models/model.json", text)
    with pytest.raises(ArgumentError, match=f"it calls '{new}'"):
        audit(path, X)


@pytest.mark.parametrize(
    "expression",
    [
        "S('open(1)')",
        "__import__('os')",
        "exec(chr(97))",
        "s0.foo",
        "open",
        "s0 + eval(s1)",
        "[s0]",
    ],
)
def test_expressions_are_arithmetic(files, tmp_path, expression):
    def with_text(expression):
        with zipfile.ZipFile(files / "exported.pt2") as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("models/model.json")]
            data = json.loads(archive.read(name))
        data["more"] = {"expr_str": expression}
        return with_member(
            files / "exported.pt2", tmp_path / "evil.pt2", "models/model.json", json.dumps(data)
        )

    assert "evaluate" in danger(with_text(expression), "exported")
    for good in (
        "Mul(Integer(2), Symbol('s53', positive=True, integer=True))",
        "s0",
        "2*s0 + s1//4",
        "Max(1, s27)",
        "Mod(s0, 2)",
        "u0",
    ):
        assert danger(with_text(good), "exported") is None


@pytest.mark.parametrize(
    ("guard", "good"),
    [("L['x'].size()[0] >= 2", True), ("L['x'].size()[1] == 3 * L['y'].size()[0]", True),
     ("__import__('os').system('true')", False), ("L['x'].__class__ == 2", False),
     ("[1 for _ in L]", False)],
)  # fmt: skip
def test_guards_compare_sizes(files, tmp_path, guard, good):
    with zipfile.ZipFile(files / "exported.pt2") as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("models/model.json")]
        data = json.loads(archive.read(name))
    data["guards_code"] = [guard]
    path = with_member(
        files / "exported.pt2", tmp_path / "evil.pt2", "models/model.json", json.dumps(data)
    )
    assert (danger(path, "exported") is None) == good


def test_scripts_that_reach_out_of_the_model(tmp_path):
    class Reads(nn.Module):
        def forward(self, x):
            return x + torch.from_file("/dev/zero", False, 8, dtype=torch.float32)

    torch.jit.script(Reads()).save(tmp_path / "reads.pt")
    with pytest.raises(ArgumentError, match=r"from_file.*--trust"):
        audit(tmp_path / "reads.pt", X)
    assert load_path(tmp_path / "reads.pt", trust=True).kind == "torchscript"


@pytest.mark.parametrize("content", [b"", b"hello, this is a text", b"PK\x03\x04 no archive",
                                     b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])  # fmt: skip
def test_other_files(tmp_path, content):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ArgumentError, match="A model file is"):
        audit(tmp_path / "model.pt", X)


# --------------------------------------------------------------------------------------------
# Inputs that are made up


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, t, attention_mask, scale=None):
        return self.norm(self.fc(x) + t[:, None, None] * attention_mask[..., None])


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)), (2, 16, 4)),
        # Its channels are axis 1: only rows of features fit.
        (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), (8, 4)),
        (nn.Sequential(nn.Embedding(9, 8), nn.RMSNorm(8)), (2, 16, 8)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), (2, 8, 62, 62)),
        # The classifier takes images of one size.
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(),
                       nn.Linear(2 * 26 * 26, 4)), (2, 2, 26, 26)),
        (nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.InstanceNorm1d(8)), (2, 8, 126)),
        (nn.TransformerEncoderLayer(8, 2, 16), (16, 2, 8)),
        (nn.BatchNorm3d(3), (8, 3, 4, 4, 4)),
        (Sum(), (2, 16, 8)),
    ],
)  # fmt: skip
def test_made_up_inputs(model, shape):
    found = audit(model)
    assert found.norms[0].shape == shape and found.norms[0].verified
    # The same every time.
    assert found.norms[0].identification == audit(model).norms[0].identification


def test_models_for_which_none_can_be_made_up():
    class Needs(nn.Module):
        def forward(self, graph):
            return graph.nodes

    with pytest.raises(ArgumentError, match=r"forward\(graph\) of Needs.*Give the inputs"):
        audit(Needs())
    narrow = nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 2))
    with pytest.raises(ArgumentError, match=r"its forward raised RuntimeError: .*Give the inputs"):
        audit(narrow)
