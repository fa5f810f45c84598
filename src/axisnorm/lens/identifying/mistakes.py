"""The known mistakes in normalizations, each with its name and what was meant instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...scheme import Scheme
from ..naming import in_words, kind_of_mean, on_axes

__all__ = ["CODES", "Mistake", "mistake_of", "twice"]

CODES = {
    "deviation-under-root": "a standard deviation stands under the root where the variance belongs",
    "variance-without-root": "the variance divides without its root",
    "length-instead-of-rms": "the length divides where the root mean square belongs",
    "sample-deviation": "the variance has the divisor n - 1 where n belongs",
    "eps-outside-root": "eps is added outside the root",
    "axes-off-by-one": "the mean is taken over the axis beside the right one",
    "normalized-twice": "the output of a normalization is normalized again",
}
"""Every known mistake's code with what it means."""


class Mistake(NamedTuple):
    """A known mistake."""

    code: str
    sentence: str


def mistake_of(scheme: Scheme, shape: Sequence[int]) -> tuple[Mistake, Scheme] | None:
    """The known mistake that a scheme makes, with the scheme it should have been.

    >>> mistake, meant = mistake_of(Scheme("... [d]; scale=sqrt_std; correction=1"), (2, 3, 4))
    >>> mistake.code, meant
    ('deviation-under-root', Scheme('... [d]'))
    """
    meant = scheme.replace(scale="auto", correction=0, eps_placement="variance")
    sample = scheme.correction == 1 and scheme.statistics == "batch"
    centred = scheme.center or scheme.scale == "std"
    divisor = " with divisor n - 1" if sample else ""
    if scheme.scale == "sqrt_std":
        return Mistake(
            "deviation-under-root",
            f"A {'sample ' if sample else ''}standard deviation{divisor} stands under the root "
            "where the biased variance belongs: "
            + _division(scheme, "sqrt(deviation + eps)", "sqrt(deviation) + eps"),
        ), meant
    if scheme.scale == "var":
        return Mistake(
            "variance-without-root",
            f"The variance{divisor} divides without its root: "
            + _division(scheme, "(variance + eps)", "(variance + eps)"),
        ), meant
    if scheme.scale == "l2":
        what = "centred value" if scheme.center else "value"
        return Mistake(
            "length-instead-of-rms",
            f"The {what} is divided by its length, the root of the sum of squares, not by the "
            "root of their mean: the output is smaller by sqrt(n).",
        ), meant
    if scheme.scale == "std":
        return None  # a published norm (Keras rms_scaling, timm SimpleNorm)
    if sample and centred:
        outside = scheme.eps_placement == "std" and scheme.eps
        return Mistake(
            "sample-deviation",
            "The sample deviation (divisor n - 1) divides where the biased one (divisor n) "
            "belongs" + (", and eps is added outside the root." if outside else "."),
        ), meant
    if scheme.eps_placement == "std" and scheme.eps:
        what = "standard deviation" if scheme.center else "root mean square"
        return Mistake(
            "eps-outside-root",
            f"eps is added to the {what} where it belongs to the "
            f"{'variance' if scheme.center else 'mean square'}, inside the root.",
        ), meant
    return _off_by_one(scheme, shape)


def _division(scheme: Scheme, inside: str, outside: str) -> str:
    below = inside if scheme.eps_placement == "variance" else outside
    return f"{'(x - mean)' if scheme.center else 'x'} / {below}."


def twice(scheme: Scheme, first: Scheme, other: Scheme | None = None) -> tuple[Mistake, Scheme]:
    """The mistake of normalizing what is normalized already, with the one norm it should be.

    Args:
        scheme: the norm that came last.
        first: the norm that came first.
        other: what may have come first as well.
    """
    if other is not None:
        said = (
            f"The norm '{scheme}' is applied to its own output, or to that of '{other}': an input "
            "whose means are large beside its deviations would decide."
        )
    elif first.replace(affine="") == scheme.replace(affine=""):
        said = f"The norm '{scheme}' is applied to its own output."
    else:
        said = f"The norm '{scheme}' is applied to the output of '{first}'."
    return Mistake("normalized-twice", said), scheme


def _off_by_one(scheme: Scheme, shape: Sequence[int]) -> tuple[Mistake, Scheme] | None:
    """Axes that no norm with a name shares, beside axes that one does."""
    from .hypotheses import is_known, whole

    layout = scheme.layout(len(shape))
    reduced, ndim = layout.reduced_axes, len(shape)
    split = any(len(axis) > 1 for axis in layout.axes)
    if split or scheme.statistics == "running" or is_known(whole(shape, reduced)):
        return None
    if 0 in reduced and len(reduced) > 1:
        return None
    for step in (1, -1):
        moved = tuple(axis + step for axis in reduced)
        trailing = moved == tuple(range(ndim - len(moved), ndim))
        if min(moved) < 1 or max(moved) >= ndim or not trailing:
            continue
        meant = on_axes(ndim, moved, _affine(scheme, ndim, moved), scheme)
        said, right = _axes_said(reduced), _axes_said(moved)
        kind = kind_of_mean(scheme)
        known = "LayerNorm" if scheme.center else "RMSNorm"
        return Mistake(
            "axes-off-by-one",
            f"The {kind} is taken over {said}, where {known} takes {right}: "
            f"{in_words(scheme, shape)}, not {in_words(meant, shape)}.",
        ), meant
    return None


def _affine(scheme: Scheme, ndim: int, moved: tuple[int, ...]) -> tuple[int, ...]:
    return moved if scheme.affine else ()


def _axes_said(axes: Sequence[int]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
