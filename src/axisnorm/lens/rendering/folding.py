"""Norms of one kind, and paths of one template, said once: models repeat their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.findings import Finding
    from ..models.norms import Norm

__all__ = ["alike", "folded", "same_template", "template", "worst_first"]

_SEVERITIES = ("error", "warning", "note")


def template(path: str) -> str:
    """The path with its numbers left out.

    >>> template("layers.3.norm")
    'layers.#.norm'
    """
    return ".".join("#" if word.isdigit() else word for word in path.split("."))


def same_template(paths: Sequence[str]) -> Iterator[list[str]]:
    """The paths in groups of one template, in the order in which each first comes."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(template(path), []).append(path)
    yield from groups.values()


def alike(norms: Sequence[Norm]) -> Iterator[list[Norm]]:
    """Norms that differ in nothing but numbers in their paths, in order of the first."""
    groups: dict[Any, list[Norm]] = {}
    for norm in norms:
        key = (
            template(norm.path), norm.cls, norm.declared, norm.scheme, norm.shape, norm.dtype,
            norm.calls, tuple((f.code, f.message) for f in norm.findings),
        )  # fmt: skip
        groups.setdefault(key, []).append(norm)
    yield from groups.values()


def folded(paths: Sequence[str]) -> str:
    """Paths of one template as one: ``a.0.norm`` and ``a.1.norm`` are ``a.{0..1}.norm``."""
    unique = list(dict.fromkeys(paths))
    if len(unique) == 1:
        return unique[0]
    words = []
    for column in zip(*[path.split(".") for path in unique], strict=True):
        values = sorted({int(word) for word in column if word.isdigit()})
        if not values or len(set(column)) == 1:
            words.append(column[0])
        elif values == list(range(values[0], values[-1] + 1)):
            words.append(f"{{{values[0]}..{values[-1]}}}")
        else:
            words.append(f"{{{','.join(map(str, values))}}}")
    return ".".join(words)


def worst_first(findings: Sequence[Finding]) -> Iterator[tuple[Finding, str]]:
    """Findings that say the same once, the worst first, each with where it was found."""
    grouped: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.code, finding.message, finding.remedy)
        grouped.setdefault(key, []).append(finding)
    for alike_ones in sorted(
        grouped.values(), key=lambda found: _SEVERITIES.index(found[0].severity)
    ):
        paths = [finding.path for finding in alike_ones]
        where = "; ".join(folded(group) for group in same_template(paths) if any(group))
        yield alike_ones[0], where
