"""swap on small random models of transformers: outputs, gradients, three steps of training.

How many norms are replaced was counted in the source of each model.
"""

import copy
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from axisnorm.lens.swap import swap  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*scaled_dot_product.*:UserWarning"),
]

DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = {**DECODER, "head_dim": 8}
ENCODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "pad_token_id": 0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
RMS, LN, ADD = "axisnorm.rms_norm", "axisnorm.layer_norm", "axisnorm.nn.AddLayerNorm"
TORCH = "axisnorm.nn.LayerNorm"

# model, its configuration, what computes then and how often, what is left and how often
CASES = [
    ("Llama", DECODER, {RMS: 5}, {}),  # 2 a layer, 1 at the end
    ("Mistral", DECODER, {RMS: 5}, {}),
    ("Mixtral", {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1}, {RMS: 5}, {}),
    ("Qwen2", DECODER, {RMS: 5}, {}),
    ("Qwen3", WIDE, {RMS: 9}, {}),  # and 2 for queries and keys
    ("Gemma", WIDE, {RMS: 5}, {}),
    ("Gemma2", WIDE, {RMS: 9}, {}),  # 4 a layer
    ("Gemma3Text", WIDE, {RMS: 13}, {}),  # 4 a layer, 2 for queries and keys
    ("Phi3", DECODER, {RMS: 5}, {}),
    ("Olmo", DECODER, {LN: 5}, {}),
    ("Olmo2", DECODER, {RMS: 9}, {}),
    ("Cohere", {**DECODER, "use_qk_norm": True}, {LN: 3, "axisnorm.normalize": 4}, {}),
    ("Nemotron", WIDE, {LN: 5}, {}),
    ("Granite", DECODER, {RMS: 5}, {}),
    ("Glm", WIDE, {RMS: 5}, {}),
    ("DeepseekV3", {
        **DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }, {RMS: 9}, {}),
    ("Qwen3Next", {
        **WIDE, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }, {RMS: 7}, {"2 inputs": 1, "written out": 2}),
    ("Mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
               "pad_token_id": 0}, {RMS: 3}, {}),
    ("Mamba2", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
                "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4,
                "pad_token_id": 0}, {RMS: 3}, {"2 inputs": 2}),
    ("T5Encoder", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
                   "num_heads": 4, "dropout_rate": 0.0}, {RMS: 5}, {}),
    ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
              "eos_token_id": 2}, {TORCH: 5}, {}),
    ("Bert", ENCODER, {TORCH: 1, ADD: 4}, {}),  # the embeddings', and 2 sums a layer
    ("Roberta", ENCODER, {TORCH: 1, ADD: 4}, {}),
    ("Electra", {**ENCODER, "embedding_size": 32}, {TORCH: 1, ADD: 4}, {}),
    ("DistilBert", {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
                    "max_position_embeddings": 40, "dropout": 0.0, "attention_dropout": 0.0},
     {TORCH: 5}, {}),
    ("Deberta", ENCODER, {LN: 5}, {}),
    ("ViT", IMAGES, {TORCH: 5}, {}),
    ("ConvNext", {**STAGES, "num_stages": 2, "patch_size": 2},
     {TORCH: 1, LN: 2, "axisnorm.layer_norm_2d": 2}, {}),
    ("ConvNextV2", {**STAGES, "num_stages": 2, "patch_size": 2},  # and 2 GRN, which are no norms
     {TORCH: 1, LN: 2, "axisnorm.layer_norm_2d": 2}, {}),
    ("ResNet", {**STAGES, "embedding_size": 8, "layer_type": "basic"},
     {"axisnorm.nn.BatchNorm2d": 6}, {}),
    ("Swin", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1],
              "num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0}, {TORCH: 7}, {}),
    ("OPT", {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, {TORCH: 5}, {}),
    ("GPTNeoX", DECODER, {TORCH: 5}, {}),
    ("StableLm", {**DECODER, "qk_layernorm": True}, {TORCH: 17}, {}),  # one a head
    ("Llama4Text", {  # and 2 for queries and keys, without weights
        **WIDE, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
    }, {RMS: 7}, {}),
    ("DebertaV2", ENCODER, {TORCH: 1, ADD: 4}, {}),
    ("SqueezeBert", {**ENCODER, "embedding_size": 32},
     {TORCH: 1, "axisnorm.layer_norm_2d": 4}, {}),
    ("PoolFormer", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2,
                    "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1],
                    "drop_path_rate": 0.0}, {"axisnorm.normalize": 4}, {}),  # GroupNorms of one group
]  # fmt: skip

IMAGE_MODELS = ("ViT", "ConvNext", "ConvNextV2", "ResNet", "Swin", "PoolFormer")


def inputs(name):
    generator = torch.Generator().manual_seed(25)
    if name in IMAGE_MODELS:
        size = 32 if name == "ResNet" else 16
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    return {"input_ids": torch.randint(3, 64, (2, 7), generator=generator)}


def made(name, settings):
    torch.manual_seed(26)
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**settings)
    model = getattr(transformers, f"{name}Model")(config).eval()
    generator = torch.Generator().manual_seed(27)
    with torch.no_grad():
        for module in model.modules():
            # Weights of one and zero would hide which is which.
            if "Norm" in type(module).__name__ and next(module.children(), None) is None:
                for parameter in module.parameters():
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def tally(values):
    return {value: values.count(value) for value in dict.fromkeys(values)}


def step(model, given):
    """A loss in which every element counts differently."""
    y = model(**given)[0]
    return (y * torch.linspace(-1.0, 1.0, y.numel()).view_as(y)).square().mean()


@pytest.mark.parametrize(
    ("name", "settings", "replaced", "left"), CASES, ids=[case[0] for case in CASES]
)
def test_a_model_of_transformers(name, settings, replaced, left):
    model, given = made(name, settings), inputs(name)
    original = copy.deepcopy(model)
    found = swap(model, **given)
    assert tally([one.after for one in found.replaced]) == replaced
    for words, count in left.items():
        assert sum(words in one.reason for one in found.left) == count
    assert len(found.left) == sum(left.values())

    expected = original(**given)[0]
    limit = 1e-4 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=limit)
    trained = []
    for one in (original, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-2)
        gradients = []
        for _ in range(3):
            optimizer.zero_grad()
            step(one, given).backward()
            gradients.append([None if p.grad is None else p.grad.clone()
                              for p in one.parameters()])  # fmt: skip
            optimizer.step()
        trained.append((gradients[0], list(one.parameters())))
    (first, weights), (other, ours) = trained
    largest = max(g.abs().max().item() for g in first if g is not None)
    for a, b in zip(first, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * max(largest, 1e-3))
    for a, b in zip(weights, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    found.undo()
    assert [type(a) for a in model.modules()] == [type(b) for b in original.modules()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma", "Bert"])
def test_a_model_in_a_half_type(name, dtype):
    settings = dict(next(case[1] for case in CASES if case[0] == name))
    model, given = made(name, settings).to(dtype), inputs(name)
    original = copy.deepcopy(model)
    found = swap(model, **given)
    assert len(found.replaced) == 5 and not found.left
    expected = original(**given)[0].float()
    # A last bit that differs in an early norm moves what follows by a few.
    torch.testing.assert_close(model(**given)[0].float(), expected, rtol=0.05, atol=0.05)


def test_dropout_drops_the_same_elements_after_a_swap():
    settings = {**ENCODER, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    model, given = made("Bert", settings).train(), inputs("Bert")
    original = copy.deepcopy(model)
    assert len(swap(model, **given).replaced) == 5
    outputs = []
    for one in (model, original):
        torch.manual_seed(28)
        outputs.append(one(**given)[0])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
