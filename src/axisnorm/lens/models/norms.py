"""What an audit found, as data: a model's normalizations and what is suspicious about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...scheme import Scheme
from ..explain import statistics_dimensions
from ..identify import Identification, in_words
from ..result import Result
from .findings import Finding
from .parameters import Parameter

if TYPE_CHECKING:
    from .differences import Differences

__all__ = ["Audit", "Norm", "axis_names", "kind_of_norm", "shared_counts"]


def shared_counts(scheme: Scheme, shape: Sequence[int]) -> tuple[int, int]:
    """How many means there are at a shape, and how many elements share one.

    >>> shared_counts(Scheme.layer_norm(), (2, 3, 4))
    (6, 4)
    """
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    told = statistics_dimensions(sizes)
    counts = [1, 1]
    for dimension, length in enumerate(sizes.expanded):
        counts[dimension not in told] *= length
    return counts[0], counts[1]


def axis_names(scheme: Scheme, ndim: int) -> tuple[str, ...]:
    """A name for each axis of the input, from the notation; those that share a mean in brackets.

    >>> axis_names(Scheme.layer_norm(), 3), axis_names(Scheme.group_norm(2), 4)
    (('b', 's', '[d]'), ('n', '(g=2 [c])', '[h]', '[w]'))
    """
    axes = scheme.layout(ndim).axes
    taken = {part.name for axis in axes for part in axis}
    open_axes = [axis[0] for axis in axes if axis[0].ellipsis or axis[0].name.startswith("...")]
    leading = bool(open_axes) and axes[0][0] is open_axes[0]
    usual = {1: ("n",), 2: ("b", "s")} if leading else {
        1: ("l",), 2: ("h", "w"), 3: ("d", "h", "w"),
    }  # fmt: skip
    names = usual.get(len(open_axes), ())
    if not names or taken & set(names):
        names = tuple(f"a{i}" for i in range(len(open_axes)))
    own = iter(names)
    found = []
    for axis in axes:
        words = []
        for part in axis:
            name = next(own) if part in open_axes else part.name
            size = "" if part.size is None else f"={part.size}"
            words.append(f"[{name}{size}]" if part.reduced else f"{name}{size}")
        found.append(f"({' '.join(words)})" if len(axis) > 1 else words[0])
    return tuple(found)


def kind_of_norm(scheme: Scheme, ndim: int) -> str:
    """What the field calls a scheme of an input with so many axes.

    >>> kind_of_norm(Scheme.rms_norm(), 3), kind_of_norm(Scheme.batch_norm(), 4)
    ('RMSNorm', 'BatchNorm')
    """
    layout = scheme.layout(ndim)
    reduced = layout.reduced_axes
    if scheme.scale == "l2":
        return "L2 normalization"
    if any(len({part.reduced for part in axis}) > 1 for axis in layout.axes):
        return "GroupNorm" if scheme.center else "group RMSNorm"
    if len(reduced) == ndim > 1:
        return "norm of all elements"
    if not scheme.center:
        return "RMSNorm" if scheme.scale == "auto" else "uncentred norm"
    if 0 in reduced and ndim > 1:
        return "BatchNorm"
    if reduced == tuple(range(2, ndim)) and ndim > 3:
        return "InstanceNorm"
    if reduced == (1,) and ndim > 3:
        return "LayerNorm2d"
    return "LayerNorm"


@dataclass(frozen=True)
class Norm:
    """One normalization of a model, and what it was seen to compute."""

    path: str
    """The module's path; for a function, the path of the module that calls it and its name."""
    cls: str
    """The module's class, or the function's name."""
    kind: str
    """``"module"``, ``"function"`` (one operator), ``"fragment"`` (operators that compute a norm
    together) or ``"node"`` (of a graph)."""
    declared: Scheme | None
    """What the class and its arguments say; None for a class that is not torch's or ours."""
    scheme: Scheme | None
    """What it was shown to compute, None where nothing was."""
    identification: Identification | None
    """The schemes that were held against its input and output."""
    eps: float | None
    shape: tuple[int, ...] | None
    """Of the input, None if it did not run."""
    dtype: str | None
    affine_shape: tuple[int, ...]
    num_statistics: int | None
    """How many means there are at this input."""
    group_size: int | None
    """How many elements share one mean."""
    calls: int
    time_share: float | None
    """Its share of the forward pass's wall time, None where it was not measured."""
    findings: tuple[Finding, ...]
    nodes: tuple[str, ...] = ()
    """The graph's nodes or the operators that compute it, in order; empty for a module."""
    axes: tuple[str, ...] = ()
    """The names of the input's axes, from its scheme; those that share a mean in brackets."""
    parameters: tuple[Parameter, ...] = ()
    """Its weight, bias and running statistics, each as a summary."""

    @property
    def verified(self) -> bool:
        """Whether it was shown to compute what it declares, or, undeclared, what is said here."""
        return (
            self.scheme is not None
            and self.declared in (None, self.scheme)
            and not self.center_unclear
        )

    @property
    def center_unclear(self) -> bool:
        """Whether it declares nothing, and might as well subtract a mean as not."""
        found = self.identification
        return self.declared is None and found is not None and found.center_unclear

    @property
    def eps_undetermined(self) -> bool:
        """Whether nothing says its eps: neither its class nor this input."""
        return any(finding.code == "eps-undetermined" for finding in self.findings)

    @property
    def in_words(self) -> str:
        """What shares a mean, as in ``"one mean a token"``."""
        scheme = self.scheme or self.declared
        if scheme is None or self.shape is None:
            return ""
        if self.center_unclear:
            return "LayerNorm or RMSNorm (this input cannot tell)"
        return in_words(scheme, self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "class": self.cls,
            "kind": self.kind,
            "declared": str(self.declared) if self.declared else None,
            "scheme": str(self.scheme) if self.scheme else None,
            "verified": self.verified,
            "in_words": self.in_words,
            "identification": self.identification.to_dict() if self.identification else None,
            "eps": self.eps,
            "shape": list(self.shape) if self.shape is not None else None,
            "dtype": self.dtype,
            "affine_shape": list(self.affine_shape),
            "num_statistics": self.num_statistics,
            "group_size": self.group_size,
            "calls": self.calls,
            "time_share": self.time_share,
            "findings": [finding.to_dict() for finding in self.findings],
            "nodes": list(self.nodes),
            "axes": list(self.axes),
            "parameters": [parameter.to_dict() for parameter in self.parameters],
        }


@dataclass(frozen=True)
class Audit(Result):
    """Every normalization of one model at one input."""

    kind: ClassVar[str] = "audit"

    model: str
    """The model's class."""
    norms: tuple[Norm, ...]
    """In the order in which they first ran; those that did not run stand at the end."""
    findings: tuple[Finding, ...]
    """Those of the norms, in their order, and those of the model as a whole."""
    seconds: float
    """Of one forward pass: the median of up to seven, observed by two clock readings a norm."""
    source: str = "module"
    """What was read: ``"module"``, ``"transformers"``, ``"exported"`` (.pt2), ``"torchscript"``
    or ``"onnx"``."""

    @property
    def suspicious(self) -> bool:
        """Whether a finding is more than a note."""
        return any(finding.severity != "note" for finding in self.findings)

    def diff(self, other: Audit) -> Differences:
        """Compare two models norm by norm, as a port and its original.

        Norms are paired by their paths where the models have paths in common, and by execution
        order and structure else. Of each pair is said what is equal and what differs: in the
        words of :func:`axisnorm.compare`, and in the values of weights and running statistics.

        Args:
            other: the audit of the other model.

        >>> import torch, axisnorm
        >>> x = torch.randn(2, 3, 4)
        >>> a = axisnorm.audit(torch.nn.Sequential(torch.nn.LayerNorm(4)), x)
        >>> b = axisnorm.audit(torch.nn.Sequential(torch.nn.LayerNorm(4, eps=1e-3)), x)
        >>> a.diff(a).same, [part.name for part in a.diff(b).pairs[0].different]
        (True, ['constants'])
        """
        from .differences import differences

        return differences(self, other)

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            "model": self.model,
            "source": self.source,
            "seconds": self.seconds,
            "suspicious": self.suspicious,
            "norms": [norm.to_dict() for norm in self.norms],
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __repr__(self) -> str:
        return f"Audit({self.model}: {len(self.norms)} norms, {len(self.findings)} findings)"
