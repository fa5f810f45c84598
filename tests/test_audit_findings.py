"""Every finding of an audit: a model on which it is made, and its healthy twin on which not."""

import copy
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axisnorm.nn
from axisnorm.lens.audit import audit
from axisnorm.lens.models.findings import CODES

SEED = torch.Generator().manual_seed(20)


def randn(*shape, scale=1.0):
    return torch.randn(*shape, generator=SEED) * scale + 0.3


class Own(nn.Module):
    """A norm over the last axis from another library."""

    def __init__(self, size=16, weight=None, **how):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size, generator=SEED) + 0.5)
        if weight is not None:
            self.weight.data = weight
        self.how = {"eps": 1e-5, "offset": 0.0, "correction": 0, "outside": False, "root": 0.5,
                    "center": True, "cast": False, **how}  # fmt: skip

    def forward(self, x):
        how = self.how
        kind = x.dtype
        if how["cast"]:
            x = x.float()
        if how["center"]:
            variance = x.var(-1, keepdim=True, correction=how["correction"])
            x = x - x.mean(-1, keepdim=True)
        else:
            variance = x.pow(2).mean(-1, keepdim=True)
        if how["outside"]:
            y = x / (variance.sqrt() + how["eps"])
        else:
            y = x / (variance + how["eps"]) ** how["root"]
        if how["offset"]:
            return (y * (how["offset"] + self.weight)).to(kind)
        return (y * self.weight).to(kind)


class CalledNorm(Own):
    pass


class LayerNorm(Own):
    """Under a name that says a formula."""


class Flat(nn.Module):
    """Batch statistics under no class at all."""

    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


def batch_norm(mean=0.3, var=1.0, size=8, momentum=0.1, eps=1e-5):
    module = nn.BatchNorm1d(size, momentum=momentum, eps=eps).eval()
    module.running_mean.fill_(mean)
    module.running_var.fill_(var)
    return module


def with_weight(module, values):
    module.weight.data = values
    return module


def padded(fill=0.0):
    x = randn(3, 6, 8)
    x[0, 2:], x[1, 4:] = fill, fill
    return x


def one_constant_row():
    x = randn(4, 6, 16)
    x[1, 2] = 3.0
    return x


class Fails(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).clamp(-1, 1)


class Reached(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.one, self.other, self.both = nn.LayerNorm(16), nn.LayerNorm(16), both

    def forward(self, x):
        x = self.one(x).tanh()
        return self.other(x) if self.both else x


class Twice(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.one, self.between, self.other = nn.LayerNorm(16), between, nn.BatchNorm1d(6)

    def forward(self, x):
        return self.other(self.between(self.one(x)))


def encoder(training):
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train(training)


def ranged(*shape):
    """Values around 0.3 with a spread of some hundreds."""
    return randn(*shape, scale=400.0)


TOKENS = randn(4, 6, 16)
ROW = torch.linspace(-0.3, 0.25, 16)

CASES = {
    # The code: its severity, a model and input on which it is found, and its healthy twin.
    "declared-mismatch": ("error", (Fails(16), TOKENS), (nn.LayerNorm(16), TOKENS)),
    "class-name-lies": ("warning", (LayerNorm(outside=True, eps=0.1), TOKENS), (LayerNorm(), TOKENS)),
    "batch-statistics-in-eval": ("warning", (Flat().eval(), TOKENS), (Flat(), TOKENS)),
    "layout-mismatch": ("warning", (nn.InstanceNorm1d(16), TOKENS),
                        (nn.InstanceNorm1d(6), TOKENS)),
    "degenerate-statistics": ("warning", (axisnorm.nn.InstanceNorm2d(3), randn(2, 3, 1, 1)),
                              (axisnorm.nn.InstanceNorm2d(3), randn(2, 3, 4, 4))),
    "batch-of-one": ("warning", (nn.BatchNorm2d(3), randn(1, 3, 4, 4)),
                     (nn.BatchNorm2d(3), randn(2, 3, 4, 4))),
    "padding-in-statistics": ("warning", (nn.LayerNorm((6, 8)), padded()),
                              (nn.LayerNorm((6, 8)), randn(3, 6, 8))),
    "constant-groups": ("note", (nn.LayerNorm(16), one_constant_row()), (nn.LayerNorm(16), TOKENS)),
    "normalized-twice": ("note", (Twice(nn.Dropout(0.0)), TOKENS), (Twice(nn.GELU()), TOKENS)),
    "implausible-eps": ("error", (nn.BatchNorm1d(6, 3), TOKENS), (nn.BatchNorm1d(6), TOKENS)),
    "eps-too-small": ("error", (Own(eps=1e-8).half(), TOKENS.half()),
                      (Own(eps=1e-6).half(), TOKENS.half())),
    "eps-dominates": ("note", (nn.LayerNorm(16), TOKENS * 1e-4), (nn.LayerNorm(16), TOKENS)),
    "sample-deviation": ("warning", (Own(correction=1), TOKENS), (Own(), TOKENS)),
    "eps-outside-root": ("note", (Own(outside=True), TOKENS), (Own(), TOKENS)),
    "wrong-root": ("error", (Own(root=1.0), TOKENS), (Own(), TOKENS)),
    "half-precision-overflow": ("note", (Own(center=False), ranged(4, 6, 16)),
                                (Own(center=False, cast=True, eps=1e-6), TOKENS)),
    "running-statistics-untouched": ("warning", (nn.BatchNorm1d(6).eval(), TOKENS),
                                     (batch_norm(size=6), TOKENS)),
    "running-statistics-mismatch": ("warning", (batch_norm(mean=5.0, size=6), TOKENS),
                                    (batch_norm(size=6), TOKENS)),
    "non-finite-parameters": ("error", (with_weight(nn.LayerNorm(16), ROW / 0.0), TOKENS),
                              (nn.LayerNorm(16), TOKENS)),
    "dead-channels": ("warning", (with_weight(nn.LayerNorm(16), torch.arange(16) // 2 * 1.0), TOKENS),
                      (nn.LayerNorm(16), TOKENS)),
    "weight-around-zero": ("warning", (Own(weight=ROW, center=False), TOKENS),
                           (Own(weight=1 + ROW, center=False), TOKENS)),
    "weight-around-one": ("warning", (Own(weight=1 + ROW / 9, offset=1.0), TOKENS),
                          (Own(weight=ROW / 9, offset=1.0), TOKENS)),
    "framework-momentum": ("warning", (batch_norm(momentum=0.999, size=6), TOKENS),
                           (batch_norm(momentum=0.001, size=6), TOKENS)),
    "framework-eps": ("note", (batch_norm(eps=1e-3, size=6), TOKENS),
                      (batch_norm(eps=1e-3, momentum=0.01, size=6), TOKENS)),
    "eps-undetermined": ("note", (type("Frozen", (nn.BatchNorm1d,), {})(6), TOKENS),
                         (nn.BatchNorm1d(6), TOKENS)),
    "mixed-eps": ("note", (nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.LayerNorm(16, 1e-6)), TOKENS),
                  (nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.LayerNorm(16)), TOKENS)),
    "bypassed": ("note", (encoder(False), TOKENS), (encoder(True), TOKENS)),
    "not-run": ("note", (Reached(False), TOKENS), (Reached(True), TOKENS)),
    "not-verified": ("warning", (nn.LayerNorm(16), torch.full((4, 6, 16), 2.0)),
                     (nn.LayerNorm(16), TOKENS)),
}  # fmt: skip


class Hidden(nn.Module):
    """A frozen batch norm whose eps stands in its forward alone."""

    def __init__(self):
        super().__init__()
        for name, value in (("weight", 1.5), ("bias", 0.2), ("running_mean", 0.3),
                            ("running_var", 0.8)):  # fmt: skip
            self.register_buffer(name, torch.full((6,), value))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None] + (self.bias - self.running_mean * scale)[:, None]


CASES["eps-undetermined"] = ("note", (Hidden(), TOKENS), (nn.BatchNorm1d(6), TOKENS))


def found(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, about the same
        return audit(copy.deepcopy(model), x).findings


def test_all_codes_have_a_case():
    # Those of ONNX files alone have theirs in test_audit_onnx.py.
    onnx = {"generated-data", "deprecated-operator", "instance-norm-as-group-norm", "scalar-scale",
            "loses-digits", "unit-weight", "custom-operators", "model-not-run"}  # fmt: skip
    assert list(CASES) and set(CASES) == set(CODES) - onnx


@pytest.mark.parametrize("code", CASES)
def test_findings(code):
    severity, ill, healthy = CASES[code]
    made = [one for one in found(*ill) if one.code == code]
    assert made
    for finding in made:
        assert finding.severity == severity
        assert finding.message.endswith(".") and finding.remedy.endswith(".")
    assert [one for one in found(*healthy) if one.code == code] == []


HEALTHY = [
    (nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)), TOKENS),
    (nn.Sequential(nn.Conv1d(6, 6, 3), nn.BatchNorm1d(6), nn.ReLU()), TOKENS),
    (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), randn(2, 3, 8, 8)),
    (Own(), TOKENS),
    (Own(center=False, offset=1.0, weight=ROW, cast=True).bfloat16(), TOKENS.bfloat16()),
]


@pytest.mark.parametrize(("model", "x"), HEALTHY)
def test_healthy_models_have_no_findings(model, x):
    assert found(model, x) == ()


# --------------------------------------------------------------------------------------------
# Quantities


def test_running_statistics_are_compared_channel_by_channel():
    module = nn.BatchNorm1d(3).eval()
    module.running_mean.copy_(torch.tensor([0.0, 4.0, 16.0]))
    module.running_var.copy_(torch.tensor([1.0, 4.0, 16.0]))
    x = torch.linspace(-1, 1, 64)[:, None].expand(64, 3) * math.sqrt(3)
    (finding,) = [f for f in found(module, x) if f.code == "running-statistics-mismatch"]
    # |0 - 4| / 2 and |0 - 16| / 4; 1 / 4 and 1 / 16 of the running variance, but for the 64 points.
    assert "off by 2 deviations in the median channel and 4 in the worst" in finding.message
    assert "variances are 0.26 and 0.064 times" in finding.message


def test_made_up_inputs_prove_no_mismatch():
    model = nn.Sequential(nn.Conv1d(6, 6, 3), batch_norm(mean=50.0, size=6)).eval()
    (finding,) = [f for f in audit(model).findings if f.code == "running-statistics-mismatch"]
    assert finding.severity == "note" and "made up" in finding.message


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_padding_is_known_from_the_mask(kind):
    """Whatever stands there: half of the second sample's positions are padding."""

    class Model(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x, attention_mask):
            return self.norm(x)

    mask = torch.ones(2, 6).to(kind)
    mask[1, 3:] = 0
    x = randn(2, 6, 16)
    for norm, fires in ((nn.BatchNorm1d(6), False), (nn.LayerNorm((6, 16)), True),
                        (nn.LayerNorm(16), False)):  # fmt: skip
        codes = {f.code: f for f in audit(Model(norm), x, attention_mask=mask).findings}
        assert ("padding-in-statistics" in codes) == fires
    assert "25%" in codes["padding-in-statistics"].message if fires else True
    swapped = Model(nn.BatchNorm1d(16))
    swapped.forward = lambda x, attention_mask: swapped.norm(x.transpose(1, 2))
    (finding,) = audit(swapped, x, attention_mask=mask).findings
    assert finding.code == "padding-in-statistics" and "25%" in finding.message


def test_masked_norms_have_no_padding_in_their_statistics():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = axisnorm.nn.LayerNorm((6, 8))

        def forward(self, x, mask):
            return self.norm(x, mask=mask[:, :, None])

    x = padded()
    assert audit(Model(), x, mask=x.abs().sum(-1) > 0).findings == ()


def test_overflow_in_half_precision_is_an_error():
    model = Own(center=False).half()
    x = ranged(4, 6, 16).half()
    codes = {f.code: f.severity for f in found(model, x)}
    assert codes.get("half-precision-overflow", "error") == "error"
    wide = {f.code for f in found(Own(center=False, cast=True).half(), x)}
    assert "half-precision-overflow" not in wide


def test_float16_without_an_eps_of_its_own():
    """torch computes in float32; others may not."""
    (finding,) = found(nn.LayerNorm(16, eps=1e-12).half(), TOKENS.half())
    assert (finding.code, finding.severity) == ("eps-too-small", "note")
    assert found(nn.LayerNorm(16, eps=1e-12), TOKENS) == ()


def test_gemma_checkpoint_in_a_llama():
    """All zeros: a Gemma that was not trained."""
    made = found(with_weight(nn.RMSNorm(16), torch.zeros(16)), TOKENS)
    (finding,) = [one for one in made if one.code == "dead-channels"]
    assert finding.code == "dead-channels" and "1 + weight" in finding.remedy


def test_exported_graphs_have_the_same_findings():
    model = nn.Sequential(nn.Conv1d(6, 6, 3), batch_norm(size=6, momentum=0.99, eps=1e-3), Flat())
    program = torch.export.export(model.eval(), (TOKENS,))
    codes = {f.code for f in audit(program, TOKENS).findings}
    assert {"framework-momentum", "batch-statistics-in-eval"} <= codes


def test_the_documentation_lists_every_code():
    text = (Path(__file__).parents[1] / "docs" / "findings.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text, re.MULTILINE)
    assert dict(rows) == CODES and len(rows) == len(CODES)
