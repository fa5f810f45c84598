"""Whether this installation has the native module, and the module itself.

A platform without a C++ compiler gets a pure Python wheel: everything works, by the reference.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .scheme import ArgumentError

__all__ = ["native"]

native: Any = None
try:
    native = import_module("axisnorm._native")
except ModuleNotFoundError as missing:
    if missing.name != "axisnorm._native":
        raise
else:
    if native.isa_error():
        raise ArgumentError(
            f"AXISNORM_ISA names an instruction set of this processor. {native.isa_error()}. "
            f"Use one of {', '.join(native.isa_names())}, or leave it unset."
        )
