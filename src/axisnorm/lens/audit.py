"""What every normalization of a real model computes, shown by running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models.norms import Audit, Norm

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

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    >>> found = audit(model, torch.randn(2, 3, 4))
    >>> [(norm.path, norm.in_words, norm.num_statistics) for norm in found.norms]
    [('1', 'one mean a token', 6)]
    >>> "one mean a sample" in [c.name for c in found.norms[0].identification.ruled_out]
    True
    """
    if isinstance(model, (str, Path)):
        from .models.sources import load_transformers

        model, generated = load_transformers(model)
        kwargs = kwargs if args or kwargs else generated
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
        help="run the model on this text, more than one if given again (default: random tokens)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if there is an error or a warning"
    )


def execute(options: argparse.Namespace) -> tuple[Audit, int]:
    """Run ``axisnorm audit``: the result and the exit status."""
    from .models.sources import blaming, load

    model, args, kwargs = load(options.model, options.text)
    remedy = "Give inputs that it takes."
    if not args and not kwargs:
        remedy = "It got no inputs: let the function return (model, (x,)) or (model, {'x': x})."
    with blaming("The model's forward", remedy):
        found = audit(model, *args, **kwargs)
    return found, int(options.strict and found.suspicious)
