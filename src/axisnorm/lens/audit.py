"""What every normalization of a real model computes, shown by running it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..scheme import ArgumentError
from .models.norms import Audit, Norm
from .progress import step
from .result import Result

try:
    from .models.running import audit_module
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "audit runs a model of torch. It is not installed. Run: pip install 'axisnorm[torch]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    import argparse

    from .swap import Swap

__all__ = ["Audit", "Norm", "audit"]


def audit(model: Any, *args: Any, **kwargs: Any) -> Audit:
    """Run a model and show what each of its normalizations computes.

    The model runs as it is, in its train or eval mode and without gradients, on copies of the
    inputs. Buffers, modes and random states are as before afterwards, also when it raises. Each
    norm is computed again in float64, as what it declares and as what it could be taken for, on
    its own input, and compared with its own output; of large tensors, on a sample of whole
    groups.

    Args:
        model: a :class:`torch.nn.Module`, or the path of a transformers model directory.
        args: the inputs of its forward. For a path, generated where none are given.
        kwargs: as args.

    Raises:
        ArgumentError: the model is no torch module and no model directory.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    >>> found = audit(model, torch.randn(2, 3, 4))
    >>> [(norm.path, norm.in_words, norm.num_statistics) for norm in found.norms]
    [('1', 'one mean a token', 6)]
    >>> "one mean a sample" in [c.name for c in found.norms[0].identification.ruled_out]
    True
    """
    if isinstance(model, (str, Path)):
        from .models.sources import load_transformers

        step("loading")
        model, generated = load_transformers(model)
        kwargs = kwargs if args or kwargs else generated
        return replace(audit_module(model, args, kwargs), source="transformers")
    return audit_module(model, args, kwargs)


# --------------------------------------------------------------------------------------------
# The command line


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm audit``."""
    parser.add_argument(
        "model",
        help="a transformers model directory (config.json and safetensors), or "
        "package.module:function, which returns a model and a tuple or a dict of its inputs",
    )
    parser.add_argument(
        "--text",
        action="append",
        metavar="SENTENCE",
        help="run model directories on this text, more than one if given again (default: random "
        "tokens)",
    )
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument(
        "--diff",
        metavar="OTHER",
        help="compare with another model, norm by norm: norms are paired by path, else by "
        "execution order and structure",
    )
    doing.add_argument(
        "--swap",
        action="store_true",
        help="replace in memory what is shown to be equal by this library's norms, and say what "
        "was left and why, how far the outputs moved and how long a forward takes before and "
        "after; no file is changed",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if there is an error or a warning (notes do not count), or with --diff "
        "if the norms differ",
    )
    parser.epilog = (
        "Exit status: 0 fine; 1 with --strict, what it says; 2 wrong use or bad input, with one "
        "line on standard error. On a terminal, progress is shown on standard error."
    )


def execute(options: argparse.Namespace) -> tuple[Result, int]:
    """Run ``axisnorm audit``: the result and the exit status."""
    if options.figure is not None and (options.diff is not None or options.swap):
        raise ArgumentError(
            "A figure is drawn of one model's audit. --figure came with --diff or --swap. "
            "Use --html there."
        )
    from .rendering.bar import shown_on_a_terminal

    with contextlib.nullcontext() if options.json else shown_on_a_terminal():
        if options.swap:
            swapped = _swapped(options.model, options.text)
            return swapped, int(options.strict and swapped.audit.suspicious)
        found = _audited(options.model, options.text)
        if options.diff is None:
            return found, int(options.strict and found.suspicious)
        # Sentences are for model directories; the other model may be a function.
        text = options.text if Path(options.diff).is_dir() else None
        compared = found.diff(_audited(options.diff, text))
        return compared, int(options.strict and not compared.same)


def _loaded(name: str, text: list[str] | None) -> tuple[Any, tuple[Any, ...], dict[str, Any], str]:
    """A model, its inputs, and what to do where its forward raises."""
    from .models.sources import load

    step("loading")
    model, args, kwargs = load(name, text)
    remedy = "Give inputs that it takes."
    if not args and not kwargs:
        remedy = "It got no inputs: let the function return (model, (x,)) or (model, {'x': x})."
    return model, args, kwargs, remedy


def _audited(name: str, text: list[str] | None) -> Audit:
    from .models.sources import blaming

    model, args, kwargs, remedy = _loaded(name, text)
    with blaming("The model's forward", remedy):
        found = audit(model, *args, **kwargs)
    return replace(found, source="transformers") if Path(name).is_dir() else found


def _swapped(name: str, text: list[str] | None) -> Swap:
    """The swap, with the times of forwards before and after it."""
    from .models.observe import timed
    from .models.sources import blaming
    from .swap import swap

    model, args, kwargs, remedy = _loaded(name, text)
    with blaming("The model's forward", remedy):
        swapped = swap(model, *args, **kwargs)
        step("timing")
        after, _ = timed(model, args, kwargs, ())
        swapped.undo()
        # In this order what the first runs warm up is to nobody's favour.
        before, _ = timed(model, args, kwargs, ())
    return replace(swapped, seconds=(before, after))
