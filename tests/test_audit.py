"""audit: what every norm of a model computes, and that nothing is changed by asking."""

import functools
import json
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axisnorm.nn
from axisnorm import reference
from axisnorm.lens.audit import audit
from axisnorm.lens.identify import rivals, tell_apart, tolerance
from axisnorm.lens.rendering.folding import folded
from axisnorm.scheme import ArgumentError, Scheme

SEED = torch.Generator().manual_seed(20)


def randn(*shape, scale=1.0, offset=0.0):
    return torch.randn(*shape, generator=SEED) * scale + offset


def codes(findings):
    return [finding.code for finding in findings]


def only(found):
    (norm,) = found.norms
    return norm


# --------------------------------------------------------------------------------------------
# What is computed


@pytest.mark.parametrize(
    ("module", "shape", "scheme", "words", "means"),
    [
        (nn.LayerNorm(8), (4, 6, 8), "... [d]; affine=d", "one mean a token", 24),
        (nn.LayerNorm((6, 8)), (4, 6, 8), "... [s d]; affine=s d", "one mean a sample", 4),
        (nn.LayerNorm(8, elementwise_affine=False), (4, 6, 8), "... [d]", "one mean a token", 24),
        (nn.RMSNorm(8), (4, 6, 8), "... [d]; affine=d; center=false; eps=none",
         "one root mean square a token", 24),
        (nn.GroupNorm(2, 6), (4, 6, 8), "n (g=2 [c]) [...]; affine=g c",
         "one mean a sample and group of channels", 8),
        (nn.BatchNorm1d(6), (4, 6, 8), "[n] c [...]; affine=c", "one mean a channel", 6),
        (nn.BatchNorm2d(6).eval(), (4, 6, 3, 3), "[n] c [...]; affine=c; statistics=running",
         "one running mean a channel", 6),
        (nn.InstanceNorm2d(6), (4, 6, 3, 3), "n c [...]", "one mean a sample and channel", 24),
        (nn.InstanceNorm1d(6, track_running_stats=True).eval(), (4, 6, 8),
         "n c [...]; affine=c; statistics=running", "one running mean a channel", 6),
        (nn.InstanceNorm1d(6), (6, 8), "c [...]", "one mean a channel", 6),
        (axisnorm.nn.LayerNorm(8), (4, 6, 8), "... [d]; affine=d", "one mean a token", 24),
        (axisnorm.nn.LayerNorm2d(6), (4, 6, 3, 3), "n [c] ...; affine=c; eps=1e-06",
         "one mean a pixel", 36),
        (axisnorm.nn.BatchNorm2d(6), (4, 6, 3, 3), "[n] c [...]; affine=c",
         "one mean a channel", 6),
    ],
)  # fmt: skip
def test_modules_compute_what_they_declare(module, shape, scheme, words, means):
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in module.named_buffers():
        if name.startswith("running"):
            nn.init.uniform_(buffer, 0.5, 2.0)
    norm = only(audit(module, randn(*shape, scale=2.0, offset=0.5)))
    assert norm.verified
    assert norm.scheme == norm.declared == Scheme(scheme)
    assert (norm.in_words, norm.num_statistics) == (words, means)
    best = norm.identification.best
    assert best.residual <= best.tolerance < 1e-4
    assert all(c.residual > 10 * c.tolerance or "eps" in c.name or "sample dev" in c.name
               for c in norm.identification.ruled_out)  # fmt: skip
    assert not norm.findings


def test_rivals_are_ruled_out_by_how_far_they_are_off():
    norm = nn.LayerNorm(8)
    x = randn(4, 6, 8, offset=0.3)
    found = only(audit(norm, x)).identification
    off = {c.name: c.residual for c in found.ruled_out}
    y = norm(x).detach().double()
    for name, scheme in [
        ("one mean a sample", Scheme("b [s d]")),
        ("one mean a position (BatchNorm)", Scheme("[b] s [d]")),
        ("no mean subtracted (RMSNorm)", Scheme("... [d]", center=False)),
        ("sample deviation (divisor n - 1)", Scheme("... [d]", correction=1)),
        ("eps outside the root", Scheme("... [d]", eps_placement="std")),
    ]:
        expected = (reference.forward(x.double(), scheme)[0] - y).abs().max().item()
        assert off[name] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype(dtype):
    module = nn.Sequential(nn.LayerNorm(64), nn.GroupNorm(2, 6)).to(dtype)
    for norm in audit(module, randn(4, 6, 64, offset=3.0).to(dtype)).norms:
        assert norm.verified and norm.dtype == str(dtype).removeprefix("torch.")


def test_functional_calls():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((8,), 2.0))

        def forward(self, x):
            noise = [randn(4, 6, 8) for _ in range(6)]
            F.layer_norm(noise[0], (8,), self.weight)
            F.rms_norm(noise[1], (8,), self.weight)
            F.rms_norm(noise[2], (6, 8), eps=1e-3)
            F.group_norm(noise[3], 3)
            F.instance_norm(noise[4], weight=self.weight[:6])
            F.batch_norm(noise[5], None, None, training=True)
            axisnorm.layer_norm(x, 8)
            F.layer_norm(noise[0], (8,), self.weight)
            return x

    found = audit(nn.Sequential(Model()), randn(4, 6, 8))
    assert [(norm.path, str(norm.scheme)) for norm in found.norms] == [
        ("0:layer_norm", "... [d]; affine=d"),
        ("0:rms_norm", "... [d]; affine=d; center=false; eps=none"),
        ("0:rms_norm", "... [s d]; center=false; eps=0.001"),
        ("0:group_norm", "n (g=3 [c]) [...]"),
        ("0:instance_norm", "n c [...]; affine=c"),
        ("0:batch_norm", "[n] c [...]"),
        ("0:normalize", "... [d]"),
    ]
    assert all(norm.verified and norm.kind == "function" for norm in found.norms)
    assert [norm.calls for norm in found.norms] == [2, 1, 1, 1, 1, 1, 1]


def test_a_square_that_is_no_norm_is_none():
    class Model(nn.Module):
        def forward(self, x):
            size = x.pow(2).mean(-1, keepdim=True).sqrt()
            return x.pow(2).mean(1).add_(1e-6).rsqrt() * size.mean()

    assert audit(Model(), randn(4, 6, 8)).norms == ()


def test_execution_order_calls_and_shares():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first, self.never = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x):
            for _ in range(5):
                x = self.first(x) + 1.0
            return self.last(x)

    found = audit(Model(), randn(4, 6, 8))
    assert [(n.path, n.calls) for n in found.norms] == [("first", 5), ("last", 1), ("never", 0)]
    first, last, never = found.norms
    assert never.time_share is None and codes(never.findings) == ["not-run"]
    assert 0 < last.time_share < first.time_share < 1


def test_residual_sums():
    model = axisnorm.nn.AddLayerNorm(8, prenorm=True)
    x, residual = randn(4, 8), randn(4, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.plain = model, axisnorm.nn.AddRMSNorm(8)

        def forward(self, x, residual):
            y, h = self.norm(x, residual)
            return self.plain(y, residual=h)

    assert [norm.verified for norm in audit(Model(), x, residual=residual).norms] == [True, True]


def test_masks_are_part_of_the_norm():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = axisnorm.nn.LayerNorm((6, 8))

        def forward(self, x, mask):
            return self.norm(x, mask=mask)

    mask = torch.arange(6)[None, :, None] < torch.tensor([2, 3, 4, 6])[:, None, None]
    assert only(audit(Model(), randn(4, 6, 8), mask)).verified


# --------------------------------------------------------------------------------------------
# Classes of other libraries, and names that lie


class LlamaLike(nn.Module):
    """As in transformers."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size, generator=SEED) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        kind = hidden_states.dtype
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(kind)


class GemmaLike(LlamaLike):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class LayerNorm(nn.Module):
    """As the Annotated Transformer has it, and it cannot be printed."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.rand(size, generator=SEED) + 0.5)
        self.b_2 = nn.Parameter(torch.rand(size, generator=SEED))
        self.eps = eps

    def forward(self, x):
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (deviation + self.eps) + self.b_2

    def __repr__(self):
        raise RuntimeError("this module cannot be printed")


T5LayerNorm = type("T5LayerNorm", (LlamaLike,), {})


class SampleLayerNorm(nn.Module):
    """One mean a sentence under a name that says otherwise."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(8, generator=SEED) + 0.5)
        self.beta = nn.Parameter(torch.rand(8, generator=SEED))
        self.epsilon = 1e-5

    def forward(self, x):
        var, mean = torch.var_mean(x, (1, 2), keepdim=True, correction=0)
        return (x - mean) / torch.sqrt(var + self.epsilon) * self.gamma + self.beta


class LayerNorm2dLike(SampleLayerNorm):
    def forward(self, x):
        var, mean = torch.var_mean(x, 1, keepdim=True, correction=0)
        y = (x - mean) / torch.sqrt(var + self.epsilon)
        return y * self.gamma[:, None, None] + self.beta[:, None, None]


@pytest.mark.parametrize(
    ("module", "shape", "scheme", "found"),
    [
        (LlamaLike(8), (4, 6, 8), "... [d]; affine=d; center=false; eps=1e-06", []),
        (GemmaLike(8), (4, 6, 8), "... [d]; affine=d; center=false; eps=1e-06; weight_offset=1",
         []),
        (T5LayerNorm(8), (4, 6, 8), "... [d]; affine=d; center=false; eps=1e-06",
         ["class-name-lies"]),
        (LayerNorm(8, eps=1e-2), (4, 6, 8),
         "... [d]; affine=d; correction=1; eps=0.01; eps_placement=std", ["class-name-lies"]),
        (SampleLayerNorm(), (4, 6, 8), "b [s d]; affine=d", ["class-name-lies"]),
        (LayerNorm2dLike(), (4, 8, 5, 3), "n [c] ...; affine=c", []),
    ],
)  # fmt: skip
def test_foreign_classes_are_known_by_what_they_do(module, shape, scheme, found):
    norm = only(audit(module, randn(*shape, offset=0.5)))
    assert norm.declared is None and norm.verified
    assert str(norm.scheme) == scheme
    assert codes(norm.findings) == found


def test_names_lie_is_said_with_what_is_computed():
    """A class named LayerNorm that computes sample deviation + eps, and cannot be printed."""
    found = audit(nn.Sequential(LayerNorm(4, eps=0.0078125)), randn(3, 5, 4))
    (finding,) = found.findings
    assert finding.severity == "warning" and finding.path == "0"
    assert "n - 1" in finding.message and "outside the root" in finding.message
    assert "class-name-lies" in found.to_text(width=100, color=False)
    # Where eps is too small to show, its place is not claimed.
    (finding,) = audit(LayerNorm(8, eps=1e-9), randn(4, 6, 8)).findings
    assert "n - 1" in finding.message and "root" not in finding.message


@pytest.mark.parametrize(
    ("module", "rounding"), [(LlamaLike(256), "before_affine"), (GemmaLike(256), "once")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_show_where_it_is_rounded(module, rounding, dtype):
    norm = only(audit(module.to(dtype), randn(8, 16, 256).to(dtype)))
    assert norm.scheme.rounding == rounding
    assert all(other.rounding == rounding for other in norm.identification.indistinguishable)


def test_a_subclass_for_channels_first_images():
    """transformers' ConvNextLayerNorm: a torch.nn.LayerNorm that permutes around its forward."""

    class Permuted(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    for shape in ((2, 8, 5, 3), (2, 8, 8, 8)):
        norm = audit(Permuted(8), randn(*shape)).norms[-1]
        assert str(norm.scheme) == "n [c] ...; affine=c"
        assert norm.in_words == "one mean a pixel"


def test_parameters_of_two_shapes_are_no_norms():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(6, 1))
            self.c = nn.Parameter(torch.rand(6))

        def forward(self, x):
            return x * self.a

    class Less(Odd):
        def __init__(self):
            super().__init__()
            del self.b

    assert audit(nn.Sequential(Odd(), Less()), randn(4, 6, 8)).norms == ()


class Tiny(nn.Module):
    """An RMSNorm whose eps has a name of its own, or none."""

    def __init__(self, tiny, hidden=False):
        super().__init__()
        self.g = nn.Parameter(torch.rand(64, generator=SEED) + 0.5)
        if hidden:
            self.read = lambda: tiny
        else:
            self.tiny, self.read = tiny, lambda: self.tiny

    def forward(self, h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.read()) * self.g


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("tiny", [1e-2, 1e-4, 2e-5, 3e-6, 1e-8])
@pytest.mark.parametrize("hidden", [False, True])
def test_eps_is_fitted_or_not_determined(tiny, scale, hidden):
    found = audit(Tiny(tiny, hidden), randn(8, 16, 64, scale=scale))
    norm = only(found)
    assert norm.verified
    assert norm.scheme.replace(eps=1.0) == Scheme("... [d]; affine=d; center=false; eps=1")
    # Rounding of float32 leaves about this of the variance open.
    noise = 2e-6 * scale**2
    if norm.eps is None:
        assert tiny < noise
        assert codes(norm.findings) == ["eps-undetermined"]
        assert "(eps not determined)" in found.to_text(width=200, color=False)
        assert f"eps={tiny:g}" not in found.to_text(width=200, color=False)
    else:
        assert norm.eps == norm.scheme.eps and not norm.findings
        assert abs(norm.eps - tiny) <= (noise + 0.01 * tiny if hidden else 0)


def test_a_norm_that_nothing_fits_is_not_passed_over():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.rand(64, generator=SEED) + 0.5)

        def forward(self, x):
            return 1.7 * F.layer_norm(x, (64,)) * self.gain

    x = randn(8, 16, 64) * randn(8, 16, 1).exp()
    norm = audit(Scaled(), x).norms[-1]
    assert norm.cls == "Scaled" and codes(norm.findings) == ["not-verified"]
    assert "looks like a norm" in norm.findings[0].message


def test_the_scale_of_a_small_branch_is_no_norm():
    """Taken for a bias, a scale of 1 is all that is left of an output near 0."""

    class LayerScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.lambda1 = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return x * self.lambda1

    x = randn(8, 16, 64) * randn(8, 16, 1).exp() * 1e-3
    assert audit(LayerScale(), x).norms == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_without_digits_are_no_mismatch(dtype):
    """Below the normal numbers every rounding is as large as the output."""
    module = nn.BatchNorm1d(6).eval().to(dtype)
    x = torch.linspace(-9, 9, 24).reshape(4, 6) * torch.finfo(dtype).smallest_normal * 1e-3
    norm = only(audit(module, x.to(dtype)))
    assert "declared-mismatch" not in codes(norm.findings)


@pytest.mark.parametrize("x", [torch.zeros(4, 6, 8), torch.full((4, 6, 8), 3.0)])
@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.RMSNorm(8), LayerNorm(8)])
def test_constant_inputs_prove_nothing(module, x):
    norm = only(audit(module, x))
    assert not norm.verified and norm.scheme is None
    assert codes(norm.findings) == ["not-verified"]
    assert "tells nothing apart" in norm.findings[0].message
    # A call that shows something counts instead.
    assert only(audit(nn.Sequential(module, Noise(), module), x)).verified


class Noise(nn.Module):
    def forward(self, x):
        return torch.linspace(-1, 3, x.numel()).reshape(x.shape).cos() + 0.2


def test_an_undeclared_class_on_a_centred_input():
    x = randn(4, 6, 8)
    found = audit(LlamaLike(8), x - x.mean(-1, keepdim=True))
    norm = only(found)
    assert not norm.verified
    assert norm.in_words == "LayerNorm or RMSNorm (this input cannot tell)"
    assert codes(norm.findings) == ["not-verified"]
    assert norm.in_words in found.to_text(width=200, color=False)


def test_an_unknown_norm_is_not_verified():
    class StrangeNorm(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    norm = only(audit(StrangeNorm(), randn(4, 6, 8)))
    assert norm.scheme is None and not norm.verified
    assert codes(norm.findings) == ["not-verified"]


def test_leaves_that_only_scale_are_no_norms():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.rand(8))

        def forward(self, x):
            return x * self.gamma

    model = nn.Sequential(Scale(), nn.PReLU(), nn.Linear(8, 8), nn.Dropout())
    assert audit(model, randn(4, 6, 8)).norms == ()


def test_a_subclass_that_computes_something_else():
    class Clipped(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x).clamp(-1, 1)

    inner, norm = audit(nn.Sequential(Clipped(8)), randn(4, 6, 8)).norms
    assert inner.path == "0:layer_norm" and inner.verified
    assert norm.cls == "Clipped" and norm.scheme is None and not norm.verified
    assert "declared-mismatch" in codes(norm.findings)


# --------------------------------------------------------------------------------------------
# Findings


def test_group_count_in_the_place_of_eps():
    """BatchNorm2d(64, 32, track_running_stats=False), as a documentation page has it."""
    model = nn.Sequential(nn.BatchNorm2d(64, 32, track_running_stats=False)).eval()
    found = audit(model, randn(4, 64, 5, 5))
    assert codes(found.findings) == ["implausible-eps", "batch-statistics-in-eval"]
    assert "GroupNorm(32, 64)" in found.findings[0].remedy
    assert found.suspicious


def test_instance_norm_of_tokens():
    """InstanceNorm1d fed (N, L, C)."""
    module = nn.InstanceNorm1d(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, about the same
        norm = only(audit(module, randn(4, 6, 8)))
    assert codes(norm.findings) == ["layout-mismatch"]
    assert "axis 2 of (4, 6, 8) has 8" in norm.findings[0].message


def test_momentum_of_another_framework():
    found = audit(nn.BatchNorm1d(6, eps=1e-3, momentum=0.99), randn(4, 6, 8))
    assert codes(found.findings) == ["framework-momentum"]
    assert "momentum=0.01" in found.findings[0].remedy
    assert not audit(nn.BatchNorm1d(6, eps=1e-3, momentum=0.01), randn(4, 6, 8)).findings


def test_several_eps():
    model = nn.Sequential(
        nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8, eps=1e-12), nn.GELU(), nn.RMSNorm(8, eps=1e-6)
    )
    found = audit(model, randn(4, 6, 8))
    assert codes(found.findings) == ["mixed-eps"]
    assert "1e-12 (1 x), 1e-05 (1 x)" in found.findings[0].message
    assert not found.suspicious


def test_one_element_a_mean():
    found = audit(axisnorm.nn.InstanceNorm2d(3), randn(2, 3, 1, 1))
    assert codes(found.findings) == ["degenerate-statistics"]


def test_fused_encoder_layers_bypass_their_norms():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = randn(4, 3, 8)
    inference = audit(model.eval(), x)
    assert [norm.path for norm in inference.norms] == [
        "layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2",
    ]  # fmt: skip
    assert set(codes(inference.findings)) == {"bypassed"}
    assert not any(norm.verified for norm in inference.norms)
    training = audit(model.train(), x)
    assert all(norm.verified for norm in training.norms) and not training.findings


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_passed_over():
    """Those that TransformerEncoder makes of padded inputs."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    padding = torch.arange(6)[None] >= torch.tensor([6, 3, 4, 6])[:, None]
    found = audit(nn.TransformerEncoder(layer, 2).eval(), randn(4, 6, 8),
                  src_key_padding_mask=padding)  # fmt: skip
    assert len(found.norms) == 4 and set(codes(found.findings)) == {"bypassed"}
    rows = torch.nested.nested_tensor([randn(2, 8), randn(3, 8)])
    norm = only(audit(nn.Sequential(nn.LayerNorm(8)), rows))
    assert not norm.verified and "nested" in norm.findings[0].message


@pytest.mark.parametrize("x", [torch.zeros(0, 6, 8), torch.full((4, 6, 8), float("nan"))])
def test_inputs_that_show_nothing(x):
    norm = only(audit(nn.LayerNorm(8), x))
    assert codes(norm.findings) == ["not-verified"] and not norm.verified


def test_a_norm_that_overwrites_its_input():
    class InPlace(nn.LayerNorm):
        def forward(self, x):
            return x.copy_(super().forward(x))

    norm = audit(InPlace(8), randn(4, 6, 8)).norms[-1]
    assert "overwrites its own input" in norm.findings[0].message


# --------------------------------------------------------------------------------------------
# Nothing changes


def test_nothing_is_changed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x):
            random.random()
            self.norm.eval()
            self.norm.train()
            return self.drop(self.norm(x)).mul_(2.0)

    model = Model()
    model.drop.eval()
    x = randn(4, 8)
    kept = x.clone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: id(value) for name, value in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), torch.rand(2)
    random.seed(3)
    torch.manual_seed(3)
    audit(model, x)
    assert (random.random(), torch.rand(2).tolist()) == (expected[0], expected[1].tolist())
    assert [module.training for module in model.modules()] == modes
    assert {name: id(value) for name, value in model.named_buffers()} == buffers
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(x, kept)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_nothing_is_changed_when_the_model_raises():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            self.norm(x)
            self.eval()
            raise KeyError("in the middle")

    model = Model()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="in the middle"):
        audit(model, randn(4, 8))
    assert model.training and model.norm.training
    assert model.norm.num_batches_tracked == 0 and not model.norm.running_mean.any()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_exception_that_the_model_catches():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.norm = Fails(), nn.LayerNorm(8)

        def forward(self, x):
            with pytest.raises(ValueError, match="on purpose"):
                self.fails(x)
            return self.norm(F.layer_norm(x, (8,)))

    assert [n.path for n in audit(Model(), randn(4, 8)).norms] == ["layer_norm", "norm"]


def test_inference_mode_and_compiled_models():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return F.rms_norm(self.norm(x), (8,))

    model, x = Model(), randn(4, 8)
    with torch.inference_mode():
        found = audit(model, torch.ones(4, 8).cumsum(1))
    assert [norm.path for norm in found.norms] == ["norm", "rms_norm"]
    compiled = audit(torch.compile(model, backend="eager"), x)
    assert [norm.verified for norm in compiled.norms] == [True, True]


def test_wrong_use():
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        audit(functools.partial(F.layer_norm), randn(4, 8))
    with pytest.raises(ArgumentError, match=r"config\.json"):
        audit("/no/such/directory")
    with pytest.raises(ArgumentError, match="lazy modules"):
        audit(nn.Sequential(nn.LazyLinear(8), nn.LayerNorm(8)), randn(4, 8))
    with pytest.raises(ArgumentError, match="meta device"):
        audit(nn.LayerNorm(8, device="meta"), randn(4, 8))


# --------------------------------------------------------------------------------------------
# Reports, and the test of candidates


def test_report_groups_identical_norms():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(12)])
    text = audit(blocks, randn(4, 6, 8)).to_text(width=100, color=False)
    assert "{0..11}.1  x12" in text
    assert "one mean a token" in text and "12 of 12" in text
    assert max(map(len, text.splitlines())) <= 100
    assert folded(["a.1.b", "a.3.b", "a.7.b"]) == "a.{1,3,7}.b"


def test_json():
    data = json.loads(audit(nn.Sequential(nn.LayerNorm(8)), randn(4, 6, 8)).to_json())
    assert list(data) == [
        "schema",
        "model",
        "source",
        "seconds",
        "suspicious",
        "norms",
        "findings",
    ]
    (norm,) = data["norms"]
    assert norm["path"] == "0" and norm["scheme"] == "... [d]; affine=d" and norm["verified"]
    assert norm["identification"]["best"]["axes"] == [2]


def test_large_tensors_are_compared_on_whole_groups():
    x = randn(64, 512, 40)
    weight = torch.rand(40, generator=SEED)
    y = F.layer_norm(x, (40,), weight)
    scheme = Scheme.layer_norm()
    found = tell_apart(x, y, [("own", scheme), *rivals(scheme, x.shape)], weight=weight)
    assert found.best.name == "own" and len(found.ruled_out) >= 6
    # BatchNorm's channels are cut, and its parameters with them.
    images = randn(256, 40, 16, 16)
    y = F.batch_norm(images, None, None, weight, weight, training=True)
    batch = Scheme.batch_norm()
    found = tell_apart(images, y, [("own", batch)], weight=weight, bias=weight)
    assert found.best is not None and found.best.residual < 1e-5


def test_numpy_pairs():
    x = np.array([[1.0, 0.0, 0.0, 0.0]])
    y = np.array([[1.5, -0.5, -0.5, -0.5]])
    plain = Scheme.layer_norm(eps=0)
    found = tell_apart(x, y, [("LayerNorm", plain), ("Bessel", plain.replace(correction=1))])
    assert found.best.name == "Bessel"
    assert tell_apart(x, y, [("LayerNorm", plain)]).best is None


def test_tolerance_grows_with_the_roundings():
    assert tolerance("float64", 10, 1.0) < tolerance("float32", 10, 1.0) < 2e-6
    assert tolerance("float32", 10, 1.0) < tolerance("float32", 1 << 20, 1.0)
    assert tolerance("float32", 10, 1.0) < tolerance("float32", 10, 1.0, offset=1e4)
    assert tolerance("float16", 10, 1.0) < tolerance("bfloat16", 10, 1.0) < 0.01
