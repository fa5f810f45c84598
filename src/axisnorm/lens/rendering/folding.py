"""Norms of one kind, and paths of one template, said once: models repeat their blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.differences import Pair
    from ..models.findings import Finding
    from ..models.norms import Norm

__all__ = [
    "SEVERITIES",
    "alike",
    "alike_pairs",
    "counted_findings",
    "folded",
    "pieces",
    "same_template",
    "shortened",
    "template",
    "worst_first",
]

SEVERITIES = ("error", "warning", "note")
"""From the worst."""

_NUMBER = re.compile(r"(?<![A-Za-z0-9])(\d+)(?![A-Za-z0-9])")
_LISTED = 6
"""So many numbers without a pattern are written out."""


def template(path: str) -> str:
    """The path with its numbers left out.

    >>> template("layers.3.norm"), template("/encoder/layer.3/norm1/Add_12")
    ('layers.#.norm', '/encoder/layer.#/norm1/Add_#')
    """
    return _NUMBER.sub("#", path)


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
            template(norm.path), norm.cls, norm.declared, norm.scheme, norm.verified, norm.shape,
            norm.dtype, norm.affine_shape, norm.calls,
            tuple((f.code, f.message) for f in norm.findings),
        )  # fmt: skip
        groups.setdefault(key, []).append(norm)
    yield from groups.values()


def alike_pairs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs in which the same differs; how far values are apart may vary."""
    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        said = tuple(
            (part.name, part.verdict, part.sentences if part.name != "values" else ())
            for part in pair.parts
        )
        key = (
            template(pair.a.path),
            template(pair.b.path),
            pair.a.cls,
            pair.b.cls,
            said,
            pair.notes,
        )
        groups.setdefault(key, []).append(pair)
    yield from groups.values()


def folded(paths: Sequence[str]) -> str:
    """Paths of one template as one.

    >>> folded(["a.0.norm", "a.1.norm"]), folded(["/a.0/Add_3", "/a.0/Add_9"])
    ('a.{0..1}.norm', '/a.0/Add_{3,9}')
    """
    unique = list(dict.fromkeys(paths))
    if len(unique) == 1:
        return unique[0]
    words = []
    for place, column in enumerate(zip(*map(_NUMBER.split, unique), strict=True)):
        if place % 2 == 0 or len(set(column)) == 1:
            words.append(column[0])
            continue
        values = sorted(set(map(int, column)))
        listed = ",".join(map(str, values))
        if values == list(range(values[0], values[-1] + 1)):
            listed = f"{values[0]}..{values[-1]}"
        elif len(values) > _LISTED:
            listed = f"{values[0]},{values[1]},..,{values[-1]}"
        words.append(f"{{{listed}}}")
    return "".join(words)


def pieces(path: str) -> list[str]:
    """A path in pieces between which a line may end; numbers in braces stay whole.

    >>> pieces("layers.{0..11}.norm"), pieces("/layer.0/Add_1")
    (['layers.', '{0..11}.', 'norm'], ['/', 'layer.', '0/', 'Add_1'])
    """
    return re.findall(r"(?:\{[^{}]*\}|[^./:])+[./:]*|[./:]+", path)


def shortened(path: str, limit: int) -> str:
    """The path in at most ``limit`` characters: its first piece and as many last ones as fit.

    >>> shortened("model.text.encoder.layers.3.attention.output.norm", 32)
    'model.…3.attention.output.norm'
    """
    if len(path) <= limit:
        return path
    first, *rest = pieces(path)
    end = ""
    while rest and len(first) + 1 + len(rest[-1]) + len(end) <= limit:
        end = rest.pop() + end
    if end:
        return f"{first}…{end}"
    half = max((limit - 1) // 2, 1)
    return f"{path[: max(limit - 1 - half, 1)]}…{path[-half:]}"


def worst_first(findings: Sequence[Finding]) -> Iterator[tuple[Finding, list[str]]]:
    """Findings that say the same once, the worst first, each with where: folded paths."""
    grouped: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.code, finding.message, finding.remedy)
        grouped.setdefault(key, []).append(finding)
    for alike_ones in sorted(
        grouped.values(), key=lambda found: SEVERITIES.index(found[0].severity)
    ):
        paths = [finding.path for finding in alike_ones]
        yield alike_ones[0], [folded(group) for group in same_template(paths) if any(group)]


def counted_findings(findings: Sequence[Finding]) -> str:
    """As in ``"1 error, 3 warnings"``; of no finding ``"no findings"``."""
    counts = {s: sum(found.severity == s for found in findings) for s in SEVERITIES}
    said = [f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n]
    return ", ".join(said) or "no findings"
