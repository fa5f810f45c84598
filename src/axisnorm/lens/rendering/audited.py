"""What is said about models in a terminal: audits, swaps, and two models norm by norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..models.norms import Norm
from .console import (
    Console,
    ConsoleOptions,
    Group,
    Measurement,
    Padding,
    RenderableType,
    RenderResult,
    Table,
    Text,
    Unbroken,
    box,
    section,
)
from .folding import (
    SEVERITIES,
    alike,
    alike_pairs,
    counted_findings,
    folded,
    pieces,
    shortened,
    template,
    worst_first,
)
from .wording import count, forward_times, off, seconds

if TYPE_CHECKING:
    from ..models.differences import Differences, Pair
    from ..models.findings import Finding
    from ..models.norms import Audit
    from ..swap import Swap

__all__ = ["audit", "differences", "rivals", "swap"]

_COLORS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}

_NARROWEST_PATH, _WIDEST_PATH = 18, 44
"""Columns of a path in a table: it is broken and shortened to fit the first, if it must be."""

_PATH_SHARE, _OTHERS = 0.4, 42
"""A path takes at most this part of a table's width, and leaves so many columns to the others."""

_PATH_LINES, _ROOMY = (4, 3), 28
"""A path takes up to so many lines in less than so many columns, and in more; beyond, it is
shortened in its middle."""

_SHOWN_PLACES = 4
"""Of the places of one finding so many are listed."""


@dataclass(frozen=True)
class _Path:
    """A path, broken between its pieces, with what is said behind it."""

    path: str
    behind: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 8)
        most = _PATH_LINES[width >= _ROOMY]
        parts: list[str] = []
        # Lines that end between pieces are not full: what does not fit is shortened further.
        for limit in range(most * width - len(self.behind), width // 2, -4):
            parts = pieces(shortened(self.path, limit))
            lines, room = 1, width
            for piece in [*parts, self.behind]:
                if len(piece) > room:
                    lines, room = lines + 1, width
                room -= len(piece)
            if lines <= most and max(map(len, parts), default=0) <= width:
                break
        yield Unbroken((*map(Text, parts), Text(self.behind, style="bold")))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        whole = len(self.path) + len(self.behind)
        most = min(whole, _WIDEST_PATH)
        return Measurement(min(most, _NARROWEST_PATH), most).with_maximum(options.max_width)


def _paths(paths: Sequence[str]) -> _Path:
    """Paths of one template and how many they are."""
    many = f"  x{len(paths)}" if len(paths) > 1 else ""
    return _Path(folded([path or "(the model)" for path in paths]), many)


# --------------------------------------------------------------------------------------------
# audit


def audit(result: Audit) -> RenderableType:
    """The findings, identical norms in one row, and what was ruled out."""
    kinds = list(alike(result.norms))
    title = Text.assemble(
        (result.model, "bold"), f": {count(len(result.norms), 'normalization')}, ",
        counted_findings(result.findings),
        (f"   (one forward pass takes {seconds(result.seconds)})", "dim"),
    )  # fmt: skip
    parts: list[RenderableType] = [title]
    if result.findings:
        parts += [Text(), section("Findings"), Padding(_findings(result.findings), (0, 0, 0, 2))]
    if kinds:
        parts += [Text(), section("Norms"), _Norms(tuple(tuple(norms) for norms in kinds))]
    if any(norm.identification for norm in result.norms):
        parts += [Text(), rivals(result.norms)]
    return Group(*parts)


_Column = tuple[str, Literal["left", "right"], Callable[[Sequence[Norm]], RenderableType]]
"""Its head, its side, and what stands in it of identical norms."""


@dataclass(frozen=True)
class _Norms:
    """A table of norms with as many columns as the console has room for."""

    kinds: tuple[tuple[Norm, ...], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        columns: list[_Column] = [
            ("norm", "left", _name),
            ("computes", "left", lambda norms: _computes(norms[0])),
            ("means", "right", lambda norms: _means(norms[0])),
            ("time", "right", _share),
        ]
        if width >= 96:
            columns[3:3] = [("eps", "right", lambda norms: _eps(norms[0])),
                            ("type", "left", lambda norms: _known(norms[0].dtype))]  # fmt: skip
        if width >= 136:
            columns[2:2] = [
                ("input", "left", lambda norms: _known(norms[0].shape)),
                ("weight", "left", lambda norms: _known(norms[0].affine_shape)),
            ]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
        for name, justify, _ in columns:
            prose = name in ("norm", "computes")
            most = None
            if name == "norm":
                most = max(_NARROWEST_PATH, min(int(_PATH_SHARE * width), width - _OTHERS))
            table.add_column(
                name, justify=justify, no_wrap=not prose, overflow="fold", max_width=most
            )
        for norms in self.kinds:
            table.add_row(*[cell(norms) for _, _, cell in columns])
        yield table


def _name(norms: Sequence[Norm]) -> RenderableType:
    first = norms[0]
    said = [first.cls]
    if len(first.nodes) > 1:
        said.append(count(len(first.nodes), "node" if first.kind == "node" else "operator"))
    if first.calls > 1:
        said.append(f"{first.calls} calls")
    return Group(_paths([norm.path for norm in norms]), Text(", ".join(said), style="dim"))


def _known(value: object) -> Text:
    return Text(str(value)) if value else Text("-", style="dim")


def _computes(norm: Norm) -> RenderableType:
    """What it computes, with a sign that says without colour whether that was shown."""
    if norm.shape is None:
        return _said("?", "did not run itself", "yellow", norm.declared)
    if norm.scheme is None:
        return _said("?", "not verified", "yellow", norm.declared)
    scheme: object = norm.scheme
    if norm.eps_undetermined:
        # Its eps is one of many that fit.
        scheme = f"{norm.scheme.replace(eps=1e-5)} (eps not determined)"
    if norm.verified:
        return _said("✓", norm.in_words, "green", scheme)
    if norm.center_unclear:
        return _said("?", norm.in_words, "yellow", scheme)
    words = f"{norm.in_words}, not what it declares"
    return _said("✗", words, "red", scheme, f"declared: {norm.declared}")


def _said(sign: str, words: str, color: str, *below: object) -> RenderableType:
    lines = [Padding(Text(str(line), style="dim"), (0, 0, 0, 2)) for line in below if line]
    return Group(Text(f"{sign} {words}", style=color), *lines)


def _means(norm: Norm) -> Text:
    if norm.num_statistics is None:
        return Text("-", style="dim")
    return Text.assemble(f"{norm.num_statistics:,}", (f"\nof {norm.group_size:,}", "dim"))


def _eps(norm: Norm) -> Text:
    return Text("-", style="dim") if norm.eps is None else Text(f"{norm.eps:.3g}")


def _share(norms: Sequence[Norm]) -> Text:
    shares = [norm.time_share for norm in norms if norm.time_share is not None]
    return Text(f"{100 * sum(shares):.1f} %") if shares else Text("-", style="dim")


def rivals(norms: Sequence[Norm]) -> RenderableType:
    """What the norms were shown not to be, with how far off each would have been."""
    apart: dict[str, list[float]] = {}
    unclear: dict[str, int] = {}
    for norm in norms:
        if norm.identification is None or norm.identification.best is None:
            continue
        fits: dict[str, bool] = {}
        least: dict[str, float] = {}
        for candidate in norm.identification.candidates:
            if candidate is norm.identification.best:
                continue
            name = candidate.name
            fits[name] = fits.get(name, False) or candidate.fits
            least[name] = min(least.get(name, candidate.residual), candidate.residual)
        # A norm counts once, also where several candidates have one name.
        for name, fit in fits.items():
            if fit:
                unclear[name] = unclear.get(name, 0) + 1
            else:
                apart.setdefault(name, []).append(least[name])
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    # Other means before other formulas, the plainest first.
    means = sorted(apart, key=lambda name: (not name.startswith("one "), len(name)))
    for name in [name for name in means if "as declared" not in name][:8]:
        times = len(apart[name])
        table.add_row(
            Text(name),
            Text(f"{times} of {len(norms)}", style="dim"),
            Text(f"off by {off(min(apart[name]))}" + (" or more" if times > 1 else "")),
        )
    parts: list[RenderableType] = [
        section("Ruled out by the numbers"),
        Padding(table, (0, 0, 0, 2)),
    ]
    shown = [norm.identification.best for norm in norms
             if norm.identification and norm.identification.best]  # fmt: skip
    if shown:
        parts.append(Text.assemble(
            "What is said above agrees within ",
            (off(max(best.residual for best in shown)), "bold green"),
            (f" (rounding explains up to {off(max(best.tolerance for best in shown))}).", "dim"),
        ))  # fmt: skip
    if unclear:
        said = ", ".join(f"{name} ({count})" for name, count in unclear.items())
        parts.append(Text(f"This input cannot tell from it: {said}.", style="dim"))
    return Group(*parts)


@dataclass(frozen=True)
class _Place:
    """A finding's code and where it was found, in one line where there is room."""

    code: str
    paths: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = Text(self.code, style="bold")
        said = "; ".join(self.paths)
        if len(self.code) + 2 + len(said) <= options.max_width:
            yield code.append(f"  {said}", "not bold")
            return
        yield code
        for path in self.paths:
            yield Padding(_Path(path), (0, 0, 0, 2))


def _findings(findings: Sequence[Finding]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    grouped = list(worst_first(findings))
    for severity in SEVERITIES:
        of_it = [one for one in grouped if one[0].severity == severity]
        if of_it and table.row_count:
            table.add_row()
        for found, where in of_it:
            more = len(where) - _SHOWN_PLACES
            said: list[RenderableType] = [
                _Place(found.code, tuple(where[:_SHOWN_PLACES])),
                *([Text(f"and {count(more, 'place')} more", style="dim")] if more > 0 else []),
                Text(found.message),
                Text(found.remedy, style="dim"),
            ]
            table.add_row(Text(severity, style=_COLORS[severity]), Group(*said))
    return table


# --------------------------------------------------------------------------------------------
# swap


def swap(result: Swap) -> RenderableType:
    """What was replaced, what was left and why, and how far the outputs moved."""
    parts: list[RenderableType] = [
        Text.assemble(
            (result.model, "bold"),
            f": {len(result.replaced)} replaced, {len(result.left)} left. "
            f"Largest difference of the outputs: {off(result.largest_difference)}",
        )
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    done: dict[tuple[str, str, str], list[str]] = {}
    for replaced in result.replaced:
        key = (template(replaced.path), replaced.before, replaced.after)
        done.setdefault(key, []).append(replaced.path)
    for (_, before, after), paths in done.items():
        table.add_row(Text("replaced", style="green"), _paths(paths),
                      Text(f"{before} -> {after}", style="dim"))  # fmt: skip
    kept: dict[tuple[str, str], list[str]] = {}
    for left in result.left:
        kept.setdefault((template(left.path), left.reason), []).append(left.path)
    for (_, reason), paths in kept.items():
        table.add_row(Text("left", style="yellow"), _paths(paths), Text(reason))
    if result.seconds is not None:
        parts.append(Text(forward_times(*result.seconds)))
    parts.append(Padding(table, (0, 0, 0, 2)))
    if result.outcome:
        parts.append(Text(result.outcome))
    return Group(*parts)


# --------------------------------------------------------------------------------------------
# Two models


def differences(result: Differences) -> RenderableType:
    """What differs first, then what only one model has, then what is the same."""
    different = sum(not pair.same for pair in result.pairs)
    alone = (("a", result.only_a), ("b", result.only_b))
    verdict = Text("the same norms", style="bold green")
    if not result.same:
        words = [f"{different} of {len(result.pairs)} pairs differ"] if different else []
        words += [f"{len(norms)} only in {name}" for name, norms in alone if norms]
        verdict = Text(", ".join(words), style="bold yellow")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, one in (("a", result.a), ("b", result.b)):
        said = Text.assemble((one.model, "bold"), f": {count(len(one.norms), 'normalization')}")
        table.add_row(Text(name, style="dim"), said)
    parts: list[RenderableType] = [table, Text.assemble(verdict, (f"   {result.aligned}", "dim"))]
    parts += [Text(note, style="dim") for note in result.notes]
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold", max_width=_WIDEST_PATH)
    rows.add_column(overflow="fold", ratio=1)
    kinds = list(alike_pairs(result.pairs))
    for pairs in (pairs for pairs in kinds if not pairs[0].same):
        rows.add_row(Text("differ", style="bold yellow"), _paired(pairs), _differing(pairs))
    for name, norms in alone:
        for same in alike(norms):
            paths = _paths([norm.path for norm in same])
            rows.add_row(Text(f"only in {name}", style="bold yellow"), paths, _named(same[0]))
    for pairs in (pairs for pairs in kinds if pairs[0].same):
        rows.add_row(Text("the same", style="green"), _paired(pairs), _agreeing(pairs[0]))
    if rows.row_count:
        parts += [Text(), rows]
    return Group(*parts)


def _paired(pairs: Sequence[Pair]) -> RenderableType:
    shown: list[RenderableType] = [_paths([pair.a.path for pair in pairs])]
    if pairs[0].by == "order" and pairs[0].a.path != pairs[0].b.path:
        b = _paths([pair.b.path for pair in pairs])
        shown.append(_Path(f"b: {b.path}"))
    return Group(*shown)


def _differing(pairs: Sequence[Pair]) -> RenderableType:
    # Values differ from pair to pair: the largest difference stands for all.
    largest = max(pairs, key=lambda pair: pair.largest_difference or 0.0)
    return Group(*_lines(largest, len(pairs)), *(Text(note, "dim") for note in pairs[0].notes))


def _lines(pair: Pair, many: int) -> Iterator[Text]:
    for part in pair.different:
        for sentence in part.sentences:
            if part.name == "values" and many > 1:
                sentence = f"{sentence.rstrip('.')} (the most of {many})."
            yield Text.assemble((f"{part.name}: ", "dim"), sentence)


def _named(norm: Norm) -> Text:
    scheme = norm.scheme or norm.declared
    return Text.assemble(norm.cls, (f"  {scheme}" if scheme else "", "dim"))


def _agreeing(pair: Pair) -> RenderableType:
    unknown = [part for part in pair.parts if part.verdict == "unknown"]
    said = [Text(f"{part.name}: not compared. {' '.join(part.sentences)}", "dim")
            for part in unknown]  # fmt: skip
    return Group(_named(pair.a), *said, *(Text(note, "dim") for note in pair.notes))
