"""Pages about models: audits, swaps, and two models norm by norm."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from .folding import SEVERITIES, alike, alike_pairs, counted_findings, folded, worst_first
from .markup import Cell, Page, code, listed, number, path, severe, signed, table
from .wording import count, forward_times, seconds

if TYPE_CHECKING:
    from ..models.differences import Differences, Pair
    from ..models.findings import Finding
    from ..models.norms import Audit, Norm
    from ..swap import Swap

__all__ = ["audit", "differences", "swap"]

_SOURCES = {
    "module": "A module of torch",
    "transformers": "A model directory of transformers",
    "exported": "An exported program of torch",
    "torchscript": "A TorchScript file",
    "onnx": "An ONNX file",
}


# --------------------------------------------------------------------------------------------
# audit


def audit(result: Audit) -> Page:
    """Findings first, then what is computed as pictures, then every norm."""
    kinds = list(alike(result.norms))
    drawn: list[dict[str, Any]] = []
    title = f"{result.model}: {count(len(result.norms), 'normalization')}"
    source = _SOURCES.get(result.source, result.source)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{counted_findings(result.findings).capitalize()}.</p>',
        f'<p class="soft">{escape(source)}. One forward pass takes {seconds(result.seconds)}.</p>',
        "<h2>Findings</h2>",
        _findings(result.findings),
    ]
    if kinds:
        body += ["<h2>What they compute</h2>", _pictures(result.norms, drawn)]
        most = max(*(sum(norm.time_share or 0.0 for norm in norms) for norms in kinds), 1e-12)
        heads = ("norm", "class", "computes", "input", "statistics", "eps", "type", "time",
                 "verified", "findings")  # fmt: skip
        body.append("<h2>Norms, in the order in which they ran</h2>")
        said = "The heads of the table sort it. Identical norms of repeated blocks share a row."
        body.append(f'<p class="soft">{said}</p>')
        body.append(_form("norms", words="Search paths, classes, schemes and findings"))
        body.append(
            table(
                heads,
                [_norm_row(norms, most) for norms in kinds],
                numbers=(4, 5, 7),
                sortable=True,
                caption="Norms",
                name="norms",
                marks=[{"words": _words(norms)} for norms in kinds],
            )
        )
    return title, "\n".join(body), {"drawn": drawn}, (
        "notation", "tensor", "drawn", "table", "filter",
    )  # fmt: skip


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return '<p class="good">None.</p>'
    rows, marks = [], []
    for found, where in worst_first(findings):
        said = f'{escape(found.message)}<br><span class="soft">{escape(found.remedy)}</span>'
        places = "<br>".join(map(path, where)) or "the model"
        rows.append((severe(found.severity, found.severity), code(found.code), places, said))
        marks.append({"kind": found.severity, "code": found.code})
    kinds = Counter(mark["kind"] for mark in marks)
    form = _form(
        "findings",
        kinds={severity: kinds[severity] for severity in SEVERITIES if kinds[severity]},
        codes=sorted({mark["code"] for mark in marks}),
    )
    heads = ("severity", "finding", "where", "what, and what to do")
    return form + table(heads, rows, caption="Findings", name="findings", marks=marks)


def _form(
    rows: str,
    *,
    kinds: Mapping[str, int] | None = None,
    codes: Sequence[str] = (),
    words: str = "",
) -> str:
    """What shows some of the rows of a table; without a script all are shown, and no form."""
    fields = []
    if kinds:
        chips = "".join(
            f'<label class="chip"><input type="checkbox" name="kind" value="{escape(kind)}" '
            f"checked><span>{escape(kind)} ({number})</span></label>"
            for kind, number in kinds.items()
        )
        fields.append(f'<fieldset><legend>Show</legend><div class="chips">{chips}</div></fieldset>')
    if len(codes) > 1:
        options = "".join(f"<option>{escape(one)}</option>" for one in codes)
        fields.append(
            '<label class="choice">Finding <select name="code"><option value="">all</option>'
            f"{options}</select></label>"
        )
    if words:
        fields.append(
            f'<label class="search">{escape(words)} <input type="search" name="words" '
            'autocomplete="off" spellcheck="false"></label>'
        )
    return (
        f'<form class="filter" data-rows="{rows}" hidden>{"".join(fields)}'
        '<p class="note" role="status"></p></form>'
    )


def _pictures(norms: Sequence[Norm], drawn: list[dict[str, Any]]) -> str:
    """For each way in which elements share, the tensor of the first norm that has it."""
    ways: dict[Any, list[Norm]] = {}
    for norm in norms:
        scheme = norm.scheme or norm.declared
        if scheme is not None and norm.shape is not None and 0 not in norm.shape:
            axes = scheme.layout(len(norm.shape)).axes
            parts = tuple(tuple((part.size, part.reduced) for part in axis) for axis in axes)
            ways.setdefault((parts, norm.in_words), []).append(norm)
    figures = []
    for place, alike_ones in enumerate(ways.values()):
        first = alike_ones[0]
        scheme = first.scheme or first.declared
        assert scheme is not None
        drawn.append({"text": str(scheme), "shape": first.shape})
        figures.append(
            f'<figure><span data-drawn="{place}" data-cell="22" data-labelled></span>'
            f"<figcaption>{escape(first.in_words)}<br>{code(scheme.axes)}<br>"
            f'<span class="soft">{count(len(alike_ones), "norm")}, here on {first.shape}</span>'
            "</figcaption></figure>"
        )
    if not figures:
        return '<p class="soft">None ran.</p>'
    said = "One letter and colour for elements that share their statistics."
    return f'<p class="soft">{said}</p><div class="figures">{"".join(figures)}</div>'


def _words(norms: Sequence[Norm]) -> str:
    """What a norm's row is found by."""
    first = norms[0]
    said = [first.cls, first.kind, str(first.scheme), str(first.declared), first.in_words]
    said += [str(first.dtype), *(found.code for found in first.findings)]
    return " ".join([*(norm.path for norm in norms), *said, *first.nodes]).lower()


def _norm_row(norms: Sequence[Norm], most: float) -> Sequence[Cell]:
    first = norms[0]
    paths = [norm.path or "(the model)" for norm in norms]
    name = path(folded(paths))
    if len(norms) > 1:
        name += _details(f"all {len(norms)}", map(_single, norms))
    elif first.calls > 1:
        name += f'<br><span class="soft">{count(first.calls, "call")}</span>'
    if len(first.nodes) > 1:
        name += _details(count(len(first.nodes), "operator"), map(path, first.nodes))
    scheme = first.scheme or first.declared
    codes = dict.fromkeys((found.severity, found.code) for found in first.findings)
    signs = "<br>".join(severe(severity, one) for severity, one in codes)
    worst = min((SEVERITIES.index(found.severity) for found in first.findings), default=3)
    shape = escape(str(first.shape)) if first.shape is not None else "-"
    weight = f'<br><span class="soft nowrap">weight {first.affine_shape}</span>'
    means: Cell = ("-", None)
    if first.num_statistics is not None:
        size = f'<br><span class="soft">of {first.group_size:,}</span>'
        means = (f"{first.num_statistics:,}{size}", first.num_statistics)
    verified, word = _verified(first)
    return (
        (name, paths[0]),
        _class(first.cls),
        (
            f'<span class="roomy">{_computes(first)}</span>',
            str(scheme) if scheme else None,
        ),
        f'<span class="mono nowrap">{shape}</span>{weight if first.affine_shape else ""}',
        means,
        (f"{first.eps:g}", first.eps) if first.eps is not None else ("-", None),
        f'<span class="nowrap">{escape(first.dtype or "-")}</span>',
        _share(norms, most),
        (verified, word),
        (signs or '<span class="good">none</span>', worst),
    )


def _class(name: str) -> str:
    """A class's name, broken before its capitals rather than anywhere."""
    words = re.split(r"(?<=[a-z0-9])(?=[A-Z])", name)
    return f'<span class="class">{"<wbr>".join(map(escape, words))}</span>'


def _details(summary: str, items: Iterable[str]) -> str:
    said = "".join(f"<li>{item}</li>" for item in items)
    return f"<details><summary>{escape(summary)}</summary><ul>{said}</ul></details>"


def _single(norm: Norm) -> str:
    """One of the norms of a row."""
    said = path(norm.path or "(the model)")
    return said if norm.time_share is None else f"{said} {100 * norm.time_share:.1f} %"


def _share(norms: Sequence[Norm], most: float) -> Cell:
    """The time of identical norms, with a bar beside that of the row which takes the most."""
    shares = [norm.time_share for norm in norms if norm.time_share is not None]
    if not shares:
        return "-", None
    total = sum(shares)
    bar = f'<span class="bar" style="--share: {max(total, 0.0) / most:.4f}"></span>'
    return f"{bar}{100 * total:.1f} %", total


def _verified(norm: Norm) -> tuple[str, str]:
    """Whether what is said was shown, with a sign; and as a word to sort by."""
    if norm.verified:
        return signed("good", "✓", "yes"), "yes"
    if norm.scheme is None or norm.shape is None or norm.center_unclear:
        word = "did not run" if norm.shape is None else "open" if norm.scheme else "no"
        return signed("warn", "?", word), word
    return signed("bad", "✗", "differs"), "differs"


def _computes(norm: Norm) -> str:
    if norm.shape is None:
        kind, words, scheme = "warn", "did not run itself", norm.declared
    elif norm.scheme is None:
        kind, words, scheme = "warn", "not verified", norm.declared
    else:
        kind = "good" if norm.verified else "warn" if norm.center_unclear else "bad"
        words, scheme = norm.in_words, norm.scheme
    said = f'<span class="{kind}">{escape(words)}</span>'
    if norm.eps_undetermined and scheme is not None:
        # Its eps is one of many that fit.
        return f"{said}<br>{code(scheme.replace(eps=1e-5))} (eps not determined)"
    if norm.scheme is not None and norm.declared not in (None, norm.scheme):
        return (
            f'{said}<dl class="versus"><div><dt>declared</dt><dd>{code(norm.declared)}</dd></div>'
            f"<div><dt>identified</dt><dd>{code(norm.scheme)}</dd></div></dl>"
        )
    return f"{said}<br>{code(scheme)}" if scheme is not None else said


# --------------------------------------------------------------------------------------------
# Two models


def differences(result: Differences) -> Page:
    """What differs first, norm by norm, each as it is in both models."""
    different = sum(not pair.same for pair in result.pairs)
    verdict = "the same norms" if result.same else "not the same norms"
    title = f"{result.a.model} and {result.b.model}: {verdict}"
    body = [f"<h1>{escape(title)}</h1>", '<p class="lead">']
    body += [
        f"{name}: {escape(one.model)}, {count(len(one.norms), 'normalization')}<br>"
        for name, one in (("a", result.a), ("b", result.b))
    ]
    said = f"{count(len(result.pairs), 'pair')}, {different} of them differ. {result.aligned}"
    body += ["</p>", f'<p class="soft">{escape(said)}</p>', listed(result.notes)]
    rows: list[Sequence[Cell]] = []
    kinds: list[str] = []
    words: list[str] = []
    folds = list(alike_pairs(result.pairs))
    for pairs in sorted(folds, key=lambda pairs: pairs[0].same):
        rows.append(_pair_row(pairs))
        kinds.append("the same" if pairs[0].same else "different")
        words.append(" ".join([_words([p.a for p in pairs]), _words([p.b for p in pairs])]))
    for name, alone in (("a", result.only_a), ("b", result.only_b)):
        for norms in alike(alone):
            rows.append(_alone_row(norms, name))
            kinds.append(f"only in {name}")
            words.append(_words(norms))
    if rows:
        body.append(_form("pairs", kinds=Counter(kinds), words="Search"))
        marks = [{"kind": kind, "words": said} for kind, said in zip(kinds, words, strict=True)]
        heads = ("norm", "verdict", "in a", "in b", "what differs", "values apart")
        body.append(
            table(heads, rows, numbers=(5,), sortable=True, caption="Norms of both models",
                  name="pairs", marks=marks)
        )  # fmt: skip
    return title, "\n".join(body), {}, ("table", "filter")


def _pair_row(pairs: Sequence[Pair]) -> Sequence[Cell]:
    first = max(pairs, key=lambda pair: pair.largest_difference or 0.0)
    name = path(folded([pair.a.path or "(the model)" for pair in pairs]))
    other = path(folded([pair.b.path or "(the model)" for pair in pairs]))
    if name != other:
        name += f'<br><span class="soft">in b</span> {other}'
    if len(pairs) > 1:
        name += _details(f"all {len(pairs)}", (path(pair.a.path) for pair in pairs))
    sentences = [sentence for part in first.different for sentence in part.sentences]
    unknown = [f"{part.name} not compared: {' '.join(part.sentences)}"
               for part in first.parts if part.verdict == "unknown"]  # fmt: skip
    said = listed(sentences) if sentences else ""
    if unknown or first.notes:
        said += f'<div class="soft">{listed([*unknown, *first.notes])}</div>'
    verdict = signed("good", "=", "the same") if first.same else signed("bad", "≠", "different")
    off = first.largest_difference
    return (
        (name, pairs[0].a.path),
        (verdict, "the same" if first.same else "different"),
        _one_side(first.a),
        _one_side(first.b),
        said,
        (f"{off:.3g}", off) if off is not None else ("-", None),
    )


def _alone_row(norms: Sequence[Norm], name: str) -> Sequence[Cell]:
    said = path(folded([norm.path or "(the model)" for norm in norms]))
    if len(norms) > 1:
        said += _details(f"all {len(norms)}", (path(norm.path) for norm in norms))
    side = _one_side(norms[0])
    verdict = signed("bad", "≠", f"only in {name}")
    return (
        (said, norms[0].path),
        (verdict, f"only in {name}"),
        side if name == "a" else "-",
        side if name == "b" else "-",
        "",
        ("-", None),
    )


def _one_side(norm: Norm) -> str:
    scheme = norm.scheme or norm.declared
    said = code(scheme) if scheme else ""
    return f'{_class(norm.cls)}{said}<br><span class="soft">verified:</span> {_verified(norm)[0]}'


# --------------------------------------------------------------------------------------------
# swap


def swap(result: Swap) -> Page:
    """What was replaced, what was left and why."""
    done = len(result.replaced)
    title = f"{result.model}: {done} replaced, {len(result.left)} left"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>The largest difference of the outputs is {number(result.largest_difference)}.</p>",
    ]
    if result.seconds is not None:
        body.append(f"<p>{forward_times(*result.seconds)}</p>")
    if result.replaced:
        rows: list[Sequence[Cell]] = [
            (
                path(one.path or "(the model)"),
                code(one.before),
                code(one.after),
                (f"{one.largest_difference:.2g}", one.largest_difference),
                (f"{one.tolerance:.2g}", one.tolerance),
            )
            for one in result.replaced
        ]
        heads = ("norm", "before", "after", "largest difference", "tolerance")
        body.append("<h2>Replaced</h2>")
        body.append(table(heads, rows, numbers=(3, 4), sortable=True, caption="Replaced"))
    if result.left:
        rows = [
            (path(one.path or "(the model)"), code(one.cls), escape(one.reason))
            for one in result.left
        ]
        body.append("<h2>Left as they were</h2>")
        body.append(table(("norm", "class", "why"), rows, sortable=True, caption="Left"))
    return title, "\n".join(body), {}, ("table",)
