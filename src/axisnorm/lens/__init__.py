"""The looking glass: what normalizations compute, as data and as pictures.

Each result has a module of its own: ``explain``, ``audit``, ``swap``. The functions of these names
stand in the package itself, as ``axisnorm.explain``.
"""

from __future__ import annotations

__all__ = ["COMMANDS"]

COMMANDS = {
    "explain": "show which elements share a mean and which share a weight",
    "audit": "run a model and show what each of its normalizations computes",
}
"""The commands of the command line: modules here with ``arguments`` and ``execute``."""
