"""The looking glass: what normalizations compute, as data and as pictures.

Each result has a module of its own: ``explain``, ``compare``, ``identify``, ``audit``, ``swap``,
``bench``.
The functions of these names stand in the package itself, as ``axisnorm.explain``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "Command"]


class Command(NamedTuple):
    """A command of the command line."""

    summary: str
    drawn: bool = True
    """Whether its result has a page and a figure."""


COMMANDS = {
    "explain": Command("show which elements share a mean and which share a weight"),
    "compare": Command("show what two normalizations have in common and where they differ"),
    "identify": Command("find which normalization turns an input into an output"),
    "audit": Command("run a model and show what each of its normalizations computes"),
    "bench": Command("time a normalization against what people run today"),
    "presets": Command("list the published normalizations that have a name here", drawn=False),
}
"""The commands of the command line: modules here with ``arguments`` and ``execute``."""
