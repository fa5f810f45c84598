"""The words of the field for what shares a mean, and the notation for sets of axes."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheme import Scheme, Sizes, trailing_names
from .explain import axis_dimensions, statistics_dimensions

__all__ = [
    "affine_axes",
    "in_words",
    "is_trailing",
    "kind_of_mean",
    "kind_of_spread",
    "meanings",
    "on_axes",
]


def kind_of_mean(scheme: Scheme) -> str:
    """What there is one of for each group."""
    if scheme.scale == "l2":
        return "length"
    if not scheme.center and scheme.scale == "std":
        return "deviation"
    return "mean" if scheme.center else "root mean square"


def kind_of_spread(scheme: Scheme) -> str:
    """What eps is added to, before any root."""
    if scheme.scale == "l2":
        return "sum of squares"
    return "variance" if scheme.center or scheme.scale == "std" else "mean square"


def in_words(scheme: Scheme, shape: Sequence[int]) -> str:
    """What shares a mean, in the words of the field.

    >>> in_words(Scheme.layer_norm(), (8, 24, 384)), in_words(Scheme.batch_norm(), (8, 3, 7, 7))
    ('one mean a token', 'one mean a channel')
    >>> in_words(Scheme.group_norm(4), (8, 32, 7, 7)), in_words(Scheme.group_norm(1), (8, 32, 7, 7))
    ('one mean a sample and group of channels', 'one mean a sample')
    """
    sizes = scheme.sizes(tuple(shape))
    running = "running " if scheme.statistics == "running" else ""
    what = f"one {running}{kind_of_mean(scheme)}"
    layout = sizes.layout
    told = statistics_dimensions(sizes)
    # Of an axis that is split its parts of one element say nothing.
    parts = [[i for i in own if sizes.expanded[i] != 1] or own for own in axis_dimensions(sizes)]
    split = [axis for axis, own in enumerate(parts) if len({i in told for i in own}) > 1]
    if split:
        return f"{what} {_of_parts(sizes, split[0])}"
    reduced = tuple(axis for axis, own in enumerate(parts) if not any(i in told for i in own))
    kept = [i for i in range(len(shape)) if i not in reduced]
    if [layout.axes[i][-1].name for i in kept] == ["c"]:
        return f"{what} a channel"
    known = meanings(len(shape), is_trailing(sizes)).get(reduced)
    if known:
        return f"{what} {known[0]}"
    if not kept:
        return f"{what} in all"
    said = ", ".join(map(str, kept))
    return f"{what} for each index of {'axis' if len(kept) == 1 else 'axes'} {said}"


def _of_parts(sizes: Sizes, split: int) -> str:
    """What shares a mean where one axis is seen as two."""
    layout = sizes.layout
    whole = [i for i, axis in enumerate(layout.axes) if not any(part.reduced for part in axis)]
    place = f"place in the groups of axis {split}"
    if not layout.axes[split][0].reduced:
        if whole == [0] and split in (1, layout.ndim - 1):
            return "a sample and group of channels"
        place = f"group of axis {split}"
        if whole == list(range(layout.ndim - 1)) and layout.ndim == 3:
            return "a token and group of features"
    if not whole:
        return f"a {place}"
    axes = "axis" if len(whole) == 1 else "axes"
    return f"for each index of {axes} {', '.join(map(str, whole))} and {place}"


def is_trailing(sizes: Sizes) -> bool:
    """Whether features are the last axis (tokens), not axis 1 (images)."""
    layout = sizes.layout
    last = (layout.ndim - 1,)
    if layout.ndim == 3 and layout.axes[1][-1].name == "s":
        # Tokens by their name, wherever the weight stands: the batch norm of the picture for text.
        return True
    if affine_axes(sizes):
        return affine_axes(sizes) == last
    channels_first = any(axis[-1].name == "c" for axis in layout.axes[:2])
    return layout.reduced_axes == last and not channels_first


def meanings(ndim: int, trailing: bool) -> dict[tuple[int, ...], tuple[str, str]]:
    """For sets of axes that share a mean: a mean of what, and which norm is known for it.

    ``trailing``: the features are the last axis, as in tokens; otherwise axis 1, as in images.
    """
    last = ndim - 1
    found: dict[tuple[int, ...], tuple[str, str]] = {}
    rest = tuple(range(1, ndim))
    if rest:
        found[rest] = ("a sample", "")
    if ndim == 3 and trailing:
        found[0, 2] = ("a position", "BatchNorm")
        found[0, 1] = ("a feature", "BatchNorm over tokens")
        found[2,] = ("a token", "LayerNorm")
        found[1,] = ("a sample and feature", "InstanceNorm over positions")
    elif ndim >= 3 and not trailing:
        found[(0, *range(2, ndim))] = ("a channel", "BatchNorm")
        found[tuple(range(2, ndim))] = ("a sample and channel", "InstanceNorm")
        found[1,] = ("a pixel", "LayerNorm2d")
        found.setdefault((last,), ("a row of the last axis", "LayerNorm"))
    elif ndim >= 3:
        found[last,] = ("a row of the last axis", "LayerNorm")
        found[tuple(range(last))] = ("a feature", "BatchNorm")
        found[tuple(range(1, last))] = ("a sample and feature", "InstanceNorm, channels last")
        found[(0, *range(2, ndim))] = ("an index of axis 1", "BatchNorm")
    elif ndim == 2:
        found = {(1,): ("a row", "LayerNorm"), (0,): ("a feature", "BatchNorm")}
    return found


def affine_axes(sizes: Sizes) -> tuple[int, ...]:
    """The tensor's axes along which weight and bias vary, in whole or in part."""
    affine = sizes.layout.affine
    return tuple(
        axis for axis, own in enumerate(axis_dimensions(sizes)) if any(i in affine for i in own)
    )


def on_axes(ndim: int, reduced: Sequence[int], affine: Sequence[int], like: Scheme) -> Scheme:
    """The scheme with ``like``'s constants whose mean is shared along these whole axes."""
    reduced, affine = tuple(reduced), tuple(affine)
    count = len(reduced)
    trailing = tuple(range(ndim - count, ndim))
    if reduced == trailing and affine in ((), trailing):
        names = trailing_names(count)
        axes = f"... [{' '.join(names)}]"
        names = tuple("" for _ in range(ndim - count)) + names
    elif ndim >= 3 and affine in ((), (1,)) and reduced in _channels_first(ndim):
        axes = _channels_first(ndim)[reduced]
        names = ("n", "c") + ("",) * (ndim - 2)
    else:
        usual = {1: ("d",), 2: ("n", "d"), 3: ("b", "s", "d"), 4: ("n", "c", "h", "w"),
                 5: ("n", "c", "d", "h", "w")}  # fmt: skip
        names = usual.get(ndim, tuple(f"a{i}" for i in range(ndim)))
        axes = " ".join(f"[{name}]" if i in reduced else name for i, name in enumerate(names))
    said = " ".join(names[i] for i in affine)
    return like.replace(axes=axes, affine=said, statistics="batch")


def _channels_first(ndim: int) -> dict[tuple[int, ...], str]:
    space = tuple(range(2, ndim))
    return {(1,): "n [c] ...", space: "n c [...]", (0, *space): "[n] c [...]",
            (1, *space): "n [c ...]"}  # fmt: skip
