"""audit finds norms that are written out in operators, in every spelling, and no near misses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from axisnorm.lens.audit import audit
from axisnorm.scheme import Scheme

SEED = torch.Generator().manual_seed(20)


def randn(*shape):
    return torch.randn(*shape, generator=SEED) * 2 + 0.7


TOKENS, IMAGES, LAST = (4, 6, 8), (4, 6, 5, 3), (4, 5, 3, 8)


class Written(nn.Module):
    """A function of a tensor and the module's parameters, between two layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        for name, size in (("w", 8), ("b", 8), ("w6", 6), ("b6", 6)):
            setattr(self, name, nn.Parameter(torch.rand(size, generator=SEED) + 0.5))

    def forward(self, x):
        return self.function(self, x * 1.5).tanh()


def layer(m, x):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * m.w + m.b


def layer_addcmul(m, x):
    variance, mean = torch.var_mean(x, -1, keepdim=True, unbiased=False)
    return torch.addcmul(m.b, (x - mean) * torch.rsqrt(variance + 1e-6), m.w)


def layer_sample(m, x):
    return m.w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + m.b


def layer_scale_and_shift(m, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    scale = m.w * (variance + 1e-5).pow(-0.5)
    return x * scale + (m.b - mean * scale)


def layer_raw_moments(m, x):
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(variance + 1e-5) * m.w


def layer_einsum(m, x):
    d = x - (torch.einsum("bsd->bs", x) / 8)[..., None]
    variance = torch.einsum("bsd,bsd->bs", d, d) / 8
    return d * torch.rsqrt(variance[..., None] + 1e-5)


def layer_sums(m, x):
    d = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return d / ((d * d).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * m.w + m.b


def layer_in_place(m, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return x.sub_(mean).mul_(torch.rsqrt(variance + 1e-5)).mul_(m.w).add_(m.b)


def layer_std_mean(m, x):
    deviation, mean = torch.std_mean(x, -1, keepdim=True)
    return (x - mean) / (deviation + 1e-5)


def rms(m, x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + m.w)


def rms_of_length(m, x):
    return F.normalize(x, dim=-1) * 8**0.5 * m.w


def rms_vector_norm(m, x):
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / 8**0.5
    return x / (size + 1e-6) * m.w


def simple(m, x):
    return x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6) * m.w


def group(m, x):
    n, c, h, w = x.shape
    g = x.view(n, 3, -1)
    mean, variance = g.mean(-1, keepdim=True), g.var(-1, keepdim=True, unbiased=False)
    y = ((g - mean) / torch.sqrt(variance + 1e-5)).view(n, c, h, w)
    return y * m.w6.view(1, -1, 1, 1) + m.b6.view(1, -1, 1, 1)


def group_five_axes(m, x):
    g = x.reshape(x.shape[0], 3, 2, *x.shape[2:])
    mean = g.mean((2, 3, 4), keepdim=True)
    variance = ((g - mean) ** 2).mean((2, 3, 4), keepdim=True)
    y = ((g - mean) / (variance + 1e-5).sqrt()).reshape(x.shape)
    return y * m.w6[None, :, None, None] + m.b6[None, :, None, None]


def instance(m, x):
    mean, deviation = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (deviation + 1e-5) * m.w6[:, None, None]


def instance_in_steps(m, x):
    mean = x.mean(2, keepdim=True).mean(3, keepdim=True)
    variance = (x - mean).pow(2).mean(2, keepdim=True).mean(3, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * m.w6[:, None, None]


def instance_pooled(m, x):
    d = x - F.adaptive_avg_pool2d(x, 1)
    return d * torch.rsqrt(F.adaptive_avg_pool2d(d * d, 1) + 1e-5) * m.w6[:, None, None]


def batch(m, x):
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    y = (x - mean[None, :, None, None]) / torch.sqrt(variance[None, :, None, None] + 1e-5)
    return y * m.w6[None, :, None, None]


def pixel(m, x):
    x = x.permute(0, 2, 3, 1)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return ((x - mean) * torch.rsqrt(variance + 1e-6) * m.w6 + m.b6).permute(0, 3, 1, 2)


def pixel_of_axis_one(m, x):
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    x = (x - mean) / torch.sqrt(variance + 1e-6)
    return m.w6[:, None, None] * x + m.b6[:, None, None]


def length(m, x):
    return x / x.norm(dim=-1, keepdim=True)


def no_root(m, x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5)


def layer_written_to_out(m, x):
    d = torch.empty_like(x)
    torch.sub(x, x.mean(-1, keepdim=True), out=d)
    return d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * m.w


def scaled_before(m, x):
    """A number, of a parameter or of the code, times the input, not times the normalized value."""
    return m.w[:1].detach() * x * 3.0 * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def length_of_inverse(m, x):
    return x * x.pow(2).sum(-1, keepdim=True).rsqrt().clamp(max=1e12)


def sample_by_division(m, x):
    d = x - x.mean(-1, keepdim=True)
    return d / ((d * d).sum(-1, keepdim=True) / (x.shape[-1] - 1) + 1e-5).sqrt()


SPELLINGS = [
    (layer_written_to_out, TOKENS, "... [d]; affine=d"),
    (scaled_before, TOKENS, "... [d]; center=false"),
    (length_of_inverse, TOKENS, "... [d]; center=false; scale=l2; eps=0"),
    (sample_by_division, TOKENS, "... [d]; correction=1"),
    (layer, TOKENS, "... [d]; affine=d"),
    (layer_addcmul, TOKENS, "... [d]; affine=d; eps=1e-06"),
    (layer_sample, TOKENS, "... [d]; affine=d; correction=1; eps=1e-06; eps_placement=std"),
    (layer_scale_and_shift, TOKENS, "... [d]; affine=d"),
    (layer_raw_moments, TOKENS, "... [d]; affine=d"),
    (layer_einsum, TOKENS, "... [d]"),
    (layer_sums, TOKENS, "... [d]; affine=d"),
    (layer_in_place, TOKENS, "... [d]; affine=d"),
    (layer_std_mean, TOKENS, "... [d]; correction=1; eps_placement=std"),
    (rms, TOKENS, "... [d]; affine=d; center=false; eps=1e-06; weight_offset=1"),
    (rms_of_length, TOKENS, "... [d]; affine=d; center=false; eps=1e-12; eps_placement=max"),
    (rms_vector_norm, TOKENS, "... [d]; affine=d; center=false; eps=1e-06; eps_placement=std"),
    (simple, TOKENS, "... [d]; affine=d; center=false; scale=std; correction=1; eps=1e-06"),
    (group, IMAGES, "n (g=3 [c]) [...]; affine=g c"),
    (group_five_axes, IMAGES, "n (g=3 [c]) [...]; affine=g c"),
    (instance, IMAGES, "n c [...]; affine=c; eps_placement=std"),
    (instance_in_steps, IMAGES, "n c [...]; affine=c"),
    (instance_pooled, IMAGES, "n c [...]; affine=c"),
    (batch, IMAGES, "[n] c [...]; affine=c"),
    (pixel, IMAGES, "n [c] ...; affine=c; eps=1e-06"),
    (pixel_of_axis_one, IMAGES, "n [c] ...; affine=c; eps=1e-06"),
    (length, TOKENS, "... [d]; center=false; scale=l2; eps=0"),
    (no_root, TOKENS, "... [d]; scale=var; eps_placement=std"),
]


@pytest.mark.parametrize(("function", "shape", "scheme"), SPELLINGS)
def test_spellings(function, shape, scheme):
    (norm,) = audit(Written(function), randn(*shape)).norms
    assert norm.kind == "fragment" and norm.declared is None and norm.verified
    assert norm.scheme == Scheme(scheme)
    assert norm.shape == shape and len(norm.nodes) >= 2


@pytest.mark.parametrize("function", [layer, rms, group, pixel, layer_scale_and_shift])
def test_a_module_that_is_all_of_it_is_named(function):
    """The innermost module whose input and output are the norm's own."""

    class Anything(Written):
        def forward(self, x):
            return self.function(self, x)

    shape = IMAGES if function in (group, pixel) else TOKENS
    expected = next(scheme for f, _, scheme in SPELLINGS if f is function)
    (norm,) = audit(nn.Sequential(nn.Dropout(), Anything(function)), randn(*shape)).norms
    assert (norm.path, norm.cls, norm.kind) == ("1", "Anything", "module")
    assert norm.verified and norm.scheme == Scheme(expected) and norm.calls == 1


@pytest.mark.parametrize("shape", [(4, 6, 8), (2, 3, 6, 8)])
def test_one_after_another(shape):
    """The output of one, whether or not anything lies between, is the input of the next."""

    def two(m, x):
        return layer(m, layer_in_place(m, rms(m, x)) * m.w)

    norms = audit(Written(two), randn(*shape)).norms
    assert [norm.cls for norm in norms] == ["RMSNorm", "LayerNorm", "LayerNorm"]
    assert all(norm.verified for norm in norms)
    assert [f.code for norm in norms for f in norm.findings].count("normalized-twice") == 1


def test_two_of_a_kind_are_two():
    def both(m, x):
        return length(m, x) + length(m, x.flip(0))

    assert [norm.calls for norm in audit(Written(both), randn(*TOKENS)).norms] == [1, 1]


# --------------------------------------------------------------------------------------------
# Near misses


def magnitude(m, x):
    return x.pow(2).sum(-1).sqrt()


def magnitude_that_scales(m, x):
    return x * x.pow(2).mean(-1, keepdim=True).sqrt()


def scaled_by_all(m, x):
    return x * x.pow(2).mean().sqrt()


def only_centred(m, x):
    return x - x.mean(1, keepdim=True)


def softmax(m, x):
    e = torch.exp((x - x.amax(-1, keepdim=True)) / 0.7)
    return e / e.sum(-1, keepdim=True)


def attention(m, x):
    return torch.softmax(x @ x.transpose(1, 2) / 8**0.5, -1) @ x


def squeeze(m, x):
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


def variance_alone(m, x):
    return x.var(-1)


def standardized(m, x):
    return (x - m.b) / torch.sqrt(m.w + 1e-5)


def response(m, x):
    size = x.norm(dim=(1, 2), keepdim=True)
    return m.w * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + m.b + x


def local_response(m, x):
    return F.local_response_norm(x, 3)


def of_another(m, x):
    """Divided by the deviation of something else."""
    return (x - x.mean(-1, keepdim=True)) / (torch.randn_like(x).std(-1, keepdim=True) + 1e-5)


def of_weights(m, x):
    rows = m.w[None] + torch.arange(3.0)[:, None].cos() * m.b
    return F.linear(x, layer(m, rows))


def two_axes(m, x):
    """The mean over one axis, the deviation over another."""
    return (x - x.mean(1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


def clipped(m, x):
    """At most of length 1: shorter ones stay as they are."""
    return x * (1 / (x.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0)


def clipped_below(m, x):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)


def similarity(m, x):
    return x * F.cosine_similarity(x, x.flip(1), dim=-1)[..., None]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (clipped, TOKENS), (clipped_below, TOKENS), (similarity, TOKENS),
        (magnitude, TOKENS), (magnitude_that_scales, TOKENS), (scaled_by_all, TOKENS),
        (only_centred, TOKENS), (softmax, TOKENS), (attention, TOKENS), (squeeze, IMAGES),
        (variance_alone, TOKENS), (standardized, TOKENS), (response, LAST),
        (local_response, IMAGES), (of_another, TOKENS), (of_weights, TOKENS), (two_axes, TOKENS),
    ],
)  # fmt: skip
def test_near_misses_are_no_norms(function, shape):
    assert audit(Written(function), randn(*shape)).norms == ()


# --------------------------------------------------------------------------------------------
# Half types, control flow, memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function", [layer, layer_addcmul, pixel, rms, scaled_before, sample_by_division]
)
def test_all_in_half_precision(function, dtype):
    """Where the operators round in between, the norm is still known."""
    shape = IMAGES if function is pixel else TOKENS
    (norm,) = audit(Written(function).to(dtype), randn(*shape).to(dtype)).norms
    expected = Scheme(next(scheme for f, _, scheme in SPELLINGS if f is function))
    # How often they round is no part of the scheme: they do so after every step.
    assert norm.scheme.replace(rounding="once") == expected


def test_an_eps_that_a_transform_rounds_is_the_number_that_was_written():
    """Under vmap the number in the code becomes a tensor of the half type."""

    def normalized(row):
        return (row - row.mean()) / (row.var(correction=0) + 1e-5).sqrt()

    def mapped(m, x):
        return torch.vmap(torch.vmap(normalized))(x)

    (norm,) = audit(Written(mapped).bfloat16(), randn(*TOKENS).bfloat16()).norms
    assert norm.eps == 1e-5


def test_branches_that_depend_on_the_data_and_shared_modules():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.written = Written(layer)

        def forward(self, x):
            for _ in range(3):
                x = self.written(x)
                if x.mean() > 100:
                    x = rms(self.written, x)
            return {"x": x, "all": [x, x]}

    (norm,) = audit(Model(), randn(*TOKENS)).norms
    assert norm.calls == 3 and norm.verified and norm.path == "written:LayerNorm"
    assert 0 < norm.time_share < 1


def test_activations_are_not_kept():
    """Of sixty layers' activations few are alive at once, however they are connected."""
    alive, most = [], 0

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(8, generator=SEED) + 0.5)
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            import weakref

            nonlocal most
            mean = x.mean(-1, keepdim=True)
            y = (x - mean) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * self.w
            # A gate of the kind that no norm is: it never ends.
            y = self.fc(y) * torch.sigmoid(x.pow(2).mean(-1, keepdim=True).sqrt())
            alive.append(weakref.ref(y))
            most = max(most, sum(ref() is not None for ref in alive))
            return x + y

    found = audit(nn.Sequential(*[Block() for _ in range(60)]), randn(*TOKENS))
    assert len(found.norms) == 60 and all(norm.verified for norm in found.norms)
    assert most <= 16
