"""audit on architectures of transformers: every norm of each, once, verified, and no other.

The expected counts are read off the models' source, as sums that say where the norms stand.
"""

import os

import pytest
import torch

from axisnorm.lens.audit import audit
from axisnorm.scheme import ArgumentError, Scheme

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48}  # fmt: skip
TEXT = {**SIZES, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
PAIR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}  # fmt: skip
SOUND = {**{k: v for k, v in TEXT.items() if k != "max_position_embeddings"},
         "conv_dim": (8, 8, 8), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2),
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}

LAYER = "... [d]; affine=d"
BERT = "... [d]; affine=d; eps=1e-12"
RMS = "... [d]; affine=d; center=false"
LLAMA = "... [d]; affine=d; center=false; eps=1e-06"
GEMMA = "... [d]; affine=d; center=false; eps=1e-06; weight_offset=1"
PIXEL = "n [c] ...; affine=c; eps=1e-06"
BATCH = "[n] c [...]; affine=c; statistics=running"
LENGTH = "... [d]; center=false; scale=l2; eps=0"

ARCHITECTURES = {
    # The embeddings, two a layer, and the head.
    "BertForMaskedLM": (TEXT, {BERT: 1 + 2 * 2 + 1}),
    "RobertaModel": (TEXT, {BERT: 1 + 2 * 2}),
    # One module for the two layers.
    "AlbertModel": ({**TEXT, "embedding_size": 16}, {BERT: 1 + 2}),
    "ElectraModel": ({**TEXT, "embedding_size": 16}, {BERT: 1 + 2 * 2}),
    "DebertaV2Model": (TEXT, {"... [d]; affine=d; eps=1e-07": 1 + 2 * 2}),
    "MPNetModel": (TEXT, {BERT: 1 + 2 * 2}),
    # Two a layer and the last.
    "GPT2Model": ({"vocab_size": 99, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
                  {LAYER: 2 * 2 + 1}),
    "GPTNeoXModel": (TEXT, {LAYER: 2 * 2 + 1}),
    "BloomModel": ({"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
                   {LAYER: 1 + 2 * 2 + 1}),
    # One a layer, for attention and the rest in parallel.
    "FalconModel": (TEXT, {LAYER: 2 + 1}),
    # One a layer, and one each for queries and keys.
    "PhiModel": ({**TEXT, "qk_layernorm": True}, {LAYER: 3 * 2 + 1}),
    "OlmoModel": (GROUPED, {"... [d]": 2 * 2 + 1}),
    "NemotronModel": (GROUPED, {"... [d]; affine=d; weight_offset=1": 2 * 2 + 1}),
    # Queries and keys have one weight for each head.
    "CohereModel": ({**GROUPED, "use_qk_norm": True},
                    {LAYER: 2 + 1, "... h [d]; affine=h d": 2 * 2}),
    "LlamaModel": (GROUPED, {LLAMA: 2 * 2 + 1}),
    "MistralModel": (GROUPED, {LLAMA: 2 * 2 + 1}),
    "MixtralModel": ({**GROUPED, "num_local_experts": 2}, {RMS: 2 * 2 + 1}),
    "Qwen2Model": (GROUPED, {LLAMA: 2 * 2 + 1}),
    "Qwen3Model": (HEADS, {LLAMA: 4 * 2 + 1}),
    "Olmo2Model": (GROUPED, {RMS: 4 * 2 + 1}),
    "Phi3Model": (GROUPED, {RMS: 2 * 2 + 1}),
    "GemmaModel": (HEADS, {GEMMA: 2 * 2 + 1}),
    "Gemma2Model": (HEADS, {GEMMA: 4 * 2 + 1}),
    "Gemma3TextModel": (HEADS, {GEMMA: 6 * 2 + 1}),
    "MambaModel": ({"vocab_size": 99, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
                   {RMS: 2 + 1}),
    # A gated one in each mixer.
    "Mamba2Model": ({"vocab_size": 99, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
                     "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
                    {RMS: 2 * 2 + 1}),
    # Encoder two a layer, decoder three, and one at the end of each.
    "T5Model": ({"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
                 "num_heads": 4}, {LLAMA: 2 * 2 + 1 + 3 * 2 + 1}),
    # The embeddings of each, encoder two a layer, decoder three.
    "BartModel": ({**PAIR, "vocab_size": 99, "max_position_embeddings": 64},
                  {LAYER: 2 + 2 * 2 + 3 * 2}),
    "WhisperModel": ({**PAIR, "vocab_size": 99, "max_source_positions": 50,
                      "max_target_positions": 32, "num_mel_bins": 16, "pad_token_id": 0,
                      "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
                     {LAYER: 2 * 2 + 1 + 3 * 2 + 1}),
    "ViTModel": (IMAGE, {BERT: 2 * 2 + 1}),
    # Patch embedding, two a layer, one at the one merging, the last.
    "SwinModel": ({"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
                   "num_heads": [2, 2], "window_size": 4}, {LAYER: 1 + 2 * 2 + 1 + 1}),
    # The stem and three downsamplings over pixels, one a layer, the last. Its response
    # normalization is none of this family.
    "ConvNextV2Model": (STAGES, {PIXEL: 1 + 3, "... [d]; affine=d; eps=1e-06": 4, BERT: 1}),
    # Of text and image: two a layer, one last, and one before the layers of the image; in the end
    # both embeddings are divided by their lengths.
    "CLIPModel": ({"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
                  {LAYER: 2 * (2 * 2 + 1) + 1, LENGTH: 2}),
    # The stem, two a layer, one at the shortcut that changes the size.
    "ResNetModel": (RESNET, {BATCH: 1 + 2 * 2 + 1}),
    # The first convolution has a GroupNorm; the projection, the encoder, two a layer.
    "Wav2Vec2Model": (SOUND, {"n (g=8 [c]) [...]; affine=g c": 1, LAYER: 1 + 1 + 2 * 2}),
}  # fmt: skip


def small(name, sizes):
    torch.manual_seed(20)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes)).eval()
    with torch.no_grad():
        # Weights of 1 and running statistics of 0 and 1 say nothing.
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.dim() == 1 and value.is_floating_point() and "freq" not in key:
                value.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_norm_is_found_and_verified(name):
    sizes, expected = ARCHITECTURES[name]
    norms = audit(small(name, sizes)).norms
    counts = {}
    for norm in norms:
        assert norm.verified, norm.path
        counts[norm.scheme] = counts.get(norm.scheme, 0) + 1
    assert counts == {Scheme(scheme): count for scheme, count in expected.items()}
    assert len({norm.path for norm in norms if norm.kind == "module"}) == sum(
        norm.kind == "module" for norm in norms
    )


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaModel", "T5Model", "ViTModel"])
def test_directories(name, tmp_path):
    """Sharded, with tied weights, with its head, offline."""
    sizes, expected = ARCHITECTURES[name]
    model = small(name, sizes)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    found = audit(tmp_path)
    assert found.source == "transformers" and found.model == name
    assert len(found.norms) == sum(expected.values()) and all(n.verified for n in found.norms)


def test_a_directory_without_safetensors(tmp_path):
    """A pickle beside the configuration is not read."""
    sizes, _ = ARCHITECTURES["GPT2Model"]
    model = small("GPT2Model", sizes)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match="save_pretrained"):
        audit(tmp_path)


def test_half_types_say_where_they_round():
    for name, rounding in (("LlamaModel", "before_affine"), ("GemmaModel", "once")):
        model = small(name, ARCHITECTURES[name][0]).to(torch.bfloat16)
        for norm in audit(model).norms:
            assert norm.verified and norm.dtype == "bfloat16"
            assert norm.scheme.rounding == rounding, norm.path
