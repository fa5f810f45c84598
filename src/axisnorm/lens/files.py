"""Arrays read from files: .npy, .npz, .safetensors and .pt, without running what is in them."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..scheme import ArgumentError
from .subject import with_article

__all__ = ["SUFFIXES", "arrays_of", "keys_of", "names_a_file", "read"]

Arrays = dict[str, Any]

LARGEST_HEADER = 100 << 20
"""Of a safetensors file: its own limit."""

_TOO_LARGE = "its shape is too large for this machine"

_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64",
                "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
                "U16": "uint16", "U32": "uint32", "U64": "uint64"}  # fmt: skip


def read(place: str, *, allow_pickle: bool = False) -> Any:
    """One array of a file.

    Args:
        place: the file, with ``:key`` behind it where it holds several arrays.
        allow_pickle: load pickled objects too, which can run any code.

    Raises:
        ArgumentError: there is no such file or key, or the file is not what its name says.
    """
    path, key = _parted(place)
    found = arrays_of(path, allow_pickle=allow_pickle)
    if not found:
        raise ArgumentError(
            f"A file holds an array, or several with keys. '{path}' has none. Save some."
        )
    if key is None:
        if len(found) != 1:
            raise ArgumentError(
                f"A file of several arrays needs a key. '{path}' has {keys_of(found)}. "
                f"Write '{path}:{next(iter(found))}'."
            )
        return next(iter(found.values()))
    if key not in found:
        remedy = "Leave the key out." if list(found) == [""] else "Write one of them."
        raise ArgumentError(
            f"A key is one of the file's. '{key}' is none of '{path}', which has "
            f"{keys_of(found)}. {remedy}"
        )
    return found[key]


def arrays_of(path: str, *, allow_pickle: bool = False) -> Arrays:
    """All arrays of a file by their keys; that of a .npy file has the key ''.

    Raises:
        ArgumentError: as :func:`read`.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise ArgumentError(
            f"Arrays are read from {', '.join(SUFFIXES)} files. '{path}' is none by its name. "
            "Save it as one of them."
        )
    if not os.path.isfile(file):
        what = "is a directory" if os.path.isdir(file) else "does not exist"
        raise ArgumentError(f"Arrays are read from a file. '{path}' {what}. Name a file.")
    try:
        return reader(file, allow_pickle)
    except OSError as error:
        raise ArgumentError(
            f"A file has to be readable. '{path}' is not: {error.strerror or error}. "
            "Check its rights, or copy it again."
        ) from error


def names_a_file(place: str) -> bool:
    """Whether it is the name of a file that is read here, with or without a key.

    >>> names_a_file("x.npy"), names_a_file("all.npz:x"), names_a_file("2,3,4")
    (True, True, False)
    """
    path = _parted(place)[0]
    return Path(path).suffix.lower() in SUFFIXES


def _parted(place: str) -> tuple[str, str | None]:
    # These answer where those of pathlib raise: no file has a name of thousands of letters.
    if os.path.exists(place) or ":" not in place:
        return place, None
    path, _, key = place.rpartition(":")
    if Path(path).suffix.lower() not in SUFFIXES:
        return place, None
    return path, key


def keys_of(found: Mapping[str, Any]) -> str:
    """The keys of a file's arrays in words.

    >>> keys_of({"a": 1, "b": 2}), keys_of({"": 1}), keys_of({})
    ("'a', 'b'", 'one array without a key', 'no array')
    """
    if list(found) == [""]:
        return "one array without a key"
    names = [f"'{name}'" for name in found]
    if not names:
        return "no array"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _not_what_it_says(path: Path, kind: str, why: object) -> ArgumentError:
    # Of what a library says its first sentence: the others guess how that came about.
    said = re.split(r"\.\s|\n", str(why).strip())[0].rstrip(".")
    said = said if path.stat().st_size else "it is empty"
    reason = f" ({said})" if said else ""
    return ArgumentError(
        f"A {path.suffix} file holds {kind}. '{path}' does not{reason}. "
        "Save the arrays again, or give the file its right name."
    )


def _pickled(path: Path, what: str) -> ArgumentError:
    return ArgumentError(
        f"Pickled objects can run any code, so they are not loaded. '{path}' has {what}. "
        "Save plain arrays, or, if you trust the file, run identify with --allow-pickle."
    )


def _read_npy(path: Path, allow_pickle: bool) -> Arrays:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            if allow_pickle and path.stat().st_size:
                return {"": _unpickled(path)}
            raise _not_what_it_says(path, "one array of NumPy", "its first bytes are others")
    try:
        return {"": _typed(np.load(path, allow_pickle=allow_pickle))}
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise _pickled(path, "an array of objects") from error
        raise _not_what_it_says(path, "one array of NumPy", error) from error
    except EOFError as error:
        raise _not_what_it_says(path, "one array of NumPy", "it ends too early") from error
    except (MemoryError, OverflowError) as error:
        raise _not_what_it_says(path, "one array of NumPy", _TOO_LARGE) from error


def _typed(values: Any) -> Any:
    """NumPy writes bfloat16, which it does not know, as two bytes without a type."""
    if isinstance(values, bytes):
        raise ValueError("a file in it is no array")
    if values.dtype == np.dtype("V2"):
        return _bfloat16(values.tobytes(), values.shape)
    return values


def _unpickled(path: Path) -> Any:
    import pickle

    with path.open("rb") as file:
        try:
            return pickle.load(file)
        except Exception as error:
            raise _not_what_it_says(path, "one array of NumPy", error) from error


def _read_npz(path: Path, allow_pickle: bool) -> Arrays:
    if not zipfile.is_zipfile(path):
        raise _not_what_it_says(path, "arrays of NumPy in a zip archive", "it is no archive")
    try:
        with np.load(path, allow_pickle=allow_pickle) as archive:
            return {name: _typed(archive[name]) for name in archive.files}
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise _pickled(path, "arrays of objects") from error
        raise _not_what_it_says(path, "arrays of NumPy in a zip archive", error) from error
    except (zipfile.BadZipFile, EOFError, KeyError, NotImplementedError) as error:
        raise _not_what_it_says(path, "arrays of NumPy in a zip archive", error) from error
    except (MemoryError, OverflowError) as error:
        raise _not_what_it_says(path, "arrays of NumPy in a zip archive", _TOO_LARGE) from error


def _read_safetensors(path: Path, allow_pickle: bool) -> Arrays:
    """The format is a length, a JSON header with types, shapes and places, and the bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, LARGEST_HEADER):
            raise _not_what_it_says(path, "tensors of safetensors", "its header has no length")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            why = "its header is no JSON"
            raise _not_what_it_says(path, "tensors of safetensors", why) from error
        try:
            return {
                name: _tensor(file, entry, 8 + length, size)
                for name, entry in _table(header).items()
                if name != "__metadata__"
            }
        except ValueError as error:
            raise _not_what_it_says(path, "tensors of safetensors", error) from error


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("its header is no table of tensors")
    return value


def _whole(entry: Mapping[str, Any], name: str) -> tuple[int, ...]:
    numbers = entry.get(name)
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise ValueError(f"the {name} of a tensor are no whole numbers")
    return tuple(numbers)


def _tensor(file: Any, entry: Any, start: int, end: int) -> Any:
    kind, shape = _table(entry).get("dtype"), _whole(entry, "shape")
    offsets = _whole(entry, "data_offsets")
    if len(offsets) != 2:
        raise ValueError("a tensor has no beginning and end")
    first, last = offsets
    if not 0 <= first <= last <= end - start or min(shape, default=0) < 0:
        raise ValueError("a tensor lies outside of the file")
    file.seek(start + first)
    data = file.read(last - first)
    if kind == "BF16":
        return _bfloat16(data, shape)
    if kind not in _SAFETENSORS:
        raise ValueError(f"the type {kind} has no array")
    dtype = np.dtype(_SAFETENSORS[kind]).newbyteorder("<")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's size is not that of its shape")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _bfloat16(data: bytes, shape: tuple[int, ...]) -> Any:
    if len(data) != math.prod(shape) * 2:
        raise ValueError("a tensor's size is not that of its shape")
    bits = np.frombuffer(data, "<u2").reshape(shape).astype(np.uint16)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        # The same numbers; that they are bfloat16 shows in their digits.
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(ml_dtypes.bfloat16)


def _read_torch(path: Path, allow_pickle: bool) -> Arrays:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path.suffix} files are read with torch. It is not installed. "
            "Run: pip install 'axisnorm[torch]'",
            name=error.name,
        ) from error
    import pickle

    try:
        with warnings.catch_warnings():
            # What torch finds odd about a file is no news beside whether it can be read.
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) and not allow_pickle and _is_pickled(path):
            raise _pickled(path, "objects that are no tensors") from error
        raise _not_what_it_says(path, "tensors of torch", "it cannot be unpacked") from error
    except KeyError as error:
        # The unpickler looks the first byte up among its instructions.
        raise _not_what_it_says(path, "tensors of torch", "it cannot be unpacked") from error
    except (RuntimeError, EOFError, ValueError, AttributeError, ImportError) as error:
        raise _not_what_it_says(path, "tensors of torch", error) from error
    found = dict(_tensors(loaded, ""))
    if not found:
        raise ArgumentError(
            f"A {path.suffix} file holds tensors. {with_article(loaded)} without any is in "
            f"'{path}'. Save a tensor, or a dict of tensors."
        )
    return found


def _is_pickled(path: Path) -> bool:
    """Whether it is an archive of torch or begins as a pickle does."""
    with path.open("rb") as file:
        return zipfile.is_zipfile(path) or file.read(1) == b"\x80"


def _tensors(value: Any, name: str) -> list[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        return [(name, value)]
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    return [
        pair
        for key, inner in items
        for pair in _tensors(inner, f"{name}.{key}" if name else str(key))
    ]


_READERS: Mapping[str, Callable[[Path, bool], Arrays]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
}

SUFFIXES = tuple(_READERS)
"""The files that can be read, by their suffixes."""
