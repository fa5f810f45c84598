"""Published normalizations as plain data: what each framework computes by default.

Axes are in the framework's own layout (channels last in Keras and Flax), momentum is the weight
of the new value whatever the framework calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .scheme import Scheme

__all__ = ["PRESETS"]

_TEXTS = {
    # PyTorch 2.13
    "torch.layer_norm": "... [d]; affine=d",
    "torch.rms_norm": "... [d]; affine=d; center=false; eps=none",
    "torch.group_norm": "n (g [c]) [...]; affine=g c",
    "torch.instance_norm": "n c [...]; affine=c",
    "torch.batch_norm": "[n] c [...]; affine=c",
    "torch.batch_norm.eval": "[n] c [...]; affine=c; statistics=running",
    "torch.normalize": "... [d]; center=false; scale=l2; eps=1e-12; eps_placement=max",
    # Keras 3
    "keras.layer_norm": "... [d]; affine=d; eps=1e-3",
    "keras.rms_norm": "... [d]; affine=d; center=false; eps=1e-6",
    "keras.rms_scaling": "... [d]; affine=d; center=false; scale=std; eps=1e-3",
    "keras.group_norm": "n [...] (g=32 [c]); affine=g c; eps=1e-3",
    "keras.batch_norm": "[...] c; affine=c; eps=1e-3; momentum=0.01; running_correction=0",
    # Flax (linen and nnx)
    "flax.layer_norm": "... [d]; affine=d; eps=1e-6",
    "flax.rms_norm": "... [d]; affine=d; center=false; eps=1e-6",
    "flax.group_norm": "n [...] (g=32 [c]); affine=g c; eps=1e-6",
    "flax.instance_norm": "n [...] c; affine=c; eps=1e-6",
    "flax.batch_norm": "[...] c; affine=c; momentum=0.01; running_correction=0",
    # ONNX operators, by the opset that defined them
    "onnx17.layer_norm": "... [d]; affine=d; rounding=before_affine",
    "onnx23.rms_norm": "... [d]; affine=d; center=false; rounding=before_affine",
    "onnx6.instance_norm": "n c [...]; affine=c",
    "onnx15.batch_norm": "[n] c [...]; affine=c; running_correction=0",
    "onnx18.group_norm": "n (g [c]) [...]; affine=g",
    "onnx21.group_norm": "n (g [c]) [...]; affine=g c",
    "onnx13.mean_variance_norm": "[n] c [h w]; eps=1e-9; eps_placement=std",
    # Models
    "bert.layer_norm": "... [d]; affine=d; eps=1e-12",
    "tensor2tensor.layer_norm": "... [d]; affine=d; eps=1e-6",
    "annotated_transformer.layer_norm": (
        "... [d]; affine=d; correction=1; eps=1e-6; eps_placement=std"
    ),
    "convnext.layer_norm_2d": "n [c] ...; affine=c; eps=1e-6",
    "llama.rms_norm": "... [d]; affine=d; center=false; eps=1e-6; rounding=before_affine",
    "t5.layer_norm": "... [d]; affine=d; center=false; eps=1e-6; rounding=before_affine",
    "gemma.rms_norm": "... [d]; affine=d; center=false; eps=1e-6; weight_offset=1",
    "timm.simple_norm": "... [d]; affine=d; center=false; scale=std; correction=1; eps=1e-6",
}

PRESETS: Mapping[str, Scheme] = MappingProxyType({k: Scheme(v) for k, v in _TEXTS.items()})
