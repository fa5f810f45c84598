"""Inputs made up for a model from its signature, its first layer or its configuration."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...scheme import ArgumentError
from .observe import run, unchanged

__all__ = ["example_inputs", "inputs_of_program", "inputs_of_transformer"]

SEED = 0
BATCH = 2
TOKENS = 16
SIDES = (64, 32, 224, 28, 16)
"""Of images, in the order in which they are tried: convolutions need a least size, and some
classifiers one size alone."""
TIMES = ("t", "time", "times", "timestep", "timesteps", "sigma", "noise_level")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def example_inputs(model: Any) -> Inputs:
    """Inputs of a model that came without any, the same every time.

    Raises:
        ArgumentError: none that could be made up runs.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return inputs_of_program(model)
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return (), inputs_of_transformer(model)
    names = _required(model)
    if not names:
        return (), {}
    said = "its first layer says no size"
    for x in _first(model):
        args = tuple(_argument(name, x) for name in names)
        try:
            with unchanged(model):
                run(model, args, {})
        except Exception as error:  # Whatever a model raises, another input is tried.
            lines = str(error).strip().splitlines()
            said = f"on {tuple(x.shape)} its forward raised {type(error).__name__}"
            said += f": {lines[0][:120]}" if lines else ""
            continue
        return args, {}
    needs = f"forward({', '.join(names)})"
    raise ArgumentError(
        f"Inputs are made up from the first layer and the signature. For {needs} of "
        f"{type(model).__name__} none was found: {said.rstrip('.')}. Give the inputs; "
        "a function returns (model, (x,)) or (model, {'x': x})."
    )


def _required(model: Any) -> list[str]:
    """The names of the arguments that forward needs."""
    if isinstance(model, torch.jit.ScriptModule):
        schema: Any = model._c._get_method("forward").schema
        arguments = schema.arguments[1:]
        return [a.name for a in arguments if not a.has_default_value()]
    given = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is p.VAR_POSITIONAL for p in given) and not any(p.kind in kinds for p in given):
        return ["args"]
    return [p.name for p in given if p.kind in kinds and p.default is p.empty]


def _argument(name: str, x: torch.Tensor) -> torch.Tensor:
    if name in TIMES:
        return torch.linspace(0.1, 0.9, x.shape[0])
    if "mask" in name:
        return torch.ones(x.shape[:2], dtype=torch.bool)
    return x


def _first(model: Any) -> Iterator[torch.Tensor]:
    """Inputs that the first layer with a size takes, the likeliest first."""
    generator = torch.Generator().manual_seed(SEED)
    for module in model.modules():
        cls = getattr(module, "original_name", type(module).__name__)
        weight = getattr(module, "weight", None)
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
        dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.float32
        found = list(_shapes(module, cls, shape))
        if "Embedding" in cls and len(shape) == 2:
            yield torch.randint(0, shape[0], (BATCH, TOKENS), generator=generator)
            return
        for one in found:
            yield torch.randn(one, generator=generator).to(dtype)
        if found:
            return


def _shapes(module: Any, cls: str, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if "Conv" in cls and len(shape) >= 3:
        turned = "Transpose" in cls
        channels = shape[0] if turned else shape[1] * int(getattr(module, "groups", 1))
        sides: dict[int, tuple[int, ...]] = {3: (128, 1024), 4: SIDES, 5: (8, 16, 32)}
        space = len(shape) - 2
        yield from ((BATCH, channels, *[side] * space) for side in sides[len(shape)])
    elif "Linear" in cls and len(shape) == 2:
        size = shape[1]
        yield from ((BATCH, TOKENS, size), (8, size), (BATCH, 4, 4, size), (size,))
    elif cls in ("LSTM", "GRU", "RNN"):
        size = int(module.weight_ih_l0.shape[1])
        yield from ((TOKENS, BATCH, size), (TOKENS, size))
    elif "MultiheadAttention" in cls:
        size = int(module.embed_dim)
        yield from ((TOKENS, BATCH, size), (TOKENS, size))
    elif cls.startswith(("BatchNorm", "InstanceNorm", "LazyBatchNorm")):
        size = int(getattr(module, "num_features", shape[0] if shape else 0))
        known: dict[str, list[tuple[int, ...]]]
        known = {"1d": [(), (TOKENS,)], "2d": [(8, 8)], "3d": [(4, 4, 4)]}
        yield from ((8, size, *more) for more in known.get(cls[-2:], [()]))
    elif "GroupNorm" in cls:
        size = int(getattr(module, "num_channels", shape[0] if shape else 0))
        yield (4, size, 8, 8)
    elif "norm" in cls.lower() and shape:
        yield from ((BATCH, TOKENS, *shape), (8, *shape), (BATCH, *shape, 8, 8))


def inputs_of_program(program: torch.export.ExportedProgram) -> Inputs:
    """Those that an exported program was saved with, or others of the shapes that it says."""
    if program.example_inputs is not None:
        args, kwargs = program.example_inputs
        return tuple(args), dict(kwargs)
    generator = torch.Generator().manual_seed(SEED)
    wanted = set(program.graph_signature.user_inputs)
    made = []
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in wanted:
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            made.append(value)
            continue
        # Of a size that may vary, the one that it was exported with.
        sizes: list[Any] = list(value.shape)
        shape = [size if isinstance(size, int) else int(size.node.hint) for size in sizes]
        if value.dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).to(value.dtype))
        else:
            made.append(torch.ones(shape, dtype=value.dtype))
    args, kwargs = torch.utils._pytree.tree_unflatten(made, program.call_spec.in_spec)
    return tuple(args), dict(kwargs)


def inputs_of_transformer(model: Any) -> dict[str, Any]:
    """Random inputs of the kinds that the model takes.

    Raises:
        ArgumentError: it takes something else.
    """
    generator = torch.Generator().manual_seed(SEED)
    config, kind = model.config, model.main_input_name
    takes = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(model.dtype)

    if kind == "input_ids" or "input_ids" in takes:
        words = _size(config.get_text_config(), "vocab_size")
        if words:
            tokens = torch.randint(0, words, (BATCH, TOKENS), generator=generator)
            made |= {"input_ids": tokens}
            if "attention_mask" in takes:
                made |= {"attention_mask": torch.ones_like(tokens)}
    vision = getattr(config, "vision_config", None) or config
    if kind == "pixel_values" or "pixel_values" in takes:
        channels = _size(vision, "num_channels") or 3
        size = getattr(vision, "image_size", None) or 224
        sides = [size, size] if isinstance(size, int) else [*_values(size)]
        made["pixel_values"] = randn(BATCH, channels, *sides)
    audio = getattr(config, "audio_config", None) or config
    if kind == "input_values" or "input_values" in takes:
        made["input_values"] = randn(1, 16000)
    if kind == "input_features" or "input_features" in takes:
        bins = _size(audio, "num_mel_bins") or 80
        frames = 2 * (_size(audio, "max_source_positions") or 50)
        made["input_features"] = randn(1, bins, frames)
    if kind not in made:
        raise ArgumentError(
            f"Inputs are made up for text, images and sound. {type(model).__name__} takes "
            f"'{kind}'. Give package.module:function that returns the model and its inputs."
        )
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        count = made[kind].shape[0]
        words = _size(config.get_text_config(decoder=True), "vocab_size")
        made["decoder_input_ids"] = torch.randint(0, words, (count, 8), generator=generator)
    return made


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def _values(size: Any) -> list[int]:
    return [*(size.values() if isinstance(size, Mapping) else size)]
