"""What every normalization of a real model computes, shown by running it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..scheme import ArgumentError
from .files import arrays_of
from .models.norms import Audit, Norm
from .progress import step
from .result import Result

if TYPE_CHECKING:
    import argparse

    from .models.sources import Source
    from .swap import Swap

__all__ = ["Audit", "Norm", "audit"]


def audit(model: Any, *args: Any, trust: bool = False, **kwargs: Any) -> Audit:
    """Run a model and show what each of its normalizations computes.

    The model runs as it is, in its train or eval mode and without gradients, on copies of the
    inputs. Buffers, modes and random states are as before afterwards, also when it raises. Each
    norm is computed again in float64, as what it declares and as what it could be taken for, on
    its own input, and compared with its own output; of large tensors, on a sample of whole
    groups.

    Args:
        model: a :class:`torch.nn.Module`, TorchScript's too, a
            :class:`torch.export.ExportedProgram`, or the path of an ONNX file (``.onnx``, which
            needs no torch), a transformers model directory, an exported program (.pt2), a
            TorchScript file or a module that torch.save pickled.
        args: the inputs of its forward. Where none are given they are made up from the
            configuration, the signature or the first layer.
        trust: whether a file that can run code of its author may be read.
        kwargs: as args.

    Raises:
        ArgumentError: the model is none of these, cannot be run, or could run code.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    >>> found = audit(model, torch.randn(2, 3, 4))
    >>> [(norm.path, norm.in_words, norm.num_statistics) for norm in found.norms]
    [('1', 'one mean a token', 6)]
    >>> "one mean a sample" in [c.name for c in found.norms[0].identification.ruled_out]
    True
    """
    if isinstance(model, (str, Path)) and is_onnx(model):
        from .onnx.auditing import audit_onnx

        return audit_onnx(model, args, kwargs)
    with _torch_for_models():
        from .models.sources import Source, load_path
    if not isinstance(model, (str, Path)):
        return _audited(Source(model, "", args, kwargs))
    step("loading")
    found = load_path(model, trust=trust)
    if args or kwargs:
        found = replace(found, args=args, kwargs=kwargs, generated=False)
    return _audited(found)


def is_onnx(path: str | Path) -> bool:
    """Whether a path is called as an ONNX file."""
    return Path(path).suffix.lower() == ".onnx"


@contextlib.contextmanager
def _torch_for_models() -> Iterator[None]:
    """ONNX files need no torch: only here it is said that a model does."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "audit runs a model of torch. It is not installed. Run: pip install 'axisnorm[torch]'",
            name=error.name,
        ) from error


def _audited(found: Source) -> Audit:
    """Run what was read, on made up inputs if it came without."""
    from .models.running import audit_module

    found = _with_inputs(found)
    return audit_module(
        found.model, found.args, found.kwargs, source=found.kind, generated=found.generated
    )


def _with_inputs(found: Source) -> Source:
    import torch

    from .models.inputs import example_inputs

    known = isinstance(found.model, (torch.nn.Module, torch.export.ExportedProgram))
    if not known or found.args or found.kwargs:
        return found
    args, kwargs = example_inputs(found.model)
    saved = getattr(found.model, "example_inputs", None) is not None
    return replace(found, args=args, kwargs=kwargs, generated=not saved)


# --------------------------------------------------------------------------------------------
# The command line


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm audit``."""
    parser.add_argument(
        "model",
        help="an ONNX file, a transformers model directory (config.json and safetensors), an "
        "exported program (.pt2), a TorchScript file, or package.module:function, which returns "
        "a model, or a model and a tuple or a dict of its inputs",
    )
    parser.add_argument(
        "--text",
        action="append",
        metavar="SENTENCE",
        help="run model directories on this text, more than one if given again (default: random "
        "tokens)",
    )
    parser.add_argument(
        "--inputs", metavar="FILE.npz", help="an ONNX file's inputs by name (default: random ones)"
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
    doing.add_argument(
        "--fuse",
        metavar="OUT.onnx",
        help="write an ONNX file in which norms that are written out are the standard operator",
    )
    parser.add_argument(
        "--opset", type=int, metavar="N", help="with --fuse: raise the model to this opset first"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read a file that can run code of its author, as a pickled module",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if there is an error or a warning (notes do not count), with --diff if "
        "the norms differ, with --fuse if a norm that is written out stays so",
    )
    parser.epilog = (
        "Exit status: 0 fine; 1 with --strict, what it says; 2 wrong use or bad input, with one "
        "line on standard error; 130 interrupted. On a terminal, progress is shown on standard "
        "error."
    )


def execute(options: argparse.Namespace) -> tuple[Result, int]:
    """Run ``axisnorm audit``: the result and the exit status."""
    from .rendering.bar import shown_on_a_terminal

    _check(options)
    with contextlib.nullcontext() if options.json else shown_on_a_terminal():
        if options.fuse is not None:
            from .onnx.fusing import fuse

            fused = fuse(options.model, options.fuse, opset=options.opset, **_npz(options.inputs))
            return fused, int(options.strict and bool(fused.left))
        if options.swap:
            swapped = _swapped(_loaded(options.model, options))
            return swapped, int(options.strict and swapped.audit.suspicious)
        found = _audit_of(options.model, options)
        if options.diff is None:
            return found, int(options.strict and found.suspicious)
        compared = found.diff(_audit_of(options.diff, options))
        return compared, int(options.strict and not compared.same)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, before anything is read."""
    named = [options.model, *([] if options.diff is None else [options.diff])]
    graphs = [name for name in named if is_onnx(name)]
    if not graphs and (options.fuse or options.inputs or options.opset):
        raise ArgumentError(
            "--inputs, --fuse and --opset are for ONNX files. "
            f"'{options.model}' is none by its name. Leave them out."
        )
    if options.opset is not None and options.fuse is None:
        raise ArgumentError(
            "--opset says what is written by --fuse. It came alone. Give --fuse OUT.onnx too."
        )
    if options.text and len(graphs) == len(named):
        raise ArgumentError(
            "--text is for model directories. It came with an ONNX file. Give --inputs FILE.npz."
        )
    if options.swap and graphs:
        raise ArgumentError(
            "--swap replaces modules of torch. It came with an ONNX file. Use --fuse OUT.onnx."
        )
    others = {"--diff": options.diff is not None, "--swap": options.swap}
    doing = [name for name, given in (*others.items(), ("--fuse", options.fuse)) if given]
    if options.figure is not None and doing:
        raise ArgumentError(
            f"A figure is drawn of one model's audit. --figure came with {doing[0]}. "
            "Use --html there."
        )


def _loaded(name: str, options: argparse.Namespace) -> Source:
    with _torch_for_models():
        from .models.sources import load
    step("loading")
    # Sentences are for model directories; with --diff the other model may be a function.
    text = options.text if options.diff is None or Path(name).is_dir() else None
    return load(name, text, trust=options.trust)


def _audit_of(name: str, options: argparse.Namespace) -> Audit:
    if is_onnx(name):
        from .onnx.auditing import audit_onnx

        return audit_onnx(name, (), _npz(options.inputs))
    found = _loaded(name, options)
    from .models.sources import blaming

    with blaming("The model's forward", "Give inputs that it takes."):
        return _audited(found)


def _npz(path: str | None) -> dict[str, Any]:
    """The arrays of an .npz file by name."""
    if path is None:
        return {}
    held = arrays_of(path, allow_pickle=False)
    if "" in held:
        raise ArgumentError(
            f"--inputs is a file with a name for each array. '{path}' holds one without. "
            "Write it with numpy.savez(FILE, NAME=ARRAY)."
        )
    return held


def _swapped(found: Source) -> Swap:
    """The swap, with the times of forwards before and after it."""
    from .models.observe import timed
    from .models.sources import blaming
    from .swap import swap

    found = _with_inputs(found)
    with blaming("The model's forward", "Give inputs that it takes."):
        swapped = swap(found.model, *found.args, **found.kwargs)
        step("timing")
        after, _ = timed(found.model, found.args, found.kwargs, ())
        swapped.undo()
        # In this order what the first runs warm up is to nobody's favour.
        before, _ = timed(found.model, found.args, found.kwargs, ())
    return replace(swapped, seconds=(before, after))
