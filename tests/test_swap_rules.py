"""What a swap keeps: hooks, modes, wrappers, pickles, the way back."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import axisnorm.nn
from axisnorm.lens.audit import audit
from axisnorm.lens.swap import swap
from axisnorm.lens.swapping import sums

SEED = torch.Generator().manual_seed(24)


def randn(*shape):
    return torch.randn(*shape, generator=SEED)


class Root(nn.Module):
    """An RMSNorm of another library."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.g


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Root(8), nn.Dropout(0.5))


class Output(nn.Module):
    """As BERT's: the norm of what came out and what went in."""

    def __init__(self, width, inner=None, p=0.1, norm=nn.LayerNorm):
        super().__init__()
        self.dense = nn.Linear(inner or width, width)
        self.norm = norm(width)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.norm(hidden_states + input_tensor)


class Block(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output(x, x.sin())


# --------------------------------------------------------------------------------------------
# The way there and back


def test_undo_leaves_what_was_changed_by_hand():
    changed = model()
    found = swap(changed, randn(2, 8))
    changed[1].__class__ = nn.LayerNorm
    parametrize.register_parametrization(changed[2], "g", nn.Identity())
    parametrized = type(changed[2])
    found.undo()
    found.undo()
    assert type(changed[1]) is nn.LayerNorm
    # Another class was made of it since: what that one needs is its business.
    assert type(changed[2]) is parametrized
    assert torch.isfinite(changed(randn(2, 8))).all()


def test_swapping_twice_changes_once():
    twice = model()
    first = swap(twice, randn(2, 8))
    kinds = [type(module) for module in twice]
    second = swap(twice, randn(2, 8))
    assert len(first.replaced) == 2 and not second.replaced
    assert {left.reason for left in second.left} == {"is this library's already"}
    second.undo()
    assert [type(module) for module in twice] == kinds
    first.undo()
    assert [type(module) for module in twice] == [nn.Linear, nn.LayerNorm, Root, nn.Dropout]


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_the_model_s_random_state(training):
    one = model().train(training)
    state = torch.get_rng_state()
    swap(one, randn(2, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training is training for module in one.modules())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_foreign_class_pickles_as_itself(protocol):
    one = Root(8)
    swap(nn.Sequential(one), randn(2, 8))
    assert type(one) is not Root
    again = pickle.loads(pickle.dumps(one, protocol=protocol))
    assert type(again) is Root and torch.equal(again.g, one.g)
    assert type(copy.deepcopy(one)) is Root
    assert repr(one) == "Root()" and list(one.state_dict()) == ["g"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_swapped_model_can_be_scripted_as_before(norm):
    """The generated forward takes any number of arguments, which TorchScript refuses."""
    one = nn.Sequential(nn.Linear(8, 8), Root(8), norm(8), Block(Output(8, p=0.0, norm=norm)))
    x = randn(3, 8)
    wanted = torch.jit.script(copy.deepcopy(one))(x)
    swapped = swap(one, x)
    assert len(swapped.replaced) == 3 and type(one[3].output) is not Output
    state = [id(tensor) for tensor in one.parameters()]
    scripted = torch.jit.script(one)
    torch.testing.assert_close(scripted(x), wanted, rtol=1e-5, atol=1e-5)
    assert [id(tensor) for tensor in one.parameters()] == state
    torch.testing.assert_close(one(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_shows_nothing(bad):
    one = nn.Sequential(nn.LayerNorm(8), Root(8))
    found = swap(one, torch.full((2, 8), bad))
    assert not found.replaced
    assert all("holds NaN or infinity" in left.reason for left in found.left)


def test_a_failure_while_probing_changes_nothing(monkeypatch):
    one = nn.Sequential(Root(8), Output(8))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = one

        def forward(self, x):
            return one[1](one[0](x), x)

    def fails(*_):
        raise KeyError("in the middle")

    monkeypatch.setattr(sums, "_traced", fails)
    with pytest.raises(KeyError, match="in the middle"):
        swap(Model(), randn(2, 8))
    assert [type(module) for module in one] == [Root, Output]
    assert type(one[1].norm) is nn.LayerNorm


def test_hooks_of_parameters_stay():
    one = model()
    seen = []
    one[2].g.register_hook(lambda grad: seen.append(grad))
    swap(one, randn(2, 8))
    one(randn(2, 8)).sum().backward()
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    "last",
    [
        lambda y: y.to_sparse(),
        lambda y: y.to_sparse_csr(),
        lambda y: torch.nested.nested_tensor([y, y[:1]]),
        lambda y: torch.nested.nested_tensor([y, y[:1]], layout=torch.jagged),
        lambda y: torch.complex(y, y),
    ],
    ids=["sparse", "rows", "nested", "jagged", "complex"],
)
def test_outputs_of_any_layout_are_compared(last):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return last(self.norm(x))

    model, x = Model(), torch.randn(3, 8)
    found = swap(model, x)
    assert [one.path for one in found.replaced] == ["norm"]
    assert found.largest_difference < 1e-5


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        one = model().eval()
        found = swap(one, randn(2, 8))
    assert len(found.replaced) == 2


def test_inputs_on_another_default_device():
    one, x = model(), randn(2, 8)
    with torch.device("meta"):
        found = swap(one, x)
    assert len(found.replaced) == 2


# --------------------------------------------------------------------------------------------
# Wrappers and compilers


def test_a_compiled_model_computes_by_this_library_afterwards():
    one = model().eval()
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(one, backend=backend, fullgraph=True)
    x = randn(2, 8)
    before = compiled(x)
    assert "axisnorm" not in graphs[-1]
    assert len(swap(compiled, x).replaced) == 2
    torch.testing.assert_close(compiled(x), before, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2 and graphs[-1].count("torch.ops.axisnorm.norm_fwd") == 2
    torch.compiler.reset()


@pytest.fixture
def group(tmp_path):
    """A process group of one."""
    distributed = torch.distributed
    if not distributed.is_available() or sys.platform == "darwin":
        pytest.skip("this build of torch has no process groups")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_model_in_ddp():
    one = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Root(8))
    wrapped = nn.parallel.DistributedDataParallel(one)
    original = copy.deepcopy(one)
    x = randn(4, 8)
    found = swap(wrapped, x)
    assert [replaced.path for replaced in found.replaced] == ["module.1", "module.2"]
    wrapped(x).square().sum().backward()
    original(x).square().sum().backward()
    for a, b in zip(one.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    found.undo()
    assert type(one[1]) is nn.LayerNorm and type(one[2]) is Root


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("each", [True, False])
def test_sharded_modules_are_left(each):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    one = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Root(8))
    mesh = init_device_mesh("cpu", (1,))
    if each:
        for module in one:
            fully_shard(module, mesh=mesh)
    fully_shard(one, mesh=mesh)
    kinds = [type(module) for module in one]
    found = swap(one, randn(4, 8))
    assert not found.replaced and [type(module) for module in one] == kinds
    reasons = [left.reason for left in found.left]
    assert len(reasons) == 2 and set(reasons) == {"FSDP shards its parameters"}
    assert isinstance(one, FSDPModule)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_modules_are_left():
    quantized = torch.ao.nn.quantized.LayerNorm(
        8, nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), scale=0.1, zero_point=0
    )
    one = nn.Sequential(torch.ao.nn.quantized.Quantize(0.1, 0, torch.quint8), quantized)
    found = swap(one, randn(2, 8))
    assert not found.replaced
    assert any("quantized" in left.reason for left in found.left)


# --------------------------------------------------------------------------------------------
# torch's encoder layers


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layers_are_replaced_in_training_and_named_in_eval(norm_first):
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    original = copy.deepcopy(encoder)
    x = randn(2, 3, 8)
    left = swap(encoder.eval(), x).left
    assert {one.path for one in left if "bypassed in eval" in one.reason} == {
        f"layers.{i}.norm{k}" for i in (0, 1) for k in (1, 2)
    }
    # The last norm is torch's LayerNorm module: it ran, and was replaced.
    assert type(encoder.norm) is axisnorm.nn.LayerNorm
    found = swap(encoder.train(), x)
    assert len(found.replaced) == 4
    for one in (encoder, original):
        one.train()(x).square().sum().backward()
    for a, b in zip(encoder.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(x), original.eval()(x), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------
# Residual sums


@pytest.mark.parametrize(
    ("norm", "after"), [(nn.LayerNorm, "AddLayerNorm"), (nn.RMSNorm, "AddRMSNorm")]
)
@pytest.mark.parametrize("training", [True, False])
def test_the_norm_of_a_sum_takes_its_terms(norm, after, training, monkeypatch):
    one = Block(Output(8, norm=norm)).train(training)
    original = copy.deepcopy(one)
    x = randn(4, 3, 8)
    found = swap(one, x)
    assert [(r.path, r.after) for r in found.replaced] == [("output.norm", f"axisnorm.nn.{after}")]
    called = []
    name = "add_layer_norm" if norm is nn.LayerNorm else "add_rms_norm"
    fused = getattr(sums.functional, name)
    monkeypatch.setattr(
        sums.functional, name, lambda *args, **kwargs: called.append(1) or fused(*args, **kwargs)
    )
    results = []
    for module in (one, original):
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        y = module(given)
        results.append([y, *torch.autograd.grad(y.square().sum(), [given, *module.parameters()])])
    assert called == [1]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # What drops is drawn by torch's own module: the same elements for the same seed.
    assert audit(one, x).norms[0].verified
    again = pickle.loads(pickle.dumps(one))
    assert type(again.output) is Output and type(again.output.norm) is getattr(
        axisnorm.nn, norm.__name__
    )
    found.undo()
    assert type(one.output) is Output and type(one.output.norm) is norm


FLAGS = {"tripled": False}


class Steered(nn.Module):
    """A block whose author calls self otherwise, and that does more if it is told to."""

    def __init__(this):  # noqa: N805
        super().__init__()
        this.dense, this.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        this.factor, this.first = 1.0, False

    def forward(this, h, residual):  # noqa: N805
        if this.first:
            return this.dense(this.norm(h))
        if this.factor != 1.0 or FLAGS["tripled"]:
            residual = residual * (3.0 if FLAGS["tripled"] else this.factor)
        return this.norm(this.dense(h) + residual)


@pytest.mark.parametrize(
    "change",
    [
        lambda one, patch: setattr(one, "factor", 2.0),
        lambda one, patch: setattr(one, "first", True),
        lambda one, patch: patch.setitem(FLAGS, "tripled", True),
    ],
)
def test_a_block_that_is_told_to_do_more_does_it(change, monkeypatch):
    one = Block(Steered())
    original = copy.deepcopy(one)
    x = randn(4, 3, 8)
    assert [r.after for r in swap(one, x).replaced] == ["axisnorm.nn.AddLayerNorm"]
    before = original(x)
    for block in (one, original):
        change(block.output, monkeypatch)
    assert not torch.allclose(original(x), before, rtol=1e-2)
    torch.testing.assert_close(one(x), original(x), rtol=1e-5, atol=1e-5)


def test_terms_of_different_types_or_shapes_are_added_as_before():
    one = Block(Output(8, p=0.0))
    swap(one, randn(4, 3, 8))
    original = Output(8, p=0.0)
    original.load_state_dict(one.output.state_dict())
    x, row = randn(4, 3, 8), randn(8)
    torch.testing.assert_close(one.output(x, row), original(x, row), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = one.output(x, row), original(x, row)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


def test_a_norm_that_is_exchanged_or_watched_later_gets_the_sum():
    one = Block(Output(8, p=0.0))
    swap(one, randn(2, 8))
    x = randn(2, 8)
    expected = one.output.dense(x) + x.sin()
    seen = []
    one.output.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    one(x)
    assert len(seen[0]) == 1 and torch.equal(seen[0][0], expected)
    one.output.norm = nn.Identity()
    assert torch.equal(one(x), expected)


class Kept(Output):
    """The sum is used once more."""

    def forward(self, hidden_states, input_tensor):
        total = self.dense(hidden_states) + input_tensor
        return self.norm(total) * 1.0 + total


class Twice(Output):
    def forward(self, hidden_states, input_tensor):
        total = self.dense(hidden_states) + input_tensor
        return self.dropout(self.norm(total)) + total


class Scaled(Output):
    def forward(self, hidden_states, input_tensor):
        return self.norm(torch.add(self.dense(hidden_states), input_tensor, alpha=0.5))


class Branches(Output):
    def forward(self, hidden_states, input_tensor):
        if hidden_states.sum() > 1e9:
            return hidden_states
        return super().forward(hidden_states, input_tensor)


class Modes(Output):
    def forward(self, hidden_states, input_tensor):
        if self.training:
            return self.norm(self.dense(hidden_states) + input_tensor)
        return self.norm(self.dense(input_tensor) + hidden_states)


class Number(Output):
    def forward(self, hidden_states, input_tensor):
        return self.norm(self.dense(hidden_states) + 1.0)


@pytest.mark.parametrize("kind", [Kept, Twice, Scaled, Branches, Modes, Number])
def test_blocks_that_do_more_keep_their_forward(kind):
    one = Block(kind(8))
    found = swap(one, randn(2, 8))
    assert [replaced.after for replaced in found.replaced] == ["axisnorm.nn.LayerNorm"]
    assert type(one.output) is kind


@pytest.mark.parametrize("inside", [True, False])
def test_under_autocast(inside):
    """What was proved without autocast is computed by torch where it does not hold with it."""
    one = model().eval()
    original = copy.deepcopy(one)
    x = randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        found = swap(one, x)
    # There the foreign norm makes float32 of the bfloat16 that the linear layer gives.
    assert len(found.replaced) == (1 if inside else 2)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = one(x), original(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(one(x), original(x), rtol=1e-5, atol=1e-5)


def test_a_unet_of_group_norms():
    class Step(nn.Module):
        def __init__(self, channels, out):
            super().__init__()
            self.norm1 = nn.GroupNorm(4, channels)
            self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
            self.norm2 = nn.GroupNorm(4, out, eps=1e-6)
            self.conv2 = nn.Conv2d(out, out, 3, padding=1)

        def forward(self, x):
            h = self.conv1(self.norm1(x).relu())
            return self.conv2(self.norm2(h).relu())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Conv2d(3, 8, 3, padding=1)
            self.down, self.middle, self.up = Step(8, 8), Step(8, 16), Step(24, 8)
            self.out = nn.GroupNorm(4, 8)

        def forward(self, x):
            high = self.down(self.into(x))
            low = self.middle(nn.functional.avg_pool2d(high, 2))
            low = nn.functional.interpolate(low, scale_factor=2)
            return self.out(self.up(torch.cat([high, low], 1)))

    one = UNet()
    original = copy.deepcopy(one)
    x = randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert len(swap(one, x).replaced) == 7
    results = []
    for net in (one, original):
        y = net(x)
        results.append([y, *torch.autograd.grad(y.square().mean(), list(net.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


class Shifted(nn.LayerNorm):
    """The weight is stored around zero."""

    def forward(self, x):
        return nn.functional.layer_norm(
            x, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )


@pytest.mark.parametrize(
    "make", [lambda: Root(8), lambda: Shifted(8), lambda: Block(Output(8, p=0.0))]
)
def test_compiled_with_dynamic_shapes(make):
    """torch.compile took the eps that a swapped forward remembers for a variable."""
    one = nn.Sequential(make())
    original = copy.deepcopy(one)
    assert len(swap(one, randn(4, 3, 8)).replaced) == 1
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(one, backend=backend, fullgraph=True, dynamic=True)
    for size in (4, 6, 9):
        values, results = randn(size, 3, 8), []
        for module, own in ((compiled, one), (original, original)):
            x = values.clone().requires_grad_()
            y = module(x)
            results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *own.parameters()])])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1 and "axisnorm" in graphs[0]
    torch.compiler.reset()
