"""Whether this installation has the native module, and the module itself.

A platform without a C++ compiler gets a pure Python wheel: everything works, by the reference.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .scheme import ArgumentError

__all__ = ["native"]


def _torch_openmp() -> str | None:
    """The file of the OpenMP runtime that an installed torch brings, which is not loaded yet."""
    if "torch" in sys.modules:
        return None
    try:
        spec = find_spec("torch")
    except ImportError:  # an importer that refuses torch
        return None
    places = (spec.submodule_search_locations if spec else None) or ()
    files = [str(f) for place in places for f in sorted(Path(place, "lib").glob("libgomp*.so*"))]
    return files[0] if files else None


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
    if (_found := _torch_openmp()) is not None:
        native.set_torch_openmp(_found)
