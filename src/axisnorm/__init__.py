"""Normalization layers that say what they compute.

>>> import axisnorm, numpy
>>> x = numpy.array([[1.0, 2.0, 4.0, 1.0], [6.0, 3.0, 2.0, 4.0], [2.0, 4.0, 6.0, 1.0]])
>>> axisnorm.layer_norm(x, 4).round(4).tolist()[0]
[-0.8165, 0.0, 1.633, -0.8165]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .functional import (
    add_layer_norm,
    add_rms_norm,
    batch_norm,
    empty_cache,
    group_norm,
    instance_norm,
    layer_norm,
    layer_norm_2d,
    normalize,
    rms_norm,
    statistics,
)
from .presets import PRESETS
from .scheme import ArgumentError, DtypeError, Scheme

if TYPE_CHECKING:
    from . import lens, nn, onnx
    from .lens.audit import audit
    from .lens.bench import bench
    from .lens.compare import compare
    from .lens.explain import explain
    from .lens.identify import identify
    from .lens.swap import swap

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "ArgumentError",
    "DtypeError",
    "Scheme",
    "add_layer_norm",
    "add_rms_norm",
    "audit",
    "batch_norm",
    "bench",
    "compare",
    "empty_cache",
    "explain",
    "group_norm",
    "identify",
    "instance_norm",
    "layer_norm",
    "layer_norm_2d",
    "lens",
    "nn",
    "normalize",
    "onnx",
    "rms_norm",
    "statistics",
    "swap",
]

# Loaded on first use: nn needs torch, the lens more.
_LATER = {
    "nn": ".nn",
    "onnx": ".onnx",
    "lens": ".lens",
    "explain": ".lens.explain",
    "compare": ".lens.compare",
    "identify": ".lens.identify",
    "audit": ".lens.audit",
    "bench": ".lens.bench",
    "swap": ".lens.swap",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name], __name__)
    value = module if _LATER[name] == f".{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
