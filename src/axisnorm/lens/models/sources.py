"""Models by what the command line calls them: a directory, or a function that makes one."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...scheme import ArgumentError, DtypeError
from ..explain import with_article

__all__ = ["blaming", "load", "load_transformers"]

SEED = 0
"""Of the generated inputs."""
SAID = 200
"""How many characters of another's error are repeated."""


def load(
    name: str, text: Sequence[str] | None = None
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model that a command line names, with inputs for it.

    Args:
        name: a transformers model directory, or ``package.module:function``. The function takes
            nothing and returns a model, or a model and a tuple or a dict of its inputs.
        text: sentences for a model directory; random tokens where None.

    Raises:
        ArgumentError: there is no such directory or function, or it gives something else.
    """
    if Path(name).exists() or ":" not in name:
        model, kwargs = load_transformers(name, text)
        return model, (), kwargs
    if text:
        raise ArgumentError(
            "--text is for model directories. It came with a function. "
            "Let the function return the inputs."
        )
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ArgumentError(
            f"A function is named as package.module:function. '{name}' came. Give both names."
        )
    if "" not in sys.path:
        # As python -m does: modules of the directory in which one stands.
        sys.path.insert(0, "")
    with blaming(f"Importing '{module_name}'", "Import it alone to see why."):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ArgumentError(
                f"A model is a directory or package.module:function. '{module_name}' is neither. "
                "Check the name and the directory it is run in."
            ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        there = "is not in it" if function is None else f"is {type(function).__name__}"
        raise ArgumentError(
            f"'{module_name}' has to have the function. '{function_name}' {there}. Check the name."
        )
    with blaming(f"Calling {name}()", "It has to make the model without any argument."):
        made = function()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, torch.nn.Module):
        came = f"{with_article(model)} came" if not isinstance(model, type) else "A class came"
        raise ArgumentError(
            "The function returns a torch.nn.Module and a tuple or a dict of its inputs. "
            f"{came}. Return (model, (x,))."
        )
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, inputs if isinstance(inputs, tuple) else (inputs,), {}


@contextmanager
def blaming(what: str, remedy: str) -> Iterator[None]:
    """Errors of the user's own code as one of wrong use that says what was done.

    Raises:
        ArgumentError: whatever was raised inside, in one line.
    """
    try:
        yield
    except (ArgumentError, DtypeError):
        raise
    except (Exception, SystemExit) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f": {lines[0][:SAID]}" if lines else ""
        raise ArgumentError(
            f"{what} has to work. It raised {type(error).__name__}{said.rstrip('.')}. "
            f"{remedy} (--traceback shows where)"
        ) from error


def load_transformers(
    path: str | Path, text: Sequence[str] | None = None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model of a transformers directory in eval mode, with inputs by name. Offline.

    Only safetensors are read, and no code of the directory is run.

    Raises:
        ArgumentError: it is no such directory, or its kind of input is not known.
        ModuleNotFoundError: transformers is not installed.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ArgumentError(
            "A transformers model directory holds a config.json. "
            f"'{directory}' has none. Give the directory that it was saved to."
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "A model directory is read with transformers. It is not installed. "
            "Run: pip install transformers",
            name="transformers",
        ) from error
    with quiet(transformers):
        try:
            model = transformers.AutoModel.from_pretrained(
                directory, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"transformers could not load '{directory}'. It says: "
                f"{str(error).splitlines()[0]} Save the model there with save_pretrained."
            ) from error
        model.eval()
        if text:
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
            return model, dict(tokenizer(list(text), return_tensors="pt", padding=len(text) > 1))
    return model, _generated(model)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Neither progress bars nor log lines of transformers below an error."""
    log = transformers.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.ERROR)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _generated(model: Any) -> dict[str, Any]:
    """Random inputs of the model's kind, the same every time."""
    generator = torch.Generator().manual_seed(SEED)
    config, kind = model.config, model.main_input_name
    dtype = model.dtype
    if kind == "input_ids":
        words = getattr(config.get_text_config(), "vocab_size", 0)
        if words:
            tokens = torch.randint(0, words, (2, 16), generator=generator)
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if getattr(config, "is_encoder_decoder", False):
                inputs["decoder_input_ids"] = tokens[:, :8].clone()
            return inputs
    if kind == "pixel_values" and hasattr(config, "num_channels"):
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        shape = (2, config.num_channels, height, width)
        return {"pixel_values": torch.randn(shape, generator=generator).to(dtype)}
    if kind == "input_values":
        return {"input_values": torch.randn((1, 16000), generator=generator).to(dtype)}
    raise ArgumentError(
        f"Inputs are generated for text, images and sound. {type(model).__name__} takes "
        f"'{kind}'. Give package.module:function that returns the model and its inputs."
    )
