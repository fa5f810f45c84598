"""What all results of the lens have in common: data first, then text, JSON, a page, a figure."""

from __future__ import annotations

import abc
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..scheme import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURE_FORMATS", "Result", "checked_target", "json_schema", "write"]

FIGURE_FORMATS = ("png", "svg")
"""What a figure can be saved as, by the suffix of its file."""

_RESULTS = (".html", *(f".{suffix}" for suffix in FIGURE_FORMATS))
"""Suffixes of files that may be written again in a directory that is read."""

VERSION = 1
"""Of the JSON schema: raised when a name goes or changes its meaning, not when one is added."""


class Result(abc.ABC):
    """What a tool of the lens found. The attributes are the data; everything else shows them."""

    kind: ClassVar[str]
    """The name of the result in its JSON schema and of the functions that draw it."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json` as Python objects."""

    def to_json(self) -> str:
        """The result as JSON, after the schema that docs/json.md describes.

        NaN and infinity, which JSON has not, are null.

        >>> import axisnorm
        >>> print(axisnorm.explain("... [d]", (2, 3)).to_json()[:39])
        {
          "schema": "axisnorm.explanation/1",
        """
        data = {"schema": f"axisnorm.{self.kind}/{VERSION}", **self.to_dict()}
        return json.dumps(_without_nan(data), indent=2, ensure_ascii=False, allow_nan=False)

    def to_text(self, *, width: int | None = None, color: bool | None = None) -> str:
        """The result for a terminal.

        Args:
            width: columns, the terminal's where None.
            color: ANSI colours, where None only if standard output is a terminal.

        Raises:
            ModuleNotFoundError: rich is not installed (``pip install 'axisnorm[lens]'``).
        """
        from .rendering import report

        return report.to_text(getattr(report, self.kind)(self), width=width, color=color)

    def to_html(self) -> str:
        """The result as one page that needs nothing else: no network and no other file."""
        from .rendering import html as pages

        return pages.page(self)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that a notebook's styles and its do not meet."""
        from .rendering import html as pages

        return pages.fragment(self)

    def figure(self) -> Figure:
        """The result as a figure of matplotlib.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (``pip install 'axisnorm[lens]'``).
        """
        from .rendering import figures

        return figures.figure(self)

    def save_figure(self, path: str | os.PathLike[str]) -> None:
        """Draw the figure into a file, as PNG or SVG by its suffix.

        Raises:
            ArgumentError: the suffix is another, or there is no such directory.
        """
        target = checked_target(path, FIGURE_FORMATS)
        write({target: self.figure_file(target.suffix[1:].lower())})

    def figure_file(self, format: str) -> bytes:
        """What :meth:`save_figure` writes."""
        from .rendering import figures

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"figure.{format}"
            figures.save(self.figure(), path)
            return path.read_bytes()

    def __str__(self) -> str:
        return self.to_text()


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what :meth:`Result.to_json` gives.

    >>> [one["$ref"] for one in json_schema()["oneOf"]][:2]
    ['#/$defs/explanation', '#/$defs/comparison']
    """
    text = (files(__package__) / "schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def checked_target(
    path: str | os.PathLike[str],
    formats: tuple[str, ...] = (),
    reads: Iterable[str | os.PathLike[str]] = (),
) -> Path:
    """A path that can be written to, refused before anything is computed for it.

    Args:
        formats: the suffixes that it may have.
        reads: files and directories that are read, of which it must not replace anything.
    """
    target = Path(path)
    if not os.fspath(path):
        raise ArgumentError("A result is written to a file. '' came. Name one.")
    if formats and target.suffix[1:].lower() not in formats:
        raise ArgumentError(
            f"A figure is saved as {' or '.join(formats)}, by its file's suffix. "
            f"'{target}' came. Name a file such as '{target.with_suffix('').name or 'f'}.svg'."
        )
    try:
        is_directory, has_parent = target.is_dir(), _real(target).parent.is_dir()
    except OSError as error:
        raise _cannot_write(target, error) from error
    if is_directory or not target.name:
        raise ArgumentError(f"A result is written to a file. '{target}' is a directory. Name one.")
    if target.exists() and not target.is_file():
        # A rename would put a file in the place of the device.
        raise ArgumentError(
            f"A result is written to a regular file. '{target}' is another kind. Name one."
        )
    if not has_parent:
        raise ArgumentError(
            f"A file is written to a directory that exists. '{target.parent}' does not. "
            "Make it first."
        )
    real = _real(target)
    for place in (real.parent, *([real] if real.exists() else [])):
        # A rename needs the directory alone: it would replace a file that is protected.
        if not os.access(place, os.W_OK):
            raise ArgumentError(
                f"A result is written where writing is allowed. '{place}' is write-protected. "
                "Name another file."
            )
    if any(_same(target, Path(one)) for one in reads):
        raise ArgumentError(
            f"What is read is not written over. '{target}' came for both. Name another file."
        )
    return target


def _real(path: Path) -> Path:
    """Where it is written: of a link the file that it stands for."""
    return Path(os.path.realpath(path))


def _same(target: Path, read: Path) -> bool:
    """Whether writing the one would replace the other, or what is no result in it."""
    place, other = _real(target), _real(read)
    if place == other:
        return True
    if not place.exists():
        return False
    if os.path.isdir(other):
        return other in place.parents and place.suffix.lower() not in _RESULTS
    return os.path.exists(other) and place.samefile(other)


def _cannot_write(target: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"A result is written to a file. '{target}' cannot be: {error.strerror}. Name another."
    )


def write(contents: Mapping[Path, bytes]) -> None:
    """Write files: each in full or, if anything fails, none of them.

    Each is written under another name beside its own first, and only then called by it.
    """
    waiting: dict[Path, Path] = {}
    file_of: dict[Path, Path] = {}
    try:
        for target, content in contents.items():
            file_of[target] = _real(target)
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=file_of[target].parent)
            waiting[target] = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp makes files for the owner alone; these are like any other.
            mask = os.umask(0)
            os.umask(mask)
            waiting[target].chmod(0o666 & ~mask)
        for target in contents:
            waiting.pop(target).replace(file_of[target])
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        for temporary in waiting.values():
            temporary.unlink(missing_ok=True)
