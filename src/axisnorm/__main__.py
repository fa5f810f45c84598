"""The command line: ``axisnorm explain "... [d]" 2,3,4``, ``axisnorm audit MODEL``.

Exit status 0: fine, 1: an audit with ``--strict`` found something, 2: wrong use, or the model
that was given raised.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import axisnorm

from .lens import COMMANDS
from .scheme import ArgumentError, DtypeError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Reports wrong use in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _Parser(prog="axisnorm", description="Say what normalizations compute.")
    parser.add_argument("--version", action="version", version=f"axisnorm {axisnorm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A shape that begins with a minus is a wrong shape, not an option.
    given = [f" {word}" if re.match(r"-[0-9]", word) else word for word in given]
    run = None
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            command.add_argument("--json", action="store_true", help="print data instead of text")
            command.add_argument(
                "--traceback", action="store_true", help="show where an error was raised"
            )
            if name in given[:1]:
                # Only the command that runs is imported: explain does without torch.
                module = importlib.import_module(f"axisnorm.lens.{name}")
                module.arguments(command)
                run = module.execute
        options = parser.parse_args(given)
        if run is None:
            parser.error("the command comes first")
        result, status = run(options)
        text = result.to_json() if options.json else result.to_text()
    except Exception as error:
        if "--traceback" in given:
            raise
        print(f"axisnorm {given[0]}: {_one_line(error)}", file=sys.stderr)
        return 2
    print(text)
    return int(status)


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
