"""The command line: ``axisnorm explain "... [d]" 2,3,4``, ``axisnorm audit MODEL``.

Exit status 0: fine, 1: something was found and ``--strict`` was said, 2: wrong use or bad input,
with one line that says which, 130: interrupted; with these two nothing is written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import axisnorm

from .lens import COMMANDS
from .lens.rendering.wording import encodable, visible
from .scheme import ArgumentError, DtypeError

if TYPE_CHECKING:
    from .lens.result import Result

__all__ = ["main"]


_STATUS = (
    "Exit status: 0 fine;{} 2 wrong use or bad input, with one line on standard error; "
    "130 interrupted. With 2 and 130 no file is written."
)


class _Parser(argparse.ArgumentParser):
    """Reports wrong use in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _Parser(
        prog="axisnorm",
        description="Say what normalizations compute.",
        epilog=_STATUS.format(" 1 with --strict of audit, something was found;"),
    )
    parser.add_argument("--version", action="version", version=f"axisnorm {axisnorm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A shape that begins with a minus is a wrong shape, not an option.
    given = [f" {word}" if re.match(r"-[0-9]", word) else word for word in given]
    run = None
    if given and given[0].startswith("-") and any(word in COMMANDS for word in given):
        # Options of a command that stand before it would be taken for options of the program.
        parser.error("the command comes first, as in axisnorm explain ... --json")
    try:
        for name, (summary, drawn) in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            _options(command, drawn)
            if name in given[:1]:
                # Only the command that runs is imported: explain does without torch.
                module = importlib.import_module(f"axisnorm.lens.{name}")
                module.arguments(command)
                run = module.execute
        options = parser.parse_args(given)
        assert run is not None
        if sys.stdout is None:
            raise ArgumentError("The result cannot be printed: standard output is closed.")
        targets = _targets(options)
        result, status = run(options)
        text = result.to_json() if options.json else result.to_text()
        _write(result, targets)
    except KeyboardInterrupt:
        if "--traceback" in given:
            raise
        _say(given, "interrupted")
        return 130
    except Exception as error:
        if "--traceback" in given:
            raise
        _say(given, _one_line(error))
        return 2
    try:
        print(encodable(text, sys.stdout.encoding, as_json=options.json), flush=True)
    except BrokenPipeError:
        # The reader has seen enough. What is left in the buffer goes nowhere.
        _drop_output()
    except OSError as error:
        _drop_output()
        _say(given, f"The result cannot be printed: {error}.")
        return 2
    return int(status)


def _say(given: Sequence[str], message: str) -> None:
    """One line on standard error, where there is one."""
    if sys.stderr is not None:
        said = " ".join(["axisnorm", *given[:1]]) + f": {message}"
        print(visible(said), file=sys.stderr)


def _drop_output() -> None:
    """Leave nothing for Python to write at its end, where that would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _options(command: argparse.ArgumentParser, drawn: bool) -> None:
    """The options of every command."""
    command.add_argument("--json", action="store_true", help="print data instead of text")
    if drawn:
        command.add_argument(
            "--html", metavar="FILE", help="also write one page that needs nothing else"
        )
        command.add_argument(
            "--figure", metavar="FILE", help="also draw a figure, as PNG or SVG by its suffix"
        )
    else:
        command.set_defaults(html=None, figure=None)
    command.add_argument("--traceback", action="store_true", help="show where an error was raised")
    command.epilog = _STATUS.format("")


def _targets(options: argparse.Namespace) -> dict[str, Path]:
    """The files to write by what they hold, refused before anything is computed for them."""
    from .lens.result import FIGURE_FORMATS, checked_target

    targets = {}
    others = list(_named(options))
    if options.html is not None:
        targets["html"] = checked_target(options.html, reads=others)
    if options.figure is not None:
        targets["figure"] = checked_target(options.figure, FIGURE_FORMATS, others)
    if len({path.resolve() for path in targets.values()}) < len(targets):
        raise ArgumentError(
            "--html and --figure write two files. "
            f"'{options.html}' came for both. Name them differently."
        )
    return targets


def _named(options: argparse.Namespace) -> Iterator[str]:
    """What the command is given by name and may read: files, with and without their keys."""
    for option, value in vars(options).items():
        if option in ("command", "html", "figure"):
            continue
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and word:
                yield word
                yield word.rpartition(":")[0] or word


def _write(result: Result, targets: dict[str, Path]) -> None:
    from .lens.result import write

    contents = {}
    if "html" in targets:
        contents[targets["html"]] = result.to_html().encode()
    if "figure" in targets:
        contents[targets["figure"]] = result.figure_file(targets["figure"].suffix[1:].lower())
    write(contents)


def _one_line(error: Exception) -> str:
    """The message in one line, with the column of a notation's culprit instead of a caret."""
    lines = str(error).splitlines()
    for place, line in enumerate(lines):
        if line.strip() == "^" and place:
            rule = " ".join(lines[: place - 1]).rstrip(".")
            column = len(line) - 2
            where = f"{rule}: column {column} of '{lines[place - 1][2:]}'."
            return " ".join([where, *lines[place + 1 :]])
    said = " ".join(line.strip() for line in lines)
    if isinstance(error, (ArgumentError, DtypeError, ModuleNotFoundError)):
        return said
    return f"{type(error).__name__}: {said} (--traceback shows where)"


if __name__ == "__main__":
    sys.exit(main())
