"""Files of models: what they are by their content, and whether reading one could run code.

A ``.pt2`` file is JSON, raw tensors and, in places, pickles; torch reads those pickles with all
that pickles can do, and evaluates expressions and names of functions in the JSON. A TorchScript
file is a program in a language of its own, which can read and write files. Both are looked
through here before torch sees them. What is not known to be harmless needs the user's word.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...scheme import ArgumentError

__all__ = ["danger", "file_kind"]

_TARGET = re.compile(
    r"torch\.ops\.(aten|prims|prim|higher_order|axisnorm|quantized|quantized_decomposed|torchvision"
    r"|torchaudio)\.\w+(\.\w+)?|torch\.sym_\w+|torch\.sym_sum|math\.\w+"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pos|pow|abs|eq|ne|lt|le|gt|ge|getitem|and_"
    r"|or_|xor|not_|lshift|rshift)"
)
_SYMBOL = re.compile(r"[a-z]{1,3}[0-9]+|[A-Z]\w*|oo|int_oo|zoo|nan|True|False")
_NAMESPACES = frozenset(
    {"aten", "prim", "quantized", "quantized_decomposed", "torchvision", "torchaudio", "axisnorm"}
)
_FILES = frozenset({"save", "load", "from_file", "rpc_async", "rpc_sync", "rpc_remote"})
"""Functions of TorchScript that reach out of the model."""


def file_kind(path: Path) -> str:
    """What a file is by its content.

    Returns:
        ``"exported"``, ``"torchscript"``, ``"checkpoint"`` (a pickle of torch.save),
        ``"safetensors"``, or ``"other"``.
    """
    with path.open("rb") as file:
        start = file.read(9)
    if start[:2] == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = {_inside(name) for name in archive.namelist()}
        if "archive_format" in names or "serialized_exported_program.json" in names:
            return "exported"
        if "constants.pkl" in names and any(name.startswith("code/") for name in names):
            return "torchscript"
        return "checkpoint" if "data.pkl" in names else "other"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return "checkpoint"
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and 2 <= length <= path.stat().st_size - 8:
        return "safetensors"
    return "other"


def _inside(name: str) -> str:
    """The name of a member without the folder that all of them are in."""
    head, _, rest = name.partition("/")
    return rest or head


def danger(path: Path, kind: str) -> str | None:
    """Why reading or running the file could run code of its author, None if it cannot."""
    if kind == "checkpoint":
        return "it is a pickle, which runs whatever it says"
    try:
        with zipfile.ZipFile(path) as archive:
            look = _in_exported if kind == "exported" else _in_script
            return next(look(archive), None)
    except (ValueError, KeyError, SyntaxError, RecursionError, zipfile.BadZipFile) as error:
        raise ArgumentError(
            f"A model file has to be whole. '{path}' cannot be read: {error}. Save it again."
        ) from error


def _in_exported(archive: zipfile.ZipFile) -> Iterator[str]:
    for member in archive.namelist():
        name = _inside(member)
        if name.startswith("data/aotinductor/"):
            yield "it holds compiled code"
        if "/opaque_obj" in name or "/custom_obj" in name:
            yield f"'{name}' is a pickled object"
        if name.endswith(".json"):
            yield from _in_json(json.loads(archive.read(member)))
            continue
        with archive.open(member) as file:
            start = file.read(2)
        pickled = start == b"PK" or (name.endswith(".pt") and start)
        if pickled and not _is_plain(archive.read(member)):
            yield f"'{name}' is a pickle of more than tensors"


def _is_plain(content: bytes) -> bool:
    """Whether a file of torch.save has tensors, numbers and their containers alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError):
        return False
    return True


def _in_json(data: Any) -> Iterator[str]:
    waiting = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict):
            continue
        waiting += one.values()
        target, expression = one.get("target"), one.get("expr_str")
        if isinstance(target, str) and "inputs" in one and not _TARGET.fullmatch(target):
            yield f"it calls '{target}'"
        if isinstance(expression, str) and not _is_arithmetic(expression):
            yield f"it has torch evaluate '{expression}'"
        guards = one.get("guards_code")
        for guard in guards if isinstance(guards, list) else []:
            if not _is_guard(guard):
                yield f"it has torch evaluate '{guard}'"


_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Load, ast.operator, ast.unaryop,
    ast.cmpop, ast.Call, ast.keyword,
)  # fmt: skip


def _is_arithmetic(expression: str) -> bool:
    """Whether it is made of numbers, size symbols and the functions of sizes alone.

    As in ``Mul(Integer(2), Symbol('s0', positive=True))``. Names of Python's functions begin small
    and end without a number, so that none is allowed.
    """
    for node in ast.walk(ast.parse(expression, mode="eval")):
        if isinstance(node, ast.Name):
            allowed = bool(_SYMBOL.fullmatch(node.id))
        elif isinstance(node, ast.Constant):
            word = node.value
            allowed = bool(_SYMBOL.fullmatch(word)) if isinstance(word, str) else True
        else:
            allowed = isinstance(node, _ARITHMETIC)
        if not allowed:
            return False
    return True


_GUARDS = (
    ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Subscript,
    ast.Load, ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.Slice, ast.Tuple,
)  # fmt: skip


def _is_guard(text: Any) -> bool:
    """Whether it compares sizes of inputs and does nothing else."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name) and node.id in ("L", "math", "Eq", "Ne", "Mod", "Max", "Min"):
            continue
        if isinstance(node, ast.Attribute) and node.attr in (
            "size", "stride", "shape", "storage_offset", "dim", "ndim", "floor", "ceil", "sqrt",
        ):  # fmt: skip
            continue
        if isinstance(node, ast.Call) and not node.keywords:
            continue
        if not isinstance(node, _GUARDS):
            return False
    return True


def _in_script(archive: zipfile.ZipFile) -> Iterator[str]:
    for member in archive.namelist():
        name = _inside(member)
        content = archive.read(member) if name.endswith((".py", ".pkl")) else b""
        if b"torch.classes" in content:
            yield "it has objects of C++ classes"
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(content)):
            if not isinstance(node, ast.Call):
                continue
            words = ast.unparse(node.func).split(".")
            outside = words[0] == "ops" and len(words) > 1 and words[1] not in _NAMESPACES
            if outside or (words[0] in ("torch", "ops") and words[-1] in _FILES):
                yield f"it calls '{'.'.join(words)}'"
            if words[0] in _FILES:
                yield f"it calls '{words[0]}'"
