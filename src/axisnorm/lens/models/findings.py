"""What is suspicious about a norm in a model: rules, each with a stable code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...scheme import Scheme
from ..identify import Identification, affine_axes, in_words

__all__ = ["CODES", "Finding", "findings_of", "mixed_eps"]

CODES = {
    "declared-mismatch": "the output is not what the class computes",
    "class-name-lies": "the class is called after another norm than it computes",
    "batch-statistics-in-eval": "in eval mode the statistics are still the batch's",
    "layout-mismatch": "the channels stand in another axis than the norm takes them from",
    "degenerate-statistics": "one element has a mean of its own: the output is the bias",
    "implausible-eps": "eps is not a small positive number",
    "framework-momentum": "momentum is another framework's, whose meaning is the reverse",
    "eps-undetermined": "neither the class nor this input says its eps",
    "mixed-eps": "norms of one kind have several eps",
    "bypassed": "a fused operator computed the norm instead of the module",
    "not-run": "the norm did not run on this input",
    "not-verified": "what the norm computes could not be shown on this input",
}
"""Every finding's code with what it means."""


@dataclass(frozen=True)
class Finding:
    """Something suspicious, or worth knowing."""

    code: str
    severity: str
    """``"error"``: wrong. ``"warning"``: probably not meant. ``"note"``: worth knowing."""
    message: str
    remedy: str
    path: str = ""
    """The norm's path, empty for the model as a whole."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "code": self.code,
            "severity": self.severity,
            "path": self.path,
            "message": self.message,
            "remedy": self.remedy,
        }


def findings_of(
    path: str,
    module: Any,
    declared: Scheme | None,
    identification: Identification | None,
    shape: Sequence[int] | None,
    problem: str | None,
    *,
    eps_undetermined: bool = False,
) -> Iterator[Finding]:
    """The findings about one norm.

    Args:
        module: the norm module, None for a function.
        shape: of its input, None if it did not run.
        problem: why nothing could be verified, None if it could.
        eps_undetermined: nothing says the eps of what fits.
    """
    best = identification.best if identification else None
    scheme = best.scheme if best and not eps_undetermined else declared
    name = type(module).__name__ if module is not None else "this call"
    if problem is not None:
        yield Finding("not-verified", "warning", f"Not verified: {problem}.",
                      "Audit with an input on which it runs plainly.", path)  # fmt: skip
    elif identification is not None and identification.tells_nothing:
        yield Finding(
            "not-verified",
            "warning",
            "Not verified: this input tells nothing apart, means over other axes give the same "
            "output.",
            "Audit with an input that varies along all its axes.",
            path,
        )
        best = None
    elif identification is not None and declared is not None and shape is not None:
        yield from _mismatch(path, module, declared, identification, shape)
    elif identification is not None and best is None:
        yield Finding(
            "not-verified",
            "warning",
            f"{name} {'is called a norm' if 'norm' in name.lower() else 'looks like a norm'}, "
            "but fits none that was tried.",
            "Read what its forward computes.",
            path,
        )
    unclear = declared is None and identification is not None and identification.center_unclear
    if unclear and best is not None:
        yield Finding(
            "not-verified",
            "note",
            f"LayerNorm and RMSNorm both give the output of {name}: the means of this input are 0.",
            "Audit with an input whose means are not 0.",
            path,
        )
    if eps_undetermined:
        yield Finding(
            "eps-undetermined",
            "note",
            f"The eps of {name} is not determined: on this input it makes no difference that "
            "rounding would not.",
            "Read its forward, or audit with an input of a smaller scale.",
            path,
        )
    if identification is not None and best is not None and module is not None and shape:
        yield from _name(path, module, best.scheme, identification, shape)
    if scheme is None:
        return
    yield from _eps(path, module, scheme)
    yield from _momentum(path, module)
    if shape is not None:
        yield from _statistics(path, module, scheme, shape)


def _mismatch(
    path: str, module: Any, declared: Scheme, identification: Identification, shape: Sequence[int]
) -> Iterator[Finding]:
    mine = next((c for c in identification.candidates if c.scheme == declared), None)
    if mine is None or mine.fits:
        return
    name = type(module).__name__ if module is not None else "the call"
    best = identification.best
    instead = f" It fits '{best.scheme}': {best.name}." if best else " It fits no norm tried."
    yield Finding(
        "declared-mismatch",
        "error",
        f"The output is not what {name} says ('{declared}'): the largest difference is "
        f"{mine.residual:.2g}.{instead}",
        "Look for an overridden forward, or a hook that changes the output.",
        path,
    )


def _name(
    path: str, module: Any, scheme: Scheme, identification: Identification, shape: Sequence[int]
) -> Iterator[Finding]:
    kind = type(module)
    if kind.__module__.startswith(("torch.nn.", "axisnorm.")):
        return
    name = kind.__name__.lower().replace("_", "")
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    reduced, last = sizes.layout.reduced_axes, len(shape) - 1
    trailing = tuple(range(last + 1 - len(reduced), last + 1)) == reduced
    per_token = trailing and (not affine_axes(sizes) or affine_axes(sizes) == reduced)
    said = "LayerNorm" if "layernorm" in name else "RMSNorm" if "rmsnorm" in name else ""
    for word in ("BatchNorm", "InstanceNorm", "GroupNorm"):
        said = word if word.lower() in name else said
    what = in_words(scheme, shape)
    usual = scheme.scale == "auto" and scheme.correction == 0
    usual = usual and scheme.eps_placement == "variance"
    problems = []
    if said == "LayerNorm" and not scheme.center and usual and per_token:
        yield Finding(
            "class-name-lies",
            "note",
            f"{kind.__name__} is an RMSNorm: it subtracts no mean ('{scheme}').",
            "Port it as RMSNorm.",
            path,
        )
        return
    if said in ("LayerNorm", "RMSNorm"):
        if scheme.center != (said == "LayerNorm"):
            problems.append("subtracts a mean" if scheme.center else "subtracts no mean")
        if not per_token and reduced != (1,):
            problems.append(f"takes {what}")
    elif (said == "BatchNorm" and 0 not in reduced) or (
        said in ("InstanceNorm", "GroupNorm") and 0 in reduced
    ):
        problems.append(f"takes {what}")
    if said and scheme.correction:
        problems.append(f"divides the variance by n - {scheme.correction:g}")
    inside = scheme.replace(eps_placement="variance")
    others = [other.replace(eps=scheme.eps) for other in identification.indistinguishable]
    if said and scheme != inside and inside not in others:
        problems.append("adds eps outside the root")
    if said and scheme.scale != "auto":
        problems.append(f"divides by {scheme.scale}")
    if problems:
        yield Finding(
            "class-name-lies",
            "warning",
            f"This {kind.__name__} is not torch's {said}: it {' and '.join(problems)} "
            f"('{scheme}').",
            f"When porting its weights, use this scheme, not torch.nn.{said}.",
            path,
        )


def _eps(path: str, module: Any, scheme: Scheme) -> Iterator[Finding]:
    eps = scheme.eps
    if eps is None or 0 < eps <= 0.01:
        return
    if eps == 0:
        yield Finding("implausible-eps", "note", "eps is 0: a constant group divides by zero.",
                      "Give 1e-5.", path)  # fmt: skip
        return
    remedy = "Give 1e-5."
    channels = getattr(module, "num_features", None)
    if channels and eps == int(eps) and eps > 1 and channels % int(eps) == 0:
        remedy = (
            f"The second argument of {type(module).__name__} is eps. "
            f"If {int(eps)} groups were meant, use GroupNorm({int(eps)}, {channels})."
        )
    message = f"eps={eps:g} is added to variances"
    message += ": it decides the scale of the output." if eps > 0 else " and is negative."
    yield Finding("implausible-eps", "error", message, remedy, path)


def _momentum(path: str, module: Any) -> Iterator[Finding]:
    momentum = getattr(module, "momentum", None)
    if not hasattr(module, "running_mean") or momentum is None or not 0.9 <= momentum < 1:
        return
    smell = " with eps=0.001, Keras's defaults" if module.eps == 1e-3 else ""
    yield Finding(
        "framework-momentum",
        "warning",
        f"momentum={momentum:g}{smell}: in torch it is the weight of the new batch, so the "
        "running statistics follow nearly the last batch alone.",
        f"Give momentum={1 - momentum:.6g} for an average that keeps {momentum:g} of the old.",
        path,
    )


def _statistics(path: str, module: Any, scheme: Scheme, shape: Sequence[int]) -> Iterator[Finding]:
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    if scheme.statistics == "batch":
        shares_batch = 0 in sizes.layout.reduced_axes and len(shape) > 1
        if (
            module is not None
            and not module.training
            and shares_batch
            and hasattr(module, "running_mean")
        ):
            yield Finding(
                "batch-statistics-in-eval",
                "warning",
                "In eval mode it still takes the statistics of the batch: what a sample gives "
                "depends on the samples beside it.",
                "Keep running statistics (track_running_stats=True), or use a norm without "
                "them, such as GroupNorm.",
                path,
            )
        if sizes.group_size == 1 and scheme.center and sizes.num_groups > 0:
            yield Finding(
                "degenerate-statistics",
                "warning",
                f"Each element of {tuple(shape)} has a mean of its own: the output is the bias "
                "whatever the input.",
                "Check the axes of the input.",
                path,
            )
    channels = getattr(module, "num_features", None)
    if channels is not None and len(shape) >= 3 and shape[1] != channels == shape[-1]:
        yield Finding(
            "layout-mismatch",
            "warning",
            f"{type(module).__name__}({channels}) takes axis 1 for its channels, but axis "
            f"{len(shape) - 1} of {tuple(shape)} has {channels}: {in_words(scheme, shape)}.",
            "Transpose the input to (N, C, ...) and back.",
            path,
        )


def mixed_eps(norms: Sequence[tuple[str, float]]) -> Iterator[Finding]:
    """The finding that norms of one kind, given as (kind, eps), have several eps."""
    by_kind: dict[str, dict[float, int]] = {}
    for kind, eps in norms:
        counts = by_kind.setdefault(kind, {})
        counts[eps] = counts.get(eps, 0) + 1
    for kind, counts in by_kind.items():
        if len(counts) > 1:
            said = ", ".join(f"{eps:g} ({count} x)" for eps, count in sorted(counts.items()))
            yield Finding(
                "mixed-eps",
                "note",
                f"{kind} stands in this model with several eps: {said}.",
                "Check it against the model this one was ported from.",
            )
