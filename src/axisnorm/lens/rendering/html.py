"""The results of the lens as web pages: each is one file that asks the network for nothing.

What a page says stands in its HTML, escaped; its script draws the tensors and makes tables
sortable. The script's own rules for the notation are those of :mod:`axisnorm.scheme`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ...presets import PRESETS
from ...scheme import ArgumentError
from . import benchmarked
from .audited_pages import audit, differences, swap
from .markup import Cell, Page, code, file_text, filled, finite, listed, number, signed, table
from .palette import FILLS
from .placing import place
from .residuals import chart_of, eps_in_words
from .wording import count, followed

if TYPE_CHECKING:
    from ..compare import Comparison
    from ..explain import Explanation
    from ..family import Family, Node
    from ..identifying.identification import Candidate, Identification
    from ..presets import Presets
    from ..witness import Example
    from ..worked import Worked

__all__ = ["fragment", "page"]

LISTED_ELEMENTS = 4096
"""A page holds the elements, means and variances of tensors of up to this size."""

LISTED_EXAMPLE = 16
"""An example is written out up to this many elements."""

LISTED_VALUES = 12
"""Of a calculation so many numbers of a line are written out."""


def page(result: Any) -> str:
    """One self-contained page: the style, the script and the data stand in it.

    Args:
        result: what :func:`axisnorm.explain`, ``compare``, ``identify``, ``audit`` or ``swap``
            returned.

    Raises:
        ArgumentError: there is no page of this kind of result.

    >>> import axisnorm
    >>> page(axisnorm.explain("... [d]", (2, 3)))[:15]
    '<!doctype html>'
    """
    kind = getattr(result, "kind", type(result).__name__)
    if kind not in _PAGES:
        raise ArgumentError(
            f"Pages are made of {', '.join(_PAGES)}. A {kind} came. Use its to_text() instead."
        )
    title, body, data, scripts = _PAGES[kind](result)
    text = filled(
        "page.html",
        title=escape(title),
        style=file_text("page/style.css"),
        body=body,
        data=_json({"fills": FILLS, **data}),
        script="\n".join(file_text(f"page/{name}.js") for name in scripts),
    )
    # Names may hold halves of surrogate pairs, which no file can.
    return text.encode("utf-8", "replace").decode("utf-8")


def fragment(result: Any) -> str:
    """The page for a place in another one, such as a notebook: styles and names do not meet.

    >>> import axisnorm
    >>> fragment(axisnorm.explain("... [d]", (2, 3)))[:15]
    '<iframe srcdoc='
    """
    kind = getattr(result, "kind", type(result).__name__)
    return (
        f'<iframe srcdoc="{escape(page(result), quote=True)}" title="axisnorm: {escape(kind)}" '
        'sandbox="allow-scripts" loading="lazy" style="width: 100%; height: 44rem; '
        'max-height: 90vh; border: 1px solid #8888; border-radius: 6px; resize: vertical">'
        "</iframe>"
    )


def _json(data: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# --------------------------------------------------------------------------------------------
# explain


def _explanation(result: Explanation) -> Page:
    text = str(result.scheme)
    named = "[" not in result.subject
    head = code(text) if not named else f"{escape(result.subject)} {code(text)}"
    body = [
        f"<h1>{head}</h1>",
        f'<p class="soft">on a tensor of shape {code(result.shape)}</p>',
        filled(
            "page/explanation.html",
            scheme=escape(text, quote=True),
            shape=", ".join(map(str, result.shape)),
            presets="".join(f'<option value="{escape(name)}">' for name in PRESETS),
        ),
    ]
    if result.worked is not None:
        body += ["<h2>One group by hand</h2>", _by_hand(result, result.worked)]
    body.append(f"<h2>Named norms with the statistics of {code(text)} at this shape</h2>")
    rows = [
        (
            escape(equivalent.name),
            code(equivalent.scheme),
            '<span class="good">nothing: the same in everything</span>'
            if equivalent.same
            else listed(equivalent.differences),
        )
        for equivalent in result.equivalents
    ]
    body.append(
        table(("norm", "scheme", "what still differs"), rows) if rows else "<p>None has them.</p>"
    )
    route = f"{result.route.engine} ({result.route.reason})"
    body.append(f'<p class="note">Engine: {escape(route)}</p>')
    data: dict[str, Any] = {
        "text": text,
        "shape": result.shape,
        "parameters": result.parameter_names,
        "presets": {name: str(scheme) for name, scheme in PRESETS.items()},
        "x": None,
        "mean": None,
        "spread": None,
    }
    for name, values in (("x", result.x), ("mean", result.mean), ("spread", result.var)):
        if values is not None and values.size <= LISTED_ELEMENTS:
            data[name] = [finite(value) for value in values.ravel().tolist()]
    return f"{text} on {result.shape}", "\n".join(body), data, ("notation", "tensor", "explanation")


def _by_hand(result: Explanation, worked: Worked) -> str:
    """Every line of the calculation, then the followed element with its numbers put in."""
    group = f"group {list(worked.group)}" if worked.group else "the group"
    rows: list[Sequence[Cell]] = [
        (escape(group), _values(worked.elements, worked.size), "the elements of x that share")
    ]
    for step in worked.steps:
        size = worked.size if len(step.values) > 1 else 1
        rows.append((escape(step.name), _values(step.values, size), escape(step.how)))
    said = [f"{name}: {how}" for name, how in followed(worked, result.scheme, number)]
    return table(("line", "value", "how"), rows) + f'<p class="mono">{"<br>".join(said)}</p>'


def _values(values: Sequence[float], size: int) -> str:
    """Numbers in a line, the first of many."""
    shown = ", ".join(number(value) for value in values[:LISTED_VALUES])
    more = size - min(len(values), LISTED_VALUES)
    return f'<span class="mono">{shown}{f", ... ({more:,} more)" if more > 0 else ""}</span>'


# --------------------------------------------------------------------------------------------
# compare

_PART_NAMES = {
    "statistics": "statistics",
    "affine": "weight and bias",
    "constants": "constants",
    "running": "running statistics",
}


def _comparison(result: Comparison) -> Page:
    def named(name: str, side: Explanation) -> str:
        text = str(side.scheme)
        scheme = "" if side.subject == text else f" {code(text)}"
        return f"{name}: {escape(side.subject)}{scheme}"

    verdict = "The same" if result.same else "Not the same"
    body = [
        f"<h1>{verdict} on a tensor of shape {code(result.shape)}</h1>",
        f'<p class="lead">{named("a", result.a)}<br>{named("b", result.b)}</p>',
    ]
    rows = [
        (
            _PART_NAMES.get(part.name, escape(part.name)),
            _verdict(part.verdict),
            listed(part.sentences) if part.sentences else "",
        )
        for part in result.parts
    ]
    body.append(table(("part", "verdict", "what is so"), rows))
    if result.same_in and not result.same:
        types = ", ".join(result.same_in)
        body.append(f"<p>In {escape(types)} both give the same output for every input.</p>")
    if result.notes:
        body.append(listed(result.notes))
    affine = any(side.scheme.affine for side in (result.a, result.b))
    body.append("<h2>Over the same tensor</h2>")
    body.append(
        filled(
            "page/comparison.html",
            a=named("a", result.a),
            b=named("b", result.b),
            disabled="" if affine else " disabled",
        )
    )
    if result.agreements:
        body.append("<h2>Where they agree although they differ</h2>")
        body.append(listed(agreement.condition for agreement in result.agreements))
    if result.example is not None:
        body.append("<h2>The smallest tensor that tells them apart</h2>")
        body.append(_example(result.example))
    body.append("<h2>The family at this shape</h2>")
    body.append(
        '<p class="soft">From the most means, at the bottom, to the fewest. A line: each group '
        "above holds so many whole groups below.</p>"
    )
    body.append(_family_map(result.family))
    if result.family.special_cases:
        body.append("<h3>Special cases</h3>")
        body.append(listed(case.sentence for case in result.family.special_cases))
    data = {"a": str(result.a.scheme), "b": str(result.b.scheme), "shape": result.shape}
    title = f"{result.a.subject} and {result.b.subject} on {result.shape}"
    return title, "\n".join(body), data, ("notation", "tensor", "comparison")


def _verdict(verdict: str) -> str:
    kind = {"equal": "good", "different": "bad"}.get(verdict, "warn")
    sign = {"equal": "=", "different": "≠"}.get(verdict, "?")
    return signed(kind, sign, verdict)


def _example(example: Example) -> str:
    """The input and both outputs, element by element where both differ in the tensor's order."""
    used = []
    names = (f"{word}_{side}" for side in "ab"
             for word in ("weight", "bias", "running_mean", "running_var"))  # fmt: skip
    for name in names:
        values = getattr(example, name)
        if values is not None:
            word, _, side = name.rpartition("_")
            said = f"{word} of {side}" if side in ("a", "b") else name
            numbers = ", ".join(number(float(value)) for value in values.ravel()[:LISTED_EXAMPLE])
            used.append(f"{said}: {numbers}{', ...' if values.size > LISTED_EXAMPLE else ''}")
    places = [
        tuple(map(int, np.unravel_index(i, example.shape)))
        for i in range(min(example.x.size, LISTED_EXAMPLE))
    ]
    rows = []
    for index in places:
        x, one, two = (float(of[index]) for of in (example.x, example.y_a, example.y_b))
        rows.append((code(f"[{', '.join(map(str, index))}]"), number(x), number(one),
                     number(two), number(one - two)))  # fmt: skip
    heads = ("element", "x", "a gives", "b gives", "difference")
    more = example.x.size - len(places)
    said = f"<p>Shape {code(example.shape)}, {escape(str(example.x.dtype))}. "
    said += f"The largest difference is {number(example.largest_difference)}.</p>"
    if example.best_of:
        said += (
            f"<p>The weight and bias of {example.best_of} were fitted to the other's output: no "
            "others come nearer.</p>"
        )
    left = f'<p class="note">{more:,} more elements are left out.</p>' if more else ""
    drawn = table(heads, rows, numbers=(1, 2, 3, 4), stack=False)
    return f'{said}{listed(used) if used else ""}<div class="narrow">{drawn}</div>{left}'


def _node_lines(node: Node) -> list[str]:
    means = f"{node.num_groups:,} mean{'' if node.num_groups == 1 else 's'}"
    size = f"{node.group_size:,} element{'' if node.group_size == 1 else 's'}"
    return [f"{means} of {size}", *([member.name for member in node.members] or ["no named norm"])]


def _family_map(family: Family) -> str:
    """The map as SVG: texts are given the room that wide letters need."""
    line, padding = 19.0, 10.0
    sizes = []
    for node in family.nodes:
        first, *names = _node_lines(node)
        badges = 22 * (node.holds_a + node.holds_b)
        width = max([8.0 * len(first) + badges, *(7.6 * len(name) for name in names)])
        sizes.append((width + 2 * padding, line * (1 + len(names)) + 2 * padding - 5))
    edges = [(edge.finer, edge.coarser) for edge in family.edges]
    places = place(sizes, edges, across=28.0, between=46.0)
    drawn = []
    for edge, route in zip(family.edges, places.routes, strict=True):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in route)
        (x0, y0), (x1, y1) = route[0], route[1]
        near = min(20 / max(y0 - y1, 20), 0.5)
        x, y = x0 + (x1 - x0) * near, y0 + (y1 - y0) * near
        said = f"{edge.holds:,}"
        half = 3.8 * len(said) + 4
        drawn.append(
            f'<polyline class="edge" points="{points}"/><rect class="under" x="{x - half:.1f}" '
            f'y="{y - 8:.1f}" width="{2 * half:.1f}" height="16"/>'
            f'<text class="holds" x="{x:.1f}" y="{y + 4:.1f}">{said}</text>'
        )
    for node, (x, y), (width, height) in zip(family.nodes, places.nodes, sizes, strict=True):
        left, top = x - width / 2, y - height / 2
        kind = "node compared" if node.holds_a or node.holds_b else "node"
        texts = [
            f'<text class="{"count" if row == 0 else "name"}" x="{left + padding:.1f}" '
            f'y="{top + padding + 11 + row * line:.1f}">{escape(text)}</text>'
            for row, text in enumerate(_node_lines(node))
        ]
        badge = left + width - 7
        for name, here in (("b", node.holds_b), ("a", node.holds_a)):
            if here:
                texts.append(
                    f'<rect class="badge" x="{badge - 18:.1f}" y="{top + 6:.1f}" width="18" '
                    f'height="18" rx="4"/><text class="badge-name" x="{badge - 9:.1f}" '
                    f'y="{top + 19.5:.1f}">{name}</text>'
                )
                badge -= 22
        drawn.append(
            f'<g class="{kind}"><rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="6"/>{"".join(texts)}</g>'
        )
    words = "; ".join(
        f"{_node_lines(node)[0]}: {', '.join(_node_lines(node)[1:])}"
        + (f" (holds {node.compared})" if node.compared else "")
        for node in family.nodes
    )
    lines = "; ".join(
        f"each group of {_node_lines(family.nodes[edge.coarser])[0]} holds {edge.holds} groups of "
        f"{_node_lines(family.nodes[edge.finer])[0]}"
        for edge in family.edges
    )
    width, height = places.width + 4, places.height + 4
    return (
        f'<div class="scroll"><svg class="map" role="img" viewBox="-2 -2 {width:.1f} {height:.1f}" '
        f'width="{width:.0f}" height="{height:.0f}" aria-label="{escape(words)}. {escape(lines)}">'
        f"{''.join(drawn)}</svg></div>"
    )


# --------------------------------------------------------------------------------------------
# identify


def _identification(result: Identification) -> Page:
    best = result.best
    drawn = []
    if best is None:
        head = "Not identified"
    else:
        head = f"Identified: {best.name}"
    body = [f"<h1>{escape(head)}</h1>", f'<p class="lead">{escape(result.conclusion)}</p>']
    data = ", ".join(
        f"{name} {dtype}" for name, dtype in zip(("x", "y"), result.dtypes, strict=True) if dtype
    )
    if result.shape:
        body.append(f'<p class="soft">Shape {code(result.shape)}, {escape(data)}</p>')
    if best is not None:
        body.append(_best(best))
        if result.shape and 0 not in result.shape:
            drawn.append({"text": str(best.scheme), "shape": result.shape})
            body.append('<p><span data-drawn="0" data-cell="24"></span></p>')
    if result.notes:
        body += ["<h2>Notes</h2>", listed(result.notes)]
    body += _undecided(result)
    if result.candidates:
        body.append("<h2>How far off each candidate is</h2>")
        body.append(_residual_chart(result))
        body.append("<h2>Candidates</h2>")
        body.append(_candidates(result))
    title = f"{head}: {best.scheme}" if best else head
    return title, "\n".join(body), {"drawn": drawn}, ("notation", "tensor", "drawn", "table")


def _best(best: Candidate) -> str:
    parts = []
    if best.mistake is not None:
        should = ""
        if best.correction is not None:
            should = f"<p>It should have been {code(best.correction)}.</p>"
        parts.append(
            f'<div class="callout"><h2><span aria-hidden="true">! </span>A known mistake: '
            f"{escape(best.mistake.code)}</h2><p>{escape(best.mistake.sentence)}</p>{should}</div>"
        )
    rows = [("scheme", code(best.scheme))]
    if best.first is not None:
        rows.append(("applied to the output of", code(best.first)))
    if best.afterwards is not None:
        rows.append(("after the norm", escape(best.afterwards.sentence)))
    if best.norms:
        rows.append(("published as", ", ".join(map(code, best.norms))))
    rows.append(("axes that share statistics", _axes(best.axes)))
    for name, values, source, axes in (
        ("weight", best.weight, best.weight_from, best.affine_axes),
        ("bias", best.bias, best.bias_from, best.affine_axes),
    ):
        if source != "none":
            where = f" along {'axis' if len(axes) == 1 else 'axes'} {_axes(axes)}" if axes else ""
            said = ""
            if values is not None:
                numbers = ", ".join(number(float(value)) for value in values.ravel()[:8])
                said = f": {numbers}{', ...' if values.size > 8 else ''}"
            rows.append((name, escape(f"{source}{where}{said}")))
    if best.eps_interval is not None:
        rows.append(("eps by this data", escape(eps_in_words(best.eps_interval))))
    if best.computed_in:
        rows.append(("computed in", escape(best.computed_in)))
    rows.append(("residual", f"{best.residual:.3g}, tolerance {best.tolerance:.3g}"))
    rows.append(("numbers that were fitted", f"{best.free_parameters:,}"))
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{said}</dd>" for name, said in rows)
    return f'{"".join(parts)}<dl class="facts">{cells}</dl>'


def _axes(axes: Sequence[int]) -> str:
    return ", ".join(map(str, axes)) or "none"


def _undecided(result: Identification) -> list[str]:
    body = []
    if result.indistinguishable and result.best is not None:
        body.append("<h2>What this data cannot tell apart</h2>")
        schemes = "".join(f"<li>{code(scheme)}</li>" for scheme in result.indistinguishable)
        body.append(f"<ul>{schemes}</ul>")
    if result.decisions:
        body.append("<h2>What would decide further</h2>")
    for decision in result.decisions:
        body.append(f"<p>{escape(decision.sentence)}</p>" if decision.sentence else "")
        rows: list[Sequence[Cell]] = [("the input x", _array(decision.x))]
        rows += [
            (code(scheme), _array(output))
            for scheme, output in zip(decision.schemes, decision.outputs, strict=True)
        ]
        body.append(table(("norm", "values"), rows))
    return body


def _array(values: Any) -> str:
    said = np.array2string(
        np.asarray(values, dtype=np.float64), precision=6, threshold=LISTED_EXAMPLE,
        suppress_small=False, separator=", ",
    )  # fmt: skip
    return f"<pre>{escape(said)}</pre>"


def _candidates(result: Identification) -> str:
    heads = ("candidate", "rank", "fits", "residual", "tolerance", "fitted numbers",
             "eps by this data", "axes", "mistake")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for rank, candidate in enumerate(result.candidates, 1):
        fits = signed("good", "●", "fits") if candidate.fits else signed("bad", "×", "no")
        if candidate is result.best:
            fits = signed("good", "★", "best")
        interval = candidate.eps_interval
        rows.append((
            (f"{escape(candidate.name)}<br>{code(candidate.scheme)}", candidate.name),
            (str(rank), rank),
            (fits, 0 if candidate is result.best else 1 if candidate.fits else 2),
            (f"{candidate.residual:.3g}", finite(candidate.residual)),
            (f"{candidate.tolerance:.3g}", finite(candidate.tolerance)),
            (f"{candidate.free_parameters:,}", candidate.free_parameters),
            (_unbroken(eps_in_words(interval)), finite(interval[1]) if interval else None),
            _axes(candidate.axes),
            escape(candidate.mistake.code) if candidate.mistake else "",
        ))  # fmt: skip
    return table(heads, rows, numbers=(1, 3, 4, 5), sortable=True, caption="Candidates")


def _unbroken(text: str) -> str:
    """Words whose numbers do not end a line in their exponents."""
    return " ".join(f'<span class="nowrap">{escape(word)}</span>' for word in text.split())


def _residual_chart(result: Identification) -> str:
    """Each candidate's residual on a logarithmic axis, beside the band that rounding explains."""
    chart = chart_of(result)
    row = 46
    height = row * len(chart.candidates)

    def across(value: float) -> float:
        """In percent: the chart is as wide as its page."""
        return 1.5 + 96.0 * chart.place(value)

    drawn = []
    for power in chart.ticks:
        x = across(10.0**power)
        drawn.append(f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{height}"/>')
        side = "start" if x < 3 else "end" if x > 97 else "middle"
        drawn.append(
            f'<text class="tick" x="{x:.2f}%" y="{height + 18}" text-anchor="{side}">'
            f"1e{power}</text>"
        )
    said = []
    for i, candidate in enumerate(chart.candidates):
        top = row * i
        x, band = across(candidate.residual), across(candidate.tolerance)
        kind = "best" if candidate is result.best else "fits" if candidate.fits else "off"
        mistake = f" ! {candidate.mistake.code}" if candidate.mistake else ""
        tail = f'<tspan class="mistake">{escape(mistake)}</tspan>' if mistake else ""
        sign = {"best": "★", "fits": "●", "off": "×"}[kind]
        shown = f"{candidate.residual:.3g}" if math.isfinite(candidate.residual) else "not finite"
        # What is said stands on that side of the mark where there is room, and beside the band.
        after = x < 50
        beside = max(x, band if candidate.residual <= candidate.tolerance else x) if after else x
        side, gap = ("after", 12) if after else ("before", -12)
        if after and beside > 60:
            beside, side, gap = 98.5, "before", 0
        drawn.append(
            f'<g class="{kind}"><text class="name" x="0" y="{top + 16}"><tspan>'
            f'{escape(candidate.name)}</tspan><tspan class="scheme" dx="10">'
            f"{escape(str(candidate.scheme))}</tspan></text>"
            f'<rect class="band" x="0" y="{top + 22}" width="{band:.2f}%" height="18"/>'
            f'<text class="mark" x="{x:.2f}%" y="{top + 37}">{sign}</text>'
            f'<text class="value {side}" x="{beside:.2f}%" dx="{gap}" y="{top + 35}">'
            f"{escape(shown)}{tail}</text></g>"
        )
        said.append(
            f"{candidate.name} {shown}, {kind if kind != 'off' else 'does not fit'}{mistake}"
        )
    more = ""
    if chart.left_out:
        more = f'<p class="note">{count(chart.left_out, "further candidate")}, in the table.</p>'
    label = escape("Residuals: " + "; ".join(said))
    return (
        '<p class="soft"><span class="swatch"></span>what rounding explains '
        '<span class="good">★ best</span> <span class="good">● fits</span> '
        '<span class="bad">× does not</span></p>'
        f'<svg class="chart" role="img" width="100%" height="{height + 26}" '
        f'aria-label="{label}">{"".join(drawn)}</svg>{more}'
    )


# --------------------------------------------------------------------------------------------
# presets


def _presets(result: Presets) -> Page:
    rows = [(code(name), code(PRESETS[name])) for name in result.names]
    body = "<h1>Published normalizations</h1>" + table(
        ("name", "scheme"), rows, sortable=True, caption="Published normalizations"
    )
    return "Published normalizations", body, {}, ("table",)


_PAGES: dict[str, Callable[[Any], Page]] = {
    "explanation": _explanation,
    "comparison": _comparison,
    "identification": _identification,
    "audit": audit,
    "swap": swap,
    "differences": differences,
    "presets": _presets,
    "benchmark": benchmarked.page,
}
