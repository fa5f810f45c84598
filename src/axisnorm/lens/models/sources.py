"""Models by what the command line calls them: a directory, a file, a function that makes one."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...scheme import ArgumentError, DtypeError
from ..explain import with_article
from .inputs import inputs_of_transformer
from .untrusted import danger, file_kind

__all__ = ["Source", "blaming", "load", "load_path"]

SAID = 200
"""How many characters of another's error are repeated."""


@dataclass(frozen=True)
class Source:
    """A model that was read, with what it is to be run on."""

    model: Any
    """A torch.nn.Module or an exported program."""
    kind: str
    """As in :attr:`Audit.source`."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    generated: bool = False
    """Whether the inputs were made up."""


def load(name: str, text: Sequence[str] | None = None, *, trust: bool = False) -> Source:
    """The model that a command line names, with inputs for it.

    Args:
        name: a transformers model directory, a model file, or ``package.module:function``. The
            function takes nothing and returns a model, or a model and a tuple or a dict of its
            inputs.
        text: sentences for a model directory; random tokens where None.
        trust: whether the file may run code.

    Raises:
        ArgumentError: there is no such model or function, or it gives something else.
    """
    if Path(name).exists() or ":" not in name:
        return load_path(name, text, trust=trust)
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
    if not isinstance(model, (torch.nn.Module, torch.export.ExportedProgram)):
        came = f"{with_article(model)} came" if not isinstance(model, type) else "A class came"
        raise ArgumentError(
            "The function returns a torch.nn.Module and a tuple or a dict of its inputs. "
            f"{came}. Return (model, (x,))."
        )
    if isinstance(inputs, Mapping):
        return Source(model, "", (), dict(inputs))
    return Source(model, "", inputs if isinstance(inputs, tuple) else (inputs,))


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


def load_path(
    path: str | Path, text: Sequence[str] | None = None, *, trust: bool = False
) -> Source:
    """The model of a directory or a file, by its content.

    Raises:
        ArgumentError: it is no model, or reading it could run code and ``trust`` is not given.
    """
    path = Path(path)
    if not path.exists():
        raise ArgumentError(
            "A model is a file, or a transformers model directory with its config.json. "
            f"'{path}' does not exist. Check the path."
        )
    if not path.is_file():
        model, kwargs = _transformer(path, text)
        return Source(model, "transformers", (), kwargs, generated=not text)
    if text:
        raise ArgumentError(
            "--text is for model directories, which have a tokenizer. It came with a file. "
            "Leave it out."
        )
    kind = file_kind(path)
    if kind in ("safetensors", "other"):
        what = "weights alone" if kind == "safetensors" else "nothing that torch saves as a model"
        raise ArgumentError(
            "A model file is an exported program (.pt2), TorchScript, or a module of torch.save. "
            f"'{path}' holds {what}. Give the directory with its config.json, or "
            "package.module:function that loads it."
        )
    why = None if trust else danger(path, kind)
    if why is not None:
        raise ArgumentError(
            f"A file that can run code is read only if it is trusted. '{path}' can: {why}. "
            "If its author is trusted, say so: --trust, or audit(..., trust=True)."
        )
    remedy = "Save it again with this version of torch."
    if kind == "checkpoint":
        remedy = "Run where its classes can be imported, in the version of torch that saved it."
    with blaming(f"Loading '{path}'", remedy):
        return Source(_loaded(path, kind), "module" if kind == "checkpoint" else kind)


def _loaded(path: Path, kind: str) -> Any:
    with warnings.catch_warnings():
        # Of what torch means to change; the file is not changed by knowing it.
        warnings.simplefilter("ignore")
        if kind == "exported":
            with path.open("rb") as file:
                return torch.export.load(file)
        if kind == "torchscript":
            return torch.jit.load(path, map_location="cpu")
        found = torch.load(path, map_location="cpu", weights_only=False)
    if not isinstance(found, torch.nn.Module):
        raise ArgumentError(
            f"A checkpoint is run if it holds a whole module. '{path}' holds "
            f"{with_article(found)}: weights without the model. "
            "Give package.module:function that loads them into it."
        )
    return found


def _transformer(
    directory: Path, text: Sequence[str] | None = None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model of a transformers directory in eval mode, with inputs by name. Offline.

    Only safetensors are read, and no code of the directory is run.

    Raises:
        ArgumentError: it is no such directory, or its kind of input is not known.
        ModuleNotFoundError: transformers is not installed.
    """
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
            config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
            # With its head, which has norms of its own in some.
            named = [getattr(transformers, name, None) for name in config.architectures or ()]
            cls = next((one for one in named if one is not None), transformers.AutoModel)
            model = cls.from_pretrained(directory, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError, KeyError) as error:
            raise ArgumentError(
                f"transformers could not load '{directory}'. It says: "
                f"{str(error).splitlines()[0]} Save the model there with save_pretrained."
            ) from error
        model.eval()
        if text:
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            kwargs = dict(tokenizer(list(text), return_tensors="pt", padding=len(text) > 1))
            if getattr(config, "is_encoder_decoder", False):
                kwargs["decoder_input_ids"] = kwargs["input_ids"][:, :1]
            return model, kwargs
    return model, inputs_of_transformer(model)


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
