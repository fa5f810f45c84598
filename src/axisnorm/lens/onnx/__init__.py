"""ONNX files: read, run in parts, and held against the norms that they compute."""

from __future__ import annotations

from importlib import import_module

for _needed in ("onnx", "onnxruntime"):
    try:
        import_module(_needed)
    except ModuleNotFoundError as error:
        if error.name != _needed:
            raise
        raise ModuleNotFoundError(
            f"ONNX files are read with onnx and run with onnxruntime. {_needed} is not installed. "
            "Run: pip install 'axisnorm[onnx]'",
            name=_needed,
        ) from error
